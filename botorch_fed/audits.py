r"""Audits of whole protocols: what an adversary sees of a run, in two worlds.

`privacy.audit` audits mechanisms. Here server and sites run as they do in a study, through bytes,
and what is audited is the transcript that the adversary of the trust model sees; only what sites
say is prescribed, so that the worlds are the worst there are.

::

    subject      aggregation      the adversary is           it sees
    NoisyRun     NoisySum         all other agents           every release
    JointRun     JointStream      all other agents           every release
    PublicRun    PublicStream     all other agents           every release
    LocalRun     LocalStream      the server                 every increment
    SummedRun    SecureSum        the server and one agent   every sum, less that agent's own part

A run that is refused, or that has another number of releases than it promised, is a transcript of
no numbers, and fails. `protocol_checks` looks at what one transcript cannot show: a step that a
crash has interrupted gives the same release again, whatever the noise would be now; and a site that
is asked again, with another roster, draws anew and pays again.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.aggregation.noisy import NoisySum
from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.aggregation.stream import JointStream, LocalStream, PublicStream
from botorch_fed.aggregation.sum_messages import Opened, SumMemory, SumOrder, Upload
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import BudgetExceeded, ObjectiveError, ProtocolError
from botorch_fed.federation.base import Outbox, Outgoing
from botorch_fed.federation.drive import drive
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import (
    OWN,
    Aggregation,
    Contribution,
    Party,
    Resources,
    Search,
    Terms,
    View,
)
from botorch_fed.privacy import (
    CorrelatedGaussianSum,
    DistributedGaussianSum,
    Event,
    Ledger,
    PoissonSampling,
)
from botorch_fed.privacy.audit import audit_subject
from botorch_fed.privacy.evidence import AuditReport, Check
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource, Path
from botorch_fed.privacy.worlds import (
    Given,
    OfVectors,
    Subject,
    documented_step,
    prefix_covariance,
    record_norm,
    record_statistic,
    sum_law,
)
from botorch_fed.rng import generator
from botorch_fed.search.bandit import BanditSearch, unit_features
from botorch_fed.search.noisy import VectorSearch
from botorch_fed.search.released import regions_of
from botorch_fed.search.transfer import default_private_features
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs, MemoryStore
from botorch_fed.studies import Federation

SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
BOUNDED = SearchSpace(
    SQUARE.parameters,
    outcomes=(Outcome.objective("error", minimize=True), Outcome.constraint("size", upper=1.0)),
)
_CENTRE = torch.full((1, 2), 0.5, dtype=torch.float64)
_NOISE_VAR = 0.1
_ROUNDS = 2  # releases of a run
_DRAWS = 16


def audit_protocol(
    subject: ProtocolRun,
    *,
    runs: int = 24,
    delta: float = 1e-3,
    seed: int = 0,
    every: int = 1,
) -> AuditReport:
    """Audit a whole protocol.

    Args:
        subject: A run.
        runs: Transcripts per world.
        delta: As in `privacy.audit.audit`.
        seed: Of the noise.
        every: Of the worlds one in so many is tried.
    """
    report = audit_subject(
        subject, runs=runs, delta=delta, seed=seed, draws=min(runs, _DRAWS), every=every
    )
    return replace(report, checks=(*report.checks, *protocol_checks(subject, seed=seed)))


def protocol_checks(subject: ProtocolRun, *, seed: int = 0) -> tuple[Check, ...]:
    """What one transcript of a run does not show.

    Args:
        subject: A run.
        seed: Of its noise.
    """
    again = subject.drawn_again(seed)
    checks = [Check("numbers that a repeated step draws anew", again, "<=", 0)]
    if isinstance(subject, SummedRun):
        checks += subject.roster_checks(seed)
    return tuple(checks)


# ------------------------------------------------------------------ what sites say


@dataclass(frozen=True, kw_only=True)
class Scripted(VectorSearch):
    """A search that says what is written for it.

    Attributes:
        numbers: Of a message.
        num_regions: As in `VectorSearch`.
        script: From a site's name and a round to its message; what is missing is not said.
    """

    numbers: int
    num_regions: int = 1
    script: Mapping[tuple[str, int], Tensor] = field(
        default_factory=dict, compare=False, repr=False, metadata=OWN
    )

    has_basis = False
    many_outcomes = True  # the numbers of all outcomes, one after the other

    def size(self, terms: Terms) -> int:
        """As many as are written."""
        return self.numbers

    def point(self, view: View) -> Tensor:
        """A uniform point."""
        return view.stream("point", view.n).uniform(1, view.terms.space.dim)

    def message(self, view: View) -> Tensor | None:
        """What is written."""
        return self.script.get((view.name, view.t))


@dataclass(eq=False)
class _Recorder:
    """A server whose steps are written down, and done twice if there is a twin."""

    honest: FederatedServer
    twin: FederatedServer | None = None
    states: list[Any] = field(default_factory=list)
    inboxes: list[Mapping[str, Any]] = field(default_factory=list)
    differing: int = 0

    @property
    def state_type(self) -> type[Any]:
        return self.honest.state_type

    @property
    def accepts(self) -> tuple[type, ...]:
        return self.honest.accepts

    @property
    def fingerprint(self) -> str:
        return self.honest.fingerprint

    def start(self) -> Any:
        return self.honest.start()

    def outbox(self, state: Any) -> Outbox | None:
        return self.honest.outbox(state)

    def check(self, state: Any, sender: str, message: Any) -> None:
        self.honest.check(state, sender, message)

    def step(self, state: Any, inbox: Mapping[str, Any]) -> Any:
        after = self.honest.step(state, inbox)
        self.states.append(after)
        self.inboxes.append(dict(inbox))
        if self.twin is not None:
            again = self.twin.step(state, inbox)
            first, second = (_released(one) for one in (after, again))
            if first is not None and second is not None:
                self.differing += int((first != second).sum())
        return after


def _released(state: Any) -> Tensor | None:
    found = getattr(state, "parameters", None)
    return None if found is None else found.values


# ------------------------------------------------------------------ a run as a subject


class ProtocolRun(Subject):
    """A whole run. Its ledgers are those of the parties, which nobody watches from inside."""

    watched = False
    names: tuple[str, ...]
    aggregation: Aggregation

    @abstractmethod
    def search(self, given: Given) -> Search:
        """What sites say and do in a world."""

    @abstractmethod
    def outcome(self, given: Given, name: str, t: int) -> float:
        """What an evaluation of a site gives."""

    @abstractmethod
    def transcript(self, server: _Recorder, sites: Mapping[str, Site], drawn: Any) -> list[Tensor]:
        """What the adversary sees."""

    @abstractmethod
    def paid(self, server: _Recorder, sites: Mapping[str, Site]) -> Ledger:
        """What a unit has paid."""

    def study(self, given: Given) -> Federation:
        """The study of a world."""
        X, Y = _CENTRE, torch.zeros(1, len(self.space.metrics), dtype=torch.float64)
        bandit = not isinstance(self.search(given), Scripted)
        return Federation(
            budget=self.budget,
            search=self.search(given),
            aggregation=self.aggregation,
            feature_map=self.basis if bandit else None,
            num_initial=0,
            data={} if bandit else dict.fromkeys(self.names, (X, Y)),
        )

    budget: int
    basis: Any = None
    space: SearchSpace = SQUARE

    def run(
        self, given: Given, *, ledger: Ledger, noise: NoiseSource, path: Path
    ) -> tuple[Tensor, Ledger]:
        try:
            server, sites, drawn = self._driven(given, ledger, _Beneath(noise, path))
        except ObjectiveError as error:
            raise InputDataError(str(error)) from error
        except ProtocolError as error:  # of sites whose budgets are exceeded nobody begins
            if ledger.budget is None:
                raise
            raise BudgetExceeded(str(error)) from error
        if any(not bool(x.isfinite().all()) for x in given.values()):
            self._check_refused(server)
        rows = self.transcript(server, sites, drawn)
        if len(rows) != len(self.weights):
            if ledger.budget is not None:
                raise BudgetExceeded(f"The run has {len(rows)} releases.")
            shape = (len(self.weights), self.dim)
            return torch.full(shape, math.nan, dtype=torch.float64), self.paid(server, sites)
        return torch.stack(rows), self.paid(server, sites)

    def _driven(
        self, given: Given, ledger: Ledger, noise: NoiseSource, other: NoiseSource | None = None
    ) -> tuple[_Recorder, dict[str, Site], list[dict[str, Any]]]:
        study, names, secrets = self.study(given), self.names, MemoryStore()
        terms = study.terms(self.space, names)
        at_hub = None if self._paid_at_sites else ledger

        def server(source: NoiseSource) -> FederatedServer:
            resources = Resources(noise=source, secrets=secrets, ledger=at_hub)
            return FederatedServer(terms=terms, resources=resources)

        recorder = _Recorder(server(noise), None if other is None else server(other))
        blobs, sites = MemoryBlobs(), {}
        for i, name in enumerate(names):
            agent = study.agent(name, self.space, i, blobs)
            own = ledger if self._paid_at_sites else None
            agent = replace(agent, resources=Resources(noise=noise, ledger=own))
            sites[name] = Site(name, agent, _Objective(self, given, name))
        engine, drawn = InProcess(sites.values()), []  # type: InProcess, list[dict[str, Any]]

        def exchange(outgoing: Outgoing) -> Any:
            exchanged = engine(outgoing)
            drawn.append({name: site.state.aggregation for name, site in sites.items()})
            return exchanged

        drive(recorder, exchange)
        return recorder, sites, drawn

    @property
    def _paid_at_sites(self) -> bool:
        return isinstance(self.aggregation, LocalStream | SecureSum)

    def _check_refused(self, server: _Recorder) -> None:
        """Raise `InputDataError` if what is not finite has not arrived."""
        values = [
            reply.values
            for inbox in server.inboxes
            for reply in inbox.values()
            if isinstance(reply, Contribution) and reply.values is not None
        ]
        if all(bool(value.isfinite().all()) for value in values):
            raise InputDataError("It was not sent.")

    def drawn_again(self, seed: int) -> int:
        """Numbers of releases that a step draws anew after a crash that left the old ones."""
        one, other = InsecureSeededNoise(seed), InsecureSeededNoise(seed + 1)
        recorder, _, _ = self._driven({}, self.ledger(), one, other)
        return recorder.differing


@dataclass(eq=False)
class _Beneath:
    """A source all of whose paths begin alike: a run has paths of its own."""

    source: NoiseSource
    path: Path

    @property
    def private(self) -> bool:
        return self.source.private

    def uniform(self, *shape: int, path: Path) -> Tensor:
        return self.source.uniform(*shape, path=(*self.path, *path))


@dataclass(eq=False)
class _Objective:
    """What a site measures: prescribed, one evaluation after the other."""

    run: ProtocolRun
    given: Given
    name: str
    count: int = 0

    def __call__(self, X: Tensor) -> Tensor:
        self.count += len(X)
        value = self.run.outcome(self.given, self.name, self.count)
        return torch.full((len(X), len(self.run.space.metrics)), value, dtype=torch.float64)


# ------------------------------------------------------------------ noisy sums by a server


@dataclass(eq=False)
class NoisyRun(OfVectors, ProtocolRun):
    """Two releases of a `NoisySum`."""

    num_agents: int = 4
    dim: int = 16
    clip_norm: float = 2.0
    noise_multiplier: float = 1.0
    rate: float = 1.0
    num_regions: int = 1
    space: SearchSpace = SQUARE

    def __post_init__(self) -> None:
        self.names = tuple(f"site{i}" for i in range(self.num_agents))
        self.places, self.times, self.budget = self.num_agents, _ROUNDS, _ROUNDS + 1
        self.event = Event(self.noise_multiplier, sampling_rate=self.rate)
        self.payments, self.pays_each, self.together = _ROUNDS, True, self.rate**2
        self.aggregation = NoisySum(
            releases=tuple(range(_ROUNDS)),
            noise_multiplier=self.noise_multiplier,
            sampling=PoissonSampling(self.rate),
            clip_norm=self.clip_norm,
            delta=1e-3,
        )
        blocks = [sum_law(self._documented(t)) for t in range(_ROUNDS)]
        self.whitening = torch.block_diag(*(whitening for _, whitening in blocks))
        self.weights = torch.zeros(_ROUNDS * self.num_regions, self.places * _ROUNDS).double()
        for t, (phi, _) in enumerate(blocks):
            rows = slice(t * self.num_regions, (t + 1) * self.num_regions)
            self.weights[rows, t::_ROUNDS] = phi / self.rate
        self.lattice = None
        self.mechanism = self._documented(0)
        self.rounding = 4 * 2.0**-20 * math.sqrt(len(self.weights) * self.dim) + 1e-6

    def _documented(self, t: int) -> CorrelatedGaussianSum:
        """The release after round `t`, from the settings of this run."""
        P, terms = self.num_regions, self.aggregation
        assert isinstance(terms, NoisySum)
        regions = regions_of(P, SQUARE.dim).assign(self.num_agents)
        contrast = terms.exploration(t + 1)
        return CorrelatedGaussianSum(
            regions=regions,
            num_regions=P,
            contrast=contrast,
            num_agents=self.num_agents,
            dim=self.dim,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            sampling=PoissonSampling(self.rate),
        )

    def search(self, given: Given) -> Scripted:
        script = {(self.names[n], t): x for (n, t), x in given.items()}
        return Scripted(numbers=self.dim, num_regions=self.num_regions, script=script)

    def outcome(self, given: Given, name: str, t: int) -> float:
        return 0.0

    def transcript(self, server: _Recorder, sites: Mapping[str, Site], drawn: Any) -> list[Tensor]:
        releases = {}
        for state in server.states:
            if state.released is not None:
                releases[state.released.made] = state.released.values
        return [row for _, values in sorted(releases.items()) for row in values]

    def paid(self, server: _Recorder, sites: Mapping[str, Site]) -> Ledger:
        found: Ledger = server.states[-1].ledger
        return found


# ------------------------------------------------------------------ streams of records


@dataclass(eq=False)
class _StreamRun(ProtocolRun):
    """Records of a bandit; a place is a round of an agent, the arms are prescribed.

    What is not given is the outcome zero of the middle of the cube, which everybody knows.
    """

    num_agents: int = 3
    rounds: int = 3
    outcome_bound: float = 0.5
    noise_multiplier: float = 2.0

    def _begin(self) -> None:
        self.names = tuple(f"site{i}" for i in range(self.num_agents))
        self.places, self.times, self.budget = self.num_agents * self.rounds, 1, self.rounds
        self.basis = default_private_features(SQUARE, num_features=3)
        self.moment_scale = math.sqrt(2) / self.outcome_bound
        self.event = Event(self.noise_multiplier)
        self.payments, self.pays_each = 1, False
        self.lattice = None

    @property
    def adjacency(self) -> Any:
        return "replace-one"

    @property
    def unit(self) -> Any:
        return "record"

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "horizon": self.rounds,
            "outcome_bound": self.outcome_bound,
            "noise_multiplier": self.noise_multiplier,
        }

    @property
    def centre(self) -> float:
        """The public middle of the range of outcomes."""
        return 0.0

    def place(self, name: str, t: int) -> int:
        """The place of an agent in a round, from 1 on."""
        return (t - 1) * self.num_agents + self.names.index(name)

    def search(self, given: Given) -> BanditSearch:
        def arms(name: str, t: int) -> Tensor:
            x = given.get((self.place(name, t), 0))
            return _CENTRE if x is None else x[None, :2]

        return BanditSearch(noise_var=_NOISE_VAR, decision_sets=arms)

    def outcome(self, given: Given, name: str, t: int) -> float:
        x = given.get((self.place(name, t), 0))
        return 0.0 if x is None else float(x[2])

    def statistic(self, x: Tensor) -> Tensor:
        """What a record adds, by the documentation."""
        a = unit_features(self.basis, x[None, :2])[0]
        y = float(x[2].clamp(-self.outcome_bound, self.outcome_bound))
        return record_statistic(a / max(1.0, float(a.norm())), y, self.moment_scale)

    @property
    def _base(self) -> Tensor:
        return self.statistic(torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))

    def added(self, x: Tensor) -> Tensor:
        return self.statistic(x) - self._base

    def input(self, direction: int, sign: float, size: float) -> Tensor:
        corner = generator(0, "arms", direction % 7).uniform(2)
        # Sites take no outcome beyond 1e30.
        y = sign * 1e29 if size >= 1e29 else sign * size * self.outcome_bound
        return torch.cat([corner, torch.tensor([y], dtype=torch.float64)])

    def opposite(self, x: Tensor, turn: int) -> Tensor:
        point = x[:2] if turn % 3 else generator(0, "other arms", turn).uniform(2)
        return torch.cat([point, -x[2:]])

    def spoilt(self, value: float) -> Tensor:
        x = self.input(0, 1.0, 1.0)
        x[2] = value
        return x

    def paid(self, server: _Recorder, sites: Mapping[str, Site]) -> Ledger:
        found: Ledger = server.states[-1].ledger
        return found


@dataclass(eq=False)
class JointRun(_StreamRun):
    """All sums of a `JointStream`."""

    factorization: Any = "sqrt"

    def __post_init__(self) -> None:
        self._begin()
        self.aggregation = JointStream(factorization=self.factorization, **self._settings)
        self.mechanism, self.dim = self, len(self._base)
        seen = torch.ones(self.rounds, self.rounds, dtype=torch.float64).tril()
        self.weights = seen.repeat_interleave(self.num_agents, dim=1)
        column, BB = prefix_covariance(self.factorization, self.rounds)
        norm = record_norm(self)
        step = documented_step(self.noise_multiplier * norm * math.sqrt(column))
        norm += step * math.sqrt(self.dim) / 2
        root = torch.linalg.cholesky((self.noise_multiplier * norm) ** 2 * column * BB)
        self.whitening = torch.linalg.inv(root)
        moved = step * math.sqrt(self.dim) * self.rounds
        self.rounding = moved * float(torch.linalg.matrix_norm(self.whitening, 2)) + 1e-6

    def transcript(self, server: _Recorder, sites: Mapping[str, Site], drawn: Any) -> list[Tensor]:
        found = [state.parameters.values for state in server.states if state.parameters is not None]
        return [v - (t + 1) * self.num_agents * self._base for t, v in enumerate(found)]


@dataclass(eq=False)
class LocalRun(_StreamRun):
    """All increments of a `LocalStream`, as the server sees them."""

    def __post_init__(self) -> None:
        self._begin()
        self.aggregation = LocalStream(**self._settings)
        self.mechanism, self.dim = self, len(self._base)
        self.weights = torch.eye(self.places, dtype=torch.float64)
        rounding = self.noise_multiplier * math.sqrt(self.dim) * 2.0**-21
        std = self.noise_multiplier * record_norm(self) / (1 - rounding)
        self.whitening = torch.eye(self.places, dtype=torch.float64) / std
        self.rounding = 4 * 2.0**-20 * math.sqrt(self.dim * self.places) + 1e-6

    def transcript(self, server: _Recorder, sites: Mapping[str, Site], drawn: Any) -> list[Tensor]:
        rows = []
        for inbox in server.inboxes:
            for name in self.names:
                if name in inbox and inbox[name].values is not None:
                    rows.append(inbox[name].values - self._base)
        return rows

    def paid(self, server: _Recorder, sites: Mapping[str, Site]) -> Ledger:
        found: Ledger = sites[self.names[0]].state.aggregation.ledger
        return found


@dataclass(eq=False)
class PublicRun(_StreamRun):
    """All blocks of a `PublicStream`, each of one outcome of one public action."""

    num_agents: int = 2

    def __post_init__(self) -> None:
        self._begin()
        self.aggregation = PublicStream(
            candidates=_CENTRE, most_per_block=1, batch=1, **self._settings
        )
        self.mechanism, self.dim = self, 1
        self.weights = torch.eye(self.places, dtype=torch.float64)
        rounding = self.noise_multiplier * 2.0**-21
        self.std = self.noise_multiplier * self.outcome_bound / (1 - rounding)
        self.whitening = torch.eye(self.places, dtype=torch.float64) / self.std
        self.rounding = 4 * 2.0**-20 * self.places + 1e-6

    def search(self, given: Given) -> BanditSearch:
        return BanditSearch(noise_var=_NOISE_VAR)

    def statistic(self, x: Tensor) -> Tensor:
        return x[2:].clamp(-self.outcome_bound, self.outcome_bound)

    def study(self, given: Given) -> Federation:
        return replace(super().study(given), candidates=_CENTRE)

    def transcript(self, server: _Recorder, sites: Mapping[str, Site], drawn: Any) -> list[Tensor]:
        a = unit_features(self.basis, _CENTRE)[0]
        unit = record_statistic(a, 1.0, self.moment_scale)[-len(a) :]
        # A block's mean has the weight of its variance beside that of an outcome.
        weight = _NOISE_VAR / (_NOISE_VAR + self.std**2)
        rows, before = [], torch.zeros(len(a), dtype=torch.float64)
        for state in server.states:
            if state.parameters is None:
                continue
            moment = state.parameters.values[-len(a) :]
            rows.append(((moment - before) @ unit / (weight * (unit @ unit))).reshape(1))
            before = moment
        return rows


# ------------------------------------------------------------------ sums that agents noise


@dataclass(eq=False)
class SummedRun(OfVectors, ProtocolRun):
    """Two sums of a `SecureSum`; the server and the last agent put together what they know.

    Its mechanism is given, or made by the aggregation from the settings, as in `DPFTSDE` without a
    trusted server.
    """

    num_agents: int = 4
    dim: int = 16
    clip_norm: float = 2.0
    noise_multiplier: float = 1.0
    adjacency: Any = "zero-out"
    by_settings: bool = False
    space: SearchSpace = SQUARE

    def __post_init__(self) -> None:
        self.names = tuple(f"site{i}" for i in range(self.num_agents))
        self.places, self.times, self.budget = self.num_agents - 1, _ROUNDS, _ROUNDS
        self.event = Event(self.noise_multiplier, discrete=True)
        self.payments, self.pays_each = _ROUNDS, True
        made = DistributedGaussianSum(
            num_agents=self.num_agents,
            dim=self.dim,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            colluding=1,
            adjacency=self.adjacency,
        )
        self.mechanism = made
        self.aggregation = SecureSum(
            channel="plain", mechanism=lambda size, count: made, noise_at="agent", sums=_ROUNDS
        )
        if self.by_settings:
            self.aggregation = SecureSum(
                channel="plain",
                noise_multiplier=self.noise_multiplier,
                colluding=1,
                clip_norm=self.clip_norm,
                adjacency=self.adjacency,
                releases=tuple(range(_ROUNDS)),
            )
        self.lattice = made.grid.step
        each = torch.ones(1, self.places, dtype=torch.float64)
        self.weights = torch.kron(each, torch.eye(_ROUNDS, dtype=torch.float64))
        half = self.lattice * math.sqrt(self.dim) / 2
        std = self.noise_multiplier * (self.clip_norm + half)
        self.whitening = torch.eye(_ROUNDS, dtype=torch.float64) / std
        self.rounding = (2 * half / std + 1e-6) * self.num_agents * _ROUNDS

    @property
    def unit(self) -> Any:
        return "agent"

    def search(self, given: Given) -> Scripted:
        script = {(self.names[n], t): x for (n, t), x in given.items()}
        return Scripted(numbers=self.dim, script=script)

    def outcome(self, given: Given, name: str, t: int) -> float:
        return 0.0

    def transcript(self, server: _Recorder, sites: Mapping[str, Site], drawn: Any) -> list[Tensor]:
        curious, rows = self.names[-1], {}
        own = {memory[curious].drawn_t: memory[curious].drawn for memory in drawn}
        for state in server.states:
            if isinstance(state.last, Opened) and state.last.t in own:
                mine = own[state.last.t].double() * self.mechanism.grid.step
                rows[state.last.t] = state.last.total - mine
        return [row for _, row in sorted(rows.items())]

    def paid(self, server: _Recorder, sites: Mapping[str, Site]) -> Ledger:
        memory: SumMemory = sites[self.names[0]].state.aggregation
        return self.ledger() if memory.ledger is None else memory.ledger

    def roster_checks(self, seed: int) -> list[Check]:
        """Whether a site that is asked again, without one agent, draws anew and pays again."""
        study, (name, *_), noise = self.study({}), self.names, InsecureSeededNoise(seed)
        hub = FederatedServer(terms=study.terms(self.space, self.names)).hub
        smaller = self.names[:-1]
        made = replace(self.mechanism, dropping=1, grid=None)
        aggregation = SecureSum(
            channel="plain", mechanism=lambda size, count: made, noise_at="agent", sums=_ROUNDS
        )
        terms = replace(hub.terms, aggregation=aggregation, promise=None)
        resources = Resources(noise=noise, ledger=self.ledger())
        site = Party(terms, name, resources)
        site = replace(site, memory=aggregation.begin(site))
        draws, charged = [], 0
        for epoch, roster in enumerate((self.names, smaller)):
            order = SumOrder(0, "nothing", True, "sum", epoch, roster)
            memory, reply = aggregation.contribute(site, order, lambda: None)
            assert isinstance(reply, Upload)
            draws.append(memory.drawn)
            site = replace(site, memory=memory)
            charged = 0 if memory.ledger is None else memory.ledger.releases
        same = int((draws[0] == draws[1]).sum())
        return [
            Check("numbers that are drawn once for two rosters", same, "<=", 1),
            Check("payments of two draws for one round", charged, ">=", 2),
        ]


SUBJECTS: dict[str, Any] = {
    "noisy sum": NoisyRun,
    "noisy sum, sampled": lambda: NoisyRun(rate=0.5),
    "noisy sum, regions": lambda: NoisyRun(num_regions=2, dim=6),
    "noisy sum, two outcomes": lambda: NoisyRun(space=BOUNDED),
    "joint": JointRun,
    "joint, tree": lambda: JointRun(factorization="tree"),
    "public actions": PublicRun,
    "local": LocalRun,
    "summed": SummedRun,
    "summed, by settings": lambda: SummedRun(by_settings=True),
    "summed, two outcomes": lambda: SummedRun(by_settings=True, space=BOUNDED),
    "summed, replace-one": lambda: SummedRun(adjacency="replace-one", noise_multiplier=2.0),
}
