r"""Federated Thompson sampling [Dai2020FTS]_.

    message       from -> to       content                                     readable by
    Setup         server -> agent  search space, shared basis, noise, kind     all
    Query         server -> agent  whether to query, whether to upload         that agent
    Upload        agent -> server  one weight vector, M numbers                server
    Received      server -> agent  the weight vectors of all agents            all agents

The baselines RGPE and TAF run on the same messages, with a summary of M(M + 3)/2 numbers in the
place of a weight vector (`Setup.message`) and `Strategy.transfer`.

In round `t` an agent follows its own posterior with probability :math:`p_t` and otherwise a
function that another agent has sent, each at most once. Before that, `Strategy` has messages as the
prior of the own model.

Guarantee: none. A weight vector is a function of the agent's data plus posterior noise that
vanishes with them. Trust: honest server and agents.

Differs from the paper: one map of inputs and outcomes for all (`SearchSpace`), so that messages
mean the same thing; shared features with public hyperparameters that were chosen for transfer; own
steps pathwise with the exact kernel; hyperparameters of the own model have priors. The paper's
settings are ``benchmarks/papers/published/settings.py`` with `message="sample"`.

.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020. https://arxiv.org/abs/2010.10154
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import BotorchError, InputDataError
from botorch.models import SingleTaskGP
from torch import Tensor

from botorch_fed.acquisition import (
    Constant,
    ThompsonSampling,
    TransferAcquisition,
    weight_path,
)
from botorch_fed.errors import FederatedError, MessageError, NumericalError
from botorch_fed.federation.disclosure import ADDRESSEE, EVERYBODY, Price, Row, Sees
from botorch_fed.models import (
    FeatureMap,
    LogWarp,
    MessagePriorGP,
    OwnHyperparameters,
    RandomFourierFeatures,
    RankingEnsemble,
    StationaryKernel,
    Summary,
    WarpedFeatures,
    WarpedKernel,
    WeightPosterior,
    feature_map_from_tensors,
    fit_own_gp,
    own_gp,
    sample_weights_dual,
    summarize,
)
from botorch_fed.models.numerics import cholesky
from botorch_fed.protocols.base import AgentId, Outbox, Pending
from botorch_fed.protocols.budget import Budgeted, note_one_site
from botorch_fed.protocols.own_step import (
    OwnStrategy,
    answered,
    check_data,
    check_designs,
    check_public_points,
    design_of,
    expected_improvement,
    public_data,
    random_point,
    tensor_hash,
)
from botorch_fed.protocols.store import Blobs, MemoryBlobs
from botorch_fed.protocols.transfer_search import (
    MIN_OWN,
    Advice,
    TransferSearch,
    bounded,
    check_active,
    check_default,
    check_start,
    default_point,
    first_points,
    prior_of_sum,
    report_size,
)
from botorch_fed.protocols.transfer_search import (
    default_feature_map as transfer_feature_map,
)
from botorch_fed.rng import Generator, generator
from botorch_fed.space import SearchSpace, Value
from botorch_fed.wire.codec import content_hash, encode

logger = logging.getLogger(__name__)

MAX_FEATURES = 4096  # of a shared basis, and of what it is made of: work grows with the cube
MAX_WEIGHT = 1e6  # of a message's entries: beyond it nothing is a function of scaled outcomes
NOISE_VAR = 0.05  # that messages are made with by default, on the public scale
RESIDUAL_PRIOR = (-1.2, 1.0)  # of what messages leave open: normal, of the log output scale
MessageKind = Literal["own_mean", "sample", "mean", "summary", "summary_and_incumbent"]
MAX_INITIAL = 10_000  # points of an agent before its first query
SUMMARIES = ("summary", "summary_and_incumbent")
SAID: dict[str, str] = {  # of a message, in words
    "own_mean": "the mean function of its own model",
    "mean": "the posterior mean of its weights",
    "sample": "a posterior sample of its weights",
}


# ------------------------------------------------------------------ messages


@dataclass(frozen=True, eq=False)
class Setup:
    r"""What all agents agree upon, in public.

    Attributes:
        space: The map of inputs and outcomes.
        features: The shared basis, as `FeatureMap.to_tensors` gives it.
        noise_var: :math:`\sigma^2` of the model that messages are made with, on the public scale.
        message: ``"own_mean"``: the mean of the agent's own fitted model, on its own standardised
            scale, projected on the basis. For published strategies a ``"sample"`` of the weights'
            posterior or its ``"mean"``. For RGPE a ``"summary"`` of M(M + 3)/2 numbers, for TAF a
            ``"summary_and_incumbent"``, the best value an agent has observed: one number more, and
            a leak.
        beta: :math:`\beta_t`: scales the deviation of a sample from the mean.
        agents: All agents, in the order in which they are dealt their first points.
        num_initial: How many first points an agent is dealt, if it begins with nothing.
        default: What an agent without data evaluates before all else, `1 x d`: the first of those
            points, and also where others have spoken already. None for no such point.
    """

    space: SearchSpace
    features: Mapping[str, Tensor]
    noise_var: float
    message: MessageKind
    beta: float
    agents: tuple[AgentId, ...] = ()
    num_initial: int = 0
    default: Tensor | None = None

    def __post_init__(self) -> None:
        check_default(self.default, self.space.dim, self.num_initial)
        if not 0 <= self.num_initial <= MAX_INITIAL:
            raise InputDataError(
                f"Expected 0 <= num_initial <= {MAX_INITIAL}, got {self.num_initial}."
            )
        if not (1e-12 <= self.noise_var <= 1e6 and 0 <= self.beta <= 1e3):
            raise InputDataError(
                "noise_var must lie between 1e-12 and 1e6 and beta between 0 and 1,000, got "
                f"{self.noise_var} and {self.beta}."
            )

    @classmethod
    def make(
        cls,
        space: SearchSpace,
        feature_map: FeatureMap,
        *,
        noise_var: float = NOISE_VAR,
        message: MessageKind = "mean",
        beta: float = 1.0,
        agents: tuple[AgentId, ...] = (),
        num_initial: int = 0,
        default: Tensor | None = None,
    ) -> Setup:
        """The setup of a federation.

        Args:
            space: The map of inputs and outcomes.
            feature_map: The shared basis over the unit cube, public: never fitted to private data.
            noise_var: Noise variance on the public scale of outcomes.
            message: What agents send, see the attribute.
            beta: Scale of a sample's deviation.
            agents: All agents, for the first points that they are dealt.
            num_initial: How many first points each is dealt.
            default: The first of them, `1 x d`, the same for all.
        """
        if feature_map.input_dim != space.dim:
            raise InputDataError(
                f"The feature map has {feature_map.input_dim} inputs, the search space "
                f"{space.dim} columns."
            )
        features = feature_map.to_tensors()
        return cls(space, features, noise_var, message, beta, agents, num_initial, default)


@dataclass(frozen=True)
class Query:
    """What an agent is to do in a round."""

    query: bool
    upload: bool


@dataclass(frozen=True, eq=False)
class Upload:
    """An agent's message, if it was asked for one and has data."""

    weights: Tensor | None


@dataclass(frozen=True, eq=False)
class Received:
    """The newest weight vectors: `made[n]` is the round in which `agents[n]` made row `n`."""

    agents: tuple[AgentId, ...]
    made: tuple[int, ...]
    weights: Tensor

    def __post_init__(self) -> None:
        if not len(self.agents) == len(self.made) == len(self.weights) or self.weights.dim() != 2:
            raise InputDataError("Received weights must be one row per agent.")
        if len(set(self.agents)) < len(self.agents):
            raise InputDataError("An agent has two rows of received weights.")


# ------------------------------------------------------------------ the agent


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
class FTSAgentState:
    """An agent's private state.

    Attributes:
        t: Queries told so far (of `q` points each).
        querying: Whether the round's query is still to be made.
        uploading: Whether the round asks for a message.
        setup: Hash of the `Setup`.
        received: Hash of `Received`, if there is one.
        used: The round in which the last used message of an agent was made.
        using: The same of the messages that the round's query uses.
        X: Own points in the unit cube, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`.
        own: Hyperparameters of the own model.
        failed: Points whose evaluation failed, `n x d`.
    """

    t: int
    querying: bool
    uploading: bool
    setup: str
    received: str | None
    used: Mapping[str, int]
    using: Mapping[str, int]
    X: Tensor
    Y: Tensor
    own: OwnHyperparameters | None
    failed: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class FTSAgent:
    """One site of federated Thompson sampling.

    Args:
        name: Its name; its own message is not transferred to itself.
        space: The map of inputs and outcomes; must be the server's.
        seed: Its own seed, private.
        strategy: How it uses messages and data.
        data: Observations that it has already: points in the unit cube `n x d` and outcomes as
            the site measures them `n x 1`.
        q: Points per query.
        candidates: The only points that it can evaluate, `K x d`; default the whole unit cube.
        initial_design: Points `k x d` that it evaluates first, `q` at a time, whatever was sent.
        agent_weights: :math:`P_N`: weights of the other agents, 0 or more; who is not named has
            weight 0. Default equal.
        blobs: Where broadcasts lie.
    """

    name: AgentId
    space: SearchSpace
    seed: int
    strategy: TransferSearch | Strategy = TransferSearch()  # noqa: RUF009 - frozen
    data: tuple[Tensor, Tensor] | None = None
    q: int = 1
    candidates: Tensor | None = None
    initial_design: Tensor | None = None
    agent_weights: Mapping[AgentId, float] | None = None
    blobs: Blobs = field(default_factory=MemoryBlobs)

    state_type = FTSAgentState
    accepts = (Query,)
    defers = True

    def __post_init__(self) -> None:
        d = self.space.dim
        if self.q < 1:
            raise InputDataError(f"A query needs at least one point, got q = {self.q}.")
        check_public_points(self.candidates, self.initial_design, d)
        if self.initial_design is not None and len(self.initial_design) % self.q:
            raise InputDataError(
                f"The initial design has {len(self.initial_design)} points, no multiple of "
                f"q = {self.q}."
            )
        if self.candidates is not None and len(torch.unique(self.candidates, dim=0)) < self.q:
            raise InputDataError(f"There are fewer different candidates than q = {self.q}.")
        if self.data is not None:
            check_data(self.data, d)
        if any(not 0 <= w <= MAX_WEIGHT for w in (self.agent_weights or {}).values()):
            raise InputDataError(f"Weights of agents must lie between 0 and {MAX_WEIGHT:g}.")

    @property
    def fingerprint(self) -> str:
        """Hash of the settings that determine what it asks for."""
        tensors = [tensor_hash(self.candidates), tensor_hash(self.initial_design)]
        weights = None if self.agent_weights is None else sorted(self.agent_weights.items())
        strategy = self.strategy
        how = strategy.settings if isinstance(strategy, TransferSearch) else strategy
        settings = (self.name, self.space.fingerprint, self.seed, how, self.q, weights)
        return hashlib.sha256(repr((settings, tensors)).encode()).hexdigest()

    @property
    def _published(self) -> Strategy:
        assert isinstance(self.strategy, Strategy)
        return self.strategy

    # -------------------------------------------------------------- four verbs

    def start(self) -> FTSAgentState:
        """The state before the first request: with the data that the site has already."""
        X, Y = public_data(self.space, self.data)
        return self._fitted(FTSAgentState(0, False, False, "", None, {}, {}, X, Y, None, X[:0]))

    def check(self, state: FTSAgentState, request: Query, broadcasts: tuple[str, ...]) -> None:
        """Raise `MessageError` unless the request and what it broadcasts fit."""
        if len(broadcasts) not in (1, 2):
            raise MessageError(f"Expected a setup and what was received, got {len(broadcasts)}.")
        setup, phi = _setup(self.blobs, broadcasts[0])
        check_agreement(self.space, setup.space, phi)
        if state.setup not in ("", broadcasts[0]):
            raise MessageError("The setup has changed during the run.")
        strategy = self.strategy
        if isinstance(strategy, TransferSearch):
            fits, name = setup.message not in SUMMARIES, "TransferSearch"
        else:
            fits = (setup.message in SUMMARIES) == (strategy.transfer != "mixture")
            fits, name = fits and setup.message != "own_mean", strategy.transfer
        if not fits:
            raise MessageError(
                f"This agent's strategy {name!r} does not go with messages of kind "
                f"{setup.message!r}."
            )
        if name == "taf" and setup.message != "summary_and_incumbent":
            raise MessageError("TAF needs messages of kind 'summary_and_incumbent'.")
        if len(broadcasts) == 2:
            _received(self.blobs, broadcasts[1], broadcasts[0])

    def receive(
        self, state: FTSAgentState, request: Query, broadcasts: tuple[str, ...]
    ) -> FTSAgentState:
        """The state after a request: what to do, and where the broadcasts lie."""
        state = replace(
            state,
            querying=request.query,
            uploading=request.upload,
            setup=broadcasts[0],
            received=broadcasts[1] if len(broadcasts) > 1 else None,
        )
        others = self._others(state)
        if not request.query or others is None:
            return replace(state, using={})
        rows = [origin for origin in self._origins(state, others) if isinstance(origin, int)]
        return replace(state, using={others.agents[row]: others.made[row] for row in rows})

    def wants(self, state: FTSAgentState) -> bool:
        """Whether the round asks for a query that was not told."""
        return state.querying

    def ask(self, state: FTSAgentState, pending: Tensor | None = None) -> Tensor | Pending | None:
        """The next `q x d` points, or None if the round asks for none or they are being tried."""
        if not state.querying or (pending is not None and len(pending)):
            return None
        others = self._others(state)
        chosen = torch.zeros(0, self.space.dim).double()
        for slot, origin in enumerate(self._origins(state, others)):
            point = self._point(state, others, slot, origin, chosen)
            if self.candidates is None:
                point = self.space.snap(point)
                if len(chosen) and bool((chosen == point).all(dim=-1).any()):
                    # Two points of a query on one integer or choice: a random one instead.
                    stream = generator(self.seed, "again", state.t, slot)
                    point = self.space.snap(stream.uniform(1, self.space.dim))
            chosen = torch.cat([chosen, point])
        return chosen

    def left(self, state: FTSAgentState, pending: int) -> int:
        """One query at a time."""
        return self.q if state.querying and not pending else 0

    def tell(self, state: FTSAgentState, X: Tensor, Y: Tensor) -> FTSAgentState:
        """The state after a query; needs no broadcast, so that a late value can always be told."""
        X, Y, failed = answered(X, Y)
        state = replace(
            state,
            t=state.t + 1,
            querying=False,
            used={**state.used, **state.using},
            using={},
            failed=torch.cat([state.failed, failed]),
        )
        return self.attach(state, X, Y)

    def attach(self, state: FTSAgentState, X: Tensor, Y: Tensor) -> FTSAgentState:
        """The state with more data."""
        Y = self.space.outcome.to_public(Y)
        state = replace(state, X=torch.cat([state.X, X]), Y=torch.cat([state.Y, Y]))
        return self._fitted(state)

    def reply(self, state: FTSAgentState) -> tuple[FTSAgentState, Upload]:
        """The agent's message, a function of all its data."""
        if not state.uploading or len(state.X) == 0:
            return state, Upload(None)
        setup, phi = _setup(self.blobs, state.setup)
        if setup.message == "own_mean":
            assert isinstance(self.strategy, TransferSearch)  # `check` has seen to it
            advice = self._advice(state, self._others(state))
            report = self.strategy.report(self.space, phi, state.X, state.Y, advice)
            return state, Upload(report)
        stream = generator(self.seed, "message", state.t)
        return state, Upload(make_message(setup, phi, state.X, state.Y, generator=stream))

    # -------------------------------------------------------------- where the next points come from

    def _origins(self, state: FTSAgentState, others: _Others | None) -> list[_Origin]:
        """For every point of the next query where it comes from; a number is a row of messages.

        A function of the state alone, so that `receive` knows what `ask` will do.
        """
        t, strategy = state.t + 1, self.strategy
        if self.initial_design is not None and t * self.q <= len(self.initial_design):
            return ["design"] * self.q
        if isinstance(strategy, TransferSearch):
            return self._transfer_origins(state, others)
        t -= 0 if self.initial_design is None else len(self.initial_design) // self.q
        if others is not None and len(state.X) > 0:
            if strategy.transfer != "mixture":
                return ["ensemble"] * self.q
            if t <= strategy.prior_until:
                return ["prior"] * self.q
        origins: list[_Origin] = []
        weights = self._transfer_weights(state, others)
        for slot in range(self.q):
            stream = generator(self.seed, "coin", state.t, slot)
            coin, which = stream.uniform(2).tolist()
            cumulative = weights.cumsum(0)
            total = float(cumulative[-1]) if len(weights) else 0.0
            if coin >= strategy.schedule(t) and total > 0:
                row = int(torch.searchsorted(cumulative, which * total, right=True))
                origins.append(row)
                weights[row] = 0  # each message once
            else:
                origins.append("own" if len(state.X) > 0 and strategy.own != "random" else "random")
        return origins

    def _transfer_origins(self, state: FTSAgentState, others: _Others | None) -> list[_Origin]:
        """The same by the default search: points that are dealt, the default first, or its own."""
        setup, _ = _setup(self.blobs, state.setup)
        known = self.name in setup.agents
        if known and others is None and len(state.X) < setup.num_initial:
            return ["dealt"] * self.q
        origins: list[_Origin] = ["transfer"] * self.q
        if known and state.t == 0 and self._default(setup) is not None:
            origins[0] = "dealt"
        return origins

    def _default(self, setup: Setup) -> Tensor | None:
        """The default configuration, if this agent began without data."""
        began_with = 0 if self.data is None else len(self.data[0])
        return None if began_with else setup.default

    def _transfer_weights(self, state: FTSAgentState, others: _Others | None) -> Tensor:
        r""":math:`P_N` over the messages that were not used yet, not normalised."""
        if others is None:
            return torch.zeros(0).double()
        fresh = [
            float(made > state.used.get(agent, -1))
            for agent, made in zip(others.agents, others.made, strict=True)
        ]
        return others.agent_weights * torch.tensor(fresh, dtype=torch.float64)

    def _point(
        self,
        state: FTSAgentState,
        others: _Others | None,
        slot: int,
        origin: _Origin,
        chosen: Tensor,
    ) -> Tensor:
        """One point, `1 x d`; `chosen` are those that the same query has already."""
        stream = generator(self.seed, "point", state.t, slot)
        if origin == "design":
            assert self.initial_design is not None
            row = state.t * self.q + slot
            return self.initial_design[row : row + 1].double()
        candidates = _without(self.candidates, chosen)
        if isinstance(self.strategy, TransferSearch):
            if origin == "dealt":
                return self._dealt(state, slot)
            return self.strategy.point(
                self.space,
                state.X,
                state.Y,
                self._advice(state, others),
                chosen=chosen,
                candidates=candidates,
                failed=state.failed,
                stream=stream,
            )
        if origin == "random":
            return random_point(self.space, candidates, stream)
        acquisition = self._acquisition(state, others, origin, chosen, stream)
        tried = torch.cat([state.X, chosen])
        return self.strategy.maximizer(
            acquisition, self.space, tried, candidates=candidates, stream=stream
        )

    def _dealt(self, state: FTSAgentState, slot: int) -> Tensor:
        """One of the first points that this agent is dealt, `1 x d`."""
        setup, _ = _setup(self.blobs, state.setup)
        # By queries, not by outcomes: one that failed is not asked again.
        index, n = setup.agents.index(self.name), state.t * self.q + slot
        design = first_points(
            self.space,
            index,
            len(setup.agents),
            n + 1,
            default=self._default(setup),
            candidates=self.candidates,
        )
        return design[n : n + 1]

    def _advice(self, state: FTSAgentState, others: _Others | None) -> Advice | None:
        """The mean of the others' functions, each bounded, and what their trusts have earned."""
        if others is None:
            return None
        assert state.received is not None
        rows, M = list(others.rows), others.feature_map.num_features
        weights = _bounded_rows(self.blobs, state.received, state.setup)[rows]
        shares = others.agent_weights / others.agent_weights.sum()
        prior = prior_of_sum(others.feature_map, shares @ weights, 1)
        if prior is None:
            return None
        trust = len(rows) * shares @ others.weights[:, M:]
        before = state.t - (not state.querying)  # queries that were told before this round's
        return Advice.of(prior, trust, made=max(others.made), now=before)

    def _acquisition(
        self,
        state: FTSAgentState,
        others: _Others | None,
        origin: _Origin,
        chosen: Tensor,
        stream: Generator,
    ) -> AcquisitionFunction:
        if origin == "own":
            return self._published.acquisition(self._own_gp(state), state.X, chosen, stream)
        assert others is not None
        if isinstance(origin, int):
            return ThompsonSampling(weight_path(others.feature_map, others.message(origin)))
        if origin == "ensemble":
            return self._ensemble(state, others, stream)
        warp = self._published.log_warp(self.space)
        model = prior_model(others.feature_map, others.weights, state.X, state.Y, log_warp=warp)
        return expected_improvement(model, state.X, chosen)

    def _own_gp(self, state: FTSAgentState) -> SingleTaskGP:
        return self._published.model(self.space, state.X, state.Y, _known(state))

    def _ensemble(
        self, state: FTSAgentState, others: _Others, stream: Generator
    ) -> AcquisitionFunction:
        """The baselines' expected improvement, of an ensemble or of every agent."""
        phi, vectors = others.feature_map, others.weights
        model = self._own_gp(state)
        if self._published.transfer == "rgpe":
            summaries = Summary.unpack(vectors, basis=phi.fingerprint)
            ensemble = RankingEnsemble(model, summaries, feature_map=phi, generator=stream)
            return expected_improvement(ensemble, state.X, torch.zeros(0, self.space.dim).double())
        summaries = Summary.unpack(vectors[:, :-1], basis=phi.fingerprint)
        return TransferAcquisition(
            model,
            state.Y.max(),
            summaries=summaries,
            feature_map=phi,
            incumbents=vectors[:, -1],
        )

    # -------------------------------------------------------------- what it knows

    def _others(self, state: FTSAgentState) -> _Others | None:
        """The messages of the others, those of weight 0 left out."""
        if state.received is None:
            return None
        received = _received(self.blobs, state.received, state.setup)
        _, phi = _setup(self.blobs, state.setup)
        given = self.agent_weights
        weights = {
            row: 1.0 if given is None else given.get(agent, 0.0)
            for row, agent in enumerate(received.agents)
            if agent != self.name
        }
        rows = [row for row, weight in weights.items() if weight > 0]
        if not rows:
            return None
        return _Others(
            phi,
            tuple(received.agents[row] for row in rows),
            tuple(received.made[row] for row in rows),
            received.weights,
            tuple(rows),
            torch.tensor([weights[row] for row in rows], dtype=torch.float64),
        )

    def _fitted(self, state: FTSAgentState) -> FTSAgentState:
        """The state with the hyperparameters that its data ask for."""
        if isinstance(self.strategy, TransferSearch):  # fitted anew for each query
            return state
        own = self.strategy.refit(
            self.space, state.X, state.Y, state.own, seed=self.seed, name=self.name
        )
        return replace(state, own=own)


_Origin = Literal["design", "dealt", "transfer", "random", "prior", "own", "ensemble"] | int


@dataclass(frozen=True, eq=False)
class _Others:
    """Messages of the other agents, with the weights that this agent gives them."""

    feature_map: FeatureMap
    agents: tuple[AgentId, ...]
    made: tuple[int, ...]
    received: Tensor  # of all agents: a copy for every agent would fill the memory
    rows: tuple[int, ...]
    agent_weights: Tensor

    def message(self, index: int) -> Tensor:
        """The weight vector of one of `agents`."""
        return self.received[self.rows[index]]

    @cached_property
    def weights(self) -> Tensor:
        """The weight vectors of `agents`, one per row."""
        return self.received[list(self.rows)]


def make_message(
    setup: Setup, feature_map: FeatureMap, X: Tensor, Y: Tensor, *, generator: Generator
) -> Tensor:
    """What an agent sends: `M` weights of the shared basis, or a packed summary.

    Args:
        setup: Says which kind of message.
        feature_map: The basis of the setup.
        X: Own points, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`.
        generator: The agent's own stream, for samples.
    """
    assert setup.message != "own_mean"  # which `TransferSearch` makes
    if setup.message in SUMMARIES:
        vector = summarize(feature_map, X, Y, noise_var=setup.noise_var).pack()
        return vector if setup.message == "summary" else torch.cat([vector, Y.max().reshape(1)])
    return weight_message(
        setup.message,
        feature_map,
        X,
        Y,
        noise_var=setup.noise_var,
        beta=setup.beta,
        generator=generator,
    )


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
        kind: ``"mean"`` or ``"sample"``, as in `Setup`.
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


def prior_model(
    feature_map: FeatureMap,
    weights: Tensor,
    X: Tensor,
    Y: Tensor,
    *,
    log_warp: LogWarp | None = None,
) -> MessagePriorGP:
    """The model whose prior is the messages' mean and covariance, fitted to the own data.

    Args:
        feature_map: The shared basis.
        weights: The messages, `N x M`.
        X: Own points, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`.
        log_warp: The scale on which the residual kernel sees inputs; default the unit cube's.
    """
    messages = feature_map(X) @ weights.mT  # n x N
    mean = messages.mean(dim=-1, keepdim=True)
    root = (messages - mean) / max(len(weights) - 1, 1) ** 0.5
    warp = LogWarp(torch.zeros_like(X[0])) if log_warp is None else log_warp
    Z = warp.transform(X)
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
        residual_kernel=residual if warp.identity else WarpedKernel(residual, warp),
    )
    model.likelihood = own.likelihood
    model.requires_grad_(False)
    return model.eval()


def _known(state: FTSAgentState) -> OwnHyperparameters:
    assert state.own is not None
    return state.own


def _without(candidates: Tensor | None, chosen: Tensor) -> Tensor | None:
    if candidates is None or not len(chosen):
        return candidates
    taken = (candidates.unsqueeze(1) == chosen.unsqueeze(0)).all(dim=-1).any(dim=-1)
    return candidates[~taken]


@lru_cache(maxsize=16)
def _setup(blobs: Blobs, digest: str) -> tuple[Setup, FeatureMap]:
    """A setup and its feature map; public, and the same for all agents of a process."""
    setup: Setup = blobs.load(digest, Setup)
    return setup, received_features(setup.features, setup.space)


def check_agreement(mine: SearchSpace, theirs: SearchSpace, feature_map: FeatureMap) -> None:
    """Raise `MessageError` unless a server's search space and basis are those of a site."""
    if theirs.fingerprint != mine.fingerprint:
        raise MessageError(
            "The server's search space is not this site's: names, bounds, scales and outcome "
            "must agree."
        )
    if feature_map.input_dim != mine.dim:
        raise MessageError("The shared basis is over another number of inputs.")


def received_features(features: Mapping[str, Tensor], space: SearchSpace) -> FeatureMap:
    """The feature map that a server sent, or `MessageError` if it is none over this space."""
    largest = max((size for tensor in features.values() for size in tensor.shape), default=0)
    if largest > MAX_FEATURES:
        raise MessageError(
            f"A shared basis has tensors of up to {MAX_FEATURES} rows and columns, got {largest}."
        )
    try:
        phi = feature_map_from_tensors(features)
        if phi.num_features > MAX_FEATURES:
            raise MessageError(f"it has {phi.num_features} features, {MAX_FEATURES} at most")
        if phi.input_dim == space.dim:
            probes = torch.cat([space.bounds, generator(0, "probe").uniform(64, space.dim)])
            phi.check_domain(probes)
            if not bool((phi(probes).square().sum(dim=-1) <= MAX_WEIGHT).all()):
                raise MessageError("its features are not finite, or too large")
    except (BotorchError, FederatedError) as error:
        raise MessageError(f"The shared basis is no feature map: {error}") from error
    return phi


@lru_cache(maxsize=16)
def _received(blobs: Blobs, digest: str, setup_digest: str) -> Received:
    """What was received, checked row by row; the same for all agents of a process."""
    received: Received = blobs.load(digest, Received)
    setup, phi = _setup(blobs, setup_digest)
    if min(received.made, default=0) < 0:
        raise MessageError("Rounds count from 0.")
    for row in received.weights:
        check_message(setup, phi, row)
    return received


@lru_cache(maxsize=4)
def _bounded_rows(blobs: Blobs, digest: str, setup_digest: str) -> Tensor:
    """The received weight vectors, none louder than a site can be; once for all agents."""
    _, phi = _setup(blobs, setup_digest)
    return bounded(phi, _received(blobs, digest, setup_digest).weights[:, : phi.num_features])


def check_message(setup: Setup, feature_map: FeatureMap, weights: Tensor) -> None:
    """Raise `MessageError` unless an agent's message can be used by others.

    Args:
        setup: Says which kind of message.
        feature_map: The basis of the setup.
        weights: What `make_message` made, or anything else.
    """
    M = feature_map.num_features
    size = M if setup.message not in SUMMARIES else M * (M + 3) // 2
    size += setup.message == "summary_and_incumbent"
    if setup.message == "own_mean":
        size = report_size(feature_map)
    if weights.shape != (size,) or weights.dtype != torch.float64:
        raise MessageError(
            f"A message of kind {setup.message!r} has {size} float64 numbers, got "
            f"{weights.dtype} of shape {tuple(weights.shape)}."
        )
    limit = MAX_WEIGHT / min(setup.noise_var, 1.0) if setup.message in SUMMARIES else MAX_WEIGHT
    if not bool((weights.abs() <= limit).all()):
        raise MessageError(f"A number exceeds {limit:g}: outcomes must be on the public scale.")
    if setup.message == "own_mean":
        trust = weights[M:]
        if not bool((trust >= 0).all()) or float(trust.sum()) > 1 + 1e-6:
            raise MessageError("Weights of trusts are not negative, and sum to one at most.")
    if setup.message in SUMMARIES:
        summary = Summary.unpack(weights[: M * (M + 3) // 2], basis=feature_map.fingerprint)
        jitter = 1e-9 * (1 + summary.gram.diagonal().abs().max())
        try:
            cholesky(summary.gram + jitter * torch.eye(M).double(), "a received summary")
        except NumericalError as error:
            raise MessageError("The summary is no sum of squares of features.") from error


# ------------------------------------------------------------------ the server


@dataclass(frozen=True, eq=False)
class FTSServerState:
    """What the server has heard: `t` counts finished rounds, the collection included."""

    t: int
    received: Received | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FTSServer:
    """The server of federated Thompson sampling: collects weight vectors and passes them on.

    The first round collects a message of everyone who has data; then every round lets the active
    agents query once.

    Args:
        setup: What all agents agree upon.
        agents: Names of all agents.
        rounds: How many queries the active agents make. A run may be resumed with more.
        active: Who queries; default all. The others give a message before the start.
        every: A new message of the active agents every so many rounds; 0 for none after the start.
    """

    setup: Setup
    agents: tuple[AgentId, ...]
    rounds: int
    active: tuple[AgentId, ...] | None = None
    every: int = 0

    state_type = FTSServerState
    accepts = (Upload,)

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.every < 0:
            raise InputDataError("rounds and every count from 0.")
        if len(set(self.agents)) < len(self.agents) or not self.agents:
            raise InputDataError("There must be at least one agent, and names must differ.")
        check_active(self.active, self.agents)

    @property
    def fingerprint(self) -> str:
        """Hash of its settings."""
        settings = (content_hash(encode(self.setup)), self.agents, self.active, self.every)
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    @property
    def price(self) -> None:
        """No guarantee, and nothing to pay."""
        return None

    @cached_property
    def sees(self) -> Sees:
        """Who sees what."""
        M, kind = self._feature_map.num_features, self.setup.message
        sent, limits = f"{SAID.get(kind, kind)}, {M} numbers", ""
        if kind in SUMMARIES:
            sent = f"a summary of its data, {M * (M + 3) // 2} numbers"
            limits = (
                " From a summary of fewer observations than features the data can be recovered."
            )
            if kind == "summary_and_incumbent":
                sent += " and the best observed value"
        return Sees(
            rows=(
                Row.of(
                    Setup, "server", "search space, shared basis and message settings", EVERYBODY
                ),
                Row.of(Query, "server", "whether to query and whether to upload", ADDRESSEE),
                Row.of(
                    Upload,
                    "agent",
                    f"each agent's message: {sent}",
                    ("server",),
                    "data",
                ),
                Row.of(
                    Received,
                    "server",
                    "the newest message of every agent, by name",
                    EVERYBODY,
                    "data",
                ),
            ),
            trust="The server and all agents are trusted with every message.",
            limits=(f"A message is a function of the agent's data.{limits}",),
        )

    def start(self) -> FTSServerState:
        """The state before the collection."""
        return FTSServerState(0, None)

    def outbox(self, state: FTSServerState) -> Outbox | None:
        """The collection, then one query per active agent and round."""
        if state.t > self.rounds:
            return None
        broadcasts: tuple[Any, ...] = (self.setup,)
        if state.received is not None:
            broadcasts += (state.received,)
        who = self.agents if state.t == 0 or self.active is None else self.active
        return Outbox({agent: self._query(state) for agent in who}, broadcasts)

    def _query(self, state: FTSServerState) -> Query:
        if state.t == 0:
            return Query(query=False, upload=True)
        upload = self.every > 0 and state.t % self.every == 0
        return Query(query=True, upload=upload)

    def check(self, state: FTSServerState, sender: AgentId, message: Upload) -> None:
        """Raise `MessageError` unless an upload fits the basis and was asked for."""
        if message.weights is None:
            return
        if not self._query(state).upload:
            raise MessageError("A weight vector that nobody asked for.")
        check_message(self.setup, self._feature_map, message.weights)

    @cached_property
    def _feature_map(self) -> FeatureMap:
        return feature_map_from_tensors(self.setup.features)

    def step(self, state: FTSServerState, inbox: Mapping[AgentId, Upload]) -> FTSServerState:
        """Replace the rows of those who were heard; an absent agent keeps its old row."""
        rows: dict[AgentId, tuple[int, Tensor]] = {}
        if state.received is not None:
            old = state.received
            rows = dict(zip(old.agents, zip(old.made, old.weights, strict=True), strict=True))
        new = {agent: (state.t, m.weights) for agent, m in inbox.items() if m.weights is not None}
        if not new:
            return replace(state, t=state.t + 1)
        rows.update(new)
        names = [agent for agent in self.agents if agent in rows]
        received = Received(
            tuple(names),
            tuple(rows[agent][0] for agent in names),
            torch.stack([rows[agent][1] for agent in names]),
        )
        return FTSServerState(state.t + 1, received)


# ------------------------------------------------------------------ a federation for `run`

LENGTHSCALE = 0.2  # of the default shared basis, in two dimensions of the unit cube
NUM_FEATURES = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class FTS(Budgeted):
    """Federated Thompson sampling as a study: the settings of all agents and of the server.

    Args:
        budget: How many evaluations each active agent makes, its first points included: a multiple
            of `q`, with ``budget / q`` rounds of one query each.
        feature_map: The shared basis; default random Fourier features of a public SE kernel.
        noise_var: Noise variance that messages are made with, on the public scale.
        message: What agents send, see `Setup`; default what the strategy needs.
        beta: Scale of a sample's deviation from the mean.
        strategy: How agents use messages and data.
        every: A new message every so many rounds; 0 for one before the start. Default every
            round, or for a published strategy 0.
        num_initial: How many first points an agent without data is dealt, where nobody has said
            anything yet; default 3, or none for a published strategy.
        default: The configuration that users have had so far, a value for each parameter: every
            agent without data evaluates it first, as the first of `num_initial` points, and can
            only gain on it. With `TransferSearch`, and instead of an `initial_design`.
        active: Who queries; default all.
        data: What agents have observed before, by name, as in `FTSAgent`.
        q: Points per query.
        candidates: The only points that can be evaluated, `K x d`.
        initial_design: Public points that every agent evaluates first, or its own points by name:
            `own_step.spread_design` makes them.
        agent_weights: :math:`P_N`, the same for all agents; default uniform.

    Example:
        >>> result = run(FTS(budget=20), SklearnTuning(4), seed=0)
    """

    budget: int
    feature_map: FeatureMap | None = None
    noise_var: float = NOISE_VAR
    message: MessageKind | None = None
    beta: float = 1.0
    strategy: TransferSearch | Strategy = TransferSearch()  # noqa: RUF009 - frozen
    every: int | None = None
    num_initial: int | None = None
    default: Mapping[str, Value] | None = None
    active: tuple[AgentId, ...] | None = None
    data: Mapping[AgentId, tuple[Tensor, Tensor]] = field(default_factory=dict)
    q: int = 1
    candidates: Tensor | None = None
    initial_design: Tensor | Mapping[AgentId, Tensor] | None = None
    agent_weights: Mapping[AgentId, float] | None = None

    def __post_init__(self) -> None:
        has_design = self.initial_design is not None
        check_start(self.default, transfers=self._transfers, has_design=has_design)
        self._check_budget()
        if self.q > 1 and self.budget % self.q:
            below = self.budget - self.budget % self.q
            raise InputDataError(
                f"budget = {self.budget} is no multiple of q = {self.q}: write budget = "
                f"{below + self.q}{f' or {below}' if below else ''}."
            )
        if self._starts > self.budget:
            raise InputDataError(
                f"budget = {self.budget} has no room for {self._starts} initial points: write "
                f"budget = {self._starts} or more, or fewer initial points (num_initial)."
            )
        if self._listens and self._silent:
            rounds = self.budget // self.q
            late = f"every = {self._every} is more than the {rounds} rounds"
            raise InputDataError(
                "No message would ever be sent: "
                f"{late if self._every else 'every = 0 asks for messages before the start alone'}, "
                "and no site has the data for one before the start. Write every = 1, or give data. "
                "Sites that search alone on purpose have strategy=TransferSearch(listen=False)."
            )

    @property
    def _every(self) -> int:
        return int(self._transfers) if self.every is None else self.every

    @property
    def _silent(self) -> bool:
        """Whether no message is ever asked for from a site that has anything to say."""
        least = MIN_OWN if self._transfers else 1
        before = any(len(X) >= least for X, _ in self.data.values())
        return not before and not 0 < abs(self._every) <= self.budget // self.q

    @property
    def _listens(self) -> bool:
        strategy = self.strategy
        if isinstance(strategy, TransferSearch):
            return strategy.listen
        alone = isinstance(strategy.schedule, Constant) and strategy.schedule.p == 1
        return strategy.transfer != "mixture" or strategy.prior_until > 0 or not alone

    @property
    def _starts(self) -> int:
        """How many of the first points are asked for; the default is as many as there is room."""
        design = self.initial_design
        if isinstance(design, Mapping):
            return max(map(len, design.values()), default=0)
        return (self.num_initial or 0) if design is None else len(design)

    def rounds_for(self, names: tuple[AgentId, ...]) -> int:
        """A round is a query of `q` points, first points or not."""
        return self.budget // self.q

    def evaluated(self, names: tuple[AgentId, ...], state: Any) -> int:
        """Round 0 collects messages and evaluates nothing."""
        return max(state.t - 1, 0) * self.q

    def _budget_of(self, rounds: int, names: tuple[AgentId, ...]) -> int:
        return max(rounds, -(-self._starts // self.q)) * self.q

    @property
    def _transfers(self) -> bool:
        return isinstance(self.strategy, TransferSearch)

    def setup(self, space: SearchSpace, names: tuple[AgentId, ...] = ()) -> Setup:
        """What all agents agree upon."""
        phi = self.feature_map
        if phi is None:
            usual = transfer_feature_map if self._transfers else default_feature_map
            phi = usual(space)
        initial = self.num_initial
        return Setup.make(
            space,
            phi,
            noise_var=self.noise_var,
            message=self.message or ("own_mean" if self._transfers else "mean"),
            beta=self.beta,
            agents=names,
            num_initial=(MIN_OWN if self._transfers else 0) if initial is None else initial,
            default=default_point(space, self.default),
        )

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> FTSServer:
        """The server of a study."""
        unknown = sorted({*self.data, *(self.agent_weights or {})} - set(names))
        if unknown:
            raise InputDataError(f"Data or weights of agents that are no agents: {unknown[:8]}.")
        check_designs(self.initial_design, names)
        if self._listens:
            note_one_site(names)
            if self._transfers and self.budget < MIN_OWN and not self.data:
                logger.warning(
                    "nothing will be sent: a first message needs %d observations, the budget is %d",
                    MIN_OWN,
                    self.budget,
                )
        return FTSServer(
            setup=self.setup(space, names),
            agents=names,
            rounds=self.rounds_for(names),
            active=self.active,
            every=self._every,
        )

    def alone(self) -> FTS:
        """The baseline of comparisons: the same agents without messages."""
        return replace(self, every=0, message=None, strategy=TransferSearch(listen=False))

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees:
        """Who sees what."""
        return self.server(space, names).sees

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None:
        """What a run costs in privacy; always None."""
        return self.server(space, names).price

    def agent(self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs) -> FTSAgent:
        """An agent of a study."""
        return FTSAgent(
            name=name,
            space=space,
            seed=seed,
            strategy=self.strategy,
            data=self.data.get(name),
            q=self.q,
            candidates=self.candidates,
            initial_design=design_of(self.initial_design, name),
            agent_weights=self.agent_weights,
            blobs=blobs,
        )


def default_kernel(dim: int) -> StationaryKernel:
    """The public SE kernel of messages; length scales grow as the root of the dimension."""
    return StationaryKernel(float("inf"), [LENGTHSCALE * (dim / 2) ** 0.5] * dim)


def default_feature_map(space: SearchSpace, *, num_features: int = NUM_FEATURES) -> FeatureMap:
    """Features of a public SE kernel that were chosen for transfer, not for resolution.

    Parameters that act by their ratio are seen on a logarithmic scale, whatever scale the agents
    search on.
    """
    stream = generator(0, "features")
    phi = RandomFourierFeatures.draw(default_kernel(space.dim), num_features, generator=stream)
    return WarpedFeatures.around(phi, space.log_offsets)
