"""Mixing schedules by hand, and the conditions of the theory."""

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
    theory_beta,
    theory_condition,
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
        with pytest.raises(InputDataError, match="count from 1"):
            schedule(wrong)  # type: ignore[arg-type]


def test_check_refuses() -> None:
    with pytest.raises(InputDataError, match=r"in round 1 it is 0\.0: start .* p_1 := p_2"):
        check_schedule(lambda t: 1 - t**-0.5, 10)
    with pytest.raises(InputDataError, match=r"in round 3 it is 1\.5"):
        check_schedule(lambda t: t / 2, 10)
    with pytest.raises(
        InputDataError, match=r"falls from 1\.0 to 0\.5 in round 2.* not of the oth"
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
    with pytest.raises(InputDataError, match="at least one point"):
        theory_condition(Constant(0.5), beta=1.0, num_points=0, num_rounds=3)
    with pytest.raises(InputDataError, match="0 < delta < 1"):
        theory_beta(1, bound=1.0, noise_std=0.1, information_gain=0.0, delta=0.0)


def test_beta_by_hand() -> None:
    kwargs: dict[str, Any] = {"bound": 2.0, "noise_std": 0.1, "delta": 0.04}
    value = theory_beta(3, information_gain=lambda n: 10.0 * n, **kwargs)
    assert value == pytest.approx(2 + 0.1 * math.sqrt(2 * (20 + 1 + math.log(100))), rel=1e-14)
    assert theory_beta(3, information_gain=20.0, **kwargs) == value
    assert theory_beta(1, information_gain=lambda n: 10.0 * n, **kwargs) < value


def test_condition_by_hand() -> None:
    report = theory_condition(InverseSquare(), beta=lambda t: 1.0 + t, num_points=100, num_rounds=9)

    def c(t: int) -> float:
        return (1 + t) * (1 + math.sqrt(2 * math.log(100 * t**2)))

    expected = [(1 - InverseSquare()(t)) * c(t) / (0.25 * c(1)) for t in range(1, 10)]
    assert report.ratios.tolist() == pytest.approx(expected, rel=1e-12)
    # p_1 := p_2 fails in round two, as said; afterwards 1/t^2 wins over c_t.
    assert report.first_violation == 2
    assert report.ratios[-1] < 1


def test_condition_holds_and_fails_where_it_should() -> None:
    def steep(t: int) -> float:
        return 1 - 0.5 * t**-2.0

    kept = theory_condition(steep, beta=1.0, num_points=1000, num_rounds=100)
    assert kept.first_violation is None
    assert kept.ratios[0] == 1
    broken = theory_condition(Constant(0.5), beta=1.0, num_points=1000, num_rounds=5)
    assert broken.first_violation == 2
    alone = theory_condition(Constant(1.0), beta=1.0, num_points=1000, num_rounds=5)
    assert alone.first_violation is None
    assert alone.ratios.tolist() == [0.0] * 5
    late = theory_condition(lambda t: 1.0 if t < 4 else 0.9, beta=1.0, num_points=10, num_rounds=6)
    assert late.first_violation == 4
