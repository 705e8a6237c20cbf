r"""A site's side of sums, see `secure_sum`: what it accepts, what it pays, and what leaves it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from botorch_fed.aggregation.sum_messages import (
    BACKLOG,
    EPOCHS_PER_AGENT,
    MAX_EPOCH,
    MAX_ROUNDS,
    DecryptionShare,
    KeyMessage,
    Keys,
    Opened,
    Reply,
    Sealed,
    SumMemory,
    SumOrder,
    SumSetup,
    Upload,
)
from botorch_fed.errors import BudgetExceeded, MessageError, ProtocolError
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.terms import Party, check_ahead
from botorch_fed.privacy import GaussianSum, Ledger
from botorch_fed.privacy.aggregation import NoiseAt, PrivateSum
from botorch_fed.privacy.channels import Channel, Epoch, Secrets
from botorch_fed.privacy.distributed import DistributedRecordSum
from botorch_fed.search.releases import Sum, Sums

logger = logging.getLogger(__name__)

_FARTHEST = 40.0  # deviations from zero that a hub's noise never has


# ------------------------------------------------------------------ what is public


def check_published(agents: tuple[AgentId, ...], size: int, published: tuple[Any, ...]) -> None:
    """Raise `MessageError` unless there is one channel, one set-up, and sums that fit.

    Args:
        agents: The roster of the run.
        size: How many numbers a sum has.
        published: The broadcasts of a request.
    """
    if len(published) > 3 + BACKLOG:
        raise MessageError(f"Expected a channel, keys and sums, got {len(published)}.")
    for kind, least in ((SumSetup, 1), (Keys, 0)):
        count = len(_of(kind, published))
        if not least <= count <= 1:
            raise MessageError(f"Expected one {kind.__name__}, got {count}.")
    for found in _of((Opened, Sealed), published):
        members = found.members
        known = len(set(members)) == len(members) > 0 and set(members) <= set(agents)
        if not 0 <= found.t <= MAX_ROUNDS or not known:
            raise MessageError(
                f"A sum is of one of the rounds 0..{MAX_ROUNDS} and of 1 to {len(agents)} agents "
                f"of the terms, got round {found.t} and {len(members)} agents."
            )
        if isinstance(found, Sealed):
            if not 0 <= found.epoch < MAX_EPOCH:
                raise MessageError(f"Epochs are counted from 0, got a sum of {found.epoch}.")
        elif found.total.shape != (size,) or found.total.dtype != torch.float64:
            raise MessageError(
                f"A sum has shape {(size,)} and float64, got {tuple(found.total.shape)} and "
                f"{found.total.dtype}."
            )


def least_of(mechanism: Any) -> int:
    """How many contributions a sum needs for the noise that agents add to suffice."""
    if mechanism is None or isinstance(mechanism, GaussianSum):
        return 1
    return int(mechanism.num_agents - mechanism.dropping)


def noise_std_of(mechanism: Any, noise_at: NoiseAt, count: int) -> float:
    """The deviation of the noise in a number of a sum of so many contributions."""
    if mechanism is None:
        return 0.0
    if isinstance(mechanism, GaussianSum):
        return float(mechanism.noise_std[0])
    if noise_at == "server":
        return float(mechanism.noise_scale)
    return float(mechanism.agent_std * count**0.5)


def _of(kind: Any, published: tuple[Any, ...]) -> list[Any]:
    return [found for found in published if isinstance(found, kind)]


def _sums(published: tuple[Any, ...]) -> list[Opened | Sealed]:
    """The sums that came, by their rounds."""
    return sorted(_of((Opened, Sealed), published), key=lambda found: found.t)


def _key_messages(published: tuple[Any, ...]) -> tuple[Mapping[AgentId, bytes], ...]:
    """Everybody's messages of the set-up so far."""
    return next((keys.messages for keys in _of(Keys, published)), ())


# ------------------------------------------------------------------ the site


@dataclass(frozen=True, eq=False)
class SumSite:
    """A site's view of its sums.

    Where contributions are hidden, a site adds to one sum of each round: a share in its opening
    ends the round for it. It adds to a round once it was queried in it, so that two sums of the
    same data do not follow each other, and never to a sum of too few.

    Attributes:
        party: The site.
        run: The name of the run.
        private_sum: What bounds, noises and carries contributions; None if nothing is added.
        noise_at: Who adds the noise.
        most: The most contributions with noise that the site makes; None for no limit.
        every_sum: Whether a sum can be read only by who has read those before.
        least: The fewest agents on the roster of a joint key.
    """

    party: Party
    run: str
    private_sum: PrivateSum | None
    noise_at: NoiseAt
    most: int | None
    every_sum: bool
    least: int

    @property
    def _name(self) -> AgentId:
        assert self.party.name is not None  # a site has one
        return self.party.name

    @property
    def _memory(self) -> SumMemory:
        memory: SumMemory = self.party.memory
        return memory

    @property
    def _secrets(self) -> Secrets:
        return self.party.resources.secrets

    @property
    def _sum(self) -> PrivateSum:
        assert self.private_sum is not None  # no sum is asked for without one, nor comes
        return self.private_sum

    @property
    def _channel(self) -> Channel:
        return self._sum.channel

    # -------------------------------------------------------------- what it accepts

    def check_order(self, order: SumOrder, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless an order fits the terms, and what was asked before."""
        roster, agents = order.roster, self.party.terms.agents
        if not set(roster) <= set(agents) or len(set(roster)) < len(roster):
            raise MessageError("The roster names an agent twice, or one that is none.")
        if not 0 <= order.t <= MAX_ROUNDS or not 0 <= order.epoch < MAX_EPOCH:
            raise MessageError(
                f"Expected 0 <= round <= {MAX_ROUNDS} and epoch >= 0, got round {order.t} and "
                f"epoch {order.epoch}."
            )
        if order.evaluate != "nothing" and (
            order.step != "sum" or (order.evaluate == "first") != (order.t == 0)
        ):
            raise MessageError(
                "Agents evaluate their first points in round 0 and one query in each that follows, "
                f"got {order.evaluate!r} for {order.step!r} in round {order.t}."
            )
        self._check_progress(order)
        if self.private_sum is None:
            if order.step != "sum" or order.contribute:
                raise MessageError("There are no sums in this run, one is asked for.")
            return
        self._check_roster(order)
        self._check_once(order)
        setup: SumSetup = _of(SumSetup, published)[0]
        if setup.fingerprint != self._channel.fingerprint.hex():
            raise MessageError(
                f"The hub's channel is a {setup.channel} with other settings or keys than this "
                f"site's {self._channel}."
            )
        if order.step == "share" and len(_of(Sealed, published)) != 1:
            raise MessageError("A share is asked for of one sum, got another number of them.")
        for keys in _of(Keys, published):
            if keys.epoch != order.epoch:
                raise MessageError(
                    f"Keys of epoch {keys.epoch} came with a request of epoch {order.epoch}."
                )
        for found in _sums(published):
            self._check_received(order, found)

    def _check_progress(self, order: SumOrder) -> None:
        """Rounds and epochs never go back, and nobody is queried twice in one."""
        last = self._memory.order
        check_ahead(order.t, -1 if last is None else last.t)
        most = EPOCHS_PER_AGENT * len(self.party.terms.agents)
        if order.epoch > most:
            raise MessageError(f"Expected at most {most} epochs, got epoch {order.epoch}.")
        if last is None:
            return
        if order.t < last.t or order.epoch < last.epoch:
            raise MessageError(
                f"Round {order.t} of epoch {order.epoch} comes after round {last.t} of epoch "
                f"{last.epoch}."
            )
        if order.evaluate != "nothing" and order.t <= self._memory.queried_t:
            raise MessageError(f"Round {order.t} is over, this site was queried in it.")

    def _check_roster(self, order: SumOrder) -> None:
        """Noise suffices for the sum, and keys belong to who takes part."""
        least = least_of(self._sum.mechanism)
        if order.contribute and self._name in order.roster and len(order.roster) < least:
            raise MessageError(
                f"This site's noise suffices for sums of {least} agents or more, a contribution is "
                f"asked for one of {len(order.roster)}."
            )
        if order.step != "sum" and self._name not in order.roster:
            raise MessageError("This site is not on the roster of the epoch.")
        if self._together and self._name in order.roster and len(order.roster) < self.least:
            raise MessageError(
                f"This site adds to sums of {self.least} agents or more, the roster of epoch "
                f"{order.epoch} has {len(order.roster)}."
            )

    @property
    def _together(self) -> bool:
        """Whether all of a roster must take part in a sum."""
        return self._channel.setup_phases > 0

    def _check_once(self, order: SumOrder) -> None:
        """Raise `MessageError` for another sum of data that a site has helped to open a sum of."""
        memory = self._memory
        if not self._together or self._name not in order.roster or order.step == "key":
            return
        if order.step == "share":
            if order.t < memory.shared_t:
                raise MessageError(
                    f"A share is asked for in round {order.t}, this site has helped to open the "
                    f"sum of round {memory.shared_t}."
                )
            return
        if not order.contribute:
            return
        if order.t <= memory.shared_t:
            raise MessageError(
                f"Another contribution to round {order.t} is asked for, this site has helped to "
                f"open the sum of round {memory.shared_t}."
            )
        queried = order.t if order.evaluate != "nothing" else memory.queried_t
        if self._name in self.party.terms.evaluating and queried < order.t:
            raise MessageError(
                f"A contribution to round {order.t} is asked for, in which this site was asked "
                "for no evaluation."
            )

    def _check_received(self, order: SumOrder, found: Opened | Sealed) -> None:
        """A sealed sum comes to be opened together, or to who can open it; others are over."""
        if order.step == "share" and isinstance(found, Sealed):
            if (found.t, found.epoch) != (order.t, order.epoch):
                raise MessageError(
                    f"In round {order.t} of epoch {order.epoch} a share is asked for of the sum of "
                    f"round {found.t} of epoch {found.epoch}."
                )
        elif order.step != "sum" or found.t >= order.t:
            raise MessageError(
                f"A sum of round {found.t} came with {order.step!r} of round {order.t}."
            )
        elif isinstance(found, Sealed) and self._channel.opened_by != "agents":
            raise MessageError("A sealed sum, which agents of this channel cannot open.")

    # -------------------------------------------------------------- what it reads

    def received(self, order: SumOrder, published: tuple[Any, ...]) -> SumMemory:
        """The memory with the newest sum; keys of an epoch that is over are deleted."""
        memory, last = self._memory, self._memory.order
        if last is not None and last.epoch < order.epoch and self._name in last.roster:
            self._forget(Epoch(self.run, last.epoch, last.roster))
            if self._name not in order.roster:
                logger.warning(
                    "agent %r was left out of epoch %d by the hub, as if it had not answered",
                    self._name,
                    order.epoch,
                )
        queried = memory.queried_t if order.evaluate == "nothing" else order.t
        memory = replace(memory, order=order, queried_t=queried)
        if order.step != "sum":
            return memory
        if self.private_sum is not None and self._together and self._name in order.roster:
            # The key to sums that came before may be among those of this epoch.
            with contextlib.suppress(MessageError, ProtocolError):  # and is missed when it is used
                self._joint_key(Epoch(self.run, order.epoch, order.roster), published)
        for found in self._readable(published):
            if self.every_sum:
                if found.t > memory.read_t and found.previous == memory.read_t:
                    memory = replace(memory, read_t=found.t)
            elif memory.newest is None or found.t > memory.newest.t:
                opened = self._opened(found)
                if opened.total is not None:
                    memory = replace(memory, newest=opened)
        return memory

    def _forget(self, epoch: Epoch) -> None:
        if self.private_sum is not None:
            self._channel.forget(epoch, self._name, self._secrets)

    def release(self, published: tuple[Any, ...]) -> Any:
        """The newest sum as the search reads it; all that came, if it reads every one."""
        memory = self._memory
        if not self.every_sum:
            convert = getattr(self.party.terms.search, "of_sum", None)
            if memory.newest is None or convert is None:
                return memory.newest
            return convert(self.party.terms, memory.newest)
        if memory.order is None or memory.order.step != "sum":
            return None
        return Sums(tuple(map(self._opened, self._readable(published))))

    def _readable(self, published: tuple[Any, ...]) -> list[Opened | Sealed]:
        """The sums that came and that the site has the key to, by their rounds."""
        return [
            found
            for found in _sums(published)
            if isinstance(found, Opened)
            or self._channel.can_open(self._epoch_of(found), self._name, self._secrets)
        ]

    def _epoch_of(self, found: Sealed) -> Epoch:
        roster = found.members if self._together else self.party.terms.agents
        return Epoch(self.run, found.epoch, roster)

    def _opened(self, found: Opened | Sealed) -> Sum:
        """A sum as searches read it."""
        count, mine, memory = len(found.members), None, self._memory
        if memory.drawn_t == found.t and self._name in found.members:
            mine = self._channel.grid.to_values(memory.drawn)
        noise_std = noise_std_of(self._sum.mechanism, self.noise_at, count)
        total = found.total if isinstance(found, Opened) else self._decrypted(found)
        if total is not None and not self._possible(total, count, noise_std):
            logger.warning(
                "agent %r leaves the sum of round %d out: no %d contributions have it",
                self._name,
                found.t,
                count,
            )
            total = None
        return Sum(found.t, found.previous, count, total, mine, noise_std)

    def _possible(self, total: Tensor, count: int, noise_std: float) -> bool:
        """Whether contributions on the grid, and the hub's noise, have such a sum."""
        grid = self._channel.grid
        most = count * grid.largest * grid.step
        if self.noise_at == "server":
            most += _FARTHEST * noise_std
        return bool(total.abs().max() <= most)

    def _decrypted(self, found: Sealed) -> Tensor | None:
        """A sum that agents open, once; None if an agent has spoilt it."""
        cache: dict[Any, Tensor | None] = self.party.resources.cache.setdefault("sums", {})
        key = (found.t, found.epoch, hashlib.sha256(found.total).digest())
        if key not in cache:
            while len(cache) > BACKLOG:
                cache.pop(next(iter(cache)))
            epoch = self._epoch_of(found)
            try:
                integers = self._channel.open(
                    found.total, {}, epoch=epoch, round=found.t, secrets=self._secrets
                )
                cache[key] = self._channel.grid.to_values(integers)
            except (MessageError, ProtocolError) as error:
                logger.warning(
                    "agent %r can not open the sum of round %d: %s", self._name, found.t, error
                )
                cache[key] = None
        return cache[key]

    # -------------------------------------------------------------- what leaves it

    def contribute(
        self, order: SumOrder, message: Callable[[], Tensor | None]
    ) -> tuple[SumMemory, Reply]:
        """A part of the joint key, a share in an opening, or a contribution."""
        memory, nothing = self._memory, Upload(None, self.party.listens)
        if self.private_sum is None:
            return memory, nothing
        if self._name not in order.roster:
            published = self.party.published
            read = len(self._readable(published)) == len(_sums(published))
            return memory, replace(nothing, able=self._able, read=read)
        if order.step != "sum":
            return self._after(order), self._helped(order)
        if not order.contribute or not self._in_step:
            return memory, nothing
        if self._sum.mechanism is not None and not self._may_draw:
            logger.warning("agent %r has made the %d draws of the promise", self._name, self.most)
            return memory, nothing
        most = self._channel.most_sums
        if most is not None and memory.shared >= most:
            logger.warning("agent %r has helped to open %d sums, the most", self._name, most)
            return memory, nothing
        memory = self._drawn(order, message())
        try:
            epoch = Epoch(self.run, order.epoch, order.roster)
            data = self._channel.protect(
                memory.drawn,
                epoch=epoch,
                round=order.t,
                me=self._name,
                key=self._joint_key(epoch, self.party.published),
                secrets=self._secrets,
            )
        except (MessageError, ProtocolError) as error:
            logger.warning(
                "agent %r can not contribute to round %d: %s", self._name, order.t, error
            )
            return memory, nothing
        return memory, replace(nothing, data=data)

    def _after(self, order: SumOrder) -> SumMemory:
        """The memory after a part in an opening: whether it could be made or not."""
        memory = self._memory
        if order.step != "share" or order.t <= memory.shared_t:
            return memory
        return replace(memory, shared_t=order.t, shared=memory.shared + 1)

    def _helped(self, order: SumOrder) -> KeyMessage | DecryptionShare:
        """A part of the joint key or of an opening; None in it if the agent has lost its key."""
        reply = KeyMessage if order.step == "key" else DecryptionShare
        try:
            return reply(self._part(order))
        except (MessageError, ProtocolError) as error:  # e.g. a key lost in a crash: others go on
            logger.warning(
                "agent %r can not take part in epoch %d: %s", self._name, order.epoch, error
            )
            return reply(None)

    def _part(self, order: SumOrder) -> bytes:
        epoch, published = Epoch(self.run, order.epoch, order.roster), self.party.published
        if order.step == "key":
            messages = _key_messages(published)
            return self._channel.prepare(order.phase, epoch, self._name, messages, self._secrets)
        sealed: Sealed = _of(Sealed, published)[0]
        return self._channel.share(
            sealed.total, epoch=epoch, round=order.t, me=self._name, secrets=self._secrets
        )

    @property
    def _in_step(self) -> bool:
        """Whether the site has read the sums that its message depends upon."""
        newest = max((found.t for found in _sums(self.party.published)), default=-1)
        return not self.every_sum or self._memory.read_t == newest

    @property
    def _may_draw(self) -> bool:
        return self.most is None or self._memory.draws < self.most

    @property
    def _able(self) -> bool:
        """Whether the site could contribute: it has missed no sum that it needs, and can pay."""
        mechanism = self._sum.mechanism
        if mechanism is None or self.noise_at != "agent":
            return self._has_all
        try:
            self._ledger.spend(mechanism.event)
        except BudgetExceeded:
            return False
        return self._has_all and self._may_draw

    @property
    def _has_all(self) -> bool:
        """Whether the site has received all sums that it needs; it may lack the key to some."""
        read_t = self._memory.read_t
        for found in _sums(self.party.published):
            if found.previous == read_t:
                read_t = found.t
            elif self.every_sum and found.t > read_t:
                return False
        return True

    @property
    def _ledger(self) -> Ledger:
        """The site's ledger, or an empty one that can pay for the sums."""
        mechanism = self._sum.mechanism
        if self._memory.ledger is not None:
            return self._memory.ledger
        if mechanism is None:
            return Ledger()
        return Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)

    def _joint_key(self, epoch: Epoch, published: tuple[Any, ...]) -> bytes:
        """The key of the epoch, worked out once."""
        messages = _key_messages(published)
        if not messages:
            return b""
        cache = self.party.resources.cache
        made: tuple[Any, bytes] | None = cache.get("joint key")
        if made is None or made[0] != (epoch, messages):
            key = self._channel.joint_key(epoch, messages, me=self._name, secrets=self._secrets)
            made = ((epoch, messages), key)
            cache["joint key"] = made
        return made[1]

    def _drawn(self, order: SumOrder, message: Tensor | None) -> SumMemory:
        """The memory with the contribution to a sum.

        One with noise is paid for and drawn anew when a round is interrupted: the same draw in two
        sums over different rosters would show, as their difference, the contribution of whoever is
        in one only, with no noise but its own.
        """
        integers, ledger = self._sum.contribute(
            self._values(message),
            ledger=self._ledger,
            noise=self.party.resources.noise,
            path=("contribution", order.t, order.epoch, self._name),
        )
        return replace(
            self._memory,
            drawn=integers,
            drawn_t=order.t,
            draws=self._memory.draws + 1,
            ledger=ledger,
        )

    def _values(self, message: Tensor | None) -> Tensor:
        """A message that fits the grid; zeros for none."""
        mechanism, grid = self._sum.mechanism, self._channel.grid
        if message is None:
            if isinstance(mechanism, DistributedRecordSum):
                return torch.zeros(0, mechanism.num_features + 1, dtype=torch.float64)
            return torch.zeros(grid.dim, dtype=torch.float64)
        largest = float(message.abs().max()) if mechanism is None else 0.0  # which bounds it
        if largest > grid.bound:
            # As a whole, so that the summary of a likelihood is still one.
            logger.warning("agent %r scales a contribution of %.3g down", self._name, largest)
            return message * (grid.bound / largest)
        return message
