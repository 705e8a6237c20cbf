r"""What releases cost together: guarantees, budgets and the ledgers that pay in advance.

::

    Event            one release: its noise multiplier and how the contributors were sampled
    Guarantee        epsilon and delta with unit, adjacency, number of releases and accountant
    Budget           what may be spent, fixed in advance
    Ledger           what was spent, as a value that goes into a protocol's state; on disk:
                     shared_ledger

Every epsilon is an upper bound; `optimistic_epsilon` is a lower one beside it. Two adjacencies are
known, and a number without its adjacency is not a result::

    zero-out         a contribution becomes zero; rosters, weights and counts are public and fixed
    replace-one      a contribution becomes any other admissible one: twice the distance

and the accountants

::

    pld                  privacy loss distributions, pessimistic (Google's dp_accounting); where
                         everyone takes part in every release, the exact closed form instead
    prv                  privacy random variables (Opacus), zero-out only
    rdp                  Rényi (Opacus), zero-out only
    dp-accounting-rdp    Rényi (dp_accounting); the only one for samples of a fixed size and, with
                         everyone taking part, for discrete noise
    gdp                  the exact closed form; refused as soon as one release is subsampled, where
                         its central limit is no upper bound

The noise multiplier is always relative to the norm of *one* unit's contribution, under both
adjacencies. Discrete Gaussian noise has the
Rényi divergences of the continuous one as upper bounds [Canonne2020]_, but not its closed form: a
ledger with such a release is accounted for by dp-accounting-rdp.

References:
    * [Balle2018]_ B. Balle, Y.-X. Wang. Improving the Gaussian mechanism for differential privacy:
      analytical calibration and optimal denoising. ICML 2018.
    * [Canonne2020]_ C. Canonne, G. Kamath, T. Steinke. The discrete Gaussian for differential
      privacy. NeurIPS 2020.
    * [Doroshenko2022]_ V. Doroshenko, B. Ghazi, P. Kamath, R. Kumar, P. Manurangsi. Connect the
      dots: tighter discrete approximations of privacy loss distributions. PoPETs 2022.
"""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from botorch.exceptions.errors import InputDataError, UnsupportedError

from botorch_fed.errors import BudgetExceeded
from botorch_fed.privacy.checks import check_choice, check_count, set_number

Adjacency = Literal["zero-out", "replace-one"]
Unit = Literal["agent", "record"]
Accountant = Literal["pld", "prv", "rdp", "dp-accounting-rdp", "gdp"]

LARGEST_DELTA = 0.1  # of a promise or a budget
_MIN_NOISE = 0.01  # below it sampling is ignored: an upper bound, with epsilons in the thousands
_MAX_BEGINNINGS = 32  # of sequences of different releases, kept composed


# ------------------------------------------------------------------ values


@dataclass(frozen=True)
class Event:
    r"""One release of a sum with Gaussian noise.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the largest L2 norm of one unit's
            contribution, under both adjacencies.
        sampling_rate: Every unit takes part with this probability, independently of the others
            and in secret (Poisson sampling); 1 is everyone.
        sample_size: Instead, exactly this many of a `population` take part, drawn uniformly
            without replacement; `sampling_rate` stays 1.
        population: From how many units a sample of fixed size is drawn.
        discrete: The noise is a discrete Gaussian, or a sum of such that is as good: everyone
            takes part.

    Example:
        >>> Event(1.0, sampling_rate=0.35)
        Event(noise_multiplier=1.0, sampling_rate=0.35, sample_size=None, population=None)
    """

    noise_multiplier: float
    sampling_rate: float = 1.0
    sample_size: int | None = None
    population: int | None = None
    discrete: bool = False

    def __post_init__(self) -> None:
        set_number(self, "noise_multiplier")
        set_number(self, "sampling_rate")
        if not self.noise_multiplier > 1e-100:
            raise InputDataError(
                f"A noise multiplier must be positive, got {self.noise_multiplier}: a release "
                "without noise has no guarantee."
            )
        if not 0 < self.sampling_rate <= 1:
            raise InputDataError(
                f"A sampling rate must lie in (0, 1], got {self.sampling_rate}; 1 is everyone."
            )
        if (self.sample_size is None) != (self.population is None):
            raise InputDataError("A sample of fixed size needs both sample_size and population.")
        if self.sample_size is not None and self.population is not None:
            check_count("A sample size", self.sample_size)
            check_count("A population", self.population)
            if self.sample_size > self.population or self.sampling_rate != 1:
                raise InputDataError(
                    "A sample of fixed size needs sample_size <= population and a sampling_rate "
                    f"of 1, got {self.sample_size} of {self.population} and {self.sampling_rate}."
                )
        if not isinstance(self.discrete, bool):
            raise InputDataError(f"discrete is True or False, got {type(self.discrete).__name__}.")
        if self.discrete and (self.sampling_rate != 1 or self.sample_size is not None):
            raise InputDataError(
                "No accountant bounds discrete noise on a sample: let everyone take part."
            )

    def __repr__(self) -> str:
        shown = [name for name in self.__dataclass_fields__ if name != "discrete" or self.discrete]
        return f"Event({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


@dataclass(frozen=True)
class Guarantee:
    r"""An upper bound on what was revealed about one unit.

    Attributes:
        epsilon: The bound :math:`\epsilon`.
        delta: The probability :math:`\delta` beside it.
        unit: Whose contribution is protected: all of an agent's, or one record's.
        adjacency: What a neighbouring world is, see the module.
        releases: How many releases it covers.
        accountant: Who computed it.
        private: False if noise came from a seed, so that nothing is protected.
    """

    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency
    releases: int
    accountant: Accountant
    private: bool = True

    def __post_init__(self) -> None:
        set_number(self, "epsilon")
        set_number(self, "delta")
        check_count("The number of releases", self.releases, least=0)
        check_choice("The unit", self.unit, Unit)
        check_choice("The adjacency", self.adjacency, Adjacency)
        check_choice("The accountant", self.accountant, Accountant)
        if not self.epsilon >= 0:
            raise InputDataError(f"An epsilon must be at least 0, got {self.epsilon}.")
        _check_delta(self.delta)

    def __str__(self) -> str:
        text = (
            f"epsilon <= {self.epsilon:.4g} at delta = {self.delta:.3g} per {self.unit}, "
            f"{self.adjacency}, {self.releases} releases, by {self.accountant}"
        )
        if self.epsilon == 0 and self.releases:
            text += "; epsilon is 0 because delta alone allows for everything that is revealed"
        return text if self.private else f"not private: seeded noise ({text})"

    def __repr__(self) -> str:
        text = (
            f"Guarantee(epsilon={self.epsilon:.6g}, delta={self.delta:.6g}, unit={self.unit!r}, "
            f"adjacency={self.adjacency!r}, releases={self.releases}, "
            f"accountant={self.accountant!r}"
        )
        return text + (")" if self.private else ", not private: seeded noise)")


@dataclass(frozen=True)
class Budget:
    r"""What may be spent in total.

    Attributes:
        epsilon: :math:`\epsilon`, positive.
        delta: :math:`\delta` in (0, 0.1], well below one over the number of units.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        set_number(self, "epsilon")
        set_number(self, "delta")
        _check_epsilon(self.epsilon)
        check_promised_delta(self.delta)


@dataclass(frozen=True)
class Entry:
    """Equal releases in a ledger.

    Attributes:
        event: One of them.
        count: How many.
        note: What they were for; never data.
        private: False if noise came from a seed.
    """

    event: Event
    count: int
    note: str
    private: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.event, Event):
            raise InputDataError(
                f"Only an Event can be accounted for, got {type(self.event).__name__}."
            )
        check_count("The number of releases", self.count)
        if not isinstance(self.note, str):
            raise InputDataError(f"A note must be a str, got {type(self.note).__name__}.")


Groups = tuple[tuple[Event, int], ...]  # different events in order of appearance, how often each


@dataclass(frozen=True)
class Ledger:
    r"""What was released so far, and what may be.

    A ledger is a value: `spend` gives the next one. Pay before anything is computed. It adds up
    releases whose settings were fixed in advance, see `compose`: what a later noise multiplier or
    sampling rate is must not depend on earlier releases.

    Attributes:
        adjacency: What a neighbouring world is, see the module.
        unit: Whose contribution is protected.
        budget: What may be spent, or None for a ledger that only counts.
        entries: What was spent.

    Example:
        >>> ledger = Ledger(budget=Budget(epsilon=8.0, delta=1e-3))
        >>> ledger.spend(Event(1.0, sampling_rate=0.35), count=20).releases
        20
    """

    adjacency: Adjacency = "zero-out"
    unit: Unit = "agent"
    budget: Budget | None = None
    entries: tuple[Entry, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_choice("The adjacency", self.adjacency, Adjacency)
        check_choice("The unit", self.unit, Unit)
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise InputDataError(f"Expected a Budget, got {type(self.budget).__name__}.")
        groups = _groups(self.entries)
        _check_fit(groups, _chosen(None, groups), self.adjacency)

    @property
    def releases(self) -> int:
        """How many releases were paid for."""
        return sum(entry.count for entry in self.entries)

    def spend(
        self, event: Event, *, count: int = 1, note: str = "", private: bool = True
    ) -> Ledger:
        """The ledger with `count` more releases.

        Args:
            event: One of them.
            count: How many.
            note: What they are for; never data.
            private: False if noise comes from a seed: the ledger's guarantee then says so.

        Raises:
            BudgetExceeded: The budget does not cover them.
            UnsupportedError: No accountant can compose them with the ledger's other releases.
        """
        entry = Entry(event, count, note, private)
        after = replace(self, entries=(*self.entries[:-1], *_joined(self.entries[-1:], entry)))
        if self.budget is not None and not _covers(self.budget, after, event):
            raise BudgetExceeded(_refusal(self, self.budget, after, entry))
        return after

    def guarantee(
        self, *, delta: float | None = None, accountant: Accountant | None = None
    ) -> Guarantee:
        """What was revealed by everything in the ledger.

        Args:
            delta: The probability beside epsilon; by default the budget's.
            accountant: By default "pld", for samples of a fixed size and for discrete noise
                "dp-accounting-rdp".
        """
        if delta is None:
            if self.budget is None:
                raise InputDataError("A ledger without a budget needs delta: pass delta=….")
            delta = self.budget.delta
        composed = compose(
            self.entries,
            delta=delta,
            accountant=accountant,
            adjacency=self.adjacency,
            unit=self.unit,
        )
        return replace(composed, private=all(entry.private for entry in self.entries))

    def __str__(self) -> str:
        spent = "" if self.budget is None else f", {self.guarantee().epsilon:.4g} spent"
        return f"{self!r}: {self.releases} releases{spent}"


def _joined(last: Sequence[Entry], entry: Entry) -> list[Entry]:
    """The last entry, if any, and a new one: as one if they tell the same."""
    if last and replace(last[0], count=entry.count) == entry:
        return [replace(entry, count=last[0].count + entry.count)]
    return [*last, entry]


def _covers(budget: Budget, after: Ledger, event: Event) -> bool:
    # More never costs less, so a budget that covers more releases of the event covers these. Round
    # numbers are asked for first: their answers are known from one call to the next.
    groups = _groups(after.entries)
    name = _chosen(None, groups)
    count = dict(groups)[event]
    for bit in reversed(range(count.bit_length())):
        more = -(-count >> bit) << bit  # rounded up
        asked = tuple((e, more if e == event else c) for e, c in groups)
        try:
            cost = _epsilon(asked, budget.delta, name, after.adjacency)
        except UnsupportedError:  # of so many only, perhaps
            if bit == 0:
                raise
            continue
        if cost <= budget.epsilon:
            return True
    return False


def _refusal(ledger: Ledger, budget: Budget, after: Ledger, entry: Entry) -> str:
    spent, cost = ledger.guarantee().epsilon, after.guarantee().epsilon
    return (
        f"{entry.count} x {entry.event} would bring epsilon to {cost:.6g} at delta = "
        f"{budget.delta:.3g}, the budget is {budget.epsilon:.6g}: {ledger.releases} releases have "
        f"spent {spent:.6g}, {budget.epsilon - spent:.6g} is left (per {ledger.unit}, "
        f"{ledger.adjacency}). Nothing was computed. Stop here, or plan the run again with a "
        "larger noise multiplier, a smaller sampling rate or fewer releases."
    )


# ------------------------------------------------------------------ checks


def _check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < math.inf:
        raise InputDataError(f"An epsilon to keep must be positive and finite, got {epsilon}.")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputDataError(
            f"delta must lie in (0, 1), got {delta}: Gaussian noise has no guarantee at 0. Choose "
            "it well below one over the number of units."
        )


def check_promised_delta(delta: float, units: int | None = None, unit: str = "unit") -> None:
    r"""Raise unless a promise with this :math:`\delta` says something.

    With probability :math:`\delta` all that a unit contributed may be revealed: from one over their
    number on, one of them may be published every time.

    Args:
        delta: Of a promise or a budget.
        units: How many are protected; None if nobody knows.
        unit: What they are called.

    Raises:
        InputDataError: It is above `LARGEST_DELTA`, or not below one over the number of units.
    """
    _check_delta(delta)
    if units is not None and units > 1 and delta >= 1 / units:
        raise InputDataError(
            f"delta = {delta:.3g} promises nothing to {units} {unit}s: one of them may be revealed "
            f"entirely in every run unless delta is below 1/{units}. Use delta = "
            f"{_advised_delta(units):g}."
        )
    if delta > LARGEST_DELTA:
        raise InputDataError(
            f"delta = {delta:.3g} is above {LARGEST_DELTA:g}: with that probability everything may "
            f"be revealed, whatever epsilon is. Use delta = {_advised_delta(units or 1):g}."
        )


def _advised_delta(units: int) -> float:
    """A power of ten, a hundredth of one over the number of units at most, 1e-5 if that fits."""
    return min(1e-5, 10.0 ** -math.ceil(math.log10(100 * units)))


def _check_fit(groups: Groups, accountant: Accountant, adjacency: Adjacency) -> None:
    """Raise unless an accountant bounds these events under this adjacency."""
    fixed = any(event.sample_size is not None for event, _ in groups)
    poisson = any(event.sampling_rate < 1 for event, _ in groups)
    if fixed and adjacency != "replace-one":
        raise UnsupportedError(
            "A sample of fixed size is accounted for under adjacency='replace-one' only, got "
            f"{adjacency!r}: use it, or Poisson sampling."
        )
    if fixed and poisson:
        raise UnsupportedError(
            "No accountant composes samples of a fixed size with Poisson samples: keep one "
            "sampling scheme, or two ledgers whose epsilons and deltas add up."
        )
    if fixed and accountant != "dp-accounting-rdp":
        raise UnsupportedError(
            f"{accountant!r} has no bound for samples of a fixed size: use 'dp-accounting-rdp'."
        )
    if accountant != "dp-accounting-rdp" and any(event.discrete for event, _ in groups):
        raise UnsupportedError(
            f"{accountant!r} is no upper bound for discrete noise: use 'dp-accounting-rdp'."
        )
    zero_out_only = accountant in ("prv", "rdp") or (accountant == "dp-accounting-rdp" and poisson)
    if groups and adjacency == "replace-one" and zero_out_only:
        raise UnsupportedError(
            f"{accountant!r} bounds these releases under 'zero-out' only: use 'pld'."
        )
    if accountant == "gdp" and poisson:
        raise UnsupportedError(
            "'gdp' is exact without sampling and no upper bound with it: use 'pld'."
        )


# ------------------------------------------------------------------ one Gaussian, exactly


def gaussian_delta(epsilon: float, mu: float) -> float:
    r"""The smallest :math:`\delta` of a Gaussian release, [Balle2018]_.

    .. math:: \delta = \Phi(\mu/2 - \epsilon/\mu) - e^\epsilon \Phi(-\mu/2 - \epsilon/\mu)

    Args:
        epsilon: :math:`\epsilon \ge 0`.
        mu: Sensitivity over standard deviation, positive. Several releases, also adaptive ones,
            are one with :math:`\mu^2 = \sum_k \mu_k^2`.

    Example:
        >>> round(gaussian_delta(1.0, 1 / 3.730632), 9)
        1e-05
    """
    if not (epsilon >= 0 and 0 < mu < math.inf):
        raise InputDataError(
            f"Expected epsilon >= 0 and a positive finite mu, got {epsilon} and {mu}."
        )
    if epsilon == math.inf:
        return 0.0
    from scipy.special import log_ndtr  # costs 150 ms to import

    first = float(log_ndtr(mu / 2 - epsilon / mu))
    ratio = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)) - first  # log, at most 0
    return math.exp(first) * -math.expm1(min(ratio, 0.0))


def gaussian_epsilon(delta: float, mu: float) -> float:
    r"""The smallest :math:`\epsilon` of a Gaussian release: the inverse of `gaussian_delta`."""
    _check_delta(delta)
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    return _last(lambda epsilon: gaussian_delta(epsilon, mu) > delta)[1]


def gaussian_mu(epsilon: float, delta: float) -> float:
    r"""The largest :math:`\mu` (sensitivity over noise) within :math:`(\epsilon, \delta)`.

    Example:
        >>> round(1 / gaussian_mu(1.0, 1e-5), 6)  # standard deviation for sensitivity 1
        3.730632
    """
    _check_delta(delta)
    return _last(lambda mu: mu == 0 or gaussian_delta(epsilon, mu) <= delta)[0]


def _last(holds: Callable[[float], bool]) -> tuple[float, float]:
    """Neighbouring floats: a condition on [0, ∞) holds at the first and no longer at the second."""
    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


# ------------------------------------------------------------------ composition


def epsilon(
    *,
    sampling_rate: float,
    noise_multiplier: float,
    num_releases: int,
    delta: float,
    accountant: Accountant | None = None,
    adjacency: Adjacency = "zero-out",
    unit: Unit = "agent",
) -> Guarantee:
    r"""What equal releases cost together.

    Args:
        sampling_rate: Of Poisson sampling; 1 is everyone.
        noise_multiplier: Standard deviation of the noise over the norm of one contribution.
        num_releases: How many releases, from 0 on.
        delta: The probability beside epsilon.
        accountant: See the module; by default "pld".
        adjacency: See the module.
        unit: Whose contribution is protected.

    Example:
        >>> print(epsilon(sampling_rate=0.35, noise_multiplier=1, num_releases=60, delta=0.0246))
        epsilon <= 10.39 at delta = 0.0246 per agent, zero-out, 60 releases, by pld
    """
    event = Event(noise_multiplier, sampling_rate)
    check_count("The number of releases", num_releases, least=0)
    entries = [Entry(event, num_releases, "")] if num_releases else []
    return compose(entries, delta=delta, accountant=accountant, adjacency=adjacency, unit=unit)


def compose(
    events: Iterable[Event | Entry],
    *,
    delta: float,
    accountant: Accountant | None = None,
    adjacency: Adjacency = "zero-out",
    unit: Unit = "agent",
) -> Guarantee:
    """What releases cost together, of whatever kinds.

    What is released may depend on earlier releases, and so may the decision to stop; noise
    multipliers, sampling rates and the number of releases at most are fixed in advance.

    Args:
        events: Releases, or entries of a ledger.
        delta: The probability beside epsilon.
        accountant: See the module; by default "pld", for samples of a fixed size and for discrete
            noise "dp-accounting-rdp".
        adjacency: See the module.
        unit: Whose contribution is protected.

    Raises:
        UnsupportedError: The accountant has no upper bound for these events.
    """
    groups = _groups(events)
    _check_delta(delta)
    check_choice("The adjacency", adjacency, Adjacency)
    name = _chosen(accountant, groups)
    value = _epsilon(groups, float(delta), name, adjacency)
    if not math.isfinite(value):
        raise UnsupportedError(
            f"{name!r} finds no finite epsilon for these releases at delta = {delta}: there is "
            "too little noise, or delta is too small for it."
        )
    return Guarantee(value, delta, unit, adjacency, sum(n for _, n in groups), name)


def noise_multiplier_for(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    num_releases: int,
    accountant: Accountant | None = None,
    adjacency: Adjacency = "zero-out",
) -> float:
    r"""The smallest noise multiplier with which equal releases stay within a budget.

    The accountant confirms that the result does not exceed `epsilon`; it is at most a thousandth
    larger than need be.

    Args:
        epsilon: What may be spent, positive.
        delta: The probability beside it.
        sampling_rate: Of Poisson sampling; 1 is everyone.
        num_releases: How many releases, from 1 on.
        accountant: See the module; by default "pld".
        adjacency: See the module.

    Example:
        >>> round(noise_multiplier_for(
        ...     epsilon=1, delta=1e-5, sampling_rate=1, num_releases=1
        ... ), 6)
        3.730632
    """
    _check_epsilon(epsilon)
    check_choice("The adjacency", adjacency, Adjacency)
    check_count("The number of releases", num_releases)
    name = _chosen(accountant, ())

    def excess(log_noise: float) -> float:
        event = Event(math.exp(log_noise), sampling_rate)
        return _epsilon(((event, num_releases),), float(delta), name, adjacency) - epsilon

    factor = 2 if adjacency == "replace-one" else 1
    # Without sampling this is the answer, rounded up: with sampling it is more than enough.
    high = math.log(factor * math.sqrt(num_releases) / gaussian_mu(epsilon, delta)) + 1e-12
    if sampling_rate == 1 and name in ("pld", "gdp"):
        return math.exp(_confirmed(excess, high, 1e-12))
    while not excess(high) <= 0:
        high += math.log(2)
        if high > math.log(1e6):
            raise UnsupportedError(
                f"{name!r} does not reach epsilon = {epsilon} at delta = {delta} with any amount "
                "of noise: use 'pld'."
            )
    low = high - math.log(2)
    while excess(low) <= 0:
        low, high = low - math.log(2), low
    from scipy.optimize import brentq  # costs 70 ms to import, and only this root needs it

    root = float(brentq(lambda x: min(excess(x), 1e9), low, high, xtol=2e-4))
    return math.exp(_confirmed(excess, min(root, high), 1e-4))


def _confirmed(excess: Callable[[float], float], start: float, step: float) -> float:
    while not excess(start) <= 0:
        start += step
    return start


def _groups(events: Iterable[Event | Entry]) -> Groups:
    counts: dict[Event, int] = {}
    for item in events:
        entry = item if isinstance(item, Entry) else Entry(item, 1, "")
        counts[entry.event] = counts.get(entry.event, 0) + entry.count
    return tuple(counts.items())


def _chosen(accountant: Accountant | None, groups: Groups) -> Accountant:
    if accountant is None:
        renyi = any(event.sample_size is not None or event.discrete for event, _ in groups)
        return "dp-accounting-rdp" if renyi else "pld"
    check_choice("The accountant", accountant, Accountant)
    return accountant


@lru_cache(maxsize=4096)
def _epsilon(groups: Groups, delta: float, accountant: Accountant, adjacency: Adjacency) -> float:
    _check_delta(delta)
    _check_fit(groups, accountant, adjacency)
    if not groups:
        return 0.0
    if accountant == "rdp":
        return _opacus_rdp_epsilon(groups, delta)
    if accountant == "prv":
        return _opacus_prv_epsilon(groups, delta)
    if accountant == "dp-accounting-rdp":
        return _google_rdp_epsilon(groups, delta, adjacency)
    mu, sampled = _split(groups, adjacency)
    if not sampled:
        return gaussian_epsilon(delta, mu)
    return _pld_epsilon(groups, delta, adjacency)


def _split(groups: Groups, adjacency: Adjacency) -> tuple[float, Groups]:
    """The releases without sampling as one Gaussian, and the others."""

    def mu(some: Groups) -> float:
        factor = 2 if adjacency == "replace-one" else 1
        return factor * math.sqrt(sum(n * event.noise_multiplier**-2 for event, n in some))

    everyone = tuple(g for g in groups if g[0].sampling_rate == 1)
    sampled = tuple(g for g in groups if g[0].sampling_rate < 1)
    # A sampled release reveals at most what it would reveal with everyone: by joint convexity.
    noises = [event.noise_multiplier for event, _ in sampled]
    if sampled and (min(noises) < _MIN_NOISE or mu(everyone) > 1 / _MIN_NOISE):
        return mu(groups), ()
    return mu(everyone), sampled


# ------------------------------------------------------------------ privacy loss distributions


def _pld_epsilon(groups: Groups, delta: float, adjacency: Adjacency) -> float:
    mu, sampled = _split(groups, adjacency)
    # Rounding in the Fourier transforms, which the discretisation does not cover: measured
    # against the closed form it stays below a tenth of this.
    slack = 1e-14 + 1e-16 * sum(count for _, count in sampled)
    if delta < 100 * slack:
        raise UnsupportedError(
            f"delta = {delta} is too small for 'pld' with {sum(n for _, n in sampled)} sampled "
            f"releases: choose at least {100 * slack:.1g}, or another accountant."
        )
    interval = _interval(mu, sampled)
    loss = _composed(_parts(mu, sampled), interval, adjacency, True)
    return float(loss.get_epsilon_for_delta(delta - slack))


def optimistic_epsilon(
    events: Iterable[Event | Entry],
    *,
    delta: float,
    adjacency: Adjacency = "zero-out",
    interval: float | None = None,
) -> float | None:
    """A lower bound on what releases cost together, beside the upper bound of `compose`.

    The true epsilon lies between the two: by privacy loss distributions whose losses are rounded
    down; where everyone takes part in every release, both are the exact closed form.

    Args:
        events: Releases, or entries of a ledger.
        delta: The probability beside epsilon.
        adjacency: See the module.
        interval: The grid of the losses; by default one that is fine enough for a percent.

    Returns:
        The bound; None for samples of a fixed size and for discrete noise, which "pld" has not.

    Example:
        >>> optimistic_epsilon([Entry(Event(1.0, 0.35), 60, "")], delta=0.0246) < 10.39
        True
    """
    groups = _groups(events)
    _check_delta(delta)
    check_choice("The adjacency", adjacency, Adjacency)
    if any(event.sample_size is not None or event.discrete for event, _ in groups):
        return None
    return _optimistic_epsilon(groups, float(delta), adjacency, interval)


@lru_cache(maxsize=256)
def _optimistic_epsilon(
    groups: Groups, delta: float, adjacency: Adjacency, interval: float | None = None
) -> float:
    if not groups:
        return 0.0
    mu, sampled = _split(groups, adjacency)
    if not sampled:
        # Of a split that ignores sampling because there is hardly any noise, nothing is known.
        exact = all(event.sampling_rate == 1 for event, _ in groups)
        return gaussian_epsilon(delta, mu) if exact else 0.0
    if interval is None:
        interval = max(1e-4, _interval(mu, sampled) / 10)
    loss = _composed(_parts(mu, sampled), interval, adjacency, False)
    return max(0.0, float(loss.get_epsilon_for_delta(delta)))


@dataclass(frozen=True)
class _Part:
    mu: float  # one over the noise; of zero-out, or, for everyone, of the adjacency at hand
    rate: float
    count: int


_beginnings: dict[tuple[tuple[_Part, ...], float, Adjacency, bool], Any] = {}
_lock = threading.Lock()


def _parts(mu: float, sampled: Groups) -> tuple[_Part, ...]:
    everyone = (_Part(mu, 1.0, 1),) if mu > 0 else ()
    return (*everyone, *(_Part(1 / e.noise_multiplier, e.sampling_rate, n) for e, n in sampled))


def _interval(mu: float, sampled: Groups) -> float:
    """The grid of the losses: the result is an upper bound on any, and tight on a fine one.

    It never becomes finer when releases are added or reveal more, so that more never costs less.
    """
    largest = max([mu, *(1 / event.noise_multiplier for event, _ in sampled)])
    rate = max(event.sampling_rate for event, _ in sampled)
    count = sum(n for _, n in sampled)
    scale = max(largest, largest**2 / 4)  # losses spread like mu, and like mu^2 where it is large
    return 1e-3 * scale * min(1.0, max(0.1, 10 * rate)) * max(1.0, math.sqrt(count / 1e5))


def _composed(
    parts: tuple[_Part, ...], interval: float, adjacency: Adjacency, pessimistic: bool
) -> Any:
    settings = (interval, adjacency, pessimistic)
    with _lock:  # continue the longest beginning that was composed lately
        lengths = {len(key[0]) for key in _beginnings}
        composed = [k for k in lengths if k <= len(parts) and (parts[:k], *settings) in _beginnings]
        start = max(composed, default=0)
        loss = _beginnings.get((parts[:start], *settings))
    for k in range(start, len(parts)):
        last = _one_kind(parts[k], *settings)
        loss = last if loss is None else loss.compose(last)
        if k >= len(parts) - 2:  # what a ledger asks for next ends in another part, or begins so
            with _lock:
                _beginnings[parts[: k + 1], *settings] = loss
                while len(_beginnings) > _MAX_BEGINNINGS:
                    del _beginnings[next(iter(_beginnings))]
    return loss


def _one_kind(part: _Part, interval: float, adjacency: Adjacency, pessimistic: bool) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    replaced = adjacency == "replace-one" and part.rate < 1
    relation = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.REPLACE_SPECIAL
    loss = privacy_loss_distribution.from_gaussian_mechanism(
        1 / part.mu,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=interval,
        sampling_prob=part.rate,
        use_connect_dots=pessimistic,  # [Doroshenko2022]_
        neighboring_relation=relation,
    )
    return loss if part.count == 1 else loss.self_compose(part.count)


# ------------------------------------------------------------------ Rényi, PRV


def _google_rdp_epsilon(groups: Groups, delta: float, adjacency: Adjacency) -> float:
    import dp_accounting as dp

    replaced = adjacency == "replace-one"
    relations = dp.NeighboringRelation
    accountant = dp.rdp.RdpAccountant(
        neighboring_relation=relations.REPLACE_ONE if replaced else relations.REPLACE_SPECIAL
    )
    with _quiet_absl("failed to converge"):  # it then leaves an order out, which is allowed
        for event, count in groups:
            # This accountant's multiplier is relative to the sensitivity: replacing is two norms.
            inner = dp.GaussianDpEvent(event.noise_multiplier / (2 if replaced else 1))
            accountant.compose(_google_event(event, inner), count)
    # A divergence that rounding made negative would count as no loss at all.
    usable = np.isfinite(accountant.rdp) & (accountant.rdp >= 0)
    if not usable.any():
        return math.inf
    orders, divergences = accountant.orders[usable], accountant.rdp[usable]
    value, _ = dp.rdp.compute_epsilon(orders.tolist(), divergences.tolist(), delta)
    return float(value)


def _google_event(event: Event, inner: Any) -> Any:
    import dp_accounting as dp

    if event.sample_size is not None:
        return dp.SampledWithoutReplacementDpEvent(event.population, event.sample_size, inner)
    if event.sampling_rate < 1:
        return dp.PoissonSampledDpEvent(event.sampling_rate, inner)
    return inner


@contextmanager
def _quiet_absl(message: str) -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return message not in str(record.msg)

    absl = logging.getLogger("absl")
    absl.addFilter(keep)
    try:
        yield
    finally:
        absl.removeFilter(keep)


def _opacus_rdp_epsilon(groups: Groups, delta: float) -> float:
    from opacus.accountants import RDPAccountant

    return _opacus_epsilon(RDPAccountant(), groups, delta)


def _opacus_prv_epsilon(groups: Groups, delta: float) -> float:
    from opacus.accountants import PRVAccountant

    try:
        # With everyone it takes the logarithm of 1 - 1, to find that no loss is below it.
        with np.errstate(divide="ignore", over="raise", invalid="raise"):
            return _opacus_epsilon(PRVAccountant(), groups, delta)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f"'prv' fails on these releases at delta = {delta} ({type(error).__name__}): use 'pld'."
        ) from error


def _opacus_epsilon(accountant: Any, groups: Groups, delta: float) -> float:
    accountant.history = [(e.noise_multiplier, e.sampling_rate, count) for e, count in groups]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
        value = float(accountant.get_epsilon(delta))
    return math.inf if math.isnan(value) else max(value, 0.0)
