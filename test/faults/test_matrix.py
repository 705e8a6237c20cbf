"""Processes that are killed at every step, messages that are lost: nothing is, and all is paid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from botorch_fed.aggregation.stream import LocalStream
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import Observed, Replied
from botorch_fed.privacy import SharedLedger
from botorch_fed.storage.log import FileLog
from test.faults.cases import NAMES, Case, cases
from test.faults.engine import FAULTS, MODES, SERVER, World
from test.faults.matrix import Kill, faulty, killed, kills, undisturbed

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

CASES = cases()
KILLS = 5  # of each federation here; all of them by `python -m benchmarks.faults`


def case_of(name: str) -> Case:
    return cases()[name]


@pytest.mark.parametrize("name", CASES)
def test_a_run_survives_kills_and_faults(name: str) -> None:
    case = case_of(name)
    world = undisturbed(case)
    assert world.outcome.good
    assert all(world.fuses[process].steps > 5 for process in (SERVER, *NAMES))
    chosen = list(kills(world))
    for kill in chosen[len(name) :: len(chosen) // KILLS]:
        outcome = killed(case, kill)
        assert outcome.kills == 1, kill
        assert outcome.good, (kill, outcome)
        assert not outcome.stops, kill
        if case.exact and kill.patient:  # nothing was missed: it is as if nothing had happened
            assert outcome.result == world.outcome.result, kill
    for seed in range(2):
        outcome = faulty(case, seed)
        assert outcome.kills > 0
        assert outcome.good, (seed, outcome)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_costs_one_answer_at_most(fault: Any, tmp_path: Path) -> None:
    """A request of one site in one round goes wrong; all other answers count.

    A late answer takes the place of the next one. A bit that is flipped may be one of a number:
    that a message is its sender's and whole is the transport's business.
    """
    world = World(
        case_of("fts"),
        tmp_path,
        plan=lambda agent, serial: fault if (agent, serial) == ("bob", 3) else None,
    )
    missing: list[tuple[int, str]] = []
    world.heard = lambda round_: missing.extend(  # type: ignore[method-assign]
        (round_.serial, name) for name in NAMES if name not in round_.replied
    )
    outcome = world.run()
    assert outcome.good
    assert not outcome.stops
    if fault == "duplicate":
        assert missing == []
    elif fault == "swap replies":
        assert len(missing) == 2
        assert (3, "bob") in missing
    elif fault == "delay reply":
        assert missing == [(3, "bob"), (4, "bob")]
    elif fault == "flip reply":
        assert missing in ([(3, "bob")], [])
    else:
        assert missing == [(3, "bob")]


# ------------------------------------------------------------------ the oracles can fail


def outcomes(name: str, *chosen: Kill) -> Any:
    return [killed(case_of(name), kill) for kill in chosen]


def site_kills(name: str, *, patient: bool) -> list[Kill]:
    steps = undisturbed(case_of(name)).fuses["bob"].steps
    return [Kill("bob", step, "after", patient) for step in range(2, steps + 1)][6:13]


def test_a_lost_observation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that goes on without what its log holds after the last snapshot."""
    chosen = site_kills("fts", patient=False)
    real = Site._happened
    monkeypatch.setattr(
        Site, "_happened", lambda self, event, *, tells: real(self, event, tells=False)
    )
    assert sum(outcome.lost for outcome in outcomes("fts", *chosen)) > 0


def test_a_log_that_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = site_kills("fts", patient=True)
    real = FileLog._read

    def forgetful(self: FileLog, data: bytes) -> None:
        real(self, data)
        if self._events and isinstance(self._events[-1], Observed):
            del self._events[-1]

    monkeypatch.setattr(FileLog, "_read", forgetful)
    assert not all(survives(kill) for kill in chosen)


def survives(kill: Kill) -> bool:
    """Whether nothing is lost; also what is no log any more is noticed."""
    try:
        return killed(case_of("fts"), kill).good
    except ProtocolError:  # an answer to a trial that is not open
        return False


def test_a_repeated_evaluation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that does not look which of its trials are answered."""
    chosen = site_kills("fts", patient=True)
    real = Site._happened

    def happened(self: Site, event: Any, *, tells: bool) -> None:
        if not (tells and isinstance(event, Observed)):
            real(self, event, tells=tells)

    monkeypatch.setattr(Site, "_happened", happened)
    assert not all(survives(kill) for kill in chosen)


def test_a_second_draw_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that answers before its reply is on disk."""
    real = Site._append

    def append(self: Site, event: Any) -> None:
        if not isinstance(event, Replied):
            real(self, event)

    monkeypatch.setattr(Site, "_append", append)
    monkeypatch.setattr(FileLog, "keep", lambda self, digests: None)
    # The reply is lost on its way, the site is killed, and it is asked again.
    found = []
    for step in range(2, 6):
        world_kill = Kill("bob", step, "before", True)
        found.append(repeated(case_of("ucb-local"), world_kill))
    assert sum(found) > 0


def repeated(case: Case, kill: Kill) -> int:
    """Second draws of a run in which every request comes twice, and a site is killed."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        world = World(case, Path(folder), plan=lambda agent, serial: "duplicate")
        real = world._deliver

        def deliver(name: str, request: bytes, blobs: Any) -> bytes | None:
            answer = real(name, request, blobs)
            if name == "bob" and name in world.sites:
                world.sites.pop(name).close()  # as if it had been killed now
            return answer

        world._deliver = deliver  # type: ignore[method-assign]
        return world.run().second_draws


def test_nothing_is_drawn_twice_by_the_package() -> None:
    """The scenario of the test before, without the defect."""
    assert repeated(case_of("ucb-local"), Kill("bob", 2, "before")) == 0


@pytest.mark.parametrize(
    ("name", "owner", "what", "defect"),
    [
        ("dp-fts-de", SharedLedger, "spend", lambda self, event, **options: self),
        ("ucb-joint", SharedLedger, "spend", lambda self, event, **options: self),
    ],
)
def test_books_that_are_not_kept_are_noticed(
    name: str, owner: type, what: str, defect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, what, defect)
    assert undisturbed(case_of(name)).outcome.undercounts > 0


def test_a_state_that_pays_for_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, step = LocalStream.sent, FederatedServer.step

    def free(self: Any, site: Any, record: Any) -> Any:
        values, _ = sent(self, site, record)
        return values, site.memory.ledger

    monkeypatch.setattr(LocalStream, "sent", free)
    assert undisturbed(case_of("ucb-local")).outcome.undercounts > 0
    monkeypatch.setattr(
        FederatedServer,
        "step",
        lambda self, state, inbox: replace(step(self, state, inbox), ledger=state.ledger),
    )
    assert undisturbed(case_of("dp-fts-de")).outcome.undercounts > 0


def test_every_mode_kills() -> None:
    """Before, in the middle of and after a step are three different disks."""
    steps = {}
    for mode in MODES:
        outcome = killed(case_of("fts"), Kill("bob", 3, mode))
        assert outcome.kills == 1
        steps[mode] = outcome.good
    assert all(steps.values())
