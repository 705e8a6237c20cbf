"""The hub's process: Flower's server behind two doors, and nothing that runs an app.

::

    the private door   a Unix socket in the hub's folder (0600 in 0700). Flower's whole interface is
                       there: control, runtime, fleet. Whoever opens it is the hub's user
    the public door    TLS 1.3 on a port. A connection is refused unless it shows a certificate of
                       the roster; then it may make the fleet calls of CALLS, and no other, under
                       the key of that certificate

The roster is what ``botorch-fed hub admit`` has written to ``hub.json``. It is read anew when the
file has changed: who was dismissed is refused in the next request. No executor is started, so that
an app that somebody submits is kept and never run.

What a site sends is kept in Flower's database, and no more of it than its study needs: with every
request ``hub run`` adds the bytes of the longest reply to ``allowed.json``; this process counts
what came in ``kept.json``, and refuses what is beyond. Both count from the folder's making on.

This file imports nothing but Flower, its libraries and Python's own: it runs by its path.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from cryptography.x509 import load_pem_x509_certificate
from flwr.common.constant import TRANSPORT_TYPE_GRPC_RERE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from uvicorn._types import (
        ASGI3Application,
        ASGIReceiveCallable,
        ASGIReceiveEvent,
        ASGISendCallable,
        Scope,
    )

logger = logging.getLogger("botorch_fed.hub")

CALLS = frozenset(
    f"/v1/fleet/{call}"
    for call in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
STORED = frozenset(f"/v1/fleet/{call}" for call in ("push-messages", "push-object"))
CALL_BYTES = 4096  # that a call may leave in the database beside its body
KEY_HEADER = FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode()
MOST = 2**25  # bytes of a call that leaves something
SHORT = 2**16  # of any other
WAIT = 5.0  # seconds for requests under way when the hub stops


# ------------------------------------------------------------------ who may come in


class Roster:
    """The certificates of the sites, as ``hub.json`` has them now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, int] | None = None
        self._context: ssl.SSLContext | None = None
        self._sites: dict[bytes, tuple[str, bytes]] = {}

    @property
    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        self._read()
        assert self._context is not None
        return self._context

    def site(self, digest: bytes | None) -> tuple[str, bytes] | None:
        """The name of the holder of a certificate, and what Flower calls it: its public key.

        None if it is not admitted.
        """
        self._read()
        return None if digest is None else self._sites.get(digest)

    def _read(self) -> None:
        found = (self._folder / "hub.json").stat()
        seen = (found.st_ino, found.st_mtime_ns)
        if seen == self._seen:
            return
        settings = json.loads((self._folder / "hub.json").read_text())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0  # nobody comes back without showing a certificate
        context.load_cert_chain(self._folder / "server.crt", self._folder / "server.key")
        context.verify_mode = ssl.CERT_REQUIRED
        sites: dict[bytes, tuple[str, bytes]] = {}
        for name, text in settings["certificates"].items():
            context.load_verify_locations(cadata=text)
            held: Any = load_pem_x509_certificate(text.encode()).public_key()
            digest = sha256(ssl.PEM_cert_to_DER_cert(text)).digest()
            sites[digest] = name, base64.b64encode(public_key_to_bytes(held))
        self._context, self._sites, self._seen = context, sites, seen


class Allowance:
    """How many bytes each site may still leave at the hub.

    Args:
        folder: The hub's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[str, int] = self._read("kept.json")
        self._told: set[str] = set()

    def take(self, site: str, size: int) -> str:
        """Count what a site sends; why it is refused, or nothing."""
        allowed = self._read("allowed.json").get(site, 0)
        kept = self._kept.get(site, 0) + size
        if kept > allowed:
            why = (
                f"Site {site!r} would have {kept:,} bytes at this hub, its requests allow "
                f"{allowed:,}."
            )
            if site not in self._told:
                self._told.add(site)
                logger.warning("%s What it sends beyond is refused.", why)
            return why
        self._kept[site] = kept
        self._told.discard(site)
        new = self._folder / "kept.json.new"
        new.write_text(json.dumps(self._kept))
        new.replace(self._folder / "kept.json")
        return ""

    def _read(self, name: str) -> dict[str, int]:
        path = self._folder / name
        found: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        return found


class _Current(ssl.SSLContext):
    """Hands every new connection to the roster's context of that moment."""

    roster: Roster

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self.roster.context.wrap_bio(*arguments, **options)


class _Protocol(H11Protocol):
    """Notes which certificate a connection has shown."""

    def connection_made(self, transport: Any) -> None:
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        digest = sha256(shown).digest() if shown else None
        self.app_state = {**self.app_state, "certificate": digest}
        super().connection_made(transport)


@dataclass(frozen=True)
class Gate:
    """Passes the calls of `CALLS` by holders of admitted certificates, and nothing else."""

    app: "ASGI3Application"
    roster: Roster
    allowance: Allowance

    async def __call__(
        self, scope: "Scope", receive: "ASGIReceiveCallable", send: "ASGISendCallable"
    ) -> None:
        if scope["type"] != "http":
            return
        site = self.roster.site(scope["state"].get("certificate"))
        headers = scope["headers"]
        claimed = [value for name, value in headers if name == KEY_HEADER]
        if site is None or claimed != [site[1]]:
            await _refuse(send, 401, b"This key is not admitted.")
        elif scope["method"] != "POST" or scope["path"] not in CALLS:
            await _refuse(send, 404, b"No such call.")
        elif _announced(headers) > (MOST if scope["path"] in STORED else SHORT):
            await _refuse(send, 413, b"Too long.")
        elif scope["path"] in STORED and (
            why := self.allowance.take(site[0], _announced(headers) + CALL_BYTES)
        ):
            await _discard(_bounded(receive, _announced(headers)))
            await _refuse(send, 413, why.encode())
        else:
            await self.app(scope, _bounded(receive, _announced(headers)), send)


def _announced(headers: Any) -> int:
    """The length of the body: every call of a node announces it."""
    lengths = [value for name, value in headers if name == b"content-length"]
    return int(lengths[0]) if len(lengths) == 1 and lengths[0].isdigit() else MOST + 1


def _bounded(receive: "ASGIReceiveCallable", left: int) -> "ASGIReceiveCallable":
    """A body of so many bytes at most."""

    async def bounded() -> "ASGIReceiveEvent":
        nonlocal left
        event = await receive()
        if event["type"] == "http.request":
            left -= len(event["body"])
            if left < 0:
                raise ValueError("A request is longer than it has said.")
        return event

    return bounded


async def _discard(receive: "ASGIReceiveCallable") -> None:
    """Read a body to its end: a client that is still sending may not see the answer."""
    while True:
        event = await receive()
        if event["type"] != "http.request" or not event["more_body"]:
            return


async def _refuse(send: "ASGISendCallable", status: int, words: bytes) -> None:
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(words)).encode()),
        (b"connection", b"close"),
    ]
    await send(
        {"type": "http.response.start", "status": status, "headers": headers, "trailers": False}
    )
    await send({"type": "http.response.body", "body": words, "more_body": False})


# ------------------------------------------------------------------ the two doors


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `serve` takes them, for both


def _app(folder: Path) -> "ASGI3Application":
    """Flower's server; with isolation "process" it starts no process of its own."""
    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host="",
        port=0,
        insecure=False,
        certificates=None,
        superexec_auth_secret=None,
        authn_plugin=NoOpControlAuthnPlugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        database=str(folder / "flower.db"),
        isolation="process",
        runtime_dependency_install=False,
    )
    made: Any = create_app(config, SuperLinkLifespan)
    return cast("ASGI3Application", made)


async def serve(folder: Path, host: str, port: int) -> None:
    """Until a signal to stop."""
    app = _app(folder)
    common: dict[str, Any] = {
        "ws": "none",
        "proxy_headers": False,
        "server_header": False,
        "access_log": False,
        "log_level": "warning",
        "timeout_graceful_shutdown": int(WAIT),
        "timeout_keep_alive": 60,
    }
    private = _Server(uvicorn.Config(app, lifespan="on", **common))
    roster = Roster(folder)
    gate = Gate(app, roster, Allowance(folder))
    public = _Server(uvicorn.Config(gate, lifespan="off", http=_Protocol, **common))
    public.config.load()
    current = _Current(ssl.PROTOCOL_TLS_SERVER)
    current.roster = roster
    _ = roster.context  # what is wrong with the folder is said at once
    public.config.ssl = current
    servers = (private, public)

    def stop() -> None:
        for server in servers:
            server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    door = folder / "control"
    with _listening(door) as inner, _port(host, port) as outer:
        logger.info("Sites reach port %d of %s. %s is its user's alone.", port, host, door)
        tasks = [
            asyncio.create_task(private.serve([inner])),
            asyncio.create_task(public.serve([outer])),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        stop()
        await asyncio.gather(*tasks)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A Unix socket that its user alone can open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        path.unlink(missing_ok=True)
        made.bind(str(path))
        path.chmod(0o600)
        try:
            yield made
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _port(host: str, port: int) -> Iterator[socket.socket]:
    family, kind, number, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, number) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        yield made


def main() -> int:
    """Serve a hub's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    given = parser.parse_args()
    os.umask(0o077)
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("hub: %(message)s"))
    logger.addHandler(shown)
    logger.setLevel(logging.INFO)
    asyncio.run(serve(given.folder, given.host, given.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
