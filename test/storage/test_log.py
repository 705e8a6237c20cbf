"""Logs against crashes, damage and each other."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.storage.log import FileLog, Log, read_events
from botorch_fed.wire.codec import content_hash, encode
from test.files import FORKS, FullDisk, fail, in_child

HEADER = 12
CHAIN = 32


@dataclass(frozen=True, eq=False)
class Seen:
    number: int
    X: Tensor


@dataclass(frozen=True)
class Left:
    number: int


@dataclass(frozen=True)
class Foreign:
    number: int


KINDS = (Seen, Left)


def seen(number: int, *, q: int = 2) -> Seen:
    return Seen(number, torch.full((q, 3), number + 0.1, dtype=torch.float64))


def open_log(folder: Path) -> FileLog:
    return FileLog(folder, KINDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "party"


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For thousands of files in one test."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def written(folder: Path, count: int) -> list[int]:
    """A log of some events and, last, another kind; where each record ends."""
    ends = [HEADER]
    with open_log(folder) as log:
        for number in range(count):
            log.append(seen(number))
            ends.append(log.path.stat().st_size)
        log.append(Left(count))
        ends.append(log.path.stat().st_size)
    return ends


@pytest.fixture(params=["memory", "files"])
def log(request: pytest.FixtureRequest, folder: Path) -> Any:
    with Log(KINDS) if request.param == "memory" else open_log(folder) as made:
        yield made


# ------------------------------------------------------------------ events and snapshots


def test_a_log_gives_back_its_events_in_order(log: Log) -> None:
    assert len(log) == 0
    heads = [log.head]
    for event in (seen(0), Left(1), seen(2)):
        log.append(event)
        heads.append(log.head)
    assert [event.number for event in log] == [0, 1, 2]
    assert torch.equal(log[2].X, seen(2).X)
    assert len(set(heads)) == 4
    assert "0.1" not in repr(log)


def test_heads_are_of_contents_and_order() -> None:
    def head(*events: Any) -> str:
        log = Log(KINDS)
        for event in events:
            log.append(event)
        return log.head

    assert head(seen(0), Left(1)) == head(seen(0), Left(1))
    assert len({head(seen(0), Left(1)), head(Left(1), seen(0)), head(seen(0)), head(seen(1))}) == 4


def test_a_log_keeps_copies_and_refuses_what_cannot_be_read(log: Log) -> None:
    mine = seen(0)
    log.append(mine)
    mine.X.zero_()
    assert torch.equal(log[0].X, seen(0).X)
    before = log.head
    with pytest.raises(MessageError, match="finite"):
        log.append(Seen(1, torch.full((1, 1), torch.nan).double()))
    with pytest.raises(MessageError, match="Expected Seen or Left"):
        log.append(Foreign(1))
    assert (len(log), log.head) == (1, before)
    log.append(Left(1))


def test_snapshots_are_found_by_their_hash_until_they_are_dropped(log: Log) -> None:
    first, second = log.snapshot(b"one"), log.snapshot(b"two")
    assert first == content_hash(b"one")
    assert (log.load(first), log.load(second)) == (b"one", b"two")
    log.keep([second])
    assert log.load(second) == b"two"
    with pytest.raises(ProtocolError, match="missing or damaged: restore"):
        log.load(first)


# ------------------------------------------------------------------ logs on disk


def test_a_snapshot_may_come_before_the_first_event(folder: Path) -> None:
    with open_log(folder) as log:
        digest = log.snapshot(b"state")
    with open_log(folder) as log:
        assert log.load(digest) == b"state"


def test_an_empty_file_beside_snapshots_is_damage(folder: Path) -> None:
    with open_log(folder) as log:
        log.append(seen(0))
        digest = log.snapshot(b"state")
    log.path.write_bytes(b"")
    with pytest.raises(ProtocolError, match=r"damaged at byte 0 .it is empty, and has snapshots"):
        open_log(folder)
    assert [path.name for path in (folder / "snapshots").iterdir()] == [digest]


def test_a_closed_log_drops_no_snapshot(folder: Path) -> None:
    with open_log(folder) as log:
        log.append(seen(0))
        digest = log.snapshot(b"state")
    with pytest.raises(ProtocolError, match="is closed"):
        log.keep([])
    with open_log(folder) as log:
        assert log.load(digest) == b"state"


def test_a_log_survives_closing(folder: Path) -> None:
    written(folder, 3)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "log").stat().st_mode) == 0o600
    with open_log(folder) as again:
        assert [event.number for event in again] == [0, 1, 2, 3]
        snapshot, head = again.snapshot(b"state"), again.head
        assert str(folder) in repr(again)
    with open_log(folder) as again:
        assert again.load(snapshot) == b"state"
        assert again.head == head
    again.close()
    for call in [lambda: again.append(Left(1)), lambda: list(again), lambda: again.load(snapshot)]:
        with pytest.raises(ProtocolError, match="is closed: open it again"):
            call()


def test_a_second_opener_is_refused(folder: Path) -> None:
    with open_log(folder) as log:
        with pytest.raises(ProtocolError, match="open already") as caught:
            open_log(folder)
        assert str(folder) in str(caught.value)
        log.append(Left(0))
    log = open_log(folder)
    del log  # forgotten, not closed
    open_log(folder).close()


@FORKS
def test_other_processes_are_kept_out(folder: Path) -> None:
    log = open_log(folder)

    def open_again() -> None:
        with pytest.raises(ProtocolError, match="open already"):
            open_log(folder)

    def use_the_parents() -> None:
        for call in [lambda: log.append(Left(0)), lambda: list(log)]:
            with pytest.raises(ProtocolError, match="before a fork"):
                call()
        log.close()  # its own copy: the parent's lock stays

    assert in_child(open_again) == 0
    assert in_child(use_the_parents) == 0
    assert in_child(open_again) == 0
    log.append(Left(1))
    gate = os.pipe()
    child = os.fork()
    if child == 0:  # lives on with a copy of the descriptor, as a worker would
        os.close(gate[1])
        os.read(gate[0], 1)
        os._exit(0)
    log.close()
    with open_log(folder) as again:
        assert len(again) == 1
    os.close(gate[1])
    os.close(gate[0])
    os.waitpid(child, 0)
    assert os.get_inheritable(open_log(folder)._file) is False


def test_a_log_that_others_can_read_is_refused(folder: Path) -> None:
    written(folder, 1)
    (folder / "log").chmod(0o640)
    with pytest.raises(ProtocolError, match=f"mode 640.*chmod 600 {folder}"):
        open_log(folder)
    (folder / "log").chmod(0o600)
    folder.chmod(0o755)
    with pytest.raises(ProtocolError, match=f"mode 755.*chmod 700 {folder}"):
        open_log(folder)
    folder.chmod(0o700)
    open_log(folder).close()


def test_a_link_or_a_pipe_in_its_place_is_refused(folder: Path, tmp_path: Path) -> None:
    written(folder, 1)
    (folder / "log").rename(tmp_path / "elsewhere")
    (folder / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"symbolic link"):
        open_log(folder)
    (folder / "log").unlink()
    os.mkfifo(folder / "log", 0o600)
    with pytest.raises(ProtocolError, match="no regular file"):
        open_log(folder)


def test_a_log_of_another_user_is_refused(folder: Path, monkeypatch: Any) -> None:
    written(folder, 1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ProtocolError, match="belongs to user"):
        open_log(folder)


@pytest.mark.usefixtures("no_sync")
def test_a_last_record_cut_anywhere_is_dropped(folder: Path, caplog: Any) -> None:
    ends = written(folder, 2)
    path = folder / "log"
    whole = path.read_bytes()
    for last in (1, 2, 3):
        for cut in range(ends[last - 1], ends[last]):
            path.write_bytes(whole[:cut])
            with open_log(folder) as log:
                assert len(log) == last - 1
                assert path.stat().st_size == ends[last - 1]
                if last == 2:
                    log.append(seen(1))
                    assert path.read_bytes() == whole[: ends[2]]
    assert "dropped" in caplog.text
    assert str(ends[3] - 1 - ends[2]) in caplog.text
    for cut in range(HEADER):  # while the file was created; or its content never came to the disk
        for data in (whole[:cut], bytes(cut)):
            path.write_bytes(data)
            with open_log(folder) as log:
                assert len(log) == 0
            assert path.read_bytes() == whole[:HEADER]


def test_a_reader_beside_the_writer_sees_what_is_complete_and_changes_nothing(
    folder: Path,
) -> None:
    with pytest.raises(FileNotFoundError):
        read_events(folder, KINDS)
    with open_log(folder) as log:
        for number in range(3):
            log.append(Left(number))
            assert read_events(folder, KINDS) == [Left(n) for n in range(number + 1)]
        whole = log.path.read_bytes()
    log.path.write_bytes(whole)
    ends = []
    for size in range(len(whole) + 1):  # as a reader may find the file in the middle of a write
        log.path.write_bytes(whole[:size])
        ends.append(len(read_events(folder, KINDS)))
        assert log.path.read_bytes() == whole[:size]
    assert ends == sorted(ends)
    assert set(ends) == {0, 1, 2, 3}
    changed = bytearray(whole)
    changed[HEADER + 20] ^= 1
    log.path.write_bytes(changed)
    with pytest.raises(ProtocolError, match="damaged"):
        read_events(folder, KINDS)
    log.path.write_bytes(whole)
    with pytest.raises(ProtocolError, match="damaged"):
        read_events(folder, (Seen,))  # of another kind
    log.path.chmod(0o644)
    with pytest.raises(ProtocolError, match="chmod"):
        read_events(folder, KINDS)


def test_zeros_at_the_end_are_dropped(folder: Path) -> None:
    ends = written(folder, 2)
    path = folder / "log"
    whole = path.read_bytes()
    for zeros in (1, 11, 12, 13, 5000):
        for cut in (ends[0], ends[3], ends[2] + 4, ends[2] + 12):  # also behind a frame or half one
            path.write_bytes(whole[:cut] + bytes(zeros))
            with open_log(folder) as log:
                assert len(log) == {ends[0]: 0, ends[3]: 3}.get(cut, 2)
            assert path.stat().st_size == max(end for end in ends if end <= cut)


@pytest.mark.parametrize("blank", [True, False])
def test_a_last_record_with_unwritten_sectors_is_dropped(folder: Path, blank: bool) -> None:
    ends = written(folder, 1)
    path = folder / "log"
    with open_log(folder) as log:
        log.append(seen(7, q=60))
    whole = path.read_bytes()
    border = (len(whole) - 1) // 512 * 512
    assert border > ends[-1]
    path.write_bytes(whole[:border].ljust(len(whole), b"\0" if blank else b"\x01"))
    if blank:
        with open_log(folder) as log:
            assert len(log) == 2
        assert path.read_bytes() == whole[: ends[-1]]
    else:  # complete, but wrong: not what a crash leaves behind
        with pytest.raises(ProtocolError, match=f"damaged at byte {ends[-1]} "):
            open_log(folder)


@pytest.mark.usefixtures("no_sync")
def test_a_changed_byte_is_noticed_everywhere(folder: Path) -> None:
    ends = written(folder, 2)
    path = folder / "log"
    whole = path.read_bytes()
    for where in range(len(whole)):
        for flip in (0x01, 0xFF):
            damaged = bytearray(whole)
            damaged[where] ^= flip
            path.write_bytes(damaged)
            record = max([0] + [end for end in ends if end <= where])
            with pytest.raises(ProtocolError, match=f"damaged at byte {record} ") as caught:
                open_log(folder)
            assert str(path) in str(caught.value)
            assert path.read_bytes() == damaged  # nothing was thrown away


def test_removed_repeated_and_exchanged_events_are_noticed(folder: Path) -> None:
    ends = written(folder, 3)
    path = folder / "log"
    whole = path.read_bytes()
    parts = [whole[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    for order in ([0, 2, 3, 4], [0, 1, 3, 4], [0, 1, 1, 2, 3, 4], [0, 2, 1, 3, 4]):
        path.write_bytes(b"".join(parts[i] for i in order))
        with pytest.raises(ProtocolError, match="missing or was altered"):
            open_log(folder)
    path.write_bytes(b"".join(parts[:3]))  # cut back at a border: a shorter log, with another head
    with open_log(folder) as log:
        assert len(log) == 2


def test_a_file_of_something_else_is_refused(folder: Path) -> None:
    ends = written(folder, 1)
    path = folder / "log"
    good = path.read_bytes()
    chain = good[ends[-2] + 12 : ends[-2] + 12 + CHAIN]
    foreign = chain + encode(Foreign(1))
    size = len(foreign).to_bytes(4, "little")
    frame = size + b"".join(zlib.crc32(x).to_bytes(4, "little") for x in (size, foreign))
    for data in [b"x", b"\0" * 100, good[:8] + b"\x02" + good[9:], good + frame + foreign]:
        path.write_bytes(data)
        with pytest.raises(ProtocolError, match="damaged at byte"):
            open_log(folder)
        assert path.read_bytes() == data


def test_a_full_disk_leaves_the_last_good_record(folder: Path, monkeypatch: Any) -> None:
    with open_log(folder) as log:
        log.append(seen(0))
        good = log.path.read_bytes()
        log.append(seen(1))
        length = log.path.stat().st_size - len(good)
    path = folder / "log"
    path.write_bytes(good)
    with open_log(folder) as log:
        for room in range(0, length, 7):
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", FullDisk(room, then=fail))
                with pytest.raises(OSError, match="No space left"):
                    log.append(seen(1))
            assert path.read_bytes() == good
            assert len(log) == 1
        with monkeypatch.context() as patch:  # short writes alone are no failure
            patch.setattr(os, "write", FullDisk(10**6, then=fail))
            log.append(seen(1))
    with open_log(folder) as log:
        assert len(log) == 2


@pytest.mark.parametrize("failing", ["ftruncate", "fsync"])
def test_a_disk_that_cannot_even_truncate_breaks_the_log(
    folder: Path, monkeypatch: Any, failing: str
) -> None:
    log = open_log(folder)
    log.append(seen(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(20, then=fail))
        patch.setattr(os, failing, lambda *_: fail())
        with pytest.raises(OSError, match="No space left"):
            log.append(seen(1))
    for call in (lambda: log.append(Left(1)), lambda: list(log), lambda: log.head):
        with pytest.raises(ProtocolError, match="failed write"):
            call()
    assert str(folder) in repr(log)
    log.close()
    with open_log(folder) as log:
        assert len(log) == 1


def test_an_interrupt_in_a_write_breaks_the_log(folder: Path, monkeypatch: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    log = open_log(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(20, then=interrupt))
        with pytest.raises(KeyboardInterrupt):
            log.append(seen(0))
    with pytest.raises(ProtocolError, match="failed write"):
        log.append(seen(0))
    log.close()
    with open_log(folder) as log:
        assert len(log) == 0


@FORKS
def test_a_process_killed_in_a_write_loses_that_event_only(folder: Path) -> None:
    with open_log(folder) as log:
        log.append(seen(0))
        start = log.path.stat().st_size
        log.append(seen(1))
        length = log.path.stat().st_size - start
    path = folder / "log"
    whole = path.read_bytes()

    def killed_after(room: int) -> None:
        with open_log(folder) as log:
            os.write = FullDisk(room, then=lambda: os._exit(3))  # type: ignore[assignment]
            log.append(seen(1))

    for room in range(0, length, 23):
        path.write_bytes(whole[:start])
        assert in_child(lambda room=room: killed_after(room)) == 3
        with open_log(folder) as log:
            assert len(log) == 1
            log.append(seen(1))
        assert path.read_bytes() == whole


# ------------------------------------------------------------------ logs and those who remember


def test_who_remembers_a_log_can_tell_a_shorter_or_another_one(log: Log) -> None:
    heads = [log.head]
    for number in range(3):
        log.append(Left(number))
        heads.append(log.head)
    assert [log.head_at(count) for count in range(4)] == heads
    assert log.head_at(4) is None
    assert log.head_at(-1) is None


def test_a_file_in_other_hands_takes_no_event(folder: Path, tmp_path: Path) -> None:
    with open_log(folder) as log:
        log.append(Left(0))
        folder.rename(tmp_path / "aside")
        with pytest.raises(ProtocolError, match="moved, replaced or changed from outside"):
            log.append(Left(1))
        (tmp_path / "aside").rename(folder)
        log.append(Left(1))
        good = log.path.read_bytes()
        for data in (good + b"x", good[:-1]):
            log.path.write_bytes(data)
            with pytest.raises(ProtocolError, match="moved, replaced or changed from outside"):
                log.append(Left(2))
        log.path.write_bytes(good)
        log.append(Left(2))
    with open_log(folder) as log:
        assert [event.number for event in log] == [0, 1, 2]


def test_a_link_to_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    written(tmp_path / "elsewhere", 1)
    folder.symlink_to(tmp_path / "elsewhere")
    for shared in (False, True):
        with pytest.raises(ProtocolError, match="symbolic link: name the folder itself"):
            FileLog(folder, KINDS, shared=shared)
    folder.unlink()
    folder.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ProtocolError, match="symbolic link"):
        open_log(folder)
    assert not (tmp_path / "nowhere").exists()


# ------------------------------------------------------------------ shared logs


def open_shared(folder: Path) -> FileLog:
    return FileLog(folder, KINDS, shared=True)


def test_several_append_in_turns(folder: Path) -> None:
    with open_shared(folder) as one, open_shared(folder) as other:
        one.append(Left(0))
        assert len(other) == 0
        other.append(Left(1))
        assert [event.number for event in other] == [0, 1]
        with one.turn():
            assert [event.number for event in one] == [0, 1]
            one.append(Left(2))
            one.append(Left(3))
        with other.turn():
            assert (len(other), other.head) == (4, one.head)
        with pytest.raises(ProtocolError, match="holds events only"):
            one.snapshot(b"state")
    with open_shared(folder) as log:
        assert [event.number for event in log] == [0, 1, 2, 3]


def test_a_turn_that_fails_is_over(folder: Path) -> None:
    with open_shared(folder) as one, open_shared(folder) as other:
        with pytest.raises(KeyboardInterrupt), one.turn():
            raise KeyboardInterrupt
        other.append(Left(0))


def test_a_branch_of_a_shared_log_is_noticed(folder: Path) -> None:
    with open_shared(folder) as log:
        log.append(Left(0))
        old = log.path.read_bytes()
        log.append(Left(1))
        end = log.path.read_bytes()
        log.path.write_bytes(old)  # cut back, and gone on with by somebody else
        with open_shared(folder) as other:
            other.append(Left(2))
            other.append(Left(3))
        branch = log.path.read_bytes()
        for data in (branch, branch[: len(end)]):  # longer, and as long as it was
            log.path.write_bytes(data)
            with pytest.raises(ProtocolError, match="changed from outside"):
                log.append(Left(4))
        log.path.write_bytes(end)
        log.append(Left(4))
        assert [event.number for event in log] == [0, 1, 4]


@FORKS
def test_a_process_that_ends_in_its_turn_leaves_the_log_to_others(folder: Path) -> None:
    log = open_shared(folder)

    def end() -> None:
        mine = open_shared(folder)
        mine._lock()
        os._exit(3)

    assert in_child(end) == 3
    log.append(Left(0))


def test_events_and_snapshots_reach_the_disk_before_the_call_returns(
    folder: Path, monkeypatch: Any
) -> None:
    synced: list[int] = []
    sync = os.fsync

    def noted(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        sync(file)

    def while_(call: Callable[[], Any]) -> list[int]:
        synced.clear()
        call()
        return list(synced)

    monkeypatch.setattr(os, "fsync", noted)
    with open_log(folder) as log:
        assert synced[-3:] == [log.path.stat().st_ino] * 2 + [folder.stat().st_ino]
        assert while_(lambda: log.append(Left(0))) == [log.path.stat().st_ino]
        digest = content_hash(b"state")
        found = while_(lambda: log.snapshot(b"state"))
        snapshots = folder / "snapshots"
        assert found == [(snapshots / digest).stat().st_ino, snapshots.stat().st_ino]
