r"""`LocalSharedMixture`: an agent's own model and the federation's, mixed by a weight.

The function is the local model's with probability :math:`w` and the shared model's otherwise:
at any points the posterior is a mixture of two normals,

.. math:: w\, N(\mu_1, \Sigma_1) + (1 - w)\, N(\mu_2, \Sigma_2),

one coin for all points and outputs. Its first two moments are

.. math:: \mu = w \mu_1 + (1 - w) \mu_2, \qquad \Sigma = w \Sigma_1 + (1 - w) \Sigma_2
          + w (1 - w) (\mu_1 - \mu_2)(\mu_1 - \mu_2)^\top .

Three ways to use it. *Exactly and in closed form*: `acquisition.MixtureUCB`, `MixtureEI`,
`MixturePI`. *Exactly, by samples*: any Monte-Carlo acquisition function; each base sample holds the
coin and the component's normals, so that sample averages are deterministic and differentiable.
*Approximately*: BoTorch's analytic functions, and a `ModelListGP`, see the normal of the same mean
and variance, whose tails are not the mixture's (a `ModelList` samples the mixture).

The weight is the algorithm's, a point of a public schedule, and no posterior probability:
conditioning on observations updates both components and leaves it alone. In federated Thompson
sampling the coin is thrown first and only one of the models is then used; that is
`draw_mixture_path`.

Privacy: none of its own. The shared model is what was released, the local model never leaves.
"""

from __future__ import annotations

import copy
import math
from functools import cached_property
from typing import Any, NoReturn, Self

import torch
from botorch import settings
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models.model import FantasizeMixin, Model
from botorch.models.utils.assorted import fantasize as fantasize_flag
from botorch.posteriors.posterior import Posterior
from botorch.sampling.base import MCSampler
from botorch.sampling.get_sampler import GetSampler
from botorch.sampling.normal import IIDNormalSampler, NormalMCSampler, SobolQMCNormalSampler
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from botorch.sampling.pathwise.utils import get_train_inputs
from botorch.utils.datasets import SupervisedDataset
from botorch.utils.transforms import is_ensemble
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import GP
from linear_operator import to_linear_operator
from torch import Size, Tensor
from torch.nn import ModuleList
from torch.quasirandom import SobolEngine

from botorch_fed.models.basis_gp import BasisGP
from botorch_fed.models.numerics import Float64Module, check_finite
from botorch_fed.models.own import fit_own_gp, own_gp
from botorch_fed.models.paths import draw_path
from botorch_fed.rng import Generator, fresh


class MixturePosterior(Posterior):
    r"""A mixture of two posteriors over the same points and outputs, one coin for all of them.

    `mean` and `variance` are the mixture's own. A base sample is a vector of standard normals:
    first the coin (local where its probability is below the weight), then what the chosen
    component takes; every BoTorch sampler of normals can draw it.

    Args:
        local: The local model's posterior.
        shared: The shared model's posterior, of the same shape.
        local_weight: The weight of the first, a tensor that broadcasts to the batch shape.
    """

    def __init__(self, local: Posterior, shared: Posterior, local_weight: Tensor) -> None:
        shape = local._extended_shape()
        if shared._extended_shape() != shape:
            raise BotorchTensorDimensionError(
                f"Both components of a mixture must have one shape, got {tuple(shape)} and "
                f"{tuple(shared._extended_shape())}."
            )
        self.components = (local, shared)
        self.local_weight = local_weight.expand(shape[:-2])

    def __repr__(self) -> str:
        return f"MixturePosterior(shape={tuple(self._extended_shape())})"

    @property
    def batch_shape(self) -> Size:
        return self._extended_shape()[:-2]

    @property
    def device(self) -> torch.device:
        return self.components[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.components[0].dtype

    @property
    def mean(self) -> Tensor:
        local, shared = self._both("mean")
        w = self._weight
        return w * local + (1 - w) * shared

    @property
    def variance(self) -> Tensor:
        (mean_1, mean_2), (local, shared) = self._both("mean"), self._both("variance")
        w = self._weight
        return w * local + (1 - w) * shared + w * (1 - w) * (mean_1 - mean_2).square()

    @property
    def mvn(self) -> MultivariateNormal:
        """BoTorch's other name for `distribution`."""
        return self.distribution

    @property
    def covariance_matrix(self) -> Tensor:
        """The mixture's own joint covariance."""
        covariance: Tensor = self.distribution.covariance_matrix
        return covariance

    @cached_property
    def distribution(self) -> MultivariateNormal:
        """The normal of the mixture's mean and joint covariance: an approximation."""
        local, shared = self._both("distribution")
        w = self._weight
        kind = type(local)
        layout = getattr(local, "_interleaved", None)
        if kind is not type(shared) or layout != getattr(shared, "_interleaved", None):
            raise UnsupportedError(
                f"No common normal of {kind.__name__} and {type(shared).__name__} components: use "
                "the moments or samples of the mixture."
            )
        apart = local.loc - shared.loc  # flat, in the order of the covariance
        between = apart.unsqueeze(-1) * apart.unsqueeze(-2)
        within = w * local.covariance_matrix + (1 - w) * shared.covariance_matrix
        # As an operator: a dense covariance would be factorised at once.
        covariance = to_linear_operator(within + w * (1 - w) * between)
        if issubclass(kind, MultitaskMultivariateNormal):
            return MultitaskMultivariateNormal(self.mean, covariance, interleaved=layout)
        return MultivariateNormal(self.mean.squeeze(-1), covariance)

    def density(self, value: Tensor) -> Tensor:
        """The density of the marginal distributions, as BoTorch's posteriors have it."""
        local, shared = (component.density(value) for component in self.components)
        return self._weight * local + (1 - self._weight) * shared

    def rsample(self, sample_shape: Size | None = None) -> Tensor:
        """Samples with gradients, `sample_shape x batch_shape x q x m`."""
        sample_shape = Size([1]) if sample_shape is None else sample_shape
        shape = sample_shape + self.batch_shape
        coins = torch.rand(shape, dtype=self.dtype, device=self.device) < self.local_weight
        local, shared = (component.rsample(sample_shape) for component in self.components)
        return torch.where(coins[..., None, None], local, shared)

    def rsample_from_base_samples(self, sample_shape: Size, base_samples: Tensor) -> Tensor:
        """Samples that are a function of standard normals `sample_shape x base_sample_shape`."""
        expected = sample_shape + self.base_sample_shape
        if base_samples.shape != expected:
            raise BotorchTensorDimensionError(
                f"base_samples must have shape {tuple(expected)}, got {tuple(base_samples.shape)}."
            )
        # The quantile is infinite where the weight is 0 or 1, which then hold for every sample.
        coins = base_samples[..., 0] < torch.special.ndtri(self.local_weight)
        values = []
        for component in self.components:
            event = _base_event(component)
            own = base_samples[..., 1 : 1 + math.prod(event)]
            own = own.reshape(sample_shape + self.batch_shape + event)
            values.append(component.rsample_from_base_samples(sample_shape, own))
        return torch.where(coins[..., None, None], values[0], values[1])

    @property
    def base_sample_shape(self) -> Size:
        """`batch_shape x (1 + n)`: the coin, and `n` normals for either component."""
        numbers = max(math.prod(_base_event(component)) for component in self.components)
        return Size([*self.batch_shape, 1 + numbers])

    @property
    def batch_range(self) -> tuple[int, int]:
        """The batch dimensions of a base sample."""
        return (0, -1)

    def _extended_shape(self, sample_shape: Size = Size()) -> Size:  # noqa: B008 - immutable
        return self.components[0]._extended_shape(sample_shape)

    @property
    def _weight(self) -> Tensor:
        return self.local_weight[..., None, None]

    def _both(self, name: str) -> tuple[Any, Any]:
        local, shared = self.components
        return getattr(local, name), getattr(shared, name)


def _base_event(posterior: Posterior) -> Size:
    """The shape of a component's base sample without its batch dimensions."""
    return posterior.base_sample_shape[posterior.batch_range[1] :]


@GetSampler.register(MixturePosterior)  # type: ignore[untyped-decorator]
def _get_sampler_mixture(
    posterior: MixturePosterior, sample_shape: Size, *, seed: int | None = None
) -> NormalMCSampler:
    """Sobol normals where their dimension suffices, independent ones beyond, as BoTorch."""
    if posterior.base_sample_shape[-1] > SobolEngine.MAXDIM:
        return IIDNormalSampler(sample_shape, seed=seed)
    return SobolQMCNormalSampler(sample_shape, seed=seed)


class LocalSharedMixture(Float64Module, Model, GP, FantasizeMixin):
    r"""The local model with probability `local_weight`, the shared model otherwise.

    Both predict on the outcomes' original scale with transforms of their own. At weight 1 or 0 the
    posterior is that of one component, exactly. The posterior is a `MixturePosterior`.

    Args:
        local: The agent's own fitted model, e.g. of `own_gp`.
        shared: The federation's model, e.g. `BasisGP.from_summary(total, feature_map=phi)`.
        local_weight: :math:`w` in [0, 1]: a number, or a tensor that broadcasts with the models'
            batch shapes.

    Example:
        >>> model = LocalSharedMixture(own_gp(X, Y, fit_own_gp(X, Y)), shared, 1 - t**-0.5)
        >>> X_next, _ = optimize_acqf(MixtureEI(model, best_f=Y.max()), bounds, q=1, …)
    """

    local_weight: Tensor

    def __init__(self, local: Model, shared: Model, local_weight: float | Tensor) -> None:
        super().__init__()
        for name, model in (("local", local), ("shared", shared)):
            _check_component(name, model)
        if local.num_outputs != shared.num_outputs:
            raise UnsupportedError(
                f"Both models must have the same outputs, got {local.num_outputs} (local) and "
                f"{shared.num_outputs} (shared)."
            )
        weight = torch.as_tensor(local_weight, dtype=torch.float64).detach().clone()
        check_finite(weight, "local_weight")
        if not bool(((weight >= 0) & (weight <= 1)).all()):
            raise InputDataError("local_weight is a probability: it must lie in [0, 1].")
        shapes = tuple(local.batch_shape), tuple(shared.batch_shape), tuple(weight.shape)
        try:
            torch.broadcast_shapes(*shapes)
        except RuntimeError as error:
            raise BotorchTensorDimensionError(
                "The batch shapes of local model, shared model and weight must broadcast, got "
                f"{shapes[0]}, {shapes[1]} and {shapes[2]}."
            ) from error
        self.local = local
        self.shared = shared
        self.register_buffer("local_weight", weight)

    @classmethod
    def construct_inputs(  # type: ignore[override]  # without the shared model there is none
        cls,
        training_data: SupervisedDataset,
        *,
        shared: Model,
        local_weight: float | Tensor,
        local: Model | None = None,
    ) -> dict[str, Any]:
        """Constructor arguments from a dataset and this model's options.

        Args:
            training_data: The agent's own data, one output, points in the unit cube.
            shared: As in the constructor.
            local_weight: As in the constructor.
            local: As in the constructor; default `own_gp`, fitted to the data.
        """
        if local is None:
            data: dict[str, Any] = super().construct_inputs(training_data)
            X, Y = data["train_X"], data["train_Y"]
            local = own_gp(X, Y, fit_own_gp(X, Y))
        return {"local": local, "shared": shared, "local_weight": local_weight}

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return self.local.num_outputs

    @property
    def batch_shape(self) -> Size:
        """The common batch shape of the models and the weight."""
        shapes = self.local.batch_shape, self.shared.batch_shape, self.local_weight.shape
        return torch.broadcast_shapes(*shapes)

    @property
    def likelihood(self) -> Any:
        """For BoTorch's questions about noise: the local model's, or the one that knows it."""
        known = _knows_noise(self.shared) and not _knows_noise(self.local)
        return self.shared.likelihood if known else self.local.likelihood

    @property
    def train_inputs(self) -> tuple[Tensor, ...]:
        """The local model's points, untransformed: either model has transforms of its own."""
        inputs: tuple[Tensor, ...] = get_train_inputs(self.local, transformed=False)
        return inputs

    @property
    def train_targets(self) -> Tensor:
        """The local model's observations, in its transformed space."""
        local: Any = self.local
        targets: Tensor = local.train_targets
        return targets

    def forward(self, X: Tensor) -> NoReturn:
        """Refused: the prior that BoTorch's `loo_cv` asks for."""
        raise UnsupportedError(
            "loo_cv needs one normal prior of the data, and a mixture has two: score its models "
            "by themselves, loo_cv(model.local)."
        )

    @property
    def covar_module(self) -> Any:
        """The local model's kernel, by whose length scales trust regions are shaped."""
        return self.local.covar_module

    def __call__(self, X: Tensor) -> MultivariateNormal:
        """The normal of the mixture's mean and covariance, for closed forms that ask for one."""
        return self.posterior(X).distribution

    def custom_fit(self, *, mll: MarginalLogLikelihood, **options: Any) -> MarginalLogLikelihood:
        """What `fit_gpytorch_mll` calls: the local model is fitted, the shared one was received."""
        from botorch.fit import fit_gpytorch_mll  # costs 50 ms, and only fits need it

        local: Any = self.local
        fit_gpytorch_mll(type(mll)(local.likelihood, local), **options)
        return mll.eval()

    def posterior(  # type: ignore[override]  # the mixin's signature is narrower than Model's
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
        **kwargs: Any,
    ) -> MixturePosterior:
        """Joint posterior at points, as `BasisGP.posterior`.

        Each component adds its own noise variance, and is transformed by itself: for affine
        transforms the mixture of the transforms is the transform of the mixture.
        """
        if output_indices is not None:
            subset = self.subset_output(output_indices)
            return subset.posterior(
                X, observation_noise=observation_noise, posterior_transform=posterior_transform
            )
        self.eval()
        X = X.double()
        batch_shape = torch.broadcast_shapes(X.shape[:-2], self.batch_shape)
        X = X.expand(*batch_shape, *X.shape[-2:])  # so that both answer in one shape
        local, shared = (
            model.posterior(
                X, observation_noise=observation_noise, posterior_transform=posterior_transform
            )
            for model in (self.local, self.shared)
        )
        return MixturePosterior(local, shared, self.local_weight)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> Self:
        r"""The mixture with both models given further observations; the weight stays.

        Args:
            X: A `batch_shape x n' x d` tensor of points.
            Y: A `batch_shape' x n' x m` tensor of observations.
            noise: Known noise variances in the transformed space, for models that know those of
                their data.
        """
        return self._conditioned(X, Y, (noise, noise), **kwargs)

    def get_fantasy_model(
        self, inputs: Tensor, targets: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> Self:
        """GPyTorch's form of `condition_on_observations`, with targets `… x [m] x n'`."""
        single = self.num_outputs == 1
        Y = targets.unsqueeze(-1) if single else targets.mT
        if noise is not None:
            noise = noise.unsqueeze(-1) if single else noise.mT
        return self.condition_on_observations(inputs, Y, noise, **kwargs)

    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        **kwargs: Any,
    ) -> Self:
        r"""The mixture given imagined observations, drawn from its own posterior.

        Args:
            X: A `batch_shape x n' x d` tensor of points.
            sampler: Draws the observations.
            observation_noise: As in `posterior`; default each model's own.
            kwargs: Passed to the models' `condition_on_observations`.
        """
        if observation_noise is not None or X.shape[-2] == 0:
            with fantasize_flag():
                return super().fantasize(X, sampler, observation_noise, **kwargs)
        propagate = kwargs.pop("propagate_grads", False)
        with fantasize_flag():
            with settings.propagate_grads(propagate):
                Y = sampler(self.posterior(X, observation_noise=True))
            noises = tuple(_average_noise(model, Y) for model in (self.local, self.shared))
            return self._conditioned(X, Y, (noises[0], noises[1]), **kwargs)

    def _conditioned(
        self, X: Tensor, Y: Tensor, noises: tuple[Tensor | None, Tensor | None], **kwargs: Any
    ) -> Self:
        conditioned = copy.copy(self)
        conditioned._modules, conditioned._buffers = dict(self._modules), dict(self._buffers)
        for name, noise in zip(("local", "shared"), noises, strict=True):
            model: Any = getattr(self, name)
            if _knows_noise(model):
                if noise is None:
                    raise InputDataError(
                        f"The {name} model has known noise variances: pass `noise=` with the "
                        "variances of the new observations, of the shape of Y."
                    )
                kwargs["noise"] = noise
            else:
                kwargs.pop("noise", None)
            model.posterior(X)  # fills the caches that GPyTorch conditions by
            setattr(conditioned, name, model.condition_on_observations(X, Y, **kwargs))
        return conditioned

    def subset_output(self, idcs: list[int]) -> Self:
        """The mixture of both models for some of the outputs."""
        if any(not -self.num_outputs <= i < self.num_outputs for i in idcs):
            raise IndexError(
                f"Output indices must lie in 0..{self.num_outputs - 1}, got {list(idcs)}."
            )
        if [i % self.num_outputs for i in idcs] == list(range(self.num_outputs)):
            return copy.deepcopy(self)
        local, shared = (model.subset_output(idcs) for model in (self.local, self.shared))
        return type(self)(local, shared, self.local_weight)

    def extra_repr(self) -> str:
        weight = self.local_weight
        shown = f"{float(weight):.3f}" if weight.dim() == 0 else f"shape {tuple(weight.shape)}"
        return f"local_weight={shown}, num_outputs={self.num_outputs}"


def _check_component(name: str, model: Model) -> None:
    if not isinstance(model, Model):
        raise UnsupportedError(f"{name} must be a BoTorch Model, got {type(model).__name__}.")
    if is_ensemble(model):
        raise UnsupportedError(
            f"{name} is a {type(model).__name__}, an ensemble over its last batch dimension: mix a "
            "model with one normal posterior."
        )
    low = {str(p.dtype) for p in model.parameters() if p.dtype != torch.float64}
    if low:
        raise InputDataError(
            f"The {name} model has {', '.join(sorted(low))} parameters: build it from float64 data."
        )


def _knows_noise(model: Any) -> bool:
    return isinstance(getattr(model, "likelihood", None), FixedNoiseGaussianLikelihood)


def _average_noise(model: Any, Y: Tensor) -> Tensor | None:
    """The mean of known noise variances, of the shape of one fantasy; None where inferred."""
    if not _knows_noise(model):
        return None
    noise = model.likelihood.noise
    noise = noise.unsqueeze(-1) if model.num_outputs == 1 else noise.mT
    return noise.mean(dim=-2, keepdim=True).expand(Y.shape[1:])


# ------------------------------------------------------------------ drawn functions


class _ChosenPath(SamplePath):
    """Of two draws, the one that a coin chose."""

    choice: Tensor

    def __init__(self, local: SamplePath, shared: SamplePath, choice: Tensor) -> None:
        super().__init__()
        self.paths = ModuleList([local, shared])
        self.register_buffer("choice", choice, persistent=False)

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        paths: Any = self.paths
        for path in paths:
            path.set_ensemble_as_batch(ensemble_as_batch)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Values at `batch_shape x n x d` points, draws as the components have them."""
        paths: Any = self.paths
        local, shared = (path(x, **kwargs) for path in paths)
        return torch.where(self.choice, local, shared)


def draw_mixture_path(
    model: LocalSharedMixture,
    sample_shape: Size = Size(),  # noqa: B008 - immutable
    *,
    generator: Generator | None = None,
) -> SamplePath:
    r"""Draw functions from a mixture: throw a coin for each, then draw from the model it chose.

    This is the agent's step of federated Thompson sampling in model form. A `BasisGP` that holds
    received summaries or inducing points is drawn from its own law, other models by `draw_path`.

    Args:
        model: A mixture of `BasisGP`s and models that `draw_path` serves, one output and no batch
            dimensions.
        sample_shape: Shape of the draws, one coin each.
        generator: The stream of random numbers; by default PyTorch's global generator seeds one.

    Returns:
        A path: `batch_shape x n x d` points to `sample_shape x n` values, on the original scale.
    """
    if not isinstance(model, LocalSharedMixture):
        raise UnsupportedError(
            f"draw_mixture_path needs a LocalSharedMixture, got {type(model).__name__}: use "
            "draw_path."
        )
    if model.num_outputs != 1 or len(model.batch_shape) > 0:
        raise UnsupportedError(
            "draw_mixture_path needs one output and no batch dimensions, got "
            f"{model.num_outputs} outputs and batch shape {tuple(model.batch_shape)}: use "
            "draw_matheron_paths."
        )
    generator = fresh() if generator is None else generator
    choice = generator.uniform(*sample_shape, 1).to(model.local_weight) < model.local_weight
    choice = choice if len(sample_shape) else choice.squeeze(-1)
    for component, needed in ((model.local, choice.all()), (model.shared, ~choice.any())):
        if bool(needed):  # nobody asks the other one
            return component_path(component, sample_shape, generator)
    paths = [component_path(m, sample_shape, generator) for m in (model.local, model.shared)]
    return _ChosenPath(paths[0], paths[1], choice)


def component_path(model: Any, sample_shape: Size, generator: Generator) -> SamplePath:
    """Draws of any single-output model: from its own law where `draw_path` cannot know all data."""
    if isinstance(model, LocalSharedMixture):
        return draw_mixture_path(model, sample_shape, generator=generator)
    if isinstance(model, BasisGP) and (model.summaries or model.feature_map.has_residual):
        return DrawMatheronPaths(model, sample_shape=sample_shape, generator=generator)
    return draw_path(model, sample_shape, generator=generator)


@DrawMatheronPaths.register(LocalSharedMixture)  # type: ignore[untyped-decorator]
def _draw_matheron_paths_mixture(
    model: LocalSharedMixture, *, sample_shape: Size, **kwargs: Any
) -> SamplePath:
    """The law of the model's own posterior, any outputs and batch dimensions."""
    model.eval()
    batch_shape = model.batch_shape
    for component in (model.local, model.shared):
        if component.batch_shape != batch_shape:
            raise UnsupportedError(
                "Paths of a mixture need models of one batch shape, got "
                f"{tuple(component.batch_shape)} in a mixture of {tuple(batch_shape)}."
            )
    coins = fresh().uniform(*sample_shape, *batch_shape).to(model.local_weight)
    choice = coins < model.local_weight
    outputs = [1] if model.num_outputs > 1 else []
    choice = choice.reshape(*choice.shape, *outputs, 1)
    local, shared = (
        DrawMatheronPaths(component, sample_shape=sample_shape, **kwargs)
        for component in (model.local, model.shared)
    )
    return _ChosenPath(local, shared, choice)
