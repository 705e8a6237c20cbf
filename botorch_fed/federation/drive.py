r"""The server's loop.

The server's state is written into its log after every step, before any other action: no random
draw of a step is repeated, and an interrupted round is repeated with the same bytes.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from botorch.exceptions.errors import InputDataError

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.anchors import MAX_ANCHORS, Anchors
from botorch_fed.federation.base import (
    FRAME_BYTES,
    REASONS,
    AgentId,
    Anchored,
    Exchange,
    Exchanged,
    Failure,
    Outbox,
    Outgoing,
    Refusal,
    Reply,
    Request,
    Server,
)
from botorch_fed.federation.contribution import carries
from botorch_fed.federation.hub import HubLog, HubRecord, encoded
from botorch_fed.federation.site import one_thread, request_content, threads
from botorch_fed.storage.log import Log
from botorch_fed.storage.store import MemoryStore
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode, encode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """A finished round, as callbacks get it.

    Attributes:
        serial: Its number, from 1.
        exchanged: The results, with refusals and malformed replies among the failures.
        replied: The agents whose replies were accepted.
        state: The server's state after the round.
        sent: The agents in `replied` whose replies carried a message.
        told: The agents in `replied` whose requests carried a message.
        broadcasts: Hashes of the broadcasts.
    """

    serial: int
    exchanged: Exchanged
    replied: tuple[AgentId, ...]
    state: Any = field(repr=False)
    sent: tuple[AgentId, ...] = ()
    told: tuple[AgentId, ...] = ()
    broadcasts: tuple[str, ...] = ()


def drive(
    server: Server[Any],
    exchange: Exchange,
    *,
    run: str = "run",
    log: Log | None = None,
    on_exchange: Callable[[Round], None] | None = None,
    on_round: Callable[[Round], None] | None = None,
    quorum: int = 0,
    retries: int = 0,
    idle: float = 0.0,
    pause: float = 1.0,
    max_bytes: int = MAX_BYTES,
    anchors: Anchors | None = None,
) -> Any:
    """Run a protocol to its end and return the server's last state.

    Args:
        server: The server's side of the protocol.
        exchange: Carries the requests of a round to the agents and returns the replies.
        run: The run's name, as the sites have it.
        log: The server's log of `HUB_EVENTS`; a run continues at the end of its log. None for a
            run that is never resumed.
        on_exchange: Called after every round, *before* its step is in the log, for records that
            must not miss a round. After a crash in between, the round is repeated.
        on_round: Called after every round, when its step is in the log.
        quorum: The least number of replies of a complete round, or the number of its agents if
            that is smaller.
        retries: The number of immediate repetitions of a round without a quorum, before the run
            stops.
        idle: Seconds that a round waits while evaluations are open and none is finished. One
            finished evaluation ends the wait; the other agents reply with their present data, and
            later rounds use their evaluations.
        pause: Seconds between two requests to a busy agent.
        max_bytes: The longest message that is accepted.
        anchors: Anchors of the sites' ledgers, of this run and of earlier ones; default none.

    Raises:
        ProtocolError: The quorum was missed; or an agent proves that this server has asked it in a
            later round, so that the server's log is too old; or in the first round all agents
            that answer belong to another start of the run. The log stays valid.
    """
    if min(quorum, retries) < 0:
        raise InputDataError(f"Expected quorum >= 0 and retries >= 0, got {quorum} and {retries}.")
    if not (idle >= 0 and pause > 0):
        raise InputDataError(f"Expected idle >= 0 and pause > 0 seconds, got {idle} and {pause}.")
    with one_thread() as own:

        def carry(outgoing: Outgoing) -> Exchanged:
            with threads(own):
                return exchange(outgoing)

        hub = HubLog(server, run, log)
        longest = min(getattr(server, "reply_bytes", max_bytes), max_bytes)
        store = Anchors(MemoryStore()) if anchors is None else anchors
        cache: list[tuple[Any, bytes, str]] = []
        while (outbox := server.outbox(hub.state)) is not None:
            record = hub.record
            cache = _encoded_broadcasts(outbox, cache, max_bytes=max_bytes)
            outgoing = _outgoing(record, outbox, cache, max_bytes=max_bytes, ledgers=store.all())
            outgoing = replace(outgoing, most=longest + FRAME_BYTES)
            past: Exchanged | None = None
            for attempt in range(retries + 1):
                inbox, exchanged = _finished(
                    partial(
                        _exchange,
                        server,
                        hub.state,
                        record,
                        exchange=carry,
                        max_bytes=longest,
                        anchors=store,
                    ),
                    outgoing,
                    idle=idle,
                    pause=pause,
                )
                exchanged = past = exchanged if past is None else _with_costs(exchanged, past)
                needed = min(quorum, len(outgoing.requests))
                if len(inbox) >= needed:
                    break
                if attempt == retries:
                    raise ProtocolError(
                        f"Round {outgoing.serial} was answered by {len(inbox)} of "
                        f"{len(outgoing.requests)} agents, {needed} are needed: "
                        f"{_summary(exchanged.failures)}. Resume when they are online."
                    )
            state = server.step(hub.state, inbox)
            round_ = Round(
                outgoing.serial,
                exchanged,
                tuple(sorted(inbox)),
                state,
                sent=tuple(sorted(name for name, message in inbox.items() if carries(message))),
                told=tuple(sorted(filter(lambda name: carries(outbox.messages[name]), inbox))),
                broadcasts=tuple(outgoing.blobs),
            )
            if on_exchange is not None:
                on_exchange(round_)
            hub.step(outgoing.serial, outgoing.requests, inbox, state)
            logger.info(
                "round %d: %d of %d agents replied",
                outgoing.serial,
                len(inbox),
                len(outgoing.requests),
            )
            if on_round is not None:
                on_round(round_)
        return hub.state


class Inbox(dict[AgentId, Any]):
    """The messages of a round by agent.

    Attributes:
        open: The agents whose message was made before their evaluation of this round was finished.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open: set[AgentId] = set()


def _finished(
    ask: Callable[[Outgoing], tuple[Inbox, Exchanged]],
    outgoing: Outgoing,
    *,
    idle: float,
    pause: float,
) -> tuple[Inbox, Exchanged]:
    """A round: after the first finished evaluation, busy agents reply with their present data."""
    end = time.monotonic() + idle
    inbox, exchanged = ask(outgoing)
    while (busy := _busy(exchanged)) and not inbox and (left := end - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        inbox, again = ask(outgoing)
        exchanged = _with_costs(again, exchanged)
    if not busy:
        return inbox, exchanged
    requests = {agent: outgoing.requests[agent] for agent in busy}
    deferred, again = ask(replace(outgoing, requests=requests, defer=True))
    inbox.open |= deferred.open
    inbox.update(deferred)
    failures = {**exchanged.failures, **again.failures}
    return inbox, replace(
        _with_costs(again, exchanged),
        replies={**exchanged.replies, **again.replies},
        failures={agent: why for agent, why in failures.items() if agent not in inbox},
    )


def _busy(exchanged: Exchanged) -> list[AgentId]:
    return [agent for agent, failure in exchanged.failures.items() if failure.code == "busy"]


def _encoded_broadcasts(
    outbox: Outbox, cache: list[tuple[Any, bytes, str]], *, max_bytes: int
) -> list[tuple[Any, bytes, str]]:
    result = []
    for broadcast in outbox.broadcasts:
        old = next((entry for entry in cache if entry[0] is broadcast), None)
        if old is None:
            data = encoded(broadcast, max_bytes)
            old = broadcast, data, content_hash(data)
        result.append(old)
    return result


def _outgoing(
    record: HubRecord,
    outbox: Outbox,
    blobs: list[tuple[Any, bytes, str]],
    *,
    max_bytes: int,
    ledgers: tuple[Anchored, ...] = (),
) -> Outgoing:
    serial = record.serial + 1
    hashes = tuple(digest for _, _, digest in blobs)
    requests = {}
    for agent, message in outbox.messages.items():
        body = encoded(message, max_bytes)
        asked, replied = record.asked.get(agent, 0), record.replied.get(agent, 0)
        run, instance = record.started.run, record.started.instance
        tag = "0" * 64
        frame = Request(run, instance, agent, serial, asked, replied, hashes, body, tag, ledgers)
        frame = replace(frame, tag=record.tag(agent, serial, request_content(frame)))
        requests[agent] = encode(frame, max_bytes=max_bytes + FRAME_BYTES)
    return Outgoing(serial, requests, {digest: data for _, data, digest in blobs})


def _exchange(
    server: Server[Any],
    state: Any,
    record: HubRecord,
    outgoing: Outgoing,
    *,
    exchange: Exchange,
    max_bytes: int,
    anchors: Anchors | None = None,
) -> tuple[Inbox, Exchanged]:
    """Carry a round and check the replies; an invalid reply fails its sender only."""
    exchanged = exchange(outgoing)
    inbox = Inbox()
    failures = {agent: Failure("unasked") for agent in exchanged.replies.keys() - outgoing.requests}
    strangers = 0
    for agent, request in outgoing.requests.items():  # in the order of the requests
        data = exchanged.replies.get(agent)
        if data is None:
            failures[agent] = exchanged.failures.get(agent, Failure("absent"))
            continue
        try:
            answer = decode(data, Reply, Refusal, max_bytes=max_bytes + FRAME_BYTES)
            if not _is_about(answer, record, agent, outgoing.serial, request):
                raise MessageError("its reply is to another request")
        except MessageError as error:
            failures[agent] = Failure("malformed", str(error))
            continue
        if isinstance(answer, Refusal):
            _check_age(record, agent, answer, content_of(request))
            strangers += answer.code in ("foreign", "invalid")
            failures[agent] = Failure(answer.code)
            continue
        try:
            message = decode(answer.body, *server.accepts, max_bytes=max_bytes)
            server.check(state, agent, message)
        except MessageError as error:
            failures[agent] = Failure("malformed", str(error))
        except Exception as error:  # a hostile reply may make a check raise anything
            logger.exception("the reply of %r cannot be checked", agent)
            failures[agent] = Failure("malformed", type(error).__name__)
        else:
            if anchors is not None:
                anchors.hear(agent, answer.ledgers[:MAX_ANCHORS])
            inbox[agent] = message
            inbox.open |= {agent} if answer.open else set()
    silent = ("absent", "unknown")  # agents that are busy or have failed take part
    present = len(exchanged.replies.keys() & outgoing.requests) + sum(
        agent not in exchanged.replies and failure.code not in silent
        for agent, failure in exchanged.failures.items()
    )
    if strangers and strangers == present and not record.replied:
        raise ProtocolError(
            f"All {strangers} agents that answer refuse to begin: {_summary(failures)}. If they "
            "take part in another start of this run, restore the server's log or choose another "
            "name for the run; if the request does not fit, their logs say why."
        )
    return inbox, replace(exchanged, failures=failures)


def _is_about(
    answer: Reply | Refusal, record: HubRecord, agent: AgentId, serial: int, request: bytes
) -> bool:
    """Whether an answer is to this request, which only this agent was sent."""
    digest = content_hash(request)
    if isinstance(answer, Reply):
        return answer.request == bytes.fromhex(digest)
    subject = answer.run, answer.instance, answer.agent, answer.serial, answer.request
    started = record.started
    return subject == (started.run, started.instance, agent, serial, digest)


def content_of(request: bytes) -> str:
    """Hash of a request's content."""
    frame: Request = decode(request, Request, max_bytes=len(request))
    return request_content(frame)


def _check_age(record: HubRecord, agent: AgentId, refusal: Refusal, content: str) -> None:
    """Stop if an agent proves, by this server's seal, that the server sent it a later request."""
    if refusal.code not in ("stale", "changed"):
        return
    later = refusal.last > record.asked.get(agent, 0) and refusal.last != refusal.serial
    other = refusal.last == refusal.serial and refusal.content != content
    sealed = hmac.compare_digest(
        record.tag(agent, refusal.last, refusal.content).encode(), refusal.proof.encode()
    )
    if sealed and (later or other):
        raise ProtocolError(
            f"Agent {agent!r} proves that this server has asked it in round {refusal.last} already "
            f"and is now in round {refusal.serial}: the server's log is older than the "
            "federation. Restore the newest copy of it."
        )


def _with_costs(exchanged: Exchanged, past: Exchanged) -> Exchanged:
    """The last attempt of a round, with the costs of all attempts."""

    def total(new: Mapping[AgentId, Any], old: Mapping[AgentId, Any]) -> dict[AgentId, Any]:
        return {agent: new.get(agent, 0) + old.get(agent, 0) for agent in {**old, **new}}

    return replace(
        exchanged,
        bytes_down=total(exchanged.bytes_down, past.bytes_down),
        bytes_up=total(exchanged.bytes_up, past.bytes_up),
        cpu_seconds=total(exchanged.cpu_seconds, past.cpu_seconds),
    )


def _summary(failures: Mapping[AgentId, Failure]) -> str:
    codes = [failure.code for failure in failures.values()]
    parts = [
        f"{codes.count(code)} {code} ({REASONS.get(code, code)})" for code in sorted(set(codes))
    ]
    return ", ".join(parts) or "no failures"
