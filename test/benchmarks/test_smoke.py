"""Every benchmark that has a command line runs: tiny, complete, and leaving nothing behind."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
COMMAND = 'if __name__ == "__main__":'
# Where ``--smoke`` is not the word for it.
ARGUMENTS = {
    "benchmarks.transfer_tasks": ["describe"],
    "benchmarks.fidelity_tasks": ["describe"],
    "benchmarks.results": ["--check"],
    "benchmarks.equations": [],
}
# Real processes; many plots; what test_results.py has done by day; what no page names.
NIGHTLY = {
    "benchmarks.flower",
    "benchmarks.papers.figures",
    "benchmarks.results",
    "benchmarks.privacy",
    "benchmarks.constraints",
    "benchmarks.feasibility",
}


def commands() -> list[Any]:
    """All modules below the folder that can be run."""
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if COMMAND in path.read_text():
            marks = [pytest.mark.nightly] if name in NIGHTLY else []
            found.append(pytest.param(name, id=name.removeprefix("benchmarks."), marks=marks))
    return found


# ------------------------------------------------------------------ what this process writes

_watched: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Notes files of the repository that are opened to be written; a hook cannot be removed."""
    if _watched is None or event != "open":
        return
    path, _, flags = arguments
    if isinstance(path, (str, Path)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        place = Path(path).absolute()
        if place.is_relative_to(ROOT) and "__pycache__" not in place.parts:
            _watched.append(str(place.relative_to(ROOT)))


sys.addaudithook(_hook)


@contextmanager
def watched() -> Iterator[list[str]]:
    """The files of the repository that were written within."""
    global _watched
    _watched = []
    try:
        yield _watched
    finally:
        _watched = None


def test_writing_into_the_repository_is_seen(tmp_path: Path) -> None:
    inside = Path(__file__).parent / "written.tmp"
    with watched() as files:
        (tmp_path / "elsewhere").write_text("")
        Path(__file__).read_text()
        inside.write_text("")
    inside.unlink()
    assert files == ["test/benchmarks/written.tmp"]


# ------------------------------------------------------------------ the commands


@pytest.fixture
def settings_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process of its own would have for itself; one thread, so that none starts another."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    disabled = logging.root.manager.disable
    levels = {
        name: logger.level
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # commands show them
        yield
    logging.disable(disabled)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)


def test_there_are_commands() -> None:
    names = {parameter.values[0] for parameter in commands()}
    assert {"benchmarks.fts", "benchmarks.papers.fts", "benchmarks.transfer"} <= names
    assert names >= ARGUMENTS.keys() | NIGHTLY


@pytest.mark.parametrize("name", commands())
def test_smoke(
    name: str,
    settings_restored: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name == "benchmarks.papers.figures":
        pytest.importorskip("matplotlib")  # which no part of the package needs
    module = importlib.import_module(name)
    before = dict(vars(module))
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, ["--smoke"])])
    with watched() as files:
        module.main()
    assert not files
    assert capsys.readouterr().out.strip()
    after = vars(module)
    assert all(after[key] is value for key, value in before.items())  # sizes are the usual ones
