"""Points that can be evaluated: near ones, random ones, neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError
from scipy.optimize import minimize
from torch import Tensor

from botorch_fed.rng import generator
from botorch_fed.space import Parameter, SearchSpace
from test.cases import uniform

REALS = tuple(Parameter.real(f"x{j}", 0.0, 1.0) for j in range(4))


def in_a_disc(point: dict[str, Any]) -> bool:
    return bool((point["x0"] - 0.5) ** 2 + (point["x1"] - 0.5) ** 2 <= 0.04)


SPACES = {
    "triangle": SearchSpace(REALS[:2], constraints=("x0 + x1 <= 0.7",)),
    "simplex": SearchSpace(REALS, constraints=("x0 + x1 + x2 + x3 == 1", "x0 >= x1")),
    "thin": SearchSpace(REALS, constraints=("x0 + x1 + x2 + x3 <= 0.1",)),
    "disc": SearchSpace(REALS[:2], feasible=in_a_disc),
    "units": SearchSpace(
        (Parameter.real("t", -40.0, 200.0), Parameter.real("p", 1e4, 1e6)),
        constraints=("1000 * t + p <= 1e5", "p - 10 * t >= 2e4"),
    ),
    "log": SearchSpace(
        (Parameter.real("C", 1e-3, 1e3, scale="log"), Parameter.real("w", 0.0, 1.0)),
        constraints=("C + w <= 1.5",),
    ),
    "integers": SearchSpace(
        (
            Parameter.integer("n", 1, 9),
            Parameter.integer("m", 1, 9),
            Parameter.choice("size", [10, 20, 50]),
            Parameter.real("load", 0.0, 1.0),
            Parameter.choice("kind", ["a", "b"]),
            Parameter.fixed("spare", 5),
        ),
        constraints=("n + m == 8", "40 * load + spare <= size"),
        feasible=lambda point: point["n"] != 4,
    ),
}
spaces = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())


def broken(space: SearchSpace, X: Tensor) -> list[str]:
    return [words for p in space.from_unit(X) if (words := space.violated(p)) is not None]


@spaces
def test_every_point_is_moved_into_the_set(space: SearchSpace) -> None:
    X = uniform(40, space.dim, seed=1)
    inside = space.snap(X)
    assert broken(space, inside) == []
    assert bool(((inside >= 0) & (inside <= 1)).all())
    again = space.snap(inside)
    torch.testing.assert_close(again, inside, rtol=0, atol=1e-12)
    assert bool(space.feasible_set.contains(inside).all())
    moved = ~space.feasible_set.contains(space.feasible_set.legal(X))
    kept = space.feasible_set.legal(X)[~moved]
    assert torch.equal(inside[~moved], kept)  # what can be evaluated stays


@spaces
def test_random_points_lie_in_the_set_and_differ(space: SearchSpace) -> None:
    X = space.feasible_set.uniform(150, generator(0, "points"))
    assert X.shape == (150, space.dim)
    assert broken(space, X) == []
    assert len(torch.unique(X, dim=0)) > 100
    assert torch.equal(X, space.feasible_set.uniform(150, generator(0, "points")))


def test_inequalities_leave_room_for_rounding() -> None:
    points = SPACES["triangle"].from_unit(SPACES["triangle"].snap(uniform(300, 2)))
    assert max(p["x0"] + p["x1"] for p in points) <= 0.7  # type: ignore[operator]


@pytest.mark.parametrize("name", ["triangle", "simplex", "thin"])
def test_a_point_moves_to_the_nearest(name: str) -> None:
    space, found = SPACES[name], SPACES[name].feasible_set
    rules = [{"type": "ineq", "fun": lambda z: found.b - found.A @ z}] if len(found.A) else []
    if len(found.C):
        rules.append({"type": "eq", "fun": lambda z: found.C @ z - found.d})
    for x in uniform(12, space.dim, seed=3).numpy():
        peer = minimize(
            lambda z, x=x: ((z - x) ** 2).sum(),
            np.full(space.dim, 0.1),
            bounds=[(0, 1)] * space.dim,
            constraints=rules,
            options={"ftol": 1e-14, "maxiter": 500},
        )
        ours = space.snap(torch.from_numpy(x[None])).numpy()[0]
        assert ((ours - x) ** 2).sum() == pytest.approx(peer.fun, abs=1e-6)


def test_draws_from_a_triangle_are_uniform() -> None:
    """Of the unit triangle: the means are a third, also by hit and run."""
    half = SearchSpace(REALS[:2], constraints=("x0 + x1 <= 1",))
    for points in (
        half.feasible_set.uniform(3000, generator(0, "r")).numpy(),
        half.feasible_set._walk(3000, generator(0, "w")),
    ):
        assert np.abs(points.mean(axis=0) - 1 / 3).max() < 0.03
        assert np.abs((points[:, 0] < 0.25).mean() - (1 - 0.75**2)) < 0.05


@pytest.mark.parametrize("name", ["integers", "log"])
def test_neighbours_differ_in_discrete_values(name: str) -> None:
    space = SPACES[name]
    X = space.feasible_set.uniform(2, generator(0, "start"))
    for x in X:
        around = space.feasible_set.neighbours(x) if space.feasible_set.blocks else X[:0]
        assert broken(space, around) == []
    if name == "integers":
        discrete = space.feasible_set.neighbours(X[0])[:, ~space.feasible_set.continuous]
        assert len(torch.unique(discrete, dim=0)) >= 6


def test_neighbours_of_few_values_are_all_combinations() -> None:
    space = SearchSpace((
        Parameter.integer("n", 1, 3), Parameter.choice("k", ["a", "b"]), Parameter.real("x", 0, 1)
    ))  # fmt: skip
    (x,) = space.to_unit([{"n": 2, "k": "b", "x": 0.25}])
    points = space.from_unit(space.feasible_set.neighbours(x))
    assert {(p["n"], p["k"]) for p in points} == {
        (n, k) for n in (1, 2, 3) for k in "ab" if (n, k) != (2, "b")
    }
    assert {p["x"] for p in points} == {0.25}


@pytest.mark.parametrize(
    ("constraints", "match"),
    [
        (("x0 + x1 <= -1",), r"'x0 \+ x1 <= -1' is met nowhere.*between 0 and 2"),
        (("x0 == 3",), "met nowhere"),
        (("x0 + x1 <= 0.2", "x0 >= 0.5"), "No point .* meets all constraints together"),
        (("n + m == 2.5",), "No point .* meets all constraints together"),
    ],
)
def test_empty_sets_are_refused(constraints: tuple[str, ...], match: str) -> None:
    integers = (Parameter.integer("n", 1, 4), Parameter.integer("m", 1, 4))
    with pytest.raises(InputDataError, match=match):
        SearchSpace((*REALS[:2], *integers), constraints=constraints)


def test_a_check_that_nothing_meets_is_refused() -> None:
    with pytest.raises(InputDataError, match=r"None of 16,384 points .* and feasible"):
        SearchSpace(REALS[:1], feasible=lambda point: False)
    with pytest.raises(InputDataError, match="must return True or False, got float"):
        SearchSpace(REALS[:1], feasible=lambda point: point["x0"])


def test_botorch_gets_the_same_constraints() -> None:
    found = SPACES["simplex"].feasible_set
    X = found.uniform(20, generator(0, "b"))
    for indices, factors, bound in found.for_botorch["inequality_constraints"]:
        assert bool((X[:, indices] @ factors >= bound - 1e-8).all())
    for indices, factors, bound in found.for_botorch["equality_constraints"]:
        torch.testing.assert_close(X[:, indices] @ factors, torch.full((20,), bound).double())
    assert SearchSpace(REALS).feasible_set.for_botorch == {}


@pytest.mark.parametrize("constraint", ["n + m + k == 9", "n + m <= 4"])
def test_integers_alone_may_be_constrained(constraint: str) -> None:
    """Nothing is left to move where all values are discrete."""
    parameters = tuple(Parameter.integer(name, 0, 9) for name in "nmk")
    space = SearchSpace(parameters, constraints=(constraint,))
    X = space.feasible_set.nearest(uniform(20, 3))
    assert broken(space, X) == []
    assert torch.equal(space.snap(X), X)


def test_without_constraints_nothing_changes() -> None:
    space = SearchSpace((REALS[0], Parameter.integer("n", 1, 5)))
    U = uniform(9, 2)
    assert torch.equal(space.snap(U), space.to_unit(space.from_unit(U)))
    drawn = space.feasible_set.uniform(9, generator(3, "u"))
    assert torch.equal(drawn, generator(3, "u").uniform(9, 2))
