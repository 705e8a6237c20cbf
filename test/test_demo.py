"""The demo: statistics on known numbers, the verdict, and the story of every protocol, small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from botorch_fed import demo
from botorch_fed.cli import main
from botorch_fed.demo import (
    ALONE,
    BANDIT,
    CLEAR,
    DEFAULT,
    FULL,
    NO_NOISE,
    PRIVATE,
    PUBLIC,
    RANDOM,
    SOBOL,
    TOLD,
    Scene,
    Story,
    differences,
    holm,
)
from botorch_fed.federation.registry import PROTOCOLS
from botorch_fed.run import RunResult
from botorch_fed.space import Parameter, SearchSpace

Captured = pytest.CaptureFixture[str]
STORED = sorted((Path(__file__).parent.parent / "benchmarks" / "results" / "demo").glob("*.json"))
NOTHING = RunResult((), SearchSpace((Parameter.real("x", 0, 1),)), 0, "FTS")


# ------------------------------------------------------------------ statistics


def test_p_values_are_adjusted_by_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_differences_are_paired_by_seed_with_student_s_interval() -> None:
    mine = torch.tensor([[1.0, 3.0], [2.0, 3.0]])
    one, two = differences(mine, torch.zeros(2, 2), (1, 2))
    assert (one.after, one.mean) == (1, 1.5)
    # Two seeds: t = 3 with one degree of freedom, of which .975 is 12.706.
    assert (one.low, one.high) == pytest.approx((1.5 - 12.706 * 0.5, 1.5 + 12.706 * 0.5), rel=1e-4)
    assert one.p == pytest.approx(0.204833, rel=1e-4)  # 1 - 2 atan(3) / pi
    assert one.sign == 0
    assert (two.mean, two.low, two.high, two.p, two.sign) == (3.0, 3.0, 3.0, 0.0, 1)
    assert differences(mine, mine, (2,))[0].p == 1.0
    (single,) = differences(mine[:1], mine[1:], (1,))
    assert (single.mean, single.p, single.sign) == (-1.0, None, 0)
    assert single.shown == "-1.000"


def _story(arms: Mapping[str, list[list[float]]], beside: Mapping[str, str] = {}) -> Story:
    curves = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in arms.items()}
    names = list(arms)
    controls = {name: f"control {name}" for name in names[1:] if name not in beside}
    seeds = range(len(curves[names[0]]))
    return Story(
        seeds=seeds,
        arms=curves,
        controls=controls,
        beside=beside,
        marks=(1, 2),
        unit="evaluations",
        facts=[],
        first=NOTHING,
        others={},
    )


FLAT = [[0.0, 0.0]] * 3


def test_the_verdict_names_the_strongest_control_and_claims_no_more_than_there_is() -> None:
    mine = [[1.0, 0.5], [1.1, 0.6], [1.2, 0.4]]
    strong = [[0.5, 0.6], [0.6, 0.4], [0.7, 0.5]]
    story = _story({"ours": mine, "A": FLAT, "B": strong})
    assert story.strongest == "B"
    first, second = story.verdict
    assert first.startswith(
        "Ahead of control A after 1, 2 of 2 evaluations (+1.100, +0.500; largest"
    )
    assert second.startswith(
        "Ahead of the strongest control (control B) after 1 of 2 evaluations (+0.5"
    )
    assert second.endswith("; no significant difference after 2.")
    (other_way, _) = _story({"ours": FLAT, "A": strong, "B": mine}).verdict
    assert other_way.startswith("Behind control A after 1, 2 of 2 evaluations (-0.600, -0.500")


def test_a_verdict_without_a_difference_claims_none() -> None:
    mine = [[1.0, 0.5], [-1.1, -0.6], [0.2, 0.4]]
    assert _story({"ours": mine, "A": FLAT}).verdict == [
        "No significant difference from control A."
    ]
    beside = {"clear": "the clear"}
    assert _story({"ours": mine, "A": FLAT, "clear": mine}, beside).verdict[1] == (
        "The same as the clear."
    )
    (line,) = _story({"ours": mine[:1], "A": FLAT[:1]}).verdict
    assert line == "One seed shows nothing: use --repeats 2 or more."


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_committed_differences_follow_from_the_committed_outcomes(path: Path) -> None:
    stored = json.loads(path.read_text())
    arms = {name: torch.tensor(rows).double() for name, rows in stored["arms"].items()}
    mine = arms[next(iter(arms))]
    for name, told in stored["against"].items():
        marks = [int(mark) for mark in told]
        for one in differences(mine, arms[name], marks):
            assert told[str(one.after)]["mean"] == pytest.approx(one.mean, abs=2e-6)
            assert told[str(one.after)]["p"] == pytest.approx(one.p, rel=0.02, abs=1e-9)


# ------------------------------------------------------------------ stories


def test_every_protocol_has_a_story() -> None:
    assert demo.SCENES.keys() == PROTOCOLS.keys()
    for protocol in PROTOCOLS:
        scene = demo.scene_of(protocol)
        assert scene.repeats > 1
        assert str(scene.newcomers) in demo.introduction(protocol, scene)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sites, and networks that learn little."""
    for protocol in ("fts", "fed-gp", "dp-fts-de", "federation"):
        monkeypatch.setitem(demo.SCENES, protocol, Scene(3, 1, 3, 3, 1))
    monkeypatch.setattr(demo, "EPOCHS", 2)
    monkeypatch.setattr(demo, "FULL_EPOCHS", 3)


def _document(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert main(["demo", "--no-report", "--workers", "1", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("protocol", ["fts", "fed-gp", "dp-fts-de", "federation"])
def test_newcomers(protocol: str, tmp_path: Path, capsys: Captured) -> None:
    found = _document(capsys, "--protocol", protocol, "--out", str(tmp_path / "demo"))
    more = {"fed-gp": [CLEAR], "dp-fts-de": [NO_NOISE]}.get(protocol, [])
    arms = {name: rows[0] for name, rows in found["arms"].items()}
    assert list(arms) == [TOLD, *more, ALONE, SOBOL, DEFAULT, FULL]
    assert all(values == sorted(values) for values in arms.values())  # the best so far
    assert arms[ALONE][:3] == arms[SOBOL]  # the starts are the same
    assert len(set(arms[FULL])) == 1
    assert found["verdict"] == ["One seed shows nothing: use --repeats 2 or more."]
    assert len(found["against"][ALONE]) == 3
    saved = RunResult.load(tmp_path / "demo" / "with-messages")
    assert saved.best("agent3").tolist() == pytest.approx(arms[TOLD], abs=1e-6)
    assert {row["agent"] for row in saved.given} == {"agent0", "agent1", "agent2"}
    said = " ".join(found["facts"])
    if protocol == "fed-gp":
        assert arms[CLEAR] == arms[TOLD]
        assert "bytes of ciphertext" in said
        assert saved.sees is not None
        assert saved.sees.encrypted
    if protocol == "dp-fts-de":
        assert "every agent goes on alone" in said
        assert found["privacy"]["epsilon"] == 0
        assert "With fewer than 9 sites nothing would be released at epsilon = 2" in said


def test_a_private_bandit_and_what_an_option_changes(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.SCENES, BANDIT, Scene(0, 2, 0, 99, 9))
    options = ["--protocol", BANDIT, "--budget", "8", "--repeats", "2", "--seed", "3"]
    found = _document(capsys, *options, "--out", str(tmp_path / "demo"))
    assert found["seeds"] == [3, 4]
    assert {name: len(rows[0]) for name, rows in found["arms"].items()} == {
        PRIVATE: 8,
        PUBLIC: 8,
        RANDOM: 8,
    }
    assert list(found["against"][RANDOM]) == ["1", "2", "4", "8"]
    assert found["privacy"]["epsilon"] <= 1.0
    assert RunResult.load(tmp_path / "demo" / "private").measure == "cumulative"


@pytest.mark.usefixtures("small")
def test_the_demo_says_its_verdict_before_its_tables(tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "demo"
    assert main(["demo", "--workers", "1", "--out", str(out)]) == 0
    said, noted = capsys.readouterr()
    assert said.startswith("fts, 1 seed(s). 3 sites have tuned a neural network")
    assert said.index("Verdict") < said.index("Means over 1 seed") < said.index("minus each other")
    assert "LogEI alone needs" in said
    assert "Privacy: no guarantee." in said
    assert "1 of 1 seeds" in noted
    report = (out / "report.html").read_text()
    assert "<html" in report
    assert "One seed shows nothing" in report


@pytest.mark.nightly
def test_processes_change_nothing_and_a_report_compares_as_many_evaluations(tmp_path: Path) -> None:
    scene = Scene(3, 1, 4, 3, 2)
    one = demo.play("fts", scene, tmp_path / "one")
    assert one.arms[ALONE].shape == (2, 4)
    assert {len(one.others[name].best("agent3")) for name in (ALONE, DEFAULT)} == {3}
    two = demo.play("fts", scene, tmp_path / "two", workers=2)
    assert one.document["arms"] == two.document["arms"]
