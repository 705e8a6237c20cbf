r"""Does it pay to listen to other sites? Every method on every task, from the same starts.

    python -m benchmarks.transfer SUITE [--methods A,B] [--tasks …] [--seeds N] [--workers W]
    python -m benchmarks.transfer SUITE --summary [--json] [--figure]      from the stored rows
    python -m benchmarks.transfer SUITE --ablations [--summary]            one part changed each
    python -m benchmarks.transfer --smoke                                  a made-up task, seconds

Suites are those of `benchmarks.transfer_tasks`: *tuning*, *ladder*, *high*, *late*, *fresh*,
*private*.
Methods are the controls of `benchmarks.transfer_controls` and the package's studies (`STUDIES`).

One row per method, task and seed, appended as it ends and never run twice, so that a killed run is
resumed by calling it again: ``results/transfer/<suite>/<method>.jsonl``. A row holds the mean over
the honest sites of the normalised simple regret, (optimum - best so far) / (optimum - median) of
noise-free outcomes, after the starts (index 0) and after each query; the CPU milliseconds of an own
step without the objective; bytes per site and round; a hash of the package's source.

Federated methods have the same starts for a task and seed (`dealt_starts`), controls that send
nothing as many of a site's own (`own_starts`), and as many queries after them. In *late* one site,
by the seed, is new and the others have finished `HISTORY` queries alone (kept in ``.cache``); its
curve counts its evaluations from 0, where the regret is 1 by definition, and own starts, where a
method needs them, are among them. The row of a method that uses the others' histories notes a hash
of them; rows with different ones are not compared.

Rows of ``--ablations`` are in a folder of their own, with those of the whole search from the same
starts. They, and ``solo_botorch`` with the own model from its starts (``solo_checked``), were made
when starts were dealt in another way: site n of N had the points n, n + N, ….

How the statistics are made: `benchmarks.transfer_summary`. ``before_*`` are what was the default of
the package before its search was made for this (commit 9d34ccf): `FTS(every=3)`, `FedGP` with
`RegionSearch`, `DPFTSDE(epsilon=2)`, with outcomes on a public scale as good as a guess can be, the
median optimum and median to two digits. Their rows were made at commit e835b28, which has that
package, and this file as it was then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.papers.ledger import versions
from benchmarks.provenance import code_for
from benchmarks.transfer_ablations import ABLATIONS
from benchmarks.transfer_controls import (
    ALONE,
    COLD,
    CONTROLS,
    FEW_SITES,
    Histories,
    Trace,
    dealt_starts,
    solo,
    with_default,
)
from benchmarks.transfer_summary import (
    CHECKED_STARTS,
    ORACLE,
    REFERENCE,
    SAME_STARTS,
    SHOWN,
    Row,
    pairs,
    summarize,
)
from benchmarks.transfer_tasks import TASKS, Task, make
from botorch_fed.privacy.mechanisms import SignalWarning
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, Study, run
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP
from botorch_fed.test_functions.base import FederatedTestProblem

HOME = Path(__file__).parent
RESULTS = HOME / "results" / "transfer"
CACHE = HOME / ".cache" / "transfer_histories"
NEWCOMER_STARTS = 3
NEWCOMER_EVALUATIONS = 23
HISTORY = 20  # queries of each of the others, in *late*
DIGITS = 5
KEEP_SITES = (
    SAME_STARTS,
    ORACLE,
)  # their rows have a curve for each site, for those with some sites


# ------------------------------------------------------------------ the package's studies


Starts = Mapping[str, Tensor]
StudyOf = Callable[[Task, int, Starts], Study]


def _fts(task: Task, seed: int, starts: Starts) -> Study:
    budget = task.starts + task.queries
    return FTS(budget=budget, candidates=task.candidates, initial_design=starts)


def _fedgp(task: Task, seed: int, starts: Starts, channel: Any = "plain") -> Study:
    return FedGP(
        budget=task.starts + task.queries,
        channel=channel,
        candidates=task.candidates,
        initial_design=starts,
    )


def _fedgp_encrypted(task: Task, seed: int, starts: Starts) -> Study:
    return _fedgp(task, seed, starts, "threshold")


def _dp_fts_de(task: Task, seed: int, starts: Starts) -> Study:
    return DPFTSDE(
        budget=task.starts + task.queries,
        epsilon=2.0,
        delta=1e-5,
        candidates=task.candidates,
        initial_design=starts,
    )


def _dp_fts_de_default(task: Task, seed: int, starts: Starts) -> Study:
    """With the user's default configuration in the place of every site's first start."""
    return _dp_fts_de(task, seed, with_default(task, starts))


STUDIES: dict[str, StudyOf] = {
    "fts": _fts,
    "fedgp": _fedgp,
    "fedgp_encrypted": _fedgp_encrypted,
    "dp_fts_de": _dp_fts_de,
    "dp_fts_de_default": _dp_fts_de_default,
}


def _late_fts(task: Task, newcomer: str, others: Histories) -> Study:
    """Those who are done send one message before the start."""
    return FTS(
        budget=task.queries, active=(newcomer,), data=dict(others), candidates=task.candidates
    )


def _late_fedgp(task: Task, newcomer: str, others: Histories, channel: Any = "plain") -> Study:
    """One sum, at the start: those who are done have no more to say."""
    return FedGP(
        budget=task.queries,
        channel=channel,
        active=(newcomer,),
        data=others,
        sums=1,
        candidates=task.candidates,
    )


def _late_fedgp_encrypted(task: Task, newcomer: str, others: Histories) -> Study:
    return _late_fedgp(task, newcomer, others, "threshold")


def _late_dp_fts_de(task: Task, newcomer: str, others: Histories) -> Study:
    """One release, at the start."""
    return DPFTSDE(
        budget=task.queries,
        epsilon=2.0,
        delta=1e-5,
        active=(newcomer,),
        data=others,
        candidates=task.candidates,
    )


LATE_STUDIES: dict[str, Callable[[Task, str, Histories], Study]] = {
    "fts": _late_fts,
    "fedgp": _late_fedgp,
    "fedgp_encrypted": _late_fedgp_encrypted,
    "dp_fts_de": _late_dp_fts_de,
}
SIMULATIONS = {**CONTROLS, **ABLATIONS}
KEPT = ("before_fts", "before_fedgp", "before_dp_fts_de")  # rows of an earlier package
OF_PARTS = "-ablations"  # at the end of a suite's folder: rows of changed parts, and of the whole


@cache
def package() -> str:
    """Eight digits of the hash of the package's source, noted with every row."""
    import botorch_fed

    root = Path(str(botorch_fed.__file__)).parent
    files = sorted(root.rglob("*.py"))
    parts = [f"{path.relative_to(root)}\n{path.read_text()}" for path in files]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


class _Timed(FederatedTestProblem):
    """A problem that counts the CPU seconds of objectives, which are not the method's."""

    def __init__(self, problem: FederatedTestProblem) -> None:
        self.problem = problem
        self.space = problem.space
        self.cpu_seconds: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.problem)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        return self.problem.evaluate(agent, X)

    def observe(self, agent: int, X: Tensor, stream: Any) -> Tensor:
        begun, name = time.process_time(), f"agent{agent}"
        Y = self.problem.observe(agent, X, stream)
        spent = time.process_time() - begun
        self.cpu_seconds[name] = self.cpu_seconds.get(name, 0.0) + spent
        return Y


def run_study(study: Study, task: Task, seed: int, starts: Starts) -> Trace:
    """A run of a study of the package; sites that are not in `starts` do not count."""
    problem = _Timed(task.problem())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)  # with few sites it is what is measured
        result = run(study, problem, seed=seed, progress=False)
    return trace_of(task, result, starts, problem.cpu_seconds)


def trace_of(
    task: Task, result: RunResult, starts: Starts, objective_seconds: Mapping[str, float]
) -> Trace:
    """A result as a trace; starts that the study got as data are put before its observations."""
    sign = -1.0 if task.space.outcome.minimize else 1.0
    X, Y, true = {}, {}, {}
    for site in starts:
        X[site], Y[site] = result.history(site)
        if len(X[site]) == task.queries:
            X[site] = torch.cat([starts[site].double(), X[site]])
        true[site] = sign * task.evaluate(site, X[site]).reshape(-1).numpy()
    rows = [row for row in result.rounds if row["agent"] in starts]
    cpu = sum(row["cpu_seconds"] for row in rows)
    cpu -= sum(objective_seconds.get(site, 0.0) for site in starts)
    sent = sum(row["bytes_down"] + row["bytes_up"] for row in rows) / max(len(rows), 1)
    return Trace(X, Y, true, cpu, len(starts) * task.queries, sent)


# ------------------------------------------------------------------ one row


def regret_curve(task: Task, site: str, true: np.ndarray, starts: int) -> np.ndarray:
    """Normalised simple regret after the starts and each query; 1 before there is anything."""
    optimum, median = task.scale(site)
    best = np.maximum.accumulate(np.concatenate([[-math.inf], true]))
    regret = (optimum - best) / (optimum - median)
    regret[0] = 1.0
    curve: np.ndarray = np.maximum(regret, 0.0)[starts:]
    return curve


def row_of(task: Task, trace: Trace, *, starts: int, keep_sites: bool) -> Row:
    """The row of a run."""
    honest = [site for site in trace.true if site in task.honest]
    curves = {site: regret_curve(task, site, trace.true[site], starts) for site in honest}
    row: Row = {"regret": _rounded(np.mean(list(curves.values()), axis=0))}
    if keep_sites:
        row["by_site"] = {site: _rounded(curve) for site, curve in curves.items()}
    row["cpu_ms_per_query"] = round(1e3 * trace.cpu_seconds / max(trace.queries, 1), 2)
    if trace.bytes_per_round is not None:
        row["bytes_per_round"] = round(trace.bytes_per_round)
    return row


def _rounded(curve: np.ndarray) -> list[float]:
    return [round(float(value), DIGITS) for value in curve]


@dataclass(frozen=True)
class Job:
    """One row to be made."""

    suite: str
    method: str
    task: str
    seed: int
    queries: int | None
    sites: int | None


def work(job: Job) -> Row:
    """Do a job."""
    torch.set_num_threads(1)
    task = task_of(job.suite, job.task, job.seed)
    made = late_row(job, task) if job.suite == "late" else cold_row(job, task)
    return {"task": job.task, "seed": job.seed, **made, "package": package()}


def task_of(suite: str, name: str, seed: int) -> Task:
    """A task of a suite; *smoke* has one of its own."""
    return toy(seed) if suite == "smoke" else make(name, seed, suite=suite)


def cold_row(job: Job, task: Task) -> Row:
    """All sites begin together."""
    if job.queries is not None:
        task = replace(task, queries=job.queries)
    starts = dealt_starts(task, job.seed)
    some = job.method in FEW_SITES and job.sites is not None and job.sites < len(task.honest)
    if some:
        turn = np.roll(np.array(task.honest), -job.seed * int(job.sites or 0))
        starts = {str(site): starts[str(site)] for site in turn[: job.sites]}
    if job.method in STUDIES:
        study = STUDIES[job.method](task, job.seed, starts)
        trace = run_study(study, task, job.seed, starts)
    else:
        trace = SIMULATIONS[job.method](task, job.seed, starts, None)
    row = row_of(task, trace, starts=task.starts, keep_sites=some or job.method in KEEP_SITES)
    if some:
        row["some_sites"] = True
    return row


# ------------------------------------------------------------------ late joiners


def late_row(job: Job, task: Task) -> Row:
    """One newcomer; the others have finished."""
    newcomer = task.newcomer or task.sites[job.seed % len(task.sites)]
    task = replace(task, honest=(newcomer,), starts=NEWCOMER_STARTS)
    others = histories(task, job.seed, newcomer)
    total = NEWCOMER_EVALUATIONS if job.queries is None else job.queries + NEWCOMER_STARTS
    dealt = dealt_starts(task, job.seed)[newcomer]
    own = dealt[:0] if job.method in {*COLD, *LATE_STUDIES, *ABLATIONS} else dealt
    task = replace(task, queries=total - len(own))
    if job.method in LATE_STUDIES:
        study = LATE_STUDIES[job.method](task, newcomer, others)
        trace = run_study(study, task, job.seed, {newcomer: own})
    else:
        trace = SIMULATIONS[job.method](task, job.seed, {newcomer: own}, others)
    row = row_of(task, trace, starts=0, keep_sites=False)
    return row if job.method in ALONE else {**row, "history": digest(others)}


def histories(task: Task, seed: int, newcomer: str) -> Histories:
    """What the others have observed alone: `HISTORY` queries, made once for a task and seed."""
    path = CACHE / f"{task.name}-{seed}.npz"
    if not path.exists():
        done = replace(task, queries=HISTORY)
        trace = solo(done, seed, dealt_starts(done, seed), None)
        arrays = {f"X-{site}": X.numpy() for site, X in trace.X.items()}
        arrays |= {f"Y-{site}": Y.numpy() for site, Y in trace.Y.items()}
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.stem}.{os.getpid()}.npz")
        np.savez(draft, **arrays)  # type: ignore[arg-type]
        draft.replace(path)
    with np.load(path) as kept:
        return {
            site: (torch.from_numpy(kept[f"X-{site}"]), torch.from_numpy(kept[f"Y-{site}"]))
            for site in task.sites
            if site != newcomer
        }


def digest(others: Histories) -> str:
    """Eight digits of the hash of histories."""
    parts = [X.numpy().tobytes() + Y.numpy().tobytes() for X, Y in others.values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:8]


# ------------------------------------------------------------------ rows on disk


class Ledger:
    """The rows of a suite and method: appended as they are made, the first of a run counts."""

    def __init__(self, suite: str, method: str, root: Path | None = None) -> None:
        self.path = (RESULTS if root is None else root) / suite / f"{method}.jsonl"

    def rows(self) -> list[Row]:
        """All rows; a line that a kill has cut off is no row."""
        if not self.path.exists():
            return []
        found: dict[tuple[str, int], Row] = {}
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            found.setdefault((row["task"], row["seed"]), row)
        return list(found.values())

    def known(self) -> set[tuple[str, int]]:
        """Tasks and seeds that have a row."""
        return {(row["task"], row["seed"]) for row in self.rows()}

    def append(self, row: Row) -> None:
        """Write a row, as one line and to the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = {**row, "versions": self._versions(), **code_for(self.path)}
        text = self.path.read_text() if self.path.exists() else ""
        cut = bool(text) and not text.endswith("\n")
        with self.path.open("a") as file:
            file.write(("\n" if cut else "") + json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _versions(self) -> str:
        """The hash of the versions behind a row; a file beside has them in words."""
        words = versions()
        name = hashlib.sha256(words.encode()).hexdigest()[:8]
        beside = self.path.parents[1] / "versions.txt"
        known = beside.read_text() if beside.exists() else ""
        if name not in known:
            beside.write_text(f"{known}{name} {words}\n")
        return name


def fill(jobs: list[Job], workers: int, root: Path | None = None, ending: str = "") -> None:
    """Make what is missing, seed by seed and task by task: a task is drawn once for all methods."""
    ledgers = {job.method: Ledger(job.suite + ending, job.method, root) for job in jobs}
    known = {method: ledger.known() for method, ledger in ledgers.items()}
    todo = [job for job in jobs if (job.task, job.seed) not in known[job.method]]
    shown = track(
        zip(todo, _done(todo, workers), strict=True),
        jobs[0].suite if jobs else "",
        total=len(todo),
        console=Console(stderr=True),
        disable=not todo,
    )
    for job, row in shown:
        ledgers[job.method].append(row)


def _done(jobs: list[Job], workers: int) -> Iterator[Row]:
    if workers <= 1:
        yield from map(work, jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, jobs)


# ------------------------------------------------------------------ a task for tests


class _Bowls(FederatedTestProblem):
    """Two sites with a smooth maximum each, in two dimensions."""

    space = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))

    def __init__(self, centres: Tensor) -> None:
        self.centres = centres

    def __len__(self) -> int:
        return len(self.centres)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        return -(X.double() - self.centres[agent]).square().sum(dim=-1)


@dataclass(frozen=True, eq=False)
class Toy:
    """A made-up task with a task's interface, on a list of 64 candidates."""

    centres: Tensor
    candidates: Tensor
    starts: int = 3
    queries: int = 3
    name: str = "bowls"
    suite: str = "smoke"
    sites: tuple[str, ...] = ("agent0", "agent1")
    honest: tuple[str, ...] = ("agent0", "agent1")
    default: Tensor = torch.tensor([[0.5, 0.5]], dtype=torch.float64)  # noqa: RUF009 - frozen
    newcomer: str | None = None

    @property
    def space(self) -> SearchSpace:
        return _Bowls.space

    @cached_property
    def _problem(self) -> _Bowls:
        return _Bowls(self.centres)

    def problem(self) -> FederatedTestProblem:
        return self._problem

    def evaluate(self, site: str, X: Tensor) -> Tensor:
        return self._problem.evaluate(self.sites.index(site), X).reshape(-1, 1)

    def scale(self, site: str) -> tuple[float, float]:
        values = self.evaluate(site, self.candidates)
        return float(values.max()), float(values.median())


def toy(seed: int) -> Any:
    """The task of ``--smoke``."""
    side = torch.linspace(0, 1, 8, dtype=torch.float64)
    return Toy(0.3 + 0.4 * generator(seed, "toy").uniform(2, 2), torch.cartesian_prod(side, side))


# ------------------------------------------------------------------ what is shown


MAIN = (*CONTROLS, CHECKED_STARTS, *STUDIES, *KEPT)  # of a summary
REQUIRED = ("fts", "fedgp_encrypted", "dp_fts_de")  # should have all tasks and seeds
PARTS = (REFERENCE, SAME_STARTS, ORACLE, "fts", *ABLATIONS)


def stored(
    suite: str, root: Path | None = None, methods: Iterable[str] = MAIN
) -> dict[str, list[Row]]:
    """All rows of a suite by method, in the order of the methods."""
    return {method: rows for method in methods if (rows := Ledger(suite, method, root).rows())}


def summary_of(suite: str, root: Path | None = None, methods: Iterable[str] = MAIN) -> Row:
    """The summary of a suite from its rows."""
    gap_at = NEWCOMER_STARTS if suite == "late" else 0
    rows = stored(suite, root, methods)
    return summarize(rows, gap_at=lambda task: gap_at, required=REQUIRED)


def show(suite: str, summary: Row) -> None:
    """The summary on the terminal."""
    tasks = summary["tasks"]
    title = f"{suite}: normalised regret, mean over {len(tasks)} tasks; differences to solo"
    heads = [f"@{q}" for q in SHOWN]
    table = Table("method", "tasks", "seeds", *heads, title=title)
    for name in ("= solo@20", "/ pooled", "worst task", "worse on", "CPU ms", "bytes"):
        table.add_column(name)
    for method, found in summary["methods"].items():
        cells = [_cell(found, str(q)) for q in SHOWN]
        table.add_row(method, str(len(found["tasks"])), str(found["seeds"]), *cells, *_rest(found))
    Console(width=210).print(table)


def _cell(found: Row, query: str) -> str:
    value = found["regret_at"].get(query)
    if value is None:
        return ""
    gap = found.get("vs_solo", {}).get(query)
    if gap is None:
        return f"{value:.3f}"
    p = "" if gap["p"] is None else f" p={gap['p']:.1g}"
    return f"{value:.3f} {gap['difference']:+.3f}{p}"


def _rest(found: Row) -> list[str]:
    numbers = [
        (found.get("evaluations_to_solo_20"), "{:.1f}"),
        (found.get("oracle_area_ratio"), "{:.3f}"),
        (found.get("worst_task_vs_solo"), "{:+.3f}"),
        (found.get("tasks_significantly_worse"), "{}"),
        (found["cpu_ms_per_query"], "{:.1f}"),
        (found.get("bytes_per_round"), "{:,.0f}"),
    ]
    return ["" if value is None else text.format(value) for value, text in numbers]


def figure(suite: str, root: Path | None = None) -> Path:
    """Mean regret of every method that has all tasks, with 95 % intervals over seeds."""
    import matplotlib.pyplot as plt

    rows = stored(suite, root)
    drawn, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for n, (method, mine) in enumerate(rows.items()):
        both = pairs(mine, mine)
        tasks = {row["task"] for row in rows.get(REFERENCE, mine)}
        if method == CHECKED_STARTS or len(both) < len(tasks):
            continue  # shown as another method, or a mean over other tasks
        size = min(a.shape[1] for a, _ in both.values())
        curves = [a[:, :size] for a, _ in both.values()]
        mean = np.mean([c.mean(axis=0) for c in curves], axis=0)
        errors = [c.var(axis=0, ddof=1) / len(c) if len(c) > 1 else 0 * c[0] for c in curves]
        reach = 1.96 * np.sqrt(np.sum(errors, axis=0)) / len(curves)
        queries = np.arange(size)
        style = "--" if method in KEPT else ("-", "-.", ":")[n // 10 % 3]
        (line,) = axes.plot(queries, mean, style, color=f"C{n % 10}", label=method, lw=1.6)
        axes.fill_between(queries, mean - reach, mean + reach, color=line.get_color(), alpha=0.12)
    axes.set_xlabel("evaluations of the newcomer" if suite == "late" else "queries")
    axes.set_ylabel("normalised regret")
    axes.set_yscale("log")
    axes.set_title(f"{suite}: mean over tasks, 95 % intervals over seeds", fontsize=10)
    axes.legend(fontsize=8, ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path = (RESULTS if root is None else root) / f"{suite}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=150)
    plt.close(drawn)
    return path


# ------------------------------------------------------------------ the command

SMOKE_METHODS = ("solo", "sobol", "random", "default_first", "fmtbo", "pooled", "fts")
METHODS = (*CONTROLS, *STUDIES)


def smoke(root: Path) -> Row:
    """A made-up task from end to end."""
    jobs = [Job("smoke", m, "bowls", seed, None, None) for m in SMOKE_METHODS for seed in (0, 1)]
    fill(jobs, 0, root)
    return summary_of("smoke", root)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """What was asked for, seed by seed, so that early stops leave whole seeds."""
    known = PARTS if options.ablations else METHODS
    methods = list(known) if options.methods is None else options.methods.split(",")
    unknown = sorted(set(methods) - set(known))
    if unknown:
        raise SystemExit(f"Unknown methods {unknown}: choose among {known}.")
    if options.suite == "late":
        methods = [method for method in methods if method in {*SIMULATIONS, *LATE_STUDIES}]
    tasks = TASKS[options.suite] if options.tasks is None else options.tasks.split(",")
    tasks = [task for task in tasks if _can_be_made(options.suite, task)]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    return [
        Job(options.suite, method, task, seed, options.queries, options.sites)
        for seed in seeds
        for task in tasks
        for method in methods
    ]


def _can_be_made(suite: str, task: str) -> bool:
    """Whether its table or data are here; says so if not."""
    try:
        task_of(suite, task, 0)
    except FileNotFoundError as error:
        print(f"{task} is left out: {str(error).splitlines()[0][:90]}", file=sys.stderr)
        return False
    return True


def main() -> None:
    """Run what is missing, or show what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", nargs="?", default="tuning", choices=tuple(TASKS))
    parser.add_argument("--methods", help="separated by commas; default all")
    parser.add_argument("--tasks", help="separated by commas; default all of the suite")
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--queries", type=int, help="default the task's own")
    parser.add_argument("--sites", type=int, help=f"how many for {', '.join(FEW_SITES)}")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--ablations", action="store_true", help="see transfer_ablations")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--figure", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    suite, root, ending = options.suite, None, OF_PARTS if options.ablations else ""
    if options.smoke:
        import tempfile

        suite, root = "smoke", Path(tempfile.mkdtemp())
        smoke(root)
    elif not (options.summary or options.figure):
        fill(jobs_of(options), options.workers, ending=ending)
    if options.figure:
        print(figure(suite, root).name)
    summary = summary_of(suite + ending, root, PARTS if options.ablations else MAIN)
    if options.json:
        print(json.dumps(summary))
    else:
        show(suite, summary)


if __name__ == "__main__":
    main()
