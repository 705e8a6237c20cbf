"""Who pays for what: the price of a mechanism, and the ledger that pays it in advance."""

from __future__ import annotations

from typing import Protocol, TypeVar

from botorch.exceptions.errors import InputDataError

from botorch_fed.privacy.accounting import Adjacency, Event, Ledger, Unit
from botorch_fed.privacy.checks import check_choice
from botorch_fed.privacy.shared_ledger import SharedLedger


class Priced(Protocol):
    """A mechanism: what one payment covers, and by which adjacency and unit."""

    @property
    def event(self) -> Event: ...

    @property
    def adjacency(self) -> Adjacency: ...

    @property
    def unit(self) -> Unit: ...


AnyLedger = TypeVar("AnyLedger", Ledger, SharedLedger)


def check_kind(mechanism: Priced) -> None:
    """Raise unless a mechanism has an adjacency and a unit that are known here."""
    check_choice("The adjacency", mechanism.adjacency, Adjacency)
    check_choice("The unit", mechanism.unit, Unit)


def check_ledger(mechanism: Priced, ledger: Ledger | SharedLedger) -> None:
    """Raise unless a ledger can pay for a mechanism."""
    if (ledger.adjacency, ledger.unit) != (mechanism.adjacency, mechanism.unit):
        raise InputDataError(
            f"The ledger is for adjacency {ledger.adjacency!r} and unit {ledger.unit!r}, the "
            f"mechanism for {mechanism.adjacency!r} and {mechanism.unit!r}: give both the same."
        )


def pay(mechanism: Priced, ledger: AnyLedger, *, private: bool) -> AnyLedger:
    """The ledger after the mechanism's event, before anything is computed."""
    check_ledger(mechanism, ledger)
    return ledger.spend(mechanism.event, note=type(mechanism).__name__, private=private)
