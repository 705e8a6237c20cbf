r"""Federated Bayesian optimisation with a shared sparse Gaussian process [FBOFedGP]_.

    message    from -> to       content                                        readable by
    Setup      server -> agent  search space, search settings, grid, channel   all
    Order      server -> agent  what to do: key, start, query, resend, share   that agent
    Keys       server -> agent  everybody's messages of a joint key            all agents
    Word       agent -> server  a part of the joint key, or of an opening      server (and all)
    Upload     agent -> server  the protected contribution to a sum            see the channel
    Sealed     server -> agent  the sum, still protected                       who holds keys
    Opened     server -> agent  the sum                                        server, all agents

Round 0 is the start, rounds 1 to `T` are one query of every active agent each. After a round the
agents' contributions are added (`privacy.aggregation`), at most one sum a round, shared by all.
What they add, and what a sum says about the next point, is the search:

    search            numbers in a sum              what a sum tells its readers
    TransferSearch    M + 6, mostly 106             the sum of the agents' mean functions, and of
                                                    the trusts they have earned (`mean_search`)
    SupportSearch     k(k + 3)/2                    the summary of all data on `k` support points
    RegionSearch      several such                  the same in a region, and moments of outcomes

*Search*. `TransferSearch` is the default: a site's own model and expected improvement, with the sum
minus its own part as a prior whose trust it earns. `SupportSearch` is the paper's (dPITC): a fixed
kernel and support set, a coin :math:`p_t` between own and shared model, UCB, EI, PI or Thompson
sampling on either. `RegionSearch` is for one function that all agents share.

*The start*. With the default search agents without data are dealt the points of one sequence
(`transfer_search.first_points`) in round 0, before any sum, the users' default configuration first
if the setup has one. With ``num_initial=0`` they evaluate
nothing then and go in round 1 where the others' sum is largest: right where most have data.

*A joint key* (`ThresholdCKKSChannel`) belongs to a roster. A member that does not answer costs
a new epoch with the others, three exchanges, then the interrupted round goes on: nobody
evaluates twice; noise is drawn anew and paid again. The lost agent goes on alone, with the sums it
hears of. Each round costs one exchange, and one more where a sum is opened together. Words that do
not fit the set-up are refused, and their sender is lost like one that does not answer.

*Who was away and is back* reads the newest sum and contributes again from the next round on. With
`RegionSearch` a sum can be read only by who has read those before: the server keeps, for whoever
has not been heard since, the last sums (`BACKLOG` of them at most, `BACKLOG_BYTES` together) and
sends them again; who was away for longer goes on alone. The start is not made up for. Under a joint
key a lost agent that answers a query again, and says that it is able to contribute, is taken back
in (`rejoin`) before the next sum: a new epoch, three exchanges; no round is interrupted, so no
noise is paid twice. Once for each agent: one that comes and goes would cost the others a key, and
noise, each time. Sums over the two rosters can be subtracted, as after a loss.

Trust and guarantee: as the channel and the mechanism say. Without a mechanism there is no privacy
guarantee: encryption hides contributions, not their sum, which the server and all agents learn,
and which identifies what changed between two rounds. With a mechanism everything that is opened in
the whole run is :math:`(\epsilon, \delta)`-indistinguishable under its adjacency (zero-out or
replace-one) of its unit (an agent or a record), by the RDP accountant where agents add the noise;
against `colluding` agents as well, who subtract their own. A site pays from its own ledger before
it contributes. Not covered: who sees an agent's own queries and results, and settings that were
tuned on the agents' data.

.. [FBOFedGP] Federated Bayesian optimization based on secure distributed Gaussian processes
   (FBO-FedGP). Withdrawn submission to ICLR 2026.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, Self, TypeVar, get_args

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import BudgetExceeded, MessageError, NumericalError, ProtocolError
from botorch_fed.models import FeatureMap
from botorch_fed.privacy import (
    Adjacency,
    Budget,
    Entry,
    Event,
    GaussianSum,
    Guarantee,
    Ledger,
    OSNoise,
    Unit,
    compose,
)
from botorch_fed.privacy.aggregation import PrivateSum
from botorch_fed.privacy.channels import (
    Channel,
    CKKSChannel,
    Epoch,
    PlainChannel,
    Secrets,
    ThresholdCKKSChannel,
)
from botorch_fed.privacy.distributed import DistributedRecordSum
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat.noise import NoiseSource
from botorch_fed.protocols import mean_search, region_search, support_search
from botorch_fed.protocols.base import MAX_NAME, AgentId, Outbox, Pending
from botorch_fed.protocols.dp_fts_de import check_promise
from botorch_fed.protocols.mean_search import MeanSearch
from botorch_fed.protocols.own_step import (
    check_data,
    check_designs,
    check_public_points,
    design_of,
    public_data,
    tensor_hash,
    untried,
)
from botorch_fed.protocols.region_search import RegionPlan, RegionSearch, RegionView
from botorch_fed.protocols.store import Blobs, MemoryBlobs, MemoryStore, Store
from botorch_fed.protocols.support_search import SupportSearch, SupportView
from botorch_fed.protocols.transfer_search import (
    MIN_OWN,
    Advice,
    TransferSearch,
    check_active,
    check_default,
    check_start,
    default_point,
    first_points,
)
from botorch_fed.rng import Generator, generator
from botorch_fed.space import SearchSpace, Value

logger = logging.getLogger(__name__)

Search = MeanSearch | SupportSearch | RegionSearch
Step = Literal["rest", "key", "start", "query", "resend", "share"]
MAX_KEY_BYTES = 2**24
MIN_TOGETHER = 2  # agents under a joint key: alone one would open one's own contribution
MAX_SUMS = 2 * 10**6  # of a run
BACKLOG = 16  # sums that the server keeps for who was away,
BACKLOG_BYTES = 2**23  # and how large they are together
CONTEXT = "ckks-context"  # the public part of the one key, in the server's store and in agents'


# ------------------------------------------------------------------ messages


@dataclass(frozen=True, eq=False)
class Setup:
    """What all agents agree upon, in public.

    Attributes:
        run: A name that no other run with the same stores of keys has.
        space: The map of inputs and outcomes.
        support: How points are found: the published search, or
        region: the search in a shrinking region, or
        mean: own models with the others' mean functions as a prior. One of the three.
        agents: The names of all agents.
        rounds: How many queries each agent makes, `T`.
        num_initial: How many points an agent evaluates first.
        channel: Name and settings of the channel, in words,
        fingerprint: and in a hash.
        sums: The most sums that are opened.
        promise: What the whole run reveals at most; None if it is not private.
        default: With `mean`, what an agent without data evaluates first, `1 x d`: the first of
            `num_initial` points.
    """

    run: str
    space: SearchSpace
    support: SupportSearch | None
    region: RegionSearch | None
    mean: MeanSearch | None
    agents: tuple[AgentId, ...]
    rounds: int
    num_initial: int
    channel: str
    fingerprint: str
    sums: int
    promise: Guarantee | None
    default: Tensor | None = None

    def __post_init__(self) -> None:
        check_default(self.default, self.space.dim, self.num_initial)
        if self.default is not None and self.mean is None:
            raise InputDataError("A default goes with the search for mean functions only.")
        if not 0 <= self.rounds <= 10**6 or not 0 <= self.num_initial <= 10**4:
            raise InputDataError("rounds lie in 0..10^6 and num_initial in 0..10^4.")
        if not 0 <= self.sums <= MAX_SUMS:
            raise InputDataError(f"sums lie in 0..{MAX_SUMS}, got {self.sums}.")
        if max(map(len, (self.run, self.channel, *self.agents)), default=0) > MAX_NAME:
            raise InputDataError(f"Names have at most {MAX_NAME} characters.")
        if not self.agents or len(set(self.agents)) < len(self.agents):
            raise InputDataError("There must be at least one agent, and names must differ.")
        if len(self._searches) != 1:
            raise InputDataError("A setup has one search, for support, region or mean.")

    @property
    def search(self) -> Search:
        """How points are found."""
        return self._searches[0]

    @property
    def _searches(self) -> list[Search]:
        return [one for one in (self.support, self.region, self.mean) if one is not None]


@dataclass(frozen=True)
class Order:
    """What an agent is to do.

    Attributes:
        step: The step.
        t: The round it belongs to.
        epoch: The number of the epoch.
        roster: Who takes part in it.
        phase: Of the set-up, for a key.
        contribute: Whether a contribution is wanted.
    """

    step: Literal["key", "start", "query", "resend", "share"]
    t: int
    epoch: int
    roster: tuple[AgentId, ...]
    phase: int = 0
    contribute: bool = False


@dataclass(frozen=True, eq=False)
class Keys:
    """Everybody's messages of the set-up of an epoch, one mapping per phase."""

    epoch: int
    heard: tuple[Mapping[AgentId, bytes], ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Sealed:
    """A sum that is still protected; `members` and `previous` as in `Opened`."""

    t: int
    epoch: int
    total: bytes = field(repr=False)
    members: tuple[AgentId, ...]
    previous: int = -1


@dataclass(frozen=True, eq=False)
class Opened:
    """A sum: `D` numbers, and which agents contributed; `previous` is the round of the one
    before, negative for the first."""

    t: int
    total: Tensor = field(repr=False)
    members: tuple[AgentId, ...]
    previous: int = -1


@dataclass(frozen=True)
class Word:
    """A part of a joint key or of an opening; None if the agent has lost its key."""

    data: bytes | None = field(repr=False)


@dataclass(frozen=True)
class Upload:
    """A protected contribution, and whether the agent wants the sum for its next step.

    `able` is for who is not on the roster: whether it could contribute if it were taken back in.
    """

    data: bytes | None = field(repr=False)
    wanted: bool
    able: bool = True


# ------------------------------------------------------------------ the agent


@dataclass(frozen=True, eq=False)
class FedGPAgentState:
    """An agent's private state.

    Attributes:
        t: Queries told so far, the start not counted.
        step: What is still to be done.
        order: The last order.
        setup: Hash of the `Setup`.
        keys: Hash of the `Keys`, if there are any.
        sealed: Hash of the `Sealed` sum that is to be opened together.
        queried_t: The last round in which it was queried; -1 before the first.
        X: Own points in the unit cube, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`.
        plan: The plan of the next sum.
        seen: The plan of the last sum that was opened, and
        total: that sum, empty before the first, of the round
        total_t: and
        count: of how many contributions;
        mine: the own one on the grid, empty if it is not among them.
        drawn: The last contribution on the grid, noise included, and
        drawn_t: its round, negative before the first.
        draws: How many contributions it has drawn.
        ledger: What this site has paid.
    """

    t: int
    step: Step
    order: Order | None
    setup: str
    keys: str | None
    sealed: str | None
    queried_t: int
    X: Tensor = field(repr=False)
    Y: Tensor = field(repr=False)
    plan: RegionPlan | None
    seen: RegionPlan | None
    total: Tensor = field(repr=False)
    total_t: int
    count: int
    mine: Tensor = field(repr=False)
    drawn: Tensor = field(repr=False)
    drawn_t: int
    draws: int
    ledger: Ledger


@dataclass(frozen=True, kw_only=True, eq=False)
class FedGPAgent:
    """One site of FBO-FedGP.

    Args:
        name: Its name; the server's roster has it.
        space: The map of inputs and outcomes; must be the server's.
        seed: Its own seed, private.
        private_sum: What bounds, noises and carries its contributions; must be the server's.
        require: The most that a run may reveal about it: a server that promises less privacy, or
            none, is refused, and so is one that promises more than the site's own noise gives.
        ledger: What it has paid before, and its budget.
        noise: Where its share of the noise comes from.
        data: Observations that it has already: points in the unit cube `n x d` and outcomes as
            the site measures them `n x 1`.
        candidates: The only points that it can evaluate, `K x d`; default the whole unit cube.
        initial_design: Points `k x d` that it evaluates at the start, instead of `num_initial`
            those of the setup.
        strategy: How it uses sums of mean functions, if the setup has such; its own business.
        secrets: Where its keys lie.
        blobs: Where broadcasts lie.
    """

    name: AgentId
    space: SearchSpace
    seed: int = field(repr=False)
    private_sum: PrivateSum
    require: Budget | None = None
    ledger: Ledger = Ledger()  # noqa: RUF009 - frozen
    noise: NoiseSource = field(default_factory=OSNoise)
    data: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    candidates: Tensor | None = None
    initial_design: Tensor | None = None
    strategy: TransferSearch = TransferSearch()  # noqa: RUF009 - frozen
    secrets: Secrets = field(default_factory=MemoryStore, repr=False)
    blobs: Blobs = field(default_factory=MemoryBlobs)
    _joint: dict[str, bytes] = field(default_factory=dict, repr=False)

    state_type = FedGPAgentState
    accepts = (Order,)

    def __post_init__(self) -> None:
        check_public_points(self.candidates, self.initial_design, self.space.dim)
        if self.data is not None:
            check_data(self.data, self.space.dim)

    @property
    def fingerprint(self) -> str:
        """Hash of the settings that determine what it asks for."""
        settings = (
            self.name,
            self.space.fingerprint,
            self.seed,
            repr(self.private_sum),
            self.require,
            tensor_hash(self.candidates),
            tensor_hash(self.initial_design),
            self.strategy.settings,
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    # -------------------------------------------------------------- four verbs

    def start(self) -> FedGPAgentState:
        """The state before the first request: with the data that the site has already."""
        X, Y = public_data(self.space, self.data)
        none = torch.zeros(0, dtype=torch.float64)
        return FedGPAgentState(
            t=0,
            step="rest",
            order=None,
            setup="",
            keys=None,
            sealed=None,
            queried_t=-1,
            X=X,
            Y=Y,
            plan=None,
            seen=None,
            total=none,
            total_t=-1,
            count=0,
            mine=none.long(),
            drawn=none.long(),
            drawn_t=-1,
            draws=0,
            ledger=self.ledger,
        )

    def check(self, state: FedGPAgentState, request: Order, broadcasts: tuple[str, ...]) -> None:
        """Raise `MessageError` unless the request and what it broadcasts fit."""
        if not broadcasts:
            raise MessageError("Expected a setup.")
        setup = _setup(self.blobs, broadcasts[0])
        if len(broadcasts) > 3 + BACKLOG:
            raise MessageError(f"Expected a setup, keys and sums, got {len(broadcasts)}.")
        if setup.space.fingerprint != self.space.fingerprint:
            raise MessageError(
                "The server's search space is not this site's: names, bounds, scales and outcome "
                "must agree."
            )
        if state.setup not in ("", broadcasts[0]):
            raise MessageError("The setup has changed during the run.")
        if self.name not in setup.agents or not set(request.roster) <= set(setup.agents):
            raise MessageError("This site, or a member of the roster, is no agent of the setup.")
        if len(set(request.roster)) < len(request.roster):
            raise MessageError("The roster names an agent twice.")
        if not 0 <= request.t <= setup.rounds or not 0 <= request.epoch < 2**63:
            raise MessageError(
                f"Expected 0 <= round <= {setup.rounds} and epoch >= 0, got round {request.t} and "
                f"epoch {request.epoch}."
            )
        if request.t < 1 and request.step == "query":
            raise MessageError("Round 0 is the start, nobody is queried.")
        if request.t != 0 and request.step == "start":
            raise MessageError(f"The start is in round 0, not in {request.t}.")
        self._check_progress(state, request)
        channel = self.private_sum.channel
        if setup.fingerprint != channel.fingerprint.hex():
            raise MessageError(f"The server's channel is {setup.channel}, this site's {channel}.")
        if len(setup.agents) > channel.grid.num_agents:
            raise MessageError(
                f"There are {len(setup.agents)} agents, the channel is for "
                f"{channel.grid.num_agents}."
            )
        if setup.search.size(self.space.dim) != channel.grid.dim:
            raise MessageError("The search's contributions do not fit the grid of the channel.")
        try:
            _check_search(setup.search, self.space.dim, self.private_sum)
        except InputDataError as error:
            raise MessageError(str(error)) from error
        self._check_promise(setup)
        least = _least(self.private_sum)
        if request.contribute and self.name in request.roster and len(request.roster) < least:
            raise MessageError(
                f"This site's noise suffices for sums of {least} agents or more, a contribution is "
                f"asked for one of {len(request.roster)}."
            )
        if request.step in ("key", "share") and self.name not in request.roster:
            raise MessageError("This site is not on the roster of the epoch.")
        loaded = self._loaded(broadcasts[1:])
        for _, blob in loaded:
            if isinstance(blob, Keys):
                if blob.epoch != request.epoch:
                    raise MessageError(
                        f"Keys of epoch {blob.epoch} came with a request of epoch {request.epoch}."
                    )
            else:
                self._check_sum(setup, blob)
                if isinstance(blob, Sealed):
                    self._check_sealed(request, blob)

    def _check_sealed(self, request: Order, sealed: Sealed) -> None:
        """A sealed sum comes to be opened together, or to who can open it."""
        if request.step == "share":
            if (sealed.t, sealed.epoch) != (request.t, request.epoch):
                raise MessageError(
                    f"In round {request.t} of epoch {request.epoch} a share is asked for of the "
                    f"sum of round {sealed.t} of epoch {sealed.epoch}."
                )
        elif self.private_sum.channel.opened_by != "agents":
            raise MessageError("A sealed sum, which agents of this channel cannot open.")

    def _check_progress(self, state: FedGPAgentState, request: Order) -> None:
        """Rounds and epochs never go back, and nobody is queried twice in one."""
        last = state.order
        if last is None:
            return
        if request.t < last.t or request.epoch < last.epoch:
            raise MessageError(
                f"Round {request.t} of epoch {request.epoch} comes after round {last.t} of epoch "
                f"{last.epoch}."
            )
        if request.step in ("start", "query") and request.t <= state.queried_t:
            raise MessageError(f"Round {request.t} is over, this site was queried in it.")

    def _check_promise(self, setup: Setup) -> None:
        check_promise(setup.promise, self.require)
        mechanism, promise = self.private_sum.mechanism, setup.promise
        if self.require is None or promise is None:
            return
        if mechanism is None:
            raise MessageError("This site requires privacy, but adds no noise: give a mechanism.")
        own = _guarantee(
            mechanism.event, setup.sums, promise.delta, mechanism.adjacency, mechanism.unit
        )
        if own.epsilon > promise.epsilon:
            raise MessageError(
                f"The server promises epsilon {promise.epsilon:.4g}, but {setup.sums} sums of this "
                f"site's mechanism give {own.epsilon:.4g}."
            )

    def _check_sum(self, setup: Setup, found: Sealed | Opened) -> None:
        members, agents = found.members, setup.agents
        known = len(set(members)) == len(members) > 0 and set(members) <= set(agents)
        if not 0 <= found.t <= setup.rounds or not known:
            raise MessageError(
                f"A sum is of one of the rounds 0..{setup.rounds} and of 1 to "
                f"{len(agents)} agents of the setup, got round {found.t} and {len(members)} agents."
            )
        if isinstance(found, Sealed):
            if not 0 <= found.epoch < 2**63:
                raise MessageError("A sum of an epoch that there is not.")
            return
        shape = (self.private_sum.channel.grid.dim,)
        if found.total.shape != shape or found.total.dtype != torch.float64:
            raise MessageError(
                f"A sum has shape {shape} and float64, got {tuple(found.total.shape)} and "
                f"{found.total.dtype}."
            )

    def receive(
        self, state: FedGPAgentState, request: Order, broadcasts: tuple[str, ...]
    ) -> FedGPAgentState:
        """The state after a request: what to do, and what the last sum says."""
        setup = _setup(self.blobs, broadcasts[0])
        last = state.order
        if last is not None and last.epoch < request.epoch and self.name in last.roster:
            epoch = Epoch(setup.run, last.epoch, last.roster)
            self.private_sum.channel.forget(epoch, self.name, self.secrets)
        loaded = self._loaded(broadcasts[1:])
        found = {type(blob): digest for digest, blob in loaded}
        state = replace(
            state,
            step=request.step,
            order=request,
            setup=broadcasts[0],
            keys=found.get(Keys),
            sealed=found.get(Sealed),
        )
        if request.step in ("start", "query"):
            state = replace(state, queried_t=request.t)
        if state.plan is None and isinstance(setup.search, RegionSearch):
            plan = region_search.first_plan(setup.search, self.space.dim)
            state = replace(state, plan=plan)
        newest = -1
        if request.step != "share":
            sums = [blob for _, blob in loaded if isinstance(blob, Opened | Sealed)]
            for blob in sorted(sums, key=lambda blob: blob.t):
                newest = blob.t
                state = self._learned(state, setup, blob)
        following, queried = state.plan, request.step in ("start", "query", "resend")
        in_step = following is not None and following.t < request.t and newest == state.total_t
        if following is not None and in_step and queried:  # nothing was opened: the plan waits
            state = replace(state, plan=replace(following, t=request.t))
        return state

    def _loaded(self, digests: tuple[str, ...]) -> list[tuple[str, Any]]:
        kinds = (Keys, Sealed, Opened)
        return [(digest, self.blobs.load(digest, *kinds)) for digest in digests]

    def _open(self, setup: Setup, sealed: Sealed) -> Tensor:
        channel = self.private_sum.channel
        order = Epoch(setup.run, sealed.epoch, setup.agents)
        integers = channel.open(sealed.total, {}, epoch=order, round=sealed.t, secrets=self.secrets)
        return channel.grid.to_values(integers)

    def _learned(
        self, state: FedGPAgentState, setup: Setup, found: Opened | Sealed
    ) -> FedGPAgentState:
        """A sum is read once; a region only if all sums before were read too."""
        t, count, plan = found.t, len(found.members), state.plan
        if t <= state.total_t:
            return state
        in_a_region = isinstance(setup.search, RegionSearch)
        if in_a_region and (plan is None or plan.t > t or found.previous != state.total_t):
            return state
        if plan is not None:
            plan = replace(plan, t=t)  # it has waited through rounds without a sum
        inside = state.drawn_t == t and self.name in found.members
        mine = state.drawn if inside else state.drawn[:0]
        try:
            total = found.total if isinstance(found, Opened) else self._open(setup, found)
            if plan is None:
                return replace(state, total=total, total_t=t, count=count, mine=mine)
            seen = _region_view(setup, plan, total, count)
        except (NumericalError, MessageError):  # somebody has spoilt it, for all alike
            if plan is None:
                return state
            logger.warning("agent %r can not read the sum of round %d", self.name, t)
            return replace(state, plan=replace(plan, t=t + 1), total_t=t)
        state = replace(state, total=total, total_t=t, count=count, mine=mine)
        return replace(state, plan=seen.following, seen=plan)

    def ask(self, state: FedGPAgentState) -> Tensor | Pending | None:
        """The initial points `n x d`, the next one `1 x d`, or None if nothing is to be done."""
        if state.step == "start":
            design = self._design(state)
            return design if len(design) else None
        if state.step != "query":
            return None
        setup = _setup(self.blobs, state.setup)
        stream = generator(self.seed, "query", state.t)
        return self._point(setup, state, stream)

    def _design(self, state: FedGPAgentState) -> Tensor:
        if self.initial_design is not None:
            design = self.initial_design.double()
            return self.space.snap(design) if self.candidates is None else design
        setup = _setup(self.blobs, state.setup)
        if setup.mean is not None:
            return self._dealt(setup, setup.num_initial)[len(state.X) :]
        count = max(0, setup.num_initial - len(state.X))
        uniform = generator(self.seed, "initial").uniform(count, self.space.dim)
        if self.candidates is None:
            return self.space.snap(uniform)
        rows = (uniform[:, 0] * len(self.candidates)).long()
        return self.candidates[rows].double()

    def _dealt(self, setup: Setup, count: int, tried: Tensor | None = None) -> Tensor:
        """The first points of a site, `count x d`."""
        candidates = self.candidates
        if candidates is not None and tried is not None:
            candidates = untried(candidates, tried)
        index, agents = setup.agents.index(self.name), len(setup.agents)
        return first_points(
            self.space, index, agents, count, default=setup.default, candidates=candidates
        )

    def _point(self, setup: Setup, state: FedGPAgentState, stream: Any) -> Tensor:
        search = setup.search
        if isinstance(search, MeanSearch):
            return self._transferred(search, setup, state, stream)
        if isinstance(search, RegionSearch):
            if state.seen is None:
                return self._listed(stream.uniform(1, self.space.dim), state)
            found = _region_view(setup, state.seen, state.total, state.count)
            turn = setup.agents[found.plan.t % len(setup.agents)] == self.name
            point = region_search.point(search, found, state.X, stream=stream, turn=turn)
            return self._listed(point, state)
        assert state.order is not None
        t, shared = state.order.t, None
        if state.total_t >= 0:
            try:
                shared = _support_view(search, self.space.dim, state.total, self.private_sum)
            except NumericalError:
                logger.warning(
                    "agent %r can not read the sum of round %d", self.name, state.total_t
                )
        return support_search.point(
            search,
            self.space,
            shared,
            state.X,
            state.Y,
            t=t,
            together=self._together(setup, t),
            candidates=None if self.candidates is None else untried(self.candidates, state.X),
            stream=stream,
            own=self._own_part(state),
        )

    def _transferred(
        self, search: MeanSearch, setup: Setup, state: FedGPAgentState, stream: Generator
    ) -> Tensor:
        """The next point by the own model, with the newest sum as its prior."""
        advice, have = self._advice(search, setup, state), len(state.X)
        if advice is None and max(setup.num_initial, have) < MIN_OWN:
            # A newcomer that nobody tells anything.
            dealt = self._dealt(setup, MIN_OWN, tried=state.X)
            return dealt[min(have, len(dealt) - 1) :][:1]
        return self.strategy.point(
            self.space,
            state.X,
            state.Y,
            advice,
            chosen=state.X[:0],
            candidates=self.candidates,
            stream=stream,
        )

    def _advice(self, search: MeanSearch, setup: Setup, state: FedGPAgentState) -> Advice | None:
        """What the others say in the newest sum."""
        if state.total_t < 0:
            return None
        advice = mean_search.advice(search, state.total, self._mine(state), len(setup.agents))
        if advice is None or advice.trust is None or state.order is None:
            return advice
        return Advice.of(advice.prior, advice.trust, made=state.total_t, now=state.order.t - 1)

    def _mine(self, state: FedGPAgentState) -> Tensor | None:
        """What oneself has contributed to the last sum, exactly."""
        return self.private_sum.channel.grid.to_values(state.mine) if len(state.mine) else None

    def _own_part(self, state: FedGPAgentState) -> Tensor | None:
        """What oneself has contributed to the last sum, if that was just now."""
        assert state.order is not None
        return self._mine(state) if state.total_t == state.order.t - 1 else None

    def _listed(self, point: Tensor, state: FedGPAgentState) -> Tensor:
        """The nearest of the points that can be evaluated."""
        if self.candidates is None:
            return self.space.snap(point)
        fresh = untried(self.candidates, state.X).double()
        return fresh[torch.cdist(point, fresh).argmin()].unsqueeze(0)

    def _together(self, setup: Setup, t: int) -> bool:
        """Whether round `t` uses the shared model: the coin."""
        assert isinstance(setup.search, SupportSearch)
        return setup.search.together(t, generator(self.seed, "coin", t))

    def tell(self, state: FedGPAgentState, X: Tensor, Y: Tensor) -> FedGPAgentState:
        """The state after a query; needs no broadcast, so that a late value can always be told."""
        return replace(
            state,
            t=state.t + (state.step == "query"),
            step="rest",
            X=torch.cat([state.X, X]),
            Y=torch.cat([state.Y, self.space.outcome.to_public(Y)]),
        )

    def reply(self, state: FedGPAgentState) -> tuple[FedGPAgentState, Word | Upload]:
        """A part of the joint key, of an opening, or a contribution."""
        order = state.order
        assert order is not None
        state = replace(state, step="rest")
        setup = _setup(self.blobs, state.setup)
        channel = self.private_sum.channel
        wanted = self._wants(setup, order.t + 1)
        if self.name not in order.roster:
            return state, Upload(None, wanted, self._able(setup, state, order))
        epoch = Epoch(setup.run, order.epoch, order.roster)
        try:
            if order.step == "key":
                heard = () if state.keys is None else self.blobs.load(state.keys, Keys).heard
                word = channel.prepare(order.phase, epoch, self.name, heard, self.secrets)
                return state, Word(word)
            if order.step == "share":
                if state.sealed is None:
                    raise ProtocolError("There is no sum to open.")
                sealed = self.blobs.load(state.sealed, Sealed)
                word = channel.share(
                    sealed.total,
                    epoch=epoch,
                    round=order.t,
                    me=self.name,
                    secrets=self.secrets,
                )
                return state, Word(word)
        except (MessageError, ProtocolError) as error:  # e.g. a key lost in a crash: others go on
            logger.warning(
                "agent %r can not take part in epoch %d: %s", self.name, order.epoch, error
            )
            return state, Word(None)
        if not order.contribute or not self._in_step(state, order):
            return state, Upload(None, wanted)
        mechanism = self.private_sum.mechanism
        if mechanism is not None and state.draws >= setup.sums:
            logger.warning("agent %r has made the %d draws of the promise", self.name, setup.sums)
            return state, Upload(None, wanted)
        state = self._drawn(setup, state, order)
        try:
            key = self._joint_key(state, epoch)
            data = channel.protect(
                state.drawn,
                epoch=epoch,
                round=order.t,
                me=self.name,
                key=key,
                secrets=self.secrets,
            )
        except (MessageError, ProtocolError) as error:
            logger.warning("agent %r can not contribute to round %d: %s", self.name, order.t, error)
            return state, Upload(None, wanted)
        return state, Upload(data, wanted)

    def _in_step(self, state: FedGPAgentState, order: Order) -> bool:
        """Whether one's own plan is that of the round's sum: not if one has missed a sum."""
        return state.plan is None or state.plan.t == order.t

    def _able(self, setup: Setup, state: FedGPAgentState, order: Order) -> bool:
        """Whether it could contribute: it has missed no sum that it needs, and can pay."""
        mechanism = self.private_sum.mechanism
        if mechanism is None or self.private_sum.noise_at != "agent":
            return self._in_step(state, order)
        try:
            state.ledger.spend(mechanism.event)
        except BudgetExceeded:
            return False
        return state.draws < setup.sums

    def _wants(self, setup: Setup, t: int) -> bool:
        if isinstance(setup.search, MeanSearch):
            return self.strategy.listen
        if isinstance(setup.search, RegionSearch):
            return True
        return t <= 0 or self._together(setup, t)

    def _joint_key(self, state: FedGPAgentState, epoch: Epoch) -> bytes:
        if state.keys is None:
            return b""
        if state.keys not in self._joint:
            heard = self.blobs.load(state.keys, Keys).heard
            key = self.private_sum.channel.joint_key(
                epoch, heard, me=self.name, secrets=self.secrets
            )
            self._joint.clear()
            self._joint[state.keys] = key
        return self._joint[state.keys]

    def _drawn(self, setup: Setup, state: FedGPAgentState, order: Order) -> FedGPAgentState:
        """With the contribution to a sum.

        One with noise is paid for and drawn anew when a round is interrupted: the same draw in two
        sums over different rosters would show, as their difference, the contribution of whoever is
        in one only, with no noise but its own.
        """
        integers, ledger = self.private_sum.contribute(
            self._contribution(setup, state, order.t),
            ledger=state.ledger,
            noise=self.noise,
            path=("contribution", order.t, order.epoch, self.name),
        )
        assert ledger is not None
        return replace(state, drawn=integers, drawn_t=order.t, draws=state.draws + 1, ledger=ledger)

    def _contribution(self, setup: Setup, state: FedGPAgentState, t: int) -> Tensor:
        mechanism, grid = self.private_sum.mechanism, self.private_sum.channel.grid
        X, Y = state.X, state.Y
        if isinstance(setup.search, MeanSearch):
            advice = self._advice(setup.search, setup, state)
            return mean_search.contribution(setup.search, self.strategy, self.space, X, Y, advice)
        if isinstance(setup.search, RegionSearch):
            assert state.plan is not None
            values = region_search.contribution(setup.search, state.plan, X, Y)
        elif isinstance(mechanism, DistributedRecordSum):
            phi = support_search.feature_map(setup.search, self.space.dim)
            return support_search.records(phi, X, Y, mechanism)
        else:
            values = support_search.contribution(setup.search, X, Y)
        if len(values) < grid.dim:
            values = torch.cat([values, values.new_zeros(grid.dim - len(values))])
        largest = float(values.abs().max())
        if mechanism is None and largest > grid.bound:
            # Tempered as a whole it is still the summary of a likelihood; a mechanism clips anyway.
            logger.warning("agent %r tempers a contribution of %.3g", self.name, largest)
            values = values * (grid.bound / largest)
        return values


_NO_NOISE: dict[type[Search], str] = {
    MeanSearch: "TransferSearch makes a sum of new functions each round: with noise for all of "
    "them nothing would be left. Use DPFTSDE, which makes few, or SupportSearch with a mechanism.",
    RegionSearch: "RegionSearch compares several summaries in each of many sums: noise would drown "
    "them. Use SupportSearch with a mechanism.",
}
_ADDS: dict[type[Search], str] = {
    MeanSearch: "the mean function of its own model and its trust in what it has heard",
    SupportSearch: "a summary of its data on support points",
    RegionSearch: "summaries of its data in a region",
}


def _check_search(search: Search, dim: int, private_sum: PrivateSum) -> None:
    """Raise `InputDataError` unless the search fits the sums."""
    mechanism = private_sum.mechanism
    if not isinstance(search, SupportSearch):
        if mechanism is not None:
            raise InputDataError(_NO_NOISE[type(search)])
        return
    if any(len(point) != dim for point in search.support):
        raise InputDataError(f"Support points need {dim} coordinates each.")


@lru_cache(maxsize=16)
def _setup(blobs: Blobs, digest: str) -> Setup:
    setup: Setup = blobs.load(digest, Setup)
    if setup.mean is not None:
        mean_search.check_received(setup.mean, setup.space)
    return setup


@lru_cache(maxsize=16)
def _guarantee(
    event: Event, count: int, delta: float, adjacency: Adjacency, unit: Unit
) -> Guarantee:
    """What so many sums reveal, one at least."""
    return compose([Entry(event, max(count, 1), "")], delta=delta, adjacency=adjacency, unit=unit)


_VIEWS: dict[tuple[Any, ...], Any] = {}


def _remembered(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What a public sum says, worked out once for all agents of a process."""
    if key not in _VIEWS:
        while len(_VIEWS) >= 4:
            _VIEWS.pop(next(iter(_VIEWS)))
        _VIEWS[key] = make()
    return _VIEWS[key]


def _region_view(setup: Setup, plan: RegionPlan, total: Tensor, count: int) -> RegionView:
    search = setup.search
    assert isinstance(search, RegionSearch)
    numbers = (plan.t, plan.half_width, plan.mean, plan.scale, plan.top, plan.reach, plan.kernels)
    key = (search, setup.rounds, numbers, count, tensor_hash(plan.centre), tensor_hash(total))
    return _remembered(
        key,
        lambda: region_search.view(search, plan, total, num_agents=count, rounds=setup.rounds),
    )


def _support_view(
    search: SupportSearch, dim: int, total: Tensor, private_sum: PrivateSum
) -> SupportView:
    key = (search, dim, tensor_hash(total), private_sum.mechanism)
    return _remembered(key, lambda: support_search.view(search, dim, total, private_sum.mechanism))


# ------------------------------------------------------------------ the server


@dataclass(frozen=True, eq=False)
class FedGPServerState:
    """What the server keeps.

    Attributes:
        t: The round.
        stage: What is asked next. In ``"query"`` the active agents evaluate and the others
            contribute what they have, in ``"resend"`` nobody evaluates.
        epoch: The number of the epoch.
        roster: Who takes part in it; empty when sums are over.
        heard: The messages of its set-up so far.
        resend: Whether the set-up interrupted a round.
        sealed: The sum that is to be opened together.
        opened: The last sum: opened, or for agents that open themselves, sealed.
        missed: Earlier sums that somebody may not have read: opened, or
        closed_missed: sealed, for agents that open themselves.
        told: With a region, the round of the newest sum that each agent is known to have.
        lost: Who was left out of an epoch for not answering, and is out still.
        back: Who answered the last query, is able to contribute, and is not on the roster.
        returned: Who was lost and has been taken back in: once lost again, it is not.
        sums: How many sums were opened.
        asked: How often contributions were asked for.
        rekeys: How many epochs followed the first.
        ledger: What noise at the server has cost.
    """

    t: int
    stage: Literal["key", "query", "resend", "share"]
    epoch: int
    roster: tuple[AgentId, ...]
    heard: tuple[Mapping[AgentId, bytes], ...] = field(repr=False)
    resend: bool
    sealed: Sealed | None
    opened: Opened | None
    closed: Sealed | None
    missed: tuple[Opened, ...]
    closed_missed: tuple[Sealed, ...]
    told: Mapping[AgentId, int]
    lost: tuple[AgentId, ...]
    back: tuple[AgentId, ...]
    returned: tuple[AgentId, ...]
    sums: int
    asked: int
    rekeys: int
    ledger: Ledger

    @property
    def last(self) -> Opened | Sealed | None:
        """The last sum, as it is broadcast."""
        return self.closed if self.opened is None else self.opened


@dataclass(frozen=True, kw_only=True, eq=False)
class FedGPServer:
    """The server of FBO-FedGP: adds contributions and, with the agents' help, opens sums.

    Args:
        setup: What all agents agree upon, without its promise: the server makes it.
        private_sum: What bounds, noises and carries contributions.
        delta: Of the promise; default 1e-5.
        ledger: For noise at the server: what was paid before, and the budget.
        noise: For noise at the server.
        noise_private: Whether the agents' noise is secret, as far as the server knows.
        rejoin: Whether an agent that is back is taken into a new joint key, see the module.
        active: Who queries; default all. The others contribute to sums with what they have.
    """

    setup: Setup
    private_sum: PrivateSum
    delta: float = 1e-5
    active: tuple[AgentId, ...] | None = None
    ledger: Ledger = Ledger()  # noqa: RUF009 - frozen
    noise: NoiseSource = field(default_factory=OSNoise)
    noise_private: bool = True
    rejoin: bool = True
    _joint: list[tuple[Any, bytes]] = field(default_factory=list, repr=False)  # words, their key

    state_type = FedGPServerState
    accepts = (Word, Upload)

    def __post_init__(self) -> None:
        if self.setup.promise is not None:
            raise InputDataError("The server makes the promise: leave it out of the setup.")
        if len(self.setup.agents) > self.private_sum.channel.grid.num_agents:
            raise InputDataError(
                f"There are {len(self.setup.agents)} agents, the grid of the channel is for "
                f"{self.private_sum.channel.grid.num_agents}: give it more."
            )
        dim = self.setup.space.dim
        _check_search(self.setup.search, dim, self.private_sum)
        wanted = self.setup.search.size(dim)
        if self.private_sum.channel.grid.dim != wanted:
            raise InputDataError(
                f"A contribution has {wanted} numbers, the grid of the channel "
                f"{self.private_sum.channel.grid.dim}."
            )
        if self._together and len(self.setup.agents) < MIN_TOGETHER:
            raise InputDataError("A joint key needs two agents or more.")
        check_active(self.active, self.setup.agents)

    def __repr__(self) -> str:
        promise = "no privacy guarantee" if self.promise is None else str(self.promise)
        return (
            f"FedGPServer(agents={len(self.setup.agents)}, rounds={self.setup.rounds}, "
            f"{type(self.setup.search).__name__}, {type(self.private_sum.channel).__name__}, "
            f"{promise})"
        )

    @property
    def fingerprint(self) -> str:
        """Hash of its settings."""
        settings: tuple[Any, ...] = (
            repr(self._promised_setup),
            repr(self.private_sum),
            self.delta,
            self.rejoin,
            *(() if self.active is None else (self.active,)),
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    @property
    def _together(self) -> bool:
        """Whether all of a roster must take part in a sum."""
        return self.private_sum.channel.setup_phases > 0

    # -------------------------------------------------------------- what it costs

    @cached_property
    def promise(self) -> Guarantee | None:
        """What all sums of a run reveal at most; None without noise."""
        mechanism = self.private_sum.mechanism
        if mechanism is None:
            return None
        promised = _guarantee(
            mechanism.event, self.setup.sums, self.delta, mechanism.adjacency, mechanism.unit
        )
        return replace(promised, private=self.noise_private)

    @cached_property
    def _promised_setup(self) -> Setup:
        return replace(self.setup, promise=self.promise)

    @property
    def _adds(self) -> str:
        """What an agent contributes to a sum, in words."""
        numbers = self.private_sum.channel.grid.dim
        return f"{_ADDS[type(self.setup.search)]}, {numbers} numbers"

    def privacy(self, state: FedGPServerState) -> dict[str, Any]:
        """What a report needs: who learns what, the promise, and what was released."""
        common = {
            "channel": type(self.private_sum.channel).__name__,
            "learned_by": self.private_sum.learned_by,
            "adds": self._adds,
            "sums": state.sums,
            "rekeys": state.rekeys,
        }
        mechanism = self.private_sum.mechanism
        if mechanism is None:
            return {"mechanism": "none", "private": False, **common}
        assert self.promise is not None
        spent = _guarantee(
            mechanism.event, state.asked, self.delta, mechanism.adjacency, mechanism.unit
        )
        return {
            "epsilon": spent.epsilon,
            "delta": spent.delta,
            "adjacency": spent.adjacency,
            "unit": spent.unit,
            "accountant": spent.accountant,
            "private": self.noise_private,
            "releases": state.sums,
            "promised_epsilon": self.promise.epsilon,
            "mechanism": repr(mechanism),
            **common,
        }

    # -------------------------------------------------------------- the rounds

    def start(self) -> FedGPServerState:
        """The state before the start."""
        return FedGPServerState(
            t=0,
            stage="key" if self._together else "query",
            epoch=0,
            roster=self.setup.agents,
            heard=(),
            resend=False,
            sealed=None,
            opened=None,
            closed=None,
            missed=(),
            closed_missed=(),
            told={},
            lost=(),
            back=(),
            returned=(),
            sums=0,
            asked=0,
            rekeys=0,
            ledger=self.ledger,
        )

    def outbox(self, state: FedGPServerState) -> Outbox | None:
        """A part of the set-up, a query for everybody, or an opening."""
        if state.t > self.setup.rounds:
            return None
        broadcasts: tuple[Any, ...] = (self._promised_setup,)
        if state.heard:
            broadcasts += (Keys(state.epoch, state.heard),)
        common: dict[str, Any] = {"t": state.t, "epoch": state.epoch, "roster": state.roster}
        if state.stage == "key":
            order = Order("key", phase=len(state.heard), **common)
            return Outbox(dict.fromkeys(state.roster, order), broadcasts)
        if state.stage == "share":
            assert state.sealed is not None
            order = Order("share", **common)
            return Outbox(dict.fromkeys(state.roster, order), (*broadcasts, state.sealed))
        broadcasts += (*state.missed, *state.closed_missed)
        if state.last is not None:
            broadcasts += (state.last,)
        if state.stage == "resend":
            order = Order("resend", contribute=True, **common)
            return Outbox(dict.fromkeys(state.roster, order), broadcasts)
        step: Literal["start", "query"] = "query" if state.t > 0 else "start"
        order = Order(step, contribute=self._adding(state), **common)
        orders = dict.fromkeys(self.setup.agents, order)
        if self.active is not None:
            orders = dict.fromkeys(self.active, order)
            done = [name for name in self.setup.agents if name not in orders]
            if order.contribute:  # with what they have
                orders |= dict.fromkeys(done, replace(order, step="resend"))
        return Outbox(orders, broadcasts)

    def _adding(self, state: FedGPServerState) -> bool:
        """Whether this round's contributions may be added."""
        if state.t >= self.setup.rounds or not self._affordable(state):
            return False
        if len(state.roster) < _least(self.private_sum):  # noise would not suffice: nobody pays
            return False
        search = self.setup.search
        return not isinstance(search, SupportSearch) or search.ever_together

    def _affordable(self, state: FedGPServerState) -> bool:
        """Whether the promise covers another sum; with noise, every draw counts."""
        used = state.sums if self.private_sum.mechanism is None else state.asked
        return used < self.setup.sums

    def check(self, state: FedGPServerState, sender: AgentId, message: Word | Upload) -> None:
        """Raise `MessageError` unless a message fits the step and can be added."""
        channel = self.private_sum.channel
        expected = Word if state.stage in ("key", "share") else Upload
        if not isinstance(message, expected):
            raise MessageError(f"Expected a {expected.__name__}, got a {type(message).__name__}.")
        if message.data is None:
            return
        if sender not in state.roster:
            raise MessageError("A contribution that nobody asked for.")
        epoch = Epoch(self.setup.run, state.epoch, state.roster)
        if state.stage == "key":
            if len(message.data) > MAX_KEY_BYTES:
                raise MessageError(f"A part of a key has at most {MAX_KEY_BYTES} bytes.")
            channel.check_prepared(message.data, epoch=epoch, sender=sender, heard=state.heard)
            return
        if state.stage == "share":
            assert state.sealed is not None
            channel.check_share(
                message.data,
                epoch=epoch,
                round=state.t,
                sender=sender,
                total=self._total(state),
            )
        elif not (state.stage == "resend" or self._adding(state)):
            raise MessageError("A contribution that nobody asked for.")
        else:
            key = self._joint_key(state, epoch)
            channel.check(message.data, epoch=epoch, round=state.t, sender=sender, key=key)

    def _joint_key(self, state: FedGPServerState, epoch: Epoch) -> bytes:
        """The key of the epoch, worked out once."""
        if not state.heard:
            return b""
        if not self._joint or self._joint[0][0] is not state.heard:
            key = self.private_sum.channel.joint_key(epoch, state.heard)
            self._joint[:] = [(state.heard, key)]
        return self._joint[0][1]

    def _total(self, state: FedGPServerState) -> bytes:
        assert state.closed is not None
        return state.closed.total

    def step(
        self, state: FedGPServerState, inbox: Mapping[AgentId, Word | Upload]
    ) -> FedGPServerState:
        """Add, open, or begin a new epoch without those who were lost."""
        given = {
            agent: inbox[agent].data
            for agent in state.roster
            if agent in inbox and inbox[agent].data is not None
        }
        parts = {agent: data for agent, data in given.items() if data is not None}
        wanted = self._wanted(state, inbox)
        state = self._noted(state, inbox)
        if state.stage == "resend" or (state.stage == "query" and self._adding(state)):
            state = replace(state, asked=state.asked + 1)
        needed = state.stage in ("key", "share") or (self._together and wanted)
        if needed and len(parts) < len(state.roster):
            return self._without(state, parts, inbox)
        if state.stage == "key":
            return self._prepared(state, parts)
        if state.stage == "share":
            return self._shared(state, parts)
        if not wanted:
            return self._next(state)
        return self._added(state, parts)

    def _noted(
        self, state: FedGPServerState, inbox: Mapping[AgentId, Word | Upload]
    ) -> FedGPServerState:
        """Who has read the last sum, and who is back."""
        if state.stage not in ("query", "resend"):
            return state
        if state.last is not None and self.setup.region is not None:
            state = replace(state, told={**state.told, **dict.fromkeys(inbox, state.last.t)})
        if state.stage == "query" and self._together:
            able = {a for a, said in inbox.items() if isinstance(said, Upload) and said.able}
            able -= {*state.roster, *(set(state.returned) & set(state.lost))}
            state = replace(state, back=tuple(name for name in self.setup.agents if name in able))
        return state

    def _taken_back(self, state: FedGPServerState) -> FedGPServerState:
        """A new epoch with those who are back, if the next round has a sum for them."""
        members = {*state.roster, *state.back}
        roster = tuple(name for name in self.setup.agents if name in members)
        found = tuple(name for name in state.back if name in state.lost)
        joined = replace(
            state,
            epoch=state.epoch + 1,
            rekeys=state.rekeys + 1,
            roster=roster,
            heard=(),
            stage="key",
            lost=tuple(name for name in state.lost if name not in found),
            back=(),
            returned=(*state.returned, *found),
        )
        possible = self._enough(state, roster) and self._adding(joined)
        if not self.rejoin or not found or not possible:
            return state
        logger.info("epoch %d ends, %d agent(s) are back", state.epoch, len(found))
        return joined

    def _enough(self, state: FedGPServerState, roster: tuple[AgentId, ...]) -> bool:
        """Whether another epoch may begin, with this roster."""
        if len(roster) < max(MIN_TOGETHER, _least(self.private_sum)):
            return False
        # Every agent may be lost, be taken back and be lost again.
        return state.rekeys < 3 * len(self.setup.agents)

    def _wanted(self, state: FedGPServerState, inbox: Mapping[AgentId, Word | Upload]) -> bool:
        """Whether contributions are to be added now."""
        wanted = any(isinstance(m, Upload) and m.wanted for m in inbox.values())
        return state.resend or (wanted and self._adding(state))

    def _next(self, state: FedGPServerState) -> FedGPServerState:
        """The next round: a query."""
        after = replace(state, t=state.t + 1, stage="query", sealed=None, resend=False)
        return self._taken_back(after)

    def _prepared(self, state: FedGPServerState, parts: dict[AgentId, bytes]) -> FedGPServerState:
        heard = (*state.heard, parts)
        if len(heard) < self.private_sum.channel.setup_phases:
            return replace(state, heard=heard)
        epoch = Epoch(self.setup.run, state.epoch, state.roster)
        try:
            self.private_sum.channel.joint_key(epoch, heard)
        except (MessageError, ProtocolError) as error:
            logger.warning("the joint key of epoch %d does not fit: %s", state.epoch, error)
            return self._renewed(state, state.roster)
        return replace(state, heard=heard, stage="resend" if state.resend else "query")

    def _without(
        self,
        state: FedGPServerState,
        parts: dict[AgentId, bytes],
        inbox: Mapping[AgentId, Word | Upload],
    ) -> FedGPServerState:
        """A new epoch with those who answered, or who are there but have all lost their keys."""
        left = tuple(agent for agent in state.roster if agent in parts)
        if len(left) < MIN_TOGETHER:
            left = tuple(agent for agent in state.roster if agent in inbox)
        return self._renewed(state, left)

    def _renewed(self, state: FedGPServerState, roster: tuple[AgentId, ...]) -> FedGPServerState:
        lost = tuple(name for name in state.roster if name not in roster)
        logger.warning("epoch %d ends, %d agent(s) were lost", state.epoch, len(lost))
        interrupted = state.resend or state.stage != "key"
        state = replace(
            state,
            heard=(),
            sealed=None,
            closed=None,
            epoch=state.epoch + 1,
            lost=(*state.lost, *lost),
        )
        if not self._enough(state, roster) or not self._affordable(state):
            logger.warning("no sum: too few agents are left, too many keys or sums were made")
            state = replace(state, roster=(), stage="query")
            return self._next(state) if interrupted else state
        rekeys = state.rekeys + 1
        return replace(state, roster=roster, stage="key", resend=interrupted, rekeys=rekeys)

    def _added(self, state: FedGPServerState, parts: dict[AgentId, bytes]) -> FedGPServerState:
        channel = self.private_sum.channel
        if not parts or len(parts) < _least(self.private_sum):
            logger.warning("round %d: %d contributions are too few", state.t, len(parts))
            return self._next(state)
        epoch = Epoch(self.setup.run, state.epoch, state.roster)
        if self.private_sum.noise_at == "server":
            return self._noised(state, parts, epoch)
        try:
            total = channel.add(parts, epoch=epoch, round=state.t)
        except (MessageError, ProtocolError) as error:
            logger.warning("round %d can not be added: %s", state.t, error)
            return self._renewed(state, state.roster) if self._together else self._next(state)
        closed = Sealed(state.t, state.epoch, total, tuple(parts), _round_of(state.last))
        if channel.opened_by == "agents":
            return self._kept(state, closed)
        if channel.open_phases:
            sealed = replace(closed, total=channel.request(total))
            return replace(state, closed=closed, sealed=sealed, stage="share")
        integers = channel.open(total, {}, epoch=epoch, round=state.t)
        return self._opened(state, integers, tuple(parts))

    def _noised(
        self, state: FedGPServerState, parts: dict[AgentId, bytes], epoch: Epoch
    ) -> FedGPServerState:
        try:
            values, ledger = self.private_sum.release(
                parts,
                epoch=epoch,
                round=state.t,
                ledger=state.ledger,
                noise=self.noise,
                path=("sum", state.t),
            )
        except BudgetExceeded as error:
            logger.warning("round %d opens nothing: %s", state.t, error)
            return self._next(replace(state, roster=()))
        opened = Opened(state.t, values, tuple(parts), _round_of(state.last))
        return self._kept(replace(state, ledger=ledger), opened)

    def _shared(self, state: FedGPServerState, parts: dict[AgentId, bytes]) -> FedGPServerState:
        epoch = Epoch(self.setup.run, state.epoch, state.roster)
        try:
            integers = self.private_sum.channel.open(
                self._total(state), parts, epoch=epoch, round=state.t
            )
        except (MessageError, ProtocolError) as error:
            logger.warning("the sum of round %d does not open: %s", state.t, error)
            return self._renewed(state, state.roster)
        return self._opened(state, integers, tuple(parts))

    def _opened(
        self, state: FedGPServerState, integers: Tensor, members: tuple[AgentId, ...]
    ) -> FedGPServerState:
        values = self.private_sum.channel.grid.to_values(integers)
        state = replace(state, closed=None)
        return self._kept(state, Opened(state.t, values, members, _round_of(state.last)))

    def _kept(self, state: FedGPServerState, found: Opened | Sealed) -> FedGPServerState:
        """With a sum that was opened, or that agents can open."""
        state = replace(state, sums=state.sums + 1)
        if isinstance(found, Sealed):
            sealed = self._unread(state, state.closed_missed, state.closed)
            return self._next(replace(state, closed=found, closed_missed=sealed))
        opened = self._unread(state, state.missed, state.opened)
        return self._next(replace(state, opened=found, missed=opened))

    def _unread(
        self, state: FedGPServerState, missed: tuple[_Sum, ...], last: _Sum | None
    ) -> tuple[_Sum, ...]:
        """Earlier sums that an agent may want when it is back: the newest, as far as they fit.

        Who was away for longer than they reach can not read them: nothing is kept for it.
        """
        if self.setup.region is None or last is None:
            return ()
        kept = min(BACKLOG, BACKLOG_BYTES // max(_size(last), 1))
        newest = missed + (last,)  # noqa: RUF005
        newest = newest[max(len(newest) - kept, 0) :]
        if not newest:
            return ()
        told = [state.told.get(name, -1) for name in self.setup.agents]
        heard = min((t for t in told if t >= newest[0].previous), default=last.t)
        return tuple(found for found in newest if found.t > heard)


def _least(private_sum: PrivateSum) -> int:
    """How many contributions a sum needs for the noise that agents add to suffice."""
    mechanism = private_sum.mechanism
    if mechanism is None or isinstance(mechanism, GaussianSum):
        return 1
    return int(mechanism.num_agents - mechanism.dropping)


_Sum = TypeVar("_Sum", Opened, Sealed)


def _size(found: Opened | Sealed) -> int:
    return len(found.total) if isinstance(found, Sealed) else 8 * found.total.numel()


def _round_of(last: Opened | Sealed | None) -> int:
    return -1 if last is None else last.t


def _ledger(private_sum: PrivateSum) -> Ledger:
    """An empty one that can pay for the sums."""
    mechanism = private_sum.mechanism
    if mechanism is None:
        return Ledger()
    return Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)


# ------------------------------------------------------------------ a federation for `run`

ChannelKind = Literal["plain", "ckks", "threshold"]


@dataclass(frozen=True, kw_only=True, eq=False)
class FedGP:
    """FBO-FedGP as a study: the settings of all agents and of the server.

    Args:
        rounds: How many queries each agent makes, `T`.
        search: How points are found; default `TransferSearch`. Or `SupportSearch`, `RegionSearch`.
        feature_map: The shared basis of `TransferSearch`, public; default features of a public SE
            kernel (`transfer_search.default_feature_map`).
        channel: ``"threshold"`` (default), ``"ckks"`` or ``"plain"``.
        mechanism: Makes the mechanism from the size of a contribution and the number of agents;
            None for no privacy guarantee.
        noise_at: Who adds the noise.
        sums: The most sums that are opened; default one a round; see also `active`.
        num_initial: How many points an agent without data evaluates first; default 3 with
            `TransferSearch`, or where `data` are given to some none but the `default`, and 4
            otherwise.
        default: The configuration that users have had so far, a value for each parameter: every
            agent without data evaluates it first, as the first of `num_initial` points, and can
            only gain on it. With `TransferSearch`, and instead of an `initial_design`.
        initial_design: Public points that every agent evaluates at the start, instead of those,
            or its own points by name: `own_step.spread_design` makes them. `num_initial` is
            then their number.
        precision: Of the public grid, relative to the largest contribution; default the finest
            at which sums are exact, or with `TransferSearch` at which they are short.
        run: The run's name: agents whose `secrets` outlive a run need another one for the next.
        delta: Of the promise.
        require: The most that agents let a run reveal about them.
        noise: Where noise comes from. The default is the operating system, so a private run cannot
            be repeated; `InsecureSeededNoise(seed)` can, and protects nothing.
        data: What agents have observed before, by name.
        candidates: The only points that can be evaluated, `K x d`.
        secrets: Makes an agent's store of keys from its name; default in memory, and with
            ``run(out=…)`` in the folder of the agent's site.
        rejoin: Whether an agent that was lost is taken into a new joint key when it is back.
        active: Who queries; default all. The others, who have finished, contribute to sums with the
            data that they have and evaluate nothing. With `TransferSearch` `sums` is then 1 by
            default: what those who have finished say does not change, so that the difference of two
            sums would be what the active agents have added, and a single one's function.

    One process plays all parts with `server` first and then `agent`. A process that plays one part
    says by `with_stores` who takes part and where its secrets lie. With ``"ckks"`` somebody whom
    all agents trust calls `provision` before, once: a machine that reaches all stores.

    Example:
        >>> result = run(FedGP(rounds=5, channel="plain"), SyntheticGPAgents(3), seed=0)
    """

    rounds: int
    search: TransferSearch | SupportSearch | RegionSearch = TransferSearch()  # noqa: RUF009 - frozen
    feature_map: FeatureMap | None = None
    channel: ChannelKind = "threshold"
    mechanism: Callable[[int, int], Any] | None = None
    noise_at: Literal["agent", "server", "none"] = "none"
    sums: int | None = None
    num_initial: int | None = None
    default: Mapping[str, Value] | None = None
    precision: float | None = None
    run: str = "run"
    delta: float = 1e-5
    require: Budget | None = None
    noise: NoiseSource = field(default_factory=OSNoise)
    data: Mapping[AgentId, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    candidates: Tensor | None = None
    initial_design: Tensor | Mapping[AgentId, Tensor] | None = None
    secrets: Callable[[AgentId], Secrets] | None = None
    rejoin: bool = True
    active: tuple[AgentId, ...] | None = None
    _stores: Callable[[AgentId | None], Store] | None = field(default=None, repr=False)
    _names: tuple[AgentId, ...] = field(default=(), repr=False)
    _made: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)  # of these settings

    def __post_init__(self) -> None:
        if self.channel not in get_args(ChannelKind):
            raise InputDataError(
                f"channel is one of {get_args(ChannelKind)}, got {self.channel!r}."
            )
        if (self.mechanism is None) != (self.noise_at == "none"):
            raise InputDataError('A run without mechanism has noise_at="none", and none other.')
        if self.feature_map is not None and not isinstance(self.search, TransferSearch):
            raise InputDataError("A shared feature_map is TransferSearch's: leave it out.")
        transfers, has_design = (
            isinstance(self.search, TransferSearch),
            self.initial_design is not None,
        )
        check_start(self.default, transfers=transfers, has_design=has_design)

    @property
    def starts(self) -> int:
        """How many points an agent evaluates in round 0, if it has no data."""
        design = self.initial_design
        if design is not None:
            each = design.values() if isinstance(design, Mapping) else (design,)
            return max(map(len, each), default=0)
        if self.num_initial is not None:
            return self.num_initial
        if not isinstance(self.search, TransferSearch):
            return 4
        return int(self.default is not None) if self.data else MIN_OWN

    def public_search(self, space: SearchSpace) -> Search:
        """What all agents must know of the search."""
        if isinstance(self.search, TransferSearch):
            return MeanSearch.over(space, self.feature_map)
        return self.search

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

    def provision(self, space: SearchSpace) -> None:
        """Make the one key of ``"ckks"``, once: its public part into all stores, its secret one
        into the agents'. The server's comes last, so that what a crash left behind is made anew.
        """
        if self.channel != "ckks" or self._stores is None:
            return
        server = self._stores(None)
        if server.get(CONTEXT) is not None:
            return
        channel, secret = CKKSChannel.generate(self._grid(space, len(self._names))[1])
        for name in self._names:
            store = self._secrets(name)
            store.delete(CONTEXT)
            store.put_new(CONTEXT, channel.context)
            channel.provision(secret, store)
        server.put_new(CONTEXT, channel.context)

    def _secrets(self, name: AgentId) -> Secrets:
        """An agent's own store."""
        if self.secrets is not None:
            return self.secrets(name)
        return MemoryStore() if self._stores is None else self._stores(name)

    def _key(self, store: Secrets | None) -> bytes:
        """The public part of the one key: from the store, or in one process made for all."""
        if store is None:
            if "key" not in self._made:
                made, secret = CKKSChannel.generate(PublicGrid(dim=1, bound=1.0, num_agents=1))
                self._made["key"] = made.context, secret
            return bytes(self._made["key"][0])
        context = store.get(CONTEXT)
        if context is None:
            raise ProtocolError(
                'channel="ckks" has one key for all agents, and it is not in this store: call '
                "provision once before the run where all stores can be reached, or restore it."
            )
        return context

    def _private_sum(
        self, space: SearchSpace, num_agents: int, store: Secrets | None
    ) -> PrivateSum:
        """What bounds, noises and carries the contributions; the same object for all agents."""
        context = self._key(store) if self.channel == "ckks" else b""
        key = (space.fingerprint, num_agents, context)
        if key not in self._made:
            mechanism, grid = self._grid(space, num_agents)
            channel: Channel
            if self.channel == "plain":
                channel = PlainChannel(grid)
            elif self.channel == "ckks":
                channel = CKKSChannel(grid, context)
            else:
                channel = ThresholdCKKSChannel(grid)
            self._made[key] = PrivateSum(
                mechanism=mechanism, channel=channel, noise_at=self.noise_at
            )
        made: PrivateSum = self._made[key]
        return made

    def _grid(self, space: SearchSpace, num_agents: int) -> tuple[Any, PublicGrid]:
        """The mechanism, and the grid on which contributions are added."""
        search = self.public_search(space)
        size = search.size(space.dim)
        mechanism, grid = None, None
        if self.mechanism is not None:
            mechanism = self.mechanism(size, num_agents)
            grid = getattr(mechanism, "grid", None)
            given = max((len(X) for X, _ in self.data.values()), default=0)
            start = self.starts if self.initial_design is None else given + self.starts
            most = max(given, start) + self.rounds
            if isinstance(mechanism, DistributedRecordSum) and mechanism.max_records < most:
                raise InputDataError(
                    f"Agents have up to {most} records, the mechanism has room for "
                    f"{mechanism.max_records}."
                )
        if grid is None:
            bound = search.bound(self.starts + self.rounds)
            usual = 2.0 ** (math.ceil(math.log2(num_agents)) - 51)
            if isinstance(search, MeanSearch):
                usual = search.precision(num_agents)
            precision = usual if self.precision is None else self.precision
            grid = PublicGrid(dim=size, bound=bound, num_agents=num_agents, precision=precision)
        return mechanism, grid

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> FedGPServer:
        """The server of a study."""
        unknown = sorted(set(self.data) - set(names))
        if unknown:
            raise InputDataError(f"Data of agents that are no agents: {unknown[:8]}.")
        if self._names and self._names != names:
            raise InputDataError("with_stores was told of other agents than the server.")
        check_designs(self.initial_design, names)
        store = None if self._stores is None else self._stores(None)
        private_sum = self._private_sum(space, len(names), store)
        self._made["agents"] = len(names)
        search = self.public_search(space)
        active = None if self.active is None or set(self.active) == set(names) else self.active
        usual = self.rounds
        if active is not None and isinstance(search, MeanSearch):
            usual = min(usual, 1)
        sums = usual if self.sums is None else self.sums
        setup = Setup(
            run=self.run,
            space=space,
            support=search if isinstance(search, SupportSearch) else None,
            region=search if isinstance(search, RegionSearch) else None,
            mean=search if isinstance(search, MeanSearch) else None,
            agents=names,
            rounds=self.rounds,
            num_initial=self.starts,
            channel=type(private_sum.channel).__name__,
            fingerprint=private_sum.channel.fingerprint.hex(),
            sums=sums,
            promise=None,
            default=default_point(space, self.default),
        )
        return FedGPServer(
            setup=setup,
            private_sum=private_sum,
            delta=self.delta,
            ledger=_ledger(private_sum),
            noise=self.noise,
            noise_private=self.noise.private,
            rejoin=self.rejoin,
            active=active,
        )

    def agent(self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs) -> FedGPAgent:
        """An agent of a study."""
        num_agents = len(self._names) or self._made.get("agents", 0)
        if not num_agents:
            raise InputDataError(
                "An agent's part depends on how many agents there are: call with_stores first, or "
                "server in the same process."
            )
        secrets = self._secrets(name)
        private_sum = self._private_sum(
            space, num_agents, None if self._stores is None else secrets
        )
        channel = private_sum.channel
        if (  # one process plays all parts
            isinstance(channel, CKKSChannel)
            and self._stores is None
            and secrets.get(channel.handle) is None
        ):
            channel.provision(self._made["key"][1], secrets)
        return FedGPAgent(
            name=name,
            space=space,
            seed=seed,
            private_sum=private_sum,
            require=self.require,
            ledger=_ledger(private_sum),
            noise=self.noise,
            data=self.data.get(name),
            candidates=self.candidates,
            initial_design=design_of(self.initial_design, name),
            strategy=self.search if isinstance(self.search, TransferSearch) else TransferSearch(),
            secrets=secrets,
            blobs=blobs,
        )
