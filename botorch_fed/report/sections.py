"""The sections of a report, in their order; here those in words alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from botorch_fed.federation.disclosure import Sees
from botorch_fed.report.accounts import guarantee, privacy, utility
from botorch_fed.report.outcomes import agents, convergence, fronts
from botorch_fed.report.page import Section, cells, facts, paragraph, table
from botorch_fed.report.parameters import parameters, trials
from botorch_fed.report.runs import Run
from botorch_fed.report.statistics import counted
from botorch_fed.report.traffic import absences, communication
from botorch_fed.report.verdict import found, verdict
from botorch_fed.space import Parameter, SearchSpace

if TYPE_CHECKING:
    from botorch_fed.run import RunResult


def sections(runs: list[Run], findings: Sequence[str] = ()) -> list[Section]:
    """All sections that have parts.

    Args:
        runs: The run, and those that it is compared with.
        findings: What several runs say, of which this is one.
    """
    return [section for section in _sections(runs, findings) if section.parts]


def _sections(runs: list[Run], findings: Sequence[str]) -> Iterator[Section]:
    this = runs[0]
    result = this.result
    yield Section("result", "Result", [*found(findings), *verdict(runs), *guarantee(result)])
    yield Section("convergence", "Convergence", convergence(runs))
    yield Section("agents", "Agent by agent", agents(runs))
    yield Section("fronts", "Pareto fronts", fronts(result))
    yield Section("parameters", "Parameters", parameters(result))
    yield Section("trials", "Trials", trials(result))
    yield Section("privacy", "Privacy spent", privacy(this))
    yield Section("utility", "Privacy and utility", utility(runs))
    yield Section("communication", "Communication and time", communication(result))
    yield Section("absences", "Absences and failures", absences(result))
    yield Section("threats", "Who sees what", _threats(result))
    yield Section("run", "The run", _run(result))


# ------------------------------------------------------------------ threat model


def _threats(result: RunResult) -> list[str]:
    account, sees = result.privacy or {}, result.sees
    sentences = (
        ["This result does not record who sees what."] if sees is None else [*sees.sentences]
    )
    if "epsilon" in account and not account.get("private"):
        sentences.append("In this run the noise was seeded, so that it protects no data.")
    not_covered = (
        "Never covered: observers of an agent's queries and results; the names of the agents and "
        "the times of their answers; settings that were tuned on the agents' data without payment"
    )
    files = {
        "whole": "; and this file, which shows every agent's points and outcomes.",
        "hub": ".",
        "site": "; and this file, which shows the site's points and outcomes.",
    }
    if result.part == "site" and sees is None:
        sentences = []
    body = [] if sees is None else [_sees_table(sees)]
    return [*map(paragraph, sentences), *body, paragraph(not_covered + files[result.part])]


def _sees_table(sees: Sees) -> str:
    head = ("Message", "From", "Content", "Readers")
    rows = [cells([row.message, row.sender, row.content, row.who]) for row in sees.rows]
    return table("Every kind of message of this protocol", head, rows)


# ------------------------------------------------------------------ the run


def _run(result: RunResult) -> list[str]:
    rounds = {row["round"] for row in result.rounds}
    who = ("Site", result.names[0]) if result.part == "site" else ("Agents", str(len(result.names)))
    seen = [
        ("Evaluations", str(len(result.records))),
        ("Evaluations that failed", str(sum(row["y"] is None for row in result.records))),
        ("Observations before the run", str(len(result.given))),
    ]
    rows = [
        ("Protocol", result.protocol),
        who,
        ("Seed", str(result.seed)),
        ("Budget", _budget(result)),
        *_fidelity(result.space),
        *([] if result.part == "hub" else seen),
        ("Exchanges of messages", str(len(rounds)) if rounds else "not recorded"),
        ("Versions", ", ".join(f"{name} {v}" for name, v in result.versions.items())),
    ]
    head = ("Parameter", "Kind", "Range or values", "Scale")
    parameters = [cells([p.name, p.kind, _range(p), p.scale]) for p in result.space.parameters]
    outcome = "smaller is better" if result.space.outcome.minimize else "larger is better"
    if result.space.outcomes:
        outcome = "; ".join(one.words for one in result.space.outcomes)
    caption = f"Search space; of the outcome{'s' * bool(result.space.outcomes)}, {outcome}"
    return [
        facts("The run", rows),
        table(caption, head, parameters),
        *_constraints(result.space),
    ]


def _constraints(space: SearchSpace) -> list[str]:
    rows = [cells([one]) for one in space.constraint_words]
    if not rows:
        return []
    return [table("Constraints, which every point of a search meets", ("Constraint",), rows)]


def _budget(result: RunResult) -> str:
    if result.budget is None:
        return "not recorded"
    return f"{counted(result.budget, 'evaluation')} of each agent, initial ones included"


def _range(parameter: Parameter) -> str:
    if parameter.values:
        return ", ".join(map(str, parameter.values))
    return f"{parameter.lower:g} to {parameter.upper:g}"


def _fidelity(space: SearchSpace) -> list[tuple[str, str]]:
    """What a budget counts where there is a fidelity, and which values are best ones."""
    if space.fidelity is None:
        return []
    name, target = space.fidelity.name, space.fidelity_value(1.0)
    words = (
        f"{name}: the budget counts evaluations at {name} = {target:g}, one at the lowest fidelity "
        f"as {space.cheapest:.3g}; best values are those at {name} = {target:g}"
    )
    return [("Fidelity", words)]
