"""What others say as the prior of a site's own model: scales cancel, and trust is earned."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.optim.optimize import optimize_acqf
from torch import Tensor

from botorch_fed.models.earned_prior import (
    EarnedPosterior,
    PriorFunction,
    fit_earned,
    project,
    projection,
    reference_points,
)
from botorch_fed.models.features import FeatureMap, WarpedFeatures
from botorch_fed.models.local_gp import Array
from botorch_fed.models.warp import LogWarp
from test.cases import UNIT, normal, random_fourier, uniform, warped

PHI = random_fourier()
OFFSETS = torch.tensor([0.01, 0.0], dtype=torch.float64)
WAYS = pytest.mark.parametrize(
    ("with_prior", "offsets"),
    [(False, None), (True, None), (False, OFFSETS), (True, OFFSETS)],
    ids=["alone", "prior", "warp", "both"],
)


def hill(X: Tensor) -> Tensor:
    """The function that the shared basis holds best: one of its own, `n x 1`."""
    return 5 + 40 * weights_of(random_prior(), X).unsqueeze(-1)


@cache
def random_prior(seed: int = 0) -> PriorFunction:
    prior = PriorFunction.of_weights(PHI, normal(PHI.num_features, seed=seed))
    assert prior is not None
    return prior


def weights_of(prior: PriorFunction, X: Tensor) -> Tensor:
    return prior(X)


def negated(prior: PriorFunction) -> PriorFunction:
    return replace(prior, weights=-prior.weights, centre=-prior.centre)


def history(n: int, *, seed: int = 0, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    X = uniform(n, 2, seed=seed)
    return X, hill(X) + 40 * noise * normal(n, 1, seed=seed)


@cache
def posterior(with_prior: bool, warp: bool = False, n: int = 8) -> EarnedPosterior:
    prior = random_prior(1) if with_prior else None
    return fit_earned(*history(n), prior, log_warp=LogWarp(OFFSETS) if warp else None)


# ------------------------------------------------------------------ a prior function


@pytest.mark.parametrize("phi", [PHI, WarpedFeatures(PHI, OFFSETS)], ids=["waves", "others"])
def test_the_slope_of_a_prior_function(phi: FeatureMap) -> None:
    prior = PriorFunction.of_weights(phi, normal(PHI.num_features, seed=3))
    assert prior is not None
    X = uniform(7, 2).requires_grad_()
    values = prior(X)
    (slope,) = torch.autograd.grad(values.sum(), X)
    found, found_slope = prior.with_slope(X.detach().numpy())
    np.testing.assert_allclose(found, values.detach().numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(prior.values(X.detach()), found, rtol=0, atol=1e-14)
    np.testing.assert_allclose(found_slope, slope.numpy(), rtol=0, atol=1e-11)


def test_a_prior_function_is_standardised_over_the_cube() -> None:
    values = random_prior().values(reference_points(2))
    assert values.mean() == pytest.approx(0.0, abs=1e-9)
    assert values.std(ddof=1) == pytest.approx(1.0, rel=1e-9)
    assert float(reference_points(2).amin()) >= 0
    assert float(reference_points(2).amax()) <= 1
    assert torch.equal(reference_points(2), reference_points(2))


@pytest.mark.parametrize("factor", [2.0**-400, 2.0**-9, 2.0**9, 2.0**400])
def test_a_stretch_by_a_power_of_two_changes_nothing(factor: float) -> None:
    prior = PriorFunction.of_weights(PHI, factor * normal(PHI.num_features))
    assert prior is not None
    assert torch.equal(prior.weights, random_prior().weights)
    assert prior.centre == random_prior().centre


@pytest.mark.parametrize("factor", [1e-200, 1e-4, 3.0, 1e4, 1e200])
def test_a_stretch_changes_nothing(factor: float) -> None:
    prior = PriorFunction.of_weights(PHI, factor * normal(PHI.num_features))
    assert prior is not None
    X = uniform(50, 2)
    torch.testing.assert_close(prior(X), random_prior()(X), rtol=0, atol=1e-10)


def test_a_shift_changes_nothing() -> None:
    # A constant is nearly in the span of the basis: what it adds is subtracted.
    flat = project(lambda X: np.ones(len(X)), PHI)
    shifted = PriorFunction.of_weights(PHI, normal(PHI.num_features) + 3 * flat)
    assert shifted is not None
    X = uniform(200, 2)
    error = PHI(X) @ flat - 1
    expected = random_prior()(X)
    # The projection is not exact; what remains of it is all that may differ.
    assert float((shifted(X) - expected).abs().max()) < 10 * float(error.abs().max()) + 1e-9


def test_what_is_the_same_everywhere_says_nothing() -> None:
    assert PriorFunction.of_weights(PHI, torch.zeros(PHI.num_features).double()) is None
    # Weights that the basis cannot see: of a feature that is the same everywhere.
    other = warped()
    unseen = torch.linalg.svd(other(uniform(400, 2)), full_matrices=True)[2][-1]
    size = float((other(reference_points(2)) @ unseen).std() / unseen.abs().max())
    assert (PriorFunction.of_weights(other, unseen) is None) == (size <= 1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_none_are_refused(bad: float) -> None:
    weights = normal(PHI.num_features)
    weights[3] = bad
    with pytest.raises(InputDataError):
        PriorFunction.of_weights(PHI, weights)


def test_weights_of_another_length_are_refused() -> None:
    with pytest.raises(BotorchTensorDimensionError, match="weights"):
        PriorFunction.of_weights(PHI, normal(PHI.num_features - 1))


def test_a_projection_is_the_ridge_regression() -> None:
    weights = project(lambda X: np.sin(5 * X.numpy()[:, 0]), PHI)
    reference, _ = projection(PHI)
    Phi, R = PHI(reference), len(reference)
    target = torch.sin(5 * reference[:, 0])
    gradient = Phi.mT @ (Phi @ weights - target) / R + 1e-4 * weights
    assert float(gradient.abs().max()) < 1e-10
    error = Phi @ weights - target
    assert float(error.std()) < 0.1  # and the basis holds a smooth function


# ------------------------------------------------------------------ BoTorch's model


@WAYS
def test_a_component_is_a_single_task_gp(with_prior: bool, offsets: Tensor | None) -> None:
    fit = posterior(with_prior, offsets is not None)
    X = uniform(30, 2, seed=8)
    outcome = fit.outcome
    values = fit.prior_values(X)
    for index, component in enumerate(fit.components):
        mean, variance = component.predict(fit.warp(X), values)
        model = fit.model(index)
        with torch.no_grad():
            theirs = model.posterior(X)
        expected = outcome.centre + outcome.scale * torch.from_numpy(mean)
        torch.testing.assert_close(theirs.mean.squeeze(-1), expected, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(
            theirs.variance.squeeze(-1),
            outcome.scale**2 * torch.from_numpy(variance),
            rtol=1e-7,
            atol=1e-8 * outcome.scale**2,
        )


@pytest.mark.parametrize("further", [0, 2])
def test_a_component_with_known_noise_is_a_single_task_gp(further: int) -> None:
    X, Y = history(8)
    known = torch.linspace(1e-3, 0.3, 8).double().unsqueeze(-1) * Y.var()
    fit = fit_earned(X, Y, Yvar=known)
    assert fit.components[0].noise[3] * fit.components[0].variance == pytest.approx(
        float(known[3]) / fit.outcome.scale**2
    )
    if further:
        fit = fit.conditioned(uniform(further, 2, seed=6))
    Z = uniform(10, 2, seed=8)
    mean, variance = fit.components[0].predict(fit.warp(Z))
    with torch.no_grad():
        theirs = fit.model(0).posterior(Z)
    expected = fit.outcome.centre + fit.outcome.scale * torch.from_numpy(mean)
    torch.testing.assert_close(theirs.mean.squeeze(-1), expected, rtol=1e-8, atol=1e-8)
    scaled = fit.outcome.scale**2 * torch.from_numpy(variance)
    torch.testing.assert_close(theirs.variance.squeeze(-1), scaled, rtol=1e-7, atol=1e-6)


@WAYS
def test_botorchs_acquisition_functions_take_it(with_prior: bool, offsets: Tensor | None) -> None:
    fit, (X, Y) = posterior(with_prior, offsets is not None), history(8)
    model = fit.model(len(fit.components) - 1)
    analytic = LogExpectedImprovement(model, best_f=Y.max())
    point, value = optimize_acqf(analytic, UNIT, q=1, num_restarts=2, raw_samples=16)
    assert point.shape == (1, 2)
    assert bool(((point >= 0) & (point <= 1)).all())
    assert value is not None
    assert math.isfinite(float(value))
    noisy = qLogNoisyExpectedImprovement(model, X, prune_baseline=True)
    pair, value = optimize_acqf(noisy, UNIT, q=2, num_restarts=1, raw_samples=4)
    assert pair.shape == (2, 2)
    assert value is not None
    assert math.isfinite(float(value))


@WAYS
def test_a_component_with_further_points_is_a_single_task_gp_too(
    with_prior: bool, offsets: Tensor | None
) -> None:
    fit = posterior(with_prior, offsets is not None).conditioned(uniform(2, 2, seed=6))
    X = uniform(10, 2, seed=8)
    mean, variance = fit.components[0].predict(fit.warp(X), fit.prior_values(X))
    with torch.no_grad():
        theirs = fit.model(0).posterior(X)
    expected = fit.outcome.centre + fit.outcome.scale * torch.from_numpy(mean)
    torch.testing.assert_close(theirs.mean.squeeze(-1), expected, rtol=1e-8, atol=1e-8)
    scaled = fit.outcome.scale**2 * torch.from_numpy(variance)
    torch.testing.assert_close(theirs.variance.squeeze(-1), scaled, rtol=1e-7, atol=1e-6)


# GPyTorch knows no variance below 1e-10, in whatever unit.
@pytest.mark.parametrize("factor", [2.0**-10, 2.0**10, 2.0**60])
def test_a_single_task_gp_has_the_outcomes_unit(factor: float) -> None:
    (X, Y), Z = history(8), uniform(10, 2, seed=8)
    here, there = (fit_earned(X, f * Y, random_prior(1)).model(0) for f in (1.0, factor))
    with torch.no_grad():
        expected, found = here.posterior(Z), there.posterior(Z)
    torch.testing.assert_close(found.mean / factor, expected.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.variance / factor**2, expected.variance, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------ an average of models


def test_predictions_are_those_of_the_average() -> None:
    fit = posterior(True)
    assert len(fit.components) > 1
    X = uniform(20, 2, seed=3)
    parts = [c.predict(fit.warp(X), fit.prior_values(X)) for c in fit.components]
    means, variances = (np.array(part) for part in zip(*parts, strict=True))
    mean, variance = fit.predict(X)
    w = fit.weights[:, None]
    np.testing.assert_allclose(mean, (w * means).sum(axis=0), atol=1e-12)
    expected = (w * variances).sum(axis=0) + (w * (means - mean) ** 2).sum(axis=0)
    np.testing.assert_allclose(variance, expected, atol=1e-12)
    assert fit.weights.sum() == pytest.approx(1.0)
    assert (fit.weights > 0).all()


def test_a_draw_has_the_weights_probabilities() -> None:
    fit = posterior(True)
    grid = (np.arange(20_000) + 0.5) / 20_000
    drawn = np.array([fit.drawn(float(u)) for u in grid])
    shares = np.bincount(drawn, minlength=len(fit.components)) / len(grid)
    np.testing.assert_allclose(shares, fit.weights, atol=1e-4)
    assert fit.drawn(np.nextafter(1.0, 0.0)) == len(fit.components) - 1


def test_without_a_prior_there_is_one_model() -> None:
    fit = posterior(False)
    assert len(fit.components) == 1
    assert fit.trust == 0.0
    assert fit.prior_values(uniform(3, 2)) == 0.0


def test_who_trusts_nothing_is_alone() -> None:
    fit = fit_earned(*history(8), random_prior(), trusts=(0.0,), trust_prior=(1.0,))
    X = uniform(20, 2, seed=3)
    for mine, expected in zip(fit.predict(X), posterior(False).predict(X), strict=True):
        assert np.array_equal(mine, expected)


def test_the_warp_is_undone() -> None:
    fit, X = posterior(True, warp=True), uniform(40, 2, seed=3)
    np.testing.assert_array_equal(fit.warp(X), LogWarp(OFFSETS).transform(X).numpy())
    torch.testing.assert_close(fit.unwarp(fit.warp(X)), X)


# ------------------------------------------------------------------ trust


SEEDS = pytest.mark.parametrize("seed", range(5))


def trust_in(prior: PriorFunction, n: int, seed: int) -> float:
    return fit_earned(*history(n, seed=seed), prior).trust


@SEEDS
def test_a_right_prior_keeps_its_trust_and_a_wrong_one_loses_it(seed: int) -> None:
    right, wrong = random_prior(), negated(random_prior())
    for n in (6, 10, 15):
        assert trust_in(right, n, seed) > 2 * trust_in(wrong, n, seed)
    assert trust_in(right, 10, seed) > 0.3
    assert trust_in(wrong, 15, seed) < 0.3


def test_trust_in_a_wrong_prior_fades() -> None:
    wrong = negated(random_prior())
    few, many = (np.mean([trust_in(wrong, n, seed) for seed in range(8)]) for n in (4, 15))
    assert many < 0.15
    assert many < 0.7 * few


@SEEDS
def test_a_prior_of_something_else_costs_little(seed: int) -> None:
    # An unrelated function: after a dozen observations predictions are nearly those without it.
    X, Y = history(12, seed=seed)
    Z = uniform(100, 2, seed=50)
    truth = hill(Z).numpy()[:, 0]

    def error(prior: PriorFunction | None) -> float:
        fit = fit_earned(X, Y, prior)
        mean = fit.outcome.centre + fit.outcome.scale * fit.predict(Z)[0]
        return float(np.sqrt(((mean - truth) ** 2).mean()))

    deviation = truth.std()
    assert error(random_prior(7 + seed)) < error(None) + 0.35 * deviation
    assert error(negated(random_prior())) < error(None) + 0.1 * deviation


def test_a_right_prior_helps() -> None:
    Z = uniform(100, 2, seed=50)
    truth = hill(Z).numpy()[:, 0]
    for seed in range(3):
        X, Y = history(5, seed=seed)
        errors = []
        for prior in (None, random_prior()):
            fit = fit_earned(X, Y, prior)
            mean = fit.outcome.centre + fit.outcome.scale * fit.predict(Z)[0]
            errors.append(float(np.abs(mean - truth).mean()))
        assert errors[1] < 0.7 * errors[0]


# ------------------------------------------------------------------ scales


def moments(X: Tensor, Y: Tensor) -> tuple[Array, Array]:
    fit = fit_earned(X, Y, random_prior(1))
    mean, variance = fit.predict(uniform(30, 2, seed=3))
    return mean, variance


@pytest.mark.parametrize("factor", [2.0**-600, 2.0**-13, 2.0**13, 2.0**600])
def test_an_outcomes_unit_does_not_matter(factor: float) -> None:
    X, Y = history(9)
    for mine, expected in zip(moments(X, factor * Y), moments(X, Y), strict=True):
        assert np.array_equal(mine, expected)


@pytest.mark.parametrize("factor", [1e-200, 1e-4, 3.0, 1e4, 1e200])
@pytest.mark.parametrize("shift", [0.0, 1e3, -1e7])
def test_units_and_zeros_do_not_matter(factor: float, shift: float) -> None:
    X, Y = history(9)
    # Rounding of outcomes near the shift moves the end of a fit a little.
    for mine, expected in zip(moments(X, factor * (Y + shift)), moments(X, Y), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e200])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_equal_outcomes(value: float, n: int) -> None:
    X = uniform(n, 2)
    fit = fit_earned(X, torch.full((n, 1), value, dtype=torch.float64), random_prior())
    mean, variance = fit.predict(uniform(20, 2, seed=3))
    assert np.isfinite(mean).all()
    assert (variance > 0).all()
    assert fit.weights.sum() == pytest.approx(1.0)
    with torch.no_grad():
        assert bool(torch.isfinite(fit.model(0).posterior(uniform(3, 2)).mean).all())


def test_the_same_point_many_times() -> None:
    X = uniform(1, 2).repeat(7, 1)
    fit = fit_earned(X, normal(7, 1), random_prior())
    mean, variance = fit.predict(uniform(20, 2, seed=3))
    assert np.isfinite(mean).all()
    assert (variance > 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    X, Y = history(5)
    broken = Y.clone()
    broken[2] = bad
    with pytest.raises(InputDataError):
        fit_earned(X, broken, random_prior())
    nowhere = X.clone()
    nowhere[1, 0] = bad
    with pytest.raises(InputDataError):
        fit_earned(nowhere, Y)


def test_shapes_are_checked() -> None:
    X, Y = history(5)
    for wrong in ((X, Y[:, 0]), (X[0], Y), (X[:0], Y[:0]), (X, Y[:4])):
        with pytest.raises(BotorchTensorDimensionError, match="n > 0"):
            fit_earned(*wrong)
