"""Closed forms of a mixture against samples, single models and finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, UpperConfidenceBound
from botorch.acquisition.analytic import LogProbabilityOfImprovement
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.datasets import SupervisedDataset
from torch import Size, Tensor

import botorch_fed.acquisition.constructors  # noqa: F401 - registers
from botorch_fed.acquisition import ThompsonSampling
from botorch_fed.acquisition.mixture import MixtureEI, MixturePI, MixtureUCB
from botorch_fed.models import BasisGP, LocalBlock
from botorch_fed.models.mixture import LocalSharedMixture, draw_mixture_path
from botorch_fed.rng import generator
from test.cases import UNIT, inducing, normal, random_fourier, uniform

CLASSES: list[Any] = [MixtureUCB, MixtureEI, MixturePI]
NEIGHBOURS = {
    MixtureUCB: UpperConfidenceBound,
    MixtureEI: LogExpectedImprovement,
    MixturePI: LogProbabilityOfImprovement,
}
classes = pytest.mark.parametrize("cls", CLASSES)


def _data() -> tuple[Tensor, Tensor]:
    X = uniform(9, 2)
    return X, (5 * X).sin().sum(dim=-1, keepdim=True) + 0.1 * normal(9, 1)


def _mixture(weight: float | Tensor = 0.3) -> LocalSharedMixture:
    phi, X = inducing(), uniform(25, 2, seed=3)
    total = LocalBlock.from_data(phi, X, (4 * X).cos().sum(-1, keepdim=True), noise_var=0.02)
    shared = BasisGP.from_summary(total.summary, feature_map=phi)
    return LocalSharedMixture(SingleTaskGP(*_data()), shared, weight)


@pytest.mark.parametrize("maximize", [True, False])
def test_values_are_those_of_samples(maximize: bool) -> None:
    model, X, sign = _mixture(), uniform(6, 1, 2, seed=1), 1 if maximize else -1
    n, best = 400_000, 0.3
    with torch.no_grad():
        samples = model.posterior(X).rsample(Size([n]))[..., 0, 0]
        gains = (sign * (samples - best)).clamp_min(0)
        ei = MixtureEI(model, best, maximize=maximize)(X).exp()
        error = (gains.mean(dim=0) - ei) / (gains.std(dim=0) / n**0.5)
        assert float(error.abs().max()) < 5
        pi = MixturePI(model, best, maximize=maximize)(X).exp()
        hits = (gains > 0).double().mean(dim=0)
        error = (hits - pi) / (pi * (1 - pi) / n).sqrt()
        assert float(error.abs().max()) < 5


def test_bound_is_the_weighted_sum_of_bounds() -> None:
    model, X = _mixture(0.3), uniform(4, 1, 2, seed=1)
    for beta, maximize in itertools.product([0.0, 2.0], [True, False]):
        bounds = [
            UpperConfidenceBound(m, torch.tensor(beta).double(), maximize=maximize)(X)
            for m in (model.local, model.shared)
        ]
        expected = 0.3 * bounds[0] + 0.7 * bounds[1]
        torch.testing.assert_close(MixtureUCB(model, beta, maximize=maximize)(X), expected)


@classes
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_certain_weights_are_botorchs(cls: Any, maximize: bool, weight: float) -> None:
    model, X = _mixture(weight), uniform(2, 3, 1, 2, seed=1).requires_grad_()
    setting = torch.tensor(0.7).double()
    one = (model.shared, model.local)[int(weight)]
    ours = cls(model, setting, maximize=maximize)(X)
    expected = NEIGHBOURS[cls](one, setting, maximize=maximize)(X)
    torch.testing.assert_close(ours, expected)
    (gradient,) = torch.autograd.grad(ours.sum(), X)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), X)[0])


@classes
@pytest.mark.parametrize("maximize", [True, False])
def test_gradients(cls: Any, maximize: bool) -> None:
    acquisition = cls(_mixture(), 1.5, maximize=maximize)
    X = uniform(3, 1, 2, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(acquisition, (X,), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cls", [MixtureEI, MixturePI])
def test_logarithms_stay_finite(cls: Any) -> None:
    assert cls._log
    for weight, best in itertools.product([0.0, 0.3, 1e-300, 1.0], [1e2, 1e4, 1e8]):
        X = uniform(4, 1, 2, seed=1).requires_grad_()
        values = cls(_mixture(weight), best)(X)
        assert bool(values.isfinite().all())
        assert float(values.detach().exp().max()) == 0  # what the plain form would have given
        (gradient,) = torch.autograd.grad(values.sum(), X)
        assert bool(gradient.isfinite().all())
        assert bool((gradient != 0).any(dim=-1).all())  # and the optimiser has a direction


def test_hopeless_component_does_not_matter() -> None:
    # One model is sure that nothing improves, the other is not: its share is all there is.
    X, Y = _data()
    low = BasisGP(X, Y - 1e3, feature_map=random_fourier(), noise_var=1e-3, mean=-1e3)
    local = SingleTaskGP(X, Y)
    points = uniform(5, 1, 2, seed=1)
    for w in (0.3, 1e-200):
        mixed = MixtureEI(LocalSharedMixture(local, low, w), Y.max())(points)
        alone = LogExpectedImprovement(local, Y.max())(points)
        torch.testing.assert_close(mixed, alone + math.log(w))


@classes
def test_batches(cls: Any) -> None:
    model, X = _mixture(), uniform(2, 3, 1, 2, seed=1)
    values = cls(model, 0.7)(X)
    assert values.shape == (2, 3)
    assert cls(model, 0.7)(X[0, 0]).shape == (1,)
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(values[i, j], cls(model, 0.7)(X[i, j])[0])
    settings = torch.tensor([0.2, 0.7, 1.4]).double()  # one for each of the last batch dimension
    several = cls(model, settings)(X)
    for j in range(3):
        torch.testing.assert_close(several[:, j], cls(model, settings[j])(X[:, j]))
    weights = torch.tensor([0.0, 0.4, 1.0]).double()
    several = cls(_mixture(weights), 0.7)(X)
    for j in range(3):
        torch.testing.assert_close(several[:, j], cls(_mixture(weights[j]), 0.7)(X[:, j]))
    with pytest.raises(AssertionError, match="q=1"):
        cls(model, 0.7)(uniform(3, 2, 2))


@classes
def test_fantasies_are_batches(cls: Any) -> None:
    model = _mixture().fantasize(uniform(2, 2, seed=4), SobolQMCNormalSampler(Size([3])))
    assert cls(model, 0.7)(uniform(3, 1, 2)).shape == (3,)


@classes
def test_posterior_transform(cls: Any) -> None:
    X, Y = _data()
    both = torch.cat([Y, -2 * Y], dim=-1)
    maps = random_fourier(), inducing()
    model = LocalSharedMixture(*(BasisGP(X, both, feature_map=phi) for phi in maps), 0.3)
    with pytest.raises(UnsupportedError, match="posterior transform"):
        cls(model, 0.5)
    points = uniform(4, 1, 2, seed=1)
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, 0.0]).double())
    first = model.subset_output([0])
    torch.testing.assert_close(
        cls(model, 0.5, posterior_transform=transform)(points), cls(first, 0.5)(points)
    )
    # Ax minimises by a weight of -1.
    minus = ScalarizedPosteriorTransform(torch.tensor([-1.0]).double())
    best = 0.5 if cls is MixtureUCB else -0.5
    torch.testing.assert_close(
        cls(first, best, posterior_transform=minus)(points),
        cls(first, 0.5, maximize=False)(points),
    )


@classes
def test_optimize_acqf_with_transforms(cls: Any) -> None:
    X, Y = _data()
    bounds = torch.tensor([[-1.0, 0.0], [3.0, 10.0]]).double()
    wide = bounds[0] + X * (bounds[1] - bounds[0])
    local = SingleTaskGP(
        wide, 5 + 3 * Y, input_transform=Normalize(2), outcome_transform=Standardize(m=1)
    )
    shared = BasisGP(
        wide,
        5 + 3 * Y,
        feature_map=inducing(),
        input_transform=Normalize(2, bounds=bounds),
        mean=5.0,
    )
    setting = 2.0 if cls is MixtureUCB else 5 + 3 * Y.max()
    acquisition = cls(LocalSharedMixture(local, shared, 0.4), setting)
    candidates, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=32)
    assert candidates.shape == (1, 2)
    grid = bounds[0] + uniform(500, 1, 2, seed=5) * (bounds[1] - bounds[0])
    with torch.no_grad():
        assert float(value) >= float(acquisition(grid).max()) - 1e-6


def test_thompson_sampling_of_a_mixture() -> None:
    model = _mixture()
    for q in (1, 3):
        shape = Size([q]) if q > 1 else Size()
        path = draw_mixture_path(model, shape, generator=generator(2))
        candidates, _ = optimize_acqf(
            ThompsonSampling(path), UNIT, q=q, num_restarts=4, raw_samples=64
        )
        assert candidates.shape == (q, 2)
        # Every draw is maximised at its own point.
        grid = uniform(300, 2, seed=5)
        with torch.no_grad():
            reached = path(candidates).diagonal() if q > 1 else path(candidates)
            assert bool((reached >= torch.quantile(path(grid), 0.98, dim=-1)).all())


def test_input_constructors() -> None:
    (X, Y), model = _data(), _mixture()
    data = SupervisedDataset(X, Y, feature_names=["a", "b"], outcome_names=["y"])
    points = uniform(3, 1, 2, seed=1)
    for cls in CLASSES:
        construct = get_acqf_input_constructor(cls)
        given = {} if cls is MixtureUCB else {"training_data": data}
        acquisition = cls(**construct(model=model, **given))
        assert acquisition(points).shape == (3,)
        with pytest.raises(UnsupportedError, match="pending points, 2 were given"):
            construct(model=model, X_pending=X[:2], **given)
    construct = get_acqf_input_constructor(MixtureEI)
    assert float(construct(model=model, training_data=data)["best_f"]) == float(Y.max())
    minus = ScalarizedPosteriorTransform(torch.tensor([-1.0]).double())
    inputs = construct(model=model, training_data=data, posterior_transform=minus)
    assert float(inputs["best_f"]) == float(-Y.min())
    assert construct(model=model, training_data=data, best_f=0.5)["best_f"] == 0.5
    with pytest.raises(InputDataError, match="Give best_f for minimisation"):
        construct(model=model, training_data=data, maximize=False)
    assert get_acqf_input_constructor(MixtureUCB)(model=model, beta=1.5)["beta"] == 1.5
    inputs = get_acqf_input_constructor(ThompsonSampling)(model=model, q=2, generator=generator(0))
    assert ThompsonSampling(**inputs)(uniform(4, 2, 2)).shape == (4,)


@classes
def test_what_is_refused(cls: Any) -> None:
    model = _mixture()
    with pytest.raises(UnsupportedError, match="needs a LocalSharedMixture, got SingleTaskGP"):
        cls(model.local, 0.5)
    with pytest.raises(InputDataError, match="1 NaN"):
        cls(model, torch.nan)
    with pytest.raises(UnsupportedError, match="X_pending"):
        cls(model, 0.5).set_X_pending(uniform(1, 2))
    with pytest.raises(InputDataError, match="beta must not be negative"):
        MixtureUCB(model, -1.0)
