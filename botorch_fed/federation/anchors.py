"""How others see a site's ledger: an older copy of it is noticed, by the hub's word or a peer's.

A reply carries the ledger's length and head, under a seal that the site alone can make. The hub
keeps the longest of each site, across runs, and sends all of them with every request; so do sites,
which give back what they have seen of others. A site that is shown an own seal over more events
than its ledger has, or over others, refuses to go on.
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
    """Anchors as they are kept: of whom they were heard, one of each ledger."""

    anchors: Mapping[str, tuple[Anchored, ...]] = field(repr=False)


class Anchors:
    """What one party has seen of ledgers.

    Args:
        store: Where it is kept, across runs.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        data = store.get(_SEEN)
        self._seen: dict[str, tuple[Anchored, ...]] = {}
        if data is not None:
            try:
                found: _Seen = decode(data, _Seen, max_bytes=2**26)
            except MessageError as error:
                raise ProtocolError(f"What was seen of ledgers cannot be read: {error}") from error
            self._seen = dict(found.anchors)

    def all(self) -> tuple[Anchored, ...]:
        """Every anchor, once."""
        found = {anchor for anchors in self._seen.values() for anchor in anchors}
        return tuple(sorted(found, key=lambda a: (a.agent, a.ledger, a.length, a.head)))

    def hear(self, sender: AgentId, anchors: Iterable[Anchored]) -> None:
        """Keep the longest of each ledger that a party speaks of.

        What one party says takes nothing from what another has said: only the owner can tell which
        seal is right.
        """
        known = {(a.agent, a.ledger): a for a in self._seen.get(sender, ())}
        before = dict(known)
        for anchor in anchors:
            old = known.get((anchor.agent, anchor.ledger))
            if old is None or anchor.length > old.length:
                known[anchor.agent, anchor.ledger] = anchor
        if known != before:
            self._seen[sender] = tuple(known.values())[:MAX_ANCHORS]
            self._store.put(_SEEN, encode(_Seen(self._seen), max_bytes=2**26))


class SiteBooks:
    """A site's ledger, and what others have seen of it.

    Args:
        ledger: The ledger.
        name: The site.
        store: Where its seal's key and what it has seen of others lie; apart from the ledger.
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
        """The ledger as it is now, and what was seen of others."""
        length, head = self.ledger.mark
        mine = Anchored(self.name, self._label, length, head, self._seal(length, head))
        self._peers.hear(self.name, (mine,))  # so that this machine notices an older copy too
        return self._peers.all()

    def check(self, anchors: Iterable[Anchored]) -> None:
        """Raise `ProtocolError` if the ledger is not what others have seen of it."""
        for anchor in anchors:
            if (anchor.agent, anchor.ledger) != (self.name, self._label):
                continue
            seal = self._seal(anchor.length, anchor.head)
            if not hmac.compare_digest(seal.encode(), anchor.seal.encode()):
                continue  # somebody has made it up
            if self.ledger.head_at(anchor.length) != anchor.head:
                raise ProtocolError(
                    f"The ledger {self.ledger.path} has {len(self.ledger)} events, and others have "
                    f"seen it with {anchor.length}, head {anchor.head[:12]}…: it was restored from "
                    "an older copy, cut back or exchanged, so that it counts too little. Restore "
                    "the newest copy. If there is none, name another path in [ledger], with a "
                    "budget that is smaller by what may have been spent."
                )

    def hear(self, sender: AgentId, anchors: Iterable[Anchored]) -> None:
        """Keep what the hub has sent of others' ledgers."""
        self._peers.hear(sender, anchors)

    def _seal(self, length: int, head: str) -> str:
        text = f"{self.name}\0{self._label}\0{length}\0{head}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()
