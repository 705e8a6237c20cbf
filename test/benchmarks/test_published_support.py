"""Support sets that follow the data: clusters that leak, and the sums of a k-means with noise."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.papers.published.support import (
    RawInputWarning,
    assign_sums,
    centres_from_sums,
    global_clustering,
    local_clustering,
)
from botorch_fed.rng import generator
from test.cases import normal, uniform

BOX = torch.tensor([[-1.0, 2.0], [3.0, 10.0]]).double()


# ------------------------------------------------------------------ Algorithm 1


def _cost(X: Tensor, weights: Tensor, centres: Tensor) -> float:
    return float(weights @ torch.cdist(X, centres).amin(dim=-1).square())


@given(
    n=st.integers(1, 40),
    d=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    rounded=st.booleans(),
    data=st.data(),
)
def test_cost_never_increases(
    n: int, d: int, seed: int, rounded: bool, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n))
    X = normal(n, d, seed=seed)
    X = X.round() if rounded else X  # many copies
    weights = (5 * uniform(n, seed=seed)).ceil()
    clusters = global_clustering(X, weights, k, generator=generator(seed))
    costs = clusters.costs
    assert all(later <= earlier * (1 + 1e-12) + 1e-12 for earlier, later in pairwise(costs))
    assert clusters.cost == pytest.approx(_cost(X, weights, clusters.centres), rel=1e-6, abs=1e-9)
    assert clusters.centres.shape == (k, d)
    assert float(clusters.sizes.sum()) == float(weights.sum())
    assert clusters.converged


def test_centres_are_means_of_their_cells() -> None:
    X = uniform(60, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RawInputWarning)
        clusters = local_clustering(X, 5, generator=generator(0), tol=0)
    labels = torch.cdist(X, clusters.centres).argmin(dim=-1)
    for j in range(5):
        torch.testing.assert_close(clusters.centres[j], X[labels == j].mean(dim=0))
        assert int(clusters.sizes[j]) == int((labels == j).sum())
    assert clusters.cost < _cost(X, torch.ones(60).double(), X[:5])


def test_well_separated_clusters_are_found() -> None:
    middles = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]]).double()
    X = (middles[:, None] + 0.1 * normal(4, 25, 2)).reshape(-1, 2)
    for seed in range(10):
        clusters = local_clustering(X, 4, generator=generator(seed))
        assert float(torch.cdist(middles, clusters.centres).amin(dim=-1).max()) < 0.1
        assert clusters.sizes.tolist() == [25.0] * 4


def test_as_many_clusters_as_points_sends_the_points() -> None:
    X = uniform(7, 3)
    with pytest.warns(RawInputWarning, match="7 of 7 cluster centres are raw inputs"):
        clusters = local_clustering(X, 7, generator=generator(0))
    assert sorted(clusters.centres.tolist()) == sorted(X.tolist())  # to the last bit
    assert clusters.cost == 0
    with pytest.raises(InputDataError, match="Cannot make 8 clusters of 7 points"):
        local_clustering(X, 8, generator=generator(0))
    copies = X[:2].repeat(3, 1)
    clusters = local_clustering(copies, 6, generator=generator(0))
    assert clusters.cost == 0
    assert float(clusters.sizes.sum()) == 6


def test_no_warning_without_raw_inputs() -> None:
    X = uniform(6, 2).repeat(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local_clustering(X, 3, generator=generator(0))


@given(seed=st.integers(0, 10**6))
def test_order_of_agents_changes_nothing(seed: int) -> None:
    centres, sizes = normal(15, 2, seed=seed).round(decimals=1), (9 * uniform(15, seed=seed)).ceil()
    order = torch.argsort(uniform(15, seed=seed + 1))
    first = global_clustering(centres, sizes, 4, generator=generator(1))
    second = global_clustering(centres[order], sizes[order], 4, generator=generator(1))
    assert torch.equal(first.centres, second.centres)
    assert torch.equal(first.sizes, second.sizes)
    assert first.costs == second.costs


def test_weight_is_multiplicity_and_zero_is_absence() -> None:
    X = uniform(6, 2)
    sizes = torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0, 2.0]).double()
    one = global_clustering(X, sizes, 1, generator=generator(0))
    torch.testing.assert_close(one.centres[0], sizes @ X / sizes.sum())
    clusters = global_clustering(X, sizes, 5, generator=generator(0))
    assert sorted(clusters.centres.tolist()) == sorted(X[sizes > 0].tolist())
    with pytest.raises(InputDataError, match="6 clusters of 5 centres of positive size"):
        global_clustering(X, sizes, 6, generator=generator(0))
    with pytest.raises(InputDataError, match="1 of 6 sizes are negative"):
        global_clustering(X, sizes - 0.5, 2, generator=generator(0))
    with pytest.raises(BotorchTensorDimensionError, match=r"sizes must have shape \(6,\)"):
        global_clustering(X, sizes[:5], 2, generator=generator(0))


def test_seeding_prefers_what_is_far() -> None:
    X = torch.tensor([[0.0], [0.01], [1.0]]).double()
    ends = 0
    for seed in range(300):
        clusters = global_clustering(
            X, torch.ones(3).double(), 2, generator=generator(seed), max_iterations=1
        )
        ends += int(clusters.cost < 1e-3)
    # Only a first choice of one of the left points and a second of the other misses the right one:
    # probability 2/3 · 1e-4.
    assert ends >= 298


# ------------------------------------------------------------------ k-means with noise


def test_a_step_without_noise_is_lloyds() -> None:
    X, centres = uniform(80, 3), uniform(5, 3, seed=1)
    sums, counts = assign_sums(X, centres)
    labels = torch.cdist(X, centres).argmin(dim=-1)
    expected = torch.stack([X[labels == j].mean(dim=0) for j in range(5)])
    assert counts.tolist() == [int((labels == j).sum()) for j in range(5)]
    torch.testing.assert_close(centres_from_sums(sums, counts, centres), expected)
    # The same in another box.
    lower = torch.tensor([-3.0, 0.0, 7.0]).double()
    bounds = torch.stack([lower, lower + 1])
    sums, counts = assign_sums(lower + X, lower + centres, bounds=bounds)
    moved = centres_from_sums(sums, counts, lower + centres, bounds=bounds)
    torch.testing.assert_close(moved, lower + expected)


def test_points_are_clipped_and_no_points_are_a_sum() -> None:
    centres = torch.tensor([[0.2, 0.2], [0.8, 0.8]]).double()
    sums, counts = assign_sums(torch.tensor([[50.0, 0.9]]).double(), centres)
    torch.testing.assert_close(sums, torch.tensor([[0.0, 0.0], [0.5, 0.4]]).double())
    assert counts.tolist() == [0.0, 1.0]
    sums, counts = assign_sums(torch.empty(0, 2).double(), centres)
    assert not bool(sums.any())
    assert not bool(counts.any())
    with pytest.raises(InputDataError, match="1 NaN"):
        assign_sums(torch.tensor([[torch.nan, 0.9]]).double(), centres)


@pytest.mark.parametrize("d", [1, 2, 6, 12])
def test_sensitivity_is_as_stated(d: int) -> None:
    bounds = torch.stack([torch.zeros(d), torch.arange(1.0, d + 1)]).double()
    half = (bounds[1] - bounds[0]) / 2
    zero_out = float((1 + half.square().sum()).sqrt())
    replaced = max(math.sqrt(2) * zero_out, 2 * float(half.norm()))

    def joint(X: Tensor, centres: Tensor) -> Tensor:
        sums, counts = assign_sums(X, centres, bounds=bounds)
        return torch.cat([sums.flatten(), counts])

    rest = bounds[1] * uniform(10, d)
    centres = bounds[1] * uniform(4, d, seed=1)
    ends = torch.stack([torch.zeros(d), bounds[1]]).double()
    reached_zero = reached = 0.0
    for case in range(200):
        pair = 3 * bounds[1] * (uniform(2, d, seed=case) - 0.3)  # clipped
        pair = ends if case == 0 else pair
        cells = torch.stack([centres[0], centres[0]]) if case % 2 else ends
        first, second = (joint(torch.cat([rest, x[None]]), cells) for x in pair)
        reached_zero = max(reached_zero, float((first - joint(rest, cells)).norm()))
        reached = max(reached, float((first - second).norm()))
    one_cell = centres[:1]
    first, second = (joint(x[None], one_cell) for x in ends)
    reached = max(reached, float((first - second).norm()))
    assert reached_zero <= zero_out * (1 + 1e-12)
    assert reached_zero == pytest.approx(zero_out)
    assert reached <= replaced * (1 + 1e-12)
    assert reached == pytest.approx(replaced)


def test_small_and_negative_counts_keep_the_centre() -> None:
    previous = uniform(4, 2)
    sums = torch.tensor([[9.0, -9.0], [1.0, 1.0], [0.2, 0.1], [5.0, 5.0]]).double()
    counts = torch.tensor([2.0, -3.0, 0.9, 0.0]).double()
    centres = centres_from_sums(sums, counts, previous)
    assert centres[0].tolist() == [1.0, 0.0]  # clipped to the box
    assert torch.equal(centres[1:], previous[1:])
    assert torch.equal(centres_from_sums(sums, counts, previous, min_count=2.5), previous)
    with pytest.raises(InputDataError, match="counts"):
        centres_from_sums(sums, counts * torch.nan, previous)
    with pytest.raises(BotorchTensorDimensionError, match="sums and counts must have shapes"):
        centres_from_sums(sums, counts[:3], previous)
    with pytest.raises(InputDataError, match="min_count must be positive"):
        centres_from_sums(sums, counts, previous, min_count=0.0)


def test_bad_settings() -> None:
    with pytest.raises(BotorchTensorDimensionError, match="X must be `n x d`"):
        local_clustering(uniform(5), 2, generator=generator(0))
    for settings in ({"max_iterations": 0}, {"tol": -1.0}, {"tol": math.nan}):
        with pytest.raises(InputDataError, match="max_iterations must be positive"):
            local_clustering(uniform(5, 2), 2, generator=generator(0), **settings)
