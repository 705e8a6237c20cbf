"""Trials to and from real Optuna studies and Ax experiments."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import Trial
from botorch_fed.interchange import (
    as_data,
    from_ax,
    from_optuna,
    load_trials,
    save_trials,
    to_ax,
    to_optuna,
)
from botorch_fed.run import make_agent, run
from botorch_fed.space import Fidelity, Outcome, Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FTS

# Ax 1.3.1 calls what it, or pandas, has deprecated: not ours to mend.
pytestmark = [
    pytest.mark.filterwarnings("ignore:add_tracking_metric is deprecated"),
    pytest.mark.filterwarnings("ignore:The 'future.infer_string' option is deprecated"),
    pytest.mark.filterwarnings("ignore:The .* keywords? in DataFrame"),
    pytest.mark.filterwarnings("ignore:Passing `metric` to OutcomeConstraint is deprecated"),
    pytest.mark.filterwarnings("ignore:ObjectiveThreshold is deprecated"),
]

MIXED = SearchSpace(
    (
        Parameter.real("rate", 1e-4, 1.0, scale="log"),
        Parameter.real("share", 0.0, 1.0),
        Parameter.integer("depth", 1, 8),
        Parameter.integer("width", 4, 256, scale="log"),
        Parameter.choice("kind", ["relu", "tanh", "none"]),
        Parameter.choice("batch", [16, 32, 64], scale="log"),
        Parameter.choice("warm", [False, True]),
        Parameter.fixed("folds", 5),
    ),
    constraints=("depth + 8 * share <= 12",),
    outcomes=(
        Outcome.objective("error", minimize=True),
        Outcome.constraint("latency", lower=0.5, upper=20.0),
        Outcome.tracking("energy"),
    ),
)
POINT = {
    "rate": 1e-2,
    "share": 0.25,
    "depth": 3,
    "width": 32,
    "kind": "tanh",
    "batch": 32,
    "warm": True,
    "folds": 5,
}


def measured(number: int, error: float, latency: float, **changes: Any) -> Trial:
    """A completed trial of the mixed space."""
    values = {"error": error, "latency": latency, "energy": 7.0}
    return Trial(number, {**POINT, **changes}, "completed", error, values=values)


TRIALS = (
    measured(0, 0.5, 12.0),
    measured(1, 0.1, 25.0, rate=1e-4, depth=8, kind="none", warm=False),  # the best one, too slow
    replace(
        measured(2, 0.25, 20.0, width=256, batch=64),
        sem=0.01,
        sems={"error": 0.01, "latency": 0.5, "energy": 0.0},
    ),
    Trial(3, {**POINT, "rate": 1.0}, "failed", reason="out of memory"),
    Trial(4, {**POINT, "share": 1.0, "depth": 1}),
)


def plain(trials: Sequence[Trial]) -> list[Trial]:
    """Trials as they are without what no other program knows: rounds and labels."""
    return [replace(trial, round=0, label="") for trial in trials]


def bowl(x: float, kind: str) -> float:
    return (x - 0.3) ** 2 + (0.5 if kind == "b" else 0.0)


SMALL = SearchSpace(
    (Parameter.real("x", 0.0, 1.0), Parameter.choice("kind", ["a", "b"])), Outcome(minimize=True)
)


def a_run(**settings: Any) -> Any:
    """A run of two sites in the small space, of which one point in four fails."""

    def objective(X: torch.Tensor) -> torch.Tensor:
        (point,) = SMALL.from_unit(X)
        if point["x"] > 0.75:
            raise ValueError("too far")
        return torch.tensor([[bowl(**point)]], dtype=torch.float64)

    study = FTS(budget=5, **settings)
    return run(study, dict.fromkeys(("ann", "bob"), objective), space=SMALL, seed=0, progress=False)


# ------------------------------------------------------------------ data of a study


def test_trials_become_data_of_a_study_and_keep_their_order() -> None:
    X, Y = as_data(TRIALS, MIXED)
    assert X.shape == (3, MIXED.dim)
    for point, trial in zip(MIXED.from_unit(X), TRIALS, strict=False):
        assert point == {**trial.parameters, "rate": pytest.approx(trial.parameters["rate"])}
    assert Y.tolist() == [[0.5, 12.0, 7.0], [0.1, 25.0, 7.0], [0.25, 20.0, 7.0]]


def test_trials_of_a_run_are_those_of_its_table() -> None:
    before = as_data([Trial(0, {"x": 0.5, "kind": "b"}, values={"objective": 0.54})], SMALL)
    result = a_run(data={"ann": before})
    trials = result.trials("ann")
    table = result.to_dataframe().query("site == 'ann'")
    assert [trial.id for trial in trials] == [-1, *range(len(trials) - 1)]
    assert trials[0].status == "attached"
    assert [trial.parameters["x"] for trial in trials] == table["x"].tolist()
    assert [trial.value for trial in trials if trial.values] == table["value"].dropna().tolist()
    everybody = [*trials, *result.trials("bob")]
    assert {t.reason for t in everybody if t.status == "failed"} == {"ValueError: too far"}
    again = as_data(trials, SMALL)
    for one, other in zip(again, result.history("ann", given=True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parameters": {**POINT, "rate": 2.0}}, r"Trial 0: Parameter 'rate' must lie in"),
        ({"parameters": {"rate": 0.1}}, r"Trial 0: A point must name exactly"),
        ({"values": {"error": 1.0}}, r"Trial 0 has no value of 'latency', but of \['error'\]"),
        ({"curve": ((1.0, 0.5),)}, r"Trial 0 has a curve, the space no fidelity"),
    ],
)
def test_what_is_no_data_of_the_space_is_named(change: Any, says: str) -> None:
    with pytest.raises(InputDataError, match=says):
        as_data([replace(TRIALS[0], **change)], MIXED)


# ------------------------------------------------------------------ Optuna


@pytest.fixture
def storage(tmp_path: Path) -> str:
    """An empty storage of Optuna on disk."""
    optuna = pytest.importorskip("optuna", reason="needs botorch_fed[optuna]")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return f"sqlite:///{tmp_path / 'optuna.db'}"


def test_an_optuna_study_has_all_of_a_site_and_gives_it_back(storage: str) -> None:
    import optuna

    to_optuna(TRIALS, MIXED, study_name="north", storage=storage)
    study = optuna.load_study(study_name="north", storage=storage)
    assert [direction.name for direction in study.directions] == ["MINIMIZE"]
    assert [trial.state.name for trial in study.trials] == [
        *["COMPLETE"] * 3,
        "FAIL",
        "RUNNING",
    ]
    assert study.user_attrs["constraints"] == list(MIXED.constraint_words)
    history = from_optuna(study, MIXED)
    assert plain(history) == list(TRIALS)
    assert [trial.label for trial in history] == [f"north/{number}" for number in range(5)]


def test_optuna_knows_which_trials_meet_the_bounds_and_goes_on(storage: str) -> None:
    import optuna

    study = to_optuna(TRIALS, MIXED, storage=storage)
    assert study.best_trial.number == 2
    trial = study.ask()
    rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
    study.tell(trial, rate)
    assert study.trials[-1].state == optuna.trial.TrialState.COMPLETE
    assert study.trials[0].distributions["rate"] == study.trials[-1].distributions["rate"]


def test_a_finished_run_in_optuna_has_the_same_best_point(storage: str) -> None:
    result = a_run()
    for site in result.names:
        study = to_optuna(result.trials(site), SMALL, study_name=site, storage=storage)
        assert study.best_params == result.best_parameters(site)
        assert study.best_value == min(result.history(site)[1]).item()


def test_a_finished_optuna_study_is_the_history_of_a_site(storage: str) -> None:
    import optuna

    def objective(trial: Any) -> float:
        x, kind = trial.suggest_float("x", 0.0, 1.0), trial.suggest_categorical("kind", ["a", "b"])
        if x > 0.75:
            raise ValueError("too far")
        trial.set_user_attr("sem", 0.1)
        return bowl(x, kind)

    study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=8, catch=ValueError)
    study.enqueue_trial({"x": 0.5, "kind": "a"})
    history = from_optuna(study, SMALL)
    done = [trial for trial in study.trials if trial.value is not None]
    assert 0 < len(done) < 8
    assert [trial.value for trial in history if trial.values] == [trial.value for trial in done]
    assert history[-1].status == "open"
    assert history[-1].parameters == {"x": 0.5, "kind": "a"}

    result = a_run(data={"ann": as_data(history, SMALL)})
    assert [row["y"] for row in result.given] == [trial.value for trial in done]

    site = Site("ann", make_agent(FTS(budget=5), "ann", SMALL, 0, MemoryBlobs()), None)
    for _ in range(2):  # a label is attached once
        for trial in history:
            if trial.values:
                site.attach(trial.parameters, trial.values, trial.sems, label=trial.label)
    assert [trial.value for trial in site.trials()] == [trial.value for trial in done]
    assert {trial.sem for trial in site.trials()} == {0.1}
    best = site.best()
    assert best is not None
    assert best.value == study.best_value


FRONT = SearchSpace(
    (Parameter.real("x", 0.0, 1.0),),
    outcomes=(
        Outcome.objective("error", minimize=True, reference=1.5),
        Outcome.objective("speed"),
        Outcome.constraint("size", lower=2.0),
    ),
)


def _front(*rows: tuple[float, float, float]) -> list[Trial]:
    return [
        Trial(
            number,
            {"x": 0.1 * number},
            "completed",
            values={"error": error, "speed": speed, "size": size},
        )
        for number, (error, speed, size) in enumerate(rows)
    ]


def test_two_objectives_keep_their_directions_and_the_front_its_trials(storage: str) -> None:
    trials = _front((0.1, 5.0, 3.0), (0.2, 9.0, 3.0), (0.3, 8.0, 3.0), (0.0, 9.5, 1.0))
    study = to_optuna(trials, FRONT, storage=storage)
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert [trial.number for trial in study.best_trials] == [0, 1]
    assert plain(from_optuna(study, FRONT)) == trials
    turned = replace(FRONT, outcome=Outcome(), outcomes=tuple(reversed(FRONT.outcomes)))
    names = [trial.values for trial in from_optuna(study, turned)]  # by name, in any order
    assert names == [trial.values for trial in trials]


def test_a_pruned_trial_is_an_observation_at_its_last_step(storage: str) -> None:
    import optuna

    space = SearchSpace(
        (Parameter.real("x", 0.0, 1.0), Parameter.integer("epochs", 1, 9)),
        Outcome(minimize=True),
        fidelity=Fidelity("epochs"),
    )

    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", 0.0, 1.0)
        for epoch in (1, 3, 9):
            trial.report(x + 1 / epoch, epoch)
            if trial.number == 1 and epoch == 3:
                raise optuna.TrialPruned
            if trial.number == 2:
                raise optuna.TrialPruned
        return x + 1 / 9

    study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=3)
    history = from_optuna(study, space)
    xs = [trial.params["x"] for trial in study.trials]
    assert [trial.parameters["epochs"] for trial in history] == [9, 3, 1]
    assert history[0].curve == ((1.0, xs[0] + 1), (3.0, xs[0] + 1 / 3))
    X, Y = as_data(history, space)
    assert sorted(float(y) for y in Y) == sorted(
        x + 1 / epoch
        for x, ends in zip(xs, ((1, 3, 9), (1, 3), (1,)), strict=True)
        for epoch in ends
    )
    assert len(X) == 6
    # And back: the curve as steps, the fidelity as a parameter.
    assert plain(from_optuna(to_optuna(history, space), space)) == plain(history)
    # Without a fidelity the last value is that of the trial.
    last = from_optuna(study, replace(space, parameters=space.parameters[:1], fidelity=None))
    assert [trial.value for trial in last] == [trial.value for trial in history]
    with pytest.raises(InputDataError, match="fidelities that are no integers"):
        to_optuna([replace(history[0], curve=((1.5, 0.0),))], space)


def test_an_optuna_study_of_something_else_is_refused(storage: str) -> None:
    import optuna

    upwards = optuna.create_study(direction="maximize")
    with pytest.raises(InputDataError, match="maximises what the space has as 'minimise objective"):
        from_optuna(upwards, SMALL)
    with pytest.raises(InputDataError, match=r"has 1 objectives, the space \['minimise error', "):
        from_optuna(upwards, FRONT)
    study = optuna.create_study()
    study.add_trial(optuna.trial.create_trial(value=1.0))
    with pytest.raises(InputDataError, match=r"no value of 'latency'.*set_user_attr\('latency'"):
        from_optuna(study, MIXED)
    words = optuna.trial.create_trial(value=1.0, user_attrs={"latency": "slow", "energy": 1.0})
    study = optuna.create_study()
    study.add_trial(words)
    with pytest.raises(InputDataError, match="has 'slow' as its user attribute 'latency'"):
        from_optuna(study, MIXED)
    with pytest.raises(InputDataError, match=r"Trial 0: Parameter 'rate' must lie in"):
        to_optuna([replace(TRIALS[0], parameters={**POINT, "rate": 2.0})], MIXED)
    front = to_optuna(_front((0.1, 1.0, 3.0)), FRONT)
    other = (Outcome.objective("loss", minimize=True), *FRONT.outcomes[1:])
    with pytest.raises(InputDataError, match="the names must be the same"):
        from_optuna(front, replace(FRONT, outcome=Outcome(), outcomes=other))


# ------------------------------------------------------------------ Ax


@pytest.fixture
def quiet_ax() -> None:
    """Ax without its lines at every trial."""
    pytest.importorskip("ax", reason="needs botorch_fed[ax]")
    import logging

    from ax.utils.common.logger import set_ax_logger_levels

    set_ax_logger_levels(logging.ERROR)


@pytest.mark.usefixtures("quiet_ax")
def test_an_ax_experiment_has_all_of_a_site_and_gives_it_back(tmp_path: Path) -> None:
    from ax.api.client import Client

    from botorch_fed.ax_adapter import search_space

    client = to_ax(TRIALS, MIXED, name="north")
    client.save_to_json_file(str(tmp_path / "north.json"))
    client = Client.load_from_json_file(str(tmp_path / "north.json"))
    space = search_space(client)
    assert space.parameters == MIXED.parameters[:-1]  # Ax's fixed parameter is none of a space
    assert space.constraints == MIXED.constraints
    assert space.outcomes == MIXED.outcomes[:2]
    history = from_ax(client, MIXED)
    assert plain(history) == list(TRIALS)
    assert [trial.label for trial in history] == [f"north/{k}/{k}_0" for k in range(len(TRIALS))]
    parameters, values, index, _ = client.get_best_parameterization(use_model_predictions=False)
    assert index == 2
    assert parameters == TRIALS[2].parameters
    assert values["error"][0] == 0.25


@pytest.mark.usefixtures("quiet_ax")
def test_ax_goes_on_where_a_run_has_ended() -> None:
    result = a_run()
    client = to_ax(result.trials("ann"), SMALL)
    known = [trial.parameters for trial in result.trials("ann")]
    ((index, point),) = client.get_next_trials(max_trials=1).items()
    assert index == len(known)
    assert point not in known
    client.complete_trial(index, {"objective": bowl(**point)})
    history = from_ax(client, SMALL)
    assert [trial.parameters for trial in history] == [*known, point]
    before = [trial.value for trial in result.trials("ann")]
    assert [trial.value for trial in history] == [*before, bowl(**point)]


@pytest.mark.usefixtures("quiet_ax")
def test_a_finished_ax_experiment_is_the_history_of_a_site() -> None:
    from ax.api.client import Client
    from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

    client = Client(random_seed=0)
    client.configure_experiment(
        parameters=[
            RangeParameterConfig(name="x", bounds=(0.0, 1.0), parameter_type="float"),
            ChoiceParameterConfig(
                name="kind", values=["a", "b"], parameter_type="str", is_ordered=False
            ),
        ]
    )
    client.configure_optimization(objective="-loss")
    for number, x in enumerate((0.1, 0.5, 0.9, 0.7)):
        index = client.attach_trial({"x": x, "kind": "a"})
        if number == 2:
            client.mark_trial_failed(index, "too far")
        elif number == 3:
            client.mark_trial_abandoned(index)
        else:
            client.complete_trial(index, {"loss": (bowl(x, "a"), 0.1)})
    history = from_ax(client, SMALL)
    assert [trial.status for trial in history] == ["completed", "completed", "failed", "failed"]
    assert history[2].reason == "too far"
    assert [trial.sem for trial in history[:2]] == [0.1, 0.1]
    result = a_run(data={"ann": as_data(history, SMALL)})
    assert [row["y"] for row in result.given] == [bowl(0.1, "a"), bowl(0.5, "a")]


@pytest.mark.usefixtures("quiet_ax")
def test_two_objectives_keep_their_worst_values_in_ax() -> None:
    from botorch_fed.ax_adapter import search_space

    trials = _front((0.1, 5.0, 3.0), (0.2, 9.0, 3.0))
    client = to_ax(trials, FRONT)
    assert search_space(client).outcomes == FRONT.outcomes
    assert plain(from_ax(client, FRONT)) == trials


@pytest.mark.usefixtures("quiet_ax")
def test_an_ax_experiment_of_something_else_is_refused() -> None:
    client = to_ax(_front((0.1, 5.0, 3.0)), FRONT)
    turned = (Outcome.objective("error"), *FRONT.outcomes[1:])
    with pytest.raises(InputDataError, match="minimises what the space has as 'maximise error'"):
        from_ax(client, replace(FRONT, outcome=Outcome(), outcomes=turned))
    with pytest.raises(InputDataError, match=r"objectives \['error', 'speed'\], the space one"):
        from_ax(client, SMALL)
    with pytest.raises(InputDataError, match="has no metric 'energy'"):
        from_ax(client, MIXED)
    with pytest.raises(InputDataError, match=r"Trial 0: Parameter 'rate' must lie in"):
        to_ax([replace(TRIALS[0], parameters={**POINT, "rate": 2.0})], MIXED)
    with pytest.raises(InputDataError, match=r"Trial 0 violates 8 \* share \+ depth <= 12, and Ax"):
        to_ax([replace(TRIALS[0], parameters={**POINT, "depth": 8, "share": 1.0})], MIXED)
    with pytest.raises(InputDataError, match="Ax's client takes none"):
        to_ax(
            [],
            SearchSpace(
                (Parameter.real("x", 0.0, 1.0), Parameter.integer("n", 1, 9)),
                fidelity=Fidelity("n"),
            ),
        )
    with pytest.raises(InputDataError, match="has no form for"):
        to_ax([], replace(SMALL, feasible=lambda point: bool(math.isfinite(point["x"]))))


@pytest.mark.parametrize(("function", "package"), [(to_optuna, "optuna"), (to_ax, "ax")])
def test_a_missing_extra_is_named(
    function: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf"needs {package}: pip install .botorch_fed\[{package}\]"
    ):
        function([], SMALL)


# ------------------------------------------------------------------ files


def test_a_table_has_the_trials_of_all_sites_or_of_some(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    result = a_run()
    written = save_trials(result, "csv", tmp_path / "new" / "trials.csv")
    table = pandas.read_csv(tmp_path / "new" / "trials.csv")
    assert written == {"ann": 5, "bob": 5}
    assert list(table["site"]) == ["ann"] * 5 + ["bob"] * 5
    assert table["x"].tolist() == pytest.approx(result.to_dataframe()["x"].tolist())
    assert save_trials(result, "csv", tmp_path / "bob.csv", ["bob"]) == {"bob": 5}
    assert set(pandas.read_csv(tmp_path / "bob.csv")["site"]) == {"bob"}


def test_studies_of_a_storage_have_the_trials_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    result, place = a_run(), tmp_path / "optuna.db"
    written = save_trials(result, "optuna", place)
    assert written == {"ann": 5, "bob": 5}
    for source in (place, f"sqlite:///{place}"):
        again = load_trials(source, "optuna", SMALL, "bob")
        assert [replace(trial, label="") for trial in again] == plain(result.trials("bob"))
        assert [trial.label for trial in again] == [f"bob/{k}" for k in range(5)]
    with pytest.raises(InputDataError, match="has a study 'ann' already"):
        save_trials(result, "optuna", place)
    with pytest.raises(InputDataError, match=r"name of a study in .*, \['ann', 'bob'\], got none"):
        load_trials(place, "optuna", SMALL)
    with pytest.raises(InputDataError, match="got 'eve'"):
        load_trials(place, "optuna", SMALL, "eve")
    save_trials(result, "optuna", tmp_path / "one.db", ["ann"])
    assert len(load_trials(tmp_path / "one.db", "optuna", SMALL)) == 5


def test_files_of_clients_have_the_trials_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("ax")
    result = a_run()
    assert save_trials(result, "ax", tmp_path / "ax") == {"ann": 5, "bob": 5}
    again = load_trials(tmp_path / "ax" / "ann.json", "ax", SMALL)
    values = [trial.value for trial in result.trials("ann")]
    assert [trial.value for trial in again] == [
        None if value is None else pytest.approx(value, abs=1e-9) for value in values
    ]  # Ax writes ten decimals
    assert [trial.label for trial in again] == [f"ann/{k}/{k}_0" for k in range(5)]
    nameless = to_ax(TRIALS, MIXED)
    nameless.save_to_json_file(str(tmp_path / "spring.json"))
    labels = [trial.label for trial in load_trials(tmp_path / "spring.json", "ax", MIXED)]
    assert labels == [f"spring/{k}" for k in range(len(TRIALS))]


def test_what_cannot_be_exported_or_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    result = a_run()
    hub = replace(result, part="hub", records=[])
    for other, to, sites, says in (
        (hub, "csv", [], "export at the sites"),
        (replace(result, records=[]), "csv", [], "no answered trial yet"),
        (result, "excel", [], "Expected to='csv', 'optuna' or 'ax', got 'excel'"),
        (result, "csv", ["eve"], r"Expected an agent of \['ann', 'bob'\], got 'eve'"),
        (result, "optuna", [], "Optuna cannot open nosql://here"),
    ):
        with pytest.raises(InputDataError, match=says):
            save_trials(other, to, "nosql://here" if to == "optuna" else tmp_path / "x", sites)
    (tmp_path / "damaged").write_text("{" * 5000)
    for source, kind, says in (
        ("nowhere.db", "optuna", "There is no file nowhere.db"),
        (tmp_path / "damaged", "optuna", "Optuna cannot open sqlite:"),
        (tmp_path / "damaged", "tune", "Expected kind='optuna' or 'ax', got 'tune'"),
    ):
        with pytest.raises(InputDataError, match=says):
            load_trials(source, kind, SMALL)
    pytest.importorskip("ax")
    with pytest.raises(InputDataError, match="Ax cannot open"):
        load_trials(tmp_path / "damaged", "ax", SMALL)
