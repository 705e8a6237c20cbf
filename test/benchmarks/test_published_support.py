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
    Clustering,
    RawInputWarning,
    assign_sums,
    centres_from_sums,
    global_clustering,
    local_clustering,
    published_support,
)
from botorch_fed.rng import generator
from test.cases import normal, uniform

BOX = torch.tensor([[-1.0, 2.0], [3.0, 10.0]]).double()


# ------------------------------------------------------------------ Algorithm 1


def quietly(X: Tensor, k: int, seed: int, **options: float) -> Clustering:
    """An agent's clusters, whatever they reveal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RawInputWarning)
        return local_clustering(X, k, generator=generator(seed), **options)  # type: ignore[arg-type]


def _cost(X: Tensor, centres: Tensor) -> float:
    return float(torch.cdist(X, centres).amin(dim=-1).square().sum())


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
    for clusters in (
        quietly(X, k, seed),
        global_clustering([row[None] for row in X], k, generator=generator(seed)),
    ):
        costs = clusters.costs
        assert all(later <= earlier * (1 + 1e-12) + 1e-12 for earlier, later in pairwise(costs))
        assert clusters.cost == pytest.approx(_cost(X, clusters.centres), rel=1e-6, abs=1e-9)
        assert clusters.centres.shape == (k, d)
        assert float(clusters.sizes.sum()) == n
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
    assert clusters.cost < _cost(X, X[:5])


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


def test_seeding_prefers_what_is_far() -> None:
    X = torch.tensor([[0.0], [0.01], [1.0]]).double()
    ends = sum(quietly(X, 2, seed, max_iterations=1).cost < 1e-3 for seed in range(300))
    # Only a first choice of one of the left points and a second of the other misses the right one:
    # probability 2/3 · 1e-4.
    assert ends >= 298


def test_the_server_begins_with_an_agent_and_adds_what_is_farthest() -> None:
    """Before any move: the drawn agent's centres, then the farthest, one after the other."""
    parts = [normal(3, 2, seed=seed) for seed in range(4)]
    everything = torch.cat(parts)
    drawn = set()
    for seed in range(30):
        u = float(generator(seed).uniform(1))
        first = int(u * len(parts))
        drawn.add(first)
        expected = parts[first]
        while len(expected) < 7:
            gaps = torch.cdist(everything, expected).amin(dim=-1)
            expected = torch.cat([expected, everything[gaps.argmax()][None]])
        found = global_clustering(parts, 7, generator=generator(seed), tol=math.inf)
        assert torch.equal(found.centres, expected)
        moved = global_clustering(parts, 7, generator=generator(seed))
        assert moved.costs[0] == found.cost
        assert moved.converged
    assert drawn == {0, 1, 2, 3}


def test_centres_count_once_whatever_is_behind_them() -> None:
    """One agent's centre stands for nine points and weighs as much as the other's."""
    many = local_clustering(torch.zeros(9, 1).double(), 1, generator=generator(0))
    few = torch.ones(1, 1).double()
    assert float(many.sizes) == 9
    found = global_clustering([many.centres, few], 1, generator=generator(0))
    assert float(found.centres) == 0.5
    assert float(found.sizes) == 2


def test_what_the_server_refuses() -> None:
    parts = [uniform(3, 2), uniform(2, 2, seed=1)]
    with pytest.raises(InputDataError, match="Cannot make 6 clusters of 5 centres"):
        global_clustering(parts, 6, generator=generator(0))
    with pytest.raises(InputDataError, match="3 centres for a support set of 2"):
        global_clustering(parts, 2, generator=generator(0))
    with pytest.raises(BotorchTensorDimensionError, match="parts must be `n x d`"):
        global_clustering([uniform(3)], 2, generator=generator(0))


def test_a_support_set_of_few_inputs_is_all_of_them() -> None:
    inputs = [uniform(3, 2, seed=seed) for seed in range(2)]
    streams = [generator(seed) for seed in range(3)]
    whole = published_support(inputs, 9, clusters=4, streams=streams)
    assert sorted(whole.tolist()) == sorted(torch.cat(inputs).tolist())
    some = published_support(inputs, 3, clusters=2, streams=[generator(n) for n in range(3)])
    assert some.shape == (3, 2)


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
