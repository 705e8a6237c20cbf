"""The tasks of the transfer suites: tables looked up exactly, ladders and optima as promised."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError

from benchmarks import transfer_tasks
from benchmarks.transfer_builders import LOSS, RECIPES, Recipe, auc, log_loss
from benchmarks.transfer_tasks import (
    CEC,
    HELD_OUT,
    RUNGS,
    SHIFTED,
    TASKS,
    TUNING,
    UNRELATED,
    Task,
    build,
    candidates,
    common,
    describe,
    hostile_site,
    main,
    make,
    peak,
    shared,
    sobol,
    suite,
)
from botorch_fed.protocols.fts import FTS
from botorch_fed.run import run
from botorch_fed.space import Outcome, Parameter

needs_data = pytest.mark.skipif(
    "BOTORCH_FED_DATA" not in os.environ, reason="BOTORCH_FED_DATA is not set"
)
BUILT = [name for name in TUNING if (transfer_tasks.TABLES / f"{name}.npz").exists()]


def regret(task: Task, site: str, Y: torch.Tensor) -> torch.Tensor:
    best, median = task.scale(site)
    return (best - task.space.outcome.to_public(Y)) / (best - median)


def test_every_tuning_table_is_there_and_small() -> None:
    assert len(TUNING) == 8
    assert tuple(BUILT) == TUNING
    tables = list(transfer_tasks.TABLES.glob("*.npz"))
    assert sum(path.stat().st_size for path in tables) < 1.5e6


def test_held_out_tasks_are_named_and_kept_apart() -> None:
    assert HELD_OUT == ("boosting-har", "mlp-support2")
    assert TASKS["fresh"] == HELD_OUT
    assert all(not set(HELD_OUT) & set(TASKS[key]) for key in TASKS if key != "fresh")


@pytest.mark.parametrize("name", BUILT)
class TestTables:
    def test_shapes(self, name: str) -> None:
        task, recipe = make(name, 0), RECIPES[name]
        assert task.candidates is not None
        assert task.values is not None
        assert task.space == recipe.space
        assert task.space.outcome in (Outcome(), Outcome(minimize=True))
        assert task.sites == tuple(f"agent{n}" for n in range(recipe.sites))
        assert 4 <= len(task.sites) <= 16
        assert 4 <= len(task.space.parameters) <= 8
        K, d = task.candidates.shape
        assert 950 <= K <= 1024
        assert d == task.space.dim
        assert all(task.values[site].shape == (K,) for site in task.sites)
        assert (task.suite, task.starts, task.queries) == ("tuning", 3, 20)
        assert task.honest == task.sites

    def test_candidates_are_different_and_can_be_evaluated(self, name: str) -> None:
        X = make(name, 0).candidates
        assert X is not None
        assert len(X.unique(dim=0)) == len(X)
        assert ((X >= 0) & (X <= 1)).all()
        # Logarithms may round otherwise on another machine.
        torch.testing.assert_close(make(name, 0).space.snap(X), X, rtol=0, atol=1e-12)

    def test_the_default_is_a_candidate(self, name: str) -> None:
        task = make(name, 0)
        assert task.candidates is not None
        assert (task.candidates == task.default).all(dim=-1).sum() == 1
        (point,) = task.space.from_unit(task.default)
        assert point == pytest.approx(dict(RECIPES[name].default), rel=1e-9)

    def test_lookups_are_exact(self, name: str) -> None:
        task = make(name, 0)
        assert task.candidates is not None
        assert task.values is not None
        order = torch.randperm(len(task.candidates))
        for site in task.sites:
            Y = task.evaluate(site, task.candidates[order])
            assert torch.equal(Y, task.values[site][order].unsqueeze(-1))
        again = task.space.snap(task.candidates[:5])  # a last bit may differ
        assert torch.equal(
            task.evaluate(task.sites[0], again), task.evaluate(task.sites[0], task.candidates[:5])
        )

    def test_other_points_are_refused(self, name: str) -> None:
        task = make(name, 0)
        with pytest.raises(InputDataError, match="at its candidates only"):
            task.evaluate(task.sites[0], torch.full((1, task.space.dim), 0.123456789))

    def test_scale_is_the_best_and_the_middle(self, name: str) -> None:
        task = make(name, 0)
        assert task.candidates is not None
        for site in task.sites:
            values = regret(task, site, task.evaluate(site, task.candidates))
            assert values.min() == 0
            assert (values <= 1).double().mean() == pytest.approx(0.5, abs=0.1)  # ties

    def test_values_are_fine_grained(self, name: str) -> None:
        assert describe(name)["distinct"] > 400

    def test_the_seed_changes_nothing_but_the_newcomer(self, name: str) -> None:
        one, other = make(name, 0), make(name, 7)
        assert one.values is not None
        assert other.values is not None
        assert all(torch.equal(one.values[site], other.values[site]) for site in one.sites)
        late = [make(name, seed, suite="late") for seed in range(12)]
        assert all((task.suite, task.starts) == ("late", 0) for task in late)
        assert len({task.newcomer for task in late}) > 1
        assert {task.newcomer for task in late} <= set(one.sites)
        assert one.newcomer is None


class TestLadder:
    @pytest.mark.parametrize("name", RUNGS)
    def test_scale_and_interior(self, name: str) -> None:
        task = make(name, 0)
        assert task.functions is not None
        assert (len(task.sites), task.space.dim) == (8, 4)
        assert (task.starts, task.queries, task.candidates) == (3, 20, None)
        X = torch.rand(2000, 4, dtype=torch.float64)
        for site in task.honest:
            values = regret(task, site, task.evaluate(site, X))
            assert values.min() > -1e-6
            assert float(values.median()) == pytest.approx(1, abs=0.1)
        where, _ = peak(task.functions[task.honest[0]], 4)
        assert ((where > 0) & (where < 1)).all()

    def test_a_seed_fixes_the_functions(self) -> None:
        X = sobol(4)[:10]
        first = shared(0.5, 0, 3)(X)
        shared.cache_clear()
        common.cache_clear()
        assert torch.equal(first, shared(0.5, 0, 3)(X))
        assert not torch.allclose(first, shared(0.5, 1, 3)(X))
        assert not torch.allclose(first, shared(0.5, 0, 4)(X))

    @pytest.mark.parametrize(
        ("name", "low", "high"),
        [("identical", 1, 1), ("share-0.9", 0.75, 1), ("share-0.5", 0.2, 0.9)],
    )
    def test_correlation_of_sites(self, name: str, low: float, high: float) -> None:
        task = make(name, 0)
        Y = torch.cat([task.evaluate(site, sobol(4)) for site in task.sites], dim=-1)
        alike = torch.corrcoef(Y.mT)[np.triu_indices(8, 1)].mean()
        assert low - 1e-9 <= alike <= high + 1e-9

    def test_unrelated_is_unrelated(self) -> None:
        task = make("unrelated", 0)
        Y = torch.cat([task.evaluate(site, sobol(4)) for site in task.sites], dim=-1)
        alike = torch.corrcoef(Y.mT)[np.triu_indices(8, 1)]
        assert abs(float(alike.mean())) < 0.2

    def test_rescaled_is_an_affine_map_of_share(self) -> None:
        plain, task = make("share-0.9", 0), make("rescaled", 0)
        X = sobol(4)[:50]
        stretches = []
        for site in task.sites:
            y, z = plain.evaluate(site, X), task.evaluate(site, X)
            a = float((z[1] - z[0]) / (y[1] - y[0]))
            assert a > 0
            torch.testing.assert_close(z - z[0], a * (y - y[0]), rtol=1e-5, atol=a * 1e-5)
            assert task.noise[site] == pytest.approx(a * plain.noise[site], rel=1e-4)
            torch.testing.assert_close(
                regret(task, site, z), regret(plain, site, y), rtol=1e-4, atol=1e-5
            )
            stretches.append(a)
        assert max(stretches) / min(stretches) > 100

    def test_hostile_is_one_site_upside_down(self) -> None:
        plain, task = make("share-0.9", 0), make("hostile", 0)
        liar = task.sites[hostile_site(0)]
        assert set(task.sites) - set(task.honest) == {liar}
        X = sobol(4)[:200]
        for site in task.honest:
            assert torch.equal(task.evaluate(site, X), plain.evaluate(site, X))
        common = make("identical", 0).evaluate("agent0", X)
        torch.testing.assert_close(task.evaluate(liar, X), -1e4 * common)

    def test_shifted_moves_the_optimum_a_little(self) -> None:
        task = make("shifted", 0)
        assert task.functions is not None
        places = torch.stack([peak(task.functions[site], 4)[0] for site in task.sites[:3]])
        gaps = (places[0] - places[1:]).abs()
        assert (gaps > 0.01).any()
        assert len({task.scale(site)[0] for site in task.sites}) == 8 or gaps.max() <= 0.4 + 1e-4


class TestHigh:
    @pytest.mark.parametrize("name", [*SHIFTED, *UNRELATED])
    def test_scale(self, name: str) -> None:
        task = make(name, 3)
        assert task.space.outcome == Outcome(minimize=True)
        assert (len(task.sites), task.starts, task.queries) == (6, 8, 50)
        X = torch.rand(500, task.space.dim, dtype=torch.float64)
        for site in task.sites:
            values = regret(task, site, task.evaluate(site, X))
            assert values.min() > 0
            assert 0.5 < float(values.median()) < 2

    @pytest.mark.parametrize("name", [*SHIFTED, *UNRELATED])
    def test_the_optimum_is_attained_inside(self, name: str) -> None:
        task = make(name, 3)
        assert task.functions is not None
        for site in task.sites:
            moved = task.functions[site]
            lower, upper = moved.function.bounds.double()  # type: ignore[attr-defined]
            at = moved.function.optimizers.double()  # type: ignore[attr-defined]
            place = (at - lower) / (upper - lower) + moved.shift  # type: ignore[attr-defined]
            assert ((place > 0) & (place < 1)).all()
            low = -task.scale(site)[0]
            assert float(task.evaluate(site, place).min()) == pytest.approx(low, abs=1e-8)

    def test_shifts_belong_to_the_seed_and_the_site(self) -> None:
        X = sobol(10)[:5]
        task = make("shifted-ackley-10", 0)
        assert not torch.allclose(task.evaluate("agent0", X), task.evaluate("agent1", X))
        other = make("shifted-ackley-10", 1)
        assert not torch.allclose(task.evaluate("agent0", X), other.evaluate("agent0", X))

    @needs_data
    @pytest.mark.parametrize("name", list(CEC))
    def test_cec_is_one_function_at_ten_sites(self, name: str) -> None:
        task = make(name, 0)
        assert (len(task.sites), task.starts, task.queries) == (10, 4, 50)
        assert task.space.outcome == Outcome(minimize=True)
        X = sobol(10)[:20]
        assert torch.equal(task.evaluate("agent0", X), task.evaluate("agent9", X))
        assert (regret(task, "agent0", task.evaluate("agent0", X)) > 0).all()


class TestProblem:
    def test_a_run_calls_agents_as_the_task_does(self) -> None:
        task = make("identical", 0)
        result = run(FTS(budget=2), task.problem(), seed=0, progress=False)
        assert result.names == task.sites
        assert result.optimal_values is not None
        for site in task.sites:
            X, Y = result.history(site)
            truth = task.evaluate(site, X)
            assert not torch.equal(Y, truth)
            assert ((Y - truth).abs() < 6 * task.noise[site]).all()
            assert (result.regret(site) >= 0).all()
            assert float(result.best(site)[-1]) == pytest.approx(float(truth.max()), rel=1e-9)

    def test_noise_is_the_sites_own(self) -> None:
        task = make("rescaled", 0)
        problem = task.problem()
        assert [problem[n].noise_std for n in range(8)] == [task.noise[s] for s in task.sites]

    def test_optimal_values_are_as_the_site_measures(self) -> None:
        task = make("boosting-credit", 0)
        assert task.values is not None
        lowest = torch.stack([task.values[site].min() for site in task.sites])
        assert torch.equal(task.problem().optimal_values, lowest)


def test_families() -> None:
    for key, names in TASKS.items():
        assert [(family.name, family.suite) for family in suite(key)] == [(n, key) for n in names]
    assert suite("late")[0].make(3) is make(TUNING[0], 3, suite="late")


@pytest.mark.parametrize(("name", "which"), [("nothing", None), ("identical", "tuning")])
def test_unknown_tasks_are_refused(name: str, which: str | None) -> None:
    with pytest.raises(InputDataError, match="There is no task"):
        make(name, 0, suite=which)


def test_scores() -> None:
    assert auc(np.array([1.0, 2.0, 3.0, 3.0]), np.array([False, True, False, True])) == 0.625
    assert log_loss(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([0, 1])) == pytest.approx(
        (np.log(2) - np.log(1e-6)) / 2
    )


class TestBuild:
    @pytest.fixture
    def calls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        calls: list[int] = []

        def scorer(site: int, x: float, n: int) -> float:
            calls.append(site)
            return x + site * n

        parameters = (Parameter.real("x", 0.1, 10, scale="log"), Parameter.integer("n", 1, 3))
        recipe = Recipe(
            parameters,
            LOSS,
            {"x": 1.0, "n": 2},
            2,
            lambda: [lambda x, n, s=s: scorer(s, x, n) for s in range(2)],  # type: ignore[misc]
        )
        monkeypatch.setitem(RECIPES, "toy", recipe)
        monkeypatch.setattr(transfer_tasks, "TABLES", tmp_path / "tables")
        monkeypatch.setattr(transfer_tasks, "PARTS", tmp_path / "parts")
        monkeypatch.setitem(TASKS, "tuning", ("toy",))
        return calls

    def test_finished_sites_and_tables_are_not_computed_again(
        self, calls: list[int], tmp_path: Path
    ) -> None:
        build("toy")
        points = candidates(RECIPES["toy"])
        assert calls == [0] * len(points) + [1] * len(points)
        (tmp_path / "tables" / "toy.npz").unlink()
        (part,) = (tmp_path / "parts").rglob("toy-1.npy")
        part.unlink()
        calls.clear()
        build("toy")
        build("toy")
        assert calls == [1] * len(points)
        task = transfer_tasks.table_task("toy", 0, "tuning")
        expected = [p["x"] + p["n"] for p in task.space.from_unit(points)]  # type: ignore[operator]
        assert task.evaluate("agent1", points).flatten().tolist() == pytest.approx(expected)

    def test_a_table_of_another_space_is_refused(
        self, calls: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build("toy")
        changed = RECIPES["toy"].parameters[:1]
        monkeypatch.setitem(RECIPES, "toy", Recipe(changed, LOSS, {"x": 1.0}, 2, list))
        with pytest.raises(ValueError, match="another search space"):
            transfer_tasks.load("toy")

    def test_a_missing_table_says_how_to_build_it(self, calls: list[int]) -> None:
        with pytest.raises(FileNotFoundError, match="build toy"):
            transfer_tasks.load("toy")

    def test_describe_prints(self, capsys: pytest.CaptureFixture[str], calls: list[int]) -> None:
        main(["build", "toy"])
        main(["describe", "toy"])
        assert "toy sites=2 parameters=2" in capsys.readouterr().out
        make.cache_clear()
