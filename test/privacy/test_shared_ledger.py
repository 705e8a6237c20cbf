"""Ledgers on disk: several runs, several processes, crashes, and other hands."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from botorch.exceptions.errors import UnsupportedError

from botorch_fed.errors import BudgetExceeded, ProtocolError
from botorch_fed.privacy.accounting import Budget, Event, Ledger
from botorch_fed.privacy.shared_ledger import LEDGER_EVENTS, Paid, SharedLedger
from botorch_fed.storage.log import FileLog
from botorch_fed.wire.codec import decode, encode
from test.files import FORKS, FullDisk, fail, in_child
from test.processes import CONTEXT

EVENT = Event(1.0, 0.35)


def written(path: Path, **settings: Any) -> list[int]:
    """A ledger with two payments; where each event ends in its file."""
    with SharedLedger(path, **settings) as ledger:
        ends = [(path / "log").stat().st_size]
        ledger.spend(EVENT, note="pilot")
        ends.append((path / "log").stat().st_size)
        ledger.spend(Event(2.5), count=3, note="é\n")
        ends.append((path / "log").stat().st_size)
    return ends


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open hundreds of files: a disk takes milliseconds."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


# ------------------------------------------------------------------ runs add up


def test_pilot_runs_add_up(path: Path) -> None:
    budget = Budget(20.0, 29**-1.1)
    for run in range(3):
        with SharedLedger(path, budget=budget) as ledger:
            assert ledger.releases == 20 * run
            for _ in range(2):
                assert ledger.spend(EVENT, count=10, note="pilot") is ledger
            assert (ledger.adjacency, ledger.unit) == ("zero-out", "agent")
            assert ledger.budget == budget
            assert "60 releases, 10.38 spent" in repr(ledger) or run < 2
    expected = Ledger(budget=budget).spend(EVENT, count=60, note="pilot")
    with SharedLedger(path, budget=budget) as ledger:
        assert ledger.ledger == expected
        assert ledger.guarantee() == expected.guarantee()
        assert ledger.guarantee(accountant="rdp").epsilon > ledger.guarantee().epsilon


def test_a_payment_is_an_event(path: Path) -> None:
    written(path)
    with FileLog(path, LEDGER_EVENTS, shared=True) as log:
        assert log[0].adjacency == "zero-out"
        paid = [event.entry for event in log if isinstance(event, Paid)]
    assert [entry.note for entry in paid] == ["pilot", "é\n"]
    assert [entry.count for entry in paid] == [1, 3]
    assert paid[0].event.sampling_rate == 0.35


def test_seeded_noise_is_remembered(path: Path) -> None:
    event = Event(1.0)
    ledger = Ledger().spend(event).spend(event, private=False)
    assert [entry.private for entry in ledger.entries] == [True, False]
    assert not decode(encode(ledger), Ledger).guarantee(delta=1e-3).private
    assert Ledger().spend(event).guarantee(delta=1e-3).private
    with SharedLedger(path) as book:
        book.spend(event).spend(event, private=False)
    with SharedLedger(path) as book:
        assert book.ledger == ledger
        assert not book.guarantee(delta=1e-3).private


def test_settings_are_fixed_at_the_creation(path: Path) -> None:
    written(path, budget=Budget(9, 1e-3))
    others: list[dict[str, Any]] = [
        {},
        {"budget": Budget(10, 1e-3)},
        {"budget": Budget(9, 1e-3), "unit": "record"},
        {"budget": Budget(9, 1e-3), "adjacency": "replace-one"},
    ]
    for other in others:
        with pytest.raises(ProtocolError, match="has other settings"):
            SharedLedger(path, **other)
    with SharedLedger(path, budget=Budget(9, 1e-3)) as ledger:
        assert ledger.releases == 4


def test_a_budget_refuses_before_anything_is_written(path: Path) -> None:
    with SharedLedger(path, budget=Budget(2, 0.02)) as ledger:
        ledger.spend(Event(3.0, 0.35))
        before = (path / "log").read_bytes()
        with pytest.raises(BudgetExceeded, match="1 releases have spent"):
            ledger.spend(Event(0.5, 0.35))
        with pytest.raises(UnsupportedError):
            ledger.spend(Event(3.0, sample_size=1, population=2))
        assert (path / "log").read_bytes() == before
        assert ledger.spend(Event(3.0, 0.35)).releases == 2


# ------------------------------------------------------------------ several at once


@pytest.mark.usefixtures("no_sync")
def test_threads_pay_one_after_the_other(path: Path) -> None:
    with SharedLedger(path) as ledger:
        pay = partial(ledger.spend, EVENT)
        threads = [Thread(target=lambda: [pay() for _ in range(25)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ledger.releases == 100
    with SharedLedger(path) as ledger:
        assert ledger.releases == 100


def test_two_runs_see_what_the_other_has_paid(path: Path) -> None:
    budget = Budget(5.0, 0.01)
    with SharedLedger(path, budget=budget) as one, SharedLedger(path, budget=budget) as other:
        one.spend(EVENT, note="one")
        other.spend(EVENT, note="other")
        one.spend(EVENT, note="one")
        assert [entry.note for entry in other.ledger.entries] == ["one", "other", "one"]
        assert (one.releases, one.head, len(one)) == (other.releases, other.head, len(other))
        one.spend(EVENT, count=10)
        with pytest.raises(BudgetExceeded, match="13 releases have spent"):
            other.spend(EVENT, count=10)


def _pay(path: Path, name: str, count: int) -> None:
    with SharedLedger(path) as ledger:
        for number in range(count):
            ledger.spend(EVENT, note=f"{name} {number}")


def test_processes_that_pay_at_once_lose_no_payment(path: Path) -> None:
    names = ["ann", "bob", "cem"]
    payers = [CONTEXT.Process(target=_pay, args=(path, name, 40)) for name in names]
    for payer in payers:
        payer.start()
    for payer in payers:
        payer.join(timeout=120)
        assert payer.exitcode == 0
    with SharedLedger(path) as ledger:
        notes = [entry.note for entry in ledger.ledger.entries]
        assert sorted(notes) == sorted(f"{name} {n}" for name in names for n in range(40))
        assert len(ledger) == 121


def _pay_within(path: Path, budget: Budget, answers: Any) -> None:
    with SharedLedger(path, budget=budget) as ledger:
        count = 0
        try:
            for _ in range(50):
                ledger.spend(Event(5.0))
                count += 1
        except BudgetExceeded:
            answers.put(count)


def test_processes_do_not_exceed_a_budget_together(path: Path) -> None:
    budget = Budget(4.0, 1e-5)
    alone = 0
    while True:
        try:
            Ledger(budget=budget).spend(Event(5.0), count=alone + 1)
        except BudgetExceeded:
            break
        alone += 1
    answers = CONTEXT.Queue()
    payers = [CONTEXT.Process(target=_pay_within, args=(path, budget, answers)) for _ in range(2)]
    for payer in payers:
        payer.start()
    assert sum(answers.get(timeout=120) for _ in payers) == alone
    for payer in payers:
        payer.join(timeout=120)


@FORKS
def test_a_forked_process_cannot_pay(path: Path) -> None:
    with SharedLedger(path) as ledger:

        def pay() -> None:
            with pytest.raises(ProtocolError, match="before a fork"):
                ledger.spend(EVENT)
            ledger.close()

        assert in_child(pay) == 0
        assert ledger.spend(EVENT).releases == 1
    with pytest.raises(ProtocolError, match="is closed: open it again"):
        ledger.spend(EVENT)
    ledger.close()


@FORKS
def test_a_process_killed_in_a_payment_leaves_it_to_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = written(path)
    size = ends[2] - ends[1]

    def killed_after(room: int) -> None:
        with SharedLedger(path) as ledger:
            os.write = FullDisk(room, then=lambda: os._exit(3))  # type: ignore[assignment]
            ledger.spend(Event(2.5), count=3, note="é\n")

    with SharedLedger(path) as ledger:
        for room in (1, 20, size - 1):
            before = ledger.releases
            assert in_child(partial(killed_after, room)) == 3
            assert ledger.releases == before
            assert "dropped" in caplog.text
            assert ledger.spend(EVENT).releases == before + 1


# ------------------------------------------------------------------ crashes


def test_a_payment_is_on_the_disk_when_it_returns(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, int]] = []
    real = os.fsync

    def fsync(file: int) -> None:
        status = os.fstat(file)
        synced.append((stat.S_ISDIR(status.st_mode), status.st_size))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with SharedLedger(path) as ledger:
        assert any(folder for folder, _ in synced)  # in which the file has its name
        for _ in range(2):
            ledger.spend(EVENT)
            assert synced[-1] == (False, (path / "log").stat().st_size)


@pytest.mark.usefixtures("no_sync")
def test_a_crash_at_any_byte_of_the_last_payment(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends, file = written(path), path / "log"
    data = file.read_bytes()
    for stop in range(ends[1], ends[2]):
        file.write_bytes(data[:stop])
        caplog.clear()
        with SharedLedger(path) as ledger:
            assert [entry.note for entry in ledger.ledger.entries] == ["pilot"]
            assert bool(caplog.records) == (stop > ends[1])
            if stop % 50 == 0:  # the file goes on as if nothing had been
                ledger.spend(Event(2.5), count=3, note="é\n")
                assert file.read_bytes() == data
    file.write_bytes(data)
    with SharedLedger(path) as ledger:
        assert ledger.releases == 4


@pytest.mark.usefixtures("no_sync")
def test_a_crash_at_any_byte_of_the_creation(path: Path) -> None:
    SharedLedger(path, budget=Budget(1, 1e-5)).close()
    data = (path / "log").read_bytes()
    for stop in range(len(data)):
        (path / "log").write_bytes(data[:stop])
        with SharedLedger(path, budget=Budget(1, 1e-5)) as ledger:
            assert ledger.releases == 0
        assert (path / "log").read_bytes() == data


def test_a_disk_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedLedger(path) as ledger:
        ledger.spend(EVENT)
        before = (path / "log").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", FullDisk(20, then=fail))
            with pytest.raises(OSError, match="No space"):
                ledger.spend(EVENT)
        assert (path / "log").read_bytes() == before
        assert ledger.spend(EVENT).releases == 2
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", FullDisk(20, then=_interrupt))
            with pytest.raises(KeyboardInterrupt):
                ledger.spend(EVENT)
        with pytest.raises(ProtocolError, match="after a failed write"):
            ledger.spend(EVENT)
    with SharedLedger(path) as ledger:
        assert ledger.releases == 2


def _interrupt() -> None:
    raise KeyboardInterrupt


_KILLED = """
import os, signal, sys
from botorch_fed.privacy import Budget, Event, SharedLedger
ledger = SharedLedger(sys.argv[1], budget=Budget(9.0, 1e-5))
for k in range(5):
    ledger.spend(Event(5.0), note=str(k))
    print(k, flush=True)
assert not {"opacus", "dp_accounting"} & set(sys.modules)  # slow to import, and not needed here
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_acknowledged_survives_a_kill(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(path)], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == ["0", "1", "2", "3", "4"]
    with SharedLedger(path, budget=Budget(9.0, 1e-5)) as ledger:
        assert ledger.releases == 5


# ------------------------------------------------------------------ other hands


@pytest.mark.usefixtures("no_sync")
def test_a_changed_byte_is_seen_everywhere(path: Path) -> None:
    written(path)
    data = (path / "log").read_bytes()
    for position in range(len(data)):
        changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        (path / "log").write_bytes(changed)
        with pytest.raises(ProtocolError, match="is damaged"):
            SharedLedger(path)
        assert (path / "log").read_bytes() == changed  # left as it was


def test_a_removed_payment_is_seen(path: Path) -> None:
    ends, file = written(path), path / "log"
    data = file.read_bytes()
    first, second = data[ends[0] : ends[1]], data[ends[1] :]
    for rest in (second, second + first, first + first + second):
        file.write_bytes(data[: ends[0]] + rest)
        with pytest.raises(ProtocolError, match="missing or was altered"):
            SharedLedger(path)
    file.write_bytes(data[: ends[0]])
    with SharedLedger(path) as ledger:
        assert len(ledger) == 1


def test_whoever_remembers_a_ledger_can_tell_that_it_was_cut_back(path: Path) -> None:
    ends, file = written(path), path / "log"
    data = file.read_bytes()
    with SharedLedger(path) as ledger:
        length, head = len(ledger), ledger.head
        ledger.spend(EVENT)
        assert ledger.head_at(length) == head != ledger.head
    file.write_bytes(data[: ends[1]])  # at the border of two payments
    with SharedLedger(path) as ledger:
        assert ledger.releases == 1
        assert ledger.head_at(length) is None
        ledger.spend(Event(9.0))
        assert len(ledger) == length
        assert ledger.head_at(length) not in (None, head)


def test_a_ledger_that_was_cut_back_or_exchanged_takes_no_payment(
    path: Path, tmp_path: Path
) -> None:
    match, aside = "moved, replaced or changed", tmp_path / "aside"
    with SharedLedger(path) as ledger:
        ledger.spend(EVENT)
        path.rename(aside)
        with pytest.raises(ProtocolError, match=match):
            ledger.spend(EVENT)
        shutil.copytree(aside, path)  # the same bytes, but the lock is on the other file
        with pytest.raises(ProtocolError, match=match):
            ledger.spend(EVENT)
        shutil.rmtree(path)
        aside.rename(path)
        assert ledger.spend(EVENT).releases == 2
        os.truncate(path / "log", 10)
        with pytest.raises(ProtocolError, match=match):
            ledger.spend(EVENT)
    os.truncate(path / "log", 0)
    assert SharedLedger(path).releases == 0  # an empty file is a new one


def test_a_ledger_is_its_users_alone(path: Path) -> None:
    written(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "log").stat().st_mode) == 0o600
    assert [file.name for file in path.iterdir()] == ["log"]
    (path / "log").chmod(0o640)
    with pytest.raises(ProtocolError, match=r"mode 640.*chmod 600"):
        SharedLedger(path)
    (path / "log").chmod(0o600)
    path.chmod(0o750)
    with pytest.raises(ProtocolError, match=r"mode 750.*chmod 700"):
        SharedLedger(path)


def test_no_link_is_followed(path: Path, tmp_path: Path) -> None:
    written(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(ProtocolError, match="is a symbolic link: name the folder itself"):
        SharedLedger(path)
    path.unlink()
    path.mkdir(mode=0o700)
    (path / "log").symlink_to(tmp_path / "other" / "log")
    with pytest.raises(OSError, match="symbolic link"):
        SharedLedger(path)
    (path / "log").unlink()
    (path / "log").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="symbolic link"):
        SharedLedger(path)
    assert not (tmp_path / "new").exists()


def test_a_ledger_of_an_earlier_release_is_refused(path: Path) -> None:
    line = '{"format": "botorch_fed privacy ledger 1"}\n'
    path.write_text(line)
    with pytest.raises(ProtocolError, match=r"earlier release is not read. Name a new path"):
        SharedLedger(path)
    assert path.read_text() == line


def test_a_log_that_does_not_begin_as_a_ledger_is_refused(path: Path) -> None:
    with FileLog(path, LEDGER_EVENTS, shared=True) as log:
        log.append(Paid(Ledger().spend(EVENT).entries[0]))
    with pytest.raises(ProtocolError, match="has other settings"):
        SharedLedger(path)
