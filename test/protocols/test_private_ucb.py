"""Private GP-UCB: what is played, what is released and paid, who sees what, and crashes."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, UpperConfidenceBound
from botorch.exceptions.errors import InputDataError
from botorch.generation import MaxPosteriorSampling
from botorch.optim import optimize_acqf
from torch import Tensor

from botorch_fed.acquisition import private_ucb_width
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import BudgetExceeded, MessageError, ProtocolError
from botorch_fed.federation.log import Log
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.models import (
    AdditiveFeatures,
    BasisGP,
    FeatureMap,
    KLFeatures,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    Summary,
    WeightPosterior,
    noise_norm_bound,
    summarize,
)
from botorch_fed.privacy import (
    BlockSum,
    Budget,
    Event,
    Guarantee,
    Ledger,
    LedgerFile,
    LocalGaussian,
    PrefixSum,
    RecordStatistic,
    compose,
)
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise
from botorch_fed.protocols.base import Exchanged, Objective, Outgoing, Pending, Reply
from botorch_fed.protocols.drive import Round, drive
from botorch_fed.protocols.private_ucb import (
    MAX_NUMBER,
    BlockSecret,
    Increment,
    Outcome,
    Parameters,
    PrivateUCB,
    PrivateUCBAgent,
    PrivateUCBServer,
    PrivateUCBServerState,
    Query,
    Record,
    Setup,
    _action,
    _View,
    parameters_model,
    private_summary,
    signal_to_noise,
    unit_features,
)
from botorch_fed.protocols.site import Site
from botorch_fed.protocols.store import FileStore, MemoryBlobs, MemoryStore
from botorch_fed.rng import generator
from botorch_fed.run import run
from botorch_fed.space import Outcome as OutcomeMap
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.test_functions import Camelback, KernelBandit
from botorch_fed.wire.codec import decode, encode
from test.cases import in_rounds, normal, quadrature, random_fourier, uniform

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace(
    (Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)), OutcomeMap(0.5, 0.5)
)
PHI = KLFeatures.from_map(quadrature(), uniform(300, 2), num_features=6)
M, SCALE = PHI.num_features, float(PHI.outputscale)
D = M * (M + 3) // 2
ARMS = uniform(9, 2, seed=1)
NOISE_VAR = 0.1
SEEDED = InsecureSeededNoise(0)
GOOD_X, GOOD_Y = torch.full((1, 2), 0.5).double(), torch.zeros(1, 1).double()
TRUSTS = ("joint", "local", "public", "none")
PRIVATE = ("joint", "local", "public")


def hill(X: Tensor) -> Tensor:
    return 1 - 2 * (X - 0.3).square().sum(dim=-1, keepdim=True)


def sets(name: str, t: int, count: int = 7) -> Tensor:
    return generator(0, "sets", name, t).uniform(count, 2)


class Stopped(BaseException):
    """Somebody pulled the plug."""


# ------------------------------------------------------------------ a federation


@dataclass
class Federation:
    """A study whose every byte can be looked at, and that can be stopped and gone on with."""

    study: PrivateUCB
    names: tuple[str, ...] = NAMES
    objective: Callable[[str], Objective] = lambda name: hill
    absent: Callable[[str, int], bool] | None = None
    site_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logs = {name: Log(SITE_EVENTS) for name in self.names}
        self.rounds: list[Round] = []
        self.down: list[list[bytes]] = []
        self.up: list[dict[str, Any]] = []
        self.records: list[bytes] = []
        self.states: list[PrivateUCBServerState] = []
        self.watch: Callable[[], None] = lambda: None
        self.open()

    def open(self) -> None:
        """New processes, with what is on disk."""
        self.server = self.study.server(SQUARE, self.names)
        self.sites = {}
        for i, name in enumerate(self.names):
            agent = replace(self.study.agent(name, SQUARE, i, MemoryBlobs()), **self.site_options)
            self.sites[name] = Site(name, agent, self.objective(name), log=self.logs[name])

    def exchange(self, outgoing: Outgoing) -> Exchanged:
        self.down.append([*outgoing.requests.values(), *outgoing.blobs.values()])
        exchanged = self.engine(outgoing)
        self.watch()
        found = {}
        for name, data in exchanged.replies.items():
            try:
                found[name] = decode(decode(data, Reply).body, Record, Increment, Outcome)
            except MessageError:  # a refusal
                continue
        self.up.append(found)
        return exchanged

    def drive(self, *, resume: bool = False, save: Any = None) -> PrivateUCBServerState:
        self.engine = InProcess(self.sites.values(), absent=self.absent)

        def keep(record: bytes) -> None:
            if save is not None:
                save(record)
            self.records.append(record)

        self.end: PrivateUCBServerState = drive(
            self.server,
            self.exchange,
            record=self.records[-1] if resume and self.records else None,
            save=keep,
            on_round=self.rounds.append,
        )
        return self.end

    def played(self) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """By round and agent, what was played and its outcome on the public scale."""
        rounds: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(len(self.rounds))]
        for name, site in self.sites.items():
            for seen in site.observations():
                rounds[seen.serial - 1][name] = seen.X, SQUARE.outcome.to_public(seen.Y)
        return rounds

    def report(self) -> dict[str, Any]:
        return self.server.privacy(self.end)


def study(trust: str = "joint", **options: Any) -> PrivateUCB:
    common: dict[str, Any] = {
        "rounds": 4,
        "trust": trust,
        "noise_multiplier": None if trust == "none" else 2.0,
        "feature_map": PHI,
        "noise_var": NOISE_VAR,
        "noise": SEEDED,
    }
    if trust == "public":
        common |= {"candidates": ARMS, "most_per_block": 4}
    else:
        common["decision_sets"] = sets
    if "epsilon" in options:
        common["noise_multiplier"] = None
    return in_rounds(PrivateUCB, {**common, **options}, NAMES)


def server_of(trust: str = "joint", **options: Any) -> PrivateUCBServer:
    return study(trust, **options).server(SQUARE, NAMES)


def setup_of(trust: str = "joint", **options: Any) -> Setup:
    return server_of(trust, **options)._promised_setup


def dense_choice(setup: Setup, gram: Tensor, moment: Tensor, arms: Tensor) -> tuple[Tensor, Tensor]:
    """The arm of the largest upper bound by plain linear algebra, and all bounds."""
    B = torch.eye(M).double() + gram
    Phi = PHI(arms)
    mean = Phi @ torch.linalg.solve(B, moment)
    variance = (Phi * torch.linalg.solve(B, Phi.mT).mT).sum(dim=-1, keepdim=True)
    bounds = mean + setup.exploration * variance.sqrt()
    return arms[int(bounds.argmax())].unsqueeze(0), bounds


def floored(gram: Tensor, floor: float) -> Tensor:
    values, Q = torch.linalg.eigh(gram)
    return (Q * values.clamp(min=floor)) @ Q.mT


def contains(data: bytes, numbers: Tensor) -> bool:
    """Whether any of the numbers stands in some bytes."""
    kind = "<q" if numbers.dtype == torch.int64 else "<d"
    values = [v for v in numbers.flatten().tolist() if v not in (0, 1)]
    assert values
    return any(struct.pack(kind, v) in data for v in values)


# ------------------------------------------------------------------ whole runs


@pytest.mark.parametrize("trust", TRUSTS)
def test_a_run_in_every_trust_model(trust: str) -> None:
    problem = KernelBandit(num_agents=3, seed=0)
    options: dict[str, Any] = {} if trust == "none" else {"epsilon": 10.0}
    if trust != "public":
        options["decision_sets"] = lambda name, t: problem.decision_set(int(name[5:]), t)
    result = run(PrivateUCB(budget=6, trust=trust, **options), problem, seed=0)  # type: ignore[arg-type]
    queried = [(row["agent"], row["round"]) for row in result.records]
    assert len(set(queried)) == len(queried)
    assert all(row["replied"] for row in result.rounds)
    report = result.privacy
    assert report is not None
    assert report["trust"] == trust
    assert json.loads(json.dumps(report)) == report
    assert report["private"] == (trust != "none")
    if trust != "none":
        assert report["epsilon"] == report["promised_epsilon"] <= 10.0
        assert report["delta"] == 1e-5
        assert (report["adjacency"], report["unit"]) == ("replace-one", "record")
        assert report["releases"] == 1
    if trust != "public":
        assert len(queried) == 18
        assert report["outcomes"] == 18
        for row in result.records:
            arms = problem.decision_set(int(row["agent"][5:]), row["round"])
            assert bool((arms == torch.tensor(row["x"], dtype=torch.float64)).all(dim=-1).any())


@pytest.mark.parametrize("trust", TRUSTS)
def test_seeded_runs_repeat_themselves(trust: str) -> None:
    first, second = Federation(study(trust)), Federation(study(trust))
    ends = first.drive(), second.drive()
    assert torch.equal(ends[0].parameters.values, ends[1].parameters.values)
    for one, other in zip(first.played(), second.played(), strict=True):
        assert {n: x.tolist() for n, (x, _) in one.items()} == {
            n: x.tolist() for n, (x, _) in other.items()
        }


@pytest.mark.parametrize("trust", ["joint", "public", "none"])
def test_on_the_whole_cube_points_are_those_that_can_be_played(trust: str) -> None:
    space = SearchSpace((Parameter.integer("n", 1, 4), Parameter.real("C", 1e-2, 1e2)))
    options: dict[str, Any] = {} if trust == "none" else {"epsilon": 10.0}
    made = PrivateUCB(budget=3, trust=trust, **options)  # type: ignore[arg-type]
    result = run(made, {"a": hill, "b": hill}, seed=0, space=space)
    for row in result.records:
        X = torch.tensor([row["x"]]).double()
        assert torch.allclose(space.snap(X), X, atol=1e-12)


def test_without_noise_a_run_is_plain_gp_ucb() -> None:
    federation = Federation(study("none", rounds=8))
    federation.drive()
    X, Y = torch.zeros(0, 2).double(), torch.zeros(0, 1).double()
    for t, played in enumerate(federation.played(), start=1):
        if t > 1:
            model = BasisGP(X, Y, feature_map=PHI, noise_var=NOISE_VAR)
            score = UpperConfidenceBound(model, beta=0.5**2)
            for name, (x, _) in played.items():
                arms = sets(name, t)
                with torch.no_grad():
                    best = arms[score(arms.unsqueeze(-2)).argmax()]
                assert torch.equal(x[0], best)
        assert set(played) == set(NAMES)
        X = torch.cat([X, *(played[name][0] for name in NAMES)])
        Y = torch.cat([Y, *(played[name][1] for name in NAMES)])
    model, plain = (
        federation.server.model(federation.end),
        BasisGP(X, Y, feature_map=PHI, noise_var=NOISE_VAR),
    )
    points = uniform(20, 2, seed=3)
    with torch.no_grad():
        ours, theirs = model.posterior(points), plain.posterior(points)
        assert torch.allclose(ours.mean, theirs.mean, atol=1e-10)
        assert torch.allclose(ours.variance, theirs.variance, atol=1e-10)


def test_joint_releases_and_actions_are_those_of_a_prefix_sum_by_hand() -> None:
    federation = Federation(study("joint", rounds=6, height=1.0))
    setup = federation.server.setup
    federation.drive()
    mechanism = PrefixSum(
        num_features=M, outcome_bound=2.0, horizon=6, noise_multiplier=2.0, factorization="sqrt"
    )
    ledger = Ledger("replace-one", "record")
    state, _ = mechanism.start(ledger=ledger, noise=SEEDED)
    release = None
    for t, played in enumerate(federation.played(), start=1):
        if release is not None:
            gram, moment = mechanism.gram_and_moment(
                release.values, noise_var=NOISE_VAR, outputscale=SCALE
            )
            height = release.noise_std * math.sqrt(M / 2) * SCALE / NOISE_VAR
            gram = floored(gram, height)
            for name, (x, _) in played.items():
                assert torch.equal(x, dense_choice(setup, gram, moment, sets(name, t))[0])
        X = torch.cat([played[name][0] for name in NAMES])
        Y = torch.cat([played[name][1] for name in NAMES])
        records = mechanism.records(unit_features(PHI, X), Y)
        state, release = mechanism.step(state, records, noise=SEEDED, path=("release",))
    found = federation.end.parameters
    assert found is not None
    assert release is not None
    assert torch.equal(found.values, release.values)
    assert (found.t, found.count, found.noise_std) == (6, 18, release.noise_std)


def test_local_releases_are_sums_of_the_clients_noisy_increments() -> None:
    federation = Federation(study("local", rounds=5))
    federation.drive()
    mechanism = LocalGaussian(num_features=M, outcome_bound=2.0, noise_multiplier=2.0)
    total = torch.zeros(D).double()
    for t, played in enumerate(federation.played(), start=1):
        for name in NAMES:
            X, Y = played[name]
            release, _ = mechanism.release(
                mechanism.records(unit_features(PHI, X), Y),
                ledger=Ledger("replace-one", "record"),
                noise=SEEDED,
                path=("increment", name, t),
            )
            total = total + release.values[0]
    found = federation.end.parameters
    assert found is not None
    assert torch.equal(found.values, total)
    assert found.count == 15
    assert found.noise_std == pytest.approx(mechanism.noise_scale * 15**0.5, rel=1e-12)


def test_public_blocks_are_observations_of_their_own_variance() -> None:
    federation = Federation(study("public", rounds=12, batch=2))
    blocks = []
    outbox = federation.server.outbox
    state = federation.server.start()
    federation.drive()
    # By hand: the same blocks of the same outcomes.
    mechanism = BlockSum(outcome_bound=2.0, noise_multiplier=2.0)
    secret, _ = mechanism.start(ledger=Ledger("replace-one", "record"), noise=SEEDED)
    X, means, variances = [], [], []
    for played in federation.played():
        given = outbox(state)
        assert given is not None
        block = state.block
        assert block is not None
        order = [name for name in given.messages if name in played]
        assert all(torch.equal(played[name][0], block.X) for name in order)
        if block.count == 0:
            blocks.append(block)
            secret = mechanism.open(secret, block.length)
        Y = torch.cat([played[name][1] for name in order])
        secret, release = mechanism.add(secret, Y, noise=SEEDED, path=("release",))
        state = federation.server.step(state, {n: Outcome(played[n][1]) for n in order})
        if release is not None:
            X.append(block.X)
            means.append(release.mean)
            variances.append(
                (release.length * NOISE_VAR + mechanism.noise_std**2) / block.length**2
            )
    assert len(X) >= 3
    assert len({block.X.numpy().tobytes() for block in blocks}) > 1
    found, again = federation.end.parameters, state.parameters
    assert found is not None
    assert again is not None
    assert torch.equal(found.values, again.values)
    Y, V = torch.tensor(means).double(), torch.tensor(variances).double()
    model = BasisGP(torch.cat(X), Y[:, None], V[:, None], feature_map=PHI)
    points = uniform(20, 2, seed=3)
    with torch.no_grad():
        ours, theirs = (
            federation.server.model(federation.end).posterior(points),
            model.posterior(points),
        )
        assert torch.allclose(ours.mean, theirs.mean, atol=1e-9)
        assert torch.allclose(ours.variance, theirs.variance, atol=1e-9)


def test_a_block_is_as_long_as_what_is_not_known_asks_for() -> None:
    server = server_of("public", rounds=400, most_per_block=None, noise_multiplier=0.5, batch=1)
    block = server.start().block
    assert block is not None
    # Of the prior: s0 = sqrt(2), s = 0.5 * 2, rho = sqrt(0.1): one outcome is enough.
    assert (block.length, block.count) == (1, 0)
    noisy = server_of("public", rounds=400, most_per_block=None, noise_multiplier=7.0, batch=1)
    block = noisy.start().block
    assert block is not None
    assert block.length == math.ceil(14 / math.sqrt(SCALE))
    drowned = server_of("public", rounds=400, most_per_block=None, noise_multiplier=500.0, batch=1)
    block = drowned.start().block
    assert block is not None
    assert block.length == 20  # a twentieth
    short = server_of("public", rounds=3, most_per_block=100, noise_multiplier=500.0, batch=2)
    block = short.start().block
    assert block is not None
    assert block.length == 6  # a longer one could not be completed


# ------------------------------------------------------------------ the rule


def parameters(seed: int = 0, *, noise_std: float = 0.0, count: int = 30) -> Parameters:
    """A release of random data, with noise if there is any."""
    statistic = RecordStatistic(num_features=M, outcome_bound=2.0)
    X, Y = uniform(count, 2, seed=seed), normal(count, 1, seed=seed)
    values = statistic.statistics(statistic.records(unit_features(PHI, X), Y)).sum(dim=0)
    return Parameters(1, values + noise_std * normal(D, seed=seed + 1), noise_std, count)


def asked(setup: Setup, found: Parameters | None, agent: PrivateUCBAgent, t: int = 2) -> Tensor:
    """What an agent plays when it is asked."""
    digests = [agent.blobs.put(encode(setup))]
    if found is not None:
        digests.append(agent.blobs.put(encode(found)))
    state, broadcasts = agent.start(), tuple(digests)
    agent.check(state, Query(t, None), broadcasts)
    state = agent.receive(state, Query(t, None), broadcasts)
    point = agent.ask(state)
    assert isinstance(point, Tensor)
    assert torch.equal(point, agent.ask(state))  # the same state, the same point
    return point


def an_agent(seed: int = 0, **options: Any) -> PrivateUCBAgent:
    return PrivateUCBAgent(name="ann", space=SQUARE, seed=seed, **options)


def test_a_release_is_read_with_a_floor_a_shift_or_the_noise_of_its_moment() -> None:
    std = 0.7
    found = parameters(noise_std=std)
    statistic = RecordStatistic(num_features=M, outcome_bound=2.0)
    gram, moment = statistic.gram_and_moment(found.values, noise_var=NOISE_VAR, outputscale=SCALE)
    unit = SCALE / NOISE_VAR
    height = 4 * std * math.sqrt(M / 2) * unit
    total = private_summary(setup_of(), PHI, found)
    assert torch.allclose(total.gram, floored(gram, height), atol=1e-9)
    assert torch.equal(total.moment, moment)
    total = private_summary(setup_of(psd="shift"), PHI, found)
    upsilon = std / math.sqrt(2) * (2 * math.sqrt(M) + 2 * math.sqrt(math.log(2 * 4 / 0.05)))
    shifted = gram + 2 * upsilon * unit * torch.eye(M).double()
    assert torch.allclose(total.gram, shifted, atol=1e-9)
    # Noise t in the moment: G' = G (G + t^2 I)^-1 G.
    t = std * math.sqrt(SCALE) / NOISE_VAR / (math.sqrt(2) / 2)
    total = private_summary(setup_of(inflate=True), PHI, found)
    G = floored(gram, height)
    smaller = G @ torch.linalg.solve(G + t**2 * torch.eye(M).double(), G)
    assert torch.allclose(total.gram, smaller, rtol=1e-8, atol=1e-8)
    exact = private_summary(setup_of(), PHI, parameters())
    assert torch.equal(
        exact.gram,
        statistic.gram_and_moment(parameters().values, noise_var=NOISE_VAR, outputscale=SCALE)[0],
    )


def test_a_shift_that_is_too_small_once_is_followed_by_a_floor() -> None:
    values = torch.zeros(D).double()
    values[:M] = -1e4  # noise that comes once in a lifetime
    found = Parameters(1, values, 0.5, 3)
    model = parameters_model(setup_of(psd="shift"), found)
    with torch.no_grad():
        variance = model.posterior(ARMS).variance
    assert bool((variance <= PHI(ARMS).square().sum(dim=-1, keepdim=True) * (1 + 1e-9)).all())


@pytest.mark.parametrize("noise_std", [0.0, 0.5])
def test_expected_improvement_is_that_over_the_best_mean(noise_std: float) -> None:
    setup, found = setup_of(acquisition="ei"), parameters(noise_std=noise_std)
    model = parameters_model(setup, found)
    arms = sets("ann", 2, 40)
    with torch.no_grad():
        best = model.posterior(arms).mean.max()
        value = LogExpectedImprovement(model, best_f=best)(arms.unsqueeze(-2))
    point = asked(setup, found, an_agent(decision_sets=partial(sets, "ann", count=40)))
    assert torch.equal(point[0], arms[value.argmax()])


@pytest.mark.parametrize("noise_std", [0.0, 0.3])
def test_the_theorems_width_is_that_of_the_shifted_matrix(noise_std: float) -> None:
    setup = setup_of(psd="shift", norm_bound=1.5)
    found = parameters(noise_std=noise_std)
    statistic = RecordStatistic(num_features=M, outcome_bound=2.0)
    ridge = NOISE_VAR / SCALE
    gram, _ = statistic.gram_and_moment(found.values, noise_var=1.0)
    V, bounds = gram + ridge * torch.eye(M).double(), {}
    if noise_std:
        upsilon = noise_norm_bound(noise_std, M, horizon=setup.horizon, failure=0.05)
        V = V + 2 * upsilon * torch.eye(M).double()
        reach = math.sqrt(M) + math.sqrt(2 * math.log(40 * setup.horizon))
        largest = noise_std / setup.moment_scale * reach
        bounds = {
            "gram_noise_bound": upsilon,
            "moment_noise_bound": largest / math.sqrt(upsilon),
        }
    width = private_ucb_width(
        V,
        t=found.t + 1,
        norm_bound=1.5 * math.sqrt(SCALE),
        noise_std=math.sqrt(NOISE_VAR),
        noise_var=ridge,
        failure=0.05,
        **bounds,
    )
    model, arms = parameters_model(setup, found), sets("ann", 2, 40)
    with torch.no_grad():
        values = UpperConfidenceBound(model, beta=width**2)(arms.unsqueeze(-2))
    point = asked(setup, found, an_agent(decision_sets=partial(sets, "ann", count=40)))
    assert torch.equal(point[0], arms[values.argmax()])


def test_many_dimensions_of_an_additive_function_are_searched_one_by_one() -> None:
    """In eight dimensions 20 starts of a gradient search do not find what coordinates do."""
    dim = 8
    bounds = torch.tensor([[0.0], [1.0]]).double()
    base = QuadratureFourierFeatures.from_kernel(
        StationaryKernel(math.inf, [0.15]), bounds, tol=1e-3
    )
    line = torch.linspace(0, 1, 100).double()[:, None]
    phi = AdditiveFeatures([KLFeatures.from_map(base, line, num_features=8)] * dim)
    space = SearchSpace(tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(dim)))
    X = uniform(400, dim, seed=3)
    Y = torch.sin(9 * X).sum(dim=-1, keepdim=True)
    total = summarize(phi, X, Y, noise_var=0.01)
    setup = replace(setup_of(exploration=0.0), space=space, features=phi.to_tensors())
    view = _View(setup, phi, total, WeightPosterior.from_total(total), parameters())
    point = _action(view, space, None, seed=0, t=3)
    grid = torch.linspace(0, 1, 2001).double()[:, None]
    weights = view.posterior.mean.split(8)
    best = sum(float((phi.maps[i](grid) @ weights[i]).max()) for i in range(dim))
    assert float(view.predict(point)[0]) == pytest.approx(best, abs=1e-3)


def test_a_thompson_sample_is_a_draw_of_the_posterior_scaled_by_exploration() -> None:
    setup, found = setup_of(acquisition="thompson", exploration=0.7), parameters(noise_std=0.5)
    total = private_summary(setup, PHI, found)
    L = torch.linalg.cholesky(torch.eye(M).double() + total.gram)
    arms, chosen = sets("ann", 2, 40), set()
    for seed in range(20):
        z = generator(seed, "score", 2).normal(1, M).mT
        mean = torch.cholesky_solve(total.moment, L)
        w = mean + 0.7 * torch.linalg.solve_triangular(L.mT, z, upper=True)
        agent = an_agent(seed, decision_sets=partial(sets, "ann", count=40))
        point = asked(setup, found, agent)
        assert torch.equal(point[0], arms[int((PHI(arms) @ w).argmax())])
        chosen.add(point.numpy().tobytes())
    assert len(chosen) > 1


@pytest.mark.parametrize("acquisition", ["ucb", "thompson", "ei"])
def test_on_the_cube_the_maximum_is_found(acquisition: str) -> None:
    setup = setup_of(acquisition=acquisition, exploration=1.0)
    found = parameters(noise_std=0.1)
    point = asked(setup, found, an_agent())
    model = parameters_model(setup, found)
    grid = torch.cartesian_prod(
        torch.linspace(0, 1, 60).double(), torch.linspace(0, 1, 60).double()
    )
    if acquisition == "thompson":
        total = private_summary(setup, PHI, found)
        L = torch.linalg.cholesky(torch.eye(M).double() + total.gram)
        z = generator(0, "score", 2).normal(1, M).mT
        w = torch.cholesky_solve(total.moment, L) + torch.linalg.solve_triangular(
            L.mT, z, upper=True
        )
        values, value = PHI(grid) @ w, PHI(point) @ w
    elif acquisition == "ucb":
        score = UpperConfidenceBound(model, beta=1.0)
        with torch.no_grad():
            values, value = score(grid.unsqueeze(-2)), score(point)
    else:
        reference = torch.quasirandom.SobolEngine(2, scramble=False).draw(512, dtype=torch.float64)
        with torch.no_grad():
            best = model.posterior(reference).mean.max()
            improvement = LogExpectedImprovement(model, best_f=best)
            values, value = improvement(grid.unsqueeze(-2)), improvement(point)
    assert float(value) >= float(values.max()) - 1e-6


def test_without_a_release_and_between_ties_arms_are_uniform() -> None:
    # Exploration 0 and moments 0: all arms are worth the same.
    setup = setup_of(exploration=0.0)
    nothing = Parameters(1, torch.zeros(D).double(), 1.0, 0)
    arms = ARMS[:5]
    for found in (None, nothing):
        counts = torch.zeros(5)
        blobs = MemoryBlobs()
        for seed in range(500):
            point = asked(setup, found, an_agent(seed, candidates=arms, blobs=blobs))
            counts += (arms == point).all(dim=-1)
        # 100 each, standard deviation 9: five of them.
        assert bool((counts - 100).abs().max() <= 45), counts


def test_an_unreadable_release_leaves_an_agent_with_a_uniform_arm() -> None:
    values = torch.zeros(D).double()
    values[:M] = -1e6  # of a server without noise: no sum of squares
    agent = an_agent(candidates=ARMS)
    point = asked(setup_of("none"), Parameters(1, values, 0.0, 3), agent)
    assert torch.equal(point, asked(setup_of("none"), None, an_agent(candidates=ARMS)))


@pytest.mark.parametrize("trust", PRIVATE)
def test_what_is_played_depends_on_earlier_rounds_only(trust: str) -> None:
    late = 4
    made = study(trust, rounds=10, noise_multiplier=0.1, most_per_block=1)
    first, second = Federation(made), Federation(made)

    def changed(name: str) -> Objective:
        return lambda X: hill(X) if len(second.rounds) < late - 1 else 1 - hill(X)

    second.objective = changed
    second.open()
    first.drive()
    second.drive()
    one, other = first.played(), second.played()
    for t in range(late):
        assert all(torch.equal(one[t][name][0], other[t][name][0]) for name in one[t])
    assert any(
        not torch.equal(one[t][name][0], other[t][name][0])
        for t in range(late, 10)
        for name in set(one[t]) & set(other[t])
    )


# ------------------------------------------------------------------ who sees what


def test_a_server_sees_records_if_it_is_trusted_and_increments_if_not() -> None:
    for trust, kind in (("joint", Record), ("local", Increment), ("public", Outcome)):
        federation = Federation(study(trust, noise=OSNoise()))
        federation.drive()
        assert all(type(m) is kind for replies in federation.up for m in replies.values())
        played = [pair for round_ in federation.played() for pair in round_.values()]
        X, Y = torch.cat([x for x, _ in played]), torch.cat([y for _, y in played])
        server = b"".join(federation.records)
        agents = b"".join(b"".join(data) for data in federation.down)
        up = b"".join(encode(m) for replies in federation.up for m in replies.values())
        assert contains(up, X) == (trust == "joint")
        assert contains(up, Y) == (trust != "local")
        assert not contains(server, Y)
        assert not contains(agents, Y)
        if trust != "public":
            assert not contains(server, X)
            assert not contains(agents, X)


@pytest.mark.parametrize("trust", ["joint", "public"])
def test_sums_without_noise_are_in_the_secrets_and_nowhere_else(trust: str) -> None:
    secrets = MemoryStore()
    federation = Federation(study(trust, rounds=5, noise=OSNoise(), secrets=secrets))
    seen: list[bytes] = []
    federation.watch = lambda: seen.extend(secrets.get(name) or b"" for name in secrets.names())
    federation.drive()
    played = federation.played()
    statistic = RecordStatistic(num_features=M, outcome_bound=2.0)
    everything = [*federation.records, *(d for data in federation.down for d in data)]
    everything += [encode(site.state) for site in federation.sites.values()]
    server = federation.server
    everything.append(
        (repr(server) + repr(federation.end) + repr(server.privacy(federation.end))).encode()
    )
    if trust == "joint":
        X = torch.cat([played[t][n][0] for t in range(4) for n in NAMES])
        Y = torch.cat([played[t][n][1] for t in range(4) for n in NAMES])
        lattice = server.mechanism.lattice  # type: ignore[union-attr]
        exact = statistic.rounded_sum(statistic.records(unit_features(PHI, X), Y), lattice)
        assert contains(b"".join(seen), exact)
        assert not contains(b"".join(everything), exact)
        assert not contains(b"".join(everything), exact.double() * lattice)
        noise = federation.end.parameters.values - exact.double() * lattice  # type: ignore[union-attr]
        assert not contains(b"".join(everything), noise)
    assert all(repr(Y) not in repr(federation.states) for Y in played)
    # The last two rounds are kept, and nothing else.
    assert len(secrets.names()) == 2
    ((kind, words),) = {(trust, repr(server._newest[secrets.names()[-1]]))}
    assert words == {"joint": "PrefixState(t=5, secret)", "public": "BlockSecret(secret)"}[kind]


def test_messages_do_not_show_data_in_words() -> None:
    X, Y = torch.full((1, 2), 0.125).double(), torch.full((1, 1), 0.375).double()
    for message in (Record(X, Y), Increment(Y[0]), Outcome(Y)):
        assert "0.125" not in repr(message)
        assert "0.375" not in repr(message)


def test_an_agent_keeps_nothing_that_it_has_sent() -> None:
    for trust in TRUSTS:
        federation = Federation(study(trust))
        federation.drive()
        for site in federation.sites.values():
            assert site.state.X is None
            assert site.state.Y is None


# ------------------------------------------------------------------ crashes


@pytest.mark.parametrize("trust", TRUSTS)
def test_a_run_may_stop_anywhere_and_goes_on_as_if_nothing_had_happened(
    trust: str, tmp_path: Path
) -> None:
    whole = Federation(study(trust))
    whole.drive()
    for where in ("save", "exchange"):
        for stop in range(5):
            place = tmp_path / f"{where}-{stop}"
            place.mkdir(mode=0o700)
            options: dict[str, Any] = {"secrets": FileStore(place / "secrets")}
            books = None
            if trust in ("joint", "public"):
                books = LedgerFile(place / "books", adjacency="replace-one", unit="record")
                options["books"] = books
            federation = Federation(study(trust, **options))
            count = 0

            def pull(*_: object, stop: int = stop) -> None:
                nonlocal count
                count += 1
                if count > stop:
                    raise Stopped

            if where == "exchange":
                federation.watch = pull
            stopped = False
            try:
                federation.drive(save=pull if where == "save" else None)
            except Stopped:
                stopped = True
            assert stopped == (where == "save" or stop < 4)
            if stopped:
                federation.watch = lambda: None
                if books is not None:
                    books.close()
                    books = LedgerFile(place / "books", adjacency="replace-one", unit="record")
                    options["books"] = books
                options["secrets"] = FileStore(place / "secrets")
                federation.study = study(trust, **options)
                federation.open()
                federation.drive(resume=True)
            found, expected = federation.end, whole.end
            assert torch.equal(found.parameters.values, expected.parameters.values)
            assert found.ledger == expected.ledger
            assert found.ledger.releases == (trust in ("joint", "public"))
            if books is not None:
                assert books.releases == 1
                books.close()


@pytest.mark.parametrize("trust", ["joint", "public"])
def test_no_round_draws_noise_twice_whoever_answers_the_second_time(trust: str) -> None:
    server = server_of(trust, noise=OSNoise(), most_per_block=3)
    state = server.start()
    inboxes = []
    for count in (3, 1, 0):
        X, Y = uniform(3, 2, seed=5), normal(3, 1, seed=6)
        reply = [
            Outcome(Y[i : i + 1]) if trust == "public" else Record(X[i : i + 1], Y[i : i + 1])
            for i in range(count)
        ]
        inboxes.append(dict(zip(NAMES, reply, strict=False)))
    ends = [server.step(state, inbox) for inbox in inboxes]
    first = ends[0].parameters
    for end in ends[1:]:
        if first is None:
            assert end.parameters is None
            continue
        assert end.parameters is not None
        assert torch.equal(end.parameters.values, first.values)
        assert end.parameters.count == first.count
    # Another start of the run, with the same store, is another stream.
    other = server.step(server.start(), inboxes[0])
    if trust == "joint":
        assert first is not None
        assert other.parameters is not None
        assert not torch.equal(other.parameters.values, first.values)


@pytest.mark.parametrize("trust", ["joint", "public"])
def test_without_its_secrets_a_run_does_not_go_on(trust: str) -> None:
    federation = Federation(study(trust))

    def stop(record: bytes) -> None:
        if len(federation.records) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        federation.drive(save=stop)
    asked_before = len(federation.down)
    federation.open()
    with pytest.raises(ProtocolError, match=r"secrets=FileStore\(folder\)"):
        federation.drive(resume=True)
    assert len(federation.down) == asked_before  # nobody was asked in vain
    state = decode(decode_record(federation.records[-1]), PrivateUCBServerState, max_bytes=2**20)
    with pytest.raises(ProtocolError, match="secrets"):
        federation.server.step(state, {})


def test_a_damaged_secret_ends_the_run_in_words() -> None:
    server = server_of("joint")
    state = server.step(server.start(), {})
    (name,) = server.secrets.names()
    server.secrets.put(name, encode(Query(1, None)))
    server._newest.clear()
    with pytest.raises(ProtocolError, match="cannot be read"):
        server.step(state, {})


def decode_record(record: bytes) -> bytes:
    from botorch_fed.protocols.drive import ServerRecord

    state: bytes = decode(record, ServerRecord).state
    return state


def test_a_run_in_a_folder_is_resumed_with_its_secrets(tmp_path: Path) -> None:
    class Plug:
        def __init__(self, after: int | None) -> None:
            self.after = after

        def __call__(self, X: Tensor) -> Tensor:
            if self.after is not None:
                self.after -= 1
                if self.after < 0:
                    raise Stopped
            return hill(X)

    def go(secrets: Any, after: int | None, out: str, resume: bool = False) -> Any:
        made = study("joint", rounds=5, secrets=secrets)
        objectives: dict[str, Objective] = {"ann": Plug(after), "bob": hill}
        return run(made, objectives, space=SQUARE, seed=0, out=tmp_path / out, resume=resume)

    whole = go(None, None, "whole")
    with pytest.raises(Stopped):
        go(FileStore(tmp_path / "secrets"), 3, "stopped")
    with pytest.raises(ProtocolError, match="FileStore"):
        go(None, None, "stopped", resume=True)
    again = go(FileStore(tmp_path / "secrets"), None, "stopped", resume=True)
    assert [row["x"] for row in again.records] == [row["x"] for row in whole.records]
    assert again.privacy == whole.privacy


# ------------------------------------------------------------------ what is paid and promised


def test_a_budget_that_does_not_cover_the_run_is_refused_at_once(tmp_path: Path) -> None:
    server = server_of("joint")
    tight = Ledger("replace-one", "record", Budget(0.5, 1e-5))
    with pytest.raises(BudgetExceeded):
        replace(server, ledger=tight)
    # Books may be used up meanwhile: then the first round releases nothing.
    with LedgerFile(
        tmp_path / "books", adjacency="replace-one", unit="record", budget=Budget(4.8, 1e-5)
    ) as books:
        first = server_of("joint", epsilon=4.0, books=books)
        second = server_of("public", epsilon=4.0, books=books)
        state = first.step(first.start(), {})
        assert state.ledger.releases == books.releases == 1
        with pytest.raises(BudgetExceeded):
            second.step(second.start(), {})
        assert second.secrets.names() == []
        assert books.releases == 1
        for _ in range(2):  # paid once for all rounds
            state = first.step(state, {})
        assert books.releases == 1


def test_promises_are_those_of_one_gaussian_mechanism() -> None:
    for trust in PRIVATE:
        server = server_of(trust, epsilon=3.0, rounds=50, noise=OSNoise())
        assert server.promise is not None
        assert 3.0 * 0.999 <= server.promise.epsilon <= 3.0
        assert server.promise.private
        z = server.setup.noise_multiplier
        alone = compose([Event(z)], delta=1e-5, adjacency="replace-one", unit="record")
        assert server.promise.epsilon == alone.epsilon
        assert "epsilon <=" in repr(server)
        assert repr(server.mechanism) == server.privacy(server.start())["settings"]
    assert "actions public" in repr(server_of("public").mechanism)
    assert server_of("none").promise is None
    seeded = server_of("joint")
    assert seeded.promise is not None
    assert not seeded.promise.private


def test_agents_as_units_count_how_often_they_are_asked() -> None:
    # 7 rounds of 2 out of 3 agents: 14 queries, nobody is asked more than 5 times.
    server = server_of("joint", unit="agent", rounds=7, batch=2)
    assert server.participations == 5
    record = server_of("joint", rounds=7, batch=2)
    assert isinstance(server.mechanism, PrefixSum)
    assert isinstance(record.mechanism, PrefixSum)
    ratio = server.mechanism.noise_std(3) / record.mechanism.noise_std(3)
    # Rounding adds 2^-21 of the noise times sqrt(D) to a record.
    assert ratio == pytest.approx(5, rel=1e-4)
    assert server.promise is not None
    assert server.promise.unit == "agent"
    local = server_of("local", unit="agent", rounds=7, batch=2)
    five = compose([Event(2.0)] * 5, delta=1e-5, adjacency="replace-one", unit="agent")
    assert local.promise is not None
    assert local.promise.epsilon == five.epsilon
    calibrated = server_of("local", unit="agent", rounds=7, batch=2, epsilon=2.0)
    assert calibrated.promise is not None
    assert 2.0 * 0.999 <= calibrated.promise.epsilon <= 2.0
    with pytest.raises(InputDataError, match="agents that give one"):
        server_of("public", unit="agent")
    assert server_of("public", unit="agent", rounds=3, batch=1).participations == 1


def test_agents_are_asked_in_turn() -> None:
    federation = Federation(study("joint", rounds=7, batch=2))
    federation.drive()
    asked_names = [tuple(round_.replied) for round_ in federation.rounds]
    turns = ["ann", "bob", "cem"] * 5
    assert asked_names == [tuple(sorted(turns[2 * t : 2 * t + 2])) for t in range(7)]
    assert federation.end.asked == 14
    assert federation.report()["outcomes"] == 14


def test_local_agents_pay_from_their_own_ledgers() -> None:
    cost = compose([Event(2.0)], delta=1e-5, adjacency="replace-one", unit="agent").epsilon
    # A record is in one increment: its price is paid once for all of them.
    federation = Federation(study("local", noise=OSNoise()))
    federation.drive()
    for site in federation.sites.values():
        assert (site.state.releases, site.state.ledger.releases) == (4, 1)
    assert federation.report()["epsilon"] == pytest.approx(cost)
    # An agent is in all of them. Its budget is for two.
    two = compose([Event(2.0)] * 2, delta=1e-5, adjacency="replace-one", unit="agent").epsilon
    lenient = {"require": None}
    federation = Federation(study("local", unit="agent", noise=OSNoise()), site_options=lenient)
    federation.drive()
    for site in federation.sites.values():
        assert site.state.ledger.releases == 4
    promised = replace(federation.server.promise, epsilon=two)  # type: ignore[type-var]
    agent = an_agent(decision_sets=partial(sets, "ann"), unit="agent", require=Budget(two, 1e-5))
    setup = replace(setup_of("local", unit="agent", noise=OSNoise()), promise=promised)
    played = []
    state = agent.start()
    digest = agent.blobs.put(encode(setup))
    for t in (1, 2, 3):
        agent.check(state, Query(t, None), (digest,))
        if t == 3:
            with pytest.raises(BudgetExceeded):  # before anything is played
                agent.receive(state, Query(t, None), (digest,))
            break
        state = agent.receive(state, Query(t, None), (digest,))
        X = agent.ask(state)
        assert isinstance(X, Tensor)
        state, message = agent.reply(agent.tell(state, X, hill(X)))
        assert isinstance(message, Increment)
        played.append(X)
    assert len(played) == 2


def test_a_site_without_budget_refuses_and_the_others_go_on() -> None:
    made = study("local", unit="agent", noise=OSNoise(), rounds=3)
    two = compose([Event(2.0)] * 2, delta=1e-5, adjacency="replace-one", unit="agent").epsilon
    federation = Federation(made)
    poor = replace(federation.sites["bob"].agent, require=Budget(two, 1e-5))
    federation.sites["bob"] = Site("bob", poor, hill)
    # The server is caught understating: its promise is what the site requires.
    setup = federation.server.setup
    promise = replace(federation.server.promise, epsilon=two)  # type: ignore[type-var]
    federation.server.__dict__["_promised_setup"] = replace(setup, promise=promise)
    federation.drive()
    codes = [round_.exchanged.failures.get("bob") for round_ in federation.rounds]
    assert [None if failure is None else failure.code for failure in codes] == [
        None,
        None,
        "budget",
    ]
    assert federation.end.parameters is not None
    assert federation.end.parameters.count == 8


PROMISE = Guarantee(1.0, 1e-5, "record", "replace-one", 1, "pld")


@pytest.mark.parametrize(
    ("promise", "options", "words"),
    [
        (None, {}, "promises none"),
        (replace(PROMISE, private=False), {}, "from a seed"),
        (PROMISE, {"unit": "agent"}, "per record"),
        (replace(PROMISE, adjacency="zero-out"), {}, "zero-out"),
        (replace(PROMISE, epsilon=2.1), {}, "promises"),
        (replace(PROMISE, delta=1e-4), {}, "promises"),
        (PROMISE, {"trust": "local"}, "takes part with"),
        (PROMISE, {}, None),
        (replace(PROMISE, unit="agent"), {}, None),
        (replace(PROMISE, adjacency="zero-out"), {"adjacency": "zero-out"}, None),
        (PROMISE, {"trust": "joint"}, None),
    ],
)
def test_a_site_takes_part_in_what_it_requires(
    promise: Guarantee | None, options: dict[str, Any], words: str | None
) -> None:
    setup = replace(setup_of("joint"), promise=promise)
    if promise is not None:
        setup = replace(setup, unit=promise.unit, adjacency=promise.adjacency)
    agent = an_agent(candidates=ARMS, require=Budget(2.0, 1e-5), **options)
    if words is None:
        asked(setup, None, agent, 1)
    else:
        with pytest.raises(MessageError, match=words):
            asked(setup, None, agent, 1)


@pytest.mark.parametrize("lie", [{"unit": "record"}, {"adjacency": "zero-out"}])
def test_a_promise_about_another_unit_than_the_noise_is_refused(lie: dict[str, Any]) -> None:
    """A local site's ledger follows the setup: with a unit of less it would pay too little."""
    two = compose([Event(2.0)] * 2, delta=1e-5, adjacency="replace-one", unit="agent").epsilon
    promise = Guarantee(two, 1e-5, "agent", "replace-one", 2, "pld")
    setup = replace(setup_of("local", unit="agent", noise=OSNoise()), promise=promise)
    options: dict[str, Any] = {"unit": "agent", "trust": "local", "require": Budget(two, 1e-5)}
    agent = an_agent(candidates=ARMS, noise=OSNoise(), **options)
    asked(setup, None, agent, 1)
    with pytest.raises(MessageError, match="they must agree"):
        asked(replace(setup, **lie), None, agent, 1)


def test_a_made_up_basis_does_not_silence_a_site_by_its_arms() -> None:
    """Features that are not a number in one region: who has arms there replies like the others."""
    cube = SearchSpace(tuple(Parameter.real(name, 0.0, 1.0) for name in "abc"))
    rows = [[1e308, -1e308, 1e308], [1.0, 2.0, 3.0], [2.0, 1.0, 0.0]]
    F = torch.tensor(rows, dtype=torch.float64)
    phi = RandomFourierFeatures(StationaryKernel(math.inf, [0.5] * 3), F)
    made = study("local", feature_map=phi, noise=OSNoise(), decision_sets=None)
    setup = made.server(cube, NAMES)._promised_setup
    # The features are not a number where the first minus the second plus the third is large.
    outside = uniform(20, 3) * torch.tensor([0.5, 1.0, 0.5]).double()
    for arms in (outside, torch.cat([outside, torch.tensor([[0.99, 0.01, 0.99]]).double()])):
        agent = PrivateUCBAgent(name="ann", space=cube, seed=0, candidates=arms, noise=OSNoise())
        assert bool(phi(arms).isfinite().all()) == (len(arms) == 20)
        digest = agent.blobs.put(encode(setup))
        state, query = agent.start(), Query(1, None)
        agent.check(state, query, (digest,))
        state = agent.tell(
            agent.receive(state, query, (digest,)), arms[-1:], torch.ones(1, 1).double()
        )
        _, reply = agent.reply(state)
        assert isinstance(reply, Increment)
        assert bool(reply.values.isfinite().all())
        found = Parameters(1, torch.zeros(len(reply.values)).double(), 1.0, 1)
        point = asked(setup, found, agent)
        assert bool(phi(point).isfinite().all())


def test_blocks_end_before_the_last_release() -> None:
    options: dict[str, Any] = {"rounds": 6, "batch": 2, "most_per_block": 100}
    made = study("public", final_release=False, noise_multiplier=100.0, **options)
    federation = Federation(made)
    federation.drive()
    assert federation.end.parameters is not None
    assert federation.end.parameters.count == 10


@pytest.mark.parametrize("trust", TRUSTS)
def test_too_many_features_are_refused_at_once(trust: str) -> None:
    phi = RandomFourierFeatures.draw(
        StationaryKernel(math.inf, [0.5] * 2), 2400, generator=generator(0, "many")
    )
    with pytest.raises(InputDataError, match="at most 2,000"):
        server_of(trust, feature_map=phi)
    setup = replace(setup_of(trust), features=phi.to_tensors())
    with pytest.raises(MessageError, match="too large to be sent"):
        asked(setup, None, an_agent(candidates=ARMS), 1)


def test_a_local_site_that_requires_privacy_has_noise_of_its_own() -> None:
    setup = replace(setup_of("local"), promise=PROMISE)
    agent = an_agent(candidates=ARMS, require=Budget(60.0, 1e-5), noise=SEEDED)
    with pytest.raises(MessageError, match="its own noise"):
        asked(setup, None, agent, 1)


def test_a_value_that_comes_too_late_is_neither_sent_nor_paid_for() -> None:
    calls = 0

    def slow(name: str) -> Objective:
        def objective(X: Tensor) -> Tensor | Pending:
            nonlocal calls
            calls += name == "bob"
            return Pending() if name == "bob" and calls <= 2 else hill(X)

        return objective

    made = study("local", unit="agent", noise=OSNoise())
    federation = Federation(made, objective=slow)
    federation.drive()
    codes = [round_.exchanged.failures.get("bob") for round_ in federation.rounds]
    assert [failure.code for failure in codes if failure is not None] == ["busy"]
    state = federation.sites["bob"].state
    assert (state.releases, state.ledger.releases) == (3, 3)
    assert len(federation.sites["bob"].trials()) == 4
    assert federation.report()["outcomes"] == 11


def test_zeroed_records_take_other_noise_and_another_promise() -> None:
    for trust in PRIVATE:
        federation = Federation(study(trust, adjacency="zero-out"))
        federation.drive()
        assert federation.report()["adjacency"] == "zero-out"
        promise = federation.server.promise
        assert promise is not None
        z = compose([Event(2.0)], delta=1e-5, adjacency="zero-out", unit="record")
        assert promise.epsilon == z.epsilon


@pytest.mark.parametrize("trust", ["joint", "local"])
def test_the_noise_is_as_large_as_the_release_says(trust: str) -> None:
    statistic = RecordStatistic(num_features=M, outcome_bound=2.0)
    exact = statistic.statistics(statistic.records(unit_features(PHI, GOOD_X), GOOD_Y + 1))[0]
    server = server_of(trust, noise=OSNoise(), decision_sets=None, candidates=GOOD_X)
    found = []
    for _ in range(200):
        reply: Any = Record(GOOD_X, GOOD_Y + 1)
        if trust == "local":
            agent = an_agent(candidates=GOOD_X)
            digest = agent.blobs.put(encode(server._promised_setup))
            state = agent.receive(agent.start(), Query(1, None), (digest,))
            _, reply = agent.reply(agent.tell(state, GOOD_X, GOOD_Y + 1))
            exact_y = SQUARE.outcome.to_public(GOOD_Y + 1)
            records = statistic.records(unit_features(PHI, GOOD_X), exact_y)
            exact = statistic.statistics(records)[0]
        end = server.step(server.start(), {"ann": reply}).parameters
        assert end is not None
        found.append((end.values - exact) / end.noise_std)
    # The mean of n squares of normals has standard deviation sqrt(2/n): five of them.
    n = 200 * D
    assert abs(float(torch.stack(found).square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(torch.stack(found).mean())) < 5 / math.sqrt(n)


# ------------------------------------------------------------------ who does not answer


def test_absent_agents_add_nothing() -> None:
    federation = Federation(
        study("joint"), absent=lambda name, serial: name == "bob" and serial == 2
    )
    federation.drive()
    assert federation.report()["outcomes"] == 11
    nobody = Federation(study("joint"), absent=lambda name, serial: True)
    nobody.drive()
    assert nobody.end.parameters is not None  # noise is released all the same
    assert nobody.end.parameters.count == 0
    assert nobody.end.parameters.noise_std > 0
    silent = Federation(study("local"), absent=lambda name, serial: serial == 1)
    silent.drive()
    assert silent.end.parameters is not None
    assert silent.end.parameters.count == 9


def test_a_block_waits_for_outcomes_that_are_missing() -> None:
    made = study("public", rounds=6, batch=2, most_per_block=3, noise_multiplier=100.0)
    federation = Federation(made, absent=lambda name, serial: serial <= 3)
    federation.drive(
        save=lambda record: federation.states.append(
            decode(decode_record(record), PrivateUCBServerState)
        )
    )
    counts = [state.block.count for state in federation.states if state.block is not None]
    assert counts == [0, 0, 0, 0, 2, 0]
    end = federation.end
    assert end.parameters is not None
    # The next block is as long as the last round has room for.
    assert (end.parameters.t, end.parameters.count) == (6, 5)
    assert end.block is None
    # A block of three takes two outcomes of two agents, then one of the next.
    assert [len(round_.replied) for round_ in federation.rounds] == [0, 0, 0, 2, 1, 2]
    assert end.asked == 3 * 2 + 2 + 1 + 2


def test_the_last_sum_may_stay_in_the_house() -> None:
    server = server_of("joint", final_release=False)
    assert isinstance(server.mechanism, PrefixSum)
    assert server.mechanism.horizon == 3
    federation = Federation(study("joint", final_release=False))
    federation.drive()
    assert federation.end.t == 4
    assert federation.end.parameters is not None
    assert federation.end.parameters.t == 3
    one = Federation(study("joint", rounds=1, final_release=False))
    one.drive()
    assert one.end.parameters is None
    for trust in TRUSTS:
        Federation(study(trust, rounds=2, final_release=False)).drive()


# ------------------------------------------------------------------ hostile messages


@pytest.mark.parametrize(
    ("trust", "message"),
    [
        ("joint", Record(GOOD_X[:, :1], GOOD_Y)),
        ("joint", Record(GOOD_X.float(), GOOD_Y)),
        ("joint", Record(GOOD_X + 0.6, GOOD_Y)),
        ("joint", Record(GOOD_X * math.nan, GOOD_Y)),
        ("joint", Record(GOOD_X.expand(2, 2), GOOD_Y)),
        ("joint", Record(GOOD_X, GOOD_Y.expand(2, 1))),
        ("joint", Record(GOOD_X, GOOD_Y.float())),
        ("joint", Record(GOOD_X, GOOD_Y + math.inf)),
        ("joint", Record(GOOD_X, GOOD_Y * math.nan)),
        ("joint", Increment(torch.zeros(D).double())),
        ("joint", Outcome(GOOD_Y)),
        ("none", Increment(torch.zeros(D).double())),
        ("local", Record(GOOD_X, GOOD_Y)),
        ("local", Increment(torch.zeros(D + 1).double())),
        ("local", Increment(torch.zeros(1, D).double())),
        ("local", Increment(torch.zeros(D))),
        ("local", Increment(torch.full((D,), math.nan).double())),
        ("local", Increment(torch.full((D,), 1e6).double())),
        ("public", Record(GOOD_X, GOOD_Y)),
        ("public", Outcome(GOOD_Y * math.nan)),
        ("public", Outcome(GOOD_Y[0])),
        ("public", Outcome(GOOD_Y.expand(2, 1))),
    ],
)
def test_hostile_replies_are_refused(trust: str, message: Any) -> None:
    server = server_of(trust)
    with pytest.raises(MessageError):
        server.check(server.start(), "ann", message)


@pytest.mark.parametrize(
    ("trust", "message"),
    [
        ("joint", Record(GOOD_X, GOOD_Y)),
        ("joint", Record(GOOD_X * 0, GOOD_Y + 1e9)),  # it will be clipped
        ("none", Record(GOOD_X, GOOD_Y)),
        ("local", Increment(torch.full((D,), 20.0).double())),
        ("public", Outcome(GOOD_Y - 1e9)),
    ],
)
def test_good_replies_are_taken_from_those_who_were_asked(trust: str, message: Any) -> None:
    server = server_of(trust, batch=2, rounds=3)
    state = server.start()
    server.check(state, "ann", message)
    for stranger in ("cem", "zoe"):
        with pytest.raises(MessageError, match="nobody asked"):
            server.check(state, stranger, message)
    state = server.step(state, {"ann": message})
    if trust == "joint":
        assert state.parameters is not None
        assert bool(state.parameters.values.isfinite().all())


def test_outcomes_beyond_the_bound_count_as_the_bound() -> None:
    ends = []
    for y in (2.0, 1e12):
        server = server_of("joint")
        ends.append(server.step(server.start(), {"ann": Record(GOOD_X, GOOD_Y + y)}))
    assert ends[0].parameters is not None
    assert ends[1].parameters is not None
    assert torch.equal(ends[0].parameters.values, ends[1].parameters.values)


def _with(setup: Setup, **changes: Any) -> Callable[[], tuple[Setup, Parameters | None, Query]]:
    return lambda: (replace(setup, **changes), None, Query(1, None))


OTHER_SPACE = SearchSpace((Parameter.real("a", 0.0, 2.0), Parameter.real("b", 0.0, 1.0)))
LINE = KLFeatures.from_map(random_fourier(), uniform(50, 2), num_features=3)


@pytest.mark.parametrize(
    "request_",
    [
        _with(setup_of(), space=OTHER_SPACE),
        _with(setup_of(), features={"kind": torch.zeros(3)}),
        _with(setup_of(), features={}),
        _with(setup_of("local"), noise_multiplier=1e300),
        _with(setup_of("local"), noise_multiplier=-1.0),
        _with(setup_of("local"), noise_multiplier=math.nan),
        lambda: (setup_of(), None, Query(0, None)),
        lambda: (setup_of(), None, Query(5, None)),
        lambda: (setup_of(), None, Query(1, GOOD_X)),
        lambda: (setup_of("public"), None, Query(1, None)),
        lambda: (setup_of("public"), None, Query(1, GOOD_X)),  # not one of the candidates
        lambda: (setup_of("public"), None, Query(1, GOOD_X + 0.6)),
        lambda: (setup_of("public"), None, Query(1, ARMS[:2])),
        lambda: (setup_of(), replace(parameters(), t=2), Query(2, None)),
        lambda: (
            setup_of(),
            replace(parameters(), values=torch.zeros(D + 1).double()),
            Query(2, None),
        ),
        lambda: (
            setup_of(),
            replace(parameters(), values=torch.full((D,), 1e16).double()),
            Query(2, None),
        ),
        lambda: (setup_of(), replace(parameters(), values=torch.zeros(D).long()), Query(2, None)),
        lambda: (setup_of(), replace(parameters(), noise_std=-1.0), Query(2, None)),
        lambda: (setup_of(), replace(parameters(), noise_std=1e300), Query(2, None)),
        lambda: (setup_of(), replace(parameters(), t=-1), Query(2, None)),
    ],
)
def test_hostile_requests_are_refused(
    request_: Callable[[], tuple[Setup, Parameters | None, Query]],
) -> None:
    agent = an_agent(candidates=ARMS)
    try:
        setup, found, query = request_()
        digests = [agent.blobs.put(encode(setup))]
    except (MessageError, InputDataError):
        return  # nobody can even write it
    if found is not None:
        digests.append(agent.blobs.put(encode(found)))
    with pytest.raises(MessageError):
        agent.check(agent.start(), query, tuple(digests))


def test_a_setup_does_not_change_and_rounds_do_not_go_back() -> None:
    agent = an_agent(candidates=ARMS)
    first, second = (agent.blobs.put(encode(setup_of(exploration=value))) for value in (0.5, 0.6))
    state = agent.receive(agent.start(), Query(2, None), (first,))
    for query, digests in (
        (Query(3, None), (second,)),
        (Query(2, None), (first,)),
        (Query(1, None), (first,)),
        (Query(3, None), ()),
        (Query(3, None), (first, first, first)),
    ):
        with pytest.raises(MessageError):
            agent.check(state, query, digests)
    agent.check(state, Query(3, None), (first,))
    with pytest.raises(ProtocolError, match="Nothing was played"):
        agent.reply(state)


def test_who_has_decision_sets_of_its_own_plays_nothing_that_others_choose() -> None:
    agent = an_agent(decision_sets=partial(sets, "ann"))
    digest = agent.blobs.put(encode(setup_of("public")))
    with pytest.raises(MessageError, match="private"):
        agent.check(agent.start(), Query(1, ARMS[:1]), (digest,))


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 0},
        {"noise_multiplier": None},
        {"epsilon": 1.0, "noise_multiplier": 1.0},
        {"trust": "none", "noise_multiplier": 1.0},
        {"trust": "nobody"},
        {"acquisition": "pi"},
        {"psd": "hope"},
        {"psd": "shift", "inflate": True},
        {"norm_bound": 1.0},
        {"norm_bound": 1.0, "psd": "shift", "acquisition": "ei"},
        {"noise_var": 0.0},
        {"outcome_bound": 0.0},
        {"exploration": -1.0},
        {"height": -1.0},
        {"height": math.nan},
        {"moment_scale": 0.0},
        {"batch": 0},
        {"batch": 4},
        {
            "feature_map": KLFeatures.from_map(
                quadrature(), uniform(50, 2), num_features=3
            ).base.covariance
        },
        {"trust": "public", "decision_sets": sets},
        {"trust": "public", "decision_sets": None, "candidates": ARMS + 1},
        {"trust": "public", "decision_sets": None, "candidates": ARMS[:0]},
        {"trust": "public", "decision_sets": None, "most_per_block": 0},
    ],
)
def test_settings_that_make_no_run_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((InputDataError, AttributeError)):
        replace(study(), **options).server(SQUARE, NAMES)


def test_a_server_wants_the_mechanism_of_its_setup() -> None:
    server = server_of("joint")
    assert isinstance(server.mechanism, PrefixSum)
    short = PrefixSum(num_features=M, outcome_bound=2.0, horizon=3, noise_multiplier=2.0)
    quiet = PrefixSum(num_features=M, outcome_bound=2.0, horizon=4, noise_multiplier=1.0)
    for changes, words in (
        ({"mechanism": None}, "needs a PrefixSum"),
        ({"mechanism": BlockSum(outcome_bound=2.0, noise_multiplier=2.0)}, "needs a PrefixSum"),
        ({"mechanism": quiet}, "not that of the setup"),
        ({"mechanism": short}, "horizon"),
        ({"agents": ()}, "at least one"),
        ({"agents": ("ann", "ann")}, "differ"),
        ({"setup": server._promised_setup}, "makes the promise"),
        ({"candidates": ARMS}, "public actions only"),
        ({"ledger": Ledger()}, "another adjacency or unit"),
    ):
        with pytest.raises(InputDataError, match=words):
            replace(server, **changes)
    once = replace(server.mechanism, unit="agent")
    agents = Ledger("replace-one", "agent")
    with pytest.raises(InputDataError, match="participations"):
        replace(server, setup=replace(server.setup, unit="agent"), mechanism=once, ledger=agents)
    with pytest.raises(InputDataError, match="pays for nothing"):
        replace(server_of("none"), ledger=Ledger(budget=Budget(1.0, 1e-5)))


def test_an_agent_says_what_is_wrong_with_its_settings() -> None:
    for options in (
        {"candidates": ARMS[:0]},
        {"candidates": ARMS + 1},
        {"candidates": ARMS, "decision_sets": partial(sets, "ann")},
        {"unit": "user"},
        {"adjacency": "add"},
        {"trust": "nobody"},
    ):
        with pytest.raises(InputDataError):
            an_agent(**options)
    agent = an_agent(decision_sets=lambda t: ARMS * 2)
    with pytest.raises(InputDataError, match="decision set of round 1"):
        asked(setup_of(), None, agent, 1)


def test_other_settings_have_other_fingerprints() -> None:
    base = server_of("joint")
    others = [
        server_of("joint", **options)
        for options in (
            {"rounds": 5},
            {"exploration": 0.6},
            {"noise_multiplier": 2.1},
            {"factorization": "tree"},
            {"final_release": False},
            {"batch": 2},
            {"noise": OSNoise()},
            {"unit": "agent"},
        )
    ]
    prints = [server.fingerprint for server in (base, *others)]
    assert len(set(prints)) == len(prints)
    assert base.fingerprint == server_of("joint").fingerprint


def test_a_copy_of_a_study_neither_pays_nor_knows_secrets(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "books", adjacency="replace-one", unit="record") as books:
        made = study("joint", books=books, secrets=MemoryStore())
        copy = pickle.loads(pickle.dumps(made))
    assert copy.secrets is None
    with pytest.raises(ProtocolError, match="cannot pay"):
        copy.server(SQUARE, NAMES)
    copy.agent("ann", SQUARE, 0, MemoryBlobs())


# ------------------------------------------------------------------ the model is BoTorch's


@pytest.mark.parametrize("trust", TRUSTS)
def test_anybody_may_have_the_model(trust: str) -> None:
    federation = Federation(study(trust, rounds=5))
    federation.drive()
    server, end = federation.server, federation.end
    before = server.model(server.start())
    with torch.no_grad():
        prior = before.posterior(ARMS)
        assert torch.allclose(prior.mean, torch.zeros(9, 1).double())
        expected = PHI(ARMS).square().sum(dim=-1, keepdim=True)
        assert torch.allclose(prior.variance, expected, atol=1e-10)
    model = server.model(end)
    public = parameters_model(setup_of(trust, rounds=5), end.parameters)
    with torch.no_grad():
        assert torch.equal(model.posterior(ARMS).mean, public.posterior(ARMS).mean)
        assert bool((model.posterior(ARMS).variance <= expected * (1 + 1e-9)).all())
    bounds = SQUARE.bounds
    for acquisition in (
        UpperConfidenceBound(model, beta=0.25),
        LogExpectedImprovement(model, best_f=0.5),
    ):
        point, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=16)
        assert point.shape == (1, 2)
    chosen = MaxPosteriorSampling(model, replacement=False)(ARMS, num_samples=2)
    assert chosen.shape == (2, 2)


def test_any_feature_map_will_do() -> None:
    from test.cases import MAPS

    for make in MAPS.values() if isinstance(MAPS, dict) else MAPS:
        phi: FeatureMap = make()
        if phi.input_dim != 2:
            continue
        federation = Federation(study("joint", rounds=3, feature_map=phi, noise_multiplier=0.5))
        federation.drive()
        noiseless = Federation(study("none", rounds=3, feature_map=phi))
        noiseless.drive()
        played = noiseless.played()
        X = torch.cat([played[t][n][0] for t in range(3) for n in NAMES])
        Y = torch.cat([played[t][n][1] for t in range(3) for n in NAMES])
        total: Summary = summarize(phi, X, Y, noise_var=NOISE_VAR, noise="iid")
        found = private_summary(noiseless.server.setup, phi, noiseless.end.parameters)  # type: ignore[arg-type]
        assert torch.allclose(found.gram, total.gram, atol=1e-8 * float(total.gram.abs().max()))
        assert torch.allclose(
            found.moment, total.moment, atol=1e-8 * float(total.moment.abs().max())
        )


def test_the_signal_beside_the_noise() -> None:
    assert signal_to_noise(None) is None
    assert signal_to_noise(parameters()) is None
    loud = Parameters(1, torch.full((D,), 10.0).double(), 1.0, 5)
    assert signal_to_noise(loud) == pytest.approx(math.sqrt(99))
    assert signal_to_noise(Parameters(1, torch.zeros(D).double(), 1.0, 5)) == 0.0


def test_a_bandit_with_privacy_beats_random_play() -> None:
    # 300 actions: random play has a mean regret of 0.59 an action against the best arm.
    problem = KernelBandit(num_agents=1, seed=0)
    arms = problem.decision_sets(301)
    result = run(
        PrivateUCB(budget=300, epsilon=10.0, noise=SEEDED, decision_sets=lambda name, t: arms[t]),
        problem,
        seed=0,
    )
    best = problem.values(arms[1:]).amax(dim=-1)
    found = torch.tensor([row["true"] for row in result.records]).double()
    random = (best - problem.values(arms[1:]).mean(dim=-1)).sum()
    assert float((best - found).sum()) < 0.5 * float(random)


def test_numbers_that_no_statistic_has_do_not_leave() -> None:
    assert MAX_NUMBER == 1e15
    huge = Parameters(1, torch.full((D,), MAX_NUMBER).double(), 1.0, 1)
    asked(setup_of(), huge, an_agent(candidates=ARMS))
    secret = BlockSecret(
        BlockSum(outcome_bound=1.0, noise_multiplier=1.0).start(
            ledger=Ledger("replace-one", "record"), noise=SEEDED
        )[0],
        None,
    )
    assert decode(encode(secret), BlockSecret).state == secret.state


def test_camelback_with_public_actions() -> None:
    problem = Camelback(num_agents=1)
    made = PrivateUCB(
        budget=200,
        trust="public",
        epsilon=10.0,
        outcome_bound=1.4,
        noise_var=0.04,
        exploration=1.0,
        candidates=problem.arms,
        noise=SEEDED,
    )
    result = run(made, problem, seed=0)
    regrets = [row["regret"] for row in result.records]
    random = 1 - float(problem.values(problem.arms).mean())
    assert sum(regrets) < 0.6 * 200 * random
    assert len(regrets) == 200
