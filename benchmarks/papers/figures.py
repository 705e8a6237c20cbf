"""Figures from the committed results, one per claim.

    python -m benchmarks.papers.figures fts
    python -m benchmarks.papers.figures dp_fts_de
    python -m benchmarks.papers.figures fed_gp
    python -m benchmarks.papers.figures private_ucb
    python -m benchmarks.papers.figures --smoke     all of them, small, and nothing kept

Writes PNG files to ``benchmarks/papers/figures``. Lines are means, bands 95 % bootstrap intervals
of the mean, pointwise: over repeats where targets are fixed (landmine, activity recognition), over
functions where they are drawn (synthetic). Those of ``dp_fts_de``, ``fed_gp`` and ``private_ucb``
are over seeds, and drawn from whatever has been run. The functions' smallest values of ``fed_gp``
are in ``BOTORCH_FED_DATA``. Needs matplotlib, which the package
itself does not: ``pip install matplotlib``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from scipy.optimize import isotonic_regression

from benchmarks.papers import dp_fts_de, fed_gp, fts, private_ucb
from benchmarks.papers.ledger import Results
from benchmarks.statistics import interval

try:
    import matplotlib
except ImportError as error:
    raise SystemExit(
        "Figures need matplotlib, which is not installed: pip install matplotlib"
    ) from error

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter
from PIL import Image

FIGURES = Path(__file__).parent / "figures"
DPI = 110
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Curve:
    """A line of a panel.

    Attributes:
        label: What the legend calls it.
        colour: Its colour, the same in all panels.
        fields: Which lines of the results it averages.
        dash: Its line style.
    """

    label: str
    colour: str
    fields: dict[str, Any]
    dash: str = "-"


def curve(
    results: Results, what: str, unit: str, fields: dict[str, Any]
) -> tuple[list[int], np.ndarray]:
    """Checkpoints, and one curve per unit, the mean of its lines: `units x checkpoints`."""
    lines = results.select(**fields)
    if not lines:
        return [], np.zeros((0, 0))
    times = [int(t) for t in lines[0][what]]
    units: dict[int, list[list[float]]] = {}
    for line in lines:
        units.setdefault(line[unit], []).append([line[what][str(t)] for t in times])
    whole = max(len(values) for values in units.values())
    means = [np.mean(values, axis=0) for values in units.values() if len(values) == whole]
    return times, np.array(means)


def draw(
    axes: Axes, results: Results, what: str, unit: str, curves: Iterable[Curve], first: int = 0
) -> None:
    """Curves with their bands; rows that were not run are left out."""
    for c in curves:
        times, values = curve(results, what, unit, c.fields)
        if not len(values):
            continue
        keep = [k for k, t in enumerate(times) if t >= first]
        x = [times[k] for k in keep]
        mean = values[:, keep].mean(axis=0)
        band = np.array([interval(values[:, k]) for k in keep])
        axes.plot(x, mean, c.dash, color=c.colour, label=c.label, linewidth=1.5)
        axes.fill_between(x, band[:, 0], band[:, 1], color=c.colour, alpha=0.13, linewidth=0)


def queries_axis(axes: Axes, *, log: bool) -> None:
    """The axis of queries."""
    if log:
        axes.set_xscale("log")
        axes.set_xticks([1, 2, 3, 5, 10, 20, 50], ["1", "2", "3", "5", "10", "20", "50"])
        axes.set_xticks([], minor=True)
    axes.set_xlabel("queries")


def save(figure: Figure, name: str, colours: int = 128) -> None:
    """Write a figure in few colours, without a date, so that equal figures are equal files."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    path = FIGURES / f"{name}.png"
    buffer = BytesIO()
    figure.savefig(buffer, dpi=DPI, bbox_inches="tight")
    image = Image.open(buffer).convert("RGB").quantize(colours)
    image.save(path, optimize=True)
    plt.close(figure)
    print(f"{path} ({path.stat().st_size / 1e3:.0f} kB)")


# ------------------------------------------------------------------ colours, common to all figures

LABELS = {
    "ts": ("TS (good own GP)", "black", "-"),
    "ts-raw": ("TS (paper's GP)", "tab:gray", "--"),
    "ei": ("EI", "tab:cyan", "-"),
    "ei-warped": ("EI, log-warped", "tab:blue", "-"),
    "corners-ts": ("two corners, then TS", "tab:olive", "-"),
    "sobol-ts": ("three Sobol points, then TS", "tab:pink", "--"),
    "random": ("random", "silver", ":"),
    "field": ("ours with random fields", "tab:green", "--"),
    "fts-paper": ("FTS as in the paper", "tab:orange", "-"),
    "fts-mean": ("FTS, informative messages", "tab:brown", "-"),
    "rgpe": ("RGPE", "tab:purple", "-"),
    "taf": ("TAF", "mediumorchid", "--"),
    "ours": ("ours", "tab:red", "-"),
    "transfer": ("FTS()", "tab:red", "-"),
}


def of_rows(rows: Sequence[str], **fields: Any) -> list[Curve]:
    """The curves of some rows."""
    return [Curve(LABELS[r][0], LABELS[r][1], {"row": r, **fields}, LABELS[r][2]) for r in rows]


# ------------------------------------------------------------------ federated Thompson sampling


def landmine(entry: str = "landmine") -> None:
    """Without and with messages, then per target."""
    results = Results(f"fts/{entry}", fts.keys_of(entry))
    if not results.lines:
        return
    alone = ("random", "ts-raw", "ts", "ei", "ei-warped", "sobol-ts", "corners-ts")
    transfer = ("ts", "fts-paper", "rgpe", "taf", "field", "corners-ts", "ours")
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 4.8), sharey=True)
    for axes, rows, title in zip(
        panels, (alone, transfer), ("no messages", "messages of 28 others"), strict=True
    ):
        draw(axes, results, "best", "repeat", of_rows(rows), first=1)
        queries_axis(axes, log=True)
        axes.set_title(title)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    panels[0].set_ylabel("best validation AUC, mean of 6 fields")
    save(figure, f"fts-{entry}")
    targets = sorted({line["target"] for line in results.lines})
    figure, grid = plt.subplots(2, 3, figsize=(9.5, 5.5), sharex=True)
    for axes, target in zip(grid.flat, targets, strict=False):
        shown = ("ts", "fts-paper", "corners-ts", "ours")
        draw(axes, results, "best", "repeat", of_rows(shown, target=target), first=1)
        queries_axis(axes, log=True)
        axes.set_title(f"field {target}")
    for axes in grid[0]:
        axes.set_xlabel("")
    for axes in grid[:, 0]:
        axes.set_ylabel("best AUC")
    grid[0, 0].legend(loc="lower right")
    save(figure, f"fts-{entry}-targets")


def setting(row: str, distance: float, observed: int, features: int) -> dict[str, Any]:
    """A row of the synthetic experiment in a setting."""
    return {"row": row, "distance": distance, "observed": observed, "features": features}


def synthetic() -> None:
    """Fig. 1 in three panels, simple and cumulative regret; then what a far federation costs."""
    results = Results("fts/synthetic", fts.SYNTHETIC_KEYS)
    if not results.lines:
        return
    alone = Curve("TS", "black", {"row": "ts"})
    panels: list[tuple[str, list[Curve]]] = []
    for observed in fts.OBSERVED:
        panels.append(
            (
                f"$d_n$ = 0.02, $t_n$ = {observed}",
                [
                    alone,
                    Curve("FTS, M = 50", "tab:orange", setting("fts", 0.02, observed, 50)),
                    Curve("FTS, M = 100", "tab:blue", setting("fts", 0.02, observed, 100)),
                ],
            )
        )
    slow = setting("fts", 1.2, 100, 100)
    panels.append(
        (
            "$d_n$ = 1.2, $t_n$ = 100, M = 100",
            [
                alone,
                Curve(r"FTS, $p_t = 1 - 1/\sqrt{t}$", "tab:orange", slow),
                Curve("FTS, $p_t = 1 - 1/t^2$", "tab:blue", {**slow, "row": "fts-fast"}),
            ],
        )
    )
    _regrets(results, panels, "fts-synthetic")
    panels = []
    for distance in fts.DISTANCES:
        panels.append(
            (
                f"$d_n$ = {distance}, $t_n$ = 40, M = 100",
                [
                    alone,
                    Curve("FTS", "tab:orange", setting("fts", distance, 40, 100)),
                    Curve("ours", "tab:red", setting("ours", distance, 40, 100)),
                    Curve(
                        "ours, then EI",
                        "tab:purple",
                        setting("ours-then-ei", distance, 40, 100),
                        "--",
                    ),
                ],
            )
        )
    panels.append(
        (
            "messages about other functions",
            [
                alone,
                Curve("EI", "tab:cyan", {"row": "ei"}),
                Curve("FTS", "tab:orange", {"row": "fts-field"}),
                Curve("ours", "tab:red", {"row": "ours-field"}),
                Curve("ours, then EI", "tab:purple", {"row": "ours-then-ei-field"}, "--"),
            ],
        )
    )
    _regrets(results, panels, "fts-synthetic-designs")


def _regrets(results: Results, panels: list[tuple[str, list[Curve]]], name: str) -> None:
    figure, grid = plt.subplots(2, len(panels), figsize=(9.5, 5.5), sharey="row", squeeze=False)
    for column, (title, curves) in zip(grid.T, panels, strict=True):
        draw(column[0], results, "regret", "function", curves)
        draw(column[1], results, "cumulative", "function", curves)
        column[0].set_title(title)
        column[1].legend(loc="upper left")
        column[0].set_yscale("log")
        column[0].set_ylim(2e-4, 0.9)
        queries_axis(column[1], log=False)
    grid[0, 0].set_ylabel("simple regret")
    grid[1, 0].set_ylabel("cumulative regret")
    save(figure, name)


def har(entry: str) -> None:
    """Per subject, never averaged, as the paper's Fig. 7."""
    results = Results(f"fts/{entry}", fts.keys_of(entry))
    if not results.lines:
        return
    optimum = {line["target"]: line["optimum"] for line in results.lines}
    rows = ("ts", "ei-warped", "fts-paper", "fts-mean", "field", "ours")
    figure, grid = plt.subplots(2, 3, figsize=(9.5, 6), sharex=True)
    for axes, target in zip(grid.flat, sorted(optimum), strict=False):
        draw(axes, results, "best", "repeat", of_rows(rows, target=target), first=1)
        axes.axhline(optimum[target], color="black", linewidth=0.7, linestyle=":")
        queries_axis(axes, log=True)
        axes.set_title(f"subject {target + 1}")
    for axes in grid[0]:
        axes.set_xlabel("")
    for axes in grid[:, 0]:
        axes.set_ylabel("best validation accuracy")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    save(figure, f"fts-{entry}")


def growing(entry: str) -> None:
    """Fig. 4: the others stand still, or go on."""
    results = Results(f"fts/{entry}", fts.keys_of(entry))
    if not results.lines:
        return
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.5), sharey=True)
    for axes, row in zip(panels, ("fts-mean", "ours"), strict=True):
        curves = [
            Curve("$t_n$ = 50", "black", {"row": row, "others": "fixed"}),
            Curve("$t_n$ = 50 + t", "tab:red", {"row": row, "others": "growing"}),
        ]
        draw(axes, results, "best", "repeat", curves, first=1)
        queries_axis(axes, log=True)
        axes.set_title(LABELS[row][0])
        axes.legend(loc="lower right")
    panels[0].set_ylabel("best accuracy, mean of 6 subjects")
    save(figure, f"fts-{entry}")


def by_time() -> None:
    """Fig. 3: what is found in how much CPU time, objectives included."""
    names = {"landmine": "best AUC, mean of 6 fields", "har": "best accuracy, mean of 6 subjects"}
    found = {name: Results(f"fts/{name}{fts.TIMED}", fts.keys_of("landmine")) for name in names}
    if not all(results.lines for results in found.values()):
        return
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 4))
    for axes, (name, results) in zip(panels, found.items(), strict=True):
        for c in of_rows(("ts-raw", "fts-paper", "rgpe", "taf", "transfer")):
            _, best = curve(results, "best", "repeat", c.fields)
            _, spent = curve(results, "cpu_by_query", "repeat", c.fields)
            if not len(best):
                continue
            band = np.array([interval(column) for column in best.T])
            x = spent.mean(axis=0)
            axes.plot(x[1:], best.mean(axis=0)[1:], c.dash, color=c.colour, label=c.label)
            axes.fill_between(x[1:], *band[1:].T, color=c.colour, alpha=0.13, linewidth=0)
        axes.set(xscale="log", xlabel="CPU seconds of a site", ylabel=names[name])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    save(figure, "fts-time")


def all_of_fts() -> None:
    """Every figure of federated Thompson sampling."""
    for entry in ("landmine", "landmine-tol", "landmine-log"):
        landmine(entry)
    synthetic()
    for entry in ("har", "har-dp"):
        har(entry)
    for entry in fts.GROWING:
        growing(entry)
    by_time()


# ------------------------------------------------------------------ differentially private

BLACK, GREY, ORANGE, SKY, GREEN = "#000000", "#8a8a8a", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"  # all of Okabe and Ito's palette
EPS, DELTA = "\N{GREEK SMALL LETTER EPSILON}", "\N{GREEK SMALL LETTER DELTA}"
AXES = {
    "one_minus_auc": "1 \N{MINUS SIGN} best AUC so far",
    "one_minus_mean": "1 \N{MINUS SIGN} mean AUC of queries so far",
    "regret": "simple regret",
    "cumulative": "cumulative regret",
}


@dataclass(frozen=True)
class Style:
    """A row in all panels.

    Attributes:
        label: What it is called beside its line.
        colour: Its colour.
        dash: Its line style.
        cost: Whether its epsilon is added to its label.
    """

    label: str
    colour: str
    dash: str = "-"
    cost: bool = False


STYLES = {
    "ts": Style("TS", BLACK),
    "ts-warped": Style("TS, log-warped", BLACK, "--"),
    "ours": Style("ours", VERMILION, cost=True),
    "ours-2": Style("ours", VERMILION, cost=True),
    "ours-warped-2": Style("ours, warped", PURPLE, cost=True),
    "ceiling": Style("ours, not private", VERMILION, ":"),
    "field": Style("random field", GREEN, "--"),
    "corners": Style("4 corners", BLUE),
    "corners-others": Style("4 other corners", BLUE, "--"),
    "sobol": Style("6 Sobol points", SKY),
    "sobol-10": Style("10 Sobol points", SKY, "--"),
    "sobol-20": Style("20 Sobol points", SKY, ":"),
    "sobol-warped": Style("6 Sobol, warped", SKY, "--"),
    "paper": Style("paper", ORANGE, cost=True),
    "paper-q.35-z1": Style("paper", ORANGE, cost=True),
    "paper-q.25-z1": Style("paper", ORANGE, cost=True),
    "correlated-q.25-z1": Style("paper, less noise", ORANGE, "--", cost=True),
}


@dataclass(frozen=True)
class Source:
    """The runs of an entry with one number of starts."""

    results: Results
    starts: int

    @classmethod
    def of(cls, entry: str, starts: int) -> Source:
        return cls(Results(f"dp_fts_de/{entry}", dp_fts_de.KEYS), starts)

    def lines(self, row: str) -> list[Any]:
        return self.results.select(row=row, starts=self.starts)

    def curves(self, row: str, what: str) -> tuple[list[int], dict[int, np.ndarray]]:
        """Queries, and by seed what `AXES` names."""
        lines = self.lines(row)
        field = {"one_minus_auc": "best", "one_minus_mean": "mean"}.get(what, what)
        times = [int(t) for t in lines[0][field]] if lines else []
        found = {}
        for line in lines:
            values = np.array(list(line[field].values()))
            found[line["seed"]] = values if field == what else 1 - values
        return times, dict(sorted(found.items()))

    def label(self, row: str, style: Style) -> str:
        line = self.lines(row)[0]
        if not style.cost or line["epsilon"] is None:
            return style.label
        return f"{style.label}, {EPS} = {line['epsilon']:.2g}"


def some(styles: Mapping[str, Style], *rows: str) -> dict[str, Style]:
    """The styles of some rows."""
    return {row: styles[row] for row in rows}


def draw_rows(
    axes: Axes,
    source: Source,
    what: str,
    styles: Mapping[str, Style],
    *,
    versus: str | None = None,
    first: int = 1,
) -> None:
    """Losses with their bands, or what they are more than another row's, seed by seed.

    Rows that were not run are left out; one with fewer seeds than the others says so.
    """
    found = {row: source.curves(row, what) for row in styles}
    most = max(len(by_seed) for _, by_seed in found.values())
    other = source.curves(versus, what)[1] if versus is not None else None
    last = first
    for row, (times, by_seed) in found.items():
        if other is not None:
            by_seed = {s: v - other[s] for s, v in by_seed.items() if s in other}
        if not by_seed or row == versus:
            continue
        keep = [k for k, t in enumerate(times) if t >= first]
        x = [times[k] for k in keep]
        values = np.array(list(by_seed.values()))[:, keep]
        band = np.array([interval(column) for column in values.T])
        style, label = styles[row], source.label(row, styles[row])
        if len(by_seed) < most:
            label += f" ({len(by_seed)} seeds)"
        axes.plot(x, values.mean(axis=0), style.dash, color=style.colour, label=label, lw=1.5)
        axes.fill_between(x, band[:, 0], band[:, 1], color=style.colour, alpha=0.13, lw=0)
        last = max(last, x[-1])
    if last == first:
        not_yet(axes)
        return
    if versus is not None:
        axes.axhline(0, color=BLACK, lw=0.8)
    axes.set_xlim(first, last)


def not_yet(axes: Axes) -> None:
    """A panel without results."""
    axes.text(0.5, 0.55, "not run yet", transform=axes.transAxes, ha="center", color=GREY)
    axes.set_xticks([])


def rounds_axis(axes: Axes, *, log: bool) -> None:
    """The axis of an agent's queries."""
    axes.set_xlabel("queries per agent")
    if log:
        last = axes.get_xlim()[1]
        ticks = [t for t in (1, 2, 3, 5, 10, 20, 30, 40, 60) if t <= last and t != last * 2 / 3]
        axes.set_xscale("log")
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.set_xticks([], minor=True)


def label_lines(figure: Figure) -> None:
    """Names at the right ends of lines, moved apart where they would overlap."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        if not lines:
            continue
        to_axes = axes.transData + axes.transAxes.inverted()
        last = [(1.0, float(np.asarray(line.get_ydata())[-1])) for line in lines]
        ends = np.clip(to_axes.transform(np.array(last))[:, 1], 0, 1)
        step = 9.5 / 72 / (axes.get_position().height * figure.get_figheight())
        order = np.argsort(ends, kind="stable")
        spaced = np.arange(len(lines)) * step
        middle = isotonic_regression(ends[order] - spaced).x
        top = max(1.02, spaced[-1] - 0.1)
        for k, y in zip(order, np.clip(middle, -0.1, top - spaced[-1]) + spaced, strict=True):
            colour = 0.75 * np.array(to_rgb(lines[k].get_color()))  # darker: it is text
            for x, ends_of, dash, width in (
                ((1.0, 1.04), (ends[k], y), "-", 0.6),
                ((1.05, 1.16), (y, y), lines[k].get_linestyle(), 1.5),
            ):
                line = Line2D(x, ends_of, color=lines[k].get_color(), ls=dash, lw=width)
                line.set_transform(axes.transAxes)
                line.set_clip_on(False)
                axes.add_artist(line)
            axes.text(
                1.18,
                y,
                lines[k].get_label(),
                transform=axes.transAxes,
                va="center",
                fontsize=8,
                color=colour,
            )


def caption(
    figure: Figure, groups: Iterable[Sequence[Any]], of: str, *, bands: bool = True
) -> None:
    """What is shown, over which seeds: `groups` are the lines of one row each."""
    groups = [group for group in groups if group]
    counts = {len(group) for group in groups}
    seeds = [line["seed"] for group in groups for line in group]
    many = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    band = "bands and bars: 95 % bootstrap interval of the mean over seeds, pointwise"
    figure.supxlabel(
        f"Mean over {many} seeds ({min(seeds)}\N{EN DASH}{max(seeds)}) of {of}"
        + (f";\n{band}." if bands else "."),
        x=0.01,
        ha="left",
        fontsize=8,
        color="0.35",
    )


def finish(
    figure: Figure,
    name: str,
    sources: Sequence[Source],
    rows: Iterable[str],
    of: str,
    *,
    bands: bool = True,
) -> None:
    """Names of lines, a caption, and the file."""
    rows = list(rows)
    label_lines(figure)
    caption(figure, (source.lines(row) for source in sources for row in rows), of, bands=bands)
    save(figure, f"dp_fts_de-{name}", colours=256)


def dp_curves(entry: str, starts: int, rows: Sequence[str], of: str) -> None:
    """Best so far and all queries; beside it, what it is more than an own TS, paired by seeds."""
    source = Source.of(entry, starts)
    styles = some(STYLES, *rows)
    if not any(map(source.lines, styles)):
        return
    regret = "regret" in source.lines("ts")[0]
    whats = ("regret", "cumulative") if regret else ("one_minus_auc", "one_minus_mean")
    figure, grid = plt.subplots(2, 2, figsize=(9.5, 7.5))
    for (left, right), what in zip(grid, whats, strict=True):
        first, log = int(what != "cumulative"), what != "cumulative"
        draw_rows(left, source, what, styles, first=first)
        draw_rows(right, source, what, styles, versus="ts", first=first)
        if what == "regret":
            left.set_yscale("log")
            plain_log(left)
        left.set_ylabel(AXES[what])
        right.set_ylabel(f"{AXES[what]}, row \N{MINUS SIGN} TS")
        for axes in (left, right):
            rounds_axis(axes, log=log)
    grid[0, 0].set_title(_starts(starts))
    grid[0, 1].set_title("difference to TS, same seeds and starts")
    name = f"{entry}-{starts}" if len(_all_starts(entry)) > 1 else entry
    finish(figure, name, [source], rows, of)


def _all_starts(entry: str) -> tuple[int, ...]:
    entries: Any = dp_fts_de.TASKS | dp_fts_de.CONTINUOUS
    starts: tuple[int, ...] = entries[entry].starts
    return starts


@dataclass(frozen=True)
class Mechanism:
    """Rows of one mechanism at several levels of privacy.

    Attributes:
        label: What the legend calls it.
        colour: Its colour.
        marker: Its marker.
        rows: Its rows.
        joined: Whether a line joins them.
    """

    label: str
    colour: str
    marker: str
    rows: tuple[str, ...]
    joined: bool = False


MECHANISMS = (
    Mechanism("ours", VERMILION, "o", tuple(f"ours-{e:g}" for e in (0.25, 0.5, 1, 2, 4, 8)), True),
    Mechanism("ours, warped", PURPLE, "D", ("ours-warped-0.5", "ours-warped-2"), True),
    Mechanism(
        "paper",
        ORANGE,
        "s",
        ("paper-q.35-z1", "paper-q.1-z1", "paper-q.35-z2", "paper-q.25-z1"),
    ),
    Mechanism(
        "paper, correlated noise",
        BLUE,
        "^",
        ("correlated-q.35-z1", "correlated-q.1-z1", "correlated-q.35-z2", "correlated-q.25-z1"),
    ),
)


def epsilon_axis(axes: Axes, delta: float) -> None:
    """The axis of privacy."""
    ticks = (0.25, 0.5, 1, 2, 4, 8, 16)
    axes.set_xscale("log")
    axes.set_xlim(0.2, 40)
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"{EPS} of one agent (zero-out), {DELTA} = {delta:.2g}")


def draw_plane(
    axes: Axes,
    source: Source,
    what: str,
    t: int,
    alone: Mapping[str, Style],
    mechanisms: Sequence[Mechanism] = MECHANISMS,
) -> float:
    """Loss after t queries against epsilon, by both accountants; delta is returned."""
    delta = float("nan")
    for mechanism in mechanisms:
        points = []
        for row in mechanism.rows:
            times, by_seed = source.curves(row, what)
            if not by_seed:
                continue
            line = source.lines(row)[0]
            delta = line["delta"]
            values = np.array([curve[times.index(t)] for curve in by_seed.values()])
            moments = line.get("moments_epsilon", float("nan"))
            points.append((line["epsilon"], moments, values.mean(), *interval(values)))
        if not points:
            continue
        pld, other, mean, low, high = np.array(sorted(points)).T
        axes.errorbar(
            pld,
            mean,
            yerr=[mean - low, high - mean],
            fmt=f"{mechanism.marker}{'-' if mechanism.joined else ''}",
            color=mechanism.colour,
            ms=5,
            lw=1.2,
            elinewidth=1,
            label=f"_{mechanism.label}",
        )
        axes.hlines(mean, pld, other, color=mechanism.colour, lw=0.8, linestyles=":")
        axes.plot(other, mean, mechanism.marker, color=mechanism.colour, ms=5, mfc="white")
    for (row, style), x in zip(alone.items(), np.geomspace(20, 36, len(alone)), strict=True):
        times, by_seed = source.curves(row, what)
        if by_seed:
            values = np.array([curve[times.index(t)] for curve in by_seed.values()])
            mean = values.mean()
            axes.plot(
                [0.2, 40], [mean, mean], style.dash, color=style.colour, lw=1.2, label=style.label
            )
            axes.plot([x, x], interval(values), color=style.colour, lw=1.5)
    return delta


def mechanisms_legend(
    figure: Figure,
    rows: Iterable[str],
    *,
    accountants: bool,
    mechanisms: Sequence[Mechanism] = MECHANISMS,
) -> None:
    """The key of a plane, above it."""
    known = set(rows)
    handles = [
        Line2D([], [], color=m.colour, marker=m.marker, ls="-" if m.joined else "", label=m.label)
        for m in mechanisms
        if known.intersection(m.rows)
    ]
    if accountants:
        handles += [
            Line2D([], [], color=GREY, marker="o", ls="", label="PLD accountant"),
            Line2D(
                [], [], color=GREY, marker="o", ls="", mfc="white", label="moments, as in the paper"
            ),
        ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))


def dp_plane(
    entry: str, what: str, panels: Sequence[tuple[int, int]], alone: tuple[str, ...], of: str
) -> None:
    """Privacy and utility, a panel for a number of starts and of queries."""
    sources = {starts: Source.of(entry, starts) for starts, _ in panels}
    rows = _released(sources.values())
    if not rows:
        return
    figure, grid = plt.subplots(1, len(panels), figsize=(9.5, 4.4))
    for axes, (starts, t) in zip(grid, panels, strict=True):
        delta = draw_plane(axes, sources[starts], what, t, some(STYLES, *alone))
        epsilon_axis(axes, delta)
        axes.set_title(f"{_starts(starts)}, after {t} queries")
        axes.set_ylabel(AXES[what].removesuffix(" so far"))
    mechanisms_legend(figure, rows, accountants=True)
    of += ";\n(q, z) of the paper's rows, from left to right: " + ", ".join(
        _settings(sources.values())
    )
    finish(figure, f"{entry}-plane", list(sources.values()), (*rows, *alone), of)


def _settings(sources: Iterable[Source]) -> list[str]:
    """Sampling rates and noise multipliers of the paper's rows, by epsilon."""
    lines = [line for s in sources for row in MECHANISMS[2].rows for line in s.lines(row)]
    found = {line["epsilon"]: f"({line['q']:g}, {line['z']:g})" for line in lines}
    return [found[epsilon] for epsilon in sorted(found)]


def _released(sources: Iterable[Source]) -> list[str]:
    """The rows of `MECHANISMS` that were run."""
    known = [row for mechanism in MECHANISMS for row in mechanism.rows]
    sources = list(sources)
    return [row for row in known if any(source.lines(row) for source in sources)]


def _starts(count: int) -> str:
    return "1 start" if count == 1 else f"{count} starts"


PLANES = (
    ("landmine-table", "one_minus_auc", "landmine, N = 29"),
    ("har-paper", "regret", "activity recognition, N = 30"),
    ("digits-paper", "regret", "digits, N = 50"),
)
PLANE = tuple(dp_fts_de.named(q, z) for q, z in dp_fts_de.PLANE)
PLANE_MECHANISMS = (
    Mechanism("paper", ORANGE, "s", tuple(f"paper-{name}-own-region" for name in PLANE)),
    Mechanism("DPFTSDE()", VERMILION, "o", tuple(f"default-as-{name}" for name in PLANE), True),
    Mechanism("ours on gains", PURPLE, "D", tuple(f"ours-as-{name}" for name in PLANE), True),
)
PLANE_ALONE = {
    "ts-raw": Style("TS, the paper's", BLACK),
    "ei-warped": Style("EI, log scale", GREEN),
    "sobol-warped": Style("6 Sobol, warped", SKY, "--"),
    "corners": Style("4 corners", BLUE),
}


def dp_figure3() -> None:
    """Fig. 3 at the paper's operating point: nine (q, z), and ours at the epsilon of each."""
    sources = {entry: Source.of(entry, 10) for entry, _, _ in PLANES}
    rows = [row for mechanism in PLANE_MECHANISMS for row in mechanism.rows]
    if not all(any(map(source.lines, rows)) for source in sources.values()):
        return
    figure, grid = plt.subplots(3, 1, figsize=(9.5, 10.5))
    for axes, (entry, what, title) in zip(grid, PLANES, strict=True):
        delta = draw_plane(axes, sources[entry], what, 60, PLANE_ALONE, PLANE_MECHANISMS)
        epsilon_axis(axes, delta)
        axes.set(title=f"{title}, 10 starts, after 60 queries")
        axes.set_ylabel(AXES[what].removesuffix(" so far"))
    mechanisms_legend(figure, rows, accountants=True, mechanisms=PLANE_MECHANISMS)
    shown = [*rows, *PLANE_ALONE]
    finish(figure, "figure3", [*sources.values()], shown, "the mean over agents")


SIGNALS = (
    ("landmine-table", 10, "landmine, N = 29"),
    ("har", 3, "activity recognition, N = 30"),
    ("digits", 3, "digits, N = 50"),
    ("synthetic-few", 1, "synthetic, N = 200"),
)


def dp_signal() -> None:
    """What of a release is signal."""
    sources = {title: Source.of(entry, starts) for entry, starts, title in SIGNALS}
    rows = _released(sources.values())
    if not rows:
        return
    figure, grid = plt.subplots(2, 2, figsize=(9.5, 7), sharey=True)
    for axes, (title, source) in zip(grid.flat, sources.items(), strict=True):
        axes.set_title(title)
        axes.set_yscale("log")
        delta = _signals(axes, source)
        if delta is None:
            not_yet(axes)
        else:
            axes.axhline(1, color=BLACK, lw=0.8)
            epsilon_axis(axes, delta)
    plain_log(grid[0, 0])
    for axes in grid[:, 0]:
        axes.set_ylabel("signal norm / noise norm of a release")
    mechanisms_legend(figure, rows, accountants=False)
    of = "the mean ratio over releases (marker) and of the first and last release (whisker)"
    finish(figure, "signal", list(sources.values()), rows, of, bands=False)


def _signals(axes: Axes, source: Source) -> float | None:
    delta = None
    for mechanism in MECHANISMS:
        points = []
        for row in mechanism.rows:
            if lines := source.lines(row):
                ratios = [[line[k] for k in ("snr", "snr_first", "snr_last")] for line in lines]
                points.append((lines[0]["epsilon"], *np.mean(ratios, axis=0)))
                delta = lines[0]["delta"]
        if points:
            x, mean, start, end = np.array(sorted(points)).T
            dash = "-" if mechanism.joined else ""
            axes.plot(x, mean, f"{mechanism.marker}{dash}", color=mechanism.colour, ms=5, lw=1.2)
            axes.plot([x, x], [start, end], color=mechanism.colour, lw=1)
    return delta


def plain_log(axes: Axes) -> None:
    """Ticks of a logarithmic axis as decimal numbers, dense enough to read values."""
    low, high = axes.get_ylim()
    ticks = [f * 10.0**e for e in range(-5, 2) for f in (1, 2, 5) if low <= f * 10.0**e <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_yticks([], minor=True)


CIVIDIS = tuple(to_hex(plt.get_cmap("cividis")(x)) for x in (0.0, 0.22, 0.45, 0.68, 0.88))
SYNTHETIC_PANELS: dict[str, dict[str, Style]] = {
    "Fig. 2a: distributed exploration": {
        "ts": Style("TS", BLACK),
        "fts": Style("FTS", BLUE, "--"),
        "fts-de-2": Style("FTS-DE, P = 2", PURPLE, "--"),
        "fts-de-3": Style("FTS-DE, P = 3", ORANGE, "--"),
        "dp-fts": Style("DP-FTS", BLUE),
        "dp-fts-de-2": Style("DP-FTS-DE, P = 2", PURPLE),
        "dp-fts-de-3": Style("DP-FTS-DE, P = 3", ORANGE),
    },
    "Fig. 2b: clip level, P = 2": {
        f"clip-{S:g}" if S != 11 else "dp-fts-de-2": Style(f"S = {S:g}", colour)
        for S, colour in zip(dp_fts_de.CLIP_LEVELS, CIVIDIS, strict=True)
    },
    "Fig. 2c: sampling and noise, P = 2": {
        "q0.15-z1": Style("q = .15, z = 1", CIVIDIS[0], cost=True),
        "dp-fts-de-2": Style("q = .25, z = 1", CIVIDIS[2], cost=True),
        "q0.5-z1": Style("q = .5, z = 1", CIVIDIS[4], cost=True),
        "q0.25-z1.2": Style("q = .25, z = 1.2", CIVIDIS[2], "--", cost=True),
        "q0.25-z1.5": Style("q = .25, z = 1.5", CIVIDIS[2], ":", cost=True),
    },
    "Fig. 6: regions at S = 11": {
        f"dp-fts-de-{P}": Style(f"DP-FTS-DE, P = {P}", colour)
        for P, colour in ((1, BLUE), (2, PURPLE), (3, ORANGE))
    },
    **{
        f"Fig. 7: 50 agents, heterogeneity {alpha:g}": {
            f"alpha{alpha:g}-ts": Style("TS", BLACK),
            f"alpha{alpha:g}-fts": Style("FTS", BLUE, "--"),
            f"alpha{alpha:g}-fts-de-2": Style("FTS-DE, P = 2", PURPLE, "--"),
            f"alpha{alpha:g}-dp-fts": Style("DP-FTS", BLUE),
            f"alpha{alpha:g}-dp-fts-de-2": Style("DP-FTS-DE, P = 2", PURPLE),
        }
        for alpha in dp_fts_de.HETEROGENEITY
    },
    "Fig. 12a: weights, P = 2": {
        "fts-de-2": Style("adaptive, no noise", PURPLE, "--"),
        "fts-de-2-fixed-weights": Style("fixed, no noise", BLUE, "--"),
        "fts-de-2-equal-weights": Style("equal, no noise", ORANGE, "--"),
        "dp-fts-de-2": Style("adaptive", PURPLE),
        "fixed-weights": Style("fixed", BLUE),
        "equal-weights": Style("equal", ORANGE),
    },
}
SPENT_BETTER: dict[str, dict[str, Style]] = {
    "noise of the paper's 40 releases": {
        "ts": Style("TS", BLACK),
        "dp-fts-de-2": Style("as published, P = 2", ORANGE),
        "tight": Style("tight, P = 2", GREEN),
        "correlated": Style("correlated, P = 2", BLUE),
        "dp-fts-de-3": Style("as published, P = 3", ORANGE, "--"),
        "correlated-3": Style("correlated, P = 3", BLUE, "--"),
    },
    "message, few releases to all (dashed: 40)": {
        "ts": Style("TS", BLACK),
        "correlated": Style("sample, 40", BLUE, "--"),
        "correlated-mean": Style("mean, 40", PURPLE, "--"),
        "few-sample": Style("sample, 4", BLUE),
        "few-mean": Style("mean, 4", PURPLE),
        "few-gain": Style("gain, 4 (ours)", VERMILION),
        "field": Style("random field", GREY),
    },
}


def dp_synthetic() -> None:
    """The paper's figures, a panel each, raw and on our scale; the same epsilon spent better."""
    of = "the mean over 200 agents, a new function for every seed"
    first = next(iter(SYNTHETIC_PANELS))
    panels = [(title, "regret", styles) for title, styles in SYNTHETIC_PANELS.items()]
    panels.append((f"{first}, cumulative", "cumulative", SYNTHETIC_PANELS[first]))
    for name, scale in (("synthetic-raw", "as they are"), ("synthetic", "on our scale")):
        source = Source.of(name, 10)
        if not source.results.lines:
            return
        seen = of.replace("200 agents", f"200 agents (Fig. 7: 50), outcomes {scale}")
        _panels(source, panels, name, seen)
    panels = [(t, w, s) for w in ("regret", "cumulative") for t, s in SPENT_BETTER.items()]
    if noisy := source.lines("dp-fts-de-2"):
        of += f"; all messages at {EPS} = {noisy[0]['epsilon']:.2g}"
    _panels(source, panels, "synthetic-spent-better", of)


def _panels(
    source: Source,
    panels: Sequence[tuple[str, str, dict[str, Style]]],
    name: str,
    of: str,
) -> None:
    count = len(panels) // 2
    figure, grid = plt.subplots(count, 2, figsize=(9.5, 2 + 2.3 * count))
    for axes, (title, what, styles) in zip(grid.flat, panels, strict=True):
        axes.set_title(title)
        axes.set_ylabel(AXES[what])
        if not any(map(source.lines, styles)):
            not_yet(axes)
            continue
        draw_rows(axes, source, what, styles, first=int(what == "regret"))
        rounds_axis(axes, log=what == "regret")
        if what == "regret":
            axes.set_yscale("log")
            plain_log(axes)
    rows = dict.fromkeys(row for _, _, styles in panels for row in styles)
    finish(figure, name, [source], rows, of)


def all_of_dp_fts_de() -> None:
    """Every figure of the differentially private protocol, from what has been run."""
    plt.rcParams["figure.constrained_layout.wspace"] = 0.04  # names stand between panels
    fields = "the mean over 29 fields, 10 starts each"
    continuous = ("ts", "ts-warped", "paper", "field", "corners", "ours", "ceiling")
    for entry in dp_fts_de.CONTINUOUS:
        dp_curves(entry, 10, continuous, fields)
    for entry in ("landmine-table", "landmine-table-tol6"):
        alone = ("ts", "field", "corners", "ceiling")
        dp_plane(entry, "one_minus_auc", ((10, 10), (10, 60)), alone, fields)
    dp_figure3()
    dp_signal()
    agents = "the mean over 200 agents, a new function for every seed"
    controls = ("ts", "field", "sobol", "sobol-10", "sobol-20", "ceiling")
    dp_plane("synthetic-few", "regret", ((1, 10), (3, 10)), controls, agents)
    for starts in (1, 3):
        dp_curves("synthetic-few", starts, ("paper-q.25-z1", "ours-2", *controls), agents)
    real = (
        *("ts", "ts-warped", "paper-q.35-z1", "field", "sobol", "sobol-warped"),
        *("corners", "corners-others", "ours-2", "ours-warped-2", "ceiling"),
    )
    for starts in (1, 3):
        dp_curves("har", starts, real, "the mean over 30 subjects")
    dp_curves("digits", 3, real, "the mean over 50 writers")
    dp_synthetic()


# ------------------------------------------------------------------ federated sparse GP

FED_GP = {
    "ours": Style("ours", VERMILION),
    "sequential": Style("FBO-FedGP, as published", ORANGE, "--"),
    "faithful": Style("FBO-FedGP, all at once", ORANGE),
    "global": Style("shared model alone", PURPLE, "--"),
    "local": Style("own model alone", BLACK),
    "fts": Style("FTS", BLUE),
    "dp_fts_de": Style(f"DP-FTS-DE, {EPS} = 10", SKY, "--"),
    "pooled": Style("pooled data (TuRBO)", GREEN, "--"),
    "random": Style("random", GREY, ":"),
}
PRINTED = {
    "FBO-FedGP": Style("FBO-FedGP, Table 1", ORANGE),
    "FTS": Style("FTS, Table 1", BLUE),
}
FINEST = 1e-4  # what seven digits resolve of values in the hundreds
TASK_NAMES = {
    "credit": "credit default, 30 agents",
    "diabetes": "diabetes, 30 agents",
    "support": "SUPPORT, 9 agents",
    "landmine": "landmine, 29 agents",
    "landmine-auc": "landmine (AUC), 29 agents",
}
RULES = {
    "sobol": ("Sobol points", BLACK, "o"),
    "random": ("random points", GREY, "s"),
    "algorithm1": ("Algorithm 1", ORANGE, "^"),
    "dp-k-means": (f"noisy k-means, {EPS} = 1", BLUE, "D"),
}
SIZES = (8, 16, 32)


def found_of(entry: str) -> dict[str, fed_gp.Lines]:
    """The results of an entry by function or task; those that should be there are named if not."""
    usual, methods = fed_gp.ENTRIES[entry].default, fed_gp.ENTRIES[entry].methods
    found = {}
    for unit in fed_gp.ENTRIES[entry].units:
        lines = fed_gp.lines_of(entry, unit)
        if any(method in methods for method in lines.methods()):
            found[unit] = lines
        elif unit in usual:
            print(f"{entry}, {unit}: no results, left out")
    return found


def traces(lines: fed_gp.Lines, method: str, key: str) -> dict[int, np.ndarray]:
    """Values after every round by seed; runs shorter than the longest are left out."""
    by_seed = {line["seed"]: np.array(line[key]) for line in lines.select(method=method)}
    longest = max(map(len, by_seed.values()), default=0)
    return {s: v for s, v in sorted(by_seed.items()) if len(v) == longest}


def draw_traces(axes: Axes, by_seed: Mapping[int, np.ndarray], style: Style, label: str) -> None:
    """A mean with its band over rounds."""
    values = np.array(list(by_seed.values()))
    rounds = np.arange(values.shape[1])
    band = np.array([interval(column) for column in values.T])
    axes.plot(rounds, values.mean(axis=0), style.dash, color=style.colour, label=label, lw=1.5)
    axes.fill_between(rounds, band[:, 0], band[:, 1], color=style.colour, alpha=0.13, lw=0)
    axes.set_xlim(0, rounds[-1])


def absent(where: str, lines: fed_gp.Lines, methods: Iterable[str]) -> None:
    """Say which methods a file has no line of."""
    missing = [method for method in methods if method not in lines.methods()]
    if missing:
        print(f"{where}: no {', '.join(missing)}")


def gap_axis(axes: Axes) -> None:
    """A logarithmic axis with ticks to read, however narrow it is."""
    low, high = axes.get_ylim()
    if high / low > 30:
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
    else:
        steps = high / low > 5
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5), numticks=9) if steps else MaxNLocator(4)
        )
        axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low, high)


def mark_printed(axes: Axes, unit: str, bias: float) -> None:
    """Published values at the right edge; one that is far off stands at the border, in digits."""
    low, high = np.log(axes.get_ylim())
    span = high - low
    gaps = {
        name: values[unit] - bias
        for name, values in fed_gp.fedgp_table1().items()
        if name in PRINTED and values.get(unit, bias) > bias
    }
    inside = {name: g for name, g in gaps.items() if low - span < np.log(g) < high + span}
    logs = np.log([*inside.values(), *axes.get_ylim()])
    margin = 0.06 * (logs.max() - logs.min())
    bottom, top = np.exp([logs.min() - margin, logs.max() + margin])
    axes.set_ylim(bottom, top)
    for name, gap in gaps.items():
        colour = PRINTED[name].colour
        edge: Any = {"ms": 7, "mec": "white", "mew": 0.6, "clip_on": False, "zorder": 5}
        last = axes.get_xlim()[1]
        if name in inside:
            axes.plot([0.9 * last, last], [gap, gap], color=colour, lw=1, label="_mark")
            axes.plot(last, gap, "<", color=colour, label="_mark", **edge)
            continue
        above = gap > top
        axes.plot(last, top if above else bottom, "^" if above else "v", color=colour, **edge)
        axes.annotate(
            f"{gap:.3g}",
            (last, top if above else bottom),
            xytext=(-6, -1 if above else 1),
            textcoords="offset points",
            ha="right",
            va="top" if above else "bottom",
            fontsize=8,
            color=0.75 * np.array(to_rgb(colour)),
        )


def fed_gp_cec2005() -> None:
    """How far the federation's best value is above the function's smallest one."""
    found = found_of("cec2005")
    try:
        biases = {unit: float(fed_gp.CEC[unit]().optimal_values[0]) for unit in found}
    except FileNotFoundError as error:
        print(f"cec2005: left out, the functions' smallest values are not there: {error}")
        return
    if not found:
        return
    columns = 4
    figure, grid = plt.subplots(
        rows := -(-len(found) // columns), columns, figsize=(9.5, 1.2 + 2.1 * rows), squeeze=False
    )
    shown: dict[str, None] = {}
    groups = []
    for k, (unit, lines) in enumerate(found.items()):
        axes = grid.flat[k]
        absent(f"cec2005, {unit}", lines, FED_GP)
        axes.set_yscale("log")
        for method, style in FED_GP.items():
            by_seed = traces(lines, method, "best")
            if by_seed:
                gaps = {s: np.maximum(v - biases[unit], FINEST) for s, v in by_seed.items()}
                draw_traces(axes, gaps, style, style.label)
                groups.append(lines.select(method=method))
                shown[method] = None
        mark_printed(axes, unit, biases[unit])
        gap_axis(axes)
        axes.set_title(f"F{int(unit[1:])}")
        if k + columns >= len(found):
            axes.set_xlabel("rounds")
    for axes in list(grid.flat)[len(found) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel("best \N{MINUS SIGN} smallest value")
    handles = [
        Line2D([], [], color=s.colour, ls=s.dash, lw=1.5, label=s.label)
        for s in some(FED_GP, *(m for m in FED_GP if m in shown)).values()
    ]
    handles += [
        Line2D([], [], color=s.colour, marker="<", ls="-", lw=1, ms=7, mec="white", label=s.label)
        for s in PRINTED.values()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=-(-len(handles) // 3))
    of = (
        f"the best value of ten agents, at least {FINEST:g} above the smallest (seven digits are "
        "kept); F4 with its noise;\ntriangles: published values after 50 rounds, in digits where "
        "out of range"
    )
    caption(figure, groups, of)
    save(figure, "fed_gp-cec2005", colours=256)


def errors_of(lines: fed_gp.Lines, method: str) -> dict[int, np.ndarray]:
    """Mean errors of the agents after every round by seed, 1 - AUC where the score is that."""
    by_seed = traces(lines, method, "mean")
    return {seed: 1 - v for seed, v in by_seed.items()} if has_auc(lines) else by_seed


def has_auc(lines: fed_gp.Lines) -> bool:
    """Whether a task's score is to be large."""
    first = lines.lines[0]
    return bool(first["optimum"] > first["mean"][0])


def smallest_of(lines: fed_gp.Lines) -> float:
    """The smallest error that the agents can reach on the tabulated points."""
    optimum = float(lines.lines[0]["optimum"])
    return 1 - optimum if has_auc(lines) else optimum


def score_of(lines: fed_gp.Lines) -> str:
    return "1 \N{MINUS SIGN} AUC" if has_auc(lines) else "error"


def fed_gp_tasks() -> None:
    """Error curves, and the smallest error that could be reached."""
    found = found_of("tasks")
    if not found:
        return
    columns = min(2, len(found))
    figure, grid = plt.subplots(
        rows := -(-len(found) // columns), columns, figsize=(9.5, 1 + 3.2 * rows), squeeze=False
    )
    methods = fed_gp.ENTRIES["tasks"].methods
    groups = []
    for k, (unit, lines) in enumerate(found.items()):
        axes = grid.flat[k]
        absent(f"tasks, {unit}", lines, methods)
        by_method = {m: errors for m in FED_GP if (errors := errors_of(lines, m))}
        most = max(map(len, by_method.values()))
        for method, by_seed in by_method.items():
            few = "" if len(by_seed) == most else f" ({len(by_seed)} seeds)"
            draw_traces(axes, by_seed, FED_GP[method], FED_GP[method].label + few)
            groups.append(lines.select(method=method))
        low = smallest_of(lines)
        axes.plot(axes.get_xlim(), [low, low], ":", color=BLACK, lw=1, label="smallest on the grid")
        axes.set_title(TASK_NAMES.get(unit, unit))
        axes.set_ylabel(f"{score_of(lines)}, mean over agents")
        axes.set_xlabel("rounds")
    for axes in list(grid.flat)[len(found) :]:
        axes.remove()
    label_lines(figure)
    of = (
        "every agent's own best validation error; "
        "dotted: the best of 1,024 Sobol points and corners"
    )
    caption(figure, groups, of)
    save(figure, "fed_gp-tasks", colours=256)


def fed_gp_support() -> None:
    """Last errors by rule and size of the support set; beside Sobol points, seed by seed."""
    found = found_of("support")
    if not found:
        return
    figure, grid = plt.subplots(2, len(found), figsize=(9.5, 6), squeeze=False)
    shown: dict[str, None] = {}
    groups = []
    for (top, bottom), (unit, lines) in zip(grid.T, found.items(), strict=True):
        absent(f"support, {unit}", lines, fed_gp.ENTRIES["support"].methods)
        last = {m: {s: v[-1] for s, v in errors_of(lines, m).items()} for m in lines.methods()}
        for k, (rule, (_, colour, marker)) in enumerate(RULES.items()):
            for place, size in enumerate(SIZES):
                by_seed, other = last.get(f"{rule}-{size}"), last.get(f"sobol-{size}", {})
                if not by_seed:
                    continue
                gaps = [v - other[s] for s, v in by_seed.items() if s in other]
                x = place + 0.17 * (k - 1.5)
                for axes, values in ((top, list(by_seed.values())), (bottom, gaps)):
                    if values and (axes is top or rule != "sobol"):
                        low, high = interval(np.array(values))
                        axes.plot([x, x], [low, high], color=colour, lw=1.2)
                        axes.plot(x, np.mean(values), marker, color=colour, ms=5)
                groups.append(lines.select(method=f"{rule}-{size}"))
                shown[rule] = None
        bottom.axhline(0, color=BLACK, lw=0.8)
        top.set_title(TASK_NAMES.get(unit, unit))
        for axes in (top, bottom):
            axes.set_xticks(range(len(SIZES)), list(map(str, SIZES)))
            axes.set_xlim(-0.5, len(SIZES) - 0.5)
            axes.yaxis.set_major_locator(MaxNLocator(5))
        bottom.set_xlabel("support points")
    grid[0, 0].set_ylabel("last error, mean over agents")
    grid[1, 0].set_ylabel("last error, rule \N{MINUS SIGN} Sobol points")
    handles = [
        Line2D([], [], color=colour, marker=marker, ls="", label=label)
        for rule, (label, colour, marker) in RULES.items()
        if rule in shown
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    of = (
        "every agent's own best validation error after 50 rounds of the published method;\n"
        "below: the difference to Sobol points of the same size, same seeds and starts"
    )
    caption(figure, groups, of)
    save(figure, "fed_gp-support", colours=256)


def all_of_fed_gp() -> None:
    """Every figure of the federated sparse Gaussian process, from what has been run."""
    fed_gp_cec2005()
    fed_gp_tasks()
    fed_gp_support()


# ------------------------------------------------------------------ private bandits

BANDITS = {
    "nonprivate": ("not private", BLACK, "-"),
    "joint-sqrt": ("joint, square root", VERMILION, "-"),
    "joint-tree": ("joint, tight tree", ORANGE, "-"),
    "joint-paper": ("joint, published constants", BLUE, "-"),
    "local": ("local", PURPLE, "--"),
    "local-paper": ("local, published constants", SKY, "--"),
    "random": ("random arms", GREY, ":"),
}


def bandit_curves(axes: Axes, lines: private_ucb.Lines) -> None:
    """Regret by rounds at alpha = 1 and the paper's beta."""
    times = private_ucb.TIMES
    for row, (label, colour, dash) in BANDITS.items():
        private = private_ucb.ROWS[row].private
        setting = (1.0, private_ucb.BETA) if private else (None, None)
        found = lines.select(row=row, alpha=setting[0], beta=setting[1])
        if not found:
            continue
        values = np.array([line["curve"] for line in found])
        band = np.array([interval(column) for column in values.T])
        axes.plot(times, values.mean(axis=0), dash, color=colour, label=label)
        axes.fill_between(times, band[:, 0], band[:, 1], color=colour, alpha=0.13, lw=0)
    axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel="cumulative regret")


def bandit_sweep(axes: Axes, lines: private_ucb.Lines, of: str, beta: float | None) -> None:
    """Regret by alpha or beta; the other one is given, or is one."""
    for row, (_, colour, dash) in BANDITS.items():
        chosen = [
            line
            for line in lines.select(row=row)
            if line[of] is None
            or (line["beta"] == beta if of == "alpha" else line["beta"] in private_ucb.BETAS)
        ]
        if of == "beta":
            chosen = [line for line in chosen if line["alpha"] in (None, 1.0)]
        at = sorted({line[of] for line in chosen if line[of] is not None})
        groups = [[line["regret"] for line in chosen if line[of] == x] for x in at]
        if chosen and not at:  # without a setting: a level
            axes.axhline(np.mean([line["regret"] for line in chosen]), color=colour, ls=dash)
            continue
        if not at:
            continue
        means = [float(np.mean(group)) for group in groups]
        band = np.array([interval(np.array(group)) for group in groups])
        axes.plot(at, means, dash, color=colour, marker="o", ms=3)
        axes.fill_between(at, band[:, 0], band[:, 1], color=colour, alpha=0.13, lw=0)
    axes.set(xscale="log", yscale="log", ylabel="regret after 1,024 rounds")


def private_ucb_figures() -> None:
    """Figs. 1 and 2 of the paper, and the first at a small delta."""
    lines = private_ucb.ENTRIES["figure1"].lines()
    if not lines.lines:
        return
    figure, grid = plt.subplots(2, 2, figsize=(9.5, 7.2), sharey=True)
    bandit_curves(grid[0, 0], lines)
    grid[0, 0].set_title("alpha = 1, beta = 0.1")
    for axes, of, beta, title in (
        (grid[0, 1], "alpha", private_ucb.BETA, "by alpha at beta = 0.1 (Fig. 1)"),
        (grid[1, 0], "beta", None, "by beta at alpha = 1 (Fig. 2)"),
        (grid[1, 1], "alpha", private_ucb.SMALL, "by alpha at beta = 1e-5"),
    ):
        bandit_sweep(axes, lines, of, beta)
        axes.set_title(title)
        axes.set_xlabel(of)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    groups = [lines.select(row=row, alpha=1.0, beta=private_ucb.BETA) for row in BANDITS]
    caption(figure, groups, "regret on the kernel bandit, same functions and arms in all rows")
    save(figure, "private_ucb-figures", colours=256)


def private_ucb_table1() -> None:
    """Table 1 as shares of random play, beside the printed ones."""
    lines = private_ucb.ENTRIES["table1"].lines()
    if not lines.lines:
        return
    rows = private_ucb.table_summary()["rows"]
    names = list(private_ucb.PUBLISHED_TABLE1)
    figure, panels = plt.subplots(1, len(names), figsize=(9.5, 3.6), sharey=True)
    levels = (None, 10.0, 1.0, 0.1)
    ticks = ["not\nprivate", "10", "1", "0.1"]
    series = (
        ("ours, beta = 0.1", VERMILION, private_ucb.BETA, "share_of_random"),
        ("ours, 1e-5", PURPLE, private_ucb.SMALL, "share_of_random"),
        ("printed, scale guessed", BLUE, private_ucb.BETA, "published_share"),
    )
    for axes, name in zip(panels, names, strict=True):
        for k, (label, colour, delta, key) in enumerate(series):
            for place, alpha in enumerate(levels):
                found = [
                    row
                    for row in rows
                    if row["environment"] == name
                    and row["alpha"] == alpha
                    and row["mechanism"] in ("none", "blocks")
                    and row["delta"] in (None, delta)
                ]
                if found and (alpha is not None or delta != private_ucb.SMALL):
                    x = place + 0.25 * (k - 1)
                    axes.bar(x, found[0][key], 0.23, color=colour, label=label)
        axes.axhline(1, color=BLACK, lw=0.8)
        axes.set_xticks(range(len(levels)), ticks)
        axes.set(title=name, xlabel="alpha", yscale="log")
    panels[0].set_ylabel("regret / regret of random play")
    handles, labels = panels[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside upper center", ncols=3)
    at = {"mechanism": "blocks", "alpha": 1.0, "delta": private_ucb.BETA}
    groups = [lines.select(environment=name, **at) for name in names]
    caption(figure, groups, "regret after 10,000 rounds; the line is random play", bands=False)
    save(figure, "private_ucb-table1", colours=256)


def all_of_private_ucb() -> None:
    """Every figure of private bandits, from what has been run."""
    private_ucb_figures()
    private_ucb_table1()


PAPERS: dict[str, Callable[[], None]] = {
    "fts": all_of_fts,
    "dp_fts_de": all_of_dp_fts_de,
    "fed_gp": all_of_fed_gp,
    "private_ucb": all_of_private_ucb,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paper", nargs="?", choices=PAPERS)
    parser.add_argument("--smoke", action="store_true", help="can everything be drawn?")
    options = parser.parse_args()
    if options.smoke:
        quick = partial(interval, draws=20)
        with (
            TemporaryDirectory() as folder,
            patch.dict(globals(), FIGURES=Path(folder), DPI=20, interval=quick),
            plt.rc_context(STYLE),
        ):
            for draw in PAPERS.values():
                draw()
        return
    if options.paper is None:
        parser.error("a paper, or --smoke")
    with plt.rc_context(STYLE):
        PAPERS[options.paper]()


if __name__ == "__main__":
    main()
