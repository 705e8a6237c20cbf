"""Figures of results; the one room that draws. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from botorch_fed.privacy.audit import AuditReport, Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CLAIMED, _MEASURED, _BOUNDS, _FAILED = "#444444", "#0072b2", "#009e73", "#d55e00"
_FARTHEST = 100.0  # times the limit; farther bars are cut there


def plot_audit(report: AuditReport) -> Figure:
    """What an audit measured against what was claimed.

    Left, the errors of telling the worlds apart: the claim forbids the grey area below its
    trade-off curve; the line is what the runs did, the squares are the confidence bounds at the
    audited thresholds, and a square inside the grey is a violation. Right, every check as a share
    of what it allows: beyond one it failed.

    Args:
        report: Of `audit` or `audit_transcripts`.

    Returns: A figure; it belongs to no window, so save it by ``figure.savefig(path)``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_audit needs matplotlib: pip install matplotlib.") from error

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    errors, shares = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_errors(errors, report)
    _draw_shares(shares, report.checks)
    mark = "passed" if report.passed else "FAILED"
    figure.suptitle(f"Audit {mark}: {report.guarantee!r}", fontsize=9, wrap=True)
    return figure


def _draw_errors(axes: Any, report: AuditReport) -> None:
    grid = torch.linspace(0, 1, 401, dtype=torch.float64)
    least = report.claim.least_misses(grid)
    axes.fill_between(grid, least, color=_CLAIMED, alpha=0.15, linewidth=0)
    axes.plot(grid, least, color=_CLAIMED, label="claimed: no test is below")
    alarms, misses = _measured_curve(report.scores)
    axes.plot(alarms, misses, color=_MEASURED, label=f"measured, {report.runs} runs per world")
    bounds = [(point.false_alarms_bound, point.misses_bound) for point in report.points]
    label = f"both errors are below, {report.confidence:.4g} confidence"
    axes.plot(*zip(*bounds, strict=True), "s", color=_BOUNDS, label=label, clip_on=False)
    axes.set(xlabel="false alarms", ylabel="misses", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _measured_curve(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of false alarms and misses at every threshold; `scores` is `2 x runs`."""
    thresholds = scores.flatten().sort().values
    without, present = (world.sort().values for world in scores)
    runs = scores.shape[-1]
    below = torch.searchsorted(without, thresholds, right=True)
    missed = torch.searchsorted(present, thresholds, right=True)
    return 1 - below / runs, missed / runs


def _draw_shares(axes: Any, checks: tuple[Check, ...]) -> None:
    rows = range(len(checks))
    shares = [_share(check) for check in checks]
    colours = [_MEASURED if check.passed else _FAILED for check in checks]
    axes.barh(rows, shares, color=colours, height=0.6)
    axes.axvline(1, color=_CLAIMED)
    labels = [f"{check.name} {check.relation} {check.limit:.3g}" for check in checks]
    axes.set_yticks(rows, labels, fontsize=7)
    axes.invert_yaxis()
    if max(shares) > 3:
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.set_xlim(0, 1.1 * max(1, *shares))
    axes.set_xlabel("share of what is allowed")


def _share(check: Check) -> float:
    """How far a check is used up: one is the limit."""
    used, allowed = check.measured, check.limit
    if check.relation == ">=":
        used, allowed = allowed, used
    if used <= 0:
        return 0.0
    return min(used / allowed, _FARTHEST) if allowed > 0 else _FARTHEST
