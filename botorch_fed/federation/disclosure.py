r"""Readers of messages and cost of privacy, for plans, reports, the CLI and documentation.

::

    Row      one kind of message: sender, content, readers, and what the content reveals
    Sees     all rows of a study, the data that stay with an agent, the trusted parties, limits
    Price    the guarantee of a whole run, its mechanism, its payments, and the payer

A server has `sees` and `price`, computed from its settings before any evaluation; a study has the
methods ``sees(space, names)`` and ``price(space, names)``. `FRAMES` are the frames of all
protocols. `Price.spent` composes the payments of a state or a log.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args, get_type_hints

from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.privacy.accounting import (
    Adjacency,
    Entry,
    Event,
    Guarantee,
    Ledger,
    Unit,
    compose,
)
from botorch_fed.privacy.shared_ledger import SharedLedger

Party = Literal["server", "agent"]
Reader = Literal["server", "agents", "agent"]
Reveals = Literal["nothing", "data", "noisy data"]
PaidAt = Literal["hub", "site"]

EVERYBODY: tuple[Reader, ...] = ("server", "agents")
ADDRESSEE: tuple[Reader, ...] = ("server", "agent")
OWN_DATA = "An agent's own data and the parameters that it evaluates stay with the agent."
NO_GUARANTEE = "There is no privacy guarantee."
_READERS = {"server": "the server", "agents": "all agents", "agent": "the agent it is sent to"}


@dataclass(frozen=True)
class Row:
    """One kind of message.

    Attributes:
        message: The name of its class.
        sender: The sending party.
        content: The content, as a noun phrase.
        readers: The parties that can read the content: the server, all agents, or only the agent
            that it is sent to. An agent can also read its own messages; the list is empty for an
            encrypted content that no party can decrypt alone.
        reveals: What the content depends on, besides public settings and earlier releases:
            nothing, agents' data, or agents' data with the noise of a mechanism.
    """

    message: str
    sender: Party
    content: str
    readers: tuple[Reader, ...]
    reveals: Reveals = "nothing"

    def __post_init__(self) -> None:
        if self.sender not in get_args(Party) or self.reveals not in get_args(Reveals):
            raise InputDataError(
                f"Expected a sender of {get_args(Party)} and reveals of {get_args(Reveals)}, got "
                f"{self.sender!r} and {self.reveals!r}."
            )
        if not set(self.readers) <= set(get_args(Reader)):
            raise InputDataError(f"Expected readers of {get_args(Reader)}, got {self.readers}.")

    @classmethod
    def of(
        cls,
        kind: type,
        sender: Party,
        content: str,
        readers: Iterable[Reader],
        reveals: Reveals = "nothing",
    ) -> Self:
        """The row of a class of messages."""
        return cls(kind.__name__, sender, content, tuple(readers), reveals)

    @property
    def who(self) -> str:
        """The readers, in words."""
        return " and ".join(_READERS[reader] for reader in self.readers) or "no party alone"

    def __str__(self) -> str:
        verb = "read" if self.who == "all agents" or len(self.readers) > 1 else "reads"
        verb = verb if self.readers else "can read"
        return f"{self.who[0].upper()}{self.who[1:]} {verb} {self.content}."


FRAMES: tuple[Row, ...] = (
    Row(
        "Request",
        "server",
        "the names of run and agent, the number of the exchange and the hashes of broadcasts, "
        "around a message",
        ("server", "agent"),
    ),
    Row("Reply", "agent", "the hash of the request, around a message", ("server",)),
    Row(
        "Refusal",
        "agent",
        "the reason why there is no reply, such as an evaluation that has not ended",
        ("server",),
    ),
)


@dataclass(frozen=True)
class Sees:
    """The readers of all messages of a study.

    Attributes:
        rows: All kinds of messages that can be sent.
        trust: The trusted parties and their role, and with noise the parties against which the
            guarantee holds: one sentence.
        stays: The data that no message holds: one sentence, or empty.
        limits: The facts that are not hidden: sentences.
    """

    rows: tuple[Row, ...]
    trust: str
    stays: str = OWN_DATA
    limits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [row.message for row in self.rows]
        if len(set(names)) < len(names):
            raise InputDataError(f"Expected one row for each kind of message, got {names}.")

    @property
    def sentences(self) -> tuple[str, ...]:
        """All sentences: `stays`, the rows that reveal data, `trust` and `limits`."""
        rows = [str(row) for row in self.rows if row.reveals != "nothing"]
        none = [NO_GUARANTEE] if rows and not self.noisy else []
        return (*([self.stays] if self.stays else []), *rows, self.trust, *none, *self.limits)

    @property
    def noisy(self) -> bool:
        """Whether a mechanism adds noise to any message."""
        return any(row.reveals == "noisy data" for row in self.rows)

    @property
    def encrypted(self) -> bool:
        """Whether there is a message that no party can read alone."""
        return any(not row.readers for row in self.rows)

    def row(self, message: str) -> Row:
        """The row of a kind of message."""
        for row in self.rows:
            if row.message == message:
                return row
        raise InputDataError(
            f"Expected a message of {[row.message for row in self.rows]}, got {message!r}."
        )

    def read_by(self, reader: Reader) -> tuple[Row, ...]:
        """The rows with agents' data that a reader can read."""
        return tuple(r for r in self.rows if reader in r.readers and r.reveals != "nothing")

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The object of the values of `to_dict`, also after JSON."""
        rows = (Row(**{**row, "readers": tuple(row["readers"])}) for row in values["rows"])
        return cls(tuple(rows), values["trust"], values["stays"], tuple(values["limits"]))


def derived_rows(
    setup: type,
    orders: Iterable[type],
    replies: Iterable[type],
    broadcasts: Iterable[type],
    *,
    silent: bool,
) -> tuple[Row, ...]:
    """The rows of messages without a mechanism; their contents come from the classes' docstrings.

    Args:
        setup: The class of the first broadcast.
        orders: The classes of the server's orders to one agent.
        replies: The classes of an agent's replies.
        broadcasts: The classes of the other broadcasts.
        silent: Whether agents send no messages, so that no row reveals data.
    """
    from_data: Reveals = "nothing" if silent else "data"
    rows = [Row.of(setup, "server", "the terms and the shared basis", EVERYBODY)]
    for kind in orders:
        reveals = from_data if _has_numbers(kind) else "nothing"
        rows.append(Row.of(kind, "server", _content(kind), ADDRESSEE, reveals))
    for kind in replies:
        content = f"of each agent: {_content(kind)}"
        rows.append(Row.of(kind, "agent", content, ("server",), from_data))
    for kind in broadcasts:
        rows.append(Row.of(kind, "server", _content(kind), EVERYBODY, from_data))
    return tuple(rows)


def _content(kind: type) -> str:
    """The docstring of a class, up to the end of its first clause."""
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    first = re.split(r"[.;:](?: |$)", text)[0]
    if not first or first.startswith(f"{kind.__name__}("):  # the default docstring of a dataclass
        return f"a {kind.__name__}"
    return first[0].lower() + first[1:]


def _has_numbers(kind: type) -> bool:
    """Whether a message can hold measured numbers, beside settings."""
    words = " ".join(map(str, get_type_hints(kind).values()))
    return any(name in words for name in ("Tensor", "bytes", "float")) or Tensor in (
        get_type_hints(kind).values()
    )


@dataclass(frozen=True)
class Price:
    """The privacy cost of a run, planned before any evaluation.

    Attributes:
        guarantee: The guarantee of the whole run for one unit; a site compares its `require` with
            it.
        event: The event of one payment.
        payments: The largest number of payments of one unit.
        releases: The number of planned noisy releases.
        mechanism: The class of the mechanism; "none" without releases.
        settings: The mechanism's settings as text.
        noise_std: The standard deviation of the noise in a number of the first release, in its
            noisiest row; for running sums, in the last release.
        trust: The trusted parties and their role: one sentence.
        paid_at: The paying ledger: the hub's, or each site's.
    """

    guarantee: Guarantee
    event: Event
    payments: int
    releases: int
    mechanism: str
    settings: str
    noise_std: float
    trust: str
    paid_at: PaidAt

    @property
    def epsilon(self) -> float:
        """An upper bound on epsilon of the whole run."""
        return self.guarantee.epsilon

    @property
    def delta(self) -> float:
        """The delta at which epsilon holds."""
        return self.guarantee.delta

    @property
    def unit(self) -> Unit:
        """The unit whose contribution is protected."""
        return self.guarantee.unit

    @property
    def adjacency(self) -> Adjacency:
        """The definition of neighbouring data sets."""
        return self.guarantee.adjacency

    @property
    def noise_multiplier(self) -> float:
        """The noise of one payment divided by the norm of one unit's contribution."""
        return self.event.noise_multiplier

    def spent(self, paid: Ledger | SharedLedger | Iterable[Event | Entry]) -> Guarantee:
        """The guarantee of the payments so far, for one unit.

        Args:
            paid: A server's ``paid(state)``, the payments of a log, or a ledger.
        """
        if isinstance(paid, SharedLedger):
            paid = paid.ledger
        payments = list(paid.entries if isinstance(paid, Ledger) else paid)
        private = all(one.private for one in payments if isinstance(one, Entry))
        composed = compose(payments, delta=self.delta, adjacency=self.adjacency, unit=self.unit)
        return replace(composed, private=private and self.guarantee.private)

    def account(self, paid: Iterable[Entry]) -> dict[str, Any]:
        """The privacy account of a result: plain values, for JSON."""
        entries = tuple(paid)
        spent = self.spent(entries)
        return {
            "epsilon": spent.epsilon,
            "delta": spent.delta,
            "adjacency": spent.adjacency,
            "unit": spent.unit,
            "accountant": spent.accountant,
            "private": spent.private,
            "releases": spent.releases,
            "promised_epsilon": self.epsilon,
            "planned_releases": self.releases,
            "mechanism": self.mechanism,
            "settings": self.settings,
            "noise_multiplier": self.noise_multiplier,
            "noise_std": self.noise_std,
            "paid_at": self.paid_at,
            "paid": [_plain(entry) for entry in entries],
        }

    def __str__(self) -> str:
        if not self.releases:
            return f"{self.guarantee}: nothing is released"
        return (
            f"{self.guarantee}; {self.mechanism} with noise multiplier "
            f"{self.noise_multiplier:.4g}, paid by {_PAYERS[self.paid_at]}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The object of the values of `to_dict`, also after JSON."""
        guarantee, event = Guarantee(**values["guarantee"]), Event(**values["event"])
        return cls(**{**values, "guarantee": guarantee, "event": event})


def disclosed(
    study: Any, server: Any, space: Any, names: tuple[str, ...]
) -> tuple[Sees | None, Price | None]:
    """`sees` and `price` of a server, or else of its study; None if neither has them."""
    if hasattr(server, "sees") and hasattr(server, "price"):
        return server.sees, server.price
    if hasattr(study, "sees") and hasattr(study, "price"):
        return study.sees(space, names), study.price(space, names)
    return None, None


_PAYERS = {"hub": "the hub's ledger", "site": "each site's own ledger"}


def _plain(entry: Entry) -> dict[str, Any]:
    return {"event": asdict(entry.event), "count": entry.count, "private": entry.private}


def entries_of(account: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The payments listed in an account of `Price.account`."""
    return tuple(
        Entry(Event(**row["event"]), row["count"], "", row["private"])
        for row in account.get("paid", ())
    )


def total_count(entries: Iterable[Entry]) -> int:
    """The number of payments of some entries."""
    return sum(entry.count for entry in entries)


def first_payments(entries: Iterable[Entry], count: int) -> tuple[Entry, ...]:
    """The first `count` payments of some entries."""
    first: list[Entry] = []
    for entry in entries:
        part = min(entry.count, count)
        if part:
            first.append(replace(entry, count=part))
        count -= part
    return tuple(first)
