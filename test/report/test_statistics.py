"""Intervals and numbers of reports."""

from __future__ import annotations

import math

from botorch_fed.report.statistics import Estimate, half_width, some_counts, upper
from botorch_fed.rng import generator


def test_intervals_need_two_values_and_cover_as_often_as_they_say() -> None:
    assert half_width([1.0]) is None
    draws = generator(0, "intervals").normal(2000, 5)
    hits = sum(abs(float(row.mean())) <= (half_width(row.tolist()) or 0) for row in draws)
    assert abs(hits / 2000 - 0.95) < 4.5 * (0.95 * 0.05 / 2000) ** 0.5  # false alarm 7e-6


def test_intervals_end_where_the_metric_does() -> None:
    found = Estimate.of([0.9, 0.99, 0.7], (0.0, 1.0))
    assert found is not None
    assert found.half is not None
    assert found.mean + found.half > 1
    assert (found.low, found.high) == (found.mean - found.half, 1.0)
    beyond = Estimate.of([1.2, 1.3], (0.0, 1.0))  # a range that the values leave holds the mean
    assert beyond is not None
    assert beyond.high == beyond.mean == 1.25
    assert Estimate.of([]) is None


def test_bounds_are_rounded_up() -> None:
    assert upper(1.99991) == "2"
    assert upper(1.0001) == "1.001"
    assert upper(1e-5) == "1e-05"
    assert upper(0.0) == "0"
    assert upper(math.inf) == "inf"


def test_some_of_many_counts_have_both_ends() -> None:
    assert some_counts(5000, 3) == [1, 2500, 5000]
    assert some_counts(3, 3) == [1, 2, 3]
