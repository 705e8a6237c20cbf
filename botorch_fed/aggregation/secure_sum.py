r"""Messages are added up: hub and agents learn the sum, and what the channel shows them.

::

    message          from -> to       content                                     readable by
    Setup            server -> agent  the terms and the shared basis              all
    SumSetup         server -> agent  the channel                                 all
    SumOrder         server -> agent  what to do: key, evaluation, sum, share     that agent
    Keys             server -> agent  announcements; the sum of all key shares    all agents
    KeyMessage       agent -> server  an announcement, or a part of the joint key server, all agents
    DecryptionShare  agent -> server  a masked share in the opening of a sum      nobody
    Upload           agent -> server  the protected contribution to a sum         see the channel
    Sealed           server -> agent  the sum, still encrypted or masked          who holds keys
    Opened           server -> agent  the sum                                     server, all agents

Round 0 is the start, rounds 1 to `T` are one query of every active agent each. After a round the
agents' messages are added (`privacy.aggregation`), at most one sum a round, shared by all. Any
search can be added up whose messages are vectors of a fixed size; one that knows more of its sums
is a `SummedSearch`. A site without data, or with nothing to say, adds zeros.

*A joint key* (`ThresholdCKKSChannel`) belongs to a roster. A member that does not answer costs
a new epoch with the others, two exchanges, then the interrupted round goes on: nobody
evaluates twice; noise is drawn anew and paid again. If the sum of the round was about to be
opened, the round ends without one: an agent that has sent a share in the opening of a round adds to
no other sum of that round. The lost agent goes on alone, with the sums it receives. Each round
costs one exchange, and one more where a sum is opened together. Messages that do not fit the set-up
are refused, and their sender is lost like one that does not answer.

*An agent that reconnects* reads the newest sum and contributes again from the next round on. A
search may read a sum only after those before (`SummedSearch.every_sum`): for agents that have not
answered since, the hub keeps the last sums (`BACKLOG` of them at most, `BACKLOG_BYTES` together)
and sends them again; an agent that was away for longer goes on alone. Under a joint key a lost
agent that answers a query again, and says that it is able to contribute, is taken back in
(`rejoin`) before the next sum: a new epoch, two exchanges; no round is interrupted, so no noise
is paid twice. Once for each agent: one that comes and goes would cost the others a key, and noise,
each time. Sums over the two rosters can be subtracted, as after a loss.

*Noise without a trusted server* (`epsilon`, or `noise_multiplier`): each agent clips its message to
the norm of the search and adds its share of discrete Gaussian noise (`DistributedGaussianSum`).
The unit is an agent, the adjacency zero-out by default. The noise is calibrated by the RDP
accountant for one sum after each of `releases`, and stays large enough if `colluding` agents
subtract their shares and `dropping` agents are missing: it is :math:`\sqrt{N/(N - c - d)}` times
that of a trusted server, and some per cent more, because that one is calibrated by the PLD
accountant. What parties can read, where all agents but the colluding ones follow the protocol::

    channel        server alone           K <= c agents and the server    K > c
    "threshold"    nothing, or the sums   the sums, less K shares of      the sums of the others,
                   by opened_by           noise: the guarantee holds      with less noise
    "ckks"         ciphertexts            each contribution, with its     the same
                                          own share of noise only
    "plain"        each contribution, with its own share of noise only

An own share of noise is :math:`1/\sqrt{N - c - d}` of what the guarantee needs. Where a forecast of
the search says that no site would listen, nothing is added, opened or paid.

Trust and guarantee: as the channel and the mechanism say. Without a mechanism there is no privacy
guarantee: encryption hides contributions, not their sum, which all agents learn, and with
``opened_by="server"`` the hub, and which identifies what changed between two rounds. A site under a
joint key adds to one sum of each round, after it was asked for an evaluation in it, and to none of
fewer than `min_agents`: a hub cannot have two rosters' sums of the same data opened, of successive
rounds it can. With a mechanism everything that is opened in
the whole run is :math:`(\epsilon, \delta)`-indistinguishable under its adjacency (zero-out or
replace-one) of its unit (an agent or a record), by the RDP accountant where agents add the noise;
against `colluding` agents as well, who subtract their own. A site pays from its own ledger before
it contributes. Not covered: who sees an agent's own queries and results, and settings that were
tuned on the agents' data.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.aggregation.noisy import default_delta
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
    ROOM_BYTES,
    Aggregation,
    Limits,
    Party,
    Setup,
    Terms,
)
from botorch_fed.privacy import (
    Adjacency,
    Budget,
    DistributedGaussianSum,
    Entry,
    Event,
    Guarantee,
    SignalWarning,
    Unit,
    check_promised_delta,
    compose,
    noise_multiplier_within,
)
from botorch_fed.privacy.aggregation import NoiseAt, PrivateSum
from botorch_fed.privacy.channels import (
    FLOODED_SUMS,
    Channel,
    CKKSChannel,
    Opener,
    PlainChannel,
    ThresholdCKKSChannel,
    check_identities,
)
from botorch_fed.privacy.distributed import DistributedRecordSum
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.search.messages import RowSearch
from botorch_fed.search.noisy import Forecast, NoisyTransfer
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
            none, or for that of `epsilon` or `noise_multiplier`.
        noise_at: Who adds the noise; with `epsilon` or `noise_multiplier` the agents.
        epsilon: What the whole run may reveal about one agent; the noise that each agent adds
            follows from it. In the place of a mechanism.
        noise_multiplier: Instead of `epsilon`, noise over the norm of one agent's contribution.
        colluding: Beside them, how many agents may put their shares of noise together, with the
            server's help; a single curious agent counts.
        dropping: How many agents may be missing from a sum.
        clip_norm: The bound on a message's norm; default the search's `norm`.
        adjacency: What a neighbouring world is.
        sums: The most sums that are opened. Default one for each of `releases`, or one in all where
            the search says so for a run in which some agents do not evaluate.
        releases: After which rounds there is a sum; default after each. With a mechanism, `sums`
            or `releases` says what the promise is for.
        precision: Of the public grid, relative to the largest contribution; default what the search
            says, or the finest at which sums are exact.
        run: The run's name: agents whose secrets outlive a run need another one for the next.
        delta: Of the promise, below one over the number of units; None for the smaller one of 0.01
            and ``N ** -1.1``.
        rejoin: Whether an agent that was lost is taken into a new joint key when it is back.
        opened_by: Who learns the sums of ``"threshold"``: the ``"agents"`` (default), or the
            ``"server"`` as well.
        identities: The agents' public identity keys by name, for ``"threshold"``. Without them
            agents take the first keys that they are told of.
        min_agents: The fewest agents under a joint key; default half of all, or what the search
            wants where that is more.
        rounds: How many queries follow the first points; default as many as the budget has left
            after `num_initial`. The hub's own business: it may grow.
    """

    channel: ChannelKind = "threshold"
    mechanism: Callable[[int, int], Any] | None = None
    noise_at: NoiseAt = "none"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    colluding: int = 1
    dropping: int = 0
    clip_norm: float | None = None
    adjacency: Adjacency = "zero-out"
    sums: int | None = None
    releases: tuple[int, ...] | None = None
    precision: float | None = None
    run: str = "run"
    delta: float | None = 1e-5
    rejoin: bool = True
    opened_by: Opener | None = None
    identities: tuple[tuple[AgentId, str], ...] = field(default=(), repr=False)
    min_agents: int | None = None
    rounds: int | None = field(default=None, metadata=OWN)

    state_type = SumState
    memory_type = SumMemory
    order_types = (SumOrder,)
    reply_types = (KeyMessage, DecryptionShare, Upload)
    broadcast_types = (SumSetup, Keys, Sealed, Opened)
    keeps_secrets = True
    why_closed = "its keys, its grid and its noise are made for the agents that it began with"

    def __post_init__(self) -> None:
        if self.channel not in get_args(ChannelKind):
            raise InputDataError(
                f"channel is one of {get_args(ChannelKind)}, got {self.channel!r}."
            )
        if self._shared:
            self._check_shares()
            object.__setattr__(self, "noise_at", "agent")
        if self.noise_at not in get_args(NoiseAt) or (
            (self.mechanism is None and not self._shared) != (self.noise_at == "none")
        ):
            raise InputDataError('A run without mechanism has noise_at="none", and none other.')
        if self.noise_at == "server" and self.channel != "plain":
            raise InputDataError(
                f"The server can not add noise to sums over channel={self.channel!r}, which it can "
                'not read: let the agents add it, noise_at="agent".'
            )
        self._check_keys()
        if self.sums is not None and not 0 <= self.sums <= MAX_ROUNDS:
            raise InputDataError(f"Expected 0 <= sums <= {MAX_ROUNDS:,}, got {self.sums}.")
        if self.releases is not None and (
            sorted(set(self.releases)) != list(self.releases) or min(self.releases, default=0) < 0
        ):
            raise InputDataError(f"releases are rounds in order, from 0, got {self.releases}.")
        if self.planned is None and self.noise_at != "none":
            raise InputDataError(
                "A mechanism needs the most sums of the whole run, which its promise is for: give "
                "sums."
            )
        if self.noise_at != "none" and self.delta is not None:
            check_promised_delta(self.delta)
        if not 0 < len(self.run) <= MAX_NAME:
            raise InputDataError(f"The name of a run has 1 to {MAX_NAME} characters.")

    def _check_keys(self) -> None:
        """Raise `InputDataError` unless the settings of a joint key fit."""
        identities: Any = self.identities  # a mapping, as it is given
        if isinstance(identities, Mapping):
            object.__setattr__(self, "identities", tuple(sorted(identities.items())))
        check_identities(self.identities)
        given = self.opened_by is not None or self.min_agents is not None or self.identities
        if self.channel != "threshold" and given:
            raise InputDataError(
                'opened_by, min_agents and identities are for channel="threshold", got '
                f"{self.channel!r}."
            )
        if self.opened_by not in (None, *get_args(Opener)):
            raise InputDataError(f"opened_by is one of {get_args(Opener)}, got {self.opened_by!r}.")
        if self.min_agents is not None and self.min_agents < MIN_TOGETHER:
            raise InputDataError(f"Expected min_agents >= {MIN_TOGETHER}, got {self.min_agents}.")

    @property
    def _shared(self) -> bool:
        """Whether the mechanism follows from `epsilon` or `noise_multiplier`."""
        return self.epsilon is not None or self.noise_multiplier is not None

    def _check_shares(self) -> None:
        if self.mechanism is not None:
            raise InputDataError(
                "Give a mechanism, or epsilon or noise_multiplier, from which one follows."
            )
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise InputDataError("Give epsilon or noise_multiplier: each follows from the other.")
        if self.noise_at == "server":
            raise InputDataError(
                'The agents add the noise of epsilon: leave noise_at="server" out, or use NoisySum.'
            )

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
        if self.noise_at == "none":
            return ""
        return (
            "A private sum takes the data of its start and of its queries: results that exist "
            "already are passed to the study as data=…."
        )

    def mechanism_for(self, terms: Terms) -> Any:
        """The mechanism; None without one."""
        return self._made(terms)[0] if self.size(terms) else None

    def private_sum(self, party: Party) -> PrivateSum | None:
        """What bounds, noises and carries contributions; None if nothing is added."""
        if not self._adds(party.terms):
            return None
        context = _context(party) if self.channel == "ckks" else b""
        mechanism, grid = self._made(party.terms)
        channel = _channel(
            grid, self.channel, context, self._flooded(party.terms), self.identities, self._opener
        )
        return _private_sum(mechanism, channel, self.noise_at)

    @property
    def _opener(self) -> Opener:
        """Who learns the sums."""
        if self.channel == "threshold":
            return self.opened_by or "agents"
        return "agents" if self.channel == "ckks" else "server"

    def _flooded(self, terms: Terms) -> int:
        """How many sums the flooding is made for."""
        most = self.most_sums(terms)
        return FLOODED_SUMS if most is None else max(most, 1)

    def least_agents(self, terms: Terms) -> int:
        """The fewest agents of a sum under a joint key."""
        if self.min_agents is not None:
            return self.min_agents
        count = len(terms.agents)
        search = terms.search
        least = search.least_agents(count) if isinstance(search, SummedSearch) else 1
        return max(MIN_TOGETHER, -(-count // 2), least)

    def _adds(self, terms: Terms) -> bool:
        """Whether the search says something, and with noise something that is worth its price."""
        if not self.size(terms) or (self._shared and not self.planned):
            return False
        forecast = self.forecast(terms)
        return forecast is None or not forecast.withheld

    def forecast(self, terms: Terms) -> Forecast | None:
        """How much signal to expect in noisy sums; None if the search cannot say.

        It is public, the same for the hub and all sites: of all releases of the terms.
        """
        made = range(self.planned or 0) if self.releases is None else self.releases
        if not terms.agents or not isinstance(terms.search, NoisyTransfer) or not made:
            return None
        mechanism, count = self.mechanism_for(terms), len(terms.agents)
        if mechanism is None:
            return None
        noise_std = noise_std_of(mechanism, self.noise_at, count) / count
        return terms.search.forecast(terms, made, num_agents=count, noise_std=noise_std)

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
        make = self._shares(terms) if self._shared else _Made(self.mechanism)
        return _mechanism_and_grid(make, self.size(terms), num_agents, bound, precision)

    def _shares(self, terms: Terms) -> _Shares:
        """What makes the mechanism of `epsilon` or `noise_multiplier`."""
        norm = terms.search.norm(terms) if self.clip_norm is None else self.clip_norm
        assert norm is not None  # `check_terms` has seen to it
        return _Shares(
            epsilon=self.epsilon,
            noise_multiplier=self.noise_multiplier,
            delta=self.delta_of(terms),
            releases=max(self.planned or 0, 1),
            clip_norm=norm,
            colluding=self.colluding,
            dropping=self.dropping,
            adjacency=self.adjacency,
        )

    def delta_of(self, terms: Terms) -> float:
        """Of the promise."""
        return default_delta(len(terms.agents)) if self.delta is None else self.delta

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
        if self._shared and self.clip_norm is None and terms.search.norm(terms) is None:
            raise InputDataError(
                f"{type(terms.search).__name__} says no norm that its messages are clipped to: "
                "give a clip_norm."
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
        _private_sum(mechanism, PlainChannel(grid), self.noise_at)
        if mechanism is not None:
            units = num_agents * (terms.budget if mechanism.unit == "record" else 1)
            check_promised_delta(self.delta_of(terms), units, mechanism.unit)
        if self.channel == "threshold":
            self._check_joint(terms, mechanism, grid)
        self._check_promise(terms, mechanism)

    def _check_joint(self, terms: Terms, mechanism: Any, grid: PublicGrid) -> None:
        """Raise `InputDataError` unless a joint key is good for the agents and for all sums."""
        flooded = self._flooded(terms)
        channel = _channel(grid, "threshold", b"", flooded, self.identities, self._opener)
        _private_sum(mechanism, channel, self.noise_at)
        unnamed = sorted(set(terms.agents) ^ set(dict(self.identities)))
        if self.identities and unnamed:
            raise InputDataError(
                f"Identities are given for all agents and for no other names, got {unnamed[:8]} in "
                "one of both only."
            )
        if self.min_agents is not None and self.min_agents > len(terms.agents):
            raise InputDataError(
                f"Expected min_agents <= {len(terms.agents)}, the number of agents, got "
                f"{self.min_agents}."
            )
        if self.most_sums(terms) is None and self.rounds_of(terms) > flooded:
            raise InputDataError(
                f"{self.rounds_of(terms):,} rounds may open as many sums, shares are flooded for "
                f"{flooded:,}: write sums = {self.rounds_of(terms)}."
            )

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
        kind = (self.delta_of(terms), mechanism.adjacency, mechanism.unit)
        if self._shared and not self._adds(terms):
            return _composed(mechanism.event, 0, *kind)
        return _composed(mechanism.event, max(sums, 1), *kind)

    def promise(self, hub: Party) -> Guarantee | None:
        """What all sums of a run reveal at most; None without noise."""
        self.private_sum(hub)  # a missing key is named before the run begins
        made = self._guarantee(hub.terms)
        if made is None:
            return None
        self._warn(hub.terms)
        return replace(made, private=hub.resources.noise.private)

    def _warn(self, terms: Terms) -> None:
        """Warn of sums that are withheld, or all noise."""
        forecast = self.forecast(terms)
        if forecast is not None and forecast.withheld:
            warnings.warn(forecast.words, SignalWarning, stacklevel=3)
        elif self._shared and forecast is None and self._adds(terms):
            self._shares(terms).made(self.size(terms), len(terms.agents))

    def signal_words(self, hub: Party) -> str:
        """What is expected of the sums, and why they are withheld."""
        forecast = self.forecast(hub.terms)
        return "" if forecast is None else forecast.words

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
        adds = self._adds(terms)
        sums = sums if adds else 0
        return Price(
            guarantee=guarantee,
            event=mechanism.event,
            payments=sums,
            releases=sums,
            mechanism=type(mechanism).__name__ if adds else "none",
            settings=repr(mechanism) if adds else "none",
            noise_std=noise_std_of(mechanism, self.noise_at, len(terms.agents)) if adds else 0.0,
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
        said = {**price.account(self.paid(hub, state)), **common}
        if self.forecast(hub.terms) is not None:
            said["signal"] = self.signal_words(hub)
        if self._shared and self._opener == "server":
            said["signal_to_noise"] = list(state.signal)
        return said

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
            share = "a masked share in the decryption of a sum"
            keys = "all agents' signed announcements, and the sum of their parts of the joint key"
            rows += [
                Row.of(Keys, "server", keys, EVERYBODY),
                Row.of(KeyMessage, "agent", "a part of the joint key", ("server",)),
                Row.of(DecryptionShare, "agent", share, ()),
            ]
        return Sees((*rows, *self._sum_rows(terms)), self._trust, limits=self._limits(terms))

    def _planned(self, terms: Terms) -> bool:
        """Whether any sum can be opened."""
        return self._adds(terms) and self.most_sums(terms) != 0 and self.rounds_of(terms) > 0

    def _sum_rows(self, terms: Terms) -> tuple[Row, ...]:
        """Contributions and sums."""
        channel, at = _CHANNELS[self.channel], self.noise_at
        search, adds = terms.search, getattr(terms.search, "adds", SummedSearch.adds)
        if isinstance(search, SummedSearch):
            adds = search.content(terms)
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
        if self._opener == "agents":
            return upload, Row.of(Sealed, "server", total, ("agents",), reveals)
        opened = Row.of(Opened, "server", total, EVERYBODY, reveals)
        if channel.open_phases:
            sealed = Row.of(Sealed, "server", "a sum that is still encrypted", ())
            return upload, sealed, opened
        return upload, opened

    @property
    def _trust(self) -> str:
        channel, at = _CHANNELS[self.channel], self.noise_at
        if channel.setup_phases:
            reader = (
                "The server is trusted with the sums, not with contributions"
                if self._opener == "server"
                else "The server is trusted with neither contributions nor sums"
            )
            reader += ", whatever it does"
            if not self.identities:
                reader += ", as long as the transport tells agents' names right"
        elif self._opener == "agents":
            reader = (
                "The server is trusted not to obtain the key that every agent holds, which "
                "decrypts contributions too"
            )
        else:
            reader = "The server is trusted with every contribution"
        if at == "none":
            return f"{reader}; all agents are trusted with the sum."
        if at == "server":
            return f"{reader} and adds the noise; the guarantee is against all other agents."
        against = "all other agents"
        if channel.setup_phases:
            against = "the server and all other agents"
        if self._shared:
            against = against.replace("all other agents", _agents_words(self.colluding))
        return f"{reader}; agents add the noise, and the guarantee is against {against}."

    def _limits(self, terms: Terms) -> tuple[str, ...]:
        joint = self._joint_limits(terms) if _CHANNELS[self.channel].setup_phases else ()
        if self.noise_at != "none":
            return joint
        return (
            "Encryption hides contributions and not their sum: the difference of two sums shows "
            "what has changed, and of two agents each learns the contribution of the other."
            if not _CHANNELS[self.channel].server_sees_contributions
            else "The difference of two sums shows what has changed between them.",
            *joint,
        )

    def _joint_limits(self, terms: Terms) -> tuple[str, ...]:
        """What is assumed of a joint key."""
        flooded = self._flooded(terms)
        channel = _channel(
            self._made(terms)[1], "threshold", b"", flooded, self.identities, self._opener
        )
        assert isinstance(channel, ThresholdCKKSChannel)
        said = (
            f"Beside the sums, shares of {flooded:,} openings tell 2^-{channel.distance_bits:.1f} "
            "at most (total variation).",
        )
        if self.identities:
            return said
        return (
            *said,
            "Identity keys are accepted at first use: names are as good as the transport. Compare "
            "the safety number in the logs, or give identities.",
        )

    # -------------------------------------------------------------- the hub

    def _hub(self, hub: Party) -> SumHub:
        return SumHub(
            party=hub,
            run=self.run,
            private_sum=self.private_sum(hub),
            rounds=self.rounds_of(hub.terms),
            releases=self.releases,
            least=max(
                least_of(self.mechanism_for(hub.terms)),
                self.least_agents(hub.terms) if self.channel == "threshold" else 1,
            ),
            most=self.most_sums(hub.terms),
            every_sum=_reads_every_sum(hub.terms),
            rejoin=self.rejoin,
        )

    def start(self, hub: Party) -> SumState:
        """The state before the start."""
        return self._hub(hub).start()

    def resumed(self, hub: Party, state: SumState) -> SumState:
        """The state with the rounds of now, once those of before are over."""
        return self._hub(hub).resumed(state)

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
            least=self.least_agents(site.terms),
        )

    def begin(self, site: Party) -> SumMemory:
        """The memory before the first request."""
        none = torch.zeros(0, dtype=torch.int64)
        return SumMemory(None, -1, None, -1, none, -1, 0, site.resources.ledger)

    def check_published(self, terms: Terms, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless there is one channel, one set-up, and sums that fit."""
        if self._adds(terms):
            check_published(terms.agents, self.size(terms), published)
        elif published:
            raise MessageError(f"Expected no sum in this run, got {len(published)} messages.")

    def check_order(self, site: Party, order: SumOrder, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless an order fits the terms, and what was asked before."""
        agents, last = site.terms.agents, -1 if site.last is None else site.last.epoch
        most = self._most_epochs(site.terms)
        works = order.contribute or order.step != "sum"
        over = most + (self.channel == "threshold" and not works)  # one without keys or sums
        if order.epoch > over and order.epoch > last:
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

    def reply_bytes(self, hub: Party) -> int:
        """See `Aggregation`: a message in the set-up, of a sum, or in its opening."""
        sums = self.private_sum(hub)
        most = 0 if sums is None else sums.channel.most_bytes(len(hub.terms.agents))
        return most + ROOM_BYTES

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


@dataclass(frozen=True, kw_only=True)
class _Shares:
    """Noise that the agents add, from what it is to give; see `SecureSum`."""

    epsilon: float | None
    noise_multiplier: float | None
    delta: float
    releases: int
    clip_norm: float
    colluding: int
    dropping: int
    adjacency: Adjacency

    def made(self, dim: int, num_agents: int) -> DistributedGaussianSum:
        """The mechanism, with a warning where a sum can only be noise."""
        multiplier = self.noise_multiplier
        if self.epsilon is not None:
            budget = Budget(self.epsilon, self.delta)
            multiplier = _multiplier(budget, self.releases, self.adjacency)
        assert multiplier is not None  # one of the two is given
        return DistributedGaussianSum(
            dim=dim,
            num_agents=num_agents,
            clip_norm=self.clip_norm,
            noise_multiplier=multiplier,
            colluding=self.colluding,
            dropping=self.dropping,
            adjacency=self.adjacency,
        )

    def make(self, dim: int, num_agents: int) -> DistributedGaussianSum:
        """The mechanism; a server warns."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SignalWarning)
            return self.made(dim, num_agents)


@lru_cache(maxsize=32)
def _multiplier(budget: Budget, releases: int, adjacency: Adjacency) -> float:
    return noise_multiplier_within(budget, num_releases=releases, adjacency=adjacency)


def _agents_words(colluding: int) -> str:
    """Against how many agents together a guarantee is."""
    if colluding == 0:
        return "outsiders"
    return "any other agent" if colluding == 1 else f"any {colluding} other agents together"


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
    made: _Made | _Shares, size: int, num_agents: int, bound: float, precision: float
) -> tuple[Any, PublicGrid]:
    mechanism = None if made.make is None else made.make(size, num_agents)
    grid = getattr(mechanism, "grid", None)
    if grid is None:
        grid = PublicGrid(dim=size, bound=bound, num_agents=num_agents, precision=precision)
    return mechanism, grid


@lru_cache(maxsize=32)
def _channel(
    grid: PublicGrid,
    kind: ChannelKind,
    context: bytes,
    sums: int,
    identities: tuple[tuple[str, str], ...],
    opened_by: Opener,
) -> Channel:
    if kind == "ckks":
        return CKKSChannel(grid, context)
    if kind == "threshold":
        return ThresholdCKKSChannel(grid, sums=sums, identities=identities, opened_by=opened_by)
    return PlainChannel(grid)


@lru_cache(maxsize=32)
def _private_sum(mechanism: Any, channel: Channel, noise_at: NoiseAt) -> PrivateSum:
    return PrivateSum(mechanism=mechanism, channel=channel, noise_at=noise_at)


@lru_cache(maxsize=32)
def _composed(
    event: Event, count: int, delta: float, adjacency: Adjacency, unit: Unit
) -> Guarantee:
    """What so many sums reveal."""
    paid = [Entry(event, count, "")] if count else []
    return compose(paid, delta=delta, adjacency=adjacency, unit=unit)


def _context(party: Party) -> bytes:
    """The public part of the one key, read once."""
    cache = party.resources.cache
    if CONTEXT not in cache:
        cache[CONTEXT] = context_in(party.resources.secrets)
    return bytes(cache[CONTEXT])


def _reads_every_sum(terms: Terms) -> bool:
    return bool(getattr(terms.search, "every_sum", False))
