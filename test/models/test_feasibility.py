"""The probability of success: right against sampling, its gradients, what it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from scipy.special import ndtr
from torch import Tensor

from botorch_fed.models import LogWarp
from botorch_fed.models.feasibility import VARIANCE, _Evidence, fit_feasibility
from test.cases import normal, uniform

OFFSETS = torch.tensor([0.01, 0.0], dtype=torch.float64)
NONE = torch.zeros(0, 2).double()


def half_space(n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points that succeed and points that fail, a third of all."""
    X = uniform(n, d, seed=seed)
    fails = X[:, 0] + 0.5 * X[:, -1] > 0.9
    return X[~fails], X[fails]


def labelled(X: Tensor, failed: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return torch.cat([X, failed]).numpy(), np.repeat([1.0, -1.0], [len(X), len(failed)])


def probability(X: Tensor, failed: Tensor, at: Tensor) -> np.ndarray:
    found = fit_feasibility(X, failed)
    assert found is not None
    return np.exp(found.log_probability(at.numpy()))


def test_one_failure_is_an_accident() -> None:
    X, failed = half_space(10, 2)
    assert fit_feasibility(X, failed[:0]) is None
    assert fit_feasibility(X, failed[:1]) is None
    assert fit_feasibility(X, failed[:2]) is not None


def test_of_labels_far_apart_everything_is_exact() -> None:
    X = np.array([[0.0, 0.0], [0.0, 50.0], [50.0, 0.0]])
    labels = np.array([1.0, -1.0, -1.0])
    evidence = _Evidence(X, labels)
    K = evidence.covariance(evidence.mode)
    assert abs(evidence.factors(K).evidence - 3 * np.log(0.5)) < 1e-6
    mean, variance = evidence.model(evidence.mode).predict(X)
    expected = VARIANCE / np.sqrt(1 + VARIANCE) * np.sqrt(2 / np.pi)
    np.testing.assert_allclose(mean, labels * expected, rtol=1e-4)
    np.testing.assert_allclose(variance, VARIANCE - expected**2, rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_evidence_and_posterior_are_nearly_those_of_sampling(seed: int) -> None:
    X, labels = labelled(*half_space(6, 2, seed=seed))
    evidence = _Evidence(X, labels)
    K = evidence.covariance(evidence.mode)
    draws = normal(100_000, len(X)).numpy() @ np.linalg.cholesky(K).T
    likelihood = ndtr(labels * draws).prod(axis=1)
    # A normal approximation of a skewed posterior.
    assert abs(evidence.factors(K).evidence - np.log(likelihood.mean())) < 0.08
    mean, variance = evidence.model(evidence.mode).predict(X)
    weights = likelihood / likelihood.sum()
    expected = weights @ draws
    deviation = np.sqrt(weights @ draws**2 - expected**2)
    np.testing.assert_allclose(mean, expected, atol=0.1)
    np.testing.assert_allclose(np.sqrt(variance), deviation, atol=0.25)


@pytest.mark.parametrize("d", [1, 2, 6])
def test_the_gradient_of_the_evidence(d: int) -> None:
    evidence = _Evidence(*labelled(*half_space(14, d, seed=1)))
    theta = evidence.mode + 0.3 * normal(d, seed=4).numpy()
    _, gradient = evidence(theta)
    steps = 1e-4 * np.eye(d)
    differences = [(evidence(theta + s)[0] - evidence(theta - s)[0]) / 2e-4 for s in steps]
    np.testing.assert_allclose(gradient, differences, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("log_warp", [None, LogWarp(OFFSETS)], ids=["linear", "log"])
def test_gradients_are_those_of_torch(log_warp: LogWarp | None) -> None:
    found = fit_feasibility(*half_space(15, 2), log_warp=log_warp)
    assert found is not None
    X = uniform(40, 2, seed=7)
    with torch.no_grad():
        theirs = found(X).numpy()
    np.testing.assert_allclose(found.log_probability(found.warp(X)), theirs, rtol=1e-10)
    Z = torch.from_numpy(found.warp(X)).requires_grad_()
    plain = type(found)(found.latent)
    (slope,) = torch.autograd.grad(plain(Z).sum(), Z)
    values, gradient = found.with_gradient(Z.detach().numpy())
    np.testing.assert_allclose(values, theirs, rtol=1e-10)
    np.testing.assert_allclose(gradient, slope.numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("d", [1, 2, 6, 20])
def test_a_half_space_is_learned(d: int) -> None:
    X, failed = half_space(40, d)
    right, wrong = half_space(400, d, seed=9)
    found = np.concatenate([probability(X, failed, right), 1 - probability(X, failed, wrong)])
    assert (found > 0.5).mean() > 0.85
    assert np.log(found).mean() > -0.45  # a coin's is -0.69


def test_a_failing_choice_is_learned() -> None:
    kinds = torch.eye(3).double()
    X = torch.cat([uniform(8, 1), kinds[[0, 1] * 4]], dim=-1)
    failed = torch.cat([uniform(4, 1, seed=1), kinds[[2] * 4]], dim=-1)
    by_kind = [
        probability(X, failed, torch.cat([uniform(9, 1, seed=2), kinds[[k] * 9]], dim=-1))
        for k in range(3)
    ]
    assert by_kind[0].min() > 0.7
    assert by_kind[1].min() > 0.7
    assert by_kind[2].max() < 0.3


def test_before_any_success_points_away_from_failures_are_likelier() -> None:
    failed = torch.tensor([[0.1, 0.1], [0.2, 0.3], [0.3, 0.1]], dtype=torch.float64)
    near, far = probability(NONE, failed, torch.tensor([[0.2, 0.15], [0.9, 0.9]]).double())
    assert near < 0.1
    assert 0.4 < far <= 0.5


@pytest.mark.parametrize("repeats", [1, 30])
def test_labels_that_contradict_each_other(repeats: int) -> None:
    point = torch.full((repeats, 2), 0.4, dtype=torch.float64)
    (found,) = probability(point, torch.cat([point, point]), point[:1])
    assert 0.1 < found < 0.5


def test_many_equal_labels_at_a_place() -> None:
    X = 0.3 + 1e-4 * uniform(60, 2)
    failed = 0.7 + 1e-4 * uniform(20, 2)
    middle = torch.tensor([[0.3, 0.3], [0.7, 0.7]], dtype=torch.float64)
    success, failure = probability(X, failed, middle)
    assert success > 0.95
    assert failure < 0.05


def test_points_that_are_none() -> None:
    X, failed = half_space(10, 2)
    with pytest.raises(BotorchTensorDimensionError, match="failed points"):
        fit_feasibility(X, failed[:, :1])
    with pytest.raises(InputDataError, match="failed"):
        fit_feasibility(X, failed * float("nan"))
