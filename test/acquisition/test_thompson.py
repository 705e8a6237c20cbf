"""Thompson sampling maximises the functions that were drawn."""

from __future__ import annotations

import pytest
import torch
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models import SingleTaskGP
from botorch.models.deterministic import GenericDeterministicModel
from botorch.optim import optimize_acqf
from botorch.sampling.pathwise import draw_matheron_paths
from torch import Size, Tensor

from botorch_fed.acquisition import Partition, ThompsonSampling, weight_path
from botorch_fed.models import BasisGP, draw_path
from botorch_fed.rng import generator
from test.cases import UNIT, normal, random_fourier, uniform


def _data() -> tuple[Tensor, Tensor]:
    X = uniform(10, 2)
    return X, 7 + 3 * (5 * X).sin().sum(dim=-1, keepdim=True)


def test_weight_path_is_the_function_of_the_weights() -> None:
    phi, w, X = random_fourier(), normal(3, 60), uniform(4, 5, 2)
    path = weight_path(phi, w[0], mean=0.7)
    torch.testing.assert_close(path(X), 0.7 + phi(X) @ w[0])
    draws = weight_path(phi, w, mean=0.7)
    assert draws(X[0]).shape == (3, 5)
    torch.testing.assert_close(draws(X[0]), 0.7 + w @ phi(X[0]).mT)


@pytest.mark.parametrize("q", [1, 2, 3])
def test_value_is_the_sum_of_draws(q: int) -> None:
    phi, w, X = random_fourier(), normal(q, 60), uniform(4, 5, q, 2)
    acquisition = ThompsonSampling(weight_path(phi, w, mean=0.7))
    expected = sum(0.7 + phi(X[..., j, :]) @ w[j] for j in range(q))
    torch.testing.assert_close(acquisition(X), expected)
    torch.testing.assert_close(acquisition(X[0, 0]), acquisition(X)[0, :1])


@pytest.mark.parametrize("q", [1, 3])
def test_agrees_with_pathwise_thompson_sampling(q: int) -> None:
    # The same drawn paths, through BoTorch's class and through ours.
    model, X = SingleTaskGP(*_data()), uniform(4, 5, q, 2)
    path = draw_matheron_paths(model, Size([q]))
    reference = PathwiseThompsonSampling(model)
    reference.batch_size = q
    reference.samples = GenericDeterministicModel(lambda X: path(X).unsqueeze(-1))
    torch.testing.assert_close(ThompsonSampling(path)(X), reference(X))


@pytest.mark.parametrize("q", [1, 2])
def test_finds_the_maximum_of_every_draw(q: int) -> None:
    model = SingleTaskGP(*_data())
    path = draw_path(model, Size([q]), generator=generator(0, "draw"))
    X, value = optimize_acqf(ThompsonSampling(path), UNIT, q=q, num_restarts=8, raw_samples=128)
    steps = torch.linspace(0, 1, 60).double()
    grid = torch.cartesian_prod(steps, steps)
    best = path(grid).amax(dim=-1).sum()
    assert float(value) >= float(best) - 1e-6
    torch.testing.assert_close(path(X).diagonal().sum(), value)


def test_pending_points_and_copies_change_nothing() -> None:
    X = uniform(4, 1, 2)
    acquisition = ThompsonSampling(weight_path(random_fourier(), normal(60)))
    before = acquisition(X)
    acquisition.set_X_pending(uniform(2, 2))
    assert torch.equal(acquisition(X), before)
    model_values = acquisition.model.posterior(X).mean.squeeze(-1).squeeze(-1)
    torch.testing.assert_close(model_values, before)


@pytest.mark.parametrize("num_regions", [1, 3, 4, 64])
def test_every_region_has_its_own_function(num_regions: int) -> None:
    phi, w, X = random_fourier(), normal(num_regions, 60), uniform(4, 50, 1, 2)
    partition = Partition.regular(num_regions, 2)
    acquisition = ThompsonSampling(weight_path(phi, w, mean=0.7), partition)
    own = w[partition.region_of(X.squeeze(-2))]  # 4 x 50 x 60
    expected = 0.7 + (phi(X.squeeze(-2)) * own).sum(dim=-1)
    torch.testing.assert_close(acquisition(X), expected)
    torch.testing.assert_close(acquisition.model.posterior(X).mean.flatten(), expected.flatten())


def test_regions_of_posterior_draws() -> None:
    X, partition = uniform(40, 1, 2), Partition.regular(2, 2)
    path = draw_path(SingleTaskGP(*_data()), Size([2]), generator=generator(0, "draw"))
    values = path(X.squeeze(-2))
    expected = torch.where(X[:, 0, 0] < 0.5, values[0], values[1])
    torch.testing.assert_close(ThompsonSampling(path, partition)(X), expected)


def test_one_region_is_the_whole_cube() -> None:
    phi, w, X = random_fourier(), normal(60), uniform(30, 1, 2)
    regional = ThompsonSampling(weight_path(phi, w.unsqueeze(0)), Partition.regular(1, 2))
    torch.testing.assert_close(regional(X), ThompsonSampling(weight_path(phi, w))(X))


def test_gradients_are_those_of_the_own_function() -> None:
    phi, w, partition = random_fourier(), normal(4, 60), Partition.regular(4, 2)
    X = uniform(20, 1, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(ThompsonSampling(weight_path(phi, w), partition)(X).sum(), X)
    for i in range(4):
        (own,) = torch.autograd.grad(ThompsonSampling(weight_path(phi, w[i]))(X).sum(), X)
        mine = partition.region_of(X.squeeze(-2)) == i
        torch.testing.assert_close(gradient[mine], own[mine])


def test_bad_regions() -> None:
    phi, partition = random_fourier(), Partition.regular(4, 2)
    for w in [normal(60), normal(3, 60), normal(1, 60), normal(4, 4, 60)]:
        with pytest.raises(BotorchTensorDimensionError, match="4 regions needs as many functions"):
            ThompsonSampling(weight_path(phi, w), partition)(uniform(4, 1, 2))
    regional = ThompsonSampling(weight_path(phi, normal(4, 60)), partition)
    with pytest.raises(BotorchTensorDimensionError, match="needs q = 1, got q = 4"):
        regional(uniform(4, 4, 2))
    with pytest.raises(InputDataError, match="lie in no region"):
        regional(1 + uniform(4, 1, 2))


def test_input_constructor_draws_reproducibly() -> None:
    constructor = get_acqf_input_constructor(ThompsonSampling)
    X, Y = _data()
    for model in [SingleTaskGP(X, Y), BasisGP(X, Y, feature_map=random_fourier())]:
        for q in [1, 2]:
            test_X = uniform(3, q, 2)
            values = [
                ThompsonSampling(**constructor(model=model, q=q, generator=generator(3)))(test_X)
                for _ in range(2)
            ]
            assert torch.equal(values[0], values[1])
    path = weight_path(random_fourier(), normal(60))
    assert constructor(model=model, path=path)["path"] is path


def test_bad_input() -> None:
    phi = random_fourier()
    with pytest.raises(InputDataError, match="must be a BoTorch SamplePath, got Tensor"):
        ThompsonSampling(normal(60))  # type: ignore[arg-type]
    with pytest.raises(BotorchTensorDimensionError, match="over another basis"):
        weight_path(phi, normal(59))
    with pytest.raises(InputDataError, match="1 NaN"):
        weight_path(phi, torch.cat([normal(59), torch.tensor([torch.nan]).double()]))
    single, pair = weight_path(phi, normal(60)), weight_path(phi, normal(2, 60))
    for path, q in [(single, 2), (pair, 1), (pair, 3), (weight_path(phi, normal(2, 2, 60)), 2)]:
        with pytest.raises(BotorchTensorDimensionError, match=f"q = {q} points needs {q} draws"):
            ThompsonSampling(path)(uniform(4, q, 2))
    with pytest.raises(BotorchTensorDimensionError, match="sequential=False"):
        optimize_acqf(
            ThompsonSampling(pair), UNIT, q=2, num_restarts=1, raw_samples=2, sequential=True
        )
