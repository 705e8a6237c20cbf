"""The entries of the FBO-FedGP benchmark: rows, resuming, and what summaries say."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.papers import fed_gp, ledger
from benchmarks.papers.fed_gp import (
    CEC,
    ENTRIES,
    METHODS,
    Game,
    cec_summary,
    cec_tables,
    lines_of,
    one_run,
    pooled,
    random,
    starts,
    support_of,
    task_summary,
    task_tables,
)
from benchmarks.papers.tabulated import Tabulated, domain
from benchmarks.problems.cec2005 import CEC2005
from botorch_fed.space import Outcome, Parameter, SearchSpace

needs_data = pytest.mark.skipif(
    "BOTORCH_FED_DATA" not in os.environ, reason="BOTORCH_FED_DATA is not set"
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "RESULTS", tmp_path)
    return tmp_path


def bowls(agents: int = 3) -> Tabulated:
    """Agents with neighbouring minima, on a list of points."""
    space = SearchSpace(
        (Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)),
        Outcome(0.3, 0.2, minimize=True),
    )
    points = domain(space)
    middles = torch.linspace(0.4, 0.6, agents).double()
    values = [(points - middle).square().sum(dim=-1) for middle in middles]
    return Tabulated(space, points, torch.stack(values))


# ------------------------------------------------------------------ rows


@needs_data
@pytest.mark.parametrize("method", list(METHODS))
def test_a_row_has_a_falling_trace_from_the_common_start(method: str) -> None:
    line = one_run("cec2005", "F09", method, 0, rounds=2)
    other = one_run("cec2005", "F09", "random", 0, rounds=2)
    assert [len(line[key]) for key in ("best", "mean")] == [3, 3]
    for key in ("best", "mean"):
        assert line[key][0] == other[key][0]
        assert line[key] == sorted(line[key], reverse=True)
    assert all(b <= m for b, m in zip(line["best"], line["mean"], strict=True))
    assert line["best"][-1] > -330
    assert json.loads(json.dumps(line)) == line
    if method == "dp_fts_de":
        assert 0 < line["epsilon"] <= 10
    if method in ("ours", "global"):
        assert line["sums"] == 2
    if method == "local":
        assert line["sums"] == 0


@needs_data
def test_noisy_functions_also_say_what_the_best_is_without_noise() -> None:
    line = one_run("cec2005", "F04", "random", 0, rounds=3)
    assert -450 <= line["true"] < line["best"][-1]
    assert line == {
        **one_run("cec2005", "F04", "random", 0, rounds=3),
        "cpu_seconds": line["cpu_seconds"],
    }
    assert "true" not in one_run("cec2005", "F02", "random", 0, rounds=3)


@needs_data
def test_functions_of_a_seed_share_their_starts() -> None:
    first, second = (starts(CEC[name](), 1000) for name in ("F01", "F09"))
    assert all(torch.equal(first[name][0], second[name][0]) for name in first)
    assert len({X.numpy().tobytes() for X, _ in first.values()}) == 10
    another = starts(CEC["F01"](), 1001)
    assert not torch.equal(first["agent0"][0], another["agent0"][0])


@needs_data
def test_pooled_data_beat_random_points() -> None:
    problem = CEC2005(1)
    game = Game(problem, starts(problem, 0), 8, 0)
    best = [float(play(game).Y.min()) for play in (pooled, random)]
    assert best[0] < 0.25 * best[1]


@pytest.mark.parametrize("method", ["ours", "faithful", "local", "fts", "random"])
def test_rows_on_a_list_of_points(method: str) -> None:
    problem = bowls()
    game = Game(problem, starts(problem, 0), 3, 0)
    played = METHODS[method](game)
    for n in range(len(problem)):
        assert torch.equal(problem.evaluate(n, played.X[n]), played.Y[n])


@pytest.mark.parametrize("kind", ["sobol", "random", "algorithm1", "dp-k-means"])
def test_support_sets_have_their_size_and_lie_in_the_cube(kind: str) -> None:
    problem = bowls(9)
    game = Game(problem, starts(problem, 0), 3, 0)
    points = support_of(kind, 32, game)
    assert points.shape == (32, 2)
    assert bool(((points >= 0) & (points <= 1)).all())
    assert torch.equal(points, support_of(kind, 32, game))
    if kind == "algorithm1":  # which sends raw inputs
        firsts = torch.cat([X for X, _ in game.data.values()])
        assert bool((torch.cdist(points, firsts) == 0).any())


# ------------------------------------------------------------------ lines and summaries


def _fill(
    entry: str, unit: str, method: str, value: Callable[[int], float], seeds: int, **more: Any
) -> int:
    """Fabricated lines; says how many were missing."""
    calls = []

    def work(method: str, seed: int) -> dict[str, Any]:
        calls.append(seed)
        trace = np.linspace(value(seed) + 50, value(seed), 51).tolist()
        return {
            "best": trace,
            "mean": [v + 1 for v in trace],
            "cpu_seconds": 1.0,
            "versions": "a b",
            **more,
        }

    runs = [{"method": method, "seed": 1000 + k} for k in range(seeds)]
    lines_of(entry, unit).fill(runs, work, method)
    return len(calls)


def test_lines_keep_whole_traces_and_are_filled_once(results: Path) -> None:
    assert _fill("cec2005", "F01", "ours", lambda seed: 1.0, 2) == 2
    assert _fill("cec2005", "F01", "ours", lambda seed: 7.0, 3) == 1
    lines = lines_of("cec2005", "F01")
    assert lines.at("ours", 50) == {1000: 1.0, 1001: 1.0, 1002: 7.0}
    assert lines.at("ours", 0, "mean")[1002] == 58.0
    assert lines.mean("ours") == 3.0
    assert not lines_of("cec2005", "F02").lines


def test_summary_of_the_functions(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = range(1, 21)
    printed = {
        "FTS": {fed_gp.cec_name(k): k + 0.5 for k in numbers},
        "FBO-FedGP": {fed_gp.cec_name(k): 100.0 - k for k in numbers},
    }
    monkeypatch.setattr(fed_gp, "fedgp_table1", lambda: printed)
    units = [fed_gp.cec_name(k) for k in (1, 2, 3, 4, 5, 6)]
    for k, unit in enumerate(units, start=1):
        _fill("cec2005", unit, "ours", lambda seed, k=k: float(k), 5)  # type: ignore[misc]
        _fill("cec2005", unit, "faithful", lambda seed, k=k: k + 1.0, 5)  # type: ignore[misc]
        _fill("cec2005", unit, "random", lambda seed, k=k: k + (-1.0) ** k * 2, 3)  # type: ignore[misc]
    _fill("cec2005", "F07", "ours", lambda seed: 1e9, 1)  # runnable, but not compared
    out = cec_summary()
    assert out["rank"] == {"ours": 1.5, "faithful": 2.5, "random": 2.0}
    assert out["mean"]["F03"] == {"ours": 3.0, "faithful": 4.0, "random": 1.0}
    assert out["mean_over_agents"]["F03"]["ours"] == 4.0
    assert out["p_ours_vs_faithful"] == pytest.approx(2 / 2**6)
    assert out["rank_difference"] == -1.0
    assert out["wins_vs_table1"] == {"FTS": 6, "FBO-FedGP": 6}
    assert out["ranks_table1"] == {"FTS": 1.0, "FBO-FedGP": 2.0}
    assert out["seeds"] == {"ours": 1, "faithful": 5, "random": 3}
    against = out["ours_against"]
    assert against["faithful"]["p_holm"] == pytest.approx(4 / 2**6)
    assert against["random"]["p_holm"] == against["random"]["p"]
    json.dumps(out)
    assert len(cec_tables(out, "cec2005", printed=True)) == 3


def test_summary_of_the_tasks(results: Path) -> None:
    for name, error in (("ours", 0.2), ("faithful", 0.3), ("random", 0.4)):
        value = lambda seed, error=error: error + error * 0.01 * (seed - 1000)  # noqa: E731
        _fill("tasks", "credit", name, value, 10, optimum=0.1)
    out = task_summary("tasks")
    methods = out["credit"]["methods"]
    assert (out["credit"]["minimum"], out["credit"]["score"]) == (0.1, "error")
    mean, low, high = methods["ours"]["error"]["50"]
    assert mean == pytest.approx(1.209)
    assert low < mean < high
    test = methods["random"]["ours_minus_it"]
    assert test["mean"] == pytest.approx(-0.209)
    assert (test["clusters"], test["below"]) == (10, 1.0)
    assert test["low"] < -0.209 < test["high"]
    assert test["p_holm"] == pytest.approx(2 * test["p"])
    assert test["p_holm"] < 1e-6
    json.dumps(out)
    assert len(task_tables("tasks", out)) == 1


@needs_data
def test_the_command_fills_what_is_missing_and_sums_up(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["fed_gp", *words])
        fed_gp.main()
        return capsys.readouterr().out

    common = ("cec2005", "--functions", "1", "2", "--methods", "random", "--first-seed", "1000")
    command(*common, "--seeds", "1")
    before = (results / "fed_gp" / "cec2005-F01.jsonl").read_text()
    command(*common, "--seeds", "2")
    after = (results / "fed_gp" / "cec2005-F01.jsonl").read_text()
    assert after.startswith(before)
    assert [json.loads(line)["seed"] for line in after.splitlines()] == [1000, 1001]
    said = json.loads(command("cec2005", "--summary", "--json"))
    assert said["seeds"] == {"random": 2}
    assert set(said["mean"]) == {"F01", "F02"}
    assert "federation's best" in command("cec2005", "--summary")
    assert "not run" in command("--list")


def test_default_units_and_settings() -> None:
    assert len(ENTRIES["cec2005"].default) == 14
    assert len(ENTRIES["cec2005"].units) == 20
    assert not set(ENTRIES["tune"].default) & set(ENTRIES["cec2005"].default)
    assert ENTRIES["tune"].first < 1000 <= ENTRIES["cec2005"].first
    for entry in ENTRIES.values():
        assert set(entry.default) <= set(entry.units)
        assert set(entry.usual) <= set(entry.methods)
