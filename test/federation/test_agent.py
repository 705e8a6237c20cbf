"""One agent for all protocols: what it counts, what it refuses, and its verbs beyond a request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition import Constant
from botorch_fed.errors import MessageError
from botorch_fed.federation.agent import AgentState, FederatedAgent
from botorch_fed.federation.base import Objective
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.terms import OWN, Order, Terms, check_words, in_words
from botorch_fed.models import KLFeatures
from botorch_fed.privacy import Budget
from botorch_fed.run import run
from botorch_fed.search.releases import Rows
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FTS, FedGP
from botorch_fed.wire.codec import decode, encode
from test.cases import normal, random_fourier, uniform

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
PHI = random_fourier()
SMALL = Strategy(num_raw=64, num_restarts=4, num_features=64, prior_until=0)
NEXT = Order(1, "next", True)
FAILED = torch.full((1, 1), torch.nan, dtype=torch.float64)


def hill(X: Tensor) -> Tensor:
    return 1 - 6 * (X - 0.3).square().sum(dim=-1, keepdim=True)


def study(**options: Any) -> FTS:
    return FTS(**{"budget": 6, "feature_map": PHI, **options})


def told(agent: FederatedAgent, state: AgentState, count: int) -> AgentState:
    for _ in range(count):
        X = agent.ask(state)
        assert isinstance(X, Tensor)
        state = replace(agent.tell(state, X, hill(X)), asking=agent.terms.q, ahead=0)
    return state


@dataclass
class Desk:
    """An agent that has got an order, without a server."""

    study: FTS = field(default_factory=study)
    rows: Rows | None = None
    order: Order = NEXT

    def __post_init__(self) -> None:
        self.server = self.study.server(SQUARE, NAMES)
        self.agent = self.study.agent("ann", SQUARE, 3, MemoryBlobs())
        self.put = self.agent.blobs.put
        self.broadcasts: tuple[str, ...] = (self.put(encode(self.server.hub.terms.setup)),)
        if self.rows is not None:
            self.broadcasts += (self.put(encode(self.rows)),)
        self.state = self.asked(self.agent.start())

    def asked(self, state: AgentState) -> AgentState:
        if state.order is not None:  # rounds go on
            self.order = replace(self.order, t=state.order.t + 1)
        self.agent.check(state, self.order, self.broadcasts)
        return self.agent.receive(state, self.order, self.broadcasts)


# ------------------------------------------------------------------ evaluations


@pytest.mark.parametrize(("budget", "q"), [(6, 1), (7, 3), (2, 3), (1, 1)])
def test_the_budget_counts_evaluations(budget: int, q: int) -> None:
    objectives: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    result = run(study(budget=budget, q=q), objectives, seed=0, space=SQUARE)
    assert [len(result.history(name)[0]) for name in NAMES] == [budget] * 3


def test_a_site_that_has_used_its_budget_replies_without_an_evaluation() -> None:
    desk = Desk(study(budget=4))
    state = told(desk.agent, desk.state, 4)
    assert desk.agent.ask(state) is None
    assert desk.agent.reply(state)[1].values is not None
    three = told(desk.agent, desk.state, 3)
    assert desk.agent.ask(three, pending=uniform(1, 2)) is None


def test_a_failed_point_is_used_and_never_asked_again() -> None:
    grid = uniform(5, 2, seed=4)
    desk = Desk(study(budget=5, candidates=grid, num_initial=0))
    state, asked = desk.state, []
    for index in range(5):
        X = desk.agent.ask(state)
        assert isinstance(X, Tensor)
        asked.append(tuple(X[0].tolist()))
        Y = FAILED if index % 2 else hill(X)
        state = desk.agent.tell(state, X, Y)
        assert state.asking == 0
        if index < 4:
            state = desk.asked(state)
    assert len(set(asked)) == 5
    assert (len(state.X), len(state.failed), state.used) == (3, 2, 5)
    assert desk.agent.ask(state) is None


def test_a_failed_dealt_point_is_not_dealt_again() -> None:
    desk = Desk()
    first = desk.agent.ask(desk.state)
    assert isinstance(first, Tensor)
    second = desk.agent.ask(desk.asked(desk.agent.tell(desk.state, first, FAILED)))
    assert isinstance(second, Tensor)
    assert float(torch.cdist(first, second)) > 0.1


def test_attached_results_are_data_and_no_evaluations() -> None:
    desk = Desk()
    X = uniform(4, 2, seed=1)
    state = desk.agent.attach(desk.state, X, hill(X))
    assert (len(state.X), state.used, state.asking) == (4, 0, 1)
    given = Desk(study(data={"ann": (X, hill(X))}))
    assert torch.equal(_point(desk, state), _point(given, given.state))
    with pytest.raises(InputDataError, match="unit cube"):
        desk.agent.attach(state, X + 1, hill(X))


def _point(desk: Desk, state: AgentState) -> Tensor:
    X = desk.agent.ask(state)
    assert isinstance(X, Tensor)
    return X


@pytest.mark.parametrize("strategy", [TransferSearch(), SMALL, replace(SMALL, own="random")])
@pytest.mark.parametrize("given", [0, 4])
def test_pending_points_are_kept_apart(strategy: Any, given: int) -> None:
    X = uniform(4, 2, seed=1)
    data = {"ann": (X, hill(X))} if given else {}
    desk = Desk(study(strategy=strategy, data=data))
    points = torch.zeros(0, 2).double()
    for _ in range(4):
        more = desk.agent.ask(desk.state, pending=points)
        again = desk.agent.ask(desk.state, pending=points)
        assert isinstance(more, Tensor)
        assert isinstance(again, Tensor)
        assert torch.equal(more, again)
        points = torch.cat([points, more])
    assert float(torch.pdist(points).min()) > 1e-4


def test_a_deferred_reply_and_a_late_value() -> None:
    X = uniform(4, 2, seed=1)
    desk = Desk(study(data={"ann": (X, hill(X))}))
    point = _point(desk, desk.state)
    assert desk.agent.defers
    after, reply = desk.agent.reply(desk.state)
    assert reply.values is not None
    assert after.used == 0
    assert desk.agent.wants(after)
    late = desk.agent.tell(desk.asked(after), point, hill(point))
    assert (late.used, len(late.X), late.asking) == (1, 5, 0)
    assert not torch.equal(_point(desk, desk.asked(late)), point)


def test_evaluations_ahead_of_the_rounds_count_for_the_next() -> None:
    desk = Desk()
    state = desk.state
    for _ in range(3):
        X = _point(desk, state)
        state = desk.agent.tell(state, X, hill(X))
    assert (state.used, state.ahead, desk.agent.wants(state)) == (3, 2, False)
    state = desk.asked(state)
    assert (state.ahead, desk.agent.wants(state)) == (1, False)
    state = desk.asked(desk.asked(state))
    assert (state.ahead, desk.agent.wants(state)) == (0, True)
    assert desk.agent.left(state, 1) == 2


def test_a_message_is_used_once_though_its_value_is_late() -> None:
    rows = Rows(("bob",), (0,), 0.5 * normal(1, PHI.num_features, seed=5))
    desk = Desk(study(strategy=replace(SMALL, schedule=Constant(1e-12)), every=1), rows)
    assert desk.state.search.using == {"bob": 0}
    after, _ = desk.agent.reply(desk.state)
    assert after.search.used == {"bob": 0}
    assert desk.asked(after).search.using == {}


def test_a_state_survives_encoding() -> None:
    desk = Desk(study(strategy=SMALL))
    state = told(desk.agent, desk.state, 2)
    again = decode(encode(state), desk.agent.state_type)
    assert encode(again) == encode(state)
    assert torch.equal(_point(desk, state), _point(desk, again))


# ------------------------------------------------------------------ terms


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"every": 3}, "aggregation.every: this site has 1, the hub has 3"),
        ({"q": 2}, "q: this site has 1, the hub has 2"),
        ({"num_initial": 5}, "num_initial: this site has 3, the hub has 5"),
        ({"noise_var": 0.2}, "search.messages.noise_var"),
        ({"strategy": SMALL}, "aggregation.every|search"),
        ({"default": {"a": 0.5, "b": 0.5}}, "default"),
        ({"active": ("bob",)}, "active"),
    ],
)
def test_a_site_refuses_other_terms_by_name(change: dict[str, Any], name: str) -> None:
    site = study().agent("ann", SQUARE, 3, MemoryBlobs())
    terms = study(**change).server(SQUARE, NAMES).hub.terms
    blob = site.blobs.put(encode(terms.setup))
    with pytest.raises(MessageError, match=f"terms differ in .*{name}"):
        site.check(site.start(), NEXT, (blob,))


def test_a_site_refuses_another_space_by_name() -> None:
    site = study().agent("ann", SQUARE, 3, MemoryBlobs())
    other = SearchSpace(SQUARE.parameters, Outcome(minimize=True))
    blob = site.blobs.put(encode(study().server(other, NAMES).hub.terms.setup))
    with pytest.raises(MessageError, match=r"space\.outcome\.minimize: this site has False"):
        site.check(site.start(), NEXT, (blob,))


def test_what_is_a_sites_own_business_need_not_agree() -> None:
    quiet = replace(TransferSearch(), listen=False)
    site = study(strategy=quiet, budget=9, agent_weights={"bob": 1.0})
    agent = site.agent("ann", SQUARE, 3, MemoryBlobs())
    blob = agent.blobs.put(encode(study().server(SQUARE, NAMES).hub.terms.setup))
    agent.check(agent.start(), NEXT, (blob,))
    mine = study().agent("ann", SQUARE, 3, MemoryBlobs())
    assert agent.fingerprint != mine.fingerprint
    assert study(budget=9).agent("ann", SQUARE, 3, MemoryBlobs()).fingerprint == mine.fingerprint


def test_the_basis_is_the_hubs_bit_by_bit_and_the_sites_own_but_for_rounding() -> None:
    agent = study().agent("ann", SQUARE, 3, MemoryBlobs())
    setup = study().server(SQUARE, NAMES).hub.terms.setup

    def told(factor: float) -> str:
        basis = {k: v * factor if "frequencies" in k else v for k, v in setup.basis.items()}
        return agent.blobs.put(encode(replace(setup, basis=basis)))

    COLLECT = Order(0, "nothing", True)
    agent.check(agent.start(), COLLECT, (told(1 + 1e-14),))
    assert not torch.equal(
        agent._terms((told(1 + 1e-14),)).feature_map.to_tensors()["random_fourier/frequencies"],
        PHI.to_tensors()["random_fourier/frequencies"],
    )
    with pytest.raises(MessageError, match=r"shared basis, random_fourier/freq.*this site has .*"):
        agent.check(agent.start(), COLLECT, (told(1 + 1e-6),))
    phi = KLFeatures.from_map(PHI, uniform(200, 2), num_features=20)
    other = study(feature_map=phi).server(SQUARE, NAMES).hub.terms.setup
    with pytest.raises(MessageError, match="one side alone has"):
        agent.check(agent.start(), COLLECT, (agent.blobs.put(encode(other)),))


def test_a_site_refuses_a_hub_without_its_name_or_its_privacy() -> None:
    agent = study().agent("zoe", SQUARE, 3, MemoryBlobs())
    blob = agent.blobs.put(encode(study().server(SQUARE, NAMES).hub.terms.setup))
    with pytest.raises(MessageError, match="'zoe', is not among"):
        agent.check(agent.start(), NEXT, (blob,))
    careful = replace(agent, name="ann", require=Budget(1.0, 1e-5))
    with pytest.raises(MessageError, match=r"requires \(1, 1e-05\)-DP per agent.*promises none"):
        careful.check(careful.start(), NEXT, (blob,))


def test_words_leave_out_last_digits_and_name_functions() -> None:
    @dataclass(frozen=True)
    class Part:
        number: float
        how: Any = hill
        secret: int = field(default=0, metadata=OWN)

    said = in_words((Part(0.1 + 0.2, secret=4),), "part")
    check_words(said, in_words((Part(0.3),), "part"))
    assert said["part.0.how"].endswith("hill")
    assert "part.0.secret" not in said
    assert in_words(Part(0.3, secret=4), "part", with_own=True)["part.secret"] == "4"
    with pytest.raises(MessageError, match=r"part\.0\.number"):
        check_words(said, in_words((Part(0.31),), "part"))


def test_a_site_whose_study_alone_has_data_is_told_what_to_write() -> None:
    X = uniform(5, 2)
    data = {"ann": (X, hill(X))}

    def first(**options: Any) -> Desk:
        desk = Desk.__new__(Desk)
        desk.server = FedGP(budget=8, channel="plain").server(SQUARE, NAMES)
        mine = FedGP(budget=8, channel="plain", data=data, **options)
        desk.agent = mine.agent("ann", SQUARE, 3, MemoryBlobs())
        box = desk.server.outbox(desk.server.start())
        assert box is not None
        desk.broadcasts = tuple(desk.agent.blobs.put(encode(said)) for said in box.broadcasts)
        desk.order = box.messages["ann"]
        return desk

    desk = first()
    with pytest.raises(MessageError, match=r"Write num_initial = 3 in the study of this site"):
        desk.asked(desk.agent.start())
    desk = first(num_initial=3)
    assert desk.asked(desk.agent.start()).asking == 0


def test_bad_terms() -> None:
    def terms(**options: Any) -> Terms:
        return replace(study().terms(SQUARE, NAMES), **options)

    for change in ({"budget": -1}, {"q": 0}, {"num_initial": -1}):
        with pytest.raises(InputDataError, match=f"<= {next(iter(change))} <="):
            terms(**change)
    with pytest.raises(InputDataError, match="Expected different names"):
        terms(agents=("a", "a"))
    with pytest.raises(InputDataError, match="no agents"):
        terms(active=("zoe",))
    with pytest.raises(InputDataError, match="2 inputs"):
        terms(space=SearchSpace(SQUARE.parameters[:1]))
    with pytest.raises(InputDataError, match="shared basis"):
        terms(basis=None)
    with pytest.raises(InputDataError, match="at least one agent"):
        FederatedServer(terms=terms(agents=()))
    assert isinstance(terms(basis=KLFeatures.from_map(PHI, uniform(40, 2), num_features=9)), Terms)
