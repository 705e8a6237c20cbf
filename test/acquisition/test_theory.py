"""Published schedules of weights, and the conditions of the theory, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from benchmarks.papers.published.exploration import PowerLawSchedule
from botorch_fed.acquisition import Constant, InverseSquare, exploration_weights
from botorch_fed.acquisition.theory import (
    information_gain,
    published_feature_counts,
    theory_beta,
    theory_condition,
)
from botorch_fed.rng import generator
from botorch_fed.wire.codec import decode, encode


@pytest.mark.parametrize(("power", "start"), [(1, 1000), (2, 40), (1, 1)])
def test_power_laws_weigh_by_powers(power: float, start: float) -> None:
    schedule = PowerLawSchedule(power, start, plateau=5, decay=10)
    a = [start] * 5 + torch.linspace(start, 1, 10, dtype=torch.float64).tolist() + [1]
    for t, a_t in enumerate(a, start=1):
        weights = exploration_weights([0, 1, 1], 2, schedule(t))
        assert float(weights[0, 0] / weights[0, 1]) == pytest.approx(a_t**power, rel=1e-9)


def test_power_laws_fall_and_travel_as_numbers() -> None:
    schedule = PowerLawSchedule(2, 40, plateau=5, decay=5)
    contrasts = [schedule(t) for t in range(1, 100)]
    assert contrasts == sorted(contrasts, reverse=True)
    assert contrasts[-1] == 0
    assert decode(encode(schedule), PowerLawSchedule) == schedule
    for power, start in [(0, 40), (math.inf, 40), (1, 0.5), (1, math.inf)]:
        with pytest.raises(InputDataError, match="k > 0 and a finite start a >= 1"):
            PowerLawSchedule(power, start)


def test_bad_numbers() -> None:
    with pytest.raises(InputDataError, match="at least one point"):
        theory_condition(Constant(0.5), beta=1.0, num_points=0, num_rounds=3)
    with pytest.raises(InputDataError, match="0 < delta < 1"):
        theory_beta(1, bound=1.0, noise_std=0.1, information_gain=0.0, delta=0.0)


def test_beta_by_hand() -> None:
    kwargs: dict[str, Any] = {"bound": 2.0, "noise_std": 0.1, "delta": 0.04}
    value = theory_beta(3, information_gain=lambda n: 10.0 * n, **kwargs)
    assert value == pytest.approx(2 + 0.1 * math.sqrt(2 * (20 + 1 + math.log(100))), rel=1e-14)
    assert theory_beta(3, information_gain=20.0, **kwargs) == value
    assert theory_beta(1, information_gain=lambda n: 10.0 * n, **kwargs) < value


def test_condition_by_hand() -> None:
    report = theory_condition(InverseSquare(), beta=lambda t: 1.0 + t, num_points=100, num_rounds=9)

    def c(t: int) -> float:
        return (1 + t) * (1 + math.sqrt(2 * math.log(100 * t**2)))

    expected = [(1 - InverseSquare()(t)) * c(t) / (0.25 * c(1)) for t in range(1, 10)]
    assert report.ratios.tolist() == pytest.approx(expected, rel=1e-12)
    # p_1 := p_2 fails in round two, as said; afterwards 1/t^2 wins over c_t.
    assert report.first_violation == 2
    assert report.ratios[-1] < 1


def test_condition_holds_and_fails_where_it_should() -> None:
    def steep(t: int) -> float:
        return 1 - 0.5 * t**-2.0

    kept = theory_condition(steep, beta=1.0, num_points=1000, num_rounds=100)
    assert kept.first_violation is None
    assert kept.ratios[0] == 1
    broken = theory_condition(Constant(0.5), beta=1.0, num_points=1000, num_rounds=5)
    assert broken.first_violation == 2
    alone = theory_condition(Constant(1.0), beta=1.0, num_points=1000, num_rounds=5)
    assert alone.first_violation is None
    assert alone.ratios.tolist() == [0.0] * 5
    late = theory_condition(lambda t: 1.0 if t < 4 else 0.9, beta=1.0, num_points=10, num_rounds=6)
    assert late.first_violation == 4


def test_the_information_of_features_is_bounded() -> None:
    """By any points; attained where features are orthonormal and played equally often."""
    m, n, noise_var = 4, 40, 0.3
    for seed in range(5):
        Phi = generator(seed, "features").normal(n, m)
        Phi = Phi / Phi.norm(dim=1, keepdim=True)
        gain = 0.5 * float(torch.logdet(torch.eye(m).double() + Phi.mT @ Phi / noise_var))
        assert gain <= information_gain(m, n, noise_var=noise_var)
    even = 0.5 * m * math.log(1 + n / m / noise_var)
    assert information_gain(m, n, noise_var=noise_var) == pytest.approx(even, rel=1e-12)
    assert information_gain(3, 0, noise_var=1.0) == 0
    with pytest.raises(InputDataError):
        information_gain(0, 1, noise_var=1.0)


def test_published_counts_of_features() -> None:
    counts = published_feature_counts(1024, 2)
    assert counts["theorem"] == pytest.approx(2 * (6 * math.log(1024)) ** 2)
    assert counts["theorem"] == 2 * counts["local"] == pytest.approx(4 * counts["remark 3"])
    with pytest.raises(InputDataError):
        published_feature_counts(1, 2)
