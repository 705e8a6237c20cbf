r"""Expected improvement under an `EarnedPosterior`, in closed form with its gradient.

An expectation under an average of models is the average of the expectations,

.. math:: \alpha(x) = \log \sum_\beta \pi_\beta\, \mathrm{EI}_\beta(x),

over the best posterior mean of a tried point in each model. All arithmetic is in NumPy, for many
points at once: a maximisation takes milliseconds.

Where evaluations fail, the logarithm of the probability of success is added: the expectation of an
improvement that counts only if the evaluation succeeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr, ndtr
from torch import Tensor

from botorch_fed.acquisition.within import ascend_within
from botorch_fed.feasible_set import FeasibleSet
from botorch_fed.models.earned_prior import EarnedPosterior, PriorFunction, spread_over
from botorch_fed.models.feasibility import Feasibility
from botorch_fed.models.local_gp import Array, LocalGP
from botorch_fed.rng import Generator

Flags = NDArray[np.bool_]
Ranks = NDArray[np.int_]

NUM_RAW = 512  # random points that the optimiser looks at
NUM_NEAR = 64  # and points near the best that were tried
NUM_RESTARTS = 8  # of which so many are improved
NUM_FIRST = 64  # random points that are looked at while nothing has succeeded
MAX_ITERATIONS = 60
NUM_MIXED = 4  # points whose discrete values are improved,
MAX_ROUNDS = 4  # in so many rounds at most
NUM_STEPS = 8  # random steps from each point, where a check has no gradient,
WIDTHS = (0.2, 0.1, 0.05, 0.02, 0.01, 0.003)  # of these lengths in turn
FAR = -1e3  # below it one term of an expansion is exact to 1e-5
_SQRT_HALF_PI = math.sqrt(math.pi / 2)
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def log_improvement(u: Array) -> Array:
    r""":math:`\log(\varphi(u) + u \Phi(u))`, without underflow.

    Args:
        u: Standardised improvements.
    """
    result = np.empty_like(u)
    upper = u > -1.0
    v = u[upper]
    result[upper] = np.log(np.exp(-0.5 * v * v) / math.sqrt(2 * math.pi) + v * ndtr(v))
    v = u[~upper]
    # phi(v) (1 + v Phi(v) / phi(v)), and far below an expansion of the bracket: 1 / v^2.
    near = v > FAR
    bracket = np.where(near, 1.0 + v * _SQRT_HALF_PI * erfcx(-v / math.sqrt(2)), 1.0)
    log_bracket = np.where(near, np.log(np.maximum(bracket, 1e-300)), -2 * np.log(-v))
    result[~upper] = -0.5 * v * v - _LOG_SQRT_2PI + log_bracket
    return result


def gradient_ratios(u: Array, log_h: Array) -> tuple[Array, Array]:
    r""":math:`\Phi(u) / h(u)` and :math:`\varphi(u) / h(u)`, without underflow."""
    far = u < FAR
    upper = np.where(far, 0.0, log_ndtr(u) - log_h)
    density = np.where(far, 0.0, -0.5 * u * u - _LOG_SQRT_2PI - log_h)
    return np.where(far, -u, np.exp(upper)), np.where(far, u * u, np.exp(density))


@dataclass(frozen=True)
class _Terms:
    """What values and gradients have in common.

    Attributes:
        moments: For each model standardised improvements, deviations and logarithms of `h`.
        parts: For each model its logarithmic share of the sum.
        total: The logarithm of the sum.
    """

    moments: list[tuple[Array, Array, Array]]
    parts: Array
    total: Array


@dataclass(frozen=True, eq=False)
class EarnedImprovement:
    """Log expected improvement of an average of models.

    Attributes:
        posterior: The models and their weights.
        best: For each model the best posterior mean of a tried point.
        feasibility: What succeeds, seen by the same warp; None if everything does.
    """

    posterior: EarnedPosterior
    best: tuple[float, ...]
    feasibility: Feasibility | None = None

    @classmethod
    def of(
        cls, posterior: EarnedPosterior, X: Tensor, feasibility: Feasibility | None = None
    ) -> EarnedImprovement:
        """Over the best of the points that were tried, `n x d`."""
        posterior = posterior.pruned()
        Z, prior = posterior.warp(X), posterior.prior_values(X)
        best = tuple(float(c.predict(Z, prior)[0].max()) for c in posterior.components)
        return cls(posterior, best, feasibility)

    def __call__(self, Z: Array) -> Array:
        """Values at `m x d` points as the models see them, `m`."""
        total = self._terms(Z, self._prior(Z)).total
        return total if self.feasibility is None else total + self.feasibility.log_probability(Z)

    def with_gradient(self, Z: Array) -> tuple[Array, Array]:
        """Values `m` and gradients `m x d` at `m x d` points as the models see them."""
        prior, prior_slope = self.posterior.prior_and_slope(Z)
        terms = self._terms(Z, prior)
        gradient = np.zeros_like(Z)
        for k, component in enumerate(self.posterior.components):
            share = np.exp(terms.parts[k] - terms.total)
            gradient += share[:, None] * self._slope(component, terms, k, Z, prior_slope)
        if self.feasibility is None:
            return terms.total, gradient
        success, slope = self.feasibility.with_gradient(Z)
        return terms.total + success, gradient + slope

    def _terms(self, Z: Array, prior: Array | float) -> _Terms:
        moments, parts = [], []
        for c, best, weight in zip(
            self.posterior.components, self.best, self.posterior.weights, strict=True
        ):
            mean, variance = c.predict(Z, prior)
            deviation = np.sqrt(variance)
            u = (mean - best) / deviation
            log_h = log_improvement(u)
            moments.append((u, deviation, log_h))
            with np.errstate(divide="ignore"):  # a model that has lost all its weight
                parts.append(np.log(weight) + log_h + np.log(deviation))
        stacked = np.stack(parts)
        highest = stacked.max(axis=0)
        total = highest + np.log(np.exp(stacked - highest).sum(axis=0))
        return _Terms(moments, stacked, total)

    def _slope(
        self, c: LocalGP, terms: _Terms, k: int, Z: Array, prior_slope: Array | float
    ) -> Array:
        """Of one model's log expected improvement, `m x d`."""
        u, deviation, log_h = terms.moments[k]
        mean, variance = c.slopes(Z)
        mean = mean + c.trust * prior_slope
        # EI = s h(u) with dEI = Phi(u) d mean + phi(u) d s.
        upper, density = gradient_ratios(u, log_h)
        slope: Array = upper[:, None] * mean / deviation[:, None] + density[:, None] * variance / (
            2 * deviation[:, None] ** 2
        )
        return slope

    def _prior(self, Z: Array) -> Array | float:
        return self.posterior.prior_values(self.posterior.unwarp(Z))

    def leaders(self, X: Tensor) -> Tensor:
        """Of `n x d` tried points those near which better ones may lie."""
        mean = self.posterior.predict(X)[0]
        return X[torch.from_numpy(mean.argsort()[::-1].copy())[:4]]


# ------------------------------------------------------------------ the best point


class Improvement(Protocol):
    """What is maximised over a domain; `EarnedImprovement` is one.

    Attributes:
        posterior: Own models: on their scale inputs are seen.
    """

    @property
    def posterior(self) -> EarnedPosterior: ...

    def __call__(self, Z: Array) -> Array: ...

    def with_gradient(self, Z: Array) -> tuple[Array, Array]: ...

    def leaders(self, X: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Domain:
    """Where a point may lie.

    Attributes:
        candidates: The only points that may be chosen, `K x d`; None for a box.
        lower: Lower corner of the box in the unit cube, `d`.
        upper: Upper corner.
        snap: From `n x d` points to the nearest that can be evaluated; None if all can.
        tried: Points that are not to be chosen again, `n x d`.
        failed: Points that are chosen last of all, `m x d`, if there are any.
        feasible: What can be evaluated, where there are constraints or discrete values; of the
            whole unit cube.
    """

    lower: Tensor
    upper: Tensor
    tried: Tensor
    candidates: Tensor | None = None
    snap: Callable[[Tensor], Tensor] | None = None
    failed: Tensor | None = None
    feasible: FeasibleSet | None = None

    @property
    def constrained(self) -> bool:
        """Whether there are constraints."""
        return self.feasible is not None and self.feasible.constrained

    def spread(self, count: int, stream: Generator, spread: Callable[[Tensor], Tensor]) -> Tensor:
        """Random points, `count x d`; where there are constraints, points that meet them.

        Args:
            count: How many.
            stream: Of the points.
            spread: From evenly spread points of the unit cube to points of the box.
        """
        if self.feasible is not None and self.feasible.constrained:
            return self.feasible.uniform(count, stream, spread)
        return spread(stream.uniform(count, self.dim))

    @property
    def dim(self) -> int:
        """Number of inputs."""
        return len(self.lower)


# Of a point from those tried, as the models see them: closer, a second look says nothing new.
MIN_DISTANCE = 1e-4


def maximize_improvement(improvement: Improvement, domain: Domain, stream: Generator) -> Tensor:
    """The best point, `1 x d`.

    Random points of the box and points near the best that was tried, a few of them improved by
    L-BFGS-B; then what can be evaluated nearest to them. From the best of these, integers and
    choices are changed as long as that helps, in turns with the other inputs. Under constraints
    improvement is by SLSQP within linear ones, and by random steps where there is a check. Of a
    list, the best candidate that was not tried.

    Args:
        improvement: What is maximised.
        domain: Where.
        stream: Of the random points.
    """
    posterior = improvement.posterior
    if domain.candidates is not None:
        return best_candidate(lambda X: improvement(posterior.warp(X)), domain)
    if domain.constrained:
        return _constrained_best(improvement, domain, stream)
    low, high = (posterior.warp(side.unsqueeze(0))[0] for side in (domain.lower, domain.upper))
    raw = _raw_points(improvement, low, high, domain, stream)
    values = improvement(raw)
    starts = raw[_starts(values, stream)]
    ends = _improved(improvement, starts, low, high)
    order = values.argsort()[::-1][:NUM_RESTARTS]
    points, ranks = _evaluable(posterior, domain, np.concatenate([ends, raw[order]]))
    if domain.snap is not None and ranks.all():  # in a small space the best may all be tried
        points, ranks = _evaluable(posterior, domain, raw)
    if domain.feasible is not None and domain.feasible.blocks:
        points, ranks = _with_discrete(improvement, domain, points, ranks)
    return _best(improvement(posterior.warp(points)), points, ranks)


def _constrained_best(improvement: Improvement, domain: Domain, stream: Generator) -> Tensor:
    """The best point of a set with constraints, `1 x d`."""
    posterior, feasible = improvement.posterior, domain.feasible
    assert feasible is not None

    def score(X: Tensor) -> Array:
        return improvement(posterior.warp(X))

    raw = feasible.uniform(NUM_RAW, stream, posterior.log_warp.untransform)
    raw = torch.cat([raw, _near_best(improvement, domain, stream)])
    values = score(raw)
    starts = raw[_starts(values, stream)]
    ends = ascend_within(lambda X: _unit_gradient(improvement, X), starts.numpy(), feasible)
    order = values.argsort()[::-1][:NUM_RESTARTS].copy()
    points = torch.cat([feasible.nearest(torch.from_numpy(ends)), raw[order]])
    if feasible.check is not None:
        points = _polished(improvement, feasible, torch.cat([points, starts]), stream)
    ranks = _ranks_of(points, domain, posterior)
    if ranks.all():  # in a small space the best may all be tried
        points = torch.cat([points, raw])
        ranks = _ranks_of(points, domain, posterior)
    if feasible.blocks:
        points, ranks = _with_discrete(improvement, domain, points, ranks)
    return _best(score(points), points, ranks)


def _near_best(improvement: Improvement, domain: Domain, stream: Generator) -> Tensor:
    """Points that can be evaluated near the best that were tried, and these if they can be."""
    assert domain.feasible is not None
    best = improvement.leaders(domain.tried)
    steps = torch.from_numpy(_steps(domain.dim, stream))
    near = best[torch.arange(NUM_NEAR) % len(best)] + steps
    return domain.feasible.nearest(near.clamp(0.0, 1.0))


def _steps(dim: int, stream: Generator) -> Array:
    """Random steps of different lengths, `NUM_NEAR x d`."""
    widths = 10.0 ** -(0.5 + 1.5 * stream.uniform(NUM_NEAR, 1).numpy())
    steps: Array = widths * stream.normal(NUM_NEAR, dim).numpy()
    return steps


def _unit_gradient(improvement: Improvement, X: Array) -> tuple[Array, Array]:
    """Values and gradients at `m x d` points of the unit cube."""
    warp = improvement.posterior.log_warp
    if warp.identity:
        return improvement.with_gradient(X)
    points = torch.from_numpy(X).requires_grad_()
    warped = warp.transform(points)
    values, gradient = improvement.with_gradient(warped.detach().numpy())
    (slope,) = torch.autograd.grad(warped, points, torch.from_numpy(gradient))
    return values, slope.numpy()


def _polished(
    improvement: Improvement, feasible: FeasibleSet, points: Tensor, stream: Generator
) -> Tensor:
    """Points of the set, each moved by random steps, as the models see them, that improve it."""
    posterior = improvement.posterior
    values = improvement(posterior.warp(points))
    for width in WIDTHS:
        steps = width * stream.normal(NUM_STEPS, *points.shape).numpy()
        moved = (posterior.warp(points) + steps).clip(0.0, 1.0).reshape(-1, points.shape[1])
        tried = feasible.legal(posterior.unwarp(moved))
        if len(feasible.C):
            tried = feasible.nearest(tried)
        scores = np.where(feasible.contains(tried), improvement(posterior.warp(tried)), -np.inf)
        scores = scores.reshape(NUM_STEPS, len(points))
        best = scores.argmax(axis=0)
        here = np.arange(len(points))
        better = torch.from_numpy(scores[best, here] > values)
        found = tried.reshape(NUM_STEPS, *points.shape)[torch.from_numpy(best), here]
        points = torch.where(better.unsqueeze(-1), found, points)
        values = np.maximum(values, scores[best, here])
    return points


def _with_discrete(
    improvement: Improvement, domain: Domain, points: Tensor, ranks: Ranks
) -> tuple[Tensor, Ranks]:
    """With points whose integers and choices are better, and the ranks of all.

    From the best points on: the best of the neighbours with other discrete values, and then the
    other inputs improved with these fixed, as long as that helps.
    """
    posterior, feasible = improvement.posterior, domain.feasible
    assert feasible is not None
    values = improvement(posterior.warp(points))
    order = np.lexsort((-values, ranks))
    _, firsts = np.unique(points[torch.from_numpy(order)].numpy(), axis=0, return_index=True)
    here = points[torch.from_numpy(order[np.sort(firsts)[:NUM_MIXED]])]
    found = [points]
    for _ in range(MAX_ROUNDS):
        around = [feasible.neighbours(x) for x in here]
        moved = torch.cat([_refined(improvement, domain, here), *around])
        found.append(moved)
        scores, ranked = improvement(posterior.warp(moved)), _ranks_of(moved, domain, posterior)
        before = improvement(posterior.warp(here)), _ranks_of(here, domain, posterior)
        following, start = here.clone(), len(here)
        improved = False
        for i, block in enumerate(around):
            mine = np.r_[i, start : start + len(block)]
            start += len(block)
            best = int(mine[np.lexsort((-scores[mine], ranked[mine]))[0]])
            better = (ranked[best], -scores[best]) < (before[1][i], -before[0][i] - 1e-9)
            if better:
                following[i], improved = moved[best], True
        if not improved:
            break
        here = following
    everything = torch.cat(found)
    return everything, _ranks_of(everything, domain, posterior)


def _refined(improvement: Improvement, domain: Domain, points: Tensor) -> Tensor:
    """Points whose continuous inputs are improved, with the same discrete values."""
    posterior, feasible = improvement.posterior, domain.feasible
    assert feasible is not None
    free = feasible.continuous
    if not free.any():
        return points
    if feasible.constrained:
        ends = ascend_within(
            lambda X: _unit_gradient(improvement, X), points.numpy(), feasible, free=free
        )
        return feasible.nearest(torch.from_numpy(ends))
    Z = posterior.warp(points)
    low, high = (posterior.warp(side.unsqueeze(0))[0] for side in (domain.lower, domain.upper))
    ends = _improved(improvement, Z, np.where(free, low, Z), np.where(free, high, Z))
    return _evaluable(posterior, domain, ends)[0]


def _ranks_of(points: Tensor, domain: Domain, posterior: EarnedPosterior) -> Ranks:
    return _ranks(points, domain, MIN_DISTANCE, posterior.warp)


def _evaluable(posterior: EarnedPosterior, domain: Domain, Z: Array) -> tuple[Tensor, Ranks]:
    """The points of the domain nearest to points as the models see them, and their ranks."""
    points = torch.minimum(torch.maximum(posterior.unwarp(Z), domain.lower), domain.upper)
    if domain.snap is not None:
        points = domain.snap(points)
    return points, _ranks_of(points, domain, posterior)


def best_candidate(score: Callable[[Tensor], Array], domain: Domain) -> Tensor:
    """The candidate of the highest score that was not tried, `1 x d`; ties go to the first."""
    assert domain.candidates is not None
    candidates = domain.candidates.double()
    return _best(score(candidates), candidates, _ranks(candidates, domain, 0.0))


def maximize_prior(
    prior: PriorFunction,
    domain: Domain,
    stream: Generator,
    *,
    apart: float,
    feasibility: Feasibility | None = None,
) -> Tensor:
    """Where the prior function is largest, away from what was tried, `1 x d`.

    Args:
        prior: The function.
        domain: Where.
        stream: Of the random points that are looked at.
        apart: How far from tried points, in the unit cube, if the domain has room.
        feasibility: What succeeds: the logarithm of its probability is added.
    """

    def score(X: Tensor) -> Array:
        values = prior.values(X)
        if feasibility is None:
            return values
        return values + feasibility.log_probability(feasibility.warp(X))

    def spread(uniform: Tensor) -> Tensor:
        seen = spread_over(prior.feature_map, uniform)
        return domain.lower + (domain.upper - domain.lower) * seen

    points = domain.candidates
    if points is None:
        points = domain.spread(4 * NUM_RAW, stream, spread)
        if domain.snap is not None and not domain.constrained:
            order = score(points).argsort()[::-1].copy()[:NUM_RAW]
            points = domain.snap(points[torch.from_numpy(order)])
    points = points.double()
    return _best(score(points), points, _ranks(points, domain, apart))


def maximize_feasibility(feasibility: Feasibility, domain: Domain, stream: Generator) -> Tensor:
    """The likeliest of a few random points to succeed, `1 x d`: while nothing has succeeded yet.

    The best of many would lie in a corner, as far from the failures as any point.

    Args:
        feasibility: What succeeds.
        domain: Where.
        stream: Of the random points.
    """

    def spread(uniform: Tensor) -> Tensor:
        if feasibility.log_warp is None:
            return domain.lower + (domain.upper - domain.lower) * uniform
        low, high = (
            torch.from_numpy(feasibility.warp(side)) for side in (domain.lower, domain.upper)
        )
        return feasibility.log_warp.untransform(low + (high - low) * uniform)

    points = domain.candidates
    if points is None:
        points = domain.spread(NUM_FIRST, stream, spread)
        if domain.snap is not None and not domain.constrained:
            points = domain.snap(points)
    points = points.double()
    values = feasibility.log_probability(feasibility.warp(points))
    return _best(values, points, _ranks(points, domain, MIN_DISTANCE, feasibility.warp))


def _raw_points(
    improvement: Improvement, low: Array, high: Array, domain: Domain, stream: Generator
) -> Array:
    """Uniform points as the models see them, and some near the best that was tried."""
    uniform = stream.uniform(NUM_RAW, domain.dim).numpy()
    raw = low + (high - low) * uniform
    if not len(domain.tried):
        return raw
    best = improvement.posterior.warp(improvement.leaders(domain.tried))
    steps = _steps(domain.dim, stream)
    near = best[np.arange(NUM_NEAR) % len(best)] + (high - low) * steps
    return np.concatenate([raw, near.clip(low, high)])


def _starts(values: Array, stream: Generator) -> Array:
    """Indices of the best points, and of others drawn by how good they are."""
    order = values.argsort()[::-1]
    best, rest = order[: NUM_RESTARTS // 2], order[NUM_RESTARTS // 2 :]
    spread = values.std() or 1.0
    # Gumbel noise on standardised values: a draw without replacement by their exponentials.
    gumbel = -np.log(-np.log(stream.uniform(len(rest)).numpy()))
    drawn = (values[rest] / spread + gumbel).argsort()[::-1][: NUM_RESTARTS - len(best)]
    return np.concatenate([best, rest[drawn]])


def _improved(improvement: Improvement, starts: Array, low: Array, high: Array) -> Array:
    """Where L-BFGS-B ends, within corners of one box `d` or of a box for each start `m x d`."""
    from scipy.optimize import minimize  # costs 70 ms to import, and only searches need it

    shape = starts.shape
    scale = max(float(np.abs(improvement(starts)).max()), 1.0)

    def loss(flat: Array) -> tuple[float, Array]:
        values, gradient = improvement.with_gradient(flat.reshape(shape))
        return -float(values.sum()) / scale, -gradient.ravel() / scale

    fit = minimize(
        loss,
        starts.ravel(),
        jac=True,
        method="L-BFGS-B",
        bounds=[
            *zip(
                np.broadcast_to(low, shape).ravel(),
                np.broadcast_to(high, shape).ravel(),
                strict=True,
            )
        ],
        options={"maxiter": MAX_ITERATIONS},
    )
    ends: Array = fit.x.reshape(shape)
    return ends


def _near(points: Tensor, tried: Tensor, apart: float) -> Flags:
    """Which points are no farther than that from one that was tried."""
    if not len(tried):
        return np.zeros(len(points), dtype=bool)
    mode = "donot_use_mm_for_euclid_dist"  # zero for equal points
    near: Flags = (torch.cdist(points, tried, compute_mode=mode).amin(dim=-1) <= apart).numpy()
    return near


def _ranks(
    points: Tensor, domain: Domain, apart: float, warp: Callable[[Tensor], Array] | None = None
) -> Ranks:
    """In which order points may be chosen: 0 new, 1 near one that was tried, 2 and 3 failed.

    Args:
        points: Of the domain, `m x d`.
        domain: What was tried, and what failed.
        apart: How far new points are from these.
        warp: On which scale distances are measured.
    """

    def seen(X: Tensor) -> Tensor:
        return X if warp is None else torch.from_numpy(warp(X))

    here = seen(points)
    near = _near(here, seen(domain.tried), apart)
    if domain.failed is None or not len(domain.failed):
        return near.astype(np.int_)
    failed = seen(domain.failed)
    same = _near(here, failed, min(apart, MIN_DISTANCE))
    return (near | _near(here, failed, apart)).astype(np.int_) + 2 * same.astype(np.int_)


def _best(values: Array, points: Tensor, ranks: Ranks) -> Tensor:
    """The point of the highest value among those of the lowest rank."""
    scores = np.nan_to_num(values, nan=-np.inf, neginf=-1e300)
    scores = np.where(ranks > ranks.min(), -np.inf, scores)
    best = int(scores.argmax())
    return points[best : best + 1]
