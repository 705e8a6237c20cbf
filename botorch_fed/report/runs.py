"""The runs of a report: their best values, the metric's range, and differences between runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.report.statistics import known
from botorch_fed.space import SearchSpace, Value

if TYPE_CHECKING:
    from botorch_fed.run import Record, RunResult


@dataclass(frozen=True)
class Run:
    """A run with its label and its place among the runs, which determines colour and line.

    Attributes:
        label: Its name in legends and tables.
        place: 0 for the run that the report is about.
        result: The result.
        reference: With several objectives the worst values that count in a hypervolume.
    """

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
        return {name: curve for name, curve in curves.items() if known(curve)}

    def _curve(self, name: str) -> list[float]:
        if self.reference is not None:
            return self.result.hypervolume(name, self.reference).tolist()
        values = self.result.best(name)
        return values.where(values.isfinite(), math.nan).tolist()

    @cached_property
    def regrets(self) -> dict[str, list[float]] | None:
        """The regrets of all agents; None if the problem does not define optima."""
        result = self.result
        if result.optimal_values is None or result.space.outcomes:
            return None
        of = result.cumulative_regret if result.measure == "cumulative" else result.regret
        return {
            name: [value for value in of(name).tolist() if math.isfinite(value)]
            for name in self.best
        }

    @property
    def measure(self) -> str:
        """What `best` shows."""
        return "best value" if self.reference is None else "hypervolume"

    @property
    def privacy(self) -> dict[str, Any]:
        """The account of the server; empty without one."""
        return self.result.privacy or {}

    @property
    def sign(self) -> float:
        """1 if a larger `best` is better, otherwise -1."""
        smaller = self.reference is None and self.result.space.outcome.minimize
        return -1.0 if smaller else 1.0

    @cached_property
    def longest(self) -> int:
        """The largest number of queries of an agent."""
        return max(map(len, self.best.values()), default=0)

    @property
    def marks(self) -> list[int | None]:
        """The queries of tables; None for the last one of each agent."""
        return [query for query in (1, 5, 10) if query < self.longest] + [None]

    def values_at(self, query: int | None) -> list[float]:
        """The best values of all agents after a query, the last one for None."""
        values = (at(curve, query) for curve in self.best.values())
        return [value for value in values if value is not None]


def compared_runs(result: RunResult, others: Mapping[str, RunResult]) -> list[Run]:
    """The run of a report and those that it is compared with."""
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
    several = len(result.space.objectives) > 1
    worst = result.reference_point() if several else None  # one for all runs
    runs = [Run(f"this run ({result.protocol})", 0, result, worst)]
    return runs + [
        Run(label, i, other, worst) for i, (label, other) in enumerate(others.items(), start=1)
    ]


def at(curve: list[float], query: int | None) -> float | None:
    """The value after a query, the last one for None; None if there are fewer, or it is NaN."""
    if query is not None and len(curve) < query:
        return None
    value = curve[-1 if query is None else query - 1]
    return None if math.isnan(value) else value


def differences(this: Run, other: Run, query: int | None) -> list[float]:
    """Differences of the agents in both runs, at a query that both runs have; more is better."""
    found = []
    for name in this.best.keys() & other.best.keys():
        both = this.best[name], other.best[name]
        k = min(map(len, both)) if query is None else query
        mine, theirs = at(both[0], k), at(both[1], k)
        if mine is not None and theirs is not None:
            found.append(this.sign * (mine - theirs))
    return sorted(found)  # the sum does not depend on the order of the names


def metric_range(runs: list[Run]) -> tuple[float, float]:
    """The ends at which intervals of best values are cut.

    A best value is not better than the optimum, a hypervolume is not negative. A metric without a
    negative value, or without a positive one, is taken to end at zero, and one whose values lie
    between 0 and 1 to be a share.
    """
    if runs[0].reference is not None:
        return (0.0, math.inf)
    values = [v for run in runs for row in run.result.records for v in _values(run, row)]
    low = 0.0 if values and min(values) >= 0 else -math.inf
    high = 0.0 if values and max(values) <= 0 else math.inf
    if low == 0.0 and max(values) <= 1:
        high = 1.0
    optima = [v for run in runs for v in (run.result.optimal_values or {}).values()]
    if optima and all(run.result.optimal_values for run in runs):
        if runs[0].sign > 0:
            high = min(high, max(optima))
        else:
            low = max(low, min(optima))
    return low, high


def _values(run: Run, row: Record) -> list[float]:
    """What an observation says of the objective."""
    if row["y"] is None:
        return []
    return [value_of(run.result.space, row)]


def value_of(space: SearchSpace, row: Record) -> float:
    """The value of the (first) objective: noise-free if it is known, else observed."""
    if row["true"] is not None:
        return float(row["true"])
    return float(row["y"][space.objectives[0]] if space.outcomes else row["y"])


@dataclass(frozen=True)
class Best:
    """A trial that a site should use.

    Attributes:
        site: The site.
        of: The objective in which it is the best one.
        values: The outcomes by name.
        parameters: The parameters by name, in the user's units.
    """

    site: str
    of: str
    values: Mapping[str, float]
    parameters: Mapping[str, Value]


def best_trials(result: RunResult) -> list[Best]:
    """The best observed trial of each site, of several objectives the best in each."""
    found = []
    space = result.space
    for name in result.names:
        if not space.outcomes:
            rows = [row for row in (*result.given, *result.records) if row["agent"] == name]
            if any(row["y"] is not None and result.counts(row) for row in rows):
                value, parameters = result.best_observed(name)
                metric = space.outcome.name
                found.append(Best(name, metric, {metric: value}, parameters))
            continue
        front = result.pareto(name)
        for place in space.objectives if front else ():
            metric = space.metrics[place].name
            sign = -1.0 if space.metrics[place].minimize else 1.0
            one = max(front, key=lambda row: sign * row["values"][metric])
            found.append(Best(name, metric, one["values"], one["parameters"]))
    return found


def points_of(space: SearchSpace, rows: Sequence[Record]) -> list[dict[str, Any]]:
    """The points of observations by name, in the user's units."""
    X = torch.tensor([row["x"] for row in rows], dtype=torch.float64)
    return space.from_unit(X.reshape(len(rows), space.dim))
