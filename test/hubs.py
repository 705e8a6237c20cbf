"""A hub's log that can be looked at, interrupted and cut back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from botorch_fed.federation.hub import HUB_EVENTS
from botorch_fed.storage.log import Log
from botorch_fed.wire.codec import decode


class SavedLog(Log):
    """In memory; drops nothing. `before` and `after` are called around every event."""

    def __init__(self) -> None:
        super().__init__(HUB_EVENTS)
        self.before: Callable[[], Any] | None = None
        self.after: Callable[[], Any] | None = None

    def _save(self, event: Any, head: bytes, data: bytes) -> None:
        if self.before is not None:
            self.before()
        super()._save(event, head, data)
        if self.after is not None:
            self.after()

    def keep(self, digests: Iterable[str]) -> None:
        """Keep all."""

    def first(self, count: int) -> SavedLog:
        """The log as it was with so many events."""
        log = SavedLog()
        log._events, log._heads = self._events[:count], self._heads[: count + 1]
        log._snapshots = self._snapshots
        return log

    def states(self, kind: type) -> list[Any]:
        """The server's state after every event."""
        return [decode(data, kind, max_bytes=2**24) for data in self.bytes()]

    def bytes(self) -> list[bytes]:
        """The same, encoded."""
        return [self.load(event.state) for event in self]
