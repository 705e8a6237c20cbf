"""What a site and a hub write is for nobody else, and a study file names no code but its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from botorch_fed.cli import main
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.base import site_folder
from botorch_fed.federation.trial import SITE_EVENTS, Observed
from botorch_fed.run import RunResult, run
from botorch_fed.storage.log import FileLog
from botorch_fed.study import StudyError, check_site_budget, read_study
from test.faults.cases import NAMES, SQUARE, cases, hill

pytestmark = pytest.mark.filterwarnings("ignore")

STUDY = """objective = "OBJECTIVE"
agents = ["ann", "bob"]
budget = 3
seed = 0

[space]
x = { type = "real", lower = 0.0, upper = 1.0 }

[protocol]
name = "fts"
"""
LOCAL = """objective = "ask"
agents = ["ann", "bob"]
budget = 3
seed = 0

[space]
x = { type = "real", lower = 0.0, upper = 1.0 }

[protocol]
name = "private-ucb"
trust = "local"
noise_multiplier = 20.0
"""


def file(folder: Path, objective: str, text: str = STUDY) -> Path:
    path = folder / "study.toml"
    path.write_text(text.replace("OBJECTIVE", objective))
    return path


# ------------------------------------------------------------------ files


def test_a_result_is_for_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run(
            cases()["fts"].study,
            dict.fromkeys(NAMES, hill),
            seed=0,
            space=SQUARE,
            out=tmp_path / "a" / "run",
        )
    finally:
        os.umask(before)
    found = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert len(found) > 8
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert RunResult.load(tmp_path / "a" / "run").names == NAMES


@pytest.mark.parametrize("name", ["result.json.draft", "records.jsonl.draft", "arrays.npz.draft"])
def test_no_link_is_followed(tmp_path: Path, name: str) -> None:
    result = run(cases()["fts"].study, dict.fromkeys(NAMES, hill), seed=0, space=SQUARE)
    (tmp_path / "run").mkdir()
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "run" / name).symlink_to(target)
    result.save(tmp_path / "run")
    assert target.read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ProtocolError, match="is a symbolic link"):
        result.save(tmp_path / "link")


# ------------------------------------------------------------------ objectives and names


def test_a_study_file_names_no_code_of_the_machine(tmp_path: Path) -> None:
    for objective in ("os:popen", "subprocess:run", "builtins:eval"):
        study = read_study(file(tmp_path, objective))
        with pytest.raises(StudyError, match=r"no module .* below the file's folder.*entry point"):
            study.load()
    (tmp_path / "os.py").write_text("def popen(agent, x): return 1.0\n")
    with pytest.raises(StudyError, match=r"the module 'os' that is loaded is"):
        read_study(file(tmp_path, "os:popen")).load()


def test_a_plan_imports_nothing(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "harmful.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(agent, x): return x\n"
    )
    assert main(["run", str(file(tmp_path, "harmful:score")), "--dry-run"]) == 0
    assert not (tmp_path / "ran").exists()
    assert main(["run", str(file(tmp_path, "harmful:other")), "--dry-run"]) != 0
    assert "has no 'other'" in capsys.readouterr().err


CANARY = """open(RAN, "a").write("ran")
from botorch_fed.studies import FTS as Study
from botorch_fed.search.messages import TransferRows as Search
from botorch_fed.aggregation.relay import Relay as Aggregation
"""
NAMED = {
    "Study": 'name = "canary:Study"',
    "Search": 'name = "federation"\nsearch = "canary:Search"',
    "Aggregation": 'name = "federation"\naggregation = { kind = "canary:Aggregation" }',
}


@pytest.mark.parametrize("part", NAMED)
def test_a_plan_imports_no_class_but_the_files_own(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Classes have settings and prices, which a plan prints: those of three places are imported."""
    folder, elsewhere = tmp_path / "study", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
    ran = tmp_path / "ran"
    canary = CANARY.replace("RAN", repr(str(ran)))
    (elsewhere / "canary.py").write_text(canary)
    monkeypatch.setattr(sys, "path", [str(elsewhere), *sys.path])
    monkeypatch.delitem(sys.modules, "canary", raising=False)
    text = STUDY.replace('name = "fts"', NAMED[part])
    assert text != STUDY
    (folder / "score.py").write_text("def score(agent, x): return x\n")
    path = file(folder, "score:score", text)
    assert main(["run", str(path), "--dry-run"]) != 0
    assert "there is no module 'canary' below the file's folder" in capsys.readouterr().err
    assert not ran.exists()
    info = elsewhere / "canary-1.0.dist-info"  # an installed package names it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: canary\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[botorch_fed.parts]\nmine = canary:{part}\n")
    assert main(["run", str(path), "--dry-run"]) == 0, capsys.readouterr().err
    assert ran.exists()
    ran.unlink()
    shutil.rmtree(info)
    monkeypatch.delitem(sys.modules, "canary")
    (folder / "canary.py").write_text(canary)  # the user's own
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(elsewhere)])
    assert main(["run", str(path), "--dry-run"]) == 0, capsys.readouterr().err
    assert ran.exists()
    monkeypatch.delitem(sys.modules, "canary")


def test_a_plan_of_named_parts_looks_for_no_module_beside_its_file(tmp_path: Path) -> None:
    """Files of a folder that happen to have names of modules are no business of a plan."""
    (tmp_path / "score.py").write_text("def score(agent, x): return x\n")
    assert main(["run", str(file(tmp_path, "score:score")), "--dry-run"]) == 0
    assert str(tmp_path) not in sys.path


def test_names_are_printed_as_they_are(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "plainly.py").write_text("def score(agent, x): return x\n")
    path = file(tmp_path, "plainly:score")
    path.write_text(path.read_text().replace("ann", "[/b]"))
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "[/b]" in capsys.readouterr().out
    path.write_text(path.read_text().replace("[/b]", "\\u001b[2J"))
    with pytest.raises(StudyError, match="printable"):
        read_study(path)


def test_a_site_has_to_bound_what_a_study_reveals(tmp_path: Path) -> None:
    study = read_study(file(tmp_path, "ask", LOCAL))
    with pytest.raises(StudyError, match=r"privacy: missing; a run reveals up to epsilon = "):
        check_site_budget(study)
    bounded = LOCAL.replace("[protocol]", "[privacy]\nepsilon = 9.0\ndelta = 1e-5\n\n[protocol]")
    check_site_budget(read_study(file(tmp_path, "ask", bounded)))


# ------------------------------------------------------------------ evaluations, one by one

DIES = """
import os, signal, sys
from botorch_fed.run import run
from botorch_fed.studies import FedGP
from test.faults.cases import SQUARE, hill

class Slow:
    def __init__(self, last):
        self.last, self.count = last, 0
    def __call__(self, X):
        assert len(X) == 1
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return hill(X)

slow = Slow(int(sys.argv[2]))
study = FedGP(budget=12, num_initial=10, channel="plain")
again = sys.argv[3] == "again"
run(study, {"ann": slow, "bob": hill}, space=SQUARE, seed=0, out=sys.argv[1], resume=again)
print(slow.count)
"""


def test_a_kill_in_the_middle_of_ten_points_loses_the_one_that_is_under_way(
    tmp_path: Path,
) -> None:
    """Also of a plain function in `run`."""

    def go(last: int, how: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DIES, str(tmp_path / "run"), str(last), how],
            cwd=Path(__file__).parents[2],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert go(7, "first").returncode == -signal.SIGKILL
    with FileLog(site_folder(tmp_path / "run", "ann"), SITE_EVENTS) as log:
        seen = [event for event in log if isinstance(event, Observed)]
    assert [event.trials for event in seen] == [(i,) for i in range(6)]
    after = go(0, "again")
    assert after.returncode == 0, after.stderr
    assert after.stdout.split()[-1] == str(12 - 6)  # nothing is evaluated twice
