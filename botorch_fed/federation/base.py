r"""The interfaces and frames of a protocol.

An `Agent` and a `Server` are frozen objects of public settings; their changing parts are states,
frozen dataclasses that `wire.codec` can encode. A protocol uses no socket, file or clock: an engine
carries the bytes, and `site.Site` and `drive.drive` store the states.

::

    requests of a round    Outbox: one message per agent, and broadcasts to all
    frames                 Request, and Reply or Refusal, around encoded messages
    results of a round     Exchanged: replies, and a Failure with its reason for every other agent

Broadcasts are content-addressed: a request names their hashes, an agent's state keeps a hash, and
the agent's `Blobs` store the bytes, once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import ProtocolError
from botorch_fed.space import SearchSpace
from botorch_fed.storage.store import Blobs, FileStore, Store
from botorch_fed.wire.codec import MAX_BYTES

AgentId = str
MAX_NAME = 100  # characters of a run's or an agent's name
MAX_BROADCASTS = 64  # in force at a time
FRAME_BYTES = 64 * 1024  # what a frame may add to its body
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Pending:
    """No result yet: the answer of `Agent.ask` or of an objective that is still running."""


@dataclass(frozen=True)
class Curve:
    """What an objective may return for one point of a space with a fidelity.

    Attributes:
        values: From fidelity, in its own units, to outcome; the largest fidelity is where the
            evaluation ended.
    """

    values: Mapping[float, float]


Objective = Callable[[Tensor], Tensor | Pending | Curve]  # `q x d` points to `q x m` values

A = TypeVar("A")
S = TypeVar("S")


class Agent(Protocol[A]):
    """One site's side of a protocol; its settings are public and its state encodable.

    Attributes:
        state_type: The frozen dataclass of its state.
        accepts: The messages it may receive.
        fingerprint: Hash of its settings; a stored state is not continued under other settings.
        blobs: The store of broadcasts.
        space: The map of inputs and outcomes.
        defers: Whether it can reply, with its present data, while it `wants` an evaluation.
    """

    @property
    def state_type(self) -> type[A]: ...

    @property
    def accepts(self) -> tuple[type, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def blobs(self) -> Blobs: ...

    @property
    def space(self) -> SearchSpace: ...

    @property
    def defers(self) -> bool: ...

    def start(self) -> A:
        """The state before the first request."""

    def check(self, state: A, request: Any, broadcasts: tuple[str, ...]) -> None:
        """Raise `MessageError` if a well-formed request cannot be accepted in this state."""

    def receive(self, state: A, request: Any, broadcasts: tuple[str, ...]) -> A:
        """The state after a request; the previous request may be unanswered."""

    def wants(self, state: A) -> bool:
        """Whether the reply to the last request waits for an evaluation."""

    def ask(self, state: A, pending: Tensor | None = None) -> Tensor | Pending | None:
        """Points to evaluate next, `q x d`; `Pending`; or None if there are none.

        `pending` are points `k x d` that were asked and not yet told: open trials, and answered
        trials whose batch has open trials.
        """

    def left(self, state: A, pending: int) -> int:
        """A lower bound on the points that `ask` can give now, while so many are pending."""

    def tell(self, state: A, X: Tensor, Y: Tensor, sem: Tensor | None = None) -> A:
        """The state after `q x d` points have `q x m` values; NaN where an evaluation failed.

        `sem` are standard errors, `q x m`, NaN where there is none; None if there are none at all.
        Where an agent has no such parameter, its site refuses them.
        """

    def tell_curve(self, state: A, X: Tensor, Y: Tensor) -> A:
        """The state with values `n x 1` that an evaluation had at `n x d` lower fidelities."""

    def attach(self, state: A, X: Tensor, Y: Tensor, sem: Tensor | None = None) -> A:
        """The state with results `n x d`, `n x m` that were not asked for."""

    def reply(self, state: A) -> tuple[A, Any]:
        """The reply to the last request, and the state after it."""


@dataclass(frozen=True)
class Outbox:
    """The messages of a round.

    Attributes:
        messages: The message of each agent; an agent without a message is not contacted.
        broadcasts: Messages to all agents of the round.
    """

    messages: Mapping[AgentId, Any]
    broadcasts: tuple[Any, ...] = ()


class Server(Protocol[S]):
    """The server's side of a protocol.

    Attributes:
        state_type: The frozen dataclass of its state.
        accepts: The messages it may receive.
        fingerprint: Hash of its settings; a stored state is not continued under other settings.

    A server whose settings may change between two parts of a run also has `resumed`: it maps the
    state in which a run stopped to the state with which it continues, often the same object. The
    requests of a round depend on the state alone, so that the round can be repeated unchanged.
    """

    @property
    def state_type(self) -> type[S]: ...

    @property
    def accepts(self) -> tuple[type, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    def start(self) -> S:
        """The state before the first round."""

    def outbox(self, state: S) -> Outbox | None:
        """The messages of the next round, possibly none; None when the protocol is over.

        The same state has the same outbox, so that a round can be repeated after a crash.
        """

    def check(self, state: S, sender: AgentId, message: Any) -> None:
        """Raise `MessageError` if a well-formed reply of this sender cannot be accepted."""

    def step(self, state: S, inbox: Mapping[AgentId, Any]) -> S:
        """The state after a round; an agent that is not in the inbox did not answer."""


# ------------------------------------------------------------------ first points and secrets


@runtime_checkable
class DealsPoints(Protocol):
    """A study whose sites are dealt first points."""

    def dealt_by(self, seed: int) -> Any:
        """The study with first points of a seed, unless it says which."""


_Study = TypeVar("_Study")


@runtime_checkable
class KeepsSecrets(Protocol):
    """A study whose parties keep secrets, each in a separate store.

    A process passes the agents and the stores to `with_stores`, and then makes its parties: a
    server asks for the store of None, an agent for the store of its name.
    """

    def with_stores(
        self, names: tuple[AgentId, ...], stores: Callable[[AgentId | None], Store]
    ) -> Any:
        """The study for these agents, with their secrets in stores."""

    def provision(self, space: SearchSpace) -> None:
        """Fill the stores before a run starts; a second call does nothing."""


def with_stores(
    study: _Study, names: tuple[AgentId, ...], stores: Callable[[AgentId | None], Store]
) -> _Study:
    """The study with its secrets in stores, see `KeepsSecrets`; unchanged without secrets."""
    return study.with_stores(names, stores) if isinstance(study, KeepsSecrets) else study


class LedgerElsewhere:
    """The ledger of a study's copy, e.g. in a worker process: it makes agents, and no server."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ProtocolError(
            "A copy of a study cannot pay: its ledger belongs to the original. Use the original, "
            "or dataclasses.replace."
        )


def site_folder(folder: Path, name: AgentId) -> Path:
    """The folder of a site within the folder of a run on one machine."""
    return folder / "sites" / hashlib.sha256(name.encode()).hexdigest()[:16]


def secrets_in(folder: Path, name: AgentId | None) -> FileStore:
    """The secrets of an agent, or of the server for None, in the folder of a run."""
    home = folder / "server" if name is None else site_folder(folder, name)
    return FileStore(home / "secrets")


# ------------------------------------------------------------------ frames

RefusalCode = Literal[
    "busy", "stale", "changed", "behind", "foreign", "missing", "invalid", "budget", "ledger"
]
REASONS: dict[str, str] = {
    "busy": "its objective is still being evaluated",
    "stale": "it has received a later round of this run",
    "changed": "it has received this round with another content",
    "behind": "its log is lost, or older than its last reply",
    "foreign": "it takes part in another run, or another start of this run",
    "missing": "it lacks a broadcast that the request names",
    "invalid": "the request is malformed or does not fit",
    "budget": "its privacy budget does not cover the reply",
    "ledger": "its ledger is older than its anchors: the log of its process has the remedy",
    "absent": "it did not answer",
    "failed": "its objective or its code raised an error",
    "unknown": "there is no such agent",
    "malformed": "its reply is malformed or does not fit",
    "unasked": "it replied without a request",
}


@dataclass(frozen=True)
class Anchored:
    """A sealed record of a site's ledger at one time.

    Attributes:
        agent: The site.
        ledger: The label of one of its ledgers.
        length: Its number of events.
        head: The hash of all its events.
        seal: The site's seal, which only the site can make.
    """

    agent: AgentId
    ledger: str
    length: int
    head: str
    seal: str

    def __post_init__(self) -> None:
        _check_names(self.agent, self.ledger)
        _check_hashes(self.head, self.seal)
        if self.length < 0:
            raise InputDataError(f"Expected the length of a ledger >= 0, got {self.length}.")


@dataclass(frozen=True)
class Request:
    """A request's frame.

    Attributes:
        run: The run's name, as the site has it.
        instance: A random name of this start of the run. A server that lost its log has another
            one, and is refused.
        agent: The agent that it is for.
        serial: The round, from 1, increasing.
        asked: The last earlier round in which the server asked this agent, 0 if none. A site that
            has received a later one detects that the server lost part of its log.
        replied: The last round in which this agent replied, 0 if none. A site whose log is older
            has lost part of it.
        broadcasts: Hashes of the public blobs in force.
        body: The encoded message.
        tag: The server's seal on agent, serial and content. A site that refuses a request because
            it has a later one returns the seal of the later one, which only the server can make.
        ledgers: Anchors of the sites' ledgers.
    """

    run: str
    instance: str
    agent: AgentId
    serial: int
    asked: int
    replied: int
    broadcasts: tuple[str, ...]
    body: bytes = field(repr=False)
    tag: str
    ledgers: tuple[Anchored, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        _check_names(self.run, self.instance, self.agent)
        if not 0 <= self.replied <= self.asked < self.serial:
            raise InputDataError(
                f"Expected rounds 0 <= replied <= asked < serial, got {self.replied}, "
                f"{self.asked} and {self.serial}."
            )
        if len(self.broadcasts) > MAX_BROADCASTS or len(set(self.broadcasts)) < len(
            self.broadcasts
        ):
            raise InputDataError(
                f"Expected at most {MAX_BROADCASTS} different broadcasts, got "
                f"{len(self.broadcasts)}."
            )
        _check_hashes(self.tag, *self.broadcasts)


@dataclass(frozen=True)
class Reply:
    """A reply's frame, kept short.

    Attributes:
        request: SHA-256 of the request's bytes, which name the run, the agent and the round.
        body: The encoded message.
        open: Whether the message was made before the request's evaluation was finished.
        ledgers: A new anchor of this site's ledger, and anchors of other sites.
    """

    request: bytes
    body: bytes = field(repr=False)
    open: bool = False
    ledgers: tuple[Anchored, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Refusal:
    """The reason why a site gives no reply. Holds no free text of a site.

    Attributes:
        run: The run's name, as in the request.
        instance: The start of the run, as in the request.
        agent: The agent, as in the request.
        serial: The round, as in the request.
        request: Hash of the request's bytes.
        code: The reason.
        last: The last round that the site has received.
        content: Hash of that round's content, see `site.request_content`.
        proof: The server's seal on that content.
    """

    run: str
    instance: str
    agent: AgentId
    serial: int
    request: str
    code: RefusalCode
    last: int
    content: str
    proof: str


@dataclass(frozen=True)
class Outgoing:
    """The bytes that an engine carries to the agents in a round.

    Attributes:
        serial: The round.
        requests: Bytes per agent.
        blobs: The broadcasts that the requests name, by hash; an agent that has a broadcast need
            not get it again.
        defer: Whether agents reply now, without waiting for an unfinished evaluation.
        most: The bytes of the longest expected reply of an agent, with its frame.
    """

    serial: int
    requests: Mapping[AgentId, bytes]
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    defer: bool = False
    most: int = MAX_BYTES + FRAME_BYTES


@dataclass(frozen=True)
class Failure:
    """The reason why there is no reply of an agent in a round.

    Attributes:
        code: One of `REASONS`.
        detail: Further information for the server's operator; holds no data.
    """

    code: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.detail or REASONS[self.code]}"


@dataclass(frozen=True)
class Exchanged:
    """The results of a round.

    Attributes:
        replies: The bytes of each reply.
        failures: The reason for every agent without a reply.
        bytes_down: Bytes sent to each agent, broadcasts included.
        bytes_up: Bytes received from each agent.
        cpu_seconds: CPU time of each agent's answer, if the engine measures it.
    """

    replies: Mapping[AgentId, bytes]
    failures: Mapping[AgentId, Failure] = field(default_factory=dict)
    bytes_down: Mapping[AgentId, int] = field(default_factory=dict)
    bytes_up: Mapping[AgentId, int] = field(default_factory=dict)
    cpu_seconds: Mapping[AgentId, float] = field(default_factory=dict)


Exchange = Callable[[Outgoing], Exchanged]


def _check_names(*names: str) -> None:
    if any(len(name) > MAX_NAME for name in names):
        longest = max(map(len, names))
        raise InputDataError(
            f"Expected names of runs and agents of at most {MAX_NAME} characters, got {longest}."
        )


def _check_hashes(*hashes: str) -> None:
    if not all(_HASH.fullmatch(value) for value in hashes):
        raise InputDataError("Expected hashes and seals of 64 hexadecimal digits.")
