"""A budget is the number of evaluations of each site, in every protocol."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from benchmarks.papers.published.settings import paper_settings
from botorch_fed.federation.budget import Budgeted
from botorch_fed.privacy import InsecureSeededNoise
from botorch_fed.run import RunResult, run
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.released import Following
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB
from test.cases import in_rounds, uniform
from test.federation.dp import plan_of

SPACE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
NAMES = ("ann", "bob", "cem")
NOISE = InsecureSeededNoise(0)
CHEAP: dict[str, Any] = {"num_raw": 32, "num_restarts": 2, "num_features": 32}
QUIET: dict[str, Any] = {"noise_kind": "none", "releases": (0,)}
DESIGN = uniform(2, 2, seed=5)
SUPPORT = SupportSearch(support_size=4, num_raw=32, num_restarts=2)

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")


def hill(X: Tensor) -> Tensor:
    return -(X - 0.3).square().sum(dim=-1, keepdim=True)


def played(study: Any) -> RunResult:
    return run(study, dict.fromkeys(NAMES, hill), space=SPACE, seed=0, progress=False)


def counts(result: RunResult) -> list[int]:
    return [len(result.history(name)[1]) for name in result.names]


def histories(**sizes: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        name: (X, hill(X)) for name, n in sizes.items() if (X := uniform(n, 2, seed=n)) is not None
    }


ALL = histories(ann=3, bob=4, cem=5)
SOME = histories(ann=1, bob=2, cem=4)
STUDIES: dict[str, tuple[Any, int]] = {  # and how many evaluations were asked for
    "fts": (FTS(budget=5), 5),
    "fts, two at a time": (FTS(budget=6, q=2), 6),
    "fts, no multiple": (FTS(budget=5, q=2), 5),
    "fts, less than a query": (FTS(budget=1, q=2), 1),
    "fts, a design": (FTS(budget=4, initial_design=DESIGN), 4),
    "fts, data": (FTS(budget=4, data=ALL), 4),
    "fts, less than the first points": (FTS(budget=2), 2),
    "dp-fts-de": (DPFTSDE(budget=5, **QUIET), 5),
    "dp-fts-de, two at a time": (DPFTSDE(budget=7, q=2, **QUIET), 7),
    "dp-fts-de, a design": (DPFTSDE(budget=4, initial_design=DESIGN, **QUIET), 4),
    "dp-fts-de, data": (DPFTSDE(budget=4, data=ALL, **QUIET), 4),
    "dp-fts-de, published": (
        DPFTSDE(budget=6, num_initial=3, strategy=Following(**CHEAP), data=ALL, **QUIET),
        6,
    ),
    "fed-gp": (FedGP(budget=5, channel="plain"), 5),
    "fed-gp, two at a time": (FedGP(budget=7, q=2, channel="plain"), 7),
    "fed-gp, a joint key": (FedGP(budget=5), 5),
    "fed-gp, a design": (FedGP(budget=4, channel="plain", initial_design=DESIGN), 4),
    "fed-gp, data": (FedGP(budget=4, channel="plain", data=ALL), 4),
    "fed-gp, support": (FedGP(budget=6, channel="plain", search=SUPPORT), 6),
    "fed-gp, support and data": (FedGP(budget=3, channel="plain", search=SUPPORT, data=ALL), 3),
    "private-ucb": (PrivateUCB(budget=3, noise_multiplier=1.0, noise=NOISE), 3),
}


@pytest.mark.parametrize("study", STUDIES)
def test_every_site_makes_as_many_evaluations_as_the_budget_says(study: str) -> None:
    made, budget = STUDIES[study]
    made = pickle.loads(pickle.dumps(made))
    assert made.budget == budget
    result = played(made)
    if study == "fed-gp, support and data":
        assert counts(result) == [3, 2, 2]  # bob and cem lack fewer of the four first points
    else:
        assert counts(result) == [budget] * 3
        assert made.evaluations_for(NAMES) == len(result.records)
    assert result.rounds[-1]["evaluations"] == budget


def test_a_site_with_data_leaves_out_first_points() -> None:
    for made in (
        DPFTSDE(budget=5, data=SOME, **QUIET),
        FedGP(budget=5, channel="plain", data=SOME, num_initial=3),
    ):
        assert made.initial_for(NAMES) == 2
        assert made.rounds_for(NAMES) == 3
        assert counts(played(made)) == [5, 4, 3]


def test_those_who_have_finished_do_not_count() -> None:
    made = DPFTSDE(budget=3, data={n: ALL[n] for n in NAMES[1:]}, active=NAMES[:1], **QUIET)
    assert made.evaluations_for(NAMES) == 3
    assert counts(played(made)) == [3, 0, 0]


@pytest.mark.parametrize(
    ("budget", "batch", "rounds", "expected"),
    [(4, 3, 4, [4, 4, 4]), (4, 2, 6, [4, 4, 4]), (3, 2, 4, [3, 3, 2]), (2, 1, 6, [2, 2, 2])],
)
def test_a_bandit_asks_nobody_more_often_than_its_budget(
    budget: int, batch: int, rounds: int, expected: list[int]
) -> None:
    made = PrivateUCB(budget=budget, batch=batch, noise_multiplier=1.0, noise=NOISE)
    terms = made.server(SPACE, NAMES).terms
    stream: Any = terms.aggregation
    assert (stream.rounds(terms), made.rounds_for(NAMES)) == (rounds, rounds)
    assert stream.participations(terms) == budget
    result = played(made)
    assert counts(result) == expected
    assert made.evaluations_for(NAMES) == sum(expected)


# ------------------------------------------------------------------ the former keyword


@pytest.mark.parametrize(
    ("kind", "options", "budget"),
    [
        (FTS, {"rounds": 20}, 20),
        (FTS, {"rounds": 20, "q": 2}, 40),
        (FTS, {"rounds": 20, "num_initial": 5}, 20),
        (DPFTSDE, {"rounds": 20, "epsilon": 2.0}, 23),
        (DPFTSDE, {"rounds": 20, "epsilon": 2.0, "num_initial": 0}, 20),
        (DPFTSDE, {"rounds": 20, "epsilon": 2.0, "strategy": Following()}, 30),
        (DPFTSDE, {"rounds": 20, "epsilon": 2.0, "active": ("a",)}, 20),
        (DPFTSDE, {"rounds": 20, "epsilon": 2.0, "initial_design": DESIGN}, 22),
        (FedGP, {"rounds": 20}, 23),
        (FedGP, {"rounds": 20, "search": RegionSearch()}, 24),
        (FedGP, {"rounds": 20, "data": {"a": ALL["ann"]}}, 20),
        (FedGP, {"rounds": 20, "initial_design": {"a": DESIGN, "b": DESIGN}}, 22),
        (PrivateUCB, {"rounds": 20, "epsilon": 1.0}, 20),
    ],
)
def test_rounds_says_the_budget_of_the_same_study(
    kind: type[Budgeted], options: dict[str, Any], budget: int
) -> None:
    with pytest.raises(InputDataError) as caught:
        kind(**options)
    assert str(caught.value) == (
        "rounds is now budget, evaluations per site with the initial ones: "
        f"write budget = {budget}."
    )
    rest = {key: value for key, value in options.items() if key != "rounds"}
    assert kind(**rest, budget=budget).rounds_for(("a", "b")) == 20  # type: ignore[call-arg]


def test_rounds_of_a_part_of_the_agents() -> None:
    with pytest.raises(InputDataError, match="budget = 14 / the number of agents, rounded up"):
        PrivateUCB(rounds=7, batch=2, epsilon=1.0)  # type: ignore[call-arg]
    assert PrivateUCB.budget_of(7, NAMES, {"batch": 2}) == 5
    with pytest.raises(InputDataError, match="write budget = the number of evaluations"):
        FTS(rounds=None)  # type: ignore[call-arg]


# ------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FTS(budget=0), "Expected budget >= 1, the number of evaluations of each site"),
        (lambda: FedGP(budget=-1), "got -1"),
        (lambda: PrivateUCB(budget=True, epsilon=1.0), "got True"),
        (lambda: DPFTSDE(budget=2.0, epsilon=1.0), "got 2.0"),  # type: ignore[arg-type]
        (lambda: FTS(budget=3, num_initial=4), "budget = 3 has no room for 4 initial points"),
        (lambda: FTS(budget=1, initial_design=DESIGN), "no room for 2 initial points"),
        (lambda: DPFTSDE(budget=2, epsilon=1.0), "write budget = 4 or more, or fewer initial"),
        (lambda: FedGP(budget=2), "budget = 2 has no room for 3 initial points"),
        (lambda: FedGP(budget=1, initial_design=DESIGN), "no room for 2 initial points"),
        (
            lambda: FedGP(budget=1, num_initial=3, data=SOME).server(SPACE, NAMES),
            "budget = 1 has no room for 2 initial points",
        ),
    ],
)
def test_a_budget_that_does_not_fit_is_refused_with_the_numbers(make: Any, said: str) -> None:
    with pytest.raises(InputDataError, match=said):
        make()


def test_first_points_of_data_are_not_asked_for_room() -> None:
    made = DPFTSDE(budget=1, data=ALL, **QUIET)
    assert plan_of(made.server(SPACE, NAMES)).rounds == 1


def test_the_papers_count_rounds() -> None:
    made = paper_settings(2, rounds=7, num_initial=4)
    assert (made.budget, made.rounds_for(NAMES)) == (11, 7)
    assert in_rounds(FTS, {"rounds": 3, "q": 2}).budget == 6


def test_the_number_of_evaluations_fixes_the_points() -> None:
    """A larger budget does not change the points of a smaller one."""
    options: dict[str, Mapping[str, Any]] = {
        "fts": {"strategy": Strategy(own="random"), "every": 1},
        "fed": {"channel": "plain"},
    }
    for kind, given in ((FTS, options["fts"]), (FedGP, options["fed"])):
        short = played(kind(budget=4, **given))  # type: ignore[arg-type]
        long = played(replace(kind(budget=4, **given), budget=6))  # type: ignore[arg-type]
        for name in NAMES:
            assert torch.equal(short.history(name)[0], long.history(name)[0][:4])
