r"""Studies: constructors of terms, of a server and of agents.

::

    Federation   any search with any aggregation
    FTS          federated Thompson sampling; by default TransferSearch on relayed messages
    DPFTSDE      the same on noisy sums, differentially private: a trusted server adds the noise, or
                 each agent its share
    FedGP        FBO-FedGP; by default TransferSearch on a sum of messages under a joint key
    PrivateUCB   private bandits: BanditSearch on sums of records
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition import ExplorationSchedule, SoftmaxSchedule
from botorch_fed.aggregation.noisy import NoiseKind, NoisySum, Sampling
from botorch_fed.aggregation.relay import Relay
from botorch_fed.aggregation.secure_sum import (
    CONTEXT,
    ChannelKind,
    OneKey,
    SecureSum,
    context_in,
    new_key,
)
from botorch_fed.aggregation.stream import (
    JointStream,
    LocalStream,
    PublicStream,
    Stream,
    StreamState,
    Trust,
    most_participations,
    rounds_of,
)
from botorch_fed.federation.agent import FederatedAgent
from botorch_fed.federation.base import AgentId, LedgerElsewhere
from botorch_fed.federation.budget import Budgeted, missing_points, no_round, note_one_site
from botorch_fed.federation.disclosure import Price, Sees
from botorch_fed.federation.points import check_designs, check_start, default_point, design_of
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.terms import MAX_SEED, Aggregation, Resources, Search, Terms
from botorch_fed.models import (
    FeatureMap,
    RandomFourierFeatures,
    StationaryKernel,
    WarpedFeatures,
)
from botorch_fed.privacy import (
    Adjacency,
    Budget,
    Ledger,
    LocalGaussian,
    NoiseSource,
    OSNoise,
    PoissonSampling,
    PrefixSum,
    SharedLedger,
    SignalWarning,
    Unit,
    noise_multiplier_for,
)
from botorch_fed.privacy.aggregation import NoiseAt
from botorch_fed.privacy.channels import Opener
from botorch_fed.privacy.distributed import DistributedRecordSum
from botorch_fed.privacy.tree import Factorization
from botorch_fed.rng import generator
from botorch_fed.search.bandit import PSD, AcquisitionName, BanditSearch, DecisionSets
from botorch_fed.search.bandit_basis import few_features, scaled_features
from botorch_fed.search.ensemble import EnsembleSearch
from botorch_fed.search.messages import (
    NOISE_VAR,
    Message,
    MessageKind,
    RowSearch,
    TransferRows,
)
from botorch_fed.search.noisy import MIN_RELIABILITY, NoisyTransfer
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.related import FEWEST_SITES, RelatedSum, suits
from botorch_fed.search.released import RIDGE, Following, ReleaseMessage, ReleaseSearch
from botorch_fed.search.sums import TransferSum, mechanism_of
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy, ThompsonSearch
from botorch_fed.search.transfer import MIN_OWN, TransferSearch, default_private_features
from botorch_fed.search.transfer import (
    default_feature_map as transfer_feature_map,
)
from botorch_fed.space import SearchSpace, Value
from botorch_fed.storage.store import Blobs, MemoryStore, Store

logger = logging.getLogger(__name__)

LENGTHSCALE = 0.2  # of a published strategy's shared basis, in two dimensions of the unit cube
NUM_FEATURES = 100
RELEASES = (0, 4)  # of own means, which are averaged
FOLLOWED = (0, 1, 2, 3)  # with `Following`, which looks at the newest
FIRST_POINTS = 10  # with `Following`
USUAL_INITIAL = 4  # first points of a site in FBO-FedGP, where `TransferSearch` does not say more


@dataclass(frozen=True, kw_only=True, eq=False)
class Federation(Budgeted):
    """Any search with any aggregation as a study: the settings of all agents and of the server.

    Args:
        budget: How many evaluations each active agent makes, its first points included.
        search: What agents say, and where they look; default `TransferRows`.
        aggregation: Who is asked for what, and how messages become releases; default `Relay`.
        feature_map: The shared basis, for a search that has one; default
            `search.transfer.default_feature_map`.
        num_initial: How many first points an agent without data is dealt, where nobody has said
            anything yet; default 3.
        default: The configuration that users have had so far, a value for each parameter: every
            agent without data evaluates it first, as the first of `num_initial` points.
        design_seed: Of the public sequence from which first points are dealt; default the seed of
            `run` or of the study file, else 0.
        active: Who evaluates; default all.
        data: What agents have observed before, by name, as in `FederatedAgent`.
        q: Points per query; if it does not divide the budget, the last query has fewer.
        candidates: The only points that can be evaluated, `K x d`.
        initial_design: Public points that every agent evaluates first, or its own points by name:
            `federation.points.spread_design` makes them.

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
    design_seed: int | None = None
    active: tuple[AgentId, ...] | None = None
    data: Mapping[AgentId, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    q: int = 1
    candidates: Tensor | None = None
    initial_design: Tensor | Mapping[AgentId, Tensor] | None = None
    _stores: Callable[[AgentId | None], Store] | None = field(default=None, repr=False)
    _names: tuple[AgentId, ...] = field(default=(), repr=False)
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

    def _budget_of(self, rounds: int, names: tuple[AgentId, ...]) -> int | str:
        initial = self.initial_for(names)  # what is asked for together, and not in queries
        return initial + max(rounds, -(-(self._starts - initial) // self.q)) * self.q

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

    def search_over(self, space: SearchSpace) -> Search:
        """The search in a space."""
        return self.make_search()

    def from_centre(self, space: SearchSpace) -> Self:
        """The study with the centre of a space as its default, unless it says where to begin.

        A published search takes no default, and begins as it does.
        """
        suits = isinstance(self.search_over(space), TransferRows | TransferSum | NoisyTransfer)
        given = (self.default, self.initial_design, self.candidates)
        if not suits or any(one is not None for one in given):
            return self
        middle = space.snap(torch.full((1, space.dim), 0.5, dtype=torch.float64))
        (centre,) = space.from_unit(middle)
        return replace(self, default=centre)

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
        key = (space, names := tuple(names))
        if key not in self._made:
            search, basis = self.search_over(space), self.feature_map
            if basis is None and search.has_basis:
                basis = self.make_basis(space.shared)
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
                design_seed=self.design_seed or 0,
                active=self.active,
            )
        terms: Terms = self._made[key]
        return terms

    def _counted_terms(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Terms:
        """The terms, for a hub whose aggregation counts rounds with how many there are."""
        terms = Federation.terms(self, space, names)
        if not names or not isinstance(terms.aggregation, NoisySum | SecureSum):
            return terms
        key = ("hub", space, names := tuple(names))
        if key not in self._made:
            counted = replace(terms.aggregation, rounds=self.rounds_for(names))
            self._made[key] = replace(terms, aggregation=counted)
        made: Terms = self._made[key]
        return made

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> FederatedServer:
        """The server of a study."""
        names = tuple(names)
        if self._names and self._names != names and self.make_aggregation().keeps_secrets:
            raise InputDataError(
                f"with_stores was told of other agents, {list(self._names)[:8]}, than the server, "
                f"{list(names)[:8]}: name the same ones."
            )
        unknown = sorted({*self.data, *self._named} - set(names))
        if unknown:
            raise InputDataError(f"Data or weights of agents that are no agents: {unknown[:8]}.")
        check_designs(self.initial_design, names)
        self._note(names, space)
        return FederatedServer(terms=self.terms(space, names), resources=self.hub_resources())

    def _note(self, names: tuple[AgentId, ...], space: SearchSpace) -> None:
        """Log warnings where nobody would read messages, or send one."""
        search = self.make_search()
        if search.alone or search.least is None:
            return
        note_one_site(names)
        if self.budget < search.least and not self.data and space.fidelity is None:
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

    # -------------------------------------------------------------- what each party has

    def with_stores(
        self, names: tuple[AgentId, ...], stores: Callable[[AgentId | None], Store]
    ) -> Self:
        """The study for these agents, with what must be kept in stores.

        Args:
            names: All agents, as the server names them.
            stores: An agent's own store from its name, the server's from None; a process is asked
                for none but those of the parts it plays.
        """
        return replace(self, _stores=stores, _names=tuple(names))

    def dealt_by(self, seed: int) -> Self:
        """The study with first points of a seed, unless it says which."""
        if self.design_seed is not None or self.initial_design is not None or seed == 0:
            return self
        return replace(self, design_seed=seed % (MAX_SEED + 1))

    def provision(self, space: SearchSpace) -> None:
        """Make the one key of ``"ckks"``, once: its public part into all stores, its secret one
        into the agents'. The server's comes last, so that what a crash left behind is made anew.
        """
        if not self._has_one_key or self._stores is None:
            return
        server = self._store(None)
        if server.get(CONTEXT) is None:
            key = new_key()
            for name in self._names:
                key.provision(self._store(name))
            server.put_new(CONTEXT, key.context)

    def _store(self, name: AgentId | None) -> Store:
        """An agent's own store, or for None the server's."""
        if self._stores is None or not self.make_aggregation().keeps_secrets:
            return MemoryStore()
        return self._stores(name)

    @property
    def _has_one_key(self) -> bool:
        return getattr(self.make_aggregation(), "channel", None) == "ckks"

    @property
    def _key(self) -> OneKey | None:
        """The one key where one process plays all parts, made for all of them."""
        if not self._has_one_key or self._stores is not None:
            return None
        if "key" not in self._made:
            self._made["key"] = new_key()
        key: OneKey = self._made["key"]
        return key

    def hub_resources(self) -> Resources:
        """What the hub has and no other party knows: of the one key, if there is one, a part."""
        store = self._store(None)
        if self._key is not None:
            store.put_new(CONTEXT, self._key.context)
        return Resources(secrets=store)

    def site_resources(self, name: AgentId) -> Resources:
        """What a site has and no other party knows: its keys."""
        store = self._store(name)
        if self._key is not None:
            self._key.provision(store)
        if self._has_one_key:
            context_in(store)  # a missing key is named before the run begins
        return Resources(secrets=store)

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

    def alone(self) -> Federation:
        """The baseline of comparisons: agents with the default search and without messages."""
        return FTS(
            budget=self.budget,
            strategy=TransferSearch(listen=False),
            every=0,
            num_initial=self.num_initial,
            default=self.default,
            design_seed=self.design_seed,
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
        feature_map: The shared basis; default `search.transfer.default_feature_map`, or for a
            published strategy random Fourier features of a public SE kernel.
        num_initial: How many first points an agent without data is dealt, where nobody has said
            anything yet; default 3, or none for a published strategy.
        default: The configuration that users have had so far, a value for each parameter: every
            agent without data evaluates it first, as the first of `num_initial` points, and can
            only gain on it. With `TransferSearch`, and instead of an `initial_design`.
        design_seed: Of the public sequence from which first points are dealt; default the seed of
            `run` or of the study file, else 0.
        active: Who evaluates; default all. The others give a message before the start.
        data: What agents have observed before, by name, as in `FederatedAgent`.
        q: Points per query; if it does not divide the budget, the last query has fewer.
        candidates: The only points that can be evaluated, `K x d`.
        initial_design: Public points that every agent evaluates first, or its own points by name:
            `federation.points.spread_design` makes them.

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


DPTrust = Literal["central", "distributed"]
_OF_AGENTS = {
    "channel": "a trusted server reads every message.",
    "colluding": "a trusted server adds all the noise.",
    "dropping": "a trusted server adds all the noise.",
    "opened_by": "a trusted server makes the releases.",
    "identities": "a trusted server reads every message, and there is no joint key.",
    "min_agents": "a trusted server adds all the noise, and there is no joint key.",
}
_OF_A_SERVER = {
    "sampling": "a sample of the agents saves noise only while nobody knows who is in it, and each "
    "agent knows whether it adds noise to a sum.",
    "num_regions": "the server weighs each message by its agent's region, and reads it for that.",
    "exploration": "the server weighs each message by its agent's region, and reads it for that.",
    "noise_kind": "agents add one kind of noise, discrete Gaussian.",
    "trim": "the server compares single messages, and a sum has none.",
    "switch_to_local_after": "a site keeps the newest sum that it has read.",
    "shared_ledger": "each site pays from a ledger of its own.",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class DPFTSDE(Federation):
    r"""Differentially private federated Thompson sampling: noisy sums of messages are released.

    By default agents average the releases and take them, as loud as they are reliable, as the prior
    of their own model (`search.noisy`). With ``strategy=Following()`` they follow releases greedily
    in their first queries and are alone afterwards, as published by regions (`search.released`).

    ::

        trust           adds the noise         reads a message             pays
        "central"       the server             the server                  the hub's ledger
        "distributed"   each agent, a share    nobody, with a joint key    each site's ledger

    The unit is an agent; the adjacency is zero-out, or replace-one. With ``trust="central"`` the
    guarantee (`aggregation.noisy`) is against all other agents together, and the server is trusted.
    With ``trust="distributed"`` (`aggregation.secure_sum`) nobody is trusted with a message: the
    agents' own discrete Gaussian noise is in the sum before it is decrypted, and under a joint key
    the guarantee is against the server together with up to `colluding` other agents. That costs
    noise: :math:`\sqrt{N / (N - c - d)}` times as much for `c` colluding and `d` missing agents of
    `N`, and some per cent for the RDP accountant. All but the colluding agents add their noise;
    under a joint key the server may do what it likes. What needs single messages, or a sample that
    is secret, goes with ``"central"`` only: `sampling`, `num_regions`, `trim`, and other kinds of
    noise.

    Args:
        budget: How many evaluations each active agent makes, the initial ones included. The number
            of rounds is ``T = budget - initial points``, of the agent that lacks most of them; one
            that has data for some evaluates fewer.
        epsilon: What the whole run may reveal about one agent; the noise follows from it.
        noise_multiplier: Instead of `epsilon`, the noise itself.
        delta: Beside `epsilon`, below one over the number of agents; default the smaller one of
            0.01 and ``N ** -1.1``.
        trust: Who adds the noise: ``"central"``, a trusted server, or ``"distributed"``, each
            agent.
        channel: With ``trust="distributed"``, how messages reach their sum: ``"threshold"`` (the
            default, a joint key), ``"ckks"`` (one key of all agents) or ``"plain"``.
        colluding: With ``trust="distributed"``, how many agents may put their shares of noise
            together; a single curious agent counts.
        dropping: With ``trust="distributed"``, how many agents may be missing from a release: with
            fewer, nothing more is released. Under a joint key a sum that a missing agent interrupts
            is drawn and paid again, in the place of a later one.
        releases: After which rounds something is released; default 0 and 4, or 0 alone where
            `active` are newcomers to others who have finished; with `Following` 0, 1, 2 and 3.
            ``"all"`` for 0, …, T - 1.
        num_regions: The number `P` of regions, with `Following`; 1 is DP-FTS.
        exploration: How much an agent counts in its own region.
        sampling: Who takes part in a release.
        noise_kind: See `NoisySum`; ``"none"`` is FTS-DE, which is not private.
        message: What agents send: ``"own_mean"``, the default, goes with `TransferSearch`, and
            ``"gain"``, ``"mean"`` and ``"sample"`` with `Following`, by default ``"gain"``.
        clip_norm: The bound on a message's norm; default 1 for own means and gains, which fill it,
            and `suggested_clip_norm` for others.
        feature_map: The shared basis; default `default_private_features`, with `TransferSearch`
            on the scale of the own model.
        noise_var: Noise variance that weight messages are made with, on the public scale.
        beta: Scale of a sample's deviation from the mean.
        num_initial: How many points every agent evaluates first; default 3, of which those that
            it has data for are left out, or with `active` none but the `default`; with `Following`
            10 in its own region.
        default: The configuration that users have had so far, a value for each parameter: every
            agent without data evaluates it first, as the first of `num_initial` points, and can
            only gain on it. Public: never one that was found on the agents' data. With
            `TransferSearch`, and instead of an `initial_design`.
        design_seed: Of the public sequence from which first points are dealt; default the seed of
            `run` or of the study file, else 0.
        ridge: Of a gain's projection on the basis, see `ReleaseMessage`.
        strategy: How agents use releases and data.
        min_reliability: With `TransferSearch`, the least share of agreement that is listened to. A
            run in which even early messages of related agents would have less, all releases
            together, releases nothing, spends nothing and warns; 0 for releases in any case.
        switch_to_local_after: The last round in which agents listen; default they always do.
        active: Who evaluates; default all. The others, who have finished, are in the releases with
            the data that they have, and pay for them like everybody.
        trim: How many messages are left out at each end of every coordinate, see `NoisySum`; with
            ``noise_kind="none"`` only.
        adjacency: What a neighbouring world is.
        require: The most that agents let a run reveal about them.
        shared_ledger: A durable ledger that pays as well, e.g. for pilot runs too.
        noise: Where noise and secret coins come from. The default is the operating system, so a run
            cannot be repeated; `InsecureSeededNoise(seed)` can, and protects nothing.
        run: With ``trust="distributed"``, the run's name: agents whose `secrets` outlive a run need
            another one for the next.
        secrets: With ``trust="distributed"``, makes an agent's store of keys from its name; default
            in memory, and with ``run(out=…)`` in the folder of the agent's site.
        rejoin: With ``trust="distributed"``, whether an agent that was lost is taken into a new
            joint key when it is back.
        opened_by: With a joint key, who learns the releases: the ``"agents"`` (default), or the
            ``"server"`` as well, which a report of their signal-to-noise needs.
        identities: With a joint key, the agents' public identity keys by name
            (`privacy.channels.identity`), for runs across machines.
        min_agents: With a joint key, the fewest agents of a release; default half of all.
        search: Another search in the place of these settings.
        aggregation: Another aggregation than `NoisySum` or `SecureSum`.
        data: What agents have observed before, by name.
        q: Points per query.
        candidates: The only points that can be evaluated, `K x d`.
        initial_design: Public points that every agent evaluates at the start, or its own points by
            name: `federation.points.spread_design` makes them. Default those that it is dealt, or
            with `Following` random ones in its own region.

    Example:
        >>> result = run(DPFTSDE(budget=23, epsilon=2.0), SklearnTuning(4), seed=0)
        >>> result.privacy["epsilon"] <= 2.0
        True
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    trust: DPTrust = "central"
    channel: ChannelKind | None = None
    colluding: int = 1
    dropping: int = 0
    releases: tuple[int, ...] | Literal["all"] | None = None
    num_regions: int = 1
    exploration: ExplorationSchedule = SoftmaxSchedule()  # noqa: RUF009 - frozen
    sampling: Sampling = PoissonSampling()  # noqa: RUF009 - frozen
    noise_kind: NoiseKind = "correlated"
    message: Literal["own_mean", "gain", "mean", "sample"] | None = None
    clip_norm: float | None = None
    noise_var: float = NOISE_VAR
    beta: float = 1.0
    ridge: float = RIDGE
    strategy: TransferSearch | Following = TransferSearch()  # noqa: RUF009 - frozen
    min_reliability: float = MIN_RELIABILITY
    switch_to_local_after: int | None = None
    trim: int = 0
    adjacency: Adjacency = "zero-out"
    require: Budget | None = None
    shared_ledger: SharedLedger | None = None
    noise: NoiseSource = field(default_factory=OSNoise)
    run: str = "run"
    secrets: Callable[[AgentId], Store] | None = None
    rejoin: bool = True
    opened_by: Opener | None = None
    identities: Mapping[AgentId, str] = field(default_factory=dict, repr=False)
    min_agents: int | None = None

    def __post_init__(self) -> None:
        self._check_budget()
        has_design = self.initial_design is not None
        check_start(self.default, transfers=self._transfers, has_design=has_design)
        self._check_trust()
        _ = self.make_search(), self.make_aggregation()  # what they refuse is refused now
        if not self.data:  # with data it depends on who takes part, see `server`
            self._check_releases(())

    def __getstate__(self) -> dict[str, Any]:
        shared_ledger = None if self.shared_ledger is None else LedgerElsewhere()
        return {**self.__dict__, "shared_ledger": shared_ledger}

    @property
    def _transfers(self) -> bool:
        return isinstance(self.strategy, TransferSearch)

    @property
    def initial(self) -> int:
        """How many points every agent evaluates first."""
        if self.num_initial is not None:
            return self.num_initial
        if not self._transfers:
            return FIRST_POINTS
        return MIN_OWN if self.active is None else int(self.default is not None)

    def initial_for(self, names: tuple[AgentId, ...]) -> int:
        """The points of round 0: the initial design, or what an agent lacks of `initial`."""
        design = self.initial_design
        if design is not None:
            each = design.values() if isinstance(design, Mapping) else (design,)
            return max(map(len, each), default=0)
        if not self._transfers:  # random points of the own region, with or without data
            return self.initial
        counts = {name: len(X) for name, (X, _) in self.data.items()}
        return missing_points(self.initial, names, self.active, counts)

    def _check_trust(self) -> None:
        """Refuse settings that the other kind of trust has."""
        if self.trust not in get_args(DPTrust):
            raise InputDataError(f"trust is one of {get_args(DPTrust)}, got {self.trust!r}.")
        others = _OF_AGENTS if self.trust == "central" else _OF_A_SERVER
        usual = {item.name: item.default for item in fields(self)} | {"identities": {}}
        for name, why in others.items():
            value = getattr(self, name)
            if value == usual[name] or (name, value) == ("noise_kind", "none"):
                continue
            other = "distributed" if self.trust == "central" else "central"
            raise InputDataError(
                f"{name} goes with trust={other!r} only: {why} Leave {name} out, or write "
                f"trust={other!r}."
            )
        if self.trust == "central" or self.aggregation is not None:
            return
        noisy = self.epsilon is not None or self.noise_multiplier is not None
        if noisy == (self.noise_kind == "none") and self._planned != ():
            raise InputDataError(
                "A private run needs epsilon or noise_multiplier. One without privacy (FTS-DE) is "
                'noise_kind="none" and neither.'
            )

    def _check_releases(self, names: tuple[AgentId, ...]) -> None:
        """Refuse a plan of which nothing is left; an empty one is the user's own."""
        rounds, initial, planned = self.rounds_for(names), self.initial_for(names), self._planned
        rest = range(rounds) if planned == "all" else planned
        if planned == () or any(t < rounds for t in rest):
            return
        if not rounds:
            raise no_round(self.budget, initial, "releases=()")
        assert isinstance(planned, tuple)
        raise InputDataError(
            f"Nothing would ever be released: releases = {planned} come after the last of "
            f"{rounds} rounds. Write releases = (0,), or budget = "
            f"{initial + self.q * min(planned) + 1} or more. Sites that search alone on purpose "
            "have releases=()."
        )

    @property
    def _planned(self) -> tuple[int, ...] | Literal["all"]:
        if self.releases is not None:
            return self.releases
        if not self._transfers:
            return FOLLOWED
        return RELEASES if self.active is None else RELEASES[:1]  # who is done has no more to say

    def make_search(self) -> Search:
        """The search of the strategy."""
        if self.search is not None:
            return self.search
        if isinstance(self.strategy, TransferSearch):
            if self.message not in (None, "own_mean"):
                raise InputDataError(
                    f"message={self.message!r} does not go with TransferSearch, which sends an "
                    '"own_mean": leave message out, or give strategy=Following().'
                )
            if self.num_regions > 1:
                raise InputDataError(
                    "TransferSearch listens to one release for the whole space: leave out "
                    "num_regions, or give strategy=Following()."
                )
            norm = 1.0 if self.clip_norm is None else self.clip_norm
            return NoisyTransfer(
                clip_norm=norm, min_reliability=self.min_reliability, strategy=self.strategy
            )
        kind = "gain" if self.message is None else self.message
        if kind == "own_mean":
            raise InputDataError(
                'message="own_mean" does not go with Following, which sends a "gain", a "mean" or '
                'a "sample": leave message out.'
            )
        messages = ReleaseMessage(kind, self.clip_norm, self.noise_var, self.beta, self.ridge)
        return ReleaseSearch(
            messages=messages, num_regions=self.num_regions, strategy=self.strategy
        )

    def make_aggregation(self) -> Aggregation:
        """Noisy sums by a trusted server, or by the agents."""
        if self.aggregation is not None:
            return self.aggregation
        if self.trust == "distributed":
            return SecureSum(
                channel=self.channel or "threshold",
                epsilon=self.epsilon,
                noise_multiplier=self.noise_multiplier,
                delta=self.delta,
                colluding=self.colluding,
                dropping=self.dropping,
                adjacency=self.adjacency,
                releases=self._paid_releases,
                run=self.run,
                rejoin=self.rejoin,
                opened_by=self.opened_by,
                identities=tuple(sorted(self.identities.items())),
                min_agents=self.min_agents,
            )
        return NoisySum(
            releases=self._planned,
            epsilon=self.epsilon,
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            noise_kind=self.noise_kind,
            sampling=self.sampling,
            exploration=self.exploration,
            switch_to_local_after=self.switch_to_local_after,
            trim=self.trim,
            adjacency=self.adjacency,
        )

    @property
    def _paid_releases(self) -> tuple[int, ...]:
        """What agents add noise for: a word of the terms, which the data of a site are not."""
        rounds = self.budget if self.data else self.rounds
        planned = range(rounds) if self._planned == "all" else self._planned
        return tuple(t for t in planned if t < rounds)

    def make_basis(self, space: SearchSpace) -> FeatureMap:
        """A small basis, for the default search on the scale of the own model."""
        phi = default_private_features(space)
        return WarpedFeatures.around(phi, space.log_offsets) if self._transfers else phi

    def terms(self, space: SearchSpace, names: tuple[AgentId, ...] = ()) -> Terms:
        """What all parties agree upon; with a roster also how many rounds there are."""
        return self._counted_terms(space, names)

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> FederatedServer:
        """The server of a study."""
        if self.active is not None and set(self.active) == set(names):
            raise InputDataError("active names all agents: leave it out.")
        self._check_releases(names)
        if self._planned != ():
            note_one_site(names)
        return super().server(space, names)

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees:
        """Who sees what."""
        terms = self.terms(space, names)
        return terms.aggregation.sees(terms)

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None:
        """What a run costs in privacy; None without noise."""
        terms = self.terms(space, names)
        price = terms.aggregation.price(terms)
        if price is None:
            return None
        return replace(price, guarantee=replace(price.guarantee, private=self.noise.private))

    def alone(self) -> DPFTSDE:
        """The baseline of comparisons: the same agents without messages, noise or payments."""
        return replace(
            self,
            strategy=TransferSearch(listen=False),
            message=None,
            num_regions=1,
            releases=(),
            noise_kind="none",
            epsilon=None,
            noise_multiplier=None,
            trust="central",
            channel=None,
            colluding=1,
            dropping=0,
            opened_by=None,
            identities={},
            min_agents=None,
            require=None,
            shared_ledger=None,
        )

    @property
    def requirement(self) -> dict[str, Any]:
        """What agents require of a promise for all that they send."""
        return {"require": self.require, "adjacency": self.adjacency}

    def _store(self, name: AgentId | None) -> Store:
        """An agent's own store, or for None the server's."""
        if name is None or self.secrets is None:
            return super()._store(name)
        return self.secrets(name)

    def hub_resources(self) -> Resources:
        """Noise, and a ledger that other runs share."""
        return replace(super().hub_resources(), noise=self.noise, shared_ledger=self.shared_ledger)

    def site_resources(self, name: AgentId) -> Resources:
        """Keys, noise, and the ledger from which a site pays for the noise that it adds."""
        resources = replace(super().site_resources(name), noise=self.noise)
        if self.trust == "central":
            return resources
        budget = self.require
        if budget is None and self.epsilon is not None and self.delta is not None:
            budget = Budget(self.epsilon, self.delta)
        return replace(resources, ledger=Ledger(self.adjacency, "agent", budget))


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateUCB(Federation):
    r"""Private GP-UCB as a study, see `aggregation.stream` and `search.bandit`.

    Args:
        budget: How many evaluations an agent makes at most. The number of rounds is
            ``T = floor(budget * agents / batch)``, which is `budget` where all are asked in every
            round. They are asked in turn: if `batch` does not divide ``budget * agents``, some
            agents make one evaluation less.
        epsilon: What the whole run may reveal about one unit; the noise follows from it.
        noise_multiplier: Instead of `epsilon`, the noise itself.
        delta: Beside `epsilon`. The paper's 0.1 is no :math:`\delta`.
        trust: Who adds noise: ``"joint"``, ``"local"``, ``"public"`` (actions), or ``"none"``,
            which has neither epsilon nor a multiplier.
        batch: How many agents are asked in a round; default all.
        feature_map: The shared basis; default that of `search.bandit_basis`, which follows from the
            dimension, the budget and the noise. With private actions features cost noise.
        noise_var: Variance of an outcome on the public scale, a public fact. If it is not known a
            quarter of the squared `outcome_bound` is assumed, and blocks of public actions have the
            public range throughout; with it they need less noise.
        outcome_bound: Outcomes on the public scale are clipped to this range around zero.
        moment_scale: See `RecordStatistic`.
        exploration: See `BanditSearch`; default 1, and with public actions 2, because blocks are
            few.
        acquisition: See `BanditSearch`.
        psd: See `BanditSearch`.
        height: See `BanditSearch`; default 8, and 6 with ``trust="local"``.
        inflate: See `BanditSearch`; by default so with ``trust="local"``, where noise is large, and
            a floor.
        norm_bound: See `BanditSearch`.
        factorization: Of the running sums, see `privacy.tree`.
        adjacency: What a neighbouring world is.
        unit: Whose data are protected: a record, or all of an agent's.
        require: The most that agents let a run reveal about one unit of theirs.
        shared_ledger: A durable ledger that pays as well, e.g. for pilot runs too.
        noise: Where noise comes from. The default is the operating system, so a private run cannot
            be repeated; `InsecureSeededNoise(seed)` can, and protects nothing.
        secrets: Where the server keeps sums without noise; default in memory, and with
            ``run(out=…)`` in the server's part of the folder.
        decision_sets: What an agent may play in a round, by name and round (from 1 on): `K x d`.
        candidates: The only points that can be played, `K x d`; with public actions, public.
        most_per_block: For public actions, the longest block; default a twentieth of all outcomes.
        seed: For public actions, of the server's choices; not secret.
        final_release: Whether the last round is released too; without it noise is a bit smaller.

    Example:
        >>> problem = KernelBandit(num_agents=4, seed=0)
        >>> arms = lambda name, t: problem.decision_set(int(name[5:]), t)
        >>> result = run(PrivateUCB(budget=64, epsilon=10, decision_sets=arms), problem, seed=0)
        >>> result.privacy["epsilon"] <= 10
        True
    """

    refused: ClassVar[frozenset[str]] = frozenset(
        {"q", "num_initial", "default", "design_seed", "active", "data", "initial_design"}
    )  # settings of a `Federation` that a bandit does not have

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    trust: Trust = "joint"
    batch: int | None = None
    noise_var: float | None = None
    outcome_bound: float = 2.0
    moment_scale: float | None = None
    exploration: float | None = None
    acquisition: AcquisitionName = "ucb"
    psd: PSD = "floor"
    height: float | None = None
    inflate: bool | None = None
    norm_bound: float = 0.0
    factorization: Factorization = "sqrt"
    adjacency: Adjacency = "replace-one"
    unit: Unit = "record"
    require: Budget | None = None
    shared_ledger: SharedLedger | None = None
    noise: NoiseSource = field(default_factory=OSNoise)
    secrets: Store | None = field(default=None, repr=False)
    decision_sets: DecisionSets | None = field(default=None, repr=False)
    most_per_block: int | None = None
    seed: int = 0
    final_release: bool = True

    measure: ClassVar[Literal["cumulative"]] = "cumulative"

    def __post_init__(self) -> None:
        self._check_budget()
        if self.trust not in get_args(Trust):
            raise InputDataError(f"trust is one of {get_args(Trust)}, got {self.trust!r}.")
        given = (self.epsilon is not None) + (self.noise_multiplier is not None)
        if given != (self.trust != "none"):
            raise InputDataError(
                "A private run needs epsilon or noise_multiplier, one of the two. One without "
                'privacy is trust="none" and neither.'
            )
        if self.decision_sets is not None and self.trust == "public":
            raise InputDataError(
                'With trust="public" the decision set is fixed and public: give candidates, or '
                "nothing for the whole cube."
            )
        if self.decision_sets is not None and self.candidates is not None:
            raise InputDataError(
                "Give candidates, which are the same in all rounds, or decision_sets."
            )
        if self.data or self.initial_design is not None:
            raise InputDataError(
                "A bandit learns from what is evaluated in its rounds: leave out data and "
                "initial_design."
            )

    # -------------------------------------------------------------- how many rounds

    def rounds_for(self, names: tuple[AgentId, ...]) -> int:
        """As many rounds of `batch` agents as ask nobody more than `budget` times."""
        batch = self.batch and min(self.batch, len(names))  # the server refuses larger ones
        return rounds_of(self.budget, batch, len(names))

    def evaluated(self, names: tuple[AgentId, ...], state: StreamState) -> int:
        """How often an agent has been asked, in turn with the others."""
        return most_participations(1, state.asked, len(names))

    def _budget_of(self, rounds: int, names: tuple[AgentId, ...]) -> int | str:
        if self.batch is None:
            return rounds
        if not names:
            return f"{rounds * self.batch} / the number of agents, rounded up"
        return most_participations(rounds, self.batch, len(names))

    def evaluations_for(self, names: tuple[AgentId, ...]) -> int:
        """One evaluation of each agent that is asked in a round."""
        return self.rounds_for(names) * (len(names) if self.batch is None else self.batch)

    # -------------------------------------------------------------- what it is made of

    @property
    def initial(self) -> int:
        """A bandit has no initial points, unless somebody asks for them: they are refused."""
        return self.num_initial or 0

    def make_search(self) -> Search:
        """The bandit."""
        if self.search is not None:
            return self.search
        local = self.trust == "local"
        usual = {
            "noise_var": self.outcome_bound**2 / 4,
            "exploration": 2.0 if self.trust == "public" else 1.0,
            "height": 6.0 if local else 8.0,
            "inflate": local and self.psd == "floor",
        }
        given = {name: getattr(self, name) for name in usual}
        return BanditSearch(
            **{**usual, **{name: value for name, value in given.items() if value is not None}},
            acquisition=self.acquisition,
            psd=self.psd,
            norm_bound=self.norm_bound,
            decision_sets=self.decision_sets,
        )

    def make_aggregation(self) -> Aggregation:
        """Sums of records, by trust."""
        if self.aggregation is not None:
            return self.aggregation
        common: dict[str, Any] = {
            "horizon": self.budget,
            "batch": self.batch,
            "outcome_bound": self.outcome_bound,
            "moment_scale": self.moment_scale,
            "final_release": self.final_release,
        }
        if self.trust == "none":
            return Stream(**common)
        for name in ("epsilon", "noise_multiplier", "delta", "adjacency", "unit"):
            common[name] = getattr(self, name)
        if self.trust == "local":
            return LocalStream(**common)
        if self.trust == "joint":
            return JointStream(factorization=self.factorization, **common)
        return PublicStream(
            candidates=self.candidates,
            most_per_block=self.most_per_block,
            seed=self.seed,
            fit_scales=self.feature_map is None,
            narrow=self.noise_var is not None,
            **common,
        )

    def make_basis(self, space: SearchSpace) -> FeatureMap:
        """What follows from the dimension, the budget and the noise; of the roster nothing."""
        if self.trust == "public":
            return scaled_features(space.dim)
        return few_features(space, records=self.budget, noise_std=self._planned_noise)

    @property
    def _planned_noise(self) -> float:
        """The deviation of the noise in a number of the last sum, if one agent is in each round."""
        if self.trust == "none":
            return 0.0
        given = self.budget if self.unit == "agent" else 1
        multiplier = self.noise_multiplier
        if multiplier is None:
            assert self.epsilon is not None
            multiplier = noise_multiplier_for(
                epsilon=self.epsilon,
                delta=self.delta,
                sampling_rate=1.0,
                num_releases=given if self.trust == "local" else 1,
                adjacency=self.adjacency,
            )
        common: dict[str, Any] = {
            "num_features": 1,
            "outcome_bound": self.outcome_bound,
            "noise_multiplier": multiplier,
            "adjacency": self.adjacency,
            "unit": self.unit,
        }
        if self.moment_scale is not None:
            common["moment_scale"] = self.moment_scale
        if self.trust == "local":
            return LocalGaussian(**common).noise_std(self.budget)
        summed = PrefixSum(
            horizon=self.budget,
            factorization=self.factorization,
            participations=given,
            **common,
        )
        return summed.noise_std(self.budget)

    @property
    def requirement(self) -> dict[str, Any]:
        """What agents require."""
        return {"require": self.require, "unit": self.unit, "adjacency": self.adjacency}

    def dealt_by(self, seed: int) -> Self:
        """A bandit has no first points."""
        return self

    def hub_resources(self) -> Resources:
        """Noise, secrets and ledgers; with local noise the hub pays for nothing."""
        budget = None
        if self.epsilon is not None and self.trust in ("joint", "public"):
            budget = Budget(self.epsilon, self.delta)
        secrets = self.secrets
        if secrets is None:
            secrets = MemoryStore() if self._stores is None else self._stores(None)
        return Resources(
            noise=self.noise,
            secrets=secrets,
            ledger=Ledger(self.adjacency, self.unit, budget),
            shared_ledger=self.shared_ledger,
        )

    def site_resources(self, name: AgentId) -> Resources:
        """Noise, and the ledger from which a site with local noise pays."""
        return Resources(noise=self.noise, ledger=Ledger(self.adjacency, self.unit, self.require))

    def __getstate__(self) -> dict[str, Any]:
        shared_ledger = None if self.shared_ledger is None else LedgerElsewhere()
        own: dict[str, Any] = {
            "shared_ledger": shared_ledger,
            "secrets": None,
            "_stores": None,
            "_made": {},
        }
        return {**self.__dict__, **own}

    # -------------------------------------------------------------- what a reader needs

    def alone(self) -> FTS:
        """The baseline of comparisons: agents with models of their own, without messages."""
        strategy = TransferSearch(listen=False)
        return FTS(budget=self.budget, every=0, strategy=strategy, candidates=self.candidates)

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees:
        """Who sees what."""
        return self.server(space, names).sees

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None:
        """What a run costs in privacy; None without noise."""
        return self.server(space, names).price


@dataclass(frozen=True, kw_only=True, eq=False)
class FedGP(Federation):
    r"""Federated Bayesian optimisation with sums of messages [FBOFedGP]_, see `secure_sum`.

    Agents without enough data evaluate their first points in round 0, before any sum; rounds 1 to
    `T` are one query each, and after each of them a sum of the agents' messages is opened. What
    agents add, and what a sum says about the next point, is the search::

        search            numbers in a sum         what a sum tells its readers
        TransferSearch    M + 6, mostly 106        the sum of the agents' mean functions, and of the
                                                   trusts they have earned (search.sums)
        the same, 8-15    24,121 in ten            also that of RegionSearch, and of the logarithms
        inputs            dimensions               of the outcomes' scales (search.related)
        SupportSearch     k(k + 3)/2               the summary of all data on k support points
        RegionSearch      several such             the same in a region, and moments of outcomes

    `TransferSearch` is the default: a site's own model and expected improvement, with the sum
    minus its own part as a prior whose trust it earns. Agents without data are dealt the points of
    one sequence; with ``num_initial=0`` they evaluate nothing in round 0 and begin where the
    others' sum is largest. `SupportSearch` is the paper's (dPITC): a fixed kernel and support set,
    a coin :math:`p_t` between own and shared model. `RegionSearch` is for one function that all
    agents share.

    Args:
        budget: How many evaluations each active agent makes, the initial ones included. The number
            of rounds is ``T = budget - initial points``, of the agent that lacks most of them; one
            that has data for some evaluates fewer.
        search: How points are found; default `TransferSearch`. Or `SupportSearch`, `RegionSearch`.
        aggregation: Another aggregation than `SecureSum`.
        feature_map: The shared basis of `TransferSearch`, public; default leading functions of a
            public kernel (`search.transfer.default_feature_map`).
        channel: ``"threshold"`` (default), ``"ckks"`` or ``"plain"``.
        mechanism: Makes the mechanism from the size of a contribution and the number of agents;
            None for no privacy guarantee.
        noise_at: Who adds the noise.
        sums: The most sums that are opened; default one a round, or with a mechanism
            ``budget - num_initial``, whoever has data; see also `active`.
        num_initial: How many points an agent without data evaluates first; default 3 with
            `TransferSearch`, or where `data` are given to some none but the `default`, and 4
            otherwise. With an `initial_design` it is their number.
        default: As in `Federation`, with `TransferSearch`, and instead of an `initial_design`.
        design_seed: Of the public sequence from which first points are dealt; default the seed of
            `run` or of the study file, else 0.
        active: Who evaluates; default all. The others contribute to sums with the data that they
            have. With `TransferSearch` `sums` is then 1 by default: what those who have finished
            say does not change, so that the difference of two sums would be what the active agents
            have added, and a single one's function.
        data: What agents have observed before, by name.
        q: Points per query; 1 with `SupportSearch`.
        candidates: The only points that can be evaluated, `K x d`.
        initial_design: Public points that every agent evaluates first, or its own points by name.
        precision: Of the public grid, relative to the largest contribution; default the finest
            at which sums are exact, or with `TransferSearch` at which they are short.
        run: The run's name: agents whose `secrets` outlive a run need another one for the next.
        delta: Of the promise.
        require: The most that agents let a run reveal about them.
        noise: Where noise comes from. The default is the operating system, so a private run cannot
            be repeated; `InsecureSeededNoise(seed)` can, and protects nothing.
        secrets: Makes an agent's store of keys from its name; default in memory, and with
            ``run(out=…)`` in the folder of the agent's site.
        rejoin: Whether an agent that was lost is taken into a new joint key when it is back.
        opened_by: Who learns the sums of ``"threshold"``: the ``"agents"`` (default), or the
            ``"server"`` as well.
        identities: The agents' public identity keys by name (`privacy.channels.identity`), for
            ``"threshold"`` across machines; without them agents take the first that they are told.
        min_agents: The fewest agents under a joint key; default half of all, and four where
            summaries are added by default (`common`). With less than four they are not.
        common: With `TransferSearch` and 8 to 15 inputs: add summaries of the data as well, by
            which sites find out whether all have one function, and then search together. By
            default so do four sites or more, once they have so many observations that no site
            can read single records of the others in one sum (`search.related`); the difference of
            two sums can still show the new records of all others, without their owners. True for
            any number of sites from the second sum on: each then reads records of the others. False
            for short messages (106 numbers in ten dimensions), and sums that say less; so it is
            with `active` or one sum.

    A process that plays one part says by `with_stores` who takes part and where its secrets lie.
    With ``"ckks"`` somebody whom all agents trust calls `provision` before, once: a machine that
    reaches all stores.

    References:
        * [FBOFedGP]_ Federated Bayesian optimization based on secure distributed Gaussian processes
          (FBO-FedGP). Withdrawn submission to ICLR 2026.

    Example:
        >>> result = run(FedGP(budget=8, channel="plain"), SyntheticGPAgents(3), seed=0)
    """

    budget: int
    search: TransferSearch | SupportSearch | RegionSearch = TransferSearch()  # type: ignore[assignment] # noqa: RUF009
    channel: ChannelKind = "threshold"
    mechanism: Callable[[int, int], Any] | None = None
    noise_at: NoiseAt = "none"
    sums: int | None = None
    precision: float | None = None
    run: str = "run"
    delta: float = 1e-5
    require: Budget | None = None
    noise: NoiseSource = field(default_factory=OSNoise)
    secrets: Callable[[AgentId], Store] | None = None
    rejoin: bool = True
    opened_by: Opener | None = None
    identities: Mapping[AgentId, str] = field(default_factory=dict, repr=False)
    min_agents: int | None = None
    common: bool | None = None

    def __post_init__(self) -> None:
        self._check_budget()
        has_design = self.initial_design is not None
        check_start(self.default, transfers=self._transfers, has_design=has_design)
        if self.feature_map is not None and not self.make_search().has_basis:
            raise InputDataError(
                f"{type(self.search).__name__} has no shared basis: leave feature_map out."
            )
        if self.common is not None and not self._transfers:
            raise InputDataError("common is for search=TransferSearch(): leave it out.")
        _ = self.make_aggregation()  # what it refuses is refused now
        if not self.data:  # with data it depends on who takes part, see `server`
            self._check_sums(())

    def _check_sums(self, names: tuple[AgentId, ...]) -> None:
        """Refuse a study that never adds anything, unless its search does without."""
        rounds, initial = self.rounds_for(names), self.initial_for(names)
        if isinstance(self.search, SupportSearch) and not self.search.ever_together:
            return
        if self.sums == 0:
            raise InputDataError("sums = 0 opens no sum: leave it out, or write sums = 1 or more.")
        if not rounds:
            raise no_round(self.budget, initial, 'search=SupportSearch(models="local")')

    @property
    def _transfers(self) -> bool:
        return isinstance(self.search, TransferSearch)

    @property
    def initial(self) -> int:
        """How many points an agent without data evaluates in round 0."""
        design = self.initial_design
        if design is not None:
            each = design.values() if isinstance(design, Mapping) else (design,)
            return max(map(len, each), default=0)
        if self.num_initial is not None:
            return self.num_initial
        if not self._transfers:
            return USUAL_INITIAL
        return int(self.default is not None) if self.data else MIN_OWN

    def initial_for(self, names: tuple[AgentId, ...]) -> int:
        """The points of round 0: the initial design, or what an agent lacks of `initial`."""
        if self.initial_design is not None:
            return self.initial
        counts = {name: len(X) for name, (X, _) in self.data.items()}
        return missing_points(self.initial, names, self.active, counts)

    @property
    def requirement(self) -> dict[str, Any]:
        """What agents require."""
        return {"require": self.require}

    # -------------------------------------------------------------- its parts

    def make_search(self) -> Search:
        """The search; one that needs to know for how many evaluations gets the budget."""
        if isinstance(self.search, TransferSearch):
            return TransferSum(strategy=self.search)
        search, given = self.search, max((len(X) for X, _ in self.data.values()), default=0)
        if isinstance(search, RegionSearch):
            given = max(search.given, given)
            return replace(search, given=given, horizon=search.horizon or self.budget)
        if isinstance(search, SupportSearch) and search.horizon is None:
            return replace(search, horizon=self.budget + given)
        return search

    def search_over(self, space: SearchSpace) -> Search:
        """The default one adds up data as well, where inputs are many and all sites evaluate."""
        search = self.make_search()
        if not isinstance(search, TransferSum) or self.common is False or not suits(space.dim):
            return search
        if space.outcomes and self.common is None:  # the summaries are of one outcome
            return search
        if self.active is not None or self.sums == 1:  # it would have the scale alone
            return search
        if space.fidelity is not None and self.common is None:  # its region has no fidelity
            return search
        held = self.common is None
        if held and self.min_agents is not None and self.min_agents < FEWEST_SITES:
            return search  # sums of fewer are wanted
        return RelatedSum(strategy=search.strategy, held=held)

    def make_aggregation(self) -> Aggregation:
        """Messages are added up."""
        if self.aggregation is not None:
            return self.aggregation
        sums = self.sums
        if sums is None and self.mechanism is not None:
            sums = self.rounds  # a word of the terms, which data are not
        return SecureSum(
            channel=self.channel,
            mechanism=self.mechanism,
            noise_at=self.noise_at,
            sums=sums,
            precision=self.precision,
            run=self.run,
            delta=self.delta,
            rejoin=self.rejoin,
            opened_by=self.opened_by,
            identities=tuple(sorted(self.identities.items())),
            min_agents=self.min_agents,
        )

    def alone(self) -> FedGP:
        """The baseline of comparisons: the same agents, which do not use the sums."""
        return replace(
            self,
            search=TransferSearch(listen=False),
            common=False,
            channel="plain",
            mechanism=None,
            noise_at="none",
            require=None,
            opened_by=None,
            identities={},
            min_agents=None,
        )

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees:
        """Who sees what."""
        return self._summed.sees(self.terms(space, names))

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None:
        """What a run costs in privacy; None without noise."""
        price = self._summed.price(self.terms(space, names))
        if price is None:
            return None
        return replace(price, guarantee=replace(price.guarantee, private=self.noise.private))

    @property
    def _summed(self) -> SecureSum:
        found = self.make_aggregation()
        if not isinstance(found, SecureSum):
            raise InputDataError(f"Expected a SecureSum, got {type(found).__name__}.")
        return found

    def terms(self, space: SearchSpace, names: tuple[AgentId, ...] = ()) -> Terms:
        """What all parties agree upon; with a roster also how many rounds there are."""
        with warnings.catch_warnings():  # a server warns
            warnings.simplefilter("ignore", SignalWarning)
            return self._counted_terms(space, names)

    # -------------------------------------------------------------- what each party has

    def _store(self, name: AgentId | None) -> Store:
        """An agent's own store, or for None the server's."""
        if name is None or self.secrets is None:
            return super()._store(name)
        return self.secrets(name)

    def hub_resources(self) -> Resources:
        """The hub's store has the public part of the one key, if there is one."""
        return replace(super().hub_resources(), noise=self.noise)

    def site_resources(self, name: AgentId) -> Resources:
        """A site's store has its keys."""
        return replace(super().site_resources(name), noise=self.noise)

    # -------------------------------------------------------------- who plays

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> FederatedServer:
        """The server of a study."""
        self._check_sums(names)
        terms = self.terms(space, names)
        mechanism = mechanism_of(terms)
        if self.mechanism is not None and mechanism is not None:
            self.mechanism(terms.search.size(terms), len(names))  # warns of noise without signal
        if isinstance(mechanism, DistributedRecordSum):
            self._check_records(mechanism)
        if self.search.listen if isinstance(self.search, TransferSearch) else True:
            note_one_site(names)
        return super().server(space, names)

    def _check_records(self, mechanism: DistributedRecordSum) -> None:
        given = max((len(X) for X, _ in self.data.values()), default=0)
        if self.initial_design is None:
            given = max(given - self.initial, 0)
        if mechanism.max_records < given + self.budget:
            raise InputDataError(
                f"Agents have up to {given + self.budget} records, the mechanism has room for "
                f"{mechanism.max_records}."
            )


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
