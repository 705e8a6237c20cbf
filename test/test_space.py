"""The canonical map of inputs and outcomes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from hypothesis import given
from hypothesis import strategies as st

from botorch_fed.federation.terms import in_words
from botorch_fed.rng import generator
from botorch_fed.space import Fidelity, Outcome, Parameter, SearchSpace

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


# ------------------------------------------------------------------ choices, fixed parameters

RICH = SearchSpace(
    (
        Parameter.choice("size", [64, 16, 32], scale="log"),
        Parameter.choice("share", [0.1, 0.2, 0.9]),
        Parameter.choice("flag", [True, False]),
        Parameter.choice("level", ["low", "mid", "high"], ordered=True),
        Parameter.choice("seed", [3, 1, 2], ordered=False),
        Parameter.choice("kind", ["a", "b"]),
        Parameter.fixed("folds", 5),
        Parameter.real("x", 0.0, 1.0),
    ),
    constraints=("x + share <= 1", "size + folds <= 50"),
)


def test_choices_have_their_values_and_order() -> None:
    assert [p.num_columns for p in RICH.parameters] == [1, 1, 1, 1, 3, 2, 0, 1]
    point = {
        "size": 32, "share": 0.2, "flag": True, "level": "mid", "seed": 1, "kind": "b", "x": 0.5
    }  # fmt: skip
    X = RICH.to_unit([point])  # a fixed parameter may be left out
    expected = [0.5, 0.125, 1.0, 0.5, 0, 1, 0, 0, 1, 0.5]
    torch.testing.assert_close(X, torch.tensor([expected], dtype=torch.float64))
    (back,) = RICH.from_unit(X)
    assert back == {**point, "folds": 5}
    assert [type(value) for value in back.values()] == [int, float, bool, str, int, str, int, float]
    near = RICH.from_unit(X + 0.1 * (X < 0.9))[0]
    assert (near["size"], near["share"], near["level"]) == (32, 0.2, "mid")


def test_a_rich_space_survives_json() -> None:
    saved = json.loads(json.dumps(RICH.to_dict()))
    assert SearchSpace.from_dict(saved) == RICH
    assert SearchSpace.from_dict(saved).fingerprint == RICH.fingerprint
    others = {
        replace(RICH, constraints=()).fingerprint,
        replace(RICH, constraints=("x + share <= 0.9", "size + folds <= 50")).fingerprint,
        replace(RICH, feasible=halves).fingerprint,
        RICH.fingerprint,
    }
    assert len(others) == 4
    known = SearchSpace.from_dict(replace(RICH, feasible=halves).to_dict())
    assert known.constraint_words[-1] == f"feasible ({__name__}:halves)"
    with pytest.raises(InputDataError, match="known by its name only"):
        known.violated(RICH.from_unit(RICH.snap(torch.zeros(1, RICH.dim).double()))[0])


def halves(point: dict[str, Any]) -> bool:
    return bool(point["x"] <= 0.5)


def test_a_violated_constraint_is_named() -> None:
    space = replace(RICH, feasible=halves)
    (point,) = space.from_unit(space.snap(torch.full((1, space.dim), 0.5).double()))
    assert space.violated(point) is None
    assert space.violated({**point, "share": 0.9, "x": 0.4}) == "share + x <= 1"
    assert space.violated({**point, "size": 64}) == "size + folds <= 50"
    assert space.violated({**point, "share": 0.1, "x": 0.6}) == f"feasible ({__name__}:halves)"
    with pytest.raises(InputDataError, match=r"The design has the point .* violates size \+ folds"):
        space.refuse_infeasible(space.to_unit([{**point, "size": 64}]), "The design")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Parameter.choice("a", [1, "b"]), "all of one kind"),
        (lambda: Parameter.choice("a", [1, True]), "all of one kind|different"),
        (lambda: Parameter.choice("a", [1.0, math.inf]), "finite numbers"),
        (lambda: Parameter.choice("a", [-1, 1], scale="log"), "positive bounds"),
        (lambda: Parameter.choice("a", ["u", "v"], scale="log"), "log scale is for numbers"),
        (lambda: Parameter.fixed("a", math.nan), "needs one value"),
        (lambda: SearchSpace((Parameter.fixed("a", 1),)), "one parameter that is not fixed"),
        (lambda: RICH.to_unit([{"folds": 4, "x": 0.5}]), "missing"),
        (lambda: Parameter.choice("flag", [True, False]).to_columns(1), "one of"),
        (lambda: Parameter.fixed("folds", 5).to_columns(4), "fixed value 5, got 4"),
    ],
)
def test_values_that_are_none_are_refused(make: Any, match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        make()


@pytest.mark.parametrize(
    ("constraints", "match"),
    [
        ("x <= 1", r"Expected constraints as a tuple, got str.*with a comma"),
        (("kind <= 1",), "'kind' has no numbers in an order.*Write feasible"),
        (("seed <= 1",), "'seed' has no numbers in an order"),
        (("level <= 1",), "'level' has no numbers in an order"),
        (("size == 16 + x",), "'size' is on a log scale, where no equality"),
        (("folds <= 4",), "all of its parameters are fixed"),
        ((1,), "A constraint is text"),
    ],
)
def test_constraints_that_cannot_be_kept_are_refused(constraints: Any, match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        replace(RICH, constraints=constraints)


def test_tables_are_read_by_text() -> None:
    values = {"size": "32", "share": "0.2", "flag": "true", "level": "mid", "kind": "b", "x": "0.5"}
    parsed = {p.name: p.from_text(values[p.name]) for p in RICH.parameters if p.name in values}
    assert parsed == {
        "size": 32, "share": 0.2, "flag": True, "level": "mid", "kind": "b", "x": 0.5
    }  # fmt: skip
    with pytest.raises(ValueError, match="could not convert"):
        RICH.parameters[0].from_text("big")


# ------------------------------------------------------------------ outcomes

ERROR = Outcome.objective("error", minimize=True)
LATENCY = Outcome.constraint("latency", upper=20)
COST = Outcome.objective("cost", minimize=True, reference=9.0)
METRICS = replace(SPACE, outcome=Outcome(), outcomes=(ERROR, LATENCY, Outcome.tracking("energy")))


def test_one_outcome_has_the_fingerprint_that_it_always_had() -> None:
    """Runs of earlier releases go on: neither hashes nor files know of roles."""
    plain = SearchSpace(
        (
            Parameter.real("x", 0.0, 1.0),
            Parameter.real("y", 0.0, 1.0),
            Parameter.integer("k", 1, 5),
        ),
        Outcome(0.5, 2.0, True, "loss"),
    )
    assert plain.fingerprint.startswith("47fc90b5ef45022d")
    document = json.dumps(plain.to_dict()).encode()
    assert hashlib.sha256(document).hexdigest().startswith("2e1eebfd29a88d68")
    assert set(in_words(plain.outcome, "outcome")) == {
        "outcome", "outcome.centre", "outcome.scale", "outcome.minimize", "outcome.name"
    }  # fmt: skip
    assert "space.outcomes" not in in_words(plain, "space")
    assert replace(plain, outcomes=(plain.outcome,)) == plain


@pytest.mark.parametrize(
    "outcomes",
    [
        (ERROR, LATENCY),
        (ERROR, LATENCY, Outcome.tracking("power")),
        (ERROR, Outcome.tracking("energy"), LATENCY),
        (ERROR, Outcome.constraint("latency", upper=21), Outcome.tracking("energy")),
        (ERROR, Outcome.constraint("latency", lower=20), Outcome.tracking("energy")),
        (Outcome.objective("error"), LATENCY, Outcome.tracking("energy")),
        (ERROR, LATENCY, Outcome.objective("energy")),
        (ERROR, LATENCY, Outcome.objective("energy", reference=0.0)),
    ],
)
def test_all_that_is_public_of_outcomes_is_in_the_fingerprint(outcomes: Any) -> None:
    other = SearchSpace(SPACE.parameters, outcomes=outcomes)
    assert other.fingerprint != METRICS.fingerprint
    assert in_words(other, "space") != in_words(METRICS, "space")
    back = SearchSpace.from_dict(json.loads(json.dumps(other.to_dict())))
    assert back == other
    assert back.fingerprint == other.fingerprint


def test_outcomes_are_columns() -> None:
    assert (METRICS.objectives, METRICS.outcome_constraints, METRICS.modelled) == (
        (0,),
        (1,),
        (0, 1),
    )
    assert METRICS.outcome == ERROR
    Y = torch.tensor([[0.2, 15.0, 3.0], [0.1, 25.0, 3.0]], dtype=torch.float64)
    assert METRICS.to_public(Y).tolist() == [[-0.2, 15.0, 3.0], [-0.1, 25.0, 3.0]]
    assert [METRICS.broken_outcome(row) for row in Y.tolist()] == [None, "latency <= 20"]
    assert METRICS.broken_outcome([0.0, 20.0, 0.0]) is None  # the bound itself is met
    assert METRICS.by_name(Y[0].tolist()) == {"error": 0.2, "latency": 15.0, "energy": 3.0}
    both = Outcome.constraint("ph", lower=6, upper=8)
    assert both.words == "6 <= ph <= 8"
    assert [both.allows(value) for value in (5.9, 6.0, 8.0, 8.1)] == [False, True, True, False]


def test_a_front_is_of_the_objectives_alone() -> None:
    space = SearchSpace(SPACE.parameters, outcomes=(LATENCY, ERROR, COST))
    Y = torch.tensor([[1.0, 0.1, 5.0], [9.0, 0.2, 5.0], [1.0, 0.3, 1.0], [1.0, 0.1, 5.0]])
    assert space.front(Y.double()).tolist() == [True, False, True, True]
    assert space.front(Y[:0].double()).tolist() == []
    assert METRICS.front(Y.double()[:, [1, 0, 2]]).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Outcome.constraint("latency"), "give lower, upper, or both"),
        (lambda: Outcome.constraint("a", lower=2, upper=1), "lower must lie below upper"),
        (lambda: Outcome.constraint("a", upper=math.inf), "must be finite"),
        (lambda: Outcome.objective("a", reference=math.nan), "must be finite"),
        (lambda: Outcome(name="a", upper=3.0), "bounds are for constraints.*two names"),
        (lambda: Outcome(name="a", role="tracking", minimize=True), "minimize is for objectives"),
        (lambda: Outcome(name="a", role="tracking", reference=1.0), "reference is for objectives"),
        (lambda: Outcome(name="a", role="aim"), "expected role objective, constraint or tracking"),
        (lambda: replace(SPACE, outcomes=(ERROR, LATENCY)), "outcome or outcomes, not both"),
        (lambda: SearchSpace(SPACE.parameters, outcomes=(LATENCY,)), "Expected an objective"),
        (lambda: SearchSpace(SPACE.parameters, outcomes=(ERROR, ERROR)), "different names"),
        (lambda: SearchSpace(SPACE.parameters, outcomes=(COST, LATENCY)), "is the only objective"),
        (
            lambda: SearchSpace(SPACE.parameters, outcomes=[ERROR]),
            "as a tuple of Outcome, got list",
        ),
    ],
)
def test_outcomes_that_mean_nothing_are_refused(make: Any, match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        make()


# ------------------------------------------------------------------ a fidelity


EPOCHS = Parameter.integer("epochs", 1, 27)
RATE = Parameter.real("rate", 1e-4, 1.0, scale="log")
KERNEL = Parameter.choice("kernel", ("rbf", "linear"))
TRAINING = SearchSpace((RATE, EPOCHS, KERNEL), fidelity=Fidelity("epochs", fixed=3))


def test_a_fidelity_has_costs_in_evaluations_at_the_target() -> None:
    points = [{"rate": 0.1, "epochs": s, "kernel": "rbf"} for s in (1, 12, 27)]
    X = TRAINING.to_unit(points)
    assert TRAINING.costs(X) == pytest.approx([4 / 30, 15 / 30, 1.0])
    assert TRAINING.cheapest == pytest.approx(4 / 30)
    assert SearchSpace((RATE,)).costs(X[:, :1]) == [1.0, 1.0, 1.0]


def test_a_fidelity_is_split_from_a_configuration_and_joined_again() -> None:
    X = generator(0, "points").uniform(5, TRAINING.dim)
    rest = TRAINING.configurations(X)
    assert rest.shape == (5, TRAINING.dim - 1)
    assert torch.equal(TRAINING.at_fidelity(rest, TRAINING.fidelities(X)), X)
    shared = TRAINING.shared
    assert (shared.fidelity, shared.dim) == (None, TRAINING.dim - 1)
    at_target = TRAINING.from_unit(TRAINING.at_fidelity(rest))
    assert at_target == shared.from_unit(rest)
    assert {point["epochs"] for point in at_target} == {27}


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        (EPOCHS, [1, 3, 9, 27]),
        (Parameter.integer("epochs", 1, 27, scale="log"), [1, 3, 9, 27]),
        (Parameter.choice("epochs", (1, 4, 9, 81), scale="log"), [1, 4, 9, 81]),
        (Parameter.real("epochs", 10.0, 30.0), [10, 30]),
    ],
)
def test_levels_of_a_fidelity_are_each_some_three_times_as_dear(
    parameter: Parameter, values: list[float]
) -> None:
    space = SearchSpace((RATE, parameter), fidelity=Fidelity("epochs"))
    found = [space.fidelity_value(level) for level in space.levels]
    assert found == pytest.approx(values)
    places = [space.fidelity_place(level) for level in space.levels]
    assert (places[0], places[-1]) == (0.0, 1.0)
    assert places == sorted(places)


def test_a_fidelity_is_in_the_fingerprint_of_a_space_that_has_one() -> None:
    plain = SearchSpace(TRAINING.parameters)
    others = [replace(TRAINING, fidelity=Fidelity("epochs")), replace(plain, fidelity=None)]
    assert len({space.fingerprint for space in (TRAINING, *others)}) == 3
    assert others[1].fingerprint == plain.fingerprint
    assert "fidelity" not in plain.to_dict()
    assert "space.fidelity" not in in_words(plain, "space")
    again = SearchSpace.from_dict(json.loads(json.dumps(TRAINING.to_dict())))
    assert (again, again.fingerprint) == (TRAINING, TRAINING.fingerprint)


def test_a_feasible_function_is_asked_at_the_target() -> None:
    space = replace(TRAINING, feasible=lambda point: point["epochs"] == 27)
    assert space.violated({"rate": 0.1, "epochs": 1, "kernel": "rbf"}) is None


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: replace(TRAINING, fidelity=Fidelity("trees")), "'trees' is no parameter"),
        (lambda: replace(TRAINING, fidelity=Fidelity("kernel")), "a number in an order"),
        (lambda: Fidelity("epochs", fixed=-1), "fixed cost >= 0, got -1"),
        (lambda: SearchSpace((EPOCHS,), fidelity=Fidelity("epochs")), "no parameter is searched"),
        (
            lambda: SearchSpace((RATE, Parameter.real("s", 0, 1)), fidelity=Fidelity("s")),
            "would cost nothing",
        ),
        (
            lambda: replace(TRAINING, constraints=("rate + epochs <= 20",)),
            "'epochs' is the fidelity",
        ),
    ],
)
def test_impossible_fidelities_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        make()
