r"""Three Ax clients that search together against three that search alone.

    python -m benchmarks.ax_sites [--seeds N] [--task TASK] [--rows ROW …]  run what is missing
    python -m benchmarks.ax_sites --summary [--json]                        from stored results

Every site tunes `C` and `gamma` of a support vector machine on its own share of a data set
(`SklearnTuning(3, dataset=task, seed=seed)`, so a seed deals the rows anew; ``digits`` is the task
of `botorch-fed demo`), by an `ax.api.client.Client` of its own and with twelve trials:

    ax       three separate clients with Ax's default strategy, whose Sobol points count
    fts      `FTS(every=3)`: one vector of 100 numbers from each site every third round
    fed_gp   `FedGP()`: FBO-FedGP under a joint key (`ThresholdCKKSChannel`), its 4 initial points
             count

The measure is the mean over sites of the best score after 2, 4, 6 and 12 trials. Rows are paired by
seed; p values are of Wilcoxon's signed rank test against ``ax``, two-sided, and Holm's for all
comparisons of a task together. No setting was chosen by looking at results of this benchmark.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from importlib.metadata import version
from typing import Any

import numpy as np
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig
from ax.utils.common.logger import set_ax_logger_levels
from rich.console import Console
from rich.table import Table
from scipy.stats import wilcoxon

from benchmarks.papers.ledger import Line, Results, holm, interval, versions
from botorch_fed.ax_adapter import AxFederation, RoundOpen
from botorch_fed.protocols.fed_gp import FedGP
from botorch_fed.protocols.fts import FTS
from botorch_fed.test_functions import SklearnTuning

ROWS = ("ax", "fts", "fed_gp")
SITES = 3
TASKS = ("digits", "breast_cancer")
KEYS = ("task", "row", "seed")
TRIALS = 12
TIMES = (2, 4, 6, 12)


def client_of(problem: SklearnTuning, seed: int) -> Client:
    """A client whose experiment has the problem's parameters."""
    client = Client(random_seed=seed)
    client.configure_experiment(
        parameters=[
            RangeParameterConfig(
                name=p.name, bounds=(p.lower, p.upper), parameter_type="float", scaling=p.scale
            )
            for p in problem.space.parameters
        ]
    )
    client.configure_optimization(objective="score")
    return client


def score_of(problem: SklearnTuning, site: int, point: dict[str, Any]) -> float:
    """A site's score."""
    return float(problem.evaluate(site, problem.space.to_unit([point])))


def federation_of(row: str, problem: SklearnTuning, clients: list[Client], **options: Any) -> Any:
    """The federation of a row, with as many trials at each site; None for separate clients."""
    if row == "ax":
        return None
    initial = 4
    protocol = (
        FTS(rounds=TRIALS, every=3)
        if row == "fts"
        else FedGP(rounds=TRIALS - initial, num_initial=initial)
    )
    named = {f"site{n}": client for n, client in enumerate(clients)}
    return AxFederation(protocol, named, space=problem.space, seed=options["seed"])


def work(task: str, row: str, seed: int) -> Line:
    """One run: the mean over sites of the best score after some trials."""
    problem = SklearnTuning(SITES, dataset=task, seed=seed)
    clients = [client_of(problem, SITES * seed + n) for n in range(SITES)]
    federation = federation_of(row, problem, clients, seed=seed)
    scores: list[list[float]] = [[] for _ in clients]
    start = time.process_time()
    objective = 0.0
    while any(len(values) < TRIALS for values in scores):
        for n, client in enumerate(clients):
            if len(scores[n]) == TRIALS:
                continue
            try:
                proposed = client.get_next_trials(max_trials=1)
            except RoundOpen:
                continue
            for index, point in proposed.items():
                before = time.process_time()
                scores[n].append(score_of(problem, n, dict(point)))
                objective += time.process_time() - before
                client.complete_trial(index, raw_data={"score": scores[n][-1]})
    assert federation is None or federation.step() >= 0
    best = np.maximum.accumulate(np.array(scores), axis=1).mean(axis=0)
    return {
        **{f"best_{t}": round(float(best[t - 1]), 6) for t in TIMES},
        "cpu_seconds": round(time.process_time() - start - objective, 2),
        "versions": f"{versions()} ax-platform-{version('ax-platform')}",
    }


def table(results: Results, task: str) -> list[dict[str, Any]]:
    """One line per row: means, intervals, and tests against ``ax``."""
    found: list[dict[str, Any]] = []
    tests: list[dict[str, Any]] = []
    of = {row: {line["seed"]: line for line in results.select(task=task, row=row)} for row in ROWS}
    for row, lines in of.items():
        if not lines:
            continue
        cpu = float(np.mean([line["cpu_seconds"] for line in lines.values()]))
        line = {"task": task, "row": row, "seeds": len(lines), "cpu_seconds": round(cpu, 2)}
        for t in TIMES:
            values = np.array([one[f"best_{t}"] for one in lines.values()])
            cell: dict[str, Any] = {"mean": float(values.mean()), "interval": interval(values)}
            common = sorted(lines.keys() & of["ax"].keys())
            if row != "ax" and len(common) > 1:
                gaps = [lines[s][f"best_{t}"] - of["ax"][s][f"best_{t}"] for s in common]
                cell["gain"] = float(np.mean(gaps))
                cell["p"] = float(wilcoxon(gaps).pvalue) if any(gaps) else 1.0
                tests.append(cell)
            line[f"best_{t}"] = cell
        found.append(line)
    for cell, p in zip(tests, holm(cell["p"] for cell in tests), strict=True):
        cell["p_holm"] = p
    return found


def show(lines: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    title = (
        "Mean over 3 sites of the best validation score after some trials (gain over ax, Holm's p)"
    )
    made = Table("task", "row", "seeds", *map(str, TIMES), "CPU s", title=title)
    for line in lines:
        cells = []
        for t in TIMES:
            cell = line[f"best_{t}"]
            tested = f" ({cell['gain']:+.4f}, {cell['p_holm']:.2g})" if "gain" in cell else ""
            cells.append(f"{cell['mean']:.4f}{tested}")
        made.add_row(
            line["task"], line["row"], str(line["seeds"]), *cells, f"{line['cpu_seconds']:.1f}"
        )
    Console(width=150).print(made)


def main() -> None:
    """Run what is missing, or show what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = Results("ax_sites/sklearn", KEYS)
    if not options.summary:
        set_ax_logger_levels(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"ax\..*")
        runs = [
            {"task": options.task, "row": row, "seed": seed}
            for seed in range(options.seeds)
            for row in options.rows
        ]
        results.fill(runs, work, "ax_sites")
    lines = table(results, options.task)
    if options.json:
        print(json.dumps(lines))
    else:
        show(lines)


if __name__ == "__main__":
    main()
