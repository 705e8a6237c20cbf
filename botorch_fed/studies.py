r"""Studies: constructors of terms, of a server and of agents.

Federation   any search with any aggregation
FTS          federated Thompson sampling; by default `TransferSearch` on relayed messages
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.aggregation.relay import Relay
from botorch_fed.federation.agent import FederatedAgent
from botorch_fed.federation.disclosure import Price, Sees
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.terms import Aggregation, Resources, Search, Terms
from botorch_fed.models import (
    FeatureMap,
    RandomFourierFeatures,
    StationaryKernel,
    WarpedFeatures,
)
from botorch_fed.protocols.base import AgentId
from botorch_fed.protocols.budget import Budgeted, note_one_site
from botorch_fed.protocols.own_step import check_designs, design_of
from botorch_fed.protocols.store import Blobs
from botorch_fed.protocols.transfer_search import (
    MIN_OWN,
    TransferSearch,
    check_start,
    default_point,
)
from botorch_fed.protocols.transfer_search import (
    default_feature_map as transfer_feature_map,
)
from botorch_fed.rng import generator
from botorch_fed.search.ensemble import EnsembleSearch
from botorch_fed.search.messages import (
    NOISE_VAR,
    Message,
    MessageKind,
    RowSearch,
    TransferRows,
)
from botorch_fed.search.thompson import Strategy, ThompsonSearch
from botorch_fed.space import SearchSpace, Value

logger = logging.getLogger(__name__)

LENGTHSCALE = 0.2  # of a published strategy's shared basis, in two dimensions of the unit cube
NUM_FEATURES = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class Federation(Budgeted):
    """Any search with any aggregation as a study: the settings of all agents and of the server.

    Args:
        budget: How many evaluations each active agent makes, its first points included.
        search: What agents say, and where they look; default `TransferRows`.
        aggregation: Who is asked for what, and how messages become releases; default `Relay`.
        feature_map: The shared basis, for a search that has one; default
            `transfer_search.default_feature_map`.
        num_initial: How many first points an agent without data is dealt, where nobody has said
            anything yet; default 3.
        default: The configuration that users have had so far, a value for each parameter: every
            agent without data evaluates it first, as the first of `num_initial` points.
        active: Who evaluates; default all.
        data: What agents have observed before, by name, as in `FederatedAgent`.
        q: Points per query; if it does not divide the budget, the last query has fewer.
        candidates: The only points that can be evaluated, `K x d`.
        initial_design: Public points that every agent evaluates first, or its own points by name:
            `own_step.spread_design` makes them.

    Example:
        >>> study = Federation(budget=20, search=TransferRows(), aggregation=Relay())
        >>> result = run(study, Landmine(), seed=0)
    """

    budget: int
    search: Search | None = None
    aggregation: Aggregation | None = None
    feature_map: FeatureMap | None = None
    num_initial: int | None = None
    default: Mapping[str, Value] | None = None
    active: tuple[AgentId, ...] | None = None
    data: Mapping[AgentId, tuple[Tensor, Tensor]] = field(default_factory=dict)
    q: int = 1
    candidates: Tensor | None = None
    initial_design: Tensor | Mapping[AgentId, Tensor] | None = None
    _made: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)  # of these settings

    def __post_init__(self) -> None:
        self._check_budget()
        self._check_starts()
        self._check_silence()

    @property
    def title(self) -> str:
        """Its name in reports: of parts that were put together, the names of the parts."""
        if type(self) is not Federation:
            return type(self).__name__
        parts = self.make_search(), self.make_aggregation()
        return " x ".join(type(part).__name__ for part in parts)

    @property
    def opens(self) -> bool:
        """Whether agents may join while the study runs."""
        return self.make_aggregation().opens

    # -------------------------------------------------------------- its budget

    @property
    def rounds(self) -> int:
        """How many queries each agent makes after the points that are asked for together."""
        return self.rounds_for(())

    def rounds_for(self, names: tuple[AgentId, ...]) -> int:
        """How many queries of `q` points follow; the last one may have fewer."""
        return -(-super().rounds_for(names) // self.q)

    def evaluated(self, names: tuple[AgentId, ...], state: Any) -> int:
        """How many evaluations a site has been asked for when the server is in a state, at most."""
        if not state.t:
            return 0
        return min(self.budget, self.initial_for(names) + self.q * (state.t - 1))

    def _budget_of(self, rounds: int, names: tuple[AgentId, ...]) -> int:
        return max(rounds, -(-self._starts // self.q)) * self.q

    @property
    def _starts(self) -> int:
        """How many first points are asked for; of the default as many as the budget has room."""
        design = self.initial_design
        if isinstance(design, Mapping):
            return max(map(len, design.values()), default=0)
        return (self.num_initial or 0) if design is None else len(design)

    def _check_starts(self) -> None:
        if self.q < 1:
            raise InputDataError(f"Expected q >= 1 points per query, got {self.q}.")
        if self._starts > self.budget:
            raise InputDataError(
                f"budget = {self.budget} has no room for {self._starts} initial points: write "
                f"budget = {self._starts} or more, or fewer initial points (num_initial)."
            )

    def _check_silence(self) -> None:
        """Refuse a study in which nothing would ever be sent, unless sites search alone."""
        search = self.make_search()
        if search.alone or search.least is None:
            return
        begun = any(len(X) >= search.least for X, _ in self.data.values())
        why = self.make_aggregation().silent(self.rounds, begun)
        if why:
            raise InputDataError(
                f"No message would ever be sent: {why} Sites that search alone on purpose have "
                "strategy=TransferSearch(listen=False)."
            )

    # -------------------------------------------------------------- what a study decides

    def make_search(self) -> Search:
        """The search."""
        return TransferRows() if self.search is None else self.search

    def make_aggregation(self) -> Aggregation:
        """The aggregation."""
        return Relay() if self.aggregation is None else self.aggregation

    def make_basis(self, space: SearchSpace) -> FeatureMap:
        """The shared basis, where none is given."""
        return transfer_feature_map(space)

    @property
    def initial(self) -> int:
        """How many first points an agent without data is dealt."""
        return MIN_OWN if self.num_initial is None else self.num_initial

    # -------------------------------------------------------------- what is made of it

    def terms(self, space: SearchSpace, names: tuple[AgentId, ...] = ()) -> Terms:
        """What all parties agree upon; a site that does not know the roster takes the hub's."""
        if self.default is not None and self.initial_design is not None:
            raise InputDataError(
                "Give default or initial_design: a design may begin with the default itself."
            )
        key = (space, names)
        if key not in self._made:
            search, basis = self.make_search(), self.feature_map
            if basis is None and search.has_basis:
                basis = self.make_basis(space)
            self._made[key] = Terms(
                space=space,
                budget=self.budget,
                search=search,
                aggregation=self.make_aggregation(),
                basis=basis,
                agents=names,
                q=self.q,
                num_initial=self.initial,
                default=default_point(space, self.default),
                active=self.active,
            )
        terms: Terms = self._made[key]
        return terms

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> FederatedServer:
        """The server of a study."""
        unknown = sorted({*self.data, *self._named} - set(names))
        if unknown:
            raise InputDataError(f"Data or weights of agents that are no agents: {unknown[:8]}.")
        check_designs(self.initial_design, names)
        self._note(names)
        return FederatedServer(terms=self.terms(space, names), resources=self.hub_resources())

    def _note(self, names: tuple[AgentId, ...]) -> None:
        """Log warnings where nobody would read messages, or send one."""
        search = self.make_search()
        if search.alone or search.least is None:
            return
        note_one_site(names)
        if self.budget < search.least and not self.data:
            logger.warning(
                "nothing will be sent: a first message needs %d observations, the budget is %d",
                search.least,
                self.budget,
            )

    @property
    def _named(self) -> set[AgentId]:
        """Agents that a setting names."""
        return set()

    @property
    def requirement(self) -> dict[str, Any]:
        """What agents require: `require`, `unit` and `adjacency` of a `FederatedAgent`."""
        return {}

    def hub_resources(self) -> Resources:
        """What the hub has and no other party knows."""
        return Resources()

    def site_resources(self, name: AgentId) -> Resources:
        """What a site has and no other party knows."""
        return Resources()

    def agent(self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs) -> FederatedAgent:
        """An agent of a study."""
        return FederatedAgent(
            name=name,
            terms=self.terms(space),
            seed=seed,
            data=self.data.get(name),
            candidates=self.candidates,
            initial_design=design_of(self.initial_design, name),
            **self.requirement,
            resources=self.site_resources(name),
            blobs=blobs,
        )

    # -------------------------------------------------------------- what a reader needs

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees:
        """Who sees what."""
        return self.server(space, names).sees

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None:
        """What a run costs in privacy; None without noise."""
        return self.server(space, names).price

    def alone(self) -> FTS:
        """The baseline of comparisons: agents with the default search and without messages."""
        return FTS(
            budget=self.budget,
            strategy=TransferSearch(listen=False),
            every=0,
            num_initial=self.num_initial,
            default=self.default,
            active=self.active,
            data=self.data,
            q=self.q,
            candidates=self.candidates,
            initial_design=self.initial_design,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class FTS(Federation):
    r"""Federated Thompson sampling: messages are relayed, and agents trust each other and the hub.

    See `search.messages`, `search.thompson` and `aggregation.relay`.

    Args:
        budget: How many evaluations each active agent makes, its first points included.
        strategy: How agents use messages and data.
        message: What agents send, see `search.messages`; default what the strategy needs.
        noise_var: Noise variance that messages are made with, on the public scale.
        beta: Scale of a sample's deviation from the mean.
        every: A new message every so many rounds; 0 for one before the start. Default every
            round, or for a published strategy 0.
        agent_weights: :math:`P_N`, the same for all agents; default uniform.
        search: Another search in the place of these settings.
        aggregation: Another aggregation than `Relay`.
        feature_map: The shared basis; default random Fourier features of a public SE kernel.
        num_initial: How many first points an agent without data is dealt, where nobody has said
            anything yet; default 3, or none for a published strategy.
        default: The configuration that users have had so far, a value for each parameter: every
            agent without data evaluates it first, as the first of `num_initial` points, and can
            only gain on it. With `TransferSearch`, and instead of an `initial_design`.
        active: Who evaluates; default all. The others give a message before the start.
        data: What agents have observed before, by name, as in `FederatedAgent`.
        q: Points per query; if it does not divide the budget, the last query has fewer.
        candidates: The only points that can be evaluated, `K x d`.
        initial_design: Public points that every agent evaluates first, or its own points by name:
            `own_step.spread_design` makes them.

    Example:
        >>> result = run(FTS(budget=20), SklearnTuning(4), seed=0)
    """

    strategy: TransferSearch | Strategy = TransferSearch()  # noqa: RUF009 - frozen
    message: MessageKind | None = None
    noise_var: float = NOISE_VAR
    beta: float = 1.0
    every: int | None = None
    agent_weights: Mapping[AgentId, float] | None = None

    def __post_init__(self) -> None:
        has_design = self.initial_design is not None
        check_start(self.default, transfers=self._transfers, has_design=has_design)
        super().__post_init__()

    @property
    def _transfers(self) -> bool:
        return isinstance(self.strategy, TransferSearch)

    @property
    def _named(self) -> set[AgentId]:
        return set(self.agent_weights or {})

    @property
    def initial(self) -> int:
        """How many first points an agent without data is dealt; none by a published strategy."""
        return super().initial if self._transfers else 0

    def make_search(self) -> Search:
        """The search of the strategy."""
        if self.search is not None:
            return self.search
        kind = self.message or ("own_mean" if self._transfers else "mean")
        common: dict[str, Any] = {
            "messages": Message(kind, self.noise_var, self.beta),
            "agent_weights": self.agent_weights,
            "strategy": self.strategy,
        }
        make: type[RowSearch] = TransferRows
        if isinstance(self.strategy, Strategy):
            make = ThompsonSearch if self.strategy.transfer == "mixture" else EnsembleSearch
        return make(**common)

    def make_aggregation(self) -> Aggregation:
        """Messages are passed on as they are."""
        if self.aggregation is not None:
            return self.aggregation
        return Relay(int(self._transfers) if self.every is None else self.every)

    def alone(self) -> FTS:
        """The baseline of comparisons: the same agents without messages."""
        strategy = TransferSearch(listen=False)
        return replace(
            self, every=0, message=None, strategy=strategy, search=None, aggregation=None
        )

    def make_basis(self, space: SearchSpace) -> FeatureMap:
        """Features of a public SE kernel, of another length scale for a published strategy."""
        return super().make_basis(space) if self._transfers else default_feature_map(space)


def default_kernel(dim: int) -> StationaryKernel:
    """The public SE kernel of published messages; its length scale grows with the dimension."""
    return StationaryKernel(float("inf"), [LENGTHSCALE * (dim / 2) ** 0.5] * dim)


def default_feature_map(space: SearchSpace, *, num_features: int = NUM_FEATURES) -> FeatureMap:
    """Features of a public SE kernel that were chosen for transfer, not for resolution.

    Log-scaled parameters are seen on a logarithmic scale, whatever scale the agents search on.
    """
    stream = generator(0, "features")
    phi = RandomFourierFeatures.draw(default_kernel(space.dim), num_features, generator=stream)
    return WarpedFeatures.around(phi, space.log_offsets)
