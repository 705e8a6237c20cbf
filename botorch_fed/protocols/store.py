r"""What must survive a crash at a site.

    Journal, FileJournal      every observation and every reply that was released
    MemoryStore, FileStore    named bytes: secrets and the site's own records
    MemoryBlobs, FileBlobs    public bytes named by their hash: broadcasts

What is handed over is safe when the call returns. Files belong to one user and nobody else can read
them. A damaged file raises `ProtocolError` and stays as it is. A disk that fails raises `OSError`.
The classes with files need a POSIX system.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import stat
import struct
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode, encode

logger = logging.getLogger(__name__)

MAX_RECORD = 2**30  # bytes of one entry of a journal
_HEADER = b"bofedjnl" + (1).to_bytes(4, "little")  # of a journal: magic and format version
_FRAME = struct.Struct("<4sII")  # before a record: its length, the length's CRC-32, its own CRC-32
_SECTOR = 512  # a disk writes this many bytes or none
_BLOB_MAGIC = b"bofedbl\x01"  # of a named file: magic with the format version
_REMEMBERED = 8  # decoded objects of one `Blobs`
_NAME = re.compile(r"[a-z0-9_-][a-z0-9_.-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


# ------------------------------------------------------------------ the journal


@dataclass(frozen=True, eq=False)
class Observation:
    """One evaluation of the objective: the `index`-th of a request.

    `serial` counts the requests of a run's `instance` from 1, `index` the evaluations of one of
    them from 0; `request` is the hash of its bytes. `X` is `q x d` and `Y` is `q x 1`, float64.
    """

    run: str
    instance: str
    serial: int
    request: str
    index: int
    X: Tensor = field(repr=False)
    Y: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if self.X.dim() != 2 or self.Y.shape != (self.X.shape[0], 1):
            raise InputDataError(
                f"An observation needs X `q x d` and Y `q x 1`, got shapes {tuple(self.X.shape)} "
                f"and {tuple(self.Y.shape)}."
            )
        if self.X.dtype != torch.float64 or self.Y.dtype != torch.float64:
            raise InputDataError(
                f"An observation needs float64, got X {self.X.dtype} and Y {self.Y.dtype}: call "
                "`.double()`."
            )
        if self.serial < 1 or self.index < 0:
            raise InputDataError(
                f"A serial counts from 1 and an index from 0, got {self.serial} and {self.index}."
            )

    @property
    def address(self) -> tuple[str, str, int, str, int]:
        """Where it belongs: run, instance, serial, request, index."""
        return self.run, self.instance, self.serial, self.request, self.index


@dataclass(frozen=True)
class Released:
    """The reply to a request was made and may have left."""

    run: str
    instance: str
    serial: int
    request: str

    def __post_init__(self) -> None:
        if self.serial < 1:
            raise InputDataError(f"A serial counts from 1, got {self.serial}.")

    @property
    def address(self) -> tuple[str, str, int]:
        """Where it belongs: run, instance, serial. A serial is answered for one request only."""
        return self.run, self.instance, self.serial


class Journal:
    """Observations and releases in memory; `FileJournal` keeps them on disk.

    A journal is asked before the objective is: an observation that was made before a crash is
    found again and not paid for twice. It keeps copies; do not change the tensors that it gives
    out. It is for one thread at a time.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str | int, ...], Observation | Released] = {}

    def find(
        self, run: str, instance: str, serial: int, request: str, index: int
    ) -> Observation | None:
        """The observation at an address, if it was made before."""
        self._check_usable()
        entry = self._entries.get((run, instance, serial, request, index))
        return entry if isinstance(entry, Observation) else None

    def record(self, observation: Observation) -> None:
        """Keep an observation; `ProtocolError` if another one has its address.

        The very same one may come again. What cannot be encoded, as NaN, raises `MessageError`.
        """
        self._enter(observation)

    def release(self, mark: Released) -> None:
        """Note that a reply may leave; `ProtocolError` if its serial had another request."""
        self._enter(mark)

    def released(self, run: str, instance: str) -> int:
        """The highest serial that was released, 0 if none."""
        return self._highest(run, instance, (Released,))

    def last(self, run: str, instance: str) -> int:
        """The highest serial of any entry, 0 if none."""
        return self._highest(run, instance, (Observation, Released))

    def _highest(self, run: str, instance: str, kinds: tuple[type, ...]) -> int:
        self._check_usable()
        of_agent = (e for e in self._entries.values() if (e.run, e.instance) == (run, instance))
        return max((e.serial for e in of_agent if isinstance(e, kinds)), default=0)

    @property
    def empty(self) -> bool:
        """Whether it has no entry at all; without observations there may be releases."""
        self._check_usable()
        return not self._entries

    def __iter__(self) -> Iterator[Observation]:
        self._check_usable()
        return iter([e for e in self._entries.values() if isinstance(e, Observation)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def close(self) -> None:
        """Give the file back, if there is one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} observations)"

    def _check_usable(self) -> None:
        """Raise unless calls are possible now."""

    def _enter(self, entry: Observation | Released) -> None:
        self._check_usable()
        data = encode(entry, max_bytes=MAX_RECORD)
        entry = _entry(data)  # a copy, and the proof that it can be read again
        if self._is_new(entry, data):
            self._save(entry, data)

    def _is_new(self, entry: Observation | Released, data: bytes) -> bool:
        known = self._entries.get(entry.address)
        if known is not None and encode(known, max_bytes=MAX_RECORD) != data:
            what = "observation" if isinstance(entry, Observation) else "release"
            raise ProtocolError(
                f"The journal has another {what} for serial {entry.serial} of run "
                f"{entry.run[:40]!r}: a request is answered once. Do two agents share the journal?"
            )
        return known is None

    def _save(self, entry: Observation | Released, data: bytes) -> None:
        self._entries[entry.address] = entry


class FileJournal(Journal):
    """A journal on disk, held open and locked by one process until `close`.

    The file is a header, then records of length, two checksums and bytes. The last record is
    dropped on opening, with a warning, if a crash cut it short: the file ends inside it, or its end
    is zeros from the border of a disk sector (or its beginning) on, as an unwritten sector is.
    Every other mismatch is damage, also in the last record: it may have been complete.

    After a failed write the file is cut back to its last good record and the journal goes on. If
    that fails too, or an interrupt came in between, it must be closed and opened again. A forked
    process cannot use the journal of its parent.

    Args:
        path: The file, created with mode 0600 if it does not exist.

    Raises:
        ProtocolError: The file is open elsewhere, damaged, no journal, or not private.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path).resolve()
        self._fault: str | None = None
        self._process = os.getpid()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, 0o600)
        self._closing = weakref.finalize(self, os.close, self._file)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        import fcntl  # not on Windows, where a journal in memory still works

        _check_private(self.path, os.fstat(self._file), stat.S_IFREG)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ProtocolError(
                f"The journal {self.path} is open already, here or in another process: close that "
                "one first, or give every agent its own journal."
            ) from error
        data = _read_all(self._file)
        # A crash while the file was created leaves a part of the header, or zeros instead.
        if len(data) <= len(_HEADER) and (_HEADER.startswith(data) or not data.strip(b"\0")):
            self._end = 0
            self._truncate()
            self._append(_HEADER)
        else:
            self._end = self._load(data)
            if self._end < len(data):
                lost = len(data) - self._end
                self._truncate()
                logger.warning("%s: dropped %d bytes that a crash cut short", self.path, lost)
        _sync_folder(self.path.parent)

    def _load(self, data: bytes) -> int:
        """Take over all records; the end of the last good one."""
        if not data.startswith(_HEADER):
            raise self._damaged(0, f"it is no journal of format {_HEADER[-4]}")
        written = len(data.rstrip(b"\0"))
        start = len(_HEADER)
        while start + _FRAME.size <= len(data):
            size, check, checksum = _FRAME.unpack_from(data, start)
            body = start + _FRAME.size
            if zlib.crc32(size) != check:
                if written <= body:  # nothing but zeros behind it
                    break
                raise self._damaged(start, "wrong checksum of a length")
            stop = body + int.from_bytes(size, "little")
            if stop > len(data):
                break
            record = data[body:stop]
            if zlib.crc32(record) != checksum:
                if written <= max(body, (stop - 1) // _SECTOR * _SECTOR):
                    break
                raise self._damaged(start, "wrong checksum of a record")
            try:
                entry = _entry(record)
                if self._is_new(entry, record):
                    Journal._save(self, entry, record)
            except (MessageError, ProtocolError) as error:
                raise self._damaged(start, str(error)) from error
            start = stop
        return start

    def _damaged(self, where: int, why: str) -> ProtocolError:
        return ProtocolError(
            f"The journal {self.path} is damaged at byte {where} ({why.rstrip('.')}). It was left "
            "as it is: restore it from a copy, or move it away to start without it."
        )

    def _check_usable(self) -> None:
        fault = self._fault
        if not self._closing.alive:
            fault = "is closed"
        elif os.getpid() != self._process:
            fault = "was opened before a fork"
        if fault is not None:
            raise ProtocolError(f"The journal {self.path} {fault}: open it again.")

    def _save(self, entry: Observation | Released, data: bytes) -> None:
        size = len(data).to_bytes(4, "little")
        record = _FRAME.pack(size, zlib.crc32(size), zlib.crc32(data)) + data
        # Whatever interrupts this block, memory and disk may differ until the file is read again.
        self._fault = "may end with a part of a record after a failed write; close it first"
        try:
            self._append(record)
        except OSError:
            with suppress(OSError):
                self._truncate()
                self._fault = None
            raise
        super()._save(entry, data)
        self._fault = None

    def _append(self, data: bytes) -> None:
        os.lseek(self._file, self._end, os.SEEK_SET)
        _write_all(self._file, data)
        os.fsync(self._file)
        self._end += len(data)

    def _truncate(self) -> None:
        os.ftruncate(self._file, self._end)
        os.fsync(self._file)

    def close(self) -> None:
        """Unlock and close the file; a second call does nothing."""
        if self._closing.alive and os.getpid() == self._process:
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked process may still hold a copy
        self._closing()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"


def _entry(data: bytes) -> Observation | Released:
    entry: Observation | Released = decode(data, Observation, Released, max_bytes=MAX_RECORD)
    return entry


# ------------------------------------------------------------------ named bytes


class Store(Protocol):
    """Bytes by name, for secrets and for the site's own records.

    A name has 1 to 100 characters of a-z, 0-9, `-`, `_` and `.`, and does not start with a dot.
    Capitals are not allowed, because some file systems do not tell them apart.
    """

    def get(self, name: str) -> bytes | None:
        """The bytes of a name, None if there are none; `ProtocolError` if they are damaged."""

    def put(self, name: str, data: bytes) -> None:
        """Set or replace the bytes of a name, all or nothing."""

    def put_new(self, name: str, data: bytes) -> None:
        """Set the bytes of a new name; `ProtocolError` if it exists. Of several, one wins."""

    def delete(self, name: str) -> None:
        """Remove a name, if it is there."""

    def names(self) -> list[str]:
        """All names, sorted."""


class MemoryStore(Store):
    """A `Store` for as long as the process lives."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self._data.get(_checked_name(name))

    def put(self, name: str, data: bytes) -> None:
        self._data[_checked_name(name)] = bytes(data)

    def put_new(self, name: str, data: bytes) -> None:
        if _checked_name(name) in self._data:
            raise _exists(name)
        self._data[name] = bytes(data)

    def delete(self, name: str) -> None:
        self._data.pop(_checked_name(name), None)

    def names(self) -> list[str]:
        return sorted(self._data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._data)} names)"


class FileStore(Store):
    """A `Store` of files with mode 0600 in a folder with mode 0700, which processes may share.

    A file is written under a hidden draft name first; a draft left by a crash is ignored.

    Args:
        folder: The folder, created if it does not exist.

    Raises:
        ProtocolError: The folder is not private.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        _make_folder(self.folder)
        _check_private(self.folder, self.folder.stat(), stat.S_IFDIR)

    def get(self, name: str) -> bytes | None:
        path = self.folder / _checked_name(name)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            _check_private(path, os.fstat(file), stat.S_IFREG)
            content = _read_all(file)
        finally:
            os.close(file)
        data = content[len(_BLOB_MAGIC) + hashlib.sha256().digest_size :]
        if content != _framed(data):
            raise ProtocolError(
                f"The file {path} is damaged: expected this release's header and a matching "
                f"SHA-256, got {len(content):,} bytes without. Restore it from a copy."
            )
        return data

    def put(self, name: str, data: bytes) -> None:
        path = self.folder / _checked_name(name)
        with self._draft(data) as draft:
            os.replace(draft, path)

    def put_new(self, name: str, data: bytes) -> None:
        path = self.folder / _checked_name(name)
        with self._draft(data) as draft:
            try:
                os.link(draft, path)
            except FileExistsError:
                raise _exists(name) from None

    @contextmanager
    def _draft(self, data: bytes) -> Iterator[str]:
        """A complete file under a hidden name, for the body to move or link."""
        file, draft = tempfile.mkstemp(prefix=".draft-", dir=self.folder)
        try:
            try:
                _write_all(file, _framed(data))
                os.fsync(file)
            finally:
                os.close(file)
            yield draft
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)
        _sync_folder(self.folder)

    def delete(self, name: str) -> None:
        (self.folder / _checked_name(name)).unlink(missing_ok=True)
        _sync_folder(self.folder)

    def names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ProtocolError(
            "A name needs 1 to 100 characters of a-z, 0-9, -, _ and . and does not start with a "
            f"dot, got {name[:40]!r}."
        )
    return name


def _exists(name: str) -> ProtocolError:
    return ProtocolError(f"The name {name} exists already: read it, or use `put` to replace it.")


def _framed(data: bytes) -> bytes:
    return _BLOB_MAGIC + hashlib.sha256(data).digest() + data


# ------------------------------------------------------------------ public bytes by their hash


class Blobs:
    """Public bytes in a `Store`, named by their hash; in-process agents should share one object.

    Args:
        store: Where they lie.
        max_bytes: Refuse to decode more than this.
    """

    def __init__(self, store: Store, *, max_bytes: int = MAX_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._decoded: dict[Any, Any] = {}  # replaced, never changed: threads may share it

    def put(self, data: bytes) -> str:
        """Keep some bytes; their `content_hash`."""
        digest = content_hash(data)
        self._store.put(digest, data)
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes of a hash; `ProtocolError` if they are missing or damaged."""
        data = self._store.get(_checked_digest(digest))
        if data is None or content_hash(data) != digest:
            what = "There are no bytes" if data is None else "There are other bytes"
            raise ProtocolError(f"{what} under the hash {digest[:8]}…: put them again.")
        return data

    def has(self, digest: str) -> bool:
        """Whether there are bytes of a hash; False for what is no hash."""
        return bool(_DIGEST.fullmatch(digest)) and digest in self._store.names()

    def keep(self, digests: Iterable[str]) -> None:
        """Drop all others."""
        kept = {_checked_digest(digest) for digest in digests}
        for name in self._store.names():
            if name not in kept and _DIGEST.fullmatch(name):
                self._store.delete(name)
        self._decoded = {key: made for key, made in self._decoded.items() if key[0] in kept}

    def load(self, digest: str, *types: type) -> Any:
        """The object in the bytes of a hash, of one of these types, as `decode` makes it.

        The last few objects are remembered and given out again: do not change their tensors.
        """
        key, known = (digest, types), self._decoded
        if key in known:
            return known[key]
        made = decode(self.get(digest), *types, max_bytes=self._max_bytes)
        self._decoded = dict([*known.items(), (key, made)][-_REMEMBERED:])
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"


class MemoryBlobs(Blobs):
    """Blobs for as long as the process lives."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(MemoryStore(), max_bytes=max_bytes)


class FileBlobs(Blobs):
    """Blobs as files.

    Args:
        folder: A folder of their own, created if it does not exist.
        max_bytes: Refuse to decode more than this.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(FileStore(folder), max_bytes=max_bytes)


def _checked_digest(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ProtocolError(f"A hash has 64 hexadecimal digits, got {digest[:40]!r}.")
    return digest


# ------------------------------------------------------------------ files


def _check_private(path: Path, status: os.stat_result, kind: int) -> None:
    """Raise unless a file or folder is ours and nobody else's."""
    name, mode = ("folder", "700") if kind == stat.S_IFDIR else ("regular file", "600")
    if stat.S_IFMT(status.st_mode) != kind:
        raise ProtocolError(f"{path} is no {name}: choose another place, or move it away.")
    if status.st_uid != os.geteuid():
        raise ProtocolError(
            f"{path} belongs to user {status.st_uid}, this process to user {os.geteuid()}: choose "
            f"another place, or run chown {os.geteuid()} {shlex.quote(str(path))}"
        )
    if status.st_mode & 0o077:
        raise ProtocolError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):o}, so that others have access. Make "
            f"it private: chmod {mode} {shlex.quote(str(path))}"
        )


def _make_folder(folder: Path) -> None:
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _read_all(file: int) -> bytes:
    with open(file, "rb", closefd=False) as reader:
        return reader.read()


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
