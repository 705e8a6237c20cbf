r"""A site: one request in, one reply out, whatever happens in between.

    request -> checked -> received -> RECORD -> asked -> evaluated -> JOURNAL -> told
            -> … -> reply drawn -> RECORD -> JOURNAL (released) -> reply

What stands in capitals is on disk before the next arrow. Hence, for a process that is killed
anywhere: no observation is lost or paid for twice, no reply is drawn twice, and a record that was
restored from an older copy is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.linalg  # noqa: F401 - loads its libraries, which the controller below must see
import torch
from threadpoolctl import ThreadpoolController
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
from botorch_fed.protocols.store import (
    FileJournal,
    FileStore,
    Journal,
    MemoryStore,
    Observation,
    Released,
    Store,
)
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode, encode

logger = logging.getLogger(__name__)

FRAME_BYTES = 64 * 1024  # what a frame may add to its body
MAX_VALUE = 1e30  # of an objective: beyond it squares and sums of squares overflow
STATE_BYTES = 2**30  # of one's own state, which nobody else writes


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
        content: Hash of what it asked for.
        tag: The server's seal on that.
        broadcasts: The public blobs that were in force.
        observations: How many observations the journal held.
        evaluating: The points that the objective has started on and not finished, `q x d`.
        index: Which evaluation of the request they are.
        state: The agent's encoded state, after that request or after its reply.
        reply: The reply to that request, once there is one.
    """

    run: str
    instance: str
    agent: AgentId
    fingerprint: str
    serial: int
    request: str
    content: str
    tag: str
    broadcasts: tuple[str, ...]
    observations: int
    evaluating: Tensor | None = field(repr=False)
    index: int
    state: bytes = field(repr=False)
    reply: bytes | None = field(repr=False)

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
        objective: `q x d` points to `q x 1` values, or `Pending()` while it is running: then it is
            called again with the same points until it has them, also after a restart, and newer
            requests wait. A process that is killed between the start of an evaluation and its
            first `Pending()` may not come back to it; the objective then still has the value. What
            has answered `Pending()` must come to an end: newer requests wait for it, until it has
            the values or raises an error.
        run: The run's name, agreed with the server.
        store: Where the record is kept; default in memory. Several sites may share one.
        journal: Where observations are kept the moment they exist; default in memory. Its own.
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
        self.objective = objective
        self._store = MemoryStore() if store is None else store
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        if isinstance(self._store, FileStore) != isinstance(self.journal, FileJournal):
            raise ProtocolError(
                f"Site {name!r} keeps only one of record and journal on disk: after a crash the "
                "other would be missing. Give both, or neither."
            )
        key = hashlib.sha256(encode_names(run, name)).hexdigest()[:16]
        self._key = f"record-{key}"
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

        The agent computes on one thread, the objective on as many as the process has.
        """
        with self._lock, one_thread() as self._threads:
            digest = content_hash(request)
            frame = None
            try:
                frame = self._frame(request)
                return self._answer(frame, digest)
            except _Refused as refused:
                return self._refusal(frame, digest, refused.code)

    def settle(self) -> None:
        """Take the value of an evaluation that was running, if it is there now.

        Without it the value is taken with the next request. An objective that works in the
        background calls this the moment it has a value.
        """
        with self._lock, one_thread() as self._threads:
            record = self._record
            if record is None or record.evaluating is None or record.reply is not None:
                return
            with contextlib.suppress(_Refused):  # still busy
                self._unfinished(record)

    # -------------------------------------------------------------- one request

    def _frame(self, request: bytes) -> Request:
        try:
            frame: Request = decode(request, Request, max_bytes=self._max_bytes + FRAME_BYTES)
        except MessageError:
            raise _Refused("invalid") from None
        return frame

    def _answer(self, frame: Request, digest: str) -> bytes:
        record = self._record
        if (frame.run, frame.agent) != (self.run, self.name):
            raise _Refused("foreign")
        if record is not None:
            if frame.instance != record.instance:
                raise _Refused("foreign")
            if frame.serial < record.serial:
                raise _Refused("stale")
            if frame.serial == record.serial and digest != record.request:
                raise _Refused("changed")
            if frame.asked < record.serial < frame.serial:
                raise _Refused("stale")  # the server does not remember the round of the record
            if frame.serial == record.serial and record.reply is not None:
                return self._released(record)
        if frame.heard > self.serial:
            raise _Refused("behind")
        if not all(self.agent.blobs.has(blob) for blob in frame.broadcasts):
            raise _Refused("missing")
        if record is not None and frame.serial == record.serial:
            return self._go_on(record)
        state = self.agent.start() if record is None else self._unfinished(record)
        try:
            message = decode(frame.body, *self.agent.accepts, max_bytes=self._max_bytes)
            self.agent.check(state, message, frame.broadcasts)
            state = self.agent.receive(state, message, frame.broadcasts)
        except MessageError as error:
            logger.warning("site %r refuses round %d: %s", self.name, frame.serial, error)
            raise _Refused("invalid") from None
        except BudgetExceeded as error:
            logger.warning("site %r refuses round %d: %s", self.name, frame.serial, error)
            raise _Refused("budget") from None
        except Exception as error:  # a hostile request may raise anything; nothing is saved yet
            logger.exception("site %r cannot take round %d", self.name, frame.serial)
            raise _Refused("invalid") from error
        record = SiteRecord(
            run=frame.run,
            instance=frame.instance,
            agent=self.name,
            fingerprint=self.agent.fingerprint,
            serial=frame.serial,
            request=digest,
            content=request_content(frame),
            tag=frame.tag,
            broadcasts=frame.broadcasts,
            observations=len(self.journal),
            evaluating=None,
            index=0,
            state=self._encoded(state),
            reply=None,
        )
        self._save(record)
        return self._go_on(record)

    def _unfinished(self, record: SiteRecord) -> Any:
        """The state before a newer request: with all that the older one has brought.

        The agent is asked nothing: an unanswered request that it cannot cope with is left behind.
        """
        state = self._decoded(record)
        if record.reply is not None:
            return state
        index = 0
        while (known := self.journal.find(*record.address, index)) is not None:
            state = self.agent.tell(state, known.X.clone(), known.Y.clone())
            index += 1
        if record.evaluating is not None and record.index == index:
            # The objective has started on it: the newer request waits until it is finished.
            state, _ = self._evaluate(record, state, index, record.evaluating)
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
            Reply(bytes.fromhex(record.request), body),
            max_bytes=self._max_bytes + FRAME_BYTES,
        )
        count = len(self.journal)
        record = replace(record, state=self._encoded(state), reply=reply, observations=count)
        self._save(record)
        return self._released(record)

    def _released(self, record: SiteRecord) -> bytes:
        """The stored reply, after the journal knows that it may leave."""
        assert record.reply is not None
        self.journal.release(Released(*record.address))
        return record.reply

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
        try:
            with threads(self._threads):
                answer = self.objective(X.clone())
        except Exception:
            if record.evaluating is not None:  # it has ended: newer requests need not wait for it
                self._save(replace(record, evaluating=None))
            raise
        if isinstance(answer, Pending):
            if record.evaluating is None or record.index != index:
                self._save(replace(record, evaluating=X, index=index))
            raise _Refused("busy")
        Y = checked_values(X, answer)
        self.journal.record(Observation(*record.address, index, X, Y))
        if record.evaluating is not None:
            record = replace(record, evaluating=None)
            self._save(record)
        return self.agent.tell(state, X.clone(), Y.clone()), record

    def _refusal(self, frame: Request | None, digest: str, code: RefusalCode) -> bytes:
        run, instance = (self.run, "") if frame is None else (frame.run, frame.instance)
        serial = 0 if frame is None else frame.serial
        known = self._record
        content, tag = ("", "") if known is None else (known.content, known.tag)
        return encode(
            Refusal(run, instance, self.name, serial, digest, code, self.serial, content, tag)
        )

    # -------------------------------------------------------------- the record

    def _load(self) -> SiteRecord | None:
        data = self._store.get(self._key)
        if data is None:
            if not self.journal.empty:
                raise ProtocolError(
                    f"Site {self.name!r} has a journal with entries and no record: restore "
                    "the record; or join as a new agent, under another name and with a new "
                    "journal, and pass the observations of the old one to it as data of its own."
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
        if len(self.journal) < record.observations:
            raise ProtocolError(
                f"The journal of site {self.name!r} has {len(self.journal)} observations, its "
                f"record knows of {record.observations}: restore the newest journal."
            )
        if last > record.serial or (released == record.serial and record.reply is None):
            raise ProtocolError(
                f"The record of site {self.name!r} is older than its journal (round "
                f"{record.serial} against {last}): going on would draw a reply twice. Restore the "
                "newest record."
            )
        return record

    def _save(self, record: SiteRecord) -> None:
        self._store.put(self._key, encode(record, max_bytes=2 * STATE_BYTES))
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


def request_content(frame: Request) -> str:
    """Hash of what a request asks for, over which the server's seal is made."""
    return content_hash(encode_names(*frame.broadcasts) + frame.body)


def encode_names(*names: str) -> bytes:
    """Names in one string of bytes, from which they can be told apart."""
    return b"".join(len(name.encode()).to_bytes(8, "little") + name.encode() for name in names)


_CONTROLLER = ThreadpoolController()  # of the libraries behind numpy and scipy


@contextlib.contextmanager
def threads(count: int) -> Iterator[int]:
    """PyTorch, and the libraries behind numpy, on so many threads; yields how many PyTorch had."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with _CONTROLLER.limit(limits=count):
            yield before
    finally:
        torch.set_num_threads(before)


def one_thread() -> contextlib.AbstractContextManager[int]:
    """Protocols compute on one thread: the bits of a factorisation depend on how many there are."""
    return threads(1)


def checked_values(X: Tensor, Y: object) -> Tensor:
    """An objective's answer as a `q x 1` float64 tensor, or `ProtocolError`."""
    shapes = ((len(X),), (len(X), 1)) if len(X) > 1 else ((), (1,), (1, 1))
    if isinstance(Y, float | np.ndarray | np.number) or type(Y) is int:
        with contextlib.suppress(OverflowError, ValueError, TypeError):  # then it is refused below
            Y = torch.as_tensor(np.asarray(Y, dtype=np.float64))
    if not isinstance(Y, Tensor) or Y.shape not in shapes:
        got = tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__
        raise ProtocolError(
            f"The objective must return a tensor of shape ({len(X)}, 1) for {len(X)} points, or "
            f"Pending() while it is running; got {got}."
        )
    if Y.is_complex():
        raise ProtocolError("The objective must return real numbers, got complex ones.")
    Y = Y.detach().double().cpu().reshape(-1, 1)
    if not bool((Y.abs() <= MAX_VALUE).all()):  # false for NaN
        raise ProtocolError(
            f"The objective returned NaN, infinity or a value beyond {MAX_VALUE:g}. Return the "
            "worst value that is plausible, or raise an exception for a point that must be tried "
            "again."
        )
    return Y.clone()
