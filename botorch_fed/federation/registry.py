"""Protocols and their parts by the names that study files use: the one place that knows them.

A study file writes a name of `PROTOCOLS`, or ``module:Name`` of a study class of its own: a frozen
dataclass with `server`, `agent`, `sees` and `price`, whose fields are its settings. A search or an
aggregation is a name of `SEARCHES` or `AGGREGATIONS`, or ``module:Name``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from botorch_fed.errors import FederatedError

PROTOCOLS: dict[str, str] = {
    "fts": "botorch_fed.studies:FTS",
    "dp-fts-de": "botorch_fed.studies:DPFTSDE",
    "fed-gp": "botorch_fed.studies:FedGP",
    "federation": "botorch_fed.studies:Federation",
    "private-ucb": "botorch_fed.studies:PrivateUCB",
}
ALONE = "fts"  # agents of this study need no others: without messages it is the usual baseline


SEARCHES: dict[str, str] = {"transfer": "botorch_fed.search.messages:TransferRows"}
AGGREGATIONS: dict[str, str] = {"relay": "botorch_fed.aggregation.relay:Relay"}


def study_class(name: str) -> type[Any]:
    """The study class of a name, or of ``module:Name``.

    Raises:
        FederatedError: There is none.
    """
    target = PROTOCOLS.get(name, name)
    found = _found(target, "a study class", PROTOCOLS)
    missing = [verb for verb in ("server", "agent", "sees", "price") if not hasattr(found, verb)]
    if missing or not isinstance(found, type) or not hasattr(found, "__dataclass_fields__"):
        raise FederatedError(
            f"Expected a dataclass with server, agent, sees and price at {target!r}, got "
            f"{found!r}" + (f" without {', '.join(missing)}." if missing else ".")
        )
    return found


def part_class(name: str, base: type[Any], known: Mapping[str, str]) -> type[Any]:
    """The class of a search or of an aggregation.

    Args:
        name: A name of `known`, or ``module:Name``.
        base: What it must be a frozen dataclass of.
        known: `SEARCHES` or `AGGREGATIONS`.

    Raises:
        FederatedError: There is none.
    """
    target, what = known.get(name, name), f"a subclass of {base.__name__}"
    found = _found(target, what, known)
    if not isinstance(found, type) or not issubclass(found, base):
        raise FederatedError(f"Expected {what} at {target!r}, got {found!r}.")
    return found


def _found(target: str, what: str, known: Mapping[str, str]) -> Any:
    """What is at ``module:Name``."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", target):
        raise FederatedError(
            f"Expected one of {', '.join(known)}, or module:Name of {what}, got {target!r}."
        )
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FederatedError(
            f"Expected {what} at {target!r}, got {type(error).__name__}: {error}. Install its "
            "package, or put its module beside the study file."
        ) from error
