r"""How alike sites are, learned from the evidence of all of them: an alternative to earned trust.

    f_i = alpha_i + g + h_i,   g ~ GP(0, rho K_g),   h_i ~ GP(0, (1 - rho) K_i)

with an offset of variance `OFFSET` and the site's own kernel and noise, as its own model fits them
(`models.local_gp`). Over shared features :math:`K_g \approx \Phi \Phi^\top`, a site's statistic
is that of `models.summary` with the noise block

.. math:: R_i = (1 - \rho) K_i + \tau^2 1 1^\top + \rho (K_g - \Phi \Phi^\top) + \sigma_i^2 I,

for every :math:`\rho` of a grid: `M (M + 3) / 2 + 2` numbers each, of which sites need only the
sum. The sum gives every site the posterior of the others' `g`, mean and covariance, exactly, and
the evidence of every :math:`\rho`, with which expected improvements are averaged. With
:math:`\rho = 0` a site is alone, with :math:`\rho = 1` all data are pooled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from benchmarks.transfer_controls import Journal, best_point, log_expected_improvement
from botorch_fed.models import FeatureMap, InducingFeatures, StationaryKernel
from botorch_fed.models.local_gp import LocalGP, fit_local_gp, standardize
from botorch_fed.models.summary import Summary, log_evidence
from botorch_fed.models.support import sobol_support
from botorch_fed.rng import generator

Array = NDArray[np.float64]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SHARE_PRIOR = (0.3, 0.1, 0.2, 0.2, 0.2)
NUM_SUPPORT = 100
OFFSET = 0.5  # variance of a site's offset, on its standardised scale


@dataclass(frozen=True, eq=False)
class Related:
    """The model of a share: a site's kernels, and statistics over the shared features.

    Attributes:
        share: The share of the common variance.
        feature_map: The shared basis, of deviation one.
        lengthscale: Of the kernel that it approximates; None if the basis is the kernel.
    """

    share: float
    feature_map: FeatureMap
    lengthscale: Array | None

    def features(self, X: Array) -> Array:
        """Features of `n x d` points, times the root of the share, `n x M`."""
        Phi: Array = self.feature_map(torch.from_numpy(X)).numpy()
        return math.sqrt(self.share) * Phi

    def rest(self, own: LocalGP, A: Array, B: Array) -> Array:
        """Prior covariance of what is not in the features, without noise, `n x m`."""
        total = (1 - self.share) * correlation(A, B, own.lengthscale) + OFFSET
        if self.lengthscale is not None and self.share > 0:
            common = self.share * correlation(A, B, self.lengthscale)
            total = total + common - self.features(A) @ self.features(B).T
        return total

    def summary(self, own: LocalGP, X: Array, z: Array) -> Summary:
        """A site's statistic, with the local fields that the evidence needs."""
        block = self.rest(own, X, X) + noise_of(own) * np.eye(len(X))
        factor = cho_factor(block, lower=True)
        Phi = self.features(X)
        W = solve_triangular(factor[0], np.column_stack([Phi, z]), lower=True)
        gram, moment = W[:, :-1].T @ W[:, :-1], W[:, :-1].T @ W[:, -1:]
        return Summary(
            torch.from_numpy(gram),
            torch.from_numpy(moment),
            self.feature_map.fingerprint,
            len(X),
            torch.tensor(float(W[:, -1] @ W[:, -1])),
            torch.tensor(float(2 * np.log(np.diag(factor[0])).sum())),
        )

    def moments(
        self, own: LocalGP, X: Array, z: Array, others: Summary, points: Array
    ) -> tuple[Array, Array]:
        """Posterior mean and variance at `m x d` points, from the others' sum and own data."""
        B = others.gram.numpy() + np.eye(others.num_features)
        factor = np.linalg.cholesky(B)
        mean = cho_solve((factor, True), others.moment.numpy()[:, 0])
        here, there = (
            solve_triangular(factor, self.features(Z).T, lower=True) for Z in (X, points)
        )
        K = here.T @ here + self.rest(own, X, X) + noise_of(own) * np.eye(len(X))
        cross = there.T @ here + self.rest(own, points, X)
        prior = (there**2).sum(axis=0) + self.rest_variance(points)
        L = cho_factor(K, lower=True)
        half = solve_triangular(L[0], cross.T, lower=True)
        residual = z - self.features(X) @ mean
        found = self.features(points) @ mean + cross @ cho_solve(L, residual)
        return found, np.maximum(prior - (half**2).sum(axis=0), 1e-10)

    def rest_variance(self, points: Array) -> Array:
        """The diagonal of `rest`."""
        total = np.full(len(points), 1 - self.share + OFFSET)
        if self.lengthscale is not None and self.share > 0:
            total += self.share - (self.features(points) ** 2).sum(axis=1)
        return total


def noise_of(own: LocalGP) -> float:
    """The noise variance of a site's own model."""
    return own.noise * own.variance


def correlation(A: Array, B: Array, lengthscale: Array) -> Array:
    """Squared exponential correlations, `n x m`."""
    gaps = (A[:, None, :] - B[None, :, :]) / lengthscale
    found: Array = np.exp(-0.5 * (gaps**2).sum(axis=-1))
    return found


@dataclass
class Relatedness:
    """A federation that learns how alike its sites are.

    Attributes:
        models: One for each share.
        own: The sites' own models, data on their scale, and statistics for each share.
        weights: Probabilities of the shares.
        totals: The sums of the statistics.
    """

    models: tuple[Related, ...]
    own: dict[str, tuple[LocalGP, Array, Array, tuple[Summary, ...]]]
    weights: Array
    totals: list[Summary] = field(default_factory=list)

    @classmethod
    def over(cls, dim: int, lengthscale: float) -> Relatedness:
        """Before anybody has said anything, with support points as a basis."""
        scales = [lengthscale] * dim
        kernel = StationaryKernel(math.inf, scales)
        phi = InducingFeatures(kernel, sobol_support(dim, NUM_SUPPORT, seed=0))
        models = tuple(Related(share, phi, np.array(scales)) for share in SHARES)
        return cls(models, {}, np.array(SHARE_PRIOR))

    def listen(self, journal: Journal, t: int) -> None:
        """Everybody adds its statistics; the sums give the probabilities of the shares."""
        for site, X in journal.X.items():
            if len(X) and (t == 0 or site in journal.playing):
                z = standardize(journal.larger(site)).values
                own = fit_local_gp(X.numpy(), z)
                made = tuple(model.summary(own, X.numpy(), z) for model in self.models)
                self.own[site] = own, X.numpy(), z, made
        zero = Summary.zero(self.models[0].feature_map)
        statistics = zip(*(made for *_, made in self.own.values()), strict=True)
        self.totals = [sum(made, zero) for made in statistics]
        evidence = np.array([float(log_evidence(total)) for total in self.totals])
        weights = np.exp(evidence - evidence.max()) * SHARE_PRIOR
        self.weights = weights / weights.sum()

    def step(self, journal: Journal, site: str, t: int) -> torch.Tensor:
        """The largest expected improvement, averaged over the shares."""
        own, X, z, made = self.own[site]
        rows = [k for k, weight in enumerate(self.weights) if weight >= 1e-4]
        parts = []
        for k in rows:
            others = self.totals[k] - made[k]
            parts.append((self.models[k], others, np.log(self.weights[k])))

        def score(points: Array) -> Array:
            found = []
            for model, others, log_weight in parts:
                both = np.concatenate([X, points])
                mean, variance = model.moments(own, X, z, others, both)
                best, n = float(mean[: len(X)].max()), len(X)
                improvement = log_expected_improvement(mean[n:], np.sqrt(variance[n:]), best)
                found.append(log_weight + improvement)
            total: Array = np.logaddexp.reduce(found)
            return total

        return best_point(journal, site, score, generator(journal.seed, "related", site, t))
