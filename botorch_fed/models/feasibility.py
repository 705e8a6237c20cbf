r"""The probability that an evaluation succeeds, learned from evaluations that did and that failed.

Labels, +1 for a success and -1 for a failure, are outcomes of a `LocalGP` :math:`h`, fitted as a
site's own model is, and

.. math:: P(\text{success at } x) = P(h(x) > 0) = \Phi(\mu(x) / \sigma(x)).

Far from all data this is about the share of successes. While nothing has succeeded, labels say
nothing of a length scale: the constant is zero and the length scale the mode of its prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from botorch.models import SingleTaskGP
from scipy.special import log_ndtr
from torch import Tensor

from botorch_fed.models.earned_prior import as_single_task_gp
from botorch_fed.models.features import log_warp
from botorch_fed.models.local_gp import (
    NOISE_PRIOR,
    Array,
    LengthscalePrior,
    LocalGP,
    Standardized,
    fit_local_gp,
    standardize,
)
from botorch_fed.models.numerics import as_double, check_finite

MIN_FAILED = 2  # failures from which on feasibility is modelled: one may be an accident
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Feasibility:
    """A model of the labels of evaluations.

    Attributes:
        labels: The fitted model, on standardised labels.
        outcome: How labels were standardised.
        offsets: Of the logarithmic warp that the model sees inputs by, if there is one.
    """

    labels: LocalGP
    outcome: Standardized
    offsets: Tensor | None = None

    def warp(self, X: Tensor) -> Array:
        """Points as the model sees them, `n x d`."""
        warped: Array = (X if self.offsets is None else log_warp(X, self.offsets)).numpy()
        return warped

    def log_probability(self, Z: Array) -> Array:
        """The logarithm of the probability of success at `m x d` points as the model sees them."""
        mean, variance = self.labels.predict(Z)
        log_probability: Array = log_ndtr((mean + self._shift) / np.sqrt(variance))
        return log_probability

    def with_gradient(self, Z: Array) -> tuple[Array, Array]:
        """Values `m` and gradients `m x d` at `m x d` points as the model sees them."""
        mean, variance = self.labels.predict(Z)
        mean_slope, variance_slope = self.labels.slopes(Z)
        deviation = np.sqrt(variance)
        u = (mean + self._shift) / deviation
        values = log_ndtr(u)
        ratio = np.exp(-0.5 * u * u - _LOG_SQRT_2PI - values)  # phi(u) / Phi(u)
        by_mean, by_variance = ratio / deviation, -0.5 * ratio * u / variance
        return values, by_mean[:, None] * mean_slope + by_variance[:, None] * variance_slope

    def model(self) -> SingleTaskGP:
        """The model of labels +1 and -1 as BoTorch's; success is a positive label."""
        return as_single_task_gp(self.labels, self.outcome, None, self.offsets)

    @property
    def _shift(self) -> float:
        """Minus the label zero, on the standardised scale."""
        return self.outcome.centre / self.outcome.scale


def fit_feasibility(
    X: Tensor, failed: Tensor, *, offsets: Tensor | None = None
) -> Feasibility | None:
    """The model of what succeeds; None while fewer than `MIN_FAILED` evaluations have failed.

    Args:
        X: Points in the unit cube whose evaluation succeeded, `n x d`.
        failed: Points whose evaluation failed, `m x d`.
        offsets: Of a logarithmic warp that the model sees inputs by.
    """
    X, failed = as_double(X, "X"), as_double(failed, "failed")
    if X.dim() != 2 or failed.dim() != 2 or X.shape[-1] != failed.shape[-1]:
        raise BotorchTensorDimensionError(
            "Expected points that succeeded `n x d` and points that failed `m x d`, got shapes "
            f"{tuple(X.shape)} and {tuple(failed.shape)}."
        )
    check_finite(X, "X")
    check_finite(failed, "failed")
    if len(failed) < MIN_FAILED:
        return None
    points = torch.cat([X, failed])
    Z: Array = (points if offsets is None else log_warp(points, offsets)).numpy()
    labels = np.concatenate([np.ones(len(X)), -np.ones(len(failed))])
    if not len(X):
        empty = _prior(Z.shape[1])
        return Feasibility(empty.conditioned(Z, labels), Standardized(labels, 0.0, 1.0), offsets)
    outcome = standardize(labels)
    return Feasibility(fit_local_gp(Z, outcome.values), outcome, offsets)


def _prior(dim: int) -> LocalGP:
    """The model before any data, at the modes of the priors."""
    prior = LengthscalePrior.of_dimension(dim)
    return LocalGP(
        X=np.zeros((0, dim)),
        residual=np.zeros(0),
        variance=1.0,
        trust=0.0,
        lengthscale=np.exp(prior.location - prior.scale**2),
        noise=math.exp(NOISE_PRIOR[0] - NOISE_PRIOR[1] ** 2),
        constant=0.0,
        precision=np.zeros((0, 0)),
    )
