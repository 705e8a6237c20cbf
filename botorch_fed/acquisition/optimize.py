r"""Maximise an acquisition function over the unit cube or over a list of points.

Over the cube: 1,000 uniform points, the best 20 of them improved by L-BFGS-B through BoTorch's
`optimize_acqf`. All randomness comes from the caller's generator.

A function that jumps between the regions of a `Partition` is improved region by region, all starts
together and each within its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    OptimizationGradientError,
)
from botorch.optim.optimize import optimize_acqf
from torch import Tensor

from botorch_fed.acquisition.regions import Partition
from botorch_fed.acquisition.within import ascend_within
from botorch_fed.feasible_set import Array, FeasibleSet
from botorch_fed.models.warp import LogWarp
from botorch_fed.rng import Generator

CHUNK = 4096  # points of a discrete domain that are looked at together


def maximize(
    acquisition: AcquisitionFunction,
    dim: int,
    *,
    generator: Generator,
    candidates: Tensor | None = None,
    log_warp: LogWarp | None = None,
    tried: Tensor | None = None,
    min_distance: float = 0.0,
    failed: Tensor | None = None,
    snap: Callable[[Tensor], Tensor] | None = None,
    partition: Partition | None = None,
    feasible: FeasibleSet | None = None,
    num_raw: int = 1000,
    num_restarts: int = 20,
) -> tuple[Tensor, float]:
    """The best single point, and its value.

    Args:
        acquisition: Takes `batch_shape x 1 x d` points.
        dim: The dimension `d`.
        generator: The stream of the raw points.
        candidates: A `K x d` tensor: the only points that may be chosen. Ties go to the first.
        log_warp: A scale on which half of the raw points are then uniform, and on which distances
            are measured.
        tried: An `n x d` tensor of points that were evaluated before.
        min_distance: How far the point must be from all of those (in the unit cube): without
            noise a second look at the same place is wasted. Not for lists of candidates.
        failed: An `m x d` tensor of points whose evaluation failed: they are chosen last of all.
            Not for lists of candidates.
        snap: From points to the nearest that can be evaluated, by which failed points are known.
        partition: The regions between which the function may jump. Improvement starts from the
            best raw point of every region first, of the best regions if there are more than
            `num_restarts`; then from the best of the others. A list needs none.
        feasible: What can be evaluated: where there are constraints, all points meet them. Not for
            lists of candidates.
        num_raw: How many uniform points to look at.
        num_restarts: How many of the best of them to improve.

    Returns:
        A `1 x d` tensor and a number.
    """
    if candidates is not None:
        if candidates.dim() != 2 or candidates.shape[-1] != dim or len(candidates) == 0:
            raise BotorchTensorDimensionError(
                f"candidates must be `K x {dim}` with K > 0, got shape {tuple(candidates.shape)}."
            )
        values = _values(acquisition, candidates)
        best = int(values.argmax())
        return candidates[best : best + 1].clone(), float(values[best])
    if not 1 <= num_restarts <= num_raw:
        raise InputDataError(
            f"num_restarts must lie between 1 and num_raw = {num_raw}, got {num_restarts}."
        )
    constrained = feasible is not None and feasible.constrained

    def spread(cube: Tensor) -> Tensor:
        if log_warp is not None:
            cube[1::2] = log_warp.untransform(cube[1::2])
        return cube

    if feasible is not None and feasible.constrained:
        raw = feasible.uniform(num_raw, generator, spread)
    else:
        raw = spread(generator.uniform(num_raw, dim))
    values = _values(acquisition, raw)
    points = raw
    # Where improvement fails, e.g. at a function that is NaN in a part of the cube, raw points do.
    with contextlib.suppress(OptimizationGradientError):
        if partition is None or partition.num_regions == 1:
            starts = raw[values.topk(num_restarts).indices]
            linear = feasible.for_botorch if feasible is not None else {}
            upper = torch.ones(dim).double()
            found, found_values = _improve(acquisition, starts, upper=upper, **linear)
        else:
            starts = raw[_best_by_region(values, partition.region_of(raw), num_restarts)]
            found, found_values = _improve_in_regions(acquisition, starts, partition)
        if feasible is not None and constrained:
            found = feasible.nearest(found)
            found_values = _values(acquisition, found)
        points = torch.cat([found, raw])
        values = torch.nan_to_num(torch.cat([found_values, values]), nan=-torch.inf)
    ranks = torch.zeros(len(points), dtype=torch.long)
    if tried is not None and len(tried) and min_distance > 0:
        here, there = points, tried
        if log_warp is not None:
            here, there = log_warp.transform(points), log_warp.transform(tried)
        ranks += torch.cdist(here, there).amin(dim=-1) < min_distance
    if failed is not None and len(failed):
        ranks += 2 * _failed_before(points, failed, log_warp, min_distance, snap)
    values = values.masked_fill(ranks > ranks.min(), -torch.inf)
    best = int(values.argmax())
    return points[best : best + 1], float(values[best])


def ascend(
    function: Callable[[Tensor], Tensor],
    starts: Tensor,
    lower: Tensor,
    upper: Tensor,
    *,
    feasible: FeasibleSet | None = None,
    max_iterations: int = 30,
) -> tuple[Tensor, Tensor]:
    """Improve points by one L-BFGS-B on the sum of their values: for cheap closed forms.

    A few times faster than `optimize_acqf`, whose overhead is larger than such a function.

    Args:
        function: `n x d` points to `n` values, differentiable.
        starts: An `n x d` tensor.
        lower: A `d` tensor of lower bounds.
        upper: A `d` tensor of upper bounds.
        feasible: What can be evaluated, of the whole unit cube. Where there are constraints the
            points meet them, and improvement is by SLSQP.
        max_iterations: Of L-BFGS-B, or of SLSQP.

    Returns:
        An `n x d` tensor of points within the bounds, and their `n` values.
    """
    from scipy.optimize import minimize  # costs 70 ms to import, and only searches need it

    if feasible is not None and feasible.constrained:
        return _ascend_within(function, starts, feasible, max_iterations)
    width = (upper - lower).clamp_min(1e-12)
    with torch.no_grad():
        spread = float(function(starts).std(correction=0)) if len(starts) > 1 else 0.0
    unit = spread if spread > 0 else 1.0

    def loss(flat: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        u = torch.from_numpy(flat).reshape(starts.shape).requires_grad_()
        total = -function(lower + width * u).sum() / unit
        (gradient,) = torch.autograd.grad(total, u)
        return total.item(), gradient.numpy().ravel()

    first = ((starts - lower) / width).clamp(0.0, 1.0)
    fit = minimize(
        loss,
        first.numpy().ravel(),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1.0)] * first.numel(),
        options={"maxiter": max_iterations},
    )
    ends = torch.from_numpy(fit.x).reshape(starts.shape)
    points = torch.minimum(torch.maximum(lower + width * ends, lower), upper)
    with torch.no_grad():
        return points, function(points)


def _ascend_within(
    function: Callable[[Tensor], Tensor],
    starts: Tensor,
    feasible: FeasibleSet,
    max_iterations: int,
) -> tuple[Tensor, Tensor]:
    def graded(X: Array) -> tuple[Array, Array]:
        points = torch.from_numpy(X).requires_grad_()
        values = function(points)
        (gradient,) = torch.autograd.grad(values.sum(), points)
        return values.detach().numpy(), gradient.numpy()

    inside = feasible.nearest(starts).numpy()
    ends = ascend_within(graded, inside, feasible, max_iterations=max_iterations)
    points = feasible.nearest(torch.from_numpy(ends))
    with torch.no_grad():
        return points, function(points)


class _InOwnRegion(AcquisitionFunction):
    """A function on `… x 1 x (d + 1)` points: a point of the cube, and the region it stands for."""

    def __init__(self, acquisition: AcquisitionFunction, partition: Partition) -> None:
        super().__init__(model=acquisition.model)
        self.acquisition = acquisition
        self.partition = partition

    def forward(self, X: Tensor) -> Tensor:
        return self.acquisition(self.point(X))

    def point(self, X: Tensor) -> Tensor:
        return self.partition.to_region(X[..., -1].round().long(), X[..., :-1])


def _improve(
    acquisition: AcquisitionFunction, starts: Tensor, *, upper: Tensor, **linear: Any
) -> tuple[Tensor, Tensor]:
    """Improve every one of `n x d` points between zero and `upper`: points and their values."""
    points, values = optimize_acqf(
        acquisition,
        torch.stack([torch.zeros_like(upper), upper]),
        q=1,
        num_restarts=len(starts),
        batch_initial_conditions=starts.unsqueeze(-2),
        return_best_only=False,
        **linear,
    )
    assert values is not None
    return points.detach().squeeze(-2), values.detach()


def _improve_in_regions(
    acquisition: AcquisitionFunction, starts: Tensor, partition: Partition
) -> tuple[Tensor, Tensor]:
    """Improve every one of `n x d` points within its own region."""
    regions = partition.region_of(starts)
    # BoTorch has one box for all starts: each region is stretched to the cube, and a last
    # coordinate carries its number. Nothing depends on it smoothly: its gradient is zero, and
    # L-BFGS-B leaves it where it is.
    stretched = partition.from_region(regions, starts)
    inner = _InOwnRegion(acquisition, partition)
    upper = torch.ones(partition.dim + 1, dtype=torch.float64)
    upper[-1] = partition.num_regions - 1
    coordinates = torch.cat([stretched, regions.unsqueeze(-1).double()], dim=-1)
    points, values = _improve(inner, coordinates, upper=upper)
    return inner.point(points), values


def _failed_before(
    points: Tensor,
    failed: Tensor,
    log_warp: LogWarp | None,
    min_distance: float,
    snap: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Which of `n x d` points are evaluated where one of `m x d` points failed."""
    points = points if snap is None else snap(points)
    if log_warp is not None:
        points, failed = log_warp.transform(points), log_warp.transform(failed)
    mode = "donot_use_mm_for_euclid_dist"  # zero for equal points
    return torch.cdist(points, failed, compute_mode=mode).amin(dim=-1) <= max(min_distance, 1e-9)


def _best_by_region(values: Tensor, regions: Tensor, count: int) -> Tensor:
    """Indices of the best point of every region, then of the best of the others."""
    order = values.argsort(descending=True, stable=True)
    ranked = regions[order]
    seen = torch.nn.functional.one_hot(ranked).cumsum(dim=0)
    first = seen.gather(-1, ranked.unsqueeze(-1)).squeeze(-1) == 1
    return torch.cat([order[first], order[~first]])[:count]


def _values(acquisition: AcquisitionFunction, points: Tensor) -> Tensor:
    with torch.no_grad():
        parts = [acquisition(part.unsqueeze(-2)) for part in points.split(CHUNK)]
    values = torch.cat(parts)
    if not bool(torch.isfinite(values).any()):
        raise InputDataError(
            f"The acquisition function {type(acquisition).__name__} is finite nowhere on "
            f"{len(points)} points."
        )
    return torch.nan_to_num(values, nan=-torch.inf)
