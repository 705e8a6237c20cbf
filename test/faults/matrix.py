"""What becomes of runs in which processes are killed and messages are lost, one row a scenario."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from botorch_fed.rng import generator
from test.faults.cases import NAMES, Case
from test.faults.engine import FAULTS, MODES, SERVER, Fault, Fuse, Mode, Outcome, World

VICTIM = NAMES[1]
FAULT_RATE = 0.35  # of all requests of a run with faults
PAUSE = 20  # steps that a process of such a run lives, at most


@dataclass(frozen=True)
class Kill:
    """One process, killed once.

    Attributes:
        process: Which.
        step: At which of its durable steps, from 1.
        mode: Before the step, in the middle of it, or after it.
        patient: Whether a site is asked again at once; otherwise the round goes on without it.
    """

    process: str
    step: int
    mode: Mode
    patient: bool = True

    @property
    def kind(self) -> str:
        """The row of the matrix."""
        if self.process == SERVER:
            return "server killed, run resumed"
        return "site killed, asked again" if self.patient else "site killed, round goes on"


def undisturbed(case: Case) -> World:
    """A run in which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(case, Path(folder))
        world.run()
    return world


def kills(world: World) -> Iterator[Kill]:
    """The server and one site, killed at every step of an undisturbed run."""
    for process in (SERVER, VICTIM):
        for step in range(1, world.fuses[process].steps + 1):
            for mode in MODES:
                for patient in (True,) if process == SERVER else (True, False):
                    yield Kill(process, step, mode, patient)


def killed(case: Case, kill: Kill) -> Outcome:
    """A run with one kill."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(case, Path(folder), patient=kill.patient)
        world.fuses[kill.process].fatal = (kill.step, kill.mode)
        return world.run()


def faulty(case: Case, seed: int) -> Outcome:
    """A run in which messages are lost, late, doubled and damaged, and every process dies."""
    stream = generator(seed, "kills")

    def plan(agent: str, serial: int) -> Fault | None:
        coin, which = generator(seed, "fault", agent, serial).uniform(2).tolist()
        return FAULTS[int(which * len(FAULTS))] if coin < FAULT_RATE else None

    def dies(name: str, fuse: Fuse) -> None:
        life, mode = stream.uniform(2).tolist()
        fuse.fatal = fuse.steps + 2 + int(life * PAUSE), MODES[int(mode * len(MODES))]

    with tempfile.TemporaryDirectory() as folder:
        return World(case, Path(folder), plan=plan, patient=False, seed=seed, dies=dies).run()


@dataclass
class Row:
    """What became of some runs; `patient`: of kills after which nothing need be missing."""

    case: str
    kind: str
    patient: bool = False
    runs: int = 0
    killed: int = 0
    completed: int = 0
    stopped: int = 0
    crashes: int = 0
    same: int = 0
    undercounts: int = 0
    second_draws: int = 0
    lost: int = 0
    doubled: int = 0

    def add(self, outcome: Outcome, *, same: bool = False) -> None:
        """Count a run."""
        self.runs += 1
        self.killed += outcome.kills > 0
        self.completed += outcome.completed
        self.stopped += bool(outcome.stops)
        self.crashes += bool(outcome.crashes)
        self.same += same
        self.undercounts += outcome.undercounts
        self.second_draws += outcome.second_draws
        self.lost += outcome.lost
        self.doubled += outcome.doubled


def matrix(name: str, case: Case, chosen: Iterable[Kill], seeds: Iterable[int]) -> list[Row]:
    """The rows of one federation."""
    whole = undisturbed(case).outcome
    rows: dict[str, Row] = {}
    for kill in chosen:
        outcome = killed(case, kill)
        row = rows.setdefault(kill.kind, Row(name, kill.kind, kill.patient))
        row.add(outcome, same=outcome.result == whole.result)
    for seed in seeds:
        kind = "faults and kills everywhere"
        rows.setdefault(kind, Row(name, kind)).add(faulty(case, seed))
    return list(rows.values())
