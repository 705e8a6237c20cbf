r"""FBO-FedGP as published: Algorithm 1, and Algorithm 2 with one client after the other.

Before the rounds, Algorithm 1 makes the support set `S` of the clients' first inputs
(`published_support`). In every round the clients take turns. Client `i` flips its own coin: with
probability :math:`p_t^{(i)} = 1 - t^{-c_i}` it uses its local sparse process, else all clients'
summaries of what they have by then are summed and opened, and it uses the new global process. It
evaluates the largest upper confidence bound :math:`\mu + \sqrt{\beta_t} \sigma`, and its next
summary has the observation. Both processes are dPITC's on `S`, the local one that of the client's
own summary alone.

Sums are formed in the clear: encryption changes nothing but times. With ``sequential=False`` the
clients of a round share the sum of what they had before it, and nothing else changes.

What the paper leaves unstated, or is stated only where we cannot read it:

- kernel, length scale, noise variance and scale of outcomes: squared exponential on the unit cube
  with the prior variance one, the public scale of `SearchSpace.outcome`; the others are settings;
- :math:`|S|` of Table 1, and k(i), the number of a client's clusters: settings; T_max and
  :math:`\epsilon` of the k-means are those of `published_support`, whose local half is seeded by
  k-means++. `S` is made once;
- :math:`\beta_t`. The paper's Lemma 6 is a bound of [Srinivas2012]_, and its text is in none of our
  sources. ``beta=None`` is that of a finite domain,
  :math:`\beta_t = 2 \ln(|D| \pi^2 t^2 / (6 \delta))`, `D` being the points that the optimiser looks
  at: the smallest that [Srinivas2012]_ has. A number is a constant;
- whether :math:`c_i` differs between clients: the experiments have ½ throughout;
- :math:`p_1`: as printed it is 0, so that all steps of the first round are global;
- the optimiser: the best of `num_raw` uniform points are improved by L-BFGS-B, and points within
  1e-3 of the client's earlier ones are left out, as in the simultaneous search;
- whether a local step uses the summary or an exact process: "sparse" is read as the former;
- noise in the conditional block :math:`\Sigma_{DD|S}`: included. Without it the block is singular
  for data in the support set, which Algorithm 1 makes.

.. [Srinivas2012] N. Srinivas, A. Krause, S. Kakade, M. Seeger. Information-theoretic regret bounds
   for Gaussian process optimization in the bandit setting. IEEE Transactions on Information Theory
   58, 2012.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from benchmarks.papers.published.support import published_support
from botorch_fed.models import InducingFeatures, StationaryKernel, Summary
from botorch_fed.models.summary import LocalBlock
from botorch_fed.models.support import sobol_support
from botorch_fed.rng import generator
from botorch_fed.space import SearchSpace

Array = NDArray[np.float64]
Objective = Callable[[Tensor], Tensor]
JITTER = 1e-8  # of the support set's kernel matrix
MIN_DISTANCE = 1e-3
SMALLEST_VARIANCE = 1e-12
MAX_ITERATIONS = 30


@dataclass(frozen=True, kw_only=True)
class PaperFedGP:
    r"""Settings of Algorithms 1 and 2.

    Attributes:
        support_size: :math:`|S|`.
        clusters: :math:`k^{(i)}`, how many centres a client sends.
        lengthscale: Of the squared-exponential kernel on the unit cube, in every dimension.
        noise_var: Noise variance, on the public scale of outcomes.
        beta: :math:`\beta_t`, a constant; None for that of the finite domain.
        delta: :math:`\delta` of the latter.
        decays: :math:`c_i` of every client, or one for all.
        sequential: Whether a client's step sees the earlier ones of the same round.
        support: Whether the support set is that of Algorithm 1, or public Sobol points.
        local: Whether a local step has the sparse process, or the exact one of the client's data.
        num_raw: Random points that the optimiser looks at.
        num_restarts: How many of the best of them it improves.
    """

    support_size: int = 16
    clusters: int = 2
    lengthscale: float = 0.5
    noise_var: float = 1e-3
    beta: float | None = 1.0
    delta: float = 0.1
    decays: tuple[float, ...] = (0.5,)
    sequential: bool = True
    support: Literal["algorithm 1", "sobol"] = "algorithm 1"
    local: Literal["sparse", "exact"] = "sparse"
    num_raw: int = 256
    num_restarts: int = 3

    def __post_init__(self) -> None:
        for name in ("lengthscale", "noise_var", "delta"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputDataError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.beta is not None and not 0 <= self.beta < math.inf:
            raise InputDataError(f"beta is not negative, or None, got {self.beta}.")
        for name, known in (("support", ("algorithm 1", "sobol")), ("local", ("sparse", "exact"))):
            if getattr(self, name) not in known:
                raise InputDataError(f"{name} is one of {known}, got {getattr(self, name)!r}.")
        if not self.decays or not all(0 < c <= 1 for c in self.decays):
            raise InputDataError(f"decays must lie in (0, 1], got {self.decays}.")
        if min(self.support_size, self.clusters) < 1 or self.clusters > self.support_size:
            raise InputDataError(
                f"Expected 1 <= clusters <= support_size, got {self.clusters} and "
                f"{self.support_size}."
            )
        if not 1 <= self.num_restarts <= self.num_raw:
            raise InputDataError(
                f"Expected 1 <= num_restarts <= num_raw, got {self.num_restarts} and "
                f"{self.num_raw}."
            )

    def own(self, t: int, client: int) -> float:
        """:math:`p_t^{(i)}`, the probability of a local step in round `t >= 1`."""
        decay = self.decays[client] if len(self.decays) > 1 else self.decays[0]
        return 1 - float(t) ** -decay

    def width(self, t: int) -> float:
        r""":math:`\sqrt{\beta_t}`."""
        beta = self.beta
        if beta is None:
            beta = 2 * math.log(self.num_raw * (math.pi * t) ** 2 / (6 * self.delta))
        return math.sqrt(beta)


@dataclass(frozen=True, eq=False)
class Posterior:
    r"""A posterior in numbers that a step can afford.

    With :math:`\phi = L^{-1} k(Z, x)` the mean is :math:`\phi^\top w` and the variance
    :math:`1 - \phi^\top A \phi`.

    Attributes:
        points: `Z`, `k x d`.
        precision: Inverse squares of the length scales, `d`.
        whiten: :math:`L^{-1}`, `k x k`.
        weights: `w`, `k`.
        gain: `A`, `k x k`.
    """

    points: Array
    precision: Array
    whiten: Array
    weights: Array
    gain: Array

    @classmethod
    def sparse(cls, basis: InducingFeatures, total: Summary) -> Posterior:
        r"""dPITC's by a total of summaries: :math:`w = B^{-1} b`, :math:`A = I - B^{-1}`."""
        eye = np.eye(basis.num_features)
        root = np.linalg.inv(np.linalg.cholesky(eye + total.gram.numpy()))
        return cls(
            basis.inducing_points.numpy(),
            1 / basis.kernel.lengthscale.numpy() ** 2,
            np.linalg.inv(basis.chol.numpy()),
            root.T @ (root @ total.moment.numpy()[:, 0]),
            eye - root.T @ root,
        )

    @classmethod
    def exact(cls, kernel: StationaryKernel, X: Tensor, Y: Tensor, noise_var: float) -> Posterior:
        """The exact one of `n x d` points and `n x 1` outcomes."""
        eye = np.eye(len(X))
        whiten = np.linalg.inv(np.linalg.cholesky(kernel(X).numpy() + noise_var * eye))
        precision = 1 / kernel.lengthscale.numpy() ** 2
        return cls(X.numpy(), precision, whiten, whiten @ Y.numpy()[:, 0], eye)

    def bound(self, X: Array, width: float) -> tuple[Array, Array]:
        r""":math:`\mu + w \sigma` at `n x d` points, `n`, and its gradients, `n x d`."""
        scaled = self.points * self.precision
        squares = (X**2) @ self.precision
        squares = squares[:, None] - 2 * X @ scaled.T + (self.points * scaled).sum(axis=1)
        cross = np.exp(-0.5 * squares)
        features = cross @ self.whiten.T
        explained = features @ self.gain
        variance = 1 - (explained * features).sum(axis=1)
        deviation = np.sqrt(np.maximum(variance, SMALLEST_VARIANCE))
        slope = np.where(variance > SMALLEST_VARIANCE, width / deviation, 0.0)
        inner = (self.weights - slope[:, None] * explained) @ self.whiten * cross
        gradient = inner @ scaled - inner.sum(axis=1)[:, None] * X * self.precision
        return features @ self.weights + width * deviation, gradient


@dataclass(frozen=True, eq=False)
class Trace:
    """A run.

    Attributes:
        X: Points, `M x T x d`.
        Y: Outcomes as measured, `M x T`.
        support: The support set.
        sums: How many were opened: one for every global step, or one for every round with such if
            clients are not sequential.
        shared: Which steps were global, `M x T`.
    """

    X: Tensor
    Y: Tensor
    support: Tensor
    sums: int
    shared: Tensor


def optimise(
    settings: PaperFedGP,
    objectives: Sequence[Objective],
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    space: SearchSpace,
    rounds: int,
    seed: int,
    candidates: Tensor | None = None,
) -> Trace:
    """Run both algorithms.

    Args:
        settings: Theirs.
        objectives: Of every client, from `1 x d` points of the unit cube to `1 x 1` outcomes.
        data: Every client's first points, `n x d`, and outcomes, `n x 1`, one at least.
        space: The map of outcomes.
        rounds: :math:`T`.
        seed: Of all random numbers.
        candidates: The only points that can be evaluated, if not all of the cube can.
    """
    if len(objectives) != len(data) or not data:
        raise InputDataError(f"{len(objectives)} objectives have {len(data)} sets of first points.")
    count, dim = len(data), data[0][0].shape[-1]
    if len(settings.decays) not in (1, count):
        raise InputDataError(f"decays are one for all or {count}, got {len(settings.decays)}.")
    support = support_of(settings, [X for X, _ in data], seed=seed)
    kernel = kernel_of(settings, dim)
    basis = InducingFeatures(kernel, support, jitter=JITTER)
    noise_var = settings.noise_var
    public = [space.to_public(Y) for _, Y in data]
    blocks = [
        LocalBlock.from_data(basis, X, Y, noise_var=noise_var)
        for (X, _), Y in zip(data, public, strict=True)
    ]
    points = torch.empty(count, rounds, dim, dtype=torch.float64)
    outcomes = torch.empty(count, rounds, dtype=torch.float64)
    shared = torch.zeros(count, rounds, dtype=torch.bool)
    for t in range(1, rounds + 1):
        before = total(blocks)
        for i, objective in enumerate(objectives):
            block = blocks[i]
            local = float(generator(seed, "coin", t, i).uniform(1)) < settings.own(t, i)
            shared[i, t - 1] = not local
            if local and settings.local == "exact":
                posterior = Posterior.exact(kernel, block.X, public[i], noise_var)
            elif local:
                posterior = Posterior.sparse(basis, block.summary)
            else:
                opened = total(blocks) if settings.sequential else before
                posterior = Posterior.sparse(basis, opened)
            x = next_point(
                settings,
                posterior,
                block.X,
                width=settings.width(t),
                raw=generator(seed, "query", t, i).uniform(settings.num_raw, dim),
                candidates=candidates,
            )
            y = objective(x).reshape(1, 1)
            points[i, t - 1], outcomes[i, t - 1] = x[0], y[0, 0]
            blocks[i] = block.extend(x, space.to_public(y), noise_var=noise_var)
            public[i] = torch.cat([public[i], space.to_public(y)])
    sums = int(shared.sum() if settings.sequential else shared.any(dim=0).sum())
    return Trace(points, outcomes, support, sums, shared)


def approximation_error(
    settings: PaperFedGP,
    trace: Trace,
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    space: SearchSpace,
    points: Tensor,
) -> tuple[float, float]:
    r""":math:`\hat\Delta(|S|)` of Assumption 1 as measured at the end of a run.

    The assumption bounds how far the sparse process is from the exact one of the same data by some
    constant that falls with :math:`|S|`. Here it is the largest difference on a list of points.

    Args:
        settings: Of the run.
        trace: The run.
        data: Every client's first points and outcomes.
        space: The map of outcomes.
        points: Where to compare, `K x d`.

    Returns:
        Of means and of deviations, on the public scale of outcomes.
    """
    inputs = [torch.cat([X, after]) for (X, _), after in zip(data, trace.X, strict=True)]
    outcomes = [
        space.to_public(torch.cat([Y, after[:, None]]))
        for (_, Y), after in zip(data, trace.Y, strict=True)
    ]
    kernel = kernel_of(settings, points.shape[-1])
    basis = InducingFeatures(kernel, trace.support, jitter=JITTER)
    blocks = [
        LocalBlock.from_data(basis, X, Y, noise_var=settings.noise_var)
        for X, Y in zip(inputs, outcomes, strict=True)
    ]
    exact = Posterior.exact(kernel, torch.cat(inputs), torch.cat(outcomes), settings.noise_var)
    sparse = Posterior.sparse(basis, total(blocks))
    gaps = [
        exact.bound(points.numpy(), width)[0] - sparse.bound(points.numpy(), width)[0]
        for width in (0.0, 1.0)
    ]
    return float(np.abs(gaps[0]).max()), float(np.abs(gaps[1] - gaps[0]).max())


def kernel_of(settings: PaperFedGP, dim: int) -> StationaryKernel:
    """The squared-exponential kernel."""
    lengthscale = torch.full((dim,), settings.lengthscale, dtype=torch.float64)
    return StationaryKernel(math.inf, lengthscale, 1.0)


def support_of(settings: PaperFedGP, inputs: Sequence[Tensor], *, seed: int) -> Tensor:
    """The support set, `S x d`."""
    if settings.support == "sobol":
        return sobol_support(inputs[0].shape[-1], settings.support_size)
    streams = [generator(seed, "clusters", i) for i in range(len(inputs))]
    return published_support(
        inputs,
        settings.support_size,
        clusters=settings.clusters,
        streams=[*streams, generator(seed, "clusters", "server")],
    )


def total(blocks: Sequence[LocalBlock]) -> Summary:
    """The sum of the clients' summaries, as it is opened."""
    return sum((block.summary for block in blocks[1:]), blocks[0].summary)


def next_point(
    settings: PaperFedGP,
    posterior: Posterior,
    tried: Tensor,
    *,
    width: float,
    raw: Tensor,
    candidates: Tensor | None = None,
) -> Tensor:
    """Where the upper confidence bound is largest, `1 x d`."""
    points: Array = (raw if candidates is None else candidates.double()).numpy()
    values = posterior.bound(points, width)[0]
    if candidates is None:
        starts = points[np.argsort(-values, kind="stable")[: settings.num_restarts]]
        ends = _ascended(posterior, starts, width, unit=float(values.std()) or 1.0)
        points = np.concatenate([ends, points])
        values = np.concatenate([posterior.bound(ends, width)[0], values])
    near = torch.cdist(torch.from_numpy(points), tried).amin(dim=-1).numpy() < MIN_DISTANCE
    if not near.all():
        values = np.where(near, -np.inf, values)
    best = int(values.argmax())
    return torch.from_numpy(points[best : best + 1].copy())


def _ascended(posterior: Posterior, starts: Array, width: float, *, unit: float) -> Array:
    """Points improved by one L-BFGS-B on the sum of their bounds, in units of that size."""

    def loss(flat: Array) -> tuple[float, Array]:
        value, gradient = posterior.bound(flat.reshape(starts.shape), width)
        return -float(value.sum()) / unit, -gradient.ravel() / unit

    fit = minimize(
        loss,
        starts.ravel(),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1.0)] * starts.size,
        options={"maxiter": MAX_ITERATIONS},
    )
    found: Array = fit.x.reshape(starts.shape)
    return found
