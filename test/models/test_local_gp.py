"""A site's own model in closed form: BoTorch's `SingleTaskGP`, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import replace

import gpytorch
import numpy as np
import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from botorch_fed.models.local_gp import (
    Array,
    LengthscalePrior,
    LocalGP,
    Standardized,
    _Posterior,
    fit_local_gp,
    standardize,
)
from test.cases import normal, uniform


def wave(n: int, d: int, *, seed: int = 0, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Points and outcomes of a smooth function in an arbitrary unit, `n x d` and `n x 1`."""
    X = uniform(n, d, seed=seed)
    direction = normal(d, 1, seed=seed + 1)
    Y = torch.sin(3 * X @ direction) + (X[:, :1] - 0.4).square()
    return X, 20 + 7 * (Y + noise * normal(n, 1, seed=seed))


def fitted(n: int, d: int, *, seed: int = 0, trust: float = 0.0) -> tuple[LocalGP, Standardized]:
    X, Y = wave(n, d, seed=seed)
    outcome = standardize(Y.numpy()[:, 0])
    prior = half_plane(X.numpy()) if trust else None
    return fit_local_gp(X.numpy(), outcome.values, prior=prior, trust=trust), outcome


def half_plane(X: Array) -> Array:
    """A prior function."""
    return np.asarray(2.0 * X[:, 0] - 1.0)


def correlation(A: Array, B: Array, lengthscale: Array) -> Array:
    return np.asarray(np.exp(-0.5 * (((A[:, None] - B[None]) / lengthscale) ** 2).sum(axis=-1)))


def covariance(gp: LocalGP) -> Array:
    """Of the outcomes on the standardised scale, by its formula."""
    signal = correlation(gp.X, gp.X, gp.lengthscale)
    return gp.variance * (signal + gp.noise * np.eye(len(gp.X)))


# ------------------------------------------------------------------ outcomes


def test_standardised_outcomes_are_botorchs() -> None:
    _, Y = wave(9, 2)
    outcome = standardize(Y.numpy()[:, 0])
    assert outcome.values.mean() == pytest.approx(0.0, abs=1e-14)
    assert outcome.values.std(ddof=1) == pytest.approx(1.0, rel=1e-13)
    assert outcome.centre == pytest.approx(float(Y.mean()), rel=1e-14)
    assert outcome.scale == pytest.approx(float(Y.std()), rel=1e-13)


@pytest.mark.parametrize("power", [-600, -13, 13, 600])
def test_powers_of_two_cancel_exactly(power: int) -> None:
    y = wave(8, 2)[1].numpy()[:, 0]
    there, here = standardize(math.ldexp(1.0, power) * y), standardize(y)
    assert np.array_equal(there.values, here.values)
    assert there.scale == math.ldexp(here.scale, power)
    assert there.centre == math.ldexp(here.centre, power)


@pytest.mark.parametrize("factor", [1e-300, 1e-4, 3.0, 1e4, 1e200])
@pytest.mark.parametrize("shift", [0.0, -5.0, 1e6])
def test_units_cancel(factor: float, shift: float) -> None:
    y = wave(8, 2)[1].numpy()[:, 0]
    there = standardize(factor * (y + shift))
    # Outcomes near `shift` are rounded there: 1e-16 of it remains.
    np.testing.assert_allclose(there.values, standardize(y).values, atol=1e-14 * (10 + abs(shift)))
    assert there.scale == pytest.approx(factor * standardize(y).scale, rel=1e-9)


@pytest.mark.parametrize("value", [0.0, 3.7, -1e200, 1e-310, 0.1])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_outcomes_that_do_not_differ(value: float, n: int) -> None:
    outcome = standardize(np.full(n, value))
    assert np.array_equal(outcome.values, np.zeros(n))
    assert outcome.centre == pytest.approx(value, rel=1e-12)
    assert outcome.scale == 1.0


@pytest.mark.parametrize("unit", [1e-200, 1.0, 1e9, 1e200])
def test_differences_below_rounding_are_none(unit: float) -> None:
    outcome = standardize(unit * np.array([1.0, 1.0 + 1e-15, 1.0, 1.0 - 1e-15]))
    assert np.array_equal(outcome.values, np.zeros(4))


@pytest.mark.parametrize("y", [[], [1.0, math.nan], [math.inf], [0.0, -math.inf]])
def test_outcomes_that_are_none_are_refused(y: list[float]) -> None:
    with pytest.raises(InputDataError, match="finite outcome"):
        standardize(np.array(y))


# ------------------------------------------------------------------ the same model as BoTorch's


@pytest.mark.parametrize(("n", "d", "seed"), [(8, 1, 0), (10, 2, 1), (25, 2, 2), (16, 5, 3)])
def test_a_fit_is_botorchs(n: int, d: int, seed: int) -> None:
    X, Y = wave(n, d, seed=seed)
    theirs = SingleTaskGP(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(theirs.likelihood, theirs))
    ours, outcome = fitted(n, d, seed=seed)
    Z = uniform(40, d, seed=9)
    with torch.no_grad():
        posterior = theirs.posterior(Z)
        expected = posterior.mean.squeeze(-1).numpy(), posterior.variance.squeeze(-1).numpy()
    mean, variance = ours.predict(Z.numpy())
    # Both optimisers stop where the objective is flat: hyperparameters agree to some 1e-3, and
    # predictions to a fraction of the outcomes' deviation.
    scale = outcome.scale
    np.testing.assert_allclose(outcome.centre + scale * mean, expected[0], atol=0.01 * scale)
    np.testing.assert_allclose(
        scale * np.sqrt(variance), np.sqrt(expected[1]), atol=0.01 * scale, rtol=0.02
    )
    theirs_there = theta_of(theirs)
    objective = _Posterior(ours.X, ours.residual, LengthscalePrior.of_dimension(d))
    ours_there = np.log([*ours.lengthscale, ours.noise])
    # Neither finds a better maximum of one and the same objective.
    assert objective(ours_there)[0] == pytest.approx(objective(theirs_there)[0], abs=0.01)
    short = ours.lengthscale < 3  # of a longer one nothing depends on the exact value
    np.testing.assert_allclose(ours_there[:-1][short], theirs_there[:-1][short], atol=0.05)


def known_variances(n: int) -> Array:
    """Very different ones, on the standardised scale."""
    return np.geomspace(1e-3, 1.0, n)


@pytest.mark.parametrize(("n", "d", "seed"), [(10, 1, 0), (20, 2, 1)])
def test_a_fit_with_known_noise_is_botorchs(n: int, d: int, seed: int) -> None:
    X, Y = wave(n, d, seed=seed)
    outcome = standardize(Y.numpy()[:, 0])
    known = known_variances(n)
    ours = fit_local_gp(X.numpy(), outcome.values, noise=known)
    theirs = SingleTaskGP(X, Y, train_Yvar=torch.from_numpy(known).unsqueeze(-1) * outcome.scale**2)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(theirs.likelihood, theirs))
    Z = uniform(40, d, seed=9)
    with torch.no_grad():
        posterior = theirs.posterior(Z)
    mean, variance = ours.predict(Z.numpy())
    scale = outcome.scale
    expected = posterior.mean.squeeze(-1).numpy()
    np.testing.assert_allclose(outcome.centre + scale * mean, expected, atol=0.02 * scale)
    deviation = posterior.variance.sqrt().squeeze(-1).numpy()
    np.testing.assert_allclose(scale * np.sqrt(variance), deviation, atol=0.02 * scale)
    np.testing.assert_allclose(ours.noise, known)


def test_known_noise_says_which_outcomes_count() -> None:
    X, z = np.array([[0.3], [0.3]]), np.array([1.0, -1.0])
    for known, sign in ((np.array([0.001, 1.0]), 1), (np.array([1.0, 0.001]), -1)):
        mean, _ = fit_local_gp(X, z, noise=known).predict(X[:1])
        assert sign * mean[0] > 0.9


def theta_of(model: SingleTaskGP) -> Array:
    """Log length scales and log noise."""
    lengthscale = model.covar_module.lengthscale.detach().flatten()
    theta = torch.cat([lengthscale, model.likelihood.noise.detach()]).log().numpy()
    return np.asarray(theta)


def test_the_objective_is_gpytorchs() -> None:
    # Up to a constant: differences between hyperparameters, at the best constant mean.
    X, Y = wave(9, 2)
    z = standardize(Y.numpy()[:, 0]).values
    objective = _Posterior(X.numpy(), z, LengthscalePrior.of_dimension(2))

    def gpytorchs(theta: Array) -> float:
        model = SingleTaskGP(X, torch.from_numpy(z).unsqueeze(-1), outcome_transform=None)
        model.covar_module.lengthscale = torch.from_numpy(np.exp(theta[:-1]))
        model.likelihood.noise = torch.tensor(np.exp(theta[-1]))
        solved = objective.solved(theta)
        assert solved is not None
        model.mean_module.constant = torch.tensor(solved.constant)
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        with torch.no_grad(), gpytorch.settings.fast_computations(log_prob=False):
            return -9 * float(mll(model(X), torch.from_numpy(z)))

    thetas = [np.array(t) for t in ([-1.0, 0.3, -4.0], [0.5, 1.5, -1.0], [2.0, -0.7, -7.0])]
    ours, theirs = np.array([[objective(t)[0], gpytorchs(t)] for t in thetas]).T
    np.testing.assert_allclose(ours - ours[0], theirs - theirs[0], atol=1e-5)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (6, 2), (15, 4)])
def test_the_gradient_is_that_of_the_objective(n: int, d: int) -> None:
    X, Y = wave(n, d)
    objective = _Posterior(
        X.numpy(), standardize(Y.numpy()[:, 0]).values, LengthscalePrior.of_dimension(d)
    )
    for seed in range(3):
        theta = np.append(0.8 * normal(d, seed=seed).numpy(), -3.0 + seed)
        _, gradient = objective(theta)
        for k in range(d + 1):
            step = np.zeros(d + 1)
            step[k] = 1e-5
            slope = (objective(theta + step)[0] - objective(theta - step)[0]) / 2e-5
            assert gradient[k] == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_the_gradient_with_known_noise_is_that_of_the_objective() -> None:
    X, Y = wave(8, 2)
    z, prior = standardize(Y.numpy()[:, 0]).values, LengthscalePrior.of_dimension(2)
    objective = _Posterior(X.numpy(), z, prior, known_variances(8))
    theta = np.array([-0.4, 0.3])
    _, gradient = objective(theta)
    for k in range(2):
        step = 1e-5 * np.eye(2)[k]
        slope = (objective(theta + step)[0] - objective(theta - step)[0]) / 2e-5
        assert gradient[k] == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_a_fit_is_a_maximum() -> None:
    gp, _ = fitted(12, 2, trust=0.5)
    objective = _Posterior(gp.X, gp.residual, LengthscalePrior.of_dimension(2))
    theta = np.log([*gp.lengthscale, gp.noise])
    value, gradient = objective(theta)
    inside = (theta > objective.low + 1e-6) & (theta < objective.high - 1e-6)
    assert np.abs(gradient[inside]).max() < 1e-2
    for seed in range(5):
        other = (theta + 0.3 * normal(3, seed=seed).numpy()).clip(objective.low, objective.high)
        assert objective(other)[0] > value
    assert gp.evidence == pytest.approx(-value - 0.5 * 12 * math.log(gp.variance))


def test_a_warm_start_ends_at_the_same_place() -> None:
    gp, outcome = fitted(12, 2)
    again = fit_local_gp(gp.X, outcome.values, start=gp)
    assert again.evidence == pytest.approx(gp.evidence, abs=1e-3)
    assert again.evidence >= gp.evidence - 1e-9


def test_another_prior_of_length_scales_is_heard() -> None:
    X, Y = wave(6, 2)
    z = standardize(Y.numpy()[:, 0]).values
    short = fit_local_gp(X.numpy(), z, lengthscale_prior=LengthscalePrior(np.full(2, -2.0), 0.1))
    np.testing.assert_allclose(short.lengthscale, np.exp(-2.0), rtol=0.2)


# ------------------------------------------------------------------ the posterior


@pytest.mark.parametrize("trust", [0.0, 0.6])
def test_predictions_are_the_dense_formula(trust: float) -> None:
    gp, outcome = fitted(11, 2, trust=trust)
    Z = uniform(20, 2, seed=5).numpy()
    K = covariance(gp)
    cross = gp.variance * correlation(Z, gp.X, gp.lengthscale)
    ones = np.ones(11)
    rest = outcome.values - trust * half_plane(gp.X)
    constant = ones @ np.linalg.solve(K, rest) / (ones @ np.linalg.solve(K, ones))
    expected = constant + cross @ np.linalg.solve(K, rest - constant) + trust * half_plane(Z)
    explained = (cross * np.linalg.solve(K, cross.T).T).sum(axis=1)
    mean, variance = gp.predict(Z, half_plane(Z))
    # The condition of K is 1e5 at most: rounding of 1e-16 grows to 1e-11.
    np.testing.assert_allclose(mean, expected, atol=1e-9)
    np.testing.assert_allclose(variance, gp.variance - explained, atol=1e-9)
    assert gp.variance == pytest.approx(rest.var(ddof=1))


def test_what_the_prior_explains_makes_the_rest_smaller() -> None:
    X, _ = wave(10, 2)
    y = half_plane(X.numpy())
    outcome = standardize(y)
    gp = fit_local_gp(X.numpy(), outcome.values, prior=outcome.values, trust=1.0)
    Z = uniform(30, 2, seed=4).numpy()
    there = (half_plane(Z) - outcome.centre) / outcome.scale
    mean, variance = gp.predict(Z, there)
    np.testing.assert_allclose(mean, there, atol=1e-9)
    assert np.sqrt(variance).max() < 0.02  # the smallest that a residual can have is 0.01


def test_one_observation() -> None:
    gp = fit_local_gp(np.array([[0.3, 0.6]]), np.zeros(1))
    mean, variance = gp.predict(uniform(5, 2).numpy())
    np.testing.assert_allclose(mean, 0.0, atol=1e-12)
    assert ((variance > 0) & (variance <= 1)).all()
    assert np.isfinite(gp.log_leave_one_out()).all()


@pytest.mark.parametrize("trust", [0.0, 0.7])
def test_leave_one_out_is_a_model_without_the_point(trust: float) -> None:
    gp, outcome = fitted(9, 2, trust=trust)
    rest = outcome.values - trust * half_plane(gp.X)
    K = covariance(gp)
    density = gp.log_leave_one_out()
    for i in range(9):
        keep = np.arange(9) != i
        inner, cross, ones = K[np.ix_(keep, keep)], K[i, keep], np.ones(8)
        by_ones = np.linalg.solve(inner, ones)
        constant = by_ones @ rest[keep] / (by_ones @ ones)
        error = rest[i] - constant - cross @ np.linalg.solve(inner, rest[keep] - constant)
        # The constant is estimated, and its variance counts.
        unsure = (1 - by_ones @ cross) ** 2 / (by_ones @ ones)
        variance = K[i, i] - cross @ np.linalg.solve(inner, cross) + unsure
        expected = -0.5 * (math.log(2 * math.pi * variance) + error**2 / variance)
        assert density[i] == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("trust", [0.0, 0.5])
def test_conditioned_is_a_model_of_all_data(trust: float) -> None:
    gp, _ = fitted(8, 2, trust=trust)
    X, Z = uniform(3, 2, seed=6).numpy(), uniform(15, 2, seed=7).numpy()
    values = np.array([0.5, -0.2, 1.3])
    more = gp.conditioned(X, values, half_plane(X))
    points = np.concatenate([gp.X, X])
    K = covariance(replace(gp, X=points))
    level = math.sqrt(gp.variance) * gp.constant  # the constant is not fitted again
    rest = math.sqrt(gp.variance) * gp.residual - level
    rest = np.concatenate([rest, values - trust * half_plane(X) - level])
    cross = gp.variance * correlation(Z, points, gp.lengthscale)
    mean, variance = more.predict(Z, half_plane(Z))
    expected = level + cross @ np.linalg.solve(K, rest) + trust * half_plane(Z)
    np.testing.assert_allclose(mean, expected, atol=1e-9)
    explained = (cross * np.linalg.solve(K, cross.T).T).sum(axis=1)
    np.testing.assert_allclose(variance, gp.variance - explained, atol=1e-9)


def test_further_points_have_the_usual_noise() -> None:
    X, Y = wave(8, 2)
    known = known_variances(8)
    gp = fit_local_gp(X.numpy(), standardize(Y.numpy()[:, 0]).values, noise=known)
    more = gp.conditioned(uniform(2, 2, seed=6).numpy(), np.zeros(2))
    usual = np.mean(gp.noise)
    np.testing.assert_allclose(more.noise, [*np.atleast_1d(gp.noise), usual, usual])


def test_an_outcome_at_its_mean_leaves_the_mean_and_lowers_the_variance() -> None:
    gp, _ = fitted(8, 2)
    X, Z = uniform(2, 2, seed=6).numpy(), uniform(15, 2, seed=7).numpy()
    more = gp.conditioned(X, gp.predict(X)[0])
    np.testing.assert_allclose(more.predict(Z)[0], gp.predict(Z)[0], atol=1e-9)
    assert (more.predict(Z)[1] <= gp.predict(Z)[1] + 1e-12).all()
    assert (more.predict(X)[1] < gp.predict(X)[1]).all()


def test_duplicated_points_are_one_with_less_noise() -> None:
    X = np.repeat(uniform(4, 2).numpy(), 3, axis=0)
    z = standardize(normal(12).numpy()).values
    gp = fit_local_gp(X, z)
    mean, variance = gp.predict(X)
    assert np.isfinite(mean).all()
    assert (variance > 0).all()
    np.testing.assert_allclose(mean[::3], mean[1::3], atol=1e-10)


def test_shapes_are_checked() -> None:
    X = uniform(4, 2).numpy()
    for wrong in ((X[0], np.zeros(4)), (X, np.zeros(3)), (X[:0], np.zeros(0))):
        with pytest.raises(BotorchTensorDimensionError, match="n > 0"):
            fit_local_gp(*wrong)
    with pytest.raises(BotorchTensorDimensionError, match="n > 0"):
        fit_local_gp(X, np.zeros(4), prior=np.zeros(3), trust=1.0)
    for bad in (np.ones(3), -np.ones(4), np.full(4, np.nan)):
        with pytest.raises(InputDataError, match="Expected 4 known variances >= 0"):
            fit_local_gp(X, np.zeros(4), noise=bad)
