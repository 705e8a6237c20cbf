"""The experiments of differentially private federated Thompson sampling, each a named entry.

    python -m benchmarks.papers.dp_fts_de ENTRY [--seeds N] [--rows ROW …]   run what is missing
    python -m benchmarks.papers.dp_fts_de ENTRY --summary [--json]           from committed results
    python -m benchmarks.papers.dp_fts_de ENTRY --smoke 3                    3 rounds, nothing kept
    python -m benchmarks.papers.dp_fts_de --smoke               a round of all that needs no data

    synthetic-raw         Figs. 2, 6, 7, 12a as published, outcomes as they are: 200 agents
    synthetic             the same on our scale of outcomes, and the same epsilon spent better
    synthetic-few         the same functions, 1 or 3 starts: ours, controls, designs
    landmine              29 fields, the shipped protocol on the continuous square, libsvm's default
                          tolerance
    landmine-tol6         the same at tolerance 1e-6
    landmine-table        Fig. 3, the privacy-utility plane, on a discrete domain of 2,050 points
    landmine-table-tol6   the same at tolerance 1e-6
    har                   30 subjects, 1 or 3 starts
    digits                50 writers, 3 starts
    har-paper             Figs. 3, 8-11, 12b: the same subjects, 10 starts and 60 queries
    digits-paper          Fig. 3: the same writers, 10 starts and 60 queries
    fig4, emnist          not run, and why

All but the first have `BOTORCH_FED_DATA` to be set. What is discrete is played by `fleet`, which
queries what the shipped protocol does. Seeds 0-999 are pilots, on which settings were chosen;
results are of seeds from 1,000 on. What the paper leaves unstated was fixed before any run:

- starts are uniform (on tables over the first 1,024 Sobol points) and common to all rows of a seed;
  rows ``…own-region``, ``synthetic`` and ``synthetic-raw`` start in the agents' own regions, as in
  the paper; ``paper…`` on real tasks do not;
- synthetic: a new function for every seed; all agents of all rows know kernel and noise; paper's
  features are drawn anew for every seed; our scale is (y - 0.5) / 0.2, on which 30 to 40 % of the
  vectors are clipped where the paper has .3 to .8 %; Fig. 2b's clip levels are ours; all but
  Fig. 2c have q = 0.25, z = 1, and Figs. 2b, 2c, 12a P = 2 and S = 11;
- ``ts-raw`` and ``paper…`` on real tasks see raw outcomes and have the paper's own model;
- a random field is the protocol of ours with all messages zero, so that agents follow its noise; a
  public design replaces the same number of queries (corners: four), and then goes on as ours does;
- own models of ``ours``, ``field``, ``ceiling`` and designs see parameters on a log scale, those of
  ``ts`` and ``ei`` do not, ``…-warped`` do;
- Fig. 3 has nine (q, z), rows ``paper-…-own-region``; ``default-as-…`` and ``ours-as-…`` are the
  package's default and ours at the epsilon of such a row, by PLD. Figs. 8 to 11 and 12b have
  q = 0.35 and z = 1, and every P of Fig. 10 the clip norm of P = 4, 11; a sample of a fixed size
  has 10 of 30 agents, and its epsilon is of another adjacency;
- the signal-to-noise ratio is measured: release without noise minus what the protocol releases
  without data, against the noise that was added, mean over releases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as Grid
from torch import Tensor

from benchmarks.papers.fleet import (
    Fleet,
    Table,
    Watched,
    agent,
    agent_seed,
    watched,
)
from benchmarks.papers.ledger import Line, Results, at_checkpoints, versions
from benchmarks.papers.published.exploration import PowerLawSchedule
from benchmarks.papers.published.features import PaperCosine
from benchmarks.papers.published.moments import moments_epsilon
from benchmarks.papers.published.points import label
from benchmarks.papers.published.settings import paper_following, paper_settings
from benchmarks.papers.tabulated import NUM_SOBOL, tabulate
from benchmarks.problems import ActivityRecognition, Landmine, WriterDigits
from benchmarks.statistics import Effect, family, named_family, paired
from botorch_fed.acquisition import (
    Constant,
    Partition,
    Polynomial,
    SoftmaxSchedule,
)
from botorch_fed.models import (
    FeatureMap,
    KLFeatures,
    LogWarp,
    OwnHyperparameters,
    QuadratureFourierFeatures,
    StationaryKernel,
    WarpedFeatures,
)
from botorch_fed.privacy import (
    FixedSizeSampling,
    InsecureSeededNoise,
    PoissonSampling,
    SignalWarning,
    epsilon,
)
from botorch_fed.rng import generator
from botorch_fed.run import run
from botorch_fed.search.released import Following, ReleaseMessage, suggested_clip_norm
from botorch_fed.search.transfer import (
    TransferSearch,
    default_private_features,
    reference_points,
)
from botorch_fed.space import Outcome, SearchSpace
from botorch_fed.studies import DPFTSDE
from botorch_fed.test_functions import FederatedTestProblem, SklearnTuning, SyntheticGPAgents

SEED = 20260102
FIRST_SEED = 1000
KEYS = ("row", "starts", "seed")
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0)
LARGEST_DELTA = 0.1  # that the package allows

# ------------------------------------------------------------------ ours


def ours(task: Task, space: SearchSpace, epsilon: float | None, seed: int) -> DPFTSDE:
    """The design under test, its settings in one place; without epsilon the ceiling.

    Chosen on seeds 0-999.
    """
    strategy = Following()
    if task.lengthscale is not None:  # a fifth of the length scale, as by default
        strategy = replace(strategy, spread=0.2 * task.lengthscale)
    return DPFTSDE(
        budget=task.rounds,
        epsilon=epsilon,
        noise_kind="none" if epsilon is None else "correlated",
        feature_map=our_features(space, task.lengthscale),
        num_initial=0,
        strategy=strategy,
        noise=InsecureSeededNoise(seed),
    )


def ours_warped(task: Task, space: SearchSpace, epsilon: float | None, seed: int) -> DPFTSDE:
    """Another point of the design space: a warped basis, smooth gains, one release.

    Chosen on seeds 0-999 of activity recognition, for that task alone.
    """
    offsets = space.log_offsets
    kernel = StationaryKernel(math.inf, [0.5] * space.dim)
    base = QuadratureFourierFeatures.from_kernel(kernel, space.bounds, tol=1e-3)
    reference = LogWarp(offsets).transform(reference_points(space.dim))
    basis = KLFeatures.from_map(base, reference, num_features=20)
    return DPFTSDE(
        budget=task.rounds,
        epsilon=epsilon,
        feature_map=WarpedFeatures(basis, offsets),
        ridge=0.1,
        releases=(0,),
        num_initial=0,
        strategy=Following(follow=2),
        noise=InsecureSeededNoise(seed),
    )


@cache
def our_features(space: SearchSpace, lengthscale: float | None) -> FeatureMap:
    """The shared basis of ours: where the kernel is known, that kernel's."""
    if lengthscale is None:
        return default_private_features(space)
    return default_private_features(space, num_features=50, lengthscale=lengthscale)


# ------------------------------------------------------------------ tasks and rows

Problem = Callable[[int], Table]
Study = Callable[["Task", SearchSpace, int], DPFTSDE]


@dataclass(frozen=True)
class Row:
    """A method.

    Attributes:
        study: Its settings, for a task, a space and a seed.
        field: Whether all messages count as zero.
        design: A public design that all agents query first.
        raw: Whether outcomes stay as they were measured.
        own_region: Whether agents start in their own regions.
        problem: Another problem than the task's.
    """

    study: Study
    field: bool = False
    design: str | None = None
    raw: bool = False
    own_region: bool = False
    problem: Problem | None = None


@dataclass(frozen=True)
class Task:
    """An entry on a discrete domain.

    Attributes:
        problem: The agents' values, for a seed.
        rounds: Queries of every agent.
        starts: Numbers of starting points.
        rows: The methods.
        lengthscale: Of the kernel, where agents know it.
        loss: What is reported: simple regret, or one minus the best value.
        times: After which queries.
        seeds: How many, by default.
    """

    problem: Problem
    rounds: int
    starts: tuple[int, ...]
    rows: dict[str, Row]
    lengthscale: float | None = None
    loss: str = "regret"
    times: tuple[int, ...] = (0, 1, 3, 5, 10, 20, 30)
    seeds: int = 20


def known(problem: Table, lengthscale: float) -> OwnHyperparameters:
    """The hyperparameters of a synthetic function, on the public scale."""
    assert problem.noise_std is not None
    scales = torch.full((1,), lengthscale, dtype=torch.float64)
    noise_var = (problem.noise_std / problem.space.outcome.scale) ** 2
    return OwnHyperparameters(scales, 1.0, noise_var, 0.0, 0)


def alone(**options: Any) -> Study:
    """Every agent on its own."""
    strategy = Following(**{"follow": 0, "warp": False, **options})
    return lambda task, space, seed: DPFTSDE(
        budget=task.rounds, releases=(), num_initial=0, strategy=strategy
    )


def raw_alone(task: Task, space: SearchSpace, seed: int) -> DPFTSDE:
    """The own model of the paper's code."""
    strategy = replace(paper_following(), schedule=Constant(1.0))
    return DPFTSDE(budget=task.rounds, releases=(), num_initial=0, strategy=strategy)


def with_epsilon(epsilon: float | None, **options: Any) -> Study:
    """Ours at a level of privacy."""
    return lambda task, space, seed: replace(ours(task, space, epsilon, seed), **options)


def alone_as_ours(task: Task, space: SearchSpace, seed: int) -> DPFTSDE:
    """What ours does without any message: what designs go on with."""
    strategy = replace(ours(task, space, None, seed).strategy, follow=0)
    return DPFTSDE(budget=task.rounds, releases=(), num_initial=0, strategy=strategy)


def published(q: float, z: float | None, **options: Any) -> Study:
    """The paper's mechanism on its real tasks; `z = None` is FTS-DE, and FTS with one region."""
    return lambda task, space, seed: paper_settings(
        space.dim,
        rounds=task.rounds,
        sampling_rate=q,
        noise_multiplier=z,
        num_initial=0,
        seed=SEED,
        noise=InsecureSeededNoise(seed),
        **options,
    )


def designs(*names: str) -> dict[str, Row]:
    """Rows that query a public design first."""
    return {name: Row(alone_as_ours, design=name) for name in names}


def default_study(task: Task, space: SearchSpace, epsilon: float, seed: int) -> DPFTSDE:
    """The package's default at the delta of `ours`."""
    noise = InsecureSeededNoise(seed)
    return DPFTSDE(budget=task.rounds, epsilon=epsilon, num_initial=0, noise=noise)


def default_alone(task: Task, space: SearchSpace, seed: int) -> DPFTSDE:
    """The same without any message."""
    return DPFTSDE(budget=task.rounds, releases=(), num_initial=0)


def levels(epsilons: Iterable[float]) -> dict[str, Row]:
    """Ours at several levels, its control and its ceiling, and the package's default."""
    return {
        "default-2": Row(lambda *settings: default_study(*settings[:2], 2.0, settings[2])),
        "default-alone": Row(default_alone),
        **{f"ours-{e:g}": Row(with_epsilon(e)) for e in epsilons},
        "field": Row(with_epsilon(2.0), field=True),
        "ceiling": Row(with_epsilon(None)),
    }


def real_rows(epsilons: Iterable[float]) -> dict[str, Row]:
    """The methods on a real task."""
    return {
        "ts-raw": Row(raw_alone, raw=True),
        "ts": Row(alone()),
        "ts-warped": Row(alone(warp=True)),
        "ei": Row(alone(own="ei")),
        "ei-warped": Row(alone(own="ei", warp=True)),
        "paper-q.35-z1": Row(published(0.35, 1.0), raw=True),
        "paper-q.1-z1": Row(published(0.1, 1.0), raw=True),
        "paper-q.35-z2": Row(published(0.35, 2.0), raw=True),
        "paper-q.35-z1-own-region": Row(published(0.35, 1.0), raw=True, own_region=True),
        "fts": Row(published(1.0, None, num_regions=1), raw=True),
        "fts-de-own-region": Row(published(1.0, None), raw=True, own_region=True),
        "correlated-q.35-z1": Row(published(0.35, 1.0, noise_kind="correlated"), raw=True),
        "correlated-q.1-z1": Row(published(0.1, 1.0, noise_kind="correlated"), raw=True),
        "correlated-q.35-z2": Row(published(0.35, 2.0, noise_kind="correlated"), raw=True),
        **levels(epsilons),
        "ours-warped-2": Row(lambda *settings: ours_warped(*settings[:2], 2.0, settings[2])),
        "ours-warped-0.5": Row(lambda *settings: ours_warped(*settings[:2], 0.5, settings[2])),
        "field-warped": Row(
            lambda *settings: ours_warped(*settings[:2], 2.0, settings[2]), field=True
        ),
        **designs("sobol", "sobol-warped", "corners", "corners-others"),
    }


# ------------------------------------------------------------------ Figs. 3, 8 to 11 and 12b

PLANE = (
    *((0.35, z) for z in (1.0, 1.6, 2.0, 3.0, 4.0)),
    *((q, 1.0) for q in (0.1, 0.15, 0.2, 0.25)),
)
FIXED_WEIGHTS = SoftmaxSchedule(15.0, plateau=1_000_000)


def named(q: float, z: float) -> str:
    """``q.35-z1``."""
    return f"q{q:g}-z{z:g}".replace("q0.", "q.")


def with_the_epsilon_of(q: float, z: float, num_agents: int, make: Any) -> Study:
    """What `make(task, space, epsilon, seed)` gives at what 60 releases at (q, z) cost."""

    def study(task: Task, space: SearchSpace, seed: int) -> DPFTSDE:
        spent = epsilon(
            sampling_rate=q,
            noise_multiplier=z,
            num_releases=task.rounds,
            delta=num_agents**-1.1,
        )
        return make(task, space, round(spent.epsilon, 4), seed)

    return study


def plane_rows(num_agents: int) -> dict[str, Row]:
    """Fig. 3: the paper's mechanism at nine (q, z), and beside it ours at the same epsilon."""

    def equal(make: Any) -> Callable[[float, float], Row]:
        return lambda q, z: Row(with_the_epsilon_of(q, z, num_agents, make))

    kinds: dict[str, Callable[[float, float], Row]] = {
        "paper-{}-own-region": lambda q, z: Row(published(q, z), raw=True, own_region=True),
        "ours-as-{}": equal(ours),
        "default-as-{}": equal(default_study),
    }
    return {kind.format(named(q, z)): make(q, z) for kind, make in kinds.items() for q, z in PLANE}


def plane_task_rows(num_agents: int) -> dict[str, Row]:
    """The plane and what it is compared with."""
    known = real_rows(())
    beside = (
        *("ts-raw", "ts", "ts-warped", "ei-warped", "fts", "fts-de-own-region"),
        *("field", "ceiling", "sobol-warped", "corners", "default-alone"),
    )
    return {**{name: known[name] for name in beside}, **plane_rows(num_agents)}


def variants(num_agents: int) -> dict[str, Row]:
    """Figs. 8 to 11 and 12b: one setting changed of ``paper-q.35-z1-own-region``."""

    def changed(**options: Any) -> Row:
        return Row(published(0.35, 1.0, **options), raw=True, own_region=True)

    size = math.floor(0.35 * num_agents)
    return {
        "clip-11": changed(clip_norm=11.0),
        "weights-softmax-9": changed(exploration=SoftmaxSchedule(9, 10, 30)),
        "weights-1000": changed(exploration=PowerLawSchedule(1, 1000)),
        "weights-40-squared": changed(exploration=PowerLawSchedule(2, 40)),
        **{f"regions-{P}": changed(num_regions=P, clip_norm=11 * math.sqrt(P)) for P in (2, 3, 6)},
        "fixed-size": changed(sampling=FixedSizeSampling(size), adjacency="replace-one"),
        "fixed-weights": changed(exploration=FIXED_WEIGHTS),
    }


# ------------------------------------------------------------------ synthetic functions

LENGTHSCALE = 0.03
OUTCOME_SCALE = 0.2
RAW_NOISE_VAR = 0.01
NOISE_VAR = RAW_NOISE_VAR / OUTCOME_SCALE**2
SIZE = 50  # features
SCHEDULE = SoftmaxSchedule(15, 5, 5)
PAPER_STEP = Following(schedule=Polynomial(0.5), follow=0, spread=0.0, warp=False, min_distance=0.0)
SETTINGS = ((0.15, 1.0), (0.25, 1.0), (0.5, 1.0), (0.25, 1.2), (0.25, 1.5))
CLIP_LEVELS = (6.0, 9.0, 11.0, 16.0, 22.0)
HETEROGENEITY = (0.7, 1.0)
FEW = {"message": "gain", "strategy": Following()}


@cache
def synthetic(seed: int) -> SyntheticGPAgents:
    return SyntheticGPAgents(200, seed=seed, perturbed="all")


def heterogeneous(alpha: float) -> Problem:
    return lambda seed: SyntheticGPAgents(50, seed=seed, heterogeneity=alpha)


def cosines(seed: int) -> FeatureMap:
    """The paper's features of the true kernel."""
    kernel = StationaryKernel(math.inf, [LENGTHSCALE])
    stream = generator(SEED, "paper features", seed)
    return PaperCosine.draw(kernel, SIZE, generator=stream)


@cache
def fitting_norm(message: Any) -> float:
    """A clip norm for messages on those features, from public quantities."""
    return suggested_clip_norm(cosines(0), ReleaseMessage(message, noise_var=NOISE_VAR), 10)


def de(
    P: int,
    *,
    S: float = 11.0,
    q: float = 0.25,
    z: float | None = 1.0,
    weights: Any = SCHEDULE,
    raw: bool = False,
    **options: Any,
) -> Row:
    """DP-FTS-DE as in the paper's synthetic experiments; `z = None` is FTS-DE."""
    return Row(
        lambda task, space, seed: paper_settings(
            1,
            rounds=task.rounds,
            num_regions=P,
            clip_norm=S,
            sampling_rate=q,
            noise_multiplier=z,
            exploration=weights,
            num_initial=0,
            noise=InsecureSeededNoise(seed),
            **{
                "feature_map": cosines(seed),
                "noise_var": RAW_NOISE_VAR if raw else NOISE_VAR,
                "strategy": PAPER_STEP,
                **options,
            },
        ),
        own_region=True,
        raw=raw,
    )


def informative(message: str, *, releases: Any = (0, 1, 2, 3), **options: Any) -> Row:
    """Few early releases with everyone, at the epsilon of q = .25, z = 1 in 40 rounds."""

    def study(task: Task, space: SearchSpace, seed: int) -> DPFTSDE:
        made = ours(task, space, paper_epsilon(task.rounds, 200), seed)
        given = {"message": message, "releases": releases, **options}
        if message != "gain":
            given |= {"feature_map": cosines(seed), "noise_var": NOISE_VAR}
            given |= {"clip_norm": fitting_norm(message)}
        return replace(made, **given)

    return Row(study)


@cache
def paper_epsilon(rounds: int, num_agents: int) -> float:
    """What q = .25, z = 1 costs."""
    spent = epsilon(
        sampling_rate=0.25, noise_multiplier=1.0, num_releases=rounds, delta=num_agents**-1.1
    )
    return spent.epsilon


EQUAL_WEIGHTS = SoftmaxSchedule(0.0)


def figure_rows(*, raw: bool) -> dict[str, Row]:
    """The methods of the paper's figures on synthetic functions.

    Args:
        raw: See outcomes as they are, between 0 and 1, as in the paper, and not on our scale.
    """
    ts = Row(alone(min_distance=0.0), raw=raw)
    point = partial(de, raw=raw)
    rows = {
        "ts": ts,
        "fts": point(1, S=8.0, z=None),
        "fts-de-2": point(2, z=None),
        "fts-de-3": point(3, z=None),
        "dp-fts": point(1, S=8.0),
        "dp-fts-de-1": point(1),
        "dp-fts-de-2": point(2),
        "dp-fts-de-3": point(3),
        **{f"clip-{S:g}": point(2, S=S) for S in CLIP_LEVELS if S != 11},
        **{f"q{q:g}-z{z:g}": point(2, q=q, z=z) for q, z in SETTINGS if (q, z) != (0.25, 1)},
        "fixed-weights": point(2, weights=FIXED_WEIGHTS),
        "equal-weights": point(2, weights=EQUAL_WEIGHTS),
        "fts-de-2-fixed-weights": point(2, z=None, weights=FIXED_WEIGHTS),
        "fts-de-2-equal-weights": point(2, z=None, weights=EQUAL_WEIGHTS),
    }
    for alpha in HETEROGENEITY:
        problem = heterogeneous(alpha)
        for name in ("ts", "fts", "fts-de-2", "dp-fts", "dp-fts-de-2"):
            rows[f"alpha{alpha:g}-{name}"] = replace(rows[name], problem=problem)
    return rows


def synthetic_rows() -> dict[str, Row]:
    """Those on our scale, and the same epsilon spent better."""
    return {
        **figure_rows(raw=False),
        "tight": de(2, noise_kind="tight"),
        "correlated": de(2, noise_kind="correlated"),
        "correlated-3": de(3, noise_kind="correlated"),
        "correlated-mean": replace(
            de(2),
            study=lambda task, space, seed: replace(
                de(2, noise_kind="correlated").study(task, space, seed),
                message="mean",
                clip_norm=fitting_norm("mean"),
            ),
        ),
        "few-sample": informative("sample"),
        "few-mean": informative("mean"),
        "few-gain": informative("gain"),
        "field": replace(informative("gain"), field=True),
    }


FIGURES: dict[str, tuple[str, ...]] = {
    "Fig. 2a, distributed exploration": (
        *("ts", "fts", "fts-de-2", "fts-de-3", "dp-fts", "dp-fts-de-2", "dp-fts-de-3"),
    ),
    "Fig. 2b, clip level S": (*(f"clip-{S:g}" if S != 11 else "dp-fts-de-2" for S in CLIP_LEVELS),),
    "Fig. 2c, q and z": (
        *(f"q{q:g}-z{z:g}" if (q, z) != (0.25, 1) else "dp-fts-de-2" for q, z in SETTINGS),
    ),
    "Fig. 6, regions at S = 11": ("dp-fts-de-1", "dp-fts-de-2", "dp-fts-de-3"),
    "Fig. 7, heterogeneity, 50 agents": (
        *(
            f"alpha{alpha:g}-{name}"
            for alpha in HETEROGENEITY
            for name in ("ts", "fts", "fts-de-2", "dp-fts", "dp-fts-de-2")
        ),
    ),
    "Fig. 12a, adaptive weights": (
        *("dp-fts-de-2", "fixed-weights", "equal-weights"),
        *("fts-de-2", "fts-de-2-fixed-weights", "fts-de-2-equal-weights"),
    ),
    "new: the same epsilon": (
        *("ts", "dp-fts-de-2", "tight", "correlated", "dp-fts-de-3", "correlated-3"),
        *("correlated-mean", "few-sample", "few-mean", "few-gain", "field"),
    ),
}
FIGURE_ENTRIES = ("synthetic", "synthetic-raw")
# Row, and what it is compared with in its figure: each figure is a family.
FIGURE_PAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "Fig. 2a": (
        *(("fts", "ts"), ("fts-de-2", "ts"), ("fts-de-2", "fts"), ("fts-de-3", "fts")),
        *(("dp-fts", "ts"), ("dp-fts-de-2", "ts"), ("dp-fts-de-2", "dp-fts")),
        ("dp-fts-de-3", "dp-fts"),
    ),
    "Fig. 2b": tuple((f"clip-{S:g}", "dp-fts-de-2") for S in CLIP_LEVELS if S != 11),
    "Fig. 2c": tuple((f"q{q:g}-z{z:g}", "dp-fts-de-2") for q, z in SETTINGS if (q, z) != (0.25, 1)),
    "Fig. 6": (("dp-fts-de-2", "dp-fts-de-1"), ("dp-fts-de-3", "dp-fts-de-1")),
    "Fig. 12a": (
        *(("fixed-weights", "dp-fts-de-2"), ("equal-weights", "dp-fts-de-2")),
        *(("fts-de-2-fixed-weights", "fts-de-2"), ("fts-de-2-equal-weights", "fts-de-2")),
    ),
    "Fig. 7": tuple(
        (f"alpha{alpha:g}-{row}", f"alpha{alpha:g}-{other}")
        for alpha in HETEROGENEITY
        for row, other in (
            *(("fts-de-2", "ts"), ("dp-fts-de-2", "ts")),
            *(("fts-de-2", "fts"), ("dp-fts-de-2", "dp-fts")),
        )
    ),
    "new": (
        *(("tight", "dp-fts-de-2"), ("correlated", "dp-fts-de-2"), ("correlated-3", "dp-fts-de-3")),
        ("correlated-mean", "correlated"),
        *((f"few-{m}", "ts") for m in ("sample", "mean", "gain")),
        *((f"few-{m}", "correlated") for m in ("sample", "mean", "gain")),
        ("few-gain", "field"),
    ),
}


def few_rows() -> dict[str, Row]:
    """The methods where starts are few and kernel and noise are known."""
    return {
        "ts": Row(alone()),
        "ei": Row(alone(own="ei")),
        "paper-q.25-z1": replace(de(2), own_region=False),
        "correlated-q.25-z1": replace(de(2, noise_kind="correlated"), own_region=False),
        **levels(EPSILONS),
        **designs("sobol", "sobol-10", "sobol-20"),
    }


# ------------------------------------------------------------------ entries


def always(make: Callable[[], Table]) -> Problem:
    """A problem that does not depend on the seed, made once."""
    made = cache(make)
    return lambda seed: made()


LANDMINE = Task(
    problem=always(lambda: tabulate(Landmine(tol=1e-3), "lm2-tol", warped=True)),
    rounds=60,
    starts=(10,),
    rows={**real_rows((0.5, 1.0, 2.0, 4.0, 8.0)), **plane_rows(29)},
    loss="one_minus_best",
    times=(0, 1, 3, 5, 10, 20, 30, 60),
)
HAR = Task(
    problem=always(lambda: tabulate(ActivityRecognition(ranges="dp-fts-de"), "har-dp-fts-de")),
    rounds=30,
    starts=(3, 1),
    rows=real_rows(EPSILONS),
)
DIGITS = Task(
    problem=always(lambda: tabulate(WriterDigits(), "digits")),
    rounds=30,
    starts=(3,),
    rows=real_rows(EPSILONS),
)
AS_PUBLISHED: Any = {"rounds": 60, "starts": (10,), "times": LANDMINE.times, "seeds": 10}
TASKS: dict[str, Task] = {
    "synthetic": Task(
        problem=synthetic,
        rounds=40,
        starts=(10,),
        rows=synthetic_rows(),
        lengthscale=LENGTHSCALE,
        times=(0, 1, 3, 5, 10, 20, 40),
    ),
    "synthetic-raw": Task(
        problem=synthetic,
        rounds=40,
        starts=(10,),
        rows=figure_rows(raw=True),
        lengthscale=LENGTHSCALE,
        times=(0, 1, 3, 5, 10, 20, 40),
    ),
    "synthetic-few": Task(
        problem=synthetic,
        rounds=40,
        starts=(1, 3),
        rows=few_rows(),
        lengthscale=LENGTHSCALE,
        times=(0, 1, 3, 5, 10, 20, 40),
    ),
    "landmine-table": LANDMINE,
    "landmine-table-tol6": replace(
        LANDMINE, problem=always(lambda: tabulate(Landmine(tol=1e-6), "lm2", warped=True))
    ),
    "har": HAR,
    "digits": DIGITS,
    "har-paper": replace(HAR, rows={**plane_task_rows(30), **variants(30)}, **AS_PUBLISHED),
    "digits-paper": replace(DIGITS, rows=plane_task_rows(50), **AS_PUBLISHED),
}
NOT_RUN = {
    "fig4": "Figs. 4, 5 and 7b are not run: what they show is in none of our sources.",
    "emnist": "Federated EMNIST cannot be obtained here: the entry digits has MNIST's digits by "
    "writer in its place.",
}


# ------------------------------------------------------------------ one run on a table


def starts_of(problem: Table, count: int, seed: int, partition: Partition | None) -> Tensor:
    """Random rows of the domain, `N x count`, in the agents' own regions if there are any."""
    N, K = problem.values.shape
    uniform = generator(SEED, "starts", seed).uniform(N, count)
    if partition is None or partition.num_regions == 1:
        return (uniform * min(K, NUM_SOBOL)).long()
    regions = partition.region_of(problem.points[:NUM_SOBOL])
    rows = []
    for region, numbers in zip(partition.assign(N), uniform, strict=True):
        pool = (regions == region).nonzero().flatten()
        rows.append(pool[(numbers * len(pool)).long()])
    return torch.stack(rows)


CORNERS = {
    1: ([[0.0], [1.0]], [[1.0], [0.0]]),
    2: ([[0, 0], [1, 0], [0, 1], [1, 1]], [[1, 1], [0, 1], [1, 0], [0, 0]]),
    3: ([[0, 0, 0], [1, 1, 0], [1, 0, 1], [0, 1, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]),
}


def design_points(name: str, space: SearchSpace, follow: int) -> Tensor:
    """A public design: as many points as queries follow releases, or as the name says."""
    if name.startswith("corners"):
        # In three dimensions either half of the eight; in two the same four in another order.
        points = CORNERS[space.dim][name == "corners-others"]
        return torch.tensor(points, dtype=torch.float64)
    last = name.rsplit("-", 1)[-1]
    count = int(last) if last.isdigit() else follow
    sobol = torch.quasirandom.SobolEngine(space.dim, scramble=False)
    points_ = sobol.draw(count + 1, dtype=torch.float64)[1:]
    return LogWarp(space.log_offsets).untransform(points_) if "warped" in name else points_


def design_rows(name: str, problem: Table, follow: int) -> list[int]:
    """The rows of the domain that are nearest to a design, none twice."""
    warp = LogWarp(problem.space.log_offsets)
    wanted = design_points(name, problem.space, follow)
    inputs = problem.points
    if "warped" in name:
        wanted, inputs = warp.transform(wanted), warp.transform(inputs)
    far = torch.cdist(wanted, inputs)
    rows: list[int] = []
    for distances in far:
        distances[rows] = math.inf
        rows.append(int(distances.argmin()))
    return rows


def without_scale(space: SearchSpace) -> SearchSpace:
    """The same space, outcomes as they are measured."""
    return SearchSpace(space.parameters, Outcome())


def at_the_papers_delta(study: DPFTSDE, num_agents: int) -> DPFTSDE:
    r"""The same study at :math:`\delta = N^{-1.1}`, where the package's default is 0.01 at most."""
    delta = num_agents**-1.1
    if study.delta is not None or delta > LARGEST_DELTA:
        return study
    return replace(study, delta=delta)


def seen_raw(problem: Table) -> Table:
    """The same problem, outcomes as they are measured."""
    raw = copy(problem)
    raw.space = without_scale(problem.space)
    return raw


@cache
def classical_epsilon(q: float, z: float, releases: int, delta: float) -> float | None:
    """The paper's axis: the moments accountant, as published."""
    spent = moments_epsilon(sampling_rate=q, noise_multiplier=z, num_releases=releases, delta=delta)
    return round(spent, 4)


def privacy_of(watched: Watched, ratios: Sequence[float]) -> Line:
    """What a run cost and how much of its releases was signal."""
    plan, sampling = watched.plan, watched.aggregation.sampling
    promise, z = watched.server.promise, plan.multiplier
    line: Line = {
        "releases": len(plan.releases),
        "features": watched.server.feature_map.num_features,
        "clip_norm": round(plan.clip_norm, 4),
        "clipped": round(watched.clip_share(), 5),
    }
    if promise is None or z is None or not plan.releases:
        return {**line, "epsilon": None, "snr": None}
    q = sampling.fraction(len(watched.server.terms.agents))
    poisson = isinstance(sampling, PoissonSampling)
    moments = classical_epsilon(q, z, len(plan.releases), promise.delta) if poisson else None
    return {
        **line,
        "q": round(q, 5),
        "z": round(z, 5),
        "noise": watched.aggregation.noise_kind,
        "epsilon": round(promise.epsilon, 4),
        "moments_epsilon": moments,
        "delta": round(promise.delta, 7),
        "adjacency": promise.adjacency,
        "unit": promise.unit,
        "accountant": promise.accountant,
        "snr": round(float(np.mean(ratios)), 4),
        "snr_first": round(ratios[0], 4),
        "snr_last": round(ratios[-1], 4),
    }


def table_run(entry: str, row: str, starts: int, seed: int, *, rounds: int | None = None) -> Line:
    """All agents' queries on a discrete domain."""
    task = TASKS[entry]
    if rounds is not None:
        task = replace(task, rounds=rounds)
    method = task.rows[row]
    problem = (method.problem or task.problem)(seed)
    follow = ours(task, problem.space, None, seed).strategy.follow
    if method.raw:
        problem = seen_raw(problem)
    study = at_the_papers_delta(method.study(task, problem.space, seed), len(problem.values))
    if isinstance(study.strategy, TransferSearch):
        return run_default(study, problem, starts, seed)
    partition = Partition.regular(study.num_regions, problem.space.dim)
    fleet = Fleet(
        problem,
        study,
        starts_of(problem, starts, seed, partition if method.own_region else None),
        seed=seed,
        field=method.field,
        design=() if method.design is None else design_rows(method.design, problem, follow),
        known=None if task.lengthscale is None else known(problem, task.lengthscale),
    )
    result = fleet.run()
    return {
        "best": at_checkpoints(result.best.mean(dim=0)),
        "regret": at_checkpoints(result.regret.mean(dim=0)),
        "cumulative": at_checkpoints(result.cumulative_regret.mean(dim=0), 4),
        **privacy_of(fleet.watched, result.signal_to_noise),
        "cpu_seconds": round(result.cpu_seconds, 2),
        "versions": versions(),
    }


def run_default(study: DPFTSDE, problem: Table, starts: int, seed: int) -> Line:
    """All agents' queries on a discrete domain, by `botorch_fed.run`."""
    began, rows = time.process_time(), starts_of(problem, starts, seed, None)
    data = {
        agent(n): (problem.points[mine], problem.values[n, mine, None].double())
        for n, mine in enumerate(rows)
    }
    study = replace(study, data=data, candidates=problem.points)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)  # the line says how many releases there are
        result = run(study, problem, seed=seed, progress=False)
    privacy = result.privacy or {}
    asked = torch.stack([result.history(name)[0] for name in result.names])
    true = torch.stack([problem.evaluate(n, X) for n, X in enumerate(asked)]).reshape(len(rows), -1)
    first = problem.values.double().gather(1, rows).amax(dim=1, keepdim=True)
    best = torch.cat([first, true], dim=1).cummax(dim=1).values
    optima = problem.values.double().amax(dim=1, keepdim=True)
    cumulative = torch.cat([0 * first, (optima - true).cumsum(dim=1)], dim=1)
    return {
        "best": at_checkpoints(best.mean(dim=0)),
        "regret": at_checkpoints((optima - best).mean(dim=0)),
        "cumulative": at_checkpoints(cumulative.mean(dim=0), 4),
        **{key: privacy[key] for key in ("releases", "epsilon", "delta") if key in privacy},
        "cpu_seconds": round(time.process_time() - began, 2),
        "versions": versions(),
    }


# ------------------------------------------------------------------ one run of the shipped protocol


@dataclass(frozen=True)
class Continuous:
    """An entry on the continuous cube."""

    problem: Callable[[], FederatedTestProblem]
    rows: dict[str, Row]
    rounds: int = 60
    starts: tuple[int, ...] = (10,)
    lengthscale: float | None = None
    loss: str = "one_minus_best"
    times: tuple[int, ...] = (0, 1, 3, 5, 10, 20, 30, 60)
    seeds: int = 20


OPTIMIZER = {"num_raw": 500, "num_restarts": 4}  # of all rows
OWN_FEATURES = 256  # of own samples, but for the paper's 100


def continuous_rows() -> dict[str, Row]:
    return {
        "ts": Row(alone()),
        "ours": Row(with_epsilon(2.0)),
        "field": Row(with_epsilon(2.0), field=True),
        "corners": Row(alone_as_ours, design="corners"),
        "paper": Row(published(0.35, 1.0), raw=True),
        "ceiling": Row(with_epsilon(None)),
        "ts-warped": Row(alone(warp=True)),
        "ts-raw": Row(raw_alone, raw=True),
    }


CONTINUOUS = {
    "landmine": Continuous(cache(lambda: Landmine(tol=1e-3)), continuous_rows()),
    "landmine-tol6": Continuous(cache(lambda: Landmine(tol=1e-6)), continuous_rows()),
}


class _Raw(FederatedTestProblem):
    """A problem whose outcomes stay as they are measured."""

    def __init__(self, problem: FederatedTestProblem) -> None:
        self.problem = problem
        self.space = without_scale(problem.space)

    def __len__(self) -> int:
        return len(self.problem)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        return self.problem.evaluate(agent, X)


def continuous_run(
    entry: str, row: str, starts: int, seed: int, *, rounds: int | None = None
) -> Line:
    """All agents' queries by `botorch_fed.run`."""
    task: Any = CONTINUOUS[entry]
    if rounds is not None:
        task = replace(task, rounds=rounds)
    method, problem = task.rows[row], task.problem()
    began = time.process_time()
    data = {}
    for n in range(len(problem)):
        X = generator(SEED, "starts", seed, n).uniform(starts, problem.dim)
        data[agent(n)] = X, problem.evaluate(n, X).reshape(-1, 1)
    shown = _Raw(problem) if method.raw else problem
    design = None
    if method.design is not None:
        design = design_points(method.design, problem.space, 0)[: task.rounds]
    study = at_the_papers_delta(method.study(task, shown.space, seed), len(problem))
    study = watched(
        replace(
            study,
            data=data,
            initial_design=design,
            strategy=replace(
                study.strategy,
                num_features=min(study.strategy.num_features, OWN_FEATURES),
                **OPTIMIZER,
            ),
        ),
        field=method.field,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)  # the line says it
        result = run(study, shown, seed=seed, progress=False)
    values = torch.stack([result.history(name)[1].flatten() for name in result.names])
    first = torch.stack([Y.max() for _, Y in data.values()])[:, None]
    best = torch.cat([first, values], dim=1).cummax(dim=1).values
    count = torch.arange(1, values.shape[1] + 1)
    running = torch.cat([first, values.cumsum(dim=1) / count], dim=1)
    server = study.servers[-1]
    ratios = server.signal_to_noise([agent_seed(seed, name) for name in result.names])
    rounds = study.rounds_for(result.names)
    traffic = sum(result.bytes_per_round().values()) / len(problem) / max(rounds, 1)
    return {
        "best": at_checkpoints(best.mean(dim=0)),
        "mean": at_checkpoints(running.mean(dim=0)),
        **privacy_of(server, ratios),
        "bytes_per_agent_and_round": round(traffic),
        "cpu_seconds": round(time.process_time() - began, 2),
        "versions": versions(),
    }


# ------------------------------------------------------------------ summaries

DESIGNS = ("sobol", "corners")  # how names of public designs begin


@dataclass
class Curves:
    """Losses of an entry, smaller is better: by row and seed."""

    results: Results
    loss: str
    starts: int

    def rows(self) -> list[str]:
        return list(dict.fromkeys(line["row"] for line in self.lines()))

    def lines(self, **fields: Any) -> list[Line]:
        return self.results.select(starts=self.starts, **fields)

    def paired(self, rows: Iterable[str]) -> Curves:
        """Only these rows, on the seeds that all of them have."""
        lines = [line for row in rows for line in self.lines(row=row)]
        seeds = [{line["seed"] for line in lines if line["row"] == row} for row in rows]
        common = set.intersection(*seeds)
        if not common:
            raise SystemExit(f"{self.results.path.name} has no seed with all rows {list(rows)}.")
        results = self.results.only()
        results.lines = [line for line in lines if line["seed"] in common]
        return replace(self, results=results)

    def at(self, row: str, t: int) -> dict[int, float]:
        """Loss by seed."""
        found = {}
        for line in self.lines(row=row):
            if self.loss == "one_minus_best":
                found[line["seed"]] = 1 - line["best"][str(t)]
            else:
                found[line["seed"]] = line[self.loss][str(t)]
        return found

    def mean(self, row: str, t: int) -> float:
        return float(np.mean(list(self.at(row, t).values())))

    def gap(self, row: str, other: str, t: int) -> Effect | None:
        """A row minus another, paired by seed; negative is better."""
        return paired(self.at(row, t), self.at(other, t))

    def best_design(self, t: int) -> str | None:
        """The strongest public design."""
        names = [row for row in self.rows() if row.startswith(DESIGNS)]
        return min(names, key=lambda row: self.mean(row, t)) if names else None


def figure_of(line: Line, key: str, digits: int = 2) -> str:
    """A number of a line in a cell."""
    value = line.get(key)
    return "" if value is None else f"{value:.{digits}f}"


def curves_table(curves: Curves, rows: Sequence[str], title: str, times: Sequence[int]) -> Grid:
    """Losses over time, and what they cost."""
    grid = Grid(title=title)
    heads = ("eps (PLD)", "eps (moments)", "delta", "snr")
    for column in ("row", "seeds", *heads, *map(str, times), "cumulative", "s/run"):
        grid.add_column(column)
    for row in rows:
        lines = curves.lines(row=row)
        if not lines:
            continue
        cost = [figure_of(lines[0], key) for key in ("epsilon", "moments_epsilon")]
        cost.append(figure_of(lines[0], "delta", 4))
        ratios = [line["snr"] for line in lines if line.get("snr") is not None]
        cost.append(f"{np.mean(ratios):.2f}" if ratios else "")
        losses = [f"{curves.mean(row, t):.4f}" for t in times]
        sums = [list(line["cumulative"].values())[-1] for line in lines if "cumulative" in line]
        total = f"{np.mean(sums):.3f}" if sums else ""
        seconds = f"{np.mean([line['cpu_seconds'] for line in lines]):.1f}"
        name = label(f"dp_fts_de/{curves.results.path.stem}", row, lines)
        grid.add_row(name, str(len(lines)), *cost, *losses, total, seconds)
    return grid


def pairs_table(
    curves: Curves,
    families: Mapping[str, Iterable[tuple[str, str]]],
    title: str,
    times: Sequence[int],
) -> tuple[Grid, dict[str, dict[str, Effect]]]:
    """Paired differences; the pairs of one name are a family at every time."""
    found: dict[str, dict[str, Effect]] = {}
    for pairs, t in itertools.product(families.values(), times):
        gaps = {
            f"{row} - {other}": curves.gap(row, other, t) for row, other in pairs if row != other
        }
        known = {name: gap for name, gap in gaps.items() if gap is not None}
        for name, gap in named_family(known).items():
            found.setdefault(name, {})[str(t)] = gap
    grid = Grid(title=f"{title}: mean [95 %] p (Holm over the pairs of a figure at a time)")
    for column in ("difference", *map(str, times)):
        grid.add_column(column)
    for name, row_ in found.items():
        grid.add_row(name, *(row_[str(t)].shown(4) if str(t) in row_ else "" for t in times))
    return grid, found


def control_pairs(curves: Curves, at: int) -> dict[str, list[tuple[str, str]]]:
    """Every method of a real task or with few starts, against its three controls.

    The controls of a method are a family.
    """
    controls = ("ts", "field", curves.best_design(at))
    rows = [r for r in curves.rows() if r not in controls and not r.startswith(DESIGNS)]
    return {row: [(row, other) for other in controls if other is not None] for row in rows}


def summary(entry: str, *, as_json: bool) -> None:
    task: Task | Continuous = (TASKS | CONTINUOUS)[entry]  # type: ignore[operator]
    results = Results(f"dp_fts_de/{entry}", KEYS)
    if as_json and entry in JSON:
        print(json.dumps(JSON[entry]()))
        return
    out: dict[str, Any] = {}
    console = Console(width=230)
    what = "simple regret" if task.loss == "regret" else "1 - best value"
    last = task.times[-1]
    compared = [t for t in task.times if t in (1, 5, 10, 30, last)]
    for starts in task.starts:
        curves = Curves(results, task.loss, starts)
        title = f"{entry}, {starts} starts: {what}, mean over agents and seeds"
        groups = FIGURES if entry in FIGURE_ENTRIES else {"": tuple(curves.rows())}
        for name, rows in groups.items():
            grid = curves_table(curves, rows, f"{title} {name}", task.times)
            if not as_json and grid.row_count:
                console.print(grid)
        pairs = FIGURE_PAIRS if entry in FIGURE_ENTRIES else control_pairs(curves, 10)
        grid, gaps = pairs_table(curves, pairs, title, compared)
        if not as_json:
            console.print(grid)
        out[str(starts)] = {
            "losses": {
                row: {str(t): round(curves.mean(row, t), 5) for t in task.times}
                for row in curves.rows()
            },
            "differences": {
                name: {t: asdict(gap) for t, gap in of.items()} for name, of in gaps.items()
            },
        }
    if as_json:
        print(json.dumps(out))


def landmine_json(entry: str) -> dict[str, Any]:
    """The figures of the claim, at 10 and 60 queries; p values by Holm over the two."""
    curves = Curves(Results(f"dp_fts_de/{entry}", KEYS), "one_minus_best", 10)
    curves = curves.paired(("ours", "ts", "paper", "field", "corners"))
    gaps = family([gap for t in (10, 60) if (gap := curves.gap("ours", "ts", t)) is not None])
    lines = curves.lines(row="ours")
    return {
        "epsilon": lines[0]["epsilon"],
        "one_minus_auc_10": round(curves.mean("ours", 10), 5),
        "one_minus_auc_60": round(curves.mean("ours", 60), 5),
        "ts_one_minus_auc_10": round(curves.mean("ts", 10), 5),
        "ts_one_minus_auc_60": round(curves.mean("ts", 60), 5),
        "p_vs_ts_10": gaps[0].p,
        "p_vs_ts_60": gaps[1].p,
        "paper_faithful_one_minus_auc_60": round(curves.mean("paper", 60), 5),
        "random_field_one_minus_auc_60": round(curves.mean("field", 60), 5),
        "corners_one_minus_auc_60": round(curves.mean("corners", 60), 5),
        "seeds": len(lines),
    }


CLAIM_STARTS, CLAIM_QUERIES, CLAIM_ROW = 1, 10, "ours-2"  # of the synthetic claim


def synthetic_json() -> dict[str, Any]:
    """The figures of the claim; p values by Holm over the three."""
    curves = Curves(Results("dp_fts_de/synthetic-few", KEYS), "regret", CLAIM_STARTS)
    t, row = CLAIM_QUERIES, CLAIM_ROW
    public = tuple(name for name in few_rows() if name.startswith(DESIGNS))
    curves = curves.paired((row, "ts", "field", *public))
    design = curves.best_design(t)
    assert design is not None
    controls = ("ts", "field", design)
    gaps = family([gap for o in controls if (gap := curves.gap(row, o, t)) is not None])
    lines = curves.lines(row=row)
    return {
        "epsilon": lines[0]["epsilon"],
        "regret": round(curves.mean(row, t), 5),
        "ts_regret": round(curves.mean("ts", t), 5),
        "random_field_regret": round(curves.mean("field", t), 5),
        "public_design_regret": round(curves.mean(design, t), 5),
        "p_vs_ts": gaps[0].p,
        "p_vs_random_field": gaps[1].p,
        "p_vs_public_design": gaps[2].p,
        "seeds": len(lines),
    }


JSON: dict[str, Callable[[], dict[str, Any]]] = {
    "landmine": partial(landmine_json, "landmine"),
    "landmine-tol6": partial(landmine_json, "landmine-tol6"),
    "synthetic": synthetic_json,
    "synthetic-few": synthetic_json,
}


# ------------------------------------------------------------------ the command


def smoke(
    entry: str,
    work: Callable[..., Line],
    rows: Sequence[str],
    rounds: int,
    *,
    designs: int | None = None,
) -> None:
    """Every row for a few rounds from so many of its first designs, nothing kept."""
    task: Task | Continuous = (TASKS | CONTINUOUS)[entry]  # type: ignore[operator]
    for starts, row in itertools.product(task.starts[:designs], rows):
        began = time.perf_counter()
        line = work(row, starts, 0, rounds=rounds)
        curve = line["best"] if task.loss != "regret" else line["regret"]
        spent = time.perf_counter() - began
        print(
            f"{row:28s} starts {starts:2d} {spent:6.2f} s  epsilon {line.get('epsilon')} "
            f"snr {line.get('snr')}  {' '.join(f'{v:.4f}' for v in curve.values())}",
            flush=True,
        )


def smoke_without_data(rounds: int) -> None:
    """Every row of an entry that needs no data, and of the others on a made-up task."""
    torch.set_num_threads(1)
    made_up = Continuous(partial(SklearnTuning, 3, splits=1), continuous_rows(), starts=(2,))
    with patch.dict(CONTINUOUS, {"made-up": made_up}):
        work = partial(table_run, "synthetic-few")
        smoke("synthetic-few", work, list(few_rows()), rounds, designs=1)
        smoke("made-up", partial(continuous_run, "made-up"), list(made_up.rows), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("entry", nargs="?", choices=(*TASKS, *CONTINUOUS, *NOT_RUN))
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="the first of them")
    parser.add_argument("--rows", nargs="*")
    parser.add_argument(
        "--smoke", type=int, nargs="?", const=1, metavar="ROUNDS", help="try seed 0, keep nothing"
    )
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.entry is None:
        if options.smoke is None:
            parser.error("an entry, or --smoke")
        smoke_without_data(options.smoke)
        return
    if options.entry in NOT_RUN:
        print(NOT_RUN[options.entry])
        return
    if options.summary:
        summary(options.entry, as_json=options.json)
        return
    task: Task | Continuous = (TASKS | CONTINUOUS)[options.entry]  # type: ignore[operator]
    work = partial(table_run if options.entry in TASKS else continuous_run, options.entry)
    rows = options.rows or list(task.rows)
    torch.set_num_threads(1)
    if options.smoke is not None:
        smoke(options.entry, work, rows, options.smoke)
        return
    results = Results(f"dp_fts_de/{options.entry}", KEYS)
    seeds = range(options.first, options.first + (options.seeds or task.seeds))
    for row in rows:
        runs = [
            {"row": row, "starts": starts, "seed": seed} for starts in task.starts for seed in seeds
        ]
        results.fill(runs, work, row)


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's lines."""


if __name__ == "__main__":
    main()
