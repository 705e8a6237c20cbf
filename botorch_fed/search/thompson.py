r"""Federated Thompson sampling [Dai2020FTS]_ as published, and messages as a prior before it.

In query `t` a site follows its own posterior with probability :math:`p_t` and otherwise a function
that another site has sent, each at most once. Before that, `Strategy` has messages as the prior of
the own model.

Differs from the paper: one map of inputs and outcomes for all (`SearchSpace`), so that messages
mean the same thing; shared features with public hyperparameters that were chosen for transfer; own
steps pathwise with the exact kernel; hyperparameters of the own model have priors. The paper's
settings are ``benchmarks/papers/published/settings.py`` with ``kind="sample"``.

References:
    * [Dai2020FTS]_ Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
      sampling. NeurIPS 2020. https://arxiv.org/abs/2010.10154
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import InputDataError
from botorch.models import SingleTaskGP
from torch import Tensor

from botorch_fed.acquisition import Constant, ThompsonSampling, weight_path
from botorch_fed.federation.terms import OWN, Terms, View
from botorch_fed.models import (
    FeatureMap,
    LogWarp,
    MessagePriorGP,
    OwnHyperparameters,
    WarpedKernel,
    fit_own_gp,
    own_gp,
)
from botorch_fed.rng import Generator
from botorch_fed.search.local import OwnStrategy, expected_improvement, random_point
from botorch_fed.search.messages import SUMMARIES, Others, RowSearch

RESIDUAL_PRIOR = (-1.2, 1.0)  # of what messages leave open: normal, of the log output scale
Origin = Literal["random", "prior", "own", "ensemble"] | int  # a number is a row of messages


@dataclass(frozen=True, kw_only=True)
class Strategy(OwnStrategy):
    r"""How an agent uses messages and its own data; its own business, nobody else needs to know.

    Queries are counted from 1. Up to query `prior_until` messages are the prior of the own model,
    with expected improvement; from then on, and without messages or own data, a coin with
    probability :math:`p_t` decides between the own model alone and one message. Without own data
    the own model is a random point.

    Attributes:
        transfer: ``"mixture"`` as above; ``"rgpe"`` and ``"taf"`` are the baselines, which take
            summaries as messages and use them in every query.
        prior_until: The last query with messages as a prior; 0 for none, as published.
    """

    transfer: Literal["mixture", "rgpe", "taf"] = "mixture"
    prior_until: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transfer not in ("mixture", "rgpe", "taf"):
            raise InputDataError(
                f'transfer must be "mixture", "rgpe" or "taf", got {self.transfer!r}.'
            )
        if self.own == "random" and self.transfer != "mixture":
            raise InputDataError("RGPE and TAF need an own model: own must not be random.")
        if self.prior_until < 0:
            raise InputDataError("prior_until counts from 0.")


@dataclass(frozen=True, eq=False)
class ThompsonMemory:
    """What a site remembers.

    Attributes:
        used: The round in which the last used message of an agent was made.
        using: The same of the messages that the next query uses.
        own: Hyperparameters of the own model.
    """

    used: Mapping[str, int]
    using: Mapping[str, int]
    own: OwnHyperparameters | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class ThompsonSearch(RowSearch):
    """Own Thompson samples and messages by turns.

    Attributes:
        strategy: How a site uses messages and data.
    """

    strategy: Strategy = field(default=Strategy(), metadata=OWN)

    memory_type = ThompsonMemory

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless the messages are those that the strategy needs."""
        kind, transfer = self.messages.kind, self.strategy.transfer
        fits = (kind in SUMMARIES) == (transfer != "mixture") and kind != "own_mean"
        if not fits:
            raise InputDataError(
                f"This strategy, {transfer!r}, does not go with messages of kind {kind!r}."
            )
        if transfer == "taf" and kind != "summary_and_incumbent":
            raise InputDataError("TAF needs messages of kind 'summary_and_incumbent'.")

    @property
    def alone(self) -> bool:
        """Whether no query ever uses a message."""
        how = self.strategy
        never = isinstance(how.schedule, Constant) and how.schedule.p == 1
        return how.transfer == "mixture" and how.prior_until == 0 and never

    # -------------------------------------------------------------- what it remembers

    def start(self, view: View) -> ThompsonMemory:
        """Nothing was used or fitted."""
        return ThompsonMemory({}, {}, None)

    def received(self, view: View) -> ThompsonMemory:
        """The messages that the next query uses are those of its origins."""
        memory, others = _memory(view), self.others(view)
        if others is None or view.n < view.first:
            return replace(memory, using={})
        rows = [origin for origin in self._origins(view, others) if isinstance(origin, int)]
        return replace(memory, using={others.agents[row]: others.made[row] for row in rows})

    def answered(self, view: View) -> ThompsonMemory:
        """Messages are used once."""
        memory = _memory(view)
        return replace(memory, used={**memory.used, **memory.using}, using={})

    def told(self, view: View) -> ThompsonMemory:
        """New hyperparameters, where the data ask for them."""
        memory = _memory(view)
        own = self.strategy.refit(
            view.terms.space, view.X, view.Y, memory.own, seed=view.seed, name=view.name
        )
        return replace(memory, own=own)

    # -------------------------------------------------------------- where the next point comes from

    def _origins(self, view: View, others: Others | None) -> list[Origin]:
        """For every point of the next query where it comes from.

        A function of the view alone, so that `received` knows what `point` will do.
        """
        q, t = view.terms.q, view.query + 1 - view.first // view.terms.q
        if others is not None and len(view.X) > 0:
            if self.strategy.transfer != "mixture":
                return ["ensemble"] * q
            if t <= self.strategy.prior_until:
                return ["prior"] * q
        origins: list[Origin] = []
        weights = self._fresh(view, others)
        for slot in range(q):
            coin, which = view.stream("coin", view.query, slot).uniform(2).tolist()
            cumulative = weights.cumsum(0)
            total = float(cumulative[-1]) if len(weights) else 0.0
            if coin >= self.strategy.schedule(t) and total > 0:
                row = int(torch.searchsorted(cumulative, which * total, right=True))
                origins.append(row)
                weights[row] = 0  # each message once
            else:
                alone = len(view.X) > 0 and self.strategy.own != "random"
                origins.append("own" if alone else "random")
        return origins

    def _fresh(self, view: View, others: Others | None) -> Tensor:
        r""":math:`P_N` over the messages that were not used yet, not normalised."""
        if others is None:
            return torch.zeros(0).double()
        used = _memory(view).used
        fresh = [
            float(made > used.get(agent, -1))
            for agent, made in zip(others.agents, others.made, strict=True)
        ]
        return others.agent_weights * torch.tensor(fresh, dtype=torch.float64)

    def point(self, view: View) -> Tensor:
        """The next point, `1 x d`."""
        others = self.others(view)
        origin = self._origins(view, others)[view.slot]
        stream = view.stream("point", view.query, view.slot)
        if origin == "random":
            return random_point(view.terms.space, view.candidates, stream)
        return self.strategy.maximizer(
            self._acquisition(view, others, origin, stream),
            view.terms.space,
            torch.cat([view.X, view.chosen]),
            candidates=view.candidates,
            stream=stream,
            succeeded=view.X,
            failed=view.failed,
        )

    def _acquisition(
        self, view: View, others: Others | None, origin: Origin, stream: Generator
    ) -> AcquisitionFunction:
        if origin == "own":
            return self.strategy.acquisition(self.model(view), view.X, view.chosen, stream)
        assert others is not None
        if isinstance(origin, int):
            return ThompsonSampling(weight_path(others.feature_map, others.message(origin)))
        if origin == "ensemble":
            return self._ensemble(view, others, stream)
        warp = self.strategy.log_warp(view.terms.space)
        model = prior_model(others.feature_map, others.weights, view.X, view.Y, log_warp=warp)
        return expected_improvement(model, view.X, view.chosen)

    def _ensemble(self, view: View, others: Others, stream: Generator) -> AcquisitionFunction:
        raise InputDataError("RGPE and TAF are searches of their own: use EnsembleSearch.")

    def model(self, view: View) -> SingleTaskGP:
        """The own Gaussian process."""
        known = _memory(view).own
        assert known is not None
        return self.strategy.model(view.terms.space, view.X, view.Y, known)


def _memory(view: View) -> ThompsonMemory:
    memory = view.memory
    assert isinstance(memory, ThompsonMemory)
    return memory


def prior_model(
    feature_map: FeatureMap,
    weights: Tensor,
    X: Tensor,
    Y: Tensor,
    *,
    log_warp: LogWarp,
) -> MessagePriorGP:
    """The model whose prior is the messages' mean and covariance, fitted to the own data.

    Args:
        feature_map: The shared basis.
        weights: The messages, `N x M`.
        X: Own points, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`.
        log_warp: The scale on which the residual kernel sees inputs.
    """
    messages = feature_map(X) @ weights.mT  # n x N
    mean = messages.mean(dim=-1, keepdim=True)
    root = (messages - mean) / max(len(weights) - 1, 1) ** 0.5
    Z = log_warp.transform(X)
    known = fit_own_gp(
        Z,
        Y,
        prior_mean=mean,
        prior_covariance=root @ root.mT,
        outputscale_prior=RESIDUAL_PRIOR,
    )
    own = own_gp(Z, Y, known)
    residual = own.covar_module
    model = MessagePriorGP(
        X,
        Y,
        feature_map=feature_map,
        weights=weights,
        mean=known.mean,
        residual_kernel=residual if log_warp.identity else WarpedKernel(residual, log_warp),
    )
    model.likelihood = own.likelihood
    model.requires_grad_(False)
    return model.eval()
