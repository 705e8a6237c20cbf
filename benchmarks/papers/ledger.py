"""Results of experiments as JSON lines: one line per run, appended as it ends, never run twice."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.progress import track

from benchmarks.provenance import code_for

RESULTS = Path(__file__).parent / "results"
CHECKPOINTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50, 60)
PACKAGES = ("botorch", "gpytorch", "torch", "numpy", "scipy", "scikit-learn")
Line = dict[str, Any]


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Results start empty, and go to a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(globals(), RESULTS=Path(folder)):
        yield


def stored_lines(path: Path) -> list[Line]:
    """The whole lines of a file as they are stored, none if there is no file; not to be changed."""
    if not path.exists():
        return []
    found = path.stat()
    return list(_parsed(path, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=128)
def _parsed(path: Path, changed: int, size: int) -> tuple[Line, ...]:
    text = path.read_text().splitlines(keepends=True)
    return tuple(json.loads(line) for line in text if line.endswith("\n"))


class Results:
    """The lines of one experiment.

    Args:
        name: Names the file, e.g. ``"fts/landmine"``.
        keys: The fields that identify a run.
    """

    def __init__(self, name: str, keys: tuple[str, ...]) -> None:
        self.path = RESULTS / f"{name}.jsonl"
        self.keys = keys
        self.lines = [_unfolded(line) for line in stored_lines(self.path)]
        self._known = {self._key(line) for line in self.lines}

    def _key(self, line: Line) -> tuple[Any, ...]:
        return tuple(line[key] for key in self.keys)

    def fill(self, runs: Iterable[Line], work: Callable[..., Line], label: str) -> None:
        """Do what is missing: `work(**run)` gives the rest of a line."""
        todo = [run for run in runs if self._key(run) not in self._known]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for run in track(todo, label, console=Console(stderr=True), disable=not todo):
            line = {**run, **work(**run), **code_for(self.path)}
            with self.path.open("a") as file:
                file.write(json.dumps(self._folded(line)) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self.lines.append(line)
            self._known.add(self._key(run))

    def _folded(self, line: Line) -> Line:
        """A line as it is stored: curves over `CHECKPOINTS` as lists, versions by their hash."""
        stored = {
            key: list(value.values()) if isinstance(value, dict) else value
            for key, value in line.items()
        }
        if " " in line["versions"]:  # in words: they go into a file beside
            name = hashlib.sha256(line["versions"].encode()).hexdigest()[:8]
            beside = self.path.with_suffix(".versions.txt")
            known = beside.read_text() if beside.exists() else ""
            if name not in known:
                beside.write_text(f"{known}{name} {line['versions']}\n")
            stored["versions"] = name
        return stored

    def compact(self) -> None:
        """Write the whole file anew in the form in which lines are stored."""
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(self._folded(line)) + "\n" for line in self.lines))
        draft.replace(self.path)

    def select(self, **fields: Any) -> list[Line]:
        """The lines with these fields."""
        return [line for line in self.lines if all(line[k] == v for k, v in fields.items())]

    def only(self, **fields: Any) -> Results:
        """The same with these lines alone, to look at."""
        part = copy(self)
        part.lines = self.select(**fields)
        return part


def _unfolded(line: Line) -> Line:
    return {
        key: dict(zip(map(str, CHECKPOINTS), value, strict=False))
        if isinstance(value, list)
        else value
        for key, value in line.items()
    }


def at_checkpoints(curve: Iterable[float], digits: int = 5) -> dict[str, float]:
    """A curve from query 0 on, at a few queries."""
    values = list(curve)
    return {str(t): round(float(values[t]), digits) for t in CHECKPOINTS if t < len(values)}


def versions() -> str:
    """The versions behind a line, in one string."""
    return " ".join(
        [f"python-{platform.python_version()}", *(f"{name}-{version(name)}" for name in PACKAGES)]
    )
