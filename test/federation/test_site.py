"""A site loses nothing, wherever it is killed, and refuses what it must not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.engines.inprocess import refusal_code
from botorch_fed.errors import BudgetExceeded, ProtocolError
from botorch_fed.federation.base import Pending, Refusal, Reply, Request
from botorch_fed.federation.site import Site, checked_values
from botorch_fed.federation.trial import SITE_EVENTS, Asked, Joined, Observed, Replied, Requested
from botorch_fed.storage.log import FileLog, Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.wire.codec import content_hash, decode, encode
from test.federation.search import Ask, Best, BoxAgent, Plan

CENTRE = torch.tensor([0.5, 0.5], dtype=torch.float64)


def bowl(X: Tensor) -> Tensor:
    return -(X - 0.3).square().sum(dim=-1, keepdim=True)


class Killed(BaseException):
    """Not an `Exception`: nothing in between may catch it."""


class Home:
    """What survives a crash, with a place to die: the `fatal`-th step from now, before or after."""

    def __init__(self) -> None:
        self.log = Log(SITE_EVENTS)
        self.blobs = MemoryBlobs()
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

    def site(self, agent: BoxAgent | None = None, objective: Any = None, **options: Any) -> Site:
        home = self
        agent = BoxAgent(seed=1) if agent is None else agent
        agent.blobs = self.blobs

        class DyingLog(Log):
            def __init__(self) -> None:
                self.__dict__.update(home.log.__dict__)  # the same events

            def append(self, event: Any) -> None:
                home.step(lambda: Log.append(home.log, event))
                self.__dict__.update(home.log.__dict__)

            def snapshot(self, data: bytes) -> str:
                return home.step(lambda: Log.snapshot(home.log, data))

            def keep(self, digests: Any) -> None:
                home.step(lambda: Log.keep(home.log, digests))

        def evaluate(X: Tensor) -> Tensor:
            home.evaluations.append(X)
            return home.step(lambda: bowl(X))

        chosen = evaluate if objective is None else objective
        return Site("a", agent, None if chosen == "none" else chosen, log=DyingLog(), **options)

    def request(self, serial: int, **changes: Any) -> bytes:
        digest = self.blobs.put(encode(Plan(0.7**serial)))
        centre = changes.pop("centre", CENTRE)
        frame = Request(
            "run", "first", "a", serial, serial - 1, 0, (digest,), encode(Ask(centre)), "0" * 64
        )
        return encode(replace(frame, **changes))

    @property
    def observations(self) -> list[tuple[float, ...]]:
        """The points with a value, as the log has them."""
        points = {
            event.first + row: tuple(event.X[row].tolist())
            for event in self.log
            if isinstance(event, Asked)
            for row in range(len(event.X))
        }
        observed = [event for event in self.log if isinstance(event, Observed)]
        return [points[trial] for event in observed for trial in event.trials]


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
DEATHS = [(step, after) for step in range(2 * STEPS - 1) for after in (False, True)]


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
    assert len(home.observations) == len(points)


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
    kept = home.observations
    assert told(site) == kept  # every observation is in the state, once, in order
    assert len(set(kept)) == len(kept)
    assert len(kept) >= 9  # the other three rounds


@pytest.mark.parametrize(("step", "after"), DEATHS[: 2 * STEPS])
def test_a_reply_that_left_is_never_drawn_again(step: int, after: bool) -> None:
    home = Home()
    site = home.site()
    first = site.respond(home.request(1))
    home.fatal = (home.steps + step, after)
    try:
        again = site.respond(home.request(2))
        assert step >= STEPS - 1  # the first round has one step more: the first event
    except Killed:
        home.fatal = None
        again = home.site(BoxAgent(seed=1, draws=10)).respond(home.request(2))
    home.fatal = None
    site = home.site(BoxAgent(seed=1, draws=20))
    assert code(site.respond(home.request(1))) == "stale"
    assert site.respond(home.request(2)) == again
    assert again != first


def test_the_log_tells_what_happened_in_order() -> None:
    home = Home()
    home.site().respond(home.request(1))
    kinds = [type(event) for event in home.log]
    assert kinds == [Joined, Requested, *[Asked, Observed] * 3, Replied]


def test_a_lost_snapshot_is_noticed(tmp_path: Path) -> None:
    home = Home()
    with FileLog(tmp_path / "site", SITE_EVENTS) as log:
        Site("a", BoxAgent(seed=1, blobs=home.blobs), bowl, log=log).respond(home.request(1))
    state, *_ = (tmp_path / "site" / "snapshots").iterdir()
    state.unlink()
    with (
        FileLog(tmp_path / "site", SITE_EVENTS) as log,
        pytest.raises(ProtocolError, match=r"snapshot .* is missing or damaged"),
    ):
        Site("a", BoxAgent(seed=1, blobs=home.blobs), bowl, log=log)


def test_a_site_that_has_lost_everything_is_noticed_by_what_the_server_has_heard() -> None:
    home = Home()
    assert code(home.site().respond(home.request(4, replied=3))) == "behind"


def test_a_site_that_has_lost_a_reply_that_arrived_says_so() -> None:
    home = Home()
    site = home.site(BoxAgent(seed=1, per_round=1), "none")
    assert code(site.respond(home.request(1))) == "busy"
    (trial,) = site.ask()
    copy = deepcopy(home.log)
    site.tell(trial.id, 0.5)
    body(site.respond(home.request(1)))
    home.log = copy
    site = home.site(BoxAgent(seed=1, per_round=1), "none")
    assert code(site.respond(home.request(2, replied=1))) == "behind"
    assert code(site.respond(home.request(2, replied=0))) == "busy"
    home = Home()
    site = home.site(BoxAgent(seed=1, busy_rounds=(2,)))
    site.respond(home.request(1))
    for serial in (2, 3):  # it has got round 2 and not replied: nothing is lost
        answer = site.respond(home.request(serial, replied=1))
        assert refusal_code(answer) == ("busy" if serial == 2 else None)
    body(home.site().respond(home.request(4, replied=0)))


def test_nothing_private_is_in_a_repr() -> None:
    home = Home()
    site = home.site()
    site.respond(home.request(1))
    text = repr(site) + repr(list(home.log)) + repr(site.observations())
    assert "tensor" not in text


# ------------------------------------------------------------------ refusals


def test_refusals_have_typed_codes() -> None:
    home = Home()
    site = home.site()
    good = home.request(2)
    assert code(site.respond(b"noise")) == "invalid"
    assert code(site.respond(good[:-1])) == "invalid"
    assert code(site.respond(home.request(1, run="other"))) == "foreign"
    assert code(site.respond(home.request(1, agent="b"))) == "foreign"
    assert code(site.respond(home.request(1, broadcasts=("0" * 64,)))) == "missing"
    assert code(site.respond(home.request(1, body=encode(Plan(1.0))))) == "invalid"
    assert code(site.respond(home.request(1, centre=torch.zeros(3).double()))) == "invalid"
    assert code(site.respond(home.request(1, broadcasts=()))) == "invalid"
    assert site.serial == 0  # nothing of that was received
    answer = site.respond(good)
    assert code(site.respond(home.request(1))) == "stale"
    assert code(site.respond(home.request(2, centre=torch.zeros(2).double()))) == "changed"
    assert code(site.respond(home.request(3, instance="second"))) == "foreign"
    assert site.respond(good) == answer
    refusal: Refusal = decode(site.respond(home.request(1)), Refusal)
    assert refusal.last == 2
    assert refusal.request == content_hash(home.request(1))


@pytest.mark.parametrize(
    "changes",
    [
        {"serial": 0},
        {"replied": 1},
        {"asked": 1},
        {"replied": -1},
        {"run": "r" * 101},
        {"instance": "i" * 70_000},
        {"broadcasts": ("0" * 64, "0" * 64)},
        {"broadcasts": ("x" * 64,)},
        {"broadcasts": tuple(f"{i:064x}" for i in range(65))},
        {"tag": "short"},
    ],
    ids=str,
)
def test_frames_are_bounded(changes: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        Home().request(changes.pop("serial", 1), **changes)


@pytest.mark.parametrize("method", ["check", "receive"])
def test_whatever_a_hostile_request_raises_is_a_refusal(method: str) -> None:
    agent = BoxAgent(seed=1)

    def fail(*_: Any) -> Any:
        raise RuntimeError("a surprise")

    setattr(agent, method, fail)
    home = Home()
    site = home.site(agent)
    assert code(site.respond(home.request(1))) == "invalid"
    delattr(agent, method)
    body(site.respond(home.request(1)))


def test_a_request_that_the_agent_cannot_cope_with_is_left_behind() -> None:
    class Choosy(BoxAgent):
        def ask(self, state: Any, pending: Tensor) -> Any:
            if state.t == 2 and state.todo == 2:
                raise ArithmeticError("a poisoned round")
            return super().ask(state, pending)

    home = Home()
    site = home.site(Choosy(seed=1))
    body(site.respond(home.request(1)))
    with pytest.raises(ArithmeticError):
        site.respond(home.request(2))
    site = home.site(Choosy(seed=1))
    body(site.respond(home.request(3)))
    assert len(site.state.X) == 7  # the observation of the poisoned round as well


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


def test_an_exhausted_budget_at_the_reply_keeps_the_observations() -> None:
    class Spent(BoxAgent):
        def reply(self, *_: Any) -> Any:
            raise BudgetExceeded("epsilon 1.2 of 1.0")

    home = Home()
    site = home.site(Spent(seed=1))
    assert code(site.respond(home.request(1))) == "budget"
    assert code(site.respond(home.request(2))) == "budget"
    assert len(home.observations) == 6
    assert len(home.evaluations) == 6


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


class Kiln:
    """Starts an evaluation at the first call and has it at the third."""

    def __init__(self) -> None:
        self.calls: dict[bytes, int] = {}

    def __call__(self, X: Tensor) -> Tensor | Pending:
        key = X.numpy().tobytes()
        self.calls[key] = self.calls.get(key, 0) + 1
        return bowl(X) if self.calls[key] >= 3 else Pending()


def slow_steps() -> int:
    home, kiln = Home(), Kiln()
    site = home.site(BoxAgent(seed=1, per_round=2), lambda X: home.step(lambda: kiln(X)))
    while len(decode_or_none(site.respond(home.request(1)))) == 0:
        pass
    return home.steps


def decode_or_none(answer: bytes) -> bytes:
    answer_ = decode(answer, Reply, Refusal)
    return answer_.body if isinstance(answer_, Reply) else b""


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(("step", "after"), [(s, a) for s in range(slow_steps()) for a in (0, 1)])
def test_killed_around_a_slow_objective(step: int, after: bool, goes_on: bool) -> None:
    home, kiln = Home(), Kiln()
    home.fatal = (step, bool(after))

    def site() -> Site:
        return home.site(BoxAgent(seed=1, per_round=2), lambda X: home.step(lambda: kiln(X)))

    here, serial, died = site(), 1, False
    for _ in range(60):
        try:
            if decode_or_none(here.respond(home.request(serial))):
                serial += 1
        except Killed:
            died, home.fatal, here = True, None, site()
            serial += goes_on
        if serial > 3:
            break
    assert died
    assert serial > 3
    kept = home.observations
    assert len(set(kept)) == len(kept)  # nothing was paid for twice
    assert told(here) == kept
    collected = {np.array([row]).tobytes() for row in kept}
    # What the objective has started on is collected, but for a first `Pending` that was not saved.
    assert len(set(kiln.calls) - collected) <= (1 if goes_on else 0)


def test_a_late_value_needs_neither_the_agent_nor_an_old_broadcast() -> None:
    home, slow = Home(), Slow()
    site = home.site(BoxAgent(seed=1, per_round=1), slow)
    assert code(site.respond(home.request(1))) == "busy"
    slow.ready = True
    newer = home.request(2)
    home.blobs.keep(decode(newer, Request).broadcasts)  # the old one is gone

    class Changed(BoxAgent):
        def ask(self, state: Any, pending: Tensor) -> Any:
            assert state.t != 1, "the agent was asked again"
            return super().ask(state, pending)

    site = home.site(Changed(seed=1, per_round=1), slow)
    assert code(site.respond(newer)) == "busy"  # a new point is being evaluated
    slow.ready = True
    body(site.respond(newer))
    assert torch.equal(site.state.X, torch.cat(slow.started))
    assert len(slow.started) == 2


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


def test_with_raise_errors_a_failed_evaluation_can_be_repeated() -> None:
    home, calls = Home(), []

    def fragile(X: Tensor) -> Tensor:
        calls.append(X)
        if len(calls) == 2:
            raise OSError("the oven has failed")
        return bowl(X)

    site = home.site(objective=fragile, raise_errors=True)
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
        def ask(self, state: Any, pending: Tensor) -> Tensor:
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


@pytest.mark.parametrize(
    "Y",
    [
        None,
        Pending,
        10**400,
        torch.zeros(2),
        torch.zeros(3, 2),
        torch.zeros(3, dtype=torch.complex128),
        np.zeros(3, dtype=np.complex128),
        np.array(["a", "b", "c"]),
        [1.0, 2.0, 3.0],
    ],
    ids=str,
)
def test_bad_values_are_refused(Y: Any) -> None:
    with pytest.raises(ProtocolError):
        checked_values(torch.zeros(3, 2), Y)


def test_good_values_become_a_column() -> None:
    assert checked_values(torch.zeros(3, 2), torch.arange(3)).tolist() == [[0.0], [1.0], [2.0]]
    assert checked_values(torch.zeros(1, 2), 0.5).tolist() == [[0.5]]
    assert checked_values(torch.zeros(1, 2), np.float32(0.5)).tolist() == [[0.5]]
    assert checked_values(torch.zeros(2, 2), np.array([1, 2])).tolist() == [[1.0], [2.0]]


def test_the_agent_computes_on_one_thread_and_the_objective_on_all() -> None:
    seen: dict[str, int] = {}

    class Counting(BoxAgent):
        def ask(self, state: Any, pending: Tensor) -> Any:
            seen["agent"] = torch.get_num_threads()
            return super().ask(state, pending)

    def objective(X: Tensor) -> Tensor:
        seen["objective"] = torch.get_num_threads()
        return bowl(X)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        home = Home()
        home.site(Counting(seed=1), objective).respond(home.request(1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {"agent": 1, "objective": 2}


def test_only_one_request_is_answered_at_a_time() -> None:
    inside, most = [0], [0]

    def slow(X: Tensor) -> Tensor:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return bowl(X)

    home = Home()
    site = home.site(objective=slow)
    threads = [threading.Thread(target=site.respond, args=(home.request(1),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(home.observations) == 3
