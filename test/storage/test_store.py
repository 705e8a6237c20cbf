"""Stores and blobs against crashes, damage and each other."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import botorch_fed.storage.store as store_module
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.storage.store import (
    Blobs,
    FileBlobs,
    FileStore,
    MemoryBlobs,
    MemoryStore,
    Store,
)
from botorch_fed.wire.codec import content_hash, encode
from test.files import FORKS, FullDisk, fail, in_child

SECRET = b"hunter2-hunter2"


def test_a_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    secrets, blobs = FileStore("secrets"), FileBlobs("blobs")
    monkeypatch.chdir(tmp_path / "elsewhere")
    secrets.put("key", SECRET)
    blobs.put(b"public")
    assert sorted(os.listdir(tmp_path)) == ["blobs", "elsewhere", "secrets"]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_bytes_reach_the_disk_before_the_call_returns(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[int] = []
    sync = os.fsync

    def noted(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    store = FileStore(tmp_path / "a" / "b")
    synced.clear()
    store.put("key", SECRET)
    assert synced == [(store.folder / "key").stat().st_ino, store.folder.stat().st_ino]
    synced.clear()
    store.put_new("key-2", SECRET)
    assert synced == [(store.folder / "key-2").stat().st_ino, store.folder.stat().st_ino]


# ------------------------------------------------------------------ stores


@pytest.fixture(params=[MemoryStore, FileStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param is MemoryStore else FileStore(tmp_path / "a" / "store")


def test_a_store_keeps_bytes_by_name(store: Store) -> None:
    assert store.get("key-1") is None
    store.put("key-1", b"old")
    store.put("key-1", SECRET)
    assert store.get("key-1") == SECRET
    store.put_new("empty", b"")
    assert store.get("empty") == b""
    with pytest.raises(ProtocolError, match="key-1 exists already") as caught:
        store.put_new("key-1", b"other")
    assert "hunter" not in str(caught.value) + repr(store)
    assert store.get("key-1") == SECRET
    assert store.names() == ["empty", "key-1"]
    for _ in range(2):
        store.delete("key-1")
    assert store.get("key-1") is None
    store.put_new("key-1", b"other")


@pytest.mark.parametrize(
    "name", ["", "../key", "a/b", ".a", "..", "Key", "é", "a\n", "a\0", "a" * 101, "²", "a b"]
)
def test_names_are_checked(store: Store, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.get(name),
        lambda: store.put(name, SECRET),
        lambda: store.put_new(name, SECRET),
        lambda: store.delete(name),
    ]
    for call in calls:
        with pytest.raises(ProtocolError, match="1 to 100 characters") as caught:
            call()
        assert "hunter" not in str(caught.value)
    store.put("a" * 100, b"")
    store.put("-_.", b"")


def test_a_file_store_is_private(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.put("key", SECRET)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((store.folder / "key").stat().st_mode) == 0o600
    assert os.listdir(store.folder) == ["key"]
    assert FileStore(tmp_path / "store").get("key") == SECRET
    (store.folder / "key").chmod(0o604)
    with pytest.raises(ProtocolError, match=f"mode 604.*chmod 600 {store.folder / 'key'}"):
        store.get("key")
    (store.folder / "link").symlink_to(store.folder / "key")
    with pytest.raises(OSError, match="symbolic"):
        store.get("link")
    store.folder.chmod(0o710)
    with pytest.raises(ProtocolError, match=f"chmod 700 {store.folder}"):
        FileStore(store.folder)
    with pytest.raises(ProtocolError, match="no folder"):
        FileStore(store.folder / "key")


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.put("key", SECRET)
    file = store.folder / "key"
    whole = file.read_bytes()
    cases = [whole[:cut] for cut in range(len(whole))] + [whole + b"\0", bytes(len(whole))]
    for where in range(len(whole)):
        cases.append(whole[:where] + bytes([whole[where] ^ 1]) + whole[where + 1 :])
    for data in cases:
        file.write_bytes(data)
        with pytest.raises(ProtocolError, match="is damaged") as caught:
            store.get("key")
        assert "hunter" not in str(caught.value)
        assert file.read_bytes() == data


def test_a_full_disk_changes_nothing_in_a_store(tmp_path: Path, monkeypatch: Any) -> None:
    store = FileStore(tmp_path / "store")
    store.put("key", b"old")
    for room in range(0, 50, 9):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", FullDisk(room, then=fail))
            for call in (store.put, store.put_new):
                with pytest.raises(OSError, match="No space left"):
                    call("key", SECRET)
        assert store.get("key") == b"old"
        assert os.listdir(store.folder) == ["key"]  # no drafts either


@FORKS
@pytest.mark.parametrize("step", ["write", "fsync", "replace", "unlink"])
def test_a_process_killed_in_put_leaves_the_old_or_the_new(tmp_path: Path, step: str) -> None:
    store = FileStore(tmp_path / "store")
    store.put("key", b"old")

    def killed() -> None:
        setattr(os, step, lambda *_: os._exit(3))
        store.put("key", SECRET)

    assert in_child(killed) == 3
    assert store.get("key") == (SECRET if step == "unlink" else b"old")
    assert FileStore(store.folder).names() == ["key"]  # a draft is ignored
    store.put("key", b"newer")
    assert store.get("key") == b"newer"


@FORKS
def test_of_processes_that_race_for_a_name_exactly_one_wins(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    for turn in range(10):
        gate = os.pipe()
        children = []
        for who in range(4):
            child = os.fork()
            if child == 0:
                code = 9
                try:
                    os.close(gate[1])
                    os.read(gate[0], 1)  # until the parent opens the gate
                    store.put_new(f"name-{turn}", bytes([who]) * 1000)
                    code = 0
                except ProtocolError:
                    code = 1
                finally:
                    os._exit(code)
            children.append(child)
        os.close(gate[1])
        os.close(gate[0])
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert sorted(codes) == [0, 1, 1, 1]
        assert store.get(f"name-{turn}") == bytes([codes.index(0)]) * 1000


# ------------------------------------------------------------------ blobs


@dataclass(frozen=True, eq=False)
class Broadcast:
    values: Tensor


@dataclass(frozen=True)
class Notice:
    text: str


@pytest.fixture(params=[MemoryBlobs, FileBlobs])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return MemoryBlobs() if request.param is MemoryBlobs else FileBlobs(tmp_path / "blobs")


def test_blobs_are_found_by_their_hash(blobs: Blobs) -> None:
    first, second = blobs.put(b"one"), blobs.put(b"two")
    assert first == content_hash(b"one")
    assert blobs.put(b"one") == first
    assert blobs.get(first) == b"one"
    assert blobs.has(second)
    blobs.keep([second, content_hash(b"never seen")])
    assert not blobs.has(first)
    assert blobs.get(second) == b"two"
    with pytest.raises(ProtocolError, match=f"no bytes under the hash {first[:8]}…: put"):
        blobs.get(first)
    for bad in ["", "../record", "record", first.upper(), first + "\n"]:
        assert not blobs.has(bad)  # as a hostile request may name it
        with pytest.raises(ProtocolError, match="64 hexadecimal digits"):
            blobs.get(bad)
    with pytest.raises(ProtocolError, match="64 hexadecimal digits"):
        blobs.keep(second)  # a string is a sequence of strings, too
    assert blobs.has(second)


def test_large_blobs_are_refused_or_allowed(tmp_path: Path) -> None:
    data = encode(Broadcast(torch.ones(3, dtype=torch.float64)))
    for small, large in (
        (MemoryBlobs(max_bytes=10), MemoryBlobs(max_bytes=1000)),
        (FileBlobs(tmp_path / "a", max_bytes=10), FileBlobs(tmp_path / "b", max_bytes=1000)),
    ):
        with pytest.raises(MessageError, match="at most 10 bytes"):
            small.load(small.put(data), Broadcast)
        assert torch.equal(large.load(large.put(data), Broadcast).values, torch.ones(3).double())


def test_blobs_are_decoded_once(blobs: Blobs, monkeypatch: Any) -> None:
    made: list[int] = []
    decode = store_module.decode

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return decode(*args, **kwargs)

    monkeypatch.setattr(store_module, "decode", counted)
    digest = blobs.put(encode(Broadcast(torch.ones(3, dtype=torch.float64))))
    first = blobs.load(digest, Broadcast, Notice)
    assert torch.equal(first.values, torch.ones(3, dtype=torch.float64))
    assert all(blobs.load(digest, Broadcast, Notice) is first for _ in range(5))
    assert len(made) == 1
    with pytest.raises(MessageError, match="Expected Notice"):
        blobs.load(digest, Notice)
    for text in "abcdefghi":
        blobs.load(blobs.put(encode(Notice(text))), Notice)
    assert blobs.load(digest, Broadcast, Notice) is not first  # only the last few are remembered
    assert len(blobs._decoded) == 8
    blobs.keep([])
    with pytest.raises(ProtocolError, match="no bytes under"):
        blobs.load(digest, Broadcast, Notice)


def test_blobs_travel_to_a_worker(blobs: Blobs) -> None:
    digest = blobs.put(encode(Notice("hello")))
    blobs.load(digest, Notice)
    again = pickle.loads(pickle.dumps(blobs))
    assert again.load(digest, Notice) == Notice("hello")


def test_damaged_and_exchanged_blobs_are_noticed(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path / "blobs")
    digests = [blobs.put(b"one"), blobs.put(b"two")]
    files = [tmp_path / "blobs" / digest for digest in digests]
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(ProtocolError, match="other bytes under the hash"):
        blobs.get(digests[0])
    files[1].write_bytes(b"zero")
    with pytest.raises(ProtocolError, match="is damaged"):
        blobs.get(digests[1])
    for data, digest in zip([b"one", b"two"], digests, strict=True):
        blobs.put(data)
        assert blobs.get(digest) == data


def test_blobs_know_nothing_of_other_names(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "both")
    store.put("key", SECRET)
    blobs = FileBlobs(tmp_path / "both")
    blobs.put(b"one")
    assert not blobs.has("key")
    blobs.keep([])
    assert store.names() == ["key"]


def test_a_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProtocolError, match="symbolic link: name the folder itself"):
        FileStore(tmp_path / "store")
    FileStore(tmp_path / "elsewhere").put("name", b"data")
    with pytest.raises(ProtocolError, match="symbolic link: name the folder itself"):
        FileStore(tmp_path / "store")
