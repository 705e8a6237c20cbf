"""The public grid: rounding, bounds, exact sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from hypothesis import given
from hypothesis import strategies as st

from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.rng import generator


@given(bound=st.floats(1e-90, 1e90), bits=st.integers(0, 40))
def test_the_step_is_the_largest_power_of_two_up_to_the_wanted_one(bound: float, bits: int) -> None:
    grid = PublicGrid(dim=1, bound=bound, num_agents=2, precision=2.0**-bits)
    mantissa, _ = math.frexp(grid.step)
    assert mantissa == 0.5
    assert grid.step <= bound * 2.0**-bits < 2 * grid.step


@given(
    bound=st.floats(1e-3, 1e6),
    shares=st.lists(st.floats(-1, 1), min_size=1, max_size=20),
)
def test_a_number_moves_by_half_a_step_at_most_and_then_no_more(
    bound: float, shares: list[float]
) -> None:
    grid = PublicGrid(dim=len(shares), bound=bound, num_agents=3)
    values = torch.tensor(shares, dtype=torch.float64) * bound
    integers = grid.to_integers(values)
    assert integers.dtype == torch.int64
    grid.check_integers(integers)
    rounded = grid.to_values(integers)
    assert float((rounded - values).abs().max()) <= grid.step / 2
    inside = rounded.clamp(-bound, bound)  # the last point may lie half a step beyond the bound
    assert torch.equal(grid.to_values(grid.to_integers(inside)), rounded)


def test_the_bound_itself_is_on_the_grid_and_sums_are_exact() -> None:
    grid = PublicGrid(dim=2, bound=1e4, num_agents=50)
    integers = grid.to_integers(torch.tensor([1e4, -1e4], dtype=torch.float64))
    assert integers.abs().tolist() == [grid.largest] * 2
    assert grid.to_values(50 * integers).tolist() == [5e5, -5e5]
    grid.check_integers(50 * integers, 50)
    with pytest.raises(InputDataError, match="2 of 2 integers"):
        grid.check_integers(50 * integers, 49)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0000001, -2.0])
def test_nothing_is_clipped(value: float) -> None:
    grid = PublicGrid(dim=3, bound=1.0, num_agents=2)
    values = torch.tensor([0.25, value, 0.5], dtype=torch.float64)
    with pytest.raises(InputDataError, match="1 of 3 numbers") as caught:
        grid.to_integers(values)
    assert str(value) not in str(caught.value)


def test_shapes_and_dtypes() -> None:
    grid = PublicGrid(dim=3, bound=1.0, num_agents=2)
    with pytest.raises(BotorchTensorDimensionError, match=r"\(3,\), got \(1, 3\)"):
        grid.to_integers(torch.zeros(1, 3, dtype=torch.float64))
    with pytest.raises(InputDataError, match="float64"):
        grid.to_integers(torch.zeros(3, dtype=torch.float32))
    with pytest.raises(InputDataError, match="int64"):
        grid.to_values(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(InputDataError, match="int64"):
        grid.check_integers(torch.zeros(3, dtype=torch.int32))
    for integer in (2**53 + 1, -(2**53) - 1, -(2**63)):
        with pytest.raises(InputDataError, match=r"2\^53"):
            grid.to_values(torch.tensor([integer]))
        with pytest.raises(InputDataError, match="1 of 3 integers"):
            grid.check_integers(torch.tensor([0, integer, 0]))


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 0},
        {"dim": True},
        {"dim": 2.0},
        {"num_agents": 0},
        {"bound": 0.0},
        {"bound": math.nan},
        {"bound": math.inf},
        {"precision": 0.0},
        {"precision": 1.5},
        {"precision": math.nan},
        {"precision": 1e-300},
        {"precision": 2.0**-50},
    ],
)
def test_refuses_settings(change: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        PublicGrid(**{"dim": 2, "bound": 3.0, "num_agents": 50, "precision": 2.0**-30, **change})


def test_says_which_precision_would_fit() -> None:
    with pytest.raises(InputDataError, match="at least") as caught:
        PublicGrid(dim=1, bound=1.0, num_agents=64, precision=2.0**-52)
    wanted = float(str(caught.value).rsplit(" ", 1)[1].rstrip("."))
    PublicGrid(dim=1, bound=1.0, num_agents=64, precision=wanted * 1.01)


def test_rounding_is_to_the_nearest_on_many_numbers() -> None:
    grid = PublicGrid(dim=1000, bound=1.0, num_agents=2, precision=2.0**-10)
    values = generator(0).uniform(1000) * 2 - 1
    assert torch.equal(grid.to_integers(values), (values * 1024).round().long())
