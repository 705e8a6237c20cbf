"""The picture of the README: regret by evaluations, with messages and without, from stored runs.

`benchmarks.results` writes it beside `RESULTS.md`, and with ``--check`` compares the numbers that
it shows, which it holds as its description. It is an SVG whose colours follow the reader's scheme.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import transfer
from benchmarks.statistics import effect
from benchmarks.transfer_summary import REFERENCE, pairs

PICTURE = Path(__file__).parent.parent / "docs" / "_static" / "regret.svg"
LAST = 20  # evaluations that are shown
PANELS = {"tuning": "Sites that search together", "late": "A newcomer, when others are done"}
# By method: what it is called, its colour in a light and in a dark scheme, its dash.
LINES = {
    "sobol": ("Sobol points", "#767676", "#8b949e", ":"),
    "default_first": ("alone, default configuration first", "#9a6700", "#d29922", "--"),
    "solo": ("alone, BoTorch's LogEI", "#24292f", "#e6edf3", "-"),
    "fts": ("with messages (dots: p < .05)", "#0550ae", "#58a6ff", "-"),
}
# Matplotlib is given one colour for each thing; the file has a variable in its place.
PLACES = {
    "paper": ("#fffffe", "#ffffff", "#0d1117"),
    "ink": ("#010203", "#24292f", "#e6edf3"),
    "grid": ("#d0d7de", "#d8dee4", "#30363d"),
    **{
        name.replace("_", "-"): (f"#0000{n:02x}", light, dark)
        for n, (name, (_, light, dark, _)) in enumerate(LINES.items(), start=1)
    },
}


def shown() -> dict[str, Any]:
    """By panel and method: mean regrets after 1, 2, …, and whether each is below a site alone.

    It is where the 95 % interval of the difference, clustered by task, is below zero.
    """
    found: dict[str, Any] = {}
    for suite in PANELS:
        rows = transfer.stored(suite, methods=tuple(LINES))
        for method in LINES:
            both = pairs(rows[method], rows[REFERENCE]).values()
            regret = np.mean([mine.mean(axis=0) for mine, _ in both], axis=0)
            gaps = [effect([a[:, q] - b[:, q] for a, b in both]) for q in range(1, LAST + 1)]
            found.setdefault(suite, {})[method] = {
                "regret": [round(float(value), 4) for value in regret[1 : LAST + 1]],
                "ahead": [
                    n for n, gap in enumerate(gaps, 1) if gap.high is not None and gap.high < 0
                ],
            }
    return found


def draw() -> str:
    """The picture, an SVG."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    numbers = shown()
    ink, grid, paper = (PLACES[name][0] for name in ("ink", "grid", "paper"))
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "regret",
        "font.family": "sans-serif",
        "font.size": 11,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), paper),
        "axes.edgecolor": grid,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        figure = Figure(figsize=(6.8, 4.0), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for axes, (suite, title) in zip(panels, PANELS.items(), strict=True):
            for method, (label, _, _, dash) in LINES.items():
                of = numbers[suite][method]
                colour, width = PLACES[method.replace("_", "-")][0], 2.4 if method == "fts" else 1.7
                queries = np.arange(1, LAST + 1)
                dots = [query - 1 for query in of["ahead"]]
                axes.plot(
                    queries, of["regret"], dash, color=colour, lw=width, label=label,
                    marker="o" if method == "fts" else "", ms=4.5, markevery=dots,
                )  # fmt: skip
            axes.set_title(title, loc="left", fontsize=12)
            axes.set_yscale("log")
            axes.set_xticks([1, 5, 10, 15, 20])
            axes.set_yticks([0.1, 0.2, 0.5, 1.0], ["0.1", "0.2", "0.5", "1"])
            axes.yaxis.set_minor_locator(NullLocator())
            axes.grid(color=grid, lw=0.8)
            axes.set_xlabel("evaluations")
        panels[0].set_ylabel("regret, smaller is better")
        handles, labels = panels[0].get_legend_handles_labels()
        order = [*reversed(range(len(labels)))]
        figure.legend(
            [handles[n] for n in order], [labels[n] for n in order],
            loc="outside lower center", ncols=2, frameon=False,
        )  # fmt: skip
        buffer = io.StringIO()
        said = {"Description": json.dumps(numbers), "Date": None, "Title": "Regret by evaluations"}
        figure.savefig(buffer, format="svg", metadata=said, bbox_inches="tight", pad_inches=0.12)
    return _themed(buffer.getvalue())


def _themed(svg: str) -> str:
    """With variables in the place of colours, and their values in a light and in a dark scheme."""
    for name, (place, _, _) in PLACES.items():
        svg = svg.replace(place, f"var(--{name})")
    light, dark = (
        ";".join(f"--{name}:{colours[n]}" for name, colours in PLACES.items()) for n in (1, 2)
    )
    scheme = f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return svg.replace('<style type="text/css">', f'<style type="text/css">{scheme}', 1)


def is_current() -> bool:
    """Whether the stored picture shows what files say."""
    if not PICTURE.is_file():
        return False
    found = re.search(r"<dc:description>(.*?)</dc:description>", PICTURE.read_text(), re.S)
    return found is not None and json.loads(found[1].replace("&quot;", '"')) == shown()
