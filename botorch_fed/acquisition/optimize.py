r"""Maximise an acquisition function over the unit cube or over a list of points.

Over the cube: 1,000 uniform points, the best 20 of them improved by L-BFGS-B through BoTorch's
`optimize_acqf`. All randomness comes from the caller's generator.
"""

from __future__ import annotations

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.optim.optimize import optimize_acqf
from torch import Tensor

from botorch_fed.rng import Generator

CHUNK = 4096  # points of a discrete domain that are looked at together


def maximize(
    acquisition: AcquisitionFunction,
    dim: int,
    *,
    generator: Generator,
    candidates: Tensor | None = None,
    num_raw: int = 1000,
    num_restarts: int = 20,
) -> tuple[Tensor, float]:
    """The best single point, and its value.

    Args:
        acquisition: Takes `batch_shape x 1 x d` points.
        dim: The dimension `d`.
        generator: The stream of the raw points.
        candidates: A `K x d` tensor: the only points that may be chosen. Ties go to the first.
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
    raw = generator.uniform(num_raw, dim)
    values = _values(acquisition, raw)
    starts = raw[values.topk(num_restarts).indices]
    bounds = torch.stack([torch.zeros(dim), torch.ones(dim)]).double()
    point, best_value = optimize_acqf(
        acquisition,
        bounds,
        q=1,
        num_restarts=num_restarts,
        batch_initial_conditions=starts.unsqueeze(-2),
    )
    assert best_value is not None
    if float(best_value) < float(values.max()):  # the improvement has failed numerically
        best = int(values.argmax())
        return raw[best : best + 1], float(values[best])
    return point.detach(), float(best_value)


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
