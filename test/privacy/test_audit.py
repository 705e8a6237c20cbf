"""Healthy mechanisms pass, every listed defect fails, and the bounds are bounds."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError
from scipy.special import ndtr
from scipy.stats import binom

from benchmarks.privacy_mutants import (
    CASES,
    MUTANTS,
    ROUNDS,
    RUNS,
    VARIANTS,
    Mutant,
    audited,
    build,
    installed,
)
from botorch_fed.privacy.accounting import Event, Ledger, gaussian_epsilon, gaussian_mu
from botorch_fed.privacy.audit import (
    NOISE_LEVEL,
    AuditReport,
    Claim,
    OperatingPoint,
    _documented,
    _Law,
    audit,
    audit_transcripts,
    noise_checks,
)
from botorch_fed.privacy.evidence import clopper_pearson
from botorch_fed.privacy.hazmat.noise import OSNoise
from botorch_fed.privacy.mechanisms import GaussianSum, SignalWarning
from botorch_fed.rng import generator

RERUNS = range(20)
# Each class once, sampled: the other cases run among the slow tests.
FAST = ("plain, sampled", "weighted, sampled", "correlated, sampled")


def _pairs(mutants: tuple[Mutant, ...], fast: bool) -> list[Any]:
    pairs = []
    for mutant in mutants:
        some = [case for case in mutant.cases if case in FAST]
        some = some if mutants is MUTANTS else (some or list(mutant.cases))[:1]
        cases = some if fast else [case for case in mutant.cases if case not in some]
        pairs += [pytest.param(mutant, case, id=f"{mutant.name}-{case}") for case in cases]
    return pairs


def _small(**settings: Any) -> GaussianSum:
    return GaussianSum(
        **{"num_agents": 5, "dim": 4, "clip_norm": 1.0, "noise_multiplier": 1.0, **settings}
    )


def _normals(seed: int, *shape: int) -> torch.Tensor:
    return generator(seed, "test audit").normal(*shape)


# --- healthy and mutated -------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_healthy_mechanisms_pass(case: str) -> None:
    report = audited(case)
    assert report.passed, str(report)
    assert 0 < report.epsilon_lower_bound < report.guarantee.epsilon


@pytest.mark.parametrize(
    ("mutant", "case"), _pairs(MUTANTS, fast=True) + _pairs(VARIANTS, fast=True)
)
def test_mutants_fail(mutant: Mutant, case: str) -> None:
    with installed(mutant):
        report = audited(case, runs=250)  # enough to see a defect
    assert not report.passed, str(report)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mutant", "case"), _pairs(MUTANTS, fast=False) + _pairs(VARIANTS, fast=False)
)
def test_mutants_fail_in_every_other_case(mutant: Mutant, case: str) -> None:
    test_mutants_fail(mutant, case)


@pytest.mark.parametrize("case", ["plain, sampled", "correlated, sampled"])
@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.mechanisms.SignalWarning")
def test_noise_that_shrinks_where_there_are_data(case: str) -> None:
    old = next(m for m in MUTANTS if m.name == "un-noised empty sample").old
    new = old.replace("self.noise_scale", "self.noise_scale / (2 if total.any() else 1)")
    target = "botorch_fed.privacy.mechanisms:GaussianMechanism.release"
    with installed(Mutant("half noise on data", target, old, new, (case,))):
        report = audited(case)
    assert any("beside the canary" in check.name for check in report.failures)


@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.mechanisms.SignalWarning")
@pytest.mark.parametrize("noise_multiplier", [1e-3, 3e4])
def test_extreme_noise_multipliers_are_healthy(noise_multiplier: float) -> None:
    mechanism = GaussianSum(num_agents=3, dim=16, clip_norm=1.0, noise_multiplier=noise_multiplier)
    assert audit(mechanism, runs=600).passed, "the lattice adds a tenth to large noise"


def test_the_list_is_complete_and_leaves_no_trace() -> None:
    assert {mutant.name for mutant in MUTANTS} == {
        "half noise",
        "no clip",
        "clip after weighting",
        "un-noised empty sample",
        "wrong q",
        "noise reused between rounds",
        "noise reused between regions",
        "noise on one region only",
    }
    for mutant in MUTANTS + VARIANTS:
        owner, name, mutated = build(mutant)
        shipped = inspect.getattr_static(owner, name)
        assert type(mutated) is type(shipped)
        with installed(mutant):
            assert inspect.getattr_static(owner, name) is not shipped
        assert inspect.getattr_static(owner, name) is shipped


def test_a_mutant_whose_line_is_gone_is_an_error() -> None:
    mutant = MUTANTS[0]
    stale = Mutant(mutant.name, mutant.target, "return 0", "return 1", mutant.cases)
    with pytest.raises(ValueError, match="exactly once"):
        build(stale)


def test_a_mutant_meets_the_thresholds_of_the_healthy_run() -> None:
    healthy = audited("plain, sampled")
    with installed(MUTANTS[1]):
        mutated = audited("plain, sampled")
    assert [p.threshold for p in healthy.points] == [p.threshold for p in mutated.points]
    assert healthy.claim == mutated.claim


def test_rows_that_should_be_equal_carry_nothing_else() -> None:
    stray = Mutant(
        "a constant in some rows",
        "botorch_fed.privacy.mechanisms:GaussianMechanism.release",
        "values = self._decode(noised)",
        "values = self._decode(noised) + 1e-3 * torch.eye(*noised.shape)",
        ("correlated, uniform stage",),
    )
    with installed(stray):
        failures = [check.name for check in audited(*stray.cases).failures]
    assert failures == ["part of the releases outside the documented range"]


def test_the_black_box_alone_finds_what_costs_privacy() -> None:
    for name in ("half noise", "no clip", "clip after weighting", "wrong q"):
        (mutant,) = (m for m in MUTANTS if m.name == name)
        with installed(mutant):
            report = audited("plain, sampled")
        assert any(check.box == "black" for check in report.failures), str(report)


# --- the whole report ----------------------------------------------------------------------------


def test_a_report_says_what_was_done() -> None:
    mechanism = _small()
    report = audit(mechanism, runs=100, rounds=3)
    assert report.runs == 100
    assert report.guarantee.releases == report.rounds == 3
    assert report.claim.mu == pytest.approx(math.sqrt(3))
    assert report.private is False
    assert report.verdict.startswith("Passed: 100 runs per world")
    assert "seeded" in report.verdict
    text = str(report)
    assert repr(mechanism) in text
    assert all(check.name in text for check in report.checks)


def test_a_failed_report_names_what_contradicts() -> None:
    with installed(MUTANTS[0]):
        report = audit(_small(), runs=300)
    assert report.verdict.startswith("FAILED")
    assert "noise in each round and region" in report.verdict
    assert "FAIL" in str(report)


def test_the_same_seed_replays_and_another_does_not() -> None:
    first, again, other = (audit(_small(), runs=20, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.scores, again.scores)
    assert not torch.equal(first.scores, other.scores)


def test_the_operating_systems_noise_can_be_audited() -> None:
    # False alarms as for healthy mechanisms, 1e-4.
    report = audit(_small(), runs=300, noise=OSNoise())
    assert report.private
    assert report.passed, str(report)
    assert "seeded" not in report.verdict


def test_one_round_one_agent_one_dimension() -> None:
    with pytest.warns(SignalWarning):
        mechanism = _small(num_agents=1, dim=1, noise_multiplier=2.0)
    report = audit(mechanism, runs=200, rounds=1)
    assert report.passed, str(report)


def test_the_callers_delta_comes_first_and_once() -> None:
    report = audit(_small(), runs=20, delta=0.01)
    assert [g.delta for g in report.claim.guarantees].count(0.01) == 1
    assert report.guarantee.delta == 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "at least one round"),
        ({"runs": 5}, "at least 10 runs"),
        ({"confidence": 1.0}, "confidence"),
        ({"canary": torch.ones(3)}, "4 numbers"),
        ({"canary": torch.full((4,), math.nan)}, "finite"),
        ({"canary": torch.full((4,), 0.1)}, "clip norm"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        audit(_small(), **settings)


def test_an_unknown_mechanism_is_sent_elsewhere() -> None:
    unknown: Any = object()
    with pytest.raises(InputDataError, match="audit_transcripts"):
        audit(unknown)


# --- the documented law --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.mechanisms.SignalWarning")
@pytest.mark.parametrize("case", CASES)
def test_the_law_agrees_with_the_shipped_class(case: str) -> None:
    mechanism = CASES[case]()
    law = _documented(mechanism)
    # Noise: whitening it gives the identity. The lattice adds less than one part in a thousand.
    noise = law.whitening @ mechanism.decoder * mechanism.noise_scale
    identity = torch.eye(law.whitening.shape[0], dtype=torch.float64)
    torch.testing.assert_close(noise @ noise.T, identity, rtol=1e-3, atol=1e-9)
    # Signal: the canary at the clip bound is z⁻¹ away, nobody is farther.
    columns = law.whitening @ mechanism.weights * (mechanism.clip_norm / mechanism.sampling_rate)
    assert float(columns.norm(dim=0).max()) == pytest.approx(law.size, rel=1e-9)
    torch.testing.assert_close(columns[:, law.agent], law.pull, rtol=1e-9, atol=1e-12)
    if "published" in case:
        assert law.size < 1 / mechanism.noise_multiplier
    else:
        law_size = 1 / mechanism.noise_multiplier  # and a little less, for the lattice
        assert law_size * (1 - 1e-4) < law.size < law_size
        share = mechanism.sensitivity / mechanism.noise_scale
        assert law.size == pytest.approx(share, rel=1e-8)
    assert law.event == mechanism.event


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("replace", [False, True])
def test_scores_are_log_likelihood_ratios(rate: float, replace: bool) -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    law = _Law(one, 1.5 * one[0], 0, rate, replace, Event(1 / 1.5))
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    weight = float(x[1] - x[0])

    def density(mean: float) -> torch.Tensor:
        normal = torch.distributions.Normal(mean, 1.0)
        centre = torch.distributions.Normal(0.0, 1.0)
        return rate * normal.log_prob(x).exp() + (1 - rate) * centre.log_prob(x).exp()

    without = density(-1.5 if replace else 0.0)
    ratio = law.log_likelihood_ratio(x[:, None]).exp()
    torch.testing.assert_close(ratio * without, density(1.5), rtol=1e-9, atol=1e-30)
    assert float((ratio * without).sum()) * weight == pytest.approx(1, abs=1e-9)


def test_scores_survive_a_canary_that_was_not_clipped() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    law = _Law(one, one[0], 0, 0.3, False, Event(1.0))
    scores = law.log_likelihood_ratio(torch.tensor([[1e4, -1e4], [1e9, 1e9]]).double())
    assert bool(scores.isfinite().all())


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.003, 0.1, 0.5, 0.97])
def test_clopper_pearson_covers(rate: float) -> None:
    counts = np.arange(201)
    bounds = np.array([clopper_pearson(int(k), 200, 0.005) for k in counts])
    too_low = binom.pmf(counts, 200, rate)[bounds < rate].sum()
    assert too_low <= 0.005
    assert clopper_pearson(0, 200, 0.005) == pytest.approx(1 - 0.005 ** (1 / 200))
    assert clopper_pearson(200, 200, 0.005) == 1


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("threshold", [-0.5, 0.3, 1.0, 2.0])
def test_exact_error_rates_give_the_claim_and_no_more(mu: float, threshold: float) -> None:
    alarms, misses = float(ndtr(-threshold)), float(ndtr(threshold - mu))
    point = OperatingPoint(threshold, alarms, misses, alarms, misses)
    assert point.mu == pytest.approx(mu, rel=1e-9)
    for delta in (1e-3, 0.03, 0.2):
        assert point.epsilon(delta) <= gaussian_epsilon(delta, mu) + 1e-9


def test_the_best_threshold_attains_epsilon() -> None:
    # δ(ε) is attained by the test that says "present" where the loss exceeds ε.
    mu, delta = 1.0, 1e-2
    epsilon = gaussian_epsilon(delta, mu)
    threshold = epsilon / mu + mu / 2
    alarms, misses = float(ndtr(-threshold)), float(ndtr(threshold - mu))
    point = OperatingPoint(threshold, alarms, misses, alarms, misses)
    assert point.epsilon(delta) == pytest.approx(epsilon, rel=1e-6)


def test_useless_tests_prove_nothing() -> None:
    point = OperatingPoint(0.0, 0.5, 0.5, 1.0, 1.0)
    assert point.epsilon(1e-3) == 0
    assert point.mu == 0


def test_the_claimed_curve_is_the_gaussian_one() -> None:
    ledger = Ledger().spend(Event(1.0))
    points = tuple(ledger.guarantee(delta=d) for d in (1e-3, 0.01, 0.05, 0.1, 0.2, 0.3))
    grid = torch.linspace(0, 1, 101, dtype=torch.float64)
    exact = torch.special.ndtr(torch.special.ndtri(1 - grid) - 1)
    by_points = Claim(points).least_misses(grid)
    assert bool((by_points <= exact + 1e-9).all())  # finitely many points claim less
    assert float((exact - by_points).max()) < 0.03
    torch.testing.assert_close(Claim(points, mu=1.0).least_misses(grid), exact)
    with pytest.raises(InputDataError, match="at least one"):
        Claim(())


# --- any transcripts -----------------------------------------------------------------------------


class _Gaussian:
    """Scores of a Gaussian release of a given mu; remembers which runs were asked for."""

    def __init__(self, mu: float, seed: int) -> None:
        self.mu, self.seed = mu, seed
        self.asked: list[range] = []

    def __call__(self, present: bool, runs: range) -> torch.Tensor:
        self.asked.append(runs)
        stream = generator(self.seed, "test audit", int(present), runs.start)
        return stream.normal(len(runs)) + self.mu * present


def _audited(mu: float, seed: int, claimed: float, runs: int = 1200) -> AuditReport:
    guarantee = Ledger().spend(Event(1 / claimed)).guarantee(delta=1e-3)
    claim = Claim((guarantee,), mu=claimed)
    return audit_transcripts(
        _Gaussian(mu, seed), claim, subject="a test", rounds=1, private=False, runs=runs
    )


def test_thresholds_come_from_separate_runs() -> None:
    sampler = _Gaussian(1.0, 0)
    guarantee = Ledger().spend(Event(1.0)).guarantee(delta=1e-3)
    audit_transcripts(
        sampler, Claim((guarantee,)), subject="a test", rounds=1, private=True, runs=100
    )
    pilot, audited_runs = sampler.asked[:2], sampler.asked[2:]
    assert {i for runs in pilot for i in runs}.isdisjoint(i for runs in audited_runs for i in runs)
    assert audited_runs == [range(100)] * 2


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_power_and_false_alarms(epsilon: float) -> None:
    # At a claimed epsilon of 1, 1200 runs find half the noise (twice the mu) with probability
    # .999, and a healthy mechanism fails with probability 5e-5.
    mu = gaussian_mu(epsilon, 1e-3)
    assert all(_audited(mu, seed, mu).passed for seed in RERUNS)
    caught = [not _audited(2 * mu, seed, mu).passed for seed in RERUNS]
    assert sum(caught) >= 19


def test_residuals_and_scores_make_one_verdict() -> None:
    guarantee = Ledger().spend(Event(1.0)).guarantee(delta=1e-3)
    report = audit_transcripts(
        _Gaussian(1.0, 0),
        Claim((guarantee,)),
        subject="a test",
        rounds=1,
        private=True,
        runs=100,
        residuals=torch.zeros(50, 1, 1, 4, dtype=torch.float64),
    )
    assert not report.passed
    assert "not as documented" in report.verdict
    assert report.mu_lower_bound is None


# --- white box -----------------------------------------------------------------------------------


def _failed(residuals: torch.Tensor) -> set[str]:
    return {check.name for check in noise_checks(residuals) if not check.passed}


def test_normals_pass_the_white_box() -> None:
    # 40 x 6 checks at 1e-6.
    assert NOISE_LEVEL == 1e-6
    assert not any(_failed(_normals(seed, 200, 2, 3, 4)) for seed in range(40))
    assert not _failed(_normals(0, 5, 1, 1, 1))
    assert not _failed(_normals(0, 20_000, 1, 1, 1))


def test_defects_of_noise_fail_the_white_box() -> None:
    good = _normals(1, 600, 2, 3, 4)
    assert "noise in each round and region" in _failed(0.8 * good)
    one_region = good.clone()
    one_region[:, :, 1:] = 0
    assert "noise in each round and region" in _failed(one_region)
    rounds = good[:, :1].expand_as(good)
    assert "noise in differences between rounds" in _failed(rounds)
    regions = good[:, :, :1].expand_as(good)
    assert "noise in differences between regions" in _failed(regions)
    coordinates = good[..., :1].expand_as(good)
    assert "smallest eigenvalue of the noise covariance" in _failed(coordinates)
    mirrored = torch.cat([good[:, :1], -good[:, :1]], dim=1)
    assert "smallest eigenvalue of the noise covariance" in _failed(mirrored)
    assert "distance of the noise from normal" in _failed(good.abs())
    some = good.clone()
    some[::100] = 0  # one run in a hundred is not noised: no mean square shows it
    assert _failed(some) == {"occurrences of one and the same release"}
    again = torch.cat([good[:300], good[:300]])
    assert _failed(again) == {"occurrences of one and the same release"}


def test_the_spectrum_is_silent_where_it_knows_nothing() -> None:
    names = {check.name for check in noise_checks(_normals(2, 20, 2, 3, 4))}
    assert "smallest eigenvalue of the noise covariance" not in names


def test_residuals_have_four_axes() -> None:
    with pytest.raises(InputDataError, match="rounds x regions"):
        noise_checks(torch.zeros(3, 4))


def test_the_lattice_bound_on_repeats_holds() -> None:
    # Rounded to the coarsest step, 2^-20 standard deviations: two equal numbers are to be
    # expected among 4000, and pass; so many as a frequent atom gives do not.
    step = 2.0**-20
    numbers = (_normals(3, 4000, 1, 1, 1) / step).round() * step
    assert not _failed(numbers)
    numbers[:40] = 0.25
    assert "occurrences of one and the same release" in _failed(numbers)


def test_settings_of_the_mutants_let_empty_samples_occur() -> None:
    mechanism: Any
    with pytest.warns(SignalWarning):
        mechanism = CASES["correlated, sampled"]()
    empty = (1 - mechanism.sampling_rate) ** mechanism.num_agents
    assert empty * RUNS * ROUNDS > 100
