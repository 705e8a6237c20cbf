r"""What every method of `benchmarks.transfer` is compared with: each control is one function.

    control(task, seed, starts, others) -> Trace

`starts` are the points with which each site that plays begins in a federation (`dealt_starts`);
sites that are not among them do not play. Alone a site has `own_starts`. `others` are finished
histories of sites that do not play, in the *late* suite. Rounds are synchronous: all sites ask
before any is told. Only own steps count as CPU.

    solo              own starts, the own model (closed form), log expected improvement; the
                      reference
    solo_dealt        the same from the starts of the federation
    sobol             a Sobol sequence of the own, on and on
    random            uniform points, or candidates
    default_first     the same with the user's default configuration in the place of the first start
    solo_botorch      `SingleTaskGP` with BoTorch's defaults, `fit_gpytorch_mll`,
                      `LogExpectedImprovement`, `optimize_acqf`; refitted for every query
    turbo             TuRBO-1 [Eriksson2019]_, one trust region per site
    ax                an `ax.api.client.Client` per site with Ax's default strategy, its own start
    multitask         BoTorch's `MultiTaskGP` on everybody's data: what others offer for transfer
    fmtbo             [Zhu2023]_, only hyperparameters are shared, see `FMTBO`
    pooled            the oracle: others' data, as the prior mean of the own model
    random_functions  the same with random functions in the place of what others say

.. [Eriksson2019] D. Eriksson, M. Pearce, J. Gardner, R. Turner, M. Poloczek. Scalable global
   optimization via local Bayesian optimization. NeurIPS 2019.
.. [Zhu2023] H. Zhu, X. Wang, Y. Jin. Federated many-task Bayesian optimization. IEEE Transactions
   on Evolutionary Computation 28(4), 2024 (early access 2023).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky
from torch import Tensor

from botorch_fed.acquisition.earned import (
    Domain,
    EarnedImprovement,
    log_improvement,
    maximize_improvement,
    maximize_prior,
)
from botorch_fed.federation.points import dealt_design
from botorch_fed.models.earned_prior import fit_earned, reference_points
from botorch_fed.models.local_gp import fit_local_gp, standardize
from botorch_fed.rng import Generator, generator

if TYPE_CHECKING:
    from benchmarks.transfer_tasks import Task

Array = NDArray[np.float64]
History = tuple[Tensor, Tensor]  # points `n x d` and outcomes `n x 1` as the site measures them
Histories = Mapping[str, History]
APART = 0.1  # a newcomer's first points, in the unit cube


# ------------------------------------------------------------------ what a run leaves


@dataclass(frozen=True, eq=False)
class Trace:
    """What the sites of a run have evaluated.

    Attributes:
        X: Points by site, `n x d`, the starts first.
        Y: Outcomes as the sites observed them, `n x 1`.
        true: Noise-free outcomes, larger is better, by site.
        cpu_seconds: Of all own steps together, without the objective.
        queries: How many own steps there were.
        bytes_per_round: What a site sends and gets in a round, where that is counted.
    """

    X: Mapping[str, Tensor]
    Y: Mapping[str, Tensor]
    true: Mapping[str, Array]
    cpu_seconds: float
    queries: int
    bytes_per_round: float | None = None


class Journal:
    """What the sites of a task have evaluated so far, and the CPU seconds of own steps."""

    def __init__(self, task: Task, seed: int, others: Histories | None = None) -> None:
        self.task = task
        self.seed = seed
        self.problem = task.problem()
        self.sign = -1.0 if task.space.outcome.minimize else 1.0
        self.X: dict[str, Tensor] = {}
        self.Y: dict[str, Tensor] = {}
        self.true: dict[str, Array] = {}
        self.playing: list[str] = []
        self.cpu_seconds = 0.0
        self.queries = 0
        for site, (X, Y) in (others or {}).items():
            self.X[site], self.Y[site] = X.double(), Y.double()

    def begin(self, site: str, X: Tensor) -> None:
        """A site that plays, and its starts, `0 x d` of them if it has none."""
        self.playing.append(site)
        self.X[site] = torch.zeros(0, X.shape[-1]).double()
        self.Y[site] = torch.zeros(0, 1).double()
        self.true[site] = np.zeros(0)
        if len(X):
            self.tell(site, X)

    def tell(self, site: str, X: Tensor) -> None:
        """Evaluate points at a site."""
        stream = generator(self.seed, "observed", site, len(self.X[site]))
        index = self.task.sites.index(site)
        Y = self.problem.observe(index, X.double(), stream).reshape(-1, 1).double()
        true = self.sign * self.task.evaluate(site, X.double()).reshape(-1).numpy()
        self.X[site] = torch.cat([self.X[site], X.double()])
        self.Y[site] = torch.cat([self.Y[site], Y])
        self.true[site] = np.concatenate([self.true[site], true])

    def larger(self, site: str) -> Array:
        """Observed outcomes, larger is better."""
        values: Array = self.sign * self.Y[site].numpy()[:, 0]
        return values

    def untaken(self, site: str) -> Tensor:
        """The candidates that the site has not evaluated yet; all if none is left."""
        candidates = self.task.candidates
        assert candidates is not None
        known = {row.tobytes() for row in (self.X[site] + 0.0).numpy()}
        rows = (candidates.double() + 0.0).numpy()
        fresh = np.array([row.tobytes() not in known for row in rows])
        return candidates[torch.from_numpy(fresh)] if fresh.any() else candidates

    @contextmanager
    def step(self, queries: int = 0) -> Iterator[None]:
        """Own steps, whose CPU seconds count."""
        begun = time.process_time()
        yield
        self.cpu_seconds += time.process_time() - begun
        self.queries += queries

    def trace(self) -> Trace:
        """What there is."""
        playing = self.playing
        return Trace(
            {site: self.X[site] for site in playing},
            {site: self.Y[site] for site in playing},
            {site: self.true[site] for site in playing},
            self.cpu_seconds,
            self.queries,
        )


Step = Callable[[Journal, str, int], Tensor]  # a site's next point `1 x d` in round 0, 1, …
Control = Callable[["Task", int, Mapping[str, Tensor], Histories | None], Trace]


def play(
    task: Task,
    seed: int,
    starts: Mapping[str, Tensor],
    step: Step,
    *,
    others: Histories | None = None,
    before: Callable[[Journal, int], None] | None = None,
) -> Trace:
    """Starts, then `task.queries` rounds.

    Args:
        task: What is to be optimised.
        seed: Of the run.
        starts: The first points of each site that plays.
        step: A site's next point.
        others: What other sites have observed and tell.
        before: What happens between rounds, e.g. at a server; its CPU counts.
    """
    journal = Journal(task, seed, others)
    for site, X in starts.items():
        journal.begin(site, X)
    for t in range(task.queries):
        asked = {}
        if before is not None:
            with journal.step():
                before(journal, t)
        for site in journal.playing:
            with journal.step(queries=1):
                asked[site] = step(journal, site, t)
        for site, X in asked.items():
            journal.tell(site, X)
    return journal.trace()


# ------------------------------------------------------------------ starts


def dealt_points(task: Task, seed: int, count: int) -> dict[str, Tensor]:
    """`count` points for each site, dealt from one scrambled Sobol sequence; see `dealt_starts`."""
    settings: dict[str, Any] = {"seed": seed, "candidates": task.candidates}
    total = len(task.sites)
    return {
        site: dealt_design(task.space, n, total, count, **settings)
        for n, site in enumerate(task.sites)
    }


def dealt_starts(task: Task, seed: int) -> dict[str, Tensor]:
    """The starts of a task and seed, the same for every method that sends messages.

    One Sobol sequence, scrambled by the seed, is dealt over the sites as the package's studies deal
    it, in blocks of neighbours; of candidates the nearest that a site has not got yet.
    """
    return dealt_points(task, seed, task.starts)


def own_points(task: Task, seed: int, count: int) -> dict[str, Tensor]:
    """`count` points for each site, of a scrambled Sobol sequence of its own."""
    listed = task.candidates
    return {
        site: dealt_design(task.space, 0, 1, count, seed=1000 * (n + 1) + seed, candidates=listed)
        for n, site in enumerate(task.sites)
    }


def own_starts(task: Task, seed: int, starts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As many starts for the same sites, as they would choose alone."""
    most = max(len(X) for X in starts.values())
    own = own_points(task, seed, most)
    return {site: own[site][: len(X)] for site, X in starts.items()}


def _nearest_untaken(candidates: Tensor, points: Tensor) -> Tensor:
    taken: list[int] = []
    distances = torch.cdist(points, candidates.double())
    for row in distances:
        row = row.clone()
        row[taken] = math.inf
        taken.append(int(row.argmin()))
    return candidates[taken].double()


# ------------------------------------------------------------------ points


def sobol(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """Every site's own sequence, on and on."""
    points = own_points(task, seed, max(len(X) for X in starts.values()) + task.queries)
    return play(
        task,
        seed,
        own_starts(task, seed, starts),
        lambda journal, site, t: points[site][len(journal.X[site]) :][:1],
        others=others,
    )


def random(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """Uniform points, or candidates that the site has not evaluated."""

    def step(journal: Journal, site: str, t: int) -> Tensor:
        stream = generator(seed, "random", site, t)
        if task.candidates is None:
            return task.space.snap(stream.uniform(1, task.space.dim))
        free = journal.untaken(site)
        row = int(stream.uniform(1) * len(free))
        return free[row : row + 1]

    return play(task, seed, starts, step, others=others)


# ------------------------------------------------------------------ the own model, a prior mean


def own_step(journal: Journal, site: str, t: int, prior: Any = None, *, name: str) -> Tensor:
    """The own model, fitted to the own data, and log expected improvement.

    Model and search are the package's, so that a difference to one of its methods is one of what
    is known, not of how it is used. With a prior one degree of trust is drawn for each query, which
    was better than averaging over them (area .161 against .172 on four tasks), and than full trust
    (.168).

    Args:
        journal: What there is.
        site: Whose step.
        t: The round.
        prior: What others say, as `earned_prior.PriorFunction`.
        name: Of the control, for its random numbers.
    """
    stream = generator(journal.seed, name, site, t)
    X, domain = journal.X[site], domain_of(journal, site)
    if not len(X):
        return maximize_prior(prior, domain, stream, apart=APART)
    Y = torch.from_numpy(journal.larger(site))[:, None]
    posterior = fit_earned(X, Y, prior)
    drawn = posterior.drawn(float(stream.uniform(1)))
    posterior = replace(
        posterior, components=posterior.components[drawn : drawn + 1], weights=np.ones(1)
    )
    improvement = EarnedImprovement.of(posterior, X)
    return maximize_improvement(improvement, domain, stream)


def domain_of(journal: Journal, site: str) -> Domain:
    """Where a site's next point may lie."""
    space = journal.task.space
    lower, upper = space.bounds
    return Domain(lower, upper, journal.X[site], journal.task.candidates, space.snap)


def solo(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """As a site does alone: `own_starts`, its own model, log expected improvement."""
    return solo_dealt(task, seed, own_starts(task, seed, starts), others)


def solo_dealt(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """The same from the starts of the federation: what is left is what is said."""
    return play(task, seed, starts, partial(own_step, name="solo"), others=others)


def default_first(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """The user's default configuration in the place of the first start, then as `solo`."""
    own = with_default(task, own_starts(task, seed, starts))
    return solo_dealt(task, seed, own, others)


def with_default(task: Task, starts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The starts with the default in the place of the first, nobody's twice."""
    default = task.default.double()
    if task.candidates is not None:
        default = _nearest_untaken(task.candidates, default)
    changed = {}
    for site, X in starts.items():
        rest = X[~(X == default).all(dim=-1)]
        changed[site] = torch.cat([default, rest[len(rest) - len(X) + 1 :]])
    return changed


class MeanPrior:
    """The mean of functions as a prior function, standardised over public points."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]], dim: int) -> None:
        self.functions = functions
        self.dim = dim
        self.centre, self.scale = 0.0, 1.0
        values = self.values(reference_points(dim))
        self.centre, self.scale = float(values.mean()), max(float(values.std()), 1e-9)

    def __call__(self, X: Tensor) -> Tensor:
        """Values at `n x d` points, `n`."""
        total = torch.stack([function(X) for function in self.functions]).mean(dim=0)
        return (total - self.centre) / self.scale

    def values(self, X: Tensor) -> Array:
        """The same for closed forms."""
        with torch.no_grad():
            values: Array = self(X).numpy()
        return values


def posterior_mean(X: Tensor, y: Array) -> Callable[[Tensor], Tensor]:
    """A site's own posterior mean, on its standardised scale, as a function of tensors."""
    model = fit_local_gp(X.numpy(), standardize(y).values)
    lengthscale, weights = torch.from_numpy(model.lengthscale), torch.from_numpy(model.weights)
    scaled = X / lengthscale

    def mean(points: Tensor) -> Tensor:
        here = points / lengthscale
        squares = (
            here.square().sum(-1, keepdim=True) + scaled.square().sum(-1) - 2 * here @ scaled.T
        )
        return model.variance**0.5 * (model.constant + (-0.5 * squares).exp() @ weights)

    return mean


def pooled(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """The oracle: the mean of the posterior means of others' own models is the prior mean."""
    means: dict[str, Callable[[Tensor], Tensor]] = {}

    def before(journal: Journal, t: int) -> None:
        for site, X in journal.X.items():
            if len(X) and (t == 0 or site in journal.playing):
                means[site] = posterior_mean(X, journal.larger(site))

    def step(journal: Journal, site: str, t: int) -> Tensor:
        theirs = [mean for other, mean in means.items() if other != site]
        prior = MeanPrior(theirs, task.space.dim)
        return own_step(journal, site, t, prior, name="pooled")

    return play(task, seed, starts, step, others=others, before=before)


class RandomFunction:
    """A draw of a smooth Gaussian process on the unit cube, with deviation 1."""

    def __init__(self, dim: int, stream: Generator, features: int = 200) -> None:
        self.frequencies = stream.normal(features, dim) / (0.35 * dim**0.5)
        self.phases = 2 * math.pi * stream.uniform(features)
        self.weights = stream.normal(features) * (2 / features) ** 0.5

    def __call__(self, X: Tensor) -> Tensor:
        """Values at `n x d` points, `n`."""
        return (X @ self.frequencies.T + self.phases).cos() @ self.weights


def random_functions(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """As `pooled`, but what others say is a random function each, drawn once."""
    drawn = {
        site: RandomFunction(task.space.dim, generator(seed, "random function", site))
        for site in task.sites
    }

    def step(journal: Journal, site: str, t: int) -> Tensor:
        theirs = [function for other, function in drawn.items() if other != site]
        prior = MeanPrior(theirs, task.space.dim)
        return own_step(journal, site, t, prior, name="random functions")

    return play(task, seed, starts, step, others=others)


# ------------------------------------------------------------------ closed forms


def log_expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """The logarithm of expected improvement."""
    deviation = np.maximum(deviation, 1e-10)
    found: Array = log_improvement((mean - best) / deviation) + np.log(deviation)
    return found


Score = Callable[[Array], Array]  # of `K x d` points


def best_point(journal: Journal, site: str, score: Score, stream: Generator) -> Tensor:
    """The untaken candidate, or the point of the cube, with the largest score, `1 x d`."""
    if journal.task.candidates is not None:
        free = journal.untaken(site)
        best = int(np.argmax(score(free.numpy())))
        return free[best : best + 1].double()
    tried = journal.X[site].numpy()
    order = np.argsort(journal.larger(site))[::-1][:5]
    found = climb(score, journal.task.space.dim, stream, tried[order])
    return journal.task.space.snap(torch.from_numpy(found)[None])


def climb(score: Score, dim: int, stream: Generator, good: Array, rounds: int = 5) -> Array:
    """A point with a large score: random ones, then steps that get shorter around the best.

    Args:
        score: What is to be maximised over the unit cube.
        dim: Its dimension.
        stream: All randomness.
        good: Points `k x d` around which to look as well, e.g. the best so far.
        rounds: How often steps get shorter.
    """
    pool = stream.uniform(1000, dim).numpy()
    if len(good):
        steps = 0.1 * stream.normal(40, len(good), dim).numpy()
        pool = np.concatenate([pool, np.clip(good + steps, 0, 1).reshape(-1, dim)])
    values = score(pool)
    for r in range(rounds):
        top = np.argsort(values)[::-1][:20]
        pool, values = pool[top], values[top]
        few = (stream.uniform(20, 20, dim) < max(0.2, 2 / dim)).numpy()  # coordinates of a step
        steps = stream.normal(20, 20, dim).numpy() * few * 0.2 * 0.4**r
        near = np.clip(pool + steps, 0, 1).reshape(-1, dim)
        pool, values = np.concatenate([pool, near]), np.concatenate([values, score(near)])
    best: Array = pool[int(np.argmax(values))]
    return best


# ------------------------------------------------------------------ federated many-task BO


class Dace:
    r"""Kriging as FMTBO's code uses it: constant trend, one :math:`\theta_k` a dimension.

    Correlations are :math:`\exp(-\sum_k \theta_k (x_k - x'_k)^2)` on inputs and outcomes with
    mean 0 and deviation 1; the profile likelihood is climbed by a few rounds of a pattern search
    over :math:`\theta \in [10^{-5}, 100]` from where it starts, so that the start matters.
    """

    LOWER, UPPER = 1e-5, 100.0

    def __init__(self, X: Array, y: Array, theta: Array) -> None:
        spread = X.std(axis=0, ddof=1)
        self.centre, self.width = X.mean(axis=0), np.where(spread > 1e-12, spread, 1.0)
        deviation = float(y.std(ddof=1))
        self.offset, self.scale = float(y.mean()), deviation if deviation > 1e-12 else 1.0
        self.X = (X - self.centre) / self.width
        self.z = (y - self.offset) / self.scale
        self.squares = (self.X[:, None, :] - self.X[None, :, :]) ** 2
        self.nugget = (10 + len(X)) * np.finfo(float).eps
        self.theta = self._searched(np.clip(theta, self.LOWER, self.UPPER))
        self._solve(self.theta)

    def _searched(self, theta: Array) -> Array:
        """DACE's pattern search: a factor up or down in each coordinate, then along what helped."""
        dim = len(theta)
        factors = 2.0 ** (np.arange(1, dim + 1) / (dim + 2))
        value = self._solve(theta)
        for _ in range(2 if dim <= 2 else min(dim, 4)):
            begun = theta.copy()
            for k in range(dim):
                for factor in (factors[k], 1 / factors[k]):
                    tried = theta.copy()
                    tried[k] = min(max(theta[k] * factor, self.LOWER), self.UPPER)
                    new = self._solve(tried)
                    if new < value:
                        theta, value = tried, new
                        break
            along = theta / begun
            if (along == 1).all():
                factors = factors**0.5
                continue
            while True:
                tried = np.clip(theta * along, self.LOWER, self.UPPER)
                new = self._solve(tried)
                if new >= value:
                    break
                theta, value, along = tried, new, along**2
        return theta

    def _solve(self, theta: Array) -> float:
        """Minus the profile likelihood, as `sigma^2 |R|^(1/n)`; keeps what predictions need."""
        n = len(self.z)
        R = np.exp(-(self.squares @ theta))
        R.flat[:: n + 1] += self.nugget
        try:
            self.L = cholesky(R, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return math.inf
        self.ones = cho_solve((self.L, True), np.ones(n), check_finite=False)
        self.trend = float(self.ones @ self.z / self.ones.sum())
        self.gamma = cho_solve((self.L, True), self.z - self.trend, check_finite=False)
        self.variance = float((self.z - self.trend) @ self.gamma / n)
        return self.variance * math.exp(2 * float(np.log(np.diag(self.L)).mean()))

    def moments(self, points: Array) -> tuple[Array, Array]:
        """Prediction and its deviation at `K x d` points, on the outcomes' own scale."""
        root = np.sqrt(self.theta)
        here, there = (points - self.centre) / self.width * root, self.X * root
        squares = (here**2).sum(1)[:, None] + (there**2).sum(1) - 2 * here @ there.T
        r = np.exp(-np.maximum(squares, 0))
        solved = cho_solve((self.L, True), r.T, check_finite=False)
        trend = (1 - r @ self.ones) ** 2 / self.ones.sum()
        share = np.maximum(1 + trend - np.einsum("kn,nk->k", r, solved), 1e-15)
        mean = self.offset + self.scale * (self.trend + r @ self.gamma)
        return mean, self.scale * np.sqrt(max(self.variance, 1e-15) * share)


@dataclass
class FMTBO:
    r"""Federated many-task Bayesian optimisation [Zhu2023]_.

    Written after the paper's abstract and the authors' released code (``clientgp``, ``servergp``);
    nothing is copied. What is shared: hyperparameters, and ranks of predictions.

    - Surrogates: Kriging with a constant trend and one length scale a dimension (`Dace`). A client
      has two, on the same own data: the *global* one's search for hyperparameters starts where the
      server says, the *local* one's at :math:`\theta = 5`, both anew in every round.
    - Dissimilarity of clients: how many ordered pairs of common random points, as many as a client
      has starts, the two *global* surrogates rank differently.
    - Aggregation: for each client the mean, weighted by numbers of observations, of the
      :math:`\theta` of its nearest clients, itself included. The abstract says "aggregation
      according to a dissimilarity matrix"; the code takes a share of them by a flag without a
      default in the part that was seen: here .8 of them, as in a public re-implementation.
    - Acquisition: the mean of the expected improvements of both surrogates, equal weights.
    - Its maximum: a genetic algorithm of 20 generations from the own starts in the code; here the
      better of that many evaluations by `climb`, or all candidates of a table. Points that were
      tried already are replaced by random ones there, left out here.
    """

    share: float = 0.8
    first: float = 5.0
    points: Array = field(default_factory=lambda: np.zeros((0, 0)))
    surrogates: dict[str, tuple[Dace, Dace]] = field(default_factory=dict)
    theta: dict[str, Array] = field(default_factory=dict)

    def before(self, journal: Journal, t: int) -> None:
        """Clients fit and rank; the server averages what it was sent in the round before."""
        if t == 0:
            dim, count = journal.task.space.dim, max(journal.task.starts, 10)
            self.points = generator(journal.seed, "common points").uniform(count, dim).numpy()
        start = np.full(journal.task.space.dim, self.first)
        for site, X in journal.X.items():
            if len(X) >= 2 and (t == 0 or site in journal.playing):
                data = X.numpy(), journal.larger(site)
                theirs = Dace(*data, self.theta.get(site, start))
                self.surrogates[site] = theirs, Dace(*data, start)
        self._aggregate({site: len(journal.X[site]) for site in self.surrogates})

    def _aggregate(self, counts: Mapping[str, int]) -> None:
        """The next start of every client's global surrogate."""
        names = list(self.surrogates)
        thetas = np.array([self.surrogates[name][0].theta for name in names])
        means = np.array([self.surrogates[name][0].moments(self.points)[0] for name in names])
        above = means[:, :, None] < means[:, None, :]
        for n, name in enumerate(names):
            disagreement = (above[n] ^ above).sum(axis=(1, 2))
            disagreement[n] = -1  # itself first
            near = np.argsort(disagreement, kind="stable")[: max(1, int(self.share * len(names)))]
            weights = np.array([counts[names[m]] for m in near], dtype=float)
            self.theta[name] = weights @ thetas[near] / weights.sum()

    def step(self, journal: Journal, site: str, t: int) -> Tensor:
        """The largest mean of both expected improvements."""
        pair = self.surrogates[site]
        best = float(journal.larger(site).max())

        def score(points: Array) -> Array:
            both = [log_expected_improvement(*model.moments(points), best) for model in pair]
            sum_: Array = np.logaddexp(*both)
            return sum_

        return best_point(journal, site, score, generator(journal.seed, "fmtbo", site, t))


def fmtbo(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """A run of `FMTBO`."""
    method = FMTBO()
    return play(task, seed, starts, method.step, others=others, before=method.before)


# ------------------------------------------------------------------ BoTorch, as its users call it


FIT_ITERATIONS = 100  # of `multitask`


def _torch_seed(seed: int, *path: int | str) -> int:
    return int(float(generator(seed, *path).uniform(1)) * 2**31)


def _best_by(journal: Journal, site: str, acquisition: Any, seed: int) -> Tensor:
    """`optimize_acqf` with its usual settings, or the best untaken candidate of a table."""
    from botorch.optim.optimize import optimize_acqf
    from botorch.utils.sampling import manual_seed

    if journal.task.candidates is not None:
        free = journal.untaken(site).double()
        with torch.no_grad():
            values = torch.cat([acquisition(part[:, None]) for part in free.split(2048)])
        best = int(values.argmax())
        return free[best : best + 1]
    bounds = journal.task.space.bounds
    with manual_seed(seed):
        point, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=10, raw_samples=512)
    return journal.task.space.snap(point.detach())


def solo_botorch(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """BoTorch's `SingleTaskGP` and log expected improvement with default settings."""
    return play(task, seed, starts, _botorch_step, others=others)


def _botorch_step(journal: Journal, site: str, t: int) -> Tensor:
    from botorch.acquisition.analytic import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    Y = torch.from_numpy(journal.larger(site))[:, None]
    model = SingleTaskGP(journal.X[site], Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = LogExpectedImprovement(model, best_f=Y.max())
    return _best_by(journal, site, acquisition, _torch_seed(journal.seed, "botorch", site, t))


def multitask(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """`MultiTaskGP` on everybody's data, each site's standardised; fitted once a round for all.

    Default settings, except that a fit ends after `FIT_ITERATIONS`: left alone it takes thousands,
    17 s for three observations at each of eight sites. After five rounds hyperparameters are fitted
    in every fourth.
    """
    shared: dict[str, Any] = {}

    def before(journal: Journal, t: int) -> None:
        sites = [site for site in journal.X if len(journal.X[site])]
        anew = t < 5 or t % 4 == 0 or sites != shared["sites"]
        known = None if anew else shared["model"].state_dict()
        shared.update(sites=sites, model=_multitask_model(journal, sites, known))

    def step(journal: Journal, site: str, t: int) -> Tensor:
        if site not in shared["sites"]:  # a newcomer without data: nothing to tell tasks apart by
            return dealt_points(task, seed, 1)[site]
        index = shared["sites"].index(site)
        best = float(standardize(journal.larger(site)).values.max())
        acquisition = _of_task(shared["model"], index, best)
        return _best_by(journal, site, acquisition, _torch_seed(seed, "multitask", site, t))

    return play(task, seed, starts, step, others=others, before=before)


def _multitask_model(journal: Journal, sites: list[str], known: Any = None) -> Any:
    """The model of these sites, with known hyperparameters or with fitted ones."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import MultiTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    rows = [
        torch.cat([journal.X[site], torch.full((len(journal.X[site]), 1), float(n)).double()], 1)
        for n, site in enumerate(sites)
    ]
    Y = np.concatenate([standardize(journal.larger(site)).values for site in sites])
    model = MultiTaskGP(
        torch.cat(rows), torch.from_numpy(Y)[:, None], task_feature=-1, outcome_transform=None
    )
    if known is not None:
        model.load_state_dict(known)
        return model.eval()
    fit_gpytorch_mll(
        ExactMarginalLogLikelihood(model.likelihood, model),
        optimizer_kwargs={"options": {"maxiter": FIT_ITERATIONS}},
    )
    return model


def _of_task(model: Any, index: int, best: float) -> Any:
    """Log expected improvement of one task, of which points say the number in a last column."""
    from botorch.acquisition.analytic import LogExpectedImprovement
    from botorch.acquisition.fixed_feature import FixedFeatureAcquisitionFunction

    model._num_outputs = 1  # with the column there is one output, whatever the number of tasks
    dim = model.train_inputs[0].shape[-1]
    base = LogExpectedImprovement(model, best_f=best)
    return FixedFeatureAcquisitionFunction(base, d=dim, columns=[dim - 1], values=[float(index)])


@dataclass
class TrustRegion:
    """The state of TuRBO-1: the side of the box, and how luck was counted."""

    length: float = 0.8
    successes: int = 0
    failures: int = 0
    since: int = 0  # observations before this one belong to an earlier region

    def told(self, best_before: float, value: float, dim: int) -> None:
        """Grow after three improvements in a row, shrink after `max(4, d)` queries without."""
        if value > best_before + 1e-3 * abs(best_before):
            self.successes, self.failures = self.successes + 1, 0
        else:
            self.successes, self.failures = 0, self.failures + 1
        if self.successes == 3:
            self.length, self.successes = min(2 * self.length, 1.6), 0
        elif self.failures == max(4, dim):
            self.length, self.failures = self.length / 2, 0


def turbo(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """TuRBO-1 with Thompson sampling, one region per site.

    As in the paper and BoTorch's tutorial: Matérn-5/2 kernel with length scales in [.005, 4], noise
    in [1e-8, 1e-3]; a box around the best point, sides scaled by the length scales; min(100 d,
    5000) perturbed Sobol candidates, of which a posterior sample is the largest. A region that has
    shrunk below 2^-7 starts again from `starts` random points.
    """
    regions = {site: TrustRegion() for site in starts}

    def step(journal: Journal, site: str, t: int) -> Tensor:
        region, y = regions[site], journal.larger(site)
        if len(y) > task.starts + region.since:
            region.told(float(y[region.since : -1].max()), float(y[-1]), task.space.dim)
        if region.length < 0.5**7:
            regions[site] = region = TrustRegion(since=len(y))
        if len(y) < region.since + task.starts:
            stream = generator(seed, "turbo restart", site, t)
            return task.space.snap(stream.uniform(1, task.space.dim))
        X, y = journal.X[site][region.since :], standardize(y[region.since :]).values
        point = _turbo_point(X, y, region.length, _torch_seed(seed, "turbo", site, t))
        return _snapped(journal, site, point)

    return play(task, seed, starts, step, others=others)


def _turbo_point(X: Tensor, y: Array, length: float, seed: int) -> Tensor:
    from botorch.generation import MaxPosteriorSampling
    from botorch.utils.sampling import manual_seed
    from torch.quasirandom import SobolEngine

    dim = X.shape[-1]
    model = _turbo_model(X, torch.from_numpy(y)[:, None])
    centre = X[int(np.argmax(y))]
    weights = model.covar_module.base_kernel.lengthscale.detach().flatten()
    weights = weights / weights.log().mean().exp()
    lower = (centre - 0.5 * length * weights).clamp(0, 1)
    upper = (centre + 0.5 * length * weights).clamp(0, 1)
    count = min(5000, max(2000, 100 * dim))
    with manual_seed(seed), torch.no_grad():
        points = SobolEngine(dim, scramble=True, seed=seed).draw(count, dtype=torch.float64)
        points = lower + (upper - lower) * points
        mask = torch.rand(count, dim) <= min(20.0 / dim, 1.0)
        empty = (~mask.any(dim=1)).nonzero().flatten()
        mask[empty, torch.randint(0, dim, (len(empty),))] = True
        points = torch.where(mask, points, centre)
        found: Tensor = MaxPosteriorSampling(model, replacement=False)(points, num_samples=1)
    return found


def _turbo_model(X: Tensor, Y: Tensor) -> Any:
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.constraints import Interval
    from gpytorch.kernels import MaternKernel, ScaleKernel
    from gpytorch.likelihoods import GaussianLikelihood
    from gpytorch.mlls import ExactMarginalLogLikelihood

    likelihood = GaussianLikelihood(noise_constraint=Interval(1e-8, 1e-3))
    matern = MaternKernel(
        nu=2.5, ard_num_dims=X.shape[-1], lengthscale_constraint=Interval(0.005, 4.0)
    )
    model = SingleTaskGP(
        X, Y, covar_module=ScaleKernel(matern), likelihood=likelihood, outcome_transform=None
    )
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def _snapped(journal: Journal, site: str, point: Tensor) -> Tensor:
    """The point that the site can evaluate: of a table the nearest candidate not evaluated yet."""
    if journal.task.candidates is None:
        return journal.task.space.snap(point)
    free = journal.untaken(site)
    return free[torch.cdist(point, free.double()).argmin(dim=-1)].double()


# ------------------------------------------------------------------ Ax


def ax(
    task: Task, seed: int, starts: Mapping[str, Tensor], others: Histories | None = None
) -> Trace:
    """A client of Ax per site, with as many evaluations in all and Ax's own start.

    A client sees the parameters as a user would name them. Of a table it gets the value of the
    nearest candidate, as if that were what it has asked for.
    """
    clients = {site: _ax_client(task, _torch_seed(seed, "ax", site)) for site in starts}
    trials: dict[str, int] = {}

    def step(journal: Journal, site: str, t: int) -> Tensor:
        client = clients[site]
        if site in trials:
            value = float(journal.larger(site)[-1])
            client.complete_trial(trials[site], raw_data={"score": value})
        ((trials[site], point),) = client.get_next_trials(max_trials=1).items()
        return _snapped(journal, site, _ax_point(task, point))

    none = {site: X[:0] for site, X in starts.items()}
    rounds = task.queries + max(map(len, starts.values()))
    return play(replace(task, queries=rounds), seed, none, step, others=others)


def _ax_client(task: Task, seed: int) -> Any:
    from ax.api.client import Client
    from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

    parameters: list[Any] = []
    for p in task.space.parameters:
        if p.kind == "choice":
            parameters.append(ChoiceParameterConfig(p.name, list(p.values), "str"))
            continue
        integer = p.kind == "integer"
        bounds = (int(p.lower), int(p.upper)) if integer else (p.lower, p.upper)
        kind = "int" if integer else "float"
        parameters.append(RangeParameterConfig(p.name, bounds, kind, scaling=p.scale))
    client = Client(random_seed=seed % 2**31)
    client.configure_experiment(parameters=parameters)
    client.configure_optimization(objective="score")
    return client


def _ax_point(task: Task, point: Mapping[str, Any]) -> Tensor:
    """A trial's arm as a point of the unit cube."""
    kinds = {p.name: p.kind for p in task.space.parameters}
    cast = {"integer": int, "real": float, "choice": str}
    return task.space.to_unit([{name: cast[kinds[name]](point[name]) for name in kinds}])


# ------------------------------------------------------------------ the list

CONTROLS: dict[str, Control] = {
    "solo": solo,
    "solo_dealt": solo_dealt,
    "sobol": sobol,
    "random": random,
    "default_first": default_first,
    "fmtbo": fmtbo,
    "pooled": pooled,
    "random_functions": random_functions,
    "multitask": multitask,
    "solo_botorch": solo_botorch,
    "turbo": turbo,
    "ax": ax,
}
FEW_SITES = ("solo_botorch", "turbo", "ax")  # slow, nothing is exchanged: some sites will do
ALONE = (
    "solo",
    "solo_dealt",
    "sobol",
    "random",
    "default_first",
    *FEW_SITES,
)  # nothing of the others is used
COLD = ("pooled", "random_functions", "multitask", "ax")  # a newcomer needs no own starts for them
