"""Repaired totals have posteriors between certainty and the prior."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.errors import NumericalError
from botorch_fed.models import Summary, summarize
from botorch_fed.models.repair import (
    noise_floor,
    noise_norm_bound,
    noise_shift,
    repair_total,
)
from botorch_fed.models.summary import WeightPosterior
from botorch_fed.rng import generator
from test.cases import inducing, normal, uniform


def total() -> Summary:
    return summarize(inducing(), uniform(30, 2, seed=1), normal(30, 1), noise_var=0.05)


def noisy(seed: int, std: float) -> Summary:
    packed = total().pack()
    noised = packed + std * generator(seed, "noise").normal(*packed.shape)
    return Summary.unpack(noised, basis=total().basis)


def test_variances_lie_between_zero_and_the_prior() -> None:
    phi, unrepaired = inducing(), 0
    Phi = phi(uniform(20, 2, seed=7))
    prior = Phi.square().sum(dim=1)
    for seed in range(200):
        draw = noisy(seed, 100.0)
        _, root = WeightPosterior.from_total(repair_total(draw)).predict(Phi)
        variance = root.square().sum(dim=1)
        assert bool((variance >= 0).all())
        assert bool((variance <= prior * (1 + 1e-10)).all())
        eye = torch.eye(phi.num_features, dtype=torch.float64)
        without = ((Phi @ torch.linalg.inv(eye + draw.gram)) * Phi).sum(dim=1)
        unrepaired += bool(((without < 0) | (without > prior)).any())
    assert unrepaired > 100  # the draws need it


def test_a_healthy_total_stays_as_it_is() -> None:
    healthy = total()
    again = repair_total(healthy)
    torch.testing.assert_close(again.gram, healthy.gram, rtol=0, atol=1e-11 * 600)
    assert torch.equal(again.moment, healthy.moment)
    assert (again.num_data, again.square, again.log_det) == (None, None, None)
    twice = repair_total(repair_total(noisy(0, 30.0)))
    torch.testing.assert_close(twice.gram, repair_total(noisy(0, 30.0)).gram, rtol=0, atol=1e-9)


def test_floor_is_the_nearest_in_frobenius_norm() -> None:
    draw = noisy(3, 50.0)
    eigenvalues = torch.linalg.eigvalsh(draw.gram)
    moved = (repair_total(draw).gram - draw.gram).norm()
    torch.testing.assert_close(moved, eigenvalues.clamp(max=0).norm(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("std", [0.1, 3.0, 1e4])
def test_noise_of_the_moment_is_noise_of_the_observation(std: float) -> None:
    draw = noisy(5, 3.0)
    G, moment = repair_total(draw).gram, draw.moment
    eye = torch.eye(draw.num_features, dtype=torch.float64)
    # The dense posterior of w ~ N(0, I) given moment = G w + N(0, G) + N(0, std^2 I).
    gain = torch.linalg.solve(G @ G + G + std**2 * eye, G).mT
    posterior = WeightPosterior.from_total(repair_total(draw, moment_noise_std=std))
    torch.testing.assert_close(posterior.mean, (gain @ moment).squeeze(-1), rtol=1e-8, atol=1e-10)
    _, root = posterior.predict(eye)
    torch.testing.assert_close(root @ root.mT, eye - gain @ G, rtol=0, atol=1e-9)


def test_batches_are_repaired_one_by_one() -> None:
    draws = [noisy(seed, 40.0) for seed in (1, 2)]
    batch = Summary(
        torch.stack([d.gram for d in draws]),
        torch.stack([d.moment for d in draws]),
        draws[0].basis,
    )
    both = repair_total(batch, moment_noise_std=2.0)
    for i, draw in enumerate(draws):
        one = repair_total(draw, moment_noise_std=2.0)
        torch.testing.assert_close(both.gram[i], one.gram, rtol=0, atol=1e-10)
        torch.testing.assert_close(both.moment[i], one.moment, rtol=0, atol=1e-10)


def test_refuses_what_is_not_finite() -> None:
    broken = Summary(total().gram * math.nan, total().moment, total().basis)
    with pytest.raises(InputDataError, match="finite"):
        repair_total(broken)
    for std in (-1.0, math.nan, math.inf):
        with pytest.raises(InputDataError, match="at least 0"):
            repair_total(total(), moment_noise_std=std)


def svec_noise(m: int, std: float, seed: int) -> torch.Tensor:
    """Symmetric noise of Frobenius std: on svec, independent normals of this std."""
    z = generator(seed, "svec").normal(m, m) * std
    upper = z.triu(1) / math.sqrt(2)
    return upper + upper.mT + torch.diag(z.diagonal())


def test_a_floor_raises_what_lies_below_and_leaves_the_rest() -> None:
    draw = noisy(3, 50.0)
    eigenvalues, Q = torch.linalg.eigh(draw.gram)
    floor = float(eigenvalues[len(eigenvalues) // 2]) + 1.0
    repaired = repair_total(draw, floor=floor)
    expected = (Q * eigenvalues.clamp(min=floor)) @ Q.mT
    torch.testing.assert_close(repaired.gram, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(repaired.moment, draw.moment)
    below = repair_total(draw, floor=float(eigenvalues.min()) - 1.0 if eigenvalues.min() > 1 else 0)
    torch.testing.assert_close(repair_total(draw).gram, below.gram, rtol=0, atol=1e-9)


def test_a_shift_is_the_regret_proofs() -> None:
    draw = noisy(4, 5.0)
    m, s = draw.num_features, 5.0
    shift = noise_shift(s, m, horizon=1000)
    repaired = repair_total(draw, shift=shift)
    eye = torch.eye(m, dtype=torch.float64)
    torch.testing.assert_close(repaired.gram, (draw.gram + draw.gram.mT) / 2 + shift * eye)
    assert float(torch.linalg.eigvalsh(repaired.gram).min()) > 0


def test_noisy_sums_are_kernel_regression_on_noisy_features() -> None:
    """The other form of a private posterior: noise as further rows of features and outcomes."""
    phi, m, noise_var = inducing(), inducing().num_features, 0.05
    with torch.no_grad():
        Phi, new = phi(uniform(30, 2, seed=1)), phi(uniform(9, 2, seed=7))
    y, W = normal(30, 1), generator(5, "noise").normal(m, m)
    shift, H, h = 50.0, (W + W.mT) / math.sqrt(2), generator(6, "noise").normal(m, 1)
    sums = Summary((Phi.mT @ Phi + H) / noise_var, (Phi.mT @ y + h) / noise_var, phi.fingerprint)
    posterior = WeightPosterior.from_total(repair_total(sums, shift=shift / noise_var))
    mean, root = posterior.predict(new)

    rows = torch.linalg.cholesky(H + shift * torch.eye(m, dtype=torch.float64)).mT
    features = torch.cat([Phi, rows])
    outcomes = torch.cat([y, torch.linalg.solve_triangular(rows.mT, h, upper=False)])
    K = features @ features.mT + noise_var * torch.eye(len(features), dtype=torch.float64)
    k = new @ features.mT
    variance = new.square().sum(dim=1) - (k * torch.linalg.solve(K, k.mT).mT).sum(dim=1)
    torch.testing.assert_close(mean, k @ torch.linalg.solve(K, outcomes), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(root.square().sum(dim=1), variance, rtol=1e-7, atol=1e-9)


def test_the_noise_keeps_within_its_bound_and_the_bound_is_not_loose() -> None:
    m, s = 50, 2.0
    norms = torch.stack(
        [torch.linalg.matrix_norm(svec_noise(m, s, seed), ord=2) for seed in range(300)]
    )
    sigma = s / math.sqrt(2)
    bound = noise_norm_bound(s, m, horizon=1024)
    assert bound == pytest.approx(20.4 * sigma, rel=5e-3)  # the paper's is 68.1
    assert float(norms.mean()) == pytest.approx(13.8 * sigma, rel=1e-2)
    assert float(norms.max()) <= bound
    assert noise_floor(s, m, height=2.0) == pytest.approx(2 * sigma * math.sqrt(m), rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [{"floor": -1.0}, {"shift": math.inf}, {"shift": 1.0, "floor": 1.0}, {"moment_noise_std": -1}],
)
def test_impossible_repairs_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputDataError):
        repair_total(total(), **wrong)
    with pytest.raises(InputDataError, match="height"):
        noise_floor(1.0, 5, height=-1.0)
    with pytest.raises(InputDataError, match="failure"):
        noise_norm_bound(1.0, 5, horizon=0)


def test_a_total_beyond_all_numbers_is_refused() -> None:
    """Finite, but twice as much is not: somebody made it up."""
    made_up = replace(total(), gram=torch.full_like(total().gram, 1.5e308))
    with pytest.raises(NumericalError, match="eigenvalues of a noisy total"):
        repair_total(made_up)
