"""The landmine task, on the real data where they are, and on made-up fields everywhere."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.test_functions.base import BaseTestProblem
from sklearn.svm import SVC

from benchmarks.problems import Landmine
from test.cases import uniform

FOLDER = os.environ.get("BOTORCH_FED_DATA")
needs_data = pytest.mark.skipif(FOLDER is None, reason="BOTORCH_FED_DATA names no data folder")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 9))
    y = (X[:, 0] + 0.3 * rng.normal(size=120) > 1).astype(np.int8)
    np.savez(tmp_path / "landmine.npz", X=X, y=y, field=np.repeat([0, 1, 2], 40))
    return tmp_path


def test_is_a_botorch_problem_per_agent(folder: Path) -> None:
    problem = Landmine(data=folder)
    assert len(problem) == 3
    assert repr(problem) == "Landmine(agents=3, dim=2)"
    assert problem.space.names == ("C", "gamma")
    X = torch.rand(2, 4, 2).double()
    for agent in problem:
        assert isinstance(agent, BaseTestProblem)
        assert torch.equal(agent.bounds, problem.bounds)
        values = agent(X)
        assert values.shape == (2, 4)
        assert bool(((values >= 0) & (values <= 1)).all())
        assert torch.equal(values, agent(X))  # deterministic
    assert not torch.equal(problem[0](X), problem[1](X))
    with pytest.raises(IndexError, match=r"Agents are 0..2, got 3"):
        problem[3]
    with pytest.raises(ValueError, match="bounds"):
        problem[0](X + 1)
    with pytest.raises(InputDataError, match=r"4 of 4 points lie outside .* `space.to_unit`"):
        problem.evaluate(0, X[0] + 1)
    with pytest.raises(InputDataError, match=r"Expected `n x 2` points, got shape \(2, 4, 2\)"):
        problem.evaluate(0, X)
    with pytest.raises(NotImplementedError, match="does not define its optima"):
        _ = problem[0].optimal_value


def test_scales(folder: Path) -> None:
    linear, log = Landmine(data=folder), Landmine(data=folder, scale="log")
    point = [{"C": 1.0, "gamma": 0.1}]
    assert linear[0](linear.space.to_unit(point)) == log[0](log.space.to_unit(point))
    assert linear.space.fingerprint != log.space.fingerprint
    assert log.space.to_unit(point)[0, 0] > linear.space.to_unit(point)[0, 0]


def test_environment_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTORCH_FED_DATA", str(folder))
    assert len(Landmine()) == 3


def test_missing_data_say_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BOTORCH_FED_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"Xue et al.*set BOTORCH_FED_DATA"):
        Landmine()
    with pytest.raises(FileNotFoundError, match=r"There is no .*landmine.npz"):
        Landmine(data=tmp_path)
    np.savez(tmp_path / "landmine.npz", X=np.zeros((2, 9)))
    with pytest.raises(ValueError, match=r"lacks the arrays \['field', 'y'\]"):
        Landmine(data=tmp_path)
    np.savez(tmp_path / "landmine.npz", X=np.array([{}], dtype=object), y=[0], field=[0])
    with pytest.raises(ValueError, match="allow_pickle"):
        Landmine(data=tmp_path)


def test_unknown_score(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="got 'accuracy'"):
        Landmine(data=folder, score="accuracy")  # type: ignore[arg-type]


def test_error_is_one_minus_accuracy_and_to_be_minimised(folder: Path) -> None:
    problem = Landmine(data=folder, score="error")
    assert problem.space.outcome.minimize
    assert not Landmine(data=folder).space.outcome.minimize
    X = uniform(6, 2)
    for agent, (train_X, test_X, train_y, test_y) in enumerate(problem._splits):
        expected = [
            1 - SVC(**point, tol=1e-6).fit(train_X, train_y).score(test_X, test_y)
            for point in problem.space.from_unit(X)
        ]
        assert problem.evaluate(agent, X).tolist() == pytest.approx(expected, abs=1e-12)
        rows = problem.evaluate(agent, X) * len(test_y)
        assert torch.allclose(rows, rows.round())  # whole rows are wrong
    assert len(problem.evaluate(0, uniform(40, 2)).unique()) > 1


@needs_data
def test_real_errors_are_near_those_of_always_saying_no() -> None:
    problem = Landmine(data=FOLDER, score="error")
    errors = torch.stack([problem.evaluate(n, uniform(8, 2)) for n in range(0, 29, 4)])
    constant = torch.tensor([problem._splits[n][3].mean() for n in range(0, 29, 4)])
    assert abs(float(errors.mean()) - problem.space.outcome.centre) < problem.space.outcome.scale
    assert float((errors - constant[:, None]).abs().median()) < 0.01


@needs_data
def test_real_fields() -> None:
    problem = Landmine(data=FOLDER)
    assert len(problem) == 29
    sizes = [len(split[0]) + len(split[1]) for split in problem._splits]
    assert (min(sizes), max(sizes), sum(sizes)) == (445, 690, 14820)
    # Small gamma is where the optima of most fields lie.
    value = float(problem[0](problem.space.to_unit([{"C": 5.0, "gamma": 0.02}])))
    assert value == pytest.approx(0.7883, abs=1e-3)


@needs_data
def test_platt_scores_are_random_and_decision_scores_are_not() -> None:
    X = uniform(8, 2)
    platt = Landmine(data=FOLDER, score="platt", tol=1e-3)
    np.random.seed(0)  # noqa: NPY002 - what libsvm draws from
    spread = torch.stack([platt[20](X) for _ in range(8)]).std(dim=0).mean()  # about 0.05
    decision = Landmine(data=FOLDER)
    assert float(spread) > 0.01
    assert torch.equal(decision[20](X), decision[20](X))
