"""What learning from failed evaluations gains where a third of the space fails.

    python -m benchmarks.feasibility [--seeds 0 20] [--only model,botorch]   runs what is missing
    python -m benchmarks.feasibility --summary [--json]                      from stored results
    python -m benchmarks.feasibility --smoke                                 seconds

One site alone, 30 evaluations with the five of its design, on six smooth functions that fail in a
half space, a ball, a corner, or at values of a choice or an integer:

    model            `TransferSearch` with the failed points: the probability of success is modelled
    not asked again  the same without that model: only the failed points themselves are left out
    worst value      the same, each failure taken for an outcome, the worst that was seen
    botorch          `LogConstrainedExpectedImprovement` of two `SingleTaskGP`, one of labels +-1

Regret is that of the best success, over that of an average point that succeeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.analytic import (
    LogConstrainedExpectedImprovement,
    LogExpectedImprovement,
)
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.optim import optimize_acqf, optimize_acqf_mixed
from botorch.test_functions.synthetic import Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from rich.console import Console
from rich.table import Table
from torch import Tensor

from botorch_fed.federation.points import dealt_design
from botorch_fed.models.feasibility import Feasibility
from botorch_fed.models.support import sobol_support
from botorch_fed.rng import generator
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Parameter, SearchSpace

RESULTS = Path(__file__).parent / "results" / "feasibility.json"
NUM_INITIAL = 5
BUDGETS = (10, 20, 30)
Step = Callable[[SearchSpace, Tensor, Tensor, Tensor, int], Tensor]


# ------------------------------------------------------------------ tasks


@dataclass(frozen=True)
class Task:
    """A function to be maximised, and where it succeeds.

    Attributes:
        space: The map of inputs.
        value: From `n x d` points of the unit cube to `n` values.
        succeeds: From the same to `n` booleans.
        fixed: For each value of the integer or the choice its columns: the peer enumerates them.
    """

    space: SearchSpace
    value: Callable[[Tensor], Tensor]
    succeeds: Callable[[Tensor], Tensor]
    fixed: tuple[dict[int, float], ...] = ()


def reals(count: int) -> tuple[Parameter, ...]:
    """Real parameters between 0 and 1."""
    return tuple(Parameter.real(f"x{j}", 0.0, 1.0) for j in range(count))


def bowl(X: Tensor, top: float) -> Tensor:
    """A smooth function that is largest near a point of the diagonal."""
    return -4 * (X - top).square().sum(dim=-1) + 0.4 * torch.sin(7 * X).sum(dim=-1)


def branin(X: Tensor) -> Tensor:
    """Minus Branin's function on the unit square."""
    return -Branin().double().evaluate_true(torch.stack([15 * X[:, 0] - 5, 15 * X[:, 1]], dim=-1))


def hartmann(X: Tensor) -> Tensor:
    """Minus Hartmann's function of six inputs."""
    return -Hartmann(dim=6).double().evaluate_true(X)


BY_KIND = torch.tensor([0.0, 1.5, 0.5], dtype=torch.float64)

TASKS = {
    "half space 2-D, optimum at its border": Task(
        SearchSpace(reals(2)),
        lambda X: bowl(X, 0.75),
        lambda X: X @ torch.tensor([1.0, 0.5]).double() <= 0.915,
    ),
    "ball 2-D, in the middle": Task(
        SearchSpace(reals(2)), branin, lambda X: (X - 0.5).square().sum(dim=-1) >= 0.106
    ),
    "corner 4-D, optimum at its border": Task(
        SearchSpace(reals(4)),
        lambda X: bowl(X, 0.6),
        lambda X: (X[:, :2] <= 0.42).any(dim=-1),
    ),
    "half space 6-D, optimum inside": Task(
        SearchSpace(reals(6)),
        hartmann,
        lambda X: X @ torch.tensor([1.0, 1.0, 0.5, 0.5, 1.0, -1.0]).double() <= 1.76,
    ),
    "choice and 2 reals, the best value fails": Task(
        SearchSpace((*reals(2), Parameter.choice("kind", ["a", "b", "c"]))),
        lambda X: bowl(X[:, :2], 0.4) + X[:, 2:] @ BY_KIND,
        lambda X: X[:, 3] < 0.5,
        tuple({2 + j: float(j == k) for j in range(3)} for k in range(3)),
    ),
    "integer and 2 reals, the largest fail": Task(
        SearchSpace((*reals(2), Parameter.integer("n", 1, 6))),
        lambda X: bowl(X[:, :2], 0.6) + 2 * X[:, 2],
        lambda X: X[:, 2] < 0.7,
        tuple({2: k / 5} for k in range(6)),
    ),
}


@cache
def scale(name: str) -> tuple[float, float]:
    """The largest value that succeeds, and the average one."""
    task, stream = TASKS[name], generator(0, "scale")
    points = task.space.snap(sobol_support(task.space.dim, 4096, seed=1))
    points = points[task.succeeds(points)]
    average = float(task.value(points).mean())
    best = points[task.value(points).topk(16).indices]
    for k in range(60):
        steps = 0.3 * 0.8**k * stream.normal(32, *best.shape)
        near = task.space.snap((best + steps).clamp(0, 1).reshape(-1, task.space.dim))
        best = torch.cat([best, near[task.succeeds(near)]])
        best = best[task.value(best).topk(16).indices]
    return float(task.value(best).max()), average


# ------------------------------------------------------------------ arms


class NotAskedAgain(TransferSearch):
    """The default search without a model of what succeeds."""

    def _feasibility(self, space: SearchSpace, X: Tensor, failed: Tensor) -> Feasibility | None:
        return None


def ours(search: TransferSearch, *, worst: bool = False) -> Step:
    """A step of a site alone."""

    def step(space: SearchSpace, X: Tensor, Y: Tensor, failed: Tensor, seed: int) -> Tensor:
        stream = generator(seed, "feasibility", len(X) + len(failed))
        if worst and len(X):
            Y = torch.cat([Y, Y.min().expand(len(failed), 1)])
            X = torch.cat([X, failed])
        none = X[:0]
        return search.point(
            space, X, Y, None, chosen=none, candidates=None, stream=stream, failed=failed
        )

    return step


def peer(fixed: tuple[dict[int, float], ...]) -> Step:
    """BoTorch's step: one model of outcomes, and from the first failure on one of labels."""

    def fitted(X: Tensor, Y: Tensor) -> SingleTaskGP:
        model = SingleTaskGP(X, Y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model

    def step(space: SearchSpace, X: Tensor, Y: Tensor, failed: Tensor, seed: int) -> Tensor:
        if not len(X):
            return space.snap(sobol_support(space.dim, 64, seed=seed)[len(failed)].unsqueeze(0))
        outcomes, best = fitted(X, Y), float(Y.max())
        acquisition: AcquisitionFunction = LogExpectedImprovement(outcomes, best_f=best)
        if len(failed):
            labels = torch.cat([torch.ones(len(X), 1), -torch.ones(len(failed), 1)]).double()
            models = ModelListGP(outcomes, fitted(torch.cat([X, failed]), labels))
            acquisition = LogConstrainedExpectedImprovement(
                models, best_f=best, objective_index=0, constraints={1: (0.0, None)}
            )
        bounds = torch.stack([torch.zeros(space.dim), torch.ones(space.dim)]).double()
        if not fixed:
            return optimize_acqf(acquisition, bounds, q=1, num_restarts=10, raw_samples=512)[0]
        restarts, raw = max(2, 10 // len(fixed)), 512 // len(fixed)
        point, _ = optimize_acqf_mixed(
            acquisition,
            bounds,
            q=1,
            num_restarts=restarts,
            raw_samples=raw,
            fixed_features_list=[dict(columns) for columns in fixed],
        )
        return space.snap(point)

    return step


ARMS: dict[str, Callable[[Task], Step]] = {
    "model": lambda task: ours(TransferSearch()),
    "not asked again": lambda task: ours(NotAskedAgain()),
    "worst value": lambda task: ours(NotAskedAgain(), worst=True),
    "botorch": lambda task: peer(task.fixed),
}


def run(name: str, arm: str, seed: int, budgets: tuple[int, ...] = BUDGETS) -> list[float]:
    """Regrets at the budgets, the number of failures, and CPU milliseconds of a step."""
    task, step = TASKS[name], ARMS[arm](TASKS[name])
    best, average = scale(name)
    torch.manual_seed(seed)
    design = dealt_design(task.space, 0, 1, NUM_INITIAL, seed=seed)
    X, Y, failed = design[:0], torch.zeros(0, 1).double(), design[:0]
    regrets, spent = [], 0.0
    for t in range(budgets[-1]):
        if t < len(design):
            point = design[t : t + 1]
        else:
            begin = time.process_time()
            point = step(task.space, X, Y, failed, seed).detach()
            spent += time.process_time() - begin
        if bool(task.succeeds(point)):
            X, Y = torch.cat([X, point]), torch.cat([Y, task.value(point).unsqueeze(-1)])
        else:
            failed = torch.cat([failed, point])
        if t + 1 in budgets:
            found = float(Y.max()) if len(Y) else average
            regrets.append(round((best - found) / (best - average), 6))
    milliseconds = 1e3 * spent / max(1, budgets[-1] - NUM_INITIAL)
    return [*regrets, len(failed), round(milliseconds, 1)]


# ------------------------------------------------------------------ the table

Rows = dict[str, dict[str, dict[str, list[float]]]]  # by task, arm and seed


def summary(rows: Rows, budgets: tuple[int, ...] = BUDGETS) -> list[dict[str, object]]:
    """Means over seeds, one line for each task and arm."""
    lines: list[dict[str, object]] = []
    for name, arms in rows.items():
        for arm in [arm for arm in ARMS if arm in arms]:
            columns = list(zip(*arms[arm].values(), strict=True))
            line: dict[str, object] = {"task": name, "arm": arm, "seeds": len(columns[0])}
            for budget, regrets in zip(budgets, columns, strict=False):
                line[f"regret {budget}"] = round(statistics.fmean(regrets), 4)
                error = statistics.stdev(regrets) / len(regrets) ** 0.5 if len(regrets) > 1 else 0
                line[f"+- {budget}"] = round(error, 4)
            line["failed"] = round(statistics.fmean(columns[-2]), 1)
            line["CPU ms"] = round(statistics.median(columns[-1]), 1)
            lines.append(line)
    return lines


def show(lines: list[dict[str, object]]) -> None:
    """A table of all lines."""
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*map(str, line.values()))
    Console(width=160).print(table)


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 20))
    parser.add_argument("--only", default=",".join(ARMS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if options.smoke:
            names, budgets = list(TASKS)[1::3], (6, 7)
            rows: Rows = {
                name: {arm: {"0": run(name, arm, 0, budgets)} for arm in ARMS} for name in names
            }
            show(summary(rows, budgets))
            return
        rows = json.loads(options.results.read_text()) if options.results.exists() else {}
        if not options.summary:
            _run_missing(rows, options)
    finally:
        torch.set_num_threads(threads)
    lines = summary(rows)
    if options.json:
        print(json.dumps(lines))
    else:
        show(lines)


def _run_missing(rows: Rows, options: argparse.Namespace) -> None:
    for seed in range(*options.seeds):
        for name in TASKS:
            for arm in options.only.split(","):
                done = rows.setdefault(name, {}).setdefault(arm, {})
                if str(seed) not in done:
                    done[str(seed)] = run(name, arm, seed)
        options.results.write_text(json.dumps(rows).replace("]}, ", "]},\n") + "\n")


if __name__ == "__main__":
    main()
