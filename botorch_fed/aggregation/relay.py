r"""Messages are passed on as they are: all agents read the newest message of each agent.

::

    message        from -> to       content                                readable by
    Setup          server -> agent  the terms and the shared basis         all
    Order          server -> agent  whether to query, whether to say       that agent
    Contribution   agent -> server  one vector                             server
    Rows           server -> agent  the newest vectors of all agents       all agents

The first round collects a message of everyone who has data; then every round lets the active
agents query once. An agent that joins later is asked for a message in its first round, and makes as
many evaluations as the others.

Guarantee: none. Trust: honest server and agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.errors import MessageError
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.disclosure import ADDRESSEE, EVERYBODY, Reveals, Row, Sees
from botorch_fed.federation.terms import (
    MAX_EVALUATIONS,
    Aggregation,
    Contribution,
    Limits,
    Order,
    Party,
    Roster,
    Setup,
    Terms,
)
from botorch_fed.search.releases import Rows


@dataclass(frozen=True, eq=False)
class RelayState:
    """What the hub keeps.

    Attributes:
        t: Finished rounds, the collection included.
        received: The newest messages.
        roster: Who takes part, since when, and how often each was asked.
    """

    t: int
    received: Rows | None
    roster: Roster


@dataclass(frozen=True)
class Relay(Aggregation):
    """Pass messages on.

    Attributes:
        every: A new message of the active agents every so many rounds; 0 for none after the start.
    """

    every: int = 1

    state_type = RelayState
    broadcast_types = (Rows,)
    opens = True

    def __post_init__(self) -> None:
        if self.every < 0:
            raise InputDataError(f"every counts rounds from 0, got {self.every}.")

    def start(self, hub: Party) -> RelayState:
        """The state before the collection."""
        return RelayState(0, None, Roster.of(hub.terms.agents))

    def orders(self, hub: Party, state: RelayState) -> Mapping[AgentId, Order] | None:
        """The collection, then one query per active agent and round."""
        t, joining = state.t, state.roster.joining(state.t)
        if t == 0:
            return dict.fromkeys(joining, Order(0, "nothing", True))
        regular = self.every > 0 and t % self.every == 0
        orders = dict.fromkeys(joining, Order(t, "nothing", True))
        for agent in state.roster.querying(hub.terms):
            orders[agent] = Order(t, "next", regular or agent in joining)
        return orders or None

    def broadcasts(self, hub: Party, state: RelayState) -> tuple[Any, ...]:
        """The newest messages."""
        return () if state.received is None else (state.received,)

    def combine(
        self, hub: Party, state: RelayState, inbox: Mapping[AgentId, Contribution]
    ) -> RelayState:
        """Replace the rows of those who replied; an absent agent keeps its old row."""
        rows = {} if state.received is None else state.received.by_agent
        new = {agent: (state.t, m.values) for agent, m in inbox.items() if m.values is not None}
        if not new:
            return replace(state, t=state.t + 1)
        rows = {**rows, **new}
        names = [agent for agent in hub.terms.agents if agent in rows]
        received = Rows(
            tuple(names),
            tuple(rows[agent][0] for agent in names),
            torch.stack([rows[agent][1] for agent in names]),
        )
        return replace(state, t=state.t + 1, received=received)

    def check_published(self, terms: Terms, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless every row is a message."""
        if len(published) > 1:
            raise MessageError(f"Expected one table of messages, got {len(published)}.")
        for rows in published:
            if min(rows.made, default=0) < 0:
                raise MessageError(f"Rounds count from 0, got {min(rows.made)}.")
            strangers = sorted(set(rows.agents) - set(terms.agents))
            if strangers:
                raise MessageError(f"Messages came of agents that are none: {strangers[:8]}.")
            for row in rows.weights:
                terms.search.check(terms, row)

    def limits(self, terms: Terms) -> Limits:
        """A query in each round, and a message before the first and in every `every`-th."""
        queries = terms.queries
        messages = 1 + (-(-queries // self.every) if self.every else 0)
        return Limits(MAX_EVALUATIONS, 0, queries, messages)

    def check_order(self, site: Party, order: Order, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless rounds go on, and messages are of rounds that are over."""
        if site.last is not None and order.t <= site.last.t:
            raise MessageError(f"Rounds go on from {site.last.t}, got round {order.t}.")
        regular = self.every > 0 and order.t % self.every == 0
        if order.contribute and site.last is not None and not regular:
            raise MessageError(
                f"A message is asked for every {self.every} rounds, got an order for one in round "
                f"{order.t}."
            )
        for rows in published:
            if max(rows.made, default=-1) >= order.t:
                raise MessageError(
                    f"Round {order.t} acts on earlier ones, got a message of round "
                    f"{max(rows.made)}."
                )

    def sees(self, terms: Terms) -> Sees:
        """Who sees what."""
        search = terms.search
        sent = f"each agent's message: {search.content(terms)}"
        said: Reveals = "nothing" if search.least is None else "data"
        newest = "the newest message of every agent, by name"
        return Sees(
            rows=(
                Row.of(Setup, "server", "search space, shared basis and settings", EVERYBODY),
                Row.of(Order, "server", "whether to query and whether to send", ADDRESSEE),
                Row.of(Contribution, "agent", sent, ("server",), said),
                Row.of(Rows, "server", newest, EVERYBODY, said),
            ),
            trust="The server and all agents are trusted with every message.",
            limits=search.limits(terms),
        )

    def silent(self, queries: int, begun: bool) -> str:
        """Why no message would ever be sent, and what to write; empty if one would be."""
        if begun or 0 < self.every <= queries:
            return ""
        why = f"every = {self.every} is more than the {queries} rounds"
        if not self.every:
            why = "every = 0 asks for messages before the start alone"
        return (
            f"{why}, and no site has the data for one before the start. Write every = 1, or give "
            "data."
        )
