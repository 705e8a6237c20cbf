r"""The tasks on which transfer between sites is measured: suites with one interface.

    python -m benchmarks.transfer_tasks build [TASK ...]      # tables, from the data
    python -m benchmarks.transfer_tasks describe [TASK ...]   # what the tables look like

    task = make("boosting-credit", seed=0)
    task.evaluate("agent3", X)     # n x d points of the unit cube to n x 1, noise-free
    task.scale("agent3")           # optimum and median, larger is better
    task.problem()                 # for `botorch_fed.run.run`

The regret of a value, larger is better, is (optimum - best so far) / (optimum - median).

**tuning**: models trained on real data, see `benchmarks.transfer_builders`. Each task is a table of
about 1,000 configurations (scrambled Sobol points, snapped, and the user's default as the last
one) times its sites, committed in ``transfer_tables``; a seed changes nothing. **late**: the same
tables; one site, by the seed, is the `newcomer`, the others are done. **fresh**: two tables named
before any method was run and held out until a design is frozen.

**ladder**: eight sites on four real parameters, drawn anew for each seed: draws of a Gaussian
process (RBF, by 500 random features), observed with noise of 2 % of their deviation.

=============  =================================================================================
identical      one function
share-0.9      a common function has .9 of the variance, a site's own the rest
share-0.5      half and half
unrelated      every site another function
shifted        one function, every site's moved by up to .2 along every axis
rescaled       share-0.9 with the same seed; site by site a y + b, a in [1e-3, 1e3], |b| up to 1e4
hostile        share-0.9 with the same seed, but one site has -1e4 times the common function; it is
               not `honest`, and statistics leave it out
=============  =================================================================================

The cube is laid so that a draw has a local maximum inside, and draws are repeated until the site's
best point of all is at least .03 from the faces (a hostile site's may be anywhere). The length
scale, .4, was chosen by what solo LogEI leaves after 3 starts and 20 queries: a regret of .085 on
average; .6 leaves .006, .3 leaves .091. Because optima lie inside, sites correlate by .1 where
nothing is shared (means of 12 seeds: 1, .91, .58, .10; shifted .69).

**high**: ten and twenty real parameters, six sites, no noise, optima known. `shifted-*` is one
function of BoTorch, moved by up to .1 for all sites together and up to .2 for each; `unrelated-*`
has another function at each site, moved by up to .2; `cec-*` is one function of CEC 2005, the same
at ten sites, and needs ``BOTORCH_FED_DATA``.

**private**: thirty sites and more, for differential privacy: three tables, and three rungs of the
ladder with forty sites.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from botorch.test_functions.synthetic import (
    Ackley,
    Griewank,
    Levy,
    Rastrigin,
    Rosenbrock,
    StyblinskiTang,
    SyntheticTestFunction,
)
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import rankdata
from torch import Tensor

from benchmarks.problems.cec2005 import CEC2005
from benchmarks.transfer_builders import RECIPES, Recipe
from botorch_fed.rng import Generator, generator
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.test_functions.base import AgentProblem, FederatedTestProblem, check_points

Function = Callable[[Tensor], Tensor]  # n x d points of the unit cube to n values

TABLES = Path(__file__).parent / "transfer_tables"
PARTS = Path(__file__).parent / ".cache" / "transfer_tables"  # of unfinished tables
NUM_CANDIDATES = 1023  # and the default
NUM_SOBOL = 4096  # for medians and optima of continuous functions

HELD_OUT = ("boosting-har", "mlp-support2")
TUNING = (
    "boosting-credit",
    "trees-support2",
    "mlp-digits",
    "linear-landmine",
    "svm-har",
    "kernel-ridge-diabetes",
    "tree-health",
    "nystroem-writers",
)
MANY_SITES = ("svm-wearers", "tree-regions", "ridge-writers")


# ------------------------------------------------------------------ a task


@dataclass(frozen=True, eq=False)
class Task:
    """One black box per site over one space, and how good a value is.

    Attributes:
        name: Of the task.
        suite: One of `TASKS`.
        space: Parameters in the user's units; the outcome's centre and scale are left at default.
        sites: The agents, as `botorch_fed.run.run` calls them.
        candidates: `K x d` points of the unit cube, or None: continuous.
        default: The user's default configuration, `1 x d`; the centre where there is none.
        values: Of tables, site by site, `K` values in the outcome's unit.
        starts: Own first points of every site.
        queries: Queries after them.
        scales: (optimum, median) of the larger-is-better outcome, site by site.
        functions: Noise-free functions of continuous tasks, site by site.
        noise: Standard deviation of the observation noise, site by site; none where it is missing.
        honest: The sites that count in statistics; default all.
        newcomer: Of *late*: the site that starts when the others are done.
    """

    name: str
    suite: str
    space: SearchSpace
    sites: tuple[str, ...]
    candidates: Tensor | None
    default: Tensor
    values: Mapping[str, Tensor] | None
    starts: int
    queries: int
    scales: Mapping[str, tuple[float, float]]
    functions: Mapping[str, Function] | None = None
    noise: Mapping[str, float] = field(default_factory=dict)
    honest: tuple[str, ...] = ()
    newcomer: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "honest", self.honest or self.sites)

    def evaluate(self, site: str, X: Tensor) -> Tensor:
        """Noise-free outcomes as the site measures them, `n x 1`.

        Args:
            site: Whose.
            X: Points of the unit cube, `n x d`; of a table, its candidates only.
        """
        check_points(X, self.space.dim)
        if self.values is not None:
            return self.values[site][self._rows(X)].unsqueeze(-1)
        assert self.functions is not None
        with torch.no_grad():
            return self.functions[site](X.double()).unsqueeze(-1)

    def problem(self) -> FederatedTestProblem:
        """The task for `botorch_fed.run.run`: agent `n` is `sites[n]`."""
        return TaskProblem(self)

    def scale(self, site: str) -> tuple[float, float]:
        """(optimum, median) of the site's larger-is-better outcome."""
        return self.scales[site]

    def _rows(self, X: Tensor) -> list[int]:
        try:
            return [self._places[row_key(point)] for point in X.double()]
        except KeyError:
            raise InputDataError(
                f"{self.name} is a table: it is known at its candidates only, got another point."
            ) from None

    @cached_property
    def _places(self) -> dict[bytes, int]:
        assert self.candidates is not None
        return {row_key(point): k for k, point in enumerate(self.candidates)}


class TaskProblem(FederatedTestProblem):
    """A task as a federated test problem, with the noise of each site."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.space = task.space

    def __len__(self) -> int:
        return len(self.task.sites)

    def __repr__(self) -> str:
        return f"TaskProblem({self.task.name}, agents={len(self)}, dim={self.dim})"

    def __getitem__(self, agent: int) -> AgentProblem:
        if not 0 <= agent < len(self):
            raise IndexError(f"Agents are 0..{len(self) - 1}, got {agent}.")
        noise = self.task.noise.get(self.task.sites[agent])
        return AgentProblem(self, agent, noise_std=noise)

    @property
    def optimal_values(self) -> Tensor:
        """The best noise-free value of every agent, in the outcome's unit."""
        best = torch.tensor([self.task.scale(site)[0] for site in self.task.sites])
        return self.space.outcome.from_public(best.double())

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        """Noise-free values of an agent at `n x d` points of the unit cube, an `n` tensor."""
        return self.task.evaluate(self.task.sites[agent], X).squeeze(-1)

    def observe(self, agent: int, X: Tensor, stream: Generator) -> Tensor:
        """Values as an agent observes them, an `n` tensor."""
        values = self.evaluate(agent, X)
        noise = self.task.noise.get(self.task.sites[agent], 0.0)
        return values + noise * stream.normal(*values.shape) if noise else values


def names_of(count: int) -> tuple[str, ...]:
    """The sites' names: those that `run` gives to agents."""
    return tuple(f"agent{n}" for n in range(count))


# ------------------------------------------------------------------ tables


def candidates(recipe: Recipe) -> Tensor:
    """Scrambled Sobol points as a site can evaluate them, each once, and the default at the end."""
    space = recipe.space
    engine = torch.quasirandom.SobolEngine(space.dim, scramble=True, seed=2024)
    points = torch.cat([engine.draw(NUM_CANDIDATES).double(), space.to_unit([recipe.default])])
    for _ in range(5):  # to a fixed point of rounding, so that a candidate snaps to itself
        points = space.snap(points)
    kept: dict[bytes, Tensor] = {row_key(point): point for point in points[:-1]}
    kept.pop(row_key(points[-1]), None)
    return torch.stack([*kept.values(), points[-1]]) + 0.0


def row_key(point: Tensor) -> bytes:
    """What identifies a candidate: its coordinates to nine decimals, as bytes."""
    return (np.round(point.numpy(), 9) + 0.0).tobytes()


def build(name: str) -> None:
    """Fill a task's table, site by site; finished sites are not computed again."""
    target = TABLES / f"{name}.npz"
    if target.exists():
        print(f"{name}: there already")
        return
    recipe = RECIPES[name]
    points = candidates(recipe)
    settings = recipe.space.from_unit(points)
    rows = []
    for site, score in enumerate(recipe.scorers()):
        part = PARTS / recipe.space.fingerprint[:12] / f"{name}-{site}.npy"
        if not part.exists():
            part.parent.mkdir(parents=True, exist_ok=True)
            began = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # solvers that stop early: part of the task
                values = np.array([score(**point) for point in settings], dtype=np.float32)
            np.save(part, values)
            print(f"{name}: site {site}, {time.process_time() - began:.0f} s", flush=True)
        rows.append(np.load(part))
    if len(rows) != recipe.sites or not np.isfinite(rows).all():
        raise ValueError(f"{name}: expected finite values of {recipe.sites} sites.")
    TABLES.mkdir(exist_ok=True)
    draft = TABLES / f".{name}.draft.npz"
    np.savez_compressed(
        draft,
        candidates=points.numpy(),
        values=np.stack(rows),
        fingerprint=np.array(recipe.space.fingerprint),
    )
    draft.replace(target)


def load(name: str) -> tuple[Tensor, Tensor]:
    """A table's candidates, `K x d` with the default as the last, and values, `N x K`."""
    path = TABLES / f"{name}.npz"
    if not path.exists():
        raise FileNotFoundError(
            f"There is no table of {name}: python -m benchmarks.transfer_tasks build {name}"
        )
    with np.load(path, allow_pickle=False) as archive:
        if str(archive["fingerprint"]) != RECIPES[name].space.fingerprint:
            raise ValueError(f"{path} was built for another search space: delete it, build again.")
        points = torch.from_numpy(archive["candidates"])
        return points, torch.from_numpy(archive["values"].astype(np.float64))


def table_task(name: str, seed: int, suite: str) -> Task:
    """A table as a task of *tuning*, *late* or *fresh*."""
    points, table = load(name)
    space, sites = RECIPES[name].space, names_of(len(table))
    better = space.outcome.to_public(table)
    ends = zip(better.amax(dim=-1).tolist(), better.quantile(0.5, dim=-1).tolist(), strict=True)
    late = suite == "late"
    place = int(generator(seed, "transfer", "late", name).uniform(1) * len(sites))
    return Task(
        name=name,
        suite=suite,
        space=space,
        sites=sites,
        candidates=points,
        default=points[-1:],
        values=dict(zip(sites, table, strict=True)),
        starts=0 if late else 3,
        queries=20,
        scales=dict(zip(sites, ends, strict=True)),
        newcomer=sites[place] if late else None,
    )


# ------------------------------------------------------------------ functions


@dataclass(frozen=True, eq=False)
class Waves:
    """A draw of a Gaussian process by random Fourier features, mean 0 and deviation 1 on the cube.

    Attributes:
        frequencies: `m x d`.
        phases: `m`.
        weights: `m`.
        offset: What is subtracted.
    """

    frequencies: Tensor
    phases: Tensor
    weights: Tensor
    offset: float = 0.0

    def __call__(self, X: Tensor) -> Tensor:
        return (X @ self.frequencies.mT + self.phases).cos() @ self.weights - self.offset

    @classmethod
    def draw(cls, dim: int, stream: Generator) -> Waves:
        """A draw whose length scale is `LENGTHSCALE` times the root of the dimension.

        The cube is laid so that one of the draw's local maxima is a random point inside.
        """
        frequencies = stream.normal(NUM_WAVES, dim) / (LENGTHSCALE * dim**0.5)
        phases = 2 * torch.pi * stream.uniform(NUM_WAVES)
        weights = stream.normal(NUM_WAVES)
        place = 0.15 + 0.7 * stream.uniform(dim)
        raw = cls(frequencies, phases, weights)
        top = ascend(raw, torch.zeros(1, dim, dtype=torch.float64)).squeeze(0)
        laid = replace(raw, phases=phases + frequencies @ (top - place))
        values = laid(sobol(dim))
        spread = float(values.std())
        return replace(laid, weights=weights / spread, offset=float(values.mean()) / spread)


@dataclass(frozen=True, eq=False)
class Blend:
    """`stretch * (sum of weight * function(X - shift)) + offset`.

    Attributes:
        terms: Weights, functions and shifts.
        stretch: Of the outcome.
        offset: Of the outcome.
    """

    terms: tuple[tuple[float, Function, Tensor], ...]
    stretch: float = 1.0
    offset: float = 0.0

    def __call__(self, X: Tensor) -> Tensor:
        total = torch.zeros(len(X), dtype=torch.float64)
        for weight, function, shift in self.terms:
            total = total + weight * function(X - shift)
        return self.stretch * total + self.offset


@dataclass(frozen=True, eq=False)
class Moved:
    """A test function of BoTorch on the unit cube, its optimum moved.

    Attributes:
        function: To be minimised.
        shift: By how much, in the unit cube, `d`.
    """

    function: SyntheticTestFunction
    shift: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        lower, upper = self.function.bounds.double()
        return self.function._evaluate_true(lower + (upper - lower) * (X - self.shift))


@dataclass(frozen=True, eq=False)
class Agent:
    """An agent's function of a federated test problem, by its index."""

    problem: FederatedTestProblem
    index: int

    def __call__(self, X: Tensor) -> Tensor:
        return self.problem.evaluate(self.index, X)


@lru_cache
def sobol(dim: int) -> Tensor:
    """Fixed scrambled Sobol points, `NUM_SOBOL x d`."""
    return torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(NUM_SOBOL).double()


@lru_cache(maxsize=64)
def peak(function: Function, dim: int) -> tuple[Tensor, float]:
    """The largest value on the cube: Sobol points, then L-BFGS from the best 20.

    Returns:
        Where, `d`, and the value.
    """
    best = sobol(dim)[function(sobol(dim)).topk(20).indices]
    X = torch.cat([ascend(function, best, box=(0.0, 1.0)), best[:1]])
    values = function(X)
    return X[values.argmax()], float(values.max())


def ascend(function: Function, X: Tensor, box: tuple[float, float] | None = None) -> Tensor:
    """Local maxima by L-BFGS from `n x d` points, all in one."""

    def slopes(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        points = torch.from_numpy(flat).reshape(X.shape).requires_grad_()
        loss = -function(points).sum()
        (gradient,) = torch.autograd.grad(loss, points)
        return float(loss.detach()), gradient.flatten().numpy()

    bounds = None if box is None else [box] * X.numel()
    options = {"maxiter": 500, "maxfun": 1000, "ftol": 1e-14, "gtol": 1e-9}
    start = X.flatten().numpy()
    found = minimize(slopes, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options)
    return torch.from_numpy(found.x).reshape(X.shape)


# ------------------------------------------------------------------ ladder

RUNGS = ("identical", "share-0.9", "share-0.5", "unrelated", "shifted", "rescaled", "hostile")
SHARES = {"identical": 1.0, "share-0.9": 0.9, "share-0.5": 0.5, "unrelated": 0.0, "shifted": 1.0}
LADDER_DIM, LADDER_SITES = 4, 8
FORTY = {f"forty-{rung}": rung for rung in ("share-0.9", "share-0.5", "unrelated")}
LENGTHSCALE, NUM_WAVES = 0.2, 500  # the first times the root of the dimension
MARGIN, ATTEMPTS = 0.03, 200
LADDER_NOISE = 0.02  # of a function's deviation
NOWHERE = torch.zeros(LADDER_DIM, dtype=torch.float64)


def inside(draw: Callable[[int], Blend]) -> Blend:
    """The first draw whose largest value is not at a face of the cube."""
    for attempt in range(ATTEMPTS):
        function = draw(attempt)
        where, _ = peak(function, LADDER_DIM)
        if bool(((where > MARGIN) & (where < 1 - MARGIN)).all()):
            return function
    raise RuntimeError(f"None of {ATTEMPTS} draws has its optimum inside the cube.")


@lru_cache(maxsize=16)
def common(seed: int) -> Blend:
    """What sites of one seed have in common."""

    def draw(attempt: int) -> Blend:
        stream = generator(seed, "transfer", "common", attempt)
        return Blend(((1.0, Waves.draw(LADDER_DIM, stream), NOWHERE),))

    return inside(draw)


@lru_cache(maxsize=256)
def shared(share: float, seed: int, site: int) -> Blend:
    """A site's function: a share of the common variance, the rest its own."""
    base = common(seed)
    if share == 1:
        return base

    def draw(attempt: int) -> Blend:
        own = Waves.draw(LADDER_DIM, generator(seed, "transfer", "own", site, attempt))
        terms = ((share**0.5, base, NOWHERE), ((1 - share) ** 0.5, own, NOWHERE))
        return Blend(terms)

    return inside(draw)


def moved(base: Blend, seed: int, site: int) -> Blend:
    """The common function, moved by up to .2 along every axis."""

    def draw(attempt: int) -> Blend:
        stream = generator(seed, "transfer", "shift", site, attempt)
        return Blend(((1.0, base, 0.4 * stream.uniform(LADDER_DIM) - 0.2),))

    return inside(draw)


def rescaled(functions: list[Blend], seed: int) -> list[Blend]:
    """`a y + b` for every site, with `a` from 1e-3 to 1e3 and `b` up to 1e4 either way."""
    draws = generator(seed, "transfer", "rescaled").uniform(len(functions), 2).tolist()
    return [
        replace(f, stretch=10 ** (6 * a - 3), offset=2e4 * b - 1e4)
        for f, (a, b) in zip(functions, draws, strict=True)
    ]


def ladder_functions(rung: str, seed: int, count: int = LADDER_SITES) -> list[Blend]:
    base = common(seed)
    if rung == "shifted":
        return [moved(base, seed, site) for site in range(count)]
    share = SHARES.get(rung, 0.9)
    functions = [shared(share, seed, site) for site in range(count)]
    if rung == "rescaled":
        return rescaled(functions, seed)
    if rung == "hostile":
        functions[hostile_site(seed)] = replace(base, stretch=-1e4)
    return functions


def hostile_site(seed: int) -> int:
    """Which of the sites of rung *hostile* is hostile."""
    return int(generator(seed, "transfer", "hostile").uniform(1) * LADDER_SITES)


def measured(function: Blend) -> tuple[float, float, float]:
    """Optimum, median and deviation; the search sees an outcome whose deviation is about one."""
    size, plain = abs(function.stretch), function
    if size != 1:
        plain = replace(function, stretch=function.stretch / size, offset=0.0)
    values = plain(sobol(LADDER_DIM))
    _, best = peak(plain, LADDER_DIM)
    median = float(values.quantile(0.5))
    offset = function.offset
    return size * best + offset, size * median + offset, size * float(values.std())


def ladder_task(name: str, seed: int) -> Task:
    many = name in FORTY
    sites = names_of(40 if many else LADDER_SITES)
    found = ladder_functions(FORTY.get(name, name), seed, len(sites))
    functions = dict(zip(sites, found, strict=True))
    figures = {site: measured(function) for site, function in functions.items()}
    liar = sites[hostile_site(seed)] if name == "hostile" else None
    return Task(
        name=name,
        suite="private" if many else "ladder",
        space=SearchSpace(tuple(Parameter.real(f"x{i}", 0, 1) for i in range(LADDER_DIM))),
        sites=sites,
        candidates=None,
        default=torch.full((1, LADDER_DIM), 0.5, dtype=torch.float64),
        values=None,
        starts=3,
        queries=20,
        scales={site: (best, median) for site, (best, median, _) in figures.items()},
        functions=functions,
        noise={site: LADDER_NOISE * deviation for site, (_, _, deviation) in figures.items()},
        honest=tuple(site for site in sites if site != liar),
    )


# ------------------------------------------------------------------ high

SHIFTED: dict[str, tuple[Callable[[int], SyntheticTestFunction], int]] = {
    "shifted-ackley-10": (Ackley, 10),
    "shifted-rosenbrock-10": (Rosenbrock, 10),
    "shifted-levy-10": (Levy, 10),
    "shifted-ackley-20": (Ackley, 20),
}
UNRELATED = {"unrelated-10": 10, "unrelated-20": 20}
KINDS: tuple[Callable[[int], SyntheticTestFunction], ...] = (
    Ackley,
    Rosenbrock,
    Levy,
    Rastrigin,
    Griewank,
    StyblinskiTang,
)
CEC = {"cec-f1": 1, "cec-f5": 5, "cec-f9": 9, "cec-f15": 15}
MINIMIZED = Outcome(minimize=True)


def high_task(name: str, seed: int) -> Task:
    if name in CEC:
        return cec_task(name)
    if name in UNRELATED:
        dim = UNRELATED[name]
        space = SearchSpace(tuple(Parameter.real(f"x{i}", 0, 1) for i in range(dim)), MINIMIZED)
        kinds, together = KINDS, 0.0
    else:
        kind, dim = SHIFTED[name]
        kinds, together = (kind,) * 6, 0.1
        bounds = kind(dim).bounds.T.tolist()
        parameters = (Parameter.real(f"x{i}", *pair) for i, pair in enumerate(bounds))
        space = SearchSpace(tuple(parameters), MINIMIZED)
    both = together * (2 * generator(seed, "transfer", name, "all").uniform(dim) - 1)
    each = 0.4 * generator(seed, "transfer", name, "each").uniform(6, dim) - 0.2
    functions = [Moved(kind(dim), both + own) for kind, own in zip(kinds, each, strict=True)]
    lowest = [optimum(function.function) for function in functions]
    return minimized_task(name, space, functions, lowest, starts=8)


def optimum(function: SyntheticTestFunction) -> float:
    """The smallest value, at the place that BoTorch names."""
    return float(function._evaluate_true(function.optimizers.double()).min())


def cec_task(name: str) -> Task:
    problem = CEC2005(CEC[name], 10, outcome=MINIMIZED, noise=False)
    functions = [Agent(problem, n) for n in range(len(problem))]
    lowest = problem.optimal_values.tolist()
    return minimized_task(name, problem.space, functions, lowest, starts=4)


def minimized_task(
    name: str, space: SearchSpace, functions: Sequence[Function], lowest: list[float], starts: int
) -> Task:
    """Continuous functions to be minimised, without noise, whose smallest values are known."""
    sites = names_of(len(functions))
    medians = [-float(function(sobol(space.dim)).quantile(0.5)) for function in functions]
    ends = [(0.0 - low, median) for low, median in zip(lowest, medians, strict=True)]
    return Task(
        name=name,
        suite="high",
        space=space,
        sites=sites,
        candidates=None,
        default=torch.full((1, space.dim), 0.5, dtype=torch.float64),
        values=None,
        starts=starts,
        queries=50,
        scales=dict(zip(sites, ends, strict=True)),
        functions=dict(zip(sites, functions, strict=True)),
    )


# ------------------------------------------------------------------ suites

TASKS: dict[str, tuple[str, ...]] = {
    "tuning": TUNING,
    "ladder": RUNGS,
    "high": (*SHIFTED, *UNRELATED, *CEC),
    "late": TUNING,
    "fresh": HELD_OUT,
    "private": (*MANY_SITES, *FORTY),
}


@lru_cache(maxsize=16)
def make(task_name: str, seed: int, *, suite: str | None = None) -> Task:
    """The task of that name.

    Args:
        task_name: One of `TASKS`.
        seed: Draws the functions of *ladder* and *high* and the newcomer of *late*.
        suite: Which; default the first that has the name: *late* must be named.
    """
    suites = [key for key, names in TASKS.items() if task_name in names]
    if not suites or suite not in (None, *suites):
        raise InputDataError(f"There is no task {task_name!r} in suite {suite!r}, see TASKS.")
    suite = suite or suites[0]
    if suite == "ladder" or task_name in FORTY:
        return ladder_task(task_name, seed)
    if suite == "high":
        return high_task(task_name, seed)
    return table_task(task_name, seed, suite)


@dataclass(frozen=True)
class TaskFamily:
    """A task before its seed.

    Attributes:
        name: Of the task.
        suite: Of the task.
    """

    name: str
    suite: str

    def make(self, seed: int) -> Task:
        """The task of a seed."""
        return make(self.name, seed, suite=self.suite)


def suite(name: str) -> list[TaskFamily]:
    """The tasks of a suite."""
    return [TaskFamily(task, name) for task in TASKS[name]]


# ------------------------------------------------------------------ what tables look like


def describe(name: str) -> dict[str, float]:
    """Figures of a table, means over its sites unless they say otherwise.

    Returns:
        `distinct`: the fewest different values of a site; `default`, `decile`: regrets of the
        default configuration and of the best tenth of candidates; `alike`: Spearman's correlation
        of two sites; `others`: regret of the best candidate of the other sites' mean table, each
        in units of its deviation.
    """
    task = make(name, 0)
    assert task.values is not None
    better = task.space.outcome.to_public(torch.stack([task.values[site] for site in task.sites]))
    ends = torch.tensor([task.scale(site) for site in task.sites], dtype=torch.float64).T
    regret = (ends[0, :, None] - better) / (ends[0] - ends[1])[:, None]
    unit = (better - better.mean(dim=-1, keepdim=True)) / better.std(dim=-1, keepdim=True)
    picks = (unit.sum(dim=0) - unit).argmax(dim=-1)
    pairs = np.triu_indices(len(better), 1)
    ranks = torch.from_numpy(rankdata(better.numpy(), axis=-1))
    return {
        "sites": len(better),
        "parameters": len(task.space.parameters),
        "candidates": better.shape[-1],
        "distinct": min(len(row.unique()) for row in better),
        "default": float(regret[:, -1].mean()),
        "decile": float(regret.quantile(0.1, dim=-1).mean()),
        "alike": float(torch.corrcoef(ranks)[pairs].mean()),
        "others": float(regret[torch.arange(len(better)), picks].mean()),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables of the tuning tasks.")
    parser.add_argument("what", choices=("build", "describe"))
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="default: all of suite tuning")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.tasks or TUNING:
        if options.what == "build":
            build(name)
        else:
            print(name, " ".join(f"{key}={value:.3g}" for key, value in describe(name).items()))


if __name__ == "__main__":
    main()
