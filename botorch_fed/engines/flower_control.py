r"""The hub's calls to Flower's server, over the Unix socket in the hub's folder.

::

    register, unregister, nodes     the registered public keys
    begin, driven                   a Flower run, and the grid for its messages

Flower's server stores and forwards messages. The calling process drives a run: no `ServerApp` is
sent and no executor is used. Flower requires a bundle of files for a run; this bundle holds a name
and no code.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from botorch_fed.engines.site_process import is_listening
from botorch_fed.errors import FederatedError

if TYPE_CHECKING:
    from flwr.serverapp import Grid

T = TypeVar("T")

SECONDS = 120.0  # timeout of a call
TRIES = 3  # attempts of a call that a busy server did not answer
BEAT = 10.0  # seconds between two heartbeats of a run
BUNDLE = """
[project]
name = "botorch-fed-run"
version = "1.0.0"
description = "A name for a run: nobody executes it"
license = "MIT"
dependencies = []

[tool.flwr.app]
publisher = "botorch-fed"

[tool.flwr.app.components]
serverapp = "none:app"
clientapp = "none:app"
"""


class HubLost(FederatedError):
    """Flower's server of this hub does not answer, or has given up the run."""


class ControlRefused(FederatedError):
    """Flower's server refuses a call; the message holds its reason."""


class Control:
    """Calls of the hub's user.

    Args:
        path: The socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Control({str(self.path)!r})"

    def nodes(self) -> dict[int, tuple[str, bytes]]:
        """The status and public key of every node."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._control() as control:
            listed = self._call(control.ListNodes, ListNodesRequest())
        return {node.node_id: (node.status, node.public_key) for node in listed.nodes_info}

    def register(self, public_key: bytes) -> int:
        """The node of a public key in PEM; a new node if there is none."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        for node, (_, key) in self.nodes().items():
            if key == public_key:
                return node
        with self._control() as control:
            new = self._call(control.RegisterNode, RegisterNodeRequest(public_key=public_key))
        return int(new.node_id)

    def unregister(self, node: int) -> None:
        """Unregister a node, if it exists."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        if node in self.nodes():
            with self._control() as control:
                self._call(control.UnregisterNode, UnregisterNodeRequest(node_id=node))

    def begin(self) -> str:
        """Start a Flower run, acquire its task and return the token. One process at a time."""
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        with self._control() as control:
            bundle = Fab(content=_bundle())
            number = self._call(control.StartRun, StartRunRequest(fab=bundle)).run_id
            if not number:
                raise ControlRefused("Flower's server does not start a run.")
        want = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        with self._runtime() as runtime:
            while True:
                acquired = self._call(runtime.AcquireTask, want)
                if not acquired.token:
                    raise HubLost("Another process has acquired the run: continue with --resume.")
                if acquired.task.run_id == number:
                    return str(acquired.token)
                self._finish(acquired.token, "this server does not execute apps")

    @contextlib.contextmanager
    def driven(self, token: str) -> Iterator[Grid]:
        """The grid of a run, which ends with the body."""
        from flwr.common.serde import run_from_proto
        from flwr.proto.runtime_pb2 import PullTaskInputRequest
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid import HttpGrid

        with self._runtime(token) as runtime:
            given = self._call(runtime.PullTaskInput, PullTaskInputRequest())
            TaskIdentity.task_id = given.task_id
            TaskIdentity.run_id = given.run.run_id
            TaskIdentity.node_id = given.context.node_id
            grid = HttpGrid(token=token)
            grid._client = _Guarded(runtime, self._call)  # type: ignore[assignment]
            grid.set_run(run_from_proto(given.run))
            ended = threading.Event()
            beat = threading.Thread(target=self._beat, args=(token, ended), daemon=True)
            beat.start()
            error = ""
            try:
                yield grid
            except BaseException:
                error = "the run has stopped"
                raise
            finally:
                ended.set()
                with contextlib.suppress(HubLost, ControlRefused):
                    self._finish(token, error)

    def _finish(self, token: str, error: str) -> None:
        from flwr.common.constant import SubStatus
        from flwr.proto.runtime_pb2 import PushTaskOutputRequest

        status = SubStatus.FAILED if error else SubStatus.COMPLETED
        with self._runtime(token) as runtime:
            self._call(
                runtime.PushTaskOutput, PushTaskOutputRequest(sub_status=status, details=error)
            )

    def _beat(self, token: str, ended: threading.Event) -> None:
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        with self._runtime(token) as runtime:
            while not ended.wait(BEAT):
                with contextlib.suppress(HubLost, ControlRefused):  # the grid's calls raise it too
                    self._call(runtime.SendTaskHeartbeat, SendTaskHeartbeatRequest())

    # -------------------------------------------------------------- calls

    @contextlib.contextmanager
    def _control(self) -> Iterator[Any]:
        from flwr.supercore.control.control_http_client import ControlHttpClient

        client = ControlHttpClient("http://hub", interceptors=[_versions("flwr CLI")])
        with self._over_socket(client):
            yield client

    @contextlib.contextmanager
    def _runtime(self, token: str | None = None) -> Iterator[Any]:
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        signed = [] if token is None else [RuntimeTokenHttpInterceptor(token)]
        client = RuntimeHttpClient(
            "http://hub", interceptors=[_versions("flwr-serverapp"), *signed]
        )
        with self._over_socket(client):
            yield client

    @contextlib.contextmanager
    def _over_socket(self, client: Any) -> Iterator[None]:
        import httpx

        if not is_listening(self.path):
            raise self._lost()
        client._client.close()
        client._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.path)), timeout=SECONDS, trust_env=False
        )
        try:
            yield
        finally:
            client.close()

    def _call(self, call: Callable[[Any], T], request: Any) -> T:
        """One call, whose errors become `HubLost` or `ControlRefused`."""
        import httpx

        for left in reversed(range(TRIES)):
            try:
                return call(request)
            except httpx.HTTPStatusError as error:
                code = error.response.status_code
                if code < 500 or not left:
                    raise _refusal(code, error.response.text) from error
            except httpx.TimeoutException as error:
                if not left:
                    raise HubLost(f"The hub has not answered for {SECONDS:g} s.") from error
            except httpx.TransportError as error:
                raise self._lost() from error
            time.sleep(1.0)
        raise AssertionError

    def _lost(self) -> HubLost:
        start = f"botorch-fed hub start {self.path.parent}"
        return HubLost(f"The hub does not answer. Start it: {start}")


class _Guarded:
    """The calls of a client, each through `_call`."""

    def __init__(self, client: Any, call: Callable[[Callable[[Any], Any], Any], Any]) -> None:
        self._client, self._call = client, call

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, getattr(self._client, name))


def _refusal(code: int, text: str) -> FederatedError:
    from flwr.supercore.error import FlowerError

    parsed = FlowerError.from_json(text)
    reason = parsed.message if parsed is not None else text.strip()[:200]
    if code in (401, 403):  # of a run whose task the server has dropped
        return HubLost(f"The hub has dropped this run ({reason}): continue with --resume.")
    return ControlRefused(f"Flower refuses the call with status {code}: {reason}")


def _versions(name: str) -> Any:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    return RuntimeVersionHttpInterceptor(component_name=name)


def _bundle() -> bytes:
    """The bundle's bytes, the same in every call."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pyproject.toml"), BUNDLE)
    return buffer.getvalue()


__all__ = ["Control", "ControlRefused", "HubLost"]
