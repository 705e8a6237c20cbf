"""Laws of drawn functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.utils.sampling import optimize_posterior_samples
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from botorch_fed.models import (
    BasisGP,
    FeatureMap,
    RandomFourierFeatures,
    draw_path,
    summarize,
)
from botorch_fed.rng import generator
from test.cases import UNIT, additive, inducing, normal, quadrature, random_fourier, se, uniform

COUNT = 8000
NOISE = 0.05


def _data(n: int = 12) -> tuple[Tensor, Tensor]:
    X = uniform(n, 2)
    return X, (5 * X).sin().sum(dim=-1, keepdim=True) + 0.2 * normal(n, 1)


def _assert_law(values: Tensor, posterior: Any, *, slack: float = 0.0) -> None:
    """Mean and covariance of `COUNT x n` values within five standard errors.

    The mean of pathwise draws is exact whatever the features; the covariance gets a slack.
    """
    mean = posterior.mean.detach().squeeze(-1)
    covariance = posterior.distribution.covariance_matrix.detach()
    variance = covariance.diagonal()
    error = (values.mean(dim=0) - mean).abs()
    assert bool((error < 5 * (variance / len(values)).sqrt()).all())
    spread = (variance[:, None] * variance + covariance.square()).sqrt()
    error = (values.T.cov() - covariance).abs() - slack
    assert bool((error < 5 * spread / math.sqrt(len(values))).all())


def _kernel(matern: bool = False) -> ScaleKernel:
    base = MaternKernel(2.5, ard_num_dims=2) if matern else RBFKernel(ard_num_dims=2)
    kernel = ScaleKernel(base).double()
    kernel.outputscale, base.lengthscale = 1.4, torch.tensor([[0.4, 0.6]])
    return kernel


@pytest.mark.parametrize("make", [random_fourier, quadrature, additive, inducing])
@pytest.mark.parametrize("transformed", [False, True])
def test_matheron_paths_have_the_models_law(
    make: Callable[[], FeatureMap], transformed: bool
) -> None:
    X, Y = _data()
    kwargs: dict[str, Any] = {}
    bounds = UNIT
    if transformed:
        bounds = torch.tensor([[-1.0, 0.0], [3.0, 10.0]]).double()
        X, Y = bounds[0] + X * (bounds[1] - bounds[0]), 10 + 4 * Y
        kwargs = {
            "input_transform": Normalize(2, bounds=bounds),
            "outcome_transform": Standardize(m=1),
        }
    model = BasisGP(X, Y, feature_map=make(), noise_var=NOISE, mean=0.3, **kwargs)
    test_X = bounds[0] + uniform(6, 2, seed=4) * (bounds[1] - bounds[0])
    values = draw_matheron_paths(model, torch.Size([COUNT]))(test_X)
    assert values.shape == (COUNT, 6)
    # What inducing points miss is drawn by 1,024 random features: error about 1024^-1/2 of it.
    scale = float(Y.std()) if transformed else 1.0
    _assert_law(values, model.posterior(test_X), slack=0.03 * scale**2 if make is inducing else 0.0)


@pytest.mark.parametrize("matern", [False, True])
@pytest.mark.parametrize("known_noise", [False, True])
def test_draw_path_has_the_exact_gps_law(matern: bool, known_noise: bool) -> None:
    X, Y = _data()
    Yvar = (0.02 + uniform(12, 1)) if known_noise else None
    bounds = torch.tensor([[-1.0, 0.0], [3.0, 10.0]]).double()
    model = SingleTaskGP(
        bounds[0] + X * (bounds[1] - bounds[0]),
        10 + 4 * Y,
        Yvar,
        covar_module=_kernel(matern),
        input_transform=Normalize(2, bounds=bounds),
    )
    if not known_noise:
        model.likelihood.noise = NOISE
    model.mean_module.initialize(constant=0.4)
    test_X = bounds[0] + uniform(6, 2, seed=4) * (bounds[1] - bounds[0])
    path = draw_path(model, torch.Size([COUNT]), generator=generator(1))
    # 1,024 features in the prior: error about 1024^-1/2 of the prior variance.
    prior_variance = 1.4 * float(10 + 4 * Y.std() - 10) ** 2
    _assert_law(path(test_X), model.posterior(test_X), slack=0.06 * prior_variance)


def test_features_starve_and_paths_do_not() -> None:
    # 100 points in 20 clusters and 100 features: where the exact sd exceeds 0.5, weight space has
    # lost more than a fifth of it, the path almost nothing.
    X = (uniform(20, 1).repeat(5, 1) + 0.01 * normal(100, 1)).clamp(0, 1)
    Y = (20 * X).sin()
    test_X = torch.linspace(0, 1, 200, dtype=torch.float64).unsqueeze(-1)
    kernel = se(0.03)
    k = kernel(test_X, X)
    K = kernel(X) + 0.01 * torch.eye(100).double()
    exact = (1 - (k * torch.linalg.solve(K, k.mT).mT).sum(dim=-1)).clamp_min(0).sqrt()
    far = exact > 0.5
    own, pathwise = [], []
    for seed in range(8):
        phi = RandomFourierFeatures.draw(kernel, 100, generator=generator(seed))
        model = BasisGP(X, Y, feature_map=phi, noise_var=0.01)
        values = draw_path(model, torch.Size([400]), generator=generator(seed, "path"))(test_X)
        pathwise.append(float(values.std(dim=0)[far].mean() / exact[far].mean()))
        with torch.no_grad():
            variance = model.posterior(test_X).variance.squeeze(-1)
        own.append(float(variance.sqrt()[far].mean() / exact[far].mean()))
    assert sum(pathwise) / 8 == pytest.approx(1.0, abs=0.06)
    assert sum(own) / 8 < 0.8


def _short_kernel() -> RBFKernel:
    kernel = RBFKernel(ard_num_dims=2).double()
    kernel.lengthscale = torch.tensor([[0.3, 0.3]])
    return kernel


@pytest.mark.parametrize("own", [False, True])
def test_pathwise_mean_without_randomness_is_the_exact_mean(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, Y = _data(30)
    stream = generator(0)
    phi = RandomFourierFeatures.draw(se(0.3, 0.3), 40, generator=generator(0))
    exact = SingleTaskGP(X, Y, covar_module=_short_kernel(), outcome_transform=None)
    exact.likelihood.noise = 1e-2
    exact.mean_module.initialize(constant=0.1)
    model = BasisGP(X, Y, feature_map=phi, noise_var=1e-2, mean=0.1) if own else exact
    monkeypatch.setattr(stream, "normal", lambda *shape: torch.zeros(*shape).double())
    path = draw_path(model, feature_map=phi, generator=stream)
    test_X = uniform(20, 2, seed=4)
    expected = exact.posterior(test_X).mean.squeeze(-1)
    # GPyTorch holds its noise and length scale in the digits of float32.
    torch.testing.assert_close(path(test_X), expected, rtol=0, atol=1e-6)
    K = se(0.3, 0.3)(X) + 1e-2 * torch.eye(30).double()
    dense = 0.1 + se(0.3, 0.3)(test_X, X) @ torch.linalg.solve(K, Y - 0.1)
    if own:
        torch.testing.assert_close(path(test_X), dense.squeeze(-1), rtol=0, atol=1e-10)


def test_paths_are_reproducible_and_survive_refitting() -> None:
    X, Y = _data()
    model = BasisGP(X, Y, feature_map=random_fourier(), noise_var=NOISE)
    test_X = uniform(5, 2, seed=2)
    path = draw_path(model, generator=generator(3, 1, "own"))
    before = path(test_X)
    assert before.shape == (5,)
    assert torch.equal(draw_path(model, generator=generator(3, 1, "own"))(test_X), before)
    matheron = draw_matheron_paths(model, torch.Size([2]))
    values = matheron(test_X)
    model.mean_module.initialize(constant=5.0)
    model.likelihood.noise = 1.0
    assert torch.equal(path(test_X), before)
    assert torch.equal(matheron(test_X), values)


def test_paths_optimise() -> None:
    model = BasisGP(*_data(), feature_map=random_fourier(), noise_var=NOISE)
    path = draw_path(model, torch.Size([2]), generator=generator(0))
    X_best, f_best = optimize_posterior_samples(path, UNIT, raw_samples=64, num_restarts=4)
    assert X_best.shape == (2, 2)
    assert bool((f_best.squeeze(-1) >= path(uniform(500, 2)).amax(dim=-1) - 1e-3).all())
    X = uniform(3, 2).requires_grad_()
    assert torch.autograd.gradcheck(path, (X,))


def test_what_draw_path_refuses() -> None:
    X, Y = _data()
    phi = random_fourier()
    received = [summarize(phi, X, Y, noise_var=NOISE)]
    for model in [
        BasisGP(X, Y, feature_map=inducing()),
        BasisGP(X, Y, feature_map=phi, summaries=received),
    ]:
        with pytest.raises(UnsupportedError, match="draw_matheron_paths"):
            draw_path(model)
    model = BasisGP(X, Y, feature_map=phi)
    short = RandomFourierFeatures.draw(se(0.1, 0.1), 40, generator=generator(0))
    for prior in [inducing(), short]:
        with pytest.raises(UnsupportedError, match="Fourier features of the model's kernel"):
            draw_path(BasisGP(X[:1], Y[:1], feature_map=phi), feature_map=prior)
        with pytest.raises(UnsupportedError, match="Fourier features of the model's kernel"):
            draw_path(model, feature_map=prior)
    with pytest.raises(UnsupportedError, match="one output and no batch dimensions"):
        draw_path(BasisGP(X, Y.expand(12, 2), feature_map=phi))
    assert draw_path(BasisGP(X[:0], Y[:0], feature_map=phi), torch.Size([3]))(X).shape == (3, 12)
