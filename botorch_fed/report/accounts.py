"""What a run has promised and spent, and what it reached for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from botorch_fed.federation.disclosure import entries_of, first_payments
from botorch_fed.report import charts
from botorch_fed.report.page import (
    Chart,
    banner,
    cell,
    facts,
    interval_cell,
    paragraph,
    plain,
    table,
    value_cell,
)
from botorch_fed.report.runs import Run, metric_range
from botorch_fed.report.statistics import Estimate, counted, mean, number, shown, some_counts, upper

if TYPE_CHECKING:
    from botorch_fed.run import RunResult


_WHOSE = {
    "whole": "This file is for the person who ran the simulation. It holds every agent's points "
    "and outcomes, and no guarantee covers it.",
    "hub": "This is the hub's part of a run across machines. Points and outcomes are at the sites. "
    "Not known here: best configurations, trust, and which evaluations have failed.",
    "site": "This is one site's part of a run across machines, for that site only. It holds its "
    "points and outcomes, which no guarantee covers. Not known here: points and outcomes of other "
    "sites, who was absent, and what the run has spent. The hub's report has what was spent.",
}


def guarantee(result: RunResult) -> list[str]:
    """The promise of the run in words, and whom the file is for."""
    account = result.privacy or {}
    note = paragraph(_WHOSE[result.part])
    site = result.part == "site"
    if "epsilon" not in account and (site or not result.ended) and result.price is not None:
        promised = result.price
        when = "in the hub's report" if site else "told when the run has ended"
        words = (
            f"The plan of the run promises ε ≤ {upper(promised.epsilon)} and δ = "
            f"{upper(promised.delta)}, per {promised.unit}, adjacency {promised.adjacency}. What "
            f"was spent, and whether the noise was private, is {when}."
        )
        return [paragraph(words), note]
    if site:
        return [note]
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


# ------------------------------------------------------------------ privacy spent


def privacy(run: Run) -> list[str | Chart]:
    """The account of the server, its payments, and the signal beside the noise."""
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
        shapes=[charts.level(account["epsilon"])],
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
        shapes=[charts.level(1.0)],
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


def utility(runs: list[Run]) -> list[str | Chart]:
    """Best values by epsilon, of two runs with comparable promises or more."""
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
        rows.append([cell(_with_seed(run)), cell(epsilon, numeric=True), interval_cell(found)])
        if private:
            traces.append(_promised(run, found))
        else:
            shapes.append({**charts.level(found.mean), "line": charts.line_style(run.place)})
            notes.append(charts.note_at(found.mean, plain(run.label)))
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
