"""Activity recognition, on the real data where they are, and on made-up subjects everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from sklearn.model_selection import train_test_split
from torch import Tensor

from benchmarks.problems import ActivityRecognition
from botorch_fed.rng import generator
from test.cases import uniform

FOLDER = os.environ.get("BOTORCH_FED_DATA")
needs_data = pytest.mark.skipif(FOLDER is None, reason="BOTORCH_FED_DATA names no data folder")


def _made_up() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(3), 50)  # three subjects of 50 rows
    X = rng.normal(size=(3, 8))[y] + 1.5 * rng.normal(size=(150, 8))
    X[:, 7] = 1.0  # a feature without variance
    return X, y.astype(np.int8), np.repeat([4, 5, 9], 50).astype(np.int8)


def _save(folder: Path, X: np.ndarray, y: np.ndarray, subject: np.ndarray) -> Path:
    np.savez(folder / "har.npz", X=X, y=y, subject=subject)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _save(tmp_path, *_made_up())


def test_is_a_federated_problem(folder: Path) -> None:
    problem = ActivityRecognition(data=folder)
    assert repr(problem) == "ActivityRecognition(agents=3, dim=3)"
    assert problem.space.names == ("batch_size", "l2", "learning_rate")
    X = uniform(2, 20, 3)
    values = problem[1](X)
    assert values.shape == (2, 20)
    assert bool(((values >= 0) & (values <= 1)).all())
    assert torch.equal(values, problem[1](X))
    assert not torch.equal(values, problem[0](X))
    assert problem.evaluate(0, X[0, :0]).shape == (0,)
    with pytest.raises(NotImplementedError, match="does not define its optima"):
        _ = problem[0].optimal_value
    with pytest.raises(InputDataError, match="20 of 20 points lie outside"):
        problem.evaluate(0, X[0] + 1)


@pytest.mark.parametrize(
    ("ranges", "lower", "upper"),
    [
        ("fts", (20, 1e-6, 0.01), (60, 1.0, 0.1)),
        ("dp-fts-de", (128, 1e-6, 1e-6), (512, 10.0, 1.0)),
    ],
)
def test_ranges_of_the_papers(
    folder: Path, ranges: Any, lower: tuple[float, ...], upper: tuple[float, ...]
) -> None:
    for scale in ("linear", "log"):
        problem = ActivityRecognition(ranges=ranges, scale=scale, data=folder)  # type: ignore[arg-type]
        corners = problem.space.from_unit(problem.bounds)
        assert [tuple(corner.values()) for corner in corners] == [lower, upper]
        middle = problem.space.from_unit(torch.full((1, 3), 0.5).double())[0]
        assert middle["batch_size"] == (lower[0] + upper[0]) / 2
        expected = (lower[1] + upper[1]) / 2 if scale == "linear" else (lower[1] * upper[1]) ** 0.5
        assert middle["l2"] == pytest.approx(expected)


@pytest.mark.parametrize("ranges", ["fts", "dp-fts-de"])
def test_a_point_does_not_depend_on_the_others(folder: Path, ranges: Any) -> None:
    problem = ActivityRecognition(ranges=ranges, data=folder)
    X = uniform(60, 3)
    together = problem._logits(2, X)
    assert bool(torch.isfinite(together).all())
    alone = torch.cat([problem._logits(2, x.unsqueeze(0)) for x in X])
    assert torch.equal(together, alone)
    assert torch.equal(problem._logits(2, X.flip(0)).flip(0), together)


def _reference(size: int, l2: float, rate: float, *, epochs: int, average: bool) -> Tensor:
    """Logits of the made-up subject 5 by weights in feature space, row by row."""
    X, y, subject = _made_up()
    mine = subject == 5
    train, test, labels, _ = train_test_split(
        X[mine], y[mine], test_size=0.5, stratify=y[mine], random_state=0
    )
    spread = np.where(train.std(axis=0) == 0, 1, train.std(axis=0))
    A, B = ((part - train.mean(axis=0)) / spread for part in (train, test))
    keys = generator(0, "batches", 5).uniform(epochs, 50)[:, :25]
    stream = [int(row) for row in keys.argsort(dim=-1).flatten()]
    W, bias, iterates = np.zeros((8, 3)), np.zeros(3), []
    while len(stream) >= size:
        rows, stream = stream[:size], stream[size:]
        slope, slope_bias = np.zeros((8, 3)), np.zeros(3)
        for row in rows:
            odds = np.exp(A[row] @ W + bias)
            error = odds / odds.sum() - np.eye(3)[labels[row]]
            slope += np.outer(A[row], error) / size
            slope_bias += error / size
        W, bias = (W - rate * slope) / (1 + rate * l2), bias - rate * slope_bias
        iterates.append(B @ W + bias)
    kept = iterates[len(iterates) // 2 :] if average else iterates[-1:]
    return torch.from_numpy(np.mean(kept, axis=0))


@pytest.mark.parametrize("iterate", ["average", "last"])
@pytest.mark.parametrize("size", [20, 23, 25, 60])
def test_training_is_that_of_the_docstring(folder: Path, iterate: Any, size: int) -> None:
    problem = ActivityRecognition(iterate=iterate, epochs=4, data=folder)
    point = {"batch_size": size, "l2": 0.3, "learning_rate": 0.05}
    got = problem._logits(1, problem.space.to_unit([point]))[0]
    # A batch never exceeds the 25 rows of the training half.
    expected = _reference(min(size, 25), 0.3, 0.05, epochs=4, average=iterate == "average")
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_standardised_on_the_training_half_only(tmp_path: Path) -> None:
    X, y, subject = _made_up()
    before = ActivityRecognition(data=_save(tmp_path, X, y, subject))
    mine = np.flatnonzero(subject == 4)
    _, held_out = train_test_split(mine, test_size=0.5, stratify=y[mine], random_state=0)
    X[held_out] = 100 * X[held_out] + 7
    after = ActivityRecognition(data=_save(tmp_path, X, y, subject))
    assert torch.equal(after._subjects[0].gram, before._subjects[0].gram)
    assert not torch.equal(after._subjects[0].cross, before._subjects[0].cross)


def test_seed_orders_the_batches(folder: Path) -> None:
    X = uniform(10, 3)
    zero, same, other = (ActivityRecognition(seed=seed, data=folder) for seed in (0, 0, 1))
    assert torch.equal(zero._logits(0, X), same._logits(0, X))
    assert not torch.equal(zero._logits(0, X), other._logits(0, X))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ranges": "fbo"}, UnsupportedError, '"fts" or "dp-fts-de", got \'fbo\''),
        ({"iterate": "best"}, UnsupportedError, '"average" or "last"'),
        ({"epochs": 0}, InputDataError, "at least 1 epoch, got 0"),
    ],
)
def test_bad_arguments(
    folder: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ActivityRecognition(data=folder, **options)


def test_missing_data_say_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BOTORCH_FED_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"har.npz.*UCI.*240.*set BOTORCH_FED_DATA"):
        ActivityRecognition()
    with pytest.raises(FileNotFoundError, match=r"There is no .*har.npz"):
        ActivityRecognition(data=tmp_path)


@needs_data
def test_real_subjects() -> None:
    problem = ActivityRecognition(data=FOLDER)
    assert len(problem) == 30
    sizes = [len(s.gram) + len(s.validation) for s in problem._subjects]
    assert (min(sizes), max(sizes), sum(sizes)) == (281, 409, 10299)
    assert all(s.labels.shape[-1] == 6 for s in problem._subjects)
    X = uniform(40, 3)
    together = problem._logits(3, X)
    alone = torch.cat([problem._logits(3, x.unsqueeze(0)) for x in X[:10]])
    assert torch.equal(together[:10], alone)
    values = torch.stack([agent(X) for agent in problem])
    assert float(values.median()) > 0.95  # activities of one person are easily told apart
    assert bool((values.std(dim=-1) > 0).all())


@needs_data
def test_wide_ranges_stay_finite_and_spread() -> None:
    problem = ActivityRecognition(ranges="dp-fts-de", data=FOLDER)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 3)
    assert bool(torch.isfinite(problem._logits(0, corners)).all())
    assert float(problem[0](uniform(40, 3)).std()) > 0.05
