r"""`BasisGP`: a Gaussian process over a shared basis, a drop-in BoTorch model.

One class is the random-feature surrogate of FTS, the quadrature surrogate of private GP bandits,
and the global model of dPITC, depending on its feature map and on the summaries it received.

References:
    * [Hvarfner2024]_ C. Hvarfner, E. O. Hellsten, L. Nardi. Vanilla Bayesian optimization performs
      great in high dimensions. ICML 2024.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import BotorchWarning
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import ChainedInputTransform, InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from botorch.utils.datasets import SupervisedDataset
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from gpytorch.models import GP
from gpytorch.priors import LogNormalPrior
from linear_operator import to_linear_operator
from linear_operator.operators import BlockDiagLinearOperator, RootLinearOperator
from linear_operator.utils.errors import NotPSDError
from torch import Size, Tensor
from torch.nn import Parameter

from botorch_fed.errors import NumericalError
from botorch_fed.models.features import FeatureMap
from botorch_fed.models.numerics import Float64Module, as_double, check_finite, keep_double
from botorch_fed.models.summary import (
    LocalBlock,
    Summary,
    WeightPosterior,
    check_basis,
    checked_noise,
    feature_sums,
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
    summaries the map is shared and fixed, and so is the mean on which they were centred: only the
    noise of own data moves.

    Args:
        train_X: A `batch_shape x n x d` tensor of points (`n = 0` gives the prior).
        train_Y: A `batch_shape x n x m` tensor of observations.
        train_Yvar: A `batch_shape x n x m` tensor of known noise variances, if they are known.
        input_transform: Applied to all points before the map.
        outcome_transform: Applied to `train_Y`; predictions are transformed back. None by
            default: agents that add statistics must agree on one public scale.
        feature_map: The basis.
        noise_var: Initial noise *variance*, fixed until the model is fitted; default the mode of
            the prior, LogNormal(-4, 1). Not together with `train_Yvar`.
        summaries: Summaries of other agents over the same basis, each with batch shape
            `batch_shape` (`batch_shape x m` for several outputs), centred on a common mean.
        mean: Initial constant mean :math:`\mu`; with summaries, the one they were centred on.

    Example:
        >>> phi = RandomFourierFeatures.draw(kernel, 100, generator=generator(0, "features"))
        >>> model = BasisGP(train_X, train_Y, feature_map=phi)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> candidate, _ = optimize_acqf(LogExpectedImprovement(model, best_f), bounds, …)
    """

    likelihood: GaussianLikelihood | FixedNoiseGaussianLikelihood
    raw_lengthscale: Parameter
    raw_outputscale: Parameter
    _data: _OwnData
    # Inherited from GPyTorch, which is untyped.
    register_constraint: Callable[..., None]
    register_prior: Callable[..., None]
    named_priors: Callable[..., Any]
    _cache: _Cache | None = None
    _raw: _RawStatistics | None = None
    _given_noise: Tensor | None = None  # variances of the last observations, `… x n' x m`

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        input_transform: InputTransform | None = None,  # Ax does not see keyword-only arguments
        outcome_transform: OutcomeTransform | None = None,
        *,
        feature_map: FeatureMap,
        noise_var: float | Tensor | None = None,
        summaries: Sequence[Summary] = (),
        mean: float = 0.0,
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
        self._num_outputs = train_Y.shape[-1]
        self._data = _OwnData(((train_X, train_Y),), train_X.shape[:-2])
        self._summaries = tuple(self._checked_summary(s, feature_map) for s in summaries)
        self._received: Summary | None = None
        if self._summaries:
            self._received = sum(self._summaries[1:], start=self._summaries[0])
        if summaries:
            learns = outcome_transform if n else None
            check_public_transforms(input_transform, learns, "received summaries")
        if feature_map.bounded and learns_coefficients(input_transform):
            raise UnsupportedError(
                f"{type(input_transform).__name__} learns the box from the data, and this map "
                "stands for its kernel in its own box only: points between the data and the "
                "bounds of the search space would be refused later. Give it those bounds, "
                "Normalize(d, bounds=bounds)."
            )
        if input_transform is not None:
            input_transform = input_transform.to(train_X)
            input_transform.train()
            if n:
                with torch.no_grad():
                    input_transform(train_X)  # learns its coefficients, where it has any
        if outcome_transform is not None:
            if n:
                outcome_transform.train()
                with torch.no_grad():
                    X = train_X
                    if input_transform is not None:
                        X = input_transform.preprocess_transform(train_X)
                    train_Y, train_Yvar = outcome_transform(train_Y, train_Yvar, X=X)
                check_finite(train_Y, "train_Y after the outcome transform")
                self._data = _OwnData(((train_X, train_Y),), train_X.shape[:-2])
            elif not bool(getattr(outcome_transform, "_is_trained", True)):
                raise InputDataError(
                    f"{type(outcome_transform).__name__} cannot learn from no observations: train "
                    "it on public data first, or leave it out."
                )
        self._base_map = feature_map
        self._register_noise(noise_var, train_Yvar)
        self.mean_module = constant_mean(
            self._aug_batch_shape, torch.tensor(float(mean), dtype=torch.float64)
        )
        if self._summaries:
            # Moments are centred on this mean: another one would contradict the received data.
            self.mean_module.raw_constant.requires_grad_(False)
        else:
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
        r"""The model of a total, without local data: dPITC's global model.

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
            self.likelihood = _KnownNoise(self._to_aug(train_Yvar))
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
        # Untransformed: L-BFGS-B keeps the bounds, and the raw value is the value. Where a map
        # serves one length scale only, the bounds meet.
        lower = torch.minimum(lower, upper)
        upper = upper.clamp_max(MAX_LENGTHSCALE)
        self.raw_lengthscale.requires_grad_(bool((lower < upper).any()))
        box = Interval(lower, torch.maximum(upper, 2 * lower), transform=None)
        box.lower_bound, box.upper_bound = lower, upper  # GPyTorch rounds them to float32
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
        return self._data.batch_shape

    @property
    def _train_X(self) -> Tensor:  # noqa: N802
        return self._data.X

    @property
    def _train_Y(self) -> Tensor:  # noqa: N802
        return self._data.Y

    @property
    def _aug_batch_shape(self) -> Size:
        # GPyTorch's layout: several outputs are a last batch dimension.
        outputs = [self._num_outputs] if self._num_outputs > 1 else []
        return torch.Size([*self.batch_shape, *outputs])

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """Training points, transformed in eval mode as BoTorch has it; `NoOwnData` without any.

        In GPyTorch's layout, `batch_shape x [m] x n x d`: once for every output.
        """
        if self._data.num_data == 0:
            raise NoOwnData
        X = self._train_X if self.training else self._transformed_points()
        if self._num_outputs > 1:
            X = X.unsqueeze(-3).expand(*X.shape[:-2], self._num_outputs, *X.shape[-2:])
        return (X,)

    @property
    def _original_train_inputs(self) -> Tensor:  # type: ignore[override]
        """BoTorch's name for the untransformed points."""
        return self._train_X

    @property
    def _has_transformed_inputs(self) -> bool:  # type: ignore[override]
        """Whether `train_inputs` are transformed now."""
        return not self.training and hasattr(self, "input_transform")

    def __getattr__(self, name: str) -> Any:
        if name == "train_inputs":  # PyTorch would replace the property's words
            raise NoOwnData(
                "This model has no observations of its own, only what it received, and was asked "
                "for them: build it with data, or use a function that needs none."
            )
        return super().__getattr__(name)

    @property
    def covar_module(self) -> Kernel:
        """The prior covariance as a kernel with `lengthscale`, `1 x d`, as trust regions ask."""
        return _MapKernel(self.feature_map)

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

    def _common_points(self, X: Tensor) -> Tensor:
        """Points once, `… x n x d`, from GPyTorch's layout, `… x [m] x n x d`."""
        m = self._num_outputs
        if m == 1 or X.dim() == 2:
            return X
        if X.shape[-3] not in (1, m):
            raise BotorchTensorDimensionError(
                f"Expected points once for each of {m} outputs, `… x {m} x n x d`, or for all of "
                f"them, `… x 1 x n x d`, got shape {tuple(X.shape)}: use `posterior`, or unsqueeze "
                "dimension -3."
            )
        first = X[..., :1, :, :]
        if X.shape[-3] > 1 and not torch.equal(first.expand_as(X), X):
            raise UnsupportedError(
                "The outputs of this model share their points, got different ones: put one model "
                "per output into a ModelListGP."
            )
        return first.squeeze(-3)

    def _to_aug(self, Y: Tensor) -> Tensor:
        return Y.squeeze(-1) if self._num_outputs == 1 else Y.mT

    def _from_aug(self, values: Tensor) -> Tensor:
        return values.unsqueeze(-1) if self._num_outputs == 1 else values.mT

    def extra_repr(self) -> str:
        return (
            f"num_data={self._data.num_data}, num_outputs={self._num_outputs}, "
            f"batch_shape={tuple(self.batch_shape)}, summaries={len(self._summaries)}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        moved = self._data.map(keep_double(fn, type(self).__name__))
        if moved.parts[0][0].device != self._data.parts[0][0].device:
            self._data = moved
            self._cache = self._raw = None
            if self._given_noise is not None:
                self._given_noise = self._given_noise.to(moved.parts[0][0].device)
        return self

    def set_train_data(
        self, inputs: Tensor | None = None, targets: Tensor | None = None, strict: bool = True
    ) -> None:
        """Replace own data, in GPyTorch's layout.

        Args:
            inputs: A `batch_shape x [m] x n x d` tensor of points, not transformed.
            targets: A `batch_shape x [m] x n` tensor in the transformed space.
            strict: Whether the shapes must stay.
        """
        if isinstance(inputs, (tuple, list)):
            (inputs,) = inputs
        X, Y = self._train_X, self._train_Y
        if inputs is not None:
            X = as_double(inputs, "inputs")
            if X.dim() > len(self.batch_shape) + 2:
                X = self._common_points(X)
        if targets is not None:
            Y = self._from_aug(as_double(targets, "targets"))
        _check_shapes(X, Y, None)
        if strict and (X.shape, Y.shape) != (self._train_X.shape, self._train_Y.shape):
            raise RuntimeError(
                f"Cannot change the shape of the training data from {tuple(self._train_Y.shape)} "
                f"to {tuple(Y.shape)}: pass strict=False."
            )
        if self._noise.shape[-2] not in (1, X.shape[-2]):
            raise BotorchTensorDimensionError(
                f"This model has noise variances of {self._noise.shape[-2]} observations, not of "
                f"{X.shape[-2]}: build a new model with train_Yvar."
            )
        check_finite(X, "inputs")
        check_finite(Y, "targets")
        self._data = _OwnData(((X, Y),), X.shape[:-2])
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
        original = self._original_targets() if keep_transforms else None
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._cache = self._raw = None
        if keep_transforms and hasattr(self, "input_transform"):
            self.input_transform.eval()  # not learnt anew; the model stays in its mode
        if original is None:
            return result
        self.outcome_transform.eval()
        with torch.no_grad():
            Y, Yvar = self.outcome_transform(*original, X=self._transformed_points())
        self._data = _OwnData(((self._train_X, Y),), self.batch_shape)
        if Yvar is not None:
            self.likelihood = _KnownNoise(self._to_aug(Yvar))
        return result

    def _original_targets(self) -> tuple[Tensor, Tensor | None] | None:
        """Own targets and known noise on the original scale; None where that is not needed."""
        if not hasattr(self, "outcome_transform") or self._data.num_data == 0:
            return None
        has_known_noise = isinstance(self.likelihood, FixedNoiseGaussianLikelihood)
        Yvar = self._from_aug(self.likelihood.noise) if has_known_noise else None
        try:
            with torch.no_grad():
                X = self._transformed_points()
                return self.outcome_transform.untransform(Y=self._train_Y, Yvar=Yvar, X=X)
        except NotImplementedError:
            warnings.warn(
                "Outcome transform does not support untransforming: own targets stay as "
                "they were transformed (keep_transforms=False).",
                BotorchWarning,
                stacklevel=3,
            )
            return None

    # ------------------------------------------------------------------ statistics

    # Inside, outputs are always a batch dimension, `batch_shape x m`, also for m = 1.

    @property
    def _noise(self) -> Tensor:
        """Noise variance, `batch_shape x m x n x 1` or `batch_shape x m x 1 x 1`."""
        noise = self._likelihood_noise
        if self._given_noise is None:
            return noise
        given = self._given_noise.mT.unsqueeze(-1)
        batch_shape = torch.broadcast_shapes(noise.shape[:-2], given.shape[:-2])
        first = self._data.num_data - given.shape[-2]
        parts = [noise.expand(*batch_shape, first, 1), given.expand(*batch_shape, -1, 1)]
        return torch.cat(parts, dim=-2)

    @property
    def _likelihood_noise(self) -> Tensor:
        noise = self.likelihood.noise
        noise = noise.unsqueeze(-2) if self._num_outputs == 1 else noise
        return noise.unsqueeze(-1)

    @property
    def _mean(self) -> Tensor:
        """Constant mean, `batch_shape x m x 1 x 1`."""
        constant = self.mean_module.constant
        constant = constant.unsqueeze(-1) if self._num_outputs == 1 else constant
        return constant[..., None, None]

    def _checked_summary(self, summary: Summary, feature_map: FeatureMap) -> Summary:
        """A received summary, expanded to batch shape `batch_shape x m`."""
        if not isinstance(summary, Summary):
            raise UnsupportedError(
                f"summaries must be a sequence of Summary, got a {type(summary).__name__}: "
                "Summary.unpack(vector, basis=feature_map.fingerprint)."
            )
        check_basis(summary, feature_map.fingerprint)
        M, aug = feature_map.num_features, self._aug_batch_shape
        if summary.num_features != M:
            raise BotorchTensorDimensionError(
                f"A received summary has {summary.num_features} features, the map has {M}: it was "
                "cut or joined on the way. Ask its sender for it again."
            )
        try:
            gram, moment = summary.gram.expand(*aug, M, M), summary.moment.expand(*aug, M, 1)
        except RuntimeError as error:
            raise BotorchTensorDimensionError(
                f"A received summary has batch shape {tuple(summary.batch_shape)}, the model has "
                f"{tuple(aug)} (batch_shape x m, without m = 1)."
            ) from error
        check_finite(gram, "the gram of a received summary")
        check_finite(moment, "the moment of a received summary")
        if float((gram - gram.mT).abs().max()) > 1e-8 * float(gram.abs().max()):
            raise InputDataError(
                "The gram of a received summary is not symmetric, so it is no sum of squares: "
                "rebuild it from its packed vector by Summary.unpack."
            )
        if self._num_outputs == 1:
            gram, moment = gram.unsqueeze(-3), moment.unsqueeze(-3)
        return Summary(gram, moment, summary.basis)

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
            not self._data.requires_grad
            and isinstance(self.likelihood, GaussianLikelihood)
            and self._given_noise is None
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
        key = self._transform_state()
        raw = self._raw
        if (
            raw is None
            or raw.centred.basis != feature_map.fingerprint
            or not torch.equal(raw.key, key)
        ):
            points = self._transformed_points()
            raw = _RawStatistics.from_data(feature_map, points, self._train_Y, key=key)
            self._raw = raw
        return raw.summary(mean=self._mean, noise_var=self._noise)

    def _transform_state(self) -> Tensor:
        """All numbers that the input transform depends on."""
        if not hasattr(self, "input_transform"):
            return torch.empty(0, dtype=torch.float64)
        transform = self.input_transform
        values = [*transform.parameters(), *transform.buffers()]
        return torch.cat([torch.empty(0), *(v.detach().reshape(-1) for v in values)]).double()

    def _predictive(self) -> _Cache:
        """Posterior of the weights under the current hyperparameters, computed once for them."""
        key = self._hyperparameters()
        if self._cache is not None and torch.equal(self._cache.key, key):
            return self._cache
        differentiable = self._data.requires_grad and torch.is_grad_enabled()
        with torch.set_grad_enabled(differentiable):
            feature_map = self.feature_map
            block = self._own_block(feature_map) if feature_map.has_residual else None
            own = self._own_summary(feature_map) if block is None else block.summary
            total = own if self._received is None else own + self._received
            weights = WeightPosterior.from_total(total)
        cache = _Cache(key, feature_map, block, weights)
        if not self._data.requires_grad:  # a graph serves one backward pass only
            self._cache = cache
        return cache

    def _hyperparameters(self) -> Tensor:
        values = [p.detach().reshape(-1) for p in self.parameters()]
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            values.append(self.likelihood.noise.detach().reshape(-1))
        return torch.cat([*values, self._transform_state()])

    # ------------------------------------------------------------------ prediction

    def __call__(self, X: Tensor) -> MultivariateNormal:
        """The prior in train mode, the posterior in eval mode, both in the transformed space."""
        if self.training:
            return self.forward(X)
        predictive = self._predictive()
        X = self._common_points(X)
        return self._joint(X, predictive.feature_map, predictive.weights)

    def forward(self, X: Tensor) -> MultivariateNormal:
        r"""`prior`, for GPyTorch's objectives and BoTorch's `loo_cv`.

        `loo_cv` would condition a point on the rest of its own block, which this model's
        predictions over a map with a residual do not: it is refused.
        """
        if not self.training and self.feature_map.has_residual:
            raise UnsupportedError(
                "loo_cv scores a model that predicts a point from the others of its block, this "
                "one predicts through the inducing points only: use batch_cross_validation, or "
                "PartiallyIndependentGP."
            )
        return self.prior(X)

    def prior(self, X: Tensor) -> MultivariateNormal:
        r"""The distribution before own data, given received summaries.

        Args:
            X: A `batch_shape x [m] x n x d` tensor; transformed here in train mode only.

        Returns:
            A `batch_shape [x m]` batch of joint normals over `n` points.
        """
        X = self._common_points(X)
        if self.training:
            X = self.transform_inputs(X)
        feature_map = self._map_with_gradients()
        total = self._received or Summary.zero(feature_map)
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
        distribution = self(X.unsqueeze(-3) if self._num_outputs > 1 else X)
        if observation_noise is not False:
            distribution = self._with_noise(distribution, observation_noise)
        if self._num_outputs > 1:
            # Output by output, as BoTorch's models have it: entropy searches read the blocks.
            blocks = BlockDiagLinearOperator(distribution.lazy_covariance_matrix)
            distribution = MultitaskMultivariateNormal(
                distribution.mean.mT, blocks, interleaved=False
            )
        posterior: Posterior = GPyTorchPosterior(distribution=distribution)
        if hasattr(self, "outcome_transform"):
            posterior = self.outcome_transform.untransform_posterior(posterior, X=X)
        return posterior if posterior_transform is None else posterior_transform(posterior, X=X)

    def _joint(
        self, X: Tensor, feature_map: FeatureMap, weights: WeightPosterior
    ) -> MultivariateNormal:
        """Joint normal of the latent function, batch `batch_shape [x m]`, at transformed points."""
        Phi = feature_map(X)  # batch_shape x q x M
        feature_map.check_domain(X)
        location, U = weights.predict(Phi.unsqueeze(-3))  # cov = U U' + residual
        # The posterior's hyperparameters are constants, those of its weights and its mean.
        mean = self._mean if self.training else self._mean.detach()
        location = (location + mean).squeeze(-1)
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
        self, distribution: MultivariateNormal, noise: bool | Tensor
    ) -> MultivariateNormal:
        if isinstance(noise, Tensor):
            if noise.shape[-1] != self._num_outputs or noise.dim() < 2:
                raise BotorchTensorDimensionError(
                    f"observation_noise must be `batch_shape x q x {self._num_outputs}`, got "
                    f"shape {tuple(noise.shape)}."
                )
            if not bool((noise >= 0).all()):
                raise InputDataError("observation_noise is a variance: it must not be negative.")
            variance = self._to_aug(noise.double())
        else:
            if self.likelihood.noise.shape[-1] == 0:
                raise InputDataError(
                    "This model has no observations whose noise could be averaged: pass the "
                    "variance itself as `observation_noise`."
                )
            variance = self.likelihood.noise.detach().mean(dim=-1, keepdim=True)
        try:
            variance = variance.expand(*distribution.mean.shape)
        except RuntimeError as error:
            raise BotorchTensorDimensionError(
                f"observation_noise of shape {tuple(variance.shape)} (outputs before points) does "
                f"not fit predictions of shape {tuple(distribution.mean.shape)}."
            ) from error
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
                given; default the inferred noise where it was not.

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
        """GPyTorch's form of `condition_on_observations`, all of it in the transformed space.

        Args:
            inputs: A `… x n' x d` tensor of transformed points.
            targets: A `… x [m] x n'` tensor of transformed observations.
            noise: Their noise variances, of the shape of `targets`.
        """
        if hasattr(self, "input_transform"):
            inputs = self._untransformed(inputs)
        single = self._num_outputs == 1
        Y = targets.unsqueeze(-1) if single else targets.mT
        if noise is not None:
            noise = noise.unsqueeze(-1) if single else noise.mT
        return self._conditioned(inputs, Y, noise)

    def _untransformed(self, X: Tensor) -> Tensor:
        """Points as they are kept, from those that the map sees."""
        try:
            points: Tensor = self.input_transform.untransform(X)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{type(self.input_transform).__name__} cannot be undone, and this model keeps its "
                "points as they were given: use condition_on_observations with those."
            ) from error
        return points

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
        check_finite(X, "X")
        check_finite(Y, "Y")
        # Observations are training data: transformed by the rule for those.
        inner_X = X
        if hasattr(self, "input_transform"):
            inner_X = self.input_transform.preprocess_transform(X)
        inner_X = inner_X.unsqueeze(-3)
        inner_Y = Y.mT.unsqueeze(-1)  # … x m x n' x 1
        # Hyperparameters are constants here, as in the posterior that is updated.
        variance, mean = self._likelihood_noise.detach(), self._mean.detach()
        if noise is not None:
            noise = as_double(noise, "noise").expand(*noise.shape[:-2], *Y.shape[-2:])
            variance = checked_noise(noise.mT.unsqueeze(-1), Y.shape[-2])
        block = cache.block
        if block is not None:
            old = block.X.shape[-2]
            block = block.extend(inner_X, inner_Y, noise_var=variance, mean=mean)
            half_features = block.half_features[..., old:, :]
            half_residuals = block.half_residuals[..., old:, :]
        else:
            cache.feature_map.check_domain(inner_X)
            noise_std = variance.sqrt()
            half_features = cache.feature_map(inner_X) / noise_std
            half_residuals = (inner_Y - mean) / noise_std
        weights = cache.weights.updated(half_features, half_residuals)
        batch_shape = torch.broadcast_shapes(X.shape[:-2], Y.shape[:-2], self.batch_shape)
        model = self._copy()
        model._data = self._data.extended(X, Y, batch_shape)
        if fixed and noise is not None:
            old_noise = self._from_aug(self.likelihood.noise)
            both = _concatenate([old_noise, noise], batch_shape)
            model.likelihood = _KnownNoise(self._to_aug(both))
        elif noise is not None or self._given_noise is not None:
            new = variance.squeeze(-1).mT.expand(*variance.shape[:-3], *Y.shape[-2:])
            given = new[..., :0, :] if self._given_noise is None else self._given_noise
            model._given_noise = _concatenate([given, new], batch_shape)
        model._raw = None
        model._cache = _Cache(model._hyperparameters(), cache.feature_map, block, weights)
        return model

    def _copy(self) -> Self:
        """A copy with hyperparameters of its own that shares data, map and transforms."""
        shared = [
            self._data,
            self._base_map,
            self._summaries,
            self._received,
            self._given_noise,
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
        single = len(idcs) == 1

        def pick(values: Tensor, dim: int) -> Tensor:
            """Values of the chosen outputs; one output has no dimension of its own."""
            index = torch.tensor(idcs, device=values.device)
            chosen = values.detach().index_select(dim, index)
            return chosen.squeeze(dim).clone() if single else chosen

        parts = tuple((X, Y[..., idcs]) for X, Y in self._data.parts)
        model._data = _OwnData(parts, self.batch_shape)
        model._num_outputs = len(idcs)
        model._summaries = tuple(s.outputs(idcs) for s in self._summaries)
        model._received = None if self._received is None else self._received.outputs(idcs)
        if self._given_noise is not None:
            model._given_noise = self._given_noise[..., idcs]
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            model.likelihood = _KnownNoise(pick(self.likelihood.noise, -2))
        else:
            raw_noise = model.likelihood.noise_covar.raw_noise
            raw_noise.data = pick(raw_noise, -2)
        constant = model.mean_module.raw_constant
        constant.data = pick(constant, -1)
        model.mean_module.batch_shape = constant.shape
        if hasattr(self, "outcome_transform"):
            model.outcome_transform = self.outcome_transform.subset_output(idcs=idcs)
        model._raw = None if self._raw is None else self._raw.outputs(idcs)
        if self._cache is not None and torch.equal(self._cache.key, self._hyperparameters()):
            model._cache = self._cache.outputs(idcs, model._hyperparameters())
        return model

    # ------------------------------------------------------------------ fitting

    def custom_fit(
        self,
        *,
        mll: MarginalLogLikelihood,
        closure: Callable[[], tuple[Tensor, Sequence[Tensor | None]]] | None = None,
        optimizer: Callable[..., Any] | None = None,
        closure_kwargs: dict[str, Any] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MarginalLogLikelihood:
        """What `fit_gpytorch_mll` calls: maximise the evidence from sufficient statistics.

        The objective is that of `ExactMarginalLogLikelihood`, evidence and priors divided by
        `n`, without the `n x n` matrix. `optimizer` is BoTorch's L-BFGS-B if not given.
        """
        from botorch.optim.fit import fit_gpytorch_mll_scipy  # costs 50 ms, and only fits need it

        if type(mll) is not ExactMarginalLogLikelihood or mll.model is not self:
            raise UnsupportedError(
                "BasisGP is fitted by its evidence: pass ExactMarginalLogLikelihood(model."
                f"likelihood, model) of this model, not a {type(mll).__name__}."
            )
        mll.train()
        parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad}
        if self._data.num_data == 0 or not parameters:
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

        (fit_gpytorch_mll_scipy if optimizer is None else optimizer)(
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
        received = self._received
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
        return evidence / max(self._data.num_data, 1)

    def _map_with_gradients(self) -> FeatureMap:
        if self._summaries:
            return self._base_map
        if not (torch.is_grad_enabled() and self.training):
            return self.feature_map
        return self._base_map.with_hyperparameters(self.raw_lengthscale, self.raw_outputscale)


class NoOwnData(UnsupportedError, AttributeError):
    """A model that only received what it knows was asked for its own observations."""


class _MapKernel(Kernel):
    """The covariance that a map stands for, seen as a GPyTorch kernel."""

    def __init__(self, feature_map: FeatureMap) -> None:
        super().__init__()
        self.feature_map = feature_map

    @property
    def lengthscale(self) -> Tensor:
        """The length scale of every input, `1 x d`."""
        scales, d = self.feature_map.lengthscale.detach(), self.feature_map.input_dim
        groups: Sequence[Sequence[int]] = getattr(self.feature_map, "groups", [range(d)])
        order = [j for group in groups for j in group]
        if scales.numel() != d or sorted(order) != list(range(d)):
            raise UnsupportedError(
                f"The inputs of this {type(self.feature_map).__name__} have no length scale each: "
                f"it has {scales.numel()} for {d} inputs. Scale a trust region by hand."
            )
        return scales[torch.tensor(order).argsort()].unsqueeze(0)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        """Covariances, `batch_shape x n x n'`, or `batch_shape x n` with `diag`."""
        K = self.feature_map.covariance(x1, x2)
        return K.diagonal(dim1=-2, dim2=-1) if diag else K


class _InferredNoise(Float64Module, GaussianLikelihood):
    """GPyTorch's likelihood, in float64 also inside a module that is cast."""


class _KnownNoise(Float64Module, FixedNoiseGaussianLikelihood):
    """GPyTorch's likelihood, in float64 also inside a module that is cast."""


@dataclass(frozen=True, eq=False)
class _OwnData:
    """Own points and transformed targets, in parts that fantasies share instead of copying."""

    parts: tuple[tuple[Tensor, Tensor], ...]  # `… x n_k x d` and `… x n_k x m`
    batch_shape: Size

    @property
    def num_data(self) -> int:
        return sum(X.shape[-2] for X, _ in self.parts)

    @property
    def requires_grad(self) -> bool:
        return any(X.requires_grad or Y.requires_grad for X, Y in self.parts)

    @property
    def X(self) -> Tensor:  # noqa: N802
        """All points, `batch_shape x n x d`."""
        return self._joined([X for X, _ in self.parts])

    @property
    def Y(self) -> Tensor:  # noqa: N802
        """All targets, `batch_shape x n x m`."""
        return self._joined([Y for _, Y in self.parts])

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else _concatenate(parts, self.batch_shape)

    def extended(self, X: Tensor, Y: Tensor, batch_shape: Size) -> _OwnData:
        """With further observations."""
        return _OwnData((*self.parts, (X, Y)), batch_shape)

    def map(self, fn: Callable[[Tensor], Tensor]) -> _OwnData:
        """With a function applied to every tensor."""
        return _OwnData(tuple((fn(X), fn(Y)) for X, Y in self.parts), self.batch_shape)


@dataclass(frozen=True, eq=False)
class _Cache:
    """The posterior of the weights, and the hyperparameters it belongs to."""

    key: Tensor
    feature_map: FeatureMap
    block: LocalBlock | None
    weights: WeightPosterior

    def outputs(self, idcs: list[int], key: Tensor) -> _Cache:
        """The cache of some of the outputs, under the hyperparameters of those."""
        block = None if self.block is None else self.block.outputs(idcs)
        return _Cache(key, self.feature_map, block, self.weights.outputs(idcs))


@dataclass(frozen=True, eq=False)
class _RawStatistics:
    """Own data under unit noise, from which the summary for every noise and mean follows."""

    key: Tensor  # what the input transform depended on
    centred: Summary  # of y minus its own average, so that squares do not cancel
    ones: Tensor  # … x M x 1, Phi' 1
    average: Tensor  # … x m x 1 x 1

    @classmethod
    def from_data(
        cls, feature_map: FeatureMap, X: Tensor, Y: Tensor, *, key: Tensor
    ) -> _RawStatistics:
        """From points `batch_shape x n x d` and targets `batch_shape x n x m`."""
        m, n = Y.shape[-1], Y.shape[-2]
        average = Y.sum(dim=-2, keepdim=True) / max(n, 1)
        columns = torch.cat([Y - average, torch.ones_like(Y[..., :1])], dim=-1)
        gram, products = feature_sums(feature_map, X, columns)
        per_output = products.mT.unsqueeze(-1)  # batch_shape x (m + 1) x M x 1
        centred = Summary(
            gram=gram.unsqueeze(-3),
            moment=per_output[..., :m, :, :],
            basis=feature_map.fingerprint,
            num_data=n,
            square=columns[..., :m].square().sum(dim=-2),
            log_det=torch.zeros_like(average[..., 0, :]),
        )
        return cls(key, centred, per_output[..., m:, :, :], average.mT.unsqueeze(-1))

    def outputs(self, idcs: list[int]) -> _RawStatistics:
        """The statistics of some of the outputs."""
        average = self.average[..., idcs, :, :]
        return _RawStatistics(self.key, self.centred.outputs(idcs), self.ones, average)

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


def learns_coefficients(input_transform: InputTransform | None) -> bool:
    """Whether a transform, or a part of it, takes its coefficients from the points it sees."""
    parts: Iterable[Any] = (input_transform,)
    if isinstance(input_transform, ChainedInputTransform):
        parts = input_transform.children()
    return any(getattr(part, "learn_coefficients", False) for part in parts)


def check_public_transforms(
    input_transform: InputTransform | None, outcome_transform: OutcomeTransform | None, what: str
) -> None:
    """Refuse transforms that learn from own data, beside what is on a shared scale."""
    if learns_coefficients(input_transform):
        raise UnsupportedError(
            f"{type(input_transform).__name__} learns its coefficients from this agent's data, but "
            f"{what} are over the shared inputs: give it the public bounds, "
            "Normalize(d, bounds=bounds)."
        )
    parts = () if outcome_transform is None else outcome_transform.modules()
    if any(isinstance(part, Standardize) for part in parts):
        raise UnsupportedError(
            f"{type(outcome_transform).__name__} scales outcomes by this agent's own data, but "
            f"{what} are on the shared scale: agree on a public affine map of the outcomes, as "
            "the Outcome of a SearchSpace is."
        )


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
    """Inferred noise with BoTorch's prior; the bound makes room for a smaller given value.

    On a logarithmic scale L-BFGS takes less than half the steps.
    """
    bound = (noise_var.detach().min() / 2).clamp_max(MIN_NOISE)
    constraint = GreaterThan(bound, transform=torch.exp, inv_transform=torch.log).double()
    likelihood = _InferredNoise(
        noise_prior=LogNormalPrior(loc=-4.0, scale=1.0),  # [Hvarfner2024]_
        noise_constraint=constraint,
        batch_shape=batch_shape,
    ).double()
    raw_noise: Parameter = likelihood.noise_covar.raw_noise  # type: ignore[union-attr, assignment]
    if noise_var.shape == batch_shape:
        noise_var = noise_var.unsqueeze(-1)
    raw = constraint.inverse_transform(noise_var.detach().double())
    raw_noise.data = raw.expand(raw_noise.shape).clone()
    return likelihood


def constant_mean(batch_shape: Size, constant: Tensor) -> ConstantMean:
    # Made double before it is set: GPyTorch's default would round the value to float32.
    mean = ConstantMean(batch_shape=batch_shape).double()
    mean.raw_constant.data = constant.detach().expand(batch_shape).clone()
    return mean


def _lengthscale(model: BasisGP) -> Tensor:
    # Leading ones: GPyTorch adds log priors to a batch of evidences by their leading dimensions.
    return model.raw_lengthscale.reshape(*[1] * len(model._aug_batch_shape), -1)


def _outputscale(model: BasisGP) -> Tensor:
    return model.raw_outputscale.reshape(*[1] * len(model._aug_batch_shape), -1)


def _concatenate(parts: Sequence[Tensor], batch_shape: Size) -> Tensor:
    return torch.cat([part.expand(*batch_shape, *part.shape[-2:]) for part in parts], dim=-2)


import botorch_fed.models.paths  # noqa: E402, F401 - tells BoTorch how to draw paths of it
