"""What travels in a run, seen between server and sites."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
from torch import Tensor

from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.base import AgentId, Exchanged, Outgoing, Refusal, Reply, Request
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.wire.codec import decode

NAMES = ("north", "south", "west")
SPACE = SearchSpace((Parameter.real("x", 0.0, 1.0), Parameter.real("y", 0.0, 1.0)))


def bowl(X: Tensor) -> Tensor:
    return -(X - 0.3).square().sum(dim=-1, keepdim=True)


def name_of(message: bytes) -> str:
    """The class that encoded bytes are of, as the bytes themselves say."""
    return str(msgpack.unpackb(message, strict_map_key=False)[1])


@dataclass
class Wire:
    """An exchange that notes the bytes of every message.

    Attributes:
        sent: Bytes by sender and class; frames and what they carry are noted apart.
        broadcast: The classes that went to all agents.
        refusals: Why sites gave no reply.
    """

    inner: InProcess
    sent: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)
    broadcast: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        for blob in outgoing.blobs.values():
            self.broadcast.add(self._note("server", blob))
        for data in outgoing.requests.values():
            self._note("server", data)
            request: Request = decode(data, Request)
            self._note("server", request.body)
        exchanged = self.inner(outgoing)
        for data in exchanged.replies.values():
            self._note("agent", data)
            reply = decode(data, Reply, Refusal)
            if isinstance(reply, Reply):
                self._note("agent", reply.body)
            else:
                self.refusals.append(reply.code)
        return exchanged

    def _note(self, sender: str, data: bytes) -> str:
        name = name_of(data)
        self.sent.setdefault((sender, name), []).append(data)
        return name

    @property
    def messages(self) -> set[tuple[str, str]]:
        """Senders and classes of messages, without frames."""
        frames = {("server", "Request"), ("agent", "Reply"), ("agent", "Refusal")}
        return set(self.sent) - frames


@dataclass
class Recorded:
    """A finished run: what travelled, the server, and its last state."""

    wire: Wire
    server: Any
    end: Any


def recorded(study: Any, names: tuple[AgentId, ...] = NAMES) -> Recorded:
    """A run of a study on this machine."""
    server = study.server(SPACE, names)
    wire = _wire(study, names)
    return Recorded(wire, server, drive(server, wire))


def refused(study: Any, server: Any = None) -> Wire:
    """What travels when all sites refuse what the server of a study, or another, says first."""
    made = study.server(SPACE, NAMES)
    wire = _wire(study, NAMES)
    with pytest.raises(ProtocolError, match="All 3 agents that answer refuse to begin"):
        drive(made if server is None else server, wire)
    return wire


def _wire(study: Any, names: tuple[AgentId, ...]) -> Wire:
    agents = {name: study.agent(name, SPACE, 0, MemoryBlobs()) for name in names}
    return Wire(InProcess([Site(name, agent, bowl) for name, agent in agents.items()]))
