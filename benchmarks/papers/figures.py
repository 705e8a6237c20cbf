"""Figures from the committed results, one per claim.

    python -m benchmarks.papers.figures fts

Writes PNG files to ``benchmarks/papers/figures``. Lines are means, bands 95 % bootstrap intervals
of the mean, pointwise: over repeats where targets are fixed (landmine, activity recognition), over
functions where they are drawn (synthetic). Needs matplotlib, which the package itself does not:
``pip install matplotlib``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers import fts
from benchmarks.papers.ledger import Results, interval

try:
    import matplotlib  # type: ignore[import-not-found, unused-ignore]
except ImportError as error:
    raise SystemExit(
        "Figures need matplotlib, which is not installed: pip install matplotlib"
    ) from error

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes  # type: ignore[import-not-found, unused-ignore]
from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
from PIL import Image  # type: ignore[import-not-found, unused-ignore]

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


def save(figure: Figure, name: str) -> None:
    """Write a figure in 128 colours, without a date, so that equal figures are equal files."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    path = FIGURES / f"{name}.png"
    buffer = BytesIO()
    figure.savefig(buffer, dpi=DPI, bbox_inches="tight")
    image = Image.open(buffer).convert("RGB").quantize(128)
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
                    Curve(
                        "FTS, learned $P_N$", "tab:brown", setting("fts-learned", distance, 40, 100)
                    ),
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
    figure, panels = plt.subplots(1, len(fts.GROWING_ROWS), figsize=(8, 3.5), sharey=True)
    for axes, row in zip(panels, fts.GROWING_ROWS, strict=True):
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


def all_of_fts() -> None:
    """Every figure of federated Thompson sampling."""
    for entry in ("landmine", "landmine-tol", "landmine-log"):
        landmine(entry)
    synthetic()
    for entry in ("har", "har-dp"):
        har(entry)
    for entry in fts.GROWING:
        growing(entry)


PAPERS: dict[str, Callable[[], None]] = {"fts": all_of_fts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paper", choices=PAPERS)
    options = parser.parse_args()
    with plt.rc_context(STYLE):
        PAPERS[options.paper]()


if __name__ == "__main__":
    main()
