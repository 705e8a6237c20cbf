r"""`PrivateUCB` without any tuning, beside the tuned rows of `benchmarks.papers.private_ucb`.

    python -m benchmarks.papers.private_ucb_defaults [--trials N] [--rows ROW …]
    python -m benchmarks.papers.private_ucb_defaults --summary [--json]
    python -m benchmarks.papers.private_ucb_defaults --smoke        a few rounds, nothing kept

    row                problem                                            actions   rounds
    kernel-bandit      the synthetic bandit, coins, 25 arms a round       private    1,024
    camelback          33 x 33 arms, noise .1                             public    10,000
    styblinski-tang    20 inputs, noise .02                               public    10,000
    michalewicz        10 inputs, noise .02                               public    10,000
    branin-coins       2 inputs, coins, 25 arms a round                   private    1,024
    hartmann3-coins    3 inputs, coins, 25 arms a round                   private    1,024
    branin             33 x 33 arms, noise .1                             public    10,000
    hartmann6          6 inputs, not a sum of functions, noise .1         public    10,000

The rules behind the defaults were chosen on pilots of the first four (trials 1000 to 1029). The
last four were named before they were run, once, and nothing was chosen by them; their rows
``…-former`` are the same with the former defaults: 20 features of a length scale of half the cube,
noise variance 0.05, half a standard deviation of exploration, a floor of height 4, blocks of the
public range. Noise is that of one release of the Gaussian mechanism at (alpha, delta); `PrivateUCB`
refuses the paper's delta of 0.1 for so many records, so it is given as a multiplier.

What is run is the server of the study: its aggregation chooses blocks, adds noise and releases, its
search chooses actions, as in a federation with one agent, without the messages between them. A
block is filled at once. With public actions the variance of the noise is said to the study, as the
public fact that it is; ``…-unsaid`` leaves it out. With coins it is never said.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from botorch.test_functions import Branin, Hartmann
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.papers.ledger import Line, Results, versions
from benchmarks.papers.private_ucb import BETA, SMALL, multiplier, separable_gap
from benchmarks.problems import Michalewicz, StyblinskiTang
from benchmarks.statistics import interval
from botorch_fed.aggregation.stream import PublicStream, StreamState
from botorch_fed.federation.terms import Contribution, View
from botorch_fed.privacy import InsecureSeededNoise
from botorch_fed.rng import generator
from botorch_fed.search.bandit import BanditSearch
from botorch_fed.search.transfer import default_private_features
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.studies import PrivateUCB
from botorch_fed.test_functions import Camelback, KernelBandit

ROUNDS, LONG, ARMS, SIDE = 1024, 10_000, 25, 33
ALPHAS = (10.0, 1.0, 0.1)
MOST = 500  # of outcomes in a block: a twentieth
Values = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """A function with values in [0, 1] on the unit cube.

    Attributes:
        dim: Inputs.
        values: At `n x d` points.
        best: The yardstick of regret with public actions.
        random_gap: What random play loses in a round.
        noise_std: Of outcomes; None for coins.
        arms: What can be played; None for the whole cube.
        sets: The decision sets of private actions, `T x K x d`.
    """

    dim: int
    values: Values
    best: float = 1.0
    random_gap: float = 0.0
    noise_std: float | None = None
    arms: Tensor | None = None
    sets: Tensor | None = field(default=None, repr=False)

    @property
    def space(self) -> SearchSpace:
        """Coins have twice the spread of outcomes with a little noise, so that all are within 2."""
        scale = 0.25 if self.noise_std is None else 0.5
        inputs = tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(self.dim))
        return SearchSpace(inputs, Outcome(0.5, scale))


def _grid(dim: int) -> Tensor:
    axis = torch.arange(SIDE, dtype=torch.float64) / (SIDE - 1)
    return torch.cartesian_prod(*[axis] * dim)


def _among(arms: Tensor, values: Values, noise_std: float) -> Problem:
    found = values(arms)
    best = float(found.max())
    return Problem(arms.shape[1], values, best, best - float(found.mean()), noise_std, arms)


def _with_sets(dim: int, values: Values, sets: Tensor) -> Problem:
    found = values(sets.reshape(-1, dim)).reshape(sets.shape[:2])
    return Problem(dim, values, random_gap=float((found.amax(1) - found.mean(1)).mean()), sets=sets)


def _rescaled(function: Any, best: float, dim: int) -> Values:
    """A function that is minimised, turned over and in [0, 1] by its range on a Sobol sequence."""
    points = torch.quasirandom.SobolEngine(dim, scramble=False).draw(2**14, dtype=torch.float64)
    lower, upper = function.bounds.double()
    worst = float(function.evaluate_true(lower + (upper - lower) * points).max())

    def values(X: Tensor) -> Tensor:
        found = function.evaluate_true(lower + (upper - lower) * X)
        return ((worst - found) / (worst - best)).clamp(0, 1)

    return values


@cache
def _branin() -> Values:
    return _rescaled(Branin(), 0.39788735772973816, 2)


@cache
def _hartmann(dim: int) -> Values:
    return _rescaled(Hartmann(dim=dim), {3: -3.86278, 6: -3.32237}[dim], dim)


def _uniform_sets(trial: int, dim: int) -> Tensor:
    return generator(trial, "sets").uniform(ROUNDS, ARMS, dim)


@cache
def public(name: str) -> Problem:
    """A problem with public actions."""
    if name == "camelback":
        camel = Camelback()
        return _among(camel.arms, camel.values, camel.noise_std)
    if name == "branin":
        return _among(_grid(2), _branin(), 0.1)
    if name == "hartmann6":
        values = _hartmann(6)
        points = torch.quasirandom.SobolEngine(6, scramble=False).draw(2**14, dtype=torch.float64)
        return Problem(6, values, 1.0, 1 - float(values(points).mean()), 0.1)
    made = StyblinskiTang(20) if name == "styblinski-tang" else Michalewicz(10)
    return Problem(made.dim, made.values, 1.0, separable_gap(made), made.noise_std)


def private(name: str, trial: int) -> Problem:
    """A problem with coins and private decision sets."""
    if name == "kernel-bandit":
        bandit = KernelBandit(seed=trial)
        return _with_sets(2, bandit.values, bandit.decision_sets(ROUNDS, ARMS))
    dim = 2 if name == "branin-coins" else 3
    values = _branin() if dim == 2 else _hartmann(3)
    return _with_sets(dim, values, _uniform_sets(trial, dim))


PRIVATE = ("kernel-bandit", "branin-coins", "hartmann3-coins")
PUBLIC = ("camelback", "branin", "hartmann6", "styblinski-tang", "michalewicz")
HELD_OUT = ("branin-coins", "hartmann3-coins", "branin", "hartmann6")
ROWS = (
    *PRIVATE,
    "branin-coins-former",
    "hartmann3-coins-former",
    "camelback",
    "branin",
    "branin-former",
    "camelback-unsaid",
    "branin-unsaid",
    "hartmann6",
    "hartmann6-former",
    "styblinski-tang",
    "michalewicz",
)
TRIALS = {"kernel-bandit": 20, "camelback": 20, "styblinski-tang": 5, "michalewicz": 5}
KEYS = ("row", "alpha", "delta", "trial")
SMOKE = ("branin-coins", "camelback", "branin-former", "styblinski-tang")


def study_of(
    problem: Problem, how: str, alpha: float, delta: float, trial: int, rounds: int
) -> PrivateUCB:
    """The study: nothing is said but what is public; ``former`` has the former defaults."""
    options: dict[str, Any] = {
        "budget": rounds,
        "noise_multiplier": multiplier(alpha, delta),
        "noise": InsecureSeededNoise(trial),
        "delta": 1e-9,  # of the promise, which is not read here
    }
    if problem.sets is None:
        many = MOST if rounds == LONG else max(1, rounds // 20)
        options |= {"trust": "public", "candidates": problem.arms, "most_per_block": many}
        options |= {"seed": trial}
    if how == "former":
        basis = default_private_features(
            problem.space, num_features=20, lengthscale=0.5 * math.sqrt(problem.dim / 2)
        )
        search = BanditSearch(noise_var=0.05, exploration=0.5, height=4.0)
        return PrivateUCB(**options, feature_map=basis, search=search)
    if problem.noise_std is not None and how != "unsaid":
        options["noise_var"] = (problem.noise_std / problem.space.outcome.scale) ** 2
    return PrivateUCB(**options)


def default_run(
    row: str, alpha: float, delta: float, trial: int, *, rounds: int | None = None
) -> Line:
    """One trial."""
    name, how = next((n, row[len(n) + 1 :]) for n in (*PRIVATE, *PUBLIC) if _is_of(row, n))
    began = time.process_time()
    if name in PRIVATE:
        problem, rounds = private(name, trial), rounds or ROUNDS
        study = study_of(problem, how, alpha, delta, trial, rounds)
        gaps = private_play(study, problem, trial, rounds)
        random = rounds * problem.random_gap
    else:
        problem, rounds = public(name), rounds or LONG
        study = study_of(problem, how, alpha, delta, trial, rounds)
        gaps = public_play(study, problem, trial, rounds)
        random = rounds * problem.random_gap
    regret = float(gaps.sum())
    return {
        "regret": round(regret, 3),
        "share_of_random": round(regret / random, 5),
        "last_tenth": round(float(gaps[rounds - rounds // 10 :].sum()), 3),
        "features": study.terms(problem.space).feature_map.num_features,
        "cpu_seconds": round(time.process_time() - began, 2),
        "seed": trial,
        "versions": versions(),
    }


def _is_of(row: str, name: str) -> bool:
    return row == name or row in (f"{name}-former", f"{name}-unsaid")


def private_play(study: PrivateUCB, problem: Problem, trial: int, rounds: int) -> np.ndarray:
    """What each round loses against its best arm; rewards are coins."""
    assert problem.sets is not None
    hub = study.server(problem.space, ("agent0",)).hub
    terms, coins = hub.terms, generator(trial, "reward").uniform(rounds)
    stream, search = terms.aggregation, terms.search
    state, gaps = stream.start(hub), []
    for t in range(rounds):
        arms = problem.sets[t]
        action = search.point(_view(study, hub, state, trial, t, arms))
        values = problem.values(torch.cat([action, arms]))
        gaps.append(float(values[1:].max() - values[0]))
        outcome = problem.space.outcome.to_public((coins[t] < values[:1]).double())
        record = Contribution(torch.cat([action[0], outcome]))
        state = stream.combine(hub, state, {"agent0": record})
    return np.array(gaps)


def _view(
    study: PrivateUCB, hub: Any, state: StreamState, trial: int, t: int, arms: Tensor
) -> View:
    none = torch.zeros(0, arms.shape[1], dtype=torch.float64)
    return View(
        terms=hub.terms,
        name="agent0",
        seed=trial,
        X=none,
        Y=none[:, :1],
        chosen=none,
        failed=none,
        n=t,
        t=t + 1,
        release=hub.terms.aggregation.meaning(hub.terms, state.parameters),
        candidates=arms,
    )


def public_play(study: PrivateUCB, problem: Problem, trial: int, rounds: int) -> np.ndarray:
    """What each round loses against the best action; a block is filled in one round."""
    names = tuple(f"agent{i}" for i in range(study.most_per_block or 1))
    hub = study.server(problem.space, names).hub
    stream = hub.terms.aggregation
    assert isinstance(stream, PublicStream)
    state, gaps = stream.start(hub), []
    while len(gaps) < rounds:
        block = state.block
        assert block is not None
        value = problem.values(block.X)
        length = min(block.length, rounds - len(gaps))
        gaps += [problem.best - float(value)] * length
        if length < block.length:
            break  # an unfinished block is never released
        noise = (problem.noise_std or 0.0) * generator(trial, "outcome", len(gaps)).normal(length)
        outcomes = problem.space.outcome.to_public(value + noise)
        asked = stream.turn(hub.terms, state)
        inbox = {name: Contribution(y[None]) for name, y in zip(asked, outcomes, strict=True)}
        state = stream.combine(hub, state, inbox)
    return np.array(gaps)


def runs(row: str, trials: int | None = None) -> list[Line]:
    """The runs of a row, trial by trial."""
    deltas = (BETA, SMALL) if row in ("kernel-bandit", "camelback") else (BETA,)
    count = TRIALS.get(row, 10) if trials is None else trials
    return [
        {"row": row, "alpha": alpha, "delta": delta, "trial": k}
        for delta in deltas
        for k in range(count)
        for alpha in ALPHAS
    ]


def results() -> Results:
    return Results("private_ucb/defaults", KEYS)


# ------------------------------------------------------------------ the summary


def tuned() -> dict[tuple[str, float, float], float]:
    """Mean regret of the tuned rows, by problem and setting."""
    found: dict[tuple[str, float, float], list[float]] = {}
    for line in Results("private_ucb/synthetic", ("row", "alpha", "beta", "trial")).lines:
        if line["row"] == "joint-sqrt":
            key = ("kernel-bandit", line["alpha"], line["beta"])
            found.setdefault(key, []).append(line["regret"])
    keys = ("environment", "mechanism", "alpha", "delta", "trial")
    for line in Results("private_ucb/table1", keys).lines:
        if line["mechanism"] == "blocks":
            key = (line["environment"], line["alpha"], line["delta"])
            found.setdefault(key, []).append(line["regret"])
    return {key: float(np.mean(values)) for key, values in found.items()}


def summary() -> list[dict[str, Any]]:
    """Regret by row and setting, beside the tuned row and the former defaults."""
    lines, known = results(), tuned()
    means: dict[tuple[str, float, float], float] = {}
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        for run in runs(row, 1):
            key = row, run["alpha"], run["delta"]
            found = lines.select(row=row, alpha=run["alpha"], delta=run["delta"])
            if not found:
                continue
            regrets = np.array([line["regret"] for line in found])
            low, high = interval(regrets)
            means[key] = float(regrets.mean())
            rows.append(
                {
                    **{name: run[name] for name in ("row", "alpha", "delta")},
                    "trials": len(found),
                    "regret": [round(float(x), 2) for x in (regrets.mean(), low, high)],
                    "worst": round(float(regrets.max()), 1),
                    "share_of_random": round(
                        float(np.mean([line["share_of_random"] for line in found])), 4
                    ),
                    "tuned": None if key not in known else round(known[key], 1),
                    "over_tuned": None if key not in known else round(means[key] / known[key], 2),
                    "features": found[0]["features"],
                    "cpu_seconds": round(
                        float(np.mean([line["cpu_seconds"] for line in found])), 1
                    ),
                }
            )
    for row in rows:
        former = means.get((f"{row['row']}-former", row["alpha"], row["delta"]))
        row["over_former"] = None if former is None else round(row["regret"][0] / former, 2)
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """The summary in words."""
    grid = Table(
        *("row", "alpha", "delta", "trials", "regret [95 %]", "worst", "of random"),
        *("tuned", "/ tuned", "/ former", "features", "CPU s"),
        title="PrivateUCB without tuning: regret, mean [95 % bootstrap interval]",
    )
    for row in rows:
        mean, low, high = row["regret"]
        cells = ("worst", "share_of_random", "tuned", "over_tuned", "over_former", "features")
        grid.add_row(
            *(f"{row[key]:g}" if key != "row" else row[key] for key in (*KEYS[:3], "trials")),
            f"{mean:.1f} [{low:.1f}, {high:.1f}]",
            *("" if row[key] is None else f"{row[key]:g}" for key in (*cells, "cpu_seconds")),
        )
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description="PrivateUCB without tuning.")
    parser.add_argument("--trials", type=int, help="how many")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--summary", action="store_true", help="of what has been run")
    parser.add_argument("--json", action="store_true", help="the summary as one line")
    parser.add_argument("--smoke", action="store_true", help="keep nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.smoke:
        for row in SMOKE:
            line = default_run(row, 1.0, BETA, 0, rounds=20)
            print(row, {key: line[key] for key in ("regret", "share_of_random", "features")})
        return
    if options.summary:
        found = summary()
        if options.json:
            print(json.dumps(found))
        else:
            Console(width=160).print(table(found))
        return
    lines = results()
    for row in options.rows:
        lines.fill(runs(row, options.trials), default_run, row)


if __name__ == "__main__":
    main()
