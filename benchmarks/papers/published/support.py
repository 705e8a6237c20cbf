r"""Support sets that follow the data: Algorithm 1 of FBO-FedGP, and a k-means by noisy sums.

    local_clustering,   Algorithm 1: centres are means of few inputs, and often inputs themselves.
    global_clustering,  They leak; there is no guarantee
    published_support
    assign_sums,        the numerics of a noisy k-means: a bounded sum per step, to which a
    centres_from_sums   mechanism adds noise, and centres from what it released

`support=` of a `SupportSearch` takes the points. Local clusters are sent to the server in clear. A
cluster of one point *is* that point, and with as many clusters as points Algorithm 1 sends all raw
inputs: `local_clustering` warns of the former. Encrypting the summaries afterwards does not take
that back.

One step of the noisy k-means: with :math:`\bar x` the middle of the public box and `h` the vector
of its half widths, a point adds :math:`(1, x - \bar x)` to the count and sum of the nearest cell,
a vector of norm at most :math:`\sqrt{1 + \|h\|^2}`. That is the L2 sensitivity of all counts and
sums together under zero-out; under replacement it is
:math:`\max(\sqrt{2 (1 + \|h\|^2)}, 2 \|h\|)`.

.. [Arthur2007] D. Arthur, S. Vassilvitskii. k-means++: the advantages of careful seeding. SODA
   2007.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from botorch_fed.models.numerics import as_double, check_finite
from botorch_fed.models.support import _box
from botorch_fed.rng import Generator

MAX_ITERATIONS = 100
TOLERANCE = 1e-6


class RawInputWarning(UserWarning):
    """Cluster centres that are about to be sent are raw inputs."""


# ------------------------------------------------------------------ Algorithm 1


@dataclass(frozen=True, eq=False)
class Clustering:
    r"""A clustering of points.

    Attributes:
        centres: A `k x d` tensor of the clusters' means.
        sizes: A `k` tensor of the number of points in each cluster.
        costs: Sum of squared distances to the nearest centre before each move of the centres, and
            at last; never increasing.
        converged: Whether the centres stood still before the iterations were used up.
    """

    centres: Tensor
    sizes: Tensor
    costs: tuple[float, ...]
    converged: bool

    @property
    def cost(self) -> float:
        """The sum of squared distances to the nearest centre."""
        return self.costs[-1]


def local_clustering(
    X: Tensor,
    k: int,
    *,
    generator: Generator,
    max_iterations: int = MAX_ITERATIONS,
    tol: float = TOLERANCE,
) -> Clustering:
    r"""An agent's clusters: k-means++ seeding [Arthur2007]_, then Lloyd's iteration.

    **The centres leak.** A cluster of one point is that point, with `k = n` all inputs are sent
    raw, and a mean of few inputs is little better. For replication of Algorithm 1: prefer
    `sobol_support`, or a k-means with noise.

    Args:
        X: An `n x d` tensor of the agent's inputs.
        k: The number of clusters, at most `n`.
        generator: The stream of random numbers of the seeding.
        max_iterations: :math:`T_{max}`.
        tol: :math:`\epsilon`: the iteration stops when no centre moves farther.

    Warns:
        RawInputWarning: If a cluster consists of one point.
    """
    X = _checked_points(X, "X")
    _check_count(k, len(X), "points")
    clusters = _lloyd(X, _seeded(X, k, generator), max_iterations, tol)
    single = int((clusters.sizes == 1).sum())
    if single:
        warnings.warn(
            f"{single} of {k} cluster centres are raw inputs, out of {len(X)}: whoever receives "
            "them knows these inputs exactly. Use a public support set such as sobol_support.",
            RawInputWarning,
            stacklevel=2,
        )
    return clusters


def global_clustering(
    parts: Sequence[Tensor],
    k: int,
    *,
    generator: Generator,
    max_iterations: int = MAX_ITERATIONS,
    tol: float = TOLERANCE,
) -> Clustering:
    r"""The server's clusters of all agents' centres: the second half of Algorithm 1.

    It begins with the centres of one agent, drawn at random, adds the centre that is farthest from
    those it has until there are `k`, and ends with k-means of all centres, each with the weight
    one whatever its cluster's size. Whoever runs this sees all local centres; see
    `local_clustering`.

    Args:
        parts: The centres of every agent, `k_i x d` tensors with at most `k` rows.
        k: The size of the support set, at most the number of all centres.
        generator: The stream of random numbers, which draws the agent.
        max_iterations: The most iterations.
        tol: The iteration stops when no centre moves farther.
    """
    checked = [_checked_points(part, "parts") for part in parts]
    _check_count(k, sum(map(len, checked)), "centres")
    largest = max(map(len, checked))
    if largest > k:
        raise InputDataError(
            f"An agent sent {largest} centres for a support set of {k}: an agent makes at most as "
            "many clusters as the support set has points."
        )
    X = torch.cat(checked)
    drawn = min(int(float(generator.uniform(1)) * len(checked)), len(checked) - 1)
    chosen = checked[drawn]
    while len(chosen) < k:
        farthest = int(_distances(X, chosen).amin(dim=-1).argmax())
        chosen = torch.cat([chosen, X[farthest : farthest + 1]])
    return _lloyd(X, chosen, max_iterations, tol)


def published_support(
    inputs: Sequence[Tensor], size: int, *, clusters: int, streams: Sequence[Generator]
) -> Tensor:
    """Algorithm 1, both halves: the support set of the agents' inputs, `size x d`.

    Args:
        inputs: The inputs of every agent, `n_i x d` tensors.
        size: The size of the support set. If there are fewer centres, all of them are it.
        clusters: How many clusters an agent makes, at most its number of points.
        streams: Random numbers of every agent, and at last of the server.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RawInputWarning)  # it does reveal them
        parts = [
            local_clustering(X, min(clusters, len(X)), generator=stream).centres
            for X, stream in zip(inputs, streams[:-1], strict=True)
        ]
    count = sum(map(len, parts))
    return global_clustering(parts, min(size, count), generator=streams[-1]).centres


def _lloyd(X: Tensor, centres: Tensor, max_iterations: int, tol: float) -> Clustering:
    """k-means from given centres."""
    if max_iterations < 1 or not tol >= 0:
        raise InputDataError(
            f"max_iterations must be positive and tol not negative, got {max_iterations} and {tol}."
        )
    costs: list[float] = []
    moved = math.inf
    while True:
        distances, labels = _distances(X, centres).min(dim=-1)
        costs.append(float(distances.square().sum()))
        sizes = torch.bincount(labels, minlength=len(centres)).double()
        if moved <= tol or len(costs) > max_iterations:
            return Clustering(centres, sizes, tuple(costs), moved <= tol)
        # Relative to the old centre: a cluster of one point has that point, to the last bit. An
        # empty one keeps its centre.
        steps = torch.zeros_like(centres).index_add_(0, labels, X - centres[labels])
        steps = steps / sizes.clamp_min(1)[:, None]
        centres = centres + steps
        moved = float(steps.norm(dim=-1).max())


def _seeded(X: Tensor, k: int, stream: Generator) -> Tensor:
    """Centres chosen with probability proportional to squared distance."""
    chosen: list[int] = []
    left = torch.ones(len(X), dtype=torch.bool)
    mass = torch.ones(len(X), dtype=torch.float64)
    for u in stream.uniform(k).tolist():
        if float(mass.sum()) == 0:  # only copies of the chosen are left
            mass = left.double()
        total = mass.cumsum(dim=0)
        index = min(int(torch.searchsorted(total, u * float(total[-1]), right=True)), len(X) - 1)
        index = int(mass[: index + 1].nonzero()[-1])  # rounding must not choose a mass of zero
        chosen.append(index)
        left[index] = False
        mass = _distances(X, X[chosen]).amin(dim=-1).square()
    return X[chosen]


def _distances(X: Tensor, centres: Tensor) -> Tensor:
    """Euclidean distances `n x k`, zero exactly where points are equal."""
    return torch.cdist(X, centres, compute_mode="donot_use_mm_for_euclid_dist")


# ------------------------------------------------------------------ k-means with noise


def assign_sums(
    X: Tensor, centres: Tensor, *, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Per cell, the sum of clipped points about the middle of the box, and their number.

    The data part of one step of k-means; nothing here is private before noise is added. The L2
    sensitivity stands in the module's docstring.

    Args:
        X: An `n x d` tensor of points; clipped to the bounds.
        centres: A `k x d` tensor: a point belongs to the nearest, the first of equally near ones.
        bounds: A public `2 x d` tensor of bounds; default the unit cube.

    Returns:
        A `k x d` tensor of sums of :math:`x - \bar x`, and a `k` tensor of counts, float64.
    """
    centres = _checked_points(centres, "centres")
    X = as_double(X, "X")
    if X.dim() != 2 or X.shape[-1] != centres.shape[-1]:
        raise BotorchTensorDimensionError(
            f"X must be `n x {centres.shape[-1]}` as the centres, got shape {tuple(X.shape)}."
        )
    check_finite(X, "X")  # before clipping: NaN passes through it
    lower, upper = _box(centres.shape[-1], bounds)
    clipped = X.clamp(lower, upper)
    labels = _distances(clipped, centres).argmin(dim=-1)
    offsets = clipped - (lower + upper) / 2
    sums = torch.zeros_like(centres).index_add_(0, labels, offsets)
    return sums, torch.bincount(labels, minlength=len(centres)).double()


def centres_from_sums(
    sums: Tensor,
    counts: Tensor,
    previous: Tensor,
    *,
    bounds: Tensor | None = None,
    min_count: float = 1.0,
) -> Tensor:
    r"""New centres from noisy sums and counts; post-processing of what was released.

    A cell whose noisy count is below `min_count`, perhaps negative, keeps its centre; centres
    outside the bounds are clipped to them.

    Args:
        sums: A `k x d` tensor of noisy sums, as of `assign_sums`.
        counts: A `k` tensor of noisy counts.
        previous: A `k x d` tensor of the centres they were assigned to.
        bounds: The bounds of `assign_sums`; default the unit cube.
        min_count: The least count that is believed, positive: several standard deviations of the
            noise.
    """
    previous = _checked_points(previous, "previous")
    sums, counts = as_double(sums, "sums"), as_double(counts, "counts")
    if sums.shape != previous.shape or counts.shape != previous.shape[:1]:
        raise BotorchTensorDimensionError(
            f"sums and counts must have shapes {tuple(previous.shape)} and ({len(previous)},), got "
            f"{tuple(sums.shape)} and {tuple(counts.shape)}."
        )
    check_finite(sums, "sums")
    check_finite(counts, "counts")
    if not 0 < min_count < math.inf:
        raise InputDataError(f"min_count must be positive, got {min_count}.")
    lower, upper = _box(previous.shape[-1], bounds)
    believed = counts >= min_count
    means = (lower + upper) / 2 + sums / torch.where(believed, counts, 1.0)[:, None]
    return torch.where(believed[:, None], means, previous).clamp(lower, upper)


# ------------------------------------------------------------------ checks


def _checked_points(X: Tensor, name: str) -> Tensor:
    X = as_double(X, name)
    if X.dim() != 2 or 0 in X.shape:
        raise BotorchTensorDimensionError(
            f"{name} must be `n x d` with n, d > 0, got shape {tuple(X.shape)}."
        )
    check_finite(X, name)
    return X.detach()


def _check_count(k: int, available: int, what: str) -> None:
    if not 1 <= k <= available:
        raise InputDataError(f"Cannot make {k} clusters of {available} {what}.")
