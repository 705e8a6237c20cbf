"""Figures and reports of results.

::

    plot_audit    the measurements of an audit and the claimed guarantee
    write_report  a run as one self-contained HTML file

Only this module needs matplotlib.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from botorch.exceptions.errors import InputDataError
from scipy.special import stdtrit

from botorch_fed.federation.disclosure import Sees, entries_of, first_payments
from botorch_fed.privacy.audit import AuditReport, Check
from botorch_fed.run import write_private

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from botorch_fed.run import Record, RunResult
from botorch_fed.space import Parameter, SearchSpace

_CLAIMED, _MEASURED, _BOUNDS, _FAILED = "#444444", "#0072b2", "#009e73", "#d55e00"
_FARTHEST = 100.0  # longest bar, in multiples of the limit
_NO_MATPLOTLIB = 'needs matplotlib: pip install "botorch_fed[plot]".'


def plot_audit(report: AuditReport) -> Figure:
    """The measurements of an audit and the claimed guarantee.

    Left, the errors of tests that distinguish the two worlds. The claim excludes the grey area
    below its trade-off curve. The line shows the measured errors, the squares are confidence bounds
    at the audited thresholds; a square in the grey area is a violation. Right, every check as a
    share of its limit; a share above one is a failure.

    Args:
        report: The report of `audit` or `audit_transcripts`.

    Returns: A figure without a window; save it by ``figure.savefig(path)``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plot_audit {_NO_MATPLOTLIB}") from error

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    errors, shares = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_errors(errors, report)
    _draw_shares(shares, report.checks)
    mark = "passed" if report.passed else "FAILED"
    figure.suptitle(f"Audit {mark}: {report.guarantee!r}", fontsize=9, wrap=True)
    return figure


def _draw_errors(axes: Any, report: AuditReport) -> None:
    grid = torch.linspace(0, 1, 401, dtype=torch.float64)
    least = report.claim.least_misses(grid)
    axes.fill_between(grid, least, color=_CLAIMED, alpha=0.15, linewidth=0)
    axes.plot(grid, least, color=_CLAIMED, label="claimed lower bound of all tests")
    alarms, misses = _measured_curve(report.scores)
    axes.plot(alarms, misses, color=_MEASURED, label=f"measured, {report.runs} runs per world")
    bounds = [(point.false_alarms_bound, point.misses_bound) for point in report.points]
    label = f"upper bounds of both errors, confidence {report.confidence:.4g}"
    axes.plot(*zip(*bounds, strict=True), "s", color=_BOUNDS, label=label, clip_on=False)
    axes.set(xlabel="false alarms", ylabel="misses", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _measured_curve(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of false alarms and misses at every threshold; `scores` is `2 x runs`."""
    thresholds = scores.flatten().sort().values
    without, present = (world.sort().values for world in scores)
    runs = scores.shape[-1]
    below = torch.searchsorted(without, thresholds, right=True)
    missed = torch.searchsorted(present, thresholds, right=True)
    return 1 - below / runs, missed / runs


def _draw_shares(axes: Any, checks: tuple[Check, ...]) -> None:
    rows = range(len(checks))
    shares = [_share(check) for check in checks]
    colours = [_MEASURED if check.passed else _FAILED for check in checks]
    axes.barh(rows, shares, color=colours, height=0.6)
    axes.axvline(1, color=_CLAIMED)
    labels = [f"{check.name} {check.relation} {check.limit:.3g}" for check in checks]
    axes.set_yticks(rows, labels, fontsize=7)
    axes.invert_yaxis()
    if max(shares) > 3:
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.set_xlim(0, 1.1 * max(1, *shares))
    axes.set_xlabel("share of the limit")


def _share(check: Check) -> float:
    """The measurement of a check as a share of its limit."""
    used, allowed = check.measured, check.limit
    if check.relation == ">=":
        used, allowed = allowed, used
    if used <= 0:
        return 0.0
    return min(used / allowed, _FARTHEST) if allowed > 0 else _FARTHEST


# ------------------------------------------------------------------ the report of a run


def write_report(
    result: RunResult,
    path: str | Path,
    *,
    others: Mapping[str, RunResult] = {},
    title: str | None = None,
) -> Path:
    """A run as one HTML file without scripts or network access, for screen and print.

    The sections are the guarantee, convergence over agents and per agent, the payments, the
    messages, the evaluated points, absences and failures, and the readers of each message. A
    section without data is left out.

    The file shows every agent's points and outcomes; the guarantee of the run does not cover it.

    Args:
        result: The result of `run`, or `RunResult.load(folder)`.
        path: The file, which is replaced if it exists.
        others: Runs to compare with, by label, for example "alone" or "pooled". Differences are
            paired by the names of the agents.
        title: The heading; by default the protocol and the number of agents.

    Returns: The path.

    Example:
        >>> result = run(FTS(budget=12), SklearnTuning(num_agents=8), seed=0)
        >>> write_report(result, "report.html")
        PosixPath('report.html')
    """
    _check_comparable(result, others)
    several = len(result.space.objectives) > 1
    worst = result.reference_point() if several else None  # one for all runs
    runs = [_Run(f"this run ({result.protocol})", 0, result, worst)]
    runs += [
        _Run(label, i, other, worst) for i, (label, other) in enumerate(others.items(), start=1)
    ]
    heading = title or f"{result.protocol}, {_count(len(result.names), 'agent')}"
    with _drawing():
        sections = [section for section in _sections(runs) if section.parts]
    page = _page(heading, sections)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, page.encode("utf-8", "replace"))  # lone surrogates become question marks
    return path


def _check_comparable(result: RunResult, others: Mapping[str, RunResult]) -> None:
    for label, other in others.items():
        if (result.space.outcomes or other.space.outcomes) and (
            result.space.metrics != other.space.metrics
        ):
            raise InputDataError(
                f"Expected runs with the same outcomes, got others in {label!r}: its values cannot "
                "be compared."
            )
        if other.space.outcome.minimize != result.space.outcome.minimize:
            raise InputDataError(
                f"Expected runs that all minimise or all maximise, got the other direction in "
                f"{label!r}: its values cannot be compared."
            )


@dataclass(frozen=True)
class _Section:
    """A part of the page; without `parts` it is left out."""

    key: str
    title: str
    parts: list[str]


@dataclass(frozen=True)
class _Run:
    """A run with its label and line style; with several objectives the reference point."""

    label: str
    place: int
    result: RunResult
    reference: Mapping[str, float] | None = None

    @cached_property
    def best(self) -> dict[str, list[float]]:
        """The best values so far of all agents that have any, or their hypervolumes.

        NaN while no observation meets all constraints, or none is at the target of the fidelity.
        """
        curves = {name: self._curve(name) for name in self.result.names}
        return {name: curve for name, curve in curves.items() if _known(curve)}

    def _curve(self, name: str) -> list[float]:
        if self.reference is not None:
            return self.result.hypervolume(name, self.reference).tolist()
        values = self.result.best(name)
        return values.where(values.isfinite(), math.nan).tolist()

    @property
    def measure(self) -> str:
        """What `best` shows."""
        return "best value" if self.reference is None else "hypervolume"

    @property
    def privacy(self) -> dict[str, Any]:
        return self.result.privacy or {}

    @property
    def sign(self) -> float:
        smaller = self.reference is None and self.result.space.outcome.minimize
        return -1.0 if smaller else 1.0

    @property
    def colour(self) -> str:
        return _PALETTE[self.place % len(_PALETTE)][0]

    @property
    def dash(self) -> tuple[float, ...]:
        return _DASHES[self.place % len(_DASHES)]

    @property
    def marker(self) -> str:
        return _MARKERS[self.place % len(_MARKERS)]

    @property
    def line(self) -> dict[str, Any]:
        """The line style for matplotlib."""
        width = 2.2 if self.place == 0 else 1.6
        return {"color": self.colour, "linestyle": _linestyle(self.dash), "linewidth": width}


def _sections(runs: list[_Run]) -> Iterator[_Section]:
    this = runs[0]
    result = this.result
    yield _Section("summary", "Summary", _summary(this))
    yield _Section("convergence", "Convergence", _convergence(runs))
    yield _Section("agents", "Agent by agent", _agents(runs))
    yield _Section("outcomes", "Best trials of each agent", _outcomes(result))
    yield _Section("privacy", "Privacy spent", _privacy(this))
    yield _Section("utility", "Privacy and utility", _utility(runs))
    yield _Section("communication", "Communication and time", _communication(result))
    yield _Section("points", "Evaluated points", _points(result))
    yield _Section("absences", "Absences and failures", _absences(result))
    yield _Section("threats", "Who sees what", _threats(result))


# ------------------------------------------------------------------ summary


def _summary(run: _Run) -> list[str]:
    result = run.result
    rounds = {row["round"] for row in result.rounds}
    facts = [
        ("Protocol", result.protocol),
        ("Agents", str(len(result.names))),
        ("Seed", str(result.seed)),
        ("Budget", _budget(result)),
        *_fidelity(result.space),
        ("Evaluations", str(len(result.records))),
        ("Evaluations that failed", str(sum(row["y"] is None for row in result.records))),
        ("Observations before the run", str(len(result.given))),
        ("Exchanges of messages", str(len(rounds)) if rounds else "not recorded"),
        ("Versions", ", ".join(f"{name} {v}" for name, v in result.versions.items())),
    ]
    head = ("Parameter", "Kind", "Range or values", "Scale")
    rows = [[p.name, p.kind, _range(p), p.scale] for p in result.space.parameters]
    outcome = "smaller is better" if result.space.outcome.minimize else "larger is better"
    if result.space.outcomes:
        outcome = "; ".join(one.words for one in result.space.outcomes)
    return [
        *_guarantee(result),
        _facts("The run", facts),
        _table(
            f"Search space; of the outcome{'s' * bool(result.space.outcomes)}, {outcome}",
            head,
            [_cells(row) for row in rows],
        ),
        *_constraints(result.space),
    ]


def _constraints(space: SearchSpace) -> list[str]:
    words = space.constraint_words
    if not words:
        return []
    rows = [_cells([one]) for one in words]
    return [_table("Constraints, which every point of a search meets", ("Constraint",), rows)]


def _budget(result: RunResult) -> str:
    if result.budget is None:
        return "not recorded"
    return f"{_count(result.budget, 'evaluation')} of each agent, initial ones included"


def _range(parameter: Parameter) -> str:
    if parameter.values:
        return ", ".join(map(str, parameter.values))
    return f"{parameter.lower:g} to {parameter.upper:g}"


_WHOSE = {
    "whole": "This file is for the person who ran the simulation. It holds every agent's points "
    "and outcomes, and no guarantee covers it.",
    "hub": "This is the hub's part of a run across machines. Points and outcomes are at the sites.",
    "site": "This is one site's part of a run across machines, for that site only. It holds its "
    "points and outcomes, which no guarantee covers. The hub's report has the promise of the run "
    "to other parties.",
}


def _guarantee(result: RunResult) -> list[str]:
    account = result.privacy or {}
    note = _paragraph(_WHOSE[result.part])
    if result.part == "site":
        return [note]
    if "epsilon" not in account:
        return [_banner("warn", "No privacy guarantee.", "This run has none."), note]
    if not account.get("private"):
        return [
            _banner(
                "bad",
                "Not private: the noise was seeded.",
                "A reader who knows or guesses the seed can subtract the noise: nothing is "
                "protected. The numbers below are the guarantee of noise of this size from the "
                "operating system.",
            ),
            _paragraph(_promise(account, "would be")),
            note,
        ]
    return [_banner("good", "The guarantee.", _promise(account)), *_large_delta(result), note]


_WORLDS = {
    "zero-out": "in which all contributions of one {unit} are zero",
    "replace-one": "in which the contributions of one {unit} are any other admissible ones",
}


def _promise(account: Mapping[str, Any], verb: str = "is") -> str:
    unit, adjacency = account["unit"], account["adjacency"]
    world = _WORLDS.get(adjacency, "that differs in one {unit}").format(unit=unit)
    return (
        f"The releases of the whole run {verb} (ε, δ)-indistinguishable from those of a run "
        f"{world}, with ε ≤ {_upper(account['epsilon'])} and δ = {_upper(account['delta'])}, per "
        f"{unit}, adjacency {adjacency}, {_count(account['releases'], 'release')}, by the "
        f"accountant {account['accountant']}."
    )


def _large_delta(result: RunResult) -> list[str]:
    account = result.privacy or {}
    if account["unit"] != "agent" or account["delta"] * len(result.names) <= 0.1:
        return []
    return [
        _paragraph(
            f"δ is large: {account['delta']:.3g} is not well below one over {len(result.names)} "
            "agents. ε alone does not describe the guarantee."
        )
    ]


# ------------------------------------------------------------------ convergence


def _convergence(runs: list[_Run]) -> list[str]:
    shown = [run for run in runs if run.best]
    if not runs[0].best:
        return []
    tables = [_best_table(shown)]
    if len(shown) > 1:
        tables.append(_difference_table(shown))
    words = _MEASURES[runs[0].measure] + (
        "Intervals are Student's t over the agents of one run: they show the differences "
        "between agents, not between seeds. Initial points count as queries, and each query "
        "includes the agents with at least that many."
    )
    return [_convergence_figure(shown), _paragraph(words), *tables]


_MEASURES = {
    "best value": "The best value so far is the noise-free one if the problem defines it, else the "
    "observed one. Agents count from their first point that meets all constraints on. ",
    "hypervolume": "The hypervolume is that of all values that an agent has observed and that meet "
    "all constraints, in the units in which they were measured, with one reference point for all: "
    "that of the space, and else the worst values that this run has observed. ",
}


def _convergence_figure(runs: list[_Run]) -> str:
    curves: list[tuple[str, list[tuple[_Run, dict[str, list[float]]]]]] = [
        (f"{runs[0].measure} so far", [(run, run.best) for run in runs])
    ]
    regrets = [
        (run, _regrets(run))
        for run in runs
        if run.result.optimal_values is not None and not run.result.space.outcomes
    ]
    if any(run.place == 0 for run, _ in regrets):
        curves.append((_regret_name(runs[0]), regrets))
    figure = _canvas(9.6, 3.6)
    for axes, (name, lines) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True
    ):
        for run, values in lines:
            _draw_mean(axes, run, values)
        axes.set(xlabel="query of an agent", ylabel=name)
        _whole_ticks(axes)
    ends = ", ".join(f"{run.label} ends at {_ending(run)}" for run in runs)
    label = f"Mean over agents with 95 % intervals, query by query: {ends}"
    names = " and ".join(name for name, _ in curves)
    caption = f"Mean over agents and 95 % interval of the {names}."
    return _figure(figure, "convergence", label, caption, _legend(runs))


def _regret_name(run: _Run) -> str:
    return f"{run.result.measure} regret"


def _regrets(run: _Run) -> dict[str, list[float]]:
    cumulative = run.result.measure == "cumulative"
    of = run.result.cumulative_regret if cumulative else run.result.regret
    return {name: _finite(of(name).tolist()) for name in run.best}


def _finite(curve: list[float]) -> list[float]:
    return [value for value in curve if math.isfinite(value)]


def _fidelity(space: SearchSpace) -> list[tuple[str, str]]:
    """What a budget counts where there is a fidelity, and which values are best ones."""
    if space.fidelity is None:
        return []
    name, target = space.fidelity.name, space.fidelity_value(1.0)
    words = (
        f"{name}: the budget counts evaluations at {name} = {target:g}, one at the lowest fidelity "
        f"as {space.cheapest:.3g}; best values are those at {name} = {target:g}"
    )
    return [("Fidelity", words)]


def _ending(run: _Run) -> str:
    return _number(_mean(_known(curve[-1] for curve in run.best.values())))


def _draw_mean(axes: Any, run: _Run, curves: dict[str, list[float]]) -> None:
    longest = max(map(len, curves.values()))
    means, low, high, queries = [], [], [], []
    for query in _some_counts(longest, _MOST_DRAWN):
        values = _known(curve[query - 1] for curve in curves.values() if len(curve) >= query)
        if not values:
            continue
        queries.append(query)
        mean, half = _mean(values), _half_width(values)
        means.append(mean)
        low.append(mean - (half or 0.0))
        high.append(mean + (half or 0.0))
    axes.fill_between(queries, low, high, color=run.colour, alpha=0.16, linewidth=0)
    marker = {"marker": "o", "markersize": 4} if longest <= 12 else {}
    axes.plot(queries, means, **run.line, **marker)


def _known(values: Iterable[float]) -> list[float]:
    """Without NaN."""
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    mean = _mean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)


def _at(curve: list[float], query: int | None) -> float | None:
    """The value after a query, the last one for None; None if there are fewer, or it is NaN."""
    if query is not None and len(curve) < query:
        return None
    value = curve[-1 if query is None else query - 1]
    return None if math.isnan(value) else value


def _queries(run: _Run) -> list[int | None]:
    longest = max(map(len, run.best.values()))
    return [query for query in (1, 5, 10) if query < longest] + [None]


def _query_heads(run: _Run) -> list[str]:
    lengths = {len(curve) for curve in run.best.values()}
    span = str(max(lengths)) if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"
    names = ["the last" if query is None else f"query {query}" for query in _queries(run)]
    return [f"after {name}" for name in names[:-1]] + [f"after {names[-1]} ({span})"]


def _best_table(runs: list[_Run]) -> str:
    rows = []
    for run in runs:
        row = [_cell(run.label)]
        for query in _queries(runs[0]):
            values = [_at(curve, query) for curve in run.best.values()]
            row.append(_interval([value for value in values if value is not None]))
        rows.append(row)
    head = ["Run", *_query_heads(runs[0])]
    caption = (
        f"{runs[0].measure.capitalize()} so far: mean over agents, 95 % interval, number of "
        "agents. After the last query: the last one of each agent"
    )
    return _table(caption, head, rows)


def _difference_table(runs: list[_Run]) -> str:
    this = runs[0]
    rows = []
    for other in runs[1:]:
        row = [_cell(other.label)]
        for query in _queries(this):
            row.append(_interval(_differences(this, other, query)))
        rows.append(row)
    head = ["Compared with", *_query_heads(this)]
    caption = (
        f"Paired differences of the {this.measure}: agent by agent, positive where this run is "
        "better. After the last query: the last one that both runs have"
    )
    return _table(caption, head, rows)


def _differences(this: _Run, other: _Run, query: int | None) -> list[float]:
    """Differences of the agents in both runs, at a query that both runs have."""
    differences = []
    for name in this.best.keys() & other.best.keys():
        both = this.best[name], other.best[name]
        k = min(map(len, both)) if query is None else query
        mine, theirs = _at(both[0], k), _at(both[1], k)
        if mine is not None and theirs is not None:
            differences.append(this.sign * (mine - theirs))
    return sorted(differences)  # the sum does not depend on the order of the names


def _interval(values: list[float]) -> str:
    """A cell: the mean of some values, its 95 % interval and their number."""
    if not values:
        return _cell("–", numeric=True)
    half = _half_width(values)
    around = "" if half is None else f" ± {half:.2g}"
    mean = _mean(values)
    small = f'<span class="n">{_text(around)} ({len(values)})</span>'
    return f'<td class="num">{_data(mean)}{small}</td>'


# ------------------------------------------------------------------ agent by agent

_MOST_PANELS = 24
_MOST_DRAWN = 300  # queries on a line or dots of an agent
_MOST_OPEN = 12  # rows of a table that is not folded


def _agents(runs: list[_Run]) -> list[str]:
    best = runs[0].best
    if not best:
        return []
    shown = list(best)[:_MOST_PANELS]
    left = len(best) - len(shown)
    head = ["Agent", *_query_heads(runs[0])]
    rows = []
    for name, curve in best.items():
        cells = [_value_cell(_at(curve, query)) for query in _queries(runs[0])]
        rows.append([_cell(name), *cells])
    measure = runs[0].measure.capitalize()
    table = _table(f"{measure} so far of every agent of this run", head, rows)
    words = f" The first {_MOST_PANELS} of {len(best)} agents; the others are in the table."
    many = max(map(len, best.values())) > _MOST_DRAWN
    optima = runs[0].result.optimal_values and len(runs[0].result.space.metrics) == 1
    dots = f" and {'some ' if many else ''}observations of this run (dots)"
    caption = (
        f"{measure} so far (lines){dots if runs[0].reference is None else ''}"
        + ("; the thin line is the optimum." if optima else ".")
        + (words if left > 0 else "")
    )
    label = f"Small multiples: {measure} so far and observations of {_count(len(shown), 'agent')}"
    drawn = [run for run in runs if run.best.keys() & set(shown)]
    figure = _multiples(drawn, shown)
    return [
        _figure(figure, "agents", label, caption, _legend(drawn)),
        _folded(f"Table of {_count(len(best), 'agent')}", table, len(best)),
    ]


def _multiples(runs: list[_Run], names: list[str]) -> Figure:
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure = _canvas(9.6, 0.6 + 1.7 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, name in zip(panels, names, strict=False):
        _draw_agent(axes, runs, name)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for i, axes in enumerate(panels[: len(names)]):
        if i + columns >= len(names):  # nothing below
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("query")
        if i % columns == 0:
            axes.set_ylabel("value")
    return figure


def _draw_agent(axes: Any, runs: list[_Run], name: str) -> None:
    this = runs[0]
    if this.reference is None:
        values = this.result.history(name)[1][:, this.result.space.objectives[0]].tolist()
        places = _some_counts(len(values), _MOST_DRAWN)
        shown = [values[k - 1] for k in places]
        axes.plot(places, shown, ".", color=_INK, alpha=0.45, markersize=4)
    optima = this.result.optimal_values
    if optima is not None and not this.result.space.outcomes:
        axes.axhline(optima[name], color=_INK, linewidth=0.7, alpha=0.7)
    for run in reversed(runs):  # this run on top
        curve = run.best.get(name, [])
        if curve:
            marker = "o" if len(curve) == 1 else ""
            places = _some_counts(len(curve), _MOST_DRAWN)
            heights = [curve[k - 1] for k in places]
            axes.step(places, heights, where="post", marker=marker, **run.line)
    axes.set_title(_short(name), fontsize=8.5)
    _whole_ticks(axes)


_MOST_ROWS = 500  # of a table of fronts


def _outcomes(result: RunResult) -> list[str]:
    """Each agent's best trial, or its front, with all outcomes; for several outcomes only."""
    if not result.space.outcomes:
        return []
    rows, without = [], []
    for name in result.names:
        front = result.pareto(name)
        if not front and any(row["agent"] == name for row in result.records):
            without.append(name)
        for one in front:
            values = [_value_cell(value) for value in one["values"].values()]
            rows.append([_cell(name), *values, *_cells(map(_shown, one["parameters"].values()))])
    parts = []
    if rows:
        names = [f"{one.name} ({one.role})" for one in result.space.outcomes]
        head = ["Agent", *names, *result.space.names]
        several = len(result.space.objectives) > 1
        caption = "Best trials that meet all constraints"
        if several:
            caption = "Trials that meet all constraints, and none beats in all objectives"
        table = _table(caption, head, rows[:_MOST_ROWS])
        parts.append(_folded(f"Table of {_count(len(rows), 'trial')}", table, len(rows)))
    if without:
        words = ", ".join(without[:_MOST_PANELS])
        parts.append(_paragraph(f"No trial meets all constraints yet: {words}."))
    return parts


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------ privacy spent


def _privacy(run: _Run) -> list[str]:
    account = run.privacy
    if not account:
        return []
    return [_privacy_table(account), *_spending(run.result), *_signal(account)]


_PRIVACY_ROWS = {  # the keys of a server's account that are shown
    "epsilon": "ε spent",
    "promised_epsilon": "ε promised before the run",
    "delta": "δ",
    "unit": "Unit",
    "adjacency": "Adjacency",
    "accountant": "Accountant",
    "releases": "Releases paid",
    "private": "Noise from the operating system",
    "exhausted": "Budget exhausted before the end",
    "signal": "Expected signal",
    "mechanism": "Mechanism",
    "settings": "Settings of the mechanism",
    "noise_multiplier": "Noise divided by the norm of one contribution",
    "noise_std": "Standard deviation of the noise",
    "planned_releases": "Releases planned",
    "paid_at": "Paying ledger",
    "channel": "Channel",
    "trust": "Trust",
    "sums": "Opened sums",
    "rekeys": "New joint keys",
    "outcomes": "Outcomes in the newest release",
}


def _privacy_table(account: Mapping[str, Any]) -> str:
    bounds = ("epsilon", "promised_epsilon", "delta")
    facts = [
        (name, _upper(account[key]) if key in bounds else _plain(account[key]))
        for key, name in _PRIVACY_ROWS.items()
        if key in account and (key != "private" or "epsilon" in account)
    ]
    return _facts("Privacy, as the server reports it", facts)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _spending(result: RunResult) -> list[str]:
    """Epsilon payment by payment."""
    account = result.privacy or {}
    if "epsilon" not in account:
        return []
    if account["releases"] < 2:
        words = "One payment covers all releases of the run about one unit."
        return [_paragraph(words if account["releases"] else "Nothing was released.")]
    spent = _spent(result)
    if not spent:
        words = "The stated ε covers all releases together; the result does not list the payments."
        return [_paragraph(words)]
    rounds = account.get("release_rounds")
    by_round = isinstance(rounds, (list, tuple)) and len(rounds) == account["releases"]
    places = [rounds[count - 1] if by_round and rounds else count for count, _ in spent]
    costs = [epsilon for _, epsilon in spent]
    if not by_round:
        places, costs = [0, *places], [0.0, *costs]
    figure = _canvas(9.6, 2.9)
    axes = figure.subplots()
    style = {"color": _PALETTE[0][0], "linewidth": 2.0, "marker": "o", "markersize": 4}
    axes.step(places, costs, where="post", **style)
    axes.axhline(account["epsilon"], color=_INK, linewidth=0.8, linestyle=_linestyle((4, 3)))
    name = "after the release of round" if by_round else "payments"
    axes.set(xlabel=name, ylabel="ε spent", ylim=(0, None))
    _whole_ticks(axes)
    label = (
        f"Epsilon grows to {account['epsilon']:.4g} over {_count(account['releases'], 'release')}"
    )
    caption = f"ε at δ = {account['delta']:.3g} over the releases; dashed, the ledger's value."
    return [_figure(figure, "spending", label, caption)]


def _spent(result: RunResult) -> list[tuple[int, float]]:
    """Numbers of payments and their epsilon; empty if the result does not list payments."""
    price, entries = result.price, entries_of(result.privacy or {})
    if price is None:
        return []
    counts = _some_counts(sum(entry.count for entry in entries))
    return [(count, price.spent(first_payments(entries, count)).epsilon) for count in counts]


def _some_counts(total: int, most: int = 12) -> list[int]:
    """At most `most` of 1, …, total, evenly spaced, both ends included."""
    if total <= most:
        return list(range(1, total + 1))
    return sorted({round(1 + i * (total - 1) / (most - 1)) for i in range(most)})


def _signal(account: Mapping[str, Any]) -> list[str]:
    ratios = account.get("signal_to_noise")
    words = (
        "It is estimated from the releases, without a privacy cost. Below one a release is mostly "
        "noise; without any signal the estimate is above zero in half of the cases."
    )
    if isinstance(ratios, (int, float)):
        return [_paragraph(f"Signal over noise of the newest release: {ratios:.3g}. {words}")]
    if not isinstance(ratios, list) or not ratios:
        return []
    rows = [row if isinstance(row, list) else [row] for row in ratios]
    figure = _canvas(9.6, 2.9)
    axes = figure.subplots()
    _draw_signal(axes, rows)
    axes.axhline(1.0, color=_INK, linewidth=0.8, linestyle=_linestyle((4, 3)))
    axes.set(xlabel="release", ylabel="signal over noise", ylim=(0, None))
    _whole_ticks(axes)
    means = [_mean(row) for row in rows]
    label = (
        f"Signal-to-noise ratio of {_count(len(rows), 'release')}, means from {min(means):.2g} to "
        f"{max(means):.2g}"
    )
    regions = len(rows[0])
    of = f"mean and range of {regions} regions" if regions > 1 else "one region"
    return [_figure(figure, "signal", label, f"Signal over noise per release, {of}. {words}")]


def _draw_signal(axes: Any, rows: list[list[float]]) -> None:
    places = range(1, len(rows) + 1)
    colour = _PALETTE[0][0]
    means = [_mean(row) for row in rows]
    below = [mean - min(row) for mean, row in zip(means, rows, strict=True)]
    above = [max(row) - mean for mean, row in zip(means, rows, strict=True)]
    style = {"color": colour, "marker": "o", "markersize": 5, "linewidth": 1.2, "capsize": 3}
    axes.errorbar(places, means, yerr=[below, above], **style)


# ------------------------------------------------------------------ privacy and utility


def _utility(runs: list[_Run]) -> list[str]:
    this = runs[0]
    if "epsilon" not in this.privacy or not this.best:
        return []
    promises = [run for run in runs if run.best and _alike(run.privacy, this.privacy)]
    if len({run.privacy["epsilon"] for run in promises}) < 2:
        return []
    plain = [run for run in runs if run.best and "epsilon" not in run.privacy]
    last = min(len(curve) for run in (*promises, *plain) for curve in run.best.values())
    figure = _canvas(9.6, 3.4)
    axes = figure.subplots()
    for run in plain:
        values = _known(curve[last - 1] for curve in run.best.values())
        if values:
            axes.axhline(_mean(values), **run.line)
    for run in promises:
        _draw_promise(axes, run, last)
    axes.set(xlabel="ε", ylabel=f"{this.measure} after query {last}")
    _ticks_at(axes, [run.privacy["epsilon"] for run in promises])
    count = _count(len(promises), "run")
    label = f"{this.measure.capitalize()} after query {last} against epsilon, {count}"
    caption = (
        "Mean over agents and 95 % interval; lines are runs without a guarantee. Only promises of "
        f"the same unit ({this.privacy['unit']}) and adjacency ({this.privacy['adjacency']}) are "
        f"shown. {_deltas(promises)}"
    )
    marks = [_mark_item(_SIGNS[run.marker], run.colour, _with_seed(run)) for run in promises]
    lines = [_line_item(run.colour, run.dash, run.label) for run in plain]
    return [_figure(figure, "utility", label, caption, _items([*marks, *lines]))]


def _deltas(runs: list[_Run]) -> str:
    deltas = {run.label: _upper(run.privacy["delta"]) for run in runs}
    if len(set(deltas.values())) == 1:
        return f"δ = {next(iter(deltas.values()))}."
    listed = "; ".join(f"{delta} in {label}" for label, delta in deltas.items())
    return f"The values of δ differ: {listed}."


def _with_seed(run: _Run) -> str:
    return run.label if run.privacy.get("private") else f"{run.label}, seeded noise"


def _alike(mine: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two promises may be drawn on one axis."""
    if "epsilon" not in mine or not 0 < mine["epsilon"] < math.inf:
        return False
    return all(mine[key] == other[key] for key in ("unit", "adjacency"))


def _draw_promise(axes: Any, run: _Run, last: int) -> None:
    values = _known(curve[last - 1] for curve in run.best.values())
    if not values:
        return
    style = {"color": run.colour, "marker": run.marker, "markersize": 8, "capsize": 4}
    half = _half_width(values) or 0.0
    axes.errorbar([run.privacy["epsilon"]], [_mean(values)], yerr=[half], **style)


# ------------------------------------------------------------------ communication


def _communication(result: RunResult) -> list[str]:
    if not result.rounds:
        return []
    rounds = sorted({row["round"] for row in result.rounds})
    # Engines across machines do not measure CPU time.
    has_times = any(row["cpu_seconds"] for row in result.rounds)
    figure = _canvas(9.6, 3.0)
    traffic, work = figure.subplots(1, 2)
    work.set_visible(has_times)
    for place, key in enumerate(("bytes_up", "bytes_down")):
        totals = _per_round(result.rounds, key)
        _draw_rounds(traffic, rounds, [sum(totals[r]) for r in rounds], place)
    seconds = _per_round(result.rounds, "cpu_seconds")
    _draw_rounds(work, rounds, [_mean(seconds[r]) for r in rounds], 2)
    _draw_rounds(work, rounds, [max(seconds[r]) for r in rounds], 3)
    traffic.set(xlabel="round", ylabel="bytes, all agents", ylim=(0, None))
    traffic.yaxis.set_major_formatter(lambda value, _: _size(value))
    work.set(xlabel="round", ylabel="CPU seconds", ylim=(0, None))
    for axes in (traffic, work):
        _whole_ticks(axes)
    up, down = (sum(row[key] for row in result.rounds) for key in ("bytes_up", "bytes_down"))
    label = f"Per round: bytes up, {_size(up)} in all, bytes down, {_size(down)}"
    caption = "Bytes that all agents send and receive."
    names = ["up, from the agents", "down, to the agents"]
    if has_times:
        label += ", and CPU time"
        caption = (
            "Left, bytes that all agents send and receive; right, CPU time of an agent, objective "
            "included."
        )
        names += ["mean agent", "slowest agent"]
    legend = _items([_line_item(_PALETTE[i][0], _DASHES[i], n) for i, n in enumerate(names)])
    return [
        _figure(figure, "communication", label, caption, legend),
        _communication_table(result, len(rounds)),
        *_contributions(result),
    ]


def _contributions(result: RunResult) -> list[str]:
    """Messages and bytes of each agent."""
    rows = []
    for row in result.contributions():
        counts = ("messages_sent", "messages_received", "last_replied", "joined")
        sent, received, *rest = ("—" if row[key] is None else str(row[key]) for key in counts)
        sizes = (_size(row[key]) for key in ("bytes_up", "bytes_down"))
        numbers = (sent, received, *sizes, *rest)
        rows.append([_cell(row["site"]), *(_cell(cell, numeric=True) for cell in numbers)])
    ends = ("Last reply in exchange", "First asked in exchange")
    head = ("Agent", "Messages sent", "Messages received", "Up", "Down", *ends)
    table = _table("What each agent has sent and received", head, rows)
    return [_folded(_count(len(rows), "agent"), table, len(rows))]


def _per_round(rows: list[Record], key: str) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["round"], []).append(row[key])
    return values


def _draw_rounds(axes: Any, rounds: list[int], values: list[float], place: int) -> None:
    marker = {"marker": _MARKERS[place], "markersize": 4} if len(rounds) <= 40 else {}
    style = {"color": _PALETTE[place][0], "linestyle": _linestyle(_DASHES[place])}
    axes.plot(rounds, values, linewidth=1.6, **style, **marker)


def _communication_table(result: RunResult, rounds: int) -> str:
    rows = []
    for name, key in (("Up", "bytes_up"), ("Down", "bytes_down")):
        total = sum(row[key] for row in result.rounds)
        each = total / len(result.rounds)
        rows.append([name, _size(total), _size(total / rounds), _size(each)])
    seconds = math.fsum(row["cpu_seconds"] for row in result.rounds)
    parts = (seconds, seconds / rounds, seconds / len(result.rounds))
    if seconds:
        rows.append(["CPU time", *(f"{part:.3g} s" for part in parts)])
    head = ("", "In all", "Per round", "Per agent and round")
    cells = [[_cell(row[0]), *(_cell(cell, numeric=True) for cell in row[1:])] for row in rows]
    return _table("Bytes and CPU time" if seconds else "Bytes", head, cells)


# ------------------------------------------------------------------ evaluated points

_MOST_PARAMETERS = 4
_MOST_POINTS = 2000
_QUARTERS = (0.3, 0.5, 0.75, 1.0)  # opacity of early to late points


def _points(result: RunResult) -> list[str]:
    space, rows = result.space, [row for row in result.records if row["y"] is not None]
    if not rows or len(space.parameters) > _MOST_PARAMETERS:
        return []
    step = -(-len(rows) // _MOST_POINTS)
    rows = rows[::step]
    X = torch.tensor([row["x"] for row in rows], dtype=torch.float64).reshape(len(rows), space.dim)
    points = space.from_unit(X)
    values = [_value_of(space, row) for row in rows]
    columns = [[_place(p, point[p.name]) for point in points] for p in space.parameters]
    figure = _pair_plots(space, columns, values, _shades(rows), _best_rows(result, rows, values))
    names = ", ".join(space.names)
    which = "value" if not space.outcomes else f"value of {space.outcome.name}"
    label = f"{_count(len(rows), 'point')} by parameter: {names}; on the diagonal, the {which}"
    caption = (
        f"On the diagonal the {which} against a parameter"
        + (", below it pairs of parameters" if len(columns) > 1 else "")
        + ", in the parameters' units. Later points are darker."
        + (f" One point of {step} is shown." if step > 1 else "")
    )
    marks = (("●", _PALETTE[0][0], "a point"), ("★", _PALETTE[1][0], "an agent's best"))
    if len(space.objectives) > 1:
        marks = (marks[0], ("★", _PALETTE[1][0], "on an agent's front"))
    legend = _items([_mark_item(*mark) for mark in marks])
    return [_figure(figure, "points", label, caption, legend)]


def _value_of(space: SearchSpace, row: Record) -> float:
    """The value of the (first) objective: noise-free if it is known, else observed."""
    if row["true"] is not None:
        return float(row["true"])
    return float(row["y"][space.objectives[0]] if space.outcomes else row["y"])


def _pair_plots(
    space: SearchSpace,
    columns: list[list[float]],
    values: list[float],
    shades: list[float],
    best: list[int],
) -> Figure:
    """Every parameter against the value, and below the diagonal against every other parameter."""
    d = len(columns)
    figure = _canvas(min(9.6, 5.2 + 1.5 * (d - 1)), 3.2 if d == 1 else 0.5 + 2.1 * d)
    grid = figure.subplots(d, d, squeeze=False)
    for i in range(d):
        for j in range(i + 1):
            heights = values if i == j else columns[i]
            _draw_points(grid[i][j], columns[j], heights, shades, best)
            _name_axes(grid[i][j], space, i, j)
        for j in range(i + 1, d):
            grid[i][j].set_visible(False)
    return figure


def _shades(rows: list[Record]) -> list[float]:
    last = max(row["round"] for row in rows)
    first = min(row["round"] for row in rows)
    span = max(last - first + 1, 1)
    return [_QUARTERS[min(4 * (row["round"] - first) // span, 3)] for row in rows]


def _best_rows(result: RunResult, rows: list[Record], values: list[float]) -> list[int]:
    """The indices of the agents' best rows, or of those on their fronts."""
    if len(result.space.objectives) > 1:
        return _front_rows(result, rows)
    sign = -1.0 if result.space.outcome.minimize else 1.0
    best: dict[str, int] = {}
    for i, row in enumerate(rows):
        if not result.counts(row):
            continue
        old = best.get(row["agent"])
        if "violates" in row:
            continue
        if old is None or sign * values[i] > sign * values[old]:
            best[row["agent"]] = i
    return list(best.values())


def _front_rows(result: RunResult, rows: list[Record]) -> list[int]:
    places: list[int] = []
    for name in result.names:
        mine = [i for i, row in enumerate(rows) if row["agent"] == name and "violates" not in row]
        Y = torch.tensor([rows[i]["y"] for i in mine], dtype=torch.float64)
        front = result.space.front(Y.reshape(len(mine), len(result.space.metrics)))
        places += [i for i, kept in zip(mine, front.tolist(), strict=True) if kept]
    return places


def _place(parameter: Parameter, value: float | int | str) -> float:
    """A value as a number on an axis."""
    if parameter.values:
        return float(parameter.values.index(value))
    return float(value)


def _draw_points(
    axes: Any, xs: list[float], ys: list[float], shades: list[float], best: list[int]
) -> None:
    for shade in _QUARTERS:
        mine = [i for i, s in enumerate(shades) if s == shade]
        style = {"color": _PALETTE[0][0], "alpha": shade, "markersize": 4, "markeredgewidth": 0}
        axes.plot([xs[i] for i in mine], [ys[i] for i in mine], "o", **style)
    style = {"color": _PALETTE[1][0], "markersize": 9, "markeredgewidth": 0}
    axes.plot([xs[i] for i in best], [ys[i] for i in best], "*", **style)


def _name_axes(axes: Any, space: SearchSpace, i: int, j: int) -> None:
    across = space.parameters[j]
    _scale_axis(axes.set_xscale, axes.set_xlim, axes.xaxis, across)
    axes.set_xlabel(_short(across.name))
    if i == j:
        axes.set_ylabel("value")
        return
    up = space.parameters[i]
    _scale_axis(axes.set_yscale, axes.set_ylim, axes.yaxis, up)
    axes.set_ylabel(_short(up.name))


def _scale_axis(set_scale: Any, set_limits: Any, axis: Any, parameter: Parameter) -> None:
    if parameter.values:
        names = [_short(str(value), 14) for value in parameter.values]
        axis.set_ticks(range(len(parameter.values)), names)
        set_limits(-0.5, len(parameter.values) - 0.5)
        return
    low, high = parameter.lower, parameter.upper
    if parameter.scale == "log":
        _log_ticks(set_scale, axis, [low, high])
        beyond = (high / low) ** 0.04
        set_limits(low / beyond, high * beyond)
    else:
        beyond = 0.04 * (high - low)
        set_limits(low - beyond, high + beyond)


# ------------------------------------------------------------------ absences


def _absences(result: RunResult) -> list[str]:
    return [*_failures(result), *_missed(result)]


def _failures(result: RunResult) -> list[str]:
    """The failed evaluations with their reasons and regions."""
    rows = []
    for row in result.failures():
        number = _cell(f"{row['failed']} of {row['evaluations']}", numeric=True)
        why = "; ".join(f"{reason} ({n})" for reason, n in row["reasons"].items())
        rows.append([_cell(row["site"]), number, _cell(row["where"] or "unclear"), _cell(why)])
    if not rows:
        return []
    head = ("Agent", "Failed", "Where", "Why")
    table = _table("Evaluations that failed", head, rows)
    total = sum(row["failed"] for row in result.failures())
    share = f"{total} of {len(result.records)} evaluations failed."
    return [_paragraph(share), _folded(_count(len(rows), "agent"), table, len(rows))]


def _missed(result: RunResult) -> list[str]:
    if not result.rounds:
        return []
    missed = [row for row in result.rounds if not row["replied"]]
    if not missed:
        return [_paragraph("Every agent replied to every request.")]
    rows = []
    for name in result.names:
        mine = [row for row in missed if row["agent"] == name]
        if not mine:
            continue
        asked = sum(row["agent"] == name for row in result.rounds)
        reasons: dict[str, list[int]] = {}
        for row in mine:
            reasons.setdefault(row["failure"] or "no reply", []).append(row["round"])
        why = "; ".join(f"{code}: {_spans(rounds)}" for code, rounds in sorted(reasons.items()))
        number = _cell(f"{len(mine)} of {asked}", numeric=True)
        rows.append([_cell(name), number, _cell(why)])
    table = _table(
        "Agents that did not reply", ("Agent", "Rounds without it", "Why, and in which"), rows
    )
    share = f"{len(missed)} of {len(result.rounds)} requests had no reply."
    return [_paragraph(share), _folded(_count(len(rows), "agent"), table, len(rows))]


def _spans(numbers: list[int]) -> str:
    """1, 2, 3, 7 as 1–3, 7."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)


# ------------------------------------------------------------------ threat model


def _threats(result: RunResult) -> list[str]:
    account, sees = result.privacy or {}, result.sees
    sentences = (
        ["This result does not record who sees what."] if sees is None else [*sees.sentences]
    )
    if "epsilon" in account and not account.get("private"):
        sentences.append("In this run the noise was seeded, so that it protects no data.")
    not_covered = (
        "Never covered: observers of an agent's queries and results; the names of the agents and "
        "the times of their answers; settings that were tuned on the agents' data without payment"
    )
    files = {
        "whole": "; and this file, which shows every agent's points and outcomes.",
        "hub": ".",
        "site": "; and this file, which shows the site's points and outcomes.",
    }
    if result.part == "site":
        return [_paragraph(f"{not_covered}{files[result.part]}")]
    table = [] if sees is None else [_sees_table(sees)]
    return [*map(_paragraph, sentences), *table, _paragraph(not_covered + files[result.part])]


def _sees_table(sees: Sees) -> str:
    head = ("Message", "From", "Content", "Readers")
    rows = [_cells([row.message, row.sender, row.content, row.who]) for row in sees.rows]
    return _table("Every kind of message of this protocol", head, rows)


# ------------------------------------------------------------------ drawing

_INK = "#1a1b1c"  # placeholder of the page's text colour
# Okabe and Ito's colours, distinct for colour-blind readers: for light pages, and for dark pages.
_PALETTE = (
    ("#0072b2", "#4db4f0"),
    ("#d55e00", "#ff8f3d"),
    ("#009e73", "#2fd0a2"),
    ("#cc79a7", "#e7a3c8"),
    ("#e69f00", "#f5bd3d"),
    ("#56b4e9", "#a9d9f7"),
)
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.4), (6, 2, 1, 2), (9, 2))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_SIGNS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚"}  # in a legend
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "botorch_fed",  # names inside are the same in every run
    "text.parse_math": False,  # a name may contain dollars
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.linewidth": 0.7,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.7,
}


@contextmanager
def _drawing() -> Iterator[None]:
    """Matplotlib in the style of this report, independent of the user's style."""
    try:
        from matplotlib import style
    except ImportError as error:
        raise ImportError(f"write_report {_NO_MATPLOTLIB}") from error
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has it
        yield


def _canvas(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _linestyle(dash: tuple[float, ...]) -> Any:
    return (0, dash) if dash else "-"


def _whole_ticks(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _ticks_at(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis with ticks at these values, at least 10 % apart."""
    from matplotlib.ticker import NullLocator

    ticks: list[float] = []
    for value in sorted(set(values)):
        if not ticks or value > 1.1 * ticks[-1]:
            ticks.append(value)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _log_ticks(set_scale: Any, axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    set_scale("log")
    narrow = max(values) / min(values) < 1e2
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=6))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _svg(figure: Figure, key: str, label: str) -> str:
    """A figure as a part of the page: in the page's colours and fonts, with unique ids."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for noise in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        text = re.sub(noise, "", text, flags=re.DOTALL)
    used = set(re.findall(r'<[^>]*(?:href="|url\()#([\w-]+)', text))
    text = re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], key, used), text)
    width, height = (72 * size for size in figure.get_size_inches())
    head = (
        f'<svg role="img" aria-label="{_text(label)}" viewBox="0 0 {width:g} {height:g}" '
        f'style="max-width:{1.3 * width:.0f}px">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1).strip()


def _tag(tag: str, key: str, used: set[str]) -> str:
    """A tag of a figure in the page's colours and fonts.

    Ids with references get the prefix `key`; all other ids are dropped.
    """
    for place, (light, _) in enumerate(_PALETTE):
        tag = tag.replace(light, f"var(--c{place})")
    tag = tag.replace(_INK, "currentColor").replace("xlink:href", "href")
    tag = tag.replace("'DejaVu Sans'", "system-ui, sans-serif")

    def renamed(match: re.Match[str]) -> str:
        return f' id="{key}-{match[1]}"' if match[1] in used else ""

    tag = re.sub(r' id="([^"]*)"', renamed, tag)
    return re.sub(r'(href="|url\()#', rf"\1#{key}-", tag)


# ------------------------------------------------------------------ HTML


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _number(value: float) -> str:
    return f"{value:.5g}"


def _upper(value: float) -> str:
    """Four digits, rounded up, so that an upper bound stays one."""
    up = Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(value))
    return f"{float(up):g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def _short(name: str, most: int = 22) -> str:
    """A name for a figure: one line of at most `most` characters."""
    line = " ".join(name.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _data(value: float) -> str:
    """A rounded number, with all its digits as machine-readable value."""
    return f'<data value="{value!r}">{_number(value)}</data>'


def _cell(value: object, *, numeric: bool = False) -> str:
    return f'<td class="num">{_text(value)}</td>' if numeric else f"<td>{_text(value)}</td>"


def _value_cell(value: float | None) -> str:
    return _cell("–", numeric=True) if value is None else f'<td class="num">{_data(value)}</td>'


def _cells(values: Iterable[object]) -> list[str]:
    return [_cell(value) for value in values]


def _table(caption: str, head: Sequence[str], rows: list[list[str]]) -> str:
    """A table; the first cell of a row is its heading."""
    heads = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    lines = []
    for row in rows:
        first = re.sub(r"^<td[^>]*>(.*)</td>$", r'<th scope="row">\1</th>', row[0], flags=re.DOTALL)
        lines.append(f"<tr>{first}{''.join(row[1:])}</tr>")
    body = "\n".join(lines)
    return _scrolling(
        f"<table><caption>{_text(caption)}.</caption><thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table>",
        caption,
    )


def _facts(caption: str, facts: Sequence[tuple[str, str]]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>'
        for name, value in facts
    )
    table = f"<table><caption>{_text(caption)}.</caption><tbody>\n{rows}\n</tbody></table>"
    return _scrolling(table, caption)


def _scrolling(table: str, caption: str) -> str:
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{_text(caption)}">{table}</div>'
    )


def _folded(name: str, table: str, rows: int) -> str:
    """A long table is folded."""
    if rows <= _MOST_OPEN:
        return table
    return f"<details><summary>{_text(name)}</summary>{table}</details>"


def _figure(figure: Figure, key: str, label: str, caption: str, legend: str = "") -> str:
    return (
        f'<figure>{legend}<div class="wide" tabindex="0">{_svg(figure, key, label)}</div>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _legend(runs: list[_Run]) -> str:
    """The legend of the lines, if there are several."""
    items = [_line_item(run.colour, run.dash, run.label) for run in runs]
    return _items(items) if len(runs) > 1 else ""


def _items(items: list[str]) -> str:
    return f'<ul class="legend" aria-label="Legend">{"".join(items)}</ul>'


def _line_item(colour: str, dash: tuple[float, ...], name: str) -> str:
    dashes = f";stroke-dasharray:{','.join(f'{2 * part:g}' for part in dash)}" if dash else ""
    line = f'<line x1="0" y1="5" x2="38" y2="5" style="stroke:{_variable(colour)}{dashes}"/>'
    swatch = f'<svg class="swatch" viewBox="0 0 38 10" aria-hidden="true">{line}</svg>'
    return f"<li>{swatch}{_text(name)}</li>"


def _mark_item(sign: str, colour: str, name: str) -> str:
    mark = f'<span class="mark" style="color:{_variable(colour)}" aria-hidden="true">{sign}</span>'
    return f"<li>{mark}{_text(name)}</li>"


def _variable(colour: str) -> str:
    return f"var(--c{[light for light, _ in _PALETTE].index(colour)})"


def _paragraph(words: str) -> str:
    return f"<p>{_text(words)}</p>"


def _banner(kind: str, head: str, words: str) -> str:
    return f'<p class="banner {kind}"><strong>{_text(head)}</strong> {_text(words)}</p>'


def _page(heading: str, sections: list[_Section]) -> str:
    links = "".join(f'<li><a href="#{s.key}">{_text(s.title)}</a></li>' for s in sections)
    body = "\n".join(
        f'<section id="{s.key}" aria-labelledby="{s.key}-head">\n'
        f'<h2 id="{s.key}-head">{_text(s.title)}</h2>\n' + "\n".join(s.parts) + "\n</section>"
        for s in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{_text(heading)}</title>
<style>{_colours()}{_CSS}</style>
</head>
<body>
<header>
<h1>{_text(heading)}</h1>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _colours() -> str:
    light = "".join(f"--c{i}:{colour};" for i, (colour, _) in enumerate(_PALETTE))
    dark = "".join(f"--c{i}:{colour};" for i, (_, colour) in enumerate(_PALETTE))
    return f"""
:root {{ color-scheme: light dark; {light}
  --ink:#1b1e22; --soft:#565d66; --paper:#ffffff; --line:#d5d9de; --shade:#f4f6f8;
  --good:#e3f4ee; --good-edge:#009e73; --warn:#fdf3dc; --warn-edge:#b57b00;
  --bad:#b3001b; --bad-edge:#7d0013; --bad-ink:#ffffff; --link:#005a8f; }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark}
  --ink:#e7eaee; --soft:#a7b0ba; --paper:#14171b; --line:#3a414a; --shade:#1d2228;
  --good:#10352b; --good-edge:#2fd0a2; --warn:#3a2d0c; --warn-edge:#f5bd3d;
  --bad:#c4162f; --bad-edge:#ff7d8d; --link:#7cc4f5; }} }}
"""


_CSS = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 60rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .8rem; padding-top: .8rem;
  border-top: 1px solid var(--line); }
p { max-width: 46rem; overflow-wrap: anywhere; }
a { color: var(--link); }
nav ul, .legend { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: .2rem 1.1rem; }
nav { font-size: .9rem; }
.legend { font-size: .85rem; margin-bottom: .4rem; }
.legend li { display: flex; align-items: center; gap: .4rem; overflow-wrap: anywhere; }
.swatch { width: 38px; height: 10px; flex: none; }
.swatch line { stroke-width: 2.4; }
.mark { font-size: 1.05rem; }
.banner { padding: .7rem .9rem; border-left: 6px solid; border-radius: 4px; max-width: none; }
.good { background: var(--good); border-color: var(--good-edge); }
.warn { background: var(--warn); border-color: var(--warn-edge); }
.bad { background: var(--bad); border-color: var(--bad-edge); color: var(--bad-ink); }
figure { margin: 1.2rem 0; }
figure .wide svg { display: block; width: 100%; min-width: 34rem; height: auto; color: var(--ink); }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { color: var(--soft); font-size: .88rem; margin-top: .3rem; max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: 1rem 0;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem; }
th, td { padding: .28rem .8rem .28rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
thead th { border-bottom: 2px solid var(--soft); }
tbody th { font-weight: 500; min-width: 6rem; }
td.num { white-space: nowrap; }
.n { color: var(--soft); }
details { margin: 1rem 0; }
summary { cursor: pointer; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  h2, caption, .legend { break-after: avoid; }
  figure, tr, .banner { break-inside: avoid; }
  details::details-content { content-visibility: visible; }
  .wide { overflow: visible; }
  figure .wide svg { min-width: 0; }
  .banner, figure { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""
