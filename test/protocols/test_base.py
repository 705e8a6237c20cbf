"""Journals and secrets on disk."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.errors import ProtocolError
from botorch_fed.protocols.base import FileJournal, FileSecrets, MemorySecrets, Observation


def observation(index: int) -> Observation:
    X = torch.full((2, 3), float(index), dtype=torch.float64)
    return Observation("r", 1, index, X, X[:, :1])


def test_a_journal_survives_closing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path)
    for index in range(3):
        journal.record(observation(index))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = FileJournal(path)
    assert len(again) == 3
    found = again.find("r", 1, 2)
    assert found is not None
    assert torch.equal(found.X, observation(2).X)
    assert again.find("r", 2, 2) is None
    with pytest.raises(ProtocolError, match="in the journal already"):
        again.record(observation(1))


def test_a_record_cut_short_is_dropped_and_damage_is_not(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = FileJournal(path)
    for index in range(2):
        journal.record(observation(index))
    whole = path.read_bytes()
    half = len(whole) // 2
    for end in [len(whole) - 1, half + 1, half + 8]:
        path.write_bytes(whole[:end])
        journal = FileJournal(path)
        assert len(journal) == 1
        journal.record(observation(1))
        assert path.read_bytes() == whole
    for where in [0, 3, 5, 14]:  # also a damaged length, which looks like a long record
        path.write_bytes(whole[:where] + b"\xff" + whole[where + 1 :])
        with pytest.raises(ProtocolError, match=r"damaged at byte 0: restore it from a copy"):
            FileJournal(path)
        assert len(path.read_bytes()) == len(whole)  # nothing was thrown away


def test_an_observation_is_checked() -> None:
    X = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(InputDataError, match="X `q x d` and Y `q x 1`"):
        Observation("r", 1, 0, X, X)


def test_secrets(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    for store in [MemorySecrets(), FileSecrets(folder)]:
        assert store.get("key-1") is None
        store.put("key-1", b"old")
        store.put("key-1", b"\x00secret")
        assert store.get("key-1") == b"\x00secret"
        assert "secret'" not in repr(store).replace("secrets'", "")
    assert FileSecrets(folder).get("key-1") == b"\x00secret"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [p.name for p in folder.iterdir()] == ["key-1.secret"]
    assert stat.S_IMODE((folder / "key-1.secret").stat().st_mode) == 0o600
    for name in ["", "../key", "a/b", "a.b"]:
        with pytest.raises(ProtocolError, match="letters, digits"):
            FileSecrets(folder).put(name, b"x")
    folder.chmod(0o755)
    with pytest.raises(ProtocolError, match="chmod 700"):
        FileSecrets(folder)
