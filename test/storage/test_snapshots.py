"""Snapshots: what two of them have in common is written once, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from botorch_fed.storage.snapshots import LEAST, Snapshots
from botorch_fed.storage.store import FileStore, MemoryStore
from botorch_fed.wire.codec import byte_strings, content_hash, encode

BLOCK = LEAST // 8 + 1  # numbers of a tensor that is long enough to be shared


@dataclass(frozen=True, eq=False)
class State:
    t: int
    blocks: tuple[Tensor, ...]
    words: bytes = b""


def state(t: int, *blocks: int, words: bytes = b"") -> bytes:
    """An encoded state; a block is told by its number."""
    made = tuple(torch.arange(BLOCK).double() + 1000 * block for block in blocks)
    return encode(State(t, made, words), max_bytes=2**24)


def stored(store: MemoryStore) -> int:
    return sum(len(store.get(name) or b"") for name in store.names())


def test_byte_strings_are_where_the_codec_puts_them() -> None:
    data = state(3, 1, 2, words=b"w" * LEAST)
    found = [data[start:stop] for start, stop in byte_strings(data, LEAST)]
    assert [len(piece) for piece in found] == [8 * BLOCK, 8 * BLOCK, LEAST]
    assert found[2] == b"w" * LEAST
    assert list(byte_strings(data, LEAST + 1)) == list(byte_strings(data, LEAST))[:2]
    assert list(byte_strings(data[:-1], LEAST))[-1][1] < len(data) - 1  # cut off: not whole
    assert list(byte_strings(b"no message", 1)) == []


def test_what_stays_is_written_once() -> None:
    store = MemoryStore()
    snapshots = Snapshots(store)
    whole = len(state(0, *range(10)))
    for t in range(20):
        data = state(t, *range(9), 100 + t)
        digest = snapshots.put(data)
        assert digest == content_hash(data)
        snapshots.keep([digest])
        assert snapshots.get(digest) == data
        assert stored(store) < 1.25 * whole
        assert len(store.names()) <= 2


def test_a_new_process_reads_and_drops_them(tmp_path: Path) -> None:
    first, second = state(1, 1, 2), state(2, 1, 3)
    snapshots = Snapshots(FileStore(tmp_path))
    old, new = snapshots.put(first), snapshots.put(second)
    assert len(FileStore(tmp_path).get(new) or b"") < 0.7 * len(second)
    again = Snapshots(FileStore(tmp_path))
    assert again.get(new) == second
    again.keep([new])  # the first one is needed by it
    assert again.store.names() == sorted([old, new])
    third = again.put(state(3, 1, 3))
    again.keep([third])  # which a new process wrote as a whole
    assert again.store.names() == [third]


def test_a_new_process_writes_nothing_in_which_others_stand() -> None:
    store = MemoryStore()
    snapshots = Snapshots(store)
    first, second, third = state(1, 1, 2, 3), state(2, 1, 2, 4), state(3, 1, 2, 4, 5)
    for data in (first, second, third):
        last = snapshots.put(data)
    snapshots.keep([last])
    assert len(store.names()) == 3
    again = Snapshots(store)
    again.put(second)
    assert again.get(last) == third
    again.keep([last])
    assert again.get(last) == third


def test_a_snapshot_that_another_one_needs_stays_as_it_is() -> None:
    """The same bytes again, while only pieces of them are in use."""
    store = MemoryStore()
    snapshots = Snapshots(store)
    first = state(1, 1, 2, 3)
    old = snapshots.put(first)
    second = state(2, 1, 2, 4)
    new = snapshots.put(second)
    snapshots.keep([new])
    assert snapshots.put(first) == old
    assert (snapshots.get(old), snapshots.get(new)) == (first, second)
    snapshots.keep([old])
    assert snapshots.get(old) == first
    assert snapshots.get(new) is None


def test_a_damaged_source_is_noticed() -> None:
    store = MemoryStore()
    snapshots = Snapshots(store)
    old, new = snapshots.put(state(1, 1, 2)), snapshots.put(state(2, 1, 3))
    good = store.get(old)
    assert good is not None
    store.put(old, good[:-1] + bytes([good[-1] ^ 1]))
    assert snapshots.get(old) is None
    assert snapshots.get(new) is None
    store.delete(old)
    assert snapshots.get(new) is None
    store.put(old, good)
    assert snapshots.get(new) == state(2, 1, 3)
    store.put(new, b"something else")
    assert snapshots.get(new) is None


def test_a_failed_write_is_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(MemoryStore):
        full = False

        def put(self, name: str, data: bytes) -> None:
            if self.full:
                raise OSError("No space left on device")
            super().put(name, data)

    store = Full()
    snapshots = Snapshots(store)
    snapshots.put(state(1, 1, 2))
    for data in (state(2, 1, 3), state(2, 4, 5)):
        store.full = True
        with pytest.raises(OSError, match="No space"):
            snapshots.put(data)
        store.full = False
        assert snapshots.get(snapshots.put(data)) == data


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 6), max_size=5),  # blocks
            st.sampled_from(["keep it", "keep both", "keep none", "open again"]),
        ),
        max_size=12,
    )
)
def test_what_is_kept_can_be_read(steps: list[tuple[list[int], str]]) -> None:
    store = MemoryStore()
    snapshots = Snapshots(store)
    kept: dict[str, bytes] = {}
    for blocks, then in steps:
        data = state(0, *blocks, words=bytes(blocks) * 2000)
        digest = snapshots.put(data)
        if then == "keep it":
            kept = {digest: data}
        elif then == "keep both":
            kept = {**kept, digest: data}
        snapshots.keep(kept)
        if then == "open again":
            snapshots = Snapshots(store)
        for name, expected in kept.items():
            assert snapshots.get(name) == expected
        whole = 3 * sum(map(len, kept.values())) + 2000
        assert stored(store) <= whole
