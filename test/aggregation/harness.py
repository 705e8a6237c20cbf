"""A federation that adds messages, with everything that is sent and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.aggregation.sum_messages import (
    DecryptionShare,
    KeyMessage,
    Opened,
    Reply,
    SumMemory,
    SumOrder,
    SumSetup,
    SumState,
    Upload,
)
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.federation import base
from botorch_fed.federation.base import Objective, Outbox, Outgoing, Request
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import Setup
from botorch_fed.privacy import Ledger
from botorch_fed.privacy.aggregation import PrivateSum
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise
from botorch_fed.run import RunResult, run
from botorch_fed.search.region import RegionSearch
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs, MemoryStore
from botorch_fed.studies import FedGP
from botorch_fed.wire.codec import decode, encode
from test.cases import in_rounds
from test.hubs import SavedLog

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
REGION = RegionSearch(num_inducing=4, num_candidates=1, wait=1, num_raw=32)
REPLIES = (KeyMessage, DecryptionShare, Upload)


class Hill:
    def __init__(self, centre: float) -> None:
        self.centre = centre

    def __call__(self, X: Tensor) -> Tensor:
        return 1 - 6 * (X - self.centre).square().sum(dim=-1, keepdim=True)


HILLS: dict[str, Objective] = {name: Hill(0.3 + 0.02 * i) for i, name in enumerate(NAMES)}
EVERYBODY = {**HILLS, "dee": Hill(0.4)}


def study(search: Any = REGION, *, rounds: int = 3, **options: Any) -> FedGP:
    """A study of so many rounds after the first points."""
    settings = {"channel": "plain", "num_initial": 3, "noise": InsecureSeededNoise(7), **options}
    made: FedGP = in_rounds(FedGP, {"search": search, "rounds": rounds, **settings}, NAMES)
    return made


def trace(result: RunResult) -> str:
    keys = ("agent", "query", "x", "y")
    return json.dumps([[row[key] for key in keys] for row in result.records])


def ran(protocol: FedGP, **options: Any) -> RunResult:
    return run(protocol, HILLS, space=SQUARE, seed=1, progress=False, **options)


def named(order: SumOrder) -> str:
    """What an order asks for, in a word."""
    if order.step == "sum":
        return {"next": "query", "first": "start", "nothing": "resend"}[order.evaluate]
    return f"key{order.phase}" if order.step == "key" else order.step


@dataclass
class Between:
    """A server that is looked at, and that may lie."""

    honest: Any
    lie: Callable[[SumState, Outbox], Outbox] = lambda state, outbox: outbox
    outboxes: list[Outbox] = field(default_factory=list)
    states: list[SumState] = field(default_factory=list)
    inboxes: list[dict[str, Any]] = field(default_factory=list)
    watch: Callable[[SumState, Mapping[str, Any]], None] = lambda state, inbox: None
    state_type: Any = SumState
    accepts: Any = REPLIES

    @property
    def fingerprint(self) -> str:
        return str(self.honest.fingerprint)

    def start(self) -> SumState:
        state: SumState = self.honest.start()
        return state

    def outbox(self, state: SumState) -> Outbox | None:
        honest = self.honest.outbox(state)
        return None if honest is None else self.lie(state, honest)

    def check(self, state: SumState, sender: str, message: Any) -> None:
        self.honest.check(state, sender, message)

    def step(self, state: SumState, inbox: Mapping[str, Any]) -> SumState:
        self.watch(state, inbox)
        self.states.append(state)
        self.inboxes.append(dict(inbox))
        after: SumState = self.honest.step(state, inbox)
        return after

    @property
    def private_sum(self) -> PrivateSum:
        """What bounds, noises and carries contributions."""
        found = self.aggregation.private_sum(self.honest.hub)
        assert found is not None
        return found

    @property
    def aggregation(self) -> SecureSum:
        aggregation: SecureSum = self.honest.terms.aggregation
        return aggregation


class Federation:
    """A study with everything that is sent and kept."""

    def __init__(
        self,
        protocol: FedGP,
        *,
        names: tuple[str, ...] = NAMES,
        absent: Callable[[str, SumOrder], bool] | None = None,
        tamper: Callable[[str, SumOrder, Any], Any] | None = None,
        ledgers: Mapping[str, Ledger] | None = None,
    ) -> None:
        self.stores = {name: MemoryStore() for name in names}
        self.protocol = replace(protocol, secrets=self.stores.__getitem__)
        self.server = Between(self.protocol.server(SQUARE, names))
        self.absent, self.tamper = absent, tamper
        blobs = MemoryBlobs()
        agents = {name: self.protocol.agent(name, SQUARE, i, blobs) for i, name in enumerate(names)}
        for name, ledger in (ledgers or {}).items():
            resources = replace(agents[name].resources, ledger=ledger)
            agents[name] = replace(agents[name], resources=resources)
        self.sites = {name: Site(name, agents[name], EVERYBODY[name]) for name in names}
        self.engine = InProcess(self.sites.values())
        self.rounds: list[Round] = []
        self.orders: list[dict[str, SumOrder]] = []
        self.traffic: list[bytes] = []
        self.agent_states: list[Any] = []
        self.log = SavedLog()

    def exchange(self, outgoing: Outgoing) -> Any:
        orders = {
            name: decode(decode(data, Request).body, SumOrder)
            for name, data in outgoing.requests.items()
        }
        self.orders.append(orders)
        self.traffic += [*outgoing.requests.values(), *outgoing.blobs.values()]
        asked = outgoing.requests
        if self.absent is not None:
            gone = {name for name, order in orders.items() if self.absent(name, order)}
            asked = {name: data for name, data in asked.items() if name not in gone}
        exchanged = self.engine(replace(outgoing, requests=asked))
        self.traffic += exchanged.replies.values()
        self.agent_states += [site.state for site in self.sites.values()]
        if self.tamper is None:
            return exchanged
        replies = dict(exchanged.replies)
        for name, data in replies.items():
            reply = decode(data, base.Reply)
            said: Reply = decode(reply.body, *REPLIES)
            told = self.tamper(name, orders[name], said)
            replies[name] = encode(
                replace(reply, body=told if isinstance(told, bytes) else encode(told))
            )
        return replace(exchanged, replies=replies)

    def drive(self, **options: Any) -> SumState:
        self.end: SumState = drive(
            self.server,
            self.exchange,
            log=self.log,
            on_round=self.rounds.append,
            **options,
        )
        return self.end

    def codes(self, name: str) -> set[str]:
        found = [round_.exchanged.failures.get(name) for round_ in self.rounds]
        return {failure.code for failure in found if failure is not None}

    def counts(self) -> dict[str, int]:
        """How many points every agent has evaluated."""
        return {name: len(site.state.X) for name, site in self.sites.items()}

    def epochs(self) -> set[tuple[int, tuple[str, ...]]]:
        return {(state.epoch, state.roster) for state in self.server.states}

    def memory(self, name: str) -> SumMemory:
        memory: SumMemory = self.sites[name].state.aggregation
        return memory

    def draws(self) -> dict[str, int]:
        """How many contributions every agent has made."""
        return {name: self.memory(name).draws for name in self.sites}

    def releases(self, name: str) -> int:
        """How many a site has paid for."""
        ledger = self.memory(name).ledger
        return 0 if ledger is None else ledger.releases


def finished(protocol: FedGP, **options: Any) -> Federation:
    federation = Federation(protocol, **options)
    federation.drive()
    return federation


# ------------------------------------------------------------------ lies of a hub


def setups(outbox: Outbox, change: Callable[[Setup], Setup]) -> Outbox:
    first, *others = outbox.broadcasts
    return replace(outbox, broadcasts=(change(first), *others))


def words(outbox: Outbox, **changes: str) -> Outbox:
    """Other public settings; a double underscore stands for a dot."""
    other = {name.replace("__", "."): value for name, value in changes.items()}
    return setups(outbox, lambda setup: replace(setup, words={**setup.words, **other}))


def orders(outbox: Outbox, **changes: Any) -> Outbox:
    return replace(
        outbox,
        messages={name: replace(order, **changes) for name, order in outbox.messages.items()},
    )


def sums(outbox: Outbox, change: Callable[[Opened], Any]) -> Outbox:
    found = [change(one) if isinstance(one, Opened) else one for one in outbox.broadcasts]
    return replace(outbox, broadcasts=tuple(found))


def channels(outbox: Outbox, **changes: Any) -> Outbox:
    found = [
        replace(one, **changes) if isinstance(one, SumSetup) else one for one in outbox.broadcasts
    ]
    return replace(outbox, broadcasts=tuple(found))
