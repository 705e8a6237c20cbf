r"""Bytes that must survive a crash.

::

    MemoryStore, FileStore    named bytes: secrets, and the snapshots of a log
    MemoryBlobs, FileBlobs    public bytes named by their hash: broadcasts

Stored bytes are durable when the call returns. Files belong to one user, and no other user can
read them. A damaged file raises `ProtocolError` and stays as it is. A disk that fails raises
`OSError`. The classes with files need a POSIX system.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from botorch_fed.errors import ProtocolError
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode

_BLOB_MAGIC = b"bofedbl\x01"  # of a named file: magic with the format version
_REMEMBERED = 8  # decoded objects that one `Blobs` caches
_NAME = re.compile(r"[a-z0-9_-][a-z0-9_.-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


# ------------------------------------------------------------------ named bytes


class Store(Protocol):
    """Bytes by name, for secrets and snapshots.

    A name has 1 to 100 characters of a-z, 0-9, `-`, `_` and `.`, and does not start with a dot.
    Capitals are not allowed, because some file systems do not tell them apart.
    """

    def get(self, name: str) -> bytes | None:
        """The bytes of a name, None if there are none; `ProtocolError` if they are damaged."""

    def put(self, name: str, data: bytes) -> None:
        """Set or replace the bytes of a name, all or nothing."""

    def put_new(self, name: str, data: bytes) -> None:
        """Set the bytes of a new name; `ProtocolError` if it exists. One of several calls wins."""

    def delete(self, name: str) -> None:
        """Remove a name, if it is there."""

    def names(self) -> list[str]:
        """All names, sorted."""


class MemoryStore(Store):
    """A `Store` in memory."""

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
        self.folder = private_folder(folder)

    def get(self, name: str) -> bytes | None:
        path = self.folder / _checked_name(name)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            check_private(path, os.fstat(file), stat.S_IFREG)
            content = read_all(file)
        finally:
            os.close(file)
        data = content[len(_BLOB_MAGIC) + hashlib.sha256().digest_size :]
        if content != _framed(data):
            raise ProtocolError(
                f"The file {path} is damaged: expected this release's header and a matching "
                f"SHA-256, got {len(content):,} other bytes. Restore it from a copy."
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
        """A complete file under a hidden name, which the body moves or links."""
        file, draft = tempfile.mkstemp(prefix=".draft-", dir=self.folder)
        try:
            try:
                write_all(file, _framed(data))
                os.fsync(file)
            finally:
                os.close(file)
            yield draft
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)
        sync_folder(self.folder)

    def delete(self, name: str) -> None:
        (self.folder / _checked_name(name)).unlink(missing_ok=True)
        sync_folder(self.folder)

    def names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ProtocolError(
            "Expected a name of 1 to 100 characters of a-z, 0-9, -, _ and ., not starting with a "
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
        store: The store of the bytes.
        max_bytes: The longest data that are decoded.
    """

    def __init__(self, store: Store, *, max_bytes: int = MAX_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._decoded: dict[Any, Any] = {}  # replaced, never changed: threads may share it

    def put(self, data: bytes) -> str:
        """Store bytes and return their `content_hash`."""
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
        """Whether there are bytes of a hash; False for a malformed hash."""
        return bool(_DIGEST.fullmatch(digest)) and digest in self._store.names()

    def keep(self, digests: Iterable[str]) -> None:
        """Drop the bytes of all other hashes."""
        kept = {_checked_digest(digest) for digest in digests}
        for name in self._store.names():
            if name not in kept and _DIGEST.fullmatch(name):
                self._store.delete(name)
        self._decoded = {key: value for key, value in self._decoded.items() if key[0] in kept}

    def load(self, digest: str, *types: type) -> Any:
        """The object in the bytes of a hash, of one of these types, as `decode` makes it.

        The last few objects are cached and returned again: do not change their tensors.
        """
        key, cache = (digest, types), self._decoded
        if key in cache:
            return cache[key]
        value = decode(self.get(digest), *types, max_bytes=self._max_bytes)
        self._decoded = dict([*cache.items(), (key, value)][-_REMEMBERED:])
        return value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"


class MemoryBlobs(Blobs):
    """Blobs in memory."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(MemoryStore(), max_bytes=max_bytes)


class FileBlobs(Blobs):
    """Blobs as files.

    Args:
        folder: A folder for blobs only, created if it does not exist.
        max_bytes: The longest data that are decoded.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(FileStore(folder), max_bytes=max_bytes)


def _checked_digest(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ProtocolError(f"Expected a hash of 64 hexadecimal digits, got {digest[:40]!r}.")
    return digest


# ------------------------------------------------------------------ files


def private_folder(folder: str | Path) -> Path:
    """The absolute path of a folder with mode 0700, created if there is none; never a link."""
    path = Path(folder).absolute()
    _make_folder(path)
    check_private(path, path.lstat(), stat.S_IFDIR)
    return path


def check_private(path: Path, status: os.stat_result, kind: int) -> None:
    """Raise unless a file or folder belongs to this user, without access for others."""
    name, mode = ("folder", "700") if kind == stat.S_IFDIR else ("regular file", "600")
    if stat.S_ISLNK(status.st_mode):
        raise ProtocolError(f"{path} is a symbolic link: name the {name} itself.")
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
    if not os.path.lexists(folder):
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read_all(file: int) -> bytes:
    with open(file, "rb", closefd=False) as reader:
        return reader.read()


def own_folder(folder: str | Path) -> Path:
    """The absolute path of a folder, never a link; it and its parents are made with mode 0700."""
    path = Path(folder).absolute()
    if path.is_symlink():
        raise ProtocolError(f"{path} is a symbolic link: name the folder itself.")
    _make_folder(path)
    return path


def write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
