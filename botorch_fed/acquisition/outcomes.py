r"""Where to look with several outcomes, in closed form with gradients.

Every outcome has models of its own, an `EarnedPosterior` :math:`j`, independent of the others'.
What is maximised is the logarithm of

.. math:: \alpha(x) = G(x) \prod_c P_c(x),

the expected gain times the probability that each outcome constraint :math:`c` is met,
:math:`P_c = \sum_\beta \pi_{c\beta} P_\beta(l_c \le f_c(x) \le u_c)`.

one objective        `EarnedImprovement` over the best posterior mean of a tried point where every
                     constraint is probably met
several objectives   `HypervolumeImprovement`, the expected growth of the hypervolume

A hypervolume grows by what a point adds in the cells of the space that no tried point dominates.
In a cell with corners :math:`a < b` that is a product over objectives, of which the outcomes are
independent, so that averages over trusts are taken one by one:

.. math:: G(x) = \sum_{(a, b)} \prod_j \bigl(E_j(a_j) - E_j(b_j)\bigr), \qquad
          E_j(t) = \sum_\beta \pi_{j\beta} \, \mathrm E_\beta[(f_j(x) - t)_+].

Where no tried point probably meets all constraints, :math:`G = 1`: first of all one is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from botorch.utils.multi_objective.box_decompositions.non_dominated import (
    FastNondominatedPartitioning,
)
from botorch.utils.multi_objective.pareto import is_non_dominated
from scipy.special import log_ndtr
from torch import Tensor

from botorch_fed.acquisition.earned import EarnedImprovement, gradient_ratios, log_improvement
from botorch_fed.models.earned_prior import EarnedPosterior
from botorch_fed.models.feasibility import Feasibility
from botorch_fed.models.local_gp import Array

PROBABLE = math.log(0.5)  # that a constraint is met at a tried point
BELOW_FRONT = 0.1  # of a reference point that nobody gave, in ranges of the front
MIN_RANGE = 0.1  # of a front, on the standardised scale
NUM_LEADERS = 4  # tried points near which to look, with one objective
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class _Moments:
    """One outcome at `m x d` points by each of its `K` models.

    Attributes:
        log_weights: Logarithms of the models' probabilities, `K`.
        means: `K x m`.
        deviations: `K x m`.
        slopes: Gradients of the two, each `K x m x d`; None where nobody asked.
    """

    log_weights: Array
    means: Array
    deviations: Array
    slopes: tuple[Array, Array] | None

    @classmethod
    def of(cls, posterior: EarnedPosterior, Z: Array, *, gradient: bool) -> _Moments:
        """At points as the models see them."""
        prior, prior_slope = posterior.prior_and_slope(Z)
        found = [c.predict(Z, prior) for c in posterior.components]
        deviations = np.sqrt(np.stack([variance for _, variance in found]))
        slopes = None
        if gradient:
            both = [c.slopes(Z) for c in posterior.components]
            trusts = [c.trust for c in posterior.components]
            means = [slope + t * prior_slope for (slope, _), t in zip(both, trusts, strict=True)]
            variances = np.stack([variance for _, variance in both])
            slopes = np.stack(means), variances / (2 * deviations[..., None])
        log_weights = np.log(posterior.weights)
        return cls(log_weights, np.stack([mean for mean, _ in found]), deviations, slopes)

    def log_excess(self, levels: Array) -> tuple[Array, Array | None]:
        """Logarithms of the expected excess over `T` levels, `T x m`, and gradients `T x m x d`."""
        parts, slopes = [], []
        for k, (mean, deviation) in enumerate(zip(self.means, self.deviations, strict=True)):
            u = (mean - levels[:, None]) / deviation
            log_h = log_improvement(u)
            parts.append(self.log_weights[k] + log_h + np.log(deviation))
            if self.slopes is not None:
                upper, density = (part / deviation for part in gradient_ratios(u, log_h))
                slopes.append(
                    upper[..., None] * self.slopes[0][k] + density[..., None] * self.slopes[1][k]
                )
        return _averaged(np.stack(parts), slopes)

    def log_within(self, lower: float, upper: float) -> tuple[Array, Array | None]:
        """Logarithms of the probability to lie within bounds, `m`, and gradients `m x d`."""
        parts, slopes = [], []
        for k, (mean, deviation) in enumerate(zip(self.means, self.deviations, strict=True)):
            a, b = (lower - mean) / deviation, (upper - mean) / deviation
            flipped = a > 0  # the smaller tail, where no digits are lost
            low, high = np.where(flipped, -b, a), np.where(flipped, -a, b)
            log_high = log_ndtr(high)
            inside = log_high + _log_one_minus(np.exp(log_ndtr(low) - log_high))
            parts.append(self.log_weights[k] + inside)
            if self.slopes is not None:
                at_a, at_b = _density_ratio(a, inside), _density_ratio(b, inside)
                by_mean = (at_a - at_b) / deviation
                by_deviation = (_times(a, at_a) - _times(b, at_b)) / deviation
                slopes.append(
                    by_mean[:, None] * self.slopes[0][k] + by_deviation[:, None] * self.slopes[1][k]
                )
        return _averaged(np.stack(parts), slopes)


def _averaged(parts: Array, slopes: list[Array]) -> tuple[Array, Array | None]:
    """The logarithm of a sum over models, and its gradient from those of the terms."""
    highest = parts.max(axis=0)
    total = highest + np.log(np.exp(parts - highest).sum(axis=0))
    if not slopes:
        return total, None
    shares = np.exp(parts - total)[..., None]
    return total, (shares * np.stack(slopes)).sum(axis=0)


def _log_one_minus(ratio: Array) -> Array:
    logarithm: Array = np.log(np.maximum(1.0 - ratio, 1e-300))
    return logarithm


def _density_ratio(v: Array, log_probability: Array) -> Array:
    """The normal density over a probability; 0 at infinity."""
    with np.errstate(over="ignore"):
        ratio: Array = np.exp(-0.5 * v * v - _LOG_SQRT_2PI - log_probability)
    return np.where(np.isfinite(v), ratio, 0.0)


def _times(v: Array, ratio: Array) -> Array:
    return np.where(np.isfinite(v), v, 0.0) * ratio


# ------------------------------------------------------------------ constraints


@dataclass(frozen=True, eq=False)
class Limit:
    """An outcome constraint.

    Attributes:
        posterior: The models of the outcome.
        lower: The least value, on their standardised scale; minus infinity without one.
        upper: The largest value.
    """

    posterior: EarnedPosterior
    lower: float
    upper: float

    @classmethod
    def of(cls, posterior: EarnedPosterior, lower: float | None, upper: float | None) -> Limit:
        """Bounds on the scale on which outcomes were given to the models."""
        scale = posterior.outcome
        low = -math.inf if lower is None else (lower - scale.centre) / scale.scale
        high = math.inf if upper is None else (upper - scale.centre) / scale.scale
        return cls(posterior.pruned(), low, high)

    def __call__(self, Z: Array) -> Array:
        """Log probabilities at `m x d` points as the models see them, `m`."""
        moments = _Moments.of(self.posterior, Z, gradient=False)
        return moments.log_within(self.lower, self.upper)[0]

    def with_gradient(self, Z: Array) -> tuple[Array, Array]:
        """Log probabilities `m` and gradients `m x d`."""
        moments = _Moments.of(self.posterior, Z, gradient=True)
        values, gradient = moments.log_within(self.lower, self.upper)
        assert gradient is not None
        return values, gradient


def probably_met(limits: Sequence[Limit], X: Tensor) -> Array:
    """At which of `n x d` points every constraint is probably met, `n` booleans."""
    met = np.ones(len(X), dtype=bool)
    for limit in limits:
        met &= limit(limit.posterior.warp(X)) >= PROBABLE
    return met


# ------------------------------------------------------------------ several objectives


@dataclass(frozen=True, eq=False)
class HypervolumeImprovement:
    """The logarithm of the expected growth of a hypervolume.

    Attributes:
        posteriors: The models of each of `J` objectives.
        lower: Lower corners of the cells that no tried point dominates, `C x J`.
        upper: Upper corners; infinite where a cell is open.
    """

    posteriors: tuple[EarnedPosterior, ...]
    lower: Array
    upper: Array

    @classmethod
    def of(
        cls,
        posteriors: Sequence[EarnedPosterior],
        X: Tensor,
        references: Sequence[float | None],
    ) -> HypervolumeImprovement:
        """Over the posterior means of tried points.

        Args:
            posteriors: The models of each objective.
            X: Tried points that probably meet all constraints, `n x d` with n > 0.
            references: The worst value of each objective that counts, on the scale on which
                outcomes were given; None for one a little below the front.
        """
        pruned = tuple(posterior.pruned() for posterior in posteriors)
        means = means_at(pruned, X)
        reference = reference_point(pruned, means, references)
        cells = FastNondominatedPartitioning(torch.from_numpy(reference), torch.from_numpy(means))
        lower, upper = cells.get_hypercell_bounds().numpy()
        return cls(pruned, lower, upper)

    def __call__(self, Z: Array) -> Array:
        """Values at `m x d` points as the models see them, `m`."""
        return self._evaluated(Z, gradient=False)[0]

    def with_gradient(self, Z: Array) -> tuple[Array, Array]:
        """Values `m` and gradients `m x d`."""
        values, gradient = self._evaluated(Z, gradient=True)
        assert gradient is not None
        return values, gradient

    def _evaluated(self, Z: Array, *, gradient: bool) -> tuple[Array, Array | None]:
        values: Array = np.zeros((len(self.lower), len(Z)))
        slopes: Array = np.zeros((*values.shape, Z.shape[1] if gradient else 0))
        for j, posterior in enumerate(self.posteriors):
            moments = _Moments.of(posterior, Z, gradient=gradient)
            corners = np.concatenate([self.lower[:, j], self.upper[:, j]])
            levels, places = np.unique(corners, return_inverse=True)
            finite = np.isfinite(levels)
            log_excess, slope = moments.log_excess(levels[finite])
            log_excess = np.concatenate([log_excess, np.full((1, len(Z)), -math.inf)])
            low, high = np.minimum(places, finite.sum()).reshape(2, -1)
            ratio = np.exp(log_excess[high] - log_excess[low])
            rest = np.maximum(-np.expm1(log_excess[high] - log_excess[low]), 1e-300)
            values += log_excess[low] + np.log(rest)
            if slope is not None:
                slope = np.concatenate([slope, np.zeros((1, *slope.shape[1:]))])
                slopes += (slope[low] - ratio[..., None] * slope[high]) / rest[..., None]
        return _averaged(values, [*slopes] if gradient else [])


def means_at(posteriors: Sequence[EarnedPosterior], X: Tensor) -> Array:
    """Posterior means of each outcome on its standardised scale at `n x d` points, `n x J`."""
    return np.stack([posterior.predict(X)[0] for posterior in posteriors], axis=1)


def reference_point(
    posteriors: Sequence[EarnedPosterior], means: Array, references: Sequence[float | None]
) -> Array:
    """The reference point of a hypervolume on standardised scales, `J`.

    Where none was given it lies below the worst value on the front by a part of the front's range,
    as BoTorch infers it.

    Args:
        posteriors: The models of each objective.
        means: Outcomes of tried points on standardised scales, `n x J`.
        references: The worst value that counts, on the scale on which outcomes were given, or None.
    """
    front = means[is_non_dominated(torch.from_numpy(means)).numpy()]
    reach = np.maximum(np.ptp(front, axis=0), MIN_RANGE)
    inferred: Array = front.min(axis=0) - BELOW_FRONT * reach
    for j, (posterior, given) in enumerate(zip(posteriors, references, strict=True)):
        if given is not None:
            inferred[j] = (given - posterior.outcome.centre) / posterior.outcome.scale
    return inferred


# ------------------------------------------------------------------ together


@dataclass(frozen=True, eq=False)
class JointImprovement:
    """The logarithm of the expected gain times the probabilities of all constraints.

    Attributes:
        gain: Of the objectives; None while no tried point probably meets the constraints.
        limits: The constraints.
        feasibility: Which evaluations succeed; None if all do.
    """

    gain: EarnedImprovement | HypervolumeImprovement | None
    limits: tuple[Limit, ...]
    feasibility: Feasibility | None = None

    @classmethod
    def of(
        cls,
        objectives: Sequence[EarnedPosterior],
        limits: Sequence[Limit],
        X: Tensor,
        *,
        references: Sequence[float | None],
        feasibility: Feasibility | None = None,
    ) -> JointImprovement:
        """Over tried points, `n x d`.

        Args:
            objectives: The models of each objective.
            limits: The outcome constraints.
            X: The points.
            references: As in `HypervolumeImprovement.of`.
            feasibility: Which evaluations succeed.
        """
        met = X[torch.from_numpy(probably_met(limits, X))]
        gain: EarnedImprovement | HypervolumeImprovement | None = None
        if len(met) and len(objectives) == 1:
            gain = EarnedImprovement.of(objectives[0], met)
        elif len(met):
            gain = HypervolumeImprovement.of(objectives, met, references)
        return cls(gain, tuple(limits), feasibility)

    @property
    def posterior(self) -> EarnedPosterior:
        """One of the outcomes' models: all see inputs on the same scale."""
        match self.gain:
            case EarnedImprovement():
                return self.gain.posterior
            case HypervolumeImprovement():
                return self.gain.posteriors[0]
        return self.limits[0].posterior

    def __call__(self, Z: Array) -> Array:
        """Values at `m x d` points as the models see them, `m`."""
        total = np.zeros(len(Z)) if self.gain is None else self.gain(Z)
        for limit in self.limits:
            total = total + limit(Z)
        return total if self.feasibility is None else total + self.feasibility.log_probability(Z)

    def with_gradient(self, Z: Array) -> tuple[Array, Array]:
        """Values `m` and gradients `m x d`."""
        parts = [part for part in (self.gain, *self.limits, self.feasibility) if part is not None]
        found = [part.with_gradient(Z) for part in parts]
        return sum(v for v, _ in found), sum(g for _, g in found)  # type: ignore[return-value]

    def leaders(self, X: Tensor) -> Tensor:
        """Of `n x d` tried points those near which better ones may lie."""
        met = probably_met(self.limits, X)
        if self.gain is None or not met.any():
            chances = sum(limit(limit.posterior.warp(X)) for limit in self.limits)
            return X[torch.from_numpy(np.argsort(-np.asarray(chances))[:NUM_LEADERS].copy())]
        allowed = X[torch.from_numpy(met)]
        if isinstance(self.gain, EarnedImprovement):
            return self.gain.leaders(allowed)
        means = torch.from_numpy(means_at(self.gain.posteriors, allowed))
        return allowed[is_non_dominated(means)]
