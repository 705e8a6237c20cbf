r"""Agents on other machines, by Flower: an `Exchange` over its `Grid`.

A round costs one exchange: requests leave together, each with the broadcasts that its site has not
got yet, and answers are taken as they come, by the message that they reply to. Flower starts a
process per message and asks for work every few seconds, so that an exchange takes seconds; the
engine adds a poll of a tenth of a second to that.

    silent until the deadline, or its node is gone    Failure("absent")
    its process reports an error                      Failure("failed")
    busy (`Background`)                               asked again until the deadline
    it lacks a broadcast                              asked again with all of them, once

A message that is late is never read: it expires with the round's deadline. What a site observes
meanwhile is in its journal, and it takes part in the next round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from botorch.exceptions.errors import InputDataError

from botorch_fed.engines.inprocess import refusal_code
from botorch_fed.protocols.base import AgentId, Exchanged, Failure, Outgoing
from botorch_fed.protocols.site import FRAME_BYTES
from botorch_fed.wire.codec import MAX_BYTES

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)

POLL = 0.1  # seconds between two looks for replies
PAUSE = 1.0  # seconds before a busy site is asked again, at first; then doubled up to a minute
LONGEST_PAUSE = 60.0


class FlowerExchange:
    """An `Exchange` over a Flower grid.

    Args:
        grid: Flower's, of the running ServerApp.
        nodes: The node of each agent. Flower's node authentication binds a node to its key, so
            that this table is what makes a name trustworthy.
        deadline: For how many seconds a round waits for its agents.
        max_bytes: Refuse longer messages.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[AgentId, int],
        *,
        deadline: float = 600.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if not deadline > 0:
            raise InputDataError(f"A deadline is a positive number of seconds, got {deadline}.")
        if len(set(nodes.values())) < len(nodes):
            raise InputDataError("Two agents have one node: every site has a node of its own.")
        self._grid = grid
        self._nodes = dict(nodes)
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._has: dict[AgentId, frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"FlowerExchange({len(self._nodes)} nodes, deadline={self._deadline:g})"

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        """Ask every agent, and wait until all have answered or the deadline."""
        round_ = _Round(self, outgoing)
        end = time.monotonic() + self._deadline
        while round_.open and (left := end - time.monotonic()) > 0:
            round_.ask(left)
            round_.hear()
            time.sleep(min(POLL, max(end - time.monotonic(), 0.0)))
        for name in [*round_.waiting.values(), *round_.due]:
            busy = Failure("busy") if name in round_.busy else Failure("absent")
            round_.failures.setdefault(name, busy)
        return Exchanged(round_.replies, round_.failures, round_.bytes_down, round_.bytes_up)


class _Round:
    """What is asked, awaited and known in one round."""

    def __init__(self, engine: FlowerExchange, outgoing: Outgoing) -> None:
        self.replies: dict[AgentId, bytes] = {}
        self.failures: dict[AgentId, Failure] = {}
        self.bytes_down: dict[AgentId, int] = {}
        self.bytes_up: dict[AgentId, int] = {}
        self.busy: dict[AgentId, float] = {}  # the last pause
        self.waiting: dict[str, AgentId] = {}  # by message
        self.due: dict[AgentId, float] = {}  # when to ask
        self._again: set[AgentId] = set()  # asked with all broadcasts already
        self._engine = engine
        self._outgoing = outgoing
        for name in outgoing.requests:
            if name in engine._nodes:
                self.due[name] = 0.0
            else:
                self.failures[name] = Failure("unknown")

    @property
    def open(self) -> bool:
        return bool(self.waiting or self.due)

    def ask(self, seconds: float) -> None:
        """Send what is due, all at once."""
        now = time.monotonic()
        names = [name for name, when in self.due.items() if when <= now]
        if not names:
            return
        messages = [self._message(name, seconds) for name in names]
        ids = dict(zip(names, self._engine._grid.push_messages(messages), strict=False))
        for name in names:
            del self.due[name]
            sent = ids.get(name)
            if not sent:
                self.failures[name] = Failure("absent", "Flower does not accept a message to it")
            else:
                self.waiting[sent] = name

    def _message(self, name: AgentId, seconds: float) -> Message:
        from flwr.app import ConfigRecord, Message, RecordDict

        known = self._engine._has.get(name, frozenset())
        request = self._outgoing.requests[name]
        blobs = [data for digest, data in self._outgoing.blobs.items() if digest not in known]
        size = len(request) + sum(map(len, blobs))
        self.bytes_down[name] = self.bytes_down.get(name, 0) + size
        fields = ConfigRecord({"body": request, "blobs": blobs, "seconds": seconds})
        return Message(
            RecordDict({"request": fields}),
            dst_node_id=self._engine._nodes[name],
            message_type="query.respond",
            group_id=str(self._outgoing.serial),
            ttl=seconds,
        )

    def hear(self) -> None:
        """Take the replies that have come."""
        if not self.waiting:
            return
        for message in self._engine._grid.pull_messages(list(self.waiting)):
            # Not by its sender: an error reply for a node that died comes from node 1.
            name = self.waiting.pop(message.metadata.reply_to_message_id, None)
            if name is not None:
                self._take(name, message)

    def _take(self, name: AgentId, message: Message) -> None:
        answer = self._answer(message)
        if isinstance(answer, Failure):
            self.failures[name] = answer
            return
        self.bytes_up[name] = self.bytes_up.get(name, 0) + len(answer)
        code = refusal_code(answer)
        if code == "busy":
            pause = min(2 * self.busy.get(name, PAUSE / 2), LONGEST_PAUSE)
            self.busy[name] = pause
            self.due[name] = time.monotonic() + pause
            return
        if code == "missing" and name not in self._again:
            self._again.add(name)
            self._engine._has[name] = frozenset()
            self.due[name] = 0.0
            return
        self._engine._has[name] = frozenset(self._outgoing.blobs)
        self.replies[name] = answer

    def _answer(self, message: Message) -> bytes | Failure:
        """The site's bytes, or what kept them; a node's own words are not repeated."""
        if message.has_error():
            return Failure("absent", f"Flower reports error {message.error.code} for its node")
        try:
            fields = message.content["reply"]
            answer, code = fields.get("answer"), fields.get("code")
        except Exception:
            return Failure("malformed", "its node sent no reply")
        if not isinstance(answer, bytes):
            known = code if code in ("absent", "failed") else "malformed"
            return Failure(known, "its own process does not run" if known == "absent" else "")
        if len(answer) > self._engine._max_bytes + FRAME_BYTES:
            return Failure("malformed", f"its reply has {len(answer)} bytes")
        return answer
