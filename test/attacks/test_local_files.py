"""What a site and a hub write is for nobody else, and a study file names no code but its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from botorch_fed.cli import main
from botorch_fed.errors import ProtocolError
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
import os, signal, sys, torch
from pathlib import Path
from botorch_fed.federation.base import Exchanged
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FedGP
from test.faults.cases import SQUARE, hill

class Slow:
    one_by_one = True
    count = 0
    def __call__(self, X):
        assert len(X) == 1
        Slow.count += 1
        if Slow.count == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return hill(X)

study = FedGP(budget=12, num_initial=10, channel="plain")
server = study.server(SQUARE, ("ann",))
agent = study.agent("ann", SQUARE, 0, MemoryBlobs())
site = Site("ann", agent, Slow(), log=FileLog(sys.argv[1], SITE_EVENTS))

def exchange(outgoing):
    for data in outgoing.blobs.values():
        agent.blobs.put(data)
    return Exchanged({"ann": site.respond(outgoing.requests["ann"])})

drive(server, exchange)
"""


def test_a_kill_in_the_middle_of_ten_points_loses_the_one_that_is_under_way(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DIES, str(tmp_path / "site")],
        cwd=Path(__file__).parents[2],
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    with FileLog(tmp_path / "site", SITE_EVENTS) as log:
        seen = [event for event in log if isinstance(event, Observed)]
    assert [event.trials for event in seen] == [(i,) for i in range(6)]
