r"""What each part of the default search is worth: the same search with one part changed.

    python -m benchmarks.transfer tuning --ablations [--tasks …] [--seeds N]
    python -m benchmarks.transfer tuning --ablations --summary

Every row is a small simulation on the package's own models and acquisition: in each round every
site sends the mean of its own model over the shared basis, and the weights of its trusts.

full                 the default search
thompson-late        Thompson samples of the own model from query 11 on, as before
public-scale         a site alone; outcomes not standardised but on a guessed public scale, with the
                     own model of the release before: to be compared with solo
always               full trust in the prior, whatever own outcomes say
drawn                one trust drawn for each query, instead of an average over them
evidence             trusts weighed by the evidence, instead of leave-one-out density
unpooled             trusts of other sites are not heard
trusting             the prior probability of no trust is .1, as in the prototype, not .3
unscaled             the mean of the others' functions as it is, not brought to deviation one
own-in-sum           a site does not take its own function out of the sum
random-starts        first points at random for each site, instead of dealt from one sequence
shared-lengthscales  length scales have a prior around the others' (log deviation one)
smooth-basis         length scale .7 of the root of the dimension, twice the default
large-basis          300 features instead of 100
pooled-data          an oracle: one model of all others' data is the prior
related              how alike sites are is learned by the summed evidence of all data, with means
                     and covariances of what is common: `benchmarks.transfer_relatedness`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from torch import Tensor

from benchmarks.transfer_controls import (
    Histories,
    Journal,
    MeanPrior,
    Trace,
    domain_of,
    play,
    posterior_mean,
)
from benchmarks.transfer_relatedness import Relatedness
from botorch_fed.acquisition.earned import (
    EarnedImprovement,
    maximize_improvement,
    maximize_prior,
)
from botorch_fed.models import (
    FeatureMap,
    RandomFourierFeatures,
    StationaryKernel,
    fit_own_gp,
    own_gp,
)
from botorch_fed.models.earned_prior import (
    TRUST_PRIOR,
    EarnedPosterior,
    PriorFunction,
    fit_earned,
    pooled_trust_prior,
    project,
    reference_features,
)
from botorch_fed.models.local_gp import LengthscalePrior, LocalGP, standardize
from botorch_fed.rng import Generator, generator
from botorch_fed.search.transfer import APART, MIN_OWN

if TYPE_CHECKING:
    from benchmarks.transfer_tasks import Task


@dataclass(frozen=True)
class Variant:
    """The default search, or one part of it changed; see the module."""

    always: bool = False
    drawn: bool = False
    evidence: bool = False
    pooled: bool = True
    trust_prior: tuple[float, ...] = TRUST_PRIOR
    scaled: bool = True
    own_in_sum: bool = False
    random_starts: bool = False
    shared_lengthscales: bool = False
    lengthscale: float = 0.35
    num_features: int = 100
    pooled_data: bool = False
    thompson_from: int | None = None

    def feature_map(self, dim: int) -> FeatureMap:
        """The shared basis."""
        kernel = StationaryKernel(math.inf, [self.lengthscale * math.sqrt(dim)] * dim)
        stream = generator(0, "transfer")
        return RandomFourierFeatures.draw(kernel, self.num_features, generator=stream)


class Federation:
    """What sites have said: functions, trusts and length scales."""

    def __init__(self, variant: Variant, dim: int) -> None:
        self.variant = variant
        self.phi = variant.feature_map(dim)
        self.weights: dict[str, Tensor] = {}
        self.trust: dict[str, np.ndarray] = {}
        self.scales: dict[str, np.ndarray] = {}
        self.compares = True  # whether sites test what they are told

    def listen(self, journal: Journal, t: int) -> None:
        """Everybody says what it has found, with what was said in the round before."""
        self.compares = self.variant.pooled and len(journal.playing) > 1
        said: dict[str, Tensor] = {}
        found: dict[str, np.ndarray] = {}
        for site, X in journal.X.items():
            if len(X) < MIN_OWN or (t > 0 and site not in journal.playing):
                continue
            Y = torch.from_numpy(journal.larger(site))[:, None]
            alone = fit_earned(X, Y)
            self.scales[site] = np.log(alone.components[0].lengthscale)
            prior = self.prior(journal, site)
            if prior is not None and self.variant.pooled and site in journal.playing:
                found[site] = self.fitted(site, X, Y, prior).weights
            said[site] = project(
                lambda reference, model=alone: model.predict(reference)[0],  # type: ignore[misc]
                self.phi,
            )
        self.weights.update(said)
        self.trust.update(found)

    def prior(self, journal: Journal, site: str) -> PriorFunction | MeanPrior | None:
        """What a site is told."""
        others = [name for name in self.weights if name != site or self.variant.own_in_sum]
        if not others:
            return None
        if self.variant.pooled_data:
            X = torch.cat([journal.X[name] for name in others])
            y = np.concatenate([standardize(journal.larger(name)).values for name in others])
            return MeanPrior([posterior_mean(X, y)], journal.task.space.dim)
        mean = torch.stack([self.weights[name] for name in others]).mean(dim=0)
        found = PriorFunction.of_weights(self.phi, mean)
        if found is None or self.variant.scaled:
            return found
        spread = float((reference_features(self.phi) @ mean).std())
        return replace(found, weights=found.weights * spread, centre=found.centre * spread)

    def told(self, site: str) -> np.ndarray | None:
        """The sum of the trusts of others; None if nobody has compared."""
        heard = [trust for name, trust in self.trust.items() if name != site]
        return np.sum(heard, axis=0) if heard else None

    def fitted(
        self, site: str, X: Tensor, Y: Tensor, prior: PriorFunction | MeanPrior | None
    ) -> EarnedPosterior:
        """A site's models."""
        variant = self.variant
        told = self.told(site)
        nothing = np.zeros(len(variant.trust_prior))
        told = told if told is not None or not self.compares else nothing
        trust_prior = pooled_trust_prior(variant.trust_prior, told)
        scales = [scale for name, scale in self.scales.items() if name != site]
        around = None
        if variant.shared_lengthscales and scales:
            around = LengthscalePrior(np.mean(scales, axis=0) + 1.0, 1.0)  # its mode is the mean
        posterior = fit_earned(
            X,
            Y,
            prior,  # type: ignore[arg-type]
            trust_prior=trust_prior,
            lengthscale_prior=around,
        )
        if prior is None:
            return posterior
        weights = posterior.weights
        if variant.always:
            weights = np.eye(len(weights))[-1]
        if variant.evidence:
            scores = np.array([c.evidence for c in posterior.components]) + np.log(trust_prior)
            weights = np.exp(scores - scores.max())
        return replace(posterior, weights=weights / weights.sum())

    def step(self, journal: Journal, site: str, t: int) -> Tensor:
        """A site's next point."""
        stream = generator(journal.seed, "ablation", site, t)
        X, domain, prior = journal.X[site], domain_of(journal, site), self.prior(journal, site)
        if not len(X) and prior is not None:
            return maximize_prior(prior, domain, stream, apart=APART)  # type: ignore[arg-type]
        Y = torch.from_numpy(journal.larger(site))[:, None]
        if self.variant.thompson_from is not None and t >= self.variant.thompson_from:
            return thompson(fit_earned(X, Y).components[0], journal, site, stream)
        posterior = self.fitted(site, X, Y, prior)
        untested = prior is not None and self.told(site) is None and not self.compares
        if self.variant.drawn or untested:
            posterior = posterior.only(posterior.drawn(float(stream.uniform(1))))
        return maximize_improvement(EarnedImprovement.of(posterior, X), domain, stream)


def run_variant(
    task: Task,
    seed: int,
    starts: Mapping[str, Tensor],
    others: Histories | None = None,
    *,
    variant: Variant,
) -> Trace:
    """A federation of a variant."""
    federation = Federation(variant, task.space.dim)
    if variant.random_starts:
        starts = {site: at_random(task, seed, site, len(X)) for site, X in starts.items()}
    return play(task, seed, starts, federation.step, others=others, before=federation.listen)


def run_related(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """A federation that learns how alike its sites are."""
    method = Relatedness.over(task.space.dim, Variant.lengthscale * math.sqrt(task.space.dim))
    return play(task, seed, starts, method.step, others=others, before=method.listen)


def thompson(own: LocalGP, journal: Journal, site: str, stream: Generator) -> Tensor:
    """Where a sample of the own posterior is largest, of a table's candidates."""
    free = journal.untaken(site).double()
    mean, _ = own.predict(free.numpy())
    cross = own.covariance(free.numpy())
    among = replace(own, X=free.numpy()).covariance(free.numpy())
    covariance = own.variance * (among - cross @ own.precision @ cross.T)
    root = np.linalg.cholesky(covariance + 1e-6 * own.variance * np.eye(len(free)))
    sample = mean + root @ stream.normal(len(free)).numpy()
    best = int(sample.argmax())
    return free[best : best + 1]


def run_public_scale(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """A site alone, with outcomes on a public scale as good as a guess can be."""
    scales = [task.scale(site) for site in task.sites]
    centre = float(np.median([median for _, median in scales]))
    spread = float(np.median([best - median for best, median in scales]))
    centre, spread = float(f"{centre:.2g}"), float(f"{spread:.2g}")

    def step(journal: Journal, site: str, t: int) -> Tensor:
        X, free = journal.X[site], journal.untaken(site).double()
        Y = torch.from_numpy((journal.larger(site) - centre) / spread)[:, None]
        model = own_gp(X, Y, fit_own_gp(X, Y))
        with torch.no_grad():
            best = model.posterior(X).mean.max()
            values = LogExpectedImprovement(model, best)(free[:, None])
        row = int(values.argmax())
        return free[row : row + 1]

    return play(task, seed, starts, step, others=others)


def at_random(task: Task, seed: int, site: str, count: int) -> Tensor:
    """Random first points of a site, `count x d`."""
    stream = generator(seed, "random starts", site)
    if task.candidates is None:
        return task.space.snap(stream.uniform(count, task.space.dim))
    order = stream.uniform(len(task.candidates)).argsort(stable=True)
    return task.candidates[order[:count]].double()


VARIANTS = {
    "full": Variant(),
    "thompson-late": Variant(thompson_from=10),
    "always": Variant(always=True),
    "drawn": Variant(drawn=True),
    "evidence": Variant(evidence=True),
    "unpooled": Variant(pooled=False),
    "trusting": Variant(trust_prior=(0.1, 0.1, 0.2, 0.3, 0.3)),
    "unscaled": Variant(scaled=False),
    "own-in-sum": Variant(own_in_sum=True),
    "random-starts": Variant(random_starts=True),
    "shared-lengthscales": Variant(shared_lengthscales=True),
    "smooth-basis": Variant(lengthscale=0.7),
    "large-basis": Variant(num_features=300),
    "pooled-data": Variant(pooled_data=True),
}
ABLATIONS: dict[str, Callable[..., Trace]] = {
    name: partial(run_variant, variant=variant) for name, variant in VARIANTS.items()
}
ABLATIONS["public-scale"] = run_public_scale
ABLATIONS["related"] = run_related
