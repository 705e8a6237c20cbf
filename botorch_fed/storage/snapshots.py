r"""Snapshots of large objects that change a little: their common parts are stored once.

A snapshot is stored whole, or in pieces: new bytes, and references to byte ranges of older
snapshots. The pieces are the long byte strings of encoded data, so that a tensor that does not
change between two states is not written again. An older snapshot is kept while another one needs
it. When the older snapshots take too much space, the next snapshot is stored whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from botorch_fed.errors import MessageError
from botorch_fed.storage.store import Store
from botorch_fed.wire.codec import byte_strings, content_hash, decode, encode

LEAST = 4096  # bytes of a piece
MAX_SNAPSHOT = 2**31
_WASTE = 2.0  # largest space on the disk for one snapshot, in multiples of its size


@dataclass(frozen=True, eq=False)
class _Pieces:
    """A snapshot in pieces.

    Attributes:
        local: Bytes that this snapshot stores.
        sources: Hashes of other snapshots.
        spans: One row per piece, `n x 3`: index of its source (-1 for `local`), first byte, length.
    """

    local: bytes = field(repr=False)
    sources: tuple[str, ...]
    spans: Tensor


class Snapshots:
    """Bytes by their hash.

    Args:
        store: A store for snapshots only.
        share: Whether common parts of snapshots are stored once.
    """

    def __init__(self, store: Store, *, share: bool = True) -> None:
        self.store = store
        self._share = share
        self._sources: dict[str, frozenset[str]] = {}  # the snapshots that a snapshot needs
        self._sizes: dict[str, int] = {}  # number of bytes that a snapshot stores itself
        self._places: dict[bytes, tuple[str, int]] = {}  # of byte strings, by their hash

    def put(self, data: bytes) -> str:
        """Store bytes and return their hash."""
        digest = content_hash(data)
        if not self._share:
            self.store.put(digest, data)
            return digest
        if digest in self._sources or self.get(digest) == data:
            return digest  # never written twice: others may refer to it
        pieces, places = self._split(digest, data)
        sources = self._needed(pieces.sources)
        stored = len(pieces.local) + sum(self._sizes[source] for source in sources)
        if sources and stored <= _WASTE * len(data):
            self.store.put(digest, encode(pieces, max_bytes=MAX_SNAPSHOT))
        else:
            self._places.clear()
            sources, (pieces, places) = frozenset(), self._split(digest, data)
            self.store.put(digest, data)
        self._sources[digest] = sources
        self._sizes[digest] = len(pieces.local)
        self._places.update(places)
        return digest

    def get(self, digest: str) -> bytes | None:
        """The bytes of a hash; None if they are missing or damaged."""
        data = self.store.get(digest)
        if data is None or content_hash(data) == digest:
            return data
        pieces = _pieces(data)
        sources = [self._local(source) for source in pieces.sources] if pieces else []
        if pieces is None or None in sources:
            return None
        parts = [pieces.local, *filter(None, sources)]
        spans = pieces.spans.tolist()
        data = b"".join(parts[n + 1][start : start + size] for n, start, size in spans)
        return data if content_hash(data) == digest else None

    def keep(self, digests: Iterable[str]) -> None:
        """Drop all snapshots except these and those that they need."""
        needed = self._needed(digests)
        for name in self.store.names():
            if name not in needed:
                self.store.delete(name)
        self._sources = {d: sources for d, sources in self._sources.items() if d in needed}
        self._sizes = {d: size for d, size in self._sizes.items() if d in needed}
        self._places = {key: place for key, place in self._places.items() if place[0] in needed}

    def _split(self, digest: str, data: bytes) -> tuple[_Pieces, dict[bytes, tuple[str, int]]]:
        """A snapshot in pieces, and the places of the byte strings that it stores first.

        Without any stored byte string, the whole snapshot is one local piece.
        """
        local, sources, spans, places = bytearray(), dict[str, int](), [], {}
        done = 0
        for start, stop in self._strings(data):
            key = hashlib.sha256(data[start:stop]).digest()
            place = self._places.get(key)
            if place is None:
                places[key] = (digest, len(local) + start - done)
                continue
            source = sources.setdefault(place[0], len(sources))
            spans += [(-1, len(local), start - done), (source, place[1], stop - start)]
            local += data[done:start]
            done = stop
        spans.append((-1, len(local), len(data) - done))
        local += data[done:]
        return _Pieces(bytes(local), tuple(sources), torch.tensor(spans)), places

    def _strings(self, data: bytes) -> Iterable[tuple[int, int]]:
        try:
            return list(byte_strings(data, LEAST))
        except MessageError:  # no encoded data
            return []

    def _local(self, digest: str) -> bytes | None:
        """The bytes that a snapshot stores itself."""
        data = self.store.get(digest)
        if data is None or content_hash(data) == digest:
            return data
        pieces = _pieces(data)
        return None if pieces is None else pieces.local

    def _needed(self, digests: Iterable[str]) -> frozenset[str]:
        """The given snapshots, and all others that they need."""
        named = set(digests)
        return frozenset(named.union(*map(self._sources_of, named)))

    def _sources_of(self, digest: str) -> frozenset[str]:
        if not self._share:
            return frozenset()
        if digest in self._sources:
            return self._sources[digest]
        data = self.store.get(digest)
        pieces = None if data is None or content_hash(data) == digest else _pieces(data)
        return frozenset() if pieces is None else self._needed(pieces.sources)


def _pieces(data: bytes) -> _Pieces | None:
    try:
        pieces: _Pieces = decode(data, _Pieces, max_bytes=MAX_SNAPSHOT)
    except MessageError:
        return None
    return pieces
