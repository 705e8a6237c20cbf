"""Audits of streams, increments and blocks: healthy ones pass, every listed defect is found."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.privacy_mutants import (
    STREAM_CASES,
    STREAM_MUTANTS,
    STREAM_RUNS,
    Mutant,
    StreamLaw,
    audited_published_tree,
    audited_stream,
    build,
    installed,
)
from botorch_fed.privacy.accounting import gaussian_mu
from botorch_fed.privacy.tree import PrefixSum

# What an adversary sees is enough: no look at the documentation is needed.
COSTLY = {
    "half noise",
    "half noise in an increment",
    "half noise in a block",
    "constants of Lemma 5 at alpha = 10",
    "sensitivity not squared",
    "features not clipped",
    "outcomes not clipped",
    "outcomes of a block not clipped",
    "each sum with noise of its own",
    "one participation paid for two",
    "running sum sent by a client",
    "running sum sent without noise",
    "an unfinished block released",
}
FEW = 200  # transcripts per world are enough to see a defect
PAIRS = [(mutant, case) for mutant in STREAM_MUTANTS for case in mutant.cases]
FIRST = [(mutant, mutant.cases[0]) for mutant in STREAM_MUTANTS]
REST = [pair for pair in PAIRS if pair not in FIRST]


def _named(pairs: list[tuple[Mutant, str]]) -> list[Any]:
    return [pytest.param(mutant, case, id=f"{mutant.name}-{case}") for mutant, case in pairs]


# Twelve thousand runs; "local" is the same program with other bounds.
LONG = pytest.param("local, alpha = 10", marks=pytest.mark.nightly)


@pytest.mark.parametrize("case", [LONG if c == LONG.values[0] else c for c in STREAM_CASES])
def test_healthy_streams_pass(case: str) -> None:
    report = audited_stream(case)
    assert report.passed, str(report)
    assert 0 < report.epsilon_lower_bound < report.guarantee.epsilon


@pytest.mark.nightly
@pytest.mark.parametrize("case", STREAM_CASES)
def test_healthy_streams_pass_reruns(case: str) -> None:
    reports = [audited_stream(case, seed=seed) for seed in range(1, 8)]
    assert all(report.passed for report in reports)


@pytest.mark.parametrize(
    "case", [c for c, chosen in STREAM_CASES.items() if chosen.world != "swap"]
)
def test_the_canary_moves_a_transcript_as_far_as_is_paid_for(case: str) -> None:
    law = StreamLaw(STREAM_CASES[case])
    replaced = law.mechanism.adjacency == "replace-one"
    claimed = (2 if replaced else 1) * math.sqrt(law.charges) / law.multiplier
    assert (1 - 1e-6) * claimed <= law.size <= claimed * (1 + 1e-12)


@pytest.mark.parametrize("case", [c for c in STREAM_CASES if not c.startswith(("local", "block"))])
def test_the_law_written_out_again_is_the_stated_noise(case: str) -> None:
    law = StreamLaw(STREAM_CASES[case])
    assert isinstance(law.mechanism, PrefixSum)
    stds = law.covariance.diagonal().sqrt()
    stated = [law.mechanism.noise_std(t) for t in range(1, law.releases + 1)]
    # The documentation's figures leave out what the lattice adds, a part in a million.
    torch.testing.assert_close(stds, torch.tensor(stated).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("mutant", "case"), _named(FIRST))
def test_mutants_fail(mutant: Mutant, case: str) -> None:
    few = (mutant, case) in FIRST and STREAM_CASES[case].runs == STREAM_RUNS
    with installed(mutant):
        report = audited_stream(case, runs=FEW if few else None)
    assert not report.passed, str(report)
    if mutant.name in COSTLY and (mutant, case) in FIRST:
        assert any(check.box == "black" for check in report.failures), str(report)


@pytest.mark.nightly
@pytest.mark.parametrize(("mutant", "case"), _named(REST))
def test_mutants_fail_in_every_other_case(mutant: Mutant, case: str) -> None:
    test_mutants_fail(mutant, case)


def test_every_case_has_a_mutant_and_every_mutant_its_line() -> None:
    assert {case for mutant in STREAM_MUTANTS for case in mutant.cases} == set(STREAM_CASES)
    assert len({mutant.name for mutant in STREAM_MUTANTS}) == len(STREAM_MUTANTS)
    for mutant in STREAM_MUTANTS:
        owner, name, value = build(mutant)
        assert value is not getattr(owner, name)


def test_published_constants_fail_for_large_rewards_and_hold_for_small_ones() -> None:
    assert audited_published_tree(alpha=10.0, beta=0.1, reward=1.0).passed
    report = audited_published_tree(alpha=10.0, beta=0.1, reward=20.0)
    assert report.mu_lower_bound is not None
    assert report.mu_lower_bound > gaussian_mu(10.0, 0.1)
    assert [check.box for check in report.failures] == ["black"]
