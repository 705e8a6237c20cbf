"""An engine that loses, delays, repeats and damages what it carries, between processes that die.

A `World` is a federation whose server and sites are processes: all that they know between two
messages lies in files. A process that is killed is opened again from these, and from nothing else.
Its durable steps are counted, and it can be killed before, in the middle of or after any of them.
What leaves a process is compared with the ledger that it has on disk at that moment.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from botorch_fed.aggregation.sum_messages import DecryptionShare, KeyMessage, Upload
from botorch_fed.errors import FederatedError, MessageError
from botorch_fed.federation.base import (
    Exchanged,
    Failure,
    KeepsSecrets,
    Outgoing,
    Reply,
    Request,
    with_stores,
)
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.hub import HUB_EVENTS
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import Contribution
from botorch_fed.federation.trial import SITE_EVENTS, Failed, Observed
from botorch_fed.privacy import SharedLedger
from botorch_fed.privacy.shared_ledger import LEDGER_EVENTS
from botorch_fed.rng import Generator, generator
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.snapshots import Snapshots
from botorch_fed.storage.store import Blobs, FileStore
from botorch_fed.wire.codec import content_hash, decode
from test.faults.cases import NAMES, SQUARE, Case

SERVER = "server"
PROCESSES = (SERVER, *NAMES)
MODES = ("before", "torn", "after")
MOST = 2**30  # bytes of what is read from one's own disk
TRIES = 12  # of a run that is stopped and resumed
WAIT = 2  # further rounds until somebody answers a trial
Mode = Literal["before", "torn", "after"]
Fault = Literal[
    "drop request",
    "drop reply",
    "drop broadcast",
    "delay request",
    "delay reply",
    "duplicate",
    "swap replies",
    "truncate request",
    "truncate reply",
    "flip request",
    "flip reply",
    "flip broadcast",
]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]


class Killed(BaseException):
    """Not an `Exception`: nothing in between may catch it."""


# ------------------------------------------------------------------ processes that die


class Fuse:
    """The durable steps of one process, from 1; it dies at the fatal one.

    A step that cannot be torn in two is not done at all.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.fatal: tuple[int, Mode] | None = None

    def __call__(self, step: Callable[[], Any], tear: Callable[[], Any] = lambda: None) -> Any:
        self.steps += 1
        mode = None
        if self.fatal is not None and self.fatal[0] == self.steps:
            mode, self.fatal = self.fatal[1], None
        if mode == "before":
            raise Killed
        if mode == "torn":
            tear()
            raise Killed
        result = step()
        if mode == "after":
            raise Killed
        return result


class DyingStore(FileStore):
    """Files; torn, a draft stays behind."""

    def __init__(self, folder: Path, fuse: Fuse) -> None:
        super().__init__(folder)
        self.fuse = fuse

    def put(self, name: str, data: bytes) -> None:
        self.fuse(lambda: FileStore.put(self, name, data), lambda: self._tear(data))

    def put_new(self, name: str, data: bytes) -> None:
        self.fuse(lambda: FileStore.put_new(self, name, data), lambda: self._tear(data))

    def delete(self, name: str) -> None:
        self.fuse(lambda: FileStore.delete(self, name))

    def _tear(self, data: bytes) -> None:
        (self.folder / ".draft-torn").write_bytes(data[: len(data) // 2])


class DyingLog(FileLog):
    """A log; torn, half of a record is at its end. Says what it has on disk."""

    torn = False
    fuse: Fuse | None = None

    def __init__(
        self,
        folder: Path,
        kinds: tuple[type, ...],
        fuse: Fuse,
        known: Callable[[Any], None] = lambda event: None,
        shared: bool = False,
    ) -> None:
        super().__init__(folder, kinds, shared=shared)
        self._snapshots = Snapshots(DyingStore(self.folder / "snapshots", fuse))
        self.fuse, self.known = fuse, known

    def _write(self, data: bytes) -> None:
        super()._write(data[: len(data) // 2] if self.torn else data)

    def _save(self, event: Any, head: bytes, data: bytes) -> None:
        if self.fuse is None:  # while it is opened
            return super()._save(event, head, data)

        def save() -> None:
            FileLog._save(self, event, head, data)
            self.known(event)

        def tear() -> None:
            self.torn = True
            FileLog._save(self, event, head, data)

        return self.fuse(save, tear)


def dying_books(folder: Path, fuse: Fuse, **settings: Any) -> SharedLedger:
    """A ledger; torn, half of a record is at its end."""
    books = SharedLedger(folder, **settings)
    books._log.close()
    books._log = DyingLog(folder, LEDGER_EVENTS, fuse, shared=True)
    return books


# ------------------------------------------------------------------ what happened


@dataclass
class Outcome:
    """What became of a run, and what must not have happened in it.

    Attributes:
        completed: Whether it came to its end.
        stops: Errors of the package that ended it, after which it was resumed.
        crashes: Other errors: there must be none.
        kills: How many processes were killed.
        undercounts: Departures at which a ledger on disk held less than what had left.
        second_draws: Rounds for which a process has sent two different messages.
        lost: Observations that reached a disk, and are not there or not in the agent's data.
        doubled: Observations that are counted twice, and evaluations that were repeated although
            their outcome was known.
        result: What was observed, by agent, and how many payments the server's ledger has.
    """

    completed: bool = False
    stops: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    kills: int = 0
    undercounts: int = 0
    second_draws: int = 0
    lost: int = 0
    doubled: int = 0
    result: tuple[Any, ...] = ()

    @property
    def good(self) -> bool:
        """Whether nothing happened that must not."""
        bad = (self.undercounts, self.second_draws, self.lost, self.doubled, len(self.crashes))
        return self.completed and not any(bad)


class World:
    """A federation of processes on disk.

    Args:
        case: What runs.
        folder: Where their files are.
        plan: What goes wrong on the way: a function of agent and round.
        patient: Whether the engine asks a site again that was killed, or goes on without it.
        seed: Of what is damaged and how.
        dies: Sets the fuse of a process that is opened for the first time, and again.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        *,
        plan: Callable[[str, int], Fault | None] = lambda agent, serial: None,
        patient: bool = True,
        seed: int = 0,
        dies: Callable[[str, Fuse], None] = lambda name, fuse: None,
    ) -> None:
        self.case, self.folder, self.plan, self.patient = case, folder, plan, patient
        self.fuses = {name: Fuse() for name in PROCESSES}
        self.dies = dies
        for name, fuse in self.fuses.items():
            dies(name, fuse)
        self.outcome = Outcome()
        self.stream = generator(seed, "faults")
        self.sites: dict[str, Site] = {}
        self.server: Any = None
        self.late, self.grows = case.late, case.grows
        self.shared_ledger: SharedLedger | None = None
        self.log: DyingLog | None = None
        self.late_requests: dict[str, list[tuple[bytes, Outgoing]]] = defaultdict(list)
        self.late_replies: dict[str, bytes] = {}
        # By agent: points whose outcome the process has seen, what its disk has, what may repeat.
        self.evaluated: Counter[str] = Counter()
        self.known: dict[str, dict[int, float]] = {name: {} for name in NAMES}
        self.in_flight: dict[str, bool] = {}
        self.excused: Counter[str] = Counter()
        # By agent and trial, at a laboratory: the point, the round in which it is told, the value.
        self.orders: dict[str, dict[int, tuple[Any, float]]] = {name: {} for name in NAMES}
        self.notebook: dict[str, dict[int, float | None]] = {name: {} for name in NAMES}
        # By process and round: what has left it.
        self.sent: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        self.releases: dict[str, set[str]] = defaultdict(set)

    # -------------------------------------------------------------- processes

    def home(self, name: str) -> Path:
        """The folder of a process."""
        place = self.folder / name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place

    def _study(self, process: str, **options: Any) -> Any:
        """The study as a process is started with it: it reaches its own stores only."""

        def store(name: str | None) -> DyingStore:
            assert (SERVER if name is None else name) == process
            return DyingStore(self.home(process) / "secrets", self.fuses[process])

        study: Any = self.case.study
        more = 0 if self.grows else self.case.grows
        return with_stores(replace(study, budget=study.budget + more, **options), NAMES, store)

    def _provision(self) -> None:
        """What is handed over before a run, by somebody whom all trust."""
        study = with_stores(
            self.case.study, NAMES, lambda name: FileStore(self.home(name or SERVER) / "secrets")
        )
        if isinstance(study, KeepsSecrets):
            study.provision(SQUARE)

    def open_server(self) -> tuple[Any, DyingLog]:
        """The server's process."""
        home, fuse = self.home(SERVER), self.fuses[SERVER]
        options: dict[str, Any] = {}
        if self.case.shared_ledger:
            study: Any = self.case.study
            adjacency, unit = study.adjacency, getattr(study, "unit", "agent")
            books = dying_books(home / "books", fuse, adjacency=adjacency, unit=unit)
            self.shared_ledger = options["shared_ledger"] = books
        names = tuple(name for name in NAMES if name not in self.late)
        server = self._study(SERVER, **options).server(SQUARE, names)
        self.log = DyingLog(home / "log", HUB_EVENTS, fuse)
        return server, self.log

    def close_server(self) -> None:
        """End the server's process."""
        if self.log is not None:
            self.log.close()
        if self.shared_ledger is not None:
            self.shared_ledger.close()
            self.shared_ledger = None

    def site(self, name: str) -> Site:
        """A site's process, opened if there is none."""
        if name in self.sites:
            return self.sites[name]
        home, fuse = self.home(name), self.fuses[name]
        blobs = Blobs(DyingStore(home / "blobs", fuse))
        agent = self._study(name).agent(name, SQUARE, NAMES.index(name), blobs)
        log = DyingLog(home / "log", SITE_EVENTS, fuse, lambda event: self._known(name, event))
        objective = None if self.case.by_hand else lambda X: self._evaluate(name, X)
        self.sites[name] = Site(name, agent, objective, log=log)
        return self.sites[name]

    def _evaluate(self, name: str, X: Tensor) -> Tensor:
        def evaluate() -> Tensor | Exception:
            self.evaluated[name] += len(X)
            self.in_flight[name] = True
            try:
                return self.case.objective(X)
            except ValueError as error:  # raised where the process still lives
                return error

        answer = self.fuses[name](evaluate)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _by_hand(self, name: str, serial: float) -> None:
        """A laboratory takes a trial if it has none, and answers those that it has had long enough.

        What it has measured is in its notebook: if the site dies, it is told again.
        """
        site, orders, notebook = self.site(name), self.orders[name], self.notebook[name]
        if not site.pending() and site.serial:
            for trial in site.ask():
                orders[trial.id] = trial.parameters, serial + WAIT
        for trial in site.pending():
            parameters, due = orders.setdefault(trial.id, (trial.parameters, serial + WAIT))
            self.outcome.lost += parameters != trial.parameters
            if serial < due:
                continue
            if trial.id not in notebook:
                self.evaluated[name] += 1
                row = torch.tensor([list(parameters.values())], dtype=torch.float64)
                try:
                    notebook[trial.id] = self.case.objective(row).item()
                except ValueError:
                    notebook[trial.id] = None
            value = notebook[trial.id]
            if value is None:
                site.fail(trial.id, "no value")
            else:
                site.tell(trial.id, value)

    def _known(self, name: str, event: Any) -> None:
        if not isinstance(event, (Observed, Failed)):
            return
        self.in_flight[name] = False
        if isinstance(event, Observed):
            self.known[name].update(zip(event.trials, event.Y.flatten().tolist(), strict=True))

    def _died(self, name: str) -> None:
        """A site's process is gone; so is an outcome that was on no disk yet."""
        self.outcome.kills += 1
        self.dies(name, self.fuses[name])
        self.excused[name] += self.in_flight.get(name, False)
        self.in_flight[name] = False
        site = self.sites.pop(name, None)
        if site is not None:
            site.close()

    # -------------------------------------------------------------- the engine

    def exchange(self, outgoing: Outgoing) -> Exchanged:
        """Carry a round, with the faults of the plan."""
        self._leaves_server(outgoing)
        replies: dict[str, bytes] = {}
        failures: dict[str, Failure] = {}
        swapped = []
        names = list(outgoing.requests)
        for index in self.stream.uniform(len(names)).argsort().tolist():
            name = names[index]
            fault = self.plan(name, outgoing.serial)
            for request, old in self.late_requests.pop(name, []):
                self._deliver(name, request, old)  # whatever it answers comes too late
            late = self.late_replies.pop(name, None)
            answer = self._carried(name, outgoing, fault)
            if late is not None:
                answer = late  # to another request, in the place of the answer to this one
            if answer is None:
                failures[name] = Failure("absent")
                continue
            replies[name] = answer
            if fault == "swap replies":
                swapped.append(name)
        if swapped and len(replies) > 1:
            first, second = swapped[0], next(who for who in replies if who != swapped[0])
            replies[first], replies[second] = replies[second], replies[first]
        self._tidy(outgoing)
        if self.case.by_hand and not outgoing.defer:
            for name in names:
                try:
                    self._by_hand(name, outgoing.serial)
                except Killed:
                    self._died(name)
        return Exchanged(replies, failures)

    def _carried(self, name: str, outgoing: Outgoing, fault: Fault | None) -> bytes | None:
        """A request to its site and its answer back, unless something happens to them."""
        request, blobs = outgoing.requests[name], dict(outgoing.blobs)
        if fault == "drop request":
            return None
        if fault == "delay request":
            self.late_requests[name].append((request, outgoing))
            return None
        if fault == "drop broadcast":
            blobs = {}
        if fault == "flip broadcast":
            blobs = {digest: flipped(data, self.stream) for digest, data in blobs.items()}
        if fault == "truncate request":
            request = truncated(request, self.stream)
        if fault == "flip request":
            request = flipped(request, self.stream)
        sent = replace(outgoing, blobs=blobs)
        answer = self._deliver(name, request, sent)
        if answer is None:
            return None
        if fault == "duplicate":
            again = self._deliver(name, request, sent)
            return answer if again is None else again
        if fault == "drop reply":
            return None
        if fault == "delay reply":
            self.late_replies[name] = answer
            return None
        if fault == "truncate reply":
            return truncated(answer, self.stream)
        if fault == "flip reply":
            return flipped(answer, self.stream)
        return answer

    def _deliver(self, name: str, request: bytes, sent: Outgoing) -> bytes | None:
        """What a site answers; None if it died, and was not asked again."""
        for _ in range(2 if self.patient else 1):
            try:
                site = self.site(name)
                for digest, data in sent.blobs.items():
                    if not site.agent.blobs.has(digest):
                        site.agent.blobs.put(data)
                answer = site.respond(request, defer=sent.defer)
            except Killed:
                self._died(name)
                continue
            self._leaves_site(name, request, answer)
            return answer
        return None

    def _tidy(self, outgoing: Outgoing) -> None:
        for name in NAMES:
            try:
                site = self.site(name)
                site.agent.blobs.keep({*outgoing.blobs, *site.broadcasts})
            except Killed:
                self._died(name)

    # -------------------------------------------------------------- what leaves, and what is paid

    def _leaves_server(self, outgoing: Outgoing) -> None:
        for name, request in outgoing.requests.items():
            frame: Request = decode(request, Request)
            # The same round is asked again with the same bytes, to whomever.
            self._sends(SERVER, frame.instance + name, outgoing.serial, request)
        for kind in self.case.noisy:
            for digest, data in outgoing.blobs.items():
                if is_of(data, kind):
                    self.releases[SERVER].add(digest)
        if not self.case.noisy:
            return
        left = len(self.releases[SERVER])
        if self.case.once:
            left = min(left, 1)
        event = events_in(self.home(SERVER) / "log", HUB_EVENTS)[-1]
        data = snapshot_in(self.home(SERVER) / "log", event.state)
        state = decode(data, self.server.state_type, max_bytes=MOST)
        paid = [state.ledger.releases]
        if self.case.shared_ledger:
            paid.append(len(events_in(self.home(SERVER) / "books", LEDGER_EVENTS)) - 1)
        self.outcome.undercounts += min(paid) < left

    def _leaves_site(self, name: str, request: bytes, answer: bytes) -> None:
        try:
            reply: Reply = decode(answer, Reply)
        except MessageError:  # a refusal
            return
        self._sends(name, reply.request.hex(), 0, answer)
        if not self.case.noisy_replies:
            return
        site = self.sites[name]
        agent = site.agent
        if carries_data(reply.body):
            self.releases[name].add(content_hash(reply.body))
        snapshots = [event.state for event in site.log if hasattr(event, "state")]
        data = snapshot_in(self.home(name) / "log", snapshots[-1])
        state = decode(data, agent.state_type, max_bytes=MOST)
        ledger = getattr(state, "aggregation", state).ledger
        paid = 0 if ledger is None else ledger.releases
        self.outcome.undercounts += paid < len(self.releases[name])

    def _sends(self, process: str, instance: str, serial: int, data: bytes) -> None:
        sent = self.sent[process, instance, serial]
        if sent and content_hash(data) not in sent:
            self.outcome.second_draws += 1
        sent.add(content_hash(data))

    # -------------------------------------------------------------- a run

    def run(self) -> Outcome:
        """To its end, resumed whenever it stops.

        A process that is killed leaves its pages to the system: nothing is forced to the disk.
        """
        with mock.patch("os.fsync"):
            return self._run()

    def _run(self) -> Outcome:
        self._provision()
        for _ in range(TRIES):
            try:
                self.server, log = self.open_server()
                end = drive(
                    self.server,
                    self.exchange,
                    log=log,
                    on_round=self.heard,
                )
            except Killed:
                self.outcome.kills += 1
                self.dies(SERVER, self.fuses[SERVER])
            except FederatedError as error:
                self.outcome.stops.append(f"{type(error).__name__}: {error}")
            except Exception as error:
                self.outcome.crashes.append(f"{type(error).__name__}: {error}")
                break
            else:
                self.outcome.completed = not self.late and not self.grows
                if self.outcome.completed:
                    break
            finally:
                self.close_server()
                self._changes()
        if self.outcome.completed and self.case.by_hand:
            self._spend_the_rest()
        for fuse in self.fuses.values():
            fuse.fatal = None
        if self.outcome.completed:
            self._settle(end)
        for site in self.sites.values():
            site.close()
        return self.outcome

    def _changes(self) -> None:
        """The study has its last roster and budget; a site knows a budget from its start."""
        if self.grows:
            for name in list(self.sites):
                self.sites.pop(name).close()
        self.late, self.grows = (), 0

    def _spend_the_rest(self) -> None:
        """Laboratories use their budgets up when the hub has ended."""
        for name in NAMES:
            left = True
            while left:
                try:
                    self._by_hand(name, math.inf)
                    left = bool(self.site(name).pending() or self.site(name).left)
                except Killed:
                    self._died(name)

    def heard(self, round_: Round) -> None:
        """Called after every round."""

    def _settle(self, end: Any) -> None:
        """Compare what was evaluated with what is on disk and in the agents' data."""
        rows: dict[str, list[Any]] = {}
        for name in NAMES:
            if name in self.sites:
                self.sites.pop(name).close()
            site = self.site(name)  # as it is found on disk
            found = {seen.trial: seen for seen in site.observations()}
            rows[name] = [
                (seen.X.numpy().tobytes(), seen.Y.numpy().tobytes()) for seen in found.values()
            ]
            self.outcome.lost += sum(
                trial not in found or found[trial].Y.item() != value
                for trial, value in self.known[name].items()
            )
            repeated = self.evaluated[name] - len(found) - self.excused[name]
            self.outcome.doubled += max(0, repeated)
            failed = [seen.X.numpy().tobytes() for seen in found.values() if not len(seen.Y)]
            self.outcome.doubled += len(failed) - len(set(failed))  # never asked again
            answers = self.notebook[name]
            self.outcome.lost += sum(
                trial not in found or (found[trial].status == "failed") != (answers[trial] is None)
                for trial in answers
            )
            if self.case.keeps_data:
                self._compare(site)
        parameters = getattr(end, "parameters", None)
        if parameters is not None:  # a sum that counts its outcomes
            self.outcome.doubled += max(0, parameters.count - sum(map(len, rows.values())))
        ledger = getattr(end, "ledger", None)
        trace = {name: tuple(found) for name, found in rows.items()}
        self.outcome.result = (trace, 0 if ledger is None else ledger.releases)

    def _compare(self, site: Site) -> None:
        """An agent's data are the observations of its log."""
        theirs = Counter(pairs(site.state.X, site.state.Y))
        ours: Counter[Any] = Counter()
        for seen in site.observations():
            if len(seen.Y):
                ours.update(pairs(seen.X, SQUARE.outcome.to_public(seen.Y)))
        self.outcome.lost += (ours - theirs).total()
        self.outcome.doubled += (theirs - ours).total()


def events_in(folder: Path, kinds: tuple[type, ...]) -> list[Any]:
    """What is in the file of a log, whoever has it open."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "log")
        copy.write_bytes((folder / "log").read_bytes())
        copy.chmod(0o600)
        with FileLog(place, kinds) as log:
            return list(log)


def snapshot_in(folder: Path, digest: str) -> bytes:
    """A snapshot on the disk."""
    data = Snapshots(FileStore(folder / "snapshots")).get(digest)
    assert data is not None
    return data


def is_of(data: bytes, kind: type) -> bool:
    """Whether some bytes are a message of a class."""
    try:
        decode(data, kind)
    except MessageError:
        return False
    return True


def carries_data(body: bytes) -> bool:
    """Whether a reply holds a contribution, and not an empty one."""
    message = decode(body, Contribution, Upload, KeyMessage, DecryptionShare)
    if isinstance(message, Contribution):
        return message.values is not None
    return isinstance(message, Upload) and message.data is not None


def pairs(X: Tensor, Y: Tensor) -> list[tuple[Any, ...]]:
    """Points with outcomes."""
    return [tuple(row) for row in torch.cat([X, Y], dim=1).tolist()]


def truncated(data: bytes, stream: Generator) -> bytes:
    """A beginning of some bytes."""
    return data[: int(float(stream.uniform(1)) * len(data))]


def flipped(data: bytes, stream: Generator) -> bytes:
    """Some bytes with one bit flipped."""
    place = int(float(stream.uniform(1)) * 8 * len(data))
    changed = bytearray(data)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)
