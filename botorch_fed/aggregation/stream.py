r"""Sums over a stream of single records, released after every round [Dubey2021]_.

::

    message        from -> to       content                                       readable by
    Setup          server -> agent  the terms and the shared basis                all
    Order          server -> agent  the round                                     that agent
    Play           server -> agent  the round and the action, if actions are      that agent
                                    public
    Contribution   agent -> server  a record, its statistics with noise, or its   server
                                    outcome
    Parameters     server -> agent  the newest sum of statistics, D numbers       all agents

Rounds are 1 to `T`. In each the server asks `batch` agents, in turn, to play one action. An agent
knows the newest release, from which its search makes the posterior that everybody has. Round `t`
acts on what rounds before it have brought.

::

    trust      class          an agent sends   who adds noise                     chooses the action
    "joint"    JointStream    a record         the server, to the sum of all      the agent
    "local"    LocalStream    its statistics   the agent, to its own statistics   the agent
    "public"   PublicStream   its outcome      the server, to a block's outcomes  the server
    "none"     Stream         a record         nobody                             the agent

With public actions the decision set is fixed and public, and the server plays by the rule of the
search. An action is played until its block is complete, by several agents and over several rounds
if need be, and the sum of the block's outcomes is released once. Absent agents' outcomes are
missing, and the block waits; what is unfinished at the end is never released. Earlier releases say
how long a block is, what its outcomes are clipped to (`narrow`: a range about the prediction, with
noise for that range) and with which prior variances the basis is read (`fit_scales`).

Guarantee: for public settings, times of asking and answering, in two worlds that differ in one unit
(a record, or all records of an agent, bounded by how often it is asked) everything that all others
see in the whole run is :math:`(\epsilon, \delta)`-indistinguishable: "joint" by `privacy.tree`, all
releases being one Gaussian mechanism; "local" by `privacy.increments`, for the server as well;
"public" likewise for outcomes alone, because an action is a function of earlier releases. An action
depends on releases and on the agent's decision set, so what is released may choose what is recorded
(adaptive inputs). The posterior is post-processing: `parameters_model` is anybody's, at any time.

Trust: with "joint" and "public" the server is the privatizer: it sees records, and keeps sums
without noise in its secrets, apart from its record. With "local" nobody is trusted; a site pays
from its own ledger. Not covered: whoever sees an agent's own queries and replies, and the action
that is played with respect to the agent's own decision set; settings tuned on the data; how many
records a round has, who answers and how long that takes.

Payment: with "joint" and "public" the whole run is paid for at the start of the first round, from
the shared ledger first. The state of a mechanism is kept in the secrets before its release is used,
under a name that has the round, and is used as it is if it is there: no crash makes the server draw
noise twice. The last two are kept. The shared ledger may count a run twice, and never too little,
if a crash comes between it and the first secret.

Differs from the paper:

- one Gaussian mechanism with the exact sensitivity, outcomes clipped to a public range and centred,
  square-root factorisation, and a basis of few features (`privacy.tree` lists its corrections);
- clients send their increment; in Algorithm 3 the running sum leaves with the noise of its last
  increment only (`privacy.increments`);
- public actions are not in the paper.

References:
    * [Dubey2021]_ A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
      AISTATS 2021.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from secrets import token_hex
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import BudgetExceeded, MessageError, ProtocolError
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.disclosure import ADDRESSEE, EVERYBODY, Price, Reveals, Row, Sees
from botorch_fed.federation.site import STATE_BYTES
from botorch_fed.federation.terms import (
    ROOM_BYTES,
    Aggregation,
    Contribution,
    Limits,
    Order,
    Party,
    Setup,
    Terms,
    View,
    check_vector,
)
from botorch_fed.models import BasisGP
from botorch_fed.privacy import (
    Adjacency,
    BlockRelease,
    BlockState,
    BlockSum,
    Entry,
    Guarantee,
    Ledger,
    LocalGaussian,
    PrefixState,
    PrefixSum,
    RecordStatistic,
    Unit,
    check_promised_delta,
    compose,
    noise_multiplier_for,
)
from botorch_fed.privacy.paying import check_ledger
from botorch_fed.privacy.tree import Factorization
from botorch_fed.search.bandit import (
    SCALES,
    BanditSearch,
    check_action,
    check_arms,
    families,
    fit_scales,
    sum_model,
    unit_features,
)
from botorch_fed.search.releases import Parameters, RecordSum
from botorch_fed.wire.codec import MAX_BYTES, decode, encode

Trust = Literal["joint", "local", "public", "none"]
Mechanism = PrefixSum | LocalGaussian | BlockSum

MAX_ROUNDS = 10**8
MAX_NUMBER = 1e15  # of what is released: beyond it nothing is a sum of clipped statistics
MAX_NOISE = 64.0  # standard deviations that noise never exceeds
PRECISION = 0.6  # a block is as exact as so many of the posterior's deviations
REACH = 3.0  # deviations of an outcome from the prediction within the range of a block
LEAST_RANGE = 1e-3  # of a block's range, relative to the public one
FIRST_WIDE = 4  # blocks that have the public range, before there are predictions
ALWAYS_FITTED, FITTED_EVERY = 16, 4  # blocks after which scales are fitted: the first, and then
SHARE = 20  # a block takes at most one in so many of all outcomes
_NEWEST = "newest secret"  # in the hub's cache: its name and itself

_T = TypeVar("_T")


# ------------------------------------------------------------------ messages and states


@dataclass(frozen=True, eq=False)
class Play(Order):
    """Play a public action, `1 x d`."""

    X: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """A public action that is being played.

    Attributes:
        X: The action, `1 x d`.
        length: How many outcomes it takes.
        centre: The middle of the range that they are clipped to.
        outcome_bound: Half of that range.
        number: How many blocks came before.
        count: How many of its outcomes there are.
    """

    X: Tensor
    length: int
    centre: float
    outcome_bound: float
    number: int = 0
    count: int = 0


@dataclass(frozen=True, eq=False)
class BlockSecret:
    """What the server keeps of blocks after a round: the sum, and what was released in it."""

    state: BlockState
    release: BlockRelease | None

    def __repr__(self) -> str:
        return "BlockSecret(secret)"


@dataclass(frozen=True, eq=False)
class StreamState:
    """What the server keeps; nothing in it is secret.

    Attributes:
        t: Finished rounds.
        asked: How many actions were asked for in them.
        stream: A random name of this start of the run, under which its secrets lie.
        parameters: The newest release.
        block: The public action that is being played.
        ledger: What this run has paid.
    """

    t: int
    asked: int
    stream: str
    parameters: Parameters | None
    block: Block | None
    ledger: Ledger


@dataclass(frozen=True, eq=False)
class StreamMemory:
    """What a site keeps.

    Attributes:
        t: The round of its last order.
        sent: How many messages it has sent.
        ledger: What they have cost, where a site pays.
    """

    t: int
    sent: int
    ledger: Ledger


# ------------------------------------------------------------------ sums without noise


@dataclass(frozen=True, kw_only=True)
class Stream(Aggregation):
    r"""Records are summed by the server, and nobody adds noise.

    Attributes:
        horizon: How many evaluations each agent makes at most; noise is made for so many. There are
            :math:`T = \lfloor horizon \cdot N / batch \rfloor` rounds.
        batch: How many agents are asked in a round, in turn; default all.
        outcome_bound: :math:`Y`: outcomes on the public scale are clipped to :math:`\pm Y`.
        moment_scale: :math:`\kappa` of the statistics, see `RecordStatistic`.
        final_release: Whether the last round is released, which no round acts on.
    """

    horizon: int
    batch: int | None = None
    outcome_bound: float = 2.0
    moment_scale: float | None = None
    final_release: bool = True

    trust: ClassVar[Trust] = "none"
    state_type = StreamState
    memory_type = StreamMemory
    broadcast_types = (Parameters,)
    why_closed = "its rounds and its noise are planned for the agents that it began with"

    def __post_init__(self) -> None:
        if isinstance(self.horizon, bool) or not 1 <= self.horizon <= MAX_ROUNDS:
            raise InputDataError(f"Expected 1 <= horizon <= 10^8, got {self.horizon}.")
        if not 1e-6 <= self.outcome_bound <= 1e6:
            raise InputDataError(
                f"outcome_bound must lie between 1e-6 and 1e6, got {self.outcome_bound}."
            )
        _statistic(1, self.outcome_bound, self.moment_scale)  # refuses one that there is not

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless messages are records, of not too many features."""
        phi, size = terms.feature_map, terms.search.size(terms)
        if not terms.search.needs_outcome or size != terms.space.dim + 1:
            raise InputDataError(
                f"{type(self).__name__} sums records, an action and its outcome each: "
                f"{type(terms.search).__name__} says something else. Use a BanditSearch."
            )
        m = phi.num_features
        if 4 * m * (m + 3) > MAX_BYTES - 2**16:
            raise InputDataError(
                f"Sums over {m} features are too large to be sent: use at most 2,000. Noise grows "
                "with them too: under privacy 6 to 30 are plenty."
            )
        if terms.active is not None:
            raise InputDataError("All agents are asked in turn: leave active out.")
        if terms.agents:
            self._check_roster(terms)

    def _check_roster(self, terms: Terms) -> None:
        batch, N = self.batch, len(terms.agents)
        if batch is not None and (isinstance(batch, bool) or not 1 <= batch <= N):
            raise InputDataError(
                f"batch must lie in 1..{N}, the number of agents, got {self.batch}."
            )
        if self.rounds(terms) > MAX_ROUNDS:
            raise InputDataError(f"There must be 1 to 10^8 rounds, got {self.rounds(terms)}.")

    # -------------------------------------------------------------- counts

    def per_round(self, terms: Terms) -> int:
        """How many agents are asked in a round."""
        return len(terms.agents) if self.batch is None else self.batch

    def rounds(self, terms: Terms) -> int:
        """How many rounds there are, `T`."""
        return rounds_of(self.horizon, self.batch, len(terms.agents))

    def releases(self, terms: Terms) -> int:
        """How many sums are released, if all rounds are."""
        return self.rounds(terms) - (not self.final_release)

    def participations(self, terms: Terms) -> int:
        """How often an agent is asked at most."""
        return most_participations(self.rounds(terms), self.per_round(terms), len(terms.agents))

    def statistic(self, terms: Terms) -> RecordStatistic:
        """What one record adds to a sum."""
        return _statistic(terms.feature_map.num_features, self.outcome_bound, self.moment_scale)

    # -------------------------------------------------------------- the hub

    def start(self, hub: Party) -> StreamState:
        """The state before the first round."""
        return StreamState(0, 0, token_hex(8), None, None, self.ledger(hub))

    def ledger(self, party: Party) -> Ledger:
        """What a party has paid before."""
        return Ledger() if party.resources.ledger is None else party.resources.ledger

    def orders(self, hub: Party, state: StreamState) -> Mapping[AgentId, Order] | None:
        """One action each from the agents whose turn it is."""
        if state.t >= self.rounds(hub.terms):
            return None
        return dict.fromkeys(self.turn(hub.terms, state), self.order(state))

    def order(self, state: StreamState) -> Order:
        """What they are to do."""
        return Order(state.t + 1, "next", True)

    def turn(self, terms: Terms, state: StreamState) -> tuple[AgentId, ...]:
        """Whose turn it is; never more than an open block has room for."""
        count, agents = self.per_round(terms), terms.agents
        if state.block is not None:
            count = min(count, state.block.length - state.block.count)
        return tuple(agents[(state.asked + i) % len(agents)] for i in range(count))

    def broadcasts(self, hub: Party, state: StreamState) -> tuple[Parameters, ...]:
        """The newest sum."""
        return () if state.parameters is None else (state.parameters,)

    def check(
        self, hub: Party, state: StreamState, sender: AgentId, reply: Contribution, order: Order
    ) -> None:
        """Raise `MessageError` unless a reply can be added."""
        if reply.values is not None:
            self.check_values(hub.terms, reply.values)

    def check_values(self, terms: Terms, values: Tensor) -> None:
        """Raise `MessageError` unless this is a record."""
        terms.search.check(terms, values)

    def combine(
        self, hub: Party, state: StreamState, inbox: Mapping[AgentId, Contribution]
    ) -> StreamState:
        """Add what has come and release the sum; an absent agent adds nothing.

        Raises:
            BudgetExceeded: Of the first round: a ledger does not cover the run. Nothing is
                released.
            ProtocolError: The secret of the last round is missing.
        """
        asked = self.turn(hub.terms, state)
        replies = [inbox[agent].values for agent in asked if agent in inbox]
        after = replace(state, t=state.t + 1, asked=state.asked + len(asked))
        if state.t >= self.releases(hub.terms):
            return after
        return self.added(hub, state, after, [v for v in replies if v is not None])

    def added(
        self, hub: Party, state: StreamState, after: StreamState, given: list[Tensor]
    ) -> StreamState:
        """The state with the sum of a round.

        Args:
            hub: The hub.
            state: The state before the round.
            after: The state after it, without a new sum.
            given: What agents have sent, in the order of their turns.
        """
        records = self._records(hub.terms, given)
        values, count = self._so_far(hub.terms, state)
        values = values + self.statistic(hub.terms).statistics(records).sum(dim=0)
        return replace(after, parameters=_released(after.t, values, 0.0, count + len(records)))

    def _records(self, terms: Terms, given: list[Tensor]) -> Tensor:
        """Records as mechanisms take them, `n x (m + 1)`."""
        if not given:
            return torch.zeros(0, terms.feature_map.num_features + 1, dtype=torch.float64)
        X, Y = torch.stack(given).split([terms.space.dim, 1], dim=1)
        features = unit_features(terms.feature_map, X.contiguous())
        return self.statistic(terms).records(features, Y.contiguous())

    def _so_far(self, terms: Terms, state: StreamState) -> tuple[Tensor, int]:
        """The newest sum, and how many outcomes it is made of."""
        if state.parameters is None:
            return torch.zeros(self.statistic(terms).dim, dtype=torch.float64), 0
        return state.parameters.values, state.parameters.count

    # -------------------------------------------------------------- a site

    def limits(self, terms: Terms) -> Limits:
        """One action and its answer, as often as it is an agent's turn."""
        count = self.participations(terms)
        return Limits(self.rounds(terms), 0, count, count)

    def begin(self, site: Party) -> StreamMemory:
        """Nothing was sent or paid."""
        return StreamMemory(0, 0, self.ledger(site))

    def check_published(self, terms: Terms, published: tuple[Parameters, ...]) -> None:
        """Raise `MessageError` unless this is one sum of statistics, or none."""
        if len(published) > 1:
            raise MessageError(f"Expected one sum of statistics, got {len(published)}.")
        for parameters in published:
            check_vector(parameters.values, self.statistic(terms).dim, "A release", MAX_NUMBER)
            check_scales(parameters, terms)
            if (
                not 0 <= parameters.noise_std <= MAX_NUMBER
                or min(parameters.t, parameters.count) < 0
            ):
                raise MessageError(
                    f"Expected 0 <= noise_std <= {MAX_NUMBER:g}, t >= 0 and count >= 0, got "
                    f"{parameters.noise_std}, {parameters.t} and {parameters.count}."
                )

    def check_order(self, site: Party, order: Order, published: tuple[Parameters, ...]) -> None:
        """Raise `MessageError` unless rounds go on and act on earlier ones."""
        rounds = self.rounds(site.terms)
        if not site.memory.t < order.t <= rounds:
            raise MessageError(
                f"Rounds go on from {site.memory.t} to {rounds}, got round {order.t}."
            )
        if (order.evaluate, order.contribute) != ("next", True):
            raise MessageError("An order of this protocol is to play one action and to answer.")
        for parameters in published:
            if not parameters.t < order.t:
                raise MessageError(
                    f"Round {order.t} acts on earlier rounds, got a release of round "
                    f"{parameters.t}."
                )

    def received(
        self, site: Party, order: Order, published: tuple[Parameters, ...]
    ) -> StreamMemory:
        """The memory with the new round."""
        return replace(site.memory, t=order.t)

    def release(self, site: Party, published: tuple[Parameters, ...]) -> RecordSum | None:
        """The newest sum with what it means."""
        return self.meaning(site.terms, published[0] if published else None)

    def meaning(self, terms: Terms, parameters: Parameters | None) -> RecordSum | None:
        """A sum as searches read it."""
        if parameters is None:
            return None
        return RecordSum(parameters, self.statistic(terms), self.rounds(terms))

    def contribute(
        self, site: Party, order: Order, message: Callable[[], Tensor | None]
    ) -> tuple[StreamMemory, Contribution]:
        """The record, or what the trust model makes of it."""
        record = message()
        if record is None:
            return site.memory, Contribution(None)
        values, ledger = self.sent(site, record)
        memory = replace(site.memory, sent=site.memory.sent + 1, ledger=ledger)
        return memory, Contribution(values)

    def sent(self, site: Party, record: Tensor) -> tuple[Tensor, Ledger]:
        """What leaves a site for a record, and its ledger afterwards."""
        return record, site.memory.ledger

    # -------------------------------------------------------------- what a reader needs

    def promise(self, hub: Party) -> Guarantee | None:
        """Nothing, and nobody pays."""
        self._check_nothing_paid(hub)
        return None

    def guaranteed(self, terms: Terms) -> Guarantee | None:
        """Nothing: a hub that promises privacy without noise is refused."""
        return None

    def _check_nothing_paid(self, hub: Party) -> None:
        ledger = hub.resources.ledger
        if hub.resources.shared_ledger is not None or (ledger and ledger.budget is not None):
            raise InputDataError(
                f"With trust={self.trust!r} the server pays for nothing: leave out its ledger and "
                "its budget."
            )

    def account(self, hub: Party, state: StreamState) -> dict[str, Any]:
        """The promise, what was paid, and the signal beside the noise."""
        outcomes = 0 if state.parameters is None else state.parameters.count
        common = {"trust": self.trust, "outcomes": outcomes}
        account = super().account(hub, state)
        if account is None:
            return {"mechanism": "none", "private": False, **common}
        return {**account, "signal_to_noise": signal_to_noise(state.parameters), **common}

    def sees(self, terms: Terms) -> Sees:
        """Who sees what."""
        dim, said = self.statistic(terms).dim, _SAID[self.trust]
        order = Row.of(Order, "server", "the number of the round", ADDRESSEE)
        if self.trust == "public":
            action = "the round and the action to play, a function of earlier releases"
            order = Row.of(Play, "server", action, EVERYBODY, "noisy data")
        rows = (
            Row.of(Setup, "server", "the terms, the shared basis and the promise", EVERYBODY),
            order,
            Row.of(
                Contribution, "agent", said.sent.format(dim=dim), ("server",), said.sent_reveals
            ),
            Row.of(
                Parameters,
                "server",
                f"{said.released}, {dim} numbers, from which all make the same posterior",
                EVERYBODY,
                said.released_reveals,
            ),
        )
        stays = "An agent's own data, actions and outcomes stay with the agent."
        return Sees(rows, said.trust, stays if self.trust == "local" else "")


@dataclass(frozen=True)
class _Said:
    """What `Sees` says of a trust model."""

    sent: str
    sent_reveals: Reveals
    released: str
    released_reveals: Reveals
    trust: str


_RECORD = "every record, an action and its outcome"
_SAID: dict[Trust, _Said] = {
    "joint": _Said(
        _RECORD,
        "data",
        "the noisy sum of the statistics of all records",
        "noisy data",
        "The server is trusted with every record and adds the noise; the guarantee is against all "
        "others together, not against the server.",
    ),
    "local": _Said(
        "the statistics of a record with noise, {dim} numbers",
        "noisy data",
        "the sum of all noisy statistics",
        "noisy data",
        "No party is trusted: the guarantee is against the server as well.",
    ),
    "public": _Said(
        "the outcome of every public action",
        "data",
        "the noisy sum of the outcomes of a block",
        "noisy data",
        "The server is trusted with every outcome and adds the noise; the guarantee is for "
        "outcomes alone, against all others together, because actions are public.",
    ),
    "none": _Said(
        _RECORD,
        "data",
        "the sum of the statistics of all records",
        "data",
        "The server is trusted with every record and all agents with sums of them.",
    ),
}


# ------------------------------------------------------------------ sums with noise


@dataclass(frozen=True, kw_only=True)
class NoisyStream(Stream):
    r"""Sums with noise; a subclass says who adds it.

    Attributes:
        epsilon: What the whole run may reveal about one unit; the noise follows from it.
        noise_multiplier: Instead of `epsilon`, the noise itself.
        delta: Beside `epsilon`, and of the promise: below one over the number of units. The
            paper's 0.1 is no :math:`\delta`.
        adjacency: What a neighbouring world is.
        unit: Whose data are protected: a record, or all of an agent's.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    adjacency: Adjacency = "replace-one"
    unit: Unit = "record"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InputDataError(
                "A private run needs epsilon or noise_multiplier, one of the two. One without "
                'privacy is trust="none" and neither.'
            )
        check_promised_delta(self.delta)
        if self.unit not in get_args(Unit) or self.adjacency not in get_args(Adjacency):
            raise InputDataError(
                f"unit is one of {get_args(Unit)} and adjacency one of {get_args(Adjacency)}, got "
                f"{self.unit!r} and {self.adjacency!r}."
            )

    def _check_roster(self, terms: Terms) -> None:
        super()._check_roster(terms)
        units = len(terms.agents)
        if self.unit == "record":
            units = self.rounds(terms) * self.per_round(terms)
        check_promised_delta(self.delta, units, self.unit)
        self.mechanism(terms)  # refuses noise that there is not

    def mechanism(self, terms: Terms) -> Mechanism:
        """What adds noise; needs the roster."""
        raise NotImplementedError

    def _settings(self, terms: Terms) -> dict[str, Any]:
        """Settings that all mechanisms have."""
        return {
            "outcome_bound": self.outcome_bound,
            "noise_multiplier": self.multiplier(terms),
            "adjacency": self.adjacency,
            "unit": self.unit,
        }

    def multiplier(self, terms: Terms) -> float:
        """:math:`z`, the noise of one payment over the norm of one unit's contribution."""
        if self.epsilon is None:
            assert self.noise_multiplier is not None
            return float(self.noise_multiplier)
        payments = self.payments(terms)
        return _multiplier(self.epsilon, self.delta, payments, self.adjacency)

    def payments(self, terms: Terms) -> int:
        """How often one unit pays at most."""
        return 1

    def promise(self, hub: Party) -> Guarantee:
        """What the whole run reveals about one unit at most."""
        composed = self.guaranteed(hub.terms)
        self.check_ledgers(hub)
        return replace(composed, private=hub.resources.noise.private)

    def guaranteed(self, terms: Terms) -> Guarantee:
        """What the terms come to, with noise that is secret."""
        return compose(
            [self.mechanism(terms).event] * self.payments(terms),
            delta=self.delta,
            adjacency=self.adjacency,
            unit=self.unit,
        )

    def check_ledgers(self, hub: Party) -> None:
        """Raise unless the hub's ledgers fit the mechanism."""
        self._check_nothing_paid(hub)

    def ledger(self, party: Party) -> Ledger:
        """What a party has paid before."""
        known = party.resources.ledger
        return Ledger(self.adjacency, self.unit) if known is None else known

    def check_order(self, site: Party, order: Order, published: tuple[Parameters, ...]) -> None:
        """Raise `MessageError` unless rounds go on, under a promise that is about this noise."""
        super().check_order(site, order, published)
        promise = site.terms.promise
        if promise is None or (promise.unit, promise.adjacency) != (self.unit, self.adjacency):
            said = "none" if promise is None else f"per {promise.unit}, {promise.adjacency}"
            raise MessageError(
                f"The promise is {said}, and the noise per {self.unit}, {self.adjacency}: they "
                "must agree."
            )

    def price(self, terms: Terms) -> Price | None:
        """What a run costs in privacy; None without the hub's promise."""
        mechanism = self.mechanism(terms)
        if terms.promise is None:
            return None
        noise_std, releases = self._noise(terms)
        return Price(
            guarantee=terms.promise,
            event=mechanism.event,
            payments=self.payments(terms),
            releases=releases,
            mechanism=type(mechanism).__name__,
            settings=repr(mechanism),
            noise_std=noise_std,
            trust=_SAID[self.trust].trust,
            paid_at="site" if self.trust == "local" else "hub",
        )

    def _noise(self, terms: Terms) -> tuple[float, int]:
        """The noise of a number, and how many noisy values are planned."""
        raise NotImplementedError


# ------------------------------------------------------------------ each agent adds its own noise


@dataclass(frozen=True, kw_only=True)
class LocalStream(NoisyStream):
    """Each agent adds noise to the statistics of its record; the server sums what it gets."""

    trust: ClassVar[Trust] = "local"

    def mechanism(self, terms: Terms) -> LocalGaussian:
        """What adds noise."""
        statistic = self.statistic(terms)
        return LocalGaussian(
            num_features=statistic.num_features,
            moment_scale=statistic.moment_scale,
            **self._settings(terms),
        )

    def payments(self, terms: Terms) -> int:
        """A record is in one increment, an agent in all that it is asked for."""
        return self.participations(terms) if self.unit == "agent" else 1

    def check_values(self, terms: Terms, values: Tensor) -> None:
        """Raise `MessageError` unless these are statistics with noise."""
        statistic = self.statistic(terms)
        most = statistic.largest + 1 + MAX_NOISE * self.mechanism(terms).noise_scale
        check_vector(values, statistic.dim, "An increment", most)

    def added(
        self, hub: Party, state: StreamState, after: StreamState, given: list[Tensor]
    ) -> StreamState:
        """The state with the sum of all increments."""
        values, count = self._so_far(hub.terms, state)
        for increment in given:
            values = values + increment
        count += len(given)
        if not count:
            return after
        noise_std = self.mechanism(hub.terms).noise_std(count)
        return replace(after, parameters=_released(after.t, values, noise_std, count))

    def check_order(self, site: Party, order: Order, published: tuple[Parameters, ...]) -> None:
        """Raise `MessageError` unless the round fits, and the site's noise is its requirement's."""
        super().check_order(site, order, published)
        if site.memory.ledger.budget is not None and not site.resources.noise.private:
            raise MessageError("This site requires privacy, and its own noise comes from a seed.")

    def received(
        self, site: Party, order: Order, published: tuple[Parameters, ...]
    ) -> StreamMemory:
        """The memory with the new round; what it would cost is checked before it is played."""
        event, private = self.mechanism(site.terms).event, site.resources.noise.private
        self._paying(site.memory).spend(event, private=private)
        return super().received(site, order, published)

    def _paying(self, memory: StreamMemory) -> Ledger:
        """The ledger that pays for the next increment.

        A record is in one increment, at whose price all of them come (parallel composition); an
        agent is in all of them and pays for each.
        """
        if self.unit == "agent" or not memory.sent:
            return memory.ledger
        return replace(memory.ledger, entries=())

    def reply_bytes(self, hub: Party) -> int:
        """See `Aggregation`: the statistics of a record."""
        return 8 * self.statistic(hub.terms).dim + ROOM_BYTES

    def sent(self, site: Party, record: Tensor) -> tuple[Tensor, Ledger]:
        """The statistics of a record with all of their noise, paid for."""
        mechanism, X, Y = self.mechanism(site.terms), record[None, :-1], record[None, -1:]
        release, ledger = mechanism.release(
            # A made-up basis must not tell by a missing reply where an agent's own arms are.
            mechanism.records(
                unit_features(site.terms.feature_map, X).nan_to_num(0.0, 0.0, 0.0), Y
            ),
            ledger=self._paying(site.memory),
            noise=site.resources.noise,
            path=("increment", site.name or "", site.memory.t),
        )
        return release.values[0], ledger

    def paid(self, hub: Party, state: StreamState) -> tuple[Entry, ...]:
        """What an agent has paid that was asked most often and has always answered."""
        so_far = most_participations(1, state.asked, len(hub.terms.agents))
        count = min(so_far, self.payments(hub.terms))
        return (Entry(self.mechanism(hub.terms).event, count, "increments"),) if count else ()

    def _noise(self, terms: Terms) -> tuple[float, int]:
        return self.mechanism(terms).noise_scale, self.rounds(terms) * self.per_round(terms)


# ------------------------------------------------------------------ the server adds noise


@dataclass(frozen=True, kw_only=True)
class CentralStream(NoisyStream):
    """The server is the privatizer: it pays in the first round and keeps secrets."""

    def check_ledgers(self, hub: Party) -> None:
        """Raise `BudgetExceeded` for a run that the hub's own ledger does not cover."""
        ledger, shared = self.ledger(hub), hub.resources.shared_ledger
        for one in (ledger, shared):
            if one is not None:
                check_ledger(self.mechanism(hub.terms), one)
        event = self.mechanism(hub.terms).event
        ledger.spend(event)
        if shared is not None:
            # A resumed run has paid from it already.
            with contextlib.suppress(BudgetExceeded):
                shared.ledger.spend(event)  # a value: nothing is written

    def paid(self, hub: Party, state: StreamState) -> tuple[Entry, ...]:
        """What the hub has paid."""
        return state.ledger.entries

    def _spent(self, hub: Party, state: StreamState) -> Ledger:
        """The ledger of the run, which pays once, in the first round."""
        if state.t > 0:
            return state.ledger
        mechanism = self.mechanism(hub.terms)
        note, private = type(mechanism).__name__, hub.resources.noise.private
        return state.ledger.spend(mechanism.event, note=note, private=private)

    def _pay_shared(self, hub: Party) -> None:
        if hub.resources.shared_ledger is not None:
            hub.resources.shared_ledger.spend(
                self.mechanism(hub.terms).event,
                note="private GP-UCB",
                private=hub.resources.noise.private,
            )

    def orders(self, hub: Party, state: StreamState) -> Mapping[AgentId, Order] | None:
        """As in `Stream`; raises before agents are asked in vain."""
        if 0 < state.t < self.rounds(hub.terms):
            name = _secret_name(state, state.t)
            known, _ = hub.resources.cache.get(_NEWEST, ("", None))
            if name != known and hub.resources.secrets.get(name) is None:
                raise _missing(state)
        return super().orders(hub, state)

    def _kept(self, hub: Party, state: StreamState, kind: type[_T], make: Callable[[], _T]) -> _T:
        """The secret after the round: what a crash has left, or a new one, kept before its use."""
        name, secrets = _secret_name(state, state.t + 1), hub.resources.secrets
        data = secrets.get(name)
        if data is None:
            secret = make()
            secrets.put_new(name, encode(secret, max_bytes=STATE_BYTES))
        else:
            secret = _read(data, kind)
        if state.t > 0:
            secrets.delete(_secret_name(state, state.t - 1))
        hub.resources.cache[_NEWEST] = name, secret
        return secret

    def _secret(self, hub: Party, state: StreamState, kind: type[_T]) -> _T:
        """The secret of the last round."""
        name = _secret_name(state, state.t)
        known, secret = hub.resources.cache.get(_NEWEST, ("", None))
        if name == known and isinstance(secret, kind):
            return secret
        data = hub.resources.secrets.get(name)
        if data is None:
            raise _missing(state)
        return _read(data, kind)


@dataclass(frozen=True, kw_only=True)
class JointStream(CentralStream):
    """The server adds noise to the sum of all records.

    Attributes:
        factorization: Of the running sums, see `privacy.tree`.
    """

    factorization: Factorization = "sqrt"

    trust: ClassVar[Trust] = "joint"

    def mechanism(self, terms: Terms) -> PrefixSum:
        """What adds noise."""
        statistic = self.statistic(terms)
        return PrefixSum(
            num_features=statistic.num_features,
            moment_scale=statistic.moment_scale,
            horizon=max(1, self.releases(terms)),
            factorization=self.factorization,
            participations=self.participations(terms) if self.unit == "agent" else 1,
            **self._settings(terms),
        )

    def added(
        self, hub: Party, state: StreamState, after: StreamState, given: list[Tensor]
    ) -> StreamState:
        """The state with the sum of all records, with noise, after its secret is kept."""
        mechanism, noise = self.mechanism(hub.terms), hub.resources.noise
        ledger = self._spent(hub, state)
        records = self._records(hub.terms, given)

        def make() -> PrefixState:
            if state.t == 0:
                self._pay_shared(hub)
                before, _ = mechanism.start(ledger=state.ledger, noise=noise)
            else:
                before = self._secret(hub, state, PrefixState)
            return mechanism.step(before, records, noise=noise, path=("release",))[0]

        secret = self._kept(hub, state, PrefixState, make)
        release = mechanism.release(secret)
        parameters = _released(after.t, release.values, release.noise_std, secret.records)
        return replace(after, ledger=ledger, parameters=parameters)

    def _noise(self, terms: Terms) -> tuple[float, int]:
        releases = self.releases(terms)
        return self.mechanism(terms).noise_std(releases), releases


@dataclass(frozen=True, kw_only=True)
class PublicStream(CentralStream):
    """Actions are public: the server chooses them and adds noise to the outcomes of blocks.

    Attributes:
        candidates: What may be played, `K x d`; default the whole unit cube.
        most_per_block: The longest block; default a twentieth of all outcomes.
        seed: Of the server's choices; not secret.
        fit_scales: Whether the basis is read with prior variances that are fitted to what was
            released (`search.bandit.fit_scales`).
        narrow: Whether a block's outcomes are clipped to where earlier releases expect them, which
            takes less noise. The variance of outcomes must then be known: a range that is too
            narrow for them distorts their mean.
    """

    candidates: Tensor | None = field(default=None, compare=False)
    most_per_block: int | None = None
    seed: int = 0
    fit_scales: bool = False
    narrow: bool = False

    trust: ClassVar[Trust] = "public"
    order_types = (Play,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_per_block is not None and self.most_per_block < 1:
            raise InputDataError(f"most_per_block counts from 1, got {self.most_per_block}.")

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless the decision set is public."""
        search = terms.search
        if not isinstance(search, BanditSearch) or search.decision_sets is not None:
            raise InputDataError(
                'With trust="public" the decision set is fixed and public: give candidates, or '
                "nothing for the whole cube."
            )
        if self.candidates is not None:
            check_arms(self.candidates, terms.space.dim, "candidates")
        super().check_terms(terms)

    def _check_roster(self, terms: Terms) -> None:
        super()._check_roster(terms)
        if self.unit == "agent" and self.participations(terms) > 1:
            raise InputDataError(
                f"An agent is asked up to {self.participations(terms)} times: blocks of outcomes "
                'protect agents that give one. Use unit="record", or as many agents as queries.'
            )

    def mechanism(self, terms: Terms) -> BlockSum:
        """What adds noise."""
        return BlockSum(**self._settings(terms))

    # -------------------------------------------------------------- the hub

    def start(self, hub: Party) -> StreamState:
        """The state before the first round, with the first action."""
        return self._with_block(hub, super().start(hub))

    def order(self, state: StreamState) -> Play:
        """The action of the block."""
        assert state.block is not None
        return Play(state.t + 1, "next", True, state.block.X)

    def check_values(self, terms: Terms, values: Tensor) -> None:
        """Raise `MessageError` unless this is one finite outcome."""
        check_vector(values, 1, "An outcome", sys.float_info.max)

    def added(
        self, hub: Party, state: StreamState, after: StreamState, given: list[Tensor]
    ) -> StreamState:
        """The state with the outcomes of a block; if it is complete, with their sum."""
        mechanism, noise, block = self.mechanism(hub.terms), hub.resources.noise, state.block
        assert block is not None
        ledger = self._spent(hub, state)

        def make() -> BlockSecret:
            if state.t == 0:
                self._pay_shared(hub)
                before, _ = mechanism.start(ledger=state.ledger, noise=noise)
            else:
                before = self._secret(hub, state, BlockSecret).state
            if not before.length:
                within = {"centre": block.centre, "outcome_bound": block.outcome_bound}
                before = mechanism.open(before, block.length, **within)
            if not given:
                return BlockSecret(before, None)
            outcomes = torch.stack(given)
            return BlockSecret(*mechanism.add(before, outcomes, noise=noise, path=("release",)))

        secret = self._kept(hub, state, BlockSecret, make)
        after = replace(after, ledger=ledger)
        if secret.release is None:
            return replace(after, block=replace(block, count=secret.state.count))
        values, count = self._so_far(hub.terms, state)
        values = values + self._of_block(hub.terms, block.X, secret.release)
        parameters = _released(after.t, values, 0.0, count + block.length)
        if self.fit_scales:
            last = parameters.scales if state.parameters is None else state.parameters.scales
            parameters = replace(parameters, scales=last)
            if block.number < ALWAYS_FITTED or not block.number % FITTED_EVERY:
                parameters = replace(parameters, scales=self._fitted(hub.terms, parameters))
        return self._with_block(hub, replace(after, parameters=parameters, block=None), block)

    def _fitted(self, terms: Terms, parameters: Parameters) -> Tensor:
        """Better scales for a sum."""
        meaning = self.meaning(terms, parameters)
        assert meaning is not None
        return fit_scales(self._search(terms), terms.feature_map, meaning)

    def _of_block(self, terms: Terms, X: Tensor, release: BlockRelease) -> Tensor:
        """A block's mean as one record, with the weight of its variance: `D` numbers."""
        noise_var = self._search(terms).noise_var
        mean = torch.tensor([[release.mean]], dtype=torch.float64)
        weight = noise_var / release.mean_var(noise_var)
        return weight * self.statistic(terms).products(unit_features(terms.feature_map, X), mean)[0]

    def _with_block(self, hub: Party, state: StreamState, last: Block | None = None) -> StreamState:
        """With the next public action, if there are rounds left."""
        terms, batch = hub.terms, self.per_round(hub.terms)
        rounds, search = self.rounds(terms), self._search(terms)
        if state.t >= rounds:
            return state
        none = torch.zeros(0, terms.space.dim, dtype=torch.float64)
        view = View(
            terms=terms,
            name="",
            seed=self.seed,
            X=none,
            Y=none[:, :1],
            chosen=none,
            failed=none,
            n=state.t,
            t=state.t + 1,
            release=self.meaning(terms, state.parameters),
            candidates=self.candidates,
        )
        X = search.point(view)
        most = self.most_per_block
        if most is None:
            most = max(1, rounds * batch // SHARE)
        most = min(most, max(1, self.releases(terms) - state.t) * batch)  # what can be released
        number = 0 if last is None else last.number + 1
        mean, std = search.prediction(view, X)
        centre, bound = self._range(mean, math.hypot(std, math.sqrt(search.noise_var)), number)
        length = self.mechanism(terms).length(
            std, math.sqrt(search.noise_var), most=most, c=PRECISION, outcome_bound=bound
        )
        return replace(state, block=Block(X, length, centre, bound, number))

    def _range(self, mean: float, std: float, number: int) -> tuple[float, float]:
        """Centre and half range of a block, by the prediction of one outcome."""
        public = self.outcome_bound
        if not self.narrow or number < FIRST_WIDE:
            return 0.0, public
        bound = max(min(public, REACH * std), public * LEAST_RANGE)
        return max(bound - public, min(public - bound, mean)), bound

    def _search(self, terms: Terms) -> BanditSearch:
        assert isinstance(terms.search, BanditSearch)
        return terms.search

    def _noise(self, terms: Terms) -> tuple[float, int]:
        return self.mechanism(terms).noise_std, self.releases(terms)

    # -------------------------------------------------------------- a site

    def check_order(self, site: Party, order: Play, published: tuple[Parameters, ...]) -> None:  # type: ignore[override]
        """Raise `MessageError` unless the round fits, and the action is one that can be played."""
        super().check_order(site, order, published)
        check_action(order.X, site.terms.space.dim)
        arms = self.candidates
        if arms is not None and not bool((arms == order.X).all(dim=-1).any()):
            raise MessageError("The action is none of those that this site can play.")
        if not bool(site.terms.space.feasible_set.contains(order.X).all()):
            raise MessageError("The action violates a constraint of the search space.")

    def action(self, order: Play) -> Tensor:
        """The public action."""
        return order.X

    def sent(self, site: Party, record: Tensor) -> tuple[Tensor, Ledger]:
        """The outcome alone."""
        return record[-1:], site.memory.ledger


# ------------------------------------------------------------------ parts


def rounds_of(horizon: int, batch: int | None, num_agents: int) -> int:
    """As many rounds of `batch` agents as ask nobody more than `horizon` times."""
    return horizon if batch is None else horizon * num_agents // max(1, batch)


def most_participations(rounds: int, batch: int, num_agents: int) -> int:
    """How often one agent is asked at most, if they are asked in turn."""
    return -(-rounds * batch // num_agents)


def parameters_model(terms: Terms, parameters: Parameters | None) -> BasisGP:
    """The posterior of a release as a BoTorch model; anybody may have it, at any time.

    Args:
        terms: Of the run, with its roster.
        parameters: A release; None for the prior.

    Returns:
        A model on the unit cube, of outcomes on the public scale.

    Example:
        >>> model = parameters_model(server.terms, parameters)
        >>> UpperConfidenceBound(model, beta=0.25)
    """
    search, stream = terms.search, terms.aggregation
    if not isinstance(search, BanditSearch) or not isinstance(stream, Stream):
        raise InputDataError("Only a bandit's releases have one posterior for all.")
    return sum_model(search, terms.feature_map, stream.meaning(terms, parameters))


def check_scales(parameters: Parameters, terms: Terms) -> None:
    """Raise `MessageError` unless scales are one positive number for each family, or none."""
    scales = parameters.scales
    if scales.shape == (0,) and scales.dtype == torch.float64:
        return
    count = max(families(terms.feature_map)) + 1
    fits = scales.shape == (count,) and scales.dtype == torch.float64
    if not fits or not bool(((scales >= SCALES[0]) & (scales <= SCALES[1])).all()):
        raise MessageError(
            f"Scales are {count} numbers in {SCALES}, one for each family of the basis, or none; "
            f"got shape {tuple(scales.shape)}, {scales.dtype}, or other numbers."
        )
    if parameters.noise_std:
        raise MessageError("Scales are fitted to sums without noise, got a sum with noise.")


def signal_to_noise(parameters: Parameters | None) -> float | None:
    r"""An estimate of :math:`\|signal\|/\|noise\|` in a release; None where nothing says it."""
    if parameters is None or parameters.noise_std == 0:
        return None
    noise = parameters.noise_std**2 * len(parameters.values)
    return math.sqrt(max(float(parameters.values.square().sum()) - noise, 0.0) / noise)


def _released(t: int, values: Tensor, noise_std: float, count: int) -> Parameters:
    """What agents see; they refuse what is larger."""
    return Parameters(t, values.clamp(-MAX_NUMBER, MAX_NUMBER), noise_std, count)


@lru_cache(maxsize=64)
def _statistic(
    num_features: int, outcome_bound: float, moment_scale: float | None
) -> RecordStatistic:
    given = {} if moment_scale is None else {"moment_scale": moment_scale}
    return RecordStatistic(num_features=num_features, outcome_bound=outcome_bound, **given)


@lru_cache(maxsize=64)
def _multiplier(epsilon: float, delta: float, payments: int, adjacency: Adjacency) -> float:
    return noise_multiplier_for(
        epsilon=epsilon,
        delta=delta,
        sampling_rate=1.0,
        num_releases=payments,
        adjacency=adjacency,
    )


def _secret_name(state: StreamState, t: int) -> str:
    return f"private-ucb-{state.stream}-{t}"


def _read(data: bytes, kind: type[_T]) -> _T:
    try:
        secret: _T = decode(data, kind, max_bytes=STATE_BYTES)
    except MessageError as error:
        raise ProtocolError(f"A secret of the server cannot be read: {error}") from error
    return secret


def _missing(state: StreamState) -> ProtocolError:
    return ProtocolError(
        f"The sums of round {state.t} are not among the server's secrets, so that nothing more can "
        "be released: resume with the store that the run was started with, and start a run that is "
        "to be resumed with out=folder, or with secrets=FileStore(folder)."
    )
