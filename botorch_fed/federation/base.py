r"""What a protocol is made of.

An `Agent` and a `Server` are frozen objects of public settings; everything that changes is in their
states, frozen dataclasses that `wire.codec` can encode. A protocol never sees a socket, a file or a
clock: an engine carries the bytes, `site.Site` and `drive.drive` keep what must survive a crash.

    what is asked       Outbox: one message per agent, and broadcasts that go to all
    what travels        Request and Reply or Refusal, frames around encoded messages
    what comes back     Exchanged: replies, and for everyone else a Failure with its reason

Broadcasts are content-addressed: a request names their hashes, an agent's state keeps a hash, and
the bytes lie in the agent's `Blobs`, once.
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
    """Not now: as an answer to `Agent.ask`, or of an objective that is still running."""


Objective = Callable[[Tensor], Tensor | Pending]  # `q x d` points to `q x 1` values

A = TypeVar("A")
S = TypeVar("S")


class Agent(Protocol[A]):
    """One site's side of a protocol; its settings are public and its state encodable.

    Attributes:
        state_type: The frozen dataclass of its state.
        accepts: The messages it may receive.
        fingerprint: Hash of its settings; a stored state is not continued under others.
        blobs: Where broadcasts lie.
        space: The map of inputs and outcomes.
        defers: Whether it can reply while it `wants` an evaluation, with what it has already.
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
        """The state after a request has come; the one before it may be unanswered."""

    def wants(self, state: A) -> bool:
        """Whether the reply to the last request waits for an evaluation."""

    def ask(self, state: A, pending: Tensor | None = None) -> Tensor | Pending | None:
        """Points to evaluate next, `q x d`; `Pending`; or None if there are none to evaluate.

        `pending` are points `k x d` that were asked for and not told yet: open trials, and answered
        ones whose batch has open trials.
        """

    def left(self, state: A, pending: int) -> int:
        """How many points `ask` can give now, at least, while so many are pending."""

    def tell(self, state: A, X: Tensor, Y: Tensor) -> A:
        """The state after `q x d` points gave `q x 1` values; NaN where an evaluation failed."""

    def attach(self, state: A, X: Tensor, Y: Tensor) -> A:
        """The state with results `n x d`, `n x 1` that exist without having been asked for."""

    def reply(self, state: A) -> tuple[A, Any]:
        """The reply to the last request, and the state after it."""


@dataclass(frozen=True)
class Outbox:
    """What the server wants to say now.

    Attributes:
        messages: Who is asked what; an agent that is not here is left in peace.
        broadcasts: What every one of them is to know as well.
    """

    messages: Mapping[AgentId, Any]
    broadcasts: tuple[Any, ...] = ()


class Server(Protocol[S]):
    """The server's side of a protocol.

    Attributes:
        state_type: The frozen dataclass of its state.
        accepts: The messages it may receive.
        fingerprint: Hash of its settings; a stored state is not continued under others.

    A server whose settings may change between two parts of a run has `resumed` as well: from the
    state in which a run was stopped to the one with which it goes on, often the same object. What
    a round asks depends on its state alone, so that it can be asked again as it was.
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
        """What is asked now; None when the protocol is over. An empty round is a round.

        The same state has the same outbox, so that a round can be repeated after a crash.
        """

    def check(self, state: S, sender: AgentId, message: Any) -> None:
        """Raise `MessageError` if a well-formed reply of this sender cannot be accepted."""

    def step(self, state: S, inbox: Mapping[AgentId, Any]) -> S:
        """The state after a round; an agent that is not in the inbox did not answer."""


# ------------------------------------------------------------------ secrets

_Study = TypeVar("_Study")


@runtime_checkable
class KeepsSecrets(Protocol):
    """A study whose parts keep secrets, each in a store of its own.

    A process says by `with_stores` who takes part and where secrets lie, and then makes the parts
    that it plays: a server asks for the store of None, an agent for that of its own name.
    """

    def with_stores(
        self, names: tuple[AgentId, ...], stores: Callable[[AgentId | None], Store]
    ) -> Any:
        """The study for these agents, with secrets in stores."""

    def provision(self, space: SearchSpace) -> None:
        """Put into the stores what must be there before a run starts; again, it does nothing."""


def with_stores(
    study: _Study, names: tuple[AgentId, ...], stores: Callable[[AgentId | None], Store]
) -> _Study:
    """The study with its secrets in stores, see `KeepsSecrets`; one without secrets as it is."""
    return study.with_stores(names, stores) if isinstance(study, KeepsSecrets) else study


class LedgerElsewhere:
    """Of a copy of a study, e.g. in a worker process: it makes agents, and no server."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ProtocolError(
            "A copy of a study cannot pay: its ledger stays with the one it was opened for. Use "
            "that one, or dataclasses.replace."
        )


def site_folder(folder: Path, name: AgentId) -> Path:
    """What a site keeps in the folder of a run whose parts are all on one machine."""
    return folder / "sites" / hashlib.sha256(name.encode()).hexdigest()[:16]


def secrets_in(folder: Path, name: AgentId | None) -> FileStore:
    """The secrets of an agent, or for None of the server, in such a folder."""
    home = folder / "server" if name is None else site_folder(folder, name)
    return FileStore(home / "secrets")


# ------------------------------------------------------------------ frames

RefusalCode = Literal[
    "busy", "stale", "changed", "behind", "foreign", "missing", "invalid", "budget", "ledger"
]
REASONS: dict[str, str] = {
    "busy": "its objective is still being evaluated",
    "stale": "it has seen a later round of this run",
    "changed": "it has seen this round with another content",
    "behind": "its record is lost, or older than what it has sent before",
    "foreign": "it takes part in another run, or another start of this run",
    "missing": "it lacks a broadcast that the request names",
    "invalid": "the request is malformed or does not fit",
    "budget": "its privacy budget does not cover the reply",
    "ledger": "its ledger is older than others have seen it: its own log says what to do",
    "absent": "it did not answer",
    "failed": "its objective or its own code raised an error",
    "unknown": "there is no such agent",
    "malformed": "its reply is malformed or does not fit",
    "unasked": "nobody asked it",
}


@dataclass(frozen=True)
class Anchored:
    """How a site's ledger was seen.

    Attributes:
        agent: The site.
        ledger: Which of its ledgers.
        length: How many events it had.
        head: The hash of all of them.
        seal: The site's own, which nobody else can make.
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
            raise InputDataError(f"A ledger has no {self.length} events.")


@dataclass(frozen=True)
class Request:
    """A request's frame.

    Attributes:
        run: The run's name, which the site knows as well.
        instance: A random name of this start of the run: a server that lost its record has
            another one, and is refused.
        agent: Whom it is for.
        serial: Rounds are counted from 1 and never go back.
        asked: The last round before in which the server has asked this agent, 0 if none: a site
            that knows a later one has met this server before it lost its record.
        heard: The last round in which the server has heard this agent, 0 if none: a site whose
            record is older has lost something.
        broadcasts: Hashes of the public blobs that are in force.
        body: The encoded message.
        tag: The server's seal on agent, serial and content. A site that refuses a request because
            it knows a later one shows that one's seal, which nobody else can make.
        ledgers: How the sites' own ledgers were seen.
    """

    run: str
    instance: str
    agent: AgentId
    serial: int
    asked: int
    heard: int
    broadcasts: tuple[str, ...]
    body: bytes = field(repr=False)
    tag: str
    ledgers: tuple[Anchored, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        _check_names(self.run, self.instance, self.agent)
        if not 0 <= self.heard <= self.asked < self.serial:
            raise InputDataError("Rounds count from 1, and none is heard before it is asked.")
        if len(self.broadcasts) > MAX_BROADCASTS or len(set(self.broadcasts)) < len(
            self.broadcasts
        ):
            raise InputDataError(f"At most {MAX_BROADCASTS} different broadcasts can be in force.")
        _check_hashes(self.tag, *self.broadcasts)


@dataclass(frozen=True)
class Reply:
    """A reply's frame: as short as can be, for it is most of what sites send.

    Attributes:
        request: SHA-256 of the request's bytes, which name the run, the agent and the round.
        body: The encoded message.
        open: Whether the message was made without the request's evaluation, which is not finished.
        ledgers: How this site's ledger is now, and how it has seen those of others.
    """

    request: bytes
    body: bytes = field(repr=False)
    open: bool = False
    ledgers: tuple[Anchored, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Refusal:
    """Why a site gives no reply. Holds no words of a site.

    Attributes:
        run: As in the request, like the next three.
        instance: See there.
        agent: See there.
        serial: See there.
        request: Hash of the request's bytes.
        code: The reason.
        last: The last round the site has seen.
        content: Hash of what that round asked for, see `site.request_content`.
        proof: The server's seal on it.
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
    """What an engine has to carry in a round.

    Attributes:
        serial: The round.
        requests: Bytes per agent.
        blobs: The broadcasts that the requests name, by hash; an agent that has one already need
            not get it again.
        defer: Whether agents are to reply now, without an evaluation that is not finished.
        most: The bytes of the longest reply that is expected of an agent, with its frame.
    """

    serial: int
    requests: Mapping[AgentId, bytes]
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    defer: bool = False
    most: int = MAX_BYTES + FRAME_BYTES


@dataclass(frozen=True)
class Failure:
    """Why an agent was not heard in a round.

    Attributes:
        code: One of `REASONS`.
        detail: What an operator of the server should know besides; holds no data.
    """

    code: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.detail or REASONS[self.code]}"


@dataclass(frozen=True)
class Exchanged:
    """What came back from a round.

    Attributes:
        replies: The bytes of those who answered.
        failures: Why the others did not.
        bytes_down: Bytes that went to each agent, broadcasts included.
        bytes_up: Bytes that came from each agent.
        cpu_seconds: What each agent's answer took, where the engine can tell.
    """

    replies: Mapping[AgentId, bytes]
    failures: Mapping[AgentId, Failure] = field(default_factory=dict)
    bytes_down: Mapping[AgentId, int] = field(default_factory=dict)
    bytes_up: Mapping[AgentId, int] = field(default_factory=dict)
    cpu_seconds: Mapping[AgentId, float] = field(default_factory=dict)


Exchange = Callable[[Outgoing], Exchanged]


def _check_names(*names: str) -> None:
    if any(len(name) > MAX_NAME for name in names):
        raise InputDataError(f"Names of runs and agents have at most {MAX_NAME} characters.")


def _check_hashes(*hashes: str) -> None:
    if not all(_HASH.fullmatch(value) for value in hashes):
        raise InputDataError("Hashes and seals have 64 hexadecimal digits.")
