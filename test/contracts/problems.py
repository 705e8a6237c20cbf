"""Kinds of user problems by every door of the package; writes `docs/problems.rst`.

    python -m test.contracts.problems            try all cells and write the page
    python -m test.contracts.problems --only PROBLEM DOOR …    some cells, with their tracebacks

A cell is a small federation of two sites whose evaluations are asked for through one door. It
*works* if all of the budget is proposed, as named values that the problem allows, and what the
problem checks holds. It is *refused* if the package, Ax or BoTorch raises an error of its own.
Anything else is a failure, which the page cannot hold.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ax.adapter.registry import Generators
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from ax.core.parameter import FixedParameter, ParameterType
from ax.exceptions.core import AxError
from ax.exceptions.generation_strategy import GenerationStrategyCompleted
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.generation_strategy.generator_spec import GeneratorSpec
from ax.generation_strategy.transition_criterion import MinTrials
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.exceptions.errors import BotorchError
from torch import Tensor

from botorch_fed import ax_adapter, cli
from botorch_fed.engines.inprocess import InProcess, refusal_code
from botorch_fed.errors import FederatedError
from botorch_fed.federation.base import Exchanged, Outgoing
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.models import RandomFourierFeatures, StationaryKernel
from botorch_fed.rng import generator
from botorch_fed.run import make_agent, run
from botorch_fed.space import Fidelity, Outcome, Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FTS

PAGE = Path(__file__).parents[2] / "docs" / "problems.rst"
SITES = ("ann", "bob")
BUDGET = 5
STARTS = 3  # Sobol points of Ax before a model
Point = Mapping[str, Any]
Answer = float | dict[str, float] | tuple[float, float]


@dataclass(frozen=True)
class Problem:
    """What a user wants.

    Attributes:
        name: Of its row.
        space: The search space; None if it cannot be said in one.
        value: The outcome, the outcomes, or the outcome and its standard error at a point of a
            site; raises what a failed evaluation raises.
        check: Raises unless the proposals are as they should be.
        q: Points of a query.
        open: How many trials are asked for at once, and answered in reverse order.
        lines: What a study file has beside the space.
        configs: Ax's parameters, where they do not follow from the space.
        budget: Evaluations of each site.
    """

    name: str
    space: SearchSpace | None
    value: Callable[[int, Point], Answer]
    check: Callable[[Problem, Sequence[Proposal]], None] = lambda problem, seen: None
    q: int = 1
    open: int = 1
    lines: str = ""
    configs: Sequence[Any] = ()
    budget: int = BUDGET

    @property
    def known(self) -> SearchSpace:
        """Its search space."""
        if self.space is None:
            raise AssertionError(f"{self.name} has no search space")
        return self.space


@dataclass
class Proposal:
    """A point that was asked for: of which site, together with which others, and its answer."""

    site: int
    point: Point
    group: int
    answer: Answer | None = None


@dataclass
class Seen:
    """All proposals of a cell, and the answers to them."""

    problem: Problem
    proposals: list[Proposal] = field(default_factory=list)
    groups: int = 0

    def group(self) -> int:
        """The number of a new group."""
        self.groups += 1
        return self.groups

    def told(self, site: int, point: Point, group: int) -> Answer:
        """Evaluate a point."""
        proposal = Proposal(site, dict(point), group)
        self.proposals.append(proposal)
        proposal.answer = self.problem.value(site, point)
        return proposal.answer


# ------------------------------------------------------------------ doors


def by_run(seen: Seen) -> None:
    """A Python `run` of callables on the unit cube."""
    space = seen.problem.known

    def made(site: int) -> Callable[[Tensor], Any]:
        def objective(X: Tensor) -> Any:
            group = seen.group()
            answers = [seen.told(site, point, group) for point in space.from_unit(X)]
            if isinstance(answers[0], tuple):
                pairs = torch.tensor(answers, dtype=torch.float64)
                return pairs[:, :1], pairs[:, 1:]
            rows = [list(a.values()) if isinstance(a, dict) else [a] for a in answers]
            return torch.tensor(rows, dtype=torch.float64)

        objective.in_batches = seen.problem.q > 1  # type: ignore[attr-defined]
        return objective

    study = FTS(budget=seen.problem.budget, every=1, q=seen.problem.q)
    objectives = {name: made(site) for site, name in enumerate(SITES)}
    run(study, objectives, space=space, seed=0, progress=False)


def by_trials(seen: Seen) -> None:
    """The trial service: `ask`, `tell`, `fail`."""
    problem, blobs = seen.problem, MemoryBlobs()
    study = FTS(budget=problem.budget, every=1, q=problem.q)
    sites = {
        name: Site(name, make_agent(study, name, problem.known, 0, blobs), None) for name in SITES
    }
    engine = InProcess(sites.values())

    def answer(index: int, site: Site) -> None:
        trials, group = site.ask(max(problem.open, problem.q)), seen.group()
        for trial in reversed(trials):
            try:
                told = seen.told(index, trial.parameters, group)
            except ValueError as error:
                site.fail(trial.id, str(error))
                continue
            value, sem = told if isinstance(told, tuple) else (told, None)
            site.tell(trial.id, value, sem)

    def exchange(outgoing: Outgoing) -> Exchanged:
        while True:
            exchanged = engine(outgoing)
            busy = [n for n, reply in exchanged.replies.items() if refusal_code(reply) == "busy"]
            if not busy:
                return exchanged
            for name in busy:
                answer(SITES.index(name), sites[name])

    with engine:
        drive(study.server(problem.known, SITES), exchange)


_MODULE = """from test.contracts.problems import RUNNING


def score(agent, **parameters):
    return RUNNING[-1](agent, parameters)
"""
RUNNING: list[Callable[[str, Point], Any]] = []  # what the study file's objective calls


def by_file(seen: Seen) -> None:
    """A study file and the command line."""
    problem = seen.problem
    group = seen.group if problem.q == 1 else partial(int, 1)
    RUNNING.append(lambda agent, point: seen.told(SITES.index(agent), point, group()))
    protocol = f'[protocol]\nname = "fts"\nevery = 1\nq = {problem.q}\n'
    head = 'objective = "asked:score"\nseed = 0\n'
    head += f"agents = {json.dumps(SITES)}\nbudget = {problem.budget}\n"
    try:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "asked.py").write_text(_MODULE)
            (folder / "study.toml").write_text(f"{head}{toml(problem)}{protocol}")
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = cli.main(["run", str(folder / "study.toml")])
            if code:
                words = " ".join(said.getvalue().split())
                raise FederatedError(words.replace(place, "").replace("/study.toml", "study.toml"))
    finally:
        RUNNING.pop()
        sys.modules.pop("asked", None)


def toml(problem: Problem) -> str:
    """A problem's space and outcomes as a study file has them."""
    if problem.space is None:
        return problem.lines
    lines = ["[space]"]
    for p in problem.space.parameters:
        entry: dict[str, Any] = {"type": p.kind}
        if p.kind in ("choice", "ordinal"):
            entry = {"type": "choice", "values": list(p.values), "ordered": p.kind == "ordinal"}
        elif p.kind == "fixed":
            entry["value"] = p.values[0]
        else:
            kind: Any = int if p.kind == "integer" else float
            entry |= {"lower": kind(p.lower), "upper": kind(p.upper), "log": p.scale == "log"}
        inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry.items())
        lines.append(f"{p.name} = {{ {inner} }}")
    if problem.space.constraints:
        lines.append(f"constraints = {json.dumps([str(c) for c in problem.space.constraints])}")
    if problem.space.fidelity is not None:
        named = problem.space.fidelity
        lines.append(f'fidelity = {{ parameter = "{named.name}", fixed = {named.fixed} }}')
    if problem.space.outcomes:
        lines.append("[outcomes]")
        for one in problem.space.outcomes:
            bounds = {k: getattr(one, k) for k in ("lower", "upper", "reference")}
            given = {k: v for k, v in bounds.items() if v is not None}
            entry = {"minimize": one.minimize, **given} if one.role == "objective" else given
            inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry.items())
            lines.append(f"{one.name} = {{ {inner} }}")
    return "\n".join([*lines, problem.lines, ""])


def client_of(problem: Problem) -> Client:
    """An Ax client with the problem's experiment."""
    client = Client(random_seed=0)
    space = problem.space
    configs, fixed = list(problem.configs), []
    for p in () if space is None or configs else space.parameters:
        if p.kind == "fixed":
            fixed.append(FixedParameter(p.name, ParameterType.INT, p.values[0]))
        elif p.kind in ("choice", "ordinal"):
            kinds: Any = {bool: "bool", int: "int", str: "str"}
            configs.append(
                ChoiceParameterConfig(
                    name=p.name,
                    values=list(p.values),
                    parameter_type=kinds[type(p.values[0])],
                    is_ordered=p.kind == "ordinal",
                )
            )
        else:
            number: Any = int if p.kind == "integer" else float
            configs.append(
                RangeParameterConfig(
                    name=p.name,
                    bounds=(number(p.lower), number(p.upper)),
                    parameter_type="int" if number is int else "float",
                    scaling="log" if p.scale == "log" else None,
                )
            )
    client.configure_experiment(
        parameters=configs,
        parameter_constraints=[] if space is None else [str(c) for c in space.constraints],
    )
    if space is not None and space.fidelity is not None:
        theirs = client._experiment.search_space.parameters[space.fidelity.name]
        theirs._is_fidelity = True  # no public way
        theirs._target_value = space.fidelity_value(1.0)
    for parameter in fixed:
        client._experiment.search_space.add_parameter(parameter)  # no public way
    metrics = (Outcome(name="y"),) if space is None or not space.outcomes else space.outcomes
    objective = ", ".join(
        ("-" if one.minimize else "") + one.name for one in metrics if one.role == "objective"
    )
    bounds = [f"{one.name} <= {one.upper:g}" for one in metrics if one.upper is not None]
    client.configure_optimization(objective=objective, outcome_constraints=bounds)
    return client


def _answered(seen: Seen, site: int, client: Client, group: int, trials: Any) -> None:
    for index, point in reversed(list(trials.items())):
        try:
            told = seen.told(site, point, group)
        except ValueError:
            client.mark_trial_failed(index)
            continue
        client.complete_trial(index, raw_data=told if isinstance(told, dict) else {"y": told})


def by_ax(seen: Seen) -> None:
    """Ax clients in an `AxFederation`."""
    problem = seen.problem
    clients = {name: client_of(problem) for name in SITES}
    study = FTS(budget=problem.budget, every=1, q=problem.q)
    federation = ax_adapter.AxFederation(study, clients, seed=0)
    most = max(problem.open, problem.q)
    while not federation.finished:
        for site, client in enumerate(clients.values()):
            with contextlib.suppress(ax_adapter.RoundOpen, GenerationStrategyCompleted):
                trials = client.get_next_trials(max_trials=most)
                _answered(seen, site, client, seen.group(), trials)


def by_modular(seen: Seen) -> None:
    """Our model in Ax's `BOTORCH_MODULAR`, at each of two clients, after Sobol points."""
    problem = seen.problem
    ax_adapter.register()
    most = max(problem.open, problem.q)
    for site in range(len(SITES)):
        client = client_of(problem)
        metrics = ["y"]
        if problem.space is not None and problem.space.outcomes:
            metrics = [one.name for one in problem.space.outcomes]
        space = problem.known if not problem.configs else _flat(client)
        kernel = StationaryKernel(math.inf, [0.35 * space.dim**0.5] * space.dim)
        phi = RandomFourierFeatures.draw(kernel, 30, generator=generator(0, "problems"))
        for name in metrics:
            ax_adapter.contexts[name] = ax_adapter.Context(phi, Outcome(), seed=site)
        several = problem.space is not None and len(problem.space.objectives) > 1
        spec = ax_adapter.modular_spec(
            ax_adapter.ContextBasisGP,
            qLogNoisyExpectedHypervolumeImprovement if several else qLogNoisyExpectedImprovement,
            context={name: name for name in metrics} if len(metrics) > 1 else metrics[0],
        )
        optimizer = {"num_restarts": 2, "raw_samples": 32}
        spec.generator_gen_kwargs["model_gen_options"] = {"optimizer_kwargs": optimizer}
        sobol = GenerationNode(
            name="Sobol",
            generator_specs=[GeneratorSpec(Generators.SOBOL, generator_kwargs={"seed": site})],
            transition_criteria=[
                MinTrials(threshold=STARTS, transition_to="F", use_all_trials_in_exp=True)
            ],
        )
        nodes = [sobol, GenerationNode(name="F", generator_specs=[spec])]
        client.set_generation_strategy(GenerationStrategy(name="problem", nodes=nodes))
        asked = 0
        while asked < problem.budget:
            trials = client.get_next_trials(max_trials=min(most, problem.budget - asked))
            asked += len(trials)
            _answered(seen, site, client, seen.group(), trials)
        ax_adapter.contexts.clear()


def _flat(client: Client) -> SearchSpace:
    """The parameters of an experiment, without what depends on what."""
    made = []
    for p in client._experiment.search_space.parameters.values():
        if hasattr(p, "lower"):
            make = Parameter.integer if p.parameter_type == ParameterType.INT else Parameter.real
            made.append(make(p.name, p.lower, p.upper))
        else:
            made.append(Parameter.choice(p.name, p.values))
    return SearchSpace(tuple(made))


DOORS: dict[str, Callable[[Seen], None]] = {
    "``run``": by_run,
    "trial service": by_trials,
    "study file": by_file,
    "Ax ``Client``": by_ax,
    "Ax ``BOTORCH_MODULAR``": by_modular,
}

# ------------------------------------------------------------------ problems

XY = (Parameter.real("x", 0.0, 1.0), Parameter.real("z", 0.0, 1.0))
UNIT = SearchSpace(XY)


def hill(site: int, point: Point) -> float:
    """A sum of squares around a point of the site, of all numbers."""
    numbers = [float(v) for v in point.values() if not isinstance(v, str)]
    return -sum((v - 0.3 - 0.1 * site) ** 2 for v in numbers) / max(len(numbers), 1)


def _mixed(site: int, point: Point) -> float:
    numbers = {"x": point["x"], "n": point["n"] / 9, "size": point["size"] / 64}
    return hill(site, numbers) + 0.1 * (point["kind"] == "b") - 0.1 * point["flag"]


def _two(site: int, point: Point) -> dict[str, float]:
    return {"error": hill(site, point) + 1, "size": 10 * point["x"] + point["z"]}


def _failing(site: int, point: Point) -> float:
    if point["x"] > 0.6:
        raise ValueError("the sample was lost")
    return hill(site, point)


def _noisy(site: int, point: Point) -> tuple[float, float]:
    return hill(site, point), 0.05 + 0.1 * float(point["x"])


def _allowed(problem: Problem, seen: Sequence[Proposal]) -> None:
    """All proposals are points of the space."""
    for proposal in seen:
        assert set(proposal.point) == set(problem.known.names), proposal.point
        assert problem.known.violated(dict(proposal.point)) is None, proposal.point
        for p in problem.known.parameters:
            value = proposal.point[p.name]
            if p.kind in ("choice", "ordinal", "fixed"):
                assert value in p.values, (p.name, value)
                assert type(value) in {type(v) for v in p.values}, (p.name, value)
            else:
                assert p.lower <= value <= p.upper, (p.name, value)
                assert (p.kind == "integer") == isinstance(value, int), (p.name, value)


def _different(problem: Problem, seen: Sequence[Proposal]) -> None:
    """No site is asked for a point twice."""
    _allowed(problem, seen)
    for site in range(len(SITES)):
        points = [str(sorted(p.point.items())) for p in seen if p.site == site]
        assert len(set(points)) == len(points), points


def _batched(problem: Problem, seen: Sequence[Proposal]) -> None:
    _different(problem, seen)
    sizes = [sum(p.group == g for p in seen) for g in {p.group for p in seen}]
    assert max(sizes) >= problem.q, sizes


def _feasible_later(problem: Problem, seen: Sequence[Proposal]) -> None:
    """What was learnt counts: the last points of a site meet the bound, or nearly."""
    _allowed(problem, seen)
    bound = next(one.upper for one in problem.known.outcomes if one.role == "constraint")
    assert bound is not None
    for site in range(len(SITES)):
        sizes = [p.answer["size"] for p in seen if p.site == site and isinstance(p.answer, dict)]
        assert min(sizes[STARTS:]) <= bound + 0.5, sizes


def _goes_on(problem: Problem, seen: Sequence[Proposal]) -> None:
    """There were failures, and values as well."""
    _allowed(problem, seen)
    for site in range(len(SITES)):
        failed = [p.answer is None for p in seen if p.site == site]
        assert set(failed) == {True, False}, failed


_NESTED = [
    ChoiceParameterConfig(
        name="model",
        values=["linear", "tree", "none"],
        parameter_type="str",
        is_ordered=False,
        dependent_parameters={"linear": ["l2"], "tree": ["depth"]},
    ),
    RangeParameterConfig(name="l2", bounds=(0.0, 1.0), parameter_type="float"),
    RangeParameterConfig(name="depth", bounds=(1, 9), parameter_type="int"),
]


def _nested(problem: Problem, seen: Sequence[Proposal]) -> None:
    inner = {"linear": {"l2"}, "tree": {"depth"}, "none": set[str]()}
    for proposal in seen:
        assert set(proposal.point) == {"model", *inner[proposal.point["model"]]}, proposal.point


def _trained(site: int, point: Point) -> float:
    numbers = {name: point[name] for name in ("x", "z")}
    return hill(site, numbers) - 0.2 / float(point["epochs"])


def _cheaper(problem: Problem, seen: Sequence[Proposal]) -> None:
    """Some evaluations are below the target, some at it, and the budget counts costs."""
    _different(problem, seen)
    for site in range(len(SITES)):
        points = [p.point for p in seen if p.site == site]
        assert {point["epochs"] < 9 for point in points} == {True, False}
        costs = problem.known.costs(problem.known.to_unit(points))
        assert sum(costs) <= problem.budget + 1e-9


def _many(dim: int) -> SearchSpace:
    return SearchSpace(tuple(Parameter.real(f"x{j}", 0.0, 1.0) for j in range(dim)))


PROBLEMS = (
    Problem(
        "parameter constraint",
        SearchSpace(XY, constraints=("x + z <= 0.7", "x >= z")),
        hill,
        _different,
    ),
    Problem(
        "outcome constraint",
        SearchSpace(
            XY,
            outcomes=(
                Outcome.objective("error", minimize=True),
                Outcome.constraint("size", upper=4.0),
            ),
        ),
        _two,
        _feasible_later,
    ),
    Problem(
        "two objectives",
        SearchSpace(
            XY,
            outcomes=(
                Outcome.objective("error", minimize=True, reference=2.0),
                Outcome.objective("size", minimize=True, reference=11.0),
            ),
        ),
        _two,
        _different,
    ),
    Problem(
        "mixed parameters",
        SearchSpace(
            (
                Parameter.real("x", 1e-3, 1.0, scale="log"),
                Parameter.integer("n", 1, 9),
                Parameter.choice("kind", ["a", "b", "c"]),
                Parameter.choice("size", [16, 32, 64]),
                Parameter.choice("flag", [False, True]),
            )
        ),
        _mixed,
        _different,
    ),
    Problem(
        "fixed parameter",
        SearchSpace((*XY, Parameter.fixed("folds", 5))),
        hill,
        _allowed,
    ),
    Problem(
        "nested parameters",
        None,
        hill,
        _nested,
        lines='[space]\nmodel = { type = "choice", values = ["linear", "tree", "none"] }\n'
        'l2 = { type = "real", lower = 0, upper = 1, when = { model = "linear" } }\n',
        configs=_NESTED,
    ),
    Problem(
        "fidelity",
        SearchSpace((*XY, Parameter.integer("epochs", 1, 9)), fidelity=Fidelity("epochs", fixed=1)),
        _trained,
        _cheaper,
    ),
    Problem("batches, q = 4", UNIT, hill, _batched, q=4, budget=8),
    Problem("four workers", UNIT, hill, _batched, open=4, budget=8),
    Problem("failed trials", UNIT, _failing, _goes_on, budget=7),
    Problem("20 parameters", _many(20), hill, _different),
    Problem("50 parameters", _many(50), hill, _different),
    Problem("known noise", UNIT, _noisy, _different),
)


# ------------------------------------------------------------------ cells


@dataclass(frozen=True)
class Cell:
    """What came of a problem at a door: ``"works"``, ``"refused"`` or ``"fails"``, and words."""

    kind: str
    words: str = ""


# What a door has no way to say: the page has these words in the place of an error.
NO_WAY = {
    ("nested parameters", "``run``"): "`SearchSpace` has no dependent parameters: search the flat "
    "space, with a value that is ignored where it does not apply.",
    ("nested parameters", "trial service"): "`SearchSpace` has no dependent parameters: search the "
    "flat space, with a value that is ignored where it does not apply.",
}


def cell(problem: Problem, door: str) -> Cell:
    """Try a problem by a door."""
    if (problem.name, door) in NO_WAY:
        return Cell("refused", NO_WAY[problem.name, door])
    seen = Seen(problem)
    torch.manual_seed(0)
    try:
        with quiet():
            DOORS[door](seen)
        asked = [sum(p.site == site for p in seen.proposals) for site in range(len(SITES))]
        assert min(asked) >= problem.budget, asked
        problem.check(problem, seen.proposals)
    except (FederatedError, BotorchError, AxError) as error:
        return Cell("refused", " ".join(str(error).split()))
    except Exception as error:
        return Cell("fails", f"{type(error).__name__}: {error}")
    return Cell("works")


@contextlib.contextmanager
def quiet() -> Any:
    """Neither warnings nor lines of a log."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def matrix(
    problems: Iterable[Problem] = PROBLEMS, doors: Iterable[str] = tuple(DOORS)
) -> dict[tuple[str, str], Cell]:
    """All cells of some problems and doors."""
    doors = tuple(doors)
    return {(p.name, door): cell(p, door) for p in problems for door in doors}


def page(cells: Mapping[tuple[str, str], Cell]) -> str:
    """The page that says what the cells have come to; `ValueError` for a cell that fails."""
    notes: list[str] = []
    rows = []
    for problem in PROBLEMS:
        rows.append(f"   * - {problem.name}")
        for door in DOORS:
            found = cells[problem.name, door]
            if found.kind == "fails":
                raise ValueError(f"{problem.name} by {door}: {found.words}")
            mark = "works"
            if found.kind == "refused":
                if found.words not in notes:
                    notes.append(found.words)
                mark = f"refused ({notes.index(found.words) + 1})"
            rows.append(f"     - {mark}")
    table = "\n".join(rows)
    listed = "\n".join(f"{i}. {_escaped(words)}" for i, words in enumerate(notes, 1))
    heads = "\n".join(f"     - {door}" for door in DOORS)
    return f"""Problems and doors
==================

Kinds of problems by the doors through which sites are asked for evaluations. ``python -m
test.contracts.problems`` tries each cell with a federation of two sites and writes this page, and a
test compares it with what it finds.

**works**: all of the budget is proposed, no proposal leaves the space, and what the problem needs
holds: constraints, different points in a batch, values after failures. **refused**: an error,
below, or nothing by which it could be said; nothing is ignored.

.. list-table::
   :header-rows: 1
   :class: conformance

   * - problem
{heads}
{table}

Messages of refusals:

{listed}
"""


def _escaped(words: str) -> str:
    return words.replace("`", "``").replace("*", "\\*")


def main() -> None:
    """Write the page, or show some cells."""
    parser = argparse.ArgumentParser(description="Problems by every door.")
    parser.add_argument("--only", nargs="*", metavar="WORD", help="parts of names; keeps nothing")
    options = parser.parse_args()
    if options.only is None:
        start = time.monotonic()
        PAGE.write_text(page(matrix()))
        print(f"{PAGE.name}: {time.monotonic() - start:.0f} s")
        return
    for problem in PROBLEMS:
        for door in DOORS:
            if all(word in f"{problem.name} {door}" for word in options.only):
                start = time.process_time()
                found = cell(problem, door)
                seconds = time.process_time() - start
                print(f"{problem.name} | {door} | {found.kind} | {seconds:.1f} s | {found.words}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The objective of a study file finds this module by its name.
    sys.modules.setdefault("test.contracts.problems", types.ModuleType("alias"))
    sys.modules["test.contracts.problems"] = sys.modules["__main__"]
    main()
