"""What the sites have reached: convergence, agent by agent, and Pareto fronts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from botorch_fed.report import charts
from botorch_fed.report.page import (
    Chart,
    cell,
    folded,
    interval_cell,
    paragraph,
    parameter_cell,
    plain,
    table,
    value_cell,
)
from botorch_fed.report.runs import Run, at, differences, metric_range, points_of
from botorch_fed.report.statistics import EVERYTHING, Estimate, counted, known, number, some_counts

if TYPE_CHECKING:
    from botorch_fed.run import Record, RunResult

MOST_DRAWN = 200  # queries on a line
MOST_SITES = 60  # with a view of their own
MOST_POINTS = 1500  # in one chart
MOST_ROWS = 2000  # of the table of trials

_MEASURES = {
    "best value": "The best value so far is the noise-free one if the problem defines it, else the "
    "observed one. Agents count from their first point that meets all constraints on. ",
    "hypervolume": "The hypervolume is that of all values that an agent has observed and that meet "
    "all constraints, in the units in which they were measured, with one reference point for all: "
    "that of the space, and else the worst values that this run has observed. ",
}
_INTERVALS = (
    "Intervals are Student's t over the agents of one run: they show the differences between "
    "agents, not between seeds. Initial points count as queries, and each query includes the "
    "agents with at least that many."
)


def convergence(runs: list[Run]) -> list[str | Chart]:
    """Means over agents with intervals, and differences between the runs."""
    drawn = [run for run in runs if run.best]
    if not runs[0].best or (len(drawn) == 1 and len(runs[0].best) == 1):
        return []  # of one agent alone its own section has all
    span = metric_range(runs)
    parts: list[str | Chart] = [_convergence_chart(drawn, span), _best_table(drawn, span)]
    if len(drawn) > 1:
        parts.append(_difference_table(drawn))
    cut = [number(end) for end in span if end not in EVERYTHING]
    words = f" Intervals are cut at {' and '.join(cut)}, beyond which no value lies." if cut else ""
    return [*parts, paragraph(_MEASURES[runs[0].measure] + _INTERVALS + words)]


def _convergence_chart(runs: list[Run], span: tuple[float, float]) -> Chart:
    this = runs[0]
    views = {f"{this.measure} so far": _mean_figure(runs, [run.best for run in runs], span)}
    if this.regrets is not None:
        of = [run for run in runs if run.regrets is not None]
        name = f"{this.result.measure} regret"
        figure = _mean_figure(of, [run.regrets or {} for run in of], (0.0, EVERYTHING[1]))
        figure["layout"]["yaxis"] = charts.axis(name, rangemode="tozero")
        views[name] = figure
    ends = [Estimate.of(run.values_at(None), span) for run in runs]
    told = [
        f"{run.label} ends at {number(one.mean)}"
        for run, one in zip(runs, ends, strict=True)
        if one is not None
    ]
    return Chart(
        "convergence",
        f"Mean {this.measure} over agents with 95 % intervals, query by query: {', '.join(told)}",
        "Mean over agents and 95 % interval, query by query.",
        views,
        choice="Show",
    )


def _mean_figure(
    runs: list[Run], curves: Sequence[Mapping[str, list[float]]], span: tuple[float, float]
) -> charts.Figure:
    traces = []
    for run, values in zip(runs, curves, strict=True):
        longest = max(map(len, values.values()), default=0)
        estimates = {}
        for query in some_counts(longest, MOST_DRAWN):
            there = known(curve[query - 1] for curve in values.values() if len(curve) >= query)
            found = Estimate.of(there, span)
            if found is not None:
                estimates[query] = found
        traces += charts.mean_lines(run, values, estimates)
    return charts.figure(
        traces,
        xaxis=charts.counts_axis("query of an agent", max(run.longest for run in runs)),
        yaxis=charts.axis(f"{runs[0].measure} so far"),
        showlegend=len(runs) > 1,
    )


def _heads(run: Run) -> list[str]:
    lengths = {len(curve) for curve in run.best.values()}
    span = str(max(lengths)) if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"
    names = ["the last" if query is None else f"query {query}" for query in run.marks]
    return [f"after {name}" for name in names[:-1]] + [f"after {names[-1]} ({span})"]


def _best_table(runs: list[Run], span: tuple[float, float]) -> str:
    rows = [
        [
            cell(run.label),
            *(interval_cell(Estimate.of(run.values_at(query), span)) for query in runs[0].marks),
        ]
        for run in runs
    ]
    caption = (
        f"{runs[0].measure.capitalize()} so far: mean over agents, 95 % interval, number of "
        "agents. After the last query: the last one of each agent"
    )
    return table(caption, ["Run", *_heads(runs[0])], rows)


def _difference_table(runs: list[Run]) -> str:
    this = runs[0]
    rows = [
        [
            cell(other.label),
            *(interval_cell(Estimate.of(differences(this, other, query))) for query in this.marks),
        ]
        for other in runs[1:]
    ]
    caption = (
        f"Paired differences of the {this.measure}: agent by agent, positive where this run is "
        "better. After the last query: the last one that both runs have"
    )
    return table(caption, ["Compared with", *_heads(this)], rows)


# ------------------------------------------------------------------ agent by agent


def agents(runs: list[Run]) -> list[str | Chart]:
    """The best values of every agent, and its observations."""
    this = runs[0]
    if not this.best:
        return []
    rows = [
        [cell(name), *(value_cell(at(curve, query)) for query in this.marks)]
        for name, curve in this.best.items()
    ]
    measure = this.measure.capitalize()
    numbers = table(f"{measure} so far of every agent of this run", ["Agent", *_heads(this)], rows)
    names = list(this.best)[:MOST_SITES]
    views = {"all agents": _every_agent(this)}
    views |= {name: _one_agent(runs, name) for name in names} if len(this.best) > 1 else {}
    if len(this.best) == 1:
        views = {names[0]: _one_agent(runs, names[0])}
    left = len(this.best) - len(names)
    more = f" The first {MOST_SITES} of {len(this.best)} agents can be chosen." if left else ""
    caption = (
        f"{measure} so far (lines); of one agent also "
        + ("its observations (dots) and the other runs." if this.reference is None else "the runs.")
        + more
    )
    label = f"{measure} so far of {counted(len(this.best), 'agent')}; the table has the numbers"
    chart = Chart("agents", label, caption, views, choice="Agent")
    return [chart, folded(f"Table of {counted(len(rows), 'agent')}", numbers, len(rows))]


def _every_agent(run: Run) -> charts.Figure:
    traces = []
    for place, (name, curve) in enumerate(itertools.islice(run.best.items(), MOST_SITES)):
        queries = some_counts(len(curve), MOST_DRAWN)
        heights = [_or_none(curve[k - 1]) for k in queries]
        trace = charts.steps(name, queries, heights, place)
        trace["line"]["width"] = 1.5
        traces.append(trace)
    return charts.figure(
        traces,
        xaxis=charts.counts_axis("query of an agent", run.longest),
        yaxis=charts.axis(f"{run.measure} so far"),
        showlegend=1 < len(run.best) <= 12,
    )


def _one_agent(runs: list[Run], name: str) -> charts.Figure:
    this, traces = runs[0], []
    result = this.result
    if this.reference is None:
        X, Y = result.history(name)
        values = Y[:, result.space.objectives[0]].tolist()
        queries = some_counts(len(values), MOST_DRAWN)
        points = result.space.from_unit(X)
        words = [
            f"query {k}: {number(values[k - 1])}<br>{charts.named(points[k - 1])}" for k in queries
        ]
        heights = [values[k - 1] for k in queries]
        grey = {"color": "var(--soft)"}
        traces.append(charts.points("observed", queries, heights, 0, words, marker=grey))
    for run in reversed(runs):  # this run on top
        curve = run.best.get(name, [])
        queries = some_counts(len(curve), MOST_DRAWN) if curve else []
        heights = [_or_none(curve[k - 1]) for k in queries]
        if queries:
            traces.append(charts.steps(run.label, queries, heights, run.place))
    layout: dict[str, Any] = {}
    if result.optimal_values is not None and not result.space.outcomes:
        optimum = result.optimal_values[name]
        layout["shapes"] = [charts.level(optimum)]
        layout["annotations"] = [charts.note_at(optimum, "optimum")]
    return charts.figure(
        traces,
        xaxis=charts.counts_axis(f"query of {name}", max(run.longest for run in runs)),
        yaxis=charts.axis("value" if this.reference is None else this.measure),
        **layout,
    )


def _or_none(value: float) -> float | None:
    return None if value != value else value


# ------------------------------------------------------------------ several objectives


def fronts(result: RunResult) -> list[str | Chart]:
    """Each agent's front with all outcomes; for several objectives only."""
    space = result.space
    if len(space.objectives) < 2:
        return []
    fronts = {name: result.pareto(name) for name in result.names}
    rows = []
    for name, front in fronts.items():
        for one in front:
            values = [value_cell(value) for value in one["values"].values()]
            rows.append([cell(name), *values, *map(parameter_cell, one["parameters"].values())])
    if not rows:
        return []
    heads = ["Agent", *(f"{one.name} ({one.role})" for one in space.metrics), *space.names]
    caption = "Trials that meet all constraints, and none beats in all objectives"
    left = f"; the first {MOST_ROWS:,} of {len(rows):,}" if len(rows) > MOST_ROWS else ""
    numbers = table(f"{caption}{left}", heads, rows[:MOST_ROWS])
    views = {}
    for first, second in itertools.combinations(space.objectives, 2):
        across, up = space.metrics[first].name, space.metrics[second].name
        views[f"{across} and {up}"] = _front_figure(result, fronts, across, up)
    reference = result.reference_point()
    worst = ", ".join(f"{name} {number(value)}" for name, value in reference.items())
    chart = Chart(
        "fronts",
        f"Pareto fronts of {counted(len(fronts), 'agent')}, {counted(len(rows), 'trial')}",
        "Every trial that meets all constraints (small), and the front of each agent (joined). "
        f"Hypervolumes count up to {worst}.",
        views,
        choice="Objectives",
    )
    return [chart, folded(f"Table of {counted(len(rows), 'trial')}", numbers, len(rows))]


def _front_figure(
    result: RunResult, fronts: Mapping[str, list[Record]], across: str, up: str
) -> charts.Figure:
    space, traces = result.space, []
    minimized = {metric.name: metric.minimize for metric in space.metrics}
    x, y, words = [], [], []
    rows = [row for row in result.records if row["y"] is not None and "violates" not in row]
    rows = rows[:: -(-len(rows) // MOST_POINTS) or 1]
    for row, point in zip(rows, points_of(space, rows), strict=True):
        values = space.by_name(row["y"])
        x.append(values[across])
        y.append(values[up])
        words.append(f"{plain(row['agent'])}<br>{charts.named(point)}")
    faint = {"size": 4, "opacity": 0.4, "color": "var(--soft)"}
    traces.append(charts.points("trials", x, y, 0, words, marker=faint))
    for place, (name, front) in enumerate(fronts.items()):
        ordered = sorted(front, key=lambda one: one["values"][across])
        if not ordered:
            continue
        said = [
            f"{plain(across)} {number(one['values'][across])}, {plain(up)} "
            f"{number(one['values'][up])}<br>{charts.named(one['parameters'])}"
            for one in ordered
        ]
        xs, ys = ([one["values"][of] for one in ordered] for of in (across, up))
        trace = charts.line(name, xs, ys, place, hover=said)
        trace["line"]["shape"] = "hv" if minimized[across] else "vh"  # what two trials both reach
        trace["mode"] = "lines+markers"
        traces.append(trace)
    ways = {True: "smaller is better", False: "larger is better"}
    return charts.figure(
        traces,
        xaxis=charts.axis(f"{across} ({ways[minimized[across]]})"),
        yaxis=charts.axis(f"{up} ({ways[minimized[up]]})"),
        hovermode="closest",
        showlegend=len(fronts) <= 12,
    )
