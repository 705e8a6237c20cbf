"""What low fidelities gain at equal cost, in a federation and alone.

    python -m benchmarks.fidelity [--seeds 0 10] [--only ARM,…] [--tasks TASK,…]   what is missing
    python -m benchmarks.fidelity --summary [--json]                      from stored results
    python -m benchmarks.fidelity --smoke                                 seconds

Learning curves of real models at four sites (`benchmarks.fidelity_tasks`), as tables. A seed draws
300 of the 400 configurations. A budget of 8 is the cost of eight evaluations at the target; an
evaluation at a lower fidelity costs its share, and its whole curve is told.

    federated, fidelities   FTS() in a space with a fidelity
    federated               FTS() at the target
    alone, fidelities       the first without messages
    alone                   the second without messages
    BoTorch, fidelities     SingleTaskMultiFidelityGP, refitted for every eighth evaluation, and
                            qMultiFidelityLowerBoundMaxValueEntropy per cost over all candidates
    BoTorch                 SingleTaskGP and LogExpectedImprovement at the target

Regret is that of the best configuration that was evaluated *at the target*, over that of the
median. `BoTorch, fidelities` seldom evaluates there by itself: at any cost its configuration of the
best posterior mean, one evaluation at the target before, counts as evaluated. The BoTorch arms run
on one of the sites, for their time, and that one to half of the budget; comparisons are on that
site. A difference is a mean over sites,
and p that of a paired t-test over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.acquisition.max_value_entropy_search import qMultiFidelityLowerBoundMaxValueEntropy
from botorch.acquisition.utils import project_to_target_fidelity
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.gp_regression_fidelity import SingleTaskMultiFidelityGP
from botorch.models.transforms.outcome import Standardize
from gpytorch.mlls import ExactMarginalLogLikelihood
from rich.console import Console
from rich.table import Table
from scipy.stats import ttest_1samp
from torch import Tensor

from benchmarks.fidelity_tasks import RECIPES, Array, load
from botorch_fed.federation.base import Curve, Objective
from botorch_fed.federation.points import first_points
from botorch_fed.rng import generator
from botorch_fed.run import run
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Fidelity, Parameter, SearchSpace
from botorch_fed.studies import FTS

RESULTS = Path(__file__).parent / "results" / "fidelity.json"
NUM_DRAWN = 300
BUDGET = 8
COSTS = (1, 2, 3, 4, 6, 8)
NUM_SITES = 4  # of the six in a table
PEER_SITES = 1  # of them
PEER_BUDGET = 4  # of the peer with fidelities
REFIT = 8  # its evaluations between two fits
NUM_INITIAL = 3


# ------------------------------------------------------------------ tasks


@dataclass(frozen=True, eq=False)
class Task:
    """A table, and the configurations of one seed.

    Attributes:
        space: With the fidelity as the last parameter.
        levels: The fidelities at which curves are known.
        X: Configurations, `K x d`.
        values: By site, configuration and fidelity, in the outcome's unit.
    """

    space: SearchSpace
    levels: tuple[int, ...]
    X: Tensor
    values: Array

    @property
    def names(self) -> list[str]:
        """The sites."""
        return [f"site{n}" for n in range(len(self.values))]

    @property
    def columns(self) -> list[float]:
        """The fidelities as columns of the unit cube."""
        return [self.space.fidelity_column(level) for level in self.levels]

    @property
    def candidates(self) -> Tensor:
        """All points that are known, `K · S x (d + 1)`."""
        return torch.cat([self.space.at_fidelity(self.X, column) for column in self.columns])

    def row(self, x: Tensor) -> int:
        """The number of a configuration."""
        return int((self.X - x).abs().sum(dim=-1).argmin())

    def regret(self, site: int, value: float) -> float:
        """Of an outcome at the target."""
        target = self.values[site, :, -1]
        return float((value - target.min()) / (np.median(target) - target.min()))


@lru_cache
def make(name: str, seed: int) -> Task:
    """The task of a seed."""
    recipe = RECIPES[name]
    points, values = load(name)
    rows = generator(seed, "fidelity", name).uniform(len(points)).argsort()[:NUM_DRAWN]
    fidelity = Parameter.choice(recipe.fidelity, recipe.levels, scale="log")
    space = SearchSpace(
        (*recipe.configurations.parameters, fidelity),
        recipe.configurations.outcome,
        fidelity=Fidelity(recipe.fidelity),
    )
    return Task(space, recipe.levels, points[rows], values[:NUM_SITES, rows.numpy()])


def curves(task: Task, site: int) -> Objective:
    """A site's objective over configurations and fidelities."""

    def objective(X: Tensor) -> Curve:
        row = task.row(task.space.configurations(X)[0])
        last = task.columns.index(float(task.space.fidelities(X)))
        return Curve({task.levels[k]: task.values[site, row, k] for k in range(last + 1)})

    return objective


def targets(task: Task, site: int) -> Objective:
    """A site's objective at the target."""

    def objective(X: Tensor) -> Tensor:
        return torch.tensor([[task.values[site, task.row(x), -1]] for x in X])

    return objective


# ------------------------------------------------------------------ arms

Steps = list[tuple[float, float]]  # cost so far, regret so far


def ours(*, fidelities: bool, listen: bool = True) -> Callable[[Task, int, int], list[Steps]]:
    """An arm of this package, for all sites together."""

    def arm(task: Task, seed: int, budget: int) -> list[Steps]:
        space = task.space if fidelities else task.space.shared
        study = FTS(
            budget=budget,
            strategy=TransferSearch(listen=listen),
            candidates=task.candidates if fidelities else task.X,
        )
        objectives = {
            name: curves(task, site) if fidelities else targets(task, site)
            for site, name in enumerate(task.names)
        }
        result = run(study, objectives, seed=seed, space=space, progress=False)
        paths = []
        for site, name in enumerate(task.names):
            X, Y = result.history(name)
            at_target = [cost == 1.0 for cost in space.costs(X)]
            spent = np.cumsum(space.costs(X)).tolist()
            paths.append(_path(task, site, spent, at_target, Y.flatten().tolist()))
        return paths

    return arm


def _path(
    task: Task, site: int, spent: list[float], at_target: list[bool], values: list[float]
) -> Steps:
    best, path = math.inf, []
    for cost, counts, value in zip(spent, at_target, values, strict=True):
        best = min(best, value) if counts else best
        path.append((cost, task.regret(site, best) if best < math.inf else 1.0))
    return path


def _fitted(model: SingleTaskGP) -> SingleTaskGP:
    """A model after `fit_gpytorch_mll`."""
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def botorch_at_target(task: Task, seed: int, budget: int) -> list[Steps]:
    """BoTorch alone at the target."""
    paths = []
    space = task.space.shared
    for site in range(PEER_SITES):
        torch.manual_seed(seed)
        design = first_points(
            space, site, len(task.values), NUM_INITIAL, default=None, candidates=task.X
        )
        rows = [task.row(x) for x in design]
        while len(rows) < budget:
            Y = -torch.tensor(task.values[site, rows, -1:])
            model = _fitted(SingleTaskGP(task.X[rows], Y, outcome_transform=Standardize(1)))
            scores = LogExpectedImprovement(model, best_f=Y.max())(task.X.unsqueeze(-2)).detach()
            scores[rows] = -math.inf
            rows.append(int(scores.argmax()))
        values = task.values[site, rows, -1].tolist()
        spent = [float(n + 1) for n in range(budget)]
        paths.append(_path(task, site, spent, [True] * budget, values))
    return paths


def botorch_over_fidelities(task: Task, seed: int, budget: int) -> list[Steps]:
    """BoTorch alone with fidelities: the best posterior mean at the target is given to it."""
    space, paths = task.space, []
    place = space.dim - 1
    listed = np.array(task.columns)
    ladder = [float(listed[np.abs(listed - level).argmin()]) for level in space.levels]
    points = torch.cat([space.at_fidelity(task.X, column) for column in ladder])
    costs = torch.tensor([space.cost_at(c) for c in ladder]).double()
    costs = costs.repeat_interleave(len(task.X))
    at_target = space.at_fidelity(task.X)
    for site in range(PEER_SITES):
        torch.manual_seed(seed)
        design = first_points(
            space, site, len(task.values), NUM_INITIAL, default=None, candidates=task.candidates
        )
        X = design[:0]
        values: list[float] = []
        spent, best = 0.0, math.inf
        path: Steps = []
        recommended: Steps = []
        state: dict[str, Tensor] = {}
        while True:
            if len(X) < len(design):
                x = design[len(X)]
            else:
                Y = -torch.tensor(values).double().unsqueeze(-1)
                model = SingleTaskMultiFidelityGP(
                    X, Y, data_fidelities=[place], outcome_transform=Standardize(1)
                )
                if len(X) % REFIT and state:
                    model.load_state_dict(
                        {k: v for k, v in state.items() if not k.startswith("outcome")},
                        strict=False,
                    )
                    model.eval()
                else:
                    state = _fitted(model).state_dict()
                with torch.no_grad():
                    found = model.posterior(at_target.unsqueeze(-2)).mean.flatten()
                    guess = task.values[site, int(found.argmax()), -1]
                    told = task.regret(site, min(best, guess))
                    recommended.append((spent + 1, told))
                    entropy = qMultiFidelityLowerBoundMaxValueEntropy(
                        model,
                        candidate_set=at_target,
                        num_mv_samples=10,
                        project=partial(
                            project_to_target_fidelity, target_fidelities={place: 1.0}, d=space.dim
                        ),
                    )
                    gain = torch.cat([entropy(p.unsqueeze(-2)) for p in points.split(2000)])
                scores = gain / costs
                scores[costs > budget - spent + 1e-9] = -math.inf
                known = (points.unsqueeze(1) == X).all(dim=-1).any(dim=-1)
                scores[known] = -math.inf
                if not bool(scores.isfinite().any()):
                    break
                x = points[int(scores.argmax())]
            row, column = task.row(x[:place]), float(x[place])
            spent += space.cost_at(column)
            level = task.columns.index(column)
            values.append(float(task.values[site, row, level]))
            X = torch.cat([X, x.unsqueeze(0)])
            if column == 1.0:
                best = min(best, values[-1])
            path.append((spent, task.regret(site, best) if best < math.inf else 1.0))
        begins = recommended[0][0] if recommended else math.inf
        paths.append([step for step in path if step[0] < begins] + recommended)
    return paths


ARMS: dict[str, Callable[[Task, int, int], list[Steps]]] = {
    "federated, fidelities": ours(fidelities=True),
    "federated": ours(fidelities=False),
    "alone, fidelities": ours(fidelities=True, listen=False),
    "alone": ours(fidelities=False, listen=False),
    "BoTorch, fidelities": botorch_over_fidelities,
    "BoTorch": botorch_at_target,
}


def measure(name: str, arm: str, seed: int, budget: int = BUDGET) -> list[list[float | None]]:
    """Regrets of each site at `COSTS`, and after them the CPU milliseconds of an evaluation."""
    began = time.process_time()
    if arm == "BoTorch, fidelities":
        budget = min(budget, PEER_BUDGET)
    paths = ARMS[arm](make(name, seed), seed, budget)
    per_step = 1e3 * (time.process_time() - began) / sum(map(len, paths))
    return [[*_at(path, budget), round(per_step, 1)] for path in paths]


def _at(path: Steps, budget: int) -> Iterator[float | None]:
    """Regrets at `COSTS`; None beyond the budget."""
    for cost in COSTS:
        known = [regret for spent, regret in path if spent <= cost + 1e-6]
        yield None if cost > budget else round(known[-1], 4) if known else 1.0


# ------------------------------------------------------------------ the table

Rows = dict[str, dict[str, dict[str, list[list[float | None]]]]]  # by task, arm, seed and site
PAIRS = (
    ("federated, fidelities", "federated"),
    ("federated, fidelities", "alone, fidelities"),
    ("federated, fidelities", "alone"),
    ("federated, fidelities", "BoTorch, fidelities"),
    ("federated, fidelities", "BoTorch"),
    ("alone, fidelities", "alone"),
    ("alone, fidelities", "BoTorch, fidelities"),
)


def means(found: Mapping[str, list[list[float | None]]]) -> tuple[dict[int, float], float]:
    """Mean regrets of an arm by cost, NaN beyond its budget, and the median of CPU milliseconds."""
    values = np.array(list(found.values()), dtype=np.float64)
    regrets = {cost: float(values[:, :, k].mean()) for k, cost in enumerate(COSTS)}
    return regrets, round(float(np.median(values[:, :, -1])), 1)


@dataclass(frozen=True)
class Difference:
    """One arm minus another, on the sites that both have.

    Attributes:
        seeds: Of both.
        at: Mean and p by cost; NaN beyond a budget.
    """

    seeds: int
    at: dict[int, tuple[float, float]]


def difference(arms: Mapping[str, Any], one: str, other: str) -> Difference | None:
    """Of two arms of a task; None without two seeds of both."""
    seeds = sorted(set(arms.get(one, {})) & set(arms.get(other, {})), key=int)
    if len(seeds) < 2:
        return None
    sites = min(len(arms[arm][seeds[0]]) for arm in (one, other))
    pair = [
        np.array([arms[arm][s][:sites] for s in seeds], dtype=np.float64) for arm in (one, other)
    ]
    away = (pair[0] - pair[1]).mean(axis=1)
    at = {}
    for k, cost in enumerate(COSTS):
        differs = bool((away[:, k] != 0).any())
        p = float(ttest_1samp(away[:, k], 0.0).pvalue) if differs else 1.0
        at[cost] = float(away[:, k].mean()), p
    return Difference(len(seeds), at)


def summary(rows: Rows) -> list[dict[str, object]]:
    """Mean regrets, one line for each task and arm; then differences of pairs with p."""
    lines: list[dict[str, object]] = []
    for name, arms in rows.items():
        for arm in [arm for arm in ARMS if arm in arms]:
            regrets, cpu = means(arms[arm])
            cells = {f"@{cost}": _shown(regret, ".3f") for cost, regret in regrets.items()}
            line = {"task": name, "arm": arm, "seeds": len(arms[arm])}
            lines.append({**line, **cells, "CPU ms": cpu})
        for one, other in PAIRS:
            if gap := difference(arms, one, other):
                cells = {
                    f"@{cost}": f"{mean:+.3f} p {p:.2g}" if math.isfinite(mean) else ""
                    for cost, (mean, p) in gap.at.items()
                }
                line = {"task": name, "arm": f"{one} - {other}", "seeds": gap.seeds}
                lines.append({**line, **cells, "CPU ms": ""})
    return lines


def _shown(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else ""


def show(lines: list[dict[str, object]]) -> None:
    """A table of all lines."""
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*map(str, line.values()))
    Console(width=200).print(table)


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10))
    parser.add_argument("--only", help="arms, joined by a semicolon; default all")
    parser.add_argument("--tasks", default=",".join(RECIPES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if options.smoke:
            name = next(iter(RECIPES))
            found = {
                arm: {"0": measure(name, arm, 0, 1 if arm == "BoTorch, fidelities" else 3)}
                for arm in ARMS
            }
            show(summary({name: found}))
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
        for name in options.tasks.split(","):
            for arm in options.only.split(";") if options.only else ARMS:
                done = rows.setdefault(name, {}).setdefault(arm, {})
                if str(seed) not in done:
                    done[str(seed)] = measure(name, arm, seed)
        options.results.write_text(json.dumps(rows).replace("]]", "]]\n") + "\n")


if __name__ == "__main__":
    main()
