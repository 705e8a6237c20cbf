r"""Input constructors: how BoTorch, and Ax above it, build our acquisition functions.

Importing `botorch_fed.acquisition` registers them; `get_acqf_input_constructor` then finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from botorch.acquisition.input_constructors import (
    acqf_input_constructor,
    get_best_f_analytic,
)
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.models.model import Model
from botorch.sampling.pathwise.paths import SamplePath
from botorch.utils.datasets import SupervisedDataset
from torch import Size, Tensor

from botorch_fed.acquisition.mixture import MixtureEI, MixturePI, MixtureUCB
from botorch_fed.acquisition.thompson import ThompsonSampling
from botorch_fed.acquisition.transfer import BANDWIDTH, TransferAcquisition
from botorch_fed.models import FeatureMap, Summary, draw_path
from botorch_fed.models.mixture import LocalSharedMixture, draw_mixture_path
from botorch_fed.rng import Generator

Constraints = Sequence[Callable[[Tensor], Tensor]]  # of samples of outcomes, at most 0 where met


@acqf_input_constructor(ThompsonSampling)
def _thompson_sampling(
    model: Model,
    path: SamplePath | None = None,
    q: int = 1,
    generator: Generator | None = None,
    posterior_transform: PosteriorTransform | None = None,
    constraints: Constraints | None = None,
) -> dict[str, Any]:
    """A path, drawn from the own model or mixture unless one is given."""
    _refuse_constraints(constraints)
    _refuse_transform(posterior_transform)
    if path is None:
        sample_shape = Size([q]) if q > 1 else Size()
        draw: Any = draw_mixture_path if isinstance(model, LocalSharedMixture) else draw_path
        path = draw(model, sample_shape, generator=generator)
    return {"path": path}


@acqf_input_constructor(TransferAcquisition)
def _transfer(
    model: Model,
    training_data: SupervisedDataset | dict[Hashable, SupervisedDataset],
    summaries: Summary,
    feature_map: FeatureMap,
    incumbents: Tensor,
    best_f: float | Tensor | None = None,
    mean: float = 0.0,
    bandwidth: float = BANDWIDTH,
    posterior_transform: PosteriorTransform | None = None,
    constraints: Constraints | None = None,
) -> dict[str, Any]:
    """Of the own data the best value, unless one is given."""
    _refuse_constraints(constraints)
    _refuse_transform(posterior_transform)
    return {
        "model": model,
        "best_f": get_best_f_analytic(training_data) if best_f is None else best_f,
        "summaries": summaries,
        "feature_map": feature_map,
        "incumbents": incumbents,
        "mean": mean,
        "bandwidth": bandwidth,
    }


@acqf_input_constructor(MixtureUCB)
def _mixture_ucb(
    model: Model,
    posterior_transform: PosteriorTransform | None = None,
    beta: float | Tensor = 0.2,
    maximize: bool = True,
    X_pending: Tensor | None = None,
    constraints: Constraints | None = None,
) -> dict[str, Any]:
    """With BoTorch's default of `beta`."""
    _refuse_constraints(constraints)
    _refuse_pending(X_pending)
    return {
        "model": model,
        "beta": beta,
        "posterior_transform": posterior_transform,
        "maximize": maximize,
    }


@acqf_input_constructor(MixtureEI, MixturePI)
def _mixture_improvement(
    model: Model,
    training_data: SupervisedDataset | dict[Hashable, SupervisedDataset],
    posterior_transform: PosteriorTransform | None = None,
    best_f: float | Tensor | None = None,
    maximize: bool = True,
    X_pending: Tensor | None = None,
    constraints: Constraints | None = None,
) -> dict[str, Any]:
    """Of the own data the largest value, unless one is given; needed for minimisation."""
    _refuse_constraints(constraints)
    _refuse_pending(X_pending)
    if best_f is None:
        if not maximize:
            raise InputDataError("Give best_f for minimisation: the default is the largest value.")
        best_f = get_best_f_analytic(training_data, posterior_transform)
    return {
        "model": model,
        "best_f": best_f,
        "posterior_transform": posterior_transform,
        "maximize": maximize,
    }


def _refuse_pending(X_pending: Tensor | None) -> None:
    if X_pending is not None:
        raise UnsupportedError(
            f"Analytic acquisition functions do not account for pending points, {len(X_pending)} "
            "were given: use a Monte-Carlo one, e.g. qLogNoisyExpectedImprovement."
        )


def _refuse_constraints(constraints: Constraints | None) -> None:
    if constraints:
        raise UnsupportedError(
            f"This acquisition function knows no outcome constraints, {len(constraints)} were "
            "given: use one that does, e.g. qLogNoisyExpectedImprovement."
        )


def _refuse_transform(posterior_transform: PosteriorTransform | None) -> None:
    """Ax sends the weight 1 where one metric is maximised; anything else would be ignored."""
    if posterior_transform is None:
        return
    weights = getattr(posterior_transform, "weights", None)
    offset = getattr(posterior_transform, "offset", 0.0)
    if weights is None or weights.tolist() != [1.0] or offset != 0:
        raise UnsupportedError(
            f"This acquisition function maximises one outcome as it is, got a "
            f"{type(posterior_transform).__name__}: negate outcomes that are minimised, or use "
            "qLogNoisyExpectedImprovement."
        )
