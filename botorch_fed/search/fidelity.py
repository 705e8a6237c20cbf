"""The default search in a space with a fidelity: what it says, and where it looks at which one.

A site models configurations and fidelities together (`models.fidelity`); what others say is about
the target, and so is what it says itself. It begins with cheap points and goes on at the target, so
that there is a value to improve on and a trend to learn, where the mean is best. Every further
evaluation is that of the largest gain per cost (`acquisition.fidelity`). Two rules keep what counts
from waiting: evaluations below the target cost no more than one at it before the next one there,
and what they leave of the budget is enough for one.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from botorch_fed.acquisition.earned import Domain, maximize_feasibility, maximize_prior
from botorch_fed.acquisition.fidelity import TARGET, Level, maximize_gain, most_promising
from botorch_fed.errors import NumericalError
from botorch_fed.models import LogWarp, PriorFunction
from botorch_fed.models.earned_prior import EarnedPosterior
from botorch_fed.models.fidelity import fit_fidelity
from botorch_fed.models.local_gp import Array
from botorch_fed.rng import Generator
from botorch_fed.search.local import feasibility_of, random_point
from botorch_fed.space import SearchSpace

logger = logging.getLogger(__name__)

SAME = 1e-9  # of a column of the fidelity
APART = 0.25  # how far from each other first points of one query lie, in the unit cube


def fit_over_fidelities(
    space: SearchSpace,
    X: Tensor,
    Y: Tensor,
    prior: PriorFunction | None,
    *,
    trusts: tuple[float, ...],
    trust_prior: tuple[float, ...],
    log_warp: LogWarp,
) -> EarnedPosterior | None:
    """The own models; None for outcomes beyond all scales.

    Args:
        space: The map of inputs, with a fidelity.
        X: Own points, `n x d` with n > 0.
        Y: Own outcomes, `n x 1`, larger is better.
        prior: What others say about the target.
        trusts: As in `fit_earned`.
        trust_prior: As in `fit_earned`.
        log_warp: The scale on which the models see configurations.
    """
    way = ways(space, X)
    try:
        return fit_fidelity(
            space.configurations(X),
            way,
            Y,
            prior,
            trusts=trusts,
            trust_prior=trust_prior,
            log_warp=log_warp,
        )
    except NumericalError as error:  # a site must not be stuck, nor others wait for it
        logger.warning("no model of %d observations: %s", len(X), error)
        return None


def num_configurations(space: SearchSpace, X: Tensor) -> int:
    """How many different configurations there are in `n x d` points."""
    return len(torch.unique(space.configurations(X), dim=0))


def ways(space: SearchSpace, X: Tensor) -> Array:
    """How far `n x d` points are on the way to the target, `n`."""
    columns = space.fidelities(X).tolist()
    places = {column: space.fidelity_place(column) for column in set(columns)}
    return np.array([places[column] for column in columns], dtype=np.float64)


def first_advised(
    space: SearchSpace,
    prior: PriorFunction,
    chosen: Tensor,
    candidates: Tensor | None,
    failed: Tensor,
    room: float,
    stream: Generator,
) -> Tensor:
    """The first point of a site that has nothing but what others say, at the target.

    Args:
        space: The map of inputs.
        prior: What they say.
        chosen: Points that are pending, `k x d`.
        candidates: The only points that can be evaluated, `K x d`.
        failed: Points whose evaluation failed, `m x d`.
        room: What is left of the budget, in evaluations at the target.
        stream: Of random points.
    """
    domain = _domain(space, 1.0, chosen, candidates, failed)
    point = maximize_prior(prior, domain, stream, apart=APART)
    return space.at_fidelity(point, affordable(space, candidates, room)[-1])


def gainful(
    space: SearchSpace,
    posterior: EarnedPosterior,
    X: Tensor,
    *,
    chosen: Tensor,
    candidates: Tensor | None,
    failed: Tensor,
    room: float,
    stream: Generator,
) -> Tensor:
    """The next point, `1 x d`.

    Args:
        space: The map of inputs, with a fidelity.
        posterior: The own models.
        X: Own points, `n x d` with n > 0.
        chosen: Points that are pending, `k x d`.
        candidates: The only points that can be evaluated, `K x d`.
        failed: Points whose evaluation failed, `m x d`.
        room: What is left of the budget, in evaluations at the target.
        stream: Of random points.
    """
    known = torch.cat([X, chosen])
    way = ways(space, known)
    if len(chosen):
        Z = posterior.warp(space.configurations(chosen))
        pending = tuple(
            c.with_pending(Z, way[len(X) :])  # type: ignore[attr-defined]
            for c in posterior.components
        )
        posterior = EarnedPosterior(
            pending, posterior.weights, posterior.outcome, posterior.prior, posterior.log_warp
        )
    columns = affordable(space, candidates, room)
    if _cost_below(space, known, way) >= 1 - SAME:
        columns = columns[-1:]
    levels = [
        Level(
            space.fidelity_place(column),
            space.cost_at(column),
            _domain(space, column, known, candidates, failed),
        )
        for column in columns
    ]
    feasibility = None
    if len(failed):
        good, bad = space.configurations(X), space.configurations(failed)
        feasibility = feasibility_of(good, bad, posterior.log_warp)
    tried = space.configurations(known)
    if not (way >= TARGET).any() and space.cost_at(columns[-1]) <= room + SAME:
        point = most_promising(posterior, levels[-1], tried, stream)
        return space.at_fidelity(point, columns[-1])
    point, index = maximize_gain(posterior, levels, tried, way, stream, feasibility)
    return space.at_fidelity(point, columns[index])


def _cost_below(space: SearchSpace, known: Tensor, way: Array) -> float:
    """What was spent below the target since the last evaluation at it.

    Args:
        space: The map of inputs.
        known: Points in the order in which they were evaluated, `n x d`; values on the way of a
            curve follow the value of its end.
        way: How far they are on the way to the target, `n`.
    """
    at_target = np.flatnonzero(way >= TARGET)
    first = at_target[-1] + 1 if len(at_target) else 0
    rows = [row.tobytes() for row in space.configurations(known).numpy()]
    highest: dict[bytes, float] = {}
    spent = 0.0
    for place, (row, cost) in enumerate(zip(rows, space.costs(known), strict=True)):
        if place >= first and way[place] > highest.get(row, -1.0):
            spent += cost
        highest[row] = max(way[place], highest.get(row, -1.0))
    return spent


def likely(
    space: SearchSpace,
    *,
    failed: Tensor,
    candidates: Tensor | None,
    log_warp: LogWarp,
    room: float,
    stream: Generator,
) -> Tensor:
    """The next point while nothing has succeeded, `1 x d`: random, or far from what failed.

    Args:
        space: The map of inputs, with a fidelity.
        failed: Points whose evaluation failed, `m x d`.
        candidates: The only points that can be evaluated, `K x d`.
        log_warp: The scale on which models see configurations.
        room: What is left of the budget, in evaluations at the target.
        stream: Of random points.
    """
    bad = space.configurations(failed)
    domain = _domain(space, 1.0, failed[:0], candidates, failed)
    feasibility = feasibility_of(bad[:0], bad, log_warp) if len(bad) else None
    if feasibility is not None and len(bad) % 2 == 0:  # in turns, as without a fidelity
        point = maximize_feasibility(feasibility, domain, stream)
    else:
        point = random_point(space.shared, domain.candidates, stream, bad)
        point = point if candidates is not None else space.shared.snap(point)
    return space.at_fidelity(point, affordable(space, candidates, room)[-1])


def affordable(space: SearchSpace, candidates: Tensor | None, room: float) -> list[float]:
    """The columns of fidelities that can be asked for, the target last.

    One below the target leaves enough of the budget for one at the target. Where that is too dear
    already, whatever can be paid.

    Args:
        space: The map of inputs, with a fidelity.
        candidates: The only points that can be evaluated, `K x d`.
        room: What is left of the budget.
    """
    columns = _columns(space, candidates)
    costs = [space.cost_at(column) for column in columns]
    spare = room - costs[-1] + SAME
    if spare < 0:
        kept = [c for c, cost in zip(columns, costs, strict=True) if cost <= room + SAME]
        return kept or columns[:1]
    lower = zip(columns[:-1], costs[:-1], strict=True)
    return [*(column for column, cost in lower if cost <= spare), columns[-1]]


def _columns(space: SearchSpace, candidates: Tensor | None) -> list[float]:
    """The columns of fidelities among which is chosen, ascending."""
    if candidates is None:
        return list(space.levels)
    listed = space.fidelities(candidates.double()).unique()
    nearest = {int((listed - level).abs().argmin()) for level in space.levels}
    return [float(listed[k]) for k in sorted(nearest)]


def _nearest_column(space: SearchSpace, candidates: Tensor | None, column: float) -> float:
    columns = _columns(space, candidates)
    return min(columns, key=lambda one: abs(one - column))


def _domain(
    space: SearchSpace,
    column: float,
    known: Tensor,
    candidates: Tensor | None,
    failed: Tensor,
) -> Domain:
    """Where a configuration may lie for an evaluation at a fidelity."""
    lower, upper = space.shared.bounds.double()
    reached = known[space.fidelities(known) >= column - SAME]
    tried, bad = space.configurations(reached), space.configurations(failed)
    if candidates is None:
        found = space.shared.feasible_set
        feasible = found if found.constrained or found.blocks else None
        return Domain(lower, upper, tried, None, space.shared.snap, bad, feasible)
    listed = candidates.double()
    column = _nearest_column(space, listed, column)
    listed = listed[(space.fidelities(listed) - column).abs() <= SAME]
    return Domain(lower, upper, tried, space.configurations(listed), failed=bad)


__all__ = [
    "TARGET",
    "affordable",
    "first_advised",
    "fit_over_fidelities",
    "gainful",
    "likely",
    "num_configurations",
    "ways",
]
