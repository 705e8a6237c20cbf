r"""Where to look, and at which fidelity: the expected gain per cost, in closed form.

An evaluation of a configuration at a low fidelity moves the posterior mean at the target by a
normal variable whose variance is its *gain* (`models.fidelity`). Its worth is the expected
improvement of the best posterior mean by that move,

.. math:: \alpha(x, s) = \frac{1}{c(s)} \sum_\beta \pi_\beta\, E[(\mu_\beta(x) + \tau_\beta(x, s) Z
          - \mu^*_\beta)^+],

the knowledge gradient over the configuration and the best one so far. At the target the gain is the
whole posterior variance, and this is expected improvement. A value counts for the user when it was
measured at the target: there the improvement is over the best of those, so that a configuration
that is promising by low fidelities is evaluated at the target once little can be learnt elsewhere
for its cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from botorch_fed.acquisition.earned import Domain, EarnedImprovement, maximize_improvement
from botorch_fed.models.earned_prior import EarnedPosterior
from botorch_fed.models.feasibility import Feasibility
from botorch_fed.models.fidelity import FidelityGP
from botorch_fed.models.local_gp import Array
from botorch_fed.rng import Generator

NUM_LOOKED = 256  # random points by which the fidelity is chosen
TARGET = 1.0  # its place on the way to the target


@dataclass(frozen=True, eq=False)
class Level:
    """A fidelity that can be asked for.

    Attributes:
        way: How far it is on the way to the target, 0 to 1.
        cost: Of an evaluation, in evaluations at the target.
        domain: Where a configuration may lie; `tried` are those that were evaluated at this
            fidelity or a higher one.
    """

    way: float
    cost: float
    domain: Domain


def maximize_gain(
    posterior: EarnedPosterior,
    levels: Sequence[Level],
    X: Tensor,
    way: Array,
    stream: Generator,
    feasibility: Feasibility | None = None,
) -> tuple[Tensor, int]:
    """The best configuration, `1 x d`, and the index of its fidelity.

    The fidelity is that of the largest gain per cost among random points and those known, or all
    candidates; then the configuration is improved at it.

    Args:
        posterior: Models over fidelities.
        levels: The fidelities among which is chosen, one at least.
        X: Configurations that were evaluated or are being, `n x d` with n > 0.
        way: How far each is on the way to the target, `n`.
        stream: Of random points.
        feasibility: What succeeds.
    """
    posterior = posterior.pruned()
    Z, prior = posterior.warp(X), posterior.prior_values(X)
    means = [c.predict(Z, prior)[0] for c in posterior.components]
    at_target = way >= TARGET
    known = tuple(float(mean.max()) for mean in means)
    in_hand = tuple(float(mean[at_target].max()) for mean in means) if at_target.any() else known
    gains = [
        _gain(posterior, level.way, in_hand if level.way >= TARGET else known, feasibility)
        for level in levels
    ]
    first = levels[0].domain
    looked = first.spread(NUM_LOOKED, stream, posterior.log_warp.untransform)
    scores = [
        _best_score(gain, level, torch.cat([looked, X[way < level.way]]))
        for gain, level in zip(gains, levels, strict=True)
    ]
    index = int(np.argmax(scores))
    level, gain = levels[index], gains[index]
    point = maximize_improvement(gain, level.domain, stream)
    # A configuration that is known at a lower fidelity is met by no search exactly.
    again = _goes_on(level, X[way < level.way])
    if len(again):
        values = gain(posterior.warp(torch.cat([again, point])))
        if values[:-1].max() >= values[-1]:
            best = int(values[:-1].argmax())
            point = again[best : best + 1]
    return point, index


def most_promising(
    posterior: EarnedPosterior, level: Level, X: Tensor, stream: Generator
) -> Tensor:
    """The configuration of the best mean at the target, `1 x d`.

    Args:
        posterior: Models over fidelities.
        level: The target.
        X: Configurations that were evaluated at lower fidelities, `n x d`.
        stream: Of random points, which are looked at beside them, or all candidates.
    """
    domain = level.domain
    points = domain.candidates
    if points is None:
        looked = domain.spread(NUM_LOOKED, stream, posterior.log_warp.untransform)
        looked = looked if domain.snap is None else domain.snap(looked)
        points = torch.cat([X, looked])
    again = _goes_on(level, points)
    points = again if len(again) else points
    best = int(posterior.predict(points)[0].argmax())
    return points[best : best + 1]


def _gain(
    posterior: EarnedPosterior,
    way: float,
    best: tuple[float, ...],
    feasibility: Feasibility | None,
) -> EarnedImprovement:
    """Log expected improvement of the mean at the target by an evaluation at a fidelity."""
    components = []
    for component in posterior.components:
        assert isinstance(component, FidelityGP)
        components.append(component.at(way))
    return EarnedImprovement(replace(posterior, components=tuple(components)), best, feasibility)


def _best_score(gain: EarnedImprovement, level: Level, points: Tensor) -> float:
    """The largest log gain per cost at one fidelity; minus infinity where nothing is new."""
    if level.domain.candidates is not None:
        points = level.domain.candidates
    points = _goes_on(level, points)
    if not len(points):
        return -math.inf
    return float(gain(gain.posterior.warp(points)).max()) - math.log(level.cost)


def _goes_on(level: Level, X: Tensor) -> Tensor:
    """The points of `n x d` that can be evaluated at a fidelity and were not tried there."""
    domain = level.domain
    known = domain.tried if domain.failed is None else torch.cat([domain.tried, domain.failed])
    seen = {row.tobytes() for row in known.numpy()}
    fresh = [row.tobytes() not in seen for row in X.numpy()]
    if domain.candidates is not None:
        listed = {row.tobytes() for row in domain.candidates.numpy()}
        fresh = [new and row.tobytes() in listed for new, row in zip(fresh, X.numpy(), strict=True)]
    return X[torch.tensor(fresh, dtype=torch.bool)]
