"""Bundled data dealt to agents: who gets what, and the score."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from sklearn.metrics import roc_auc_score
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from botorch_fed.test_functions import NetworkTuning, SklearnTuning
from botorch_fed.test_functions.sklearn_tuning import FLOOR
from test.cases import uniform

ROWS = {"breast_cancer": 569, "digits": 1797, "wine": 178}


def _rows(problem: SklearnTuning, agent: int, split: int = 0) -> np.ndarray:
    return np.concatenate(problem._halves[agent][split])


@pytest.mark.parametrize("skew", ["none", "size", "label"])
@pytest.mark.parametrize("dataset", list(ROWS))
def test_every_row_has_one_owner_and_every_half_all_classes(dataset: Any, skew: Any) -> None:
    problem = SklearnTuning(8, dataset=dataset, skew=skew, concentration=0.1)
    assert len(problem) == 8
    for split in range(3):
        owned = np.concatenate([_rows(problem, agent, split) for agent in range(8)])
        assert np.array_equal(np.sort(owned), np.arange(ROWS[dataset]))
    classes = set(problem._y.tolist())
    for agent in range(8):
        assert len(_rows(problem, agent)) >= FLOOR
        for halves in problem._halves[agent]:
            for half in halves:
                assert set(problem._y[half].tolist()) == classes


def test_skew() -> None:
    def shares(skew: Any, concentration: float) -> tuple[float, float]:
        """Ratio of the largest to the smallest agent; spread of the first class's share."""
        problem = SklearnTuning(8, skew=skew, concentration=concentration)
        rows = [_rows(problem, agent) for agent in range(8)]
        first = [float((problem._y[r] == 0).mean()) for r in rows]
        sizes = [len(r) for r in rows]
        return max(sizes) / min(sizes), max(first) - min(first)

    assert shares("none", 1.0)[0] < 1.1
    assert shares("none", 1.0)[1] < 0.02
    assert shares("size", 1.0)[0] > 2
    assert shares("size", 1.0)[1] < 0.05  # the classes' proportions stay
    assert shares("label", 1.0)[1] > 0.2
    assert shares("size", 0.1)[0] > shares("size", 1.0)[0] > shares("size", 100.0)[0]


def test_seeds() -> None:
    rows = [_rows(SklearnTuning(8, seed=seed), 0) for seed in (0, 0, 1)]
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("dataset", list(ROWS))
def test_values(dataset: Any) -> None:
    problem = SklearnTuning(dataset=dataset)
    assert repr(problem) == "SklearnTuning(agents=8, dim=2)"
    X = uniform(12, 2)
    values = problem[1](X)
    assert values.shape == (12,)
    assert bool(((values >= 0) & (values <= 1)).all())
    assert float(values.std()) > 0.01
    assert torch.equal(values, problem[1](X))
    assert torch.equal(values[3:4], problem[1](X[3:4]))
    assert not torch.equal(values, problem[2](X))
    assert problem.evaluate(0, X[:0]).shape == (0,)
    with pytest.raises(NotImplementedError, match="does not define its optima"):
        _ = problem[0].optimal_value


@pytest.mark.parametrize("dataset", ["breast_cancer", "wine"])
def test_score_is_that_of_a_standardised_machine(dataset: Any) -> None:
    problem = SklearnTuning(dataset=dataset, splits=2)
    expected = []
    for train, test in problem._halves[3]:
        scaler = StandardScaler().fit(problem._X[train])
        A, B = (scaler.transform(problem._X[half]) for half in (train, test))
        machine = SVC(C=2.0, gamma=0.05, tol=1e-6).fit(A, problem._y[train])
        if dataset == "breast_cancer":
            expected.append(roc_auc_score(problem._y[test], machine.decision_function(B)))
        else:
            expected.append(machine.score(B, problem._y[test]))
    value = float(problem[3](problem.space.to_unit([{"C": 2.0, "gamma": 0.05}])))
    assert value == pytest.approx(np.mean(expected), abs=1e-12)


def test_the_default_is_that_of_scikit_learn() -> None:
    problem = SklearnTuning(2, dataset="breast_cancer", skew="none", splits=1)
    (train, test), *_ = problem._halves[0]
    scaler = StandardScaler().fit(problem._X[train])
    machine = SVC(tol=1e-6).fit(scaler.transform(problem._X[train]), problem._y[train])
    decided = machine.decision_function(scaler.transform(problem._X[test]))
    value = problem.evaluate(0, problem.space.to_unit([problem.default]))
    assert float(value) == pytest.approx(roc_auc_score(problem._y[test], decided), abs=1e-9)
    assert SklearnTuning(2, dataset="digits").default == {"C": 1.0, "gamma": 1 / 61}


@pytest.mark.parametrize("dataset", ["digits", "breast_cancer"])
def test_the_score_of_a_network_is_that_of_scikit_learn_with_so_many_epochs(dataset: Any) -> None:
    problem = NetworkTuning(4, dataset=dataset, splits=1, epochs=3)
    (train, test), *_ = problem._halves[1]
    scaler = StandardScaler().fit(problem._X[train])
    A, B = (scaler.transform(problem._X[half]) for half in (train, test))
    with pytest.warns(UserWarning, match="Maximum iterations"):  # ours is silent
        machine = MLPClassifier(
            (9,), learning_rate_init=0.01, alpha=0.1, batch_size=16, max_iter=3, random_state=0
        ).fit(A, problem._y[train])
    expected = machine.score(B, problem._y[test])
    if dataset == "breast_cancer":
        expected = roc_auc_score(problem._y[test], machine.predict_proba(B)[:, 1])
    point = {"learning_rate": 0.01, "alpha": 0.1, "hidden": 9, "batch_size": 16}
    X = problem.space.to_unit([point])
    assert float(problem.evaluate(1, X)) == pytest.approx(expected, abs=1e-9)
    assert torch.equal(problem.evaluate(1, X), problem.evaluate(1, X))
    assert set(problem.default) == set(problem.space.names)
    assert bool((problem.space.to_unit([problem.default]) <= 1).all())
    with pytest.raises(InputDataError, match="at least 1 epoch, got 0"):
        NetworkTuning(epochs=0)
    with pytest.raises(UnsupportedError, match='"adam" or "sgd", got \'lbfgs\''):
        NetworkTuning(solver="lbfgs")  # type: ignore[arg-type]


def test_a_network_that_diverges_says_the_most_common_class() -> None:
    problem = NetworkTuning(4, splits=1, epochs=20, solver="sgd")
    assert problem.space.names[-1] == "momentum"
    good = {**problem.default, "learning_rate": 0.1, "batch_size": 16}
    bad = {**good, "learning_rate": 10.0, "momentum": 0.99, "batch_size": 8, "alpha": 10.0}
    score, guess = problem.evaluate(0, problem.space.to_unit([good, bad])).tolist()
    _, test = problem._halves[0][0]
    counts = np.bincount(problem._y[test]) / len(test)
    assert guess == pytest.approx(counts.max(), abs=1e-9)
    assert score > guess + 0.1


def test_pooled_trains_on_everybody_and_validates_on_the_agent() -> None:
    problem = SklearnTuning(5, splits=2)
    pooled = problem.pooled()
    assert len(pooled) == 5
    assert pooled.space is problem.space
    for split in range(2):
        everybody = np.concatenate([problem._halves[n][split][0] for n in range(5)])
        for agent in range(5):
            train, test = pooled._halves[agent][split]
            assert np.array_equal(np.sort(train), np.sort(everybody))
            assert np.array_equal(test, problem._halves[agent][split][1])
            assert not set(train.tolist()) & set(test.tolist())
    assert len(problem._halves[0][0][0]) < len(everybody)  # the original is untouched
    X = problem.space.to_unit([{"C": 10.0, "gamma": 0.01}])
    own, together = (torch.stack([a(X) for a in p]).mean() for p in (problem, pooled))
    assert float(together) > float(own) - 0.01
    alone = SklearnTuning(1, splits=2)
    assert torch.equal(alone.pooled()[0](X), alone[0](X))


def test_scales() -> None:
    linear, log = SklearnTuning(scale="linear"), SklearnTuning()
    point = [{"C": 10.0, "gamma": 0.1}]
    assert linear[0](linear.space.to_unit(point)) == log[0](log.space.to_unit(point))
    assert linear.space.to_unit(point)[0, 0] < log.space.to_unit(point)[0, 0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset": "iris"}, UnsupportedError, "one of .*'digits'.*, got 'iris'"),
        ({"skew": "heavy"}, UnsupportedError, '"none", "size" or "label", got \'heavy\''),
        ({"concentration": 0.0}, InputDataError, "at least 0.01, got 0"),
        ({"concentration": math.inf}, InputDataError, "concentration must be finite"),
        ({"splits": 0}, InputDataError, "at least 1 agent and 1 split, got 8 and 0"),
        ({"num_agents": 9, "dataset": "wine"}, InputDataError, "take at most 8"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SklearnTuning(**options)
