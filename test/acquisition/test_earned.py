"""Expected improvement of an average of models in closed form, and where it is largest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from botorch.acquisition.analytic import LogExpectedImprovement, _log_ei_helper
from botorch.optim.optimize import optimize_acqf
from torch import Tensor

from botorch_fed.acquisition.earned import (
    MIN_DISTANCE,
    Domain,
    EarnedImprovement,
    best_candidate,
    log_improvement,
    maximize_feasibility,
    maximize_improvement,
    maximize_prior,
)
from botorch_fed.models.earned_prior import EarnedPosterior, PriorFunction, fit_earned
from botorch_fed.models.feasibility import fit_feasibility
from botorch_fed.models.local_gp import Array
from botorch_fed.models.warp import LogWarp
from botorch_fed.rng import generator
from botorch_fed.space import Parameter, SearchSpace
from test.cases import normal, random_fourier, uniform

PHI = random_fourier()
OFFSETS = torch.tensor([0.01, 0.0], dtype=torch.float64)
MIXED = SearchSpace((Parameter.integer("n", 1, 6), Parameter.choice("kind", ["a", "b", "c"])))


def hill(X: Tensor) -> Tensor:
    return 3 - 40 * (X - 0.37).square().sum(dim=-1, keepdim=True) + torch.sin(9 * X[:, :1])


def some_prior() -> PriorFunction:
    prior = PriorFunction.of_weights(PHI, normal(PHI.num_features, seed=2))
    assert prior is not None
    return prior


def data(n: int, d: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    X = uniform(n, d, seed=seed)
    return X, hill(X)


@cache
def posterior(with_prior: bool = True, warp: bool = False, n: int = 7) -> EarnedPosterior:
    X, Y = data(n)
    scale = LogWarp(OFFSETS) if warp else None
    return fit_earned(X, Y, some_prior() if with_prior else None, log_warp=scale)


def improvement(with_prior: bool = True, warp: bool = False) -> EarnedImprovement:
    return EarnedImprovement.of(posterior(with_prior, warp), data(7)[0])


def box(tried: Tensor, **options: object) -> Domain:
    lower, upper = torch.zeros(tried.shape[-1]).double(), torch.ones(tried.shape[-1]).double()
    return replace(Domain(lower, upper, tried), **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------ values


def test_the_logarithm_is_botorchs() -> None:
    u = np.array([-1e6, -1e4, -1001.0, -999.0, -60.0, -30.0, -5.0, -1.0001, -1, -0.5, 0.0, 3, 40])
    ours, theirs = log_improvement(u), _log_ei_helper(torch.from_numpy(u)).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    # And far below the series phi(u) / u^2 (1 - 3 / u^2 + 15 / u^4 ...).
    far = u[:6]
    series = -0.5 * far**2 - 0.5 * np.log(2 * np.pi) - 2 * np.log(-far)
    series += np.log1p(-3 / far**2 + 15 / far**4 - 105 / far**6)
    np.testing.assert_allclose(ours[:6], series, rtol=1e-8)


@pytest.mark.parametrize("warp", [False, True])
def test_one_model_is_botorchs_log_expected_improvement(warp: bool) -> None:
    alone = posterior(False, warp)
    X, _ = data(7)
    ours = EarnedImprovement.of(alone, X)
    model = alone.model(0)
    with torch.no_grad():
        theirs = LogExpectedImprovement(model, best_f=model.posterior(X).mean.max())
        Z = uniform(200, 2, seed=4)
        expected = theirs(Z.unsqueeze(-2)).numpy()
    # Theirs is in the outcomes' unit.
    expected = expected - np.log(alone.outcome.scale)
    np.testing.assert_allclose(ours(alone.warp(Z)), expected, rtol=1e-6, atol=1e-6)


def test_an_average_is_the_average_of_expectations() -> None:
    ours, Z = improvement(), uniform(100, 2, seed=4)
    weights = ours.posterior.weights
    assert len(weights) > 1
    parts = []
    for component, best in zip(ours.posterior.components, ours.best, strict=True):
        one = replace(ours.posterior, components=(component,), weights=np.ones(1))
        parts.append(np.exp(EarnedImprovement(one, (best,))(Z.numpy())))
    np.testing.assert_allclose(np.exp(ours(Z.numpy())), weights @ np.stack(parts), rtol=1e-9)
    assert (ours(Z.numpy()) >= np.log(np.stack(parts).min(axis=0)) - 1e-12).all()
    assert (ours(Z.numpy()) <= np.log(np.stack(parts).max(axis=0)) + 1e-12).all()


def test_a_model_without_weight_has_no_say() -> None:
    ours, Z = improvement(), uniform(50, 2, seed=4).numpy()
    weights = np.zeros(len(ours.best))
    weights[0] = 1.0
    sure = EarnedImprovement(replace(ours.posterior, weights=weights), ours.best)
    first = replace(ours.posterior, components=ours.posterior.components[:1], weights=np.ones(1))
    alone = EarnedImprovement(first, ours.best[:1])
    np.testing.assert_allclose(sure(Z), alone(Z), rtol=1e-12)
    np.testing.assert_allclose(sure.with_gradient(Z)[1], alone.with_gradient(Z)[1], rtol=1e-9)


@pytest.mark.parametrize("worse", [0.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("with_prior", [False, True])
@pytest.mark.parametrize("warp", [False, True])
def test_the_gradient_is_that_of_the_values(worse: float, with_prior: bool, warp: bool) -> None:
    # In the tails too: over a best value that is out of reach.
    ours = improvement(with_prior, warp)
    ours = replace(ours, best=tuple(best + worse for best in ours.best))
    Z = 0.05 + 0.9 * uniform(25, 2, seed=4).numpy()
    values, gradient = ours.with_gradient(Z)
    np.testing.assert_array_equal(values, ours(Z))
    assert np.isfinite(values).all()
    for k in range(2):
        step = np.zeros(2)
        step[k] = 1e-5
        slope = (ours(Z + step) - ours(Z - step)) / 2e-5
        # Differences of values of size v carry rounding of 1e-16 v / 1e-5.
        rounding = 1e-10 * np.abs(values).max()
        np.testing.assert_allclose(gradient[:, k], slope, rtol=1e-4, atol=1e-6 + rounding)


def test_what_was_chosen_is_not_chosen_again() -> None:
    alone, (X, _) = posterior(False), data(7)
    first = maximize_improvement(EarnedImprovement.of(alone, X), box(X), generator(0, "test"))
    more = alone.conditioned(first)
    tried = torch.cat([X, first])
    after = EarnedImprovement.of(more, tried)
    before = EarnedImprovement.of(alone, X)
    assert after(first.numpy())[0] < before(first.numpy())[0] - 1
    second = maximize_improvement(after, box(tried), generator(0, "test"))
    assert float(torch.cdist(first, second)) > 0.01


# ------------------------------------------------------------------ the best point


def shekel(X: Tensor) -> Tensor:
    peaks = uniform(4, X.shape[-1], seed=21)
    return (1 / (0.03 + torch.cdist(X, peaks).square())).sum(dim=-1, keepdim=True)


PROBLEMS: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "line": (1, 5, shekel),
    "hill": (2, 6, hill),
    "peaks": (2, 15, shekel),
    "three": (3, 10, shekel),
    "six": (6, 20, shekel),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_best_point_is_as_good_as_botorchs(problem: str) -> None:
    d, n, f = PROBLEMS[problem]
    X = uniform(n, d, seed=3)
    alone = fit_earned(X, f(X))
    ours = EarnedImprovement.of(alone, X)
    model = alone.model(0)
    with torch.no_grad():
        best = model.posterior(X).mean.max()
    bounds = torch.stack([torch.zeros(d), torch.ones(d)]).double()
    theirs, _ = optimize_acqf(
        LogExpectedImprovement(model, best_f=best), bounds, q=1, num_restarts=10, raw_samples=512
    )
    point = maximize_improvement(ours, box(X), generator(1, "test"))
    assert ours(point.numpy())[0] >= ours(theirs.numpy())[0] - 1e-3
    assert point.shape == (1, d)


def test_the_same_stream_gives_the_same_point() -> None:
    X, _ = data(7)
    points = [maximize_improvement(improvement(), box(X), generator(s, "x")) for s in (1, 1, 2)]
    assert torch.equal(points[0], points[1])
    assert not torch.equal(points[0], points[2])


@pytest.mark.parametrize("warp", [False, True])
def test_a_box_is_kept(warp: bool) -> None:
    X, _ = data(7)
    lower, upper = torch.tensor([0.6, 0.0]).double(), torch.tensor([0.9, 0.2]).double()
    inner = box(X, lower=lower, upper=upper)
    ours = improvement(True, warp)
    point = maximize_improvement(ours, inner, generator(0, "x"))
    assert bool(((point >= lower) & (point <= upper)).all())
    grid = lower + (upper - lower) * uniform(500, 2, seed=9)
    assert ours(ours.posterior.warp(point))[0] >= ours(ours.posterior.warp(grid)).max() - 1e-3
    point = maximize_prior(some_prior(), inner, generator(0, "x"), apart=0.25)
    assert bool(((point >= lower) & (point <= upper)).all())


def test_a_tried_point_is_not_tried_again() -> None:
    ours, (X, _) = improvement(), data(7)
    first = maximize_improvement(ours, box(X), generator(0, "x"))
    # The same improvement, but its best point counts as tried.
    tried = torch.cat([X, first])
    second = maximize_improvement(ours, box(tried), generator(0, "x"))
    assert float(torch.cdist(second, tried).min()) >= MIN_DISTANCE


# ------------------------------------------------------------------ lists, integers, choices


def test_of_a_list_every_candidate_comes_once() -> None:
    ours, candidates = improvement(), uniform(12, 2, seed=6)
    tried = torch.zeros(0, 2).double()
    values = ours(candidates.numpy())
    chosen = []
    for _ in range(12):
        domain = box(tried, candidates=candidates)
        point = maximize_improvement(ours, domain, generator(0, "x"))
        chosen.append(int((candidates == point).all(dim=-1).nonzero()))
        tried = torch.cat([tried, point])
    assert chosen == (-values).argsort().tolist()
    again = maximize_improvement(ours, box(tried, candidates=candidates), generator(0, "x"))
    assert bool((candidates == again).all(dim=-1).any())  # nothing is left: anything may come


def test_ties_go_to_the_first() -> None:
    candidates = uniform(5, 2)
    point = best_candidate(lambda X: np.zeros(len(X)), box(candidates[:1], candidates=candidates))
    assert torch.equal(point, candidates[1:2])


@pytest.mark.parametrize("worst", [np.nan, -np.inf])
def test_a_value_that_is_none_is_not_the_best(worst: float) -> None:
    candidates = uniform(5, 2)

    def score(X: Tensor) -> Array:
        values = np.full(len(X), worst)
        values[3] = -1e250
        return values

    point = best_candidate(score, box(candidates[:0], candidates=candidates))
    assert torch.equal(point, candidates[3:4])


def mixed_values(X: Tensor) -> Tensor:
    return -(X[:, :1] - 0.6).square() - X[:, 2:3]


def test_integers_and_choices_are_points_of_the_space() -> None:
    X = MIXED.snap(uniform(5, 4, seed=1))
    ours = EarnedImprovement.of(fit_earned(X, mixed_values(X)), X)
    point = maximize_improvement(ours, box(X, snap=MIXED.snap), generator(0, "x"))
    assert torch.equal(MIXED.snap(point), point)
    assert not bool((X == point).all(dim=-1).any())


@pytest.mark.parametrize("space", ["integers", "mixed"])
def test_a_small_space_is_searched_without_repetition(space: str) -> None:
    # As long as untried points are left, none comes twice.
    parameters: tuple[Parameter, ...] = (Parameter.integer("n", 1, 12),)
    where = SearchSpace(parameters) if space == "integers" else MIXED
    f = (lambda X: -(X[:, :1] - 0.55).square()) if space == "integers" else mixed_values
    size = 12 if space == "integers" else 18
    tried = where.snap(uniform(2, where.dim, seed=3))
    for t in range(len(tried), size):
        ours = EarnedImprovement.of(fit_earned(tried, f(tried)), tried)
        point = maximize_improvement(ours, box(tried, snap=where.snap), generator(t, "x"))
        tried = torch.cat([tried, point])
    assert len(torch.unique(tried, dim=0)) == size


# ------------------------------------------------------------------ where the prior is largest


def test_the_largest_value_of_the_prior() -> None:
    prior, nothing = some_prior(), torch.zeros(0, 2).double()
    point = maximize_prior(prior, box(nothing), generator(0, "x"), apart=0.25)
    everywhere = prior.values(uniform(20_000, 2, seed=9))
    assert prior.values(point)[0] > np.quantile(everywhere, 0.995)


def test_first_points_keep_apart() -> None:
    prior, tried = some_prior(), torch.zeros(0, 2).double()
    for t in range(5):
        point = maximize_prior(prior, box(tried), generator(t, "x"), apart=0.25)
        if len(tried):
            assert float(torch.cdist(point, tried).min()) >= 0.25
        tried = torch.cat([tried, point])
    values = prior.values(tried)
    assert values[0] >= values[1:].max() - 0.05  # the best places come first


def test_where_there_is_no_room_any_point_will_do() -> None:
    centre = torch.tensor([[0.5, 0.5]]).double()
    point = maximize_prior(some_prior(), box(centre), generator(0, "x"), apart=2.0)
    assert point.shape == (1, 2)


def test_a_prior_over_a_list_and_over_integers() -> None:
    prior, candidates = some_prior(), uniform(30, 2, seed=6)
    nothing = torch.zeros(0, 2).double()
    best = maximize_prior(prior, box(nothing, candidates=candidates), generator(0, "x"), apart=0.1)
    assert torch.equal(best[0], candidates[int(prior.values(candidates).argmax())])
    grid = SearchSpace((Parameter.integer("a", 1, 4), Parameter.integer("b", 1, 4)))
    tried = nothing
    for t in range(3):
        domain = box(tried, snap=grid.snap)
        tried = torch.cat([tried, maximize_prior(prior, domain, generator(t, "x"), apart=0.25)])
    assert torch.equal(grid.snap(tried), tried)
    assert len(torch.unique(tried, dim=0)) == 3


# ------------------------------------------------------------------ where evaluations fail


FAILED = torch.tensor([[0.35, 0.4], [0.45, 0.3], [0.4, 0.2]], dtype=torch.float64)


@pytest.mark.parametrize("with_prior", [False, True])
@pytest.mark.parametrize("warp", [False, True])
def test_the_probability_of_success_is_a_factor(with_prior: bool, warp: bool) -> None:
    X, _ = data(7)
    plain = improvement(with_prior, warp)
    success = fit_feasibility(X, FAILED, log_warp=LogWarp(OFFSETS) if warp else None)
    assert success is not None
    both, Z = replace(plain, feasibility=success), uniform(30, 2, seed=4).numpy()
    np.testing.assert_allclose(both(Z), plain(Z) + success.log_probability(Z), rtol=1e-12)
    values, gradient = both.with_gradient(Z)
    np.testing.assert_allclose(values, both(Z), rtol=1e-12)
    for j, step in enumerate(1e-6 * np.eye(2)):
        slope = (both(Z + step) - both(Z - step)) / 2e-6
        np.testing.assert_allclose(gradient[:, j], slope, rtol=1e-4, atol=1e-4)


def test_the_best_point_moves_away_from_failures() -> None:
    X, _ = data(7)
    stream = generator(0, "point")
    before = maximize_improvement(improvement(False), box(X), stream)
    failed = before + 0.03 * torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    success = fit_feasibility(X, failed.double())
    both = EarnedImprovement.of(posterior(False), X, success)
    after = maximize_improvement(both, box(X, failed=failed.double()), generator(0, "point"))
    assert float((after - before).norm()) > 0.05


def test_a_failed_point_is_chosen_last_of_all() -> None:
    every = MIXED.snap(uniform(400, MIXED.dim, seed=1)).unique(dim=0)
    assert len(every) == 18
    for left in (0, 7):
        rest = torch.cat([every[:left], every[left + 1 :]])
        fitted = fit_earned(rest[:3], rest[:3, :1])
        for tried, failed in ((rest[:3], rest[3:]), (rest, every[:0])):
            domain = box(tried, snap=MIXED.snap, failed=failed)
            found = maximize_improvement(EarnedImprovement.of(fitted, tried), domain, generator(0))
            assert torch.equal(found, every[left : left + 1])
    # With nothing new left one that succeeded is looked at again.
    fitted = fit_earned(every[:3], every[:3, :1])
    domain = box(every[:3], snap=MIXED.snap, failed=every[3:])
    found = maximize_improvement(EarnedImprovement.of(fitted, every[:3]), domain, generator(0))
    assert bool((every[:3] == found).all(dim=-1).any())


def test_a_prior_is_followed_where_evaluations_succeed() -> None:
    prior, none = some_prior(), torch.zeros(0, 2).double()
    first = maximize_prior(prior, box(none), generator(0), apart=0.25)
    failed = first + torch.tensor([[0.0, 0.0], [0.02, 0.0]]).double()
    success = fit_feasibility(none, failed)
    assert success is not None
    found = maximize_prior(
        prior, box(none, failed=failed), generator(0), apart=0.25, feasibility=success
    )
    assert float((found - first).norm()) > 0.25
    # Where everything is near a failure, still not one itself.
    kinds = torch.eye(3).double() * 0.1
    phi = PriorFunction.of_weights(PHI, normal(PHI.num_features, seed=2))
    assert phi is not None
    listed = kinds[:, :2]
    domain = box(none, candidates=listed, failed=listed[:2])
    assert torch.equal(maximize_prior(phi, domain, generator(0), apart=0.25), listed[2:])


def test_before_any_success_the_likeliest_of_a_few_points() -> None:
    none = torch.zeros(0, 2).double()
    for offsets in (None, OFFSETS):
        success = fit_feasibility(
            none, FAILED, log_warp=None if offsets is None else LogWarp(offsets)
        )
        assert success is not None
        found = maximize_feasibility(success, box(none, failed=FAILED), generator(0))
        assert float(torch.cdist(found, FAILED).min()) > 0.3
    listed = torch.cat([FAILED, FAILED + 0.01])
    domain = box(none, candidates=listed, failed=FAILED)
    found = maximize_feasibility(success, domain, generator(0))
    assert bool((listed[3:] == found).all(dim=-1).any())


# ------------------------------------------------------------------ discrete values, constraints

GRID = SearchSpace((
    Parameter.real("a", 0.0, 1.0), Parameter.integer("n", 1, 9), Parameter.choice("k", ["u", "v"])
))  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_discrete_values_are_searched(seed: int) -> None:
    """Not worse than rounding alone, and as good as the best of a fine grid over everything."""
    X = GRID.snap(uniform(9, GRID.dim, seed=seed))
    improvement = EarnedImprovement.of(fit_earned(X, hill(X), None), X)
    rounded = box(X, snap=GRID.snap)
    found = maximize_improvement(improvement, rounded, generator(seed))
    better = maximize_improvement(
        improvement, replace(rounded, feasible=GRID.feasible_set), generator(seed)
    )
    torch.testing.assert_close(GRID.snap(better), better, rtol=0, atol=1e-12)
    fine = [{"a": a / 200, "n": n, "k": k} for a in range(201) for n in range(1, 10) for k in "uv"]
    values = improvement(GRID.to_unit(fine).numpy())
    assert improvement(better.numpy())[0] >= improvement(found.numpy())[0] - 1e-9
    assert improvement(better.numpy())[0] >= values.max() - 1e-3


@pytest.mark.parametrize("warp", [False, True])
@pytest.mark.parametrize("constraint", ["x + y <= 0.6", "x + y == 0.6", "disc"])
def test_the_best_point_of_a_constrained_set(warp: bool, constraint: str) -> None:
    reals = (Parameter.real("x", 0.0, 1.0), Parameter.real("y", 0.0, 1.0))
    if constraint == "disc":
        space = SearchSpace(reals, feasible=lambda p: bool(p["x"] ** 2 + p["y"] ** 2 <= 0.16))
    else:
        space = SearchSpace(reals, constraints=(constraint,))
    X = space.feasible_set.uniform(7, generator(2))
    scale = LogWarp(OFFSETS) if warp else None
    model = fit_earned(X, hill(X), some_prior(), log_warp=scale)
    improvement = EarnedImprovement.of(model, X)
    domain = box(X, snap=space.snap, feasible=space.feasible_set)
    point = maximize_improvement(improvement, domain, generator(0))
    assert bool(space.feasible_set.contains(point).all())
    others = space.feasible_set.uniform(4000, generator(1))
    values = improvement(model.warp(others))
    assert improvement(model.warp(point))[0] >= values.max() - 1e-3


def test_first_points_of_a_constrained_set() -> None:
    space = SearchSpace(
        (Parameter.real("x", 0.0, 1.0), Parameter.real("y", 0.0, 1.0)),
        constraints=("x + y <= 0.3",),
    )
    nothing = torch.zeros(0, 2).double()
    domain = box(nothing, snap=space.snap, feasible=space.feasible_set)
    points = [maximize_prior(some_prior(), domain, generator(0), apart=0.25)]
    failed = space.feasible_set.uniform(4, generator(2))
    feasibility = fit_feasibility(nothing, failed, log_warp=LogWarp(torch.zeros(2).double()))
    assert feasibility is not None
    points.append(maximize_feasibility(feasibility, replace(domain, failed=failed), generator(0)))
    assert bool(space.feasible_set.contains(torch.cat(points)).all())
