"""The transfer acquisition function against a loop over agents."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from botorch.utils.datasets import SupervisedDataset
from torch import Tensor

from botorch_fed.acquisition import TransferAcquisition
from botorch_fed.errors import BasisMismatch
from botorch_fed.models import BasisGP, Summary, WeightPosterior, summarize
from test.cases import inducing, normal, random_fourier, uniform

N, MEAN = 7, 0.4


def _objective(X: Tensor) -> Tensor:
    return (5 * X).sin().sum(dim=-1, keepdim=True)


def _data() -> tuple[Tensor, Tensor]:
    X = uniform(9, 2)
    return X, _objective(X) + 0.1 * normal(9, 1)


def _agents(phi: Any) -> tuple[Summary, Tensor]:
    X = uniform(N, 20, 2, seed=1)
    signs = torch.linspace(1, -1, N).double()[:, None, None]  # from alike to reversed
    Y = signs * _objective(X) + 0.3 * normal(N, 20, 1, seed=1)
    summary = summarize(phi, X, Y, noise_var=0.02, mean=MEAN)
    return Summary(summary.gram, summary.moment, summary.basis), Y.amax(dim=(-2, -1))


def _by_loop(model: Any, phi: Any, summaries: Summary, incumbents: Tensor, X: Tensor) -> Tensor:
    train_X, Y = _data()
    total = 0.75 * LogExpectedImprovement(model, Y.max())(X).exp()
    weights = [0.75]
    for i in range(N):
        agent = Summary(summaries.gram[i], summaries.moment[i], summaries.basis)
        w = WeightPosterior.from_total(agent).mean
        order = MEAN + phi(train_X) @ w
        pairs = list(itertools.combinations(range(9), 2))
        wrong = sum(bool((order[j] < order[k]) != (Y[j] < Y[k])) for j, k in pairs)
        tau = wrong / len(pairs)
        weight = 0.75 * (1 - (tau / 0.5) ** 2) if tau < 0.5 else 0.0
        means = (MEAN + phi(X) @ w).squeeze(-1)
        total = total + weight * (means - incumbents[i]).clamp_min(0)
        weights.append(weight)
    assert 3 <= sum(weight > 0 for weight in weights) <= N  # some agents are left out, not all
    return total / sum(weights)


@pytest.mark.parametrize("make_map", [random_fourier, inducing])
@pytest.mark.parametrize("basis", [False, True])
def test_equals_a_loop_over_agents(make_map: Any, basis: bool) -> None:
    phi = make_map()
    summaries, incumbents = _agents(phi)
    X, Y = _data()
    model: Any = BasisGP(X, Y, feature_map=phi, mean=MEAN) if basis else SingleTaskGP(X, Y)
    test_X = uniform(200, 1, 2, seed=3)
    incumbents = incumbents - 0.5  # so that most agents predict improvements somewhere
    acquisition = TransferAcquisition(
        model, Y.max(), summaries=summaries, feature_map=phi, incumbents=incumbents, mean=MEAN
    )
    expected = _by_loop(model, phi, summaries, incumbents, test_X)
    torch.testing.assert_close(acquisition(test_X), expected, rtol=1e-10, atol=1e-10)
    assert bool((acquisition(test_X) >= 0).all())


def test_weights_fall_with_disorder() -> None:
    phi = random_fourier()
    summaries, incumbents = _agents(phi)
    acquisition = TransferAcquisition(
        SingleTaskGP(*_data()), 1.0, summaries=summaries, feature_map=phi, incumbents=incumbents
    )
    weights = acquisition.agent_weights
    assert acquisition.target_weight == 0.75
    assert 0.7 < float(weights[0]) <= 0.75
    assert float(weights[-1]) == 0


def test_one_observation_orders_nothing() -> None:
    phi = random_fourier()
    summaries, incumbents = _agents(phi)
    X, Y = _data()
    acquisition = TransferAcquisition(
        BasisGP(X[:1], Y[:1], feature_map=phi),
        Y[0, 0],
        summaries=summaries,
        feature_map=phi,
        incumbents=incumbents,
    )
    assert acquisition.agent_weights.tolist() == [0.75] * N


def test_agents_see_untransformed_points() -> None:
    phi = random_fourier()
    summaries, incumbents = _agents(phi)
    X, Y = _data()
    kwargs: Any = {"summaries": summaries, "feature_map": phi, "incumbents": incumbents}
    plain = TransferAcquisition(SingleTaskGP(X, Y), Y.max(), **kwargs)
    scaled = SingleTaskGP(X, Y, input_transform=Normalize(2))
    torch.testing.assert_close(
        TransferAcquisition(scaled, Y.max(), **kwargs).agent_weights, plain.agent_weights
    )


def test_input_constructor() -> None:
    phi = random_fourier()
    summaries, incumbents = _agents(phi)
    X, Y = _data()
    data = SupervisedDataset(X, Y, feature_names=["a", "b"], outcome_names=["y"])
    inputs = get_acqf_input_constructor(TransferAcquisition)(
        model=SingleTaskGP(X, Y),
        training_data=data,
        summaries=summaries,
        feature_map=phi,
        incumbents=incumbents,
        objective=None,
    )
    assert inputs["best_f"] == Y.max()
    assert TransferAcquisition(**inputs)(X.unsqueeze(-2)).shape == (9,)


def test_bad_input() -> None:
    phi = random_fourier()
    summaries, incumbents = _agents(phi)
    X, Y = _data()
    model = SingleTaskGP(X, Y)
    good: Any = {"summaries": summaries, "feature_map": phi, "incumbents": incumbents}
    acquisition = TransferAcquisition(model, 1.0, **good)
    with pytest.raises(AssertionError, match="q=1"):
        acquisition(uniform(3, 2, 2))
    with pytest.raises(UnsupportedError, match="X_pending"):
        acquisition.set_X_pending(X)
    with pytest.raises(BotorchTensorDimensionError, match=r"shape \(7,\)"):
        TransferAcquisition(model, 1.0, **{**good, "incumbents": incumbents[:3]})
    with pytest.raises(InputDataError, match=r"bandwidth must lie in \(0, 1\]"):
        TransferAcquisition(model, 1.0, bandwidth=0.0, **good)
    with pytest.raises(BasisMismatch):
        TransferAcquisition(model, 1.0, **{**good, "feature_map": inducing()})
    with pytest.raises(UnsupportedError, match="one output"):
        TransferAcquisition(SingleTaskGP(X, Y.expand(9, 2)), 1.0, **good)
    with pytest.raises(UnsupportedError, match="one batched Summary, got list"):
        TransferAcquisition(model, 1.0, **{**good, "summaries": [summaries]})
