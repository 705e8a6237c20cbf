"""What the pages of the documentation show runs as it stands."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from test.test_docs import _blocks

ROOT = Path(__file__).parent.parent


def test_the_study_of_relayed_messages_runs() -> None:
    (code,) = _blocks("fts.rst", "python")
    names: dict[str, Any] = {}
    exec(code.replace("budget=12", "budget=4"), names)
    result = names["result"]
    assert len(result.records) == 32
    assert bool((result.best("agent3") > 0.5).all())


def test_the_loops_of_models_and_migration_run() -> None:
    *plain, _ = _blocks("migration.rst", "python")  # the last is Ax's, with clients of its own
    names: dict[str, Any] = {}
    for block in plain:
        exec(block, names)
    candidate = names["candidate"]
    assert candidate.shape == (1, 2)
    assert bool(((candidate >= 0) & (candidate <= 1)).all())
    assert len(names["result"].best("north")) == 4
    before = names["model"].posterior(candidate).mean
    names["their_Y"] = names["objective"](names["their_X"])
    for block in _blocks("models.rst", "python"):
        exec(block, names)
    assert torch.equal(names["model"].posterior(candidate).mean, before)  # the same message


def test_the_private_study_runs() -> None:
    code, _ = _blocks("dp_fts_de.rst", "python")
    names: dict[str, Any] = {}
    exec(code.replace("budget=11", "budget=5").replace("Agents(60,", "Agents(30,"), names)
    privacy = names["result"].privacy
    assert privacy["private"]
    assert 0 < privacy["epsilon"] <= 2.0
    assert privacy["releases"] == 1  # the second would come after round 4
    assert len(names["result"].regret("agent3")) == 5


def test_the_privacy_tools_say_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _, code = _blocks("dp_fts_de.rst", "python")
    lines = code.splitlines()
    shown = next(line for line in lines if line.startswith("# epsilon"))
    call = next(line for line in lines if line.startswith("epsilon("))
    code = code.replace(call, f"said = {call}").replace(
        "noise_multiplier_for(e", "z = noise_multiplier_for(e"
    )
    names: dict[str, Any] = {}
    exec(code, names)
    assert str(names["said"]) == shown.removeprefix("# ")
    assert names["z"] == pytest.approx(3.99, abs=0.005)
    assert capsys.readouterr().out.startswith("Passed")


def test_the_sums_say_what_they_guarantee(capsys: pytest.CaptureFixture[str]) -> None:
    _, code = _blocks("fed_gp.rst", "python")
    exec(code, {})
    plain, private, encrypted = capsys.readouterr().out.splitlines()
    assert plain.startswith("[[0.71 0.66]]")
    assert encrypted.startswith("[[0.75 0.69]]")
    assert "epsilon <= 4.729 at delta = 1e-05 per agent" in private
    for line in (plain, encrypted):
        assert "no privacy guarantee" in line
    assert "contributions open to nobody" in encrypted


def test_the_encrypted_study_runs() -> None:
    code, _ = _blocks("fed_gp.rst", "python")
    names: dict[str, Any] = {}
    exec(code.replace("budget=15", "budget=6"), names)
    assert names["result"].privacy["sums"] == 3
    assert names["result"].privacy["channel"] == "ThresholdCKKSChannel"
    assert names["result"].sees.encrypted


def test_the_bandit_finds_good_arms() -> None:
    (code,) = _blocks("private_ucb.rst", "python")
    names: dict[str, Any] = {}
    exec(code.replace("epsilon=1.0", "epsilon=10.0"), names)  # noise is that of the system
    assert names["result"].privacy["mechanism"] == "PrefixSum"
    assert names["result"].privacy["planned_releases"] == 256
    assert sum(names["late"]) / len(names["late"]) > 0.7


def test_the_study_with_an_outcome_constraint_runs() -> None:
    (code,) = _blocks("outcomes.rst", "python")

    def measured(X: torch.Tensor) -> torch.Tensor:
        """Error, and a latency that grows with the second parameter."""
        return torch.stack([(X[:, 0] - 0.3) ** 2, 40 * X[:, 1]], dim=-1)

    names: dict[str, Any] = {"objectives": {"north": measured, "south": measured}}
    exec(code.replace("budget=20", "budget=5"), names)
    (front,) = names["result"].pareto("north")
    assert front["values"]["latency"] <= 20
    assert front["parameters"] == names["result"].best_parameters("north")


def test_the_study_with_a_fidelity_runs() -> None:
    code, _ = _blocks("fidelity.rst", "python")  # the second is of a site's trials

    def loss(X: torch.Tensor) -> torch.Tensor:
        """A loss that falls with the epochs."""
        return (X[:, :1] - 0.3) ** 2 + 0.1 * (1 - X[:, 1:])

    names: dict[str, Any] = {"objectives": {"north": loss, "south": loss}}
    exec(code.replace("budget=12", "budget=2"), names)
    costs = names["result"].costs("north")
    assert costs[-1] <= 2 + 1e-9
    assert len(costs) > 2  # some were cheaper than one at the target


def test_the_quickstart_shows_that_summaries_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "tutorials" / "quickstart.py"
    monkeypatch.setattr(sys, "argv", [script.name, "--queries", "5", "--seed", "1"])
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr()
    rows = [line for line in out.out.splitlines() if "GP)" in line]
    alone, helped = ([float(v) for v in re.findall(r"\d+\.\d+", row)] for row in rows)
    assert helped[1] < 0.5 < alone[1]
    assert "not a privacy guarantee" in out.out
    assert not out.err
    assert torch.isfinite(torch.tensor(helped)).all()
