r"""All agents in one process, for studies and tests; always through bytes.

No object is passed by reference: as on another machine, an agent reads the bytes of its requests,
the public broadcasts and its log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.base import AgentId, Exchanged, Failure, Outgoing, Refusal
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import Observation
from botorch_fed.wire.codec import decode

logger = logging.getLogger(__name__)
POLL = 0.02  # seconds before a busy agent is asked again, at first; then doubled up to a second


class InProcess:
    """An `Exchange` by function call.

    Args:
        sites: The sites, of different names. They may share one store of broadcasts.
        absent: Whether an agent does not answer in a round, to simulate stragglers.
        raise_errors: Whether an error of an objective stops the run; otherwise it is logged and
            the agent fails in this round.
        patience: Seconds for which busy agents are asked again, before the round continues
            without their evaluations.

    Example:
        >>> drive(server, InProcess([Site("a", agent, objective)]))
    """

    def __init__(
        self,
        sites: Iterable[Site],
        *,
        absent: Callable[[AgentId, int], bool] | None = None,
        raise_errors: bool = True,
        patience: float = 0.0,
    ) -> None:
        self.sites: dict[AgentId, Site] = {}
        for site in sites:
            if site.name in self.sites:
                raise ProtocolError(f"Expected sites of different names, got {site.name!r} twice.")
            self.sites[site.name] = site
        self._absent = absent
        self._raise_errors = raise_errors
        self._patience = patience
        self._sent: dict[AgentId, frozenset[str]] = {}
        self._drained: dict[AgentId, int] = {}

    def __repr__(self) -> str:
        return f"InProcess({len(self.sites)} sites)"

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        """The answers of all requested agents, one agent after the other."""
        replies: dict[AgentId, bytes] = {}
        failures: dict[AgentId, Failure] = {}
        bytes_down: dict[AgentId, int] = {}
        cpu_seconds: dict[AgentId, float] = {}
        left = []
        for name, request in outgoing.requests.items():
            if name not in self.sites:
                failures[name] = Failure("unknown")
            elif self._absent is not None and self._absent(name, outgoing.serial):
                failures[name] = Failure("absent")
            else:
                bytes_down[name] = len(request) + self._deliver(self.sites[name], outgoing)
                cpu_seconds[name] = 0.0
                left.append(name)
        deadline, pause = time.monotonic() + self._patience, POLL
        while left:
            for name in left:
                start = time.thread_time()
                try:
                    replies[name] = self.sites[name].respond(
                        outgoing.requests[name], defer=outgoing.defer
                    )
                except Exception as error:  # any error of the objective
                    if self._raise_errors:
                        raise
                    logger.warning("agent %r has failed", name, exc_info=True)
                    failures[name] = Failure("failed", type(error).__name__)
                    replies.pop(name, None)  # an earlier "busy"
                cpu_seconds[name] += time.thread_time() - start
            left = [n for n in left if n in replies and refusal_code(replies[n]) == "busy"]
            if not left or time.monotonic() + pause > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        self._tidy(outgoing)
        bytes_up = {name: len(data) for name, data in replies.items()}
        return Exchanged(replies, failures, bytes_down, bytes_up, cpu_seconds)

    def _deliver(self, site: Site, outgoing: Outgoing) -> int:
        """Store the broadcasts for the site; the bytes that a network would carry."""
        sent = self._sent.get(site.name, frozenset())
        for digest, data in outgoing.blobs.items():
            if not site.agent.blobs.has(digest):
                site.agent.blobs.put(data)
        self._sent[site.name] = frozenset(outgoing.blobs)
        return sum(len(data) for digest, data in outgoing.blobs.items() if digest not in sent)

    def _tidy(self, outgoing: Outgoing) -> None:
        """Drop the broadcasts that no site needs."""
        stores = {id(site.agent.blobs): site.agent.blobs for site in self.sites.values()}
        needed: dict[int, set[str]] = {key: set(outgoing.blobs) for key in stores}
        for site in self.sites.values():
            needed[id(site.agent.blobs)].update(site.broadcasts)
        for key, blobs in stores.items():
            blobs.keep(needed[key])

    def observations(self) -> list[tuple[AgentId, Observation]]:
        """The observations since the last call, in order per agent; all in the first call."""
        observations = []
        for name, site in self.sites.items():
            start = self._drained.get(name, 0)
            new = site.observations(start)
            self._drained[name] = start + len(new)
            observations += [(name, observation) for observation in new]
        return observations

    @property
    def trust(self) -> dict[AgentId, list[float]]:
        """The trusts of each site's messages, of sites that compare trusts."""
        earned = {name: getattr(site.agent, "earned", []) for name, site in self.sites.items()}
        return {name: list(trusts) for name, trusts in earned.items() if trusts}

    def close(self) -> None:
        """Release the sites' files."""
        for site in self.sites.values():
            site.log.close()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refusal_code(answer: bytes) -> str | None:
    """The reason code of a refusal; None for any other answer."""
    if len(answer) > 8192:
        return None  # longer than any refusal
    try:
        refusal: Refusal = decode(answer, Refusal)
    except MessageError:
        return None
    return refusal.code
