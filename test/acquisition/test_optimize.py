"""The optimiser of acquisition functions: never worse than what it has looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models.deterministic import GenericDeterministicModel
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from botorch_fed.acquisition import Partition, ThompsonSampling, weight_path
from botorch_fed.acquisition.optimize import CHUNK, _improve_in_regions, ascend, maximize
from botorch_fed.models.warp import LogWarp
from botorch_fed.rng import generator
from botorch_fed.space import Parameter, SearchSpace
from test.cases import normal, random_fourier, uniform


class Given(AcquisitionFunction):
    """A function of points `… x d`, and the points it was asked for."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(GenericDeterministicModel(function))
        self.function = function
        self.asked: list[Tensor] = []

    def forward(self, X: Tensor) -> Tensor:
        assert X.shape[-2] == 1
        self.asked.append(X.detach().reshape(-1, X.shape[-1]).clone())
        return self.function(X.squeeze(-2))


def bowl(centre: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda X: -(X - centre).square().sum(dim=-1)


def draw(seed: int) -> ThompsonSampling:
    return ThompsonSampling(weight_path(random_fourier(), normal(60, seed=seed)))


# ------------------------------------------------------------------ over the cube


@pytest.mark.parametrize("d", [1, 2, 6, 20])
def test_finds_an_inner_maximum(d: int) -> None:
    centre = 0.1 + 0.8 * uniform(d, seed=d)
    point, value = maximize(
        Given(bowl(centre)), d, generator=generator(0), num_raw=64, num_restarts=4
    )
    assert point.shape == (1, d)
    torch.testing.assert_close(point[0], centre, rtol=0, atol=1e-6)
    assert value == pytest.approx(0, abs=1e-6)


def test_finds_the_best_of_several_maxima() -> None:
    def waves(X: Tensor) -> Tensor:
        return (12 * X).sin().sum(dim=-1) + X.sum(dim=-1)

    _, value = maximize(Given(waves), 2, generator=generator(0), num_raw=256, num_restarts=8)
    grid = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    best = 2 * float(((12 * grid).sin() + grid).max())  # the function is separable
    assert value == pytest.approx(best, abs=1e-6)


def test_finds_a_corner() -> None:
    point, value = maximize(
        Given(lambda X: X[..., 0] - X[..., 1]),
        2,
        generator=generator(0),
        num_raw=16,
        num_restarts=2,
    )
    assert point.tolist() == [[1.0, 0.0]]
    assert value == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_what_it_has_looked_at(seed: int) -> None:
    acquisition = draw(seed)
    point, value = maximize(
        acquisition, 2, generator=generator(seed, "raw"), num_raw=64, num_restarts=4
    )
    raw = generator(seed, "raw").uniform(64, 2)
    with torch.no_grad():
        assert value >= float(acquisition(raw.unsqueeze(-2)).max())
        assert float(acquisition(point)) == pytest.approx(value, rel=1e-12)


def test_never_worse_where_the_improvement_fails() -> None:
    def fails(X: Tensor) -> Tensor:  # whatever few points are looked at together
        return X[..., 0] - (100 if len(X) <= 4 else 0)

    point, value = maximize(Given(fails), 1, generator=generator(1), num_raw=64, num_restarts=4)
    raw = generator(1).uniform(64, 1)
    assert value == float(raw.max())
    assert float(point) == value


@pytest.mark.parametrize("d", [1, 3])
def test_never_leaves_the_cube(d: int) -> None:
    outside = torch.full((d,), 3.0).double()
    acquisition = Given(bowl(outside))
    point, _ = maximize(acquisition, d, generator=generator(0), num_raw=32, num_restarts=4)
    asked = torch.cat(acquisition.asked)
    assert bool(((asked >= 0) & (asked <= 1)).all())
    assert point.tolist() == [[1.0] * d]


def test_the_same_generator_gives_the_same_point() -> None:
    points = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # PyTorch's global generator has no say
        points.append(maximize(draw(0), 2, generator=generator(5), num_raw=64, num_restarts=4))
    assert torch.equal(points[0][0], points[1][0])
    assert points[0][1] == points[1][1]


def test_a_flat_function_has_a_maximum_anywhere() -> None:
    point, value = maximize(
        Given(lambda X: 0 * X.sum(dim=-1)), 2, generator=generator(0), num_raw=8, num_restarts=2
    )
    assert value == 0
    assert bool(((point >= 0) & (point <= 1)).all())


# ------------------------------------------------------------------ away from earlier points


@pytest.mark.parametrize("distance", [0.01, 0.2])
def test_keeps_a_distance_from_earlier_points(distance: float) -> None:
    centre = torch.tensor([0.5, 0.5]).double()
    point, value = maximize(
        Given(bowl(centre)),
        2,
        generator=generator(0),
        num_raw=256,
        num_restarts=4,
        tried=centre.unsqueeze(0),
        min_distance=distance,
    )
    assert float((point - centre).norm()) >= distance
    assert value == pytest.approx(float(bowl(centre)(point)))
    raw = generator(0).uniform(256, 2)
    allowed = bowl(centre)(raw)[(raw - centre).norm(dim=-1) >= distance]
    assert value >= float(allowed.max())


def test_where_no_room_is_left_the_best_point_is_looked_at_again() -> None:
    centre = torch.tensor([0.5, 0.5]).double()
    point, _ = maximize(
        Given(bowl(centre)),
        2,
        generator=generator(0),
        num_raw=32,
        num_restarts=4,
        tried=centre.unsqueeze(0),
        min_distance=5.0,
    )
    torch.testing.assert_close(point[0], centre, rtol=0, atol=1e-6)


def test_half_of_the_raw_points_are_uniform_on_the_warped_scale() -> None:
    warp = LogWarp(torch.tensor([1e-6, 0.0]).double())
    acquisition = Given(lambda X: 0 * X.sum(dim=-1))
    maximize(acquisition, 2, generator=generator(0), num_raw=1000, num_restarts=1, log_warp=warp)
    raw = acquisition.asked[0]
    assert raw.shape == (1000, 2)
    small = float((raw[:, 0] < 1e-3).double().mean())  # half of the logarithmic scale
    assert small == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 1000) ** 0.5)
    assert float(raw[:, 1].mean()) == pytest.approx(0.5, abs=5 * (1 / 12 / 1000) ** 0.5)
    assert bool(((raw >= 0) & (raw <= 1)).all())


# ------------------------------------------------------------------ region by region


def regional_draw(partition: Partition, seed: int) -> ThompsonSampling:
    w = normal(partition.num_regions, 60, seed=seed)
    return ThompsonSampling(weight_path(random_fourier(), w), partition)


def stairs(slopes: list[float], heights: list[float]) -> Callable[[Tensor], Tensor]:
    """On the halves of a line: other heights and other slopes."""

    def function(X: Tensor) -> Tensor:
        above = X[..., 0] >= 0.5
        low = heights[0] + slopes[0] * X[..., 0]
        return torch.where(above, heights[1] + slopes[1] * X[..., 0], low)

    return function


@pytest.mark.parametrize("num_regions", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_finds_the_best_of_all_regions(num_regions: int, seed: int) -> None:
    partition = Partition.regular(num_regions, 2)
    phi, w = random_fourier(), normal(num_regions, 60, seed=seed)
    acquisition = ThompsonSampling(weight_path(phi, w), partition)
    point, value = maximize(acquisition, 2, generator=generator(seed), partition=partition)
    # Every region's own function on a grid of the region, faces included.
    side = torch.linspace(0, 1, 800 // num_regions + 20).double()
    grid = torch.cartesian_prod(side, side)
    best = [float((phi(partition.to_region(i, grid)) @ w[i]).max()) for i in range(num_regions)]
    assert value >= max(best) - 1e-6
    assert value <= max(best) + 1e-3 * abs(max(best))  # between the points of the grid
    assert int(partition.region_of(point)) == best.index(max(best))
    with torch.no_grad():
        assert float(acquisition(point)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("num_regions", [2, 4, 64])
def test_no_start_leaves_its_region(num_regions: int) -> None:
    partition = Partition.regular(num_regions, 2)
    acquisition, starts = regional_draw(partition, 0), uniform(40, 2, seed=3)
    found, values = _improve_in_regions(acquisition, starts, partition)
    regions = partition.region_of(starts)
    assert torch.equal(partition.region_of(found), regions)
    path = acquisition.path.path
    with torch.no_grad():
        own = path(found).gather(0, regions.unsqueeze(0)).squeeze(0)
        before = path(starts).gather(0, regions.unsqueeze(0)).squeeze(0)
    torch.testing.assert_close(values, own, rtol=1e-9, atol=1e-12)
    assert bool((values >= before - 1e-9).all())


def test_a_better_value_beyond_the_boundary_is_another_starts_business() -> None:
    # Both halves rise towards the upper one, which is better everywhere.
    partition = Partition.regular(2, 1)
    function = stairs(slopes=[1.0, 1.0], heights=[0.0, 5.0])
    starts = torch.tensor([[0.1], [0.45], [0.6]], dtype=torch.float64)
    found, values = _improve_in_regions(Given(function), starts, partition)
    last = 0.5 - 2.0**-54  # the last number before the boundary
    torch.testing.assert_close(
        found.flatten(), torch.tensor([last, last, 1.0], dtype=torch.float64)
    )
    assert bool((found[:2] < 0.5).all())
    torch.testing.assert_close(values, torch.tensor([0.5, 0.5, 6.0], dtype=torch.float64))


def test_a_maximum_at_an_open_face() -> None:
    # The lower half is best just before the boundary, where the other function begins.
    partition = Partition.regular(2, 1)
    function = stairs(slopes=[10.0, -1.0], heights=[0.0, 0.0])
    point, value = maximize(Given(function), 1, generator=generator(0), partition=partition)
    assert float(point) < 0.5
    assert value == pytest.approx(5.0, abs=1e-9)
    assert float(function(point)) == value


def test_every_region_has_a_start() -> None:
    # The lower half is the better one at all raw points; the upper has a narrow peak.
    partition = Partition.regular(2, 1)

    def function(X: Tensor) -> Tensor:
        peak = 3 - 20 * (X[..., 0] - 0.75).abs()
        return torch.where(X[..., 0] >= 0.5, peak, 2.9 + 0 * X[..., 0])

    point, _ = maximize(
        Given(function),
        1,
        generator=generator(2),
        partition=partition,
        num_raw=32,
        num_restarts=2,
    )
    raw = generator(2).uniform(32, 1)
    assert float(function(raw[raw[:, 0] >= 0.5]).max()) < 2.9
    assert float(point) == pytest.approx(0.75, abs=1e-3)


def test_one_region_changes_nothing() -> None:
    for seed in range(3):
        acquisition = draw(seed)
        plain = maximize(acquisition, 2, generator=generator(seed))
        whole = maximize(
            acquisition, 2, generator=generator(seed), partition=Partition.regular(1, 2)
        )
        assert torch.equal(plain[0], whole[0])
        assert plain[1] == whole[1]


def test_regions_that_do_not_matter_do_no_harm() -> None:
    centre = torch.tensor([0.3, 0.8], dtype=torch.float64)
    point, value = maximize(
        Given(bowl(centre)), 2, generator=generator(0), partition=Partition.regular(6, 2)
    )
    torch.testing.assert_close(point[0], centre, rtol=0, atol=1e-6)
    assert value == pytest.approx(0, abs=1e-6)


def test_regions_and_earlier_points() -> None:
    partition = Partition.regular(4, 2)
    acquisition = regional_draw(partition, 1)
    first, best = maximize(acquisition, 2, generator=generator(0), partition=partition)
    second, value = maximize(
        acquisition,
        2,
        generator=generator(0),
        partition=partition,
        tried=first,
        min_distance=0.1,
        log_warp=LogWarp(torch.tensor([0.01, 0.0]).double()),
    )
    assert value < best
    with torch.no_grad():
        assert float(acquisition(second)) == pytest.approx(value, rel=1e-12)


def test_never_worse_where_the_improvement_of_a_region_fails() -> None:
    partition = Partition.regular(2, 1)

    def root(X: Tensor) -> Tensor:
        return (0.7 - X[..., 0]).sqrt()  # NaN in a part of the upper half

    point, value = maximize(Given(root), 1, generator=generator(0), partition=partition)
    raw = generator(0).uniform(1000, 1)
    assert value >= float(root(raw).nan_to_num(nan=-1).max())
    assert float(root(point)) == pytest.approx(value)


def test_a_list_of_points_by_regions() -> None:
    partition = Partition.regular(3, 2)
    acquisition, candidates = regional_draw(partition, 2), uniform(500, 2)
    point, value = maximize(
        acquisition, 2, generator=generator(0), candidates=candidates, partition=partition
    )
    values = acquisition.path.path(candidates)
    own = values.gather(0, partition.region_of(candidates).unsqueeze(0)).squeeze(0)
    assert torch.equal(point[0], candidates[own.argmax()])
    assert value == pytest.approx(float(own.max()), rel=1e-12)


# ------------------------------------------------------------------ over a list


def test_a_list_of_points_is_searched_in_full() -> None:
    candidates = uniform(CHUNK + 100, 2)  # in more than one part
    acquisition = draw(3)
    point, value = maximize(acquisition, 2, generator=generator(0), candidates=candidates)
    with torch.no_grad():
        values = acquisition(candidates.unsqueeze(-2))
    best = int(values.argmax())
    assert torch.equal(point, candidates[best : best + 1])
    assert value == pytest.approx(float(values[best]), rel=1e-12)


@given(values=st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_ties_go_to_the_first(values: list[int]) -> None:
    candidates = torch.arange(len(values)).double().unsqueeze(-1) / len(values)
    table = torch.tensor(values).double()

    def look_up(X: Tensor) -> Tensor:
        return table[(X[..., 0] * len(values)).round().long()]

    point, value = maximize(Given(look_up), 1, generator=generator(0), candidates=candidates)
    first = values.index(max(values))
    assert torch.equal(point[0], candidates[first])
    assert value == max(values)


def test_a_point_of_the_list_is_a_copy() -> None:
    candidates = uniform(5, 2)
    point, _ = maximize(draw(0), 2, generator=generator(0), candidates=candidates)
    point += 1
    assert float(candidates.max()) <= 1


def test_undefined_points_are_passed_over() -> None:
    candidates = torch.tensor([[0.9], [0.2], [0.4]], dtype=torch.float64)

    def root(X: Tensor) -> Tensor:
        return (0.5 - X[..., 0]).sqrt()  # NaN beyond one half

    point, _ = maximize(Given(root), 1, generator=generator(0), candidates=candidates)
    assert torch.equal(point, candidates[1:2])


# ------------------------------------------------------------------ what cannot be done


@pytest.mark.parametrize("candidates", [None, torch.ones(3, 2).double()])
def test_a_function_that_is_finite_nowhere(candidates: Tensor | None) -> None:
    nowhere = Given(lambda X: X.sum(dim=-1) * torch.nan)
    with pytest.raises(InputDataError, match="Given is finite nowhere"):
        maximize(
            nowhere,
            2,
            generator=generator(0),
            candidates=candidates,
            num_raw=8,
            num_restarts=2,
        )


def test_bad_input() -> None:
    acquisition = draw(0)
    with pytest.raises(BotorchTensorDimensionError, match="K > 0"):
        maximize(acquisition, 2, generator=generator(0), candidates=uniform(0, 2))
    with pytest.raises(BotorchTensorDimensionError, match="K x 2"):
        maximize(acquisition, 2, generator=generator(0), candidates=uniform(5, 3))
    with pytest.raises(InputDataError, match="num_raw = 4"):
        maximize(acquisition, 2, generator=generator(0), num_raw=4, num_restarts=5)


# ------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("d", [1, 2, 6])
def test_ascend_finds_an_inner_maximum(d: int) -> None:
    centre = 0.1 + 0.8 * uniform(d, seed=d)
    lower, upper = torch.zeros(d).double(), torch.ones(d).double()
    points, values = ascend(bowl(centre), uniform(4, d), lower, upper)
    assert points.shape == (4, d)
    torch.testing.assert_close(points, centre.expand(4, d), rtol=0, atol=1e-4)
    assert torch.equal(values, bowl(centre)(points))


@pytest.mark.parametrize("target", [-1.0, 3.0])
def test_ascend_stays_within_its_bounds(target: float) -> None:
    lower = torch.tensor([0.2, 0.4, 0.7]).double()
    upper = torch.tensor([0.3, 0.4, 0.9]).double()  # one side without width
    far = torch.full((3,), target).double()
    points, _ = ascend(bowl(far), uniform(5, 3), lower, upper)
    assert bool(((points >= lower) & (points <= upper)).all())
    edge = lower if target < 0 else upper
    torch.testing.assert_close(points, edge.expand(5, 3), rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_ascend_improves_every_start_and_repeats_itself(seed: int) -> None:
    path, starts = draw(seed).path, uniform(6, 2, seed=seed)
    lower, upper = torch.zeros(2).double(), torch.ones(2).double()
    points, values = ascend(path, starts, lower, upper)
    with torch.no_grad():
        assert bool((values >= path(starts) - 1e-9).all())
        assert float(values.max()) > float(path(starts).max())
    torch.manual_seed(seed)
    again, _ = ascend(path, starts, lower, upper)
    assert torch.equal(points, again)


def test_ascend_does_not_mind_the_scale_of_values() -> None:
    centre = torch.tensor([0.3, 0.8]).double()
    lower, upper = torch.zeros(2).double(), torch.ones(2).double()
    for factor in (1e-9, 1.0, 1e9):
        points, _ = ascend(
            lambda X, factor=factor: factor * bowl(centre)(X), uniform(3, 2), lower, upper
        )
        torch.testing.assert_close(points, centre.expand(3, 2), rtol=0, atol=1e-4)


def test_ascend_leaves_a_flat_function_alone() -> None:
    lower, upper = torch.zeros(2).double(), torch.ones(2).double()
    starts = uniform(3, 2)
    points, values = ascend(lambda X: 0 * X.sum(dim=-1), starts, lower, upper)
    torch.testing.assert_close(points, starts)
    assert not values.any()


def test_failed_points_are_chosen_last_of_all() -> None:
    space = SearchSpace((Parameter.integer("n", 1, 3), Parameter.choice("kind", ["a", "b"])))
    every = space.snap(uniform(200, space.dim)).unique(dim=0)
    assert len(every) == 6

    def best(failed: Tensor, tried: Tensor) -> Tensor:
        point, _ = maximize(
            Given(lambda X: X.sum(dim=-1)),
            space.dim,
            generator=generator(0),
            tried=tried,
            min_distance=0.01,
            failed=failed,
            snap=space.snap,
            num_raw=128,
            num_restarts=4,
        )
        return space.snap(point)

    for left in range(6):
        rest = torch.cat([every[:left], every[left + 1 :]])
        assert torch.equal(best(rest, every[:0]), every[left : left + 1])
    # Points that were tried come before those that failed, and something is chosen in any case.
    assert torch.equal(best(every[1:], every[:1]), every[:1])
    assert bool((every == best(every, every)).all(dim=-1).any())


def test_without_failures_the_point_is_the_same() -> None:
    options: dict[str, Any] = {"num_raw": 64, "num_restarts": 4, "min_distance": 0.05}
    tried = uniform(5, 2)
    points = [
        maximize(draw(0), 2, generator=generator(0), tried=tried, failed=failed, **options)[0]
        for failed in (None, tried[:0])
    ]
    assert torch.equal(*points)
