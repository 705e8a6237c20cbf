r"""The hub's log, and the record that its events give.

::

    Started    a start of a run: its name, its key, the state before the first round
    Stepped    a finished round: the agents asked, the agents that replied, the state after it
    Resumed    a new state before the next round: with agents that join, or a larger budget

An event refers to a snapshot of the state. Large unchanged parts of a state are stored once, see
`storage.snapshots`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.base import AgentId, Server
from botorch_fed.federation.site import STATE_BYTES, encode_names
from botorch_fed.storage.log import FileLog, Log
from botorch_fed.wire.codec import decode, encode


class PaymentLog(Protocol):
    """A ledger on disk from which a hub pays; see `privacy.SharedLedger`."""

    @property
    def head(self) -> str: ...

    def head_at(self, count: int) -> str | None: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Anchor:
    """The state of a ledger on disk at one time: its number of events, and its head."""

    length: int
    head: str


@dataclass(frozen=True)
class Started:
    """A start of a run.

    Attributes:
        run: The run's name.
        instance: A random name of this start.
        fingerprint: Hash of the server's settings.
        key: The server's key for the seals of its requests.
        state: Hash of the snapshot of the server's state before the first round.
        ledger: The anchor of the ledger on disk, if there is one.
    """

    run: str
    instance: str
    fingerprint: str
    key: bytes = field(repr=False)
    state: str
    ledger: Anchor | None


@dataclass(frozen=True)
class Stepped:
    """A finished round.

    Attributes:
        serial: Its number, from 1.
        asked: The agents that were asked.
        replied: The agents whose replies were accepted.
        state: Hash of the snapshot of the server's state after the round.
        ledger: The anchor of the ledger on disk, if there is one.
    """

    serial: int
    asked: tuple[AgentId, ...]
    replied: tuple[AgentId, ...]
    state: str
    ledger: Anchor | None


@dataclass(frozen=True)
class Resumed:
    """A run continues with another state, before a round depends on it.

    Attributes:
        state: Hash of the snapshot of the server's state.
        ledger: The anchor of the ledger on disk, if there is one.
    """

    state: str
    ledger: Anchor | None


HUB_EVENTS = (Started, Stepped, Resumed)


@dataclass(frozen=True)
class HubRecord:
    """The fold of the events of a hub's log.

    Attributes:
        started: The first event.
        serial: The last finished round.
        asked: The last round in which each agent was asked.
        replied: The last round in which each agent replied.
        state: Hash of the snapshot of the server's state.
        ledger: The last anchor of the ledger on disk.
    """

    started: Started
    serial: int
    asked: Mapping[AgentId, int]
    replied: Mapping[AgentId, int]
    state: str
    ledger: Anchor | None

    @classmethod
    def of(cls, events: Iterable[Any]) -> Self | None:
        """The record of some events; None if there are none."""
        record: Self | None = None
        for event in events:
            if record is None and isinstance(event, Started):
                record = cls(event, 0, {}, {}, event.state, event.ledger)
            elif record is not None and isinstance(event, Stepped | Resumed):
                record = record.after(event)
            else:
                raise ProtocolError(
                    f"Expected the events of one hub, got {type(event).__name__} at this place: "
                    "the log is of another party, or two hubs have written to it. Restore the "
                    "hub's log from a copy."
                )
        return record

    def after(self, event: Stepped | Resumed) -> Self:
        """The record after one more event."""
        if isinstance(event, Resumed):
            return replace(self, state=event.state, ledger=event.ledger)
        return replace(
            self,
            serial=event.serial,
            asked={**self.asked, **dict.fromkeys(event.asked, event.serial)},
            replied={**self.replied, **dict.fromkeys(event.replied, event.serial)},
            state=event.state,
            ledger=event.ledger,
        )

    def tag(self, agent: AgentId, serial: int, content: str) -> str:
        """The server's seal on the content of its request to an agent in a round."""
        started = self.started
        text = encode_names(started.run, started.instance, agent, str(serial), content)
        return hmac.new(started.key, text, hashlib.sha256).hexdigest()


def hub_log(folder: Path) -> FileLog:
    """The hub's log in the folder of a run; to be closed."""
    home = folder / "server"
    if (home / "record").exists():
        raise ProtocolError(
            f"The run in {folder} is of an earlier release, which kept a record instead of a log: "
            "continue it with that release, or start a new run in another folder."
        )
    return FileLog(home, HUB_EVENTS)


def finished_rounds(log: Log) -> int:
    """The number of finished rounds in a hub's log."""
    return max((event.serial for event in log if isinstance(event, Stepped)), default=0)


class HubLog:
    """A hub's log during its run.

    Args:
        server: The server whose states are logged.
        run: The run's name.
        log: The log; None stores nothing.
    """

    def __init__(self, server: Server[Any], run: str, log: Log | None) -> None:
        self._server = server
        self._log = log
        self._payments: PaymentLog | None = getattr(server, "shared_ledger", None)
        record = None if log is None else HubRecord.of(log)
        if record is None:
            self.state = server.start()
            key, instance = secrets.token_bytes(32), secrets.token_hex(16)
            digest = self._snapshot(self.state)
            event = Started(run, instance, server.fingerprint, key, digest, self._anchor())
            self._append(event)
            self.record = HubRecord(event, 0, {}, {}, digest, event.ledger)
        else:
            self.record = record
            self._check(run)
            self.state = self._loaded(record.state)
            self._resume()

    def step(
        self, serial: int, asked: Iterable[AgentId], replied: Iterable[AgentId], state: Any
    ) -> None:
        """Log a finished round; it is durable when this returns."""
        digest = self._snapshot(state)
        event = Stepped(serial, tuple(asked), tuple(replied), digest, self._anchor())
        self._append(event)
        self.record, self.state = self.record.after(event), state

    def _resume(self) -> None:
        state = getattr(self._server, "resumed", lambda before: before)(self.state)
        if state is self.state:
            return
        event = Resumed(self._snapshot(state), self._anchor())
        self._append(event)
        self.record, self.state = self.record.after(event), state

    def _append(self, event: Started | Stepped | Resumed) -> None:
        if self._log is not None:
            self._log.append(event)
            self._log.keep([event.state])

    def _snapshot(self, state: Any) -> str:
        return "" if self._log is None else self._log.snapshot(encoded(state, STATE_BYTES))

    def _loaded(self, digest: str) -> Any:
        assert self._log is not None
        try:
            state = decode(self._log.load(digest), self._server.state_type, max_bytes=STATE_BYTES)
        except MessageError as error:
            raise ProtocolError(f"The state in {self._log!r} cannot be read: {error}") from error
        self._log.keep([digest])
        return state

    def _anchor(self) -> Anchor | None:
        return None if self._payments is None else Anchor(len(self._payments), self._payments.head)

    def _check(self, run: str) -> None:
        """Raise unless the log is of this run and this ledger."""
        started, anchor = self.record.started, self.record.ledger
        if (started.run, started.fingerprint) != (run, self._server.fingerprint):
            raise ProtocolError(
                f"The log is of run {started.run!r} with settings {started.fingerprint[:12]}…, "
                f"this is run {run!r} with {self._server.fingerprint[:12]}…: use the name and the "
                "settings of the logged run."
            )
        if anchor is None:
            return
        if self._payments is None:
            raise ProtocolError(
                "The run has paid from a ledger on disk, and this study has none: name that "
                "ledger in the study."
            )
        if (head := self._payments.head_at(anchor.length)) != anchor.head:
            has = "others" if head else len(self._payments)
            raise ProtocolError(
                f"The run has recorded {anchor.length} events of its ledger on disk, "
                f"{self._payments!r} has {has}: it was cut back or exchanged. Restore the newest "
                "copy of it."
            )


def encoded(thing: Any, max_bytes: int) -> bytes:
    """The bytes of a server's state or message."""
    try:
        return encode(thing, max_bytes=max_bytes)
    except MessageError as error:
        raise ProtocolError(
            f"The server cannot encode its {type(thing).__name__}: {error}"
        ) from error
