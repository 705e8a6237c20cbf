r"""Messages are added up: hub and agents learn the sum, and what the channel shows them.

    message          from -> to       content                                     readable by
    Setup            server -> agent  the terms and the shared basis              all
    SumSetup         server -> agent  the channel                                 all
    SumOrder         server -> agent  what to do: key, evaluation, sum, share     that agent
    Keys             server -> agent  everybody's messages of a joint key         all agents
    KeyMessage       agent -> server  a part of the joint key                     server, all agents
    DecryptionShare  agent -> server  a share in the opening of a sum             server
    Upload           agent -> server  the protected contribution to a sum         see the channel
    Sealed           server -> agent  the sum, still encrypted                    who holds keys
    Opened           server -> agent  the sum                                     server, all agents

Round 0 is the start, rounds 1 to `T` are one query of every active agent each. After a round the
agents' messages are added (`privacy.aggregation`), at most one sum a round, shared by all. Any
search can be added up whose messages are vectors of a fixed size; one that knows more of its sums
is a `SummedSearch`. A site without data, or with nothing to say, adds zeros.

*A joint key* (`ThresholdCKKSChannel`) belongs to a roster. A member that does not answer costs
a new epoch with the others, three exchanges, then the interrupted round goes on: nobody
evaluates twice; noise is drawn anew and paid again. The lost agent goes on alone, with the sums it
receives. Each round costs one exchange, and one more where a sum is opened together. Messages that
do not fit the set-up are refused, and their sender is lost like one that does not answer.

*An agent that reconnects* reads the newest sum and contributes again from the next round on. A
search may read a sum only after those before (`SummedSearch.every_sum`): for agents that have not
answered since, the hub keeps the last sums (`BACKLOG` of them at most, `BACKLOG_BYTES` together)
and sends them again; an agent that was away for longer goes on alone. Under a joint key a lost
agent that answers a query again, and says that it is able to contribute, is taken back in
(`rejoin`) before the next sum: a new epoch, three exchanges; no round is interrupted, so no noise
is paid twice. Once for each agent: one that comes and goes would cost the others a key, and noise,
each time. Sums over the two rosters can be subtracted, as after a loss.

Trust and guarantee: as the channel and the mechanism say. Without a mechanism there is no privacy
guarantee: encryption hides contributions, not their sum, which the hub and all agents learn,
and which identifies what changed between two rounds. With a mechanism everything that is opened in
the whole run is :math:`(\epsilon, \delta)`-indistinguishable under its adjacency (zero-out or
replace-one) of its unit (an agent or a record), by the RDP accountant where agents add the noise;
against `colluding` agents as well, who subtract their own. A site pays from its own ledger before
it contributes. Not covered: who sees an agent's own queries and results, and settings that were
tuned on the agents' data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.aggregation.sum_hub import SumHub
from botorch_fed.aggregation.sum_messages import (
    MAX_ROUNDS,
    MIN_TOGETHER,
    DecryptionShare,
    KeyMessage,
    Keys,
    Opened,
    Reply,
    Sealed,
    SumMemory,
    SumOrder,
    SumSetup,
    SumState,
    Upload,
)
from botorch_fed.aggregation.sum_site import (
    SumSite,
    check_published,
    least_of,
    noise_std_of,
)
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.base import MAX_NAME, AgentId
from botorch_fed.federation.disclosure import (
    ADDRESSEE,
    EVERYBODY,
    Price,
    Reader,
    Reveals,
    Row,
    Sees,
)
from botorch_fed.federation.terms import (
    MAX_WEIGHT,
    OWN,
    Aggregation,
    Limits,
    Party,
    Setup,
    Terms,
)
from botorch_fed.privacy import (
    Adjacency,
    Entry,
    Event,
    Guarantee,
    Unit,
    compose,
)
from botorch_fed.privacy.aggregation import NoiseAt, PrivateSum
from botorch_fed.privacy.channels import (
    Channel,
    CKKSChannel,
    PlainChannel,
    ThresholdCKKSChannel,
)
from botorch_fed.privacy.distributed import DistributedRecordSum
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.search.messages import RowSearch
from botorch_fed.search.sums import SummedSearch, exact_precision
from botorch_fed.storage.store import Store

logger = logging.getLogger(__name__)

ChannelKind = Literal["plain", "ckks", "threshold"]
EPOCHS = 3  # new ones for each agent: it may be lost, come back, and be lost again
CONTEXT = "ckks-context"  # the public part of the one key, in the store of every party
_CHANNELS: dict[str, type[Channel]] = {
    "plain": PlainChannel,
    "ckks": CKKSChannel,
    "threshold": ThresholdCKKSChannel,
}
_ANY_GRID = PublicGrid(dim=1, bound=1.0, num_agents=1)  # a key serves any
_TOLERANCE = 1e-9  # of an epsilon that another machine has computed


@dataclass(frozen=True, kw_only=True)
class SecureSum(Aggregation):
    """Add messages up.

    Attributes:
        channel: ``"threshold"`` (default), ``"ckks"`` or ``"plain"``. With ``"ckks"`` the public
            part of the one key lies in every party's `Resources.secrets`, under `CONTEXT`.
        mechanism: Makes the mechanism from the size of a message and the number of agents; None for
            no privacy guarantee.
        noise_at: Who adds the noise.
        sums: The most sums that are opened. Default one for each of `releases`, or one in all where
            the search says so for a run in which some agents do not evaluate.
        releases: After which rounds there is a sum; default after each. With a mechanism, `sums`
            or `releases` says what the promise is for.
        precision: Of the public grid, relative to the largest contribution; default what the search
            says, or the finest at which sums are exact.
        run: The run's name: agents whose secrets outlive a run need another one for the next.
        delta: Of the promise.
        rejoin: Whether an agent that was lost is taken into a new joint key when it is back.
        rounds: How many queries follow the first points; default as many as the budget has left
            after `num_initial`. The hub's own business: it may grow.
    """

    channel: ChannelKind = "threshold"
    mechanism: Callable[[int, int], Any] | None = None
    noise_at: NoiseAt = "none"
    sums: int | None = None
    releases: tuple[int, ...] | None = None
    precision: float | None = None
    run: str = "run"
    delta: float = 1e-5
    rejoin: bool = True
    rounds: int | None = field(default=None, metadata=OWN)

    state_type = SumState
    memory_type = SumMemory
    order_types = (SumOrder,)
    reply_types = (KeyMessage, DecryptionShare, Upload)
    broadcast_types = (SumSetup, Keys, Sealed, Opened)
    why_closed = "its keys, its grid and its noise are made for the agents that it began with"

    def __post_init__(self) -> None:
        if self.channel not in get_args(ChannelKind):
            raise InputDataError(
                f"channel is one of {get_args(ChannelKind)}, got {self.channel!r}."
            )
        if self.noise_at not in get_args(NoiseAt) or (
            (self.mechanism is None) != (self.noise_at == "none")
        ):
            raise InputDataError('A run without mechanism has noise_at="none", and none other.')
        if self.noise_at == "server" and self.channel != "plain":
            raise InputDataError(
                f"The server can not add noise to sums over channel={self.channel!r}, which it can "
                'not read: let the agents add it, noise_at="agent".'
            )
        if self.sums is not None and not 0 <= self.sums <= MAX_ROUNDS:
            raise InputDataError(f"Expected 0 <= sums <= {MAX_ROUNDS:,}, got {self.sums}.")
        if self.releases is not None and (
            sorted(set(self.releases)) != list(self.releases) or min(self.releases, default=0) < 0
        ):
            raise InputDataError(f"releases are rounds in order, from 0, got {self.releases}.")
        if self.planned is None and self.mechanism is not None:
            raise InputDataError(
                "A mechanism needs the most sums of the whole run, which its promise is for: give "
                "sums."
            )
        if not 0 < len(self.run) <= MAX_NAME:
            raise InputDataError(f"The name of a run has 1 to {MAX_NAME} characters.")

    @property
    def planned(self) -> int | None:
        """The most sums that are opened; None for one a round."""
        if self.sums is None and self.releases is not None:
            return len(self.releases)
        return self.sums

    # -------------------------------------------------------------- what is added

    def size(self, terms: Terms) -> int:
        """How many numbers a contribution has; 0 if the search says nothing."""
        return terms.search.size(terms)

    @property
    def fixed_data(self) -> str:
        """The noise is for the data that a site begins with and for its evaluations."""
        if self.mechanism is None:
            return ""
        return (
            "A private sum takes the data of its start and of its queries: results that exist "
            "already are passed to the study as data=…."
        )

    def mechanism_for(self, terms: Terms) -> Any:
        """The mechanism; None without one."""
        return self._made(terms)[0] if self.size(terms) else None

    def private_sum(self, party: Party) -> PrivateSum | None:
        """What bounds, noises and carries contributions; None if the search says nothing."""
        if not self.size(party.terms):
            return None
        context = _context(party) if self.channel == "ckks" else b""
        mechanism, grid = self._made(party.terms)
        return _private_sum(mechanism, grid, self.channel, self.noise_at, context)

    def rounds_of(self, terms: Terms) -> int:
        """How many queries follow the first points."""
        if self.rounds is not None:
            return self.rounds
        return math.ceil(max(terms.budget - terms.num_initial, 0) / terms.q)

    def most_sums(self, terms: Terms) -> int | None:
        """The most sums that are opened; None for one a round."""
        if self.planned is not None:
            return self.planned
        some_done = set(terms.evaluating) != set(terms.agents)
        return 1 if some_done and getattr(terms.search, "one_sum_if_done", False) else None

    def _made(self, terms: Terms) -> tuple[Any, PublicGrid]:
        """The mechanism, and the grid on which contributions are added."""
        search, num_agents = terms.search, len(terms.agents)
        bound, precision = search.norm(terms) or MAX_WEIGHT, exact_precision(num_agents)
        if isinstance(search, SummedSearch):
            bound, precision = search.bound(terms), search.precision(num_agents)
        if self.precision is not None:
            precision = self.precision
        return _mechanism_and_grid(
            _Made(self.mechanism), self.size(terms), num_agents, bound, precision
        )

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless the search's messages can be added."""
        if isinstance(terms.search, RowSearch):
            raise InputDataError(
                f"{type(terms.search).__name__} reads the message of each agent, which a sum does "
                "not have: use Relay, or with SecureSum another search, e.g. TransferSum."
            )
        if getattr(terms.search, "num_regions", 1) > 1:
            raise InputDataError("A SecureSum is for the whole space: leave num_regions out.")
        if terms.search.needs_outcome:
            raise InputDataError(
                f"A SecureSum adds functions of all data of a site; {type(terms.search).__name__} "
                "forgets them."
            )
        if not terms.agents or not self.size(terms):
            return
        num_agents = len(terms.agents)
        if self.channel == "threshold" and num_agents < MIN_TOGETHER:
            raise InputDataError("A joint key needs two agents or more.")
        mechanism, grid = self._made(terms)
        if isinstance(mechanism, DistributedRecordSum):
            self._check_records(terms, mechanism)
        if num_agents > grid.num_agents:
            raise InputDataError(
                f"There are {num_agents} agents, the grid of the channel is for {grid.num_agents}: "
                "give it more."
            )
        if grid.dim != self.size(terms):
            raise InputDataError(
                f"A contribution has {self.size(terms)} numbers, the grid of the channel "
                f"{grid.dim}."
            )
        _private_sum(mechanism, grid, "plain", self.noise_at, b"")
        if self.channel == "threshold":
            _private_sum(mechanism, grid, "threshold", self.noise_at, b"")
        self._check_promise(terms, mechanism)

    def _check_records(self, terms: Terms, mechanism: DistributedRecordSum) -> None:
        if not getattr(terms.search, "gives_records", False):
            raise InputDataError(
                f"A DistributedRecordSum adds records, {type(terms.search).__name__} has none: use "
                "a mechanism for agents."
            )
        if mechanism.max_records < terms.budget:
            raise InputDataError(
                f"Agents have up to {terms.budget} records, the mechanism has room for "
                f"{mechanism.max_records}."
            )

    # -------------------------------------------------------------- what it costs

    def _guarantee(self, terms: Terms) -> Guarantee | None:
        """What all sums of a run reveal at most, with noise that is secret; None without noise."""
        mechanism, sums = self.mechanism_for(terms), self.planned
        if mechanism is None or sums is None:
            return None
        return _composed(mechanism.event, sums, self.delta, mechanism.adjacency, mechanism.unit)

    def promise(self, hub: Party) -> Guarantee | None:
        """What all sums of a run reveal at most; None without noise."""
        self.private_sum(hub)  # a missing key is named before the run begins
        made = self._guarantee(hub.terms)
        return None if made is None else replace(made, private=hub.resources.noise.private)

    def _check_promise(self, terms: Terms, mechanism: Any) -> None:
        """A hub promises what this site's own noise gives, and for the sums of the terms."""
        promise, own = terms.promise, self._guarantee(terms)
        if promise is None:
            return
        if own is None:
            raise InputDataError(
                "the hub promises privacy, but this site adds no noise: give a mechanism."
            )
        for name in ("unit", "adjacency", "releases", "delta"):
            if getattr(promise, name) != getattr(own, name):
                raise InputDataError(
                    f"the hub promises {name} {getattr(promise, name)!r}, this site's terms make "
                    f"it {getattr(own, name)!r}."
                )
        if own.epsilon > promise.epsilon * (1 + _TOLERANCE):
            raise InputDataError(
                f"the hub promises epsilon {promise.epsilon:.4g}, but {self.planned} sums of this "
                f"site's mechanism give {own.epsilon:.4g}."
            )

    def price(self, terms: Terms) -> Price | None:
        """What a run costs in privacy; None without noise."""
        mechanism, sums = self.mechanism_for(terms), self.planned
        guarantee = self._guarantee(terms) if terms.promise is None else terms.promise
        if mechanism is None or guarantee is None or sums is None:
            return None
        return Price(
            guarantee=guarantee,
            event=mechanism.event,
            payments=sums,
            releases=sums,
            mechanism=type(mechanism).__name__,
            settings=repr(mechanism),
            noise_std=noise_std_of(mechanism, self.noise_at, len(terms.agents)),
            trust=self.sees(terms).trust,
            paid_at="hub" if self.noise_at == "server" else "site",
        )

    def paid(self, hub: Party, state: SumState) -> tuple[Entry, ...]:
        """All payments so far, each site's own where the agents add the noise."""
        mechanism = self.mechanism_for(hub.terms)
        if mechanism is None or not state.asked:
            return ()
        return (Entry(mechanism.event, state.asked, "sums"),)

    def account(self, hub: Party, state: SumState) -> dict[str, Any]:
        """What was promised and paid, and how many sums and keys there were."""
        common = {
            "channel": _CHANNELS[self.channel].__name__,
            "sums": state.sums,
            "rekeys": state.rekeys,
        }
        price = self.price(hub.terms)
        if price is None:
            return {"mechanism": "none", "private": False, **common}
        return {**price.account(self.paid(hub, state)), **common}

    # -------------------------------------------------------------- who sees what

    def sees(self, terms: Terms) -> Sees:
        """Who sees what."""
        channel = _CHANNELS[self.channel]
        settings = "search space, search settings, grid, channel and the promise"
        rows = [
            Row.of(Setup, "server", settings, EVERYBODY),
            Row.of(SumOrder, "server", "what to do, in which round and with whom", ADDRESSEE),
        ]
        if not self._planned(terms):
            rows.append(Row.of(Upload, "agent", "an acknowledgement without data", ("server",)))
            return Sees(tuple(rows), "No sum is opened: no party has to be trusted.")
        rows.append(Row.of(SumSetup, "server", "the name and a hash of the channel", EVERYBODY))
        if channel.setup_phases:
            share = "a share in the decryption of a sum"
            rows += [
                Row.of(Keys, "server", "all agents' parts of the joint key", EVERYBODY),
                Row.of(KeyMessage, "agent", "a part of the joint key", ("server",)),
                Row.of(DecryptionShare, "agent", share, ("server",)),
            ]
        return Sees((*rows, *self._sum_rows(terms)), self._trust, limits=self._limits)

    def _planned(self, terms: Terms) -> bool:
        """Whether any sum can be opened."""
        return self.size(terms) > 0 and self.most_sums(terms) != 0 and self.rounds_of(terms) > 0

    def _sum_rows(self, terms: Terms) -> tuple[Row, ...]:
        """Contributions and sums."""
        channel, at = _CHANNELS[self.channel], self.noise_at
        adds = getattr(terms.search, "adds", SummedSearch.adds)
        what = f"{adds}, {self.size(terms)} numbers"
        readers: tuple[Reader, ...] = ()
        if channel.server_sees_contributions:
            share = ", with its own share of the noise only" if at == "agent" else ""
            content, readers = f"each agent's contribution to a sum: {what}{share}", ("server",)
        else:
            content = f"each agent's encrypted contribution to a sum: {what}"
        upload = Row.of(Upload, "agent", content, readers, "data")
        reveals: Reveals = "data" if at == "none" else "noisy data"
        total = f"the {'noisy ' if at != 'none' else ''}sum, and who contributed"
        if channel.opened_by == "agents":
            return upload, Row.of(Sealed, "server", total, ("agents",), reveals)
        opened = Row.of(Opened, "server", total, EVERYBODY, reveals)
        if channel.open_phases:
            sealed = Row.of(Sealed, "server", "a sum that is still encrypted", ())
            return upload, sealed, opened
        return upload, opened

    @property
    def _trust(self) -> str:
        channel, at = _CHANNELS[self.channel], self.noise_at
        if channel.opened_by == "agents":
            reader = (
                "The server is trusted not to obtain the key that every agent holds, which "
                "decrypts contributions too"
            )
        elif channel.server_sees_contributions:
            reader = "The server is trusted with every contribution"
        else:
            reader = "The server is trusted to follow the protocol and not with contributions"
        if at == "none":
            return f"{reader}; all agents are trusted with the sum."
        if at == "server":
            return f"{reader} and adds the noise; the guarantee is against all other agents."
        against = "all other agents"
        if not channel.server_sees_contributions and channel.opened_by == "server":
            against = "the server and all other agents"
        return f"{reader}; agents add the noise, and the guarantee is against {against}."

    @property
    def _limits(self) -> tuple[str, ...]:
        if self.noise_at != "none":
            return ()
        return (
            "Encryption hides contributions and not their sum: the difference of two sums shows "
            "what has changed, and of two agents each learns the contribution of the other."
            if not _CHANNELS[self.channel].server_sees_contributions
            else "The difference of two sums shows what has changed between them.",
        )

    # -------------------------------------------------------------- the hub

    def _hub(self, hub: Party) -> SumHub:
        return SumHub(
            party=hub,
            run=self.run,
            private_sum=self.private_sum(hub),
            rounds=self.rounds_of(hub.terms),
            releases=self.releases,
            least=least_of(self.mechanism_for(hub.terms)),
            most=self.most_sums(hub.terms),
            every_sum=_reads_every_sum(hub.terms),
            rejoin=self.rejoin,
        )

    def start(self, hub: Party) -> SumState:
        """The state before the start."""
        return self._hub(hub).start()

    def orders(self, hub: Party, state: SumState) -> Mapping[AgentId, SumOrder] | None:
        """A part of the set-up, a query for everybody, or an opening."""
        return self._hub(hub).orders(state)

    def broadcasts(self, hub: Party, state: SumState) -> tuple[Any, ...]:
        """The channel, the messages of its set-up, and the sums that agents need."""
        return self._hub(hub).broadcasts(state)

    def check(
        self, hub: Party, state: SumState, sender: AgentId, reply: Reply, order: SumOrder
    ) -> None:
        """Raise `MessageError` unless a reply fits the order and can be added."""
        self._hub(hub).check(state, sender, reply, order)

    def combine(self, hub: Party, state: SumState, inbox: Mapping[AgentId, Reply]) -> SumState:
        """Add, open, or begin a new epoch without those who were lost."""
        return self._hub(hub).combine(state, inbox)

    # -------------------------------------------------------------- a site

    def _site(self, site: Party) -> SumSite:
        return SumSite(
            party=site,
            run=self.run,
            private_sum=self.private_sum(site),
            noise_at=self.noise_at,
            most=self.planned,
            every_sum=_reads_every_sum(site.terms),
        )

    def begin(self, site: Party) -> SumMemory:
        """The memory before the first request."""
        none = torch.zeros(0, dtype=torch.int64)
        return SumMemory(None, -1, None, -1, none, -1, 0, site.resources.ledger)

    def check_published(self, terms: Terms, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless there is one channel, one set-up, and sums that fit."""
        if self.size(terms):
            check_published(terms.agents, self.size(terms), published)
        elif published:
            raise MessageError(f"Expected no sum in this run, got {len(published)} messages.")

    def check_order(self, site: Party, order: SumOrder, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless an order fits the terms, and what was asked before."""
        agents, last = site.terms.agents, -1 if site.last is None else site.last.epoch
        most = self._most_epochs(site.terms)
        if order.epoch > most and order.epoch > last:
            raise MessageError(
                f"{len(agents)} agents with channel={self.channel!r} need {most} new epochs at "
                f"most, got epoch {order.epoch}."
            )
        if order.contribute and len(agents) > 1 and set(order.roster) == {site.name}:
            raise MessageError("A contribution is asked for a sum of this site alone.")
        if order.contribute and not most and site.memory.drawn_t == order.t:
            raise MessageError(f"This site has contributed to the sum of round {order.t}.")
        if self.releases is not None and order.contribute and order.t not in self.releases:
            raise MessageError(
                f"Sums are of the rounds {self.releases}, a contribution is asked for in round "
                f"{order.t}."
            )
        self._site(site).check_order(order, published)

    def guaranteed(self, terms: Terms) -> Guarantee | None:
        """What the terms come to, with noise that is secret."""
        return self._guarantee(terms)

    def limits(self, terms: Terms) -> Limits:
        """First points, a query in each round after, and a message for each sum.

        A round that was interrupted comes again, for every agent that was lost or is back.
        """
        rounds = terms.queries
        sums = rounds + 1 if self.most_sums(terms) is None else self.most_sums(terms)
        assert sums is not None
        return Limits(rounds, 1, rounds, sums + self._most_epochs(terms))

    def _most_epochs(self, terms: Terms) -> int:
        """How many epochs follow the first, which a joint key alone has."""
        return EPOCHS * len(terms.agents) if self.channel == "threshold" else 0

    def received(self, site: Party, order: SumOrder, published: tuple[Any, ...]) -> SumMemory:
        """The memory with the newest sum; keys of an epoch that is over are deleted."""
        return self._site(site).received(order, published)

    def release(self, site: Party, published: tuple[Any, ...]) -> Any:
        """The newest sum as the search reads it; all that came, if it reads every one."""
        return self._site(site).release(published)

    def contribute(
        self, site: Party, order: SumOrder, message: Callable[[], Tensor | None]
    ) -> tuple[SumMemory, Reply]:
        """A part of the joint key, a share in an opening, or a contribution."""
        return self._site(site).contribute(order, message)


# ------------------------------------------------------------------ the one key of "ckks"


@dataclass(frozen=True)
class OneKey:
    """A key that all agents hold: its public context, and its secret."""

    context: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    def provision(self, store: Store) -> None:
        """Put both parts into an agent's store, in the place of another key's."""
        if store.get(CONTEXT) != self.context:
            store.delete(CONTEXT)
            store.put_new(CONTEXT, self.context)
        channel = CKKSChannel(_ANY_GRID, self.context)
        if store.get(channel.handle) is None:
            channel.provision(self.secret, store)


def context_in(store: Store) -> bytes:
    """The public part of the one key; `ProtocolError` if the store has none."""
    found = store.get(CONTEXT)
    if found is None:
        raise ProtocolError(
            'channel="ckks" has one key for all agents, and it is not in this store: call '
            "provision once before the run where all stores can be reached, or restore it."
        )
    return found


def new_key() -> OneKey:
    """A new key; it depends on no setting."""
    channel, secret = CKKSChannel.generate(_ANY_GRID)
    return OneKey(channel.context, secret)


# ------------------------------------------------------------------ helpers


class _Made:
    """A maker of mechanisms, the same as itself alone: it need not be hashable."""

    def __init__(self, make: Callable[[int, int], Any] | None) -> None:
        self.make = make

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Made) and self.make is other.make

    def __hash__(self) -> int:
        return id(self.make)


@lru_cache(maxsize=32)
def _mechanism_and_grid(
    made: _Made, size: int, num_agents: int, bound: float, precision: float
) -> tuple[Any, PublicGrid]:
    mechanism = None if made.make is None else made.make(size, num_agents)
    grid = getattr(mechanism, "grid", None)
    if grid is None:
        grid = PublicGrid(dim=size, bound=bound, num_agents=num_agents, precision=precision)
    return mechanism, grid


@lru_cache(maxsize=32)
def _private_sum(
    mechanism: Any, grid: PublicGrid, kind: ChannelKind, noise_at: NoiseAt, context: bytes
) -> PrivateSum:
    channel: Channel = PlainChannel(grid)
    if kind == "ckks":
        channel = CKKSChannel(grid, context)
    elif kind == "threshold":
        channel = ThresholdCKKSChannel(grid)
    return PrivateSum(mechanism=mechanism, channel=channel, noise_at=noise_at)


@lru_cache(maxsize=32)
def _composed(
    event: Event, count: int, delta: float, adjacency: Adjacency, unit: Unit
) -> Guarantee:
    """What so many sums reveal, one at least."""
    return compose([Entry(event, max(count, 1), "")], delta=delta, adjacency=adjacency, unit=unit)


def _context(party: Party) -> bytes:
    """The public part of the one key, read once."""
    cache = party.resources.cache
    if CONTEXT not in cache:
        cache[CONTEXT] = context_in(party.resources.secrets)
    return bytes(cache[CONTEXT])


def _reads_every_sum(terms: Terms) -> bool:
    return bool(getattr(terms.search, "every_sum", False))
