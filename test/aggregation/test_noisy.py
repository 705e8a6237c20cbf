"""Noisy sums: what is released, what it costs, and what server and sites refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

from botorch_fed.acquisition import (
    Partition,
    SoftmaxSchedule,
    exploration_weights,
)
from botorch_fed.aggregation.noisy import (
    MAX_NOISE,
    NoisyState,
    NoisySum,
    default_delta,
    trimmed_means,
)
from botorch_fed.aggregation.relay import Relay
from botorch_fed.errors import BudgetExceeded, MessageError
from botorch_fed.federation.agent import FederatedAgent
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.terms import (
    MAX_WEIGHT,
    Contribution,
    Order,
    Resources,
    Search,
    Terms,
    View,
)
from botorch_fed.privacy import (
    Budget,
    DistributedGaussianSum,
    Event,
    FixedSizeSampling,
    Ledger,
    PoissonSampling,
    SharedLedger,
    clip,
)
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise
from botorch_fed.search.messages import TransferRows
from botorch_fed.search.noisy import NoisyTransfer
from botorch_fed.search.released import ReleaseMessage, ReleaseSearch
from botorch_fed.search.releases import Noisy
from botorch_fed.search.support import SupportSearch
from botorch_fed.studies import DPFTSDE, FedGP, PrivateUCB
from botorch_fed.wire.codec import decode, encode
from test.cases import normal, uniform
from test.federation.dp import FOLLOW, NAMES, PHI, SQUARE, M, plan_of, put, quiet, server, terms

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

QUERY = Order(1, "next", False)


def agent_of(boss: FederatedServer, name: str = "ann", **options: Any) -> FederatedAgent:
    """A site with the server's terms, that does not know its roster or its promise."""
    own = replace(boss.terms, agents=())
    resources = Resources(noise=boss.resources.noise)
    return FederatedAgent(
        **{"name": name, "terms": own, "seed": 0, "resources": resources, **options}
    )


def accepts(
    agent: FederatedAgent, boss: FederatedServer, order: Order, *released: Any, **promised: Any
) -> None:
    """Check a request as the site does."""
    setup = boss.hub.terms.setup
    agent.check(agent.start(), order, put(agent, replace(setup, **promised), *released))


def released(state: NoisyState) -> Noisy:
    assert state.released is not None
    return state.released


# ------------------------------------------------------------------ what is released


@pytest.mark.parametrize("noise_kind", ["correlated", "tight", "paper", "none"])
@pytest.mark.parametrize("P", [1, 2, 4])
def test_a_release_is_the_rosters_weighted_sum_of_clipped_messages(noise_kind: str, P: int) -> None:
    names = tuple("abcdefg")
    z = None if noise_kind == "none" else 1.0
    boss = server(P, names, noise_kind=noise_kind, noise_multiplier=z)
    state = boss.start()
    regions = Partition.regular(P, 2).assign(7)
    for t in range(4):
        messages = torch.linspace(0.1, 3, 7).double().unsqueeze(-1) * normal(7, M, seed=t)
        messages[3] = 0
        present = [i for i in range(7) if i != t]  # somebody is missing in every round
        silent = {"g": Contribution(None)} if t == 1 else {}  # and one has no data
        inbox = {names[i]: Contribution(messages[i]) for i in present} | silent
        state = boss.step(state, inbox)
        clean = torch.stack([clip(row, 1.0) for row in messages])
        clean[t] = 0
        if t == 1:
            clean[6] = 0
        contrast = SoftmaxSchedule(3.0, plateau=0, decay=3)(t + 1)
        weights = exploration_weights(regions, P, contrast)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(P).double())
        assert (released(state).made, released(state).num_agents) == (t, 7)
        step = 0.0 if z is None else 1e-5 * float(plan_of(boss).mechanism(t).noise_std.max())
        error = (released(state).values - weights @ clean).abs().max()
        assert float(error) <= step + 1e-12
    assert contrast == 0
    if noise_kind != "none" and P > 1:
        rows = released(state).values
        assert float((rows - rows[:1]).abs().max()) <= 2 * step  # equal weights at the end


@pytest.mark.parametrize("P", [1, 2, 4, 64])
def test_up_to_64_regions(P: int) -> None:
    names = tuple(f"agent{n}" for n in range(64))
    boss = server(P, names, noise=InsecureSeededNoise(0))
    inbox = {name: Contribution(normal(M, seed=n)) for n, name in enumerate(names)}
    state = boss.step(boss.start(), inbox)
    assert released(state).values.shape == (P, M)
    assert len(state.signal[0]) == P
    box = boss.outbox(state)
    assert box is not None
    agent = agent_of(boss, "agent5")
    blobs = put(agent, *box.broadcasts)
    agent.check(agent.start(), QUERY, blobs)
    point = agent.ask(agent.receive(agent.start(), QUERY, blobs))
    assert isinstance(point, Tensor)
    assert point.shape == (1, 2)


def test_more_regions_than_agents_are_refused_before_anybody_evaluates() -> None:
    with pytest.raises(InputDataError, match="at most as many regions as agents"):
        server(4)
    server(4, noise_kind="tight")  # the regions without agents weigh all equally


@pytest.mark.parametrize("contrast", [0.0, 1.0, 15.0])
@pytest.mark.parametrize("P", [1, 2, 4])
def test_noise_is_as_documented(P: int, contrast: float) -> None:
    names, c, z, q = tuple(f"agent{n}" for n in range(30)), 5.5, 1.7, 0.35
    options: dict[str, Any] = {
        "clip_norm": c,
        "noise_multiplier": z,
        "sampling": PoissonSampling(q),
        "exploration": SoftmaxSchedule(contrast),
    }
    weights = exploration_weights(Partition.regular(P, 2).assign(30), P, contrast)
    expected = {
        "correlated": z * c / q * weights.amax(dim=-1),
        "tight": z * c / q * weights.norm(dim=0).max().expand(P),
        "paper": z * c / q * weights.max().expand(P) * math.sqrt(P),
    }
    for kind, std in expected.items():
        plan = plan_of(server(P, names, noise_kind=kind, **options))
        torch.testing.assert_close(plan.mechanism(0).noise_std, std, rtol=1e-3, atol=0)
        assert plan.event == Event(z, q)


@pytest.mark.parametrize("kind", ["correlated", "tight", "paper"])
def test_noise_is_there_in_every_round_and_independent(kind: str) -> None:
    """Also where nobody sends anything, which an agent might otherwise learn."""
    first, second = [], []
    for seed in range(300):
        boss = server(2, noise_kind=kind, noise=InsecureSeededNoise(seed))
        one = boss.step(boss.start(), {})
        two = boss.step(one, {})
        first.append(released(one).values)
        second.append(released(two).values)
    std = [plan_of(boss).mechanism(t).noise_std.unsqueeze(-1) for t in (0, 1)]
    a, b = torch.stack(first) / std[0], torch.stack(second) / std[1]
    error = 5 / (300 * M) ** 0.5
    for part in (a, b):
        assert float((part.square().mean(dim=(0, 2)) - 1).abs().max()) < error * 2**0.5
    assert abs(float((a * b).mean())) < error


def test_the_noise_that_agents_know_is_what_was_added() -> None:
    search = NoisyTransfer(clip_norm=2.0, min_reliability=0.0)
    found = []
    for seed in range(300):
        boss = server(search=search, noise=InsecureSeededNoise(seed), noise_multiplier=1.3)
        state = boss.step(boss.start(), {})
        assert torch.equal(released(state).noise_std, plan_of(boss).mechanism(0).noise_std)
        found.append(released(state).values / released(state).noise_std)
    error = 5 * (2 / (300 * M)) ** 0.5
    assert float(torch.stack(found).square().mean()) == pytest.approx(1.0, abs=error)
    plain = server(search=search, noise_multiplier=None)
    assert torch.equal(released(plain.step(plain.start(), {})).noise_std, torch.zeros(1).double())


def test_releases_stay_within_what_agents_accept() -> None:
    boss = server(clip_norm=MAX_WEIGHT, noise_multiplier=50.0, noise=OSNoise())
    state = boss.step(boss.start(), {})
    assert float(released(state).values.abs().max()) == MAX_WEIGHT
    accepts(agent_of(boss), boss, QUERY, released(state))


def test_a_hostile_site_moves_a_release_by_its_share() -> None:
    """Whatever it sends: from minus to plus its bound."""
    names = tuple(f"agent{n}" for n in range(10))
    boss = server(1, names, search=NoisyTransfer(clip_norm=0.7, min_reliability=0.0))
    messages = {name: Contribution(normal(M, seed=n)) for n, name in enumerate(names)}
    releases = []
    for hostile in (None, 1e5 * normal(M, seed=99), -1e5 * normal(M, seed=99)):
        state = boss.step(boss.start(), {**messages, "agent3": Contribution(hostile)})
        releases.append(released(state).values[0])
    without, plus, minus = releases
    mechanism = plan_of(boss).mechanism(0)
    step = 1e-5 * M**0.5 * float(mechanism.noise_std)
    assert float((plus - without).norm()) == pytest.approx(0.07, abs=step)
    assert float((plus - minus).norm()) == pytest.approx(0.14, abs=step)
    assert mechanism.sensitivity == pytest.approx(0.7)


@pytest.mark.parametrize("z", [None, 1.0])
def test_a_huge_message_counts_as_much_as_any_other(z: float | None) -> None:
    boss = server(noise_multiplier=z)
    huge = Contribution(torch.full((M,), 1e308, dtype=torch.float64))
    boss.check(boss.start(), "bob", huge)
    state = boss.step(boss.start(), {"bob": huge})
    assert float(released(state).values.norm()) == pytest.approx(1 / 3, rel=1e-4)


def test_a_trimmed_mean_is_the_weighted_mean_of_what_is_left() -> None:
    vectors, weights = normal(7, 5, seed=1), uniform(3, 7, seed=2)
    found = trimmed_means(vectors, weights, trim=2)
    for p in range(3):
        for m in range(5):
            kept = sorted(range(7), key=lambda n: float(vectors[n, m]))[2:5]
            share = weights[p, kept] / weights[p, kept].sum()
            assert torch.allclose(found[p, m], (share * vectors[kept, m]).sum())
    assert torch.allclose(
        trimmed_means(vectors, weights, trim=0),
        weights @ vectors / weights.sum(dim=-1, keepdim=True),
    )
    alone = torch.zeros(3, 7).double()
    alone[:, int(vectors[:, 0].argmax())] = 1.0  # all weight is left out
    assert bool(trimmed_means(vectors, alone, trim=2).isfinite().all())


# ------------------------------------------------------------------ rounds


def test_rounds_and_who_is_asked() -> None:
    boss = server(releases=(0, 2), rounds=3, active=("ann",), num_initial=0)
    state, asked = boss.start(), []
    while (box := boss.outbox(state)) is not None:
        asked.append({name: (o.t, o.evaluate, o.contribute) for name, o in box.messages.items()})
        state = boss.step(state, {})
    rest = dict.fromkeys(("bob", "cem"), (0, "nothing", True))
    assert asked == [
        {"ann": (0, "first", True), **rest},
        {"ann": (1, "next", False)},
        {"ann": (2, "next", True), **{name: (2, *order[1:]) for name, order in rest.items()}},
        {"ann": (3, "next", False)},
    ]


def test_the_rounds_are_what_the_budget_leaves() -> None:
    for q, rounds in ((1, 4), (3, 2)):
        given = replace(terms(rounds=None, releases="all"), q=q)
        assert given.aggregation.plan(given).rounds == rounds
        assert given.aggregation.plan(given).releases == tuple(range(rounds))
    assert plan_of(server(releases=(0, 3, 4, 9))).releases == (0, 3)


def test_a_state_survives_the_codec() -> None:
    boss = server(2, releases=(0, 2))
    state = decode(encode(boss.start()), NoisyState)
    for _ in range(5):
        box = boss.outbox(state)
        assert box is not None
        for blob in box.broadcasts:
            assert encode(decode(encode(blob), type(blob))) == encode(blob)
        state = decode(encode(boss.step(state, {})), NoisyState)
    assert boss.outbox(state) is None
    many = replace(state, signal=torch.ones(10_000, 64).double())  # of a long run
    data = encode(many, max_bytes=2**24)
    assert torch.equal(decode(data, NoisyState, max_bytes=2**24).signal, many.signal)


def test_agents_are_told_until_they_switch_to_local() -> None:
    boss = server(switch_to_local_after=2, releases=(0, 1))
    state, told = boss.start(), []
    while (box := boss.outbox(state)) is not None:
        told.append(len(box.broadcasts) - 1)
        state = boss.step(state, {})
    assert told == [0, 1, 1, 0, 0]
    with pytest.raises(InputDataError, match="stop listening after round 1"):
        server(switch_to_local_after=1, releases=(0, 1))


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_never_arrive(value: float) -> None:
    weights = torch.full((M,), value).double()
    with pytest.raises(MessageError, match="finite"):
        encode(Contribution(weights))
    boss = server()
    with pytest.raises(MessageError, match="not finite"):
        boss.check(boss.start(), "bob", Contribution(weights))


def test_an_exhausted_server_asks_for_nothing() -> None:
    boss = server()
    exhausted = replace(boss.start(), exhausted=True)
    with pytest.raises(MessageError, match="reply without a message"):
        boss.check(exhausted, "bob", Contribution(torch.ones(M).double()))


def test_orders_that_a_site_refuses() -> None:
    boss = server(releases=(0, 2))
    agent = agent_of(boss)
    blobs = put(agent, boss.hub.terms.setup)
    accepts(agent, boss, Order(0, "first", True))
    with pytest.raises(MessageError, match="First points are asked for in round 0"):
        accepts(agent, boss, Order(1, "first", False))
    state = agent.receive(agent.start(), Order(0, "first", True), blobs)
    for order, why in (
        (Order(0, "first", True), "1 times first points in a run, the hub asks for number 2"),
        (Order(0, "next", True), "a round after 0, got round 0"),
        (Order(10_001, "next", False), r"rounds of the terms are 0\.\.7, got 10001"),
        (Order(1, "next", True), r"in the rounds \(0, 2\), got an order for round 1"),
    ):
        with pytest.raises(MessageError, match=why):
            agent.check(state, order, blobs)
    agent.check(state, Order(2, "next", True), blobs)
    other = put(agent, replace(boss.hub.terms.setup, promise=None))
    with pytest.raises(MessageError, match="changed during the run"):
        agent.check(state, Order(1, "next", False), other)


def test_releases_that_a_site_refuses() -> None:
    boss = server()
    agent = agent_of(boss)
    good = quiet(normal(1, M))
    accepts(agent, boss, QUERY, good)
    for values in (normal(2, M), normal(1, M - 1), 1e7 * normal(1, M), torch.ones(1, M).long()):
        with pytest.raises(MessageError, match="A release"):
            accepts(agent, boss, QUERY, quiet(values))
    for noise in (-1.0, 10 * MAX_NOISE):
        with pytest.raises(MessageError, match="noise"):
            accepts(agent, boss, QUERY, replace(good, noise_std=noise * torch.ones(1).double()))
    with pytest.raises(MessageError, match="a release of 3 agents, got one of 30"):
        accepts(agent, boss, QUERY, replace(good, num_agents=30))
    with pytest.raises(MessageError, match="Expected one release, got 2"):
        accepts(agent, boss, QUERY, good, replace(good, made=1))
    with pytest.raises(MessageError):
        accepts(agent, boss, QUERY, boss.hub.terms.setup)  # no release at all
    for bad in ({"made": -1}, {"num_agents": 0}, {"num_agents": math.inf},
                {"noise_std": torch.ones(2).double()}):  # fmt: skip
        with pytest.raises(InputDataError, match="Expected"):
            replace(good, **bad)


def test_promises_that_a_site_refuses() -> None:
    boss = server(noise=OSNoise())
    good = boss.hub.terms.promise
    assert good is not None
    agent = agent_of(boss, require=Budget(2 * good.epsilon, 2 * good.delta))
    start = Order(0, "first", True)
    accepts(agent, boss, start, promise=good)
    accepts(agent, boss, start, promise=replace(good, epsilon=good.epsilon * (1 + 1e-12)))
    for promise, why in (
        (None, "differ in promise: .* the hub no promise"),
        (replace(good, private=False), "comes from a seed"),
        (replace(good, epsilon=3 * good.epsilon), r"differ in promise\.epsilon"),
        (replace(good, epsilon=0.9 * good.epsilon), r"differ in promise\.epsilon"),
        (replace(good, delta=3 * good.delta), r"differ in promise\.delta"),
        (replace(good, delta=0.9 * good.delta), r"differ in promise\.delta"),
        (replace(good, releases=good.releases + 1), r"differ in promise\.releases"),
        (replace(good, unit="record"), r"differ in promise\.unit"),
    ):
        with pytest.raises(MessageError, match=why):
            accepts(agent, boss, start, promise=promise)
    for less in (Budget(0.9 * good.epsilon, good.delta), Budget(good.epsilon, 0.5 * good.delta)):
        with pytest.raises(MessageError, match=r"promises \(.*, 0\.01\)"):
            accepts(replace(agent, require=less), boss, start, promise=good)
    careful = replace(agent, adjacency="replace-one")
    with pytest.raises(MessageError, match="the hub promises zero-out"):
        accepts(careful, boss, start, promise=good)


# ------------------------------------------------------------------ what it costs


def test_a_plan_beyond_its_budget_is_refused_at_once() -> None:
    promise = server().promise
    assert promise is not None
    enough = Budget(promise.epsilon, promise.delta)
    server(ledger=Ledger(budget=enough))
    with pytest.raises(BudgetExceeded, match="the budget is"):
        server(ledger=Ledger(budget=replace(enough, epsilon=0.99 * promise.epsilon)))
    paid = Ledger(budget=enough).spend(Event(1.0), note="pilot")
    with pytest.raises(BudgetExceeded):
        server(ledger=paid)
    shorter = server(ledger=paid, releases=(0, 1, 2))
    account = shorter.privacy(shorter.start())
    assert account is not None
    assert account["releases"] == 1  # the pilot's


def test_the_promise_is_monotone() -> None:
    def promised(z: float, q: float, releases: int, **options: Any) -> float:
        boss = server(
            rounds=9,
            releases=tuple(range(releases)),
            noise_multiplier=z,
            sampling=PoissonSampling(q),
            delta=0.01,
            **options,
        )
        assert boss.promise is not None
        return boss.promise.epsilon

    base = promised(1.0, 0.5, 4)
    assert promised(1.2, 0.5, 4) < base < promised(0.8, 0.5, 4)
    assert promised(1.0, 0.4, 4) < base < promised(1.0, 1.0, 4)
    assert promised(1.0, 0.5, 3) < base < promised(1.0, 0.5, 5)
    assert base < promised(1.0, 0.5, 4, adjacency="replace-one")
    for kind in ("tight", "paper"):
        assert promised(1.0, 0.5, 4, noise_kind=kind) == base


def test_a_release_that_is_mostly_noise_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    boss = server(noise_multiplier=50.0, noise=InsecureSeededNoise(0))
    state = boss.start()
    for t in range(3):
        state = boss.step(state, {name: Contribution(normal(M, seed=t)) for name in NAMES})
    said = [record for record in caplog.records if "mostly noise" in record.message]
    assert len(said) == 1


def test_a_shared_ledger_of_another_kind_is_refused(tmp_path: Path) -> None:
    with SharedLedger(tmp_path / "books", adjacency="replace-one") as books:
        with pytest.raises(InputDataError, match="another adjacency"):
            server(shared_ledger=books)
        with pytest.raises(InputDataError, match="Without noise"):
            server(shared_ledger=books, noise_multiplier=None)
        books.spend(Event(1.0, sample_size=2, population=3))
        with pytest.raises(UnsupportedError, match="fixed size"):
            server(shared_ledger=books, adjacency="replace-one", sampling=PoissonSampling(0.5))


def test_who_sees_what_and_what_it_costs() -> None:
    noisy, plain, silent = (
        server(2, noise_multiplier=1.0),
        server(2, noise_multiplier=None),
        server(releases=(), noise_multiplier=None),
    )
    for boss in (noisy, plain, silent):
        aggregation = boss.terms.aggregation
        sees = aggregation.sees(boss.terms)
        assert sees.noisy == (boss is noisy)
        assert bool(sees.read_by("server")) == (boss is not silent)
        json.dumps(sees.to_dict())
    aggregation = noisy.terms.aggregation
    assert {row.message for row in aggregation.sees(noisy.terms).rows} == {
        "Setup", "Order", "Contribution", "Noisy",
    }  # fmt: skip
    price = aggregation.price(noisy.terms)
    assert price.releases == price.payments == 4
    assert replace(price.guarantee, private=False) == noisy.promise
    assert price.mechanism == "CorrelatedGaussianSum"
    assert price.noise_std == float(plan_of(noisy).mechanism(0).noise_std.max())
    assert aggregation.price(plain.terms) is None
    state = noisy.step(noisy.start(), {})
    account = noisy.privacy(state)
    assert account is not None
    assert (account["releases"], account["planned_releases"]) == (1, 4)
    assert account["epsilon"] < account["promised_epsilon"] == price.epsilon
    assert not account["private"]
    json.dumps(account)


# ------------------------------------------------------------------ settings


def test_words_hold_no_more_than_was_given() -> None:
    given = terms(releases="all", noise_multiplier=None, epsilon=2.0)
    words = {name: word for name, word in given.words.items() if name.startswith("aggregation.")}
    assert words["aggregation.releases"] == "'all'"
    assert words["aggregation.epsilon"] == "2"
    assert words["aggregation.noise_multiplier"] == words["aggregation.delta"] == "None"
    assert "aggregation.rounds" not in words
    assert words["aggregation.sampling.rate"] == "1"


CHANGES: list[dict[str, Any]] = [
    {},
    {"releases": (0, 1)},
    {"noise_multiplier": 2.0},
    {"noise_kind": "tight"},
    {"sampling": PoissonSampling(0.5)},
    {"exploration": SoftmaxSchedule(0)},
    {"switch_to_local_after": 4},
    {"noise": OSNoise()},
    {"clip_norm": 2.0},
    {"delta": 0.01},  # the promise is another one, and agents would refuse it
    {"adjacency": "replace-one"},
    {"active": ("ann",)},
    {"search": ReleaseSearch(messages=ReleaseMessage("mean", 2.0), strategy=FOLLOW)},
    {"search": ReleaseSearch(messages=ReleaseMessage("gain"), strategy=FOLLOW)},
    {"search": ReleaseSearch(messages=ReleaseMessage("gain", ridge=0.1), strategy=FOLLOW)},
]


def test_fingerprints_tell_settings_apart() -> None:
    assert len({server(**change).fingerprint for change in CHANGES}) == len(CHANGES)
    assert server(rounds=9).fingerprint == server().fingerprint  # may go on
    longer = server(rounds=9, releases="all").fingerprint
    assert longer != server(releases="all").fingerprint  # it would cost more than was promised


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: NoisySum(noise_multiplier=1.0, rounds=-1), "rounds"),
    (lambda: NoisySum(noise_multiplier=1.0, releases=(1, 0)), "ascending"),
    (lambda: NoisySum(noise_multiplier=1.0, releases=(1, 1)), "ascending"),
    (lambda: NoisySum(noise_multiplier=1.0, releases=(-1,)), "ascending"),
    (lambda: NoisySum(), "needs epsilon or noise_multiplier"),
    (lambda: NoisySum(epsilon=1.0, noise_multiplier=1.0), "epsilon or noise_multiplier"),
    (lambda: NoisySum(noise_multiplier=1.0, noise_kind="none"), "noise_kind"),
    (lambda: NoisySum(noise_multiplier=1.0, noise_kind="pink"), "noise_kind"),  # type: ignore[arg-type]
    (lambda: NoisySum(epsilon=1.0, sampling=FixedSizeSampling(2)), "no calibration"),
    (lambda: NoisySum(noise_multiplier=1.0, trim=1), "no privacy guarantee"),
    (lambda: server(noise_multiplier=None, trim=-1), "trim counts from 0"),
    (lambda: server(noise_multiplier=None, trim=2), "trim counts from 0"),
    (lambda: server(names=("a", "a")), "Expected different names"),
    (lambda: server(noise_multiplier=0.0), "positive"),
    (lambda: server(delta=2.0), "delta"),
    (lambda: server(sampling=FixedSizeSampling(4), adjacency="replace-one"), "sample"),
    (lambda: server(noise_multiplier=None, ledger=Ledger(budget=Budget(1, 0.1))), "noise"),
    (lambda: server(ledger=Ledger(adjacency="replace-one")), "adjacency"),
    (lambda: terms(names=()).aggregation.plan(terms(names=())), "roster"),
]


@pytest.mark.parametrize(("make", "why"), BAD)
def test_bad_settings(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(InputDataError, match=why):
        make()


# ------------------------------------------------------------------ products


class Still(Search):
    """A search of a user's own that says the same number all the time."""

    has_basis = False

    def point(self, view: View) -> Tensor:
        """In the middle, or where others say."""
        if view.release is None:
            return torch.full((1, 2), 0.5).double()
        return view.release.values.clamp(0, 1).expand(1, 2)

    def size(self, terms: Terms) -> int:
        """One number."""
        return 1

    def message(self, view: View) -> Tensor:
        """Always one."""
        return torch.ones(1).double()


def test_any_search_of_bounded_messages_goes_with_noisy_sums() -> None:
    def own(**options: Any) -> Terms:
        aggregation = NoisySum(noise_kind="none", releases=(0,), **options)
        return Terms(space=SQUARE, budget=2, search=Still(), aggregation=aggregation, agents=NAMES)

    with pytest.raises(InputDataError, match="Still says no norm"):
        own()
    boss = FederatedServer(terms=own(clip_norm=0.75))
    state = boss.step(boss.start(), {name: Contribution(torch.ones(1).double()) for name in NAMES})
    assert float(released(state).values) == pytest.approx(0.75)


def test_searches_that_read_other_releases_are_refused() -> None:
    with pytest.raises(InputDataError, match="TransferRows reads the messages of each agent"):
        terms(search=TransferRows())
    for search in (NoisyTransfer(), ReleaseSearch(strategy=FOLLOW)):
        with pytest.raises(InputDataError, match="reads noisy sums"):
            Terms(space=SQUARE, basis=PHI, budget=2, search=search, aggregation=Relay())


def test_a_delta_that_says_nothing_is_refused() -> None:
    with pytest.raises(InputDataError, match=r"above 0\.1"):
        NoisySum(noise_multiplier=1.0, delta=0.299)
    names = tuple(f"site{i}" for i in range(12))
    study = DPFTSDE(budget=6, noise_multiplier=1.0, delta=0.09)
    with pytest.raises(InputDataError, match="nothing to 12 agents"):
        study.server(SQUARE, names)
    with pytest.raises(InputDataError, match=r"above 0\.1"):
        PrivateUCB(budget=4, noise_multiplier=2.0, delta=0.3).server(SQUARE, names)
    with pytest.raises(InputDataError, match="nothing to 24 records"):
        PrivateUCB(budget=2, noise_multiplier=2.0, delta=0.05).server(SQUARE, names)
    summed = FedGP(
        budget=5,
        search=SupportSearch(),
        sums=1,
        channel="plain",
        mechanism=lambda size, count: DistributedGaussianSum(
            dim=size, num_agents=count, clip_norm=1.0, noise_multiplier=0.5
        ),
        noise_at="agent",
        delta=0.09,
    )
    with pytest.raises(InputDataError, match="nothing to 12 agents"):
        summed.server(SQUARE, names)
    assert default_delta(3) == 0.01
    assert default_delta(200) == 200**-1.1
