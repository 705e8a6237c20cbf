r"""The append-only log of a party's events.

::

    Log            events and snapshots in memory
    FileLog        the same in a folder, for one process at a time or, shared, for several in turns
    read_events    the events of a folder, while another process may append to it

Every party has a log: a site of its trials and replies, a hub of its rounds, a ledger of its
payments. The writers of a log define its events. A log only grows. An event is durable when
`append` returns, a *snapshot* of a large object, to which events refer, when `snapshot` returns.
The rest of a party's state is computed from both.

Every event carries a hash of all events before it, so that opening a log detects removed,
exchanged and altered events. A log that was cut back between two events is a valid shorter log; a
peer that stored `head` and `len` detects the cut by `head_at`.

A damaged file raises `ProtocolError` and stays as it is. A disk that fails raises `OSError`.
`FileLog` needs a POSIX system.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.storage.snapshots import Snapshots
from botorch_fed.storage.store import (
    FileStore,
    MemoryStore,
    check_private,
    private_folder,
    read_all,
    sync_folder,
    write_all,
)
from botorch_fed.wire.codec import decode, encode

logger = logging.getLogger(__name__)

MAX_EVENT = 2**28  # bytes of one event
_HEADER = b"bofedlog" + (1).to_bytes(4, "little")  # magic and format version
_FRAME = struct.Struct("<4sII")  # before a record: its length, the length's CRC-32, its own CRC-32
_SECTOR = 512  # a disk writes this many bytes or none
_CHAIN = hashlib.sha256().digest_size


class Log:
    """Events in memory; `FileLog` keeps them on disk. For one thread at a time.

    Args:
        kinds: The classes of its events.
    """

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self.kinds = kinds
        self._events: list[Any] = []
        self._heads = [hashlib.sha256(_HEADER).digest()]  # after each number of events
        self._snapshots = Snapshots(MemoryStore(), share=False)

    @property
    def head(self) -> str:
        """A hash of all events and their order."""
        self._check_usable()
        return self._heads[-1].hex()

    def head_at(self, count: int) -> str | None:
        """The value of `head` after the first `count` events; None if there are fewer."""
        self._check_usable()
        return self._heads[count].hex() if 0 <= count <= len(self) else None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Exclusive access to the log in the body, with the events of other processes read."""
        self._check_usable()
        yield

    def append(self, event: Any) -> None:
        """Add an event.

        Args:
            event: Of one of the log's kinds. A value that cannot be encoded, such as NaN, raises
                `MessageError`.
        """
        data = encode(event, max_bytes=MAX_EVENT)
        event = decode(data, *self.kinds, max_bytes=MAX_EVENT, own=True)  # a copy, checked
        with self.turn():
            self._save(event, hashlib.sha256(self._heads[-1] + data).digest(), data)

    def __iter__(self) -> Iterator[Any]:
        self._check_usable()
        return iter(tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, place: int) -> Any:
        self._check_usable()
        return self._events[place]

    def snapshot(self, data: bytes) -> str:
        """Store bytes and return their hash, by which an event can refer to them."""
        self._check_usable()
        return self._snapshots.put(data)

    def load(self, digest: str) -> bytes:
        """The bytes of a snapshot; `ProtocolError` if they are missing or damaged."""
        self._check_usable()
        data = self._snapshots.get(digest)
        if data is None:
            raise ProtocolError(
                f"{self!r} refers to a snapshot {digest[:8]}… that is missing or damaged: restore "
                "the folder from a copy of all of its files."
            )
        return data

    def keep(self, digests: Iterable[str]) -> None:
        """Drop all other snapshots."""
        self._check_usable()
        self._snapshots.keep(digests)

    def close(self) -> None:
        """Close the file, if there is one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} events)"

    def _check_usable(self) -> None:
        """Raise unless calls are possible now."""

    def _save(self, event: Any, head: bytes, data: bytes) -> None:
        self._events.append(event)
        self._heads.append(head)


class FileLog(Log):
    """A log in a folder, locked by one process until `close`, or shared by several processes.

    The file ``log`` is a header, then records of length, two checksums and bytes. Opening drops
    the last record, with a warning, if a crash cut it short: the file ends inside it, or its end
    is zeros from a disk-sector boundary (or its beginning) on, as in an unwritten sector. Every
    other mismatch is damage, also in the last record: it may have been complete.

    After a failed write the file is cut back to its last good record and the log stays usable. If
    the cut fails too, or an interrupt came in between, the log must be closed and opened again. A
    file that was moved, replaced or cut back while it was open takes no further event. Neither the
    file nor its folder may be a link. A forked process cannot use the log of its parent.

    A shared log is locked for each turn. It has no snapshots, and it holds the events up to its
    last turn.

    Args:
        folder: The folder, created with mode 0700 if it does not exist.
        kinds: The classes of its events.
        shared: Whether several processes append to the log.

    Raises:
        ProtocolError: The log is open elsewhere, damaged, of another kind, or not private.
    """

    def __init__(
        self, folder: str | Path, kinds: tuple[type, ...], *, shared: bool = False
    ) -> None:
        super().__init__(kinds)
        self.folder = private_folder(folder)
        self.shared = shared
        if not shared:
            self._snapshots = Snapshots(FileStore(self.folder / "snapshots"))
        self.path = self.folder / "log"
        self._end = 0  # end of the last good record that was read or written
        self._last = 0  # start of that record, 0 if there is none
        self._turning = False
        self._fault: str | None = None
        self._process = os.getpid()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, 0o600)
        self._closing = weakref.finalize(self, os.close, self._file)
        try:
            check_private(self.path, os.fstat(self._file), stat.S_IFREG)
            self._lock()
            self._catch_up()
            if shared:
                self._unlock()
            sync_folder(self.folder)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Exclusive access to the log in the body, with the events of other processes read."""
        self._check_usable()
        if not self.shared or self._turning:
            self._check_place()
            yield
            return
        self._lock()
        self._turning = True
        try:
            self._check_place()
            self._catch_up()
            yield
        finally:
            self._turning = False
            self._unlock()

    def snapshot(self, data: bytes) -> str:
        """Store bytes and return their hash, by which an event can refer to them."""
        if self.shared:
            raise ProtocolError(f"{self!r} is shared and holds events only: no snapshots.")
        return super().snapshot(data)

    def _lock(self) -> None:
        import fcntl  # not on Windows, where a log in memory still works

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if self.shared else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ProtocolError(
                f"The log {self.path} is open already, here or in another process: close that one "
                "first, or give every party its own folder."
            ) from error

    def _unlock(self) -> None:
        import fcntl

        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _check_place(self) -> None:
        """Raise unless the file is in its place and unchanged; a shared file may be longer.

        The last hash is compared. The caller holds the lock.
        """
        mine = os.fstat(self._file)
        try:
            same = os.path.samestat(mine, os.lstat(self.path))
        except FileNotFoundError:
            same = False
        fits = mine.st_size >= self._end if self.shared else mine.st_size == self._end
        if self._last:
            head = os.pread(self._file, _CHAIN, self._last + _FRAME.size)
            fits = fits and head == self._heads[-1]
        if not (same and fits):
            raise ProtocolError(
                f"The log {self.path} was moved, replaced or changed from outside while it was "
                "open: find the cause, then close it and open it again."
            )

    def _catch_up(self) -> None:
        """Read the records after the last good one, or create the file."""
        os.lseek(self._file, self._end, os.SEEK_SET)
        data = read_all(self._file)
        if not self._end:
            # A crash during creation leaves a part of the header, or zeros.
            if len(data) <= len(_HEADER) and (_HEADER.startswith(data) or not data.strip(b"\0")):
                if data != _HEADER and self._snapshots.store.names():
                    raise _damaged(self.path, 0, "it is empty, and has snapshots")
                self._truncate()
                self._write(_HEADER)
                return
            if not data.startswith(_HEADER):
                raise _damaged(self.path, 0, f"it is no log of format {_HEADER[-4]}")
            self._end, data = len(_HEADER), data[len(_HEADER) :]
        stop = self._end + len(data)
        self._read(data)
        if lost := stop - self._end:
            self._truncate()
            logger.warning("%s: dropped %d bytes that a crash cut short", self.path, lost)

    def _read(self, data: bytes) -> None:
        """Read all events of the bytes after the last good record."""
        for start, stop, record in _records(self.path, data, self._end):
            head, event = record[:_CHAIN], record[_CHAIN:]
            decoded = _decoded(self.path, start, self._heads[-1], record, self.kinds)
            super()._save(decoded, head, event)
            self._last, self._end = start, stop

    def _check_usable(self) -> None:
        fault = self._fault
        if not self._closing.alive:
            fault = "is closed"
        elif os.getpid() != self._process:
            fault = "was opened before a fork"
        if fault is not None:
            raise ProtocolError(f"The log {self.path} {fault}: open it again.")

    def _save(self, event: Any, head: bytes, data: bytes) -> None:
        record = head + data
        size = len(record).to_bytes(4, "little")
        framed = _FRAME.pack(size, zlib.crc32(size), zlib.crc32(record)) + record
        # After an interrupt in this block, memory and disk may differ until the file is read again.
        self._fault = "may end with a part of a record after a failed write; close it first"
        start = self._end
        try:
            self._write(framed)
        except OSError:
            with suppress(OSError):
                self._truncate()
                self._fault = None
            raise
        super()._save(event, head, data)
        self._last, self._fault = start, None

    def _write(self, data: bytes) -> None:
        os.lseek(self._file, self._end, os.SEEK_SET)
        write_all(self._file, data)
        os.fsync(self._file)
        self._end += len(data)

    def _truncate(self) -> None:
        os.ftruncate(self._file, self._end)
        os.fsync(self._file)

    def close(self) -> None:
        """Unlock and close the file; a second call does nothing."""
        if self._closing.alive and os.getpid() == self._process:
            self._unlock()  # a forked process may still hold a copy
        self._closing()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"


# ------------------------------------------------------------------ records


def read_events(folder: str | Path, kinds: tuple[type, ...]) -> list[Any]:
    """The events of a log as it is now, also while another process appends to it.

    Nothing is locked, written or created. The last record is left out if it is not complete.

    Args:
        folder: The folder of the log.
        kinds: The classes of its events.

    Raises:
        ProtocolError: The log is damaged, of another kind, or not private.
        FileNotFoundError: There is no log.
    """
    path = Path(folder) / "log"
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        check_private(path, os.fstat(file), stat.S_IFREG)
        data = read_all(file)
    finally:
        os.close(file)
    if len(data) <= len(_HEADER):
        return []
    if not data.startswith(_HEADER):
        raise _damaged(path, 0, f"it is no log of format {_HEADER[-4]}")
    events, head = [], hashlib.sha256(_HEADER).digest()
    for start, _, record in _records(path, data[len(_HEADER) :], len(_HEADER)):
        events.append(_decoded(path, start, head, record, kinds))
        head = record[:_CHAIN]
    return events


def _records(path: Path, data: bytes, first: int) -> Iterator[tuple[int, int, bytes]]:
    """The complete records in the bytes of a file from `first` on: start, end and bytes of each."""
    written = first + len(data.rstrip(b"\0"))
    start = first
    while start + _FRAME.size <= first + len(data):
        size, check, checksum = _FRAME.unpack_from(data, start - first)
        body = start + _FRAME.size
        if zlib.crc32(size) != check:
            if written <= body:  # only zeros follow
                return
            raise _damaged(path, start, "wrong checksum of a length")
        stop = body + int.from_bytes(size, "little")
        if stop > first + len(data):
            return
        record = data[body - first : stop - first]
        if zlib.crc32(record) != checksum:
            if written <= max(body, (stop - 1) // _SECTOR * _SECTOR):
                return
            raise _damaged(path, start, "wrong checksum of a record")
        yield start, stop, record
        start = stop


def _decoded(path: Path, start: int, before: bytes, record: bytes, kinds: tuple[type, ...]) -> Any:
    """The event of a record that follows the hash `before`."""
    head, event = record[:_CHAIN], record[_CHAIN:]
    if hashlib.sha256(before + event).digest() != head:
        raise _damaged(path, start, "an event before it is missing or was altered")
    try:
        return decode(event, *kinds, max_bytes=MAX_EVENT)
    except MessageError as error:
        raise _damaged(path, start, str(error)) from error


def _damaged(path: Path, where: int, why: str) -> ProtocolError:
    return ProtocolError(
        f"The log {path} is damaged at byte {where} ({why.rstrip('.')}). It was not "
        "changed: restore the folder from a copy, or move it away to start without it."
    )
