"""Search in a shrinking region: what is summed, what is chosen, and where it leads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from botorch_fed.rng import generator
from botorch_fed.search.region import (
    NUM_MOMENTS,
    RegionPlan,
    RegionSearch,
    RegionView,
    contribution,
    first_plan,
    next_point,
    read_sum,
)
from test.cases import normal, uniform

SMALL = RegionSearch(num_inducing=6, num_candidates=2, wait=1, num_raw=64)
WIDE = replace(SMALL, num_candidates=3, final_half_width=0.1)


def hill(X: Tensor, centre: float = 0.3) -> Tensor:
    return 1 - 6 * (X - centre).square().sum(dim=-1, keepdim=True)


def data(agent: int, n: int = 8, d: int = 2) -> tuple[Tensor, Tensor]:
    X = uniform(n, d, seed=agent)
    return X, hill(X)


def plan(t: int = 2, **changes: Any) -> RegionPlan:
    centre = torch.tensor([0.35, 0.4]).double()
    made = replace(first_plan(SMALL, 2), t=t, centre=centre, half_width=0.2, mean=0.4, scale=0.5)
    return replace(made, **changes)


def rounds_of(
    search: RegionSearch, function: Callable[[Tensor], Tensor], rounds: int, agents: int = 3
) -> tuple[list[RegionView], list[Tensor]]:
    """A whole run of all agents, without a protocol."""
    X = [uniform(5, 2, seed=i) for i in range(agents)]
    current, views = first_plan(search, 2), []
    for t in range(rounds):
        total = sum(
            (contribution(search, current, x, function(x)) for x in X), torch.zeros(1).double()
        )
        views.append(read_sum(search, current, total, num_agents=agents, rounds=rounds))
        current = views[-1].following
        for i in range(agents):
            new = next_point(
                search, views[-1], X[i], stream=generator(i, "own", t), turn=t % agents == i
            )
            X[i] = torch.cat([X[i], new])
    return views, X


# ------------------------------------------------------------------ contributions


@pytest.mark.parametrize("d", [1, 2, 3])
def test_sizes_match(d: int) -> None:
    X, Y = data(0, d=d)
    assert contribution(SMALL, first_plan(SMALL, d), X, Y).shape == (SMALL.numbers(d),)
    assert not contribution(SMALL, first_plan(SMALL, d), X[:0], Y[:0]).any()


def test_contributions_add_up() -> None:
    # Agents are blocks of PITC: what does not depend on blocks adds up exactly.
    parts = [contribution(SMALL, plan(), *data(i)) for i in range(3)]
    whole = contribution(
        SMALL,
        plan(),
        torch.cat([data(i)[0] for i in range(3)]),
        torch.cat([data(i)[1] for i in range(3)]),
    )
    total = sum(parts, torch.zeros(1).double())
    near, squares, best, _, slope, inside, count = range(-NUM_MOMENTS, 0)
    for entry in (near, squares, slope, inside, count):
        assert float(total[entry]) == pytest.approx(float(whole[entry]), rel=1e-12)
    assert float(whole[best]) == max(float(part[best]) for part in parts)
    assert float(whole[count]) == 24


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_wild_outcomes_stay_within_the_bound(shift: float, spread: float, seed: int) -> None:
    X = uniform(8, 2, seed=seed)
    Y = (shift + spread * normal(8, 1, seed=seed)).clamp(-1e6, 1e6)
    for current in (first_plan(SMALL, 2), plan(), plan(scale=1e-3, half_width=0.02)):
        values = contribution(SMALL, current, X, Y)
        assert bool(values.isfinite().all())
        assert float(values.abs().max()) <= SMALL.largest(8)


# ------------------------------------------------------------------ plans


@given(st.integers(1, 60), st.integers(0, 70), st.floats(0.001, 0.5))
@settings(max_examples=40, deadline=None)
def test_the_region_never_grows(rounds: int, wait: int, final: float) -> None:
    search = replace(SMALL, wait=wait, final_half_width=final)
    widths = [search.half_width(t, rounds) for t in range(rounds + 1)]
    assert widths == sorted(widths, reverse=True)
    assert all(width == 0.5 for width in widths[: wait + 1])
    assert widths[-1] == pytest.approx(final if rounds > wait else 0.5)


def test_the_box_stays_in_the_cube() -> None:
    for centre in ([0.0, 1.0], [0.05, 0.5], [0.5, 0.97]):
        lower, upper = plan(centre=torch.tensor(centre).double()).box
        assert bool(((lower >= 0) & (upper <= 1) & (lower < upper)).all())
        assert bool((upper - lower <= 0.4 + 1e-12).all())


def test_kernels_are_compared_in_public() -> None:
    views, _ = rounds_of(WIDE, hill, 3)
    for seen in views:
        assert len(set(seen.plan.kernels)) == WIDE.num_candidates
        assert seen.kernel in seen.plan.kernels
        assert seen.following.kernels[0] == seen.kernel
        assert seen.following.t == seen.plan.t + 1
    again, _ = rounds_of(WIDE, hill, 3)
    assert [seen.plan.kernels for seen in again] == [seen.plan.kernels for seen in views]


# ------------------------------------------------------------------ where it leads


def test_the_centre_of_a_quadratic_is_found() -> None:
    views, X = rounds_of(SMALL, hill, 5)
    centre = views[-1].following.centre
    assert float((centre - 0.3).abs().max()) < 1e-3
    assert max(float(hill(x).max()) for x in X) > 1 - 1e-4


def test_the_maximum_on_a_face_is_found() -> None:
    views, _ = rounds_of(SMALL, lambda X: hill(X, centre=1.2), 6)
    assert float((views[-1].following.centre - 1).abs().max()) < 1e-3


def test_points_differ_between_agents_and_stay_in_the_cube() -> None:
    _, X = rounds_of(WIDE, hill, 4)
    last = torch.cat([x[-1:] for x in X])
    assert bool(((last >= 0) & (last <= 1)).all())
    assert float(torch.pdist(last).min()) > 0
    for x in X:
        assert float(torch.pdist(x).min()) > 1e-6  # nobody looks twice at one place


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_the_outcome_scale_is_chosen(scale: str) -> None:
    def function(X: Tensor) -> Tensor:
        bowl = 1 - hill(X, centre=0.5)
        return -bowl if scale == "linear" else -(2 * bowl).exp()

    search = replace(SMALL, num_candidates=6, wait=9)
    views, _ = rounds_of(search, function, 5)
    assert search.warps[views[-1].warp] == scale
    one = replace(search, warps=("linear",))
    views, _ = rounds_of(one, function, 2)
    assert {seen.warp for seen in views} == {0}


def test_a_sum_without_data_is_a_prior() -> None:
    total = torch.zeros(SMALL.numbers(2)).double()
    seen = read_sum(SMALL, first_plan(SMALL, 2), total, num_agents=3, rounds=4)
    assert not seen.posterior.mean.any()
    none = torch.zeros(0, 2).double()
    at = next_point(SMALL, seen, none, stream=generator(0), turn=False)
    assert bool(((at >= 0) & (at <= 1)).all())


def test_plans_do_not_depend_on_who_is_told_first() -> None:
    parts = [contribution(SMALL, plan(), *data(i)) for i in range(3)]
    views = [
        read_sum(SMALL, plan(), sum(parts[1:], parts[0]), num_agents=3, rounds=6) for _ in range(2)
    ]
    assert torch.equal(views[0].following.centre, views[1].following.centre)
    assert views[0].following.kernels == views[1].following.kernels


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_inducing": 0},
        {"final_half_width": 0.0},
        {"final_half_width": 0.6},
        {"wait": -1},
        {"keep": 0.5},
        {"warps": ("log",)},
        {"warps": ("linear", "cubic")},
        {"lengthscales": (0.0,)},
        {"noises": (math.inf,)},
        {"num_candidates": 0},
        {"num_candidates": 37},
        {"spread": -1.0},
        {"num_raw": 1},
        # What a server may not make a site compute:
        {"num_raw": 10**9},
        {"num_restarts": 500},
        {"wait": 10**18},
        {"keep": math.nan},
        {"keep": math.inf},
        {"warps": ("linear",) * 10**6},
        {"lengthscales": (1.0,) * 10**6},
        {"amplitudes": (1.0,) * 17},
        {"noises": ()},
        {"noises": (1e-300,)},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        RegionSearch(**wrong)


def test_lists_are_as_good_as_tuples() -> None:
    listed: Any = {"lengthscales": [1.0, 2.0], "warps": ["linear"]}
    search = replace(SMALL, **listed)
    assert hash(search) == hash(replace(SMALL, lengthscales=(1.0, 2.0), warps=("linear",)))
