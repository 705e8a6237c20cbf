"""Protocols by name: one place knows them, and study classes of one's own need no other."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from botorch_fed.cli import main
from botorch_fed.errors import FederatedError
from botorch_fed.federation.registry import PROTOCOLS, study_class
from botorch_fed.run import RunResult
from botorch_fed.studies import Federation
from botorch_fed.study import StudyError, plan, read_study, run_study, settings, simple_settings
from test.federation.test_disclosure import STUDIES, sees_of

ROOT = Path(__file__).parent.parent.parent
READERS = [ROOT / "botorch_fed" / name for name in ("study.py", "cli.py", "watch.py")]
READERS += sorted((ROOT / "botorch_fed" / "report").glob("*.py"))
CLASSES = {target.split(":")[1] for target in PROTOCOLS.values()}

# ------------------------------------------------------------------ names and classes


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_name_is_a_class_and_so_is_its_path(name: str) -> None:
    assert study_class(name) is study_class(PROTOCOLS[name])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ftz", r"Expected one of fts, .*or module:Name of a study class, got 'ftz'"),
        ("nowhere_at_all:Study", r"ModuleNotFoundError.*Install its package"),
        ("botorch_fed.studies:Nothing", "AttributeError"),
        ("botorch_fed.studies:FederatedAgent", "without server, agent, sees, price"),
        ("botorch_fed.studies:default_kernel", "Expected a dataclass with server"),
    ],
)
def test_a_name_that_is_no_study_class(name: str, said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        study_class(name)


def _code(path: Path) -> ast.Module:
    """A module without its docstrings."""
    tree = ast.parse(path.read_text())
    kinds = (ast.Module, ast.FunctionDef, ast.ClassDef)
    for node in [node for node in ast.walk(tree) if isinstance(node, kinds)]:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


@pytest.mark.parametrize("path", READERS, ids=lambda path: path.stem)
def test_readers_know_no_protocol(path: Path) -> None:
    found = set()
    for node in ast.walk(_code(path)):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    assert not found & (CLASSES | set(PROTOCOLS))


def module_of(study: Any) -> str:
    """The module whose messages a study sends."""
    part = study.make_aggregation() if isinstance(study, Federation) else study
    return type(part).__module__


MODULES = sorted({module_of(study()) for name, study in STUDIES.items()})


@pytest.mark.parametrize("module", MODULES)
def test_the_table_of_messages_of_a_module_is_its_rows(module: str) -> None:
    text = importlib.import_module(module).__doc__ or ""
    lines = re.findall(r"^    (\w+) +(server|agent) -> (?:server|agent) ", text, re.MULTILINE)
    mine = [name for name in STUDIES if module_of(STUDIES[name]()) == module]
    rows = {(row.message, row.sender) for name in mine for row in sees_of(name).rows}
    assert rows == set(lines)
    assert len(set(lines)) == len(lines)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_setting_is_explained(name: str) -> None:
    rows = {row.name: row for row in settings(study_class(name))}
    assert set(rows) <= set(simple_settings(study_class(name)))
    assert len(rows) >= (3 if name == "federation" else 5)  # parts have settings of their own
    assert all(row.doc.endswith(".") and row.expected for row in rows.values())


def test_defaults_are_those_of_the_class() -> None:
    rows = {row.name: row for row in settings(study_class("private-ucb"))}
    assert (rows["trust"].default, rows["outcome_bound"].default) == ('"joint"', "2.0")
    assert (rows["final_release"].default, rows["delta"].default) == ("true", "1e-05")
    assert {rows[name].default for name in ("batch", "noise_var", "inflate")} == {""}
    assert rows["trust"].expected == 'one of "joint", "local", "public", "none"'


def test_the_command_lists_protocols_and_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["protocols", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["protocols"]) == set(PROTOCOLS)
    assert main(["protocols", "fed-gp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert {row["name"] for row in found} >= {"sums", "num_initial", "rejoin"}
    assert main(["protocols", "fed-gp"]) == 0
    assert "[protocol]" in capsys.readouterr().out
    assert main(["protocols", "fed-pg"]) == 2
    assert "Expected one of fts" in capsys.readouterr().err


# ------------------------------------------------------------------ a study class of one's own

OWN = '''
"""A protocol of one's own: agents that tell each other what they did, every other round."""

from dataclasses import dataclass

from botorch_fed.studies import FTS


@dataclass(frozen=True, kw_only=True)
class Echo:
    """FTS with a pause.

    Args:
        budget: Evaluations of each site.
        pause: A message every so many rounds.
    """

    budget: int
    pause: int = 2

    def inner(self):
        return FTS(budget=self.budget, every=self.pause)

    def server(self, space, names):
        return self.inner().server(space, names)

    def agent(self, name, space, seed, blobs):
        return self.inner().agent(name, space, seed, blobs)

    def sees(self, space, names):
        return self.inner().sees(space, names)

    def price(self, space, names):
        return None
'''
OBJECTIVE = "def score(agent, *, x):\n    return -(x - 0.3) ** 2\n"
STUDY = """objective = "MODULE:score"
agents = ["north", "south"]
budget = 5
seed = 1
[space]
x = { type = "real", lower = 0.0, upper = 1.0 }
[protocol]
name = "MODULE:Echo"
pause = 1
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setattr(sys, "path", sys.path[:])
    module = f"own_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(OWN + OBJECTIVE)

    def write(text: str) -> Path:
        path = tmp_path / "study.toml"
        path.write_text(text.replace("MODULE", module))
        return path

    return write


def test_a_study_file_names_a_class_beside_it(
    written: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    study = read_study(written(STUDY))
    made = study.study()
    assert (type(made).__name__, made.budget, made.pause) == ("Echo", 5, 1)
    found = plan(study)
    assert (found.budget, found.total, found.price) == (5, 10, None)
    assert found.sees == made.sees(study.space, study.agents)
    result = run_study(study, out=None, progress=False)
    assert len(result.records) == 10
    assert result.sees == found.sees
    path = str(written(STUDY))
    assert main(["run", path, "--dry-run"]) == 0
    assert "There is no privacy guarantee." in capsys.readouterr().out
    assert main(["run", path, "--out", str(tmp_path / "run")]) == 0
    saved: Any = RunResult.load(tmp_path / "run")
    assert saved.sees == found.sees
    assert [row["y"] for row in saved.records] == [row["y"] for row in result.records]
    pytest.importorskip("plotly")
    assert main(["report", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        (":Echo", ":Eko", 8, r"protocol.name: Expected a study class at .*AttributeError"),
        ("pause = 1", "pauze = 1", 9, r"protocol.pauze: unknown key. Did you mean 'pause'"),
        ("pause = 1", 'pause = "1"', 9, r"protocol.pause: expected an integer, got '1'"),
        ("seed = 1", 'seed = 1\nchannel = "plain"', 5, 'has no channel: .*name = .*"fed-gp"'),
        (
            "[space]",
            "[privacy]\nepsilon = 1.0\ndelta = 1e-5\n[space]",
            5,
            'adds no noise from a study file.*"dp-fts-de" or "private-ucb"',
        ),
    ],
)
def test_mistakes_in_such_a_file(
    written: Callable[[str], Path], old: str, new: str, line: int, said: str
) -> None:
    assert old in STUDY
    with pytest.raises(StudyError, match=rf"study\.toml:{line}: .*{said}"):
        read_study(written(STUDY.replace(old, new)))


@pytest.mark.parametrize(
    ("protocol", "table", "kind"),
    [
        ("fts", "every = 1\n[protocol.strategy]\nnum_raw = 32\n", "Strategy"),
        ("dp-fts-de", "[protocol.strategy]\nfollow = 2\n", "Following"),
        ("fts", '[protocol.strategy]\nkind = "transfer"\nlisten = false\n', "TransferSearch"),
        ("fed-gp", "[protocol.search]\nlisten = false\n", "TransferSearch"),
        ("fed-gp", '[protocol.search]\nkind = "region"\n', "RegionSearch"),
        ("fed-gp", '[protocol.search]\nkind = "support"\n', "SupportSearch"),
    ],
)
def test_a_table_is_one_of_the_classes_of_its_setting(
    written: Callable[[str], Path], protocol: str, table: str, kind: str
) -> None:
    text = STUDY.replace("MODULE:Echo", protocol).replace("pause = 1\n", table)
    if protocol == "dp-fts-de":
        text = text.replace(table, f'num_initial = 2\nnoise_kind = "none"\n{table}')
    made = read_study(written(text)).study()
    part = getattr(made, "search", None) or made.strategy
    assert type(part).__name__ == kind
