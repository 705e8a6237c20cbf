r"""The only loop there is: `respond` at a site, `drive` at the server.

Both work on bytes and keep a record that makes them repeatable. A request that comes twice is
answered by the saved reply, never by a second draw; a request of an earlier round, of another run
or with another body is refused; an observation that was made before a crash is taken from the
journal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.protocols.base import (
    Agent,
    Exchange,
    Exchanged,
    Journal,
    Objective,
    Observation,
    Pending,
    Reply,
    Request,
    Server,
    checked_values,
)
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode, encode

STATE_BYTES = 2**30  # of one's own state, which nobody else writes


@dataclass(frozen=True)
class AgentRecord:
    """What a site keeps between requests.

    Attributes:
        run: The run it takes part in.
        serial: The last request that was received.
        request: Hash of that request's bytes.
        evaluations: How many observations that request has led to.
        state: The agent's encoded state.
        reply: The reply to that request, once there is one.
    """

    run: str
    serial: int
    request: str
    evaluations: int
    state: bytes
    reply: bytes | None


def respond(
    agent: Agent[Any],
    record: bytes | None,
    request: bytes,
    objective: Objective,
    *,
    journal: Journal | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[bytes, bytes]:
    """Answer one request.

    Args:
        agent: The site's side of the protocol.
        record: What the previous call returned, or None at the beginning.
        request: The bytes that came.
        objective: The site's objective, `q x d` to `q x 1`; called only for points that are not
            in the journal.
        journal: Where observations are kept the moment they exist.
        max_bytes: Refuse longer requests.

    Returns:
        The record to store *before* the reply leaves, and the reply's bytes. A reply without a
        body says that the agent is busy: the same request may be sent again.

    Raises:
        MessageError: The request is malformed, of another run, stale, or changed since it was
            first received. The record stays as it was.
    """
    frame: Request = decode(request, Request, max_bytes=max_bytes)
    digest = content_hash(request)
    known = None if record is None else _opened(record, AgentRecord)
    if known is not None:
        _check_order(known, frame, digest)
        if known.serial == frame.serial and known.reply is not None:
            assert record is not None
            return record, known.reply
    if known is not None and known.serial == frame.serial:
        state = decode(known.state, agent.state_type, max_bytes=STATE_BYTES)
        evaluations = known.evaluations
    else:
        message = decode(frame.body, *agent.accepts, max_bytes=max_bytes)
        first = known is None
        old = agent.start() if first else _state(known, agent)
        state, evaluations = agent.receive(old, message), 0
    journal = Journal() if journal is None else journal
    asked = agent.ask(state)
    while asked is not None and not isinstance(asked, Pending):
        observation = journal.find(frame.run, frame.serial, evaluations)
        if observation is None:
            Y = checked_values(asked, objective(asked))
            observation = Observation(frame.run, frame.serial, evaluations, asked, Y)
            journal.record(observation)
        elif not observation.X.equal(asked):
            raise ProtocolError(
                "The journal holds another point than the agent asks for: it belongs to another "
                "run, or the agent's settings have changed."
            )
        state = agent.tell(state, observation.X, observation.Y)
        evaluations += 1
        asked = agent.ask(state)
    if isinstance(asked, Pending):
        body = None
    else:
        state, message = agent.reply(state)
        body = encode(message, max_bytes=max_bytes)
    reply = encode(Reply(frame.run, frame.serial, body), max_bytes=max_bytes + 1024)
    new = AgentRecord(
        run=frame.run,
        serial=frame.serial,
        request=digest,
        evaluations=evaluations,
        state=encode(state, max_bytes=STATE_BYTES),
        reply=None if body is None else reply,
    )
    return encode(new, max_bytes=STATE_BYTES), reply


def _state(known: AgentRecord | None, agent: Agent[Any]) -> Any:
    assert known is not None
    return decode(known.state, agent.state_type, max_bytes=STATE_BYTES)


def _check_order(known: AgentRecord, frame: Request, digest: str) -> None:
    if frame.run != known.run:
        raise MessageError("The request is of another run than this site takes part in.")
    if frame.serial < known.serial:
        raise MessageError(
            f"The request is stale: round {frame.serial}, this site has seen {known.serial}."
        )
    if frame.serial == known.serial and digest != known.request:
        raise MessageError(f"Round {frame.serial} was requested before, with another content.")


@dataclass(frozen=True)
class ServerRecord:
    """What the server keeps between rounds.

    Attributes:
        run: The run's name.
        serial: The round that is under way or was the last.
        state: The server's encoded state before that round's step.
    """

    run: str
    serial: int
    state: bytes


def drive(
    server: Server[Any],
    exchange: Exchange,
    *,
    run: str,
    record: bytes | None = None,
    save: Callable[[bytes], None] | None = None,
    on_round: Callable[[int, Exchanged], None] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Any:
    """Run a protocol to its end and return the server's last state.

    Args:
        server: The server's side of the protocol.
        exchange: Carries a round's requests and brings the replies; who does not answer is
            missing from them.
        run: The run's name; replies of other runs are refused.
        record: To resume, the last record that was saved.
        save: Called with a record *before* the messages it describes leave.
        on_round: Called after every round with its number and what came back.
        max_bytes: Refuse longer replies.

    A malformed reply counts as none: its sender is reported among the failures.
    """
    if record is None:
        serial, state = 0, server.start()
    else:
        known = _opened(record, ServerRecord)
        if known.run != run:
            raise ProtocolError(f"The record is of run {known.run!r}, not {run!r}.")
        serial = known.serial - 1
        state = decode(known.state, server.state_type, max_bytes=STATE_BYTES)
    while (outbox := server.outbox(state)) is not None:
        serial += 1
        if save is not None:
            saved = ServerRecord(run, serial, encode(state, max_bytes=STATE_BYTES))
            save(encode(saved, max_bytes=STATE_BYTES))
        requests = {
            agent: encode(Request(run, serial, encode(message)), max_bytes=max_bytes + 1024)
            for agent, message in outbox.items()
        }
        exchanged = exchange(requests)
        inbox, failures = {}, dict(exchanged.failures)
        for agent, data in exchanged.replies.items():
            try:
                if agent not in requests:
                    raise MessageError("nobody asked this agent")
                body = _reply_body(data, run, serial, max_bytes=max_bytes)
                if body is None:
                    failures[agent] = "still busy"
                else:
                    inbox[agent] = decode(body, *server.accepts, max_bytes=max_bytes)
            except MessageError as error:
                failures[agent] = str(error)
        state = server.step(state, inbox)
        if on_round is not None:
            on_round(serial, replace(exchanged, failures=failures))
    return state


def _reply_body(data: bytes, run: str, serial: int, *, max_bytes: int) -> bytes | None:
    reply: Reply = decode(data, Reply, max_bytes=max_bytes + 1024)
    if (reply.run, reply.serial) != (run, serial):
        raise MessageError(f"The reply is not to round {serial} of this run.")
    return reply.body


def _opened(record: bytes, cls: type) -> Any:
    try:
        return decode(record, cls, max_bytes=STATE_BYTES)
    except MessageError as error:
        raise ProtocolError(f"The stored record cannot be read: {error}") from error
