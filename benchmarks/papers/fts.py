"""The experiments of federated Thompson sampling, each figure a named entry.

    python -m benchmarks.papers.fts ENTRY [--repeats N] [--rows ROW …]   run what is missing
    python -m benchmarks.papers.fts ENTRY --summary [--json]             from the committed results

    landmine          Figs. 2, 3, 5, 6: 29 fields; decision-function AUC at tolerance 1e-6
    landmine-tol      the same at libsvm's default tolerance
    landmine-log      the same at tolerance 1e-6, C and gamma on a log scale
    synthetic         Fig. 1
    har               Figs. 2, 3, 7: activity recognition
    har-growing       Fig. 4: others' observations fixed, or growing by one a round
    gleam             not run: the data cannot be obtained, and no stand-in is claimed

Landmine and HAR need ``BOTORCH_FED_DATA``. What the papers leave unstated was fixed before any run:
others' 50 observations are 3 random points and 47 queries of their own Thompson sampling with the
good own GP, five independent sets of them, repeat r uses set r mod 5; starts of the targets are
uniform and common to all rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import wilcoxon
from torch import Tensor

from benchmarks.papers.ledger import Line, Results, at_checkpoints, interval, versions
from botorch_fed.acquisition import Constant, Polynomial
from botorch_fed.models import RandomFourierFeatures, StationaryKernel
from botorch_fed.protocols.fts import FTS, Strategy, default_feature_map, paper_strategy
from botorch_fed.rng import generator
from botorch_fed.run import Study, run
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.test_functions import FederatedTestProblem, Landmine

CACHE = Path(os.environ.get("BOTORCH_FED_CACHE", Path(__file__).parent.parent / ".cache"))
SEED = 20260101
TARGETS = 6
STARTS = 3
QUERIES = 50
OTHERS = 50  # observations of every other agent
LOGS = 5

ALONE = Strategy(schedule=Constant(1.0), portfolio=0, prior_until=0)
Data = dict[str, tuple[Tensor, Tensor]]


# ------------------------------------------------------------------ the federation of a target


def agent(n: int) -> str:
    return f"agent{n}"


def starts(problem: FederatedTestProblem, n: int, *path: int | str) -> tuple[Tensor, Tensor]:
    """Uniform starting points of an agent and their values."""
    X = generator(SEED, "starts", n, *path).uniform(STARTS, problem.dim)
    return X, problem.evaluate(n, X).reshape(-1, 1)


@cache
def logs(name: str, index: int) -> Data:
    """Fifty observations of every agent by its own Thompson sampling, made once."""
    problem = PROBLEMS[name]()
    path = CACHE / f"logs-{name}-{index}.npz"
    if not path.exists():
        data = {agent(n): starts(problem, n, "log", index) for n in range(len(problem))}
        study = FTS(rounds=OTHERS - STARTS, strategy=ALONE, data=data)
        result = run(study, problem, seed=SEED + index)
        arrays = {}
        for who, (X, Y) in data.items():
            new_X, new_Y = result.history(who)
            arrays[f"X-{who}"] = torch.cat([X, new_X]).numpy()
            arrays[f"Y-{who}"] = torch.cat([Y, new_Y]).numpy()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft.npz")
        np.savez(draft, **arrays)
        draft.replace(path)
    with np.load(path) as archive:
        return {
            agent(n): (
                torch.from_numpy(archive[f"X-{agent(n)}"]),
                torch.from_numpy(archive[f"Y-{agent(n)}"]),
            )
            for n in range(len(problem))
        }


class _Only(FederatedTestProblem):
    """A problem under another outcome scale."""

    def __init__(self, problem: FederatedTestProblem, outcome: Outcome) -> None:
        self.problem = problem
        self.space = SearchSpace(problem.space.parameters, outcome)

    def __len__(self) -> int:
        return len(self.problem)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        return self.problem.evaluate(agent, X)


PROBLEMS: dict[str, Callable[[], FederatedTestProblem]] = {
    "landmine": cache(lambda: Landmine(tol=1e-6)),
    "landmine-tol": cache(lambda: Landmine(tol=1e-3)),
    "landmine-log": cache(lambda: Landmine(tol=1e-6, scale="log")),
}


def corners(dim: int) -> Tensor:
    """Two fixed corners: all parameters at their lower ends, and all but the last at the upper."""
    low = torch.zeros(1, dim).double()
    high = torch.ones(1, dim).double()
    high[0, -1] = 0.0
    return torch.cat([high, low])


def sobol(dim: int, count: int = 3) -> Tensor:
    """The first Sobol points after zero."""
    return torch.quasirandom.SobolEngine(dim, scramble=False).draw(count + 1).double()[1:]


def paper_features(dim: int, num_features: int = 100) -> RandomFourierFeatures:
    """The basis of the paper's experiments: length scale 0.01, cosines with random phases."""
    kernel = StationaryKernel(math.inf, [0.01] * dim)
    stream = generator(SEED, "paper features")
    return RandomFourierFeatures.paper_cosine(kernel, num_features, generator=stream)


def rows(dim: int) -> dict[str, tuple[bool, Callable[[Data, int], Study]]]:
    """Every method: whether outcomes stay raw, and its study for some data."""

    def fts(**options: Any) -> Callable[[Data, int], Study]:
        return lambda data, n: FTS(rounds=QUERIES, active=(agent(n),), data=data, **options)

    random = Strategy(schedule=Constant(1.0), own="random", portfolio=0, prior_until=0)
    one = Constant(1.0)
    raw = Strategy(schedule=Constant(1.0), portfolio=0, prior_until=0, paper_gp=True)
    ei = Strategy(schedule=Constant(1.0), own="ei", portfolio=0, prior_until=0)
    paper = {"message": "sample", "feature_map": paper_features(dim), "noise_var": 1e-6}
    mixed = Strategy(schedule=Polynomial(0.5), portfolio=0, prior_until=0)
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
        "sobol-ts": (False, fts(strategy=ALONE, initial_design=sobol(dim))),
        "fts-paper": (True, fts(strategy=paper_strategy(), **paper)),
        "fts-mean": (False, fts(strategy=mixed)),
        "rgpe": (False, fts(strategy=Strategy(transfer="rgpe"), message="summary")),
        "taf": (False, fts(strategy=Strategy(transfer="taf"), message="summary_and_incumbent")),
        "ours": (False, fts()),
        "field": (False, fts()),
        "ours-portfolio-5": (False, fts(strategy=replace(ALONE, portfolio=5))),
        "ours-until-10": (False, fts(strategy=Strategy(prior_until=10, own="ei", schedule=one))),
        "ours-no-portfolio": (False, fts(strategy=Strategy(portfolio=0))),
        "ours-learned": (False, fts(strategy=Strategy(learned=True))),
        "ours-sample": (False, fts(message="sample")),
        "ours-shared-prior": (False, fts(message="shared_prior")),
        "ours-unwarped": (False, fts(feature_map=default_feature_map(plain(dim)))),
        "fts-learned": (False, fts(strategy=replace(mixed, learned=True))),
    }


NEEDS_OTHERS = ("fts", "ours", "rgpe", "taf", "field")


def plain(dim: int) -> SearchSpace:
    """A space without parameters that act by their ratio."""
    return SearchSpace(tuple(Parameter.real(f"x{j}", 0.0, 1.0) for j in range(dim)))


def field(data: Data, outcome: Outcome, repeat: int) -> Data:
    """The control: others know functions that have nothing to do with the task."""
    result: Data = {}
    for who, (X, _) in data.items():
        phi = default_feature_map(plain(X.shape[-1]))
        weights = generator(SEED, "field", repeat, who).normal(phi.num_features, 1)
        result[who] = (X, outcome.from_public(phi(X) @ weights))
    return result


def one_run(entry: str, row: str, target: int, repeat: int) -> Line:
    """One target's 50 queries."""
    problem = PROBLEMS[entry]()
    raw, study = rows(problem.dim)[row]
    data: Data = {}
    if row.startswith(NEEDS_OTHERS):
        data = dict(logs(entry, repeat % LOGS))
    if row == "field":
        data = field(data, problem.space.outcome, repeat)
    start = starts(problem, target, "target", repeat)
    data[agent(target)] = start
    shown = _Only(problem, Outcome()) if raw else problem
    result = run(study(data, target), shown, seed=SEED + 1000 + repeat)
    values = [float(start[1].max()), *(line["y"] for line in result.records)]
    mean_value = np.cumsum(values[1:]) / np.arange(1, len(values))
    return {
        "best": at_checkpoints(np.maximum.accumulate(values)),
        "mean": at_checkpoints([values[0], *mean_value]),
        "cpu_ms": round(1e3 * result.cpu_seconds_per_query(agent(target)), 2),
        "versions": versions(),
    }


# ------------------------------------------------------------------ summaries


def paired(results: Results, row: str, at: int) -> dict[tuple[int, int], float]:
    """Best value by (target, repeat)."""
    return {
        (line["target"], line["repeat"]): line["best"][str(at)] for line in results.select(row=row)
    }


def compare(results: Results, row: str, other: str, at: int) -> tuple[np.ndarray, float]:
    """Paired differences of two rows, and the p value of Wilcoxon's signed-rank test."""
    ours, theirs = paired(results, row, at), paired(results, other, at)
    gaps = np.array([ours[key] - theirs[key] for key in sorted(ours.keys() & theirs.keys())])
    if not gaps.any():
        return gaps, 1.0
    return gaps, float(wilcoxon(gaps).pvalue)


def summary(entry: str, *, as_json: bool, row: str = "ours") -> None:
    results = Results(f"fts/{entry}", ("row", "target", "repeat"))
    names = list(dict.fromkeys(line["row"] for line in results.lines))
    if as_json:
        mean = {t: np.mean(list(paired(results, row, t).values())) for t in (1, 5, 10, 50)}
        gap5, p5 = compare(results, row, "ts", 5)
        worst = min(
            (compare(results, row, "ts", t)[0].mean(), t) for t in (1, 2, 3, 5, 10, 20, 30, 40, 50)
        )
        corner, p_corner = compare(results, row, "corners-ts", 10)
        out = {
            **{f"auc_at_{t}": round(float(mean[t]), 4) for t in mean},
            "ts_auc_at_5": round(float(np.mean(list(paired(results, "ts", 5).values()))), 4),
            "gain_at_5": round(float(gap5.mean()), 4),
            "p_at_5": p5,
            "worst_gap_to_ts": round(float(worst[0]), 4),
            "gain_over_corners_at_10": round(float(corner.mean()), 4),
            "p_over_corners_at_10": p_corner,
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
            gaps, p = compare(results, name, "ts", t)
            if name == "ts" or not len(gaps):
                cells.append("")
                continue
            low, high = interval(gaps)
            cells.append(f"{gaps.mean():+.4f} [{low:+.4f}, {high:+.4f}] p={p:.1g}")
        cells.append(f"{np.mean([line['cpu_ms'] for line in lines]):.0f}")
        table.add_row(name, str(len(lines)), *cells)
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("entry", choices=[*PROBLEMS])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--targets", type=int, default=TARGETS)
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.summary:
        summary(options.entry, as_json=options.json)
        return
    results = Results(f"fts/{options.entry}", ("row", "target", "repeat"))
    chosen = options.rows or list(rows(PROBLEMS[options.entry]().dim))
    for row in chosen:
        runs = [
            {"row": row, "target": target, "repeat": repeat}
            for repeat in range(options.repeats)
            for target in range(options.targets)
        ]
        results.fill(runs, lambda **key: one_run(options.entry, **key), row)


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's lines."""


if __name__ == "__main__":
    main()
