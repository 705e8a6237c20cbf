"""Fitting, received summaries and cross-validation of `BasisGP`; the contract is in contracts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch import fit_gpytorch_mll
from botorch.acquisition.multi_objective.predictive_entropy_search import (
    qMultiObjectivePredictiveEntropySearch,
)
from botorch.cross_validation import batch_cross_validation, gen_loo_cv_folds, loo_cv
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.models.transforms.input import ChainedInputTransform, Round, Warp
from botorch.models.transforms.outcome import Bilog, ChainedOutcomeTransform
from botorch.optim.fit import fit_gpytorch_mll_torch
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import RBFKernel
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from torch import Tensor

from botorch_fed.errors import BasisMismatch
from botorch_fed.models import (
    AdditiveFeatures,
    BasisGP,
    FeatureMap,
    InducingFeatures,
    PartiallyIndependentGP,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    Summary,
    log_evidence,
    summarize,
)
from botorch_fed.rng import generator
from test.cases import (
    MAPS,
    UNIT,
    additive,
    inducing,
    karhunen_loeve,
    matern_product,
    normal,
    paper_cosine,
    quadrature,
    random_fourier,
    se,
    uniform,
    warped,
)

NOISE = 0.02


def _data(n: int = 25, m: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    X = uniform(n, 2, seed=seed)
    Y = torch.cat([(5 * X + i).sin().sum(dim=-1, keepdim=True) for i in range(m)], dim=-1)
    return X, Y + 0.1 * normal(n, m, seed=seed)


def _mll(model: BasisGP) -> ExactMarginalLogLikelihood:
    return ExactMarginalLogLikelihood(model.likelihood, model)


# ------------------------------------------------------------------ evidence and fitting


@pytest.mark.parametrize("make", MAPS)
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("batch_shape", [(), (2,)])
@pytest.mark.parametrize("received", [False, True])
@pytest.mark.filterwarnings("ignore:A not p.d., added jitter")
def test_objective_is_gpytorchs(
    make: Callable[[], FeatureMap], m: int, batch_shape: tuple[int, ...], received: bool
) -> None:
    phi = make()
    X, Y = uniform(*batch_shape, 12, 2), normal(*batch_shape, 12, m)
    summaries: tuple[Summary, ...] = ()
    if received:
        other_X, other_Y = uniform(*batch_shape, 1, 7, 2, seed=3), normal(*batch_shape, m, 7, 1)
        summary = summarize(phi, other_X.expand(*batch_shape, m, 7, 2), other_Y, noise_var=NOISE)
        if m == 1:
            summary = Summary(summary.gram.squeeze(-3), summary.moment.squeeze(-3), summary.basis)
        summaries = (summary,)
    model = BasisGP(X, Y, feature_map=phi, noise_var=NOISE, mean=0.2, summaries=summaries)
    mll = _mll(model).train()
    theirs = mll(model(*model.train_inputs), model.train_targets)
    ours = model.log_marginal_likelihood()
    assert ours.shape == theirs.shape == (*batch_shape, *([m] if m > 1 else []))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert any("noise" in name for name in names)
    if not received:
        assert "raw_outputscale" in names
    expected = torch.autograd.grad(theirs.sum(), parameters)
    gradients = torch.autograd.grad(ours.sum(), parameters)
    for actual, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [random_fourier, quadrature, additive, inducing])
def test_fitting_improves_and_makes_a_new_map(make: Callable[[], FeatureMap]) -> None:
    phi, (X, Y) = make(), _data()
    model = BasisGP(X, Y, feature_map=phi)
    assert model.feature_map is phi
    mll = _mll(model).train()
    before = float(model.log_marginal_likelihood().detach())
    assert fit_gpytorch_mll(mll) is mll
    assert not mll.training
    with torch.no_grad():
        assert float(model.train().log_marginal_likelihood()) > before + 0.01
    assert model.feature_map.fingerprint != phi.fingerprint
    torch.testing.assert_close(model.feature_map.lengthscale, model.raw_lengthscale.detach())
    lower, upper = phi.lengthscale_range
    assert bool((model.raw_lengthscale >= lower).all())
    assert bool((model.raw_lengthscale <= upper).all())
    # The fitted map predicts: a summary over it combines with the model's own.
    fitted = model.feature_map
    summary = summarize(
        fitted,
        X,
        Y,
        noise_var=float(model.likelihood.noise.detach()),
        mean=float(model.mean_module.constant.detach()),
    )
    twin = BasisGP.from_summary(
        summary, feature_map=fitted, mean=float(model.mean_module.constant.detach())
    )
    test_X = uniform(5, 2, seed=3)
    torch.testing.assert_close(
        twin.posterior(test_X).mean, model.posterior(test_X).mean, rtol=1e-7, atol=1e-7
    )


def test_fit_is_close_to_the_exact_gps() -> None:
    X, Y = _data(40)
    kernel = RBFKernel(ard_num_dims=2).double()
    kernel.lengthscale = 0.5
    exact = SingleTaskGP(X, Y, outcome_transform=None)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
    phi = QuadratureFourierFeatures.from_kernel(se(0.2, 0.2), UNIT, tol=1e-4)
    model = BasisGP(
        X,
        Y,
        feature_map=phi.with_hyperparameters(
            torch.tensor([0.5, 0.5]).double(), torch.tensor(1.0).double()
        ),
    )
    model.raw_outputscale.requires_grad_(False)  # BoTorch's default kernel has none
    fit_gpytorch_mll(_mll(model))
    ratio = model.raw_lengthscale / exact.covar_module.lengthscale.squeeze(0)
    assert float((ratio.log().abs()).max().detach()) < 0.02
    test_X = uniform(50, 2, seed=4)
    gap = model.posterior(test_X).mean - exact.posterior(test_X).mean
    assert float(gap.abs().max().detach()) < 5e-3  # where two L-BFGS-B runs stop


def test_fit_with_another_optimizer_and_options() -> None:
    X, Y = _data()
    model = BasisGP(X, Y, feature_map=random_fourier())
    before = float(model.train().log_marginal_likelihood().detach())
    fit_gpytorch_mll(
        _mll(model), optimizer=fit_gpytorch_mll_torch, optimizer_kwargs={"step_limit": 20}
    )
    assert float(model.train().log_marginal_likelihood().detach()) > before


def test_fit_of_a_learned_warp() -> None:
    X, Y = _data()
    warp = Warp(d=2, indices=[0, 1])
    model = BasisGP(X, Y, feature_map=random_fourier(), input_transform=warp)
    before = warp.concentration0.detach().clone()
    fit_gpytorch_mll(_mll(model))
    assert not torch.equal(warp.concentration0, before)
    assert bool(model.posterior(X).mean.isfinite().all())


def test_a_changed_input_transform_is_seen() -> None:
    X, Y = _data()
    phi = random_fourier()
    received = [summarize(phi, *_data(5, seed=1), noise_var=NOISE)]
    for summaries in [[], received]:
        warp = Warp(d=2, indices=[0, 1])
        model = BasisGP(X, Y, feature_map=phi, input_transform=warp, summaries=summaries)
        model.posterior(X)
        fit_gpytorch_mll(_mll(model))
        for _ in range(2):  # after the fit, and after a change by hand
            twin = BasisGP(X, Y, feature_map=phi, input_transform=warp, summaries=summaries)
            twin.load_state_dict(model.state_dict())
            torch.testing.assert_close(model.posterior(X).mean, twin.posterior(X).mean)
            warp.concentration0.data.fill_(2.0)
    first = BasisGP(X, Y, feature_map=phi, input_transform=Normalize(2))
    other = BasisGP(3 * X, Y, feature_map=phi, input_transform=Normalize(2))
    other.posterior(X)
    other.load_state_dict(first.state_dict())
    scaled = first.eval().input_transform(X)
    torch.testing.assert_close(
        other.posterior(X).mean,
        BasisGP(first.input_transform(3 * X), Y, feature_map=phi).posterior(scaled).mean,
    )


def test_a_part_made_for_one_lengthscale_keeps_it_alone() -> None:
    X, Y = _data()
    fixed = QuadratureFourierFeatures.from_kernel(
        StationaryKernel(2.5, [0.3]), UNIT[:, :1], tol=0.1
    )
    free = RandomFourierFeatures.draw(se(0.5), 20, generator=generator(0))
    model = BasisGP(X, Y, feature_map=AdditiveFeatures([fixed, free]))
    fit_gpytorch_mll(_mll(model))
    assert float(model.raw_lengthscale[0].detach()) == 0.3
    assert float(model.raw_lengthscale[1].detach()) != 0.5


def test_another_objective_is_refused() -> None:
    model = BasisGP(*_data(), feature_map=random_fourier())
    with pytest.raises(UnsupportedError, match="not a LeaveOneOutPseudoLikelihood"):
        fit_gpytorch_mll(LeaveOneOutPseudoLikelihood(model.likelihood, model))


def test_casting_a_wrapper_keeps_float64() -> None:
    model = BasisGP(*_data(), feature_map=random_fourier())
    with pytest.warns(InputDataWarning, match="stays in float64"):
        _mll(model).float()
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_a_grid_for_one_lengthscale_keeps_it() -> None:
    X, Y = _data()
    model = BasisGP(X, Y, feature_map=matern_product())
    before = model.raw_lengthscale.detach().clone()
    fit_gpytorch_mll(_mll(model))
    assert torch.equal(model.raw_lengthscale, before)


def test_priors_are_botorchs_dimension_scaled_ones() -> None:
    model = BasisGP(*_data(), feature_map=random_fourier())
    prior = model.lengthscale_prior
    assert float(prior.loc) == pytest.approx(math.sqrt(2) + 0.5 * math.log(2))
    assert float(prior.scale) == pytest.approx(math.sqrt(3))
    theirs = SingleTaskGP(*_data()).likelihood.noise_covar.noise_prior
    ours = model.likelihood.noise_covar.noise_prior
    assert (float(ours.loc), float(ours.scale)) == (float(theirs.loc), float(theirs.scale))
    assert model.likelihood.noise.item() == pytest.approx(float(theirs.mode))


def test_fit_of_no_data_changes_nothing() -> None:
    X, Y = _data(0)
    model = BasisGP(X, Y, feature_map=random_fourier())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fit_gpytorch_mll(_mll(model))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_large_offsets_keep_their_digits() -> None:
    X, Y = _data()
    phi = random_fourier()
    near = BasisGP(X, Y, feature_map=phi, noise_var=NOISE)
    far = BasisGP(X, Y + 1e6, feature_map=phi, noise_var=NOISE, mean=1e6)
    torch.testing.assert_close(
        far.log_marginal_likelihood(), near.log_marginal_likelihood(), rtol=1e-6, atol=1e-6
    )


def test_noise_below_botorchs_bound_stays_as_given() -> None:
    X, Y = _data()
    model = BasisGP(X, Y, feature_map=random_fourier(), noise_var=1e-6)
    assert model.likelihood.noise.tolist() == [pytest.approx(1e-6, rel=1e-12)]
    model = BasisGP(
        X, Y, feature_map=random_fourier(), noise_var=torch.tensor([0.3], dtype=torch.float64)
    )
    assert model.likelihood.noise.tolist() == [pytest.approx(0.3, rel=1e-12)]


# ------------------------------------------------------------------ received summaries


@pytest.mark.parametrize("make", MAPS)
def test_own_data_and_received_summaries_are_all_data(make: Callable[[], FeatureMap]) -> None:
    phi = make()
    parts = [_data(8, seed=i) for i in range(3)]
    summaries = [summarize(phi, *part, noise_var=NOISE, mean=0.1) for part in parts]
    own_and_received = BasisGP(
        *parts[0], feature_map=phi, noise_var=NOISE, mean=0.1, summaries=summaries[1:]
    )
    total = BasisGP.from_summary(sum(summaries), feature_map=phi, noise_var=NOISE, mean=0.1)
    unpacked = Summary.unpack(sum(summaries).pack(), basis=phi.fingerprint)
    sent = BasisGP.from_summary(unpacked, feature_map=phi, noise_var=NOISE, mean=0.1)
    test_X = uniform(6, 2, seed=8)
    expected = own_and_received.posterior(test_X)
    for model in (total, sent):
        posterior = model.posterior(test_X)
        torch.testing.assert_close(posterior.mean, expected.mean, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(posterior.variance, expected.variance, rtol=1e-8, atol=1e-9)
    # Conditioning works on top of what was received.
    conditioned = total.condition_on_observations(*_data(3, seed=9))
    again = own_and_received.condition_on_observations(*_data(3, seed=9))
    if not phi.has_residual:  # a PITC block of one's own grows; a received one cannot
        torch.testing.assert_close(
            conditioned.posterior(test_X).mean, again.posterior(test_X).mean, rtol=1e-7, atol=1e-8
        )


def test_global_model_of_a_batch_of_totals() -> None:
    phi = random_fourier()
    X, Y = uniform(3, 5, 2), normal(3, 5, 1)
    model = BasisGP.from_summary(summarize(phi, X, Y, noise_var=NOISE), feature_map=phi)
    assert model.batch_shape == (3,)
    for i in range(3):
        one = BasisGP.from_summary(summarize(phi, X[i], Y[i], noise_var=NOISE), feature_map=phi)
        test_X = uniform(4, 2)
        torch.testing.assert_close(model.posterior(test_X).mean[i], one.posterior(test_X).mean)


def test_global_model_on_all_inputs_is_the_exact_gp() -> None:
    X, Y = _data(15)
    phi = InducingFeatures(se(0.3, 0.5), X)
    model = BasisGP.from_summary(summarize(phi, X, Y, noise_var=NOISE), feature_map=phi)
    own = BasisGP(X, Y, feature_map=phi, noise_var=NOISE)
    K, test_X = se(0.3, 0.5)(X) + NOISE * torch.eye(15).double(), uniform(9, 2, seed=2)
    k = se(0.3, 0.5)(test_X, X)
    for m in (model, own):
        posterior = m.posterior(test_X)
        torch.testing.assert_close(posterior.mean, k @ torch.linalg.solve(K, Y), rtol=0, atol=1e-6)
        torch.testing.assert_close(
            posterior.distribution.covariance_matrix,
            se(0.3, 0.5)(test_X) - k @ torch.linalg.solve(K, k.mT),
            rtol=0,
            atol=1e-6,
        )


def test_received_summaries_fix_the_map() -> None:
    phi, (X, Y) = random_fourier(), _data()
    received = summarize(phi, *_data(30, seed=1), noise_var=NOISE)
    model = BasisGP(X, Y, feature_map=phi, summaries=[received])
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"likelihood.noise_covar.raw_noise"}
    fit_gpytorch_mll(_mll(model))
    assert model.feature_map is phi
    assert 0.001 < float(model.likelihood.noise.detach()) < 0.1


def test_evidence_given_received_summaries() -> None:
    phi, own = random_fourier(), _data(10)
    received = summarize(phi, *_data(12, seed=1), noise_var=NOISE)
    model = BasisGP(*own, feature_map=phi, noise_var=NOISE, summaries=[received])
    joint = log_evidence(summarize(phi, *own, noise_var=NOISE) + received)
    expected = joint - log_evidence(received)
    log_prior = model.likelihood.noise_covar.noise_prior.log_prob(
        torch.tensor([NOISE], dtype=torch.float64)
    )
    torch.testing.assert_close(
        10 * model.log_marginal_likelihood(), expected + log_prior.squeeze(), rtol=1e-9, atol=1e-9
    )


def test_fitting_does_not_contradict_what_was_received() -> None:
    # Others saw exactly 0 on one half, this site 3 on the other: a mean that moved to 3 would
    # predict 3 where forty observations say 0.
    phi = random_fourier()
    left, right = torch.tensor([0.5, 1.0]).double(), torch.tensor([0.5, 0.0]).double()
    seen = left * uniform(40, 2)
    received = summarize(phi, seen, torch.zeros(40, 1).double(), noise_var=NOISE)
    X = right + left * uniform(20, 2, seed=1)
    model = BasisGP(X, torch.full((20, 1), 3.0).double(), feature_map=phi, summaries=[received])
    fit_gpytorch_mll(_mll(model))
    assert float(model.posterior(seen).mean.detach().abs().max()) < 0.6


def test_damaged_summaries_are_refused() -> None:
    phi, (X, Y) = random_fourier(), _data()
    good = summarize(phi, X, Y, noise_var=NOISE)

    def build(summary: Any) -> BasisGP:
        return BasisGP(X, Y, feature_map=phi, summaries=[summary])

    with pytest.raises(UnsupportedError, match=r"sequence of Summary, got a Tensor"):
        build(good.gram)
    with pytest.raises(InputDataError, match="must be float64"):
        Summary(good.gram.float(), good.moment.float(), good.basis)
    nan = good.moment.clone()
    nan[0] = torch.nan
    with pytest.raises(InputDataError, match=r"the moment of a received summary .* has 1 NaN"):
        build(Summary(good.gram, nan, good.basis))
    skewed = good.gram.clone()
    skewed[0, 1] += 1.0
    with pytest.raises(InputDataError, match="not symmetric"):
        build(Summary(skewed, good.moment, good.basis))
    with pytest.raises(BotorchTensorDimensionError, match="has 5 features, the map has 60"):
        build(Summary(good.gram[:5, :5], good.moment[:5], good.basis))
    batch = Summary(good.gram.expand(2, 60, 60), good.moment.expand(2, 60, 1), good.basis)
    with pytest.raises(
        BotorchTensorDimensionError, match=r"batch shape \(2,\), the model has \(\)"
    ):
        build(batch)


def test_several_outputs_may_share_a_received_gram() -> None:
    phi, (X, Y) = random_fourier(), _data(m=2)
    shared = summarize(phi, X, Y.mT.unsqueeze(-1), noise_var=NOISE)
    assert shared.gram.dim() == 2
    model = BasisGP(X[:3], Y[:3], feature_map=phi, noise_var=NOISE, summaries=[shared])
    test_X = uniform(4, 2, seed=2)
    for i in range(2):
        one = summarize(phi, X, Y[:, [i]], noise_var=NOISE)
        alone = BasisGP(X[:3], Y[:3, [i]], feature_map=phi, noise_var=NOISE, summaries=[one])
        subset = model.subset_output([i])
        torch.testing.assert_close(subset.posterior(test_X).mean, alone.posterior(test_X).mean)


def test_summary_over_another_basis_is_refused() -> None:
    X, Y = _data()
    summary = summarize(random_fourier(), X, Y, noise_var=NOISE)
    with pytest.raises(BasisMismatch, match="different bases"):
        BasisGP(X, Y, feature_map=quadrature(), summaries=[summary])
    with pytest.raises(BasisMismatch, match="different bases"):
        BasisGP.from_summary(summary, feature_map=quadrature())


def test_scaling_by_own_data_contradicts_shared_statistics() -> None:
    phi, (X, Y) = random_fourier(), _data()
    summaries = [summarize(phi, X, Y, noise_var=NOISE)]
    with pytest.raises(UnsupportedError, match="public bounds"):
        BasisGP(X, Y, feature_map=phi, summaries=summaries, input_transform=Normalize(2))
    BasisGP(X, Y, feature_map=phi, summaries=summaries, input_transform=Normalize(2, bounds=UNIT))
    parts = ChainedInputTransform(box=Normalize(2, bounds=UNIT), learnt=Normalize(2))
    with pytest.raises(UnsupportedError, match="ChainedInputTransform learns"):
        BasisGP(X, Y, feature_map=phi, summaries=summaries, input_transform=parts)
    chained = ChainedOutcomeTransform(bilog=Bilog(), scale=Standardize(m=1))
    for learnt in (Standardize(m=1), chained):
        with pytest.raises(UnsupportedError, match="public affine map"):
            BasisGP(X, Y, feature_map=phi, summaries=summaries, outcome_transform=learnt)
    trained = Standardize(m=1)
    trained(Y)  # on public data; a model without own data learns nothing
    public = BasisGP.from_summary(summaries[0], feature_map=phi, outcome_transform=trained.eval())
    inner = BasisGP.from_summary(summaries[0], feature_map=phi).posterior(X).mean
    torch.testing.assert_close(public.posterior(X).mean, Y.mean() + Y.std() * inner)


def test_wrong_arguments() -> None:
    X, Y = _data()
    with pytest.raises(UnsupportedError, match="must be a FeatureMap, got RBFKernel"):
        BasisGP(X, Y, feature_map=RBFKernel())
    with pytest.raises(UnsupportedError, match="either noise_var or train_Yvar"):
        BasisGP(X, Y, Y.square() + 1, feature_map=random_fourier(), noise_var=0.1)


# ------------------------------------------------------------------ messages


def test_sampled_weights_are_of_the_posterior() -> None:
    X, Y = _data(8)
    phi = RandomFourierFeatures.draw(se(0.4, 0.5), 10, generator=generator(0))
    for m in [1, 2]:
        model = BasisGP(X, Y.expand(8, m), feature_map=phi, noise_var=NOISE)
        draws = model.sample_weights(torch.Size([20_000]), generator=generator(0, "w"))
        assert draws.shape == ((20_000, 10) if m == 1 else (20_000, 2, 10))
        values = draws @ phi(X[:3]).mT
        posterior = model.posterior(X[:3])
        mean = posterior.mean.mT if m > 1 else posterior.mean.squeeze(-1)
        variance = posterior.variance.mT if m > 1 else posterior.variance.squeeze(-1)
        error = (values.mean(dim=0) - mean) / (variance / 20_000).sqrt()
        assert float(error.detach().abs().max()) < 5
        error = (values.var(dim=0) / variance - 1) / math.sqrt(2 / 20_000)
        assert float(error.detach().abs().max()) < 5
    again = model.sample_weights(torch.Size([20_000]), generator=generator(0, "w"))
    assert torch.equal(draws, again)


# ------------------------------------------------------------------ cross-validation


@pytest.mark.parametrize("make", [random_fourier, inducing])
@pytest.mark.parametrize("known_noise", [False, True])
def test_batch_cross_validation(make: Callable[[], FeatureMap], known_noise: bool) -> None:
    X, Y = _data(8)
    folds = gen_loo_cv_folds(X, Y, torch.full_like(Y, 0.1) if known_noise else None)
    results = batch_cross_validation(
        model_cls=BasisGP,
        mll_cls=ExactMarginalLogLikelihood,
        cv_folds=folds,
        fit_args={"optimizer_kwargs": {"options": {"maxiter": 3}}},
        model_init_kwargs={"feature_map": make(), "input_transform": Normalize(2, bounds=UNIT)},
    )
    assert results.posterior.mean.shape == (8, 1, 1)
    assert results.observed_Y.shape == (8, 1, 1)


@pytest.mark.parametrize("kind", [BasisGP, PartiallyIndependentGP])
@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.filterwarnings("ignore:A not p.d., added jitter")
def test_leave_one_out_equals_conditioning_on_the_rest(
    kind: type[BasisGP], received: bool, transformed: bool
) -> None:
    X, Y = _data(7)
    phi = inducing() if kind is PartiallyIndependentGP else random_fourier()
    kwargs: dict[str, Any] = {"feature_map": phi, "noise_var": NOISE}
    if received:
        kwargs["summaries"] = [summarize(phi, *_data(9, seed=2), noise_var=NOISE)]
    if transformed:
        X, kwargs["input_transform"] = 3 * X, Normalize(2, bounds=3 * UNIT)
    results = loo_cv(kind(X, Y, **kwargs).eval())
    for i in range(7):
        rest = [j for j in range(7) if j != i]
        one = kind(X[rest], Y[rest], **kwargs).posterior(X[[i]], observation_noise=True)
        torch.testing.assert_close(results.posterior.mean[i], one.mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(
            results.posterior.variance[i], one.variance, rtol=1e-6, atol=1e-7
        )


def test_leave_one_out_of_another_model_is_refused() -> None:
    """A point of the block would be predicted from the others, as no prediction is."""
    X, Y = _data(7)
    model = BasisGP(X, Y, feature_map=inducing(), noise_var=NOISE)
    with pytest.raises(UnsupportedError, match="batch_cross_validation"):
        loo_cv(model.eval())
    mll = _mll(model).train()
    assert bool(mll(model(*model.train_inputs), model.train_targets).isfinite())


@pytest.mark.parametrize("make", [random_fourier, inducing])
@pytest.mark.parametrize("m", [1, 2])
def test_given_noise_of_new_observations_counts(make: Callable[[], FeatureMap], m: int) -> None:
    """Where the model's own noise is inferred, as where every variance is known."""
    X, Y = _data(9, m=m)
    new_X, new_Y = uniform(4, 2, seed=5), normal(4, m, seed=5)
    noise = 0.01 + uniform(4, m, seed=6)
    model = BasisGP(X, Y, feature_map=make(), noise_var=NOISE)
    given = model.condition_on_observations(new_X, new_Y, noise=noise)
    known = BasisGP(X, Y, torch.full_like(Y, NOISE), feature_map=make())
    known = known.condition_on_observations(new_X, new_Y, noise=noise)
    # A third step without a variance: the inferred one.
    more_X, more_Y = uniform(3, 2, seed=8), normal(3, m, seed=8)
    given = given.condition_on_observations(more_X, more_Y)
    known = known.condition_on_observations(more_X, more_Y, noise=torch.full_like(more_Y, NOISE))
    for posterior, expected in (
        (given.posterior(X), known.posterior(X)),
        (given.subset_output([m - 1]).posterior(X), known.subset_output([m - 1]).posterior(X)),
        (copy.deepcopy(given).posterior(X), known.posterior(X)),
    ):
        torch.testing.assert_close(posterior.mean, expected.mean, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(posterior.variance, expected.variance, rtol=1e-7, atol=1e-8)
    given.mean_module.initialize(constant=0.7)  # all anew, from the data and their noise
    known.mean_module.initialize(constant=0.7)
    torch.testing.assert_close(given.posterior(X).mean, known.posterior(X).mean)
    with pytest.raises(InputDataError, match="positive"):
        model.condition_on_observations(new_X, new_Y, noise=-noise)


def test_fantasy_models_of_a_list_know_of_input_transforms() -> None:
    """BoTorch's list of GPs transforms points before it conditions on them."""
    X, Y = _data(8, m=2)
    new_X, new_Y = uniform(3, 2, seed=5), normal(3, 2, seed=5)

    def listed(width: float) -> ModelListGP:
        transform = Normalize(2, bounds=width * UNIT)
        options: dict[str, Any] = {"feature_map": random_fourier(), "noise_var": NOISE}
        options["input_transform"] = transform
        models = [BasisGP(width * X, Y[:, [i]], **options) for i in range(2)]
        return ModelListGP(*models).eval()

    narrow, wide = (
        m.condition_on_observations(m.transform_inputs(w * new_X), new_Y).posterior(w * X)
        for w, m in ((w, listed(w)) for w in (1.0, 3.0))
    )
    torch.testing.assert_close(narrow.mean, wide.mean)
    once = Round(integer_indices=[0])
    model = BasisGP(X, Y, feature_map=random_fourier(), input_transform=once)
    with pytest.raises(UnsupportedError, match="Round cannot be undone"):
        model.get_fantasy_model(new_X, new_Y.mT)


def test_a_bounded_map_takes_no_learnt_box() -> None:
    X, Y = _data()
    for make in (quadrature, additive, karhunen_loeve, warped):
        with pytest.raises(UnsupportedError, match=r"Normalize\(d, bounds=bounds\)"):
            BasisGP(X, Y, feature_map=make(), input_transform=Normalize(2))
        BasisGP(X, Y, feature_map=make(), input_transform=Normalize(2, bounds=UNIT))
    BasisGP(X, Y, feature_map=random_fourier(), input_transform=Normalize(2))


def test_lengthscales_of_every_input() -> None:
    X, Y = _data()
    model = BasisGP(X, Y, feature_map=random_fourier())
    assert model.covar_module.lengthscale.tolist() == [[0.4, 0.6]]
    torch.testing.assert_close(model.covar_module(X, X).to_dense(), model.feature_map.covariance(X))
    parts = [RandomFourierFeatures.draw(se(ell), 20, generator=generator(0)) for ell in (0.2, 0.9)]
    swapped = BasisGP(X, Y, feature_map=AdditiveFeatures(parts, [[1], [0]]))
    assert swapped.covar_module.lengthscale.tolist() == [[0.9, 0.2]]
    twice = BasisGP(X, Y, feature_map=AdditiveFeatures([*parts, parts[0]], [[1], [0], [0]]))
    with pytest.raises(UnsupportedError, match="3 for 2 inputs"):
        _ = twice.covar_module.lengthscale


def test_a_model_without_own_data_has_no_points() -> None:
    phi = random_fourier()
    model = BasisGP.from_summary(summarize(phi, *_data(), noise_var=NOISE), feature_map=phi)
    assert not hasattr(model, "train_inputs")  # BoTorch's word for: there are none
    with pytest.raises(UnsupportedError, match="no observations of its own"):
        _ = model.train_inputs
    assert model.condition_on_observations(*_data(3)).train_inputs[0].shape == (3, 2)


def test_several_outputs_have_their_points_in_the_layout_of_gpytorch() -> None:
    X, Y = _data(8)
    phi, Y = random_fourier(), torch.cat([Y, Y.cos()], dim=-1)
    both = BasisGP(X, Y, feature_map=phi, noise_var=NOISE)
    assert torch.equal(both.train_inputs[0], X.expand(2, 8, 2))
    both.set_train_data(*both.train_inputs, both.train_targets)
    Z = uniform(3, 2, seed=1)
    theirs = both.eval()(Z.expand(2, 3, 2))
    torch.testing.assert_close(theirs.mean.mT, both.posterior(Z).mean)
    assert both.posterior(Z.expand(2, 3, 2)).mean.shape == (2, 3, 2)
    with pytest.raises(UnsupportedError, match="one model per output"):
        both(uniform(2, 3, 2))
    with pytest.raises(BotorchTensorDimensionError, match="once for each of 2 outputs"):
        both(uniform(5, 3, 2))
    parts = [BasisGP(X, y, feature_map=phi, noise_var=NOISE) for y in Y.split(1, dim=-1)]
    laws = [model.posterior(Z).distribution for model in (both, ModelListGP(*parts))]
    torch.testing.assert_close(*(law.covariance_matrix for law in laws))
    search = qMultiObjectivePredictiveEntropySearch(both, uniform(2, 3, 2, seed=2))
    assert bool(search(uniform(4, 1, 2, seed=3)).isfinite().all())


def test_fantasies_share_the_data() -> None:
    X, Y = _data(20)
    model = BasisGP(X, Y, feature_map=random_fourier())
    sampler = SobolQMCNormalSampler(torch.Size([16]))
    fantasy = model.fantasize(uniform(8, 1, 2), sampler)
    assert fantasy._data.parts[0][0] is model._data.parts[0][0]
    assert fantasy.train_inputs[0].shape == (16, 8, 21, 2)
    conditioned = model.condition_on_observations(uniform(8, 1, 2), normal(16, 8, 1, 1))
    again = copy.deepcopy(conditioned)
    torch.testing.assert_close(again.posterior(X).mean, conditioned.posterior(X).mean)
    both = BasisGP(X, Y.expand(20, 2), feature_map=random_fourier())
    fantasy = both.fantasize(uniform(1, 2), sampler)
    one = fantasy.posterior(X, output_indices=[1])
    torch.testing.assert_close(one.mean, fantasy.posterior(X).mean[..., [1]])


def test_gradients_after_a_prediction_without_gradients() -> None:
    X, Y = _data(8)
    model = BasisGP(X, Y, feature_map=random_fourier())
    point = uniform(1, 2, seed=5).requires_grad_()
    fantasy = model.condition_on_observations(point, Y[:1])
    with torch.no_grad():
        fantasy.posterior(X)
    (after,) = torch.autograd.grad(fantasy.posterior(X).mean.sum(), point)
    fresh = model.condition_on_observations(point, Y[:1])
    (expected,) = torch.autograd.grad(fresh.posterior(X).mean.sum(), point)
    torch.testing.assert_close(after, expected)


def test_subsetting_keeps_bounds_priors_and_caches() -> None:
    X, Y = _data(m=2)
    model = BasisGP(X, Y, feature_map=random_fourier(), noise_var=1e-6)
    model.likelihood.noise_covar.raw_noise.requires_grad_(False)
    model.posterior(X)
    one = model.subset_output([1])
    assert not one.likelihood.noise_covar.raw_noise.requires_grad
    assert float(one.likelihood.noise_covar.raw_noise_constraint.lower_bound) < 1e-5
    assert one._cache is not None
    assert one.likelihood.noise.shape == (1,)
    fresh = BasisGP(X, Y[:, [1]], feature_map=random_fourier(), noise_var=1e-6)
    torch.testing.assert_close(one.posterior(X).mean, fresh.posterior(X).mean)
    model.requires_grad_(True)
    fit_gpytorch_mll(_mll(model.subset_output([0])))


def test_leaving_a_quadratures_domain_is_refused() -> None:
    X, Y = _data()
    model = BasisGP(X, Y, feature_map=quadrature())
    with pytest.raises(InputDataError, match="outside the bounds"):
        model.posterior(X + 5)
    with pytest.raises(InputDataError, match="outside the bounds"):
        model.condition_on_observations(X + 5, Y)


def test_bad_noise() -> None:
    X, Y = _data()
    known = BasisGP(X, Y, torch.ones_like(Y), feature_map=random_fourier())
    with pytest.raises(InputDataError, match="noise_var must be positive"):
        known.condition_on_observations(X, Y, noise=-torch.ones_like(Y))
    with pytest.raises(InputDataError, match="must not be negative"):
        known.posterior(X, observation_noise=-torch.ones_like(Y))
    with pytest.raises(BotorchTensorDimensionError, match="does not fit predictions"):
        known.posterior(X, observation_noise=torch.ones(3, 1).double())
    empty = BasisGP(X[:0], Y[:0], Y[:0], feature_map=random_fourier())
    with pytest.raises(InputDataError, match="no observations whose noise"):
        empty.posterior(X, observation_noise=True)
    with pytest.raises(InputDataError, match="Standardize cannot learn from no observations"):
        BasisGP(X[:0], Y[:0], feature_map=random_fourier(), outcome_transform=Standardize(m=1))
    two = BasisGP(
        X, Y.expand(-1, 2), feature_map=random_fourier(), noise_var=torch.tensor([0.5, 0.25])
    )
    assert two.likelihood.noise.squeeze(-1).tolist() == [0.5, 0.25]
    with pytest.raises(BotorchTensorDimensionError, match="noise variances of 25"):
        known.set_train_data(X[:5], Y[:5, 0], strict=False)


def test_repr_says_what_it_holds() -> None:
    phi, (X, Y) = random_fourier(), _data(m=2)
    received = summarize(phi, X, Y.mT.unsqueeze(-1), noise_var=NOISE)
    model = BasisGP(X, Y, feature_map=phi, summaries=[received])
    assert "num_data=25, num_outputs=2, batch_shape=(), summaries=1" in repr(model)


def test_set_train_data() -> None:
    X, Y = _data()
    model = BasisGP(X, Y, feature_map=random_fourier())
    model.posterior(X)
    new_X, new_Y = _data(6, seed=4)
    with pytest.raises(RuntimeError, match="strict=False"):
        model.set_train_data(new_X, new_Y.squeeze(-1))
    model.set_train_data([new_X], new_Y.squeeze(-1), strict=False)
    expected = BasisGP(new_X, new_Y, feature_map=random_fourier()).posterior(X)
    torch.testing.assert_close(model.posterior(X).mean, expected.mean)


def test_paper_cosine_works_in_the_model() -> None:
    model = BasisGP(*_data(), feature_map=paper_cosine(), noise_var=NOISE)
    assert bool((model.posterior(uniform(5, 2)).variance > 0).all())
