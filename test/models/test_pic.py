"""Own data exactly, others by their summaries: against dense, centralised PIC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    UpperConfidenceBound,
    qLogNoisyExpectedImprovement,
    qUpperConfidenceBound,
)
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.exceptions.errors import InputDataError
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths
from torch import Size, Tensor

from botorch_fed.errors import BasisMismatch, NumericalError
from botorch_fed.models import (
    AdditiveFeatures,
    BasisGP,
    FeatureMap,
    InducingFeatures,
    Summary,
    summarize,
)
from botorch_fed.models.features import PolynomialFeatures
from botorch_fed.models.pic import PartiallyIndependentGP
from botorch_fed.models.repair import repair_total
from test.cases import UNIT, normal, random_fourier, se, uniform

NOISE, MEAN = 0.02, 0.3
SIZES = (7, 5, 9)  # the first agent is the one that asks


def inducing() -> FeatureMap:
    # Condition 2e4: the features themselves, and so both formulas, are good to 1e-11.
    return InducingFeatures(se(0.25, 0.3, outputscale=1.5), uniform(8, 2, seed=5))


def trend_and_inducing() -> FeatureMap:
    trend = PolynomialFeatures(0.5, 0.5, scale=0.3, input_dim=2)
    return AdditiveFeatures([trend, inducing()], [range(2), range(2)])


with_residual = pytest.mark.parametrize("make_map", [inducing, trend_and_inducing])


def _agents() -> list[tuple[Tensor, Tensor]]:
    return [(uniform(n, 2, seed=n), normal(n, 1, seed=n)) for n in SIZES]


def _others(phi: FeatureMap) -> Summary:
    rest = [summarize(phi, *part, noise_var=NOISE, mean=MEAN) for part in _agents()[1:]]
    return sum(rest[1:], start=rest[0])


def _model(phi: FeatureMap, **kwargs: Any) -> PartiallyIndependentGP:
    X, Y = _agents()[0]
    if "train_Yvar" not in kwargs:
        kwargs.setdefault("noise_var", NOISE)
    kwargs.setdefault("summaries", [_others(phi)])
    return PartiallyIndependentGP(X, Y, feature_map=phi, mean=MEAN, **kwargs)


def _dense_pic(
    phi: FeatureMap, test_X: Tensor, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One kernel matrix over all data and the test points, which lie in the first block."""
    parts = _agents()
    n = sum(SIZES)
    # The own block comes last, next to the test points: one square of exact covariances.
    X = torch.cat([part[0] for part in parts[::-1]] + [test_X])
    Y = torch.cat([part[1] for part in parts[::-1]])
    K = phi(X) @ phi(X).mT
    ends = [SIZES[2], SIZES[2] + SIZES[1], len(X)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        K[start:end, start:end] = phi.covariance(X[start:end])
    variance = torch.full((n,), NOISE, dtype=torch.float64)
    if noise is not None:
        variance[-SIZES[0] :] = noise
    A = K[:n, :n] + torch.diag(variance)
    gain = torch.linalg.solve(A, K[:n, n:]).mT
    return MEAN + gain @ (Y - MEAN), K[n:, n:] - gain @ K[:n, n:]


def _assert_law(model: BasisGP, test_X: Tensor, mean: Tensor, covariance: Tensor) -> None:
    posterior: Any = model.posterior(test_X)
    torch.testing.assert_close(posterior.mean, mean, rtol=0, atol=1e-9)
    actual = posterior.distribution.covariance_matrix
    torch.testing.assert_close(actual, covariance, rtol=0, atol=1e-9)


def _assert_same_law(first: BasisGP, second: BasisGP, test_X: Tensor) -> None:
    posterior: Any = second.posterior(test_X)
    _assert_law(first, test_X, posterior.mean, posterior.distribution.covariance_matrix)


# ------------------------------------------------------------------ the law


@with_residual
def test_posterior_is_dense_pic_with_the_test_points_in_the_own_block(
    make_map: Callable[[], FeatureMap],
) -> None:
    phi = make_map()
    X, _ = _agents()[0]
    test_X = torch.cat([uniform(6, 2, seed=1), X[:2], X[3:4] + 0.01])
    _assert_law(_model(phi), test_X, *_dense_pic(phi, test_X))
    noise = 0.01 + 0.1 * uniform(SIZES[0], 1, seed=8)
    known = _model(phi, train_Yvar=noise)
    _assert_law(known, test_X, *_dense_pic(phi, test_X, noise.squeeze(-1)))
    # It is not PITC, which knows of own observations only what the basis carries.
    pitc = BasisGP(
        *_agents()[0], feature_map=phi, summaries=[_others(phi)], noise_var=NOISE, mean=MEAN
    )
    difference = pitc.posterior(X).mean - _model(phi).posterior(X).mean
    assert float(difference.abs().max()) > 0.01


@with_residual
def test_without_others_it_is_the_exact_gp(make_map: Callable[[], FeatureMap]) -> None:
    phi = make_map()
    X, Y = _agents()[0]
    test_X = uniform(6, 2, seed=1)
    A = phi.covariance(X) + NOISE * torch.eye(len(X)).double()
    gain = torch.linalg.solve(A, phi.covariance(X, test_X)).mT
    mean = MEAN + gain @ (Y - MEAN)
    covariance = phi.covariance(test_X) - gain @ phi.covariance(X, test_X)
    for summaries in [(), [Summary.zero(phi)]]:
        _assert_law(_model(phi, summaries=summaries), test_X, mean, covariance)


def test_far_from_own_points_and_over_fourier_features_it_is_pitc() -> None:
    def pitc(phi: FeatureMap, X: Tensor) -> BasisGP:
        Y = _agents()[0][1]
        others = [_others(phi)]
        return BasisGP(X, Y, feature_map=phi, summaries=others, noise_var=NOISE, mean=MEAN)

    X, _ = _agents()[0]
    phi, test_X = random_fourier(), uniform(6, 2, seed=1)
    _assert_same_law(_model(phi), pitc(phi, X), test_X)
    phi = InducingFeatures(se(0.1, 0.1), uniform(12, 2, seed=5))
    _assert_same_law(_model(phi), pitc(phi, X), test_X + 3)


def test_own_data_only_lower_the_variance_that_others_leave() -> None:
    phi, test_X = inducing(), uniform(40, 2, seed=1)
    variance = _model(phi).posterior(test_X).variance
    before = BasisGP.from_summary(_others(phi), feature_map=phi).posterior(test_X).variance
    assert bool((variance <= before + 1e-10).all())
    assert bool((variance > 0).all())


@pytest.mark.parametrize("q", [1, 3])
def test_batches_of_points_are_loops(q: int) -> None:
    model, X = _model(inducing()), uniform(4, 2, q, 2, seed=1)
    posterior = model.posterior(X)
    for i in range(4):
        one = model.posterior(X[i, 1])
        torch.testing.assert_close(posterior.mean[i, 1], one.mean, rtol=1e-9, atol=1e-9)
        covariance = posterior.distribution.covariance_matrix[i, 1]
        expected = one.distribution.covariance_matrix
        torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-9)


def test_gradients_to_points() -> None:
    model = _model(inducing())
    X = uniform(2, 2, 2, seed=1).requires_grad_()

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.posterior(x)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, (X,))


# ------------------------------------------------------------------ the own part of a total


@with_residual
def test_from_total_takes_the_own_part_out(make_map: Callable[[], FeatureMap]) -> None:
    phi, test_X = make_map(), uniform(6, 2, seed=1)
    X, Y = _agents()[0]
    own = summarize(phi, X, Y, noise_var=NOISE, mean=MEAN)
    total = _others(phi) + own
    sent = Summary.unpack(total.pack(), basis=phi.fingerprint)
    model = PartiallyIndependentGP.from_total(
        X, Y, total=sent, feature_map=phi, noise_var=NOISE, mean=MEAN
    )
    _assert_law(model, test_X, *_dense_pic(phi, test_X))
    # What was contributed need not be all that is known by now, nor under the same noise.
    noise = 0.01 + 0.1 * uniform(SIZES[0], 1, seed=8)
    early = summarize(phi, X[:4], Y[:4], noise_var=1.0, mean=MEAN, noise="iid")
    model = PartiallyIndependentGP.from_total(
        X, Y, total=_others(phi) + early, feature_map=phi, noise_var=noise, own=early, mean=MEAN
    )
    _assert_law(model, test_X, *_dense_pic(phi, test_X, noise.squeeze(-1)))


def test_a_total_rounded_to_a_public_grid_is_accepted_and_put_back() -> None:
    phi, test_X = inducing(), uniform(6, 2, seed=1)
    X, Y = _agents()[0]
    own = summarize(phi, X, Y, noise_var=NOISE, mean=MEAN)
    step = 2.0**-20
    rounded = (own.pack() / step).round() * step
    alone = Summary.unpack(rounded, basis=phi.fingerprint)
    # The others have no data at all: only rounding is left, with eigenvalues below zero.
    assert float(torch.linalg.eigvalsh((alone - own).gram).min()) < 0
    model = PartiallyIndependentGP.from_total(
        X, Y, total=alone, feature_map=phi, noise_var=NOISE, mean=MEAN
    )
    exact: Any = _model(phi, summaries=()).posterior(test_X)
    posterior = model.posterior(test_X)
    torch.testing.assert_close(posterior.mean, exact.mean, rtol=0, atol=1e-3)
    assert bool((posterior.variance > 0).all())


def test_a_total_without_the_own_part_is_refused() -> None:
    phi, (X, Y) = inducing(), _agents()[0]
    own = summarize(phi, X, Y, noise_var=NOISE, mean=MEAN)
    few = summarize(phi, X[:2], Y[:2], noise_var=NOISE, mean=MEAN)
    arguments: Any = {"feature_map": phi, "noise_var": NOISE, "mean": MEAN}
    for wrong in [few, Summary.zero(phi), replace(own, gram=own.gram * torch.nan)]:
        with pytest.raises(NumericalError, match=r"no sum of squares.*repair_total\(total - own\)"):
            PartiallyIndependentGP.from_total(X, Y, total=wrong, **arguments)
    with pytest.raises(BasisMismatch):
        PartiallyIndependentGP.from_total(X, Y, total=replace(own, basis="0" * 64), **arguments)
    with pytest.raises(InputDataError, match="noise_var must be positive"):
        PartiallyIndependentGP.from_total(X, Y, total=own, feature_map=phi, noise_var=-1.0)
    # What the message advises, for a total with noise.
    noise = 5 * normal(8, 8, seed=2)
    noisy = Summary(_others(phi).gram + own.gram + noise + noise.mT, own.moment, own.basis)
    with pytest.raises(NumericalError):
        PartiallyIndependentGP.from_total(X, Y, total=noisy, **arguments)
    model = _model(phi, summaries=[repair_total(noisy - own)])
    variance = model.posterior(uniform(40, 2, seed=1)).variance
    assert bool((variance > 0).all())
    assert bool((variance <= phi.outputscale + 1e-10).all())


def test_subtraction_undoes_addition() -> None:
    phi = inducing()
    first, second = (summarize(phi, *part, noise_var=NOISE) for part in _agents()[:2])
    back = first + second - second
    for name in ["gram", "moment", "square", "log_det"]:
        torch.testing.assert_close(getattr(back, name), getattr(first, name), rtol=1e-9, atol=1e-9)
    assert back.num_data == first.num_data
    packed = Summary.unpack(second.pack(), basis=phi.fingerprint)
    assert (first - packed).square is None
    with pytest.raises(TypeError):
        first - 1  # type: ignore[operator]


# ------------------------------------------------------------------ in BoTorch


@with_residual
def test_conditioning_equals_building_anew(make_map: Callable[[], FeatureMap]) -> None:
    phi = make_map()
    X, Y = _agents()[0]
    new_X, new_Y, test_X = uniform(3, 2, seed=5), normal(3, 1, seed=5), uniform(6, 2, seed=1)
    conditioned = _model(phi).condition_on_observations(new_X, new_Y)
    whole = PartiallyIndependentGP(
        torch.cat([X, new_X]),
        torch.cat([Y, new_Y]),
        feature_map=phi,
        summaries=[_others(phi)],
        noise_var=NOISE,
        mean=MEAN,
    )
    assert type(conditioned) is PartiallyIndependentGP
    _assert_same_law(conditioned, whole, test_X)
    _assert_same_law(
        PartiallyIndependentGP.from_summary(
            _others(phi), feature_map=phi, noise_var=NOISE, mean=MEAN
        )
        .condition_on_observations(X, Y)
        .condition_on_observations(new_X, new_Y),
        whole,
        test_X,
    )


def test_fantasies_are_conditioned_models() -> None:
    model, X, test_X = _model(inducing()), uniform(2, 3, 2, seed=5), uniform(6, 2, seed=1)
    fantasies = model.fantasize(X, SobolQMCNormalSampler(Size([4]), seed=0))
    posterior: Any = fantasies.posterior(test_X)
    assert posterior.mean.shape == (4, 2, 6, 1)
    Y = fantasies.train_targets[2, 1, -3:].unsqueeze(-1)
    one: Any = model.condition_on_observations(X[1], Y).posterior(test_X)
    torch.testing.assert_close(posterior.mean[2, 1], one.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(posterior.variance[2, 1], one.variance, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("known_noise", [False, True])
def test_acquisition_functions(known_noise: bool) -> None:
    X, Y = _agents()[0]
    noise = {"train_Yvar": torch.full_like(Y, NOISE)} if known_noise else {}
    model = _model(trend_and_inducing(), **noise)
    pending = uniform(2, 2, seed=8)
    for acquisition in [
        UpperConfidenceBound(model, beta=2.0),
        LogExpectedImprovement(model, best_f=Y.max()),
        qUpperConfidenceBound(model, beta=2.0, X_pending=pending),
        qLogNoisyExpectedImprovement(model, X, X_pending=pending),
        qLogNoisyExpectedImprovement(model, X, prune_baseline=True),
    ]:
        candidate, value = optimize_acqf(
            acquisition, UNIT, q=1, num_restarts=2, raw_samples=16, options={"maxiter": 5}
        )
        assert candidate.shape == (1, 2)
        assert bool(value.isfinite())


def test_paths_have_the_models_law() -> None:
    model, test_X, count = _model(inducing()), uniform(5, 2, seed=1), 6000
    X, _ = _agents()[0]
    points = torch.cat([test_X, X[:2]])
    posterior: Any = model.posterior(points)
    values = draw_matheron_paths(model, Size([count]))(points).detach()
    covariance = posterior.distribution.covariance_matrix.detach()
    variance = covariance.diagonal()
    # Five standard errors; 1,024 random features of what the basis misses err by 1.5 / 32.
    slack = 1.5 / 32
    error = (values.mean(dim=0) - posterior.mean.detach().squeeze(-1)).abs()
    assert bool((error < 5 * (variance / count).sqrt() + slack * variance).all())
    spread = (variance[:, None] * variance + covariance.square()).sqrt()
    error = (values.mT.cov() - covariance).abs()
    assert bool((error < 5 * spread / count**0.5 + slack * variance.max()).all())
    assert PathwiseThompsonSampling(model)(uniform(4, 1, 2)).shape == (4,)
