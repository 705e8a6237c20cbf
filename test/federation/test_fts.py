"""Federated Thompson sampling: what crosses, what agents do with it, and that nothing else does."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from benchmarks.papers.published.settings import paper_strategy
from botorch_fed.acquisition import Constant, InverseSquare, Polynomial
from botorch_fed.aggregation.relay import RelayState
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import MessageError
from botorch_fed.federation.agent import MAX_FEATURES, AgentState, FederatedAgent
from botorch_fed.federation.base import (
    Exchanged,
    Objective,
    Outgoing,
    Refusal,
    Reply,
    Request,
)
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.points import spread_design
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import Contribution, Order
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.models import FeatureMap, LogWarp, WeightPosterior, fit_own_gp, summarize
from botorch_fed.rng import generator
from botorch_fed.run import run
from botorch_fed.search.messages import Message, MessageKind
from botorch_fed.search.releases import Rows
from botorch_fed.search.thompson import RESIDUAL_PRIOR, Strategy, prior_model
from botorch_fed.search.transfer import TransferSearch, report_size
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.log import Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FTS
from botorch_fed.wire.codec import decode, encode
from test.cases import MAPS, normal, random_fourier, uniform
from test.hubs import SavedLog

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
PHI = random_fourier()
M = PHI.num_features

# Small budgets: what is tested is the protocol, not the optimiser.
SMALL = Strategy(num_raw=64, num_restarts=4, num_features=64)
# Of a received message whenever there is an unused one: p_t is positive, but never reached.
RECEIVED = replace(SMALL, prior_until=0, schedule=Constant(1e-12))
FLAT = LogWarp(torch.zeros(2).double())  # the scale of the unit cube
COLLECT, QUERY = Order(0, "nothing", True), Order(1, "next", False)
ALONE = replace(SMALL, prior_until=0, schedule=Constant(1.0))
RANDOM = replace(ALONE, own="random")
MIXED = replace(SMALL, prior_until=2, schedule=Constant(0.4))
RGPE = replace(SMALL, transfer="rgpe")
TAF = replace(SMALL, transfer="taf")
PAPER = replace(paper_strategy(), num_raw=64, num_restarts=4)
SEARCH = TransferSearch()  # the default; what it does is tested in test_transfer.py
AnyStrategy = Strategy | TransferSearch


def hill(X: Tensor, centre: float = 0.3) -> Tensor:
    return 1 - 6 * (X - centre).square().sum(dim=-1, keepdim=True)


def valley(X: Tensor) -> Tensor:
    return -hill(X)


def history(n: int, *, seed: int = 0, f: Objective = hill, d: int = 2) -> tuple[Tensor, Tensor]:
    X = uniform(n, d, seed=seed)
    Y = f(X)
    assert isinstance(Y, Tensor)
    return X, Y + 0.05 * normal(n, 1, seed=seed)


# ------------------------------------------------------------------ a federation


@dataclass
class Federation:
    """A study whose every byte can be looked at, and that can be stopped and gone on with."""

    study: FTS
    space: SearchSpace = SQUARE
    objectives: Mapping[str, Objective] = field(default_factory=lambda: dict.fromkeys(NAMES, hill))
    site_spaces: Mapping[str, SearchSpace] = field(default_factory=dict)
    absent: Callable[[str, int], bool] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.logs = {name: Log(SITE_EVENTS) for name in self.objectives}
        self.rounds: list[Round] = []
        self.traffic: list[bytes] = []
        self.log = SavedLog()
        self.states: list[dict[str, AgentState]] = []
        self.tamper: Callable[[str, Any], Any] = lambda name, message: message
        self.open()

    def open(self) -> None:
        """New processes, with what is on disk."""
        self.server = self.study.server(self.space, tuple(self.objectives))
        self.sites = {}
        for i, (name, objective) in enumerate(self.objectives.items()):
            space = self.site_spaces.get(name, self.space)
            agent = self.study.agent(name, space, 100 * self.seed + i, MemoryBlobs())
            self.sites[name] = Site(name, agent, objective, log=self.logs[name])

    def exchange(self, outgoing: Outgoing) -> Exchanged:
        self.traffic += [*outgoing.requests.values(), *outgoing.blobs.values()]
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
        self.traffic += replies.values()
        return replace(exchanged, replies=replies)

    def drive(
        self, *, resume: bool = False, saved: Callable[[], None] = lambda: None
    ) -> RelayState:
        self.engine = InProcess(self.sites.values(), absent=self.absent)

        def after() -> None:
            self.states.append({name: site.state for name, site in self.sites.items()})
            saved()

        self.log = self.log if resume else SavedLog()
        self.log.after = after
        self.end: RelayState = drive(
            self.server, self.exchange, log=self.log, on_round=self.rounds.append
        )
        return self.end

    def end_of_round(self, serial: int) -> Rows:
        """What the server has received by then."""
        state = self.log.states(RelayState)[serial]
        assert isinstance(state.received, Rows)
        return state.received

    def result(self) -> list[bytes]:
        """Everything that a run leaves behind."""
        return [encode(self.end), *(encode(site.state) for site in self.sites.values())]

    def failures(self, name: str) -> list[str]:
        found = [round_.exchanged.failures.get(name) for round_ in self.rounds]
        return ["" if failure is None else failure.code for failure in found]


def study(strategy: AnyStrategy = SMALL, **options: Any) -> FTS:
    given = {"feature_map": PHI, "strategy": strategy, **options}
    budget = given.pop("rounds", 3) * given.get("q", 1)
    return FTS(**{"budget": budget, **given})


def with_data(n: int = 8, f: Objective = hill) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: history(n, seed=i, f=f) for i, name in enumerate(NAMES)}


def finished(strategy: AnyStrategy = SMALL, **options: Any) -> Federation:
    result = Federation(study(strategy, **{"data": with_data(), **options}))
    result.drive()
    return result


# ------------------------------------------------------------------ reproducible

KINDS: list[tuple[AnyStrategy, dict[str, Any]]] = [
    (SEARCH, {}),
    (SEARCH, {"q": 2, "data": {}, "message": "sample"}),
    (MIXED, {}),
    (MIXED, {"message": "sample", "every": 1}),
    (replace(ALONE, warp=True), {}),
    (PAPER, {"message": "sample"}),
    (RGPE, {"message": "summary", "every": 1}),
    (TAF, {"message": "summary_and_incumbent"}),
    (RANDOM, {}),
    (MIXED, {"q": 2, "initial_design": uniform(2, 2, seed=7), "data": {}, "every": 1}),
]
IDS = [
    "search",
    "search-batch",
    "mixed",
    "sample",
    "warp",
    "paper",
    "rgpe",
    "taf",
    "random",
    "batch",
]
settings = pytest.mark.parametrize("which", range(len(KINDS)), ids=IDS)


@cache
def undisturbed(which: int) -> list[bytes]:
    strategy, options = KINDS[which]
    federation = finished(strategy, **options)
    assert federation.failures("ann") == [""] * 4
    return federation.result()


@settings
def test_a_seeded_run_twice_gives_identical_bytes(which: int) -> None:
    first = undisturbed(which)
    torch.manual_seed(1234)  # the global generator has no say
    strategy, options = KINDS[which]
    assert finished(strategy, **options).result() == first


class Stopped(BaseException):
    """Somebody pulled the plug."""


@settings
def test_stop_encode_resume_changes_nothing(which: int) -> None:
    strategy, options = KINDS[which]
    disturbed = Federation(study(strategy, **{"data": with_data(), **options}))

    def stop() -> None:
        raise Stopped

    starts = 0
    while True:  # one round, and then only what was saved
        starts += 1
        try:
            disturbed.drive(resume=starts > 1, saved=stop)
            break
        except Stopped:
            disturbed.open()
    assert starts == 1 + 4 + 1  # before the first, after every round, and once to see the end
    assert disturbed.result() == undisturbed(which)


def test_stop_in_the_middle_of_a_round_changes_nothing() -> None:
    expected = finished(MIXED, every=1).result()
    plugs = iter(range(100))

    def unplugged(X: Tensor) -> Tensor:
        if next(plugs) % 3 == 0:
            raise Stopped
        return hill(X)

    disturbed = Federation(
        study(MIXED, data=with_data(), every=1), objectives=dict.fromkeys(NAMES, unplugged)
    )
    stops = 0
    while True:
        try:
            disturbed.drive(resume=stops > 0)
            break
        except Stopped:
            stops += 1
            disturbed.open()
    assert stops > 3
    assert disturbed.result() == expected


def test_another_seed_is_another_run() -> None:
    runs = [Federation(study(ALONE), seed=seed) for seed in (0, 1)]
    for federation in runs:
        federation.drive()
    points = [federation.sites["ann"].state.X for federation in runs]
    assert not torch.equal(*points)


# ------------------------------------------------------------------ what crosses


def patterns(*tensors: Tensor) -> set[bytes]:
    """How float64 numbers look on the wire: in tensors and as numbers."""
    values = torch.cat([tensor.double().flatten() for tensor in tensors]).tolist()
    private = [value for value in values if value not in (0.0, 1.0)]  # corners are no secret
    return {struct.pack(order, value) for value in private for order in ("<d", ">d")}


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(SEARCH, None), (MIXED, "sample"), (RGPE, "summary"), (PAPER, "sample")],
    ids=["search", "mixed", "rgpe", "paper"],
)
def test_messages_are_the_only_thing_that_crosses(strategy: AnyStrategy, kind: str | None) -> None:
    space = SearchSpace(SQUARE.parameters, Outcome(centre=0.3, scale=0.7))
    federation = Federation(
        study(strategy, data=with_data(), every=1, message=kind),
        space=space,
    )
    federation.drive()
    private = set()
    for states in federation.states:
        for state in states.values():
            private |= patterns(state.X, state.Y, space.outcome.from_public(state.Y))
            memory = state.search
            assert (memory is None) == (strategy is SEARCH)  # which fits anew, and keeps nothing
            if memory is None:
                continue
            own = memory.own
            scalars = torch.tensor([own.outputscale, own.noise_var, own.mean], dtype=torch.float64)
            private |= patterns(own.lengthscale, scalars)
    for site in federation.sites.values():
        seen = site.observations()
        private |= patterns(*(o.Y for o in seen), *(o.X for o in seen))
    assert len(private) > 100
    for data in federation.traffic:
        assert not [pattern for pattern in private if pattern in data]
    # The search for patterns finds what does cross.
    assert federation.end.received is not None
    public = patterns(federation.end.received.weights[0])
    assert any(pattern in data for pattern in public for data in federation.traffic)


def test_a_request_says_nothing_but_what_to_do() -> None:
    federation = finished(MIXED)
    requests = []
    for data in federation.traffic:
        try:
            requests.append(decode(data, Request))
        except MessageError:
            continue
    bodies = {decode(request.body, Order) for request in requests}
    assert bodies == {COLLECT, *(Order(t, "next", False) for t in (1, 2, 3))}


# ------------------------------------------------------------------ kinds of messages


def setup(kind: MessageKind = "mean", **options: Any) -> Message:
    return Message(kind, **options)


def make_message(made_with: Message, phi: FeatureMap, X: Tensor, Y: Tensor, **how: Any) -> Tensor:
    return made_with.make(phi, X, Y, **how)


def message(kind: MessageKind, n: int, *, seed: int = 0, **options: Any) -> Tensor:
    X, Y = history(n)
    return make_message(setup(kind, **options), PHI, X, Y, generator=generator(seed, "message"))


def law(n: int, noise_var: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the weights given the data, as in equations 2 and 3 of the paper."""
    X, Y = history(n)
    Phi = PHI(X)
    scaled = Phi.mT @ Phi + noise_var * torch.eye(M).double()
    mean = torch.linalg.solve(scaled, Phi.mT @ Y).squeeze(-1)
    return mean, noise_var * torch.linalg.inv(scaled)


@pytest.mark.parametrize("n", [1, 10, 100])
def test_a_mean_is_the_posterior_mean(n: int) -> None:
    sent = message("mean", n, noise_var=0.02)
    X, Y = history(n)
    total = summarize(PHI, X, Y, noise_var=0.02)
    torch.testing.assert_close(sent, WeightPosterior.from_total(total).mean)
    torch.testing.assert_close(sent, law(n, 0.02)[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("n", [10, 100])  # in the dual form, and in the primal one
@pytest.mark.parametrize("beta", [1.0, 2.5])
def test_the_law_of_a_sample(n: int, beta: float) -> None:
    mean, covariance = law(n, 0.05)
    (X, Y), made_with = history(n), setup("sample", beta=beta)
    streams = [generator(seed, "message") for seed in range(2000)]
    draws = torch.stack([make_message(made_with, PHI, X, Y, generator=g) for g in streams])
    # Functions at a few points, a sum over all weights each: 5 standard errors, false alarm 1e-4.
    Phi = PHI(uniform(25, 2, seed=11))
    values, expected = draws @ Phi.mT, Phi @ mean
    deviation = beta * (Phi @ covariance * Phi).sum(dim=-1).sqrt()
    error = (values.mean(dim=0) - expected) / deviation
    assert float(error.abs().max()) < 5 / 2000**0.5
    ratio = (values - expected).square().mean(dim=0) / deviation.square()
    assert float((ratio - 1).abs().max()) < 5 * (2 / 2000) ** 0.5
    products = ((values - expected) / deviation)[:, :-1] * ((values - expected) / deviation)[:, 1:]
    cross = beta**2 * (Phi[:-1] @ covariance * Phi[1:]).sum(dim=-1)
    correlation = cross / (deviation[:-1] * deviation[1:])
    spread = (1 + correlation.square()).sqrt() / 2000**0.5
    assert float(((products.mean(dim=0) - correlation) / spread).abs().max()) < 5


@pytest.mark.parametrize("n", [10, 100])
def test_beta_scales_the_deviation_only(n: int) -> None:
    mean = message("mean", n)
    torch.testing.assert_close(message("sample", n, beta=0.0), mean, rtol=1e-8, atol=1e-9)
    once, thrice = message("sample", n, beta=1.0) - mean, message("sample", n, beta=3.0) - mean
    torch.testing.assert_close(thrice, 3 * once, rtol=1e-7, atol=1e-8)


def test_every_agent_and_every_time_has_noise_of_its_own() -> None:
    same = history(5)
    federation = Federation(
        study(ALONE, data=dict.fromkeys(NAMES, same), message="sample", every=1, rounds=2)
    )
    federation.drive()
    first = federation.end_of_round(1)
    again = federation.end_of_round(2)
    deviations = [first.weights[i] - message("mean", 5) for i in range(3)]
    state = federation.states[2]["ann"]
    mean = make_message(setup(), PHI, state.X, state.Y, generator=generator(0))
    deviations.append(again.weights[0] - mean)
    for i, one in enumerate(deviations):
        for other in deviations[:i]:
            cosine = float(one @ other / (one.norm() * other.norm()))
            assert abs(cosine) < 5 / M**0.5  # independent directions


def test_summaries_carry_the_posterior() -> None:
    sent = message("summary", 10)
    assert sent.shape == (M * (M + 3) // 2,)
    with_incumbent = message("summary_and_incumbent", 10)
    assert torch.equal(with_incumbent[:-1], sent)
    assert float(with_incumbent[-1]) == float(history(10)[1].max())


@pytest.mark.parametrize("make_map", MAPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["mean", pytest.param("sample", marks=pytest.mark.nightly)])
def test_any_feature_map_carries_the_messages(
    make_map: Callable[[], FeatureMap], kind: str
) -> None:
    federation = finished(MIXED, feature_map=make_map(), message=kind, every=1, rounds=2)
    received = federation.end.received
    assert received is not None
    assert received.weights.shape == (3, make_map().num_features)
    for name in NAMES:
        assert federation.failures(name) == [""] * 3
        assert len(federation.sites[name].state.X) == 8 + 2


# ------------------------------------------------------------------ when messages are made and sent


def test_all_optimise_at_once_and_send_every_so_often() -> None:
    federation = finished(ALONE, every=2, rounds=5)
    received = federation.end.received
    assert received is not None
    assert federation.end.t == 6
    assert received.made == (4, 4, 4)
    for name in NAMES:
        assert [len(states[name].X) for states in federation.states] == [8, 8, 9, 10, 11, 12, 13]
    uploads = [[body.values is not None for body in replies] for replies in _uploads(federation)]
    assert uploads == [[True] * 3, [False] * 3, [True] * 3, [False] * 3, [True] * 3, [False] * 3]
    # The newest message is a function of all data at that time.
    state = federation.states[5]["bob"]
    sent = make_message(setup(), PHI, state.X, state.Y, generator=generator(0))
    assert torch.equal(received.weights[1], sent)


def _uploads(federation: Federation) -> list[list[Contribution]]:
    result = []
    for round_ in federation.rounds:
        replies = [decode(data, Reply) for data in round_.exchanged.replies.values()]
        result.append([decode(reply.body, Contribution) for reply in replies])
    return result


def test_one_message_before_the_start() -> None:
    federation = finished(ALONE, every=0)
    received = federation.end.received
    assert received is not None
    assert received.made == (0, 0, 0)
    assert received.agents == NAMES
    for i, name in enumerate(NAMES):
        X, Y = with_data()[name]
        sent = make_message(setup(), PHI, X, Y, generator=generator(0))
        assert torch.equal(received.weights[i], sent)


def test_only_the_active_agents_query() -> None:
    federation = finished(ALONE, active=("bob",), every=1)
    assert [len(federation.sites[name].state.X) for name in NAMES] == [8, 11, 8]
    received = federation.end.received
    assert received is not None
    assert received.made == (0, 3, 0)
    assert all(round_.replied == ("bob",) for round_ in federation.rounds[1:])


def test_agents_without_data() -> None:
    federation = finished(MIXED, data={"cem": history(6)}, every=1)
    assert [len(federation.sites[name].state.X) for name in NAMES] == [3, 3, 9]
    first = federation.states[1]
    assert len(first["ann"].X) == 0
    collected = _uploads(federation)[0]
    assert [upload.values is None for upload in collected] == [True, True, False]


def test_nobody_has_data() -> None:
    federation = finished(MIXED, data={}, every=3)  # nobody hears anything before the last round
    assert federation.end.received is not None
    assert federation.end.received.made == (3, 3, 3)
    for name in NAMES:
        assert len(federation.sites[name].state.X) == 3


def test_no_rounds_is_a_collection() -> None:
    federation = Federation(study(MIXED, data=with_data()))
    terms = replace(federation.server.terms, budget=0)
    federation.server = replace(federation.server, terms=terms)
    federation.drive()
    assert federation.end.t == 1
    assert federation.end.received is not None


def test_stragglers_are_simply_missing() -> None:
    options = {"data": with_data(), "every": 0}
    federation = Federation(study(MIXED, **options), absent=lambda name, t: (name, t) == ("bob", 1))
    federation.drive()
    assert federation.end.received is not None
    assert federation.end.received.agents == ("ann", "cem")
    assert federation.failures("bob") == ["absent", "", "", ""]
    assert [len(federation.sites[name].state.X) for name in NAMES] == [11, 11, 11]
    # Who comes back sends when the others do.
    later = Federation(
        study(MIXED, data=with_data(), every=1), absent=lambda name, t: (name, t) == ("bob", 1)
    )
    later.drive()
    assert later.end.received is not None
    assert later.end.received.agents == NAMES


def test_an_absent_agent_keeps_its_old_message() -> None:
    federation = Federation(
        study(ALONE, data=with_data(), every=1), absent=lambda name, t: name == "bob" and t > 1
    )
    federation.drive()
    assert federation.end.received is not None
    assert federation.end.received.made == (3, 0, 3)
    assert len(federation.sites["bob"].state.X) == 8


# ------------------------------------------------------------------ how messages are used


@dataclass
class Desk:
    """One agent with received messages, without a server."""

    strategy: AnyStrategy = RECEIVED
    names: tuple[str, ...] = ("bob", "cem", "dan")
    made: tuple[int, ...] | None = None
    weights: Tensor | None = None
    kind: MessageKind = "mean"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {"budget": 1000, "feature_map": PHI, "message": self.kind, "every": 1}
        options = {**given, **self.options}
        if "data" in options:
            options["data"] = {"ann": options["data"]}
        self.study = FTS(strategy=self.strategy, **options)
        self.agent = self.study.agent("ann", SQUARE, 3, MemoryBlobs())
        self.state = self.receive(self.agent.start(), self.made)

    def receive(self, state: AgentState, made: tuple[int, ...] | None = None) -> AgentState:
        made = (0,) * len(self.names) if made is None else made
        weights = self.weights
        if weights is None:
            weights = 0.5 * normal(len(self.names), M, seed=5)
        blobs = self.agent.blobs
        self.broadcasts = (
            blobs.put(encode(self.study.terms(SQUARE, self.roster).setup)),
            blobs.put(encode(Rows(self.names, made, weights))),
        )
        order = replace(QUERY, t=max(made) + 1)
        self.agent.check(state, order, self.broadcasts)
        return self._asked_again(state, order)

    @property
    def roster(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("ann", *self.names)))

    def started(self, seed: int) -> AgentState:
        """The first state of an agent with another seed."""
        self.agent = replace(self.agent, seed=seed)
        return self._asked_again(self.state)

    def query(self, state: AgentState, points: Tensor | None = None) -> AgentState:
        """The state after a query, at the next request; points that were given are faster."""
        X = uniform(self.study.q, 2, seed=state.used) if points is None else points
        return self._asked_again(self.agent.tell(state, X, hill(X)))

    def _asked_again(self, state: AgentState, order: Order = QUERY) -> AgentState:
        return self.agent.receive(state, order, self.broadcasts)


def test_each_message_is_used_once() -> None:
    desk = Desk()
    state, used = desk.state, []
    for t in range(1, 5):
        state = desk.query(state)
        assert state.used == t
        used.append(dict(state.search.used))
    assert [len(names) for names in used] == [1, 2, 3, 3]
    assert set(used[-1]) == {"bob", "cem", "dan"}


def test_the_point_maximises_the_message() -> None:
    desk = Desk()
    point = desk.agent.ask(desk.state)
    assert isinstance(point, Tensor)
    (name,) = desk.query(desk.state, point).search.used
    f = 0.5 * normal(3, M, seed=5)[("bob", "cem", "dan").index(name)]
    grid = torch.cartesian_prod(*2 * [torch.linspace(0, 1, 60).double()])
    assert float(PHI(point) @ f) >= float((PHI(grid) @ f).max()) - 1e-9


def test_a_new_message_may_be_used_again() -> None:
    desk = Desk(made=(2, 2, 2))
    state = desk.state
    for _ in range(4):
        state = desk.query(state)
    assert set(state.search.used.values()) == {2}
    state = desk.query(desk.receive(state, (2, 5, 2)))
    assert state.search.used == {"bob": 2, "cem": 5, "dan": 2}
    again = desk.query(desk.receive(state, (2, 5, 2)))
    assert again.search.used == state.search.used


def test_when_all_are_used_the_own_model_decides() -> None:
    desk = Desk(options={"data": history(5)})
    state = desk.state
    for _ in range(3):
        state = desk.query(state)
    alone = Desk(ALONE, options={"data": history(5)})
    theirs = replace(state, broadcasts=alone.state.broadcasts)
    mine, expected = desk.agent.ask(state), alone.agent.ask(theirs)
    assert isinstance(mine, Tensor)
    assert isinstance(expected, Tensor)
    assert torch.equal(mine, expected)


def test_asking_twice_and_telling_change_nothing() -> None:
    for strategy in (SEARCH, MIXED, RECEIVED):
        desk = Desk(strategy, options={"data": history(6), "q": 2})
        state = desk.state
        for _ in range(4):
            first, second = desk.agent.ask(state), desk.agent.ask(state)
            assert isinstance(first, Tensor)
            assert isinstance(second, Tensor)
            assert torch.equal(first, second)
            stored = decode(encode(state), desk.agent.state_type)
            third = desk.agent.ask(stored)
            assert isinstance(third, Tensor)
            assert torch.equal(first, third)
            assert encode(desk.query(state, first)) == encode(desk.query(stored, first))
            state = desk.query(state, first)


SEEDS = 400


@pytest.mark.parametrize(
    "schedule",
    [Polynomial(0.5), InverseSquare(), Constant(0.3), Polynomial(1.0)],
    ids=["root", "paper", "constant", "linear"],
)
@pytest.mark.parametrize("design", [0, 2])
def test_the_share_of_own_steps_follows_the_schedule(schedule: Any, design: int) -> None:
    names = tuple(f"agent{n}" for n in range(20))
    options: dict[str, Any] = {"initial_design": uniform(design, 2)} if design else {}
    desk = Desk(replace(RANDOM, schedule=schedule), names=names, options=options)
    rounds = 6
    own = torch.zeros(rounds)
    for seed in range(SEEDS):
        state = desk.started(seed)
        for _ in range(design):
            state = desk.query(state)
            assert not state.search.used
        for t in range(rounds):
            after = desk.query(state)
            own[t] += len(after.search.used) == len(state.search.used)
            state = after
    expected = torch.tensor([schedule(t) for t in range(1, rounds + 1)])
    error = (expected * (1 - expected) / SEEDS).sqrt()
    assert bool(((own / SEEDS - expected).abs() <= 5 * error).all())


def test_given_weights_of_agents_are_respected() -> None:
    weights = {"bob": 1.0, "cem": 3.0, "dan": 0.0, "eva": 2.0}
    strategy = replace(RANDOM, schedule=Constant(1e-12))
    names = ("bob", "cem", "dan", "eva", "fay", "ann")
    desk = Desk(strategy, names=names, options={"agent_weights": weights})
    first = dict.fromkeys(desk.names, 0)
    second_after_cem = dict.fromkeys(desk.names, 0)
    for seed in range(400):
        state, order = desk.started(seed), []
        for _ in range(5):
            after = desk.query(state)
            order += sorted(set(after.search.used) - set(state.search.used))
            state = after
        assert sorted(order) == ["bob", "cem", "eva"]  # each once, and nobody of weight 0
        first[order[0]] += 1
        if order[0] == "cem":
            second_after_cem[order[1]] += 1
    for name, weight in weights.items():
        p = weight / 6
        assert abs(first[name] / 400 - p) <= 5 * (p * (1 - p) / 400) ** 0.5
    p, n = 1 / 3, first["cem"]  # renormalised after use
    assert abs(second_after_cem["bob"] / n - p) <= 5 * (p * (1 - p) / n) ** 0.5


def test_own_messages_are_not_transferred() -> None:
    desk = Desk(names=("ann",))
    assert not desk.query(desk.state).search.used


def test_messages_of_the_own_name_and_of_weight_zero_change_nothing() -> None:
    weights = 0.5 * normal(4, M, seed=5)
    for strategy in (SEARCH, SMALL, MIXED):
        few = Desk(
            strategy, names=("bob", "cem"), weights=weights[:2], options={"data": history(4)}
        )
        many = Desk(
            strategy,
            names=("bob", "cem", "ann", "dan"),
            weights=weights,
            options={"data": history(4), "agent_weights": {"bob": 1.0, "cem": 1.0}},
        )
        state, other = few.state, many.state
        for _ in range(3):
            mine, theirs = few.agent.ask(state), many.agent.ask(other)
            assert isinstance(mine, Tensor)
            assert isinstance(theirs, Tensor)
            assert torch.equal(mine, theirs)
            state, other = few.query(state, mine), many.query(other, theirs)


def test_the_prior_first_then_the_coin() -> None:
    strategy = replace(SMALL, prior_until=4, schedule=Constant(1e-12))
    desk = Desk(strategy, options={"data": history(5)})
    state, used = desk.state, []
    for _ in range(6):
        state = desk.query(state)
        used.append(len(state.search.used))
    assert used == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("n", [1, 2, 10])
def test_the_prior_model_starts_at_the_messages_and_follows_the_data(n: int) -> None:
    X, Y = history(n)
    weights = torch.stack([message("mean", 30 + i, seed=i) for i in range(4)])
    model = prior_model(PHI, weights, X, Y, log_warp=FLAT)
    with torch.no_grad():
        posterior = model.posterior(X)
        error = (posterior.mean - Y).square().mean()
        messages = (PHI(X) @ weights.mT).mean(dim=-1, keepdim=True) - Y
        x = uniform(200, 2, seed=9)
        beyond = model.posterior(x).mean - hill(x)
    assert float(error) <= float(messages.square().mean()) + 1e-6
    assert float(beyond.square().mean().sqrt()) < 0.4  # helpful messages: one point is enough


def test_the_prior_model_is_fitted_to_the_spread_of_the_messages() -> None:
    X, Y = history(12)
    weights = torch.stack([message("mean", 10 + 3 * i) for i in range(5)])
    Phi = PHI(X)
    known = fit_own_gp(
        X,
        Y,
        prior_mean=(Phi @ weights.mT).mean(dim=-1, keepdim=True),
        prior_covariance=Phi @ torch.cov(weights.mT) @ Phi.mT,
        outputscale_prior=RESIDUAL_PRIOR,
    )
    model = prior_model(PHI, weights, X, Y, log_warp=FLAT)
    assert model.mean_module.constant == pytest.approx(known.mean, rel=1e-6)
    assert float(model.likelihood.noise) == pytest.approx(known.noise_var, rel=1e-5)
    residual = known.outputscale + torch.zeros(3).double()  # at one point each
    x = uniform(3, 1, 2, seed=1)
    spread = (PHI(x) @ torch.cov(weights.mT) @ PHI(x).mT).flatten()
    found = model.covar_module(x, diag=True).flatten()
    torch.testing.assert_close(found, spread + residual, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ points


def test_a_batch_is_of_different_points_of_a_list() -> None:
    candidates = uniform(6, 2, seed=2)
    for strategy in (
        SEARCH,
        RECEIVED,
        SMALL,
        MIXED,
        ALONE,
        RANDOM,
        replace(SMALL, own="ei", prior_until=0),
    ):
        federation = finished(strategy, q=3, candidates=candidates, data={"cem": history(5)})
        for name in NAMES:
            state = federation.sites[name].state
            asked = state.X[-9:]
            assert len(state.X) == 9 + 5 * (name == "cem")
            where = (asked.unsqueeze(1) == candidates).all(dim=-1)
            assert bool((where.sum(dim=-1) == 1).all())  # only these points
            for batch in where.int().argmax(dim=-1).split(3):
                assert len(set(batch.tolist())) == 3


@pytest.mark.parametrize("strategy", [RGPE, TAF], ids=["rgpe", "taf"])
def test_the_baselines_choose_different_points_of_a_list(strategy: Strategy) -> None:
    kind = "summary" if strategy is RGPE else "summary_and_incumbent"
    federation = finished(strategy, q=3, candidates=uniform(6, 2, seed=2), message=kind, rounds=1)
    assert len({tuple(row) for row in federation.sites["ann"].state.X[-3:].tolist()}) == 3


@pytest.mark.parametrize(
    "strategy", [SEARCH, SMALL, MIXED, ALONE, RANDOM, replace(SMALL, own="ei", prior_until=0)]
)
def test_a_batch_in_the_cube_is_of_different_points(strategy: AnyStrategy) -> None:
    federation = finished(strategy, q=3, rounds=2)
    for name in NAMES:
        asked = federation.sites[name].state.X[8:]
        assert bool(((asked >= 0) & (asked <= 1)).all())
        for batch in asked.split(3):
            distances = torch.cdist(batch, batch) + 10 * torch.eye(3).double()
            assert float(distances.min()) > 1e-4


@pytest.mark.parametrize("strategy", [RGPE, TAF], ids=["rgpe", "taf"])
def test_a_batch_of_the_baselines_is_of_different_points(strategy: Strategy) -> None:
    kind = "summary" if strategy is RGPE else "summary_and_incumbent"
    federation = finished(strategy, q=3, message=kind, rounds=1)
    asked = federation.sites["ann"].state.X[8:]
    distances = torch.cdist(asked, asked) + 10 * torch.eye(3).double()
    assert float(distances.min()) > 1e-4


def test_copies_among_the_candidates() -> None:
    with pytest.raises(InputDataError, match="candidates"):
        agent(q=2, candidates=uniform(1, 2).repeat(3, 1))


def test_all_candidates_may_be_used_up() -> None:
    federation = finished(MIXED, candidates=uniform(2, 2, seed=2), data={}, rounds=4, every=1)
    assert len(federation.sites["ann"].state.X) == 4


def test_integers_and_choices_are_snapped() -> None:
    space = SearchSpace(
        (
            Parameter.integer("depth", 1, 4),
            Parameter.choice("kernel", ["rbf", "poly", "linear"]),
            Parameter.real("C", 1e-3, 1e3, scale="log"),
        )
    )

    def objective(X: Tensor) -> Tensor:
        point = space.from_unit(X)[0]
        assert torch.equal(space.to_unit([point]), X)
        bonus = 1.0 if point["kernel"] == "poly" else 0.0
        return torch.tensor([[bonus + 0.3 * float(point["depth"])]]).double()

    for strategy in (SEARCH, MIXED, RANDOM, RECEIVED):
        federation = Federation(
            study(strategy, feature_map=None, rounds=4, every=1),
            space=space,
            objectives=dict.fromkeys(NAMES, objective),
        )
        federation.drive()
        assert len(federation.sites["ann"].state.X) == 4


@pytest.mark.parametrize("strategy", [SEARCH, MIXED], ids=["search", "mixed"])
def test_the_initial_design_comes_first(strategy: AnyStrategy) -> None:
    design = uniform(4, 2, seed=7)
    federation = finished(strategy, initial_design=design, q=2, rounds=3, every=1)
    for name in NAMES:
        assert torch.equal(federation.sites[name].state.X[8:12], design)
        assert not bool((federation.sites[name].state.X[12:14] == design[:2]).all())


def test_designs_by_name() -> None:
    designs = spread_design(SQUARE, NAMES, 2)
    federation = finished(SEARCH, initial_design=designs, rounds=3, data=with_data(), every=1)
    for name in NAMES:
        assert torch.equal(federation.sites[name].state.X[8:10], designs[name])
    left = {name: designs[name] for name in NAMES[1:]}
    with pytest.raises(InputDataError, match=f"one design for each agent.*{NAMES[0]}"):
        finished(MIXED, initial_design=left, rounds=3)
    with pytest.raises(InputDataError, match="same length"):
        finished(MIXED, initial_design={**designs, NAMES[0]: uniform(1, 2)}, rounds=3)


def test_random_search() -> None:
    federation = finished(RANDOM, rounds=10)
    asked = torch.cat([federation.sites[name].state.X[8:] for name in NAMES])
    assert federation.sites["ann"].state.search.own is None  # nothing is fitted for nothing
    assert asked.std(dim=0).min() > 0.15
    assert len({tuple(row) for row in asked.tolist()}) == 30
    # The same whatever was observed.
    other = Federation(
        study(RANDOM, rounds=10, data=with_data()), objectives=dict.fromkeys(NAMES, valley)
    )
    other.drive()
    assert torch.equal(other.sites["ann"].state.X, federation.sites["ann"].state.X)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(SEARCH, "own_mean"), (MIXED, "sample"), (PAPER, "sample")],
    ids=["search", "mixed", "paper"],
)
def test_minimisation_is_maximisation_of_the_negative(strategy: AnyStrategy, kind: str) -> None:
    centre = 0.25

    def mirrored(minimize: bool) -> Federation:
        sign = -1.0 if minimize else 1.0
        data = {name: (X, sign * Y) for name, (X, Y) in with_data().items()}
        space = SearchSpace(
            SQUARE.parameters, Outcome(centre=sign * centre, scale=0.7, minimize=minimize)
        )
        federation = Federation(
            study(strategy, data=data, every=1, message=kind),
            space=space,
            objectives=dict.fromkeys(NAMES, valley if minimize else hill),
        )
        federation.drive()
        return federation

    up, down = mirrored(False), mirrored(True)
    for name in NAMES:
        mine, theirs = up.sites[name].state, down.sites[name].state
        assert torch.equal(mine.X, theirs.X)
        assert torch.equal(mine.Y, theirs.Y)
    assert up.end.received is not None
    assert down.end.received is not None
    assert torch.equal(up.end.received.weights, down.end.received.weights)


# ------------------------------------------------------------------ the baselines


@pytest.mark.parametrize("strategy", [RGPE, TAF], ids=["rgpe", "taf"])
def test_the_baselines_use_summaries(strategy: Strategy) -> None:
    kind = "summary" if strategy is RGPE else "summary_and_incumbent"
    points = []
    for f in (hill, lambda X: hill(X, 0.8)):
        data = {"ann": history(5), "bob": history(30, seed=1, f=f), "cem": history(30, seed=2, f=f)}
        federation = finished(strategy, message=kind, data=data, active=("ann",), rounds=2)
        assert federation.failures("ann") == ["", "", ""]
        received = federation.end.received
        assert received is not None
        assert received.weights.shape == (3, M * (M + 3) // 2 + (strategy is TAF))
        points.append(federation.sites["ann"].state.X[5:])
    assert not torch.equal(*points)  # what the others sent matters


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *((SEARCH, "summary"), (SEARCH, "summary_and_incumbent"), (SMALL, "own_mean")),
        *((SMALL, "summary"), (RGPE, "mean"), (TAF, "summary"), (TAF, "sample")),
    ],
)
def test_kinds_that_do_not_fit_are_refused(strategy: AnyStrategy, kind: str) -> None:
    made = study(strategy, message=kind, data=with_data())
    with pytest.raises(InputDataError, match=r"not go with messages of kind|needs messages"):
        made.server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match=r"not go with messages of kind|needs messages"):
        made.agent("ann", SQUARE, 0, MemoryBlobs())


# ------------------------------------------------------------------ refusals


def test_another_search_space_is_refused_and_no_data_leave() -> None:
    others = SearchSpace((Parameter.real("a", 0.0, 2.0), Parameter.real("b", 0.0, 1.0)))
    federation = Federation(study(SEARCH, data=with_data()), site_spaces={"bob": others})
    federation.drive()
    assert federation.failures("bob") == ["invalid"] * 4
    assert not federation.sites["bob"].trials()
    assert len(federation.sites["bob"].state.X) == 8  # and what it has, it keeps
    assert federation.end.received is not None
    assert federation.end.received.agents == ("ann", "cem")
    private = patterns(*with_data()["bob"])
    assert not any(pattern in data for pattern in private for data in federation.traffic)


BAD_UPLOADS: dict[str, Callable[[Tensor], Tensor]] = {
    "short": lambda w: w[:-1],
    "long": lambda w: torch.cat([w, w[:1]]),
    "matrix": lambda w: w.unsqueeze(0),
    "scalar": lambda w: w[0],
    "huge": lambda w: w * 1e9,
    "integers": lambda w: w.long(),
    "empty": lambda w: w[:0],
}


@pytest.mark.parametrize("bad", BAD_UPLOADS)
def test_a_bad_upload_is_its_senders_failure_only(bad: str) -> None:
    federation = Federation(study(SEARCH, data=with_data()))

    def tamper(name: str, message: Contribution) -> Contribution:
        if name == "bob" and message.values is not None:
            return Contribution(BAD_UPLOADS[bad](message.values))
        return message

    federation.tamper = tamper
    federation.drive()
    assert federation.failures("bob") == ["malformed"] * 4
    assert federation.failures("ann") == federation.failures("cem") == [""] * 4
    assert federation.end.received is not None
    assert federation.end.received.agents == ("ann", "cem")
    assert len(federation.sites["bob"].state.X) == 8 + 3  # it goes on by itself


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_never_arrive(value: float) -> None:
    weights = torch.full((M,), value).double()
    with pytest.raises(MessageError, match="finite"):
        encode(Contribution(weights))
    server = study(every=1).server(SQUARE, NAMES)
    with pytest.raises(MessageError, match="exceeds"):
        server.check(server.start(), "bob", Contribution(weights))


def test_a_weight_vector_that_nobody_asked_for_is_refused() -> None:
    federation = Federation(study(SEARCH, data=with_data(), every=0))

    def tamper(name: str, message: Contribution) -> Contribution:
        unasked = Contribution(torch.zeros(report_size(PHI)).double())
        return unasked if name == "bob" else message

    federation.tamper = tamper
    federation.drive()
    assert federation.failures("bob") == ["", "malformed", "malformed", "malformed"]
    assert federation.end.received is not None
    assert federation.end.received.made == (0, 0, 0)


def test_a_summary_that_is_no_sum_of_squares_is_refused() -> None:
    good = message("summary", 10)
    setup("summary").check(PHI, good)
    bad = good.clone()
    bad[:M] -= 50  # the diagonal
    with pytest.raises(MessageError, match="sum of squares"):
        setup("summary").check(PHI, bad)
    federation = Federation(study(RGPE, data=with_data(), message="summary"))
    federation.tamper = lambda name, m: (
        Contribution(bad) if name == "bob" and m.values is not None else m
    )
    federation.drive()
    assert federation.failures("bob")[0] == "malformed"
    assert federation.end.received is not None
    assert federation.end.received.agents == ("ann", "cem")


@pytest.mark.parametrize("trust", [[-0.1, 1.1, 0, 0, 0], [1.0, 0.5, 0, 0, 0], [9e5] * 5])
def test_trusts_that_are_no_probabilities_are_refused(trust: list[float]) -> None:
    server = study(SEARCH).server(SQUARE, NAMES)
    weights = torch.cat([torch.zeros(M), torch.tensor(trust)]).double()
    with pytest.raises(MessageError, match="trusts"):
        server.check(server.start(), "bob", Contribution(weights))
    good = torch.cat([torch.zeros(M), torch.tensor([0.5, 0.5, 0, 0, 0])]).double()
    server.check(server.start(), "bob", Contribution(good))


def test_a_setup_that_changes_during_the_run_is_refused() -> None:
    desk = Desk()
    state = desk.query(desk.state)
    setup_ = desk.study.terms(SQUARE, desk.roster).setup
    halves = {key: t / 2 if "frequencies" in key else t for key, t in setup_.basis.items()}
    other = desk.agent.blobs.put(encode(replace(setup_, basis=halves)))
    with pytest.raises(MessageError, match="changed during the run"):
        desk.agent.check(state, QUERY, (other,))
    desk.agent.check(state, replace(QUERY, t=QUERY.t + 1), state.broadcasts[:1])


@pytest.mark.parametrize("rows", [M - 1, M + 1])
def test_received_weights_of_another_length_are_refused(rows: int) -> None:
    with pytest.raises(MessageError, match="float64 numbers"):
        Desk(weights=normal(3, rows))


def test_received_rows_must_fit_their_names() -> None:
    weights = normal(2, M)
    with pytest.raises(InputDataError, match="one row per agent"):
        Rows(("bob",), (0,), weights)
    with pytest.raises(InputDataError, match="two rows"):
        Rows(("bob", "bob"), (0, 0), weights)
    with pytest.raises(InputDataError, match="one row per agent"):
        Rows(("bob", "cem"), (0,), weights)


def test_a_basis_over_other_inputs_is_refused() -> None:
    line = SearchSpace(SQUARE.parameters[:1])
    with pytest.raises(InputDataError, match="2 inputs"):
        study(every=1).server(line, NAMES)
    site = study(feature_map=None, every=1).agent("ann", line, 0, MemoryBlobs())
    theirs = replace(site.terms.setup, agents=NAMES, basis=PHI.to_tensors())
    blob = site.blobs.put(encode(theirs))
    with pytest.raises(MessageError, match="2 inputs"):
        site.check(site.start(), COLLECT, (blob,))


def _changed(tensors: Mapping[str, Tensor], key: str, how: str) -> dict[str, Tensor]:
    value = tensors[key]
    new = {
        "flat": value.flatten()[:1],
        "deeper": value.unsqueeze(0),
        "zero": torch.zeros_like(value),
        "negative": -value if value.dtype != torch.bool else value,
        "empty": value.flatten()[:0],
        "integers": value.double() if not value.is_floating_point() else value.long(),
        "twice": torch.cat([value, value]) if value.dim() else value,
    }
    return {**tensors, key: new[how]}


HOW = ["flat", "deeper", "zero", "negative", "empty", "integers", "twice"]


def asked_by(server_says: Mapping[str, Tensor], strategy: AnyStrategy = SMALL) -> list[str]:
    """What becomes of a collection and a query under some basis: codes of refusals, or nothing."""
    made = study(strategy, data={"ann": history(3)})
    agent = made.agent("ann", SQUARE, 0, MemoryBlobs())
    setup_ = replace(made.terms(SQUARE, NAMES).setup, basis=server_says)
    site = Site("ann", agent, hill)
    blob = agent.blobs.put(encode(setup_))
    codes: list[str] = []
    for serial, message in enumerate((COLLECT, QUERY), start=1):
        request = Request(
            "run", "first", "ann", serial, serial - 1, 0, (blob,), encode(message), tag="0" * 64
        )
        answer = decode(site.respond(encode(request)), Reply, Refusal)
        codes.append(answer.code if isinstance(answer, Refusal) else "")
    assert len(site.state.X) == 3 + codes.count("") // 2
    return codes


@pytest.mark.parametrize("make_map", MAPS, ids=lambda f: f.__name__)
def test_a_damaged_basis_is_refused_and_nothing_worse(make_map: Callable[[], FeatureMap]) -> None:
    tensors = make_map().to_tensors()
    variants: list[dict[str, Tensor]] = [{}, {"nothing/at/all": torch.ones(2).double()}]
    must = len(variants)
    variants += [{k: v for k, v in tensors.items() if k != key} for key in tensors]
    variants += [_changed(tensors, key, how) for key in tensors for how in HOW]
    codes = [asked_by(changed, RANDOM) for changed in variants]
    assert all(pair in (["", ""], ["invalid", "invalid"]) for pair in codes)
    assert all(pair == ["invalid", "invalid"] for pair in codes[:must])


def scaled(key: str, factor: float) -> dict[str, Tensor]:
    tensors = PHI.to_tensors()
    name = f"random_fourier/{key}"
    return {**tensors, name: factor * tensors[name]}


def spread(count: int) -> dict[str, Tensor]:
    """A basis of twice so many features."""
    frequencies = generator(0, "many").normal(count, 2)
    return {**PHI.to_tensors(), "random_fourier/frequencies": frequencies}


HOSTILE: dict[str, dict[str, Tensor]] = {
    "huge frequencies": scaled("frequencies", 3e307),
    "huge features": scaled("outputscale", 1e155),
    "too many features": spread(MAX_FEATURES),
    "too many rows": spread(10**5),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_basis_that_cannot_work_is_refused(what: str) -> None:
    assert asked_by(HOSTILE[what]) == ["invalid", "invalid"]


# ------------------------------------------------------------------ settings


def agent(
    name: str = "ann", seed: int = 0, space: SearchSpace = SQUARE, **o: Any
) -> FederatedAgent:
    if "data" in o:
        o["data"] = {name: o["data"]}
    return study(**{"strategy": SEARCH, "every": 1, "budget": 4, **o}).agent(
        name, space, seed, MemoryBlobs()
    )


def test_bad_settings() -> None:
    with pytest.raises(InputDataError, match="q >= 1"):
        agent(q=0)
    with pytest.raises(InputDataError, match="unit cube"):
        agent(candidates=2 + uniform(3, 2))
    with pytest.raises(InputDataError, match="n x 2"):
        agent(candidates=uniform(3, 1))
    with pytest.raises(InputDataError, match="fewer different"):
        agent(candidates=uniform(2, 2), q=3)
    with pytest.raises(InputDataError, match="no multiple"):
        agent(initial_design=uniform(3, 2), q=2)
    with pytest.raises(InputDataError, match="finite"):
        agent(data=(uniform(2, 2), torch.full((2, 1), torch.nan)))
    with pytest.raises(InputDataError, match="between 0 and"):
        agent(agent_weights={"bob": -1.0})
    with pytest.raises(InputDataError, match="noise_var"):
        setup(noise_var=0.0)
    with pytest.raises(InputDataError, match="beta"):
        setup(beta=-1.0)
    with pytest.raises(InputDataError, match="own must be"):
        Strategy(own="greedy")  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match="transfer must be"):
        Strategy(transfer="none")  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match="counts from 0"):
        Strategy(prior_until=-1)
    with pytest.raises(InputDataError, match=r"\(0, 1\]"):
        Strategy(schedule=Constant(0.0))
    with pytest.raises(InputDataError, match="decrease"):
        Strategy(schedule=lambda t: 1 / t)
    with pytest.raises(InputDataError, match="no agents"):
        study(active=("zoe",), every=1).server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match="Expected different names"):
        study(every=1).server(SQUARE, ("a", "a"))
    with pytest.raises(InputDataError, match="Expected budget >= 1"):
        study(rounds=-1, every=1)
    with pytest.raises(InputDataError, match="<= budget <="):
        replace(study(every=1).terms(SQUARE, NAMES), budget=-1)


@pytest.mark.parametrize("weight", [torch.nan, torch.inf])
def test_weights_of_agents_are_finite(weight: float) -> None:
    with pytest.raises(InputDataError, match="between 0 and"):
        agent(agent_weights={"bob": weight})


def test_the_baselines_need_an_own_model() -> None:
    with pytest.raises(InputDataError, match="random"):
        Strategy(own="random", transfer="rgpe")


@pytest.mark.parametrize(
    "budget", [{"num_raw": 10, "num_restarts": 20}, {"num_features": 33}, {"num_restarts": 0}]
)
def test_budgets_are_checked(budget: dict[str, int]) -> None:
    with pytest.raises(InputDataError):
        Strategy(**budget)  # type: ignore[arg-type]


def test_fingerprints_tell_settings_apart() -> None:
    mine = agent()
    others = [
        agent(seed=1),
        agent(q=2),
        agent(name="bob"),
        agent(strategy=SMALL),
        agent(candidates=uniform(4, 2)),
        agent(initial_design=uniform(4, 2)),
        agent(agent_weights={"bob": 1.0}),
        agent(space=SearchSpace(SQUARE.parameters, Outcome(minimize=True))),
    ]
    assert len({mine.fingerprint, *(other.fingerprint for other in others)}) == 9
    server = study(every=1).server(SQUARE, NAMES)
    options = ({"active": ("ann",)}, {"noise_var": 0.1}, {"beta": 2.0}, {"every": 2})
    changed = [study(**{"every": 1, **given}) for given in options]
    assert len({server.fingerprint, *(s.server(SQUARE, NAMES).fingerprint for s in changed)}) == 5
    longer = study(rounds=9, every=1)
    assert longer.server(SQUARE, NAMES).fingerprint == server.fingerprint  # may go on


# ------------------------------------------------------------------ the paper, and what it is for


def test_the_papers_strategy() -> None:
    strategy = paper_strategy()
    assert strategy.schedule(1) == strategy.schedule(2) == 0.75
    assert strategy.schedule(10) == pytest.approx(0.99)
    federation = finished(PAPER, rounds=7, message="sample")
    fits = [states["ann"].search.own for states in federation.states]
    for own in fits:
        assert own is not None
        assert own.mean == 0
        assert len(set(own.lengthscale.tolist())) == 1
    # Fitted to what it had, and again when five more have come.
    assert [own.num_data for own in fits if own] == [8] * 6 + [13] * 3


def test_the_papers_strategy_keeps_no_distance() -> None:
    assert paper_strategy().min_distance == 0


def test_the_papers_share_of_own_steps() -> None:
    desk = Desk(replace(PAPER, own="random"), names=tuple(f"agent{n}" for n in range(9)))
    own = torch.zeros(2)
    for seed in range(2000):
        first = desk.query(desk.started(seed))
        second = desk.query(first)
        own += torch.tensor(
            [not first.search.used, len(second.search.used) == len(first.search.used)]
        )
    error = (0.75 * 0.25 / 2000) ** 0.5
    assert bool(((own / 2000 - 0.75).abs() < 5 * error).all())


def test_helpful_messages_beat_being_alone() -> None:
    def best(strategy: Strategy, seed: int) -> float:
        data = {"bob": history(30, seed=seed + 1), "cem": history(30, seed=seed + 2)}
        federation = Federation(
            study(strategy, data=data, active=("ann",), feature_map=None, rounds=4), seed=seed
        )
        federation.drive()
        return float(hill(federation.sites["ann"].state.X).max())

    gains = torch.tensor([best(SMALL, seed) - best(ALONE, seed) for seed in range(10)])
    assert int((gains > 0).sum()) >= 9
    assert float(gains.mean() / (gains.std() / 10**0.5)) > 2.5


def test_a_study_runs_by_one_call() -> None:
    objectives: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    result = run(study(MIXED, data=with_data()), objectives, seed=1, space=SQUARE)
    assert result.protocol == "FTS"
    X, Y = result.history("bob")
    assert X.shape == (3, 2)
    torch.testing.assert_close(Y, hill(X))
    again = run(study(MIXED, data=with_data()), objectives, seed=1, space=SQUARE)
    assert torch.equal(again.history("bob")[0], X)
