"""The experiments of federated Thompson sampling, each figure a named entry.

    python -m benchmarks.papers.fts ENTRY [--repeats N] [--rows ROW …]   run what is missing
    python -m benchmarks.papers.fts ENTRY --summary [--json]             from the committed results
    python -m benchmarks.papers.fts --smoke      every row for three queries, of what needs no data

    landmine          Figs. 2, 5, 6: 29 fields; decision-function AUC at tolerance 1e-6
    landmine-tol      the same at libsvm's default tolerance
    landmine-log      the same at tolerance 1e-6, C and gamma on a log scale
    synthetic         Fig. 1: functions at distance d_n, t_n observations, messages of M numbers
    har               Figs. 2, 7: activity recognition, the paper's ranges
    har-dp            the same with the ranges of DP-FTS-DE, on which subjects differ more
    landmine-time     Fig. 3: some of the same runs, lines have CPU seconds after so many queries;
    har-time          rows ``…@10`` have ten other agents and not all
    har-growing       Fig. 4: others' observations fixed at 50, or growing by one a round
    har-dp-growing    the same with the ranges of DP-FTS-DE
    gleam             not run: the data cannot be obtained, and no stand-in is claimed

Stored rows that begin with ``ours`` or ``field`` are of the last release. Its `Strategy()` made the
first query by a greedy choice against all messages, which gained nothing. Nothing here makes those
rows any more; summaries and figures show them as they were measured. The exception is
``ours-no-portfolio``, which is `Strategy()` as it is now. Stored rows with ``learned`` in their
name are of an option that is gone.

Landmine and HAR need ``BOTORCH_FED_DATA``. What the papers leave unstated was fixed before any run:

- others' 50 observations are 3 random points and 47 queries of their own Thompson sampling with the
  good own GP, five independent sets of them, repeat r uses set r mod 5; in Fig. 4 they go on so;
- starts of the targets are uniform and common to all rows;
- HAR is tabulated once on the first 1,024 Sobol points and the corners (`tabulated`), batch sizes
  rounded, and all agents choose among those; starts are points of that domain;
- synthetic: 20 functions with one start each instead of 5 with 5, as functions, not starts, are
  the independent units of the intervals; the sign of d_n is drawn for every agent and point; the
  faster p_t is 1 - 1/t^2; messages are made with the true kernel and noise, features are drawn
  anew for every run, and common to all its agents. Outcomes are seen as (y - 0.5) / 0.2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.papers.ledger import (
    Line,
    Results,
    at_checkpoints,
    nothing_kept,
    versions,
)
from benchmarks.papers.published.features import PaperCosine
from benchmarks.papers.published.points import label
from benchmarks.papers.published.settings import paper_messages, paper_strategy
from benchmarks.papers.tabulated import Tabulated, made_up, tabulate
from benchmarks.problems import ActivityRecognition, Landmine
from benchmarks.statistics import Effect, family, named_family, paired
from botorch_fed.acquisition import Constant, InverseSquare, Polynomial
from botorch_fed.federation.agent import FederatedAgent
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.terms import Search, View
from botorch_fed.models import (
    OwnHyperparameters,
    RandomFourierFeatures,
    StationaryKernel,
)
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, Study, run
from botorch_fed.search.thompson import Strategy, ThompsonMemory, ThompsonSearch
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Outcome, SearchSpace
from botorch_fed.storage.store import Blobs
from botorch_fed.studies import FTS
from botorch_fed.test_functions import FederatedTestProblem, SklearnTuning, SyntheticGPAgents

CACHE = Path(os.environ.get("BOTORCH_FED_CACHE", Path(__file__).parent.parent / ".cache"))
SEED = 20260101
TARGETS = 6
STARTS = 3
QUERIES = 50
OTHERS = 50  # observations of every other agent
LOGS = 5
GROWTH = 50  # observations that the others of Fig. 4 add, one a round
TIMED = "-time"  # ends the names of entries whose lines have CPU seconds by queries

ALONE = Strategy(own="thompson", warp=False, prior_until=0)
Data = dict[str, tuple[Tensor, Tensor]]


# ------------------------------------------------------------------ the federation of a target


def agent(n: int) -> str:
    return f"agent{n}"


def cpu_costs(result: RunResult, name: str) -> list[float]:
    """CPU seconds of an agent's rounds with a query, the objective's own included."""
    queried = {row["round"] for row in result.records if row["agent"] == name}
    return [
        row["cpu_seconds"]
        for row in result.rounds
        if row["agent"] == name and row["round"] in queried
    ]


def cpu_seconds(result: RunResult, name: str) -> float:
    """Their mean."""
    costs = cpu_costs(result, name)
    return sum(costs) / len(costs) if costs else float("nan")


def starts(problem: FederatedTestProblem, n: int, *path: int | str) -> tuple[Tensor, Tensor]:
    """Uniform starting points of an agent and their values."""
    stream = generator(SEED, "starts", n, *path)
    if isinstance(problem, Tabulated):
        X = problem.points[(stream.uniform(STARTS) * len(problem.points)).long()]
    else:
        X = stream.uniform(STARTS, problem.dim)
    return X, problem.evaluate(n, X).reshape(-1, 1)


@cache
def logs(name: str, index: int, count: int) -> Data:
    """Observations of every agent by its own Thompson sampling, made once.

    Longer logs begin as shorter ones do.
    """
    problem = PROBLEMS[name]()
    path = CACHE / f"logs-{name}-{index}{'' if count == OTHERS else f'-{count}'}.npz"
    if not path.exists():
        data = {agent(n): starts(problem, n, "log", index) for n in range(len(problem))}
        study = FTS(budget=count - STARTS, strategy=ALONE, data=data, candidates=domain_of(problem))
        result = run(study, problem, seed=SEED + index)
        arrays = {}
        for who, (X, Y) in data.items():
            new_X, new_Y = result.history(who)
            arrays[f"X-{who}"] = torch.cat([X, new_X]).numpy()
            arrays[f"Y-{who}"] = torch.cat([Y, new_Y]).numpy()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft.npz")
        np.savez(draft, **arrays)  # type: ignore[arg-type]
        draft.replace(path)
    with np.load(path) as archive:
        return {
            agent(n): (
                torch.from_numpy(archive[f"X-{agent(n)}"]),
                torch.from_numpy(archive[f"Y-{agent(n)}"]),
            )
            for n in range(len(problem))
        }


def domain_of(problem: FederatedTestProblem) -> Tensor | None:
    """The only points that can be evaluated, if not all of the unit cube can."""
    return problem.points if isinstance(problem, (Tabulated, SyntheticGPAgents)) else None


class _Only(FederatedTestProblem):
    """A problem under another outcome scale, or its first agents alone."""

    def __init__(self, problem: FederatedTestProblem, outcome: Outcome, count: int) -> None:
        self.problem, self.count = problem, count
        self.space = SearchSpace(problem.space.parameters, outcome)

    def __len__(self) -> int:
        return self.count

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        return self.problem.evaluate(agent, X)


PROBLEMS: dict[str, Callable[[], FederatedTestProblem]] = {
    "landmine": cache(lambda: Landmine(tol=1e-6)),
    "landmine-tol": cache(lambda: Landmine(tol=1e-3)),
    "landmine-log": cache(lambda: Landmine(tol=1e-6, scale="log")),
    "har": cache(lambda: tabulate(ActivityRecognition(ranges="fts"), "har-fts")),
    "har-dp": cache(lambda: tabulate(ActivityRecognition(ranges="dp-fts-de"), "har-dp-fts-de")),
}
PROBLEMS |= {f"{name}{TIMED}": PROBLEMS[name] for name in ("landmine", "har")}
HAR_ROWS = (
    *("ts", "fts-mean", "fts-paper", "ts-raw", "sobol-ts", "random", "ei", "ei-warped"),
    *("rgpe", "taf", "transfer", "log-ei", "fts-paper-50", "fts-paper-200"),
)
TIMED_ROWS = (
    *("fts-paper", "rgpe", "taf", "ts-raw", "transfer"),
    *("fts-paper@10", "rgpe@10", "taf@10"),
)


def corners(dim: int) -> Tensor:
    """Two fixed corners: all parameters at their lower ends, and all but the last at the upper."""
    low = torch.zeros(1, dim).double()
    high = torch.ones(1, dim).double()
    high[0, -1] = 0.0
    return torch.cat([high, low])


def sobol(dim: int, count: int = 3) -> Tensor:
    """The first Sobol points after zero."""
    return torch.quasirandom.SobolEngine(dim, scramble=False).draw(count + 1).double()[1:]


class _OneActive(FTS):
    """A study whose inactive agents fit no model of their own: they never query.

    Messages do not depend on that model, so the results are the same, sooner.
    """

    def agent(self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs) -> FederatedAgent:
        made = super().agent(name, space, seed, blobs)
        search = made.terms.search
        if self.active is None or name in self.active or not isinstance(search, ThompsonSearch):
            return made
        if search.strategy.transfer != "mixture":  # an ensemble cannot do without
            return made
        return _with_strategy(made, replace(search.strategy, own="random"))


def _with_strategy(agent: FederatedAgent, strategy: Strategy) -> FederatedAgent:
    search = agent.terms.search
    assert isinstance(search, ThompsonSearch)
    return replace(agent, terms=replace(agent.terms, search=replace(search, strategy=strategy)))


def rows(
    space: SearchSpace, points: Tensor | None = None
) -> dict[str, tuple[bool, Callable[[Data, int], Study]]]:
    """Every method: whether outcomes stay raw, and its study for some data."""
    study, dim = FTS if points is None else _OneActive, space.dim

    def fts(**options: Any) -> Callable[[Data, int], Study]:
        return lambda data, n: study(
            budget=QUERIES, active=(agent(n),), data=data, candidates=points, **options
        )

    first = sobol(dim) if points is None else points[1 : STARTS + 1]
    random = replace(ALONE, own="random")
    raw = paper_strategy(Constant(1.0))
    ei = replace(ALONE, own="ei")
    mixed = replace(ALONE, schedule=Polynomial(0.5))
    return {
        "random": (False, fts(strategy=random)),
        "ts-raw": (True, fts(strategy=raw)),
        "ts": (False, fts(strategy=ALONE)),
        "ei": (False, fts(strategy=ei)),
        "ts-warped": (False, fts(strategy=replace(ALONE, warp=True))),
        "ei-warped": (False, fts(strategy=replace(ei, warp=True))),
        "corners-ei-warped": (
            False,
            fts(strategy=replace(ei, warp=True), initial_design=corners(dim)),
        ),
        "corners-ts": (False, fts(strategy=ALONE, initial_design=corners(dim))),
        "sobol-ts": (False, fts(strategy=ALONE, initial_design=first)),
        "fts-paper": (True, fts(strategy=paper_strategy(), **paper_messages(dim, seed=SEED))),
        "fts-mean": (False, fts(strategy=mixed)),
        "rgpe": (False, fts(strategy=replace(ALONE, transfer="rgpe"), message="summary")),
        "taf": (
            False,
            fts(strategy=replace(ALONE, transfer="taf"), message="summary_and_incumbent"),
        ),
        "transfer": (False, fts(strategy=TransferSearch())),
        "log-ei": (False, fts(strategy=TransferSearch(listen=False))),
        "ours-no-portfolio": (False, fts(strategy=Strategy())),
        **{
            f"fts-paper-{M}": (
                True,
                fts(strategy=paper_strategy(), **paper_messages(dim, M, seed=SEED)),
            )
            for M in (50, 150, 200)
        },
    }


NEEDS_OTHERS = ("fts", "ours", "rgpe", "taf", "transfer")


def one_run(entry: str, row: str, target: int, repeat: int) -> Line:
    """One target's 50 queries."""
    problem = PROBLEMS[entry]()
    row, _, others = row.partition("@")
    count = min(int(others) + 1 if others else len(problem), len(problem))
    raw, study = rows(problem.space, domain_of(problem))[row]
    data: Data = {}
    if row.startswith(NEEDS_OTHERS):
        log = logs(entry.removesuffix(TIMED), repeat % LOGS, OTHERS)
        data = {agent(n): log[agent(n)] for n in range(count)}
    start = starts(problem, target, "target", repeat)
    data[agent(target)] = start
    outcome = Outcome() if raw else problem.space.outcome
    shown = _Only(problem, outcome, count) if raw or others else problem
    result = run(study(data, target), shown, seed=SEED + 1000 + repeat)
    values = [float(start[1].max()), *(line["y"] for line in result.records)]
    mean_value = np.cumsum(values[1:]) / np.arange(1, len(values))
    known: Line = {}
    if isinstance(problem, Tabulated):
        known["optimum"] = round(float(problem.optimal_values[target]), 5)
    if entry.endswith(TIMED):
        spent = np.cumsum([0.0, *cpu_costs(result, agent(target))])
        known["cpu_by_query"] = at_checkpoints(spent)
    return {
        **known,
        "best": at_checkpoints(np.maximum.accumulate(values)),
        "mean": at_checkpoints([values[0], *mean_value]),
        "cpu_ms": round(1e3 * cpu_seconds(result, agent(target)), 2),
        "versions": versions(),
    }


# ------------------------------------------------------------------ Fig. 4: others that go on


@dataclass(frozen=True, kw_only=True, eq=False)
class _Growing(FTS):
    """All agents query: the target as it likes, the others where their logs went on.

    Args:
        target: The agent that uses messages.
        designs: The next points of every other agent, as its own Thompson sampling chose them.
    """

    target: AgentId
    designs: Data

    def agent(self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs) -> FederatedAgent:
        made = super().agent(name, space, seed, blobs)
        if name == self.target:
            return made
        alone = _with_strategy(made, replace(ALONE, own="random"))
        return replace(alone, initial_design=self.designs[name][0])


GROWING = {"har-growing": "har", "har-dp-growing": "har-dp"}
GROWING_KEYS = ("row", "others", "target", "repeat")
GROWING_ROWS: dict[str, tuple[bool, Callable[[int], dict[str, Any]]]] = {
    "fts-mean": (False, lambda dim: {"strategy": replace(ALONE, schedule=Polynomial(0.5))}),
    "fts-paper": (
        True,
        lambda dim: {"strategy": paper_strategy(), **paper_messages(dim, seed=SEED)},
    ),
}


def growing_run(entry: str, row: str, others: str, target: int, repeat: int) -> Line:
    """One target's 50 queries, the others ``"fixed"`` at 50 observations or ``"growing"``."""
    problem = PROBLEMS[GROWING[entry]]()
    points = domain_of(problem)
    log = logs(GROWING[entry], repeat % LOGS, OTHERS + GROWTH)
    data = {who: (X[:OTHERS], Y[:OTHERS]) for who, (X, Y) in log.items()}
    data[agent(target)] = start = starts(problem, target, "target", repeat)
    raw, given = GROWING_ROWS[row]
    shown = _Only(problem, Outcome(), len(problem)) if raw else problem
    options = {"budget": QUERIES, "data": data, "candidates": points, **given(problem.dim)}
    study: FTS
    if others == "fixed":
        study = _OneActive(active=(agent(target),), **options)
    else:
        later = {who: (X[OTHERS:], Y[OTHERS:]) for who, (X, Y) in log.items()}
        study = _Growing(target=agent(target), designs=later, every=1, **options)
    result = run(study, shown, seed=SEED + 1000 + repeat)
    values = [float(start[1].max()), *result.history(agent(target))[1].flatten().tolist()]
    return {
        "best": at_checkpoints(np.maximum.accumulate(values)),
        "optimum": round(float(problem.optimal_values[target]), 5),
        "cpu_ms": round(1e3 * cpu_seconds(result, agent(target)), 2),
        "versions": versions(),
    }


# ------------------------------------------------------------------ Fig. 1: synthetic functions

SYNTHETIC_KEYS = ("row", "distance", "observed", "features", "function", "start")
DISTANCES = (0.02, 1.2)
OBSERVED = (40, 100)
MESSAGE_LENGTHS = (50, 100)
NUM_OTHERS = 50
LENGTHSCALE = 0.03
# Settings (distance, observations, features) of a row; nothing of them matters without messages.
NO_SETTING: tuple[float | None, int, int] = (None, 0, 0)
FIELD_SETTING = (None, 100, 100)  # others know independent functions of the same process
MIXED = replace(ALONE, schedule=Polynomial(0.5))
FASTER = replace(MIXED, schedule=InverseSquare())


@dataclass(frozen=True, kw_only=True)
class _KnownSearch(ThompsonSearch):
    """A search of an agent that knows the kernel and the noise of its function."""

    def told(self, view: View) -> ThompsonMemory:
        scale = view.terms.space.outcome.scale
        lengthscale = torch.full((1,), LENGTHSCALE, dtype=torch.float64)
        known = OwnHyperparameters(lengthscale, 1.0, 0.01 / scale**2, 0.0, len(view.X))
        assert isinstance(view.memory, ThompsonMemory)
        return replace(view.memory, own=known)


class _Known(_OneActive):
    """A study whose agents know the kernel and the noise of their functions."""

    def make_search(self) -> Search:
        made = super().make_search()
        return _KnownSearch(**{f.name: getattr(made, f.name) for f in fields(made)})


def synthetic_rows() -> dict[str, tuple[type[FTS], dict[str, Any]]]:
    """Every method: its study and that study's options; messages of a public basis."""
    sample = {"message": "sample"}
    ei = replace(ALONE, own="ei")
    return {
        "ts": (_OneActive, {"strategy": ALONE}),
        "ts-known": (_Known, {"strategy": ALONE}),
        "ei": (_OneActive, {"strategy": ei}),
        "sobol-ts": (_OneActive, {"strategy": ALONE, "initial_design": None}),
        "random": (_OneActive, {"strategy": replace(ALONE, own="random")}),
        "fts": (_OneActive, {"strategy": MIXED, **sample}),
        "fts-fast": (_OneActive, {"strategy": FASTER, **sample}),
        "fts-known": (_Known, {"strategy": MIXED, **sample}),
        "fts-known-fast": (_Known, {"strategy": FASTER, **sample}),
        "fts-mean": (_OneActive, {"strategy": MIXED, "message": "mean"}),
        "fts-field": (_OneActive, {"strategy": MIXED, **sample}),
    }


def synthetic_settings(row: str) -> list[tuple[float | None, int, int]]:
    """The settings a row is run in."""
    if row in ("ts", "ts-known", "ei", "sobol-ts", "random"):
        return [NO_SETTING]
    if row == "fts-field":
        return [FIELD_SETTING]
    every = list(itertools.product(DISTANCES, OBSERVED, MESSAGE_LENGTHS))
    if row in ("fts", "fts-fast", "fts-known"):
        return every
    return [setting for setting in every if setting[-1] == 100]


def synthetic_run(
    row: str, distance: float | None, observed: int, features: int, function: int, start: int
) -> Line:
    """One target's 50 queries of a sample of a Gaussian process."""
    near = DISTANCES[0] if distance is None else distance
    problem = SyntheticGPAgents(NUM_OTHERS + 1, seed=function, distance=near)
    stream = generator(SEED, "synthetic start", function, start)
    X = problem.points[(stream.uniform(1) * len(problem.points)).long()]
    noise_std = math.sqrt(problem.noise_var)
    Y = problem[0](X, noise=False).reshape(1, 1) + noise_std * stream.normal(1, 1)
    data: Data = {agent(0): (X, Y)}
    if observed:
        known = problem
        if row == "fts-field":
            known = SyntheticGPAgents(NUM_OTHERS + 1, seed=function + 10**6, heterogeneity=1.0)
        for n in range(1, len(problem)):
            data[agent(n)] = known.observations(n, observed, seed=SEED + start)
    kernel = StationaryKernel(math.inf, [LENGTHSCALE])
    draw = generator(SEED, "synthetic features", function, start)
    method, given = synthetic_rows()[row]
    options = {"noise_var": problem.noise_var / problem.space.outcome.scale**2, **given}
    if features:
        # The paper's cosines for the paper's messages, pairs of cosine and sine for ours.
        paper = given["message"] == "sample"
        make: Callable[..., RandomFourierFeatures] = (
            PaperCosine.draw if paper else RandomFourierFeatures.draw
        )
        options["feature_map"] = make(kernel, features, generator=draw)
    if row == "sobol-ts":
        nearest = (problem.points - sobol(1).mT).abs().argmin(dim=0)
        options["initial_design"] = problem.points[nearest]
    study = method(
        budget=QUERIES, active=(agent(0),), data=data, candidates=problem.points, **options
    )
    result = run(study, problem, seed=SEED + 1000 * function + start)
    true = [float(problem[0](X, noise=False)), *(line["true"] for line in result.records)]
    regrets = float(problem.optimal_values[0]) - np.array(true)
    sums = np.concatenate([[0.0], np.cumsum(regrets[1:])])
    return {
        "regret": at_checkpoints(np.minimum.accumulate(regrets), 4),
        "cumulative": at_checkpoints(sums, 3),
        "cpu_ms": round(1e3 * cpu_seconds(result, agent(0)), 2),
        "versions": versions(),
    }


# ------------------------------------------------------------------ summaries


def best_of(results: Results, row: str, at: int) -> dict[tuple[int, int], float]:
    """Best value by (target, repeat)."""
    return {
        (line["target"], line["repeat"]): line["best"][str(at)] for line in results.select(row=row)
    }


def compare(results: Results, row: str, other: str, at: int) -> Effect | None:
    """A row minus another, paired by target and repeat; targets are the clusters."""
    return paired(
        best_of(results, row, at), best_of(results, other, at), cluster=lambda key: key[0]
    )


def summary(entry: str, *, as_json: bool, row: str = "ours") -> None:
    results = Results(f"fts/{entry}", ("row", "target", "repeat"))
    names = list(dict.fromkeys(line["row"] for line in results.lines))
    if as_json:
        found = {t: compare(results, row, "ts", t) for t in (1, 2, 3, 5, 10, 20, 30, 40, 50)}
        gaps = {t: gap for t, gap in found.items() if gap is not None}
        corner = compare(results, row, "corners-ts", 10)
        if len(gaps) < len(found) or corner is None:
            raise SystemExit(f"{entry} has no common runs of {row}, ts and corners-ts.")
        best = {t: float(np.mean(list(best_of(results, row, t).values()))) for t in gaps}
        out = {
            **{f"auc_at_{t}": round(best[t], 4) for t in (1, 5, 10, 50)},
            "ts_auc_at_5": round(float(np.mean(list(best_of(results, "ts", 5).values()))), 4),
            "gain_at_5": round(gaps[5].mean, 4),
            "p_at_5": gaps[5].p,
            "worst_gap_to_ts": round(min(gap.mean for gap in gaps.values()), 4),
            "gain_over_corners_at_10": round(corner.mean, 4),
            "p_over_corners_at_10": corner.p,
            "targets": corner.clusters,
            "seeds": len({line["repeat"] for line in results.select(row=row)}),
        }
        print(json.dumps(out))
        return
    times = ("1", "5", "10", "20", "50")
    table = Table(title=f"{entry}: best value, mean over targets and repeats")
    for column in ("row", "runs", *times, "- ts at 5", "- ts at 10", "- ts at 50", "ms/query"):
        table.add_column(column)
    for name in names:
        lines = results.select(row=name)
        cells = [f"{np.mean([line['best'][t] for line in lines]):.4f}" for t in times]
        for t in (5, 10, 50):
            gap = None if name == "ts" else compare(results, name, "ts", t)
            cells.append("" if gap is None else gap.shown(4))
        cells.append(f"{np.mean([line['cpu_ms'] for line in lines]):.0f}")
        table.add_row(label(f"fts/{results.path.stem}", name, lines), str(len(lines)), *cells)
    Console(width=200).print(table)


def by_function(results: Results, what: str, at: int, **fields_: Any) -> dict[int, float]:
    """Mean over starts of a row's regret, by function."""
    found: dict[int, list[float]] = {}
    for line in results.select(**fields_):
        found.setdefault(line["function"], []).append(line[what][str(at)])
    return {function: float(np.mean(values)) for function, values in found.items()}


def synthetic_gap(
    results: Results, what: str, at: int, one: dict[str, Any], other: dict[str, Any]
) -> Effect | None:
    """A row minus another, paired by function; None if one of them was not run."""
    return paired(by_function(results, what, at, **one), by_function(results, what, at, **other))


SYNTHETIC_TIMES = (
    ("regret", 5),
    ("regret", 10),
    ("regret", 20),
    ("regret", 50),
    ("cumulative", 50),
)


DESIGNS = ("ours", "ours-then-ei", "ours-default-basis", "ours-then-ei-default-basis")


def synthetic_claims(results: Results) -> dict[str, dict[str, dict[str, Effect]]]:
    """Differences behind every claim of Fig. 1: claim, setting, time."""
    claims: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {}

    def add(claim: str, row: str, other: str | None, distance: float) -> None:
        for observed, features in itertools.product(OBSERVED, MESSAGE_LENGTHS):
            here = {"distance": distance, "observed": observed, "features": features}
            against = {"row": "ts"} if other in (None, "ts") else {"row": other, **here}
            if other == "ts-known":
                against = {"row": "ts-known"}
            name = f"t_n={observed} M={features}"
            claims.setdefault(claim, []).append((name, {"row": row, **here}, against))

    add("d_n=0.02: fts - ts", "fts", "ts", 0.02)
    add("d_n=0.02: fts-known - ts-known", "fts-known", "ts-known", 0.02)
    for row in ("fts", "fts-known"):
        claims[f"d_n=0.02: {row}, M=100 - M=50"] = [
            (
                f"t_n={observed}",
                {"row": row, "distance": 0.02, "observed": observed, "features": 100},
                {"row": row, "distance": 0.02, "observed": observed, "features": 50},
            )
            for observed in OBSERVED
        ]
    add("d_n=1.2: fts (slow p_t) - ts", "fts", "ts", 1.2)
    add("d_n=1.2: fts-fast - ts", "fts-fast", "ts", 1.2)
    add("d_n=1.2: fts - fts-fast", "fts", "fts-fast", 1.2)
    add("d_n=1.2: fts-known - ts-known", "fts-known", "ts-known", 1.2)
    add("d_n=1.2: fts-known-fast - ts-known", "fts-known-fast", "ts-known", 1.2)
    for distance in DISTANCES:
        for row in DESIGNS:
            add(f"d_n={distance}: {row} - ts", row, "ts", distance)
    field_ = dict(zip(("distance", "observed", "features"), FIELD_SETTING, strict=True))
    for row in ("fts-field", "ours-field", "ours-then-ei-field"):
        claims[f"independent functions: {row} - ts"] = [
            ("t_n=100 M=100", {"row": row, **field_}, {"row": "ts"})
        ]
    found: dict[str, dict[str, dict[str, Effect]]] = {}
    for claim, pairs in claims.items():
        for name, one, other in pairs:
            for what, at in SYNTHETIC_TIMES:
                gap = synthetic_gap(results, what, at, one, other)
                if gap is not None:
                    found.setdefault(claim, {}).setdefault(name, {})[f"{what}_{at}"] = gap
    for settings in found.values():  # Holm over the settings of a claim
        for what, at in SYNTHETIC_TIMES:
            key = f"{what}_{at}"
            tested = named_family({name: times[key] for name, times in settings.items()})
            for name, gap in tested.items():
                settings[name][key] = gap
    return found


def synthetic_summary(entry: str, *, as_json: bool) -> None:
    """Regret of every row and setting, and the differences behind the claims."""
    results = Results(f"fts/{entry}", SYNTHETIC_KEYS)
    claims = synthetic_claims(results)
    functions = len({line["function"] for line in results.lines})
    if as_json:
        said = {
            claim: {
                name: {k: asdict(gap) for k, gap in times.items()} for name, times in of.items()
            }
            for claim, of in claims.items()
        }
        print(json.dumps({"functions": functions, "claims": said}))
        return
    console = Console(width=170)
    table = Table(title=f"{entry}: simple regret (noise-free), mean over {functions} functions")
    times = (1, 2, 5, 10, 20, 30, 50)
    for column in ("row", "d_n", "t_n", "M", "runs", *map(str, times), "cumulative 50", "ms/query"):
        table.add_column(column)
    keys = SYNTHETIC_KEYS[:4]
    for setting in sorted({tuple(line[key] for key in keys) for line in results.lines}, key=str):
        lines = results.select(**dict(zip(keys, setting, strict=True)))
        mean = [f"{np.mean([line['regret'][str(t)] for line in lines]):.3f}" for t in times]
        total = np.mean([line["cumulative"]["50"] for line in lines])
        cpu = np.mean([line["cpu_ms"] for line in lines])
        table.add_row(*map(str, setting), str(len(lines)), *mean, f"{total:.2f}", f"{cpu:.0f}")
    console.print(table)
    table = Table(
        title="paired differences, negative is better: mean [95 %], functions are the clusters; "
        "the settings of a claim are a family"
    )
    for column in ("claim", "setting", *(f"{what} {at}" for what, at in SYNTHETIC_TIMES)):
        table.add_column(column)
    for claim, settings in claims.items():
        for name, gaps in settings.items():
            table.add_row(claim, name, *(gap.shown() for gap in gaps.values()))
    Console(width=210).print(table)


def har_summary(entry: str, *, as_json: bool) -> None:
    """Accuracy of every row: over all targets, and per target."""
    results = Results(f"fts/{entry}", keys_of(entry))
    names = list(dict.fromkeys(line["row"] for line in results.lines))
    times = (1, 5, 10, 20, 50)
    out: dict[str, Any] = {}
    for row in names:
        out[row] = {"runs": len(results.select(row=row))}
        for t in times:
            out[row][f"at_{t}"] = round(float(np.mean(list(best_of(results, row, t).values()))), 4)
            for other in ("ts", "field"):
                gap = None if row == other else compare(results, row, other, t)
                if gap is not None:
                    out[row][f"minus_{other}_at_{t}"] = asdict(gap)
    if as_json:
        print(json.dumps(out))
        return
    optimum = {line["target"]: line["optimum"] for line in results.lines}
    optimum = dict(sorted(optimum.items()))
    mean_optimum = np.mean(list(optimum.values()))
    table = Table(
        title=f"{entry}: best accuracy, mean over targets and repeats (optimum {mean_optimum:.4f})"
    )
    gaps_shown = [(other, t) for other in ("ts", "field") for t in (5, 10, 50)]
    for column in ("row", "runs", *map(str, times), *(f"- {o} at {t}" for o, t in gaps_shown)):
        table.add_column(column)
    for row, values in out.items():
        cells = [f"{values[f'at_{t}']:.4f}" for t in times]
        for other, t in gaps_shown:
            gap = values.get(f"minus_{other}_at_{t}")
            cells.append("" if gap is None else Effect(**gap).shown(4))
        table.add_row(row, str(values["runs"]), *cells)
    Console(width=200).print(table)
    table = Table(title=f"{entry}: best accuracy per target at 5 / 10 / 50 queries")
    for column in ("row", *(f"subject {target + 1}" for target in optimum)):
        table.add_column(column)
    table.add_row("optimum", *(f"{optimum[target]:.4f}" for target in optimum))
    for row in names:
        cells = []
        for target in optimum:
            lines = results.select(row=row, target=target)
            means = [np.mean([line["best"][str(t)] for line in lines]) for t in (5, 10, 50)]
            cells.append(" ".join(f"{mean:.4f}" for mean in means))
        table.add_row(row, *cells)
    for row in ("ours", "fts-mean", "fts-paper"):
        one = [
            paired(best_of(part, row, 10), best_of(part, "ts", 10))  # repeats are the clusters
            for part in (results.only(target=t) for t in optimum)
        ]
        tested = family([gap for gap in one if gap is not None])
        if len(tested) == len(one):
            table.add_row(f"{row} - ts at 10, p by Holm", *(gap.shown(4) for gap in tested))
    Console(width=200).print(table)


def growing_summary(entry: str, *, as_json: bool) -> None:
    """Growing minus fixed, paired by target and repeat."""
    results = Results(f"fts/{entry}", keys_of(entry))
    times = (1, 5, 10, 20, 50)
    out: dict[str, Any] = {}
    for row in dict.fromkeys(line["row"] for line in results.lines):
        values: dict[str, dict[tuple[int, int], dict[str, float]]] = {"fixed": {}, "growing": {}}
        for line in results.select(row=row):
            values[line["others"]][line["target"], line["repeat"]] = line["best"]
        both = sorted(values["fixed"].keys() & values["growing"].keys())
        if not both:
            continue
        out[row] = {"runs": len(both)}
        for t in times:
            fixed, growing = (
                {key: values[others][key][str(t)] for key in both}
                for others in ("fixed", "growing")
            )
            gap = paired(growing, fixed, cluster=lambda key: key[0])
            assert gap is not None
            out[row][f"fixed_at_{t}"] = round(float(np.mean(list(fixed.values()))), 4)
            out[row][f"growing_at_{t}"] = round(float(np.mean(list(growing.values()))), 4)
            out[row][f"growing_minus_fixed_at_{t}"] = asdict(gap)
    if as_json:
        print(json.dumps(out))
        return
    table = Table(title=f"{entry}: best accuracy with others' observations fixed at 50 or growing")
    for column in ("row", "pairs", "query", "fixed", "growing", "growing - fixed"):
        table.add_column(column)
    for row, found in out.items():
        for t in times:
            gap = Effect(**found[f"growing_minus_fixed_at_{t}"])
            cells = [f"{found[f'{others}_at_{t}']:.4f}" for others in ("fixed", "growing")]
            table.add_row(row, str(found["runs"]), str(t), *cells, gap.shown(4))
    Console(width=150).print(table)


SUMMARIES: dict[str, Callable[..., None]] = {
    "synthetic": synthetic_summary,
    **dict.fromkeys(("har", "har-dp", f"har{TIMED}"), har_summary),
    **dict.fromkeys(GROWING, growing_summary),
}


def runs_of(entry: str, options: argparse.Namespace) -> dict[str, list[Line]]:
    """The runs of every row that was asked for."""
    if entry == "synthetic":
        repeats = 20 if options.repeats is None else options.repeats
        starts_ = 1 if options.starts is None else options.starts
        return {
            row: [
                dict(zip(SYNTHETIC_KEYS, (row, *setting, function, start), strict=True))
                for start in range(starts_)
                for setting in synthetic_settings(row)
                for function in range(repeats)
            ]
            for row in options.rows or synthetic_rows()
        }
    if entry in GROWING:
        return {
            row: [
                {"row": row, "others": others, "target": target, "repeat": repeat}
                for repeat in range(10 if options.repeats is None else options.repeats)
                for others in ("fixed", "growing")
                for target in range(options.targets)
            ]
            for row in options.rows or GROWING_ROWS
        }
    chosen: Sequence[str] = HAR_ROWS
    if entry.endswith(TIMED):
        chosen = TIMED_ROWS
    elif not entry.startswith("har"):
        chosen = tuple(rows(PROBLEMS[entry]().space))
    return {
        row: [
            {"row": row, "target": target, "repeat": repeat}
            for repeat in range(20 if options.repeats is None else options.repeats)
            for target in range(options.targets)
        ]
        for row in options.rows or chosen
    }


NOT_RUN = {
    "gleam": "GLEAM (38 wearers of Google glasses) cannot be obtained here, so the entry is not "
    "run; no stand-in is claimed."
}
ENTRIES = (*PROBLEMS, *GROWING, "synthetic", *NOT_RUN)


def keys_of(entry: str) -> tuple[str, ...]:
    """What identifies a run of an entry."""
    if entry == "synthetic":
        return SYNTHETIC_KEYS
    return GROWING_KEYS if entry in GROWING else ("row", "target", "repeat")


def work_of(entry: str) -> Callable[..., Line]:
    """What does a run of an entry."""
    if entry == "synthetic":
        return synthetic_run
    return partial(growing_run if entry in GROWING else one_run, entry)


SMOKE = {"QUERIES": 3, "OTHERS": 5, "GROWTH": 2, "NUM_OTHERS": 2}


def smoke() -> None:
    """Every row of all kinds of entries for three queries; nothing is kept."""
    once = argparse.Namespace(repeats=1, starts=1, targets=1, rows=None)
    tuning = partial(SklearnTuning, 3, splits=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        nothing_kept(),
        patch.dict(globals(), SMOKE, CACHE=Path(folder)),
        patch.dict(PROBLEMS, {"har-made-up": made_up, "tuning": tuning, "tuning-time": tuning}),
        patch.dict(GROWING, {"growing": "har-made-up"}),
    ):
        for entry in ("har-made-up", "tuning", "tuning-time", "growing", "synthetic"):
            results = Results(f"fts/{entry}", keys_of(entry))
            for row, runs in runs_of(entry, once).items():
                results.fill(runs[-1:], work_of(entry), row)
            print(f"{entry}: {len(results.lines)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("entry", nargs="?", choices=ENTRIES)
    parser.add_argument("--repeats", type=int, help="functions, for synthetic")
    parser.add_argument("--starts", type=int, help="for synthetic: starts of every function")
    parser.add_argument("--targets", type=int, default=TARGETS)
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="does everything run?")
    options = parser.parse_args()
    if options.smoke:
        smoke()
        return
    if options.entry is None:
        parser.error("an entry, or --smoke")
    if options.entry in NOT_RUN:
        print(NOT_RUN[options.entry])
        return
    if options.summary:
        SUMMARIES.get(options.entry, summary)(options.entry, as_json=options.json)
        return
    results = Results(f"fts/{options.entry}", keys_of(options.entry))
    for row, runs in runs_of(options.entry, options).items():
        results.fill(runs, work_of(options.entry), row)


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's lines."""


if __name__ == "__main__":
    main()
