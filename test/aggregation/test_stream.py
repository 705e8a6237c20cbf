"""Sums of records: what is released and paid, who sees what, and crashes."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition import UpperConfidenceBound
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.aggregation.stream import (
    BlockSecret,
    JointStream,
    LocalStream,
    Play,
    PublicStream,
    Stream,
    StreamState,
    parameters_model,
)
from botorch_fed.errors import BudgetExceeded, MessageError, ProtocolError
from botorch_fed.federation.agent import FederatedAgent
from botorch_fed.federation.base import Objective, Pending
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import Contribution, Order, Party, Terms
from botorch_fed.models import (
    AdditiveFeatures,
    BasisGP,
    KLFeatures,
    RandomFourierFeatures,
    StationaryKernel,
)
from botorch_fed.privacy import (
    BlockSum,
    Budget,
    Event,
    Ledger,
    LocalGaussian,
    PrefixSum,
    RecordStatistic,
    SharedLedger,
    compose,
)
from botorch_fed.privacy.hazmat.noise import OSNoise
from botorch_fed.rng import generator
from botorch_fed.run import run
from botorch_fed.search.bandit import BanditSearch, families, fit_scales, unit_features
from botorch_fed.search.messages import TransferRows
from botorch_fed.search.releases import Parameters
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.store import FileStore, MemoryBlobs, MemoryStore
from botorch_fed.studies import PrivateUCB
from botorch_fed.test_functions import KernelBandit
from botorch_fed.wire.codec import decode, encode
from test.aggregation.bandits import (
    ARMS,
    NAMES,
    NOISE_VAR,
    PHI,
    PRIVATE,
    SCALE,
    SEEDED,
    SQUARE,
    TRUSTS,
    D,
    Desk,
    Federation,
    M,
    Stopped,
    hill,
    mechanism_of,
    parameters,
    record,
    server_of,
    sets,
    stream_of,
    study,
    terms_of,
)
from test.cases import normal, quadrature, uniform

GOOD_X, GOOD_Y = torch.full((1, 2), 0.5).double(), torch.zeros(1, 1).double()


def dense_choice(terms: Terms, gram: Tensor, moment: Tensor, arms: Tensor) -> Tensor:
    """The arm of the largest upper bound by plain linear algebra."""
    B = torch.eye(M).double() + gram
    Phi = PHI(arms)
    mean = Phi @ torch.linalg.solve(B, moment)
    variance = (Phi * torch.linalg.solve(B, Phi.mT).mT).sum(dim=-1, keepdim=True)
    exploration = terms.search.exploration  # type: ignore[attr-defined]
    return arms[int((mean + exploration * variance.sqrt()).argmax())].unsqueeze(0)


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
    assert torch.equal(ends[0].parameters.values, ends[1].parameters.values)  # type: ignore[union-attr]
    for one, other in zip(first.played(), second.played(), strict=True):
        assert {n: x.tolist() for n, (x, _) in one.items()} == {
            n: x.tolist() for n, (x, _) in other.items()
        }


def test_without_noise_a_run_is_plain_gp_ucb() -> None:
    federation = Federation(study("none", budget=8))
    federation.drive()
    X, Y = torch.zeros(0, 2).double(), torch.zeros(0, 1).double()
    for t, played in enumerate(federation.played(), start=1):
        if t > 1:
            model = BasisGP(X, Y, feature_map=PHI, noise_var=NOISE_VAR)
            score = UpperConfidenceBound(model, beta=1.0)
            for name, (x, _) in played.items():
                arms = sets(name, t)
                with torch.no_grad():
                    best = arms[score(arms.unsqueeze(-2)).argmax()]
                assert torch.equal(x[0], best)
        assert set(played) == set(NAMES)
        X = torch.cat([X, *(played[name][0] for name in NAMES)])
        Y = torch.cat([Y, *(played[name][1] for name in NAMES)])
    model = parameters_model(federation.server.terms, federation.end.parameters)
    plain = BasisGP(X, Y, feature_map=PHI, noise_var=NOISE_VAR)
    points = uniform(20, 2, seed=3)
    with torch.no_grad():
        ours, theirs = model.posterior(points), plain.posterior(points)
        assert torch.allclose(ours.mean, theirs.mean, atol=1e-10)
        assert torch.allclose(ours.variance, theirs.variance, atol=1e-10)


def test_joint_releases_and_actions_are_those_of_a_prefix_sum_by_hand() -> None:
    federation = Federation(study("joint", budget=6, height=1.0))
    terms = federation.server.terms
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
                assert torch.equal(x, dense_choice(terms, gram, moment, sets(name, t)))
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
    federation = Federation(study("local", budget=5))
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
    federation = Federation(study("public", budget=8, batch=2))
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
            within = {"centre": block.centre, "outcome_bound": block.outcome_bound}
            secret = mechanism.open(secret, block.length, **within)
        Y = torch.cat([played[name][1] for name in order])
        secret, release = mechanism.add(secret, Y, noise=SEEDED, path=("release",))
        state = federation.server.step(state, {n: Contribution(played[n][1][0]) for n in order})
        if release is not None:
            X.append(block.X)
            means.append(release.mean)
            noise_std = mechanism.noise_std_within(block.outcome_bound)
            variances.append((release.length * NOISE_VAR + noise_std**2) / block.length**2)
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
        ours = parameters_model(federation.server.terms, found).posterior(points)
        theirs = model.posterior(points)
        assert torch.allclose(ours.mean, theirs.mean, atol=1e-9)
        assert torch.allclose(ours.variance, theirs.variance, atol=1e-9)


def test_a_block_is_as_long_as_what_is_not_known_asks_for() -> None:
    def first(**options: Any) -> Any:
        names = ("ann",) if options["batch"] == 1 else ("ann", "bob")
        return study("public", **options).server(SQUARE, names).start().block

    long: dict[str, Any] = {"budget": 400, "most_per_block": None, "batch": 1}
    block = first(**long, noise_multiplier=0.5)
    # Of the prior: s0 = sqrt(2), s = 0.5 * 2, rho = sqrt(0.1); to 0.6 of what is not known.
    assert (block.length, block.count) == (math.ceil(1 / (0.6 * math.sqrt(SCALE))), 0)
    assert (block.centre, block.outcome_bound) == (0.0, 2.0)
    assert first(**long, noise_multiplier=7.0).length == math.ceil(14 / (0.6 * math.sqrt(SCALE)))
    assert first(**long, noise_multiplier=500.0).length == 20  # a twentieth
    short = first(budget=2, most_per_block=100, noise_multiplier=500.0, batch=2)
    assert short.length == 4  # a longer one could not be completed


def test_blocks_narrow_to_where_releases_expect_outcomes_and_cost_what_they_did() -> None:
    wide = Federation(study("public", budget=24, noise_multiplier=0.2, noise_var=None))
    federation = Federation(study("public", budget=24, noise_multiplier=0.2, noise_var=0.01))
    blocks = []
    state = federation.server.start()
    federation.drive()
    for played in federation.played():
        assert state.block is not None
        if not state.block.count:
            blocks.append(state.block)
        given = federation.server.outbox(state)
        assert given is not None
        inbox = {n: Contribution(played[n][1][0]) for n in given.messages if n in played}
        state = federation.server.step(state, inbox)
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert all((block.centre, block.outcome_bound) == (0.0, 2.0) for block in blocks[:4])
    late = blocks[4:]
    assert len(late) >= 4
    assert min(block.outcome_bound for block in late) < 1.0
    for block in late:  # within the public range
        assert abs(block.centre) + block.outcome_bound <= 2.0 + 1e-12
        assert block.outcome_bound >= 3 * 0.1
    wide.drive()
    assert federation.report()["epsilon"] == wide.report()["epsilon"]
    unsaid = wide.end.block
    assert unsaid is None or unsaid.outcome_bound == 2.0


def test_scales_are_fitted_to_what_was_released_and_read_by_all() -> None:
    made = study("public", budget=30, feature_map=None, noise_multiplier=0.05, noise_var=0.01)
    federation = Federation(made)
    found = federation.drive().parameters
    assert found is not None
    phi = federation.server.terms.feature_map
    assert isinstance(phi, AdditiveFeatures)
    count = max(families(phi)) + 1
    assert found.scales.shape == (count,)
    own = torch.stack([part.outputscale.sum().sqrt() for part in phi.maps])
    assert not torch.allclose(found.scales, own)
    # As likely as that: the evidence of the released blocks, with the prior of the deviations.
    meaning = stream_of(federation.server).meaning(federation.server.hub.terms, found)
    search = federation.server.terms.search
    assert isinstance(search, BanditSearch)
    again = fit_scales(search, phi, meaning)
    assert float((again / found.scales).log().abs().max()) <= math.log(1 / 0.6) + 1e-9
    # Everybody's model is that of the basis with these deviations.
    model = parameters_model(federation.server.terms, found)
    X = uniform(30, 2, seed=3)
    scaled = phi.with_hyperparameters(phi.lengthscale, found.scales.square())
    gram, moment = meaning.statistic.gram_and_moment(
        found.values, noise_var=0.01, outputscale=float(phi.outputscale.sum())
    )
    factors = torch.cat(
        [
            s / o * torch.ones(p.num_features)
            for s, o, p in zip(found.scales, own, phi.maps, strict=True)
        ]
    )
    B = torch.eye(len(gram)).double() + factors[:, None] * gram * factors
    mean = scaled(X) @ torch.linalg.solve(B, factors[:, None] * moment)
    with torch.no_grad():
        assert torch.allclose(model.posterior(X).mean, mean, atol=1e-8)


@pytest.mark.parametrize("scales", [[1.0], [0.0, 1.0, 1.0, 1.0], [-1.0] * 4, [9.0] * 4])
def test_scales_that_do_not_fit_are_refused(scales: list[float]) -> None:
    made = study("public", feature_map=None)
    desk = Desk(made)
    dim = desk.agent.terms.feature_map.num_features
    dim = dim * (dim + 3) // 2
    given = torch.tensor(scales).double()
    order = Play(2, "next", True, ARMS[:1])
    with pytest.raises(MessageError, match="one for each family"):
        desk.receives(Parameters(1, torch.zeros(dim).double(), 0.0, 1, given), 2, order)
    fitting = torch.full((4,), 0.5, dtype=torch.float64)
    desk.receives(Parameters(1, torch.zeros(dim).double(), 0.0, 1, fitting), 2, order)


@pytest.mark.parametrize("trust", PRIVATE)
def test_what_is_played_depends_on_earlier_rounds_only(trust: str) -> None:
    late = 4
    made = study(trust, budget=10, noise_multiplier=0.1, most_per_block=1)
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
    for trust, size in (("joint", 3), ("local", D), ("public", 1)):
        federation = Federation(study(trust, noise=OSNoise()))
        federation.drive()
        sent = [reply.values for replies in federation.up for reply in replies.values()]
        assert {len(values) for values in sent if values is not None} == {size}
        played = [pair for round_ in federation.played() for pair in round_.values()]
        X, Y = torch.cat([x for x, _ in played]), torch.cat([y for _, y in played])
        server = b"".join(federation.log.bytes())
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
    federation = Federation(study(trust, budget=5, noise=OSNoise(), secrets=secrets))
    seen: list[bytes] = []
    federation.watch = lambda: seen.extend(secrets.get(name) or b"" for name in secrets.names())
    federation.drive()
    played = federation.played()
    statistic = RecordStatistic(num_features=M, outcome_bound=2.0)
    everything = [*federation.log.bytes(), *(d for data in federation.down for d in data)]
    everything += [encode(site.state) for site in federation.sites.values()]
    server = federation.server
    everything.append((repr(server) + repr(federation.end) + repr(federation.report())).encode())
    if trust == "joint":
        X = torch.cat([played[t][n][0] for t in range(4) for n in NAMES])
        Y = torch.cat([played[t][n][1] for t in range(4) for n in NAMES])
        lattice = mechanism_of(server).lattice
        exact = statistic.rounded_sum(statistic.records(unit_features(PHI, X), Y), lattice)
        assert contains(b"".join(seen), exact)
        assert not contains(b"".join(everything), exact)
        assert not contains(b"".join(everything), exact.double() * lattice)
        noise = federation.end.parameters.values - exact.double() * lattice  # type: ignore[union-attr]
        assert not contains(b"".join(everything), noise)
    # The last two rounds are kept, and nothing else.
    assert len(secrets.names()) == 2
    words = repr(server.resources.cache["newest secret"][1])
    assert words == {"joint": "PrefixState(t=5, secret)", "public": "BlockSecret(secret)"}[trust]


def test_an_agent_keeps_nothing_that_it_has_sent() -> None:
    for trust in TRUSTS:
        federation = Federation(study(trust))
        federation.drive()
        for site in federation.sites.values():
            assert len(site.state.X) == len(site.state.Y) == len(site.state.failed) == 0
    assert "0.125" not in repr(record(GOOD_X / 4, GOOD_Y))


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
                books = SharedLedger(place / "books", adjacency="replace-one", unit="record")
                options["shared_ledger"] = books
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
                federation.drive(saving=pull if where == "save" else lambda: None)
            except Stopped:
                stopped = True
            assert stopped == (where == "save" or stop < 4)
            if stopped:
                federation.watch = lambda: None
                if books is not None:
                    books.close()
                    books = SharedLedger(place / "books", adjacency="replace-one", unit="record")
                    options["shared_ledger"] = books
                options["secrets"] = FileStore(place / "secrets")
                federation.study = study(trust, **options)
                federation.open()
                federation.drive(resume=True)
            found, expected = federation.end, whole.end
            assert torch.equal(found.parameters.values, expected.parameters.values)  # type: ignore[union-attr]
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
            Contribution(Y[i]) if trust == "public" else record(X[i : i + 1], Y[i : i + 1])
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
def test_a_secret_is_kept_before_its_release_is_used(trust: str) -> None:
    class Full(MemoryStore):
        def put_new(self, name: str, data: bytes) -> None:
            raise OSError("No space left on device")

    server = server_of(trust, secrets=Full())
    with pytest.raises(OSError, match="No space"):
        server.step(server.start(), {})


@pytest.mark.parametrize("trust", ["joint", "public"])
def test_without_its_secrets_a_run_does_not_go_on(trust: str) -> None:
    federation = Federation(study(trust))

    def stop() -> None:
        if len(federation.log) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        federation.drive(saving=stop)
    asked_before = len(federation.down)
    federation.open()
    with pytest.raises(ProtocolError, match=r"secrets=FileStore\(folder\)"):
        federation.drive(resume=True)
    assert len(federation.down) == asked_before  # nobody was asked in vain
    with pytest.raises(ProtocolError, match="secrets"):
        federation.server.step(federation.log.states(StreamState)[-1], {})


def test_a_damaged_secret_ends_the_run_in_words() -> None:
    server = server_of("joint")
    state = server.step(server.start(), {})
    secrets = server.resources.secrets
    (name,) = secrets.names()
    secrets.put(name, encode(Order(1, "next", True)))
    server.resources.cache.clear()
    with pytest.raises(ProtocolError, match="cannot be read"):
        server.step(state, {})


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
        made = study("joint", budget=5, secrets=secrets)
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
        FederatedServer(terms=server.terms, resources=replace(server.resources, ledger=tight))
    # A shared ledger may be used up meanwhile: then the first round releases nothing.
    with SharedLedger(
        tmp_path / "books", adjacency="replace-one", unit="record", budget=Budget(4.8, 1e-5)
    ) as books:
        first = server_of("joint", epsilon=4.0, shared_ledger=books)
        second = server_of("public", epsilon=4.0, shared_ledger=books)
        state = first.step(first.start(), {})
        assert state.ledger.releases == books.releases == 1
        with pytest.raises(BudgetExceeded):
            second.step(second.start(), {})
        assert second.resources.secrets.names() == []
        assert books.releases == 1
        for _ in range(2):  # paid once for all rounds
            state = first.step(state, {})
        assert books.releases == 1


def test_ledgers_are_for_the_noise_and_for_who_pays(tmp_path: Path) -> None:
    with SharedLedger(tmp_path / "books", adjacency="replace-one", unit="record") as books:
        for trust in ("local", "none"):
            with pytest.raises(InputDataError, match="pays for nothing"):
                server_of(trust, shared_ledger=books)
        with pytest.raises(InputDataError, match="give both the same"):
            server_of("joint", unit="agent", shared_ledger=books)


def test_promises_are_those_of_one_gaussian_mechanism() -> None:
    for trust in PRIVATE:
        server = server_of(trust, epsilon=3.0, budget=50, noise=OSNoise())
        assert server.promise is not None
        assert 3.0 * 0.999 <= server.promise.epsilon <= 3.0
        assert server.promise.private
        z = mechanism_of(server).noise_multiplier
        alone = compose([Event(z)], delta=1e-5, adjacency="replace-one", unit="record")
        assert server.promise.epsilon == alone.epsilon
        assert "epsilon <=" in repr(server)
        said = server.privacy(server.start())
        assert said is not None
        assert repr(mechanism_of(server)) == said["settings"]
    assert "actions public" in repr(mechanism_of(server_of("public")))
    assert server_of("none").promise is None
    seeded = server_of("joint")
    assert seeded.promise is not None
    assert not seeded.promise.private


def test_agents_as_units_count_how_often_they_are_asked() -> None:
    # 7 rounds of 2 out of 3 agents: 14 queries, nobody is asked more than 5 times.
    server = server_of("joint", unit="agent", budget=5, batch=2)
    assert stream_of(server).rounds(server.terms) == 7
    assert stream_of(server).participations(server.terms) == 5
    per_record = server_of("joint", budget=5, batch=2)
    ratio = mechanism_of(server).noise_std(3) / mechanism_of(per_record).noise_std(3)
    # Rounding adds 2^-21 of the noise times sqrt(D) to a record.
    assert ratio == pytest.approx(5, rel=1e-4)
    assert server.promise is not None
    assert server.promise.unit == "agent"
    local = server_of("local", unit="agent", budget=5, batch=2)
    five = compose([Event(2.0)] * 5, delta=1e-5, adjacency="replace-one", unit="agent")
    assert local.promise is not None
    assert local.promise.epsilon == five.epsilon
    calibrated = server_of("local", unit="agent", budget=5, batch=2, epsilon=2.0)
    assert calibrated.promise is not None
    assert 2.0 * 0.999 <= calibrated.promise.epsilon <= 2.0
    with pytest.raises(InputDataError, match="agents that give one"):
        server_of("public", unit="agent")
    once = server_of("public", unit="agent", budget=1, batch=1)
    assert stream_of(once).participations(once.terms) == 1


def test_agents_are_asked_in_turn() -> None:
    federation = Federation(study("joint", budget=5, batch=2))
    federation.drive()
    asked_names = [tuple(sorted(replies)) for replies in federation.up]
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
        memory = site.state.aggregation
        assert (memory.sent, memory.ledger.releases) == (4, 1)
    assert federation.report()["epsilon"] == pytest.approx(cost)
    # An agent is in all of them.
    federation = Federation(study("local", unit="agent", noise=OSNoise()))
    federation.drive()
    for site in federation.sites.values():
        assert site.state.aggregation.ledger.releases == 4


TWO = compose([Event(2.0)] * 2, delta=1e-5, adjacency="replace-one", unit="agent").epsilon


def with_two_payments(agent: FederatedAgent) -> FederatedAgent:
    """An agent whose own ledger covers two increments."""
    ledger = Ledger("replace-one", "agent", Budget(TWO, 1e-5))
    return replace(agent, resources=replace(agent.resources, ledger=ledger))


def test_a_local_site_pays_before_anything_is_played() -> None:
    made = study("local", unit="agent", noise=OSNoise())
    poor = with_two_payments(made.agent("ann", SQUARE, 0, MemoryBlobs()))
    desk = Desk(made, options={"resources": poor.resources})
    for t in (1, 2):
        X = desk.plays(t=t)
        values = desk.says(X, hill(X))
        assert values is not None
        assert values.shape == (D,)
    with pytest.raises(BudgetExceeded):
        desk.receives(t=3)
    assert desk.state.aggregation.ledger.releases == 2


def test_a_site_without_budget_refuses_and_the_others_go_on() -> None:
    made = study("local", unit="agent", noise=OSNoise(), budget=3)
    federation = Federation(made)
    poor = with_two_payments(made.agent("bob", SQUARE, 1, MemoryBlobs()))
    federation.sites["bob"] = Site("bob", poor, hill, log=federation.logs["bob"])
    federation.drive()
    codes = [round_.exchanged.failures.get("bob") for round_ in federation.rounds]
    assert [None if failure is None else failure.code for failure in codes] == [
        None,
        None,
        "budget",
    ]
    assert federation.end.parameters is not None
    assert federation.end.parameters.count == 8


def test_nobody_takes_part_if_the_hub_understates_what_is_paid() -> None:
    """A site requires what two increments cost, the hub promises that, and three are planned."""
    made = study("local", unit="agent", noise=OSNoise(), budget=3, require=Budget(TWO, 1e-5))
    terms = terms_of("local", unit="agent", noise=OSNoise(), budget=3)
    assert terms.promise is not None
    assert terms.promise.epsilon > TWO
    desk = Desk(made, said=replace(terms, promise=replace(terms.promise, epsilon=TWO)))
    with pytest.raises(MessageError, match=r"terms differ in promise\.epsilon"):
        desk.receives()
    with pytest.raises(MessageError, match=r"This site requires .* the hub promises \("):
        Desk(made, said=terms).receives()


ONE = compose([Event(2.0)], delta=1e-5, adjacency="replace-one", unit="record").epsilon


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"trust": "none"}, {}, "promises none"),
        ({"noise": SEEDED}, {}, "from a seed"),
        ({}, {"unit": "agent"}, "promises it per record"),
        ({"adjacency": "zero-out"}, {}, "promises zero-out"),
        ({}, {"require": Budget(0.95 * ONE, 1e-5)}, r"promises \("),
        ({}, {"require": Budget(ONE, 0.95e-5)}, r"promises \("),
        ({}, {}, None),
        ({"unit": "agent"}, {}, None),
        ({"adjacency": "zero-out"}, {"adjacency": "zero-out"}, None),
    ],
)
def test_a_site_takes_part_in_what_it_requires(
    settings: dict[str, Any], options: dict[str, Any], words: str | None
) -> None:
    made = study(**{"noise": OSNoise(), **settings})
    required = {"require": Budget(ONE, 1e-5), "unit": "record", "adjacency": "replace-one"}
    desk = Desk(made, options={**required, **options})
    if words is None:
        desk.plays()
    else:
        with pytest.raises(MessageError, match=words):
            desk.plays()


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("unit", "agent"),
        ("adjacency", "zero-out"),
        ("epsilon", 0.9 * ONE),
        ("epsilon", 1.1 * ONE),
        ("delta", 0.9e-5),
        ("delta", 1e-4),
        ("releases", 2),
        ("accountant", "rdp"),
        ("private", False),
    ],
)
@pytest.mark.parametrize("trust", PRIVATE)
def test_a_promise_that_is_not_that_of_the_noise_is_refused(
    trust: str, name: str, lie: Any
) -> None:
    """A site knows the noise from its own study: a promise about something else is no promise."""
    made, terms = study(trust, noise=OSNoise()), terms_of(trust, noise=OSNoise())
    assert terms.promise is not None
    assert getattr(terms.promise, name) != lie
    order = Play(1, "next", True, ARMS[:1]) if trust == "public" else None
    desk = Desk(made, said=replace(terms, promise=replace(terms.promise, **{name: lie})))
    with pytest.raises(MessageError, match=rf"terms differ in promise\.{name}"):
        desk.plays(order=order)
    Desk(made).plays(order=order)


@pytest.mark.parametrize("trust", PRIVATE)
def test_a_private_study_has_a_promise_about_its_own_unit(trust: str) -> None:
    made, terms = study(trust), terms_of(trust)
    assert terms.promise is not None
    order = Play(1, "next", True, ARMS[:1]) if trust == "public" else Order(1, "next", True)
    with pytest.raises(MessageError, match=r"differ in promise: .* the hub no promise"):
        Desk(made, said=replace(terms, promise=None)).plays(order=order)
    others = replace(terms.promise, unit="agent"), replace(terms.promise, adjacency="zero-out")
    desk = Desk(made)
    resources, memory = desk.agent.resources, desk.state.aggregation
    for promise in (None, *others):  # the aggregation itself refuses them too
        site = Party(replace(terms, promise=promise), "ann", resources, memory)
        with pytest.raises(MessageError, match="must agree"):
            terms.aggregation.check_order(site, order, ())
    terms.aggregation.check_order(Party(terms, "ann", resources, memory), order, ())


def test_a_study_without_noise_takes_no_promise() -> None:
    said = replace(terms_of("none"), promise=terms_of("joint").promise)
    for options in ({}, {"require": Budget(60.0, 1e-5), "unit": "record"}):
        desk = Desk(study("none"), said=said, options=options)
        with pytest.raises(MessageError, match="differ in promise: this site has no promise"):
            desk.plays()


@pytest.mark.parametrize("theirs", TRUSTS)
@pytest.mark.parametrize("mine", TRUSTS)
def test_a_site_takes_part_in_the_trust_of_its_own_study_alone(mine: str, theirs: str) -> None:
    desk = Desk(study(mine, candidates=ARMS), said=terms_of(theirs, candidates=ARMS))
    order = Play(1, "next", True, ARMS[:1]) if theirs == "public" else None
    if mine == theirs:
        desk.plays(order=order)
    else:
        with pytest.raises(MessageError, match="terms differ in aggregation: this site has"):
            desk.plays(order=order)


def test_a_made_up_basis_does_not_silence_a_site_by_its_arms() -> None:
    """Features that are not a number in one region: who has arms there replies like the others."""
    cube = SearchSpace(tuple(Parameter.real(name, 0.0, 1.0) for name in "abc"))
    rows = [[1e308, -1e308, 1e308], [1.0, 2.0, 3.0], [2.0, 1.0, 0.0]]
    F = torch.tensor(rows, dtype=torch.float64)
    phi = RandomFourierFeatures(StationaryKernel(math.inf, [0.5] * 3), F)
    # The features are not a number where the first minus the second plus the third is large.
    outside = uniform(20, 3) * torch.tensor([0.5, 1.0, 0.5]).double()
    for arms in (outside, torch.cat([outside, torch.tensor([[0.99, 0.01, 0.99]]).double()])):
        made = study("local", feature_map=phi, noise=OSNoise(), candidates=arms)
        assert bool(phi(arms).isfinite().all()) == (len(arms) == 20)
        desk = Desk(made, space=cube)
        desk.plays()
        values = desk.says(arms[-1:], torch.ones(1, 1).double())
        assert values is not None
        assert bool(values.isfinite().all())
        found = Parameters(1, torch.zeros(len(values)).double(), 1.0, 1)
        point = desk.plays(found, t=2)
        assert bool(phi(point).isfinite().all())


def test_a_local_site_that_requires_privacy_has_noise_of_its_own() -> None:
    made = study("local", require=Budget(60.0, 1e-5))
    desk = Desk(made, said=terms_of("local", noise=OSNoise()))
    with pytest.raises(MessageError, match="its own noise"):
        desk.plays()


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
    memory = federation.sites["bob"].state.aggregation
    assert (memory.sent, memory.ledger.releases) == (3, 3)
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
    made = study(trust, noise=OSNoise(), candidates=GOOD_X)
    Y = SQUARE.outcome.to_public(GOOD_Y + 1)
    exact = statistic.statistics(statistic.records(unit_features(PHI, GOOD_X), Y))[0]
    server = made.server(SQUARE, NAMES)
    said, found = server.hub.terms, []
    for _ in range(200):
        desk = Desk(made, said=said)
        desk.plays()
        reply = Contribution(desk.says(GOOD_X, GOOD_Y + 1))
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


@pytest.mark.parametrize("trust", TRUSTS)
def test_an_agent_with_nothing_to_say_adds_nothing(trust: str) -> None:
    server = server_of(trust)
    state = server.start()
    server.check(state, "ann", Contribution(None))
    spoken = server.step(state, {"ann": Contribution(None)})
    silent = server.step(state, {})
    assert (spoken.parameters is None) == (silent.parameters is None)
    if spoken.parameters is not None:
        assert torch.equal(spoken.parameters.values, silent.parameters.values)


def test_a_block_waits_for_outcomes_that_are_missing() -> None:
    made = study("public", budget=4, batch=2, most_per_block=3, noise_multiplier=100.0)
    federation = Federation(made, absent=lambda name, serial: serial <= 3)
    federation.drive()
    states = federation.log.states(StreamState)
    counts = [state.block.count for state in states if state.block is not None]
    assert counts == [0, 0, 0, 0, 2, 0]
    end = federation.end
    assert end.parameters is not None
    # The next block is as long as the last round has room for.
    assert (end.parameters.t, end.parameters.count) == (6, 5)
    assert end.block is None
    # A block of three takes two outcomes of two agents, then one of the next.
    assert [len(replies) for replies in federation.up] == [0, 0, 0, 2, 1, 2]
    assert end.asked == 3 * 2 + 2 + 1 + 2


def test_blocks_end_before_the_last_release() -> None:
    options: dict[str, Any] = {"budget": 4, "batch": 2, "most_per_block": 100}
    made = study("public", final_release=False, noise_multiplier=100.0, **options)
    federation = Federation(made)
    federation.drive()
    assert federation.end.parameters is not None
    assert federation.end.parameters.count == 10


def test_the_last_sum_may_stay_in_the_house() -> None:
    assert mechanism_of(server_of("joint", final_release=False)).horizon == 3
    federation = Federation(study("joint", final_release=False))
    federation.drive()
    assert federation.end.t == 4
    assert federation.end.parameters is not None
    assert federation.end.parameters.t == 3
    one = Federation(study("joint", budget=1, final_release=False))
    one.drive()
    assert one.end.parameters is None
    for trust in TRUSTS:
        Federation(study(trust, budget=2, final_release=False)).drive()


# ------------------------------------------------------------------ hostile messages

RECORD = torch.cat([GOOD_X[0], GOOD_Y[0]])
INCREMENT = torch.zeros(D).double()
OUTCOME = GOOD_Y[0]


@pytest.mark.parametrize(
    ("trust", "values"),
    [
        ("joint", RECORD[1:]),
        ("joint", RECORD.float()),
        ("joint", RECORD + 0.6),
        ("joint", RECORD * math.nan),
        ("joint", RECORD[None]),
        ("joint", INCREMENT),
        ("joint", OUTCOME),
        ("none", INCREMENT),
        ("local", RECORD),
        ("local", torch.zeros(D + 1).double()),
        ("local", torch.zeros(1, D).double()),
        ("local", torch.zeros(D)),
        ("local", torch.full((D,), math.nan).double()),
        ("local", torch.full((D,), 1e6).double()),
        ("public", RECORD),
        ("public", OUTCOME * math.nan),
        ("public", OUTCOME + math.inf),
        ("public", OUTCOME[None]),
        ("public", OUTCOME.float()),
    ],
)
def test_hostile_replies_are_refused(trust: str, values: Tensor) -> None:
    server = server_of(trust)
    with pytest.raises(MessageError):
        server.check(server.start(), "ann", Contribution(values))


@pytest.mark.parametrize(
    ("trust", "values"),
    [
        ("joint", RECORD),
        ("joint", torch.tensor([0.0, 0.0, 1e9]).double()),  # it will be clipped
        ("none", RECORD),
        ("local", torch.full((D,), 20.0).double()),
        ("public", OUTCOME - 1e9),
    ],
)
def test_good_replies_are_taken_from_those_who_were_asked(trust: str, values: Tensor) -> None:
    server, message = server_of(trust, batch=2, budget=2), Contribution(values)
    state = server.start()
    server.check(state, "ann", message)
    for stranger in ("cem", "zoe"):
        with pytest.raises(MessageError, match="agent without an order"):
            server.check(state, stranger, message)
    state = server.step(state, {"ann": message})
    if trust == "joint":
        assert state.parameters is not None
        assert bool(state.parameters.values.isfinite().all())


def test_outcomes_beyond_the_bound_count_as_the_bound() -> None:
    ends = []
    for y in (2.0, 1e12):
        server = server_of("joint")
        ends.append(server.step(server.start(), {"ann": record(GOOD_X, GOOD_Y + y)}))
    assert ends[0].parameters is not None
    assert ends[1].parameters is not None
    assert torch.equal(ends[0].parameters.values, ends[1].parameters.values)


NEXT = Order(2, "next", True)


def _play(X: Tensor) -> Order:
    return Play(1, "next", True, X)


@pytest.mark.parametrize(
    ("trust", "found", "order"),
    [
        ("joint", None, Order(0, "next", True)),
        ("joint", None, Order(5, "next", True)),
        ("joint", None, Order(1, "nothing", True)),
        ("joint", None, Order(1, "first", True)),
        ("local", None, Order(1, "next", False)),
        ("public", None, _play(GOOD_X)),  # not one of the candidates
        ("public", None, _play(GOOD_X + 0.6)),
        ("public", None, _play(ARMS[:2])),
        ("public", None, _play(ARMS[:1].float())),
        ("joint", replace(parameters(), t=2), NEXT),
        ("joint", replace(parameters(), values=torch.zeros(D + 1).double()), NEXT),
        ("joint", replace(parameters(), values=torch.full((D,), 1e16).double()), NEXT),
        ("joint", replace(parameters(), values=torch.zeros(D).long()), NEXT),
        ("joint", replace(parameters(), noise_std=-1.0), NEXT),
        ("joint", replace(parameters(), noise_std=1e300), NEXT),
        ("joint", replace(parameters(), t=-1), NEXT),
        ("joint", replace(parameters(), count=-1), NEXT),
    ],
)
def test_hostile_orders_are_refused(trust: str, found: Parameters | None, order: Order) -> None:
    desk = Desk(study(trust))
    with pytest.raises(MessageError):
        desk.receives(found, order=order)


def test_rounds_do_not_go_back() -> None:
    desk = Desk(study())
    desk.receives(t=2)
    for t, why in (
        (2, "Rounds go on from 2 to 4, got round 2"),
        (1, "Round 1 comes after round 2"),
        (5, r"rounds of the terms are 0\.\.4, got 5"),
    ):
        with pytest.raises(MessageError, match=why):
            desk.receives(t=t)
    two = *desk.broadcasts(parameters()), desk.agent.blobs.put(encode(parameters(1)))
    with pytest.raises(MessageError, match="Expected one sum"):
        desk.agent.check(desk.state, Order(3, "next", True), two)
    desk.receives(t=3)


def test_a_site_is_asked_no_more_often_than_in_turn() -> None:
    desk = Desk(study(batch=2))
    for t in range(1, 5):  # of six rounds
        desk.receives(t=t)
    with pytest.raises(MessageError, match="4 queries in a run, the hub asks for number 5"):
        desk.receives(t=5)


def test_who_has_decision_sets_of_its_own_plays_nothing_that_others_choose() -> None:
    with pytest.raises(InputDataError, match="fixed and public"):
        study("public", candidates=None, decision_sets=sets)
    search = study("joint").make_search()
    with pytest.raises(InputDataError, match="fixed and public"):
        study("public", search=search).agent("ann", SQUARE, 0, MemoryBlobs())


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0},
        {"noise_multiplier": None},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": 1e300},
        {"epsilon": 1.0, "noise_multiplier": 1.0},
        {"trust": "none", "noise_multiplier": 1.0},
        {"trust": "nobody"},
        {"unit": "user"},
        {"adjacency": "add"},
        {"outcome_bound": 0.0},
        {"moment_scale": 0.0},
        {"batch": 0},
        {"batch": 4},
        {"trust": "public", "decision_sets": sets},
        {"trust": "public", "decision_sets": None, "candidates": ARMS + 1},
        {"trust": "public", "decision_sets": None, "candidates": ARMS[:0]},
        {"trust": "public", "decision_sets": None, "most_per_block": 0},
    ],
)
def test_settings_that_make_no_run_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        replace(study(), **options).server(SQUARE, NAMES)


def test_a_stream_is_of_records() -> None:
    with pytest.raises(InputDataError, match="Use a BanditSearch"):
        study(search=TransferRows(), feature_map=PHI).server(SQUARE, NAMES)
    for kind in (JointStream, LocalStream, PublicStream):
        with pytest.raises(InputDataError, match="epsilon or noise_multiplier"):
            kind(horizon=3)
    with pytest.raises(InputDataError, match="horizon"):
        Stream(horizon=0)
    with pytest.raises(InputDataError, match="rounds"):
        study(budget=10**8, batch=1).server(SQUARE, NAMES)


@pytest.mark.parametrize("trust", TRUSTS)
def test_too_many_features_are_refused_at_once(trust: str) -> None:
    phi = RandomFourierFeatures.draw(
        StationaryKernel(math.inf, [0.5] * 2), 2400, generator=generator(0, "many")
    )
    with pytest.raises(InputDataError, match="at most 2,000"):
        server_of(trust, feature_map=phi)
    with pytest.raises(InputDataError, match="too large to be sent"):
        study(trust, feature_map=phi).agent("ann", SQUARE, 0, MemoryBlobs())
    terms = terms_of(trust)
    desk = Desk(study(trust), said=terms)
    desk.setup = desk.agent.blobs.put(encode(replace(terms.setup, basis=phi.to_tensors())))
    with pytest.raises(MessageError, match="terms differ in the shared basis"):
        desk.receives()


def test_other_settings_have_other_fingerprints() -> None:
    base = server_of("joint")
    others = [
        server_of("joint", **options)
        for options in (
            {"budget": 5},
            {"exploration": 0.6},
            {"noise_multiplier": 2.1},
            {"factorization": "tree"},
            {"final_release": False},
            {"batch": 2},
            {"noise": OSNoise()},
            {"unit": "agent"},
            {"feature_map": KLFeatures.from_map(quadrature(), uniform(50, 2), num_features=5)},
        )
    ]
    others += [server_of("public"), server_of("public", seed=1)]
    others += [server_of("public", candidates=ARMS[1:]), server_of("public", most_per_block=3)]
    prints = [server.fingerprint for server in (base, *others)]
    assert len(set(prints)) == len(prints)
    assert base.fingerprint == server_of("joint").fingerprint


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"budget": 5}, r"aggregation\.horizon: this site has 4, the hub has 5"),
        ({"noise_multiplier": 1.0}, r"aggregation\.noise_multiplier"),
        ({"outcome_bound": 1.0}, r"aggregation\.outcome_bound"),
        ({"exploration": 0.6}, r"search\.exploration"),
        ({"unit": "agent"}, r"aggregation\.unit"),
    ],
)
def test_a_site_refuses_noise_for_another_run_by_name(change: dict[str, Any], name: str) -> None:
    desk = Desk(study(), said=terms_of("joint", **change))
    with pytest.raises(MessageError, match=f"terms differ in {name}"):
        desk.receives()


def test_a_copy_of_a_study_neither_pays_nor_knows_secrets(tmp_path: Path) -> None:
    with SharedLedger(tmp_path / "books", adjacency="replace-one", unit="record") as books:
        made = study("joint", shared_ledger=books, secrets=MemoryStore())
        made.terms(SQUARE, NAMES)
        copy = pickle.loads(pickle.dumps(made))
    assert copy.secrets is None
    with pytest.raises(ProtocolError, match="cannot pay"):
        copy.server(SQUARE, NAMES)
    copy.agent("ann", SQUARE, 0, MemoryBlobs())


def test_a_secret_survives_encoding() -> None:
    secret = BlockSecret(
        BlockSum(outcome_bound=1.0, noise_multiplier=1.0).start(
            ledger=Ledger("replace-one", "record"), noise=SEEDED
        )[0],
        None,
    )
    assert decode(encode(secret), BlockSecret).state == secret.state


@pytest.mark.parametrize(
    "settings",
    [{}, {"batch": 2}, {"batch": 1}, {"batch": 3, "budget": 5}],
)
def test_the_study_and_the_stream_count_the_same_rounds(settings: dict[str, Any]) -> None:
    made: Callable[..., PrivateUCB] = study
    server = made("joint", **settings).server(SQUARE, NAMES)
    stream, one = stream_of(server), made("joint", **settings)
    assert stream.rounds(server.terms) == one.rounds_for(NAMES)
    assert stream.participations(server.terms) <= one.budget
    assert stream.rounds(server.terms) * stream.per_round(server.terms) == one.evaluations_for(
        NAMES
    )


def test_orders_are_worked_out_once_for_all_replies_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0
    real = Stream.orders

    def counted(self: Any, hub: Any, state: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(self, hub, state)

    monkeypatch.setattr(Stream, "orders", counted)
    server = server_of("none")
    state = server.start()
    server.outbox(state)
    for name in NAMES:
        server.check(state, name, Contribution(RECORD))
    assert calls == 1
    assert server.outbox(server.step(state, {})) is not None
    assert calls == 2
