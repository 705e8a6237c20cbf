r"""Several outcomes: a bound on a model's size, and loss and size as two objectives.

    python -m benchmarks.outcomes [--seeds 0 10] [--tasks TASK …]  run what is missing
    python -m benchmarks.outcomes --summary [--json] [--against alone]  from stored results
    python -m benchmarks.outcomes --build                          tables of sizes, from the data
    python -m benchmarks.outcomes --smoke                          one task, one seed, one query

Tasks, tabulated: the scores of `benchmarks.transfer_tasks`, and the size of the trained model as a
second, noise-free outcome:

    small-trees      log-loss of 30 trees at six sites, with at most 100 nodes
    small-network    likelihood of a network at eight sites, with at most 1,000 weights
    trees-front      log-loss and nodes, both to be minimised
    network-front    likelihood to be maximised, weights to be minimised

Sizes are logarithms to base 10. Nodes depend on a site's data, weights on the configuration alone,
which no method is told.

Arms: ``fts`` and ``fed-gp`` by default settings (sums in plain, which encryption only rounds);
``alone``, the same search without messages; ``botorch``, a site alone with `SingleTaskGP` for each
outcome and `LogConstrainedExpectedImprovement` over the best posterior mean of a point that
probably meets the bound (`LogProbabilityOfFeasibility` while there is none), or
`qLogNoisyExpectedHypervolumeImprovement` with an inferred reference point, 128 draws and pruning,
over all points of the table that were not tried. All have the same three first points, dealt to
the sites by the seed, and then 20 queries.

Measures: with a bound, the regret of the best value within it, over that of the median within it;
1 at most, and while nothing is within. With two objectives, the share of the hypervolume of the
site's whole table, of values better than its third quartile of the score and its largest size.
p values are of Wilcoxon's signed rank test over seeds (means over sites) against ``botorch``, or
the arm ``--against``, two-sided; a line has the seeds of both. CPU is of a proposal.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from botorch.acquisition.analytic import (
    LogConstrainedExpectedImprovement,
    LogProbabilityOfFeasibility,
)
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.acquisition.multi_objective.objective import WeightedMCMultiOutputObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model_list_gp_regression import ModelListGP
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.multi_objective.hypervolume import Hypervolume, infer_reference_point
from botorch.utils.multi_objective.pareto import is_non_dominated
from gpytorch.mlls import ExactMarginalLogLikelihood
from numpy.typing import NDArray
from scipy.stats import wilcoxon
from torch import Tensor

from benchmarks.constraints import show
from benchmarks.transfer_builders import RECIPES, Halves
from benchmarks.transfer_tasks import candidates, load, names_of, row_key
from botorch_fed.federation.points import dealt_design, untried
from botorch_fed.run import run
from botorch_fed.space import Outcome, SearchSpace
from botorch_fed.studies import FTS, Federation, FedGP
from botorch_fed.test_functions.base import FederatedTestProblem

TABLES = Path(__file__).parent / "outcome_tables"  # of sizes; scores are in `transfer_tables`
PARTS = Path(__file__).parent / ".cache" / "outcome_tables"  # of unfinished tables
RESULTS = Path(__file__).parent / "results" / "outcomes.json"
STARTS = 3
QUERIES = 20
POINTS = (1, 3, 5, 10, 20)  # queries after which a method is measured
DRAWS = 128
DIGIT_INPUTS, DIGIT_CLASSES = 64, 10

# ------------------------------------------------------------------ sizes of models


def forest_nodes(half: Halves, **settings: Any) -> int:
    """Nodes of 30 extremely randomised trees."""
    from sklearn.ensemble import ExtraTreesClassifier

    model = ExtraTreesClassifier(30, bootstrap=True, random_state=0, **settings)
    return sum(tree.tree_.node_count for tree in model.fit(half[0], half[1]).estimators_)


def build(name: str = "trees-support2") -> None:
    """Tabulate the logarithm of the number of nodes; finished sites are not computed again."""
    target = TABLES / f"{name}.npz"
    if target.exists():
        print(f"{name}: there already")
        return
    recipe = RECIPES[name]
    settings = recipe.space.from_unit(candidates(recipe))
    rows: list[NDArray[np.float32]] = []
    for site, scorer in enumerate(recipe.scorers()):
        part = PARTS / recipe.space.fingerprint[:12] / f"{name}-{site}.npy"
        if not part.exists():
            began = time.process_time()
            (half,) = scorer.args[1]  # type: ignore[attr-defined] # a partial of `averaged`
            counts = [forest_nodes(half, **point) for point in settings]
            part.parent.mkdir(parents=True, exist_ok=True)
            np.save(part, np.log10(counts).astype(np.float32))
            print(f"{name}: site {site}, {time.process_time() - began:.0f} s", flush=True)
        rows.append(np.load(part))
    TABLES.mkdir(exist_ok=True)
    draft = TABLES / f".{name}.draft.npz"
    np.savez_compressed(
        draft, log_nodes=np.stack(rows), fingerprint=np.array(recipe.space.fingerprint)
    )
    draft.replace(target)


def tree_sizes(points: Tensor) -> Tensor:
    """The table of `build`, `N x K`."""
    with np.load(TABLES / "trees-support2.npz", allow_pickle=False) as archive:
        if str(archive["fingerprint"]) != RECIPES["trees-support2"].space.fingerprint:
            raise ValueError("The table of sizes was built for another search space.")
        return torch.from_numpy(archive["log_nodes"].astype(np.float64))


def network_sizes(points: Tensor) -> Tensor:
    """Weights of a network with one hidden layer, the same at all sites: `N x K`."""
    recipe = RECIPES["mlp-digits"]
    hidden = [float(point["hidden"]) for point in recipe.space.from_unit(points)]
    units = torch.tensor(hidden, dtype=torch.float64)
    weights = units * (DIGIT_INPUTS + 1) + (units + 1) * DIGIT_CLASSES
    return weights.log10().expand(recipe.sites, -1)


# ------------------------------------------------------------------ tasks


@dataclass(frozen=True)
class Spec:
    """A task before its tables: the table of scores, that of sizes, and a bound or none."""

    table: str
    sizes: Callable[[Tensor], Tensor]
    bound: float | None


TASKS = {
    "small-trees": Spec("trees-support2", tree_sizes, 2.0),
    "network-front": Spec("mlp-digits", network_sizes, None),
    "small-network": Spec("mlp-digits", network_sizes, 3.0),
    "trees-front": Spec("trees-support2", tree_sizes, None),
}


class Tabulated(FederatedTestProblem):
    """Score and size of each configuration at each site.

    Args:
        spec: What is tabulated.
    """

    def __init__(self, spec: Spec) -> None:
        recipe = RECIPES[spec.table]
        self.points, scores = load(spec.table)
        self.table = torch.stack([scores, spec.sizes(self.points)], dim=-1)  # N x K x 2
        score = Outcome.objective("score", minimize=recipe.outcome.minimize)
        size = Outcome.objective("size", minimize=True)
        if spec.bound is not None:
            size = Outcome.constraint("size", upper=spec.bound)
        self.space = SearchSpace(recipe.parameters, outcomes=(score, size))
        self._rows = {row_key(point): k for k, point in enumerate(self.points)}

    def __len__(self) -> int:
        return len(self.table)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        """Score and size at tabulated points, `n x 2`."""
        return self.table[agent, [self._rows[row_key(point)] for point in X.double()]]

    def starts(self, agent: int, seed: int) -> Tensor:
        """The first points of a site, dealt by the seed."""
        return dealt_design(self.space, agent, len(self), STARTS, seed=seed, candidates=self.points)

    # -------------------------------------------------------------- measures

    def curve(self, agent: int, Y: Tensor) -> list[float]:
        """The measure after each of `POINTS` queries.

        Args:
            agent: The site.
            Y: What it has observed, `n x 2`.
        """
        measure = self._regret if len(self.space.objectives) == 1 else self._share
        return [round(measure(agent, Y[: STARTS + count]), 5) for count in POINTS]

    def _better(self, Y: Tensor) -> Tensor:
        """Outcomes to be maximised."""
        return self.space.to_public(Y)

    def _regret(self, agent: int, Y: Tensor) -> float:
        bound = self.space.metrics[1].upper
        assert bound is not None

        def within(rows: Tensor) -> Tensor:
            return self._better(rows)[rows[:, 1] <= bound, 0]

        known = within(self.table[agent])
        if not len(within(Y)):
            return 1.0
        best, median = float(known.max()), float(known.quantile(0.5))
        return min((best - float(within(Y).max())) / (best - median), 1.0)

    def _share(self, agent: int, Y: Tensor) -> float:
        volume, whole = self._whole(agent)
        mine = self._better(Y)
        return volume.compute(mine[is_non_dominated(mine)]) / whole

    @lru_cache(maxsize=64)  # noqa: B019 - of the few problems of a process
    def _whole(self, agent: int) -> tuple[Hypervolume, float]:
        everything = self._better(self.table[agent])
        worst = torch.stack([everything[:, 0].quantile(0.25), everything[:, 1].min()])
        volume = Hypervolume(worst)
        return volume, volume.compute(everything[is_non_dominated(everything)])


# ------------------------------------------------------------------ arms

Curves = tuple[list[list[float]], float]  # site by site, and CPU milliseconds of a proposal


def _study(arm: str, problem: Tabulated, seed: int, queries: int) -> Federation:
    names = names_of(len(problem))
    common: dict[str, Any] = {
        "budget": STARTS + queries,
        "candidates": problem.points,
        "initial_design": {name: problem.starts(k, seed) for k, name in enumerate(names)},
    }
    if arm == "fed-gp":
        return FedGP(channel="plain", **common)
    study = FTS(**common)
    return study.alone() if arm == "alone" else study


def _ours(arm: str, problem: Tabulated, seed: int, queries: int) -> Curves:
    began = time.process_time()
    result = run(_study(arm, problem, seed, queries), problem, seed=seed, progress=False)
    spent = 1e3 * (time.process_time() - began) / (len(problem) * queries)
    names = enumerate(result.names)
    return [problem.curve(k, result.history(name)[1]) for k, name in names], spent


def _botorch(arm: str, problem: Tabulated, seed: int, queries: int) -> Curves:
    curves, spent = [], 0.0
    for agent in range(len(problem)):
        X = problem.starts(agent, seed)
        for query in range(queries):
            Y = problem.evaluate(agent, X)
            began = time.process_time()
            left = untried(problem.points, X)
            values = _values(problem.space, X, Y, left, 1000 * seed + query)
            spent += time.process_time() - began
            best = int(values.argmax())
            X = torch.cat([X, left[best : best + 1]])
        curves.append(problem.curve(agent, problem.evaluate(agent, X)))
    return curves, 1e3 * spent / (len(problem) * queries)


def _values(space: SearchSpace, X: Tensor, Y: Tensor, left: Tensor, seed: int) -> Tensor:
    """BoTorch's acquisition function at the points that are left, `k`."""
    Z = space.to_public(Y)
    models = []
    for column in Z.unbind(dim=-1):
        model = SingleTaskGP(X, column.unsqueeze(-1))  # standardises outcomes
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        models.append(model)
    both = ModelListGP(*models)
    with torch.no_grad():
        if len(space.objectives) == 1:
            return _constrained(both, X, float(space.metrics[1].upper or 0.0))(left.unsqueeze(-2))
        acquisition = qLogNoisyExpectedHypervolumeImprovement(
            both,
            ref_point=infer_reference_point(Z[is_non_dominated(Z)]),
            X_baseline=X,
            sampler=SobolQMCNormalSampler(torch.Size([DRAWS]), seed=seed),
            objective=WeightedMCMultiOutputObjective(torch.ones(2).double()),
            prune_baseline=True,
        )
        return torch.cat([acquisition(part.unsqueeze(-2)) for part in left.split(256)])


def _constrained(both: ModelListGP, X: Tensor, bound: float) -> Any:
    mean = both.posterior(X).mean
    met = mean[:, 1] <= bound
    limits = {1: (None, bound)}
    if not bool(met.any()):
        return LogProbabilityOfFeasibility(both, limits)
    return LogConstrainedExpectedImprovement(
        both, best_f=mean[met, 0].max(), objective_index=0, constraints=limits
    )


ARMS: Mapping[str, Callable[[str, Tabulated, int, int], Curves]] = {
    "botorch": _botorch,
    "fts": _ours,
    "fed-gp": _ours,
    "alone": _ours,
}

# ------------------------------------------------------------------ the table

Rows = dict[str, dict[str, dict[str, Any]]]  # by task, arm and seed


def lines_of(rows: Rows, against: str = "botorch") -> list[dict[str, object]]:
    """One line for each task and arm, over the seeds that both arms have.

    Args:
        rows: Stored results.
        against: The arm that p values are against.
    """
    lines: list[dict[str, object]] = []
    for name, arms in rows.items():
        peer = arms.get(against, {})
        for arm, found in arms.items():
            means = {seed: np.mean(one["curves"], axis=0) for seed, one in found.items()}
            others = {seed: np.mean(one["curves"], axis=0) for seed, one in peer.items()}
            common = sorted(means.keys() & others.keys(), key=int)
            if not common:
                continue
            line: dict[str, object] = {"task": name, "arm": arm, "seeds": len(common)}
            for k, count in enumerate(POINTS):
                line[f"@{count}"] = round(float(np.mean([means[seed][k] for seed in common])), 3)
                gaps = [float(means[seed][k] - others[seed][k]) for seed in common]
                p = float(wilcoxon(gaps).pvalue) if arm != against and any(gaps) else None
                line[f"p {count}"] = None if p is None else float(f"{p:.2g}")
            line["CPU ms"] = round(statistics.median(one["cpu_ms"] for one in found.values()), 1)
            lines.append(line)
    return lines


def measured(name: str, arm: str, seed: int, queries: int = QUERIES) -> dict[str, Any]:
    """The curves of one run, site by site."""
    curves, spent = ARMS[arm](arm, problem_of(name), seed, queries)
    return {"curves": curves, "cpu_ms": round(spent, 1)}


@lru_cache(maxsize=len(TASKS))
def problem_of(name: str) -> Tabulated:
    """A task with its tables."""
    return Tabulated(TASKS[name])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--against", choices=list(ARMS), default="botorch")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    if options.build:
        build()
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows: Rows = {}
    if options.results.exists() and not options.smoke:
        rows = json.loads(options.results.read_text())
    if options.smoke:
        first = next(iter(TASKS))
        rows = {first: {arm: {"0": measured(first, arm, 0, 1)} for arm in ARMS}}
    elif not options.summary:
        for seed in range(*options.seeds):
            for name in options.tasks:
                for arm in options.arms:
                    done = rows.setdefault(name, {}).setdefault(arm, {})
                    if str(seed) not in done:
                        done[str(seed)] = measured(name, arm, seed)
                        text = json.dumps(rows).replace("}, ", "},\n")
                        options.results.write_text(text + "\n")
    lines = lines_of(rows, options.against)
    print(json.dumps(lines)) if options.json else show(lines)


if __name__ == "__main__":
    main()
