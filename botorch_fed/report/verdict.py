"""The first screen of a report: what the federation contributed, and what to use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from botorch_fed.report.page import (
    banner,
    cell,
    details,
    escaped,
    folded,
    paragraph,
    parameter_cell,
    table,
    tiles,
    value_cell,
)
from botorch_fed.report.runs import Run, best_trials, differences
from botorch_fed.report.statistics import Estimate, brief, counted, mean, size, upper

if TYPE_CHECKING:
    from botorch_fed.run import RunResult

_MOST_NAMED = 8


def found(findings: Sequence[str]) -> list[str]:
    """What several runs say, of which this page shows one."""
    if not findings:
        return []
    items = "".join(f"<li>{escaped(words)}</li>" for words in findings)
    note = "The rest of this page shows one of these runs, which shows less than all of them."
    return [
        f'<div class="banner"><p><strong>Several runs together.</strong></p><ul>{items}</ul>'
        f'<p class="n">{note}</p></div>'
    ]


def verdict(runs: list[Run]) -> list[str]:
    """The parts of the first screen."""
    this = runs[0]
    parts = [] if this.result.ended else [_unfinished(this.result)]
    parts += [_contributed(runs), tiles(_tiles(this.result))]
    parts += _best(this.result)
    return parts


def _unfinished(result: RunResult) -> str:
    done = counted(len(result.records), "evaluation")
    rounds = counted(len({row["round"] for row in result.rounds}), "exchange")
    so_far = rounds if result.part == "hub" else done
    return banner("warn", "The run has not ended.", f"This is what its folder holds: {so_far}.")


# ------------------------------------------------------------------ what was contributed

_UNKNOWN = {
    "whole": (
        "No run is compared with this one, so this report cannot say whether the messages have "
        "helped. Run the same study with its method alone(), without messages, and compare: "
        'botorch-fed report RUN --compare alone=FOLDER, or write_report(…, others={"alone": …}).'
    ),
    "hub": (
        "Points and outcomes are at the sites, so the hub cannot say whether the messages have "
        "helped, nor which configuration is best. Each site's own report shows its own."
    ),
    "site": (
        "This is one site's part of a run. One site alone cannot say whether the others' messages "
        "have helped: that needs the same study without messages, at several sites. How far its "
        "own outcomes have confirmed them is the trust below, where the protocol has one."
    ),
}


def _contributed(runs: list[Run]) -> str:
    """What the federation contributed, in words."""
    this = runs[0]
    others = [run for run in runs[1:] if run.best]
    if not this.best and this.result.part != "hub":
        return banner("warn", "Nothing to compare.", "There is no observation that counts yet.")
    if not others or not this.best:
        return banner("warn", "The contribution is unknown.", _UNKNOWN[this.result.part])
    found = [_against(this, other) for other in others]
    kinds = [kind for kind, _ in found]
    kind = kinds[0] if len(set(kinds)) == 1 else "warn"
    items = "".join(f"<li>{escaped(words)}</li>" for _, words in found)
    note = (
        "Best values of the same sites in one run of each; intervals are over sites, not over "
        "seeds, and not corrected for their number."
    )
    head = _HEADS[kind] if len(set(kinds)) == 1 else "It depends on the comparison."
    return (
        f'<div class="banner {kind}"><p><strong>{head}</strong></p><ul>{items}</ul>'
        f'<p class="n">{note}</p></div>'
    )


_HEADS = {
    "good": "This run is ahead.",
    "bad": "This run is behind.",
    "warn": "No difference is shown.",
}


def _against(this: Run, other: Run) -> tuple[str, str]:
    """Whether a run is ahead of another at the end, and the words for it."""
    estimates = {}
    for query in this.marks:
        found = Estimate.of(differences(this, other, query))
        if found is not None and (query is None or query <= other.longest):
            estimates[query] = found
    last = estimates.get(None)
    if last is None:
        return "warn", f"Against {other.label}: no site is in both runs."
    if last.half is None:
        return "warn", (
            f"Against {other.label}: {_signed(last.mean, this)} at the end at the one site in both "
            "runs. One site shows no difference."
        )
    words = (
        f"Against {other.label}: {_signed(last.mean, this)} at the end, 95 % interval "
        f"{brief(last.low)} to {brief(last.high)}, {counted(last.count, 'site')}"
    )
    early = [
        f"{'ahead' if one.mean > 0 else 'behind'} after query {query}"
        for query, one in estimates.items()
        if query is not None and _decided(one)
    ]
    kind = ("good" if last.mean > 0 else "bad") if _decided(last) else "warn"
    if kind == "warn":
        words += ", so no difference is shown"
    return kind, words + (f"; {', '.join(early)}." if early else ".")


def _decided(one: Estimate) -> bool:
    return one.half is not None and abs(one.mean) > one.half


def _signed(difference: float, run: Run) -> str:
    """A difference in words; positive is better."""
    if difference == 0:
        return f"the same {run.measure}"
    which = "better" if difference > 0 else "worse"
    return f"{run.measure} {which} by {brief(abs(difference))} on average"


# ------------------------------------------------------------------ facts


def _tiles(result: RunResult) -> list[tuple[str, str, str]]:
    return [*_evaluations(result), *_messages(result), *_trust(result), *_epsilon(result)]


def _evaluations(result: RunResult) -> list[tuple[str, str, str]]:
    if result.part == "hub":
        asked = max((row.get("evaluations", 0) for row in result.rounds), default=0)
        of = "" if result.budget is None else f"of {result.budget:,} at each site"
        return [("Evaluations requested", f"{asked:,}", of)]
    failed = sum(row["y"] is None for row in result.records)
    done = {row["agent"] for row in result.given} - {row["agent"] for row in result.records}
    searching = len(result.names) - len(done)  # without those that gave their data and are done
    most = None if result.budget is None else result.budget * searching
    of = "" if most is None or result.space.fidelity is not None else f"of {most:,}"
    failures = f", {failed:,} failed" if failed else ""
    return [("Evaluations", f"{len(result.records):,}", f"{of}{failures}".removeprefix(", "))]


def _messages(result: RunResult) -> list[tuple[str, str, str]]:
    if not result.rounds:
        return []
    table_ = result.contributions()
    if any(row["messages_sent"] is None for row in table_):
        return [("Messages", "not recorded", "")]
    sent = sum(row["messages_sent"] for row in table_)
    silent = [row["site"] for row in table_ if not row["messages_sent"]]
    total = sum(row["bytes_up"] + row["bytes_down"] for row in table_)
    none = f", none from {_names(silent)}" if silent and sent else ""
    found = [("Messages sent", f"{sent:,}", f"{size(total)} in all{none}")]
    received = sum(row["messages_received"] for row in table_)
    used = queries_with_messages(result)
    if used is None:
        return [*found, ("Messages received", f"{received:,}", "")]
    informed, queries = (sum(counts) for counts in zip(*used.values(), strict=True))
    remark = f"of {queries:,}; {counted(received, 'message')} received"
    return [*found, ("Queries that had messages", f"{informed:,}", remark)]


def queries_with_messages(result: RunResult) -> dict[str, tuple[int, int]] | None:
    """Of each site, the evaluations chosen after a message had arrived, and all of them.

    None where evaluations or messages are not recorded.
    """
    if not result.records or not result.rounds:
        return None
    if not all("received" in row for row in result.rounds):
        return None
    public = result.set_up()
    found = {}
    for name in result.names:
        rounds = [
            row["round"]
            for row in result.rounds
            if row["agent"] == name and set(row["received"]) - public
        ]
        begun = min(rounds, default=None)
        queries = [
            row["round"]
            for row in result.records
            if row["agent"] == name and row.get("status") != "attached"
        ]
        informed = 0 if begun is None else sum(round_ >= begun for round_ in queries)
        found[name] = (informed, len(queries))
    return found


def _trust(result: RunResult) -> list[tuple[str, str, str]]:
    last = last_trust(result)
    if not last and result.part == "hub":
        return [("Trust earned", "not known here", "each site knows its own, if any")]
    if not last:
        return []
    values = list(last.values())
    span = f"{min(values):.2f} to {max(values):.2f} at the sites, " if len(values) > 1 else ""
    return [("Trust earned", f"{mean(values):.2f}", f"{span}from 0 (alone) to 1")]


def last_trust(result: RunResult) -> dict[str, float]:
    """The newest trust of each site that has compared."""
    return {name: values[-1] for name, values in result.trust.items() if values}


def _epsilon(result: RunResult) -> list[tuple[str, str, str]]:
    account: Mapping[str, Any] = result.privacy or {}
    planned = result.part == "site" or not result.ended
    if "epsilon" not in account and planned and result.price is not None:
        where = "in the hub's report" if result.part == "site" else "told at the end"
        return [("ε promised", upper(result.price.epsilon), f"spent: {where}")]
    if result.part == "site":
        return []
    if "epsilon" not in account:
        return [("Privacy", "none", "no guarantee")]
    if not account.get("private"):
        return [("Privacy", "none", "the noise was seeded")]
    promised = account.get("promised_epsilon")
    of = "" if promised is None else f"of {upper(promised)}, "
    remark = f"{of}δ = {upper(account['delta'])}, per {account['unit']}"
    return [("ε spent", upper(account["epsilon"]), remark)]


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


# ------------------------------------------------------------------ what to use


def _best(result: RunResult) -> list[str]:
    """The best configuration of each site."""
    found = best_trials(result)
    space = result.space
    several = len(space.objectives) > 1
    trust, used = last_trust(result), queries_with_messages(result)
    rows = []
    for one in found:
        values = [value_cell(one.values[metric.name]) for metric in space.metrics]
        row = [cell(one.site), *([cell(one.of)] if several else []), *values]
        row += map(parameter_cell, one.parameters.values())
        if used is not None:
            row.append(cell("{} of {}".format(*used[one.site]), numeric=True))
        if trust:
            row.append(cell(f"{trust[one.site]:.2f}" if one.site in trust else "–", numeric=True))
        rows.append(row)
    parts = []
    if rows:
        metrics = [
            f"{metric.name} ({_direction(metric)})" if metric.role == "objective" else metric.name
            for metric in space.metrics
        ]
        if not space.outcomes:
            metrics = [f"Best value ({_direction(space.outcome)})"]
        head = ["Site", *(["Best in"] if several else []), *metrics, *space.names]
        head += ["Queries with messages"] if used is not None else []
        head += ["Trust"] if trust else []
        which = " in each objective" if several else ""
        bound = ", of those that meet all constraints" if _constrained(result) else ""
        caption = f"Best configuration of each site{which}, as observed{bound}"
        parts.append(
            folded(
                f"Best configurations of {counted(len(result.names), 'site')}",
                table(caption, head, rows, kind="cards"),
                len(rows),
            )
        )
        document = [
            {"site": one.site, "values": dict(one.values), "parameters": dict(one.parameters)}
            for one in found
        ]
        text = json.dumps(document, indent=1, ensure_ascii=False)
        pre = f'<pre tabindex="0" class="wide">{escaped(text)}</pre>'
        parts.append(details("Best configurations as JSON, with all digits", pre))
    there = {one.site for one in found}
    asked = {row["agent"] for row in result.records} - there
    if asked and _constrained(result):
        words = _names([name for name in result.names if name in asked])
        parts.append(paragraph(f"No trial meets all constraints yet: {words}."))
    return parts


def _constrained(result: RunResult) -> bool:
    return bool(result.space.constraint_words or result.space.outcome_constraints)


def _direction(metric: Any) -> str:
    return "smaller is better" if metric.minimize else "larger is better"
