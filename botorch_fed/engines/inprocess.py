r"""All agents in one process, for study and for tests; always through bytes.

Nothing crosses by reference: an agent sees only the bytes of its requests, the public broadcasts
and its own record, just as on another machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from botorch_fed.errors import ProtocolError
from botorch_fed.protocols.base import AgentId, Exchanged, Failure, Outgoing
from botorch_fed.protocols.site import Site
from botorch_fed.protocols.store import Observation


class InProcess:
    """An `Exchange` by function call.

    Args:
        sites: The sites, of different names. They may share one store of broadcasts.
        absent: Says of an agent and a round whether it does not answer, for the study of
            stragglers.
        raise_errors: Whether an error of an objective stops the run, or counts as the failure of
            its agent.

    Example:
        >>> drive(server, InProcess([Site("a", agent, objective)]))
    """

    def __init__(
        self,
        sites: Iterable[Site],
        *,
        absent: Callable[[AgentId, int], bool] | None = None,
        raise_errors: bool = True,
    ) -> None:
        self.sites: dict[AgentId, Site] = {}
        for site in sites:
            if site.name in self.sites:
                raise ProtocolError(f"Two sites are called {site.name!r}: names must differ.")
            self.sites[site.name] = site
        self._absent = absent
        self._raise_errors = raise_errors
        self._sent: dict[AgentId, frozenset[str]] = {}
        self._drained: dict[AgentId, int] = {}

    def __repr__(self) -> str:
        return f"InProcess({len(self.sites)} sites)"

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        """Let every agent that is asked answer, one after the other."""
        replies: dict[AgentId, bytes] = {}
        failures: dict[AgentId, Failure] = {}
        bytes_down: dict[AgentId, int] = {}
        cpu_seconds: dict[AgentId, float] = {}
        with one_thread():
            for name, request in outgoing.requests.items():
                site = self.sites.get(name)
                if site is None:
                    failures[name] = Failure("unknown")
                    continue
                if self._absent is not None and self._absent(name, outgoing.serial):
                    failures[name] = Failure("absent")
                    continue
                bytes_down[name] = len(request) + self._deliver(site, outgoing)
                start = time.thread_time()
                try:
                    replies[name] = site.respond(request)
                except Exception as error:  # whatever the objective raises
                    if self._raise_errors:
                        raise
                    failures[name] = Failure("failed", type(error).__name__)
                cpu_seconds[name] = time.thread_time() - start
        self._tidy(outgoing)
        return Exchanged(replies, failures, bytes_down, cpu_seconds)

    def _deliver(self, site: Site, outgoing: Outgoing) -> int:
        """Put the broadcasts where the site looks for them; what that costs on a real wire."""
        sent = self._sent.get(site.name, frozenset())
        for digest, data in outgoing.blobs.items():
            if not site.agent.blobs.has(digest):
                site.agent.blobs.put(data)
        self._sent[site.name] = frozenset(outgoing.blobs)
        return sum(len(data) for digest, data in outgoing.blobs.items() if digest not in sent)

    def _tidy(self, outgoing: Outgoing) -> None:
        """Drop the broadcasts that no site needs any more."""
        stores = {id(site.agent.blobs): site.agent.blobs for site in self.sites.values()}
        needed: dict[int, set[str]] = {key: set(outgoing.blobs) for key in stores}
        for site in self.sites.values():
            needed[id(site.agent.blobs)].update(site.broadcasts)
        for key, blobs in stores.items():
            blobs.keep(needed[key])

    def observations(self) -> Iterator[tuple[AgentId, Observation]]:
        """The observations since the last call, per agent in order; the first call gives all."""
        for name, site in self.sites.items():
            start = self._drained.get(name, 0)
            found = list(site.journal)[start:]
            self._drained[name] = start + len(found)
            for observation in found:
                yield name, observation

    def close(self) -> None:
        """Release the sites' files."""
        for site in self.sites.values():
            site.journal.close()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Agents compute on one thread: the bits of a factorisation depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
