"""Journals, stores and blobs against crashes, damage and each other."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

import botorch_fed.protocols.store as store_module
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.protocols.store import (
    Blobs,
    FileBlobs,
    FileJournal,
    FileStore,
    Journal,
    MemoryBlobs,
    MemoryStore,
    Observation,
    Released,
    Store,
)
from botorch_fed.wire.codec import content_hash, encode

HEADER = 12
SECRET = b"hunter2-hunter2"
# Python 3.12 warns of fork beside threads; the children here only touch files and exit.
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def observation(index: int, *, value: float | None = None, q: int = 2) -> Observation:
    X = torch.full((q, 3), float(index) + 0.1, dtype=torch.float64)
    Y = torch.full((q, 1), 0.3 if value is None else value, dtype=torch.float64)
    return Observation("r", "i", 1, "abc", index, X, Y)


def same(a: Observation | None, b: Observation) -> bool:
    return a is not None and encode(a) == encode(b)


def in_child(job: Callable[[], object]) -> int:
    """Run a job in a forked process; 0 if it returned, 9 if it raised, else its own `os._exit`."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            job()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For thousands of files in one test."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def written(path: Path, count: int) -> list[int]:
    """A journal of some observations and, last, a release; where each record ends."""
    ends = [HEADER]
    with FileJournal(path) as journal:
        for index in range(count):
            journal.record(observation(index))
            ends.append(path.stat().st_size)
        journal.release(Released("r", "i", 1, "abc"))
        ends.append(path.stat().st_size)
    return ends


# ------------------------------------------------------------------ entries and journals


def test_an_observation_is_checked_and_its_repr_hides_the_data() -> None:
    good = observation(0, value=0.123)
    assert good.address == ("r", "i", 1, "abc", 0)
    assert "tensor" not in repr(good)
    with pytest.raises(InputDataError, match="X `q x d` and Y `q x 1`"):
        replace(good, Y=good.X)
    with pytest.raises(InputDataError, match="float64"):
        replace(good, Y=good.Y.float())
    with pytest.raises(InputDataError, match="counts from 1"):
        replace(good, serial=0)
    with pytest.raises(InputDataError, match="counts from 1"):
        Released("r", "i", 0, "abc")


@pytest.fixture(params=[Journal, FileJournal])
def journal(request: pytest.FixtureRequest, path: Path) -> Any:
    made = Journal() if request.param is Journal else FileJournal(path)
    with made:
        yield made


def test_a_journal_finds_what_it_was_given(journal: Journal) -> None:
    assert journal.empty
    assert (journal.last("r", "i"), journal.released("r", "i")) == (0, 0)
    for index in range(3):
        journal.record(observation(index))
    assert same(journal.find("r", "i", 1, "abc", 2), observation(2))
    for address in [("s", "i", 1, "abc", 2), ("r", "j", 1, "abc", 2), ("r", "i", 2, "abc", 2)]:
        assert journal.find(*address) is None
    assert journal.find("r", "i", 1, "abd", 2) is None
    assert [o.index for o in journal] == [0, 1, 2]
    assert len(journal) == 3
    assert (journal.last("r", "i"), journal.released("r", "i")) == (1, 0)
    journal.release(Released("r", "i", 1, "abc"))
    journal.release(Released("r", "j", 7, "abc"))
    assert (journal.last("r", "i"), journal.released("r", "i")) == (1, 1)
    assert (journal.last("r", "j"), journal.released("r", "j")) == (7, 7)
    assert len(journal) == 3
    assert not journal.empty
    assert "0.3" not in repr(journal)


def test_the_same_entry_may_come_again_and_another_may_not(journal: Journal) -> None:
    for _ in range(2):
        journal.record(observation(0))
        journal.release(Released("r", "i", 1, "abc"))
    for other in [observation(0, value=0.7777), observation(0, q=1)]:
        with pytest.raises(ProtocolError, match="another observation for serial 1") as caught:
            journal.record(other)
        assert "0.7777" not in str(caught.value)
    with pytest.raises(ProtocolError, match="another release for serial 1"):
        journal.release(Released("r", "i", 1, "abd"))
    assert len(journal) == 1
    assert same(journal.find("r", "i", 1, "abc", 0), observation(0))


def test_a_journal_keeps_copies_and_refuses_what_cannot_be_read(journal: Journal) -> None:
    mine = observation(0)
    journal.record(mine)
    mine.X.zero_()
    assert same(journal.find("r", "i", 1, "abc", 0), observation(0))
    with pytest.raises(MessageError, match="finite"):
        journal.record(observation(1, value=float("nan")))

    class Special(Observation):
        pass

    broken = observation(1)
    broken.Y.resize_(3, 1)  # behind the back of the checks
    for bad in [Special(*observation(1).address, broken.X, broken.X[:, :1]), broken]:
        with pytest.raises((MessageError, TypeError)):
            journal.record(bad)
    assert len(journal) == 1


# ------------------------------------------------------------------ journals on disk


def test_a_file_journal_survives_closing(path: Path) -> None:
    written(path, 3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    size = path.stat().st_size
    with FileJournal(path) as again:
        assert [o.index for o in again] == [0, 1, 2]
        assert all(same(o, observation(o.index)) for o in again)
        assert again.released("r", "i") == 1
        again.record(observation(1))  # identical: nothing is written
        assert path.stat().st_size == size
        assert str(path) in repr(again)
    again.close()
    for call in [lambda: len(again), lambda: again.record(observation(5)), lambda: list(again)]:
        with pytest.raises(ProtocolError, match="is closed: open it again"):
            call()


def test_a_second_opener_is_refused(path: Path) -> None:
    with FileJournal(path) as journal:
        with pytest.raises(ProtocolError, match="open already") as caught:
            FileJournal(path)
        assert str(path) in str(caught.value)
        journal.record(observation(0))
    journal = FileJournal(path)
    del journal  # forgotten, not closed
    FileJournal(path).close()


@FORKS
def test_other_processes_are_kept_out(path: Path) -> None:
    journal = FileJournal(path)

    def open_again() -> None:
        with pytest.raises(ProtocolError, match="open already"):
            FileJournal(path)

    def use_the_parents() -> None:
        for call in [lambda: journal.record(observation(0)), lambda: len(journal)]:
            with pytest.raises(ProtocolError, match="before a fork"):
                call()
        journal.close()  # its own copy: the parent's lock stays

    assert in_child(open_again) == 0
    assert in_child(use_the_parents) == 0
    assert in_child(open_again) == 0
    journal.record(observation(1))
    gate = os.pipe()
    child = os.fork()
    if child == 0:  # lives on with a copy of the descriptor, as a worker would
        os.close(gate[1])
        os.read(gate[0], 1)
        os._exit(0)
    journal.close()
    with FileJournal(path) as again:
        assert len(again) == 1
    os.close(gate[1])
    os.close(gate[0])
    os.waitpid(child, 0)
    assert os.get_inheritable(FileJournal(path)._file) is False


def test_a_journal_that_others_can_read_is_refused(path: Path, tmp_path: Path) -> None:
    written(path, 1)
    path.chmod(0o640)
    with pytest.raises(ProtocolError, match=f"mode 640.*chmod 600 {path}"):
        FileJournal(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ProtocolError, match="no regular file"):
        FileJournal(tmp_path / "pipe")
    path.chmod(0o600)
    FileJournal(path).close()


def test_a_journal_of_another_user_is_refused(path: Path, monkeypatch: Any) -> None:
    written(path, 1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ProtocolError, match="belongs to user"):
        FileJournal(path)


def test_a_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with FileJournal("journal") as journal:
        secrets, blobs = FileStore("secrets"), FileBlobs("blobs")
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert journal.path == (tmp_path / "journal").resolve()
        journal.record(observation(0))
        secrets.put("key", SECRET)
        blobs.put(b"public")
    assert sorted(os.listdir(tmp_path)) == ["blobs", "elsewhere", "journal", "secrets"]
    assert os.listdir(tmp_path / "elsewhere") == []
    with FileJournal(tmp_path / "journal") as journal:
        assert len(journal) == 1


@pytest.mark.usefixtures("no_sync")
def test_a_last_record_cut_anywhere_is_dropped(path: Path, caplog: Any) -> None:
    ends = written(path, 2)
    whole = path.read_bytes()
    for last in (1, 2, 3):  # an observation, another one, a release; also within the header
        for cut in range(ends[last - 1], ends[last]):
            path.write_bytes(whole[:cut])
            with FileJournal(path) as journal:
                assert len(journal) == last - 1
                assert path.stat().st_size == ends[last - 1]
                if last == 2:
                    journal.record(observation(1))
                    assert path.read_bytes() == whole[: ends[2]]
    assert "dropped" in caplog.text
    assert str(ends[3] - 1 - ends[2]) in caplog.text
    for cut in range(HEADER):  # while the file was created; or its content never came to the disk
        for data in (whole[:cut], bytes(cut)):
            path.write_bytes(data)
            with FileJournal(path) as journal:
                assert journal.empty
            assert path.read_bytes() == whole[:HEADER]


def test_zeros_at_the_end_are_dropped(path: Path) -> None:
    ends = written(path, 2)
    whole = path.read_bytes()
    for zeros in (1, 11, 12, 13, 5000):
        for cut in (ends[0], ends[3], ends[2] + 4, ends[2] + 12):  # also behind a frame or half one
            path.write_bytes(whole[:cut] + bytes(zeros))
            with FileJournal(path) as journal:
                assert len(journal) == (0 if cut == ends[0] else 2)
                assert journal.released("r", "i") == (1 if cut == ends[3] else 0)
            assert path.stat().st_size == max(end for end in ends if end <= cut)


@pytest.mark.parametrize("blank", [True, False])
def test_a_last_record_with_unwritten_sectors_is_dropped(path: Path, blank: bool) -> None:
    ends = written(path, 1)
    with FileJournal(path) as journal:
        journal.record(observation(7, q=60))
    whole = path.read_bytes()
    border = (len(whole) - 1) // 512 * 512
    assert border > ends[-1]
    path.write_bytes(whole[:border].ljust(len(whole), b"\0" if blank else b"\x01"))
    if blank:
        with FileJournal(path) as journal:
            assert len(journal) == 1
        assert path.read_bytes() == whole[: ends[-1]]
    else:  # complete, but wrong: not what a crash leaves behind
        with pytest.raises(ProtocolError, match=f"damaged at byte {ends[-1]} "):
            FileJournal(path)


@pytest.mark.usefixtures("no_sync")
def test_a_changed_byte_is_noticed_everywhere(path: Path) -> None:
    ends = written(path, 2)
    whole = path.read_bytes()
    for where in range(len(whole)):
        for flip in (0x01, 0xFF):
            damaged = bytearray(whole)
            damaged[where] ^= flip
            path.write_bytes(damaged)
            record = max([0] + [end for end in ends if end <= where])
            with pytest.raises(ProtocolError, match=f"damaged at byte {record} ") as caught:
                FileJournal(path)
            assert str(path) in str(caught.value)
            assert path.read_bytes() == damaged  # nothing was thrown away


def test_damage_in_front_of_a_cut_keeps_the_file_as_it_is(path: Path) -> None:
    ends = written(path, 2)
    damaged = bytearray(path.read_bytes()[:-3])
    damaged[ends[1] + 20] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ProtocolError, match=f"at byte {ends[1]} "):
        FileJournal(path)
    assert path.read_bytes() == damaged


def test_a_file_of_something_else_is_refused(path: Path) -> None:
    written(path, 1)
    good = path.read_bytes()
    foreign = encode(Foreign(1))
    size = len(foreign).to_bytes(4, "little")
    frame = size + b"".join(zlib.crc32(x).to_bytes(4, "little") for x in (size, foreign))
    with FileJournal(path.with_name("other")) as other:
        other.record(observation(0, value=0.7777))
    conflict = path.with_name("other").read_bytes()[HEADER:]
    for data in [b"x", b"\0" * 100, good[:8] + b"\x02" + good[9:], good + frame + foreign]:
        path.write_bytes(data)
        with pytest.raises(ProtocolError, match="damaged at byte"):
            FileJournal(path)
        assert path.read_bytes() == data
    path.write_bytes(good + conflict)
    with pytest.raises(ProtocolError, match=f"at byte {len(good)} .*another observation") as caught:
        FileJournal(path)
    assert "0.7777" not in str(caught.value)
    path.write_bytes(good + good[HEADER:])  # identical duplicates
    with FileJournal(path) as journal:
        assert len(journal) == 1


@dataclass(frozen=True)
class Foreign:
    number: int


class FullDisk:
    """`os.write` that takes a number of bytes, in small pieces, and then fails or ends."""

    def __init__(self, room: int, *, then: Callable[[], object]) -> None:
        self.room = room
        self.then = then
        self.write = os.write

    def __call__(self, file: int, data: bytes) -> int:
        if self.room == 0:
            self.then()
        taken = self.write(file, bytes(data[: min(self.room, 50)]))
        self.room -= taken
        return taken


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_last_good_record(path: Path, monkeypatch: Any) -> None:
    with FileJournal(path) as journal:
        journal.record(observation(0))
        good = path.read_bytes()
        journal.record(observation(1))
        length = path.stat().st_size - len(good)
    path.write_bytes(good)
    with FileJournal(path) as journal:
        for room in range(0, length, 7):
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", FullDisk(room, then=fail))
                with pytest.raises(OSError, match="No space left"):
                    journal.record(observation(1))
            assert path.read_bytes() == good
            assert len(journal) == 1
            assert journal.find("r", "i", 1, "abc", 1) is None
        with monkeypatch.context() as patch:  # short writes alone are no failure
            patch.setattr(os, "write", FullDisk(10**6, then=fail))
            journal.record(observation(1))
    with FileJournal(path) as journal:
        assert len(journal) == 2


@pytest.mark.parametrize("failing", ["ftruncate", "fsync"])
def test_a_disk_that_cannot_even_truncate_breaks_the_journal(
    path: Path, monkeypatch: Any, failing: str
) -> None:
    journal = FileJournal(path)
    journal.record(observation(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(20, then=fail))
        patch.setattr(os, failing, lambda *_: fail())
        with pytest.raises(OSError, match="No space left"):
            journal.record(observation(1))
    for call in (
        lambda: journal.record(observation(1)),
        lambda: journal.release(Released("r", "i", 1, "abc")),
        lambda: journal.find("r", "i", 1, "abc", 0),
        lambda: journal.last("r", "i"),
        lambda: journal.released("r", "i"),
        lambda: list(journal),
        lambda: len(journal),
    ):
        with pytest.raises(ProtocolError, match="failed write"):
            call()
    assert str(path) in repr(journal)
    journal.close()
    with FileJournal(path) as journal:
        assert len(journal) == 1


def test_an_interrupt_in_a_write_breaks_the_journal(path: Path, monkeypatch: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    journal = FileJournal(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(20, then=interrupt))
        with pytest.raises(KeyboardInterrupt):
            journal.record(observation(0))
    with pytest.raises(ProtocolError, match="failed write"):
        journal.record(observation(0))
    journal.close()
    with FileJournal(path) as journal:
        assert journal.empty


@FORKS
def test_a_process_killed_in_a_write_loses_that_record_only(path: Path) -> None:
    with FileJournal(path) as journal:
        journal.record(observation(0))
        start = path.stat().st_size
        journal.record(observation(1))
        length = path.stat().st_size - start
    whole = path.read_bytes()

    def killed_after(room: int) -> None:
        with FileJournal(path) as journal:
            os.write = FullDisk(room, then=lambda: os._exit(3))  # type: ignore[assignment]
            journal.record(observation(1))

    for room in range(0, length, 23):
        path.write_bytes(whole[:start])
        assert in_child(lambda room=room: killed_after(room)) == 3
        with FileJournal(path) as journal:
            assert len(journal) == 1
            journal.record(observation(1))
        assert path.read_bytes() == whole


def test_records_reach_the_disk_before_the_call_returns(path: Path, monkeypatch: Any) -> None:
    synced: list[int] = []
    sync = os.fsync

    def noted(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    with FileJournal(path) as journal:
        assert synced == [path.stat().st_ino] * 2 + [path.parent.stat().st_ino]
        synced.clear()
        journal.record(observation(0))
        journal.release(Released("r", "i", 1, "abc"))
        assert synced == [path.stat().st_ino] * 2
    store = FileStore(path.parent / "a" / "b")
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
        with pytest.raises(MessageError, match="exceeds the limit of 10"):
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
