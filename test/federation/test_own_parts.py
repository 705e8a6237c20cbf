"""A search and an aggregation of one's own, in 40 lines each and without an edit elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from botorch_fed.aggregation.relay import Relay
from botorch_fed.federation.terms import Aggregation, Contribution, Order, Party, Search, View
from botorch_fed.protocols.base import AgentId, Objective
from botorch_fed.protocols.transfer_search import Advice, TransferSearch, prior_of_sum
from botorch_fed.run import run
from botorch_fed.search.messages import Message, TransferRows
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import Federation

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.integer("b", 0, 9)))


def hill(X: Tensor) -> Tensor:
    return 1 - 6 * (X - 0.3).square().sum(dim=-1, keepdim=True)


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

    def heard(self, view: View) -> bool:
        """Whether there is a median."""
        return view.release is not None

    def _advice(self, view: View) -> Advice | None:
        if view.release is None:
            return None
        prior = prior_of_sum(view.terms.feature_map, view.release.values, 1)
        return None if prior is None else Advice(prior)


@pytest.mark.parametrize("candidates", [None, torch.rand(9, 2).double()])
def test_a_random_search_of_ones_own(candidates: Tensor | None) -> None:
    study = Federation(budget=7, search=RandomSearch(), aggregation=Relay(), candidates=candidates)
    objectives: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    result = run(study, objectives, seed=0, space=SQUARE)
    again = run(study, objectives, seed=0, space=SQUARE)
    for name in NAMES:
        X, _ = result.history(name)
        assert X.shape == (7, 2)
        assert torch.equal(X, again.history(name)[0])
    assert not torch.equal(result.history("ann")[0], result.history("bob")[0])


def test_a_median_of_ones_own() -> None:
    study = Federation(budget=7, search=MedianTransfer(), aggregation=Median())
    objectives: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    result = run(study, objectives, seed=0, space=SQUARE)
    assert {row["failure"] for row in result.rounds} == {None}
    for name in NAMES:
        assert len(result.history(name)[0]) == 7
        assert float(result.best(name)[-1]) > 0.9
