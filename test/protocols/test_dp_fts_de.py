"""DP-FTS-DE: what is released, what it costs, what crosses, and that crashes change neither."""

from __future__ import annotations

import copy
import json
import logging
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

from botorch_fed.acquisition import (
    Constant,
    EqualWeights,
    FixedContrast,
    Partition,
    SoftmaxSchedule,
    exploration_weights,
)
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import BudgetExceeded, MessageError, ProtocolError
from botorch_fed.federation.log import Log
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.models import (
    FeatureMap,
    KLFeatures,
    WeightPosterior,
    feature_map_from_tensors,
    own_gp,
    summarize,
)
from botorch_fed.privacy import (
    Budget,
    Event,
    FixedSizeSampling,
    Guarantee,
    Ledger,
    LedgerFile,
    PoissonSampling,
    SignalWarning,
    WeightedGaussianSum,
    clip,
    compose,
)
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise
from botorch_fed.protocols.base import Exchanged, Objective, Outgoing, Refusal, Reply, Request
from botorch_fed.protocols.dp_fts_de import (
    DPFTSDE,
    MAX_WEIGHT,
    DPFTSDEAgent,
    DPFTSDEAgentState,
    DPFTSDEServer,
    DPFTSDEServerState,
    Following,
    Query,
    Released,
    Setup,
    Upload,
    default_delta,
    default_private_features,
    expected_gain,
    gain_message,
    make_message,
    paper_following,
    paper_settings,
    reference_points,
    suggested_clip_norm,
    trimmed_means,
)
from botorch_fed.protocols.drive import Round, drive
from botorch_fed.protocols.noisy_prior import MIN_RELIABILITY, Heard, Outlook
from botorch_fed.protocols.site import Site
from botorch_fed.protocols.store import MemoryBlobs
from botorch_fed.protocols.transfer_search import TransferSearch, dealt_design
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, run
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.wire.codec import content_hash, decode, encode
from test.cases import in_rounds, normal, quadrature, random_fourier, uniform

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
MIXED_SPACE = SearchSpace(
    (
        Parameter.integer("depth", 1, 4),
        Parameter.choice("kernel", ["rbf", "poly", "linear"]),
        Parameter.real("C", 1e-3, 1e3, scale="log"),
    )
)
PHI = KLFeatures.from_map(quadrature(), uniform(300, 2), num_features=8)
M = PHI.num_features

# Small budgets: what is tested is the protocol, not the optimiser.
SMALL = Following(num_raw=64, num_restarts=4, num_features=32, follow=1, schedule=Constant(0.5))
FOLLOW = replace(SMALL, follow=100)
ALONE = replace(SMALL, follow=0, schedule=Constant(1.0))
RANDOM = replace(SMALL, own="random")
PAPER = replace(paper_following(), num_raw=64, num_restarts=4, num_features=32)
TRANSFER = TransferSearch()
Strategy = TransferSearch | Following


def hill(X: Tensor, centre: float = 0.3) -> Tensor:
    return 1 - 6 * (X - centre).square().sum(dim=-1, keepdim=True)


def history(n: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    X = uniform(n, 2, seed=seed)
    return X, hill(X) + 0.05 * normal(n, 1, seed=seed)


def quiet(weights: Tensor, made: int = 0) -> Released:
    """A release without noise."""
    return Released(made, weights, torch.zeros(len(weights), dtype=torch.float64))


class Silence:
    """No noise: what remains is the clean part on the lattice."""

    private = False

    def uniform(self, *shape: int, path: tuple[int | str, ...]) -> Tensor:
        return torch.full(shape, 0.5, dtype=torch.float64)


# ------------------------------------------------------------------ a federation


class Stopped(BaseException):
    """Somebody pulled the plug."""


@dataclass
class Federation:
    """A study whose every byte can be looked at, and that can be stopped and gone on with."""

    study: DPFTSDE
    space: SearchSpace = SQUARE
    objectives: Mapping[str, Objective] = field(default_factory=lambda: dict.fromkeys(NAMES, hill))
    absent: Callable[[str, int], bool] | None = None

    def __post_init__(self) -> None:
        self.logs = {name: Log(SITE_EVENTS) for name in self.objectives}
        self.rounds: list[Round] = []
        self.traffic: list[bytes] = []
        self.requests: list[list[Query]] = []
        self.heard: list[list[Released]] = []
        self.records: list[bytes] = []
        self.states: list[Any] = []
        self.tamper: Callable[[str, Upload], Upload] = lambda name, message: message
        self.watch: Callable[[], None] = lambda: None
        self.open()

    def open(self) -> None:
        """New processes, with what is on disk."""
        self.server = self.study.server(self.space, tuple(self.objectives))
        self.sites = {}
        for i, (name, objective) in enumerate(self.objectives.items()):
            agent = self.study.agent(name, self.space, i, MemoryBlobs())
            self.sites[name] = Site(name, agent, objective, log=self.logs[name])

    def exchange(self, outgoing: Outgoing) -> Exchanged:
        self.traffic += [*outgoing.requests.values(), *outgoing.blobs.values()]
        bodies = [decode(data, Request).body for data in outgoing.requests.values()]
        self.requests.append([decode(body, Query) for body in bodies])
        broadcasts = [decode(data, Setup, Released) for data in outgoing.blobs.values()]
        self.heard.append([blob for blob in broadcasts if isinstance(blob, Released)])
        self.watch()
        exchanged = self.engine(outgoing)
        replies = {}
        for name, data in exchanged.replies.items():
            try:
                reply = decode(data, Reply)
            except MessageError:
                replies[name] = data
                continue
            message = self.tamper(name, decode(reply.body, Upload))
            replies[name] = encode(replace(reply, body=encode(message)))
        return replace(exchanged, replies=replies)

    def drive(self, *, resume: bool = False, save: Any = None) -> DPFTSDEServerState:
        self.engine = InProcess(self.sites.values(), absent=self.absent)

        def keep(record: bytes) -> None:
            if save is not None:
                save(record)
            self.records.append(record)
            self.states += [site.state for site in self.sites.values()]

        record = self.records[-1] if resume and self.records else None
        self.end: DPFTSDEServerState = drive(
            self.server, self.exchange, record=record, save=keep, on_round=self.rounds.append
        )
        return self.end

    def result(self) -> list[bytes]:
        """Everything that a run leaves behind."""
        return [encode(self.end), *(encode(site.state) for site in self.sites.values())]

    def report(self) -> dict[str, Any]:
        return self.server.privacy(self.end)

    def failures(self, name: str) -> list[str]:
        found = [round_.exchanged.failures.get(name) for round_ in self.rounds]
        return ["" if failure is None else failure.code for failure in found]

    def uploaded(self) -> list[bool]:
        """Of every round, whether messages were asked for; all agents are asked the same."""
        assert all(len(set(queries)) == 1 for queries in self.requests)
        return [queries[0].upload for queries in self.requests]


def study(strategy: Strategy = SMALL, **options: Any) -> DPFTSDE:
    common = {
        "rounds": 3,
        "noise_multiplier": 1.0,
        "releases": (0, 2),
        "num_initial": 3,
        "feature_map": PHI,
        "noise": InsecureSeededNoise(7),
        "strategy": strategy,
    }
    return in_rounds(DPFTSDE, {**common, **options}, NAMES)


def finished(strategy: Strategy = SMALL, **options: Any) -> Federation:
    result = Federation(study(strategy, **options))
    result.drive()
    return result


# ------------------------------------------------------------------ newcomers


def with_histories(count: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (X, hill(X)) for name in NAMES[1:] if len(X := uniform(count, 2, seed=3))}


def test_newcomers_hear_one_release_of_those_who_are_done() -> None:
    newcomer = {"active": NAMES[:1], "data": with_histories(12), "num_initial": None}
    loud = {"releases": None, "noise_multiplier": 1e-3, "min_reliability": 0.0}
    federation = finished(TRANSFER, **newcomer, **loud)
    counts = [len(federation.sites[name].state.X) for name in NAMES]
    assert counts == [3, *(12 for _ in NAMES[1:])]
    assert federation.server.releases == (0,)
    best = uniform(2000, 2, seed=9)[hill(uniform(2000, 2, seed=9)).argmax()]
    first = federation.sites[NAMES[0]].state.X[0]
    assert float((first - best).abs().max()) < 0.25  # no dealt points: it was told
    assert [len(queries) for queries in federation.requests] == [len(NAMES), 1, 1, 1]
    assert {query.phase for query in federation.requests[0]} == {"start", "share"}


def test_who_is_done_is_in_later_releases_too() -> None:
    settings = {"active": NAMES[:1], "data": with_histories(12), "min_reliability": 0.0}
    federation = finished(TRANSFER, **settings, releases=(0, 2))
    phases = [sorted({query.phase for query in queries}) for queries in federation.requests]
    assert phases == [["share", "start"], ["query"], ["query", "share"], ["query"]]
    assert [len(federation.sites[name].state.X) for name in NAMES[1:]] == [12] * (len(NAMES) - 1)


def test_a_newcomer_that_nobody_tells_anything_begins_as_if_alone() -> None:
    settings = {"active": NAMES[:1], "data": with_histories(12), "num_initial": None}
    for listed in (None, uniform(9, 2, seed=5)):
        with pytest.warns(SignalWarning, match="agree by 0.5"):
            federation = finished(
                TRANSFER, **settings, releases=None, noise_multiplier=50.0, candidates=listed
            )
        assert federation.server.releases == ()
        X = federation.sites[NAMES[0]].state.X
        if listed is None:
            assert torch.equal(X, dealt_design(SQUARE, 0, len(NAMES), 3))
        assert len(torch.unique(X, dim=0)) == 3


def test_newcomers_without_points_are_no_signal() -> None:
    def outlook(**options: Any) -> Outlook:
        found = study(TRANSFER, min_reliability=0.0, **options).server(SQUARE, NAMES).outlook
        assert found is not None
        return found

    everybody = outlook(num_initial=None)
    two = outlook(num_initial=None, active=NAMES[:1], releases=(0, 2))
    assert two.speaking == pytest.approx(1 - 1 / len(NAMES))
    assert two.ratio(0.5) < everybody.ratio(0.5)
    assert outlook(active=NAMES[:1]).speaking == 1  # three first points each
    assert study(TRANSFER, active=NAMES).server(SQUARE, NAMES).active is None


def test_data_of_some_leave_first_points_to_all() -> None:
    made = study(TRANSFER, num_initial=None, data=with_histories(2))
    assert made.starts == 3
    assert replace(made, active=NAMES[:1]).starts == 0


def test_only_agents_can_be_active() -> None:
    with pytest.raises(InputDataError, match="no agents"):
        study(TRANSFER, active=("zoe",)).server(SQUARE, NAMES)
    servers = [study(TRANSFER, active=who).server(SQUARE, NAMES) for who in (None, NAMES[:1])]
    assert len({server.fingerprint for server in servers}) == 2


# ------------------------------------------------------------------ reproducible

KINDS: dict[str, tuple[Strategy, dict[str, Any]]] = {
    "own mean": (TRANSFER, {"min_reliability": 0.0}),
    "own mean, list": (TRANSFER, {"min_reliability": 0.0, "candidates": uniform(12, 2, seed=4)}),
    "own mean, open": (TRANSFER, {"noise_multiplier": None, "noise_kind": "none",
                                  "min_reliability": 0.0, "switch_to_local_after": 3}),
    "gain": (SMALL, {}),
    "regions": (FOLLOW, {"num_regions": 2, "sampling": PoissonSampling(0.5), "releases": "all"}),
    "mean": (SMALL, {"message": "mean", "noise_kind": "tight", "num_regions": 3}),
    "paper": (PAPER, {"message": "sample", "noise_kind": "paper", "num_regions": 2}),
    "sample": (SMALL, {"message": "sample", "epsilon": 2.0, "noise_multiplier": None}),
    "fixed": (
        SMALL,
        {"message": "mean", "sampling": FixedSizeSampling(2), "adjacency": "replace-one"},
    ),
    "list": (SMALL, {"candidates": uniform(12, 2, seed=4), "num_regions": 2}),
    "open": (FOLLOW, {"noise_multiplier": None, "noise_kind": "none", "num_regions": 2}),
    "local": (FOLLOW, {"switch_to_local_after": 2, "releases": (0, 1), "num_initial": 0,
                       "data": {name: history(4, seed=i) for i, name in enumerate(NAMES)}}),
}  # fmt: skip
kinds = pytest.mark.parametrize("which", KINDS)


@cache
def undisturbed(which: str) -> Federation:
    strategy, options = KINDS[which]
    federation = finished(strategy, **options)
    assert federation.failures("ann") == [""] * 4
    return federation


@kinds
def test_a_seeded_run_twice_gives_identical_bytes(which: str) -> None:
    first = undisturbed(which)
    torch.manual_seed(1234)  # the global generator has no say
    strategy, options = KINDS[which]
    assert finished(strategy, **options).result() == first.result()


@kinds
def test_stop_encode_resume_changes_nothing(which: str) -> None:
    strategy, options = KINDS[which]
    disturbed = Federation(study(strategy, **options))
    starts = 0
    while True:  # one round, and then only what was saved
        starts += 1
        stored: list[bytes] = []

        def stop(record: bytes, stored: list[bytes] = stored) -> None:
            if stored:
                raise Stopped
            stored.append(record)

        try:
            disturbed.drive(resume=starts > 1, save=stop)
            break
        except Stopped:
            disturbed.open()
    assert starts >= 4
    assert disturbed.result() == undisturbed(which).result()


@kinds
def test_states_survive_the_codec(which: str) -> None:
    federation = undisturbed(which)
    for state in [*federation.states, federation.end]:
        again = decode(encode(state), type(state))
        assert encode(again) == encode(state)
    server = federation.server
    state = decode(encode(server.start()), DPFTSDEServerState)
    for _ in range(4):
        box = server.outbox(state)
        assert box is not None
        for blob in box.broadcasts:
            assert encode(decode(encode(blob), type(blob))) == encode(blob)
        state = decode(encode(server.step(state, {})), DPFTSDEServerState)
    assert server.outbox(state) is None
    many = replace(state, signal=torch.ones(10_000, 64).double())  # of a long run
    assert torch.equal(
        decode(encode(many, max_bytes=2**24), DPFTSDEServerState, max_bytes=2**24).signal,
        many.signal,
    )


def test_another_seed_is_another_run() -> None:
    problem: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    points = [
        run(study(rounds=1, releases=()), problem, seed=seed, space=SQUARE).history("ann")[0]
        for seed in (0, 1)
    ]
    assert not torch.equal(*points)


def test_noise_of_the_system_is_new_every_time() -> None:
    runs = [finished(RANDOM, message="mean", rounds=1, releases=(0,), noise=OSNoise())
            for _ in range(2)]  # fmt: skip
    first, second = (federation.end.released for federation in runs)
    assert first is not None
    assert second is not None
    assert bool((first.weights != second.weights).all())


def essence(rows: list[dict[str, Any]]) -> list[Any]:
    return [{k: v for k, v in row.items() if k != "cpu_seconds"} for row in rows]


def test_workers_change_nothing(tmp_path: Path) -> None:
    problem: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    results = []
    for workers in (0, 1):
        with LedgerFile(tmp_path / f"books{workers}") as books:
            plan = study(FOLLOW, num_regions=2, releases="all", books=books, rounds=2)
            results.append(run(plan, problem, seed=3, space=SQUARE, workers=workers))
            assert books.releases == 2
    alone, shared = results
    assert essence(shared.records) == essence(alone.records)
    assert essence(shared.rounds) == essence(alone.rounds)
    assert shared.privacy == alone.privacy


# ------------------------------------------------------------------ crashes and books


@pytest.mark.parametrize("saved", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("crash", [1, 2, 3])  # the saves of the rounds with releases
def test_books_never_hold_less_than_what_left(tmp_path: Path, saved: bool, crash: int) -> None:
    """Killed just before or after the save of every release, with noise that nobody can repeat."""
    path, budget = tmp_path / "books", Budget(50.0, 0.01)
    federation = Federation(study(RANDOM, message="mean", noise=OSNoise(), releases="all"))
    left: set[bytes] = set()
    crashes, fuse = 0, crash

    def open_books() -> LedgerFile:
        books = LedgerFile(path, budget=budget)
        federation.study = replace(federation.study, books=books)
        federation.open()
        return books

    def watch() -> None:
        left.update(encode(blob) for blob in federation.heard[-1])
        assert len(left) <= books.releases <= len(left) + 1 + crashes

    def save(record: bytes) -> None:
        nonlocal fuse
        fuse -= 1
        if fuse == -1:
            if saved:
                federation.records.append(record)
            raise Stopped

    federation.watch = watch
    books = open_books()
    with pytest.raises(Stopped):
        federation.drive(save=save)
    books.close()
    crashes = 1
    books = open_books()
    end = federation.drive(resume=True)
    assert books.releases == 3 + (not saved)
    assert end.ledger.releases == 3  # what the run itself remembers
    assert len(left) == 3  # the draw that was not saved has never left
    assert "round 1" in books.ledger.entries[1].note
    books.close()


def test_a_crash_while_noise_is_drawn_is_paid(tmp_path: Path) -> None:
    class Brittle(OSNoise):
        broken = True

        def uniform(self, *shape: int, path: tuple[int | str, ...]) -> Tensor:
            if self.broken and path[:2] == ("release", 2):
                raise Stopped
            return super().uniform(*shape, path=path)

    noise = Brittle()
    with LedgerFile(tmp_path / "books") as books:
        federation = Federation(study(RANDOM, message="mean", noise=noise, books=books))
        with pytest.raises(Stopped):
            federation.drive()
        assert books.releases == 2
        noise.broken = False
        end = federation.drive(resume=True)
        assert books.releases == 3
        assert end.ledger.releases == 2
        assert len({encode(blob) for blobs in federation.heard for blob in blobs}) == 2


def test_books_that_run_out_end_the_releases_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = compose([Event(1.0)], delta=0.01).epsilon
    with LedgerFile(tmp_path / "books", budget=Budget(1.1 * one, 0.01)) as books:
        federation = Federation(study(ALONE, rounds=4, releases="all", books=books))
        with caplog.at_level(logging.WARNING):
            end = federation.drive()
        assert books.releases == 1
        assert end.exhausted
        assert end.ledger.releases == 1
        assert end.t == 5
        assert end.released is not None
        assert end.released.made == 0  # the old one stays in force
        assert federation.uploaded() == [True, True, False, False, False]
        assert [len(blobs) for blobs in federation.heard] == [0, 1, 1, 1, 1]
        for name in NAMES:
            assert len(federation.sites[name].state.X) == 3 + 4
        (said,) = [r.getMessage() for r in caplog.records if "releases nothing" in r.getMessage()]
        assert "round 1 releases nothing" in said
        report = federation.report()
        assert report["exhausted"]
        assert report["releases"] == 1
        # Books that are empty from the start are no error either: another run may have used them.
        end = finished(ALONE, rounds=2, releases=(0,), books=books).end
        assert end.exhausted
        assert end.released is None


def test_books_span_runs(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "books") as books:
        for _ in range(2):
            finished(RANDOM, message="mean", rounds=1, releases=(0,), books=books)
        assert books.releases == 2
    with LedgerFile(tmp_path / "books") as books:
        assert books.releases == 2
        seeded = replace(compose(2 * [Event(1.0)], delta=0.01), private=False)
        assert books.guarantee(delta=0.01) == seeded


# ------------------------------------------------------------------ what is released


def setup(P: int = 1, names: tuple[str, ...] = NAMES, **options: Any) -> Setup:
    partition = Partition.regular(P, 2)
    common = {
        "space": SQUARE,
        "features": PHI.to_tensors(),
        "noise_var": 0.05,
        "message": "mean",
        "beta": 1.0,
        "ridge": 1e-3,
        "clip_norm": 1.0,
        "partition": partition,
        "regions": dict(zip(names, partition.assign(len(names)), strict=True)),
        "num_initial": 3,
        "promise": None,
    }
    return Setup(**{**common, **options})


def server(P: int = 1, names: tuple[str, ...] = NAMES, **options: Any) -> DPFTSDEServer:
    made_with = options.pop("setup", None) or setup(P, names)
    common = {
        "setup": made_with,
        "agents": names,
        "rounds": 4,
        "releases": (0, 1, 2, 3),
        "exploration": SoftmaxSchedule(3.0, plateau=0, decay=3),
        "noise_multiplier": 1.0,
        "noise": Silence(),
    }
    if options.get("noise_multiplier", 1.0) is None:
        options["noise_kind"] = "none"
    return DPFTSDEServer(**{**common, **options})


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
        silent = {"g": Upload(None)} if t == 1 else {}  # and one has no data
        inbox = {names[i]: Upload(messages[i]) for i in present} | silent
        state = boss.step(state, inbox)
        clean = torch.stack([clip(row, 1.0) for row in messages])
        clean[t] = 0
        if t == 1:
            clean[6] = 0
        contrast = SoftmaxSchedule(3.0, plateau=0, decay=3)(t + 1)
        weights = exploration_weights(regions, P, contrast)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(P).double())
        assert state.released is not None
        assert state.released.made == t
        step = 0.0 if z is None else 1e-5 * float(boss.mechanism(t).noise_std.max())
        error = (state.released.weights - weights @ clean).abs().max()
        assert float(error) <= step + 1e-12
    assert contrast == 0
    if noise_kind != "none" and P > 1:
        rows = state.released.weights
        assert float((rows - rows[:1]).abs().max()) <= 2 * step  # equal weights at the end


@pytest.mark.parametrize("P", [1, 2, 4, 64])
def test_up_to_64_regions(P: int) -> None:
    names = tuple(f"agent{n}" for n in range(64))
    boss = server(P, names, noise=InsecureSeededNoise(0))
    inbox = {name: Upload(normal(M, seed=n)) for n, name in enumerate(names)}
    state = boss.step(boss.start(), inbox)
    assert state.released is not None
    assert state.released.weights.shape == (P, M)
    assert len(state.signal[0]) == P
    agent = DPFTSDEAgent(name="agent5", space=SQUARE, seed=0, strategy=FOLLOW)
    broadcasts = tuple(agent.blobs.put(encode(blob)) for blob in _blobs(boss, state))
    agent.check(agent.start(), Query("query", False), broadcasts)
    point = agent.ask(agent.receive(agent.start(), Query("query", False), broadcasts))
    assert isinstance(point, Tensor)
    assert point.shape == (1, 2)


def _blobs(boss: DPFTSDEServer, state: DPFTSDEServerState) -> tuple[Any, ...]:
    box = boss.outbox(state)
    assert box is not None
    return box.broadcasts


def test_more_regions_than_agents_are_refused_before_anybody_evaluates() -> None:
    with pytest.raises(InputDataError, match="at most as many regions as agents"):
        server(4)
    server(4, noise_kind="tight")  # the regions without agents weigh all equally


@pytest.mark.parametrize("contrast", [0.0, 1.0, 15.0])
@pytest.mark.parametrize("P", [1, 2, 4])
def test_noise_is_as_documented(P: int, contrast: float) -> None:
    names, c, z, q = tuple(f"agent{n}" for n in range(30)), 5.5, 1.7, 0.35
    options: dict[str, Any] = {
        "setup": setup(P, names, clip_norm=c),
        "noise_multiplier": z,
        "sampling": PoissonSampling(q),
        "exploration": FixedContrast(contrast),
    }
    weights = exploration_weights(Partition.regular(P, 2).assign(30), P, contrast)
    expected = {
        "correlated": z * c / q * weights.amax(dim=-1),
        "tight": z * c / q * weights.norm(dim=0).max().expand(P),
        "paper": z * c / q * weights.max().expand(P) * math.sqrt(P),
    }
    for kind, std in expected.items():
        boss = server(P, names, noise_kind=kind, **options)
        torch.testing.assert_close(boss.mechanism(0).noise_std, std, rtol=1e-3, atol=0)
        assert boss.event == Event(z, q)


@pytest.mark.parametrize("kind", ["correlated", "tight", "paper"])
def test_noise_is_there_in_every_round_and_independent(kind: str) -> None:
    """Also where nobody sends anything, which an agent might otherwise learn."""
    first, second = [], []
    for seed in range(300):
        boss = server(2, noise_kind=kind, noise=InsecureSeededNoise(seed))
        one = boss.step(boss.start(), {})
        two = boss.step(one, {})
        assert one.released is not None
        assert two.released is not None
        first.append(one.released.weights)
        second.append(two.released.weights)
    std = [boss.mechanism(t).noise_std.unsqueeze(-1) for t in (0, 1)]
    a, b = torch.stack(first) / std[0], torch.stack(second) / std[1]
    error = 5 / (300 * M) ** 0.5
    for part in (a, b):
        assert float((part.square().mean(dim=(0, 2)) - 1).abs().max()) < error * 2**0.5
    assert abs(float((a * b).mean())) < error


def test_releases_stay_within_what_agents_accept() -> None:
    boss = server(setup=setup(clip_norm=MAX_WEIGHT), noise_multiplier=50.0, noise=OSNoise())
    state = boss.step(boss.start(), {})
    assert state.released is not None
    assert float(state.released.weights.abs().max()) == MAX_WEIGHT
    agent = DPFTSDEAgent(name="ann", space=SQUARE, seed=0, strategy=FOLLOW)
    broadcasts = tuple(agent.blobs.put(encode(blob)) for blob in _blobs(boss, state))
    agent.check(agent.start(), Query("query", False), broadcasts)


# ------------------------------------------------------------------ rounds


def test_messages_are_asked_for_in_release_rounds_only() -> None:
    federation = finished(ALONE, rounds=4, releases=(1, 3))
    assert federation.uploaded() == [False, True, False, True, False]
    made = [[blob.made for blob in blobs] for blobs in federation.heard]
    assert made == [[], [], [1], [1], [3]]
    assert [queries[0].phase for queries in federation.requests] == ["start"] + ["query"] * 4
    for name in NAMES:
        assert len(federation.sites[name].state.X) == 3 + 4
        assert federation.sites[name].state.t == 4  # the start is no query


@pytest.mark.parametrize("releases", [(0, 4), (4,), (1, 0), (1, 1), (-1,)])
def test_releases_that_are_never_used_are_refused(releases: tuple[int, ...]) -> None:
    with pytest.raises(InputDataError, match=r"ascend within 0\.\.3"):
        server(releases=releases)


def test_a_study_leaves_out_releases_after_its_end() -> None:
    assert study(rounds=2, releases=(0, 1, 2, 3)).release_rounds() == (0, 1)
    assert study(rounds=3, releases="all").release_rounds() == (0, 1, 2)


def test_a_run_without_releases_costs_nothing() -> None:
    problem: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    result = run(study(ALONE, rounds=1, releases=()), problem, seed=0, space=SQUARE)
    assert result.privacy is not None
    assert result.privacy["epsilon"] == result.privacy["releases"] == 0
    assert result.privacy["mechanism"] == "none"


def test_agents_switch_to_local() -> None:
    options: dict[str, Any] = {"releases": (0, 1), "rounds": 4}
    federation = finished(FOLLOW, switch_to_local_after=2, **options)
    assert [len(blobs) for blobs in federation.heard] == [0, 1, 1, 0, 0]
    assert federation.uploaded() == [True, True, False, False, False]
    assert federation.end.ledger.releases == 2
    for name in NAMES:
        assert federation.sites[name].state.released is None
    # The same run as without the switch until then, and another one after it.
    listening = finished(FOLLOW, **options)
    for name in NAMES:
        mine, theirs = federation.sites[name].state.X, listening.sites[name].state.X
        assert torch.equal(mine[:5], theirs[:5])
    assert not torch.equal(mine[5:], theirs[5:])
    with pytest.raises(InputDataError, match="stop listening after round 1"):
        server(switch_to_local_after=1, releases=(0, 1))
    server(switch_to_local_after=2, releases=(0, 1))


def test_stragglers_contribute_zero_and_come_back() -> None:
    federation = Federation(
        study(ALONE, noise=Silence(), message="mean", releases=(0, 2)),
        absent=lambda name, serial: (name, serial) == ("bob", 1),
    )
    end = federation.drive()
    assert federation.failures("bob") == ["absent", "", "", ""]
    first = federation.heard[1][0]
    step = 1e-5 * float(federation.server.mechanism(0).noise_std)
    setup_ = federation.server.setup
    total = torch.zeros(M).double()
    for name in ("ann", "cem"):
        state = federation.sites[name].state
        sent = make_message(setup_, PHI, state.X[:3], state.Y[:3], generator=generator(0))
        total += clip(sent, setup_.clip_norm) / 3  # nobody takes the weight of the absent one
    assert float((first.weights[0] - total).abs().max()) <= step
    assert end.ledger.releases == 2
    assert len(federation.sites["bob"].state.X) == 3  # no start for it, but all queries


# ------------------------------------------------------------------ trimmed means

TEN = {f"agent{n}": partial(hill, centre=0.1 + 0.08 * n) for n in range(10)}


def extreme(name: str, message: Upload) -> Upload:
    """One agent's message of the largest norm that counts."""
    if name != "agent3" or message.weights is None:
        return message
    return Upload(1e5 * torch.ones(M).double())


def combined(trim: int, P: int = 2, **options: Any) -> tuple[Federation, list[Tensor]]:
    """A federation of ten with one that is not honest, and what the honest ones have sent."""
    settings = {"releases": (0,), "noise_multiplier": None, "noise_kind": "none", "trim": trim}
    made = study(ALONE, num_regions=P, message="mean", **{**settings, **options})
    federation = Federation(made, objectives=TEN)
    honest: list[Tensor] = []

    def tamper(name: str, message: Upload) -> Upload:
        told = extreme(name, message)
        if told is message and message.weights is not None:
            honest.append(clip(message.weights, federation.server.setup.clip_norm))
        return told

    federation.tamper = tamper
    federation.drive()
    return federation, honest


@pytest.mark.parametrize("P", [1, 2, 4])
def test_a_trimmed_mean_stays_among_the_honest_ones_and_a_mean_does_not(P: int) -> None:
    schedule = SoftmaxSchedule(1.0, 1, 1)
    for trim in (0, 1):
        federation, honest = combined(trim, P, exploration=schedule, clip_norm=10.0)
        assert len(honest) == 9
        sent = torch.stack(honest)
        (released,) = {blob.made: blob for heard in federation.heard for blob in heard}.values()
        above = released.weights > sent.amax(dim=0) + 1e-12
        below = released.weights < sent.amin(dim=0) - 1e-12
        assert bool((above | below).any()) == (trim == 0)


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


def test_too_few_messages_for_trimming_are_not_released(caplog: pytest.LogCaptureFixture) -> None:
    made = study(ALONE, noise_multiplier=None, noise_kind="none", releases=(0, 1), trim=1)
    federation = Federation(made, absent=lambda name, serial: (name, serial) == ("bob", 1))
    end = federation.drive()
    assert end.released is not None
    assert end.released.made == 1  # of round 0 two messages came
    assert "2 messages are too few to leave out 1" in caplog.text
    assert [len(heard) for heard in federation.heard] == [0, 0, 1, 1]


def test_trimming_is_refused_where_privacy_is_promised() -> None:
    for noise in ({"noise_multiplier": 1.0}, {"epsilon": 2.0, "noise_multiplier": None}):
        with pytest.raises(InputDataError, match="no privacy guarantee"):
            study(trim=1, **noise).server(SQUARE, NAMES)
    for trim in (-1, 2):
        with pytest.raises(InputDataError, match="trim counts from 0"):
            study(trim=trim, noise_multiplier=None, noise_kind="none").server(SQUARE, NAMES)


# ------------------------------------------------------------------ what agents do


def desk(
    weights: Tensor | None = None, *, P: int = 1, strategy: Following = FOLLOW, **options: Any
) -> tuple[DPFTSDEAgent, DPFTSDEAgentState]:
    """An agent with a release, before its next query."""
    made_with = setup(P, tuple(f"agent{n}" for n in range(max(P, 3))))
    name = options.pop("name", "agent0")
    agent = DPFTSDEAgent(name=name, space=SQUARE, seed=3, strategy=strategy, **options)
    blobs = [agent.blobs.put(encode(made_with))]
    if weights is not None:
        blobs.append(agent.blobs.put(encode(quiet(weights))))
    request = Query("query", False)
    agent.check(agent.start(), request, tuple(blobs))
    return agent, agent.receive(agent.start(), request, tuple(blobs))


@pytest.mark.parametrize("P", [1, 3, 4, 8])
def test_the_followed_point_is_the_best_of_all_regions(P: int) -> None:
    weights = normal(P, M, seed=P)
    agent, state = desk(weights, P=P, strategy=replace(FOLLOW, num_raw=256, num_restarts=8))
    point = agent.ask(state)
    assert isinstance(point, Tensor)
    partition = Partition.regular(P, 2)

    def value(X: Tensor) -> Tensor:
        every = PHI(X) @ weights.mT
        return every.gather(-1, partition.region_of(X).unsqueeze(-1)).squeeze(-1)

    grid = torch.cartesian_prod(*2 * [torch.linspace(0, 1, 80).double()])
    assert float(value(point)) >= float(value(grid).max()) - 1e-6


def test_following_stops_where_the_strategy_says() -> None:
    weights = normal(1, M, seed=1)
    agent, state = desk(weights, strategy=replace(FOLLOW, follow=2, schedule=Constant(1.0)))
    first = agent.ask(state)
    assert isinstance(first, Tensor)
    assert torch.equal(agent.ask(state), first)  # type: ignore[arg-type]
    told = agent.tell(state, first, hill(first))
    request = Query("query", False)
    assert state.released is not None
    blobs = (state.setup, state.released)
    second = agent.ask(agent.receive(told, request, blobs))
    assert isinstance(second, Tensor)
    elsewhere = (blobs[0], agent.blobs.put(_other()))
    assert not torch.equal(agent.ask(agent.receive(told, request, elsewhere)), second)  # type: ignore[arg-type]
    # A second look at the same release is at another part of it.
    assert float((second - first).norm()) >= FOLLOW.spread
    told = agent.tell(agent.receive(told, request, blobs), second, hill(second))
    third = [
        agent.ask(agent.receive(told, request, broadcasts))
        for broadcasts in (blobs, blobs[:1], elsewhere)
    ]
    assert torch.equal(third[0], third[1])  # type: ignore[arg-type]
    assert torch.equal(third[0], third[2])  # type: ignore[arg-type]


def _other() -> bytes:
    return encode(quiet(normal(1, M, seed=77)))


def test_of_a_list_candidates_are_looked_at_that_are_new_and_apart() -> None:
    far = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double()
    close = torch.tensor([[0.5, 0.5], [0.52, 0.5], [0.5, 0.52]]).double()
    weights = torch.linalg.lstsq(PHI(close), torch.ones(3, 1).double()).solution.mT
    weights = weights - torch.linalg.lstsq(PHI(far), torch.ones(2, 1).double()).solution.mT
    candidates = torch.cat([far, close])
    agent, state = desk(weights, candidates=candidates)
    asked = []
    assert state.released is not None
    for _ in range(6):
        point = agent.ask(state)
        assert isinstance(point, Tensor)
        asked += [row for row in range(5) if torch.equal(candidates[row : row + 1], point)]
        state = agent.tell(state, point, hill(point))
        state = agent.receive(state, Query("query", False), (state.setup, state.released or ""))
    assert asked[0] in (2, 3, 4)  # the best; then what is apart from it, then the others
    assert set(asked[1:3]) == {0, 1}
    assert set(asked[3:5]) | {asked[0]} == {2, 3, 4}
    assert len(asked) == 6  # and when all are used up, any


def test_the_coin_follows_the_schedule() -> None:
    agent, state = desk(
        normal(1, M, seed=1), strategy=replace(RANDOM, follow=0, schedule=Constant(0.3))
    )
    alone = replace(state, released=None)
    followed = 0
    for seed in range(120):
        other = replace(agent, seed=seed)
        followed += not torch.equal(other.ask(state), other.ask(alone))  # type: ignore[arg-type]
    assert abs(followed / 120 - 0.7) < 5 * (0.21 / 120) ** 0.5


@pytest.mark.parametrize("P", [1, 2, 4])
def test_the_start_lies_in_the_own_region(P: int) -> None:
    partition = Partition.regular(P, 2)
    for n in range(P):
        agent, state = desk(P=P, name=f"agent{n}")
        points = agent.ask(replace(state, phase="start"))
        assert isinstance(points, Tensor)
        assert points.shape == (3, 2)
        assert set(partition.region_of(points).tolist()) == {n}
        # Of a list, too; one that is too short is used again, and an empty region takes any.
        few = partition.to_region(n, uniform(2, 2, seed=8))
        away = partition.to_region((n + 1) % P, uniform(4, 2, seed=9))
        for candidates, allowed in ((torch.cat([few, away]), few if P > 1 else None), (away, away)):
            agent, state = desk(P=P, name=f"agent{n}", candidates=candidates)
            points = agent.ask(replace(state, phase="start"))
            assert isinstance(points, Tensor)
            assert points.shape == (3, 2)
            pool = candidates if allowed is None else allowed
            assert bool((points.unsqueeze(1) == pool).all(dim=-1).any(dim=-1).all())
            assert len(torch.unique(points, dim=0)) == min(3, len(pool))


@pytest.mark.parametrize("P", [1, 2, 4, 8])
def test_the_start_is_legal_and_in_the_own_region_if_that_has_legal_points(P: int) -> None:
    partition = Partition.regular(P, MIXED_SPACE.dim)
    names = tuple(f"agent{n}" for n in range(P))
    phi = default_private_features(MIXED_SPACE, num_features=5)
    made_with = setup(
        P,
        names,
        space=MIXED_SPACE,
        features=phi.to_tensors(),
        partition=partition,
        regions=dict(zip(names, range(P), strict=True)),
        num_initial=6,
    )
    grid = [
        {"depth": depth, "kernel": kernel, "C": C}
        for depth in range(1, 5)
        for kernel in ("rbf", "poly", "linear")
        for C in (2e-3, 0.1, 3.0, 500.0)
    ]
    reachable = set(partition.region_of(MIXED_SPACE.to_unit(grid)).tolist())
    for n, name in enumerate(names):
        agent = DPFTSDEAgent(name=name, space=MIXED_SPACE, seed=n, strategy=SMALL)
        blobs = (agent.blobs.put(encode(made_with)),)
        points = agent.ask(agent.receive(agent.start(), Query("start", False), blobs))
        assert isinstance(points, Tensor)
        torch.testing.assert_close(MIXED_SPACE.snap(points), points, rtol=0, atol=1e-12)
        if n in reachable:
            assert set(partition.region_of(points).tolist()) == {n}


def test_given_designs_and_lists_are_kept_to() -> None:
    candidates, design = uniform(9, 2, seed=5), uniform(4, 2, seed=6)
    federation = finished(SMALL, candidates=candidates, rounds=8, num_regions=2)
    for name in NAMES:
        X = federation.sites[name].state.X
        assert bool((X.unsqueeze(1) == candidates).all(dim=-1).any(dim=-1).all())
        assert len(torch.unique(X, dim=0)) >= 8  # tried again only when nothing else is left
    federation = finished(SMALL, initial_design=design, rounds=1, releases=())
    for name in NAMES:
        assert torch.equal(federation.sites[name].state.X[:4], design)


def test_agents_with_data_and_no_initial_points() -> None:
    federation = finished(SMALL, data={"ann": history(5)}, num_initial=0, rounds=1, releases=(0,))
    assert [len(federation.sites[name].state.X) for name in NAMES] == [6, 1, 1]
    assert federation.end.ledger.releases == 1


# ------------------------------------------------------------------ messages


def test_a_gain_has_the_clip_norm_whatever_it_is() -> None:
    for scale in (1e-6, 1.0, 1e9):
        X, Y = history(6)
        federation = Federation(study(clip_norm=0.7, data={"ann": (X, scale * Y)}))
        agent = federation.sites["ann"].agent
        state = agent.start()
        made_with = federation.server.setup
        model = agent.strategy.model(SQUARE, state.X, state.Y, state.own)
        sent = gain_message(made_with, PHI, model, state.X)
        assert float(sent.norm()) == pytest.approx(0.7, rel=1e-9)
        assert torch.equal(clip(sent, 0.7 * (1 + 1e-12)), sent)


def test_a_gain_points_to_where_there_is_hope() -> None:
    X, Y = history(12)
    phi = default_private_features(SQUARE)
    agent = DPFTSDEAgent(name="ann", space=SQUARE, seed=0, data=(X, Y), strategy=Following())
    state = agent.start()
    assert state.own is not None
    model = own_gp(state.X, state.Y, state.own)
    sent = gain_message(setup(message="gain"), phi, model, state.X)
    grid = uniform(500, 2, seed=12)
    with torch.no_grad():
        best = model.posterior(state.X).mean.max()
        posterior = model.posterior(grid)
        gain = expected_gain(posterior.mean[:, 0], posterior.variance[:, 0].sqrt(), best)
    both = torch.stack([phi(grid) @ sent, gain])
    assert float(torch.corrcoef(both)[0, 1]) > 0.7
    # A heavy ridge is no projection any more: the gain's means over the features themselves.
    heavy = gain_message(setup(message="gain", ridge=1e9), phi, model, state.X)
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
    sent = gain_message(setup(message="gain"), PHI, model, uniform(1, 2))
    assert torch.equal(sent, torch.zeros(M).double())
    boss = server()
    boss.check(boss.start(), "ann", Upload(sent))


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
    sent = make_message(setup(), PHI, X, Y, generator=generator(0))
    total = summarize(PHI, X, Y, noise_var=0.05)
    torch.testing.assert_close(sent, WeightPosterior.from_total(total).mean)
    made_with = setup(message="sample")
    one, two = (make_message(made_with, PHI, X, Y, generator=generator(s)) for s in (0, 1))
    assert not torch.equal(one, two)
    # Of an agent's own stream: the seed and the number of queries, not the round, address it.
    federation = Federation(study(ALONE, message="sample", data={"ann": (X, Y)}, num_initial=0))
    agent = federation.sites["ann"].agent
    blobs = (agent.blobs.put(encode(federation.server.setup)),)
    state = agent.receive(agent.start(), Query("start", True), blobs)
    messages = [agent.reply(replace(state, t=t))[1].weights for t in (0, 0, 1)]
    assert torch.equal(messages[0], messages[1])
    assert not torch.equal(messages[0], messages[2])


@pytest.mark.parametrize("message", ["mean", "sample"])
def test_a_suggested_clip_norm_fits_and_knows_no_data(message: Any) -> None:
    norm = suggested_clip_norm(PHI, message, 8)
    assert norm == suggested_clip_norm(PHI, message, 8)
    stream, norms = generator(5, "check"), []
    made_with = setup(message=message)
    for _ in range(400):
        X, truth = stream.uniform(8, 2), stream.normal(M, 1)
        Y = PHI(X) @ truth + 0.05**0.5 * stream.normal(8, 1)
        norms.append(make_message(made_with, PHI, X, Y, generator=stream).norm())
    kept = float((torch.stack(norms) <= norm).double().mean())
    assert kept >= 0.95  # 99 % of other 200 draws
    assert float(torch.stack(norms).median()) > norm / 5
    with_data = study(message=message, data={"ann": (uniform(9, 2), 1e6 * normal(9, 1))})
    boss, empty = (s.server(SQUARE, NAMES) for s in (with_data, study(message=message)))
    assert boss.setup.clip_norm == empty.setup.clip_norm
    assert boss.fingerprint == empty.fingerprint
    assert suggested_clip_norm(PHI, "gain", 8) == 1


# ------------------------------------------------------------------ what crosses


def patterns(*tensors: Tensor) -> set[bytes]:
    """How float64 numbers look on the wire: in tensors and as numbers."""
    values = torch.cat([tensor.double().flatten() for tensor in tensors]).tolist()
    private = [value for value in values if value not in (0.0, 1.0)]  # corners are no secret
    return {struct.pack(order, value) for value in private for order in ("<d", ">d")}


def test_requests_and_broadcasts_hold_nothing_of_an_agent() -> None:
    sent: list[Tensor] = []

    def listen(name: str, message: Upload) -> Upload:
        if message.weights is not None:
            sent.append(message.weights)
        return message

    federation = Federation(study(SMALL, releases="all", num_regions=2))
    federation.tamper = listen
    federation.drive()
    private = patterns(*sent)
    for state in federation.states:
        private |= patterns(state.X, state.Y)
        if state.own is not None:
            private |= patterns(state.own.lengthscale)
    assert len(private) > 100
    assert len(sent) == 9
    assert not [found for found in private for data in federation.traffic if found in data]
    report = json.dumps(federation.report())
    numbers = {repr(value) for tensor in sent for value in tensor.tolist()}
    numbers |= {repr(value) for s in federation.states for value in s.X.flatten().tolist()}
    site = federation.sites["ann"]
    words = report + repr(federation.server) + repr(site) + repr(site.agent) + repr(site.state)
    words += repr(Upload(sent[0])) + repr(federation.study)
    assert not [number for number in numbers - {"0.0", "1.0"} if number in words]


def test_private_data_and_seeds_are_not_printed() -> None:
    X, Y = torch.full((2, 2), 0.12345).double(), torch.full((2, 1), 54.321).double()
    agent = DPFTSDEAgent(name="ann", space=SQUARE, seed=98765, data=(X, Y))
    for words in (repr(agent), repr(agent.start()), repr(study(data={"ann": (X, Y)}))):
        assert "0.1234" not in words
        assert "54.3" not in words
        assert "98765" not in words


# ------------------------------------------------------------------ refusals

BAD_UPLOADS: dict[str, Callable[[Tensor], Tensor]] = {
    "short": lambda w: w[:-1],
    "long": lambda w: torch.cat([w, w[:1]]),
    "matrix": lambda w: w.unsqueeze(0),
    "scalar": lambda w: w[0],
    "integers": lambda w: w.long(),
    "empty": lambda w: w[:0],
    "vast": lambda w: torch.zeros(300_000).double(),
}


@pytest.mark.parametrize("bad", BAD_UPLOADS)
def test_a_bad_upload_is_its_senders_failure_only(bad: str) -> None:
    federation = Federation(study(RANDOM, message="mean", rounds=1, releases=(0,)))

    def tamper(name: str, message: Upload) -> Upload:
        if name == "bob" and message.weights is not None:
            return Upload(BAD_UPLOADS[bad](message.weights))
        return message

    federation.tamper = tamper
    end = federation.drive()
    assert federation.failures("bob") == ["malformed", ""]
    assert federation.failures("ann") == federation.failures("cem") == ["", ""]
    assert end.released is not None
    assert end.ledger.releases == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_never_arrive(value: float) -> None:
    weights = torch.full((M,), value).double()
    with pytest.raises(MessageError, match="finite"):
        encode(Upload(weights))
    boss = server()
    with pytest.raises(MessageError, match="not finite"):
        boss.check(boss.start(), "bob", Upload(weights))


@pytest.mark.parametrize("z", [None, 1.0])
def test_a_huge_message_counts_as_much_as_any_other(z: float | None) -> None:
    boss = server(noise_multiplier=z)
    huge = torch.full((M,), 1e308, dtype=torch.float64)
    boss.check(boss.start(), "bob", Upload(huge))
    state = boss.step(boss.start(), {"bob": Upload(huge)})
    assert state.released is not None
    assert float(state.released.weights.norm()) == pytest.approx(1 / 3, rel=1e-4)


def test_a_weight_vector_that_nobody_asked_for_is_refused() -> None:
    federation = Federation(study(ALONE, message="mean", releases=(1,)))
    federation.tamper = lambda name, message: (
        Upload(torch.ones(M).double()) if name == "bob" else message
    )
    end = federation.drive()
    assert federation.failures("bob") == ["malformed", "", "malformed", "malformed"]
    assert end.ledger.releases == 1
    boss = server()
    with pytest.raises(MessageError, match="nobody asked"):
        boss.check(replace(boss.start(), exhausted=True), "bob", Upload(torch.ones(M).double()))


def test_agents_that_require_more_refuse() -> None:
    def codes(require: Budget, **options: Any) -> list[str]:
        federation = Federation(study(RANDOM, message="mean", require=require, **options))
        try:
            federation.drive()
        except ProtocolError:
            assert all(not site.trials() for site in federation.sites.values())
            return ["refused"]
        return sorted(set(federation.failures("ann")))

    delta = default_delta(3)
    private: dict[str, Any] = {"epsilon": 2.0, "noise_multiplier": None, "noise": OSNoise()}
    assert codes(Budget(2.0, delta), **private) == [""]
    assert codes(Budget(1.99, delta), **private) == ["refused"]
    assert codes(Budget(2.0, 0.9 * delta), **private) == ["refused"]
    assert codes(Budget(2.0, delta), **{**private, "noise": InsecureSeededNoise(0)}) == ["refused"]
    assert codes(Budget(2.0, delta), noise_multiplier=None, noise_kind="none") == ["refused"]


def check(agent: DPFTSDEAgent, setup_: Setup, request: Query, *blobs: Any) -> None:
    hashes = (agent.blobs.put(encode(setup_)), *(agent.blobs.put(encode(b)) for b in blobs))
    agent.check(agent.start(), request, hashes)


def test_what_an_agent_refuses() -> None:
    agent = DPFTSDEAgent(name="ann", space=SQUARE, seed=0, strategy=SMALL, require=Budget(2.0, 0.1))
    start = Query("start", True)
    good = Guarantee(1.5, 0.05, "agent", "zero-out", 2, "pld")
    check(agent, setup(promise=good), start)
    for promise, why in (
        (None, "promises none"),
        (replace(good, private=False), "promises none"),
        (replace(good, epsilon=2.5), r"promises \(2.5, 0.05\)"),
        (replace(good, delta=0.2), r"promises \(1.5, 0.2\)"),
        (replace(good, unit="record"), "per record"),
    ):
        with pytest.raises(MessageError, match=why):
            check(agent, setup(promise=promise), start)
    nothing = replace(good, epsilon=0.0, delta=0.2, releases=0)
    check(agent, setup(promise=nothing), Query("start", False))
    with pytest.raises(MessageError, match="to release nothing"):
        check(agent, setup(promise=nothing), start)
    agent = replace(agent, require=None)
    check(agent, setup(), start)
    elsewhere = SearchSpace(SQUARE.parameters, Outcome(minimize=True))
    line = SearchSpace(SQUARE.parameters[:1])
    wide = {"space": line, "partition": Partition.regular(1, 1)}
    with pytest.raises(MessageError, match="search space"):
        check(agent, setup(space=elsewhere), start)
    with pytest.raises(MessageError, match="number of inputs"):
        check(replace(agent, space=line), setup(**wide), start)
    with pytest.raises(MessageError, match="not on the roster"):
        check(replace(agent, name="zoe"), setup(), start)
    with pytest.raises(MessageError, match="no feature map"):
        check(agent, setup(features={}), start)
    with pytest.raises(MessageError, match="own must not be"):
        check(replace(agent, strategy=RANDOM), setup(message="gain"), start)
    check(replace(agent, strategy=RANDOM), setup(message="gain"), Query("start", False))
    for weights in (normal(2, M), normal(1, M - 1), 1e7 * normal(1, M), torch.ones(1, M).long()):
        with pytest.raises(MessageError, match="A release"):
            check(agent, setup(), start, quiet(weights))
    with pytest.raises(MessageError):
        check(agent, setup(), start, setup(2))  # no release at all
    with pytest.raises(MessageError, match="3 broadcasts"):
        agent.check(agent.start(), start, ("a", "b", "c"))
    blobs = agent.blobs.put(encode(setup())), agent.blobs.put(encode(setup(beta=2.0)))
    state = agent.receive(agent.start(), start, blobs[:1])
    with pytest.raises(MessageError, match="changed during the run"):
        agent.check(state, Query("query", False), blobs[1:])
    with pytest.raises(MessageError, match="and once"):
        agent.check(state, start, blobs[:1])


@pytest.mark.parametrize("kind", ["gain", "mean", "sample"])
@pytest.mark.parametrize(("noise_var", "scale"), [(1e-12, 1e4), (1e6, 1e-6)])
def test_a_setup_at_its_limits_breaks_no_site(kind: str, noise_var: float, scale: float) -> None:
    """A server may be mistaken: what comes back is a message or a refusal, and never an error."""
    made_with = setup(
        message=kind,
        features=scaled_map(scale).to_tensors(),
        noise_var=noise_var,
        beta=1e3,
        clip_norm=MAX_WEIGHT,
    )
    X, Y = history(6)
    data = torch.cat([X, X]), torch.cat([Y, Y + 1e3])  # two answers at one point
    agent = DPFTSDEAgent(name="ann", space=SQUARE, seed=0, data=data, strategy=SMALL)
    site = Site("ann", agent, hill)
    blob = agent.blobs.put(encode(made_with))
    body = encode(Query("start", True))
    request = Request("run", "first", "ann", 1, 0, 0, (blob,), body, tag="0" * 64)
    answer = decode(site.respond(encode(request)), Reply, Refusal)
    if isinstance(answer, Reply):
        sent = decode(answer.body, Upload).weights
        assert sent is None or sent.shape == (60,)


def test_an_agent_without_a_message_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    X, Y = history(2)
    twice = torch.cat([X, X]), torch.cat([Y, Y])
    options = {"message": "mean", "noise_var": 1e-12, "feature_map": scaled_map(1e4)}
    federation = Federation(study(RANDOM, data={"bob": twice}, num_initial=1, **options))
    with caplog.at_level(logging.WARNING):
        end = federation.drive()
    for name in NAMES:
        assert federation.failures(name) == [""] * 4
    assert end.ledger.releases == 2
    said = [r.getMessage() for r in caplog.records if "no message" in r.getMessage()]
    assert said == [f"agent 'bob' has no message for its {n} points" for n in (5, 7)]


def scaled_map(scale: float) -> FeatureMap:
    tensors = random_fourier().to_tensors()
    key = "random_fourier/outputscale"
    return feature_map_from_tensors({**tensors, key: scale * tensors[key]})


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
    assert shorter.privacy(shorter.start())["releases"] == 1  # the pilot's


def test_epsilon_fixes_the_noise() -> None:
    for epsilon in (0.5, 2.0, 10.0):
        for sampling in (PoissonSampling(), PoissonSampling(0.35)):
            plan = study(noise_multiplier=None, epsilon=epsilon, sampling=sampling, delta=0.01)
            promise = plan.server(SQUARE, NAMES).promise
            assert promise is not None
            assert 0.99 * epsilon <= promise.epsilon <= epsilon
            assert (promise.delta, promise.releases, promise.private) == (0.01, 2, False)
    with pytest.raises(InputDataError, match="no calibration"):
        study(
            noise_multiplier=None,
            epsilon=1.0,
            sampling=FixedSizeSampling(2),
            adjacency="replace-one",
        ).server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match="epsilon or noise_multiplier"):
        study(epsilon=1.0)


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
    assert base < promised(1.0, 0.5, 4, ledger=Ledger(adjacency="replace-one"))
    for kind in ("tight", "paper"):
        assert promised(1.0, 0.5, 4, noise_kind=kind) == base


def test_the_report_of_a_run(tmp_path: Path) -> None:
    problem: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    plan = study(ALONE, epsilon=2.0, noise_multiplier=None, noise=OSNoise(), num_regions=2)
    result = run(plan, problem, seed=0, space=SQUARE, out=tmp_path / "run")
    assert "epsilon <= " in repr(result)
    assert "per agent, zero-out" in repr(result)
    assert "seeded" not in repr(result)
    privacy = result.privacy
    assert privacy is not None
    assert 1.99 < privacy["epsilon"] <= 2.0
    assert privacy["promised_epsilon"] == privacy["epsilon"]
    assert (privacy["delta"], privacy["releases"]) == (default_delta(3), 2)
    assert (privacy["adjacency"], privacy["unit"]) == ("zero-out", "agent")
    assert privacy["private"]
    assert privacy["settings"].startswith("CorrelatedGaussianSum(num_agents=3, num_regions=2")
    assert [len(row) for row in privacy["signal_to_noise"]] == [2, 2]
    assert all(math.isfinite(x) and x >= 0 for row in privacy["signal_to_noise"] for x in row)
    assert RunResult.load(tmp_path / "run").privacy == privacy
    resumed = run(plan, problem, seed=0, space=SQUARE, out=tmp_path / "run", resume=True)
    assert resumed.privacy == privacy
    seeded = run(replace(plan, noise=InsecureSeededNoise(0)), problem, seed=0, space=SQUARE)
    assert seeded.privacy is not None
    assert not seeded.privacy["private"]
    bare = replace(plan, epsilon=None, releases=())
    nothing = {"mechanism": "none", "private": False, "releases": 0}
    assert run(bare, problem, seed=0, space=SQUARE).privacy == nothing


def test_samples_of_a_fixed_size_need_replace_one() -> None:
    problem: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    plan = study(RANDOM, message="mean", sampling=FixedSizeSampling(2), rounds=1, releases=(0,))
    with pytest.raises(UnsupportedError, match="replace-one"):
        run(plan, problem, seed=0, space=SQUARE)
    result = run(replace(plan, adjacency="replace-one"), problem, seed=0, space=SQUARE)
    assert result.privacy is not None
    assert result.privacy["adjacency"] == "replace-one"
    assert result.privacy["accountant"] == "dp-accounting-rdp"
    with pytest.raises(InputDataError):
        server(sampling=FixedSizeSampling(4), ledger=Ledger(adjacency="replace-one"))


def test_a_release_that_is_all_noise_is_said_once() -> None:
    with pytest.warns(SignalWarning) as said:
        finished(RANDOM, message="mean", releases="all", noise_multiplier=20.0).report()
    assert len(said) == 1


# ------------------------------------------------------------------ the paper


def test_the_papers_privacy() -> None:
    """Recorded is what the multiplier says; delivered is what its noise is worth."""
    names = tuple(f"agent{n}" for n in range(29))
    boss = paper_settings(2, num_features=100).server(SQUARE, names)
    assert boss.releases == tuple(range(60))
    assert boss.promise is not None
    assert boss.promise.delta == 29**-1.1
    assert boss.promise.epsilon == pytest.approx(10.38, abs=0.02)
    assert boss.noise_kind == "paper"
    assert "noise as published" in repr(boss.mechanism(0))
    delivered = []
    for t in boss.releases:
        paper = boss.mechanism(t)
        assert isinstance(paper, WeightedGaussianSum)
        tight = replace(boss, noise_kind="tight").mechanism(t) if t in (0, 59) else None
        true = float(paper.weights.norm(dim=0).max()) * paper.clip_norm / 0.35
        z = float(paper.noise_std[0]) / true
        if tight is not None:
            assert float(tight.noise_std[0]) == pytest.approx(true, rel=1e-3)
        delivered.append(Event(round(z, 4), 0.35))
    found = compose(delivered, delta=boss.promise.delta).epsilon
    assert found == pytest.approx(6.20, abs=0.02)


def test_the_papers_settings() -> None:
    plan = paper_settings(2, num_regions=4, clip_norm=22.0)
    assert plan.clip_norm == 11
    assert plan.sampling == PoissonSampling(0.35)
    assert plan.message == "sample"
    assert plan.strategy.follow == 0
    assert plan.strategy.schedule(1) == plan.strategy.schedule(2) == 0.5
    assert plan.strategy.schedule(4) == 0.75
    other = paper_settings(2, noise_multiplier=None, num_regions=1, rounds=5)
    assert other.server(SQUARE, NAMES).promise is None
    small = {"strategy": PAPER, "feature_map": PHI, "exploration": EqualWeights()}
    plan = paper_settings(2, rounds=2, num_initial=3, num_regions=2, **small)  # type: ignore[arg-type]
    result = run(plan, dict.fromkeys(NAMES, hill), seed=0, space=SQUARE)
    assert result.privacy is not None
    assert result.privacy["releases"] == 2
    assert "noise as published" in result.privacy["settings"]


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


# ------------------------------------------------------------------ settings


def test_bad_settings() -> None:
    def agent(**options: Any) -> DPFTSDEAgent:
        return DPFTSDEAgent(**{"name": "ann", "space": SQUARE, "seed": 0, **options})

    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: agent(candidates=2 + uniform(3, 2)), "unit cube"),
        (lambda: agent(candidates=uniform(0, 2)), "must not be empty"),
        (lambda: agent(initial_design=uniform(3, 1)), "n x 2"),
        (lambda: agent(data=(uniform(2, 2), torch.full((2, 1), torch.nan))), "finite"),
        (lambda: agent(data=(uniform(2, 2), normal(3, 1))), "2 x 1"),
        (lambda: Following(follow=-1), "counts from 0"),
        (lambda: Following(spread=1.0), "spread"),
        (lambda: setup(noise_var=0.0), "noise_var"),
        (lambda: setup(beta=-1.0), "beta"),
        (lambda: setup(clip_norm=0.0), "clip_norm"),
        (lambda: setup(clip_norm=math.nan), "clip_norm"),
        (lambda: setup(ridge=0.0), "ridge"),
        (lambda: setup(partition=Partition.regular(2, 1)), "dimensions"),
        (lambda: setup(regions={"ann": 1}), "Regions are 0..0"),
        (lambda: setup(num_initial=-1), "num_initial"),
        (lambda: server(rounds=-1, releases=()), "count from 0"),
        (lambda: server(names=("a", "a")), "names must differ"),
        (lambda: server(setup=setup(names=("ann", "bob"))), "Every agent needs a region"),
        (lambda: server(noise_kind="none"), "noise_kind"),
        (lambda: server(noise_multiplier=0.0), "positive"),
        (lambda: server(delta=2.0), "delta"),
        (lambda: server(setup=setup(promise=server().promise)), "leave it out"),
        (
            lambda: server(
                noise_multiplier=None, noise_kind="none", ledger=Ledger(budget=Budget(1, 0.1))
            ),
            "noise",
        ),
        (lambda: study(data={"zoe": history(3)}).server(SQUARE, NAMES), "no agents"),
        (lambda: study(RANDOM), "own must not be"),
        (lambda: study().server(MIXED_SPACE, NAMES), "2 inputs"),
    ]
    for make, why in bad:
        with pytest.raises(InputDataError, match=why):
            make()
    study(RANDOM, releases=())  # nothing is sent


def test_books_of_another_kind_are_refused(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "books", adjacency="replace-one") as books:
        with pytest.raises(InputDataError, match="another adjacency"):
            server(books=books)
        with pytest.raises(InputDataError, match="Without noise"):
            server(books=books, noise_multiplier=None, noise_kind="none")
        books.spend(Event(1.0, sample_size=2, population=3))
        with pytest.raises(UnsupportedError, match="fixed size"):
            server(
                books=books,
                ledger=Ledger(adjacency="replace-one"),
                sampling=PoissonSampling(0.5),
            )


def test_a_copy_of_a_study_cannot_spend_unseen(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "books") as books:
        plan = study(books=books)
        for copied in (copy.copy(plan), copy.deepcopy(plan)):
            copied.agent("ann", SQUARE, 0, MemoryBlobs())
            with pytest.raises(ProtocolError, match="cannot pay"):
                copied.server(SQUARE, NAMES)
        replace(plan, budget=7).server(SQUARE, NAMES)


def test_fingerprints_tell_settings_apart() -> None:
    agent = DPFTSDEAgent(name="ann", space=SQUARE, seed=0)
    others = [
        replace(agent, seed=1),
        replace(agent, name="bob"),
        replace(agent, strategy=SMALL),
        replace(agent, require=Budget(1.0, 0.1)),
        replace(agent, candidates=uniform(4, 2)),
        replace(agent, initial_design=uniform(4, 2)),
    ]
    assert len({agent.fingerprint, *(other.fingerprint for other in others)}) == 7
    assert replace(agent, blobs=MemoryBlobs()).fingerprint == agent.fingerprint
    plan = study()
    changed = [
        plan,
        study(releases=(0, 1)),
        study(noise_multiplier=2.0),
        study(noise_kind="tight"),
        study(sampling=PoissonSampling(0.5)),
        study(exploration=EqualWeights()),
        study(switch_to_local_after=3),
        study(noise=OSNoise()),
        study(message="mean", clip_norm=1.0),
        study(clip_norm=2.0),
        study(ridge=0.1),
        study(delta=0.01),  # the promise is another one, and agents would refuse it
        study(adjacency="replace-one"),
    ]
    assert len({s.server(SQUARE, NAMES).fingerprint for s in changed}) == len(changed)
    longer = study(rounds=9).server(SQUARE, NAMES)
    assert longer.fingerprint == plan.server(SQUARE, NAMES).fingerprint  # may go on
    assert content_hash(encode(longer.setup)) == content_hash(
        encode(study().server(SQUARE, NAMES).setup)
    )


def test_a_release_that_is_mostly_noise_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    boss = server(noise_multiplier=50.0, noise=InsecureSeededNoise(0))
    state = boss.start()
    for t in range(3):
        state = boss.step(state, {name: Upload(normal(M, seed=t)) for name in NAMES})
    said = [record for record in caplog.records if "mostly noise" in record.message]
    assert len(said) == 1


# ------------------------------------------------------------------ own means as a prior

MANY = tuple(f"agent{n}" for n in range(40))
HEAR_ALL: dict[str, Any] = {"min_reliability": 0.0}


def reader(
    released: Released | None = None, *, names: tuple[str, ...] = MANY, **options: Any
) -> tuple[DPFTSDEAgent, DPFTSDEAgentState]:
    """An agent with `TransferSearch`, before its next query."""
    made_with = setup(1, names, message="own_mean", min_reliability=options.pop("least", 0.3))
    common = {"name": names[0], "space": SQUARE, "seed": 3, "data": history(4)}
    agent = DPFTSDEAgent(**{**common, **options})
    blobs = [agent.blobs.put(encode(made_with))]
    if released is not None:
        blobs.append(agent.blobs.put(encode(released)))
    request = Query("query", True)
    agent.check(agent.start(), request, tuple(blobs))
    return agent, agent.receive(agent.start(), request, tuple(blobs))


def upload(X: Tensor, Y: Tensor, **options: Any) -> Tensor | None:
    """What an agent with these observations sends."""
    agent, state = reader(data=(X, Y), **options)
    sent: Tensor | None = agent.reply(state)[1].weights
    return sent


@pytest.mark.parametrize("norm", [1.0, 0.37, 250.0])
def test_an_own_mean_has_the_clip_norm_exactly(norm: float) -> None:
    sent: list[Tensor] = []
    federation = Federation(study(TRANSFER, clip_norm=norm, **HEAR_ALL))
    federation.tamper = lambda name, m: (sent.append(m.weights), m)[1]  # type: ignore[func-returns-value,arg-type]
    federation.drive()
    assert [message is None for message in sent] == [False, False, False, True, True, True] * 2
    for message in sent:
        if message is not None:
            assert float(message.norm()) == pytest.approx(norm, rel=1e-15)
            torch.testing.assert_close(clip(message, norm), message, rtol=1e-12, atol=0)


def test_an_own_mean_knows_neither_unit_nor_origin() -> None:
    X, Y = history(7)
    sent = upload(X, Y)
    assert sent is not None
    for factor in (2.0**40, 2.0**-40):
        assert torch.equal(upload(X, factor * Y), sent)  # type: ignore[arg-type]
    torch.testing.assert_close(upload(X, 3e3 * Y - 7e4), sent, rtol=1e-5, atol=1e-6)


def test_who_has_nothing_to_say_contributes_zero() -> None:
    X, Y = history(7)
    assert upload(X[:2], Y[:2]) is None  # too little
    constant = upload(X, torch.full_like(Y, 3.0))
    assert constant is None or not bool(constant.any())


def test_a_hostile_site_moves_a_release_by_its_share() -> None:
    """Whatever it sends: from minus to plus its bound."""
    names = MANY[:10]
    made_with = setup(1, names, message="own_mean", clip_norm=0.7)
    boss = server(1, names, setup=made_with)
    messages = {name: Upload(normal(M, seed=n)) for n, name in enumerate(names)}
    releases = []
    for hostile in (None, 1e5 * normal(M, seed=99), -1e5 * normal(M, seed=99)):
        state = boss.step(boss.start(), {**messages, "agent3": Upload(hostile)})
        assert state.released is not None
        releases.append(state.released.weights[0])
    without, plus, minus = releases
    step = 1e-5 * M**0.5 * float(boss.mechanism(0).noise_std)
    assert float((plus - without).norm()) == pytest.approx(0.07, abs=step)
    assert float((plus - minus).norm()) == pytest.approx(0.14, abs=step)
    assert boss.mechanism(0).sensitivity == pytest.approx(0.7)


def test_the_noise_that_agents_know_is_what_was_added() -> None:
    made_with = setup(message="own_mean", clip_norm=2.0)
    found = []
    for seed in range(300):
        boss = server(setup=made_with, noise=InsecureSeededNoise(seed), noise_multiplier=1.3)
        state = boss.step(boss.start(), {})
        assert state.released is not None
        assert torch.equal(state.released.noise_std, boss.mechanism(0).noise_std)
        found.append(state.released.weights / state.released.noise_std)
    error = 5 * (2 / (300 * M)) ** 0.5
    assert float(torch.stack(found).square().mean()) == pytest.approx(1.0, abs=error)
    plain = server(setup=made_with, noise_multiplier=None)
    state = plain.step(plain.start(), {})
    assert state.released is not None
    assert torch.equal(state.released.noise_std, torch.zeros(1).double())


def loud(strength: float, made: int = 0) -> Released:
    """A release whose function is largest in a corner, under noise of known size."""
    signal = normal(1, M, seed=5)
    return Released(made, strength * signal / signal.norm(), torch.full((1,), 0.1).double())


def test_agents_follow_a_signal_and_no_noise() -> None:
    points = {}
    for strength in (0.0, 0.1, 0.3, 100.0):
        agent, state = reader(loud(strength))
        points[strength] = agent.ask(state)
    agent, state = reader()
    alone = agent.ask(state)
    assert state.heard is None
    assert torch.equal(points[0.0], alone)  # type: ignore[arg-type]
    assert torch.equal(points[0.1], alone)  # type: ignore[arg-type]
    assert not torch.equal(points[100.0], alone)  # type: ignore[arg-type]
    insisting, state = reader(loud(0.35), least=0.0)
    assert not torch.equal(insisting.ask(state), alone)  # type: ignore[arg-type]
    deaf = replace(insisting, strategy=TransferSearch(listen=False))
    assert torch.equal(deaf.ask(state), alone)  # type: ignore[arg-type]


def test_what_was_heard_stays_and_counts_once() -> None:
    agent, state = reader(loud(1.0, made=1))
    assert isinstance(state.heard, Heard)
    request = Query("query", False)
    assert state.released is not None
    again = agent.receive(state, request, (state.setup, state.released))
    assert again.heard is state.heard
    old = agent.blobs.put(encode(loud(7.0, made=0)))
    assert agent.receive(state, request, (state.setup, old)).heard is state.heard
    new = agent.blobs.put(encode(loud(1.0, made=5)))
    more = agent.receive(state, request, (state.setup, new)).heard
    assert more is not None
    assert (more.made, more.share) == (5, 2.0 + 8.0**0.5)  # roots of 3 + 1 and 3 + 5
    restored = decode(encode(replace(state, heard=more)), DPFTSDEAgentState)
    assert encode(restored.heard) == encode(more)
    # Who is told no more goes on alone, and so does who was told by somebody else's release only.
    silent = agent.receive(state, request, (state.setup,))
    assert silent.heard is state.heard
    fresh, alone = reader()
    assert torch.equal(agent.ask(silent), fresh.ask(alone))  # type: ignore[arg-type]


def test_absent_agents_miss_releases_and_come_back() -> None:
    federation = Federation(
        study(TRANSFER, rounds=4, releases=(0, 1, 3), **HEAR_ALL),
        absent=lambda name, serial: (name, serial) == ("bob", 2),
    )
    federation.drive()
    assert federation.failures("bob") == ["", "absent", "", "", ""]
    heard = {name: federation.sites[name].state.heard for name in NAMES}
    assert heard["ann"].made == heard["bob"].made == 3
    assert heard["ann"].share > heard["bob"].share  # the first of three is lost to it
    assert heard["ann"].variance > heard["bob"].variance
    assert torch.equal(heard["ann"].total, heard["cem"].total)


def test_first_points_are_dealt() -> None:
    federation = finished(TRANSFER, releases=(), data={"bob": history(2)})
    for index, name in enumerate(sorted(NAMES)):
        count = 1 if name == "bob" else 3  # two it has already
        X = federation.sites[name].state.X
        had = 2 if name == "bob" else 0
        assert len(X) == had + count + 3
        assert torch.equal(X[had : had + count], dealt_design(SQUARE, index, 3, count))
    full = finished(TRANSFER, releases=(), data={"bob": history(5)})
    assert len(full.sites["bob"].state.X) == 5 + 3
    listed = uniform(30, 2, seed=6)
    federation = finished(TRANSFER, releases=(), candidates=listed)
    for name in NAMES:
        found = federation.sites[name].state.X
        assert bool((found.unsqueeze(1) == listed).all(dim=-1).any(dim=-1).all())
        assert len(torch.unique(found, dim=0)) == len(found)


def test_designs_by_name() -> None:
    designs = {name: uniform(2, 2, seed=n) for n, name in enumerate(NAMES)}
    for strategy in (TRANSFER, SMALL):
        federation = finished(strategy, releases=(), initial_design=designs)
        for name in NAMES:
            assert torch.equal(federation.sites[name].state.X[:2], designs[name])
    for wrong in ({"ann": designs["ann"]}, {**designs, "bob": uniform(3, 2)}):
        with pytest.raises(InputDataError, match="initial"):
            study(TRANSFER, initial_design=wrong).server(SQUARE, NAMES)


def test_a_federation_that_would_follow_noise_spends_nothing() -> None:
    options: dict[str, Any] = {"noise_multiplier": None, "epsilon": 2.0, "delta": 1e-5}
    plan = study(TRANSFER, **options)
    with pytest.warns(SignalWarning, match="goes on alone"):
        boss = plan.server(SQUARE, NAMES)
    assert (boss.releases, boss.withheld) == ((), (0, 2))
    assert boss.promise is not None
    assert boss.promise.epsilon == 0
    assert "signal/noise" in repr(boss)
    federation = finished(TRANSFER, **options)
    report = federation.report()
    assert (report["epsilon"], report["releases"]) == (0.0, 0)
    assert report["signal"] == boss.signal_words
    assert "nothing spent" in report["signal"]
    assert federation.uploaded() == [False] * 4
    alone = finished(TRANSFER, releases=(), noise_multiplier=None, noise_kind="none")
    for name in NAMES:
        assert torch.equal(federation.sites[name].state.X, alone.sites[name].state.X)
    insisting = replace(plan, min_reliability=0.0).server(SQUARE, NAMES)
    assert (insisting.releases, insisting.withheld) == ((0, 2), ())
    json.dumps(report)


def test_a_federation_with_enough_agents_releases_and_says_how_much() -> None:
    plan = study(TRANSFER, noise_multiplier=None, epsilon=2.0, delta=1e-5)
    boss = plan.server(SQUARE, MANY)
    assert boss.releases == (0, 2)
    assert boss.outlook is not None
    assert boss.outlook.reliability(0.15) > MIN_RELIABILITY
    # The best that a mechanism can do, which all agents agree upon, is its own bound.
    best = float(boss.mechanism(0).best_signal_to_noise)
    assert boss.outlook.ratio(1.0) == pytest.approx(best, rel=1e-6)
    assert boss.privacy(boss.start())["signal"] == boss.outlook.words
    few = plan.server(SQUARE, MANY[:4]).outlook
    assert few is not None
    fewest = few.enough_agents(0.15, MIN_RELIABILITY)
    assert plan.server(SQUARE, MANY[:fewest]).releases
    assert not plan.server(SQUARE, MANY[: fewest - 1]).releases


def test_old_defaults_by_name() -> None:
    plan = DPFTSDE(budget=15, epsilon=2.0, strategy=Following())
    assert (plan.message_kind, plan.starts) == ("gain", 10)
    assert plan.release_rounds() == (0, 1, 2, 3)
    boss = plan.server(SQUARE, NAMES)
    assert (boss.setup.message, boss.setup.num_initial, boss.setup.clip_norm) == ("gain", 10, 1.0)
    assert boss.outlook is None
    assert "signal" not in boss.privacy(boss.start())
    assert DPFTSDE(budget=8, epsilon=2.0).starts == 3


def test_what_does_not_go_with_own_means() -> None:
    for make, why in (
        (lambda: study(TRANSFER, message="gain"), "Name both"),
        (lambda: study(SMALL, message="own_mean"), "Name both"),
        (lambda: study(TRANSFER, num_regions=2), "num_regions"),
        (lambda: setup(2, message="own_mean"), "num_regions"),
        (lambda: setup(min_reliability=1.0), "min_reliability"),
        (lambda: setup(min_reliability=-0.1), "min_reliability"),
        (lambda: server(withheld=(0,)), "withheld"),
    ):
        with pytest.raises(InputDataError, match=why):
            make()
    agent, _ = reader()
    with pytest.raises(MessageError, match="does not go with"):
        check(agent, setup(names=MANY), Query("query", False))
    with pytest.raises(MessageError, match="does not go with"):
        check(
            replace(agent, strategy=SMALL),
            setup(names=MANY, message="own_mean"),
            Query("query", False),
        )
    good = setup(names=MANY, message="own_mean")
    weights = normal(1, M)
    for noise in ([-1.0], [math.nan], [math.inf], [1e200], [0.1, 0.1]):
        with pytest.raises(MessageError, match="noise"):
            check(agent, good, Query("query", False),
                  Released(0, weights, torch.tensor(noise).double()))  # fmt: skip
    with pytest.raises(MessageError, match="noise"):
        check(agent, good, Query("query", False), Released(0, weights, torch.ones(1)))
