r"""Agents in several processes of one machine, with the same bytes as in one process.

Every process owns some of the sites for the whole run. The processes exchange bytes of the closed
codec. Python's `multiprocessing` sends the agents and objectives once, when a process starts:
objectives must be importable there (no lambdas), and a script needs the usual
``if __name__ == "__main__":``.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.util
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.base import AgentId, Exchanged, Failure, Outgoing
from botorch_fed.federation.site import STATE_BYTES, Site
from botorch_fed.federation.trial import Observation
from botorch_fed.wire.codec import decode, encode

CHUNK = 2000  # observations of one message between processes
GRACE = 5.0  # seconds that workers have to end
START = "spawn"  # how `multiprocessing` starts them
SiteMaker = Callable[[AgentId], Site]
Pipe = Connection  # of bytes


@dataclass(frozen=True, eq=False)
class _Carry:
    serial: int
    requests: Mapping[str, bytes]
    blobs: Mapping[str, bytes]
    defer: bool


@dataclass(frozen=True, eq=False)
class _Named:
    agent: str
    observation: Observation


@dataclass(frozen=True, eq=False)
class _Carried:
    replies: Mapping[str, bytes]
    codes: Mapping[str, str]
    details: Mapping[str, str]
    bytes_down: Mapping[str, int]
    bytes_up: Mapping[str, int]
    cpu_seconds: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class _Drain:
    pass


@dataclass(frozen=True, eq=False)
class _Drained:
    observations: tuple[_Named, ...]
    trust: Mapping[str, tuple[float, ...]]
    last: bool


@dataclass(frozen=True)
class _Broken:
    trace: str


class Parallel:
    """An `Exchange` over worker processes; use it as a context manager.

    Args:
        names: The agents' names.
        make_site: Builds the site of a name in the process that owns it. `multiprocessing` sends
            this function there, with all that it holds.
        workers: Number of processes.
        absent: As in `InProcess`.
        raise_errors: As in `InProcess`; an error stops the run as a `ProtocolError` that holds the
            worker's traceback.
        patience: As in `InProcess`.
        deadline: Seconds that a round waits for a worker. After it the run stops as if the worker
            had died, and the running evaluation is lost. Default infinite. The first round
            includes the start of the workers.
    """

    def __init__(
        self,
        names: Sequence[AgentId],
        make_site: SiteMaker,
        *,
        workers: int,
        absent: Callable[[AgentId, int], bool] | None = None,
        raise_errors: bool = True,
        patience: float = 0.0,
        deadline: float = math.inf,
    ) -> None:
        if workers < 1:
            raise ProtocolError(f"Expected at least one worker, got {workers}.")
        if not deadline > 0:
            raise ProtocolError(f"Expected deadline > 0 seconds, got {deadline}.")
        if len(set(names)) < len(names):
            raise ProtocolError("Expected sites of different names, got one name twice.")
        self._absent = absent
        self._owner = {name: i % workers for i, name in enumerate(names)}
        self._deadline = deadline
        self._broken = False
        self.trust: dict[AgentId, list[float]] = {}  # as of the last call of `observations`
        self._processes: list[BaseProcess] = []
        self._pipes: list[Pipe[Any, Any]] = []
        # Also without a call of `close`: Python waits for its children at exit.
        ending = self._processes, self._pipes, os.getpid()
        self.close = weakref.finalize(self, _end, *ending)
        multiprocessing.util.Finalize(None, _end, ending, exitpriority=10)  # before Python waits
        context: Any = multiprocessing.get_context(START)  # typed without Process
        for i in range(min(workers, len(names))):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            share = [name for name in names if self._owner[name] == i]
            process = context.Process(
                target=_work, args=(theirs, share, make_site, raise_errors, patience)
            )
            try:
                process.start()
            except Exception as error:  # an object that cannot be pickled
                self.close()
                raise ProtocolError(
                    f"An agent or an objective cannot be sent to a worker process ({error}): use "
                    "functions and classes of a module, no lambdas; or run without workers."
                ) from error
            theirs.close()
            self._processes.append(process)

    def __repr__(self) -> str:
        return f"Parallel({len(self._owner)} sites, {len(self._processes)} workers)"

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        """The answers of all requested agents, several agents at a time."""
        failures: dict[AgentId, Failure] = {}
        shares: list[dict[AgentId, bytes]] = [{} for _ in self._pipes]
        for name, request in outgoing.requests.items():
            if name not in self._owner:
                failures[name] = Failure("unknown")
            elif self._absent is not None and self._absent(name, outgoing.serial):
                failures[name] = Failure("absent")
            else:
                shares[self._owner[name]][name] = request
        answers = self._all(
            [_Carry(outgoing.serial, share, outgoing.blobs, outgoing.defer) for share in shares],
            _Carried,
        )
        for answer in answers:
            for name, code in answer.codes.items():
                failures[name] = Failure(code, answer.details[name])
        return Exchanged(
            {name: data for answer in answers for name, data in answer.replies.items()},
            failures,
            {name: count for answer in answers for name, count in answer.bytes_down.items()},
            {name: count for answer in answers for name, count in answer.bytes_up.items()},
            {name: cost for answer in answers for name, cost in answer.cpu_seconds.items()},
        )

    def observations(self) -> list[tuple[AgentId, Observation]]:
        """The observations since the last call, in order per agent; all in the first call."""
        observations: list[tuple[AgentId, Observation]] = []
        for part in self._all([_Drain() for _ in self._pipes], _Drained):
            observations += [(named.agent, named.observation) for named in part.observations]
            self.trust |= {name: list(trusts) for name, trusts in part.trust.items()}
        return observations

    def _all(self, messages: list[Any], expected: type) -> list[Any]:
        """The answers of all workers; an error of one is raised after all have answered."""
        if self._broken or not self.close.alive:
            raise ProtocolError("The worker processes have ended: make a new engine.")
        try:
            for pipe, message in zip(self._pipes, messages, strict=True):
                with contextlib.suppress(OSError):  # it has ended, and may have sent an error
                    pipe.send_bytes(encode(message, max_bytes=STATE_BYTES))
            answers = self._collected(expected)
            for answer in answers:
                if isinstance(answer, _Broken):
                    raise ProtocolError(f"An agent has failed in a worker process:\n{answer.trace}")
        except BaseException:
            self._broken = True
            self.close()
            raise
        return answers

    def _collected(self, expected: type) -> list[Any]:
        """The answers of all workers in the workers' order, read as they arrive."""
        answers: list[list[Any]] = [[] for _ in self._pipes]
        left = {pipe: i for i, pipe in enumerate(self._pipes)}
        end = time.monotonic() + self._deadline
        while left:
            seconds = None if math.isinf(end) else max(end - time.monotonic(), 0.0)
            readable = wait(list(left), seconds)
            ready = [pipe for pipe in left if pipe in readable]
            if not ready:
                raise ProtocolError(
                    f"{self._named(min(left.values()))} has not answered for {self._deadline:g} "
                    "seconds: check whether its objective hangs, or raise the deadline."
                )
            for pipe in ready:
                try:
                    data = pipe.recv_bytes()
                except (EOFError, OSError) as error:
                    raise self._died(left[pipe]) from error
                answer = decode(data, expected, _Broken, max_bytes=STATE_BYTES)
                answers[left[pipe]].append(answer)
                if getattr(answer, "last", True):
                    del left[pipe]
        return [answer for parts in answers for answer in parts]

    def _died(self, worker: int) -> ProtocolError:
        process = self._processes[worker]
        process.join(GRACE)
        return ProtocolError(
            f"{self._named(worker)} has died (exit code {process.exitcode}): see its output above. "
            "A negative code is a signal: -9 is often too little memory. Its agents and objectives "
            'must be importable, and a script needs `if __name__ == "__main__":`.'
        )

    def _named(self, worker: int) -> str:
        names = [name for name, owner in self._owner.items() if owner == worker]
        more = ", …" if len(names) > 4 else ""
        return f"The worker process of {', '.join(map(repr, names[:4]))}{more}"

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(processes: list[BaseProcess], pipes: list[Pipe[Any, Any]], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the process that made the engine
    for pipe in pipes:
        pipe.close()  # a worker reads the end of its pipe and stops
    deadline = time.monotonic() + GRACE
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(GRACE)
        if process.is_alive():  # suspended, or SIGTERM is ignored
            process.kill()
            process.join()


def _work(
    pipe: Pipe[Any, Any],
    names: list[AgentId],
    make_site: SiteMaker,
    raise_errors: bool,
    patience: float,
) -> None:
    """The main function of a worker process."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            sites = [make_site(name) for name in names]
            with InProcess(sites, raise_errors=raise_errors, patience=patience) as engine:
                while (data := _received(pipe)) is not None:
                    message = decode(data, _Carry, _Drain, max_bytes=STATE_BYTES)
                    for answer in _answers(engine, message):
                        pipe.send_bytes(encode(answer, max_bytes=STATE_BYTES))
        except Exception:  # sent to the parent, which raises
            pipe.send_bytes(encode(_Broken(traceback.format_exc())))


def _received(pipe: Pipe[Any, Any]) -> bytes | None:
    """The next message, or None when the parent has closed the pipe."""
    try:
        return pipe.recv_bytes()
    except EOFError:
        return None


def _answers(engine: InProcess, message: _Carry | _Drain) -> list[Any]:
    if isinstance(message, _Drain):
        named = [_Named(name, observation) for name, observation in engine.observations()]
        parts = [tuple(named[i : i + CHUNK]) for i in range(0, len(named), CHUNK)] or [()]
        trust = {name: tuple(trusts) for name, trusts in engine.trust.items()}
        return [_Drained(part, trust, last=part is parts[-1]) for part in parts]
    carried = engine(Outgoing(message.serial, message.requests, message.blobs, message.defer))
    return [
        _Carried(
            carried.replies,
            {name: failure.code for name, failure in carried.failures.items()},
            {name: failure.detail for name, failure in carried.failures.items()},
            carried.bytes_down,
            carried.bytes_up,
            carried.cpu_seconds,
        )
    ]


def _end_with_parent() -> None:
    """End this worker when its parent was killed, so that its files are released."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
