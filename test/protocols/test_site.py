"""A site loses nothing, wherever it is killed, and refuses what it must not answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from botorch_fed.errors import BudgetExceeded, ProtocolError
from botorch_fed.protocols.base import Pending, Refusal, Reply, Request
from botorch_fed.protocols.site import RECORD, Site, checked_values
from botorch_fed.protocols.store import Journal, MemoryBlobs, MemoryStore
from botorch_fed.wire.codec import content_hash, decode, encode
from test.protocols.search import Ask, Best, BoxAgent, Plan

CENTRE = torch.tensor([0.5, 0.5], dtype=torch.float64)


def bowl(X: Tensor) -> Tensor:
    return -(X - 0.3).square().sum(dim=-1, keepdim=True)


class Killed(BaseException):
    """Not an `Exception`: nothing in between may catch it."""


class Home:
    """What survives a crash, with a place to die: the `fatal`-th step from now, before or after."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.journal = Journal()
        self.blobs = MemoryBlobs()
        self.plans: list[str] = []
        self.steps = 0
        self.fatal: tuple[int, bool] | None = None
        self.evaluations: list[Tensor] = []

    def step(self, action: Callable[[], Any]) -> Any:
        number, self.steps = self.steps, self.steps + 1
        if self.fatal == (number, False):
            raise Killed
        result = action()
        if self.fatal == (number, True):
            raise Killed
        return result

    def site(self, agent: BoxAgent | None = None, objective: Any = None) -> Site:
        home = self
        agent = BoxAgent(seed=1) if agent is None else agent
        agent.blobs = self.blobs

        class DyingStore(MemoryStore):
            def get(self, name: str) -> bytes | None:
                return home.store.get(name)

            def put(self, name: str, data: bytes) -> None:
                home.step(lambda: home.store.put(name, data))

        class DyingJournal(Journal):
            def __init__(self) -> None:
                self.__dict__.update(home.journal.__dict__)  # the same entries

            def record(self, observation: Any) -> None:
                home.step(lambda: Journal.record(home.journal, observation))

            def release(self, mark: Any) -> None:
                home.step(lambda: Journal.release(home.journal, mark))

        def evaluate(X: Tensor) -> Tensor:
            home.evaluations.append(X)
            return home.step(lambda: bowl(X))

        return Site(
            "a",
            agent,
            evaluate if objective is None else objective,
            store=DyingStore(),
            journal=DyingJournal(),
        )

    def request(self, serial: int, **changes: Any) -> bytes:
        digest = self.blobs.put(encode(Plan(0.7**serial)))
        centre = changes.pop("centre", CENTRE)
        frame = Request("run", "first", "a", serial, (digest,), encode(Ask(centre)))
        return encode(replace(frame, **changes))


def body(answer: bytes) -> Best:
    reply = decode(answer, Reply)
    return decode(reply.body, Best)


def code(answer: bytes) -> str:
    refusal: Refusal = decode(answer, Refusal)
    return refusal.code


def steps_of_a_round() -> int:
    home = Home()
    home.site().respond(home.request(1))
    return home.steps


def told(site: Site) -> list[tuple[float, ...]]:
    return [tuple(row) for row in site.state.X.tolist()]


# ------------------------------------------------------------------ killed anywhere

STEPS = steps_of_a_round()
DEATHS = [(step, after) for step in range(2 * STEPS) for after in (False, True)]


def undisturbed(rounds: int) -> tuple[list[bytes], list[tuple[float, ...]]]:
    home = Home()
    site = home.site()
    answers = [site.respond(home.request(serial)) for serial in range(1, rounds + 1)]
    return answers, told(site)


@pytest.mark.parametrize(("step", "after"), DEATHS)
def test_killed_while_the_server_waits(step: int, after: bool) -> None:
    home, answers = Home(), []
    home.fatal = (step, after)
    agent = BoxAgent(seed=1)
    site = home.site(agent)
    died = 0
    for serial in (1, 2, 3):
        try:
            answer = site.respond(home.request(serial))
        except Killed:
            died += 1
            home.fatal = None
            agent = BoxAgent(seed=1, draws=agent.draws)
            site = home.site(agent)
            answer = site.respond(home.request(serial))
        answers.append(body(answer))
    assert died == 1
    expected, points = undisturbed(3)
    for mine, theirs in zip(answers, map(body, expected), strict=True):
        assert torch.equal(mine.X, theirs.X)
        assert mine.value == theirs.value
    assert told(site) == points
    # Nothing is evaluated twice but what was evaluated and could not be written down any more.
    assert len(home.evaluations) <= len(points) + 1
    assert len(home.journal) == len(points)


@pytest.mark.parametrize(("step", "after"), DEATHS)
def test_killed_while_the_server_goes_on(step: int, after: bool) -> None:
    home = Home()
    home.fatal = (step, after)
    site = home.site()
    died_in = 0
    for serial in (1, 2, 3, 4):
        try:
            site.respond(home.request(serial))
        except Killed:
            died_in, home.fatal = serial, None
            site = home.site()
    assert died_in in (1, 2)
    kept = [tuple(row) for seen in home.journal for row in seen.X.tolist()]
    assert told(site) == kept  # every observation is in the state, once, in order
    assert len(set(kept)) == len(kept)
    assert len(kept) >= 9  # the other three rounds


@pytest.mark.parametrize(("step", "after"), DEATHS)
def test_a_reply_that_left_is_never_drawn_again(step: int, after: bool) -> None:
    home = Home()
    site = home.site()
    first = site.respond(home.request(1))
    home.fatal = (home.steps + step, after)
    try:
        second = site.respond(home.request(2))
    except Killed:
        second = None
    home.fatal = None
    site = home.site(BoxAgent(seed=1, draws=10))
    again = site.respond(home.request(2))
    assert code(site.respond(home.request(1))) == "stale"
    assert site.respond(home.request(2)) == again
    if second is not None:
        assert again == second
    assert again != first


def test_a_lost_record_is_noticed() -> None:
    home = Home()
    home.site().respond(home.request(1))
    home.store.delete(RECORD)
    with pytest.raises(ProtocolError, match="no record"):
        home.site()


def test_an_older_record_is_noticed() -> None:
    home = Home()
    site = home.site()
    snapshots = [site.respond(home.request(1)) and home.store.get(RECORD)]
    site.respond(home.request(2))
    assert snapshots[0] is not None
    home.store.put(RECORD, snapshots[0])
    with pytest.raises(ProtocolError, match="older than its journal"):
        home.site()


def test_a_record_before_its_released_reply_is_noticed() -> None:
    home = Home()
    unanswered = []
    put = home.store.put
    home.store.put = lambda name, data: (unanswered.append(data), put(name, data))[1]  # type: ignore[method-assign]
    home.site().respond(home.request(1))
    put(RECORD, unanswered[0])
    with pytest.raises(ProtocolError, match="older than its journal"):
        home.site()


# ------------------------------------------------------------------ refusals


def test_refusals_have_typed_codes() -> None:
    home = Home()
    site = home.site()
    good = home.request(2)
    assert code(site.respond(b"noise")) == "invalid"
    assert code(site.respond(good[:-1])) == "invalid"
    assert code(site.respond(home.request(0))) == "invalid"
    assert code(site.respond(home.request(1, run="other"))) == "foreign"
    assert code(site.respond(home.request(1, agent="b"))) == "foreign"
    assert code(site.respond(home.request(1, broadcasts=("0" * 64,)))) == "missing"
    assert code(site.respond(home.request(1, body=encode(Plan(1.0))))) == "invalid"
    assert code(site.respond(home.request(1, centre=torch.zeros(3).double()))) == "invalid"
    assert site.serial == 0  # nothing of that was received
    answer = site.respond(good)
    assert code(site.respond(home.request(1))) == "stale"
    assert code(site.respond(home.request(2, centre=torch.zeros(2).double()))) == "changed"
    assert code(site.respond(home.request(3, instance="second"))) == "foreign"
    assert site.respond(good) == answer
    refusal: Refusal = decode(site.respond(home.request(1)), Refusal)
    assert refusal.last == 2
    assert refusal.request == content_hash(home.request(1))


def test_an_oversize_request_is_refused() -> None:
    home = Home()
    site = home.site()
    site._max_bytes = 100
    big = home.request(1, body=b"x" * 70_000)
    assert code(site.respond(big)) == "invalid"


def test_an_exhausted_budget_is_a_refusal_and_costs_nothing() -> None:
    class Spent(BoxAgent):
        def receive(self, *_: Any) -> Any:
            raise BudgetExceeded("epsilon 1.2 of 1.0")

    home = Home()
    site = home.site(Spent(seed=1))
    assert code(site.respond(home.request(1))) == "budget"
    assert site.serial == 0
    assert not home.evaluations


# ------------------------------------------------------------------ slow objectives


def test_a_pending_agent_goes_on_when_asked_again() -> None:
    home = Home()
    agent = BoxAgent(seed=1, busy_rounds=(1,))
    site = home.site(agent)
    request = home.request(1)
    assert code(site.respond(request)) == "busy"
    agent.busy_rounds = ()
    assert body(site.respond(request)).value <= 0


class Slow:
    """Starts an evaluation, and has it only when told so."""

    def __init__(self) -> None:
        self.started: list[Tensor] = []
        self.ready = False

    def __call__(self, X: Tensor) -> Tensor | Pending:
        if not any(torch.equal(X, known) for known in self.started):
            self.started.append(X)
            self.ready = False
        return bowl(X) if self.ready else Pending()


def test_a_slow_objective_delivers_late_and_nothing_is_lost() -> None:
    home, slow = Home(), Slow()
    site = home.site(BoxAgent(seed=1, per_round=1), slow)
    assert code(site.respond(home.request(1))) == "busy"
    assert code(site.respond(home.request(1))) == "busy"
    site = home.site(BoxAgent(seed=1, per_round=1), slow)  # the site restarts meanwhile
    assert code(site.respond(home.request(2))) == "busy"  # the server has gone on
    assert len(slow.started) == 1
    slow.ready = True
    answer = site.respond(home.request(3))  # takes the old value, then starts on a new point
    assert code(answer) == "busy"
    assert len(slow.started) == 2
    slow.ready = True
    body(site.respond(home.request(3)))
    assert torch.equal(site.state.X, torch.cat(slow.started))


# ------------------------------------------------------------------ a site's own mistakes


def test_a_failed_evaluation_can_be_repeated() -> None:
    home, calls = Home(), []

    def fragile(X: Tensor) -> Tensor:
        calls.append(X)
        if len(calls) == 2:
            raise OSError("the oven has failed")
        return bowl(X)

    site = home.site(objective=fragile)
    with pytest.raises(OSError, match="oven"):
        site.respond(home.request(1))
    body(site.respond(home.request(1)))
    assert len(calls) == 4  # three points, one of them twice
    assert torch.equal(calls[1], calls[2])


def test_an_objective_cannot_change_what_was_asked() -> None:
    home = Home()
    site = home.site(objective=lambda X: X.zero_().sum(dim=-1, keepdim=True))
    site.respond(home.request(1))
    assert bool((site.state.X != 0).any())


@pytest.mark.parametrize(
    "points",
    [torch.zeros(2), torch.zeros(1, 2), torch.full((1, 2), torch.nan).double()],
    ids=["one dimension", "float32", "nan"],
)
def test_what_an_agent_asks_for_is_checked_before_it_is_paid(points: Tensor) -> None:
    class Odd(BoxAgent):
        def ask(self, state: Any) -> Tensor:
            return points

    home = Home()
    with pytest.raises(ProtocolError):
        home.site(Odd(seed=1)).respond(home.request(1))
    assert not home.evaluations


def test_a_record_of_other_settings_is_refused() -> None:
    home = Home()
    home.site().respond(home.request(1))
    with pytest.raises(ProtocolError, match="settings"):
        home.site(BoxAgent(seed=2))


def test_a_changed_agent_is_noticed_at_replay() -> None:
    home = Home()
    home.fatal = (4, True)
    with pytest.raises(Killed):
        home.site().respond(home.request(1))

    class Other(BoxAgent):
        def ask(self, state: Any) -> Any:
            asked = super().ask(state)
            return None if asked is None else asked * 0.5

    home.fatal = None
    with pytest.raises(ProtocolError, match="another point"):
        home.site(Other(seed=1)).respond(home.request(1))


@pytest.mark.parametrize(
    "Y",
    [None, torch.zeros(2), torch.zeros(3, 2), torch.full((3, 1), torch.inf), [1.0, 2.0, 3.0]],
    ids=["none", "too few", "two columns", "infinite", "list"],
)
def test_bad_values_are_refused(Y: Any) -> None:
    with pytest.raises(ProtocolError):
        checked_values(torch.zeros(3, 2), Y)


def test_good_values_become_a_column() -> None:
    assert checked_values(torch.zeros(3, 2), torch.arange(3)).tolist() == [[0.0], [1.0], [2.0]]
    assert checked_values(torch.zeros(1, 2), 0.5).tolist() == [[0.5]]
