"""A small protocol for tests: the server shrinks a box around the best point anybody found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from botorch_fed.protocols.base import Pending
from botorch_fed.rng import generator


@dataclass(frozen=True, eq=False)
class Ask:
    centre: Tensor
    width: float


@dataclass(frozen=True, eq=False)
class Best:
    X: Tensor
    value: float


@dataclass(frozen=True, eq=False)
class AgentState:
    t: int
    todo: int
    centre: Tensor
    width: float
    best: Best | None


@dataclass(frozen=True)
class BoxAgent:
    seed: int
    dim: int = 2
    per_round: int = 3
    busy_rounds: tuple[int, ...] = ()
    state_type: type[AgentState] = AgentState
    accepts: tuple[type, ...] = (Ask,)

    def start(self) -> AgentState:
        return AgentState(0, 0, torch.full((self.dim,), 0.5).double(), 1.0, None)

    def receive(self, state: AgentState, request: Ask) -> AgentState:
        return AgentState(state.t + 1, self.per_round, request.centre, request.width, state.best)

    def ask(self, state: AgentState) -> Tensor | Pending | None:
        if state.t in self.busy_rounds:
            return Pending()
        if state.todo == 0:
            return None
        step = generator(self.seed, state.t, state.todo).uniform(1, self.dim) - 0.5
        return (state.centre + state.width * step).clamp(0, 1)

    def tell(self, state: AgentState, X: Tensor, Y: Tensor) -> AgentState:
        best = state.best
        if best is None or float(Y) > best.value:
            best = Best(X[0], float(Y))
        return replace(state, todo=state.todo - 1, best=best)

    def reply(self, state: AgentState) -> tuple[AgentState, Best]:
        assert state.best is not None
        return state, state.best


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

    def start(self) -> ServerState:
        return ServerState(0, None, ())

    def outbox(self, state: ServerState) -> Mapping[str, Ask] | None:
        if state.t == self.rounds:
            return None
        centre = torch.full((self.dim,), 0.5).double() if state.best is None else state.best.X
        return {agent: Ask(centre, 0.7**state.t) for agent in self.agents}

    def step(self, state: ServerState, inbox: Mapping[str, Best]) -> ServerState:
        best = state.best
        for _, message in sorted(inbox.items()):
            if best is None or message.value > best.value:
                best = message
        return ServerState(state.t + 1, best, (*state.heard, len(inbox)))
