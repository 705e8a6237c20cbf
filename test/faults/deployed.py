"""Processes of a deployed federation that are killed at each of their durable steps.

A hub and three sites are processes of their own, with Flower between them. One of them, the run at
the hub or the site in the north, dies at every durable step in turn: after each death it is started
again, and dies at the first step that is new. Nobody looks after the others.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from botorch_fed.deploy import SiteFolder
from botorch_fed.study import StudyFile, run_study
from test.test_deploy import DP_FTS_DE, FED_GP, FTS, ROOT, SITES, Machines, write_study

Killed = Literal["hub", "site"]
VICTIM = "north"
MOST_KILLS = 200
DEADLINE = "600"  # seconds of an exchange, in which a site dies at several steps
UCB = """
objective = "tuning:score"
agents = ["north", "south", "west"]
budget = 4
seed = 5
[space]
x = { type = "real", lower = 0, upper = 1 }
y = { type = "real", lower = 0, upper = 1 }
[outcome]
centre = 0.5
scale = 0.5
[protocol]
name = "private-ucb"
trust = "joint"
noise_multiplier = 2.0
[privacy]
epsilon = 4.5
delta = 1e-5
"""
STUDIES = {
    "fts": FTS.format(budget=3),
    "fed-gp": FED_GP.format(channel="threshold"),
    "dp-fts-de": DP_FTS_DE.format(channel=""),
    "private-ucb": UCB,
}
REPEATABLE = ("fts", "fed-gp")  # without noise; of the others the noise is another each time


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        kills: How often a process has died.
        completed: Whether the run came to its end.
        lost: Evaluations that have ended at a site and are not in its results.
        doubled: Evaluations that were made again beyond those that a death has cut short.
        same: Whether the points are those of an undisturbed run in one process; None where they
            need not be.
        said: The last words of a process that stopped.
    """

    kills: int
    completed: bool
    lost: int
    doubled: int
    same: bool | None
    said: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return self.completed and not self.lost and not self.doubled and self.same is not False


def deployed(protocol: str, killed: Killed) -> Outcome:
    """A run in which one process dies at each of its durable steps."""
    with tempfile.TemporaryDirectory() as folder:
        machines = Machines(Path(folder))
        machines.environment["PYTHONPATH"] = str(ROOT)
        machines.environment["SECONDS_EACH"] = "0.05"
        try:
            machines.start_hub()
            for name in SITES:
                site = SiteFolder.create(machines.folder / name)
                machines.hub.admit(name, site.folder / "node.pub")
            study = write_study(machines.folder, STUDIES[protocol])
            sys.modules.pop("tuning", None)
            for name in SITES:
                if killed == "hub" or name != VICTIM:
                    machines.start_site(name, study)
            found = _hub(machines, study) if killed == "hub" else _site(machines, study)
            for name in list(machines.processes):
                if name != "hub":
                    machines.stop(name)
            exact = protocol in REPEATABLE and killed == "hub"
            return _weighed(machines, study, killed, *found, exact=exact)
        finally:
            for name in list(machines.processes):
                machines.kill(name)
            sys.modules.pop("tuning", None)


@dataclass
class _Steps:
    """Where a process dies next: at its first step, or one later if it has come no further."""

    log: Path
    fuse: int = 1
    size: int = -1
    kills: int = 0

    def died(self) -> None:
        """Count a death."""
        self.kills += 1
        size = self.log.stat().st_size if self.log.exists() else 0
        self.fuse = 1 if size > self.size else self.fuse + 1
        self.size = max(size, self.size)
        if self.kills > MOST_KILLS:
            raise AssertionError(f"{self.kills} deaths, and no end")

    def command(self, words: list[str]) -> list[str]:
        """The command of the next process."""
        return [sys.executable, "-W", "ignore", "-m", "test.faults.fuse", str(self.fuse), *words]


def _words(machines: Machines, study: StudyFile, *more: str) -> list[str]:
    out = str(machines.folder / "out")
    return ["hub", "run", str(machines.hub.folder), str(study.path), "--out", out, *more]


def _hub(machines: Machines, study: StudyFile) -> tuple[int, bool, str]:
    steps = _Steps(machines.folder / "out" / "server" / "log")
    words = _words(machines, study, "--deadline", DEADLINE, "--resume")
    while True:
        done = subprocess.run(
            steps.command(words),
            env=machines.environment,
            cwd=machines.folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode != -signal.SIGKILL:
            said = "" if done.returncode == 0 else (done.stdout + done.stderr)[-400:]
            return steps.kills, done.returncode == 0, said
        steps.died()


def _site(machines: Machines, study: StudyFile) -> tuple[int, bool, str]:
    home = SiteFolder(machines.folder / VICTIM).home(study)
    steps = _Steps(home / "log")
    words = ["site", "start", VICTIM, str(study.path), "--name", VICTIM]
    words += ["--hub", f"{machines.host}:{machines.port}"]
    words += ["--ca", str(machines.hub.folder / "ca.crt")]
    running: Any = None
    try:
        while True:
            with (machines.folder / f"{VICTIM}.log").open("ab") as log:
                machines.processes[VICTIM] = subprocess.Popen(
                    steps.command(words),
                    env=machines.environment,
                    stdout=log,
                    stderr=log,
                    cwd=machines.folder,
                )
            if running is None:
                running = machines.run(study, machines.folder / "out", "--deadline", DEADLINE)
            while machines.processes[VICTIM].poll() is None and running.poll() is None:
                time.sleep(0.2)
            if running.poll() is not None:
                said = machines.finish(running, running.returncode)
                code = running.returncode
                return steps.kills, code == 0, "" if code == 0 else said[-400:]
            process = machines.processes.pop(VICTIM)
            if process.wait() != -signal.SIGKILL:
                said = (machines.folder / f"{VICTIM}.log").read_text()
                return steps.kills, False, said[-400:]
            steps.died()
    finally:
        if running is not None and running.poll() is None:
            running.kill()
            running.communicate()


def _weighed(
    machines: Machines,
    study: StudyFile,
    killed: Killed,
    kills: int,
    completed: bool,
    said: str,
    *,
    exact: bool,
) -> Outcome:
    near = run_study(study, out=None, progress=False) if exact else None
    lost = doubled = 0
    same = None if near is None else True
    for name in SITES:
        result, calls = machines.result(name, study), machines.calls(name)
        cut = kills if killed == "site" and name == VICTIM else 0
        lost += max(len(set(calls)) - len(result.records) - (cut > 0), 0)
        doubled += max(len(calls) - len(result.records) - cut, 0)
        if near is not None and same:
            pairs = zip(result.history(name), near.history(name), strict=True)
            same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return Outcome(kills, completed, lost, doubled, same, said)
