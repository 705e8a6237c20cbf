"""Noise and coins against their laws, their lattice and their sources."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_ndtr, ndtr
from scipy.stats import chisquare, kstest
from torch import Tensor

from botorch_fed.privacy.hazmat import noise as noise_module
from botorch_fed.privacy.hazmat.noise import (
    InsecureSeededNoise,
    NoiseSource,
    OSNoise,
    Path,
    coins,
    lattice_gaussian,
    lattice_step,
    normal,
    subset,
)
from botorch_fed.rng import generator

SEEDED = InsecureSeededNoise(3)
SOURCES: list[NoiseSource] = [OSNoise(), SEEDED]
sources = pytest.mark.parametrize("source", SOURCES, ids=repr)


class Constant:
    """Every uniform number is the same."""

    private = False

    def __init__(self, value: float) -> None:
        self.value = value

    def uniform(self, *shape: int, path: Path) -> Tensor:
        return torch.full(shape, self.value, dtype=torch.float64)


NO_NOISE = Constant(0.5)


@sources
def test_uniforms_are_uniform_and_normals_normal(source: NoiseSource) -> None:
    n = 100_000  # false-alarm rate 1e-7 each
    u, z = source.uniform(n, path=("u",)), normal(source, n, path=("z",))
    assert u.dtype == z.dtype == torch.float64
    assert bool(((u > 0) & (u < 1)).all())
    assert kstest(u.numpy(), "uniform").pvalue > 1e-7
    assert kstest(z.numpy(), "norm").pvalue > 1e-7


@sources
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_shapes(source: NoiseSource, shape: tuple[int, ...]) -> None:
    assert source.uniform(*shape, path=(1, "a")).shape == shape
    assert normal(source, *shape, path=(1, "a")).shape == shape
    x = torch.zeros(shape, dtype=torch.float64)
    assert lattice_gaussian(x, 1.0, noise=source, path=(1, "a")).shape == shape


def test_system_noise_is_private_fresh_and_follows_no_seed() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        draws.append(OSNoise().uniform(4, path=(1, "same")))
    assert not torch.equal(*draws)
    assert OSNoise().private
    assert repr(OSNoise()) == "OSNoise()"


def test_system_noise_reads_53_bits_of_little_endian_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [0, 5 << 11, (2**53 - 1) << 11 | 2047]
    data = b"".join(word.to_bytes(8, "little") for word in words)
    monkeypatch.setattr(os, "urandom", lambda n: data[:n])
    assert OSNoise().uniform(3, path=()).tolist() == [2.0**-54, 5.5 * 2.0**-53, 1 - 2.0**-53]


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_both_tails_are_finite(byte: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda n: byte * n)
    assert 8 < float(normal(OSNoise(), 1, path=()).abs()) < 12


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("cells", [0, 1, 2, 7, 1000])
def test_no_lattice_point_of_the_tails_is_left_out(sign: int, cells: int) -> None:
    # Of one number near the end of the unit interval come many neighbouring normals.
    first = 2.0**-54 + cells * 2.0**-53 if sign < 0 else 1 - 2.0**-53 - cells * 2.0**-53
    z = sign * normal(_Ladder(first), 4096, path=()).numpy()
    assert (np.diff(z) < 0).all()
    assert np.isfinite(z).all()
    mass = ndtr(-z) * 2.0**53  # of the tail beyond, in cells
    assert cells - 1 <= mass[0] < mass[-1] <= cells + 2


class _Ladder:
    """The same number over and over, and numbers in order where it is to be continued."""

    private = False

    def __init__(self, value: float) -> None:
        self.value = value

    def uniform(self, *shape: int, path: Path) -> Tensor:
        if path == ("tail",):
            return (torch.arange(*shape, dtype=torch.float64) + 0.5) / shape[0]
        return torch.full(shape, self.value, dtype=torch.float64)


@sources
def test_tails_have_their_mass(source: NoiseSource) -> None:
    u = torch.cat([2.0**-21 * source.uniform(50_000, path=(k,)) for k in range(2)])
    u = (torch.floor(u * 2.0**53) + 0.5) * 2.0**-53
    z = normal(_Given(torch.cat([u, 1 - u])), 200_000, path=("z",)).numpy()
    assert kstest(2.0**21 * ndtr(z[:100_000]), "uniform").pvalue > 1e-7
    assert kstest(2.0**21 * ndtr(-z[100_000:]), "uniform").pvalue > 1e-7


class _Given:
    """Given numbers, continued by secret ones."""

    private = False

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def uniform(self, *shape: int, path: Path) -> Tensor:
        return OSNoise().uniform(*shape, path=path) if "tail" in path else self.values


def test_seeded_noise_replays_by_seed_and_path_and_says_so() -> None:
    u = SEEDED.uniform(5, path=(2, "noise"))
    assert torch.equal(u, InsecureSeededNoise(3).uniform(5, path=(2, "noise")))
    assert torch.equal(u, generator(3, "privacy noise", 2, "noise").uniform(5))
    others = [(InsecureSeededNoise(4), (2, "noise")), (SEEDED, (3, "noise")), (SEEDED, (2, "n"))]
    for source, path in others:
        assert not torch.equal(u, source.uniform(5, path=path))
    assert not torch.equal(u, generator(3, 2, "noise").uniform(5))  # not the run's own stream
    assert not SEEDED.private
    assert repr(SEEDED) == "InsecureSeededNoise(seed=3)"


# ------------------------------------------------------------------ the lattice


@given(st.floats(1e-200, 1e200))
def test_step_is_a_power_of_two_below_a_millionth_of_the_noise(std: float) -> None:
    step = lattice_step(std)
    assert math.frexp(step)[0] == 0.5
    assert 2.0**-21 < step / std <= 2.0**-20
    assert step == 2.0 ** (math.floor(math.log2(std)) - 20) or math.log2(std) % 1 < 1e-9


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan, math.inf, 1e-201])
def test_step_needs_a_sensible_deviation(std: float) -> None:
    with pytest.raises(InputDataError, match="standard deviation"):
        lattice_step(std)


@sources
@pytest.mark.parametrize("std", [1e-6, 0.3, 1.0, 77.0])
def test_values_lie_on_the_lattice_and_have_the_stated_deviation(
    source: NoiseSource, std: float
) -> None:
    n, center = 40_000, 3.3 * std
    x = torch.full((n,), center, dtype=torch.float64)
    values = lattice_gaussian(x, std, noise=source, path=("a",))
    cells = values / lattice_step(std)
    assert torch.equal(cells, cells.round())
    # five standard errors each: false alarms 1e-6
    assert float(values.mean()) == pytest.approx(center, abs=5 * std / math.sqrt(n))
    assert float(values.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * n))


def test_without_noise_the_value_is_rounded_to_the_nearest_cell() -> None:
    x = generator(0).normal(100)
    values = lattice_gaussian(x, 1.0, noise=NO_NOISE, path=())
    assert float((values - x).abs().max()) <= lattice_step(1.0) / 2
    assert torch.equal(values, lattice_gaussian(values, 1.0, noise=NO_NOISE, path=()))


@pytest.mark.parametrize("x", [-0.0, -1e-30, 0.0, 1e-30])
def test_a_zero_has_no_sign(x: float) -> None:
    source = Constant(0.5 - 2.0**-23)  # a small negative normal, which rounds to -0.0
    value = lattice_gaussian(torch.tensor(x, dtype=torch.float64), 1.0, noise=source, path=())
    assert float(value) == 0
    assert not bool(value.signbit())


def test_moving_the_value_by_whole_cells_moves_the_release_and_nothing_else() -> None:
    x, shift = generator(0).normal(200), 12_345 * lattice_step(0.7)
    x = (x / lattice_step(0.7)).round() * lattice_step(0.7)
    first = lattice_gaussian(x, 0.7, noise=SEEDED, path=("p",))
    assert torch.equal(lattice_gaussian(x + shift, 0.7, noise=SEEDED, path=("p",)), first + shift)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**33])
def test_refuses_what_the_lattice_cannot_hold(value: float) -> None:
    x = torch.tensor([0.0, value], dtype=torch.float64)
    with pytest.raises(InputDataError, match="finite and at most") as caught:
        lattice_gaussian(x, 1.0, noise=SEEDED, path=())
    assert str(value) not in str(caught.value).replace("2^52", "")


def test_float32_is_promoted_before_noise_is_added() -> None:
    x = torch.tensor([0.1, 0.2], dtype=torch.float32)
    values = lattice_gaussian(x, 1.0, noise=SEEDED, path=())
    assert torch.equal(values, lattice_gaussian(x.double(), 1.0, noise=SEEDED, path=()))


def _cell_probabilities(sigma: float, reach: int) -> np.ndarray:
    edges = np.arange(-reach, reach + 2) - 0.5
    return np.diff(ndtr(edges / sigma))


@pytest.mark.parametrize("sigma", [1.0, 1.3, 1.9])
def test_delta_on_a_coarse_lattice_is_at_most_the_continuous_one(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_module, "_STEP_EXPONENT", 0)  # steps as large as the deviation
    assert lattice_step(sigma) == 1
    p = _cell_probabilities(sigma, 30)
    n = 200_000
    draws = lattice_gaussian(torch.zeros(n), sigma, noise=SEEDED, path=("c",)).long()
    seen = np.bincount(draws.clamp(-5, 5).numpy() + 5, minlength=11)
    middle = p[30 - 5 : 30 + 6].copy()
    middle[0], middle[-1] = p[: 30 - 4].sum(), p[30 + 5 :].sum()
    assert chisquare(seen, n * middle / middle.sum()).pvalue > 1e-6
    for shift in (1, 2, 3):
        mu = shift / sigma
        for epsilon in (0.1, 0.5, 1.0, 3.0):
            delta = np.maximum(p[shift:] - math.exp(epsilon) * p[:-shift], 0).sum()
            tail = math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))
            assert delta <= float(ndtr(mu / 2 - epsilon / mu)) - tail + 1e-12


# ------------------------------------------------------------------ coins and subsets


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.1, 0.25, 0.35, 1 / 3, 0.999, 1.0])
def test_coins_have_their_rate(rate: float) -> None:
    n = 2_000_000
    heads = coins(n, rate, noise=SEEDED, path=("c",))
    assert heads.dtype == torch.bool
    # Without its undecided cases the rate 0.35 would be off by seven standard errors.
    slack = 5 * math.sqrt(rate * (1 - rate) / n)
    assert float(heads.double().mean()) == pytest.approx(rate, abs=slack)


def test_coins_that_share_a_number_are_independent() -> None:
    n = 60_000
    heads = coins(6 * n, 0.35, noise=SEEDED, path=("d",)).double().reshape(n, 6)
    off_diagonal = torch.corrcoef(heads.T) - torch.eye(6)
    assert float(off_diagonal.abs().max()) < 5 / math.sqrt(n)
    means = heads.mean(dim=0)
    assert float((means - 0.35).abs().max()) < 5 * math.sqrt(0.35 * 0.65 / n)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 100])
def test_coins_come_in_any_number(count: int) -> None:
    assert coins(count, 0.5, noise=SEEDED, path=()).shape == (count,)


def test_extreme_uniforms_decide_coins_as_they_should() -> None:
    low, high = Constant(2.0**-54), Constant(1 - 2.0**-53)
    assert bool(coins(9, 1e-3, noise=low, path=()).all())
    assert not bool(coins(9, 0.999, noise=high, path=()).any())
    assert bool(coins(9, 1.0, noise=high, path=()).all())
    assert not bool(coins(9, 0.0, noise=low, path=()).any())


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_coins_need_a_probability(rate: float) -> None:
    with pytest.raises(InputDataError, match="probability"):
        coins(3, rate, noise=SEEDED, path=())


@pytest.mark.parametrize("size", [0, 1, 3, 8])
def test_subsets_have_exactly_their_size_and_favour_nobody(size: int) -> None:
    runs = 2000
    chosen = torch.stack([subset(8, size, noise=SEEDED, path=(size, k)) for k in range(runs)])
    assert chosen.dtype == torch.bool
    assert bool((chosen.sum(dim=1) == size).all())
    share = size / 8
    slack = 5 * math.sqrt(share * (1 - share) / runs) + 1e-12
    assert float((chosen.double().mean(dim=0) - share).abs().max()) <= slack


@pytest.mark.parametrize("size", [-1, 9])
def test_subsets_fit(size: int) -> None:
    with pytest.raises(InputDataError, match="between 0 and 8"):
        subset(8, size, noise=SEEDED, path=())
