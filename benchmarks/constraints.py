r"""Known constraints: violations by every door, and the best value beside BoTorch's.

    python -m benchmarks.constraints [--seeds 0 50] [--doors DOOR …]  run what is missing
    python -m benchmarks.constraints --values 0 10                    the same for best values
    python -m benchmarks.constraints --summary [--json]               from stored results
    python -m benchmarks.constraints --smoke                          one problem, one seed

Problems, of three sites with different optima:

    shares     four reals with ``a + b + c + d <= 1`` and ``a >= b``
    recipe     four reals with ``a + b + c + d == 1`` and ``a + b >= 0.3``
    machines   two integers, an ordered choice and a real, with ``n + m <= 9`` and
               ``40 * load <= size``

Doors, each with two sites and five evaluations of each: a Python `run`, the trial service with four
open trials (``ask(4)``), a study file by the command line, Ax clients in an `AxFederation`, and our
model in Ax's `BOTORCH_MODULAR` after three Sobol trials. A violation is a proposal beyond a
constraint by more than 1e-9.

Values: the best value of the first site at 5, 10 and 20 evaluations, by `FTS(every=1)` with the
others, by the same search alone, and by BoTorch alone (`SingleTaskGP`, `LogExpectedImprovement`,
`optimize_acqf` or `optimize_acqf_mixed_alternating` with the same linear constraints; the walk of
`optimize_acqf` for raw points is shortened tenfold, which else takes two thirds of its time). All
have the same three first points. p values are of Wilcoxon's signed rank test over seeds against
BoTorch, two-sided. CPU is the median of a proposal.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim.optimize import optimize_acqf
from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
from gpytorch.mlls import ExactMarginalLogLikelihood
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.statistics import paired
from botorch_fed import cli
from botorch_fed.engines.inprocess import InProcess, refusal_code
from botorch_fed.federation.base import Exchanged, Outgoing
from botorch_fed.federation.drive import drive
from botorch_fed.federation.points import dealt_design
from botorch_fed.federation.site import Site
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, make_agent, run
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FTS, default_feature_map

RESULTS = Path(__file__).parent / "results" / "constraints.json"
TOLERANCE = 1e-9
NUM_INITIAL = 3
SITES = ("a", "b", "c")
BUDGETS = (5, 10, 20)
MODULAR_TRIALS = 5  # three of them Sobol points
Point = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """A constrained problem of several sites.

    Attributes:
        parameters: Of its space.
        constraints: Of its space.
        excess: By how much a point violates a constraint.
        value: What is maximised, from a point and four numbers of a site.
        toml: The parameters as a study file has them.
    """

    parameters: tuple[Parameter, ...]
    constraints: tuple[str, ...]
    excess: Callable[[Point], float]
    value: Callable[[Point, Sequence[float]], float]
    toml: str

    @property
    def space(self) -> SearchSpace:
        """Its search space."""
        return SearchSpace(self.parameters, Outcome(name="y"), self.constraints)

    def site(self, index: int, seed: int) -> Callable[[Point], float]:
        """The function of one site."""
        common = 0.6 * generator(seed, "problem").uniform(4)
        own = (common + 0.1 * generator(seed, "site", index).normal(4)).tolist()
        return lambda point: self.value(point, own)


def _shares(p: Point, at: Sequence[float]) -> float:
    gaps = [p[name] - best for name, best in zip("abcd", at, strict=True)]
    return -4 * sum(gap**2 for gap in gaps) + p["a"] * p["c"]


def _machines(p: Point, at: Sequence[float]) -> float:
    gaps = (p["n"] / 8 - at[0], p["m"] / 8 - at[1], p["size"] / 80 - at[2], p["load"] - at[3])
    return -4 * sum(gap**2 for gap in gaps) + p["n"] * p["load"] / 8


_REALS = tuple(Parameter.real(name, 0.0, 1.0) for name in "abcd")
_LINES = "\n".join(f'{name} = {{ type = "real", lower = 0, upper = 1 }}' for name in "abcd")
PROBLEMS = {
    "shares": Problem(
        _REALS,
        ("a + b + c + d <= 1", "a >= b"),
        lambda p: max(p["a"] + p["b"] + p["c"] + p["d"] - 1, p["b"] - p["a"]),
        _shares,
        _LINES,
    ),
    "recipe": Problem(
        _REALS,
        ("a + b + c + d == 1", "a + b >= 0.3"),
        lambda p: max(abs(p["a"] + p["b"] + p["c"] + p["d"] - 1), 0.3 - p["a"] - p["b"]),
        _shares,
        _LINES,
    ),
    "machines": Problem(
        (
            Parameter.integer("n", 1, 8),
            Parameter.integer("m", 1, 8),
            Parameter.choice("size", [10, 30, 50, 80]),
            Parameter.real("load", 0.0, 1.0),
        ),
        ("n + m <= 9", "40 * load <= size"),
        lambda p: max(p["n"] + p["m"] - 9, 40 * p["load"] - p["size"]),
        _machines,
        'n = { type = "integer", lower = 1, upper = 8 }\n'
        'm = { type = "integer", lower = 1, upper = 8 }\n'
        'size = { type = "choice", values = [10, 30, 50, 80] }\n'
        'load = { type = "real", lower = 0, upper = 1 }',
    ),
}


# ------------------------------------------------------------------ doors


def _objectives(problem: Problem, names: Sequence[str], seed: int) -> dict[str, Any]:
    """Objectives on the unit cube."""

    def made(index: int) -> Callable[[Tensor], Tensor]:
        function = problem.site(index, seed)

        def objective(X: Tensor) -> Tensor:
            values = [function(point) for point in problem.space.from_unit(X)]
            return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)

        return objective

    return {name: made(index) for index, name in enumerate(names)}


def _points(result: RunResult) -> list[Point]:
    X = torch.tensor([row["x"] for row in result.records], dtype=torch.float64)
    return list(result.space.from_unit(X))


def by_run(problem: Problem, seed: int) -> list[Point]:
    """A Python `run`, every other one with batches."""
    study = FTS(budget=5, every=1, q=1 + seed % 2)
    objectives = _objectives(problem, SITES[:2], seed)
    return _points(run(study, objectives, space=problem.space, seed=seed, progress=False))


def by_trials(problem: Problem, seed: int) -> list[Point]:
    """The trial service, four open trials at a time."""
    space, names, blobs, seen = problem.space, SITES[:2], MemoryBlobs(), []
    study = FTS(budget=5, every=1)
    functions = {name: problem.site(i, seed) for i, name in enumerate(names)}
    sites = {name: Site(name, make_agent(study, name, space, seed, blobs), None) for name in names}
    engine = InProcess(sites.values())

    def exchange(outgoing: Outgoing) -> Exchanged:
        while True:
            exchanged = engine(outgoing)
            busy = [n for n, answer in exchanged.replies.items() if refusal_code(answer) == "busy"]
            if not busy:
                return exchanged
            for name in busy:
                trials = sites[name].ask(4)
                assert len({str(trial.parameters) for trial in trials}) == len(trials)
                for trial in trials:
                    seen.append(trial.parameters)
                    sites[name].tell(trial.id, functions[name](trial.parameters))

    with engine:
        drive(study.server(space, names), exchange)
    return seen


_MODULE = """import json
from benchmarks.constraints import PROBLEMS


def score(agent, **parameters):
    with open({seen!r}, "a") as file:
        file.write(json.dumps(parameters) + chr(10))
    return PROBLEMS[{name!r}].site({names!r}.index(agent), {seed})(parameters)
"""


def by_file(problem: Problem, seed: int) -> list[Point]:
    """A study file and the command line."""
    name = next(key for key, value in PROBLEMS.items() if value is problem)
    with tempfile.TemporaryDirectory() as place:
        folder, module = Path(place), f"objective_{Path(place).name}"  # one of its own in a process
        source = _MODULE.format(
            seen=str(folder / "seen"), name=name, names=list(SITES[:2]), seed=seed
        )
        (folder / f"{module}.py").write_text(source)
        (folder / "study.toml").write_text(
            f'objective = "{module}:score"\nagents = {json.dumps(SITES[:2])}\nbudget = 5\n'
            f"seed = {seed}\n[space]\n{problem.toml}\n"
            f"constraints = {json.dumps(problem.constraints)}\n"
            '[protocol]\nname = "fts"\nevery = 1\n'
        )
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = cli.main(["run", str(folder / "study.toml")])
        assert code == 0, f"the command line has ended with {code}"
        return [json.loads(line) for line in (folder / "seen").read_text().splitlines()]


def _client(problem: Problem, seed: int) -> Any:
    from ax.api.client import Client
    from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
    from ax.core.parameter_constraint import ParameterConstraint

    configs: list[Any] = []
    for p in problem.parameters:
        if p.kind == "ordinal":
            configs.append(
                ChoiceParameterConfig(
                    name=p.name, values=list(p.values), parameter_type="int", is_ordered=True
                )
            )
            continue
        kind: Any = "int" if p.kind == "integer" else "float"
        bounds = (int(p.lower), int(p.upper)) if kind == "int" else (p.lower, p.upper)
        configs.append(RangeParameterConfig(name=p.name, bounds=bounds, parameter_type=kind))
    client = Client(random_seed=seed)
    client.configure_experiment(
        parameters=configs,
        parameter_constraints=[one for one in problem.constraints if "==" not in one],
    )
    equalities = [ParameterConstraint(equality=one) for one in problem.constraints if "==" in one]
    client._experiment.search_space.add_parameter_constraints(equalities)  # no public way
    client.configure_optimization(objective="y")
    return client


def by_ax(problem: Problem, seed: int) -> list[Point]:
    """Ax clients, with two trials at a time."""
    from ax.exceptions.generation_strategy import GenerationStrategyCompleted

    from botorch_fed.ax_adapter import AxFederation, RoundOpen

    names, seen = SITES[:2], []
    clients = {name: _client(problem, seed) for name in names}
    federation = AxFederation(FTS(budget=5, every=1), clients, seed=seed)
    while not federation.finished:
        for index, client in enumerate(clients.values()):
            with contextlib.suppress(RoundOpen, GenerationStrategyCompleted):
                for trial, point in client.get_next_trials(max_trials=2).items():
                    seen.append(point)
                    value = problem.site(index, seed)(point)
                    client.complete_trial(trial, raw_data={"y": value})
    return seen


def by_modular(problem: Problem, seed: int) -> list[Point]:
    """Our model and a draw of it inside Ax's modular BoTorch."""
    from ax.adapter.registry import Generators
    from ax.generation_strategy.generation_node import GenerationNode
    from ax.generation_strategy.generation_strategy import GenerationStrategy
    from ax.generation_strategy.generator_spec import GeneratorSpec
    from ax.generation_strategy.transition_criterion import MinTrials

    from botorch_fed import ax_adapter

    ax_adapter.register()
    client, seen = _client(problem, seed), []
    space = ax_adapter.search_space(client)
    phi = default_feature_map(space, num_features=30)
    ax_adapter.contexts["constraints"] = ax_adapter.Context(phi, space.outcome, seed=seed)
    spec = ax_adapter.modular_spec(
        ax_adapter.ContextBasisGP, ax_adapter.ContextThompsonSampling, context="constraints"
    )
    sobol = GenerationNode(
        name="Sobol",
        generator_specs=[GeneratorSpec(Generators.SOBOL, generator_kwargs={"seed": seed})],
        transition_criteria=[MinTrials(threshold=3, transition_to="F", use_all_trials_in_exp=True)],
    )
    nodes = [sobol, GenerationNode(name="F", generator_specs=[spec])]
    client.set_generation_strategy(GenerationStrategy(name="constrained", nodes=nodes))
    for _ in range(MODULAR_TRIALS):
        for trial, point in client.get_next_trials(max_trials=1).items():
            seen.append(point)
            client.complete_trial(trial, raw_data={"y": problem.site(0, seed)(point)})
    return seen


DOORS: dict[str, Callable[[Problem, int], list[Point]]] = {
    "run": by_run,
    "trials": by_trials,
    "file": by_file,
    "ax": by_ax,
    "modular": by_modular,
}


def violations(name: str, door: str, seed: int) -> list[int]:
    """How many points a door has proposed, and how many violate a constraint."""
    problem = PROBLEMS[name]
    points = DOORS[door](problem, seed)
    return [len(points), sum(problem.excess(point) > TOLERANCE for point in points)]


# ------------------------------------------------------------------ best values


def _ours(problem: Problem, seed: int, listen: bool) -> tuple[list[float], float]:
    """The curve of the first site, and CPU seconds of a proposal."""
    names = SITES if listen else SITES[:1]
    designs = dict(zip(SITES, _designs(problem.space), strict=True))
    study = FTS(
        budget=BUDGETS[-1],
        every=1,
        strategy=TransferSearch(listen=listen),
        initial_design={name: designs[name] for name in names},
    )
    objectives = _objectives(problem, names, seed)
    begin = time.process_time()
    result = run(study, objectives, space=problem.space, seed=seed, progress=False)
    spent = (time.process_time() - begin) / (len(names) * (BUDGETS[-1] - NUM_INITIAL))
    return result.best(SITES[0]).tolist(), spent


def _designs(space: SearchSpace) -> list[Tensor]:
    """The first points of each site."""
    count = len(SITES)
    return [dealt_design(space, index, count, NUM_INITIAL) for index in range(count)]


def _botorch(problem: Problem, seed: int) -> tuple[list[float], float]:
    """The curve of the first site, and CPU seconds of a proposal."""
    spent, space = [], problem.space
    objective = _objectives(problem, SITES, seed)[SITES[0]]
    torch.manual_seed(seed)
    X = _designs(space)[0]
    Y = objective(X)
    while len(X) < BUDGETS[-1]:
        begin = time.process_time()
        point = space.snap(_proposal(space, X, Y))
        spent.append(time.process_time() - begin)
        X, Y = torch.cat([X, point]), torch.cat([Y, objective(point)])
    return Y.flatten().cummax(dim=0).values.tolist(), statistics.median(spent)


def _proposal(space: SearchSpace, X: Tensor, Y: Tensor) -> Tensor:
    """Where BoTorch looks next."""
    model = SingleTaskGP(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    improvement = LogExpectedImprovement(model, best_f=Y.max())
    found = space.feasible_set
    options: dict[str, Any] = {"num_restarts": 8, "raw_samples": 512, **found.for_botorch}
    if not found.blocks:
        walk = {"n_burnin": 256, "n_thinning": 4}
        return optimize_acqf(improvement, space.bounds, q=1, options=walk, **options)[0].detach()
    discrete = {block.start: block.rows[:, 0].tolist() for block in found.blocks}
    return optimize_acqf_mixed_alternating(
        improvement, space.bounds, q=1, discrete_dims=discrete, **options
    )[0].detach()


ARMS: dict[str, Callable[[Problem, int], tuple[list[float], float]]] = {
    "federated": lambda problem, seed: _ours(problem, seed, True),
    "alone": lambda problem, seed: _ours(problem, seed, False),
    "botorch": _botorch,
}


def best_values(name: str, arm: str, seed: int) -> list[float]:
    """The best values at the budgets, and CPU milliseconds of a proposal."""
    curve, spent = ARMS[arm](PROBLEMS[name], seed)
    return [*(round(curve[budget - 1], 6) for budget in BUDGETS), round(1e3 * spent, 1)]


# ------------------------------------------------------------------ the tables

Rows = dict[str, dict[str, dict[str, Any]]]  # by problem, door or arm, and seed


def violation_lines(rows: Rows) -> list[dict[str, object]]:
    """One line for each problem and door."""
    return [
        {
            "problem": name,
            "door": door,
            "seeds": len(found),
            "proposals": sum(count for count, _ in found.values()),
            "violations": sum(bad for _, bad in found.values()),
        }
        for name, doors in rows.items()
        for door, found in doors.items()
    ]


def value_lines(rows: Rows) -> list[dict[str, object]]:
    """One line for each problem and arm."""
    lines: list[dict[str, object]] = []
    for name, arms in rows.items():
        peer = arms.get("botorch", {})
        for arm, found in arms.items():
            line: dict[str, object] = {"problem": name, "arm": arm, "seeds": len(found)}
            for i, budget in enumerate(BUDGETS):
                line[f"best {budget}"] = round(statistics.fmean(f[i] for f in found.values()), 4)
                gap = paired(
                    {s: f[i] for s, f in found.items()}, {s: f[i] for s, f in peer.items()}
                )
                p = None if arm == "botorch" or gap is None else gap.p
                line[f"p {budget}"] = None if p is None else float(f"{p:.2g}")
            line["CPU ms"] = round(statistics.median(f[-1] for f in found.values()), 1)
            lines.append(line)
    return lines


def show(lines: list[dict[str, object]]) -> None:
    """A table of all lines."""
    if not lines:
        return
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*map(str, line.values()))
    Console(width=140).print(table)


def _run_missing(
    rows: Rows,
    names: Sequence[str],
    seeds: range,
    make: Callable[[str, str, int], Any],
    keep: Callable[[], None],
    problems: Sequence[str] = tuple(PROBLEMS),
) -> None:
    for seed in seeds:
        for name in problems:
            for which in names:
                done = rows.setdefault(name, {}).setdefault(which, {})
                if str(seed) not in done:
                    done[str(seed)] = make(name, which, seed)
        keep()


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 50))
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS))
    parser.add_argument("--values", type=int, nargs=2, help="seeds of best values")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows: dict[str, Rows] = {"violations": {}, "values": {}}
    if options.results.exists() and not options.smoke:
        rows = json.loads(options.results.read_text())

    def keep() -> None:
        if not options.smoke:
            options.results.write_text(json.dumps(rows).replace("}, ", "},\n") + "\n")

    if options.smoke:
        first = next(iter(PROBLEMS))
        with patch.dict(globals(), MODULAR_TRIALS=4):
            _run_missing(rows["violations"], options.doors, range(1), violations, keep, (first,))
    elif options.values:
        _run_missing(rows["values"], list(ARMS), range(*options.values), best_values, keep)
    elif not options.summary:
        _run_missing(rows["violations"], options.doors, range(*options.seeds), violations, keep)
    lines = [violation_lines(rows["violations"]), value_lines(rows["values"])]
    if options.json:
        print(json.dumps(lines))
        return
    for part in lines:
        show(part)


if __name__ == "__main__":
    main()
