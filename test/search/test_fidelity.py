"""The default search in a space with a fidelity: budgets in costs, messages of the target."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.federation.base import Curve, Objective
from botorch_fed.models import LogWarp
from botorch_fed.privacy import InsecureSeededNoise
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, run
from botorch_fed.search.fidelity import affordable, fit_over_fidelities, gainful
from botorch_fed.search.messages import Message, TransferRows
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Fidelity, Outcome, Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, Federation, FedGP, PrivateUCB

SPACE = SearchSpace(
    (
        Parameter.real("x", 0.0, 1.0),
        Parameter.integer("epochs", 1, 27),
        Parameter.real("y", 0.0, 1.0),
    ),
    Outcome(minimize=True),
    fidelity=Fidelity("epochs"),
)


def value(point: dict[str, Any], shift: float = 0.0) -> float:
    bowl = (point["x"] - 0.3 - shift) ** 2 + (point["y"] - 0.6) ** 2
    return float(bowl + (1 + 0.3 * point["x"]) / point["epochs"])


def objective(shift: float = 0.0, *, curves: bool = True) -> Objective:
    def evaluate(X: Tensor) -> Tensor | Curve:
        (point,) = SPACE.from_unit(X)
        if not curves:
            return torch.tensor([[value(point, shift)]])
        steps = {1, 3, 9, point["epochs"]}
        return Curve(
            {s: value({**point, "epochs": s}, shift) for s in steps if s <= point["epochs"]}
        )

    return evaluate


def sites(**options: Any) -> dict[str, Objective]:
    return {f"site{n}": objective(0.05 * n, **options) for n in range(2)}


def evaluated(result: RunResult, name: str) -> tuple[list[float], list[float]]:
    """Costs, and columns of the fidelity."""
    X, _ = result.history(name)
    return SPACE.costs(X), SPACE.fidelities(X).tolist()


@pytest.mark.parametrize(
    "study",
    [
        FTS(budget=4),
        FedGP(budget=4, channel="plain"),
        pytest.param(
            DPFTSDE(budget=4, epsilon=5.0, min_reliability=0, noise=InsecureSeededNoise(1)),
            marks=pytest.mark.nightly,
        ),
        pytest.param(FTS(budget=4, q=2), marks=pytest.mark.nightly),
        pytest.param(FTS(budget=4, default={"x": 0.9, "y": 0.9}), marks=pytest.mark.nightly),
    ],
    ids=["rows", "sum", "noisy", "batches", "default"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_budget_is_spent_in_evaluations_at_the_target(study: Federation) -> None:
    result = run(study, sites(), seed=0, space=SPACE, progress=False)
    for name in result.names:
        costs, columns = evaluated(result, name)
        assert 4 - 1 / 27 <= sum(costs) <= 4 + 1e-9
        assert len(costs) > 4  # some below the target
        assert columns.count(1.0) >= 2  # and some at it
        assert len({tuple(row["x"]) for row in result.records if row["agent"] == name}) == len(
            costs
        )
        assert result.costs(name)[-1] == pytest.approx(sum(costs))
        best = result.best(name)
        first = columns.index(1.0)
        assert bool(best[:first].isinf().all())
        assert bool(best[first:].isfinite().all())
        assert result.best_parameters(name)["epochs"] == 27


@pytest.mark.nightly
def test_a_federation_with_fidelities_finds_the_optimum() -> None:
    result = run(FTS(budget=6), sites(), seed=1, space=SPACE, progress=False)
    for n, name in enumerate(result.names):
        least = value({"x": 0.3 + 0.05 * n, "y": 0.6, "epochs": 27}, 0.05 * n)
        assert float(result.best(name)[-1]) - least < 0.02


def test_single_values_are_enough_and_runs_repeat() -> None:
    one, other = (
        run(FTS(budget=2, num_initial=2), sites(curves=False), seed=2, space=SPACE, progress=False)
        for _ in range(2)
    )
    assert one.records == other.records
    assert not any("curve" in row for row in one.records)


def test_the_default_is_evaluated_first_and_at_the_target() -> None:
    study = FTS(budget=2, num_initial=1, default={"x": 0.9, "y": 0.9})
    result = run(study, sites(), seed=0, space=SPACE, progress=False)
    X, _ = result.history("site1")
    assert SPACE.from_unit(X[:1]) == [{"x": 0.9, "y": 0.9, "epochs": 27}]
    with pytest.raises(InputDataError, match="must have the fixed value 27"):
        FTS(budget=4, default={"x": 0.9, "y": 0.9, "epochs": 3}).terms(SPACE)


def test_first_points_are_cheap_and_the_best_mean_follows_at_the_target() -> None:
    study = FTS(budget=2, num_initial=2)
    result = run(study, sites(), seed=0, space=SPACE, progress=False)
    for name in result.names:
        X, _ = result.history(name)
        assert [point["epochs"] for point in SPACE.from_unit(X)][:3] == [3, 3, 27]


def test_messages_are_about_the_target() -> None:
    terms = FTS(budget=4).terms(SPACE)
    assert terms.feature_map.input_dim == SPACE.dim - 1 == SPACE.shared.dim
    X = SPACE.at_fidelity(generator(0, "X").uniform(12, 2), 0.0)
    X[6:] = SPACE.at_fidelity(SPACE.configurations(X[6:]))
    Y = torch.tensor([[-value(point)] for point in SPACE.from_unit(X)])
    search = TransferSearch()
    said = search.message(SPACE, terms.feature_map, X, Y)
    assert said is not None
    probes = generator(1, "probes").uniform(200, 2)
    true = torch.tensor(
        [-value(point) for point in SPACE.shared.from_unit(probes)], dtype=torch.float64
    )
    found = terms.feature_map(probes) @ said
    assert float(torch.corrcoef(torch.stack([found, true]))[0, 1]) > 0.9
    # Two configurations are too few for a message, at however many fidelities.
    few = torch.cat([SPACE.at_fidelity(SPACE.configurations(X[:2]), at) for at in SPACE.levels])
    assert search.message(SPACE, terms.feature_map, few, Y[: len(few)]) is None


@pytest.mark.parametrize(
    ("room", "wanted"),
    [(9.0, [1, 3, 9, 27]), (1.2, [1, 3, 27]), (1.0, [27]), (0.4, [1, 3, 9]), (0.04, [1])],
)
def test_what_is_left_pays_for_the_target(room: float, wanted: list[int]) -> None:
    columns = affordable(SPACE, None, room)
    assert [SPACE.fidelity_value(column) for column in columns] == wanted


def test_low_fidelities_cost_no_more_than_one_evaluation_in_between() -> None:
    stream = generator(0, "low")
    X = SPACE.at_fidelity(stream.uniform(28, 2), 0.0)
    X[0] = SPACE.at_fidelity(SPACE.configurations(X[:1]))
    Y = torch.tensor([[-value(point)] for point in SPACE.from_unit(X)])

    def chosen(n: int) -> float:
        posterior = fit_over_fidelities(
            SPACE,
            X[:n],
            Y[:n],
            None,
            trusts=(0.0,),
            trust_prior=(1.0,),
            log_warp=LogWarp(torch.zeros(2).double()),
        )
        assert posterior is not None
        point = gainful(
            SPACE,
            posterior,
            X[:n],
            chosen=X[:0],
            candidates=None,
            failed=X[:0],
            room=20.0,
            stream=generator(1, "point"),
        )
        return float(SPACE.fidelities(point))

    assert chosen(3) < 1.0
    assert chosen(28) == 1.0


def test_candidates_and_constraints_are_kept() -> None:
    configurations = torch.quasirandom.SobolEngine(2).draw(40, dtype=torch.float64)
    listed = torch.cat(
        [SPACE.at_fidelity(configurations, SPACE.fidelity_column(at)) for at in (3, 27)]
    )
    result = run(FTS(budget=4, candidates=listed), sites(), seed=0, space=SPACE, progress=False)
    known = {tuple(row) for row in listed.tolist()}
    assert all(tuple(row["x"]) in known for row in result.records)
    bound = replace(SPACE, constraints=("x + y <= 0.7",), feasible=fits)
    result = run(FTS(budget=3), sites(), seed=0, space=bound, progress=False)
    X = torch.tensor([row["x"] for row in result.records], dtype=torch.float64)
    assert all(bound.violated(point) is None for point in bound.from_unit(X))


def fits(point: dict[str, Any]) -> bool:
    assert point["epochs"] == 27  # it is asked at the target
    return bool(point["x"] >= 0.1)


@pytest.mark.nightly
def test_failures_are_kept_away_from(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    def fails(X: Tensor) -> Tensor:
        (point,) = SPACE.from_unit(X)
        if point["x"] > 0.5:
            raise ValueError("too hot")
        return torch.tensor([[value(point)]])

    result = run(FTS(budget=6), {"a": fails, "b": fails}, seed=0, space=SPACE, progress=False)
    for name in result.names:
        rows = [row for row in result.records if row["agent"] == name]
        assert 0 < sum(row["y"] is None for row in rows) < len(rows) / 3
        X = torch.tensor([row["x"] for row in rows], dtype=torch.float64)
        assert sum(SPACE.costs(X)) <= 6 + 1e-9


def test_a_newcomer_begins_where_others_say_at_the_target() -> None:
    before = run(FTS(budget=4), sites(), seed=0, space=SPACE, progress=False)
    names = before.names
    data = {name: before.history(name) for name in names[1:]}
    study = FTS(budget=3, active=names[:1], data=data)
    result = run(study, sites(), seed=0, space=SPACE, progress=False)
    X, _ = result.history(names[0])
    assert float(SPACE.fidelities(X)[0]) == 1.0
    assert float(result.best(names[0])[0]) < value({"x": 0.7, "y": 0.6, "epochs": 27})


@pytest.mark.parametrize(
    ("study", "match"),
    [
        (FTS(budget=9, strategy=Strategy(), every=1), "ThompsonSearch takes no fidelity .'epochs'"),
        (FedGP(budget=9, search=SupportSearch()), "SupportSearch takes no fidelity"),
        (FedGP(budget=9, search=RegionSearch()), "RegionSearch takes no fidelity"),
        (PrivateUCB(budget=9, epsilon=1.0, delta=1e-3), "BanditSearch takes no fidelity"),
        (
            FTS(
                budget=9,
                strategy=TransferSearch(acquisition=lambda m, X: LogExpectedImprovement(m, 0.0)),
            ),
            "does not choose the fidelity",
        ),
        (Federation(budget=9, search=TransferRows(messages=Message("mean"))), "'mean' take no"),
    ],
    ids=["thompson", "support", "region", "bandit", "acquisition", "message"],
)
def test_other_searches_refuse_a_fidelity(study: Federation, match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        study.terms(SPACE)
