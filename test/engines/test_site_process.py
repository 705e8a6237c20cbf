"""A site behind a socket: real sockets, real files, and a process that can be killed."""

from __future__ import annotations

import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.engines.inprocess import InProcess, refusal_code
from botorch_fed.engines.site_process import COUNT, Background, SiteProcess, receive, send
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.base import Exchanged, Objective, Outgoing, Pending
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS, Observed
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.store import FileBlobs
from test.federation.search import BoxAgent, BoxServer

SERVER = BoxServer(("a",), rounds=3)


def bowl(X: Tensor) -> Tensor:
    return -(X - 0.3).square().sum(dim=-1, keepdim=True)


def site_in(folder: Path, objective: Any = bowl, **options: Any) -> Site:
    folder.mkdir(mode=0o700, exist_ok=True)
    log = FileLog(folder / "log", SITE_EVENTS)
    agent = BoxAgent(seed=0, blobs=FileBlobs(folder / "blobs"))
    return Site("a", agent, objective, log=log, **options)


@contextmanager
def running(site: Site, path: Path, **options: Any) -> Iterator[SiteProcess]:
    with SiteProcess(site, path, **options) as process:
        thread = threading.Thread(target=process.serve)
        thread.start()
        try:
            yield process
        finally:
            process.stop()
            thread.join(10)
            assert not thread.is_alive()


def ask(path: Path, parts: list[bytes]) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        send(connection, parts)
        return receive(connection, 1, 2**24)[0]


class OverSocket:
    """An `Exchange` with one site behind a socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: list[bytes] = []

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        replies = {}
        for name, request in outgoing.requests.items():
            mode = b"defer" if outgoing.defer else b"wait"
            replies[name] = ask(self.path, [mode, request, *outgoing.blobs.values()])
        self.answers += replies.values()
        return Exchanged(replies)


def test_a_run_over_a_socket_is_a_run_in_process(tmp_path: Path) -> None:
    site = site_in(tmp_path / "a")
    with running(site, tmp_path / "a" / "socket"):
        far = drive(SERVER, OverSocket(tmp_path / "a" / "socket"))
        seen = [observation.X for observation in site.observations()]
    near_site = Site("a", BoxAgent(seed=0), bowl)
    near = drive(SERVER, InProcess([near_site]))
    assert torch.equal(far.best.X, near.best.X)
    assert torch.equal(torch.cat(seen), torch.cat([o.X for o in near_site.observations()]))


def test_the_socket_is_private_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "a" / "socket"
    with running(site_in(tmp_path / "a"), path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    site = site_in(tmp_path / "a")
    (tmp_path / "a").chmod(0o755)
    with pytest.raises(ProtocolError, match=r"mode 755.*chmod 700"):
        SiteProcess(site, tmp_path / "a" / "socket")


def test_a_second_process_is_refused_and_a_stale_socket_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a" / "socket"
    site = site_in(tmp_path / "a")
    with running(site, path), pytest.raises(ProtocolError, match=r"answers at .* already"):
        SiteProcess(Site("a", BoxAgent(seed=0), bowl), path)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))  # as a process that was killed leaves it
    left.close()
    with running(site_in(tmp_path / "a"), path):
        pass


def test_a_path_that_is_too_long_says_so(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    with pytest.raises(ProtocolError, match="at most 100 bytes"):
        SiteProcess(site_in(folder), folder / "socket")


def test_broadcasts_that_no_request_names_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "a" / "socket"
    site = site_in(tmp_path / "a")
    with running(site, path):
        exchange = OverSocket(path)

        def smuggle(outgoing: Outgoing) -> Exchanged:
            more = {**outgoing.blobs, "x": b"nobody asked for this"}
            return exchange(Outgoing(outgoing.serial, outgoing.requests, more))

        drive(SERVER, smuggle)
    kept = site.agent.blobs._store.names()
    assert set(kept) <= set(site.broadcasts)


def test_words_of_an_error_stay_in_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def oven(X: Tensor) -> Tensor:
        raise OSError("the oven has failed at 700 degrees")

    path = tmp_path / "a" / "socket"
    with running(site_in(tmp_path / "a", oven), path):
        exchange = OverSocket(path)
        with pytest.raises(ProtocolError, match="0 of 1"):
            drive(SERVER, exchange, quorum=1)
    assert exchange.answers == [b""]
    assert "700 degrees" in caplog.text


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def test_broken_connections_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a" / "socket"
    with running(site_in(tmp_path / "a"), path, max_bytes=1000):
        for data in (b"", b"\1", COUNT.pack(2**31), COUNT.pack(0), COUNT.pack(1) + b"\xff" * 8):
            with connected(path) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""  # given up, not answered
        assert refusal_code(ask(path, [b"wait", b"no request"])) == "invalid"
        with connected(path) as connection:
            send(connection, [b"shout", b"no request"])
            assert connection.recv(1) == b""
        assert drive(SERVER, OverSocket(path)).t == 3


def test_a_message_that_nobody_can_answer_does_not_end_the_process(tmp_path: Path) -> None:
    path = tmp_path / "a" / "socket"
    with running(site_in(tmp_path / "a"), path):
        said = json.loads(ask(path, [b"verb", b"[" * 100_000]))
        assert "JSON object" in said["error"]
        (tmp_path / "a" / "blobs").rename(tmp_path / "moved")
        with connected(path) as connection:
            send(connection, [b"wait", b"no request"])
            assert connection.recv(1) == b""
        (tmp_path / "moved").rename(tmp_path / "a" / "blobs")
        assert drive(SERVER, OverSocket(path)).t == 3


def test_sizes_are_refused_before_memory_is_taken() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(COUNT.pack(1) + (2**40).to_bytes(8, "little"))
        with pytest.raises(MessageError, match="at most 100 more bytes, got 1099511627776"):
            receive(theirs, 1, 100)


# ------------------------------------------------------------------ slow objectives


def test_a_slow_objective_is_evaluated_once_and_its_value_waits(tmp_path: Path) -> None:
    ready, calls = threading.Event(), []

    def slow(X: Tensor) -> Tensor:
        calls.append(X)
        assert ready.wait(10)
        return bowl(X)

    background = Background(slow, patience=0.05)
    X = torch.rand(1, 2, dtype=torch.float64)
    assert isinstance(background(X), Pending)
    assert isinstance(background(X), Pending)
    ready.set()
    time.sleep(0.1)
    assert torch.equal(background(X), bowl(X))
    assert len(calls) == 1


def test_rounds_go_on_without_a_site_that_is_busy(tmp_path: Path) -> None:
    path, ready = tmp_path / "a" / "socket", threading.Event()

    def slow(X: Tensor) -> Tensor:
        assert ready.wait(10)
        return bowl(X)

    site = site_in(tmp_path / "a", Background(slow, patience=0.01))
    with running(site, path):
        exchange = OverSocket(path)

        def watch(outgoing: Outgoing) -> Exchanged:
            if outgoing.serial == 3:
                ready.set()
                time.sleep(0.2)
            return exchange(outgoing)

        last = drive(SERVER, watch)
        first = [o for o in site.observations() if o.serial == 1]
    assert [refusal_code(answer) for answer in exchange.answers[:2]] == ["busy", "busy"]
    assert len(last.heard) == 3
    assert len(first) == 1  # the value that the first round paid for is not lost


def until(ready: Any) -> None:
    end = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def kept_by(site: Site) -> int:
    """How many observations a site keeps, which may be at work."""
    return len(site.observations())


def test_a_value_is_kept_the_moment_it_exists(tmp_path: Path) -> None:
    """Also that of the last round, for which nobody asks any more."""
    path, ready = tmp_path / "a" / "socket", threading.Event()

    def slow(X: Tensor) -> Tensor:
        assert ready.wait(10)
        return bowl(X)

    site = site_in(tmp_path / "a", Background(slow, patience=0.01))
    with running(site, path):
        exchange = OverSocket(path)
        drive(BoxServer(("a",), rounds=1), exchange)
        assert kept_by(site) == 0
        ready.set()
        until(lambda: kept_by(site) == 1)
    with FileLog(tmp_path / "a" / "log", SITE_EVENTS) as kept:
        assert sum(isinstance(event, Observed) for event in kept) == 1


def test_a_slow_objective_that_fails_holds_nobody_up(tmp_path: Path) -> None:
    path, calls = tmp_path / "a" / "socket", []

    def broken(X: Tensor) -> Tensor:
        calls.append(X)
        time.sleep(0.05)
        raise OSError("no power")

    site = site_in(tmp_path / "a", Background(broken, patience=0.01))
    with running(site, path):
        exchange = OverSocket(path)

        def carry(outgoing: Outgoing) -> Exchanged:
            time.sleep(0.1)
            return exchange(outgoing)

        drive(BoxServer(("a",), rounds=6), carry)
        status = json.loads(ask(path, [b"verb", b'{"verb": "status"}']))
    codes = {refusal_code(answer) if answer else "failed" for answer in exchange.answers}
    assert codes == {"busy", "failed"}
    # Two failures are recorded; after the third the objective is taken for broken.
    assert [trial["reason"] for trial in status["trials"][:2]] == ["OSError: no power"] * 2
    assert status["trials"][2]["status"] == "open"
    assert len({X.numpy().tobytes() for X in calls}) == 3


def test_trials_are_answered_over_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "a" / "socket"

    def verb(**fields: Any) -> Any:
        return json.loads(ask(path, [b"verb", json.dumps(fields).encode()]))

    def answer_all(_: Any) -> None:
        while trials := verb(verb="ask")["trials"]:
            for trial in trials:
                x = torch.tensor([list(trial["parameters"].values())], dtype=torch.float64)
                verb(verb="tell", id=trial["id"], value=float(bowl(x)))

    with running(site_in(tmp_path / "a", None), path):
        exchange = OverSocket(path)

        def carry(outgoing: Outgoing) -> Exchanged:
            exchange(outgoing)
            answer_all(outgoing)
            return exchange(outgoing)

        far = drive(SERVER, carry)
        assert verb(verb="status")["round"] == 3
    near = drive(SERVER, InProcess([Site("a", BoxAgent(seed=0), bowl)]))
    assert far.best.value == near.best.value


def test_one_evaluation_at_a_time() -> None:
    ready, calls = threading.Event(), []

    def slow(X: Tensor) -> Tensor:
        calls.append(X)
        assert ready.wait(10)
        return bowl(X)

    background = Background(slow, patience=0.01)
    one, other = torch.rand(2, 1, 2, dtype=torch.float64)
    assert isinstance(background(one), Pending)
    assert isinstance(background(other), Pending)
    ready.set()
    until(lambda: not isinstance(background(one), Pending))
    assert len(calls) == 1


def test_an_error_is_raised_once_and_the_point_tried_again() -> None:
    calls = []

    def flaky(X: Tensor) -> Tensor:
        calls.append(X)
        if len(calls) == 1:
            raise ValueError("no power")
        return bowl(X)

    background: Objective = Background(flaky, patience=5)
    X = torch.rand(1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="no power"):
        background(X)
    assert torch.equal(background(X), bowl(X))


def test_patience_is_checked() -> None:
    for patience in (float("nan"), float("inf"), -1.0):
        with pytest.raises(InputDataError, match="patience <= 86400 seconds"):
            Background(bowl, patience=patience)
