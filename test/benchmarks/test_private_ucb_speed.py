"""The benchmark of private GP-UCB times real rounds, and its figures mean what they say."""

from __future__ import annotations

import math
import statistics
from copy import copy
from dataclasses import replace

import pytest
import torch

from benchmarks import private_ucb
from benchmarks.privacy_mutants import STREAM_MUTANTS
from botorch_fed.models.repair import noise_floor, noise_shift


@pytest.mark.parametrize("psd", private_ucb.PSD)
def test_a_round_plays_the_arm_of_the_dense_formula(psd: private_ucb.Psd) -> None:
    m, mechanism = 8, private_ucb.stream(8, 64)
    rounds = private_ucb.Ours(mechanism, num_arms=40)
    rounds.advance(20)
    rounds.ingest()
    rounds.solve(psd)
    rounds.choose()
    assert rounds.release.private
    assert rounds.state.t == rounds.state.records == 21
    gram, moment = mechanism.gram_and_moment(rounds.release.values, noise_var=1.0)
    values, Q = torch.linalg.eigh(gram)
    std = mechanism.noise_std(21)
    if psd == "floor":
        values = values.clamp(min=noise_floor(std, m))
    else:
        values = values + noise_shift(std, m, horizon=64)
    inverse = (Q / (1 + values / private_ucb.NOISE_VAR)) @ Q.mT
    mean = rounds.Phi @ inverse @ moment / private_ucb.NOISE_VAR
    variance = (rounds.Phi @ inverse * rounds.Phi).sum(dim=-1)
    score = mean[:, 0] + private_ucb.EXPLORATION * variance.sqrt()
    # By value: two arms may be equally good up to rounding.
    assert float(score[rounds.arm]) == pytest.approx(float(score.max()), abs=1e-9)


def test_the_peer_has_the_noise_of_the_shipped_tree() -> None:
    m, mechanism = 4, private_ucb.stream(4, 64, "tree")
    peer = private_ucb.NumpyTree(mechanism, num_arms=10)
    lattice = mechanism.norm / mechanism.statistic.norm("replace-one")  # which the peer has not
    for t in range(1, 65):
        peer.advance(t)
        assert len(peer.nodes) == t.bit_count()
        std = lattice * peer.scale * math.sqrt(len(peer.nodes))
        assert std == pytest.approx(mechanism.noise_std(t), rel=1e-12)
    draws = [peer.draw() for _ in range(4000)]
    V = torch.stack([torch.from_numpy(gram) for gram, _ in draws])
    u = torch.stack([torch.from_numpy(moment) for _, moment in draws])
    assert torch.equal(V, V.mT)
    rows, columns = torch.triu_indices(m, m, offset=1)
    svec = torch.cat(
        [
            V.diagonal(dim1=1, dim2=2),
            math.sqrt(2) * V[:, rows, columns],
            mechanism.moment_scale * u,
        ],
        dim=1,
    )
    # A deviation of n normals is known to 1 / √(2n): five of that.
    expected = torch.full((mechanism.dim,), peer.scale).double()
    torch.testing.assert_close(svec.std(dim=0), expected, rtol=5 / math.sqrt(8000), atol=0)


@pytest.mark.parametrize("psd", private_ucb.PSD)
def test_the_peer_has_the_same_posterior_where_noise_is_none(psd: private_ucb.Psd) -> None:
    mechanism = private_ucb.stream(6, 32, "tree", epsilon=1e9)
    ours = private_ucb.Ours(mechanism, num_arms=30)
    peer = private_ucb.NumpyTree(mechanism, num_arms=30)
    for one in (ours, peer):
        one.advance(31)
        one.solve(psd)
    assert ours.posterior is not None
    chol, weights = ours.posterior.chol, torch.from_numpy(peer.mean)
    # Seven deviations of what noise there is in the gram matrix, on either side; it is symmetric,
    # and a mean moves by less, for no eigenvalue of the precision is below one.
    close = {"rtol": 0.0, "atol": 7 * math.sqrt(2) * mechanism.noise_std(31) / 0.25}
    assert close["atol"] < 0.02
    torch.testing.assert_close(chol @ chol.mT, torch.from_numpy(peer.precision), **close)
    torch.testing.assert_close(ours.posterior.mean, weights, **close)
    ours.choose()
    mean, root = ours.posterior.predict(ours.Phi)
    score = mean[:, 0] + private_ucb.EXPLORATION * root.norm(dim=-1)
    peer.choose()
    assert float(score.max() - score[peer.arm]) < 2 * close["atol"]


def test_turns_leave_streams_where_they_are() -> None:
    ours = private_ucb.Ours(private_ucb.stream(4, 64), num_arms=5)
    ours.advance(10)
    streams = [copy(ours), private_ucb.NumpyTree(private_ucb.stream(4, 64), num_arms=5)]
    before = [one.t for one in streams]
    costs = private_ucb.in_turns(streams, 6)
    assert [one.t for one in streams] == before == [10, 0]
    for cost in costs:
        for clock in (cost.floor, cost.shift):
            assert {len(times) for times in clock.parts.values()} == {6}
            assert set(clock.parts) == {"ingest", "solve", "choose", "noise"}
        whole = zip(*(cost.floor.parts[p] for p in ("ingest", "solve", "choose")), strict=True)
        assert cost.floor_ms == statistics.median(map(sum, whole)) > 0


@pytest.mark.parametrize("horizon", [64, 4096, 10**6])
def test_what_is_kept_does_not_grow_with_the_horizon(horizon: int) -> None:
    mechanism = private_ucb.stream(40, horizon)
    kept = private_ucb.kept_megabytes(mechanism)
    # The sum, its noise and four buffers; a header beside.
    assert kept == pytest.approx(6 * 8e-6 * mechanism.dim, rel=0.03)


@pytest.mark.parametrize("drawn", [False, True])
def test_errors_of_the_private_mean(drawn: bool) -> None:
    known = private_ucb.curve(0, 128, drawn=drawn)
    assert float(known.truth.std()) == pytest.approx(private_ucb.SIGNAL_STD, abs=0.02)
    assert bool((known.features.norm(dim=1) <= 1 + 1e-9).all())
    assert set(known.rewards.unique().tolist()) == {0.0, 1.0}
    assert float(known.truth.abs().max()) <= 0.5
    plain = private_ucb.error_without_privacy(known)
    # Without a guarantee to speak of the stream is the data.
    exact = private_ucb.stream(11, 128, epsilon=1e9)
    for error in private_ucb.private_errors(known, exact, seed=0).values():
        assert error == pytest.approx(plain, rel=1e-2)


@pytest.mark.nightly
def test_private_mean_against_published_constants() -> None:
    figures, _ = private_ucb.errors(quick=True)
    # One draw's error has a deviation of 0.034: three of the mean of four. Published noise leaves
    # the mean near zero, as wrong as the signal is large.
    assert figures["rmse_private_mean_alpha1"] == pytest.approx(0.11, abs=0.051)
    assert figures["rmse_prior_alpha1"] == pytest.approx(0.12, abs=0.051)
    assert figures["rmse_paper_alpha1"] == pytest.approx(private_ucb.SIGNAL_STD, abs=0.03)


def test_deviations_of_prefixes() -> None:
    figures, _ = private_ucb.prefixes(quick=True)
    assert figures["prefix_std_worst_T1024"] == pytest.approx(3.27, abs=5e-3)
    assert max(private_ucb.deviations(1024, "tree")) == pytest.approx(10.49, abs=5e-3)


def test_missed_defects_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    (defect,) = (m for m in STREAM_MUTANTS if m.name == "half noise in a block")
    defect = replace(defect, cases=defect.cases[1:])
    same = "return self.norm_within(outcome_bound) * self.noise_multiplier"
    harmless = replace(defect, name="another order", new=same)
    monkeypatch.setattr(private_ucb, "STREAM_MUTANTS", (defect, harmless))
    assert private_ucb.mutants(quick=True)[0] == {"mutants_caught": 1, "mutants": 2}
    assert private_ucb.mutants(quick=False)[0] == {"mutants_caught": 2, "mutants": 4}


def test_documented_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_ucb, "NUM_FEATURES", 6)
    monkeypatch.setattr(private_ucb, "HORIZON", 1200)
    monkeypatch.setattr(private_ucb, "NUM_ARMS", 20)
    figures, tables = private_ucb.rounds(quick=True)
    assert set(figures) == {
        *("round_ms_T1e4_m100", "round_ms_T1e4_m100_shift", "round_growth_1e4_vs_1e2"),
        *("round_vs_exact_root", "round_vs_numpy_tree"),
    }
    assert all(value > 0 for value in figures.values())
    assert [len(table.rows) for table in tables] == [4, 4, 3]
    keys = (
        *figures,
        *("noise_state_mb_m400", "rmse_private_mean_alpha1", "rmse_prior_alpha1"),
        *("rmse_paper_alpha1", "mutants"),
        *("prefix_std_worst_T1024", "mutants_caught"),
    )
    assert private_ucb.__doc__ is not None
    assert all(key in private_ucb.__doc__ for key in keys)
    assert all(f"\n    {part} " in private_ucb.__doc__ for part in private_ucb.PARTS)
