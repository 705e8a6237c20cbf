r"""The statistics of all benchmarks: paired, clustered, effect sizes and intervals first.

Two methods are compared on pairs: runs with the same task, seed and first points. Pairs that share
a target, a task or a function are one *cluster*, because what they share does not vary within it.
`effect` averages within clusters; its interval and p value are t statistics of the clusters' means
(G - 1 degrees of freedom), so that 120 pairs of six targets count as six. With one pair in every
cluster this is the usual paired t interval.

An effect has its size first: the mean difference, its 95 % interval, the same in standard
deviations of the clusters, and the share of clusters on each side. p values are adjusted by Holm's
method within a *family*, the tests of one named claim. Of n clusters that all point the same way, a
test that assumes no distribution finds :math:`2^{1 - n}` at best. A family in which that times its
size is above `LEVEL` cannot find anything: `family` then gives no p values.

Intervals of the mean of one method, as in bands of figures, are bootstrap percentiles (`interval`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata, wilcoxon
from scipy.stats import t as student

LEVEL = 0.05
ROUNDING = 1e-12  # a standard error below is that of equal numbers

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Effect:
    """A mean difference of two methods, first minus second.

    Attributes:
        mean: Over clusters.
        low: Lower end of its 95 % interval; None with one cluster.
        high: Upper end.
        p: Two-sided, of the t statistic; None with one cluster, or where no test can find anything.
        deviations: The mean in standard deviations of the clusters' means; None if there are none.
        below: The share of clusters whose difference is below zero.
        clusters: Their number.
        pairs: The number of pairs in all of them.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None
    deviations: float | None
    below: float
    clusters: int
    pairs: int

    def shown(self, digits: int = 3) -> str:
        """In a cell of a table."""
        said = f"{self.mean:+.{digits}f}"
        if self.low is not None and self.high is not None:
            said += f" [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"
        return said if self.p is None else f"{said} p={self.p:.1g}"


def effect(clusters: Sequence[ArrayLike] | Array) -> Effect:
    """The mean of differences that come in clusters, one sequence or number for each."""
    groups = [np.atleast_1d(np.asarray(group, dtype=float)) for group in clusters]
    if not groups or any(not len(group) for group in groups):
        raise ValueError("An effect needs clusters with at least one difference in each.")
    means = np.array([group.mean() for group in groups])
    n, mean, pairs = len(means), float(means.mean()), sum(map(len, groups))
    below = float((means < 0).mean())
    if n < 2:
        return Effect(mean, None, None, None, None, below, n, pairs)
    spread = float(means.std(ddof=1))
    error = spread / math.sqrt(n)
    reach = float(student.ppf(0.975, n - 1)) * error
    if error > ROUNDING:
        p, deviations = 2 * float(student.sf(abs(mean) / error, n - 1)), mean / spread
    else:
        p, deviations = float(abs(mean) < ROUNDING), None
    return Effect(mean, mean - reach, mean + reach, p, deviations, below, n, pairs)


Key = tuple[Any, ...] | int | str


def paired(
    mine: Mapping[Any, float],
    theirs: Mapping[Any, float],
    cluster: Callable[[Any], Hashable] = lambda key: key,
) -> Effect | None:
    """The effect over the keys that both have; None if there are none.

    Args:
        mine: Outcomes of the first method by what identifies a pair.
        theirs: Those of the second.
        cluster: From a key to its cluster. Default every pair is one.
    """
    groups: dict[Hashable, list[float]] = {}
    for key in sorted(mine.keys() & theirs.keys()):
        groups.setdefault(cluster(key), []).append(mine[key] - theirs[key])
    return effect(list(groups.values())) if groups else None


def worse_p(differences: Array) -> float:
    """One-sided p value that the mean of paired differences is not above zero."""
    found = effect(differences)
    if found.p is None:
        return 1.0
    return found.p / 2 if found.mean > 0 else 1 - found.p / 2


# ------------------------------------------------------------------ families


def holm(p_values: Iterable[float]) -> list[float]:
    """Holm's adjusted p values: valid for all tests together."""
    p = np.array(list(p_values), dtype=float)
    order = np.argsort(p)
    scaled = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted.tolist()


def largest_family(clusters: int) -> int:
    """How many tests with so many clusters can be in a family that finds something."""
    return math.floor(LEVEL * 2.0 ** (clusters - 1))


def family(effects: Sequence[Effect]) -> list[Effect]:
    """The effects of one named claim, p values adjusted by Holm's method.

    Without p values if the family is too large for its fewest clusters (`largest_family`).
    """
    if not effects:
        return []
    known = [found.p for found in effects]
    if len(effects) > largest_family(min(found.clusters for found in effects)):
        return [replace(found, p=None) for found in effects]
    adjusted = holm(1.0 if p is None else p for p in known)
    return [replace(found, p=p) for found, p in zip(effects, adjusted, strict=True)]


def named_family(effects: Mapping[str, Effect]) -> dict[str, Effect]:
    """`family` of effects with names."""
    return dict(zip(effects, family(list(effects.values())), strict=True))


# ------------------------------------------------------------------ one method, and ranks


def interval(
    values: Array, seed: int = 0, level: float = 0.95, draws: int = 4000
) -> tuple[float, float]:
    """Bootstrap interval of a mean."""
    rng = np.random.default_rng(seed)
    means = rng.choice(values, size=(draws, len(values))).mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def average_ranks(means: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Average rank of every method over the units that all of them have; 1 is best."""
    common = [u for u in next(iter(means.values())) if all(u in m for m in means.values())]
    if not common:
        return {}
    values = np.array([[means[m][u] for m in means] for u in common])
    ranks = rankdata(values, axis=-1).mean(axis=0)
    return {name: round(float(rank), 4) for name, rank in zip(means, ranks, strict=True)}


def signed_rank(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """Wilcoxon's signed-rank test of `a` against `b` over functions; negative effects favour `a`.

    For functions whose values have different scales. Effect sizes are the rank-biserial
    correlation, and the ratio of signs.
    """
    gaps = np.array([a[unit] - b[unit] for unit in a if unit in b])
    gaps = gaps[gaps != 0]
    if not len(gaps):
        return {"p": 1.0, "functions": 0, "rank_biserial": 0.0, "sign_ratio": 0.0}
    ranks = rankdata(np.abs(gaps))
    return {
        "p": float(wilcoxon(gaps).pvalue),
        "functions": len(gaps),
        "rank_biserial": float((np.sign(gaps) * ranks).sum() / ranks.sum()),
        "sign_ratio": float(np.sign(gaps).mean()),
    }
