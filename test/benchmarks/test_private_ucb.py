"""The entries of the private bandit benchmark: runs, what identifies them, and summaries."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.papers import ledger, private_ucb
from benchmarks.papers.private_ucb import (
    ENTRIES,
    FIGURES,
    PUBLISHED_TABLE1,
    ROWS,
    SMALL,
    SUMMARIES,
    TABLE1_ROWS,
    Likelihood,
    PublishedIncrements,
    PublishedPrefix,
    bandit_run,
    disc_features,
    figure_summary,
    offered,
    paper_norm_bound,
    quadrature_summary,
    synthetic_runs,
    table_run,
    table_runs,
    table_summary,
)
from benchmarks.papers.published.noise import paper_local_noise, paper_prefix_noise
from botorch_fed.privacy import InsecureSeededNoise


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "RESULTS", tmp_path)
    return tmp_path


# ------------------------------------------------------------------ runs


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_bandit_repeats_itself(row: str) -> None:
    alpha, beta = (10.0, 0.1) if ROWS[row].private else (None, None)
    line = bandit_run(row, alpha, beta, 3, rounds=40)
    again = bandit_run(row, alpha, beta, 3, rounds=40)
    assert {**again, "cpu_seconds": 0} == {**line, "cpu_seconds": 0}
    assert json.loads(json.dumps(line)) == line
    gaps = offered(3, 40)[1]
    most = float((gaps.amax(dim=1) - gaps.amin(dim=1)).sum())
    assert 0 <= line["last_tenth"] <= line["regret"] <= most
    assert line["curve"] == sorted(line["curve"])
    assert (line["snr"] is None) == (row in ("nonprivate", "random"))


def test_random_play_is_the_mean_over_arms() -> None:
    values = offered(0, 40)[1]
    expected = float((values.amax(dim=1) - values.mean(dim=1)).sum())
    assert bandit_run("random", None, None, 0, rounds=40)["regret"] == pytest.approx(expected, 1e-3)


def test_without_noise_to_speak_of_the_private_row_knows_the_sums() -> None:
    row = ROWS["joint-sqrt"]
    phi = disc_features(row.features)
    like = Likelihood(phi, row.noise_var)
    assert row.stream is not None
    stream = row.stream(like, 1e6, 0.1, 16, 0)
    exact = private_ucb.exact(like, None, None, 16, 0)
    Phi = phi(offered(0, 16)[0][:, 0]).detach()
    for t in range(15):
        for one in (stream, exact):
            one.add(Phi[t : t + 1], float(t % 2))
    mean, _ = stream.posterior().predict(Phi)
    expected, _ = exact.posterior().predict(Phi)
    torch.testing.assert_close(mean, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(name, marks=[] if name == "camelback" else [pytest.mark.nightly])
        for name in PUBLISHED_TABLE1
    ],
)
def test_a_run_of_table1_repeats_itself(environment: str) -> None:
    line = table_run(environment, "blocks", 10.0, 0.1, 2, rounds=300)
    again = table_run(environment, "blocks", 10.0, 0.1, 2, rounds=300)
    assert {**again, "cpu_seconds": 0} == {**line, "cpu_seconds": 0}
    assert 0 < line["share_of_random"] < 3
    assert line["curve"][-1] == pytest.approx(line["regret"], abs=0.01)


def test_the_noisy_gram_matrix_plays_every_round() -> None:
    line = table_run("camelback", "gram", 10.0, 0.1, 0, rounds=30)
    assert line["blocks"] == 30


def test_published_noise_is_the_published_noise() -> None:
    phi = disc_features("short-10")
    like, rounds = Likelihood(phi, 0.25), 8
    row = torch.zeros(1, 10, dtype=torch.float64)
    prefix = [
        PublishedPrefix(like, rounds, InsecureSeededNoise(k), alpha=1.0, beta=0.1)
        for k in range(400)
    ]
    local = [
        PublishedIncrements(like, rounds, InsecureSeededNoise(k), alpha=1.0, beta=0.1)
        for k in range(400)
    ]
    found: dict[str, list[float]] = {"prefix": [], "matrix": [], "vector": []}
    for _ in range(3):
        for one in (*prefix, *local):
            one.add(row, 0.0)
        noise = torch.stack([one.noisy for one in prefix])
        assert torch.equal(noise, noise.mT)
        found["prefix"].append(float(noise[:, 0, 1].std()))
        noise = torch.stack([one.noisy for one in local])
        found["matrix"].append(float(noise[:, 0, 1].std()))
        found["vector"].append(float(noise[:, 0, 10].std()))
    nodes = [1, 1, 2]  # of the binary digits of 1, 2, 3
    matrix, vector = paper_local_noise(1.0, 0.1, 1.0)
    node = paper_prefix_noise(1.0, 0.1, rounds, 1.0)
    # Deviations of 400 draws: five of their standard errors, 3.5 % each.
    for t in range(3):
        assert found["prefix"][t] == pytest.approx(node * math.sqrt(nodes[t]), rel=0.18)
        assert found["matrix"][t] == pytest.approx(matrix * math.sqrt(t + 1), rel=0.18)
        assert found["vector"][t] == pytest.approx(vector * math.sqrt(t + 1), rel=0.18)


def test_published_bound_is_several_times_the_norm() -> None:
    draws = torch.randn(50, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm = float(torch.linalg.eigvalsh((draws + draws.mT) / math.sqrt(2)).abs().max())
    assert 3.5 < paper_norm_bound(1.0, 50, 1024) / norm < 6.5


# ------------------------------------------------------------------ what identifies a run


@pytest.mark.parametrize("figure", FIGURES)
def test_runs_of_a_figure_are_told_apart(figure: str) -> None:
    entry = ENTRIES[figure]
    runs = [run for row in entry.rows for run in synthetic_runs(figure, row)]
    assert len({tuple(run[key] for key in entry.keys) for run in runs}) == len(runs)
    private = {(run["alpha"], run["beta"]) for run in runs if run["alpha"] is not None}
    assert private == set(FIGURES[figure])
    assert len(synthetic_runs(figure, "joint-sqrt", 3, first=7)) == 3 * 4
    if figure != "figure2":
        assert min(synthetic_runs(figure, "local")[-1]["trial"], 19) == 19


@pytest.mark.parametrize("row", TABLE1_ROWS)
def test_runs_of_table1_are_told_apart(row: str) -> None:
    runs = table_runs(row)
    assert len({tuple(run[key] for key in ENTRIES["table1"].keys) for run in runs}) == len(runs)
    assert len(table_runs(row, 2)) == 2 * len({(run["alpha"], run["delta"]) for run in runs})


# ------------------------------------------------------------------ summaries


def _line(regret: float, **fields: Any) -> dict[str, Any]:
    return {**fields, "regret": regret, "last_tenth": 0.0, "cpu_seconds": 0.1, "versions": "v"}


def test_summary_of_a_figure(results: Path) -> None:
    lines = ENTRIES["figure1"].lines()
    values = {"random": 600.0, "nonprivate": 10.0, "joint-sqrt": 40.0, "joint-paper": 500.0}
    for row, regret in values.items():
        alpha, beta = (1.0, 0.1) if ROWS[row].private else (None, None)
        runs = [{"row": row, "alpha": alpha, "beta": beta, "trial": k} for k in range(4)]
        lines.fill(runs, lambda trial, regret=regret, **_: _line(regret + trial), row)
    out = figure_summary("figure1")
    found = {row["row"]: row for row in out["rows"]}
    assert set(found) == set(values)
    assert found["joint-sqrt"]["trials"] == 4
    mean, low, high = found["joint-sqrt"]["regret"]
    assert mean == pytest.approx(41.5)
    assert 40 <= low < mean < high <= 43
    assert found["joint-sqrt"]["share_of_random"] == pytest.approx(41.5 / 601.5, abs=1e-4)
    (ratio,) = out["published_over_ours"]
    assert ratio["ratio"] == pytest.approx(501.5 / 41.5, abs=0.01)
    _show("figure1", out)


def test_summary_of_table1_has_the_figures_of_the_claim(results: Path) -> None:
    bandit, table = ENTRIES["figure1"].lines(), ENTRIES["table1"].lines()
    for row, regret in {"nonprivate": 10.0, "joint-sqrt": 40.0, "joint-paper": 500.0}.items():
        alpha, beta = (1.0, 0.1) if ROWS[row].private else (None, None)
        run = {"row": row, "alpha": alpha, "beta": beta, "trial": 0}
        bandit.fill([run], lambda regret=regret, **_: _line(regret), row)
    for k, environment in enumerate(PUBLISHED_TABLE1):
        for delta in (0.1, SMALL):
            what = {"environment": environment, "mechanism": "blocks", "alpha": 1.0}
            run = {**what, "delta": delta, "trial": 0}
            regret = 100.0 * (k + 1) + (delta == SMALL)
            work = lambda regret=regret, **_: _line(regret, share_of_random=0.1)  # noqa: E731
            table.fill([run], work, environment)
    out = json.loads(json.dumps(table_summary()))
    keys = ("synthetic_alpha1", "synthetic_nonprivate", "synthetic_paper_alpha1")
    assert [out[key] for key in keys] == [40, 10, 500]
    assert [out[key] for key in ("camel_alpha1", "styb_alpha1", "mw_alpha1")] == [100, 200, 300]
    assert set(out["trials_of"].values()) == {1}
    assert out["trials"] == 1
    printed = [row.get("published") for row in out["rows"] if row["delta"] != SMALL]
    assert printed == [1029, 2680, 2883]
    _show("table1", out)


def test_quadrature_table() -> None:
    out = quadrature_summary()
    assert out["0.1"]["quadrature-32"] == pytest.approx(0.38, rel=0.05)
    assert out["0.2"]["quadrature-16"] == pytest.approx(4.2e-3, rel=0.05)
    assert out["0.5"]["quadrature-8"] == pytest.approx(4.9e-5, rel=0.05)
    assert all(0.03 < row["random-64"] < 0.3 for row in out.values())
    _show("quadrature", out)


def test_committed_results_meet_their_claims() -> None:
    out = table_summary()
    if "synthetic_alpha1" not in out:
        pytest.skip("the results are not here")
    assert out["synthetic_alpha1"] <= 50
    assert out["synthetic_paper_alpha1"] >= 12 * out["synthetic_alpha1"]
    assert out["camel_alpha1"] <= 120
    assert out["styb_alpha1"] <= 2500
    assert out["mw_alpha1"] <= 4900
    assert out["trials"] >= 10


def test_every_entry_has_a_line_in_the_documentation() -> None:
    assert private_ucb.__doc__ is not None
    for entry in SUMMARIES:
        assert f"\n    {entry} " in private_ucb.__doc__


def _show(entry: str, out: dict[str, Any]) -> None:
    """A table that can be drawn, all rows in it."""
    for grid in SUMMARIES[entry][1](entry, out):
        assert len(grid.rows) > 0
        assert all(np.unique([len(list(column.cells)) for column in grid.columns]) > 0)
