r"""The hub's side of sums: it adds contributions and, with the agents' help, opens sums.

An agent of a joint key that does not answer ends an epoch; the next one goes on without it, and
takes it back in when it answers again. See `secure_sum`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from botorch_fed.aggregation.sum_messages import (
    BACKLOG,
    BACKLOG_BYTES,
    MAX_KEY_BYTES,
    MIN_TOGETHER,
    DecryptionShare,
    KeyMessage,
    Keys,
    Opened,
    Reply,
    Sealed,
    SumOrder,
    SumSetup,
    SumState,
    Upload,
)
from botorch_fed.aggregation.sum_site import noise_std_of
from botorch_fed.errors import BudgetExceeded, MessageError, ProtocolError
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.terms import Party, Terms
from botorch_fed.privacy import Ledger
from botorch_fed.privacy.aggregation import PrivateSum
from botorch_fed.privacy.channels import Channel, Epoch

logger = logging.getLogger(__name__)

_EXPECTED: dict[str, type[Any]] = {"key": KeyMessage, "share": DecryptionShare, "sum": Upload}


@dataclass(frozen=True, eq=False)
class SumHub:
    """A hub's view of its sums.

    Attributes:
        party: The hub.
        run: The name of the run.
        private_sum: What bounds, noises and carries contributions; None if nothing is added.
        rounds: How many queries each agent makes after its first points.
        releases: After which rounds there is a sum; None for after each.
        least: How many contributions a sum needs for the noise that agents add to suffice.
        most: The most sums that are opened; None for no limit.
        every_sum: Whether a sum can be read only by who has read those before.
        rejoin: Whether an agent that is back is taken into a new joint key.
    """

    party: Party
    run: str
    private_sum: PrivateSum | None
    rounds: int
    releases: tuple[int, ...] | None
    least: int
    most: int | None
    every_sum: bool
    rejoin: bool

    @property
    def _terms(self) -> Terms:
        return self.party.terms

    @property
    def _sum(self) -> PrivateSum:
        assert self.private_sum is not None  # nothing is asked for without one
        return self.private_sum

    @property
    def _channel(self) -> Channel:
        return self._sum.channel

    @property
    def _together(self) -> bool:
        """Whether all of a roster must take part in a sum."""
        return self.private_sum is not None and self._channel.setup_phases > 0

    def _epoch(self, state: SumState) -> Epoch:
        return Epoch(self.run, state.epoch, state.roster)

    # -------------------------------------------------------------- what is asked

    def start(self) -> SumState:
        """The state before the start."""
        mechanism, ledger = None, self.party.resources.ledger
        if self.private_sum is not None:
            mechanism = self.private_sum.mechanism
        if ledger is None and mechanism is not None:
            ledger = Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)
        return SumState(
            t=0,
            stage="key" if self._together else "query",
            epoch=0,
            roster=self._terms.agents,
            keys=(),
            identities={},
            interrupted=False,
            closed=None,
            last=None,
            missed=(),
            reached={},
            lost=(),
            back=(),
            returned=(),
            sums=0,
            signal=(),
            asked=0,
            rekeys=0,
            rounds=self.rounds,
            ledger=ledger,
        )

    def resumed(self, state: SumState) -> SumState:
        """The state with the rounds of now, once those of before are over."""
        over = state.t > state.rounds
        return replace(state, rounds=self.rounds) if over and self.rounds > state.rounds else state

    def orders(self, state: SumState) -> Mapping[AgentId, SumOrder] | None:
        """A part of the set-up, a query for everybody, or an opening."""
        if state.t > state.rounds:
            return None
        common: dict[str, Any] = {"epoch": state.epoch, "roster": state.roster}
        if state.stage == "key":
            order = SumOrder(state.t, "nothing", False, "key", phase=len(state.keys), **common)
            return dict.fromkeys(state.roster, order)
        if state.stage == "share":
            order = SumOrder(state.t, "nothing", False, "share", **common)
            return dict.fromkeys(state.roster, order)
        resend = SumOrder(state.t, "nothing", True, "sum", **common)
        if state.stage == "resend":
            return dict.fromkeys(state.roster, resend)
        query = replace(
            resend,
            evaluate="next" if state.t > 0 else "first",
            contribute=self._adding(state),
        )
        orders = dict.fromkeys(self._terms.evaluating, query)
        if query.contribute:  # those who do not evaluate, with what they have
            done = [name for name in self._terms.agents if name not in orders]
            orders |= dict.fromkeys(done, resend)
        return orders

    def broadcasts(self, state: SumState) -> tuple[Any, ...]:
        """The channel, the messages of its set-up, and the sums that agents need."""
        if self.private_sum is None:
            return ()
        channel = self._channel
        said: tuple[Any, ...] = (
            SumSetup(self.run, type(channel).__name__, channel.fingerprint.hex()),
        )
        if state.keys:
            said += (Keys(state.epoch, state.keys),)
        if state.stage == "key":
            return said
        if state.stage == "share":
            assert state.closed is not None
            return (*said, replace(state.closed, total=channel.request(state.closed.total)))
        said += state.missed
        return said if state.last is None else (*said, state.last)

    def _adding(self, state: SumState) -> bool:
        """Whether this round's contributions may be added."""
        if self.private_sum is None or state.t >= state.rounds or not self._affordable(state):
            return False
        if self.releases is not None and state.t not in self.releases:
            return False
        return len(state.roster) >= self.least  # else noise would not suffice: nobody pays

    def _affordable(self, state: SumState) -> bool:
        """Whether the promise covers another sum; with noise, every draw counts."""
        used = state.sums if self._sum.mechanism is None else state.asked
        return self.most is None or used < self.most

    # -------------------------------------------------------------- what is accepted

    def check(self, state: SumState, sender: AgentId, reply: Reply, order: SumOrder) -> None:
        """Raise `MessageError` unless a reply fits the order and can be added."""
        expected = _EXPECTED[order.step]
        if not isinstance(reply, expected):
            raise MessageError(f"Expected a {expected.__name__}, got a {type(reply).__name__}.")
        if reply.data is None:
            return
        if sender not in state.roster:
            raise MessageError("A contribution that nobody asked for.")
        epoch = self._epoch(state)
        if order.step == "key":
            if len(reply.data) > MAX_KEY_BYTES:
                raise MessageError(f"A part of a key has at most {MAX_KEY_BYTES} bytes.")
            self._channel.check_prepared(
                reply.data, epoch=epoch, sender=sender, gathered=state.keys
            )
        elif order.step == "share":
            assert state.closed is not None
            self._channel.check_share(
                reply.data,
                epoch=epoch,
                round=state.t,
                sender=sender,
                total=state.closed.total,
            )
        elif not order.contribute:
            raise MessageError("A contribution that nobody asked for.")
        else:
            key = self._joint_key(state, epoch)
            self._channel.check(reply.data, epoch=epoch, round=state.t, sender=sender, key=key)

    def _joint_key(self, state: SumState, epoch: Epoch) -> bytes:
        """The key of the epoch, worked out once."""
        if not state.keys:
            return b""
        cache = self.party.resources.cache
        made: tuple[Any, bytes] | None = cache.get("joint key")
        if made is None or made[0] is not state.keys:
            made = (state.keys, self._channel.joint_key(epoch, state.keys))
            cache["joint key"] = made
        return made[1]

    # -------------------------------------------------------------- what becomes of it

    def combine(self, state: SumState, inbox: Mapping[AgentId, Reply]) -> SumState:
        """Add, open, or begin a new epoch without those who were lost."""
        parts = {
            agent: data
            for agent in state.roster
            if agent in inbox and (data := inbox[agent].data) is not None
        }
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
        return self._added(state, parts) if wanted else self._next(state)

    def _wanted(self, state: SumState, inbox: Mapping[AgentId, Reply]) -> bool:
        """Whether contributions are to be added now."""
        wanted = any(isinstance(reply, Upload) and reply.wanted for reply in inbox.values())
        return state.interrupted or (wanted and self._adding(state))

    def _noted(self, state: SumState, inbox: Mapping[AgentId, Reply]) -> SumState:
        """Who has received the last sum, and who is back."""
        if state.stage not in ("query", "resend"):
            return state
        if state.last is not None and self.every_sum:
            read = [a for a, said in inbox.items() if isinstance(said, Upload) and said.read]
            state = replace(state, reached={**state.reached, **dict.fromkeys(read, state.last.t)})
        if state.stage == "query" and self._together:
            able = {a for a, said in inbox.items() if isinstance(said, Upload) and said.able}
            able -= {*state.roster, *(set(state.returned) & set(state.lost))}
            back = tuple(name for name in self._terms.agents if name in able)
            state = replace(state, back=back)
        return state

    def _next(self, state: SumState) -> SumState:
        """The next round: a query, after a new epoch if somebody is back for its sum."""
        after = replace(state, t=state.t + 1, stage="query", closed=None, interrupted=False)
        return self._taken_back(replace(after, rounds=self.rounds))

    def _taken_back(self, state: SumState) -> SumState:
        """A new epoch with those who are back, if the next round has a sum for them."""
        members = {*state.roster, *state.back}
        roster = tuple(name for name in self._terms.agents if name in members)
        found = tuple(name for name in state.back if name in state.lost)
        joined = replace(
            state,
            epoch=state.epoch + 1,
            rekeys=state.rekeys + 1,
            roster=roster,
            keys=(),
            stage="key",
            lost=tuple(name for name in state.lost if name not in found),
            back=(),
            returned=(*state.returned, *found),
        )
        if not self.rejoin or not found:
            return state
        if not self._enough(state, roster) or not self._adding(joined):
            return state
        logger.info("epoch %d ends, %d agent(s) are back", state.epoch, len(found))
        return joined

    def _enough(self, state: SumState, roster: tuple[AgentId, ...]) -> bool:
        """Whether another epoch may begin, with this roster."""
        if len(roster) < max(MIN_TOGETHER, self.least):
            return False
        # Every agent may be lost, be taken back and be lost again.
        return state.rekeys < 3 * len(self._terms.agents)

    def _prepared(self, state: SumState, parts: dict[AgentId, bytes]) -> SumState:
        channel, epoch = self._channel, self._epoch(state)
        if not state.keys:
            identities = channel.identities_of(parts)
            known = self._known(state, identities)
            if len(known) < len(state.roster):
                logger.warning("identity keys of %d agent(s) have changed", len(parts) - len(known))
                return self._renewed(state, known)
            state = replace(state, identities={**state.identities, **identities})
        try:
            keys = (*state.keys, channel.gather(parts, epoch=epoch, gathered=state.keys))
            if len(keys) < channel.setup_phases:
                return replace(state, keys=keys)
            keyed = replace(state, keys=keys, stage="resend" if state.interrupted else "query")
            self._joint_key(keyed, epoch)
        except (MessageError, ProtocolError) as error:
            logger.warning("the joint key of epoch %d does not fit: %s", state.epoch, error)
            return self._renewed(state, state.roster)
        return keyed

    def _known(self, state: SumState, identities: Mapping[AgentId, bytes]) -> tuple[AgentId, ...]:
        """The larger part of a roster, of those whose identity keys are as before or are others.

        Agents refuse keys that have changed: both in one roster would end it for all.
        """
        changed = {
            name for name, key in identities.items() if state.identities.get(name, key) != key
        }
        most = 2 * len(changed) > len(state.roster)
        return tuple(name for name in state.roster if (name in changed) == most)

    def _without(
        self, state: SumState, parts: dict[AgentId, bytes], inbox: Mapping[AgentId, Reply]
    ) -> SumState:
        """A new epoch with those who answered, or who are there but have all lost their keys."""
        left = tuple(agent for agent in state.roster if agent in parts)
        if len(left) < MIN_TOGETHER:
            left = tuple(agent for agent in state.roster if agent in inbox)
        return self._renewed(state, left)

    def _renewed(self, state: SumState, roster: tuple[AgentId, ...]) -> SumState:
        lost = tuple(name for name in state.roster if name not in roster)
        logger.warning("epoch %d ends, %d agent(s) were lost", state.epoch, len(lost))
        interrupted = state.interrupted or state.stage == "query" or state.stage == "resend"
        t = state.t
        if state.stage == "share":
            # Who has sent a share of the round adds to no other sum of it.
            logger.warning("round %d opens no sum", t)
            t, interrupted, state = t + 1, False, replace(state, rounds=self.rounds)
        state = replace(
            state, t=t, keys=(), closed=None, epoch=state.epoch + 1, lost=(*state.lost, *lost)
        )
        if not self._enough(state, roster) or not self._affordable(state):
            logger.warning("no sum: too few agents are left, too many keys or sums were made")
            state = replace(state, roster=(), stage="query", interrupted=False)
            return self._next(state) if interrupted else state
        return replace(
            state, roster=roster, stage="key", interrupted=interrupted, rekeys=state.rekeys + 1
        )

    def _added(self, state: SumState, parts: dict[AgentId, bytes]) -> SumState:
        if not parts or len(parts) < self.least:
            logger.warning("round %d: %d contributions are too few", state.t, len(parts))
            return self._next(state)
        if self._sum.noise_at == "server":
            return self._noised(state, parts)
        channel, epoch = self._channel, self._epoch(state)
        try:
            total = channel.add(parts, epoch=epoch, round=state.t)
        except (MessageError, ProtocolError) as error:
            logger.warning("round %d can not be added: %s", state.t, error)
            return self._renewed(state, state.roster) if self._together else self._next(state)
        closed = Sealed(state.t, state.epoch, total, tuple(parts), _round_of(state.last))
        if channel.open_phases:
            return replace(state, closed=closed, stage="share")
        if channel.opened_by == "agents":
            return self._kept(state, closed)
        integers = channel.open(total, {}, epoch=epoch, round=state.t)
        return self._opened(state, integers, tuple(parts))

    def _noised(self, state: SumState, parts: dict[AgentId, bytes]) -> SumState:
        assert state.ledger is not None  # there is a mechanism
        try:
            values, ledger = self._sum.release(
                parts,
                epoch=self._epoch(state),
                round=state.t,
                ledger=state.ledger,
                noise=self.party.resources.noise,
                path=("sum", state.t),
            )
        except BudgetExceeded as error:
            logger.warning("round %d opens nothing: %s", state.t, error)
            return self._next(replace(state, roster=()))
        opened = Opened(state.t, values, tuple(parts), _round_of(state.last))
        return self._kept(replace(state, ledger=ledger), opened)

    def _shared(self, state: SumState, parts: dict[AgentId, bytes]) -> SumState:
        closed, channel = state.closed, self._channel
        assert closed is not None
        at: Any = {"epoch": self._epoch(state), "round": state.t}
        try:
            if channel.opened_by == "agents":
                fused = channel.fuse(closed.total, parts, **at)
                return self._kept(state, replace(closed, total=fused))
            integers = channel.open(closed.total, parts, **at)
        except (MessageError, ProtocolError) as error:
            logger.warning("the sum of round %d does not open: %s", state.t, error)
            return self._renewed(state, state.roster)
        return self._opened(state, integers, tuple(parts))

    def _opened(self, state: SumState, integers: Tensor, members: tuple[AgentId, ...]) -> SumState:
        values = self._channel.grid.to_values(integers)
        return self._kept(state, Opened(state.t, values, members, _round_of(state.last)))

    def _kept(self, state: SumState, found: Opened | Sealed) -> SumState:
        """With a sum that was opened, or that agents can open."""
        missed = self._unread(state) if self.every_sum else ()
        signal = (*state.signal, *self._signal(found))
        after = replace(state, sums=state.sums + 1, signal=signal, last=found, missed=missed)
        return self._next(after)

    def _signal(self, found: Opened | Sealed) -> tuple[float, ...]:
        """The signal-to-noise ratio of a noisy sum that can be read here, as `Release` has it."""
        std = noise_std_of(self._sum.mechanism, self._sum.noise_at, len(found.members))
        if not std or isinstance(found, Sealed):
            return ()
        noise = std**2 * found.total.numel()
        return (max(float(found.total.square().sum()) / noise - 1, 0.0) ** 0.5,)

    def _unread(self, state: SumState) -> tuple[Opened | Sealed, ...]:
        """Earlier sums that an agent may want when it is back: the newest, as far as they fit.

        Who was away for longer than they reach can not read them: nothing is kept for it.
        """
        last = state.last
        if last is None:
            return ()
        kept = min(BACKLOG, BACKLOG_BYTES // max(_size(last), 1))
        newest = (*state.missed, last)
        newest = newest[max(len(newest) - kept, 0) :]
        if not newest:
            return ()
        reached = [state.reached.get(name, -1) for name in self._terms.agents]
        read = min((t for t in reached if t >= newest[0].previous), default=last.t)
        return tuple(found for found in newest if found.t > read)


def _size(found: Opened | Sealed) -> int:
    return len(found.total) if isinstance(found, Sealed) else 8 * found.total.numel()


def _round_of(last: Opened | Sealed | None) -> int:
    return -1 if last is None else last.t
