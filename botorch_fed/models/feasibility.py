r"""The probability that an evaluation succeeds, learned from successes and failures.

A Gaussian process :math:`h` of mean zero under a probit likelihood,

.. math:: P(\text{success at } x \mid h) = \Phi(h(x)), \qquad h \sim GP(0, v\, k_\ell),

by expectation propagation [Rasmussen2006]_: each label becomes a normal factor, so that the
posterior is that of a `LocalGP` of pseudo-outcomes with individual noise variances. Length scales
are fitted by the approximate evidence with BoTorch's prior, as in the local model.

Regression of the labels is not suitable: a step function has no length scale, and failures near the
border of the feasible region would shorten the fitted one without bound.

References:
    * [Rasmussen2006]_ C. E. Rasmussen, C. K. I. Williams. Gaussian processes for machine learning.
      MIT Press, 2006. Section 3.6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from scipy.linalg.lapack import dpotrf, dtrtrs
from scipy.special import log_ndtr
from torch import Tensor

from botorch_fed.errors import NumericalError
from botorch_fed.models.local_gp import (
    MAX_LENGTHSCALE,
    MIN_LENGTHSCALE,
    Array,
    LengthscalePrior,
    LocalGP,
    inverse_of_factor,
)
from botorch_fed.models.numerics import as_double, check_finite
from botorch_fed.models.warp import LogWarp

MIN_FAILED = 2  # least number of failures for a model: a single one may be an accident
VARIANCE = 25.0  # of the latent process: labels change within a fifth of its standard deviation
MAX_ITERATIONS = 30  # of the fit of length scales
MAX_SWEEPS = 50  # of expectation propagation
DAMPING, MIN_DAMPING = 0.8, 0.05  # of the joint updates of all factors
SLOW = 0.9  # largest ratio of successive changes without more damping
TOLERANCE = 1e-5  # largest change of precisions and shifts at convergence
MIN_PRECISION = 1e-10
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Feasibility:
    """A model of the probability that an evaluation succeeds.

    Attributes:
        latent: The latent process, as a regression of its pseudo-outcomes.
        log_warp: The warp of the model's inputs; None for the unit cube.
    """

    latent: LocalGP
    log_warp: LogWarp | None = None

    def warp(self, X: Tensor) -> Array:
        """Warped points, `n x d`."""
        warped: Array = _warped(X, self.log_warp).numpy()
        return warped

    def log_probability(self, Z: Array) -> Array:
        """The logarithm of the probability of success at `m x d` warped points."""
        mean, variance = self.latent.predict(Z)
        values: Array = log_ndtr(mean / np.sqrt(1 + variance))
        return values

    def with_gradient(self, Z: Array) -> tuple[Array, Array]:
        """Log probabilities `m` and their gradients `m x d` at `m x d` warped points."""
        mean, variance = self.latent.predict(Z)
        mean_slope, variance_slope = self.latent.slopes(Z)
        deviation = np.sqrt(1 + variance)
        u = mean / deviation
        values = log_ndtr(u)
        ratio = np.exp(-0.5 * u * u - _LOG_SQRT_2PI - values)  # phi(u) / Phi(u)
        by_mean, by_variance = ratio / deviation, -0.5 * ratio * u / deviation**2
        return values, by_mean[:, None] * mean_slope + by_variance[:, None] * variance_slope

    def __call__(self, X: Tensor) -> Tensor:
        """Log probabilities at `batch_shape x d` points of the unit cube, with torch gradients."""
        latent = self.latent
        lengthscale, data = torch.from_numpy(latent.lengthscale), torch.from_numpy(latent.X)
        Z = _warped(X, self.log_warp)
        difference = (Z.unsqueeze(-2) - data) / lengthscale
        cross = (-0.5 * difference.square().sum(dim=-1)).exp()
        mean = math.sqrt(latent.variance) * (cross @ torch.from_numpy(latent.weights))
        explained = ((cross @ torch.from_numpy(latent.precision)) * cross).sum(dim=-1)
        variance = latent.variance * (1 - explained).clamp_min(1e-10)
        return torch.special.log_ndtr(mean / (1 + variance).sqrt())


def fit_feasibility(
    X: Tensor, failed: Tensor, *, log_warp: LogWarp | None = None
) -> Feasibility | None:
    """The model of feasibility; None with fewer than `MIN_FAILED` failures.

    Args:
        X: Points in the unit cube whose evaluation succeeded, `n x d`.
        failed: Points in the unit cube whose evaluation failed, `m x d`.
        log_warp: The warp of the model's inputs; None for the unit cube.
    """
    X, failed = as_double(X, "X"), as_double(failed, "failed")
    if X.dim() != 2 or failed.dim() != 2 or X.shape[-1] != failed.shape[-1]:
        raise BotorchTensorDimensionError(
            "Expected successful points `n x d` and failed points `m x d`, got shapes "
            f"{tuple(X.shape)} and {tuple(failed.shape)}."
        )
    check_finite(X, "X")
    check_finite(failed, "failed")
    if len(failed) < MIN_FAILED:
        return None
    points = torch.cat([X, failed])
    Z: Array = _warped(points, log_warp).numpy()
    labels = np.concatenate([np.ones(len(X)), -np.ones(len(failed))])
    evidence = _Evidence(Z, labels)
    theta = evidence.mode
    if len(X):  # equal labels do not determine a length scale
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
    return Feasibility(evidence.model(theta), log_warp)


def _warped(X: Tensor, log_warp: LogWarp | None) -> Tensor:
    return X if log_warp is None else log_warp.transform(X)


@dataclass(frozen=True)
class _Factors:
    """One normal factor for each label, and the posterior that they give.

    Attributes:
        precision: Precisions of the factors, `n`.
        shift: Means of the factors times their precisions, `n`.
        weights: Weights of the covariances with the data in the posterior mean, `n`.
        inverse: Inverse of the covariance of pseudo-outcomes, `n x n`.
        evidence: Log density of the labels.
    """

    precision: Array
    shift: Array
    weights: Array
    inverse: Array
    evidence: float


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
        # Start of the next propagation: successive length scales of a fit are close.
        self.precision, self.shift = np.full(self.n, 0.1), 0.1 * labels

    def covariance(self, theta: Array) -> Array:
        exponent = self.squares @ np.exp(-2 * theta)
        K: Array = VARIANCE * np.exp(-0.5 * exponent).reshape(self.n, self.n)
        return K

    def factors(self, K: Array) -> _Factors:
        """The fixed point of expectation propagation, with joint updates of all factors."""
        y, precision, shift = self.labels, self.precision, self.shift
        damping, before = DAMPING, math.inf
        for _ in range(MAX_SWEEPS):
            factor, variance, mean = _posterior(K, precision, shift)
            # The cavity: the posterior without the factor of the label itself.
            cavity = np.maximum(1 / variance - precision, MIN_PRECISION)
            cavity_shift = mean / variance - shift
            v, m = 1 / cavity, cavity_shift / cavity
            deviation = np.sqrt(1 + v)
            z = y * m / deviation
            log_density = log_ndtr(z)
            r = np.exp(-0.5 * z * z - _LOG_SQRT_2PI - log_density)
            # Mean and variance with the label, and the factor with the same moments.
            tilted_mean = m + y * v * r / deviation
            tilted_variance = v - v * v * r * (z + r) / (1 + v)
            precision_step = np.maximum(1 / tilted_variance - cavity, MIN_PRECISION) - precision
            shift_step = tilted_mean / tilted_variance - cavity_shift - shift
            change = max(float(np.abs(precision_step).max()), float(np.abs(shift_step).max()))
            if change <= TOLERANCE:
                break
            if change > SLOW * before:  # joint updates of nearby equal labels overshoot
                damping = max(damping / 2, MIN_DAMPING)
            before = change
            precision, shift = precision + damping * precision_step, shift + damping * shift_step
        self.precision, self.shift = precision, shift
        root = np.sqrt(precision)
        weights = shift - root * _solve(factor, root * (K @ shift))
        evidence = (
            float(log_density.sum())
            - float(np.log(np.diag(factor)).sum())
            + 0.5 * float(shift @ mean)
            - 0.5 * float(variance @ shift**2)
            + 0.5
            * float(cavity_shift @ ((precision / cavity * cavity_shift - 2 * shift) * variance))
            + 0.5 * float(np.log1p(precision / cavity).sum())
        )
        inverse = root[:, None] * inverse_of_factor(factor) * root[None]
        return _Factors(precision, shift, weights, inverse, evidence)

    def __call__(self, theta: Array) -> tuple[float, Array]:
        K = self.covariance(theta)
        factors = self.factors(K)
        slope = 0.5 * (factors.inverse - np.outer(factors.weights, factors.weights))
        gradient = ((slope * K).ravel() @ self.squares) * np.exp(-2 * theta)
        # Log-normal densities of the values, not of their logarithms.
        distance = (theta - self.location) / self.scale
        value = 0.5 * float(distance @ distance) + float(theta.sum()) - factors.evidence
        return value, gradient + distance / self.scale + 1.0

    def model(self, theta: Array) -> LocalGP:
        """The latent process with these length scales."""
        factors = self.factors(self.covariance(theta))
        return LocalGP(
            X=self.X,
            residual=factors.shift / factors.precision / math.sqrt(VARIANCE),
            variance=VARIANCE,
            trust=0.0,
            lengthscale=np.exp(theta),
            noise=math.nan,
            constant=0.0,
            precision=VARIANCE * factors.inverse,
        )


def _posterior(K: Array, precision: Array, shift: Array) -> tuple[Array, Array, Array]:
    """A factor of I + S K S with S the root of the precision, variances and means."""
    root = np.sqrt(precision)
    factor = _factor(root, K)
    half, _ = dtrtrs(factor, root[:, None] * K, lower=1)
    variance = np.maximum(np.diag(K) - (half * half).sum(axis=0), 1e-12)
    return factor, variance, K @ shift - half.T @ (half @ shift)


def _factor(root: Array, K: Array) -> Array:
    B = root[:, None] * K * root[None]
    B.flat[:: len(B) + 1] += 1.0
    factor, info = dpotrf(B, lower=1)
    if info:
        raise NumericalError(f"The covariance of {len(B)} labels has no Cholesky factor.")
    return factor


def _solve(factor: Array, b: Array) -> Array:
    half, _ = dtrtrs(factor, b, lower=1)
    solved, _ = dtrtrs(factor, half, lower=1, trans=1)
    return solved
