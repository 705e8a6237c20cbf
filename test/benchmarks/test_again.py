"""Stored lines are run anew: compared, or replaced one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import again, provenance
from benchmarks.papers import ledger, private_ucb
from benchmarks.provenance import code_for

NAME = "private_ucb/synthetic"


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of random play: two lines as they come out, one of other code, one of a row gone."""
    monkeypatch.setattr(ledger, "RESULTS", tmp_path)
    monkeypatch.setattr(provenance, "HOME", tmp_path)
    monkeypatch.setattr(provenance, "FAMILIES", {"private_ucb": ()})
    provenance.code_of.cache_clear()
    file = tmp_path / f"{NAME}.jsonl"
    file.parent.mkdir()
    now = code_for(file)
    made = []
    for trial, changes in enumerate(({}, {}, {"regret": 1.0, "code": "00000000"})):
        run = {"row": "random", "alpha": None, "beta": None, "trial": trial}
        line = private_ucb.bandit_run(**run)  # type: ignore[arg-type]
        made.append({**run, **line, "versions": "none", **now, **changes})
    made.append({**made[0], "row": "gone", "code": "00000000"})
    file.write_text("".join(json.dumps(line) + "\n" for line in made))
    yield file
    provenance.code_of.cache_clear()


def stored(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_of_other_code_is_looked_at_first(
    lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not again.check(NAME, (), 1)
    assert "trial=2: differs: regret by" in capsys.readouterr().out
    assert not again.check(NAME, ("random",), 3)
    assert capsys.readouterr().out.count("the same") == 2


def test_lines_of_other_code_are_replaced_where_they_are(lines: Path) -> None:
    before = stored(lines)
    again.replace(NAME, ())
    after = stored(lines)
    assert after[:2] == before[:2]
    assert (after[2]["trial"], after[2]["code"]) == (2, before[0]["code"])
    assert after[2]["regret"] != 1.0
    assert after[3] == before[3]
    assert again.check(NAME, (), 3)


def test_differences_are_relative_and_leave_times_out() -> None:
    old = {"best": [1.0, 2.0], "epsilon": 2.0, "unit": "agent", "cpu_ms": 1.0}
    new = {"best": {"0": 1.0, "1": 2.1}, "epsilon": 2.0, "unit": "record", "cpu_ms": 9.0}
    found = dict(again.differences(old, new))
    assert found["best"] == pytest.approx(0.05)  # of the largest that is stored
    assert found["epsilon"] == 0
    assert found["unit"] == float("inf")
    assert "cpu_ms" not in found


@pytest.mark.parametrize("name", ["fts/nothing", "private_ucb/nothing", "elsewhere/fts"])
def test_a_file_that_nothing_makes_is_refused(name: str) -> None:
    with pytest.raises(SystemExit, match="no file of results"):
        again.made_by(name)
