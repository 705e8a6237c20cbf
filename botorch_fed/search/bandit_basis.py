r"""Bases of private bandits that follow from public facts alone: dimension, records and noise. ::

    actions      basis                                              prior variances
    private      `few_features`: few eigenfunctions of one kernel   fixed
    public       `scaled_features`: kernels of several length       fitted to what was released
                 scales, added                                      (`search.bandit.fit_scales`)

With private actions every feature costs noise in :math:`\sum\phi\phi^\top`. A direction of `n`
records and `m` features has information of about `n / m`, beside eigenvalues of the noise of about
:math:`s\sqrt{m}`: the basis is the largest one whose information is `SIGNAL` times that. Its
sizes are those of polynomials of one degree, so that no direction is preferred.

With public actions features cost nothing, so that the basis has short length scales as well, and
which of them count is read off the released outcomes, as post-processing. Beyond three dimensions
it is a sum of functions of one input each: more is not learnt from so few blocks.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from botorch_fed.models import (
    AdditiveFeatures,
    FeatureMap,
    KLFeatures,
    QuadratureFourierFeatures,
    StationaryKernel,
)
from botorch_fed.search.transfer import (
    FEW_LENGTHSCALE,
    default_private_features,
    reference_points,
)
from botorch_fed.space import SearchSpace

SIGNAL = 4.0  # information of a direction over the noise in it
MOST_FEW = 36  # features of a basis for private actions
LENGTHSCALE = 0.2  # of its kernel, in two dimensions of the unit cube
FULL = 3  # most inputs of one function
LENGTHSCALES = (0.5, 0.25, 0.12)  # of functions of all inputs, in two dimensions
NARROW = (0.25, 0.08, 0.03)  # of functions of one input each
FULL_TOL, NARROW_TOL = 0.05, 0.1  # of their features, relative to their variance
MOST_SCALED = 450  # features of a basis for public actions
VARIANCE = 0.5  # of a function on the public scale, before anything is released


def feature_count(dim: int, *, records: float, noise_std: float) -> int:
    """How many features a basis for private actions has.

    Args:
        dim: Inputs.
        records: How many records the last sum is made of, at least.
        noise_std: Of the noise in a number of that sum.
    """
    most = float(MOST_FEW)
    if noise_std > 0:
        most = min(most, (records / (SIGNAL * noise_std)) ** (2 / 3))
    degree = 2 if dim <= FULL else 1
    while math.comb(dim + degree + 1, dim) <= most:
        degree += 1
    return math.comb(dim + degree, dim)


def few_features(space: SearchSpace, *, records: float, noise_std: float) -> FeatureMap:
    """A basis for private actions; see `feature_count`."""
    count = feature_count(space.dim, records=records, noise_std=noise_std)
    scale = LENGTHSCALE if space.dim <= FULL else FEW_LENGTHSCALE
    lengthscale = scale * math.sqrt(space.dim / 2)
    return default_private_features(space, num_features=count, lengthscale=lengthscale)


@lru_cache(maxsize=4)
def scaled_features(dim: int) -> AdditiveFeatures:
    """A basis for public actions: sums of functions of several length scales, and a constant.

    As many of the length scales, long ones first, as fit into `MOST_SCALED` features.

    Args:
        dim: Inputs.
    """
    full = dim <= FULL
    maps: list[FeatureMap] = []
    groups: list[list[int]] = []
    lengths = list(NARROW)
    if full:  # in three dimensions the shortest has too many functions
        lengths = [ell * math.sqrt(dim / 2) for ell in LENGTHSCALES[: 5 - dim]]
    for ell in lengths:
        part = _functions(dim, ell) if full else _functions(1, ell)
        inputs = [list(range(dim))] if full else [[j] for j in range(dim)]
        total = sum(one.num_features for one in maps) + len(inputs) * part.num_features
        if maps and total >= MOST_SCALED:
            break
        maps += [part] * len(inputs)
        groups += inputs
    shared = VARIANCE / (len(maps) + 1)
    parts = [
        part.with_hyperparameters(part.lengthscale, torch.full_like(part.outputscale, shared))
        for part in maps
    ]
    constant = QuadratureFourierFeatures(
        StationaryKernel(math.inf, [1.0], shared),
        torch.zeros(1, 1, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
        bounds=_box(1),
    )
    return AdditiveFeatures([*parts, constant], [*groups, [0]])


@lru_cache(maxsize=8)
def _functions(dim: int, lengthscale: float) -> FeatureMap:
    """Eigenfunctions of a kernel on the unit cube, of variance one."""
    kernel = StationaryKernel(math.inf, [lengthscale] * dim)
    base = QuadratureFourierFeatures.from_kernel(kernel, _box(dim), tol=1e-6 if dim == 1 else 1e-4)
    points = reference_points(dim)
    if dim == 1:
        points = torch.linspace(0, 1, 400, dtype=torch.float64)[:, None]
    return KLFeatures.from_map(base, points, tol=NARROW_TOL if dim == 1 else FULL_TOL)


def _box(dim: int) -> torch.Tensor:
    return torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, dim).contiguous()
