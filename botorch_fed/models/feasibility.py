r"""The probability that an evaluation succeeds, learned from evaluations that did and that failed.

A Gaussian process :math:`h` under a probit likelihood, :math:`P(\text{success at } x \mid h) =
\Phi(h(x))`, by Laplace's approximation [Rasmussen2006]_. Regression of labels is no substitute: a
step has no length scale, and failures near the border of what succeeds would shorten it without
end. The approximation is a regression of pseudo-outcomes, and so a `LocalGP`:

.. math:: \tilde h_i = \hat h_i + W_i^{-1} \nabla_i, \qquad \tilde h_i \sim N(h(x_i), W_i^{-1}),

with gradient :math:`\nabla` and curvature :math:`W` of the log likelihood at the mode
:math:`\hat h`. Length scales are fitted as those of the own model are, by the approximate evidence
and BoTorch's prior; the mean of :math:`h` is zero.

.. [Rasmussen2006] C. E. Rasmussen, C. K. I. Williams. Gaussian processes for machine learning.
   MIT Press, 2006. Algorithms 3.1 and 5.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from scipy.linalg.lapack import dpotrf, dpotri, dtrtrs
from scipy.special import log_ndtr
from torch import Tensor

from botorch_fed.errors import NumericalError
from botorch_fed.models.features import log_warp
from botorch_fed.models.local_gp import (
    MAX_LENGTHSCALE,
    MIN_LENGTHSCALE,
    Array,
    LengthscalePrior,
    LocalGP,
)
from botorch_fed.models.numerics import as_double, check_finite

MIN_FAILED = 2  # failures from which on feasibility is modelled: one may be an accident
VARIANCE = 25.0  # of the latent process: labels change within a fifth of its deviation
MAX_ITERATIONS = 30  # of the fit of length scales
MAX_NEWTON = 50
TOLERANCE = 1e-8  # of the log likelihood at the mode
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Feasibility:
    """A model of which evaluations succeed.

    Attributes:
        latent: The latent process, as a regression of its pseudo-outcomes.
        offsets: Of the logarithmic warp that the model sees inputs by, if there is one.
    """

    latent: LocalGP
    offsets: Tensor | None = None

    def warp(self, X: Tensor) -> Array:
        """Points as the model sees them, `n x d`."""
        warped: Array = (X if self.offsets is None else log_warp(X, self.offsets)).numpy()
        return warped

    def log_probability(self, Z: Array) -> Array:
        """The logarithm of the probability of success at `m x d` points as the model sees them."""
        mean, variance = self.latent.predict(Z)
        values: Array = log_ndtr(mean / np.sqrt(1 + variance))
        return values

    def with_gradient(self, Z: Array) -> tuple[Array, Array]:
        """Values `m` and gradients `m x d` at `m x d` points as the model sees them."""
        mean, variance = self.latent.predict(Z)
        mean_slope, variance_slope = self.latent.slopes(Z)
        deviation = np.sqrt(1 + variance)
        u = mean / deviation
        values = log_ndtr(u)
        ratio = np.exp(-0.5 * u * u - _LOG_SQRT_2PI - values)  # phi(u) / Phi(u)
        by_mean, by_variance = ratio / deviation, -0.5 * ratio * u / deviation**2
        return values, by_mean[:, None] * mean_slope + by_variance[:, None] * variance_slope

    def __call__(self, X: Tensor) -> Tensor:
        """The same at `batch_shape x d` points of the unit cube, differentiable by torch."""
        latent = self.latent
        lengthscale, data = torch.from_numpy(latent.lengthscale), torch.from_numpy(latent.X)
        Z = X if self.offsets is None else log_warp(X, self.offsets)
        difference = (Z.unsqueeze(-2) - data) / lengthscale
        cross = (-0.5 * difference.square().sum(dim=-1)).exp()
        mean = math.sqrt(latent.variance) * (cross @ torch.from_numpy(latent.weights))
        explained = ((cross @ torch.from_numpy(latent.precision)) * cross).sum(dim=-1)
        variance = latent.variance * (1 - explained).clamp_min(1e-10)
        return torch.special.log_ndtr(mean / (1 + variance).sqrt())


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
    evidence = _Evidence(Z, labels)
    theta = evidence.mode
    if len(X):  # labels that are all the same say nothing of a length scale
        from scipy.optimize import minimize  # costs 70 ms to import, and only fits need it

        fit = minimize(
            evidence,
            theta,
            jac=True,
            method="L-BFGS-B",
            bounds=evidence.bounds,
            options={"maxiter": MAX_ITERATIONS},
        )
        theta = fit.x
    return Feasibility(evidence.model(theta), offsets)


@dataclass(frozen=True)
class _Mode:
    """The mode of the latent process, and what follows from it.

    Attributes:
        latent: :math:`\\hat h`.
        weights: :math:`K^{-1} \\hat h`, the gradient of the log likelihood.
        curvature: :math:`W`.
        third: Third derivatives of the log likelihood.
        factor: Lower Cholesky factor of :math:`I + W^{1/2} K W^{1/2}`.
        likelihood: The log likelihood at the mode.
    """

    latent: Array
    weights: Array
    curvature: Array
    third: Array
    factor: Array
    likelihood: float


class _Evidence:
    """Minus the log posterior of log length scales, and its gradient, for scipy."""

    def __init__(self, X: Array, labels: Array) -> None:
        self.X, self.labels = X, labels
        self.n, self.d = X.shape
        self.squares = ((X[:, None] - X[None]) ** 2).reshape(self.n**2, self.d)
        prior = LengthscalePrior.of_dimension(self.d)
        self.location, self.scale = prior.location, prior.scale
        self.bounds = [(math.log(MIN_LENGTHSCALE), math.log(MAX_LENGTHSCALE))] * self.d
        self.mode = self.location - self.scale**2
        self.weights = np.zeros(self.n)  # where the next search for a mode begins

    def covariance(self, theta: Array) -> Array:
        exponent = self.squares @ np.exp(-2 * theta)
        K: Array = VARIANCE * np.exp(-0.5 * exponent).reshape(self.n, self.n)
        return K

    def _likelihood(self, latent: Array) -> tuple[float, Array, Array, Array]:
        """The log likelihood, its gradient, curvature and third derivatives."""
        agreed = self.labels * latent
        logs = log_ndtr(agreed)
        r = np.exp(-0.5 * agreed * agreed - _LOG_SQRT_2PI - logs)
        curvature = r * (r + agreed)
        third = self.labels * (curvature * (2 * r + agreed) - r)
        return float(logs.sum()), self.labels * r, curvature, third

    def found(self, K: Array) -> _Mode:
        """The mode by Newton's method, with shorter steps where a whole one does not improve."""
        a = self.weights
        latent = K @ a
        likelihood, gradient, W, third = self._likelihood(latent)
        value = likelihood - 0.5 * float(a @ latent)
        for _ in range(MAX_NEWTON):
            root = np.sqrt(W)
            factor = _factor(root, K)
            b = W * latent + gradient
            target = b - root * _solve(factor, root * (K @ b))
            step, length, before = target - a, 1.0, value
            for _ in range(10):
                proposed = a + length * step
                there = K @ proposed
                terms = self._likelihood(there)
                value = terms[0] - 0.5 * float(proposed @ there)
                if value >= before - TOLERANCE:
                    break
                length /= 2
            a, latent = proposed, there
            likelihood, gradient, W, third = terms
            if abs(value - before) <= TOLERANCE:
                break
        self.weights = a
        return _Mode(latent, gradient, W, third, _factor(np.sqrt(W), K), likelihood)

    def __call__(self, theta: Array) -> tuple[float, Array]:
        K = self.covariance(theta)
        mode = self.found(K)
        root, a = np.sqrt(mode.curvature), mode.weights
        log_root = float(np.log(np.diag(mode.factor)).sum())
        value = 0.5 * float(a @ mode.latent) - mode.likelihood + log_root
        R = root[:, None] * _inverse(mode.factor) * root[None]
        C, _ = dtrtrs(mode.factor, root[:, None] * K, lower=1)
        by_mode = 0.5 * (VARIANCE - (C * C).sum(axis=0)) * mode.third
        # With dK = K * squares / l^2 and s3 = (I - K R) dK a, all as one weighted sum of dK.
        moved = by_mode - R @ (K @ by_mode)
        slope = 0.5 * (np.outer(a, a) - R) + np.outer(moved, a)
        gradient = -((slope * K).ravel() @ self.squares) * np.exp(-2 * theta)
        distance = (theta - self.location) / self.scale
        value += 0.5 * float(distance @ distance) + float(theta.sum())
        return value, gradient + distance / self.scale + 1.0

    def model(self, theta: Array) -> LocalGP:
        """The latent process of these length scales."""
        mode = self.found(self.covariance(theta))
        root = np.sqrt(mode.curvature)
        r = self.labels * mode.weights
        pseudo = mode.latent + self.labels / (r + self.labels * mode.latent)
        return LocalGP(
            X=self.X,
            residual=pseudo / math.sqrt(VARIANCE),
            variance=VARIANCE,
            trust=0.0,
            lengthscale=np.exp(theta),
            noise=math.nan,
            constant=0.0,
            precision=VARIANCE * root[:, None] * _inverse(mode.factor) * root[None],
        )


def _factor(root: Array, K: Array) -> Array:
    B = root[:, None] * K * root[None]
    B.flat[:: len(B) + 1] += 1.0
    factor, info = dpotrf(B, lower=1)
    if info:
        raise NumericalError(f"No Cholesky factor for {len(B)} labels: the points are not finite.")
    return factor  # type: ignore[no-any-return]


def _solve(factor: Array, b: Array) -> Array:
    half, _ = dtrtrs(factor, b, lower=1)
    solved, _ = dtrtrs(factor, half, lower=1, trans=1)
    return solved  # type: ignore[no-any-return]


def _inverse(factor: Array) -> Array:
    lower, _ = dpotri(factor, lower=1)
    lower = np.tril(lower)
    inverse: Array = lower + np.tril(lower, -1).T
    return inverse
