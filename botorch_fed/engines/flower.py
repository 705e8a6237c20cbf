r"""Agents on other machines: an `Exchange` over the `Grid` of Flower.

A round is one exchange. All requests are sent together, each with the broadcasts that its site
lacks. Answers are read as they arrive, by the message that they reply to. Nodes poll every third
of a second to every three seconds, less often after a longer idle time; the engine polls every
tenth of a second.

::

    site is busy (Background)             asked again until the deadline
    site lacks a broadcast                  asked again with all broadcasts, once
    node or site process is not running     asked again for absence s, then Failure("absent")
    no answer before the deadline           Failure("absent")
    site process reports an error           Failure("failed")
    reply cannot be read                    Failure("malformed")
    Flower's server does not answer         HubLost: the run stops, and can be resumed

A late message is never read: it expires with the round's deadline. The site keeps the round's
observations in its log and takes part in the next round.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from botorch.exceptions.errors import InputDataError

from botorch_fed.engines.flower_control import ControlRefused, HubLost
from botorch_fed.engines.inprocess import refusal_code
from botorch_fed.federation.base import FRAME_BYTES, AgentId, Exchanged, Failure, Outgoing
from botorch_fed.wire.codec import MAX_BYTES

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)

POLL = 0.1  # seconds between two polls for replies
PAUSE = 1.0  # seconds before a site is asked again, at first; then doubled up to a minute
LONGEST_PAUSE = 60.0
LEAST = 1.0  # seconds before the deadline after which no site is asked again
STUCK = 5.0  # seconds after which other replies no longer wait for one that Flower is reading


class FlowerExchange:
    """An `Exchange` over a Flower grid.

    Args:
        grid: The Flower grid of the running ServerApp.
        nodes: The node of each agent. Flower's node authentication binds a node to its key, so
            that this table authenticates the agents' names.
        deadline: Seconds that a round waits for its agents.
        absence: Seconds that a round waits for an agent that is absent and was present in the
            round before.
        max_bytes: The longest message that is accepted.
        allow: Called before agents are asked, with the bytes that the answer of each may have.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[AgentId, int],
        *,
        deadline: float = 600.0,
        absence: float = 60.0,
        max_bytes: int = MAX_BYTES,
        allow: Callable[[Mapping[AgentId, int]], None] | None = None,
    ) -> None:
        if not 0 < deadline < math.inf:
            raise InputDataError(f"Expected deadline > 0 seconds and finite, got {deadline}.")
        if not absence >= 0:
            raise InputDataError(f"Expected absence >= 0 seconds, got {absence}.")
        if len(set(nodes.values())) < len(nodes):
            raise InputDataError("Expected a different node for each agent, got one node twice.")
        self.grid = grid
        self.nodes = dict(nodes)
        self.deadline = deadline
        self.absence = absence
        self.max_bytes = max_bytes
        self.allow = allow
        self.has: dict[AgentId, frozenset[str]] = {}  # the broadcasts that a site has
        self.gone: frozenset[AgentId] = frozenset()  # agents that were absent in the last round

    def __repr__(self) -> str:
        return f"FlowerExchange({len(self.nodes)} nodes, deadline={self.deadline:g})"

    def __call__(self, outgoing: Outgoing) -> Exchanged:
        """Ask every agent, and wait for all answers or the deadline."""
        round_ = _Round(self, outgoing)
        while round_.open and (left := round_.end - time.monotonic()) > 0:
            round_.ask(left)
            round_.collect()
            time.sleep(min(POLL, max(round_.end - time.monotonic(), 0.0)))
        round_.close()
        self.gone = frozenset(
            n for n, failure in round_.failures.items() if failure.code == "absent"
        )
        return Exchanged(round_.replies, round_.failures, round_.bytes_down, round_.bytes_up)


class _Round:
    """The requests, pending replies and results of one round."""

    def __init__(self, engine: FlowerExchange, outgoing: Outgoing) -> None:
        self.replies: dict[AgentId, bytes] = {}
        self.failures: dict[AgentId, Failure] = {}
        self.bytes_down: dict[AgentId, int] = {}
        self.bytes_up: dict[AgentId, int] = {}
        self.start = time.monotonic()
        self.end = self.start + engine.deadline
        self._engine = engine
        self._outgoing = outgoing
        self._waiting: dict[str, AgentId] = {}  # by message
        self._due: dict[AgentId, float] = {}  # when to ask
        self._pauses: dict[AgentId, float] = {}
        self._last: dict[AgentId, Failure] = {}  # why an agent is asked again
        self._again: set[AgentId] = set()  # agents that were sent all broadcasts again
        self._sweeps: list[_Sweep] = []
        for name in outgoing.requests:
            if name in engine.nodes:
                self._due[name] = 0.0
            else:
                self.failures[name] = Failure("unknown")

    @property
    def open(self) -> bool:
        """Whether an agent may still answer."""
        return bool(self._waiting or self._due)

    def close(self) -> None:
        """Record a failure of every agent without an answer."""
        for sweep in self._sweeps:
            sweep.over = True
        for name in [*self._waiting.values(), *self._due]:
            self.failures[name] = self._last.get(name, Failure("absent"))

    def ask(self, seconds: float) -> None:
        """Send all due requests together."""
        now = time.monotonic()
        names = [
            name
            for name, when in self._due.items()
            if when <= now and (seconds >= LEAST or name not in self._last)
        ]
        if not names:
            return
        if self._engine.allow is not None:
            self._engine.allow(dict.fromkeys(names, self._outgoing.most))
        messages = [self._message(name, seconds) for name in names]
        ids: dict[AgentId, str | None] = {}
        try:
            ids = dict(zip(names, self._engine.grid.push_messages(messages), strict=False))
        except ControlRefused as error:  # such as one that expires before the hub reads it
            logger.warning("Requests to %s were not sent: %s", names, error)
        for name in names:
            del self._due[name]
            sent = ids.get(name)
            if sent:
                self._waiting[sent] = name
            else:
                self._not_there(name, "Flower does not accept a message to it")

    def _message(self, name: AgentId, seconds: float) -> Message:
        from flwr.app import ConfigRecord, Message, RecordDict

        present = self._engine.has.get(name, frozenset())
        request = self._outgoing.requests[name]
        blobs = [data for digest, data in self._outgoing.blobs.items() if digest not in present]
        size = len(request) + sum(map(len, blobs))
        self.bytes_down[name] = self.bytes_down.get(name, 0) + size
        fields = ConfigRecord(
            {
                "body": request,
                "blobs": blobs,
                "seconds": seconds,
                "defer": self._outgoing.defer,
            }
        )
        return Message(
            RecordDict({"request": fields}),
            dst_node_id=self._engine.nodes[name],
            message_type="query.respond",
            group_id=str(self._outgoing.serial),
            ttl=seconds,
        )

    def collect(self) -> None:
        """Take the replies that have arrived."""
        in_progress = {sweep.at for sweep in self._sweeps if sweep.is_alive()}
        if not any(sweep.is_alive() and not sweep.stuck for sweep in self._sweeps):
            for sweep in self._sweeps:
                sweep.over = True
            ids = [sent for sent in self._waiting if sent not in in_progress]
            self._sweeps.append(_Sweep(self._engine.grid, ids))
        self._sweeps[-1].join(POLL)
        for sweep in self._sweeps:
            if sweep.lost is not None:
                raise sweep.lost
            while sweep.replies:
                sent, message = sweep.replies.pop()
                name = self._waiting.pop(sent, None)
                if name is not None:
                    self._take(name, message)
        self._sweeps = [sweep for sweep in self._sweeps if sweep.is_alive()]

    def _take(self, name: AgentId, message: Message | Exception) -> None:
        answer = self._answer(message)
        if isinstance(answer, Failure):
            if answer.code == "absent":
                self._not_there(name, answer.detail)
            else:
                self.failures[name] = answer
            return
        self.bytes_up[name] = self.bytes_up.get(name, 0) + len(answer)
        code = refusal_code(answer)
        if code == "busy":
            self._ask_again(name, Failure("busy"))
        elif code == "missing" and name not in self._again:
            self._again.add(name)
            self._engine.has[name] = frozenset()
            self._due[name] = 0.0
        else:
            self._engine.has[name] = frozenset(self._outgoing.blobs)
            self.replies[name] = answer

    def _not_there(self, name: AgentId, why: str) -> None:
        """Ask an absent agent again, unless it was absent in the last round already."""
        failure = Failure("absent", why)
        patience = 0.0 if name in self._engine.gone else self._engine.absence
        if time.monotonic() - self.start < patience:
            self._ask_again(name, failure)
        else:
            self.failures[name] = failure

    def _ask_again(self, name: AgentId, why: Failure) -> None:
        pause = min(2 * self._pauses.get(name, PAUSE / 2), LONGEST_PAUSE)
        self._pauses[name], self._last[name] = pause, why
        self._due[name] = time.monotonic() + pause

    def _answer(self, message: Message | Exception) -> bytes | Failure:
        """The site's bytes, or a failure; a node's error text is not repeated."""
        if isinstance(message, Exception):
            return Failure("malformed", f"Flower cannot read it: {type(message).__name__}")
        if message.has_error():
            return Failure("absent", f"Flower reports error {message.error.code} for its node")
        try:
            fields = message.content["reply"]
            answer, code = fields.get("answer"), fields.get("code")
        except Exception:
            return Failure("malformed", "its node sent no reply")
        if not isinstance(answer, bytes):
            reason = code if code in ("absent", "failed") else "malformed"
            return Failure(reason, "the site process does not run" if reason == "absent" else "")
        if len(answer) > min(self._outgoing.most, self._engine.max_bytes + FRAME_BYTES):
            return Failure("malformed", f"its reply has {len(answer)} bytes")
        return answer


class _Sweep(threading.Thread):
    """One poll for replies, each read by itself in a thread.

    A node may announce a reply and never send it, for which Flower waits minutes, or send one that
    Flower cannot read. Neither affects the replies of other nodes.
    """

    def __init__(self, grid: Grid, ids: Iterable[str]) -> None:
        super().__init__(name="replies", daemon=True)
        self.at: str | None = None
        self.over = False  # stop after the current reply
        self.replies: list[tuple[str, Message | Exception]] = []
        self.lost: HubLost | None = None
        self._grid = grid
        self._ids = tuple(ids)
        self._since = time.monotonic()
        self.start()

    @property
    def stuck(self) -> bool:
        """Whether the current reply takes longer than `STUCK`."""
        return time.monotonic() - self._since > STUCK

    def run(self) -> None:
        """Read the replies. A reply belongs to its request; Flower's sender field is not used."""
        for sent in self._ids:
            if self.over:
                return
            self.at, self._since = sent, time.monotonic()
            try:
                self.replies += [(sent, message) for message in self._grid.pull_messages([sent])]
            except HubLost as error:
                self.lost = error
                return
            except Exception as error:  # of one reply
                self.replies.append((sent, error))
