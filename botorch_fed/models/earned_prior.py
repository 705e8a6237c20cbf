r"""Messages as the prior of a site's own model, with a weight that is fitted to its own data.

Whatever arrives (weight vectors of other sites, a sum of them, a noisy release) is made into one
function over the shared basis, a `PriorFunction` :math:`g`, standardised over public points: it
says where outcomes are better, not in which unit. The own model is then

.. math:: z = \alpha + \beta\, g(x) + h(x) + \epsilon

on outcomes that the site standardises itself (`models.local_gp`). For each :math:`\beta` of a
public grid, zero among them, the rest is fitted, and the models are averaged with weights

.. math:: \pi_\beta \propto p_\beta \prod_i p_\beta(z_i \mid z_{-i}),

a prior probability times the leave-one-out predictive density of the own outcomes. That is the
earned trust: :math:`\beta = 0` is the site alone, and a prior that does not help predict own
outcomes fades within a few observations, however many messages say otherwise. Leave-one-out
density needs no model to be right, unlike the evidence.

Sites can pool their trust: `pooled_trust_prior` makes the prior probabilities of a site from the
weights at which the others have arrived, so that in a federation whose functions are unrelated
nobody has to find that out alone. Their *sum* suffices.

Scales cancel: a shift or a stretch of own outcomes, or of everything a release says, changes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from botorch.models import SingleTaskGP
from botorch.models.transforms.outcome import Standardize
from botorch.settings import validate_input_scaling
from gpytorch.constraints import Positive
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import Mean
from torch import Tensor

from botorch_fed.models.features import FeatureMap, WarpedFeatures
from botorch_fed.models.local_gp import (
    Array,
    LengthscalePrior,
    LocalGP,
    Standardized,
    fit_local_gp,
    standardize,
)
from botorch_fed.models.numerics import as_double, check_finite, cholesky
from botorch_fed.models.warp import LogWarp

NUM_REFERENCE = 512  # public points that represent the cube
RIDGE = 1e-4  # of a projection on the shared basis
TRUSTS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRUST_PRIOR = (0.3, 0.1, 0.2, 0.2, 0.2)
UNTESTED = 0.5  # probability of no trust where no site compares
POOLING = 2.0  # sites that the public prior counts for beside the others' experience
MIN_PRIOR = 0.005  # probability of a trust, whatever others have found
MIN_WEIGHT = 1e-4  # of a model that counts
MIN_SPREAD = 1e-9  # of a function that says anything, relative to its size


def reference_points(dim: int, count: int = NUM_REFERENCE) -> Tensor:
    """Public points that represent the cube: the first of Sobol's sequence."""
    return torch.quasirandom.SobolEngine(dim, scramble=False).draw(count, dtype=torch.float64)


def _reference(feature_map: FeatureMap) -> Tensor:
    """The points that represent the cube for a shared basis: twice as many as features at least."""
    count = max(NUM_REFERENCE, 2 * feature_map.num_features)
    return spread_over(feature_map, reference_points(feature_map.input_dim, count))


def spread_over(feature_map: FeatureMap, U: Tensor) -> Tensor:
    """Points of the cube, spread as the map sees inputs: evenly on a logarithmic scale or not.

    Args:
        feature_map: The shared basis.
        U: Points that are spread evenly, `n x d`.
    """
    return feature_map.warp.untransform(U) if isinstance(feature_map, WarpedFeatures) else U


@lru_cache(maxsize=16)
def projection(feature_map: FeatureMap, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    r"""Reference points `R x d`, and the matrix `M x R` from values there to weights.

    The weights solve :math:`\min_w \frac1R \sum_r (\phi(x_r)^\top w - f(x_r))^2 + \lambda
    \|w\|^2`.

    Args:
        feature_map: The shared basis.
        ridge: :math:`\lambda`.
    """
    reference = _reference(feature_map)
    Phi = feature_map(reference)
    gram = Phi.mT @ Phi / len(Phi) + ridge * torch.eye(Phi.shape[-1]).double()
    factor = cholesky(gram, "the projection on the shared basis")
    return reference, torch.cholesky_solve(Phi.mT / len(Phi), factor)


@lru_cache(maxsize=16)
def reference_features(feature_map: FeatureMap) -> Tensor:
    """Features of the reference points, `R x M`."""
    return feature_map(_reference(feature_map))


@dataclass(frozen=True, eq=False)
class PriorFunction:
    r"""A function over the shared basis, standardised over public reference points.

    Attributes:
        feature_map: The shared basis.
        weights: Its weights, scaled, `M`.
        centre: Its mean over the reference points, subtracted.
    """

    feature_map: FeatureMap
    weights: Tensor = field(repr=False)
    centre: float

    @classmethod
    def of_weights(cls, feature_map: FeatureMap, weights: Tensor) -> PriorFunction | None:
        """The function of `M` weights; None if it is the same everywhere, and so says nothing."""
        weights = as_double(weights, "weights").detach()
        if weights.shape != (feature_map.num_features,):
            raise BotorchTensorDimensionError(
                f"Expected {feature_map.num_features} weights, got shape {tuple(weights.shape)}."
            )
        check_finite(weights, "weights")
        largest = float(weights.abs().max())
        if largest == 0:
            return None
        values = reference_features(feature_map) @ (weights / largest)
        spread = float(values.std())
        if not spread > MIN_SPREAD:
            return None
        return cls(feature_map, weights / (largest * spread), float(values.mean()) / spread)

    @property
    def dim(self) -> int:
        """Number of inputs."""
        return self.feature_map.input_dim

    def __call__(self, X: Tensor) -> Tensor:
        """Values at `batch_shape x n x d` points, `batch_shape x n`."""
        return self.feature_map(X) @ self.weights - self.centre

    def values(self, X: Tensor) -> Array:
        """Values at `n x d` points, for closed forms."""
        values: Array
        if self._waves is None:
            with torch.no_grad():
                values = self(X).numpy()
            return values
        frequencies, cosines, sines = self._waves
        angles = X.detach().double().numpy() @ frequencies.T
        values = np.cos(angles) @ cosines + np.sin(angles) @ sines - self.centre
        return values

    def with_slope(self, X: Array) -> tuple[Array, Array]:
        """Values at `n x d` points, and their gradient, `n x d`."""
        if self._waves is None:
            points = torch.from_numpy(X).requires_grad_()
            found = self(points)
            (slope,) = torch.autograd.grad(found.sum(), points)
            return found.detach().numpy(), slope.numpy()
        frequencies, cosines, sines = self._waves
        angles = X @ frequencies.T
        cos, sin = np.cos(angles), np.sin(angles)
        values: Array = cos @ cosines + sin @ sines - self.centre
        return values, (cos * sines - sin * cosines) @ frequencies

    @cached_property
    def _waves(self) -> tuple[Array, Array, Array] | None:
        with torch.no_grad():
            waves = self.feature_map.as_waves(self.weights)
        if waves is None:
            return None
        frequencies, cosines, sines = waves
        return frequencies.numpy(), cosines.numpy(), sines.numpy()


def project(function: Callable[[Tensor], Array], feature_map: FeatureMap) -> Tensor:
    """Weights of the shared basis that are nearest to a function on the reference points.

    Args:
        function: From `n x d` points of the unit cube to `n` values.
        feature_map: The shared basis.
    """
    reference, matrix = projection(feature_map)
    return matrix @ torch.from_numpy(function(reference))


@dataclass(frozen=True, eq=False)
class EarnedPosterior:
    """A site's own models, one for each trust, and their weights.

    Attributes:
        components: A fitted model for each trust.
        weights: Their probabilities.
        outcome: How outcomes were standardised.
        prior: The function that messages make; None without messages.
        log_warp: The scale on which the models see inputs.
    """

    components: tuple[LocalGP, ...]
    weights: Array
    outcome: Standardized
    prior: PriorFunction | None
    log_warp: LogWarp

    @property
    def trust(self) -> float:
        r"""The mean of :math:`\beta`."""
        return float(sum(w * c.trust for w, c in zip(self.weights, self.components, strict=True)))

    def warp(self, X: Tensor) -> Array:
        """Points as the models see them, `n x d`."""
        warped: Array = self.log_warp.transform(X).numpy()
        return warped

    def unwarp(self, Z: Array) -> Tensor:
        """The inverse of `warp`."""
        return self.log_warp.untransform(torch.from_numpy(Z))

    def prior_values(self, X: Tensor) -> Array | float:
        """The prior function at `n x d` points, `n`."""
        return 0.0 if self.prior is None else self.prior.values(X)

    def prior_and_slope(self, Z: Array) -> tuple[Array | float, Array | float]:
        """The prior function at points as the models see them, and its gradient: `n`, `n x d`."""
        if self.prior is None:
            return 0.0, 0.0
        if self.log_warp.identity:
            return self.prior.with_slope(Z)
        points = torch.from_numpy(Z).requires_grad_()
        X = self.log_warp.untransform(points)
        values, inner = self.prior.with_slope(X.detach().numpy())
        (slope,) = torch.autograd.grad(X, points, torch.from_numpy(inner))
        return values, slope.numpy()

    def predict(self, X: Tensor) -> tuple[Array, Array]:
        """Mean and variance on the standardised scale at `n x d` points, `n` each."""
        Z, prior = self.warp(X), self.prior_values(X)
        means, variances = np.stack([c.predict(Z, prior) for c in self.components], axis=1)
        w = self.weights[:, None]
        mean = (w * means).sum(axis=0)
        return mean, (w * (variances + means**2)).sum(axis=0) - mean**2

    def conditioned(self, X: Tensor) -> EarnedPosterior:
        """As if outcomes at `n x d` further points had come out at each model's mean."""
        Z, prior = self.warp(X), self.prior_values(X)
        components = tuple(c.conditioned(Z, c.predict(Z, prior)[0], prior) for c in self.components)
        return replace(self, components=components)

    def pruned(self) -> EarnedPosterior:
        """Without models that have lost their weight."""
        kept = np.flatnonzero(self.weights >= MIN_WEIGHT)
        return replace(
            self,
            components=tuple(self.components[k] for k in kept),
            weights=self.weights[kept] / self.weights[kept].sum(),
        )

    def only(self, index: int) -> EarnedPosterior:
        """One of the models alone."""
        return replace(self, components=self.components[index : index + 1], weights=np.ones(1))

    def drawn(self, uniform: float) -> int:
        """The index of a component, drawn with its probability.

        Args:
            uniform: A uniform random number.
        """
        return int(np.searchsorted(self.weights.cumsum()[:-1], uniform, side="right"))

    def model(self, index: int) -> SingleTaskGP:
        """A component as BoTorch's model, on the scale of the outcomes as they were given."""
        return as_single_task_gp(self.components[index], self.outcome, self.prior, self.log_warp)


def fit_earned(
    X: Tensor,
    Y: Tensor,
    prior: PriorFunction | None = None,
    *,
    trusts: tuple[float, ...] = TRUSTS,
    trust_prior: tuple[float, ...] = TRUST_PRIOR,
    lengthscale_prior: LengthscalePrior | None = None,
    log_warp: LogWarp | None = None,
    Yvar: Tensor | None = None,
) -> EarnedPosterior:
    r"""The own models for every trust, fitted to the own data, and their weights.

    Args:
        X: Own points in the unit cube, `n x d` with n > 0.
        Y: Own outcomes in any unit, larger is better, `n x 1`.
        prior: The function that messages make.
        trusts: The grid of :math:`\beta`.
        trust_prior: Their prior probabilities.
        lengthscale_prior: Default BoTorch's.
        log_warp: The scale on which the models see inputs; default that of the unit cube.
        Yvar: Known variances of the outcomes, `n x 1`; default one variance for all, fitted.
    """
    X, Y = as_double(X, "X"), as_double(Y, "Y")
    if X.dim() != 2 or len(X) == 0 or Y.shape != (len(X), 1):
        raise BotorchTensorDimensionError(
            f"Expected X `n x d` and Y `n x 1` with n > 0, got shapes {tuple(X.shape)} and "
            f"{tuple(Y.shape)}."
        )
    check_finite(X, "X")
    outcome = standardize(Y.numpy()[:, 0])
    noise = None
    if Yvar is not None:
        if Yvar.shape != Y.shape:
            raise BotorchTensorDimensionError(
                f"Expected Yvar of Y's shape {tuple(Y.shape)}, got {tuple(Yvar.shape)}."
            )
        root = as_double(Yvar, "Yvar").sqrt().numpy()[:, 0]  # squares of 1e-200 would be zero
        noise = (root / outcome.scale) ** 2
    warp = LogWarp(torch.zeros_like(X[0])) if log_warp is None else log_warp
    Z: Array = warp.transform(X).numpy()
    if prior is None:
        alone = fit_local_gp(Z, outcome.values, lengthscale_prior=lengthscale_prior, noise=noise)
        return EarnedPosterior((alone,), np.ones(1), outcome, None, warp)
    values = prior.values(X)
    components = tuple(
        fit_local_gp(
            Z,
            outcome.values,
            prior=values,
            trust=trust,
            lengthscale_prior=lengthscale_prior,
            noise=noise,
        )
        for trust in trusts
    )
    weights = earned_weights(components, trust_prior)
    return EarnedPosterior(components, weights, outcome, prior, warp)


def earned_weights(components: tuple[LocalGP, ...], trust_prior: tuple[float, ...]) -> Array:
    """Probabilities of the models by prior probability and leave-one-out density."""
    density = [float(c.log_leave_one_out().sum()) for c in components]
    scores = np.array(density) + np.log(trust_prior)
    weights: Array = np.exp(scores - scores.max())
    return weights / weights.sum()


def pooled_trust_prior(trust_prior: tuple[float, ...], others: Array | None) -> tuple[float, ...]:
    r"""Prior probabilities of the trusts, from those at which other sites have arrived.

    The mixing proportions of the federation, one step of expectation maximisation per round, with
    the public prior as `POOLING` sites more. Where nobody compares, no trust at all, the first of
    them, has at least probability `UNTESTED`.

    Args:
        trust_prior: The public prior, `K`.
        others: The sum of the other sites' weights, `K`; None if nobody compares.
    """
    prior = np.array(trust_prior)
    if others is None or others.shape != prior.shape:
        alone = max(trust_prior[0], UNTESTED)
        rest = (1 - alone) / max(1 - trust_prior[0], MIN_PRIOR)
        return (alone, *(rest * prior[1:]).tolist())
    pooled = np.maximum(others, 0.0) + POOLING * prior
    pooled = np.maximum(pooled / pooled.sum(), MIN_PRIOR)
    return tuple((pooled / pooled.sum()).tolist())


class PriorMean(Mean):
    r"""The mean :math:`a + \beta g(x)` of a component, for GPyTorch.

    Args:
        constant: :math:`a`.
        trust: :math:`\beta`.
        prior: :math:`g`; None if nothing is trusted.
        log_warp: The scale on which the model sees its inputs.
    """

    def __init__(
        self,
        constant: float,
        trust: float,
        prior: Callable[[Tensor], Tensor] | None,
        log_warp: LogWarp,
    ) -> None:
        super().__init__()
        self.constant, self.trust = constant, trust
        self.prior = prior
        self.log_warp = log_warp

    def forward(self, x: Tensor) -> Tensor:
        """Values at `batch_shape x n x d` points: `batch_shape x n`."""
        flat = torch.full(x.shape[:-1], self.constant, dtype=torch.float64)
        if self.prior is None or self.trust == 0:
            return flat
        return flat + self.trust * self.prior(self.log_warp.untransform(x))


def as_single_task_gp(
    component: LocalGP,
    outcome: Standardized,
    prior: Callable[[Tensor], Tensor] | None,
    log_warp: LogWarp,
) -> SingleTaskGP:
    """A component's posterior as BoTorch's model in evaluation mode.

    Any acquisition function takes it; outcomes are on the scale on which they were given.

    Args:
        component: The model.
        outcome: How outcomes were standardised.
        prior: The prior function; needed where the component trusts one.
        log_warp: The scale on which the model sees inputs.
    """
    Z = torch.from_numpy(component.X)
    X = log_warp.untransform(Z)
    kernel = ScaleKernel(
        RBFKernel(ard_num_dims=X.shape[-1], lengthscale_constraint=Positive()),
        outputscale_constraint=Positive(),
    ).double()
    kernel.base_kernel.lengthscale = torch.from_numpy(component.lengthscale)
    kernel.outputscale = torch.tensor(component.variance, dtype=torch.float64)
    if isinstance(component.noise, float):
        likelihood = GaussianLikelihood(noise_constraint=Positive()).double()
        likelihood.noise = torch.tensor(component.noise * component.variance, dtype=torch.float64)
    else:
        known = torch.from_numpy(component.noise * component.variance)
        likelihood = FixedNoiseGaussianLikelihood(known)
    transform = Standardize(m=1)
    transform._stdvs_sq = torch.tensor([[outcome.scale**2]], dtype=torch.float64)
    transform.means = torch.tensor([[outcome.centre]], dtype=torch.float64)
    transform.stdvs = torch.tensor([[outcome.scale]], dtype=torch.float64)
    transform._is_trained = torch.tensor(True)
    values = torch.from_numpy(math.sqrt(component.variance) * component.residual)
    if prior is not None and component.trust:
        values = values + component.trust * prior(X)
    with validate_input_scaling(False):  # with further points they are not quite standardised
        model = SingleTaskGP(
            X,
            values.unsqueeze(-1),
            likelihood=likelihood,
            covar_module=kernel,
            mean_module=PriorMean(
                math.sqrt(component.variance) * component.constant, component.trust, prior, log_warp
            ),
            outcome_transform=None,
            input_transform=None if log_warp.identity else log_warp,
        )
    model.outcome_transform = transform  # given at first, it would estimate the scale anew
    model._subset_batch_dict = {}  # one output: subsetting copies
    model.requires_grad_(False)
    return model.eval()
