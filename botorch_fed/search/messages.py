r"""Messages over the shared basis, and searches that read those of others row by row.

::

    kind                      numbers           of whom
    "own_mean"                M + 5             TransferSearch: the mean of the own model
    "mean", "sample"          M                 federated Thompson sampling as published
    "summary"                 M(M + 3)/2        RGPE
    "summary_and_incumbent"   M(M + 3)/2 + 1    TAF: the best value a site has observed, a leak
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import MessageError, NumericalError
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.terms import MAX_WEIGHT, OWN, Search, Terms, View, check_vector
from botorch_fed.models import (
    FeatureMap,
    Summary,
    WeightPosterior,
    sample_weights_dual,
    summarize,
)
from botorch_fed.models.numerics import cholesky
from botorch_fed.rng import Generator
from botorch_fed.search.releases import Rows
from botorch_fed.search.transfer import (
    MIN_OWN,
    Advice,
    Heard,
    TransferSearch,
    bounded,
    heard,
    mean_trust,
    prior_of_sum,
    report_size,
)

NOISE_VAR = 0.05  # that messages are made with by default, on the public scale
MessageKind = Literal["own_mean", "sample", "mean", "summary", "summary_and_incumbent"]
SUMMARIES = ("summary", "summary_and_incumbent")
SAID: dict[str, str] = {  # of a message, in words
    "own_mean": "the mean function of its own model",
    "mean": "the posterior mean of its weights",
    "sample": "a posterior sample of its weights",
}


# ------------------------------------------------------------------ messages


@dataclass(frozen=True)
class Message:
    r"""A kind of message, in public.

    Attributes:
        kind: See the module.
        noise_var: :math:`\sigma^2` of the model that weights and summaries are made with, on the
            public scale.
        beta: :math:`\beta_t`: scales the deviation of a sample from the mean.
    """

    kind: MessageKind = "mean"
    noise_var: float = NOISE_VAR
    beta: float = 1.0

    def __post_init__(self) -> None:
        if not (1e-12 <= self.noise_var <= 1e6 and 0 <= self.beta <= 1e3):
            raise InputDataError(
                "noise_var must lie between 1e-12 and 1e6 and beta between 0 and 1,000, got "
                f"{self.noise_var} and {self.beta}."
            )

    def size(self, feature_map: FeatureMap) -> int:
        """How many numbers it has."""
        M = feature_map.num_features
        if self.kind == "own_mean":
            return report_size(feature_map)
        if self.kind in SUMMARIES:
            return M * (M + 3) // 2 + (self.kind == "summary_and_incumbent")
        return M

    def make(
        self, feature_map: FeatureMap, X: Tensor, Y: Tensor, *, generator: Generator
    ) -> Tensor:
        """A message of any kind but ``"own_mean"``, which `TransferSearch` makes.

        Args:
            feature_map: The shared basis.
            X: Own points, `n x d`.
            Y: Own outcomes on the public scale, `n x 1`.
            generator: The site's own stream, for samples.
        """
        if self.kind in SUMMARIES:
            vector = summarize(feature_map, X, Y, noise_var=self.noise_var).pack()
            return vector if self.kind == "summary" else torch.cat([vector, Y.max().reshape(1)])
        return weight_message(
            self.kind,
            feature_map,
            X,
            Y,
            noise_var=self.noise_var,
            beta=self.beta,
            generator=generator,
        )

    def check(self, feature_map: FeatureMap, values: Tensor) -> None:
        """Raise `MessageError` unless a message can be used by others.

        Args:
            feature_map: The shared basis.
            values: What `make` made, or anything else.
        """
        limit = MAX_WEIGHT / min(self.noise_var, 1.0) if self.kind in SUMMARIES else MAX_WEIGHT
        what = f"A message of kind {self.kind!r}"
        check_vector(values, self.size(feature_map), what, limit)
        M = feature_map.num_features
        if self.kind == "own_mean":
            trust = values[M:]
            if not bool((trust >= 0).all()) or float(trust.sum()) > 1 + 1e-6:
                raise MessageError("Weights of trusts are not negative, and sum to one at most.")
        if self.kind in SUMMARIES:
            summary = Summary.unpack(values[: M * (M + 3) // 2], basis=feature_map.fingerprint)
            jitter = 1e-9 * (1 + summary.gram.diagonal().abs().max())
            try:
                cholesky(summary.gram + jitter * torch.eye(M).double(), "a received summary")
            except NumericalError as error:
                raise MessageError("The summary is no sum of squares of features.") from error


def weight_message(
    kind: MessageKind,
    feature_map: FeatureMap,
    X: Tensor,
    Y: Tensor,
    *,
    noise_var: float,
    beta: float,
    generator: Generator,
) -> Tensor:
    """The posterior mean of the shared basis' weights or a sample of them, `M` numbers.

    Args:
        kind: ``"mean"`` or ``"sample"``, see the module.
        feature_map: The shared basis.
        X: Own points, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`.
        noise_var: Noise variance on that scale.
        beta: Scale of a sample's deviation.
        generator: The agent's own stream, for samples.
    """
    if kind == "sample" and len(X) < feature_map.num_features:
        return sample_weights_dual(
            feature_map, X, Y, noise_var=noise_var, scale=beta, generator=generator
        )
    posterior = WeightPosterior.from_total(summarize(feature_map, X, Y, noise_var=noise_var))
    if kind == "mean":
        return posterior.mean
    return posterior.sample(scale=beta, generator=generator)


# ------------------------------------------------------------------ searches that read rows


@dataclass(frozen=True, eq=False)
class Others:
    """Messages of the other agents, with the weights that a site gives them."""

    feature_map: FeatureMap
    agents: tuple[AgentId, ...]
    made: tuple[int, ...]
    received: Rows  # of all agents: a copy for every agent would fill the memory
    rows: tuple[int, ...]
    agent_weights: Tensor

    def message(self, index: int) -> Tensor:
        """The message of one of `agents`."""
        return self.received.weights[self.rows[index]]

    @cached_property
    def weights(self) -> Tensor:
        """The messages of `agents`, one per row."""
        return self.received.weights[list(self.rows)]


@dataclass(frozen=True, kw_only=True)
class RowSearch(Search):
    """A search whose sites read each other's messages.

    Attributes:
        messages: The kind of message.
        agent_weights: :math:`P_N`: weights of the other agents, 0 or more; an agent that is not
            named has weight 0. Default equal.
    """

    messages: Message = Message()
    agent_weights: Mapping[AgentId, float] | None = field(default=None, metadata=OWN)

    def __post_init__(self) -> None:
        if any(not 0 <= w <= MAX_WEIGHT for w in (self.agent_weights or {}).values()):
            raise InputDataError(f"Weights of agents must lie between 0 and {MAX_WEIGHT:g}.")

    def size(self, terms: Terms) -> int:
        """How many numbers a message has; each modelled outcome has its part."""
        return len(terms.space.modelled) * self.messages.size(terms.feature_map)

    def check(self, terms: Terms, message: Tensor) -> None:
        """Raise `MessageError` unless others can use a message."""
        count = len(terms.space.modelled)
        if count > 1:
            check_vector(message, self.size(terms), "A message of all outcomes")
        for part in message.chunk(count) if count > 1 else (message,):
            self.messages.check(terms.feature_map, part)

    def content(self, terms: Terms) -> str:
        """What a message holds."""
        M, kind = terms.feature_map.num_features, self.messages.kind
        if kind in SAID:
            count = len(terms.space.modelled)
            return f"{SAID[kind]}, {M} numbers{f' for each of {count} outcomes' * (count > 1)}"
        best = " and the best observed value" if kind == "summary_and_incumbent" else ""
        return f"a summary of its data, {M * (M + 3) // 2} numbers{best}"

    def limits(self, terms: Terms) -> tuple[str, ...]:
        """What a message does not hide."""
        more = "From a summary of fewer observations than features the data can be recovered."
        return (*super().limits(terms), *([more] if self.messages.kind in SUMMARIES else []))

    def message(self, view: View) -> Tensor | None:
        """A function of all data of the site."""
        stream = view.stream("message", view.query)
        return self.messages.make(view.terms.feature_map, view.X, view.Y, generator=stream)

    def has_messages(self, view: View) -> bool:
        """Whether there is a message of somebody else."""
        return self.others(view) is not None

    def others(self, view: View) -> Others | None:
        """The messages of the others, those of weight 0 left out."""
        received, given = view.release, self.agent_weights
        if received is None:
            return None
        weights = {
            row: 1.0 if given is None else given.get(agent, 0.0)
            for row, agent in enumerate(received.agents)
            if agent != view.name
        }
        rows = [row for row, weight in weights.items() if weight > 0]
        if not rows:
            return None
        return Others(
            view.terms.feature_map,
            tuple(received.agents[row] for row in rows),
            tuple(received.made[row] for row in rows),
            received,
            tuple(rows),
            torch.tensor([weights[row] for row in rows], dtype=torch.float64),
        )


@dataclass(frozen=True, kw_only=True)
class TransferRows(RowSearch):
    """The default search (`TransferSearch`), where messages arrive one by one.

    Attributes:
        messages: Default the mean of the own model. Not a summary.
        strategy: How a site uses messages and data.
    """

    messages: Message = Message("own_mean")
    strategy: TransferSearch = field(default=TransferSearch(), metadata=OWN)

    many_outcomes = True
    takes_fidelity = True

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` for messages that are no functions, or not of the target."""
        self.strategy.check_space(terms.space)
        if self.messages.kind != "own_mean":
            terms.space.refuse_several(
                f"A message of kind {self.messages.kind!r}", 'use "own_mean", the default.'
            )
        fidelity = terms.space.fidelity
        if fidelity is not None and self.messages.kind != "own_mean":
            raise InputDataError(
                f"Messages of kind {self.messages.kind!r} take no fidelity ({fidelity.name!r}): "
                "leave message out."
            )
        if self.messages.kind in SUMMARIES:
            raise InputDataError(
                f"TransferSearch does not go with messages of kind {self.messages.kind!r}: leave "
                "message out."
            )

    @property
    def least(self) -> int:
        """How many observations a first message needs: those of an own model."""
        return MIN_OWN if self.messages.kind == "own_mean" else 1

    @property
    def alone(self) -> bool:
        """Whether sites do not listen."""
        return not self.strategy.listen

    def message(self, view: View) -> Tensor | None:
        """The mean of the own model and the weights of its trusts, or a published message."""
        if self.messages.kind != "own_mean":
            return super().message(view)
        terms = view.terms
        return self.strategy.report(
            terms.space, terms.feature_map, view.X, view.Y, self._advice(view), Yvar=view.Yvar
        )

    def trust(self, terms: Terms, message: Tensor) -> float | None:
        """The mean of the trusts by the weights in an own message, over the modelled outcomes."""
        if self.messages.kind != "own_mean":
            return None
        return mean_trust(message.chunk(len(terms.space.modelled)))

    def point(self, view: View) -> Tensor:
        """The next point, `1 x d`."""
        return self.strategy.point(
            view.terms.space,
            view.X,
            view.Y,
            self._advice(view),
            chosen=view.chosen,
            failed=view.failed,
            candidates=view.candidates,
            stream=view.stream("point", view.query, view.slot),
            Yvar=view.Yvar,
            room=view.room,
        )

    def _advice(self, view: View) -> Heard:
        """The mean of the others' functions of each modelled outcome, and their trusts."""
        others = self.others(view)
        if others is None:
            return None
        shares, count = (
            others.agent_weights / others.agent_weights.sum(),
            len(view.terms.space.modelled),
        )
        bounds = _bounded_rows(others.feature_map, others.received, count)
        blocks = zip(bounds, others.weights.chunk(count, dim=-1), strict=True)
        return heard([_advice_of(others, shares, *both, view.t - 1) for both in blocks])


def _advice_of(
    others: Others, shares: Tensor, weights: Tensor, block: Tensor, now: int
) -> Advice | None:
    """What others say of one outcome: a mean of functions, and what their trusts have earned."""
    prior = prior_of_sum(others.feature_map, shares @ weights[list(others.rows)], 1)
    if prior is None:
        return None
    trust = len(others.rows) * shares @ block[:, others.feature_map.num_features :]
    return Advice.of(prior, trust, made=max(others.made), now=now)


@lru_cache(maxsize=4)
def _bounded_rows(feature_map: FeatureMap, received: Rows, num_modelled: int) -> tuple[Tensor, ...]:
    """The received weight vectors of each modelled outcome, none louder than a site can be.

    Once for all agents.
    """
    M, blocks = feature_map.num_features, received.weights.chunk(num_modelled, dim=-1)
    return tuple(bounded(feature_map, block[:, :M]) for block in blocks)
