"""What the parameters do, and all trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from botorch_fed.report import charts
from botorch_fed.report.effects import Importances, importances, slices
from botorch_fed.report.page import (
    Chart,
    cell,
    details,
    paragraph,
    parameter_cell,
    plain,
    table,
    value_cell,
)
from botorch_fed.report.runs import best_trials, points_of, value_of
from botorch_fed.report.statistics import brief, counted, number
from botorch_fed.space import Parameter, SearchSpace

if TYPE_CHECKING:
    from botorch_fed.run import Record, RunResult

MOST_POINTS = 1500  # in one chart
MOST_LINES = 300  # of parallel coordinates
MOST_ROWS = 2000  # of the table of trials
MOST_SLICES = 8  # parameters with a slice
MOST_SLICED = 12  # sites with slices


def _rows(result: RunResult) -> list[Record]:
    """Observations with values, before and in the run."""
    return [row for row in (*result.given, *result.records) if row["y"] is not None]


def _importances(space: SearchSpace, rows: Sequence[Record]) -> Importances | None:
    """Importances for the (first) objective, each site's outcomes standardised."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["agent"], []).append(value_of(space, row))
    scales = {name: _scale(found) for name, found in values.items()}
    kept = [row for row in rows if scales[row["agent"]][1] > 0]
    points = points_of(space, kept)
    places = [[charts.place_of(p, point[p.name]) for p in space.parameters] for point in points]
    standardised = [
        (value_of(space, row) - scales[row["agent"]][0]) / scales[row["agent"]][1] for row in kept
    ]
    return importances(space, places, standardised)


def _scale(values: list[float]) -> tuple[float, float]:
    y = torch.tensor(values, dtype=torch.float64)
    return float(y.mean()), float(y.std()) if len(y) > 1 else 0.0


def parameters(result: RunResult) -> list[str | Chart]:
    """Importances, slices and parallel coordinates."""
    rows = _rows(result)
    if not rows:
        return []
    space = result.space
    by_name = {p.name: p for p in space.parameters if p.kind != "fixed"}
    found = _importances(space, rows)
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
    points = points_of(space, drawn)
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
                    [_trial_words(space, drawn[i], points[i], parameter) for i in mine],
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


def _trial_words(
    space: SearchSpace, row: Record, point: Mapping[str, Any], parameter: Parameter
) -> str:
    """A site, the value, and one parameter; the table of trials has all of them."""
    named = charts.named({parameter.name: point[parameter.name]})
    return f"{plain(row['agent'])}: {number(value_of(space, row))}<br>{named}"


def _parallel_chart(result: RunResult, rows: list[Record], order: list[Parameter]) -> Chart:
    """Every trial as a line through all parameters, the best ones on top."""
    space = result.space
    sign = -1.0 if space.metrics[space.objectives[0]].minimize else 1.0
    scored = sorted((sign * value_of(space, row), i) for i, row in enumerate(rows))
    if len(scored) > MOST_LINES:
        step = len(scored) / MOST_LINES
        scored = [scored[-1 - int(k * step)] for k in range(MOST_LINES)][::-1]
    kept = [rows[i] for _, i in scored]
    points = points_of(space, kept)
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
            words += [*(_trial_words(space, kept[i], points[i], p) for p in order), ""]
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


def trials(result: RunResult) -> list[str | Chart]:
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
    for (row, number_), point in zip(kept, points_of(space, [row for row, _ in kept]), strict=True):
        values = row["y"] if isinstance(row["y"], list) else [row["y"]]
        rows.append(
            [
                cell(row["agent"]),
                cell(number_, numeric=True),
                cell(row.get("status", "completed") if "round" in row else "given"),
                *map(value_cell, missing if row["y"] is None else values),
                *map(parameter_cell, point.values()),
                cell(row.get("reason") or row.get("violates") or row.get("label", "")),
            ]
        )
    metrics = [one.name for one in space.metrics] if space.outcomes else ["value"]
    heads = ["Site", "Trial", "Status", *metrics, *space.names, "Note"]
    fewer = len(kept) < len(numbered)
    of = f"The last {len(kept):,} of {len(numbered):,} trials" if fewer else "All trials"
    body = table(f"{of}, in the parameters' units", heads, rows, kind="trials")
    return [details(f"Table of {counted(len(rows), 'trial')}", body)]
