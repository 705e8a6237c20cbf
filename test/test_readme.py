"""The README is short, and what it shows runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from botorch_fed.cli import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
OBJECTIVE = """
def measure(agent, temperature, minutes, catalyst):
    return (catalyst == "B") - ((temperature - 185) / 50) ** 2 - abs(minutes - 30) / 90
"""


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_it_is_read_in_two_minutes() -> None:
    assert len(README.read_bytes()) <= 7_000


def test_the_study_runs_and_a_newcomer_joins() -> None:
    (code,) = _blocks("python")
    assert code.count("\n") <= 15
    names: dict[str, Any] = {}
    exec(code.replace("budget=12", "budget=4").replace("budget=5", "budget=2"), names)
    result, late = names["result"], names["late"]
    assert len(result.records) == 32
    assert bool((result.best("agent3") > 0.5).all())
    assert [len(late.best(f"agent{i}")) for i in range(8)] == [0] * 7 + [2]


def test_the_study_file_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (study,) = _blocks("toml")
    assert study.count("\n") <= 10
    (tmp_path / "study.toml").write_text(study)
    (tmp_path / "tuning.py").write_text(OBJECTIVE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tuning", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["run", "study.toml", "--dry-run"]) == 0
    sys.modules.pop("tuning", None)
    assert "10 evaluations of each of 3 agents" in " ".join(capsys.readouterr().out.split())


def test_the_two_commands_name_real_files() -> None:
    commands = _blocks("bash")
    assert len(commands) == 2
    for command in commands:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints")
        assert command.count("\n") == 1
    assert commands[0].split()[-2:] == [".venv/bin/botorch-fed", "demo"]
    assert "-m pytest" in commands[1]


def test_ci_finds_the_test_command() -> None:
    _, command = _blocks("bash")
    assert f"<!-- test command -->\n```bash\n{command}```\n" in README.read_text()


def test_links_point_at_files() -> None:
    for name in ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / name).read_text()):
            assert (ROOT / link).is_file(), f"{name} links {link}"
