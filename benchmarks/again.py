"""Do stored lines come out again? Of lines that `benchmarks.results --stale` lists, which differ.

    python -m benchmarks.again dp_fts_de/har [--lines N] [--rows ROW …]
    python -m benchmarks.again dp_fts_de/har --replace [--rows ROW …]
    python -m benchmarks.again --smoke         a line that takes no time and needs no data

Lines are drawn from the file, those of other code first, and run anew. Everything but their times
is compared; nothing is written, and the command fails if a line differs by more than rounding. With
``--replace`` all lines of other code are run anew, and each takes the place of the old one, so that
an interrupted call resumes; nothing else may write to the file meanwhile. Rows that nothing makes
any more stay as they are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.papers import dp_fts_de, fed_gp, fts, private_ucb, private_ucb_defaults
from benchmarks.papers.ledger import RESULTS, Line, Results
from benchmarks.provenance import code_for
from botorch_fed.rng import generator

CLOSE = 1e-6  # relative: what other processors and libraries may change
TIMES = ("cpu_seconds", "cpu_ms", "cpu_by_query", "versions", "code")
Work = Callable[..., Line]


def made_by(name: str) -> tuple[Results, Work, Sequence[str]]:
    """The lines of a file, what makes one, and the rows that can be made."""
    paper, _, entry = name.partition("/")
    if paper == "dp_fts_de" and entry in dp_fts_de.TASKS:
        work = partial(dp_fts_de.table_run, entry)
        return Results(name, dp_fts_de.KEYS), work, [*dp_fts_de.TASKS[entry].rows]
    if paper == "dp_fts_de" and entry in dp_fts_de.CONTINUOUS:
        work = partial(dp_fts_de.continuous_run, entry)
        return Results(name, dp_fts_de.KEYS), work, [*dp_fts_de.CONTINUOUS[entry].rows]
    if paper == "fts" and entry in fts.ENTRIES:
        return Results(name, fts.keys_of(entry)), fts.work_of(entry), _rows_of_fts(entry)
    entry, _, unit = entry.partition("-")
    if paper == "fed_gp" and entry in fed_gp.ENTRIES and unit in fed_gp.ENTRIES[entry].units:
        work = partial(fed_gp.one_run, entry, unit)
        return fed_gp.lines_of(entry, unit), work, [*fed_gp.ENTRIES[entry].methods]
    if name == "private_ucb/defaults":
        lines = private_ucb_defaults.results()
        return lines, private_ucb_defaults.default_run, private_ucb_defaults.ROWS
    for known in private_ucb.ENTRIES.values():
        if name == f"private_ucb/{known.file}":
            return known.lines(), known.work, [*private_ucb.ROWS, *private_ucb.TABLE1_ROWS]
    raise SystemExit(f"{name} is no file of {RESULTS.name}/ that can be made again.")


def _rows_of_fts(entry: str) -> list[str]:
    if entry == "synthetic":
        return [*fts.synthetic_rows()]
    if entry in fts.GROWING:
        return [*fts.GROWING_ROWS]
    problem = fts.PROBLEMS[entry]()
    return [*fts.rows(problem.space, fts.domain_of(problem)), *fts.TIMED_ROWS]


def row_of(line: Mapping[str, Any]) -> str:
    """Its method."""
    if "environment" in line:
        return f"{line['environment']}-{line['mechanism']}"
    return str(line.get("row", line.get("method")))


def chosen(results: Results, known: Sequence[str], rows: Sequence[str], count: int) -> list[Line]:
    """Lines to run anew, those of other code first."""
    lines = [line for line in results.lines if row_of(line) in (rows or known)]
    order = generator(0, "lines", results.path.name).uniform(len(lines)).argsort(stable=True)
    drawn = [lines[k] for k in order.tolist()]
    return sorted(drawn, key=lambda line: is_current(results, line))[:count]


def is_current(results: Results, line: Line) -> bool:
    """Whether the code as it is made a line."""
    return line.get("code") == code_for(results.path).get("code")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What both have that is no time, and by how much it differs, relative to what is stored."""
    for key in old.keys() & new.keys() - {*TIMES}:
        mine, theirs = (_numbers(line[key]) for line in (old, new))
        if len(mine) != len(theirs):
            yield key, math.inf
        elif mine:
            scale = max(map(abs, mine)) or 1.0
            yield key, max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) / scale
        elif old[key] != new[key]:
            yield key, math.inf


def _numbers(value: Any) -> list[float]:
    values = value.values() if isinstance(value, dict) else value
    if isinstance(values, (int, float)):
        values = [values]
    if values is None or isinstance(values, str):
        return []
    return [float(one) for one in values]


def replace(name: str, rows: Sequence[str]) -> None:
    """Run lines of other code anew, and put them in their places."""
    results, work, known = made_by(name)
    rows = [row for row in rows or known if row in known]
    old = [
        number
        for number, line in enumerate(results.lines)
        if row_of(line) in rows and not is_current(results, line)
    ]
    for number in track(old, name, console=Console(stderr=True), disable=not old):
        run = {key: results.lines[number][key] for key in results.keys}
        results.lines[number] = {**run, **work(**run), **code_for(results.path)}
        results.compact()


def check(name: str, rows: Sequence[str], count: int) -> bool:
    """Whether lines come out again; says so line by line."""
    results, work, known = made_by(name)
    same = True
    for old in chosen(results, known, rows, count):
        run = {key: old[key] for key in results.keys}
        far = {key: gap for key, gap in differences(old, work(**run)) if gap > CLOSE}
        told = ", ".join(f"{key} by {gap:.1g}" for key, gap in sorted(far.items()))
        named = " ".join(f"{key}={value}" for key, value in run.items())
        print(f"{name} {named}: {f'differs: {told}' if far else 'the same'}", flush=True)
        same = same and not far
    return same


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", metavar="PAPER/ENTRY")
    parser.add_argument("--lines", type=int, default=1, help="of each file")
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--replace", action="store_true", help="lines of other code")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.files and not options.smoke:
        parser.error("files, or --smoke")
    torch.set_num_threads(1)
    files = ["private_ucb/synthetic"] if options.smoke else options.files
    rows = ["random"] if options.smoke else options.rows
    if options.replace:
        for name in files:
            replace(name, rows)
        return
    same = [check(name, rows, options.lines) for name in files]
    if not all(same):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
