r"""The probability that an evaluation succeeds, learned from evaluations that did and that failed.

A Gaussian process :math:`h` of mean zero under a probit likelihood,

.. math:: P(\text{success at } x \mid h) = \Phi(h(x)), \qquad h \sim GP(0, v\, k_\ell),

by expectation propagation [Rasmussen2006]_: each label becomes a normal factor, and so the
posterior is that of a `LocalGP` of pseudo-outcomes, each with its own noise. Length scales are
fitted by the approximate evidence with BoTorch's prior, as those of the own model are.

Regression of labels is no substitute: a step has no length scale, and failures near the border of
what succeeds would shorten it without end.

.. [Rasmussen2006] C. E. Rasmussen, C. K. I. Williams. Gaussian processes for machine learning.
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

MIN_FAILED = 2  # failures from which on feasibility is modelled: one may be an accident
VARIANCE = 25.0  # of the latent process: labels change within a fifth of its deviation
MAX_ITERATIONS = 30  # of the fit of length scales
MAX_SWEEPS = 50
DAMPING, MIN_DAMPING = 0.8, 0.05  # of factors that are all updated at once
SLOW = 0.9  # the least by which a change must shrink
TOLERANCE = 1e-5  # of their precisions and shifts
MIN_PRECISION = 1e-10
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Feasibility:
    """A model of which evaluations succeed.

    Attributes:
        latent: The latent process, as a regression of its pseudo-outcomes.
        log_warp: The scale on which the model sees inputs; None for the unit cube's.
    """

    latent: LocalGP
    log_warp: LogWarp | None = None

    def warp(self, X: Tensor) -> Array:
        """Points as the model sees them, `n x d`."""
        warped: Array = _seen(X, self.log_warp).numpy()
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
        Z = _seen(X, self.log_warp)
        difference = (Z.unsqueeze(-2) - data) / lengthscale
        cross = (-0.5 * difference.square().sum(dim=-1)).exp()
        mean = math.sqrt(latent.variance) * (cross @ torch.from_numpy(latent.weights))
        explained = ((cross @ torch.from_numpy(latent.precision)) * cross).sum(dim=-1)
        variance = latent.variance * (1 - explained).clamp_min(1e-10)
        return torch.special.log_ndtr(mean / (1 + variance).sqrt())


def fit_feasibility(
    X: Tensor, failed: Tensor, *, log_warp: LogWarp | None = None
) -> Feasibility | None:
    """The model of what succeeds; None while fewer than `MIN_FAILED` evaluations have failed.

    Args:
        X: Points in the unit cube whose evaluation succeeded, `n x d`.
        failed: Points whose evaluation failed, `m x d`.
        log_warp: The scale on which the model sees inputs; None for the unit cube's.
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
    Z: Array = _seen(points, log_warp).numpy()
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
    return Feasibility(evidence.model(theta), log_warp)


def _seen(X: Tensor, log_warp: LogWarp | None) -> Tensor:
    return X if log_warp is None else log_warp.transform(X)


@dataclass(frozen=True)
class _Factors:
    """What labels say, as one normal factor for each, and what follows from it.

    Attributes:
        precision: Of the factors, `n`.
        shift: Their means times their precisions.
        weights: By which covariances with the data are multiplied for the mean.
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
        # Where the next propagation begins: a fit's next length scales are near its last ones.
        self.precision, self.shift = np.full(self.n, 0.1), 0.1 * labels

    def covariance(self, theta: Array) -> Array:
        exponent = self.squares @ np.exp(-2 * theta)
        K: Array = VARIANCE * np.exp(-0.5 * exponent).reshape(self.n, self.n)
        return K

    def factors(self, K: Array) -> _Factors:
        """The factors at which all labels agree, all of them updated at once."""
        y, precision, shift = self.labels, self.precision, self.shift
        damping, before = DAMPING, math.inf
        for _ in range(MAX_SWEEPS):
            factor, variance, mean = _posterior(K, precision, shift)
            # What all other labels say of one: the cavity.
            others = np.maximum(1 / variance - precision, MIN_PRECISION)
            away = mean / variance - shift
            v, m = 1 / others, away / others
            deviation = np.sqrt(1 + v)
            z = y * m / deviation
            log_density = log_ndtr(z)
            r = np.exp(-0.5 * z * z - _LOG_SQRT_2PI - log_density)
            # Mean and variance with the label itself, and the factor that gives the same.
            matched = m + y * v * r / deviation
            spread = v - v * v * r * (z + r) / (1 + v)
            changed = np.maximum(1 / spread - others, MIN_PRECISION) - precision
            moved = matched / spread - away - shift
            change = max(float(np.abs(changed).max()), float(np.abs(moved).max()))
            if change <= TOLERANCE:
                break
            if change > SLOW * before:  # many labels near each other say the same at once
                damping = max(damping / 2, MIN_DAMPING)
            before = change
            precision, shift = precision + damping * changed, shift + damping * moved
        self.precision, self.shift = precision, shift
        root = np.sqrt(precision)
        weights = shift - root * _solve(factor, root * (K @ shift))
        evidence = (
            float(log_density.sum())
            - float(np.log(np.diag(factor)).sum())
            + 0.5 * float(shift @ mean)
            - 0.5 * float(variance @ shift**2)
            + 0.5 * float(away @ ((precision / others * away - 2 * shift) * variance))
            + 0.5 * float(np.log1p(precision / others).sum())
        )
        inverse = root[:, None] * inverse_of_factor(factor) * root[None]
        return _Factors(precision, shift, weights, inverse, evidence)

    def __call__(self, theta: Array) -> tuple[float, Array]:
        K = self.covariance(theta)
        found = self.factors(K)
        slope = 0.5 * (found.inverse - np.outer(found.weights, found.weights))
        gradient = ((slope * K).ravel() @ self.squares) * np.exp(-2 * theta)
        # Log-normal densities of the values, not of their logarithms.
        distance = (theta - self.location) / self.scale
        value = 0.5 * float(distance @ distance) + float(theta.sum()) - found.evidence
        return value, gradient + distance / self.scale + 1.0

    def model(self, theta: Array) -> LocalGP:
        """The latent process of these length scales."""
        found = self.factors(self.covariance(theta))
        return LocalGP(
            X=self.X,
            residual=found.shift / found.precision / math.sqrt(VARIANCE),
            variance=VARIANCE,
            trust=0.0,
            lengthscale=np.exp(theta),
            noise=math.nan,
            constant=0.0,
            precision=VARIANCE * found.inverse,
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
