r"""Federated Thompson sampling with distributed exploration [Dai2021]_: the sites' side.

Every site belongs to a region of the space and explores it first. A release has one function for
each region; a site follows their pieces as one function, in its first queries or by a coin, and is
alone otherwise. By default a message is a *gain*, the site's expected improvement, so that what
is followed is the optimum of a sum of expected improvements.

::

    kind        M numbers over the shared basis
    "gain"      expected improvement under the own model, scaled to the clip norm
    "mean"      the mean of the weights' posterior
    "sample"    a sample of them, as published

References:
    * [Dai2021]_ Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
      optimization with distributed exploration. NeurIPS 2021. https://arxiv.org/abs/2110.14153
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from botorch.exceptions.errors import InputDataError
from botorch.models import SingleTaskGP
from torch import Tensor

from botorch_fed.acquisition import Partition, ThompsonSampling, weight_path
from botorch_fed.acquisition.optimize import maximize
from botorch_fed.federation.points import untried
from botorch_fed.federation.terms import OWN, Terms, View, remembered
from botorch_fed.models import FeatureMap, OwnHyperparameters
from botorch_fed.models.numerics import cholesky
from botorch_fed.rng import Generator, generator
from botorch_fed.search.local import OwnStrategy, random_point
from botorch_fed.search.messages import NOISE_VAR, weight_message
from botorch_fed.search.noisy import VectorSearch, check_norm
from botorch_fed.search.releases import Noisy
from botorch_fed.search.transfer import reference_points
from botorch_fed.space import SearchSpace

REDRAWS = 100  # of first points that snapping moved out of their region
RIDGE = 1e-3  # of the projection of a gain
ReleaseKind = Literal["gain", "mean", "sample"]
_SAID: dict[str, str] = {
    "gain": "the expected improvement under its own model",
    "mean": "the mean of a model over the shared basis",
    "sample": "a sample of a model over the shared basis",
}


# ------------------------------------------------------------------ strategies


@dataclass(frozen=True, kw_only=True)
class Following(OwnStrategy):
    r"""How a site uses releases and its own data: the site's own business.

    The first `follow` queries after the start go where the newest release is largest. From then on
    a coin with probability :math:`p_t` decides between an own step and the release.

    Attributes:
        follow: How many queries follow the releases.
        spread: How far they stay from each other, in the unit cube.
    """

    follow: int = 6
    spread: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow < 0:
            raise InputDataError(f"follow counts from 0, got {self.follow}.")
        if not 0 <= self.spread < 1:
            raise InputDataError(f"spread must lie in [0, 1), got {self.spread}.")


# ------------------------------------------------------------------ messages


@dataclass(frozen=True)
class ReleaseMessage:
    r"""A kind of message for a weighted sum, in public.

    Attributes:
        kind: See the module.
        clip_norm: The bound on its norm, which a gain fills; default 1 for a gain, and
            `suggested_clip_norm` for others.
        noise_var: :math:`\sigma^2` of the model that means and samples are made with, on the public
            scale.
        beta: :math:`\beta_t`: scales the deviation of a sample from the mean.
        ridge: :math:`\lambda` of a gain's projection on the basis: larger keeps what the basis
            resolves badly out of a message.
    """

    kind: ReleaseKind = "gain"
    clip_norm: float | None = None
    noise_var: float = NOISE_VAR
    beta: float = 1.0
    ridge: float = RIDGE

    def __post_init__(self) -> None:
        if self.clip_norm is not None:
            check_norm(self.clip_norm)
        if not (1e-12 <= self.noise_var <= 1e6 and 0 <= self.beta <= 1e3):
            raise InputDataError(
                "noise_var must lie between 1e-12 and 1e6 and beta between 0 and 1,000, got "
                f"{self.noise_var} and {self.beta}."
            )
        if not 1e-9 <= self.ridge <= 1e9:
            raise InputDataError(f"ridge must lie between 1e-9 and 1e9, got {self.ridge}.")

    def norm(self, terms: Terms) -> float:
        """The norm that messages are clipped to."""
        if self.clip_norm is not None:
            return self.clip_norm
        return remembered(
            (self, terms.basis, terms.num_initial),
            lambda: suggested_clip_norm(terms.feature_map, self, terms.num_initial),
        )

    def make(
        self, feature_map: FeatureMap, X: Tensor, Y: Tensor, *, generator: Generator
    ) -> Tensor:
        """A mean or a sample, `M` weights.

        Args:
            feature_map: The shared basis.
            X: Own points, `n x d`.
            Y: Own outcomes on the public scale, `n x 1`.
            generator: The site's own stream, for samples.
        """
        assert self.kind != "gain"  # which is of a model, see `gain_message`
        return weight_message(
            self.kind,
            feature_map,
            X,
            Y,
            noise_var=self.noise_var,
            beta=self.beta,
            generator=generator,
        )


def suggested_clip_norm(
    feature_map: FeatureMap,
    message: ReleaseMessage,
    num_observations: int,
    *,
    quantile: float = 0.99,
) -> float:
    """A clip norm from public quantities alone: messages of sites drawn from the public prior.

    Args:
        feature_map: The shared basis.
        message: What sites send.
        num_observations: How many observations a simulated site has, at uniform points.
        quantile: The share of simulated messages that are not clipped.
    """
    if message.kind == "gain":
        return 1.0
    stream = generator(0, "clip norm")
    norms = []
    for _ in range(200):
        X = stream.uniform(max(num_observations, 1), feature_map.input_dim)
        truth = stream.normal(feature_map.num_features, 1)
        Y = feature_map(X) @ truth + message.noise_var**0.5 * stream.normal(len(X), 1)
        norms.append(float(message.make(feature_map, X, Y, generator=stream).norm()))
    return float(torch.tensor(norms).double().quantile(quantile))


def gain_message(
    feature_map: FeatureMap, model: SingleTaskGP, tried: Tensor, *, ridge: float, norm: float
) -> Tensor:
    r"""A site's expected improvement as a function on the shared basis, of a given norm.

    The weights solve :math:`\min_w \frac1R \sum_r (\phi(x_r)^\top w - g(x_r))^2 + \lambda \|w\|^2`
    over public points :math:`x_r`, and are scaled: every site counts alike, however much it hopes
    to improve.

    Args:
        feature_map: The shared basis.
        model: The site's own Gaussian process.
        tried: Points it has tried, `n x d`.
        ridge: :math:`\lambda`.
        norm: Of the message.
    """
    reference, projection = gain_projection(feature_map, ridge)
    with torch.no_grad():
        best = model.posterior(tried).mean.max()
        posterior = model.posterior(reference)
        mean, std = posterior.mean.squeeze(-1), posterior.variance.squeeze(-1).sqrt()
    weights = projection @ expected_gain(mean, std, best)
    size = weights.norm()
    if not bool(size > 0):  # nothing to gain anywhere
        return torch.zeros_like(weights)
    return weights * (norm / size)


def expected_gain(mean: Tensor, std: Tensor, best: Tensor) -> Tensor:
    r"""Expected improvement over `best`: :math:`\sigma (u \Phi(u) + \varphi(u))`."""
    std = std.clamp_min(1e-12)
    u = (mean - best) / std
    density = torch.exp(-u.square() / 2) / math.sqrt(2 * math.pi)
    return std * (u * torch.special.ndtr(u) + density)


@lru_cache(maxsize=16)
def gain_projection(feature_map: FeatureMap, ridge: float) -> tuple[Tensor, Tensor]:
    """Reference points `R x d`, and the matrix `M x R` from values there to weights."""
    reference = reference_points(feature_map.input_dim)
    Phi = feature_map(reference)
    gram = Phi.mT @ Phi / len(Phi) + ridge * torch.eye(Phi.shape[-1]).double()
    factor = cholesky(gram, "the projection on the shared basis")
    return reference, torch.cholesky_solve(Phi.mT / len(Phi), factor)


# ------------------------------------------------------------------ regions


@lru_cache(maxsize=16)
def regions_of(num_regions: int, dim: int) -> Partition:
    """The regions: public, and the same for all sites of a process."""
    return Partition.regular(num_regions, dim)


def uniform_in(
    space: SearchSpace, partition: Partition, region: int, count: int, stream: Generator
) -> Tensor:
    """Random points of a region that can be evaluated, `count x d`.

    Integers and choices lie on a grid: what snapping moves to a neighbour is drawn again. A region
    without any such point is left for the nearest ones.

    Args:
        space: The map of inputs.
        partition: The regions.
        region: One of them.
        count: How many points.
        stream: The site's own random numbers.
    """
    points = torch.zeros(count, space.dim).double()
    outside = torch.ones(count, dtype=torch.bool)
    for _ in range(REDRAWS):
        fresh = stream.uniform(int(outside.sum()), space.dim)
        points[outside] = space.snap(partition.to_region(region, fresh))
        outside = partition.region_of(points) != region
        if not bool(outside.any()):
            break
    return points


def candidates_in(
    candidates: Tensor, partition: Partition, region: int, count: int, stream: Generator
) -> Tensor:
    """Random candidates of a region, `count x d`; of all where it has none.

    Args:
        candidates: The only points that can be evaluated, `K x d`.
        partition: The regions.
        region: One of them.
        count: How many points: again from the first if there are fewer.
        stream: The site's own random numbers.
    """
    inside = candidates[partition.region_of(candidates) == region]
    pool = inside if len(inside) else candidates
    order = stream.uniform(len(pool)).argsort(stable=True)
    return pool[order.repeat(-(-count // len(pool)))[:count]].double()


# ------------------------------------------------------------------ the search


@dataclass(frozen=True, eq=False)
class ReleaseMemory:
    """What a site remembers: the hyperparameters of its own model."""

    own: OwnHyperparameters | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class ReleaseSearch(VectorSearch):
    """Own steps, and steps where the newest release is largest.

    Attributes:
        messages: The kind of message.
        num_regions: The number `P` of regions; 1 is DP-FTS.
        strategy: How a site uses releases and data.
    """

    messages: ReleaseMessage = ReleaseMessage()
    num_regions: int = 1
    strategy: Following = field(default=Following(), metadata=OWN)

    memory_type = ReleaseMemory
    begins_anyway = True  # every site explores its region

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` for gains without an own model, where anything is released."""
        super().check_terms(terms)
        regions_of(self.num_regions, terms.space.dim)  # refuses numbers that make no regions
        sends = getattr(terms.aggregation, "releases", None) != ()
        if sends and self.messages.kind == "gain" and self.strategy.own == "random":
            raise InputDataError('Gains need an own model: own must not be "random".')

    @property
    def adds(self) -> str:  # type: ignore[override]
        """What a message is, in words."""
        return _SAID[self.messages.kind]

    def norm(self, terms: Terms) -> float:
        """That of its messages."""
        return self.messages.norm(terms)

    # -------------------------------------------------------------- what it remembers and says

    def start(self, view: View) -> ReleaseMemory:
        """No model was fitted."""
        return ReleaseMemory(None)

    def told(self, view: View) -> ReleaseMemory:
        """New hyperparameters, where the data ask for them."""
        own = self.strategy.refit(
            view.terms.space, view.X, view.Y, view.memory.own, seed=view.seed, name=view.name
        )
        return ReleaseMemory(own)

    def message(self, view: View) -> Tensor | None:
        """A function of all data of the site."""
        phi, own = view.terms.feature_map, view.memory.own
        if self.messages.kind != "gain":
            stream = view.stream("message", view.n - view.first)
            return self.messages.make(phi, view.X, view.Y, generator=stream)
        if own is None:
            return None
        model = self.strategy.model(view.terms.space, view.X, view.Y, own)
        ridge, norm = self.messages.ridge, self.norm(view.terms)
        return gain_message(phi, model, view.X, ridge=ridge, norm=norm)

    # -------------------------------------------------------------- where the next point comes from

    def has_messages(self, view: View) -> bool:
        """A site never waits for a release: without one its own steps are random."""
        return True

    def first(self, view: View, count: int) -> Tensor:
        """Random points of the site's region."""
        partition = regions_of(self.num_regions, view.terms.space.dim)
        index = view.terms.agents.index(view.name)
        region = partition.assign(len(view.terms.agents))[index]
        stream, count = view.stream("initial"), view.n + count
        if view.candidates is None:
            points = uniform_in(view.terms.space, partition, region, count, stream)
        else:
            points = candidates_in(view.candidates, partition, region, count, stream)
        return points[view.n :]

    def point(self, view: View) -> Tensor:
        """The next point, `1 x d`."""
        strategy, t, own = self.strategy, view.n - view.first + 1, view.memory.own
        stream = view.stream("point", t)
        if view.release is not None and t <= strategy.follow:
            # Several queries may follow one release: each looks at another part of it.
            return self._released_point(view, stream, strategy.spread)
        coin = float(view.stream("coin", t).uniform(1))
        if view.release is not None and coin >= strategy.schedule(t):
            return self._released_point(view, stream, 0.0)
        candidates = self._candidates(view, 0.0)
        if own is None or strategy.own == "random":
            return random_point(view.terms.space, candidates, stream, view.failed)
        model = strategy.model(view.terms.space, view.X, view.Y, own)
        return strategy.maximizer(
            strategy.acquisition(model, view.X, view.chosen, stream),
            view.terms.space,
            torch.cat([view.X, view.chosen]),
            candidates=candidates,
            stream=stream,
            succeeded=view.X,
            failed=view.failed,
        )

    def _released_point(self, view: View, stream: Generator, spread: float) -> Tensor:
        """Where the newest release is largest, `spread` away from earlier queries."""
        release: Noisy = view.release
        strategy, space = self.strategy, view.terms.space
        partition = regions_of(self.num_regions, space.dim)
        point, _ = maximize(
            ThompsonSampling(weight_path(view.terms.feature_map, release.values), partition),
            space.dim,
            generator=stream,
            candidates=self._candidates(view, spread),
            log_warp=strategy.log_warp(space),
            tried=_queried(view),
            min_distance=max(spread, strategy.min_distance),
            failed=view.failed,
            snap=space.snap,
            feasible=space.feasible_set,
            partition=partition,
            num_raw=strategy.num_raw,
            num_restarts=strategy.num_restarts,
        )
        return point

    def _candidates(self, view: View, spread: float) -> Tensor | None:
        """The candidates that are worth a look: not tried before, and away from earlier queries."""
        if view.candidates is None or self.strategy.min_distance == 0:
            return view.candidates
        fresh, queried = untried(view.candidates, view.X), _queried(view)
        if spread == 0 or not len(queried):
            return fresh
        warp = self.strategy.log_warp(view.terms.space)
        far = torch.cdist(warp.transform(fresh), warp.transform(queried)).amin(dim=-1) >= spread
        return fresh[far] if bool(far.any()) else fresh


def _queried(view: View) -> Tensor:
    """The points of the search's own queries, with those that have no outcome."""
    return torch.cat([view.X[view.began_with + view.first :], view.avoid])
