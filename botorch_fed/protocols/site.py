r"""A site: one request in, one reply out, whatever happens in between.

    request -> checked -> received -> RECORD -> asked -> evaluated -> JOURNAL -> told
            -> … -> reply drawn -> RECORD -> JOURNAL (released) -> reply

What stands in capitals is on disk before the next arrow. Hence, for a process that is killed
anywhere: no observation is lost or paid for twice, no reply is drawn twice, and a record that was
restored from an older copy is noticed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from botorch_fed.errors import BudgetExceeded, MessageError, ProtocolError
from botorch_fed.protocols.base import (
    Agent,
    AgentId,
    Objective,
    Pending,
    Refusal,
    RefusalCode,
    Reply,
    Request,
)
from botorch_fed.protocols.store import Journal, MemoryStore, Observation, Released, Store
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode, encode

FRAME_BYTES = 64 * 1024  # what a frame may add to its body
STATE_BYTES = 2**30  # of one's own state, which nobody else writes
RECORD = "record"  # its name in the store


@dataclass(frozen=True)
class SiteRecord:
    """What a site keeps between requests.

    Attributes:
        run: The run it takes part in.
        instance: The start of that run.
        agent: Its name.
        fingerprint: Hash of its settings.
        serial: The last request that was received.
        request: Hash of that request's bytes.
        broadcasts: The public blobs that were in force.
        evaluating: Whether the objective has started on a point and not finished.
        state: The agent's encoded state, after that request or after its reply.
        reply: The reply to that request, once there is one.
    """

    run: str
    instance: str
    agent: AgentId
    fingerprint: str
    serial: int
    request: str
    broadcasts: tuple[str, ...]
    evaluating: bool
    state: bytes
    reply: bytes | None

    @property
    def address(self) -> tuple[str, str, int, str]:
        """Where its observations lie in the journal."""
        return self.run, self.instance, self.serial, self.request


class _Refused(Exception):
    def __init__(self, code: RefusalCode) -> None:
        self.code: RefusalCode = code


class Site:
    """One agent with its objective and what it must not lose.

    Args:
        name: The agent's name, by which the server addresses it.
        agent: The site's side of the protocol.
        objective: `q x d` points to `q x 1` values, or `Pending` while it is running: then it is
            called again with the same points until it has them.
        run: The run's name, agreed with the server.
        store: Where the record is kept; default in memory.
        journal: Where observations are kept the moment they exist; default in memory.
        max_bytes: Refuse longer messages.
    """

    def __init__(
        self,
        name: AgentId,
        agent: Agent[Any],
        objective: Objective,
        *,
        run: str = "run",
        store: Store | None = None,
        journal: Journal | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.name = name
        self.agent = agent
        self.run = run
        self.journal = Journal() if journal is None else journal
        self._objective = objective
        self._store = MemoryStore() if store is None else store
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._record = self._load()

    def __repr__(self) -> str:
        return f"Site({self.name!r}, run={self.run!r}, round={self.serial})"

    @property
    def serial(self) -> int:
        """The last round it has seen, 0 at the beginning."""
        return 0 if self._record is None else self._record.serial

    @property
    def broadcasts(self) -> tuple[str, ...]:
        """Hashes of the blobs its state may refer to."""
        return () if self._record is None else self._record.broadcasts

    @property
    def state(self) -> Any:
        """The agent's state as it was last saved."""
        record = self._record
        return self.agent.start() if record is None else self._decoded(record)

    def respond(self, request: bytes) -> bytes:
        """Answer one request, by a `Reply` or a `Refusal`.

        The request's broadcasts must be in the agent's `blobs` before.

        Raises:
            ProtocolError: The site itself cannot go on; nothing was lost.
            Exception: Whatever the objective raises. The request may be repeated.
        """
        with self._lock:
            digest = content_hash(request)
            frame = None
            try:
                frame = self._frame(request)
                return self._answer(frame, digest)
            except _Refused as refused:
                return self._refusal(frame, digest, refused.code)

    # -------------------------------------------------------------- one request

    def _frame(self, request: bytes) -> Request:
        try:
            frame: Request = decode(request, Request, max_bytes=self._max_bytes + FRAME_BYTES)
        except MessageError:
            raise _Refused("invalid") from None
        if frame.serial < 1:
            raise _Refused("invalid")
        return frame

    def _answer(self, frame: Request, digest: str) -> bytes:
        record = self._record
        if (frame.run, frame.agent) != (self.run, self.name):
            raise _Refused("foreign")
        if record is None:
            state = self.agent.start()
        else:
            if frame.instance != record.instance:
                raise _Refused("foreign")
            if frame.serial < record.serial:
                raise _Refused("stale")
            if frame.serial == record.serial:
                if digest != record.request:
                    raise _Refused("changed")
                return record.reply if record.reply is not None else self._go_on(record)
            state = self._unfinished(record)
        if not all(self.agent.blobs.has(blob) for blob in frame.broadcasts):
            raise _Refused("missing")
        try:
            message = decode(frame.body, *self.agent.accepts, max_bytes=self._max_bytes)
            self.agent.check(state, message, frame.broadcasts)
        except MessageError:
            raise _Refused("invalid") from None
        try:
            state = self.agent.receive(state, message, frame.broadcasts)
        except BudgetExceeded:
            raise _Refused("budget") from None
        record = SiteRecord(
            run=frame.run,
            instance=frame.instance,
            agent=self.name,
            fingerprint=self.agent.fingerprint,
            serial=frame.serial,
            request=digest,
            broadcasts=frame.broadcasts,
            evaluating=False,
            state=self._encoded(state),
            reply=None,
        )
        self._save(record)
        return self._go_on(record)

    def _unfinished(self, record: SiteRecord) -> Any:
        """The state before a newer request: with all that the older one has brought."""
        state = self._decoded(record)
        if record.reply is not None:
            return state
        state, index, asked = self._replayed(record, state)
        if record.evaluating and isinstance(asked, Tensor):
            # The objective has started on it: the newer request waits until it is finished.
            state, _ = self._evaluate(record, state, index, asked)
        return state

    def _replayed(self, record: SiteRecord, state: Any) -> tuple[Any, int, Tensor | Pending | None]:
        """The state after all observations of a request that the journal holds."""
        index = 0
        while True:
            asked = self._asked(state)
            if not isinstance(asked, Tensor):
                return state, index, asked
            known = self.journal.find(*record.address, index)
            if known is None:
                return state, index, asked
            if not torch.equal(known.X, asked):
                raise ProtocolError(
                    f"The journal of site {self.name!r} holds another point for round "
                    f"{record.serial} than the agent asks for: its code or its seed has changed. "
                    "Go on with the version that started the run."
                )
            state = self.agent.tell(state, known.X.clone(), known.Y.clone())
            index += 1

    def _go_on(self, record: SiteRecord) -> bytes:
        state, index, asked = self._replayed(record, self._decoded(record))
        while isinstance(asked, Tensor):
            state, record = self._evaluate(record, state, index, asked)
            index += 1
            asked = self._asked(state)
        if asked is not None:
            raise _Refused("busy")
        try:
            state, message = self.agent.reply(state)
        except BudgetExceeded:
            raise _Refused("budget") from None
        try:
            body = encode(message, max_bytes=self._max_bytes)
        except MessageError as error:
            raise ProtocolError(f"Site {self.name!r} cannot send its reply: {error}") from error
        reply = encode(
            Reply(record.run, record.instance, self.name, record.serial, record.request, body),
            max_bytes=self._max_bytes + FRAME_BYTES,
        )
        self._save(replace(record, state=self._encoded(state), reply=reply, evaluating=False))
        self.journal.release(Released(*record.address))
        return reply

    def _asked(self, state: Any) -> Tensor | Pending | None:
        asked = self.agent.ask(state)
        if not isinstance(asked, Tensor):
            return asked
        if asked.dim() != 2 or asked.dtype != torch.float64 or len(asked) == 0:
            raise ProtocolError(
                f"The agent of site {self.name!r} must ask for `q x d` float64 points, got shape "
                f"{tuple(asked.shape)} and {asked.dtype}."
            )
        if not bool(torch.isfinite(asked).all()):
            raise ProtocolError(f"The agent of site {self.name!r} asks for a point with NaN.")
        return asked.detach().clone()

    def _evaluate(
        self, record: SiteRecord, state: Any, index: int, X: Tensor
    ) -> tuple[Any, SiteRecord]:
        """One evaluation, in the journal before anybody uses it."""
        answer = self._objective(X.clone())
        if isinstance(answer, Pending):
            if not record.evaluating:
                self._save(replace(record, evaluating=True))
            raise _Refused("busy")
        Y = checked_values(X, answer)
        self.journal.record(Observation(*record.address, index, X, Y))
        if record.evaluating:
            record = replace(record, evaluating=False)
            self._save(record)
        return self.agent.tell(state, X.clone(), Y.clone()), record

    def _refusal(self, frame: Request | None, digest: str, code: RefusalCode) -> bytes:
        run, instance = (self.run, "") if frame is None else (frame.run, frame.instance)
        serial = 0 if frame is None else frame.serial
        return encode(Refusal(run, instance, self.name, serial, digest, code, self.serial))

    # -------------------------------------------------------------- the record

    def _load(self) -> SiteRecord | None:
        data = self._store.get(RECORD)
        if data is None:
            if not self.journal.empty:
                raise ProtocolError(
                    f"Site {self.name!r} has a journal with entries and no record: restore "
                    "the record, or start again with a new journal and pass the observations of "
                    "the old one to the agent as data of its own."
                )
            return None
        try:
            record: SiteRecord = decode(data, SiteRecord, max_bytes=2 * STATE_BYTES)
        except MessageError as error:
            raise ProtocolError(
                f"The record of site {self.name!r} cannot be read: {error}"
            ) from error
        found = record.run, record.agent, record.fingerprint
        if found != (self.run, self.name, self.agent.fingerprint):
            raise ProtocolError(
                f"The record is of agent {record.agent!r} in run {record.run!r} with settings "
                f"{record.fingerprint[:12]}…, not of {self.name!r} in {self.run!r} with "
                f"{self.agent.fingerprint[:12]}…: use the settings that it was made with."
            )
        last = self.journal.last(record.run, record.instance)
        released = self.journal.released(record.run, record.instance)
        if last > record.serial or (released == record.serial and record.reply is None):
            raise ProtocolError(
                f"The record of site {self.name!r} is older than its journal (round "
                f"{record.serial} against {last}): going on would draw a reply twice. Restore the "
                "newest record."
            )
        return record

    def _save(self, record: SiteRecord) -> None:
        self._store.put(RECORD, encode(record, max_bytes=2 * STATE_BYTES))
        self._record = record

    def _encoded(self, state: Any) -> bytes:
        try:
            return encode(state, max_bytes=STATE_BYTES)
        except MessageError as error:
            raise ProtocolError(f"Site {self.name!r} cannot save its state: {error}") from error

    def _decoded(self, record: SiteRecord) -> Any:
        try:
            return decode(record.state, self.agent.state_type, max_bytes=STATE_BYTES)
        except MessageError as error:
            raise ProtocolError(
                f"The state of site {self.name!r} cannot be read: {error}"
            ) from error


def checked_values(X: Tensor, Y: object) -> Tensor:
    """An objective's answer as a `q x 1` float64 tensor, or `ProtocolError`."""
    shapes = ((len(X),), (len(X), 1)) if len(X) > 1 else ((), (1,), (1, 1))
    if isinstance(Y, float | int):
        Y = torch.tensor(Y, dtype=torch.float64)
    if not isinstance(Y, Tensor) or Y.shape not in shapes:
        got = tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__
        raise ProtocolError(
            f"The objective must return a tensor of shape ({len(X)}, 1) for {len(X)} points, got "
            f"{got}."
        )
    Y = Y.detach().double().reshape(-1, 1)
    if not bool(torch.isfinite(Y).all()):
        raise ProtocolError(
            "The objective returned NaN or infinity. Return the worst value that is plausible, or "
            "raise an exception for a point that must be tried again."
        )
    return Y.clone()
