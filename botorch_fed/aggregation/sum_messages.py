r"""What travels, and what both sides keep, where messages are added up: see `secure_sum`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.federation.base import MAX_NAME, AgentId
from botorch_fed.federation.terms import Order
from botorch_fed.privacy import Ledger
from botorch_fed.search.releases import Sum

MAX_KEY_BYTES = 2**24
MAX_ROUNDS = 2 * 10**6
MIN_TOGETHER = 2  # agents under a joint key: a single agent would open its own contribution
MAX_EPOCH = 2**63
EPOCHS_PER_AGENT = 8  # at most: each may be lost, be taken back, and be lost again
BACKLOG = 16  # sums that the hub keeps for agents that do not answer,
BACKLOG_BYTES = 2**23  # and how large they are together


# ------------------------------------------------------------------ from the hub


@dataclass(frozen=True)
class SumSetup:
    """The channel that the hub uses: it depends on the roster and on keys, and is no setting.

    Attributes:
        run: A name that no other run with the same stores of keys has.
        channel: The name of the channel, and
        fingerprint: a hash of its settings.
    """

    run: str
    channel: str
    fingerprint: str

    def __post_init__(self) -> None:
        if max(map(len, (self.run, self.channel, self.fingerprint))) > MAX_NAME:
            raise InputDataError(f"Names have at most {MAX_NAME} characters.")


@dataclass(frozen=True)
class SumOrder(Order):
    """What an agent is to do.

    Attributes:
        step: Whether it is asked for a part of the joint key, a contribution to a sum (with an
            evaluation or without), or a share in opening one.
        epoch: The number of the epoch.
        roster: Who takes part in it.
        phase: Of the set-up, for a key.
    """

    step: Literal["key", "sum", "share"]
    epoch: int
    roster: tuple[AgentId, ...]
    phase: int = 0


@dataclass(frozen=True, eq=False)
class Keys:
    """What the hub has gathered in the set-up of an epoch, one mapping per phase."""

    epoch: int
    messages: tuple[Mapping[AgentId, bytes], ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Sealed:
    """A sum that is still encrypted; `members` and `previous` as in `Opened`."""

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


# ------------------------------------------------------------------ from agents


@dataclass(frozen=True)
class KeyMessage:
    """A part of a joint key; None if the agent has lost what it needs."""

    data: bytes | None = field(repr=False)


@dataclass(frozen=True)
class DecryptionShare:
    """A share in opening a sum; None if the agent has lost its key."""

    data: bytes | None = field(repr=False)


@dataclass(frozen=True)
class Upload:
    """A protected contribution, and whether the agent wants the sum for its next query.

    `able` is for who is not on the roster: whether it could contribute if it were taken back in.
    `read` is whether it has the key to the sums that it was sent.
    """

    data: bytes | None = field(repr=False)
    wanted: bool
    able: bool = True
    read: bool = True


Reply = KeyMessage | DecryptionShare | Upload


# ------------------------------------------------------------------ what both sides keep


@dataclass(frozen=True, eq=False)
class SumMemory:
    """What a site keeps.

    Attributes:
        order: The last order.
        queried_t: The last round in which it was to evaluate; -1 before the first.
        newest: The newest sum that it could read, for a search that needs no other.
        read_t: For a search that reads every sum, the round of the last one that it has received
            after all those before; -1 before the first.
        drawn: The last contribution on the grid, noise included, and
        drawn_t: its round.
        draws: How many contributions it has made.
        ledger: What this site has paid; None before it has paid anything.
        shared_t: The last round whose sum it has helped to open; -1 before the first.
        shared: How many sums it has helped to open.
    """

    order: SumOrder | None
    queried_t: int
    newest: Sum | None = field(repr=False)
    read_t: int
    drawn: Tensor = field(repr=False)
    drawn_t: int
    draws: int
    ledger: Ledger | None
    shared_t: int = -1
    shared: int = 0


@dataclass(frozen=True, eq=False)
class SumState:
    """What the hub keeps.

    Attributes:
        t: The round.
        stage: What is asked next. In ``"query"`` the active agents evaluate and the others
            contribute what they have, in ``"resend"`` nobody evaluates.
        epoch: The number of the epoch.
        roster: Who takes part in it; empty when sums are over.
        keys: What was gathered in its set-up so far.
        identities: The identity keys that agents have announced.
        interrupted: Whether the set-up interrupted a round.
        closed: The sum that is to be opened together.
        last: The newest sum; sealed if agents open it themselves.
        missed: Earlier sums that an agent may not have read.
        reached: Where every sum must be read, the round of the newest one that each agent is known
            to have.
        lost: Who was left out of an epoch for not answering, and is out still.
        back: Who answered the last query, is able to contribute, and is not on the roster.
        returned: Who was lost and has been taken back in: once lost again, it is not.
        sums: How many sums were opened.
        signal: The signal-to-noise ratio of every noisy sum that the hub has opened, as the sum
            itself shows it.
        asked: How often contributions were asked for.
        rekeys: How many epochs followed the first.
        rounds: After how many queries of each agent the run ended when the round was asked.
        ledger: What noise at the hub has cost.
    """

    t: int
    stage: Literal["key", "query", "resend", "share"]
    epoch: int
    roster: tuple[AgentId, ...]
    keys: tuple[Mapping[AgentId, bytes], ...] = field(repr=False)
    identities: Mapping[AgentId, bytes] = field(repr=False)
    interrupted: bool
    closed: Sealed | None
    last: Opened | Sealed | None
    missed: tuple[Opened | Sealed, ...]
    reached: Mapping[AgentId, int]
    lost: tuple[AgentId, ...]
    back: tuple[AgentId, ...]
    returned: tuple[AgentId, ...]
    sums: int
    signal: tuple[float, ...]
    asked: int
    rekeys: int
    rounds: int
    ledger: Ledger | None
