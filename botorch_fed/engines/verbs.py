r"""The trial service of a site as JSON, for a shell or another program on the same machine.

::

    {"verb": "ask", "n": 2}
    {"verb": "tell", "id": 3, "value": 0.71, "sem": 0.02}
    {"verb": "tell", "id": 3, "value": {"error": 0.29, "latency": 12.0}}
    {"verb": "fail", "id": 4, "reason": "the sample was lost"}
    {"verb": "attach", "parameters": {"temperature": 80.0}, "value": 0.65}
    {"verb": "status"}

An answer has the key ``error`` with the reason, or ``trials`` and further keys of the verb.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from botorch.exceptions.errors import BotorchError, InputDataError

from botorch_fed.errors import FederatedError
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import Trial

logger = logging.getLogger(__name__)


def ask(site: Site, n: int = 1) -> dict[str, Any]:
    """New trials."""
    trials = site.ask(n)
    if trials:
        return _listed(trials)
    open_trials = site.pending()
    why = (
        f"{len(open_trials)} trials are open: answer them first"
        if open_trials
        else "there are no new trials: wait for the next round of the hub, or the budget is used"
    )
    return {**_listed([]), "note": why}


def tell(
    site: Site,
    id: int,
    value: Any = None,
    sem: Any = None,
    fidelity: Any = None,
    curve: Any = None,
) -> dict[str, Any]:
    """Answer a trial; `curve` is a list of pairs of a fidelity and a value."""
    if curve is not None:
        try:
            curve = {float(at): outcome for at, outcome in curve}
        except (TypeError, ValueError):
            raise InputDataError(
                "Expected curve as a list of pairs of a fidelity and a value, got "
                f"{type(curve).__name__}."
            ) from None
    return _listed([site.tell(id, value, sem, fidelity=fidelity, curve=curve)])


def fail(site: Site, id: int, reason: str = "") -> dict[str, Any]:
    """Mark a trial as failed."""
    return _listed([site.fail(id, reason)])


def attach(
    site: Site, parameters: Mapping[str, Any], value: Any, sem: Any = None, label: str = ""
) -> dict[str, Any]:
    """Add a result that exists already."""
    return _listed([site.attach(parameters, value, sem, label=label)])


def status(site: Site) -> dict[str, Any]:
    """All trials and the state of the site."""
    several = len(site.space.objectives) > 1
    best = None if several else site.best()
    found = {
        **_listed(site.trials()),
        "site": site.name,
        "round": site.serial,
        "waiting": site.waiting,
        "best": None if best is None else _plain(best),
    }
    return {**found, "pareto": [_plain(one) for one in site.pareto()]} if several else found


VERBS: dict[str, Callable[..., dict[str, Any]]] = {
    "ask": ask,
    "tell": tell,
    "fail": fail,
    "attach": attach,
    "status": status,
}


def perform(site: Site, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a verb; a caller's error under the key ``error``."""
    if verb not in VERBS:
        return {"error": f"Expected one of the verbs {', '.join(VERBS)}, got {verb!r}."}
    try:
        inspect.signature(VERBS[verb]).bind(site, **arguments)
    except TypeError as error:
        return {"error": f"The verb {verb!r} does not take these arguments: {error}."}
    try:
        return VERBS[verb](site, **arguments)
    except (FederatedError, BotorchError, InputDataError) as error:
        return {"error": str(error)}


def perform_json(site: Site, data: bytes) -> bytes:
    """`perform` for a JSON object with the key ``verb`` and the arguments."""
    try:
        fields = json.loads(data)
        verb = fields.pop("verb")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return _json({"error": 'Expected a JSON object with the key "verb".'})
    try:
        return _json(perform(site, str(verb), fields))
    except Exception as error:  # the site continues; its log has the traceback
        logger.exception("site %r cannot %s", site.name, verb)
        return _json({"error": f"{type(error).__name__}: see the log of the site's process."})


def _listed(trials: list[Trial]) -> dict[str, Any]:
    return {"trials": [_plain(trial) for trial in trials]}


def _plain(trial: Trial) -> dict[str, Any]:
    return dataclasses.asdict(trial)


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()
