"""The own model over configurations and fidelities, and what an evaluation tells of the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from scipy.optimize import approx_fprime
from torch import Tensor

from botorch_fed.models import LogWarp, RandomFourierFeatures, StationaryKernel
from botorch_fed.models.earned_prior import EarnedPosterior, PriorFunction, project
from botorch_fed.models.fidelity import FidelityGP, _Posterior, fit_fidelity
from botorch_fed.models.local_gp import Array
from botorch_fed.rng import generator

LEVELS = np.array([0.0, 0.4, 0.7, 1.0])
NO_WARP = LogWarp(torch.zeros(2).double())


def target(X: Tensor) -> Tensor:
    return (3 * X[:, 0]).sin() + X[:, 1] ** 2


def data(n: int, seed: int = 0) -> tuple[Tensor, Array, Tensor]:
    """Curves that rise to a target, some faster than others."""
    stream = generator(seed, "curves")
    X = stream.uniform(n, 2)
    way = LEVELS[(4 * stream.uniform(n)).long().numpy()]
    e = torch.from_numpy((1 - way) ** 2)
    Y = target(X) * (1 - 0.4 * e) - 4 * e + 0.2 * e * (5 * X[:, 1]).cos()
    return X, way, Y.unsqueeze(-1)


def fitted(n: int, **options: Any) -> EarnedPosterior:
    return fit_fidelity(*data(n), log_warp=NO_WARP, **options)


def gp_of(posterior: EarnedPosterior, index: int = 0) -> FidelityGP:
    component = posterior.components[index]
    assert isinstance(component, FidelityGP)
    return component


def test_the_gradient_of_the_fit_is_right() -> None:
    X, way, Y = data(12)
    posterior = _Posterior(X.numpy(), way, Y.numpy()[:, 0], 0.5 * target(X).numpy())
    noise = generator(1, "theta").normal(len(posterior.mode)).numpy()
    theta = (posterior.mode + 0.3 * noise).clip(posterior.low, posterior.high)
    found = posterior(theta)[1]
    numeric = approx_fprime(theta, lambda t: posterior(t)[0], 1e-6)
    np.testing.assert_allclose(found, numeric, atol=1e-4 * np.abs(numeric).max())


@pytest.mark.parametrize("level", [1.0, 0.7, 0.0])
def test_slopes_are_the_gradients_of_mean_and_gain(level: float) -> None:
    gp = gp_of(fitted(10)).at(level)
    for z in np.array([[0.3, 0.6], [0.8, 0.1]]):
        mean, gain = (part[0] for part in gp.slopes(z[None]))
        for k, found in enumerate((mean, gain)):
            numeric = approx_fprime(z, lambda z, k=k: gp.predict(z[None])[k][0], 1e-6)
            np.testing.assert_allclose(found, numeric, atol=1e-4)


def test_the_target_is_learnt_from_lower_fidelities() -> None:
    X, way, Y = data(40)
    posterior = fit_fidelity(X, way, Y, log_warp=NO_WARP)
    probes = generator(3, "probes").uniform(100, 2)
    mean, variance = posterior.predict(probes)
    values = posterior.outcome.centre + posterior.outcome.scale * torch.from_numpy(mean)
    away = values - target(probes)
    alone = fit_fidelity(X[way == 1], way[way == 1], Y[way == 1], log_warp=NO_WARP)
    other = alone.outcome.centre + alone.outcome.scale * torch.from_numpy(alone.predict(probes)[0])
    assert float(away.std()) < 0.5 * float((other - target(probes)).std())
    assert float(away.std()) < 0.15 * float(target(probes).std())
    assert variance.min() > 0


def test_a_shift_or_a_stretch_of_outcomes_changes_nothing() -> None:
    X, way, Y = data(9)
    probes = generator(3, "probes").uniform(20, 2)
    one, other = (fit_fidelity(X, way, y, log_warp=NO_WARP) for y in (Y, 1e3 * Y - 7e4))
    np.testing.assert_allclose(one.predict(probes), other.predict(probes), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_observations_at_one_fidelity_make_a_model(n: int) -> None:
    X, _, Y = data(n)
    for way in (np.zeros(n), np.ones(n)):
        mean, variance = fit_fidelity(X, way, Y, log_warp=NO_WARP).predict(X)
        assert np.isfinite(mean).all()
        assert (variance > 0).all()


def test_the_gain_grows_with_the_fidelity_and_is_bounded_by_the_variance() -> None:
    gp = gp_of(fitted(10))
    Z = generator(5, "gains").uniform(30, 2).numpy()
    gains = np.stack([gp.at(level).predict(Z)[1] for level in LEVELS])
    assert (gains[1:-1] >= gains[:-2] - 1e-9).mean() > 0.9
    assert (gains[-1] >= gains[:-1] - 1e-9).all()
    means = [gp.at(level).predict(Z)[0] for level in LEVELS]
    np.testing.assert_allclose(means[0], means[-1])


def test_the_gain_is_what_an_observation_takes_from_the_variance() -> None:
    gp, Z = gp_of(fitted(10)), np.array([[0.35, 0.55]])
    for level in (0.0, 0.7):
        after = gp.with_pending(Z, np.array([level]))
        (mean,), (variance,) = gp.predict(Z)
        (then,), (less,) = after.predict(Z)
        assert then == pytest.approx(mean, abs=1e-3)  # but for the constant, which is kept
        assert variance - less == pytest.approx(gp.at(level).predict(Z)[1][0], rel=1e-6)


def test_a_prior_at_the_target_is_trusted_if_it_is_right() -> None:
    kernel = StationaryKernel(2.5, [0.5, 0.5])
    phi = RandomFourierFeatures.draw(kernel, 60, generator=generator(0, "basis"))
    X, way, Y = data(10)
    weights = project(lambda X: target(X).numpy(), phi)
    right, wrong = (PriorFunction.of_weights(phi, sign * weights) for sign in (1, -1))
    trusts = [fit_fidelity(X, way, Y, g, log_warp=NO_WARP).trust for g in (right, wrong)]
    assert trusts[0] > 0.5 > trusts[1]


def test_shapes_are_checked() -> None:
    X, way, Y = data(4)
    with pytest.raises(BotorchTensorDimensionError, match="fidelities `n`"):
        fit_fidelity(X, way[:3], Y, log_warp=NO_WARP)
