"""What faults cost: processes that die, messages that are lost or forged, agents that stay away.

    python -m benchmarks.faults [--json] [--quick] [--only runs,fuzz] [--messages N] [--every K]
    python -m benchmarks.faults --kept [--every K]    both parts, kept: what is missing
    python -m benchmarks.faults --dropout [--json]    absent agents: runs what is missing
    python -m benchmarks.faults --deployed [--json]   kills on deployed Flower: runs what is missing
    python -m benchmarks.faults --smoke               a little of all, nothing kept

One thread. Parts for ``--only``: runs with kills and faults, and mutated messages. The scenarios
are those of `test.faults`: 5 rounds of every protocol, trust model and channel among three sites
that keep everything in files; with objectives that fail, laboratories that answer by hand two
rounds later, budgets that grow, and a site that joins late.

    scenarios               runs: the server or a site is killed before, in the middle of or after
                            each of its durable steps; or messages are lost, late, doubled, swapped
                            and damaged while all processes die again and again
    completed_or_clean_stop of them, those that came to their end, resumed if an error of the
                            package stopped them
    same_as_undisturbed     of the kills after which nothing need be missing, in federations whose
                            runs can be repeated: those with the same observations and the same
                            payments
    repeatable              how many these kills are
    ledger_undercounts      departures of a release that the ledger on disk did not cover
    second_draws            rounds for which a process has sent two different messages
    observations_lost       outcomes that reached a disk, and are not there or not in the data
    observations_doubled    outcomes that count twice, evaluations repeated in spite of the journal
    fuzz_messages           mutants that were delivered (default a million); shares of those with
                            one field changed and all around it right, and of ciphertexts
    fuzz_accepted_bad       not finite, mis-sized, out of range, stale or mis-addressed ones that
                            were accepted
    fuzz_crashes, fuzz_hangs  receivers that raised what is no refusal, or did not come back
    fuzz_slowest_s          the longest that any of them took
    peak_mb                 the most memory above that of the beginning, for messages up to 1 MB

``--deployed`` has a hub and three sites in processes of their own, with Flower between them, once
for each protocol: the run at the hub, or one site, is killed at each of its durable steps in turn,
and started again. It takes minutes for each of the eight, and goes on where it was stopped.

    deployed_runs           protocols times processes that are killed
    deployed_kills          deaths in all of them
    deployed_completed      of the runs, those that came to their end unattended
    deployed_lost, deployed_doubled   evaluations, as above
    deployed_same           of the runs that can be repeated, those with the same points
    deployed_repeatable     how many these are

``--every`` is of so many kills one, ``--quick`` every 41st and fewer of all. ``--dropout`` has
1,000 agents for 50 rounds on `SyntheticGPAgents`, 100 points of one dimension: in every round each
is absent with the given probability. FTS with a message every fifth round, DP-FTS-DE with epsilon =
2; own steps are random, half of the steps follow messages. The regret is that of an agent's best
point so far, a uniform one among them, as the mean over agents.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.papers.ledger import Line, Results, at_checkpoints, nothing_kept, versions
from botorch_fed.acquisition import Constant
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, Study, run
from botorch_fed.search.released import Following
from botorch_fed.search.thompson import Strategy
from botorch_fed.studies import DPFTSDE, FTS
from botorch_fed.test_functions import SyntheticGPAgents
from test.faults.cases import cases
from test.faults.fuzz import Findings, fuzz, recorded
from test.faults.matrix import kills, matrix, undisturbed

MESSAGES = 1_000_000
SEEDS = 30  # of runs with faults everywhere, per federation
QUICK = 41  # every so many kills
AGENTS, ROUNDS = 1000, 50
DROPOUTS = (0.0, 0.1, 0.3)
SHOWN = (0, 1, 2, 5, 10, 20, 30, 40, 50)  # rounds of the table
Part = tuple[dict[str, float], Table]
BAD = ("crashes", "undercounts", "second_draws", "lost", "doubled")
TOTALS = ("runs", "killed", "completed", "stopped", *BAD)
SMOKE: dict[str, Any] = {
    "MESSAGES": 5000,
    "QUICK": 10**6,
    "AGENTS": 4,
    "ROUNDS": 3,
    "SHOWN": (0, 1, 2, 3),
    "cases": lambda every=cases: {"fts": every()["fts"]},
    "recorded": partial(recorded, ("fts",)),
}


@contextmanager
def silence() -> Iterator[None]:
    """Kills and forged messages are logged and warned of, by the thousand."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


# ------------------------------------------------------------------ kills and faults


def broken(federation: str, every: int, seeds: int) -> Line:
    """A federation: one in so many kills, and runs with faults everywhere."""
    case = cases()[federation]
    with silence():
        chosen = list(kills(undisturbed(case)))[::every]
        rows = matrix(federation, case, chosen, range(seeds))
    line: Line = {key: sum(getattr(row, key) for row in rows) for key in TOTALS}
    patient = sum(kill.patient for kill in chosen) if case.exact else 0
    same = sum(row.same for row in rows if row.patient) if case.exact else 0
    return {**line, "repeatable": patient, "same": same, "versions": versions()}


def scenarios(every: int, seeds: int, *, kept: bool) -> Part:
    """All federations; what is missing of them, if they are kept."""
    runs = [{"federation": name, "every": every, "seeds": seeds} for name in cases()]
    with contextlib.nullcontext() if kept else nothing_kept():
        results = Results("faults/matrix", ("federation", "every", "seeds"))
        results.fill(runs, broken, "kills and faults")
    lines = [line for line in results.lines if (line["every"], line["seeds"]) == (every, seeds)]
    columns = (*TOTALS, "repeatable", "same")
    title = f"One in {every} kills at durable steps, {seeds} runs with faults everywhere"
    table = Table(title=title)
    table.add_column("federation", no_wrap=True)
    for column in columns:
        table.add_column(column.replace("_", " "))
    for line in lines:
        table.add_row(line["federation"], *(str(line[key]) for key in columns))
    total = {key: sum(line[key] for line in lines) for key in columns}
    figures: dict[str, float] = {
        "scenarios": total["runs"],
        "completed_or_clean_stop": total["completed"],
        "same_as_undisturbed": total["same"],
        "repeatable": total["repeatable"],
        "ledger_undercounts": total["undercounts"],
        "second_draws": total["second_draws"],
        "observations_lost": total["lost"],
        "observations_doubled": total["doubled"],
    }
    return figures, table


# ------------------------------------------------------------------ mutants


def mutated(fuzz_messages: int) -> Line:
    """So many mutated messages of all protocols."""
    start = time.process_time()
    with silence():
        found: Findings = fuzz(recorded(), fuzz_messages)
    seconds = time.process_time() - start
    worst = (found.bad + found.crashes).most_common()
    return {
        "fuzz_reframed_share": round(found.reframed / found.messages, 4),
        "fuzz_cipher_share": round(found.ciphers / found.messages, 4),
        "fuzz_accepted": found.accepted,
        "fuzz_accepted_bad": found.bad.total(),
        "fuzz_crashes": found.crashes.total(),
        "fuzz_hangs": found.hung,
        "fuzz_slowest_s": round(found.slowest, 3),
        "peak_mb": round(found.peak_mb, 1),
        "cpu_seconds": round(seconds),
        "worst": [[why[:120], count, found.examples[why]] for why, count in worst],
        "versions": versions(),
    }


def mutants(messages: int, *, kept: bool) -> Part:
    """Their figures, and what was accepted or worse."""
    with contextlib.nullcontext() if kept else nothing_kept():
        results = Results("faults/fuzz", ("fuzz_messages",))
        results.fill([{"fuzz_messages": messages}], mutated, "mutated messages")
    (line,) = results.select(fuzz_messages=messages)
    table = Table("receiver and reason", "times", "first mutant", title="Accepted, or worse")
    for why, count, example in line["worst"]:
        table.add_row(why, str(count), example)
    table.caption = f"{messages:,} messages in {line['cpu_seconds']} s of CPU time"
    figures = {key: float(line[key]) for key in line if key.startswith(("fuzz_", "peak"))}
    return figures, table


# ------------------------------------------------------------------ absent agents


def study(protocol: str, points: torch.Tensor) -> Study:
    """A cheap one: own steps are random."""
    cheap: dict[str, Any] = {"own": "random", "schedule": Constant(0.5)}
    if protocol == "fts":
        strategy = Strategy(prior_until=0, **cheap)
        return FTS(budget=ROUNDS, every=min(5, ROUNDS), candidates=points, strategy=strategy)
    return DPFTSDE(
        budget=ROUNDS + 3,
        epsilon=2.0,
        message="mean",
        num_initial=3,
        candidates=points,
        strategy=Following(**cheap),
    )


def curve(result: RunResult, problem: SyntheticGPAgents) -> list[float]:
    """The mean over agents of the regret of their best points, round by round."""
    best = np.full((AGENTS, ROUNDS + 1), np.inf)
    best[:, 0] = (problem.optimal_values - problem.values.mean(dim=-1)).numpy()
    for row in result.records:
        agent, t = int(row["agent"][len("agent") :]), row["round"] - 1
        best[agent, t] = min(best[agent, t], row["regret"])
    return [float(value) for value in np.minimum.accumulate(best, axis=1).mean(axis=0)]


def absent_agents(protocol: str, dropout: float, seed: int) -> Line:
    """One run."""
    problem = SyntheticGPAgents(
        AGENTS, seed=seed, lengthscale=0.1, grid=100, perturbed="all", noise_var=1e-4
    )

    def absent(name: str, serial: int) -> bool:
        return float(generator(seed, "absent", name, serial).uniform(1)) < dropout

    start = time.process_time()
    with silence():
        result = run(
            study(protocol, problem.points), problem, seed=seed, absent=absent, progress=False
        )
    heard = sum(row["replied"] for row in result.rounds)
    return {
        "rounds": max(row["round"] for row in result.rounds) - 1,
        "heard": round(heard / len(result.rounds), 4),
        "regret": at_checkpoints(curve(result, problem)),
        "cpu_seconds": round(time.process_time() - start, 1),
        "versions": versions(),
    }


def dropout() -> Part:
    """What is missing, and the table of all."""
    results = Results("faults/dropout", ("protocol", "dropout", "seed"))
    runs = [
        {"protocol": protocol, "dropout": share, "seed": 0}
        for protocol in ("fts", "dp-fts-de")
        for share in DROPOUTS
    ]
    results.fill(runs, absent_agents, "absent agents")
    table = Table(
        "protocol",
        "absent",
        "heard",
        *(f"{t}" for t in SHOWN),
        title="Mean regret after so many rounds, 1,000 agents",
    )
    figures = {}
    for line in results.lines:
        regret = line["regret"]
        cells = (f"{regret[str(t)]:.4f}" for t in SHOWN)
        table.add_row(line["protocol"], f"{line['dropout']:.0%}", f"{line['heard']:.3f}", *cells)
        figures[f"regret_{line['protocol']}_{line['dropout']:g}"] = regret[str(ROUNDS)]
    return figures, table


# ------------------------------------------------------------------ deployed


def deployed_kills(only: str | None) -> Part:
    """What is missing, and the table of all."""
    from test.faults.deployed import STUDIES, deployed

    def work(protocol: str, killed: Any) -> Line:
        start = time.monotonic()
        with silence():
            found = asdict(deployed(protocol, killed))
        return {**found, "seconds": round(time.monotonic() - start), "versions": versions()}

    results = Results("faults/deployed", ("protocol", "killed"))
    chosen = [name for name in STUDIES if only in (None, name)]
    runs = [{"protocol": name, "killed": who} for name in chosen for who in ("hub", "site")]
    results.fill(runs, work, "kills on deployed Flower")
    columns = ("protocol", "killed", "kills", "completed", "lost", "doubled", "same", "seconds")
    table = Table(*columns, title="Kills at every durable step of a process, deployed")
    for line in results.lines:
        table.add_row(*("-" if line[key] is None else str(line[key]) for key in columns))
    exact = [line for line in results.lines if line["same"] is not None]
    figures = {
        "deployed_runs": len(results.lines),
        "deployed_kills": sum(line["kills"] for line in results.lines),
        "deployed_completed": sum(line["completed"] for line in results.lines),
        "deployed_lost": sum(line["lost"] for line in results.lines),
        "deployed_doubled": sum(line["doubled"] for line in results.lines),
        "deployed_same": sum(line["same"] for line in exact),
        "deployed_repeatable": len(exact),
    }
    return {key: float(value) for key, value in figures.items()}, table


def main() -> None:
    parser = argparse.ArgumentParser(description="What faults cost.")
    parser.add_argument("--json", action="store_true", help="print one line of figures")
    parser.add_argument("--quick", action="store_true", help="fewer kills, faults and mutants")
    parser.add_argument("--only", default="fuzz,runs", help="some of fuzz, runs")
    parser.add_argument("--messages", type=int, help=f"mutants, default {MESSAGES:,}")
    parser.add_argument("--every", type=int, help="of so many kills one, default all")
    parser.add_argument("--kept", action="store_true", help="runs what is missing, and keeps it")
    parser.add_argument("--dropout", action="store_true", help="absent agents instead")
    parser.add_argument("--deployed", action="store_true", help="kills on deployed Flower instead")
    parser.add_argument("--protocol", help="with --deployed, this one alone")
    parser.add_argument("--smoke", action="store_true", help="does everything run?")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := set(chosen) - {"fuzz", "runs"}:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if os.environ.get("OMP_NUM_THREADS") != "1":  # NumPy's BLAS reads it when it is loaded
        again = [sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    if args.smoke:
        with patch.dict(globals(), SMOKE), nothing_kept():
            parts = [*faults(chosen, MESSAGES, QUICK, 1, kept=True), dropout()]
    elif args.dropout:
        parts = [dropout()]
    elif args.deployed:
        parts = [deployed_kills(args.protocol)]
    else:
        messages = args.messages or (MESSAGES // 100 if args.quick else MESSAGES)
        every, seeds = args.every or (QUICK if args.quick else 1), 2 if args.quick else SEEDS
        parts = faults(chosen, messages, every, seeds, kept=args.kept)
    show(parts, as_json=args.json)


def faults(chosen: list[str], messages: int, every: int, seeds: int, *, kept: bool) -> list[Part]:
    """Mutated messages, and runs with kills and faults."""
    parts = []
    if "fuzz" in chosen:  # first: memory is measured from its beginning
        parts.append(mutants(messages, kept=kept))
    if "runs" in chosen:
        parts.append(scenarios(every, seeds, kept=kept))
    return parts


def show(parts: list[Part], *, as_json: bool) -> None:
    """Tables and figures, or on the output figures alone."""
    tables: list[Table] = []
    figures: dict[str, float] = {}
    for found, table in parts:
        figures |= found
        tables.append(table)
    if as_json:
        for table in tables:
            Console(stderr=True, width=150).print(table)
        print(json.dumps(figures))
        return
    console = Console()
    console.print(f"{versions()}; one thread; {platform.machine()}")
    for table in tables:
        console.print(table)
    table = Table("figure", "value", title="Figures")
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    console.print(table)


if __name__ == "__main__":
    main()
