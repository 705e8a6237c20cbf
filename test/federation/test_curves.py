"""Trials of a space with a fidelity: where they ended, and the values on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.engines.inprocess import InProcess
from botorch_fed.engines.verbs import perform_json
from botorch_fed.federation.base import Curve
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.run import make_agent, run
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Fidelity, Parameter, SearchSpace
from botorch_fed.storage.log import FileLog, Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FTS
from botorch_fed.wire.codec import encode

X = Parameter.real("x", 0.0, 1.0)
SPACE = SearchSpace((X, Parameter.integer("epochs", 1, 27)), fidelity=Fidelity("epochs"))
STUDY = FTS(budget=4, every=0, strategy=TransferSearch(listen=False))


def other(X: Tensor) -> Tensor:
    return X[:, :1]


class Desk:
    """One site by hand and one with an objective, after the hub's first request."""

    def __init__(self, log: Log | None = None, space: SearchSpace = SPACE) -> None:
        self.space, self.blobs = space, MemoryBlobs()
        self.log = Log(SITE_EVENTS) if log is None else log
        self.site = self.opened()
        agent = make_agent(STUDY, "west", space, 1, self.blobs)
        engine = InProcess([self.site, Site("west", agent, other)])
        drive(STUDY.server(space, ("east", "west")), engine, retries=0, quorum=1)

    def opened(self) -> Site:
        return Site(
            "east", make_agent(STUDY, "east", self.space, 1, self.blobs), None, log=self.log
        )


def test_a_stopped_trial_is_data_and_costs_what_it_reached() -> None:
    site = Desk().site
    (trial,) = site.ask()
    assert trial.parameters["epochs"] == 3
    told = site.tell(trial.id, curve={2: 0.4, 1: 0.2})
    assert (told.status, told.value) == ("completed", 0.4)
    assert told.parameters == {**trial.parameters, "epochs": 2}
    assert told.curve == ((1.0, 0.2),)
    assert site.state.spent == pytest.approx(2 / 27)
    assert (site.state.used, len(site.state.X), site.state.passed) == (1, 2, 1)
    assert sorted(site.state.Y.flatten().tolist()) == [0.2, 0.4]
    assert site.best() is None  # nothing at the target


def test_a_value_counts_where_the_trial_ended() -> None:
    site = Desk().site
    one, two, three = site.ask(3)
    assert site.tell(one.id, 0.5).parameters["epochs"] == 3
    assert site.tell(two.id, 0.6, fidelity=1).parameters["epochs"] == 1
    told = site.tell(three.id, 0.7, 0.1, fidelity=27, curve={9: 0.3})
    assert (told.value, told.sem, told.curve) == (0.7, 0.1, ((9.0, 0.3),))
    assert site.best() == told
    assert site.state.spent == pytest.approx((3 + 1 + 27) / 27)
    assert site.trials() == [site.trials()[k] for k in (one.id, two.id, three.id)]


def test_a_site_that_starts_again_knows_its_curves(tmp_path: Path) -> None:
    desk = Desk(FileLog(tmp_path / "site", SITE_EVENTS))
    for trial in desk.site.ask(2):
        desk.site.tell(trial.id, curve={1: 0.2, 3: 0.1 * trial.id})
    desk.site.attach({"x": 0.5, "epochs": 9}, 0.9)
    before = desk.site.trials(), encode(desk.site.state), desk.site.observations()
    desk.site.close()
    desk.log = FileLog(tmp_path / "site", SITE_EVENTS)
    again = desk.opened()
    assert (again.trials(), encode(again.state)) == before[:2]
    assert [o.curve for o in again.observations()] == [o.curve for o in before[2]]
    again.close()


def test_trials_are_asked_as_long_as_the_budget_has_room() -> None:
    site = Desk().site
    spent = 0.0
    while trials := site.ask():
        (trial,) = trials
        spent += float(trial.parameters["epochs"]) / 27
        site.tell(trial.id, float(trial.parameters["x"]))
    assert 4 - 1 / 27 < spent <= 4 + 1e-9
    assert site.left == 0
    assert site.state.spent == pytest.approx(spent)


def test_pending_trials_are_paid_for() -> None:
    site = Desk().site
    trials = site.ask(200)
    assert len({tuple(trial.parameters.items()) for trial in trials}) == len(trials)
    assert sum(float(trial.parameters["epochs"]) for trial in trials) / 27 <= 4 + 1e-9


def test_the_verbs_take_curves() -> None:
    site = Desk().site
    (trial,) = site.ask()

    def answer(**fields: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            perform_json(site, json.dumps({"verb": "tell", "id": trial.id, **fields}).encode())
        )
        return found

    assert "list of pairs" in answer(curve=[1, 2])["error"]
    assert "Expected a value, or a curve" in answer()["error"]
    (told,) = answer(curve=[[1, 0.5], [3, 0.7]])["trials"]
    assert (told["value"], told["curve"]) == (0.7, [[1.0, 0.5]])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s, i: s.tell(i), "Expected a value, or a curve"),
        (lambda s, i: s.tell(i, curve={}), "got none"),
        (lambda s, i: s.tell(i, curve=[1, 2]), "mapping from fidelity to outcome, got list"),
        (lambda s, i: s.tell(i, curve={28: 1.0}), "must lie in .1, 27., got 28"),
        (lambda s, i: s.tell(i, curve={"one": 1.0}), "must be a number, got 'one'"),
        (lambda s, i: s.tell(i, curve={1: float("nan")}), "Expected a finite value"),
        (lambda s, i: s.tell(i, curve={1: 2.0}, fidelity=3), "does not end at fidelity 3"),
        (lambda s, i: s.tell(i, 1.0, fidelity=0.5), "must lie in|must be an integer"),
        (lambda s, i: s.tell(i, fidelity=3), "got none"),
        (lambda s, i: s.tell(99, curve={1: 2.0}), "there is no trial 99"),
    ],
)
def test_wrong_answers_are_refused(call: Callable[[Site, int], Any], match: str) -> None:
    site = Desk().site
    (trial,) = site.ask()
    before = len(site.log)
    with pytest.raises(InputDataError, match=match):
        call(site, trial.id)
    assert len(site.log) == before
    assert [t.id for t in site.pending()] == [trial.id]


def test_a_space_without_a_fidelity_has_one_value() -> None:
    site = Desk(space=SearchSpace((X,))).site
    (trial,) = site.ask()
    for options in ({"curve": {1: 0.5}}, {"fidelity": 3}):
        with pytest.raises(InputDataError, match="names no fidelity"):
            site.tell(trial.id, 0.5, **options)


def test_a_curve_that_an_objective_returns_is_recorded() -> None:
    def stopped(X: Tensor) -> Curve:
        (point,) = SPACE.from_unit(X)
        last = min(int(point["epochs"]), 9) if point["x"] < 0.5 else int(point["epochs"])
        return Curve({s: float(point["x"]) * s for s in {1, last}})

    result = run(STUDY, {"a": stopped, "b": stopped}, seed=0, space=SPACE, progress=False)
    for row in result.records:
        (point,) = SPACE.from_unit(torch.tensor([row["x"]]))
        assert point["epochs"] <= 9 or point["x"] >= 0.5
        if point["epochs"] > 1:
            assert row["curve"][0][1] == pytest.approx(point["x"])
