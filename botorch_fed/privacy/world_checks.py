r"""Checks of a program in many worlds: what others do, who the canary is, and how large it is.

*The same noise in both worlds.* With seeded noise, two neighbouring worlds are run with the same
random numbers. What then remains of the difference of their transcripts is what the program lets
one unit do, without any noise: compared with the claim, its norm in standard deviations must not
exceed the distance that was paid for, and compared with the documentation it must be the bounded
statistic of what was handed in. Neither needs statistics, so that each position, both signs,
sizes from the smallest float to the largest, and neighbours who do nothing, fill their bound, are
random, agree with the canary or contradict it are all tried, at one pair of runs each.

*Coins.* Who takes part is read off such differences, agent by agent: how often, and how often two
of them together, or one of them twice.

*Noise.* Transcripts of nobody, whitened by the documentation: tails, repeated numbers, the lattice
and its parity, beside the tests of `evidence.noise_checks`.

*Money.* Nothing is drawn before it is paid, the ledger has what the documentation says, a budget
that covers one payment less refuses, and draws nothing; and the guarantee that a ledger states for
the documented events is no smaller than what can be proven of them from below.

Each check fails a healthy mechanism with probability `NOISE_LEVEL` at most; those that compare
transcripts with the same noise never do.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from botorch.exceptions.errors import InputDataError
from scipy.special import bdtr, bdtrc
from torch import Tensor

from botorch_fed.errors import BudgetExceeded
from botorch_fed.privacy.accounting import (
    Budget,
    Event,
    Ledger,
    gaussian_delta,
    optimistic_epsilon,
)
from botorch_fed.privacy.evidence import NOISE_LEVEL, Check, noise_checks, repeats
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource, Path
from botorch_fed.privacy.worlds import Neighbours, Subject

SIZES = (1.0, 100.0, 1e308, 1e160, 0.5, 5e-324, 3.0)  # of a canary, in bounds
NEIGHBOURS: tuple[Neighbours, ...] = ("none", "bound", "random", "equal", "opposite")
_DELTA = 1e-3  # of the budgets that are refused
_TAILS = (2.01, 2.51, 3.01, 3.51, 4.01, 4.51, 5.01)  # a little beyond where a cut would be


def world_checks(
    subject: Subject,
    *,
    seed: int = 0,
    draws: int = 40,
    transcripts: int = 40,
    every: int = 1,
    tails: Tensor | None = None,
) -> tuple[Check, ...]:
    """All checks of this module.

    Args:
        subject: What is checked.
        seed: Of its noise.
        draws: How many times everybody's coins are read.
        transcripts: How many transcripts of nobody are drawn.
        every: Of the worlds one in so many is tried, where runs are dear.
        tails: Whitened transcripts of nobody, `n x r x D`, if there are more than these.
    """
    noise = InsecureSeededNoise(seed)
    checks = [*coupled_checks(subject, noise, every), *crowd_checks(subject, noise, draws)]
    if tails is None:
        tails = torch.stack([whitened(subject, {}, noise, ("tail", i)) for i in range(transcripts)])
        checks += noise_checks(tails[:, :, None], subject.cell)
    checks += tail_checks(tails, subject.cell)
    checks += lattice_checks(subject, noise, min(transcripts, 40))
    checks += source_checks(subject, seed)
    checks += payment_checks(subject, noise)
    checks.append(claim_check(subject))
    checks.append(refusal_check(subject, noise))
    checks.append(not_finite_check(subject, noise))
    return tuple(checks)


# ------------------------------------------------------------------ two worlds, the same noise


@dataclass(frozen=True)
class _World:
    number: int
    place: int
    times: tuple[int, ...]
    sign: float
    size: float
    direction: int
    neighbours: Neighbours

    def __str__(self) -> str:
        sign = "+" if self.sign > 0 else "-"
        return f"place {self.place}, {sign}{self.size:g} bounds, neighbours: {self.neighbours}"


def worlds_of(subject: Subject) -> Iterator[_World]:
    """Every place or the first, the middle and the last, both signs, all sizes; the rest rotates.

    Args:
        subject: Whose worlds they are.
    """
    last = subject.places - 1
    places = sorted({0, last // 2, last})
    every = itertools.product(SIZES, (1.0, -1.0), places)
    rest = [p for p in range(subject.places) if p not in places][:8]
    more = itertools.product((100.0,), (1.0, -1.0), rest)
    for number, (size, sign, place) in enumerate([*every, *more]):
        whole = number % 2 == 0 or subject.times == 1
        times = tuple(range(subject.times)) if whole else (number // 2 % subject.times,)
        # Five neighbours, four directions, and places in threes: all pairs come.
        kind = NEIGHBOURS[(number + number // 5) % len(NEIGHBOURS)]
        yield _World(number, place, times, sign, size, number // 2, kind)


def coupled_checks(subject: Subject, noise: NoiseSource, every: int = 1) -> list[Check]:
    """How far one unit moves a transcript, in every world.

    Args:
        subject: What is checked.
        noise: Seeded.
        every: One world in so many.
    """
    farthest, where = 0.0, ""
    most, strange = 0.0, ""
    for world in itertools.islice(worlds_of(subject), 0, None, every):
        path = ("audit", "world", world.number)
        with_, without = _pair(subject, world, path)
        moved = whitened(subject, with_, noise, path) - whitened(subject, without, noise, path)
        slack = subject.rounding * subject.copies
        claimed = subject.distance(len(world.times))
        share = _number(moved.norm()) / claimed
        if share > farthest:
            farthest, where = share, str(world)
        wrong = _mismatch(subject, world, moved, with_, without) / slack
        if wrong > most:
            most, strange = wrong, str(world)
    return [
        Check(
            "distance of two worlds with the same noise, over the claimed",
            farthest,
            "<=",
            1 + 1e-5,  # what float64 loses in whitening
            where,
        ),
        Check("their difference from the documented one, over rounding", most, "<=", 1.0, strange),
    ]


def _pair(
    subject: Subject, world: _World, path: Path
) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    x = subject.input(world.direction, world.sign, world.size)
    beside = subject.beside(world.neighbours, x, world.place, path)
    here, there = dict(beside), dict(beside)
    other = subject.opposite(x, world.number)
    for time in world.times:
        here[world.place, time] = copies_of(x, subject.copies)
        if subject.replace:
            there[world.place, time] = copies_of(other, subject.copies)
    return here, there


def copies_of(x: Tensor, count: int) -> Tensor:
    """An input as often as a unit may hand it in at once."""
    return x if count == 1 else x.expand(count, *x.shape)


def _mismatch(
    subject: Subject,
    world: _World,
    moved: Tensor,
    here: dict[Any, Tensor],
    there: dict[Any, Tensor],
) -> float:
    """What is left of a difference without the documented one of each time, taken or not."""
    left = moved
    for time in world.times:
        place = (world.place, time)
        added = subject.added(here[place])
        if place in there:
            added = added - subject.added(there[place])
        expected = subject.pull(*place, added)
        square = float(expected.square().sum())
        taken = 1.0
        if subject.rate < 1 and square > 0:
            taken = float((moved * expected).sum() / square > 0.5)
        left = left - taken * expected
    return _number(left.norm())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what numpy says of a program that overflows: the transcript says it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _number(value: Tensor) -> float:
    """A float; infinite for what is no number."""
    return math.inf if bool(value.isnan()) else float(value)


def whitened(subject: Subject, given: Any, noise: NoiseSource, path: Path) -> Tensor:
    """The whitened transcript; not a number where the program refuses what may be handed in."""
    try:
        with _quiet():
            transcript, _ = subject.run(given, ledger=subject.ledger(), noise=noise, path=path)
    except InputDataError:
        return torch.full((len(subject.whitening), subject.dim), math.nan, dtype=torch.float64)
    return subject.whiten(transcript)


# ------------------------------------------------------------------ everybody, and their coins


def crowd_checks(subject: Subject, noise: NoiseSource, draws: int) -> list[Check]:
    """Whether all together are the sum of all alone, and who takes part.

    Args:
        subject: What is checked.
        noise: Seeded.
        draws: How often everybody's coins are read; without coins, three transcripts are enough.
    """
    worst, coins = 0.0, []
    count = draws if subject.rate < 1 else 3
    for i in range(count):
        path = ("audit", "crowd", i)
        nobody = whitened(subject, {}, noise, path)
        x = subject.input(i, 1.0, 1.0)
        kind: Neighbours = "bound" if i % 2 else "random"
        given = subject.beside(kind, x, -1, path)
        everybody = whitened(subject, given, noise, path) - nobody
        taken = _coins(subject, nobody, noise, path)
        expected = torch.zeros_like(everybody)
        for (place, time), y in given.items():
            expected += float(taken[place, time]) * subject.pull(place, time, subject.added(y))
        slack = subject.rounding * max(1, len(given))
        worst = max(worst, _number((everybody - expected).norm()) / slack)
        coins.append(taken)
    name = "all together against the sum of all alone, over rounding"
    checks = [Check(name, worst, "<=", 1.0)]
    if subject.rate < 1:
        checks += _coin_checks(subject, torch.stack(coins))
    return checks


def _coins(subject: Subject, nobody: Tensor, noise: NoiseSource, path: Path) -> Tensor:
    """Who takes part when, `places x times`: read off runs in which each is alone."""
    if subject.rate == 1:
        return torch.ones(subject.places, subject.times, dtype=torch.bool)
    taken = torch.zeros(subject.places, subject.times, dtype=torch.bool)
    for place in range(subject.places):
        x = subject.input(place, 1.0, 1.0)
        given = {(place, time): x for time in range(subject.times)}
        moved = whitened(subject, given, noise, path) - nobody
        for time in range(subject.times):
            expected = subject.pull(place, time, subject.added(x))
            taken[place, time] = (
                float((moved * expected).sum()) > float(expected.square().sum()) / 2
            )
    return taken


def _coin_checks(subject: Subject, coins: Tensor) -> list[Check]:
    """Of `n x places x times` coins: each at its rate, and independent as far as documented."""
    n, places, times = coins.shape
    alone = [(int(coins[:, p].sum()), n * times, subject.rate) for p in range(places)]
    alone.append((int(coins.sum()), coins.numel(), subject.rate))
    q, both = subject.rate, subject.together
    same = 1 - 2 * (q - both)
    pairs = [
        (int((coins[:, a] == coins[:, b]).sum()), n * times, same)
        for a, b in itertools.combinations(range(min(places, 12)), 2)
    ]
    again = q**2 + (1 - q) ** 2  # of one agent in two releases
    rounds = [
        (int((coins[:, p, t] == coins[:, p, t + 1]).sum()), n, again)
        for p in range(places)
        for t in range(0, times - 1, 2)
    ]
    return [
        Check(name, _rarest(counts), ">=", NOISE_LEVEL, "of the rarest count, times how many")
        for name, counts in (
            ("probability of how often agents take part", alone),
            ("probability of how often two take part alike", pairs),
            ("probability of how often one takes part alike in two releases", rounds),
        )
        if counts
    ]


def _rarest(counts: Sequence[tuple[int, int, float]]) -> float:
    """The least two-sided probability of binomial counts, corrected for their number."""
    least = 1.0
    for k, n, rate in counts:
        tail = min(float(bdtr(k, n, rate)), float(bdtrc(k - 1, n, rate)) if k else 1.0)
        least = min(least, 2 * tail * len(counts))
    return least


# ------------------------------------------------------------------ tails, repeats, the lattice


def tail_checks(whitened: Tensor, cell: float = 0.0) -> list[Check]:
    """Whether independent standard normals have tails, and no number comes too often.

    Args:
        whitened: Transcripts of nobody, any shape.
        cell: The step of their lattice.
    """
    values = whitened.flatten().abs()
    count = values.numel()
    found = [
        (int((values > k).sum()), count, math.erfc(k / math.sqrt(2)))
        for k in _TAILS
        if count * math.erfc(k / math.sqrt(2)) >= 20
    ]
    name = "occurrences of one and the same number"
    checks = [repeats(whitened.reshape(-1, 1, 1, 1), cell, name)]
    if found:
        detail = f"of counts beyond {_TAILS[0]:g} to {_TAILS[len(found) - 1]:g} deviations"
        name = "probability of the numbers in the tails"
        checks.append(Check(name, _rarest(found), ">=", NOISE_LEVEL, detail))
    return checks


def lattice_checks(subject: Subject, noise: NoiseSource, draws: int) -> list[Check]:
    """Whether all released numbers are points of the lattice, odd and even ones alike.

    Args:
        subject: What is checked.
        noise: Seeded.
        draws: How many transcripts.
    """
    if subject.lattice is None:
        return []
    off = odd = total = signs = 0
    for i in range(draws):
        x = subject.input(i, 1.0, 0.77)
        given = subject.beside("random", x, -1, ("lattice", i)) if i % 2 else {}
        values, _ = subject.run(
            given, ledger=subject.ledger(), noise=noise, path=("audit", "lattice", i)
        )
        cells = values / subject.lattice
        off += int((cells != cells.round()).sum())
        odd += int((cells.round().remainder(2) == 1).sum())
        signs += int(((values == 0) & values.signbit()).sum())
        total += cells.numel()
    parity = _rarest([(odd, total, 0.5)])
    return [
        Check("released numbers off the lattice, or zeros with a sign", off + signs, "<=", 0),
        Check("probability of the odd points of the lattice", parity, ">=", NOISE_LEVEL),
    ]


# ------------------------------------------------------------------ where noise comes from


@dataclass(eq=False)
class _Watched:
    """A source that writes down what is drawn."""

    source: NoiseSource
    log: list[Any]
    secret: bool = False

    @property
    def private(self) -> bool:
        return self.secret

    def uniform(self, *shape: int, path: Path) -> Tensor:
        self.log.append(path)
        return self.source.uniform(*shape, path=path)


@dataclass(frozen=True)
class _Books(Ledger):
    """A ledger that writes down when it is asked to pay."""

    log: list[Any] = field(default_factory=list, compare=False, repr=False)

    def spend(
        self, event: Event, *, count: int = 1, note: str = "", private: bool = True
    ) -> Ledger:
        try:
            after = super().spend(event, count=count, note=note, private=private)
        except BudgetExceeded:
            self.log.append("refused")
            raise
        self.log.append("paid")
        return after


def _account(subject: Subject, log: list[Any], budget: Budget | None = None) -> Ledger:
    if not subject.watched:
        return Ledger(subject.adjacency, subject.unit, budget)
    return _Books(subject.adjacency, subject.unit, budget, log=log)


def source_checks(subject: Subject, seed: int) -> list[Check]:
    """Whether all noise comes from the given source, each draw from a path of its own.

    Args:
        subject: What is checked.
        seed: Of one source; the other has another.
    """
    path, log = ("audit", "source", 0), []  # type: tuple[Path, list[Any]]
    one, _ = subject.run(
        {},
        ledger=subject.ledger(),
        noise=_Watched(InsecureSeededNoise(seed), log),
        path=path,
    )
    two, _ = subject.run(
        {}, ledger=subject.ledger(), noise=InsecureSeededNoise(seed + 1), path=path
    )
    equal = int((one == two).sum())
    # Two independent points of the lattice agree with probability 2^-21.
    allowed = _most_agreeing(one.numel())
    return [
        Check("numbers that another source of noise does not change", equal, "<=", allowed),
        Check("paths from which two numbers were drawn", len(log) - len(set(log)), "<=", 0),
    ]


def _most_agreeing(count: int) -> int:
    allowed = 0
    while float(bdtrc(allowed, count, 2.0**-13)) > NOISE_LEVEL:  # the coarsest grid: 8 steps
        allowed += 1
    return allowed + int(0.1 * count)


# ------------------------------------------------------------------ money


def payment_checks(subject: Subject, noise: NoiseSource) -> list[Check]:
    """Whether a transcript is paid for before anything is drawn, as documented.

    Args:
        subject: What is checked.
        noise: Seeded.
    """
    log: list[Any] = []
    account = _account(subject, log)
    _, after = subject.run(
        {}, ledger=account, noise=_Watched(noise, log), path=("audit", "paid", 0)
    )
    early = 0
    if subject.watched:
        early = log.index("paid") if "paid" in log else len(log)
    secret = _account(subject, [])
    _, private = subject.run(
        {}, ledger=secret, noise=_Watched(noise, [], secret=True), path=("audit", "paid", 1)
    )
    right = sum(entry.count for entry in after.entries if entry.event == subject.event)
    seeded = sum(entry.count for entry in after.entries if entry.private)
    hidden = sum(entry.count for entry in private.entries if not entry.private)
    return [
        Check("numbers drawn before anything is paid", early, "<=", 0),
        Check("payments for the documented event", right, ">=", subject.payments),
        Check("payments whose noise is called what it is not", seeded + hidden, "<=", 0),
    ]


def claim_check(subject: Subject) -> Check:
    r"""Whether the ledger's guarantee is no smaller than what is known of its events from below.

    Without sampling the documented releases are one Gaussian, whose :math:`\delta(\epsilon)` is
    known; with Poisson sampling there is an optimistic bound; of samples of a fixed size, what one
    release does to a unit that is in it with probability `q`.
    """
    ledger = subject.ledger().spend(subject.event, count=subject.payments)
    worst, where = 0.0, ""
    sampled = subject.event.sampling_rate < 1  # and then each delta is dear
    for delta in (1e-3,) if sampled else (1e-5, 1e-3, 1e-2):
        epsilon = ledger.guarantee(delta=delta).epsilon
        if sampled:
            least = optimistic_epsilon(ledger.entries, delta=delta, adjacency=subject.adjacency)
            share = 1.0 if least is None else (least + 1e-9) / (epsilon + 1e-9)
        else:
            share = _delta_of(subject, epsilon) / delta
        if share > worst:
            worst, where = share, f"at delta = {delta:g}, epsilon = {epsilon:.4g} is claimed"
    return Check("what is known from below, over the claimed", worst, "<=", 1 + 1e-6, where)


def _delta_of(subject: Subject, epsilon: float) -> float:
    if subject.event.sample_size is None:
        return gaussian_delta(epsilon, subject.distance(subject.payments))
    # One release is a mixture: with probability q the unit is in it.
    q = subject.rate
    return q * gaussian_delta(
        math.log1p(math.expm1(epsilon) / q), 2 / subject.event.noise_multiplier
    )


def refusal_check(subject: Subject, noise: NoiseSource) -> Check:
    """Whether a budget for one payment less stops the last one before anything is drawn.

    Args:
        subject: What is checked.
        noise: Seeded.
    """
    name = "failures to refuse a payment, or numbers drawn in spite of it"
    full = subject.ledger().spend(subject.event, count=subject.payments)
    epsilon = full.guarantee(delta=_DELTA).epsilon
    if subject.payments > 1:
        less = subject.ledger().spend(subject.event, count=subject.payments - 1)
        epsilon = (epsilon + less.guarantee(delta=_DELTA).epsilon) / 2
    else:
        epsilon /= 2
    if epsilon <= 0:
        return Check(name, 0, "<=", 0, "so much noise that any budget covers it")
    log: list[Any] = []
    account = _account(subject, log, Budget(epsilon, _DELTA))
    x = subject.input(0, 1.0, 1.0)
    given = {(n, t): x for n in range(subject.places) for t in range(subject.times)}
    try:
        subject.run(given, ledger=account, noise=_Watched(noise, log), path=("audit", "refused", 0))
    except BudgetExceeded:
        if not subject.watched:
            return Check(name, 0, "<=", 0)
        late = len(log) - 1 - log.index("refused") if "refused" in log else 1
        missing = subject.payers * (subject.payments - 1) - log.count("paid")
        return Check(name, late + abs(missing), "<=", 0)
    return Check(name, math.inf, "<=", 0, "the budget was exceeded")


# ------------------------------------------------------------------ what is no number


def not_finite_check(subject: Subject, noise: NoiseSource) -> Check:
    """Whether what is not finite is refused, from anybody.

    Args:
        subject: What is checked.
        noise: Seeded.
    """
    taken, where = 0, ""
    last = subject.places - 1
    for i, value in enumerate((math.nan, math.inf, -math.inf)):
        for place in sorted({0, last // 2, last}):
            given = {(place, subject.times - 1): subject.spoilt(value)}
            try:
                with _quiet():
                    subject.run(
                        given, ledger=subject.ledger(), noise=noise, path=("audit", "bad", i)
                    )
            except InputDataError:
                continue
            taken, where = taken + 1, f"{value} from place {place}"
    return Check("inputs that are not finite and were taken", taken, "<=", 0, where)
