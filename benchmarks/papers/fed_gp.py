"""The experiments of the federated sparse Gaussian process (FBO-FedGP), each a named entry.

    python -m benchmarks.papers.fed_gp ENTRY [--seeds N] [--methods M …]     run what is missing
    python -m benchmarks.papers.fed_gp ENTRY --summary [--json]              from committed results
    python -m benchmarks.papers.fed_gp ENTRY --smoke 3                       3 rounds, nothing kept
    python -m benchmarks.papers.fed_gp --smoke                   a round of what needs no data
    python -m benchmarks.papers.fed_gp --list                                all entries

    cec2005        Tables 1 and 5: ten agents minimise one function together, 4 + 50 points each;
                   functions F1-F6, F8-F11, F13-F16 by default, ``--functions 1 … 20``
    tune           the published methods' free settings, on functions that are not compared
    ablations      what ours and the shared model owe to their parts, on four functions
    published      the published algorithms one part changed at a time: order of clients, support
                   set, local process, width of the bound, |S| (Fig. 5)
    tasks          credit default, diabetes, SUPPORT, landmine: error curves
    support        Fig. 6: support sets by four rules and of three sizes, on the same tasks
    schedules      Fig. 7: own steps with probability 1 - t^-c, four c, on the same tasks
    acquisitions   Fig. 4: UCB, EI and PI with 3, 6 and 9 agents
    times          Tables 2-4: CPU seconds of encrypted runs, of all agents and the server together
    explored, others   not run, and why

All that is run needs ``BOTORCH_FED_DATA``. Every function or task has a file of its own, so that
processes for different ones can run side by side. Seeds 0-999 are pilots, on which settings were
chosen; results are of seeds from 1,000 on. What the paper leaves unstated was fixed before any run:

- the four first points of every agent are uniform and common to all methods and functions of a
  seed; on tasks they are drawn from the first 1,024 Sobol points;
- all methods see outcomes by the same public map (`SearchSpace.outcome`, `CEC2005`: mean and
  deviation of the function over its box, to one digit). Nothing else is known beforehand;
- ``best`` is the federation's best value after every round, ``mean`` the mean of
  the agents' best values: the paper does not say which of them its Table 1 has. On F4 and F17
  both are of observed values, noise included, and ``true`` is the noise-free value where
  ``best`` was seen;
- sums are opened in the clear (``channel="plain"``): an encrypted run has the same trace, bit for
  bit, and other times. ``times`` has a joint key and |S| of 8, 16 and 32; Table 4, whose |S| is
  not said, has 16;
- ``ours`` is `RegionSearch()`, whose settings were chosen on pilot seeds of the very functions
  that are compared, among some thirty variants, and of F12, F17 and F18; ``default`` is
  `TransferSearch()`, the package's default, of which nothing was chosen here. ``sequential`` is
  the published method, Algorithms 1 and 2 to the letter (`published.fbo_fedgp`): one agent after
  the other, a support set of the agents' inputs, sparse local processes. ``faithful`` is the
  package's published search: all agents at once in a round, public support points, exact local
  processes. Both have the settings that `tune` found best for them on F12 and F17-F20 (F7's
  optimum lies outside its box), and ``global`` (the shared model alone) those of the latter.
  ``fmtbo`` shares hyperparameters and ranks. ``local`` is expected improvement on
  a site's own fitted model, without any communication; ``fts`` has the good own model, 100 cosine
  features of a wide public kernel, new messages in every round and 1 - p_t = 1/sqrt(t);
  ``dp_fts_de`` its default settings at epsilon = 10 for the whole run (PLD, zero-out, per agent,
  delta = N^-1.1 = 0.079: the paper's, and large), spent in the first rounds. ``pooled`` is no
  federated method but a yardstick: TuRBO with all data in one place, ten Thompson samples a
  round;
- tasks are tabulated once on 1,024 Sobol points and the corners of the cube, for every agent, and
  agents choose among those, so that the best possible error is known; errors are means over agents.
  That best is the smallest of many noisy validation errors, and optimistic by that;
- the support sets of Algorithm 1 are clusters of the agents' first points, which it reveals; stored
  lines of ``algorithm1`` that do not say which code made them are from when its second half was a
  weighted k-means; those of the noisy k-means are two steps from Sobol points, with the discrete
  Gaussian noise of all agents together worth epsilon = 1, delta = 1e-5 per observation.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as Grid
from torch import Tensor

from benchmarks.papers.ledger import Line, Results, stored_lines, versions
from benchmarks.papers.published.fbo_fedgp import PaperFedGP, approximation_error, optimise
from benchmarks.papers.published.features import PaperCosine
from benchmarks.papers.published.printed import fedgp_table1
from benchmarks.papers.published.settings import paper_fedgp, paper_search
from benchmarks.papers.published.support import (
    assign_sums,
    centres_from_sums,
    published_support,
)
from benchmarks.papers.tabulated import NUM_SOBOL, Tabulated, made_up, tabulate
from benchmarks.problems.cec2005 import CEC2005
from benchmarks.problems.landmine import Landmine
from benchmarks.problems.risk import CreditDefault, DiabetesHealth, SupportMortality
from benchmarks.statistics import (
    Effect,
    average_ranks,
    holm,
    interval,
    named_family,
    paired,
    signed_rank,
)
from benchmarks.transfer_controls import FMTBO
from benchmarks.transfer_controls import play as play_control
from benchmarks.transfer_tasks import Task
from botorch_fed.acquisition import Polynomial
from botorch_fed.aggregation.secure_sum import ChannelKind
from botorch_fed.models import OwnHyperparameters, fit_own_gp
from botorch_fed.models.support import sobol_support
from botorch_fed.privacy import Budget, InsecureSeededNoise, SignalWarning
from botorch_fed.privacy.distributed import DistributedGaussianSum, noise_multiplier_within
from botorch_fed.rng import Generator, generator
from botorch_fed.run import Study, run
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.released import Following
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.studies import DPFTSDE, FTS, FedGP, default_kernel
from botorch_fed.test_functions.base import FederatedTestProblem
from botorch_fed.test_functions.sklearn_tuning import SklearnTuning

SEED = 20260103
FIRST_SEED = 1000
KEYS = ("method", "seed")
FUNCTIONS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15, 16)
TUNING = (12, 17, 18, 19, 20)
ABLATED = (2, 6, 9, 15)
CHANGED = (1, 2, 9)  # on which parts are changed
AGENTS, ROUNDS, START = 10, 50, 4
OPTIMIZER: dict[str, Any] = {"num_raw": 256, "num_restarts": 3, "num_features": 256}

FAITHFUL = paper_search(lengthscale=0.5, noise_var=1e-3, beta=1.0, support_size=16)
PUBLISHED = paper_fedgp()
TUNED_AT_ONCE = paper_fedgp(  # what FAITHFUL has
    support="sobol", local="exact", support_size=16, clusters=2, lengthscale=0.5
)
OURS = RegionSearch()


# ------------------------------------------------------------------ a game and those who play it


@dataclass(frozen=True, eq=False)
class Game:
    """What a method is given.

    Attributes:
        problem: The agents' objectives.
        data: The agents' first points and their outcomes.
        rounds: Queries of every agent.
        seed: Of the run.
    """

    problem: FederatedTestProblem
    data: Mapping[str, tuple[Tensor, Tensor]]
    rounds: int
    seed: int

    @property
    def points(self) -> Tensor | None:
        """The only points that can be evaluated, if not all of the unit cube can."""
        return self.problem.points if isinstance(self.problem, Tabulated) else None

    def objectives(self) -> dict[str, _Seeded]:
        """The agents' objectives, their noise being that of the seed."""
        return {agent(n): _Seeded(self.problem, n, self.seed) for n in range(len(self.problem))}


@dataclass(frozen=True, eq=False)
class Played:
    """What came of it: points `N x T x d`, outcomes `N x T`, and what else is worth a line."""

    X: Tensor
    Y: Tensor
    said: Line


Method = Callable[[Game], Played]


def agent(n: int) -> str:
    return f"agent{n}"


class _Seeded:
    """An agent's objective, whose noise depends on the seed and on how often it was asked."""

    def __init__(self, problem: FederatedTestProblem, n: int, seed: int) -> None:
        self.problem, self.n, self.seed = problem, n, seed
        self.calls = 0

    def __call__(self, X: Tensor) -> Tensor:
        stream = generator(SEED, "noise", self.seed, self.n, self.calls)
        self.calls += 1
        return observed(self.problem, self.n, X, stream)


def observed(problem: FederatedTestProblem, n: int, X: Tensor, stream: Generator) -> Tensor:
    """Outcomes as an agent sees them, `n x 1`."""
    if isinstance(problem, CEC2005):
        return problem.observe(n, X, stream).reshape(-1, 1)
    return problem.evaluate(n, X).reshape(-1, 1)


def starts(problem: FederatedTestProblem, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The first points of every agent, common to all methods, and their outcomes."""
    data = {}
    for n in range(len(problem)):
        X = generator(SEED, "starts", seed, n).uniform(START, problem.dim)
        if isinstance(problem, Tabulated):
            order = generator(SEED, "starts", seed, n).uniform(NUM_SOBOL).argsort(stable=True)
            X = problem.points[order[:START]]
        data[agent(n)] = X, observed(problem, n, X, generator(SEED, "noise", seed, n, "start"))
    return data


def by_study(make: Callable[[Game], Study]) -> Method:
    """A method that is a protocol."""

    def play(game: Game) -> Played:
        study = make(game)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SignalWarning)  # the line has epsilon
            result = run(
                study,
                game.objectives(),
                space=game.problem.space,
                seed=game.seed,
                progress=False,
            )
        histories = [result.history(name) for name in result.names]
        said: Line = {"settings": settings_of(study)}
        privacy = result.privacy or {}
        for key in ("sums", "epsilon", "delta"):
            if key in privacy:
                said[key] = privacy[key]
        traffic = sum(result.bytes_per_round().values())
        said["bytes_per_agent_and_round"] = round(traffic / len(histories) / game.rounds)
        X = torch.stack([X for X, _ in histories])
        return Played(X, torch.stack([Y for _, Y in histories]).squeeze(-1), said)

    return play


def settings_of(study: Study) -> str:
    """The settings that are not the defaults of their class."""
    search = study.search if isinstance(study, FedGP) else getattr(study, "strategy", None)
    return "" if search is None else changed(search)


def changed(settings: Any) -> str:
    """Settings of a dataclass that are not its defaults."""
    default = type(settings)()
    changes = {
        f.name: getattr(settings, f.name)
        for f in fields(settings)
        if getattr(settings, f.name) != getattr(default, f.name)
    }
    if changes.get("support"):
        changes["support"] = f"{len(changes['support'])} points"
    listed = ", ".join(f"{key}={value!r}" for key, value in changes.items())
    return f"{type(settings).__name__}({listed})"


def searching(
    search: TransferSearch | SupportSearch | RegionSearch, channel: ChannelKind = "plain"
) -> Method:
    """FBO-FedGP with a search."""
    return by_study(
        lambda game: FedGP(
            budget=game.rounds,
            search=search,
            channel=channel,
            num_initial=START,
            data=game.data,
            candidates=game.points,
        )
    )


def fts(game: Game) -> FTS:
    """The published transfer of samples, with a good own model."""
    kernel = default_kernel(game.problem.dim)
    stream = generator(SEED, "fts features")
    return FTS(
        budget=game.rounds,
        feature_map=PaperCosine.draw(kernel, 100, generator=stream),
        message="sample",
        strategy=Strategy(schedule=Polynomial(0.5), prior_until=0, own="thompson", **OPTIMIZER),
        every=1,
        data=game.data,
        candidates=game.points,
    )


def dp_fts_de(game: Game) -> DPFTSDE:
    """The private default at epsilon = 10."""
    return DPFTSDE(
        budget=game.rounds,
        epsilon=10.0,
        num_initial=0,
        strategy=Following(**OPTIMIZER),
        noise=InsecureSeededNoise(game.seed),
        data=game.data,
        candidates=game.points,
    )


def fmtbo(game: Game) -> Played:
    """`transfer_controls.FMTBO`, from the authors' code; noisy first points are observed anew."""
    objectives = game.objectives()
    task = Task(
        name="a game",
        suite="high",
        space=game.problem.space,
        sites=tuple(objectives),
        candidates=game.points,
        default=torch.full((1, game.problem.dim), 0.5, dtype=torch.float64),
        values=None,
        starts=START,
        queries=game.rounds,
        scales=dict.fromkeys(objectives, (1.0, 0.0)),
        functions=objectives,
    )
    firsts = {name: X for name, (X, _) in game.data.items()}
    method = FMTBO()
    trace = play_control(task, game.seed, firsts, method.step, before=method.before)
    X, Y = (torch.stack([of[name][START:] for name in firsts]) for of in (trace.X, trace.Y))
    return Played(X, Y.squeeze(-1), {"settings": ""})


def random(game: Game) -> Played:
    """Uniform points, none twice on a list."""
    X = []
    for n in range(len(game.problem)):
        stream = generator(SEED, "random", game.seed, n)
        if game.points is None:
            X.append(stream.uniform(game.rounds, game.problem.dim))
        else:
            order = stream.uniform(len(game.points)).argsort(stable=True)
            X.append(game.points[order[: game.rounds]])
    objectives = game.objectives()
    Y = [
        torch.cat([objectives[agent(n)](x[None]) for x in rows]).squeeze(-1)
        for n, rows in enumerate(X)
    ]
    return Played(torch.stack(X), torch.stack(Y), {"settings": ""})


def published(settings: PaperFedGP) -> Method:
    """Algorithms 1 and 2 as they are printed."""

    def play(game: Game) -> Played:
        trace = optimise(
            settings,
            list(game.objectives().values()),
            list(game.data.values()),
            space=game.problem.space,
            rounds=game.rounds,
            seed=game.seed,
            candidates=game.points,
        )
        error = approximation_error(
            settings,
            trace,
            list(game.data.values()),
            space=game.problem.space,
            points=generator(SEED, "approximation").uniform(NUM_SOBOL, game.problem.dim),
        )
        said: Line = {"settings": changed(settings), "sums": trace.sums}
        said["error_of_mean"], said["error_of_deviation"] = (float(f"{e:.4g}") for e in error)
        return Played(trace.X, trace.Y, said)

    return play


# ------------------------------------------------------------------ the yardstick: pooled data

LARGEST, SMALLEST, FIRST = 1.6, 0.5**7, 0.8  # sides of the trust region, as in TuRBO
SUCCESSES, FAILURES = 3, 2  # batches, before the region grows or shrinks
CANDIDATES = 1000
NEAR = 256  # points that the model sees, the nearest to the best
REFIT = 3  # rounds between fits


def pooled(game: Game) -> Played:
    """TuRBO with one region [Eriksson2019]_, of all agents' data: ten Thompson samples a round.

    Outcomes are standardised, on a linear or a logarithmic scale, whichever has the larger
    evidence. Unlike the original, two batches without success shrink the region, not one (chosen
    on seeds 0 and 1 of F6, F9 and F15, in favour of this method), and a region that has become too
    small grows again around the best point, where the original starts anew and forgets its data.

    .. [Eriksson2019] D. Eriksson, M. Pearce, J. Gardner, R. D. Turner, M. Poloczek. Scalable global
       optimization via local Bayesian optimization. NeurIPS 2019.
    """
    objectives, outcome = list(game.objectives().values()), game.problem.space.outcome
    q, d = len(objectives), game.problem.dim
    X = torch.cat([x for x, _ in game.data.values()])
    Y = outcome.to_public(torch.cat([y for _, y in game.data.values()]).squeeze(-1))
    first = len(X)
    length, wins, losses, model = FIRST, 0, 0, None
    for t in range(game.rounds):
        best = X[Y.argmax()]
        near = (X - best).abs().amax(dim=-1).argsort(stable=True)[:NEAR]
        if model is None or t % REFIT == 0:
            model = _pooled_fit(X[near], Y[near], model)
        weights = model.known.lengthscale / model.known.lengthscale.log().mean().exp()
        half = (length / 2 * weights).clamp(max=1.0)
        lower, upper = (best - half).clamp(0, 1), (best + half).clamp(0, 1)
        stream = generator(SEED, "pooled", game.seed, t)
        points = lower + (upper - lower) * stream.uniform(CANDIDATES, d)
        kept = stream.uniform(CANDIDATES, d) >= min(20 / d, 1.0)
        points = torch.where(kept, best, points)
        draws = _pooled_draws(model, X[near], Y[near], points, q, stream)
        rows: list[int] = []
        for draw in draws:
            draw[rows] = -math.inf
            rows.append(int(draw.argmax()))
        new_Y = torch.cat([f(points[row][None]) for f, row in zip(objectives, rows, strict=True)])
        new_public = outcome.to_public(new_Y.squeeze(-1))
        margin = 1e-3 * Y[near].std()
        success = bool(new_public.max() > Y.max() + margin)
        wins, losses = (wins + 1, 0) if success else (0, losses + 1)
        if wins == SUCCESSES:
            length, wins = min(2 * length, LARGEST), 0
        elif losses == FAILURES:
            length, losses = length / 2, 0
        length = FIRST if length < SMALLEST else length
        X, Y = torch.cat([X, points[rows]]), torch.cat([Y, new_public])
    new_X = X[first:].reshape(game.rounds, q, d).transpose(0, 1)
    values = outcome.from_public(Y[first:]).reshape(game.rounds, q).T
    return Played(new_X, values, {"settings": ""})


@dataclass(frozen=True, eq=False)
class _Pooled:
    """A fitted model of pooled data: outcomes are standardised after a warp."""

    known: OwnHyperparameters
    log: bool
    top: float
    reach: float
    mean: float
    std: float

    def scaled(self, Y: Tensor) -> Tensor:
        Z = Y
        if self.log:
            gap = (self.top - Y) / self.reach
            Z = -torch.where(gap > 0, gap.clamp_min(0).log1p(), gap)
        return (Z - self.mean) / self.std


def _pooled_fit(X: Tensor, Y: Tensor, last: _Pooled | None) -> _Pooled:
    top, reach = float(Y.max()), max(0.05 * float(Y.max() - Y.median()), 1e-9)
    found, evidence = None, -math.inf
    for log in (False, True):
        raw = _Pooled(_UNKNOWN, log, top, reach, 0.0, 1.0).scaled(Y)
        std = max(float(raw.std()), 1e-12)
        model = _Pooled(_UNKNOWN, log, top, reach, float(raw.mean()), std)
        Z = model.scaled(Y)
        start = last.known if last is not None and last.log == log else None
        known = fit_own_gp(X, Z[:, None], start=start)
        slope = -len(Y) * math.log(std)
        if log:
            slope -= float(((top - Y) / reach).log1p().sum()) + len(Y) * math.log(reach)
        value = _log_evidence(X, Z, known) + slope
        if value > evidence:
            found, evidence = replace(model, known=known), value
    assert found is not None
    return found


_UNKNOWN = OwnHyperparameters(torch.ones(1).double(), 1.0, 1.0, 0.0, 0)


def _covariance(A: Tensor, B: Tensor, known: OwnHyperparameters) -> Tensor:
    distance = torch.cdist(A / known.lengthscale, B / known.lengthscale)
    return known.outputscale * torch.exp(-0.5 * distance.square())


def _factor(X: Tensor, known: OwnHyperparameters) -> Tensor:
    K = _covariance(X, X, known)
    K.diagonal().add_(known.noise_var + 1e-8 * known.outputscale)
    return torch.linalg.cholesky(K)


def _log_evidence(X: Tensor, Z: Tensor, known: OwnHyperparameters) -> float:
    L = _factor(X, known)
    residual = torch.linalg.solve_triangular(L, (Z - known.mean)[:, None], upper=False)
    return float(-0.5 * residual.square().sum() - L.diagonal().log().sum())


def _pooled_draws(
    model: _Pooled, X: Tensor, Y: Tensor, points: Tensor, count: int, stream: Generator
) -> Tensor:
    """Draws of the function at the points, `count x K`."""
    known = model.known
    L = _factor(X, known)
    residual = torch.linalg.solve_triangular(
        L, (model.scaled(Y) - known.mean)[:, None], upper=False
    )
    A = torch.linalg.solve_triangular(L, _covariance(X, points, known), upper=False)
    covariance = _covariance(points, points, known) - A.T @ A
    covariance.diagonal().add_(1e-6 * known.outputscale)
    root = torch.linalg.cholesky(covariance)
    mean = known.mean + (A.T @ residual).squeeze(-1)
    return mean + stream.normal(count, len(points)) @ root.T


# ------------------------------------------------------------------ methods

METHODS: dict[str, Method] = {
    "ours": searching(OURS),
    "default": searching(TransferSearch()),
    "sequential": published(PUBLISHED),
    "faithful": searching(FAITHFUL),
    "fts": by_study(fts),
    "dp_fts_de": by_study(dp_fts_de),
    "fmtbo": fmtbo,
    "local": searching(SupportSearch(models="local", local="fitted", acquisition="ei")),
    "global": searching(replace(FAITHFUL, models="global")),
    "random": random,
    "pooled": pooled,
}


def tuning_rows() -> dict[str, Method]:
    """The faithful method's free settings."""
    rules: tuple[tuple[str, dict[str, Any]], ...] = (
        *((f"ucb{beta:g}", {"acquisition": "ucb", "beta": beta}) for beta in (0.25, 1.0, 4.0)),
        ("ei", {"acquisition": "ei"}),
    )
    return {
        f"S{size}-l{lengthscale:g}-n{noise_var:g}-{name}": searching(
            paper_search(lengthscale=lengthscale, noise_var=noise_var, support_size=size, **rule)
        )
        for size in (8, 16)
        for lengthscale in (0.3, 0.5, 1.0, 2.0)
        for noise_var in (1e-4, 1e-3, 1e-2)
        for name, rule in rules
    } | {
        f"sequential-S{size}-l{lengthscale:g}-n{noise_var:g}-{width}": published(
            PaperFedGP(
                support_size=size,
                clusters=clusters_of(size, AGENTS),
                lengthscale=lengthscale,
                noise_var=noise_var,
                beta=beta,
            )
        )
        for size in (8, 16, 32)
        for lengthscale in (0.5, 1.0, 2.0, 4.0)
        for noise_var in (1e-4, 1e-3, 1e-2)
        for width, beta in (("b0.25", 0.25), ("b1", 1.0), ("b4", 4.0), ("theory", None))
    }


# One setting changed at a time; all others can be named.
TUNED_FIRST = (
    "S16-l1-n0.001-ucb1",
    *(f"S16-l{lengthscale:g}-n0.001-ucb1" for lengthscale in (0.3, 0.5, 2.0)),
    *("S16-l1-n0.0001-ucb1", "S16-l1-n0.01-ucb1"),
    *("S16-l1-n0.001-ucb0.25", "S16-l1-n0.001-ucb4", "S16-l1-n0.001-ei"),
    "S8-l1-n0.001-ucb1",
)


def ablation_rows() -> dict[str, Method]:
    """Ours and the published search, one part changed at a time."""
    ours: dict[str, dict[str, Any]] = {
        "ours": {},
        "ours-no-warp": {"warps": ("linear",)},
        "ours-one-kernel": {"num_candidates": 1},
        "ours-mean": {"spread": 0.0},
        "ours-no-region": {"final_half_width": 0.5},
        "ours-region-0.1": {"final_half_width": 0.1},
        "ours-region-0.001": {"final_half_width": 0.001},
        "ours-16": {"num_inducing": 16},
    }
    if "quadratic" in {f.name for f in fields(RegionSearch)}:
        ours["ours-no-quadratic"] = {"quadratic": False}
    published: dict[str, dict[str, Any]] = {
        "faithful": {},
        "faithful-pic": {"prediction": "pic"},
        "faithful-fitted": {"local": "fitted"},
        "faithful-128": {"support_size": 128},
    }
    return {
        **{name: searching(replace(OURS, **changes)) for name, changes in ours.items()},
        **{name: searching(replace(FAITHFUL, **changes)) for name, changes in published.items()},
    }


def published_rows() -> dict[str, Method]:
    """``sequential`` with one part changed at a time, and ``faithful`` in both orders."""
    changes: dict[str, dict[str, Any]] = {
        "at-once": {"sequential": False},
        "theory": {"beta": None},
        "sobol": {"support": "sobol"},
        "exact-local": {"local": "exact"},
        **{
            f"S{size}": {"support_size": size, "clusters": clusters_of(size, AGENTS)}
            for size in (8, 16, 32)
            if size != PUBLISHED.support_size
        },
    }
    variants = {name: replace(PUBLISHED, **change) for name, change in changes.items()}
    variants["faithful-sequential"] = TUNED_AT_ONCE
    variants["faithful-at-once"] = replace(TUNED_AT_ONCE, sequential=False)
    return {name: published(settings) for name, settings in variants.items()}


# ------------------------------------------------------------------ support sets

EPSILON, DELTA, STEPS = 1.0, 1e-5, 2  # of the noisy k-means, per observation


def support_of(kind: str, size: int, game: Game) -> Tensor:
    """A support set, `S x d`."""
    dim = game.problem.dim
    if kind == "sobol":
        return sobol_support(dim, size)
    if kind == "random":
        return generator(SEED, "support", game.seed).uniform(size, dim)
    return _clustered(size, game) if kind == "algorithm1" else _noisy_clusters(size, game)


def clusters_of(size: int, agents: int) -> int:
    """How many centres an agent sends in Algorithm 1, which the paper does not say."""
    return max(2, math.ceil(size / agents))


def _clustered(size: int, game: Game) -> Tensor:
    """Algorithm 1 on the agents' first points."""
    k = clusters_of(size, len(game.data))
    inputs = [X for X, _ in game.data.values()]
    streams = [generator(SEED, "clusters", game.seed, n) for n in range(len(inputs))]
    streams.append(generator(SEED, "clusters", game.seed))
    found = published_support(inputs, size, clusters=k, streams=streams)
    return torch.cat([found, sobol_support(game.problem.dim, size)])[:size]


def _noisy_clusters(size: int, game: Game) -> Tensor:
    """Two steps of k-means from Sobol points, sums with the discrete noise of all agents."""
    dim, count = game.problem.dim, len(game.data)
    sensitivity = math.sqrt(1 + dim / 4)  # of one observation
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)
        mechanism = DistributedGaussianSum(
            dim=size * (dim + 1),
            clip_norm=sensitivity,
            num_agents=count,
            noise_multiplier=noise_multiplier_within(Budget(EPSILON, DELTA), num_releases=STEPS),
        )
    noise = InsecureSeededNoise(game.seed)
    centres = sobol_support(dim, size)
    for step in range(STEPS):
        total = torch.zeros(mechanism.dim, dtype=torch.float64)
        for name, (X, _) in game.data.items():
            sums, counts = assign_sums(X, centres)
            own = mechanism.share_of_noise(noise=noise, path=("clusters", step, name))
            total += torch.cat([sums.flatten(), counts]) + mechanism.grid.to_values(own)
        sums, counts = total[: size * dim].reshape(size, dim), total[size * dim :]
        least = 2 * mechanism.noise_std
        centres = centres_from_sums(sums, counts, centres, min_count=least)
    return centres


def with_support(kind: str, size: int) -> Method:
    """The published method with a support set."""

    def play(game: Game) -> Played:
        points = tuple(map(tuple, support_of(kind, size, game).tolist()))
        return searching(replace(FAITHFUL, support_size=size, support=points))(game)

    return play


# ------------------------------------------------------------------ entries

TASKS: dict[str, Callable[[], FederatedTestProblem]] = {
    "credit": cache(lambda: tabulate(CreditDefault(30), "credit-30")),
    "diabetes": cache(lambda: tabulate(DiabetesHealth(30), "diabetes-30")),
    "support": cache(lambda: tabulate(SupportMortality(9), "support-9")),
    "landmine": cache(lambda: tabulate(Landmine(scale="log", score="error"), "landmine-log-error")),
    "landmine-auc": cache(lambda: tabulate(Landmine(scale="log"), "landmine-log")),
}


FOUR = ("credit", "diabetes", "support", "landmine")


def cec(function: int) -> Callable[[], FederatedTestProblem]:
    return cache(lambda: CEC2005(function, AGENTS))


def cec_name(function: int) -> str:
    return f"F{function:02d}"


CEC = {cec_name(function): cec(function) for function in range(1, 21)}
DECAYS = {"c=1": 1.0, "c=.75": 0.75, "c=.5": 0.5, "c=.25": 0.25}
PLAYERS = {
    f"support-{count}": cache(
        lambda count=count: tabulate(SupportMortality(count), f"support-{count}")
    )
    for count in (3, 6, 9)
}


SIZES = (8, 16, 32)
TIMES_TASKS: dict[str, Callable[[], FederatedTestProblem]] = {
    **{name: TASKS[name] for name in FOUR},
    **{
        f"diabetes-{count}": cache(
            lambda count=count: tabulate(DiabetesHealth(count), f"diabetes-{count}")
        )
        for count in (10, 20)
    },
}


def timed_rows() -> dict[str, Method]:
    """The published search under a joint key, by |S|, and by schedule at |S| = 16."""
    rows = {f"S{size}": replace(FAITHFUL, support_size=size) for size in SIZES}
    rows |= {
        f"S16-{name}": replace(FAITHFUL, support_size=16, decay=c)
        for name, c in DECAYS.items()
        if c != FAITHFUL.decay
    }
    return {name: searching(search, "threshold") for name, search in rows.items()}


@dataclass(frozen=True)
class Entry:
    """An experiment.

    Attributes:
        units: Its functions or tasks, each with a file of results.
        default: Those that are run by default.
        methods: Its rows.
        seeds: How many, by default,
        first: from which on.
        usual: The rows that are run by default, if not all.
    """

    units: Mapping[str, Callable[[], FederatedTestProblem]]
    default: tuple[str, ...]
    methods: Mapping[str, Method]
    seeds: int
    first: int = FIRST_SEED
    usual: tuple[str, ...] = ()


def chosen(*names: str) -> dict[str, Method]:
    return {name: METHODS[name] for name in names}


ENTRIES = {
    "cec2005": Entry(CEC, tuple(map(cec_name, FUNCTIONS)), METHODS, 5),
    "tune": Entry(CEC, tuple(map(cec_name, TUNING)), tuning_rows(), 2, first=0, usual=TUNED_FIRST),
    "ablations": Entry(CEC, tuple(map(cec_name, ABLATED)), ablation_rows(), 3),
    "published": Entry(
        CEC,
        tuple(map(cec_name, CHANGED)),
        {**chosen("sequential"), **published_rows()},  # the former's lines are those of cec2005
        10,
        usual=tuple(published_rows()),
    ),
    "tasks": Entry(
        TASKS,
        FOUR,
        chosen("ours", "default", "faithful", "local", "global", "fts", "random"),
        10,
    ),
    "support": Entry(
        TASKS,
        FOUR,
        {
            f"{kind}-{size}": with_support(kind, size)
            for size in (8, 16, 32)
            for kind in ("sobol", "random", "algorithm1", "dp-k-means")
        },
        10,
    ),
    "schedules": Entry(
        TASKS,
        FOUR,
        {name: searching(replace(FAITHFUL, decay=c)) for name, c in DECAYS.items()},
        10,
    ),
    "acquisitions": Entry(
        PLAYERS,
        tuple(PLAYERS),
        {rule: searching(replace(FAITHFUL, acquisition=rule)) for rule in ("ucb", "ei", "pi")},
        10,
    ),
    "times": Entry(TIMES_TASKS, tuple(TIMES_TASKS), timed_rows(), 2),
}
NOT_RUN = {
    "explored": "Fig. 8 shows explored points on six functions. How ten dimensions are drawn is in "
    "none of our sources; new lines have the points' mean distance to the optimum by round.",
    "others": "EPPBO, FEPPBO and FCSBO are columns of Table 1 that are shown as printed. No "
    "description of the first two was found. Of FCSBO only the abstract was: sites share inputs "
    "that compressed sensing has perturbed, and a random site fits a model to all. Sensing matrix, "
    "basis, reconstruction and its rate, and who queries what are not in it.",
}


# ------------------------------------------------------------------ one line


def sign_of(problem: FederatedTestProblem) -> float:
    return -1.0 if problem.space.outcome.minimize else 1.0


def one_run(entry: str, unit: str, method: str, seed: int, *, rounds: int = ROUNDS) -> Line:
    """A method on a function or task."""
    problem = ENTRIES[entry].units[unit]()
    game = Game(problem, starts(problem, seed), rounds, seed)
    began = time.process_time()
    played = ENTRIES[entry].methods[method](game)
    spent = time.process_time() - began
    sign = sign_of(problem)
    first = torch.stack([Y.flatten() for _, Y in game.data.values()])
    top = (sign * first).amax(dim=-1, keepdim=True)
    own = torch.cat([top, sign * played.Y], dim=-1).cummax(dim=-1).values
    line: Line = {
        "best": _rounded(sign * own.amax(dim=0)),
        "mean": _rounded(sign * own.mean(dim=0)),
        **played.said,
    }
    if isinstance(problem, CEC2005):
        line["distance"] = _rounded(_distances(problem, played), 4)
    if isinstance(problem, CEC2005) and problem.noise_level:
        line["true"] = _rounded(_noise_free(game, played).reshape(1))[0]
    if isinstance(problem, Tabulated):
        lowest = sign * (sign * problem.values).amax(dim=-1)
        line["optimum"] = float(f"{lowest.mean():.7g}")
    return {**line, "cpu_seconds": round(spent, 2), "versions": versions()}


def _noise_free(game: Game, played: Played) -> Tensor:
    """The noise-free value where the federation saw its best one."""
    firsts = [X for X, _ in game.data.values()]
    X = torch.cat([*firsts, played.X.flatten(0, 1)])
    Y = torch.cat([*[Y.flatten() for _, Y in game.data.values()], played.Y.flatten()])
    at = int((sign_of(game.problem) * Y).argmax())
    return game.problem.evaluate(0, X[at : at + 1])


def _distances(problem: CEC2005, played: Played) -> Tensor:
    """Mean distance of every round's points to the optimum, in diagonals of the cube."""
    optimum = (problem.x_opt - problem.lower) / (problem.upper - problem.lower)
    return (played.X - optimum).norm(dim=-1).mean(dim=0) / math.sqrt(problem.dim)


def _rounded(values: Tensor, digits: int = 7) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]


class Lines(Results):
    """Results whose lists are whole traces, one number per round."""

    def __init__(self, name: str) -> None:
        super().__init__(name, KEYS)
        self.lines = stored_lines(self.path)

    def at(self, method: str, t: int, key: str = "best") -> dict[int, float]:
        """Values after `t` rounds by seed."""
        return {line["seed"]: line[key][t] for line in self.select(method=method)}

    def mean(self, method: str, t: int = -1, key: str = "best") -> float:
        return float(np.mean(list(self.at(method, t, key).values())))

    def methods(self) -> list[str]:
        return list(dict.fromkeys(line["method"] for line in self.lines))


def lines_of(entry: str, unit: str) -> Lines:
    return Lines(f"fed_gp/{entry}-{unit}")


# ------------------------------------------------------------------ Tables 1 and 5


def cec_summary(entry: str = "cec2005") -> dict[str, Any]:
    """The figures of the claim."""
    found = {unit: lines_of(entry, unit) for unit in CEC}
    found = {unit: lines for unit, lines in found.items() if lines.lines}
    if not found:
        raise SystemExit(f"{entry} has no results yet.")
    if entry == "published":
        for unit, lines in found.items():
            lines.lines += lines_of("cec2005", unit).select(method="sequential")
    names = [m for m in ENTRIES[entry].methods if any(m in f.methods() for f in found.values())]
    out: dict[str, Any] = {"functions": list(found)}
    means: dict[str, dict[str, dict[str, float]]] = {}
    for key in ("best", "mean"):
        means[key] = {
            name: {
                unit: lines.mean(name, key=key)
                for unit, lines in found.items()
                if name in lines.methods()
            }
            for name in names
        }
    best = means["best"]
    primary = set(map(cec_name, FUNCTIONS)) if entry == "cec2005" else set(found)
    counted = {m: {u: v for u, v in units.items() if u in primary} for m, units in best.items()}
    out["rank"] = average_ranks({m: units for m, units in counted.items() if units})
    each = {
        m: {u: v for u, v in units.items() if u in primary} for m, units in means["mean"].items()
    }
    out["rank_mean_over_agents"] = average_ranks({m: units for m, units in each.items() if units})
    out["mean"] = _by_unit(best, found)
    out["mean_over_agents"] = _by_unit(means["mean"], found)
    out["seeds"] = {
        name: min(len(lines.select(method=name)) for u, lines in found.items() if u in best[name])
        for name in names
    }
    out["cpu_seconds"] = {
        name: round(
            float(
                np.mean(
                    [
                        line["cpu_seconds"]
                        for lines in found.values()
                        for line in lines.select(method=name)
                    ]
                )
            ),
            2,
        )
        for name in names
    }
    base = names[0]
    others = [name for name in names if name != base and counted[name]]
    out[f"{base}_against"] = _tests(found, base, others, primary)
    out[f"{base}_against_on_all"] = _tests(found, base, others, found)
    if entry == "cec2005":
        out["p_ours_vs_faithful"] = out.get("ours_against", {}).get("faithful", {}).get("p")
        if {"ours", "faithful"} <= out["rank"].keys():
            pair = average_ranks({m: counted[m] for m in ("ours", "faithful")})
            out["rank_difference"] = round(pair["ours"] - pair["faithful"], 4)
        out |= _beside_table1(counted, each)
    return out


def _by_unit(
    means: Mapping[str, Mapping[str, float]], units: Iterable[str]
) -> dict[str, dict[str, float]]:
    return {
        unit: {m: float(f"{v[unit]:.6g}") for m, v in means.items() if unit in v} for unit in units
    }


def _tests(
    found: Mapping[str, Lines], base: str, others: Sequence[str], units: Iterable[str]
) -> dict[str, dict[str, float]]:
    """The first method against each of the others, a family."""
    tests = [_paired(found, base, name, units) for name in others]
    for test, p in zip(tests, holm(test["p"] for test in tests), strict=True):
        test["p_holm"] = p
    return dict(zip(others, tests, strict=True))


def _paired(found: Mapping[str, Lines], a: str, b: str, units: Iterable[str]) -> dict[str, float]:
    """The test of two methods on the seeds that both have."""
    values: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for unit, lines in found.items():
        mine, theirs = lines.at(a, -1), lines.at(b, -1)
        common = sorted(mine.keys() & theirs.keys())
        if common and unit in units:
            values[0][unit] = float(np.mean([mine[s] for s in common]))
            values[1][unit] = float(np.mean([theirs[s] for s in common]))
    return signed_rank(*values)


def _beside_table1(
    best: Mapping[str, Mapping[str, float]], each: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    printed = fedgp_table1()
    if "ours" not in best:
        return {}
    out: dict[str, Any] = {}
    for name, mine in (("wins_vs_table1", best["ours"]), ("wins_mean_over_agents", each["ours"])):
        out[name] = {
            column: sum(mine[unit] < values[unit] for unit in mine)
            for column, values in printed.items()
        }
    out["ranks_table1"] = average_ranks(printed)  # as recomputed from all 20 printed rows
    out["ranks_beside_table1"] = {
        name: average_ranks({name: best[name], **printed})
        for name in ("ours", "sequential", "faithful")
        if best.get(name)
    }
    return out


def cec_tables(out: Mapping[str, Any], title: str, *, printed: bool) -> list[Grid]:
    """The summary in words."""
    columns = fedgp_table1() if printed else {}
    names = list(out["seeds"])
    grids = []
    for key, what in (("mean", "federation's best"), ("mean_over_agents", "mean over agents")):
        rank = out["rank" if key == "mean" else "rank_mean_over_agents"]
        cells = [
            [
                name,
                *(_number(row.get(name)) for row in out[key].values()),
                _number(rank.get(name)),
                str(out["seeds"][name]),
                str(out["cpu_seconds"][name]),
            ]
            for name in names
        ]
        cells += [
            [f"{column} (printed)", *(_number(values[unit]) for unit in out[key]), "", "", ""]
            for column, values in columns.items()
        ]
        cells = [["", *out[key], "rank", "seeds", "CPU s"], *cells]
        if printed:  # functions below each other, as in the paper
            cells = [list(row) for row in zip(*cells, strict=True)]
        grid = Grid(title=f"{title}: {what} after {ROUNDS} rounds, mean over seeds")
        for head in cells[0]:
            grid.add_column(head)
        for row in cells[1:]:
            grid.add_row(*row)
        grids.append(grid)
    base = names[0]
    grid = Grid(title=f"{base} against the others: Wilcoxon over functions, Holm over the table")
    for head in ("", "functions", "p", "p (Holm)", "rank-biserial", "sign ratio"):
        grid.add_column(head)
    for name, test in out[f"{base}_against"].items():
        figures = (test[k] for k in ("p", "p_holm", "rank_biserial", "sign_ratio"))
        grid.add_row(name, str(test["functions"]), *(f"{figure:.4g}" for figure in figures))
    return [*grids, grid]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


# ------------------------------------------------------------------ tasks

TIMES = (0, 1, 5, 10, 20, 30, 50)


def task_summary(entry: str) -> dict[str, Any]:
    """Error curves with intervals; the last errors paired with those of the first method.

    The differences of a task are a family.
    """
    out: dict[str, Any] = {}
    for unit in ENTRIES[entry].units:
        lines = lines_of(entry, unit)
        names = [name for name in ENTRIES[entry].methods if name in lines.methods()]
        if not names:
            continue
        auc = lines.lines[0]["optimum"] > lines.lines[0]["mean"][0]
        curves: dict[str, Any] = {}
        against: dict[str, Effect] = {}
        for name in names:
            curves[name] = {"seeds": len(lines.select(method=name)), "error": {}}
            for t in TIMES:
                values = np.array(list(_errors(lines, name, t, auc).values()))
                low, high = interval(values)
                curves[name]["error"][str(t)] = [
                    round(figure, 5) for figure in (float(values.mean()), low, high)
                ]
            cpu = [line["cpu_seconds"] for line in lines.select(method=name)]
            curves[name]["cpu_seconds"] = round(float(np.mean(cpu)), 2)
            if name != names[0]:
                mine, theirs = (_errors(lines, m, -1, auc) for m in (names[0], name))
                gap = paired(mine, theirs)
                assert gap is not None
                against[name] = gap
        for name, gap in named_family(against).items():
            test = {**asdict(against[name]), "p_holm": gap.p}
            curves[name][f"{names[0]}_minus_it"] = test
        optimum = lines.lines[0]["optimum"]
        out[unit] = {
            "score": "1 - AUC" if auc else "error",
            "minimum": round(1 - optimum if auc else optimum, 5),
            "methods": curves,
        }
    if not out:
        raise SystemExit(f"{entry} has no results yet.")
    return out


def _errors(lines: Lines, method: str, t: int, auc: bool) -> dict[int, float]:
    values = lines.at(method, t, "mean")
    return {seed: 1 - value if auc else value for seed, value in values.items()}


def task_tables(entry: str, out: Mapping[str, Any]) -> list[Grid]:
    grids = []
    for unit, task in out.items():
        grid = Grid(
            title=f"{entry}, {unit}: {task['score']}, mean over agents [95 % bootstrap over "
            f"seeds]; best of 1,024 Sobol points and corners {task['minimum']:.4f}"
        )
        base = next(iter(task["methods"]))
        for head in ("", "seeds", *map(str, TIMES), "CPU s", f"{base} minus it"):
            grid.add_column(head)
        for name, curve in task["methods"].items():
            cells = [f"{m:.4f} [{low:.4f}, {high:.4f}]" for m, low, high in curve["error"].values()]
            test = curve.get(f"{base}_minus_it")
            said = "" if test is None else _difference(test)
            grid.add_row(name, str(curve["seeds"]), *cells, str(curve["cpu_seconds"]), said)
        grids.append(grid)
    return grids


def _difference(test: Mapping[str, Any]) -> str:
    known = {key: value for key, value in test.items() if key != "p_holm"}
    return replace(Effect(**known), p=test["p_holm"]).shown(4)


# ------------------------------------------------------------------ the command


def summary(entry: str, *, as_json: bool) -> None:
    by_function = ENTRIES[entry].units is CEC
    out = cec_summary(entry) if by_function else task_summary(entry)
    if as_json:
        print(json.dumps(out))
        return
    console = Console(width=230)
    if by_function:
        tables = cec_tables(out, entry, printed=entry == "cec2005")
    else:
        tables = task_tables(entry, out)
    for grid in tables:
        console.print(grid)
    if entry == "cec2005":
        words = ("p_ours_vs_faithful", "rank_difference", "wins_vs_table1", "wins_mean_over_agents")
        for key in (*words, "ranks_table1", "ranks_beside_table1"):
            console.print(f"{key}: {out.get(key)}")
        console.print(NOT_RUN["others"])


def smoke(entry: str, units: Sequence[str], methods: Sequence[str], rounds: int) -> None:
    """Every row for a few rounds, nothing kept."""
    for unit in units:
        for method in methods:
            line = one_run(entry, unit, method, 0, rounds=rounds)
            ends = (line[key][at] for key in ("best", "mean") for at in (0, -1))
            shown = " ".join(f"{value:.5g}" for value in ends)
            print(f"{unit:10s} {method:24s} {line['cpu_seconds']:6.2f} s  {shown}", flush=True)


def smoke_without_data(rounds: int) -> None:
    """Rows of all entries: on a task of scikit-learn, or on a made-up list of points."""
    torch.set_num_threads(1)
    tuning = cache(partial(SklearnTuning, 3, splits=1))
    for entry in list(ENTRIES.values()):
        units = {"sklearn": tuning} if entry.units is CEC else {"made up": made_up}
        methods = entry.usual[:2] or tuple(entry.methods)  # what is tuned are numbers
        with patch.dict(ENTRIES, {"smoke": replace(entry, units=units)}):
            smoke("smoke", tuple(units), methods, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("entry", nargs="?", choices=(*ENTRIES, *NOT_RUN))
    parser.add_argument("--list", action="store_true", help="all entries, and why some are not run")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--first-seed", type=int, help="the first of them")
    parser.add_argument("--methods", nargs="*", metavar="M")
    parser.add_argument("--functions", nargs="*", type=int, metavar="N", help="1 to 20")
    parser.add_argument("--tasks", nargs="*", metavar="TASK")
    parser.add_argument(
        "--smoke", type=int, nargs="?", const=1, metavar="ROUNDS", help="try seed 0, keep nothing"
    )
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.list:
        for name, entry in ENTRIES.items():
            count = len(entry.usual or entry.methods)
            print(f"{name:14s}{len(entry.default)} x {count} x {entry.seeds} runs")
        for name, why in NOT_RUN.items():
            print(f"{name:14s}not run: {why}")
        return
    if options.entry is None:
        if options.smoke is None:
            parser.error("an entry, --list, or --smoke")
        smoke_without_data(options.smoke)
        return
    if options.entry in NOT_RUN:
        print(NOT_RUN[options.entry])
        return
    if options.summary:
        summary(options.entry, as_json=options.json)
        return
    entry = ENTRIES[options.entry]
    units = [*map(cec_name, options.functions or ()), *(options.tasks or ())] or entry.default
    methods = options.methods or list(entry.usual or entry.methods)
    for what, names, known in (("unit", units, entry.units), ("method", methods, entry.methods)):
        strangers = [name for name in names if name not in known]
        if strangers:
            parser.error(f"{options.entry} has no {what} {strangers}: it has {list(known)}.")
    torch.set_num_threads(1)
    if options.smoke is not None:
        smoke(options.entry, units, methods, options.smoke)
        return
    first = entry.first if options.first_seed is None else options.first_seed
    seeds = range(first, first + (options.seeds or entry.seeds))
    for unit in units:
        results = lines_of(options.entry, unit)
        for method in methods:
            runs = [{"method": method, "seed": seed} for seed in seeds]
            results.fill(runs, partial(one_run, options.entry, unit), f"{unit} {method}")


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's lines."""


if __name__ == "__main__":
    main()
