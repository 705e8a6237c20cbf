r"""Studies across machines: a hub, its sites, and the Flower commands behind them.

    hub     folder with certificates, Flower's database, the table of sites, and the runs' records
    site    folder with the node's key, and for every study the site's log and secrets

A hub and a site read the same study file; a site's copy may name its own `objective`, everything
else must agree: both call the run by `StudyFile.fingerprint`, so that a site with other settings
refuses. What a node may say is bound to its key: the hub's operator admits a public key under an
agent's name, Flower authenticates the node, and the engine asks the node of that name only.

Flower gives whoever can reach its control interface the right to run code on the machines of all
sites, as the user that `flower-supernode` runs as. See the threat model in the documentation: let
nobody but the hub's operator reach ``/v1/control``.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import fcntl
import ipaddress
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NoReturn

from botorch_fed.engines.flower import FlowerExchange
from botorch_fed.engines.site_process import Background, SiteProcess, ask_site, is_listening
from botorch_fed.engines.verbs import perform
from botorch_fed.errors import BudgetExceeded, FederatedError
from botorch_fed.federation.agent import paying
from botorch_fed.federation.anchors import Anchors, SiteBooks
from botorch_fed.federation.base import AgentId, secrets_in, with_stores
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.run import RunResult, host, make_agent, site_result
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.store import FileBlobs, FileStore
from botorch_fed.study import (
    BY_HAND,
    NamedObjective,
    StudyFile,
    check_site_budget,
    open_books,
    read_study,
    site_books,
)

if TYPE_CHECKING:
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)

APP = Path(__file__).parent / "flower_app"
CONNECTION = "hub"  # the name of the hub in Flower's configuration
DAYS = 825  # that a hub's certificates are good for
GRACE = 10.0  # seconds that a process has to end
LOOK = 0.5  # seconds between two looks at a run
MISSES = 5  # of these looks in a row that may fail
PAUSE = 10.0  # seconds between two questions to sites that all evaluate
PATIENCE = 120.0  # seconds that a command of Flower's may take


class DeployError(FederatedError):
    """A hub or a site cannot be used as it is; the message says what to do."""


# ------------------------------------------------------------------ the hub


@dataclass(frozen=True)
class Hub:
    """The machine in the middle.

    Args:
        folder: Its folder, made by `create`.
    """

    folder: Path

    @classmethod
    def create(cls, folder: str | Path, address: str, port: int = 8000) -> Hub:
        """Make the folder: an authority of its own, the server's certificate, Flower's settings.

        Args:
            folder: A new folder.
            address: The name or IP address by which the sites reach this machine.
            port: The one port that Flower listens on.
        """
        hub = cls(Path(folder).resolve())
        _new_folder(hub.folder)
        _make_certificates(hub.folder, address)
        home = hub.folder / "flower"
        home.mkdir(mode=0o700)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{port}"\n'
            f"root-certificates = {json.dumps(str(hub.folder / 'ca.crt'))}\n"
        )
        _write_private(
            hub.folder / "hub.json", json.dumps({"address": address, "port": port, "sites": {}})
        )
        return hub

    @property
    def settings(self) -> dict[str, Any]:
        """Address, port, and the nodes of the sites."""
        self._check_made()
        settings: dict[str, Any] = json.loads((self.folder / "hub.json").read_text())
        return settings

    def _check_made(self) -> None:
        if not (self.folder / "hub.json").exists():
            raise DeployError(
                f"{self.folder} is no hub's folder. Make one: botorch-fed hub init {self.folder} "
                "--address NAME"
            )

    def command(self, host: str = "127.0.0.1") -> list[str]:
        """Flower's command for this hub, which listens on an address of this machine."""
        return [
            _program("flower-superlink"),
            *("--host", host, "--port", str(self.settings["port"])),
            *("--ssl-ca-certfile", str(self.folder / "ca.crt")),
            *("--ssl-certfile", str(self.folder / "server.crt")),
            *("--ssl-keyfile", str(self.folder / "server.key")),
            "--enable-supernode-auth",
            *("--database", str(self.folder / "flower.db")),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Of Flower's commands: no telemetry, nothing fetched, settings in this folder."""
        self._check_made()
        return _environment(self.folder / "flower")

    def start(self, host: str = "127.0.0.1") -> NoReturn:
        """Become Flower's server on an address of this machine, until it is stopped."""
        command = self.command(host)
        os.umask(0o077)
        os.execve(command[0], command, self.environment)

    def admit(self, name: AgentId, public_key: str | Path) -> int:
        """Register a site's node key under an agent's name; the hub must be running.

        Returns:
            The node's number in Flower.
        """
        with self._changed() as settings:
            sites = settings["sites"]
            if name in sites:
                raise DeployError(f"There is a site {name!r} already: dismiss it first.")
            words = ("supernode", "register", str(public_key), CONNECTION, "--format", "json")
            try:
                sites[name] = int(self._flwr(*words)["node-id"])
            except DeployError as error:
                if "already in use" not in str(error):
                    raise
                # Registered by a call that died before it could write it down?
                left = [node for node in self._statuses() if node not in sites.values()]
                if len(left) != 1:
                    raise
                (sites[name],) = left
        return int(sites[name])

    def dismiss(self, name: AgentId) -> None:
        """Forget a site and its key."""
        with self._changed() as settings:
            node = self.nodes([name])[name]
            self._flwr("supernode", "unregister", str(node), CONNECTION, "--format", "json")
            del settings["sites"][name]

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """The settings, which are written when the body has changed them; one at a time."""
        self._check_made()
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            settings = self.settings
            yield settings
            _write_private(self.folder / "hub.json", json.dumps(settings))

    def _statuses(self) -> dict[int, str]:
        """What Flower says of its nodes."""
        said = self._flwr("supernode", "list", CONNECTION, "--format", "json")
        return {int(node["node-id"]): str(node["status"]) for node in said["nodes"]}

    def sites(self) -> dict[AgentId, str]:
        """The sites, and what Flower says of each one's node: ``"online"``, ``"offline"``, …"""
        status = self._statuses()
        return {name: status.get(node, "unknown") for name, node in self.settings["sites"].items()}

    def nodes(self, names: Sequence[AgentId]) -> dict[AgentId, int]:
        """The nodes of some sites."""
        known: dict[AgentId, int] = self.settings["sites"]
        missing = [name for name in names if name not in known]
        if missing:
            raise DeployError(
                f"The hub does not know the sites {missing}. Admit each one: botorch-fed hub admit "
                f"{self.folder} {missing[0]} NODE.pub"
            )
        return {name: known[name] for name in names}

    def run(
        self,
        study: str | Path,
        out: str | Path,
        *,
        resume: bool = False,
        deadline: float = 600.0,
        absence: float = 60.0,
        idle: float = math.inf,
        quorum: int = 1,
        retries: int = 0,
        keys: str | Path | None = None,
        watch: Callable[[int], None] | None = None,
    ) -> RunResult:
        """Run a study over the sites; it goes on in Flower's server if this process dies.

        Args:
            study: The study file.
            out: The folder that keeps the server's side of the run.
            resume: Go on with the run in `out`.
            deadline: For how many seconds a round waits for its agents.
            absence: For how many of them it waits for agents that are not there.
            idle: For how many seconds a round waits in which no evaluation is finished at any site.
                After one, sites that still evaluate send what they have already.
            quorum: The least number of replies with which a round may go on.
            retries: How often a round below it is asked again before the run stops.
            keys: The hub's folder of those that `make_keys` made; needed once.
            watch: Called with the number of evaluations that each site has been asked for, when it
                has changed.

        Raises:
            DeployError: The run stopped; the message says why. What is in `out` is good.
            BudgetExceeded: The ledger does not cover the run.
        """
        if not 0 < deadline < math.inf or not 0 <= absence < math.inf:
            raise DeployError(
                f"Deadline and absence are numbers of seconds, got {deadline} and {absence}."
            )
        if not idle >= 0:
            raise DeployError(f"Expected idle >= 0 seconds, got {idle}.")
        path, folder = Path(study).resolve(), Path(out).resolve()
        self.nodes(read_study(path).agents)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if keys is not None:
            _copy_keys(keys, secrets_in(folder, None))
        outcome = self.folder / f"outcome-{token_hex(8)}.json"  # of this call alone
        config = {
            "folder": str(self.folder),
            "study": str(path),
            "out": str(folder),
            "outcome": str(outcome),
            "resume": resume,
            "deadline": float(deadline),
            "absence": float(absence),
            "idle": -1.0 if math.isinf(idle) else float(idle),
            "quorum": quorum,
            "retries": retries,
        }
        for value in map(str, config.values()):
            if '"' in value or "\\" in value:
                raise DeployError(f'A path with " or \\ cannot be told to Flower, got {value}.')
        pairs = " ".join(
            f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in config.items()
        )
        said = self._flwr("run", str(APP), CONNECTION, "-c", pairs, "--format", "json")
        number = str(said["run-id"])
        try:
            self._wait(number, outcome, folder / "rounds.jsonl", watch)
        except BaseException:
            with contextlib.suppress(DeployError):  # it may be the hub that has gone
                self._flwr("stop", number, CONNECTION, "--format", "json")
            raise
        if not outcome.exists():
            raise DeployError(
                f"The run's process has ended without a word, see `flwr log {number}` with "
                f"FLWR_HOME={self.folder / 'flower'}. Go on with --resume."
            )
        ended = json.loads(outcome.read_text())
        outcome.unlink()
        if ended["error"] is not None:
            raise (BudgetExceeded if ended["exhausted"] else DeployError)(ended["error"])
        return RunResult.load(folder)

    def _wait(
        self, number: str, outcome: Path, log: Path, watch: Callable[[int], None] | None
    ) -> None:
        """Until Flower says that the run is over, or it has told its outcome."""
        seen, looks, misses = -1, 0, 0
        while not outcome.exists():
            done = _evaluations(log)
            if watch is not None and done != seen:
                watch(done)
                seen = done
            looks += 1
            if looks % 20 == 0:
                try:
                    said = self._flwr("list", CONNECTION, "--run-id", number, "--format", "json")
                    misses = 0
                except DeployError:  # a busy machine may miss one; a run may take days
                    misses += 1
                    if misses == MISSES:
                        raise
                    continue
                if str(said["runs"][0]["status"]).startswith("finished"):
                    time.sleep(LOOK)
                    return
            time.sleep(LOOK)

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """A command of Flower's, and what it says in JSON."""
        try:
            done = subprocess.run(
                [_program("flwr"), *arguments],
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired as error:
            raise DeployError(f"`flwr {arguments[0]}` has not ended in {PATIENCE:g} s.") from error
        with contextlib.suppress(json.JSONDecodeError):
            said = json.loads(done.stdout[max(done.stdout.find("{"), 0) :])
            if said.get("success") and done.returncode == 0:
                return dict(said)
            raise DeployError(
                f"Flower refuses `flwr {arguments[0]}`: "
                f"{said.get('error-message', done.stderr.strip())}. Is the hub running "
                f"(botorch-fed hub start {self.folder})?"
            )
        words = (done.stderr or done.stdout).strip()[-500:]
        raise DeployError(f"`flwr {' '.join(arguments[:2])}` failed: {words}")


def serve(grid: Grid, config: Mapping[str, Any]) -> None:
    """The ServerApp: run a study to its end, and write down how it ended."""
    out = Path(str(config["out"]))
    error = books = None
    exhausted = False
    try:
        with _alone(out / "lock", f"the study in {out}"):
            study = read_study(str(config["study"]))
            books = open_books(study)
            nodes = Hub(Path(str(config["folder"]))).nodes(study.agents)
            deadline, absence = float(config["deadline"]), float(config["absence"])
            host(
                study.study(books=books),
                study.space,
                study.agents,
                FlowerExchange(grid, nodes, deadline=deadline, absence=absence),
                run=study.fingerprint,
                seed=study.seed,
                out=out,
                resume=bool(config["resume"]),
                idle=float(config["idle"]) if float(config["idle"]) >= 0 else math.inf,
                pause=PAUSE,
                quorum=int(config["quorum"]),
                retries=int(config["retries"]),
                anchors=Anchors(FileStore(Path(str(config["folder"])) / "ledgers")),
            )
    except Exception as failed:
        logger.exception("the run has stopped")
        error = str(failed) or type(failed).__name__
        exhausted = isinstance(failed, BudgetExceeded)
    finally:
        if books is not None:
            books.close()
    _write_private(
        Path(str(config["outcome"])), json.dumps({"error": error, "exhausted": exhausted})
    )


# ------------------------------------------------------------------ a site


@dataclass(frozen=True)
class SiteFolder:
    """A site's machine.

    Args:
        folder: Its folder, made by `create`.
    """

    folder: Path

    @classmethod
    def create(cls, folder: str | Path) -> SiteFolder:
        """Make the folder and the node's key; ``node.pub`` in it goes to the hub's operator."""
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric import ec

        site = cls(Path(folder).resolve())
        _new_folder(site.folder)
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(
            forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption()
        )
        public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
        _write_private(site.folder / "node", private.decode())
        (site.folder / "node.pub").write_bytes(public + b"\n")
        return site

    def home(self, study: StudyFile) -> Path:
        """Where the site keeps what belongs to a study."""
        return self.folder / study.fingerprint

    def site(
        self,
        study: StudyFile,
        name: AgentId,
        *,
        patience: float = 20.0,
        keys: str | Path | None = None,
    ) -> Site:
        """The site of a study, as it was left."""
        if name not in study.agents:
            raise DeployError(f"{name!r} is none of the study's agents {list(study.agents)}.")
        if not (self.folder / "node").exists():
            raise DeployError(
                f"{self.folder} is no site's folder. Make one: botorch-fed site init {self.folder}"
            )
        by_hand = study.objective == BY_HAND
        if not by_hand:
            study.load()
        objective = None if by_hand else Background(NamedObjective(study, name), patience)
        home = self.home(study)
        blobs = FileBlobs(home / "broadcasts")
        secrets = FileStore(home / "secrets")
        if keys is not None:
            _copy_keys(keys, secrets)
        check_site_budget(study)
        protocol = with_stores(study.study(), study.agents, lambda _: secrets)
        agent = make_agent(protocol, name, study.space, study.seed, blobs, study.agents)
        with contextlib.ExitStack() as opened:
            log = FileLog(home, SITE_EVENTS)
            opened.callback(log.close)
            books = self._books(study, name)
            if books is not None:
                opened.callback(books.ledger.close)
                agent = paying(agent, books.ledger, _payer(secrets))
            site = Site(name, agent, objective, run=study.fingerprint, log=log, books=books)
            opened.pop_all()
        return site

    def _books(self, study: StudyFile, name: AgentId) -> SiteBooks | None:
        """The site's ledger; what others have seen of it lies in this folder, apart from it."""
        ledger = site_books(study)
        if ledger is None:
            return None
        try:
            return SiteBooks(ledger, name, FileStore(self.folder / "ledgers"))
        except BaseException:
            ledger.close()
            raise

    def command(self, hub: str, certificates: str | Path, port: int) -> list[str]:
        """Flower's command for this site's node; `port` is for its own processes only."""
        return [
            _program("flower-supernode"),
            *("--superlink", hub),
            *("--root-certificates", str(Path(certificates).resolve())),
            *("--auth-supernode-private-key", str(self.folder / "node")),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--node-config", f"socket={json.dumps(str(self.folder / 'socket'))}"),
        ]

    def start(
        self,
        study: StudyFile,
        name: AgentId,
        *,
        hub: str,
        certificates: str | Path,
        patience: float = 20.0,
        keys: str | Path | None = None,
    ) -> None:
        """Answer a hub's requests until the process is stopped.

        Args:
            study: The study, as this site reads it.
            name: Which of its agents this site is.
            hub: The hub's address, ``name:port``.
            certificates: The hub's ``ca.crt``.
            patience: For how many seconds a request waits for the objective before the site
                answers that it is busy.
            keys: This site's folder of those that `make_keys` made; needed once.
        """
        if not Path(certificates).exists():
            raise DeployError(
                f"There is no file {certificates}: get ca.crt of the hub's folder from its "
                "operator, by a way that you trust."
            )
        _check_address(hub)
        ended = None
        with (
            _alone(self.folder / "lock", f"the site in {self.folder}"),
            self._remembered(study, name),
            SiteProcess(
                self.site(study, name, patience=patience, keys=keys), self.folder / "socket"
            ) as process,
            _stopping(process),
        ):
            node = subprocess.Popen(
                self.command(hub, certificates, free_port()),
                env=_environment(self.folder / "flower"),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            watcher = threading.Thread(target=_close_after, args=(node, process), daemon=True)
            watcher.start()
            try:
                process.serve()
            finally:
                ended = node.poll()
                _end(node)
        if ended is not None:
            raise DeployError(
                f"Flower's node has ended with code {ended}; its words stand above. 305 means that "
                "the hub does not know this node's key: have node.pub admitted."
            )

    @contextlib.contextmanager
    def _remembered(self, study: StudyFile, name: AgentId) -> Iterator[None]:
        """Note which study the site takes part in, for those who ask it for trials."""
        noted = {"study": str(study.path.resolve()), "name": name}
        _write_private(self.folder / "site.json", json.dumps(noted))
        yield

    def perform(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """A verb of the trial service, see `engines.verbs`.

        The site's process does it, if it runs; otherwise it is done on the site's log.

        Args:
            verb: ``"ask"``, ``"tell"``, ``"fail"``, ``"attach"`` or ``"status"``.
            arguments: Of the verb, by name.

        Raises:
            DeployError: The verb's own error, or the site has not been started yet.
        """
        noted = self.folder / "site.json"
        if not noted.exists():
            raise DeployError(
                f"{self.folder} takes part in no study yet: begin with botorch-fed site start."
            )
        socket_ = self.folder / "socket"
        if is_listening(socket_):
            found = ask_site(socket_, verb, arguments)
        else:
            settings = json.loads(noted.read_text())
            with (
                _alone(self.folder / "lock", f"the site in {self.folder}"),
                self.site(read_study(settings["study"]), settings["name"]) as site,
            ):
                found = perform(site, verb, arguments)
        if "error" in found:
            raise DeployError(found["error"])
        return found

    def result(self, study: StudyFile, name: AgentId) -> RunResult:
        """What this site has observed in a study."""
        if not self.home(study).exists():
            raise DeployError(
                f"{self.folder} has no study of these settings: is {study.path} the file that "
                "`site start` was given, unchanged?"
            )
        with self.site(study, name) as site:
            kind = type(study.study()).__name__
            seen = list(site.observations())
            return site_result(kind, study.space, study.seed, name, seen, budget=study.budget)


def _payer(secrets: FileStore) -> str:
    """What a site calls the payment of a run: a random name that is made once."""
    if secrets.get("payer") is None:
        secrets.put_new("payer", token_hex(16).encode())
    return (secrets.get("payer") or b"").decode()


def make_keys(study: StudyFile, folder: str | Path) -> None:
    """The one key of ``channel = "ckks"``, by somebody whom all sites trust; never at the hub.

    Args:
        study: The study.
        folder: A new folder. ``hub`` in it goes to the hub, and each site's to that site alone.
    """
    home = Path(folder).resolve()
    if study.settings.get("channel") != "ckks":
        raise DeployError('Only a study with channel = "ckks" needs keys: others make their own.')
    if "hub" in study.agents:
        raise DeployError("A site is called 'hub': give it another name.")
    _new_folder(home)
    protocol = with_stores(
        study.study(), study.agents, lambda name: FileStore(home / (name or "hub"))
    )
    protocol.provision(study.space)


def _copy_keys(keys: str | Path, store: FileStore) -> None:
    """Put keys that came by hand into a store that has none."""
    if not Path(keys).is_dir():
        raise DeployError(f"There is no folder {keys} with keys.")
    found = FileStore(keys)
    for name in found.names():
        data = found.get(name)
        if data is not None and store.get(name) is None:
            store.put_new(name, data)


# ------------------------------------------------------------------ processes


def _environment(home: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    return {
        **inherited,
        "NO_COLOR": "1",  # Flower colours even its JSON where it is told to
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise DeployError(
            f"The command {name} is missing: pip install 'botorch_fed[flower]' in this environment."
        )
    return found


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _stopping(process: SiteProcess) -> Iterator[None]:
    """A signal to stop ends `serve`; an evaluation that is under way is begun again later."""

    def stop(*_: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except SystemExit:
        logger.info("site %r stops", process.site.name)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _close_after(node: subprocess.Popen[bytes], process: SiteProcess) -> None:
    node.wait()
    process.stop()


def _end_with_parent() -> None:
    """In a child on Linux: be told to stop when the process that started it dies, however."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _end(node: subprocess.Popen[bytes]) -> None:
    """Stop a process and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(GRACE)
            return


@contextlib.contextmanager
def _alone(lock: Path, what: str) -> Iterator[None]:
    """One process at a time has a folder."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DeployError(f"Another process runs {what}: wait for it, or stop it.") from error
        yield


def _check_address(address: str) -> None:
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit():
        raise DeployError(f"The hub's address is NAME:PORT, got {address!r}.")


def _evaluations(path: Path) -> int:
    """How many evaluations each site has been asked for, as the file of rounds knows."""
    if not path.exists():
        return 0
    last = path.read_text().rstrip("\n").rpartition("\n")[2]
    try:
        return int(json.loads(last)["evaluations"])
    except (json.JSONDecodeError, KeyError):
        return 0


# ------------------------------------------------------------------ files


def _new_folder(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise DeployError(f"{folder} is not empty: choose a new folder.")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _write_private(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _make_certificates(folder: Path, address: str) -> None:
    """An authority, and a certificate of the server for its address and this machine's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    now = datetime.datetime.now(datetime.UTC)

    def begun(subject: str, issuer: str, key: Any) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
        )

    authority = ec.generate_private_key(ec.SECP384R1())
    root = begun("botorch-fed hub", "botorch-fed hub", authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    root = root.add_extension(usage, critical=True)
    root = root.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False
    )
    key = ec.generate_private_key(ec.SECP384R1())
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    try:
        names.append(x509.IPAddress(ipaddress.ip_address(address)))
    except ValueError:
        names.append(x509.DNSName(address))
    server = begun(address[:64], "botorch-fed hub", key)
    server = server.add_extension(x509.SubjectAlternativeName(names), critical=False)
    server = server.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    server = server.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    server = server.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
    )
    for name, made in (("ca.crt", root), ("server.crt", server)):
        signed = made.sign(authority, hashes.SHA384())
        (folder / name).write_bytes(signed.public_bytes(forms.Encoding.PEM))
    # The authority's key is not kept: nobody can make another certificate that sites believe.
    text = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    _write_private(folder / "server.key", text.decode())


__all__ = ["DeployError", "Hub", "SiteFolder", "make_keys", "serve"]
