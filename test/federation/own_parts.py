"""A search and an aggregation of a user, in 40 lines each and without an edit elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from botorch_fed.federation.base import AgentId
from botorch_fed.federation.terms import Aggregation, Contribution, Order, Party, Search, View
from botorch_fed.search.messages import Message, TransferRows
from botorch_fed.search.transfer import Advice, TransferSearch, prior_of_sum

# ------------------------------------------------------------------ a search


@dataclass(frozen=True)
class RandomSearch(Search):
    """Uniform points; says nothing."""

    has_basis = False

    def point(self, view: View) -> Tensor:
        """A uniform point, or one of the candidates."""
        stream = view.stream("random", view.n)
        if view.candidates is None:
            return stream.uniform(1, view.terms.space.dim)
        row = int(stream.uniform(1) * len(view.candidates))
        return view.candidates[row : row + 1]


# ------------------------------------------------------------------ an aggregation


@dataclass(frozen=True, eq=False)
class Middle:
    """The coordinate-wise median of all messages of a round."""

    t: int
    values: Tensor


@dataclass(frozen=True, eq=False)
class MedianState:
    """Finished rounds, and the newest median."""

    t: int
    middle: Middle | None


@dataclass(frozen=True)
class Median(Aggregation):
    """One query and one message of each agent in a round."""

    state_type = MedianState
    broadcast_types = (Middle,)

    def start(self, hub: Party) -> MedianState:
        """Before the first round."""
        return MedianState(1, None)

    def orders(self, hub: Party, state: MedianState) -> Mapping[AgentId, Order] | None:
        """A query each, until the budget is used."""
        if state.t > hub.terms.queries:
            return None
        return dict.fromkeys(hub.terms.evaluating, Order(state.t, "next", True))

    def broadcasts(self, hub: Party, state: MedianState) -> tuple[Any, ...]:
        """The newest median."""
        return () if state.middle is None else (state.middle,)

    def combine(
        self, hub: Party, state: MedianState, inbox: Mapping[AgentId, Contribution]
    ) -> MedianState:
        """The median of those who had something to say."""
        given = [reply.values for reply in inbox.values() if reply.values is not None]
        if not given:
            return replace(state, t=state.t + 1)
        return MedianState(state.t + 1, Middle(state.t, torch.stack(given).median(dim=0).values))


# ------------------------------------------------------------------ a search that reads it


@dataclass(frozen=True, kw_only=True)
class MedianTransfer(TransferRows):
    """The default search with the median of all mean functions as its prior."""

    messages: Message = Message("mean")  # noqa: RUF009 - frozen
    strategy: TransferSearch = TransferSearch()  # noqa: RUF009 - frozen

    def has_messages(self, view: View) -> bool:
        """Whether there is a median."""
        return view.release is not None

    def _advice(self, view: View) -> Advice | None:
        if view.release is None:
            return None
        prior = prior_of_sum(view.terms.feature_map, view.release.values, 1)
        return None if prior is None else Advice(prior)
