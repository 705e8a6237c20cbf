"""The published search: closed forms against the models they stand for, and which model is used."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.acquisition.analytic import (
    LogExpectedImprovement,
    LogProbabilityOfImprovement,
    UpperConfidenceBound,
)
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from benchmarks.papers.published.settings import paper_search
from botorch_fed.models import OwnHyperparameters, own_gp
from botorch_fed.models.pic import PartiallyIndependentGP
from botorch_fed.privacy.distributed import DistributedRecordSum
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise
from botorch_fed.rng import generator
from botorch_fed.search import support as support_search
from botorch_fed.search.support import (
    MIN_DISTANCE,
    SupportSearch,
    SupportView,
    contribution,
    feature_map,
    next_point,
    read_sum,
)
from botorch_fed.space import Parameter, SearchSpace
from test.cases import normal, uniform

SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
STEPS = SearchSpace((Parameter.integer("a", 0, 4), Parameter.integer("b", 0, 4)))
PAPER = paper_search(num_raw=64, num_restarts=2, noise_var=1e-3)
OURS = SupportSearch(support_size=8, num_raw=64, num_restarts=2, noise_var=1e-3)


def hill(X: Tensor, centre: float = 0.3) -> Tensor:
    return 1 - 6 * (X - centre).square().sum(dim=-1, keepdim=True)


def data(agent: int, n: int = 6) -> tuple[Tensor, Tensor]:
    X = uniform(n, 2, seed=agent)
    return X, hill(X) + 0.03 * normal(n, 1, seed=agent)


def shared(search: SupportSearch, agents: int = 3) -> SupportView:
    total = sum((contribution(search, *data(i)) for i in range(agents)), torch.zeros(1).double())
    return read_sum(search, 2, total, None)


def found(search: SupportSearch, **options: Any) -> Tensor:
    X, Y = data(0)
    common: dict[str, Any] = {
        "t": 3,
        "together": True,
        "candidates": None,
        "stream": generator(0, "own"),
        "own": contribution(search, X, Y),
    }
    space = options.pop("space", SQUARE)
    seen = options.pop("shared", shared(search))
    return next_point(search, space, seen, X, Y, **{**common, **options})


# ------------------------------------------------------------------ closed forms


def test_own_moments_are_those_of_the_own_model() -> None:
    X, Y = data(0)
    known = OwnHyperparameters(
        lengthscale=torch.full((2,), 0.5).double(),
        outputscale=1.0,
        noise_var=1e-3,
        mean=0.0,
        num_data=6,
    )
    at = uniform(40, 2, seed=9)
    with torch.no_grad():
        mean, deviation = support_search._own_moments(PAPER, X, Y)(at)
        posterior = own_gp(X, Y, known).posterior(at)
    torch.testing.assert_close(mean, posterior.mean.squeeze(-1), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        deviation.square(), posterior.variance.squeeze(-1), rtol=0, atol=1e-9
    )


def test_shared_moments_are_those_of_the_shared_model() -> None:
    seen, at = shared(PAPER), uniform(40, 2, seed=9)
    with torch.no_grad():
        mean, deviation = support_search._shared_moments(seen)(at)
        posterior = seen.model.posterior(at)
    torch.testing.assert_close(mean, posterior.mean.squeeze(-1), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        deviation.square(), posterior.variance.squeeze(-1), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("acquisition", ["ucb", "ei", "pi"])
def test_scores_are_the_acquisition_functions_of_botorch(acquisition: Any) -> None:
    search = replace(PAPER, acquisition=acquisition, beta=2.0)
    seen, X, at = shared(search), data(0)[0], uniform(40, 2, seed=9)
    with torch.no_grad():
        best = seen.model.posterior(X).mean.max()
        reference: Any = {
            "ucb": lambda: UpperConfidenceBound(seen.model, beta=2.0),
            "ei": lambda: LogExpectedImprovement(seen.model, best_f=best),
            "pi": lambda: LogProbabilityOfImprovement(seen.model, best_f=best),
        }[acquisition]()
        score = support_search._score(search, support_search._shared_moments(seen), X)
        torch.testing.assert_close(score(at), reference(at.unsqueeze(-2)), rtol=1e-6, atol=1e-8)


def test_the_sum_of_contributions_is_the_summary_of_blocks() -> None:
    # What PITC is: with one agent alone, its model is the exact one at the support points.
    X, Y = data(0)
    seen = read_sum(PAPER, 2, contribution(PAPER, X, Y), None)
    Z = feature_map(PAPER, 2).inducing_points
    known = support_search._local_model(PAPER, X, Y)
    with torch.no_grad():
        torch.testing.assert_close(
            seen.model.posterior(Z).mean, known.posterior(Z).mean, rtol=0, atol=1e-5
        )


def test_sizes_and_bounds() -> None:
    for size in (1, 4, 9):
        search = replace(PAPER, support_size=size)
        X, Y = data(0, n=12)
        values = contribution(search, X, Y)
        assert values.shape == (search.numbers(2),)
        assert float(values.abs().max()) <= search.largest(12)
        assert math.log2(search.largest(12)).is_integer()
    assert not contribution(PAPER, X[:0], Y[:0]).any()


# ------------------------------------------------------------------ which model


@pytest.mark.parametrize("acquisition", ["ucb", "ei", "pi", "ts"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("search", [PAPER, OURS, replace(OURS, local="fitted")])
def test_every_path_finds_a_point(search: SupportSearch, acquisition: Any, together: bool) -> None:
    chosen = replace(search, acquisition=acquisition)
    first = found(chosen, together=together)
    assert first.shape == (1, 2)
    assert bool(((first >= 0) & (first <= 1)).all())
    assert torch.equal(first, found(chosen, together=together))
    assert float(torch.cdist(first, data(0)[0]).min()) >= MIN_DISTANCE


def test_a_point_maximises_what_is_maximised() -> None:
    seen = shared(PAPER)
    score = support_search._score(PAPER, support_search._shared_moments(seen), data(0)[0])
    side, at = torch.linspace(0, 1, 60).double(), found(PAPER)
    with torch.no_grad():
        best = float(score(torch.cartesian_prod(side, side)).max())
        assert float(score(at)) >= best - 1e-6


def test_in_a_shared_step_all_go_to_the_same_point_unless_they_draw() -> None:
    for search, same in ((PAPER, True), (replace(PAPER, acquisition="ts"), False)):
        points = [
            next_point(
                search,
                SQUARE,
                shared(search),
                *data(i),
                t=3,
                together=True,
                candidates=None,
                stream=generator(i, "own"),
                own=None,
            )
            for i in range(2)
        ]
        assert torch.allclose(*points, atol=1e-6) == same


def test_pic_knows_own_data_exactly() -> None:
    search = replace(OURS, support_size=2, support=((0.1, 0.9), (0.9, 0.1)))
    X, Y = data(0)
    own, seen = contribution(search, X, Y), shared(search)
    model = support_search._shared_model(search, seen, X, Y, own)
    reference = PartiallyIndependentGP.from_total(
        X,
        Y,
        total=seen.summary,
        feature_map=feature_map(search, 2),
        noise_var=search.noise_var,
    )
    with torch.no_grad():
        mean = model.posterior(X).mean
        assert torch.equal(mean, reference.posterior(X).mean)
        missed = (seen.model.posterior(X).mean - Y).abs().mean()
        assert float((mean - Y).abs().mean()) < 0.5 * float(missed)
    # What is not in the sum cannot be taken out of it.
    assert support_search._shared_model(search, seen, X, Y, None) is seen.model
    more = torch.cat([X, uniform(30, 2, seed=5)])
    strange = support_search._shared_model(search, seen, more, hill(more), own)
    assert strange is seen.model


def test_pic_with_a_noisy_sum() -> None:
    mechanism = DistributedRecordSum(
        num_features=8,
        outcome_bound=2.0,
        max_records=10,
        num_agents=3,
        noise_multiplier=0.5,
    )
    noise = InsecureSeededNoise(0)
    phi = feature_map(OURS, 2)
    parts = [
        mechanism.contribution(
            support_search.records(phi, *data(i), mechanism), noise=noise, path=("sum", i)
        )
        for i in range(3)
    ]
    values = [mechanism.grid.to_values(part) for part in (sum(parts[1:], parts[0]), parts[0])]
    seen = read_sum(OURS, 2, values[0], mechanism)
    for acquisition in ("ts", "ei"):
        search = replace(OURS, acquisition=acquisition)
        assert found(search, shared=seen, own=values[1]).shape == (1, 2)
    eigenvalues = torch.linalg.eigvalsh(seen.summary.gram)
    assert float(eigenvalues.min()) >= -1e-9 * float(eigenvalues.max())


def test_without_data_and_without_a_sum_a_point_is_random_and_can_be_evaluated() -> None:
    none = torch.zeros(0, 2).double()
    common: dict[str, Any] = {"t": 1, "together": True, "own": None}
    stream = generator(0)
    at = next_point(PAPER, STEPS, None, none, none[:, :1], candidates=None, stream=stream, **common)
    assert torch.equal(at, STEPS.snap(at))
    listed = uniform(5, 2)
    at = next_point(
        PAPER, SQUARE, None, none, none[:, :1], candidates=listed, stream=stream, **common
    )
    assert bool((listed == at).all(dim=-1).any())


@pytest.mark.parametrize("search", [PAPER, OURS, replace(OURS, acquisition="ts")])
@pytest.mark.parametrize("together", [True, False])
def test_points_of_lists_and_of_steps(search: SupportSearch, together: bool) -> None:
    listed = uniform(20, 2, seed=4)
    at = found(search, candidates=listed, together=together)
    assert bool((listed == at).all(dim=-1).any())
    at = found(search, space=STEPS, together=together)
    assert torch.equal(at, STEPS.snap(at))


# ------------------------------------------------------------------ settings


def test_support_points_can_be_given() -> None:
    given = replace(PAPER, support_size=2, support=[[0.1, 0.2], [0.8, 0.9]])
    Z = feature_map(given, 2).inducing_points
    assert torch.equal(Z, torch.tensor([[0.1, 0.2], [0.8, 0.9]], dtype=torch.float64))
    assert hash(given) == hash(replace(given, support=((0.1, 0.2), (0.8, 0.9))))
    with pytest.raises(InputDataError, match="3 coordinates"):
        feature_map(given, 3)
    with pytest.raises(InputDataError, match="support_size is 3"):
        replace(given, support_size=3)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5])
def test_a_schedule_that_the_proof_does_not_cover(decay: float) -> None:
    with pytest.raises(InputDataError):
        SupportSearch(decay=decay)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengthscale": 0.0},
        {"outputscale": -1.0},
        {"noise_var": 0.0},
        {"support_size": 0},
        {"acquisition": "kg"},
        {"beta": -1.0},
        {"num_raw": 2, "num_restarts": 3},
        # What a server may not make a site compute:
        {"num_raw": 10**9},
        {"num_restarts": 500},
        {"support_size": 10**6},
        {"support_size": 1, "support": ((float("nan"), 0.5),)},
        {"support_size": 1, "support": ((1e300, 0.5),)},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        SupportSearch(**wrong)


def test_the_coin() -> None:
    coin = SupportSearch(decay=0.5)
    rounds = range(1, 2001)
    threw = [coin.together(t, generator(0, "coin", t)) for t in rounds]
    expected = [max(t, 2) ** -0.5 for t in rounds]  # 1 - p_t, and p_1 = p_2
    spread = math.sqrt(sum(p * (1 - p) for p in expected))
    assert abs(sum(threw) - sum(expected)) < 4 * spread
    for models, always in (("local", False), ("global", True)):
        only = replace(coin, models=models)
        assert only.ever_together == always
        assert {only.together(t, generator(0, "coin", t)) for t in (1, 5, 9)} == {always}
