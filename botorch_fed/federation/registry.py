"""Protocols by the names that study files use: the one place that knows them.

A study file writes a name of `PROTOCOLS`, or ``module:Name`` of a study class of its own: a frozen
dataclass with `server`, `agent`, `sees` and `price`, whose fields are its settings.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from botorch_fed.errors import FederatedError

PROTOCOLS: dict[str, str] = {
    "fts": "botorch_fed.studies:FTS",
    "dp-fts-de": "botorch_fed.studies:DPFTSDE",
    "fed-gp": "botorch_fed.studies:FedGP",
    "private-ucb": "botorch_fed.studies:PrivateUCB",
}
ALONE = "fts"  # agents of this study need no others: without messages it is the usual baseline


def study_class(name: str) -> type[Any]:
    """The study class of a name, or of ``module:Name``.

    Raises:
        FederatedError: There is none.
    """
    target = PROTOCOLS.get(name, name)
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", target):
        raise FederatedError(
            f"Expected one of {', '.join(PROTOCOLS)}, or module:Name of a study class, got "
            f"{name!r}."
        )
    module, _, kind = target.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise FederatedError(
            f"Expected a study class at {target!r}, got {type(error).__name__}: {error}. Install "
            "its package, or put its module beside the study file."
        ) from error
    missing = [verb for verb in ("server", "agent", "sees", "price") if not hasattr(found, verb)]
    if missing or not isinstance(found, type) or not hasattr(found, "__dataclass_fields__"):
        raise FederatedError(
            f"Expected a dataclass with server, agent, sees and price at {target!r}, got "
            f"{found!r}" + (f" without {', '.join(missing)}." if missing else ".")
        )
    return found
