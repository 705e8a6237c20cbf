"""The loop: order, repetition, crashes, absence and bad bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import FederatedError, MessageError, ProtocolError
from botorch_fed.protocols.base import Exchanged, FileJournal, Journal, Reply, Request
from botorch_fed.protocols.drive import AgentRecord, drive, respond
from botorch_fed.wire.codec import decode, encode
from test.protocols.search import Ask, Best, BoxAgent, BoxServer

NAMES = ("a", "b", "c")
CENTRE = torch.full((2,), 0.5, dtype=torch.float64)


def objective(X: Tensor) -> Tensor:
    return -((X - 0.3) ** 2).sum(dim=-1, keepdim=True)


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, X: Tensor) -> Tensor:
        self.calls += 1
        return objective(X)


def engine(**kwargs: Any) -> InProcess:
    agents = {name: BoxAgent(seed) for seed, name in enumerate(NAMES)}
    return InProcess(agents, dict.fromkeys(NAMES, objective), **kwargs)


def server(rounds: int = 6) -> BoxServer:
    return BoxServer(NAMES, rounds)


def request(serial: int = 1, run: str = "r", width: float = 1.0) -> bytes:
    return encode(Request(run, serial, encode(Ask(CENTRE, width))))


# ------------------------------------------------------------------ whole runs


def test_a_run_is_reproducible_and_gets_somewhere() -> None:
    ends = [drive(server(), engine(), run="r") for _ in range(2)]
    assert encode(ends[0]) == encode(ends[1])
    assert ends[0].best.value > -1e-2
    assert ends[0].heard == (3,) * 6


def test_only_bytes_cross() -> None:
    seen: list[bytes] = []
    inner = engine()

    def spying(outbox: Mapping[str, bytes]) -> Exchanged:
        exchanged = inner(outbox)
        seen.extend(outbox.values())
        seen.extend(exchanged.replies.values())
        return exchanged

    drive(server(), spying, run="r")
    assert all(type(data) is bytes for data in seen)
    assert sum(map(len, seen)) == inner.bytes_up + inner.bytes_down


@pytest.mark.parametrize("stop", range(6))
@pytest.mark.parametrize("answered", [False, True])
def test_stop_and_resume_at_any_round_changes_nothing(stop: int, answered: bool) -> None:
    expected = encode(drive(server(), engine(), run="r"))

    class Crash(Exception):
        pass

    saved: list[bytes] = []
    first = engine()

    def crashing(outbox: Mapping[str, bytes]) -> Exchanged:
        if len(saved) == stop + 1:
            if answered:
                first(outbox)  # the agents have answered, but the server never heard
            raise Crash
        return first(outbox)

    with pytest.raises(Crash):
        drive(server(), crashing, run="r", save=saved.append)
    second = engine(records=first.records)
    assert encode(drive(server(), second, run="r", record=saved[-1])) == expected
    with pytest.raises(ProtocolError, match="is of run 'r', not 'other'"):
        drive(server(), second, run="other", record=saved[-1])
    with pytest.raises(ProtocolError, match="cannot be read"):
        drive(server(), second, run="r", record=saved[-1][:-1])


def test_absence_is_an_ordinary_event() -> None:
    reports: list[Exchanged] = []
    late = engine(absent=lambda name, t: (name, t) in {("a", 2), ("b", 2), ("c", 2), ("a", 4)})
    end = drive(server(), late, run="r", on_round=lambda t, e: reports.append(e))
    assert end.heard == (3, 0, 3, 2, 3, 3)
    assert reports[1].failures == dict.fromkeys(NAMES, "absent")
    assert reports[3].failures == {"a": "absent"}


def test_a_busy_agent_is_waited_for_by_nobody() -> None:
    agents = {"a": BoxAgent(0, busy_rounds=(2,)), "b": BoxAgent(1), "c": BoxAgent(2)}
    reports: list[Exchanged] = []
    busy = InProcess(agents, dict.fromkeys(NAMES, objective))
    end = drive(server(3), busy, run="r", on_round=lambda t, e: reports.append(e))
    assert end.heard == (3, 2, 3)
    assert reports[1].failures == {"a": "still busy"}


@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (lambda data: b"nonsense", "are no message"),
        (lambda data: data[:-1], "are no message"),
        (lambda data: encode(Reply("r", 99, b"")), "not to round"),
        (lambda data: encode(Reply("other", 1, b"")), "not to round"),
        (lambda data: encode(Reply("r", 1, b"x")), "are no message"),
        (lambda data: encode(Reply("r", 1, encode(Ask(CENTRE, 1.0)))), "Expected Best here"),
    ],
)
def test_a_bad_reply_counts_as_none(spoil: Any, failure: str) -> None:
    reports: list[Exchanged] = []
    inner = engine()

    def hostile(outbox: Mapping[str, bytes]) -> Exchanged:
        replies = dict(inner(outbox).replies)
        replies["b"] = spoil(replies["b"])
        replies["stranger"] = replies["a"]
        return Exchanged(replies)

    end = drive(server(1), hostile, run="r", on_round=lambda t, e: reports.append(e))
    assert end.heard == (2,)
    assert failure in reports[0].failures["b"]
    assert reports[0].failures["stranger"] == "nobody asked this agent"


def test_engine_wants_an_objective_for_every_agent() -> None:
    with pytest.raises(FederatedError, match="needs an objective"):
        InProcess({"a": BoxAgent(0)}, {})
    assert engine()({"z": request()}).failures == {"z": "unknown agent"}


# ------------------------------------------------------------------ one request


def test_a_repeated_request_returns_the_saved_reply() -> None:
    counting = Counting()
    record, reply = respond(BoxAgent(0), None, request(), counting)
    assert counting.calls == 3
    again, same = respond(BoxAgent(0), record, request(), counting)
    assert (again, same) == (record, reply)
    assert counting.calls == 3


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (request(1), "stale: round 1, this site has seen 2"),
        (request(2, width=0.5), "requested before, with another content"),
        (request(3, run="other"), "another run"),
        (b"", "are no message"),
        (request(3)[:-1], "are no message"),
        (encode(Best(CENTRE, 1.0)), "Expected Request here"),
        (encode(Request("r", 3, encode(Best(CENTRE, 1.0)))), "Expected Ask here"),
    ],
)
def test_requests_that_are_refused(bad: bytes, match: str) -> None:
    record, _ = respond(BoxAgent(0), None, request(1), objective)
    record, _ = respond(BoxAgent(0), record, request(2), objective)
    with pytest.raises(MessageError, match=match):
        respond(BoxAgent(0), record, bad, objective)
    respond(BoxAgent(0), record, request(3), objective)  # nothing was lost


def test_a_request_may_not_be_too_long() -> None:
    with pytest.raises(MessageError, match="exceeds the limit of 50"):
        respond(BoxAgent(0), None, request(), objective, max_bytes=50)


@pytest.mark.parametrize("crash_at", [0, 1, 2])
@pytest.mark.parametrize("on_disk", [False, True])
def test_no_observation_is_lost_or_made_twice(crash_at: int, on_disk: bool, tmp_path: Any) -> None:
    def opened() -> Journal:
        return FileJournal(tmp_path / "journal") if on_disk else memory

    memory = Journal()
    expected = respond(BoxAgent(0), None, request(), objective)
    counting = Counting()

    def failing(X: Tensor) -> Tensor:
        if counting.calls == crash_at:
            raise RuntimeError("power cut")
        return counting(X)

    with pytest.raises(RuntimeError, match="power cut"):
        respond(BoxAgent(0), None, request(), failing, journal=opened())
    assert respond(BoxAgent(0), None, request(), counting, journal=opened()) == expected
    assert counting.calls == 3
    assert len(opened()) == 3


def test_a_journal_of_other_settings_is_refused() -> None:
    journal = Journal()
    respond(BoxAgent(0), None, request(), objective, journal=journal)
    with pytest.raises(ProtocolError, match="another point than the agent asks for"):
        respond(BoxAgent(1), None, request(), objective, journal=journal)


def test_a_pending_agent_goes_on_where_it_stopped() -> None:
    counting = Counting()
    busy, free = BoxAgent(0, busy_rounds=(1,)), BoxAgent(0)
    record, reply = respond(busy, None, request(), counting)
    assert decode(reply, Reply).body is None
    record, reply = respond(busy, record, request(), counting)
    assert decode(reply, Reply).body is None
    assert counting.calls == 0
    assert respond(free, record, request(), counting) == respond(free, None, request(), objective)
    # Or the server has gone on without it.
    record, _ = respond(busy, record, request(2), counting)
    assert decode(record, AgentRecord).serial == 2


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        (lambda X: None, "got NoneType"),
        (lambda X: X, r"must return a tensor of shape \(1, 1\) for 1 points, got \(1, 2\)"),
        (lambda X: torch.full((1, 1), torch.nan), "returned NaN or infinity"),
    ],
)
def test_what_an_objective_may_not_return(broken: Any, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        respond(BoxAgent(0), None, request(), broken)


def test_an_objective_may_return_a_vector() -> None:
    flat = respond(BoxAgent(0), None, request(), lambda X: objective(X).squeeze(-1))
    assert flat == respond(BoxAgent(0), None, request(), objective)
