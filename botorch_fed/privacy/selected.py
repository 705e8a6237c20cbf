r"""A lower bound on epsilon by whichever of several statistics tells two worlds apart best.

Half of the runs choose the statistic, the side, the threshold and :math:`\delta`; the other half
gives one Clopper-Pearson bound for that choice, so that nothing is charged for the search
[Lu2022]_.

References:
    * [Lu2022]_ F. Lu, J. Munoz, M. Fuchs, T. LeBlond, E. Zaresky-Williams, E. Raff, F. Ferraro, B.
      Testa. A general framework for auditing differentially private machine learning. NeurIPS 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from botorch_fed.privacy.evidence import Check, Claim, OperatingPoint, clopper_pearson

Features = Callable[[bool, range], Tensor]  # from a world and runs to `n x k` numbers

_QUANTILES = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.995)


def selected_check(features: Features, claim: Claim, *, runs: int, confidence: float) -> Check:
    """Whether the best statistic of half of the runs contradicts the claim in the other half.

    Args:
        features: Statistics of transcripts; the columns are fixed in advance.
        claim: What a transcript is claimed to satisfy.
        runs: Runs per world; the first half chooses.
        confidence: Of the bound.
    """
    values = torch.stack([features(False, range(runs)), features(True, range(runs))])
    half = runs // 2
    best, choice = -math.inf, (0, 0.0, 1.0, claim.guarantees[0])
    for column in range(values.shape[-1]):
        pilot = values[:, :half, column]
        for threshold in set(pilot.flatten().quantile(_levels()).tolist()):
            for side in (1.0, -1.0):
                point = _point(side * pilot, side * threshold, 0.05)
                for guarantee in claim.guarantees:
                    gain = point.epsilon(guarantee.delta) - guarantee.epsilon
                    if gain > best:
                        best, choice = gain, (column, threshold, side, guarantee)
    column, threshold, side, guarantee = choice
    point = _point(side * values[:, half:, column], side * threshold, (1 - confidence) / 2)
    detail = f"statistic {column} of {values.shape[-1]}, chosen on half of the runs"
    name = f"lower bound on epsilon at delta = {guarantee.delta:g} by the best statistic"
    return Check(name, point.epsilon(guarantee.delta), "<=", guarantee.epsilon, detail, box="black")


def _levels() -> Tensor:
    return torch.tensor(_QUANTILES, dtype=torch.float64)


def _point(scores: Tensor, threshold: float, level: float) -> OperatingPoint:
    """Error rates, and their bounds at a level each."""
    count = scores.shape[-1]
    alarms, misses = int((scores[0] > threshold).sum()), int((scores[1] <= threshold).sum())
    return OperatingPoint(
        threshold,
        alarms / count,
        misses / count,
        clopper_pearson(alarms, count, level),
        clopper_pearson(misses, count, level),
    )
