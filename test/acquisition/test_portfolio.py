"""The portfolio: the reduction of the others' predicted regret, greedily."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.optim.optimize import optimize_acqf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from botorch_fed.acquisition.optimize import maximize
from botorch_fed.acquisition.portfolio import PortfolioImprovement
from botorch_fed.rng import generator
from test.cases import UNIT, normal, random_fourier, uniform

N = 5
PHI = random_fourier()


def messages(seed: int = 0, num_agents: int = N) -> Tensor:
    return normal(num_agents, PHI.num_features, seed=seed)


def portfolio(
    tried: Tensor | None = None, agent_weights: Tensor | None = None
) -> PortfolioImprovement:
    tried = uniform(3, 2, seed=1) if tried is None else tried
    return PortfolioImprovement(PHI, messages(), tried=tried, agent_weights=agent_weights)


def value_of_set(values: Tensor, rows: tuple[int, ...], weights: Tensor) -> float:
    """What a set of tried points is worth to the agents, against a point of value -100."""
    best = values[list(rows)].amax(dim=0) if rows else torch.full((values.shape[1],), -100.0)
    return float((best.double() + 100) @ weights / weights.sum())


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("num_tried", [0, 1, 6])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_brute_force(num_tried: int, weighted: bool) -> None:
    tried, X = uniform(num_tried, 2, seed=1), uniform(20, 2, seed=2)
    weights = uniform(N, seed=3) if weighted else torch.ones(N).double()
    acquisition = portfolio(tried, weights if weighted else None)
    functions = [lambda x, w=w: float(PHI(x.reshape(1, 2)) @ w) for w in messages()]
    for x in X:
        total = 0.0
        for weight, f in zip(weights.tolist(), functions, strict=True):
            if num_tried:
                total += weight * max(0.0, f(x) - max(f(point) for point in tried))
            else:
                total += weight * f(x)
        expected = total / float(weights.sum())
        assert float(acquisition(x.reshape(1, 2))) == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_an_agent_of_weight_zero_is_ignored() -> None:
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0]).double()
    keep = weights > 0
    X, tried = uniform(20, 1, 2, seed=2), uniform(3, 2, seed=1)
    without = PortfolioImprovement(PHI, messages()[keep], tried=tried, agent_weights=weights[keep])
    torch.testing.assert_close(portfolio(tried, weights)(X), without(X), rtol=1e-12, atol=1e-14)


def test_tried_points_gain_nothing() -> None:
    tried = uniform(6, 2, seed=1)
    assert float(portfolio(tried)(tried.unsqueeze(-2)).abs().max()) < 1e-12


# ------------------------------------------------------------------ a greedy portfolio


@given(seed=st.integers(0, 10_000), size=st.integers(1, 4), extra=st.integers(0, 3))
def test_gains_shrink_as_points_are_tried(seed: int, size: int, extra: int) -> None:
    tried = uniform(size + extra, 2, seed=seed)
    X = uniform(30, 1, 2, seed=seed + 1)
    few, many = portfolio(tried[:size])(X), portfolio(tried)(X)
    assert bool((many >= 0).all())  # monotone
    assert bool((many <= few + 1e-12).all())  # submodular


@given(seed=st.integers(0, 10_000))
def test_greedy_choices_are_near_the_best_set(seed: int) -> None:
    candidates = uniform(8, 2, seed=seed)
    weights = uniform(N, seed=seed)
    functions = messages(seed)
    values = PHI(candidates) @ functions.mT
    chosen: list[int] = []
    tried = candidates[:0]
    for _ in range(3):
        acquisition = PortfolioImprovement(PHI, functions, tried=tried, agent_weights=weights)
        point, gain = maximize(acquisition, 2, generator=generator(0), candidates=candidates)
        before = value_of_set(values, tuple(chosen), weights)
        chosen.append(int((candidates == point).all(dim=-1).nonzero()[0]))
        if tried.numel():
            after = value_of_set(values, tuple(chosen), weights)
            assert gain == pytest.approx(after - before, abs=1e-9)  # it is the marginal gain
        tried = torch.cat([tried, point])
    # Against the first point, from which on gains are counted.
    start = value_of_set(values, (chosen[0],), weights)
    best = max(
        value_of_set(values, (chosen[0], *rest), weights)
        for rest in itertools.combinations(range(8), 2)
    )
    greedy = value_of_set(values, tuple(chosen), weights)
    assert greedy - start >= (1 - 1 / math.e) * (best - start) - 1e-9


# ------------------------------------------------------------------ an acquisition function


@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 3)])
def test_value_shape(batch_shape: tuple[int, ...]) -> None:
    acquisition, X = portfolio(), uniform(*batch_shape, 1, 2, seed=2)
    values = acquisition(X)
    assert values.shape == (batch_shape or (1,))
    assert values.dtype == torch.float64
    one_by_one = torch.cat([acquisition(x).reshape(1) for x in X.reshape(-1, 1, 2)])
    torch.testing.assert_close(values.reshape(-1), one_by_one)


def test_one_point_at_a_time() -> None:
    with pytest.raises(AssertionError, match="q=1"):
        portfolio()(uniform(3, 2, 2))


@pytest.mark.parametrize("num_tried", [0, 3])
def test_gradients(num_tried: int) -> None:
    acquisition = portfolio(uniform(num_tried, 2, seed=1))
    X = uniform(6, 1, 2, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(acquisition, (X,), atol=1e-6, rtol=1e-5)


def test_optimize_acqf() -> None:
    acquisition = portfolio()
    candidates, value = optimize_acqf(acquisition, UNIT, q=1, num_restarts=3, raw_samples=32)
    assert value is not None
    assert candidates.shape == (1, 2)
    with torch.no_grad():
        assert float(value) > float(acquisition(uniform(50, 1, 2, seed=5)).median())


def test_float32_points_are_promoted() -> None:
    acquisition, X = portfolio(), uniform(3, 1, 2).float()
    values = acquisition(X)
    assert values.dtype == torch.float64
    torch.testing.assert_close(values, acquisition(X.double()), rtol=1e-12, atol=0)


def test_deep_copies() -> None:
    acquisition, X = portfolio(), uniform(3, 1, 2)
    torch.testing.assert_close(copy.deepcopy(acquisition)(X), acquisition(X))


def test_pickled_copies() -> None:
    acquisition, X = portfolio(), uniform(3, 1, 2)
    torch.testing.assert_close(pickle.loads(pickle.dumps(acquisition))(X), acquisition(X))


# ------------------------------------------------------------------ bad input


def test_bad_input() -> None:
    tried = uniform(3, 2)
    with pytest.raises(BotorchTensorDimensionError, match="N x 60"):
        PortfolioImprovement(PHI, messages()[:, :-1], tried=tried)
    with pytest.raises(BotorchTensorDimensionError, match="N > 0"):
        PortfolioImprovement(PHI, messages()[:0], tried=tried)
    with pytest.raises(InputDataError, match="NaN"):
        PortfolioImprovement(PHI, messages() * torch.nan, tried=tried)
    with pytest.raises(InputDataError, match="5 numbers"):
        PortfolioImprovement(PHI, messages(), tried=tried, agent_weights=torch.ones(4))
    with pytest.raises(InputDataError, match="from 0 on"):
        PortfolioImprovement(PHI, messages(), tried=tried, agent_weights=-torch.ones(N))
    with pytest.raises(InputDataError, match="positive weight"):
        PortfolioImprovement(PHI, messages(), tried=tried, agent_weights=torch.zeros(N))
