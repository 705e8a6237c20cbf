"""The sections of a report below its first screen, from results to tables and charts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from botorch_fed.federation.disclosure import Sees, entries_of, first_payments
from botorch_fed.report import charts
from botorch_fed.report.effects import Importances, importances, slices
from botorch_fed.report.page import (
    Chart,
    Section,
    banner,
    cell,
    cells,
    data,
    details,
    escaped,
    facts,
    folded,
    paragraph,
    parameter_cell,
    plain,
    table,
    value_cell,
)
from botorch_fed.report.runs import (
    Run,
    at,
    best_trials,
    differences,
    metric_range,
    value_of,
)
from botorch_fed.report.statistics import (
    EVERYTHING,
    Estimate,
    brief,
    counted,
    known,
    mean,
    number,
    shown,
    size,
    some_counts,
    spans,
    upper,
)
from botorch_fed.report.verdict import verdict
from botorch_fed.space import Parameter, SearchSpace

if TYPE_CHECKING:
    from botorch_fed.run import Record, RunResult

MOST_DRAWN = 200  # queries on a line
MOST_SITES = 60  # with a view of their own
MOST_POINTS = 1500  # in one chart
MOST_LINES = 300  # of parallel coordinates
MOST_ROWS = 2000  # of the table of trials
MOST_SLICES = 8  # parameters with a slice
MOST_SLICED = 12  # sites with slices
MOST_NUMBERS = 12  # rows of a chart's table


def sections(runs: list[Run]) -> list[Section]:
    """All sections that have parts."""
    return [section for section in _sections(runs) if section.parts]


def _sections(runs: list[Run]) -> Iterator[Section]:
    this = runs[0]
    result = this.result
    space, rows = result.space, _rows(result)
    found = _importances(space, rows)
    yield Section("result", "Result", [*verdict(runs), *_guarantee(result)])
    yield Section("convergence", "Convergence", _convergence(runs))
    yield Section("agents", "Agent by agent", _agents(runs))
    yield Section("fronts", "Pareto fronts", _fronts(result))
    yield Section("parameters", "Parameters", _parameters(result, rows, found))
    yield Section("trials", "Trials", _trials(result))
    yield Section("privacy", "Privacy spent", _privacy(this))
    yield Section("utility", "Privacy and utility", _utility(runs))
    yield Section("communication", "Communication and time", _communication(result))
    yield Section("absences", "Absences and failures", _absences(result))
    yield Section("threats", "Who sees what", _threats(result))
    yield Section("run", "The run", _run(result))


# ------------------------------------------------------------------ the guarantee

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
    note = paragraph(_WHOSE[result.part])
    if result.part == "site":
        return [note]
    if "epsilon" not in account and not result.ended and result.price is not None:
        promised = result.price
        words = (
            f"The plan of the run promises ε ≤ {upper(promised.epsilon)} and δ = "
            f"{upper(promised.delta)}, per {promised.unit}, adjacency {promised.adjacency}. What "
            "was spent, and whether the noise was private, is told when the run has ended."
        )
        return [paragraph(words), note]
    if "epsilon" not in account:
        return [paragraph("No privacy guarantee: this run has none."), note]
    if not account.get("private"):
        return [
            banner(
                "bad",
                "Not private: the noise was seeded.",
                "A reader who knows or guesses the seed can subtract the noise: nothing is "
                "protected. The numbers below are the guarantee of noise of this size from the "
                "operating system.",
            ),
            paragraph(_promise(account, "would be")),
            note,
        ]
    words = f"The guarantee. {_promise(account)}"
    return [paragraph(words), *_large_delta(result), note]


_WORLDS = {
    "zero-out": "in which all contributions of one {unit} are zero",
    "replace-one": "in which the contributions of one {unit} are any other admissible ones",
}


def _promise(account: Mapping[str, Any], verb: str = "are") -> str:
    unit, adjacency = account["unit"], account["adjacency"]
    world = _WORLDS.get(adjacency, "that differs in one {unit}").format(unit=unit)
    return (
        f"The releases of the whole run {verb} (ε, δ)-indistinguishable from those of a run "
        f"{world}, with ε ≤ {upper(account['epsilon'])} and δ = {upper(account['delta'])}, per "
        f"{unit}, adjacency {adjacency}, {counted(account['releases'], 'release')}, by the "
        f"accountant {account['accountant']}."
    )


def _large_delta(result: RunResult) -> list[str]:
    account = result.privacy or {}
    if account["unit"] != "agent" or account["delta"] * len(result.names) <= 0.1:
        return []
    return [
        paragraph(
            f"δ is large: {account['delta']:.3g} is not well below one over {len(result.names)} "
            "agents. ε alone does not describe the guarantee."
        )
    ]


# ------------------------------------------------------------------ convergence

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


def _convergence(runs: list[Run]) -> list[str | Chart]:
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
            *(_interval(Estimate.of(run.values_at(query), span)) for query in runs[0].marks),
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
            *(_interval(Estimate.of(differences(this, other, query))) for query in this.marks),
        ]
        for other in runs[1:]
    ]
    caption = (
        f"Paired differences of the {this.measure}: agent by agent, positive where this run is "
        "better. After the last query: the last one that both runs have"
    )
    return table(caption, ["Compared with", *_heads(this)], rows)


def _interval(found: Estimate | None) -> str:
    """A cell: a mean, its 95 % interval and the number of values."""
    if found is None:
        return cell("–", numeric=True)
    ends = "" if found.half is None else f" [{brief(found.low)}, {brief(found.high)}]"
    small = f'<span class="n">{escaped(f"{ends} ({found.count})")}</span>'
    return f'<td class="num">{data(found.mean)}{small}</td>'


# ------------------------------------------------------------------ agent by agent


def _agents(runs: list[Run]) -> list[str | Chart]:
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
        words = [f"query {k}: {number(values[k - 1])}<br>{_named(points[k - 1])}" for k in queries]
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
        layout["shapes"] = [_level(optimum)]
        layout["annotations"] = [_note_at(optimum, "optimum")]
    return charts.figure(
        traces,
        xaxis=charts.counts_axis(f"query of {name}", max(run.longest for run in runs)),
        yaxis=charts.axis("value" if this.reference is None else this.measure),
        **layout,
    )


def _or_none(value: float) -> float | None:
    return None if value != value else value


def _level(height: float) -> charts.Figure:
    """A level line through a chart."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height}
    return {**line, "line": charts.REFERENCE}


def _note_at(height: float, words: str) -> charts.Figure:
    place = {"xref": "paper", "x": 1, "y": height, "xanchor": "right", "yanchor": "bottom"}
    return {**place, "text": words, "showarrow": False, "font": {"size": 11}}


def _named(point: Mapping[str, Any]) -> str:
    """Parameters by name for a hover text."""
    return "<br>".join(
        f"{plain(name, 30)} = {plain(shown(value), 30)}" for name, value in point.items()
    )


# ------------------------------------------------------------------ several objectives


def _fronts(result: RunResult) -> list[str | Chart]:
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
    for row, point in zip(rows, _points_of(space, rows), strict=True):
        values = space.by_name(row["y"])
        x.append(values[across])
        y.append(values[up])
        words.append(f"{plain(row['agent'])}<br>{_named(point)}")
    faint = {"size": 4, "opacity": 0.4, "color": "var(--soft)"}
    traces.append(charts.points("trials", x, y, 0, words, marker=faint))
    for place, (name, front) in enumerate(fronts.items()):
        ordered = sorted(front, key=lambda one: one["values"][across])
        if not ordered:
            continue
        said = [
            f"{plain(across)} {number(one['values'][across])}, {plain(up)} "
            f"{number(one['values'][up])}<br>{_named(one['parameters'])}"
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


# ------------------------------------------------------------------ parameters


def _rows(result: RunResult) -> list[Record]:
    """Observations with values, before and in the run."""
    return [row for row in (*result.given, *result.records) if row["y"] is not None]


def _points_of(space: SearchSpace, rows: Sequence[Record]) -> list[dict[str, Any]]:
    X = torch.tensor([row["x"] for row in rows], dtype=torch.float64)
    return space.from_unit(X.reshape(len(rows), space.dim))


def _importances(space: SearchSpace, rows: Sequence[Record]) -> Importances | None:
    """Importances for the (first) objective, each site's outcomes standardised."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["agent"], []).append(value_of(space, row))
    scales = {name: _scale(found) for name, found in values.items()}
    kept = [row for row in rows if scales[row["agent"]][1] > 0]
    points = _points_of(space, kept)
    places = [[charts.place_of(p, point[p.name]) for p in space.parameters] for point in points]
    standardised = [
        (value_of(space, row) - scales[row["agent"]][0]) / scales[row["agent"]][1] for row in kept
    ]
    return importances(space, places, standardised)


def _scale(values: list[float]) -> tuple[float, float]:
    y = torch.tensor(values, dtype=torch.float64)
    return float(y.mean()), float(y.std()) if len(y) > 1 else 0.0


def _parameters(
    result: RunResult, rows: list[Record], found: Importances | None
) -> list[str | Chart]:
    if not rows:
        return []
    space = result.space
    by_name = {p.name: p for p in space.parameters if p.kind != "fixed"}
    order = [by_name[name] for name in found.order] if found else list(by_name.values())
    if not order:
        return []
    parts: list[str | Chart] = []
    if found is not None:
        parts.append(_importance_chart(found))
    else:
        words = "Importances need two parameters and twenty observations."
        parts.append(paragraph(words))
    parts.append(_slice_chart(result, rows, order[:MOST_SLICES], len(order)))
    if len(order) > 1:
        parts.append(_parallel_chart(result, rows, order))
    return parts


def _importance_chart(found: Importances) -> Chart:
    order = found.order
    means = [found.means[name] for name in order]
    spreads = [found.spreads[name] for name in order]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": means,
        "y": list(range(len(order))),
        "error_x": {"type": "data", "array": spreads, "color": "var(--ink)", "thickness": 1},
        "marker": {"color": "var(--c0)"},
        "textposition": "none",
        **charts.said([f"{plain(name)}: {found.means[name]:.2g}" for name in order]),
    }
    names = [plain(name, 18) for name in order]
    ticks = {"tickmode": "array", "tickvals": list(range(len(order))), "ticktext": names}
    figure = charts.figure(
        [bars],
        xaxis=charts.axis("loss of explained variance", rangemode="tozero"),
        yaxis=charts.axis("", autorange="reversed", **ticks),
        showlegend=False,
    )
    rows = [
        [cell(name), value_cell(found.means[name]), value_cell(found.spreads[name])]
        for name in order
    ]
    weak = "" if found.explained >= 0.2 else ": the model knows little, and importances say little"
    return Chart(
        "importances",
        f"Importance of {counted(len(order), 'parameter')}, the largest is {order[0]}",
        f"By how much a forest predicts held-out outcomes worse when a parameter is shuffled, with "
        f"standard deviations ({found.count:,} observations; it explains "
        f"{max(found.explained, 0):.0%} of their variance{weak}).",
        {"": figure},
        numbers=table(
            "Permutation importances", ("Parameter", "Importance", "Standard deviation"), rows
        ),
        height=110 + 34 * len(order),
    )


def _slice_chart(
    result: RunResult, rows: list[Record], order: list[Parameter], total: int
) -> Chart:
    space = result.space
    drawn = rows[:: -(-len(rows) // MOST_POINTS)]
    points = _points_of(space, drawn)
    names = [name for name in result.names if any(row["agent"] == name for row in rows)]
    modelled = _site_slices(result, names[:MOST_SLICED], order)
    which = "value" if not space.outcomes else space.metrics[space.objectives[0]].name
    views = {}
    for parameter in order:
        traces = []
        for place, name in enumerate(names):
            mine = [i for i, row in enumerate(drawn) if row["agent"] == name]
            group = {"legendgroup": str(place)}
            at_ = modelled.get(name, {}).get(parameter.name)
            if at_ is not None:
                x = [charts.place_of(parameter, value) for value in at_.values]
                traces += _slice(name, x, at_, place, len(modelled) == 1, group)
            traces.append(
                charts.points(
                    name,
                    [charts.place_of(parameter, points[i][parameter.name]) for i in mine],
                    [value_of(space, drawn[i]) for i in mine],
                    place,
                    [_trial_words(drawn[i], points[i], which) for i in mine],
                    marker={"symbol": charts.symbol(place), "size": 6},
                    **group,
                )
            )
        views[parameter.name] = charts.figure(
            traces,
            xaxis=charts.parameter_axis(parameter),
            yaxis=charts.axis(which),
            hovermode="closest",
            showlegend=1 < len(names) <= 12,
        )
    caption = f"Observations by one parameter, in its units; {which} upwards."
    if modelled:
        caption += (
            " Lines: the mean of a Gaussian process of a site's observations along the parameter, "
            "the others as in the site's best configuration"
            + (", with its 95 % interval." if len(modelled) == 1 else ".")
        )
    if total > len(order):
        caption += f" The {len(order)} most important of {total} parameters."
    if len(drawn) < len(rows):
        caption += f" {len(drawn):,} of {len(rows):,} observations are shown."
    label = (
        f"{counted(len(drawn), 'observation')} by parameter, one of "
        f"{', '.join(p.name for p in order)}; the table of trials has the numbers"
    )
    return Chart("slices", label, caption, views, choice="Parameter")


def _slice(
    name: str, x: list[float], found: Any, place: int, alone: bool, group: dict[str, str]
) -> list[charts.Figure]:
    """The model of a site along a parameter; the interval of one site only."""
    line = charts.line(name, x, found.mean, place, showlegend=False, **group)
    line["mode"] = "lines"
    return [charts.band(x, found.low, found.high, place, **group), line] if alone else [line]


def _site_slices(
    result: RunResult, names: Sequence[str], order: Sequence[Parameter]
) -> dict[str, Any]:
    """Slices of the sites' models through their best configurations."""
    place = result.space.objectives[0]
    metric = result.space.metrics[place].name
    best = {one.site: one for one in best_trials(result) if one.of in (metric, "objective")}
    found = {}
    for name in names:
        if name not in best:
            continue
        X, Y = result.history(name, given=True)
        cut = slices(
            result.space, X, Y[:, place], dict(best[name].parameters), [p.name for p in order]
        )
        if cut:
            found[name] = cut
    return found


def _trial_words(row: Record, point: Mapping[str, Any], which: str) -> str:
    value = row["y"] if not isinstance(row["y"], list) else row["y"][0]
    return f"{plain(row['agent'])}, {plain(which)} {number(float(value))}<br>{_named(point)}"


def _parallel_chart(result: RunResult, rows: list[Record], order: list[Parameter]) -> Chart:
    """Every trial as a line through all parameters, the best ones on top."""
    space = result.space
    sign = -1.0 if space.metrics[space.objectives[0]].minimize else 1.0
    scored = sorted((sign * value_of(space, row), i) for i, row in enumerate(rows))
    if len(scored) > MOST_LINES:
        step = len(scored) / MOST_LINES
        scored = [scored[-1 - int(k * step)] for k in range(MOST_LINES)][::-1]
    kept = [rows[i] for _, i in scored]
    points = _points_of(space, kept)
    which = "value" if not space.outcomes else space.metrics[space.objectives[0]].name
    traces = []
    across = list(range(len(order)))
    for shade in range(charts.SHADES):  # a fifth of the trials each, the best fifth last
        part = range(shade * len(kept) // charts.SHADES, (shade + 1) * len(kept) // charts.SHADES)
        x: list[float | None] = []
        y: list[float | None] = []
        words: list[str] = []
        for i in part:
            x += [*across, None]
            y += [*(charts.share_of(p, points[i][p.name]) for p in order), None]
            words += [_trial_words(kept[i], points[i], which)] * (len(order) + 1)
        values = [value_of(space, kept[i]) for i in part]
        if not values:
            continue
        ends = " to ".join(dict.fromkeys((brief(min(values)), brief(max(values)))))
        width = 2.2 if shade == charts.SHADES - 1 else 1.2
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": ends,
                "x": x,
                "y": y,
                "line": {"color": f"var(--r{shade})", "width": width},
                "marker": {"color": f"var(--r{shade})", "size": 3},
                **charts.said(words),
            }
        )
    marks = [charts.ends_of(p) for p in order]
    annotations = [
        {
            "x": k,
            "y": end,
            "text": marks[k][end],
            "showarrow": False,
            "yanchor": ("top", "bottom")[end],
            "yshift": (-4, 4)[end],
            "font": {"size": 11},
        }
        for k in across
        for end in (0, 1)
    ]
    names = [plain(p.name, 16) for p in order]
    figure = charts.figure(
        traces,
        xaxis=charts.axis("", tickmode="array", tickvals=across, ticktext=names)
        | {"range": [-0.4, len(order) - 0.6]},
        yaxis={"visible": False, "range": [-0.1, 1.1]},
        annotations=annotations,
        hovermode="closest",
        legend={"title": {"text": plain(which)}},
        scrollable=72 * len(order),
    )
    fewer = f" {len(kept)} of {len(rows):,} trials." if len(kept) < len(rows) else ""
    return Chart(
        "parallel",
        f"Parallel coordinates of {counted(len(kept), 'trial')} and "
        f"{counted(len(order), 'parameter')}; the table of trials has the numbers",
        "Every trial is a line through all parameters, in fifths by its value; the best fifth is "
        f"on top.{fewer}",
        {"": figure},
        height=400,
    )


# ------------------------------------------------------------------ trials


def _trials(result: RunResult) -> list[str | Chart]:
    """All trials, to be filtered and sorted."""
    numbered = [
        (row, number_)
        for name in result.names
        for number_, row in enumerate(
            (row for row in (*result.given, *result.records) if row["agent"] == name), start=1
        )
    ]
    if not numbered:
        return []
    kept = numbered[-MOST_ROWS:]
    space = result.space
    missing = [None] * len(space.metrics)
    rows = []
    for (row, number_), point in zip(
        kept, _points_of(space, [row for row, _ in kept]), strict=True
    ):
        values = row["y"] if isinstance(row["y"], list) else [row["y"]]
        rows.append(
            [
                cell(row["agent"]),
                cell(number_, numeric=True),
                cell(row.get("status", "completed") if "round" in row else "given"),
                *map(value_cell, missing if row["y"] is None else values),
                *map(parameter_cell, point.values()),
                cell(row.get("reason") or row.get("violates", "")),
            ]
        )
    metrics = [one.name for one in space.metrics] if space.outcomes else ["value"]
    heads = ["Site", "Trial", "Status", *metrics, *space.names, "Note"]
    fewer = len(kept) < len(numbered)
    of = f"The last {len(kept):,} of {len(numbered):,} trials" if fewer else "All trials"
    body = table(f"{of}, in the parameters' units", heads, rows, kind="trials")
    return [details(f"Table of {counted(len(rows), 'trial')}", body)]


# ------------------------------------------------------------------ privacy spent


def _privacy(run: Run) -> list[str | Chart]:
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
    rows = [
        (name, upper(account[key]) if key in bounds else _plain(account[key]))
        for key, name in _PRIVACY_ROWS.items()
        if key in account and (key != "private" or "epsilon" in account)
    ]
    return facts("Privacy, as the server reports it", rows)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return shown(value)


def _spending(result: RunResult) -> list[str | Chart]:
    """Epsilon payment by payment."""
    account = result.privacy or {}
    if "epsilon" not in account:
        return []
    if account["releases"] < 2:
        words = "One payment covers all releases of the run about one unit."
        return [paragraph(words if account["releases"] else "Nothing was released.")]
    payments = spent(result)
    if not payments:
        words = "The stated ε covers all releases together; the result does not list the payments."
        return [paragraph(words)]
    rounds = account.get("release_rounds")
    by_round = isinstance(rounds, (list, tuple)) and len(rounds) == account["releases"]
    places = [rounds[count - 1] if by_round and rounds else count for count, _ in payments]
    costs = [epsilon for _, epsilon in payments]
    name = "after the release of round" if by_round else "payments"
    rows = [[cell(p), value_cell(c)] for p, c in zip(places, costs, strict=True)]
    numbers = table("ε spent", (name.capitalize(), "ε"), rows)
    if not by_round:
        places, costs = [0, *places], [0.0, *costs]
    figure = charts.figure(
        [charts.steps("ε spent", places, costs, 0)],
        xaxis=charts.counts_axis(name, max(places)),
        yaxis=charts.axis("ε spent", rangemode="tozero"),
        shapes=[_level(account["epsilon"])],
        showlegend=False,
    )
    label = (
        f"Epsilon grows to {account['epsilon']:.4g} over {counted(account['releases'], 'release')}"
    )
    caption = (
        f"ε at δ = {account['delta']:.3g}, {name}, over the releases; dashed, the ledger's value."
    )
    return [Chart("spending", label, caption, {"": figure}, numbers=numbers, height=280)]


def spent(result: RunResult) -> list[tuple[int, float]]:
    """Numbers of payments and their epsilon; empty if the result does not list payments."""
    price, entries = result.price, entries_of(result.privacy or {})
    if price is None:
        return []
    counts = some_counts(sum(entry.count for entry in entries))
    return [(count, price.spent(first_payments(entries, count)).epsilon) for count in counts]


def _signal(account: Mapping[str, Any]) -> list[str | Chart]:
    ratios = account.get("signal_to_noise")
    words = (
        "It is estimated from the releases, without a privacy cost. Below one a release is mostly "
        "noise; without any signal the estimate is above zero in half of the cases."
    )
    if isinstance(ratios, (int, float)):
        return [paragraph(f"Signal over noise of the newest release: {ratios:.3g}. {words}")]
    if not isinstance(ratios, list) or not ratios:
        return []
    by_release = [row if isinstance(row, list) else [row] for row in ratios]
    places = list(range(1, len(by_release) + 1))
    means = [mean(row) for row in by_release]
    trace = charts.line("signal over noise", places, means, 0)
    trace["mode"] = "lines+markers"
    trace["error_y"] = {
        "type": "data",
        "symmetric": False,
        "array": [max(row) - m for row, m in zip(by_release, means, strict=True)],
        "arrayminus": [m - min(row) for row, m in zip(by_release, means, strict=True)],
        "color": "var(--c0)",
    }
    figure = charts.figure(
        [trace],
        xaxis=charts.counts_axis("release", len(places)),
        yaxis=charts.axis("signal over noise", rangemode="tozero"),
        shapes=[_level(1.0)],
        showlegend=False,
    )
    rows = [
        [cell(k), value_cell(m), value_cell(min(row)), value_cell(max(row))]
        for k, m, row in zip(places, means, by_release, strict=True)
    ]
    numbers = table("Signal over noise", ("Release", "Mean", "Least", "Most"), rows)
    regions = len(by_release[0])
    of = f"mean and range of {regions} regions" if regions > 1 else "one region"
    label = (
        f"Signal-to-noise ratio of {counted(len(by_release), 'release')}, means from "
        f"{min(means):.2g} to {max(means):.2g}"
    )
    caption = f"Signal over noise per release, {of}. {words}"
    return [Chart("signal", label, caption, {"": figure}, numbers=numbers, height=280)]


# ------------------------------------------------------------------ privacy and utility


def _utility(runs: list[Run]) -> list[str | Chart]:
    this = runs[0]
    if "epsilon" not in this.privacy or not this.best:
        return []
    promises = [run for run in runs if run.best and _alike(run.privacy, this.privacy)]
    if len({run.privacy["epsilon"] for run in promises}) < 2:
        return []
    plain_runs = [run for run in runs if run.best and "epsilon" not in run.privacy]
    last = min(len(curve) for run in (*promises, *plain_runs) for curve in run.best.values())
    span = metric_range(runs)
    rows, traces, shapes, notes = [], [], [], []
    for run in (*promises, *plain_runs):
        found = Estimate.of(run.values_at(last), span)
        if found is None:
            continue
        private = run in promises
        epsilon = upper(run.privacy["epsilon"]) if private else "no guarantee"
        rows.append([cell(_with_seed(run)), cell(epsilon, numeric=True), _interval(found)])
        if private:
            traces.append(_promised(run, found))
        else:
            shapes.append({**_level(found.mean), "line": charts.line_style(run.place)})
            notes.append(_note_at(found.mean, plain(run.label)))
    ticks = sorted({run.privacy["epsilon"] for run in promises})
    figure = charts.figure(
        traces,
        xaxis=charts.axis(
            "ε", tickmode="array", tickvals=ticks, ticktext=[f"{tick:.3g}" for tick in ticks]
        )
        | {"type": "log"},
        yaxis=charts.axis(f"{this.measure} after query {last}"),
        shapes=shapes,
        annotations=notes,
        hovermode="closest",
    )
    name = f"{this.measure.capitalize()} after query {last}"
    caption = (
        "Mean over agents and 95 % interval; lines are runs without a guarantee. Only promises of "
        f"the same unit ({this.privacy['unit']}) and adjacency ({this.privacy['adjacency']}) are "
        f"shown. {_deltas(promises)}"
    )
    label = f"{name} against epsilon, {counted(len(promises), 'run')}"
    chart = Chart("utility", label, caption, {"": figure})
    return [chart, table(f"{name} by ε", ("Run", "ε", name), rows)]


def _promised(run: Run, found: Estimate) -> charts.Figure:
    """A run at its epsilon."""
    marker = {"symbol": charts.symbol(run.place), "size": 11, "opacity": 1}
    words = [f"ε {upper(run.privacy['epsilon'])}: {number(found.mean)}"]
    trace = charts.points(
        _with_seed(run), [run.privacy["epsilon"]], [found.mean], run.place, words, marker=marker
    )
    trace["error_y"] = {
        "type": "data",
        "symmetric": False,
        "array": [found.high - found.mean],
        "arrayminus": [found.mean - found.low],
        "color": charts.colour(run.place),
    }
    return trace


def _deltas(runs: list[Run]) -> str:
    deltas = {run.label: upper(run.privacy["delta"]) for run in runs}
    if len(set(deltas.values())) == 1:
        return f"δ = {next(iter(deltas.values()))}."
    listed = "; ".join(f"{delta} in {label}" for label, delta in deltas.items())
    return f"The values of δ differ: {listed}."


def _with_seed(run: Run) -> str:
    return (
        run.label
        if run.privacy.get("private") or "epsilon" not in run.privacy
        else (f"{run.label}, seeded noise")
    )


def _alike(mine: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two promises may be drawn on one axis."""
    if "epsilon" not in mine or not 0 < mine["epsilon"] < float("inf"):
        return False
    return all(mine[key] == other[key] for key in ("unit", "adjacency"))


# ------------------------------------------------------------------ communication


def _communication(result: RunResult) -> list[str | Chart]:
    if not result.rounds:
        return []
    rounds = sorted({row["round"] for row in result.rounds})
    totals = {
        name: [sum(row[key] for row in result.rounds if row["round"] == r) for r in rounds]
        for name, key in (
            ("up, from the agents", "bytes_up"),
            ("down, to the agents", "bytes_down"),
        )
    }
    views = {"bytes": _per_round(rounds, totals, "bytes, all agents", size)}
    counts = all("received" in row for row in result.rounds)
    if counts:
        sent = [sum(row["sent"] for row in result.rounds if row["round"] == r) for r in rounds]
        views["messages"] = _per_round(rounds, {"sent": sent}, "messages sent", str)
    # Engines across machines do not measure CPU time.
    if any(row["cpu_seconds"] for row in result.rounds):
        seconds = [[x["cpu_seconds"] for x in result.rounds if x["round"] == r] for r in rounds]
        slow = {"mean agent": list(map(mean, seconds)), "slowest agent": list(map(max, seconds))}
        views["CPU time"] = _per_round(rounds, slow, "CPU seconds", number)
    if any(len(values) > 1 for values in result.trust.values()):
        views["trust earned"] = _trust_figure(result)
    label = "Per round: " + ", ".join(f"{n}, {size(sum(v))} in all" for n, v in totals.items())
    caption = "By round, all agents together; CPU time is that of an agent, objective included."
    if "CPU time" not in views:
        caption = "By round, all agents together."
    chart = Chart("communication", label, caption, views, choice="Show", height=300)
    return [chart, _communication_table(result, len(rounds)), *_contributions(result)]


def _per_round(
    rounds: list[int], lines: Mapping[str, list[float]], title: str, words: Any
) -> charts.Figure:
    traces = [
        charts.line(name, rounds, values, place, hover=[f"round {r}, {words(v)}" for r, v in
                    zip(rounds, values, strict=True)])
        for place, (name, values) in enumerate(lines.items())
    ]  # fmt: skip
    return charts.figure(
        traces,
        xaxis=charts.counts_axis("round", max(rounds)),
        yaxis=charts.axis(title, rangemode="tozero", tickformat="~s"),
        showlegend=len(traces) > 1,
    )


def _trust_figure(result: RunResult) -> charts.Figure:
    traces = [
        charts.line(name, list(range(1, len(values) + 1)), values, place)
        for place, (name, values) in enumerate(result.trust.items())
        if values
    ]
    return charts.figure(
        traces[:MOST_SITES],
        xaxis=charts.counts_axis("message of an agent", max(map(len, result.trust.values()))),
        yaxis=charts.axis("trust in what was received", range=[-0.02, 1.02]),
        showlegend=len(traces) <= 12,
    )


def _contributions(result: RunResult) -> list[str]:
    """Messages and bytes of each agent."""
    rows = []
    for row in result.contributions():
        counts = ("messages_sent", "messages_received", "last_replied", "joined")
        sent, received, *rest = ("—" if row[key] is None else str(row[key]) for key in counts)
        sizes = (size(row[key]) for key in ("bytes_up", "bytes_down"))
        numbers = (sent, received, *sizes, *rest)
        rows.append([cell(row["site"]), *(cell(one, numeric=True) for one in numbers)])
    ends = ("Last reply in exchange", "First asked in exchange")
    head = ("Agent", "Messages sent", "Messages received", "Up", "Down", *ends)
    body = table("What each agent has sent and received", head, rows)
    return [folded(counted(len(rows), "agent"), body, len(rows))]


def _communication_table(result: RunResult, rounds: int) -> str:
    rows = []
    for name, key in (("Up", "bytes_up"), ("Down", "bytes_down")):
        total = sum(row[key] for row in result.rounds)
        each = total / len(result.rounds)
        rows.append([name, size(total), size(total / rounds), size(each)])
    seconds = sum(row["cpu_seconds"] for row in result.rounds)
    parts = (seconds, seconds / rounds, seconds / len(result.rounds))
    if seconds:
        rows.append(["CPU time", *(f"{part:.3g} s" for part in parts)])
    head = ("", "In all", "Per round", "Per agent and round")
    body = [[cell(row[0]), *(cell(one, numeric=True) for one in row[1:])] for row in rows]
    return table("Bytes and CPU time" if seconds else "Bytes", head, body)


# ------------------------------------------------------------------ absences


def _absences(result: RunResult) -> list[str]:
    return [*_failures(result), *_missed(result)]


def _failures(result: RunResult) -> list[str]:
    """The failed evaluations with their reasons and regions."""
    rows = []
    for row in result.failures():
        count = cell(f"{row['failed']} of {row['evaluations']}", numeric=True)
        why = "; ".join(f"{reason} ({n})" for reason, n in row["reasons"].items())
        rows.append([cell(row["site"]), count, cell(row["where"] or "unclear"), cell(why)])
    if not rows:
        return []
    body = table("Evaluations that failed", ("Agent", "Failed", "Where", "Why"), rows)
    total = sum(row["failed"] for row in result.failures())
    share = f"{total} of {len(result.records)} evaluations failed."
    return [paragraph(share), folded(counted(len(rows), "agent"), body, len(rows))]


def _missed(result: RunResult) -> list[str]:
    if not result.rounds:
        return []
    missed = [row for row in result.rounds if not row["replied"]]
    if not missed:
        return [paragraph("Every agent replied to every request.")]
    rows = []
    for name in result.names:
        mine = [row for row in missed if row["agent"] == name]
        if not mine:
            continue
        asked = sum(row["agent"] == name for row in result.rounds)
        reasons: dict[str, list[int]] = {}
        for row in mine:
            reasons.setdefault(row["failure"] or "no reply", []).append(row["round"])
        why = "; ".join(f"{code}: {spans(rounds)}" for code, rounds in sorted(reasons.items()))
        rows.append([cell(name), cell(f"{len(mine)} of {asked}", numeric=True), cell(why)])
    head = ("Agent", "Rounds without it", "Why, and in which")
    body = table("Agents that did not reply", head, rows)
    share = f"{len(missed)} of {len(result.rounds)} requests had no reply."
    return [paragraph(share), folded(counted(len(rows), "agent"), body, len(rows))]


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
    if result.part == "site" and sees is None:
        sentences = []
    body = [] if sees is None else [_sees_table(sees)]
    return [*map(paragraph, sentences), *body, paragraph(not_covered + files[result.part])]


def _sees_table(sees: Sees) -> str:
    head = ("Message", "From", "Content", "Readers")
    rows = [cells([row.message, row.sender, row.content, row.who]) for row in sees.rows]
    return table("Every kind of message of this protocol", head, rows)


# ------------------------------------------------------------------ the run


def _run(result: RunResult) -> list[str]:
    rounds = {row["round"] for row in result.rounds}
    rows = [
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
    parameters = [cells([p.name, p.kind, _range(p), p.scale]) for p in result.space.parameters]
    outcome = "smaller is better" if result.space.outcome.minimize else "larger is better"
    if result.space.outcomes:
        outcome = "; ".join(one.words for one in result.space.outcomes)
    caption = f"Search space; of the outcome{'s' * bool(result.space.outcomes)}, {outcome}"
    return [
        facts("The run", rows),
        table(caption, head, parameters),
        *_constraints(result.space),
    ]


def _constraints(space: SearchSpace) -> list[str]:
    rows = [cells([one]) for one in space.constraint_words]
    if not rows:
        return []
    return [table("Constraints, which every point of a search meets", ("Constraint",), rows)]


def _budget(result: RunResult) -> str:
    if result.budget is None:
        return "not recorded"
    return f"{counted(result.budget, 'evaluation')} of each agent, initial ones included"


def _range(parameter: Parameter) -> str:
    if parameter.values:
        return ", ".join(map(str, parameter.values))
    return f"{parameter.lower:g} to {parameter.upper:g}"


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
