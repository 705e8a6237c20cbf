"""FBO-FedGP: what is queried, who learns what, what it costs, and what failures cost."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from benchmarks.papers.published.settings import paper_search
from botorch_fed import studies
from botorch_fed.aggregation import sum_hub
from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.aggregation.sum_messages import (
    BACKLOG,
    MAX_KEY_BYTES,
    MAX_ROUNDS,
    DecryptionShare,
    KeyMessage,
    Keys,
    Opened,
    Sealed,
    SumOrder,
    SumSetup,
    SumState,
    Upload,
)
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.agent import FederatedAgent
from botorch_fed.federation.base import Outbox
from botorch_fed.federation.points import spread_design
from botorch_fed.federation.terms import MAX_AHEAD
from botorch_fed.privacy import Budget, GaussianSum, Ledger, compose
from botorch_fed.privacy.channels import CKKSChannel, Epoch
from botorch_fed.privacy.distributed import DistributedGaussianSum, DistributedRecordSum
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, run
from botorch_fed.search.messages import TransferRows
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.test_functions.synthetic import SyntheticGPAgents
from botorch_fed.wire.codec import decode, encode
from test.aggregation.harness import (
    HILLS,
    NAMES,
    REGION,
    SQUARE,
    Federation,
    Hill,
    channels,
    finished,
    named,
    orders,
    ran,
    setups,
    study,
    sums,
    trace,
    words,
)
from test.cases import uniform

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

SUPPORT = SupportSearch(support_size=4, num_raw=32, num_restarts=2, noise_var=1e-2)
PAPER = paper_search(support_size=4, num_raw=32, num_restarts=2, noise_var=1e-2)
GLOBAL = replace(PAPER, models="global")
SEARCHES: dict[str, Any] = {
    "mean": TransferSearch(),
    "region": REGION,
    "support": SUPPORT,
    "paper": PAPER,
}
LOSSES = {"mean": TransferSearch(), "region": REGION, "support": GLOBAL}  # a sum each round


def gaussian(dim: int, num_agents: int, **changes: Any) -> DistributedGaussianSum:
    common = {"clip_norm": 20.0, "noise_multiplier": 1.0, "dim": dim, "num_agents": num_agents}
    return DistributedGaussianSum(**{**common, **changes})


def records(dim: int, num_agents: int) -> DistributedRecordSum:
    return DistributedRecordSum(
        num_features=4,
        outcome_bound=2.0,
        max_records=10,
        num_agents=num_agents,
        noise_multiplier=5.0,
    )


def trusted(dim: int, num_agents: int) -> GaussianSum:
    return GaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=20.0, noise_multiplier=1.0, weight=1.0
    )


@cache
def plain(which: str) -> RunResult:
    return ran(study(SEARCHES[which]))


# ------------------------------------------------------------------ reproducible


@pytest.mark.parametrize("which", SEARCHES)
@pytest.mark.parametrize("channel", ["plain", "ckks", "threshold"])
def test_every_channel_gives_the_same_run(which: str, channel: Any) -> None:
    result = ran(study(SEARCHES[which], channel=channel))
    assert trace(result) == trace(plain(which))
    assert result.privacy is not None
    assert plain(which).privacy is not None
    assert result.privacy["sums"] == plain(which).privacy["sums"] > 0  # type: ignore[index]


def test_another_seed_gives_another_run() -> None:
    other = run(study(), HILLS, space=SQUARE, seed=2, progress=False)
    assert trace(other) != trace(plain("region"))


def test_one_study_can_be_run_twice() -> None:
    for channel in ("ckks", "threshold"):
        protocol = study(PAPER, channel=channel)
        assert trace(ran(protocol)) == trace(ran(protocol)) == trace(plain("paper"))
        two = {name: HILLS[name] for name in NAMES[:2]}
        fewer = run(protocol, two, space=SQUARE, seed=1, progress=False)
        assert len(fewer.records) == 2 * 6


def test_workers_change_nothing() -> None:
    result = ran(study(channel="ckks", rounds=1), workers=2)
    assert trace(result) == trace(ran(study(rounds=1)))


@pytest.mark.parametrize(
    ("which", "channel", "lost"),
    [
        ("mean", "plain", False),
        ("mean", "ckks", False),
        ("mean", "threshold", False),
        ("mean", "threshold", True),
        ("region", "plain", False),
        ("region", "ckks", False),
        ("support", "threshold", False),
        ("support", "threshold", True),
    ],
)
def test_a_run_goes_on_after_a_crash(which: str, channel: Any, lost: bool, tmp_path: Path) -> None:
    protocol = study(SEARCHES[which], channel=channel)
    calls = 0

    def stopped(name: str, serial: int) -> bool:
        nonlocal calls
        calls += 1
        # With their secrets sites lose the key to a sum that they have not read: before the first.
        exchanges = {"threshold": 2 if lost else 6}.get(channel, 3)
        if calls > len(NAMES) * exchanges:
            raise RuntimeError("the plug")
        return False

    with pytest.raises(RuntimeError, match="the plug"):
        ran(protocol, out=tmp_path / "run", absent=stopped)
    for secrets in (tmp_path / "run" / "sites").glob("*/secrets") if lost else ():
        shutil.rmtree(secrets)
    again = ran(study(SEARCHES[which], channel=channel), out=tmp_path / "run", resume=True)
    assert trace(again) == trace(plain(which))
    assert again.privacy is not None
    assert again.privacy["rekeys"] == lost


def test_a_test_problem() -> None:
    problem = SyntheticGPAgents(3, seed=0)
    result = run(study(rounds=2), problem, seed=0, progress=False)
    assert len(result.records) == 3 * 5
    assert bool(torch.isfinite(result.regret("agent0")).all())


# ------------------------------------------------------------------ how often


def test_one_sum_a_round_at_most() -> None:
    federation = finished(study(channel="threshold", rounds=4))
    opened = [round_ for round_ in federation.server.states if round_.stage == "share"]
    assert [state.t for state in opened] == [0, 1, 2, 3]
    assert federation.end.sums == 4
    assert federation.end.rekeys == 0
    # Two exchanges for the key, two for each round with a sum, one for the last.
    assert len(federation.rounds) == 2 + 2 * 4 + 1


def test_own_models_need_no_sum() -> None:
    federation = finished(study(replace(SUPPORT, models="local"), channel="threshold"))
    assert federation.end.sums == 0
    asked = {order.contribute for orders in federation.orders for order in orders.values()}
    assert asked == {False}
    assert finished(study(GLOBAL)).end.sums == 3


@pytest.mark.parametrize("which", SEARCHES)
def test_fewer_sums_than_rounds(which: str) -> None:
    federation = finished(study(SEARCHES[which], sums=1, rounds=4))
    assert federation.end.sums == 1
    assert set(federation.counts().values()) == {7}


# ------------------------------------------------------------------ lost agents

STEPS = ("key0", "key1", "start", "share", "query", "resend")


def by_day(steps: Sequence[str], of_all: Sequence[str]) -> list[Any]:
    """Every step with one search by day, some of them with all; the others at night."""
    return [
        pytest.param(
            which,
            when,
            id=f"{when}-{which}",
            marks=[] if which == "mean" or when in of_all else [pytest.mark.nightly],
        )
        for which, when in itertools.product(LOSSES, steps)
    ]


@pytest.mark.parametrize(("which", "when"), by_day(STEPS, ("share", "query")))
def test_a_lost_agent_costs_a_key_and_not_the_run(which: str, when: str) -> None:
    lost: list[str] = []

    def absent(name: str, order: SumOrder) -> bool:
        if when == "resend" and name == "ann" and not lost and named(order) == "query":
            lost.append("ann")
            return True
        if name == "bob" and named(order) == when and "bob" not in lost:
            lost.append("bob")
            return True
        return False

    names = NAMES if when != "resend" else (*NAMES, "dee")
    protocol = study(LOSSES[which], channel="threshold", rejoin=False)
    federation = finished(protocol, names=names, absent=absent)
    assert "bob" in lost
    assert federation.end.rekeys == len(lost)
    assert federation.end.epoch == len(lost)
    assert set(federation.end.roster) == set(names) - set(lost)
    # The interrupted round goes on, unless shares in its opening have been sent.
    assert federation.end.sums == (2 if when == "share" else 3)
    counts = federation.counts()
    assert all(counts[name] == 6 for name in set(names) - set(lost))
    # Whoever is lost goes on alone: it misses one request, at most.
    assert counts["bob"] == {"start": 3, "query": 5}.get(when, 6)
    numbers = [number for number, _ in federation.epochs()]
    assert len(numbers) == len(set(numbers))  # no number with two rosters


@pytest.mark.parametrize("when", STEPS[:-1])
def test_two_agents_of_which_one_is_lost(when: str) -> None:
    federation = finished(
        study(GLOBAL, channel="threshold", rejoin=False),
        names=NAMES[:2],
        absent=lambda name, order: name == "bob" and named(order) == when,
    )
    assert federation.end.roster == ()
    assert federation.end.sums == (when == "query")  # the first one, before
    assert federation.end.t == 4
    assert federation.counts()["ann"] == 6


def test_nobody_answers() -> None:
    for channel in ("plain", "threshold"):
        federation = finished(study(channel=channel), absent=lambda name, order: True)
        assert federation.end.sums == 0
        assert federation.end.t == 4


@pytest.mark.parametrize("channel", ["plain", "ckks"])
def test_who_misses_a_sum_does_not_spoil_the_next(channel: Any) -> None:
    seen: list[set[str]] = []

    def watch(state: SumState, inbox: Mapping[str, Any]) -> None:
        seen.append({name for name, said in inbox.items() if said.data is not None})

    federation = Federation(
        study(rounds=4, channel=channel),
        absent=lambda name, order: name == "bob" and order.t == 2,
    )
    federation.server.watch = watch
    federation.drive()
    assert seen[:4] == [set(NAMES), set(NAMES), {"ann", "cem"}, set(NAMES)]
    assert federation.end.sums == 4
    assert federation.counts() == {"ann": 7, "bob": 6, "cem": 7}
    assert federation.end.missed == ()  # everybody has them
    assert same_plans(federation)


def same_plans(federation: Federation, *names: str) -> bool:
    """Whether agents are in one region, and have read the same sums."""
    found = [federation.sites[name].state.search for name in names or NAMES]
    return all(
        one.t == found[0].t
        and torch.equal(one.plan.centre, found[0].plan.centre)
        and torch.equal(one.total, found[0].total)
        for one in found
    )


@pytest.mark.parametrize("channel", ["plain", "ckks"])
def test_who_was_away_for_long_reads_what_it_has_missed(channel: Any) -> None:
    """Away from the start on, and through a round in which nobody contributed."""
    federation = Federation(
        study(rounds=8, channel=channel),
        absent=lambda name, order: order.t == 3 or (name == "bob" and order.t < 6),
    )
    federation.drive()
    assert federation.end.sums == 7
    assert same_plans(federation)
    kept = [len(state.missed) for state in federation.server.states]
    assert max(kept) == 4  # of rounds 0, 1, 2 and 4; that of 5 is the last
    assert kept[-1] == 0
    asked = federation.server.inboxes[7]
    assert asked["bob"].data is not None


def test_who_was_away_for_too_long_goes_on_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(sum_hub, "BACKLOG", 2)
    federation = Federation(
        study(rounds=8), absent=lambda name, order: name == "bob" and 1 < order.t < 6
    )
    federation.drive()
    assert max(len(state.missed) for state in federation.server.states) == 2
    assert federation.counts() == {"ann": 11, "bob": 7, "cem": 11}
    assert same_plans(federation, "ann", "cem")
    assert federation.sites["bob"].state.search.t == 0
    assert all(box["bob"].data is None for box in federation.server.inboxes[6:] if "bob" in box)


def test_nothing_is_kept_for_who_was_away_for_too_long(monkeypatch: Any) -> None:
    monkeypatch.setattr(sum_hub, "BACKLOG", 2)

    def absent(name: str, order: SumOrder) -> bool:
        return (name == "bob" and order.t > 1) or (name == "cem" and order.t in (6, 7))

    federation = finished(study(rounds=9), absent=absent)
    kept = {state.t: len(state.missed) for state in federation.server.states}
    # Bob has the sum of round 0 and cannot read on after 1 and 2; cem needs that of 5, and can.
    assert kept == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 0, 6: 0, 7: 1, 8: 2, 9: 0}
    assert same_plans(federation, "ann", "cem")


def test_what_is_kept_for_who_is_away_is_bounded_in_bytes(monkeypatch: Any) -> None:
    one = 8 * REGION.numbers(2)
    monkeypatch.setattr(sum_hub, "BACKLOG_BYTES", 3 * one + 1)
    federation = finished(study(rounds=8), absent=lambda name, order: name == "bob")
    assert max(len(state.missed) for state in federation.server.states) == 3


@pytest.mark.parametrize("which", ["mean", "support"])
@pytest.mark.parametrize("channel", ["plain", "ckks"])
def test_who_is_back_uses_the_newest_sum(channel: Any, which: str) -> None:
    federation = Federation(
        study(LOSSES[which], rounds=6, channel=channel),
        absent=lambda name, order: name == "bob" and order.t in (2, 3),
    )
    federation.drive()
    newest = [federation.memory(name).newest for name in NAMES]
    assert {found.t for found in newest if found is not None} == {5}
    totals = [found.total for found in newest if found is not None and found.total is not None]
    assert len(totals) == 3
    assert all(torch.equal(total, totals[0]) for total in totals)
    given = [said["bob"].data is not None for said in federation.server.inboxes if "bob" in said]
    assert given == [True, True, True, True, False]  # nothing is wanted after the last round


# ------------------------------------------------------------------ taken back in


@pytest.mark.parametrize(("which", "when"), by_day(("key1", "start", "share", "query"), ("share",)))
def test_a_lost_agent_is_taken_back_in(which: str, when: str) -> None:
    lost: list[str] = []

    def absent(name: str, order: SumOrder) -> bool:
        gone = name == "bob" and named(order) == when and not lost
        lost.extend(["bob"] if gone else [])
        return gone

    federation = finished(study(LOSSES[which], channel="threshold", rounds=5), absent=absent)
    assert federation.end.roster == NAMES
    assert federation.end.returned == ("bob",)
    assert federation.end.rekeys == 2
    assert federation.end.sums == (4 if when == "share" else 5)
    assert len({state.epoch for state in federation.server.states}) == 3
    last = [state for state in federation.server.states if state.stage == "share"][-1]
    assert last.roster == NAMES
    if which == "region":
        assert same_plans(federation)
    asked = {"key1": 8, "start": 5, "share": 8, "query": 7}[when]
    assert federation.counts() == {"ann": 8, "bob": asked, "cem": 8}


def test_an_agent_is_taken_back_in_once() -> None:
    federation = finished(
        study(GLOBAL, channel="threshold", rounds=9),
        absent=lambda name, order: name == "bob" and order.step == "share" and order.t in (1, 4),
    )
    assert federation.end.rekeys == 3
    assert federation.end.roster == ("ann", "cem")
    assert federation.end.sums == 7  # two of the rounds were lost with bob's shares
    assert federation.counts() == dict.fromkeys(NAMES, 12)


def test_two_agents_of_which_one_comes_back() -> None:
    federation = finished(
        study(GLOBAL, channel="threshold", rounds=5),
        names=NAMES[:2],
        absent=lambda name, order: name == "bob" and named(order) == "query" and order.t == 2,
    )
    assert [state.roster for state in federation.server.states if state.t == 3][-1] == ()
    assert federation.end.roster == NAMES[:2]
    assert federation.end.sums == 3  # of rounds 0, 1 and 4


@pytest.mark.parametrize("noise", [False, True])
def test_who_was_never_lost_keeps_its_chance(noise: bool) -> None:
    """Too few are left once without bob, once without ann: both were lost once."""
    options = {"noise_at": "agent", "mechanism": gaussian, "sums": 20} if noise else {}
    federation = finished(
        study(GLOBAL, channel="threshold", rounds=7, **options),
        names=NAMES if noise else NAMES[:2],
        absent=lambda name, order: (
            named(order) == "query" and (name, order.t) in (("bob", 1), ("ann", 4))
        ),
    )
    names = federation.server.honest.terms.agents
    assert federation.end.returned == ("bob", "ann")
    assert federation.end.lost == ()
    assert federation.end.roster == names
    assert federation.end.rekeys == 2
    assert federation.end.sums == 3  # of rounds 0, 3 and 6


@pytest.mark.parametrize("lost", [False, True])
def test_the_limit_of_new_keys_holds(lost: bool) -> None:
    """Nobody opens a sum, and bob may be lost with the last key."""
    federation = finished(
        study(GLOBAL, channel="threshold", rounds=9),
        names=NAMES[:2],
        tamper=lambda name, order, said: DecryptionShare(None) if order.step == "share" else said,
        absent=lambda name, order: (
            lost and name == "bob" and order.step == "share" and order.epoch == 6
        ),
    )
    keyed = {state.epoch for state in federation.server.states if state.stage == "key"}
    assert keyed == set(range(7))  # the first, and three for each agent
    assert federation.end.rekeys == 6
    assert federation.end.asked == 7
    assert federation.end.lost == (("bob",) if lost else ())
    assert federation.counts() == dict.fromkeys(NAMES[:2], 12)


def test_who_has_missed_too_much_is_not_taken_back_in(monkeypatch: Any) -> None:
    monkeypatch.setattr(sum_hub, "BACKLOG", 2)
    federation = finished(
        study(channel="threshold", rounds=8),
        absent=lambda name, order: name == "bob" and 1 < order.t < 6,
    )
    assert federation.end.rekeys == 1
    assert federation.end.lost == ("bob",)
    assert federation.end.sums == 8
    answered = [box["bob"] for box in federation.server.inboxes if "bob" in box]
    assert [said.able for said in answered[-3:]] == [False] * 3
    assert federation.counts() == {"ann": 11, "bob": 7, "cem": 11}


def test_who_can_not_pay_is_not_taken_back_in() -> None:
    one = compose([gaussian(2, 3, dropping=1).event], delta=1e-5).epsilon
    protocol = study(
        GLOBAL,
        channel="threshold",
        rounds=5,
        sums=6,
        noise_at="agent",
        mechanism=lambda dim, num_agents: gaussian(dim, num_agents, dropping=1),
    )
    federation = finished(protocol, ledgers={"bob": Ledger(budget=Budget(1.01 * one, 1e-5))})
    assert federation.end.rekeys == 1
    assert federation.end.sums == 5
    assert federation.end.asked == 6  # one sum was interrupted when bob's budget ended
    assert federation.draws() == {"ann": 6, "bob": 1, "cem": 6}


def test_a_stored_state_is_not_continued_under_another_rule_of_return() -> None:
    servers = [study(channel="threshold", rejoin=r).server(SQUARE, NAMES) for r in (True, False)]
    assert servers[0].fingerprint != servers[1].fingerprint


def test_coming_back_costs_no_noise() -> None:
    federation = finished(
        study(
            GLOBAL,
            channel="threshold",
            rounds=6,
            sums=7,
            mechanism=lambda dim, num_agents: gaussian(dim, num_agents, dropping=1),
            noise_at="agent",
        ),
        absent=lambda name, order: name == "bob" and named(order) == "query" and order.t == 1,
    )
    assert federation.end.rekeys == 2
    assert federation.end.asked == 7  # one sum was interrupted by the loss, none by the return
    assert federation.draws() == {
        "ann": 7,
        "bob": 4,  # not in the round that it has missed, nor in the next
        "cem": 7,
    }
    assert {name: federation.releases(name) for name in NAMES} == federation.draws()


def test_a_round_without_a_sum_does_not_end_them() -> None:
    federation = finished(study(rounds=4), absent=lambda name, order: order.t == 1)
    assert federation.end.sums == 3  # after rounds 0, 2 and 3
    plans = [federation.sites[name].state.search.plan for name in NAMES]
    assert {plan.t for plan in plans} == {4}
    assert all(torch.equal(plan.centre, plans[0].centre) for plan in plans)


def test_keys_of_a_past_epoch_are_forgotten() -> None:
    lost: list[str] = []

    def absent(name: str, order: SumOrder) -> bool:
        gone = name == "bob" and order.step == "share" and not lost
        lost.extend(["bob"] if gone else [])
        return gone

    federation = finished(study(channel="threshold", rejoin=False), absent=absent)
    channel = federation.server.private_sum.channel
    run_name = federation.server.aggregation.run
    handles = [channel.handle(Epoch(run_name, number, NAMES), "ann") for number in (0, 1)]
    kept = federation.stores["ann"].names()
    assert not any(name.startswith(handles[0]) for name in kept)
    assert handles[1] in kept


# ------------------------------------------------------------------ who sees what


def windows(integers: Tensor) -> list[bytes]:
    """Pieces of a contribution that nothing else has by chance."""
    words = integers.numpy().astype("<i8")
    pairs = [words[i : i + 2] for i in range(0, len(words) - 1, 7)]
    return [pair.tobytes() for pair in pairs if np.abs(pair).min() > 2**20]


def correlation(payload: bytes, integers: Tensor, header: int) -> float:
    words = np.frombuffer(payload[header:], dtype="<u4", count=len(integers)).astype(float)
    return float(abs(np.corrcoef(words, integers.numpy())[0, 1]))


def test_the_server_sees_no_contribution() -> None:
    found = {}
    for channel in ("plain", "threshold", "ckks"):
        federation = finished(study(channel=channel))
        drawn = [
            state.aggregation.drawn
            for state in federation.agent_states
            if len(state.aggregation.drawn)
        ]
        pieces = [piece for integers in drawn for piece in windows(integers)]
        assert len(pieces) > 10
        uploads = [
            said.data
            for inbox in federation.server.inboxes
            for said in inbox.values()
            if isinstance(said, Upload) and said.data is not None
        ]
        assert uploads
        found[channel] = any(piece in data for piece in pieces for data in uploads)
        if channel == "threshold":
            values = [correlation(data, ints, 130) for data in uploads for ints in drawn[:3]]
            bound = 5 / len(drawn[0]) ** 0.5
            assert max(values) < bound
            # And everything else that the server ever gets or keeps, byte for byte.
            seen = [*federation.traffic, *(encode(state) for state in federation.server.states)]
            assert len(seen) > 20
            assert not any(piece in data for piece in pieces for data in seen)
            outcomes = [
                agent.Y.numpy().tobytes() for agent in federation.agent_states if len(agent.Y)
            ]
            assert outcomes
            assert not any(y in data for y in outcomes for data in seen)
    assert found == {"plain": True, "threshold": False, "ckks": False}


@pytest.mark.parametrize("channel", ["threshold", "ckks"])
def test_secrets_stay_in_the_stores(channel: Any) -> None:
    federation = finished(study(channel=channel))
    secrets = {
        data[at : at + 24]
        for store in federation.stores.values()
        for name in store.names()
        if "-" not in name[3:] and (data := store.get(name)) is not None
        for at in ((len(data) // 3, len(data) // 2) if channel == "ckks" else (32, 600, 900))
        if len(data) > 1000
    }
    ends = ("identity", "-group", "-pairs", "-own2")
    secrets |= {
        (store.get(name) or b"")[:24]
        for store in federation.stores.values()
        for name in store.names()
        if channel == "threshold" and name.endswith(ends)
    }
    assert len(secrets) >= (2 if channel == "ckks" else 18)
    kept = [
        *federation.traffic,
        *federation.log.bytes(),
        *(encode(state) for state in federation.agent_states),
        *(encode(state) for state in federation.server.states),
    ]
    assert not any(secret in data for secret in secrets for data in kept)
    agent = federation.sites["ann"].agent
    shown = repr(agent) + repr(federation.protocol) + repr(federation.end)
    shown += repr(agent.resources) + repr(federation.server.private_sum)
    shown += repr(federation.agent_states[-1])
    assert not any(repr(secret)[2:-1] in shown for secret in secrets)
    assert not any(secret.hex() in shown for secret in secrets)
    assert "X=" not in shown  # nor its own data
    assert "drawn=" not in shown


def test_states_do_not_grow_with_the_rounds() -> None:
    sizes = [
        [len(encode(state)) for state in finished(study(rounds=rounds)).agent_states[-3:]]
        for rounds in (2, 6)
    ]
    per_round = 8 * 3 * 4 + 100  # a point, its outcome, and lengths
    assert all(after - before < per_round for before, after in zip(*sizes, strict=True))


# ------------------------------------------------------------------ differential privacy


@pytest.mark.parametrize("channel", ["plain", "threshold", "ckks"])
@pytest.mark.parametrize("mechanism", [gaussian, records])
def test_a_private_run(channel: Any, mechanism: Any) -> None:
    protocol = study(GLOBAL, channel=channel, mechanism=mechanism, noise_at="agent")
    if mechanism is records:
        protocol = replace(protocol, search=replace(GLOBAL, prediction="pic"))
    federation = Federation(protocol)
    paid: list[int] = []

    def watch(state: SumState, inbox: Mapping[str, Any]) -> None:
        for name, said in inbox.items():
            if isinstance(said, Upload) and said.data is not None:
                paid.append(federation.releases(name) - state.t)

    federation.server.watch = watch
    federation.drive()
    assert federation.end.sums == 3
    assert paid == [1] * 9  # each contribution is in its site's book before the server has it
    made = federation.server.private_sum.mechanism
    expected = compose([made.event] * 3, delta=1e-5, adjacency=made.adjacency, unit=made.unit)
    promise = federation.server.honest.promise
    assert promise.epsilon == expected.epsilon
    assert not promise.private  # the noise is seeded
    for name in NAMES:
        ledger = federation.memory(name).ledger
        assert ledger is not None
        assert ledger.releases == 3
        assert (ledger.unit, ledger.adjacency) == (made.unit, made.adjacency)
        assert ledger.guarantee(delta=1e-5).epsilon == pytest.approx(expected.epsilon)
    said = federation.server.honest.privacy(federation.end)
    assert said["epsilon"] == said["promised_epsilon"] == expected.epsilon
    assert said["sums"] == 3
    assert said["paid_at"] == "site"


def test_a_private_result_says_so() -> None:
    result = ran(study(GLOBAL, mechanism=gaussian, noise_at="agent"))
    assert "epsilon <=" in repr(result)
    assert "per agent" in repr(result)
    assert "not private: seeded noise" in repr(result)
    assert "epsilon" not in repr(plain("region"))
    assert plain("region").privacy is not None
    assert plain("region").privacy["private"] is False  # type: ignore[index]


def test_noise_is_that_of_the_mechanism() -> None:
    # The same data with and without noise: round 0 is the same design.
    totals = [
        finished(study(GLOBAL, rounds=1, **options)).end.last
        for options in ({}, {"mechanism": gaussian, "noise_at": "agent"})
    ]
    assert isinstance(totals[0], Opened)
    assert isinstance(totals[1], Opened)
    made = gaussian(GLOBAL.numbers(2), 3)
    gap = totals[1].total - totals[0].total
    assert float(gap.norm()) > 0.3 * made.noise_std * made.dim**0.5


@pytest.mark.parametrize("mechanism", [trusted, gaussian, records])
def test_noise_at_the_server(mechanism: Any) -> None:
    federation = finished(study(GLOBAL, mechanism=mechanism, noise_at="server"))
    assert federation.end.sums == 3
    assert federation.end.ledger is not None
    assert federation.end.ledger.releases == 3
    assert all(federation.releases(name) == 0 for name in NAMES)
    assert federation.server.honest.privacy(federation.end)["epsilon"] > 0
    with pytest.raises(InputDataError, match="can not read"):
        study(GLOBAL, mechanism=mechanism, noise_at="server", channel="threshold").server(
            SQUARE, NAMES
        )


def test_the_servers_budget() -> None:
    protocol = study(GLOBAL, mechanism=gaussian, noise_at="server")
    federation = Federation(protocol)
    event = federation.server.private_sum.mechanism.event
    one = compose([event], delta=1e-5).epsilon
    honest = federation.server.honest
    poor = replace(honest.resources, ledger=Ledger(budget=Budget(1.01 * one, 1e-5)))
    federation.server.honest = replace(honest, resources=poor)
    federation.drive()
    assert federation.end.sums == 1
    assert federation.end.ledger is not None
    assert federation.end.ledger.releases == 1
    assert set(federation.counts().values()) == {6}


@pytest.mark.parametrize("channel", ["plain", "threshold"])
def test_a_sites_budget(channel: Any) -> None:
    one = compose([gaussian(2, 3).event], delta=1e-5).epsilon
    protocol = study(
        GLOBAL,
        channel=channel,
        noise_at="agent",
        mechanism=lambda dim, M: gaussian(dim, M, dropping=1),
    )
    poor = Ledger(budget=Budget(1.01 * one, 1e-5))
    federation = finished(protocol, ledgers={"bob": poor})
    assert federation.codes("bob") == {"budget"}
    assert federation.releases("bob") == 1
    assert federation.end.sums >= 2  # the others have noise enough
    assert all(federation.counts()[name] == 6 for name in ("ann", "cem"))


def test_nobody_pays_more_than_the_promise() -> None:
    lost: list[str] = []

    def absent(name: str, order: SumOrder) -> bool:
        gone = name == "bob" and named(order) == "start" and not lost
        lost.extend(["bob"] if gone else [])
        return gone

    federation = finished(
        study(
            GLOBAL,
            channel="threshold",
            noise_at="agent",
            mechanism=lambda dim, M: gaussian(dim, M, dropping=1),
        ),
        absent=absent,
    )
    assert federation.end.rekeys == 1
    assert all(federation.releases(name) <= 3 for name in NAMES)
    kept = [state.aggregation for state in federation.agent_states[::3]]
    drawn = {(one.drawn_t, one.order.epoch): one.drawn for one in kept if len(one.drawn)}
    assert not torch.equal(drawn[0, 0], drawn[0, 1])  # other noise for another roster


def test_too_few_for_the_noise_do_not_pay() -> None:
    federation = finished(
        study(GLOBAL, channel="threshold", noise_at="agent", mechanism=gaussian),
        absent=lambda name, order: name == "bob" and named(order) == "query" and order.t == 1,
    )
    assert federation.end.sums == 1
    assert all(federation.releases(name) <= 2 for name in NAMES)


def test_a_site_adds_to_no_sum_for_which_its_noise_does_not_suffice() -> None:
    """A hub that takes an agent off the roster, and one whose terms let an agent drop out."""
    grid = gaussian(GLOBAL.numbers(2), 3, dropping=1).grid
    options = {"channel": "plain", "noise_at": "agent"}
    mine = study(GLOBAL, mechanism=lambda dim, M: gaussian(dim, M, grid=grid), **options)
    federation = Federation(mine)
    shorter = ("ann", "cem")

    def lie(state: SumState, box: Outbox) -> Outbox:
        if state.t != 1:
            return box
        return replace(
            box,
            messages={name: replace(order, roster=shorter) for name, order in box.messages.items()},
        )

    federation.server.lie = lie
    federation.drive()
    assert federation.draws() == dict.fromkeys(NAMES, 2)  # in rounds 0 and 2
    assert not federation.codes("bob")  # is asked for nothing
    assert federation.codes("ann") == federation.codes("cem") == {"invalid"}
    other = Federation(mine)
    other.server.honest = study(
        GLOBAL, mechanism=lambda dim, M: gaussian(dim, M, dropping=1, grid=grid), **options
    ).server(SQUARE, NAMES)
    with pytest.raises(ProtocolError, match="refuse to begin"):
        other.drive()
    assert not any(other.draws().values())


def test_what_a_private_run_refuses() -> None:
    with pytest.raises(InputDataError, match="noise would drown"):
        study(REGION, mechanism=gaussian, noise_at="agent").server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match="Use DPFTSDE"):
        study(TransferSearch(), mechanism=gaussian, noise_at="agent").server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match="none other"):
        study(GLOBAL, mechanism=gaussian)
    with pytest.raises(InputDataError, match="none other"):
        study(GLOBAL, noise_at="agent")
    with pytest.raises(InputDataError, match="room for 10"):
        study(GLOBAL, mechanism=records, noise_at="agent", rounds=8).server(SQUARE, NAMES)
    with pytest.raises(ProtocolError, match="refuse to begin"):
        Federation(study(GLOBAL, require=Budget(9.0, 1e-3))).drive()


def test_a_site_requires_what_its_own_noise_gives() -> None:
    private = study(GLOBAL, mechanism=gaussian, noise_at="agent", noise=OSNoise())
    promise = private.server(SQUARE, NAMES).promise
    assert promise is not None
    enough = replace(private, require=Budget(promise.epsilon, promise.delta))
    assert finished(enough).end.sums == 3
    for too_little in (
        replace(private, require=Budget(0.9 * promise.epsilon, promise.delta)),
        replace(enough, noise=InsecureSeededNoise(0)),
    ):
        with pytest.raises(ProtocolError, match="refuse to begin"):
            Federation(too_little).drive()
    for lie in (
        {"epsilon": 0.5 * promise.epsilon},
        {"releases": 0, "epsilon": 1e6, "delta": 0.99},  # a promise of nothing, and then sums
        {"releases": 0, "epsilon": 0.0},
    ):
        lying = Federation(enough)
        other = replace(promise, **lie)
        lying.server.lie = lambda state, box, other=other: setups(
            box, lambda setup: replace(setup, promise=other)
        )
        with pytest.raises(ProtocolError, match="refuse to begin"):
            lying.drive()


@pytest.mark.parametrize("channel", ["plain", "threshold"])
def test_a_round_that_nobody_hears_costs_one_sum_where_some_are_done(channel: Any) -> None:
    data = {name: (X, HILLS[name](X)) for name in NAMES[:2] if len(X := uniform(6, 2))}
    federation = finished(
        study(REGION, channel=channel, rounds=8, data=data, active=NAMES[2:]),
        absent=lambda name, order: order.t == 2 and named(order) in ("query", "resend"),
    )
    assert federation.end.sums == 7
    assert federation.end.rekeys == 0
    assert [federation.sites[name].state.search.t for name in NAMES] == [6, 6, 7]


# ------------------------------------------------------------------ hostile agents


def garbage(name: str, order: SumOrder, said: Any) -> Any:
    return replace(said, data=b"garbage") if isinstance(said, Upload) and said.data else said


def wrong_type(name: str, order: SumOrder, said: Any) -> Any:
    return KeyMessage(said.data) if isinstance(said, Upload) else Upload(said.data, True)


def no_message(name: str, order: SumOrder, said: Any) -> Any:
    return b"\x00" * 40


HOSTILE = {"garbage": garbage, "type": wrong_type, "bytes": no_message}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("channel", ["plain", "ckks", "threshold"])
def test_a_hostile_agent_harms_itself(how: str, channel: Any) -> None:
    federation = finished(
        study(channel=channel),
        tamper=lambda name, order, said: (
            HOSTILE[how](name, order, said) if name == "bob" and named(order) == "start" else said
        ),
    )
    assert federation.codes("bob") == {"malformed"}
    assert federation.end.sums == 3
    assert federation.counts() == dict.fromkeys(NAMES, 6)


@pytest.mark.parametrize("channel", ["plain", "threshold"])
def test_contributions_of_another_round_epoch_or_sender(channel: Any) -> None:
    federation = Federation(study(channel=channel))
    old: dict[str, bytes] = {}

    def watch(state: SumState, inbox: Mapping[str, Any]) -> None:
        if state.stage != "query":
            return
        server = federation.server.honest
        said = {name: upload.data for name, upload in inbox.items() if upload.data is not None}
        if not said:
            return
        server.check(state, "ann", Upload(said["ann"], True))
        for sender, data in (("bob", said["ann"]), ("ann", said["ann"][:-1]), ("ann", b"")):
            with pytest.raises(MessageError):
                server.check(state, sender, Upload(data, True))
        if old:
            with pytest.raises(MessageError, match="round"):
                server.check(state, "ann", Upload(old["ann"], True))
        later = replace(state, epoch=state.epoch + 1)
        with pytest.raises(MessageError, match="epoch"):
            server.check(later, "ann", Upload(said["ann"], True))
        smaller = replace(state, roster=("bob", "cem"))
        with pytest.raises(MessageError, match="nobody asked"):
            server.check(smaller, "ann", Upload(said["ann"], True))
        with pytest.raises(MessageError, match="Expected a Upload"):
            server.check(state, "ann", KeyMessage(said["ann"]))
        old.update(said)

    federation.server.watch = watch
    federation.drive()
    assert old
    assert federation.end.sums == 3


@pytest.mark.parametrize("how", ["garbage", "longer", "another's"])
@pytest.mark.parametrize("phase", [0, 1])
def test_whose_key_does_not_fit_is_left_out(how: str, phase: int) -> None:
    def tamper(name: str, order: SumOrder, said: Any) -> Any:
        if name != "bob" or order.step != "key" or order.phase != phase:
            return said
        if how != "another's":
            return KeyMessage(b"garbage" if how == "garbage" else said.data + b"more")
        channel = federation.server.private_sum.channel
        name_of_run = federation.server.aggregation.run
        epoch, kind = Epoch(name_of_run, order.epoch, order.roster), 7 + order.phase
        body = bytes(channel._body(said.data, kind, epoch, 0, name))
        return KeyMessage(channel._frame(kind, bytes(len(body)), epoch, 0, name))

    federation = Federation(study(channel="threshold", rounds=2), tamper=tamper)
    federation.drive()
    if (how, phase) == ("another's", 1):  # nobody can tell it from an honest one
        assert federation.codes("bob") == set()
        assert all(federation.sites[name].state.search.seen is None for name in NAMES)
        assert federation.counts() == dict.fromkeys(NAMES, 5)
        return
    assert federation.codes("bob") == {"malformed"}
    assert federation.end.t == 3
    assert federation.end.sums == 2
    assert federation.end.rekeys <= 3  # lost, taken back in, and lost again
    assert federation.end.roster == ("ann", "cem")
    assert federation.counts() == dict.fromkeys(NAMES, 5)


def test_a_contribution_under_another_key_is_refused() -> None:
    def tamper(name: str, order: SumOrder, said: Any) -> Any:
        if name != "bob" or not isinstance(said, Upload) or said.data is None:
            return said
        channel = federation.server.private_sum.channel
        epoch = Epoch(federation.server.aggregation.run, order.epoch, order.roster)
        body = bytes(channel._body(said.data, 0, epoch, order.t, name))
        other = channel._frame(0, bytes(32) + body[32:], epoch, order.t, name)
        return replace(said, data=other)

    federation = Federation(study(channel="threshold"), tamper=tamper)
    federation.drive()
    assert federation.codes("bob") == {"malformed"}
    assert federation.end.sums == 3
    assert federation.end.roster == ("ann", "cem")


def test_a_key_of_any_length_is_not_read() -> None:
    federation = finished(study(channel="threshold", rounds=1))
    with pytest.raises(MessageError, match="at most"):
        federation.server.honest.check(
            federation.server.states[0], "ann", KeyMessage(bytes(MAX_KEY_BYTES + 1))
        )


# ------------------------------------------------------------------ a hostile server


LIES: dict[str, Callable[[Outbox], Outbox]] = {
    "first points": lambda box: words(box, num_initial="9"),
    "space": lambda box: words(box, space__outcome__minimize="True"),
    "search": lambda box: words(box, search__num_inducing="5", search__beta="5"),
    "channel": lambda box: channels(box, fingerprint="00" * 32),
    "strangers": lambda box: setups(box, lambda setup: replace(setup, agents=("eve", "fay"))),
    "roster": lambda box: orders(box, roster=("ann", "eve")),
    "twice": lambda box: orders(box, roster=("ann", "bob", "cem", "ann")),
    "epoch": lambda box: orders(box, epoch=-1),
    "late": lambda box: orders(box, t=MAX_ROUNDS + 1),
    "far ahead": lambda box: orders(box, t=MAX_AHEAD + 3),
    "epochs": lambda box: orders(box, epoch=25),
    "early": lambda box: orders(box, t=-1),
    "start": lambda box: orders(box, evaluate="first"),
    "query with a key": lambda box: orders(box, step="key"),
    "again": lambda box: orders(box, t=1),
    "back": lambda box: orders(box, evaluate="nothing", t=0),
    "nothing": lambda box: replace(box, broadcasts=()),
    "no setup": lambda box: replace(box, broadcasts=box.broadcasts[1:]),
    "no channel": lambda box: replace(box, broadcasts=(box.broadcasts[0], *box.broadcasts[2:])),
    "two channels": lambda box: replace(
        box, broadcasts=(*box.broadcasts, SumSetup("other", "none", "00"))
    ),
    "many": lambda box: replace(
        box, broadcasts=(*box.broadcasts, *(Keys(i, ()) for i in range(4 + BACKLOG)))
    ),
    "keys of another epoch": lambda box: replace(box, broadcasts=(*box.broadcasts, Keys(1, ()))),
    "agents": lambda box: setups(
        box, lambda setup: replace(setup, agents=(*NAMES, *(f"extra{i}" for i in range(99))))
    ),
    "size": lambda box: sums(box, lambda one: replace(one, total=one.total[:-1])),
    "shape": lambda box: sums(box, lambda one: replace(one, total=one.total.unsqueeze(0))),
    "type": lambda box: sums(box, lambda one: replace(one, total=one.total.long())),
    "nobody": lambda box: sums(box, lambda one: replace(one, members=())),
    "stranger": lambda box: sums(box, lambda one: replace(one, members=("ann", "eve"))),
    "sealed": lambda box: sums(box, lambda one: Sealed(one.t, 0, b"no sum", one.members)),
    "before": lambda box: sums(box, lambda one: replace(one, t=-1)),
    "to come": lambda box: sums(box, lambda one: replace(one, t=2)),
}
ABOUT_SUMS = ("size", "shape", "type", "nobody", "stranger", "sealed", "before", "to come")


@pytest.mark.parametrize("how", LIES)
def test_agents_refuse_a_lying_server(how: str) -> None:
    federation = Federation(study(GLOBAL if how in ABOUT_SUMS else REGION))
    lied: list[int] = []

    def lie(state: SumState, box: Outbox) -> Outbox:
        if state.t != 2:
            return box
        lied.append(state.t)
        return LIES[how](box)

    federation.server.lie = lie
    federation.drive()
    assert lied
    for name in NAMES:
        assert federation.codes(name) == {"invalid"}
    assert federation.end.t == 4
    assert federation.counts() == dict.fromkeys(NAMES, 5)  # one query less, nothing worse


def written(message: Any, **changes: Any) -> bytes:
    """A message as somebody writes it who does not keep to its limits."""
    for name, value in changes.items():
        object.__setattr__(message, name, value)
    return encode(message)


@pytest.mark.parametrize("name", ["run", "channel", "fingerprint"])
def test_names_have_limits(name: str) -> None:
    honest = SumSetup("run", "PlainChannel", "00")
    assert decode(encode(honest), SumSetup) == honest
    with pytest.raises(MessageError):
        decode(written(honest, **{name: "x" * 101}), SumSetup)


def test_support_points_of_another_dimension_are_refused() -> None:
    flat = replace(GLOBAL, support=((0.1,), (0.2,), (0.3,), (0.4,)))
    with pytest.raises(InputDataError, match="2 coordinates"):
        study(flat).server(SQUARE, NAMES)


def test_a_setup_that_does_not_fit_from_the_start() -> None:
    for how in ("first points", "space", "channel", "strangers", "search", "agents"):
        federation = Federation(study())
        federation.server.lie = lambda state, box, how=how: LIES[how](box)  # type: ignore[misc]
        with pytest.raises(ProtocolError, match="refuse to begin"):
            federation.drive()
        assert federation.counts() == dict.fromkeys(NAMES, 0)


@pytest.mark.parametrize("search", [TransferSearch(), REGION, GLOBAL, SUPPORT])
def test_a_sum_of_nonsense_does_no_harm(search: Any, caplog: Any) -> None:
    federation = Federation(study(search))

    def lie(state: SumState, box: Outbox) -> Outbox:
        noise = generator(0, "lie", state.t).normal(len(box_total(box)))
        return sums(box, lambda one: replace(one, total=1e6 * noise))

    def box_total(box: Outbox) -> Tensor:
        return next((x.total for x in box.broadcasts if isinstance(x, Opened)), torch.zeros(1))

    federation.server.lie = lie
    with caplog.at_level(logging.CRITICAL):
        federation.drive()
    assert federation.end.t == 4
    assert all(count >= 3 for count in federation.counts().values())


def test_a_second_sum_of_one_round_is_not_opened() -> None:
    shares: list[bytes | None] = []

    def listen(name: str, order: SumOrder, said: Any) -> Any:
        if order.step == "share" and order.t == 0:
            shares.append(said.data)
        return said

    federation = Federation(study(channel="threshold"), tamper=listen)
    channel = federation.server.private_sum.channel
    epoch = Epoch(federation.server.aggregation.run, 0, NAMES)
    first: list[Sealed] = []

    def lie(state: SumState, box: Outbox) -> Outbox:
        if state.stage == "share" and state.t == 0:
            first.append(next(one for one in box.broadcasts if isinstance(one, Sealed)))
        if state.stage != "query" or state.t != 1:
            return box
        body = bytearray(channel._body(first[0].total, 2, epoch, 0, ""))
        body[0] ^= 1  # another polynomial, of the server's choice
        total = channel._frame(2, bytes(body), epoch, 0, "")
        again = orders(box, step="share", evaluate="nothing", t=0, contribute=False)
        return replace(again, broadcasts=(*box.broadcasts[:3], replace(first[0], total=total)))

    federation.server.lie = lie
    federation.drive()
    assert [share is not None for share in shares] == [True] * 3 + [False] * 3
    assert federation.end.t == 4


# ------------------------------------------------------------------ settings


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(InputDataError, match="channel is one of"):
        study(channel="pigeon")
    with pytest.raises(InputDataError, match="two agents"):
        study(channel="threshold").server(SQUARE, ("ann",))
    with pytest.raises(InputDataError, match="no agents"):
        study(data={"eve": (uniform(2, 2), uniform(2, 1))}).server(SQUARE, NAMES)
    for wrong, words_of_it in (
        (lambda dim, M: gaussian(dim + 1, M), r"has 14 numbers, the grid of the channel 15"),
        (lambda dim, M: gaussian(dim, 2), "3 agents, the grid of the channel is for 2"),
        (lambda dim, M: object(), "A mechanism is"),
    ):
        with pytest.raises(InputDataError, match=words_of_it):
            study(GLOBAL, mechanism=wrong, noise_at="agent").server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match="give sums"):
        SecureSum(mechanism=gaussian, noise_at="agent")
    with pytest.raises(InputDataError, match="0 <= sums"):
        SecureSum(sums=-1)
    with pytest.raises(InputDataError, match="1 to 100"):
        SecureSum(run="")
    with pytest.raises(InputDataError, match="give horizon"):
        studies.Federation(budget=5, search=REGION, aggregation=SecureSum()).server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match="rounds in order"):
        SecureSum(releases=(3, 1))
    with pytest.raises(InputDataError, match="TransferRows reads the message of each agent"):
        studies.Federation(
            budget=5, search=TransferRows(), aggregation=SecureSum(channel="plain")
        ).server(SQUARE, NAMES)


def test_what_agents_know_already_is_used() -> None:
    X = uniform(5, 2, seed=3)
    given = {"bob": (X, HILLS["bob"](X))}
    federation = finished(study(SUPPORT, data=given))  # type: ignore[arg-type]
    assert federation.counts() == {"ann": 6, "bob": 8, "cem": 6}
    assert torch.equal(federation.sites["bob"].state.X[:5], X)


@pytest.mark.parametrize("which", SEARCHES)
def test_the_initial_design_comes_first(which: str) -> None:
    """Of the design alone is the first sum: the queries that follow it differ, the design not."""
    design = torch.cat([torch.full((1, 2), 0.5).double(), uniform(1, 2, seed=7)])
    X = uniform(5, 2, seed=3)
    given = {"bob": (X, HILLS["bob"](X))}
    protocol = study(SEARCHES[which], initial_design=design, data=given)
    federation = finished(protocol)
    assert federation.server.honest.terms.num_initial == 2
    assert federation.counts() == {"ann": 5, "bob": 10, "cem": 5}  # what it knows, and the design
    for name, site in federation.sites.items():
        own = site.state.X[5:] if name == "bob" else site.state.X
        assert torch.equal(own[:2], design)
        assert not bool((own[2:] == design[0]).all(dim=-1).any())
    assert federation.server.states[-1].last is not None


def test_a_design_is_snapped_and_takes_the_room_it_needs() -> None:
    square = SearchSpace((Parameter.integer("k", 1, 4), Parameter.real("x", 0.0, 1.0)))
    centre = torch.full((1, 2), 0.5).double()
    agents = dict.fromkeys(NAMES, lambda X: X.sum(dim=-1, keepdim=True))
    protocol = study(rounds=1, initial_design=centre)
    result = run(protocol, agents, space=square, seed=1, progress=False)
    first = result.history("ann")[0][:1]
    assert torch.equal(first, square.snap(centre))
    assert not torch.equal(first, centre)
    wide = study(rounds=3, initial_design=uniform(100, 2))
    server = wide.server(SQUARE, NAMES)
    found = server.terms.aggregation.private_sum(server.hub)
    assert found.channel.grid.bound == REGION.largest(103)
    with pytest.raises(InputDataError, match="up to 11 records, the mechanism has room for 10"):
        study(SUPPORT, mechanism=records, noise_at="agent", initial_design=uniform(8, 2)).server(
            SQUARE, NAMES
        )
    with pytest.raises(InputDataError, match="initial_design must be `n x 2` points"):
        finished(study(initial_design=uniform(3, 1)))


@pytest.mark.parametrize("channel", ["plain", "threshold"])
def test_designs_by_name(channel: Any) -> None:
    designs = spread_design(SQUARE, NAMES, 2)
    federation = finished(study(initial_design=designs, channel=channel))
    for name, site in federation.sites.items():
        assert torch.equal(site.state.X[:2], designs[name])
    assert federation.counts() == dict.fromkeys(NAMES, 5)
    with pytest.raises(InputDataError, match=r"one design for each agent.*dee"):
        finished(study(initial_design={**designs, "dee": uniform(2, 2)}))
    with pytest.raises(InputDataError, match="same length"):
        finished(study(initial_design={**designs, "ann": uniform(1, 2)}))


def test_a_stored_state_is_not_continued_under_another_design() -> None:
    designs = (None, uniform(3, 2), uniform(3, 2, seed=5))
    prints = set()
    for design in designs:
        protocol = study(initial_design=design)
        protocol.server(SQUARE, NAMES)
        prints.add(protocol.agent("ann", SQUARE, 1, MemoryBlobs()).fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize("which", SEARCHES)
def test_candidates_are_the_only_points(which: str) -> None:
    candidates = uniform(20, 2, seed=8)
    federation = finished(study(SEARCHES[which], candidates=candidates))
    for site in federation.sites.values():
        X = site.state.X
        assert all(bool((candidates == x).all(dim=-1).any()) for x in X)
        if which == "region":
            queries = X[3:]
            assert float(torch.cdist(queries, X[:3]).min()) > 0
            assert float(torch.pdist(queries).min()) > 0


def test_two_studies_in_one_process_do_not_mix() -> None:
    first = trace(ran(study()))
    shifted = {name: Hill(0.7) for name in NAMES}
    run(study(), shifted, space=SQUARE, seed=1, progress=False)
    assert trace(ran(study())) == first == trace(plain("region"))


def test_a_study_made_from_another_is_its_own() -> None:
    """What one study has worked out is of no use to one with other settings."""
    plain = study(GLOBAL)
    first = ran(plain)
    assert ran(replace(plain, channel="threshold")).privacy["channel"] != first.privacy["channel"]
    noisy = replace(plain, mechanism=gaussian, noise_at="agent")
    assert "epsilon" in ran(noisy).privacy
    assert trace(ran(noisy)) != trace(first)


@pytest.mark.parametrize("search", [TransferSearch(), GLOBAL, REGION])
def test_a_sum_under_one_key_that_nobody_can_open_is_left_out(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent encrypts numbers beyond the grid, once."""
    honest, limbs = FederatedAgent.reply, CKKSChannel._limbs

    def reply(self: FederatedAgent, state: Any) -> Any:
        if self.name != "cem" or state.order.t != 1:
            return honest(self, state)
        with monkeypatch.context() as patch:
            patch.setattr(
                CKKSChannel, "_limbs", lambda c, i: [[2.0**45] * len(p) for p in limbs(c, i)]
            )
            return honest(self, state)

    monkeypatch.setattr(FederatedAgent, "reply", reply)
    federation = Federation(study(search, channel="ckks", rounds=4))
    federation.drive()
    undisturbed = Federation(study(search, channel="ckks", rounds=4))
    monkeypatch.setattr(FederatedAgent, "reply", honest)
    undisturbed.drive()
    assert federation.counts() == undisturbed.counts()  # everybody has gone on
    assert federation.end.sums == undisturbed.end.sums


def test_a_server_can_be_driven_twice() -> None:
    first = finished(study(GLOBAL, channel="threshold"))
    second = Federation(study(GLOBAL, channel="threshold"))
    second.server.honest = first.server.honest
    second.drive()
    assert second.end.sums == first.end.sums


def test_designs_lie_among_the_candidates() -> None:
    candidates = uniform(20, 2, seed=8)
    design = spread_design(SQUARE, NAMES, 3)
    with pytest.raises(InputDataError, match="no candidates"):
        ran(study(GLOBAL, candidates=candidates, initial_design=design))
    fitting = spread_design(SQUARE, NAMES, 3, candidates=candidates)
    result = ran(study(GLOBAL, candidates=candidates, initial_design=fitting))
    known = candidates.tolist()
    assert all(row["x"] in known for row in result.records)
