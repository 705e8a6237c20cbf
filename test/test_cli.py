"""The command line as people use it: what it prints where, and what it returns."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import botorch_fed.privacy
from botorch_fed.cli import _parser, _silent, main
from botorch_fed.report.page import plotly_script
from botorch_fed.run import RunResult
from botorch_fed.study import read_study, run_study
from botorch_fed.version import __version__
from test.test_study import BANDIT, OBJECTIVE, PRIVATE, STUDY, folder, write

__all__ = ["folder"]  # a fixture

Captured = pytest.CaptureFixture[str]


def told(capsys: Captured, code: int, *arguments: str | Path) -> tuple[str, str]:
    """What a command writes to stdout and stderr; it must return this code."""
    found = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert found == code, err
    return out, err


def document(capsys: Captured, code: int, *arguments: str | Path) -> dict[str, Any]:
    """The one JSON document of a command."""
    out, _ = told(capsys, code, *arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    return found


# ------------------------------------------------------------------ the front door


def test_help_names_all_commands_and_exit_codes(capsys: Captured) -> None:
    out, _ = told(capsys, 0, "--help")
    for word in ("demo", "run", "account", "audit", "report", "completion", "130 interrupted"):
        assert word in out
    assert told(capsys, 0, "--version")[0].split() == ["botorch-fed", __version__]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--protocol", "ftz"], "invalid choice: 'ftz'"),
        (["demo", "--budget", "2"], "expected an integer >= 3, got 2"),
        (["demo", "--budget", "x"], "invalid int value: 'x'"),
        (["demo", "--rounds", "9"], "--rounds is now --budget, evaluations of each site: write "),
        (["run"], "required: STUDY.toml"),
        (["account", "--delta", "1e-5", "--releases", "1"], "--noise-multiplier --epsilon"),
        (["audit", "--runs", "1"], "expected an integer >= 10"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
    ],
)
def test_wrong_usage_is_code_2(capsys: Captured, arguments: list[str], said: str) -> None:
    out, err = told(capsys, 2, *arguments)
    assert said in err
    assert not out


_LOADED = """
import sys, time
start = time.process_time()
from botorch_fed.cli import main
code = main(["--help"])
spent = time.process_time() - start
heavy = {"torch", "sklearn", "botorch", "scipy", "numpy", "rich"} & set(sys.modules)
sys.stderr.write(f"{code} {spent:.3f} {sorted(heavy)}")
"""


def test_help_is_quick_because_it_imports_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True)
    code, spent, heavy = done.stderr.split(maxsplit=2)
    assert (code, heavy) == ("0", "[]")
    assert float(spent) < 0.3


# ------------------------------------------------------------------ account and audit


def test_account_shows_all_accountants(capsys: Captured) -> None:
    settings = ("--sampling-rate", "0.35", "--noise-multiplier", "1", "--releases", "60")
    found = document(capsys, 0, "account", *settings, "--delta", "0.0246")
    by_name = {row["accountant"]: row["epsilon"] for row in found["accountants"]}
    # "pld" as in docs/dp_fts_de.rst; the others are other bounds of the same.
    assert by_name["pld"] == pytest.approx(10.385, abs=0.01)
    assert by_name["rdp"] > by_name["prv"] > by_name["pld"]
    assert by_name["gdp"] is None  # no upper bound under sampling
    out, err = told(capsys, 0, "account", *settings, "--delta", "0.0246")
    assert "10.385" in out
    assert "no upper bound" in out
    assert not err


def test_account_has_the_optimistic_bound_beside_the_pessimistic(capsys: Captured) -> None:
    settings = ["--sampling-rate", "0.35", "--noise-multiplier", "1", "--releases", "20"]
    found = document(capsys, 0, "account", *settings, "--delta", "1e-3", "--units", "29")
    rows = {row["accountant"]: row for row in found["accountants"]}
    assert 0.99 * rows["pld"]["epsilon"] < rows["pld"]["at_least"] <= rows["pld"]["epsilon"]
    assert {name for name, row in rows.items() if row["at_least"] is not None} == {"pld"}


def test_account_refuses_a_delta_that_says_nothing(capsys: Captured) -> None:
    settings = ["--noise-multiplier", "1", "--releases", "1"]
    _, err = told(capsys, 2, "account", *settings, "--delta", "0.9")
    assert "above 0.1" in err
    _, err = told(capsys, 2, "account", *settings, "--delta", "0.05", "--units", "20")
    assert "promises nothing to 20 agents" in err
    assert "Use delta = 1e-05" in err


def test_account_the_other_way_round(capsys: Captured) -> None:
    settings = ("--releases", "1", "--delta", "1e-5")
    found = document(capsys, 0, "account", "--epsilon", "1", *settings)
    assert found["noise_multiplier"] == pytest.approx(3.730632, rel=1e-5)  # [Balle2018]
    twice = document(
        capsys, 0, "account", "--epsilon", "1", *settings, "--adjacency", "replace-one"
    )
    assert twice["noise_multiplier"] == pytest.approx(2 * 3.730632, rel=1e-5)
    failed = document(capsys, 2, "account", "--epsilon", "-1", *settings)
    assert failed["exit_code"] == 2
    assert "must be positive" in failed["error"]


@pytest.mark.parametrize("mechanism", ["gaussian-sum", "weighted", "correlated"])
def test_audit_of_what_is_shipped(capsys: Captured, mechanism: str) -> None:
    settings = ("--mechanism", mechanism, "--runs", "50", "--rounds", "1", "--agents", "20")
    found = document(capsys, 0, "audit", *settings)
    assert found["passed"]
    assert found["runs"] == 50
    assert all(check["passed"] for check in found["checks"])
    assert "no proof of privacy" in told(capsys, 0, "audit", *settings)[0]


def test_audit_of_a_mechanism_with_half_the_noise(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = botorch_fed.privacy.GaussianSum
    monkeypatch.setattr(kind, "_noise_norm", property(lambda self: self.sensitivity / 2))
    out, _ = told(capsys, 1, "audit", "--runs", "200", "--agents", "20")
    assert "FAILED" in out


def test_wrong_settings_of_an_audit(capsys: Captured) -> None:
    settings = ("--mechanism", "correlated", "--agents", "1")
    _, err = told(capsys, 2, "audit", *settings)
    assert err.startswith("botorch-fed: Each of 2 regions, and no other, needs an agent")
    assert "Traceback" not in err
    with pytest.raises(Exception, match="Each of 2 regions"):
        main(["audit", *settings, "--debug"])


# ------------------------------------------------------------------ run and report


def test_run_prints_a_table_and_saves(folder: Path, capsys: Captured) -> None:
    path, out = write(folder), folder / "first"
    text, _ = told(capsys, 0, "run", path, "--out", out)
    assert "north" in text
    assert "no guarantee" in text
    assert "Messages" in text
    assert text.count("exchange 3") == 2  # both replied to the last
    assert len(RunResult.load(out).records) == 4
    _, err = told(capsys, 2, "run", path, "--out", out)
    assert "continue it with --resume" in err
    found = document(capsys, 0, "run", path, "--out", out, "--resume")
    assert found["best"]["north"]["evaluations"] == 2
    assert set(found["best"]["north"]["point"]) == {"lr", "depth", "kind"}
    assert found["budget"] == 2
    assert [row["site"] for row in found["contributions"]] == ["north", "south"]
    assert [row["messages_sent"] for row in found["contributions"]] == [2, 2]
    assert found["contributions"][0]["last_replied"] == 3


def test_export_writes_the_trials_of_a_run(folder: Path, capsys: Captured) -> None:
    path, out = write(folder), folder / "first"
    told(capsys, 0, "run", path, "--out", out)
    text, _ = told(capsys, 0, "export", out, "--to", "csv")
    assert text.splitlines() == ["north: 2 trials", "south: 2 trials", f"Saved in {out}/trials.csv"]
    assert (out / "trials.csv").stat().st_mode & 0o077 == 0
    head = (out / "trials.csv").read_text().splitlines()[0]
    assert head.startswith("site,trial,status,lr,depth,kind,value")
    pytest.importorskip("optuna")
    found = document(capsys, 0, "export", out, "--to", "optuna", "--site", "south")
    assert found["trials"] == {"south": 2}
    again = document(capsys, 2, "export", out, "--to", "optuna", "--site", "south")
    assert "name another storage" in again["error"]
    assert "no result.json" in told(capsys, 2, "export", folder / "nowhere", "--to", "ax")[1]


def test_export_without_the_other_program_names_the_extra(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(capsys, 0, "run", write(folder), "--out", folder / "first")
    monkeypatch.setitem(sys.modules, "optuna", None)
    _, err = told(capsys, 1, "export", folder / "first", "--to", "optuna")
    assert err == 'botorch-fed: This needs optuna: pip install "botorch_fed[optuna]".\n'


def test_resume_pays_for_nothing_twice(folder: Path, capsys: Captured) -> None:
    path = write(folder, 'out = "first"\n' + STUDY)
    module = next(folder.glob("objective_*.py"))
    module.write_text(
        OBJECTIVE.replace(
            "    shift =",
            "    from pathlib import Path\n"
            "    calls = Path(__file__).parent / 'calls'\n"
            "    calls.write_text(calls.read_text() + agent[0] if calls.exists() else agent[0])\n"
            "    if calls.read_text() == 'nsn':\n        raise KeyboardInterrupt\n    shift =",
        )
    )
    failed = document(capsys, 130, "run", path)
    assert failed == {
        "error": "interrupted; a run with a folder continues with --resume",
        "exit_code": 130,
    }
    before = {path: path.read_bytes() for path in (folder / "first").rglob("*") if path.is_file()}
    pytest.importorskip("plotly")
    interim = Path(document(capsys, 0, "report", folder / "first")["report"])
    assert "The run has not ended." in interim.read_text()
    assert "This is what its folder holds: 2 evaluations." in interim.read_text()
    interim.unlink()
    assert before == {path: path.read_bytes() for path in before}
    found = document(capsys, 0, "run", path, "--resume")
    assert (folder / "calls").read_text() == "nsn" + "ns"
    (folder / "calls").unlink()
    whole = document(capsys, 0, "run", write(folder), "--out", folder / "whole")
    assert found["best"] == whole["best"]


def test_dry_run(folder: Path, capsys: Captured) -> None:
    path = write(folder, PRIVATE.replace("MODULE:score", "MODULE:broken") + _privacy(200.0))
    found = document(capsys, 0, "run", path, "--dry-run")
    assert found["budget"] == 4
    assert found["rounds"] == 2
    assert found["total"] == 8
    assert found["price"]["guarantee"]["epsilon"] <= 200
    out, _ = told(capsys, 0, "run", path, "--dry-run")
    assert "nothing was evaluated" in out
    assert "The server is trusted" in out
    assert "epsilon <=" in out
    assert not (folder / "server").exists()


def _privacy(epsilon: float) -> str:
    return f"\n[privacy]\nepsilon = {epsilon}\ndelta = 1e-3\n"


def test_noise_that_drowns_everything_is_noted_once(folder: Path, capsys: Captured) -> None:
    path = write(folder, PRIVATE + _privacy(1.0))
    out, err = told(capsys, 0, "run", path)
    assert err.count("times as much signal as noise") == 1
    assert "epsilon <= 1 at delta = 0.001 per agent, zero-out" in out


@pytest.mark.parametrize("trust", ["central", "distributed"])
def test_a_plan_says_what_signal_to_expect(folder: Path, capsys: Captured, trust: str) -> None:
    plain = PRIVATE.split("[protocol.strategy]")[0] + f'trust = "{trust}"\n'
    few = write(folder, plain + _privacy(1.0))
    found = document(capsys, 0, "run", few, "--dry-run")
    assert found["price"]["guarantee"]["epsilon"] == 0
    assert "every agent goes on alone" in found["signal"]
    out, err = told(capsys, 0, "run", few, "--dry-run")
    assert "goes on alone" in " ".join(out.split())
    assert err.count("goes on alone") == 1
    names = ", ".join(f'"site{n}"' for n in range(40))
    many = write(folder, re.sub("agents = .*", f"agents = [{names}]", plain) + _privacy(2.0))
    found = document(capsys, 0, "run", many, "--dry-run")
    assert found["price"]["guarantee"]["epsilon"] > 1.9
    assert found["signal"].startswith("With 40 agents")
    assert found["price"]["paid_at"] == ("hub" if trust == "central" else "site")
    assert "alone" not in found["signal"]


@pytest.mark.parametrize("text", [PRIVATE + _privacy(200.0), BANDIT])
def test_a_ledger_that_is_used_up_is_code_3(folder: Path, capsys: Captured, text: str) -> None:
    ledger = '\n[ledger]\npath = "books"\nepsilon = 250.0\ndelta = 1e-3\n'
    path = write(folder, text + ledger)
    assert document(capsys, 0, "run", path)["privacy"]["epsilon"] <= 200
    _, err = told(capsys, 3, "run", path)
    assert "budget" in err
    assert "Traceback" not in err


def test_mistakes_of_run(folder: Path, capsys: Captured) -> None:
    path = write(folder)
    assert "--resume needs the folder" in told(capsys, 2, "run", path, "--resume")[1]
    assert "cannot be read" in told(capsys, 2, "run", folder / "no.toml")[1]
    path = write(folder, STUDY.replace(":score", ":broken"))
    out, err = told(capsys, 1, "run", path)
    assert not out
    assert "Every evaluation failed, the first with ValueError: no licence. Correct" in err
    path = write(folder, STUDY.replace("budget", "bugdet"))
    failed = document(capsys, 2, "run", path, "--dry-run")
    assert failed["error"].endswith("workers.")
    assert f"{path}:3: bugdet: unknown key. Did you mean 'budget'?" in failed["error"]


def test_run_in_worker_processes_as_a_command(folder: Path) -> None:
    path = write(folder, "workers = 1\n" + STUDY.replace(":score", ":broken"))
    command = [sys.executable, "-m", "botorch_fed.cli", "run", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["error"].startswith("Every evaluation failed, the first with ValueError: no lic")
    assert "Traceback" not in done.stderr


def test_report(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    told(capsys, 0, "run", write(folder), "--out", folder / "first")
    told(capsys, 0, "run", write(folder), "--out", folder / "second")
    found = document(capsys, 0, "report", folder / "first")
    page = Path(found["report"])
    assert page == folder / "first" / "report.html"
    assert "<html" in page.read_text()
    compare = ("--compare", f"the same={folder / 'second'}")
    told(capsys, 0, "report", folder / "first", "--out", folder / "other.html", *compare)
    assert "Against the same: the same best value at the end" in (folder / "other.html").read_text()
    assert "expected LABEL=DIR" in told(capsys, 2, "report", folder / "first", "--compare", "x")[1]
    _, err = told(capsys, 2, "report", folder)
    assert "has no result.json" in err
    with monkeypatch.context() as without:
        for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
            without.delitem(sys.modules, name)
        without.setitem(sys.modules, "plotly", None)
        plotly_script.cache_clear()
        for command in ("report", "watch"):
            _, err = told(capsys, 1, command, folder / "first")
            assert "pip install 'botorch_fed[plot]'" in err
    (folder / "first" / "result.json").write_text("{")
    assert "are damaged" in told(capsys, 1, "report", folder / "first")[1]


def test_who_did_not_reply_is_noted(folder: Path) -> None:
    result = run_study(read_study(write(folder)), out=None, progress=False)
    assert _silent(result) == []
    for row in result.rounds:
        if row["agent"] == "south" and row["round"] > 1:
            row.update(replied=False, failure="absent")
    assert _silent(result) == ["south did not reply in 2 exchange(s), last reason: absent."]


# ------------------------------------------------------------------ completion


def _completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=(botorch-fed {quoted}); COMP_CWORD={len(words)}; "
        '_botorch_fed; echo "${COMPREPLY[@]}"; complete -p botorch-fed >&2'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert "_botorch_fed botorch-fed" in done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path, capsys: Captured) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(told(capsys, 0, "completion", "bash")[0])
    assert _completed(script, "a") == ["advise", "account", "audit"]
    assert _completed(script, "run", "--d") == ["--debug", "--dry-run"]
    assert "--protocol" in _completed(script, "demo", "--")
    assert _completed(script, "demo", "--protocol", "f") == ["fts", "fed-gp", "federation"]
    assert _completed(script, "demo", "--budget", "") == []  # a number
    assert _completed(script, "completion", "z") == ["zsh"]


def test_scripts_of_other_shells_name_every_option(capsys: Captured) -> None:
    zsh, _ = told(capsys, 0, "completion", "zsh")
    assert zsh.startswith("#compdef botorch-fed")
    assert "bashcompinit" in zsh
    fish, _ = told(capsys, 0, "completion", "fish")
    for option in ("-l protocol -x -a 'fts dp-fts-de", "-l dry-run", "-l noise-multiplier -r"):
        assert option in fish


def test_a_curve_is_told_as_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    tell = ["site", "tell", "SITE", "7"]
    arguments = _parser().parse_args([*tell, "--curve", "1=0.9", "3=0.5"])
    assert (arguments.value, arguments.curve) == ([], [(1.0, 0.9), (3.0, 0.5)])
    arguments = _parser().parse_args([*tell, "0.4", "--fidelity", "9"])
    assert (arguments.value, arguments.fidelity, arguments.curve) == ([0.4], 9.0, None)
    with pytest.raises(SystemExit):
        _parser().parse_args([*tell, "--curve", "0.9"])
    assert "expected FIDELITY=VALUE, got '0.9'" in capsys.readouterr().err
