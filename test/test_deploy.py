"""Hubs and sites: folders, keys, and real Flower on loopback with TLS and authentication."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

import contextlib

from botorch_fed import deploy, run
from botorch_fed.cli import main
from botorch_fed.deploy import APP, DeployError, Hub, SiteFolder, free_port, make_keys
from botorch_fed.engines.inprocess import InProcess, refusal_code
from botorch_fed.engines.site_process import SiteProcess, is_listening, receive, send
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.base import Exchanged, Outgoing
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.trial import Trial
from botorch_fed.privacy import Budget
from botorch_fed.privacy.channels import IDENTITY, check_identities
from botorch_fed.report import write_report
from botorch_fed.run import RunResult, host
from botorch_fed.storage.store import FileStore
from botorch_fed.study import StudyError, StudyFile, read_study, run_study
from botorch_fed.watch import look
from test.test_docs import _blocks

ROOT = Path(__file__).parent.parent
SITES = ("north", "south", "west")
PROGRAM = str(Path(sys.executable).parent / "botorch-fed")
OBJECTIVE = """
import os, time

def score(agent, x, y):
    with open(os.environ.get("CALLS", os.devnull).replace("*", agent), "a") as file:
        file.write(f"{x!r} {y!r}\\n")
    time.sleep(float(os.environ.get("SECONDS_EACH", "0")))
    best = {"north": 0.2, "south": 0.3, "west": 0.25}[agent]
    return 1 - (x - best) ** 2 - (y - 0.6) ** 2
"""
FTS = """
objective = "tuning:score"
agents = ["north", "south", "west"]
budget = {budget}
seed = 3
[space]
x = {{ type = "real", lower = 0, upper = 1 }}
y = {{ type = "real", lower = 0, upper = 1 }}
[outcome]
centre = 0.5
scale = 0.5
[protocol]
name = "fts"
"""
FED_GP = """
objective = "tuning:score"
agents = ["north", "south", "west"]
budget = 4
seed = 4
channel = "{channel}"
[space]
x = {{ type = "real", lower = 0, upper = 1 }}
y = {{ type = "real", lower = 0, upper = 1 }}
[protocol]
name = "fed-gp"
num_initial = 2
"""


def write_study(folder: Path, text: str, name: str = "study.toml") -> StudyFile:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tuning.py").write_text(OBJECTIVE)
    (folder / name).write_text(text)
    return read_study(folder / name)


# ------------------------------------------------------------------ folders


def test_a_hub_has_certificates_and_nobody_else_can_read_its_key(tmp_path: Path) -> None:
    hub = Hub.create(tmp_path / "hub", "hub.example", 8123)
    for name in ("server.key", "hub.json", "ca.crt", "server.crt"):
        assert stat.S_IMODE((hub.folder / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(hub.folder.stat().st_mode) == 0o700
    context = ssl.create_default_context(cafile=str(hub.folder / "ca.crt"))
    context.load_cert_chain(hub.folder / "server.crt", hub.folder / "server.key")
    assert not list(hub.folder.glob("ca.key"))  # nobody can make another certificate
    names = subprocess.run(
        ["openssl", "x509", "-in", hub.folder / "server.crt", "-noout", "-ext", "subjectAltName"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "DNS:hub.example" in names
    assert "DNS:localhost" in names


def test_folders_are_made_once(tmp_path: Path) -> None:
    Hub.create(tmp_path / "hub", "10.0.0.1")
    with pytest.raises(DeployError, match="not empty"):
        Hub.create(tmp_path / "hub", "10.0.0.1")
    with pytest.raises(DeployError, match="not empty"):
        SiteFolder.create(tmp_path / "hub")


def test_a_site_has_a_key_of_its_own(tmp_path: Path) -> None:
    site = SiteFolder.create(tmp_path / "site")
    for name in ("node", "node.pub"):
        assert stat.S_IMODE((site.folder / name).stat().st_mode) == 0o600
    assert (site.folder / "node.pub").read_text().startswith("-----BEGIN CERTIFICATE-----")
    other = SiteFolder.create(tmp_path / "other")
    assert (site.folder / "node").read_text() != (other.folder / "node").read_text()


def test_only_a_nodes_own_certificate_is_admitted(tmp_path: Path) -> None:
    """No key of an earlier version, no certificate of an authority, nobody's signature."""
    hub = Hub.create(tmp_path / "hub", "localhost")
    site = SiteFolder.create(tmp_path / "site")
    (tmp_path / "old.pub").write_text("ecdsa-sha2-nistp384 AAAA\n")
    (tmp_path / "torn.pub").write_text((site.folder / "node.pub").read_text()[:300])
    for path in (
        tmp_path / "old.pub",
        tmp_path / "torn.pub",
        site.folder / "node",
        hub.folder / "server.crt",
        hub.folder / "ca.crt",
    ):
        with pytest.raises(DeployError, match=r"Expected the node.pub of `botorch-fed site init`"):
            hub.admit("north", path)
    assert hub.settings["sites"] == hub.settings["certificates"] == {}


def test_the_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    hub = Hub.create(tmp_path / "hub", "localhost")
    settings = hub.settings
    del settings["certificates"]
    (hub.folder / "hub.json").write_text(json.dumps(settings))
    with pytest.raises(DeployError, match="of an earlier version"):
        hub.start()


def test_commands_open_one_port_and_run_no_app(tmp_path: Path) -> None:
    """What the processes are started with; `test/attacks` looks at what they then open."""
    hub = Hub.create(tmp_path / "hub", "localhost", 8123)
    command = hub.command("0.0.0.0")
    assert command[:2] == [sys.executable, "-P"]
    assert Path(command[2]) == APP / "hub.py"
    assert command[3:] == [str(hub.folder), "--host", "0.0.0.0", "--port", "8123"]
    site = SiteFolder.create(tmp_path / "site")
    command = site.command("hub.example:8123", "ca.crt")
    assert command[:2] == [sys.executable, "-P"]
    assert Path(command[2]) == APP / "node.py"
    words = ["--hub", "--ca", "--key", "--certificate", "--socket"]
    assert [word for word in command if word.startswith("--")] == words
    for name in ("hub.py", "node.py"):  # neither has an option that opens another door
        said = subprocess.run(
            [sys.executable, "-P", str(APP / name), "--help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        options = {word.strip("[],") for word in said.split() if word.strip("[],").startswith("--")}
        allowed = {"--help", "--host", "--port"} if name == "hub.py" else {"--help", *words}
        assert options == allowed


def test_settings_of_flower_do_not_get_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as those that open its older interfaces on ports of their own."""
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setenv("FLWR_HOME", "/elsewhere")
    found = deploy._environment(tmp_path)
    assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in found
    assert found["FLWR_HOME"] == str(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"


def test_no_link_is_followed(tmp_path: Path) -> None:
    """Somebody who can write into a folder makes nobody overwrite a file of another one."""
    hub = Hub.create(tmp_path / "hub", "localhost")
    site = SiteFolder.create(tmp_path / "site")
    study = write_study(tmp_path, FTS.format(budget=2))
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for link in ("lock", "start.lock", "hub.json.draft"):
        (hub.folder / link).symlink_to(precious)
    with pytest.raises(ProtocolError, match="lock, got a symbolic link"):
        hub.admit("north", site.folder / "node.pub")
    with pytest.raises(ProtocolError, match="lock, got a symbolic link"):
        hub.start()
    deploy._write_private(hub.folder / "hub.json", json.dumps(hub.settings))
    (site.folder / "site.json.draft").symlink_to(precious)
    with site._remembered(study, "north"):
        pass
    (site.folder / "lock").symlink_to(precious)
    with pytest.raises(ProtocolError, match="lock, got a symbolic link"):
        site.perform("status", {})
    result = RunResult(("a",), study.space, 0, "FTS")
    (tmp_path / "run").mkdir()
    for name in ("result.json", "arrays.npz", "records.jsonl.draft", "arrays.npz.draft"):
        (tmp_path / "run" / name).symlink_to(precious)
    result.save(tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").unlink()
    (tmp_path / "run" / "rounds.jsonl").symlink_to(precious)
    with pytest.raises(ProtocolError, match=r"rounds.jsonl, got a symbolic link"):
        run._append(tmp_path / "run" / "rounds.jsonl", [{"round": 1}])
    assert precious.read_text() == "mine"
    for path in (site.folder / "site.json", *(tmp_path / "run").glob("*.json")):
        assert not path.is_symlink()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_hub_is_started_once(tmp_path: Path) -> None:
    hub = Hub.create(tmp_path / "hub", "localhost")
    with (
        deploy._locked(hub.folder / "start.lock", "a test"),
        pytest.raises(DeployError, match="Another process runs the hub in"),
    ):
        hub.start()


def test_a_site_has_an_identity_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for all studies; the private part stays where nobody else can read."""
    keys = []
    for name in ("north", "south"):
        site = SiteFolder.create(tmp_path / name)
        assert main(["site", "identity", str(tmp_path / name)]) == 0
        keys.append(capsys.readouterr().out.strip().splitlines()[-1])
        assert keys[-1] == site.identity == SiteFolder(tmp_path / name).identity
        check_identities(((name, keys[-1]),))
        private = tmp_path / name / "identity" / IDENTITY
        assert private.stat().st_mode & 0o777 == 0o600
        assert bytes.fromhex(keys[-1]) not in private.read_bytes()
    assert keys[0] != keys[1]
    assert main(["site", "identity", str(tmp_path / "nowhere")]) == 1


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    study = write_study(tmp_path, FTS.format(budget=2))
    with pytest.raises(DeployError, match=r"no hub's folder. Make one: botorch-fed hub init"):
        Hub(tmp_path).nodes(["north"])
    hub = Hub.create(tmp_path / "hub", "localhost")
    with pytest.raises(DeployError, match=r"does not know the sites \['north'\].*hub admit"):
        hub.nodes(["north"])
    with pytest.raises(DeployError, match=r"no site's folder. Make one: botorch-fed site init"):
        SiteFolder(tmp_path / "nowhere").site(study, "north")
    site = SiteFolder.create(tmp_path / "site")
    with pytest.raises(DeployError, match="'east' is none of the study's agents"):
        site.site(study, "east")
    with pytest.raises(DeployError, match=r"get ca\.crt"):
        site.start(study, "north", hub="localhost:1", certificates=tmp_path / "ca.crt")
    with pytest.raises(DeployError, match="NAME:PORT, got 'localhost'"):
        site.start(study, "north", hub="localhost", certificates=hub.folder / "ca.crt")


def test_a_hub_that_does_not_run_says_so(tmp_path: Path) -> None:
    hub = Hub.create(tmp_path / "hub", "localhost", free_port())
    site = SiteFolder.create(tmp_path / "site")
    with pytest.raises(DeployError, match="hub start"):
        hub.admit("north", site.folder / "node.pub")
    assert hub.settings["sites"] == {}


def test_copies_of_a_study_agree_but_for_what_is_ones_own(tmp_path: Path) -> None:
    text = FTS.format(budget=2)
    study = write_study(tmp_path / "a", text)
    own = text.replace("tuning:score", "tuning:other").replace("seed = 3", 'seed = 3\nout = "x"')
    assert write_study(tmp_path / "b", own).fingerprint == study.fingerprint
    other = text.replace("scale = 0.5", "scale = 0.6")
    assert write_study(tmp_path / "c", other).fingerprint != study.fingerprint


def test_the_one_key_of_ckks_goes_to_the_sites_only(tmp_path: Path) -> None:
    study = write_study(tmp_path, FED_GP.format(channel="ckks"))
    with pytest.raises(DeployError, match="Only a study with"):
        make_keys(write_study(tmp_path, FTS.format(budget=1), "fts.toml"), tmp_path / "none")
    make_keys(study, tmp_path / "keys")
    at = {path.name: FileStore(path).names() for path in (tmp_path / "keys").iterdir()}
    assert set(at) == {"hub", *SITES}
    assert len(at["hub"]) == 1
    assert all(len(at[name]) == 2 for name in SITES)
    site = SiteFolder.create(tmp_path / "site")
    with site.site(study, "north", keys=tmp_path / "keys" / "north"):
        pass
    with site.site(study, "north"):  # it has them now
        pass
    other = SiteFolder.create(tmp_path / "other")
    with pytest.raises(Exception, match="not in this store"):
        other.site(study, "south")


DP_FTS_DE = """
objective = "tuning:score"
agents = ["north", "south", "west"]
budget = 5
seed = 4
{channel}
[space]
x = {{ type = "real", lower = 0, upper = 1 }}
y = {{ type = "real", lower = 0, upper = 1 }}
[protocol]
name = "dp-fts-de"
trust = "distributed"
min_reliability = 0.0
releases = [0, 1]
[privacy]
epsilon = 20.0
delta = 1e-3
"""


@pytest.mark.parametrize("channel", ["", 'channel = "ckks"'])
def test_noise_without_a_trusted_server_from_folders_of_their_own(
    tmp_path: Path, channel: str
) -> None:
    """Hub and sites as their machines have them; only requests, replies and broadcasts cross."""
    sys.modules.pop("tuning", None)
    study = write_study(tmp_path / "hub", DP_FTS_DE.format(channel=channel))
    if channel:
        make_keys(study, tmp_path / "keys")
        shutil.copytree(tmp_path / "keys" / "hub", tmp_path / "out" / "server" / "secrets")
        (tmp_path / "out" / "server").chmod(0o700)
    hub = study.study(out=tmp_path / "out").server(study.space, study.agents)
    with contextlib.ExitStack() as stack:
        sites = []
        for name in SITES:
            keys = tmp_path / "keys" / name if channel else None
            folder = SiteFolder.create(tmp_path / f"{name}-site")
            sites.append(stack.enter_context(folder.site(study, name, keys=keys)))
        exchange = InProcess(sites, patience=60.0)
        rounds: list[Round] = []
        end = drive(hub, exchange, run=study.fingerprint, on_round=rounds.append)
    assert not any(round_.exchanged.failures for round_ in rounds)
    assert end.sums == 2
    assert hub.price is not None
    assert hub.price.epsilon <= 20
    for site in sites:
        ledger = site.state.aggregation.ledger
        assert hub.price.spent(ledger) == hub.price.guarantee
        assert ledger.budget == Budget(20.0, 1e-3)
        assert len(site.state.X) == 5
    sys.modules.pop("tuning", None)


# ------------------------------------------------------------------ processes of sites


class Sites:
    """Sites that answer at their sockets in threads, by `SiteFolder.start`; no hub and no nodes."""

    def __init__(self, study: StudyFile, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.study, self.folder = study, folder
        self.sites = {
            name: SiteFolder.create(folder / name) for name in study.agents if name != "west"
        }
        self.started: set[str] = set()
        self._threads: list[threading.Thread] = []
        # In the place of a node: it waits, and a file ends it.
        code = (
            f"import os, time\nwhile not os.path.exists({str(folder / 'end')!r}): time.sleep(.05)"
        )
        node = [sys.executable, "-c", code]
        monkeypatch.setattr(SiteFolder, "command", lambda *_: node)
        Hub.create(folder / "hub", "localhost")

    def start(self, name: str, begin: Any) -> None:
        """Call a function that starts a site, and wait for its socket."""

        def started() -> None:
            with contextlib.suppress(DeployError):  # the node has ended
                begin()

        thread = threading.Thread(target=started)
        thread.start()
        self.started.add(name)
        self._threads.append(thread)
        end = time.monotonic() + 60
        while not is_listening(self.sites[name].folder / "socket"):
            assert time.monotonic() < end
            time.sleep(0.05)

    def stop(self) -> None:
        (self.folder / "end").touch()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        """An exchange over the sockets with those that are started."""
        replies, down, up = {}, {}, {}
        for name in self.started & outgoing.requests.keys():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(60)
                connection.connect(str(self.sites[name].folder / "socket"))
                parts = [outgoing.requests[name], *outgoing.blobs.values()]
                send(connection, [b"wait", *parts])
                (replies[name],) = receive(connection, 1, 2**24)
            down[name], up[name] = sum(map(len, parts)), len(replies[name])
        return Exchanged(replies, bytes_down=down, bytes_up=up)


@pytest.fixture
def two_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sites]:
    sys.modules.pop("tuning", None)
    sites = Sites(write_study(tmp_path, FTS.format(budget=5)), tmp_path, monkeypatch)
    yield sites
    sites.stop()
    sys.modules.pop("tuning", None)


def test_sites_note_their_exchanges_and_pass_their_trials_on(
    two_sites: Sites, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study, passed = two_sites.study, []

    def on_trial(site: str, trial: Trial) -> None:
        if not passed and "is away" not in caplog.text:
            raise OSError("the server of logs is away")
        passed.append((site, trial))

    for name, folder in two_sites.sites.items():
        more = {"hub": "hub.example:8000", "certificates": tmp_path / "hub" / "ca.crt"}
        more |= {"on_trial": on_trial} if name == "north" else {}
        two_sites.start(name, partial(folder.start, study, name, **more))
    settings = study.study(), study.space, study.agents
    result = host(*settings, two_sites, run=study.fingerprint, seed=study.seed)
    two_sites.stop()
    own = {name: look(folder.folder) for name, folder in two_sites.sites.items()}
    assert passed == [("north", trial) for trial in own["north"].trials("north")]
    assert len(passed) == 5
    assert "the server of logs is away" in caplog.text
    for name, mine in own.items():
        keys = ("round", "replied", "sent", "received", "bytes_down", "bytes_up")
        theirs = [row for row in result.rounds if row["agent"] == name and row["replied"]]
        assert [[row[key] for key in keys] for row in mine.rounds] == [
            [row[key] for key in keys] for row in theirs
        ]
        assert mine.contributions() == [
            row for row in result.contributions() if row["site"] == name
        ]
        assert mine.trust.keys() == {name}
        assert all(0 <= trust <= 1 for trust in mine.trust[name])
    assert result.trust == {}  # the hub is not told
    page = write_report(own["north"], tmp_path / "report.html").read_text()
    assert "Trust earned" in page
    assert "Queries that had messages" in page


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of MLflow and what it imports
def test_mlflow_has_every_trial_of_a_site_as_its_page_says(
    two_sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs botorch_fed[mlflow]")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    study, names = two_sites.study, dict[str, Any]()
    _, _, log, start = _blocks("interchange.rst", "python")
    exec(log.split("\n\n\nresult =")[0], names)
    monkeypatch.chdir(tmp_path)
    Path("site").symlink_to("north")
    Path("ca.crt").symlink_to("hub/ca.crt")
    two_sites.start("north", lambda: exec(start, names))
    host(study.study(), study.space, study.agents, two_sites, run=study.fingerprint, seed=0)
    two_sites.stop()
    trials = {f"north {t.id}": t for t in look(two_sites.sites["north"].folder).trials("north")}
    runs = mlflow.search_runs(output_format="list")
    assert {one.data.tags["mlflow.runName"] for one in runs} == set(trials)
    for one in runs:
        trial = trials[one.data.tags["mlflow.runName"]]
        assert one.data.metrics == trial.values
        assert one.data.params == {name: str(value) for name, value in trial.parameters.items()}


# ------------------------------------------------------------------ the command line


def test_folders_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hub", "init", str(tmp_path / "hub"), "--address", "localhost", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == {"command": "hub init", "folder": str(tmp_path / "hub")}
    assert main(["site", "init", str(tmp_path / "site")]) == 0
    assert "node.pub to the hub's operator" in capsys.readouterr().out
    study = write_study(tmp_path, FTS.format(budget=2)).path
    modes = [path.stat().st_mode & 0o077 for path in (tmp_path / "hub").rglob("*")]
    assert not any(modes)
    words = ["site", "show", str(tmp_path / "site"), str(study), "--name", "north"]
    assert main(words) == 1
    assert "has no study of these settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["hub", "admit", "{hub}", "north", "nowhere.pub"], 2, "expected the site's node.pub"),
        (["hub", "run", "{hub}", "{study}"], 2, "write out"),
        (["hub", "run", "{hub}", "{study}", "--out", "{out}"], 1, "hub admit"),
        (["hub", "start", "{out}"], 1, "hub init"),
        (["hub", "run", "{hub}", "{study}", "--out", "{out}", "--deadline", "inf"], 1, "seconds"),
        (["hub", "sites", "{out}"], 1, "hub init"),
        (["site", "start", "{site}", "{study}", "--name", "n"], 2, "required: --hub, --ca"),
        (
            ["site", "start", "{site}", "{study}", "--name", "n", "--hub", "h:1", "--ca", "{ca}"],
            1,
            "none of the study's agents",
        ),
    ],
)
def test_mistakes_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    Hub.create(tmp_path / "hub", "localhost")
    SiteFolder.create(tmp_path / "site")
    study = write_study(tmp_path, FTS.format(budget=2)).path
    places = {name: str(tmp_path / name) for name in ("hub", "site", "out")}
    places |= {"study": str(study), "ca": str(tmp_path / "hub" / "ca.crt")}
    assert main([word.format(**places) for word in words]) == code
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------ deployed


class Machines:
    """A hub and three sites on loopback, each in processes of its own."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.host = host
        self.port = free_port()
        self.hub = Hub.create(folder / "hub", host, self.port)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CALLS": str(folder / "*.calls"),
            "SECONDS_EACH": "0.3",
        }

    def start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [PROGRAM, *arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )

    def start_hub(self) -> None:
        self.start("hub", "hub", "start", str(self.hub.folder), "--host", self.host)
        self.wait(lambda: self.hub.sites() is not None)

    def start_site(self, name: str, study: StudyFile) -> None:
        self.start(
            name,
            *("site", "start", name, str(study.path), "--name", name),
            *("--hub", f"{self.host}:{self.port}", "--ca", str(self.hub.folder / "ca.crt")),
        )

    def wait(self, ready: Any, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if ready():
                    return
            except DeployError:
                pass
            if time.monotonic() > end:
                logs = [path.read_text()[-2000:] for path in self.folder.glob("*.log")]
                raise AssertionError("\n".join(["not ready in time:", *logs]))
            time.sleep(0.5)

    def wait_online(self) -> None:
        self.wait(lambda: set(self.hub.sites().values()) == {"online"})

    def kill(self, name: str) -> None:
        """As a power cut: the process and all that it has started, with signal 9."""
        process = self.processes.pop(name)
        for pid in [process.pid, *_descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        process.wait(30)

    def run(self, study: StudyFile, out: Path, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                PROGRAM,
                "hub",
                "run",
                str(self.hub.folder),
                str(study.path),
                "--out",
                str(out),
                *list(arguments),
            ],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def finish(self, running: subprocess.Popen[str], code: int = 0) -> str:
        said, _ = running.communicate(timeout=300)
        assert running.returncode == code, said
        return said

    def rounds(self, out: Path) -> int:
        path = out / "rounds.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["round"]) if lines else 0

    def result(self, name: str, study: StudyFile) -> RunResult:
        return SiteFolder(self.folder / name).result(study, name)

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            child = int(path.parent.name)
            found += [child, *_descendants(child)]
    return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A hub that runs, and has admitted nobody."""
    made = Machines(tmp_path_factory.mktemp("machines"))
    try:
        made.start_hub()
        yield made
    finally:
        for name in list(made.processes):
            made.kill(name)


@pytest.fixture(scope="module")
def machines(hub: Machines) -> Machines:
    """A hub that has admitted all sites."""
    for name in SITES:
        site = SiteFolder.create(hub.folder / name)
        hub.hub.admit(name, site.folder / "node.pub")
    return hub


def same_points(machines: Machines, study: StudyFile) -> None:
    """What the sites have evaluated is what a run in one process evaluates."""
    near = run_study(study, out=None, progress=False)
    for name in SITES:
        for ours, theirs in zip(
            machines.result(name, study).history(name), near.history(name), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.nightly
def test_an_encrypted_run_survives_the_crash_of_its_hub(machines: Machines) -> None:
    study = write_study(machines.folder, FED_GP.format(channel="threshold"), "fed_gp.toml")
    for name in SITES:
        machines.start_site(name, study)
    machines.wait_online()
    out = machines.folder / "fed-gp"
    running = machines.run(study, out, "--deadline", "120")
    machines.wait(lambda: machines.rounds(out) >= 5)
    machines.kill("hub")
    running.kill()
    running.communicate()
    machines.start_hub()
    machines.finish(machines.run(study, out, "--deadline", "120", "--resume"))
    for name in SITES:
        machines.stop(name)
        made = machines.result(name, study)
        assert len(made.records) == 4 == len(machines.calls(name))  # none lost, none twice
    same_points(machines, study)


@pytest.mark.nightly
def test_a_site_that_is_killed_comes_back(machines: Machines) -> None:
    before = {name: len(machines.calls(name)) for name in SITES}
    study = write_study(machines.folder, FTS.format(budget=10), "fts.toml")
    for name in SITES:
        machines.start_site(name, study)
    machines.wait_online()
    out = machines.folder / "fts"
    running = machines.run(study, out, "--deadline", "60", "--absence", "5")
    machines.wait(lambda: machines.rounds(out) >= 1)
    machines.kill("south")  # and its node: an evaluation may be under way
    machines.wait(lambda: machines.rounds(out) >= 3)
    machines.start_site("south", study)
    machines.finish(running)
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    replied = {name: [row["replied"] for row in rows if row["agent"] == name] for name in SITES}
    assert all(replied["north"])
    assert all(replied["west"])
    assert not all(replied["south"])  # the rounds went on without it
    assert replied["south"][-1]  # and with it again
    for name in SITES:
        machines.stop(name)
        made = machines.result(name, study)
        new = machines.calls(name)[before[name] :]
        assert len(set(new)) == len(made.records)  # every value that came back is kept
        assert len(new) - len(made.records) <= (name == "south")  # the one that was cut short


@pytest.mark.nightly
def test_a_node_that_nobody_admitted_is_refused(hub: Machines) -> None:
    study = write_study(hub.folder, FTS.format(budget=2), "stranger.toml")
    SiteFolder.create(hub.folder / "stranger")
    hub.start(
        "stranger",
        *("site", "start", "stranger", str(study.path), "--name", "north"),
        *("--hub", f"localhost:{hub.port}", "--ca", str(hub.hub.folder / "ca.crt")),
    )
    assert hub.processes.pop("stranger").wait(60) == 1
    assert "have node.pub admitted" in (hub.folder / "stranger.log").read_text()


def script(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script of the tutorials, in a folder `here`."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(free_port()),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "tutorials" / name), "here"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_of_three_labs(tmp_path: Path) -> None:
    script("three_labs.sh", tmp_path)
    for site in SITES:
        trials = SiteFolder(tmp_path / "here" / site).perform("status", {})["trials"]
        assert [trial["id"] for trial in trials] == [0, 1, 2, 3]
        assert sum(trial["status"] == "failed" for trial in trials) == (site == "south")
        assert len({tuple(trial["parameters"].values()) for trial in trials}) == 4


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_of_a_late_site(tmp_path: Path) -> None:
    """East joins in the exchange after the one that the hub was stopped in, and ends as all do."""
    script("late_site.sh", tmp_path)
    here = tmp_path / "here"
    rows = [json.loads(line) for line in (here / "run" / "rounds.jsonl").read_text().splitlines()]
    first = {name: min(r["round"] for r in rows if r["agent"] == name) for name in (*SITES, "east")}
    assert [first[name] for name in SITES] == [1, 1, 1]
    last = max(row["round"] for row in rows if row["agent"] == "north")
    assert 4 < first["east"] <= last  # while the others search
    assert all(row["replied"] for row in rows)
    study = read_study(here / "with-east.toml")
    sys.modules.pop("tuning", None)  # of another folder, by a test before
    for name in (*SITES, "east"):
        assert len(SiteFolder(here / name).result(study, name).records) == 8
    sys.modules.pop("tuning", None)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_of_three_sites(tmp_path: Path) -> None:
    done = script("three_sites.sh", tmp_path)
    assert done.stdout.count("exchange 9") == 3
    found = re.findall(r"(\w+): best (\d\.\d) together, \d\.\d alone", done.stdout)
    assert [name for name, _ in found] == list(SITES)
    assert min(float(best) for _, best in found) > 5
    sys.modules.pop("tuning", None)
    machines = Machines.__new__(Machines)
    machines.folder = tmp_path / "here"
    same_points(machines, read_study(tmp_path / "here" / "study.toml"))


# ------------------------------------------------------------------ trials by hand


def by_hand(tmp_path: Path) -> tuple[StudyFile, SiteFolder]:
    text = FTS.format(budget=4).replace("tuning:score", "ask")
    study = write_study(tmp_path, text.replace("[outcome]", '[outcome]\nname = "yield"'))
    site = SiteFolder.create(tmp_path / "site")
    return study, site


def command(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What a command says as JSON."""
    code = main([str(word) for word in (*words, "--json")])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (code == 0) == ("error" not in found)
    return found


def test_trials_are_answered_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, folder = by_hand(tmp_path)
    assert "takes part in no study" in command(capsys, "site", "status", folder.folder)["error"]
    with folder._remembered(study, "north"):
        pass
    assert "no request from the hub" in command(capsys, "site", "ask", folder.folder)["error"]
    attached = ("site", "attach", folder.folder, "x=0.9", "y=0.1", "--value", 0.2, "--label", "old")
    assert command(capsys, *attached)["trials"] == command(capsys, *attached)["trials"]
    server = study.study().server(study.space, study.agents)
    told: list[int] = []

    def answer() -> None:
        """Somebody at the site, with a shell."""
        (trial,) = command(capsys, "site", "ask", folder.folder)["trials"]
        assert set(trial["parameters"]) == {"x", "y"}
        if len(told) == 1:
            command(capsys, "site", "fail", folder.folder, trial["id"], "--reason", "it has burnt")
        else:
            value = 1 - trial["parameters"]["x"] ** 2
            command(capsys, "site", "tell", folder.folder, trial["id"], value, "--sem", 0.01)
        told.append(trial["id"])

    with SiteProcess(folder.site(study, "north"), folder.folder / "socket") as process:
        thread = threading.Thread(target=process.serve)
        thread.start()

        def exchange(outgoing: Outgoing) -> Exchanged:
            request, blobs = outgoing.requests["north"], list(outgoing.blobs.values())
            reply = process.respond(request, blobs, defer=outgoing.defer)
            if refusal_code(reply) == "busy":
                answer()
                reply = process.respond(request, blobs, defer=outgoing.defer)
            return Exchanged({"north": reply})

        try:
            drive(server, exchange, run=study.fingerprint)
        finally:
            process.stop()
            thread.join(10)
    assert len(told) == 4
    status = command(capsys, "site", "status", folder.folder)  # the process has ended
    statuses = [trial["status"] for trial in status["trials"]]
    assert statuses == ["attached", "completed", "failed", "completed", "completed"]
    assert status["best"]["value"] == max(t["value"] for t in status["trials"] if t["value"])
    used = command(capsys, "site", "ask", folder.folder)
    assert used["trials"] == []
    assert "budget" in used["note"]
    assert main(["site", "status", str(folder.folder)]) == 0
    shown = capsys.readouterr().out
    assert "it has burnt" in shown
    assert "Best: trial" in shown


def test_a_study_of_optuna_is_imported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optuna = pytest.importorskip("optuna", reason="needs botorch_fed[optuna]")
    study, folder = by_hand(tmp_path)
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    theirs = optuna.create_study(study_name="spring", storage=url, direction="maximize")
    words = ("site", "import", folder.folder, url, "--from", "optuna")
    assert "takes part in no study" in command(capsys, *words)["error"]
    with folder._remembered(study, "north"):
        pass
    for x in (0.1, 0.2):
        theirs.enqueue_trial({"x": x, "y": 0.5})
    theirs.optimize(lambda t: t.suggest_float("x", 0, 1) * t.suggest_float("y", 0, 1), n_trials=2)
    theirs.ask()
    counts = {"attached": 2, "there_already": 0, "without_value": 1}
    assert command(capsys, *words) == {"command": "site import", **counts}
    theirs.enqueue_trial({"x": 0.3, "y": 0.5})
    theirs.optimize(lambda t: t.suggest_float("x", 0, 1) * t.suggest_float("y", 0, 1), n_trials=1)
    assert main([str(word) for word in words]) == 0
    said = "Attached: 1. There already: 2. Trials without a value: 1.\n"
    assert capsys.readouterr().out == said
    trials = command(capsys, "site", "status", folder.folder)["trials"]
    assert [trial["label"] for trial in trials] == ["spring/0", "spring/1", "spring/3"]
    assert [trial["value"] for trial in trials] == pytest.approx([0.05, 0.1, 0.15])
    outside = optuna.create_study(study_name="other", storage=url, direction="maximize")
    outside.enqueue_trial({"x": 0.4, "y": 0.5})
    outside.enqueue_trial({"x": 7.0, "y": 0.5})
    outside.optimize(lambda t: t.suggest_float("x", 0, 9) * t.suggest_float("y", 0, 1), n_trials=2)
    assert "name of a study" in command(capsys, *words)["error"]
    refused = command(capsys, *words, "--study", "other")["error"]
    assert "Trial 1 (other/1)" in refused
    assert len(command(capsys, "site", "status", folder.folder)["trials"]) == 3


def test_mistakes_at_the_command_line_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, folder = by_hand(tmp_path)
    with folder._remembered(study, "north"):
        pass
    for words, match in (
        (("tell", folder.folder, 7, 1.0), "there is no trial 7"),
        (("attach", folder.folder, "x=0.9", "--value", 0.2), "y"),
        (("attach", folder.folder, "x=0.9", "y=7", "--value", 0.2), "7"),
    ):
        assert match in command(capsys, "site", *words)["error"]
    assert main(["site", "attach", str(folder.folder), "x", "--value", "1"]) == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err
    with pytest.raises(StudyError, match="is for sites of a hub"):
        run_study(study, out=None)
