"""Ax experiments as sites of a federation, and our models inside Ax; always with real clients."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.utils.datasets import SupervisedDataset
from torch import Tensor

pytest.importorskip("ax")

from ax.adapter.cross_validation import cross_validate
from ax.adapter.registry import Generators
from ax.analysis.analysis import ErrorAnalysisCard
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig, StorageConfig
from ax.api.protocols.metric import IMetric
from ax.api.protocols.runner import IRunner
from ax.core.trial_status import TrialStatus
from ax.early_stopping.strategies import PercentileEarlyStoppingStrategy
from ax.exceptions.core import DataRequiredError
from ax.exceptions.generation_strategy import GenerationStrategyCompleted
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.generation_strategy.generator_spec import GeneratorSpec
from ax.generation_strategy.transition_criterion import MinTrials
from ax.generators.torch.botorch_modular.surrogate import SurrogateSpec
from ax.generators.torch.botorch_modular.utils import ModelConfig

from benchmarks.papers.published.settings import paper_search
from botorch_fed import ax_adapter
from botorch_fed.acquisition import MixtureEI, MixturePI, MixtureUCB, ThompsonSampling
from botorch_fed.ax_adapter import (
    AxFederation,
    AxMap,
    AxSite,
    Context,
    ContextBasisGP,
    ContextMessagePriorGP,
    ContextMixture,
    ContextThompsonSampling,
    OwnMetricGP,
    RoundOpen,
    contexts,
    modular_spec,
    search_space,
)
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.base import Exchanged, Outgoing
from botorch_fed.federation.drive import drive
from botorch_fed.models import BasisGP, FeatureMap, WeightPosterior, summarize
from botorch_fed.privacy.distributed import DistributedGaussianSum
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise
from botorch_fed.rng import generator
from botorch_fed.run import make_agent, run
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FTS, FedGP, default_feature_map

# Ax 1.3.1 calls what it, or pandas, has deprecated: not ours to mend.
pytestmark = [
    pytest.mark.filterwarnings("ignore:add_tracking_metric is deprecated"),
    pytest.mark.filterwarnings("ignore:The 'future.infer_string' option is deprecated"),
    pytest.mark.filterwarnings("ignore:The .* keywords? in DataFrame"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
    pytest.mark.filterwarnings("ignore:ObjectiveThreshold is deprecated"),
    # BoTorch's advice, where few points are feasible: that of the test, not of the model.
    pytest.mark.filterwarnings("ignore:When all training points are infeasible"),
]

NAMES = ("a", "b", "c")
CENTRE = torch.full((1, 2), 0.5, dtype=torch.float64)
LINEAR = RangeParameterConfig(name="x", bounds=(-5, 10), parameter_type="float")
LOG = RangeParameterConfig(name="z", bounds=(1e-4, 1), parameter_type="float", scaling="log")
INTEGER = RangeParameterConfig(name="k", bounds=(1, 8), parameter_type="int")
CHOICE = ChoiceParameterConfig(name="c", values=[3, 1, 2], parameter_type="int", is_ordered=False)
LINEAR_PARAMETER = Parameter.real("x", -5, 10)
LOG_PARAMETER = Parameter.real("z", 1e-4, 1, scale="log")
Point = dict[str, Any]


def _client(*parameters: Any, objective: str = "-loss") -> Client:
    client = Client(random_seed=0)
    client.configure_experiment(parameters=list(parameters or (LINEAR, LOG)))
    client.configure_optimization(objective=objective)
    return client


def _clients(*parameters: Any) -> dict[str, Client]:
    return {name: _client(*parameters) for name in NAMES}


def _loss(point: Point, shift: float = 0.0) -> float:
    value = (point["x"] - 3 - shift) ** 2 / 10 + (math.log10(point["z"]) + 2) ** 2
    return float(value + (point.get("k", 5) - 5) ** 2 / 10)


def _space(client: Client | None = None) -> SearchSpace:
    return search_space(_client() if client is None else client, centre=3.0, scale=3.0)


def _asked(client: Client) -> int:
    """How many trials the round waits for at a client's site, one at least."""
    (key,) = {n.site for n in client._generation_strategy._nodes if hasattr(n, "site")}
    site = ax_adapter._SITES[key]
    site.read()
    if site.exchange is not None:
        site.exchange()
    return max(1, site.site.state.asking)


def _advance(
    client: Client, loss: Callable[[Point], float] = _loss, *, most: int | None = None
) -> int:
    """Run the trials that the round waits for; how many there were."""
    try:
        trials = client.get_next_trials(max_trials=_asked(client) if most is None else most)
    except (RoundOpen, GenerationStrategyCompleted):
        return 0
    for index, point in trials.items():
        client.complete_trial(index, raw_data={"loss": loss(point)})
    return len(trials)


def _finish(federation: AxFederation, clients: dict[str, Client]) -> None:
    for _ in range(100):
        for client in clients.values():
            _advance(client)
        federation.step()
        if federation.finished:
            return
    raise AssertionError("the federation does not come to its end")


def _by_run(protocol: Any, space: SearchSpace, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The same federation without Ax."""

    def objective(X: Tensor) -> Tensor:
        return torch.tensor([[_loss(p)] for p in space.from_unit(X)], dtype=torch.float64)

    result = run(protocol, dict.fromkeys(NAMES, objective), space=space, seed=seed, progress=False)
    return {name: result.history(name) for name in NAMES}


def _own_X(federation: AxFederation, name: str) -> Tensor:  # noqa: N802
    site = federation.sites[name]
    X: Tensor = site.site.state.X
    return X


# ------------------------------------------------------------------ search spaces


def test_an_experiment_gives_the_canonical_space() -> None:
    client = _client(LINEAR, LOG, INTEGER, CHOICE)
    found = search_space(client, centre=1.0, scale=2.0)
    assert found == SearchSpace(
        (
            Parameter.real("x", -5, 10),
            Parameter.real("z", 1e-4, 1, scale="log"),
            Parameter.integer("k", 1, 8),
            Parameter.choice("c", [1, 2, 3], ordered=False),
        ),
        Outcome(1.0, 2.0, minimize=True),
    )
    assert not search_space(_client(objective="loss")).outcome.minimize


def test_points_go_to_ax_and_back() -> None:
    fixed = ChoiceParameterConfig(name="solver", values=["lbfgs"], parameter_type="str")
    client = _client(LINEAR, LOG, INTEGER, CHOICE, fixed)
    space = search_space(client)
    ax_map = AxMap.of(client._experiment, space)
    X = space.snap(generator(0, "x").uniform(20, space.dim))
    X = torch.cat([X, space.snap(torch.zeros(1, space.dim)), space.snap(torch.ones(1, space.dim))])
    points = ax_map.to_ax(X)
    for point, x in zip(points, X, strict=True):
        client._experiment.search_space.check_membership(point, raise_error=True)
        assert torch.allclose(ax_map.from_ax(point), x.unsqueeze(0), atol=1e-12)
        assert point["solver"] == "lbfgs"
        assert type(point["k"]) is int
        assert point["c"] in (1, 2, 3)
    assert points[-1]["z"] == 1.0  # never beyond the bound by a rounding of exp(log(…))


def test_order_is_the_federations() -> None:
    space = _space()
    turned = SearchSpace(space.parameters[::-1], space.outcome)
    X = torch.tensor([[0.25, 0.5]], dtype=torch.float64)
    assert AxMap.of(_client()._experiment, turned).to_ax(X) == turned.from_unit(X)
    choice = SearchSpace((Parameter.choice("c", ["3", "1", "2"]),), Outcome(minimize=True))
    first = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    assert AxMap.of(_client(CHOICE)._experiment, choice).to_ax(first) == [{"c": 3}]


@pytest.mark.parametrize(
    ("space", "match"),
    [
        (SearchSpace((Parameter.real("x", -5, 10),), Outcome(minimize=True)), "same names"),
        (
            SearchSpace(
                (Parameter.real("x", -5, 11), Parameter.real("z", 1e-4, 1, scale="log")),
                Outcome(minimize=True),
            ),
            "bounds",
        ),
        (
            SearchSpace(
                (Parameter.real("x", -5, 10), Parameter.real("z", 1e-4, 1)), Outcome(minimize=True)
            ),
            "scale",
        ),
        (
            SearchSpace((Parameter.real("x", -5, 10), Parameter.real("z", 1e-4, 1, scale="log"))),
            "opposite",
        ),
    ],
)
def test_another_space_is_refused(space: SearchSpace, match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        AxFederation(FTS(budget=1), {"a": _client()}, space=space, seed=0)


def test_what_a_federation_cannot_do_is_refused() -> None:
    with pytest.raises(InputDataError, match="a weighted sum of metrics"):
        search_space(_client(objective="2 * acc - loss"))
    client = Client()
    client.configure_experiment(parameters=[LINEAR])
    with pytest.raises(InputDataError, match="configure_optimization"):
        search_space(client)
    with pytest.raises(InputDataError, match=r"pass space"):
        AxFederation(FTS(budget=1), NAMES, seed=0)
    with pytest.raises(InputDataError, match="attempt"):
        AxFederation(FTS(budget=1), {"a": _client()}, seed=0, attempts=0)
    with pytest.raises(InputDataError, match="about several metrics: write an absolute bound"):
        search_space(_several("-loss", "time + cost <= 3"))


# ------------------------------------------------------------------ several outcomes


def _several(objective: str, *constraints: str) -> Client:
    client = _client()
    client.configure_optimization(objective=objective, outcome_constraints=list(constraints))
    return client


def test_objectives_thresholds_and_outcome_constraints_are_outcomes() -> None:
    space = search_space(_several("-loss, gain", "gain >= 0.5", "time <= 3", "time >= 1"))
    assert space.outcomes == (
        Outcome.objective("loss", minimize=True),
        Outcome.objective("gain", reference=0.5),
        Outcome.constraint("time", lower=1, upper=3),
    )
    assert search_space(_several("-loss")) == search_space(_client())


@pytest.mark.parametrize(
    ("client", "match"),
    [
        (lambda: _several("-loss", "time <= 4"), r"'time <= 4'\], the federation .*'time <= 3'"),
        (lambda: _several("loss", "time <= 3"), "'maximise loss'"),
        (lambda: _several("-loss, time"), "they must agree"),
        (_client, "they must agree"),
    ],
)
def test_other_outcomes_are_refused(client: Callable[[], Client], match: str) -> None:
    space = search_space(_several("-loss", "time <= 3"))
    with pytest.raises(InputDataError, match=match):
        AxFederation(FTS(budget=1), {"a": client()}, space=space, seed=0)
    with pytest.raises(InputDataError, match="the federation one metric"):
        AxFederation(FTS(budget=1), {"a": _several("-loss", "time <= 3")}, space=_space(), seed=0)


@pytest.mark.parametrize(
    ("objective", "constraints"),
    [("-loss", ("time <= 4",)), ("-loss, -time", ("loss <= 99", "time <= 99"))],
)
def test_clients_with_several_metrics_are_sites(objective: str, constraints: Any) -> None:
    clients = {name: _several(objective, *constraints) for name in NAMES[:2]}
    federation = AxFederation(FTS(budget=5), clients, seed=0)
    failed = 0
    while not federation.finished:
        for client in clients.values():
            with contextlib.suppress(RoundOpen, GenerationStrategyCompleted):
                for index, point in client.get_next_trials(max_trials=_asked(client)).items():
                    if not failed:  # a trial whose data lack a metric has failed
                        failed += 1
                        client.mark_trial_failed(index)
                        continue
                    data = {"loss": _loss(point), "time": point["x"]}
                    client.complete_trial(index, raw_data=data)
        federation.step()
    for name, client in clients.items():
        X, Y = federation.history(name)
        points = federation.space.from_unit(X)
        expected = [[_loss(point), point["x"]] for point in points]
        torch.testing.assert_close(Y, torch.tensor(expected, dtype=torch.float64))
        site = federation.sites[name].site
        if len(federation.space.objectives) == 1:
            parameters, *_ = client.get_best_parameterization(use_model_predictions=False)
            best = site.best()
            assert best is not None
            assert best.values["time"] <= 4
            assert parameters["x"] == pytest.approx(best.parameters["x"])
        else:
            front = client.get_pareto_frontier(use_model_predictions=False)
            mine = {round(float(trial.parameters["x"]), 9) for trial in site.pareto()}
            assert {round(float(one[0]["x"]), 9) for one in front} <= mine


# ------------------------------------------------------------------ rounds and trials


@pytest.mark.parametrize(
    "protocol",
    [
        FTS(budget=3, every=1),
        FedGP(budget=5, channel="plain"),
        FedGP(budget=3, channel="plain", initial_design=CENTRE),
    ],
)
def test_ax_changes_no_bit_of_a_run(protocol: Any) -> None:
    clients = _clients()
    federation = AxFederation(protocol, clients, space=_space(), seed=3)
    _finish(federation, clients)
    expected = _by_run(protocol.from_centre(_space()), _space(), seed=3)
    for name in NAMES:
        X, Y = federation.history(name)
        assert torch.equal(X, expected[name][0])
        assert torch.equal(Y, expected[name][1])
        trials = clients[name]._experiment.trials
        assert len(trials) == len(X)
        assert all(trial.status.is_completed for trial in trials.values())


def test_any_engine_may_ask_a_site() -> None:
    clients, protocol = _clients(), FTS(budget=2, every=1, design_seed=3)
    server, blobs = protocol.server(_space(), NAMES), MemoryBlobs()
    sites = {}
    for name, client in clients.items():
        agent = make_agent(protocol, name, _space(), 3, blobs)
        sites[name] = AxSite(name, agent, _space())
        sites[name].join(client)
    engine = InProcess(site.site for site in sites.values())

    def exchange(outgoing: Outgoing) -> Exchanged:
        exchanged = engine(outgoing)
        for name, site in sites.items():
            if site.site.waiting:
                assert _advance(clients[name]) == 1
        return engine(outgoing) if outgoing.serial > 1 else exchanged

    drive(server, exchange)
    expected = _by_run(protocol, _space(), seed=3)
    for name, site in sites.items():
        assert torch.equal(torch.cat([o.X for o in site.site.observations()]), expected[name][0])


class _Runner(IRunner):
    def run_trial(self, trial_index: int, parameterization: Any) -> dict[str, Any]:
        return {"point": parameterization}

    def poll_trial(self, trial_index: int, trial_metadata: Any) -> TrialStatus:
        return TrialStatus.COMPLETED

    def stop_trial(self, trial_index: int, trial_metadata: Any) -> dict[str, Any]:
        return {}


class _Loss(IMetric):
    def fetch(self, trial_index: int, trial_metadata: Any) -> tuple[int, float]:
        return 0, _loss(trial_metadata["point"])


def test_ax_may_run_the_trials_itself() -> None:
    client = _client()
    client.configure_runner(_Runner())
    client.configure_metrics([_Loss("loss")])
    federation = AxFederation(FTS(budget=2), {"a": client}, space=_space(), seed=0)
    client.run_trials(max_trials=5, parallelism=1, initial_seconds_between_polls=0)
    assert federation.finished
    X, Y = federation.history("a")
    assert Y.flatten().tolist() == [_loss(p) for p in _space().from_unit(X)]
    assert len(Y) == 2


def test_a_strategy_can_be_copied() -> None:
    """Ax copies nodes: a copy finds the same site, by name."""
    federation = AxFederation(FTS(budget=1), {"a": _client()}, space=_space(), seed=0)
    strategy = GenerationStrategy(name="x", nodes=[federation.sites["a"].node()])
    (node,) = strategy.clone_reset()._nodes
    assert node.site == federation.sites["a"].key
    assert not node.should_deduplicate


def test_encrypted_sums_among_three_clients() -> None:
    clients = _clients()
    protocol = FedGP(budget=5)
    assert protocol.channel == "threshold"
    federation = AxFederation(protocol, clients, space=_space(), seed=3)
    _finish(federation, clients)
    expected = _by_run(FedGP(budget=5, channel="plain").from_centre(_space()), _space(), seed=3)
    for name in NAMES:  # one public grid: encryption changes no bit
        assert torch.equal(federation.history(name)[0], expected[name][0])


def test_a_round_waits_for_all_and_nobody_gets_a_point_twice() -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=2, every=1), clients, space=_space(), seed=0)
    trials = clients["a"].get_next_trials(max_trials=1)  # without any data
    with pytest.raises(RoundOpen, match="nothing to propose"):
        clients["a"].get_next_trials(max_trials=1)
    clients["a"].complete_trial(next(iter(trials)), raw_data={"loss": 1.0})
    with pytest.raises(DataRequiredError):  # Ax's own word for: later
        clients["a"].get_next_trials(max_trials=1)
    assert federation.rounds == 1
    for name in ("b", "c"):
        assert _advance(clients[name]) == 1
    assert federation.step() == 1
    assert _advance(clients["a"]) == 1
    _finish(federation, clients)
    with pytest.raises(GenerationStrategyCompleted):
        clients["a"].get_next_trials(max_trials=1)
    assert federation.step() == 0
    assert all(len(clients[name]._experiment.trials) == 2 for name in NAMES)


def test_who_asks_for_several_trials_gets_them() -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=5), clients, space=_space(), seed=0)
    trials = clients["a"].get_next_trials(max_trials=3)
    assert len({tuple(point.values()) for point in trials.values()}) == 3
    for index, point in reversed(trials.items()):
        clients["a"].complete_trial(index, raw_data={"loss": _loss(point)})
    for _ in range(3):
        for name in ("b", "c"):
            assert _advance(clients[name]) == 1
    trials = clients["a"].get_next_trials(max_trials=9)
    assert len(trials) == 2  # its budget
    for index, point in trials.items():
        clients["a"].complete_trial(index, raw_data={"loss": _loss(point)})
    _finish(federation, clients)
    assert [len(clients[name]._experiment.trials) for name in NAMES] == [5, 5, 5]


def test_a_point_that_nobody_attached_is_proposed_again() -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=1), clients, space=_space(), seed=0)
    strategy = clients["a"]._generation_strategy
    first = strategy.gen(clients["a"]._experiment, num_trials=1)[0][0].arms[0].parameters
    second = clients["a"].get_next_trials(max_trials=1)
    assert first == next(iter(second.values()))
    assert federation.sites["a"].wanted() == []


def test_equal_points_have_a_trial_each() -> None:
    """Ax would replace a repeated point by one of Sobol's, without a word."""
    two = ChoiceParameterConfig(
        name="c", values=["left", "right"], parameter_type="str", is_ordered=False
    )
    clients = {"a": _client(two)}
    federation = AxFederation(FTS(budget=5), clients, seed=0)
    values = iter(range(5))
    while not federation.finished:
        _advance(clients["a"], lambda point: float(next(values)))
    X, Y = federation.history("a")
    assert Y.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    asked = [t.arm.parameters for t in clients["a"]._experiment.trials.values()]
    assert asked == search_space(clients["a"]).from_unit(X)


def test_failed_trials_are_asked_again_then_left_out() -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=2, every=1), clients, space=_space(), seed=0)
    client, asked = clients["a"], []
    for _ in range(2):
        index, point = next(iter(client.get_next_trials(max_trials=1).items()))
        asked.append(point)
        client.mark_trial_failed(index)
    assert asked[0] == asked[1]
    with pytest.raises(RoundOpen):  # given up: the round is for the others now
        client.get_next_trials(max_trials=1)
    for name in ("b", "c"):
        _advance(clients[name])
    point = next(iter(client.get_next_trials(max_trials=1).values()))
    assert point != asked[0]  # the next query is another one
    client.complete_trial(2, raw_data={"loss": 0.5})
    _finish(federation, clients)
    assert federation.history("a")[1].tolist() == [[0.5]]  # of the failures nothing was told
    assert len(federation.history("b")[1]) == 2


def test_after_a_query_was_left_out_the_next_is_another_one() -> None:
    client = _client()
    federation = AxFederation(FTS(budget=2), {"a": client}, space=_space(), seed=0, attempts=1)
    index, first = next(iter(client.get_next_trials(max_trials=1).items()))
    client.mark_trial_failed(index)
    second = next(iter(client.get_next_trials(max_trials=1).values()))
    assert first != second  # though the agent was told nothing and nobody else is there
    assert federation.sites["a"].site.serial == 3


def test_equal_points_of_a_design_have_a_trial_each() -> None:
    two = ChoiceParameterConfig(
        name="c", values=["left", "right"], parameter_type="str", is_ordered=False
    )
    clients = _clients(two)
    protocol = FedGP(budget=5, channel="plain", num_initial=4)  # two points are equal at least
    federation = AxFederation(protocol, clients, seed=0)
    values = iter(range(15))
    while not federation.finished:
        for client in clients.values():
            _advance(client, lambda point: float(next(values)))
        federation.step()
    assert federation.history("a")[1].flatten()[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_failure_can_be_mended() -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=2, every=1), clients, space=_space(), seed=3)
    index = next(iter(clients["a"].get_next_trials(max_trials=1)))
    clients["a"].mark_trial_failed(index)
    _finish(federation, clients)
    expected = _by_run(FTS(budget=2, every=1).from_centre(_space()), _space(), seed=3)
    assert torch.equal(federation.history("a")[0], expected["a"][0])


def test_a_value_that_is_none_counts_as_a_failure() -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=1), clients, space=_space(), seed=3, attempts=1)
    index = next(iter(clients["a"].get_next_trials(max_trials=1)))
    clients["a"].complete_trial(index, raw_data={"loss": 1e40})
    _finish(federation, clients)
    assert len(federation.history("a")[1]) == 0
    assert federation.history("a")[0].shape == (0, 2)


def test_a_time_series_ends_with_its_last_step() -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=1), clients, space=_space(), seed=3)
    index = next(iter(clients["a"].get_next_trials(max_trials=1)))
    for step in (1, 3, 2):
        clients["a"].attach_data(index, raw_data={"loss": 10.0 - step}, progression=step)
        with pytest.raises(RoundOpen):  # while it runs, nothing is told
            clients["a"].get_next_trials(max_trials=1)
    clients["a"].complete_trial(index)
    _finish(federation, clients)
    assert federation.history("a")[1].tolist() == [[7.0]]


def test_one_abandoned_point_of_a_design_is_left_out() -> None:
    clients = _clients()
    federation = AxFederation(FedGP(budget=4), clients, space=_space(), seed=0)
    trials = clients["a"].get_next_trials(max_trials=3)
    assert len(trials) == 3
    for i, (index, point) in enumerate(trials.items()):
        if i == 1:
            clients["a"].mark_trial_abandoned(index)
        else:
            clients["a"].complete_trial(index, raw_data={"loss": _loss(point)})
    _finish(federation, clients)
    assert len(federation.history("a")[1]) == 3  # 2 of the design and one query
    assert len(federation.history("b")[1]) == 4


def test_a_trial_that_was_stopped_early_is_data() -> None:
    clients = _clients()
    federation = AxFederation(FedGP(budget=4), clients, space=_space(), seed=0)
    trials = clients["a"].get_next_trials(max_trials=3)
    for i, (index, point) in enumerate(trials.items()):
        clients["a"].attach_data(index, raw_data={"loss": _loss(point)})
        if i == 1:
            clients["a"].mark_trial_early_stopped(index)
        else:
            clients["a"].complete_trial(index)
    _finish(federation, clients)
    assert len(federation.history("a")[1]) == 4


def test_own_trials_are_data() -> None:
    clients = _clients()
    point = {"x": 3.0, "z": 0.01}
    index = clients["a"].attach_trial(point)
    clients["a"].complete_trial(index, raw_data={"loss": 0.125})
    federation = AxFederation(FTS(budget=2, every=1), clients, space=_space(), seed=0)
    clients["a"].get_next_trials(max_trials=1)
    X = federation.space.to_unit([point])
    assert torch.equal(_own_X(federation, "a"), X)
    late = clients["a"].attach_trial({"x": -5.0, "z": 1.0})
    running = clients["a"].attach_trial({"x": 1.0, "z": 1.0})
    clients["a"].complete_trial(late, raw_data={"loss": 9.0})
    clients["a"].complete_trial(1, raw_data={"loss": 1.0})  # the agent's
    for name in ("b", "c"):
        _advance(clients[name])
    clients["a"].get_next_trials(max_trials=1)  # with the next request it is taken in
    known = _own_X(federation, "a")
    assert len(known) == 3
    assert torch.equal(known[2], torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert clients["a"]._experiment.trials[running].status.is_running
    assert len(federation.history("a")[1]) == 1  # what the agent has asked for


@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
def test_a_private_run_takes_no_further_data(caplog: pytest.LogCaptureFixture) -> None:
    """A mechanism's guarantee counts an agent's records."""
    clients = _clients()
    protocol = FedGP(
        budget=5,
        search=paper_search(support_size=4, num_raw=32, num_restarts=2),
        mechanism=lambda dim, agents: DistributedGaussianSum(
            clip_norm=20.0, noise_multiplier=1.0, dim=dim, num_agents=agents
        ),
        noise_at="agent",
        noise=InsecureSeededNoise(0),
        channel="plain",
    )
    federation = AxFederation(protocol, clients, space=_space(), seed=0)
    index = clients["a"].attach_trial({"x": 3.0, "z": 0.01})
    clients["a"].complete_trial(index, raw_data={"loss": 0.125})
    clients["a"].get_next_trials(max_trials=1)
    assert len(_own_X(federation, "a")) == 0
    assert "is left out: A private sum" in caplog.text


def test_after_sobol() -> None:
    """The federation may be one node of a larger strategy."""
    clients = _clients()
    federation = AxFederation(FTS(budget=2, every=1), NAMES, space=_space(), seed=0)
    for name, client in clients.items():
        client.set_generation_strategy(_strategy(federation.sites[name].node("F")))
        federation.join(name, client)
    for client in clients.values():
        for _ in range(3):
            assert _advance(client, most=1) == 1
    assert federation.rounds == 0
    _finish(federation, clients)
    assert len(_own_X(federation, "a")) == 5


def test_quorum() -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=3, every=1), clients, space=_space(), seed=0, quorum=2)
    slow = next(iter(clients["c"].get_next_trials(max_trials=1)))
    for name in ("a", "b", "a", "b"):
        assert _advance(clients[name]) == 1
    clients["c"].complete_trial(slow, raw_data={"loss": 1.0})  # late, and told all the same
    assert _advance(clients["c"]) == 1
    _finish(federation, clients)
    assert len(federation.history("c")[1]) == 2
    assert len(federation.history("a")[1]) == 3


def test_a_dropped_point_does_not_hold_up_a_site_that_is_behind() -> None:
    clients = _clients()
    federation = AxFederation(
        FTS(budget=3, every=1), clients, space=_space(), seed=0, quorum=2, attempts=1
    )
    slow = next(iter(clients["c"].get_next_trials(max_trials=1)))
    for name in ("a", "b"):
        assert _advance(clients[name]) == 1
    federation.step()
    assert federation.rounds == 2  # without c
    own = clients["c"].attach_trial({"x": 9.0, "z": 1.0})
    clients["c"].complete_trial(own, raw_data={"loss": 7.5})
    better = clients["c"].attach_trial({"x": 3.0, "z": 1.0})
    clients["c"].complete_trial(better, raw_data={"loss": 1.5})
    clients["c"].mark_trial_failed(slow)
    _finish(federation, clients)
    trials = federation.sites["c"].site.trials()
    assert [trial.status for trial in trials[:3]] == ["failed", "attached", "attached"]
    assert len(trials) == 4  # its first evaluation took two rounds


def test_misuse_is_refused() -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=1), NAMES, space=_space(), seed=0)
    federation.join("a", clients["a"])
    with pytest.raises(ProtocolError, match="join"):
        clients["a"].get_next_trials(max_trials=1)
    clients["b"].set_generation_strategy(_strategy(federation.sites["a"].node("F")))
    with pytest.raises(InputDataError, match="no node of site"):
        federation.join("b", clients["b"])
    clients["b"].set_generation_strategy(_strategy(federation.sites["b"].node("F")))
    federation.join("b", clients["b"])
    federation.join("c", clients["c"])
    with pytest.raises(UnsupportedError, match="fixed"):
        clients["a"].get_next_trials(max_trials=1, fixed_parameters={"x": 1.0})


# ------------------------------------------------------------------ saving


def _saved(clients: dict[str, Client], folder: Path) -> None:
    for name, client in clients.items():
        client.save_to_json_file(str(folder / f"{name}.json"))


def _loaded(federation: AxFederation, folder: Path) -> dict[str, Client]:
    clients = {name: Client.load_from_json_file(str(folder / f"{name}.json")) for name in NAMES}
    for name, client in clients.items():
        federation.join(name, client)
    return clients


@pytest.mark.parametrize(
    "protocol",
    [
        FTS(budget=3, every=1),
        FTS(budget=4, every=1, initial_design=CENTRE),
        FedGP(budget=6),
        FedGP(budget=4, initial_design=CENTRE),
    ],
)
def test_a_run_goes_on_after_a_restart(protocol: Any, tmp_path: Path) -> None:
    clients = _clients()
    with AxFederation(protocol, clients, space=_space(), seed=3, folder=tmp_path / "f") as first:
        for _ in range(2):
            for client in clients.values():
                _advance(client)
        pending = clients["a"].get_next_trials(max_trials=_asked(clients["a"]))
        rounds = first.rounds
        _saved(clients, tmp_path)
    nodes = json.loads((tmp_path / "a.json").read_text())["generation_strategy"]["nodes"]
    assert nodes[0].keys() == {"__type", "site", "name", "transition_criteria"}  # a name, no state
    if isinstance(protocol, FedGP):  # keys outlive the process as well
        assert len([path for path in tmp_path.rglob("secrets/*") if path.is_file()]) >= 3
    del first
    protocol = type(protocol)(**_fresh(protocol))
    with AxFederation(protocol, NAMES, space=_space(), seed=3, folder=tmp_path / "f") as federation:
        clients = _loaded(federation, tmp_path)
        assert federation.rounds == rounds
        with pytest.raises(RoundOpen):  # its trial is known, and still running
            clients["a"].get_next_trials(max_trials=1)
        for index, point in pending.items():
            clients["a"].complete_trial(index, raw_data={"loss": _loss(point)})
        _finish(federation, clients)
        if isinstance(protocol, FedGP):
            protocol = replace(protocol, channel="plain")
        expected = _by_run(protocol.from_centre(_space()), _space(), seed=3)
        for name in NAMES:
            assert torch.equal(federation.history(name)[0], expected[name][0])


def _fresh(protocol: Any) -> dict[str, Any]:
    """The settings of a study, without what one process has made of them."""
    rest = {"every": 1} if isinstance(protocol, FTS) else {}
    return {"budget": protocol.budget, "initial_design": protocol.initial_design, **rest}


def test_a_trial_that_a_snapshot_has_lost_is_asked_for_again(tmp_path: Path) -> None:
    clients = _clients()
    with AxFederation(
        FTS(budget=1), clients, space=_space(), seed=3, folder=tmp_path / "f"
    ) as first:
        _saved(clients, tmp_path)
        lost = clients["a"].get_next_trials(max_trials=1)
    del first
    with AxFederation(
        FTS(budget=1), NAMES, space=_space(), seed=3, folder=tmp_path / "f"
    ) as federation:
        clients = _loaded(federation, tmp_path)
        assert clients["a"].get_next_trials(max_trials=1) == lost


def test_a_snapshot_can_be_looked_at_without_the_federation(tmp_path: Path) -> None:
    clients = _clients()
    federation = AxFederation(FTS(budget=1), clients, space=_space(), seed=3)
    _advance(clients["a"])
    _saved(clients, tmp_path)
    again = Client.load_from_json_file(str(tmp_path / "a.json"))  # while the site is alive
    federation.join("a", again)
    with pytest.raises(RoundOpen):
        again.get_next_trials(max_trials=1)
    del federation
    clients.clear()
    gc.collect()
    alone = Client.load_from_json_file(str(tmp_path / "b.json"))
    with pytest.raises(ProtocolError, match="not alive"):
        alone.get_next_trials(max_trials=1)


def test_transition_criteria_survive(tmp_path: Path) -> None:
    federation = AxFederation(FTS(budget=4), NAMES, space=_space(), seed=3)
    client = _client()
    node = federation.sites["a"].node("F", [MinTrials(threshold=1, transition_to="Sobol")])
    sobol = GenerationNode(name="Sobol", generator_specs=[GeneratorSpec(Generators.SOBOL)])
    client.set_generation_strategy(GenerationStrategy(name="both", nodes=[node, sobol]))
    client.save_to_json_file(str(tmp_path / "x.json"))
    found = Client.load_from_json_file(str(tmp_path / "x.json"))._generation_strategy._nodes[0]
    assert found.transition_criteria == node.transition_criteria


# ------------------------------------------------------------------ door B


@pytest.fixture
def context() -> Iterator[tuple[Context, Client]]:
    """A context of thirty observations of another site, and a client with every kind of range."""
    ax_adapter.register()
    client = _client(LINEAR, LOG, INTEGER)
    space = _space(client)
    phi = default_feature_map(space, num_features=50)
    X = space.snap(generator(0, "d").uniform(30, space.dim))
    Y = torch.tensor([[_loss(p)] for p in space.from_unit(X)], dtype=torch.float64)
    total = summarize(phi, X, space.outcome.to_public(Y), noise_var=0.05)
    mean = WeightPosterior.from_total(total).mean.flatten()
    weights = torch.stack([mean, -mean])
    made = Context(phi, space.outcome, weights=weights, summaries=(total,))
    contexts["default"] = made
    yield made, client
    contexts.clear()


def _strategy(node: GenerationNode) -> GenerationStrategy:
    sobol = GenerationNode(
        name="Sobol",
        generator_specs=[GeneratorSpec(Generators.SOBOL, generator_kwargs={"seed": 0})],
        transition_criteria=[
            MinTrials(threshold=3, transition_to=node.name, use_all_trials_in_exp=True)
        ],
    )
    return GenerationStrategy(name="both", nodes=[sobol, node])


def _after_sobol(
    client: Client, spec: GeneratorSpec, trials: int = 3, *, quick: bool = True
) -> Client:
    if quick:  # only the wiring matters
        optimizer = {"num_restarts": 2, "raw_samples": 16, "options": {"maxiter": 10}}
        options = {"model_gen_options": {"optimizer_kwargs": optimizer}}
        spec.generator_gen_kwargs.update(options)
    client.set_generation_strategy(_strategy(GenerationNode(name="F", generator_specs=[spec])))
    for _ in range(trials):
        assert _advance(client, most=1) == 1
    return client


def _next(client: Client) -> Point:
    return dict(next(iter(client.get_next_trials(max_trials=1).values())))


def _model(client: Client) -> Any:
    return client._generation_strategy.adapter.generator.surrogate.model


CASES = [
    (ContextBasisGP, ContextThompsonSampling, {"message": 0}),
    (ContextBasisGP, qLogNoisyExpectedImprovement, {}),
    (ContextMessagePriorGP, qLogNoisyExpectedImprovement, {}),
    (ContextMixture, ContextThompsonSampling, {}),
    (ContextMixture, MixtureUCB, {"beta": 1.0}),
    (ContextMixture, MixtureEI, {}),
    (ContextMixture, MixturePI, {}),
]


@pytest.mark.parametrize(("model", "acquisition", "options"), CASES)
def test_our_classes_in_botorch_modular(
    model: Any,
    acquisition: type[AcquisitionFunction],
    options: dict[str, Any],
    context: tuple[Context, Client],
    tmp_path: Path,
) -> None:
    client = _after_sobol(context[1], modular_spec(model, acquisition, **options))
    point = _next(client)
    client.complete_trial(3, raw_data={"loss": _loss(point)})
    assert isinstance(_model(client), model)
    client.save_to_json_file(str(tmp_path / "x.json"))  # names only: no tensor in any option
    again = Client.load_from_json_file(str(tmp_path / "x.json"))
    _next(again)
    assert isinstance(_model(again), model)


def test_a_received_function_is_followed(context: tuple[Context, Client]) -> None:
    """The message is of a maximisation on the unit cube; Ax minimises on its own scale."""
    known, client = context
    spec = modular_spec(ContextBasisGP, ContextThompsonSampling, message=0)
    point = _next(_after_sobol(client, spec, quick=False))
    assert known.weights is not None
    space = _space(client)
    grid = generator(1, "grid").uniform(2000, space.dim)
    grid[:, 2] = (7 * grid[:, 2]).round() / 7
    values = known.feature_map(grid) @ known.weights[0]
    found = known.feature_map(space.to_unit([point])) @ known.weights[0]
    assert float(found) >= float(values.max()) - 1e-6
    assert abs(point["x"] - 3) < 1.5  # where the other site's loss is small


def test_own_draw_has_the_objectives_sign(context: tuple[Context, Client]) -> None:
    known, client = context
    contexts["default"] = Context(known.feature_map, known.outcome)
    spec = modular_spec(ContextBasisGP, ContextThompsonSampling)
    client = _after_sobol(client, spec)
    _next(client)
    model = _model(client)
    X, Y = model._train_X, model.outcome_transform.untransform(model._train_Y)[0]
    data = SupervisedDataset(X, Y, feature_names=["x", "z", "k"], outcome_names=["loss"])
    minus = ScalarizedPosteriorTransform(torch.tensor([-1.0], dtype=torch.float64))
    path = ax_adapter._thompson_inputs(model, data, minus)["path"]
    values = torch.stack([path(X).detach(), -Y.flatten()])  # a draw is near the data where they are
    assert float(torch.corrcoef(values)[0, 1]) > 0.9


def test_a_wrong_sign_is_refused(context: tuple[Context, Client]) -> None:
    known, client = context
    outcome = Outcome(3.0, 3.0, minimize=False)
    contexts["default"] = Context(known.feature_map, outcome, weights=known.weights)
    spec = modular_spec(ContextBasisGP, ContextThompsonSampling, message=0)
    with pytest.raises(InputDataError, match="opposite"):
        _next(_after_sobol(client, spec))


def test_pending_trials_are_named(context: tuple[Context, Client]) -> None:
    """Without `X_pending` in the signature Ax fails as soon as a trial is pending, not before."""
    spec = modular_spec(ContextBasisGP, ContextThompsonSampling, message=0)
    client = _after_sobol(context[1], spec)
    _next(client)
    _next(client)  # the first one is pending

    def nameless(model: Any, posterior_transform: Any = None) -> dict[str, Any]:
        return ax_adapter._thompson_inputs(model, None, posterior_transform, message=0)  # type: ignore[arg-type]

    from botorch.acquisition.input_constructors import (
        ACQF_INPUT_CONSTRUCTOR_REGISTRY,
        acqf_input_constructor,
    )

    class Nameless(ContextThompsonSampling):
        pass

    acqf_input_constructor(Nameless)(nameless)
    try:
        spec = modular_spec(ContextBasisGP, ContextThompsonSampling)
        spec.generator_kwargs["botorch_acqf_class"] = Nameless
        spec.generator_kwargs["botorch_acqf_options"] = {}
        other = _after_sobol(_client(LINEAR, LOG, INTEGER), spec)
        _next(other)
        with pytest.raises(TypeError, match="X_pending"):
            _next(other)
    finally:
        del ACQF_INPUT_CONSTRUCTOR_REGISTRY[Nameless]


def test_analytic_mixtures_refuse_pending_trials(context: tuple[Context, Client]) -> None:
    client = _after_sobol(context[1], modular_spec(ContextMixture, MixtureUCB, beta=1.0))
    _next(client)
    with pytest.raises(UnsupportedError, match="pending"):
        _next(client)


def test_options_go_where_they_are_read(context: tuple[Context, Client]) -> None:
    spec = modular_spec(ContextBasisGP, ContextThompsonSampling, message=9)
    with pytest.raises(IndexError):
        _next(_after_sobol(context[1], spec))
    spec.generator_kwargs["acquisition_options"] = {"message": 9}
    spec.generator_kwargs["botorch_acqf_options"] = {}
    contexts["default"] = Context(context[0].feature_map, context[0].outcome)
    _next(_after_sobol(_client(LINEAR, LOG, INTEGER), spec))  # in silence: nobody reads it


def test_input_transform_is_in_the_signature(context: tuple[Context, Client]) -> None:
    for model in (BasisGP, ContextBasisGP, ContextMessagePriorGP, ContextMixture):
        assert "input_transform" in inspect.getfullargspec(model).args  # keyword-only is unseen


def _plain(phi: FeatureMap, **options: Any) -> GeneratorSpec:
    """Ax's own spec of a model without a context, with Ax's own transforms."""
    config = ModelConfig(botorch_model_class=BasisGP, model_options={"feature_map": phi, **options})
    return GeneratorSpec(
        Generators.BOTORCH_MODULAR,
        generator_kwargs={"surrogate_spec": SurrogateSpec(model_configs=[config])},
    )


def test_a_plain_model_in_axs_own_spec(context: tuple[Context, Client], tmp_path: Path) -> None:
    phi = context[0].feature_map
    client = _after_sobol(context[1], _plain(phi), trials=4)
    client.save_to_json_file(str(tmp_path / "x.json"))
    again = Client.load_from_json_file(str(tmp_path / "x.json"))
    for found in (client, again):
        point = _next(found)
        assert isinstance(_model(found), BasisGP)
        assert _model(found)._base_map.fingerprint == phi.fingerprint
        (prediction,) = found.predict([point])
        assert math.isfinite(prediction["loss"][0])
        assert len(cross_validate(found._generation_strategy.adapter)) == 4
    spec = _plain(phi, summaries=context[0].summaries)
    with pytest.raises(UnsupportedError, match=r"takes no summaries.*ContextBasisGP"):
        _next(_after_sobol(_client(LINEAR, LOG, INTEGER), spec))


# ------------------------------------------------------------------ door B: several metrics


def _seconds(point: Point) -> float:
    """Far from the loss in size, and larger where the loss is small."""
    return float(100 + 4 * point["x"])


@pytest.fixture
def two() -> Iterator[Callable[..., Client]]:
    """Contexts of two metrics, of forty observations each, and what makes clients of both."""
    ax_adapter.register()
    space = SearchSpace((LINEAR_PARAMETER, LOG_PARAMETER))
    phi = default_feature_map(space, num_features=50)
    X = generator(0, "d").uniform(40, 2)
    points = space.from_unit(X)
    outcomes = {"loss": Outcome(3.0, 3.0, minimize=True), "seconds": Outcome(110.0, 10.0)}
    for name, function in (("loss", _loss), ("seconds", _seconds)):
        Y = torch.tensor([[function(p)] for p in points], dtype=torch.float64)
        total = summarize(phi, X, outcomes[name].to_public(Y), noise_var=1e-4)
        mean = WeightPosterior.from_total(total).mean.flatten()
        contexts[name] = Context(
            phi, outcomes[name], weights=torch.stack([mean, 0.9 * mean]), summaries=(total,)
        )

    def client_of(
        spec: GeneratorSpec,
        objective: str = "-loss",
        constraints: tuple[str, ...] = ("seconds <= 109.2",),
        storage: Any = None,
        name: str | None = None,
    ) -> Client:
        client = Client(storage_config=storage, random_seed=0)
        client.configure_experiment(parameters=[LINEAR, LOG], name=name)
        client.configure_optimization(objective=objective, outcome_constraints=list(constraints))
        optimizer = {"num_restarts": 2, "raw_samples": 32, "options": {"maxiter": 20}}
        options = {"model_gen_options": {"optimizer_kwargs": optimizer}}
        spec.generator_gen_kwargs.update(options)
        client.set_generation_strategy(_strategy(GenerationNode(name="F", generator_specs=[spec])))
        return client

    yield client_of
    contexts.clear()


BOTH = {"loss": "loss", "seconds": "seconds"}


def _observe(client: Client, trials: int) -> list[Point]:
    """Points that are asked for and answered, of both metrics."""
    points = []
    for _ in range(trials):
        for index, point in client.get_next_trials(max_trials=1).items():
            answer = {"loss": _loss(dict(point)), "seconds": _seconds(dict(point))}
            client.complete_trial(index, raw_data=answer)
            points.append(dict(point))
    return points


@pytest.mark.parametrize("model", [ContextBasisGP, ContextMessagePriorGP, ContextMixture])
def test_every_metric_has_a_context_of_its_own(model: Any, two: Callable[..., Client]) -> None:
    """Without constraint the best point is at x = 3, where the other metric is 112."""
    client = two(modular_spec(model, qLogNoisyExpectedImprovement, context=BOTH))
    proposed = _observe(client, 6)[3:]
    assert all(_seconds(point) <= 109.8 for point in proposed)  # but for noise and samples
    test = [{"x": 1.5, "z": 0.01}, {"x": 4.0, "z": 0.1}]
    for point, prediction in zip(test, client.predict(test), strict=True):
        assert prediction["seconds"][0] == pytest.approx(_seconds(point), abs=1.5)
        assert prediction["loss"][0] == pytest.approx(_loss(point), abs=0.8)
    assert len(cross_validate(client._generation_strategy.adapter)) >= 5


def test_a_metric_without_a_context_has_a_model_of_its_own_data(
    two: Callable[..., Client],
) -> None:
    spec = modular_spec(ContextBasisGP, qLogNoisyExpectedImprovement, context={"loss": "loss"})
    client = two(spec)
    _observe(client, 5)
    surrogate = client._generation_strategy.adapter.generator.surrogate
    kinds = {n: type(m) for n, m in zip(surrogate.outcomes, surrogate.model.models, strict=True)}
    assert kinds == {"loss": ContextBasisGP, "seconds": OwnMetricGP}
    (prediction,) = client.predict([{"x": 0.0, "z": 0.01}])
    assert prediction["loss"][0] == pytest.approx(_loss({"x": 0.0, "z": 0.01}), abs=0.3)
    assert 80 < prediction["seconds"][0] < 140  # of four trials: of the right size at least


def test_a_context_of_nobody_knows_which_metric_is_refused(two: Callable[..., Client]) -> None:
    make = partial(modular_spec, ContextBasisGP, qLogNoisyExpectedImprovement)
    with pytest.raises(UnsupportedError, match=r"has \['loss', 'seconds'\]: say which"):
        _observe(two(make(context="loss")), 4)
    with pytest.raises(UnsupportedError, match=r"contexts of the metrics \['los'\]"):
        _observe(two(make(context={"los": "loss"})), 4)
    with pytest.raises(InputDataError, match="a context each"):
        make(context={"loss": "loss", "seconds": "loss"})
    with pytest.raises(InputDataError, match="a context each"):
        make(context={})
    with pytest.raises(InputDataError, match="of the objective only"):
        modular_spec(ContextBasisGP, ContextThompsonSampling, context=BOTH)


@pytest.mark.parametrize(
    ("model", "acquisition", "match"),
    [
        (ContextBasisGP, ContextThompsonSampling, "no outcome constraints"),
        (ContextMixture, MixtureUCB, "knows no outcome constraints"),
        (ContextMixture, MixtureEI, "knows no outcome constraints"),
        (ContextMixture, ThompsonSampling, "knows no outcome constraints"),
    ],
)
def test_constraints_are_not_ignored(
    model: Any, acquisition: Any, match: str, two: Callable[..., Client]
) -> None:
    client = two(modular_spec(model, acquisition, context={"loss": "loss"}))
    with pytest.raises(UnsupportedError, match=match):
        _observe(client, 4)


def test_a_sign_that_would_be_ignored_is_refused(two: Callable[..., Client]) -> None:
    client = two(modular_spec(ContextBasisGP, ThompsonSampling, context="loss"), constraints=())
    for _ in range(3):
        assert _advance(client, most=1) == 1
    with pytest.raises(UnsupportedError, match="negate outcomes that are minimised"):
        _advance(client, most=1)


def test_thompson_sampling_beside_a_tracking_metric(two: Callable[..., Client]) -> None:
    for options in ({}, {"message": 1}):
        spec = modular_spec(
            ContextBasisGP, ContextThompsonSampling, context={"loss": "loss"}, **options
        )
        client = two(spec, constraints=())
        client.configure_tracking_metrics(metric_names=["seconds"])
        (point,) = _observe(client, 4)[3:]
        assert abs(point["x"] - 3) < 2.5


def test_several_objectives(two: Callable[..., Client]) -> None:
    spec = modular_spec(ContextBasisGP, qLogNoisyExpectedHypervolumeImprovement, context=BOTH)
    client = two(spec, objective="-loss, -seconds", constraints=())
    proposed = _observe(client, 5)[3:]
    # Each is small on its own at x = 3 and x = -5: nothing beyond is of use to either.
    assert all(point["x"] <= 3.5 for point in proposed)
    assert len(client.get_pareto_frontier()) >= 1


@pytest.mark.nightly
@pytest.mark.parametrize("model", [ContextBasisGP, ContextMessagePriorGP, ContextMixture])
def test_analyses_are_made_without_tracebacks(
    model: Any, two: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = two(modular_spec(model, qLogNoisyExpectedImprovement, context=BOTH))
    _observe(client, 6)
    cards = [card for top in client.compute_analyses(display=False) for card in top.flatten()]
    failed = [card.name for card in cards if isinstance(card, ErrorAnalysisCard)]
    # Ax's sensitivities are of models with a normal posterior only.
    assert set(failed) == ({"TopSurfacesAnalysis"} if model is ContextMixture else set())
    assert len(cards) > 10


def test_a_trial_that_is_stopped_early_counts_with_its_last_value(
    two: Callable[..., Client],
) -> None:
    spec = modular_spec(ContextBasisGP, qLogNoisyExpectedImprovement, context="loss")
    client = two(spec, constraints=())
    client.set_early_stopping_strategy(
        PercentileEarlyStoppingStrategy(
            metric_signatures=["loss"], percentile_threshold=50, min_progression=2, min_curves=2
        )
    )
    last, stopped = [], 0
    for _ in range(5):
        for index, point in client.get_next_trials(max_trials=1).items():
            for step in (1, 2, 3):
                value = _loss(dict(point)) + 1 / step
                client.attach_data(index, raw_data={"loss": value}, progression=step)
                if client.should_stop_trial_early(trial_index=index):
                    client.mark_trial_early_stopped(index)
                    stopped += 1
                    break
            else:
                client.complete_trial(index, progression=3)
            last.append(value)
    assert stopped
    _next(client)
    model = _model(client)
    values = model.outcome_transform.untransform(model._train_Y)[0].flatten()
    assert sorted(values.tolist()) == pytest.approx(sorted(last))


# ------------------------------------------------------------------ SQL


@pytest.fixture
def storage(tmp_path: Path) -> Any:
    """A database in a file."""
    pytest.importorskip("sqlalchemy", reason="Ax's SQL storage needs SQLAlchemy")
    pytest.importorskip("tabulate", reason="Ax's SQL storage needs tabulate, by way of pandas")
    from ax.storage.sqa_store.db import (
        create_all_tables,
        get_engine,
        init_engine_and_session_factory,
    )

    url = f"sqlite:///{tmp_path / 'ax.db'}"
    init_engine_and_session_factory(url=url, force_init=True)
    create_all_tables(get_engine())
    return StorageConfig(url=url)


@pytest.mark.filterwarnings("ignore")  # of Ax and SQLAlchemy, in storage that is not ours
@pytest.mark.nightly
@pytest.mark.parametrize("model", [ContextBasisGP, ContextMessagePriorGP, ContextMixture])
def test_contexts_go_on_from_a_database(
    model: Any, two: Callable[..., Client], storage: Any
) -> None:
    spec = modular_spec(model, qLogNoisyExpectedImprovement, context=BOTH)
    _observe(two(spec, storage=storage, name=model.__name__), 4)
    again = Client.load_from_database(model.__name__, storage_config=storage)
    (point,) = _observe(again, 1)
    assert _seconds(point) <= 109.8
    models = again._generation_strategy.adapter.generator.surrogate.model.models
    assert all(isinstance(one, model) for one in models)


@pytest.mark.filterwarnings("ignore")  # of Ax and SQLAlchemy, in storage that is not ours
@pytest.mark.nightly
def test_a_federation_goes_on_from_a_database(
    two: Callable[..., Client], storage: Any, tmp_path: Path
) -> None:
    space = _space()
    clients = {}
    for name in NAMES:
        clients[name] = Client(storage_config=storage, random_seed=0)
        clients[name].configure_experiment(parameters=[LINEAR, LOG], name=name)
        clients[name].configure_optimization(objective="-loss")
    protocol = FTS(budget=4, every=1)
    with AxFederation(protocol, clients, space=space, seed=3, folder=tmp_path / "f"):
        for _ in range(2):
            for client in clients.values():
                _advance(client)
    with AxFederation(protocol, NAMES, space=space, seed=3, folder=tmp_path / "f") as federation:
        for name in NAMES:
            clients[name] = Client.load_from_database(name, storage_config=storage)
            federation.join(name, clients[name])
        _finish(federation, clients)
        expected = _by_run(protocol.from_centre(space), space, seed=3)
        for name in NAMES:
            # Ax's SQL rounds values in their last bits, its JSON does not.
            found = federation.history(name)[0]
            torch.testing.assert_close(found, expected[name][0], rtol=0, atol=1e-6)


def test_the_acquisition_sees_a_new_context_at_once(context: tuple[Context, Client]) -> None:
    """Ax uses a fitted model again while the data are the same: what arrives belongs elsewhere."""
    known, client = context
    spec = modular_spec(ContextBasisGP, ContextThompsonSampling, message=0)
    client = _after_sobol(client, spec)
    first = _next(client)
    old = _model(client).summaries[0]
    assert known.weights is not None
    moved = known.summaries[0] + known.summaries[0]
    contexts["default"] = Context(
        known.feature_map, known.outcome, weights=-known.weights, summaries=(moved,)
    )
    second = _next(client)
    assert first != second
    assert torch.equal(_model(client).summaries[0].gram, old.gram)  # stale, as documented
    client.complete_trial(3, raw_data={"loss": 1.0})
    _next(client)
    assert torch.equal(_model(client).summaries[0].gram.squeeze(0), moved.gram)


def test_integers_and_outcomes_are_mapped_as_agreed(context: tuple[Context, Client]) -> None:
    known, client = context
    spec = modular_spec(ContextBasisGP, ContextThompsonSampling, message=0)
    _next(_after_sobol(client, spec))
    model = _model(client)
    space = _space(client)
    trials = list(client._experiment.trials.values())[:3]
    points = [trial.arm.parameters for trial in trials]
    X = model.input_transform.transform(model._train_X)
    assert torch.allclose(X, space.to_unit(points), atol=1e-9)  # integers by (k - 1) / 7
    Y = torch.tensor([[_loss(point)] for point in points], dtype=torch.float64)
    # No StandardizeY: the public affine map and nothing else.
    assert torch.allclose(model._train_Y, known.outcome.to_public(Y))
    # Predictions are on the metric's own scale again.
    (mean,) = client._generation_strategy.adapter.generator.predict(model._train_X)[0].T
    assert torch.allclose(torch.as_tensor(mean), Y.flatten(), atol=1.0)


@pytest.mark.parametrize("model", [ContextBasisGP, ContextMessagePriorGP, ContextMixture])
def test_cross_validation_with_other_sizes_of_data(
    model: Any, context: tuple[Context, Client]
) -> None:
    spec = modular_spec(model, ContextThompsonSampling, message=0)
    client = _after_sobol(context[1], spec, trials=4)
    _next(client)
    results = cross_validate(client._generation_strategy.adapter)
    assert len(results) == 4


def test_missing_contexts_say_so(context: tuple[Context, Client]) -> None:
    known, client = context
    spec = modular_spec(ContextBasisGP, ContextThompsonSampling, context="other", message=0)
    with pytest.raises(ProtocolError, match="no context 'other'"):
        _next(_after_sobol(client, spec))
    contexts["default"] = Context(known.feature_map, known.outcome)
    X = torch.zeros(1, 3, dtype=torch.float64)
    with pytest.raises(ProtocolError, match="no summaries"):
        ContextMixture(X, X[:, :1])
    with pytest.raises(ProtocolError, match="no weight vectors"):
        ContextMessagePriorGP(X, X[:, :1])


def test_registering_twice_is_harmless() -> None:
    ax_adapter.register()
    ax_adapter.register()


def test_a_missing_ax_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ax.adapter.registry", None)
    spec = importlib.util.spec_from_file_location("without_ax", ax_adapter.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"pip install \"botorch_fed\[ax\]\""):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# ------------------------------------------------------------------ constraints

UNIT = [RangeParameterConfig(name=n, bounds=(0, 1), parameter_type="float") for n in "pq"]
SIZE = ChoiceParameterConfig(name="s", values=[10, 30, 50], parameter_type="int", is_ordered=True)
FLAG = ChoiceParameterConfig(name="f", values=[True, False], parameter_type="bool", is_ordered=True)


def _constrained(*constraints: str, parameters: Sequence[Any] = (*UNIT, SIZE, FLAG)) -> Client:
    client = Client(random_seed=0)
    client.configure_experiment(
        parameters=list(parameters), parameter_constraints=list(constraints)
    )
    client.configure_optimization(objective="y")
    return client


def test_parameter_constraints_are_kept_in_batches() -> None:
    constraints = ("p + q <= 0.7", "40 * p <= s")
    clients = {name: _constrained(*constraints) for name in "ab"}
    federation = AxFederation(FTS(budget=6, every=1), clients, seed=0)
    assert federation.space.constraint_words == ("p + q <= 0.7", "40 * p - s <= 0")
    assert federation.space.dim == 4  # ordered values take one column
    seen: list[Point] = []
    while not federation.finished:
        for client in clients.values():
            with contextlib.suppress(RoundOpen, GenerationStrategyCompleted):
                batch = client.get_next_trials(max_trials=3)
                assert len({str(point) for point in batch.values()}) == len(batch)
                for index, point in batch.items():
                    seen.append(dict(point))
                    value = -((point["p"] - 0.6) ** 2) - (point["q"] - 0.6) ** 2  # type: ignore
                    client.complete_trial(index, raw_data={"y": float(value)})
    assert len(seen) == 12
    assert all(p["p"] + p["q"] <= 0.7 and 40 * p["p"] <= p["s"] for p in seen)
    assert {type(p["s"]) for p in seen} == {int}
    assert {type(p["f"]) for p in seen} == {bool}


def test_constraints_of_another_kind_are_refused() -> None:
    space = search_space(_constrained("p + q <= 0.7"))
    with pytest.raises(InputDataError, match=r"parameter constraint 'p - q <= 0', the federation"):
        AxFederation(FTS(budget=4, every=1), {"a": _constrained("p <= q")}, space=space, seed=0)
    stricter = replace(space, constraints=("p + q <= 0.7", "p == q"))
    AxFederation(
        FTS(budget=4, every=1), {"a": _constrained("q + p <= 0.7")}, space=stricter, seed=0
    )


def test_choices_are_as_ax_has_them() -> None:
    word = ChoiceParameterConfig(
        name="w", values=["c", "a", "b"], parameter_type="str", is_ordered=True
    )
    space = search_space(_constrained(parameters=(*UNIT, SIZE, FLAG, CHOICE, word)))
    kinds = {p.name: (p.kind, p.values) for p in space.parameters if p.values}
    assert kinds == {
        "s": ("ordinal", (10, 30, 50)),
        "f": ("ordinal", (False, True)),
        "c": ("choice", (1, 2, 3)),
        "w": ("ordinal", ("c", "a", "b")),
    }


def test_a_draw_inside_ax_keeps_constraints(context: tuple[Context, Client]) -> None:
    client = _constrained("p + q <= 0.7", "q >= p", parameters=UNIT)
    space = search_space(client)
    contexts["default"] = Context(default_feature_map(space, num_features=30), space.outcome)
    spec = modular_spec(ContextBasisGP, ContextThompsonSampling)
    optimizer = {"num_restarts": 2, "raw_samples": 64}
    spec.generator_gen_kwargs["model_gen_options"] = {"optimizer_kwargs": optimizer}
    client.set_generation_strategy(_strategy(GenerationNode(name="F", generator_specs=[spec])))
    for _ in range(5):
        (index, point), *_ = client.get_next_trials(max_trials=1).items()
        assert point["p"] + point["q"] <= 0.7 + 1e-9  # type: ignore[operator]
        assert point["q"] >= point["p"] - 1e-9  # type: ignore[operator]
        client.complete_trial(index, raw_data={"y": float(point["p"]) + float(point["q"])})


# ------------------------------------------------------------------ door A: where sites begin


def _first(study: Any, **options: Any) -> list[Point]:
    """The first points of both sites."""
    clients = {name: _client(LINEAR, LOG) for name in ("a", "b")}
    AxFederation(study, clients, seed=0, **options)
    return [dict(p) for c in clients.values() for p in c.get_next_trials(max_trials=1).values()]


def test_sites_begin_in_the_centre_as_ax_does() -> None:
    alone = _client(LINEAR, LOG)
    (centre,) = alone.get_next_trials(max_trials=1).values()
    for study in (FTS(budget=6, every=1), FedGP(budget=6, channel="plain")):
        assert all(point == pytest.approx(dict(centre)) for point in _first(study))
        dealt = _first(study, initialize_with_center=False)
        assert dealt[0] != pytest.approx(dict(centre))


def test_a_study_that_says_where_to_begin_is_obeyed() -> None:
    default = {"x": 4.0, "z": 0.02}
    assert all(p == pytest.approx(default) for p in _first(FTS(budget=6, every=1, default=default)))
    design = torch.tensor([[0.1, 0.2], [0.9, 0.8]], dtype=torch.float64)
    first = _first(FTS(budget=6, every=1, initial_design=design))[0]
    assert first["x"] == pytest.approx(
        LINEAR.bounds[0] + 0.1 * (LINEAR.bounds[1] - LINEAR.bounds[0])
    )
    _first(FTS(budget=6, every=1, strategy=Strategy()))  # a published search takes no default


# ------------------------------------------------------------------ door A: known noise


def test_standard_errors_of_ax_are_the_noise_of_a_site() -> None:
    clients = {name: _client(LINEAR, LOG) for name in ("a", "b")}
    federation = AxFederation(FTS(budget=5, every=1), clients, seed=0)
    by_hand = clients["a"].attach_trial({"x": 2.0, "z": 0.1})
    clients["a"].complete_trial(by_hand, raw_data={"loss": (3.0, 0.5)})
    for name, answer in (("a", (4.0, 0.25)), ("b", 4.0)):
        for index in clients[name].get_next_trials(max_trials=1):
            clients[name].complete_trial(index, raw_data={"loss": answer})
        federation.sites[name].read()
    known = federation.sites["a"].site.state.Yvar
    assert sorted(known.flatten().tolist()) == [0.0625, 0.25]
    assert federation.sites["b"].site.state.Yvar.tolist() == [[-1.0]]  # none is known
