r"""Channels: how the sum of the agents' integers reaches whoever may learn it.

::

    channel               the server sees            the sum is opened by
    PlainChannel          every contribution         the server
    CKKSChannel           nothing but sizes          the agents, who share one key
    ThresholdCKKSChannel  nothing but sizes          the agents, when all have helped; or, if that
                                                     is asked for, the server

All add the same integers on a `PublicGrid` and open the same sum, exactly. A channel is public
settings and pure functions over bytes; secrets stay in the agent's own store and are read from
there by name, so that no object of this module holds one. Every payload names its channel, epoch,
round and sender and has a checksum. What comes from outside is checked before any library reads it:
down to the last word for ThresholdCKKSChannel; sizes, version and scale for CKKSChannel, whose
ciphertexts are compressed and whose words SEAL checks itself. `MessageError` is the only answer to
bytes that do not fit.

**The threshold protocol** (`n`-of-`n`; arithmetic in `hazmat.ckks`, keys in `hazmat.keys`). Every
agent has an identity key (Ed25519), which the study lists or others accept at first use. Set-up,
once for each epoch:

0. Every agent announces a fresh key of an exchange (X25519), signed over run, epoch, roster and
   channel, in less than 250 bytes. Everybody gets all announcements and checks all signatures.
   The *transcript* :math:`\tau` is the hash of all of them. The common polynomial `a` is expanded
   from it: a hash has no trapdoor, whoever speaks last. Each pair has a key
   :math:`k_{ij} = \mathrm{HKDF}(\mathrm{X25519}(i, j), \tau)`.
1. Every agent draws a secret :math:`s_i` and sends its key share :math:`b_i` to the server, which
   adds them and tells all the sum `b`. One agent, which makes the *group key* `K` or has it from
   an earlier epoch, also sends `K` to each other agent, sealed under :math:`k_{ij}`.

For each sum, on the `D` coefficients that carry numbers (64 at least), modulo each prime:

.. math::

   \text{contribution}\quad & c_{0,i} + z_i \ [{} + P(K, \tau, t)] \quad\text{and}\quad c_{1,i} \\
   \text{share}\quad & c_1 s_i + f_i - z_i
       + \sum_{j > i} P(k_{ij}, t, c_1) - \sum_{j < i} P(k_{ij}, t, c_1)

with :math:`(c_{0,i}, c_{1,i})` an encryption under `(b, a)`, `P` uniform streams (ChaCha20),
:math:`z_i` a fresh mask of the agent's own, :math:`f_i` the flooding, :math:`c_1` what the server
has sent as :math:`\sum_i c_{1,i}`. :math:`z_i` cancels between contribution and share of an agent
in the same epoch and round. Masks of pairs cancel in the sum of all shares of one transcript, round
and :math:`c_1`. What the server then has is the encoded sum plus
:math:`P(K, \tau, t)`, which it hands out and the agents take away. The one agent that gives `K`
adds that term. With ``opened_by="server"`` there is no `K`.

An agent that is lost in between stalls the round: start an epoch without it. An agent answers the
first announcements of an epoch and refuses others, shares one polynomial for each epoch and round,
with one :math:`z_i` and one :math:`f_i` however often it is asked, and adds nothing to a round in
whose opening it has shared. All that is in its store before it leaves.

**What holds**, for server and agents that deviate at will, a set `H` of two or more honest agents,
authentic identities, and 128 bits of computational security (Diffie-Hellman in X25519, HKDF,
ChaCha20, BLAKE2b, Ed25519):

1. *Contributions.* The view of all others of one round can be simulated from :math:`a`, the
   honest :math:`b_i` and :math:`c_{1,i}`, which say nothing of numbers, and
   :math:`\sum_{i \in H} (c_{0,i} + c_1^* s_i + f_i)`, for one polynomial :math:`c_1^*` of their
   choice, without the last unless every agent of `H` shares for the same set-up and
   :math:`c_1^*`. The first part of a contribution is uniform by :math:`z_i`, which nobody else
   has, however often an agent is asked for one: each has its own, and the one share takes one of
   them away, that of the last before it. Of other contributions nothing is ever read. Contribution
   and share of an agent together are thus uniform words, and :math:`c_{0,i} + c_1^* s_i + f_i`
   under the masks of pairs. For any two honest agents their stream is uniform to all others: over
   a complete graph of them these are uniform but for their sum. Agents that were sent different
   polynomials, announcements, rosters or rounds use different streams, and whoever does not share
   leaves its own in: nothing cancels. Masks of pairs on contributions would add nothing.
   Numbers enter as :math:`\Delta k_i` in :math:`c_{0,i}` alone, under any `b`: the view depends on
   them through :math:`\sum_{i \in H} k_i`, whatever :math:`c_1^*` is, and without an assumption
   on lattices. Here `H` are all honest agents of the roster. A server that has several rosters
   open sums, in several rounds, has each of them.
2. *Keys.* No share of a key is visible alone. A :math:`c_1^*` of another's choice, or an agent
   whose :math:`c_{1,i}` is no encryption, has a multiple of :math:`\sum_{i \in H} s_i` opened
   beside the sum, and so the key of the epoch. Commitments to ciphertexts do not prevent that. It
   is worth nothing: what the key decrypts is masked, in this round and all others. Nor is a false
   `b` worth anything: an agent need not verify it.
3. *The server does not learn the sum*, as long as no agent gives it `K`: what it has is uniform. It
   can hand out another one, though.
4. *Without the masks* the scheme is what it was: against a server and agents who follow the
   protocol, contributions are hidden by RLWE alone, also from a quantum computer that later reads
   all that was sent. The total variation of what the shares tell beside the sums is
   `2^-distance_bits` (`hazmat.ckks`), for the sums that the channel is made for.

**What does not hold.** With two agents each learns the other's contribution: all but one always do,
by subtraction. Sums over changing rosters can be subtracted. Noise that is added before encryption
limits that, encryption does not. Anybody can spoil a sum, or move it by adding to it what
fits the grid, and is not named: contributions and shares need no signatures of their own, since
who is none of a pair cannot make them, and who is may send what it likes. The server can
leave agents out, and give any of them nothing. Identity keys that are accepted at first use are as
good as the transport was then: the safety number in the logs is for comparison by another way.
"""

from __future__ import annotations

import hashlib
import logging
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
from botorch_fed.privacy.hazmat import ckks, keys

logger = logging.getLogger(__name__)

Gathered = tuple[Mapping[str, bytes], ...]  # of every set-up phase so far: what `gather` made of it
Opener = Literal["server", "agents"]

IDENTITY = "identity"  # the name of an agent's identity key in its own store
FLOODED_SUMS = 1024  # the sums that the flooding is made for where nobody says how many there are
DISTANCE_BITS = 40  # the least: flooding hides all sums to a total variation of 2 to minus that

_Bytes = bytes | memoryview
_MAGIC = b"bofedch\x03"  # with the format version
# magic, kind, digest of channel and epoch, round, digest of sender, size and SHA-256 of the body
_HEADER = struct.Struct("<8sB32sQ16sQ32s")
# Kinds; set-up phase i is _SETUP + i.
_CONTRIBUTION, _TOTAL, _REQUEST, _SHARE, _KEY, _GATHERED, _FUSED, _SETUP = range(8)
_KINDS = (
    *("contribution", "sum", "request", "share", "joint key", "sum of key shares"),
    "sum with all shares",
)
_NOBODY = ""  # the sender of a sum
_MAX_ROUND = 2**63 - 1
_LEAST_NUMBERS = 64  # coefficients that travel: garbage passes as noise in each with chance 1/2
_COINS = 32
_HOLDS = 16  # bytes that stand for the group key that an agent has
_SEALED = keys.KEY_BYTES + keys.TAG_BYTES
_ANNOUNCED = 2 * keys.KEY_BYTES + _HOLDS  # identity, exchange and group key
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
        server_sees_contributions: Whether the server can read what one agent contributes.
    """

    grid: PublicGrid
    setup_phases: ClassVar[int] = 0
    open_phases: ClassVar[int] = 0
    server_sees_contributions: ClassVar[bool] = False

    @property
    def opened_by(self) -> Opener:
        """Who learns the sum: the server, which then tells all, or the agents, each for itself."""
        return "server"

    @property
    def most_sums(self) -> int | None:
        """How many sums an agent helps to open at most; None for no limit."""
        return None

    # ---- agents

    def prepare(
        self, phase: int, epoch: Epoch, me: str, gathered: Gathered, secrets: Secrets
    ) -> bytes:
        """One's own message of a set-up phase; the same again if asked again.

        Args:
            phase: Which phase, from 0.
            epoch: The epoch to prepare.
            me: One's own name in its roster.
            gathered: What `gather` made of the phases before.
            secrets: One's own store.
        """
        raise ProtocolError(f"{type(self).__name__} has no set-up phase, got phase {phase}.")

    def joint_key(
        self,
        epoch: Epoch,
        gathered: Gathered,
        *,
        me: str | None = None,
        secrets: Secrets | None = None,
    ) -> bytes:
        """What everybody encrypts with, from the messages of all set-up phases.

        Args:
            epoch: The epoch.
            gathered: What `gather` made of all phases, one mapping each.
            me: One's own name and
            secrets: the agent's own store: an agent passes both, and finds its
                messages unchanged.

        Returns:
            The key; empty where there is none.

        Raises:
            ProtocolError: A member of the roster is missing.
            MessageError: A message does not fit.
        """
        if gathered:
            raise MessageError(f"{type(self).__name__} has no set-up, got {len(gathered)} phases.")
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

    def check_prepared(
        self, payload: bytes, *, epoch: Epoch, sender: str, gathered: Gathered
    ) -> None:
        """Raise `MessageError` unless a sender's message of the next set-up phase fits.

        Args:
            payload: The message.
            epoch: The epoch.
            sender: Who delivers it.
            gathered: What `gather` made of the phases before.
        """
        raise MessageError(f"{type(self).__name__} has no set-up.")

    def gather(
        self, messages: Mapping[str, bytes], *, epoch: Epoch, gathered: Gathered
    ) -> Mapping[str, bytes]:
        """What all agents are told of the next set-up phase, from everybody's messages.

        Args:
            messages: The messages by sender, checked.
            epoch: The epoch.
            gathered: What `gather` made of the phases before.
        """
        return dict(messages)

    def identities_of(self, announced: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """The identity keys in checked messages of the first set-up phase."""
        return {}

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

    def fuse(self, total: bytes, shares: Mapping[str, bytes], *, epoch: Epoch, round: int) -> bytes:
        """A sum with all shares in its opening, for the agents to open.

        Raises:
            MessageError: A share does not fit.
            ProtocolError: A share is missing.
        """
        raise ProtocolError(f"{type(self).__name__} opens sums without shares.")

    # ---- whoever opens

    def can_open(self, epoch: Epoch, me: str, secrets: Secrets) -> bool:
        """Whether an agent has the key to sums of an epoch, which need not be its own."""
        return True

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
            total: What `add` returned; without shares, where there are some, what `fuse` did.
            shares: Everybody's shares; empty where there are none.
            epoch: The epoch.
            round: Which sum.
            secrets: One's own store, where agents open.

        Returns:
            A `dim` tensor, int64, exact.
        """

    def most_bytes(self, num_agents: int) -> int:
        """The bytes of the longest message of an agent to a server, with a roster of so many."""
        return _HEADER.size + 8 * self.grid.dim

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

    def __post_init__(self) -> None:
        ckks.check_public(self.context)

    @property
    def opened_by(self) -> Opener:
        """See `Channel`."""
        return "agents"

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

    def most_bytes(self, num_agents: int) -> int:
        """See `Channel`."""
        return _HEADER.size + len(self._sizes) * (_PART.size + ckks.VECTOR_BYTES)

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
    """Multiparty CKKS on SEAL under pairwise masks: a sum opens once, with a share of every agent.

    See the module for the protocol and for who must be trusted with what, and
    `botorch_fed.privacy.hazmat.ckks` for the arithmetic and its security.

    Attributes:
        grid: The public grid.
        flooding_bits: How much larger the noise in a share is than what it hides; default what
            `sums` need.
        sums: How many sums an agent helps to open at most; flooding hides all of them to a total
            variation of `2^-40` or less.
        identities: The agents' public identity keys in hexadecimal digits, by name (`identity`).
            Without them an agent takes the first key that it is told of each other one.
        opened_by: Who learns the sum. By default the server does not.

    Raises:
        InputDataError: Less flooding, or no ring with 128 bits of security holds the sums.

    Example:
        >>> channel = ThresholdCKKSChannel(PublicGrid(dim=560, bound=1e4, num_agents=10), sums=100)
        >>> channel.ring
        Ring(degree=8192, low=2, high=2, shift=23)
    """

    grid: PublicGrid
    flooding_bits: int | None = None
    sums: int = FLOODED_SUMS
    identities: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    opened_by: Opener = "agents"
    setup_phases: ClassVar[int] = 2
    open_phases: ClassVar[int] = 1

    def __post_init__(self) -> None:
        bits, sums, least = self.flooding_bits, self.sums, self._least_flooding
        if isinstance(sums, bool) or not isinstance(sums, int) or sums < 1:
            raise InputDataError(f"Expected sums >= 1, how many are opened, got {sums!r}.")
        if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int)):
            raise InputDataError(f"flooding_bits is a whole number, got {bits!r}.")
        if bits is not None and bits < least:
            raise InputDataError(
                f"Flooding of {bits} bits hides {sums} sums of {self._count} numbers to a total "
                f"variation of 2^-{ckks.distance_bits(bits, sums, self._count):.1f}, 2^-"
                f"{DISTANCE_BITS} is the most: shares with less give the secret keys away. Leave "
                f"flooding_bits out, or write flooding_bits = {least}."
            )
        check_identities(self.identities)
        _ = self.ring

    @property
    def _least_flooding(self) -> int:
        return ckks.flooding_for(DISTANCE_BITS, max(int(self.sums), 1), self._count)

    @property
    def flooding(self) -> int:
        """The bits of the flooding."""
        return self._least_flooding if self.flooding_bits is None else self.flooding_bits

    @property
    def distance_bits(self) -> float:
        """What all shares tell beside the sums: a total variation of 2 to minus that."""
        return ckks.distance_bits(self.flooding, self.sums, self._count)

    @property
    def most_sums(self) -> int | None:
        """See `Channel`."""
        return self.sums

    @cached_property
    def ring(self) -> ckks.Ring:
        """The parameters, chosen for the grid, the number of agents and the flooding."""
        largest = self.grid.num_agents * self.grid.largest
        return ckks.Ring.choose(largest, self.grid.num_agents, self.flooding)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that stand for the channel's public settings."""
        named = [part.encode() for pair in sorted(self.identities) for part in pair]
        return _hash(b"channel", repr(self).encode(), *named)

    # ---- agents

    def prepare(
        self, phase: int, epoch: Epoch, me: str, gathered: Gathered, secrets: Secrets
    ) -> bytes:
        """See `Channel`: an announcement, then a key share, and from one agent the group key."""
        self._check_epoch(epoch)
        _check_member(me, epoch)
        if phase not in range(self.setup_phases) or len(gathered) != phase:
            raise ProtocolError(
                f"Set-up has phases 0 and 1, each after the messages of those before; got phase "
                f"{phase} and {len(gathered)} before."
            )
        if phase == 0:
            if secrets.get(self.handle(epoch, me)) is None:
                self.forget(epoch, me, secrets)  # what a crash in `forget` has left
                secrets.put_new(self.handle(epoch, me), self._new_record(epoch, secrets))
            own = self._announcement(epoch, me, secrets)
        else:
            own = self._key_message(
                epoch, me, self._agreed(epoch, me, gathered[0], secrets), secrets
            )
        return self._frame(_SETUP + phase, own, epoch, 0, me)

    def joint_key(
        self,
        epoch: Epoch,
        gathered: Gathered,
        *,
        me: str | None = None,
        secrets: Secrets | None = None,
    ) -> bytes:
        """See `Channel`: nobody can check the sum of the key shares, nor need anybody."""
        self._check_epoch(epoch)
        if len(gathered) != self.setup_phases:
            raise ProtocolError(f"A joint key needs 2 set-up phases, got {len(gathered)}.")
        if me is None or secrets is None:
            announced = self._announced(epoch, gathered[0])
        else:
            _check_member(me, epoch)
            announced = self._agreed(epoch, me, gathered[0], secrets)
        if set(gathered[1]) != {_NOBODY}:
            raise MessageError("Expected one sum of key shares, from the server.")
        body = self._body(gathered[1][_NOBODY], _GATHERED, epoch, 0, _NOBODY)
        giver = self._giver(announced)
        if len(body) != self._key_bytes + self._sealed_bytes(epoch):
            raise MessageError(f"A sum of key shares has other than {len(body):,} bytes.")
        self._words(body[: self._key_bytes], 1, key_level=True)
        if me is not None and secrets is not None and self._masked and me != giver:
            sealed = body[self._key_bytes :]
            self._take_group_key(epoch, me, giver, announced, bytes(sealed), secrets)
        joint = bytes(body[: self._key_bytes])
        return self._frame(_KEY, self._transcript(epoch, announced) + joint, epoch, 0, _NOBODY)

    def protect(
        self, integers: Tensor, *, epoch: Epoch, round: int, me: str, key: bytes, secrets: Secrets
    ) -> bytes:
        """See `Channel`: under a fresh mask of the agent's own, which `share` takes away."""
        self._check_epoch(epoch)
        _check_member(me, epoch)
        self.grid.check_integers(integers)
        body = bytes(self._body(key, _KEY, epoch, 0, _NOBODY))
        transcript = body[:32]
        if secrets.get(f"{self.handle(epoch, me)}-{round}") is not None:
            raise ProtocolError(f"The sum of round {round} was opened: it takes nothing more.")
        encryptor = ckks.encryptor(self.ring, _common_seed(transcript), body[32:])
        c0, c1 = ckks.encrypt_integers(self.ring, integers.numpy(), encryptor, self._count)
        masks = [self._new_own_key(epoch, me, round, secrets)]
        if self._gives(epoch, me, secrets):
            masks.append(self._sum_key(epoch, transcript, round, secrets))
        rows = ckks.add_masks(self.ring, c0, masks, [])
        data = transcript + ckks.words_to_bytes(rows) + ckks.words_to_bytes(c1)
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
            own = secrets.get(self._own_key_name(epoch, me, round))
            if own is None:
                raise ProtocolError(f"This agent has nothing in the sum of round {round}.")
            # With its own mask: two shares under two of them would open a single agent's changes.
            answered = digest + own + os.urandom(_COINS)
            secrets.put_new(name, answered)
        if len(answered) != 32 + keys.KEY_BYTES + _COINS:
            raise ProtocolError("The record of this opening is damaged: start a new epoch.")
        if answered[:32] != digest:
            raise ProtocolError(
                f"Another sum of round {round} was answered before: a second one could tell what a "
                "single agent contributed."
            )
        std = ckks.flooding_std(self.ring.degree, self.grid.num_agents, self.flooding)
        own, coins = answered[32 : 32 + keys.KEY_BYTES], answered[32 + keys.KEY_BYTES :]
        flooding = ckks.flooding_words(self.ring, std, self._count, coins)
        words = ckks.partial_decryption(self.ring, c1, secret, flooding)
        # With the sum that is opened in their keys: shares of different ones do not add up.
        plus, minus = self._pair_keys(epoch, me, secrets, digest, round)
        rows = ckks.add_masks(self.ring, words, plus, [*minus, own])
        return self._frame(_SHARE, digest + ckks.words_to_bytes(rows), epoch, round, me)

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

    def most_bytes(self, num_agents: int) -> int:
        """See `Channel`: of an announcement, a key share and a contribution."""
        announcement = _ANNOUNCED + keys.SIGNATURE_BYTES
        key = self._key_bytes + (_SEALED * num_agents if self._masked else 0)
        contribution = 32 + self._row_bytes + self._polynomial_bytes
        return _HEADER.size + max(announcement, key, contribution)

    # ---- the server

    def check_prepared(
        self, payload: bytes, *, epoch: Epoch, sender: str, gathered: Gathered
    ) -> None:
        """See `Channel`: an announcement needs its sender's signature."""
        self._check_epoch(epoch)
        phase = len(gathered)
        if phase not in range(self.setup_phases):
            raise MessageError(f"Set-up has phases 0 and 1, got phase {phase}.")
        body = self._body(payload, _SETUP + phase, epoch, 0, sender)
        if phase == 0:
            self._check_announcement(epoch, sender, body, None)
            keys.check_exchange(bytes(body[keys.KEY_BYTES : 2 * keys.KEY_BYTES]))
            return
        giver = self._giver(self._announced(epoch, gathered[0], verify=False))
        expected = self._key_bytes + (self._sealed_bytes(epoch) if sender == giver else 0)
        if len(body) != expected:
            raise MessageError(f"A key share has {expected:,} bytes, got {len(body):,}.")
        self._words(body[: self._key_bytes], 1, key_level=True)

    def gather(
        self, messages: Mapping[str, bytes], *, epoch: Epoch, gathered: Gathered
    ) -> Mapping[str, bytes]:
        """See `Channel`: all announcements; then the sum of the key shares, and the group key."""
        self._check_epoch(epoch)
        phase = len(gathered)
        _check_complete(messages, epoch, f"message of set-up phase {phase}")
        bodies = self._bodies(messages, _SETUP + phase, epoch, 0)
        if phase == 0:
            return dict(messages)
        giver = self._giver(self._announced(epoch, gathered[0], verify=False))
        shares = [
            self._words(body[: self._key_bytes], 1, key_level=True) for body in bodies.values()
        ]
        joint = ckks.words_to_bytes(ckks.sum_words(self.ring, shares))
        sealed = bytes(bodies[giver][self._key_bytes :])
        return {_NOBODY: self._frame(_GATHERED, joint + sealed, epoch, 0, _NOBODY)}

    def identities_of(self, announced: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """See `Channel`."""
        start, end = _HEADER.size, _HEADER.size + keys.KEY_BYTES
        return {name: bytes(data[start:end]) for name, data in announced.items()}

    def check(
        self, payload: bytes, *, epoch: Epoch, round: int, sender: str, key: bytes = b""
    ) -> None:
        """See `Channel`."""
        body = self._body(payload, _CONTRIBUTION, epoch, round, sender)
        if key and body[:32] != key[_HEADER.size : _HEADER.size + 32]:
            raise MessageError("A contribution belongs to another set-up of the joint key.")
        self._parts(body)

    def add(self, payloads: Mapping[str, bytes], *, epoch: Epoch, round: int) -> bytes:
        """See `Channel`; all of the roster."""
        self._check_epoch(epoch)
        _check_complete(payloads, epoch, "contribution")
        bodies = self._bodies(payloads, _CONTRIBUTION, epoch, round).values()
        transcripts = {bytes(body[:32]) for body in bodies}
        if len(transcripts) != 1:
            raise MessageError("Contributions belong to different set-ups of the joint key.")
        parts = [self._parts(body) for body in bodies]
        c0 = ckks.words_to_bytes(ckks.sum_words(self.ring, [first for first, _ in parts]))
        c1 = ckks.words_to_bytes(ckks.sum_words(self.ring, [second for _, second in parts]))
        return self._frame(_TOTAL, transcripts.pop() + c0 + c1, epoch, round, _NOBODY)

    def request(self, total: bytes) -> bytes:
        """See `Channel`: the second part of the sum."""
        start = _HEADER.size + 32 + self._row_bytes
        if len(total) != start + self._polynomial_bytes or total[8] != _TOTAL:
            raise MessageError("No sum of this channel: another size or kind.")
        fields = list(_HEADER.unpack_from(total))
        body = memoryview(total)[start:]
        fields[1], fields[5], fields[6] = _REQUEST, len(body), hashlib.sha256(body).digest()
        return _HEADER.pack(*fields) + body

    def check_share(
        self, payload: bytes, *, epoch: Epoch, round: int, sender: str, total: bytes | None = None
    ) -> None:
        """See `Channel`."""
        digest = None if total is None else self._requested(total, epoch, round)
        self._share(self._body(payload, _SHARE, epoch, round, sender), digest)

    def fuse(self, total: bytes, shares: Mapping[str, bytes], *, epoch: Epoch, round: int) -> bytes:
        """See `Channel`; all shares of the roster, none of which says anything alone."""
        self._check_epoch(epoch)
        _check_complete(shares, epoch, "share")
        return self._fused(total, shares, epoch, round)

    # ---- whoever opens

    def can_open(self, epoch: Epoch, me: str, secrets: Secrets) -> bool:
        """See `Channel`."""
        return not self._masked or secrets.get(self._group_name(epoch)) is not None

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
        fused = self.fuse(total, shares, epoch=epoch, round=round) if shares else total
        integers, noise = self._decoded(fused, epoch, round, secrets)
        dim = self.grid.dim
        if not float(np.abs(noise).max()) < _LARGEST_NOISE or integers[dim:].any():
            raise _no_sum()
        return _checked_sum(torch.from_numpy(integers[:dim]), self.grid, len(epoch.roster))

    def _decoded(
        self, fused: bytes, epoch: Epoch, round: int, secrets: Secrets | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Integers and their noise in steps, of all coefficients that travel."""
        body = self._body(fused, _FUSED, epoch, round, _NOBODY)
        transcript, rows = bytes(body[:32]), self._rows(body[32:]).astype(np.uint64)
        if self._masked:
            if secrets is None:
                raise ProtocolError("Agents open sums of this channel, the server cannot.")
            key = self._sum_key(epoch, transcript, round, secrets)
            rows = ckks.add_masks(self.ring, rows, [], [key])
        return ckks.decode(self.ring, rows)

    def _fused(self, total: bytes, shares: Mapping[str, bytes], epoch: Epoch, round: int) -> bytes:
        """The first part of the sum with shares, whoever is missing."""
        digest = self._requested(total, epoch, round)
        body = self._body(total, _TOTAL, epoch, round, _NOBODY)
        terms = [self._rows(body[32 : 32 + self._row_bytes])]
        for share in self._bodies(shares, _SHARE, epoch, round).values():
            terms.append(self._share(share, digest))
        rows = ckks.words_to_bytes(ckks.sum_words(self.ring, terms))
        return self._frame(_FUSED, bytes(body[:32]) + rows, epoch, round, _NOBODY)

    # ---- masks

    @property
    def _masked(self) -> bool:
        """Whether what all shares open is masked by a key that the agents have."""
        return self.opened_by == "agents"

    def _pair_keys(
        self, epoch: Epoch, me: str, secrets: Secrets, digest: bytes, round: int
    ) -> tuple[list[bytes], list[bytes]]:
        """Keys of masks on a share, to add and to take away: of a pair each does one of the two."""
        record = secrets.get(f"{self.handle(epoch, me)}-pairs")
        others = [name for name in sorted(epoch.roster) if name != me]
        if record is None or len(record) != keys.KEY_BYTES * len(others):
            raise ProtocolError("There are no keys of this epoch in the store: start a new one.")

        plus: list[bytes] = []
        minus: list[bytes] = []
        for place, other in enumerate(others):
            pair = record[keys.KEY_BYTES * place : keys.KEY_BYTES * (place + 1)]
            key = keys.derived(pair, b"share" + digest, round.to_bytes(8, "little"))
            (plus if me < other else minus).append(key)
        return plus, minus

    def _own_key_name(self, epoch: Epoch, me: str, round: int) -> str:
        return f"{self.handle(epoch, me)}-own{round}"

    def _new_own_key(self, epoch: Epoch, me: str, round: int, secrets: Secrets) -> bytes:
        """The key of the agent's own mask; those of contributions before are deleted."""
        start = f"{self.handle(epoch, me)}-own"
        for name in secrets.names():
            if name.startswith(start):
                secrets.delete(name)
        key = os.urandom(keys.KEY_BYTES)
        secrets.put_new(self._own_key_name(epoch, me, round), key)
        return key

    def _gives(self, epoch: Epoch, me: str, secrets: Secrets) -> bool:
        """Whether an agent gives the key to the sums of an epoch, and masks them."""
        settled = secrets.get(f"{self.handle(epoch, me)}-heard")
        return settled is not None and settled[32:] == b"\1"

    def _group_name(self, epoch: Epoch) -> str:
        """The name of the key that the agents of a run have in common."""
        return f"he-{_hash(b'run', epoch.run.encode()).hex()[:40]}-group"

    def _sum_key(self, epoch: Epoch, transcript: bytes, round: int, secrets: Secrets) -> bytes:
        """The key of the mask on a sum."""
        key = secrets.get(self._group_name(epoch))
        if key is None:
            raise ProtocolError(
                "The key to the sums of this run is not in the store: an agent has it from the "
                "first joint key of which it has a part."
            )
        return keys.derived(key, b"sum", transcript, round.to_bytes(8, "little"))

    # ---- set-up

    def _new_record(self, epoch: Epoch, secrets: Secrets) -> bytes:
        """One's own secrets of an epoch as they are stored, and which group key one has."""
        parts = (ckks.words_to_bytes(part) for part in ckks.generate_secret(self.ring))
        held = secrets.get(self._group_name(epoch))
        holds = bytes(_HOLDS) if held is None else _hash(b"group", held)[:_HOLDS]
        return b"".join([self._address(epoch), keys.new_exchange(), holds, *parts])

    @cached_property
    def _listed(self) -> dict[str, str]:
        """The identity keys by name."""
        return dict(self.identities)

    def _announcement(self, epoch: Epoch, me: str, secrets: Secrets) -> bytes:
        """One's own identity, key of an exchange, group key and signature."""
        record, private = self._record(epoch, me, secrets), _identity(secrets)
        own = keys.public_identity(private)
        expected = self._listed.get(me)
        if expected is not None and expected != own.hex():
            raise ProtocolError(
                f"The identity key in this store is {own.hex()}, the study says {expected} for "
                f"agent {me!r}: restore the store, or have the study changed everywhere."
            )
        exchange = keys.public_exchange(record[32 : 32 + keys.KEY_BYTES])
        holds = record[32 + keys.KEY_BYTES :][:_HOLDS]
        said = own + exchange + holds
        return said + keys.sign(private, self._signed_text(epoch, me, said))

    def _signed_text(self, epoch: Epoch, name: str, said: _Bytes) -> bytes:
        return _hash(b"announcement", self._address(epoch), name.encode(), said)

    def _check_announcement(
        self, epoch: Epoch, name: str, body: memoryview, identity: bytes | None
    ) -> None:
        if len(body) != _ANNOUNCED + keys.SIGNATURE_BYTES:
            raise MessageError(f"An announcement has other than {len(body)} bytes.")
        public = bytes(body[: keys.KEY_BYTES])
        if self.identities:
            identity = bytes.fromhex(self._listed.get(name, ""))
        if identity is not None and identity != public:
            raise MessageError(f"Agent {name!r} has another identity key than the known one.")
        text = self._signed_text(epoch, name, body[:_ANNOUNCED])
        if not keys.is_signed(public, bytes(body[_ANNOUNCED:]), text):
            raise MessageError(f"The announcement of agent {name!r} is not signed by its key.")

    def _announced(
        self,
        epoch: Epoch,
        messages: Mapping[str, bytes],
        known: Mapping[bytes, bytes] | None = None,
        *,
        verify: bool = True,
    ) -> dict[str, memoryview]:
        """The bodies of all announcements, with valid signatures, by sorted names."""
        _check_complete(messages, epoch, "announcement")
        bodies = self._bodies(messages, _SETUP, epoch, 0)
        known = {} if known is None else known
        for name, body in bodies.items():
            if verify:
                self._check_announcement(epoch, name, body, known.get(_name_digest(name)))
            elif len(body) != _ANNOUNCED + keys.SIGNATURE_BYTES:
                raise MessageError(f"An announcement has other than {len(body)} bytes.")
        return {name: bodies[name] for name in sorted(bodies)}

    def _transcript(self, epoch: Epoch, announced: Mapping[str, memoryview]) -> bytes:
        named: list[_Bytes] = []
        for name in sorted(announced):
            named += [name.encode(), announced[name][:_ANNOUNCED]]
        return _hash(b"transcript", self._address(epoch), *named)

    def _giver(self, announced: Mapping[str, memoryview]) -> str:
        """Who sends the group key: the first that has one, or the first of all, who makes it."""
        names = sorted(announced)
        start = 2 * keys.KEY_BYTES
        having = (n for n in names if any(announced[n][start : start + _HOLDS]))
        return next(having, names[0])

    def _agreed(
        self, epoch: Epoch, me: str, messages: Mapping[str, bytes], secrets: Secrets
    ) -> dict[str, memoryview]:
        """All announcements, the first that came, the agent's unchanged; the keys are stored."""
        record = self._record(epoch, me, secrets)
        announced = self._announced(epoch, messages, verify=False)
        transcript = self._transcript(epoch, announced)
        settled = f"{self.handle(epoch, me)}-heard"
        before = secrets.get(settled)
        gives = bytes([self._masked and self._giver(announced) == me])
        if before is None:
            self._announced(epoch, messages, self._known(epoch, secrets))
            if bytes(announced[me]) != self._announcement(epoch, me, secrets):
                raise MessageError("One's own announcement was changed.")
            private = record[32 : 32 + keys.KEY_BYTES]
            pairs = [
                self._pair_key(private, me, name, body, transcript)
                for name, body in announced.items()
                if name != me
            ]
            self._remember(epoch, messages, secrets)
            name = f"{self.handle(epoch, me)}-pairs"
            secrets.delete(name)  # of a process that ended here
            secrets.put_new(name, b"".join(pairs))
            secrets.put_new(settled, transcript + gives)
        elif before != transcript + gives:
            raise ProtocolError(
                "Other announcements of this epoch were answered before: start a new epoch."
            )
        return announced

    def _pair_key(
        self, private: bytes, me: str, other: str, body: memoryview, transcript: bytes
    ) -> bytes:
        public = bytes(body[keys.KEY_BYTES : 2 * keys.KEY_BYTES])
        purpose = _hash(b"pair", *(name.encode() for name in sorted((me, other))))
        return keys.pair_key(private, public, salt=transcript, purpose=purpose)

    def _known(self, epoch: Epoch, secrets: Secrets) -> dict[bytes, bytes]:
        """The identity keys of first use, by the digests of names."""
        if self.identities:
            return {}
        known: dict[bytes, bytes] = {}
        for name in secrets.names():
            if name.startswith(self._known_name(epoch)):
                data = secrets.get(name) or b""
                size = 16 + keys.KEY_BYTES
                for start in range(0, len(data) - size + 1, size):
                    known[data[start : start + 16]] = data[start + 16 : start + size]
        return known

    def _known_name(self, epoch: Epoch) -> str:
        return f"he-{_hash(b'run', epoch.run.encode()).hex()[:40]}-known-"

    def _remember(self, epoch: Epoch, messages: Mapping[str, bytes], secrets: Secrets) -> None:
        """Keep the identity keys of names that are new."""
        if self.identities:
            return
        known, identities = self._known(epoch, secrets), self.identities_of(messages)
        new = {name: key for name, key in identities.items() if _name_digest(name) not in known}
        if not new:
            return
        pairs = (_name_digest(name) + new[name] for name in sorted(new))
        secrets.put_new(f"{self._known_name(epoch)}{epoch.number}", b"".join(pairs))
        number = safety_number({name: key.hex() for name, key in identities.items()})
        logger.info(
            "identity keys of %d agents were accepted at first use; safety number, to be compared "
            "by another way: %s",
            len(new),
            number,
        )

    def _key_message(
        self, epoch: Epoch, me: str, announced: Mapping[str, memoryview], secrets: Secrets
    ) -> bytes:
        """One's own key share, and from who gives it the group key for each of the others."""
        transcript = self._transcript(epoch, announced)
        secret, error = self._secret(epoch, me, secrets)
        common = ckks.uniform_words(self.ring, _common_seed(transcript))
        share = ckks.words_to_bytes(ckks.key_share(self.ring, common, secret, error))
        if not self._masked or self._giver(announced) != me:
            return share
        name = self._group_name(epoch)
        group = secrets.get(name)
        if group is None:
            if any(announced[me][2 * keys.KEY_BYTES : _ANNOUNCED]):
                raise ProtocolError("The key to the sums of this run was lost from the store.")
            group = os.urandom(keys.KEY_BYTES)
            secrets.put_new(name, group)
        sealed, digest = f"{self.handle(epoch, me)}-sealed", _hash(b"sealed", group)
        if secrets.get(sealed) is None:
            secrets.put_new(sealed, digest)
        if secrets.get(sealed) != digest:  # the keys that seal it must seal no second one
            raise ProtocolError("Another key to sums was given in this epoch: start a new epoch.")
        pairs = secrets.get(f"{self.handle(epoch, me)}-pairs") or b""
        return share + b"".join(
            keys.seal(keys.derived(pairs[start : start + 32], b"group"), group, transcript)
            for start in range(0, len(pairs), 32)
        )

    def _take_group_key(
        self,
        epoch: Epoch,
        me: str,
        giver: str,
        announced: Mapping[str, memoryview],
        sealed: bytes,
        secrets: Secrets,
    ) -> None:
        """Read the group key and keep it, in the place of another one.

        Without it an agent adds to sums all the same, and cannot read them: who gives the key must
        not be able to have others left out.
        """
        start = _SEALED * [name for name in announced if name != giver].index(me)
        place = 32 * [name for name in announced if name != me].index(giver)
        pairs = secrets.get(f"{self.handle(epoch, me)}-pairs") or b""
        key = keys.derived(pairs[place : place + 32], b"group")
        text = sealed[start : start + _SEALED]
        try:
            group = keys.unseal(key, text, self._transcript(epoch, announced))
        except MessageError:
            logger.warning(
                "agent %r has no key to sums of epoch %d from %r", me, epoch.number, giver
            )
            return
        name = self._group_name(epoch)
        if secrets.get(name) != group:
            secrets.delete(name)
            secrets.put_new(name, group)

    # ---- parts

    @property
    def _count(self) -> int:
        """How many coefficients travel."""
        return max(self.grid.dim, _LEAST_NUMBERS)

    @property
    def _chunks(self) -> int:
        return self.ring.polynomials(self._count)

    @property
    def _row_bytes(self) -> int:
        """The bytes of the coefficients that travel."""
        return 4 * self.ring.num_primes * self._count

    @property
    def _polynomial_bytes(self) -> int:
        """The bytes of the second part of a ciphertext, all chunks together."""
        return 4 * self._chunks * self.ring.num_primes * self.ring.degree

    @property
    def _key_bytes(self) -> int:
        return 4 * len(self.ring.primes) * self.ring.degree

    def _sealed_bytes(self, epoch: Epoch) -> int:
        return _SEALED * (len(epoch.roster) - 1) if self._masked else 0

    def _check_epoch(self, epoch: Epoch) -> None:
        if not 2 <= len(epoch.roster) <= self.grid.num_agents:
            raise ProtocolError(
                f"A roster has 2 to {self.grid.num_agents} agents, got {len(epoch.roster)}: the "
                "sum of one is its contribution, and the grid holds no more."
            )

    def _words(self, body: _Bytes, polynomials: int, *, key_level: bool = False) -> ckks.Received:
        primes = self.ring.num_primes + key_level
        return ckks.words_from_bytes(self.ring, body, polynomials, primes)

    def _rows(self, body: _Bytes) -> ckks.Received:
        return ckks.rows_from_bytes(self.ring, body, self._count)

    def _parts(self, body: memoryview) -> tuple[ckks.Received, ckks.Received]:
        """Both parts of a contribution."""
        end = 32 + self._row_bytes
        return self._rows(body[32:end]), self._words(body[end:], self._chunks)

    def _requested(self, total: bytes, epoch: Epoch, round: int) -> bytes:
        """The digest of what agents are sent of a sum."""
        body = self._body(total, _TOTAL, epoch, round, _NOBODY)
        return hashlib.sha256(body[32 + self._row_bytes :]).digest()

    def _share(self, body: memoryview, digest: bytes | None) -> ckks.Received:
        if digest is not None and body[:32] != digest:
            raise MessageError("A share of another sum.")
        return self._rows(body[32:])

    def _record(self, epoch: Epoch, me: str, secrets: Secrets) -> bytes:
        """One's own secrets: address, exchange, group key's digest, secret, negative error."""
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
            return self._words(record[32 + keys.KEY_BYTES + _HOLDS :], 2, key_level=True)
        except MessageError:
            raise ProtocolError("The secret of this epoch is damaged: start a new one.") from None


# ------------------------------------------------------------------ identities


def identity(secrets: Secrets) -> str:
    """An agent's public identity key in hexadecimal digits; it is made when it is first wanted."""
    return keys.public_identity(_identity(secrets)).hex()


def safety_number(identities: Mapping[str, str]) -> str:
    """Sixty digits that stand for all identity keys, for comparison by another way, e.g. by phone.

    Args:
        identities: Public keys in hexadecimal digits, by name.
    """
    named = [part.encode() for name in sorted(identities) for part in (name, identities[name])]
    digest = hashlib.sha512(_hash(b"safety number", *named)).digest()
    digits = f"{int.from_bytes(digest, 'little') % 10**60:060d}"
    return " ".join(digits[start : start + 5] for start in range(0, 60, 5))


def check_identities(identities: Sequence[tuple[str, str]]) -> None:
    """Raise `InputDataError` unless every name has one key of its own."""
    for name, key in identities:
        good = isinstance(key, str) and len(key) == 2 * keys.KEY_BYTES
        if not good or set(key) - set("0123456789abcdef"):
            raise InputDataError(
                f"An identity key has {2 * keys.KEY_BYTES} digits of 0-9 and a-f, got {key!r} for "
                f"agent {name!r}."
            )
    for what, found in zip(("name", "key"), zip(*identities, strict=True), strict=False):
        if len(set(found)) < len(found):
            raise InputDataError(f"Identities give one {what} twice: every agent has its own.")


def _identity(secrets: Secrets) -> bytes:
    private = secrets.get(IDENTITY)
    if private is None:
        private = keys.new_identity()
        secrets.put_new(IDENTITY, private)
    if len(private) != keys.KEY_BYTES:
        raise ProtocolError("The identity key in the store is damaged: restore it from a copy.")
    return private


def _common_seed(transcript: bytes) -> bytes:
    return _hash(b"common polynomial", transcript)


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
