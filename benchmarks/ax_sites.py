r"""Three Ax clients that search together against three that search alone.

    python -m benchmarks.ax_sites [--seeds N] [--trials T] [--rows ROW …]   run what is missing
    python -m benchmarks.ax_sites --summary [--json]                        from stored results

Every site tunes `C` and `gamma` of a support vector machine on its own share of a data set
(`SklearnTuning(3, seed=seed)`, so a seed deals the rows anew), by an `ax.api.client.Client` of its
own and with the same number of trials:

    ax       three separate clients with Ax's default strategy, whose Sobol points count
    fts      `FTS(every=3)`: one vector of 100 numbers from each site every third round
    fed_gp   `FedGP()`: FBO-FedGP under a joint key (`ThresholdCKKSChannel`), its 4 initial points
             count

The measure is the mean over sites of the best score after `T` trials. Rows are paired by seed; p
values are of Wilcoxon's signed rank test, two-sided, and Holm's for both comparisons together. No
setting was chosen by looking at results of this benchmark.
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
KEYS = ("row", "seed", "trials")


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
    trials: int = options["trials"]
    initial = min(4, trials)
    protocol = (
        FTS(rounds=trials, every=3)
        if row == "fts"
        else FedGP(rounds=trials - initial, num_initial=initial)
    )
    named = {f"site{n}": client for n, client in enumerate(clients)}
    return AxFederation(protocol, named, space=problem.space, seed=options["seed"])


def work(row: str, seed: int, trials: int) -> Line:
    """One run: the mean over sites of the best score after every trial."""
    problem = SklearnTuning(SITES, seed=seed)
    clients = [client_of(problem, SITES * seed + n) for n in range(SITES)]
    federation = federation_of(row, problem, clients, seed=seed, trials=trials)
    scores: list[list[float]] = [[] for _ in clients]
    start = time.process_time()
    objective = 0.0
    while any(len(values) < trials for values in scores):
        for n, client in enumerate(clients):
            if len(scores[n]) == trials:
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
        "best_half": round(float(best[(trials - 1) // 2]), 6),
        "best": round(float(best[-1]), 6),
        "cpu_seconds": round(time.process_time() - start - objective, 2),
        "versions": f"{versions()} ax-platform-{version('ax-platform')}",
    }


def table(results: Results) -> list[dict[str, Any]]:
    """One line per row and number of trials: means, intervals, and tests against ``ax``."""
    found = []
    for trials in sorted({line["trials"] for line in results.lines}):
        part = results.only(trials=trials)
        best = {r: {line["seed"]: line["best"] for line in part.select(row=r)} for r in ROWS}
        tested = [r for r in ROWS[1:] if len(best[r].keys() & best["ax"].keys()) > 1]
        p_values = dict(zip(tested, holm(_p(best[r], best["ax"]) for r in tested), strict=True))
        for row in ROWS:
            if not best[row]:
                continue
            values = np.array(list(best[row].values()))
            cpu = [line["cpu_seconds"] for line in part.select(row=row)]
            found.append(
                {
                    "row": row,
                    "trials": trials,
                    "seeds": len(values),
                    "best": float(values.mean()),
                    "interval": interval(values),
                    "p_holm": p_values.get(row),
                    "cpu_seconds": float(np.mean(cpu)),
                }
            )
    return found


def _p(mine: dict[int, float], theirs: dict[int, float]) -> float:
    gaps = [mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())]
    return float(wilcoxon(gaps).pvalue) if any(gaps) else 1.0


def show(lines: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    columns = ("row", "trials", "seeds", "best", "95 %", "p (Holm)", "CPU s")
    made = Table(*columns, title="Mean over 3 sites of the best validation AUC")
    for line in lines:
        low, high = line["interval"]
        p = "" if line["p_holm"] is None else f"{line['p_holm']:.3g}"
        made.add_row(
            line["row"],
            str(line["trials"]),
            str(line["seeds"]),
            f"{line['best']:.4f}",
            f"{low:.4f} .. {high:.4f}",
            p,
            f"{line['cpu_seconds']:.1f}",
        )
    Console().print(made)


def main() -> None:
    """Run what is missing, or show what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=20, help="of every site")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = Results("ax_sites/sklearn", KEYS)
    if not options.summary:
        set_ax_logger_levels(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"ax\..*")
        runs = [
            {"row": row, "seed": seed, "trials": options.trials}
            for seed in range(options.seeds)
            for row in options.rows
        ]
        results.fill(runs, work, "ax_sites")
    lines = table(results)
    if options.json:
        print(json.dumps(lines))
    else:
        show(lines)


if __name__ == "__main__":
    main()
