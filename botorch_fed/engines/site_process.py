r"""A site process: it holds the site's state, secrets and objective, and answers on a socket.

The transport between machines forwards bytes: the request and its broadcasts to the socket, the
answer from it. The socket is a Unix domain socket in a private folder; only the site's user can
connect to it.

On the socket a message is a list of byte strings, each after its length::

    to the site      [b"wait" or b"defer", request, broadcast, broadcast, ...]
    from the site    [answer], where b"" means that the site has failed
    to the site      [b"verb", JSON]      of the trial service, see verbs
    from the site    [JSON]

After ``b"defer"`` a request is answered without waiting for an unfinished evaluation.

Error texts never leave the process: they are in its log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.engines.verbs import perform_json
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.base import (
    FRAME_BYTES,
    MAX_BROADCASTS,
    AgentId,
    Curve,
    Objective,
    Pending,
    Request,
)
from botorch_fed.federation.contribution import carries
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import Replied, Trial, trial_of
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode

logger = logging.getLogger(__name__)

COUNT = struct.Struct("<I")  # number of byte strings that follow
LENGTH = struct.Struct("<Q")  # of one of them
MOST_PATIENCE = 86400.0
MOST_WAIT = 600.0  # seconds for an answer to a verb, which waits for a running request
STALLED = 30.0  # seconds without a byte after which a connection is closed


class SiteProcess:
    """Answers requests on a socket, one after the other.

    Args:
        site: The site.
        path: The socket. Its folder must be private to this user.
        max_bytes: The longest request or broadcast; a whole message may be twice as long.
        on_trial: Called with the site's name and each trial that is answered, first of all with
            those of before. An error that it raises is logged, and the trial is passed on again
            with the next one.
        on_exchange: Called after each new reply with a row as in `RunResult.rounds`, and with
            ``trust``, if the reply tells one.

    Raises:
        ProtocolError: The folder is open to others, the path is too long, or another process
            listens there.

    Example:
        >>> with SiteProcess(site, folder / "socket") as process:
        ...     process.serve()
    """

    def __init__(
        self,
        site: Site,
        path: str | Path,
        *,
        max_bytes: int = MAX_BYTES,
        on_trial: Callable[[AgentId, Trial], None] | None = None,
        on_exchange: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.site = site
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._on_trial = on_trial
        self._on_exchange = on_exchange
        self._earned = 0  # trusts that `on_exchange` has got
        self._passed = 0  # trials that `on_trial` has got
        self._passing = threading.Lock()
        self._socket = _listening(self.path)
        self._stopped = False
        if isinstance(site.objective, Background):
            site.objective.on_value = self._settle

    def __repr__(self) -> str:
        return f"SiteProcess({self.site!r}, {str(self.path)!r})"

    def serve(self) -> None:
        """Answer until `stop` is called, or a signal raises."""
        self._pass_on()
        while not self._stopped:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._stopped:
                    return
                raise
            with connection:
                connection.settimeout(STALLED)
                try:
                    self._answer(connection)
                except (OSError, MessageError) as error:
                    logger.warning("site %r: a request was dropped: %s", self.site.name, error)
                except Exception:  # one message must not end the process
                    logger.exception("site %r: a request was dropped", self.site.name)
            self._pass_on()

    def _answer(self, connection: socket.socket) -> None:
        parts = receive(connection, MAX_BROADCASTS + 2, 2 * self._max_bytes + FRAME_BYTES)
        kind, rest = (parts[0], parts[1:]) if len(parts) > 1 else (b"", [])
        if kind == b"verb":
            send(connection, [perform_json(self.site, rest[0])])
        elif kind in (b"wait", b"defer"):
            send(connection, [self.respond(rest[0], rest[1:], defer=kind == b"defer")])
        else:
            raise MessageError(
                'Expected a message of "wait", "defer" or "verb" and its content, got '
                f"{len(parts)} parts."
            )

    def respond(self, request: bytes, blobs: Sequence[bytes] = (), *, defer: bool = False) -> bytes:
        """The answer to a request with its broadcasts; empty if the site has failed."""
        try:
            self._take(request, blobs)
            known = len(self.site.log)
            answer = self.site.respond(request, defer=defer)
            new = [self.site.log[place] for place in range(known, len(self.site.log))]
            if self._on_exchange is not None and any(isinstance(one, Replied) for one in new):
                self._on_exchange(self._exchanged(request, blobs, answer))
            return answer
        except Exception:  # any error of the objective; its text stays here
            logger.exception("site %r has failed in a request", self.site.name)
            return b""
        finally:
            self.site.agent.blobs.keep(self.site.broadcasts)

    def _exchanged(self, request: bytes, blobs: Sequence[bytes], answer: bytes) -> dict[str, Any]:
        """The row of an exchange, as the site knows it."""
        frame: Request = decode(request, Request, max_bytes=self._max_bytes + FRAME_BYTES)
        told = carries(decode(frame.body, *self.site.agent.accepts, max_bytes=self._max_bytes))
        hashes = [digest[:8] for digest in frame.broadcasts]
        earned = getattr(self.site.agent, "earned", [])
        trust = {"trust": earned[-1]} if len(earned) > self._earned else {}
        self._earned = len(earned)
        return {
            "round": frame.serial,
            "agent": self.site.name,
            "replied": True,
            "failure": None,
            "sent": self.site.sent,
            "received": [*hashes, *([f"request {frame.serial}"] if told else [])],
            "bytes_down": len(request) + sum(map(len, blobs)),
            "bytes_up": len(answer),
            "cpu_seconds": 0.0,
            **trust,
        }

    def _take(self, request: bytes, blobs: Sequence[bytes]) -> None:
        """Store the broadcasts that the request names."""
        store = self.site.agent.blobs
        try:
            frame: Request = decode(request, Request, max_bytes=self._max_bytes + FRAME_BYTES)
        except MessageError:
            return  # the site refuses it
        for blob in blobs:
            named = content_hash(blob) in frame.broadcasts
            if named and len(blob) <= self._max_bytes and not store.has(content_hash(blob)):
                store.put(blob)

    def _settle(self) -> None:
        """Write a finished value into the log at once, not with the next request."""
        try:
            self.site.settle()
        except Exception:
            logger.exception("site %r cannot record a value", self.site.name)
        self._pass_on()

    def _pass_on(self) -> None:
        """Give new trials to `on_trial`."""
        if self._on_trial is None:
            return
        with self._passing:
            try:
                for observation in self.site.observations(self._passed):
                    self._on_trial(self.site.name, trial_of(observation, self.site.space))
                    self._passed += 1
            except Exception:  # of a user's function, which must not end the process
                logger.exception("site %r: on_trial has failed", self.site.name)

    def stop(self) -> None:
        """End `serve` after the current request; from any thread."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and release the site's files."""
        self._socket.close()
        self.path.unlink(missing_ok=True)
        self.site.log.close()

    def __enter__(self) -> SiteProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Background:
    """An objective that runs in a thread and returns `Pending()` until it has a value.

    A site with a running evaluation answers "busy", and rounds continue without it. A `SiteProcess`
    writes the value into the log as soon as it exists, and the next request uses it, however late.
    If the process dies before, the evaluation starts again with the process. One evaluation runs
    at a time.

    Args:
        objective: `q x d` points to `q x 1` values.
        patience: Seconds that a request waits for the value before it gets `Pending()`.

    Attributes:
        on_value: Called in the evaluation's thread when it has a value.
    """

    def __init__(self, objective: Objective, patience: float = 20.0) -> None:
        if not 0 <= patience <= MOST_PATIENCE:
            raise InputDataError(
                f"Expected 0 <= patience <= {MOST_PATIENCE:g} seconds, got {patience}."
            )
        self.on_value: Callable[[], None] | None = None
        self._objective = objective
        self._patience = patience
        self._until: float | None = None
        self.in_batches = bool(getattr(objective, "in_batches", False))
        self._run: _Evaluation | None = None

    def renew(self) -> None:
        """Start the waiting time of a new request."""
        self._until = time.monotonic() + self._patience

    def __call__(self, X: Tensor) -> Tensor | Pending | Curve:
        """The values, or `Pending()`; an error is raised once, and the next call starts again."""
        points = X.numpy().tobytes()
        run = self._run
        if run is None or (run.points != points and run.ended.is_set()):
            run = self._run = _Evaluation(self._objective, X, self.on_value)
        left = self._patience
        if self._until is not None:  # of all evaluations of a request together
            left = min(left, max(self._until - time.monotonic(), 0.0))
        if run.points != points or not run.ended.wait(left):
            return Pending()  # also while an abandoned evaluation of other points runs
        self._run = None
        if run.error is not None:
            raise run.error
        assert run.value is not None
        return run.value


class _Evaluation:
    def __init__(
        self, objective: Objective, X: Tensor, on_value: Callable[[], None] | None
    ) -> None:
        self.points = X.numpy().tobytes()
        self.value: Tensor | Pending | Curve | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._objective, self._X, self._on_value = objective, X.clone(), on_value
        threading.Thread(target=self._work, name="objective", daemon=True).start()

    def _work(self) -> None:
        try:
            self.value = self._objective(self._X)
        except BaseException as error:  # raised in the calling thread
            self.error = error
        self.ended.set()
        if self.error is None and self._on_value is not None:
            self._on_value()


# ------------------------------------------------------------------ the socket


def ask_site(path: Path, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a site process to a verb of its trial service."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(MOST_WAIT)
        connection.connect(str(path))
        send(connection, [b"verb", json.dumps({"verb": verb, **arguments}).encode()])
        (answer,) = receive(connection, 1, MAX_BYTES)
    fields: dict[str, Any] = json.loads(answer)
    return fields


def send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    """Send some byte strings."""
    framed = [LENGTH.pack(len(part)) + part for part in parts]
    connection.sendall(COUNT.pack(len(parts)) + b"".join(framed))


def receive(connection: socket.socket, most: int, max_bytes: int) -> list[bytes]:
    """The byte strings of one `send`; `MessageError` if they are too many or too long."""
    (count,) = COUNT.unpack(_exactly(connection, COUNT.size))
    if count > most:
        raise MessageError(f"Expected at most {most} byte strings, got {count}.")
    parts: list[bytes] = []
    for _ in range(count):
        (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
        if size > max_bytes:
            raise MessageError(f"Expected at most {max_bytes} more bytes, got {size}.")
        max_bytes -= size
        parts.append(_exactly(connection, size))
    return parts


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 2**20))
        if not piece:
            raise MessageError(f"The connection ended after {len(data)} of {size} bytes.")
        data += piece
    return bytes(data)


def _listening(path: Path) -> socket.socket:
    folder = path.parent.stat()
    if folder.st_mode & 0o077:
        raise ProtocolError(
            f"The folder {path.parent} is open to others (mode {stat.S_IMODE(folder.st_mode):o}): "
            f"other users could send requests to the site. Run chmod 700 {path.parent}"
        )
    if is_listening(path):
        raise ProtocolError(f"A site answers at {path} already: stop that process first.")
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(16)
    except OSError as error:
        listening.close()
        if len(str(path).encode()) > 100:
            raise ProtocolError(
                f"Expected a socket path of at most 100 bytes, got {path}: choose a folder with a "
                "shorter path."
            ) from error
        raise
    return listening


def is_listening(path: Path) -> bool:
    """Whether a process answers at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
