"""Coordinate ascent on the bound of an additive model."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from botorch.acquisition.analytic import UpperConfidenceBound
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError

from botorch_fed.acquisition import AdditiveGrid
from botorch_fed.models import (
    AdditiveFeatures,
    BasisGP,
    KLFeatures,
    QuadratureFourierFeatures,
    StationaryKernel,
    WeightPosterior,
    summarize,
)
from botorch_fed.rng import generator

AXIS = torch.linspace(0, 1, 7).double()


def additive(dim: int, *, constant: bool = False) -> AdditiveFeatures:
    bounds = torch.tensor([[0.0], [1.0]]).double()
    kernel = StationaryKernel(math.inf, [0.4])
    base = QuadratureFourierFeatures.from_kernel(kernel, bounds, tol=1e-4)
    part = KLFeatures.from_map(base, torch.linspace(0, 1, 50).double()[:, None], num_features=4)
    maps, groups = [part] * dim, [[j] for j in range(dim)]
    if constant:
        flat = StationaryKernel(math.inf, [1e3])
        level = QuadratureFourierFeatures.from_kernel(flat, bounds, tol=0.1)
        maps.append(KLFeatures.from_map(level, bounds[1:] * 0.5, num_features=1))
        groups.append([0])
    return AdditiveFeatures(maps, groups)


def posterior(phi: AdditiveFeatures, seed: int, n: int = 12) -> tuple[WeightPosterior, BasisGP]:
    stream = generator(seed, "data")
    X, Y = stream.uniform(n, phi.input_dim), stream.normal(n, 1)
    total = summarize(phi, X, Y, noise_var=0.1)
    return WeightPosterior.from_total(total), BasisGP.from_summary(total, feature_map=phi)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_ends_where_no_coordinate_improves_and_tells_the_bound(seed: int, constant: bool) -> None:
    phi = additive(3, constant=constant)
    weights, model = posterior(phi, seed)
    ucb = UpperConfidenceBound(model, beta=1.5**2)
    grid = AdditiveGrid(phi, AXIS)
    point, value = grid.maximize_ucb(
        weights, exploration=1.5, generator=generator(seed, "start"), sweeps=50
    )
    assert value == pytest.approx(float(ucb(point)), rel=1e-9)
    for j, candidate in product(range(3), AXIS):
        moved = point.clone()
        moved[0, j] = candidate
        assert float(ucb(moved)) <= value + 1e-9


def test_finds_the_best_point_of_a_separable_bound() -> None:
    phi = additive(3)
    weights, model = posterior(phi, 0, n=40)
    point, value = AdditiveGrid(phi, AXIS).maximize_ucb(
        weights, exploration=0.0, generator=generator(1)
    )
    everything = torch.cartesian_prod(AXIS, AXIS, AXIS)
    with torch.no_grad():
        mean = model.posterior(everything).mean.squeeze(-1)
    assert torch.equal(point[0], everything[mean.argmax()])
    assert value == pytest.approx(float(mean.max()), rel=1e-9)


def test_a_start_is_kept_where_it_is_best_and_streams_fix_the_result() -> None:
    phi = additive(4)
    weights, _ = posterior(phi, 3)
    grid = AdditiveGrid(phi, [AXIS, AXIS[:3], AXIS[2:], AXIS])
    first, value = grid.maximize_ucb(weights, exploration=1.0, generator=generator(5), sweeps=50)
    again, same = grid.maximize_ucb(
        weights, exploration=1.0, generator=generator(6), start=first, sweeps=50
    )
    assert torch.equal(first, again)
    assert same == pytest.approx(value, rel=1e-12)
    repeated, _ = grid.maximize_ucb(weights, exploration=1.0, generator=generator(5), sweeps=50)
    assert torch.equal(first, repeated)
    assert first[0, 1] in AXIS[:3]
    assert first[0, 2] in AXIS[2:]


def test_refusals() -> None:
    phi = additive(2)
    weights, _ = posterior(phi, 0)
    grid = AdditiveGrid(phi, AXIS)
    with pytest.raises(UnsupportedError, match="Expected AdditiveFeatures"):
        AdditiveGrid(phi.maps[0], AXIS)  # type: ignore[arg-type]
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    pair = QuadratureFourierFeatures.from_kernel(
        StationaryKernel(math.inf, [1.0, 1.0]), bounds, tol=1e-2
    )
    with pytest.raises(UnsupportedError, match="one input"):
        AdditiveGrid(AdditiveFeatures([pair]), AXIS)
    with pytest.raises(BotorchTensorDimensionError, match="2 of them"):
        AdditiveGrid(phi, [AXIS])
    with pytest.raises(BotorchTensorDimensionError, match="8 weights"):
        grid.maximize_ucb(posterior(additive(3), 0)[0], exploration=1.0, generator=generator(0))
    with pytest.raises(BotorchTensorDimensionError, match="1 x 2"):
        grid.maximize_ucb(weights, exploration=1.0, generator=generator(0), start=torch.zeros(2))
    with pytest.raises(InputDataError, match="sweeps"):
        grid.maximize_ucb(weights, exploration=1.0, generator=generator(0), sweeps=0)
