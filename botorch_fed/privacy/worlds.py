r"""What mechanisms release in a chosen world: by the program, and by their documentation.

A `Subject` is a mechanism with a number of releases, as its adversary sees it. A world says what
every place (an agent, or the place of a record) hands in at every time. By the documentation a
transcript, `R x D`, is

.. math:: \sum_{n, t} b_{nt}\, w_{nt} \otimes f(x_{nt}) + L Z, \qquad
          Z \text{ independent } N(0, 1),

with public columns :math:`w_{nt}`, the bounded statistic `f` of what is handed in, and coins
:math:`b_{nt}` that say who was sampled. The formulas are written out again here, from the
constructors' arguments: a figure that is asked from the mechanism would share its defects.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.privacy.accounting import Adjacency, Event, Ledger, Unit
from botorch_fed.privacy.aggregation import PrivateSum
from botorch_fed.privacy.channels import PlainChannel
from botorch_fed.privacy.distributed import DistributedGaussianSum, DistributedRecordSum
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource, Path
from botorch_fed.privacy.increments import BlockSum, LocalGaussian
from botorch_fed.privacy.mechanisms import (
    CorrelatedGaussianSum,
    FixedSizeSampling,
    GaussianSum,
    WeightedGaussianSum,
)
from botorch_fed.privacy.tree import PrefixSum
from botorch_fed.rng import generator

SumMechanism = GaussianSum | WeightedGaussianSum | CorrelatedGaussianSum
SharesMechanism = DistributedGaussianSum | DistributedRecordSum
StreamMechanism = PrefixSum | LocalGaussian | BlockSum
Mechanism = SumMechanism | SharesMechanism | StreamMechanism

Given = Mapping[tuple[int, int], Tensor]  # what is handed in, by place and time
Neighbours = Literal["none", "bound", "random", "equal", "opposite"]

UNIFORM = 1e-7  # relative noise between regions below which float64 shows one vector only
BLOCKS = (3, 2)  # outcomes of each block
_SLOTS = 2  # records of an agent, in a sum that agents noise
_LARGE = 1e300  # from here on a size is a number as it stands, and no multiple of a bound
_EXACT = 8  # up to this horizon a root is exact


class Subject(ABC):
    """A mechanism and so many releases, as its adversary sees them.

    Attributes:
        mechanism: The mechanism, or what stands in its place.
        places: How many can be the canary.
        times: How often each of them hands something in.
        dim: The numbers `D` of a row of a transcript.
        event: What one payment is for.
        payments: How many a transcript takes.
        pays_each: Whether a unit pays for each time that it takes part.
        payers: How many pay, each from a ledger of its own.
        copies: How many inputs of a unit there are at one time, at most.
        weights: The columns `w`, `R x (places * times)`.
        whitening: The inverse of `L`, `r x R`.
        lattice: Every released number is a multiple of it; None where a decoder hides that.
        rounding: How far rounding moves the difference of two whitened transcripts, at most.
        rate: The probability of taking part.
        together: The probability that two places both do, in one release.
        watched: Whether the program pays from the very ledger that it is given.
    """

    mechanism: Any
    places: int
    times: int
    dim: int
    event: Event
    payments: int
    pays_each: bool
    payers: int = 1
    copies: int = 1
    weights: Tensor
    whitening: Tensor
    lattice: float | None
    rounding: float
    rate: float = 1.0
    together: float = 1.0
    watched: bool = True

    @property
    def adjacency(self) -> Adjacency:
        """What a neighbouring world is."""
        found: Adjacency = self.mechanism.adjacency
        return found

    @property
    def unit(self) -> Unit:
        """Whose data are protected."""
        found: Unit = self.mechanism.unit
        return found

    @property
    def replace(self) -> bool:
        """Whether something else stands in the canary's place in the other world."""
        return self.adjacency == "replace-one"

    def ledger(self) -> Ledger:
        """A ledger that can pay."""
        return Ledger(adjacency=self.adjacency, unit=self.unit)

    def distance(self, times: int) -> float:
        """How far the claim lets worlds be apart, in standard deviations.

        Args:
            times: How often the unit that differs takes part.
        """
        charges = times if self.pays_each else 1
        return (2 if self.replace else 1) * math.sqrt(charges) / self.event.noise_multiplier

    @abstractmethod
    def run(
        self, given: Given, *, ledger: Ledger, noise: NoiseSource, path: Path
    ) -> tuple[Tensor, Ledger]:
        """A transcript of the program, `R x D`, and what was paid for it."""

    @abstractmethod
    def added(self, x: Tensor) -> Tensor:
        """What an input adds by the documentation, `D` numbers."""

    @abstractmethod
    def input(self, direction: int, sign: float, size: float) -> Tensor:
        """Something to hand in.

        Args:
            direction: One of several.
            sign: 1 or -1.
            size: In bounds; very large ones are numbers as they stand.
        """

    @abstractmethod
    def opposite(self, x: Tensor, turn: int) -> Tensor:
        """What stands in its place in the other world, as far away as can be.

        Args:
            x: An input.
            turn: One of several ways.
        """

    def spoilt(self, value: float) -> Tensor:
        """An input with a number that is not finite."""
        x = self.input(0, 1.0, 1.0)
        x[-1] = value
        return x

    # -------------------------------------------------------------- what follows from it

    def column(self, place: int, time: int) -> Tensor:
        """The whitened column of a place and a time, `r`."""
        return self._whitened_weights[:, place * self.times + time]

    @cached_property
    def _whitened_weights(self) -> Tensor:
        return self.whitening @ self.weights

    @property
    def cell(self) -> float:
        """A step of the lattice in standard deviations of the noise, at most."""
        if self.lattice is None:
            return 2.0**-20
        return self.lattice * float(self.whitening.norm(dim=1).max())

    def pull(self, place: int, time: int, added: Tensor) -> Tensor:
        """What a statistic does to the whitened transcript, `r x D`."""
        return torch.outer(self.column(place, time), added)

    def mean(self, given: Given) -> Tensor:
        """The whitened transcript without noise, if everybody is sampled."""
        total = torch.zeros(len(self.whitening), self.dim, dtype=torch.float64)
        for (place, time), x in given.items():
            total += self.pull(place, time, self.added(x))
        return total

    def whiten(self, transcript: Tensor) -> Tensor:
        """A transcript with independent noise of variance one."""
        return self.whitening @ transcript

    def beside(self, kind: Neighbours, x: Tensor, place: int, path: Path) -> dict[Any, Tensor]:
        """What all other places hand in.

        Args:
            kind: "none" for nothing, "bound" for everybody at the bound, "random", or what the
                canary hands in, or the opposite.
            x: What the canary hands in.
            place: Its place.
            path: Of random numbers.
        """
        stream = generator(0, "audit neighbours", *path)
        given: dict[Any, Tensor] = {}
        for n in range(self.places):
            for t in range(self.times):
                if n == place or kind == "none":
                    continue
                if kind == "equal":
                    given[n, t] = x
                elif kind == "opposite":
                    given[n, t] = self.opposite(x, 0)
                elif kind == "bound":
                    given[n, t] = self.input(n, 1.0 - 2.0 * (t % 2), 1.0)
                else:
                    size = 3.0 * float(stream.uniform(1))
                    given[n, t] = self.input(n + t, 1.0 - 2.0 * (n % 2), size)
        return given


def subject_of(mechanism: Mechanism, rounds: int) -> Subject:
    """A mechanism with so many releases; of a stream, as many as it makes.

    Args:
        mechanism: A mechanism.
        rounds: Releases in a transcript, of sums and of increments.
    """
    if isinstance(mechanism, GaussianSum | WeightedGaussianSum | CorrelatedGaussianSum):
        return Sums(mechanism, rounds)
    if isinstance(mechanism, DistributedGaussianSum):
        return _SharedVectors(mechanism, rounds)
    if isinstance(mechanism, DistributedRecordSum):
        return _SharedRecords(mechanism, rounds)
    if isinstance(mechanism, PrefixSum):
        return Prefixes(mechanism)
    if isinstance(mechanism, LocalGaussian):
        return Increments(mechanism, rounds)
    if isinstance(mechanism, BlockSum):
        return Blocks(mechanism)
    raise InputDataError(
        "audit knows the mechanisms of botorch_fed.privacy, got "
        f"{type(mechanism).__name__}: describe its law to audit_transcripts instead."
    )


# ------------------------------------------------------------------ inputs


def clipped(x: Tensor, norm: float) -> Tensor:
    """A vector brought into a ball, whatever its size."""
    largest = float(x.abs().max())
    if largest == 0:
        return x.double()
    unit = x.double() / largest
    length = float(unit.norm())
    return x.double() if largest * length <= norm else unit * (norm / length)


def along(dim: int, direction: int) -> Tensor:
    """A unit vector: all coordinates alike, a single one, alternating, or a random one."""
    kind = direction % 4
    if kind == 0:
        u = torch.ones(dim, dtype=torch.float64)
    elif kind == 1:
        u = torch.zeros(dim, dtype=torch.float64)
        u[(direction // 4) % dim] = 1.0
    elif kind == 2:
        u = 1.0 - 2.0 * (torch.arange(dim, dtype=torch.float64) % 2)
    else:
        u = generator(0, "audit direction", direction).normal(dim)
    return u / u.norm()


def sized(u: Tensor, sign: float, size: float, bound: float) -> Tensor:
    """A unit vector of a size in bounds; from `1e300` on, its largest number is the size."""
    if size >= _LARGE:
        return u * (sign / float(u.abs().max())) * size
    return u * sign * (size * bound)


class OfVectors(Subject):
    """Inputs are vectors that are clipped."""

    clip_norm: float

    def added(self, x: Tensor) -> Tensor:
        return clipped(x, self.clip_norm)

    def input(self, direction: int, sign: float, size: float) -> Tensor:
        return sized(along(self.dim, direction), sign, size, self.clip_norm)

    def opposite(self, x: Tensor, turn: int) -> Tensor:
        if turn % 3 or float(x.abs().max()) >= _LARGE:
            return -x
        return torch.flip(-x, (0,)) * 7.0


class _OfRecords(Subject):
    """Inputs are records: features, and the outcome as the last number."""

    def added(self, x: Tensor) -> Tensor:
        mechanism = self.mechanism
        rows = x.reshape(-1, mechanism.num_features + 1)
        total = torch.zeros(self.dim, dtype=torch.float64)
        for row in rows:
            a = clipped(row[:-1], 1.0)
            total += record_statistic(a, self._outcome(float(row[-1])), mechanism.moment_scale)
        return total

    def _outcome(self, y: float) -> float:
        bound = self.mechanism.outcome_bound
        return float(max(-bound, min(bound, y - self.mechanism.centre)))

    def input(self, direction: int, sign: float, size: float) -> Tensor:
        mechanism = self.mechanism
        a = sized(along(mechanism.num_features, direction), 1.0, size, 1.0)
        y = sized(torch.ones(1).double(), sign, size, mechanism.outcome_bound)
        return torch.cat([a, mechanism.centre + y])

    def opposite(self, x: Tensor, turn: int) -> Tensor:
        mechanism, other = self.mechanism, x.clone()
        other[-1] = 2 * mechanism.centre - x[-1] if abs(float(x[-1])) < _LARGE else -x[-1]
        if turn % 3 and mechanism.num_features > 1:
            angle = math.pi / (3 if turn % 3 == 1 else 2)
            a = clipped(x[:-1], 1.0)
            beside = torch.zeros_like(a)
            beside[int(a.abs().argmin())] = 1.0
            beside = beside - float(beside @ a) * a / float((a @ a).clamp(min=1e-300))
            beside = beside / beside.norm().clamp(min=1e-300)
            other[:-1] = (math.cos(angle) * a + math.sin(angle) * a.norm() * beside) * 3.0
        return other


def record_statistic(a: Tensor, y: float, moment_scale: float) -> Tensor:
    r""":math:`(\mathrm{svec}\,aa^\top, \kappa y a)` of bounded features and outcomes."""
    m = len(a)
    upper = [math.sqrt(2) * float(a[i] * a[j]) for i in range(m) for j in range(i + 1, m)]
    square = a.square()
    return torch.cat([square, torch.tensor(upper, dtype=torch.float64), moment_scale * y * a])


def record_norm(mechanism: Any) -> float:
    """The norm that noise multipliers of sums over records refer to."""
    r = (mechanism.moment_scale * mechanism.outcome_bound) ** 2
    if mechanism.adjacency == "zero-out":
        return math.sqrt(1 + r)
    return math.sqrt(r) if r > 2 else (1 + r / 2) / math.sqrt(2)


def documented_step(std: float) -> float:
    """The step of a lattice Gaussian: between 2^-20 and 2^-21 of the noise, a power of two."""
    return 2.0 ** (math.floor(math.log2(std)) - 20)


# ------------------------------------------------------------------ sums by a trusted party


@dataclass(eq=False)
class Sums(OfVectors):
    """`GaussianSum` and its kin."""

    mechanism: SumMechanism
    times: int

    def __post_init__(self) -> None:
        mechanism = self.mechanism
        phi, whitening = sum_law(mechanism)
        self.places, self.dim = mechanism.num_agents, mechanism.dim
        self.clip_norm, self.rate = mechanism.clip_norm, sum_rate(mechanism)
        self.event, self.payments, self.pays_each = sum_event(mechanism), self.times, True
        self.weights = torch.kron(phi / self.rate, torch.eye(self.times, dtype=torch.float64))
        # Rows are ordered by output first here, and by time first in a transcript.
        rows = torch.arange(len(self.weights)).reshape(len(phi), self.times).T.flatten()
        self.weights = self.weights[rows]
        whitening = whitening.contiguous()
        self.whitening = torch.kron(torch.eye(self.times, dtype=torch.float64), whitening)
        self.together = self.rate**2
        if isinstance(mechanism.sampling, FixedSizeSampling):
            m, n = mechanism.sampling.size, mechanism.num_agents
            self.together = m * (m - 1) / (n * max(n - 1, 1))
        plain = not isinstance(mechanism, CorrelatedGaussianSum)
        std = float(1 / whitening[0, 0])
        self.lattice = documented_step(std) if plain else None
        # One step in each number of both worlds, and what a contraction by decoding hides.
        self.rounding = 4 * 2.0**-20 * math.sqrt(self.weights.shape[0] * self.dim) + 1e-6

    def run(
        self, given: Given, *, ledger: Ledger, noise: NoiseSource, path: Path
    ) -> tuple[Tensor, Ledger]:
        releases = []
        for t in range(self.times):
            vectors = {n: x for (n, time), x in given.items() if time == t}
            form = (t + int(path[-1])) % 3 if isinstance(path[-1], int) else 0
            release, ledger = self.mechanism.release(
                self._in_form(vectors, form), ledger=ledger, noise=noise, path=(*path, t)
            )
            releases.append(release.values)
        return torch.cat(releases), ledger

    def _in_form(
        self, vectors: Mapping[int, Tensor], form: int
    ) -> Mapping[int, Tensor] | Tensor | Iterable[tuple[int, Tensor]]:
        if form == 0 or self.places * self.dim > 100_000:
            return vectors
        everyone = torch.zeros(self.places, self.dim, dtype=torch.float64)
        for n, x in vectors.items():
            everyone[n] = x
        half = self.places // 2
        if form == 1 or half == 0:
            return everyone
        return iter([(0, everyone[:half]), (half, everyone[half:])])


def sum_law(mechanism: SumMechanism) -> tuple[Tensor, Tensor]:
    """The public weights, `P x N`, and what whitens the noise of a release, `r x P`."""
    if isinstance(mechanism, GaussianSum):
        return _plain(mechanism)
    if isinstance(mechanism, WeightedGaussianSum):
        return _weighted(mechanism)
    return _correlated(mechanism)


def _plain(mechanism: GaussianSum) -> tuple[Tensor, Tensor]:
    phi = torch.full((1, mechanism.num_agents), float(mechanism.weight), dtype=torch.float64)
    std = mechanism.noise_multiplier * _scale(mechanism) * abs(float(mechanism.weight))
    return phi, torch.eye(1, dtype=torch.float64) / std


def _weighted(mechanism: WeightedGaussianSum) -> tuple[Tensor, Tensor]:
    phi = mechanism.weights.to(torch.float64)
    num_regions = phi.shape[0]
    largest = float(phi.norm(dim=0).max())  # max_n ‖φ_n‖
    if mechanism.paper_noise:
        largest = float(phi.abs().max()) * math.sqrt(num_regions)  # s = z φ_max S / q, S = c √P
    std = mechanism.noise_multiplier * _scale(mechanism) * largest
    return phi, torch.eye(num_regions, dtype=torch.float64) / std


def _correlated(mechanism: CorrelatedGaussianSum) -> tuple[Tensor, Tensor]:
    num_regions = mechanism.num_regions
    inside = torch.nn.functional.one_hot(torch.tensor(mechanism.regions), num_regions).T
    phi = torch.softmax(mechanism.contrast * inside.to(torch.float64), dim=-1)  # P x N
    outside = math.exp(-mechanism.contrast)
    # K = e^-contrast 11ᵀ + (1 - e^-contrast) I has one eigenvalue along 1 and one across.
    along = torch.full((num_regions, num_regions), 1 / num_regions, dtype=torch.float64)
    across = torch.eye(num_regions, dtype=torch.float64) - along
    low = math.sqrt(-math.expm1(-mechanism.contrast))
    root = math.sqrt(1 + outside * (num_regions - 1)) * along + low * across  # R, ‖column‖ = 1
    counts = inside.sum(dim=-1).to(torch.float64)
    totals = counts + (len(mechanism.regions) - counts) * outside  # Z_i
    std = mechanism.noise_multiplier * _scale(mechanism)  # of the noise on R G / q; r = √K_ii = 1
    # The release is Z⁻¹ R (G̃): G̃ by the inverse, in the uniform stage its one coordinate.
    if low < UNIFORM:
        ones = torch.ones(1, num_regions, dtype=torch.float64) / math.sqrt(num_regions)
        inverse = ones * totals / math.sqrt(1 + outside * (num_regions - 1))
    else:
        inverse = torch.linalg.solve(root, torch.diag(totals))
    return phi, inverse / std


def _scale(mechanism: SumMechanism) -> float:
    """The clip bound as the release scales it, c / q, and what the lattice adds to the noise."""
    outputs = 1
    if isinstance(mechanism, WeightedGaussianSum):
        outputs = mechanism.weights.shape[0]
    elif isinstance(mechanism, CorrelatedGaussianSum):
        outputs = mechanism.num_regions
    # s = z (Δ + γ √PM) with γ = s / 2^20
    lattice = mechanism.noise_multiplier * math.sqrt(outputs * mechanism.dim) * 2.0**-20
    return mechanism.clip_norm / sum_rate(mechanism) / (1 - lattice)


def sum_rate(mechanism: SumMechanism) -> float:
    """The probability that an agent takes part."""
    sampling = mechanism.sampling
    if isinstance(sampling, FixedSizeSampling):
        return sampling.size / mechanism.num_agents
    return float(sampling.rate)


def sum_event(mechanism: SumMechanism) -> Event:
    """What one release costs, by the documentation."""
    sampling, z = mechanism.sampling, mechanism.noise_multiplier
    if isinstance(sampling, FixedSizeSampling):
        return Event(z, sample_size=sampling.size, population=mechanism.num_agents)
    return Event(z, sampling_rate=sampling.rate)


# ------------------------------------------------------------------ sums that agents noise


@dataclass(eq=False)
class Shares(Subject):
    """Sums that agents have noised, as a coalition of the allowed size sees them.

    It sees the sum over the agents that neither collude nor drop out.
    """

    mechanism: SharesMechanism
    times: int

    def __post_init__(self) -> None:
        mechanism = self.mechanism
        self.honest = mechanism.num_agents - mechanism.colluding - mechanism.dropping
        self.slots = 1 if isinstance(mechanism, DistributedGaussianSum) else _SLOTS
        if isinstance(mechanism, DistributedRecordSum):
            self.slots = min(_SLOTS, mechanism.max_records)
        self.places, self.dim = self.honest * self.slots, mechanism.grid.dim
        self.event = Event(float(mechanism.noise_multiplier), discrete=True)
        self.payments, self.pays_each, self.payers = self.times, True, self.honest
        self.lattice = mechanism.grid.step
        each = torch.ones(1, self.places, dtype=torch.float64)
        self.weights = torch.kron(each, torch.eye(self.times, dtype=torch.float64))
        half = self.lattice * math.sqrt(self.dim) / 2
        std = mechanism.noise_multiplier * (self._norm + half)
        self.whitening = torch.eye(self.times, dtype=torch.float64) / std
        self.rounding = (2 * half / std + 1e-6) * max(1, self.places) * math.sqrt(self.times)
        self.sum = PrivateSum(
            mechanism=mechanism, channel=PlainChannel(mechanism.grid), noise_at="agent"
        )

    @property
    def _norm(self) -> float:
        raise NotImplementedError

    def _handed_in(self, agent: int, t: int, given: Given) -> Tensor:
        raise NotImplementedError

    def run(
        self, given: Given, *, ledger: Ledger, noise: NoiseSource, path: Path
    ) -> tuple[Tensor, Ledger]:
        ledgers = [ledger] * self.honest
        totals = []
        for t in range(self.times):
            total = torch.zeros(self.dim, dtype=torch.int64)
            for agent in range(self.honest):
                integers, after = self.sum.contribute(
                    self._handed_in(agent, t, given),
                    ledger=ledgers[agent],
                    noise=noise,
                    path=(*path, t, agent),
                )
                assert after is not None
                ledgers[agent] = after
                total += integers
            totals.append(total.double() * self.mechanism.grid.step)
        return torch.stack(totals), ledgers[0]


class _SharedVectors(Shares, OfVectors):
    mechanism: DistributedGaussianSum

    @property
    def clip_norm(self) -> float:  # type: ignore[override]
        return float(self.mechanism.clip_norm)

    @property
    def _norm(self) -> float:
        return self.clip_norm

    def _handed_in(self, agent: int, t: int, given: Given) -> Tensor:
        found = given.get((agent, t))
        return torch.zeros(self.dim, dtype=torch.float64) if found is None else found


class _SharedRecords(Shares, _OfRecords):
    mechanism: DistributedRecordSum

    @property
    def _norm(self) -> float:
        return record_norm(self.mechanism)

    def _handed_in(self, agent: int, t: int, given: Given) -> Tensor:
        places = range(agent * self.slots, (agent + 1) * self.slots)
        rows = [given[place, t] for place in places if (place, t) in given]
        return _rows(rows, self.mechanism.num_features + 1)


def _rows(rows: list[Tensor], width: int) -> Tensor:
    found = [row.reshape(-1, width) for row in rows]
    return torch.cat(found) if found else torch.zeros(0, width, dtype=torch.float64)


# ------------------------------------------------------------------ streams, increments, blocks


@dataclass(eq=False)
class Prefixes(_OfRecords):
    """All sums of a `PrefixSum`; a place is a step."""

    mechanism: PrefixSum
    times: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        mechanism = self.mechanism
        self.places = mechanism.horizon
        self.dim = mechanism.num_features * (mechanism.num_features + 3) // 2
        self.event, self.payments, self.pays_each = _everybody(mechanism), 1, False
        self.copies = mechanism.participations
        ones = torch.ones(self.places, self.places, dtype=torch.float64)
        self.weights = ones.tril()
        column, BB = prefix_covariance(mechanism.factorization, self.places)
        norm = record_norm(mechanism) * self.copies
        self.lattice = documented_step(mechanism.noise_multiplier * norm * math.sqrt(column))
        norm += self.copies * self.lattice * math.sqrt(self.dim) / 2
        root = torch.linalg.cholesky((mechanism.noise_multiplier * norm) ** 2 * column * BB)
        self.whitening = torch.linalg.inv(root)
        rounding = self.lattice * math.sqrt(self.dim) * self.copies * self.places
        self.rounding = rounding * float(torch.linalg.matrix_norm(self.whitening, 2)) + 1e-6

    def run(
        self, given: Given, *, ledger: Ledger, noise: NoiseSource, path: Path
    ) -> tuple[Tensor, Ledger]:
        mechanism, values = self.mechanism, []
        state, ledger = mechanism.start(ledger=ledger, noise=noise)
        for step in range(self.places):
            rows = [given[step, 0]] if (step, 0) in given else []
            records = _rows(rows, mechanism.num_features + 1)
            state, release = mechanism.step(state, records, noise=noise, path=path)
            values.append(release.values)
        return torch.stack(values), ledger


@dataclass(eq=False)
class Increments(_OfRecords):
    """The increments of one client; a place is one of its records."""

    mechanism: LocalGaussian
    times: int

    def __post_init__(self) -> None:
        mechanism = self.mechanism
        self.places = 1 if mechanism.unit == "agent" else 3
        self.dim = mechanism.num_features * (mechanism.num_features + 3) // 2
        self.event, self.payments, self.pays_each = _everybody(mechanism), self.times, True
        each = torch.ones(1, self.places, dtype=torch.float64)
        self.weights = torch.kron(each, torch.eye(self.times, dtype=torch.float64))
        rounding = mechanism.noise_multiplier * math.sqrt(self.dim) * 2.0**-21
        std = mechanism.noise_multiplier * record_norm(mechanism) / (1 - rounding)
        self.whitening = torch.eye(self.times, dtype=torch.float64) / std
        self.lattice = documented_step(std)
        self.rounding = 4 * 2.0**-20 * math.sqrt(self.dim * self.times) * self.places + 1e-6

    def run(
        self, given: Given, *, ledger: Ledger, noise: NoiseSource, path: Path
    ) -> tuple[Tensor, Ledger]:
        values = []
        for t in range(self.times):
            rows = [given[n, t] for n in range(self.places) if (n, t) in given]
            records = _rows(rows, self.mechanism.num_features + 1)
            release, ledger = self.mechanism.release(
                records, ledger=ledger, noise=noise, path=(*path, t)
            )
            values.append(release.values[0])
        return torch.stack(values), ledger


@dataclass(eq=False)
class Blocks(Subject):
    """Everything that leaves a run of blocks; a place is an outcome."""

    mechanism: BlockSum
    times: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        mechanism = self.mechanism
        self.places, self.dim = sum(BLOCKS), 1
        self.event, self.payments, self.pays_each = _everybody(mechanism), 1, False
        of = torch.repeat_interleave(torch.arange(len(BLOCKS)), torch.tensor(BLOCKS))
        self.weights = (torch.arange(len(BLOCKS))[:, None] == of).double()
        rounding = mechanism.noise_multiplier * 2.0**-21
        std = mechanism.noise_multiplier * mechanism.outcome_bound / (1 - rounding)
        self.whitening = torch.eye(len(BLOCKS), dtype=torch.float64) / std
        self.lattice = documented_step(std)
        self.rounding = 4 * 2.0**-20 * self.places + 1e-6

    def added(self, x: Tensor) -> Tensor:
        bound = self.mechanism.outcome_bound
        return (x.double() - self.mechanism.centre).clamp(-bound, bound)

    def input(self, direction: int, sign: float, size: float) -> Tensor:
        one = torch.ones(1, dtype=torch.float64)
        return self.mechanism.centre + sized(one, sign, size, self.mechanism.outcome_bound)

    def opposite(self, x: Tensor, turn: int) -> Tensor:
        return 2 * self.mechanism.centre - x if float(x.abs()) < _LARGE else -x

    def run(
        self, given: Given, *, ledger: Ledger, noise: NoiseSource, path: Path
    ) -> tuple[Tensor, Ledger]:
        mechanism, values, place = self.mechanism, [], 0
        state, ledger = mechanism.start(ledger=ledger, noise=noise)
        nothing = torch.tensor([mechanism.centre], dtype=torch.float64)
        for length in BLOCKS:
            state = mechanism.open(state, length)
            for _ in range(length):
                outcome = given.get((place, 0), nothing)
                state, done = mechanism.add(state, outcome, noise=noise, path=path)
                place += 1
                if done is not None:
                    values.append(torch.tensor([done.total], dtype=torch.float64))
        if len(values) != len(BLOCKS):
            return torch.full((len(BLOCKS), 1), math.nan, dtype=torch.float64), ledger
        return torch.stack(values), ledger


def _everybody(mechanism: StreamMechanism) -> Event:
    return Event(float(mechanism.noise_multiplier))


def prefix_covariance(name: str, horizon: int) -> tuple[float, Tensor]:
    r""":math:`\|C\|^2` and :math:`B B^\top` by the formulas of the documentation."""
    if name == "tree":
        B = _dyadic(horizon)
        return float(horizon.bit_length()), B @ B.T
    if horizon > _EXACT:
        C = _toeplitz(_buffered_response(horizon))
    else:
        f = [1.0]
        for k in range(1, horizon):
            f.append(f[-1] * (1 - 1 / (2 * k)))
        C = _toeplitz(f)
    A = torch.ones(horizon, horizon).double().tril()
    B = A @ torch.linalg.inv(C)
    return float(C.square().sum(dim=0).max()), B @ B.T


def _toeplitz(response: list[float]) -> Tensor:
    n = len(response)
    rows = [[response[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)]
    return torch.tensor(rows).double()


def _buffered_response(horizon: int) -> list[float]:
    """The encoder's first column, from the fitted numbers, which are public."""
    mechanism = PrefixSum(num_features=1, outcome_bound=1.0, horizon=horizon, noise_multiplier=1.0)
    ledger = Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)
    state, _ = mechanism.start(ledger=ledger, noise=InsecureSeededNoise(0))
    omega, theta = state.factor.tolist()
    tail = [sum(w * q**k for w, q in zip(omega, theta, strict=True)) for k in range(horizon - 1)]
    return [1.0, *tail]


def _dyadic(horizon: int) -> Tensor:
    """Which noise is in which prefix: `T' x nodes`."""
    nodes: dict[tuple[int, int], int] = {}
    for length in (2**k for k in range(horizon.bit_length())):
        for end in range(length, horizon + 1, length):
            nodes[end, length] = len(nodes)
    rows = []
    for t in range(1, horizon + 1):
        row, end = torch.zeros(len(nodes)).double(), 0
        for length in (2**k for k in reversed(range(t.bit_length()))):
            if t & length:
                end += length
                row[nodes[end, length]] = 1.0
        rows.append(row)
    return torch.stack(rows)
