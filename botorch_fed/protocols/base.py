r"""What a protocol is made of.

An `Agent` and a `Server` are frozen objects of public settings; everything that changes is in their
states, frozen dataclasses that `wire.codec` can encode. A protocol never sees a socket, a file or a
clock: an engine carries the bytes, and the two seams below keep what must survive a crash.

    Journal       every observation, the moment it exists: evaluations are expensive
    SecretStore   keys, shares and unreleased noise: never in a state, message, log or repr
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.wire.codec import decode, encode

HEADER = 8  # bytes before every record of a journal: its length, and a checksum of that
AgentId = str
Objective = Callable[[Tensor], Tensor]  # `q x d` points to `q x 1` values


@dataclass(frozen=True)
class Pending:
    """As an answer to `Agent.ask`: nothing to evaluate yet, and no reply yet either."""


A = TypeVar("A")
S = TypeVar("S")


class Agent(Protocol[A]):
    """One site's side of a protocol; its settings are public and its state encodable.

    Attributes:
        state_type: The frozen dataclass of its state.
        accepts: The messages it may receive.
    """

    @property
    def state_type(self) -> type[A]: ...

    @property
    def accepts(self) -> tuple[type, ...]: ...

    def start(self) -> A:
        """The state before the first request."""

    def receive(self, state: A, request: Any) -> A:
        """The state after a request has come."""

    def ask(self, state: A) -> Tensor | Pending | None:
        """Points to evaluate next, `q x d`; `Pending`; or None if the reply can be made.

        The same state asks for the same points, so that a crash loses nothing.
        """

    def tell(self, state: A, X: Tensor, Y: Tensor) -> A:
        """The state after `q x d` points gave `q x 1` values."""

    def reply(self, state: A) -> tuple[A, Any]:
        """The reply to the last request, and the state after it."""


class Server(Protocol[S]):
    """The server's side of a protocol.

    Attributes:
        state_type: The frozen dataclass of its state.
        accepts: The messages it may receive.
    """

    @property
    def state_type(self) -> type[S]: ...

    @property
    def accepts(self) -> tuple[type, ...]: ...

    def start(self) -> S:
        """The state before the first round."""

    def outbox(self, state: S) -> Mapping[AgentId, Any] | None:
        """Who is asked what now; None when the protocol is over. An empty round is a round."""

    def step(self, state: S, inbox: Mapping[AgentId, Any]) -> S:
        """The state after a round; an agent that is not in the inbox did not answer."""


@dataclass(frozen=True)
class Request:
    """A request's frame: `serial` counts the server's rounds from 1 and never goes back."""

    run: str
    serial: int
    body: bytes


@dataclass(frozen=True)
class Reply:
    """A reply's frame; without a body the agent is still busy and may be asked again."""

    run: str
    serial: int
    body: bytes | None


@dataclass(frozen=True)
class Exchanged:
    """What came back from a round.

    Attributes:
        replies: The bytes of those who answered.
        failures: Why the others did not, in words that hold no data.
    """

    replies: Mapping[AgentId, bytes]
    failures: Mapping[AgentId, str] = field(default_factory=dict)


Exchange = Callable[[Mapping[AgentId, bytes]], Exchanged]


# ------------------------------------------------------------------ what must survive a crash


@dataclass(frozen=True, eq=False)
class Observation:
    """One evaluation of the objective: the `index`-th of a request."""

    run: str
    serial: int
    index: int
    X: Tensor
    Y: Tensor

    def __post_init__(self) -> None:
        if self.X.dim() != 2 or self.Y.shape != (self.X.shape[0], 1):
            raise InputDataError(
                f"An observation needs X `q x d` and Y `q x 1`, got shapes {tuple(self.X.shape)} "
                f"and {tuple(self.Y.shape)}."
            )

    @property
    def key(self) -> tuple[str, int, int]:
        """Its address."""
        return self.run, self.serial, self.index


class Journal:
    """Observations in memory; `FileJournal` keeps them on disk.

    A journal is asked before the objective is: an observation that was made before a crash is
    found again and not paid for twice.
    """

    def __init__(self) -> None:
        self._observations: dict[tuple[str, int, int], Observation] = {}

    def find(self, run: str, serial: int, index: int) -> Observation | None:
        """The observation at an address, if it was made before."""
        return self._observations.get((run, serial, index))

    def record(self, observation: Observation) -> None:
        """Keep an observation; it is safe when this returns."""
        self._check_new(observation)
        self._observations[observation.key] = observation

    def _check_new(self, observation: Observation) -> None:
        if observation.key in self._observations:
            raise ProtocolError(f"Observation {observation.key} is in the journal already.")

    def __len__(self) -> int:
        return len(self._observations)


class FileJournal(Journal):
    """A journal on disk: length, checksum of the length, encoded `Observation`; and so on.

    A last record that a crash cut short is dropped on opening; any other damage is an error, and
    the file stays as it is.

    Args:
        path: The file, created with mode 0600 if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "rb+") as file:
            data = file.read()
            end = 0
            while end + HEADER <= len(data):
                stop = self._end_of_record(data, end)
                if stop > len(data):
                    break
                try:
                    super().record(decode(data[end + HEADER : stop], Observation))
                except MessageError as error:
                    raise self._damaged(end) from error
                end = stop
            file.truncate(end)

    def _end_of_record(self, data: bytes, start: int) -> int:
        size = data[start : start + 4]
        if zlib.crc32(size).to_bytes(4, "little") != data[start + 4 : start + HEADER]:
            raise self._damaged(start)
        return start + HEADER + int.from_bytes(size, "little")

    def _damaged(self, where: int) -> ProtocolError:
        return ProtocolError(
            f"The journal {self.path} is damaged at byte {where}: restore it from a copy, or move "
            "it away to start again."
        )

    def record(self, observation: Observation) -> None:
        self._check_new(observation)
        data = encode(observation)
        size = len(data).to_bytes(4, "little")
        with self.path.open("ab") as file:
            file.write(size + zlib.crc32(size).to_bytes(4, "little") + data)
            file.flush()
            os.fsync(file.fileno())
        super().record(observation)


class SecretStore(Protocol):
    """Where a site keeps what must never enter a state, message, log or repr."""

    def get(self, name: str) -> bytes | None:
        """A secret, or None."""

    def put(self, name: str, secret: bytes) -> None:
        """Keep a secret; it is safe when this returns."""


class MemorySecrets:
    """Secrets for as long as the process lives."""

    def __init__(self) -> None:
        self._secrets: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        """A secret, or None."""
        return self._secrets.get(name)

    def put(self, name: str, secret: bytes) -> None:
        """Keep a secret."""
        self._secrets[name] = secret

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._secrets)} secrets)"


class FileSecrets:
    """Secrets as files of mode 0600 in a folder of mode 0700, replaced atomically.

    Args:
        folder: The folder, created if it does not exist; refused if others can read it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = self.folder.stat().st_mode & 0o777
        if mode & 0o077:
            raise ProtocolError(
                f"The folder of secrets {self.folder} has mode {mode:o}: others can read it. "
                f"Make it private: chmod 700 {self.folder}."
            )

    def _path(self, name: str) -> Path:
        if not name or not all(c.isalnum() or c in "-_" for c in name):
            raise ProtocolError(f"A secret's name has letters, digits, - and _ only, got {name!r}.")
        return self.folder / f"{name}.secret"

    def get(self, name: str) -> bytes | None:
        """A secret, or None."""
        path = self._path(name)
        return path.read_bytes() if path.is_file() else None

    def put(self, name: str, secret: bytes) -> None:
        """Keep a secret; it is on disk when this returns."""
        path = self._path(name)
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, is on disk
        finally:
            os.close(folder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"


def checked_values(X: Tensor, Y: Tensor) -> Tensor:
    """An objective's answer as a `q x 1` float64 tensor, or `ProtocolError`."""
    if not isinstance(Y, Tensor) or Y.shape not in ((len(X),), (len(X), 1)):
        got = tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__
        raise ProtocolError(
            f"The objective must return a tensor of shape ({len(X)}, 1) for {len(X)} points, got "
            f"{got}."
        )
    Y = Y.detach().double().reshape(-1, 1)
    if not bool(torch.isfinite(Y).all()):
        raise ProtocolError(
            "The objective returned NaN or infinity. Return the worst value that is plausible, or "
            "raise an exception for a point that must be tried again."
        )
    return Y
