"""DP-FTS-DE: what is released, what it costs, what crosses, and that crashes change neither."""

from __future__ import annotations

import copy
import json
import logging
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

from botorch_fed.acquisition import SoftmaxSchedule
from botorch_fed.aggregation.noisy import default_delta
from botorch_fed.aggregation.relay import Relay
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.base import Objective, Refusal, Reply, Request
from botorch_fed.federation.points import dealt_design
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import MAX_WEIGHT, Contribution, Order
from botorch_fed.models import FeatureMap, feature_map_from_tensors
from botorch_fed.privacy import (
    Budget,
    Event,
    FixedSizeSampling,
    PoissonSampling,
    SharedLedger,
    SignalWarning,
    clip,
    compose,
)
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, run
from botorch_fed.search.noisy import MIN_RELIABILITY, NoisyTransfer, Outlook
from botorch_fed.search.released import Following, ReleaseMessage, ReleaseSearch
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE
from botorch_fed.wire.codec import decode, encode
from test.cases import random_fourier, uniform
from test.federation.dp import (
    ALONE,
    FOLLOW,
    MIXED_SPACE,
    NAMES,
    PAPER,
    PHI,
    RANDOM,
    SMALL,
    SQUARE,
    TRANSFER,
    Federation,
    M,
    Silence,
    Stopped,
    Strategy,
    finished,
    hill,
    history,
    plan_of,
    put,
    study,
)

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

MANY = tuple(f"agent{n:02d}" for n in range(40))
HEAR_ALL: dict[str, Any] = {"min_reliability": 0.0}

# ------------------------------------------------------------------ newcomers


def with_histories(count: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (X, hill(X)) for name in NAMES[1:] if len(X := uniform(count, 2, seed=3))}


def test_newcomers_hear_one_release_of_those_who_are_done() -> None:
    newcomer = {"active": NAMES[:1], "data": with_histories(12), "num_initial": None}
    loud = {"releases": None, "noise_multiplier": 1e-3, "min_reliability": 0.0}
    federation = finished(TRANSFER, **newcomer, **loud)
    counts = [len(federation.sites[name].state.X) for name in NAMES]
    assert counts == [3, *(12 for _ in NAMES[1:])]
    assert federation.plan.releases == (0,)
    best = uniform(2000, 2, seed=9)[hill(uniform(2000, 2, seed=9)).argmax()]
    first = federation.sites[NAMES[0]].state.X[0]
    assert float((first - best).abs().max()) < 0.25  # no dealt points: it was told
    assert [len(queries) for queries in federation.requests] == [len(NAMES), 1, 1, 1]
    assert {order.evaluate for order in federation.requests[0]} == {"first", "nothing"}


def test_who_is_done_is_in_later_releases_too() -> None:
    settings = {"active": NAMES[:1], "data": with_histories(12), "min_reliability": 0.0}
    federation = finished(TRANSFER, **settings, releases=(0, 2))
    orders = [sorted({order.evaluate for order in orders}) for orders in federation.requests]
    assert orders == [["first", "nothing"], ["next"], ["next", "nothing"], ["next"]]
    assert [len(federation.sites[name].state.X) for name in NAMES[1:]] == [12] * (len(NAMES) - 1)


def test_a_newcomer_that_nobody_tells_anything_begins_as_if_alone() -> None:
    settings = {"active": NAMES[:1], "data": with_histories(12), "num_initial": None}
    for listed in (None, uniform(9, 2, seed=5)):
        with pytest.warns(SignalWarning, match="agree by 0.5"):
            federation = finished(
                TRANSFER, **settings, releases=None, noise_multiplier=50.0, candidates=listed
            )
        assert federation.plan.releases == ()
        X = federation.sites[NAMES[0]].state.X
        if listed is None:
            assert torch.equal(X, dealt_design(SQUARE, 0, len(NAMES), 3))
        assert len(torch.unique(X, dim=0)) == 3


def test_newcomers_without_points_are_no_signal() -> None:
    def outlook(**options: Any) -> Outlook:
        made = study(TRANSFER, min_reliability=0.0, **options).server(SQUARE, NAMES)
        found = plan_of(made).outlook
        assert isinstance(found, Outlook)
        return found

    everybody = outlook(num_initial=None)
    two = outlook(num_initial=None, active=NAMES[:1], releases=(0, 2))
    assert two.speaking == pytest.approx(1 - 1 / len(NAMES))
    assert two.ratio(0.5) < everybody.ratio(0.5)
    assert outlook(active=NAMES[:1]).speaking == 1  # three first points each
    with pytest.raises(InputDataError, match="names all agents: leave it out"):
        study(TRANSFER, active=NAMES).server(SQUARE, NAMES)


def test_data_of_some_leave_first_points_to_all() -> None:
    made = study(TRANSFER, num_initial=None, data=with_histories(2))
    assert made.initial == 3
    assert replace(made, active=NAMES[:1]).initial == 0


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
        fuse = iter([False])

        def stop(fuse: Iterator[bool] = fuse) -> None:
            if next(fuse, True):
                raise Stopped

        try:
            disturbed.drive(resume=starts > 1, saving=stop)
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
    assert bool((first.values != second.values).all())


def essence(rows: list[dict[str, Any]]) -> list[Any]:
    return [{k: v for k, v in row.items() if k != "cpu_seconds"} for row in rows]


def test_workers_change_nothing(tmp_path: Path) -> None:
    problem: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    results = []
    for workers in (0, 1):
        with SharedLedger(tmp_path / f"books{workers}") as books:
            plan = study(FOLLOW, num_regions=2, releases="all", shared_ledger=books, rounds=2)
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

    def open_ledger() -> SharedLedger:
        books = SharedLedger(path, budget=budget)
        federation.study = replace(federation.study, shared_ledger=books)
        federation.open()
        return books

    def watch() -> None:
        left.update(encode(blob) for blob in federation.heard[-1])
        assert len(left) <= books.releases <= len(left) + 1 + crashes

    def save() -> None:
        nonlocal fuse
        fuse -= 1
        if fuse == -1:
            raise Stopped

    federation.watch = watch
    books = open_ledger()
    with pytest.raises(Stopped):
        federation.drive(**{"saved" if saved else "saving": save})
    books.close()
    crashes = 1
    books = open_ledger()
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
    with SharedLedger(tmp_path / "books") as books:
        federation = Federation(study(RANDOM, message="mean", noise=noise, shared_ledger=books))
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
    with SharedLedger(tmp_path / "books", budget=Budget(1.1 * one, 0.01)) as books:
        federation = Federation(study(ALONE, rounds=4, releases="all", shared_ledger=books))
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
        end = finished(ALONE, rounds=2, releases=(0,), shared_ledger=books).end
        assert end.exhausted
        assert end.released is None


def test_books_span_runs(tmp_path: Path) -> None:
    with SharedLedger(tmp_path / "books") as books:
        for _ in range(2):
            finished(RANDOM, message="mean", rounds=1, releases=(0,), shared_ledger=books)
        assert books.releases == 2
    with SharedLedger(tmp_path / "books") as books:
        assert books.releases == 2
        seeded = replace(compose(2 * [Event(1.0)], delta=0.01), private=False)
        assert books.guarantee(delta=0.01) == seeded


# ------------------------------------------------------------------ rounds


def test_messages_are_asked_for_in_release_rounds_only() -> None:
    federation = finished(ALONE, rounds=4, releases=(1, 3))
    assert federation.uploaded() == [False, True, False, True, False]
    made = [[blob.made for blob in blobs] for blobs in federation.heard]
    assert made == [[], [], [1], [1], [3]]
    assert [orders[0].evaluate for orders in federation.requests] == ["first"] + ["next"] * 4
    for name in NAMES:
        assert len(federation.sites[name].state.X) == 3 + 4
        assert federation.sites[name].state.first == 3


def test_a_study_leaves_out_releases_after_its_end() -> None:
    for rounds, given, left in ((2, (0, 1, 2, 3), (0, 1)), (3, "all", (0, 1, 2))):
        made = study(rounds=rounds, releases=given)
        assert plan_of(made.server(SQUARE, NAMES)).releases == left


@pytest.mark.parametrize("rounds", [1, 0])
def test_a_run_without_releases_costs_nothing(rounds: int) -> None:
    problem: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    result = run(study(ALONE, releases=(), rounds=rounds), problem, seed=0, space=SQUARE)
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
        assert len(federation.sites[name].state.broadcasts) == 1
    # The same run as without the switch until then, and another one after it.
    listening = finished(FOLLOW, **options)
    for name in NAMES:
        mine, theirs = federation.sites[name].state.X, listening.sites[name].state.X
        assert torch.equal(mine[:5], theirs[:5])
    assert not torch.equal(mine[5:], theirs[5:])


def test_stragglers_contribute_zero_and_come_back() -> None:
    federation = Federation(
        study(ALONE, noise=Silence(), message="mean", releases=(0, 2)),
        absent=lambda name, serial: (name, serial) == ("bob", 1),
    )
    end = federation.drive()
    assert federation.failures("bob") == ["absent", "", "", ""]
    first = federation.heard[1][0]
    step = 1e-5 * float(federation.plan.mechanism(0).noise_std)
    norm, message = federation.plan.clip_norm, ReleaseMessage("mean")
    total = torch.zeros(M).double()
    for name in ("ann", "cem"):
        state = federation.sites[name].state
        sent = message.make(PHI, state.X[:3], state.Y[:3], generator=generator(0))
        total += clip(sent, norm) / 3  # nobody takes the weight of the absent one
    assert float((first.values[0] - total).abs().max()) <= step
    assert end.ledger.releases == 2
    assert len(federation.sites["bob"].state.X) == 3  # no start for it, but all queries


# ------------------------------------------------------------------ trimmed means

TEN = {f"agent{n}": partial(hill, centre=0.1 + 0.08 * n) for n in range(10)}


def extreme(name: str, message: Contribution) -> Contribution:
    """One agent's message of the largest norm that counts."""
    if name != "agent3" or message.values is None:
        return message
    return Contribution(1e5 * torch.ones(M).double())


def combined(trim: int, P: int = 2, **options: Any) -> tuple[Federation, list[Tensor]]:
    """A federation of ten with one that is not honest, and what the honest ones have sent."""
    settings = {"releases": (0,), "noise_multiplier": None, "noise_kind": "none", "trim": trim}
    made = study(ALONE, num_regions=P, message="mean", **{**settings, **options})
    federation = Federation(made, objectives=TEN)
    honest: list[Tensor] = []

    def tamper(name: str, message: Contribution) -> Contribution:
        told = extreme(name, message)
        if told is message and message.values is not None:
            honest.append(clip(message.values, federation.plan.clip_norm))
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
        above = released.values > sent.amax(dim=0) + 1e-12
        below = released.values < sent.amin(dim=0) - 1e-12
        assert bool((above | below).any()) == (trim == 0)


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


# ------------------------------------------------------------------ points


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


# ------------------------------------------------------------------ what crosses


def patterns(*tensors: Tensor) -> set[bytes]:
    """How float64 numbers look on the wire: in tensors and as numbers."""
    values = torch.cat([tensor.double().flatten() for tensor in tensors]).tolist()
    private = [value for value in values if value not in (0.0, 1.0)]  # corners are no secret
    return {struct.pack(order, value) for value in private for order in ("<d", ">d")}


def test_requests_and_broadcasts_hold_nothing_of_an_agent() -> None:
    sent: list[Tensor] = []

    def listen(name: str, message: Contribution) -> Contribution:
        if message.values is not None:
            sent.append(message.values)
        return message

    federation = Federation(study(SMALL, releases="all", num_regions=2))
    federation.tamper = listen
    federation.drive()
    private = patterns(*sent)
    for state in federation.states:
        private |= patterns(state.X, state.Y)
        if state.search.own is not None:
            private |= patterns(state.search.own.lengthscale)
    assert len(private) > 100
    assert len(sent) == 9
    assert not [found for found in private for data in federation.traffic if found in data]
    report = json.dumps(federation.report())
    numbers = {repr(value) for tensor in sent for value in tensor.tolist()}
    numbers |= {repr(value) for s in federation.states for value in s.X.flatten().tolist()}
    site = federation.sites["ann"]
    words = report + repr(federation.server) + repr(site) + repr(site.agent) + repr(site.state)
    words += repr(Contribution(sent[0])) + repr(federation.study)
    assert not [number for number in numbers - {"0.0", "1.0"} if number in words]


def test_private_data_and_seeds_are_not_printed() -> None:
    X, Y = torch.full((2, 2), 0.12345).double(), torch.full((2, 1), 54.321).double()
    agent = study(data={"ann": (X, Y)}).agent("ann", SQUARE, 98765, MemoryBlobs())
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

    def tamper(name: str, message: Contribution) -> Contribution:
        if name == "bob" and message.values is not None:
            return Contribution(BAD_UPLOADS[bad](message.values))
        return message

    federation.tamper = tamper
    end = federation.drive()
    assert federation.failures("bob") == ["malformed", ""]
    assert federation.failures("ann") == federation.failures("cem") == ["", ""]
    assert end.released is not None
    assert end.ledger.releases == 1


def test_a_weight_vector_that_nobody_asked_for_is_refused() -> None:
    federation = Federation(study(ALONE, message="mean", releases=(1,)))
    federation.tamper = lambda name, message: (
        Contribution(torch.ones(M).double()) if name == "bob" else message
    )
    end = federation.drive()
    assert federation.failures("bob") == ["malformed", "", "malformed", "malformed"]
    assert end.ledger.releases == 1


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


@pytest.mark.parametrize("kind", ["gain", "mean", "sample"])
@pytest.mark.parametrize(("noise_var", "scale"), [(1e-12, 1e4), (1e6, 1e-6)])
def test_a_setup_at_its_limits_breaks_no_site(kind: str, noise_var: float, scale: float) -> None:
    """A server may be mistaken: what comes back is a message or a refusal, and never an error."""
    X, Y = history(6)
    made = study(
        message=kind,
        feature_map=scaled_map(scale),
        noise_var=noise_var,
        beta=1e3,
        clip_norm=MAX_WEIGHT,
        data={"ann": (torch.cat([X, X]), torch.cat([Y, Y + 1e3]))},  # two answers at one point
    )
    agent = made.agent("ann", SQUARE, 0, MemoryBlobs())
    site = Site("ann", agent, hill)
    blobs = put(agent, made.server(SQUARE, NAMES).hub.terms.setup)
    body = encode(Order(0, "first", True))
    request = Request("run", "first", "ann", 1, 0, 0, blobs, body, tag="0" * 64)
    answer = decode(site.respond(encode(request)), Reply, Refusal)
    if isinstance(answer, Reply):
        sent = decode(answer.body, Contribution).values
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
    assert len(said) == 2
    assert all("agent 'bob' has no message: " in words for words in said)


def scaled_map(scale: float) -> FeatureMap:
    tensors = random_fourier().to_tensors()
    key = "random_fourier/outputscale"
    return feature_map_from_tensors({**tensors, key: scale * tensors[key]})


# ------------------------------------------------------------------ what it costs


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


def test_a_release_that_is_all_noise_is_said_once() -> None:
    with pytest.warns(SignalWarning) as said:
        finished(RANDOM, message="mean", releases="all", noise_multiplier=20.0).report()
    assert len(said) == 1


# ------------------------------------------------------------------ settings


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: study(data={"zoe": history(3)}).server(SQUARE, NAMES), "no agents"),
    (lambda: study(RANDOM).server(SQUARE, NAMES), "own must not be"),
    (lambda: study().server(MIXED_SPACE, NAMES), "2 inputs"),
    (lambda: study(epsilon=1.0), "epsilon or noise_multiplier"),
    (lambda: DPFTSDE(budget=8), "needs epsilon or noise_multiplier"),
    (lambda: DPFTSDE(budget=0, epsilon=1.0), "budget >= 1"),
    (lambda: DPFTSDE(budget=2, epsilon=1.0), "no room for 3 initial points"),
    (lambda: DPFTSDE(budget=3, epsilon=1.0), "leaves no round after 3 initial points"),
    (lambda: DPFTSDE(budget=5, epsilon=1.0, releases=(2,)), "Write releases = .0,., or budget = 6"),
    (lambda: DPFTSDE(rounds=5, epsilon=1.0), "rounds is now budget.* write budget = 8"),  # type: ignore[call-arg]
    (lambda: study(TRANSFER, message="gain"), "leave message out"),
    (lambda: study(SMALL, message="own_mean"), "leave message out"),
    (lambda: study(TRANSFER, num_regions=2), "num_regions"),
    (lambda: study(SMALL, default={"a": 0.5, "b": 0.5}), "goes with TransferSearch"),
    (lambda: study(TRANSFER, aggregation=Relay()).server(SQUARE, NAMES), "reads noisy sums"),
]


@pytest.mark.parametrize(("make", "why"), BAD)
def test_bad_settings(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(InputDataError, match=why):
        make()


def test_random_points_go_without_releases() -> None:
    study(RANDOM, releases=())  # nothing is sent


def test_a_copy_of_a_study_cannot_spend_unseen(tmp_path: Path) -> None:
    with SharedLedger(tmp_path / "books") as books:
        plan = study(shared_ledger=books)
        for copied in (copy.copy(plan), copy.deepcopy(plan)):
            copied.agent("ann", SQUARE, 0, MemoryBlobs())
            with pytest.raises(ProtocolError, match="cannot pay"):
                copied.server(SQUARE, NAMES)
        replace(plan, budget=7).server(SQUARE, NAMES)


def test_longer_studies_go_on() -> None:
    plan, longer = study(), study(rounds=9)
    hubs = [made.server(SQUARE, NAMES) for made in (plan, longer)]
    assert hubs[0].fingerprint == hubs[1].fingerprint
    sites = [made.agent("ann", SQUARE, 0, MemoryBlobs()) for made in (plan, longer)]
    assert sites[0].fingerprint == sites[1].fingerprint
    other = study(require=Budget(1.0, 0.1)).agent("ann", SQUARE, 0, MemoryBlobs())
    assert other.fingerprint != sites[0].fingerprint


@pytest.mark.parametrize("given", [{}, {"ann": history(5)}, dict.fromkeys(NAMES, history(5))])
def test_a_site_needs_no_roster_no_data_of_others_and_no_budget_of_theirs(
    given: dict[str, Any],
) -> None:
    """What is derived from them is no word of the terms."""
    options: dict[str, Any] = {"releases": None, "epsilon": 50.0, "noise_multiplier": None}
    hub = study(TRANSFER, data=given, rounds=7, **options).server(SQUARE, NAMES)
    site = study(TRANSFER, rounds=2, **options).agent("ann", SQUARE, 0, MemoryBlobs())
    site.check(site.start(), Order(0, "first", True), put(site, hub.hub.terms.setup))


# ------------------------------------------------------------------ own means as a prior


@pytest.mark.parametrize("norm", [1.0, 0.37, 250.0])
def test_an_own_mean_has_the_clip_norm_exactly(norm: float) -> None:
    sent: list[Tensor] = []
    federation = Federation(study(TRANSFER, clip_norm=norm, **HEAR_ALL))
    federation.tamper = lambda name, m: (sent.append(m.values), m)[1]  # type: ignore[func-returns-value,arg-type]
    federation.drive()
    assert [message is None for message in sent] == [False, False, False, True, True, True] * 2
    for message in sent:
        if message is not None:
            assert float(message.norm()) == pytest.approx(norm, rel=1e-15)
            torch.testing.assert_close(clip(message, norm), message, rtol=1e-12, atol=0)


def test_absent_agents_miss_releases_and_come_back() -> None:
    federation = Federation(
        study(TRANSFER, rounds=4, releases=(0, 1, 3), **HEAR_ALL),
        absent=lambda name, serial: (name, serial) == ("bob", 2),
    )
    federation.drive()
    assert federation.failures("bob") == ["", "absent", "", "", ""]
    heard = {name: federation.sites[name].state.search for name in NAMES}
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
    assert (plan_of(boss).releases, plan_of(boss).planned) == ((), (0, 2))
    assert boss.promise is not None
    assert boss.promise.epsilon == 0
    federation = finished(TRANSFER, **options)
    report = federation.report()
    assert (report["epsilon"], report["releases"]) == (0.0, 0)
    assert report["signal"] == plan_of(boss).signal_words
    assert "nothing spent" in report["signal"]
    assert federation.uploaded() == [False] * 4
    alone = finished(TRANSFER, releases=(), noise_multiplier=None, noise_kind="none")
    for name in NAMES:
        assert torch.equal(federation.sites[name].state.X, alone.sites[name].state.X)
    insisting = replace(plan, min_reliability=0.0).server(SQUARE, NAMES)
    assert plan_of(insisting).releases == (0, 2)
    json.dumps(report)


def test_a_federation_with_enough_agents_releases_and_says_how_much() -> None:
    made = study(TRANSFER, noise_multiplier=None, epsilon=2.0, delta=1e-5)

    def planned(count: int) -> Any:
        return plan_of(made.server(SQUARE, MANY[:count]))

    boss = made.server(SQUARE, MANY)
    plan = plan_of(boss)
    assert plan.releases == (0, 2)
    assert plan.outlook.reliability(0.15) > MIN_RELIABILITY
    # The best that a mechanism can do, which all agents agree upon, is its own bound.
    best = float(plan.mechanism(0).best_signal_to_noise)
    assert plan.outlook.ratio(1.0) == pytest.approx(best, rel=1e-6)
    account = boss.privacy(boss.start())
    assert account is not None
    assert account["signal"] == plan.outlook.words
    fewest = planned(4).outlook.enough_agents(0.15, MIN_RELIABILITY)
    assert planned(fewest).releases
    assert not planned(fewest - 1).releases


def test_defaults_of_both_strategies() -> None:
    made = DPFTSDE(budget=15, epsilon=2.0, strategy=Following())
    boss = made.server(SQUARE, NAMES)
    assert (made.initial, made.rounds, plan_of(boss).releases) == (10, 5, (0, 1, 2, 3))
    search = boss.terms.search
    assert isinstance(search, ReleaseSearch)
    assert (search.messages.kind, plan_of(boss).clip_norm) == ("gain", 1.0)
    assert plan_of(boss).outlook is None
    account = boss.privacy(boss.start())
    assert account is not None
    assert "signal" not in account
    default = DPFTSDE(budget=8, epsilon=2.0, min_reliability=0.0)
    assert (default.initial, default.rounds) == (3, 5)
    boss = default.server(SQUARE, NAMES)
    assert isinstance(boss.terms.search, NoisyTransfer)
    assert plan_of(boss).releases == (0, 4)


def test_several_points_per_query() -> None:
    made = replace(study(TRANSFER, **HEAR_ALL), q=2, budget=8)
    federation = Federation(made)
    federation.drive()
    assert [len(federation.sites[name].state.X) for name in NAMES] == [8, 8, 8]
    assert len(federation.rounds) == 1 + 3
    assert federation.end.ledger.releases == 2


def test_a_start_that_was_missed_is_made_up_for() -> None:
    federation = Federation(
        study(TRANSFER, rounds=4, releases=()),
        absent=lambda name, serial: (name, serial) == ("bob", 1),
    )
    federation.drive()
    X = federation.sites["bob"].state.X
    assert len(X) == 4
    assert torch.equal(X[:3], dealt_design(SQUARE, 1, 3, 3))
