"""Figures show what the report says."""

from __future__ import annotations

import pytest
import torch

from botorch_fed.privacy.accounting import Event, Ledger
from botorch_fed.privacy.audit import AuditReport, Claim, audit_transcripts
from botorch_fed.report import plot_audit
from botorch_fed.rng import generator

pytest.importorskip("matplotlib")


def _report(distance: float) -> AuditReport:
    """An audit of one Gaussian release of mu = 1, in truth of the given mu."""

    def sampler(present: bool, runs: range) -> torch.Tensor:
        stream = generator(0, "test report", int(present), runs.start)
        return stream.normal(len(runs)) + (distance if present else 0.0)

    guarantee = Ledger().spend(Event(1.0)).guarantee(delta=1e-3)
    claim = Claim((guarantee,), mu=1.0)
    return audit_transcripts(sampler, claim, subject="a test", rounds=1, private=True, runs=300)


@pytest.mark.parametrize(("distance", "passed"), [(1.0, True), (3.0, False)])
def test_the_figure_carries_verdict_and_every_check(
    distance: float, passed: bool, tmp_path: object
) -> None:
    report = _report(distance)
    assert report.passed is passed
    figure = plot_audit(report)
    errors, shares = figure.axes
    assert ("passed" if passed else "FAILED") in figure.get_suptitle()
    bars = [patch.get_width() for patch in shares.patches]
    assert len(bars) == len(report.checks)
    assert [width <= 1 for width in bars] == [check.passed for check in report.checks]
    squares = errors.lines[-1].get_xydata()
    assert len(squares) == len(report.points)
    least = report.claim.least_misses(torch.from_numpy(squares[:, 0].copy()))
    assert bool((torch.from_numpy(squares[:, 1].copy()) >= least).all()) is passed
    figure.savefig(f"{tmp_path}/audit.png", dpi=40)
