"""A federation of DP-FTS-DE for tests: every byte can be looked at, and it can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers.published.own_gp import PaperFollowing
from botorch_fed.acquisition import Constant, Polynomial, SoftmaxSchedule
from botorch_fed.aggregation.noisy import NoisyState, NoisySum
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import MessageError
from botorch_fed.federation.agent import AgentState, FederatedAgent
from botorch_fed.federation.base import Exchanged, Objective, Outgoing, Reply, Request
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import Contribution, Order, Resources, Search, Setup, Terms
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.models import KLFeatures
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise
from botorch_fed.search.noisy import NoisyTransfer
from botorch_fed.search.released import Following, ReleaseMessage, ReleaseSearch
from botorch_fed.search.releases import Noisy
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.log import Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE
from botorch_fed.wire.codec import decode, encode
from test.cases import normal, quadrature, uniform
from test.hubs import SavedLog

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
MIXED_SPACE = SearchSpace(
    (
        Parameter.integer("depth", 1, 4),
        Parameter.choice("kernel", ["rbf", "poly", "linear"]),
        Parameter.real("C", 1e-3, 1e3, scale="log"),
    )
)
PHI = KLFeatures.from_map(quadrature(), uniform(300, 2), num_features=8)
M = PHI.num_features

# Small budgets: what is tested is the protocol, not the optimiser.
SMALL = Following(num_raw=64, num_restarts=4, num_features=32, follow=1, schedule=Constant(0.5))
FOLLOW = replace(SMALL, follow=100)
ALONE = replace(SMALL, follow=0, schedule=Constant(1.0))
RANDOM = replace(SMALL, own="random")
PAPER = PaperFollowing(
    num_raw=64, num_restarts=4, num_features=32, schedule=Polynomial(1.0), follow=0, spread=0.0,
    warp=False, min_distance=0.0,
)  # fmt: skip
TRANSFER = TransferSearch()
Strategy = TransferSearch | Following


def hill(X: Tensor, centre: float = 0.3) -> Tensor:
    return 1 - 6 * (X - centre).square().sum(dim=-1, keepdim=True)


def history(n: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    X = uniform(n, 2, seed=seed)
    return X, hill(X) + 0.05 * normal(n, 1, seed=seed)


FAILED = torch.full((1, 1), torch.nan, dtype=torch.float64)


def quiet(weights: Tensor, made: int = 0, num_agents: float = 3) -> Noisy:
    """A release without noise."""
    return Noisy(made, weights, torch.zeros(len(weights), dtype=torch.float64), num_agents)


class Silence:
    """No noise: what remains is the clean part on the lattice."""

    private = False

    def uniform(self, *shape: int, path: tuple[int | str, ...]) -> Tensor:
        return torch.full(shape, 0.5, dtype=torch.float64)


# ------------------------------------------------------------------ a federation


class Stopped(BaseException):
    """Somebody pulled the plug."""


@dataclass
class Federation:
    """A study whose every byte can be looked at, and that can be stopped and gone on with."""

    study: DPFTSDE
    space: SearchSpace = SQUARE
    objectives: Mapping[str, Objective] = field(default_factory=lambda: dict.fromkeys(NAMES, hill))
    absent: Callable[[str, int], bool] | None = None

    def __post_init__(self) -> None:
        self.logs = {name: Log(SITE_EVENTS) for name in self.objectives}
        self.rounds: list[Round] = []
        self.traffic: list[bytes] = []
        self.requests: list[list[Order]] = []
        self.heard: list[list[Noisy]] = []
        self.log = SavedLog()
        self.states: list[AgentState] = []
        self.tamper: Callable[[str, Contribution], Contribution] = lambda name, message: message
        self.watch: Callable[[], None] = lambda: None
        self.open()

    def open(self) -> None:
        """New processes, with what is on disk."""
        self.server = self.study.server(self.space, tuple(self.objectives))
        self.sites = {}
        for i, (name, objective) in enumerate(self.objectives.items()):
            agent = self.study.agent(name, self.space, i, MemoryBlobs())
            self.sites[name] = Site(name, agent, objective, log=self.logs[name])

    @property
    def plan(self) -> Any:
        """What the server releases."""
        return plan_of(self.server)

    def exchange(self, outgoing: Outgoing) -> Exchanged:
        self.traffic += [*outgoing.requests.values(), *outgoing.blobs.values()]
        bodies = [decode(data, Request).body for data in outgoing.requests.values()]
        self.requests.append([decode(body, Order) for body in bodies])
        broadcasts = [decode(data, Setup, Noisy) for data in outgoing.blobs.values()]
        self.heard.append([blob for blob in broadcasts if isinstance(blob, Noisy)])
        self.watch()
        exchanged = self.engine(outgoing)
        replies = {}
        for name, data in exchanged.replies.items():
            try:
                reply = decode(data, Reply)
            except MessageError:
                replies[name] = data
                continue
            message = self.tamper(name, decode(reply.body, Contribution))
            replies[name] = encode(replace(reply, body=encode(message)))
        return replace(exchanged, replies=replies)

    def drive(
        self,
        *,
        resume: bool = False,
        saving: Callable[[], None] = lambda: None,
        saved: Callable[[], None] = lambda: None,
    ) -> NoisyState:
        self.engine = InProcess(self.sites.values(), absent=self.absent)

        def after() -> None:
            self.states += [site.state for site in self.sites.values()]
            saved()

        self.log = self.log if resume else SavedLog()
        self.log.before, self.log.after = saving, after
        self.end: NoisyState = drive(
            self.server, self.exchange, log=self.log, on_round=self.rounds.append
        )
        return self.end

    def result(self) -> list[bytes]:
        """Everything that a run leaves behind."""
        return [encode(self.end), *(encode(site.state) for site in self.sites.values())]

    def report(self) -> dict[str, Any]:
        found = self.server.privacy(self.end)
        assert found is not None
        return found

    def failures(self, name: str) -> list[str]:
        found = [round_.exchanged.failures.get(name) for round_ in self.rounds]
        return ["" if failure is None else failure.code for failure in found]

    def uploaded(self) -> list[bool]:
        """Of every round, whether messages were asked for; all agents are asked the same."""
        assert all(len(set(orders)) == 1 for orders in self.requests)
        return [orders[0].contribute for orders in self.requests]


def plan_of(server: FederatedServer) -> Any:
    """What a server releases."""
    aggregation = server.terms.aggregation
    assert isinstance(aggregation, NoisySum)
    return aggregation.plan(server.hub.terms)


def study(strategy: Strategy = SMALL, **options: Any) -> DPFTSDE:
    """A study of so many `rounds` after its first points."""
    common: dict[str, Any] = {
        "rounds": 3,
        "noise_multiplier": 1.0,
        "releases": (0, 2),
        "num_initial": 3,
        "feature_map": PHI,
        "noise": InsecureSeededNoise(7),
        "strategy": strategy,
    }
    given = {**common, **options}
    rounds = given.pop("rounds")
    probe = DPFTSDE(budget=1000, **given)
    return DPFTSDE(budget=rounds + probe.initial_for(NAMES), **given)


def finished(strategy: Strategy = SMALL, **options: Any) -> Federation:
    result = Federation(study(strategy, **options))
    result.drive()
    return result


# ------------------------------------------------------------------ its parts


def terms(P: int = 1, names: tuple[str, ...] = NAMES, **options: Any) -> Terms:
    """Terms of four rounds, with a release after each."""
    given = dict(options)
    search: Search | None = given.pop("search", None)
    rules = {
        "releases": (0, 1, 2, 3),
        "exploration": SoftmaxSchedule(3.0, plateau=0, decay=3),
        "noise_multiplier": 1.0,
        "rounds": 4,
    }
    own = {
        name: given.pop(name) for name in ("space", "basis", "num_initial", "q", "active")
        if name in given
    }  # fmt: skip
    if given.get("noise_multiplier", 1.0) is None and "epsilon" not in given:
        given["noise_kind"] = "none"
    if search is None:
        search = ReleaseSearch(messages=ReleaseMessage("mean", 1.0), num_regions=P, strategy=FOLLOW)
    return Terms(
        **{"space": SQUARE, "basis": PHI, "num_initial": 3, **own},
        budget=7,
        agents=names,
        search=search,
        aggregation=NoisySum(**{**rules, **given}),
    )


def server(P: int = 1, names: tuple[str, ...] = NAMES, **options: Any) -> FederatedServer:
    """A server of these terms, with resources as given."""
    given = dict(options)
    held = {name: given.pop(name) for name in ("ledger", "shared_ledger") if name in given}
    noise = given.pop("noise", Silence())
    return FederatedServer(terms=terms(P, names, **given), resources=Resources(noise=noise, **held))


def own_means(**options: Any) -> NoisyTransfer:
    """The default search."""
    return NoisyTransfer(**options)


def sent(boss: FederatedServer, state: NoisyState, inbox: Mapping[str, Contribution]) -> NoisyState:
    """The server's state after a round."""
    found: NoisyState = boss.step(state, inbox)
    return found


def put(agent: FederatedAgent, *blobs: Any) -> tuple[str, ...]:
    """The hashes of broadcasts, which the agent has from here on."""
    return tuple(agent.blobs.put(encode(blob)) for blob in blobs)
