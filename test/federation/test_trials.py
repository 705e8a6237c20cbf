"""The trial service: whoever evaluates asks for trials and answers them, whenever."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.engines.inprocess import InProcess, refusal_code
from botorch_fed.engines.site_process import Background
from botorch_fed.engines.verbs import perform, perform_json
from botorch_fed.errors import ObjectiveError, ProtocolError
from botorch_fed.federation.base import Exchanged, Outgoing, Pending, Reply
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.run import make_agent, run
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.log import FileLog, Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE, FTS, Federation, FedGP
from botorch_fed.wire.codec import decode, encode
from test.federation.search import Best, BoxAgent
from test.federation.test_site import Home, bowl, code

OVEN = SearchSpace(
    (Parameter.real("heat", 50.0, 250.0), Parameter.integer("minutes", 5, 60)),
    Outcome(name="yield"),
)
PLANE = SearchSpace((Parameter.real("x", 0.0, 1.0), Parameter.real("y", 0.0, 1.0)))
NAMES = ("north", "south")


def by_hand(home: Home, **options: Any) -> Site:
    return home.site(BoxAgent(seed=1, per_round=2, defers=True, **options), "none")


def asked(home: Home, site: Site, serial: int = 1) -> Site:
    """A site that a request waits at."""
    assert refusal_code(site.respond(home.request(serial))) == "busy"
    return site


def test_trials_are_asked_told_and_the_reply_is_made() -> None:
    home = Home()
    site = asked(home, by_hand(home))
    (first,), (second,) = site.ask(), site.ask()
    assert (first.id, second.id, first.status) == (0, 1, "open")
    assert set(first.parameters) == {"x0", "x1"}
    assert first.parameters != second.parameters
    assert site.ask() == []  # two evaluations in a round
    assert [trial.id for trial in site.pending()] == [0, 1]
    done = site.tell(1, 0.5, sem=0.1)
    assert (done.status, done.value, done.sem) == ("completed", 0.5, 0.1)
    assert code(site.respond(home.request(1))) == "busy"
    site.tell(0, {"objective": 0.25})
    reply = decode(site.respond(home.request(1)), Reply)
    assert decode(reply.body, Best).value == 0.5
    assert not reply.open
    best = site.best()
    assert best is not None
    assert (best.id, best.value) == (1, 0.5)
    assert [trial.status for trial in site.trials()] == ["completed", "completed"]


class Unerring(BoxAgent):
    """An agent that takes no standard errors."""

    def tell(self, state: Any, X: Tensor, Y: Tensor) -> Any:  # type: ignore[override]
        return super().tell(state, X, Y)

    def attach(self, state: Any, X: Tensor, Y: Tensor) -> Any:  # type: ignore[override]
        return super().attach(state, X, Y)


def test_standard_errors_are_refused_where_the_agent_takes_none() -> None:
    home = Home()
    site = asked(home, home.site(Unerring(seed=1, per_round=1, defers=True), "none"))
    site.ask()
    before = home.log.head
    with pytest.raises(InputDataError, match=r"Expected no sem, got 0\.1: Unerring\.tell takes no"):
        site.tell(0, 0.5, sem=0.1)
    with pytest.raises(
        InputDataError, match=r"Expected no sem, got 0\.2: Unerring\.attach takes no"
    ):
        site.attach({"x0": 0.2, "x1": 0.3}, 1.0, sem=0.2)
    assert home.log.head == before
    site.attach({"x0": 0.2, "x1": 0.3}, 0.25)
    site.tell(0, 0.5)
    assert decode(decode(site.respond(home.request(1)), Reply).body, Best).value == 0.5


def test_nothing_is_asked_before_the_hub_has_begun() -> None:
    with pytest.raises(ProtocolError, match="no request from the hub yet"):
        by_hand(Home()).ask()


def test_a_request_can_be_answered_with_what_there_is() -> None:
    home = Home()
    site = asked(home, by_hand(home))
    site.ask(2)
    site.tell(0, 0.125)
    reply = decode(site.respond(home.request(1), defer=True), Reply)
    assert reply.open
    assert decode(reply.body, Best).value == 0.125
    site.tell(1, 7.0)  # later: the reply that was made stays what it was
    again = decode(site.respond(home.request(1)), Reply)
    assert again == reply
    asked(home, site, 2)
    assert torch.equal(site.state.Y, torch.tensor([[0.125], [7.0]]).double())


def test_an_open_trial_outlives_rounds_and_restarts(tmp_path: Path) -> None:
    home = Home()

    def opened() -> Site:
        agent = BoxAgent(seed=1, per_round=1, defers=True, blobs=home.blobs)
        return Site("a", agent, None, log=FileLog(tmp_path / "site", SITE_EVENTS))

    with opened() as site:
        site.respond(home.request(1), defer=True)
        (trial,) = site.ask()
    for serial in (2, 3):
        with opened() as site:
            assert decode(site.respond(home.request(serial), defer=True), Reply).open
            assert site.pending() == [trial]
            assert site.ask() == []  # one at a time in this search
    with opened() as site:
        site.tell(trial.id, 0.5)
        assert site.pending() == []
        site.respond(home.request(4), defer=True)
    with opened() as site:
        assert [seen.value for seen in site.trials()] == [0.5]
        assert site.state.Y.tolist() == [[0.5]]


def test_a_failed_trial_is_recorded_and_the_search_goes_on() -> None:
    home = Home()
    site = asked(home, by_hand(home))
    site.ask(2)
    failed = site.fail(0, "the sample\nwas lost" + "x" * 1000)
    assert failed.status == "failed"
    assert failed.reason.startswith("the samplewas lost")
    assert len(failed.reason) <= 500
    site.tell(1, 0.5)
    reply = decode(site.respond(home.request(1)), Reply)
    assert decode(reply.body, Best).value == 0.5
    assert len(site.state.Y) == 1
    assert site.best() == site.trials()[1]


def test_results_that_exist_are_attached_once() -> None:
    home = Home()
    site = by_hand(home)
    trial = site.attach({"x0": 0.2, "x1": 0.4}, 0.9, label="run 7")
    assert (trial.status, trial.value, trial.label) == ("attached", 0.9, "run 7")
    assert site.attach({"x0": 0.2, "x1": 0.4}, 0.9, label="run 7") == trial
    site.attach(torch.tensor([[0.5, 0.5]]), 0.1)
    assert [seen.id for seen in site.trials()] == [0, 1]
    assert site.state.Y.tolist() == [[0.9], [0.1]]
    again = home.site(BoxAgent(seed=1, per_round=2), "none")
    assert again.state.Y.tolist() == [[0.9], [0.1]]
    assert again.best() == trial


def test_an_open_batch_counts_whole_until_it_is_told() -> None:
    home = Home()
    site = asked(home, home.site(BoxAgent(seed=1, per_round=1, q=3, defers=True), "none"))
    site.ask(3)
    site.tell(0, 1.0)
    assert site.ask() == []  # its three evaluations are all that the round has
    site.fail(1)
    site.tell(2, 1.0)
    assert len(site.state.X) == 2


class Lab(InProcess):
    """Sites without an objective, whose user does something at random whenever they are asked."""

    def __init__(self, study: Federation, seed: int) -> None:
        self.study, self.logs, self.blobs = study, [Log(SITE_EVENTS) for _ in NAMES], MemoryBlobs()
        self.coins = random.Random(seed)
        super().__init__(map(self.opened, NAMES))

    def opened(self, name: str) -> Site:
        agent = make_agent(self.study, name, PLANE, 1, self.blobs)
        return Site(name, agent, None, log=self.logs[NAMES.index(name)])

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        for name in NAMES:
            for _ in range(self.coins.randrange(7)):
                self.act(self.sites[name])
            before, self.sites[name] = self.sites[name], self.opened(name)  # a restart
            now = self.sites[name]
            assert now.trials() == before.trials()
            assert now.pending() == before.pending()
            assert encode(now.state) == encode(before.state)
        return super().__call__(outgoing)

    def act(self, site: Site) -> None:
        coin, open_trials = self.coins.random(), site.pending()
        if coin < 0.4 and site.serial:
            site.ask(self.coins.randint(1, 4))
        elif coin < 0.5:
            site.attach({"x": self.coins.random(), "y": self.coins.random()}, 0.5)
        elif open_trials:
            trial = self.coins.choice(open_trials)
            if coin < 0.65:
                site.fail(trial.id, "lost")
            else:
                site.tell(trial.id, float(trial.parameters["x"]))

    def finish(self, site: Site) -> None:
        while open_trials := site.pending() or site.ask(2):
            for trial in open_trials:
                site.tell(trial.id, 0.5)


@pytest.mark.parametrize(
    "made",
    [
        FTS(budget=5, q=2),
        FedGP(budget=6, channel="plain"),
        FedGP(budget=6, channel="threshold"),
        DPFTSDE(budget=6, noise_kind="none", num_initial=3, releases="all"),
    ],
    ids=["queries-of-two", "sums", "joint-key", "initial-points"],
)
@pytest.mark.parametrize("seed", [2, 3])
def test_whatever_a_user_does_the_budget_is_met(made: Federation, seed: int) -> None:
    lab = Lab(made, seed)
    drive(made.server(PLANE, NAMES), lab)
    for site in lab.sites.values():
        lab.finish(site)
        trials = [trial for trial in site.trials() if trial.status != "attached"]
        assert len(trials) == made.budget == site.state.used
        points = {tuple(trial.parameters.values()) for trial in trials}
        assert len(points) == len(trials)


@pytest.mark.parametrize("slow", [(1, 2), (1, 2, 3)])
def test_first_points_that_are_late_are_not_counted_as_later_ones(slow: tuple[int, ...]) -> None:
    made, now = FedGP(budget=8, channel="plain"), [0]

    def objective(X: Tensor) -> Any:
        return Pending() if now[0] in slow else bowl(X)

    agents = [make_agent(made, name, PLANE, 1, MemoryBlobs()) for name in NAMES]
    calls = (objective, bowl)
    sites = [Site(n, a, call) for n, a, call in zip(NAMES, agents, calls, strict=True)]
    engine = InProcess(sites)

    def exchange(outgoing: Outgoing) -> Exchanged:
        now[0] = outgoing.serial
        return engine(outgoing)

    drive(made.server(PLANE, NAMES), exchange)
    missed = len(slow) - 1  # of a round without a value nothing is made up for
    assert [len(site.trials()) for site in sites] == [8 - missed, 8]
    assert [site.left for site in sites] == [missed, 0]  # which may still be asked for by hand


def test_points_that_were_evaluated_ahead_are_first_points_too() -> None:
    made = FedGP(budget=6, channel="threshold")
    sites = [Site(name, make_agent(made, name, PLANE, 1, MemoryBlobs()), bowl) for name in NAMES]
    engine = InProcess(sites)
    ahead = []

    def exchange(outgoing: Outgoing) -> Exchanged:
        if outgoing.serial == 2:  # while the key is made, before the first points are asked for
            ahead.extend(sites[0].ask())
            sites[0].tell(ahead[0].id, 0.5)
        return engine(outgoing)

    drive(made.server(PLANE, NAMES), exchange)
    assert [len(site.trials()) for site in sites] == [6, 6]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s: s.ask(0), "Expected n >= 1"),
        (lambda s: s.ask("2"), "Expected n as a whole number, got '2'"),
        (lambda s: s.ask(1.5), "Expected n as a whole number"),
        (lambda s: s.tell(0.0, 1.0), "Expected id as a whole number"),
        (lambda s: s.fail([0]), "Expected id as a whole number"),
        (lambda s: s.take(True), "Expected id as a whole number"),
        (lambda s: s.tell(0, "0.5"), "as a number or as .*got str"),
        (lambda s: s.tell(0, True), "got bool"),
        (lambda s: s.tell(0, np.complex128(1 + 2j)), "got complex"),
        (lambda s: s.tell(0, torch.tensor(1 + 2j)), "got complex"),
        (lambda s: s.tell(0, torch.tensor([1.0, 2.0])), "got Tensor"),
        (lambda s: s.tell(0, 10**400), "finite value up to"),
        (lambda s: s.attach({"x0": 0.2, "x1": 0.3}, 1.0, sem=-1.0), "sem >= 0"),
        (lambda s: s.attach({"x0": None, "x1": 0.3}, 1.0), "a value for each of the parameters"),
        (lambda s: s.attach([0.2, 0.3], 1.0), "named parameters, or a tensor `1 x 2`"),
        (lambda s: s.attach(torch.tensor([[0.2 + 1j, 0.3]]), 1.0), "complex64"),
        (lambda s: s.attach({"x0": 0.2, "x1": 0.3}, 1.0, label=7), "printable characters"),
        (lambda s: s.attach({"x0": 0.2, "x1": 0.3}, 1.0, label="a\ud800"), "printable"),
        (lambda s: s.tell(9, 1.0), "there is no trial 9; open trials are \\[0, 1\\]"),
        (lambda s: s.tell(0, float("nan")), "answered by `fail`"),
        (lambda s: s.tell(0, "good"), "as a number or as"),
        (lambda s: s.tell(0, {"loss": 1.0}), "one outcome 'objective', got \\['loss'\\]"),
        (lambda s: s.tell(0, 1.0, sem=-1.0), "sem >= 0"),
        (lambda s: s.attach({"x0": 0.2}, 1.0), "x1"),
        (lambda s: s.attach(torch.tensor([[0.2, 1.5]]), 1.0), "unit cube"),
    ],
)
def test_mistakes_change_nothing(call: Any, match: str) -> None:
    home = Home()
    site = asked(home, by_hand(home))
    site.ask(2)
    before = home.log.head
    with pytest.raises(InputDataError, match=match):
        call(site)
    assert home.log.head == before


def test_numbers_of_other_libraries_are_numbers() -> None:
    home = Home()
    site = asked(home, by_hand(home))
    site.ask(np.int64(2))
    assert site.tell(np.int64(0), np.float32(0.5)).value == 0.5
    assert site.tell(1, torch.tensor([[0.25]], requires_grad=True)).value == 0.25
    with pytest.raises(InputDataError, match="trial 1 is completed already"):
        site.take(1)


def test_several_threads_share_a_site() -> None:
    home = Home()
    site = asked(home, home.site(BoxAgent(seed=1, per_round=40, defers=True), "none"))
    got: list[int] = []

    def work() -> None:
        while trials := site.ask(2):
            site.attach({"x0": 0.1, "x1": 0.2}, 1.0, label="known")
            for trial in trials:
                got.append(trial.id)
                site.tell(trial.id, 0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(set(got)) == 40
    assert [trial.status for trial in site.trials()].count("attached") == 1


def test_an_answer_is_given_once() -> None:
    home = Home()
    site = asked(home, by_hand(home))
    site.ask(2)
    site.tell(0, 1.0)
    with pytest.raises(InputDataError, match="trial 0 is completed already"):
        site.tell(0, 2.0)
    with pytest.raises(InputDataError, match="trial 0 is completed already"):
        site.fail(0)


# ------------------------------------------------------------------ objectives that fail


def test_an_objective_that_raises_is_a_failed_evaluation() -> None:
    def fragile(X: Tensor) -> Tensor:
        if float(X[0, 0]) > 0.5:
            raise OSError("the oven is on fire")
        return bowl(X)

    home = Home()
    site = home.site(BoxAgent(seed=1, per_round=8), fragile)
    decode(site.respond(home.request(1)), Reply)
    seen = site.trials()
    failed = [trial for trial in seen if trial.status == "failed"]
    assert 0 < len(failed) < len(seen) == 8
    assert all(float(trial.parameters["x0"]) > 0.5 for trial in failed)
    assert {trial.reason for trial in failed} == {"OSError: the oven is on fire"}
    assert len(site.state.Y) == 8 - len(failed)


class AtOnce:
    """An objective that takes the points of a batch together."""

    in_batches = True

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, X: Tensor) -> Tensor:
        return self.function(X)


@pytest.mark.parametrize("made", [AtOnce, lambda function: function], ids=["at once", "plain"])
def test_one_failure_in_a_batch_leaves_the_others_their_values(made: Any) -> None:
    sizes: list[int] = []

    def fragile(X: Tensor) -> Tensor:
        sizes.append(len(X))
        if bool((X[:, 0] > 0.5).any()):
            raise ValueError("too hot")
        return bowl(X)

    home = Home()
    site = home.site(BoxAgent(seed=1, per_round=1, q=6), made(fragile))
    decode(site.respond(home.request(1)), Reply)
    status = [trial.status for trial in site.trials()]
    hot = [float(trial.parameters["x0"]) > 0.5 for trial in site.trials()]
    assert status == ["failed" if is_hot else "completed" for is_hot in hot]
    assert {"failed", "completed"} == set(status)
    assert sizes == [6] * (made is AtOnce) + [1] * 6


def until_replied(home: Home, site: Site) -> Site:
    """A site whose objective works in the background, after its reply."""
    end = time.monotonic() + 20
    while refusal_code(site.respond(home.request(1))) == "busy":
        assert time.monotonic() < end
        time.sleep(0.005)
    return site


def test_one_failure_in_a_batch_in_the_background_is_one_failure() -> None:
    sizes: list[int] = []

    def fragile(X: Tensor) -> Tensor:
        sizes.append(len(X))
        if bool((X[:, 0] > 0.5).any()):
            raise ValueError("too hot")
        return bowl(X)

    home = Home()
    site = home.site(BoxAgent(seed=1, per_round=1, q=4), Background(AtOnce(fragile), patience=0.0))
    status = [trial.status for trial in until_replied(home, site).trials()]
    assert {"failed", "completed"} == set(status)
    assert sizes == [4, 1, 1, 1, 1]


def test_a_trial_that_is_being_evaluated_is_not_handed_out() -> None:
    go_on, sizes = threading.Event(), []

    def slow(X: Tensor) -> Tensor:
        sizes.append(len(X))
        assert go_on.wait(20)
        return bowl(X)

    home = Home()
    site = home.site(BoxAgent(seed=1, per_round=1, q=3), Background(AtOnce(slow), patience=0.0))
    assert code(site.respond(home.request(1))) == "busy"
    assert site.ask(2) == []
    site.tell(1, 0.75)  # who knows better may answer
    assert code(site.respond(home.request(1))) == "busy"
    go_on.set()
    until_replied(home, site)
    assert sizes == [3]
    assert site.trials()[1].value == 0.75
    assert [trial.status for trial in site.trials()] == ["completed"] * 3


def test_an_objective_that_loses_a_value_once_goes_on() -> None:
    calls = [0]

    def forgetful(X: Tensor) -> Any:
        calls[0] += 1
        return None if calls[0] == 3 else bowl(X)

    home = Home()
    site = home.site(BoxAgent(seed=1, per_round=5), forgetful)
    decode(site.respond(home.request(1)), Reply)
    status = [trial.status for trial in site.trials()]
    assert status == ["completed", "completed", "failed", "completed", "completed"]
    assert "must return a tensor" in site.trials()[2].reason
    home = Home()
    with pytest.raises(ProtocolError, match="must return a tensor"):  # one that never works
        home.site(BoxAgent(seed=1), lambda X: None).respond(home.request(1))


def test_an_agent_that_is_not_ready_has_no_trials() -> None:
    home = Home()
    site = home.site(BoxAgent(seed=1, busy_rounds=(1,)), "none")
    asked(home, site)
    assert site.ask() == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
def test_a_value_that_is_none_is_a_failure(value: float) -> None:
    home = Home()
    site = home.site(
        BoxAgent(seed=1, per_round=1, q=2),
        AtOnce(lambda X: torch.tensor([[1.0], [value]]).double()),
    )
    decode(site.respond(home.request(1)), Reply)
    assert [trial.status for trial in site.trials()] == ["completed", "failed"]
    assert "NaN, infinite or beyond" in site.trials()[1].reason


def test_an_objective_that_never_works_stops_the_site_and_can_be_mended() -> None:
    mended = [False]

    def broken(X: Tensor) -> Tensor:
        if not mended[0]:
            raise NameError("name 'trian' is not defined")
        return bowl(X)

    home = Home()
    site = home.site(BoxAgent(seed=1, per_round=5), broken)
    with pytest.raises(ObjectiveError, match=r"first 3 points.*NameError.*trian"):
        site.respond(home.request(1))
    point = site.pending()[0]
    mended[0] = True
    site = home.site(BoxAgent(seed=1, per_round=5), broken)
    decode(site.respond(home.request(1)), Reply)
    assert [trial.status for trial in site.trials()] == ["failed"] * 2 + ["completed"] * 3
    assert site.trials()[2].parameters == point.parameters


def test_points_may_fail_longer_than_programs() -> None:
    def unlucky(X: Tensor) -> Tensor:
        raise FloatingPointError("it diverges")

    home = Home()
    site = home.site(BoxAgent(seed=1, per_round=20), unlucky)
    with pytest.raises(ObjectiveError, match=r"first 10 points.*diverges.*return a poor value"):
        site.respond(home.request(1))
    assert [trial.status for trial in site.trials()][:9] == ["failed"] * 9


def test_a_run_goes_on_through_failures_and_lists_them() -> None:
    def fragile(X: Tensor) -> Tensor:
        if float(X[0, 1]) > 0.7:
            raise RuntimeError("it has burnt")
        return (X.sum() / 2).reshape(1, 1)

    names = ("north", "south")
    result = run(FTS(budget=9), dict.fromkeys(names, fragile), seed=0, space=OVEN, progress=False)
    for name in names:
        rows = [row for row in result.records if row["agent"] == name]
        assert len(rows) == 9
        failed = [row for row in rows if row["status"] == "failed"]
        assert all(row["x"][1] > 0.7 and row["y"] is None for row in failed)
        assert failed
        assert len(result.history(name)[0]) == 9 - len(failed)
        points = [tuple(row["x"]) for row in rows]
        assert len(set(points)) == len(points)  # a failed point is not asked again


def test_a_result_says_where_evaluations_fail() -> None:
    def fragile(X: Tensor) -> Tensor:
        if float(X[0, 0]) > 0.6:
            raise RuntimeError("it has burnt")
        return X.sum().reshape(1, 1)

    objectives = {"north": fragile, "south": bowl}
    result = run(FTS(budget=12), objectives, seed=0, space=OVEN, progress=False)
    (row,) = result.failures()
    assert row["site"] == "north"
    assert row["evaluations"] == 12
    assert row["reasons"] == {"RuntimeError: it has burnt": row["failed"]}
    assert row["where"].startswith("heat >= ")
    assert row["where"].endswith("elsewhere 0 of " + str(12 - row["failed"]))
    table = result.to_dataframe()
    assert table[table.status == "failed"].heat.min() > 0.6 * 200 + 50 - 1e-9


# ------------------------------------------------------------------ the same as JSON


def test_verbs_as_json() -> None:
    home = Home()
    site = asked(home, by_hand(home))

    def verb(**fields: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(perform_json(site, json.dumps(fields).encode()))
        return found

    assert [trial["id"] for trial in verb(verb="ask", n=2)["trials"]] == [0, 1]
    assert "2 trials are open" in verb(verb="ask")["note"]
    assert verb(verb="tell", id=0, value=0.5)["trials"][0]["status"] == "completed"
    assert verb(verb="fail", id=1, reason="lost")["trials"][0]["reason"] == "lost"
    assert "answer" not in verb(verb="status")
    assert verb(verb="status")["best"]["value"] == 0.5
    assert verb(verb="attach", parameters={"x0": 0.1, "x1": 0.2}, value=1.0)["trials"]
    assert "open trials are []" in verb(verb="tell", id=0, value=1.0)["error"]
    assert "verbs ask, tell" in verb(verb="delete")["error"]
    assert "does not take" in verb(verb="tell", number=0)["error"]
    assert "JSON object" in json.loads(perform_json(site, b"{"))["error"]
    assert perform(site, "status", {})["waiting"] is False


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[" * 100_000, "Expected a JSON object"),
        (b'{"verb": "tell", "id": 0, "value": ' + b"9" * 400 + b"}", "finite value"),
        (b'{"verb": "tell", "id": 0, "value": "1"}', "as a number"),
        (b'{"verb": "ask", "n": NaN}', "whole number"),
        (b'{"verb": "ask", "site": 1}', "does not take these arguments"),
        (b'{"verb": "attach", "parameters": [1], "value": 1}', "named parameters"),
        (b'{"verb": "attach", "parameters": {"x0": {}, "x1": 0}, "value": 1}', "x0"),
        (b'{"verb": "tell", "id": {}, "value": 1}', "whole number"),
    ],
)
def test_nonsense_as_json_is_answered(data: bytes, said: str) -> None:
    home = Home()
    site = asked(home, by_hand(home))
    site.ask(2)
    before = home.log.head
    assert said in json.loads(perform_json(site, data))["error"]
    assert home.log.head == before


def test_a_site_without_a_hub_says_so() -> None:
    site = Site("a", BoxAgent(seed=1), None, log=Log(SITE_EVENTS))
    assert "no request from the hub" in perform(site, "ask", {})["error"]


SMALL = SearchSpace((Parameter.integer("n", 1, 3), Parameter.choice("kind", ["a", "b"])))
LINE = SearchSpace(PLANE.parameters, constraints=("x + y == 1",))


@pytest.mark.parametrize("space", [PLANE, SMALL, LINE], ids=["plane", "small", "line"])
def test_four_workers_get_four_points_that_know_of_each_other(space: SearchSpace) -> None:
    """Also where few points exist, and while the first of them is answered."""
    study, blobs = FTS(budget=11, every=1), MemoryBlobs()
    site = Site("north", make_agent(study, "north", space, 0, blobs), None)
    server, engine, told = study.server(space, ("north",)), InProcess([site]), 0

    def exchange(outgoing: Outgoing) -> Exchanged:
        nonlocal told
        while True:
            exchanged = engine(outgoing)
            if refusal_code(exchanged.replies["north"]) != "busy":
                return exchanged
            for _ in range(4 - len(site.pending())):
                site.ask()
            open_ = [str(trial.parameters) for trial in site.pending()]
            failed = [str(t.parameters) for t in site.trials() if t.status == "failed"]
            free = 6 if space is SMALL else 99
            assert len({*open_, *failed}) == min(len(open_) + len(failed), free)
            first = site.pending()[0]
            assert space.violated(first.parameters) is None
            told += 1
            site.tell(first.id, sum(map(len, map(str, first.parameters.values()))))

    with engine:
        drive(server, exchange)
    assert told == 11
    assert len(site.trials()) == 11
