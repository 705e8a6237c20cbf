"""Distributed exploration at a site: gains, regions, and where a release is followed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition import Constant, Partition
from botorch_fed.aggregation.noisy import NoisySum
from botorch_fed.federation.agent import AgentState, FederatedAgent
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.terms import Order
from botorch_fed.models import WeightPosterior, own_gp, summarize
from botorch_fed.privacy import clip
from botorch_fed.rng import generator
from botorch_fed.search.released import (
    Following,
    ReleaseMessage,
    ReleaseSearch,
    expected_gain,
    gain_message,
    suggested_clip_norm,
)
from botorch_fed.search.transfer import default_private_features, reference_points
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.wire.codec import decode, encode
from test.cases import normal, uniform
from test.federation.dp import (
    FAILED,
    FOLLOW,
    MIXED_SPACE,
    NAMES,
    PHI,
    RANDOM,
    SMALL,
    SQUARE,
    M,
    hill,
    history,
    put,
    quiet,
    study,
    terms,
)

FIRST, QUERY = Order(0, "first", False), Order(4, "next", False)
MEAN = ReleaseMessage("mean", 1.0)


@dataclass
class Desk:
    """An agent with a release, before its next query."""

    weights: Tensor | None = None
    P: int = 1
    strategy: Following = FOLLOW
    name: str = "agent0"
    options: dict[str, Any] = field(default_factory=dict)
    space: SearchSpace = SQUARE
    order: Order = QUERY
    num_initial: int = 3
    basis: Any = PHI

    def __post_init__(self) -> None:
        names = tuple(f"agent{n}" for n in range(max(self.P, 3)))
        search = ReleaseSearch(messages=MEAN, num_regions=self.P, strategy=self.strategy)
        aggregation = NoisySum(noise_kind="none")
        own = replace(
            terms(),
            space=self.space,
            search=search,
            aggregation=aggregation,
            agents=(),
            budget=40,
            num_initial=self.num_initial,
            basis=self.basis,
        )
        self.agent = FederatedAgent(name=self.name, terms=own, seed=3, **self.options)
        boss = FederatedServer(terms=replace(own, agents=names))
        self.setup = put(self.agent, boss.hub.terms.setup)
        self.state = self.asked(self.agent.start(), self.weights, self.order)

    def asked(
        self, state: AgentState, weights: Tensor | None, order: Order | None = None
    ) -> AgentState:
        """The state with the next order and a release."""
        order = replace(QUERY, t=state.aggregation.t + 1) if order is None else order
        agents = max(self.P, 3)
        released = () if weights is None else put(self.agent, quiet(weights, 0, agents))
        self.agent.check(state, order, self.setup + released)
        return self.agent.receive(state, order, self.setup + released)

    def points(self, state: AgentState | None = None) -> Tensor:
        """What it asks for."""
        found = self.agent.ask(self.state if state is None else state)
        assert isinstance(found, Tensor)
        return found


# ------------------------------------------------------------------ where a site looks


@pytest.mark.parametrize("P", [1, 3, 4, 8])
def test_the_followed_point_is_the_best_of_all_regions(P: int) -> None:
    weights = normal(P, M, seed=P)
    point = Desk(weights, P, replace(FOLLOW, num_raw=256, num_restarts=8)).points()
    partition = Partition.regular(P, 2)

    def value(X: Tensor) -> Tensor:
        every = PHI(X) @ weights.mT
        return every.gather(-1, partition.region_of(X).unsqueeze(-1)).squeeze(-1)

    grid = torch.cartesian_prod(*2 * [torch.linspace(0, 1, 80).double()])
    assert float(value(point)) >= float(value(grid).max()) - 1e-6


def test_following_stops_where_the_strategy_says() -> None:
    weights, other = normal(1, M, seed=1), normal(1, M, seed=77)
    desk = Desk(weights, strategy=replace(FOLLOW, follow=2, schedule=Constant(1.0)))
    first = desk.points()
    assert torch.equal(desk.points(), first)
    told = desk.agent.tell(desk.state, first, hill(first))
    second = desk.points(desk.asked(told, weights))
    assert not torch.equal(desk.points(desk.asked(told, other)), second)
    # A second look at the same release is at another part of it.
    assert float((second - first).norm()) >= FOLLOW.spread
    told = desk.agent.tell(desk.asked(told, weights), second, hill(second))
    third = [desk.points(desk.asked(told, release)) for release in (weights, None, other)]
    assert torch.equal(third[0], third[1])
    assert torch.equal(third[0], third[2])


def test_a_failed_or_pending_point_is_a_look_too() -> None:
    desk = Desk(normal(1, M, seed=1))
    first = desk.points()
    failed = desk.asked(desk.agent.tell(desk.state, first, FAILED), desk.weights)
    waiting = desk.agent.ask(desk.state, pending=first)
    assert isinstance(waiting, Tensor)
    for second in (desk.points(failed), waiting):
        assert float((second - first).norm()) >= FOLLOW.spread


def test_of_a_list_candidates_are_looked_at_that_are_new_and_apart() -> None:
    far = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double()
    close = torch.tensor([[0.5, 0.5], [0.52, 0.5], [0.5, 0.52]]).double()
    weights = torch.linalg.lstsq(PHI(close), torch.ones(3, 1).double()).solution.mT
    weights = weights - torch.linalg.lstsq(PHI(far), torch.ones(2, 1).double()).solution.mT
    candidates = torch.cat([far, close])
    desk = Desk(weights, options={"candidates": candidates})
    asked, state = [], desk.state
    for _ in range(6):
        point = desk.points(state)
        asked += [row for row in range(5) if torch.equal(candidates[row : row + 1], point)]
        state = desk.asked(desk.agent.tell(state, point, hill(point)), weights)
    assert asked[0] in (2, 3, 4)  # the best; then what is apart from it, then the others
    assert set(asked[1:3]) == {0, 1}
    assert set(asked[3:5]) | {asked[0]} == {2, 3, 4}
    assert len(asked) == 6  # and when all are used up, any


def test_the_coin_follows_the_schedule() -> None:
    weights = normal(1, M, seed=1)
    desk = Desk(weights, strategy=replace(RANDOM, follow=0, schedule=Constant(0.3)))
    alone = desk.asked(desk.agent.start(), None, QUERY)
    followed = 0
    for seed in range(120):
        other = replace(desk.agent, seed=seed)
        followed += not torch.equal(other.ask(desk.state), other.ask(alone))  # type: ignore[arg-type]
    assert abs(followed / 120 - 0.7) < 5 * (0.21 / 120) ** 0.5


@pytest.mark.parametrize("P", [1, 2, 4])
def test_the_start_lies_in_the_own_region(P: int) -> None:
    partition = Partition.regular(P, 2)
    for n in range(P):
        points = Desk(P=P, name=f"agent{n}", order=FIRST).points()
        assert points.shape == (3, 2)
        assert set(partition.region_of(points).tolist()) == {n}
        # Of a list, too; one that is too short is used again, and an empty region takes any.
        few = partition.to_region(n, uniform(2, 2, seed=8))
        away = partition.to_region((n + 1) % P, uniform(4, 2, seed=9))
        for candidates, allowed in ((torch.cat([few, away]), few if P > 1 else None), (away, away)):
            listed = {"candidates": candidates}
            points = Desk(P=P, name=f"agent{n}", order=FIRST, options=listed).points()
            assert points.shape == (3, 2)
            pool = candidates if allowed is None else allowed
            assert bool((points.unsqueeze(1) == pool).all(dim=-1).any(dim=-1).all())
            assert len(torch.unique(points, dim=0)) == min(3, len(pool))


@pytest.mark.parametrize("P", [1, 2, 4, 8])
def test_the_start_is_legal_and_in_the_own_region_if_that_has_legal_points(P: int) -> None:
    partition = Partition.regular(P, MIXED_SPACE.dim)
    grid = [
        {"depth": depth, "kernel": kernel, "C": C}
        for depth in range(1, 5)
        for kernel in ("rbf", "poly", "linear")
        for C in (2e-3, 0.1, 3.0, 500.0)
    ]
    reachable = set(partition.region_of(MIXED_SPACE.to_unit(grid)).tolist())
    phi = default_private_features(MIXED_SPACE, num_features=5)
    for n in range(P):
        points = Desk(
            P=P,
            name=f"agent{n}",
            order=FIRST,
            space=MIXED_SPACE,
            num_initial=6,
            basis=phi,
            strategy=SMALL,
        ).points()
        torch.testing.assert_close(MIXED_SPACE.snap(points), points, rtol=0, atol=1e-12)
        if n in reachable:
            assert set(partition.region_of(points).tolist()) == {n}


def test_a_site_explores_its_region_whatever_it_has_observed() -> None:
    assert len(Desk(order=FIRST, options={"data": history(5)}).points()) == 3


def test_a_state_survives_encoding() -> None:
    desk = Desk(normal(1, M, seed=1), options={"data": history(5)})
    assert desk.state.search.own is not None
    again = decode(encode(desk.state), desk.agent.state_type)
    assert encode(again) == encode(desk.state)
    assert torch.equal(desk.points(again), desk.points())


# ------------------------------------------------------------------ messages


def test_a_gain_has_the_clip_norm_whatever_it_is() -> None:
    for scale in (1e-6, 1.0, 1e9):
        X, Y = history(6)
        made = study(clip_norm=0.7, data={"ann": (X, scale * Y)})
        boss, agent = made.server(SQUARE, NAMES), made.agent("ann", SQUARE, 0, MemoryBlobs())
        blobs = put(agent, boss.hub.terms.setup)
        state = agent.receive(agent.start(), Order(0, "nothing", True), blobs)
        said = agent.reply(state)[1].values
        assert float(said.norm()) == pytest.approx(0.7, rel=1e-9)
        assert torch.equal(clip(said, 0.7 * (1 + 1e-12)), said)


def test_a_gain_points_to_where_there_is_hope() -> None:
    X, Y = history(12)
    phi = default_private_features(SQUARE)
    own = Following().refit(SQUARE, X, Y, None, seed=0, name="ann")
    assert own is not None
    model = own_gp(X, Y, own)
    said = gain_message(phi, model, X, ridge=1e-3, norm=1.0)
    grid = uniform(500, 2, seed=12)
    with torch.no_grad():
        best = model.posterior(X).mean.max()
        posterior = model.posterior(grid)
        gain = expected_gain(posterior.mean[:, 0], posterior.variance[:, 0].sqrt(), best)
    both = torch.stack([phi(grid) @ said, gain])
    assert float(torch.corrcoef(both)[0, 1]) > 0.7
    # A heavy ridge is no projection any more: the gain's means over the features themselves.
    heavy = gain_message(phi, model, X, ridge=1e9, norm=1.0)
    reference = reference_points(2)
    with torch.no_grad():
        posterior = model.posterior(reference)
        gain = expected_gain(posterior.mean[:, 0], posterior.variance[:, 0].sqrt(), best)
    means = phi(reference).mT @ gain
    torch.testing.assert_close(heavy, means / means.norm(), rtol=1e-6, atol=1e-9)


def test_nothing_to_gain_is_no_message() -> None:
    @dataclass
    class Known:
        mean: Tensor
        variance: Tensor

    class Sure:
        def posterior(self, X: Tensor) -> Known:  # the one point that was tried is the best
            tried = len(X) == 1
            return Known(torch.full((len(X), 1), float(tried)).double(), 0.0 * X[:, :1])

    model: Any = Sure()
    said = gain_message(PHI, model, uniform(1, 2), ridge=1e-3, norm=1.0)
    assert torch.equal(said, torch.zeros(M).double())
    given = terms()
    given.search.check(given, said)


def test_expected_gain_is_expected_improvement() -> None:
    mean, std = torch.tensor([-1.0, 0.0, 0.5, 2.0]).double(), torch.tensor([0.5, 1.0, 0.1, 0.0])
    draws = mean + std.double() * generator(0, "ei").normal(400_000, 1)
    expected = draws.clamp_min(0).mean(dim=0)
    found = expected_gain(mean, std.double(), torch.tensor(0.0).double())
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)
    far = expected_gain(torch.tensor([-20.0]).double(), torch.ones(1).double(), torch.zeros(1))
    assert 0 < float(far) < 1e-80


def test_a_mean_is_the_posterior_mean_and_samples_have_noise_of_their_own() -> None:
    X, Y = history(10)
    said = MEAN.make(PHI, X, Y, generator=generator(0))
    total = summarize(PHI, X, Y, noise_var=0.05)
    torch.testing.assert_close(said, WeightPosterior.from_total(total).mean)
    sample = replace(MEAN, kind="sample")
    one, two = (sample.make(PHI, X, Y, generator=generator(s)) for s in (0, 1))
    assert not torch.equal(one, two)
    # Of an agent's own stream: the seed and the number of queries, not the round, address it.
    made = study(SMALL, message="sample", data={"ann": (X, Y)}, num_initial=0)
    agent = made.agent("ann", SQUARE, 0, MemoryBlobs())
    blobs = put(agent, made.server(SQUARE, NAMES).hub.terms.setup)
    state = agent.receive(agent.start(), Order(0, "nothing", True), blobs)
    messages = [agent.reply(replace(state, used=used))[1].values for used in (0, 0, 1)]
    assert torch.equal(messages[0], messages[1])
    assert not torch.equal(messages[0], messages[2])


@pytest.mark.parametrize("kind", ["mean", "sample"])
def test_a_suggested_clip_norm_fits_and_knows_no_data(kind: Any) -> None:
    message = ReleaseMessage(kind)
    norm = suggested_clip_norm(PHI, message, 8)
    assert norm == suggested_clip_norm(PHI, message, 8)
    stream, norms = generator(5, "check"), []
    for _ in range(400):
        X, truth = stream.uniform(8, 2), stream.normal(M, 1)
        Y = PHI(X) @ truth + 0.05**0.5 * stream.normal(8, 1)
        norms.append(message.make(PHI, X, Y, generator=stream).norm())
    kept = float((torch.stack(norms) <= norm).double().mean())
    assert kept >= 0.95  # 99 % of other 200 draws
    assert float(torch.stack(norms).median()) > norm / 5
    with_data = study(message=kind, data={"ann": (uniform(9, 2), 1e6 * normal(9, 1))})
    boss, empty = (s.server(SQUARE, NAMES) for s in (with_data, study(message=kind)))
    assert boss.terms.search.norm(boss.terms) == empty.terms.search.norm(empty.terms)
    assert boss.fingerprint == empty.fingerprint
    assert suggested_clip_norm(PHI, ReleaseMessage("gain"), 8) == 1


def test_a_clip_norm_is_suggested_at_use() -> None:
    own = study(message="mean").terms(SQUARE)
    assert own.words["search.messages.clip_norm"] == "None"
    assert own.search.norm(own) == suggested_clip_norm(PHI, ReleaseMessage("mean"), 3)


# ------------------------------------------------------------------ settings

BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Following(follow=-1), "counts from 0"),
    (lambda: Following(spread=1.0), "spread"),
    (lambda: ReleaseMessage(noise_var=0.0), "noise_var"),
    (lambda: ReleaseMessage(beta=-1.0), "beta"),
    (lambda: ReleaseMessage(clip_norm=0.0), "clip_norm"),
    (lambda: ReleaseMessage(clip_norm=math.nan), "clip_norm"),
    (lambda: ReleaseMessage(ridge=0.0), "ridge"),
    (lambda: terms(search=ReleaseSearch(num_regions=0)), "regions"),
    (lambda: terms(search=ReleaseSearch(num_regions=65)), "regions"),
    (lambda: terms(search=ReleaseSearch(strategy=RANDOM)), "own must not be"),
]


@pytest.mark.parametrize(("make", "why"), BAD)
def test_bad_settings(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(InputDataError, match=why):
        make()


def test_gains_without_a_model_are_no_matter_where_nothing_is_released() -> None:
    terms(search=ReleaseSearch(strategy=RANDOM), releases=(), noise_multiplier=None)


# ------------------------------------------------------------------ the shared basis


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
@pytest.mark.parametrize("dim", range(1, 7))
def test_the_default_basis(dim: int, log: bool) -> None:
    lower = 1e-3 if log else 0.0
    space = SearchSpace(tuple(Parameter.real(f"x{i}", lower, 1.0) for i in range(dim)))
    assert bool((space.log_offsets > 0).all()) == log
    phi = default_private_features(space)
    assert phi.input_dim == dim
    assert phi.num_features == (20 if dim > 1 else min(20, phi.num_features))
    X = uniform(200, dim)
    values = phi(X)
    assert bool(torch.isfinite(values).all())
    # Almost all of a unit prior variance is in the basis, and the basis is the same for everyone.
    assert 0.5 < float(values.square().sum(dim=-1).mean()) < 1.05
    assert default_private_features(space).fingerprint == phi.fingerprint
