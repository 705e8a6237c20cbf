"""Acquisition functions of BoTorch, weighted by the probability of success."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.analytic import (
    ExpectedImprovement,
    LogExpectedImprovement,
    PosteriorMean,
    UpperConfidenceBound,
)
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.acquisition.monte_carlo import qExpectedImprovement
from botorch.exceptions.errors import InputDataError
from botorch.models import SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from botorch_fed.acquisition.feasible import FeasibleAcquisition
from botorch_fed.acquisition.optimize import maximize
from botorch_fed.models.earned_prior import fit_earned
from botorch_fed.models.feasibility import Feasibility, fit_feasibility
from botorch_fed.rng import generator
from test.cases import uniform

pytestmark = pytest.mark.filterwarnings("ignore:.*has known numerical issues")
POINTS = uniform(50, 2, seed=8)


@cache
def data() -> tuple[Tensor, Tensor]:
    """Points that succeed, and those to the right, which fail."""
    X = uniform(14, 2, seed=5)
    return X[X[:, 0] < 0.6], X[X[:, 0] >= 0.6]


def rising(X: Tensor) -> Tensor:
    return 3 * X[:, :1] - (X[:, 1:] - 0.4).square()


@cache
def model(shift: float = 0.0) -> SingleTaskGP:
    return fit_earned(data()[0], rising(data()[0]) + shift).model(0)


@cache
def feasibility() -> Feasibility:
    found = fit_feasibility(*data())
    assert found is not None
    return found


def values(acquisition: AcquisitionFunction) -> tuple[Tensor, Tensor]:
    """Without the weight and with it."""
    weighted = FeasibleAcquisition(acquisition, feasibility(), data()[0])
    points = places().unsqueeze(-2)
    with torch.no_grad():
        return acquisition(points), weighted(points)


def places() -> Tensor:
    """Points of the square, and those that succeeded."""
    return torch.cat([POINTS, data()[0]])


def probability() -> Tensor:
    with torch.no_grad():
        return feasibility()(places())


def sampled(kind: Any) -> AcquisitionFunction:
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
    return kind(model(), best_f=0.5, sampler=sampler)


@pytest.mark.parametrize("sampling", [False, True], ids=["closed form", "sampled"])
def test_improvement_and_its_logarithm(sampling: bool) -> None:
    if sampling:
        improvement, logarithm = map(sampled, (qExpectedImprovement, qLogExpectedImprovement))
    else:
        improvement = ExpectedImprovement(model(), best_f=0.5)
        logarithm = LogExpectedImprovement(model(), best_f=0.5)
    plain, weighted = values(improvement)
    torch.testing.assert_close(weighted, plain * probability().exp())
    plain, weighted = values(logarithm)
    torch.testing.assert_close(weighted, plain + probability())


@pytest.mark.parametrize("kind", [PosteriorMean, lambda m: UpperConfidenceBound(m, beta=0.1)])
def test_values_of_any_sign_do_not_depend_on_where_zero_is(kind: Any) -> None:
    plain, weighted = values(kind(model()))
    _, shifted = values(kind(model(-50.0)))
    torch.testing.assert_close(shifted, weighted - 50.0, rtol=0, atol=1e-6)
    assert bool((weighted <= plain + 1e-12).all())
    with torch.no_grad():
        least = kind(model())(data()[0].unsqueeze(-2)).min()
    above = plain > least
    assert bool(above.any())
    assert not bool(above.all())
    share = (weighted - least)[above] / (plain - least)[above]
    torch.testing.assert_close(share, probability()[above].exp())
    assert torch.equal(weighted[~above], plain[~above])


@pytest.mark.parametrize(
    "kind",
    [
        lambda m: LogExpectedImprovement(m, best_f=0.5),
        lambda m: ExpectedImprovement(m, best_f=0.5),
        lambda m: UpperConfidenceBound(m, beta=4.0),
    ],
)
def test_the_best_point_is_one_that_succeeds(kind: Any) -> None:
    def best(acquisition: AcquisitionFunction) -> Tensor:
        return maximize(acquisition, 2, generator=generator(0), num_raw=128, num_restarts=4)[0]

    assert float(best(kind(model()))[0, 0]) > 0.7
    weighted = FeasibleAcquisition(kind(model()), feasibility(), data()[0])
    found = best(weighted)
    assert float(found[0, 0]) < 0.65
    with torch.no_grad():  # no point of many is better
        others = weighted(uniform(2000, 2, seed=3).unsqueeze(-2))
        assert float(weighted(found.unsqueeze(-2))) >= float(others.max()) - 1e-6


class Pairs(AcquisitionFunction):
    """Two values for each point."""

    def forward(self, X: Tensor) -> Tensor:
        return X.squeeze(-2)


def test_more_than_one_value_for_a_point_is_refused() -> None:
    weighted = FeasibleAcquisition(
        ExpectedImprovement(model(), best_f=0.5), feasibility(), data()[0]
    )
    weighted.acquisition = Pairs(model())
    with pytest.raises(InputDataError, match=r"one value of Pairs.*\(50,\) points.*\(50, 2\)"):
        weighted(POINTS.unsqueeze(-2))
    with pytest.raises(InputDataError, match="one value for one point"):
        FeasibleAcquisition(Pairs(model()), feasibility(), data()[0])
