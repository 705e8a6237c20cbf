"""The harness of the transfer suites: rows once, starts alike for all, statistics by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from benchmarks import transfer
from benchmarks.transfer import Job, Ledger, fill, regret_curve, smoke, toy
from benchmarks.transfer_ablations import ABLATIONS
from benchmarks.transfer_controls import (
    CONTROLS,
    Dace,
    MeanPrior,
    TrustRegion,
    dealt_points,
    dealt_starts,
    log_expected_improvement,
    own_starts,
    posterior_mean,
    with_default,
)
from benchmarks.transfer_summary import (
    area_ratio,
    difference,
    evaluations_to,
    mean_curves,
    pairs,
    significantly_worse,
    summarize,
    worst_task,
)
from benchmarks.transfer_tasks import make
from botorch_fed.models.local_gp import fit_local_gp, standardize
from botorch_fed.models.support import sobol_support
from botorch_fed.rng import generator

KEYS = {"regret_at", "cpu_ms_per_query", "seeds", "oracle_area_ratio"}


def row(task: str, seed: int, regret: list[float], **more: object) -> transfer.Row:
    return {"task": task, "seed": seed, "regret": regret, "cpu_ms_per_query": 1.0, **more}


# ------------------------------------------------------------------ rows


def test_rows_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Job] = []

    def counted(job: Job) -> transfer.Row:
        made.append(job)
        return row(job.task, job.seed, [0.5, 0.25])

    monkeypatch.setattr(transfer, "work", counted)
    jobs = [Job("smoke", "solo", "bowls", seed, None, None) for seed in range(3)]
    fill(jobs[:2], 0, tmp_path)
    fill(jobs, 0, tmp_path)
    assert [job.seed for job in made] == [0, 1, 2]
    assert [r["seed"] for r in Ledger("smoke", "solo", tmp_path).rows()] == [0, 1, 2]


def test_a_line_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    ledger = Ledger("smoke", "solo", tmp_path)
    ledger.append(row("a", 0, [1.0]))
    with ledger.path.open("a") as file:
        file.write('{"task": "a", "seed": 1, "reg')
    assert ledger.known() == {("a", 0)}
    ledger.append(row("a", 1, [1.0]))
    assert [r["seed"] for r in ledger.rows()] == [0, 1]


def test_regret_is_normalised_and_never_rises() -> None:
    task = toy(0)
    optimum, median = task.scale("agent0")
    true = np.array([median, median - 1, (optimum + median) / 2, optimum, median])
    np.testing.assert_allclose(regret_curve(task, "agent0", true, 0), [1, 1, 1, 0.5, 0, 0])
    np.testing.assert_allclose(regret_curve(task, "agent0", true, 3), [0.5, 0, 0])


# ------------------------------------------------------------------ starts


def test_starts_are_dealt_from_one_sequence_in_blocks() -> None:
    task = replace(toy(0), candidates=None)
    sequence = sobol_support(2, 8, seed=5)
    starts = dealt_starts(task, 5)
    torch.testing.assert_close(starts["agent0"], sequence[[0, 1, 2]])
    torch.testing.assert_close(starts["agent1"], sequence[[5, 6, 7]])


def test_starts_of_a_table_are_different_candidates() -> None:
    task = toy(0)
    for X in dealt_points(task, 0, 20).values():
        assert len(torch.unique(X, dim=0)) == 20
        same = (X[:, None] == task.candidates).all(dim=-1)
        assert bool(same.any(dim=-1).all())


@pytest.mark.parametrize(
    "method", ["solo", "solo_dealt", "sobol", "random", "fmtbo", "pooled", *transfer.STUDIES]
)
def test_every_method_has_the_same_starts_and_as_many_evaluations(method: str) -> None:
    task, dealt = toy(1), dealt_starts(toy(1), 1)
    starts = dealt
    if method in CONTROLS:
        trace = CONTROLS[method](task, 1, starts, None)
    else:
        study = transfer.STUDIES[method](task, 1, starts)
        trace = transfer.run_study(study, task, 1, starts)
    if method == "dp_fts_de_default":
        starts = with_default(task, starts)
    if method in ("solo", "sobol"):  # alone
        starts = own_starts(task, 1, starts)
        assert not torch.equal(torch.cat([*starts.values()]), torch.cat([*dealt.values()]))
    for site, X in trace.X.items():
        assert len(X) == len(trace.true[site]) == task.starts + task.queries
        torch.testing.assert_close(X[: task.starts], starts[site])


def test_the_default_comes_first_and_once() -> None:
    task = toy(0)
    starts = dealt_starts(task, 0)
    changed = with_default(task, starts)
    twice = with_default(task, changed)
    for site, X in changed.items():
        assert X.shape == starts[site].shape
        assert len(torch.unique(X, dim=0)) == len(X)
        torch.testing.assert_close(twice[site], X)


def test_a_newcomer_without_starts_asks_where_others_are_best() -> None:
    task, centres = toy(0), toy(0).centres
    same = replace(task, centres=centres[[0, 0]])
    X = task.candidates
    others = {"agent1": (X, same.evaluate("agent1", X))}
    trace = CONTROLS["pooled"](same, 0, {"agent0": X[:0]}, others)
    assert len(trace.X["agent0"]) == task.queries
    optimum, median = same.scale("agent0")
    assert trace.true["agent0"][0] > optimum - 0.1 * (optimum - median)


@pytest.mark.parametrize("method", transfer.LATE_STUDIES)
def test_a_newcomer_has_as_many_evaluations_with_every_method(method: str) -> None:
    task = toy(0)
    X = task.candidates[::7]
    others = {"agent1": (X, task.evaluate("agent1", X))}
    study = transfer.LATE_STUDIES[method](task, "agent0", others)
    trace = transfer.run_study(study, task, 0, {"agent0": X[:0]})
    assert list(trace.X) == ["agent0"]
    assert len(trace.true["agent0"]) == task.queries == trace.queries


# ------------------------------------------------------------------ statistics


def test_a_difference_counts_tasks_not_seeds() -> None:
    means = np.array([0.1, -0.2, 0.05, -0.3, -0.1])
    found, theirs = (
        difference([mean + np.array([-0.5, 0.5]) for mean in means]),
        ttest_1samp(means, 0),
    )
    low, high = theirs.confidence_interval()
    assert found == pytest.approx(
        {"difference": means.mean(), "low": low, "high": high, "p": theirs.pvalue}
    )


def test_tasks_count_alike_however_many_seeds() -> None:
    solo = [row("a", s, [1.0, 0.5]) for s in range(9)] + [row("b", 0, [1.0, 0.1])]
    mine, theirs = mean_curves(pairs(solo, solo))
    np.testing.assert_allclose(mine, [1.0, 0.3])
    np.testing.assert_allclose(theirs, mine)


def test_only_common_seeds_and_histories_are_compared() -> None:
    solo = [row("a", 0, [1.0], history="x"), row("a", 1, [1.0], history="x")]
    mine = [row("a", 1, [0.5], history="x"), row("a", 0, [0.5], history="y"), row("a", 7, [0.5])]
    both = pairs(mine, solo)
    assert both["a"][0].tolist() == [[0.5]]
    without = pairs([row("a", 0, [0.7])], solo)  # of a method that uses no histories
    assert without["a"][0].tolist() == [[0.7]]


def test_some_sites_are_compared_with_the_same_sites() -> None:
    solo = [row("a", 0, [0.5], by_site={"x": [0.2], "y": [0.8]})]
    mine = [row("a", 0, [0.7], by_site={"y": [0.7]}, some_sites=True)]
    both = pairs(mine, solo)
    assert [values.tolist() for values in both["a"]] == [[[0.7]], [[0.8]]]


def test_evaluations_to_a_target_are_interpolated() -> None:
    curve = np.array([1.0, 0.6, 0.4, 0.4])
    assert evaluations_to(curve, 0.5) == pytest.approx(1.5)
    assert evaluations_to(curve, 0.4) == pytest.approx(2.0)
    assert evaluations_to(curve, 1.0) == 0.0
    assert evaluations_to(curve, 0.3) is None


def test_area_and_worst_task() -> None:
    solo = [row("a", 0, [0.8, 0.4, 0.4, 0.4]), row("b", 0, [0.4, 0.2, 0.2, 0.2])]
    mine = [row("a", 0, [0.8, 0.2, 0.2, 0.2]), row("b", 0, [0.4, 0.2, 0.2, 0.3])]
    both = pairs(mine, solo)
    assert area_ratio(both) == pytest.approx(1.3 / 1.8)
    assert worst_task(both, 0) == pytest.approx(0.25)  # b at query 3: .1 of a gap of .4


def test_a_task_that_is_worse_is_found_and_noise_is_not() -> None:
    stream = generator(0, "noise")
    noise = stream.normal(3, 20, 25).numpy() * 0.05
    solo, mine = [], []
    for n, task in enumerate("abc"):
        for seed in range(20):
            base = np.linspace(1, 0, 25)
            solo.append(row(task, seed, base.tolist()))
            shift = 0.1 if task == "b" else 0.0
            mine.append(row(task, seed, (base + noise[n, seed] + shift).tolist()))
    assert significantly_worse(pairs(mine, solo)) == ["b"]


def test_the_summary_has_the_keys_of_the_bar() -> None:
    curve = np.linspace(0.9, 0.1, 24)
    rows = {
        method: [row(task, s, (curve * factor).tolist()) for task in "abc" for s in range(4 + n)]
        for n, (method, factor) in enumerate([("solo", 1.0), ("pooled", 0.8), ("fts", 0.5)])
    }
    found = summarize(rows, gap_at=lambda task: 0, required=["fts", "fedgp"])
    assert found["tasks"] == ["a", "b", "c"]
    assert found["seeds"] == 4
    fts = found["methods"]["fts"]
    assert set(fts) >= {*KEYS, "vs_solo", "worst_task_vs_solo", "tasks_significantly_worse"}
    assert set(fts["regret_at"]) == {"1", "3", "5", "10", "20"}
    assert set(fts["vs_solo"]["5"]) == {"difference", "low", "high", "p"}
    assert fts["oracle_area_ratio"] == pytest.approx(0.5 / 0.8)
    assert fts["tasks_significantly_worse"] == 0
    assert fts["evaluations_to_solo_20"] < 20
    assert found["methods"]["solo"]["evaluations_to_solo_20"] == pytest.approx(20)
    json.dumps(found)


# ------------------------------------------------------------------ what the controls are made of


def test_log_expected_improvement_is_botorchs() -> None:
    from botorch.acquisition.analytic import _log_ei_helper

    u = torch.tensor([-1e4, -50.0, -5.0, -1.0001, -0.9999, 0.0, 3.0]).double()
    found = log_expected_improvement(u.numpy(), np.ones(len(u)), 0.0)
    np.testing.assert_allclose(found, _log_ei_helper(u).numpy(), rtol=1e-6)


def test_posterior_means_are_those_of_the_own_model() -> None:
    X, points = generator(1, "x").uniform(6, 2), generator(1, "points").uniform(5, 2)
    y = torch.sin(4 * X.sum(dim=-1)).numpy()
    model = fit_local_gp(X.numpy(), standardize(y).values)
    found = posterior_mean(X, y)(points).numpy()
    np.testing.assert_allclose(found, model.predict(points.numpy())[0], rtol=1e-9)


def test_a_mean_of_functions_is_standardised() -> None:
    prior = MeanPrior([lambda X: 5 + 30 * X[:, 0], lambda X: 7 + 10 * X[:, 1]], 2)
    values = prior.values(generator(3, "x").uniform(20000, 2))
    assert abs(values.mean()) < 0.03
    assert abs(values.std() - 1) < 0.03


def test_kriging_interpolates_and_knows_where() -> None:
    X = generator(2, "x").uniform(12, 2).numpy()
    y = 3 + np.sin(3 * X[:, 0]) + X[:, 1]
    model = Dace(X, y, np.full(2, 5.0))
    mean, deviation = model.moments(X)
    np.testing.assert_allclose(mean, y, atol=1e-6)
    assert deviation.max() < 1e-3 < model.moments(np.array([[2.0, -1.0]]))[1][0]


def test_a_trust_region_grows_and_shrinks() -> None:
    region = TrustRegion()
    for _ in range(3):
        region.told(0.0, 1.0, 10)
    assert region.length == 1.6
    for _ in range(10):
        region.told(1.0, 0.0, 10)
    assert region.length == 0.8


# ------------------------------------------------------------------ end to end


def test_smoke(tmp_path: Path) -> None:
    found = smoke(tmp_path)
    assert set(found["methods"]) == set(transfer.SMOKE_METHODS)
    assert found["seeds"] == 2
    lines = Ledger("smoke", "solo", tmp_path).path.read_text().splitlines()
    assert json.loads(lines[0])["task"] == "bowls"
    assert smoke(tmp_path) == found
    assert transfer.figure("smoke", tmp_path).exists()


# ------------------------------------------------------------------ ablations


def test_the_full_ablation_is_what_fts_does() -> None:
    task = replace(make("kernel-ridge-diabetes", 0, suite="tuning"), queries=4)
    starts = dealt_starts(task, 0)
    full = ABLATIONS["full"](task, 0, starts, None)
    shipped = transfer.run_study(transfer.STUDIES["fts"](task, 0, starts), task, 0, starts)
    for site in task.sites:
        assert torch.equal(full.X[site], shipped.X[site])


@pytest.mark.parametrize("name", sorted(ABLATIONS))
def test_every_ablation_runs(name: str) -> None:
    task = replace(make("kernel-ridge-diabetes", 0, suite="tuning"), queries=2)
    trace = ABLATIONS[name](task, 0, dealt_starts(task, 0), None)
    for site in task.sites:
        assert len(torch.unique(trace.X[site], dim=0)) == 5
