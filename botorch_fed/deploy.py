r"""Studies across machines: a hub, its sites, and the processes behind them.

::

    hub     folder with certificates, Flower's database, the roster of sites, and the runs' records
    site    folder with the node's key, and for every study the site's log and secrets

A hub and a site read the same study file; a site's copy may name its own `objective`, everything
else must agree: both call the run by `StudyFile.fingerprint`, so that a site with other settings
refuses. What a node may say is bound to its key: the hub's operator admits a public key under an
agent's name, Flower authenticates the node, and the engine asks the node of that name only.

What travels is data. The hub's port opens to certificates of its roster alone; what controls it is
a Unix socket in its folder. No process of a hub or a site runs an app of Flower's: a site's node is
``flower_app/node.py`` of the installed package, and a run is driven by ``hub run`` itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import fcntl
import importlib.util
import ipaddress
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, NoReturn

from botorch_fed.engines.flower import FlowerExchange
from botorch_fed.engines.flower_control import Control, ControlRefused, HubLost
from botorch_fed.engines.site_process import Background, SiteProcess, ask_site, is_listening
from botorch_fed.engines.verbs import perform
from botorch_fed.errors import BudgetExceeded, FederatedError
from botorch_fed.federation.agent import TINY, paying
from botorch_fed.federation.anchors import Anchors, SealedLedger
from botorch_fed.federation.base import AgentId, secrets_in, with_stores
from botorch_fed.federation.drive import Round
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS, Observation, Trial
from botorch_fed.privacy.channels import identity
from botorch_fed.run import (
    RunResult,
    host,
    make_agent,
    note_exchange,
    noted_exchanges,
    open_private,
    site_result,
    site_rows,
    write_private,
)
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.store import FileBlobs, FileStore
from botorch_fed.study import (
    BY_HAND,
    NamedObjective,
    StudyFile,
    check_site_budget,
    open_ledger,
    read_study,
    site_ledger,
)

logger = logging.getLogger(__name__)

APP = Path(__file__).parent / "flower_app"
DAYS = 825  # that a hub's certificates are good for
NODE_DAYS = 3650  # that a node's is: a hub forgets a node by name
GRACE = 10.0  # seconds that a process has to end
PAUSE = 10.0  # seconds between two questions to sites that all evaluate
ANSWER_BYTES = 64 * 1024  # of an answer beside its reply: calls, and the names of its parts
REFUSED = 3  # the exit code of a node that the hub does not know


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
        """Make the folder: an authority of its own, the server's certificate, an empty roster.

        Args:
            folder: A new folder.
            address: The name or IP address by which the sites reach this machine.
            port: The one port that the hub listens on.
        """
        hub = cls(Path(folder).resolve())
        if not 0 < port < 65536:
            raise DeployError(f"A port is a number from 1 to 65535, got {port}.")
        _new_folder(hub.folder)
        _make_certificates(hub.folder, address)
        made = {"address": address, "port": port, "sites": {}, "certificates": {}}
        _write_private(hub.folder / "hub.json", json.dumps(made))
        return hub

    @property
    def settings(self) -> dict[str, Any]:
        """Address, port, and the nodes of the sites with their certificates."""
        self._check_made()
        settings: dict[str, Any] = json.loads((self.folder / "hub.json").read_text())
        if "certificates" not in settings:
            raise DeployError(
                f"{self.folder} is of an earlier version, whose sites had no certificates. Make a "
                "new folder (hub init), and have every site make one (site init)."
            )
        return settings

    def _check_made(self) -> None:
        if not (self.folder / "hub.json").exists():
            raise DeployError(
                f"{self.folder} is no hub's folder. Make one: botorch-fed hub init {self.folder} "
                "--address NAME"
            )

    @property
    def control(self) -> Control:
        """Calls to the hub's process, by its socket; they need the folder's own user."""
        self._check_made()
        return Control(self.folder / "control")

    def command(self, host: str = "127.0.0.1") -> list[str]:
        """The command of the hub's process.

        Args:
            host: The address of this machine for the public door. The private one has none.
        """
        port = str(self.settings["port"])
        return [*_python("hub.py"), str(self.folder), "--host", host, "--port", port]

    def start(self, host: str = "127.0.0.1") -> NoReturn:
        """Become the hub's process, with its port on an address of this machine.

        Raises:
            DeployError: It runs already, or a path is too long for a socket.
        """
        command = self.command(host)
        _check_path(self.folder / "control")
        os.umask(0o077)
        lock = open_private(self.folder / "start.lock", os.O_RDWR | os.O_CREAT)
        _lock(lock, f"the hub in {self.folder}")
        os.set_inheritable(lock, True)  # held by the process that this one becomes
        os.execve(command[0], command, _environment(self.folder / "flower"))

    def admit(self, name: AgentId, certificate: str | Path) -> int:
        """Let a site in under an agent's name, by its ``node.pub``; the hub must be running.

        Returns:
            The node's number in Flower.
        """
        text, public_key = _read_certificate(Path(certificate))
        with self._changed() as settings:
            if name in settings["sites"]:
                raise DeployError(f"There is a site {name!r} already: dismiss it first.")
            for other, held in settings["certificates"].items():
                if held == text:
                    raise DeployError(
                        f"This key is that of site {other!r}: every site has its own."
                    )
            with _answered():
                settings["sites"][name] = node = self.control.register(public_key)
            settings["certificates"][name] = text
        return node

    def dismiss(self, name: AgentId) -> None:
        """Forget a site and its key: its next request is refused, and its connections."""
        node = self.nodes([name])[name]
        with self._changed() as settings:
            del settings["sites"][name], settings["certificates"][name]
        with contextlib.suppress(HubLost):  # it admits the sites of its settings only
            self.control.unregister(node)

    def allow(self, sizes: Mapping[AgentId, int]) -> None:
        """Let sites leave so many bytes more at this hub, each in the answer to a request."""
        path = self.folder / "allowed.json"
        with _locked(self.folder / "lock"):
            allowed = json.loads(path.read_text()) if path.exists() else {}
            for name, size in sizes.items():
                allowed[name] = allowed.get(name, 0) + size + ANSWER_BYTES
            _write_private(path, json.dumps(allowed))

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """The settings, which are written when the body has changed them; one at a time."""
        self._check_made()
        with _locked(self.folder / "lock"):
            settings = self.settings
            yield settings
            _write_private(self.folder / "hub.json", json.dumps(settings))

    def sites(self) -> dict[AgentId, str]:
        """The sites, and what Flower says of each one's node: ``"online"``, ``"offline"``, …"""
        with _answered():
            found = self.control.nodes()
        known: dict[AgentId, int] = self.settings["sites"]
        return {name: found.get(node, ("unknown", b""))[0] for name, node in known.items()}

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
        """Run a study over the sites. It ends with this process, and can be resumed.

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
        with _locked(folder / "lock", f"the study in {folder}"), _ending():
            if keys is not None:
                _copy_keys(keys, secrets_in(folder, None))
            read = read_study(path)
            with contextlib.ExitStack() as open_:
                shared_ledger = open_ledger(read)
                if shared_ledger is not None:
                    open_.callback(shared_ledger.close)
                try:
                    with _locked(self.folder / "lock"):
                        token = self.control.begin()
                    grid = open_.enter_context(self.control.driven(token))
                    return host(
                        read.study(shared_ledger=shared_ledger),
                        read.space,
                        read.agents,
                        FlowerExchange(
                            grid,
                            self.nodes(read.agents),
                            deadline=deadline,
                            absence=absence,
                            allow=self.allow,
                        ),
                        run=read.fingerprint,
                        seed=read.seed,
                        out=folder,
                        resume=resume,
                        idle=idle,
                        pause=PAUSE,
                        quorum=quorum,
                        retries=retries,
                        on_round=None if watch is None else _Told(watch, folder / "rounds.jsonl"),
                        anchors=Anchors(FileStore(self.folder / "ledgers")),
                    )
                except (BudgetExceeded, DeployError):
                    raise
                except Exception as failed:
                    raise DeployError(str(failed) or type(failed).__name__) from failed


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except (HubLost, ControlRefused) as error:
        raise DeployError(str(error)) from error


class _Told:
    """Calls `watch` with the number of evaluations where a round has changed it."""

    def __init__(self, watch: Callable[[int], None], path: Path) -> None:
        self._watch, self._path, self._seen = watch, path, -1

    def __call__(self, _: Round) -> None:
        done = _evaluations(self._path)
        if done != self._seen:
            self._watch(done)
            self._seen = done


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
        """Make the folder and the node's key; ``node.pub`` in it goes to the hub's operator.

        ``node.pub`` is a certificate that the key has signed for itself.
        """
        site = cls(Path(folder).resolve())
        _new_folder(site.folder)
        _make_node(site.folder)
        return site

    def home(self, study: StudyFile) -> Path:
        """Where the site keeps what belongs to a study."""
        return self.folder / study.fingerprint

    @property
    def identity(self) -> str:
        """The site's public identity key under joint keys; it is made when it is first wanted."""
        return identity(FileStore(self.folder / "identity"))

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
        _ = self.identity
        _copy_keys(self.folder / "identity", secrets)
        protocol = with_stores(study.study(), study.agents, lambda _: secrets)
        agent = make_agent(protocol, name, study.space, study.seed, blobs, study.agents)
        with contextlib.ExitStack() as opened:
            log = FileLog(home, SITE_EVENTS)
            opened.callback(log.close)
            ledger = self._site_ledger(study, name)
            if ledger is not None:
                opened.callback(ledger.ledger.close)
                agent = paying(agent, ledger.ledger, _payer(secrets))
            site = Site(name, agent, objective, run=study.fingerprint, log=log, ledger=ledger)
            opened.pop_all()
        return site

    def _site_ledger(self, study: StudyFile, name: AgentId) -> SealedLedger | None:
        """The site's ledger; what others have seen of it lies in this folder, apart from it."""
        ledger = site_ledger(study)
        if ledger is None:
            return None
        try:
            return SealedLedger(ledger, name, FileStore(self.folder / "ledgers"))
        except BaseException:
            ledger.close()
            raise

    def command(self, hub: str, certificates: str | Path) -> list[str]:
        """The command of this site's node."""
        return [
            *_python("node.py"),
            *("--hub", hub),
            *("--ca", str(Path(certificates).resolve())),
            *("--key", str(self.folder / "node")),
            *("--certificate", str(self.folder / "node.pub")),
            *("--socket", str(self.folder / "socket")),
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
        on_trial: Callable[[AgentId, Trial], None] | None = None,
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
            on_trial: Called with the site's name and each trial as soon as it is answered, e.g. to
                log it elsewhere; at a start first with those of before. An error that it raises is
                logged, and the trial is passed on again with the next one.
        """
        if not Path(certificates).exists():
            raise DeployError(
                f"There is no file {certificates}: get ca.crt of the hub's folder from its "
                "operator, by a way that you trust."
            )
        _check_address(hub)
        if (self.folder / "node").exists():
            _read_certificate(self.folder / "node.pub")
        ended = None
        with (
            _locked(self.folder / "lock", f"the site in {self.folder}"),
            self._remembered(study, name),
            SiteProcess(
                self.site(study, name, patience=patience, keys=keys),
                self.folder / "socket",
                on_trial=on_trial,
                on_exchange=partial(note_exchange, self.home(study)),
            ) as process,
            _stopping(process),
        ):
            node = subprocess.Popen(
                self.command(hub, certificates),
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
                "The hub does not know this node's key: have node.pub admitted."
                if ended == REFUSED
                else f"The site's node has ended with code {ended}; its words stand above."
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
        settings = self._noted()
        socket_ = self.folder / "socket"
        if is_listening(socket_):
            found = ask_site(socket_, verb, arguments)
        else:
            with (
                _locked(self.folder / "lock", f"the site in {self.folder}"),
                self.site(read_study(settings["study"]), settings["name"]) as site,
            ):
                found = perform(site, verb, arguments)
        if "error" in found:
            raise DeployError(found["error"])
        return found

    def study(self) -> StudyFile:
        """The study in which this site takes part, or took part last."""
        return read_study(self._noted()["study"])

    def so_far(self) -> RunResult:
        """What this site has observed in its last study, read while its process may run.

        It has ended when the budget is used, as far as a site knows.
        """
        noted = self._noted()
        study = read_study(noted["study"])
        self._check_home(study)
        found = self._result(study, noted["name"], [])
        found.records = site_rows(self.home(study), noted["name"], study.space)
        left = study.budget - found.spent(noted["name"])
        found.ended = left < study.space.cheapest - TINY
        return found

    def _noted(self) -> dict[str, str]:
        """The study file and the name with which the site was started last."""
        path = self.folder / "site.json"
        if not path.exists():
            raise DeployError(
                f"{self.folder} takes part in no study yet: begin with botorch-fed site start."
            )
        noted: dict[str, str] = json.loads(path.read_text())
        return noted

    def _check_home(self, study: StudyFile) -> None:
        if not self.home(study).exists():
            raise DeployError(
                f"{self.folder} has no study of these settings: is {study.path} the file that "
                "`site start` was given, unchanged?"
            )

    def _result(self, study: StudyFile, name: AgentId, seen: list[Observation]) -> RunResult:
        protocol = study.study()
        found = site_result(
            type(protocol).__name__,
            study.space,
            study.seed,
            name,
            seen,
            budget=study.budget,
            sees=protocol.sees(study.space, study.agents),
            price=protocol.price(study.space, study.agents),
        )
        found.rounds = noted_exchanges(self.home(study))
        trusts = [row["trust"] for row in found.rounds if "trust" in row]
        found.trust = {name: trusts} if trusts else {}
        return found

    def result(self, study: StudyFile, name: AgentId) -> RunResult:
        """What this site has observed in a study."""
        self._check_home(study)
        with self.site(study, name) as site:
            return self._result(study, name, list(site.observations()))


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
    """Of Flower's code: none of its settings but these; no telemetry, nothing fetched."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("FLWR_")},
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def _python(name: str) -> list[str]:
    """The command that runs a file of this package, which imports nothing from its folder."""
    if importlib.util.find_spec("flwr") is None:
        raise DeployError(
            "Flower is missing: pip install 'botorch_fed[flower]' in this environment."
        )
    return [sys.executable, "-P", str(APP / name)]


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """A signal to stop raises `SystemExit`, so that what is open is closed."""

    def stop(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _stopping(process: SiteProcess) -> Iterator[None]:
    """A signal to stop ends `serve`; an evaluation that is under way is begun again later."""
    try:
        with _ending():
            yield
    except SystemExit:
        logger.info("site %r stops", process.site.name)


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
def _locked(path: Path, what: str | None = None) -> Iterator[None]:
    """One process at a time: the others wait, or are told `what` the first one runs."""
    lock = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        if what is None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        else:
            _lock(lock, what)
        yield
    finally:
        os.close(lock)


def _lock(lock: int, what: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DeployError(f"Another process runs {what}: wait for it, or stop it.") from error


def _check_address(address: str) -> None:
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit():
        raise DeployError(f"The hub's address is NAME:PORT, got {address!r}.")


def _check_path(path: Path) -> None:
    if len(str(path).encode()) > 100:
        raise DeployError(
            f"The path of a socket has at most 100 bytes, {path} has more: choose a shorter folder."
        )


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
    write_private(path, text.encode())


def _make_node(folder: Path) -> None:
    """The key of a node, and a certificate that says nothing but its public key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    now = datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP384R1())
    name = f"botorch-fed site {token_hex(16)}"  # two nodes of one name could not be told apart
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=NODE_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(key, hashes.SHA384())
    )
    text = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    _write_private(folder / "node", text.decode())
    _write_private(folder / "node.pub", made.public_bytes(forms.Encoding.PEM).decode())


def _read_certificate(path: Path) -> tuple[str, bytes]:
    """A ``node.pub`` in its one form, and the public key in it; refused if it is no such file."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        key = found.public_key()
        found.verify_directly_issued_by(found)
        authority = found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise DeployError(
            f"Expected the node.pub of `botorch-fed site init` in {path}: a certificate signed by "
            f"its own key. If it is of an earlier version, the site makes a new folder. ({error})"
        ) from error
    if authority or not isinstance(key, ec.EllipticCurvePublicKey):
        raise DeployError(
            f"Expected the node.pub of `botorch-fed site init` in {path}: a certificate of an EC "
            "key, and of no authority."
        )
    public = key.public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    return found.public_bytes(forms.Encoding.PEM).decode(), public


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
        _write_private(folder / name, signed.public_bytes(forms.Encoding.PEM).decode())
    # The authority's key is not kept: nobody can make another certificate that sites believe.
    text = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    _write_private(folder / "server.key", text.decode())


__all__ = ["DeployError", "Hub", "SiteFolder", "make_keys"]
