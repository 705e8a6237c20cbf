r"""The hub's side of every protocol: it sends the terms, and leaves the rest to the aggregation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from botorch.exceptions.errors import InputDataError

from botorch_fed.errors import MessageError
from botorch_fed.federation.disclosure import Price, Sees
from botorch_fed.federation.terms import Party, Resources, Terms
from botorch_fed.models import FeatureMap
from botorch_fed.privacy import Entry, Guarantee
from botorch_fed.protocols.base import AgentId, Outbox
from botorch_fed.wire.codec import content_hash, encode

_ORDERS = "orders"  # in the cache: of which state, and themselves


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedServer:
    """The hub of a federation.

    Args:
        terms: The terms, with a roster and without a promise: the server makes it.
        resources: What the hub has and no other party knows.
    """

    terms: Terms
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        if not self.terms.agents:
            raise InputDataError("There must be at least one agent, got none.")
        if self.terms.promise is not None:
            raise InputDataError("The server makes the promise: leave it out of the terms.")
        _ = self.hub  # what cannot be promised or paid is refused now

    @property
    def state_type(self) -> type[Any]:
        """The aggregation's."""
        return self.terms.aggregation.state_type

    @property
    def accepts(self) -> tuple[type, ...]:
        """The replies of the aggregation."""
        return self.terms.aggregation.reply_types

    @cached_property
    def fingerprint(self) -> str:
        """Hash of its settings; the budget may grow."""
        settings = (content_hash(encode(self.hub.terms.setup)), self.resources.noise.private)
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    @cached_property
    def hub(self) -> Party:
        """The party, with its promise in the terms."""
        hub = Party(self.terms, None, self.resources)
        return replace(hub, terms=replace(self.terms, promise=self.terms.aggregation.promise(hub)))

    @property
    def promise(self) -> Guarantee | None:
        """What the whole run reveals at most; None if it is not private."""
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
        """What a plan says of signal and noise; empty if there is nothing to say."""
        return self.terms.aggregation.signal_words(self.hub)

    def privacy(self, state: Any) -> dict[str, Any] | None:
        """What a report needs: the promise and what was paid."""
        return self.terms.aggregation.account(self.hub, state)

    @property
    def sees(self) -> Sees | None:
        """Who sees what."""
        return self.terms.aggregation.sees(self.hub.terms)

    @property
    def price(self) -> Price | None:
        """What a run costs in privacy; None without noise."""
        return self.terms.aggregation.price(self.hub.terms)

    def paid(self, state: Any) -> tuple[Entry, ...]:
        """All payments so far of the unit that has paid most."""
        return self.terms.aggregation.paid(self.hub, state)

    # -------------------------------------------------------------- the rounds

    def start(self) -> Any:
        """The state before the first round."""
        return self.terms.aggregation.start(self.hub)

    def outbox(self, state: Any) -> Outbox | None:
        """The orders of the round, with the terms and what was released; None at the end."""
        orders = self._orders(state)
        if orders is None:
            return None
        released = self.terms.aggregation.broadcasts(self.hub, state)
        return Outbox(orders, (self.hub.terms.setup, *released))

    def check(self, state: Any, sender: AgentId, message: Any) -> None:
        """Raise `MessageError` unless a reply was asked for and can be combined."""
        orders = self._orders(state) or {}
        if sender not in orders:
            raise MessageError("A reply that nobody asked for.")
        self.terms.aggregation.check(self.hub, state, sender, message, orders[sender])

    def _orders(self, state: Any) -> Mapping[AgentId, Any] | None:
        """The orders of a state, worked out once for all replies of a round."""
        known, orders = self.resources.cache.get(_ORDERS, (None, None))
        if known is not state:
            orders = self.terms.aggregation.orders(self.hub, state)
            self.resources.cache[_ORDERS] = state, orders
        return orders

    def step(self, state: Any, inbox: Mapping[AgentId, Any]) -> Any:
        """The state after a round; an agent that is not in the inbox did not answer."""
        return self.terms.aggregation.combine(self.hub, state, inbox)
