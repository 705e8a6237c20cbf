r"""A ledger on disk, from which several runs pay: it survives a crash and never counts too little.

It is an append-only log of three kinds of events, and what was spent is computed from it::

    Opened    what the ledger counts, and what may be spent: the first event
    Paid      releases were paid for, before anything was computed
    Limited   another budget holds from here on

A party that remembers `len` and `head` of a ledger can tell by `head_at` whether it was cut back or
exchanged; a hub does so for its run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from botorch_fed.errors import ProtocolError
from botorch_fed.privacy.accounting import (
    Accountant,
    Adjacency,
    Budget,
    Entry,
    Event,
    Guarantee,
    Ledger,
    Unit,
    _joined,
)
from botorch_fed.storage.log import FileLog


@dataclass(frozen=True)
class Opened:
    """A ledger was opened for the first time.

    Attributes:
        adjacency: What a neighbouring world is, see `accounting`.
        unit: Whose contribution is protected.
        budget: What may be spent, or None to count only.
    """

    adjacency: Adjacency
    unit: Unit
    budget: Budget | None


@dataclass(frozen=True)
class Paid:
    """Releases were paid for."""

    entry: Entry


@dataclass(frozen=True)
class Limited:
    """Another budget holds from here on."""

    budget: Budget


LEDGER_EVENTS = (Opened, Paid, Limited)


class SharedLedger:
    r"""A ledger in a folder, from which several runs and processes may pay at the same time.

    What `spend` returned from is on the disk: the ledger never counts too little, and after a crash
    at most the release in flight too much. The costs of all runs, also of pilot runs, add up.
    Threads may share the object. What is not as it was written is refused; see `storage.log`.

    Args:
        path: The folder, created with mode 0700 if it does not exist.
        adjacency: What a neighbouring world is, see `accounting`.
        unit: Whose contribution is protected.
        budget: What may be spent, or None to count only.

    Raises:
        ProtocolError: The ledger is damaged, not private, no ledger, or has other settings.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with SharedLedger(f"{folder}/ledger", budget=Budget(8.0, 1e-3)) as ledger:
        ...         ledger.spend(Event(1.0, sampling_rate=0.35), note="pilot").releases
        1
    """

    def __init__(
        self,
        path: str | Path,
        *,
        adjacency: Adjacency = "zero-out",
        unit: Unit = "agent",
        budget: Budget | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        if self.path.is_file() and not self.path.is_symlink():
            raise ProtocolError(
                f"{self.path} is a file, expected the folder of a ledger: a ledger of an earlier "
                "release is not read. Name a new path, with a budget that is smaller by what it "
                "has spent."
            )
        self._ledger = Ledger(adjacency, unit, budget)
        self._events = 0  # of which the ledger is made
        self._turn = threading.RLock()
        self._log = FileLog(self.path, LEDGER_EVENTS, shared=True)
        try:
            with self._log.turn():
                if not len(self._log):
                    self._log.append(Opened(adjacency, unit, budget))
                self._check_settings()
                self._catch_up()
        except BaseException:
            self.close()
            raise

    @classmethod
    def at(cls, path: str | Path) -> Self:
        """The ledger in a folder, with its own settings; `ProtocolError` if there is none."""
        folder = Path(path).absolute()
        if not (folder / "log").is_file():
            raise ProtocolError(f"{folder} is no folder of a ledger: name the path in [ledger].")
        with FileLog(folder, LEDGER_EVENTS, shared=True) as log, log.turn():
            opened = log[0] if len(log) else None
        if not isinstance(opened, Opened):
            raise ProtocolError(f"{folder} is no ledger: its first event does not open one.")
        return cls(folder, adjacency=opened.adjacency, unit=opened.unit, budget=opened.budget)

    def limit(self, budget: Budget) -> Self:
        """Let another budget hold from now on; what was spent stays spent."""
        with self._reading():
            self._log.append(Limited(budget))
            self._catch_up()
        return self

    @property
    def ledger(self) -> Ledger:
        """What is on the disk, as a value."""
        with self._reading():
            return self._ledger

    @property
    def adjacency(self) -> Adjacency:
        """What a neighbouring world is."""
        return self._ledger.adjacency

    @property
    def unit(self) -> Unit:
        """Whose contribution is protected."""
        return self._ledger.unit

    @property
    def budget(self) -> Budget | None:
        """What may be spent."""
        return self._ledger.budget

    @property
    def releases(self) -> int:
        """How many releases were paid for, by all runs."""
        return self.ledger.releases

    @property
    def head(self) -> str:
        """A hash of all events and their order."""
        with self._reading():
            return self._log.head

    def head_at(self, count: int) -> str | None:
        """What `head` was after so many events; None if there are fewer."""
        with self._reading():
            return self._log.head_at(count)

    def __len__(self) -> int:
        with self._reading():
            return len(self._log)

    def guarantee(
        self, *, delta: float | None = None, accountant: Accountant | None = None
    ) -> Guarantee:
        """What was revealed by everything in the ledger; see `Ledger.guarantee`."""
        return self.ledger.guarantee(delta=delta, accountant=accountant)

    def spend(self, event: Event, *, count: int = 1, note: str = "", private: bool = True) -> Self:
        """Pay for `count` releases: when it returns, they are on the disk.

        Raises:
            BudgetExceeded: The budget does not cover them; nothing was written.
            OSError: The disk failed. Release nothing.
        """
        with self._reading():
            self._ledger.spend(event, count=count, note=note, private=private)
            self._log.append(Paid(Entry(event, count, note, private)))
            self._catch_up()
        return self

    def spend_once(self, event: Event, *, count: int, note: str, private: bool = True) -> Self:
        """Pay unless a payment of this note is in the ledger: a crash may have come after it.

        Raises:
            BudgetExceeded: The budget does not cover it; nothing was written.
        """
        with self._reading():
            if not self.paid(note):
                self.spend(event, count=count, note=note, private=private)
        return self

    def paid(self, note: str) -> bool:
        """Whether a payment of this note is in the ledger."""
        with self._reading():
            events = (self._log[place] for place in range(1, len(self._log)))
            return any(isinstance(one, Paid) and one.entry.note == note for one in events)

    @property
    def mark(self) -> tuple[int, str]:
        """How many events there are, and `head`, of one moment."""
        with self._reading():
            return len(self._log), self._log.head

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SharedLedger({str(self.path)!r}, {self._ledger})"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Nobody else pays in the body; what others have paid is known in it."""
        with self._turn, self._log.turn():
            self._catch_up()
            yield

    def _catch_up(self) -> None:
        """Take over the payments since the last look."""
        entries = list(self._ledger.entries)
        for place in range(max(self._events, 1), len(self._log)):
            paid = self._log[place]
            if isinstance(paid, Limited):
                self._ledger = replace(self._ledger, budget=paid.budget)
                continue
            if not isinstance(paid, Paid):
                raise ProtocolError(f"{self._log!r} is opened twice: it is no log of a ledger.")
            entries[-1:] = _joined(entries[-1:], paid.entry)
        self._ledger = replace(self._ledger, entries=tuple(entries))
        self._events = len(self._log)

    def _check_settings(self) -> None:
        ledger = self._ledger
        mine, theirs = Opened(ledger.adjacency, ledger.unit, ledger.budget), self._log[0]
        if mine != theirs:
            raise ProtocolError(
                f"The ledger {self.path} has other settings, {theirs}, than asked for, {mine}: "
                "open it with its own. They are fixed when it is created."
            )
