r"""Reports of results, and the picture of an audit.

::

    write_report  a run as one self-contained HTML file
    plot_audit    the measurements of an audit and the claimed guarantee

::

    runs, statistics      the numbers: best values, intervals, differences between runs
    effects               importances of parameters, and slices of a site's model
    verdict, outcomes, parameters, accounts, traffic
                          tables and charts of each part
    sections              all parts in their order
    charts                Plotly figures as plain data
    page                  escaping, HTML, and the file with its scripts
    audit                 the picture of an audit, by matplotlib

Plotly's JavaScript is read from the package `plotly` when a file is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from botorch_fed.report.audit import plot_audit
from botorch_fed.report.page import Section, page
from botorch_fed.report.runs import compared_runs
from botorch_fed.report.sections import sections
from botorch_fed.report.statistics import counted
from botorch_fed.run import write_private

if TYPE_CHECKING:
    from botorch_fed.run import RunResult


def write_report(
    result: RunResult,
    path: str | Path,
    *,
    others: Mapping[str, RunResult] = {},
    title: str | None = None,
    findings: Sequence[str] = (),
) -> Path:
    """A run as one HTML file without network access, for screen and print.

    It begins with what the federation has contributed and the best configuration of each site.
    Below are convergence over agents and per agent, Pareto fronts of several objectives,
    importances, slices and parallel coordinates of the parameters, all trials, the payments, the
    messages, absences and failures, and the readers of each message. A section without data is
    left out. Every chart has a table with its numbers, which needs no JavaScript.

    The file shows every agent's points and outcomes; the guarantee of the run does not cover it.
    Its size is that of Plotly's JavaScript, some 5 MB, and that of the trials.

    Args:
        result: The result of `run`, or `RunResult.load(folder)`.
        path: The file, which is replaced if it exists.
        others: Runs to compare with, by label, for example "alone" or "pooled". Differences are
            paired by the names of the agents.
        title: The heading; by default the protocol and the number of agents.
        findings: Sentences that stand first: what several runs say, of which this is one.

    Returns: The path.

    Example:
        >>> result = run(FTS(budget=12), SklearnTuning(num_agents=8), seed=0)
        >>> write_report(result, "report.html")
        PosixPath('report.html')
    """
    text = page(title or heading(result), report_sections(result, others, findings))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, text.encode())
    return path


def heading(result: RunResult) -> str:
    """The title of a report: the protocol and the number of agents, or whose part it is."""
    if result.part == "site":
        return f"{result.protocol}, site {result.names[0]}"
    who = "hub of " if result.part == "hub" else ""
    return f"{result.protocol}, {who}{counted(len(result.names), 'agent')}"


def report_sections(
    result: RunResult, others: Mapping[str, RunResult] = {}, findings: Sequence[str] = ()
) -> list[Section]:
    """The sections of a report.

    Args:
        result: The result, also of a run that has not ended.
        others: Runs to compare with, by label.
        findings: What several runs say.
    """
    return sections(compared_runs(result, others), findings)


__all__ = ["plot_audit", "write_report"]
