"""What was sent, and who did not answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from botorch_fed.report import charts
from botorch_fed.report.page import Chart, cell, folded, paragraph, table
from botorch_fed.report.statistics import counted, mean, number, size, spans

if TYPE_CHECKING:
    from botorch_fed.run import RunResult

MOST_SITES = 60  # with a view of their own


def communication(result: RunResult) -> list[str | Chart]:
    """Bytes, messages, CPU time and trust, exchange by exchange and by agent."""
    if not result.rounds:
        return []
    rounds = sorted({row["round"] for row in result.rounds})
    totals = {
        name: list(map(sum, _by_round(result, key)))
        for name, key in (
            ("up, from the agents", "bytes_up"),
            ("down, to the agents", "bytes_down"),
        )
    }
    views = {"bytes": _per_round(rounds, totals, "bytes, all agents", size)}
    if all("sent" in row for row in result.rounds):
        sent = {"sent": list(map(sum, _by_round(result, "sent")))}
        views["messages"] = _per_round(rounds, sent, "messages sent", str)
    # Engines across machines do not measure CPU time.
    if any(row["cpu_seconds"] for row in result.rounds):
        seconds = _by_round(result, "cpu_seconds")
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


def _by_round(result: RunResult, key: str) -> list[list[float]]:
    """The entries of all agents, round by round."""
    values: dict[int, list[float]] = {}
    for row in result.rounds:
        values.setdefault(row["round"], []).append(row[key])
    return [values[round_] for round_ in sorted(values)]


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


def absences(result: RunResult) -> list[str]:
    """Failed evaluations, and requests without a reply."""
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
    if not missed and result.part == "site":
        return []  # a site knows the requests that it has answered
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
