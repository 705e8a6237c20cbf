"""FBO-FedGP's default search: what a sum of mean functions says, and to whom."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from botorch.acquisition.analytic import UpperConfidenceBound
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.aggregation.sum_messages import Opened, Sealed, SumOrder
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.points import (
    dealt_design,
)
from botorch_fed.federation.terms import Setup
from botorch_fed.models import PriorFunction, RandomFourierFeatures, fit_earned
from botorch_fed.models.earned_prior import TRUSTS, project, reference_features
from botorch_fed.rng import generator
from botorch_fed.run import run
from botorch_fed.search import sums
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.sums import BOUND, TransferSum
from botorch_fed.search.transfer import (
    MIN_OWN,
    TransferSearch,
    default_feature_map,
    pack_report,
    report_size,
    unpack_sum,
)
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FedGP
from botorch_fed.wire.codec import decode, encode
from test.aggregation.harness import (
    HILLS,
    NAMES,
    SQUARE,
    Federation,
    finished,
    named,
    ran,
    setups,
    study,
    trace,
)
from test.cases import normal, se, uniform

PHI = RandomFourierFeatures.draw(se(0.4, 0.4), 20, generator=generator(0, "mean search"))
SEARCH = TransferSum()
ONE = TransferSearch()
K = len(TRUSTS)


def said(name: str, federation: Federation) -> Tensor:
    """What a site has drawn for the last sum, as numbers."""
    return federation.server.private_sum.channel.grid.to_values(federation.memory(name).drawn)


# ------------------------------------------------------------------ packing


def report(scale: float = 1.0) -> Tensor:
    trust = torch.tensor([0.5, 0.5] + [0.0] * (K - 2), dtype=torch.float64)
    return torch.cat([scale * uniform(20, 1).squeeze(-1), trust])


def test_a_report_in_a_sum() -> None:
    packed = pack_report(PHI, report())
    assert torch.equal(packed[:-1], report())
    assert packed[-1] == 1
    assert not bool(pack_report(PHI, None).count_nonzero())
    assert not bool(pack_report(PHI, report() / 0).count_nonzero())
    assert len(packed) == len(pack_report(PHI, None)) == report_size(PHI) + 1
    others = unpack_sum(3 * packed, packed)
    assert torch.allclose(others.weights, 2 * report()[:20], atol=1e-15)
    assert torch.equal(others.trust, 2 * report()[20:])
    assert others.num_sites == 2
    assert unpack_sum(packed, None).num_sites == 1
    assert unpack_sum(packed, packed).num_sites == 0


@pytest.mark.parametrize("count", [-1.0, 0.5, math.nan, math.inf])
def test_a_count_that_is_none_says_nothing(count: float) -> None:
    total = pack_report(PHI, report())
    total[-1] = count
    assert unpack_sum(total, None).num_sites == 0
    assert sums.advice(PHI, total, None, 3) is None


def test_more_experience_than_there_are_sites_is_none() -> None:
    total = pack_report(PHI, report())
    found = sums.advice(PHI, total, None, 3)
    assert found is not None
    assert found.trust is not None
    total[20:-1] = 100.0
    found = sums.advice(PHI, total, None, 3)
    assert found is not None  # the functions are heard even so
    assert found.trust is None


def test_a_message_is_no_louder_than_a_site_can_be() -> None:
    loud = pack_report(PHI, report(1e3))
    assert float((reference_features(PHI) @ loud[:20]).std()) == pytest.approx(3.0)
    assert torch.equal(loud[20:-1], report()[20:])


@pytest.mark.parametrize(
    ("dim", "size"), [(1, 11), (2, 44), (3, 101), (8, 101), (20, 101), (60, 182)]
)
def test_contributions_fit_the_grid(dim: int, size: int) -> None:
    """With room: also outliers, steps and noise, on any scale."""
    space = SearchSpace(tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(dim)))
    terms = FedGP(budget=5, channel="plain", common=False).terms(space, NAMES)
    phi = default_feature_map(space)
    assert terms.search.size(terms) == report_size(phi) + 1 == size + K
    for n in (3, 40):
        X = uniform(n, dim, seed=n)
        steps = (X[:, :1] > 0.8).double()
        for Y in (1e8 * X.square().sum(-1, keepdim=True), uniform(n, 1) ** 9, steps):
            values = sums.contribution(phi, ONE, space, X, Y, None)
            assert float(values.abs().max()) < BOUND / 4
            assert values[-1] == 1


def test_shift_and_stretch_of_outcomes_change_nothing() -> None:
    X = uniform(8, 2)
    Y = HILLS["ann"](X)
    values = sums.contribution(PHI, ONE, SQUARE, X, Y, None)
    moved = sums.contribution(PHI, ONE, SQUARE, X, 5000 + 1e3 * Y, None)
    assert torch.allclose(values, moved, atol=1e-5)


@pytest.mark.parametrize("num_agents", [2, 3, 50, 1000])
def test_the_grid_is_fine_enough_for_a_prior(num_agents: int) -> None:
    step = BOUND * SEARCH.precision(num_agents)
    assert step <= 2e-3
    X = uniform(20, 2)
    values = sums.contribution(PHI, ONE, SQUARE, X, HILLS["ann"](X), None)[:20]
    rounded = (values / step).round() * step
    exact, near = PriorFunction.of_weights(PHI, values), PriorFunction.of_weights(PHI, rounded)
    assert exact is not None
    assert near is not None
    points = uniform(200, 2, seed=1)
    assert float((exact(points) - near(points)).abs().max()) < 20 * step


# ------------------------------------------------------------------ the settings on the wire


def test_the_basis_is_that_of_the_study() -> None:
    with pytest.raises(InputDataError, match="2 inputs, the search space 1"):
        study(ONE, feature_map=PHI).server(SearchSpace((Parameter.real("a", 0.0, 1.0),)), NAMES)
    with pytest.raises(InputDataError, match="RegionSearch has no shared basis"):
        FedGP(budget=5, search=RegionSearch(), feature_map=PHI)
    assert study(ONE, feature_map=PHI).server(SQUARE, NAMES).terms.basis is PHI


def test_the_default_is_the_sum_of_mean_functions() -> None:
    protocol = FedGP(budget=6)
    terms = protocol.server(SQUARE, NAMES).terms
    assert terms.search == TransferSum(strategy=ONE)
    assert terms.aggregation == SecureSum(channel="threshold", rounds=3)
    assert terms.num_initial == MIN_OWN
    assert protocol.rounds == 3
    assert replace(protocol, search=RegionSearch()).terms(SQUARE, NAMES).num_initial == 4


BASES: dict[str, Callable[[Setup], Any]] = {
    "nothing": lambda setup: {},
    "nonsense": lambda setup: {"kind": torch.zeros(3).double()},
    "other inputs": lambda setup: RandomFourierFeatures.draw(
        se(0.4), 20, generator=generator(0, "one")
    ).to_tensors(),
    "infinite": lambda setup: {
        name: tensor * 1e200 if tensor.is_floating_point() else tensor
        for name, tensor in setup.basis.items()
    },
}


@pytest.mark.parametrize("how", BASES)
def test_a_basis_that_is_none_is_refused(how: str) -> None:
    federation = Federation(study(ONE, feature_map=PHI))
    federation.server.lie = lambda state, box: setups(
        box, lambda setup: replace(setup, basis=BASES[how](setup))
    )
    with pytest.raises(ProtocolError, match="refuse to begin"):
        federation.drive()
    assert federation.counts() == dict.fromkeys(NAMES, 0)


def test_a_site_that_searches_otherwise_is_another() -> None:
    prints = set()
    for search in (ONE, replace(ONE, warp=False), replace(ONE, listen=False)):
        protocol = study(search)
        prints.add(protocol.agent("ann", SQUARE, 1, MemoryBlobs()).fingerprint)
    assert len(prints) == 3


# ------------------------------------------------------------------ whose function is the prior


@dataclass(frozen=True, kw_only=True)
class Listening(TransferSearch):
    """Keeps the priors that it was asked with, and the own points."""

    heard: Any = None

    def point(self, space: Any, X: Tensor, Y: Tensor, advice: Any, **options: Any) -> Tensor:
        self.heard.append((X, None if advice is None else advice.prior))
        return super().point(space, X, Y, advice, **options)


def listening(federation: Federation) -> dict[str, list[Any]]:
    heard: dict[str, list[Any]] = {}
    for name, site in federation.sites.items():
        heard[name] = []
        search = TransferSum(strategy=Listening(heard=heard[name]))
        site.agent = replace(site.agent, terms=replace(site.agent.terms, search=search))
    return heard


@pytest.mark.parametrize("channel", ["plain", "ckks", "threshold"])
def test_each_of_two_sites_hears_the_other_alone(channel: Any) -> None:
    federation = Federation(study(ONE, channel=channel), names=NAMES[:2])
    heard = listening(federation)
    spoken: dict[str, list[Tensor]] = {name: [] for name in NAMES[:2]}

    def watch(state: Any, inbox: Any) -> None:
        if state.stage == "query" and state.t < 3:
            for name in spoken:
                spoken[name].append(said(name, federation)[: -K - 1])

    federation.server.watch = watch
    federation.drive()
    phi = default_feature_map(SQUARE)
    points = uniform(50, 2)
    for name, other in (("ann", "bob"), ("bob", "ann")):
        assert len(heard[name]) == 3
        for weights, (_, prior) in zip(spoken[other], heard[name], strict=True):
            expected = PriorFunction.of_weights(phi, weights)
            assert expected is not None
            assert torch.equal(prior(points), expected(points))  # to the last bit


def fitted(site: Any, count: int) -> Tensor:
    """The message of a site's first observations."""
    state, phi = site.state, default_feature_map(SQUARE)
    weights = ONE.message(SQUARE, phi, state.X[:count], state.Y[:count])
    assert weights is not None
    return weights


def heard_from(prior: Any, *messages: Tensor) -> bool:
    """Whether a prior is made of the sum of some messages, up to the grid."""
    expected = PriorFunction.of_weights(default_feature_map(SQUARE), sum(messages))  # type: ignore[arg-type]
    points = uniform(50, 2)
    return expected is not None and torch.allclose(prior(points), expected(points), atol=1e-3)


def refused(name: str, order: SumOrder, reply: Any) -> Any:
    """Bob's second contribution is lost on its way."""
    lost = name == "bob" and order.t == 1 and named(order) == "query"
    return replace(reply, data=b"lost") if lost else reply


def test_who_is_not_in_a_sum_takes_nothing_away() -> None:
    """It has drawn a contribution, and even so it is not in the sum."""
    federation = Federation(study(ONE), tamper=refused)
    heard = listening(federation)
    federation.drive()
    ann, _, cem = (federation.sites[name] for name in NAMES)
    assert heard_from(heard["bob"][0][1], fitted(ann, 3), fitted(cem, 3))
    assert heard_from(heard["bob"][1][1], fitted(ann, 4), fitted(cem, 4))
    assert heard_from(heard["ann"][1][1], fitted(cem, 4))
    assert heard_from(heard["bob"][2][1], fitted(ann, 5), fitted(cem, 5))


def test_an_old_sum_is_without_what_one_has_put_into_it() -> None:
    """Round 1 opens nothing, so that the sum of round 0 is still the newest in round 2."""
    federation = Federation(study(ONE))
    heard = listening(federation)
    honest = federation.server.honest.step

    def step(state: Any, inbox: Any) -> Any:
        if state.t == 1:
            inbox = {name: replace(one, data=None) for name, one in inbox.items()}
        return honest(state, inbox)

    federation.server.step = step  # type: ignore[method-assign]
    federation.drive()
    assert federation.end.sums == 2
    for name in NAMES:
        others = [fitted(federation.sites[other], 3) for other in NAMES if other != name]
        for _, prior in heard[name][:2]:
            assert heard_from(prior, *others)


def test_who_lost_its_place_under_a_joint_key_hears_the_others() -> None:
    federation = Federation(study(ONE, channel="threshold", rejoin=False), tamper=refused)
    heard = listening(federation)
    federation.drive()
    ann, _, cem = (federation.sites[name] for name in NAMES)
    assert heard_from(heard["bob"][1][1], fitted(ann, 4), fitted(cem, 4))
    assert heard_from(heard["ann"][1][1], fitted(cem, 4))


def test_a_resumed_site_knows_what_it_has_contributed() -> None:
    federation = finished(study(ONE))
    state, newest = federation.sites["ann"].state, federation.memory("ann").newest
    again = decode(encode(state), type(state)).aggregation.newest
    assert newest is not None
    assert newest.mine is not None
    assert torch.equal(again.mine, newest.mine)
    assert bool(newest.mine.count_nonzero())


# ------------------------------------------------------------------ where it begins


@pytest.mark.parametrize("channel", ["plain", "threshold"])
def test_the_start_is_dealt(channel: Any) -> None:
    federation = finished(study(ONE, channel=channel, num_initial=None))
    for index, name in enumerate(NAMES):
        expected = dealt_design(SQUARE, index, 3, 3)
        assert torch.equal(federation.sites[name].state.X[:3], expected)
    assert federation.counts() == dict.fromkeys(NAMES, 6)


def test_dealt_points_are_candidates() -> None:
    candidates = uniform(20, 2, seed=8)
    federation = finished(study(ONE, candidates=candidates))
    for site in federation.sites.values():
        assert len(torch.unique(site.state.X, dim=0)) == 6
        assert all(bool((candidates == x).all(dim=-1).any()) for x in site.state.X)


def history(name: str, count: int) -> tuple[Tensor, Tensor]:
    X = uniform(count, 2, seed=NAMES.index(name))
    return X, HILLS[name](X)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("channel", ["plain", "ckks", "threshold"])
def test_a_newcomer_begins_with_what_the_others_say(channel: Any) -> None:
    data = {name: history(name, 12) for name in ("ann", "bob")}
    federation = Federation(study(ONE, num_initial=None, data=data, channel=channel))
    heard = listening(federation)
    federation.drive()
    assert federation.counts() == {"ann": 15, "bob": 15, "cem": 3}
    X, prior = heard["cem"][0]
    assert len(X) == 0
    assert heard_from(prior, *(fitted(federation.sites[name], 12) for name in data))
    first = federation.sites["cem"].state.X[0]
    assert float((first - 0.31).abs().max()) < 0.15  # at the top of the others' hills
    assert [said(name, federation)[-1] for name in NAMES] == [1, 1, 0]  # cem has two points


@pytest.mark.parametrize("channel", ["plain", "ckks", "threshold"])
def test_sites_that_are_done_answer_and_do_not_query(channel: Any) -> None:
    data = {name: history(name, 12) for name in ("ann", "bob")}
    settings = {"num_initial": None, "data": data, "channel": channel, "active": ("cem",)}
    federation = finished(study(ONE, **settings, sums=3))
    assert federation.counts() == {"ann": 12, "bob": 12, "cem": 3}
    assert float((federation.sites["cem"].state.X[0] - 0.31).abs().max()) < 0.15
    last = federation.end.last
    assert last is not None
    assert (last.t, last.members) == (2, NAMES)  # in every round, with what they have
    once = finished(study(ONE, **settings))
    assert once.end.sums == 1  # the difference of two would be what cem has added
    assert [round_.replied for round_ in once.rounds][-3:] == [("cem",)] * 3
    assert once.counts() == {"ann": 12, "bob": 12, "cem": 3}


def test_who_is_done_evaluates_no_design() -> None:
    data = {name: history(name, 1) for name in ("ann", "bob")}
    federation = finished(study(ONE, num_initial=4, data=data, active=("cem",)))
    assert federation.counts() == {"ann": 1, "bob": 1, "cem": 7}


def test_a_newcomer_that_nobody_tells_anything_begins_as_if_alone() -> None:
    data = {name: history(name, 1) for name in ("ann", "bob")}  # too few to say anything
    federation = finished(study(ONE, num_initial=None, data=data, active=("cem",)))
    assert torch.equal(federation.sites["cem"].state.X, dealt_design(SQUARE, 2, 3, 3))


def test_who_is_done_and_was_lost_is_taken_back() -> None:
    data = {name: history(name, 12) for name in ("ann", "bob")}
    settings = {"num_initial": None, "data": data, "channel": "threshold", "active": ("cem",)}
    federation = finished(
        study(ONE, **settings, sums=6, rounds=6),
        absent=lambda name, order: name == "bob" and order.t == 1 and named(order) == "resend",
    )
    assert federation.end.lost == ()
    assert federation.end.returned == ("bob",)
    assert federation.counts() == {"ann": 12, "bob": 12, "cem": 6}


def test_active_may_name_everybody() -> None:
    everybody = study(ONE, active=NAMES)
    terms = everybody.server(SQUARE, NAMES).terms
    assert isinstance(terms.aggregation, SecureSum)
    assert terms.aggregation.most_sums(terms) is None
    assert trace(ran(everybody)) == trace(ran(study(ONE)))


def test_only_agents_can_be_active() -> None:
    with pytest.raises(InputDataError, match="no agents: \\['zoe'\\]"):
        study(ONE, active=("zoe",)).server(SQUARE, NAMES)
    for who in ((), ("ann", "ann")):
        with pytest.raises(InputDataError, match="each agent that queries once"):
            study(ONE, active=who).server(SQUARE, NAMES)
    servers = [study(ONE, active=who).server(SQUARE, NAMES) for who in (None, ("ann",), ("bob",))]
    assert len({server.fingerprint for server in servers}) == 3


def test_a_site_with_data_is_dealt_what_is_missing() -> None:
    federation = finished(study(ONE, num_initial=3, data={"bob": history("bob", 2)}))
    assert federation.counts() == {"ann": 6, "bob": 6, "cem": 6}
    assert torch.equal(federation.sites["bob"].state.X[2], dealt_design(SQUARE, 1, 3, 3)[0])
    many = finished(study(ONE, num_initial=3, data={"bob": history("bob", 7)}))
    assert many.counts() == {"ann": 6, "bob": 10, "cem": 6}


def test_sites_with_too_little_to_say_do_not_count() -> None:
    federation = finished(study(ONE, num_initial=1, rounds=2, channel="threshold"))
    assert isinstance(federation.end.last, Sealed)  # which the hub cannot open
    assert federation.end.last.members == NAMES
    for name in NAMES:
        newest = federation.memory(name).newest
        assert newest is not None
        assert newest.t == federation.end.last.t
        assert newest.total is not None
        assert not bool(newest.total.count_nonzero())
    opening = finished(
        study(ONE, num_initial=1, rounds=2, aggregation=SecureSum(opened_by="server"))
    )
    assert isinstance(opening.end.last, Opened)
    assert not bool(opening.end.last.total.count_nonzero())
    assert federation.counts() == dict.fromkeys(NAMES, 3)


# ------------------------------------------------------------------ whoever wants to harm others


def hostile(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Bob contributes something else."""
    honest = TransferSum.message

    def message(self: TransferSum, view: Any) -> Tensor | None:
        values = honest(self, view)
        return change(values) if view.name == "bob" and values is not None else values

    monkeypatch.setattr(TransferSum, "message", message)


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda values: torch.full_like(values, BOUND),
    "loud": lambda values: torch.cat([torch.full_like(values[:100], BOUND), values[100:]]),
    "many": lambda values: torch.cat([values[:-1], torch.full_like(values[-1:], 100.0)]),
    "fraction": lambda values: values - 0.5,
}


@pytest.mark.parametrize("how", LIES)
@pytest.mark.parametrize("channel", ["plain", "threshold"])
def test_a_sum_that_honest_sites_cannot_have_is_left_out(
    how: str, channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = finished(study(replace(ONE, listen=False)))
    hostile(monkeypatch, LIES[how])
    federation = finished(study(ONE, channel=channel))
    for name in ("ann", "cem"):  # solo, to the last bit
        assert torch.equal(federation.sites[name].state.X, alone.sites[name].state.X)


def test_a_lie_loses_its_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """As loud as is believed: all others' functions upside down, and more."""
    phi = default_feature_map(SQUARE)
    down = project(lambda X: -HILLS["ann"](X).squeeze(-1).numpy(), phi)  # type: ignore[union-attr]
    believing = torch.tensor([0.0] * (K - 1) + [1.0], dtype=torch.float64)
    down *= 5.5 / float((reference_features(phi) @ down).std())
    hostile(monkeypatch, lambda values: torch.cat([down, believing, values[-1:]]))
    federation = Federation(study(ONE, rounds=6))
    heard = listening(federation)
    federation.drive()
    for name in ("ann", "cem"):
        state = federation.sites[name].state
        assert bool(torch.isfinite(state.X).all())
        assert bool(((state.X >= 0) & (state.X <= 1)).all())
        prior = heard[name][-1][1]
        assert prior is not None
        assert fit_earned(state.X, state.Y, prior).trust < 0.05  # 0.65 before any observation
        assert float(state.Y.max()) > 0.95


def test_sites_that_do_not_listen_want_no_sum() -> None:
    federation = finished(study(replace(ONE, listen=False), channel="threshold"))
    assert federation.end.sums == 0


def test_own_acquisition_functions() -> None:
    def ucb(model: Any, tried: Tensor) -> Any:
        return UpperConfidenceBound(model, beta=0.1)

    search = replace(ONE, acquisition=ucb)
    assert trace(ran(study(search))) == trace(ran(study(search, channel="threshold")))
    assert trace(ran(study(search))) != trace(ran(study(ONE)))


def test_together_is_better_than_alone() -> None:
    hills = {f"site{i}": HILLS[NAMES[i % 3]] for i in range(6)}
    best = {}
    for listen in (True, False):
        protocol = study(replace(ONE, listen=listen), rounds=3)
        result = run(protocol, hills, space=SQUARE, seed=1, progress=False)
        queried = [result.history(name)[1][3:4] for name in hills]  # the first query
        best[listen] = float(torch.cat(queried).mean())
    assert best[True] > best[False]


def test_less_than_no_experience_is_none() -> None:
    rows = [torch.cat([weights, weights.new_zeros(5)]) for weights in normal(3, 20)]
    honest = torch.stack([pack_report(PHI, row) for row in rows]).sum(dim=0)
    for lie in ([-8.0, 0, 0, 0, 9.0], [0.0, 0, 0, 0, 7.0], [-1e6, 0, 0, 0, 0]):
        total = honest.clone()
        total[-6:-1] += torch.tensor(lie, dtype=torch.float64)
        advice = sums.advice(PHI, total, None, 8)
        assert advice is not None
        assert advice.trust is None
