"""Improvement with several outcomes in closed form: against BoTorch, draws and differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from botorch.acquisition.analytic import LogConstrainedExpectedImprovement
from botorch.acquisition.multi_objective.analytic import ExpectedHypervolumeImprovement
from botorch.models.model_list_gp_regression import ModelListGP
from botorch.utils.multi_objective.box_decompositions.non_dominated import (
    FastNondominatedPartitioning,
)
from botorch.utils.multi_objective.hypervolume import Hypervolume, infer_reference_point
from botorch.utils.multi_objective.pareto import is_non_dominated
from torch import Tensor

from botorch_fed.acquisition.earned import EarnedImprovement, Improvement, maximize_improvement
from botorch_fed.acquisition.outcomes import (
    PROBABLE,
    HypervolumeImprovement,
    JointImprovement,
    Limit,
    means_at,
    probably_met,
    reference_point,
)
from botorch_fed.models.earned_prior import EarnedPosterior, fit_earned
from botorch_fed.models.feasibility import fit_feasibility
from botorch_fed.models.warp import LogWarp
from botorch_fed.rng import generator
from test.acquisition.test_earned import box, hill, some_prior
from test.cases import normal, uniform

X = uniform(8, 2, seed=3)
Z = uniform(40, 2, seed=5)


def slope(points: Tensor) -> Tensor:
    return 5 + 2 * points[:, :1] - points[:, 1:]


def posterior(f: Callable[[Tensor], Tensor], with_prior: bool = False, **options: Any) -> Any:
    return fit_earned(X, f(X), some_prior() if with_prior else None, **options)


def several(with_prior: bool, count: int = 2) -> tuple[EarnedPosterior, ...]:
    functions = (hill, slope, lambda points: -hill(points.flip(-1)))[:count]
    return tuple(posterior(f, with_prior) for f in functions)


def limit(level: float = 5.3, with_prior: bool = False, **bounds: Any) -> Limit:
    lower, upper = bounds.get("lower"), bounds.get("upper", level)
    return Limit.of(posterior(slope, with_prior), lower, upper)


# ------------------------------------------------------------------ constraints


def test_constrained_improvement_is_botorchs() -> None:
    objective, bounded = posterior(hill), posterior(slope)
    met = bounded.model(0).posterior(X).mean.squeeze(-1) <= 5.3
    assert 1 < int(met.sum()) < len(X)
    best = objective.model(0).posterior(X[met]).mean.max()
    both = ModelListGP(objective.model(0), bounded.model(0))
    theirs = LogConstrainedExpectedImprovement(
        both, best_f=best, objective_index=0, constraints={1: (None, 5.3)}
    )
    ours = JointImprovement.of([objective], [limit()], X, references=[None])
    with torch.no_grad():
        expected = theirs(Z.unsqueeze(-2)).numpy() - math.log(objective.outcome.scale)
    np.testing.assert_allclose(ours(Z.numpy()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("lower", "upper"), [(None, 5.3), (5.0, None), (4.9, 5.3)])
def test_the_probability_of_bounds_is_that_of_draws(
    lower: float | None, upper: float | None
) -> None:
    one = Limit.of(posterior(slope, with_prior=True), lower, upper)
    low, high = -math.inf if lower is None else lower, math.inf if upper is None else upper
    scale = one.posterior.outcome
    points = uniform(5, 2, seed=9)
    total = np.zeros(5)
    for weight, component in zip(one.posterior.weights, one.posterior.components, strict=True):
        mean, variance = component.predict(points.numpy(), one.posterior.prior_values(points))
        draws = mean + np.sqrt(variance) * normal(100_000, 1, seed=1).numpy()
        y = scale.centre + scale.scale * draws
        total += weight * ((low <= y) & (y <= high)).mean(axis=0)
    np.testing.assert_allclose(np.exp(one(points.numpy())), total, atol=0.01)


def test_probabilities_do_not_underflow() -> None:
    far = Limit.of(posterior(slope), None, -1e3)
    between = Limit.of(posterior(slope), 1e3, 1e3 + 1e-3)
    for one in (far, between):
        values, gradient = one.with_gradient(Z.numpy())
        assert np.isfinite(values).all()
        assert (values < -1e3).all()
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).min(axis=1).max() > 0


def test_the_incumbent_meets_the_constraints() -> None:
    objective = posterior(hill)
    one = limit(float(slope(X)[int(hill(X).argmax())]) - 0.1)
    met = probably_met([one], X)
    joint = JointImprovement.of([objective], [one], X, references=[None])
    assert isinstance(joint.gain, EarnedImprovement)
    means = objective.predict(X)[0]
    assert joint.gain.best[0] == pytest.approx(means[met].max())
    assert means.max() > means[met].max()  # the best of all is not allowed
    assert (one(X.numpy())[met] >= PROBABLE).all()


def test_while_nothing_meets_the_constraints_one_is_looked_for() -> None:
    objective, one = posterior(hill), limit(4.2)  # the least of the function is 4
    joint = JointImprovement.of([objective], [one], X, references=[None])
    assert joint.gain is None
    np.testing.assert_array_equal(joint(Z.numpy()), one(Z.numpy()))
    point = maximize_improvement(joint, box(X), generator(0, "x"))
    assert float(slope(point)) < float(slope(X).min())
    assert len(joint.leaders(X)) == 4
    assert float(slope(joint.leaders(X)).max()) <= float(slope(X).median())


def test_the_best_point_meets_a_constraint_that_is_known() -> None:
    tried = uniform(25, 2, seed=4)
    objective, bounded = fit_earned(tried, hill(tried)), fit_earned(tried, slope(tried))
    free = EarnedImprovement.of(objective, tried)
    joint = JointImprovement.of(
        [objective], [Limit.of(bounded, None, 4.9)], tried, references=[None]
    )
    unbound = maximize_improvement(free, box(tried), generator(0, "x"))
    point = maximize_improvement(joint, box(tried), generator(0, "x"))
    assert float(slope(unbound)) > 5.1
    assert float(slope(point)) < 4.95
    candidates = uniform(200, 2, seed=6)
    chosen = maximize_improvement(joint, box(tried, candidates=candidates), generator(0, "x"))
    assert bool((candidates == chosen).all(dim=-1).any())
    assert joint(chosen.numpy())[0] == pytest.approx(joint(candidates.numpy()).max())


# ------------------------------------------------------------------ several objectives


@pytest.mark.parametrize("count", [2, 3])
def test_hypervolume_improvement_is_botorchs(count: int) -> None:
    objectives = several(False, count)
    ours = HypervolumeImprovement.of(objectives, X, [None] * count)
    means = torch.from_numpy(means_at(objectives, X))
    reference = reference_point(objectives, means.numpy(), [None] * count)
    models = [
        replace(one, outcome=replace(one.outcome, centre=0.0, scale=1.0)) for one in objectives
    ]
    theirs = ExpectedHypervolumeImprovement(
        ModelListGP(*(one.model(0) for one in models)),
        ref_point=reference.tolist(),
        partitioning=FastNondominatedPartitioning(torch.from_numpy(reference), means),
    )
    with torch.no_grad():
        expected = theirs(Z.unsqueeze(-2)).numpy()
    assert expected.max() > 1e-3
    np.testing.assert_allclose(np.exp(ours(Z.numpy())), expected, rtol=1e-4, atol=1e-9)


def test_an_average_over_trusts_is_that_of_draws() -> None:
    objectives = several(True)
    assert all(len(one.pruned().components) > 1 for one in objectives)
    ours = HypervolumeImprovement.of(objectives, X, [None, None])
    means = means_at(objectives, X)
    reference = torch.from_numpy(reference_point(objectives, means, [None, None]))
    volume, front = Hypervolume(reference), torch.from_numpy(means)
    before = volume.compute(front)
    point, stream = uniform(1, 2, seed=8), generator(0, "draws")
    columns = []
    for one in objectives:
        drawn = [one.drawn(float(u)) for u in stream.uniform(2000)]
        moments = [c.predict(one.warp(point), one.prior_values(point)) for c in one.components]
        mean, variance = (np.array([moments[k][i][0] for k in drawn]) for i in (0, 1))
        columns.append(mean + np.sqrt(variance) * stream.normal(2000).numpy())
    draws = torch.from_numpy(np.stack(columns, axis=-1))
    gains = [volume.compute(torch.cat([front, draw.unsqueeze(0)])) - before for draw in draws]
    error = 4 * float(np.std(gains)) / math.sqrt(len(gains))
    assert float(np.exp(ours(point.numpy()))[0]) == pytest.approx(np.mean(gains), abs=error)


def test_a_reference_is_that_of_botorch_or_the_given_one() -> None:
    objectives = several(False)
    means = means_at(objectives, X)
    front = torch.from_numpy(means)
    expected = infer_reference_point(front[is_non_dominated(front)]).numpy()
    np.testing.assert_allclose(reference_point(objectives, means, [None, None]), expected)
    given = reference_point(objectives, means, [None, 5.0])
    scale = objectives[1].outcome
    assert given[0] == expected[0]
    assert given[1] * scale.scale + scale.centre == pytest.approx(5.0)


def test_scales_of_outcomes_change_nothing() -> None:
    ours = HypervolumeImprovement.of(several(True), X, [None, None])
    stretched = [fit_earned(X, 1e3 * f(X) - 7e4, some_prior()) for f in (hill, slope)]
    theirs = HypervolumeImprovement.of(stretched, X, [None, None])
    np.testing.assert_allclose(ours(Z.numpy()), theirs(Z.numpy()), rtol=1e-6, atol=1e-6)


def test_new_points_lie_between_the_ends_of_the_front() -> None:
    tried = uniform(20, 2, seed=4)
    ends = (torch.tensor([0.2, 0.2]).double(), torch.tensor([0.8, 0.8]).double())
    objectives = [fit_earned(tried, -(tried - e).norm(dim=-1, keepdim=True)) for e in ends]
    joint = JointImprovement.of(objectives, [], tried, references=[None, None])
    point = maximize_improvement(joint, box(tried), generator(0, "x"))[0]
    assert abs(float(point[0] - point[1])) < 0.1
    leaders = joint.leaders(tried)
    assert 1 < len(leaders) < len(tried)


# ------------------------------------------------------------------ gradients


def cases() -> dict[str, Improvement]:
    failed = uniform(3, 2, seed=11)
    feasibility = fit_feasibility(X, failed, log_warp=LogWarp(torch.zeros(2).double()))
    assert feasibility is not None
    two, three, one = several(True), several(True, 3), limit(with_prior=True)
    between = limit(with_prior=True, lower=4.9, upper=5.3)
    none: list[float | None] = [None]
    return {
        "constrained": JointImprovement.of(two[:1], [one, between], X, references=none),
        "bound only": JointImprovement.of(two[:1], [limit(4.2)], X, references=none),
        "two": JointImprovement.of(two, [], X, references=none * 2),
        "three, bounded": JointImprovement.of(
            three, [one], X, references=none * 3, feasibility=feasibility
        ),
    }


@pytest.mark.parametrize("case", ["constrained", "bound only", "two", "three, bounded"])
def test_gradients_are_differences(case: str) -> None:
    joint, step = cases()[case], 1e-6
    points = Z[:10].numpy()
    values, gradient = joint.with_gradient(points)
    np.testing.assert_allclose(values, joint(points))
    for j in range(2):
        moved = step * np.eye(2)[j]
        difference = (joint(points + moved) - joint(points - moved)) / (2 * step)
        np.testing.assert_allclose(gradient[:, j], difference, rtol=2e-4, atol=2e-5)


def test_pending_points_are_not_asked_again() -> None:
    first = cases()["two"]
    point = maximize_improvement(first, box(X), generator(0, "x"))
    tried = torch.cat([X, point])
    conditioned = tuple(one.conditioned(point) for one in several(True))
    after = JointImprovement.of(conditioned, [], tried, references=[None, None])
    assert after(point.numpy())[0] < first(point.numpy())[0] - 1
