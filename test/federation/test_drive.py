"""The server's loop: whatever comes back, and wherever it is killed."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.base import (
    Exchanged,
    Failure,
    Outbox,
    Outgoing,
    Pending,
    Refusal,
    Reply,
    Request,
)
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.hub import HUB_EVENTS
from botorch_fed.federation.site import Site, request_content
from botorch_fed.privacy import Event, SharedLedger
from botorch_fed.storage.log import FileLog, Log
from botorch_fed.storage.store import FileStore, MemoryBlobs
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode, encode
from test.federation.search import Best, BoxAgent, BoxServer, Plan
from test.hubs import SavedLog

NAMES = ("a", "b", "c")
SERVER = BoxServer(NAMES, rounds=4)


def bowl(X: Tensor) -> Tensor:
    return -(X - 0.3).square().sum(dim=-1, keepdim=True)


def sites(**options: Any) -> list[Site]:
    blobs = MemoryBlobs()
    return [Site(n, BoxAgent(seed=i, blobs=blobs), bowl, **options) for i, n in enumerate(NAMES)]


def test_a_run_improves_and_everybody_is_heard() -> None:
    rounds: list[Round] = []
    state = drive(SERVER, InProcess(sites()), on_round=rounds.append)
    assert state.heard == (3, 3, 3, 3)
    assert state.best.value > -0.01
    assert [r.serial for r in rounds] == [1, 2, 3, 4]
    assert rounds[0].replied == NAMES


def test_an_empty_round_is_a_round() -> None:
    state = drive(BoxServer((), rounds=2), InProcess([]))
    assert state.heard == (0, 0)


def test_an_absent_agent_is_an_ordinary_event() -> None:
    engine = InProcess(sites(), absent=lambda name, serial: name == "b" and serial in (1, 3))
    rounds: list[Round] = []
    state = drive(SERVER, engine, on_round=rounds.append)
    assert state.heard == (2, 3, 2, 3)
    assert rounds[0].exchanged.failures == {"b": Failure("absent")}


# ------------------------------------------------------------------ hostile and broken replies


def tampered(change: Any) -> Any:
    """An engine in which agent `b` is hostile."""
    engine = InProcess(sites())

    def exchange(outgoing: Outgoing) -> Exchanged:
        exchanged = engine(outgoing)
        replies = dict(exchanged.replies)
        replies.update(change(replies, outgoing))
        return replace(exchanged, replies=replies)

    return exchange


def reframed(data: bytes, **changes: Any) -> bytes:
    return encode(replace(decode(data, Reply), **changes), max_bytes=2 * MAX_BYTES)


def about(data: bytes, request: bytes, **changes: Any) -> bytes:
    """The reply to another request."""
    other = encode(replace(decode(request, Request), **changes))
    return reframed(data, request=bytes.fromhex(content_hash(other)))


HOSTILE: dict[str, Any] = {
    "noise": lambda r, o: {"b": b"\x00noise"},
    "truncated": lambda r, o: {"b": r["b"][:-3]},
    "oversize": lambda r, o: {"b": b"x" * 5_000_000},
    "of another agent": lambda r, o: {"b": r["a"]},
    "to another agent's request": lambda r, o: {"b": about(r["b"], o.requests["a"])},
    "to another run": lambda r, o: {"b": about(r["b"], o.requests["b"], run="other")},
    "to another start": lambda r, o: {"b": about(r["b"], o.requests["b"], instance="x")},
    "to another round": lambda r, o: {
        "b": about(r["b"], o.requests["b"], serial=o.serial + 1, asked=0, replied=0)
    },
    "to no request": lambda r, o: {"b": reframed(r["b"], request=b"")},
    "another class": lambda r, o: {"b": reframed(r["b"], body=encode(Plan(0.5)))},
    "oversize inside": lambda r, o: {"b": reframed(r["b"], body=b"x" * (MAX_BYTES + 1))},
    "no dimensions": lambda r, o: {
        "b": reframed(r["b"], body=encode(_best(torch.tensor(1.0).double())))
    },
    "wrong shape": lambda r, o: {
        "b": reframed(
            r["b"],
            body=encode(_best(torch.zeros(7).double())),
        )
    },
}


def _best(X: Tensor) -> Any:
    return Best(X, 1e9, 0)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_reply_is_its_senders_failure_only(what: str) -> None:
    rounds: list[Round] = []
    state = drive(SERVER, tampered(HOSTILE[what]), on_round=rounds.append)
    assert state.heard == (2, 2, 2, 2)
    assert all(r.exchanged.failures["b"].code == "malformed" for r in rounds)
    without_b = drive(SERVER, InProcess(sites(), absent=lambda name, _: name == "b"))
    assert torch.equal(state.best.X, without_b.best.X)


@pytest.mark.parametrize("claim", ["stale", "changed", "foreign", "behind"])
def test_a_forged_refusal_is_its_senders_failure_only(claim: Any) -> None:
    """Nobody can stop a run by saying that the server is too old."""

    def forge(replies: Mapping[str, bytes], outgoing: Outgoing) -> dict[str, bytes]:
        true: Request = decode(outgoing.requests["b"], Request)
        digest = content_hash(outgoing.requests["b"])
        head = (true.run, true.instance, "b", true.serial, digest)
        return {"b": encode(Refusal(*head, claim, 10**9, "0" * 64, "0" * 64))}

    engine = tampered(forge)

    def mostly_silent(outgoing: Outgoing) -> Exchanged:
        exchanged = engine(outgoing)
        kept = {n: data for n, data in exchanged.replies.items() if n != "c" or outgoing.serial < 3}
        return replace(exchanged, replies=kept)

    rounds: list[Round] = []
    state = drive(SERVER, mostly_silent, on_round=rounds.append)
    assert state.heard == (2, 2, 1, 1)
    assert {r.exchanged.failures["b"].code for r in rounds} == {claim}


def test_the_seal_of_another_agent_proves_nothing() -> None:
    """Agent b shows the seal on a's request of this very round, or on its own of a past one."""
    seen: dict[str, Request] = {}

    def forge(replies: Mapping[str, bytes], outgoing: Outgoing) -> dict[str, bytes]:
        frames = {name: decode(data, Request) for name, data in outgoing.requests.items()}
        past, seen["b"] = seen.get("b", frames["a"]), frames["b"]
        true = seen["b"]
        digest = content_hash(outgoing.requests["b"])
        head = (true.run, true.instance, "b", true.serial, digest, "stale")
        last = true.serial + 1 if past.agent == "a" else past.serial
        return {"b": encode(Refusal(*head, last, request_content(past), past.tag))}

    rounds: list[Round] = []
    state = drive(SERVER, tampered(forge), on_round=rounds.append)
    assert state.heard == (2, 2, 2, 2)
    assert all(r.exchanged.failures["b"].code == "stale" for r in rounds)


def test_who_is_heard_has_not_failed() -> None:
    engine = InProcess(sites())

    def confused(outgoing: Outgoing) -> Exchanged:
        return replace(engine(outgoing), failures={"a": Failure("absent")})

    rounds: list[Round] = []
    drive(SERVER, confused, on_round=rounds.append)
    assert rounds[0].replied == NAMES
    assert not rounds[0].exchanged.failures


def test_the_order_of_arrival_is_irrelevant() -> None:
    @dataclass(frozen=True)
    class Recording(BoxServer):
        def step(self, state: Any, inbox: Mapping[str, Any]) -> Any:
            assert list(inbox) == list(NAMES)
            return super().step(state, inbox)

    engine = InProcess(sites())

    def shuffled(outgoing: Outgoing) -> Exchanged:
        exchanged = engine(outgoing)
        return replace(exchanged, replies=dict(reversed(exchanged.replies.items())))

    drive(Recording(NAMES, rounds=2), shuffled)


def test_an_unasked_reply_is_ignored() -> None:
    rounds: list[Round] = []
    exchange = tampered(lambda r, o: {"stranger": r["a"]})
    state = drive(SERVER, exchange, on_round=rounds.append)
    assert state.heard == (3, 3, 3, 3)
    assert rounds[0].exchanged.failures["stranger"].code == "unasked"


# ------------------------------------------------------------------ crash and resume


class Crash(Exception):
    pass


PLACES = {"save": 5, "exchange": 4, "round": 4}  # how often each comes in four rounds


@pytest.mark.parametrize(
    ("where", "at"),
    [(where, at) for where, count in PLACES.items() for at in range(count)],
)
def test_resume_after_a_crash_changes_nothing(at: int, where: str) -> None:
    expected = drive(SERVER, InProcess(sites()))
    engine, log, count = InProcess(sites()), SavedLog(), [0]

    def maybe_crash(kind: str) -> None:
        if kind == where:
            count[0] += 1
            if count[0] == at + 1:
                raise Crash

    log.after = lambda: maybe_crash("save")

    def exchange(outgoing: Outgoing) -> Exchanged:
        exchanged = engine(outgoing)
        maybe_crash("exchange")  # the sites have answered, the server has not heard
        return exchanged

    with pytest.raises(Crash):
        drive(SERVER, exchange, log=log, on_round=lambda _: maybe_crash("round"))
    state = drive(SERVER, engine, log=log)
    assert encode(state) == encode(expected)


def test_a_step_is_saved_before_anybody_hears_of_it() -> None:
    log = SavedLog()
    seen: list[int] = []
    drive(SERVER, InProcess(sites()), log=log, on_round=lambda r: seen.append(len(log)))
    assert seen == [2, 3, 4, 5]  # the start, and every step before its `on_round`
    assert len(set(log.bytes())) == 5


def test_a_server_with_an_old_log_stops() -> None:
    engine, log = InProcess(sites()), SavedLog()
    drive(SERVER, engine, log=log)
    with pytest.raises(ProtocolError, match="older than the"):
        drive(SERVER, engine, log=log.first(3))


def test_one_agent_can_prove_that_the_server_is_old() -> None:
    """The others were absent and would go on: the run must not fork."""
    absent = lambda name, serial: name != "a" and serial > 2  # noqa: E731
    home, log = sites(), SavedLog()
    drive(SERVER, InProcess(home, absent=absent), log=log)
    with pytest.raises(ProtocolError, match="'a' proves"):
        drive(SERVER, InProcess(home), log=log.first(3))


def test_who_is_asked_again_only_later_proves_it_then() -> None:
    """Rounds 3 and 4 are lost, and agent a, who knows of them, is asked again in round 6."""
    home, log = sites(), SavedLog()
    drive(SERVER, InProcess(home), log=log)

    @dataclass(frozen=True)
    class Sparing(BoxServer):
        def outbox(self, state: Any) -> Any:
            outbox = super().outbox(state)
            if outbox is None or state.t >= 5:
                return outbox
            return replace(outbox, messages={})

    with pytest.raises(ProtocolError, match="'a' proves"):
        drive(Sparing(NAMES, rounds=8), InProcess(home[:1]), log=log.first(3))


def test_one_agent_can_prove_that_it_was_asked_for_something_else() -> None:
    home, log = sites(), SavedLog()
    drive(SERVER, InProcess(home), log=log)

    @dataclass(frozen=True)
    class Other(BoxServer):
        def outbox(self, state: Any) -> Any:
            outbox = super().outbox(state)
            return None if outbox is None else replace(outbox, broadcasts=(Plan(0.123),))

    with pytest.raises(ProtocolError, match="proves"):
        drive(Other(NAMES, rounds=4), InProcess(home), log=log.first(4))


def test_a_site_that_has_lost_its_record_is_not_let_in_again() -> None:
    home, log = sites(), SavedLog()
    drive(BoxServer(NAMES, rounds=2), InProcess(home), log=log)
    home[1] = Site("b", BoxAgent(seed=1, blobs=home[0].agent.blobs), bowl)
    rounds: list[Round] = []
    state = drive(SERVER, InProcess(home), log=log, on_round=rounds.append)
    assert state.heard == (3, 3, 2, 2)
    assert rounds[0].exchanged.failures["b"].code == "behind"


def test_books_are_kept_before_a_step_is_saved() -> None:
    order: list[str] = []
    log = SavedLog()
    log.after = lambda: order.append("save")
    drive(
        BoxServer(NAMES, rounds=1),
        InProcess(sites()),
        log=log,
        on_exchange=lambda r: order.append(f"exchange {r.serial}"),
        on_round=lambda r: order.append(f"round {r.serial}"),
    )
    assert order == ["save", "exchange 1", "save", "round 1"]


def test_a_broadcast_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from botorch_fed.federation import drive as module

    plan, made = Plan(0.7), []

    @dataclass(frozen=True)
    class Steady(BoxServer):
        def outbox(self, state: Any) -> Any:
            outbox = super().outbox(state)
            return None if outbox is None else replace(outbox, broadcasts=(plan,))

    real = module.encoded
    monkeypatch.setattr(module, "encoded", lambda t, n: (made.append(type(t)), real(t, n))[1])
    drive(Steady(NAMES, rounds=4), InProcess(sites()))
    assert made.count(Plan) == 1


def test_a_server_that_lost_its_log_stops() -> None:
    engine = InProcess(sites())
    drive(SERVER, engine, log=SavedLog())
    with pytest.raises(ProtocolError, match="All 3 agents that answer refuse to begin: 3 foreign"):
        drive(SERVER, engine)


def test_a_run_that_everybody_refuses_to_begin_stops() -> None:
    class Picky(BoxAgent):
        def check(self, *_: Any) -> None:
            raise MessageError("not with me")

    home = [Site(n, Picky(seed=0), bowl) for n in NAMES]
    with pytest.raises(ProtocolError, match="refuse to begin: 3 invalid"):
        drive(SERVER, InProcess(home))


def test_a_log_of_another_run_or_other_settings_is_refused() -> None:
    log = SavedLog()
    drive(SERVER, InProcess(sites()), log=log)
    with pytest.raises(ProtocolError, match="'other'"):
        drive(SERVER, InProcess(sites()), run="other", log=log)
    with pytest.raises(ProtocolError, match="settings"):
        drive(BoxServer(("a",), rounds=4), InProcess(sites()), log=log)
    with pytest.raises(ProtocolError, match="the log is of another party"):
        drive(SERVER, InProcess(sites()), log=cut(log, 1))
    with pytest.raises(ProtocolError, match="the log is of another party"):
        drive(SERVER, InProcess(sites()), log=twice(log))
    odd = SavedLog()
    started = log[0]
    odd.append(replace(started, state=odd.snapshot(encode(Plan(0.5)))))
    with pytest.raises(ProtocolError, match="cannot be read"):
        drive(SERVER, InProcess(sites()), log=odd)
    odd = SavedLog()
    odd.append(started)
    with pytest.raises(ProtocolError, match="missing or damaged"):
        drive(SERVER, InProcess(sites()), log=odd)


def cut(log: SavedLog, start: int) -> Log:
    """The events of a log from one on."""
    found = Log(HUB_EVENTS)
    for event in list(log)[start:]:
        found.append(event)
    return found


def twice(log: SavedLog) -> Log:
    """A log that two hubs have written to."""
    found = cut(log, 0)
    for event in log:
        found.append(event)
    return found


def test_a_hub_on_disk_writes_what_changes(tmp_path: Path) -> None:
    """A state with a large part that stays: many rounds do not write it many times."""
    large = torch.arange(50_000).double()

    @dataclass(frozen=True)
    class Heavy:
        t: int
        large: Tensor

    @dataclass(frozen=True)
    class Server:
        state_type = Heavy
        accepts = (Best,)
        fingerprint = "heavy"

        def start(self) -> Heavy:
            return Heavy(0, large)

        def outbox(self, state: Heavy) -> Outbox | None:
            return Outbox({}) if state.t < 30 else None

        def check(self, state: Heavy, sender: str, message: Any) -> None:
            raise AssertionError

        def step(self, state: Heavy, inbox: Mapping[str, Any]) -> Heavy:
            return Heavy(state.t + 1, large if state.t < 20 else large + 1)

    written = []
    real = FileStore.put

    def put(self: FileStore, name: str, data: bytes) -> None:
        written.append(len(data))
        real(self, name, data)

    with pytest.MonkeyPatch.context() as patch, FileLog(tmp_path / "hub", HUB_EVENTS) as log:
        patch.setattr(FileStore, "put", put)
        drive(Server(), lambda outgoing: Exchanged({}), log=log)
    assert sum(written) < 3 * 8 * len(large)
    assert len(written) == 31
    assert len(list((tmp_path / "hub" / "snapshots").iterdir())) == 2
    with FileLog(tmp_path / "hub", HUB_EVENTS) as log:
        end = drive(Server(), lambda outgoing: Exchanged({}), log=log)
        assert end.t == 30
        assert torch.equal(end.large, large + 1)


# ------------------------------------------------------------------ the ledger of a run


@dataclass(frozen=True)
class Paying(BoxServer):
    """Pays for every step."""

    shared_ledger: SharedLedger | None = None

    def step(self, state: Any, inbox: Mapping[str, Any]) -> Any:
        assert self.shared_ledger is not None
        self.shared_ledger.spend(Event(2.0), note=f"round {state.t}")
        return super().step(state, inbox)


def test_a_run_goes_on_with_the_ledger_that_it_has_seen(tmp_path: Path) -> None:
    home, log, books = sites(), SavedLog(), tmp_path / "books"

    def stop() -> None:
        if len(log) == 3:
            raise Crash

    log.after = stop
    with SharedLedger(books) as ledger, pytest.raises(Crash):
        drive(Paying(NAMES, 4, shared_ledger=ledger), InProcess(home), log=log)
    log.after = None
    seen = shutil.copytree(books, tmp_path / "copy")
    with SharedLedger(books) as ledger:
        assert len(ledger) == log[2].ledger.length == 3
        ledger.spend(Event(2.0), note="another run")
        end = drive(Paying(NAMES, 4, shared_ledger=ledger), InProcess(home), log=log)
        assert end.heard == (3, 3, 3, 3)
        assert ledger.releases == 5
    events = len(log)
    with SharedLedger(seen) as ledger:  # a copy that is too old
        with pytest.raises(ProtocolError, match=r"recorded 6 events .* has 3: it was cut back"):
            drive(Paying(NAMES, 4, shared_ledger=ledger), InProcess(home), log=log)
        for _ in range(9):  # as long as the true one, and another
            ledger.spend(Event(2.0))
        with pytest.raises(ProtocolError, match=r"has others: it was cut back or exchanged"):
            drive(Paying(NAMES, 4, shared_ledger=ledger), InProcess(home), log=log)
    with pytest.raises(ProtocolError, match="paid from a ledger on disk, and this study has none"):
        drive(Paying(NAMES, 4), InProcess(home), log=log)
    assert len(log) == events


# ------------------------------------------------------------------ quorum


def flaky(engine: InProcess, failures: Mapping[int, int]) -> Any:
    """The first so many attempts of a round reach nobody."""
    left = dict(failures)

    def exchange(outgoing: Outgoing) -> Exchanged:
        if left.get(outgoing.serial, 0) > 0:
            left[outgoing.serial] -= 1
            return Exchanged({})
        return engine(outgoing)

    return exchange


def test_a_round_without_quorum_is_asked_again() -> None:
    state = drive(SERVER, flaky(InProcess(sites()), {2: 2}), quorum=2, retries=2)
    assert state.heard == (3, 3, 3, 3)


def test_costs_of_all_attempts_are_counted() -> None:
    engine, attempts, rounds = InProcess(sites()), [0], []

    def forgetful(outgoing: Outgoing) -> Exchanged:
        attempts[0] += 1
        exchanged = engine(outgoing)
        return replace(exchanged, replies={}) if attempts[0] == 1 else exchanged

    drive(BoxServer(NAMES, rounds=1), forgetful, quorum=1, retries=1, on_round=rounds.append)
    once: list[Round] = []
    drive(BoxServer(NAMES, rounds=1), InProcess(sites()), on_round=once.append)
    plan = len(encode(Plan(1.0)))
    for name in NAMES:
        assert rounds[0].exchanged.bytes_up[name] == 2 * once[0].exchanged.bytes_up[name]
        down = once[0].exchanged.bytes_down[name]
        assert rounds[0].exchanged.bytes_down[name] == 2 * down - plan


def test_a_missed_quorum_stops_and_can_be_resumed() -> None:
    engine, log = InProcess(sites()), SavedLog()
    with pytest.raises(ProtocolError, match="answered by 0 of 3 agents, 2 are needed: 3 absent"):
        drive(SERVER, flaky(engine, {2: 2}), quorum=2, retries=1, log=log)
    state = drive(SERVER, engine, quorum=2, log=log)
    assert state.heard == (3, 3, 3, 3)


def test_a_quorum_is_of_those_who_are_asked() -> None:
    class Turns(BoxServer):
        """Asks one agent in every round."""

        def outbox(self, state: Any) -> Any:
            box = super().outbox(state)
            if box is None:
                return None
            name = NAMES[len(state.heard) % len(NAMES)]
            return replace(box, messages={name: box.messages[name]})

    server = Turns(NAMES, rounds=3)
    assert drive(server, InProcess(sites()), quorum=3).heard == (1, 1, 1)
    with pytest.raises(ProtocolError, match="answered by 0 of 1 agents, 1 are needed"):
        drive(server, flaky(InProcess(sites()), {2: 1}), quorum=3)


@pytest.mark.parametrize("wrong", [{"quorum": -1}, {"retries": -1}])
def test_a_quorum_counts_from_zero(wrong: dict[str, int]) -> None:
    with pytest.raises(InputDataError, match=">= 0"):
        drive(SERVER, InProcess(sites()), **wrong)


def test_who_watches_sees_the_state_after_a_round() -> None:
    rounds: list[Round] = []
    end = drive(SERVER, InProcess(sites()), on_round=rounds.append)
    assert encode(rounds[-1].state) == encode(end)
    assert [len(round_.state.heard) for round_ in rounds] == [1, 2, 3, 4]


def test_without_a_quorum_silence_is_a_round() -> None:
    state = drive(SERVER, flaky(InProcess(sites()), {2: 1}))
    assert state.heard == (3, 0, 3, 3)


# ------------------------------------------------------------------ evaluations that take long


class Kiln:
    """An objective that has a value when it is called for the `after`-th time with a point."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.calls: Counter[bytes] = Counter()

    def __call__(self, X: Tensor) -> Tensor | Pending:
        self.calls[X.numpy().tobytes()] += 1
        ready = self.calls[X.numpy().tobytes()] >= self.after
        return -(X - 0.3).square().sum(dim=-1, keepdim=True) if ready else Pending()


def lab(name: str, after: int) -> Site:
    return Site(name, BoxAgent(seed=1, per_round=1, defers=True), Kiln(after))


def test_rounds_go_on_while_one_site_evaluates() -> None:
    rounds: list[Round] = []
    labs = [lab("a", 1), lab("b", 9)]
    drive(BoxServer(("a", "b"), rounds=6), InProcess(labs), on_round=rounds.append)
    assert [round_.replied for round_ in rounds] == [("a", "b")] * 6
    assert not any(round_.exchanged.failures for round_ in rounds)
    assert len(labs[0].trials()) == 6
    statuses = [trial.status for trial in labs[1].trials()]
    assert statuses[0] == "completed"  # late, and it counts
    assert len(statuses) < 6


@pytest.mark.parametrize("idle", [0.0, 60.0])
def test_a_round_waits_for_the_first_who_has_finished(idle: float) -> None:
    labs = [lab("a", 4), lab("b", 9)]
    server = BoxServer(("a", "b"), rounds=1)
    drive(server, InProcess(labs), idle=idle, pause=0.001)
    assert len(labs[0].observations()) == (1 if idle else 0)
    assert len(labs[1].pending()) == 1


def test_waiting_ends_after_the_time_that_was_given() -> None:
    labs = [lab("a", 10**9)]
    drive(BoxServer(("a",), rounds=2), InProcess(labs), idle=0.05, pause=0.01)
    assert len(labs[0].pending()) == 1
    with pytest.raises(InputDataError, match="idle >= 0 and pause > 0"):
        drive(BoxServer(("a",), rounds=2), InProcess(labs), idle=-1.0)
