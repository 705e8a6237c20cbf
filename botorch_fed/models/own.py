r"""An agent's local Gaussian process, and its hyperparameters by maximum a posteriori.

The model is BoTorch's `SingleTaskGP` with a constant mean and a squared exponential kernel with
automatic relevance determination. It stays at the agent and may be fitted to private data. Outcomes
are on the public scale of the search space: with few observations a public guess of mean and
standard deviation is better than estimates.

A fit takes a few milliseconds instead of `fit_gpytorch_mll`'s hundreds: gradients are analytic, and
the mean is maximised in closed form:

.. math:: \log p(y, \theta) = -\tfrac12 r^\top K^{-1} r - \tfrac12 \log|K| - \tfrac n2 \log 2\pi
          + \log p(\theta), \qquad r = y - m 1,

with the priors of BoTorch: dimension-scaled log-normal length scales and log-normal noise. The
prior of the output scale is concentrated near one, the public scale.

References:
    * [Hvarfner2024]_ C. Hvarfner, E. O. Hellsten, L. Nardi. Vanilla Bayesian optimization performs
      great in high dimensions. ICML 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import InputTransform
from gpytorch.constraints import Positive
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky
from torch import Tensor

from botorch_fed.errors import NumericalError
from botorch_fed.models.numerics import as_double, check_finite

Array = NDArray[np.float64]

NOISE_PRIOR = (-4.0, 1.0)  # log-normal: location and scale, as BoTorch
OUTPUTSCALE_PRIOR = (0.0, 0.2)  # normal prior of the logarithm: location and scale
MIN_NOISE, MAX_NOISE = 1e-6, 10.0
MIN_LENGTHSCALE, MAX_LENGTHSCALE = 5e-3, 100.0
MIN_OUTPUTSCALE, MAX_OUTPUTSCALE = 1e-6, 1e8


@dataclass(frozen=True, eq=False)
class OwnHyperparameters:
    """Hyperparameters fitted to an agent's data: private, and part of its state.

    Attributes:
        lengthscale: A tensor of `d` length scales.
        outputscale: Prior variance of the function.
        noise_var: Variance of the observation noise.
        mean: The constant mean.
        num_data: Number of observations of the fit.
    """

    lengthscale: Tensor
    outputscale: float
    noise_var: float
    mean: float
    num_data: int


def default_hyperparameters(dim: int) -> OwnHyperparameters:
    """The modes of the priors, where a fit starts."""
    mode = math.exp(_lengthscale_location(dim) - 3)
    return OwnHyperparameters(
        lengthscale=torch.full((dim,), mode, dtype=torch.float64),
        outputscale=1.0,
        noise_var=math.exp(NOISE_PRIOR[0] - NOISE_PRIOR[1] ** 2),
        mean=0.0,
        num_data=0,
    )


def fit_own_gp(
    X: Tensor,
    Y: Tensor,
    *,
    start: OwnHyperparameters | None = None,
    prior_mean: Tensor | None = None,
    prior_covariance: Tensor | None = None,
    outputscale_prior: tuple[float, float] = OUTPUTSCALE_PRIOR,
) -> OwnHyperparameters:
    """Hyperparameters of an agent's local GP, fitted from the priors' modes and from `start`.

    Args:
        X: An `n x d` tensor of points in the unit cube.
        Y: An `n x 1` tensor of outcomes on the public scale, larger is better.
        start: An earlier fit, used as a second starting point.
        prior_mean: An `n x 1` tensor: a prior mean, e.g. from messages.
        prior_covariance: An `n x n` tensor: a fixed part of the covariance, to which the fitted
            kernel is added.
        outputscale_prior: Location and scale of the normal prior of the output scale's logarithm.
    """
    X, Y = checked_data(X, Y)
    fixed = None if prior_covariance is None else as_double(prior_covariance, "covariance").numpy()
    n = len(X)
    for name, part, shape in (
        ("prior_mean", prior_mean, (n, 1)),
        ("prior_covariance", prior_covariance, (n, n)),
    ):
        if part is not None and part.shape != shape:
            raise BotorchTensorDimensionError(
                f"{name} must have shape {shape}, got {tuple(part.shape)}."
            )
    residuals = Y if prior_mean is None else Y - as_double(prior_mean, "prior_mean")
    objective = LogPosterior(X.numpy(), residuals.numpy()[:, 0], fixed, outputscale_prior)
    starts = [default_hyperparameters(X.shape[-1]), *([] if start is None else [start])]
    return objective.maximum([objective.pack(theta) for theta in starts])


def checked_data(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Points `n x d` and outcomes `n x 1` in float64; raises for other shapes and without data."""
    X, Y = as_double(X, "X"), as_double(Y, "Y")
    if X.dim() != 2 or len(X) == 0 or Y.shape != (len(X), 1):
        raise BotorchTensorDimensionError(
            f"Expected X `n x d` and Y `n x 1` with n > 0, got shapes {tuple(X.shape)} and "
            f"{tuple(Y.shape)}."
        )
    check_finite(X, "X")
    check_finite(Y, "Y")
    return X, Y


def own_gp(
    X: Tensor,
    Y: Tensor,
    hyperparameters: OwnHyperparameters,
    *,
    input_transform: InputTransform | None = None,
) -> SingleTaskGP:
    """The `SingleTaskGP` of an agent's data, in evaluation mode.

    Args:
        X: An `n x d` tensor of points in the unit cube.
        Y: An `n x 1` tensor of outcomes on the public scale, larger is better.
        hyperparameters: Hyperparameters of `fit_own_gp`, fitted to transformed points if there is
            a transform.
        input_transform: A public input transform, e.g. `LogWarp`.
    """
    kernel = ScaleKernel(RBFKernel(ard_num_dims=X.shape[-1])).double()
    kernel.base_kernel.lengthscale = hyperparameters.lengthscale
    # As float64 tensors: GPyTorch's setters take numbers as float32.
    values = hyperparameters.outputscale, hyperparameters.noise_var, hyperparameters.mean
    outputscale, noise_var, constant = torch.tensor(values, dtype=torch.float64)
    kernel.outputscale = outputscale
    likelihood = GaussianLikelihood(noise_constraint=Positive()).double()
    likelihood.noise = noise_var
    mean = ConstantMean().double()
    mean.constant = constant
    model = SingleTaskGP(
        X,
        Y,
        likelihood=likelihood,
        covar_module=kernel,
        mean_module=mean,
        outcome_transform=None,
        input_transform=input_transform,
    )
    model.requires_grad_(False)
    return model.eval()


def needs_fit(num_data: int, hyperparameters: OwnHyperparameters | None) -> bool:
    """Whether to refit: the number of observations has grown by a quarter since the last fit."""
    if hyperparameters is None:
        return num_data > 0
    return num_data >= hyperparameters.num_data + max(1, hyperparameters.num_data // 4)


class LogPosterior:
    """Minus the log posterior of the hyperparameters, and its gradient, for scipy."""

    def __init__(
        self, X: Array, y: Array, fixed: Array | None, outputscale_prior: tuple[float, float]
    ) -> None:
        self.n, self.d = X.shape
        self.y = y
        self.fixed = fixed  # the fixed part of the covariance
        self.squares = (X[:, None, :] - X[None, :, :]) ** 2  # n x n x num_scales
        low = [math.log(MIN_LENGTHSCALE)] * self.d
        high = [math.log(MAX_LENGTHSCALE)] * self.d
        self.low = np.array([*low, math.log(MIN_OUTPUTSCALE), math.log(MIN_NOISE)])
        self.high = np.array([*high, math.log(MAX_OUTPUTSCALE), math.log(MAX_NOISE)])
        lengthscale = _lengthscale_location(self.d), math.sqrt(3)
        priors = [*[lengthscale] * self.d, outputscale_prior, NOISE_PRIOR]
        self.location, self.scale = np.array(priors).T
        # Log-normal densities of the values, not of their logarithms; the output scale's is normal.
        self.density = np.array([1.0] * self.d + [0.0, 1.0])

    @property
    def num_scales(self) -> int:
        """The number of fitted length scales."""
        return int(self.squares.shape[-1])

    def maximum(self, starts: Sequence[Array]) -> OwnHyperparameters:
        """The best hyperparameters over fits from these starts."""
        from scipy.optimize import minimize  # costs 70 ms to import, and only fits need it

        bounds = list(zip(self.low, self.high, strict=True))
        fits = [
            minimize(self, theta, jac=True, method="L-BFGS-B", bounds=bounds) for theta in starts
        ]
        best = min(fits, key=lambda fit: fit.fun)
        if not math.isfinite(best.fun):
            raise NumericalError(f"No finite likelihood for {self.n} observations at any start.")
        return self.unpack(best.x)

    def pack(self, hyperparameters: OwnHyperparameters) -> Array:
        """Logarithms of length scales, output scale and noise, within their bounds."""
        scales = hyperparameters.lengthscale.numpy()[: self.num_scales]
        theta = np.log([*scales, hyperparameters.outputscale, hyperparameters.noise_var])
        return np.clip(theta, self.low, self.high)

    def unpack(self, theta: Array) -> OwnHyperparameters:
        """The inverse of `pack`."""
        scales = np.exp(theta[: self.num_scales])
        terms = self._terms(theta)
        return OwnHyperparameters(
            lengthscale=torch.from_numpy(np.broadcast_to(scales, (self.d,)).copy()),
            outputscale=math.exp(theta[-2]),
            noise_var=math.exp(theta[-1]),
            mean=0.0 if terms is None else float(terms[3]),
            num_data=self.n,
        )

    def _terms(self, theta: Array) -> tuple[Array, Array, Array, float] | None:
        weights = np.exp(-2 * theta[: self.num_scales])
        signal = np.exp(theta[-2] - 0.5 * self.squares @ weights)  # noise-free covariance
        K = signal.copy() if self.fixed is None else signal + self.fixed
        K.flat[:: self.n + 1] += math.exp(theta[-1])
        try:
            L = cholesky(K, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return None
        mean = self.best_mean(L)
        return signal, L, self.y - mean, mean

    def best_mean(self, L: Array) -> float:
        """The constant mean with the largest posterior density."""
        ones = cho_solve((L, True), np.ones(self.n), check_finite=False)
        return float(ones @ self.y / ones.sum())

    def prior(self, theta: Array) -> tuple[float, Array]:
        """Minus the log prior density, up to a constant, and its gradient."""
        z = (theta - self.location) / self.scale
        return 0.5 * z @ z + self.density @ theta, z / self.scale + self.density

    def __call__(self, theta: Array) -> tuple[float, Array]:
        terms = self._terms(theta)
        if terms is None:
            return math.inf, np.zeros_like(theta)
        signal, L, r, _ = terms
        alpha = cho_solve((L, True), r, check_finite=False)
        value = 0.5 * r @ alpha + np.log(np.diag(L)).sum() + 0.5 * self.n * math.log(2 * math.pi)
        # d value / d K = (K^-1 - alpha alpha') / 2; the mean is at its maximum, so it drops out.
        inverse = cho_solve((L, True), np.eye(self.n), check_finite=False)
        D = 0.5 * (inverse - np.outer(alpha, alpha))
        DS = D * signal
        weights = np.exp(-2 * theta[: self.num_scales])
        gradient = np.empty_like(theta)
        gradient[: self.num_scales] = np.einsum("ij,ijk->k", DS, self.squares) * weights
        gradient[-2] = DS.sum()
        gradient[-1] = np.trace(D) * math.exp(theta[-1])
        penalty, slope = self.prior(theta)
        return float(value + penalty), gradient + slope


def _lengthscale_location(dim: int) -> float:
    return math.sqrt(2) + 0.5 * math.log(dim)  # [Hvarfner2024]_
