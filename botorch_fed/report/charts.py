"""Plotly figures as plain data.

Colours are variables of the style sheet, ``"var(--c0)"``, with an opacity ``"var(--c0)/0.2"``;
``report.js`` replaces them by the page's colours, light or dark. Text of others goes through
`page.plain` before it comes here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from botorch_fed.report.page import plain
from botorch_fed.report.runs import Run
from botorch_fed.report.statistics import Estimate, number, shown
from botorch_fed.space import Parameter, Value

Figure = dict[str, Any]
COLOURS = 6  # of the style sheet
SHADES = 5  # of the style sheet, from bad to good
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_MARKERS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
NO_HOVER: Figure = {"hoverinfo": "skip", "showlegend": False}
REFERENCE: Figure = {"color": "var(--ink)", "width": 1, "dash": "dash"}


def colour(place: int) -> str:
    """The colour of a run or a site."""
    return f"var(--c{place % COLOURS})"


def line_style(place: int) -> Figure:
    """The line of a run or a site."""
    width = 3 if place == 0 else 2
    return {"color": colour(place), "dash": _DASHES[place % len(_DASHES)], "width": width}


def symbol(place: int) -> str:
    """The marker of a run or a site."""
    return _MARKERS[place % len(_MARKERS)]


def line(
    name: str,
    x: Sequence[float],
    y: Sequence[float | None],
    place: int,
    *,
    hover: Sequence[str] | None = None,
    **more: Any,
) -> Figure:
    """A line of a run or a site."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 12 else "lines",
        "name": plain(name),
        "x": list(x),
        "y": list(y),
        "line": line_style(place),
        "marker": {"symbol": symbol(place), "size": 6, "color": colour(place)},
        **said(hover or [number(v) if v is not None else "" for v in y], name),
        **more,
    }


def said(words: Sequence[str], name: str = "") -> Figure:
    """What a trace says of its points."""
    text = [f"{plain(name)}: {word}" if name else word for word in words]
    return {"text": text, "hovertemplate": "%{text}<extra></extra>"}


def band(
    x: Sequence[float], low: Sequence[float], high: Sequence[float], place: int, **more: Any
) -> Figure:
    """The area between two lines."""
    return {
        "type": "scatter",
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "fillcolor": f"{colour(place)}/0.16",
        "mode": "lines",
        "line": {"width": 0, "color": colour(place)},
        **NO_HOVER,
        **more,
    }


def points(
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    place: int,
    hover: Sequence[str],
    *,
    marker: Mapping[str, Any] | None = None,
    **more: Any,
) -> Figure:
    """Single points."""
    style = {"color": colour(place), "size": 7, "opacity": 0.75, **(marker or {})}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(name),
        "x": list(x),
        "y": list(y),
        "marker": style,
        **said(hover),
        **more,
    }


def steps(name: str, x: Sequence[float], y: Sequence[float | None], place: int) -> Figure:
    """A line that keeps its value until the next point."""
    found = line(name, x, y, place)
    found["line"] = {**found["line"], "shape": "hv"}
    return found


def figure(data: Sequence[Figure], **layout: Any) -> Figure:
    """A figure; the rest of its layout is in ``report.js``."""
    return {"data": list(data), "layout": layout}


def axis(title: str, **more: Any) -> Figure:
    """An axis of numbers."""
    return {"title": {"text": plain(title)}, "type": "linear", "automargin": True, **more}


def counts_axis(title: str, most: int) -> Figure:
    """An axis of whole numbers up to `most`."""
    step = {"dtick": 1} if most <= 14 else {}
    return axis(title, tickformat=",d", **step)


def mean_lines(
    run: Run, curves: Mapping[str, list[float]], estimates: Mapping[int, Estimate], **more: Any
) -> list[Figure]:
    """The mean over agents, query by query, with its interval."""
    queries = list(estimates)
    found = list(estimates.values())
    words = [
        f"query {query}: {number(one.mean)}"
        + ("" if one.half is None else f", 95 % interval {number(one.low)} to {number(one.high)}")
        + f", {one.count} of {len(curves)} agents"
        for query, one in estimates.items()
    ]
    key = {"legendgroup": f"r{run.place}", **more}
    area = band(queries, [o.low for o in found], [o.high for o in found], run.place, **key)
    return [area, line(run.label, queries, [o.mean for o in found], run.place, hover=words, **key)]


# ------------------------------------------------------------------ axes of parameters


def place_of(parameter: Parameter, value: Value) -> float:
    """A value as a number on an axis."""
    return float(parameter.values.index(value)) if parameter.values else float(value)


def share_of(parameter: Parameter, value: Value) -> float:
    """Where a value lies between the ends of its axis, from 0 to 1."""
    if parameter.values:
        most = len(parameter.values) - 1
        return place_of(parameter, value) / most if most else 0.5
    low, high, x = parameter.lower, parameter.upper, float(value)
    if parameter.scale == "log":
        low, high, x = math.log(low), math.log(high), math.log(x)
    return (x - low) / (high - low)


def parameter_axis(parameter: Parameter, **more: Any) -> Figure:
    """An axis of a parameter, in the user's units."""
    found = axis(parameter.name, **more)
    if parameter.values:
        names = [plain(shown(value), 14) for value in parameter.values]
        ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": names}
        return {**found, **ticks, "range": [-0.5, len(names) - 0.5]}
    low, high = parameter.lower, parameter.upper
    if parameter.scale == "log":
        low, high = math.log10(low), math.log10(high)
        found |= {"type": "log", "dtick": 1 if high - low >= 2 else "D2"}
    beyond = 0.04 * (high - low)
    return {**found, "range": [low - beyond, high + beyond]}


def ends_of(parameter: Parameter) -> tuple[str, str]:
    """The names of the lower and the upper end of an axis."""
    if parameter.values:
        return plain(shown(parameter.values[0]), 14), plain(shown(parameter.values[-1]), 14)
    return f"{parameter.lower:g}", f"{parameter.upper:g}"


def level(height: float) -> Figure:
    """A level line through a chart."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height}
    return {**line, "line": REFERENCE}


def note_at(height: float, words: str) -> Figure:
    place = {"xref": "paper", "x": 1, "y": height, "xanchor": "right", "yanchor": "bottom"}
    return {**place, "text": words, "showarrow": False, "font": {"size": 11}}


def named(point: Mapping[str, Any]) -> str:
    """Parameters by name for a hover text."""
    return "<br>".join(
        f"{plain(name, 30)} = {plain(shown(value), 30)}" for name, value in point.items()
    )
