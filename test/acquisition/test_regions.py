"""Regions tile the cube, and weights and schedules are those of the closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from botorch_fed.acquisition import (
    ExplorationSchedule,
    Partition,
    SoftmaxSchedule,
    exploration_weights,
)
from botorch_fed.acquisition.regions import MAX_REGIONS
from botorch_fed.wire.codec import decode, encode
from test.cases import uniform

SCHEDULES: list[Any] = [
    SoftmaxSchedule(15, plateau=10, decay=30),
    SoftmaxSchedule(3, plateau=1000, decay=0),
    SoftmaxSchedule(0),
]
REAL = SoftmaxSchedule(a=15, plateau=10, decay=30)

partitions = st.builds(Partition.regular, st.integers(1, MAX_REGIONS), st.integers(1, 6))


def _corners(partition: Partition) -> tuple[Tensor, Tensor]:
    bounds = torch.stack([partition.bounds(i) for i in range(partition.num_regions)])
    return bounds[:, 0], bounds[:, 1]


# ------------------------------------------------------------------ regions


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 6])
def test_volumes_are_equal(dim: int) -> None:
    for num_regions in range(1, MAX_REGIONS + 1):
        lower, upper = _corners(Partition.regular(num_regions, dim))
        assert lower.shape == (num_regions, dim)
        volumes = (upper - lower).prod(dim=-1)
        torch.testing.assert_close(
            volumes, torch.full_like(volumes, 1 / num_regions), rtol=1e-12, atol=0
        )


@given(partitions, st.integers(0, 100))
def test_every_point_lies_in_exactly_one_region(partition: Partition, seed: int) -> None:
    lower, upper = _corners(partition)
    # Faces and corners, combined at random, and points between them.
    edges = torch.cat([lower, upper])
    rows = (uniform(200, partition.dim, seed=seed) * len(edges)).long()
    X = torch.cat([edges.gather(0, rows), uniform(200, partition.dim, seed=seed)])
    points = X.unsqueeze(1)
    inside = (points >= lower) & ((points < upper) | ((upper == 1) & (points == 1)))
    assert bool((inside.all(dim=-1).sum(dim=-1) == 1).all())
    regions = partition.region_of(X.reshape(2, 200, -1))
    assert regions.shape == (2, 200)
    assert torch.equal(regions.flatten(), inside.all(dim=-1).long().argmax(dim=-1))


@pytest.mark.parametrize(
    ("num_regions", "dim", "sides"),
    [
        (1, 3, [1, 1, 1]),
        (2, 3, [1 / 2, 1, 1]),
        (3, 1, [1 / 3]),
        (4, 1, [1 / 4]),
        (4, 2, [1 / 2, 1 / 2]),
        (4, 5, [1 / 2, 1 / 2, 1, 1, 1]),
        (6, 2, [1 / 2, 1 / 3]),
        (8, 3, [1 / 2, 1 / 2, 1 / 2]),
        (64, 6, [1 / 2] * 6),
    ],
)
def test_regions_by_hand(num_regions: int, dim: int, sides: list[float]) -> None:
    lower, upper = _corners(Partition.regular(num_regions, dim))
    expected = torch.tensor(sides, dtype=torch.float64).expand(num_regions, dim)
    torch.testing.assert_close(upper - lower, expected)


def test_faces_belong_to_the_region_above() -> None:
    partition = Partition.regular(4, 2)
    X = torch.tensor(
        [[0, 0], [0, 0.5], [0.5, 0.4], [0.5, 0.5], [1, 1], [0, 1]], dtype=torch.float64
    )
    assert partition.region_of(X).tolist() == [0, 1, 2, 3, 3, 1]
    assert partition.bounds(2).tolist() == [[0.5, 0.0], [1.0, 0.5]]


@given(partitions, st.integers(0, 100))
def test_points_are_moved_into_a_region_and_back(partition: Partition, seed: int) -> None:
    U = torch.cat([uniform(20, partition.dim, seed=seed), torch.zeros(1, partition.dim)])
    U = torch.cat([U, torch.ones(1, partition.dim)])  # the upper corner is a neighbour's
    for region in {0, partition.num_regions // 2, partition.num_regions - 1}:
        X = partition.to_region(region, U)
        assert bool((partition.region_of(X) == region).all())
        torch.testing.assert_close(partition.from_region(region, X), U, rtol=0, atol=1e-13)
    regions = torch.arange(len(U)) % partition.num_regions
    X = partition.to_region(regions, U)
    assert torch.equal(partition.region_of(X), regions)
    torch.testing.assert_close(partition.from_region(regions, X), U, rtol=0, atol=1e-13)


def test_moving_is_affine_up_to_the_faces() -> None:
    partition = Partition.regular(3, 1)
    U = torch.tensor([[0.0], [0.5], [1.0]], dtype=torch.float64, requires_grad=True)
    X = partition.to_region(1, U)
    torch.testing.assert_close(
        X.detach(), torch.tensor([[2 / 6], [3 / 6], [4 / 6]], dtype=torch.float64)
    )
    (gradient,) = torch.autograd.grad(X.sum(), U)
    # At the faces, too.
    torch.testing.assert_close(gradient, torch.full((3, 1), 1 / 3, dtype=torch.float64))


@given(partitions, st.integers(1, 300))
def test_agents_are_spread_evenly(partition: Partition, num_agents: int) -> None:
    regions = partition.assign(num_agents)
    counts = [regions.count(i) for i in range(partition.num_regions)]
    assert sum(counts) == num_agents
    assert max(counts) - min(counts) <= 1


def test_partitions_are_values() -> None:
    partition = Partition.regular(6, 3)
    partition.region_of(uniform(3, 3))
    assert decode(encode(partition), Partition) == partition
    assert len({partition, Partition.regular(6, 3), Partition.regular(5, 3)}) == 2
    by_hand = Partition(((0,), (0.3,)), ((0.3,), (1,)))  # type: ignore[arg-type]
    assert by_hand.region_of(torch.tensor([[0.29], [0.3]], dtype=torch.float64)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        ((), (), "Expected 1 to 64 regions"),
        (((0.0,),), ((0.5,), (1.0,)), "1 lower and 2 upper"),
        (((0.0,),), ((1.0, 1.0),), r"one dimension d > 0, got dimensions \[1, 2\]"),
        (((),), ((),), r"got dimensions \[0\]"),
        (((0.0,),), ((0.5,),), "total volume 1, got volume 0.5"),
        (((0.0,), (0.4,)), ((0.5,), (0.9,)), "without overlap"),
        (((0.0,), (0.0,)), ((0.5,), (0.5,)), "without overlap"),
        (((0.5,), (0.5,)), ((0.5,), (1.0,)), "0 <= lower < upper <= 1"),
        (((0.0,),), ((2.0,),), "0 <= lower < upper <= 1"),
        (((math.nan,),), ((1.0,),), "0 <= lower < upper <= 1"),
    ],
)
def test_what_is_no_partition(lower: Any, upper: Any, message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        Partition(lower, upper)


def test_bad_input() -> None:
    partition = Partition.regular(4, 2)
    for num_regions, dim in [(0, 2), (65, 2), (4, 0)]:
        with pytest.raises(InputDataError, match="1 to 64 regions and a positive dimension"):
            Partition.regular(num_regions, dim)
    for value in [1 + 1e-9, -1e-9, math.nan]:
        X = torch.tensor([[0.5, 0.5], [0.5, value]], dtype=torch.float64)
        with pytest.raises(InputDataError, match="1 of 2 points lie in no region"):
            partition.region_of(X)
        with pytest.raises(InputDataError, match="points of the unit cube"):
            partition.to_region(0, X)
    for call in [partition.region_of, lambda X: partition.to_region(0, X)]:
        with pytest.raises(BotorchTensorDimensionError, match="batch_shape x 2"):
            call(uniform(3, 3))
    for region in [-1, 4, 1.0, torch.tensor([0, 7])]:
        with pytest.raises(InputDataError, match="integers from 0 to 3"):
            partition.to_region(region, uniform(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match="at least one agent"):
        partition.assign(0)


# ------------------------------------------------------------------ weights


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=60),
    st.one_of(st.just(0.0), st.floats(0, 30), st.floats(0, 1e6)),
)
def test_rows_of_weights_add_up_to_one(regions: list[int], contrast: float) -> None:
    weights = exploration_weights(regions, 8, contrast)
    assert weights.shape == (8, len(regions))
    assert bool((weights >= 0).all())
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(8).double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("num_agents", "num_regions"), [(29, 4), (200, 2), (50, 6), (3, 5)])
@pytest.mark.parametrize("contrast", [0.0, 0.52, 2.6, 15.0])
def test_weights_are_the_closed_form(num_agents: int, num_regions: int, contrast: float) -> None:
    regions = Partition.regular(num_regions, 2).assign(num_agents)
    weights = exploration_weights(regions, num_regions, contrast)
    for i in range(num_regions):
        size = regions.count(i)
        Z = size * math.exp(contrast) + num_agents - size
        expected = [math.exp(contrast * (region == i)) / Z for region in regions]
        torch.testing.assert_close(
            weights[i], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("contrast", [-1.0, math.inf, math.nan])
def test_bad_contrasts(contrast: float) -> None:
    for make in [SoftmaxSchedule, lambda c: exploration_weights([0], 1, c)]:
        with pytest.raises(InputDataError, match="finite contrast >= 0"):
            make(contrast)


def test_bad_regions_of_agents() -> None:
    for regions in [[], [0, 2], [-1]]:
        with pytest.raises(InputDataError, match="a region from 0 to 1"):
            exploration_weights(regions, 2, 1.0)


# ------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    ("t", "stage"),
    [(1, 16), (11, 16), (30, 6.17), (35, 3.6), (36, 3.07), (37, 2.55), (38, 2.03), (39, 1.52)],
)
def test_stages_as_published(t: int, stage: float) -> None:
    # With a_t = contrast + 1, T_c = 10 and T_d = 30; the stages are printed to two decimals.
    assert REAL(t) + 1 == pytest.approx(stage, abs=0.02)


def test_the_plateau_lasts_a_round_longer() -> None:
    contrasts = [REAL(t) for t in range(1, 61)]
    assert contrasts[:11] == [15.0] * 11
    assert contrasts[11] < 15
    assert contrasts[38] > 0
    assert contrasts[39:] == [0.0] * 21
    decay = torch.linspace(15, 0, 30, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(contrasts[10:40], dtype=torch.float64), decay)
    synthetic = SoftmaxSchedule(15, plateau=5, decay=5)
    expected = [15.0] * 6 + [11.25, 7.5, 3.75, 0.0]  # equal weights from round 10 on
    assert [synthetic(t) for t in range(1, 11)] == pytest.approx(expected)


@pytest.mark.parametrize(("decay", "expected"), [(0, [1, 1, 0, 0]), (1, [1, 1, 1, 0])])
def test_short_decays(decay: int, expected: list[float]) -> None:
    schedule = SoftmaxSchedule(1, plateau=2, decay=decay)
    assert [schedule(t) for t in range(1, 5)] == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_never_grow(schedule: ExplorationSchedule) -> None:
    contrasts = [schedule(t) for t in range(1, 100)]
    assert contrasts == sorted(contrasts, reverse=True)
    assert all(0 <= contrast < math.inf for contrast in contrasts)
    for wrong in [0, -1, 1.5, True]:
        with pytest.raises(InputDataError, match="integer >= 1"):
            schedule(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_travel_as_numbers(schedule: Any) -> None:
    assert decode(encode(schedule), type(schedule)) == schedule


def test_fixed_schedules() -> None:
    assert {SoftmaxSchedule(3, plateau=50)(t) for t in range(1, 50)} == {3.0}
    assert {SoftmaxSchedule(0)(t) for t in range(1, 50)} == {0.0}


def test_bad_schedules() -> None:
    for plateau, decay in [(-1, 3), (3, -1), (1.5, 3), (True, 3)]:
        with pytest.raises(InputDataError, match="a number of rounds"):
            SoftmaxSchedule(15, plateau=plateau, decay=decay)  # type: ignore[arg-type]
