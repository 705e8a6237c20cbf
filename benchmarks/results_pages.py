r"""Measured figures in the README and docs/*.rst: each is one that a committed file has.

`quoted.toml` says where a figure comes from; it holds no figures. Its entries:

- ``[[table]]``: rows and columns of a table by the keys of a summary, cell by cell;
- ``[[quote]]``: a sentence with ``#`` in the place of its figures, and their keys in order;
- ``[[generated]]``: a page that another command writes and another test compares;
- ``[[unsourced]]``: a sentence whose figures no committed file has, and the command that measures
  them. `RESULTS.md` lists them.

``[[setting]]`` has patterns of numbers that are no measurements. A figure is a number with a
decimal point, an exponent or a per cent sign, and any number in a cell of a table that has no
words, outside of code. One that no entry accounts for is an error, so that nobody can print one
without saying where it is from.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fidelity, fidelity_tasks, outcomes, transfer, transfer_bases
from benchmarks.papers import dp_fts_de, fed_gp, fts, private_ucb, private_ucb_defaults
from benchmarks.papers.ledger import Line, Results
from benchmarks.papers.published.printed import fedgp_table1
from benchmarks.statistics import average_ranks, effect, paired
from benchmarks.transfer_summary import SHOWN, pairs

HOME = Path(__file__).parent
ROOT = HOME.parent
REGISTRY = HOME / "quoted.toml"
NUMBER = r"[-+−]?(?:\d(?:[\d,]*\d)?(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
TOKEN = re.compile(rf"(?<![\w.^_]){NUMBER}(?![\w]|\.\d)")


def pages() -> list[str]:
    """The pages that are looked at."""
    names = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.rst")))]
    written = {entry["page"] for entry in registry().get("generated", [])}
    return [name for name in names if name not in written]


# ------------------------------------------------------------------ where figures come from


def lines_of(name: str, row: str) -> list[Line]:
    """The stored lines of a row of a paper's entry, as they are used by its summary."""
    family, _, entry = name.partition("/")
    if family == "fed_gp":
        return fed_gp.Lines(name).select(method=row)
    if family == "private_ucb":
        environment, _, mechanism = row.rpartition("-")
        chosen = private_ucb.ENTRIES[entry].lines()
        return chosen.select(environment=environment, mechanism=mechanism)
    return Results(name, ()).select(row=row)


def _transfer(suite: str) -> Mapping[str, Any]:
    summary = transfer.summary_of(suite)
    first = {
        task: {
            method: {str(q): a[0][q] for q in SHOWN if q < a.shape[1]} for method, a in of.items()
        }
        for task, of in _of_seed(suite, 0).items()
    }
    for found in summary["methods"].values():
        tests = [t for t in found.get("vs_solo", {}).values() if t["p"] is not None]
        found["at"] = {
            query: {
                "regret": found["regret_at"][query],
                "solo": found["regret_at"][query] - test["difference"],
                "p": test["p"],
            }
            for query, test in found.get("vs_solo", {}).items()
        }
        if tests:
            found["reach"] = max(max(abs(t["low"]), abs(t["high"])) for t in tests)
            found["smallest"], found["largest"] = (f(t["p"] for t in tests) for f in (min, max))
    return {
        **summary["methods"],
        "tasks": _by_task(suite),
        "first": first,
        "count": len(summary["tasks"]),
    }


def _of_seed(suite: str, seed: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    rows = transfer.stored(suite)
    for method, mine in rows.items():
        one = [row for row in mine if row["seed"] == seed]
        for task, (a, _) in pairs(one, rows["solo"]).items():
            found.setdefault(task, {})[method] = a
    return found


def _ablations(suite: str, *, each: bool = False) -> Mapping[str, Any]:
    """Areas and their differences to the default, by changed part, over the tasks of all parts.

    Args:
        suite: The suite.
        each: Over each part's own tasks instead.
    """
    rows = transfer.stored(suite + transfer.OF_PARTS, methods=transfer.PARTS)
    common = set.intersection(*({row["task"] for row in mine} for mine in rows.values()))
    found = {}
    for name, mine in rows.items():
        both = pairs([row for row in mine if each or row["task"] in common], rows["fts"])
        gaps = [a[:, 1:21].mean(axis=1) - b[:, 1:21].mean(axis=1) for a, b in both.values()]
        area = float(np.mean([a[:, 1:21].mean() for a, _ in both.values()]))
        found[name] = {
            "area": area,
            **vars(effect(gaps)),
            "seeds": min(len(a) for a, _ in both.values()),
            "at": {
                str(q): float(np.mean([(a[:, q] - b[:, q]).mean() for a, b in both.values()]))
                for q in SHOWN
                if all(q < a.shape[1] for a, _ in both.values())
            },
        }
    return found


def _by_task(suite: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Of every task and method the mean regret, and the difference to solo over its seeds."""
    rows = transfer.stored(suite)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for method, mine in rows.items():
        for task, (a, b) in pairs(mine, rows["solo"]).items():
            cells = found.setdefault(task, {}).setdefault(method, {})
            for q in (0, *SHOWN):
                if q < a.shape[1]:
                    gap = effect(a[:, q] - b[:, q])
                    cells[str(q)] = {
                        **vars(gap),
                        "regret": float(a[:, q].mean()),
                        "solo": float(b[:, q].mean()),
                    }
    return found


def _against(suite: str, other: str) -> Mapping[str, Any]:
    """Every method minus another than solo, by task: regrets and differences over seeds."""
    rows = transfer.stored(suite)
    found: dict[str, Any] = {}
    for method, mine in rows.items():
        for task, (a, b) in pairs(mine, rows[other]).items():
            found.setdefault(task, {})[method] = {
                str(q): {
                    **vars(effect(a[:, q] - b[:, q])),
                    "regret": float(a[:, q].mean()),
                    "other": float(b[:, q].mean()),
                }
                for q in SHOWN
                if q < a.shape[1]
            }
    return found


COMPARED = ("ei-warped", "ours", "ours-no-portfolio")  # what sentences compare rows of FTS with


def _fts(entry: str) -> Mapping[str, Any]:
    best: dict[str, dict[int, dict[tuple[int, int], float]]] = {}
    times = (1, 2, 3, 5, 10, 20, 50)
    for line in Results(f"fts/{entry}", fts.keys_of(entry)).lines:
        for t in times:
            at = best.setdefault(line["row"], {}).setdefault(t, {})
            at[line["target"], line["repeat"]] = line["best"][str(t)]
    found: dict[str, Any] = {
        row: {
            **{str(t): _mean(of[t]) for t in times},
            "minus": {
                other: {str(t): _versus(of[t], best[other][t]) for t in times}
                for other in COMPARED
                if other in best and other != row
            },
        }
        for row, of in best.items()
    }
    last = [found[row]["50"] for row in best]
    return {**found, "spread": max(last) - min(last)}


def _mean(values: Mapping[Any, float]) -> float:
    return float(np.mean(list(values.values())))


def _versus(mine: Mapping[Any, float], theirs: Mapping[Any, float]) -> dict[str, Any] | None:
    """The effect of a row, and its mean over the runs that both have."""
    gap = paired(mine, theirs, cluster=lambda key: key[0])
    if gap is None:
        return None
    return {**vars(gap), "mine": _mean({k: v for k, v in mine.items() if k in theirs})}


def _dp(entry: str) -> Mapping[str, Any]:
    task: Any = {**dp_fts_de.TASKS, **dp_fts_de.CONTINUOUS}[entry]
    found: dict[str, Any] = {}
    for starts in task.starts:
        curves = dp_fts_de.Curves(Results(f"dp_fts_de/{entry}", dp_fts_de.KEYS), task.loss, starts)
        for row in curves.rows():
            found.setdefault(row, {})[str(starts)] = {
                **{str(t): curves.mean(row, t) for t in task.times},
                **{f"best{t}": 1 - curves.mean(row, t) for t in task.times},
                **{
                    f"accuracy{t}": float(
                        np.mean([line["best"][str(t)] for line in curves.lines(row=row)])
                    )
                    for t in task.times
                },
                "epsilon": curves.lines(row=row)[0].get("epsilon"),
            }
    return found


def _bandit(figure: str) -> Mapping[str, Any]:
    return _by_alpha(private_ucb.SUMMARIES[figure][0](figure)["rows"])


def _by_alpha(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Rows of a summary of bandits by name and setting."""
    found: dict[str, Any] = {}
    for row in rows:
        name = row.get("row") or f"{row['environment']}-{row['mechanism']}"
        place = found.setdefault(name, {})
        alpha = "none" if row["alpha"] is None else f"{row['alpha']:g}"
        if row.get("delta") == private_ucb.SMALL:
            alpha += "-small"
        place[alpha] = {
            **row,
            **dict(zip(("mean", "low", "high"), row["regret"], strict=True)),
        }
    for place in found.values():
        if ratios := [of["over_former"] for of in place.values() if of.get("over_former")]:
            place["over_former"] = {"least": min(ratios), "most": max(ratios)}
    return found


def _fidelity(task: str) -> Mapping[str, Any]:
    """Regrets of each arm of a task by cost, and its differences to others, ``minus``."""
    arms = json.loads(fidelity.RESULTS.read_text())[task]
    found: dict[str, Any] = {}
    for arm, runs in arms.items():
        regrets, cpu = fidelity.means(runs)
        known = {str(q): None if math.isnan(value) else value for q, value in regrets.items()}
        found[arm] = {**known, "cpu": cpu, "minus": {}}
    for one, other in fidelity.PAIRS:
        if gap := fidelity.difference(arms, one, other):
            at = {str(q): {"mean": mean, "p": p} for q, (mean, p) in gap.at.items()}
            found[one]["minus"][other] = {**at, "seeds": gap.seeds}
    return found


def _outcomes(against: str) -> Mapping[str, Any]:
    """Means by task, arm and query, with p values against an arm, over the seeds of both."""
    stored = json.loads(outcomes.RESULTS.read_text())
    lines: Iterable[Mapping[str, Any]] = outcomes.lines_of(stored, against)
    found: dict[str, Any] = {}
    for line in lines:
        found.setdefault(line["task"], {})[line["arm"]] = {
            **{str(q): {"mean": line[f"@{q}"], "p": line[f"p {q}"]} for q in outcomes.POINTS},
            "seeds": line["seeds"],
            "cpu": line["CPU ms"],
        }
    return found


def _cec(entry: str) -> Mapping[str, Any]:
    out = fed_gp.cec_summary(entry)
    known = {
        method: {unit: row[method] for unit, row in out["mean"].items() if method in row}
        for method in out["seeds"]
    }
    later = ("default", "sequential", "fmtbo")
    eight = {m: values for m, values in known.items() if m not in later}
    out["rank_of_eight"] = average_ranks(eight)
    out["printed"] = fedgp_table1()["FBO-FedGP"]
    out["by"] = {
        unit: {**row, "printed": out["printed"][unit]} for unit, row in out["mean"].items()
    }
    ours, theirs = known["ours"], known["faithful"]
    out["wins_over_faithful"] = sum(ours[unit] < theirs[unit] for unit in theirs)
    out["printed_is_better"] = sum(out["printed"][unit] < ours[unit] for unit in theirs)
    return out


def _dropout() -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for line in Results("faults/dropout", ("protocol", "dropout", "seed")).lines:
        found.setdefault(f"{100 * line['dropout']:.0f}", {})[line["protocol"]] = line["regret"]
    return found


def _faults() -> Mapping[str, Any]:
    """The matrix of kills as one row, and the mutated messages."""
    lines = Results("faults/matrix", ("federation", "every", "seeds")).lines
    numbers = [key for key, value in lines[0].items() if type(value) is int]
    (fuzz,) = Results("faults/fuzz", ("fuzz_messages",)).lines
    shares = {f"{key}_percent": 100 * fuzz[f"fuzz_{key}_share"] for key in ("reframed", "cipher")}
    total = {key: sum(line[key] for line in lines) for key in numbers}
    return {**total, "federations": len(lines), **fuzz, **shares}


SOURCES: dict[str, Callable[[str], Any]] = {
    "transfer": _transfer,
    "ablations": _ablations,
    "ablations-each": lambda suite: _ablations(suite, each=True),
    "against-default-first": lambda suite: _against(suite, "default_first"),
    "against-fts": lambda suite: _against(suite, "fts"),
    "fts": _fts,
    "dp_fts_de": _dp,
    "private_ucb": _bandit,
    "private_ucb_defaults": lambda _: _by_alpha(private_ucb_defaults.summary()),
    "fidelity": _fidelity,
    "fidelity_tasks": fidelity_tasks.correlations,
    "outcomes": _outcomes,
    "cec": _cec,
    "bases": lambda _: transfer_bases.means(json.loads(transfer_bases.RESULTS.read_text())),
    "tasks": fed_gp.task_summary,
    "dropout": lambda _: _dropout(),
    "faults": lambda _: _faults(),
    "json": lambda name: json.loads(
        (HOME / "results" / f"{name.replace('.', '/')}.json").read_text()
    ),
}


@cache
def source(name: str) -> Any:
    """A summary of committed files, ``family/entry``."""
    family, _, entry = name.partition("/")
    if family not in SOURCES:
        raise ValueError(f"quoted.toml names {name!r}: families are {sorted(SOURCES)}.")
    return SOURCES[family](entry)


def value_of(expression: str) -> float | None:
    """The value of keys of summaries, ``family/entry:a.b``, or a difference of two.

    None where a summary says that there is none.
    """
    if " - " in expression:
        first, second = (value_of(part) for part in expression.split(" - ", 1))
        return None if first is None or second is None else first - second
    name, _, path = expression.partition(":")
    found = source(name)
    keys = path.split(".")
    while keys:
        if isinstance(found, Sequence):
            found = found[int(keys.pop(0))]
            continue
        # Keys may have points of their own: the longest that fits.
        for length in range(len(keys), 0, -1):
            if (key := ".".join(keys[:length])) in found:
                found, keys = found[key], keys[length:]
                break
        else:
            raise KeyError(f"{name} has no {path!r}: {sorted(map(str, found))[:12]}")
    return None if found is None else float(found)


def expanded(text: str) -> list[str]:
    """Keys with ``{a,b}`` alternatives written out, in order."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        return [text]
    parts = match.group(1).split(",")
    return [
        done
        for part in parts
        for done in expanded(text[: match.start()] + part.strip() + text[match.end() :])
    ]


# ------------------------------------------------------------------ numbers on a page


@dataclass(frozen=True)
class Figure:
    """A number on a page.

    Attributes:
        text: As it stands.
        start: Where in the page.
    """

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def value(self) -> float:
        return float(self.text.replace(",", "").replace("−", "-"))

    def says(self, value: float) -> bool:
        """Whether it is the value, rounded as it is printed."""
        if "e" in self.text:
            mantissa, _, power = self.text.partition("e")
            step = 10.0 ** (int(power) - len(mantissa.partition(".")[2]))
        else:
            step = 10.0 ** -len(self.text.partition(".")[2])
        return abs(self.value - value) <= 0.5001 * step

    def rewritten(self, value: float, *, p: bool) -> str:
        """The value as this one is printed; p values to one digit where that would be none."""
        digits = len(self.text.partition(".")[2])
        said = f"{value:{'+' if self.text.startswith('+') else ''},.{digits}f}"
        if "," not in self.text:
            said = said.replace(",", "")
        if p and ("e" in self.text or value < 2 * 10**-digits):
            said = f"{value:.1g}"
        bare = self.text.lstrip("+-−").startswith(".")
        return re.sub(r"^([-+]?)0\.", r"\1.", said) if bare else said


@dataclass(frozen=True)
class Match:
    """A figure on a page and what it should be."""

    figure: Figure
    expression: str
    value: float | None


class PageText:
    """A page: its figures, and what accounts for them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = (ROOT / name).read_text()
        self.markdown = name.endswith(".md")
        self.hidden = _hidden(self.text, markdown=self.markdown)
        self.cells = list(_markdown_cells(self.text) if self.markdown else _rst_cells(self.text))
        self.accounted: set[int] = set()  # where figures start
        self.matches: list[Match] = []
        self.errors: list[str] = []

    def figures(self, start: int, end: int) -> list[Figure]:
        """The numbers of a part of the page."""
        return [
            Figure(match.group(), match.start())
            for match in TOKEN.finditer(self.text, start, end)
            if not any(a <= match.start() < b for a, b in self.hidden)
        ]

    def section(self, title: str | None) -> tuple[int, int]:
        """From a heading to the next."""
        if title is None:
            return 0, len(self.text)
        heads = [(m.start(), m.group(1)) for m in _headings(self.text, markdown=self.markdown)]
        for n, (start, head) in enumerate(heads):
            if head.strip() == title:
                return start, heads[n + 1][0] if n + 1 < len(heads) else len(self.text)
        raise ValueError(f"{self.name} has no section {title!r}: {[head for _, head in heads]}")

    def account(self, figure: Figure, expression: str) -> None:
        """A figure comes from there."""
        self.accounted.add(figure.start)
        try:
            self.matches.append(Match(figure, expression, value_of(expression)))
        except KeyError as error:
            self.errors.append(f"{self.name}: {expression}: {error}")

    def unaccounted(self) -> Iterator[Figure]:
        """Figures that nothing accounts for."""
        in_cells = [
            (cell.start, cell.end)
            for cell in self.cells
            if cell.column > 0
            and cell.row > 0
            and not re.search(r"[^\W\d_]{3,}", self.text[cell.start : cell.end])
        ]
        labels = [(c.start, c.end) for c in self.cells if c.column == 0 or c.row == 0]
        for figure in self.figures(0, len(self.text)):
            if figure.start in self.accounted:
                continue
            if any(a <= figure.start < b for a, b in labels):
                continue
            percent = re.match(r"\s?(?:%|per cent)", self.text[figure.end : figure.end + 9])
            cell = any(a <= figure.start < b for a, b in in_cells)
            if cell or percent or "." in figure.text or "e" in figure.text:
                yield figure

    def line_at(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1


def _headings(text: str, *, markdown: bool) -> Iterator[re.Match[str]]:
    pattern = r"^#+ (.+)$" if markdown else r"^(\S.*)\n(?:=+|-+|~+)$"
    return re.finditer(pattern, text, re.M)


def _hidden(text: str, *, markdown: bool) -> list[tuple[int, int]]:
    """Code, literals, links and mathematics: no figures in them."""
    patterns = (
        [r"^```(?s:.*?)^```", r"`[^`\n]*`", r"\]\([^)]*\)", r"^#+ .*$", r"<!--(?s:.*?)-->"]
        if markdown
        else [
            r"``(?s:.*?)``",
            r"^\.\. (?:code-block|math|toctree|currentmodule)::(?s:.*?)(?=^\S|\Z)",
            r"::\n\n(?:(?:   .*)?\n)+",
            r"^ *>>> .*\n(?: *(?:>>>|\.\.\.) .*\n)*",
            r":math:`[^`]*`",
            r"`[^`]*`_?",
            r"^\S.*\n(?:=+|-+|~+)$",
            r"^ *:[a-z-]+:.*$",
        ]
    )
    return [m.span() for pattern in patterns for m in re.finditer(pattern, text, re.M)]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: which table, row and column, and where it is."""

    table: int
    row: int
    column: int
    start: int
    end: int


def _markdown_cells(text: str) -> Iterator[Cell]:
    table, row, last = -1, 0, -2
    for n, match in enumerate(re.finditer(r"^.*$", text, re.M)):
        line = match.group()
        if not line.startswith("|"):
            continue
        if n != last + 1:
            table, row = table + 1, 0
        last = n
        if set(line) <= set("|-: "):
            continue
        position = match.start()
        bounds = [position + i for i, c in enumerate(line) if c == "|"]
        for column, (a, b) in enumerate(pairwise(bounds)):
            yield Cell(table, row, column, a + 1, b)
        row += 1


def _rst_cells(text: str) -> Iterator[Cell]:
    for table, whole in enumerate(
        re.finditer(r"^\.\. list-table::.*\n(?:(?:   .*)?\n)+", text, re.M)
    ):
        starts = [m.start() for m in re.finditer(r"^   [* ] - ?", whole.group(), re.M)]
        row = column = -1
        for n, start in enumerate(starts):
            end = starts[n + 1] if n + 1 < len(starts) else len(whole.group())
            if whole.group()[start + 3] == "*":
                row, column = row + 1, -1
            column += 1
            yield Cell(table, row, column, whole.start() + start + 6, whole.start() + end)


# ------------------------------------------------------------------ the registry


@cache
def registry() -> dict[str, Any]:
    """The entries of `quoted.toml` by kind."""
    return tomllib.loads(REGISTRY.read_text())


@cache
def read(name: str) -> PageText:
    """A page with all that accounts for its figures."""
    page = PageText(name)
    entries = registry()
    for entry in entries.get("table", []):
        if entry["page"] == name:
            _account_table(page, entry)
    for entry in entries.get("quote", []):
        if entry["page"] == name:
            _account_quote(page, entry)
    for entry in entries.get("unsourced", []):
        if entry["page"] == name:
            for figure in _found(page, entry):
                page.accounted.add(figure.start)
    for entry in entries.get("setting", []):
        if entry.get("page", name) == name:
            for match in re.finditer(entry["pattern"], page.text, re.M):
                for figure in page.figures(*match.span()):
                    page.accounted.add(figure.start)
    return page


def _account_table(page: PageText, entry: Mapping[str, Any]) -> None:
    """Every cell of a table that the entry has keys for."""
    start, end = page.section(entry.get("section"))
    tables = sorted({cell.table for cell in page.cells if start <= cell.start < end})
    if entry.get("nth", 0) >= len(tables):
        page.errors.append(f"{page.name}: no table {entry.get('nth', 0)} in {entry.get('section')}")
        return
    number = tables[entry.get("nth", 0)]
    rows: dict[int, dict[int, Cell]] = {}
    for cell in page.cells:
        if cell.table == number:
            rows.setdefault(cell.row, {})[cell.column] = cell
    unused, columns = dict(entry["rows"]), entry["columns"]
    if isinstance(columns, str):  # the name of columns that several tables have
        columns = registry()["columns"][columns]
    for _, cells in sorted(rows.items())[1:]:
        label = " ".join(page.text[cells[0].start : cells[0].end].split())
        if label not in unused:
            page.errors.append(f"{page.name}: quoted.toml has no row {label!r}")
            continue
        prefix = unused.pop(label)
        for column, keys in enumerate(columns, start=1):
            if column in cells and keys:
                _account_cell(page, cells[column], entry.get("from", ""), prefix, keys.split())
    page.errors += [f"{page.name}: the table has no row {label!r}" for label in unused]


def _account_cell(page: PageText, cell: Cell, name: str, prefix: str, keys: Sequence[str]) -> None:
    figures = page.figures(cell.start, cell.end)
    paths = [key.replace("@", prefix) if "@" in key else f"{name}:{prefix}.{key}" for key in keys]
    for figure, path in zip(figures, paths, strict=False):
        page.account(figure, path)
    for figure in figures[len(paths) :]:
        page.errors.append(f"{page.name}:{page.line_at(figure.start)}: {figure.text} has no key")
    if not figures:
        try:
            value = value_of(paths[0])
        except KeyError:
            return
        shown = " ".join(page.text[cell.start : cell.end].split())
        if value is not None:
            where = page.line_at(cell.start)
            page.errors.append(f"{page.name}:{where}: says {shown!r}, {paths[0]} is {value:.6g}")


def _found(page: PageText, entry: Mapping[str, Any]) -> list[Figure]:
    """The figures at the places of ``#`` in an entry's sentence, or of a whole table."""
    start, end = page.section(entry.get("section"))
    if "nth" in entry:
        tables = sorted({cell.table for cell in page.cells if start <= cell.start < end})
        number = tables[entry["nth"]]
        return [
            figure
            for cell in page.cells
            if cell.table == number
            for figure in page.figures(cell.start, cell.end)
        ]
    pattern = ""
    for part in re.split(r"(#|\s+)", " ".join(entry["says"].split())):
        pattern += f"({NUMBER})" if part == "#" else r"\s+" if part.isspace() else re.escape(part)
    matches = list(re.finditer(pattern, page.text[start:end]))
    if len(matches) != 1:
        said = "nowhere" if not matches else f"{len(matches)} times"
        page.errors.append(f"{page.name}: {entry['says'][:80]!r} is there {said}, not once")
        return []
    (match,) = matches
    return [
        Figure(match.group(n), start + match.start(n)) for n in range(1, (match.lastindex or 0) + 1)
    ]


def _account_quote(page: PageText, entry: Mapping[str, Any]) -> None:
    figures = _found(page, entry)
    given = entry["are"]
    keys = [
        key for text in ([given] if isinstance(given, str) else given) for key in expanded(text)
    ]
    if figures and len(figures) != len(keys):
        page.errors.append(
            f"{page.name}: {entry['says'][:60]!r} has {len(figures)} figures, {len(keys)} keys"
        )
        return
    for figure, key in zip(figures, keys, strict=False):
        page.account(figure, key)


# ------------------------------------------------------------------ what is wrong, and writing


def check_pages(names: Iterable[str] | None = None) -> list[str]:
    """Figures that files do not have, or that nothing accounts for."""
    wrong = []
    for name in pages() if names is None else names:
        page = read(name)
        wrong += page.errors
        for match in page.matches:
            where = f"{name}:{page.line_at(match.figure.start)}"
            if match.value is None or math.isnan(match.value):
                wrong.append(f"{where}: says {match.figure.text}, {match.expression} has no value")
            elif not match.figure.says(match.value):
                said = f"{match.expression} is {match.value:.6g}"
                wrong.append(f"{where}: says {match.figure.text}, {said}")
        for figure in page.unaccounted():
            number = page.line_at(figure.start)
            line = page.text.splitlines()[number - 1].strip()
            said = f"{figure.text} is in no entry of quoted.toml: {line[:90]}"
            wrong.append(f"{name}:{number}: {said}")
    return wrong


def rewrite_pages() -> list[str]:
    """Write figures that have changed into the pages; the names of those that changed."""
    changed = []
    for name in pages():
        page = read(name)
        text = page.text
        for match in sorted(page.matches, key=lambda m: m.figure.start, reverse=True):
            figure, value = match.figure, match.value
            if value is not None and not figure.says(value):
                said = figure.rewritten(value, p=match.expression.endswith(".p"))
                text = text[: figure.start] + said + text[figure.end :]
        if text != page.text:
            (ROOT / name).write_text(text)
            changed.append(name)
    return changed


def unsourced() -> str:
    """The sentences whose figures no committed file has."""
    lines = ["Measured by the command when it was asked for; nothing compares them.\n"]
    for entry in registry().get("unsourced", []):
        said = " ".join(entry["says"].split()).replace("#", "…")
        lines.append(f"- {entry['page']}: “{said}”: {entry['why']}")
    return "\n".join(lines) + "\n"
