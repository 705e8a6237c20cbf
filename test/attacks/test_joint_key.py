"""Attacks on the keys of an epoch. Each takes effect on the scheme without masks, as a control.

Without masks an agent sends its ciphertext and its share as they are: what the server, or an agent
who listens, then computes is computed here first. The real objects send both under masks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.privacy.hazmat import ckks
from test.attacks.world import (
    LARGE,
    NAMES,
    World,
    decrypted,
    is_uniform,
    is_unrelated,
    smallest,
)

HONEST = NAMES[:3]  # dee is with the attacker, where one is


@pytest.fixture
def world() -> World:
    return World()


def summed(world: World, names: tuple[str, ...] = NAMES) -> tuple[np.ndarray, np.ndarray]:
    """The sum of ciphertexts, both parts."""
    parts = [world.parts(name) for name in names]
    first = ckks.sum_words(world.ring, [c0 for c0, _ in parts])
    return first, ckks.sum_words(world.ring, [c1 for _, c1 in parts])


def closed(world: World, secret: np.ndarray, names: tuple[str, ...] = HONEST) -> None:
    """Whoever has the key of the epoch reads contributions without masks, and none with them."""
    for name in names:
        c0, c1 = world.parts(name)
        truth = world.integers[name].numpy()
        integers, noise = decrypted(world, world.bare(name), c1, secret)
        assert np.array_equal(integers[: world.dim], truth)
        assert np.abs(noise).max() < 1e-6
        integers, noise = decrypted(world, c0, c1, secret)
        assert np.abs(noise).max() > 0.4
        assert is_unrelated(integers.astype(float), truth.astype(float))
        assert is_uniform(world, c0)


def test_a_server_that_asks_for_a_polynomial_of_its_choice(world: World) -> None:
    """A: the constant 2^80 as "the sum". Each share was the agent's key times it, with noise."""
    assert world.payloads
    request = world.request(world.constant(LARGE))
    for name in NAMES:
        secret = world.secret(name)
        bare = smallest(world, world.bare_share(name, world.constant(LARGE)), LARGE)
        assert np.array_equal(bare, secret)  # without masks: the whole key from one query
        rows = world.rows(world.share(name, request), name)
        found = smallest(world, rows, LARGE)
        assert is_uniform(world, rows)
        assert is_unrelated(found, secret.astype(float))
        assert np.mean(np.abs(found) <= 1) < 0.01  # not even ternary
    # And one polynomial is all that they answer.
    with pytest.raises(ProtocolError, match="Another sum of round 0"):
        world.share("ann", world.request(world.constant(2 * LARGE)))


def test_an_agent_that_chooses_its_ciphertext_last(world: World) -> None:
    """B: dee makes the second parts add up to a constant. Each share was a key, as in A."""
    others = summed(world, HONEST)[1]
    primes = np.array(world.primes, dtype=np.uint64)[:, None]
    chosen = (world.constant(LARGE) + primes - others) % primes
    first, second = summed(world, HONEST)
    total = world.total(first, (second + chosen) % primes)
    for name in HONEST:
        bare = smallest(world, world.bare_share(name, world.constant(LARGE)), LARGE)
        assert np.array_equal(bare, world.secret(name))
        rows = world.rows(world.share(name, world.channel.request(total)), name)
        assert is_uniform(world, rows)
        assert is_unrelated(smallest(world, rows, LARGE), world.secret(name).astype(float))


def test_a_victim_s_ciphertext_as_the_sum(world: World) -> None:
    """C: server and dee have ann's ciphertext opened. All shares together were her numbers."""
    c0, c1 = world.parts("ann")
    shares = [world.bare_share(name, c1) for name in NAMES]
    integers, _ = ckks.decode(world.ring, ckks.sum_words(world.ring, [world.bare("ann"), *shares]))
    truth = world.integers["ann"].numpy()
    assert np.array_equal(integers[: world.dim], truth)
    total = world.total(c0, c1)
    request = world.channel.request(total)
    given = {name: world.share(name, request) for name in NAMES}
    at = {"epoch": world.epoch, "round": 0}
    fused = world.channel.fuse(total, given, **at)
    with pytest.raises(MessageError, match="no sum on the grid"):
        world.channel.open(fused, {}, **at, secrets=world.stores["dee"])
    # Dee takes away all masks that she knows: what the sum is masked with, and ann's with her.
    rows = world.channel._rows(world.channel._body(fused, 6, world.epoch, 0, "")[32:])
    known = [world.group_mask("dee"), world.pair_masks("dee", "ann", request)]
    left = ckks.add_masks(world.ring, rows.astype(np.uint64), [], known)
    for candidate in (rows, left):
        integers, noise = ckks.decode(world.ring, candidate.astype(np.uint64))
        assert is_uniform(world, candidate)
        assert is_unrelated(integers.astype(float), truth.astype(float))
        assert np.abs(noise).max() > 0.4


@pytest.mark.parametrize("who", ["server and agent", "agent alone"])
def test_a_malformed_ciphertext_that_was_committed_in_advance(world: World, who: str) -> None:
    """F: dee adds 2^80 to her second part, which depends on nobody else's.

    No commitment prevents it, and nobody sees it: the sum opens, with the joint secret of all in
    the digits between numbers and noise. It is the key of the epoch: each ciphertext without masks
    opens. With masks it opens what is open anyway, the sum.
    """
    primes = np.array(world.primes, dtype=np.uint64)[:, None]
    first, second = summed(world)
    total = world.total(first, (second + world.constant(LARGE)) % primes)
    shares = {name: world.share(name, world.channel.request(total)) for name in NAMES}
    at = {"epoch": world.epoch, "round": 0}
    fused = world.channel.fuse(total, shares, **at)
    integers, noise = world.channel._decoded(fused, world.epoch, 0, world.stores["dee"])
    truth = torch.stack(list(world.integers.values())).sum(dim=0)
    assert np.array_equal(integers, truth.numpy())
    assert float(np.abs(noise).max()) < 0.25  # honest agents notice nothing
    assert torch.equal(world.channel.open(fused, {}, **at, secrets=world.stores["ann"]), truth)
    found = np.rint(noise * (world.ring.step / LARGE))
    joint = sum(world.secret(name) for name in NAMES)
    assert np.array_equal(found, joint)  # the key of the epoch is known
    closed(world, world.joint_words())
    if who == "agent alone":
        return
    # A contribution and its sender's share, where the sender's own mask cancels, with the mask that
    # dee shares with the sender taken away: still closed.
    request = world.channel.request(total)
    together = {
        name: ckks.sum_words(world.ring, [world.parts(name)[0], world.rows(shares[name], name)])
        for name in HONEST
    }
    for name in HONEST:
        numbers = world.integers[name].double().numpy()
        mask = [world.pair_masks("dee", name, request)]
        for candidate in (
            ckks.add_masks(world.ring, together[name], mask, []),
            ckks.add_masks(world.ring, together[name], [], mask),
            ckks.add_masks(world.ring, together[name], [], [*mask, world.group_mask("dee")]),
        ):
            found, _ = ckks.decode(world.ring, candidate)
            assert is_uniform(world, candidate)
            assert is_unrelated(found.astype(float), numbers)
    # Nor do two of the three: the sum of the honest ones is all that there is.
    masks = [world.pair_masks("dee", name, request) for name in HONEST[:2]]
    pair = ckks.sum_words(world.ring, [together[name] for name in HONEST[:2]])
    assert is_uniform(world, ckks.add_masks(world.ring, pair, [], masks))


def test_contributions_of_one_round_share_no_mask() -> None:
    """An agent that is asked for two contributions to a round hides each under another mask."""
    world = World(dim=500)
    first = world.parts("ann")[0].astype(np.uint64)
    world.payloads["ann"] = world.contribution("ann")
    second = world.parts("ann")[0].astype(np.uint64)
    primes = np.array(world.primes, dtype=np.uint64)[:, None]
    assert is_uniform(world, (first + primes - second) % primes)
    # The share takes the last one away: with the first one nothing opens.
    request = world.channel.request(world.total(*summed(world)))
    shares = {name: world.share(name, request) for name in NAMES}
    sums = {
        which: world.total((summed(world)[0] + primes - second + part) % primes, summed(world)[1])
        for which, part in (("first", first), ("second", second))
    }
    at: Any = {"epoch": world.epoch, "round": 0, "secrets": world.stores["bob"]}
    truth = torch.stack(list(world.integers.values())).sum(dim=0)
    assert torch.equal(world.channel.open(sums["second"], shares, **at), truth)
    with pytest.raises(MessageError, match="no sum on the grid"):
        world.channel.open(sums["first"], shares, **at)


def test_a_server_that_asks_every_agent_for_something_else(world: World) -> None:
    """Multiples of 2^56 of the keys in digits of their own: the shares' sum had told them apart.

    Masks of shares that know nothing of the request would cancel here.
    """
    c0, c1 = summed(world)
    primes = np.array(world.primes, dtype=np.uint64)[:, None]
    units = {name: 2 ** (68 + 8 * place) for place, name in enumerate(HONEST)} | {"dee": 0}
    asked = {name: (c1 + world.constant(unit)) % primes for name, unit in units.items()}
    bare = [world.bare_share(name, asked[name]) for name in NAMES]
    terms = [world.bare(name) for name in NAMES]
    _, noise = ckks.decode(world.ring, ckks.sum_words(world.ring, [*terms, *bare]))
    left = noise * float(world.ring.step)
    for name in reversed(HONEST):
        found = np.rint(left / units[name])
        assert np.array_equal(found, world.secret(name))  # three keys from one sum
        left -= found * units[name]
    rows = [
        world.rows(world.share(name, world.request(asked[name])), name).astype(np.uint64)
        for name in NAMES
    ]
    fused = ckks.sum_words(world.ring, [c0, *rows])
    opened = ckks.add_masks(world.ring, fused, [], [world.group_mask("dee")])
    assert is_uniform(world, opened)
    _, noise = ckks.decode(world.ring, opened)
    assert np.abs(noise).max() > 0.4


@pytest.mark.parametrize("opened_by", ["agents", "server"])
def test_what_a_coalition_of_server_and_agent_learns_of_an_honest_round(opened_by: str) -> None:
    """The sum of the others, and nothing before all others have helped to open it."""
    world = World(dim=500, opened_by=opened_by)
    first, second = summed(world)
    mask = [world.group_mask("dee")] if opened_by == "agents" else []
    before = ckks.add_masks(world.ring, first, [], mask)
    integers, noise = decrypted(world, before, second, world.joint_words())
    assert is_uniform(world, before)  # also for who has the key: each has a mask of its own on it
    truth = torch.stack([world.integers[name] for name in HONEST]).sum(dim=0)
    total = world.total(first, second)
    request = world.channel.request(total)
    shares = {name: world.share(name, request) for name in NAMES}
    for missing in HONEST:
        some = {name: share for name, share in shares.items() if name != missing}
        fused = world.channel._fused(total, some, world.epoch, 0)
        integers, noise = world.channel._decoded(fused, world.epoch, 0, world.stores["dee"])
        assert np.abs(noise).max() > 0.4
        assert is_unrelated(integers[:500].astype(float), truth.double().numpy())
    at = {"epoch": world.epoch, "round": 0}
    opened = world.channel.open(total, shares, **at, secrets=world.stores["dee"])
    assert torch.equal(opened - world.integers["dee"], truth)


def test_contributions_of_another_set_up_do_not_add_up() -> None:
    """Masks are of one transcript: who is told other announcements is out of the sum, and shows."""
    world, other = World(dim=64), World(dim=64)
    assert world.epoch == other.epoch
    data = bytearray(other.payloads["ann"])
    body = bytes(world.channel._body(world.payloads["ann"], 0, world.epoch, 0, "ann"))[:32]
    with pytest.raises(MessageError, match="different set-ups"):
        world.channel.add({**world.payloads, "ann": bytes(data)}, epoch=world.epoch, round=0)
    # The server says that it is of this set-up.
    foreign = world.channel._body(other.payloads["ann"], 0, world.epoch, 0, "ann")[32:]
    forged = world.channel._frame(0, body + bytes(foreign), world.epoch, 0, "ann")
    at = {"epoch": world.epoch, "round": 0}
    total = world.channel.add({**world.payloads, "ann": forged}, **at)
    shares = {name: world.share(name, world.channel.request(total)) for name in NAMES}
    with pytest.raises(MessageError, match="no sum on the grid"):
        world.channel.open(total, shares, **at, secrets=world.stores["bob"])
    # Nor is a share of an earlier round good for a later one.
    later = world.channel._frame(
        3,
        bytes(world.channel._body(shares["ann"], 3, world.epoch, 0, "ann")),
        world.epoch,
        1,
        "ann",
    )
    moved = world.channel._frame(
        1, bytes(world.channel._body(total, 1, world.epoch, 0, "")), world.epoch, 1, ""
    )
    world.channel.check_share(later, epoch=world.epoch, round=1, sender="ann", total=moved)
    again = {
        name: world.channel.protect(
            world.integers[name],
            epoch=world.epoch,
            round=1,
            me=name,
            key=world.key,
            secrets=world.stores[name],
        )
        for name in NAMES
    }
    total = world.channel.add(again, epoch=world.epoch, round=1)
    honest = {
        name: world.channel.share(
            total, epoch=world.epoch, round=1, me=name, secrets=world.stores[name]
        )
        for name in NAMES
    }
    digest = bytes(world.channel._body(honest["ann"], 3, world.epoch, 1, "ann"))[:32]
    rows = bytes(world.channel._body(later, 3, world.epoch, 1, "ann"))[32:]
    replayed = {**honest, "ann": world.channel._frame(3, digest + rows, world.epoch, 1, "ann")}
    with pytest.raises(MessageError, match="no sum on the grid"):
        world.channel.open(total, replayed, epoch=world.epoch, round=1, secrets=world.stores["bob"])
