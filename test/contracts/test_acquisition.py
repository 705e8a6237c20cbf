"""What BoTorch may expect of every acquisition function, and of every model behind one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    AcquisitionFunction,
    LogExpectedImprovement,
    PosteriorMean,
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from torch import Size, Tensor

from botorch_fed.acquisition import (
    ThompsonSampling,
    TransferAcquisition,
    weight_path,
)
from botorch_fed.acquisition.mixture import MixtureEI, MixturePI, MixtureUCB
from botorch_fed.models import (
    BasisGP,
    FeatureMap,
    LocalBlock,
    Summary,
    draw_path,
    summarize,
)
from botorch_fed.models.ensemble import RankingEnsemble
from botorch_fed.models.message_prior import MessagePriorGP
from botorch_fed.models.mixture import LocalSharedMixture, MixturePosterior, draw_mixture_path
from botorch_fed.rng import generator
from test.cases import UNIT, inducing, normal, random_fourier, uniform

N = 5


def _data() -> tuple[Tensor, Tensor]:
    X = uniform(9, 2)
    return X, (5 * X).sin().sum(dim=-1, keepdim=True) + 0.1 * normal(9, 1)


def _agents(phi: FeatureMap) -> tuple[Summary, Tensor]:
    X = uniform(N, 12, 2, seed=1)
    Y = (5 * X).sin().sum(dim=-1, keepdim=True) + 0.5 * normal(N, 12, 1)
    summary = summarize(phi, X, Y, noise_var=0.02)
    return Summary(summary.gram, summary.moment, summary.basis), Y.amax(dim=(-2, -1)) - 0.5


# ------------------------------------------------------------------ the models


def ensemble(make_map: Callable[[], FeatureMap] = random_fourier) -> Model:
    phi = make_map()
    return RankingEnsemble(
        SingleTaskGP(*_data()), _agents(phi)[0], feature_map=phi, generator=generator(0)
    )


def ensemble_with_residual() -> Model:
    return ensemble(inducing)


def ensemble_over_basis() -> Model:
    phi = random_fourier()
    target = BasisGP(*_data(), feature_map=phi)
    return RankingEnsemble(target, _agents(phi)[0], feature_map=phi, generator=generator(0))


def ensemble_of_agents_only() -> Model:
    model = ensemble()
    model.target_weight = 0.0  # legal, but no draw of the weights is sure to give it
    return model


def messages() -> Model:
    phi = random_fourier()
    return MessagePriorGP(*_data(), feature_map=phi, weights=0.5 * normal(N, 60))


def mixture() -> LocalSharedMixture:
    phi, X = inducing(), uniform(30, 2, seed=1)
    Y = (5 * X).sin().sum(dim=-1, keepdim=True)
    total = LocalBlock.from_data(phi, X, Y, noise_var=0.02).summary
    shared = BasisGP.from_summary(total, feature_map=phi)
    return LocalSharedMixture(SingleTaskGP(*_data()), shared, 0.6)


MODELS = [
    ensemble,
    ensemble_with_residual,
    ensemble_over_basis,
    ensemble_of_agents_only,
    messages,
    mixture,
]
models = pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)


# ------------------------------------------------------------------ the acquisition functions


def received_draw(q: int) -> AcquisitionFunction:
    return ThompsonSampling(weight_path(random_fourier(), normal(q, 60)))


def own_draw(q: int) -> AcquisitionFunction:
    sample_shape = Size([q]) if q > 1 else Size()
    path = draw_path(SingleTaskGP(*_data()), sample_shape, generator=generator(0))
    return ThompsonSampling(path)


def transfer(q: int) -> AcquisitionFunction:
    phi, (X, Y) = random_fourier(), _data()
    summaries, incumbents = _agents(phi)
    return TransferAcquisition(
        SingleTaskGP(X, Y), Y.max(), summaries=summaries, feature_map=phi, incumbents=incumbents
    )


def improvement_of_ensemble(q: int) -> AcquisitionFunction:
    return LogExpectedImprovement(ensemble(), _data()[1].max())


def batch_improvement_of_ensemble(q: int) -> AcquisitionFunction:
    return qLogExpectedImprovement(ensemble(), _data()[1].max(), _sampler())


def improvement_of_messages(q: int) -> AcquisitionFunction:
    return LogExpectedImprovement(messages(), _data()[1].max())


def batch_improvement_of_messages(q: int) -> AcquisitionFunction:
    return qLogExpectedImprovement(messages(), _data()[1].max(), _sampler())


def draw_of_mixture(q: int) -> AcquisitionFunction:
    sample_shape = Size([q]) if q > 1 else Size()
    return ThompsonSampling(draw_mixture_path(mixture(), sample_shape, generator=generator(3)))


def batch_improvement_of_mixture(q: int) -> AcquisitionFunction:
    return qLogExpectedImprovement(mixture(), _data()[1].max(), _sampler())


def matched_improvement_of_mixture(q: int) -> AcquisitionFunction:
    return LogExpectedImprovement(mixture(), _data()[1].max())


def improvement_of_mixture(q: int) -> AcquisitionFunction:
    return MixtureEI(mixture(), _data()[1].max())


def probability_of_mixture(q: int) -> AcquisitionFunction:
    return MixturePI(mixture(), _data()[1].max())


def bound_of_mixture(q: int) -> AcquisitionFunction:
    return MixtureUCB(mixture(), beta=2.0)


def _sampler() -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(Size([32]), seed=0)


BATCHES: list[Any] = [
    received_draw,
    own_draw,
    batch_improvement_of_ensemble,
    batch_improvement_of_messages,
    draw_of_mixture,
    batch_improvement_of_mixture,
]
SINGLES: list[Any] = [
    transfer,
    improvement_of_ensemble,
    improvement_of_messages,
    matched_improvement_of_mixture,
    improvement_of_mixture,
    probability_of_mixture,
    bound_of_mixture,
]
MIXTURES = (MixtureEI, MixturePI, MixtureUCB)
CASES = [(make, q) for make in BATCHES for q in (1, 2)] + [(make, 1) for make in SINGLES]
acquisitions = pytest.mark.parametrize(
    ("make", "q"), CASES, ids=[f"{make.__name__}-{q}" for make, q in CASES]
)


@acquisitions
@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 3)])
def test_value_shape(make: Any, q: int, batch_shape: tuple[int, ...]) -> None:
    acquisition = make(q)
    X = uniform(*batch_shape, q, 2, seed=2)
    values = acquisition(X)
    # BoTorch's habit: points without batch dimensions are a batch of one.
    assert values.shape == (batch_shape or (1,))
    assert values.dtype == torch.float64
    assert bool(values.isfinite().all())
    flat = X.reshape(-1, q, 2)
    one_by_one = torch.cat([acquisition(x).reshape(1) for x in flat])
    torch.testing.assert_close(values.reshape(-1), one_by_one)


@acquisitions
def test_gradients(make: Any, q: int) -> None:
    X = uniform(3, q, 2, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(make(q), (X,), atol=1e-5, rtol=1e-4)


@acquisitions
def test_optimize_acqf(make: Any, q: int) -> None:
    acquisition = make(q)
    options = {"maxiter": 10}
    candidates, value = optimize_acqf(
        acquisition, UNIT, q=q, num_restarts=3, raw_samples=32, options=options
    )
    assert candidates.shape == (q, 2)
    assert bool(((candidates >= 0) & (candidates <= 1)).all())
    with torch.no_grad():
        typical = acquisition(uniform(50, q, 2, seed=5)).median()
    assert float(value) > float(typical)


@acquisitions
@pytest.mark.filterwarnings("ignore:.*stays in float64")  # BoTorch casts models to the points
def test_float32_points_are_promoted(make: Any, q: int) -> None:
    acquisition = make(q)
    X = uniform(3, q, 2, seed=2).float()
    values = acquisition(X)
    assert values.dtype == torch.float64
    # BoTorch's own functions round their incumbent to the points' precision; ours round nothing.
    ours = isinstance(acquisition, (ThompsonSampling, TransferAcquisition, *MIXTURES))
    rtol = 1e-12 if ours else 1e-4
    torch.testing.assert_close(values, make(q)(X.double()), rtol=rtol, atol=0)


@acquisitions
def test_copies(make: Any, q: int) -> None:
    acquisition, X = make(q), uniform(3, q, 2, seed=2)
    for other in [copy.deepcopy(acquisition), pickle.loads(pickle.dumps(acquisition))]:
        torch.testing.assert_close(other(X), acquisition(X))


@pytest.mark.parametrize("cls", [ThompsonSampling, TransferAcquisition, *MIXTURES])
def test_input_constructors_are_found(cls: type[AcquisitionFunction]) -> None:
    assert callable(get_acqf_input_constructor(cls))


# ------------------------------------------------------------------ the models' posteriors


@models
@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("q", [1, 3])
def test_posterior_shapes(make: Any, batch_shape: tuple[int, ...], q: int) -> None:
    model = make()
    assert model.num_outputs == 1
    assert model.batch_shape == Size()
    X = uniform(*batch_shape, q, 2, seed=2)
    for noise in [False, True]:
        posterior = model.posterior(X, observation_noise=noise)
        assert isinstance(posterior, (GPyTorchPosterior, MixturePosterior))
        assert posterior.mean.shape == posterior.variance.shape == (*batch_shape, q, 1)
        assert posterior.rsample(Size([5])).shape == (5, *batch_shape, q, 1)
        assert bool((posterior.variance > 0).all())


@models
def test_posterior_gradients(make: Any) -> None:
    model, X = make(), uniform(2, 2, seed=1).requires_grad_()

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.posterior(x)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, (X,))


@models
def test_posterior_of_float32_points(make: Any) -> None:
    model, X = make(), uniform(3, 2, seed=1).float()
    posterior = model.posterior(X)
    assert posterior.mean.dtype == torch.float64
    torch.testing.assert_close(posterior.mean, model.posterior(X.double()).mean)


@models
@pytest.mark.filterwarnings("ignore:A not p.d., added jitter")  # BoTorch's, of a smooth kernel
def test_many_points_can_be_sampled_jointly(make: Any) -> None:
    model, X = make(), uniform(150, 2, seed=1)
    with torch.no_grad():
        posterior = model.posterior(X)
        samples = posterior.rsample(Size([3000]))
    error = (samples.mean(dim=0) - posterior.mean) / (posterior.variance / 3000).sqrt()
    assert float(error.abs().max()) < 5


@models
def test_posterior_transform_and_model_list(make: Any) -> None:
    model, X = make(), uniform(4, 2, seed=1)
    halved = ScalarizedPosteriorTransform(torch.tensor([0.5]).double())
    posterior = model.posterior(X, posterior_transform=halved)
    torch.testing.assert_close(posterior.mean, 0.5 * model.posterior(X).mean)
    both = ModelListGP(model, SingleTaskGP(*_data()))
    assert both.posterior(X).mean.shape == (4, 2)


@models
def test_botorchs_acquisition_functions(make: Any) -> None:
    model, X = make(), _data()[0]
    for acquisition in [
        UpperConfidenceBound(model, beta=2.0),
        PosteriorMean(model),
        qLogNoisyExpectedImprovement(model, X, _sampler(), X_pending=uniform(2, 2, seed=8)),
        qKnowledgeGradient(model, num_fantasies=3),
    ]:
        candidates, value = optimize_acqf(
            acquisition, UNIT, q=1, num_restarts=2, raw_samples=8, options={"maxiter": 3}
        )
        assert candidates.shape == (1, 2)
        assert bool(value.isfinite())
