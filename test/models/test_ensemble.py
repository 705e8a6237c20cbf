"""The ranking-weighted ensemble against loops over agents and refitted models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from botorch import fit_gpytorch_mll
from botorch.cross_validation import loo_cv
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models import SingleTaskGP
from botorch.models.deterministic import GenericDeterministicModel
from botorch.models.transforms import Normalize, Standardize
from botorch.models.transforms.outcome import Log
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Size, Tensor

from botorch_fed.errors import BasisMismatch
from botorch_fed.models import BasisGP, FeatureMap, Summary, WeightPosterior, summarize
from botorch_fed.models.ensemble import (
    RankingEnsemble,
    _leave_one_out_draws,
    _ranking_losses,
    _shares_of_wins,
)
from botorch_fed.rng import generator
from test.cases import inducing, normal, random_fourier, uniform

N, MEAN = 6, 0.4


def _objective(X: Tensor) -> Tensor:
    return (5 * X).sin().sum(dim=-1, keepdim=True)


def _data(n: int = 9) -> tuple[Tensor, Tensor]:
    X = uniform(n, 2)
    return X, _objective(X) + 0.1 * normal(n, 1)


def _agents(phi: FeatureMap, signs: list[float]) -> Summary:
    """Agents whose functions are the target's, times a sign, from 12 observations each."""
    N = len(signs)
    X = uniform(N, 12, 2, seed=1)
    Y = torch.tensor(signs).double()[:, None, None] * _objective(X) + 0.1 * normal(N, 12, 1)
    summary = summarize(phi, X, Y, noise_var=0.02, mean=MEAN)
    return Summary(summary.gram, summary.moment, summary.basis)


def _target(kind: str, phi: FeatureMap) -> Any:
    X, Y = _data()
    if kind == "basis":
        return BasisGP(X, Y, feature_map=phi, noise_var=0.02, mean=0.1)
    if kind == "raw":
        return SingleTaskGP(X, Y, outcome_transform=None)
    return SingleTaskGP(X, 50 + 9 * Y, input_transform=Normalize(2))  # standardised


def _ensemble(target: Any, phi: FeatureMap, signs: list[float], **kwargs: Any) -> RankingEnsemble:
    return RankingEnsemble(
        target,
        _agents(phi, signs),
        feature_map=phi,
        mean=MEAN,
        generator=generator(0, "rgpe"),
        **kwargs,
    )


SIGNS = [1.0, 1.0, 0.5, -1.0, 1.0, 0.2]
kinds = pytest.mark.parametrize("kind", ["basis", "raw", "standardised"])


# ------------------------------------------------------------------ posterior


@kinds
@pytest.mark.parametrize("make_map", [random_fourier, inducing])
def test_posterior_equals_a_loop_over_agents(kind: str, make_map: Any) -> None:
    phi = make_map()
    summaries = _agents(phi, SIGNS)
    model = _ensemble(_target(kind, phi), phi, SIGNS)
    assert 0 < model.target_weight < 1
    X = uniform(5, 3, 2, seed=4)
    own = model.target.posterior(X)
    mean = model.target_weight * own.mean
    covariance = model.target_weight**2 * own.distribution.covariance_matrix
    for i in range(N):
        agent = Summary(summaries.gram[i], summaries.moment[i], summaries.basis)
        agent_gp = BasisGP.from_summary(agent, feature_map=phi, mean=MEAN)
        w, posterior = model.agent_weights[i], agent_gp.posterior(X)
        mean = mean + w * posterior.mean
        covariance = covariance + w**2 * posterior.distribution.covariance_matrix
    posterior = model.posterior(X)
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        posterior.distribution.covariance_matrix, covariance, rtol=1e-10, atol=1e-10
    )


def test_without_agents_of_use_it_is_the_target() -> None:
    phi = random_fourier()
    model = _ensemble(_target("standardised", phi), phi, [-1.0, -1.0])
    assert model.agent_weights.tolist() == [0, 0]
    assert model.target_weight == 1
    X = uniform(4, 2, seed=3)
    expected, posterior = model.target.posterior(X), model.posterior(X)
    torch.testing.assert_close(posterior.mean, expected.mean)
    torch.testing.assert_close(posterior.variance, expected.variance)


def test_noise_is_the_targets_on_the_original_scale() -> None:
    phi = random_fourier()
    model, X = _ensemble(_target("standardised", phi), phi, SIGNS), uniform(4, 2, seed=3)
    noise = model.target.likelihood.noise * model.target.outcome_transform.stdvs.squeeze() ** 2
    quiet, noisy = model.posterior(X), model.posterior(X, observation_noise=True)
    torch.testing.assert_close(noisy.variance - quiet.variance, noise.expand(4, 1))
    torch.testing.assert_close(noisy.mean, quiet.mean)


@kinds
def test_fantasies_condition_the_target_only(kind: str) -> None:
    phi = random_fourier()
    model = _ensemble(_target(kind, phi), phi, SIGNS)
    new_X, new_Y = uniform(3, 2, 2, seed=5), normal(3, 2, 1, seed=5)
    conditioned = model.condition_on_observations(new_X, new_Y)
    assert conditioned.batch_shape == (3,)
    assert model.batch_shape == ()
    assert torch.equal(conditioned.agent_weights, model.agent_weights)
    X, w = uniform(4, 2, seed=3), model.target_weight
    change = conditioned.posterior(X).mean - model.posterior(X).mean
    target = model.target.condition_on_observations(new_X, new_Y)
    own_change = target.posterior(X).mean - model.target.posterior(X).mean
    torch.testing.assert_close(change, w * own_change)
    fantasy = model.fantasize(new_X, SobolQMCNormalSampler(Size([4])))
    assert fantasy.posterior(X).mean.shape == (4, 3, 4, 1)


def test_copies_and_outputs() -> None:
    phi = random_fourier()
    model, X = _ensemble(_target("standardised", phi), phi, SIGNS), uniform(4, 2, seed=3)
    before = model.posterior(X).mean
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.subset_output([-1])]
    for other in copies:
        torch.testing.assert_close(other.posterior(X).mean, before)
    torch.testing.assert_close(model.posterior(X, output_indices=[0]).mean, before)
    for wrong in [[1], [0, 0], []]:
        with pytest.raises(IndexError, match="one output"):
            model.subset_output(wrong)
    assert "agents=6" in repr(model)


@kinds
@pytest.mark.parametrize("make_map", [random_fourier, inducing])
def test_drawn_functions_have_the_ensembles_law(kind: str, make_map: Any) -> None:
    phi = make_map()
    model = _ensemble(_target(kind, phi), phi, SIGNS)
    X, count = uniform(4, 2, seed=3), 3000
    with torch.no_grad():
        draws = draw_matheron_paths(model, Size([count]))(X)
        posterior = model.posterior(X)
    covariance = posterior.distribution.covariance_matrix
    variance = covariance.diagonal()
    # Six standard errors; a prior that is drawn by features may be off by one percent.
    error = (draws.mean(dim=0) - posterior.mean.squeeze(-1)).abs()
    assert bool((error < 6 * (variance / count).sqrt()).all())
    spread = (variance[:, None] * variance + covariance.square()).sqrt()
    error = (draws.T.cov() - covariance).abs()
    assert bool((error < 6 * spread / count**0.5 + 0.01 * spread).all())


def test_drawn_functions_of_fantasies_are_refused() -> None:
    phi = random_fourier()
    model = _ensemble(_target("basis", phi), phi, SIGNS)
    fantasy = model.condition_on_observations(uniform(3, 2, 2), normal(3, 2, 1))
    with pytest.raises(UnsupportedError, match=r"batch shape \(3,\)"):
        draw_matheron_paths(fantasy, Size([2]))


def test_what_needs_one_prior_or_other_weights_is_refused() -> None:
    phi = random_fourier()
    model = _ensemble(_target("raw", phi), phi, SIGNS)
    with pytest.raises(UnsupportedError, match="fit the target first"):
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    with pytest.raises(UnsupportedError, match=r"loo_cv\(model\.target\)"):
        loo_cv(model)


def test_weights_are_part_of_the_state() -> None:
    phi = random_fourier()
    model = _ensemble(_target("basis", phi), phi, SIGNS)
    other = _ensemble(_target("basis", phi), phi, [-s for s in SIGNS])
    assert not torch.equal(other.agent_weights, model.agent_weights)
    other.load_state_dict(model.state_dict())
    X = uniform(4, 2, seed=3)
    torch.testing.assert_close(other.posterior(X).mean, model.posterior(X).mean)
    torch.testing.assert_close(other.posterior(X).variance, model.posterior(X).variance)


# ------------------------------------------------------------------ weights


@kinds
def test_weights_sum_to_one_and_replay(kind: str) -> None:
    phi = random_fourier()
    target = _target(kind, phi)
    first, second = (_ensemble(target, phi, SIGNS) for _ in range(2))
    assert float(first.agent_weights.sum()) + first.target_weight == pytest.approx(1, abs=1e-12)
    assert torch.equal(first.agent_weights, second.agent_weights)
    assert bool((first.agent_weights >= 0).all())


@kinds
def test_likeness_is_rewarded_and_reversal_dropped(kind: str) -> None:
    phi = random_fourier()
    model = _ensemble(_target(kind, phi), phi, [1.0, -1.0, -0.5])
    alike, *reversed_ = model.agent_weights.tolist()
    assert alike > 0.5
    assert reversed_ == [0.0, 0.0]


def test_agents_identical_to_the_target_share_the_weight() -> None:
    # In-sample agents rank the target's data better than its leave-one-out self.
    phi = random_fourier()
    X, Y = _data()
    one = summarize(phi, X, Y, noise_var=0.02)
    summaries = Summary(one.gram.expand(5, 60, 60), one.moment.expand(5, 60, 1), one.basis)
    model = RankingEnsemble(
        BasisGP(X, Y, feature_map=phi, noise_var=0.02),
        summaries,
        feature_map=phi,
        num_samples=2000,
        generator=generator(1),
    )
    assert model.target_weight < 0.2
    # Five alike agents: each wins (1 - w_0)/5, within five standard errors of 2,000 draws.
    error = (model.agent_weights - (1 - model.target_weight) / 5).abs().max()
    assert float(error) < 5 * (0.2 * 0.8 / 2000) ** 0.5


def test_one_observation_orders_nothing() -> None:
    phi = random_fourier()
    for n in [0, 1]:
        X, Y = _data(n)
        model = _ensemble(BasisGP(X, Y, feature_map=phi), phi, SIGNS)
        assert model.target_weight == 1


def test_shares_of_wins_by_hand() -> None:
    inf_case = torch.tensor([[9.0, 9.0, 9.0, 9.0], [1.0, 2.0, 5.0, 3.0], [1.0, 2.0, 3.0, 5.0]])
    shares, target = _shares_of_wins(inf_case.double(), torch.tensor([2.0, 2.0, 4.0, 4.0]).double())
    # Draw 1: agents 2 and 3 tie. Draw 2: a tie with the target. Draws 3 and 4: agents 3 and 2.
    assert shares.tolist() == [0, 0.375, 0.375]
    assert float(target) == 0.25


def test_ranking_losses_count_ordered_pairs() -> None:
    values, y = normal(3, 5, 7), normal(7, seed=4)
    y[2] = y[5]  # of a tie, exactly one order is wrong
    expected = torch.zeros(3, 5)
    for j in range(7):
        for k in range(7):
            expected += (values[..., j] < values[..., k]) ^ (y[j] < y[k])
    torch.testing.assert_close(_ranking_losses(values, y), expected.double())


@pytest.mark.parametrize("make_map", [random_fourier, inducing])
@pytest.mark.parametrize("known_noise", [False, True])
def test_leave_one_out_draws_have_the_law_of_refitted_models(
    make_map: Any, known_noise: bool
) -> None:
    X, Y = _data()
    Yvar = 0.01 + 0.1 * uniform(9, 1, seed=8)

    def make(rows: list[int]) -> BasisGP:
        phi = make_map()
        if known_noise:
            return BasisGP(X[rows], Y[rows], Yvar[rows], feature_map=phi, mean=0.3)
        return BasisGP(X[rows], Y[rows], feature_map=phi, mean=0.3, noise_var=0.03)

    model = make(list(range(9)))
    model.posterior(X)
    count = 4000
    with torch.no_grad():
        draws = _leave_one_out_draws(model, count, generator(2))
    for j in [0, 4]:
        posterior = make([i for i in range(9) if i != j]).posterior(X)
        covariance = posterior.distribution.covariance_matrix.detach()
        variance = covariance.diagonal()
        # Five standard errors of 4,000 draws.
        error = (draws[:, j].mean(dim=0) - posterior.mean.squeeze(-1)).abs()
        assert bool((error < 5 * (variance / count).sqrt()).all())
        spread = (variance[:, None] * variance + covariance.square()).sqrt()
        error = (draws[:, j].T.cov() - covariance).abs()
        assert bool((error < 5 * spread / count**0.5).all())


@pytest.mark.parametrize("make_map", [random_fourier, inducing])
def test_draws_do_not_depend_on_the_signs_of_eigenvectors(
    make_map: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BasisGP(*_data(), feature_map=make_map(), mean=0.3, noise_var=0.03)
    model.posterior(uniform(1, 2))
    eigh = torch.linalg.eigh

    def flipped(A: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = eigh(A)
        return values, vectors * torch.where(uniform(len(A), seed=3) < 0.5, -1.0, 1.0)

    with torch.no_grad():
        before = _leave_one_out_draws(model, 5, generator(2))
        monkeypatch.setattr(torch.linalg, "eigh", flipped)
        after = _leave_one_out_draws(model, 5, generator(2))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)


# ------------------------------------------------------------------ bad input


def test_bad_input() -> None:
    phi = random_fourier()
    target, agents = _target("raw", phi), _agents(phi, SIGNS)
    X, Y = _data()

    def make(target: Any = target, summaries: Any = agents, phi: Any = phi) -> RankingEnsemble:
        return RankingEnsemble(target, summaries, feature_map=phi)

    with pytest.raises(UnsupportedError, match="an ExactGP such as SingleTaskGP, or a BasisGP"):
        make(GenericDeterministicModel(lambda X: X[..., :1]))
    with pytest.raises(UnsupportedError, match="one output and no batch dimensions, got 2"):
        make(SingleTaskGP(X, Y.expand(9, 2)))
    with pytest.raises(UnsupportedError, match=r"batch shape \(3,\)"):
        make(SingleTaskGP(X.expand(3, 9, 2), Y.expand(3, 9, 1)))
    with pytest.raises(UnsupportedError, match=r"normal on the original scale.*Log"):
        make(SingleTaskGP(X, Y.exp(), outcome_transform=Log()))
    with pytest.raises(BasisMismatch):
        make(phi=inducing())
    with pytest.raises(UnsupportedError, match=r"one batched Summary, got list.*torch\.stack"):
        make(summaries=[agents])
    with pytest.raises(BotorchTensorDimensionError, match="stack the agents' summaries"):
        make(summaries=Summary(agents.gram[0], agents.moment[0], agents.basis))
    with pytest.raises(BotorchTensorDimensionError, match="without other agents"):
        make(summaries=Summary(agents.gram[:0], agents.moment[:0], agents.basis))
    damaged = agents.moment.clone()
    damaged[0, 0] = torch.nan
    with pytest.raises(InputDataError, match=r"moment of the agents' summaries.* 1 NaN"):
        make(summaries=Summary(agents.gram, damaged, agents.basis))
    with pytest.raises(UnsupportedError, match="built around a fitted target"):
        RankingEnsemble.construct_inputs(None)  # type: ignore[arg-type]


def test_affine_outcome_transforms_are_welcome() -> None:
    phi = random_fourier()
    X, Y = _data()
    model = _ensemble(SingleTaskGP(X, Y, outcome_transform=Standardize(m=1)), phi, SIGNS)
    assert model.posterior(X).mean.shape == (9, 1)
    posterior = WeightPosterior.from_total(_agents(phi, SIGNS))
    assert model._agents_mean.shape == (*posterior.mean.shape[1:], 1)
