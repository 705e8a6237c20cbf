"""The entries of the DP-FTS-DE benchmark: names, a few rounds, and what summaries say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from benchmarks.papers import dp_fts_de, ledger
from benchmarks.papers.dp_fts_de import (
    FIGURE_PAIRS,
    FIGURES,
    KEYS,
    TASKS,
    Curves,
    design_rows,
    landmine_json,
    starts_of,
    synthetic,
    synthetic_json,
    table_run,
)
from benchmarks.papers.ledger import CHECKPOINTS, Results
from benchmarks.papers.tabulated import made_up
from botorch_fed.acquisition import Partition


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "RESULTS", tmp_path)
    return tmp_path


def test_figures_name_rows() -> None:
    rows = TASKS["synthetic"].rows
    shown = {name for names in FIGURES.values() for name in names}
    assert shown == set(rows) > set(TASKS["synthetic-raw"].rows)
    assert {name for pairs in FIGURE_PAIRS.values() for pair in pairs for name in pair} <= shown


def test_the_paper_sees_outcomes_as_they_are() -> None:
    line = table_run("synthetic-raw", "dp-fts-de-2", 10, 0, rounds=3)
    ours = table_run("synthetic", "dp-fts-de-2", 10, 0, rounds=3)
    assert line["epsilon"] == ours["epsilon"]
    assert 0 < 3 * line["clipped"] < ours["clipped"]


@pytest.mark.parametrize("row", ["ts", "dp-fts-de-2", "correlated-mean", "few-gain"])
def test_a_few_rounds_of_synthetic_agents(row: str) -> None:
    line = table_run("synthetic", row, 10, 0, rounds=2)
    assert line == {**table_run("synthetic", row, 10, 0, rounds=2), **_cpu(line)}
    assert line["regret"]["0"] >= line["regret"]["2"] >= 0
    assert (line["epsilon"] is None) == (row == "ts")
    if row != "ts":
        assert line["epsilon"] < line["moments_epsilon"]
        assert line["snr"] > 0
        assert (line["adjacency"], line["unit"]) == ("zero-out", "agent")


def _cpu(line: dict[str, object]) -> dict[str, object]:
    return {"cpu_seconds": line["cpu_seconds"]}


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> str:
    """An entry with the rows of Fig. 3 for twelve made-up agents."""
    rows = {**dp_fts_de.plane_rows(12), **dp_fts_de.variants(12)}
    task = replace(TASKS["har-paper"], problem=lambda seed: made_up(12), rows=rows)
    monkeypatch.setitem(TASKS, "made-up", task)
    return "made-up"


@pytest.mark.filterwarnings("ignore:the release after")
def test_ours_has_the_epsilon_of_the_published_point(plane: str) -> None:
    theirs, ours = (
        table_run(plane, row, 10, 0, rounds=4)
        for row in ("paper-q.1-z1-own-region", "ours-as-q.1-z1")
    )
    assert (theirs["q"], theirs["z"], theirs["noise"]) == (0.1, 1.0, "paper")
    assert 0.99 * theirs["epsilon"] < ours["epsilon"] <= theirs["epsilon"] + 1e-3
    assert theirs["epsilon"] < theirs["moments_epsilon"]
    assert ours["delta"] == theirs["delta"] == pytest.approx(12**-1.1, abs=1e-6)


def test_nine_points_are_the_papers() -> None:
    names = [dp_fts_de.named(q, z) for q, z in dp_fts_de.PLANE]
    assert len(set(names)) == 9
    assert {"q.35-z1", "q.35-z1.6", "q.1-z1", "q.25-z1"} < set(names)
    for entry in ("landmine-table", "har-paper", "digits-paper"):
        task = TASKS[entry]
        assert (task.rounds, task.starts) == (60, (10,))
        kinds = ("paper-{}-own-region", "ours-as-{}", "default-as-{}")
        assert {kind.format(name) for kind in kinds for name in names} < set(task.rows)


@pytest.mark.filterwarnings("ignore:the release after")
def test_a_sample_of_a_fixed_size_is_for_replaced_agents(plane: str) -> None:
    line = table_run(plane, "fixed-size", 10, 0, rounds=2)
    assert line["q"] == pytest.approx(4 / 12, abs=1e-4)
    assert (line["adjacency"], line["moments_epsilon"]) == ("replace-one", None)


def test_rows_of_a_seed_start_alike() -> None:
    problem = synthetic(0)
    rows = starts_of(problem, 3, 0, None)
    assert torch.equal(rows, starts_of(problem, 3, 0, Partition.regular(1, 1)))
    assert torch.equal(rows[:, :1], starts_of(problem, 3, 0, None)[:, :1])
    regional = starts_of(problem, 3, 0, Partition.regular(4, 1))
    regions = Partition.regular(4, 1).region_of(problem.points[regional])
    assert bool((regions == torch.arange(200)[:, None] % 4).all())


def test_designs_lie_on_the_domain_once() -> None:
    rows = design_rows("sobol-20", synthetic(0), 4)
    assert len(set(rows)) == 20
    assert rows[:4] == design_rows("sobol", synthetic(0), 4)


def _fill(entry: str, losses: dict[str, float], starts: int, seeds: int = 12) -> None:
    results = Results(f"dp_fts_de/{entry}", KEYS)
    for row, loss in losses.items():
        runs = [{"row": row, "starts": starts, "seed": seed} for seed in range(1000, 1000 + seeds)]

        def work(row: str, starts: int, seed: int, loss: float = loss) -> dict[str, object]:
            values = {str(t): loss + 1e-3 * (seed - 1000) * loss for t in CHECKPOINTS}
            best = {t: 1 - value for t, value in values.items()}
            rest = {"epsilon": 2.0, "snr": 3.0, "cpu_seconds": 1.0, "versions": "none"}
            return {"best": best, "regret": values, "cumulative": values, **rest}

        results.fill(runs, work, row)


def test_landmine_json(results: Path) -> None:
    _fill("landmine", {"ours": 0.2, "field": 0.21, "corners": 0.22, "paper": 0.24, "ts": 0.23}, 10)
    _fill("landmine", {"ts": 0.23}, 10, seeds=20)  # more than ours has: left out
    found = landmine_json("landmine")
    keys = "epsilon one_minus_auc_10 one_minus_auc_60 ts_one_minus_auc_10 ts_one_minus_auc_60 "
    keys += "p_vs_ts_10 p_vs_ts_60 paper_faithful_one_minus_auc_60 random_field_one_minus_auc_60 "
    keys += "corners_one_minus_auc_60 seeds"
    assert list(found) == keys.split()
    assert found["seeds"] == 12
    assert found["one_minus_auc_60"] == pytest.approx(0.2 * 1.0055, abs=1e-5)
    gaps = -0.03 * (1 + 1e-3 * np.arange(12))
    assert found["p_vs_ts_10"] == pytest.approx(2 * ttest_1samp(gaps, 0).pvalue)  # Holm over two


def test_synthetic_json(results: Path) -> None:
    losses = {"ours-2": 0.02, "ts": 0.1, "field": 0.09, "sobol": 0.06, "sobol-10": 0.04}
    _fill("synthetic-few", {**losses, "sobol-20": 0.05}, 1)
    found = synthetic_json()
    keys = "epsilon regret ts_regret random_field_regret public_design_regret p_vs_ts "
    keys += "p_vs_random_field p_vs_public_design seeds"
    assert list(found) == keys.split()
    assert found["public_design_regret"] == pytest.approx(0.04 * 1.0055, abs=1e-5)


def test_missing_results_are_said(results: Path) -> None:
    with pytest.raises(SystemExit, match="no seed with all rows"):
        landmine_json("landmine")


@pytest.mark.parametrize("as_json", [False, True])
def test_summary(results: Path, capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    _fill("har", {"ours-2": 0.2, "field": 0.21, "sobol": 0.22, "ts": 0.23}, 3)
    _fill("har", {"ours-2": 0.2, "ts": 0.23}, 1)
    dp_fts_de.summary("har", as_json=as_json)
    assert "ours-2 - ts" in capsys.readouterr().out
    curves = Curves(Results("dp_fts_de/har", KEYS), "regret", 3)
    assert curves.best_design(10) == "sobol"
