r"""The hub's side of every protocol: it sends the terms and the aggregation's orders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from botorch.exceptions.errors import InputDataError

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.base import AgentId, Outbox
from botorch_fed.federation.disclosure import Price, Sees
from botorch_fed.federation.terms import Party, Resources, Roster, Terms
from botorch_fed.models import FeatureMap
from botorch_fed.privacy import Entry, Guarantee, SharedLedger
from botorch_fed.wire.codec import content_hash, encode

_ROUND = "round"  # cache key of the round of a state, computed once for all replies


@dataclass(frozen=True, eq=False)
class _Round:
    """The round of a state: the party with its roster, the state of the round, its orders.

    Attributes:
        by: The server that computed it.
        of: The state before agents join.
        hub: The party.
        state: The state with the agents that join.
        orders: The order of each agent; None at the end.
    """

    by: FederatedServer
    of: Any
    hub: Party
    state: Any
    orders: Mapping[AgentId, Any] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedServer:
    """The hub of a federation.

    Args:
        terms: The terms, with a roster and without a promise, which the server makes.
        resources: The hub's private resources.
    """

    terms: Terms
    resources: Resources = field(default_factory=Resources)
    _parties: dict[tuple[AgentId, ...], Party] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.terms.agents:
            raise InputDataError("Expected at least one agent, got none.")
        if self.terms.promise is not None:
            raise InputDataError("Expected terms without a promise: the server makes the promise.")
        _ = self.hub  # raises if the promise cannot be made or paid

    @property
    def state_type(self) -> type[Any]:
        """The type of the aggregation's state."""
        return self.terms.aggregation.state_type

    @property
    def accepts(self) -> tuple[type, ...]:
        """The types of the aggregation's replies."""
        return self.terms.aggregation.reply_types

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the settings except the budget and, where agents may join, the roster."""
        setup = self.hub.terms.setup
        if self.opens:
            setup = replace(setup, agents=())
        settings = (content_hash(encode(setup)), self.resources.noise.private)
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    @cached_property
    def reply_bytes(self) -> int:
        """The bytes of the longest reply that a site may send, without its frame."""
        return self.terms.aggregation.reply_bytes(self.hub)

    @property
    def opens(self) -> bool:
        """Whether agents may join while the study runs."""
        return self.terms.aggregation.opens

    @property
    def why_closed(self) -> str:
        """Why agents may not join."""
        return self.terms.aggregation.why_closed

    @cached_property
    def hub(self) -> Party:
        """The party of all agents, with its promise in the terms."""
        return self._party(self.terms.agents)

    def _party(self, agents: tuple[AgentId, ...]) -> Party:
        """The party of a roster."""
        if agents not in self._parties:
            terms = self.terms
            if agents != terms.agents:
                terms = replace(terms, agents=agents)
            hub = Party(terms, None, self.resources)
            terms = replace(terms, promise=self.terms.aggregation.promise(hub))
            self._parties[agents] = replace(hub, terms=terms)
        return self._parties[agents]

    @property
    def shared_ledger(self) -> SharedLedger | None:
        """The ledger on disk from which releases are paid."""
        return self.resources.shared_ledger

    @property
    def promise(self) -> Guarantee | None:
        """The guarantee of the whole run; None if it is not private."""
        return self.hub.terms.promise

    @property
    def feature_map(self) -> FeatureMap:
        """The shared basis."""
        return self.terms.feature_map

    def __repr__(self) -> str:
        promise = "no privacy guarantee" if self.promise is None else str(self.promise)
        parts = f"{type(self.terms.search).__name__} x {type(self.terms.aggregation).__name__}"
        return (
            f"FederatedServer({parts}, agents={len(self.terms.agents)}, "
            f"budget={self.terms.budget}, {promise})"
        )

    @property
    def signal_words(self) -> str:
        """A plan's sentence on signal and noise, or empty."""
        return self.terms.aggregation.signal_words(self.hub)

    def privacy(self, state: Any) -> dict[str, Any] | None:
        """The promise and the payments, for a report."""
        return self.terms.aggregation.account(self.hub, state)

    @property
    def sees(self) -> Sees:
        """The readers of all messages."""
        return self.terms.aggregation.sees(self.hub.terms)

    @property
    def price(self) -> Price | None:
        """The privacy cost of a run; None without noise."""
        return self.terms.aggregation.price(self.hub.terms)

    def paid(self, state: Any) -> tuple[Entry, ...]:
        """All payments so far, of the unit with the most payments."""
        return self.terms.aggregation.paid(self.hub, state)

    # -------------------------------------------------------------- the rounds

    def start(self) -> Any:
        """The state before the first round."""
        return self.terms.aggregation.start(self.hub)

    def resumed(self, state: Any) -> Any:
        """The state; after its last round, with the agents that join and a larger budget."""
        state = self.terms.aggregation.resumed(self.hub, state)
        return self._current(state).state

    def outbox(self, state: Any) -> Outbox | None:
        """The orders of the round, with the terms and the releases; None at the end."""
        now = self._current(state)
        if now.orders is None:
            return None
        released = self.terms.aggregation.broadcasts(now.hub, now.state)
        return Outbox(now.orders, (now.hub.terms.setup, *released))

    def check(self, state: Any, sender: AgentId, message: Any) -> None:
        """Raise `MessageError` unless a reply was asked for and can be combined."""
        now = self._current(state)
        if now.orders is None or sender not in now.orders:
            raise MessageError("Expected no reply of an agent without an order, got one.")
        self.terms.aggregation.check(now.hub, now.state, sender, message, now.orders[sender])

    def step(self, state: Any, inbox: Mapping[AgentId, Any]) -> Any:
        """The state after a round; an agent that is not in the inbox did not answer."""
        now = self._current(state)
        new = self.terms.aggregation.combine(now.hub, now.state, inbox)
        if self.opens:
            new = replace(new, roster=now.state.roster.after(now.orders or {}))
        return self._admitted(new)

    # -------------------------------------------------------------- the roster

    def _current(self, state: Any) -> _Round:
        """The round of a state.

        Agents join between two rounds: an interrupted round is repeated with its old roster, and
        the same bytes. After the last round no round is repeated.
        """
        cached: _Round | None = self.resources.cache.get(_ROUND)
        if cached is None or cached.by is not self or cached.of is not state:
            cached = self.resources.cache[_ROUND] = self._round(state)
        return cached

    def _round(self, state: Any) -> _Round:
        aggregation, hub = self.terms.aggregation, self.hub
        if self.opens:
            hub = self._party(self._members(state).agents)
        orders = aggregation.orders(hub, state)
        if orders is not None or hub is self.hub:
            return _Round(self, state, hub, state, orders)
        joined = self._admitted(state)
        return _Round(self, state, self.hub, joined, aggregation.orders(self.hub, joined))

    def _admitted(self, state: Any) -> Any:
        """The state with all agents of the study."""
        if not self.opens:
            return state
        return replace(state, roster=self._members(state).grown(self.terms.agents, state.t))

    def _members(self, state: Any) -> Roster:
        """The roster of a state, which must be the first part of the study's agents."""
        roster: Roster = state.roster
        if self.terms.agents[: len(roster.agents)] != roster.agents:
            raise ProtocolError(
                f"The run has the agents {list(roster.agents)[:8]}, this study has "
                f"{list(self.terms.agents)[:8]}: name those of the run first, in their order, and "
                "new ones after them."
            )
        return roster
