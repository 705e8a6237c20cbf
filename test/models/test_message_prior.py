"""Messages as a prior, against dense formulas."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.sampling.pathwise import draw_kernel_feature_paths, draw_matheron_paths
from botorch.utils.datasets import SupervisedDataset
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Size, Tensor

from botorch_fed.models import FeatureMap
from botorch_fed.models.message_prior import MessageMean, MessagePriorGP
from test.cases import inducing, normal, random_fourier, uniform

NOISE, MEAN, SCALE = 0.03, 0.4, 0.8
counts = pytest.mark.parametrize("N", [1, 5, 80])  # no spread, fewer and more than features


def _data() -> tuple[Tensor, Tensor]:
    X = uniform(9, 2)
    return X, (5 * X).sin().sum(dim=-1, keepdim=True) + 0.1 * normal(9, 1)


def _messages(phi: FeatureMap, N: int) -> Tensor:
    return 0.5 * normal(N, phi.num_features, seed=3)


def _residual(outputscale: float = 0.3, matern: bool = False) -> ScaleKernel:
    base = MaternKernel(2.5, ard_num_dims=2) if matern else RBFKernel(ard_num_dims=2)
    kernel = ScaleKernel(base).double()
    kernel.outputscale, base.lengthscale = outputscale, torch.tensor([[0.4, 0.6]]).double()
    return kernel


def _model(phi: FeatureMap, N: int = 5, **kwargs: Any) -> MessagePriorGP:
    X, Y = _data()
    kwargs.setdefault("residual_kernel", _residual())
    kwargs.setdefault("weights", _messages(phi, N))
    model = MessagePriorGP(X, Y, feature_map=phi, mean=MEAN, message_scale=SCALE, **kwargs)
    model.likelihood.noise = torch.tensor(NOISE, dtype=torch.float64)
    return model.eval()


@counts
@pytest.mark.parametrize("make_map", [random_fourier, inducing])
@pytest.mark.parametrize("matern", [False, True])
def test_posterior_equals_the_dense_formula(N: int, make_map: Any, matern: bool) -> None:
    phi = make_map()
    W = _messages(phi, N)
    residual = _residual(matern=matern)
    model = _model(phi, N, residual_kernel=residual)
    C = SCALE**2 * (W.T.cov() if N > 1 else torch.zeros(W.shape[1], W.shape[1]).double())
    X, Y = _data()
    test_X = uniform(6, 2, seed=4)
    both = torch.cat([X, test_X])
    with torch.no_grad():
        K = phi(both) @ C @ phi(both).mT + residual(both).to_dense()
    m = MEAN + phi(both) @ W.mean(dim=0)
    A = K[:9, :9] + NOISE * torch.eye(9).double()
    gain = torch.linalg.solve(A, K[:9, 9:]).mT
    mean = m[9:] + gain @ (Y.squeeze(-1) - m[:9])
    posterior = model.posterior(test_X)
    torch.testing.assert_close(posterior.mean.squeeze(-1), mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        posterior.distribution.covariance_matrix,
        K[9:, 9:] - gain @ K[:9, 9:],
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("known_noise", [False, True])
def test_prediction_is_gpytorchs(q: int, known_noise: bool) -> None:
    phi = random_fourier()
    X, Y = _data()
    kwargs: Any = {"feature_map": phi, "weights": _messages(phi, 5), "mean": MEAN}
    if known_noise:
        kwargs["train_Yvar"] = 0.01 + 0.1 * uniform(9, 1, seed=8)
    model = MessagePriorGP(X, Y, **kwargs).eval()
    test_X = uniform(4, 2, q, 2, seed=4)
    conditioned = model.condition_on_observations  # needs the caches that a prediction fills
    for batch in [test_X, test_X[0], test_X[0, 0]]:
        fast = model(batch)
        slow = ExactGP.__call__(model, batch)
        torch.testing.assert_close(fast.mean, slow.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            fast.covariance_matrix, slow.covariance_matrix, rtol=1e-9, atol=1e-9
        )
    noise = {"noise": torch.full((3, 1), 0.2).double()} if known_noise else {}
    more = conditioned(uniform(3, 2, seed=5), normal(3, 1, seed=5), **noise)
    slow = ExactGP.__call__(more, test_X)
    torch.testing.assert_close(more(test_X).mean, slow.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(more(test_X).variance, slow.variance, rtol=1e-8, atol=1e-8)


def test_without_residual_the_posterior_lies_in_the_span_of_the_messages() -> None:
    phi = random_fourier()
    W = _messages(phi, 4)
    model = _model(phi, weights=W, residual_kernel=_residual(outputscale=1e-14))
    X = uniform(50, 2, seed=4)
    functions = phi(X) @ W.mT  # 50 x 4
    target = model.posterior(X).mean.detach() - MEAN
    combination = torch.linalg.lstsq(functions, target).solution
    torch.testing.assert_close(functions @ combination, target, rtol=1e-8, atol=1e-8)
    # The mean is an affine combination: deviations from the mean message sum to zero.
    assert float(combination.sum()) == pytest.approx(1, abs=1e-8)


def test_messages_that_agree_are_only_a_mean() -> None:
    phi = random_fourier()
    X, Y = _data()
    W = _messages(phi, 1).expand(7, 60)
    model = _model(phi, weights=W)
    plain = SingleTaskGP(
        X,
        Y,
        mean_module=MessageMean(phi, W[:1], constant=MEAN),
        covar_module=_residual(),
        outcome_transform=None,
    )
    plain.likelihood.noise = torch.tensor(NOISE, dtype=torch.float64)
    test_X = uniform(6, 2, seed=4)
    expected, posterior = plain.posterior(test_X), model.posterior(test_X)
    torch.testing.assert_close(posterior.mean, expected.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(posterior.variance, expected.variance, rtol=1e-10, atol=1e-10)


def test_messages_help_where_they_are_right() -> None:
    # The objective is a combination of the messages: few observations fix it everywhere.
    phi = random_fourier()
    W = _messages(phi, 4)
    X, test_X = uniform(8, 2), uniform(100, 2, seed=4)
    w = torch.tensor([0.9, -0.4, 0.3, 0.2]).double() @ W
    Y, truth = (phi(X) @ w).unsqueeze(-1), phi(test_X) @ w
    errors = []
    for model in [
        MessagePriorGP(X, Y, feature_map=phi, weights=W, residual_kernel=_residual(1e-4)),
        SingleTaskGP(X, Y),
    ]:
        model.likelihood.noise = 1e-4
        error = model.posterior(test_X).mean.squeeze(-1) - truth
        errors.append(float(error.detach().square().mean().sqrt()))
    assert errors[0] < 0.2 * errors[1]


@counts
def test_conditioning_equals_refitting(N: int) -> None:
    phi = random_fourier()
    model = _model(phi, N)
    X, Y = _data()
    new_X, new_Y, test_X = uniform(3, 2, seed=5), normal(3, 1, seed=5), uniform(4, 2, seed=6)
    model.posterior(test_X)
    conditioned = model.condition_on_observations(new_X, new_Y)
    whole = MessagePriorGP(
        torch.cat([X, new_X]),
        torch.cat([Y, new_Y]),
        feature_map=phi,
        weights=_messages(phi, N),
        mean=MEAN,
        message_scale=SCALE,
        residual_kernel=_residual(),
    )
    whole.likelihood.noise = torch.tensor(NOISE, dtype=torch.float64)
    first, second = conditioned.posterior(test_X), whole.posterior(test_X)
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(first.variance, second.variance, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("fit_scale", [False, True])
def test_fitting(fit_scale: bool) -> None:
    phi = random_fourier()
    X, Y = _data()
    W = _messages(phi, 5)
    model = MessagePriorGP(X, Y, feature_map=phi, weights=W, fit_message_scale=fit_scale)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    before = mll(model(X), model.train_targets).item()
    root = model.covar_module.root.clone()
    fit_gpytorch_mll(mll)
    mll.train()
    assert mll(model(X), model.train_targets).item() > before
    assert torch.equal(model.covar_module.root, root)
    assert (model.covar_module.raw_scale.item() != 1.0) is fit_scale
    state = model.state_dict()
    assert all(value.numel() <= 2 for value in state.values())  # hyperparameters, no messages
    assert ("covar_module.scale_prior._buffered_loc" in state) is fit_scale


@counts
@pytest.mark.parametrize("transformed", [False, True])
def test_paths_have_the_models_law(N: int, transformed: bool) -> None:
    phi = random_fourier()
    kwargs: dict[str, Any] = {}
    if transformed:
        bounds = torch.tensor([[-1.0, -1.0], [2.0, 2.0]]).double()
        kwargs = {"input_transform": Normalize(2, bounds=bounds)}
    model = _model(phi, N, **kwargs)
    X, count = uniform(5, 2, seed=4), 6000
    posterior = model.posterior(X)
    with torch.no_grad():
        values = draw_matheron_paths(model, Size([count]))(X)
    covariance = posterior.distribution.covariance_matrix.detach()
    variance = covariance.diagonal()
    # Five standard errors; the residual's 1,024 random features err by 1024^-1/2 of 0.3.
    slack = 0.3 / 32
    error = (values.mean(dim=0) - posterior.mean.squeeze(-1)).abs()
    assert bool((error < 5 * (variance / count).sqrt() + slack).all())
    spread = (variance[:, None] * variance + covariance.square()).sqrt()
    error = (values.T.cov() - covariance).abs()
    assert bool((error < 5 * spread / count**0.5 + slack).all())


def test_prior_paths_start_from_the_messages() -> None:
    phi = random_fourier()
    model = _model(phi, residual_kernel=_residual(outputscale=1e-12))
    X = uniform(6, 2)
    paths = draw_kernel_feature_paths(model, sample_shape=Size([4000]))
    values = paths(X)
    expected = MEAN + phi(X) @ _messages(phi, 5).mean(dim=0)
    spread = values.std(dim=0)
    assert bool(((values.mean(dim=0) - expected).abs() < 5 * spread / 4000**0.5).all())


def test_the_root_does_not_depend_on_the_signs_of_a_factorisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phi = random_fourier()
    weights = normal(90, phi.num_features)  # more messages than features
    X, Y = uniform(5, 2), normal(5, 1)
    before = MessagePriorGP(X, Y, feature_map=phi, weights=weights).covar_module.root
    qr = torch.linalg.qr

    def flipped(A: Tensor, mode: str) -> Any:
        Q, R = qr(A, mode=mode)
        signs = torch.where(uniform(len(R), 1, seed=3) < 0.5, -1.0, 1.0)
        return torch.return_types.linalg_qr((Q, signs * R))

    monkeypatch.setattr(torch.linalg, "qr", flipped)
    after = MessagePriorGP(X, Y, feature_map=phi, weights=weights).covar_module.root
    assert bool((after.diagonal() > 0).all())
    assert torch.equal(after, before)


@pytest.mark.parametrize("batch_shape", [(3,), (2, 3)])
def test_batch_is_a_loop(batch_shape: tuple[int, ...]) -> None:
    phi = random_fourier()
    X, Y = uniform(*batch_shape, 9, 2), normal(*batch_shape, 9, 1)
    W, test_X = _messages(phi, 5), uniform(*batch_shape, 4, 2, seed=4)
    posterior = MessagePriorGP(X, Y, feature_map=phi, weights=W).posterior(test_X)
    assert posterior.mean.shape == (*batch_shape, 4, 1)
    last = tuple(size - 1 for size in batch_shape)
    one = MessagePriorGP(X[last], Y[last], feature_map=phi, weights=W).posterior(test_X[last])
    torch.testing.assert_close(posterior.mean[last], one.mean)
    torch.testing.assert_close(posterior.variance[last], one.variance)


def test_copies_and_precision() -> None:
    phi = random_fourier()
    model, X = _model(phi), uniform(4, 2, seed=3)
    before = model.posterior(X).mean
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.subset_output([0])]
    for other in copies:
        torch.testing.assert_close(other.posterior(X).mean, before)
    with pytest.warns(InputDataWarning, match="stays in float64"):
        model.to(torch.float32)
    torch.testing.assert_close(model.posterior(X).mean, before)
    with pytest.warns(InputDataWarning, match="train_X is torch.float32"):
        MessagePriorGP(_data()[0].float(), _data()[1], feature_map=phi, weights=_messages(phi, 2))


def test_known_noise_and_construct_inputs() -> None:
    phi = random_fourier()
    X, Y = _data()
    W = _messages(phi, 3)
    names: Any = {"feature_names": ["a", "b"], "outcome_names": ["y"]}
    data = SupervisedDataset(X, Y, Yvar=torch.full_like(Y, 0.2), **names)
    inputs = MessagePriorGP.construct_inputs(data, feature_map=phi, weights=W, mean=0.2)
    model = MessagePriorGP(**inputs)
    assert model.likelihood.noise.unique().tolist() == [0.2]
    assert model.mean_module.constant == 0.2
    with pytest.raises(UnsupportedError, match="needs the messages"):
        MessagePriorGP.construct_inputs(data)


def test_bad_input() -> None:
    phi = random_fourier()
    X, Y = _data()
    W = _messages(phi, 3)
    for wrong in [W[0], W[:, :-1], W[:0]]:
        with pytest.raises(BotorchTensorDimensionError, match="`N x 60` with N >= 1"):
            MessagePriorGP(X, Y, feature_map=phi, weights=wrong)
    damaged = W.clone()
    damaged[1, 1] = torch.inf
    with pytest.raises(InputDataError, match="1 infinite"):
        MessagePriorGP(X, Y, feature_map=phi, weights=damaged)
    with pytest.raises(UnsupportedError, match="must be a FeatureMap, got Tensor"):
        MessageMean(W, W)  # type: ignore[arg-type]
    with pytest.raises(BotorchTensorDimensionError, match="one outcome"):
        MessagePriorGP(X, Y.expand(9, 2), feature_map=phi, weights=W)
    for scale, fit in [(-1.0, False), (torch.nan, False), (0.0, True)]:
        with pytest.raises(UnsupportedError, match="scale of the messages"):
            MessagePriorGP(
                X, Y, feature_map=phi, weights=W, message_scale=scale, fit_message_scale=fit
            )
    with pytest.raises(UnsupportedError, match="public bounds"):
        MessagePriorGP(X, Y, feature_map=phi, weights=W, input_transform=Normalize(2))
    with pytest.raises(UnsupportedError, match="messages are on the shared scale"):
        MessagePriorGP(X, Y, feature_map=phi, weights=W, outcome_transform=Standardize(m=1))
