r"""The server's loop, the only one there is.

A server's state is saved after every step, before anything else happens: what a step drew is never
drawn again, and a round that a crash interrupted is asked again with the same bytes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.protocols.base import (
    REASONS,
    AgentId,
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
from botorch_fed.protocols.site import FRAME_BYTES, STATE_BYTES
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode, encode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerRecord:
    """What the server keeps between rounds.

    Attributes:
        run: The run's name.
        instance: A random name of this start of the run.
        fingerprint: Hash of the server's settings.
        serial: The last round that is finished.
        state: The server's encoded state after it.
    """

    run: str
    instance: str
    fingerprint: str
    serial: int
    state: bytes


@dataclass(frozen=True)
class Round:
    """A finished round, for those who watch.

    Attributes:
        serial: Its number, from 1.
        exchanged: What came back, refusals and malformed replies among the failures.
        heard: Whose replies counted.
    """

    serial: int
    exchanged: Exchanged
    heard: tuple[AgentId, ...]


def drive(
    server: Server[Any],
    exchange: Exchange,
    *,
    run: str = "run",
    record: bytes | None = None,
    save: Callable[[bytes], None] | None = None,
    on_round: Callable[[Round], None] | None = None,
    quorum: int = 0,
    retries: int = 0,
    max_bytes: int = MAX_BYTES,
) -> Any:
    """Run a protocol to its end and return the server's last state.

    Args:
        server: The server's side of the protocol.
        exchange: Carries a round's requests and brings the replies.
        run: The run's name, which the sites know as well.
        record: To resume, the last record that was saved.
        save: Called with a record before the first message leaves and after every step.
        on_round: Called after every round.
        quorum: The least number of replies with which a round that asks anybody may go on.
        retries: How often such a round is asked again before the run stops.
        max_bytes: Refuse longer messages.

    Raises:
        ProtocolError: The quorum was missed; or most of those who answered know a later round or
            another start of the run, which means that the server's record is too old. The record
            that was saved last is still good.
    """
    if record is None:
        known = ServerRecord(run, secrets.token_hex(16), server.fingerprint, 0, b"")
        state = server.start()
        known = _saved(known, state, save)
    else:
        known = _opened(record, run, server)
        state = decode(known.state, server.state_type, max_bytes=STATE_BYTES)
    cache: list[tuple[Any, bytes, str]] = []
    while (outbox := server.outbox(state)) is not None:
        cache = _encoded_broadcasts(outbox, cache, max_bytes=max_bytes)
        outgoing = _outgoing(known, outbox, cache, max_bytes=max_bytes)
        for attempt in range(retries + 1):
            inbox, exchanged = _exchange(server, state, known, outgoing, exchange, max_bytes)
            _check_age(known, inbox, exchanged)
            if not outgoing.requests or len(inbox) >= quorum:
                break
            if attempt == retries:
                raise ProtocolError(
                    f"Round {outgoing.serial} was answered by {len(inbox)} of "
                    f"{len(outgoing.requests)} agents, {quorum} are needed: "
                    f"{_summary(exchanged.failures)}. Resume when they are back."
                )
        state = server.step(state, inbox)
        known = _saved(replace(known, serial=outgoing.serial), state, save)
        logger.info(
            "round %d: %d of %d agents heard", known.serial, len(inbox), len(outgoing.requests)
        )
        if on_round is not None:
            on_round(Round(known.serial, exchanged, tuple(sorted(inbox))))
    return state


def _encoded_broadcasts(
    outbox: Outbox, cache: list[tuple[Any, bytes, str]], *, max_bytes: int
) -> list[tuple[Any, bytes, str]]:
    result = []
    for broadcast in outbox.broadcasts:
        old = next((entry for entry in cache if entry[0] is broadcast), None)
        if old is None:
            data = _own(broadcast, max_bytes)
            old = broadcast, data, content_hash(data)
        result.append(old)
    return result


def _outgoing(
    known: ServerRecord, outbox: Outbox, blobs: list[tuple[Any, bytes, str]], *, max_bytes: int
) -> Outgoing:
    serial = known.serial + 1
    hashes = tuple(digest for _, _, digest in blobs)
    requests = {}
    for agent, message in outbox.messages.items():
        body = _own(message, max_bytes)
        frame = Request(known.run, known.instance, agent, serial, hashes, body)
        requests[agent] = encode(frame, max_bytes=max_bytes + FRAME_BYTES)
    return Outgoing(serial, requests, {digest: data for _, data, digest in blobs})


def _exchange(
    server: Server[Any],
    state: Any,
    known: ServerRecord,
    outgoing: Outgoing,
    exchange: Exchange,
    max_bytes: int,
) -> tuple[dict[AgentId, Any], Exchanged]:
    """Carry a round and sort what came back; one agent's mistake is its own only."""
    exchanged = exchange(outgoing)
    inbox: dict[AgentId, Any] = {}
    failures = dict(exchanged.failures)
    for agent, data in exchanged.replies.items():
        if agent not in outgoing.requests:
            failures[agent] = Failure("unasked")
            continue
        expected = (
            known.run,
            known.instance,
            agent,
            outgoing.serial,
            content_hash(outgoing.requests[agent]),
        )
        try:
            answer = decode(data, Reply, Refusal, max_bytes=max_bytes + FRAME_BYTES)
            found = answer.run, answer.instance, answer.agent, answer.serial, answer.request
            if found != expected:
                raise MessageError("its reply is to another request")
            if isinstance(answer, Refusal):
                failures[agent] = Failure(answer.code)
                continue
            message = decode(answer.body, *server.accepts, max_bytes=max_bytes)
            server.check(state, agent, message)
        except MessageError as error:
            failures[agent] = Failure("malformed", str(error))
            continue
        inbox[agent] = message
    for agent in outgoing.requests:
        if agent not in inbox and agent not in failures:
            failures[agent] = Failure("absent")
    return inbox, replace(exchanged, failures=failures)


def _check_age(known: ServerRecord, inbox: Mapping[AgentId, Any], exchanged: Exchanged) -> None:
    """Stop if most of those who answered say that this server is behind them."""
    codes = [failure.code for failure in exchanged.failures.values()]
    behind = sum(code in ("stale", "changed", "foreign") for code in codes)
    if behind > len(inbox):
        raise ProtocolError(
            f"{behind} agents refuse round {known.serial + 1} and {len(inbox)} accept it: "
            f"{_summary(exchanged.failures)}. The server's record is older than the federation, or "
            "the run was started anew under an old name: restore the newest record, or choose "
            "another name for the run."
        )


def _summary(failures: Mapping[AgentId, Failure]) -> str:
    codes = [failure.code for failure in failures.values()]
    parts = [
        f"{codes.count(code)} {code} ({REASONS.get(code, code)})" for code in sorted(set(codes))
    ]
    return ", ".join(parts) or "no failures"


def _saved(known: ServerRecord, state: Any, save: Callable[[bytes], None] | None) -> ServerRecord:
    if save is None:
        return known
    known = replace(known, state=_own(state, STATE_BYTES))
    save(encode(known, max_bytes=2 * STATE_BYTES))
    return known


def _opened(record: bytes, run: str, server: Server[Any]) -> ServerRecord:
    try:
        known: ServerRecord = decode(record, ServerRecord, max_bytes=2 * STATE_BYTES)
    except MessageError as error:
        raise ProtocolError(f"The server's record cannot be read: {error}") from error
    if (known.run, known.fingerprint) != (run, server.fingerprint):
        raise ProtocolError(
            f"The record is of run {known.run!r} with settings {known.fingerprint[:12]}…, not of "
            f"{run!r} with {server.fingerprint[:12]}…: use the settings that it was made with."
        )
    return known


def _own(thing: Any, max_bytes: int) -> bytes:
    try:
        return encode(thing, max_bytes=max_bytes)
    except MessageError as error:
        raise ProtocolError(
            f"The server cannot encode its own {type(thing).__name__}: {error}"
        ) from error
