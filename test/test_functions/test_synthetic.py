"""Synthetic agents: the process they are drawn from, and how far they lie from each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError

from botorch_fed.test_functions import SyntheticGPAgents
from botorch_fed.test_functions.synthetic import _sample, _spectrum


@pytest.mark.parametrize("lengthscale", [0.01, 0.03, 0.3, 2.0])
def test_series_has_the_squared_exponential_covariance(lengthscale: float) -> None:
    frequencies, stds = _spectrum(lengthscale)
    distance = torch.linspace(0, 1, 201).double()
    covariance = (stds.square() * torch.cos(distance[:, None] * frequencies)).sum(dim=-1)
    expected = torch.exp(-0.5 * (distance / lengthscale).square())
    torch.testing.assert_close(covariance, expected, rtol=0, atol=1e-13)


def test_samples_are_scaled_and_the_same_on_a_finer_grid() -> None:
    from botorch_fed.rng import generator

    points = torch.linspace(0, 1, 401).double().unsqueeze(-1)
    fine, coarse = (_sample(p, 3, 0.1, generator(0, "s")) for p in (points, points[::2]))
    for values in (fine, coarse):
        assert torch.equal(values.amin(dim=-1), torch.zeros(3).double())
        assert torch.equal(values.amax(dim=-1), torch.ones(3).double())
    assert float((fine[:, ::2] - coarse).abs().max()) < 1e-3  # only the scaling sees the grid


@pytest.mark.parametrize("distance", [0.0, 0.02, 1.2])
def test_all_others_lie_at_the_distance(distance: float) -> None:
    problem = SyntheticGPAgents(6, seed=0, distance=distance)
    target, gap = problem.values[0], problem.values[1:] - problem.values[0]
    assert float(target.min()) == 0.0
    assert float(target.max()) == 1.0
    torch.testing.assert_close(gap.abs(), torch.full_like(gap, distance), rtol=0, atol=1e-15)
    # 1,000 fair signs: their mean is off by 0.15 once in half a million.
    assert bool((gap.mean(dim=-1).abs() <= 0.15 * distance + 1e-15).all())
    if distance:
        assert not torch.equal(gap[0], gap[1])


def test_default_distance_and_who_is_perturbed() -> None:
    others = SyntheticGPAgents(4, seed=3)
    everyone = SyntheticGPAgents(4, seed=3, perturbed="all")
    assert torch.equal(others.values, SyntheticGPAgents(4, seed=3, distance=0.02).values)
    assert torch.equal(others.values[1:], everyone.values[1:])
    gap = (everyone.values[0] - others.values[0]).abs()
    torch.testing.assert_close(gap, torch.full_like(gap, 0.02), rtol=0, atol=1e-15)


def test_one_sign_per_agent_moves_no_maximiser() -> None:
    problem = SyntheticGPAgents(20, seed=0, sign="agent", distance=0.5)
    gap = problem.values[1:] - problem.values[0]
    assert float(gap.std(dim=-1).max()) < 1e-14
    assert set(gap[:, 0].sign().tolist()) == {-1.0, 1.0}
    assert len(problem.values.argmax(dim=-1).unique()) == 1


def test_heterogeneity_goes_from_equal_to_independent() -> None:
    equal, mixed, apart = (
        SyntheticGPAgents(30, seed=0, heterogeneity=alpha) for alpha in (0.0, 0.7, 1.0)
    )
    assert torch.equal(equal.values, equal.values[:1].expand(30, -1))
    torch.testing.assert_close(mixed.values, 0.7 * apart.values + 0.3 * equal.values)
    for problem in (equal, mixed, apart):
        assert bool(((problem.values >= 0) & (problem.values <= 1)).all())
    off_diagonal = ~torch.eye(30, dtype=torch.bool)
    # Means of 435 correlations with a deviation of about 0.25, not quite independent.
    assert abs(float(torch.corrcoef(apart.values)[off_diagonal].mean())) < 0.05
    # Equal variances v in expectation: 0.3^2 / (0.3^2 + 0.7^2) = 0.155.
    assert 0.05 < float(torch.corrcoef(mixed.values)[off_diagonal].mean()) < 0.3


def test_seeds() -> None:
    assert torch.equal(SyntheticGPAgents(3, seed=1).values, SyntheticGPAgents(3, seed=1).values)
    assert not torch.equal(SyntheticGPAgents(3, seed=1).values, SyntheticGPAgents(3, seed=2).values)
    more = SyntheticGPAgents(5, seed=1).values  # agents do not change when others join
    assert torch.equal(more[:3], SyntheticGPAgents(3, seed=1).values)


def test_values_do_not_depend_on_threads() -> None:
    values = SyntheticGPAgents(3, seed=0).values
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(SyntheticGPAgents(3, seed=0).values, values)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("grid", [7, 1000])
def test_exact_on_the_grid_and_linear_between(grid: int) -> None:
    problem = SyntheticGPAgents(2, seed=0, grid=grid)
    assert problem.points.shape == (grid, 1)
    assert torch.equal(problem.evaluate(1, problem.points), problem.values[1])
    middles = (problem.points[1:] + problem.points[:-1]) / 2
    expected = (problem.values[1, 1:] + problem.values[1, :-1]) / 2
    torch.testing.assert_close(problem.evaluate(1, middles), expected, rtol=0, atol=1e-12)


def test_optimum_and_noise() -> None:
    problem = SyntheticGPAgents(3, seed=0, noise_var=0.04, distance=0.1)
    agent = problem[2]
    dense = torch.linspace(0, 1, 5000).double().unsqueeze(-1)
    assert agent.optimal_value == float(problem.values[2].max())
    assert float(agent(dense, noise=False).max()) <= agent.optimal_value
    assert agent.noise_std == pytest.approx(0.2)
    residual = agent(dense) - agent(dense, noise=False)
    assert float(residual.std()) == pytest.approx(0.2, rel=0.05)  # 5 / sqrt(2 * 5000)


def test_observations_of_the_other_agents() -> None:
    problem = SyntheticGPAgents(3, seed=0)
    X, Y = problem.observations(1, 2000, seed=5)
    assert X.shape == Y.shape == (2000, 1)
    assert set(X.squeeze(-1).tolist()) <= set(problem.points.squeeze(-1).tolist())
    residual = Y.squeeze(-1) - problem.evaluate(1, X)
    assert float(residual.std()) == pytest.approx(0.1, rel=0.08)  # 5 / sqrt(2 * 2000)
    assert float(X.mean()) == pytest.approx(0.5, abs=0.033)  # 5 / sqrt(12 * 2000)
    assert torch.equal(Y, problem.observations(1, 2000, seed=5)[1])
    assert not torch.equal(X, problem.observations(1, 2000, seed=6)[0])
    assert not torch.equal(X, problem.observations(2, 2000, seed=5)[0])
    assert problem.observations(1, 0, seed=5)[0].shape == (0, 1)
    with pytest.raises(IndexError, match=r"0..2, got 3"):
        problem.observations(3, 5, seed=0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"perturbed": "some"}, UnsupportedError, '"others" or "all", got \'some\''),
        ({"sign": "random"}, UnsupportedError, '"point" or "agent"'),
        ({"distance": 0.1, "heterogeneity": 0.5}, UnsupportedError, "leave one of them out"),
        ({"distance": -0.1}, InputDataError, "distance must be finite and not negative"),
        ({"noise_var": math.nan}, InputDataError, "noise_var must be finite"),
        ({"heterogeneity": 1.5}, InputDataError, r"heterogeneity must lie in \[0, 1\], got 1.5"),
        ({"lengthscale": 0.0}, InputDataError, r"lengthscale must lie in \[0.001, 10\], got 0"),
        ({"grid": 1}, InputDataError, "at least 1 agent and 2 grid points, got 4 and 1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SyntheticGPAgents(4, seed=0, **options)


def test_points_outside_the_unit_interval_are_refused() -> None:
    problem = SyntheticGPAgents(2, seed=0)
    with pytest.raises(InputDataError, match="1 of 2 points lie outside"):
        problem.evaluate(0, torch.tensor([[0.5], [1.1]]).double())
    assert math.isclose(problem.space.to_unit([{"x": 0.25}]).item(), 0.25)
