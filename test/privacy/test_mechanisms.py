"""The three mechanisms against the paper's noise and each other; clipping; signals."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from typing import Any, get_args

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi
from torch import Tensor

from botorch_fed import privacy
from botorch_fed.privacy import (
    CorrelatedGaussianSum,
    FixedSizeSampling,
    GaussianSum,
    InsecureSeededNoise,
    Ledger,
    PoissonSampling,
    Release,
    SignalWarning,
    WeightedGaussianSum,
    chi_clip_norm,
    clip,
)
from botorch_fed.rng import generator
from botorch_fed.wire.codec import decode, encode

quiet = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.mechanisms.SignalWarning")
SEEDED = InsecureSeededNoise(1)


def softmax_weights(num_agents: int, num_regions: int, contrast: float) -> Tensor:
    regions = torch.arange(num_agents) % num_regions
    inside = (regions == torch.arange(num_regions)[:, None]).double()
    return torch.softmax(contrast * inside, dim=1)


def weighted(num_agents: int, num_regions: int, contrast: float, **changes: Any) -> Any:
    settings = {
        "num_agents": num_agents,
        "dim": 100,
        "clip_norm": 11 / math.sqrt(num_regions),
        "noise_multiplier": 1.0,
        "sampling": PoissonSampling(0.35),
        "weights": softmax_weights(num_agents, num_regions, contrast),
    }
    return WeightedGaussianSum(**{**settings, **changes})


def correlated(num_agents: int, num_regions: int, contrast: float, **changes: Any) -> Any:
    settings = {
        "num_agents": num_agents,
        "dim": 100,
        "clip_norm": 11 / math.sqrt(num_regions),
        "noise_multiplier": 1.0,
        "sampling": PoissonSampling(0.35),
        "regions": tuple(n % num_regions for n in range(num_agents)),
        "num_regions": num_regions,
        "contrast": contrast,
    }
    return CorrelatedGaussianSum(**{**settings, **changes})


# ------------------------------------------------------------------ against the paper's noise

DECAY = torch.linspace(16, 1, 30, dtype=torch.float64).tolist()  # a_t for t = 11, …, 40
RATIOS = {1: 0.5, 30: 0.5, 35: 0.504, 36: 0.511, 37: 0.531, 38: 0.584, 39: 0.715, 40: 1.0}


@quiet
@pytest.mark.parametrize("num_agents", [29, 30, 50])
@pytest.mark.parametrize("t", RATIOS)
def test_tight_sensitivity_against_the_papers(num_agents: int, t: int) -> None:
    contrast = (16 if t <= 10 else DECAY[t - 11]) - 1
    tight = weighted(num_agents, 4, contrast)
    paper = weighted(num_agents, 4, contrast, paper_noise=True)
    ratio = tight.noise_std / paper.noise_std
    assert float(ratio.max()) == pytest.approx(RATIOS[t], abs=3e-3)
    assert float(ratio.min()) == float(ratio.max())
    assert paper.event == tight.event


@quiet
@pytest.mark.parametrize(("contrast", "expected"), [(15.0, 0.707), (0.0, 1.0)])
def test_tight_sensitivity_on_the_papers_synthetic_setting(
    contrast: float, expected: float
) -> None:
    paper = weighted(200, 2, contrast, paper_noise=True)
    ratio = weighted(200, 2, contrast).noise_std / paper.noise_std
    torch.testing.assert_close(ratio, torch.full_like(ratio, expected), rtol=0, atol=3e-3)


@quiet
@pytest.mark.parametrize("num_agents", [8, 29, 50])
@pytest.mark.parametrize("num_regions", [1, 2, 4, 8])
@pytest.mark.parametrize("contrast", [0.0, 1e-9, 0.5, 2.6, 15.0, 800.0])
def test_correlated_noise_is_the_papers_over_root_p(
    num_agents: int, num_regions: int, contrast: float
) -> None:
    mechanism = correlated(num_agents, num_regions, contrast)
    paper = weighted(num_agents, num_regions, contrast, paper_noise=True)
    largest = mechanism.weights.amax(dim=1)
    root_p = math.sqrt(num_regions)
    published = paper.noise_std * largest / largest.max()  # of each region, as if on its own
    torch.testing.assert_close(mechanism.noise_std, published / root_p, rtol=1e-3, atol=0)
    torch.testing.assert_close(mechanism.weights, paper.weights, rtol=1e-10, atol=1e-300)


@quiet
@pytest.mark.parametrize("contrast", [0.0, 0.7, 15.0])
def test_root_of_the_kernel(contrast: float) -> None:
    mechanism = correlated(10, 4, contrast)
    K = math.exp(-contrast) + (1 - math.exp(-contrast)) * torch.eye(4, dtype=torch.float64)
    R = mechanism._root(torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(R @ R, K, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(R, R.T, rtol=0, atol=0)
    torch.testing.assert_close(R.norm(dim=0), torch.ones(4).double(), rtol=1e-12, atol=0)


@quiet
def test_in_the_uniform_stage_one_vector_is_sent_to_all() -> None:
    mechanism = correlated(11, 4, 0.0)
    X = generator(0, "x").normal(11, 100)
    values = mechanism.release(X, ledger=Ledger(), noise=SEEDED, path=(1,))[0].values
    assert torch.equal(values, values[:1].expand(4, -1))
    mean = GaussianSum(num_agents=11, dim=100, clip_norm=5.5, noise_multiplier=1.0)
    torch.testing.assert_close(
        mechanism.noise_std, mean.noise_std.expand(4) / 0.35, rtol=1e-3, atol=0
    )


@quiet
@pytest.mark.parametrize("make", [weighted, correlated])
def test_with_one_region_it_is_the_plain_sum(make: Any) -> None:
    mechanism = make(29, 1, 15.0)
    plain = GaussianSum(
        num_agents=29, dim=100, clip_norm=11.0, noise_multiplier=1.0, sampling=PoissonSampling(0.35)
    )
    expected = 1.0 * 11.0 * (1 / 29) / 0.35  # z S max φ / q
    for candidate in (mechanism, plain):
        assert float(candidate.noise_std) == pytest.approx(expected, rel=1e-4)
    X = generator(0, "x").normal(29, 100)
    releases = [
        m.release(X, ledger=Ledger(), noise=SEEDED, path=(1,))[0].values for m in (mechanism, plain)
    ]
    torch.testing.assert_close(*releases, rtol=0, atol=1e-5 * expected)


@quiet
def test_regions_of_different_sizes() -> None:
    regions = (0, 0, 0, 0, 0, 1, 1, 2)
    mechanism = correlated(8, 3, 2.0, regions=regions)
    inside = torch.tensor(regions) == torch.arange(3)[:, None]
    expected = torch.softmax(2.0 * inside.double(), dim=1)
    torch.testing.assert_close(mechanism.weights, expected, rtol=1e-12, atol=0)


def test_published_noise_says_so() -> None:
    with pytest.warns(SignalWarning):
        mechanism = weighted(29, 4, 15.0, paper_noise=True)
    assert "paper_noise=True" in repr(mechanism)
    release, _ = mechanism.release({}, ledger=Ledger(), noise=SEEDED, path=(1,))
    assert "paper_noise=True" in release.mechanism
    assert "paper_noise=True" in repr(release)


@quiet
def test_weights_of_the_caller_are_copied() -> None:
    weights = softmax_weights(12, 3, 1.0)
    mechanism = weighted(12, 3, 1.0, weights=weights)
    before = mechanism.noise_std
    weights *= 100
    assert torch.equal(mechanism.noise_std, before)
    assert float(mechanism.weights.max()) < 1


@quiet
def test_weights_changed_afterwards_change_no_release() -> None:
    mechanism = WeightedGaussianSum(
        weights=torch.ones(2, 3), num_agents=3, dim=4, clip_norm=1.0, noise_multiplier=1.0
    )
    replayed: dict[str, Any] = {
        "contributions": torch.ones(3, 4),
        "noise": InsecureSeededNoise(0),
        "path": (1,),
    }
    before, _ = mechanism.release(ledger=Ledger(), **replayed)
    mechanism.weights.mul_(1000)  # its noise stays as it is
    after, _ = mechanism.release(ledger=Ledger(), **replayed)
    assert torch.equal(before.values, after.values)


@quiet
def test_weights_of_both_signs_count_by_their_size() -> None:
    weights = torch.tensor([[1.0, -1.0], [0.0, 3.0]])
    mechanism = weighted(2, 2, 0.0, weights=weights, clip_norm=1.0, sampling=PoissonSampling(1.0))
    assert mechanism.sensitivity == pytest.approx(math.sqrt(10), rel=1e-12)


@pytest.mark.parametrize(
    "weights",
    [torch.zeros(2, 12), torch.full((2, 12), math.nan), torch.full((2, 12), math.inf)],
    ids=["zero", "nan", "inf"],
)
def test_refuses_weights_without_a_bound(weights: Tensor) -> None:
    with pytest.raises(InputDataError, match="weights"):
        weighted(12, 2, 1.0, weights=weights)


@pytest.mark.parametrize("shape", [(2, 11), (12,), (0, 12)])
def test_refuses_weights_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(BotorchTensorDimensionError, match="P x 12"):
        weighted(12, 2, 1.0, weights=torch.ones(shape))


@pytest.mark.parametrize("weight", [0.0, math.nan, math.inf])
def test_refuses_a_weight_without_a_bound(weight: float) -> None:
    with pytest.raises(InputDataError, match="weight"):
        GaussianSum(num_agents=3, dim=2, clip_norm=1.0, noise_multiplier=1.0, weight=weight)


@pytest.mark.parametrize(
    "changes",
    [
        {"regions": (0, 1) * 5},
        {"regions": (0,) * 12},
        {"regions": (0, 1, 2) * 4},
        {"regions": (0, -1) * 6},
        {"num_regions": 0},
        {"contrast": -0.1},
        {"contrast": math.nan},
        {"contrast": math.inf},
    ],
    ids=str,
)
def test_refuses_regions_that_do_not_fit(changes: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "num_agents": 12,
        "dim": 2,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "regions": (0, 1) * 6,
        "num_regions": 2,
        "contrast": 1.0,
    }
    with pytest.raises(InputDataError):
        CorrelatedGaussianSum(**{**settings, **changes})


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_refuses_rates_that_are_none(rate: float) -> None:
    with pytest.raises(InputDataError, match="sampling rate"):
        PoissonSampling(rate)


@pytest.mark.parametrize("size", [0, -1, 1.0, True])
def test_refuses_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(InputDataError, match="size of a sample"):
        FixedSizeSampling(size)


def test_everyone_takes_part_without_a_coin() -> None:
    class NoSource:
        private = True

        def uniform(self, *shape: int, path: Any) -> Tensor:
            raise AssertionError("a coin was drawn")

    assert bool(PoissonSampling().draw(5, noise=NoSource(), path=()).all())


# ------------------------------------------------------------------ rounding


@quiet
def test_noise_covers_the_rounding_of_long_sums() -> None:
    # A long sum rounds by up to N operations; the bound must grow with the roster, slowly.
    shares = []
    for num_agents in (10, 10**6):
        mechanism = GaussianSum(num_agents=num_agents, dim=1, clip_norm=1.0, noise_multiplier=1.0)
        shares.append(mechanism.noise_scale / mechanism.sensitivity - 1)
    assert 0 < shares[0] < 1.1e-6
    assert shares[0] + 1e-7 < shares[1] < 3e-6


@quiet
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_a_sum_that_cancels_is_as_exact_as_claimed(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "botorch_fed.privacy.mechanisms.lattice_gaussian", lambda x, std, *, noise, path: x
    )
    n = 3000
    X = generator(0, "x").normal(n, 3)
    X = X / (1.000001 * X.norm(dim=1, keepdim=True))  # inside the ball
    X = torch.cat([X, -X.flip(0)])
    mechanism = GaussianSum(num_agents=2 * n, dim=3, clip_norm=1.0, noise_multiplier=1.0, weight=1)
    blocks = ((i, X[i : i + block]) for i in range(0, 2 * n, block))
    release, _ = mechanism.release(blocks, ledger=Ledger(), noise=SEEDED, path=(1,))
    assert float(release.values.norm()) <= (4096 + 40) * 2 * n * 2.0**-53
    if block == 1:  # nothing but the running sum rounds, and that is compensated
        assert float(release.values.norm()) < 1e-13


# ------------------------------------------------------------------ signals


def test_warns_once_per_mechanism_that_is_mostly_noise() -> None:
    settings: dict[str, Any] = {
        "num_agents": 8,
        "dim": 100,
        "clip_norm": 10.0,
        "noise_multiplier": 1.0,
        "regions": (0, 1) * 4,
        "num_regions": 2,
        "contrast": 15.0,
    }
    with pytest.warns(SignalWarning, match="as much signal as noise") as caught:
        mechanism = CorrelatedGaussianSum(**settings)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert float(mechanism.best_signal_to_noise.max()) < 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mechanism.release({}, ledger=Ledger(), noise=SEEDED, path=(1,))
        assert float(correlated(5000, 4, 15.0).best_signal_to_noise.min()) > 1


def test_signal_of_a_release_is_estimated_from_the_release_alone() -> None:
    std = torch.tensor([1.0, 2.0]).double()
    z = SEEDED.uniform(2, 10_000, path=("z",))
    unit = (z - 0.5) * math.sqrt(12)  # variance one
    silent = Release(std[:, None] * unit, std, False, "test")
    assert float(silent.signal_to_noise.max()) < 0.15  # five standard errors: 5^.5 (2 / M)^.25
    loud = Release(std[:, None] * (unit + 3), std, False, "test")
    torch.testing.assert_close(
        loud.signal_to_noise, torch.tensor([3.0, 3.0]).double(), rtol=0.02, atol=0
    )


@quiet
def test_a_release_can_travel() -> None:
    release, _ = correlated(12, 2, 1.0).release({}, ledger=Ledger(), noise=SEEDED, path=(1,))
    back = decode(encode(release), Release)
    assert torch.equal(back.values, release.values)
    assert torch.equal(back.noise_std, release.noise_std)
    assert (back.private, back.mechanism) == (False, release.mechanism)


# ------------------------------------------------------------------ clipping

numbers = st.floats(allow_nan=False, allow_infinity=False)
vectors = st.lists(numbers, min_size=1, max_size=6)
radii = st.floats(1e-100, 1e100)


@given(vectors, radii)
def test_clipped_vectors_lie_in_the_ball_and_stay(x: list[float], radius: float) -> None:
    once = clip(torch.tensor(x, dtype=torch.float64), radius)
    assert math.hypot(*once.tolist()) <= radius * (1 + 2.0**-50)
    assert torch.equal(clip(once, radius), once)


@given(vectors, radii)
def test_clipping_keeps_directions_and_short_vectors(x: list[float], radius: float) -> None:
    X = torch.tensor(x, dtype=torch.float64)
    clipped, length = clip(X, radius), math.hypot(*x)
    if length <= radius * (1 - 1e-12):
        assert torch.equal(clipped, X)
    elif length < 1e300:
        expected = X / length * radius
        torch.testing.assert_close(clipped, expected, rtol=1e-12, atol=1e-250)


def test_clipping_works_on_batches_zeros_and_extremes() -> None:
    numbers = [[[3.0, 4.0], [0.0, 0.0]], [[1e308, 1e308], [1e-310, 0.0]]]
    X = torch.tensor(numbers, dtype=torch.float64)
    clipped = clip(X, 1.0)
    assert clipped.shape == X.shape
    norms = clipped.norm(dim=-1)
    torch.testing.assert_close(norms[:, 0], torch.ones(2, dtype=torch.float64), rtol=1e-12, atol=0)
    assert torch.equal(clipped[:, 1], X[:, 1])
    assert clip(torch.zeros(3, 0), 1.0).shape == (3, 0)
    assert clip(torch.ones(2), 1.0).dtype == torch.float64


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_clipping_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(InputDataError, match="finite"):
        clip(torch.tensor([0.0, value]), 1.0)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_clipping_needs_a_radius(norm: float) -> None:
    with pytest.raises(InputDataError, match="clip norm"):
        clip(torch.ones(2), norm)


@pytest.mark.parametrize("dim", [1, 50, 100])
@pytest.mark.parametrize("quantile", [0.5, 0.99])
def test_suggested_clip_norm_is_a_quantile_of_the_chi_distribution(
    dim: int, quantile: float
) -> None:
    assert chi_clip_norm(dim, quantile) == pytest.approx(chi(dim).ppf(quantile), rel=1e-10)
    norms = generator(0, "s").normal(20_000, dim).norm(dim=-1)
    share = float((norms > chi_clip_norm(dim)).double().mean())
    assert share == pytest.approx(0.01, abs=5 * math.sqrt(0.01 * 0.99 / 20_000))


def test_suggested_clip_norm_refuses_nonsense() -> None:
    with pytest.raises(InputDataError, match="quantile"):
        chi_clip_norm(3, 1.0)
    with pytest.raises(InputDataError, match="dimension"):
        chi_clip_norm(0)


# ------------------------------------------------------------------ the room


def test_everything_public_is_sorted_and_documented() -> None:
    assert privacy.__all__ == sorted(privacy.__all__)
    for name in privacy.__all__:
        thing = getattr(privacy, name)
        assert get_args(thing) or thing.__doc__, name  # lists of literals explain themselves
    for module in ("accounting", "audit", "mechanisms"):
        home = f"botorch_fed.privacy.{module}"
        for name, thing in vars(sys.modules[home]).items():
            # `audit` the function would hide `audit` the module.
            public = not name.startswith("_") and name != module
            if getattr(thing, "__module__", None) == home and public:
                assert name in privacy.__all__, f"{name} of {module} is not re-exported"


def test_import_is_light() -> None:
    code = "import sys, botorch_fed.privacy; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"opacus", "dp_accounting", "scipy.stats"} & set(run.stdout.split())
