"""The mixture of a local and a shared model: its law, its samples, its limits and its paths."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from botorch import fit_gpytorch_mll
from botorch.acquisition import (
    LogExpectedImprovement,
    UpperConfidenceBound,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.cross_validation import loo_cv
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    DeprecationError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from botorch.models import ModelList, ModelListGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.models.transforms.outcome import Log
from botorch.optim import optimize_acqf
from botorch.posteriors import PosteriorList
from botorch.sampling import IIDNormalSampler, SobolQMCNormalSampler
from botorch.sampling.get_sampler import get_sampler
from botorch.sampling.list_sampler import ListSampler
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.utils.datasets import SupervisedDataset
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Size, Tensor

from botorch_fed.models import (
    BasisGP,
    LocalBlock,
    draw_path,
)
from botorch_fed.models.mixture import LocalSharedMixture, MixturePosterior, draw_mixture_path
from botorch_fed.rng import generator
from test.cases import UNIT, inducing, normal, random_fourier, uniform

BOUNDS = torch.tensor([[-1.0, 0.0], [3.0, 10.0]]).double()


def _data(n: int = 9, m: int = 1) -> tuple[Tensor, Tensor]:
    X = uniform(n, 2)
    shifts = torch.arange(m).double()
    return X, (5 * X).sin().sum(dim=-1, keepdim=True) + shifts + 0.1 * normal(n, m)


def _local(**kwargs: Any) -> SingleTaskGP:
    return SingleTaskGP(*_data(), **kwargs)


def _shared(mean: float = 0.4) -> BasisGP:
    phi, X = inducing(), uniform(25, 2, seed=3)
    Y = (4 * X).cos().sum(dim=-1, keepdim=True)
    total = LocalBlock.from_data(phi, X, Y, noise_var=0.02, mean=mean).summary
    return BasisGP.from_summary(total, feature_map=phi, noise_var=0.05, mean=mean)


def _mixture(weight: float | Tensor = 0.3) -> LocalSharedMixture:
    return LocalSharedMixture(_local(), _shared(), weight)


def _two_outputs(weight: float = 0.3) -> LocalSharedMixture:
    X, Y = _data(m=2)
    maps = random_fourier(), inducing()
    return LocalSharedMixture(*(BasisGP(X, Y, feature_map=phi) for phi in maps), weight)


# ------------------------------------------------------------------ the law


@pytest.mark.parametrize("make", [_mixture, _two_outputs])
def test_moments_are_those_of_samples(make: Any) -> None:
    model, X = make(), uniform(3, 2, seed=1)
    posterior = model.posterior(X)
    m = model.num_outputs
    with torch.no_grad():
        for samples in [
            posterior.rsample(Size([40_000])),
            IIDNormalSampler(Size([40_000]), seed=0)(posterior),
        ]:
            assert samples.shape == (40_000, 3, m)
            n = len(samples)
            error = (samples.mean(dim=0) - posterior.mean) / (posterior.variance / n).sqrt()
            assert float(error.abs().max()) < 5
            distribution = posterior.distribution
            flat = samples.mT.reshape(n, -1)  # output by output, as the covariance has it
            covariance = distribution.covariance_matrix
            spread = covariance.diagonal()
            bound = 6 * (2 * spread[:, None] * spread / n).sqrt()
            assert bool(((flat.T.cov() - covariance).abs() < bound).all())
        torch.testing.assert_close(distribution.mean.reshape(3, m), posterior.mean)
        torch.testing.assert_close(distribution.variance.reshape(3, m), posterior.variance)


def test_density_is_the_mixtures() -> None:
    posterior = _mixture().posterior(uniform(2, 2, seed=1))
    grid = torch.linspace(-12, 12, 8001, dtype=torch.float64)
    with torch.no_grad():
        density = posterior.density(grid).squeeze(-1)  # 8001 x 2
    step = float(grid[1] - grid[0])
    torch.testing.assert_close(density.sum(dim=0) * step, torch.ones(2).double())
    mean = (grid[:, None] * density).sum(dim=0) * step
    torch.testing.assert_close(mean, posterior.mean.squeeze(-1).detach())
    second = (grid[:, None].square() * density).sum(dim=0) * step - mean.square()
    torch.testing.assert_close(second, posterior.variance.squeeze(-1).detach())


def test_one_coin_for_all_points_and_outputs() -> None:
    # Components that never meet: one constant is far above the other.
    X, Y = _data(m=2)
    local, shared = (
        BasisGP(X, Y + shift, feature_map=random_fourier(), noise_var=1e-3, mean=shift)
        for shift in (100.0, 0.0)
    )
    model = LocalSharedMixture(local, shared, 0.3)
    for posterior in (model.posterior(uniform(4, 2, seed=1)), model.posterior(uniform(3, 4, 2))):
        for samples in (
            posterior.rsample(Size([3000])),
            IIDNormalSampler(Size([3000]), seed=1)(posterior),
        ):
            high = (samples > 50).flatten(start_dim=-2)
            assert bool((high.all(dim=-1) == high.any(dim=-1)).all())
            share = high[..., 0].double().mean(dim=0)
            assert float((share - 0.3).abs().max()) < 5 * math.sqrt(0.21 / 3000)
    # Sobol's first dimension is the coin: the share is right to one sample in 256.
    sampler = get_sampler(model.posterior(X), Size([256]), seed=0)
    share = (sampler(model.posterior(X))[:, 0, 0] > 50).double().mean()
    assert float((share - 0.3).abs()) <= 1 / 256


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_certain_weights_are_one_component(weight: float) -> None:
    model, X = _mixture(weight), uniform(5, 3, 2, seed=1)
    one = (model.shared, model.local)[int(weight)].posterior(X)
    posterior = model.posterior(X)
    assert torch.equal(posterior.mean, one.mean)
    assert torch.equal(posterior.variance, one.variance)
    covariance = posterior.distribution.covariance_matrix
    torch.testing.assert_close(covariance, one.distribution.covariance_matrix, rtol=0, atol=0)
    base = normal(64, 5, 4, seed=2)
    base[0, ..., 0] = 40.0  # its distribution function rounds to one
    base[1, ..., 0] = -40.0
    samples = posterior.rsample_from_base_samples(Size([64]), base)
    assert torch.equal(samples, one.rsample_from_base_samples(Size([64]), base[..., 1:]))


def test_weight_may_differ_by_batch() -> None:
    weights = torch.tensor([0.0, 0.4, 1.0]).double()
    model, X = _mixture(weights), uniform(3, 4, 2, seed=1)
    assert model.batch_shape == (3,)
    posterior = model.posterior(X)
    assert model.posterior(X[0]).mean.shape == (3, 4, 1)
    for i, w in enumerate(weights):
        one = _mixture(float(w)).posterior(X[i])
        torch.testing.assert_close(posterior.mean[i], one.mean)
        torch.testing.assert_close(posterior.variance[i], one.variance)
    assert posterior.rsample(Size([6])).shape == (6, 3, 4, 1)
    assert SobolQMCNormalSampler(Size([8]))(posterior).shape == (8, 3, 4, 1)


def test_one_batched_and_one_single_component() -> None:
    X, Y = uniform(2, 9, 2), normal(2, 9, 1)
    local, shared = SingleTaskGP(X, Y), _shared()
    model = LocalSharedMixture(local, shared, 0.3)
    assert model.batch_shape == (2,)
    test_X = uniform(4, 2, seed=1)
    for points in (test_X, test_X.expand(2, 4, 2), test_X.expand(5, 1, 4, 2)):
        posterior = model.posterior(points)
        shape = (*torch.broadcast_shapes(points.shape[:-2], (2,)), 4, 1)
        assert posterior.mean.shape == posterior._extended_shape() == shape
        assert SobolQMCNormalSampler(Size([3]))(posterior).shape == (3, *shape)
        mean = (
            0.3 * local.posterior(test_X.expand(2, 4, 2)).mean + 0.7 * shared.posterior(test_X).mean
        )
        torch.testing.assert_close(posterior.mean, mean.expand(shape))
    fantasy = model.fantasize(uniform(2, 3, 2), SobolQMCNormalSampler(Size([4])))
    assert fantasy.batch_shape == (4, 2)
    assert fantasy.posterior(test_X).mean.shape == (4, 2, 4, 1)


# ------------------------------------------------------------------ samplers


@pytest.mark.parametrize("make", [_mixture, _two_outputs])
@pytest.mark.parametrize("q", [1, 5])
def test_registered_sampler_is_deterministic(make: Any, q: int) -> None:
    model, X = make(), uniform(3, q, 2, seed=1)
    posterior = model.posterior(X)
    sampler = get_sampler(posterior, Size([16]), seed=3)
    assert isinstance(sampler, SobolQMCNormalSampler)
    first = sampler(posterior)
    assert first.shape == (16, 3, q, model.num_outputs)
    assert torch.equal(first, sampler(model.posterior(X)))
    assert torch.equal(first, get_sampler(posterior, Size([16]), seed=3)(posterior))
    # The value of a batch of points does not depend on its place, as BoTorch wants it.
    torch.testing.assert_close(first[:, 1], sampler(model.posterior(X.flip(0)))[:, 1])
    moved = sampler(model.posterior(X + 1e-9))
    assert float((moved - first).detach().abs().max()) < 1e-5  # smooth: the coins stay


def test_many_points_fall_back_to_independent_samples() -> None:
    model = LocalSharedMixture(*(BasisGP(*_data(), feature_map=random_fourier()),) * 2, 0.5)
    posterior = model.posterior(uniform(200, 2))
    # More points than features: base samples have as many numbers as there are features.
    assert posterior.base_sample_shape == (61,)
    assert posterior.rsample(Size([2])).shape == (2, 200, 1)
    assert SobolQMCNormalSampler(Size([4]))(posterior).shape == (4, 200, 1)
    wide = MixturePosterior(*(_Wide(posterior),) * 2, torch.tensor(0.5).double())
    assert isinstance(get_sampler(wide, Size([2])), IIDNormalSampler)


class _Wide:
    """A component that asks for more normals than Sobol's sequence has dimensions."""

    base_sample_shape = Size([30_000])
    batch_range = (0, -1)

    def __init__(self, posterior: MixturePosterior) -> None:
        self._extended_shape = posterior._extended_shape


def test_gradients_of_samples() -> None:
    model, base = _mixture(), normal(6, 4)

    def draw(X: Tensor) -> Tensor:
        return model.posterior(X).rsample_from_base_samples(Size([6]), base)

    assert torch.autograd.gradcheck(draw, (uniform(3, 2, seed=1).requires_grad_(),))
    with pytest.raises(BotorchTensorDimensionError, match=r"must have shape \(6, 4\)"):
        model.posterior(uniform(3, 2)).rsample_from_base_samples(Size([6]), base[:, 1:])


def test_mixture_of_mixtures() -> None:
    inner = _mixture(0.5)
    model, X = LocalSharedMixture(inner, _shared(1.0), 0.4), uniform(2, 3, 2, seed=1)
    posterior = model.posterior(X)
    assert posterior.base_sample_shape == (2, 5)  # two coins, three normals
    mean = 0.4 * inner.posterior(X).mean + 0.6 * _shared(1.0).posterior(X).mean
    torch.testing.assert_close(posterior.mean, mean)
    samples = IIDNormalSampler(Size([20_000]), seed=0)(posterior)
    error = (samples.mean(dim=0) - posterior.mean) / (posterior.variance / 20_000).sqrt()
    assert float(error.detach().abs().max()) < 5
    assert draw_mixture_path(model, generator=generator(0))(X[0]).shape == (3,)


def test_in_a_list_of_models() -> None:
    # ModelList samples the mixture itself; ModelListGP takes the normal of the same moments.
    model, other, X = _mixture(), _local(), uniform(3, 2, seed=1)
    single, listed = model.posterior(X), ModelList(model, other).posterior(X)
    assert isinstance(listed, PosteriorList)
    sampler = get_sampler(listed, Size([8]), seed=0)
    assert isinstance(sampler, ListSampler)
    own = IIDNormalSampler(Size([8]), seed=0)(single)
    torch.testing.assert_close(sampler(listed)[..., :1], own)
    together: Any = ModelListGP(model, other)
    posterior = together.posterior(X)
    torch.testing.assert_close(posterior.mean[:, :1], single.mean)
    torch.testing.assert_close(posterior.variance[:, :1], single.variance)
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, 0.5]).double())
    for both in (ModelList(model, other), together):
        bound = UpperConfidenceBound(both, 2.0, posterior_transform=transform)
        assert bound(X.unsqueeze(-2)).shape == (3,)


# ------------------------------------------------------------------ transforms and noise


def test_components_have_transforms_of_their_own() -> None:
    X, Y = _data()
    wide = BOUNDS[0] + X * (BOUNDS[1] - BOUNDS[0])
    local = SingleTaskGP(
        wide, 50 + 7 * Y, input_transform=Normalize(2), outcome_transform=Standardize(m=1)
    )
    phi = inducing()
    shared = BasisGP(wide, Y, feature_map=phi, input_transform=Normalize(2, bounds=BOUNDS))
    model, points = LocalSharedMixture(local, shared, 0.3), wide[:3] + 0.1
    posterior = model.posterior(points)
    first, second = local.posterior(points), shared.posterior(points)
    assert float(first.mean.detach().min()) > 30  # on the original scale
    torch.testing.assert_close(posterior.mean, 0.3 * first.mean + 0.7 * second.mean)
    apart = first.mean - second.mean
    variance = 0.3 * first.variance + 0.7 * second.variance + 0.21 * apart.square()
    torch.testing.assert_close(posterior.variance, variance)
    conditioned = model.condition_on_observations(points, 50 + 7 * Y[:3])
    new = conditioned.posterior(points).components
    torch.testing.assert_close(
        new[0].mean, local.condition_on_observations(points, 50 + 7 * Y[:3]).posterior(points).mean
    )
    assert model.fantasize(points, SobolQMCNormalSampler(Size([2]))).batch_shape == (2,)
    acquisition = qLogNoisyExpectedImprovement(model, wide, X_pending=points[:1])
    candidates, _ = optimize_acqf(
        acquisition, BOUNDS, q=3, num_restarts=2, raw_samples=8, options={"maxiter": 3}
    )
    assert candidates.shape == (3, 2)
    assert bool(((candidates >= BOUNDS[0]) & (candidates <= BOUNDS[1])).all())


def test_nonlinear_outcome_transform_is_sampled() -> None:
    X, Y = _data()
    local = SingleTaskGP(X, Y.exp(), outcome_transform=Log())
    shared = BasisGP(X, Y.exp(), feature_map=inducing(), outcome_transform=Log())
    posterior = LocalSharedMixture(local, shared, 0.3).posterior(uniform(3, 2))
    assert bool((posterior.rsample(Size([50])) > 0).all())
    assert bool((get_sampler(posterior, Size([50]))(posterior) > 0).all())


def test_noise_of_each_component() -> None:
    model, X = _mixture(), uniform(3, 2, seed=1)
    quiet, noisy = model.posterior(X), model.posterior(X, observation_noise=True)
    torch.testing.assert_close(noisy.mean, quiet.mean)
    own = model.local.posterior(X, observation_noise=True).variance
    added = own - model.local.posterior(X).variance
    torch.testing.assert_close(noisy.variance, quiet.variance + 0.3 * added + 0.7 * 0.05)


def test_known_noise_in_one_component_only() -> None:
    X, Y = _data()
    known = BasisGP(X, Y, torch.full_like(Y, 0.5), feature_map=random_fourier())
    inferred = BasisGP(X, Y, feature_map=inducing(), noise_var=0.02)
    new_X, new_Y = uniform(2, 2, seed=4), normal(2, 1)
    for pair in ((known, inferred), (inferred, known)):
        model = LocalSharedMixture(*pair, 0.3)
        assert model.likelihood is known.likelihood
        fantasy = model.fantasize(new_X, SobolQMCNormalSampler(Size([3])))
        part = (fantasy.local, fantasy.shared)[pair.index(known)]
        assert part.likelihood.noise.shape[-1] == len(X) + 2
        torch.testing.assert_close(part.likelihood.noise[..., -1], torch.full((3,), 0.5).double())
        name = "local" if pair[0] is known else "shared"
        with pytest.raises(InputDataError, match=f"The {name} model has known noise"):
            model.condition_on_observations(new_X, new_Y)
        conditioned = model.condition_on_observations(
            new_X, new_Y, noise=torch.full_like(new_Y, 0.1)
        )
        one = known.condition_on_observations(new_X, new_Y, noise=torch.full_like(new_Y, 0.1))
        index = pair.index(known)
        part_posterior = conditioned.posterior(X).components[index]
        torch.testing.assert_close(part_posterior.mean, one.posterior(X).mean)
    with pytest.raises(DeprecationError):
        model.fantasize(new_X, SobolQMCNormalSampler(Size([3])), observation_noise=True)  # type: ignore[arg-type]


# ------------------------------------------------------------------ conditioning, copies, state


def test_conditioning_updates_both_and_keeps_the_weight() -> None:
    model, X = _mixture(), uniform(4, 2, seed=1)
    before = model.posterior(X)
    new_X, new_Y = uniform(3, 2, seed=5), normal(3, 1, seed=5)
    conditioned = model.condition_on_observations(new_X, new_Y)
    assert isinstance(conditioned, LocalSharedMixture)
    assert torch.equal(conditioned.local_weight, model.local_weight)
    for part, whole in zip(
        conditioned.posterior(X).components, (model.local, model.shared), strict=True
    ):
        expected = whole.condition_on_observations(new_X, new_Y).posterior(X)
        torch.testing.assert_close(part.mean, expected.mean)
        torch.testing.assert_close(part.variance, expected.variance)
    assert torch.equal(model.posterior(X).mean, before.mean)


def test_empty_fantasies() -> None:
    fantasy = _mixture().fantasize(uniform(0, 2), SobolQMCNormalSampler(Size([3])))
    assert fantasy.posterior(uniform(4, 2)).mean.shape == (3, 4, 1)


def test_copies_and_state_dict() -> None:
    model, X = _mixture(0.7), uniform(3, 2, seed=1)
    before = model.posterior(X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.posterior(X).mean, before.mean)
        other.local.likelihood.noise = 0.5
        assert torch.equal(model.posterior(X).mean, before.mean)
    state = model.state_dict()
    assert float(state["local_weight"]) == 0.7
    fewer = LocalSharedMixture(SingleTaskGP(*_data(5)), _shared(), 0.2)
    model.local.likelihood.noise = 0.07
    fewer.load_state_dict(model.state_dict())
    torch.testing.assert_close(fewer.local.likelihood.noise, model.local.likelihood.noise)
    assert float(fewer.local_weight) == 0.7
    assert model.double() is model
    assert "local_weight=0.700, num_outputs=1" in repr(model)
    assert "shape (2,)" in repr(_mixture(torch.tensor([0.1, 0.2])))
    assert repr(before) == "MixturePosterior(shape=(3, 1))"


def test_fitting_fits_the_local_model() -> None:
    X, Y = _data(9)
    local, twin = SingleTaskGP(X, Y), SingleTaskGP(X, Y)
    model = LocalSharedMixture(local, _shared(), 0.4)
    before = copy.deepcopy(model.shared.state_dict())
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    assert fit_gpytorch_mll(mll) is mll
    fit_gpytorch_mll(ExactMarginalLogLikelihood(twin.likelihood, twin))
    torch.testing.assert_close(model.local.posterior(X).mean, twin.posterior(X).mean)
    assert all(
        torch.equal(value, before[name]) for name, value in model.shared.state_dict().items()
    )
    with pytest.raises(UnsupportedError, match=r"loo_cv\(model\.local\)"):
        loo_cv(model)


def test_closed_forms_see_the_normal_of_both_moments() -> None:
    model, X = _mixture(0.3), uniform(3, 2, seed=1)
    posterior, normal_ = model.posterior(X), model(X)
    torch.testing.assert_close(normal_.mean, posterior.mean.squeeze(-1))
    torch.testing.assert_close(normal_.variance, posterior.variance.squeeze(-1))
    torch.testing.assert_close(posterior.covariance_matrix, posterior.mvn.covariance_matrix)
    # Of a point that is asked for twice the covariance is singular, and nothing factorises it.
    twice = model.posterior(X[:1].expand(2, 2)).distribution
    torch.testing.assert_close(twice.covariance_matrix[0, 0], twice.covariance_matrix[0, 1])


def test_subset_output() -> None:
    model, X = _two_outputs(), uniform(3, 2, seed=1)
    for idcs in ([0], [1], [1, 0], [0, 1], [-1]):
        subset = model.subset_output(idcs)
        assert subset is not model
        torch.testing.assert_close(subset.posterior(X).mean, model.posterior(X).mean[..., idcs])
        chosen = model.posterior(X, output_indices=idcs)
        torch.testing.assert_close(chosen.variance, model.posterior(X).variance[..., idcs])
    with pytest.raises(IndexError, match=r"must lie in 0..1, got \[2\]"):
        model.subset_output([2])


def test_construct_inputs() -> None:
    X, Y = _data()
    data = SupervisedDataset(X, Y, feature_names=["a", "b"], outcome_names=["y"])
    shared = _shared()
    inputs = LocalSharedMixture.construct_inputs(data, shared=shared, local_weight=0.25)
    model = LocalSharedMixture(**inputs)
    assert model.shared is shared
    assert isinstance(model.local, SingleTaskGP)
    assert float((model.local.posterior(X).mean - Y).square().mean()) < float(Y.var())
    local = _local()
    inputs = LocalSharedMixture.construct_inputs(
        data, shared=shared, local_weight=0.25, local=local
    )
    assert inputs["local"] is local
    with pytest.raises(TypeError, match="unexpected keyword"):
        LocalSharedMixture.construct_inputs(data, shared=shared, local_wait=0.25)  # type: ignore[call-arg]


# ------------------------------------------------------------------ acquisition


@pytest.mark.filterwarnings("ignore:A not p.d., added jitter")  # BoTorch's, of a smooth kernel
@pytest.mark.parametrize("q", [1, 3])
def test_optimize_acqf(q: int) -> None:
    (X, Y), model = _data(), _mixture()
    pending = uniform(2, 2, seed=8)
    acquisitions: list[Any] = [
        qLogExpectedImprovement(model, Y.max(), X_pending=pending),
        qLogNoisyExpectedImprovement(model, X, X_pending=pending),
        PathwiseThompsonSampling(model),
    ]
    if q == 1:
        acquisitions += [
            LogExpectedImprovement(model, Y.max()),
            UpperConfidenceBound(model, beta=2.0),
        ]
    for acquisition in acquisitions:
        candidates, value = optimize_acqf(
            acquisition, UNIT, q=q, num_restarts=2, raw_samples=16, options={"maxiter": 5}
        )
        assert candidates.shape == (q, 2)
        assert bool(((candidates >= 0) & (candidates <= 1)).all())
        with torch.no_grad():
            typical = acquisition(uniform(40, q, 2, seed=6)).median()
        assert float(value) > float(typical)


@pytest.mark.filterwarnings("ignore:A not p.d., added jitter")  # BoTorch's, of a smooth kernel
def test_pending_points_count() -> None:
    (X, Y), model = _data(), _mixture()
    sampler = SobolQMCNormalSampler(Size([256]), seed=0)
    free = qLogNoisyExpectedImprovement(model, X, sampler, prune_baseline=False)
    best, value = optimize_acqf(free, UNIT, q=1, num_restarts=4, raw_samples=64)
    taken = qLogNoisyExpectedImprovement(
        model, X, copy.deepcopy(sampler), X_pending=best, prune_baseline=False
    )
    with torch.no_grad():
        assert float(taken(best.unsqueeze(0))) < float(value) - 1
    # The two-point value is at least either point's.
    pair = torch.cat([best, uniform(1, 2, seed=9)]).unsqueeze(0)
    improvement = qLogExpectedImprovement(model, Y.max(), copy.deepcopy(sampler))
    singles = qLogExpectedImprovement(model, Y.max(), copy.deepcopy(sampler))
    with torch.no_grad():
        assert float(improvement(pair)) > float(singles(best.unsqueeze(0))) - 0.05


# ------------------------------------------------------------------ drawn functions


def test_paths_follow_the_posterior() -> None:
    model, X = _mixture(0.4), uniform(3, 2, seed=1)
    posterior = model.posterior(X)
    with torch.no_grad():
        for path in (
            draw_mixture_path(model, Size([4000]), generator=generator(0)),
            draw_matheron_paths(model, Size([4000])),
        ):
            values = path(X)
            assert values.shape == (4000, 3)
            mean, variance = posterior.mean.squeeze(-1), posterior.variance.squeeze(-1)
            error = (values.mean(dim=0) - mean) / (variance / 4000).sqrt()
            assert float(error.abs().max()) < 5
            torch.testing.assert_close(values.var(dim=0), variance, rtol=0.1, atol=0)


def test_a_path_is_reproducible_and_of_one_component() -> None:
    model, X = _mixture(0.4), uniform(6, 2, seed=1)
    shares = []
    for seed in range(40):
        path = draw_mixture_path(model, generator=generator(seed))
        torch.manual_seed(seed + 1)  # nothing comes from elsewhere
        again = draw_mixture_path(model, generator=generator(seed))
        assert torch.equal(path(X), again(X))
        # An inducing-point path cannot be told from its values; its coin can.
        shares.append(float(generator(seed).uniform(1)) < 0.4)
    assert 0 < sum(shares) < 40
    for weight, component in ((1.0, model.local), (0.0, model.shared)):
        stream = generator(5)
        path = draw_mixture_path(
            LocalSharedMixture(model.local, model.shared, weight), Size([2]), generator=stream
        )
        assert path(X).shape == (2, 6)
        if component is model.local:
            stream = generator(5)
            stream.uniform(2, 1)  # the coins
            assert torch.equal(path(X), draw_path(model.local, Size([2]), generator=stream)(X))


def test_each_draw_has_its_coin() -> None:
    X, Y = _data()
    local, shared = (
        BasisGP(X, Y + shift, feature_map=random_fourier(), noise_var=1e-3, mean=shift)
        for shift in (100.0, 0.0)
    )
    model = LocalSharedMixture(local, shared, 0.3)
    path = draw_mixture_path(model, Size([400]), generator=generator(0))
    values = path(uniform(5, 2, seed=1))
    high = values > 50
    assert bool((high.all(dim=-1) == high.any(dim=-1)).all())
    share = float(high[:, 0].double().mean())
    assert abs(share - 0.3) < 5 * math.sqrt(0.21 / 400)
    # Draw j at its own points, as q-batches are optimised.
    own = path(uniform(5, 2, seed=1).expand(400, 5, 2))
    torch.testing.assert_close(own, values)


def test_paths_of_batches_and_outputs() -> None:
    X, Y = uniform(2, 9, 2), normal(2, 9, 2)
    model = LocalSharedMixture(
        *(BasisGP(X, Y, feature_map=phi) for phi in (random_fourier(), inducing())), 0.5
    )
    single = BasisGP(X, Y, feature_map=random_fourier())
    points = uniform(4, 2, seed=1).expand(2, 4, 2)
    expected = draw_matheron_paths(single, Size([3]))(points.unsqueeze(1)).shape
    assert draw_matheron_paths(model, Size([3]))(points.unsqueeze(1)).shape == expected
    with pytest.raises(UnsupportedError, match="one output and no batch dimensions"):
        draw_mixture_path(model)
    with pytest.raises(UnsupportedError, match="models of one batch shape"):
        draw_matheron_paths(LocalSharedMixture(_local(), _shared(), torch.rand(2)), Size([3]))
    with pytest.raises(UnsupportedError, match="use draw_path"):
        draw_mixture_path(_local())  # type: ignore[arg-type]


# ------------------------------------------------------------------ what is refused


def test_bad_input() -> None:
    local, shared = _local(), _shared()
    for weight in (-0.1, 1.1, torch.tensor([0.5, 1.5])):
        with pytest.raises(InputDataError, match="must lie in"):
            LocalSharedMixture(local, shared, weight)
    with pytest.raises(InputDataError, match=r"local_weight .* has 1 NaN"):
        LocalSharedMixture(local, shared, math.nan)
    with pytest.raises(UnsupportedError, match="must be a BoTorch Model, got str"):
        LocalSharedMixture(local, "shared", 0.5)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"got 1 \(local\) and 2 \(shared\)"):
        LocalSharedMixture(local, _two_outputs(), 0.5)
    two, three = (SingleTaskGP(uniform(b, 5, 2), normal(b, 5, 1)) for b in (2, 3))
    with pytest.raises(BotorchTensorDimensionError, match=r"got \(2,\), \(3,\) and \(\)"):
        LocalSharedMixture(two, three, 0.5)
    ensemble = _local()
    ensemble._is_ensemble = True  # as BoTorch's fully Bayesian models
    with pytest.raises(UnsupportedError, match="an ensemble over its last batch dimension"):
        LocalSharedMixture(ensemble, shared, 0.5)
    X, Y = _data()
    with pytest.warns(InputDataWarning, match="double precision"):
        low = SingleTaskGP(X.float(), Y.float())
    with pytest.raises(InputDataError, match=r"local model has torch\.float32 parameters"):
        LocalSharedMixture(low, shared, 0.5)
