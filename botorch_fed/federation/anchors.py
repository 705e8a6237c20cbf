"""Anchors: records of a site's ledger at other parties, which detect an older copy of it.

An anchor holds the ledger's length and head, under a seal that only the site can make. Every reply
carries the site's anchors. The hub keeps the longest anchor of each site, across runs, and sends
all anchors with every request; sites keep and return the anchors of other sites. A site stops when
it receives its seal over more events than its ledger has, or over other events.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.base import AgentId, Anchored
from botorch_fed.privacy import SharedLedger
from botorch_fed.storage.store import Store
from botorch_fed.wire.codec import decode, encode

MAX_ANCHORS = 10_000
_KEY, _SEEN = "key", "seen"


@dataclass(frozen=True)
class _Seen:
    """Stored anchors by sender, one for each ledger."""

    anchors: Mapping[str, tuple[Anchored, ...]] = field(repr=False)


class Anchors:
    """The anchors that one party has received.

    Args:
        store: The store of the anchors, kept across runs.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        data = store.get(_SEEN)
        self._seen: dict[str, tuple[Anchored, ...]] = {}
        if data is not None:
            try:
                stored: _Seen = decode(data, _Seen, max_bytes=2**26)
            except MessageError as error:
                raise ProtocolError(
                    f"The stored anchors of ledgers cannot be read: {error} Restore the folder "
                    "from a copy."
                ) from error
            self._seen = dict(stored.anchors)

    def all(self) -> tuple[Anchored, ...]:
        """Every anchor, once."""
        distinct = {anchor for anchors in self._seen.values() for anchor in anchors}
        return tuple(sorted(distinct, key=lambda a: (a.agent, a.ledger, a.length, a.head)))

    def hear(self, sender: AgentId, anchors: Iterable[Anchored]) -> None:
        """Keep the longest anchor of each ledger that a sender reports.

        Anchors of different senders are kept apart: only the owner of a ledger can verify a seal.
        """
        longest = {(a.agent, a.ledger): a for a in self._seen.get(sender, ())}
        before = dict(longest)
        for anchor in anchors:
            old = longest.get((anchor.agent, anchor.ledger))
            if old is None or anchor.length > old.length:
                longest[anchor.agent, anchor.ledger] = anchor
        if longest != before:
            self._seen[sender] = tuple(longest.values())[:MAX_ANCHORS]
            self._store.put(_SEEN, encode(_Seen(self._seen), max_bytes=2**26))


class SealedLedger:
    """A site's ledger and its anchors.

    Args:
        ledger: The ledger.
        name: The site.
        store: The store of the seal's key and of other sites' anchors, apart from the ledger.
    """

    def __init__(self, ledger: SharedLedger, name: AgentId, store: Store) -> None:
        self.ledger, self.name = ledger, name
        if store.get(_KEY) is None:
            store.put_new(_KEY, secrets.token_bytes(32))
        self._key = store.get(_KEY) or b""
        self._peers = Anchors(store)
        self._label = hashlib.sha256(str(ledger.path).encode()).hexdigest()[:16]
        self.check(self._peers.all())

    def anchors(self) -> tuple[Anchored, ...]:
        """A new anchor of this ledger, and all anchors received."""
        length, head = self.ledger.mark
        mine = Anchored(self.name, self._label, length, head, self._seal(length, head))
        self._peers.hear(self.name, (mine,))  # this machine detects an older copy too
        return self._peers.all()

    def check(self, anchors: Iterable[Anchored]) -> None:
        """Raise `ProtocolError` if the ledger contradicts an anchor with this site's seal."""
        for anchor in anchors:
            if (anchor.agent, anchor.ledger) != (self.name, self._label):
                continue
            seal = self._seal(anchor.length, anchor.head)
            if not hmac.compare_digest(seal.encode(), anchor.seal.encode()):
                continue  # a forged anchor
            if self.ledger.head_at(anchor.length) != anchor.head:
                raise ProtocolError(
                    f"The ledger {self.ledger.path} has {len(self.ledger)} events; other parties "
                    f"recorded {anchor.length} events, head {anchor.head[:12]}…. It was restored "
                    "from an older copy, cut back or exchanged, so that it counts too little. "
                    "Restore the newest copy. If there is none, name another path in [ledger], "
                    "with a budget reduced by the amount that may have been spent."
                )

    def hear(self, sender: AgentId, anchors: Iterable[Anchored]) -> None:
        """Keep anchors of other sites' ledgers that the hub has sent."""
        self._peers.hear(sender, anchors)

    def _seal(self, length: int, head: str) -> str:
        text = f"{self.name}\0{self._label}\0{length}\0{head}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()
