"""Summaries against dense formulas: Bayesian linear regression, PITC, evidence, sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.exceptions.warnings import InputDataWarning
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from botorch_fed.errors import BasisMismatch, NumericalError
from botorch_fed.models import (
    FeatureMap,
    InducingFeatures,
    LocalBlock,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    Summary,
    WeightPosterior,
    log_evidence,
    sample_weights_dual,
    summarize,
)
from botorch_fed.models.summary import CHUNK, profiled_evidence
from botorch_fed.rng import generator
from test.cases import UNIT, inducing, normal, random_fourier, se, uniform

NOISE = 0.01


def _data(n: int, seed: int = 0, d: int = 2) -> tuple[Tensor, Tensor]:
    X = uniform(n, d, seed=seed)
    return X, (6 * X).sin().sum(dim=-1, keepdim=True) + 0.1 * normal(n, 1, seed=seed)


def _predict(phi: FeatureMap, total: Summary, X: Tensor) -> tuple[Tensor, Tensor]:
    location, root = WeightPosterior.from_total(total).predict(phi(X))
    return location.squeeze(-1), root @ root.mT + phi.residual(X)


def _assert_same(first: Summary, second: Summary, tol: float = 1e-10) -> None:
    torch.testing.assert_close(first.gram, second.gram, rtol=tol, atol=tol)
    torch.testing.assert_close(first.moment, second.moment, rtol=tol, atol=tol)
    assert first.basis == second.basis
    assert first.num_data == second.num_data
    if first.square is not None:
        torch.testing.assert_close(first.square, second.square, rtol=tol, atol=tol)
        torch.testing.assert_close(first.log_det, second.log_det, rtol=tol, atol=tol)


# ------------------------------------------------------------------ Bayesian linear regression


@pytest.mark.parametrize("n", [5, 40, 200])
@pytest.mark.parametrize("noise_var", [1e-2, 1.0])
def test_weight_space_equals_kernel_space(n: int, noise_var: float) -> None:
    phi, (X, Y), test_X = random_fourier(), _data(n), uniform(30, 2, seed=9)
    mean, covariance = _predict(phi, summarize(phi, X, Y, noise_var=noise_var), test_X)
    K = phi(X) @ phi(X).mT + noise_var * torch.eye(n).double()
    k = phi(test_X) @ phi(X).mT
    torch.testing.assert_close(mean, (k @ torch.linalg.solve(K, Y)).squeeze(-1), rtol=0, atol=1e-10)
    expected = phi(test_X) @ phi(test_X).mT - k @ torch.linalg.solve(K, k.mT)
    torch.testing.assert_close(covariance, expected, rtol=0, atol=1e-10)


def test_small_noise_keeps_its_digits() -> None:
    # noise 1e-6, 100 features, 50 points: condition 1e7. The reference is in long double digits
    # by solving in kernel space, where the matrix is smaller.
    phi = RandomFourierFeatures.draw(se(0.03), 100, generator=generator(0))
    X, y = uniform(50, 1), normal(50, 1)
    total = summarize(phi, X, y, noise_var=1e-6)
    nu = WeightPosterior.from_total(total).mean
    residual = total.gram @ nu + nu - total.moment.squeeze(-1)
    assert float(residual.norm() / total.moment.norm()) < 1e-12


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_moments_of_draws(form: str, scale: float) -> None:
    phi = RandomFourierFeatures.draw(se(0.3, 0.4), 12, generator=generator(0))
    X, Y = _data(8)
    posterior = WeightPosterior.from_total(summarize(phi, X, Y, noise_var=NOISE, mean=0.3))
    count, stream = 20_000, generator(0, form)
    if form == "primal":
        draws = posterior.sample(torch.Size([count]), scale=scale, generator=stream)
    else:
        draws = sample_weights_dual(
            phi,
            X,
            Y,
            noise_var=NOISE,
            mean=0.3,
            sample_shape=torch.Size([count]),
            scale=scale,
            generator=stream,
        )
    B = posterior.chol @ posterior.chol.mT
    covariance = scale**2 * torch.linalg.inv(B)
    errors = (draws.mean(dim=0) - posterior.mean) / (covariance.diagonal() / count).sqrt()
    assert float(errors.abs().max()) < 5
    centred = draws - posterior.mean
    variance = covariance.diagonal()
    spread = (variance[:, None] * variance[None] + covariance.square()).sqrt()
    errors = (centred.mT @ centred / count - covariance) / (spread / math.sqrt(count))
    assert float(errors.abs().max()) < 5  # 144 entries, false alarm 1e-4 with these fixed seeds


@pytest.mark.parametrize("make", [random_fourier, inducing])
def test_dual_draw_without_randomness_is_the_mean(make) -> None:  # type: ignore[no-untyped-def]
    phi, (X, Y) = make(), _data(15)
    mean = WeightPosterior.from_total(summarize(phi, X, Y, noise_var=NOISE)).mean
    dual = sample_weights_dual(phi, X, Y, noise_var=NOISE, scale=0.0)
    torch.testing.assert_close(dual, mean, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("k", [1, 7, 40])
def test_update_equals_recompute(k: int) -> None:
    # 40 of 60 columns are more than half: the update then refactorises.
    phi, (X, Y), (X2, Y2) = random_fourier(), _data(20), _data(k, seed=1)
    posterior = WeightPosterior.from_total(summarize(phi, X, Y, noise_var=NOISE))
    std = math.sqrt(NOISE)
    updated = posterior.updated(phi(X2) / std, Y2 / std)
    updated = updated.updated(phi(X) / std, Y / std)  # twice in a row
    both = summarize(phi, X, Y, noise_var=NOISE / 2) + summarize(phi, X2, Y2, noise_var=NOISE)
    expected = WeightPosterior.from_total(both)
    torch.testing.assert_close(updated.mean, expected.mean, rtol=1e-8, atol=1e-9)
    for actual, wanted in zip(updated.predict(phi(X)), expected.predict(phi(X)), strict=True):
        torch.testing.assert_close(actual @ actual.mT, wanted @ wanted.mT, rtol=1e-8, atol=1e-9)
    count = 20_000
    draws = updated.sample(torch.Size([count]), generator=generator(0, k))
    values = (draws - updated.mean) @ phi(X[:4]).mT
    root = expected.predict(phi(X[:4]))[1]
    covariance = root @ root.mT
    spread = (covariance.diagonal()[:, None] * covariance.diagonal() + covariance.square()).sqrt()
    error = (values.mT @ values / count - covariance) / spread * math.sqrt(count)
    assert float(error.abs().max()) < 5


# ------------------------------------------------------------------ PITC


def _dense_pitc(
    phi: InducingFeatures, parts: list[tuple[Tensor, Tensor]], test_X: Tensor, noise_var: float
) -> tuple[Tensor, Tensor]:
    """Centralised PITC, no whitening: Q by K_SS^-1, one dense solve over all data."""
    Z = phi.inducing_points
    jitter = phi.jitter * float(phi.outputscale)
    K_ZZ = phi.covariance(Z) + jitter * torch.eye(len(Z)).double()

    def Q(A: Tensor, B: Tensor) -> Tensor:  # noqa: N802
        return phi.covariance(A, Z) @ torch.linalg.solve(K_ZZ, phi.covariance(Z, B))

    X = torch.cat([part[0] for part in parts])
    Y = torch.cat([part[1] for part in parts])
    blocks = [
        phi.covariance(x) - Q(x, x) + noise_var * torch.eye(len(x)).double() for x, _ in parts
    ]
    full = Q(X, X) + torch.block_diag(*blocks)
    cross = Q(test_X, X)
    mean = cross @ torch.linalg.solve(full, Y)
    covariance = phi.covariance(test_X) - cross @ torch.linalg.solve(full, cross.mT)
    return mean.squeeze(-1), covariance


PITC_CASES = [
    (4, 6, 8, 2, 0.5, 1e-2),
    (10, 4, 8, 2, 0.3, 1e-2),
    (6, 10, 12, 3, 0.7, 1e-4),
    (4, 5, 8, 10, 1.5, 1e-2),
    (1, 20, 8, 2, 0.5, 1e-2),
]


@pytest.mark.parametrize(("agents", "n", "size", "d", "ell", "noise_var"), PITC_CASES)
def test_sum_of_summaries_is_centralised_pitc(
    agents: int, n: int, size: int, d: int, ell: float, noise_var: float
) -> None:
    phi = InducingFeatures(se(*[ell] * d), uniform(size, d, seed=3))
    parts = [_data(n, seed=10 + i, d=d) for i in range(agents)]
    summaries = [summarize(phi, *part, noise_var=noise_var) for part in parts]
    test_X = uniform(15, d, seed=4)
    mean, covariance = _predict(phi, sum(summaries[1:], start=summaries[0]), test_X)
    condition = float(torch.linalg.cond(phi.covariance(phi.inducing_points)))
    tol = 1e-10 if condition <= 1e6 else 1e-8
    assert condition <= 1e8
    expected_mean, expected_covariance = _dense_pitc(phi, parts, test_X, noise_var)
    torch.testing.assert_close(mean, expected_mean, rtol=0, atol=tol)
    torch.testing.assert_close(covariance, expected_covariance, rtol=0, atol=tol)

    # The order of agents is irrelevant.
    shuffled = sum(summaries[::-1][1:], start=summaries[-1])
    for actual, wanted in zip(_predict(phi, shuffled, test_X), (mean, covariance), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-10)

    # 0 <= variance <= prior.
    variance = covariance.diagonal()
    assert bool((variance >= -1e-10).all())
    assert bool((variance <= phi.outputscale + 1e-10).all())


def test_support_on_all_inputs_is_the_exact_gp() -> None:
    parts = [_data(6, seed=i) for i in range(3)]
    X, Y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    kernel, test_X = se(0.3, 0.4), uniform(20, 2, seed=7)
    phi = InducingFeatures(kernel, X)
    total = sum((summarize(phi, *p, noise_var=NOISE) for p in parts), start=Summary.zero(phi))
    mean, covariance = _predict(phi, total, test_X)
    K, k = kernel(X) + NOISE * torch.eye(18).double(), kernel(test_X, X)
    torch.testing.assert_close(mean, (k @ torch.linalg.solve(K, Y)).squeeze(-1), rtol=0, atol=1e-6)
    expected = kernel(test_X) - k @ torch.linalg.solve(K, k.mT)
    torch.testing.assert_close(covariance, expected, rtol=0, atol=1e-6)


def test_iid_noise_is_dtc() -> None:
    phi, (X, Y) = inducing(), _data(9)
    dtc = summarize(phi, X, Y, noise_var=NOISE, noise="iid")
    torch.testing.assert_close(dtc.gram, phi(X).mT @ phi(X) / NOISE)
    pitc = summarize(phi, X, Y, noise_var=NOISE)
    assert float((dtc.gram - pitc.gram).abs().max()) > 1
    fourier = random_fourier()
    _assert_same(
        summarize(fourier, X, Y, noise_var=NOISE, noise="iid"),
        summarize(fourier, X, Y, noise_var=NOISE),
    )


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("make", [inducing, random_fourier])
def test_extending_a_block_equals_recomputing_it(make, step: int) -> None:  # type: ignore[no-untyped-def]
    phi, (X, Y) = make(), _data(12)
    block = LocalBlock.from_data(phi, X[:0], Y[:0], noise_var=NOISE, mean=0.2)
    for start in range(0, 12, step):
        rows = slice(start, start + step)
        block = block.extend(X[rows], Y[rows], noise_var=NOISE, mean=0.2)
    whole = LocalBlock.from_data(phi, X, Y, noise_var=NOISE, mean=0.2)
    _assert_same(block.summary, whole.summary, tol=1e-9)
    torch.testing.assert_close(block.chol, whole.chol, rtol=1e-9, atol=1e-10)
    _assert_same(block.summary, summarize(phi, X, Y, noise_var=NOISE, mean=0.2), tol=1e-9)


# ------------------------------------------------------------------ algebra


@pytest.mark.parametrize("make", [random_fourier, inducing])
def test_one_agent_with_all_iid_data_is_many_agents(make) -> None:  # type: ignore[no-untyped-def]
    phi, (X, Y) = make(), _data(30)
    whole = summarize(phi, X, Y, noise_var=NOISE, noise="iid")
    parts = [summarize(phi, X[i::3], Y[i::3], noise_var=NOISE, noise="iid") for i in range(3)]
    _assert_same(parts[0] + parts[1] + parts[2], whole, tol=1e-9)
    _assert_same(sum(parts), whole, tol=1e-9)
    _assert_same(Summary.zero(phi) + whole, whole)


def test_large_data_are_summed_in_chunks() -> None:
    phi = RandomFourierFeatures.draw(se(0.5, 0.5), 8, generator=generator(0))
    X, Y = _data(CHUNK + 100)
    Phi = phi(X)
    whole = summarize(phi, X, Y, noise_var=NOISE)
    torch.testing.assert_close(whole.gram, Phi.mT @ Phi / NOISE, rtol=1e-10, atol=1e-6)
    torch.testing.assert_close(whole.moment, Phi.mT @ Y / NOISE, rtol=1e-10, atol=1e-6)


def test_known_noise_per_observation() -> None:
    phi, (X, Y) = random_fourier(), _data(10)
    variance = 0.01 + uniform(10, 1)
    Phi = phi(X)
    summary = summarize(phi, X, Y, noise_var=variance)
    torch.testing.assert_close(summary.gram, Phi.mT @ (Phi / variance))
    torch.testing.assert_close(summary.moment, Phi.mT @ (Y / variance))
    block = LocalBlock.from_data(phi, X, Y, noise_var=variance).summary
    _assert_same(summary, block, tol=1e-9)


def test_batches_are_loops() -> None:
    for phi in [random_fourier(), inducing()]:
        X, Y = uniform(2, 3, 7, 2), normal(2, 3, 7, 1)
        batch = summarize(phi, X, Y, noise_var=NOISE)
        for i in range(2):
            for j in range(3):
                one = summarize(phi, X[i, j], Y[i, j], noise_var=NOISE)
                torch.testing.assert_close(batch.gram[i, j], one.gram)
                torch.testing.assert_close(batch.moment[i, j], one.moment)
                torch.testing.assert_close(batch.square[i, j], one.square)
        posterior = WeightPosterior.from_total(batch)
        assert posterior.sample(torch.Size([4])).shape == (4, 2, 3, phi.num_features)


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_packing_keeps_norm_and_round_trips(M: int, seed: int) -> None:
    A = generator(seed, "A").normal(2, M, M)
    summary = Summary(A @ A.mT, generator(seed, "b").normal(2, M, 1), "basis", 3)
    vector = summary.pack()
    assert vector.shape == (2, M * (M + 3) // 2)
    norm = (summary.gram.square().sum((-2, -1)) + summary.moment.square().sum((-2, -1))).sqrt()
    torch.testing.assert_close(vector.norm(dim=-1), norm)
    back = Summary.unpack(vector, basis="basis")
    torch.testing.assert_close(back.gram, summary.gram, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(back.moment, summary.moment, rtol=0, atol=0)
    assert back.num_data is back.square is back.log_det is None


@given(st.permutations(range(4)), st.integers(0, 2**31))
def test_addition_commutes_and_associates(order: list[int], seed: int) -> None:
    phi = QuadratureFourierFeatures.from_kernel(se(0.5), UNIT[:, :1], degree=5)
    stream = generator(seed)
    parts = [
        summarize(phi, stream.uniform(3, 1), stream.normal(3, 1), noise_var=NOISE) for _ in range(4)
    ]
    left = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    shuffled = [parts[i] for i in order]
    right = shuffled[0] + (shuffled[1] + (shuffled[2] + shuffled[3]))
    _assert_same(left, right, tol=1e-9)


def test_addition_refuses_another_basis() -> None:
    X, Y = _data(4)
    first, second = random_fourier(), inducing()
    with pytest.raises(BasisMismatch, match=r"different bases.*feature_map_from_tensors"):
        summarize(first, X, Y, noise_var=NOISE) + summarize(second, X, Y, noise_var=NOISE)


# ------------------------------------------------------------------ evidence


def _dense_evidence(covariance: Tensor, y: Tensor) -> Tensor:
    normal_law = torch.distributions.MultivariateNormal(torch.zeros(len(y)).double(), covariance)
    return normal_law.log_prob(y.squeeze(-1))


@pytest.mark.parametrize("make", [random_fourier, inducing])
def test_evidence_of_one_agent(make) -> None:  # type: ignore[no-untyped-def]
    phi, (X, Y) = make(), _data(25)
    R = NOISE * torch.eye(25).double() + phi.residual(X)
    expected = _dense_evidence(phi(X) @ phi(X).mT + R, Y - 0.3)
    total = summarize(phi, X, Y, noise_var=NOISE, mean=0.3)
    torch.testing.assert_close(log_evidence(total), expected, rtol=1e-10, atol=1e-10)


def test_evidence_of_pitc_is_a_sum_over_agents() -> None:
    phi = inducing()
    parts = [_data(5, seed=i) for i in range(4)]
    X, Y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    blocks = [phi.residual(x) + NOISE * torch.eye(5).double() for x, _ in parts]
    expected = _dense_evidence(phi(X) @ phi(X).mT + torch.block_diag(*blocks), Y)
    summaries = [summarize(phi, *p, noise_var=NOISE) for p in parts]
    torch.testing.assert_close(log_evidence(sum(summaries)), expected, rtol=1e-10, atol=1e-10)
    # Chain rule: p(all) = p(first two) p(last two | first two).
    received = summaries[0] + summaries[1]
    rest = summaries[2] + summaries[3]
    silent = Summary(
        received.gram, received.moment, received.basis, 0, Y.new_zeros(()), Y.new_zeros(())
    )
    chained = log_evidence(received) + log_evidence(rest + silent, given=received)
    torch.testing.assert_close(chained, expected, rtol=1e-10, atol=1e-10)


def test_scaling_changes_the_noise_exactly() -> None:
    phi, (X, Y) = random_fourier(), _data(12)
    _assert_same(
        summarize(phi, X, Y, noise_var=0.01).scaled(0.01 / 0.5),
        summarize(phi, X, Y, noise_var=0.5),
        tol=1e-9,
    )
    for bad in [0.0, -1.0, math.nan]:
        with pytest.raises(InputDataError, match="factor must be positive"):
            Summary.zero(phi).scaled(bad)


def test_packed_summaries_have_no_evidence() -> None:
    phi, (X, Y) = random_fourier(), _data(4)
    total = Summary.unpack(summarize(phi, X, Y, noise_var=NOISE).pack(), basis=phi.fingerprint)
    with pytest.raises(InputDataError, match="a packed summary does not have"):
        log_evidence(total)


def test_profiled_evidence_is_the_largest_over_all_scales() -> None:
    phi = inducing()
    parts = [_data(n, seed=n) for n in (7, 9)]
    Y = torch.cat([part[1] for part in parts])
    X = torch.cat([part[0] for part in parts])
    blocks = [phi.residual(x) + NOISE * torch.eye(len(x)).double() for x, _ in parts]
    dense = phi(X) @ phi(X).mT + torch.block_diag(*blocks)
    log_p, scale = profiled_evidence(sum(summarize(phi, *p, noise_var=NOISE) for p in parts))
    torch.testing.assert_close(log_p, _dense_evidence(scale * dense, Y), rtol=1e-10, atol=1e-10)
    grid = torch.logspace(-4, 4, 4001, dtype=torch.float64)  # steps of 0.46 %
    values = torch.stack([_dense_evidence(s * dense, Y) for s in grid])
    assert float(scale / grid[values.argmax()]) == pytest.approx(1, abs=0.0024)
    assert float(values.max()) <= float(log_p)
    assert float(values.max()) == pytest.approx(float(log_p), abs=16 / 4 * 0.0024**2)


def test_profiled_evidence_of_batches_is_a_loop_and_knows_no_unit() -> None:
    phi, X = random_fourier(), uniform(3, 12, 2)
    Y = 5 * normal(3, 12, 1)
    log_p, scale = profiled_evidence(summarize(phi, X, Y, noise_var=NOISE))
    assert log_p.shape == scale.shape == (3,)
    for i in range(3):
        one, own_scale = profiled_evidence(summarize(phi, X[i], Y[i], noise_var=NOISE))
        torch.testing.assert_close((log_p[i], scale[i]), (one, own_scale))
    moved, larger = profiled_evidence(summarize(phi, X, 1000 * Y, noise_var=NOISE))
    torch.testing.assert_close(larger, 1e6 * scale, rtol=1e-9, atol=0)
    torch.testing.assert_close(moved, log_p - 12 * math.log(1000), rtol=1e-9, atol=0)


def test_profiled_evidence_where_nothing_is_left_to_explain() -> None:
    phi, (X, Y) = random_fourier(), _data(6)
    constant = summarize(phi, X, torch.zeros_like(Y), noise_var=NOISE)
    honest = summarize(phi, X, Y, noise_var=NOISE)
    contradictory = replace(honest, moment=10 * honest.moment)  # as noise may make it
    for total in [constant, contradictory]:
        log_p, scale = profiled_evidence(total)
        assert float(log_p) == -math.inf
        assert float(scale) > 0
    with pytest.raises(InputDataError, match="Expected a total with observations"):
        profiled_evidence(Summary.zero(phi))
    with pytest.raises(InputDataError, match="a packed summary does not have"):
        profiled_evidence(Summary.unpack(honest.pack(), basis=phi.fingerprint))


# ------------------------------------------------------------------ bad input


def test_no_data_is_the_prior() -> None:
    for phi in [random_fourier(), inducing()]:
        X, Y = _data(0)
        summary = summarize(phi, X, Y, noise_var=NOISE)
        assert summary.num_data == 0
        assert not bool(summary.gram.any())
        assert not bool(summary.moment.any())
        assert float(log_evidence(summary)) == 0.0
        mean, covariance = _predict(phi, summary, uniform(3, 2))
        assert not bool(mean.any())
        torch.testing.assert_close(
            covariance, phi(uniform(3, 2)) @ phi(uniform(3, 2)).mT + phi.residual(uniform(3, 2))
        )


def test_dual_draw_without_data_is_the_prior() -> None:
    phi = random_fourier()
    draws = sample_weights_dual(
        phi, *_data(0), noise_var=NOISE, sample_shape=torch.Size([3]), generator=generator(1)
    )
    assert torch.equal(draws, generator(1).normal(3, phi.num_features))


def test_duplicated_points_add_up() -> None:
    for phi in [random_fourier(), inducing()]:
        X, Y = _data(1)
        twice = summarize(phi, X.expand(2, 2), Y.expand(2, 1), noise_var=NOISE)
        mean, covariance = _predict(phi, twice, X)
        assert bool(mean.isfinite().all())
        assert bool(covariance.isfinite().all())
    fourier = random_fourier()
    _assert_same(
        summarize(fourier, X.expand(2, 2), Y.expand(2, 1), noise_var=NOISE),
        summarize(fourier, X, Y, noise_var=NOISE) + summarize(fourier, X, Y, noise_var=NOISE),
    )


@pytest.mark.parametrize("make", [random_fourier, inducing])
def test_bad_data(make) -> None:  # type: ignore[no-untyped-def]
    phi, (X, Y) = make(), _data(4)
    for bad, name in [(torch.nan, "1 NaN and 0 infinite"), (torch.inf, "0 NaN and 1 infinite")]:
        damaged_X, damaged_Y = X.clone(), Y.clone()
        damaged_X[0, 0] = damaged_Y[0, 0] = bad
        with pytest.raises(InputDataError, match=rf"X \(shape \(4, 2\)\) has {name}"):
            summarize(phi, damaged_X, Y, noise_var=NOISE)
        with pytest.raises(InputDataError, match=rf"Y \(shape \(4, 1\)\) has {name}"):
            summarize(phi, X, damaged_Y, noise_var=NOISE)
    for noise_var in [0.0, -1.0, math.nan, math.inf]:
        with pytest.raises(InputDataError, match="noise_var must be positive and finite"):
            summarize(phi, X, Y, noise_var=noise_var)
    with pytest.raises(BotorchTensorDimensionError, match="noise_var must be a number or"):
        summarize(phi, X, Y, noise_var=torch.ones(3, 1).double())
    with pytest.raises(BotorchTensorDimensionError, match=r"batch_shape x n x 2"):
        summarize(phi, X[:, :1], Y, noise_var=NOISE)
    for wrong in [Y.squeeze(-1), Y[:3], Y.expand(4, 2)]:
        with pytest.raises(BotorchTensorDimensionError, match=r"Y must be `batch_shape x 4 x 1`"):
            summarize(phi, X, wrong, noise_var=NOISE)
    with pytest.raises(InputDataError, match='"block" or "iid"'):
        summarize(phi, X, Y, noise_var=NOISE, noise="dtc")
    with pytest.warns(InputDataWarning, match="X is torch.float32 and was promoted"):
        summarize(phi, X.float(), Y, noise_var=NOISE)
    with pytest.raises(InputDataError, match=r"got torch.int64: call `.double\(\)`"):
        summarize(phi, X, Y.long(), noise_var=NOISE)


def test_points_outside_a_quadratures_domain() -> None:
    phi = QuadratureFourierFeatures.from_kernel(se(0.5), UNIT[:, :1], tol=1e-2)
    with pytest.raises(InputDataError, match="outside the bounds"):
        summarize(phi, torch.tensor([[1.5]]).double(), torch.zeros(1, 1).double(), noise_var=1.0)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 6, 10])
def test_unpack_refuses_wrong_sizes_and_values(size: int) -> None:
    with pytest.raises(BotorchTensorDimensionError, match=rf"got {size}\."):
        Summary.unpack(torch.zeros(size).double(), basis="b")
    with pytest.raises(InputDataError, match="has 1 NaN"):
        Summary.unpack(torch.tensor([0.0, torch.nan]).double(), basis="b")


def test_a_precision_that_is_not_positive_names_its_condition() -> None:
    gram = torch.diag(torch.tensor([1.0, -3.0])).double()
    with pytest.raises(NumericalError, match=r"I \+ gram.*2 x 2.*-2\.000e\+00 to 2\.000e\+00"):
        WeightPosterior.from_total(Summary(gram, torch.zeros(2, 1).double(), "b"))
    gram[0, 0] = torch.nan
    with pytest.raises(NumericalError, match="1 of its 4 entries are NaN"):
        WeightPosterior.from_total(Summary(gram, torch.zeros(2, 1).double(), "b"))
