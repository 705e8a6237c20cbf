r"""A site's own Gaussian process over configurations and fidelities, in closed form.

With :math:`e(s)` from 1 at the lowest fidelity to 0 at the target, outcomes are modelled as

.. math:: z(x, s) = a + (1 + c\, e)\,(\beta g(x) + f(x)) + e\,(b + \delta(x)) + \epsilon, \qquad
          e(s) = (1 - s)^p,

with :math:`f` and :math:`\delta` independent Gaussian processes of one squared exponential kernel
and variances :math:`\sigma^2` and :math:`\sigma^2 \omega`, a trend :math:`b` that all curves have,
and `s` the way to the target between 0 and 1. This is BoTorch's `DownsamplingKernel` times a kernel
of configurations, with a coupling `c`: by how much more than at the target the same function counts
at low fidelities. The prior function :math:`g` of messages enters at the target as in
`models.earned_prior`, and at low fidelities with that coupling.

At the target alone, `e = 0`, this is `models.local_gp` with a fitted variance. All hyperparameters
are fitted by maximum a posteriori with gradients that are written out.

What an evaluation at a fidelity tells about the target follows from the posterior covariance of two
functions, :math:`F = \beta g + f` and :math:`D = c F + b + \delta`: the outcome is
:math:`F + e D + \epsilon`, and the mean of :math:`F` moves by a normal variable of variance
:math:`\mathrm{Cov}(F, F + e D)^2 / \mathrm{Var}(F + e D + \epsilon)`, the *gain*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dpotrs
from torch import Tensor

from botorch_fed.errors import NumericalError
from botorch_fed.models.earned_prior import (
    TRUST_PRIOR,
    TRUSTS,
    EarnedPosterior,
    PriorFunction,
    earned_weights,
)
from botorch_fed.models.local_gp import (
    MAX_LENGTHSCALE,
    MAX_NOISE,
    MIN_LENGTHSCALE,
    MIN_NOISE,
    NOISE_PRIOR,
    Array,
    LengthscalePrior,
    LocalGP,
    Standardized,
    inverse_of_factor,
    standardize,
)
from botorch_fed.models.numerics import check_finite
from botorch_fed.models.warp import LogWarp

TREND = 10.0  # prior deviation of the trend b, on the standardised scale
FIRST_POWER = 2.0  # of e, with which the trend is taken out of the scale
MAX_FITTED = 100  # observations that hyperparameters are fitted to
MAX_USED = 300  # observations of a model
MAX_ITERATIONS = 60
MORE_ITERATIONS = 8  # of a further fit, which begins at another one

# Of log variance, coupling, log bias and log power: location and scale of normal priors, bounds.
_FORM_PRIOR = np.array([(0.0, 0.7), (0.0, 0.5), (0.0, 1.0), (math.log(FIRST_POWER), 0.5)])
_FORM_BOUNDS = [(-6.0, 3.0), (-2.0, 4.0), (-7.0, 4.0), (math.log(0.3), math.log(12.0))]


@dataclass(frozen=True, eq=False)
class FidelityGP(LocalGP):
    r"""The posterior of a site's own model over configurations and fidelities.

    `X` are configurations; `predict` and `slopes` are of the target, and their variance is the gain
    of an evaluation at `level`: at the target all that there is.

    Attributes:
        way: How far each observation is on the way to the target, 0 to 1, `n`.
        signal: :math:`\sigma^2`, relative to `variance`.
        coupling: :math:`c`.
        bias: :math:`\omega`.
        power: :math:`p`.
        level: The fidelity that `predict` and `slopes` are about, on the same way.
    """

    way: Array = field(default_factory=lambda: np.zeros(0))
    signal: float = 1.0
    coupling: float = 0.0
    bias: float = 0.0
    power: float = 1.0
    level: float = 1.0

    def at(self, level: float) -> FidelityGP:
        """The model whose variance is the gain of evaluations at a fidelity."""
        return replace(self, level=level)

    @property
    def _form(self) -> _Form:
        return _Form(self.signal, self.coupling, self.bias, self.power)

    def predict(self, Z: Array, prior: Array | float = 0.0) -> tuple[Array, Array]:
        """Posterior mean at the target and the gain at `level`, at `m x d` points, `m` each.

        Args:
            Z: The points.
            prior: The prior function there, `m`.
        """
        form, R = self._form, self.covariance(Z)
        by_target, by_change = form.cross(self.way)
        kF = R * by_target
        mean = math.sqrt(self.variance) * (self.constant + kF @ self.weights)
        value, _ = self._gain(form, kF, R * by_change + self._trend)
        return mean + self.trust * prior, self.variance * np.maximum(value, 1e-10)

    @property
    def _trend(self) -> Array:
        """Covariances of the trend with the data, `n`."""
        trend: Array = TREND**2 * _decay(self.way, self.power)
        return trend

    def _gain(self, form: _Form, kF: Array, kD: Array) -> tuple[Array, tuple[Array, ...]]:
        """The gain, and what its gradient is made of."""
        e = float(_decay(np.array([self.level]), self.power)[0])
        pF = kF @ self.precision
        own = form.signal - (pF * kF).sum(axis=1)
        if e == 0:
            return own, (pF,)
        pD = kD @ self.precision
        both = form.coupling * form.signal - (pF * kD).sum(axis=1)
        change = form.change_variance - (pD * kD).sum(axis=1)
        shared = own + e * both
        total = np.maximum(own + 2 * e * both + e**2 * change, 0.0) + self.noise
        return shared**2 / total, (pF, pD, shared, total)

    def slopes(self, Z: Array) -> tuple[Array, Array]:
        """Gradients of what `predict` gives at `m x d` points, without a prior function's.

        Args:
            Z: The points.
        """
        form, R = self._form, self.covariance(Z)
        by_target, by_change = form.cross(self.way)
        kF, changing = R * by_target, R * by_change
        kD = changing + self._trend

        def along(weights: Array, correlation: Array) -> Array:
            both = correlation * weights
            slope: Array = (both @ self.X - both.sum(axis=1)[:, None] * Z) / self.lengthscale**2
            return slope

        mean = math.sqrt(self.variance) * along(self.weights, kF)
        _, parts = self._gain(form, kF, kD)
        own = -2 * along(parts[0], kF)
        if len(parts) == 1:
            return mean, self.variance * own
        pF, pD, shared, total = parts
        e = float(_decay(np.array([self.level]), self.power)[0])
        both = -along(pD, kF) - along(pF, changing)
        change = -2 * along(pD, changing)
        ratio = (shared / total)[:, None]
        slope = 2 * ratio * (own + e * both) - ratio**2 * (own + 2 * e * both + e**2 * change)
        return mean, self.variance * slope

    def with_pending(self, Z: Array, way: Array) -> FidelityGP:
        """As if outcomes of further evaluations had come out at their means.

        Args:
            Z: Their configurations, `m x d`.
            way: Their fidelities on the way to the target, `m`.
        """
        form, R = self._form, self.covariance(Z)
        by_target, by_change = form.cross(self.way)
        e = _decay(way, self.power)
        further = self.constant + (R * by_target) @ self.weights
        further = further + e * ((R * by_change + self._trend) @ self.weights)
        X, ways = np.concatenate([self.X, Z]), np.concatenate([self.way, way])
        residual = np.concatenate([self.residual, further])
        factor, _ = _factor(_correlation(X, self.lengthscale), ways, form, self.noise)
        return replace(self, X=X, way=ways, residual=residual, precision=inverse_of_factor(factor))


@dataclass(frozen=True)
class _Form:
    """How fidelities hang together."""

    signal: float
    coupling: float
    bias: float
    power: float

    def cross(self, way: Array) -> tuple[Array, Array]:
        """What correlations are multiplied by, for `F` and for `D` without its trend, `n` each."""
        e = _decay(way, self.power)
        scaled = 1 + self.coupling * e
        return self.signal * scaled, self.signal * (self.coupling * scaled + self.bias * e)

    @property
    def change_variance(self) -> float:
        """The prior variance of `D`."""
        return self.signal * (self.coupling**2 + self.bias) + TREND**2


def _decay(way: Array, power: float) -> Array:
    decay: Array = np.maximum(1.0 - way, 0.0) ** power
    return decay


def _correlation(X: Array, lengthscale: Array) -> Array:
    scaled = X / lengthscale
    squares = (scaled * scaled).sum(axis=1)
    exponent = squares[:, None] + squares - 2 * scaled @ scaled.T
    correlation: Array = np.exp(-0.5 * np.maximum(exponent, 0.0))
    return correlation


def _factor(
    correlation: Array, way: Array, form: _Form, noise: float | Array
) -> tuple[Array, Array]:
    """The Cholesky factor of the covariance of data, and what correlations are multiplied by."""
    e = _decay(way, form.power)
    scaled = 1 + form.coupling * e
    both = form.signal * (np.outer(scaled, scaled) + form.bias * np.outer(e, e))
    K = correlation * both + TREND**2 * np.outer(e, e)
    K.flat[:: len(K) + 1] += noise
    factor, info = dpotrf(K, lower=1)
    if info:
        raise NumericalError("The covariance over fidelities has no Cholesky factor.")
    return factor, both


# ------------------------------------------------------------------ the fit


def fit_fidelity(
    X: Tensor,
    way: Array,
    Y: Tensor,
    prior: PriorFunction | None = None,
    *,
    trusts: tuple[float, ...] = TRUSTS,
    trust_prior: tuple[float, ...] = TRUST_PRIOR,
    log_warp: LogWarp,
) -> EarnedPosterior:
    r"""The own models over fidelities for every trust, and their weights.

    Args:
        X: Configurations in the unit cube, `n x d` with n > 0.
        way: How far each is on the way to the target, 0 to 1, `n`.
        Y: Outcomes in any unit, larger is better, `n x 1`.
        prior: The function that messages make, at the target.
        trusts: The grid of :math:`\beta`.
        trust_prior: Their prior probabilities.
        log_warp: The scale on which the models see configurations.

    Returns:
        Components are `FidelityGP` at the target, and the standardised scale is that of the
        function there.
    """
    if X.dim() != 2 or len(X) == 0 or Y.shape != (len(X), 1) or way.shape != (len(X),):
        raise BotorchTensorDimensionError(
            f"Expected X `n x d`, fidelities `n` and Y `n x 1` with n > 0, got shapes "
            f"{tuple(X.shape)}, {way.shape} and {tuple(Y.shape)}."
        )
    check_finite(X, "X")
    rows = _worthiest(X.numpy(), way)
    X, way, y = X[torch.from_numpy(rows)], way[rows], Y.numpy()[rows, 0]
    Z: Array = log_warp.transform(X).numpy()
    outcome = _scaled(standardize(y), _around_trend(standardize(y).values, way))
    alone = _fit(Z, way, outcome.values, np.zeros(len(y)), 0.0, None)
    outcome = _scaled(outcome, math.sqrt(alone.signal))
    alone = _rescaled(alone, alone.signal)
    if prior is None:
        return EarnedPosterior((alone,), np.ones(1), outcome, None, log_warp)
    values = prior.values(X)
    components = [alone]
    for trust in trusts[1:]:  # each begins where the one before has ended
        components.append(_fit(Z, way, outcome.values, values, trust, components[-1]))
    weights = earned_weights(tuple(components), trust_prior)
    return EarnedPosterior(tuple(components), weights, outcome, prior, log_warp)


def _worthiest(X: Array, way: Array) -> NDArray[np.int_]:
    """Rows of a model: the highest fidelity of every configuration first, then the next lower."""
    order = np.lexsort((-way, *X.T[::-1]))
    ranked = X[order]
    first = np.ones(len(X), dtype=bool)
    first[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    starts = np.maximum.accumulate(np.where(first, np.arange(len(X)), 0))
    depth = np.empty(len(X), dtype=np.int_)
    depth[order] = np.arange(len(X)) - starts
    return np.lexsort((-way, depth))[:MAX_USED]


def _around_trend(z: Array, way: Array) -> float:
    """The deviation of outcomes around a straight line in `e`."""
    e = _decay(way, FIRST_POWER)
    if len(z) < 3 or e.max() - e.min() < 1e-6:
        return 1.0
    H = np.stack([np.ones(len(z)), e], axis=1)
    residual = z - H @ np.linalg.lstsq(H, z, rcond=None)[0]
    free = max(len(z) - 2, 1)
    return max(math.sqrt(float(residual @ residual) / free), 1e-3)


def _scaled(outcome: Standardized, unit: float) -> Standardized:
    return Standardized(outcome.values / unit, outcome.centre, outcome.scale * unit)


def _rescaled(gp: FidelityGP, unit: float) -> FidelityGP:
    """The same model of outcomes over the root of `unit`, with a signal of one."""
    root = math.sqrt(unit)
    # What the trend may be is relative to the scale too: it is wide on either.
    factor, _ = _factor(
        _correlation(gp.X, gp.lengthscale),
        gp.way,
        replace(gp._form, signal=1.0),
        gp.noise / unit,
    )
    precision = inverse_of_factor(factor)
    residual = gp.residual / root
    constant = float(precision.sum(axis=1) @ residual / precision.sum())
    return replace(
        gp,
        residual=residual,
        signal=1.0,
        noise=gp.noise / unit,
        constant=constant,
        precision=precision,
    )


def _fit(
    Z: Array, way: Array, z: Array, prior: Array, trust: float, start: FidelityGP | None
) -> FidelityGP:
    """The model of one trust."""
    from scipy.optimize import minimize  # costs 70 ms to import, and only fits need it

    few = slice(None, MAX_FITTED)
    objective = _Posterior(Z[few], way[few], z[few], trust * prior[few])
    theta, iterations = objective.mode, MAX_ITERATIONS
    if start is not None:
        theta, iterations = objective.written(start), MORE_ITERATIONS
    fit = minimize(
        objective,
        theta,
        jac=True,
        method="L-BFGS-B",
        bounds=objective.bounds,
        options={"maxiter": iterations},
    )
    if not math.isfinite(fit.fun) or fit.fun >= 1e10:
        raise NumericalError(f"No finite likelihood for {len(z)} observations.")
    lengthscale, noise, form = objective.read(fit.x)
    e = _decay(way, form.power)
    residual = z - trust * prior * (1 + form.coupling * e)
    factor, _ = _factor(_correlation(Z, lengthscale), way, form, noise)
    precision = inverse_of_factor(factor)
    return FidelityGP(
        X=Z,
        residual=residual,
        variance=1.0,
        trust=trust,
        lengthscale=lengthscale,
        noise=noise,
        constant=float(precision.sum(axis=1) @ residual / precision.sum()),
        precision=precision,
        evidence=-float(fit.fun),
        way=way,
        signal=form.signal,
        coupling=form.coupling,
        bias=form.bias,
        power=form.power,
    )


class _Posterior:
    """Minus the log posterior of the hyperparameters, and its gradient, for scipy.

    The parameters are log length scales, log noise, log variance, coupling, log bias, log power.
    """

    def __init__(self, X: Array, way: Array, z: Array, prior: Array) -> None:
        self.n, self.d = X.shape
        self.way, self.z, self.prior = way, z, prior
        self.squares = ((X[:, None] - X[None]) ** 2).reshape(self.n**2, self.d)
        lengthscale = LengthscalePrior.of_dimension(self.d)
        self.location = np.concatenate([lengthscale.location, [NOISE_PRIOR[0]], _FORM_PRIOR[:, 0]])
        scales = np.append(np.full(self.d, lengthscale.scale), NOISE_PRIOR[1])
        self.scale = np.concatenate([scales, _FORM_PRIOR[:, 1]])
        # Log-normal densities of length scales and noise themselves, not of their logarithms.
        self.jacobian = np.concatenate([np.ones(self.d + 1), np.zeros(len(_FORM_PRIOR))])
        bounds = [(MIN_LENGTHSCALE, MAX_LENGTHSCALE)] * self.d + [(MIN_NOISE, MAX_NOISE)]
        self.bounds = [*((math.log(low), math.log(high)) for low, high in bounds), *_FORM_BOUNDS]
        self.low, self.high = np.array(self.bounds).T
        self.mode = self.location - self.jacobian * self.scale**2
        self.mode = self.mode.clip(self.low, self.high)
        near = 1.0 - way > 0
        self.log_left = np.log(np.where(near, 1.0 - way, 1.0))  # 0 at the target, where e is 0 too

    def written(self, gp: FidelityGP) -> Array:
        """The parameters of a model, within the bounds."""
        size = np.log([*gp.lengthscale, gp.noise, gp.signal])
        shape = [gp.coupling, math.log(gp.bias), math.log(gp.power)]
        return np.concatenate([size, shape]).clip(self.low, self.high)

    def read(self, theta: Array) -> tuple[Array, float, _Form]:
        d = self.d
        signal, bias, power = np.exp(theta[[d + 1, d + 3, d + 4]])
        form = _Form(float(signal), float(theta[d + 2]), float(bias), float(power))
        return np.exp(theta[:d]), math.exp(theta[d]), form

    def __call__(self, theta: Array) -> tuple[float, Array]:
        d, n = self.d, self.n
        lengthscale, noise, form = self.read(theta)
        correlation = np.exp(-0.5 * (self.squares @ lengthscale**-2.0)).reshape(n, n)
        try:
            factor, both = _factor(correlation, self.way, form, noise)
        except NumericalError:
            return 1e10, np.zeros_like(theta)
        e = _decay(self.way, form.power)
        scaled = 1 + form.coupling * e
        residual = self.z - self.prior * scaled
        solved, _ = dpotrs(factor, np.stack([np.ones(n), residual], axis=1), lower=1)
        constant = float(solved[:, 1].sum() / solved[:, 0].sum())
        weights = solved[:, 1] - constant * solved[:, 0]
        value = 0.5 * float((residual - constant) @ weights) + np.log(np.diag(factor)).sum()
        value += 0.5 * n * math.log(2 * math.pi)
        # d value / d K = (K^-1 - weights weights') / 2; the constant is at its maximum.
        slope = 0.5 * (inverse_of_factor(factor) - np.outer(weights, weights))
        covariance, weighted = slope * correlation * both, slope * correlation * form.signal
        gradient = np.empty_like(theta)
        gradient[:d] = covariance.ravel() @ self.squares * lengthscale**-2.0
        gradient[d] = np.trace(slope) * noise
        gradient[d + 1] = covariance.sum()
        gradient[d + 2] = 2 * e @ weighted @ scaled - weights @ (self.prior * e)
        gradient[d + 3] = form.bias * (e @ weighted @ e)
        change = form.power * e * self.log_left
        by_power = form.coupling * (weighted @ scaled) + form.bias * (weighted @ e)
        by_power += TREND**2 * (slope @ e)
        gradient[d + 4] = 2 * change @ by_power
        gradient[d + 4] -= weights @ (self.prior * form.coupling * change)
        distance = (theta - self.location) / self.scale
        value += 0.5 * distance @ distance + self.jacobian @ theta
        gradient += distance / self.scale + self.jacobian
        return float(value), gradient


__all__ = ["FidelityGP", "fit_fidelity"]
