r"""Agents in several processes of one machine: the same bytes, sooner.

Every process owns some of the sites for the whole run. Only bytes of the closed codec go to and
fro; the agents and objectives themselves are handed over once, when a process starts, by Python's
`multiprocessing`: objectives must be importable there (no lambdas), and a script needs the usual
``if __name__ == "__main__":``.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import FederatedError, ProtocolError
from botorch_fed.protocols.base import AgentId, Exchanged, Failure, Outgoing
from botorch_fed.protocols.site import STATE_BYTES, Site
from botorch_fed.protocols.store import Observation
from botorch_fed.wire.codec import decode, encode

CHUNK = 2000  # observations of one message between processes
SiteMaker = Callable[[AgentId], Site]


@dataclass(frozen=True, eq=False)
class _Carry:
    serial: int
    requests: Mapping[str, bytes]
    blobs: Mapping[str, bytes]


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
    cpu_seconds: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class _Drain:
    pass


@dataclass(frozen=True, eq=False)
class _Drained:
    observations: tuple[_Named, ...]
    last: bool


@dataclass(frozen=True)
class _Broken:
    kind: str
    text: str


class Parallel:
    """An `Exchange` over worker processes; use it as a context manager.

    Args:
        names: The agents' names.
        make_site: Builds the site of a name, in the process that will own it. It is sent there by
            `multiprocessing`, with all that it holds.
        workers: Number of processes.
        absent: As in `InProcess`.
        raise_errors: As in `InProcess`.
    """

    def __init__(
        self,
        names: Sequence[AgentId],
        make_site: SiteMaker,
        *,
        workers: int,
        absent: Callable[[AgentId, int], bool] | None = None,
        raise_errors: bool = True,
    ) -> None:
        if workers < 1:
            raise ProtocolError(f"There must be at least one worker, got {workers}.")
        if len(set(names)) < len(names):
            raise ProtocolError("Two sites have one name: names must differ.")
        self._absent = absent
        self._owner = {name: i % workers for i, name in enumerate(names)}
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: list[Connection[Any, Any]] = []
        for i in range(min(workers, len(names))):
            ours, theirs = context.Pipe()
            share = [name for name in names if self._owner[name] == i]
            process = context.Process(
                target=_work, args=(theirs, share, make_site, raise_errors), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __repr__(self) -> str:
        return f"Parallel({len(self._owner)} sites, {len(self._processes)} workers)"

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        """Let every agent that is asked answer, several at a time."""
        failures: dict[AgentId, Failure] = {}
        shares: list[dict[AgentId, bytes]] = [{} for _ in self._pipes]
        for name, request in outgoing.requests.items():
            if name not in self._owner:
                failures[name] = Failure("unknown")
            elif self._absent is not None and self._absent(name, outgoing.serial):
                failures[name] = Failure("absent")
            else:
                shares[self._owner[name]][name] = request
        for pipe, share in zip(self._pipes, shares, strict=True):
            _send(pipe, _Carry(outgoing.serial, share, outgoing.blobs))
        answers = [_receive(pipe, _Carried) for pipe in self._pipes]
        for answer in answers:
            for name, code in answer.codes.items():
                failures[name] = Failure(code, answer.details[name])
        return Exchanged(
            {name: data for answer in answers for name, data in answer.replies.items()},
            failures,
            {name: count for answer in answers for name, count in answer.bytes_down.items()},
            {name: cost for answer in answers for name, cost in answer.cpu_seconds.items()},
        )

    def observations(self) -> Iterator[tuple[AgentId, Observation]]:
        """The observations since the last call, per agent in order; the first call gives all."""
        for pipe in self._pipes:
            _send(pipe, _Drain())
        for pipe in self._pipes:
            last = False
            while not last:
                part = _receive(pipe, _Drained)
                yield from ((named.agent, named.observation) for named in part.observations)
                last = part.last

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()  # the worker reads the end of its pipe and stops
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
                process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(pipe: Connection[Any, Any], message: Any) -> None:
    pipe.send_bytes(encode(message, max_bytes=STATE_BYTES))


def _receive(pipe: Connection[Any, Any], expected: type) -> Any:
    try:
        data = pipe.recv_bytes()
    except EOFError:
        raise ProtocolError(
            "A worker process has died. Its objective must be importable there; see its output "
            "above, or run without workers."
        ) from None
    answer = decode(data, expected, _Broken, max_bytes=STATE_BYTES)
    if isinstance(answer, _Broken):
        raise ProtocolError(f"A worker stopped with {answer.kind}: {answer.text}")
    return answer


def _work(
    pipe: Connection[Any, Any], names: list[AgentId], make_site: SiteMaker, raise_errors: bool
) -> None:
    """A worker's life."""
    torch.set_num_threads(1)
    try:
        engine = InProcess([make_site(name) for name in names], raise_errors=raise_errors)
    except FederatedError as error:
        _send(pipe, _Broken(type(error).__name__, str(error)))
        return
    with engine:
        while True:
            try:
                data = pipe.recv_bytes()
            except EOFError:
                return
            message = decode(data, _Carry, _Drain, max_bytes=STATE_BYTES)
            if isinstance(message, _Drain):
                named = [_Named(name, seen) for name, seen in engine.observations()]
                while len(named) > CHUNK:
                    _send(pipe, _Drained(tuple(named[:CHUNK]), last=False))
                    named = named[CHUNK:]
                _send(pipe, _Drained(tuple(named), last=True))
                continue
            try:
                answer = engine(Outgoing(message.serial, message.requests, message.blobs))
            except Exception as error:  # of the objective: told to the parent, which raises
                _send(pipe, _Broken(type(error).__name__, str(error)))
                return
            _send(
                pipe,
                _Carried(
                    answer.replies,
                    {name: failure.code for name, failure in answer.failures.items()},
                    {name: failure.detail for name, failure in answer.failures.items()},
                    answer.bytes_down,
                    answer.cpu_seconds,
                ),
            )
