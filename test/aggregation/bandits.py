"""A federation of bandits whose every byte can be looked at, and that can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from botorch_fed.aggregation.stream import StreamState
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import MessageError
from botorch_fed.federation.agent import AgentState, FederatedAgent
from botorch_fed.federation.base import Exchanged, Objective, Outgoing, Reply
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import Contribution, Order, Terms
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.models import KLFeatures
from botorch_fed.privacy import RecordStatistic
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise
from botorch_fed.rng import generator
from botorch_fed.search.bandit import unit_features
from botorch_fed.search.releases import Parameters
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.log import Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import PrivateUCB
from botorch_fed.wire.codec import decode, encode
from test.cases import normal, quadrature, uniform
from test.hubs import SavedLog

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace(
    (Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)), Outcome(0.5, 0.5)
)
PHI = KLFeatures.from_map(quadrature(), uniform(300, 2), num_features=6)
M, SCALE = PHI.num_features, float(PHI.outputscale)
D = M * (M + 3) // 2
ARMS = uniform(9, 2, seed=1)
NOISE_VAR = 0.1
SEEDED = InsecureSeededNoise(0)
TRUSTS = ("joint", "local", "public", "none")
PRIVATE = ("joint", "local", "public")


def hill(X: Tensor) -> Tensor:
    return 1 - 2 * (X - 0.3).square().sum(dim=-1, keepdim=True)


def sets(name: str, t: int, count: int = 7) -> Tensor:
    return generator(0, "sets", name, t).uniform(count, 2)


def many(name: str, t: int) -> Tensor:
    return sets(name, t, 40)


def study(trust: str = "joint", **options: Any) -> PrivateUCB:
    common: dict[str, Any] = {
        "budget": 4,
        "trust": trust,
        "noise_multiplier": None if trust == "none" else 2.0,
        "feature_map": PHI,
        "noise_var": NOISE_VAR,
        "noise": SEEDED,
    }
    if trust == "public":
        common |= {"candidates": ARMS, "most_per_block": 4}
    elif "candidates" not in options:
        common["decision_sets"] = sets
    if "epsilon" in options:
        common["noise_multiplier"] = None
    return PrivateUCB(**{**common, **options})


def server_of(trust: str = "joint", **options: Any) -> FederatedServer:
    return study(trust, **options).server(SQUARE, NAMES)


def stream_of(server: FederatedServer) -> Any:
    """The aggregation, whatever its trust."""
    return server.terms.aggregation


def mechanism_of(server: FederatedServer) -> Any:
    return stream_of(server).mechanism(server.terms)


def terms_of(trust: str = "joint", **options: Any) -> Terms:
    """What a site has agreed to: with the roster and the promise."""
    return server_of(trust, **options).hub.terms


def record(X: Tensor, Y: Tensor) -> Contribution:
    return Contribution(torch.cat([X[0], Y[0]]))


def parameters(seed: int = 0, *, noise_std: float = 0.0, count: int = 30) -> Parameters:
    """A release of random data, with noise if there is any."""
    statistic = RecordStatistic(num_features=M, outcome_bound=2.0)
    X, Y = uniform(count, 2, seed=seed), normal(count, 1, seed=seed)
    values = statistic.statistics(statistic.records(unit_features(PHI, X), Y)).sum(dim=0)
    return Parameters(1, values + noise_std * normal(D, seed=seed + 1), noise_std, count)


# ------------------------------------------------------------------ one agent


@dataclass
class Desk:
    """An agent that is asked without a server.

    Attributes:
        study: The agent's.
        said: The hub's terms; default those of the study.
        options: Of the agent.
    """

    study: PrivateUCB
    seed: int = 0
    said: Terms | None = None
    space: SearchSpace = SQUARE
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = self.study.agent("ann", self.space, self.seed, MemoryBlobs())
        self.agent: FederatedAgent = replace(made, **self.options)
        if self.said is None:
            self.said = self.study.server(self.space, NAMES).hub.terms
        self.setup = self.agent.blobs.put(encode(self.said.setup))
        self.state: AgentState = self.agent.start()

    def broadcasts(self, found: Parameters | None) -> tuple[str, ...]:
        return (self.setup,) if found is None else (self.setup, self.agent.blobs.put(encode(found)))

    def receives(self, found: Parameters | None = None, t: int = 1, order: Any = None) -> None:
        order = Order(t, "next", True) if order is None else order
        self.agent.check(self.state, order, self.broadcasts(found))
        self.state = self.agent.receive(self.state, order, self.broadcasts(found))

    def plays(self, found: Parameters | None = None, t: int = 1, order: Any = None) -> Tensor:
        self.receives(found, t, order)
        point = self.agent.ask(self.state)
        assert isinstance(point, Tensor)
        assert torch.equal(point, self.agent.ask(self.state))  # type: ignore[arg-type]
        return point

    def says(self, X: Tensor, Y: Tensor) -> Tensor | None:
        self.state = self.agent.tell(self.state, X, Y)
        self.state, reply = self.agent.reply(self.state)
        values: Tensor | None = reply.values
        return values


def played(
    made: PrivateUCB, found: Parameters | None, *, t: int = 2, seed: int = 0, **options: Any
) -> Tensor:
    """What an agent of a study plays in a round."""
    return Desk(made, seed, **options).plays(found, t)


# ------------------------------------------------------------------ all of them


class Stopped(BaseException):
    """Somebody pulled the plug."""


@dataclass
class Federation:
    """A study whose every byte can be looked at, and that can be stopped and gone on with."""

    study: PrivateUCB
    names: tuple[str, ...] = NAMES
    objective: Callable[[str], Objective] = lambda name: hill
    absent: Callable[[str, int], bool] | None = None

    def __post_init__(self) -> None:
        self.logs = {name: Log(SITE_EVENTS) for name in self.names}
        self.rounds: list[Round] = []
        self.down: list[list[bytes]] = []
        self.up: list[dict[str, Contribution]] = []
        self.log = SavedLog()
        self.watch: Callable[[], None] = lambda: None
        self.open()

    def open(self) -> None:
        """New processes, with what is on disk."""
        self.server = self.study.server(SQUARE, self.names)
        self.sites = {}
        for i, name in enumerate(self.names):
            agent = self.study.agent(name, SQUARE, i, MemoryBlobs())
            self.sites[name] = Site(name, agent, self.objective(name), log=self.logs[name])

    def exchange(self, outgoing: Outgoing) -> Exchanged:
        self.down.append([*outgoing.requests.values(), *outgoing.blobs.values()])
        exchanged = self.engine(outgoing)
        self.watch()
        found = {}
        for name, data in exchanged.replies.items():
            try:
                found[name] = decode(decode(data, Reply).body, Contribution)
            except MessageError:  # a refusal
                continue
        self.up.append(found)
        return exchanged

    def drive(
        self, *, resume: bool = False, saving: Callable[[], None] = lambda: None
    ) -> StreamState:
        self.engine = InProcess(self.sites.values(), absent=self.absent)
        self.log = self.log if resume else SavedLog()
        self.log.before = saving
        self.end: StreamState = drive(
            self.server, self.exchange, log=self.log, on_round=self.rounds.append
        )
        return self.end

    def played(self) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """By round and agent, what was played and its outcome on the public scale."""
        rounds: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(len(self.rounds))]
        for name, site in self.sites.items():
            for seen in site.observations():
                rounds[seen.serial - 1][name] = seen.X, SQUARE.outcome.to_public(seen.Y)
        return rounds

    def report(self) -> dict[str, Any]:
        said = self.server.privacy(self.end)
        assert said is not None
        return said
