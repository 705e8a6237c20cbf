"""What BoTorch may expect of every model of this package.

The checks restate the intent of BoTorch's own model tests (`TestGPRegressionBase`), which hard-code
kernels and float32 equality.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    PosteriorMean,
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.objective import LinearMCObjective, ScalarizedPosteriorTransform
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.exceptions.warnings import InputDataWarning
from botorch.generation import MaxPosteriorSampling
from botorch.models import ModelListGP
from botorch.models.model import Model
from botorch.models.transforms import Normalize, Standardize
from botorch.models.transforms.outcome import Log
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from torch import Tensor

from botorch_fed.models import BasisGP, FeatureMap
from botorch_fed.models.mixture import LocalSharedMixture, MixturePosterior
from test.cases import UNIT, additive, inducing, normal, quadrature, random_fourier, uniform

N = 9


def _basis_gp(make_map: Callable[[], FeatureMap]) -> Callable[..., BasisGP]:
    def make(X: Tensor, Y: Tensor, Yvar: Tensor | None = None, **kwargs: Any) -> BasisGP:
        if Yvar is None:
            kwargs.setdefault("noise_var", 0.02)
        kwargs.setdefault("mean", 0.3)
        return BasisGP(X, Y, Yvar, feature_map=make_map(), **kwargs)

    return make


MODELS = [_basis_gp(f) for f in (random_fourier, quadrature, inducing, additive)]
models = pytest.mark.parametrize(
    "make", MODELS, ids=["random", "quadrature", "inducing", "additive"]
)


def _mixture(X: Tensor, Y: Tensor, Yvar: Tensor | None = None, **kwargs: Any) -> LocalSharedMixture:
    maps = random_fourier, inducing
    local, shared = (_basis_gp(make_map)(X, Y, Yvar, **kwargs) for make_map in maps)
    return LocalSharedMixture(local, shared, 0.3)


# With the mixture of two: all but what looks at the data and hyperparameters of one.
every_model = pytest.mark.parametrize(
    "make", [*MODELS, _mixture], ids=["random", "quadrature", "inducing", "additive", "mixture"]
)
batches = pytest.mark.parametrize("batch_shape", [(), (2,), (2, 3)])
outputs = pytest.mark.parametrize("m", [1, 2])


def _data(batch_shape: tuple[int, ...] = (), m: int = 1, n: int = N) -> tuple[Tensor, Tensor]:
    return uniform(*batch_shape, n, 2), normal(*batch_shape, n, m)


def _close(first: Any, second: Any, tol: float = 1e-8) -> None:
    torch.testing.assert_close(first.mean, second.mean, rtol=tol, atol=tol)
    torch.testing.assert_close(
        first.distribution.covariance_matrix,
        second.distribution.covariance_matrix,
        rtol=tol,
        atol=tol,
    )


# ------------------------------------------------------------------ posterior


@every_model
@batches
@outputs
@pytest.mark.parametrize("q", [1, 3])
def test_posterior_shapes(make: Any, batch_shape: tuple[int, ...], m: int, q: int) -> None:
    model = make(*_data(batch_shape, m))
    assert model.num_outputs == m
    assert model.batch_shape == torch.Size(batch_shape)
    for test_batch in [batch_shape, (4, *batch_shape), (1,) * len(batch_shape), ()]:
        X = uniform(*test_batch, q, 2, seed=1)
        expected = (*torch.broadcast_shapes(test_batch, batch_shape), q, m)
        for noise in [False, True]:
            posterior = model.posterior(X, observation_noise=noise)
            assert isinstance(posterior, (GPyTorchPosterior, MixturePosterior))
            assert posterior.mean.shape == expected
            assert posterior.variance.shape == expected
            assert posterior.rsample(torch.Size([5])).shape == (5, *expected)
    with torch.no_grad():
        assert not model.posterior(X).mean.requires_grad


@every_model
@outputs
def test_batch_is_a_loop(make: Any, m: int) -> None:
    X, Y = _data((2, 3), m)
    test_X = uniform(2, 3, 4, 2, seed=1)
    posterior = make(X, Y).posterior(test_X)
    for i in range(2):
        for j in range(3):
            single = make(X[i, j], Y[i, j]).posterior(test_X[i, j])
            torch.testing.assert_close(posterior.mean[i, j], single.mean)
            torch.testing.assert_close(posterior.variance[i, j], single.variance)
    many = uniform(5, 4, 2, seed=2)
    model = make(X[0, 0], Y[0, 0])
    batch = model.posterior(many)
    for i in range(5):
        torch.testing.assert_close(batch.mean[i], model.posterior(many[i]).mean)


@every_model
def test_outputs_are_independent_models(make: Any) -> None:
    X, Y = _data(m=2)
    test_X = uniform(4, 2, seed=1)
    both = make(X, Y).posterior(test_X)
    for i in range(2):
        one = make(X, Y[:, [i]]).posterior(test_X)
        torch.testing.assert_close(both.mean[:, [i]], one.mean)
        torch.testing.assert_close(both.variance[:, [i]], one.variance)
        chosen = make(X, Y).posterior(test_X, output_indices=[i])
        torch.testing.assert_close(chosen.mean, one.mean)


@every_model
@outputs
def test_noise_adds_exactly(make: Any, m: int) -> None:
    model, X = make(*_data(m=m)), uniform(3, 2, seed=1)
    quiet = model.posterior(X)
    noisy = model.posterior(X, observation_noise=True)
    torch.testing.assert_close(noisy.mean, quiet.mean)
    torch.testing.assert_close(noisy.variance, quiet.variance + 0.02)
    given = 0.1 + uniform(3, m)
    noisy = model.posterior(X, observation_noise=given)
    torch.testing.assert_close(noisy.variance, quiet.variance + given)
    with pytest.raises(BotorchTensorDimensionError, match="observation_noise must be"):
        model.posterior(X, observation_noise=torch.ones(3, m + 1).double())


@every_model
def test_gradients_to_points(make: Any) -> None:
    model = make(*_data())
    X = uniform(2, 2, seed=1).requires_grad_()

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.posterior(x)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, (X,))


@every_model
def test_fixed_base_samples_are_deterministic(make: Any) -> None:
    model, X = make(*_data()), uniform(3, 2, seed=1)
    sampler = SobolQMCNormalSampler(torch.Size([8]), seed=1)
    assert torch.equal(sampler(model.posterior(X)), sampler(model.posterior(X)))


@every_model
@pytest.mark.filterwarnings("ignore:A not p.d., added jitter")  # BoTorch's, of a smooth kernel
def test_more_points_than_features(make: Any) -> None:
    model, X = make(*_data()), uniform(200, 2, seed=1)
    with torch.no_grad():
        posterior = model.posterior(X)
        samples = posterior.rsample(torch.Size([4000]))
    error = (samples.mean(dim=0) - posterior.mean) / (posterior.variance / 4000).sqrt()
    assert float(error.abs().max()) < 5
    assert MaxPosteriorSampling(model)(X, num_samples=3).shape == (3, 2)


@every_model
def test_posterior_transform(make: Any) -> None:
    model, X = make(*_data(m=2)), uniform(3, 2, seed=1)
    weights = torch.tensor([0.3, -1.0]).double()
    transform = ScalarizedPosteriorTransform(weights)
    posterior = model.posterior(X, posterior_transform=transform)
    torch.testing.assert_close(posterior.mean, model.posterior(X).mean @ weights[:, None])


# ------------------------------------------------------------------ transforms


@models
@outputs
def test_input_transform(make: Any, m: int) -> None:
    X, Y = _data(m=m)
    bounds = torch.tensor([[-1.0, 0.0], [3.0, 10.0]]).double()
    wide, test_X = bounds[0] + X * (bounds[1] - bounds[0]), uniform(3, 2, seed=1)
    wide_test = bounds[0] + test_X * (bounds[1] - bounds[0])
    model = make(wide, Y, input_transform=Normalize(2, bounds=bounds))
    _close(model.posterior(wide_test), make(X, Y).posterior(test_X))
    copies = [m] if m > 1 else []  # one for every output, as GPyTorch has it
    assert torch.equal(model.train().train_inputs[0], wide.expand(*copies, *wide.shape))
    torch.testing.assert_close(model.eval().train_inputs[0], X.expand(*copies, *X.shape))
    new = uniform(2, 2, seed=3)
    wide_new = bounds[0] + new * (bounds[1] - bounds[0])
    conditioned = model.condition_on_observations(wide_new, normal(2, m, seed=3))
    expected = make(X, Y).condition_on_observations(new, normal(2, m, seed=3))
    _close(conditioned.posterior(wide_test), expected.posterior(test_X))


@every_model
@batches
@outputs
def test_outcome_transform(make: Any, batch_shape: tuple[int, ...], m: int) -> None:
    X, Y = _data(batch_shape, m)
    Y = 5 + 3 * Y
    transform = Standardize(m=m, batch_shape=torch.Size(batch_shape)).eval()
    model = make(X, Y, outcome_transform=transform)
    test_X = uniform(*batch_shape, 3, 2, seed=1)
    mean, std = Y.mean(dim=-2, keepdim=True), Y.std(dim=-2, keepdim=True)
    inner = make(X, (Y - mean) / std).posterior(test_X)
    posterior = model.posterior(test_X)
    torch.testing.assert_close(posterior.mean, mean + std * inner.mean)
    torch.testing.assert_close(posterior.variance, std.square() * inner.variance)
    conditioned = model.condition_on_observations(test_X, Y[..., :3, :])
    assert conditioned.posterior(test_X).mean.shape == posterior.mean.shape


def test_nonlinear_outcome_transform() -> None:
    X, Y = _data()
    model = MODELS[0](X, Y.exp(), outcome_transform=Log())
    assert bool((model.posterior(X).rsample(torch.Size([3])) > 0).all())


# ------------------------------------------------------------------ new observations


@models
@batches
@outputs
@pytest.mark.parametrize("known_noise", [False, True])
def test_conditioning_equals_refitting(
    make: Any, batch_shape: tuple[int, ...], m: int, known_noise: bool
) -> None:
    X, Y = _data(batch_shape, m)
    new_X, new_Y = uniform(*batch_shape, 4, 2, seed=5), normal(*batch_shape, 4, m, seed=5)
    Yvar = 0.02 + uniform(*batch_shape, N, m, seed=6) if known_noise else None
    noise = 0.02 + uniform(*batch_shape, 4, m, seed=7) if known_noise else None
    model = make(X, Y, Yvar)
    test_X = uniform(*batch_shape, 3, 2, seed=1)
    before = model.posterior(test_X)
    conditioned = model.condition_on_observations(new_X, new_Y, noise=noise)
    all_noise = None if Yvar is None or noise is None else torch.cat([Yvar, noise], dim=-2)
    whole = make(torch.cat([X, new_X], dim=-2), torch.cat([Y, new_Y], dim=-2), all_noise)
    assert isinstance(conditioned, type(model))
    assert conditioned.batch_shape == model.batch_shape
    _close(conditioned.posterior(test_X), whole.posterior(test_X))
    _close(model.posterior(test_X), before, tol=0)
    # One at a time, and after the hyperparameters moved.
    single = model
    for i in range(4):
        row = slice(i, i + 1)
        single = single.condition_on_observations(
            new_X[..., row, :],
            new_Y[..., row, :],
            noise=None if noise is None else noise[..., row, :],
        )
    _close(single.posterior(test_X), whole.posterior(test_X))
    for changed in (single, whole):
        changed.mean_module.initialize(constant=1.7)
    _close(single.posterior(test_X), whole.posterior(test_X))


@every_model
@batches
@outputs
def test_conditioning_broadcasts_fantasies(make: Any, batch_shape: tuple[int, ...], m: int) -> None:
    model = make(*_data(batch_shape, m))
    X_new, Y_new = uniform(2, *batch_shape, 3, 2, seed=2), normal(2, *batch_shape, 3, m, seed=2)
    separate = model.condition_on_observations(X_new, Y_new)
    same_points = model.condition_on_observations(X_new[0], Y_new)
    for test_X in [
        uniform(4, 2, seed=3),
        uniform(*batch_shape, 4, 2, seed=3),
        uniform(2, *batch_shape, 4, 2, seed=3),
    ]:
        for conditioned in (separate, same_points):
            assert conditioned.posterior(test_X).mean.shape == (2, *batch_shape, 4, m)
    for i in range(2):
        test_X = uniform(*batch_shape, 4, 2, seed=3)
        one = model.condition_on_observations(X_new[i], Y_new[i]).posterior(test_X)
        torch.testing.assert_close(separate.posterior(test_X).mean[i], one.mean)
        torch.testing.assert_close(separate.posterior(test_X).variance[i], one.variance)


@every_model
@batches
@outputs
@pytest.mark.parametrize("known_noise", [False, True])
def test_fantasize(make: Any, batch_shape: tuple[int, ...], m: int, known_noise: bool) -> None:
    X, Y = _data(batch_shape, m)
    model = make(X, Y, torch.full_like(Y, 0.05) if known_noise else None)
    sampler = SobolQMCNormalSampler(torch.Size([3]))
    X_f = uniform(*batch_shape, 2, 2, seed=4)
    fantasy = model.fantasize(X_f, sampler)
    assert isinstance(fantasy, type(model))
    assert fantasy.batch_shape == (3, *batch_shape)
    assert fantasy.posterior(uniform(5, 2)).mean.shape == (3, *batch_shape, 5, m)
    # Fantasies lower the variance at their points and leave the model alone.
    assert bool((fantasy.posterior(X_f).variance < model.posterior(X_f).variance + 1e-9).all())
    assert getattr(model, "local", model).train_inputs[0].shape[-2] == N
    if known_noise:
        noise = torch.full((*batch_shape, 2, m), 0.5).double()
        fantasy = model.fantasize(X_f, sampler, observation_noise=noise)
        assert isinstance(fantasy.likelihood, FixedNoiseGaussianLikelihood)


@every_model
def test_gradients_through_fantasies(make: Any) -> None:
    model = make(*_data())
    X = uniform(1, 2, seed=5).requires_grad_()
    test_X = uniform(3, 2, seed=6)

    def looked_ahead(x: Tensor) -> Tensor:
        conditioned = model.condition_on_observations(x, x.sum(dim=-1, keepdim=True))
        posterior = conditioned.posterior(test_X)
        return torch.cat([posterior.mean, posterior.variance])

    assert torch.autograd.gradcheck(looked_ahead, (X,))


# ------------------------------------------------------------------ copies and state


@every_model
@batches
def test_subset_output(make: Any, batch_shape: tuple[int, ...]) -> None:
    X, Y = _data(batch_shape, 3)
    octf = Standardize(m=3, batch_shape=torch.Size(batch_shape))
    for model in [make(X, Y), make(X, Y, outcome_transform=octf), make(X, Y, Y.square() + 0.1)]:
        test_X = uniform(*batch_shape, 4, 2, seed=1)
        full = model.posterior(test_X)
        for idcs in [[0], [2, 0], [0, 1, 2], [-1]]:
            subset = model.subset_output(idcs)
            assert subset is not model
            assert subset.num_outputs == len(idcs)
            posterior = subset.posterior(test_X)
            torch.testing.assert_close(posterior.mean, full.mean[..., idcs])
            torch.testing.assert_close(posterior.variance, full.variance[..., idcs])
    with pytest.raises(IndexError, match=r"must lie in 0..2, got \[3\]"):
        model.subset_output([3])


@models
def test_state_dict_holds_hyperparameters_only(make: Any) -> None:
    X, Y = _data(n=20)
    octf = Standardize(m=1)
    model = make(X, Y, outcome_transform=octf)
    model.posterior(X)
    fewer = make(X[:5], Y[:5], outcome_transform=Standardize(m=1))
    fewer.posterior(X)
    model.likelihood.noise = 0.07
    model.mean_module.initialize(constant=-0.4)
    model.raw_lengthscale.data.mul_(1.2)
    state = model.state_dict()
    assert all(value.numel() <= 16 for value in state.values())
    fewer.load_state_dict(state)
    assert fewer.state_dict().keys() == state.keys()
    whole = fewer.condition_on_observations(X[5:], Y[5:])
    inner = (Y - Y.mean()) / Y.std()
    expected = make(X, inner)
    expected.load_state_dict(
        {name: value for name, value in state.items() if not name.startswith("outcome")}
    )
    posterior = expected.posterior(X)
    torch.testing.assert_close(whole.posterior(X).mean, Y.mean() + Y.std() * posterior.mean)


@every_model
def test_copies(make: Any) -> None:
    model, X = make(*_data()), uniform(3, 2, seed=1)
    before = model.posterior(X)
    for other in [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]:
        _close(other.posterior(X), before, tol=0)
        other.likelihood.noise = 0.5
        other.posterior(X)
        _close(model.posterior(X), before, tol=0)


@models
def test_hyperparameters_set_in_place_are_seen(make: Any) -> None:
    X, Y = _data()
    model, test_X = make(X, Y), uniform(3, 2, seed=1)
    model.posterior(test_X)
    model.likelihood.noise = 0.5
    model.mean_module.initialize(constant=0.9)
    _close(model.posterior(test_X), make(X, Y, noise_var=0.5, mean=0.9).posterior(test_X))


@every_model
def test_stays_in_float64(make: Any) -> None:
    X, Y = _data()
    with pytest.warns(InputDataWarning, match=r"train_X is torch.float32 and was promoted"):
        model = make(X.float(), Y)
    model = make(X, Y)
    before = model.posterior(X)
    with pytest.warns(InputDataWarning, match="stays in float64"):
        model.to(torch.float32)
    _close(model.posterior(X), before, tol=0)
    assert model.posterior(X.float()).mean.dtype == torch.float64


def test_construct_inputs() -> None:
    for batch_shape in [(), (2,)]:
        X, Y = _data(batch_shape)
        names = {"feature_names": ["a", "b"], "outcome_names": ["y"]}
        phi = random_fourier()
        inputs = BasisGP.construct_inputs(
            SupervisedDataset(X, Y, **names), feature_map=phi, noise_var=0.1
        )
        assert inputs["feature_map"] is phi
        assert torch.equal(inputs["train_X"], X)
        assert torch.equal(inputs["train_Y"], Y)
        noise = BasisGP(**inputs).likelihood.noise.unique()
        assert noise.tolist() == [pytest.approx(0.1, rel=1e-12)]
        data = SupervisedDataset(X, Y, Yvar=torch.full_like(Y, 0.3), **names)
        inputs = BasisGP.construct_inputs(data, feature_map=phi)
        model = BasisGP(**inputs)
        assert model.likelihood.noise.unique().tolist() == [0.3]
    with pytest.raises(TypeError, match="unexpected keyword"):
        BasisGP.construct_inputs(data, feature_mapp=phi)


# ------------------------------------------------------------------ acquisition


@every_model
@pytest.mark.parametrize("q", [1, 3])
def test_optimize_acqf(make: Any, q: int) -> None:
    X, Y = _data()
    model = make(X, Y)
    acquisitions: list[Any] = [
        qLogExpectedImprovement(model, Y.max()),
        qLogNoisyExpectedImprovement(model, X, X_pending=uniform(2, 2, seed=8)),
        PathwiseThompsonSampling(model),
        qKnowledgeGradient(model, num_fantasies=3),
    ]
    if q == 1:
        acquisitions += [
            LogExpectedImprovement(model, Y.max()),
            UpperConfidenceBound(model, beta=2.0),
            PosteriorMean(model),
        ]
    for acquisition in acquisitions:
        options = {"maxiter": 5}
        candidates, value = optimize_acqf(
            acquisition, UNIT, q=q, num_restarts=2, raw_samples=16, options=options
        )
        assert candidates.shape == (q, 2)
        assert bool(((candidates >= 0) & (candidates <= 1)).all())
        assert bool(value.isfinite())


@every_model
def test_pathwise_thompson_sampling_of_two_outputs(make: Any) -> None:
    model = make(*_data(m=2))
    objective = LinearMCObjective(torch.tensor([0.5, 0.5]).double())
    acquisition = PathwiseThompsonSampling(model, objective=objective)
    assert acquisition(uniform(4, 1, 2)).shape == (4,)


@every_model
def test_model_list(make: Any) -> None:
    X, Y = _data(m=2)
    first, second = make(X, Y[:, :1]), MODELS[0](X[:5], Y[:5, 1:])
    both: Model = ModelListGP(first, second)
    test_X = uniform(4, 3, 2, seed=1)
    posterior = both.posterior(test_X)
    assert posterior.mean.shape == (4, 3, 2)
    torch.testing.assert_close(posterior.mean[..., :1], first.posterior(test_X).mean)
    torch.testing.assert_close(posterior.mean[..., 1:], second.posterior(test_X).mean)
    fantasy = both.fantasize(uniform(2, 2), SobolQMCNormalSampler(torch.Size([3])))
    assert fantasy.posterior(test_X[0]).mean.shape == (3, 3, 2)
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, 1.0]).double())
    acquisition = UpperConfidenceBound(both, 2.0, posterior_transform=transform)
    assert acquisition(uniform(4, 1, 2)).shape == (4,)


# ------------------------------------------------------------------ bad input


@every_model
def test_bad_input(make: Any) -> None:
    X, Y = _data()
    damaged_X, damaged_Y = X.clone(), Y.clone()
    damaged_X[0, 0], damaged_Y[0, 0] = torch.nan, torch.inf
    with pytest.raises(InputDataError, match=r"train_X .* has 1 NaN"):
        make(damaged_X, Y)
    with pytest.raises(InputDataError, match=r"train_Y .* has 0 NaN and 1 infinite"):
        make(X, damaged_Y)
    for wrong in [Y.squeeze(-1), Y[:-1], Y.unsqueeze(0)]:
        with pytest.raises(BotorchTensorDimensionError, match="explicit output dimension"):
            make(X, wrong)
    with pytest.raises(BotorchTensorDimensionError, match="batch_shape x q x 2"):
        make(X, Y).posterior(uniform(3, 1))
    with pytest.raises(BotorchTensorDimensionError, match=r"batch_shape x (n|q) x 2"):
        make(uniform(N, 3), Y).posterior(uniform(3, 3))
    for noise_var in [0.0, -1.0, torch.nan]:
        with pytest.raises(InputDataError, match="noise_var must be positive"):
            make(X, Y, noise_var=noise_var)
    with pytest.raises(InputDataError, match="positive"):
        make(X, Y, torch.zeros_like(Y))
    model = make(X, Y)
    with pytest.raises(InputDataError, match=r"X .* has 1 NaN"):
        model.condition_on_observations(damaged_X, Y)
    with pytest.raises(InputDataError, match=r"Y .* has 0 NaN and 1 infinite"):
        model.condition_on_observations(X, damaged_Y)
    with pytest.raises(BotorchTensorDimensionError, match=r"Y must be `… x 9 x 1`"):
        model.condition_on_observations(X, Y.expand(N, 2))
    known = make(X, Y, torch.ones_like(Y))
    with pytest.raises(InputDataError, match="pass `noise=`"):
        known.condition_on_observations(X, Y)


@every_model
def test_no_data_is_the_prior(make: Any) -> None:
    X, Y = _data()
    prior = make(X[:0], Y[:0])
    posterior = prior.posterior(X)
    torch.testing.assert_close(posterior.mean, torch.full_like(Y, 0.3))
    assert float(posterior.variance.detach().min()) > 0.1
    conditioned = prior.condition_on_observations(X, Y)
    _close(conditioned.posterior(X), make(X, Y).posterior(X))


@every_model
def test_awkward_but_legal_data(make: Any) -> None:
    X, Y = _data()
    for case in [
        make(X[:1].expand(N, 2), Y),  # one point, many times
        make(X, torch.ones_like(Y)),  # constant outcomes
        make(X, torch.ones_like(Y), outcome_transform=Standardize(m=1)),
        make(X[:1], Y[:1]),
    ]:
        posterior = case.posterior(X)
        assert bool(posterior.mean.isfinite().all())
        assert bool((posterior.variance > 0).all())
