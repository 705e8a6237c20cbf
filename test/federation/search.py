"""A small protocol for tests: the server shrinks a box around the best point anybody found.

Its agent remembers every value it was told, so that a lost or doubled observation shows; replies
are drawn from a counter outside of the state, so that a second draw shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from botorch_fed.errors import MessageError
from botorch_fed.federation.base import Outbox, Pending
from botorch_fed.rng import generator
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.store import Blobs, MemoryBlobs


@dataclass(frozen=True, eq=False)
class Plan:
    """What all agents know; a broadcast."""

    width: float


@dataclass(frozen=True, eq=False)
class Ask:
    centre: Tensor


@dataclass(frozen=True, eq=False)
class Best:
    X: Tensor
    value: float
    draw: int  # how many replies this agent has drawn in its life, over all crashes


@dataclass(frozen=True, eq=False)
class AgentState:
    t: int
    todo: int
    centre: Tensor
    width: float
    X: Tensor
    Y: Tensor


@dataclass(eq=False)
class BoxAgent:
    seed: int
    dim: int = 2
    per_round: int = 3
    q: int = 1
    busy_rounds: tuple[int, ...] = ()
    blobs: Blobs = field(default_factory=MemoryBlobs)
    draws: int = 0
    defers: bool = False
    state_type: type[AgentState] = AgentState
    accepts: tuple[type, ...] = (Ask,)

    @property
    def space(self) -> SearchSpace:
        return SearchSpace(tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(self.dim)))

    @property
    def fingerprint(self) -> str:
        return f"{self.seed}/{self.dim}/{self.per_round}/{self.q}"

    def start(self) -> AgentState:
        empty = torch.zeros(0, self.dim).double()
        return AgentState(0, 0, torch.full((self.dim,), 0.5).double(), 1.0, empty, empty[:, :1])

    def check(self, state: AgentState, request: Ask, broadcasts: tuple[str, ...]) -> None:
        if request.centre.shape != (self.dim,):
            raise MessageError(f"Expected {self.dim} coordinates, got {len(request.centre)}.")

    def receive(self, state: AgentState, request: Ask, broadcasts: tuple[str, ...]) -> AgentState:
        plan: Plan = self.blobs.load(broadcasts[0], Plan)
        return replace(
            state, t=state.t + 1, todo=self.per_round, centre=request.centre, width=plan.width
        )

    def wants(self, state: AgentState) -> bool:
        return state.todo > 0

    def ask(self, state: AgentState, pending: Tensor) -> Tensor | Pending | None:
        if state.t in self.busy_rounds:
            return Pending()
        if state.todo * self.q <= len(pending):
            return None
        step = (
            generator(self.seed, state.t, state.todo, len(pending)).uniform(self.q, self.dim) - 0.5
        )
        return (state.centre + state.width * step).clamp(0, 1)

    def tell(
        self, state: AgentState, X: Tensor, Y: Tensor, sem: Tensor | None = None
    ) -> AgentState:
        good = ~Y.isnan().flatten()
        return replace(self.attach(state, X[good], Y[good]), todo=max(0, state.todo - 1))

    def attach(
        self, state: AgentState, X: Tensor, Y: Tensor, sem: Tensor | None = None
    ) -> AgentState:
        return replace(state, X=torch.cat([state.X, X]), Y=torch.cat([state.Y, Y]))

    def reply(self, state: AgentState) -> tuple[AgentState, Best]:
        self.draws += 1
        if not len(state.Y):
            return state, Best(state.centre, -1e9, self.draws)
        row = int(state.Y.argmax())
        return state, Best(state.X[row], float(state.Y[row]), self.draws)


@dataclass(frozen=True, eq=False)
class ServerState:
    t: int
    best: Best | None
    heard: tuple[int, ...]


@dataclass(frozen=True)
class BoxServer:
    agents: tuple[str, ...]
    rounds: int
    dim: int = 2
    state_type: type[ServerState] = ServerState
    accepts: tuple[type, ...] = (Best,)

    @property
    def fingerprint(self) -> str:
        return f"{self.agents}/{self.dim}"

    def start(self) -> ServerState:
        return ServerState(0, None, ())

    def outbox(self, state: ServerState) -> Outbox | None:
        if state.t == self.rounds:
            return None
        centre = torch.full((self.dim,), 0.5).double() if state.best is None else state.best.X
        return Outbox({agent: Ask(centre) for agent in self.agents}, (Plan(0.7**state.t),))

    def check(self, state: ServerState, sender: str, message: Best) -> None:
        if message.X.shape != (self.dim,):
            raise MessageError(f"Expected {self.dim} coordinates, got {len(message.X)}.")

    def step(self, state: ServerState, inbox: Mapping[str, Best]) -> ServerState:
        best = state.best
        for _, message in sorted(inbox.items()):
            if best is None or message.value > best.value:
                best = message
        return ServerState(state.t + 1, best, (*state.heard, len(inbox)))
