"""The classification tasks: who gets which rows, what is imputed from what, and the score."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.test_functions.base import BaseTestProblem
from numpy.typing import NDArray
from sklearn.impute import SimpleImputer
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from benchmarks.problems.risk import (
    NORMAL,
    CreditDefault,
    DiabetesHealth,
    SupportMortality,
    _RiskTuning,
    _standardized,
    _support_columns,
)
from botorch_fed.test_functions.sklearn_tuning import FLOOR
from test.cases import uniform

FOLDER = os.environ.get("BOTORCH_FED_DATA")
FILES = ("credit_default.npz", "diabetes_health.npz", "support2.npz")
HERE = FOLDER is not None and all((Path(FOLDER) / file).is_file() for file in FILES)
needs_data = pytest.mark.skipif(not HERE, reason=f"BOTORCH_FED_DATA lacks one of {FILES}")

TASKS: list[Callable[..., _RiskTuning]] = [CreditDefault, DiabetesHealth, SupportMortality]
SCORES = ["accuracy", "balanced_accuracy", "auc"]
COLUMNS = [
    "age",
    "death",
    "sex",
    "hospdead",
    "slos",
    "d.time",
    "dzgroup",
    "dzclass",
    "num.co",
    "edu",
    "income",
    "scoma",
    "charges",
    "totcst",
    "totmcst",
    "avtisst",
    "race",
    "sps",
    "aps",
    "surv2m",
    "surv6m",
    "hday",
    "diabetes",
    "dementia",
    "ca",
    "prg2m",
    "prg6m",
    "dnr",
    "dnrday",
    "meanbp",
    "wblc",
    "hrt",
    "resp",
    "temp",
    "pafi",
    "alb",
    "bili",
    "crea",
    "sod",
    "ph",
    "glucose",
    "bun",
    "urine",
    "adlp",
    "adls",
    "sfdm2",
    "adlsc",
]
LEVELS = {"dzgroup": 8, "dzclass": 4, "race": 5}
POINT = {"C": 3.0, "gamma": 0.02, "positive_weight": 2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small made-up tables of the files' names and columns."""
    place = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)

    def classes(X: NDArray[np.float64], cut: float) -> NDArray[np.int8]:
        return (X[:, 0] + 0.5 * X[:, 1] ** 2 + rng.normal(size=len(X)) > cut).astype(np.int8)

    X = rng.normal(size=(1500, 23))
    np.savez(place / "credit_default.npz", X=np.rint(X * 1000).astype(np.int32), y=classes(X, 1.7))
    X = rng.normal(size=(1500, 21))
    few, half = classes(X, 2.3), classes(X, 0.4)
    scaled = np.clip(20 * X + 100, 0, 255).astype(np.uint8)
    np.savez(
        place / "diabetes_health.npz",
        X=scaled,
        y=few,
        X_balanced=scaled[:1400],
        y_balanced=half[:1400],
    )
    X = rng.normal(size=(1500, 47))
    y = classes(X, 1.7)
    X[:, COLUMNS.index("hospdead")] = y
    for name, count in LEVELS.items():
        X[:, COLUMNS.index(name)] = rng.integers(count, size=1500)
    for name in (*NORMAL, "edu", "glucose", "adlp", "race"):
        X[rng.uniform(size=1500) < 0.3, COLUMNS.index(name)] = np.nan
    levels = {f"levels_{name}": np.array(["x"] * count) for name, count in LEVELS.items()}
    np.savez(
        place / "support2.npz", X=X.astype(np.float32), y=y, columns=np.array(COLUMNS), **levels
    )
    return place


def _small(task: Callable[..., _RiskTuning], folder: Path, **options: Any) -> _RiskTuning:
    settings: dict[str, Any] = {"num_agents": 3, "rows_per_agent": 120, "data": folder}
    return task(**settings | options)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("score", SCORES)
def test_is_a_problem_to_be_minimised(task: Any, score: str, folder: Path) -> None:
    problem = _small(task, folder, score=score)
    assert repr(problem) == f"{task.__name__}(agents=3, dim=3)"
    assert problem.space.names == ("C", "gamma", "positive_weight")
    assert problem.space.outcome.minimize
    assert all(parameter.scale == "log" for parameter in problem.space.parameters)
    X = uniform(2, 3, 3)
    for agent in problem:
        assert isinstance(agent, BaseTestProblem)
        assert agent.is_minimization_problem
        values = agent(X)
        assert values.shape == (2, 3)
        assert values.dtype == torch.float64
        assert bool(((values >= 0) & (values <= 1)).all())
        assert torch.equal(values, agent(X))  # deterministic
        assert torch.equal(values[1, 2:], agent(X[1, 2:]))
    assert not torch.equal(problem[0](X), problem[1](X))
    assert problem.evaluate(0, X[0, :0]).shape == (0,)
    with pytest.raises(NotImplementedError, match="does not define its optima"):
        _ = problem[0].optimal_value
    with pytest.raises(InputDataError, match=r"3 of 3 points lie outside"):
        problem.evaluate(0, X[0] + 1)


@pytest.mark.parametrize("task", TASKS)
def test_score_is_that_of_a_standardised_machine(task: Any, folder: Path) -> None:
    values = {}
    for score in SCORES:
        problem = _small(task, folder, score=score)
        values[score] = float(problem[1](problem.space.to_unit([POINT])))
    train_X, train_y, test_X, test_y = problem._halves[1]
    np.testing.assert_allclose(train_X.mean(axis=0), 0, atol=1e-12)
    spread = train_X.std(axis=0)
    assert bool((np.isclose(spread, 1) | (spread == 0)).all())
    machine = SVC(C=3.0, gamma=0.02, tol=1e-4, class_weight={0: 1, 1: 2}).fit(train_X, train_y)
    assert values["accuracy"] == pytest.approx(1 - machine.score(test_X, test_y), abs=1e-12)
    balanced = balanced_accuracy_score(test_y, machine.predict(test_X))
    assert values["balanced_accuracy"] == pytest.approx(1 - balanced, abs=1e-12)
    area = roc_auc_score(test_y, machine.decision_function(test_X))
    assert values["auc"] == pytest.approx(1 - area, abs=1e-12)


def test_rows_are_dealt_once_and_halved_by_class(folder: Path) -> None:
    X = np.arange(1500.0)[:, None]  # a row's number is its only column
    y = (np.arange(1500) % 4 == 0).astype(np.intp)

    def problem(**options: Any) -> _RiskTuning:
        settings: dict[str, Any] = {
            "num_agents": 5,
            "score": "accuracy",
            "outcomes": _small(CreditDefault, folder).space.outcome,
            "rows_per_agent": 200,
            "concentration": 10.0,
            "seed": 0,
        }
        settings |= options
        settings["outcomes"] = {"accuracy": settings["outcomes"]}
        return _RiskTuning(X, y, **settings)

    first = problem()
    sizes = []
    for train_X, train_y, test_X, test_y in first._halves:
        assert abs(len(train_y) - len(test_y)) <= 1
        assert abs(train_y.mean() - test_y.mean()) < 0.05
        assert abs(train_y.mean() - 0.25) < 0.05  # sizes are skewed, classes are not
        assert len(np.unique(np.concatenate([train_X, test_X]))) == len(train_y) + len(test_y)
        sizes.append(len(train_y) + len(test_y))
    assert sum(sizes) == 1000
    assert min(sizes) >= FLOOR
    assert max(sizes) > min(sizes)

    def ratio(concentration: float) -> float:
        halves = problem(concentration=concentration)._halves
        sizes = [len(h[1]) + len(h[3]) for h in halves]
        return max(sizes) / min(sizes)

    assert ratio(0.3) > ratio(10.0) > ratio(1e4)
    assert all(
        np.array_equal(a, b) for a, b in zip(first._halves[2], problem()._halves[2], strict=True)
    )
    assert not np.array_equal(first._halves[2][0], problem(seed=1)._halves[2][0])
    assert sum(len(h[1]) + len(h[3]) for h in problem(num_agents=7)._halves) == 1400


def test_majority(folder: Path) -> None:
    problem = _small(CreditDefault, folder)
    never = problem.space.to_unit([{"C": 1.0, "gamma": 1e-4, "positive_weight": 10**-0.5}])
    for n, agent in enumerate(problem):
        assert problem.majority_error(n) == pytest.approx(problem._halves[n][3].mean())
        assert float(agent(never)) == pytest.approx(problem.majority_error(n))
    assert _small(CreditDefault, folder, score="auc").majority_error(0) == 0.5


def test_imputation_sees_the_training_half_alone() -> None:
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(30, 6)), rng.normal(size=(20, 6))
    train[rng.uniform(size=train.shape) < 0.3] = np.nan
    test[rng.uniform(size=test.shape) < 0.3] = np.nan
    pipeline = make_pipeline(SimpleImputer(strategy="median"), StandardScaler()).fit(train)
    A, B = _standardized(train, test)
    np.testing.assert_allclose(A, pipeline.transform(train), atol=1e-12)
    np.testing.assert_allclose(B, pipeline.transform(test), atol=1e-12)
    train[:, 2] = np.nan  # never measured here
    train[:, 3] = 7.0  # and constant here
    A, B = _standardized(train, test)
    assert bool(np.isfinite(A).all() and np.isfinite(B).all())
    assert bool((A[:, 2:4] == 0).all())


def test_support_uses_no_outcome() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 47))
    for name, count in LEVELS.items():
        X[:, COLUMNS.index(name)] = rng.integers(count, size=40)
    X[3, COLUMNS.index("race")] = np.nan
    X[4, COLUMNS.index("bili")] = np.nan
    X[5, COLUMNS.index("glucose")] = np.nan
    used = _support_columns(X, COLUMNS, LEVELS)
    assert used.shape == (40, 25 + 8 + 4 + 5)
    forbidden = [
        "death",
        "hospdead",
        "slos",
        "d.time",
        "sfdm2",
        "charges",
        "totcst",
        "totmcst",
        "avtisst",
        "dnr",
        "dnrday",
        "surv2m",
        "surv6m",
        "prg2m",
        "prg6m",
        "aps",
        "sps",
        "adlp",
        "adls",
    ]
    for name in COLUMNS:
        other = X.copy()
        other[:, COLUMNS.index(name)] = rng.permutation(other[:, COLUMNS.index(name)] + 1)
        same = np.array_equal(used, _support_columns(other, COLUMNS, LEVELS), equal_nan=True)
        assert same == (name in forbidden)
    assert np.isnan(used).sum() == 1  # glucose: left to the agent
    assert 1.01 in used[4]
    ones = used[:, [set(column) <= {0.0, 1.0} for column in used.T]]
    assert ones[3].sum() == 2  # dzgroup and dzclass; race is missing
    assert ones[0].sum() == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"score": "error"}, UnsupportedError, r"one of \['accuracy', .*'auc'\], got 'error'"),
        ({"num_agents": 0}, InputDataError, "at least 1 agent and 1 row, got 0 and 120"),
        ({"rows_per_agent": 0}, InputDataError, "at least 1 agent and 1 row, got 3 and 0"),
        ({"rows_per_agent": 900}, InputDataError, "need 2700 rows, the table has 1[45]00: lower"),
        ({"concentration": 0.0}, InputDataError, "at least 0.01, got 0"),
        ({"concentration": math.inf}, InputDataError, "concentration must be finite"),
        ({"rows_per_agent": 10}, InputDataError, "cannot each have 20 of 30 rows"),
    ],
)
@pytest.mark.parametrize("task", TASKS)
def test_bad_arguments(
    task: Any, folder: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _small(task, folder, **options)


def test_tables_of_diabetes(folder: Path) -> None:
    balanced, full = (_small(DiabetesHealth, folder, table=t) for t in ("balanced", "full"))
    assert np.mean(balanced._halves[0][1]) > np.mean(full._halves[0][1]) + 0.1
    assert balanced.space.fingerprint != full.space.fingerprint
    with pytest.raises(UnsupportedError, match='"balanced" or "full", got \'half\''):
        _small(DiabetesHealth, folder, table="half")


@pytest.mark.parametrize(
    ("task", "origin"),
    [
        (CreditDefault, "Credit Card.*data set 350"),
        (DiabetesHealth, "Diabetes.*data set 891"),
        (SupportMortality, "SUPPORT2.*data set 880"),
    ],
)
def test_missing_data_say_where_they_come_from(
    task: Any, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BOTORCH_FED_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=f"{origin}.*set BOTORCH_FED_DATA"):
        task()


# ------------------------------------------------------------------ the real data


@needs_data
@pytest.mark.parametrize(
    ("task", "options", "agents", "columns", "positive"),
    [
        (CreditDefault, {}, 30, 23, 0.22),
        (DiabetesHealth, {}, 30, 21, 0.50),
        (DiabetesHealth, {"num_agents": 10}, 10, 21, 0.50),
        (DiabetesHealth, {"num_agents": 20, "table": "full"}, 20, 21, 0.14),
        (SupportMortality, {}, 9, 42, 0.26),
        (SupportMortality, {"num_agents": 3}, 3, 42, 0.26),
        (SupportMortality, {"num_agents": 6}, 6, 42, 0.26),
    ],
)
def test_real_tables(
    task: Any, options: dict[str, Any], agents: int, columns: int, positive: float
) -> None:
    problem = task(data=FOLDER, **options)
    assert len(problem) == agents
    labels = np.concatenate([np.concatenate([h[1], h[3]]) for h in problem._halves])
    assert len(labels) == 400 * agents
    assert labels.mean() == pytest.approx(positive, abs=0.04)
    assert {half.shape[1] for h in problem._halves for half in (h[0], h[2])} == {columns}
    # A sensible machine does better than always saying no, and no machine is near perfect.
    X = problem.space.to_unit([{"C": 5.0, "gamma": 0.005, "positive_weight": 1.0}])
    errors = np.array([float(problem.evaluate(n, X)) for n in range(agents)])
    majority = np.mean([problem.majority_error(n) for n in range(agents)])
    assert errors.mean() < majority + 0.01
    assert errors.mean() > 0.1


@needs_data
@pytest.mark.parametrize("task", TASKS)
def test_every_parameter_matters(task: Any) -> None:
    """Mirroring one coordinate moves the typical error by at least two validation rows.

    The median, because a standard deviation is mostly the corner where all are predicted positive.
    """
    problem = task(data=FOLDER)
    X = uniform(24, 3)
    for column in range(3):
        moved = X.clone()
        moved[:, column] = 1 - moved[:, column]
        rows = [
            (problem.evaluate(n, moved) - problem.evaluate(n, X)).abs() * len(problem._halves[n][3])
            for n in range(4)
        ]
        assert float(torch.cat(rows).median()) >= 2
