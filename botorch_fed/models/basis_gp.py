r"""`BasisGP`: a Gaussian process over a shared basis, a drop-in BoTorch model.

One class is the random-feature surrogate of FTS, the quadrature surrogate of private GP bandits,
and the global model of dPITC, depending on its feature map and on the summaries it received.

.. [Hvarfner2024] C. Hvarfner, E. O. Hellsten, L. Nardi. Vanilla Bayesian optimization performs
   great in high dimensions. ICML 2024.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from botorch.utils.datasets import SupervisedDataset
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import GP
from gpytorch.priors import LogNormalPrior
from linear_operator import to_linear_operator
from linear_operator.operators import RootLinearOperator
from linear_operator.utils.errors import NotPSDError
from torch import Size, Tensor
from torch.nn import Parameter

from botorch_fed.errors import NumericalError
from botorch_fed.models.features import FeatureMap
from botorch_fed.models.numerics import Float64Module, as_double, check_finite
from botorch_fed.models.summary import (
    LocalBlock,
    Summary,
    WeightPosterior,
    check_basis,
    checked_noise,
    log_evidence,
    summarize,
)
from botorch_fed.rng import Generator

MIN_NOISE = 1e-4  # lower bound of an inferred noise variance, as in BoTorch
NOISE_MODE = math.exp(-5.0)  # mode of the noise prior LogNormal(-4, 1)
MIN_LENGTHSCALE = 0.025  # as in BoTorch
MAX_LENGTHSCALE = 1e6
MIN_OUTPUTSCALE = 1e-4


class BasisGP(Float64Module, Model, GP, FantasizeMixin):
    r"""A Gaussian process over a feature map, with own data and received summaries.

    With whitened features the weights are :math:`w \sim N(0, I)` a priori and

    .. math:: f(x) = \mu + \phi(x)^\top w + r(x), \qquad y = f(x) + \epsilon,

    where :math:`r` is what the map misses (zero for Fourier features). Own observations and
    received summaries add up in the posterior of the weights; after ingest, a prediction costs
    :math:`O(M^2)` whatever the number of observations. Outputs are independent and share the map;
    for length scales of their own put one model per output into a `ModelListGP`.

    Without received summaries, `fit_gpytorch_mll` fits noise, mean, length scales and prior
    variance; the fitted length scales make a new map with a new fingerprint. With received
    summaries the map is shared and fixed, and only noise and mean move.

    Args:
        train_X: A `batch_shape x n x d` tensor of points (`n = 0` gives the prior).
        train_Y: A `batch_shape x n x m` tensor of observations.
        train_Yvar: A `batch_shape x n x m` tensor of known noise variances, if they are known.
        feature_map: The basis.
        noise_var: Initial noise *variance*, fixed until the model is fitted; default the mode of
            the prior, LogNormal(-4, 1). Not together with `train_Yvar`.
        summaries: Summaries of other agents over the same basis, each with batch shape
            `batch_shape` (`batch_shape x m` for several outputs), centred on a common mean.
        mean: Initial constant mean :math:`\mu`.
        input_transform: Applied to all points before the map.
        outcome_transform: Applied to `train_Y`; predictions are transformed back. None by
            default: agents that add statistics must agree on one public scale.

    Example:
        >>> phi = RandomFourierFeatures.draw(kernel, 100, generator=generator(0, "features"))
        >>> model = BasisGP(train_X, train_Y, feature_map=phi)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> candidate, _ = optimize_acqf(LogExpectedImprovement(model, best_f), bounds, …)
    """

    likelihood: GaussianLikelihood | FixedNoiseGaussianLikelihood
    raw_lengthscale: Parameter
    raw_outputscale: Parameter
    _train_X: Tensor  # noqa: N815
    _train_Y: Tensor  # noqa: N815
    # Inherited from GPyTorch, which is untyped.
    register_constraint: Callable[..., None]
    register_prior: Callable[..., None]
    named_priors: Callable[..., Any]
    _cache: _Cache | None = None
    _raw: _RawStatistics | None = None

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        *,
        feature_map: FeatureMap,
        noise_var: float | Tensor | None = None,
        summaries: Sequence[Summary] = (),
        mean: float = 0.0,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> None:
        super().__init__()
        train_X, train_Y = as_double(train_X, "train_X"), as_double(train_Y, "train_Y")
        if train_Yvar is not None:
            train_Yvar = as_double(train_Yvar, "train_Yvar")
        _check_shapes(train_X, train_Y, train_Yvar)
        check_finite(train_X, "train_X")
        check_finite(train_Y, "train_Y")
        if not isinstance(feature_map, FeatureMap):
            raise UnsupportedError(
                f"feature_map must be a FeatureMap, got {type(feature_map).__name__}: e.g. "
                "RandomFourierFeatures.draw(kernel, 100, generator=generator(0))."
            )
        n = train_X.shape[-2]
        if input_transform is not None:
            if summaries and getattr(input_transform, "learn_coefficients", False):
                raise UnsupportedError(
                    f"{type(input_transform).__name__} learns its coefficients from this agent's "
                    "data, but received summaries are over the shared inputs: give it the public "
                    "bounds, Normalize(d, bounds=bounds)."
                )
            input_transform = input_transform.to(train_X)
            input_transform.train()
            if n:
                with torch.no_grad():
                    input_transform(train_X)  # learns its coefficients, where it has any
        if outcome_transform is not None:
            if summaries and isinstance(outcome_transform, Standardize):
                warnings.warn(
                    "Standardize scales outcomes by this agent's own data, but received summaries "
                    "are on the shared scale: agree on a public affine map of the outcomes.",
                    InputDataWarning,
                    stacklevel=2,
                )
            if n:
                outcome_transform.train()
                with torch.no_grad():
                    train_Y, train_Yvar = outcome_transform(train_Y, train_Yvar, X=train_X)
                check_finite(train_Y, "train_Y after the outcome transform")
        self._num_outputs = train_Y.shape[-1]
        self._summaries = tuple(summaries)
        for summary in self._summaries:
            check_basis(summary, feature_map.fingerprint)
        self.register_buffer("_train_X", train_X, persistent=False)
        self.register_buffer("_train_Y", train_Y, persistent=False)
        self._base_map = feature_map
        self._register_noise(noise_var, train_Yvar)
        self.mean_module = _constant_mean(
            self._aug_batch_shape, torch.tensor(float(mean), dtype=torch.float64)
        )
        if not self._summaries:
            self._register_kernel_parameters()
        if input_transform is not None:  # BoTorch asks with hasattr
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self.double()

    # ------------------------------------------------------------------ construction

    @classmethod
    def from_summary(
        cls,
        summary: Summary,
        *,
        feature_map: FeatureMap,
        noise_var: float | Tensor | None = None,
        mean: float = 0.0,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> Self:
        r"""The model of a total, without data of one's own: dPITC's global model.

        Args:
            summary: The sum of all agents' summaries, batch shape `batch_shape`.
            feature_map: The basis of the summary.
            noise_var: Used only to predict observations, never for the latent function.
            mean: The constant mean on which the summaries were centred.
            input_transform: As in the constructor.
            outcome_transform: A transform that has been trained or needs no training.
        """
        empty = torch.empty(*summary.batch_shape, 0, feature_map.input_dim, dtype=torch.float64)
        return cls(
            empty,
            empty[..., :1],
            feature_map=feature_map,
            noise_var=noise_var,
            summaries=(summary,),
            mean=mean,
            input_transform=input_transform,
            outcome_transform=outcome_transform,
        )

    @classmethod
    def construct_inputs(
        cls,
        training_data: SupervisedDataset,
        *,
        feature_map: FeatureMap | None = None,
        noise_var: float | None = None,
        summaries: Sequence[Summary] = (),
        mean: float = 0.0,
    ) -> dict[str, Any]:
        """Constructor arguments from a dataset and this model's options."""
        inputs: dict[str, Any] = super().construct_inputs(training_data)
        options = {"feature_map": feature_map, "noise_var": noise_var}
        inputs.update({name: value for name, value in options.items() if value is not None})
        if summaries:
            inputs["summaries"] = tuple(summaries)
        if mean:
            inputs["mean"] = mean
        return inputs

    def _register_noise(self, noise_var: float | Tensor | None, train_Yvar: Tensor | None) -> None:
        if train_Yvar is not None:
            if noise_var is not None:
                raise UnsupportedError("Give either noise_var or train_Yvar, not both.")
            checked_noise(train_Yvar.reshape(-1, 1), train_Yvar.numel())
            self.likelihood = FixedNoiseGaussianLikelihood(self._to_aug(train_Yvar))
            return
        value = torch.as_tensor(NOISE_MODE if noise_var is None else noise_var, dtype=torch.float64)
        checked_noise(value.reshape(-1, 1), value.numel())
        self.likelihood = _noise_likelihood(self._aug_batch_shape, value)

    def _register_kernel_parameters(self) -> None:
        ell, scale = self._base_map.lengthscale.detach(), self._base_map.outputscale.detach()
        lower, upper = self._base_map.lengthscale_range
        lower = torch.maximum(lower, ell.clamp_max(MIN_LENGTHSCALE))
        self.register_parameter("raw_lengthscale", Parameter(ell.clone()))
        self.register_parameter("raw_outputscale", Parameter(scale.clone()))
        # Untransformed: L-BFGS-B keeps the bounds, and the raw value is the value.
        if bool((lower >= upper).any()):
            self.raw_lengthscale.requires_grad_(False)  # a grid made for one length scale
        else:
            upper = upper.clamp_max(MAX_LENGTHSCALE)
            box = Interval(lower, upper, transform=None)
            box.lower_bound, box.upper_bound = lower, upper  # it rounds them to float32
            self.register_constraint("raw_lengthscale", box)
        positive = GreaterThan(scale.clamp_max(MIN_OUTPUTSCALE), transform=None)
        self.register_constraint("raw_outputscale", positive)
        loc = math.sqrt(2) + 0.5 * math.log(self._base_map.input_dim)  # [Hvarfner2024]_
        prior = LogNormalPrior(loc=loc, scale=math.sqrt(3))
        self.register_prior("lengthscale_prior", prior, _lengthscale)
        self.register_prior("outputscale_prior", LogNormalPrior(0.0, 1.0), _outputscale)

    # ------------------------------------------------------------------ what it is made of

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return self._num_outputs

    @property
    def batch_shape(self) -> Size:
        """The batch shape of the model, from the point of view of its inputs and outputs."""
        return self._train_X.shape[:-2]

    @property
    def _aug_batch_shape(self) -> Size:
        # GPyTorch's layout: several outputs are a last batch dimension.
        outputs = [self._num_outputs] if self._num_outputs > 1 else []
        return torch.Size([*self.batch_shape, *outputs])

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """Training points, transformed in eval mode as BoTorch has it."""
        return (self._train_X if self.training else self._transformed_points(),)

    @property
    def _original_train_inputs(self) -> Tensor:  # type: ignore[override]
        """BoTorch's name for the untransformed points."""
        return self._train_X

    @property
    def train_targets(self) -> Tensor:
        """Training observations in the transformed space, `batch_shape x [m] x n`."""
        return self._to_aug(self._train_Y)

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """The received summaries."""
        return self._summaries

    @property
    def feature_map(self) -> FeatureMap:
        """The basis under the current hyperparameters."""
        if self._summaries:
            return self._base_map
        ell, scale = self.raw_lengthscale, self.raw_outputscale
        base = self._base_map
        if torch.equal(ell, base.lengthscale) and torch.equal(scale, base.outputscale):
            return base
        return base.with_hyperparameters(ell.detach().clone(), scale.detach().clone())

    @property
    def weight_posterior(self) -> WeightPosterior:
        """Posterior of the weights, batch shape `batch_shape x m`."""
        return self._predictive().weights

    def sample_weights(
        self,
        sample_shape: Size = torch.Size(),  # noqa: B008 - immutable
        *,
        scale: float = 1.0,
        generator: Generator | None = None,
    ) -> Tensor:
        r"""Draws of the posterior weights: the messages of federated Thompson sampling.

        Args:
            sample_shape: Shape of the draws.
            scale: :math:`\beta_t`: scales the deviation from the mean, not the mean.
            generator: The stream of random numbers; by default PyTorch's global generator seeds
                one.

        Returns:
            A `sample_shape x batch_shape [x m] x M` tensor.
        """
        draws = self.weight_posterior.sample(sample_shape, scale=scale, generator=generator)
        return draws.squeeze(-2) if self._num_outputs == 1 else draws

    def _transformed_points(self) -> Tensor:
        if not hasattr(self, "input_transform"):
            return self._train_X
        return self.input_transform.preprocess_transform(self._train_X)

    def _set_transformed_inputs(self) -> None:
        """Points are transformed on the fly; nothing is stored."""

    def _revert_to_original_inputs(self) -> None:
        """Points are transformed on the fly; nothing is stored."""

    def _to_aug(self, Y: Tensor) -> Tensor:
        return Y.squeeze(-1) if self._num_outputs == 1 else Y.mT

    def _from_aug(self, values: Tensor) -> Tensor:
        return values.unsqueeze(-1) if self._num_outputs == 1 else values.mT

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        device = self._train_X.device
        super()._apply(fn, recurse)
        if self._train_X.device != device:
            self._cache = self._raw = None
        return self

    def set_train_data(
        self, inputs: Tensor | None = None, targets: Tensor | None = None, strict: bool = True
    ) -> None:
        """Replace own data, in GPyTorch's layout: targets are `batch_shape x [m] x n`."""
        X = self._train_X if inputs is None else as_double(inputs, "inputs")
        Y = self._train_Y
        if targets is not None:
            Y = self._from_aug(as_double(targets, "targets"))
        _check_shapes(X, Y, None)
        if strict and (X.shape, Y.shape) != (self._train_X.shape, self._train_Y.shape):
            raise RuntimeError(
                f"Cannot change the shape of the training data from {tuple(self._train_Y.shape)} "
                f"to {tuple(Y.shape)}: pass strict=False."
            )
        self._train_X, self._train_Y = X, Y
        self._cache = self._raw = None

    def load_state_dict(  # type: ignore[override]  # BoTorch's order of arguments
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        keep_transforms: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load hyperparameters.

        With `keep_transforms`, as in BoTorch, own targets are taken back to the original scale
        and transformed anew by the outcome transform that was loaded.
        """
        transform = getattr(self, "outcome_transform", None) if keep_transforms else None
        if transform is None or self._train_X.shape[-2] == 0:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        self.eval()
        X = self._transformed_points()
        fixed = isinstance(self.likelihood, FixedNoiseGaussianLikelihood)
        Yvar = self._from_aug(self.likelihood.noise) if fixed else None
        Y, Yvar = transform.untransform(self._train_Y, Yvar, X=X)
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._train_Y, Yvar = transform(Y, Yvar, X=X)
        if fixed and Yvar is not None:
            self.likelihood = FixedNoiseGaussianLikelihood(self._to_aug(Yvar))
        self._cache = self._raw = None
        return result

    # ------------------------------------------------------------------ statistics

    # Inside, outputs are always a batch dimension, `batch_shape x m`, also for m = 1.

    @property
    def _noise(self) -> Tensor:
        """Noise variance, `batch_shape x m x n x 1` or `batch_shape x m x 1 x 1`."""
        noise = self.likelihood.noise
        noise = noise.unsqueeze(-2) if self._num_outputs == 1 else noise
        return noise.unsqueeze(-1)

    @property
    def _mean(self) -> Tensor:
        """Constant mean, `batch_shape x m x 1 x 1`."""
        constant = self.mean_module.constant
        constant = constant.unsqueeze(-1) if self._num_outputs == 1 else constant
        return constant[..., None, None]

    def _received(self) -> Summary | None:
        if not self._summaries:
            return None
        total = sum(self._summaries[1:], start=self._summaries[0])
        if self._num_outputs > 1:
            return total
        return replace(total, gram=total.gram.unsqueeze(-3), moment=total.moment.unsqueeze(-3))

    def _own_block(self, feature_map: FeatureMap) -> LocalBlock:
        """Own data as one PITC block, for maps with a residual."""
        return LocalBlock.from_data(
            feature_map,
            self._transformed_points().unsqueeze(-3),
            self._train_Y.mT.unsqueeze(-1),
            noise_var=self._noise,
            mean=self._mean,
        )

    def _own_summary(self, feature_map: FeatureMap) -> Summary:
        """Own data, for maps without a residual; flat in `n` once the map is fixed."""
        static = (
            not self._train_X.requires_grad
            and isinstance(self.likelihood, GaussianLikelihood)
            and not feature_map.lengthscale.requires_grad
            and not feature_map.outputscale.requires_grad
            and not (self.training and hasattr(self, "input_transform"))
        )
        if not static:
            return summarize(
                feature_map,
                self._transformed_points().unsqueeze(-3),
                self._train_Y.mT.unsqueeze(-1),
                noise_var=self._noise,
                mean=self._mean,
            )
        if self._raw is None or self._raw.centred.basis != feature_map.fingerprint:
            X = self._transformed_points().unsqueeze(-3)
            self._raw = _RawStatistics.from_data(feature_map, X, self._train_Y.mT.unsqueeze(-1))
        return self._raw.summary(mean=self._mean, noise_var=self._noise)

    def _predictive(self) -> _Cache:
        """Posterior of the weights under the current hyperparameters, computed once for them."""
        key = self._hyperparameters()
        if self._cache is not None and torch.equal(self._cache.key, key):
            return self._cache
        differentiable = self._train_X.requires_grad or self._train_Y.requires_grad
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            feature_map = self.feature_map
            block = self._own_block(feature_map) if feature_map.has_residual else None
            own = self._own_summary(feature_map) if block is None else block.summary
            received = self._received()
            total = own if received is None else own + received
            weights = WeightPosterior.from_total(total)
        self._cache = _Cache(key, feature_map, block, weights)
        return self._cache

    def _hyperparameters(self) -> Tensor:
        values = [p.detach().reshape(-1) for p in self.parameters()]
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            values.append(self.likelihood.noise.detach().reshape(-1))
        if hasattr(self, "input_transform"):
            values.extend(b.reshape(-1).double() for b in self.input_transform.buffers())
        return torch.cat(values)

    # ------------------------------------------------------------------ prediction

    def __call__(self, X: Tensor) -> MultivariateNormal:
        """The prior in train mode, the posterior in eval mode, both in the transformed space."""
        if self.training:
            return self.forward(X)
        predictive = self._predictive()
        return self._joint(X, predictive.feature_map, predictive.weights)

    def forward(self, X: Tensor) -> MultivariateNormal:
        r"""The distribution before own data: the prior, given received summaries.

        Args:
            X: A `batch_shape x n x d` tensor; transformed here in train mode only.

        Returns:
            A `batch_shape [x m]` batch of joint normals over `n` points.
        """
        if self.training:
            X = self.transform_inputs(X)
        feature_map = self._map_with_gradients()
        total = self._received() or Summary.zero(feature_map)
        return self._joint(X, feature_map, WeightPosterior.from_total(total))

    def posterior(  # type: ignore[override]  # the mixin's signature is narrower than Model's
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
        **kwargs: Any,
    ) -> Posterior:
        r"""Joint posterior at points; differentiable in `X`.

        Args:
            X: A `batch_shape x q x d` tensor of points.
            output_indices: Which outputs to predict; default all.
            observation_noise: Whether to add the noise variance (its mean over the training data
                where it is known per observation), or the variance itself, `batch_shape x q x m`,
                in the transformed space.
            posterior_transform: An optional transform of the posterior.

        Returns:
            A posterior over `broadcast(batch_shape, model.batch_shape) x q x m`.
        """
        if output_indices is not None:
            subset = self.subset_output(output_indices)
            return subset.posterior(
                X, observation_noise=observation_noise, posterior_transform=posterior_transform
            )
        self.eval()
        X = self.transform_inputs(X.double())
        distribution = self(X)
        if observation_noise is not False:
            distribution = self._with_noise(distribution, X, observation_noise)
        if self._num_outputs > 1:
            distribution = MultitaskMultivariateNormal.from_batch_mvn(distribution, task_dim=-1)
        posterior: Posterior = GPyTorchPosterior(distribution=distribution)
        if hasattr(self, "outcome_transform"):
            posterior = self.outcome_transform.untransform_posterior(posterior, X=X)
        return posterior if posterior_transform is None else posterior_transform(posterior, X=X)

    def _joint(
        self, X: Tensor, feature_map: FeatureMap, weights: WeightPosterior
    ) -> MultivariateNormal:
        """Joint normal of the latent function, batch `batch_shape [x m]`, at transformed points."""
        Phi = feature_map(X)  # batch_shape x q x M
        location, U = weights.predict(Phi.unsqueeze(-3))  # cov = U U' + residual
        location = (location + self._mean).squeeze(-1)
        q, M = U.shape[-2:]
        if feature_map.has_residual:
            residual = feature_map.residual(X, Phi1=Phi).unsqueeze(-3)
            covariance = to_linear_operator(U @ U.mT + residual)
        elif q <= M:
            covariance = to_linear_operator(U @ U.mT)
        else:
            covariance = RootLinearOperator(U)  # samples without a q x q factorisation
        batch_shape = torch.broadcast_shapes(location.shape[:-1], covariance.shape[:-2])
        location = location.expand(*batch_shape, q)
        covariance = covariance.expand(*batch_shape, q, q)
        if self._num_outputs == 1:
            location, covariance = location.squeeze(-2), covariance.squeeze(-3)
        return MultivariateNormal(location, covariance)

    def _with_noise(
        self, distribution: MultivariateNormal, X: Tensor, noise: bool | Tensor
    ) -> MultivariateNormal:
        if isinstance(noise, Tensor):
            if noise.shape[-1] != self._num_outputs or noise.dim() < 2:
                raise BotorchTensorDimensionError(
                    f"observation_noise must be `batch_shape x q x {self._num_outputs}`, got "
                    f"shape {tuple(noise.shape)}."
                )
            variance = self._to_aug(noise.double())
        else:
            variance = self.likelihood.noise.mean(dim=-1, keepdim=True)
        variance = variance.expand(*distribution.mean.shape)
        covariance = distribution.lazy_covariance_matrix.add_diagonal(variance)
        return MultivariateNormal(distribution.mean, covariance)

    # ------------------------------------------------------------------ new observations

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> Self:
        r"""The model given further observations, by one rank-`n'` update of its statistic.

        Args:
            X: A `batch_shape x n' x d` tensor of points.
            Y: A `batch_shape' x n' x m` tensor of observations; it may have further leading
                dimensions (fantasies), which share the factorisation.
            noise: Known noise variances of the new observations, of the shape of `Y` or
                broadcastable to it, in the transformed space. Needed where `train_Yvar` was
                given; ignored where the noise is inferred, as in BoTorch.

        Returns:
            A model of batch shape `broadcast(batch_shape, batch_shape', self.batch_shape)`.
        """
        self.eval()
        if hasattr(self, "outcome_transform"):
            # The noise is in the transformed space already.
            Y, _ = self.outcome_transform(Y, None, X=self.transform_inputs(X))
        return self._conditioned(X, Y, noise)

    def get_fantasy_model(
        self, inputs: Tensor, targets: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> Self:
        """GPyTorch's form of `condition_on_observations`, with targets `… x [m] x n'`."""
        single = self._num_outputs == 1
        Y = targets.unsqueeze(-1) if single else targets.mT
        if noise is not None:
            noise = noise.unsqueeze(-1) if single else noise.mT
        return self._conditioned(inputs, Y, noise)

    def _conditioned(self, X: Tensor, Y: Tensor, noise: Tensor | None) -> Self:
        X, Y = as_double(X, "X"), as_double(Y, "Y")
        if Y.shape[-1] != self._num_outputs or Y.shape[-2] != X.shape[-2]:
            raise BotorchTensorDimensionError(
                f"Y must be `… x {X.shape[-2]} x {self._num_outputs}` to go with X of shape "
                f"{tuple(X.shape)}, got shape {tuple(Y.shape)}."
            )
        fixed = isinstance(self.likelihood, FixedNoiseGaussianLikelihood)
        if fixed and noise is None:
            raise InputDataError(
                "This model has known noise variances (train_Yvar): pass `noise=` with the "
                "variances of the new observations, of the shape of Y."
            )
        self.eval()
        cache = self._predictive()
        inner_X = self.transform_inputs(X).unsqueeze(-3)
        inner_Y = Y.mT.unsqueeze(-1)  # … x m x n' x 1
        variance = self._noise
        if fixed and noise is not None:
            variance = noise.double().expand(*noise.shape[:-2], *Y.shape[-2:]).mT.unsqueeze(-1)
        block = cache.block
        if block is not None:
            old = block.X.shape[-2]
            block = block.extend(inner_X, inner_Y, noise_var=variance, mean=self._mean)
            half_features = block.half_features[..., old:, :]
            half_residuals = block.half_residuals[..., old:, :]
        else:
            check_finite(inner_X, "X")
            check_finite(inner_Y, "Y")
            noise_std = variance.sqrt()
            half_features = cache.feature_map(inner_X) / noise_std
            half_residuals = (inner_Y - self._mean) / noise_std
        weights = cache.weights.updated(half_features, half_residuals)
        batch_shape = torch.broadcast_shapes(X.shape[:-2], Y.shape[:-2], self.batch_shape)
        model = self._copy()
        model._train_X = _concatenate(self._train_X, X, batch_shape)
        model._train_Y = _concatenate(self._train_Y, Y, batch_shape)
        if fixed and noise is not None:
            new_noise = noise.double().expand(*noise.shape[:-2], *Y.shape[-2:])
            old_noise = self._from_aug(self.likelihood.noise)
            both = _concatenate(old_noise, new_noise, batch_shape)
            model.likelihood = FixedNoiseGaussianLikelihood(self._to_aug(both))
        model._raw = None
        model._cache = _Cache(model._hyperparameters(), cache.feature_map, block, weights)
        return model

    def _copy(self) -> Self:
        """A copy with hyperparameters of its own that shares data, map and transforms."""
        shared = [
            self._train_X,
            self._train_Y,
            self._base_map,
            self._summaries,
            self._cache,
            self._raw,
            getattr(self, "input_transform", None),
            getattr(self, "outcome_transform", None),
        ]
        return copy.deepcopy(self, {id(part): part for part in shared if part is not None})

    def subset_output(self, idcs: list[int]) -> Self:
        """A copy of the model with only some of its outputs."""
        m = self._num_outputs
        idcs = [i + m if i < 0 else i for i in idcs]
        if not idcs or min(idcs) < 0 or max(idcs) >= m:
            raise IndexError(f"Output indices must lie in 0..{m - 1}, got {idcs}.")
        model = self._copy()
        if m == 1:
            return model
        model._train_Y = self._train_Y[..., idcs]
        model._num_outputs = len(idcs)
        model._summaries = tuple(
            Summary(s.gram[..., idcs, :, :], s.moment[..., idcs, :, :], s.basis)
            if len(idcs) > 1
            else Summary(s.gram[..., idcs[0], :, :], s.moment[..., idcs[0], :, :], s.basis)
            for s in self._summaries
        )
        noise = self._from_aug(self.likelihood.noise)[..., idcs]
        aug = model._aug_batch_shape
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            model.likelihood = FixedNoiseGaussianLikelihood(model._to_aug(noise))
        else:
            model.likelihood = _noise_likelihood(aug, model._to_aug(noise))
        constant = self.mean_module.constant.detach()[..., idcs]
        model.mean_module = _constant_mean(aug, constant.reshape(aug))
        if hasattr(self, "outcome_transform"):
            model.outcome_transform = self.outcome_transform.subset_output(idcs=idcs)
        model._cache = model._raw = None
        model.double()
        return model.train(self.training)

    # ------------------------------------------------------------------ fitting

    def custom_fit(
        self,
        *,
        mll: MarginalLogLikelihood,
        closure: Callable[[], tuple[Tensor, Sequence[Tensor | None]]] | None = None,
        optimizer: Callable[..., Any] = fit_gpytorch_mll_scipy,
        closure_kwargs: dict[str, Any] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MarginalLogLikelihood:
        """What `fit_gpytorch_mll` calls: maximise the evidence from sufficient statistics.

        The objective is that of `ExactMarginalLogLikelihood`, evidence and priors divided by
        `n`, without the `n x n` matrix.
        """
        mll.train()
        parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad}
        if self._train_X.shape[-2] == 0 or not parameters:
            return mll.eval()

        def negative_objective() -> tuple[Tensor, Sequence[Tensor | None]]:
            for parameter in parameters.values():
                parameter.grad = None
            try:
                loss = -self.log_marginal_likelihood().sum()
            except NumericalError as error:
                raise NotPSDError(str(error)) from error  # what line searches recover from
            loss.backward()
            return loss, [parameter.grad for parameter in parameters.values()]

        optimizer(
            mll,
            parameters=parameters,
            closure=negative_objective if closure is None else closure,
            closure_kwargs=closure_kwargs,
            **(optimizer_kwargs or {}),
        )
        return mll.eval()

    def log_marginal_likelihood(self) -> Tensor:
        """Log evidence of own data given received summaries, plus log priors, divided by `n`.

        Returns:
            A `batch_shape [x m]` tensor, differentiable in the hyperparameters.
        """
        feature_map = self._map_with_gradients()
        residual = feature_map.has_residual
        own = self._own_block(feature_map).summary if residual else self._own_summary(feature_map)
        received = self._received()
        if received is None:
            evidence = log_evidence(own)
        else:
            silent = replace(received, num_data=0, square=torch.zeros(()), log_det=torch.zeros(()))
            evidence = log_evidence(own + silent, given=received)
        evidence = evidence.expand(*self.batch_shape, self._num_outputs)
        if self._num_outputs == 1:
            evidence = evidence.squeeze(-1)
        for _, module, prior, parameter, _ in self.named_priors():
            term = prior.log_prob(parameter(module))
            evidence = evidence + term.reshape(*term.shape[: evidence.dim()], -1).sum(dim=-1)
        return evidence / max(self._train_X.shape[-2], 1)

    def _map_with_gradients(self) -> FeatureMap:
        if self._summaries:
            return self._base_map
        if not (torch.is_grad_enabled() and self.training):
            return self.feature_map
        return self._base_map.with_hyperparameters(self.raw_lengthscale, self.raw_outputscale)


@dataclass(frozen=True, eq=False)
class _Cache:
    """The posterior of the weights, and the hyperparameters it belongs to."""

    key: Tensor
    feature_map: FeatureMap
    block: LocalBlock | None
    weights: WeightPosterior


@dataclass(frozen=True, eq=False)
class _RawStatistics:
    """Own data under unit noise, from which the summary for every noise and mean follows."""

    centred: Summary  # of y minus its own average, so that squares do not cancel
    ones: Tensor  # … x M x 1, Phi' 1
    average: Tensor  # … x m x 1 x 1

    @classmethod
    def from_data(cls, feature_map: FeatureMap, X: Tensor, Y: Tensor) -> _RawStatistics:
        m, n = Y.shape[-3], Y.shape[-2]
        average = Y.sum(dim=-2, keepdim=True) / max(n, 1)
        columns = torch.cat([Y - average, torch.ones_like(Y[..., :1, :, :])], dim=-3)
        both = summarize(feature_map, X, columns, noise_var=1.0)
        assert both.square is not None
        centred = replace(both, moment=both.moment[..., :m, :, :], square=both.square[..., :m])
        return cls(centred, both.moment[..., m:, :, :], average)

    def summary(self, *, mean: Tensor, noise_var: Tensor) -> Summary:
        shift = mean - self.average
        n, square = self.centred.num_data, self.centred.square
        assert n is not None
        assert square is not None
        shifted = replace(
            self.centred,
            moment=self.centred.moment - shift * self.ones,
            square=square + n * shift[..., 0, 0].square(),
        )
        return shifted.scaled(1 / noise_var[..., 0, 0])


def _check_shapes(X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
    if X.dim() < 2 or Y.dim() != X.dim() or Y.shape[:-1] != X.shape[:-1] or Y.shape[-1] < 1:
        raise BotorchTensorDimensionError(
            "Expected train_X `batch_shape x n x d` and train_Y `batch_shape x n x m` with an "
            f"explicit output dimension, got shapes {tuple(X.shape)} and {tuple(Y.shape)}."
        )
    if Yvar is not None and Yvar.shape != Y.shape:
        raise BotorchTensorDimensionError(
            f"train_Yvar must have the shape {tuple(Y.shape)} of train_Y, got {tuple(Yvar.shape)}."
        )


def _noise_likelihood(batch_shape: Size, noise_var: Tensor) -> GaussianLikelihood:
    """Inferred noise with BoTorch's prior; the bound makes room for a smaller given value."""
    bound = noise_var.detach().min().clamp_max(MIN_NOISE)
    likelihood = GaussianLikelihood(
        noise_prior=LogNormalPrior(loc=-4.0, scale=1.0),  # [Hvarfner2024]_
        noise_constraint=GreaterThan(bound, transform=None),
        batch_shape=batch_shape,
    ).double()
    shape = likelihood.noise_covar.raw_noise.shape
    likelihood.noise_covar.raw_noise.data = noise_var.detach().expand(shape).clone()
    return likelihood


def _constant_mean(batch_shape: Size, constant: Tensor) -> ConstantMean:
    # Made double before it is set: GPyTorch's default would round the value to float32.
    mean = ConstantMean(batch_shape=batch_shape).double()
    mean.raw_constant.data = constant.detach().expand(batch_shape).clone()
    return mean


def _lengthscale(model: BasisGP) -> Tensor:
    # Leading ones: GPyTorch adds log priors to a batch of evidences by their leading dimensions.
    return model.raw_lengthscale.reshape(*[1] * len(model._aug_batch_shape), -1)


def _outputscale(model: BasisGP) -> Tensor:
    return model.raw_outputscale.reshape(*[1] * len(model._aug_batch_shape), -1)


def _concatenate(old: Tensor, new: Tensor, batch_shape: Size) -> Tensor:
    parts = [part.expand(*batch_shape, *part.shape[-2:]) for part in (old, new)]
    return torch.cat(parts, dim=-2)
