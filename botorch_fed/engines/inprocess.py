r"""All agents in one process, for study and for tests; always through bytes.

Nothing crosses by reference: an agent sees only the bytes of its requests and its own record, just
as on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from botorch_fed.errors import FederatedError
from botorch_fed.protocols.base import Agent, AgentId, Exchanged, Journal, Objective
from botorch_fed.protocols.drive import respond


class InProcess:
    """An `Exchange` by function call.

    Args:
        agents: The agents by name.
        objectives: Their objectives by name.
        absent: Says of an agent and a round whether it does not answer, for the study of
            stragglers.

    Attributes:
        records: What every agent keeps between requests; hand it over to resume.
        bytes_up: Bytes of all replies so far.
        bytes_down: Bytes of all requests so far.
    """

    def __init__(
        self,
        agents: Mapping[AgentId, Agent[Any]],
        objectives: Mapping[AgentId, Objective],
        *,
        records: Mapping[AgentId, bytes] | None = None,
        journals: Mapping[AgentId, Journal] | None = None,
        absent: Callable[[AgentId, int], bool] | None = None,
    ) -> None:
        if agents.keys() != objectives.keys():
            raise FederatedError("Every agent needs an objective, and every objective an agent.")
        self._agents = dict(agents)
        self._objectives = dict(objectives)
        self._journals = dict(journals or {})
        self._absent = absent
        self.records: dict[AgentId, bytes] = dict(records or {})
        self.bytes_up = 0
        self.bytes_down = 0
        self._round = 0

    def __call__(self, outbox: Mapping[AgentId, bytes]) -> Exchanged:
        """Let every agent answer, one after the other."""
        self._round += 1
        replies: dict[AgentId, bytes] = {}
        failures: dict[AgentId, str] = {}
        for name, request in outbox.items():
            if name not in self._agents:
                failures[name] = "unknown agent"
                continue
            if self._absent is not None and self._absent(name, self._round):
                failures[name] = "absent"
                continue
            self.bytes_down += len(request)
            self.records[name], replies[name] = respond(
                self._agents[name],
                self.records.get(name),
                request,
                self._objectives[name],
                journal=self._journals.setdefault(name, Journal()),
            )
            self.bytes_up += len(replies[name])
        return Exchanged(replies, failures)
