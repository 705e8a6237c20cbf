"""A users' default configuration: every site without data evaluates it first, in every protocol."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.federation.points import dealt_design, first_points
from botorch_fed.run import RunResult, run
from botorch_fed.search.released import Following
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import MIN_OWN
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP
from test.cases import in_rounds, uniform

SPACE = SearchSpace(
    (Parameter.real("C", 1e-3, 1e3, scale="log"), Parameter.real("gamma", 1e-4, 1.0, scale="log"))
)
MIXED = SearchSpace(
    (Parameter.integer("depth", 1, 8), Parameter.choice("kind", ["rbf", "linear", "poly"]))
)
DEFAULT = {"C": 1.0, "gamma": 0.05}
POINT = SPACE.to_unit([DEFAULT])
NAMES = ("ann", "bob", "cem")
STUDIES: dict[str, Any] = {
    "fts": (FTS, {}),
    "fed-gp": (FedGP, {"channel": "plain"}),
    "dp-fts-de": (DPFTSDE, {"releases": (), "noise_kind": "none"}),
}
EACH = pytest.mark.parametrize("protocol", STUDIES)


def study(protocol: str, **options: Any) -> Any:
    make, usual = STUDIES[protocol]
    settings = {"rounds": 4 if protocol == "fts" else 1, "default": DEFAULT, **usual, **options}
    return in_rounds(make, settings, NAMES)


def hill(X: Tensor) -> Tensor:
    return -(X - 0.3).square().sum(dim=-1, keepdim=True)


def finished(made: Any, **options: Any) -> RunResult:
    return run(made, dict.fromkeys(NAMES, hill), seed=0, space=SPACE, progress=False, **options)


def setup_of(protocol: str, **options: Any) -> Any:
    return study(protocol, **options).server(SPACE, NAMES).setup


# ------------------------------------------------------------------ where a site begins


def test_the_default_comes_first_and_the_rest_is_dealt() -> None:
    points = first_points(SPACE, 1, 3, 4, default=POINT)
    assert torch.equal(points, torch.cat([SPACE.snap(POINT), dealt_design(SPACE, 1, 3, 3)]))
    assert torch.equal(first_points(SPACE, 1, 3, 4, default=None), dealt_design(SPACE, 1, 3, 4))
    assert len(first_points(SPACE, 1, 3, 0, default=POINT)) == 0
    assert len(first_points(SPACE, 1, 3, -2, default=POINT)) == 0


def test_of_a_list_the_nearest_candidate_comes_first_and_once() -> None:
    candidates = uniform(9, 2, seed=3)
    points = first_points(SPACE, 0, 3, 9, default=POINT, candidates=candidates)
    nearest = candidates[torch.cdist(POINT, candidates).argmin()]
    assert torch.equal(points[0], nearest)
    assert len(torch.unique(points, dim=0)) == 9
    shorter = first_points(SPACE, 0, 3, 4, default=POINT, candidates=candidates)
    assert torch.equal(shorter, points[:4])


def test_integers_and_choices_have_defaults() -> None:
    default = MIXED.to_unit([{"depth": 3, "kind": "linear"}])
    first = first_points(MIXED, 0, 2, 1, default=default)
    assert MIXED.from_unit(first) == [{"depth": 3, "kind": "linear"}]


# ------------------------------------------------------------------ in every protocol


@EACH
def test_every_site_evaluates_the_default_first(protocol: str) -> None:
    result = finished(study(protocol))
    for index, name in enumerate(NAMES):
        X, _ = result.history(name)
        assert len(X) == MIN_OWN + 1
        assert torch.equal(X[:MIN_OWN], first_points(SPACE, index, 3, MIN_OWN, default=POINT))
        assert SPACE.from_unit(X[:1])[0] == pytest.approx(DEFAULT)


@EACH
def test_who_has_data_knows_the_default(protocol: str) -> None:
    X = uniform(1, 2, seed=1)
    result = finished(study(protocol, data={"bob": (X, hill(X))}, num_initial=MIN_OWN))
    firsts = {name: result.history(name)[0][:1] for name in NAMES}
    assert torch.equal(firsts["ann"], SPACE.snap(POINT))
    assert torch.equal(firsts["cem"], SPACE.snap(POINT))
    assert not torch.equal(firsts["bob"], SPACE.snap(POINT))


@EACH
def test_a_newcomer_evaluates_the_default_although_others_have_spoken(protocol: str) -> None:
    data = {}
    for seed, name in enumerate(NAMES[:2]):
        X = uniform(8, 2, seed=seed)
        data[name] = (X, hill(X))
    X, Y = finished(study(protocol, data=data)).history("cem")
    assert torch.equal(X[:1], SPACE.snap(POINT))
    if protocol != "dp-fts-de":  # which deals its first points in any case
        assert float(Y[1]) > float(hill(dealt_design(SPACE, 2, 3, 1)))  # where others are best
        assert protocol == "fts" or len(X) == 2


def test_of_a_query_of_two_points_the_default_is_the_first() -> None:
    result = finished(study("fts", rounds=2, q=2))
    for index, name in enumerate(NAMES):
        expected = first_points(SPACE, index, 3, 4, default=POINT)
        assert torch.equal(result.history(name)[0], expected)


@EACH
def test_a_default_among_candidates(protocol: str) -> None:
    candidates = uniform(20, 2, seed=5)
    nearest = candidates[torch.cdist(POINT, candidates).argmin()]
    result = finished(study(protocol, candidates=candidates))
    for name in NAMES:
        X, _ = result.history(name)
        assert torch.equal(X[0], nearest)
        assert len(torch.unique(X, dim=0)) == len(X)


# ------------------------------------------------------------------ what is refused


@EACH
@pytest.mark.parametrize(
    ("default", "said"),
    [
        ({"C": 1.0}, r"default: .*missing \['gamma'\], unknown \[\]"),
        ({"C": 1.0, "gamma": 0.1, "nu": 1.0}, r"default: .*unknown \['nu'\]"),
        ({"C": 1.0, "gamma": 2.0}, r"default: Parameter 'gamma' must lie in \[0.0001, 1\], got 2"),
        ({"C": "much", "gamma": 0.1}, "default: Parameter 'C' must be a number"),
    ],
)
def test_a_default_that_is_no_point_of_the_space(
    protocol: str, default: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputDataError, match=said):
        study(protocol, default=default).server(SPACE, NAMES)


@EACH
def test_a_default_beside_other_settings(protocol: str) -> None:
    with pytest.raises(InputDataError, match="default or initial_design"):
        study(protocol, initial_design=uniform(2, 2))
    with pytest.raises(InputDataError, match="num_initial must be 1 or more"):
        study(protocol, num_initial=0).server(SPACE, NAMES)
    published: dict[str, dict[str, Any]] = {
        "fts": {"strategy": Strategy()},
        "fed-gp": {"search": SupportSearch()},
        "dp-fts-de": {"strategy": Following()},
    }
    with pytest.raises(InputDataError, match="default goes with TransferSearch"):
        study(protocol, **published[protocol])
