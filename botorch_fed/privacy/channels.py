r"""Channels: how the sum of the agents' integers reaches whoever may learn it.

    channel               the server sees            the sum is opened by
    PlainChannel          every contribution         the server
    CKKSChannel           nothing but sizes          the agents, who share one key
    ThresholdCKKSChannel  the sum, when all agents   the server, with a share of every agent
                          have helped to open it

All add the same integers on a `PublicGrid` and open the same sum, exactly. A channel is public
settings and pure functions over bytes; secrets stay in the agent's own store and are read from
there by name, so that no object of this module holds one. Every payload names its channel, epoch,
round and sender and has a checksum. What comes from outside is checked before any library reads it:
down to the last word for ThresholdCKKSChannel; sizes, version and scale for CKKSChannel, whose
ciphertexts are compressed and whose words SEAL checks itself. `MessageError` is the only answer to
bytes that do not fit.

**The threshold protocol** (`n`-of-`n`; arithmetic in `hazmat.ckks`). Set-up, once for each epoch:

0. Everybody commits to 32 secret bytes by their hash. The common polynomial `a` is expanded from
   the hash of run, roster, epoch and all commitments.
1. Everybody draws a secret :math:`s_i` and commits to the key share :math:`b_i` by its hash.
2. Everybody reveals :math:`b_i`. The joint key is their sum, checked against the commitments.

For each sum: encrypt under the joint key (`protect`), add, answer with a share of the sum
(`share`), open. An agent that is lost in between stalls the round: start an epoch without it.

**Trust.** The server and any coalition that lacks one agent of the roster learn nothing about that
agent's contribution but what the sum and their own contributions say: 128 bits of computational
security for ciphertexts and keys; the noise in a share is `2^flooding_bits` times what it hides.
With two agents each learns the other's contribution; sums over changing rosters can be subtracted.
Noise that is added before encryption limits that, encryption does not.

Server and agents follow the protocol ("semi-honest"). The commitments prevent that somebody chooses
a key share after seeing the others': who subtracts them from the public part of a key of their own
would hold the joint key. An agent settles for the first messages of an epoch's set-up that it
answers and refuses others, for two shares of one secret give it away. Messages are not
authenticated: names are as good as the transport, and a server that invents messages of agents
reads what is encrypted under its key.

An agent can not see what it helps to open. A server that hands out one agent's ciphertext as "the
sum" has it opened; one that asks for shares of a polynomial of its own choice learns the secrets of
the epoch, and with them every contribution to it; so does a curious server together with an agent
that adds to its ciphertext what no encryption has. What an agent does is answer one sum for each
epoch and round and refuse a second one; in a new epoch it answers for the same round again. A
dishonest agent can spoil a sum and is not named.
"""

from __future__ import annotations

import hashlib
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat import ckks

Heard = tuple[Mapping[str, bytes], ...]  # of every set-up phase so far: sender -> message

_Bytes = bytes | memoryview
_MAGIC = b"bofedch\x01"  # with the format version
# magic, kind, digest of channel and epoch, round, digest of sender, size and SHA-256 of the body
_HEADER = struct.Struct("<8sB32sQ16sQ32s")
# Kinds; set-up phase i is _SETUP + i.
_CONTRIBUTION, _TOTAL, _REQUEST, _SHARE, _KEY, _SETUP = range(6)
_KINDS = ("contribution", "sum", "request", "share", "joint key")
_NOBODY = ""  # the sender of a sum
_MAX_ROUND = 2**63 - 1
_LEAST_FLOODING = 40
_COINS = 32
_LARGEST_NOISE = 0.25  # of a step, in an opened sum; see Ring.choose
_PART = struct.Struct("<I")


class Secrets(Protocol):
    """Where an agent's secrets live: bytes by name, as in its own store."""

    def get(self, name: str) -> bytes | None:
        """The bytes of a name, None if there are none."""

    def put_new(self, name: str, data: bytes) -> None:
        """Set the bytes of a new name; `ProtocolError` if it exists."""

    def delete(self, name: str) -> None:
        """Remove a name, if it is there."""

    def names(self) -> list[str]:
        """All names."""


@dataclass(frozen=True)
class Epoch:
    """The public identity of one joint key: who takes part, in which run, which try.

    A number is used with one roster only: an agent that has prepared for one refuses another.

    Attributes:
        run: The run.
        number: Which try, from 0.
        roster: The names of those who take part, each once; their order does not matter.
    """

    run: str
    number: int
    roster: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "roster", tuple(self.roster))
        if isinstance(self.number, bool) or not 0 <= self.number <= _MAX_ROUND:
            raise InputDataError(f"The number of an epoch counts from 0, got {self.number}.")
        if not self.roster or len(set(self.roster)) != len(self.roster) or "" in self.roster:
            raise InputDataError(
                f"A roster holds distinct names, at least one; got {len(self.roster)} names, "
                f"{len(set(self.roster))} of them distinct."
            )

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for run, number and roster."""
        names = [name.encode() for name in sorted(self.roster)]
        return _hash(b"epoch", self.run.encode(), self.number.to_bytes(8, "little"), *names)


class Channel(ABC):
    """How integers are added without the server seeing more than it must.

    Attributes:
        grid: The public grid whose integers are added.
        setup_phases: Exchanges before an epoch's first sum.
        open_phases: Exchanges between a sum and its opening.
        opened_by: Who learns the sum first: the server, which then tells all, or the agents, each
            for itself.
        server_sees_contributions: Whether the server can read what one agent contributes.
    """

    grid: PublicGrid
    setup_phases: ClassVar[int] = 0
    open_phases: ClassVar[int] = 0
    opened_by: ClassVar[Literal["server", "agents"]] = "server"
    server_sees_contributions: ClassVar[bool] = False

    # ---- agents

    def prepare(self, phase: int, epoch: Epoch, me: str, heard: Heard, secrets: Secrets) -> bytes:
        """One's own message of a set-up phase; the same again if asked again.

        Args:
            phase: Which phase, from 0.
            epoch: The epoch to prepare.
            me: One's own name in its roster.
            heard: Everybody's messages of the phases before, one's own among them.
            secrets: One's own store.
        """
        raise ProtocolError(f"{type(self).__name__} has no set-up phase, got phase {phase}.")

    def joint_key(
        self,
        epoch: Epoch,
        heard: Heard,
        *,
        me: str | None = None,
        secrets: Secrets | None = None,
    ) -> bytes:
        """What everybody encrypts with, from the messages of all set-up phases.

        Args:
            epoch: The epoch.
            heard: Everybody's messages, one mapping per phase.
            me: One's own name and
            secrets: one's own store: an agent passes both, and finds its own messages unchanged.

        Returns:
            The key; empty where there is none.

        Raises:
            ProtocolError: A member of the roster is missing.
            MessageError: A message does not fit.
        """
        if heard:
            raise MessageError(f"{type(self).__name__} has no set-up, got {len(heard)} phases.")
        return b""

    @abstractmethod
    def protect(
        self, integers: Tensor, *, epoch: Epoch, round: int, me: str, key: bytes, secrets: Secrets
    ) -> bytes:
        """One's own contribution to a sum, ready to leave.

        Args:
            integers: A `dim` tensor, int64, within the grid.
            epoch: The epoch.
            round: Which sum, from 0.
            me: One's own name in the roster.
            key: What `joint_key` returned.
            secrets: One's own store.
        """

    def share(self, total: bytes, *, epoch: Epoch, round: int, me: str, secrets: Secrets) -> bytes:
        """One's own part in opening a sum: one sum for each epoch and round, and no second one.

        Args:
            total: What `request` returned, or the whole sum.
            epoch: The epoch.
            round: Which sum.
            me: One's own name in the roster.
            secrets: One's own store.

        Raises:
            ProtocolError: Another sum of this round was answered before.
            MessageError: The sum does not fit.
        """
        raise ProtocolError(f"{type(self).__name__} opens sums without shares.")

    # ---- the server

    def check_prepared(self, payload: bytes, *, epoch: Epoch, sender: str, heard: Heard) -> None:
        """Raise `MessageError` unless a sender's message of the next set-up phase fits.

        Args:
            payload: The message.
            epoch: The epoch.
            sender: Who delivers it.
            heard: Everybody's messages of the phases before.
        """
        raise MessageError(f"{type(self).__name__} has no set-up.")

    @abstractmethod
    def check(
        self, payload: bytes, *, epoch: Epoch, round: int, sender: str, key: bytes = b""
    ) -> None:
        """Raise `MessageError` unless a contribution can be added; under `key`, if it is known."""

    @abstractmethod
    def add(self, payloads: Mapping[str, bytes], *, epoch: Epoch, round: int) -> bytes:
        """The sum of contributions, still protected.

        Args:
            payloads: The contributions by sender.
            epoch: The epoch.
            round: Which sum.

        Raises:
            MessageError: A contribution does not fit.
            ProtocolError: A member of the roster is missing whom the channel cannot do without.
        """

    def request(self, total: bytes) -> bytes:
        """What agents need of a sum to make their shares of it."""
        return total

    def check_share(
        self, payload: bytes, *, epoch: Epoch, round: int, sender: str, total: bytes | None = None
    ) -> None:
        """Raise `MessageError` unless a share can help to open a sum, this one if it is given."""
        raise MessageError(f"{type(self).__name__} opens sums without shares.")

    # ---- whoever opens

    @abstractmethod
    def open(
        self,
        total: bytes,
        shares: Mapping[str, bytes],
        *,
        epoch: Epoch,
        round: int,
        secrets: Secrets | None = None,
    ) -> Tensor:
        """The sum.

        Args:
            total: What `add` returned.
            shares: Everybody's shares; empty where there are none.
            epoch: The epoch.
            round: Which sum.
            secrets: One's own store, where agents open.

        Returns:
            A `dim` tensor, int64, exact.
        """

    def forget(self, epoch: Epoch, me: str, secrets: Secrets) -> None:
        """Delete the secrets of an epoch that is over: its sums can no longer be opened."""
        return

    # ---- frames

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that stand for the channel's public settings."""
        return _hash(b"channel", repr(self).encode())

    def _address(self, epoch: Epoch) -> bytes:
        return _hash(b"address", self.fingerprint, epoch.digest)

    def _frame(self, kind: int, body: bytes, epoch: Epoch, round: int, sender: str) -> bytes:
        if isinstance(round, bool) or not 0 <= round <= _MAX_ROUND:
            raise ProtocolError(f"A round counts from 0, got {round}.")
        digest = hashlib.sha256(body).digest()
        fields = (kind, self._address(epoch), round, _name_digest(sender), len(body), digest)
        return _HEADER.pack(_MAGIC, *fields) + body

    def _body(self, payload: bytes, kind: int, epoch: Epoch, round: int, sender: str) -> memoryview:
        """The body of a frame that is what it must be; `MessageError` otherwise."""
        what = _KINDS[kind] if kind < _SETUP else f"message of set-up phase {kind - _SETUP}"
        if not isinstance(payload, bytes) or len(payload) < _HEADER.size:
            raise MessageError(f"No {what}: shorter than its header of {_HEADER.size} bytes.")
        magic, got, address, number, name, size, digest = _HEADER.unpack_from(payload)
        if magic != _MAGIC:
            raise MessageError(f"No {what} of format {_MAGIC[-1]}: another magic or version.")
        if got != kind:
            raise MessageError(f"Expected a {what}, got a message of kind {got}.")
        if address != self._address(epoch):
            raise MessageError(f"A {what} of another epoch, roster, run or channel.")
        if number != round:
            raise MessageError(f"A {what} of another round: expected {round}, got {number}.")
        if name != _name_digest(sender):
            raise MessageError(f"A {what} of another sender than the one that delivers it.")
        body = memoryview(payload)[_HEADER.size :]
        if size != len(body):
            raise MessageError(f"A {what} announces {size} bytes and has {len(body)}.")
        if hashlib.sha256(body).digest() != digest:
            raise MessageError(f"A {what} was damaged on its way: another SHA-256.")
        return body

    def _counted(
        self, total: bytes, shares: Mapping[str, bytes], epoch: Epoch, round: int
    ) -> tuple[int, memoryview]:
        """Of a sum that no shares are needed for, the number of contributions and the rest."""
        if shares:
            name = type(self).__name__
            raise MessageError(f"{name} opens sums without shares, got {len(shares)}.")
        body = self._body(total, _TOTAL, epoch, round, _NOBODY)
        count = int.from_bytes(body[:4], "little")
        if not 1 <= count <= min(self.grid.num_agents, len(epoch.roster)):
            raise MessageError(f"A sum of {count} contributions does not fit the grid and roster.")
        return count, body[4:]

    def _bodies(
        self, payloads: Mapping[str, bytes], kind: int, epoch: Epoch, round: int
    ) -> dict[str, memoryview]:
        """Bodies by sender; strangers are refused."""
        strangers = set(payloads) - set(epoch.roster)
        if strangers:
            raise MessageError(f"{len(strangers)} sender(s) are not in the roster of this epoch.")
        return {name: self._body(data, kind, epoch, round, name) for name, data in payloads.items()}


@dataclass(frozen=True)
class PlainChannel(Channel):
    """No protection: the server sees every contribution.

    Attributes:
        grid: The public grid.
    """

    grid: PublicGrid
    server_sees_contributions: ClassVar[bool] = True

    def protect(
        self, integers: Tensor, *, epoch: Epoch, round: int, me: str, key: bytes, secrets: Secrets
    ) -> bytes:
        """See `Channel`."""
        _check_member(me, epoch)
        self.grid.check_integers(integers)
        return self._frame(_CONTRIBUTION, _integer_bytes(integers), epoch, round, me)

    def check(
        self, payload: bytes, *, epoch: Epoch, round: int, sender: str, key: bytes = b""
    ) -> None:
        """See `Channel`."""
        self._read({sender: payload}, epoch, round)

    def add(self, payloads: Mapping[str, bytes], *, epoch: Epoch, round: int) -> bytes:
        """See `Channel`; any part of the roster."""
        _check_count(payloads, self.grid)
        total = sum(self._read(payloads, epoch, round).values(), torch.zeros(1, dtype=torch.int64))
        body = len(payloads).to_bytes(4, "little") + _integer_bytes(total)
        return self._frame(_TOTAL, body, epoch, round, _NOBODY)

    def open(
        self,
        total: bytes,
        shares: Mapping[str, bytes],
        *,
        epoch: Epoch,
        round: int,
        secrets: Secrets | None = None,
    ) -> Tensor:
        """See `Channel`."""
        count, body = self._counted(total, shares, epoch, round)
        return _read_integers(body, self.grid, count)

    def _read(self, payloads: Mapping[str, bytes], epoch: Epoch, round: int) -> dict[str, Tensor]:
        bodies = self._bodies(payloads, _CONTRIBUTION, epoch, round)
        return {name: _read_integers(body, self.grid, 1) for name, body in bodies.items()}


@dataclass(frozen=True)
class CKKSChannel(Channel):
    """TenSEAL's encrypted vectors under one key, which all agents hold and the server does not.

    Trust: any single agent, together with the server, reads every contribution. The key is handed
    to the agents out of band, with `provision`.

    Attributes:
        grid: The public grid.
        context: TenSEAL's public context; use `generate`.

    Raises:
        MessageError: The context is none, or has more than a public key.

    Example:
        >>> channel, secret = CKKSChannel.generate(PublicGrid(dim=3, bound=1.0, num_agents=5))
        >>> channel.provision(secret, store)  # at each agent
    """

    grid: PublicGrid
    context: bytes = field(repr=False)
    opened_by: ClassVar[Literal["server", "agents"]] = "agents"

    def __post_init__(self) -> None:
        ckks.check_public(self.context)

    @classmethod
    def generate(cls, grid: PublicGrid) -> tuple[CKKSChannel, bytes]:
        """A channel, and the secret that goes to the agents and nowhere else."""
        public, secret = ckks.generate_keys()
        return cls(grid, public), secret

    @property
    def handle(self) -> str:
        """The name under which an agent's store has the secret."""
        return f"he-{_hash(b'single key', self.context).hex()[:40]}"

    def provision(self, secret: bytes, secrets: Secrets) -> None:
        """Put the secret of `generate` into an agent's store, once."""
        secrets.put_new(self.handle, secret)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that stand for grid and key."""
        return _hash(b"channel", repr(self).encode(), self.context)

    def protect(
        self, integers: Tensor, *, epoch: Epoch, round: int, me: str, key: bytes, secrets: Secrets
    ) -> bytes:
        """See `Channel`."""
        _check_member(me, epoch)
        self.grid.check_integers(integers)
        vectors = ckks.encrypt(self.context, self._limbs(integers))
        return self._frame(_CONTRIBUTION, _pack(vectors), epoch, round, me)

    def check(
        self, payload: bytes, *, epoch: Epoch, round: int, sender: str, key: bytes = b""
    ) -> None:
        """See `Channel`."""
        body = self._body(payload, _CONTRIBUTION, epoch, round, sender)
        ckks.check_vectors(self.context, _unpack(body), self._sizes)

    def add(self, payloads: Mapping[str, bytes], *, epoch: Epoch, round: int) -> bytes:
        """See `Channel`; any part of the roster."""
        _check_count(payloads, self.grid)
        bodies = self._bodies(payloads, _CONTRIBUTION, epoch, round).values()
        total = ckks.add(self.context, [_unpack(body) for body in bodies], self._sizes)
        body = len(payloads).to_bytes(4, "little") + _pack(total)
        return self._frame(_TOTAL, body, epoch, round, _NOBODY)

    def open(
        self,
        total: bytes,
        shares: Mapping[str, bytes],
        *,
        epoch: Epoch,
        round: int,
        secrets: Secrets | None = None,
    ) -> Tensor:
        """See `Channel`; `secrets` is an agent's store."""
        count, body = self._counted(total, shares, epoch, round)
        secret = None if secrets is None else secrets.get(self.handle)
        if secret is None:
            raise ProtocolError("Agents open sums of this channel: its secret is not in the store.")
        slots = ckks.decrypt(secret, _unpack(body), self._sizes)
        integers = np.rint(slots)
        noise = float(np.abs(slots - integers).max())
        largest = float(np.abs(integers).max())  # shifted limbs must not wrap around
        if not (noise < _LARGEST_NOISE and largest < 2.0 ** (ckks.SLOT_BITS + 1)):
            raise _no_sum()
        limbs = torch.from_numpy(integers).to(torch.int64)
        result = limbs[: self.grid.dim]
        if self._limb_bits:
            result = (limbs[self.grid.dim :] << self._limb_bits) + result
        return _checked_sum(result, self.grid, count)

    @property
    def _limb_bits(self) -> int:
        """The bits of the low limb; 0 where one slot carries a number."""
        excess = (self.grid.num_agents * self.grid.largest).bit_length() - ckks.SLOT_BITS
        return excess + 8 if excess > 0 else 0

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The numbers in each vector of a contribution."""
        total = self.grid.dim * (2 if self._limb_bits else 1)
        whole, rest = divmod(total, ckks.SLOTS)
        return (ckks.SLOTS,) * whole + ((rest,) if rest else ())

    def _limbs(self, integers: Tensor) -> list[list[float]]:
        if self._limb_bits:
            high = (integers + (1 << (self._limb_bits - 1))) >> self._limb_bits
            integers = torch.cat([integers - (high << self._limb_bits), high])
        return [part.tolist() for part in integers.double().split(ckks.SLOTS)]


@dataclass(frozen=True)
class ThresholdCKKSChannel(Channel):
    """Multiparty CKKS on SEAL: the key that opens a sum is nobody's, all of the roster share it.

    See the module for the protocol and for who must be trusted with what, and
    `botorch_fed.privacy.hazmat.ckks` for the arithmetic and its security.

    Attributes:
        grid: The public grid.
        flooding_bits: How much larger the noise in a share is than what it hides, 40 at least.

    Raises:
        InputDataError: Less flooding, or no ring with 128 bits of security holds the sums.

    Example:
        >>> channel = ThresholdCKKSChannel(PublicGrid(dim=560, bound=1e4, num_agents=50))
        >>> channel.ring
        Ring(degree=8192, low=2, high=2)
    """

    grid: PublicGrid
    flooding_bits: int = 40
    setup_phases: ClassVar[int] = 3
    open_phases: ClassVar[int] = 1

    def __post_init__(self) -> None:
        bits = self.flooding_bits
        if isinstance(bits, bool) or not isinstance(bits, int) or bits < _LEAST_FLOODING:
            raise InputDataError(
                f"Flooding needs at least {_LEAST_FLOODING} bits, got {bits!r}: shares without it "
                "give the secret keys away."
            )
        _ = self.ring

    @cached_property
    def ring(self) -> ckks.Ring:
        """The parameters, chosen for the grid, the number of agents and the flooding."""
        largest = self.grid.num_agents * self.grid.largest
        return ckks.Ring.choose(largest, self.grid.num_agents, self.flooding_bits)

    # ---- agents

    def prepare(self, phase: int, epoch: Epoch, me: str, heard: Heard, secrets: Secrets) -> bytes:
        """See `Channel`: a commitment to fresh coins, one to the key share, the key share."""
        self._check_epoch(epoch)
        _check_member(me, epoch)
        if phase not in range(self.setup_phases) or len(heard) != phase:
            raise ProtocolError(
                f"Set-up has phases 0, 1 and 2, each after the messages of those before; got phase "
                f"{phase} and {len(heard)} before."
            )
        if phase == 0 and secrets.get(self.handle(epoch, me)) is None:
            parts = (ckks.words_to_bytes(part) for part in ckks.generate_secret(self.ring))
            record = b"".join([self._address(epoch), os.urandom(_COINS), *parts])
            secrets.put_new(self.handle(epoch, me), record)
        bodies = [self._set_up(number, epoch, messages) for number, messages in enumerate(heard)]
        own = self._own_bodies(epoch, me, bodies, secrets)
        self._settle(epoch, me, bodies, secrets)
        return self._frame(_SETUP + phase, own[phase], epoch, 0, me)

    def joint_key(
        self,
        epoch: Epoch,
        heard: Heard,
        *,
        me: str | None = None,
        secrets: Secrets | None = None,
    ) -> bytes:
        """See `Channel`."""
        self._check_epoch(epoch)
        if len(heard) != self.setup_phases:
            raise ProtocolError(f"A joint key needs 3 set-up phases, got {len(heard)}.")
        bodies = [self._set_up(phase, epoch, messages) for phase, messages in enumerate(heard)]
        seed = self._common_seed(epoch, bodies[0])
        shares = []
        for name in epoch.roster:
            body = bodies[2][name]
            digest = _body_digest(heard[2][name])
            if bodies[1][name] != self._commitment(epoch, name, seed, digest):
                raise MessageError("A key share is not what its sender has committed itself to.")
            shares.append(self._words(body, 1, keys=True))
        if me is not None and secrets is not None:
            _check_member(me, epoch)
            self._settle(epoch, me, bodies[:2], secrets)
        joint = ckks.words_to_bytes(ckks.sum_words(self.ring, shares))
        return self._frame(_KEY, seed + joint, epoch, 0, _NOBODY)

    def protect(
        self, integers: Tensor, *, epoch: Epoch, round: int, me: str, key: bytes, secrets: Secrets
    ) -> bytes:
        """See `Channel`."""
        self._check_epoch(epoch)
        _check_member(me, epoch)
        self.grid.check_integers(integers)
        body = bytes(self._body(key, _KEY, epoch, 0, _NOBODY))
        encryptor = ckks.encryptor(self.ring, body[:32], body[32:])
        words = ckks.encrypt_integers(self.ring, integers.numpy(), encryptor)
        data = _body_digest(key) + ckks.words_to_bytes(words.swapaxes(0, 1))
        return self._frame(_CONTRIBUTION, data, epoch, round, me)

    def share(self, total: bytes, *, epoch: Epoch, round: int, me: str, secrets: Secrets) -> bytes:
        """See `Channel`: the same share again for the same sum."""
        self._check_epoch(epoch)
        _check_member(me, epoch)
        secret = self._secret(epoch, me, secrets)[0]
        if total[8:9] == bytes([_TOTAL]):
            total = self.request(total)
        body = self._body(total, _REQUEST, epoch, round, _NOBODY)
        c1, digest = self._words(body, self._chunks), _body_digest(total)
        name = f"{self.handle(epoch, me)}-{round}"
        answered = secrets.get(name)
        if answered is None:
            answered = digest + os.urandom(_COINS)
            secrets.put_new(name, answered)
        if answered[:32] != digest:
            raise ProtocolError(
                f"Another sum of round {round} was answered before: a second one could tell what a "
                "single agent contributed."
            )
        std = ckks.flooding_std(self.ring.degree, self.grid.num_agents, self.flooding_bits)
        flooding = ckks.flooding_words(self.ring, std, self._chunks, answered[32:])
        words = ckks.partial_decryption(self.ring, c1, secret, flooding)
        return self._frame(_SHARE, digest + ckks.words_to_bytes(words), epoch, round, me)

    def forget(self, epoch: Epoch, me: str, secrets: Secrets) -> None:
        """See `Channel`. That the epoch was used is forgotten as well: count on."""
        handle = self.handle(epoch, me)
        secrets.delete(handle)  # first: without it, what was answered may be forgotten
        for name in secrets.names():
            if name.startswith(f"{handle}-"):
                secrets.delete(name)

    def handle(self, epoch: Epoch, me: str) -> str:
        """The name of an agent's secret of an epoch, whatever its roster."""
        number = epoch.number.to_bytes(8, "little")
        return f"he-{_hash(b'threshold', epoch.run.encode(), number, me.encode()).hex()[:40]}"

    # ---- the server

    def check_prepared(self, payload: bytes, *, epoch: Epoch, sender: str, heard: Heard) -> None:
        """See `Channel`: a key share must be what its sender has committed itself to."""
        self._check_epoch(epoch)
        phase = len(heard)
        if phase not in range(self.setup_phases):
            raise MessageError(f"Set-up has phases 0, 1 and 2, got phase {phase}.")
        body = self._set_up_body(phase, epoch, sender, payload)
        if phase == 0:
            return
        seed = self._common_seed(epoch, self._set_up(0, epoch, heard[0]))
        if phase == 1:
            if body[:32] != seed:
                raise MessageError("A commitment to a key share under another polynomial.")
            return
        digest = _body_digest(payload)
        committed = self._body(heard[1][sender], _SETUP + 1, epoch, 0, sender)
        if committed != self._commitment(epoch, sender, seed, digest):
            raise MessageError("A key share is not what its sender has committed itself to.")
        self._words(body, 1, keys=True)

    def check(
        self, payload: bytes, *, epoch: Epoch, round: int, sender: str, key: bytes = b""
    ) -> None:
        """See `Channel`."""
        body = self._body(payload, _CONTRIBUTION, epoch, round, sender)
        if key and body[:32] != _body_digest(key):
            raise MessageError("A contribution is encrypted under another joint key.")
        self._contribution(body)

    def add(self, payloads: Mapping[str, bytes], *, epoch: Epoch, round: int) -> bytes:
        """See `Channel`; all of the roster."""
        self._check_epoch(epoch)
        _check_complete(payloads, epoch, "contribution")
        bodies = self._bodies(payloads, _CONTRIBUTION, epoch, round).values()
        if len({bytes(body[:32]) for body in bodies}) != 1:
            raise MessageError("Contributions are encrypted under different joint keys.")
        total = ckks.sum_words(self.ring, [self._contribution(body) for body in bodies])
        return self._frame(_TOTAL, ckks.words_to_bytes(total), epoch, round, _NOBODY)

    def request(self, total: bytes) -> bytes:
        """See `Channel`: half of the sum."""
        if len(total) != _HEADER.size + 2 * self._half or total[8] != _TOTAL:
            raise MessageError("No sum of this channel: another size or kind.")
        fields = list(_HEADER.unpack_from(total))
        body = memoryview(total)[_HEADER.size + self._half :]
        fields[1], fields[5], fields[6] = _REQUEST, len(body), hashlib.sha256(body).digest()
        return _HEADER.pack(*fields) + body

    def check_share(
        self, payload: bytes, *, epoch: Epoch, round: int, sender: str, total: bytes | None = None
    ) -> None:
        """See `Channel`."""
        digest = None
        if total is not None:
            c1 = self._body(total, _TOTAL, epoch, round, _NOBODY)[self._half :]
            digest = hashlib.sha256(c1).digest()
        self._share(self._body(payload, _SHARE, epoch, round, sender), digest)

    # ---- whoever opens

    def open(
        self,
        total: bytes,
        shares: Mapping[str, bytes],
        *,
        epoch: Epoch,
        round: int,
        secrets: Secrets | None = None,
    ) -> Tensor:
        """See `Channel`; all shares of the roster."""
        self._check_epoch(epoch)
        _check_complete(shares, epoch, "share")
        integers, noise = self._fuse(total, shares, epoch, round)
        dim = self.grid.dim
        if not float(np.abs(noise).max()) < _LARGEST_NOISE or integers[dim:].any():
            raise _no_sum()
        return _checked_sum(torch.from_numpy(integers[:dim]), self.grid, len(epoch.roster))

    def _fuse(
        self, total: bytes, shares: Mapping[str, bytes], epoch: Epoch, round: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Integers and their noise in steps, of all coefficients, whoever is missing."""
        return ckks.decode(self.ring, self._fused(total, shares, epoch, round))

    def _fused(
        self, total: bytes, shares: Mapping[str, bytes], epoch: Epoch, round: int
    ) -> ckks.Words:
        body = self._body(total, _TOTAL, epoch, round, _NOBODY)
        terms = [self._words(body[: self._half], self._chunks)]
        digest = hashlib.sha256(body[self._half :]).digest()
        for share in self._bodies(shares, _SHARE, epoch, round).values():
            terms.append(self._share(share, digest))
        return ckks.sum_words(self.ring, terms)

    # ---- parts

    @property
    def _chunks(self) -> int:
        return self.ring.polynomials(self.grid.dim)

    @property
    def _half(self) -> int:
        """The bytes of one part of a ciphertext, all chunks together."""
        return 4 * self._chunks * self.ring.num_primes * self.ring.degree

    def _check_epoch(self, epoch: Epoch) -> None:
        if not 2 <= len(epoch.roster) <= self.grid.num_agents:
            raise ProtocolError(
                f"A roster has 2 to {self.grid.num_agents} agents, got {len(epoch.roster)}: the "
                "sum of one is its contribution, and the grid holds no more."
            )

    def _words(self, body: _Bytes, polynomials: int, *, keys: bool = False) -> ckks.Received:
        primes = self.ring.num_primes + keys
        return ckks.words_from_bytes(self.ring, body, polynomials, primes)

    def _contribution(self, body: memoryview) -> ckks.Received:
        return self._words(body[32:], 2 * self._chunks)

    def _share(self, body: memoryview, digest: bytes | None) -> ckks.Received:
        if digest is not None and body[:32] != digest:
            raise MessageError("A share of another sum.")
        return self._words(body[32:], self._chunks)

    def _set_up(
        self, phase: int, epoch: Epoch, messages: Mapping[str, bytes]
    ) -> dict[str, memoryview]:
        _check_complete(messages, epoch, f"message of set-up phase {phase}")
        self._bodies(messages, _SETUP + phase, epoch, 0)
        return {
            name: self._set_up_body(phase, epoch, name, data) for name, data in messages.items()
        }

    def _set_up_body(self, phase: int, epoch: Epoch, sender: str, payload: bytes) -> memoryview:
        body = self._body(payload, _SETUP + phase, epoch, 0, sender)
        size = (32, 64, 4 * len(self.ring.primes) * self.ring.degree)[phase]
        if len(body) != size:
            raise MessageError(f"A message of set-up phase {phase} has {size} bytes.")
        return body

    def _own_bodies(
        self, epoch: Epoch, me: str, heard: Sequence[Mapping[str, memoryview]], secrets: Secrets
    ) -> list[bytes]:
        """One's own messages up to the next phase; those that were heard must be the same."""
        coins = self._record(epoch, me, secrets)[32 : 32 + _COINS]
        own = [_hash(b"coins", self._address(epoch), me.encode(), coins)]
        if heard:
            seed = self._common_seed(epoch, heard[0])
            secret, error = self._secret(epoch, me, secrets)
            common = ckks.uniform_words(self.ring, seed)
            share = ckks.words_to_bytes(ckks.key_share(self.ring, common, secret, error))
            digest = hashlib.sha256(share).digest()
            own += [self._commitment(epoch, me, seed, digest), share]
        for phase, bodies in enumerate(heard):
            if bodies[me] != own[phase]:
                raise MessageError(f"One's own message of set-up phase {phase} was changed.")
        return own

    def _settle(
        self, epoch: Epoch, me: str, heard: Sequence[Mapping[str, memoryview]], secrets: Secrets
    ) -> None:
        """Answer to one set of messages only: two shares of one secret would give it away."""
        self._record(epoch, me, secrets)
        for phase, bodies in enumerate(heard):
            parts = [part for who in sorted(bodies) for part in (who.encode(), bodies[who])]
            digest = _hash(b"heard", *parts)
            name = f"{self.handle(epoch, me)}-heard{phase}"
            known = secrets.get(name)
            if known is None:
                secrets.put_new(name, digest)
            elif known != digest:
                raise ProtocolError(
                    f"Other messages of set-up phase {phase} were answered before: start a new "
                    "epoch."
                )

    def _common_seed(self, epoch: Epoch, coins: Mapping[str, memoryview]) -> bytes:
        named: list[_Bytes] = [
            part for name in sorted(coins) for part in (name.encode(), coins[name])
        ]
        return _hash(b"common polynomial", self._address(epoch), *named)

    def _commitment(self, epoch: Epoch, name: str, seed: bytes, digest: bytes) -> bytes:
        return seed + _hash(b"key share", self._address(epoch), name.encode(), seed, digest)

    def _record(self, epoch: Epoch, me: str, secrets: Secrets) -> bytes:
        """One's own secret as it is stored: address, coins, secret, negative of the error."""
        record = secrets.get(self.handle(epoch, me))
        if record is None:
            raise ProtocolError("There is no secret of this epoch in the store: start a new one.")
        if record[:32] != self._address(epoch):
            raise ProtocolError(
                "The number of this epoch was used with another roster or channel: count on."
            )
        return record

    def _secret(self, epoch: Epoch, me: str, secrets: Secrets) -> ckks.Received:
        """One's own secret and the negative of its error."""
        record = memoryview(self._record(epoch, me, secrets))
        try:
            return self._words(record[32 + _COINS :], 2, keys=True)
        except MessageError:
            raise ProtocolError("The secret of this epoch is damaged: start a new one.") from None


# ------------------------------------------------------------------ parts


def _hash(*parts: _Bytes) -> bytes:
    """SHA-256 of parts, each with its length."""
    state = hashlib.sha256(b"botorch_fed.privacy.channels")
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def _name_digest(name: str) -> bytes:
    return _hash(b"name", name.encode())[:16]


def _body_digest(payload: bytes) -> bytes:
    """SHA-256 of the body of a frame that was checked."""
    digest: bytes = _HEADER.unpack_from(payload)[6]
    return digest


def _check_member(me: str, epoch: Epoch) -> None:
    if me not in epoch.roster:
        raise ProtocolError("One's own name is not in the roster of this epoch.")


def _check_count(payloads: Mapping[str, bytes], grid: PublicGrid) -> None:
    if not 1 <= len(payloads) <= grid.num_agents:
        raise ProtocolError(
            f"A sum on this grid has 1 to {grid.num_agents} contributions, got {len(payloads)}."
        )


def _integer_bytes(integers: Tensor) -> bytes:
    return integers.numpy().astype("<i8", copy=False).tobytes()


def _read_integers(body: memoryview, grid: PublicGrid, contributions: int) -> Tensor:
    if len(body) != 8 * grid.dim:
        raise MessageError(f"{grid.dim} integers need {8 * grid.dim} bytes, got {len(body)}.")
    integers = torch.from_numpy(np.frombuffer(body, dtype="<i8").astype(np.int64))
    try:
        grid.check_integers(integers, contributions)
    except InputDataError as error:
        raise MessageError(f"A contribution or sum does not fit: {error}") from error
    return integers


def _check_complete(messages: Mapping[str, bytes], epoch: Epoch, what: str) -> None:
    missing = len(set(epoch.roster) - set(messages))
    if missing:
        raise ProtocolError(
            f"Every {what} of a roster of {len(epoch.roster)} is needed, {missing} missing: wait, "
            "or start an epoch without those who are lost."
        )


def _checked_sum(integers: Tensor, grid: PublicGrid, contributions: int) -> Tensor:
    try:
        grid.check_integers(integers, contributions)
    except InputDataError:
        raise _no_sum() from None
    return integers


def _no_sum() -> MessageError:
    return MessageError(
        "What was opened is no sum on the grid: a key share, contribution or share is not what "
        "its sender should have made. Start a new epoch."
    )


def _pack(parts: Sequence[bytes]) -> bytes:
    """Parts, each behind its length."""
    return b"".join(_PART.pack(len(part)) + part for part in parts)


def _unpack(body: memoryview) -> list[bytes]:
    parts, start = [], 0
    while start < len(body):
        if start + _PART.size > len(body):
            raise MessageError("A list of parts ends inside a length.")
        (size,) = _PART.unpack_from(body, start)
        start += _PART.size + size
        if start > len(body):
            raise MessageError("A list of parts ends inside a part.")
        parts.append(bytes(body[start - size : start]))
    return parts
