"""Agents join a running study, where its aggregation opens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from botorch_fed.aggregation.relay import RelayState
from botorch_fed.cli import main
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.agent import FederatedAgent
from botorch_fed.federation.base import AgentId, Objective
from botorch_fed.federation.points import dealt_design, spread_design
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import Contribution, Order, Party, Roster
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.run import RunResult, host, make_agent, run
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE, FTS, Federation, FedGP
from botorch_fed.study import read_study
from botorch_fed.wire.codec import encode
from test.cases import random_fourier, uniform
from test.federation.own_parts import Median, MedianState, MedianTransfer

SPACE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
PHI = random_fourier()
OLD = ("ann", "bob")
ALL = (*OLD, "cem")
CHEAP = Strategy(num_raw=32, num_restarts=2, num_features=32)


def hill(X: Tensor) -> Tensor:
    return 1 - 6 * (X - 0.3).square().sum(dim=-1, keepdim=True)


class Stopped(BaseException):
    pass


def study(**options: Any) -> FTS:
    return FTS(**{"budget": 5, "feature_map": PHI, **options})


def go(
    names: tuple[str, ...],
    out: Path | None,
    made: Any = None,
    *,
    stops: int = 0,
    who: str = "bob",
    **options: Any,
) -> RunResult:
    """A run, or a part of it: a machine fails in its evaluation number `stops`."""
    objectives: dict[AgentId, Objective] = dict.fromkeys(names, hill)
    calls = [0]

    def fatal(X: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == stops:
            raise Stopped
        return hill(X)

    if stops:
        objectives[who] = fatal
    given = {"resume": out is not None, "space": SPACE, "seed": 1, "progress": False, **options}
    return run(study() if made is None else made, objectives, out=out, **given)


def counts(result: RunResult) -> dict[str, int]:
    return {name: len(result.history(name)[0]) for name in result.names}


def trace(result: RunResult, names: tuple[str, ...] = ALL) -> list[Any]:
    keys = ("agent", "round", "x", "y")
    return [[row[key] for key in keys] for row in result.records if row["agent"] in names]


def rounds_of(result: RunResult, name: str) -> list[int]:
    return [row["round"] for row in result.rounds if row["agent"] == name and row["replied"]]


# ------------------------------------------------------------------ in one process


def test_an_agent_joins_a_study_that_has_ended(tmp_path: Path) -> None:
    before = go(OLD, tmp_path)
    after = go(ALL, tmp_path)
    assert counts(after) == dict.fromkeys(ALL, 5)
    assert trace(after, OLD) == trace(before)
    assert rounds_of(after, "cem") == [7, 8, 9, 10, 11]
    assert rounds_of(after, "ann") == [1, 2, 3, 4, 5, 6]
    assert [row["joined"] for row in after.contributions()] == [1, 1, 7]


@pytest.mark.parametrize("stops", [1, 3, 5])
def test_an_agent_joins_a_study_that_was_interrupted(stops: int, tmp_path: Path) -> None:
    alone = go(OLD, None)
    with pytest.raises(Stopped):
        go(OLD, tmp_path, stops=stops)
    result = go(ALL, tmp_path)
    assert counts(result) == dict.fromkeys(ALL, 5)
    # Bob's round is asked again as it was; the first one with cem is the next one.
    first = stops + 2
    assert rounds_of(result, "cem") == list(range(first, first + 5))
    early = [row for row in trace(alone) if row[1] < first]
    assert [row for row in trace(result, OLD) if row[1] < first] == early
    assert {row["failure"] for row in result.rounds} == {None}


def test_a_newcomer_reads_the_newest_messages_at_once(tmp_path: Path) -> None:
    go(OLD, tmp_path)
    X, Y = go(ALL, tmp_path).history("cem")
    dealt = dealt_design(SPACE, 2, 3, 5)
    assert not (X[:1] == dealt[:1]).all()
    assert float(Y[0]) > float(hill(dealt[:1]))
    assert float(Y[0]) > 0.9  # where the others' functions are largest


def test_others_read_the_newcomer(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        go(OLD, tmp_path, stops=4)  # after the points that it is dealt: how many share them counts
    data = {"cem": (X := uniform(6, 2, seed=3), hill(X))}
    result = go(ALL, tmp_path, study(data=data))
    joined = rounds_of(result, "cem")[0]
    sent = [r["round"] for r in result.rounds if r["agent"] == "cem" and r["sent"]]
    assert sent[0] == joined == 6  # it has data: its first reply has a message
    X = go(ALL, tmp_path, study(data=data, budget=7)).history("ann")[0]
    alone = go(OLD, None, study(budget=7)).history("ann")[0]
    assert torch.equal(X[:5], alone[:5])
    assert not torch.equal(X[5], alone[5])  # what it said is read by those who go on


def test_without_regular_messages_a_newcomer_sends_one(tmp_path: Path) -> None:
    data = {name: (X := uniform(6, 2, seed=n), hill(X)) for n, name in enumerate(ALL)}
    options: dict[str, Any] = {"strategy": CHEAP, "every": 0}
    old = {name: data[name] for name in OLD}
    go(OLD, tmp_path, study(data=old, **options), stops=0)
    result = go(ALL, tmp_path, study(data=data, **options))
    sent = {name: sum(r["sent"] for r in result.rounds if r["agent"] == name) for name in ALL}
    assert sent == dict.fromkeys(ALL, 1)
    assert counts(result) == dict.fromkeys(ALL, 5)


def test_killed_again_after_somebody_joined(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        with pytest.raises(Stopped):
            go(OLD, tmp_path / name, stops=2)
    whole = go(ALL, tmp_path / "whole")
    for stops in (1, 2):  # in the round of before, and in the next one
        with pytest.raises(Stopped):
            go(ALL, tmp_path / "parts", stops=stops)
    parts = go(ALL, tmp_path / "parts")
    assert trace(parts) == trace(whole)
    assert counts(parts) == dict.fromkeys(ALL, 5)


def test_budget_and_roster_grow_at_once(tmp_path: Path) -> None:
    short = go(OLD, tmp_path, study(budget=3))
    result = go((*ALL, "dan"), tmp_path, study(budget=6))
    assert counts(result) == dict.fromkeys((*ALL, "dan"), 6)
    # The budget alone gives the old ones a round: those who join begin with the next one.
    assert rounds_of(result, "dan")[0] == rounds_of(result, "cem")[0] == 6
    for name in OLD:
        assert torch.equal(result.history(name)[0][:3], short.history(name)[0])
    assert counts(go((*ALL, "dan", "eva"), tmp_path, study(budget=6)))["eva"] == 6


@pytest.mark.parametrize(
    ("first", "last"),
    [((ALL, 3), (ALL, 6)), ((ALL, 3), ((*ALL, "dan"), 3)), ((ALL, 6), ((*ALL, "dan"), 8))],
    ids=["budget", "roster", "both"],
)
def test_settings_grow_again_after_a_resume_that_was_interrupted(
    first: tuple[tuple[str, ...], int], last: tuple[tuple[str, ...], int], tmp_path: Path
) -> None:
    go(OLD, tmp_path, study(budget=3))
    for who in ("cem", "cem"):  # in the first round that asks cem
        with pytest.raises(Stopped):
            go(first[0], tmp_path, study(budget=first[1]), stops=1, who=who)
    names, budget = last
    assert counts(go(names, tmp_path, study(budget=budget))) == dict.fromkeys(names, budget)


@pytest.mark.parametrize(
    "made",
    [
        FedGP(budget=5, channel="plain"),
        FedGP(budget=5, channel="threshold"),
        DPFTSDE(budget=5, noise_kind="none", num_initial=3, releases="all", feature_map=PHI),
    ],
    ids=["plain", "threshold", "no-noise"],
)
def test_the_budget_grows_after_a_stop_in_the_last_round(made: Any, tmp_path: Path) -> None:
    with pytest.raises(Stopped):  # a round without a sum, until the budget has grown
        go(OLD, tmp_path, made, stops=3)
    for budget in (7, 6, 9):
        with pytest.raises(Stopped):
            go(OLD, tmp_path, replace(made, budget=budget), stops=1)
    result = go(OLD, tmp_path, replace(made, budget=8))
    assert counts(result) == dict.fromkeys(OLD, 8)
    assert {row["failure"] for row in result.rounds} == {None}


def test_two_join_one_after_the_other_with_workers(tmp_path: Path) -> None:
    for place, workers in (("here", 0), ("there", 2)):
        for names in (OLD, ALL, (*ALL, "dan")):
            go(names, tmp_path / place, workers=workers)
    here, there = (go((*ALL, "dan"), tmp_path / place) for place in ("here", "there"))
    assert trace(here, (*ALL, "dan")) == trace(there, (*ALL, "dan"))
    assert counts(here) == dict.fromkeys((*ALL, "dan"), 5)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("bob", "ann", "cem"), r"has the agents \['ann', 'bob'\], this study has \['bob', 'ann'"),
        (("cem", *OLD), "name those of the run first, in their order"),
        (("ann",), "name those of the run first"),
        (("ann", "cem"), "name those of the run first"),
    ],
)
def test_agents_join_at_the_end_and_none_leaves(
    names: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    go(OLD, tmp_path, study(budget=3))
    with pytest.raises(ProtocolError, match=said):
        go(names, tmp_path, study(budget=3))
    assert counts(go(OLD, tmp_path, study(budget=3))) == dict.fromkeys(OLD, 3)


def test_other_settings_are_refused_with_a_newcomer_too(tmp_path: Path) -> None:
    go(OLD, tmp_path, study(design_seed=0))
    with pytest.raises(ProtocolError, match="started with another settings"):
        go(ALL, tmp_path, study(every=2))
    with pytest.raises(ProtocolError, match="started with another seed"):
        go(ALL, tmp_path, study(design_seed=0), seed=2)
    design = spread_design(SPACE, ALL, 2)
    with pytest.raises(ProtocolError, match=r"another settings of agents \['ann', 'bob'\]"):
        go(ALL, tmp_path, study(initial_design=design))
    again = study(design_seed=0)
    go(ALL, tmp_path, again)
    with pytest.raises(ProtocolError, match=r"has the agents \['ann', 'bob', 'cem'\]"):
        go(OLD, tmp_path, again)  # once it has joined it belongs to the run


@pytest.mark.parametrize(
    "made",
    [
        Federation(budget=5, search=MedianTransfer(), aggregation=Median()),
        FedGP(budget=5, channel="plain"),
    ],
    ids=["median", "fed-gp"],
)
def test_nobody_joins_where_the_roster_is_closed(made: Any, tmp_path: Path) -> None:
    go(OLD, tmp_path, made)
    with pytest.raises(ProtocolError, match=r"No agent can join.*because.*got \['cem'\].*as data"):
        go(ALL, tmp_path, made)


# ------------------------------------------------------------------ an aggregation of a user


@dataclass(frozen=True, eq=False)
class OpenState(MedianState):
    """The same, and who takes part."""

    roster: Roster


@dataclass(frozen=True)
class OpenMedian(Median):
    """The median of whoever takes part."""

    state_type = OpenState
    opens = True

    def start(self, hub: Party) -> OpenState:
        return OpenState(1, None, Roster.of(hub.terms.agents))

    def orders(self, hub: Party, state: Any) -> Mapping[AgentId, Order] | None:
        who = state.roster.querying(hub.terms)
        return dict.fromkeys(who, Order(state.t, "next", True)) or None

    def combine(self, hub: Party, state: Any, inbox: Mapping[AgentId, Contribution]) -> OpenState:
        new = super().combine(hub, state, inbox)
        return OpenState(new.t, new.middle, state.roster)


def test_an_aggregation_of_ones_own_opens_too(tmp_path: Path) -> None:
    made = Federation(budget=5, search=MedianTransfer(), aggregation=OpenMedian())
    with pytest.raises(Stopped):
        go(OLD, tmp_path, made, stops=3)
    result = go(ALL, tmp_path, made)
    assert counts(result) == dict.fromkeys(ALL, 5)
    assert rounds_of(result, "cem") == [4, 5, 6, 7, 8]


# ------------------------------------------------------------------ a hub, and sites elsewhere


class Machines:
    """Sites with folders of their own, whose studies name no newcomer, and a hub."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, FTS] = {}

    def host(self, names: tuple[str, ...], **options: Any) -> RunResult:
        """The hub's part, with all processes started anew."""
        sites = []
        for name in names:
            mine = self.made.setdefault(name, study(**options))  # as it was when it joined
            agent = make_agent(mine, name, SPACE, 1, MemoryBlobs())
            log = FileLog(self.folder / name, SITE_EVENTS)
            sites.append(Site(name, agent, hill, log=log))
        with InProcess(sites) as engine:
            result = host(
                study(**options), SPACE, names, engine, seed=1, out=self.folder / "hub", resume=True
            )
        self.trials = {site.name: len(site.trials()) for site in sites}
        for site in sites:
            site.close()
        return result


def test_sites_keep_their_study_when_others_join(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    machines.host(OLD)
    result = machines.host(ALL)
    assert machines.trials == dict.fromkeys(ALL, 5)
    assert {row["failure"] for row in result.rounds} == {None}
    machines.host(ALL, budget=7)  # the sites have the budget of before: they evaluate nothing more
    assert machines.trials == dict.fromkeys(ALL, 5)


def test_a_hub_without_its_newcomer_says_so(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    machines.host(OLD)
    machines.host(ALL)
    head = tmp_path / "hub" / "run.json"  # an old copy: what counts is the hub's record
    known = json.loads(head.read_text())
    head.write_text(json.dumps({**known, "agents": dict.fromkeys(OLD, "")}))
    with pytest.raises(ProtocolError, match=r"The run has the agents \['ann', 'bob', 'cem'\]"):
        machines.host(OLD)


# ------------------------------------------------------------------ what a site accepts


@dataclass
class Desk:
    """A site and what a hub may say."""

    made: Any

    def __post_init__(self) -> None:
        self.blobs = MemoryBlobs()
        self.agent: FederatedAgent = self.made.agent("ann", SPACE, 0, self.blobs)
        self.setup = self.made.server(SPACE, OLD).hub.terms.setup
        self.state = self.receive(self.agent.start(), self.setup)

    def check(self, state: Any, setup: Any) -> tuple[str, ...]:
        broadcasts = (self.blobs.put(encode(setup)),)
        self.agent.check(state, self.order(state), broadcasts)
        return broadcasts

    def order(self, state: Any) -> Order:
        return Order(1 if state.order is None else state.order.t + 1, "next", True)

    def receive(self, state: Any, setup: Any) -> Any:
        return self.agent.receive(state, self.order(state), self.check(state, setup))


def test_a_site_accepts_a_roster_that_grew_and_nothing_else() -> None:
    desk = Desk(study())
    grown = replace(desk.setup, agents=ALL)
    state = desk.receive(desk.state, grown)
    assert state.roster == ALL
    desk.check(state, replace(grown, agents=(*ALL, "dan")))
    other = {k: v / 2 for k, v in grown.basis.items() if k.endswith("frequencies")}
    assert other
    bad = {
        "expected those of before": replace(grown, agents=OLD),
        "in the same order": replace(grown, agents=("bob", "ann", "cem", "dan")),
        "The terms have changed": replace(grown, basis={**grown.basis, **other}),
        "changed during the run": replace(grown, words={**grown.words, "q": "2"}),
    }
    for said, setup in bad.items():
        with pytest.raises(MessageError, match=said):
            desk.check(state, setup)
    with pytest.raises(MessageError, match="is not among"):
        desk.check(desk.agent.start(), replace(grown, agents=("bob", "cem", "dan")))
    fresh = replace(desk.made, data={})  # after a restart: no blob of before is there
    again = Desk(fresh)
    again.check(state, replace(grown, agents=(*ALL, "dan")))
    with pytest.raises(MessageError, match="expected those of before"):
        again.check(state, replace(grown, agents=OLD))


def test_a_site_of_a_closed_study_refuses_newcomers() -> None:
    desk = Desk(Federation(budget=5, search=MedianTransfer(), aggregation=Median()))
    with pytest.raises(MessageError, match=r"now \['ann', 'bob', 'cem'\].*Median, because"):
        desk.check(desk.state, replace(desk.setup, agents=ALL))


def test_the_hubs_fingerprint_has_no_roster_where_agents_may_join() -> None:
    open_, closed = (
        {made.server(SPACE, names).fingerprint for names in (OLD, ALL)}
        for made in (study(), Federation(budget=5, search=MedianTransfer(), aggregation=Median()))
    )
    assert (len(open_), len(closed)) == (1, 2)


def test_the_same_state_has_the_same_outbox_whoever_wants_to_join() -> None:
    server, grown = study().server(SPACE, OLD), study().server(SPACE, ALL)
    state: RelayState = server.start()
    for _ in range(6):
        now, then = server.outbox(state), grown.outbox(state)
        assert now is not None
        assert then is not None
        assert (now.messages, encode(now.broadcasts[0])) == (
            then.messages,
            encode(then.broadcasts[0]),
        )
        state = server.step(state, dict.fromkeys(OLD, Contribution(None)))
    assert server.outbox(state) is None
    end = grown.outbox(state)
    assert end is not None
    assert (tuple(end.messages), end.broadcasts[0].agents) == (("cem",), ALL)
    with pytest.raises(ProtocolError, match="name those of the run first"):
        study().server(SPACE, ("ann",)).outbox(state)


# ------------------------------------------------------------------ study files

FILE = """objective = "tuning:score"
agents = {agents}
budget = {budget}
seed = 0
[space]
x = {{ type = "real", lower = 0.0, upper = 1.0 }}
[protocol]
{protocol}
"""
PRIVATE = 'name = "dp-fts-de"\n[privacy]\nepsilon = 9.0\ndelta = 1e-5'


@pytest.mark.parametrize(
    ("protocol", "grows"),
    [
        ('name = "fts"', (True, True)),
        ('name = "federation"', (True, True)),
        (PRIVATE, (False,) * 2),
    ],
    ids=["fts", "federation", "dp-fts-de"],
)
@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
def test_the_name_of_a_run(protocol: str, grows: tuple[bool, bool], tmp_path: Path) -> None:
    def name(agents: str = '["ann", "bob"]', budget: int = 6, more: str = "") -> str:
        path = tmp_path / "study.toml"
        path.write_text(FILE.format(agents=agents, budget=budget, protocol=protocol) + more)
        return read_study(path).fingerprint

    mine = name()
    assert (name('["ann", "bob", "cem"]') == mine) == grows[0]
    assert (name(budget=7) == mine) == grows[1]
    assert name(more="[outcome]\nscale = 2.0\n") != mine


SCORE = "def score(agent, *, x):\n    return -(x - 0.3) ** 2\n"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setattr(sys, "path", sys.path[:])
    module = f"tuning_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(SCORE)

    def write(agents: str, protocol: str = 'name = "fts"', budget: int = 4) -> str:
        path = tmp_path / "study.toml"
        text = FILE.format(agents=agents, budget=budget, protocol=protocol)
        path.write_text(text.replace("tuning:", f"{module}:"))
        return str(path)

    return write


def test_an_agent_joins_by_one_name_more_in_the_file(
    written: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "run"), "--json"]
    assert main(["run", written('["ann", "bob"]'), "--dry-run", *out]) == 0
    assert "agents may join" in json.loads(capsys.readouterr().out)["roster"]
    assert main(["run", written('["ann", "bob"]'), *out]) == 0
    assert main(["run", written('["ann", "bob", "cem"]', budget=6), "--resume", *out]) == 0
    result = RunResult.load(tmp_path / "run")
    assert counts(result) == dict.fromkeys(ALL, 6)
    assert [row["joined"] for row in result.contributions()] == [1, 1, 7]
    capsys.readouterr()
    assert main(["run", written('["bob", "ann", "cem"]', budget=6), "--resume", *out]) == 1
    assert "name those of the run first, in their order" in capsys.readouterr().err


def test_a_file_of_a_closed_protocol_says_why(
    written: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "run")]
    closed = 'name = "fed-gp"\nnum_initial = 2'
    assert main(["run", written('["ann", "bob"]', closed), *out]) == 0
    path = written('["ann", "bob", "cem"]', closed)
    capsys.readouterr()
    assert main(["run", path, "--dry-run", "--json"]) == 0
    said = "its keys, its grid and its noise are made for the agents that it began with"
    assert said in json.loads(capsys.readouterr().out)["roster"]
    assert main(["run", path, "--resume", *out]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
