"""Who reaches the hub's port, and who runs the hub, against sites and hubs that are deployed."""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import serialization as forms
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from botorch_fed.deploy import Hub, SiteFolder, free_port
from botorch_fed.engines import flower_control
from test.attacks import outside
from test.test_deploy import FTS, PROGRAM, SITES, Machines, _descendants, same_points, write_study

HERE = Path(__file__).parent
CALLS = ("activate-node", "pull-messages", "push-messages", "push-object", "pull-object")


@contextlib.contextmanager
def running(*command: str, log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process, and all that it has started, for as long as the body takes."""
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, **options)
    try:
        yield process
    finally:
        for pid in [process.pid, *_descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()


def until(ready: Callable[[], Any], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not ready in time"
        time.sleep(0.5)


def doors(pids: list[int]) -> list[tuple[str, int]]:
    """Every TCP or UDP socket of some processes that waits for anybody: address and port."""
    found = set()
    for pid in pids:
        held = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                held.add(os.readlink(path))
        for kind in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                words = line.split()
                waits = words[3] == "0A" if kind.startswith("tcp") else words[3] == "07"
                if waits and f"socket:[{words[9]}]" in held:
                    address, _, port = words[1].partition(":")
                    found.add((address, int(port, 16)))
    return sorted(found)


# ------------------------------------------------------------------ the two doors of a hub


class Doors:
    """A hub's process with two sites admitted, and connections to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = Hub.create(folder / "hub", "localhost", free_port())
        self.sites = [SiteFolder.create(folder / name) for name in ("north", "south", "stranger")]

    @property
    def north(self) -> SiteFolder:
        return self.sites[0]

    def connect(
        self, site: SiteFolder | None, *, certificate: Path | None = None, key: Path | None = None
    ) -> http.client.HTTPSConnection:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cafile=str(self.hub.folder / "ca.crt"))
        if site is not None:
            context.load_cert_chain(
                certificate or site.folder / "node.pub", key or site.folder / "node"
            )
        port = self.hub.settings["port"]
        return http.client.HTTPSConnection("localhost", port, timeout=20, context=context)

    def public(self, site: SiteFolder) -> bytes:
        held = x509.load_pem_x509_certificate((site.folder / "node.pub").read_bytes())
        pem = (forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
        return held.public_key().public_bytes(*pem)

    def claim(self, site: SiteFolder) -> str:
        """What a site calls itself."""
        return base64.b64encode(self.public(site)).decode()

    def call(
        self,
        connection: http.client.HTTPSConnection,
        path: str,
        claimed: SiteFolder | None,
        *,
        method: str = "POST",
        body: bytes = b"",
        **headers: str,
    ) -> int:
        if claimed is not None:
            headers["flwr-public-key"] = self.claim(claimed)
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


@pytest.fixture(scope="module")
def opened() -> Iterator[Doors]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # others reach it: what is in it has to be closed
        yield from _opened(Doors(Path(folder)))


def _opened(made: Doors) -> Iterator[Doors]:
    log = made.folder / "hub.log"
    with running(PROGRAM, "hub", "start", str(made.hub.folder), log=log) as process:
        until(lambda: flower_control.is_listening(made.hub.folder / "control"))
        for site in made.sites[:2]:
            made.hub.admit(site.folder.name, site.folder / "node.pub")
        made.process = process  # type: ignore[attr-defined]
        yield made


@pytest.mark.slow
def test_a_hub_opens_one_port_and_a_private_socket(opened: Doors) -> None:
    process = opened.process  # type: ignore[attr-defined]
    assert _descendants(process.pid) == []  # no executor
    (door,) = doors([process.pid])
    assert door == ("0100007F", opened.hub.settings["port"])
    for path in (opened.hub.folder, *opened.hub.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert (opened.hub.folder / "control").is_socket()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="becomes another user")
def test_other_users_of_the_hubs_machine_do_not_open_the_private_door(opened: Doors) -> None:
    door = str(opened.hub.folder / "control")
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(door)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            assert os.path.isdir(opened.folder)  # it reaches the folder around
            with socket.socket(socket.AF_UNIX) as other:
                other.connect(door)
        except PermissionError:
            code = 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.slow
def test_without_an_admitted_certificate_no_byte_is_answered(opened: Doors) -> None:
    north, stranger = opened.north, opened.sites[2]
    mixed = opened.folder / "mixed.pem"  # a stranger who hands out north's public certificate too
    mixed.write_text(
        (stranger.folder / "node.pub").read_text() + (north.folder / "node.pub").read_text()
    )
    for connection in (
        opened.connect(None),
        opened.connect(stranger),
        opened.connect(stranger, certificate=mixed),
    ):
        with contextlib.closing(connection), pytest.raises((OSError, http.client.HTTPException)):
            opened.call(connection, "/health", north, method="GET")
    with pytest.raises(ssl.SSLError):  # north's certificate needs north's key
        opened.connect(stranger, certificate=north.folder / "node.pub")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=str(opened.hub.folder / "ca.crt"))
    context.load_cert_chain(north.folder / "node.pub", north.folder / "node")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    address = ("localhost", opened.hub.settings["port"])
    with socket.create_connection(address, 20) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="localhost")


@pytest.mark.slow
def test_an_admitted_site_speaks_for_itself_alone(opened: Doors) -> None:
    north, south = opened.sites[:2]
    body = ActivateNodeRequest(
        public_key=opened.public(south), heartbeat_interval=30.0
    ).SerializeToString()
    for claimed in (None, south, opened.sites[2]):
        for call in CALLS:
            with contextlib.closing(opened.connect(north)) as connection:
                path = f"/v1/fleet/{call}"
                assert opened.call(connection, path, claimed, body=body) == 401
    with contextlib.closing(opened.connect(north)) as connection:  # passed on, and Flower asks more
        kind = {"content-type": "application/protobuf"}
        found = opened.call(connection, "/v1/fleet/activate-node", north, body=body, **kind)
        assert found in (401, 415, 422)


@pytest.mark.slow
def test_an_admitted_site_controls_nothing(opened: Doors) -> None:
    allowed = {f"/v1/fleet/{call}" for call in CALLS}
    allowed |= {f"/v1/fleet/{call}" for call in ("deactivate-node", "send-node-heartbeat")}
    allowed |= {"/v1/fleet/confirm-message-received"}
    paths = [path for method, path in outside._routes() if path not in allowed]
    assert "/v1/control/start-run" in paths
    assert "/v1/fleet/get-fab" in paths
    assert "/v1/fleet/register-node" in paths
    assert "/v1/runtime/acquire-task" in paths
    paths += [
        "/v1/fleet/../control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "//v1/control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/pull-messages;/v1/control/start-run",
        "/V1/CONTROL/START-RUN",
    ]
    for path in paths:
        for method in ("POST", "GET"):
            with contextlib.closing(opened.connect(opened.north)) as connection:
                assert opened.call(connection, path, opened.north, method=method) == 404, path
    for path in allowed:
        with contextlib.closing(opened.connect(opened.north)) as connection:
            assert opened.call(connection, path, opened.north, method="GET") == 404


@pytest.mark.slow
def test_a_request_has_a_size_and_says_it(opened: Doors) -> None:
    for call, headers in (
        ("push-object", {"content-length": str(2**30)}),
        ("push-object", {"transfer-encoding": "chunked"}),
        ("pull-messages", {"content-length": str(2**17)}),
    ):
        with contextlib.closing(opened.connect(opened.north)) as connection:
            connection.putrequest("POST", f"/v1/fleet/{call}")
            connection.putheader("flwr-public-key", opened.claim(opened.north))
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            assert connection.getresponse().status == 413


@pytest.mark.slow
def test_a_site_leaves_no_more_at_the_hub_than_its_requests_allow(opened: Doors) -> None:
    north, south = opened.sites[:2]
    kind = {"content-type": "application/protobuf"}

    def push(site: SiteFolder, size: int, call: str = "push-object") -> tuple[int, str]:
        with contextlib.closing(opened.connect(site)) as connection:
            headers = {**kind, "flwr-public-key": opened.claim(site)}
            connection.request("POST", f"/v1/fleet/{call}", body=bytes(size), headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    status, said = push(north, 10)  # nobody has asked it for anything
    assert status == 413
    assert "Site 'north' would have 4,106 bytes at this hub, its requests allow 0" in said
    opened.hub.allow({"north": 200_000})
    sent = [push(north, 50_000, call)[0] for call in ("push-object", "push-messages") * 3]
    assert sent[:4] == [sent[0], sent[1]] * 2  # Flower's own answers
    assert 413 not in sent[:4]
    assert sent[5:] == [413]
    assert push(north, 3_000_000)[0] == 413  # read to its end, or it could not see the answer
    kept = json.loads((opened.hub.folder / "kept.json").read_text())
    allowed = json.loads((opened.hub.folder / "allowed.json").read_text())
    assert 200_000 <= kept["north"] <= allowed["north"]
    assert push(south, 10)[0] == 413  # what one is allowed is not another's
    assert "south" not in kept
    for name in ("kept.json", "allowed.json"):
        assert stat.S_IMODE((opened.hub.folder / name).stat().st_mode) == 0o600


@pytest.mark.slow
def test_an_app_that_somebody_submits_is_not_run_at_the_hub(opened: Doors) -> None:
    """Its task is given up by the next run, which goes on as ever."""
    control = opened.hub.control
    app = outside.write_app(opened.folder / "app")
    marker = opened.folder / "marker"
    environment = outside.flwr_environment(opened.folder / "home", "none:1", Path("ca.crt"))
    words = [str(outside.PROGRAMS / "flwr"), "build", "--app", str(app)]
    subprocess.run(words, cwd=opened.folder, env=environment, check=True, capture_output=True)
    (bundle,) = opened.folder.glob("*.fab")
    with control._control() as client:
        request = StartRunRequest(fab=Fab(content=bundle.read_bytes()))
        evil = client.StartRun(request).run_id
        assert evil
        with control.driven(control.begin()) as grid:
            assert grid.run.run_id != evil
            found = client.ListRuns(ListRunsRequest()).run_dict
            assert found[evil].status.status == "finished"
            assert found[evil].status.sub_status == "failed"
    assert not marker.exists()


@pytest.mark.slow
def test_who_is_dismissed_is_out_at_once(opened: Doors) -> None:
    south = opened.sites[1]
    with contextlib.closing(opened.connect(south)) as connection:
        assert opened.call(connection, "/v1/fleet/get-fab", south) == 404  # known, and no such call
    with contextlib.closing(opened.connect(south)) as connection:
        connection.connect()
        opened.hub.dismiss("south")
        assert opened.call(connection, "/v1/fleet/pull-messages", south) == 401
    with (
        contextlib.closing(opened.connect(south)) as connection,
        pytest.raises((OSError, http.client.HTTPException)),
    ):
        opened.call(connection, "/v1/fleet/pull-messages", south)


# ------------------------------------------------------------------ from outside


@contextlib.contextmanager
def second_network() -> Iterator[tuple[str, list[str]]]:
    """An address of this machine, and the words before a command of a namespace that sees it.

    Without the right to make one: loopback, and no words.
    """
    name = f"bf{os.getpid() % 100000}"
    near, far = f"10.213.{os.getpid() % 250}.1", f"10.213.{os.getpid() % 250}.2"
    made = [
        f"netns add {name}",
        f"link add {name}a type veth peer name {name}b netns {name}",
        f"addr add {near}/30 dev {name}a",
        f"link set {name}a up",
        f"-n {name} addr add {far}/30 dev {name}b",
        f"-n {name} link set {name}b up",
        f"-n {name} link set lo up",
    ]
    program = shutil.which("ip")
    fine = program is not None
    for words in made:
        fine = (
            fine
            and not subprocess.run(
                [str(program), *words.split()], check=False, capture_output=True
            ).returncode
        )
    try:
        yield (near, [str(program), "netns", "exec", name]) if fine else ("127.0.0.1", [])
    finally:
        if program is not None:
            for words in (f"link del {name}a", f"netns del {name}"):
                subprocess.run([program, *words.split()], check=False, capture_output=True)


def attack(before: list[str], folder: Path, *words: str) -> dict[str, list[str]]:
    """What `outside.py` finds, from a folder that has nothing but itself and ca.crt."""
    shutil.copy(HERE / "outside.py", folder / "outside.py")
    said = subprocess.run(
        [*before, sys.executable, "-P", "outside.py", "--ca", "ca.crt", *words],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    found: dict[str, list[str]] = json.loads(said.stdout[said.stdout.index("{") :])
    return found


def test_the_attack_comes_from_a_network_of_its_own() -> None:
    """Skipped where the test below attacks over loopback, from the hub's own network."""
    looks = (
        "import socket, sys\n"
        "for host in sys.argv[1:3]:\n"
        "    with socket.socket() as tried:\n"
        "        tried.settimeout(5)\n"
        "        print(tried.connect_ex((host, int(sys.argv[3]))))\n"
    )
    with second_network() as (host, before):
        if not before:
            pytest.skip("no right to make a network namespace: the attack is made over loopback")
        with socket.socket() as door:
            door.bind(("", 0))
            door.listen()
            port = str(door.getsockname()[1])
            words = [*before, sys.executable, "-c", looks, host, "127.0.0.1", port]
            said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    near, own = map(int, said.split())
    assert near == 0  # it reaches the address that the hub is bound to
    assert own == errno.ECONNREFUSED  # its loopback is not the hub's


@pytest.mark.nightly
def test_who_reaches_the_port_runs_reads_and_stops_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with second_network() as (host, before):
        record_property("network", "a namespace of its own" if before else "loopback")
        machines = Machines(tmp_path, host)
        thief = tmp_path / "thief"
        thief.mkdir()
        marker = thief / "marker"
        try:
            machines.start_hub()
            for name in SITES:
                machines.hub.admit(name, SiteFolder.create(tmp_path / name).folder / "node.pub")
            study = write_study(tmp_path, FTS.format(budget=12))
            machines.environment["SECONDS_EACH"] = "6"  # so that the attack meets a run under way
            for name in SITES:
                machines.start_site(name, study)
            machines.wait_online()
            out = tmp_path / "out"
            run = machines.run(study, out, "--deadline", "300")
            machines.wait(lambda: machines.rounds(out) >= 1)
            pids = [process.pid for process in (*machines.processes.values(), run)]
            pids += [child for pid in pids for child in _descendants(pid)]
            open_ = doors(pids)
            assert [port for _, port in open_] == [machines.port]  # and none at a site
            shutil.copy(machines.hub.folder / "ca.crt", thief / "ca.crt")
            nodes = [str(node) for node in machines.hub.settings["sites"].values()]
            with machines.hub.control._control() as client:
                runs = [str(number) for number in client.ListRuns(ListRunsRequest()).run_dict]
            found = attack(
                before,
                thief,
                *("--host", host, "--ports", *(str(port) for _, port in open_)),
                *("--marker", str(marker), "--nodes", *nodes, "--runs", *runs),
            )
            assert found["through"] == []
            assert len(found["tried"]) > 4 * 80 + 3 * 50 + 7
            assert not marker.exists()
            assert set(machines.hub.sites().values()) == {"online"}
            with machines.hub.control._control() as client:
                assert [str(n) for n in client.ListRuns(ListRunsRequest()).run_dict] == runs
            machines.finish(run)
            rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
            assert all(row["replied"] for row in rows)  # no round lost a site
            for name in SITES:
                machines.stop(name)
            same_points(machines, study)
        finally:
            for name in list(machines.processes):
                machines.kill(name)


def said(environment: dict[str, str], *words: str) -> dict[str, Any]:
    """What a command of Flower's answers."""
    fine, text = outside.flwr(environment, *words)
    assert fine, text
    answer: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return answer


def stock(folder: Path, hub: Hub, port: int) -> list[str]:
    """Flower's own server as its documentation has it, with this hub's certificates."""
    return [
        str(outside.PROGRAMS / "flower-superlink"),
        *("--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"),
        *("--ssl-ca-certfile", str(hub.folder / "ca.crt")),
        *("--ssl-certfile", str(hub.folder / "server.crt")),
        *("--ssl-keyfile", str(hub.folder / "server.key")),
        *("--database", str(folder / "stock.db")),
    ]


@pytest.mark.nightly
def test_the_attack_gets_through_to_a_server_without_the_two_doors(tmp_path: Path) -> None:
    """So that the test above finds nothing for the right reason."""
    port = free_port()
    hub = Hub.create(tmp_path / "hub", "localhost", port)
    thief = tmp_path / "thief"
    thief.mkdir()
    shutil.copy(hub.folder / "ca.crt", thief / "ca.crt")
    home = tmp_path / "home"
    environment = outside.flwr_environment(home, f"127.0.0.1:{port}", hub.folder / "ca.crt")
    marker = thief / "marker"
    with running(*stock(tmp_path, hub, port), log=tmp_path / "log", env=environment):
        until(lambda: outside.flwr(environment, "list", "it")[0])
        # What is there before: a site of the operator's, and a run.
        _, _, public = outside._identity(tmp_path)
        app = outside.write_app(tmp_path / "app")
        pairs = f"marker={json.dumps(str(tmp_path / 'earlier'))} seconds=120.0"
        made = [
            said(environment, "supernode", "register", str(public), "it")["node-id"],
            said(environment, "run", str(app), "it", "-c", pairs)["run-id"],
        ]
        node, run = map(str, made)
        until((tmp_path / "earlier").exists)
        found = attack(
            [],
            thief,
            *("--host", "127.0.0.1", "--ports", str(port), "--marker", str(marker)),
            *("--nodes", node, "--runs", run),
        )
        wanted = ("flwr run", "flwr list", "flwr supernode list", "https GET /openapi.json")
        for what in (*wanted, "flwr supernode unregister", f"flwr stop {run}"):
            assert any(what in each for each in found["through"]), (what, found["through"])
        until(marker.exists)
        assert marker.read_text() == "hub\n"


@pytest.mark.nightly
def test_who_runs_the_hub_runs_no_app_at_a_site(tmp_path: Path) -> None:
    """The operator puts Flower's own server in the hub's place, and submits an app of another."""
    port = free_port()
    hub = Hub.create(tmp_path / "hub", "localhost", port)
    study = write_study(tmp_path, FTS.format(budget=2))
    site = SiteFolder.create(tmp_path / "north")
    held = x509.load_pem_x509_certificate((site.folder / "node.pub").read_bytes()).public_key()
    public = (forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    (tmp_path / "ssh.pub").write_bytes(held.public_bytes(*public) + b"\n")
    app = outside.write_app(tmp_path / "app")
    marker = tmp_path / "marker"
    address = f"127.0.0.1:{port}"
    environment = outside.flwr_environment(tmp_path / "home", address, hub.folder / "ca.crt")

    def submit() -> list[list[str]]:
        """The app's run, to its end; the replies that it has got."""
        replies = Path(f"{marker}.replies")
        replies.unlink(missing_ok=True)
        pairs = f"marker={json.dumps(str(marker))} seconds=90.0"
        assert outside.flwr(environment, "run", str(app), "it", "-c", pairs)[0]

        def told() -> int:
            return len(replies.read_text().splitlines()) if replies.exists() else 0

        until(lambda: told() >= 5, 150)
        return [json.loads(line) for line in replies.read_text().splitlines()]

    with running(*stock(tmp_path, hub, port), log=tmp_path / "hub.log", env=environment):
        until(lambda: outside.flwr(environment, "list", "it")[0])
        assert outside.flwr(environment, "supernode", "register", str(tmp_path / "ssh.pub"), "it")[
            0
        ]
        words = ("--name", "north", "--hub", address, "--ca", str(hub.folder / "ca.crt"))
        with running(
            *(PROGRAM, "site", "start", str(site.folder), str(study.path), *words),
            log=tmp_path / "north.log",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process:
            until(lambda: '"online"' in outside.flwr(environment, "supernode", "list", "it")[1])
            assert doors([process.pid, *_descendants(process.pid)]) == []
            replies = submit()
            assert marker.read_text() == "hub\n"  # at the operator's own machine, and nowhere else
            refused = 'A site answers "query.respond" and nothing else.'
            kinds = {kind for kind, words in replies if words == refused}
            assert kinds == {"query.evil", "query", "train", "evaluate"}
            for name in ("north/flower/apps", "north/flower/fab"):
                assert not (tmp_path / name).exists()
            assert not list(site.folder.rglob("evil*"))
            assert process.poll() is None
        # Flower's own node, with a key that the operator admits, does run it.
        _, _, ssh = outside._identity(tmp_path)
        assert outside.flwr(environment, "supernode", "register", str(ssh), "it")[0]
        own = ("--auth-supernode-private-key", str(tmp_path / "openssh"))
        with running(
            *(str(outside.PROGRAMS / "flower-supernode"), "--superlink", address, *own),
            *("--root-certificates", str(hub.folder / "ca.crt")),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            log=tmp_path / "stock.log",
            env=environment,
        ):
            until(lambda: '"online"' in outside.flwr(environment, "supernode", "list", "it")[1])
            pairs = f"marker={json.dumps(str(marker))} seconds=90.0"
            assert outside.flwr(environment, "run", str(app), "it", "-c", pairs)[0]
            until(lambda: "node" in marker.read_text(), 150)
