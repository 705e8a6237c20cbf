"""What a round of private GP-UCB costs, how noisy its sums are, and whether audits see defects.

    python -m benchmarks.private_ucb [--json] [--quick] [--only round,state,…]

One thread, CPU time. Parts for ``--only``, and their keys of ``--json``:

    round     round_ms_T1e4_m100        one round at step 10^4 of a stream of as many, with 100
                                        features: one record is added and the sum released, with
                                        noise of the operating system, the sum is made a posterior
                                        (its eigenvalues floored), and one of 1,000 arms whose
                                        features are known is chosen by mean + c sd
              round_ms_T1e4_m100_shift  the same with the identity added, in the place of a floor
              round_growth_1e4_vs_1e2   a round at step 10^4 / one at step 10^2 of the same stream
              round_vs_exact_root       the same round with all noise kept and recombined (the
                                        exact root) / ours, at step 1,024 of a stream of as many
              round_vs_numpy_tree       a tree in plain NumPy, its noise neither on a lattice nor
                                        secret / ours, at the same step
    state     noise_state_mb_m400       what is kept between two steps, encoded, with 400 features:
                                        the largest of horizons from 10^3 to 10^6
    rmse      rmse_private_mean_alpha1  of the private mean after 1,024 rewards of 0 or 1, at
                                        epsilon = 1 and delta = 1e-5: 11 features, length scale 0.2
                                        in one dimension, signal of deviation 0.28
              rmse_paper_alpha1         the same with the published constants and its shift
    prefix    prefix_std_worst_T1024    deviation of the noise in the noisiest of 1,024 sums, over
                                        the multiplier times a record's norm
    mutants   mutants_caught, mutants   defects of `privacy_mutants.STREAM_MUTANTS` whose audit
                                        fails, and all: each once per mechanism in which it is one

Times of a round are medians over rounds; rounds to be compared alternate. ``--quick`` has shorter
streams to compare with, fewer rounds and draws, and every defect in its first mechanism only.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

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
    paper_prefix_noise,
)
from botorch_fed.privacy.hazmat.noise import normal
from botorch_fed.privacy.tree import Factorization
from botorch_fed.rng import Generator, generator
from botorch_fed.wire.codec import encode

NUM_FEATURES, NUM_ARMS, HORIZON = 100, 1000, 10**4
EPSILON, DELTA = 1.0, 1e-5
BOUND = 0.5  # rewards between 0 and 1 about a centre of one half
NOISE_VAR, EXPLORATION = 0.25, 0.5
SHORT = 1024  # the horizon at which forms of the noise are compared
FACTORIZATIONS: tuple[Factorization, ...] = ("sqrt", "sqrt-exact", "honaker", "tree")
SIGNAL_STD = 0.28
SEED = 20260404

Psd = Literal["floor", "shift"]
Array = NDArray[np.float64]
Figures = dict[str, float]
Part = tuple[Figures, list[Table]]


def stream(
    num_features: int,
    horizon: int,
    factorization: Factorization = "sqrt",
    *,
    epsilon: float = EPSILON,
) -> PrefixSum:
    """A stream of rewards between 0 and 1."""
    return PrefixSum(
        num_features=num_features,
        outcome_bound=BOUND,
        centre=BOUND,
        horizon=horizon,
        noise_multiplier=2 / gaussian_mu(epsilon, DELTA),  # replaced, a record moves two norms
        factorization=factorization,
    )


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


class Rounds:
    """Rounds of one stream, from a state on that real steps have reached.

    A round is `ingest`, `solve` and `choose`; the arm that it chooses is the next one's record.

    Args:
        mechanism: The stream.
        num_arms: How many arms a round has.
    """

    def __init__(self, mechanism: PrefixSum, *, num_arms: int = NUM_ARMS) -> None:
        self.mechanism = mechanism
        self.Phi = features_of_arms(mechanism.num_features, num_arms)
        self.Y = rewards(self.Phi)
        self.state = started(mechanism, OSNoise())
        self.release = mechanism.release(self.state)
        self.posterior: WeightPosterior | None = None
        self.arm = 0

    def ingest(self) -> None:
        """Add the record of the last arm, and release the sum."""
        row = slice(self.arm, self.arm + 1)
        records = self.mechanism.records(self.Phi[row], self.Y[row])
        self.state, self.release = self.mechanism.step(
            self.state, records, noise=OSNoise(), path=("round",)
        )

    def solve(self, psd: Psd) -> None:
        self.posterior = posterior_of(self.release, self.mechanism, psd)

    def choose(self) -> None:
        assert self.posterior is not None
        mean, root = self.posterior.predict(self.Phi)
        score = mean.squeeze(-1) + EXPLORATION * root.square().sum(dim=-1).sqrt()
        self.arm = int(score.argmax())

    def advance(self, steps: int) -> None:
        """Steps without decisions: arms in a random order."""
        order = generator(SEED, "advance", self.state.t).uniform(steps)
        for arm in (order * len(self.Phi)).long().tolist():
            self.arm = arm
            self.ingest()

    def at(self, state: PrefixState) -> Rounds:
        """The same stream in another state."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, state=state)
        return other

    def timed(self, clock: Clock) -> None:
        """One round with either way to solve, each followed by its choice, the floor's last."""
        clock("ingest", self.ingest)
        dim = self.mechanism.dim
        clock("noise of it", lambda: normal(OSNoise(), 1, dim, path=()))
        for psd in ("shift", "floor"):
            clock(f"solve, {psd}", lambda psd=psd: self.solve(psd))  # type: ignore[misc]
            clock(f"choose, {psd}", self.choose)


def round_ms(clock: Clock, psd: Psd) -> float:
    return clock.median("ingest", f"solve, {psd}", f"choose, {psd}")


def alternating(streams: Sequence[Rounds], rounds: int) -> list[Clock]:
    """Times of as many rounds of each; two to warm up."""
    clocks = [Clock() for _ in streams]
    for turn in range(rounds + 2):
        for one, clock in zip(streams, clocks, strict=True):
            one.timed(clock if turn > 1 else Clock())
    return clocks


class NumpyTree:
    """A round as it is usually written: a tree of noise, neither on a lattice nor secret."""

    def __init__(self, mechanism: PrefixSum, *, num_arms: int = NUM_ARMS) -> None:
        self.Phi: Array = features_of_arms(mechanism.num_features, num_arms).numpy()
        self.Y: Array = rewards(torch.from_numpy(self.Phi)).numpy()
        self.rng = np.random.default_rng(SEED)
        self.norm = mechanism.statistic.norm(mechanism.adjacency)
        self.scale = mechanism.noise_multiplier * self.norm * math.sqrt(self.levels(mechanism))
        self.moment_scale = mechanism.moment_scale
        m = mechanism.num_features
        self.gram, self.moment = np.zeros((m, m)), np.zeros(m)
        self.nodes: dict[int, tuple[Array, Array]] = {}
        self.t = self.arm = 0

    @staticmethod
    def levels(mechanism: PrefixSum) -> int:
        return mechanism.horizon.bit_length()

    def round(self, psd: Psd) -> None:
        a, m = self.Phi[self.arm], len(self.moment)
        self.t += 1
        self.gram += np.outer(a, a)
        self.moment += a * (self.Y[self.arm, 0] - BOUND)
        level = (self.t & -self.t).bit_length() - 1
        self.nodes = {k: node for k, node in self.nodes.items() if k > level}
        V = self.rng.standard_normal((m, m)) * (self.scale / 2)
        u = self.rng.standard_normal(m) * (self.scale / self.moment_scale)
        self.nodes[level] = (V + V.T, u)
        gram = self.gram + sum(node[0] for node in self.nodes.values())
        moment = self.moment + sum(node[1] for node in self.nodes.values())
        std = self.scale * math.sqrt(len(self.nodes))
        if psd == "shift":
            known = gram + noise_shift(std, m, horizon=SHORT) * np.eye(m)
        else:
            values, Q = np.linalg.eigh(gram)
            known = (Q * values.clip(min=noise_floor(std, m))) @ Q.T
        precision = np.eye(m) + known / NOISE_VAR
        mean = self.Phi @ np.linalg.solve(precision, moment / NOISE_VAR)
        half = np.linalg.solve(precision, self.Phi.T)
        score = mean + EXPLORATION * np.sqrt(np.einsum("km,mk->k", self.Phi, half))
        self.arm = int(score.argmax())


def rounds(quick: bool) -> Part:
    few = 30 if quick else 100
    late = HORIZON - few - 2
    ours = Rounds(stream(NUM_FEATURES, HORIZON))
    states: dict[int, PrefixState] = {}
    for t in (10, 100, 1000, late):
        ours.advance(t - ours.state.t)
        states[t] = ours.state
    clocks = dict(zip(states, alternating([ours.at(s) for s in states.values()], few), strict=True))
    last, early = clocks[late], clocks[100]
    figures = {
        "round_ms_T1e4_m100": round(round_ms(last, "floor"), 3),
        "round_ms_T1e4_m100_shift": round(round_ms(last, "shift"), 3),
        "round_growth_1e4_vs_1e2": round(round_ms(last, "floor") / round_ms(early, "floor"), 3),
    }
    growth = _round_table(f"A round after t of {HORIZON:,} steps, m = {NUM_FEATURES}", "t")
    for t, clock in clocks.items():
        _row(growth, f"{t:,}", clock)
    sizes = _round_table(f"A round after 100 of {HORIZON:,} steps", "m")
    for m in (16, 50, 100, 200) if quick else (16, 50, 100, 200, 400):
        one = Rounds(stream(m, HORIZON))
        one.advance(20 if quick else 100)
        _row(sizes, str(m), *alternating([one], 5 if quick else 20))
    versus, table = compared(128 if quick else SHORT, 10 if quick else 40)
    return {**figures, **versus}, [growth, sizes, table]


def _round_table(title: str, what: str) -> Table:
    return Table(
        *(what, "floor, ms", "shift, ms", "ingest", "its noise"),
        *("solve, floor", "solve, shift", "choose"),
        title=f"{title}; {NUM_ARMS:,} arms",
    )


def _row(table: Table, name: str, clock: Clock) -> None:
    parts = ("ingest", "noise of it", "solve, floor", "solve, shift", "choose, floor")
    numbers = (round_ms(clock, "floor"), round_ms(clock, "shift"), *map(clock.median, parts))
    table.add_row(name, *(f"{number:.2f}" for number in numbers))


def compared(horizon: int, turns: int) -> tuple[Figures, Table]:
    """The last rounds of a stream with three forms of the noise, in turns."""
    before = horizon - turns - 2
    streams = [Rounds(stream(NUM_FEATURES, horizon, name)) for name in ("sqrt", "sqrt-exact")]
    for one in streams:
        one.advance(before)
    usual = {psd: NumpyTree(stream(NUM_FEATURES, horizon, "tree")) for psd in ("floor", "shift")}
    for tree in usual.values():
        tree.t = before - before % 2**6  # the nodes of the steps before: as many bits, as much work
        tree.nodes = {}
        for _ in range(before % 2**6):
            tree.round("shift")
    clocks, peer = [Clock(), Clock()], Clock()
    for turn in range(turns + 2):
        for one, clock in zip(streams, clocks, strict=True):
            one.timed(clock if turn > 1 else Clock())
        for psd, tree in usual.items():
            (peer if turn > 1 else Clock())(psd, lambda tree=tree, psd=psd: tree.round(psd))
    table = Table(
        *("noise", "floor, ms", "shift, ms"),
        title=f"A round at step {horizon:,} of as many, m = {NUM_FEATURES}; {NUM_ARMS:,} arms",
    )
    return {}, table
