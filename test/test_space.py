"""The canonical map of inputs and outcomes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from hypothesis import given
from hypothesis import strategies as st

from botorch_fed.space import Outcome, Parameter, SearchSpace

SPACE = SearchSpace(
    (
        Parameter.real("x", -5.0, 10.0),
        Parameter.real("lr", 1e-4, 1.0, scale="log"),
        Parameter.integer("depth", 1, 8),
        Parameter.integer("batch", 16, 1024, scale="log"),
        Parameter.choice("kind", ["a", "b", "c"]),
    ),
    Outcome(centre=0.4, scale=0.2, minimize=True),
)
points = st.fixed_dictionaries(
    {
        "x": st.floats(-5.0, 10.0),
        "lr": st.floats(1e-4, 1.0),
        "depth": st.integers(1, 8),
        "batch": st.integers(16, 1024),
        "kind": st.sampled_from(["a", "b", "c"]),
    }
)


@given(points)
def test_points_survive_the_cube(point: dict[str, Any]) -> None:
    X = SPACE.to_unit([point])
    assert X.shape == (1, SPACE.dim) == (1, 7)
    assert bool(((X >= 0) & (X <= 1)).all())
    (back,) = SPACE.from_unit(X)
    assert list(back) == list(SPACE.names)
    assert {k: back[k] for k in ("depth", "batch", "kind")} == {
        k: point[k] for k in ("depth", "batch", "kind")
    }
    assert back["x"] == pytest.approx(point["x"], rel=1e-12, abs=1e-12)
    assert back["lr"] == pytest.approx(point["lr"], rel=1e-12)


@given(st.lists(st.floats(-0.5, 1.5), min_size=7, max_size=7))
def test_every_point_of_the_cube_is_legal(row: list[float]) -> None:
    X = torch.tensor([row], dtype=torch.float64)
    (point,) = SPACE.from_unit(X)
    snapped = SPACE.to_unit([point])  # refuses what lies outside
    torch.testing.assert_close(SPACE.snap(X), snapped, rtol=0, atol=0)
    torch.testing.assert_close(SPACE.snap(snapped), snapped, rtol=1e-12, atol=1e-12)
    assert type(point["depth"]) is int


def test_known_values() -> None:
    low = {"x": -5.0, "lr": 1e-4, "depth": 1, "batch": 16, "kind": "a"}
    high = {"x": 10.0, "lr": 1.0, "depth": 8, "batch": 1024, "kind": "c"}
    X = SPACE.to_unit([low, high, {**low, "x": 2.5, "lr": 1e-2, "depth": 4, "batch": 128}])
    assert X[0].tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert X[1].tolist() == [1, 1, 1, 1, 0, 0, 1]
    assert X[2].tolist() == pytest.approx([0.5, 0.5, 3 / 7, 0.5, 1, 0, 0])
    assert SPACE.from_unit(X[:2]) == [low, high]
    assert SPACE.from_unit(torch.zeros(0, 7)) == []
    assert SPACE.to_unit([]).shape == (0, 7)
    assert SPACE.bounds.tolist() == [[0.0] * 7, [1.0] * 7]


def test_outcomes() -> None:
    Y = torch.tensor([[0.4], [0.2]], dtype=torch.float64)
    public = SPACE.outcome.to_public(Y)
    torch.testing.assert_close(public, torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    torch.testing.assert_close(SPACE.outcome.from_public(public), Y)


def test_fingerprint_is_of_everything() -> None:
    assert SPACE.fingerprint == replace(SPACE).fingerprint
    first = SPACE.parameters[0]
    others = [
        replace(SPACE, outcome=Outcome(0.4, 0.2, minimize=False)),
        replace(SPACE, outcome=Outcome(math.nextafter(0.4, 1), 0.2, minimize=True)),
        replace(SPACE, parameters=SPACE.parameters[::-1]),
        replace(SPACE, parameters=(replace(first, name="z"), *SPACE.parameters[1:])),
        replace(SPACE, parameters=(replace(first, upper=10.1), *SPACE.parameters[1:])),
    ]
    assert len({SPACE.fingerprint, *(o.fingerprint for o in others)}) == 6
    # Frozen: agents of different releases compare it.
    assert SPACE.fingerprint[:16] == "8a9637c787d63786"


def test_a_space_survives_json() -> None:
    assert SearchSpace.from_dict(json.loads(json.dumps(SPACE.to_dict()))) == SPACE


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": 11.0}, r"'x' must lie in \[-5, 10\], got 11"),
        ({"x": math.nan}, "'x' must be a number"),
        ({"x": "1"}, "'x' must be a number"),
        ({"x": True}, "'x' must be a number"),
        ({"depth": 2.5}, "'depth' must be an integer"),
        ({"kind": "d"}, "'kind' must be one of"),
        ({"extra": 1}, r"missing \[\], unknown \['extra'\]"),
    ],
)
def test_points_that_are_not_in_the_space(change: dict[str, Any], match: str) -> None:
    good = {"x": 0.0, "lr": 0.1, "depth": 2, "batch": 32, "kind": "a"}
    with pytest.raises(InputDataError, match=match):
        SPACE.to_unit([{**good, **change}])
    with pytest.raises(InputDataError, match=r"missing \['kind'\]"):
        SPACE.to_unit([{k: v for k, v in good.items() if k != "kind"}])


def test_tensors_that_are_no_points() -> None:
    with pytest.raises(BotorchTensorDimensionError, match="`n x 7`"):
        SPACE.from_unit(torch.zeros(2, 6))
    with pytest.raises(InputDataError, match="NaN or infinite"):
        SPACE.from_unit(torch.full((1, 7), torch.nan))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Parameter.real("x", 1.0, 1.0), "must lie below"),
        (lambda: Parameter.real("x", 0.0, math.inf), "must be finite"),
        (lambda: Parameter.real("x", 0.0, 1.0, scale="log"), "positive bounds"),
        (lambda: Parameter.real("x", 0.0, 1.0, scale="sqrt"), "linear or log"),
        (lambda: Parameter.integer("x", 0, 1.5), "must be integers"),
        (lambda: Parameter.choice("x", ["a"]), "at least two different"),
        (lambda: Parameter.choice("x", ["a", "a"]), "at least two different"),
        (lambda: Parameter.real("", 0.0, 1.0), "needs a name"),
        (lambda: SearchSpace(()), "at least one parameter"),
        (lambda: SearchSpace((SPACE.parameters[0],) * 2), "different names"),
        (lambda: Outcome(scale=0.0), "positive scale"),
        (lambda: Outcome(centre=math.nan), "finite centre"),
    ],
)
def test_spaces_that_make_no_sense(build: Any, match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        build()


def test_offsets_of_a_logarithmic_warp_are_those_of_the_log_scale() -> None:
    linear = SearchSpace(
        (
            Parameter.real("wide", 0.01, 10.0),
            Parameter.real("narrow", 0.01, 0.1),
            Parameter.real("signed", -1.0, 10.0),
            Parameter.real("log", 1e-6, 1.0, scale="log"),
            Parameter.choice("kind", ["a", "b"]),
        )
    )
    offsets = linear.log_offsets
    assert (offsets > 0).tolist() == [True, False, False, False, False, False]
    log = SearchSpace((Parameter.real("wide", 0.01, 10.0, scale="log"),))
    for value in (0.01, 0.3, 10.0):
        x = (value - 0.01) / (10.0 - 0.01)
        e = float(offsets[0])
        warped = math.log1p(x / e) / math.log1p(1 / e)
        assert abs(warped - float(log.to_unit([{"wide": value}]))) < 1e-12


def test_whole_numbers_make_the_same_outcome() -> None:
    a = SearchSpace(SPACE.parameters, Outcome(0, 2))
    b = SearchSpace(SPACE.parameters, Outcome(0.0, 2.0))
    assert a.fingerprint == b.fingerprint
    saved = json.loads(json.dumps(a.to_dict()))
    assert SearchSpace.from_dict(saved).fingerprint == a.fingerprint
