"""The default search: what a site says, what it does with what others say, where all begin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.analytic import LogExpectedImprovement, UpperConfidenceBound
from botorch.exceptions.errors import InputDataError
from botorch.models import SingleTaskGP
from torch import Tensor

from botorch_fed.federation.base import Objective
from botorch_fed.federation.points import (
    dealt_design,
)
from botorch_fed.federation.terms import Order
from botorch_fed.models.earned_prior import (
    TRUSTS,
    PriorFunction,
    fit_earned,
    project,
    reference_features,
    reference_points,
)
from botorch_fed.models.features import WarpedFeatures
from botorch_fed.rng import generator
from botorch_fed.search.transfer import (
    APART,
    MAX_SPREAD,
    MIN_OWN,
    Advice,
    TransferSearch,
    bounded,
    default_feature_map,
    pack_report,
    prior_of_sum,
    report_size,
    unpack_sum,
)
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FTS
from botorch_fed.wire.codec import encode
from test.cases import normal, random_fourier, uniform
from test.federation.test_fts import NAMES, SQUARE, Federation, hill, patterns, valley

PHI = random_fourier()
MIXED = SearchSpace((
    Parameter.real("rate", 1e-4, 1.0),
    Parameter.integer("depth", 1, 5),
    Parameter.choice("kind", ["a", "b", "c"]),
))  # fmt: skip
SEARCH = TransferSearch()
DEAF = TransferSearch(listen=False)


def history(n: int, *, seed: int = 0, d: int = 2) -> tuple[Tensor, Tensor]:
    X = uniform(n, d, seed=seed)
    return X, hill(X) + 0.05 * normal(n, 1, seed=seed)


@cache
def good_prior(sign: float = 1.0) -> PriorFunction:
    prior = PriorFunction.of_weights(PHI, sign * project(lambda X: hill(X).numpy()[:, 0], PHI))
    assert prior is not None
    return prior


def no_points(d: int = 2) -> Tensor:
    return torch.zeros(0, d).double()


def point(
    X: Tensor,
    Y: Tensor,
    prior: PriorFunction | None = None,
    *,
    search: TransferSearch = SEARCH,
    space: SearchSpace = SQUARE,
    chosen: Tensor | None = None,
    candidates: Tensor | None = None,
    failed: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    return search.point(
        space,
        X,
        Y,
        None if prior is None else Advice(prior),
        chosen=no_points(space.dim) if chosen is None else chosen,
        candidates=candidates,
        stream=generator(seed, "point"),
        failed=failed,
    )


def said(X: Tensor, Y: Tensor) -> Tensor:
    message = SEARCH.message(SQUARE, PHI, X, Y)
    assert message is not None
    return message


# ------------------------------------------------------------------ the shared basis


@pytest.mark.parametrize("dim", [1, 3, 6, 20, 50])
def test_the_basis_holds_squares_of_every_input(dim: int) -> None:
    space = SearchSpace(tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(dim)))
    X, top = uniform(500, dim, seed=1), uniform(1, dim, seed=2)

    def bowl(points: Tensor) -> Any:
        return -(points - top).square().sum(dim=-1).numpy()

    phi = default_feature_map(space)
    found = PriorFunction.of_weights(phi, project(bowl, phi))
    assert found is not None
    y = torch.from_numpy(bowl(X))
    assert 1 - float(torch.corrcoef(torch.stack([found(X), y]))[0, 1]) < (
        5e-3 if dim <= 20 else 2e-2
    )


def test_a_smooth_basis_has_no_more_functions_than_it_needs() -> None:
    sizes = [
        default_feature_map(
            SearchSpace(tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(dim)))
        ).num_features
        for dim in (1, 2, 4, 60)
    ]
    assert sizes[0] < sizes[1] < sizes[2] == 100 < sizes[3] == 181


# ------------------------------------------------------------------ what a site says


def test_a_message_is_the_own_mean_over_the_shared_basis() -> None:
    X, Y = history(8)
    values = reference_features(PHI) @ said(X, Y)
    mean = torch.from_numpy(fit_earned(X, Y).predict(reference_points(2))[0])
    # A projection: what it leaves open, the basis cannot hold.
    assert float((values - mean).std()) < 0.1 * float(mean.std())
    assert float((values @ hill(reference_points(2))).squeeze()) > 0


def test_who_has_seen_too_little_says_nothing() -> None:
    for n in range(MIN_OWN):
        assert SEARCH.message(SQUARE, PHI, *history(n)) is None
    assert said(*history(MIN_OWN)).shape == (PHI.num_features,)


def test_what_a_site_says_of_its_function_does_not_depend_on_what_it_hears() -> None:
    # Nobody is told a rumour as if it were an observation.
    X, Y = history(6)
    alone, told, misled = (
        SEARCH.report(SQUARE, PHI, X, Y, None if prior is None else Advice(prior))
        for prior in (None, good_prior(), good_prior(-1.0))
    )
    assert alone is not None
    assert told is not None
    assert misled is not None
    M = PHI.num_features
    assert len(alone) == report_size(PHI)
    for report in (alone, told, misled):
        assert torch.equal(report[:M], said(X, Y))
    # It says how far it trusts what it hears: not at all, if it hears nothing.
    assert float(alone[M:].abs().max()) == 0
    for report in (told, misled):
        assert float(report[M:].min()) >= 0
        assert float(report[M:].sum()) == pytest.approx(1.0)
    assert float(told[M]) < float(misled[M])
    deaf = DEAF.report(SQUARE, PHI, X, Y, Advice(good_prior()))
    assert deaf is not None
    assert torch.equal(deaf, alone)
    assert SEARCH.report(SQUARE, PHI, X[:2], Y[:2], Advice(good_prior())) is None


def test_others_experience_with_the_crowd_counts() -> None:
    X, Y = history(MIN_OWN)
    for prior in (good_prior(), good_prior(-1.0)):
        trusts = []
        for lesson in (torch.tensor([9.0, 0, 0, 0, 0]), None, torch.tensor([0.0, 0, 0, 0, 9])):
            advice = Advice(prior, None if lesson is None else lesson.double())
            report = SEARCH.report(SQUARE, PHI, X, Y, advice)
            assert report is not None
            trusts.append(float(report[PHI.num_features]))
        assert trusts[0] > trusts[1] > trusts[2]  # of no trust


@pytest.mark.parametrize("factor", [2.0**-600, 2.0**-13, 2.0**13, 2.0**600])
def test_a_unit_that_is_a_power_of_two_changes_no_bit(factor: float) -> None:
    X, Y = history(7)
    assert torch.equal(said(X, factor * Y), said(X, Y))
    assert torch.equal(said(X, -factor * Y), -said(X, Y))
    for prior in (None, good_prior()):
        assert torch.equal(point(X, factor * Y, prior), point(X, Y, prior))


@pytest.mark.parametrize("factor", [1e-200, 1e-4, 1.0, 1e4, 1e200])
@pytest.mark.parametrize("shift", [0.0, -7.0, 1e6])
def test_units_and_zeros_do_not_matter(factor: float, shift: float) -> None:
    X, Y = history(7)
    moved = factor * (Y + shift)
    # Rounding of outcomes near the shift moves the end of a fit a little.
    torch.testing.assert_close(said(X, moved), said(X, Y), rtol=0, atol=1e-4)
    found, expected = (point(X, y, good_prior()) for y in (moved, Y))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e200])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_equal_outcomes_are_no_obstacle(value: float, n: int) -> None:
    X, Y = uniform(n, 2), torch.full((n, 1), value, dtype=torch.float64)
    for prior in (None, good_prior()):
        found = point(X, Y, prior)
        assert bool(((found >= 0) & (found <= 1)).all())
        assert float(torch.cdist(found, X).min()) > 1e-3
    if n >= MIN_OWN:  # and nobody is told anything
        assert float((reference_features(PHI) @ said(X, Y)).abs().max()) < 1e-9


def test_the_same_point_many_times_is_no_obstacle() -> None:
    X = uniform(1, 2).repeat(6, 1)
    found = point(X, normal(6, 1), good_prior())
    assert bool(torch.isfinite(found).all())
    assert bool(torch.isfinite(said(X, normal(6, 1))).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_outcome_that_is_none_is_refused(bad: float) -> None:
    X, Y = history(5)
    Y[2] = bad
    with pytest.raises(InputDataError, match="finite"):
        point(X, Y)
    with pytest.raises(InputDataError, match="finite"):
        said(X, Y)


# ------------------------------------------------------------------ where it looks


def test_the_same_stream_gives_the_same_point() -> None:
    X, Y = history(6)
    assert torch.equal(point(X, Y, good_prior()), point(X, Y, good_prior()))
    assert not torch.equal(point(X, Y, good_prior()), point(X, Y, good_prior(), seed=1))


def test_who_does_not_listen_or_trust_is_alone() -> None:
    alone = TransferSearch(trusts=(0.0,), trust_prior=(1.0,))
    for n in (MIN_OWN, 8):
        X, Y = history(n)
        expected = point(X, Y)
        assert torch.equal(point(X, Y, good_prior(), search=alone), expected)
        assert torch.equal(point(X, Y, good_prior(), search=DEAF), expected)
    # Not even of where to begin.
    nothing = no_points(), torch.zeros(0, 1).double()
    assert torch.equal(point(*nothing, good_prior(), search=DEAF), point(*nothing))


def test_what_others_say_matters() -> None:
    X, Y = history(MIN_OWN)
    found = [point(X, Y, prior) for prior in (None, good_prior(), good_prior(-1.0))]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert float(hill(found[1])) > 0.8  # they know where the top is


def test_a_newcomer_begins_where_the_prior_is_largest() -> None:
    X, Y = no_points(), torch.zeros(0, 1).double()
    everywhere = good_prior().values(uniform(5000, 2, seed=3))
    first = point(X, Y, good_prior())
    assert good_prior().values(first)[0] > np.quantile(everywhere, 0.99)
    tried = first
    for n in range(1, 6):  # and goes on with its own model
        tried = torch.cat([tried, point(tried, hill(tried), good_prior(), seed=n)])
    apart = torch.cdist(tried, tried) + 10 * torch.eye(len(tried))
    assert float(apart.min()) > 0.01
    assert float(hill(tried).max()) > 0.95


def test_what_nobody_has_tested_is_met_with_caution() -> None:
    X, Y = history(MIN_OWN)
    tested = torch.tensor([0.1, 0.1, 0.1, 0.1, 4.6]).double()
    prior = good_prior()
    draws = {
        name: {
            tuple(
                SEARCH.point(
                    SQUARE,
                    X,
                    Y,
                    Advice(prior, trust),
                    chosen=no_points(),
                    candidates=uniform(300, 2, seed=8),
                    stream=generator(n, "caution"),
                )[0].tolist()
            )
            for n in range(12)
        }
        for name, trust in (("nobody", None), ("not yet", torch.zeros(5).double()), ("all", tested))
    }
    assert len(draws["nobody"]) > 1  # one trust is drawn for each query
    assert len(draws["not yet"]) == 1  # the average over trusts, whatever the stream
    assert len(draws["all"]) == 1


def anywhere(found: set[tuple[float, ...]], candidates: Tensor) -> bool:
    """Whether random points are among some: more than models of a few trusts would choose."""
    return len(found) > len(TRUSTS) and len(found) <= len(candidates)


@pytest.mark.parametrize(("n", "random"), [(1, True), (MIN_OWN - 1, True), (MIN_OWN, False)])
def test_who_trusts_nobody_yet_looks_anywhere(n: int, random: bool) -> None:
    candidates, (X, Y) = uniform(40, 2, seed=8), history(n)

    def points(failed: Tensor) -> set[tuple[float, ...]]:
        found = (
            SEARCH.point(
                SQUARE,
                X,
                Y,
                Advice(good_prior(), None),
                chosen=no_points(),
                candidates=candidates,
                stream=generator(k, "anywhere"),
                failed=failed,
            )
            for k in range(60)
        )
        return {tuple(one[0].tolist()) for one in found}

    assert anywhere(points(no_points()), candidates) == random
    # Where evaluations fail, what may succeed is looked for.
    assert not anywhere(points(candidates[:4]), candidates)


def test_who_looks_anywhere_asks_nothing_twice() -> None:
    space = SearchSpace((Parameter.integer("n", 1, 4),))
    X = space.bounds.double()
    prior = PriorFunction.of_weights(
        default_feature_map(space), project(lambda Z: Z[:, 0].numpy(), default_feature_map(space))
    )
    assert prior is not None
    for k in range(40):
        found = SEARCH.point(
            space,
            X,
            X,
            Advice(prior, None),
            chosen=X[:0],
            candidates=None,
            stream=generator(k, "twice"),
        )
        assert not bool((X == found).all(dim=-1).any())


def test_a_newcomers_query_of_several_points_keeps_them_apart() -> None:
    X, Y = no_points(), torch.zeros(0, 1).double()
    chosen = X
    for slot in range(2):
        chosen = torch.cat([chosen, point(X, Y, good_prior(), chosen=chosen, seed=slot)])
    assert float((chosen[0] - chosen[1]).norm()) >= APART


def test_points_of_a_query_differ() -> None:
    X, Y = history(6)
    chosen = no_points()
    for slot in range(3):
        chosen = torch.cat([chosen, point(X, Y, good_prior(), chosen=chosen, seed=slot)])
    assert float((torch.cdist(chosen, chosen) + 10 * torch.eye(3)).min()) > 0.01


@pytest.mark.parametrize("start", [0, 2, 4])
def test_of_a_list_no_candidate_comes_twice(start: int) -> None:
    candidates = uniform(9, 2, seed=4)
    X = candidates[:start]
    while len(X) < 9:
        found = point(X, hill(X), good_prior(), candidates=candidates, seed=len(X))
        assert bool((candidates == found).all(dim=-1).any())
        assert not bool((X == found).all(dim=-1).any())
        X = torch.cat([X, found])
    again = point(X, hill(X), good_prior(), candidates=candidates)
    assert bool((candidates == again).all(dim=-1).any())


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("listens", [False, True])
def test_mixed_spaces(n: int, listens: bool) -> None:
    phi = default_feature_map(MIXED)
    assert isinstance(phi, WarpedFeatures)  # the rate acts by its ratio
    X = MIXED.snap(uniform(n, MIXED.dim))
    Y = -(X[:, :1].clamp_min(1e-3).log() + 3).square() + X[:, 2:3]
    prior = PriorFunction.of_weights(phi, normal(phi.num_features)) if listens else None
    found = point(X, Y, prior, space=MIXED)
    assert torch.equal(MIXED.snap(found), found)
    if n >= MIN_OWN:
        message = SEARCH.message(MIXED, phi, X, Y)
        assert message is not None
        assert message.shape == (phi.num_features,)


def test_a_small_rate_is_seen_on_its_own_scale() -> None:
    # The best rate is 1e-3, one hundredth of the cube away from none: the warp finds it.
    line = SearchSpace((Parameter.real("rate", 1e-4, 1.0),))

    def f(X: Tensor) -> Tensor:
        return -(torch.log10(1e-4 + X * (1 - 1e-4)) + 3).square()

    X = torch.linspace(0, 1, 4).double().unsqueeze(-1)
    for t in range(8):
        X = torch.cat([X, point(X, f(X), space=line, seed=t)])
    assert float(f(X).max()) > -0.01


# ------------------------------------------------------------------ an acquisition passed in


def log_improvement(model: SingleTaskGP, X: Tensor) -> AcquisitionFunction:
    """BoTorch's, over the best posterior mean."""
    with torch.no_grad():
        return LogExpectedImprovement(model, best_f=model.posterior(X).mean.max())


def confidence(model: SingleTaskGP, X: Tensor) -> AcquisitionFunction:
    return UpperConfidenceBound(model, beta=4.0)


def test_an_acquisition_passed_in_is_what_is_maximised() -> None:
    X, Y = history(6)
    own = point(X, Y)
    torch.testing.assert_close(
        point(X, Y, search=TransferSearch(acquisition=log_improvement)), own, rtol=0, atol=0.02
    )
    found = point(X, Y, search=TransferSearch(acquisition=confidence))
    model = fit_earned(X, Y).model(0)
    values = UpperConfidenceBound(model, beta=4.0)(uniform(2000, 2, seed=5).unsqueeze(-2))
    best = UpperConfidenceBound(model, beta=4.0)(found.unsqueeze(-2))
    assert float(best) >= float(values.max()) - 1e-3


def test_an_acquisition_sees_the_outcomes_as_they_are() -> None:
    X, Y = history(6)
    seen: list[tuple[SingleTaskGP, Tensor]] = []

    def spy(model: SingleTaskGP, tried: Tensor) -> AcquisitionFunction:
        seen.append((model, tried))
        return log_improvement(model, tried)

    first = point(X, 1000 + 50 * Y, search=TransferSearch(acquisition=spy))
    point(X, 1000 + 50 * Y, chosen=first, search=TransferSearch(acquisition=spy))
    (model, tried), (after, more) = seen
    assert torch.equal(tried, X)
    assert torch.equal(more, torch.cat([X, first]))
    with torch.no_grad():
        error = model.posterior(X).mean - (1000 + 50 * Y)
        assert float(error.abs().max()) < 50
        # Points that the same query has already count as seen, at the mean.
        assert float(after.posterior(first).variance) < 0.5 * float(model.posterior(first).variance)


def test_with_an_acquisition_points_of_a_query_differ() -> None:
    X, Y = history(6)
    search = TransferSearch(acquisition=log_improvement)
    first = point(X, Y, search=search)
    second = point(X, Y, search=search, chosen=first)
    assert float((first - second).norm()) > 0.02


@pytest.mark.parametrize("candidates", [None, uniform(20, 2, seed=4)], ids=["box", "list"])
def test_an_acquisition_in_a_mixed_space_and_over_a_list(candidates: Tensor | None) -> None:
    search = TransferSearch(acquisition=log_improvement)
    if candidates is not None:
        X = candidates[:4]
        found = point(X, hill(X), good_prior(), search=search, candidates=candidates)
        assert bool((candidates[4:] == found).all(dim=-1).any())
        return
    X = MIXED.snap(uniform(5, MIXED.dim))
    found = point(X, X[:, :1], search=search, space=MIXED)
    assert torch.equal(MIXED.snap(found), found)


def test_settings_are_the_same_in_every_process() -> None:
    settings = [
        SEARCH,
        DEAF,
        TransferSearch(warp=False),
        TransferSearch(trusts=(0.0, 1.0), trust_prior=(0.5, 0.5)),
        TransferSearch(acquisition=log_improvement),
        TransferSearch(acquisition=confidence),
    ]
    assert len({search.settings for search in settings}) == len(settings)
    assert "log_improvement" in settings[4].settings
    assert "0x" not in settings[4].settings  # no address


@pytest.mark.parametrize(
    "options",
    [
        {"trusts": ()},
        {"trusts": (0.5, 1.0), "trust_prior": (0.5, 0.5)},
        {"trusts": (0.0, -1.0), "trust_prior": (0.5, 0.5)},
        {"trusts": (0.0, math.nan), "trust_prior": (0.5, 0.5)},
        {"trusts": (0.0, 1.0), "trust_prior": (1.0,)},
        {"trusts": (0.0, 1.0), "trust_prior": (1.0, 0.0)},
        {"trusts": (0.0, 1.0), "trust_prior": (0.5, 0.6)},
    ],
)
def test_bad_settings(options: dict[str, Any]) -> None:
    with pytest.raises(InputDataError, match="trust"):
        TransferSearch(**options)


# ------------------------------------------------------------------ where evaluations fail


SMALL = SearchSpace((Parameter.integer("depth", 1, 3), Parameter.choice("kind", ["a", "b"])))
EVERY = SMALL.snap(uniform(200, SMALL.dim)).unique(dim=0)
SEARCHES = [SEARCH, TransferSearch(acquisition=log_improvement)]


def right(X: Tensor) -> Tensor:
    """Where the tests' evaluations fail: a third, and the top of what rises to the right."""
    return X[:, 0] > 0.67


@pytest.mark.parametrize("search", SEARCHES, ids=["own", "passed in"])
@pytest.mark.parametrize("candidates", [None, uniform(20, 2, seed=4)], ids=["box", "list"])
@pytest.mark.parametrize("n", [0, 1, 6])
def test_without_failures_nothing_changes(
    search: TransferSearch, candidates: Tensor | None, n: int
) -> None:
    X, Y = history(n)
    for prior in (None, good_prior()):
        found = [
            point(X, Y, prior, search=search, candidates=candidates, failed=failed)
            for failed in (None, X[:0])
        ]
        assert torch.equal(*found)


@pytest.mark.parametrize("search", SEARCHES, ids=["own", "passed in"])
@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_failed_point_is_not_asked_again_while_another_is_left(
    search: TransferSearch, prior: bool, listed: bool, n: int
) -> None:
    basis = default_feature_map(SMALL)
    function = PriorFunction.of_weights(basis, normal(basis.num_features)) if prior else None
    for left in range(len(EVERY))[:: 1 if search is SEARCH else 3]:
        rest = torch.cat([EVERY[:left], EVERY[left + 1 :]])
        found = point(
            rest[:n],
            rest[:n, :1],
            function,
            search=search,
            space=SMALL,
            candidates=EVERY if listed else None,
            failed=rest[n:],
        )
        if search is SEARCH or listed:
            assert torch.equal(found, EVERY[left : left + 1])
        assert not bool((rest[n:] == found).all(dim=-1).any())


@pytest.mark.parametrize("listed", [False, True])
def test_the_first_failure_is_already_not_asked_again(listed: bool) -> None:
    candidates = EVERY if listed else None
    X = EVERY[:2]
    before = point(X, X[:, :1], space=SMALL, candidates=candidates)
    after = point(X, X[:, :1], space=SMALL, candidates=candidates, failed=before)
    assert not torch.equal(before, after)
    none = torch.zeros(0, 1).double()
    for seed in range(10):
        found = point(X[:0], none, space=SMALL, candidates=candidates, failed=EVERY[:1], seed=seed)
        assert not torch.equal(found, EVERY[:1])


def test_one_failure_is_not_modelled() -> None:
    X, Y = history(6)
    corner = torch.tensor([[1.0, 0.0]]).double()
    assert torch.equal(point(X, Y), point(X, Y, failed=corner))
    twice = torch.cat([corner, corner])
    assert not torch.equal(point(X, Y), point(X, Y, failed=twice))


def test_a_failed_point_is_no_incumbent() -> None:
    X, _ = history(6)
    seen: list[Tensor] = []

    def spy(model: SingleTaskGP, tried: Tensor) -> AcquisitionFunction:
        seen.append(tried)
        return log_improvement(model, tried)

    search = TransferSearch(acquisition=spy)
    point(X, hill(X), search=search, failed=uniform(3, 2, seed=9))
    assert torch.equal(seen[0], X)


@pytest.mark.parametrize("search", SEARCHES, ids=["own", "passed in"])
def test_a_third_that_fails_is_learned(search: TransferSearch) -> None:
    X = uniform(5, 2, seed=3)
    X, failed = X[~right(X)], X[right(X)]
    steps = 12 if search is SEARCH else 6
    for t in range(steps):
        found = point(X, X[:, :1] + hill(X), search=search, failed=failed, seed=t)
        X, failed = (
            (X, torch.cat([failed, found])) if right(found) else (torch.cat([X, found]), failed)
        )
    assert len(failed) <= 5
    best = 0.5 * (0.3 + 0.3 + 1 / 6)  # of the sum along the first input
    if search is SEARCH:
        top = torch.tensor([[best, 0.3]]).double()
        assert float((X[:, :1] + hill(X)).max()) > float(top[:, :1] + hill(top)) - 0.01


def test_before_any_success_a_site_leaves_where_it_failed() -> None:
    failed = torch.tensor([[0.1, 0.1], [0.2, 0.2], [0.15, 0.3], [0.1, 0.2]]).double()
    none = no_points(), torch.zeros(0, 1).double()
    alone = torch.cat([point(*none, failed=failed, seed=n) for n in range(5)])
    assert float(torch.cdist(alone, failed).min()) > 0.3
    # Every second point is random: what succeeds may be the middle, between the failures.
    wide = torch.tensor([[0.1, 0.1], [0.9, 0.9], [0.1, 0.9], [0.9, 0.1], [0.5, 0.4]]).double()
    random = torch.cat([point(*none, failed=wide, seed=n) for n in range(40)])
    assert float(torch.cdist(random, wide).min()) < 0.15
    first = point(*none, good_prior())
    around = first + torch.tensor([[0.0, 0.0], [0.02, 0.0]]).double()
    told = point(*none, good_prior(), failed=around)
    assert float(torch.cdist(told, around).min()) > APART


# ------------------------------------------------------------------ what arrives


def test_no_row_is_louder_than_a_site_can_be() -> None:
    rows = normal(4, PHI.num_features)
    rows = rows / (reference_features(PHI) @ rows.mT).std(dim=0).unsqueeze(-1)
    loud = rows * torch.tensor([[0.5], [1.0], [2 * MAX_SPREAD], [1e6]]).double()
    spread = (reference_features(PHI) @ bounded(PHI, loud).mT).std(dim=0)
    expected = torch.tensor([0.5, 1.0, MAX_SPREAD, MAX_SPREAD]).double()
    torch.testing.assert_close(spread, expected)
    torch.testing.assert_close(bounded(PHI, loud)[:2], loud[:2])
    assert torch.equal(bounded(PHI, 0 * rows), 0 * rows)


def test_a_hostile_row_moves_the_prior_boundedly() -> None:
    # Of ten sites nine know the hill; the last says the opposite, a million times louder.
    honest = torch.stack([said(*history(8, seed=n)) for n in range(9)])
    against = -1e6 * honest[:1]
    quiet, loud = (
        prior_of_sum(PHI, bounded(PHI, torch.cat([honest, row])).sum(dim=0), 10)
        for row in (-MAX_SPREAD * honest[:1], against)
    )
    alone = prior_of_sum(PHI, honest.sum(dim=0), 9)
    assert quiet is not None
    assert loud is not None
    assert alone is not None
    X = uniform(300, 2, seed=6)
    # As loud as a site can be, and no louder: the others are still heard.
    correlation = np.corrcoef(loud.values(X), alone.values(X))[0, 1]
    assert correlation > 0.9
    unbounded = prior_of_sum(PHI, torch.cat([honest, against]).sum(dim=0), 10)
    assert unbounded is not None
    assert np.corrcoef(unbounded.values(X), alone.values(X))[0, 1] < -0.5


def test_a_sum_that_says_nothing() -> None:
    M = PHI.num_features
    assert prior_of_sum(PHI, torch.zeros(M).double(), 3) is None
    assert prior_of_sum(PHI, normal(M), 0) is None
    assert prior_of_sum(PHI, torch.full((M,), torch.nan).double(), 3) is None
    assert prior_of_sum(PHI, normal(M), 3) is not None


def test_the_number_of_speakers_does_not_matter() -> None:
    X = uniform(20, 2)
    first, second = (prior_of_sum(PHI, normal(PHI.num_features), n) for n in (1, 7))
    assert first is not None
    assert second is not None
    torch.testing.assert_close(first(X), second(X), rtol=0, atol=1e-12)


def test_a_sum_without_the_own_part_is_that_of_the_others() -> None:
    M, advice = PHI.num_features, Advice(good_prior())
    reports = [SEARCH.report(SQUARE, PHI, *history(6, seed=n), advice) for n in range(3)]
    packed = [pack_report(PHI, report) for report in reports]
    silent = pack_report(PHI, None)
    total = torch.stack([*packed, silent]).sum(dim=0)
    others = unpack_sum(total, packed[0])
    expected = packed[1] + packed[2]
    torch.testing.assert_close(others.weights, expected[:M])
    torch.testing.assert_close(others.trust, expected[M:-1])
    assert others.num_sites == 2
    assert unpack_sum(total, None).num_sites == 3
    assert unpack_sum(silent, None).num_sites == 0
    # A report that is none does not count either.
    assert torch.equal(pack_report(PHI, torch.full((len(silent) - 1,), torch.nan)), silent)


# ------------------------------------------------------------------ where everybody begins


def test_sites_are_dealt_one_sequence() -> None:
    together = torch.cat([dealt_design(SQUARE, n, 3, 4) for n in range(3)])
    whole = dealt_design(SQUARE, 0, 1, 12)
    assert len(torch.unique(together, dim=0)) == 12
    # The same points, dealt in blocks.
    assert torch.equal(torch.unique(together, dim=0), torch.unique(whole, dim=0))
    # Together they cover the square: every quarter has its share.
    quarters = (together > 0.5).long() @ torch.tensor([1, 2])
    assert quarters.bincount().tolist() == [3, 3, 3, 3]
    assert not torch.equal(dealt_design(SQUARE, 0, 3, 4, seed=1), dealt_design(SQUARE, 0, 3, 4))


@pytest.mark.parametrize("num_sites", [1, 2, 3, 4, 8, 16])
def test_the_points_of_one_site_differ_in_every_parameter(num_sites: int) -> None:
    space = SearchSpace(tuple(Parameter.real(f"x{j}", 0, 1) for j in range(4)))
    designs = torch.stack([dealt_design(space, n, num_sites, 3) for n in range(num_sites)])
    ranges = designs.amax(dim=1) - designs.amin(dim=1)
    assert float(ranges.min()) > 0.25  # 0.09 if a site were dealt every sixteenth point
    assert bool((ranges.mean(dim=0) > 0.5).all())
    if num_sites >= 8:  # and so do the first points of all sites
        first = designs[:, 0]
        assert bool((first.amax(dim=0) - first.amin(dim=0) > 0.5).all())


@pytest.mark.parametrize("candidates", [None, uniform(30, 2, seed=4)], ids=["box", "list"])
def test_a_longer_design_begins_with_the_shorter(candidates: Tensor | None) -> None:
    longest = dealt_design(SQUARE, 2, 5, 6, candidates=candidates)
    for n in range(6):
        assert torch.equal(dealt_design(SQUARE, 2, 5, n, candidates=candidates), longest[:n])


def test_of_a_list_a_site_is_dealt_different_candidates() -> None:
    candidates = uniform(6, 2, seed=4)
    design = dealt_design(SQUARE, 1, 4, 6, candidates=candidates)
    assert torch.equal(torch.unique(design, dim=0), torch.unique(candidates, dim=0))
    first = dealt_design(SQUARE, 1, 4, 1)
    nearest = candidates[int(torch.cdist(first, candidates).argmin())]
    assert torch.equal(design[0], nearest)


def test_a_design_has_points_of_the_space() -> None:
    design = dealt_design(MIXED, 0, 2, 8)
    assert torch.equal(MIXED.snap(design), design)
    assert len(torch.unique(design[:, 2:], dim=0)) == 3  # every choice


def test_a_first_point_that_failed_is_not_dealt_again() -> None:
    study = FTS(budget=5)
    blobs = MemoryBlobs()
    agent = study.agent("bob", SQUARE, 0, blobs)
    broadcasts = (blobs.put(encode(study.terms(SQUARE, NAMES).setup)),)
    design = dealt_design(SQUARE, 1, 3, 5)
    state, request = agent.start(), Order(1, "next", False)
    for t in range(5):
        state = agent.receive(state, request, broadcasts)
        asked = agent.ask(state)
        assert isinstance(asked, Tensor)
        assert torch.equal(asked, design[t : t + 1])
        state = agent.tell(state, asked, hill(asked) if t >= 2 else torch.full((1, 1), torch.nan))


# ------------------------------------------------------------------ a federation


def federation(
    *,
    space: SearchSpace = SQUARE,
    objectives: dict[str, Objective] | None = None,
    absent: Callable[[str, int], bool] | None = None,
    **options: Any,
) -> Federation:
    """Of three sites without data, by the defaults."""
    given = dict.fromkeys(NAMES, hill) if objectives is None else objectives
    return Federation(FTS(**{"budget": 5, **options}), space=space, objectives=given, absent=absent)


def driven(**options: Any) -> Federation:
    result = federation(**options)
    result.drive()
    for name in result.objectives:
        assert set(result.failures(name)) <= {"", "absent"}
    return result


def points_of(run: Federation, name: str) -> Tensor:
    return run.sites[name].state.X


@cache
def default_run() -> Federation:
    return driven()


def test_sites_that_begin_with_nothing_hear_of_each_other() -> None:
    run = default_run()
    # Nobody has anything to say before MIN_OWN observations, and everybody has from then on.
    for t, states in enumerate(run.states[1:]):
        heard = [len(state.broadcasts) > 1 for state in states.values()]
        assert heard == [t > MIN_OWN] * 3
    received = run.end.received
    assert received is not None
    assert received.agents == NAMES
    assert received.made == (5, 5, 5)  # a new message every round
    assert bool((received.weights.abs().amax(dim=-1) > 0).all())


def test_what_a_site_hears_is_what_the_others_said() -> None:
    run = default_run()
    phi = default_feature_map(SQUARE)
    M = phi.num_features
    for i, name in enumerate(NAMES):
        state = run.states[5][name]
        assert len(state.X) == 4
        sent = SEARCH.message(SQUARE, phi, state.X, state.Y)
        assert sent is not None
        assert torch.equal(run.end_of_round(5).weights[i, :M], sent)


def test_the_first_points_are_dealt() -> None:
    run = default_run()
    for i, name in enumerate(NAMES):
        expected = dealt_design(SQUARE, i, 3, MIN_OWN)
        assert torch.equal(points_of(run, name)[:MIN_OWN], expected)


def test_what_others_say_moves_the_search() -> None:
    deaf = driven(strategy=DEAF)
    run = default_run()
    for name in NAMES:
        assert torch.equal(points_of(deaf, name)[:MIN_OWN], points_of(run, name)[:MIN_OWN])
        assert not torch.equal(points_of(deaf, name), points_of(run, name))
    # A site that does not listen is alone: the others' outcomes change nothing.
    others: dict[str, Objective] = {"ann": hill, "bob": valley, "cem": valley}
    again = driven(strategy=DEAF, objectives=others)
    assert torch.equal(points_of(again, "ann"), points_of(deaf, "ann"))
    moved = driven(objectives=others)
    assert not torch.equal(points_of(moved, "ann"), points_of(run, "ann"))


def test_only_messages_cross() -> None:
    run = default_run()
    private = set()
    for state in (site.state for site in run.sites.values()):
        # The first points are public: all can compute them.
        private |= patterns(state.X[MIN_OWN:], state.Y)
    assert len(private) > 20
    for data in run.traffic:
        assert not [pattern for pattern in private if pattern in data]


@pytest.mark.parametrize("power", [-40, -13, 13, 40])
def test_one_sites_unit_changes_no_bit_of_anybodys_run(power: int) -> None:
    def scaled(X: Tensor) -> Tensor:
        return 2.0**power * hill(X)

    run = driven(objectives={"ann": hill, "bob": scaled, "cem": hill})
    for name in NAMES:
        assert torch.equal(points_of(run, name), points_of(default_run(), name))
    received, expected = run.end.received, default_run().end.received
    assert received is not None
    assert expected is not None
    assert torch.equal(received.weights, expected.weights)


@pytest.mark.parametrize(
    "outcome",
    [Outcome(scale=1e4), Outcome(scale=1e-4), Outcome(centre=300.0)],
    ids=["too wide", "too narrow", "elsewhere"],
)
def test_a_wrong_scale_of_outcomes_costs_nothing(outcome: Outcome) -> None:
    run = driven(space=SearchSpace(SQUARE.parameters, outcome))
    for name in NAMES:
        torch.testing.assert_close(
            points_of(run, name), points_of(default_run(), name), rtol=0, atol=1e-3
        )


def test_outcomes_that_never_differ() -> None:
    flat: dict[str, Objective] = dict.fromkeys(NAMES, lambda X: torch.full((len(X), 1), 3.0))
    run = driven(objectives=flat)
    for name in NAMES:
        assert len(torch.unique(points_of(run, name), dim=0)) == 5


def test_a_hostile_message_is_one_voice() -> None:
    # A million times as loud, and loud: the others go where they go with a voice as loud as a site
    # can have.
    def shouted(factor: float) -> Federation:
        run = federation(budget=4)

        def tamper(name: str, message: Any) -> Any:
            if name != "bob" or message.values is None:
                return message
            loud = message.values.clone()
            loud[: -len(TRUSTS)] *= factor
            return replace(message, values=loud)

        run.tamper = tamper
        run.drive()
        return run

    # Loud enough for the bound in both.
    loud, louder = shouted(-(2.0**4)), shouted(-(2.0**12))
    for name in ("ann", "cem"):
        assert louder.failures(name) == [""] * 5
        torch.testing.assert_close(
            points_of(louder, name), points_of(loud, name), rtol=0, atol=1e-6
        )


def test_two_points_at_a_time() -> None:
    run = driven(q=2, budget=8)
    for name in NAMES:
        X = points_of(run, name)
        assert X.shape == (8, 2)
        assert len(torch.unique(X, dim=0)) == 8
        # Dealt two at a time, until there are MIN_OWN.
        index = NAMES.index(name)
        assert torch.equal(X[:4], dealt_design(SQUARE, index, 3, 4))
    assert run.end.received is not None


def test_a_list_of_candidates() -> None:
    candidates = uniform(8, 2, seed=4)
    run = driven(candidates=candidates, budget=8)
    for name in NAMES:
        X = points_of(run, name)
        assert torch.equal(torch.unique(X, dim=0), torch.unique(candidates, dim=0))
    assert run.end.received is not None


def test_a_mixed_space() -> None:
    def f(X: Tensor) -> Tensor:
        return X[:, 2:3] - (X[:, 1:2] - 0.5).square()

    run = driven(space=MIXED, objectives=dict.fromkeys(NAMES, f), budget=6)
    for name in NAMES:
        X = points_of(run, name)
        assert torch.equal(MIXED.snap(X), X)
        assert len(torch.unique(X, dim=0)) == 6
    assert run.end.received is not None
    assert run.end.received.weights.shape == (3, report_size(default_feature_map(MIXED)))


def test_a_straggler_is_missing_and_comes_back() -> None:
    run = driven(budget=6, absent=lambda name, t: name == "bob" and t in (2, 3))
    assert [len(points_of(run, name)) for name in NAMES] == [6, 4, 6]
    assert run.end_of_round(4).agents == ("ann", "cem")
    assert run.end.received is not None
    assert run.end.received.agents == NAMES
    # It goes on at once with what the others have said, at places of its own.
    assert len(torch.unique(points_of(run, "bob"), dim=0)) == 4


def test_a_newcomer_begins_with_what_others_have_seen() -> None:
    data = {name: history(12, seed=i) for i, name in enumerate(NAMES) if name != "ann"}
    run = driven(data=data, active=("ann",), budget=4)
    X = points_of(run, "ann")
    assert len(X) == 4
    assert [len(points_of(run, name)) for name in ("bob", "cem")] == [12, 12]
    assert run.end_of_round(1).agents == ("bob", "cem")  # they have spoken before
    assert float(hill(X)[0]) > 0.7  # where others are best
    assert len(torch.unique(X, dim=0)) == 4
    alone = driven(data=data, active=("ann",), budget=4, strategy=DEAF)
    assert float(hill(X).max()) >= float(hill(points_of(alone, "ann")).max())


def test_nobody_but_oneself() -> None:
    run = driven(objectives={"ann": hill}, budget=6)
    deaf = driven(objectives={"ann": hill}, budget=6, strategy=DEAF)
    assert torch.equal(points_of(run, "ann"), points_of(deaf, "ann"))
    assert float(hill(points_of(run, "ann")).max()) > 0.9


def test_an_agent_that_counts_for_nothing_is_not_heard() -> None:
    weights = {"bob": 1.0, "cem": 0.0}
    one, two = (
        driven(
            objectives={"ann": hill, "bob": hill, "cem": third},
            agent_weights=weights,
            active=("ann",),
            data={name: history(6, seed=i) for i, name in enumerate(NAMES)},
            budget=2,
        )
        for third in (hill, valley)
    )
    assert torch.equal(points_of(one, "ann"), points_of(two, "ann"))


class Stopped(BaseException):
    """Somebody pulled the plug."""


@pytest.mark.parametrize("acquisition", [None, log_improvement], ids=["own", "passed-in"])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(acquisition: Any) -> None:
    options: dict[str, Any] = {
        "strategy": TransferSearch(acquisition=acquisition),
        "budget": 5,
        "data": {"cem": history(4)},
    }
    expected = driven(**options).result()
    stopped = federation(**options)

    def stop() -> None:
        raise Stopped

    starts = 0
    while True:  # one round, and then only what was saved
        starts += 1
        try:
            stopped.drive(resume=starts > 1, saved=stop)
            break
        except Stopped:
            stopped.open()
    assert starts == 1 + 6 + 1
    assert stopped.result() == expected


def test_a_seeded_run_twice_gives_identical_bytes() -> None:
    torch.manual_seed(1234)  # the global generator has no say
    assert driven().result() == default_run().result()
    assert encode(default_run().end) == default_run().result()[0]
