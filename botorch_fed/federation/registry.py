"""Names of protocols, searches and aggregations in study files.

A protocol is a name of `PROTOCOLS`, or ``module:Name`` of a study class: a frozen dataclass with
`server`, `agent`, `sees` and `price`, whose fields are its settings. A search or an aggregation is
a name of `SEARCHES` or `AGGREGATIONS`, or ``module:Name``.
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
ALONE = "fts"  # without messages this study is the single-site baseline


SEARCHES: dict[str, str] = {"transfer": "botorch_fed.search.messages:TransferRows"}
AGGREGATIONS: dict[str, str] = {"relay": "botorch_fed.aggregation.relay:Relay"}


def study_class(name: str) -> type[Any]:
    """The study class of a name, or of ``module:Name``.

    Raises:
        FederatedError: There is none.
    """
    target = PROTOCOLS.get(name, name)
    kind = _imported(target, "a study class", PROTOCOLS)
    missing = [verb for verb in ("server", "agent", "sees", "price") if not hasattr(kind, verb)]
    if missing or not isinstance(kind, type) or not hasattr(kind, "__dataclass_fields__"):
        raise FederatedError(
            f"Expected a dataclass with server, agent, sees and price at {target!r}, got "
            f"{kind!r}" + (f" without {', '.join(missing)}." if missing else ".")
        )
    return kind


def part_class(name: str, base: type[Any], known: Mapping[str, str]) -> type[Any]:
    """The class of a search or of an aggregation.

    Args:
        name: A name of `known`, or ``module:Name``.
        base: The base class that it must have.
        known: `SEARCHES` or `AGGREGATIONS`.

    Raises:
        FederatedError: There is none.
    """
    target, what = known.get(name, name), f"a subclass of {base.__name__}"
    kind = _imported(target, what, known)
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise FederatedError(f"Expected {what} at {target!r}, got {kind!r}.")
    return kind


def _imported(target: str, what: str, known: Mapping[str, str]) -> Any:
    """The object at ``module:Name``."""
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
