r"""Functions drawn from a posterior, as BoTorch sample paths.

A path is a `botorch.sampling.pathwise` path: `PathwiseThompsonSampling`,
`optimize_posterior_samples` and `MatheronPathModel` accept it. There are two laws::

    draw_matheron_paths(model)   the law of the model's posterior
    draw_path(model)             exact kernel in the update, features in the prior only

With more data than features, a draw of features alone has too little variance away from the data
(variance starvation): at 100 points and 100 features its two-sigma intervals cover 6-72 %, pathwise
ones 81-95 %. An agent's local step uses `draw_path`; a message to others must be a weight vector.

References:
    * [Wilson2020]_ J. Wilson et al. Efficiently sampling functions from Gaussian process
      posteriors. ICML 2020.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import ModelList
from botorch.models.model_list_gp_regression import ModelListGP
from botorch.sampling.pathwise.paths import GeneralizedLinearPath, PathDict, SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from botorch.sampling.pathwise.utils import (
    get_input_transform,
    get_output_transform,
    get_train_inputs,
)
from gpytorch.means import Mean
from gpytorch.models import ExactGP
from torch import Size, Tensor
from torch.nn import Module, ModuleList

from botorch_fed.models.basis_gp import BasisGP
from botorch_fed.models.features import (
    AdditiveFeatures,
    FeatureMap,
    InducingFeatures,
    RandomFourierFeatures,
)
from botorch_fed.models.kernels import StationaryKernel
from botorch_fed.models.numerics import cholesky, solve_rows
from botorch_fed.rng import Generator, fresh

NUM_FEATURES = 1024  # features of a prior draw without a given map, as in BoTorch


class _KernelSections(Module):
    r"""The features :math:`x \mapsto k(x, X)`, through which data enter a path."""

    def __init__(self, covariance: Any, centres: Tensor) -> None:
        super().__init__()
        self.covariance = covariance
        self.register_buffer("centres", centres, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.covariance(x.double(), self.centres)


def draw_path(
    model: ExactGP | BasisGP,
    sample_shape: Size = torch.Size(),  # noqa: B008 - immutable
    *,
    feature_map: FeatureMap | None = None,
    generator: Generator | None = None,
) -> SamplePath:
    r"""Draw functions from a posterior by pathwise conditioning [Wilson2020]_.

    .. math:: f(x) = \mu + \phi(x)^\top w_0
              + k(x, X) (K + \sigma^2 I)^{-1} (y - \mu - \Phi w_0 - \sigma e),

    with the *exact* kernel `k` in the update and features :math:`\phi` in the prior only.

    Args:
        model: A single-output model without batch dimensions that holds all its data: a
            `SingleTaskGP` with an RBF or Matérn kernel, or a `BasisGP` over Fourier features
            without received summaries, whose map's kernel is used.
        sample_shape: Shape of the draws.
        feature_map: The features of the prior draw; default the model's map, or 1,024 random
            Fourier features of its kernel.
        generator: The stream of random numbers; by default PyTorch's global generator seeds one.

    Returns:
        A path: `batch_shape x n x d` points to `sample_shape x n` values, on the original scale.

    Example:
        >>> path = draw_path(SingleTaskGP(train_X, train_Y), generator=generator(0, t, "own"))
        >>> X_next, _ = optimize_posterior_samples(path, bounds)
    """
    if model.num_outputs != 1 or len(model.batch_shape) > 0:
        raise UnsupportedError(
            f"draw_path needs one output and no batch dimensions, got {model.num_outputs} outputs "
            f"and batch shape {tuple(model.batch_shape)}: use draw_matheron_paths."
        )
    generator = fresh() if generator is None else generator
    model.eval()
    X = own_points(model, transformed=True)
    X, y = X.detach().double(), model.train_targets.detach().double()
    covariance: Any
    if isinstance(model, BasisGP):
        model_map = model.feature_map
        if model_map.has_residual or model.summaries:
            raise UnsupportedError(
                "draw_path needs all data in the model and Fourier features: with received "
                "summaries or inducing points use draw_matheron_paths."
            )
        feature_map = model_map if feature_map is None else feature_map
        covariance = model_map.covariance
    else:
        covariance = StationaryKernel.from_gpytorch(model.covar_module, X.shape[-1])
        if feature_map is None:
            feature_map = RandomFourierFeatures.draw(covariance, NUM_FEATURES, generator=generator)
    # Compared at fixed points: a single observation does not determine a length scale.
    d = X.shape[-1]
    steps = torch.arange(9, dtype=torch.float64).reshape(-1, 1, 1) / 8
    probes = (steps * torch.eye(d, dtype=torch.float64)).reshape(-1, d)  # along every axis
    if feature_map.has_residual or not torch.allclose(
        feature_map.covariance(probes), covariance(probes), rtol=1e-3, atol=1e-3
    ):
        raise UnsupportedError(
            "The features of the prior draw must be Fourier features of the model's kernel: build "
            "the map from the fitted kernel."
        )
    mean = _frozen(model.mean_module)
    n = X.shape[0]
    weights = generator.normal(*sample_shape, feature_map.num_features)
    e = generator.normal(*sample_shape, n)
    noise = model.likelihood.noise.detach().double().expand(n)
    L = cholesky(covariance(X) + torch.diag(noise), f"the covariance of {n} observations")
    prior_values = weights @ feature_map(X).mT + noise.sqrt() * e
    residuals = y - mean(X) - prior_values
    update = solve_rows(L.mT, solve_rows(L, residuals.unsqueeze(-2)), upper=True).squeeze(-2)
    paths = {
        "prior_paths": linear_path(feature_map, weights, mean),
        "update_paths": linear_path(_KernelSections(covariance, X), update),
    }
    return _joined(model, paths)


def own_points(model: Any, *, transformed: bool) -> Tensor:
    """A model's own points, also where it has none: `n x d`."""
    if isinstance(model, BasisGP):
        return model._transformed_points() if transformed else model._original_train_inputs
    points: Tensor
    (points,) = get_train_inputs(model, transformed=transformed)
    return points


@DrawMatheronPaths.register(BasisGP)  # type: ignore[untyped-decorator]
def _draw_matheron_paths_basis_gp(
    model: BasisGP, *, sample_shape: Size, generator: Generator | None = None, **_: Any
) -> SamplePath:
    r"""The law of the model's posterior: weights, plus a path of the residual.

    For inducing points the residual path is :math:`g(x) - \phi(x)^\top L^{-1} g(Z)` with `g` a
    prior draw by random features; for a sum of maps it is the sum of their residual paths.
    """
    model.eval()
    feature_map = model.feature_map
    mean = _frozen(model.mean_module)
    generator = fresh() if generator is None else generator
    weights = model.sample_weights(sample_shape, generator=generator).detach()
    pulled, missed = missed_paths(
        feature_map, weights.shape[:-1], list(range(feature_map.input_dim)), generator
    )
    seen = linear_path(feature_map, weights - pulled, mean)
    paths: dict[str, SamplePath] = {"weight_paths": seen}
    for k, path in enumerate(missed):
        paths["missed_paths" if k == 0 else f"missed_paths{k}"] = path
    return _joined(model, paths)


# BoTorch has it for its list of GPs only; Ax makes plain lists of other models.
DrawMatheronPaths.register(ModelList)(DrawMatheronPaths.dispatch(ModelListGP))


class _OfInputs(Module):
    """A map that reads some of the inputs."""

    def __init__(self, feature_map: FeatureMap, inputs: list[int]) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.inputs = inputs

    def forward(self, x: Tensor) -> Tensor:
        return self.feature_map(x[..., self.inputs])


def missed_paths(
    feature_map: FeatureMap, batch_shape: Size, inputs: list[int], generator: Generator
) -> tuple[Tensor, list[SamplePath]]:
    """The weights that a draw `g` of the residual subtracts, and the paths of the draw."""
    if not feature_map.has_residual:
        zeros = torch.zeros(*batch_shape, feature_map.num_features, dtype=torch.float64)
        return zeros, []
    if isinstance(feature_map, AdditiveFeatures):
        parts = [
            missed_paths(part, batch_shape, [inputs[j] for j in group], generator)
            for part, group in zip(feature_map.maps, feature_map.groups, strict=True)
            if isinstance(part, FeatureMap)
        ]
        pulled = torch.cat([part[0] for part in parts], dim=-1)
        return pulled, [path for part in parts for path in part[1]]
    if not isinstance(feature_map, InducingFeatures):
        raise UnsupportedError(
            f"Residual paths of {type(feature_map).__name__} are not available: draw from the "
            "posterior at a set of points instead."
        )
    fourier = RandomFourierFeatures.draw(feature_map.kernel, NUM_FEATURES, generator=generator)
    prior = generator.normal(*batch_shape, NUM_FEATURES)
    at_support = prior @ fourier(feature_map.inducing_points).mT  # g(Z)
    pulled = solve_rows(feature_map.chol, at_support.unsqueeze(-2)).squeeze(-2)
    return pulled, [linear_path(_OfInputs(fourier, inputs), prior)]


def _frozen(mean_module: Mean) -> Mean:
    """A copy of a mean, so that refitting the model does not change drawn paths."""
    mean = copy.deepcopy(mean_module).requires_grad_(False)
    return mean.double().eval()


class _LinearPath(GeneralizedLinearPath):
    """BoTorch's linear path, without a copy of the features for every draw."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        if x.dim() > 2:
            return super().forward(x, **kwargs)
        weights = self.weight.unsqueeze(0) if self.weight.dim() == 1 else self.weight
        values = weights.flatten(end_dim=-2) @ self.feature_map(x).mT
        values = values.reshape(*self.weight.shape[:-1], x.shape[-2])
        return values if self.bias_module is None else values + self.bias_module(x)


def linear_path(feature_map: Any, weights: Tensor, mean: Mean | None = None) -> SamplePath:
    return _LinearPath(feature_map, weights, bias_module=mean)


def _total(values: list[Tensor]) -> Tensor:
    return sum(values[1:], start=values[0])


class WeightedPaths(SamplePath):
    """A weighted sum of paths over the same points.

    Args:
        paths: The paths.
        weights: What each one is multiplied by.
    """

    def __init__(self, paths: Sequence[SamplePath], weights: Sequence[float]) -> None:
        super().__init__()
        self.paths = ModuleList(paths)
        self.weights = tuple(weights)

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        paths: Any = self.paths
        for path in paths:
            path.set_ensemble_as_batch(ensemble_as_batch)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Values at `batch_shape x n x d` points, draws as the paths have them."""
        pairs = zip(self.paths, self.weights, strict=True)
        return _total([weight * path(x, **kwargs) for path, weight in pairs])


def _joined(model: Any, paths: dict[str, SamplePath]) -> PathDict:
    return PathDict(
        paths=paths,
        join=_total,
        input_transform=copy.deepcopy(get_input_transform(model)),
        output_transform=copy.deepcopy(get_output_transform(model)),
    )
