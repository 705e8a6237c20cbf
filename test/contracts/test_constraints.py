"""Constraints by every door: no proposal violates one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.analytic import UpperConfidenceBound
from botorch.exceptions.errors import InputDataError
from botorch.models import SingleTaskGP
from torch import Tensor

from benchmarks.constraints import DOORS, PROBLEMS, violations
from botorch_fed.federation.points import dealt_design, spread_design
from botorch_fed.run import run
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB
from test.cases import uniform

REALS = (Parameter.real("x", 0.0, 1.0), Parameter.real("y", 0.0, 1.0))
MIXED = SearchSpace(
    (
        Parameter.integer("n", 1, 9),
        Parameter.integer("m", 1, 9),
        Parameter.real("x", 0.0, 1.0),
        Parameter.choice("kind", ["a", "b"]),
    ),
    constraints=("n + m == 8", "4 * x <= n"),
    feasible=lambda point: bool(point["kind"] == "a" or point["x"] <= 0.5),
)
SQUARE = SearchSpace(REALS, constraints=("x + y <= 0.7", "x >= y"))


def bowl(at: float) -> Any:
    return lambda X: -(X - at).square().sum(dim=-1, keepdim=True)


def upper_bound(model: SingleTaskGP, X: Tensor) -> AcquisitionFunction:
    return UpperConfidenceBound(model, beta=2.0)


def broken(space: SearchSpace, study: Any, seed: int = 0) -> list[str]:
    """What the points of a run violate."""
    sites = {name: bowl(0.3 + 0.4 * i) for i, name in enumerate("ab")}
    result = run(study, sites, space=space, seed=seed, progress=False, raise_errors=True)
    X = torch.tensor([row["x"] for row in result.records], dtype=torch.float64)
    points = space.from_unit(X)
    assert len(points) >= 4
    return [words for point in points if (words := space.violated(point)) is not None]


STUDIES: dict[str, Any] = {
    "default": FTS(budget=5, every=1),
    "batches": FTS(budget=6, every=1, q=3),
    "passed in": FTS(budget=5, every=1, strategy=TransferSearch(acquisition=upper_bound)),
    "thompson": FTS(budget=5, every=1, strategy=Strategy(num_raw=64, num_restarts=2)),
    "random": FTS(budget=4, every=1, strategy=Strategy(own="random", prior_until=0)),
    "sum": FedGP(budget=5, channel="plain"),
    "support": FedGP(budget=5, search=SupportSearch(), channel="plain"),
    "support ei": FedGP(
        budget=5, search=SupportSearch(acquisition="ei", models="global"), channel="plain"
    ),
    "region": FedGP(budget=5, search=RegionSearch(), channel="plain"),
    "releases": DPFTSDE(budget=8, epsilon=500.0, delta=1e-2, min_reliability=0.0),
    "bandit": PrivateUCB(budget=4, epsilon=5.0, delta=1e-2),
    "public bandit": PrivateUCB(budget=4, epsilon=5.0, delta=1e-2, trust="public"),
}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES.keys())
def test_no_search_leaves_the_set(study: Any) -> None:
    assert broken(SQUARE, study) == []


@pytest.mark.nightly
@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES.keys())
@pytest.mark.parametrize("seed", range(3))
def test_no_search_leaves_a_mixed_set(study: Any, seed: int) -> None:
    assert broken(MIXED, study, seed) == []


def test_the_default_search_keeps_mixed_constraints() -> None:
    assert broken(MIXED, STUDIES["default"]) == []


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("door", ["run", "trials", "file"])
def test_no_door_proposes_a_violation(name: str, door: str) -> None:
    count, bad = violations(name, door, seed=1)
    assert (count, bad) == (10, 0)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("seed", range(3))
def test_no_door_ever_proposes_a_violation(name: str, door: str, seed: int) -> None:
    count, bad = violations(name, door, seed=seed)
    assert count >= 5
    assert bad == 0


# ------------------------------------------------------------------ what is given


def test_what_is_given_is_refused_with_the_constraint() -> None:
    for setting in (
        {"default": {"x": 0.9, "y": 0.1}},
        {"initial_design": torch.tensor([[0.3, 0.2], [0.9, 0.1]]).double()},
    ):
        with pytest.raises(InputDataError, match=r"violates x \+ y <= 0\.7"):
            broken(SQUARE, replace(STUDIES["default"], **setting))
    with pytest.raises(InputDataError, match="None of 3 candidates meets"):
        broken(SQUARE, replace(STUDIES["default"], candidates=0.9 + 0.1 * uniform(3, 2)))


def test_candidates_are_filtered() -> None:
    candidates = uniform(60, 2)
    assert not bool(SQUARE.feasible_set.contains(candidates).all())
    assert broken(SQUARE, replace(STUDIES["default"], candidates=candidates)) == []


def test_given_data_are_used_but_are_no_best_ones(caplog: pytest.LogCaptureFixture) -> None:
    X = torch.tensor([[0.9, 0.9], [0.3, 0.1], [0.4, 0.2]], dtype=torch.float64)
    Y = torch.tensor([[10.0], [1.0], [2.0]], dtype=torch.float64)
    study = FTS(budget=4, every=1, data={"a": (X, Y)})
    result = run(study, {"a": bowl(0.3), "b": bowl(0.4)}, space=SQUARE, seed=0, progress=False)
    assert result.best_parameters("a") == pytest.approx({"x": 0.4, "y": 0.2})
    assert float(result.best("a")[0]) == 2.0
    assert result.given[0]["violates"] == "x + y <= 0.7"
    assert "1 of 3 points in data of agent 'a' violate" in caplog.text


def test_designs_are_spread_over_the_set() -> None:
    for space in (SQUARE, MIXED):
        dealt = torch.cat([dealt_design(space, index, 3, 4) for index in range(3)])
        spread = torch.cat([*spread_design(space, ["a", "b"], 4).values()])
        assert bool(space.feasible_set.contains(torch.cat([dealt, spread])).all())
        assert len(torch.unique(dealt, dim=0)) == len(dealt) == 12
        first = dealt_design(space, 1, 3, 2)
        assert torch.equal(first, dealt_design(space, 1, 3, 4)[:2])
