"""Importances and slices say what the function is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from botorch_fed.report.effects import importances, slices
from botorch_fed.rng import generator
from botorch_fed.space import Parameter, SearchSpace

SPACE = SearchSpace(
    (
        Parameter.real("rate", 1e-4, 1.0, scale="log"),
        Parameter.integer("depth", 1, 8),
        Parameter.choice("kernel", ["rbf", "poly", "cubic"]),
        Parameter.fixed("seed", 3),
        Parameter.real("idle", 0.0, 1.0),
    )
)


def _observed(count: int) -> tuple[torch.Tensor, list[list[float]], torch.Tensor]:
    """Points, the places of their parameters, and outcomes that `idle` does not change."""
    X = SPACE.snap(generator(0, "effects").uniform(count, SPACE.dim))
    points = SPACE.from_unit(X)
    places = [
        [float(p["rate"]), float(p["depth"]), float(["rbf", "poly", "cubic"].index(p["kernel"])),
         0.0, float(p["idle"])]
        for p in points
    ]  # fmt: skip
    y = [2 * (math.log10(p["rate"]) + 2) + (p["kernel"] == "poly") for p in points]
    return X, places, torch.tensor(y, dtype=torch.float64)


def test_importances_find_what_counts() -> None:
    _, places, y = _observed(120)
    found = importances(SPACE, places, y.tolist())
    assert found is not None
    assert found.order[:2] == ["rate", "kernel"]
    assert set(found.order) == {"rate", "depth", "kernel", "idle"}
    assert found.means["rate"] > 0.8
    assert max(abs(found.means[name]) for name in ("depth", "idle")) < 0.1
    assert found.explained > 0.8
    assert found.count == 120


def test_a_model_of_noise_explains_nothing() -> None:
    _, places, y = _observed(60)
    noise = generator(0, "noise").normal(len(y)).tolist()
    found = importances(SPACE, places, noise)
    assert found is not None
    assert found.explained < 0.1


def test_few_or_equal_outcomes_have_no_importances() -> None:
    _, places, y = _observed(19)
    assert importances(SPACE, places, y.tolist()) is None
    assert importances(SPACE, places * 2, [1.0] * 38) is None
    one = SearchSpace((Parameter.real("rate", 0.0, 1.0), Parameter.fixed("seed", 3)))
    assert importances(one, [[0.1, 0.0]] * 30, list(range(30))) is None


def test_a_slice_goes_through_the_best_configuration() -> None:
    X, _, y = _observed(40)
    best = SPACE.from_unit(X[int(y.argmax())].unsqueeze(0))[0]
    found = slices(SPACE, X, y, best, ["rate", "depth", "kernel", "seed"])
    assert set(found) == {"rate", "depth", "kernel"}
    rate = found["rate"]
    expected = [2 * (math.log10(v) + 2) + (best["kernel"] == "poly") for v in rate.values]
    assert rate.mean == pytest.approx(expected, abs=0.3)
    assert (rate.values[0], rate.values[-1]) == (1e-4, 1.0)
    inside = [low <= y_ <= high for low, y_, high in
              zip(rate.low, expected, rate.high, strict=True)]  # fmt: skip
    assert np.mean(inside) > 0.6
    assert found["depth"].values == list(range(1, 9))
    assert found["kernel"].values == ["rbf", "poly", "cubic"]


def test_few_or_equal_outcomes_have_no_slices() -> None:
    X, _, y = _observed(6)
    best = SPACE.from_unit(X[:1])[0]
    assert slices(SPACE, X[:4], y[:4], best, ["rate"]) == {}
    assert slices(SPACE, X, torch.ones(6).double(), best, ["rate"]) == {}
