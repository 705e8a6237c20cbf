"""The picture of an audit. Only this module needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from botorch_fed.privacy.audit import AuditReport, Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CLAIMED, _MEASURED, _BOUNDS, _FAILED = "#444444", "#0072b2", "#009e73", "#d55e00"
_FARTHEST = 100.0  # longest bar, in multiples of the limit
_NO_MATPLOTLIB = 'needs matplotlib: pip install "botorch_fed[plot]".'


def plot_audit(report: AuditReport) -> Figure:
    """The measurements of an audit and the claimed guarantee.

    Left, the errors of tests that distinguish the two worlds. The claim excludes the grey area
    below its trade-off curve. The line shows the measured errors, the squares are confidence bounds
    at the audited thresholds; a square in the grey area is a violation. Right, every check as a
    share of its limit; a share above one is a failure.

    Args:
        report: The report of `audit` or `audit_transcripts`.

    Returns: A figure without a window; save it by ``figure.savefig(path)``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plot_audit {_NO_MATPLOTLIB}") from error

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
    axes.plot(grid, least, color=_CLAIMED, label="claimed lower bound of all tests")
    alarms, misses = _measured_curve(report.scores)
    axes.plot(alarms, misses, color=_MEASURED, label=f"measured, {report.runs} runs per world")
    bounds = [(point.false_alarms_bound, point.misses_bound) for point in report.points]
    label = f"upper bounds of both errors, confidence {report.confidence:.4g}"
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
    axes.set_xlabel("share of the limit")


def _share(check: Check) -> float:
    """The measurement of a check as a share of its limit."""
    used, allowed = check.measured, check.limit
    if check.relation == ">=":
        used, allowed = allowed, used
    if used <= 0:
        return 0.0
    return min(used / allowed, _FARTHEST) if allowed > 0 else _FARTHEST
