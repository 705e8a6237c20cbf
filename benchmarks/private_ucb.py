"""What a round of private GP-UCB costs, how noisy its sums are, and whether audits see defects.

    python -m benchmarks.private_ucb [--json] [--quick | --smoke] [--only round,state,…]

One thread, CPU time. Parts for ``--only``, and their keys of ``--json``:

    round     round_ms_T1e4_m100        one round at step 10^4 of a stream of as many, with 100
                                        features: one record is added and the sum released, with
                                        noise of the operating system, the sum is made a posterior
                                        (its eigenvalues floored), and one of 1,000 arms whose
                                        features are known is chosen by mean + c sd
              round_ms_T1e4_m100_shift  the same with a multiple of the identity added
              round_growth_1e4_vs_1e2   a round at step 10^4 / one at step 10^2 of the same stream
              round_vs_exact_root       the same round with all noise kept and recombined (the
                                        exact root) / ours, at step 1,024 of a stream of as many
              round_vs_numpy_tree       a tree in plain NumPy, its noise neither on a lattice nor
                                        secret / ours, at the same step
    state     noise_state_mb_m400       what is kept between two steps, encoded, with 400 features:
                                        the largest of horizons from 10^3 to 10^6
    rmse      rmse_private_mean_alpha1  of the private mean after 1,023 rewards of 0 or 1, at
                                        epsilon = 1 and delta = 1e-5: 11 features, length scale 0.2
                                        in one dimension, signal 0.4 sin 8x of deviation 0.28
              rmse_prior_alpha1         the same for draws of the prior, of the same deviation
              rmse_paper_alpha1         the first with the published constants and its shift
    prefix    prefix_std_worst_T1024    deviation of the noise in the noisiest of 1,024 sums, over
                                        the multiplier times a record's norm
    mutants   mutants_caught, mutants   defects of `privacy_mutants.STREAM_MUTANTS` whose audit
                                        fails, and all: each once per mechanism in which it is one

Times of a round are medians over rounds; rounds to be compared alternate, the first two figures
are of one stream by itself. ``--quick`` has shorter
streams to compare with, fewer rounds and draws, and every defect in its first mechanism only;
``--smoke`` runs everything once, so small that the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.factors import ExactRoot
from benchmarks.papers.published.noise import paper_prefix_noise
from benchmarks.privacy_mutants import STREAM_MUTANTS, audited_stream, installed
from botorch_fed.models import RandomFourierFeatures, StationaryKernel, Summary, WeightPosterior
from botorch_fed.models.features import FeatureMap, KLFeatures, QuadratureFourierFeatures
from botorch_fed.models.repair import noise_floor, noise_shift, repair_total
from botorch_fed.privacy import (
    InsecureSeededNoise,
    Ledger,
    NoiseSource,
    OSNoise,
    PrefixRelease,
    PrefixState,
    PrefixSum,
    gaussian_mu,
)
from botorch_fed.privacy.hazmat.noise import normal
from botorch_fed.rng import Generator, generator
from botorch_fed.wire.codec import encode

NUM_FEATURES, NUM_ARMS, HORIZON = 100, 1000, 10**4
EPSILON, DELTA = 1.0, 1e-5
BOUND = 0.5  # rewards between 0 and 1 about a centre of one half
NOISE_VAR, EXPLORATION = 0.25, 0.5
SHORT = 1024  # the horizon at which forms of the noise are compared
FORMS_OF_NOISE = ("sqrt", "exact root", "tree")
SIGNAL_STD, WAVE = 0.28, 0.4  # of a signal; the height of one that is not drawn
SEED = 20260404
TURNS, QUICK_TURNS = 100, 30  # rounds that are timed
STEPS = (10, 100, 1000)  # before them
WIDTHS = (16, 50, 100, 200, 400)  # features
KEPT_FEATURES = 400
HORIZONS = (10**3, 10**4, 10**5, 10**6)
QUICK_SHORT = (128, 10)  # rounds, and how many of them are timed
SMOKE: dict[str, Any] = {
    "NUM_FEATURES": 8,
    "HORIZON": 128,
    "SHORT": 16,
    "STEPS": (10, 100),
    "QUICK_TURNS": 2,
    "QUICK_SHORT": (16, 2),
    "WIDTHS": (4, 8),
    "KEPT_FEATURES": 8,
    "HORIZONS": (10**3, 10**4),
    "STREAM_MUTANTS": STREAM_MUTANTS[:1],
}

Psd = Literal["floor", "shift"]
PSD: tuple[Psd, ...] = ("shift", "floor")
Array = NDArray[np.float64]
Figures = dict[str, float]
Part = tuple[Figures, list[Table]]


def stream(
    num_features: int,
    horizon: int,
    factorization: str = "sqrt",
    *,
    epsilon: float = EPSILON,
    **statistic: float,
) -> PrefixSum:
    """A stream of rewards between 0 and 1, by a factorization or by the exact root."""
    exact = factorization == "exact root"
    kind: Any = ExactRoot if exact else partial(PrefixSum, factorization=factorization)
    stream: PrefixSum = kind(
        num_features=num_features,
        outcome_bound=statistic.pop("outcome_bound", BOUND),
        centre=BOUND,
        horizon=horizon,
        noise_multiplier=2 / gaussian_mu(epsilon, DELTA),  # replaced, a record moves two norms
        **statistic,
    )
    return stream


def started(mechanism: PrefixSum, noise: NoiseSource) -> PrefixState:
    ledger = Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)
    return mechanism.start(ledger=ledger, noise=noise)[0]


def posterior_of(
    release: PrefixRelease, mechanism: PrefixSum, psd: Psd, *, height: float = 4.0
) -> WeightPosterior:
    """What a sum says about the weights, by the public functions of `models.repair`."""
    gram, moment = mechanism.gram_and_moment(release.values, noise_var=NOISE_VAR)
    total, m = Summary(gram, moment, "benchmark"), mechanism.num_features
    if psd == "shift":
        shift = noise_shift(release.noise_std, m, horizon=mechanism.horizon)
        return WeightPosterior.from_total(repair_total(total, shift=shift / NOISE_VAR))
    floor = noise_floor(release.noise_std, m, height=height)
    return WeightPosterior.from_total(repair_total(total, floor=floor / NOISE_VAR))


# ------------------------------------------------------------------ a round


def basis(num_features: int) -> FeatureMap:
    """Features of norm one in two dimensions."""
    kernel = StationaryKernel(math.inf, [0.2, 0.2])
    return RandomFourierFeatures.draw(kernel, num_features, generator=generator(SEED, "basis"))


def features_of_arms(num_features: int, num_arms: int) -> Tensor:
    """Known features of all arms, `K x m`."""
    return basis(num_features)(generator(SEED, "arms").uniform(num_arms, 2)).detach()


def rewards(Phi: Tensor) -> Tensor:
    """A reward of 0 or 1 for each arm, `K x 1`; the same whenever it is played."""
    weights = generator(SEED, "weights").normal(Phi.shape[-1], 1)
    coins = generator(SEED, "coins").uniform(len(Phi), 1)
    return (coins < 0.5 + 0.2 * (Phi @ weights).tanh()).double()


@dataclass
class Clock:
    """CPU milliseconds of every part of a round, round by round."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, part: str, work: Callable[[], object]) -> None:
        start = time.process_time()
        work()
        self.parts.setdefault(part, []).append(1e3 * (time.process_time() - start))

    def median(self, *parts: str) -> float:
        """Median over rounds of the sum of some parts."""
        return statistics.median(map(sum, zip(*(self.parts[part] for part in parts), strict=True)))


class Rounds(ABC):
    """Rounds of one stream; the arm that a round chooses is the record of the next one.

    Args:
        mechanism: The stream.
        num_arms: How many arms a round has.
    """

    def __init__(self, mechanism: PrefixSum, *, num_arms: int = NUM_ARMS) -> None:
        self.mechanism = mechanism
        self.Phi = features_of_arms(mechanism.num_features, num_arms)
        self.Y = rewards(self.Phi)
        self.t = self.arm = 0

    @abstractmethod
    def draw(self) -> object:
        """As much noise as one step needs, for nothing."""

    @abstractmethod
    def ingest(self) -> None:
        """Add the record of the last arm, and release the sum."""

    @abstractmethod
    def solve(self, psd: Psd) -> None:
        """Make the release a posterior."""

    @abstractmethod
    def choose(self) -> None:
        """Find the best arm."""

    def advance(self, t: int) -> None:
        """Real steps up to step `t`, of arms in a random order, without decisions."""
        order = generator(SEED, "order", self.t).uniform(max(t - self.t, 0))
        for arm in (order * len(self.Phi)).long().tolist():
            self.arm = arm
            self.ingest()

    def timed(self, clock: Clock, psd: Psd) -> None:
        """One round, and its noise once more."""
        clock("ingest", self.ingest)
        clock("solve", partial(self.solve, psd))
        clock("choose", self.choose)
        clock("noise", self.draw)


class Ours(Rounds):
    """Rounds by the shipped parts, with noise of the operating system."""

    def __init__(self, mechanism: PrefixSum, *, num_arms: int = NUM_ARMS) -> None:
        super().__init__(mechanism, num_arms=num_arms)
        self.state = started(mechanism, OSNoise())
        self.release = mechanism.release(self.state)
        self.posterior: WeightPosterior | None = None

    def draw(self) -> object:
        return normal(OSNoise(), 1, self.mechanism.dim, path=())

    def ingest(self) -> None:
        row = slice(self.arm, self.arm + 1)
        records = self.mechanism.records(self.Phi[row], self.Y[row])
        self.state, self.release = self.mechanism.step(
            self.state, records, noise=OSNoise(), path=("round",)
        )
        self.t = self.state.t

    def solve(self, psd: Psd) -> None:
        self.posterior = posterior_of(self.release, self.mechanism, psd)

    def choose(self) -> None:
        assert self.posterior is not None
        mean, root = self.posterior.predict(self.Phi)
        score = mean.squeeze(-1) + EXPLORATION * torch.linalg.vector_norm(root, dim=-1)
        self.arm = int(score.argmax())


class NumpyTree(Rounds):
    """Rounds as they are usually written: a tree, its noise neither on a lattice nor secret."""

    def __init__(self, mechanism: PrefixSum, *, num_arms: int = NUM_ARMS) -> None:
        super().__init__(mechanism, num_arms=num_arms)
        m, levels = mechanism.num_features, mechanism.horizon.bit_length()
        self.rng = np.random.default_rng(SEED)
        norm = mechanism.statistic.norm(mechanism.adjacency)
        self.scale = mechanism.noise_multiplier * norm * math.sqrt(levels)
        self.rows: Array = self.Phi.numpy()
        self.gram, self.moment = np.zeros((m, m)), np.zeros(m)
        self.nodes: dict[int, tuple[Array, Array]] = {}
        self.precision, self.mean = self.gram, self.moment

    def draw(self) -> tuple[Array, Array]:
        m = len(self.moment)
        V = self.rng.standard_normal((m, m)) * (self.scale / 2)
        return V + V.T, self.rng.standard_normal(m) * (self.scale / self.mechanism.moment_scale)

    def ingest(self) -> None:
        a = self.rows[self.arm]
        self.gram = self.gram + np.outer(a, a)
        self.moment = self.moment + a * (float(self.Y[self.arm]) - BOUND)
        self.t += 1
        level = (self.t & -self.t).bit_length() - 1
        self.nodes = {k: node for k, node in self.nodes.items() if k > level}
        self.nodes[level] = self.draw()
        noise = list(self.nodes.values())
        self.noisy = (
            self.gram + sum(node[0] for node in noise),
            self.moment + sum(node[1] for node in noise),
        )

    def solve(self, psd: Psd) -> None:
        (known, moment), m = self.noisy, len(self.moment)
        std = self.scale * math.sqrt(len(self.nodes))
        if psd == "shift":
            known = known + noise_shift(std, m, horizon=self.mechanism.horizon) * np.eye(m)
        else:
            values, Q = np.linalg.eigh(known)
            known = (Q * values.clip(min=noise_floor(std, m))) @ Q.T
        self.precision = np.eye(m) + known / NOISE_VAR
        self.mean = np.linalg.solve(self.precision, moment / NOISE_VAR)

    def choose(self) -> None:
        half = np.linalg.solve(self.precision, self.rows.T)
        variance = np.einsum("km,mk->k", self.rows, half)
        self.arm = int((self.rows @ self.mean + EXPLORATION * np.sqrt(variance)).argmax())


@dataclass(frozen=True)
class Costs:
    """CPU times of a stream's rounds with either way to solve."""

    floor: Clock
    shift: Clock

    @property
    def floor_ms(self) -> float:
        return self.floor.median("ingest", "solve", "choose")

    @property
    def shift_ms(self) -> float:
        return self.shift.median("ingest", "solve", "choose")


def in_turns(streams: Sequence[Rounds], turns: int) -> list[Costs]:
    """Times of as many rounds of each, in turns, two more to warm up; streams stay as they are."""
    clocks: dict[Psd, list[Clock]] = {}
    for psd in PSD:
        going = [copy(one) for one in streams]  # no round writes to what another one reads
        clocks[psd] = [Clock() for _ in going]
        for turn in range(turns + 2):
            for one, clock in zip(going, clocks[psd], strict=True):
                one.timed(clock if turn > 1 else Clock(), psd)
    return [Costs(*pair) for pair in zip(clocks["floor"], clocks["shift"], strict=True)]


def rounds(quick: bool) -> Part:
    turns = QUICK_TURNS if quick else TURNS
    last = HORIZON - turns - 2  # the last timed round is step 10^4
    ours, streams = Ours(stream(NUM_FEATURES, HORIZON)), {}
    for t in (*STEPS, last):
        ours.advance(t)
        streams[t] = copy(ours)
    costs = dict(zip(streams, in_turns(list(streams.values()), turns), strict=True))
    (alone,) = in_turns([streams[last]], turns)  # as a stream runs: nothing between its rounds
    figures = {
        "round_ms_T1e4_m100": round(alone.floor_ms, 3),
        "round_ms_T1e4_m100_shift": round(alone.shift_ms, 3),
        "round_growth_1e4_vs_1e2": round(costs[last].floor_ms / costs[100].floor_ms, 3),
    }
    growth = _round_table("t", f"A round after t of {HORIZON:,} steps, m = {NUM_FEATURES}")
    for t, cost in costs.items():
        _row(growth, f"{t:,}", cost)
    sizes = _round_table("m", f"A round after 100 of {HORIZON:,} steps, m features")
    for m in WIDTHS[:-1] if quick else WIDTHS:
        one = Ours(stream(m, HORIZON))
        one.advance(10 if quick else 100)
        _row(sizes, str(m), *in_turns([one], 5 if quick else 20))
    ratios, table = compared(*(QUICK_SHORT if quick else (SHORT, 40)))
    return {**figures, **ratios}, [growth, sizes, table]


def compared(horizon: int, turns: int) -> tuple[Figures, Table]:
    """The last rounds of a stream with three forms of the noise, in turns."""
    rows: dict[str, Rounds] = {
        "ours, buffered": Ours(stream(NUM_FEATURES, horizon)),
        "exact root": Ours(stream(NUM_FEATURES, horizon, "exact root")),
        "NumPy, a tree": NumpyTree(stream(NUM_FEATURES, horizon, "tree")),
    }
    for one in rows.values():
        one.advance(horizon - turns - 2)
    costs = in_turns(list(rows.values()), turns)
    table = _round_table("noise", f"The last of {horizon:,} rounds, m = {NUM_FEATURES}")
    for name, cost in zip(rows, costs, strict=True):
        _row(table, name, cost)
    ours, exact, tree = (cost.floor_ms for cost in costs)
    ratios = {"round_vs_exact_root": exact / ours, "round_vs_numpy_tree": tree / ours}
    return {name: round(ratio, 2) for name, ratio in ratios.items()}, table


def _round_table(first: str, title: str) -> Table:
    return Table(
        *(first, "floor", "shift", "ingest", "its noise"),
        *("floor alone", "shift alone", "choose"),
        title=f"{title}; {NUM_ARMS:,} arms; CPU ms",
    )


def _row(table: Table, name: str, cost: Costs) -> None:
    floor, shift = cost.floor, cost.shift
    numbers = (
        *(cost.floor_ms, cost.shift_ms, floor.median("ingest"), floor.median("noise")),
        *(floor.median("solve"), shift.median("solve"), floor.median("choose")),
    )
    table.add_row(name, *(f"{number:.2f}" for number in numbers))


# ------------------------------------------------------------------ what is kept


def states(quick: bool) -> Part:
    num_features = KEPT_FEATURES
    table = Table(
        *("horizon", "kept, MB", "exact root at its end, MB", "fit, s"),
        title=f"What is kept between two steps, m = {num_features}",
    )
    largest = 0.0
    for horizon in HORIZONS[:2] if quick else HORIZONS:
        start = time.process_time()
        mechanism = stream(num_features, horizon)
        _ = mechanism.noise_scale
        seconds = time.process_time() - start
        megabytes = kept_megabytes(mechanism)
        largest = max(largest, megabytes)
        exact = 8e-6 * mechanism.dim * (horizon + 2)  # all noise, the sum and its noise
        table.add_row(f"{horizon:,}", f"{megabytes:.2f}", f"{exact:,.0f}", f"{seconds:.2f}")
    return {"noise_state_mb_m400": round(largest, 2)}, [table]


def kept_megabytes(mechanism: PrefixSum) -> float:
    """The encoded state after a few steps: sum, noise, and what later noise is made of."""
    noise, state = OSNoise(), started(mechanism, OSNoise())
    Phi = features_of_arms(mechanism.num_features, 3)
    for record in mechanism.records(Phi, rewards(Phi)).split(1):
        state, _ = mechanism.step(state, record, noise=noise, path=("kept",))
    return len(encode(state)) / 1e6


# ------------------------------------------------------------------ the private mean


@dataclass(frozen=True)
class Curve:
    """A draw of the prior in one dimension, of given deviation, and rewards of it.

    Attributes:
        features: Of all rounds, `T x m`.
        rewards: 0 or 1, `T x 1`.
        grid: Features of a grid, `G x m`.
        truth: What is to be predicted there, `G x 1`.
    """

    features: Tensor
    rewards: Tensor
    grid: Tensor
    truth: Tensor


def curve(seed: int, count: int, *, drawn: bool = False) -> Curve:
    """Rewards at uniform points, of a sine or of a draw of the prior.

    A draw is centred, scaled, and clipped so that chances are between 0 and 1.
    """
    draws = generator(SEED, "curve", seed)
    kernel, box = StationaryKernel(math.inf, [0.2]), torch.tensor([[0.0], [1.0]]).double()
    base = QuadratureFourierFeatures.from_kernel(kernel, box, tol=1e-6)
    grid = torch.linspace(0, 1, 201).double()[:, None]
    phi = KLFeatures.from_map(base, grid, num_features=11)
    X, weights = draws.uniform(count, 1), draws.normal(base.num_features, 1)
    points = torch.cat([grid, X])
    if drawn:
        values = base(points) @ weights
        on_grid = values[: len(grid)]
        values = ((values - on_grid.mean()) * (SIGNAL_STD / on_grid.std())).clamp(-BOUND, BOUND)
    else:
        values = WAVE * (8 * points).sin()
    coins = (draws.uniform(count, 1) < BOUND + values[len(grid) :]).double()
    return Curve(phi(X), coins, phi(grid), values[: len(grid)])


def rms_error(known: Curve, posterior: WeightPosterior) -> float:
    return float((known.grid @ posterior.mean[:, None] - known.truth).square().mean().sqrt())


def error_without_privacy(known: Curve) -> float:
    Phi, Y = known.features, known.rewards - BOUND
    total = Summary(Phi.mT @ Phi / NOISE_VAR, Phi.mT @ Y / NOISE_VAR, "benchmark")
    return rms_error(known, WeightPosterior.from_total(total))


def private_errors(known: Curve, mechanism: PrefixSum, seed: int) -> dict[Psd, float]:
    """Of the mean after a stream of all rewards, made positive either way; noise by a seed."""
    noise = InsecureSeededNoise(seed)
    state = started(mechanism, noise)
    for record in mechanism.records(known.features, known.rewards).split(1):
        state, release = mechanism.step(state, record, noise=noise, path=("rmse",))
    posteriors = {psd: posterior_of(release, mechanism, psd, height=2.0) for psd in PSD}
    return {psd: rms_error(known, posterior) for psd, posterior in posteriors.items()}


def published_error(known: Curve, epsilon: float, draws: Generator) -> float:
    """With the published noise in all nodes of the sum, of all rounds but the last, and a shift."""
    count, m = known.features.shape
    std = paper_prefix_noise(epsilon, DELTA, count + 1, 1.0) * math.sqrt(count.bit_count())
    V = draws.normal(m, m) * (std / math.sqrt(2))
    gram = known.features.mT @ known.features + V + V.mT
    moment = known.features.mT @ (known.rewards - BOUND) + std * draws.normal(m, 1)
    shift = noise_shift(math.sqrt(2) * std, m, horizon=count)
    total = Summary(gram / NOISE_VAR, moment / NOISE_VAR, "benchmark")
    return rms_error(
        known, WeightPosterior.from_total(repair_total(total, shift=shift / NOISE_VAR))
    )


@dataclass(frozen=True)
class Form:
    """A stream whose error is compared.

    Attributes:
        factorization: Of its sums.
        statistic: `outcome_bound` and `moment_scale` of its records where they are not the default.
    """

    factorization: str
    statistic: dict[str, float]


PLAIN = {"moment_scale": 1.0}
FORMS = {
    "tree, rewards up to 1": Form("tree", {"outcome_bound": 1.0, **PLAIN}),
    "tree, centred": Form("tree", PLAIN),
    "root, centred": Form("sqrt", PLAIN),
    "root, centred, moment scaled": Form("sqrt", {}),
}
OURS = "root, centred, moment scaled, floor"
Errors = dict[str, list[float]]


def errors_of(curves: Sequence[Curve], epsilon: float) -> Errors:
    """Errors of the mean, curve by curve, by release and by what makes it positive."""
    count = len(curves[0].rewards)
    found: Errors = {
        "not private": [error_without_privacy(known) for known in curves],
        "published, shift": [
            published_error(known, epsilon, generator(SEED, "published", seed))
            for seed, known in enumerate(curves)
        ],
    }
    for name, form in FORMS.items():
        mechanism = stream(11, count, form.factorization, epsilon=epsilon, **form.statistic)
        of_form = [private_errors(known, mechanism, seed) for seed, known in enumerate(curves)]
        found |= {f"{name}, {psd}": [error[psd] for error in of_form] for psd in PSD}
    return found


def errors(quick: bool) -> Part:
    draws = 4 if quick else 40
    table = Table(
        *("signal", "epsilon", "release", "error", "standard error"),
        title=f"Error of the private mean, {draws} draws, deviation {SIGNAL_STD}, delta {DELTA:g}",
    )
    figures: Figures = {}
    for signal, drawn in (("sine", False), ("prior", True)):
        curves = [curve(seed, SHORT - 1, drawn=drawn) for seed in range(draws)]
        for epsilon in (EPSILON,) if quick else (EPSILON, 10.0):
            found = errors_of(curves, epsilon)
            for name, column in found.items():
                spread = statistics.stdev(column) / math.sqrt(draws)
                cells = (f"{statistics.mean(column):.3f}", f"{spread:.3f}")
                table.add_row(signal, f"{epsilon:g}", name, *cells)
            if epsilon == EPSILON:
                key = "rmse_prior_alpha1" if drawn else "rmse_private_mean_alpha1"
                figures[key] = round(statistics.mean(found[OURS]), 4)
                if not drawn:
                    paper = statistics.mean(found["published, shift"])
                    figures["rmse_paper_alpha1"] = round(paper, 4)
    return figures, [table]


# ------------------------------------------------------------------ noise in the sums


def deviations(horizon: int, factorization: str) -> list[float]:
    """Of the noise in all sums of a stream, over the multiplier times a record's norm."""
    mechanism = stream(NUM_FEATURES, horizon, factorization)
    unit = mechanism.noise_multiplier * mechanism.norm
    return [mechanism.noise_std(t) / unit for t in range(1, horizon + 1)]


def prefixes(quick: bool) -> Part:
    horizons = (64, SHORT)
    table = Table(
        "noise",
        *(f"worst of {T:,} (root mean square)" for T in horizons),
        title="Deviation of the noise over the multiplier times a record's norm",
    )
    worst: dict[str, float] = {}
    for name in FORMS_OF_NOISE:
        found = [deviations(T, name) for T in horizons]
        worst[name] = max(found[-1])
        cells = (
            f"{max(row):.3f} ({statistics.fmean(r * r for r in row) ** 0.5:.3f})" for row in found
        )
        table.add_row(name, *cells)
    ratios = Table("horizon", "buffered / exact - 1", title="The last sum, which is the worst")
    for T in (64, SHORT, *(HORIZONS[1:2] if quick else HORIZONS[1:])):
        buffered, exact = (stream(8, T, name).noise_std(T) for name in ("sqrt", "exact root"))
        ratios.add_row(f"{T:,}", f"{buffered / exact - 1:.2e}")
    return {"prefix_std_worst_T1024": round(worst["sqrt"], 3)}, [table, ratios]


# ------------------------------------------------------------------ defects


def mutants(quick: bool) -> Part:
    table = Table("defect", "caught", "mechanisms", "s", "missed in", title="Audits of defects")
    caught = total = 0
    for mutant in STREAM_MUTANTS:
        cases, missed = mutant.cases[:1] if quick else mutant.cases, []
        start = time.process_time()
        for case in cases:
            with installed(mutant):
                if audited_stream(case).passed:
                    missed.append(case)
        seconds, found = time.process_time() - start, len(cases) - len(missed)
        caught, total = caught + found, total + len(cases)
        cells = (str(found), str(len(cases)), f"{seconds:.1f}", "; ".join(missed))
        table.add_row(mutant.name, *cells)
    return {"mutants_caught": caught, "mutants": total}, [table]


# ------------------------------------------------------------------ all of it

PARTS: dict[str, Callable[[bool], Part]] = {
    "round": rounds,
    "state": states,
    "rmse": errors,
    "prefix": prefixes,
    "mutants": mutants,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounds, noise and audits of private GP-UCB.")
    parser.add_argument("--json", action="store_true", help="print one line of figures")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer runs of everything")
    parser.add_argument("--smoke", action="store_true", help="does everything run?")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if os.environ.get("OMP_NUM_THREADS") != "1":  # NumPy's BLAS reads it when it is loaded
        again = [sys.executable, "-m", "benchmarks.private_ucb", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    load, quick = os.getloadavg()[0], args.quick or args.smoke
    results, seconds = [], {}
    with patch.dict(globals(), SMOKE if args.smoke else {}):
        for part in (name for name in PARTS if name in chosen):
            start = time.process_time()
            results.append(PARTS[part](quick))
            seconds[part] = time.process_time() - start
    figures = {key: value for part, _ in results for key, value in part.items()}
    if args.json:
        print(json.dumps(figures))
        return
    console = Console()
    versions = ", ".join(f"{package} {version(package)}" for package in ("numpy", "torch"))
    console.print(f"{versions}; Python {platform.python_version()}; one thread; load {load:.1f}")
    for _, tables in results:
        for table in tables:
            console.print(table)
    table = Table("figure", "value", title="Figures")
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    console.print(table)
    spent = ", ".join(f"{part} {cpu:.0f} s" for part, cpu in seconds.items())
    console.print(f"CPU time: {spent}")


if __name__ == "__main__":
    main()
