"""The engines on one machine: bytes only, counted, and the same over processes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from botorch_fed.engines import inprocess, parallel
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.engines.parallel import CHUNK, Parallel
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.base import Failure, Outbox, Pending
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.site import Site
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.wire.codec import encode
from test.federation.search import Ask, BoxAgent, BoxServer, Plan, ServerState

NAMES = ("a", "b", "c")
SERVER = BoxServer(NAMES, rounds=3)


def bowl(X: Tensor) -> Tensor:
    return -(X - 0.3).square().sum(dim=-1, keepdim=True)


def broken(X: Tensor) -> Tensor:
    raise ValueError("the oven has failed at 700 degrees")


def make_site(name: str, *, objective: Any = bowl, blobs: MemoryBlobs | None = None) -> Site:
    blobs = MemoryBlobs() if blobs is None else blobs
    agent = BoxAgent(seed=NAMES.index(name), blobs=blobs)
    return Site(name, agent, objective, raise_errors=True)


@dataclass(frozen=True)
class Steady(BoxServer):
    """Says the same to all in every round."""

    def outbox(self, state: ServerState) -> Outbox | None:
        if state.t == self.rounds:
            return None
        centre = torch.full((self.dim,), 0.5).double()
        return Outbox({agent: Ask(centre) for agent in self.agents}, (Plan(0.7),))


def test_bytes_count_a_broadcast_once_per_agent() -> None:
    rounds: list[Round] = []
    blobs = MemoryBlobs()
    server = Steady(NAMES, rounds=3)
    absent = lambda name, serial: (name, serial) == ("b", 1)  # noqa: E731
    engine = InProcess([make_site(n, blobs=blobs) for n in NAMES], absent=absent)
    drive(server, engine, on_round=rounds.append)
    first, second, third = (round_.exchanged.bytes_down for round_ in rounds)
    assert set(first) == {"a", "c"}
    assert first["a"] - second["a"] == len(encode(Plan(0.7)))
    assert second["b"] == first["a"]  # who was absent gets it later
    assert third["a"] == third["b"] == second["a"]
    assert all(cost > 0 for cost in rounds[0].exchanged.cpu_seconds.values())


def test_old_broadcasts_are_dropped() -> None:
    blobs = MemoryBlobs()
    engine = InProcess([make_site(n, blobs=blobs) for n in NAMES])
    drive(SERVER, engine)
    live = {digest for site in engine.sites.values() for digest in site.broadcasts}
    assert len(live) == 1
    assert all(blobs.has(digest) for digest in live)
    assert not blobs.has("0" * 64)


def test_observations_come_once() -> None:
    engine = InProcess([make_site(n) for n in NAMES])
    drive(BoxServer(NAMES, rounds=1), engine)
    first = list(engine.observations())
    assert [name for name, _ in first] == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert not list(engine.observations())


def test_an_error_of_an_objective_is_raised_or_a_failure() -> None:
    made = [make_site("a"), make_site("b", objective=broken)]
    with pytest.raises(ValueError, match="oven"):
        drive(BoxServer(("a", "b"), rounds=1), InProcess(made))
    made = [make_site("a"), make_site("b", objective=broken)]
    rounds: list[Round] = []
    engine = InProcess(made, raise_errors=False)
    drive(BoxServer(("a", "b"), rounds=2), engine, on_round=rounds.append)
    assert rounds[1].replied == ("a",)
    # The kind of the error, and not its words: they may hold data.
    assert rounds[1].exchanged.failures["b"] == Failure("failed", "ValueError")


def test_names_must_differ() -> None:
    with pytest.raises(ProtocolError, match="'a'"):
        InProcess([make_site("a"), make_site("a")])


def test_several_processes_give_identical_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "START", "spawn")  # as users have it
    rounds: list[Round] = []
    alone = InProcess([make_site(n) for n in NAMES])
    expected = drive(SERVER, alone)
    with Parallel(NAMES, make_site, workers=2) as engine:
        state = drive(SERVER, engine, on_round=rounds.append)
        found = {name: [] for name in NAMES}
        for name, observation in engine.observations():
            found[name].append(observation)
        assert not list(engine.observations())
    assert encode(state) == encode(expected)
    for name, seen in alone.observations():
        other = found[name].pop(0)
        assert torch.equal(other.X, seen.X)
        assert torch.equal(other.Y, seen.Y)
    assert rounds[0].exchanged.cpu_seconds.keys() == set(NAMES)


def test_a_worker_reports_what_went_wrong() -> None:
    maker = partial(make_site, objective=broken)
    with (
        Parallel(NAMES, maker, workers=1) as engine,
        pytest.raises(ProtocolError, match="ValueError: the oven"),
    ):
        drive(SERVER, engine)


def impossible(name: str) -> Site:
    raise ValueError(f"no site {name}")


def test_a_site_that_cannot_be_built_says_so() -> None:
    with (
        Parallel(NAMES, impossible, workers=2) as engine,
        pytest.raises(ProtocolError, match="ValueError: no site"),
    ):
        drive(SERVER, engine)


def test_a_lambda_cannot_be_sent_and_the_error_says_what_can() -> None:
    with pytest.raises(ProtocolError, match="no lambdas"):
        Parallel(NAMES, lambda name: make_site(name), workers=1)


def ended(X: Tensor) -> Tensor:
    raise EOFError("the spool of paper has ended")


def test_an_error_that_looks_like_the_end_of_a_pipe_is_reported() -> None:
    maker = partial(make_site, objective=ended)
    with (
        Parallel(NAMES, maker, workers=1) as engine,
        pytest.raises(ProtocolError, match="the spool"),
    ):
        drive(SERVER, engine)


def test_many_observations_come_in_parts() -> None:
    names = ("a",)
    with Parallel(names, many, workers=1) as engine:
        drive(BoxServer(names, rounds=1), engine)
        found = engine.observations()
    assert len(found) == CHUNK + 10
    assert len({tuple(seen.X[0].tolist()) for _, seen in found}) == CHUNK + 10


def many(name: str) -> Site:
    return Site(name, BoxAgent(seed=0, per_round=CHUNK + 10), bowl)


def test_an_engine_that_was_never_closed_does_not_hold_python_up() -> None:
    script = (
        "import tempfile; folder = tempfile.TemporaryDirectory()\n"
        "from test.engines.test_inprocess import NAMES, Parallel, make_site\n"
        "if __name__ == '__main__':\n"
        "    engine = Parallel(NAMES, make_site, workers=1)\n"
        "    engine.observations()\n"
    )
    root = Path(__file__).parent.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forgetful.py"
        path.write_text(script)
        environment = {**os.environ, "PYTHONPATH": str(root)}
        subprocess.run([sys.executable, str(path)], env=environment, check=True, timeout=60)


def test_busy_and_then_broken_is_a_failure() -> None:
    calls = []

    def objective(X: Tensor) -> Tensor | Pending:
        calls.append(X)
        if len(calls) == 1:
            return Pending()
        raise OSError("no power")

    engine = InProcess([make_site("a", objective=objective)], raise_errors=False, patience=30.0)
    rounds: list[Round] = []
    drive(BoxServer(("a",), rounds=1), engine, on_round=rounds.append)
    assert rounds[0].exchanged.failures == {"a": Failure("failed", "OSError")}


def deadly(X: Tensor) -> Tensor:
    os._exit(3)


def test_the_death_of_a_worker_is_an_error_and_leaves_nothing_behind() -> None:
    maker = partial(make_site, objective=deadly)
    with Parallel(NAMES, maker, workers=2) as engine:
        processes = list(engine._processes)
        with pytest.raises(ProtocolError, match=r"has died \(exit code 3\)"):
            drive(SERVER, engine)
        assert not any(process.is_alive() for process in processes)
        with pytest.raises(ProtocolError, match="have ended"):
            engine.observations()


def hanging(X: Tensor) -> Tensor:
    time.sleep(600)
    return bowl(X)


def one_dies(name: str) -> Site:
    return make_site(name, objective=deadly if name == "b" else hanging)


def one_hangs(name: str) -> Site:
    return make_site(name, objective=hanging if name == "b" else bowl)


def test_a_death_is_noticed_while_others_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "GRACE", 0.5)
    with Parallel(("a", "b"), one_dies, workers=2) as engine:
        processes = list(engine._processes)
        with pytest.raises(ProtocolError, match=r"'b' has died \(exit code 3\)"):
            drive(BoxServer(("a", "b"), rounds=1), engine)
        assert not any(process.is_alive() for process in processes)


def test_a_worker_that_hangs_ends_the_run_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "GRACE", 0.5)
    with Parallel(("a", "b"), one_hangs, workers=2) as engine:
        processes = list(engine._processes)
        engine.observations()  # all are awake
        engine._deadline = 3.0
        with pytest.raises(ProtocolError, match="'b' has not answered for 3 seconds"):
            drive(BoxServer(("a", "b"), rounds=1), engine)
        assert not any(process.is_alive() for process in processes)
        with pytest.raises(ProtocolError, match="have ended"):
            engine.observations()


def test_a_stopped_worker_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "GRACE", 0.2)
    with Parallel(("a",), make_site, workers=1) as engine:
        engine.observations()
        engine._deadline = 0.5
        (process,) = engine._processes
        os.kill(process.pid or 0, signal.SIGSTOP)
        with pytest.raises(ProtocolError, match="'a' has not answered"):
            engine.observations()
        assert process.exitcode == -signal.SIGKILL


def test_a_deadline_is_positive() -> None:
    with pytest.raises(ProtocolError, match="deadline"):
        Parallel(("a",), make_site, workers=1, deadline=0.0)


class Oven:
    """Has the value of a new point when it has been asked for it so many times."""

    def __init__(self, times: float = 3) -> None:
        self.times = times
        self.asked: dict[bytes, int] = {}

    def __call__(self, X: Tensor) -> Tensor | Pending:
        key = X.numpy().tobytes()
        self.asked[key] = self.asked.get(key, 0) + 1
        return bowl(X) if self.asked[key] > self.times else Pending()


def test_a_patient_engine_waits_for_slow_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess, "POLL", 0.001)
    expected = drive(BoxServer(("a",), rounds=2), InProcess([make_site("a")]))
    engine = InProcess([make_site("a", objective=Oven())], patience=20.0)
    state = drive(BoxServer(("a",), rounds=2), engine)
    assert encode(state) == encode(expected)


def test_an_impatient_engine_goes_on_and_loses_nothing() -> None:
    oven = Oven(math.inf)
    engine = InProcess([make_site("a", objective=oven), make_site("b")])
    rounds: list[Round] = []
    drive(BoxServer(("a", "b"), rounds=3), engine, on_round=rounds.append)
    assert [r.replied for r in rounds] == [("b",)] * 3
    assert rounds[0].exchanged.failures == {"a": Failure("busy")}
    assert len(oven.asked) == 1  # the point of the first round, still waited for
    site = engine.sites["a"]
    assert site.broadcasts[0] in {
        digest for digest in site.broadcasts if site.agent.blobs.has(digest)
    }
