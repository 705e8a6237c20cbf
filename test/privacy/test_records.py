"""The statistic of a record: its meaning, and bounds that are attained and never exceeded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from botorch_fed.privacy.distributed import DistributedRecordSum
from botorch_fed.privacy.records import RecordStatistic
from test.cases import normal, uniform


def statistic(**changes: Any) -> RecordStatistic:
    settings: dict[str, Any] = {"num_features": 3, "outcome_bound": 0.7, "centre": 0.4}
    return RecordStatistic(**{**settings, **changes})


def hostile(count: int, seed: int) -> Tensor:
    """Records of which half are beyond their bounds, in three features."""
    directions = normal(count, 3, seed=seed)
    directions /= directions.norm(dim=1, keepdim=True)
    lengths = 2 * uniform(count, 1, seed=seed).sqrt()
    outcomes = 0.4 + 1.4 * (2 * uniform(count, 1, seed=seed + 1) - 1)
    return torch.cat([lengths * directions, outcomes], dim=1)


@pytest.mark.parametrize("r", [0.01, 0.3, 1.0, 2.0, 3.0, 10.0])
def test_sensitivities_are_never_exceeded_and_attained(r: float) -> None:
    mechanism = statistic(moment_scale=math.sqrt(r) / 0.7)
    assert mechanism.ratio == pytest.approx(r)
    first = mechanism.statistics(hostile(1500, 0))
    second = mechanism.statistics(hostile(1500, 7))
    zero_out, replace_one = (mechanism.sensitivity(a) for a in ("zero-out", "replace-one"))
    assert float(first.norm(dim=1).max()) <= zero_out * (1 + 1e-12)
    assert float(torch.cdist(first, second).max()) <= replace_one * (1 + 1e-12)
    # Unit features at an angle, and outcomes at opposite ends, beyond them.
    angles = torch.linspace(0, math.pi, 201, dtype=torch.float64)
    fan = torch.stack([angles.cos(), angles.sin(), 0 * angles], dim=1) * 3
    high, low = (
        mechanism.statistics(torch.cat([fan, torch.full((201, 1), y).double()], dim=1))
        for y in (9.0, -9.0)
    )
    largest = float((high[:1] - low).norm(dim=1).max())
    assert 1 - 1e-3 < largest / replace_one <= 1 + 1e-12
    assert float(high.norm(dim=1).max()) == pytest.approx(zero_out, rel=1e-12)
    assert mechanism.norm("zero-out") == zero_out
    assert mechanism.norm("replace-one") == replace_one / 2


def test_by_default_the_gram_matrix_rides_for_free() -> None:
    mechanism = statistic()
    assert mechanism.moment_scale == pytest.approx(math.sqrt(2) / 0.7)
    moment_alone = 2 * mechanism.moment_scale * 0.7
    assert mechanism.sensitivity("replace-one") == pytest.approx(moment_alone, rel=1e-12)
    both = math.sqrt(2) * (1 + mechanism.ratio / 2)  # the two formulas meet there
    assert both == pytest.approx(moment_alone, rel=1e-12)


def test_sums_are_those_of_regression() -> None:
    mechanism = statistic(num_features=5, outcome_bound=10.0, moment_scale=0.3)
    features, outcomes = 0.2 * uniform(40, 5), normal(40, 1)
    values = mechanism.statistics(mechanism.records(features, outcomes)).sum(dim=0)
    assert values.shape == (mechanism.dim,) == (20,)
    gram, moment = mechanism.gram_and_moment(values, noise_var=0.02, outputscale=1.5)
    scale = 1.5 / 0.02
    torch.testing.assert_close(gram, scale * features.T @ features, rtol=1e-12, atol=0)
    expected = math.sqrt(1.5) / 0.02 * features.T @ (outcomes - 0.4)
    torch.testing.assert_close(moment, expected, rtol=1e-12, atol=1e-12)
    distance = (features.T @ features).norm() ** 2 + 0.3**2 * (
        features.T @ (outcomes - 0.4)
    ).norm() ** 2
    assert float(values.norm() ** 2) == pytest.approx(float(distance), rel=1e-12)
    std = mechanism.moment_noise_std(2.0, noise_var=0.02, outputscale=1.5)
    shift = torch.zeros(20).double()
    shift[-1] = 2.0
    moved = mechanism.gram_and_moment(values + shift, noise_var=0.02, outputscale=1.5)[1]
    assert float((moved - moment)[-1]) == pytest.approx(std, rel=1e-9)


def test_rounded_sums_are_exact_in_any_order_and_in_chunks() -> None:
    mechanism, step = statistic(), 2.0**-12
    some = hostile(70_000, 3)  # more than one chunk
    whole = mechanism.rounded_sum(some, step)
    assert whole.dtype == torch.int64
    assert torch.equal(mechanism.rounded_sum(some.flip(0), step), whole)
    parts = mechanism.rounded_sum(some[:17], step) + mechanism.rounded_sum(some[17:], step)
    assert torch.equal(parts, whole)
    assert torch.equal(mechanism.rounded_sum(some[:0], step), torch.zeros_like(whole))
    exact = mechanism.statistics(some).sum(dim=0)
    assert float((whole * step - exact).abs().max()) <= 70_000 * step / 2


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("moment_scale", [None, 0.5])
def test_sums_with_agents_noise_use_the_same_statistic(adjacency: Any, moment_scale: Any) -> None:
    mechanism = statistic(moment_scale=moment_scale)
    distributed = DistributedRecordSum(
        num_features=3,
        outcome_bound=0.7,
        centre=0.4,
        moment_scale=moment_scale,
        max_records=50,
        num_agents=4,
        noise_multiplier=1.0,
        adjacency=adjacency,
    )
    assert distributed.statistic == mechanism
    assert distributed._norm(0.0) == pytest.approx(mechanism.norm(adjacency), rel=1e-8)
    some = hostile(50, 5)
    expected = mechanism.rounded_sum(some, distributed.grid.step)
    assert torch.equal(distributed.bounded(some), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_features": 0}, "features must be an int from 1"),
        ({"num_features": True}, "features must be an int"),
        ({"outcome_bound": 0.0}, "between 1e-50 and 1e50"),
        ({"outcome_bound": math.nan}, "outcome_bound must be finite"),
        ({"centre": math.inf}, "centre must be finite"),
        ({"moment_scale": 0.0}, "between 1e-6 and 1e6"),
        ({"moment_scale": math.nan}, "moment_scale must be finite"),
    ],
)
def test_refuses_settings_that_bound_nothing(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputDataError, match=words):
        statistic(**changes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_refuses_what_is_not_finite(value: float, place: int) -> None:
    rows = torch.zeros(3, 4).double()
    rows[1, place] = value
    for job in (statistic().statistics, lambda r: statistic().rounded_sum(r, 1.0)):
        with pytest.raises(InputDataError, match="finite"):
            job(rows)


def test_refuses_shapes() -> None:
    for shape in [(3, 3), (4,), (1, 3, 4)]:
        with pytest.raises(BotorchTensorDimensionError, match="n x 4"):
            statistic().statistics(torch.zeros(shape))
    with pytest.raises(BotorchTensorDimensionError, match="n x 3"):
        statistic().records(torch.zeros(3, 3), torch.zeros(4, 1))
    with pytest.raises(BotorchTensorDimensionError, match=r"\(9,\)"):
        statistic().gram_and_moment(torch.zeros(8), noise_var=1.0)
    with pytest.raises(InputDataError, match="positive"):
        statistic().gram_and_moment(torch.zeros(9), noise_var=0.0)
