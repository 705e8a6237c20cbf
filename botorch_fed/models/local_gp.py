r"""A site's own Gaussian process on outcomes that it standardises itself, in closed form.

The model is BoTorch's `SingleTaskGP`: a constant mean, a squared exponential kernel with automatic
relevance determination and prior variance one, the priors of [Hvarfner2024]_, and outcomes
standardised on the site's own data; hyperparameters by maximum a posteriori
(`earned_prior.as_single_task_gp` gives it as that class). Gradients are written out and the
constant is maximised in closed form, so that a fit takes a few milliseconds.

A prior function :math:`g` may be given by its values. Then the model is of the residual,

.. math:: z = \frac{y - \bar y}{s_y}, \qquad z - \beta g(x) = \sqrt v\,(m + h(x) + \epsilon),
          \qquad h \sim GP(0, k_\ell),

with :math:`v` the sample variance of the residual: what the prior explains makes the rest smaller.
A shift or a stretch of the outcomes changes :math:`\bar y` and :math:`s_y` and nothing else.

References:
    * [Hvarfner2024]_ C. Hvarfner, E. O. Hellsten, L. Nardi. Vanilla Bayesian optimization performs
      great in high dimensions. ICML 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs

from botorch_fed.errors import NumericalError

Array = NDArray[np.float64]

NOISE_PRIOR = (-4.0, 1.0)  # log-normal: location and scale, as BoTorch
MIN_NOISE, MAX_NOISE = 1e-4, 10.0
MIN_LENGTHSCALE, MAX_LENGTHSCALE = 0.025, 100.0
MIN_VARIANCE = 1e-4  # of a residual on the standardised scale
MAX_ITERATIONS = 60


@dataclass(frozen=True)
class Standardized:
    """Outcomes on a site's own scale: mean zero and, where they differ, deviation one.

    Attributes:
        values: The standardised outcomes, `n`.
        centre: Their mean.
        scale: Their standard deviation; 1 for one outcome, and where all are equal.
    """

    values: Array
    centre: float
    scale: float


def standardize(y: Array) -> Standardized:
    """Outcomes on their own scale.

    Args:
        y: At least one finite outcome, larger is better, `n`.
    """
    if not len(y) or not np.isfinite(y).all():
        raise InputDataError("Expected one finite outcome or more.")
    unit = float(np.abs(y).max())
    if unit == 0:
        return Standardized(np.zeros(len(y)), 0.0, 1.0)
    scaled = y / unit  # sums of squares of outcomes near 1e200 would overflow
    centre = float(scaled.mean())
    deviation = float(scaled.std(ddof=1)) if len(y) > 1 else 0.0
    if deviation <= 1e-14:  # differences below the rounding of the outcomes themselves are none
        return Standardized(np.zeros(len(y)), centre * unit, 1.0)
    return Standardized((scaled - centre) / deviation, centre * unit, deviation * unit)


@dataclass(frozen=True)
class LengthscalePrior:
    r"""A log-normal prior of every length scale.

    Attributes:
        location: Mean of the logarithm, `d`.
        scale: Standard deviation of the logarithm.
    """

    location: Array
    scale: float = math.sqrt(3)

    @classmethod
    def of_dimension(cls, dim: int) -> LengthscalePrior:
        """BoTorch's, which grows as the root of the dimension [Hvarfner2024]_."""
        return cls(np.full(dim, math.sqrt(2) + 0.5 * math.log(dim)))


@dataclass(frozen=True, eq=False)
class LocalGP:
    r"""The posterior of a site's own model, on its standardised scale.

    Attributes:
        X: Points in the unit cube, `n x d`.
        residual: What is modelled, :math:`(z - \beta g) / \sqrt v`, `n`.
        variance: :math:`v`.
        trust: :math:`\beta`.
        lengthscale: `d` length scales.
        noise: Noise variance, relative to :math:`v`; known ones are given one by one, `n`.
        constant: The constant mean :math:`m`, on the scale of `residual`.
        precision: Inverse of the covariance of `residual`, `n x n`.
        evidence: Log posterior density of the hyperparameters, up to a constant.
    """

    X: Array
    residual: Array
    variance: float
    trust: float
    lengthscale: Array
    noise: float | Array
    constant: float
    precision: Array = field(repr=False)
    evidence: float = math.nan

    @property
    def weights(self) -> Array:
        """By which covariances with the data are multiplied for the mean, `n`."""
        weights: Array = self.precision @ (self.residual - self.constant)
        return weights

    def covariance(self, Z: Array) -> Array:
        """Prior correlations with the data, `m x n`, at `m x d` points."""
        return _correlation(Z / self.lengthscale, self.X / self.lengthscale)

    def predict(self, Z: Array, prior: Array | float = 0.0) -> tuple[Array, Array]:
        """Posterior mean and variance of the function at `m x d` points, `m` each.

        Args:
            Z: The points.
            prior: The prior function there, `m`.
        """
        cross = self.covariance(Z)
        mean = math.sqrt(self.variance) * (self.constant + cross @ self.weights)
        explained = ((cross @ self.precision) * cross).sum(axis=1)
        return mean + self.trust * prior, self.variance * np.maximum(1.0 - explained, 1e-10)

    def slopes(self, Z: Array) -> tuple[Array, Array]:
        """Gradients of posterior mean and variance at `m x d` points, without a prior function's.

        Args:
            Z: The points.
        """
        cross = self.covariance(Z)
        # d k(z, x_i) / d z = k(z, x_i) (x_i - z) / l^2
        inverse_square = 1.0 / self.lengthscale**2
        by_mean = cross * self.weights
        by_variance = cross * (cross @ self.precision)
        mean = by_mean @ self.X - by_mean.sum(axis=1)[:, None] * Z
        explained = by_variance @ self.X - by_variance.sum(axis=1)[:, None] * Z
        variance: Array = -2 * self.variance * explained * inverse_square
        return math.sqrt(self.variance) * mean * inverse_square, variance

    def log_leave_one_out(self) -> Array:
        r"""Log predictive density of every observation from all others, `n`.

        The constant mean is refitted without the observation, the hyperparameters are not.
        """
        ones = self.precision.sum(axis=1)
        projected = self.precision - np.outer(ones, ones) / ones.sum()
        inverse_variance = np.maximum(np.diag(projected), 1e-12)
        error = (projected @ self.residual) / inverse_variance
        scaled = self.variance / inverse_variance
        density: Array = -0.5 * (np.log(2 * math.pi * scaled) + self.variance * error**2 / scaled)
        return density

    def conditioned(self, Z: Array, values: Array, prior: Array | float = 0.0) -> LocalGP:
        """With more data at the same hyperparameters, on the standardised scale.

        Args:
            Z: Further points, `m x d`.
            values: Their outcomes on the standardised scale, `m`.
            prior: The prior function there, `m`.
        """
        X = np.concatenate([self.X, Z])
        further = (values - self.trust * prior) / math.sqrt(self.variance)
        residual = np.concatenate([self.residual, further])
        correlation = _correlation(X / self.lengthscale, X / self.lengthscale)
        noise = self.noise
        if not isinstance(noise, float):  # of further points nothing is known but the usual
            noise = np.append(noise, np.full(len(Z), noise.mean()))
        solved = _solve(correlation, noise, residual)
        if solved is None:
            raise NumericalError("The covariance of the further points has no Cholesky factor.")
        precision = inverse_of_factor(solved.factor)
        return replace(self, X=X, residual=residual, noise=noise, precision=precision)


def fit_local_gp(
    X: Array,
    z: Array,
    *,
    prior: Array | None = None,
    trust: float = 0.0,
    lengthscale_prior: LengthscalePrior | None = None,
    noise: Array | None = None,
    start: LocalGP | None = None,
) -> LocalGP:
    r"""The own model, fitted to standardised outcomes.

    Args:
        X: Points in the unit cube, `n x d`.
        z: Outcomes on the standardised scale, `n`.
        prior: Values of the prior function at the points, `n`.
        trust: :math:`\beta`, by which it is multiplied.
        lengthscale_prior: Default BoTorch's.
        noise: Known variances of the outcomes on the standardised scale, `n`; default one variance
            for all, which is fitted.
        start: A fit to begin at, instead of the mode of the priors.
    """
    n, d = X.shape if X.ndim == 2 else (0, 0)
    if n == 0 or z.shape != (n,) or (prior is not None and prior.shape != (n,)):
        shapes = X.shape, z.shape, None if prior is None else prior.shape
        raise BotorchTensorDimensionError(
            f"Expected X `n x d`, outcomes `n` and a prior `n` with n > 0, got shapes {shapes}."
        )
    if noise is not None and (noise.shape != (n,) or not (noise >= 0).all()):
        raise InputDataError(f"Expected {n} known variances >= 0, got {noise}.")
    difference = z if prior is None or trust == 0 else z - trust * prior
    variance = max(float(difference.var(ddof=1)), MIN_VARIANCE) if n > 1 else 1.0
    residual = difference / math.sqrt(variance)
    if lengthscale_prior is None:
        lengthscale_prior = LengthscalePrior.of_dimension(d)
    known = None if noise is None else np.maximum(noise / variance, MIN_NOISE)
    objective = _Posterior(X, residual, lengthscale_prior, known)
    theta = objective.mode
    if start is not None:
        theta[:d] = np.log(start.lengthscale)
        if known is None:
            theta[d] = np.log(np.mean(start.noise))
        theta = theta.clip(objective.low, objective.high)
    from scipy.optimize import minimize  # costs 70 ms to import, and only fits need it

    fit = minimize(
        objective,
        theta,
        jac=True,
        method="L-BFGS-B",
        bounds=objective.bounds,
        options={"maxiter": MAX_ITERATIONS},
    )
    solved = objective.solved(fit.x)
    if solved is None or not math.isfinite(fit.fun):
        raise NumericalError(f"No finite likelihood for {n} observations.")
    return LocalGP(
        X=X,
        residual=residual,
        variance=variance,
        trust=trust,
        lengthscale=np.exp(fit.x[:d]),
        noise=objective.noise(fit.x),
        constant=solved.constant,
        precision=inverse_of_factor(solved.factor),
        evidence=-float(fit.fun) - 0.5 * n * math.log(variance),
    )


@dataclass(frozen=True)
class _Solved:
    """A Cholesky factor of the covariance, and what follows from it."""

    factor: Array
    constant: float
    weights: Array
    quadratic: float


def _solve(correlation: Array, noise: float | Array, residual: Array) -> _Solved | None:
    n = len(residual)
    K = correlation.copy()
    K.flat[:: n + 1] += noise
    factor, info = dpotrf(K, lower=1)
    if info:
        return None
    both, _ = dpotrs(factor, np.stack([np.ones(n), residual], axis=1), lower=1)
    constant = float(both[:, 1].sum() / both[:, 0].sum())
    weights = both[:, 1] - constant * both[:, 0]
    return _Solved(factor, constant, weights, float((residual - constant) @ weights))


def inverse_of_factor(factor: Array) -> Array:
    """The inverse of a matrix from its lower Cholesky factor.

    Args:
        factor: The factor, `n x n`.
    """
    lower, _ = dpotri(factor, lower=1)
    lower = np.tril(lower)
    inverse: Array = lower + np.tril(lower, -1).T
    return inverse


def _correlation(A: Array, B: Array) -> Array:
    """Squared exponential correlations of scaled points, `m x n`."""
    squares = (A * A).sum(axis=1)[:, None] + (B * B).sum(axis=1)[None, :] - 2 * A @ B.T
    correlation: Array = np.exp(-0.5 * np.maximum(squares, 0.0))
    return correlation


class _Posterior:
    """Minus the log posterior of log length scales and log noise, and its gradient, for scipy."""

    def __init__(
        self, X: Array, residual: Array, prior: LengthscalePrior, known: Array | None = None
    ) -> None:
        self.n, self.d = X.shape
        self.residual = residual
        self.known = known
        self.squares = ((X[:, None] - X[None]) ** 2).reshape(self.n**2, self.d)
        fitted = 0 if known is not None else 1
        self.location = np.append(prior.location, [NOISE_PRIOR[0]] * fitted)
        self.scale = np.append(np.full(self.d, prior.scale), [NOISE_PRIOR[1]] * fitted)
        self.low = np.log([MIN_LENGTHSCALE] * self.d + [MIN_NOISE] * fitted)
        self.high = np.log([MAX_LENGTHSCALE] * self.d + [MAX_NOISE] * fitted)
        self.bounds = list(zip(self.low, self.high, strict=True))
        # The mode of a log-normal density, where BoTorch begins too.
        self.mode = (self.location - self.scale**2).clip(self.low, self.high)

    def correlation(self, theta: Array) -> Array:
        exponent = self.squares @ np.exp(-2 * theta[: self.d])
        correlation: Array = np.exp(-0.5 * exponent).reshape(self.n, self.n)
        return correlation

    def noise(self, theta: Array) -> float | Array:
        """The fitted variance, or the known ones, `n`."""
        return float(np.exp(theta[self.d])) if self.known is None else self.known

    def solved(self, theta: Array) -> _Solved | None:
        return _solve(self.correlation(theta), self.noise(theta), self.residual)

    def __call__(self, theta: Array) -> tuple[float, Array]:
        correlation, noise = self.correlation(theta), self.noise(theta)
        solved = _solve(correlation, noise, self.residual)
        if solved is None:
            return 1e10, np.zeros_like(theta)
        log_root = np.log(np.diag(solved.factor)).sum()
        value = 0.5 * solved.quadratic + log_root + 0.5 * self.n * math.log(2 * math.pi)
        # d value / d K = (K^-1 - weights weights') / 2; the constant is at its maximum.
        slope = 0.5 * (inverse_of_factor(solved.factor) - np.outer(solved.weights, solved.weights))
        gradient = np.empty_like(theta)
        by_scale = np.exp(-2 * theta[: self.d])
        gradient[: self.d] = (slope * correlation).ravel() @ self.squares * by_scale
        if self.known is None:
            gradient[self.d] = np.trace(slope) * noise
        # Log-normal densities of the values, not of their logarithms.
        distance = (theta - self.location) / self.scale
        value += 0.5 * distance @ distance + theta.sum()
        gradient += distance / self.scale + 1.0
        return float(value), gradient
