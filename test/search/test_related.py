"""The default search of sums in many dimensions: one function for all, or each site's own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from botorch_fed.search.region import (
    RegionSearch,
    contribution,
    first_plan,
    read_sum,
    relatedness,
)
from botorch_fed.search.related import (
    FEWEST_SITES,
    FINE,
    LEAST,
    MOST_SUMMED,
    PRIOR,
    RelatedMemory,
    RelatedSum,
    _nearest,
    _scaled_plan,
    _votes,
    counted_most,
    enough,
    probability,
)
from botorch_fed.search.sums import TransferSum
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import FedGP
from botorch_fed.wire.codec import decode, encode
from test.aggregation.harness import (
    NAMES,
    SQUARE,
    Federation,
    Hill,
    finished,
    ran,
    study,
    trace,
)
from test.cases import normal, uniform

REGION = RegionSearch(num_inducing=4, num_candidates=2, num_raw=32, given=MOST_SUMMED)
SMALL = RelatedSum(region=REGION)
FOUR = (*NAMES, "dee")


def cube(dim: int) -> SearchSpace:
    return SearchSpace(tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(dim)))


def memory_of(federation: Federation, name: str) -> RelatedMemory:
    found: RelatedMemory = federation.sites[name].state.search
    return found


def driven(centres: tuple[float, float, float], rounds: int, **options: Any) -> Federation:
    """A run of three hills."""
    federation = Federation(study(SMALL, rounds=rounds, **options))
    for name, centre in zip(NAMES, centres, strict=True):
        federation.sites[name].objective = Hill(centre)
    federation.drive()
    return federation


# ------------------------------------------------------------------ who has it


@pytest.mark.parametrize(("dim", "size"), [(8, 16_813), (10, 24_121), (15, 58_036)])
def test_the_default_in_many_dimensions(dim: int, size: int) -> None:
    terms = FedGP(budget=5).terms(cube(dim), FOUR)
    assert isinstance(terms.search, RelatedSum)
    assert terms.search.size(terms) == size
    assert f"{size} numbers" in str(FedGP(budget=5).sees(cube(dim), FOUR))


def test_less_than_four_sites_add_no_summaries_unless_asked_to() -> None:
    usual, short, asked = (FedGP(budget=5, common=common) for common in (None, False, True))
    for names in (FOUR, NAMES, NAMES[:2]):
        terms = [study.terms(cube(10), names) for study in (usual, short, asked)]
        kind, *others = ((t.search.size(t), t.search.bound(t)) for t in terms)  # type: ignore[attr-defined]
        assert kind == others[names == FOUR]
        assert ("summaries" in str(usual.sees(cube(10), names))) == (names == FOUR)
        assert "summaries" in str(asked.sees(cube(10), names))
    few = Federation(study(replace(SMALL, held=True)))
    few.drive()
    alone = Federation(study(TransferSearch()))
    alone.drive()
    for name in NAMES:
        assert torch.equal(few.sites[name].state.X, alone.sites[name].state.X)


def test_no_roster_has_less_than_four_sites_where_summaries_are_held() -> None:
    terms = {
        common: FedGP(budget=5, common=common).terms(cube(10), FOUR) for common in (None, True)
    }
    least = {common: t.aggregation.least_agents(t) for common, t in terms.items()}  # type: ignore[attr-defined]
    assert least == {None: FEWEST_SITES, True: 2}


@pytest.mark.parametrize(
    ("dim", "options"),
    [
        (7, {}),
        (16, {}),
        (10, {"common": False}),
        (10, {"active": NAMES[:1]}),
        (10, {"sums": 1}),
        (10, {"min_agents": 3}),
    ],
)
def test_elsewhere_messages_are_short(dim: int, options: dict[str, Any]) -> None:
    terms = FedGP(budget=5, **options).terms(cube(dim), FOUR)
    assert type(terms.search) is TransferSum


@pytest.mark.parametrize("common", [True, False])
def test_other_searches_have_no_short_form(common: bool) -> None:
    with pytest.raises(InputDataError, match="common is for"):
        FedGP(budget=9, search=RegionSearch(), common=common)


def test_a_region_of_no_observations_is_refused() -> None:
    with pytest.raises(InputDataError, match=r"region\.given >= 1"):
        study(RelatedSum(region=RegionSearch())).terms(SQUARE, NAMES)


def test_a_larger_budget_changes_no_word() -> None:
    words = [FedGP(budget=budget).terms(cube(10), NAMES).words for budget in (5, 500)]
    assert words[0] == words[1]


# ------------------------------------------------------------------ the probability


def test_what_others_have_found_is_the_prior_probability() -> None:
    assert probability(0.0, 0.0, 0.0, 3) == pytest.approx(PRIOR)
    assert probability(0.0, 50.0, 50.0, 51) > 0.9
    assert probability(0.0, 0.0, 50.0, 51) == pytest.approx(2 * PRIOR / 52)
    assert probability(0.0, 0.0, 1e4, 1e4 + 1) == pytest.approx(LEAST)  # type: ignore[arg-type]
    assert probability(9.0, 0.0, 0.0, 3) > 0.99
    assert probability(-math.inf, 3.0, 3.0, 4) < 1e-9
    gains = [probability(gain, 1.0, 2.0, 3) for gain in (-3.0, -1.0, 0.0, 2.0)]
    assert gains == sorted(gains)


@pytest.mark.parametrize(("found", "count"), [(-1.0, 2.0), (3.0, 2.0), (2.0, 7.0)])
def test_what_nobody_can_have_found_counts_for_nothing(found: float, count: float) -> None:
    assert probability(0.0, found, count, 3) == pytest.approx(PRIOR)


@pytest.mark.parametrize("alike", [True, False])
def test_evidence_tells_one_function_from_several(alike: bool) -> None:
    search = replace(REGION, num_inducing=12)
    plan = first_plan(search, 2)
    parts = []
    for n in range(3):
        X = uniform(12, 2, seed=n)
        centre = 0.4 if alike else (0.1, 0.5, 0.9)[n]
        parts.append(contribution(search, plan, X, Hill(centre)(X)))
    total = torch.stack(parts).sum(dim=0)
    read = read_sum(search, plan, total, num_agents=3, rounds=None)
    gains = [relatedness(search, read, total, part) for part in parts]
    assert all(gain > 3 for gain in gains) if alike else all(gain < -3 for gain in gains)
    assert relatedness(search, read, total, total) == 0  # nobody else
    assert relatedness(search, read, total, torch.zeros_like(total)) == 0
    nonsense = total.clone()
    nonsense[:5] = 1e9
    assert relatedness(search, read, total, nonsense) == 0


def test_the_region_shrinks_with_observations() -> None:
    widths = [REGION.half_width_of(n, 10) for n in (0, 99, 200, 400, 528, 10**6)]
    assert widths[:2] == [0.5, 0.5]
    assert widths == sorted(widths, reverse=True)
    assert widths[-2:] == pytest.approx([REGION.final_half_width] * 2)
    assert REGION.half_width_of(300, 20) == 0.5


# ------------------------------------------------------------------ the scale


@given(st.floats(-1e6, 1e6), st.integers(-250, 250))
@settings(max_examples=30, deadline=None)
def test_the_scale_is_that_of_the_sites(shift: float, magnitude: int) -> None:
    factor = 10.0**magnitude
    outcomes = [factor * (shift + normal(6, 1, seed=n)) for n in range(3)]
    said = torch.stack([_votes(Y) for Y in outcomes]).sum(dim=0)
    plan = _scaled_plan(REGION, 2, 0, said)
    assert plan is not None
    assert plan.t == 1
    # Means of logarithms, rounded to the grid: near, no more.
    deviations = [float((Y / factor).std()) for Y in outcomes]
    assert min(deviations) <= 1.01 * plan.scale / factor <= 1.02 * max(deviations)
    assert abs(plan.mean / factor - shift) < max(deviations) + abs(shift)


def test_who_has_no_scale_does_not_vote() -> None:
    for Y in (torch.zeros(5, 1), torch.ones(5, 1), torch.ones(1, 1), torch.ones(0, 1)):
        assert not bool(_votes(Y.double()).any())
    assert _scaled_plan(REGION, 2, 0, torch.zeros(3).double()) is None


def test_one_stretched_site_moves_the_scale_by_its_share() -> None:
    honest = torch.stack([_votes(normal(6, 1, seed=n)) for n in range(9)]).sum(dim=0)
    plan = _scaled_plan(REGION, 2, 0, honest)
    stretched = _scaled_plan(REGION, 2, 0, honest + _votes(1e4 * normal(6, 1, seed=9)))
    assert plan is not None
    assert stretched is not None
    assert stretched.scale / plan.scale == pytest.approx(1e4**0.1, rel=0.3)
    assert abs(stretched.mean - plan.mean) < plan.scale


@given(st.floats(-1e12, 1e12), st.floats(1e-3, 1e12), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_wild_outcomes_stay_within_the_bound(shift: float, spread: float, seed: int) -> None:
    terms = FedGP(budget=5, search=SMALL, channel="plain").terms(SQUARE, NAMES)  # type: ignore[arg-type]
    bound = SMALL.bound(terms)
    plan = first_plan(REGION, 2)
    X, Y = uniform(8, 2, seed=seed), shift + spread * normal(8, 1, seed=seed)
    values = contribution(REGION, plan, *_nearest(plan, X, Y, MOST_SUMMED))
    assert bool(values.isfinite().all())
    assert float(values.abs().max()) <= bound
    assert float(_votes(Y).abs().max()) <= bound


def test_of_many_observations_the_nearest_are_added() -> None:
    X = uniform(MOST_SUMMED + 50, 2)
    plan = replace(first_plan(REGION, 2), centre=torch.tensor([0.2, 0.2]).double())
    near, Y = _nearest(plan, X, X[:, :1], MOST_SUMMED)
    assert len(near) == len(Y) == MOST_SUMMED
    assert torch.equal(near[:, :1], Y)
    farthest = (near - 0.2).abs().amax(dim=-1).max()
    assert int(((X - 0.2).abs().amax(dim=-1) > farthest).sum()) == 50


# ------------------------------------------------------------------ in a federation


@pytest.fixture(scope="module")
def plain() -> str:
    return trace(ran(study(SMALL, rounds=4)))


@pytest.mark.parametrize("channel", ["ckks", "threshold"])
def test_encrypted_sums_lead_to_the_same_points(channel: Any, plain: str) -> None:
    assert trace(ran(study(SMALL, rounds=4, channel=channel))) == plain


def test_sites_find_out_whether_they_have_one_function() -> None:
    alike = driven((0.4, 0.4, 0.4), 6)
    assert all(memory_of(alike, name).trust > 0.9 for name in NAMES)
    best = max(float(site.state.Y.max()) for site in alike.sites.values())
    assert best > 1 - 1e-3
    unlike = driven((0.1, 0.5, 0.9), 6)
    assert all(memory_of(unlike, name).trust < 0.1 for name in NAMES)
    assert all(memory_of(unlike, name).compared for name in NAMES)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_held_summaries_wait_for_observations(rounds: int) -> None:
    """Four sites begin with three observations; each has to have four for ten features."""
    federation = Federation(study(replace(SMALL, held=True), rounds=rounds), names=FOUR)
    federation.drive()
    numbers = REGION.size(federation.sites["ann"].agent.terms)  # type: ignore[attr-defined]
    for name in FOUR:
        added = federation.sites[name].state.aggregation.drawn[-5 - numbers : -5]
        assert len(federation.sites[name].state.X) == 3 + rounds
        assert bool(added.any()) == (rounds == 3)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_enough_leaves_everybody_as_many_of_others_as_there_are_features(counts: list[int]) -> None:
    search, space = RegionSearch(given=MOST_SUMMED), cube(10)
    terms = FedGP(budget=5, channel="plain").terms(
        space, tuple(f"site {i}" for i in range(len(counts)))
    )
    most = counted_most(search, terms)
    counted = float(sum(min(count, most) for count in counts))
    if enough(search, terms, counted, len(counts)):
        assert len(counts) >= FEWEST_SITES
        assert sum(counts) - max(counts) >= search.num_features(10)
    assert not enough(search, terms, len(counts) * most + 1.0, len(counts))
    equal = len(counts) * most
    assert enough(search, terms, float(equal), len(counts)) == (len(counts) >= FEWEST_SITES)


def test_a_hostile_site_costs_the_others_their_trust() -> None:
    class Hostile(Hill):
        def __call__(self, X: Tensor) -> Tensor:
            return -1e4 * super().__call__(X)

    federation = Federation(study(SMALL, rounds=6))
    for name, kind in zip(NAMES, (Hill, Hill, Hostile), strict=True):
        federation.sites[name].objective = kind(0.4)
    federation.drive()
    for name in NAMES[:2]:
        assert memory_of(federation, name).trust < 0.5
        assert float(federation.sites[name].state.Y.max()) > 0.97


def test_a_stretched_federation_searches_alike() -> None:
    """To rounding; votes are rounded to the grid."""

    class Stretched(Hill):
        def __call__(self, X: Tensor) -> Tensor:
            return 1e4 * super().__call__(X) - 3e4

    federations = []
    for kind in (Hill, Stretched):
        federation = Federation(study(SMALL, rounds=3))
        for name in NAMES:
            federation.sites[name].objective = kind(0.4)
        federation.drive()
        federations.append(federation)
    for name in NAMES:
        here, there = (federation.sites[name].state.X for federation in federations)
        assert torch.allclose(here, there, atol=1e-3)


def test_who_does_not_listen_searches_alone() -> None:
    alone = TransferSearch(listen=False)
    ours = Federation(study(replace(SMALL, strategy=alone)))
    ours.drive()
    theirs = Federation(study(alone))
    theirs.drive()
    for name in NAMES:
        assert torch.equal(ours.sites[name].state.X, theirs.sites[name].state.X)


def test_a_resumed_site_knows_the_region() -> None:
    federation = finished(study(SMALL))
    state = federation.sites["ann"].state
    again = decode(encode(state), type(state)).search
    known = memory_of(federation, "ann")
    assert known.region is not None
    assert known.said is not None
    assert torch.equal(again.region.total, known.region.total)
    assert torch.equal(again.region.plan.centre, known.region.plan.centre)
    assert known.said.mine is not None
    assert torch.equal(again.said.mine, known.said.mine)
    assert (again.t, again.trust, again.compared) == (known.t, known.trust, known.compared)


def test_a_site_that_was_away_reads_the_sums_in_order() -> None:
    federation = Federation(
        study(SMALL, rounds=5), absent=lambda name, order: name == "bob" and order.t in (2, 3)
    )
    federation.drive()
    ann, bob = (memory_of(federation, name) for name in ("ann", "bob"))
    assert ann.region is not None
    assert bob.region is not None
    assert ann.t == bob.t
    assert torch.equal(ann.region.plan.centre, bob.region.plan.centre)
    assert ann.region.plan.scale == bob.region.plan.scale


def test_votes_are_fine_enough() -> None:
    terms = FedGP(budget=5).terms(cube(15), FOUR)
    step = terms.search.bound(terms) * terms.search.precision(1000) / FINE  # type: ignore[attr-defined]
    assert step < 1e-4
