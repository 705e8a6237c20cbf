r"""One page of evidence, from committed files alone: `RESULTS.md`, and the README's picture.

    python -m benchmarks.results                  write the page and the picture
    python -m benchmarks.results --check          fail if one of them, or a measured figure that the
                                                  README or docs/*.rst print, is not what files say
    python -m benchmarks.results --pages          write such figures anew into those pages
    python -m benchmarks.results --check --stale  list lines whose code has changed since, too;
                                                  benchmarks.again runs them anew

Claims of the papers are in `benchmarks.results_claims`, figures of pages in
`benchmarks.results_pages`, the picture in `benchmarks.results_figure`, the code that lines depend
on in `benchmarks.provenance`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.papers.ledger import RESULTS
from benchmarks.papers.published.points import POINTS, Published
from benchmarks.provenance import ages
from benchmarks.results_claims import NONE, PAPERS, VERDICTS, Paper, gap, number
from benchmarks.results_figure import PICTURE, draw, is_current
from benchmarks.results_pages import (
    HOME,
    check_pages,
    lines_of,
    pages,
    rewrite_pages,
    source,
    unsourced,
)
from benchmarks.statistics import Effect
from benchmarks.transfer_summary import Row

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "RESULTS.md"
INTRODUCTION = """# Results

Every claim of the four papers behind this package, and of its own transfer, beside what stored
runs say. `python -m benchmarks.results` writes this page from committed files; a test compares it,
byte for byte.

- **reproduced**: the method as published has the effect here: the 95 % interval is on the claimed
  side of zero, or the printed number is met. **not reproduced**: it has not. **corrected**: what is
  printed is wrong; the package has what is right. **cannot be run**: what it needs is not in the
  paper and cannot be had. **not run**: it could be, and has not been.
- Differences are paired, means over clusters (fields, subjects, functions, tasks, or seeds where
  these are all that varies) with t intervals of the clusters' means. *Free* is the strongest
  control that sends nothing and needs no other site.
"""


# ------------------------------------------------------------------ tables


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell or ' ' for cell in line)} |\n" for line in lines)


def glance(papers: Sequence[Paper]) -> str:
    """How many claims of each paper have which verdict, and a sentence."""
    rows = []
    for paper in papers:
        counts = Counter(claim.verdict for claim in paper.claims)
        rows.append(
            [
                f"**{paper.name}**",
                *(str(counts[v]) if counts[v] else "" for v in VERDICTS),
                paper.sentence,
            ]
        )
    return table(["paper", *VERDICTS, "in a sentence"], rows)


def claims_of(paper: Paper) -> str:
    """All claims of a paper."""
    heads = ["", "claim", "verdict", "printed", "as published, here", "ours", "free", "runs", "by"]
    rows = [
        [
            claim.where,
            claim.says,
            f"**{claim.verdict}**" if claim.verdict == "reproduced" else claim.verdict,
            *(claim.printed, claim.here, claim.ours, claim.free, claim.runs),
            claim.made_by if claim.made_by == NONE else f"`{claim.made_by}`",
        ]
        for claim in paper.claims
        if claim.verdict != "not run"
    ]
    text = table(heads, [[cell.replace("|", "\\|") for cell in row] for row in rows])
    left = []
    for claim in paper.claims:
        if claim.verdict == "not run":
            why = [claim.here] * (claim.here != NONE) + [f"`{claim.made_by}`"] * (
                claim.made_by != NONE
            )
            left.append(f"{claim.where}: {claim.says} ({', '.join(why)})")
    return text + ("\n**Not run**: " + "; ".join(left) + ".\n" if left else "")


# ------------------------------------------------------------------ our own bar


# Suite, method, what stands for it in a table, the queries of two columns.
BAR = (
    ("tuning", "fts", "tuning, 8 tasks of 5 to 16 sites: `FTS()`, `FedGP()`", (5, 20)),
    ("fresh", "fts", "two further tasks, run once at the end: `FTS()`", (5, 20)),
    ("late", "fts", "a newcomer when the others are done: `FTS()`", (5, 20)),
    ("ladder", "fts", "synthetic, from identical to unrelated and hostile: `FTS()`", (5, 20)),
    ("high", "fts", "10 and 20 dimensions: `FTS()`", (20, 50)),
    ("high", "fedgp", "10 dimensions: `FedGP()`, with one step for common functions", (20, 50)),
    ("private", "dp_fts_de", "30 to 40 sites, ε = 2, δ = 1e-5: `DPFTSDE`", (5, 10)),
)
VERDICT_OF = {  # whether the intervals are below zero, early and late
    (True, True): "**ahead**",
    (True, False): "**ahead** early",
    (False, True): "**ahead** late",
    (False, False): "level",
}
FREE = {"sobol": "Sobol", "random": "random", "default_first": "default first"}


def bar() -> str:
    """Listening against a site alone, suite by suite."""
    rows = []
    for name, method, label, queries in BAR:
        found = source(f"transfer/{name}")
        mine = found[method]
        cells, ahead = [label], list[bool]()
        for query in map(str, queries):
            known = mine["vs_solo"][query]
            effect = Effect(known["difference"], known["low"], known["high"], None, None, 0, 0, 0)
            level = mine["regret_at"][query]
            alone = level - known["difference"]
            cells.append(f"@{query}: {number(level)} for {number(alone)}: {gap(effect)}")
            ahead.append(effect.high is not None and effect.high < 0)
        controls = {
            title: found[control]["regret_at"][str(queries[0])]
            for control, title in FREE.items()
            if control in found and len(found[control]["tasks"]) == len(mine["tasks"])
        }
        least = min(controls, key=lambda title: controls[title], default="")
        worse, seeds = mine["worse_on"], mine["seeds"]
        behind = bool(least) and controls[least] < mine["regret_at"][str(queries[0])]
        cells.insert(1, VERDICT_OF[tuple(ahead)] + (", early behind free" if behind else ""))
        cells += [
            f"{least} {number(controls[least])}" if least else NONE,
            evaluations(mine.get("evaluations_to_solo_20")),
            ", ".join(worse) if worse else "none",
            f"{len(mine['tasks'])} tasks, {seeds} seed{'s' * (seeds > 1)}",
            f"`transfer {name}`",
        ]
        rows.append(cells)
    heads = ["", "verdict", "early: ours for alone", "late", "free, early", "alone's 20 after"]
    return table([*heads, "tasks worse", "runs", "by"], rows)


def evaluations(value: float | None) -> str:
    """After how many evaluations, or never."""
    return "never" if value is None else number(value, 1)


# ------------------------------------------------------------------ the demo

DEMOS = ("fts", "fed-gp", "dp-fts-de", "private-ucb")


def demos() -> str:
    """What `botorch-fed demo` says of each protocol, and its figures."""
    parts = []
    for protocol in DEMOS:
        if not (HOME / "results" / "demo" / f"{protocol}.json").is_file():
            continue
        found = source(f"json/demo.{protocol}")
        marks = list(next(iter(found["against"].values())))
        rows = []
        for arm, seeds in found["arms"].items():
            gaps = found["against"].get(arm)
            means = [sum(one[int(mark) - 1] for one in seeds) / len(seeds) for mark in marks]
            p_values = [f" (p {gaps[mark]['p']:.1g})" if gaps else "" for mark in marks]
            rows.append([arm, *(number(m) + p for m, p in zip(means, p_values, strict=True))])
        said = "".join(f"- {line}\n" for line in found["verdict"])
        figures = table([found["unit"], *marks], rows)
        parts.append(f"**{protocol}**, {len(found['seeds'])} seeds:\n\n{said}\n{figures}")
    return "\n".join(parts)


# ------------------------------------------------------------------ operating points


def points() -> str:
    """Whether the rows that stand for a paper sit where the paper does."""
    rows = []
    for point in POINTS:
        lines = lines_of(point.entry, row=point.row)
        told = "; ".join(_quantity(point, lines))
        misses = "; ".join(point.misses(lines)) if lines else "not run"
        what = [f"{point.paper}, {point.where}", f"`{point.entry}` {point.row}", told, misses]
        rows.append([*what, point.called(lines) if lines else NONE])
    return table(["point", "row", "printed → measured", "elsewhere in", "may be called"], rows)


def _quantity(point: Published, lines: Sequence[Row]) -> Iterator[str]:
    for q in point.quantities:
        measured = number(q.measured(lines), 4) if lines else "not run"
        yield f"{q.name} {number(q.printed, 4).rstrip('0').rstrip('.')} → {measured}"


# ------------------------------------------------------------------ the page

COMMANDS = """`fts landmine` stands for `python -m benchmarks.papers.fts landmine`, and so for the
other modules of `benchmarks.papers`; `transfer tuning` for `python -m benchmarks.transfer tuning`.
Called so they run what is missing, with `--summary` they show everything that is stored. Files are
`benchmarks/papers/results/<module>/<entry>.jsonl` and `benchmarks/results/transfer/<suite>/`.
The demo's are `botorch-fed demo --protocol NAME --repeats SEEDS --no-report --json`, as
`results/demo/NAME.json`.
`published.…` and `encryption` are modules that compute what they say.
"""


def page() -> str:
    """The whole page."""
    papers = [make() for make in PAPERS]
    parts = [
        INTRODUCTION,
        glance(papers),
        f"## This package: what listening gains\n\nNormalised regret after so many queries, 0 at a "
        f"site's optimum, 1 at the median of its space; smaller is better.\n\n{bar()}",
    ]
    parts.append(
        "## The demo: sites that join later\n\nWhat `botorch-fed demo` says, larger is better: "
        "accuracy of newcomers, or the mean reward of a bandit. p values are of paired differences "
        "to the first line over seeds, adjusted over columns by Holm's method. The task was chosen "
        "by how seldom its random points are good, after an easier one (Adam, four parameters) on "
        "which newcomers gained nothing significant; of `fts` the first 10 seeds were looked at "
        "before the others were run, and the basis of `dp-fts-de` was changed after the one before "
        "had failed here (tables of twelve tasks decided, one of them seed 0 of this). The noise "
        "of `dp-fts-de` and of the bandit is that of the "
        "operating system, and another one each time.\n\n"
        f"{demos()}"
    )
    parts += [f"## {paper.title}\n\n{paper.sentence}\n\n{claims_of(paper)}" for paper in papers]
    parts += [
        '## Where rows that stand for a paper sit\n\nA row may be called "paper" only if it meets '
        f"what the paper prints of its operating point.\n\n{points()}",
        f"## Commands\n\n{COMMANDS}",
        f"## Printed elsewhere, without a committed file\n\n{unsourced()}",
    ]
    return "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def check() -> list[str]:
    """What is wrong with the page, with the picture, and with figures on other pages."""
    wrong = []
    if not PAGE.is_file() or PAGE.read_text() != page():
        wrong.append("RESULTS.md is not what the files say: python -m benchmarks.results")
    if not is_current():
        wrong.append(f"{PICTURE.name} does not show what files say: python -m benchmarks.results")
    return wrong + check_pages()


def stale() -> Iterator[str]:
    """The files with lines that other code may have made."""
    for age in ages():
        if age.stale:
            since = "history unknown" if age.commits is None else f"{age.commits} commits since"
            told = [f"{age.earlier} of other code"] * bool(age.earlier)
            told += [f"{age.unknown} without a hash, {since}"] * bool(age.unknown)
            yield f"{age.file}: {'; '.join(told)}, {age.now} of the code as it is"


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail on a difference")
    parser.add_argument("--stale", action="store_true", help="list lines of older code")
    parser.add_argument("--pages", action="store_true", help="write figures into README and docs")
    options = parser.parse_args()
    if options.pages:
        for name in rewrite_pages():
            print(f"{name}: figures written")
    if not options.check and not options.stale:
        PAGE.write_text(page())
        PICTURE.write_text(draw())
        print(f"{PAGE.name}, {PICTURE.name}: written from {RESULTS.parent.parent.name}/")
    if options.stale:
        for line in stale():
            print(line)
    if options.check:
        wrong = check()
        for line in wrong:
            print(line, file=sys.stderr)
        if wrong:
            raise SystemExit(1)
        print(f"{PAGE.name} and the figures of {len(pages())} pages are what files say")


if __name__ == "__main__":
    main()
