"""Attacks on the masks of an agent's own: subsets, repeated questions, crashes, split rosters."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from botorch_fed.errors import ProtocolError
from botorch_fed.privacy.channels import Epoch, Gathered
from botorch_fed.privacy.hazmat import ckks, keys
from botorch_fed.storage.store import MemoryStore
from test.attacks.world import NAMES, World, decrypted, is_uniform

HONEST = NAMES[:3]  # dee is with the server
SMALL = 64


class _Crash(Exception):
    pass


class Crashing(MemoryStore):
    """A store whose process ends before one of its changes, and whose changes can be interleaved.

    Attributes:
        left: How many changes are still made; None for all.
        before: What another process does before a name is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None
        self.before: dict[str, Callable[[], None]] = {}

    def put_new(self, name: str, data: bytes) -> None:
        self.before.pop(name, lambda: None)()
        self._count()
        super().put_new(name, data)

    def delete(self, name: str) -> None:
        self._count()
        super().delete(name)

    def _count(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise _Crash
            self.left -= 1


def crashing(world: World) -> Crashing:
    """Ann's store, in the place of the one that she has."""
    store = Crashing()
    world.stores["ann"] = store
    return store


def words(rows: Any) -> np.ndarray:
    return np.asarray(rows, dtype=np.uint64)


def minus(world: World, rows: np.ndarray) -> np.ndarray:
    primes = np.array(world.primes, dtype=np.uint64)[:, None]
    return (primes - words(rows)) % primes


def summed(world: World, terms: Any) -> np.ndarray:
    return ckks.sum_words(world.ring, [words(term) for term in terms])


def request_of(world: World) -> bytes:
    """The honest request of a round to which all have contributed."""
    parts = [world.parts(name) for name in NAMES]
    total = world.total(*(summed(world, part) for part in zip(*parts, strict=True)))
    return world.channel.request(total)


def opens(world: World, rows: np.ndarray) -> bool:
    """Whether rows are an encoded sum: their noise is small."""
    return bool(np.abs(ckks.decode(world.ring, rows)[1]).max() < 0.25)


def heard_by(world: World, epoch: Epoch, stores: dict[str, Any]) -> Gathered:
    """The set-up of another epoch or roster."""
    heard: Gathered = ()
    for phase in range(world.channel.setup_phases):
        messages = {
            name: world.channel.prepare(phase, epoch, name, heard, stores[name])
            for name in epoch.roster
        }
        heard = (*heard, world.channel.gather(messages, epoch=epoch, gathered=heard))
    return heard


# ------------------------------------------------------------------ parts of what was sent


@pytest.mark.parametrize("opened_by", ["agents", "server"])
def test_no_part_of_what_honest_agents_send_opens(opened_by: str) -> None:
    """Of ann's two contributions, the others' and all shares only one selection is a sum.

    Server and dee take away all masks that dee knows. The one selection is the last contribution
    of each, and everybody's share.
    """
    world = World(dim=SMALL, opened_by=opened_by)
    first = words(world.parts("ann")[0])
    world.payloads["ann"] = world.contribution("ann")
    request = request_of(world)
    sent = {"ann's first": first}
    sent |= {name: words(world.parts(name)[0]) for name in HONEST}
    for name in HONEST:
        rows = words(world.rows(world.share(name, request), name))
        mask = [world.pair_masks("dee", name, request)]  # of a pair: ann's, bob's, cem's first
        sent[f"{name}'s share"] = ckks.add_masks(world.ring, rows, [], mask)
    own = [world.bare("dee"), world.rows(world.share("dee", request), "dee")]
    own[1] = ckks.add_masks(
        world.ring,
        words(own[1]),
        [world.pair_masks("dee", name, request) for name in HONEST],
        [],
    )
    own_key = world.stores["dee"].get(world.channel._own_key_name(world.epoch, "dee", 0)) or b""
    own[1] = ckks.add_masks(world.ring, own[1], [own_key], [])
    known = [[], [world.group_mask("dee")]] if opened_by == "agents" else [[]]
    found = set()
    for size in range(1, len(sent) + 1):
        for chosen in itertools.combinations(sent, size):
            rows = summed(world, [*own, *(sent[name] for name in chosen)])
            if any(opens(world, ckks.add_masks(world.ring, rows, [], masks)) for masks in known):
                found.add(frozenset(chosen))
    assert found == {frozenset(sent) - {"ann's first"}}


def test_two_shares_with_two_own_masks_would_open_what_one_agent_has_changed() -> None:
    """A second contribution that is made while the first one is being opened stays closed.

    The control: shares of one request that differ in their own masks alone, subtracted.
    """
    world = World(dim=SMALL)
    ann = crashing(world)
    first = world.parts("ann")
    earlier, integers = world.integers["ann"], world.integers["ann"].flip(0)
    request = request_of(world)
    name = world.channel._own_key_name(world.epoch, "ann", 0)
    key = ann.get(name) or b""

    def contribute() -> None:  # another process of the same site
        world.integers["ann"] = integers
        world.payloads["ann"] = world.contribution("ann")

    ann.before[f"{world.channel.handle(world.epoch, 'ann')}-0"] = contribute
    shares = [words(world.rows(world.share("ann", request), "ann")) for _ in range(2)]
    assert np.array_equal(*shares)
    second, later = world.parts("ann"), ann.get(name) or b""
    assert later != key  # it was made
    c1 = summed(world, [second[1], minus(world, first[1])])

    def changed(rows: np.ndarray) -> tuple[Any, Any]:
        """The difference of the contributions with that of the shares, by who has the key."""
        c0 = summed(world, [second[0], minus(world, first[0]), rows, minus(world, shares[0])])
        return decrypted(world, c0, c1, world.joint_words())

    control = ckks.add_masks(world.ring, shares[0], [key], [later])
    numbers, noise = changed(control)
    assert np.array_equal(numbers[:SMALL], (integers - earlier).numpy())
    assert np.abs(noise).max() < 1e-6
    assert np.abs(changed(shares[1])[1]).max() > 0.4
    with pytest.raises(ProtocolError, match="was opened"):
        world.contribution("ann")


def test_a_contribution_is_not_opened_by_a_share_of_another_round() -> None:
    world = World(dim=SMALL)
    assert world.payloads
    request = request_of(world)
    world.share("ann", request)
    later = world.channel._frame(2, request[-world.channel._polynomial_bytes :], world.epoch, 1, "")
    at: Any = {"epoch": world.epoch, "me": "ann", "secrets": world.stores["ann"]}
    with pytest.raises(ProtocolError, match="nothing in the sum of round 1"):
        world.channel.share(later, round=1, **at)
    world.channel.protect(world.integers["ann"], round=1, key=world.key, **at)
    # The first one's share is what it was, and the second one's has a mask of its own.
    shares = [
        words(world.rows(world.share("ann", request), "ann")),
        words(
            world.channel._share(
                world.channel._body(
                    world.channel.share(later, round=1, **at), 3, world.epoch, 1, "ann"
                ),
                None,
            )
        ),
    ]
    assert is_uniform(world, summed(world, [shares[0], minus(world, shares[1])]))


# ------------------------------------------------------------------ rosters


def test_honest_agents_that_were_told_different_rosters_open_nothing() -> None:
    """Ann and bob are told that all take part, cem that he does so with dee, in the same epoch."""
    world = World(dim=SMALL)
    assert world.payloads
    smaller = Epoch(world.epoch.run, world.epoch.number, ("cem", "dee"))
    with pytest.raises(ProtocolError, match="another roster"):
        world.channel.prepare(0, smaller, "cem", (), world.stores["cem"])
    cem = {"cem": MemoryStore(), "dee": MemoryStore()}  # he was asked for that one alone
    key = world.channel.joint_key(smaller, heard_by(world, smaller, cem))
    at: Any = {"epoch": smaller, "round": 0, "me": "cem", "secrets": cem["cem"]}
    world.channel.joint_key(smaller, heard_by(world, smaller, cem), me="cem", secrets=cem["cem"])
    given = world.channel.protect(world.integers["cem"], key=key, **at)
    body = world.channel._body(given, 0, smaller, 0, "cem")
    contributions = [world.parts(name)[0] for name in ("ann", "bob")]
    contributions.append(world.channel._parts(body)[0])
    request = request_of(world)
    framed = world.channel._frame(2, request[-world.channel._polynomial_bytes :], smaller, 0, "")
    share = world.channel.share(framed, **at)
    shares = [world.rows(world.share(name, request), name) for name in ("ann", "bob")]
    shares.append(world.channel._share(world.channel._body(share, 3, smaller, 0, "cem"), None))
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            rows = [part[i] for i in chosen for part in (contributions, shares)]
            assert not opens(world, summed(world, rows))
    # Ann and bob alone, with all that dee knows of both: cem's masks on their shares are left.
    masks = [world.pair_masks("dee", name, request) for name in ("ann", "bob")]
    rows = summed(world, [*contributions[:2], *shares[:2]])
    for taken in (masks, [*masks, world.group_mask("dee")]):
        assert not opens(world, ckks.add_masks(world.ring, rows, [], taken))


# ------------------------------------------------------------------ the key to sums


def test_a_second_group_key_is_not_sealed_under_the_keys_of_the_first() -> None:
    """Ann gave one in epoch 0, has taken bob's in epoch 1, and is asked for epoch 0's again.

    The control: both sealed under one key; who has read the first then has the second.
    """
    world = World(dim=SMALL)
    ann, channel = world.stores["ann"], world.channel
    given = channel.prepare(1, world.epoch, "ann", world.heard[:1], ann)
    assert channel.prepare(1, world.epoch, "ann", world.heard[:1], ann) == given
    name = channel._group_name(world.epoch)
    first, second = ann.get(name) or b"", bytes(range(32))
    pair = keys.derived(
        (ann.get(f"{channel.handle(world.epoch, 'ann')}-pairs") or b"")[:32], b"group"
    )
    sealed = [np.frombuffer(keys.seal(pair, key, b""), np.uint8)[:32] for key in (first, second)]
    known = np.frombuffer(first, np.uint8)
    assert (sealed[0] ^ sealed[1] ^ known).tobytes() == second
    ann.delete(name)
    ann.put_new(name, second)
    with pytest.raises(ProtocolError, match="Another key to sums was given"):
        channel.prepare(1, world.epoch, "ann", world.heard[:1], ann)


# ------------------------------------------------------------------ crashes


def test_a_process_that_ends_at_any_change_sends_no_two_contributions_under_one_mask() -> None:
    """Ann is asked again, with other numbers, after every crash; the last one is opened, once."""
    world = World(dim=SMALL)
    ann = crashing(world)
    seen, own = [words(world.parts("ann")[0])], set()
    name = world.channel._own_key_name(world.epoch, "ann", 0)
    for left in (0, 1, None):  # the mask of before is deleted, the next one set
        ann.left = left
        world.integers["ann"] = world.integers["ann"].flip(0)
        own.add(ann.get(name))
        if left is None:
            world.payloads["ann"] = world.contribution("ann")
            seen.append(words(world.parts("ann")[0]))
            own.add(ann.get(name))
        else:
            with pytest.raises(_Crash):
                world.contribution("ann")
    assert len(own) == 3  # the first, none, the last
    assert is_uniform(world, summed(world, [seen[1], minus(world, seen[0])]))
    request = request_of(world)
    ann.left = 0
    with pytest.raises(_Crash):  # nothing leaves before it is known what was answered
        world.share("ann", request)
    ann.left = None
    shares = {n: [words(world.rows(world.share(n, request), n)) for _ in range(2)] for n in NAMES}
    assert all(np.array_equal(*both) for both in shares.values())
    rows = summed(world, [*(world.parts(n)[0] for n in NAMES), *(s for s, _ in shares.values())])
    opened = ckks.add_masks(world.ring, rows, [], [world.group_mask("ann")])
    truth = torch.stack(list(world.integers.values())).sum(dim=0)
    assert np.array_equal(ckks.decode(world.ring, opened)[0][:SMALL], truth.numpy())


@pytest.mark.parametrize("left", range(7))
def test_an_own_mask_outlives_no_key_of_its_epoch(left: int) -> None:
    """A crash at any change of `forget`; then the server has the same number set up again.

    What stays behind, keys of pairs, own masks and no record of an answer, would make a second
    share, for another polynomial.
    """
    world = World(dim=SMALL)
    ann = crashing(world)
    assert world.payloads
    request = request_of(world)
    world.share("ann", request)
    ann.left = left
    with contextlib.suppress(_Crash):
        world.channel.forget(world.epoch, "ann", ann)
    ann.left = None
    with contextlib.suppress(ProtocolError):  # the others have forgotten nothing, and refuse
        heard_by(world, world.epoch, world.stores)
    again = world.channel._frame(2, request[-world.channel._polynomial_bytes :], world.epoch, 0, "")
    if left == 0:  # nothing was forgotten
        assert world.share("ann", again) == world.share("ann", request)
        return
    with pytest.raises(ProtocolError, match="nothing in the sum"):
        world.share("ann", again)
