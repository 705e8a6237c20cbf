r"""Statistics of `benchmarks.transfer`: from curves of regret to the figures of the bar.

A curve is a list: the regret after the starts, then after each query; in the *late* suite after
0, 1, 2, … evaluations of the newcomer. Runs of a method are compared with those of another on the
same task and seed, and only on those. Means are of seeds first, then of tasks, so that every task
counts alike; tasks are the clusters of `benchmarks.statistics.effect`. What is said of a single
task is a t test over its seeds: one-sided, p times the number of queries, then Holm's over tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.statistics import LEVEL, effect, holm, worse_p

Array = NDArray[np.float64]
Row = dict[str, Any]
Rows = Mapping[str, Sequence[Row]]  # by method
Pairs = dict[str, tuple[Array, Array]]  # by task: curves of two methods, one row per common seed

SHOWN = (1, 3, 5, 10, 20, 50)  # queries of the tables
CHECKED = (3, 5, 10, 20, 50)  # queries at which no method may be worse than solo
REFERENCE, ORACLE = "solo", "pooled"
SAME_STARTS = "solo_dealt"  # alone, from the starts of those who send messages
CHECKS = ("solo_botorch", "turbo")  # of the reference's own step: compared from the same starts
CHECKED_STARTS = "solo_checked"  # alone, from those starts
TARGET = 20  # solo's regret after so many queries is what others should reach sooner


def curve_of(row: Row, sites: Sequence[str] | None = None) -> Array:
    """A run's mean curve: over all honest sites, or over some of them."""
    if sites is None:
        return np.array(row["regret"], dtype=float)
    return np.mean([row["by_site"][site] for site in sites], axis=0)


def pairs(rows: Sequence[Row], others: Sequence[Row]) -> Pairs:
    """Curves of two methods on common tasks and seeds, and on the sites that both have run."""
    known = {(row["task"], row["seed"]): row for row in others}
    found: dict[str, list[tuple[Array, Array]]] = {}
    for row in rows:
        other = known.get((row["task"], row["seed"]))
        if other is None or not _same_history(row, other):
            continue
        sites = _common_sites(row, other)
        mine, theirs = curve_of(row, sites), curve_of(other, sites)
        size = min(len(mine), len(theirs))
        found.setdefault(row["task"], []).append((mine[:size], theirs[:size]))
    made = {}
    for task, both in sorted(found.items()):
        size = min(len(mine) for mine, _ in both)
        mine, theirs = (np.array([pair[k][:size] for pair in both]) for k in (0, 1))
        made[task] = mine, theirs
    return made


def _same_history(row: Row, other: Row) -> bool:
    """Whether the others had observed the same, where both methods use that."""
    histories = {r["history"] for r in (row, other) if "history" in r}
    return len(histories) < 2


def _common_sites(row: Row, other: Row) -> list[str] | None:
    """None where both are means over all honest sites."""
    some = [r for r in (row, other) if r.get("some_sites")]
    if not some:
        return None
    if any("by_site" not in r for r in (row, other)):
        raise ValueError(
            f"Some sites of {some[0]['task']} can be compared only with runs that keep all sites."
        )
    return sorted(set(row["by_site"]) & set(other["by_site"]))


def queries_of(size: int, wanted: Sequence[int]) -> list[int]:
    """Those of the wanted queries that a curve has."""
    return [query for query in wanted if query < size]


def versus(both: Pairs) -> dict[str, dict[str, float | None]]:
    """Differences at `SHOWN` queries, clustered by task; negative is better."""
    size = min(mine.shape[1] for mine, _ in both.values())
    return {
        str(q): difference([a[:, q] - b[:, q] for a, b in both.values()])
        for q in queries_of(size, SHOWN)
    }


def difference(clusters: Sequence[Array]) -> dict[str, float | None]:
    """A mean difference of tasks with its 95 % limits and p value."""
    found = effect(clusters)
    return {"difference": found.mean, "low": found.low, "high": found.high, "p": found.p}


def evaluations_to(curve: Array, target: float) -> float | None:
    """The first query at which a curve is at the target or below it, linearly interpolated."""
    below = np.nonzero(curve <= target)[0]
    if not len(below):
        return None
    q = int(below[0])
    if q == 0:
        return 0.0
    return float(q - 1 + (curve[q - 1] - target) / (curve[q - 1] - curve[q]))


def mean_curves(both: Pairs) -> tuple[Array, Array]:
    """Mean curves of both methods over tasks."""
    size = min(mine.shape[1] for mine, _ in both.values())
    first = np.mean([a[:, :size].mean(axis=0) for a, _ in both.values()], axis=0)
    second = np.mean([b[:, :size].mean(axis=0) for _, b in both.values()], axis=0)
    return first, second


def area_ratio(both: Pairs) -> float:
    """Area under the mean curve from query 1 on, by that of the second method."""
    mine, theirs = mean_curves(both)
    return float(mine[1:].sum() / theirs[1:].sum())


def worst_task(both: Pairs, gap_at: int) -> float:
    """The largest mean difference on a task and at a checked query, by the task's starting gap."""
    found = -math.inf
    for mine, theirs in both.values():
        gap = max(float(theirs[:, gap_at].mean()), 1e-12)
        for q in queries_of(mine.shape[1], CHECKED):
            found = max(found, float((mine[:, q] - theirs[:, q]).mean()) / gap)
    return found


def significantly_worse(both: Pairs) -> list[str]:
    """The tasks on which the first method is worse: Bonferroni over queries, Holm over tasks."""
    p_values = []
    for mine, theirs in both.values():
        checked = queries_of(mine.shape[1], CHECKED)
        each = [worse_p(mine[:, q] - theirs[:, q]) for q in checked]
        p_values.append(min(1.0, len(checked) * min(each, default=1.0)))
    return [task for task, p in zip(both, holm(p_values), strict=True) if p < LEVEL]


def summarize(rows: Rows, *, gap_at: Callable[[str], int], required: Sequence[str]) -> Row:
    """Everything that is said of a suite.

    Args:
        rows: The runs of every method.
        gap_at: For a task, the index of its starting gap in solo's curve.
        required: The methods that every task and seed should have.
    """
    solo = rows.get(REFERENCE, [])
    tasks = sorted({row["task"] for row in solo})
    counts = [
        sum(row["task"] == task for row in rows.get(method, []))
        for method in {REFERENCE, *(m for m in required if rows.get(m))}
        for task in tasks
    ]
    methods = {}
    for method, mine in rows.items():
        both = pairs(mine, rows.get(CHECKED_STARTS, solo) if method in CHECKS else solo)
        if both:
            methods[method] = _method(method, mine, both, rows, gap_at)
    return {"tasks": tasks, "seeds": min(counts, default=0), "methods": methods}


def _method(
    method: str, mine: Sequence[Row], both: Pairs, rows: Rows, gap_at: Callable[[str], int]
) -> Row:
    curve, solo = mean_curves(both)
    found: Row = {
        "tasks": list(both),
        "seeds": min(len(a) for a, _ in both.values()),
        "regret_at": {str(q): float(curve[q]) for q in queries_of(len(curve), SHOWN)},
        "cpu_ms_per_query": float(np.mean([row["cpu_ms_per_query"] for row in mine])),
    }
    sent = [row["bytes_per_round"] for row in mine if row.get("bytes_per_round") is not None]
    if sent:
        found["bytes_per_round"] = float(np.mean(sent))
    if len(solo) > TARGET:
        found["evaluations_to_solo_20"] = evaluations_to(curve, float(solo[TARGET]))
    oracle = pairs(mine, rows.get(ORACLE, []))
    found["oracle_area_ratio"] = area_ratio(oracle) if oracle else None
    if method == REFERENCE:
        return found
    found["vs_solo"] = versus(both)
    found["worst_task_vs_solo"] = max(worst_task({t: pair}, gap_at(t)) for t, pair in both.items())
    worse = significantly_worse(both)
    found["tasks_significantly_worse"] = len(worse)
    found["worse_on"] = worse
    return found
