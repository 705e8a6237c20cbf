"""Writers' digits, on the real data where they are, and on made-up writers everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor, nn

from benchmarks.problems import WriterDigits
from benchmarks.problems import digits as module
from botorch_fed.rng import generator
from test.cases import uniform

FOLDER = os.environ.get("BOTORCH_FED_DATA")
needs_data = pytest.mark.skipif(FOLDER is None, reason="BOTORCH_FED_DATA names no data folder")
NUM_TRAIN, NUM_VAL = 40, 7
POINT = {"learning_rate": 0.01, "decay": 0.015, "l2": 0.008}


def _made_up(num_writers: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = NUM_TRAIN + NUM_VAL
    y = rng.integers(10, size=num_writers * rows).astype(np.int8)
    shapes = rng.random((10, 28, 28)) < 0.2
    X = (255 * shapes[y] * rng.random((len(y), 28, 28))).astype(np.uint8)
    writer = np.repeat(2 + np.arange(num_writers), rows).astype(np.int16)
    return {"X": X, "y": y, "writer": writer, "is_val": np.arange(len(y)) % rows >= NUM_TRAIN}


def _save(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(folder / "mnist_by_writer.npz", **arrays)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _save(tmp_path, _made_up())


@pytest.mark.parametrize("score", ["likelihood", "accuracy"])
def test_is_a_federated_problem(folder: Path, score: Any) -> None:
    problem = WriterDigits(score=score, epochs=4, data=folder)
    assert repr(problem) == "WriterDigits(agents=3, dim=3)"
    assert problem.space.names == ("learning_rate", "decay", "l2")
    X = uniform(2, 6, 3)
    values = problem[1](X)
    assert values.shape == (2, 6)
    assert values.dtype == torch.float64
    assert bool(((values >= 0) & (values <= 1)).all())
    assert torch.equal(values, problem[1](X))
    assert not torch.equal(values, problem[0](X))
    assert problem.evaluate(0, X[0, :0]).shape == (0,)
    with pytest.raises(NotImplementedError, match="does not define its optima"):
        _ = problem[0].optimal_value
    with pytest.raises(InputDataError, match="6 of 6 points lie outside"):
        problem.evaluate(0, X[0] + 1)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_ranges_of_the_paper(folder: Path, scale: Any) -> None:
    space = WriterDigits(scale=scale, data=folder).space
    corners = space.from_unit(space.bounds)
    assert [tuple(corner.values()) for corner in corners] == [(1e-7,) * 3, (0.02,) * 3]
    middle = space.from_unit(torch.full((1, 3), 0.5).double())[0]
    expected = (1e-7 + 0.02) / 2 if scale == "linear" else (1e-7 * 0.02) ** 0.5
    assert tuple(middle.values()) == pytest.approx((expected,) * 3)


def test_scores_of_the_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood, accuracy = (
        WriterDigits(score=score, data=folder)  # type: ignore[arg-type]
        for score in ("likelihood", "accuracy")
    )
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, NUM_VAL, 10)))
    logits[2, 4, 1] = torch.nan  # a network that diverged has no value
    for problem in (likelihood, accuracy):
        monkeypatch.setattr(problem, "_logits", lambda agent, X: logits)
    labels = _made_up()["y"][NUM_TRAIN : NUM_TRAIN + NUM_VAL].astype(int)
    X = uniform(3, 3)
    odds = np.exp(logits.numpy())
    right = (odds / odds.sum(axis=-1, keepdims=True))[:2, np.arange(NUM_VAL), labels]
    expected = [*right.prod(axis=-1) ** (1 / NUM_VAL), 0.0]
    np.testing.assert_allclose(likelihood.evaluate(0, X), expected, rtol=1e-12)
    expected = [*(odds[:2].argmax(axis=-1) == labels).mean(axis=-1), 0.0]
    np.testing.assert_allclose(accuracy.evaluate(0, X), expected, rtol=1e-12)


def test_a_point_does_not_depend_on_the_others(folder: Path) -> None:
    problem = WriterDigits(epochs=3, data=folder)
    X = uniform(21, 3)  # more than one chunk
    together = problem._logits(2, X)
    assert bool(torch.isfinite(together).all())
    alone = torch.cat([problem._logits(2, x.unsqueeze(0)) for x in X])
    assert torch.equal(together, alone)
    assert torch.equal(problem._logits(2, X.flip(0)).flip(0), together)


def test_value_does_not_depend_on_the_callers_context(folder: Path) -> None:
    problem = WriterDigits(epochs=2, data=folder)
    X = uniform(2, 3).requires_grad_()
    expected = problem.evaluate(0, X)
    assert not expected.requires_grad
    with torch.no_grad():
        assert torch.equal(problem.evaluate(0, X), expected)
    with torch.inference_mode():
        assert torch.equal(problem.evaluate(0, X), expected)


def _reference(*, epochs: int) -> Tensor:
    """Logits of the made-up writer 3 by PyTorch's own layers and optimiser."""
    arrays = _made_up()
    mine = arrays["writer"] == 3
    X = torch.from_numpy(arrays["X"][mine] / 255.0).unsqueeze(1)
    y = torch.from_numpy(arrays["y"][mine].astype(np.int64))
    first, second = nn.Conv2d(1, 8, 5, stride=2), nn.Conv2d(8, 16, 3)
    dense, output = nn.Linear(256, 64), nn.Linear(64, 10)
    layers = {"conv1": first, "conv2": second, "dense": dense, "output": output}
    network = nn.Sequential(
        first, nn.MaxPool2d(2), nn.ReLU(), second, nn.ReLU(), nn.Flatten(), dense, nn.ReLU(), output
    ).double()
    for name, layer in layers.items():
        fan_in, width = layer.weight[0].numel(), len(layer.weight)
        W = generator(0, "weights", name).normal(fan_in, width) * (2 / fan_in) ** 0.5
        if name == "conv2":  # rows, columns, channels; PyTorch has the channels first
            W = W.reshape(3, 3, 8, 16).permute(2, 0, 1, 3)
        if name == "dense":
            W = W.reshape(4, 4, 16, 64).permute(2, 0, 1, 3)
        with torch.no_grad():
            layer.weight.copy_(W.reshape(fan_in, width).T.reshape(layer.weight.shape))
            layer.bias.zero_()
    stream = generator(0, "batches", 3).uniform(epochs, NUM_TRAIN).argsort(dim=-1).flatten()
    num_steps = epochs * NUM_TRAIN // 32
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.97)
    average = torch.optim.swa_utils.AveragedModel(network)
    for step in range(num_steps):
        rows = stream[32 * step : 32 * (step + 1)]
        optimizer.param_groups[0]["lr"] = POINT["learning_rate"] / (1 + POINT["decay"] * step)
        loss = nn.functional.cross_entropy(network(X[rows]), y[rows])
        penalty = sum(layer.weight.square().sum() for layer in layers.values())
        optimizer.zero_grad()
        (loss + POINT["l2"] * penalty).backward()
        optimizer.step()
        if step >= num_steps // 2:
            average.update_parameters(network)
    with torch.no_grad():
        return average(X[NUM_TRAIN:])


@pytest.mark.parametrize("epochs", [1, 3, 8])
def test_training_is_that_of_the_docstring(folder: Path, epochs: int) -> None:
    problem = WriterDigits(epochs=epochs, data=folder)
    got = problem._logits(1, problem.space.to_unit([POINT]))[0]
    torch.testing.assert_close(got, _reference(epochs=epochs), rtol=1e-3, atol=1e-4)


def test_training_never_sees_the_validation_digits(tmp_path: Path) -> None:
    arrays = _made_up()
    X = uniform(2, 3)
    before = WriterDigits(epochs=2, data=_save(tmp_path, arrays))._logits(0, X)
    (last,) = np.flatnonzero((arrays["writer"] == 2) & arrays["is_val"])[-1:]
    arrays["X"][last], arrays["y"][last] = 255 - arrays["X"][last], 9 - arrays["y"][last]
    after = WriterDigits(epochs=2, data=_save(tmp_path, arrays))._logits(0, X)
    assert torch.equal(after[:, :-1], before[:, :-1])
    assert not torch.equal(after[:, -1], before[:, -1])


def test_seed_is_of_weights_and_batches(folder: Path) -> None:
    zero, same, other = (WriterDigits(seed=seed, epochs=2, data=folder) for seed in (0, 0, 1))
    X = uniform(2, 3)
    assert torch.equal(zero._logits(0, X), same._logits(0, X))
    for layer, W in zero._weights.items():
        assert torch.equal(W, same._weights[layer])
        assert not torch.equal(W, other._weights[layer])
    streams = [writer.stream for writer in (*zero._writers[:2], other._writers[0])]
    assert not torch.equal(streams[0], streams[1])
    assert not torch.equal(streams[0], streams[2])
    passes = streams[0].reshape(2, NUM_TRAIN).sort(dim=-1).values
    assert torch.equal(passes, torch.arange(NUM_TRAIN).expand(2, -1))


def test_only_the_first_fifty_writers(tmp_path: Path) -> None:
    problem = WriterDigits(epochs=1, data=_save(tmp_path, _made_up(52)))
    assert len(problem) == module.NUM_WRITERS == 50


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"score": "auc"}, UnsupportedError, '"likelihood" or "accuracy", got \'auc\''),
        ({"epochs": 0}, InputDataError, "at least 1 epoch, got 0"),
    ],
)
def test_bad_arguments(
    folder: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        WriterDigits(data=folder, **options)


def test_writers_without_enough_digits(tmp_path: Path) -> None:
    arrays = _made_up()
    few = {name: array[NUM_TRAIN - 20 :] for name, array in arrays.items()}
    with pytest.raises(InputDataError, match=r"Writer 2 has 20 training and 7 .*of 32 in 1 epochs"):
        WriterDigits(epochs=1, data=_save(tmp_path, few))
    arrays["is_val"][arrays["writer"] == 3] = False
    with pytest.raises(InputDataError, match="Writer 3 has 47 training and 0 validation digits"):
        WriterDigits(data=_save(tmp_path, arrays))


def test_missing_data_say_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BOTORCH_FED_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"mnist_by_writer.npz.*MNIST.*QMNIST"):
        WriterDigits()
    with pytest.raises(FileNotFoundError, match=r"There is no .*mnist_by_writer.npz"):
        WriterDigits(data=tmp_path)


@needs_data
def test_real_writers() -> None:
    problem = WriterDigits(data=FOLDER)
    assert len(problem) == 50
    sizes = [(len(w.labels), len(w.val_labels)) for w in problem._writers]
    assert min(sizes) == (54, 6)
    assert max(sizes) == (115, 14)
    assert sum(train + val for train, val in sizes) == 5281
    pixels = torch.cat([w.images for w in problem._writers])
    assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)


@needs_data
@pytest.mark.parametrize("agent", [0, 48])  # 11 and 6 validation digits
def test_real_points_do_not_depend_on_the_others(agent: int) -> None:
    problem = WriterDigits(data=FOLDER)
    X = uniform(5, 3)
    together = problem._logits(agent, X)
    alone = torch.cat([problem._logits(agent, x.unsqueeze(0)) for x in X])
    assert torch.equal(together, alone)


@needs_data
def test_real_objective_is_informative() -> None:
    likelihood, accuracy = (
        WriterDigits(score=score, data=FOLDER)  # type: ignore[arg-type]
        for score in ("likelihood", "accuracy")
    )
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 3)
    assert bool(torch.isfinite(likelihood._logits(0, corners)).all())
    X = uniform(20, 3)
    values, shares = likelihood[0](X), accuracy[0](X)
    assert float(values.std()) > 0.1
    assert float(shares.std()) > 0.1
    assert len(values.unique()) == 20
    assert len(shares.unique()) <= 12  # 11 validation digits: accuracy is coarse
