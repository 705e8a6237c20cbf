r"""The experiments of private Gaussian process bandits, each a named entry.

    python -m benchmarks.papers.private_ucb ENTRY [--trials N] [--rows ROW …]   run what is missing
    python -m benchmarks.papers.private_ucb ENTRY --summary [--json]      from committed results
    python -m benchmarks.papers.private_ucb ENTRY --smoke 2               2 trials, nothing kept
    python -m benchmarks.papers.private_ucb --smoke                       a few rounds of all rows

    figure1      Fig. 1: a kernel bandit, 25 arms a round, 1,024 rounds, by alpha at beta = 0.1
    figure2      Fig. 2: the same by beta at alpha = 1
    figure1-1e-5 Fig. 1 at delta = 1e-5
    table1       Table 1: Camelback, Styblinski-Tang in 20 and Michalewicz in 10 variables,
                 10,000 rounds
    rmse         the error of the private mean, by release and by what makes it positive; this and
    quadrature   sup errors of Fourier features on the unit interval, are computed when asked for

What runs here are the shipped mechanisms with seeded noise, in a bare loop: `PrefixSum` and
`LocalGaussian` on records, `BlockSum` on public actions; what they release goes through
`repair_total` into a `WeightPosterior`. A record is one round, and one user. alpha is epsilon and
beta is delta, of one record replaced; the noise is that which the Gaussian mechanism needs.
Published rows add the published noise to the same sums (`paper_prefix_noise`,
`paper_local_noise`), whatever it guarantees.

Settings were chosen on pilots, seeds 1000-1399 for the figures and 1000-1199 for `table1` (of the
very problems, so that results are those of a tuned method); results are of seeds from 0 on. What
the paper leaves unstated was fixed before any run:

- a function of values in [0, 1], redrawn until 0.5 % of the disc has 0.8, shuffled arms, ties at
  random: see `KernelBandit`. All rows of a trial have the same function, decision sets and reward
  coins. Regret is that of expected rewards, against the best arm of the round;
- the length scale is known: 1, a quarter of the domain's width. Ours: ten KL features of a length
  scale of 0.8, better on the pilots; on the seeds of the results it gains with joint DP (35 for 45
  at alpha = 1, 60 pairs, not significant) and nothing locally (``joint-wide`` and ``local-wide``
  have the true one); rewards centred, floor of height 8, noise variance 0.25, one standard
  deviation of exploration. Local: floor of height 6, and the posterior knows of the noise in the
  moment;
- non-private: 29 KL features of the true length scale, noise variance 1, exploration 0.3, tuned on
  the pilots as well;
- published: quadrature features of tolerance 0.01, rewards in [0, 1] not centred, the noise of the
  proof (its statement has another) on the whole matrix of features and reward, node by node as a
  dyadic decomposition needs it, and a shift of twice the published bound on its norm, the same in
  every round; noise variance 0.25, exploration 0.5, because the theorem's lose more;
- ``random`` is the mean over all arms, exactly;
- Table 1: values in [0, 1] by the exact range, noise of standard deviation 0.1 (Camelback) or 0.02,
  outcomes clipped to 0.5 ± 0.7 or ± 0.55, one variable in each group of features, and the optimum
  of the box (of the arms for Camelback) as the yardstick. The paper's domains, scales, noise and
  groups are not in its text. Actions are public: a fixed decision set, so that only outcomes get
  noise, in blocks. ``gram`` is the same bandit with the noisy gram matrix of `PrefixSum`, and
  ``published`` with the published noise and shift, as in Fig. 1: outcomes clipped to [0, 1], in our
  bases, which are smaller than the quadrature features of the paper;
- Table 1 without privacy: Camelback has blocks by the observation noise alone, the others one play
  a round; exploration 0.5 for Styblinski-Tang, 2 for Michalewicz (of 0.5, 1 and 2 on two pilots).
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as Grid
from torch import Tensor

from benchmarks import private_ucb as speed
from benchmarks.papers.ledger import Line, Results, stored_lines, versions
from benchmarks.papers.published.noise import paper_local_noise, paper_prefix_noise
from benchmarks.problems import Michalewicz, StyblinskiTang
from benchmarks.statistics import interval
from botorch_fed.acquisition import AdditiveGrid
from botorch_fed.models import (
    AdditiveFeatures,
    FeatureMap,
    KLFeatures,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    Summary,
    WeightPosterior,
    noise_floor,
    repair_total,
)
from botorch_fed.privacy import (
    BlockSum,
    InsecureSeededNoise,
    Ledger,
    LocalGaussian,
    NoiseSource,
    PrefixSum,
    RecordStatistic,
    noise_multiplier_for,
)
from botorch_fed.privacy.hazmat.noise import normal
from botorch_fed.rng import Generator, generator
from botorch_fed.test_functions import Camelback, KernelBandit

SEED = 20260103  # of what is public: reference points
ALPHAS = (10.0, 1.0, 0.5, 0.1)
BETAS = (0.01, 0.1, 0.5, 0.99)
BETA, SMALL = 0.1, 1e-5  # the paper's delta, and one that deserves the name
ADJACENCY: Any = "replace-one"


class Lines(Results):
    """Results whose lists are as they were stored."""

    def __init__(self, name: str, keys: tuple[str, ...]) -> None:
        super().__init__(name, keys)
        self.lines = stored_lines(self.path)


@cache
def multiplier(alpha: float, delta: float) -> float:
    """The noise that one Gaussian release needs, over one record's norm."""
    return noise_multiplier_for(
        epsilon=alpha, delta=delta, sampling_rate=1.0, num_releases=1, adjacency=ADJACENCY
    )


def free_ledger() -> Ledger:
    """A ledger without a limit: the guarantee is in the name of the run."""
    return Ledger(adjacency=ADJACENCY, unit="record")


# ------------------------------------------------------------------ what the rounds leave behind


@dataclass(frozen=True)
class Likelihood:
    """What records mean.

    Attributes:
        basis: The features, of prior variance `outputscale`.
        noise_var: The variance of outcomes.
        outputscale: What features are divided by the root of before noise is added.
    """

    basis: FeatureMap
    noise_var: float
    outputscale: float = 1.0

    def summary(self, statistic: RecordStatistic, values: Tensor) -> Summary:
        gram, moment = statistic.gram_and_moment(
            values, noise_var=self.noise_var, outputscale=self.outputscale
        )
        return Summary(gram, moment, self.basis.fingerprint)

    @property
    def per_sum(self) -> float:
        """What a sum of normed features is multiplied by in a summary."""
        return self.outputscale / self.noise_var


class Stream(ABC):
    """Everything about earlier rounds that the next decision may depend on."""

    @abstractmethod
    def add(self, features: Tensor, outcome: float) -> None:
        """One round's record: `1 x m` features of norm at most one, and the outcome."""

    @abstractmethod
    def posterior(self) -> WeightPosterior:
        """Of the weights, given what was released."""

    snr: float | None = None
    """Norm of the last sum over that of its noise."""


class Exact(Stream):
    """The sums themselves: no privacy."""

    def __init__(self, likelihood: Likelihood, statistic: RecordStatistic) -> None:
        self.likelihood, self.statistic = likelihood, statistic
        self.values = torch.zeros(statistic.dim, dtype=torch.float64)

    def add(self, features: Tensor, outcome: float) -> None:
        record = self.statistic.records(features, _column(outcome))
        self.values = self.values + self.statistic.statistics(record)[0]

    def posterior(self) -> WeightPosterior:
        return WeightPosterior.from_total(self.likelihood.summary(self.statistic, self.values))


class Noisy(Stream):
    """Sums with noise, whose gram matrix is raised to a floor.

    Attributes:
        height: Of the floor.
        inflate: Whether the posterior knows of the noise in the moment.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        statistic: RecordStatistic,
        *,
        height: float = 4.0,
        inflate: bool = False,
    ) -> None:
        self.likelihood, self.statistic = likelihood, statistic
        self.height, self.inflate = height, inflate
        self.exact = Exact(likelihood, statistic)
        self.values = self.exact.values
        self.noise_std = 0.0
        self.t = 0

    @abstractmethod
    def _release(self, records: Tensor) -> tuple[Tensor, float]:
        """The sum after one more record, and the standard deviation of its noise."""

    def add(self, features: Tensor, outcome: float) -> None:
        self.t += 1
        self.exact.add(features, outcome)
        record = self.statistic.records(features, _column(outcome))
        self.values, self.noise_std = self._release(record)

    def posterior(self) -> WeightPosterior:
        total = self.likelihood.summary(self.statistic, self.values)
        m, std, like = self.statistic.num_features, self.noise_std, self.likelihood
        known = 0.0
        if self.inflate:
            known = self.statistic.moment_noise_std(
                std, noise_var=like.noise_var, outputscale=like.outputscale
            )
        floor = noise_floor(std, m, height=self.height) * like.per_sum
        return WeightPosterior.from_total(repair_total(total, floor=floor, moment_noise_std=known))

    @property
    def snr(self) -> float | None:  # type: ignore[override]
        scale = self.noise_std * math.sqrt(self.statistic.dim)
        return float(self.exact.values.norm()) / scale if scale else None


class Prefix(Noisy):
    """The running sum, released in every round by a trusted privatizer."""

    def __init__(
        self, likelihood: Likelihood, mechanism: PrefixSum, noise: NoiseSource, **options: Any
    ) -> None:
        super().__init__(likelihood, mechanism.statistic, **options)
        self.mechanism, self.noise = mechanism, noise
        self.state, _ = mechanism.start(ledger=free_ledger(), noise=noise)

    def _release(self, records: Tensor) -> tuple[Tensor, float]:
        self.state, release = self.mechanism.step(
            self.state, records, noise=self.noise, path=("stream",)
        )
        return release.values, release.noise_std


class Increments(Noisy):
    """Every client sends its own increment with noise, and the server adds."""

    def __init__(
        self, likelihood: Likelihood, mechanism: LocalGaussian, noise: NoiseSource, **options: Any
    ) -> None:
        super().__init__(likelihood, mechanism.statistic, **options)
        self.mechanism, self.noise = mechanism, noise

    def _release(self, records: Tensor) -> tuple[Tensor, float]:
        release, _ = self.mechanism.release(
            records, ledger=free_ledger(), noise=self.noise, path=(self.t, "increment")
        )
        return self.values + release.values[0], self.mechanism.noise_std(self.t)


def paper_norm_bound(std: float, num_features: int, rounds: int, failure: float = 0.1) -> float:
    r"""The published bound on the norm of noise of standard deviation `std` per number.

    :math:`\Lambda = \sqrt2 \sigma (4\sqrt m + 2\ln(2T/\zeta))`, of Lemma 3; it is five times what
    the norm is.
    """
    return std * math.sqrt(2) * (4 * math.sqrt(num_features) + 2 * math.log(2 * rounds / failure))


class Published(Stream):
    """Sums of features and rewards as they are, with published noise and the published shift."""

    def __init__(self, likelihood: Likelihood, rounds: int, noise: NoiseSource) -> None:
        self.likelihood, self.rounds, self.noise = likelihood, rounds, noise
        self.m = likelihood.basis.num_features
        self.exact = torch.zeros(self.m + 1, self.m + 1, dtype=torch.float64)
        self.noisy = self.exact
        self.t = 0

    @abstractmethod
    def _noise(self) -> Tensor:
        """What is added to the sum of `t` rounds: symmetric, `(m + 1) x (m + 1)`."""

    @property
    @abstractmethod
    def _std(self) -> float:
        """The standard deviation that the shift is made for."""

    def add(self, features: Tensor, outcome: float) -> None:
        self.t += 1
        row = torch.cat([features, _column(outcome)], dim=1)
        self.exact = self.exact + row.mT @ row
        self.noisy = self.exact + self._noise()

    def posterior(self) -> WeightPosterior:
        like, m = self.likelihood, self.m
        gram, moment = self.noisy[:m, :m] / like.noise_var, self.noisy[:m, m:] / like.noise_var
        shift = 2 * paper_norm_bound(self._std, m, self.rounds) / like.noise_var
        total = Summary(gram, moment, like.basis.fingerprint)
        return WeightPosterior.from_total(repair_total(total, shift=shift))

    @property
    def snr(self) -> float | None:  # type: ignore[override]
        if not self.t:
            return None
        m = self.m  # of what is used: the gram matrix and the moment
        used = [matrix[:, :m] for matrix in (self.exact, self.noisy - self.exact)]
        return float(used[0].norm() / used[1].norm())


class PublishedPrefix(Published):
    """Lemma 2: one matrix of noise per node of the tree, and the nodes of a dyadic sum."""

    def __init__(
        self,
        likelihood: Likelihood,
        rounds: int,
        noise: NoiseSource,
        *,
        alpha: float,
        beta: float,
        outcome_bound: float = 1.0,
    ) -> None:
        super().__init__(likelihood, rounds, noise)
        self.node_std = paper_prefix_noise(alpha, beta, rounds, outcome_bound)
        self.nodes: dict[int, Tensor] = {}

    def _noise(self) -> Tensor:
        height = (self.t & -self.t).bit_length() - 1
        self.nodes = {h: node for h, node in self.nodes.items() if h > height}
        V = normal(self.noise, self.m + 1, self.m + 1, path=("node", self.t))
        self.nodes[height] = self.node_std * (V + V.mT) / math.sqrt(2)
        return torch.stack(list(self.nodes.values())).sum(dim=0)

    @property
    def _std(self) -> float:
        return self.node_std * math.sqrt(1 + math.ceil(math.log2(self.rounds)))


class PublishedIncrements(Published):
    """Lemma 5: noise of its own for the matrix and the vector of every increment."""

    def __init__(
        self,
        likelihood: Likelihood,
        rounds: int,
        noise: NoiseSource,
        *,
        alpha: float,
        beta: float,
        outcome_bound: float = 1.0,
    ) -> None:
        super().__init__(likelihood, rounds, noise)
        self.matrix_std, self.vector_std = paper_local_noise(alpha, beta, outcome_bound)
        self.total = torch.zeros_like(self.exact)

    def _noise(self) -> Tensor:
        m = self.m
        V = normal(self.noise, m + 1, m + 1, path=("increment", self.t))
        upper = torch.triu(V[:m, :m])
        noise = torch.zeros_like(self.exact)
        noise[:m, :m] = self.matrix_std * (upper + upper.mT - torch.diag(upper.diagonal()))
        noise[:m, m] = noise[m, :m] = self.vector_std * V[:m, m]
        self.total = self.total + noise
        return self.total

    @property
    def _std(self) -> float:
        return self.matrix_std * math.sqrt(self.t)


def _column(outcome: float) -> Tensor:
    return torch.tensor([[outcome]], dtype=torch.float64)


# ------------------------------------------------------------------ Figures 1 and 2

ROUNDS = 1024
ARMS = 25
TIMES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
LENGTHSCALE, SHORTER = 0.25, 0.2  # of the unit cube: 1 on the domain of width 4, and ours
NOISE_VAR, EXPLORATION = 0.25, 1.0
CENTRE = HALF_RANGE = 0.5


@cache
def disc_points(count: int = 4000) -> Tensor:
    """Public points, uniform in the disc."""
    X = generator(SEED, "disc").uniform(2 * count, 2)
    inside = (X - 0.5).square().sum(dim=-1) <= 0.25
    return X[inside][:count]


def unit_box(dim: int) -> Tensor:
    return torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, dim).contiguous()


@cache
def disc_features(name: str) -> FeatureMap:
    """``kl-M``: `M` KL features; ``short-M``: of our length scale; ``qff-TOL``: quadrature."""
    kind, _, number = name.partition("-")
    kernel = StationaryKernel(math.inf, [SHORTER if kind == "short" else LENGTHSCALE] * 2)
    if kind == "qff":
        return QuadratureFourierFeatures.from_kernel(kernel, unit_box(2), tol=float(number))
    base = QuadratureFourierFeatures.from_kernel(kernel, unit_box(2), tol=1e-6)
    return KLFeatures.from_map(base, disc_points(), num_features=int(number))


Open = Callable[[Likelihood, float | None, float | None, int, int], Stream]


@dataclass(frozen=True)
class Row:
    """A way of playing the kernel bandit.

    Attributes:
        stream: What leaves the rounds: of a likelihood, alpha, beta, the rounds and the trial. None
            plays at random.
        features: See `disc_features`.
        noise_var: The variance of rewards.
        exploration: What the standard deviation of the function is multiplied by.
        trials: How many at the paper's beta.
        private: Whether there is an alpha.
    """

    stream: Open | None
    features: str = "short-10"
    noise_var: float = NOISE_VAR
    exploration: float = EXPLORATION
    trials: int = 20
    private: bool = True


def _statistic(m: int) -> RecordStatistic:
    return RecordStatistic(num_features=m, outcome_bound=HALF_RANGE, centre=CENTRE)


def exact(like: Likelihood, alpha: Any, beta: Any, rounds: int, trial: int) -> Stream:
    return Exact(like, _statistic(like.basis.num_features))


def prefix(factorization: Any, **options: Any) -> Open:
    """By the running sum; the last round's is never used."""

    def stream(like: Likelihood, alpha: Any, beta: Any, rounds: int, trial: int) -> Stream:
        mechanism = PrefixSum(
            num_features=like.basis.num_features,
            outcome_bound=HALF_RANGE,
            centre=CENTRE,
            horizon=rounds - 1,
            noise_multiplier=multiplier(alpha, beta),
            factorization=factorization,
        )
        return Prefix(like, mechanism, InsecureSeededNoise(trial), **options)

    return stream


def increments(**options: Any) -> Open:
    """By increments that clients add noise to themselves."""

    def stream(like: Likelihood, alpha: Any, beta: Any, rounds: int, trial: int) -> Stream:
        mechanism = LocalGaussian(
            num_features=like.basis.num_features,
            outcome_bound=HALF_RANGE,
            centre=CENTRE,
            noise_multiplier=multiplier(alpha, beta),
        )
        return Increments(like, mechanism, InsecureSeededNoise(trial), **options)

    return stream


def published(kind: type[PublishedPrefix] | type[PublishedIncrements]) -> Open:
    """With published noise."""

    def stream(like: Likelihood, alpha: Any, beta: Any, rounds: int, trial: int) -> Stream:
        return kind(like, rounds, InsecureSeededNoise(trial), alpha=alpha, beta=beta)

    return stream


PAPER_FEATURES = "qff-0.01"
ROWS = {
    "nonprivate": Row(exact, "kl-29", 1.0, 0.3, trials=60, private=False),
    "random": Row(None, trials=60, private=False),
    "joint-sqrt": Row(prefix("sqrt", height=8.0), trials=200),
    "joint-wide": Row(prefix("sqrt", height=8.0), "kl-10", trials=60),
    "joint-tree": Row(prefix("tree", height=8.0)),
    "joint-paper": Row(published(PublishedPrefix), PAPER_FEATURES, exploration=0.5),
    "local": Row(increments(height=6.0, inflate=True), trials=150),
    "local-wide": Row(increments(height=6.0, inflate=True), "kl-10", trials=60),
    "local-paper": Row(published(PublishedIncrements), PAPER_FEATURES, exploration=0.5),
}
SMALL_ROWS = ("joint-sqrt", "local")  # also run at delta = 1e-5
WIDE_ROWS = ("joint-wide", "local-wide")  # an ablation, in the first figure only
SYNTHETIC_KEYS = ("row", "alpha", "beta", "trial")


@lru_cache(maxsize=4)
def offered(trial: int, rounds: int) -> tuple[Tensor, Tensor]:
    """The decision sets of a trial, `T x K x 2`, and their values."""
    problem = KernelBandit(seed=trial)
    sets = problem.decision_sets(rounds, ARMS)
    return sets, problem.values(sets)


@lru_cache(maxsize=4)
def offered_features(trial: int, rounds: int, name: str) -> Tensor:
    """The features of all arms, `T x K x m`."""
    with torch.no_grad():
        return disc_features(name)(offered(trial, rounds)[0])


def bandit_run(
    row: str, alpha: float | None, beta: float | None, trial: int, *, rounds: int = ROUNDS
) -> Line:
    """One trial: `rounds` decisions, each by what earlier rounds left behind."""
    method = ROWS[row]
    _, values = offered(trial, rounds)
    best = values.amax(dim=1)
    began = time.process_time()
    snr = None
    if method.stream is None:
        gaps = best - values.mean(dim=1)
    else:
        likelihood = Likelihood(disc_features(method.features), method.noise_var)
        stream = method.stream(likelihood, alpha, beta, rounds, trial)
        played = play(stream, method, trial, rounds)
        gaps = best - values.gather(1, played[:, None])[:, 0]
        snr = stream.snr
    sums = gaps.cumsum(dim=0)
    tenth = rounds - rounds // 10
    return {
        "regret": round(float(sums[-1]), 3),
        "curve": [round(float(sums[t - 1]), 2) for t in TIMES if t <= rounds],
        "last_tenth": round(float(gaps[tenth:].sum()), 3),
        "snr": None if snr is None else round(snr, 4),
        "cpu_seconds": round(time.process_time() - began, 2),
        "seed": trial,
        "versions": versions(),
    }


def play(stream: Stream, method: Row, trial: int, rounds: int) -> Tensor:
    """The arms that are played; the first at random, since nothing is known yet."""
    _, values = offered(trial, rounds)
    Phi = offered_features(trial, rounds, method.features)
    coins = generator(trial, "reward").uniform(rounds)
    jitter = generator(trial, "ties").uniform(rounds, ARMS)
    played = torch.zeros(rounds, dtype=torch.int64)
    for t in range(rounds):
        if t:
            mean, root = stream.posterior().predict(Phi[t])
            deviation = root.square().sum(dim=-1).sqrt()
            scores = mean[:, 0] + method.exploration * deviation
        else:
            scores = torch.zeros(ARMS, dtype=torch.float64)
        order = jitter[t].argsort()
        arm = int(order[int(scores[order].argmax())])
        played[t] = arm
        if t + 1 < rounds:
            stream.add(Phi[t, arm : arm + 1], float(coins[t] < values[t, arm]))
    return played


Setting = tuple[float | None, float | None]  # alpha and beta
FIGURES: dict[str, tuple[Setting, ...]] = {
    "figure1": tuple((alpha, BETA) for alpha in ALPHAS),
    "figure2": tuple((1.0, beta) for beta in BETAS),
    "figure1-1e-5": tuple((alpha, SMALL) for alpha in ALPHAS),
}


def settings_of(figure: str, row: str) -> tuple[Setting, ...]:
    """What a row is run with."""
    return FIGURES[figure] if ROWS[row].private else ((None, None),)


def figure_rows(figure: str) -> tuple[str, ...]:
    """Of a small delta there are no published results and no tree; one figure has an ablation."""
    if figure == "figure1-1e-5":
        return tuple(row for row in ROWS if row in SMALL_ROWS or not ROWS[row].private)
    return tuple(row for row in ROWS if figure == "figure1" or row not in WIDE_ROWS)


def synthetic_runs(figure: str, row: str, trials: int | None = None, first: int = 0) -> list[Line]:
    """The runs of a row, trial by trial."""
    count = ROWS[row].trials if figure == "figure1" or not ROWS[row].private else 20
    if figure == "figure1-1e-5":
        count = 60
    return [
        {"row": row, "alpha": alpha, "beta": beta, "trial": first + k}
        for k in range(count if trials is None else trials)
        for alpha, beta in settings_of(figure, row)
    ]


def figures_of(lines: Sequence[Line]) -> dict[str, Any]:
    """Mean, interval and what else is said of the trials of one setting."""
    regrets = np.array([line["regret"] for line in lines])
    low, high = interval(regrets)
    out = {
        "trials": len(lines),
        "regret": [round(float(x), 2) for x in (regrets.mean(), low, high)],
        "worst": round(float(regrets.max()), 1),
        "last_tenth": round(float(np.mean([line["last_tenth"] for line in lines])), 2),
        "cpu_seconds": round(float(np.mean([line["cpu_seconds"] for line in lines])), 2),
    }
    ratios = [line["snr"] for line in lines if line.get("snr") is not None]
    return out | ({"snr": round(float(np.mean(ratios)), 3)} if ratios else {})


def figure_summary(figure: str) -> dict[str, Any]:
    """Regret by row and setting, and how many times ours is below the published one's."""
    lines = ENTRIES[figure].lines()
    out: dict[str, Any] = {"rows": [], "published_over_ours": []}
    random = [line["regret"] for line in lines.select(row="random")]
    for row in figure_rows(figure):
        for alpha, beta in settings_of(figure, row):
            found = lines.select(row=row, alpha=alpha, beta=beta)
            if found:
                figures = figures_of(found)
                share = figures["regret"][0] / float(np.mean(random)) if random else math.nan
                what = {"row": row, "alpha": alpha, "beta": beta}
                out["rows"].append({**what, **figures, "share_of_random": round(share, 4)})
    for ours, published in (("joint-sqrt", "joint-paper"), ("local", "local-paper")):
        for alpha, beta in FIGURES[figure]:
            pair = [
                {line["trial"]: line["regret"] for line in lines.select(**what, row=row)}
                for what in ({"alpha": alpha, "beta": beta},)
                for row in (ours, published)
            ]
            if both := sorted(pair[0].keys() & pair[1].keys()):
                means = [float(np.mean([row[k] for k in both])) for row in pair]
                what = {"row": ours, "alpha": alpha, "beta": beta, "trials": len(both)}
                out["published_over_ours"].append(what | {"ratio": round(means[1] / means[0], 2)})
    return out


def figure_tables(figure: str, out: dict[str, Any]) -> list[Grid]:
    """The summary in words."""
    grid = _grid(
        f"{figure}: regret after {ROUNDS} rounds, mean [95 % bootstrap interval]",
        *("row", "alpha", "beta", "trials", "regret", "worst", "of random", "last tenth"),
        *("signal / noise at the end", "CPU s"),
    )
    for row in out["rows"]:
        grid.add_row(
            row["row"],
            *(_said(row[key]) for key in ("alpha", "beta", "trials")),
            _mean(row["regret"]),
            f"{row['worst']:.0f}",
            f"{row['share_of_random']:.3f}",
            *(_said(row.get(key)) for key in ("last_tenth", "snr", "cpu_seconds")),
        )
    ratios = _grid(
        "Published / ours, of the same trials", "row", "alpha", "beta", "trials", "ratio"
    )
    for row in out["published_over_ours"]:
        ratios.add_row(*(_said(row[key]) for key in ("row", "alpha", "beta", "trials", "ratio")))
    return [grid, ratios]


def _grid(title: str, *columns: str) -> Grid:
    grid = Grid(title=title)
    for column in columns:
        grid.add_column(column)
    return grid


def _said(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _mean(value: Sequence[float]) -> str:
    mean, low, high = value
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


# ------------------------------------------------------------------ Table 1

LONG = 10_000


@cache
def interval_features(lengthscale: float, tol: float, scale: float) -> FeatureMap:
    """KL features of one variable, uniform on [0, 1]; `scale` is the prior standard deviation."""
    kernel = StationaryKernel(math.inf, [lengthscale], scale**2)
    base = QuadratureFourierFeatures.from_kernel(kernel, unit_box(1), tol=1e-8)
    points = torch.linspace(0, 1, 400, dtype=torch.float64)[:, None]
    return KLFeatures.from_map(base, points, tol=tol)


@cache
def square_features(lengthscale: float, tol: float, scale: float) -> FeatureMap:
    """KL features of two variables, uniform on the square."""
    kernel = StationaryKernel(math.inf, [lengthscale] * 2, scale**2)
    base = QuadratureFourierFeatures.from_kernel(kernel, unit_box(2), tol=1e-8)
    return KLFeatures.from_map(base, generator(SEED, "square").uniform(3000, 2), tol=tol)


@cache
def additive_features(dim: int, lengthscale: float, tol: float, scale: float) -> FeatureMap:
    """One group for every variable, and a constant of prior standard deviation 0.3."""
    constant = QuadratureFourierFeatures(
        StationaryKernel(math.inf, [1.0], 0.3**2),
        torch.zeros(1, 1, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
        bounds=unit_box(1),
    )
    parts = [interval_features(lengthscale, tol, scale)] * dim
    return AdditiveFeatures([*parts, constant], [*([j] for j in range(dim)), [0]])


class Actions(Protocol):
    """A public set of actions."""

    features: FeatureMap
    best: float
    random_gap: float

    def choose(
        self, posterior: WeightPosterior, exploration: float, stream: Generator
    ) -> tuple[Tensor, float, float]:
        """Features `1 x m`, expected outcome and posterior standard deviation of an action."""


class Arms:
    """A list of arms.

    Attributes:
        best: The largest value of an arm.
        random_gap: What random play loses in a round, on average.
    """

    def __init__(self, problem: Camelback, features: FeatureMap) -> None:
        self.features = features
        self.values = problem.values(problem.arms)
        with torch.no_grad():
            self.Phi = features(problem.arms)
        self.best = float(self.values.max())
        self.random_gap = self.best - float(self.values.mean())

    def index(
        self, posterior: WeightPosterior, exploration: float, stream: Generator
    ) -> tuple[int, float]:
        """The arm of the largest bound, ties at random, and its standard deviation."""
        mean, root = posterior.predict(self.Phi)
        deviation = root.square().sum(dim=-1).sqrt()
        scores = mean[:, 0] + exploration * deviation
        ties = (scores == scores.max()).nonzero()[:, 0]
        arm = int(ties[int(stream.uniform(1) * len(ties))])
        return arm, float(deviation[arm])

    def choose(
        self, posterior: WeightPosterior, exploration: float, stream: Generator
    ) -> tuple[Tensor, float, float]:
        arm, deviation = self.index(posterior, exploration, stream)
        return self.Phi[arm : arm + 1], float(self.values[arm]), deviation


class Box:
    """The box of a separable function, searched along a grid of every variable."""

    best = 1.0

    def __init__(
        self, problem: StyblinskiTang | Michalewicz, features: FeatureMap, grid: int
    ) -> None:
        self.problem, self.features = problem, features
        self.grid = AdditiveGrid(features, torch.linspace(0, 1, grid, dtype=torch.float64))
        self.random_gap = separable_gap(problem)
        self.last: Tensor | None = None

    def choose(
        self, posterior: WeightPosterior, exploration: float, stream: Generator
    ) -> tuple[Tensor, float, float]:
        point, _ = self.grid.maximize_ucb(
            posterior, exploration=exploration, generator=stream, start=self.last
        )
        self.last = point
        with torch.no_grad():
            Phi = self.features(point)
        root = posterior.predict(Phi)[1]
        return Phi, float(self.problem.values(point)), float(root.norm())


def separable_gap(problem: StyblinskiTang | Michalewicz, points: int = 4096) -> float:
    """What a uniform point of the box loses, on average: a sum over variables, by midpoints."""
    axis = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    gap = 0.0
    for j in range(problem.dim):
        X = problem.x_opt.expand(points, problem.dim).clone()
        X[:, j] = axis
        gap += 1 - float(problem.values(X).mean())
    return gap


@dataclass(frozen=True)
class Environment:
    """One environment of Table 1, with the settings of one method.

    Attributes:
        actions: Builds its actions.
        noise_std: Of an outcome.
        half_range: What outcomes are clipped to, about 0.5.
        exploration: What the standard deviation is multiplied by.
        c: Of `BlockSum.length`.
        share: The longest block as a share of the rounds; None is one play a block.
    """

    actions: Callable[[], Actions]
    noise_std: float
    half_range: float
    exploration: float
    c: float = 1.0
    share: Callable[[int], float] | None = lambda m: 1 / (5 * m)


def _camelback() -> Actions:
    return Arms(Camelback(), square_features(0.25, 1e-2, 0.3))


def _styblinski(lengthscale: float, tol: float, scale: float) -> Callable[[], Actions]:
    return lambda: Box(StyblinskiTang(20), additive_features(20, lengthscale, tol, scale), 41)


def _michalewicz() -> Actions:
    return Box(Michalewicz(10), additive_features(10, 0.035, 0.1, 0.05), 81)


def _twentieth(num_features: int) -> float:
    return 0.05


ENVIRONMENTS = {
    ("camelback", "blocks"): Environment(_camelback, 0.1, 0.7, 1.5, 0.6, _twentieth),
    ("camelback", "none"): Environment(_camelback, 0.1, 0.7, 1.5, 0.6, _twentieth),
    ("camelback", "gram"): Environment(_camelback, 0.1, 0.7, 1.5),
    ("camelback", "published"): Environment(_camelback, 0.1, 0.7, 0.5),
    ("styblinski-tang", "published"): Environment(_styblinski(0.12, 0.05, 0.03), 0.02, 0.55, 0.5),
    ("michalewicz", "published"): Environment(_michalewicz, 0.02, 0.55, 0.5),
    ("styblinski-tang", "blocks"): Environment(_styblinski(0.12, 0.05, 0.03), 0.02, 0.55, 2.0),
    ("styblinski-tang", "none"): Environment(
        _styblinski(0.15, 0.01, 0.05), 0.02, 0.55, 0.5, share=None
    ),
    ("michalewicz", "blocks"): Environment(_michalewicz, 0.02, 0.55, 2.0),
    ("michalewicz", "none"): Environment(_michalewicz, 0.02, 0.55, 2.0, share=None),
}
TABLE1_KEYS = ("environment", "mechanism", "alpha", "delta", "trial")


@cache
def actions_of(environment: str, mechanism: str) -> Actions:
    return ENVIRONMENTS[environment, mechanism].actions()


def table_run(
    environment: str,
    mechanism: str,
    alpha: float | None,
    delta: float | None,
    trial: int,
    *,
    rounds: int = LONG,
) -> Line:
    """One trial of Table 1."""
    began = time.process_time()
    setting = ENVIRONMENTS[environment, mechanism]
    actions = actions_of(environment, mechanism)
    if isinstance(actions, Box):
        actions.last = None
    if mechanism in ("gram", "published"):
        plays, values = sum_plays(setting, actions, mechanism, alpha, delta, trial, rounds)
    else:
        plays, values = block_plays(setting, actions, alpha, delta, trial, rounds)
    gaps = np.repeat(actions.best - np.array(values), plays)
    regret = float(gaps.sum())
    return {
        "regret": round(regret, 3),
        "share_of_random": round(regret / (rounds * actions.random_gap), 5),
        "last_tenth": round(float(gaps[rounds - rounds // 10 :].sum()), 3),
        "curve": [round(float(gaps[:t].sum()), 2) for t in long_times(rounds)],
        "blocks": len(plays),
        "features": actions.features.num_features,
        "cpu_seconds": round(time.process_time() - began, 2),
        "seed": trial,
        "versions": versions(),
    }


def long_times(rounds: int) -> list[int]:
    """After how many rounds a curve of Table 1 is kept."""
    return [rounds * k // 20 for k in range(1, 21)]


def block_plays(
    setting: Environment,
    actions: Actions,
    alpha: float | None,
    delta: float | None,
    trial: int,
    rounds: int,
) -> tuple[list[int], list[float]]:
    """Blocks of public actions: how often each was played, and its expected outcome.

    Without alpha nothing is hidden, and blocks are as long as the noise of outcomes makes them. The
    last block may be unfinished; then it is played and not released.
    """
    phi, noise, variance = actions.features, InsecureSeededNoise(trial), setting.noise_std**2
    m = phi.num_features
    most = 1 if setting.share is None else max(1, int(setting.share(m) * rounds))
    mechanism = None
    if alpha is not None:
        assert delta is not None
        mechanism = BlockSum(
            outcome_bound=setting.half_range,
            centre=CENTRE,
            noise_multiplier=multiplier(alpha, delta),
        )
        state, _ = mechanism.start(ledger=free_ledger(), noise=noise)
    gram = torch.zeros(m, m, dtype=torch.float64)
    moment = torch.zeros(m, 1, dtype=torch.float64)
    plays: list[int] = []
    values: list[float] = []
    t = 0
    while t < rounds:
        posterior = WeightPosterior.from_total(Summary(gram, moment, phi.fingerprint))
        stream = generator(trial, "action", t)
        features, value, deviation = actions.choose(posterior, setting.exploration, stream)
        if mechanism is not None:
            length = mechanism.length(deviation, setting.noise_std, most=most, c=setting.c)
        else:
            needed = (setting.noise_std / (setting.c * max(deviation, 1e-9))) ** 2
            length = min(most, max(1, math.ceil(min(needed, most))))
        plays.append(min(length, rounds - t))
        values.append(value)
        t += plays[-1]
        if plays[-1] < length:
            break
        outcomes = value + setting.noise_std * generator(trial, "outcome", t).normal(length)
        if mechanism is not None:
            state = mechanism.open(state, length)
            state, release = mechanism.add(state, outcomes, noise=noise, path=("run",))
            assert release is not None
            mean, mean_var = release.mean, release.mean_var(variance)
        else:
            low, high = CENTRE - setting.half_range, CENTRE + setting.half_range
            mean, mean_var = float(outcomes.clamp(low, high).mean()), variance / length
        gram = gram + features.mT @ features / mean_var
        moment = moment + features.mT * ((mean - CENTRE) / mean_var)
    return plays, values


def sum_plays(
    setting: Environment,
    actions: Actions,
    mechanism: str,
    alpha: float | None,
    delta: float | None,
    trial: int,
    rounds: int,
) -> tuple[list[int], list[float]]:
    """The same bandit by the noisy running sum of records, as if actions had to be hidden."""
    assert alpha is not None and delta is not None
    scale = float(actions.features.outputscale.sum())
    likelihood = Likelihood(actions.features, setting.noise_std**2, scale)
    source = InsecureSeededNoise(trial)
    sums: Stream
    if mechanism == "published":
        sums = PublishedPrefix(likelihood, rounds, source, alpha=alpha, beta=delta)
    else:
        prefix = PrefixSum(
            num_features=actions.features.num_features,
            outcome_bound=setting.half_range,
            centre=CENTRE,
            horizon=rounds - 1,
            noise_multiplier=multiplier(alpha, delta),
        )
        sums = Prefix(likelihood, prefix, source)
    noise = setting.noise_std * generator(trial, "outcome").normal(rounds)
    values = []
    for t in range(rounds):
        stream = generator(trial, "action", t)
        features, value, _ = actions.choose(sums.posterior(), setting.exploration, stream)
        values.append(value)
        if t + 1 < rounds:
            outcome = value + float(noise[t])
            if mechanism == "published":
                outcome = min(max(outcome, 0.0), 1.0)
            sums.add(features / math.sqrt(scale), outcome)
    return [1] * rounds, values


def table_runs(name: str, trials: int | None = None, first: int = 0) -> list[Line]:
    """The runs of one environment and mechanism, ``camelback-blocks``."""
    environment, _, mechanism = name.rpartition("-")
    counts: dict[tuple[float | None, float | None], int] = {}
    usual = 100 if environment == "camelback" else 20  # the former take milliseconds
    if mechanism == "none":
        counts[None, None] = 100 if environment == "camelback" else 5
    else:
        for alpha in (10.0, 1.0, 0.1):
            counts[alpha, BETA] = 5 if mechanism in ("gram", "published") else usual
        if mechanism == "blocks":
            for alpha in (10.0, 1.0, 0.1):
                counts[alpha, SMALL] = usual
    what = {"environment": environment, "mechanism": mechanism}
    return [
        {**what, "alpha": alpha, "delta": delta, "trial": first + k}
        for k in range(max(counts.values()) if trials is None else trials)
        for (alpha, delta), count in counts.items()
        if trials is not None or k < count
    ]


PUBLISHED_TABLE1 = {  # cumulative regret without privacy and at alpha = 10, 1, 0.1
    "camelback": {None: 519, 10.0: 775, 1.0: 1029, 0.1: 3324},
    "styblinski-tang": {None: 885, 10.0: 1667, 1.0: 2680, 0.1: 4493},
    "michalewicz": {None: 901, 10.0: 1558, 1.0: 2883, 0.1: 5002},
}


def table_summary(entry: str = "table1") -> dict[str, Any]:
    """Regret by environment and mechanism; and the figures of the claim, of all entries."""
    lines = ENTRIES[entry].lines()
    rows: list[dict[str, Any]] = []
    for name in TABLE1_ROWS:
        environment, _, mechanism = name.rpartition("-")
        chosen = lines.select(environment=environment, mechanism=mechanism)
        for alpha, delta in dict.fromkeys((line["alpha"], line["delta"]) for line in chosen):
            found = [line for line in chosen if (line["alpha"], line["delta"]) == (alpha, delta)]
            what = {"environment": environment, "mechanism": mechanism}
            share = float(np.mean([line["share_of_random"] for line in found]))
            random = float(np.mean([line["regret"] / line["share_of_random"] for line in found]))
            row = {**what, "alpha": alpha, "delta": delta, **figures_of(found)}
            row |= {"share_of_random": round(share, 4), "random": round(random, 1)}
            if delta != SMALL:
                published = PUBLISHED_TABLE1[environment][alpha]
                row |= {"published": published, "published_share": round(published / random, 3)}
            rows.append(row)
    out: dict[str, Any] = {"rows": rows}
    of_bandit = {
        (row["row"], row["alpha"], row["beta"]): row for row in figure_summary("figure1")["rows"]
    }
    of_table = {
        (row["environment"], row["alpha"], row["delta"]): row
        for row in rows
        if row["mechanism"] == "blocks"
    }
    claims = {
        "synthetic_alpha1": of_bandit.get(("joint-sqrt", 1.0, BETA)),
        "synthetic_nonprivate": of_bandit.get(("nonprivate", None, None)),
        "synthetic_paper_alpha1": of_bandit.get(("joint-paper", 1.0, BETA)),
        "camel_alpha1": of_table.get(("camelback", 1.0, BETA)),
        "styb_alpha1": of_table.get(("styblinski-tang", 1.0, BETA)),
        "mw_alpha1": of_table.get(("michalewicz", 1.0, BETA)),
    }
    known = {key: row for key, row in claims.items() if row is not None}
    out |= {key: row["regret"][0] for key, row in known.items()}
    out["trials_of"] = {key: row["trials"] for key, row in known.items()}
    out["trials"] = min(out["trials_of"].values(), default=0)
    return out


def table_tables(entry: str, out: dict[str, Any]) -> list[Grid]:
    """The summary in words."""
    grid = _grid(
        f"{entry}: regret after {LONG:,} rounds, mean [95 % bootstrap interval]. Printed shares "
        "are of our random play: that scales agree is a guess",
        *("environment", "mechanism", "alpha", "delta", "trials", "regret", "worst", "of random"),
        *("random", "last tenth", "printed", "of random", "CPU s"),
    )
    for row in out["rows"]:
        grid.add_row(
            *(_said(row[key]) for key in ("environment", "mechanism", "alpha", "delta", "trials")),
            _mean(row["regret"]),
            f"{row['worst']:.0f}",
            f"{row['share_of_random']:.3f}",
            f"{row['random']:.0f}",
            *(_said(row.get(k)) for k in ("last_tenth", "published", "published_share")),
            _said(row["cpu_seconds"]),
        )
    return [grid]


# ------------------------------------------------------------------ what is computed when asked for

DEGREES = (8, 16, 32, 64)
CURVES = 40  # draws of what is random


def quadrature_summary(entry: str = "quadrature") -> dict[str, Any]:
    """The largest error of a kernel on the unit interval, by length scale and by features."""
    X = torch.linspace(0, 1, 401, dtype=torch.float64)[:, None]
    out: dict[str, Any] = {}
    for lengthscale in (0.1, 0.2, 0.5, 1.0):
        kernel = StationaryKernel(math.inf, [lengthscale])
        exact = kernel(X, X)
        out[f"{lengthscale:g}"] = row = {}
        for degree in DEGREES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # degrees below the transition are shown on purpose
                phi = QuadratureFourierFeatures.from_kernel(kernel, unit_box(1), degree=degree)
            row[f"quadrature-{degree}"] = _sup_error(phi, X, exact)
        for name, orthogonal in (("random-64", False), ("orthogonal-64", True)):
            errors = [
                _sup_error(
                    RandomFourierFeatures.draw(
                        kernel, 64, generator=generator(SEED, name, k), orthogonal=orthogonal
                    ),
                    X,
                    exact,
                )
                for k in range(CURVES)
            ]
            row[name] = float(np.mean(errors))
    return out


def _sup_error(phi: FeatureMap, X: Tensor, exact: Tensor) -> float:
    with torch.no_grad():
        Phi = phi(X)
    return float((Phi @ Phi.mT - exact).abs().max())


def quadrature_tables(entry: str, out: dict[str, Any]) -> list[Grid]:
    """The summary in words."""
    names = list(next(iter(out.values())))
    grid = _grid("Largest error on the unit interval, by features", "length scale", *names)
    for lengthscale, row in out.items():
        grid.add_row(lengthscale, *(f"{row[name]:.2g}" for name in names))
    return [grid]


def rmse_summary(entry: str = "rmse") -> dict[str, Any]:
    """Errors of the private mean, mean and standard error: a sine, and draws of the prior."""
    out: dict[str, Any] = {}
    for signal in ("sine", "prior"):
        curves = [speed.curve(k, ROUNDS - 1, drawn=signal == "prior") for k in range(CURVES)]
        for epsilon in (1.0, 10.0):
            out[f"{signal}, alpha = {epsilon:g}"] = {
                name: [float(np.mean(found)), float(np.std(found, ddof=1) / math.sqrt(len(found)))]
                for name, found in speed.errors_of(curves, epsilon).items()
            }
    return out


def rmse_tables(entry: str, out: dict[str, Any]) -> list[Grid]:
    """The summary in words."""
    grid = _grid("Error of the private mean (standard error), delta = 1e-5", "release", *out)
    for name in next(iter(out.values())):
        pairs = (column[name] for column in out.values())
        grid.add_row(name, *(f"{mean:.3f} ({error:.3f})" for mean, error in pairs))
    return [grid]


# ------------------------------------------------------------------ the command


@dataclass(frozen=True)
class Entry:
    """An entry with runs.

    Attributes:
        file: Where its results are.
        keys: What identifies a run.
        rows: Their names, fast ones first.
        runs: The runs of a row, for a number of trials and the first of them.
        work: What a run does.
    """

    file: str
    keys: tuple[str, ...]
    rows: tuple[str, ...]
    runs: Callable[[str, int | None, int], list[Line]]
    work: Callable[..., Line]

    def lines(self) -> Lines:
        return Lines(f"private_ucb/{self.file}", self.keys)


TABLE1_ROWS = (
    "camelback-none",
    "camelback-blocks",
    "camelback-gram",
    "camelback-published",
    "styblinski-tang-published",
    "michalewicz-published",
    "styblinski-tang-blocks",
    "michalewicz-blocks",
    "styblinski-tang-none",
    "michalewicz-none",
)
ENTRIES = {
    figure: Entry(
        "synthetic",
        SYNTHETIC_KEYS,
        figure_rows(figure),
        partial(synthetic_runs, figure),
        bandit_run,
    )
    for figure in FIGURES
}
ENTRIES["table1"] = Entry("table1", TABLE1_KEYS, TABLE1_ROWS, table_runs, table_run)
Summarise = Callable[[str], dict[str, Any]]
Show = Callable[[str, dict[str, Any]], list[Grid]]
COMPUTED = ("rmse", "quadrature")
SUMMARIES: dict[str, tuple[Summarise, Show]] = {
    **dict.fromkeys(FIGURES, (figure_summary, figure_tables)),
    "table1": (table_summary, table_tables),
    "rmse": (rmse_summary, rmse_tables),
    "quadrature": (quadrature_summary, quadrature_tables),
}


def summary(entry: str, *, as_json: bool) -> None:
    summarise, show = SUMMARIES[entry]
    out = summarise(entry)
    if as_json:
        print(json.dumps(out))
        return
    console = Console(width=200)
    for grid in show(entry, out):
        console.print(grid)


SMOKE = {"ROUNDS": 20, "CURVES": 2}


def smoke_all(trials: int) -> None:
    """Every row for a few rounds, and what is computed when asked for, a little of it."""
    for entry in (ENTRIES["figure1"], ENTRIES["table1"]):
        smoke(entry, entry.rows, trials, rounds=ROUNDS)
    for name in COMPUTED:
        summary(name, as_json=False)


def smoke(entry: Entry, rows: Sequence[str], trials: int, **options: int) -> None:
    """Every row at alpha = 1 and the paper's beta; nothing kept."""
    for row in rows:
        for run in entry.runs(row, trials, 0):
            delta = run["beta"] if "beta" in run else run["delta"]
            if (run["alpha"], delta) not in ((None, None), (1.0, BETA)):
                continue
            line = entry.work(**run, **options)
            said = " ".join(f"{k}={v}" for k, v in run.items())
            shown = {k: line.get(k) for k in ("regret", "last_tenth", "snr", "cpu_seconds")}
            print(said, " ".join(f"{k}={v}" for k, v in shown.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("entry", nargs="?", choices=(*SUMMARIES,))
    parser.add_argument("--trials", type=int, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--rows", nargs="*")
    parser.add_argument(
        "--smoke", type=int, nargs="?", const=1, metavar="TRIALS", help="keep nothing"
    )
    parser.add_argument("--summary", action="store_true", help="of what has been run")
    parser.add_argument("--json", action="store_true", help="the summary as one line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.entry is None:
        if options.smoke is None:
            parser.error("an entry, or --smoke")
        with patch.dict(globals(), SMOKE):
            smoke_all(options.smoke)
        return
    if options.summary or options.entry in COMPUTED:
        summary(options.entry, as_json=options.json)
        return
    entry = ENTRIES[options.entry]
    rows = options.rows or list(entry.rows)
    if strangers := [row for row in rows if row not in entry.rows]:
        parser.error(f"{options.entry} has no rows {strangers}: it has {list(entry.rows)}.")
    if options.smoke is not None:
        smoke(entry, rows, options.smoke)
        return
    lines = entry.lines()
    for row in rows:
        lines.fill(entry.runs(row, options.trials, options.first), entry.work, row)


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's lines."""


if __name__ == "__main__":
    main()
