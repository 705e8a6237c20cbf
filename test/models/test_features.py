"""Accuracy and bad input of the feature maps; the common contract is in test/contracts."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from benchmarks.papers.published.features import PaperCosine
from botorch_fed.models import (
    AdditiveFeatures,
    BasisGP,
    FeatureMap,
    InducingFeatures,
    KLFeatures,
    LocalBlock,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    WeightPosterior,
    feature_map_from_tensors,
    summarize,
)
from botorch_fed.models.features import PolynomialFeatures
from botorch_fed.rng import generator
from test.cases import UNIT, normal, quadrature, se, uniform

LINE = UNIT[:, :1]


def _sup_error(phi: FeatureMap, X: Tensor) -> float:
    return float((phi(X) @ phi(X).mT - phi.covariance(X)).abs().max())


def _grid(d: int, n: int) -> Tensor:
    axis = torch.linspace(0, 1, n, dtype=torch.float64)
    return axis.unsqueeze(-1) if d == 1 else torch.cartesian_prod(axis, axis)


# ------------------------------------------------------------------ random features


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, math.inf])
def test_random_features_approximate_the_kernel(nu: float) -> None:
    kernel = StationaryKernel(nu, [0.3, 0.5], 2.0)
    for orthogonal in [False, True]:
        phi = RandomFourierFeatures.draw(
            kernel, 2000, generator=generator(0), orthogonal=orthogonal
        )
        # BoTorch's tolerance for its own features, times the prior variance.
        assert _sup_error(phi, uniform(30, 2)) < 2.0 * 5 * 2000**-0.5


def test_cos_sin_norm_is_exact() -> None:
    for phi in [
        RandomFourierFeatures.draw(se(0.1, 0.2, outputscale=3.0), 20, generator=generator(0)),
        QuadratureFourierFeatures.from_kernel(se(0.3, outputscale=3.0), LINE, tol=1e-2),
    ]:
        norms = phi(uniform(50, phi.input_dim)).square().sum(dim=-1)
        torch.testing.assert_close(norms, torch.full_like(norms, 3.0), rtol=1e-12, atol=0)


def test_paper_cosine_is_normalised_per_point() -> None:
    kernel, X = se(0.1), _grid(1, 101)
    errors = []
    for seed in range(40):
        phi = PaperCosine.draw(kernel, 100, generator=generator(seed))
        norms = phi(X).square().sum(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-12, atol=0)
        raw = (X @ phi.frequencies.mT + phi.phases).cos()
        torch.testing.assert_close(phi(X), raw / raw.norm(dim=-1, keepdim=True))
        errors.append(float((phi(X) @ phi(X).mT - kernel(X)).abs().mean()))
    # 0.07 at 100 features; sd of one draw 0.015, of the mean of 40 0.0024.
    assert sum(errors) / 40 == pytest.approx(0.068, abs=0.012)


@pytest.mark.parametrize("count", [0, -2, 7])
def test_odd_or_empty_random_features_are_refused(count: int) -> None:
    with pytest.raises(UnsupportedError, match="must be even and positive"):
        RandomFourierFeatures.draw(se(1.0), count, generator=generator(0))


# ------------------------------------------------------------------ quadrature features

# Sup error on [0, 1] by length scale (rows) and degree 8, 16, 32, 64.
ERRORS = {
    0.1: [1.0, 1.0, 0.38, 5.4e-10],
    0.2: [0.75, 4.2e-3, 2.4e-12, 1e-15],
    0.5: [4.9e-5, 1.3e-13, 1e-15, 1e-15],
    1.0: [1.5e-9, 1e-15, 1e-15, 1e-15],
}


@pytest.mark.parametrize("lengthscale", ERRORS)
@pytest.mark.parametrize("column", range(4))
def test_quadrature_error_table(lengthscale: float, column: int) -> None:
    kernel, degree, expected = se(lengthscale), 8 * 2**column, ERRORS[lengthscale][column]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputDataWarning)  # below the transition on purpose
        phi = QuadratureFourierFeatures.from_kernel(kernel, LINE, degree=degree)
    assert phi.num_features == degree  # folded: 2m becomes m
    error = _sup_error(phi, _grid(1, 401))
    assert error <= 1.5 * expected
    if expected > 1e-12:
        assert error >= expected / 1.5


@pytest.mark.parametrize(
    ("lengthscale", "tol", "d", "unfolded", "count"),
    [
        (0.1, 1e-8, 1, 130, 31),
        (0.1, 1e-2, 1, 86, 13),
        (0.03, 1e-8, 1, 778, 75),
        (0.2, 1e-4, 2, 968, 136),
    ],
)
def test_pruned_counts_and_tolerance(
    lengthscale: float, tol: float, d: int, unfolded: int, count: int
) -> None:
    kernel = se(*[lengthscale] * d)
    phi = QuadratureFourierFeatures.from_kernel(kernel, UNIT[:, :d], tol=tol)
    assert phi.num_features == count < unfolded
    assert _sup_error(phi, _grid(d, 401 if d == 1 else 21)) <= 1.2 * tol


def test_nodes_and_weights_follow_the_corrected_definition() -> None:
    m, ell = 7, 0.5
    phi = QuadratureFourierFeatures.from_kernel(se(ell), LINE, degree=m)
    # w_i = 2^(m-1) m! sqrt(pi) / (m^2 H_{m-1}(t_i)^2), a_i = w_i / sqrt(pi); pairs count twice.
    t = phi.frequencies.squeeze(-1) * ell / math.sqrt(2)
    hermite = [torch.ones_like(t), 2 * t]
    for k in range(1, m):
        hermite.append(2 * t * hermite[k] - 2 * k * hermite[k - 1])
    torch.testing.assert_close(hermite[m], torch.zeros_like(t), rtol=0, atol=1e-8)
    weights = 2 ** (m - 1) * math.factorial(m) / (m**2 * hermite[m - 1].square())
    folded = torch.where(t == 0, 1.0, 2.0) * weights
    torch.testing.assert_close(phi.amplitudes, folded, rtol=1e-12, atol=1e-14)


def test_folding_changes_nothing() -> None:
    phi = quadrature()
    X = uniform(20, 2)
    both = torch.cat([phi.frequencies, -phi.frequencies])
    a = torch.cat([phi.amplitudes, phi.amplitudes]) / 2
    angles = X @ both.mT
    waves = torch.cat([a.sqrt() * angles.cos(), a.sqrt() * angles.sin()], dim=-1)
    unfolded = 2.0 * waves @ waves.mT
    torch.testing.assert_close(phi(X) @ phi(X).mT, unfolded, rtol=0, atol=1e-13)


def test_three_dimensional_tensor_order() -> None:
    bounds = torch.tensor([[0.0] * 3, [1.0, 2.0, 0.5]], dtype=torch.float64)
    kernel = se(0.9, 2.5, 0.6)  # anisotropic: a wrong pairing of nodes and axes shows
    phi = QuadratureFourierFeatures.from_kernel(kernel, bounds, tol=1e-4)
    assert _sup_error(phi, uniform(60, 3) * bounds[1]) <= 1.2e-4


def test_wide_domains_scale_the_lengthscale() -> None:
    # A ball of radius 2 with l = 1 is l = 0.25 on the unit interval: degree 8 gives 0.18.
    bounds = torch.tensor([[-2.0], [2.0]], dtype=torch.float64)
    X = 4 * _grid(1, 401) - 2
    with pytest.warns(InputDataWarning, match="below the phase transition"):
        phi = QuadratureFourierFeatures.from_kernel(se(1.0), bounds, degree=8)
    assert _sup_error(phi, X) == pytest.approx(0.18, rel=0.1)
    phi = QuadratureFourierFeatures.from_kernel(se(1.0), bounds, degree=16)
    assert _sup_error(phi, X) == pytest.approx(3e-5, rel=0.1)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("tol", [0.1, 0.01])
def test_matern_quadrature_meets_its_tolerance(nu: float, tol: float) -> None:
    phi = QuadratureFourierFeatures.from_kernel(StationaryKernel(nu, [0.2]), LINE, tol=tol)
    assert _sup_error(phi, _grid(1, 401)) <= tol
    kernel = StationaryKernel(nu, [0.5, 0.9], 1.3, product=True)
    if nu > 0.5:
        phi = QuadratureFourierFeatures.from_kernel(kernel, UNIT, tol=tol)
        assert _sup_error(phi, _grid(2, 15)) <= 1.3 * tol


def test_matern_needs_product_form_in_several_dimensions() -> None:
    with pytest.raises(UnsupportedError, match="product"):
        QuadratureFourierFeatures.from_kernel(StationaryKernel(1.5, [1.0, 1.0]), UNIT, tol=0.1)


def test_a_grid_of_a_matern_kernel_serves_one_lengthscale() -> None:
    phi = QuadratureFourierFeatures.from_kernel(StationaryKernel(2.5, [0.1]), LINE, tol=1e-2)
    other = phi.with_hyperparameters(phi.lengthscale, 2 * phi.outputscale)
    assert torch.equal(other.frequencies, phi.frequencies)
    X = _grid(1, 101)
    torch.testing.assert_close(other(X), math.sqrt(2) * phi(X))
    for ell in [0.05, 0.7]:
        with pytest.raises(InputDataError, match="Expected length scales from"):
            phi.with_hyperparameters(torch.tensor([ell]).double(), torch.tensor(1.0).double())


def test_quadrature_bad_input() -> None:
    kernel = se(0.5)
    with pytest.raises(UnsupportedError, match="exactly one of"):
        QuadratureFourierFeatures.from_kernel(kernel, LINE)
    with pytest.raises(UnsupportedError, match="exactly one of"):
        QuadratureFourierFeatures.from_kernel(kernel, LINE, degree=4, tol=0.1)
    with pytest.raises(InputDataError, match="tol must lie between"):
        QuadratureFourierFeatures.from_kernel(kernel, LINE, tol=0.0)
    with pytest.raises(InputDataError, match="Lower bounds must lie below"):
        QuadratureFourierFeatures.from_kernel(kernel, LINE.flip(0), tol=0.1)
    bounds = torch.tensor([[0.0] * 10, [1.0] * 10]).double()
    with pytest.raises(UnsupportedError, match="too large: use AdditiveFeatures"):
        QuadratureFourierFeatures.from_kernel(se(*[0.3] * 10), bounds, tol=1e-3)
    phi = QuadratureFourierFeatures.from_kernel(kernel, LINE, tol=0.1)
    with pytest.raises(InputDataError, match="1 points lie outside the bounds"):
        phi.check_domain(torch.tensor([[0.5], [1.2]]).double())


# ------------------------------------------------------------------ Karhunen-Loève projection


@pytest.mark.parametrize(("count", "error"), [(15, 5e-2), (21, 2e-2), (28, 3e-3)])
def test_projection_needs_half_the_features(count: int, error: float) -> None:
    # The synthetic bandit's domain: the ball of radius 2 with l = 1.
    square = 4 * uniform(20_000, 2) - 2
    ball = square[square.norm(dim=-1) <= 2]
    bounds = torch.tensor([[-2.0, -2.0], [2.0, 2.0]]).double()
    base = QuadratureFourierFeatures.from_kernel(se(1.0, 1.0), bounds, tol=1e-6)
    phi = KLFeatures.from_map(base, ball, num_features=count)
    assert _sup_error(phi, ball[:800]) <= 1.2 * error  # 800 points and 12,500 of the measure
    assert bool((phi(ball).square().sum(dim=-1) <= 1 + 1e-12).all())
    by_tolerance = KLFeatures.from_map(base, ball, tol=error)
    for most in (4, 10_000):  # what is fewer
        both = KLFeatures.from_map(base, ball, num_features=most, tol=error)
        assert both.num_features == min(most, by_tolerance.num_features)
    assert by_tolerance.num_features <= count + 2
    assert _sup_error(by_tolerance, ball[:800]) <= error + 1e-6  # the base's own error


def test_projection_bad_input() -> None:
    base = quadrature()
    with pytest.raises(UnsupportedError, match="or both"):
        KLFeatures.from_map(base, uniform(50, 2))
    with pytest.raises(InputDataError, match="num_features must lie between"):
        KLFeatures.from_map(base, uniform(50, 2), num_features=0, tol=0.1)
    with pytest.raises(InputDataError, match="num_features must lie between"):
        KLFeatures.from_map(base, uniform(50, 2), num_features=10_000)
    with pytest.raises(InputDataError, match="orthonormal"):
        KLFeatures(base, torch.ones(base.num_features, 2).double())
    with pytest.raises(UnsupportedError, match="without residual"):
        KLFeatures(InducingFeatures(se(0.5, 0.5), uniform(3, 2)), torch.eye(3).double())


def test_projection_belongs_to_one_lengthscale() -> None:
    phi = KLFeatures.from_map(quadrature(), uniform(200, 2), num_features=8)
    other = phi.with_hyperparameters(phi.lengthscale, 2 * phi.outputscale)
    torch.testing.assert_close(other(uniform(3, 2)), 2**0.5 * phi(uniform(3, 2)))
    with pytest.raises(InputDataError, match="project a map with these by KLFeatures"):
        phi.with_hyperparameters(2 * phi.lengthscale, phi.outputscale)
    with pytest.raises(InputDataError, match=r"reference .* has"):
        KLFeatures.from_map(quadrature(), torch.full((3, 2), torch.nan).double(), tol=0.1)
    with pytest.raises(InputDataError, match="at least one point"):
        KLFeatures.from_map(quadrature(), uniform(0, 2), tol=0.1)


def test_a_kernel_of_other_dimension_is_refused() -> None:
    kernel, bounds = se(1.0), torch.tensor([[0.0] * 3, [1.0] * 3], dtype=torch.float64)
    match = "The kernel has 1 length scales but the inputs have 3"
    with pytest.raises(InputDataError, match=match):
        RandomFourierFeatures.draw(kernel, 10, generator=generator(0), input_dim=3)
    with pytest.raises(InputDataError, match=match):
        QuadratureFourierFeatures.from_kernel(kernel, bounds, tol=0.1)
    with pytest.raises(InputDataError, match=match):
        InducingFeatures(kernel, uniform(5, 3))


def test_refitting_keeps_a_given_jitter() -> None:
    phi = InducingFeatures(se(0.3, 0.3), uniform(5, 2), jitter=1e-7)
    assert phi.with_hyperparameters(phi.lengthscale * 1.1, phi.outputscale).jitter == 1e-7


# ------------------------------------------------------------------ sums and supports


def test_additive_kernel_is_the_sum() -> None:
    first, second, X = se(0.3, outputscale=0.4), se(0.5, 0.6, outputscale=0.6), uniform(9, 3)
    parts = [
        QuadratureFourierFeatures.from_kernel(first, LINE, tol=1e-6),
        QuadratureFourierFeatures.from_kernel(second, UNIT, tol=1e-6),
    ]
    phi = AdditiveFeatures(parts, [[1], [2, 0]])
    expected = first(X[:, [1]]) + second(X[:, [2, 0]])
    torch.testing.assert_close(phi.covariance(X), expected)
    torch.testing.assert_close(phi(X) @ phi(X).mT, expected, rtol=0, atol=3e-6)
    norms = phi(X).square().sum(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-12, atol=0)


def test_additive_waves_are_those_of_the_parts() -> None:
    X = uniform(5, 3).unflatten(0, (5, 1))
    parts = [
        QuadratureFourierFeatures.from_kernel(se(0.4), LINE, degree=9),  # with a constant
        RandomFourierFeatures.draw(se(0.3, 0.6), 8, generator=generator(0)),
    ]
    phi, groups = AdditiveFeatures(parts, [[2], [1, 0]]), ([2], [1, 0])
    expected = torch.cat(
        [part(X[..., group]) for part, group in zip(parts, groups, strict=True)], dim=-1
    )
    torch.testing.assert_close(phi(X), expected, rtol=1e-14, atol=1e-14)
    copy = feature_map_from_tensors(phi.to_tensors()).to("cpu")
    torch.testing.assert_close(copy(X), phi(X), rtol=0, atol=0)
    ell = phi.lengthscale.clone().requires_grad_()
    moved = phi.with_hyperparameters(ell, phi.outputscale)
    (slope,) = torch.autograd.grad(moved(X).square().sin().sum(), ell)
    assert bool((slope != 0).all())
    torch.testing.assert_close(moved(X), expected)


def wave_maps() -> dict[str, FeatureMap]:
    """Sums of waves of two inputs, and a map that is none."""
    line = QuadratureFourierFeatures.from_kernel(se(0.4), LINE, degree=9)  # with a constant
    every = RandomFourierFeatures.draw(se(0.3, 0.6), 8, generator=generator(0))
    both = AdditiveFeatures([line, line, every], [[1], [0], [0, 1]])
    return {
        "random": every,
        "sum": both,
        "leading": KLFeatures.from_map(both, uniform(64, 2), num_features=5),
        "polynomial": PolynomialFeatures(0.5, 0.5, input_dim=2),
    }


@pytest.mark.parametrize("name", wave_maps())
def test_a_function_as_waves(name: str) -> None:
    phi, X = wave_maps()[name], uniform(6, 2)
    weights = torch.linspace(-1, 2, phi.num_features, dtype=torch.float64)
    waves = phi.as_waves(weights)
    assert (waves is None) == (name == "polynomial")
    if waves is not None:
        frequencies, cosines, sines = waves
        angles = X @ frequencies.mT
        found = angles.cos() @ cosines + angles.sin() @ sines
        torch.testing.assert_close(found, phi(X) @ weights)


def test_additive_waves_keep_gradients() -> None:
    X = uniform(4, 2)
    parts = [RandomFourierFeatures.draw(se(0.3), 8, generator=generator(k)) for k in range(2)]
    phi = AdditiveFeatures(parts)
    with torch.inference_mode():
        phi(X)
    points = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(phi(points).sum(), points)
    assert bool((slope != 0).all())
    scale = phi.outputscale.clone().requires_grad_()
    moved = phi.with_hyperparameters(phi.lengthscale, scale)
    with torch.no_grad():
        moved(X)
    (slope,) = torch.autograd.grad(moved(X).square().sum(), scale)
    assert bool((slope > 0).all())


def test_additive_bad_input() -> None:
    part = QuadratureFourierFeatures.from_kernel(se(0.5), LINE, tol=0.1)
    with pytest.raises(InputDataError, match="at least one"):
        AdditiveFeatures([])
    with pytest.raises(InputDataError, match="must name 1 different inputs"):
        AdditiveFeatures([part], [[0, 1]])
    with pytest.raises(InputDataError, match="one group per map"):
        AdditiveFeatures([part], [[0], [1]])


def test_inducing_points_reproduce_the_kernel_on_themselves() -> None:
    Z = uniform(12, 2)
    phi = InducingFeatures(se(0.3, 0.3), Z)
    torch.testing.assert_close(phi(Z) @ phi(Z).mT, phi.covariance(Z), rtol=0, atol=1e-7)
    assert float(phi.residual(Z).abs().max()) < 1e-7


def test_inducing_fingerprint_covers_points_kernel_and_jitter() -> None:
    Z = uniform(6, 2)
    maps = [
        InducingFeatures(se(0.3, 0.3), Z),
        InducingFeatures(se(0.3, 0.31), Z),
        InducingFeatures(se(0.3, 0.3), Z.flip(0)),
        InducingFeatures(se(0.3, 0.3), Z, jitter=1e-8),
    ]
    assert len({phi.fingerprint for phi in maps}) == 4


def test_more_inducing_points_than_float64_separates() -> None:
    Z = torch.linspace(0, 1, 60, dtype=torch.float64).unsqueeze(-1)
    with pytest.warns(NumericalWarning, match=r"of the 60 inducing points are determined"):
        phi = InducingFeatures(se(1.0), Z)
    # Still a valid basis: never more than the prior variance, and the kernel to the jitter.
    X = uniform(40, 1)
    assert bool((phi(X).square().sum(dim=-1) <= 1 + 1e-9).all())
    torch.testing.assert_close(phi(X) @ phi(X).mT, phi.covariance(X), rtol=0, atol=1e-7)


def test_inducing_bad_input() -> None:
    Z = uniform(4, 2)
    with pytest.raises(InputDataError, match="1 of the 5 inducing points are exact copies"):
        InducingFeatures(se(0.3, 0.3), torch.cat([Z, Z[:1]]))
    damaged = Z.clone()
    damaged[0, 1] = torch.nan
    with pytest.raises(InputDataError, match=r"has 1 NaN and 0 infinite"):
        InducingFeatures(se(0.3, 0.3), damaged)
    with pytest.raises(BotorchTensorDimensionError, match="`S x d` with S >= 1"):
        InducingFeatures(se(0.3, 0.3), Z[:0])
    with pytest.raises(InputDataError, match="jitter must lie"):
        InducingFeatures(se(0.3, 0.3), Z, jitter=1.0)
    with pytest.warns(InputDataWarning, match="promoted to float64"):
        InducingFeatures(se(0.3, 0.3), Z.float())


# ------------------------------------------------------------------ polynomials


def test_polynomial_features_are_the_monomials_in_order() -> None:
    centre = torch.tensor([0.5, 1.0, -2.0]).double()
    phi = PolynomialFeatures(centre, 2.0, constant_scale=7.0, scale=0.5)
    X = uniform(4, 3)
    u, v, w = ((X - centre) / 2).unbind(dim=-1)
    columns = [torch.full_like(u, 7.0), u, v, w]
    columns += [u**2 / math.sqrt(2), v**2 / math.sqrt(2), w**2 / math.sqrt(2), u * v, u * w, v * w]
    torch.testing.assert_close(phi(X), 0.5 * torch.stack(columns, dim=-1), rtol=1e-13, atol=1e-13)
    assert phi.num_features == 10
    assert PolynomialFeatures(0.0, 1.0).num_features == 3
    assert PolynomialFeatures(0.0, 1.0, input_dim=10).num_features == 66


def test_polynomial_kernel_is_its_inner_product_and_prefers_no_direction() -> None:
    phi = PolynomialFeatures(0.3, 0.7, scale=1.3, input_dim=4)
    X1, X2 = uniform(2, 5, 4), uniform(3, 4, seed=1)
    expected = phi(X1) @ phi(X2).mT
    torch.testing.assert_close(phi.covariance(X1, X2), expected, rtol=1e-13, atol=1e-13)
    rotation = torch.linalg.qr(normal(4, 4)).Q
    turned = 0.3 + (X1 - 0.3) @ rotation
    torch.testing.assert_close(phi.covariance(turned), phi.covariance(X1), rtol=1e-12, atol=1e-12)
    corner = torch.full((1, 4), 1.0).double()
    torch.testing.assert_close(phi.covariance(corner).squeeze(), phi.outputscale)


def test_polynomial_features_fit_every_quadratic() -> None:
    phi = PolynomialFeatures(0.5, 0.5, input_dim=2)
    X, test_X = uniform(20, 2), uniform(30, 2, seed=1)

    def quadratic(x: Tensor) -> Tensor:
        return (3 + x[:, :1] - 2 * x[:, 1:]) * (1 - x[:, :1] + x[:, 1:])

    total = summarize(phi, X, quadratic(X), noise_var=1e-8)
    location, _ = WeightPosterior.from_total(total).predict(phi(test_X))
    torch.testing.assert_close(location, quadratic(test_X), rtol=0, atol=1e-6)


def test_polynomial_box_is_fixed() -> None:
    phi = PolynomialFeatures(0.5, 0.5, input_dim=2)
    with pytest.raises(InputDataError, match="half width of the box"):
        phi.with_hyperparameters(2 * phi.lengthscale, phi.outputscale)
    other = phi.with_hyperparameters(phi.lengthscale, 4 * phi.outputscale)
    torch.testing.assert_close(other.scale, 2 * phi.scale)
    torch.testing.assert_close(other.outputscale, 4 * phi.outputscale)


def test_polynomial_bad_input() -> None:
    for centre, half_width in [
        (torch.zeros(2).double(), torch.ones(3).double()),
        (torch.zeros(2, 1).double(), 1.0),
        (torch.zeros(0).double(), 1.0),
    ]:
        with pytest.raises(BotorchTensorDimensionError, match="centre and half_width"):
            PolynomialFeatures(centre, half_width)
    with pytest.raises(BotorchTensorDimensionError, match="input_dim=3"):
        PolynomialFeatures(torch.zeros(2).double(), 1.0, input_dim=3)
    with pytest.raises(BotorchTensorDimensionError, match="scale must be one number"):
        PolynomialFeatures(0.0, 1.0, scale=torch.ones(2).double())
    for name in ["half_width", "constant_scale", "scale"]:
        arguments = {"half_width": 1.0, name: 0.0}
        with pytest.raises(InputDataError, match=f"{name} must be positive"):
            PolynomialFeatures(0.0, **arguments)
    with pytest.raises(InputDataError, match=r"centre .* has 1 NaN"):
        PolynomialFeatures(math.nan, 1.0)


def test_a_trend_and_a_support_set_work_everywhere() -> None:
    # The kernel of both parts exactly, from statistics over both bases.
    trend = PolynomialFeatures(0.5, 0.5, scale=0.3, input_dim=2)
    phi = AdditiveFeatures(
        [trend, InducingFeatures(se(0.4, 0.6), uniform(8, 2, seed=5))], [range(2), range(2)]
    )
    X, Y, test_X = uniform(15, 2), normal(15, 1), uniform(6, 2, seed=1)
    own, others = slice(0, 6), slice(6, 15)
    # Dense PITC: the two agents' blocks are exact, all else goes through the bases.
    everything = torch.cat([X, test_X])
    K = phi(everything) @ phi(everything).mT
    for rows in [own, others, slice(15, None)]:
        K[rows, rows] = phi.covariance(everything[rows])
    A = K[:15, :15] + 0.02 * torch.eye(15).double()
    gain = torch.linalg.solve(A, K[:15, 15:]).mT
    mean, covariance = gain @ Y, K[15:, 15:] - gain @ K[:15, 15:]

    block = LocalBlock.from_data(phi, X[own], Y[own], noise_var=0.02)
    received = summarize(phi, X[others], Y[others], noise_var=0.02)
    model = BasisGP(X[own], Y[own], feature_map=phi, summaries=[received], noise_var=0.02)
    rebuilt = feature_map_from_tensors(phi.to_tensors())
    for other in [
        model,
        BasisGP.from_summary(block.summary + received, feature_map=phi),
        BasisGP.from_summary(received, feature_map=rebuilt, noise_var=0.02)
        .eval()
        .condition_on_observations(X[own], Y[own]),
    ]:
        posterior = other.posterior(test_X)
        torch.testing.assert_close(posterior.mean, mean, rtol=0, atol=1e-9)
        actual = posterior.distribution.covariance_matrix
        torch.testing.assert_close(actual, covariance, rtol=0, atol=1e-9)
        assert posterior.rsample(torch.Size([3])).shape == (3, 6, 1)
    assert model.sample_weights(torch.Size([3]), generator=generator(0)).shape == (3, 14)
