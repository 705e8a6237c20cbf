"""What every accountant keeps: an upper bound that grows with what was released."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from botorch.exceptions.errors import InputDataError, UnsupportedError
from hypothesis import given, settings
from hypothesis import strategies as st

from botorch_fed.privacy.accounting import (
    Entry,
    Event,
    Ledger,
    _groups,
    _optimistic_epsilon,
    compose,
    epsilon,
    noise_multiplier_for,
)

# Accountants, and whether they know replace-one and Poisson samples.
ZERO_OUT: list[tuple[Any, Any]] = [
    ("pld", "zero-out"),
    ("prv", "zero-out"),
    ("rdp", "zero-out"),
    ("dp-accounting-rdp", "zero-out"),
]
SAMPLED: list[tuple[Any, Any]] = [*ZERO_OUT, ("pld", "replace-one")]
EVERYONE: list[tuple[Any, Any]] = [
    *SAMPLED,
    ("gdp", "zero-out"),
    ("gdp", "replace-one"),
    ("dp-accounting-rdp", "replace-one"),
]
FAST = [pair for pair in SAMPLED if pair[0] == "pld"]
# The PRV accountant chooses its grid by the question, within 0.01 of the truth.
SLACK = {"prv": 0.01}
DELTA = 1e-3


def _cost(accountant: Any, adjacency: Any, q: float, z: float, count: int) -> float:
    result = epsilon(
        sampling_rate=q,
        noise_multiplier=z,
        num_releases=count,
        delta=DELTA,
        accountant=accountant,
        adjacency=adjacency,
    )
    assert (result.accountant, result.adjacency, result.unit) == (accountant, adjacency, "agent")
    assert (result.delta, result.releases, result.private) == (DELTA, count, True)
    return result.epsilon


@pytest.mark.parametrize(("accountant", "adjacency"), EVERYONE)
def test_nothing_costs_nothing(accountant: Any, adjacency: Any) -> None:
    assert _cost(accountant, adjacency, 1.0, 1.0, 0) == 0
    empty = compose([], delta=DELTA, accountant=accountant, adjacency=adjacency)
    assert (empty.epsilon, empty.releases) == (0, 0)
    ledger = Ledger(adjacency)
    assert ledger.guarantee(delta=DELTA, accountant=accountant) == empty


@pytest.mark.parametrize(("accountant", "adjacency"), EVERYONE)
def test_more_costs_more_without_sampling(accountant: Any, adjacency: Any) -> None:
    slack = SLACK.get(accountant, 0.0)
    costs = [_cost(accountant, adjacency, 1.0, 2.0, count) for count in [1, 4, 20]]
    assert all(a < b + slack for a, b in pairwise(costs))
    costs = [_cost(accountant, adjacency, 1.0, z, 5) for z in [0.7, 2.0, 8.0]]
    assert all(a > b - slack for a, b in pairwise(costs))


@pytest.mark.parametrize(("accountant", "adjacency"), SAMPLED)
def test_more_costs_more(accountant: Any, adjacency: Any) -> None:
    slack = SLACK.get(accountant, 0.0)
    for name, grid in {
        "releases": [(0.2, 1.0, count) for count in [1, 10, 40]],
        "rate": [(q, 1.0, 10) for q in [0.05, 0.2, 1.0]],
        "noise": [(0.2, z, 10) for z in [8.0, 1.0, 0.7]],
    }.items():
        costs = [_cost(accountant, adjacency, *point) for point in grid]
        assert all(a <= b + slack for a, b in pairwise(costs)), name
        assert costs[0] < costs[-1]


few = settings(max_examples=5)  # an example costs a tenth of a second
rates = st.floats(0.01, 1.0)
noises = st.floats(0.5, 20.0)
counts = st.integers(1, 60)
# Rounding in a Fourier transform moves epsilon by so much at most.
ROUNDING = 1e-8


@pytest.mark.parametrize(("accountant", "adjacency"), FAST)
@few
@given(q=rates, z=noises, count=counts, factor=st.floats(1.0, 1.5), more=st.integers(0, 5))
def test_monotone_in_everything(
    accountant: Any, adjacency: Any, q: float, z: float, count: int, factor: float, more: int
) -> None:
    cost = _cost(accountant, adjacency, q, z, count)
    assert cost <= _cost(accountant, adjacency, min(1.0, q * factor), z, count) + ROUNDING
    assert cost <= _cost(accountant, adjacency, q, z / factor, count) + ROUNDING
    assert cost <= _cost(accountant, adjacency, q, z, count + more) + ROUNDING


@pytest.mark.parametrize(("accountant", "adjacency"), FAST)
@few
@given(events=st.lists(st.builds(Event, noises, rates), min_size=1, max_size=4))
def test_one_more_never_costs_less(accountant: Any, adjacency: Any, events: list[Event]) -> None:
    kwargs = {"delta": DELTA, "accountant": accountant, "adjacency": adjacency}
    costs = [compose(events[:k], **kwargs).epsilon for k in range(len(events) + 1)]
    assert all(a <= b + ROUNDING for a, b in pairwise(costs))


@pytest.mark.parametrize(("accountant", "adjacency"), SAMPLED)
@pytest.mark.parametrize(("q", "z", "count"), [(0.05, 0.8, 30), (0.35, 1.0, 60), (0.95, 4.0, 5)])
def test_never_below_the_optimistic_bound(
    accountant: Any, adjacency: Any, q: float, z: float, count: int
) -> None:
    lower = _optimistic_epsilon(((Event(z, q), count),), DELTA, adjacency, interval=5e-4)
    assert 0 < lower <= _cost(accountant, adjacency, q, z, count)


@pytest.mark.parametrize(("accountant", "adjacency"), FAST)
@few
@given(
    q=rates,
    z=st.floats(0.8, 20.0),
    count=counts,
    other=st.builds(Event, st.floats(0.8, 20.0), st.floats(0.05, 1.0)),
)
def test_mixtures_are_never_below_the_optimistic_bound(
    accountant: Any, adjacency: Any, q: float, z: float, count: int, other: Event
) -> None:
    events = [Entry(Event(z, q), count, ""), Entry(other, 3, "")]
    cost = compose(events, delta=DELTA, accountant=accountant, adjacency=adjacency).epsilon
    lower = _optimistic_epsilon(_groups(events), DELTA, adjacency, interval=2e-3)
    assert lower <= cost + ROUNDING


@pytest.mark.parametrize(
    ("accountant", "adjacency", "rate"),
    [(*pair, 1.0) for pair in EVERYONE] + [(*pair, 0.3) for pair in SAMPLED],
)
def test_calibration_never_overshoots(accountant: Any, adjacency: Any, rate: float) -> None:
    target = 2.0
    z = noise_multiplier_for(
        epsilon=target,
        delta=DELTA,
        sampling_rate=rate,
        num_releases=8,
        accountant=accountant,
        adjacency=adjacency,
    )
    assert _cost(accountant, adjacency, rate, z, 8) <= target
    slack = SLACK.get(accountant, 0.0)
    assert _cost(accountant, adjacency, rate, z / 1.001, 8) > target - slack


@few
@given(
    target=st.floats(0.1, 10.0),
    delta=st.floats(1e-6, 0.1),
    q=st.floats(0.1, 1.0),
    count=st.integers(1, 10),
    adjacency=st.sampled_from(["zero-out", "replace-one"]),
)
def test_calibration_of_the_default_never_overshoots(
    target: float, delta: float, q: float, count: int, adjacency: Any
) -> None:
    kwargs: Any = {"sampling_rate": q, "num_releases": count, "delta": delta}
    z = noise_multiplier_for(epsilon=target, adjacency=adjacency, **kwargs)
    assert epsilon(noise_multiplier=z, adjacency=adjacency, **kwargs).epsilon <= target


def test_calibration_says_what_cannot_be_reached() -> None:
    with pytest.raises(UnsupportedError, match="'rdp' does not reach"):
        noise_multiplier_for(
            epsilon=0.01, delta=1e-5, sampling_rate=0.1, num_releases=9, accountant="rdp"
        )


@pytest.mark.parametrize(("accountant", "adjacency"), EVERYONE)
def test_unknown_events_raise(accountant: Any, adjacency: Any) -> None:
    kwargs: Any = {"delta": DELTA, "accountant": accountant, "adjacency": adjacency}
    for unknown in [1.0, "event", None, (Event(1.0), 2)]:
        with pytest.raises(InputDataError, match="Only an Event"):
            compose([Event(1.0), unknown], **kwargs)
    if (accountant, adjacency) not in SAMPLED:
        with pytest.raises(UnsupportedError, match="use 'pld'"):
            compose([Event(1.0, 0.5)], **kwargs)
    if (accountant, adjacency) != ("dp-accounting-rdp", "replace-one"):
        with pytest.raises(UnsupportedError, match="fixed size"):
            compose([Event(1.0, sample_size=2, population=5)], **kwargs)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_who_knows_zero_out_only_says_so(accountant: Any) -> None:
    for event in [Event(1.0), Event(1.0, 0.5)]:
        with pytest.raises(UnsupportedError, match="under 'zero-out' only: use 'pld'"):
            compose([event], delta=DELTA, accountant=accountant, adjacency="replace-one")
