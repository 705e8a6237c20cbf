"""Attacks of a dishonest hub over the real protocol: rosters, rounds and who is said to be lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.aggregation.sum_messages import DecryptionShare, Sealed, SumState, Upload
from botorch_fed.federation.base import Outbox
from botorch_fed.privacy.channels import IDENTITY, Epoch, identity
from botorch_fed.search.transfer import TransferSearch
from test.aggregation.harness import NAMES, SQUARE, Federation, named, orders, study

ONE = TransferSearch()


def contributions(federation: Federation, t: int) -> dict[int, set[str]]:
    """Who has contributed to a round, by epoch."""
    found: dict[int, set[str]] = {}
    for state, inbox in zip(federation.server.states, federation.server.inboxes, strict=True):
        if state.t == t and state.stage in ("query", "resend"):
            given = {
                name
                for name, said in inbox.items()
                if isinstance(said, Upload) and said.data is not None
            }
            if given:
                found[state.epoch] = found.get(state.epoch, set()) | given
    return found


class Hub:
    """A hub that takes another turn, once, and keeps to the protocol otherwise."""

    def __init__(self, federation: Federation, when: Any, turn: Any) -> None:
        self.federation, self.when, self.turn = federation, when, turn
        self.turned = 0
        self.honest = federation.server.honest.step
        federation.server.step = self.step  # type: ignore[method-assign]

    def step(self, state: SumState, inbox: Mapping[str, Any]) -> SumState:
        server = self.federation.server
        server.states.append(state)
        server.inboxes.append(dict(inbox))
        after: SumState = self.honest(state, inbox)
        if not self.turned and self.when(state, after):
            self.turned += 1
            return self.turn(state, after)
        return after


def rekeyed(state: SumState, after: SumState) -> SumState:
    """The same round once more, without bob, "who never answered"."""
    return replace(
        state,
        epoch=state.epoch + 1,
        roster=("ann", "cem"),
        lost=("bob",),
        keys=(),
        stage="key",
        interrupted=True,
        closed=None,
    )


def test_a_round_is_not_opened_with_two_rosters() -> None:
    """D: the difference of both sums was bob's contribution, to 4e-11 of his inputs."""
    federation = Federation(study(ONE, channel="threshold", rounds=4, rejoin=False))
    hub = Hub(federation, lambda state, after: state.stage == "share" and state.t == 1, rekeyed)
    federation.drive()
    assert hub.turned == 1
    assert contributions(federation, 1) == {0: set(NAMES)}
    for name in ("ann", "cem"):
        assert federation.codes(name) == {"invalid"}  # they were asked, and have refused
    # The others are asked no more than the next rounds, and those go on.
    assert federation.end.t == 5
    sealed = [one.last for one in federation.server.states if one.last is not None]
    assert {(one.t, one.epoch) for one in sealed if one.t == 1} <= {(1, 0)}


def test_a_second_sum_of_the_same_data_is_no_next_round() -> None:
    """The next round without an evaluation: the others' data are the same as before."""
    federation = Federation(study(ONE, channel="threshold", rounds=4, rejoin=False))

    def turn(state: SumState, after: SumState) -> SumState:
        return replace(rekeyed(state, after), t=state.t + 1)

    hub = Hub(federation, lambda state, after: state.stage == "share" and state.t == 1, turn)
    federation.drive()
    assert hub.turned == 1
    assert contributions(federation, 1) == {0: set(NAMES)}
    assert 1 not in contributions(federation, 2)  # the epoch that the hub has begun
    assert {"invalid"} <= federation.codes("ann")


def test_an_interrupted_round_may_be_repeated() -> None:
    """Before anybody has sent a share: with masks of their own, the first try never opens."""
    federation = Federation(study(ONE, channel="threshold", rounds=4, rejoin=False))
    hub = Hub(federation, lambda state, after: state.stage == "query" and state.t == 1, rekeyed)
    federation.drive()
    assert hub.turned == 1
    assert contributions(federation, 1) == {0: set(NAMES), 1: {"ann", "cem"}}
    asked = [(state.t, state.epoch) for state in federation.server.states if state.stage == "share"]
    assert (1, 0) not in asked
    assert (1, 1) in asked
    channel = federation.server.private_sum.channel
    run = federation.server.aggregation.run
    handles = [channel.handle(Epoch(run, number, NAMES), "ann") for number in (0, 1)]
    kept = federation.stores["ann"].names()
    assert not any(name.startswith(handles[0]) for name in kept)  # the key of its mask is gone


def test_the_shares_of_a_round_end_it_for_who_has_sent_them() -> None:
    """Honestly: bob's share is lost, the others' are sent, and the hub goes to the next round."""
    federation = Federation(
        study(ONE, channel="threshold", rounds=4, rejoin=False),
        absent=lambda name, order: name == "bob" and order.step == "share" and order.t == 1,
    )
    federation.drive()
    assert contributions(federation, 1) == {0: set(NAMES)}
    assert contributions(federation, 2) == {1: {"ann", "cem"}}
    assert federation.end.sums == 3
    assert federation.counts() == {"ann": 7, "bob": 7, "cem": 7}
    assert not federation.codes("ann")


@pytest.mark.parametrize(("least", "good"), [(None, True), (3, False)])
def test_a_site_adds_to_no_sum_of_too_few(least: int | None, good: bool) -> None:
    """Half of the agents by default: the hub cannot take a victim and an accomplice."""
    names = (*NAMES, "dee")
    made = SecureSum(channel="threshold", min_agents=least, rejoin=False)
    federation = Federation(study(ONE, rounds=3, aggregation=made), names=names)

    def turn(state: SumState, after: SumState) -> SumState:
        return replace(rekeyed(state, after), lost=("bob", "dee"))

    Hub(federation, lambda state, after: state.stage == "query" and state.t == 1, turn)
    federation.drive()
    found = contributions(federation, 1)
    assert found[0] == set(names)
    assert (1 in found) == good
    assert federation.codes("ann") == (set() if good else {"invalid"})


def test_the_hub_has_no_sum(caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(study(ONE, channel="threshold", rounds=3))
    federation.drive()
    assert federation.end.sums == 3
    channel = federation.server.private_sum.channel
    store = federation.server.honest.resources.secrets
    run = federation.server.aggregation.run
    for state in federation.server.states:
        if not isinstance(state.last, Sealed):
            assert state.last is None
            continue
        epoch = Epoch(run, state.last.epoch, state.last.members)
        at = {"epoch": epoch, "round": state.last.t}
        opened = channel.open(state.last.total, {}, **at, secrets=federation.stores["bob"])
        assert opened.count_nonzero()
        with pytest.raises(Exception, match="not in the store"):
            channel.open(state.last.total, {}, **at, secrets=store)
        values = channel.grid.to_values(opened).numpy().tobytes()
        assert all(values[start : start + 16] not in state.last.total for start in (0, 80, 160))


def test_who_is_left_out_notes_it(caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(study(ONE, channel="threshold", rounds=4, rejoin=False))
    Hub(federation, lambda state, after: state.stage == "query" and state.t == 1, rekeyed)
    federation.drive()
    assert "agent 'bob' was left out of epoch 1 by the hub" in caplog.text


def test_an_impostor_takes_no_place() -> None:
    """The hub answers for bob with an identity of its own."""
    federation = Federation(study(ONE, channel="threshold", rounds=3))
    names = {name: identity(store) for name, store in federation.stores.items()}
    fixed = SecureSum(channel="threshold", identities=tuple(names.items()), rejoin=False)
    known = Federation(study(ONE, rounds=3, aggregation=fixed))
    for name, store in federation.stores.items():
        if name != "bob":
            known.stores[name].put(IDENTITY, store.get(IDENTITY) or b"")
    known.drive()
    assert known.end.lost == ("bob",)
    assert known.end.roster == ("ann", "cem")
    assert known.end.sums == 3


@pytest.mark.parametrize("who", ["bob", "hub"])
def test_any_sum_costs_one_round_at_most(who: str) -> None:
    """A share that is none, or another sum than the agents have opened: no sum, and on it goes."""

    def tamper(name: str, order: Any, said: Any) -> Any:
        if who == "hub" or name != "bob" or order.t != 1 or not isinstance(said, DecryptionShare):
            return said
        channel = federation.server.private_sum.channel
        epoch = Epoch(federation.server.aggregation.run, order.epoch, order.roster)
        body = bytearray(channel._body(said.data, 3, epoch, order.t, name))
        body[40:44] = bytes([body[40] ^ 1, *body[41:44]])
        return DecryptionShare(channel._frame(3, bytes(body), epoch, order.t, name))

    def lie(state: SumState, box: Outbox) -> Outbox:
        def other(found: Any) -> Any:
            if not isinstance(found, Sealed) or found.t != 1 or state.stage == "share":
                return found
            channel = federation.server.private_sum.channel
            epoch = Epoch(federation.server.aggregation.run, found.epoch, found.members)
            body = bytearray(channel._body(found.total, 6, epoch, 1, ""))
            body[40:44] = bytes([body[40] ^ 1, *body[41:44]])
            return replace(found, total=channel._frame(6, bytes(body), epoch, 1, ""))

        return replace(box, broadcasts=tuple(map(other, box.broadcasts)))

    federation = Federation(study(ONE, channel="threshold", rounds=4), tamper=tamper)
    if who == "hub":
        federation.server.lie = lie
    federation.drive()
    assert federation.end.sums == 4  # the hub cannot tell
    assert federation.counts() == dict.fromkeys(NAMES, 7)
    newest = {name: federation.memory(name).newest for name in NAMES}
    assert all(found is not None and found.t == 3 for found in newest.values())
    totals = [found.total for found in newest.values() if found is not None]
    assert all(total is not None and torch.equal(total, totals[0]) for total in totals)
    assert all(federation.codes(name) == set() for name in NAMES)


def test_too_many_shares_are_not_given() -> None:
    """The flooding is for so many sums: the site counts them, whatever the hub counts."""
    federation = Federation(study(ONE, channel="threshold", rounds=4, sums=2))
    honest = replace(federation.server.honest.terms.aggregation, sums=2)
    assert honest.planned == 2

    def lie(state: SumState, box: Outbox) -> Outbox:
        query = state.stage == "query" and state.t in (2, 3)
        return orders(box, contribute=True) if query else box

    federation.server.lie = lie
    federation.drive()
    assert all(federation.memory(name).shared == 2 for name in NAMES)
    assert federation.counts() == dict.fromkeys(NAMES, 7)
    late = [
        said
        for state, inbox in zip(federation.server.states, federation.server.inboxes, strict=True)
        for said in inbox.values()
        if state.t > 1 and isinstance(said, Upload)
    ]
    assert late
    assert all(said.data is None for said in late)


def test_a_plan_says_what_is_assumed() -> None:
    made = study(ONE, channel="threshold", rounds=3)
    said = made.sees(SQUARE, NAMES)
    assert said.trust.startswith("The server is trusted with neither contributions nor sums")
    text = " ".join(said.limits)
    assert "shares of 1,024 openings tell 2^-40" in text
    assert "accepted at first use" in text
    opened = study(ONE, rounds=3, aggregation=SecureSum(opened_by="server"))
    assert "trusted with the sums" in opened.sees(SQUARE, NAMES).trust
    keys = tuple((name, f"{place:064x}") for place, name in enumerate(NAMES))
    fixed = study(ONE, rounds=3, aggregation=SecureSum(identities=keys))
    assert "first use" not in " ".join(fixed.sees(SQUARE, NAMES).limits)
    assert "transport" not in fixed.sees(SQUARE, NAMES).trust


def test_steps_have_names() -> None:
    federation = Federation(study(ONE, channel="threshold", rounds=2))
    federation.drive()
    steps = [{named(order) for order in asked.values()} for asked in federation.orders]
    assert steps == [{"key0"}, {"key1"}, {"start"}, {"share"}, {"query"}, {"share"}, {"query"}]
