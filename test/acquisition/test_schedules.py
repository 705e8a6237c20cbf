"""Mixing schedules by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from botorch.exceptions.errors import InputDataError
from hypothesis import given
from hypothesis import strategies as st

from botorch_fed.acquisition import (
    Constant,
    InverseSquare,
    MixingSchedule,
    Polynomial,
    check_schedule,
)
from botorch_fed.wire.codec import decode, encode

SCHEDULES: list[Any] = [Polynomial(0.5), Polynomial(1), InverseSquare(), Constant(0.3)]


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Polynomial(0.5), {1: 1 - 0.5**0.5, 2: 1 - 0.5**0.5, 4: 0.5, 100: 0.9}),
        (Polynomial(1), {1: 0.5, 2: 0.5, 3: 2 / 3, 10: 0.9}),
        (InverseSquare(), {1: 0.75, 2: 0.75, 3: 8 / 9, 10: 0.99}),
        (Constant(1), {1: 1.0, 7: 1.0}),
    ],
)
def test_values_by_hand(schedule: MixingSchedule, values: dict[int, float]) -> None:
    for t, value in values.items():
        assert schedule(t) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_travels_as_numbers(schedule: Any) -> None:
    assert decode(encode(schedule), Polynomial, InverseSquare, Constant) == schedule


@given(st.floats(0.01, 5), st.integers(1, 10**6))
def test_polynomials_are_proper_and_increase(c: float, t: int) -> None:
    schedule = Polynomial(c)
    assert 0 < schedule(t) <= schedule(t + 1) <= 1
    assert schedule(1) == schedule(2)


def test_inverse_square_is_the_second_power() -> None:
    assert all(InverseSquare()(t) == pytest.approx(Polynomial(2)(t)) for t in range(1, 50))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_check_accepts_and_rounds_count_from_one(schedule: MixingSchedule) -> None:
    check_schedule(schedule, 60)
    for wrong in [0, -1, 1.5, True]:
        with pytest.raises(InputDataError, match="integer >= 1"):
            schedule(wrong)  # type: ignore[arg-type]


def test_check_refuses() -> None:
    with pytest.raises(InputDataError, match=r"got 0\.0 in round 1: start .* p_1 := p_2"):
        check_schedule(lambda t: 1 - t**-0.5, 10)
    with pytest.raises(InputDataError, match=r"got 1\.5 in round 3"):
        check_schedule(lambda t: t / 2, 10)
    with pytest.raises(
        InputDataError, match=r"falls from 1\.0 to 0\.5 in round 2.* not of the mess"
    ):
        check_schedule(lambda t: 1 / t, 10)
    with pytest.raises(InputDataError, match=r"\(0, 1\]"):
        check_schedule(Constant(0), 3)


def test_bad_numbers() -> None:
    for c in [0.0, -1.0, math.nan, math.inf]:
        with pytest.raises(InputDataError, match="positive and finite"):
            Polynomial(c)
    for p in [-0.1, 1.1, math.nan]:
        with pytest.raises(InputDataError, match=r"\[0, 1\]"):
            Constant(p)
