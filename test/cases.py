"""The objects that contract tests run on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers.published.features import PaperCosine
from botorch_fed.models import (
    AdditiveFeatures,
    FeatureMap,
    InducingFeatures,
    KLFeatures,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    WarpedFeatures,
)
from botorch_fed.rng import generator

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def in_rounds(kind: Any, settings: Mapping[str, Any], names: tuple[str, ...] = ()) -> Any:
    """A study by the number of its protocol's rounds: the budget follows."""
    options = dict(settings)
    if "rounds" in options:
        options["budget"] = kind.budget_of(options.pop("rounds"), names, options)
    return kind(**options)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return generator(seed, "test").uniform(*shape)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return generator(seed, "test", "normal").normal(*shape)


def se(*lengthscale: float, outputscale: float = 1.0) -> StationaryKernel:
    return StationaryKernel(math.inf, list(lengthscale), outputscale)


def random_fourier() -> FeatureMap:
    kernel = se(0.4, 0.6, outputscale=1.5)
    return RandomFourierFeatures.draw(kernel, 60, generator=generator(0, "rff"))


def matern_orthogonal() -> FeatureMap:
    kernel = StationaryKernel(2.5, [0.4, 0.6], 0.7)
    return RandomFourierFeatures.draw(kernel, 60, generator=generator(0, "m"), orthogonal=True)


def paper_cosine() -> FeatureMap:
    return PaperCosine.draw(se(0.4, 0.6), 50, generator=generator(0, "cos"))


def quadrature() -> FeatureMap:
    return QuadratureFourierFeatures.from_kernel(se(0.5, 0.7, outputscale=2.0), UNIT, tol=1e-3)


def matern_product() -> FeatureMap:
    kernel = StationaryKernel(2.5, [0.6, 0.9], product=True)
    return QuadratureFourierFeatures.from_kernel(kernel, UNIT, tol=0.1)


def karhunen_loeve() -> FeatureMap:
    return KLFeatures.from_map(quadrature(), uniform(500, 2), num_features=12)


def additive() -> FeatureMap:
    parts = [
        QuadratureFourierFeatures.from_kernel(se(0.3, outputscale=0.5), UNIT[:, :1], tol=1e-3),
        RandomFourierFeatures.draw(se(0.5, outputscale=1.2), 30, generator=generator(0, "part")),
    ]
    return AdditiveFeatures(parts)


def inducing() -> FeatureMap:
    return InducingFeatures(se(0.4, 0.6, outputscale=1.5), uniform(12, 2, seed=5))


def warped() -> FeatureMap:
    return WarpedFeatures(quadrature(), torch.tensor([0.01, 0.0]).double())


MAPS: list[Callable[[], FeatureMap]] = [
    random_fourier,
    matern_orthogonal,
    paper_cosine,
    quadrature,
    matern_product,
    karhunen_loeve,
    additive,
    inducing,
    warped,
]
