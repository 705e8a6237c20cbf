"""Channels: the same exact sums, who may open them, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pickle
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import tenseal
import torch
from botorch.exceptions.errors import InputDataError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.privacy import channels as channels_module
from botorch_fed.privacy.channels import (
    IDENTITY,
    Channel,
    CKKSChannel,
    Epoch,
    PlainChannel,
    ThresholdCKKSChannel,
    identity,
    safety_number,
)
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat import ckks, keys
from botorch_fed.rng import generator
from botorch_fed.storage.store import FileStore, MemoryStore

HEADER = channels_module._HEADER
Stores = dict[str, MemoryStore]


def epoch_of(num_agents: int, number: int = 0) -> Epoch:
    return Epoch("run", number, tuple(f"agent{i}" for i in range(num_agents)))


def set_up(channel: Channel, epoch: Epoch, stores: Stores | None = None) -> Any:
    stores = {name: MemoryStore() for name in epoch.roster} if stores is None else stores
    heard: tuple[dict[str, bytes], ...] = ()
    for phase in range(channel.setup_phases):
        messages = {
            name: channel.prepare(phase, epoch, name, heard, stores[name]) for name in epoch.roster
        }
        for name, message in messages.items():
            channel.check_prepared(message, epoch=epoch, sender=name, gathered=heard)
        heard = (*heard, dict(channel.gather(messages, epoch=epoch, gathered=heard)))
    made = {channel.joint_key(epoch, heard, me=name, secrets=stores[name]) for name in epoch.roster}
    assert made == {channel.joint_key(epoch, heard)}
    return stores, heard, made.pop()


def protect_all(
    channel: Channel, epoch: Epoch, round: int, rows: Tensor, stores: Stores, key: bytes
) -> dict[str, bytes]:
    return {
        name: channel.protect(row, epoch=epoch, round=round, me=name, key=key, secrets=stores[name])
        for name, row in zip(epoch.roster, rows, strict=True)
    }


def share_all(
    channel: Channel, epoch: Epoch, round: int, total: bytes, stores: Stores
) -> dict[str, bytes]:
    if not channel.open_phases:
        return {}
    request = channel.request(total)
    return {
        name: channel.share(request, epoch=epoch, round=round, me=name, secrets=stores[name])
        for name in epoch.roster
    }


def opened(channel: Channel, rows: Tensor, stores: Stores | None = None, round: int = 0) -> Tensor:
    epoch = epoch_of(len(rows))
    stores, _, key = set_up(channel, epoch, stores)
    payloads = protect_all(channel, epoch, round, rows, stores, key)
    for name, payload in payloads.items():
        channel.check(payload, epoch=epoch, round=round, sender=name, key=key)
    total = channel.add(payloads, epoch=epoch, round=round)
    shares = share_all(channel, epoch, round, total, stores)
    for name, share in shares.items():
        channel.check_share(share, epoch=epoch, round=round, sender=name, total=total)
    store = stores[epoch.roster[-1]]
    return channel.open(total, shares, epoch=epoch, round=round, secrets=store)


def random_rows(grid: PublicGrid, num_agents: int, seed: int = 0) -> Tensor:
    uniforms = generator(seed).uniform(num_agents, grid.dim)
    return torch.stack([grid.to_integers((2 * row - 1) * grid.bound) for row in uniforms])


def single_key(grid: PublicGrid, num_agents: int) -> tuple[CKKSChannel, Stores]:
    channel, secret = CKKSChannel.generate(grid)
    stores = {name: MemoryStore() for name in epoch_of(num_agents).roster}
    for store in stores.values():
        channel.provision(secret, store)
    return channel, stores


@lru_cache(maxsize=1)
def _world() -> Any:
    grid = PublicGrid(dim=20, bound=100.0, num_agents=4)
    channel, epoch, rows = ThresholdCKKSChannel(grid), epoch_of(3), random_rows(grid, 3)
    stores, heard, key = set_up(channel, epoch)
    payloads = protect_all(channel, epoch, 1, rows, stores, key)
    total = channel.add(payloads, epoch=epoch, round=1)
    return channel, epoch, rows, stores, heard, key, payloads, total


@dataclasses.dataclass
class World:
    channel: ThresholdCKKSChannel
    epoch: Epoch
    rows: Tensor
    stores: Stores
    heard: tuple[dict[str, bytes], ...]
    key: bytes
    payloads: dict[str, bytes]
    total: bytes
    shares: dict[str, bytes]


@pytest.fixture
def world() -> World:
    """A threshold epoch of three agents in round 1; the parts may not be changed."""
    channel, epoch, rows, stores, heard, key, payloads, total = _world()
    shares = share_all(channel, epoch, 1, total, stores)
    return World(channel, epoch, rows, stores, heard, key, dict(payloads), total, shares)


def resealed(payload: bytes, position: int, replacement: bytes) -> bytes:
    """A payload with other bytes in its body and a checksum that fits."""
    body = bytearray(payload[HEADER.size :])
    body[position : position + len(replacement)] = replacement
    fields = list(HEADER.unpack_from(payload))
    fields[5:] = len(body), hashlib.sha256(body).digest()
    return HEADER.pack(*fields) + bytes(body)


# ------------------------------------------------------------------ sums


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    dim=st.integers(1, 40),
    num_agents=st.integers(2, 4),
    bits=st.sampled_from([8, 36, 50]),
    seed=st.integers(0, 99),
)
def test_all_channels_open_the_sum(dim: int, num_agents: int, bits: int, seed: int) -> None:
    grid = PublicGrid(dim=dim, bound=1e4, num_agents=num_agents, precision=2.0**-bits)
    rows = random_rows(grid, num_agents, seed)
    rows[:, 0] = grid.largest  # the largest sum there is
    expected = rows.sum(dim=0)
    assert torch.equal(opened(PlainChannel(grid), rows), expected)
    assert torch.equal(opened(ThresholdCKKSChannel(grid), rows), expected)
    assert torch.equal(opened(*_with_rows(grid, rows)), expected)


def _with_rows(grid: PublicGrid, rows: Tensor) -> tuple[CKKSChannel, Tensor, Stores]:
    channel, stores = single_key(grid, len(rows))
    return channel, rows, stores


@pytest.mark.parametrize("num_agents", [2, 10, 50])
def test_threshold_sums_are_exact_and_nearly_so_before_snapping(num_agents: int) -> None:
    grid = PublicGrid(dim=560, bound=1e4, num_agents=num_agents)
    channel, epoch = ThresholdCKKSChannel(grid), epoch_of(num_agents)
    rows = random_rows(grid, num_agents)
    stores, _, key = set_up(channel, epoch)
    payloads = protect_all(channel, epoch, 0, rows, stores, key)
    total = channel.add(payloads, epoch=epoch, round=0)
    shares = share_all(channel, epoch, 0, total, stores)
    expected = rows.sum(dim=0)
    last = stores[epoch.roster[-1]]
    fused = channel.fuse(total, shares, epoch=epoch, round=0)
    assert torch.equal(channel.open(fused, {}, epoch=epoch, round=0, secrets=last), expected)
    _, noise = channel._decoded(fused, epoch, 0, last)
    assert np.abs(noise).max() / int(expected.abs().max()) <= 1e-12  # a step is 7e-12


@pytest.mark.parametrize("dim", [4096, 4097, 8192, 8193])
def test_more_numbers_than_fit_one_ciphertext(dim: int) -> None:
    grid = PublicGrid(dim=dim, bound=1.0, num_agents=2)
    rows = random_rows(grid, 2)
    assert torch.equal(opened(ThresholdCKKSChannel(grid), rows), rows.sum(dim=0))
    assert torch.equal(opened(*_with_rows(grid, rows)), rows.sum(dim=0))


@pytest.mark.parametrize("place", [0, 8192])
def test_one_of_two_ciphertexts_may_be_all_zeros(place: int) -> None:
    channel = ThresholdCKKSChannel(PublicGrid(dim=8193, bound=100.0, num_agents=2))
    rows = torch.zeros(2, 8193, dtype=torch.int64)
    rows[:, place] = 7
    assert torch.equal(opened(channel, rows), rows.sum(dim=0))


def test_channels_without_shares_add_any_part_of_the_roster() -> None:
    grid = PublicGrid(dim=3, bound=1.0, num_agents=4)
    rows, epoch = random_rows(grid, 4), epoch_of(4)
    ckks, stores = single_key(grid, 4)
    for channel in (PlainChannel(grid), ckks):
        payloads = protect_all(channel, epoch, 5, rows, stores, b"")
        some = {name: payloads[name] for name in epoch.roster[1:3]}
        total = channel.add(some, epoch=epoch, round=5)
        store = stores["agent0"]
        result = channel.open(total, {}, epoch=epoch, round=5, secrets=store)
        assert torch.equal(result, rows[1:3].sum(dim=0))
        with pytest.raises(ProtocolError, match="1 to 4"):
            channel.add({}, epoch=epoch, round=5)
        with pytest.raises(MessageError, match="without shares"):
            channel.open(total, {"agent0": b""}, epoch=epoch, round=5, secrets=store)
        with pytest.raises(ProtocolError, match="no set-up"):
            channel.prepare(0, epoch, "agent0", (), store)


def test_the_server_cannot_open_what_agents_open() -> None:
    grid = PublicGrid(dim=3, bound=1.0, num_agents=2)
    channel, stores = single_key(grid, 2)
    epoch = epoch_of(2)
    payloads = protect_all(channel, epoch, 0, random_rows(grid, 2), stores, b"")
    total = channel.add(payloads, epoch=epoch, round=0)
    for store in (None, MemoryStore()):
        with pytest.raises(ProtocolError, match="not in the store"):
            channel.open(total, {}, epoch=epoch, round=0, secrets=store)
    secret = stores["agent0"].get(channel.handle)
    assert secret is not None
    with pytest.raises(MessageError, match="no other key"):
        CKKSChannel(grid, secret)
    with pytest.raises(MessageError, match="no context"):
        CKKSChannel(grid, b"nonsense")


def test_parameters_are_chosen_or_refused() -> None:
    def made(agents: int, bits: int | None = None, **options: Any) -> ThresholdCKKSChannel:
        precision = options.pop("precision", 2.0**-36)
        grid = PublicGrid(dim=1, bound=1.0, num_agents=agents, precision=precision)
        return ThresholdCKKSChannel(grid, flooding_bits=bits, **options)

    ring = made(50, sums=1).ring
    assert (ring.degree, ring.num_primes) == (8192, 4)
    assert made(50).ring.num_primes == 4  # what the second high prime has left is room for noise
    assert made(50, sums=1, precision=2.0**-20).ring.num_primes == 3  # a coarse grid needs less
    assert made(50, 75).ring.low > ring.low
    assert made(50, 100).ring.degree == 16384
    for wrong in (True, 48.0):
        with pytest.raises(InputDataError, match="whole number"):
            made(2, wrong)  # type: ignore[arg-type]
    for wrong in (0, True, 2.0):
        with pytest.raises(InputDataError, match="sums >= 1"):
            made(2, sums=wrong)
    with pytest.raises(InputDataError, match="at most") as caught:
        made(50, 5000)
    fitting = int(str(caught.value).split("at most ")[1].split(" ")[0])
    assert made(50, fitting).ring.degree == 16384
    with pytest.raises(InputDataError, match=f"at most {fitting} bits"):
        made(50, fitting + 1)


@pytest.mark.parametrize(("sums", "dim"), [(1, 1), (10, 64), (1000, 560), (10**6, 8192)])
def test_flooding_hides_all_sums_together(sums: int, dim: int) -> None:
    """Of Gaussians, exactly: erf of half the distance of the means over the deviation and √2."""
    channel = ThresholdCKKSChannel(PublicGrid(dim=dim, bound=1.0, num_agents=10), sums=sums)
    count = max(dim, 64)
    assert 40 <= channel.distance_bits < 41
    assert channel.distance_bits == pytest.approx(
        channel.flooding - math.log2(math.sqrt(sums * count) / 2)
    )
    # A coefficient of a share is shifted by the noise of the ciphertexts, which it must hide.
    ring = channel.ring
    shift = ckks.noise_std(ring.degree, 10) * math.sqrt(sums * count)
    std = ckks.flooding_std(ring.degree, 10, channel.flooding)
    assert math.erf(shift / std / math.sqrt(8)) <= 2.0**-channel.distance_bits <= 2.0**-40
    least = channel.flooding
    with pytest.raises(InputDataError, match=f"write flooding_bits = {least}"):
        ThresholdCKKSChannel(channel.grid, flooding_bits=least - 1, sums=sums)
    more = ThresholdCKKSChannel(channel.grid, flooding_bits=least + 1, sums=sums)
    assert more.distance_bits == channel.distance_bits + 1
    assert more.fingerprint != channel.fingerprint


def test_the_larger_ring_works() -> None:
    grid = PublicGrid(dim=10, bound=1.0, num_agents=2)
    channel = ThresholdCKKSChannel(grid, flooding_bits=100)
    rows = random_rows(grid, 2)
    assert torch.equal(opened(channel, rows), rows.sum(dim=0))


def test_the_server_opens_sums_where_it_may() -> None:
    grid = PublicGrid(dim=10, bound=1.0, num_agents=3)
    channel, epoch, rows = ThresholdCKKSChannel(grid, opened_by="server"), epoch_of(3), None
    rows = random_rows(grid, 3)
    stores, _, key = set_up(channel, epoch)
    payloads = protect_all(channel, epoch, 0, rows, stores, key)
    total = channel.add(payloads, epoch=epoch, round=0)
    shares = share_all(channel, epoch, 0, total, stores)
    assert torch.equal(channel.open(total, shares, epoch=epoch, round=0), rows.sum(dim=0))
    assert channel.fingerprint != ThresholdCKKSChannel(grid).fingerprint
    assert not any("group" in name for store in stores.values() for name in store.names())


# ------------------------------------------------------------------ who takes part


def garbage(channel: ThresholdCKKSChannel, fused: bytes, world: World) -> float:
    """How far what opens is from the sum, in the middle."""
    integers, noise = channel._decoded(fused, world.epoch, 1, world.stores["agent0"])
    assert np.abs(noise).max() > 0.4
    return float(np.median(np.abs(integers[:20] - world.rows.sum(dim=0).numpy())))


def test_a_share_is_missing(world: World) -> None:
    channel, epoch = world.channel, world.epoch
    del world.shares["agent1"]
    with pytest.raises(ProtocolError, match="1 missing"):
        channel.fuse(world.total, world.shares, epoch=epoch, round=1)
    fused = channel._fused(world.total, world.shares, epoch, 1)
    assert garbage(channel, fused, world) > 1e9  # spread over the whole ring
    with pytest.raises(MessageError, match="no sum on the grid"):
        channel.open(fused, {}, epoch=epoch, round=1, secrets=world.stores["agent0"])


def test_the_server_has_garbage(world: World) -> None:
    """Without the key that the agents have in common, or with one of its own."""
    channel, epoch = world.channel, world.epoch
    fused = channel.fuse(world.total, world.shares, epoch=epoch, round=1)
    with pytest.raises(ProtocolError, match="the server cannot"):
        channel.open(fused, {}, epoch=epoch, round=1)
    with pytest.raises(ProtocolError, match="not in the store"):
        channel.open(fused, {}, epoch=epoch, round=1, secrets=MemoryStore())
    own = MemoryStore()
    own.put(channel._group_name(epoch), bytes(32))
    assert not channel.can_open(epoch, "agent0", MemoryStore())
    assert channel.can_open(epoch, "agent0", own)
    with pytest.raises(MessageError, match="no sum on the grid"):
        channel.open(fused, {}, epoch=epoch, round=1, secrets=own)
    for store in world.stores.values():
        expected = world.rows.sum(dim=0)
        assert torch.equal(channel.open(fused, {}, epoch=epoch, round=1, secrets=store), expected)


def test_all_of_the_roster_contribute(world: World) -> None:
    del world.payloads["agent2"]
    with pytest.raises(ProtocolError, match="1 missing"):
        world.channel.add(world.payloads, epoch=world.epoch, round=1)
    heard = ({k: v for k, v in world.heard[0].items() if k != "agent0"}, *world.heard[1:])
    with pytest.raises(ProtocolError, match="announcement of a roster of 3"):
        world.channel.joint_key(world.epoch, heard)
    with pytest.raises(ProtocolError, match="2 set-up phases"):
        world.channel.joint_key(world.epoch, world.heard[:1])


def test_strangers_are_refused(world: World) -> None:
    channel, epoch = world.channel, world.epoch
    with pytest.raises(ProtocolError, match="not in the roster"):
        channel.prepare(0, epoch, "mallory", (), MemoryStore())
    more = {**world.payloads, "mallory": world.payloads["agent0"]}
    with pytest.raises(MessageError, match="not in the roster"):
        channel.add(more, epoch=epoch, round=1)
    more = {**world.shares, "mallory": world.shares["agent0"]}
    with pytest.raises(MessageError, match="not in the roster"):
        channel.open(world.total, more, epoch=epoch, round=1)
    for roster in (("agent0",), tuple("abcde")):
        with pytest.raises(ProtocolError, match="2 to 4 agents"):
            channel.prepare(0, Epoch("run", 7, roster), roster[0], (), MemoryStore())


@pytest.mark.parametrize(
    ("number", "roster"), [(-1, ("a",)), (True, ("a",)), (0, ()), (0, ("a", "a")), (0, ("",))]
)
def test_an_epoch_has_a_number_and_distinct_names(number: int, roster: tuple[str, ...]) -> None:
    with pytest.raises(InputDataError):
        Epoch("run", number, roster)


def test_the_order_of_a_roster_does_not_matter() -> None:
    first, second = Epoch("r", 0, ("a", "b")), Epoch("r", 0, ("b", "a"))
    assert first.digest == second.digest
    others = [Epoch("q", 0, ("a", "b")), Epoch("r", 1, ("a", "b")), Epoch("r", 0, ("ab",))]
    assert len({e.digest for e in [first, *others]}) == 4


# ------------------------------------------------------------------ set-up


def test_an_epoch_is_not_used_with_another_roster(world: World) -> None:
    store = world.stores["agent0"]
    other = Epoch("run", 0, ("agent0", "agent1"))
    with pytest.raises(ProtocolError, match="another roster"):
        world.channel.prepare(0, other, "agent0", (), store)
    more = ThresholdCKKSChannel(world.channel.grid, sums=2048)
    with pytest.raises(ProtocolError, match="another roster or channel"):
        more.prepare(0, world.epoch, "agent0", (), store)


def test_messages_of_set_up_are_the_same_if_asked_again() -> None:
    channel = ThresholdCKKSChannel(PublicGrid(dim=20, bound=100.0, num_agents=3))
    epoch = epoch_of(3)
    stores = {name: MemoryStore() for name in epoch.roster}
    first = {name: channel.prepare(0, epoch, name, (), stores[name]) for name in epoch.roster}
    assert all(len(message) < 250 for message in first.values())
    second = {n: channel.prepare(1, epoch, n, (first,), stores[n]) for n in epoch.roster}
    heard = (first, channel.gather(second, epoch=epoch, gathered=(first,)))
    channel.joint_key(epoch, heard, me="agent1", secrets=stores["agent1"])  # the group key is here
    for name in epoch.roster:
        assert channel.prepare(0, epoch, name, (), stores[name]) == first[name]
        assert channel.prepare(1, epoch, name, (first,), stores[name]) == second[name]
    assert channel.prepare(0, epoch, "agent0", (), MemoryStore()) != first["agent0"]
    for phase, before in [(1, ()), (0, heard[:1]), (2, heard)]:
        with pytest.raises(ProtocolError, match="phases 0 and 1"):
            channel.prepare(phase, epoch, "agent0", before, stores["agent0"])


def prepared(channel: ThresholdCKKSChannel, epoch: Epoch) -> tuple[Stores, dict[str, bytes]]:
    """Announcements of fresh agents, before anybody has answered them."""
    stores = {name: MemoryStore() for name in epoch.roster}
    return stores, {name: channel.prepare(0, epoch, name, (), stores[name]) for name in stores}


def test_announcements_are_signed() -> None:
    channel, epoch = ThresholdCKKSChannel(PublicGrid(20, 100.0, 3)), epoch_of(3)
    stores, first = prepared(channel, epoch)
    good = first["agent1"]
    for position in (0, 31, 32, 64, 79, 80, 143):  # identity, exchange, group key, signature
        byte = bytes([good[HEADER.size + position] ^ 1])
        bad = resealed(good, position, byte)
        with pytest.raises(MessageError, match="not signed"):
            channel.check_prepared(bad, epoch=epoch, sender="agent1", gathered=())
        told = {**first, "agent1": bad}
        with pytest.raises(MessageError, match="not signed"):
            channel.prepare(1, epoch, "agent0", (told,), stores["agent0"])
        with pytest.raises(MessageError, match="not signed"):
            channel.joint_key(epoch, (told, {}))
    # A point of small order agrees with everybody on nothing, whoever signs it.
    small = resealed(good, 32, bytes(32))
    with pytest.raises(MessageError, match="not signed"):
        channel.check_prepared(small, epoch=epoch, sender="agent1", gathered=())
    private = keys.new_identity()
    said = keys.public_identity(private) + bytes(48)
    said += keys.sign(private, channel._signed_text(epoch, "agent1", said))
    small = channel._frame(HEADER.unpack_from(good)[1], said, epoch, 0, "agent1")
    with pytest.raises(MessageError, match="agrees with nobody"):
        channel.check_prepared(small, epoch=epoch, sender="agent1", gathered=())
    # One's own comes back unchanged, or somebody speaks in one's name.
    other = channel.prepare(0, epoch, "agent0", (), MemoryStore())
    with pytest.raises(MessageError, match="was changed"):
        channel.prepare(1, epoch, "agent0", ({**first, "agent0": other},), stores["agent0"])
    # A signature is for one epoch and one roster.
    later = Epoch("run", 1, epoch.roster)
    moved = channel._frame(HEADER.unpack_from(good)[1], good[HEADER.size :], later, 0, "agent1")
    with pytest.raises(MessageError, match="not signed"):
        channel.check_prepared(moved, epoch=later, sender="agent1", gathered=())


def test_a_secret_makes_one_key_share() -> None:
    channel, epoch = ThresholdCKKSChannel(PublicGrid(20, 100.0, 3)), epoch_of(3)
    stores, first = prepared(channel, epoch)
    channel.prepare(1, epoch, "agent0", (first,), stores["agent0"])
    # agent2 lost its keys, or the server tells agents different announcements
    lost = MemoryStore()
    lost.put(IDENTITY, stores["agent2"].get(IDENTITY) or b"")
    again = {**first, "agent2": channel.prepare(0, epoch, "agent2", (), lost)}
    with pytest.raises(ProtocolError, match="answered before"):
        channel.prepare(1, epoch, "agent0", (again,), stores["agent0"])


def test_identities_are_those_of_first_use_or_of_the_study() -> None:
    grid = PublicGrid(20, 100.0, 3)
    channel, epoch = ThresholdCKKSChannel(grid), epoch_of(3)
    stores, first = prepared(channel, epoch)
    channel.prepare(1, epoch, "agent0", (first,), stores["agent0"])
    later = Epoch("run", 1, epoch.roster)
    second = {name: channel.prepare(0, later, name, (), stores[name]) for name in stores}
    channel.prepare(1, later, "agent0", (second,), stores["agent0"])
    third = Epoch("run", 2, epoch.roster)
    announced = {name: channel.prepare(0, third, name, (), stores[name]) for name in stores}
    announced["agent2"] = channel.prepare(0, third, "agent2", (), MemoryStore())  # an impostor
    with pytest.raises(MessageError, match="another identity key"):
        channel.prepare(1, third, "agent0", (announced,), stores["agent0"])

    names = {name: identity(store) for name, store in stores.items()}
    fixed = ThresholdCKKSChannel(grid, identities=tuple(names.items()))
    assert fixed.fingerprint != channel.fingerprint
    for name in epoch.roster:
        channel.forget(epoch, name, stores[name])
    assert torch.equal(opened(fixed, random_rows(grid, 3), stores, 7), random_rows(grid, 3).sum(0))
    with pytest.raises(ProtocolError, match="restore the store"):
        fixed.prepare(0, third, "agent1", (), MemoryStore())
    stranger = announced["agent2"]
    said = stranger[HEADER.size :]
    private = keys.new_identity()
    said = keys.public_identity(private) + said[32:80]
    said += keys.sign(private, fixed._signed_text(third, "agent2", said))
    forged = fixed._frame(HEADER.unpack_from(stranger)[1], said, third, 0, "agent2")
    with pytest.raises(MessageError, match="another identity key"):
        fixed.check_prepared(forged, epoch=third, sender="agent2", gathered=())


@pytest.mark.parametrize(
    ("identities", "words"),
    [
        ((("a", "00"),), "64 digits"),
        ((("a", "G" * 64),), "64 digits"),
        ((("a", "A" * 64),), "64 digits"),
        ((("a", "0" * 64), ("b", "0" * 64)), "one key twice"),
        ((("a", "0" * 64), ("a", "1" * 64)), "one name twice"),
    ],
)
def test_identities_that_are_none(identities: tuple[tuple[str, str], ...], words: str) -> None:
    with pytest.raises(InputDataError, match=words):
        ThresholdCKKSChannel(PublicGrid(2, 1.0, 3), identities=identities)


def test_a_safety_number_stands_for_all_keys() -> None:
    first = {"a": "0" * 64, "b": "1" * 64}
    number = safety_number(first)
    assert len(number.split()) == 12
    assert all(len(part) == 5 and part.isdigit() for part in number.split())
    assert number == safety_number(dict(reversed(first.items())))
    others = [{**first, "b": "2" * 64}, {"a": first["b"], "b": first["a"]}, {"a": "0" * 64}]
    assert len({number, *map(safety_number, others)}) == 4


def test_a_group_key_for_somebody_else_is_not_taken(world: World, caplog: Any) -> None:
    channel, epoch = world.channel, world.epoch
    gathered = world.heard[1][""]
    size = len(gathered) - HEADER.size
    for position in (size - 96, size - 80, size - 1):
        byte = bytes([gathered[HEADER.size + position] ^ 1])
        heard = (world.heard[0], {"": resealed(gathered, position, byte)})
        reader = "agent1" if position < size - 48 else "agent2"
        store = MemoryStore()
        for name in set(world.stores[reader].names()) - {channel._group_name(epoch)}:
            store.put(name, world.stores[reader].get(name) or b"")
        # It can add to sums, and cannot read them.
        assert channel.joint_key(epoch, heard, me=reader, secrets=store) == world.key
        assert f"agent {reader!r} has no key to sums of epoch 0 from 'agent0'" in caplog.text
        assert not channel.can_open(epoch, reader, store)
        caplog.clear()
    for second in ({}, {"": gathered, "agent0": gathered}, {"agent0": gathered}):
        with pytest.raises(MessageError, match="one sum of key shares"):
            channel.joint_key(epoch, (world.heard[0], second))


def test_who_comes_back_has_the_key_to_earlier_sums() -> None:
    """The first by name was away: another one makes the key, and who has one gives it on."""
    grid = PublicGrid(20, 100.0, 3)
    channel, rows = ThresholdCKKSChannel(grid), random_rows(grid, 3)
    stores = {name: MemoryStore() for name in epoch_of(3).roster}
    two = Epoch("run", 0, ("agent1", "agent2"))
    _, _, key = set_up(channel, two, stores)
    payloads = protect_all(channel, two, 0, rows[1:], stores, key)
    total = channel.add(payloads, epoch=two, round=0)
    fused = channel.fuse(total, share_all(channel, two, 0, total, stores), epoch=two, round=0)
    assert not channel.can_open(two, "agent0", stores["agent0"])
    set_up(channel, Epoch("run", 1, epoch_of(3).roster), stores)
    result = channel.open(fused, {}, epoch=two, round=0, secrets=stores["agent0"])
    assert torch.equal(result, rows[1:].sum(dim=0))


def test_contributions_of_different_set_ups_are_not_added(world: World) -> None:
    world.payloads["agent0"] = resealed(world.payloads["agent0"], 0, bytes(32))
    with pytest.raises(MessageError, match="different set-ups"):
        world.channel.add(world.payloads, epoch=world.epoch, round=1)
    at: Mapping[str, Any] = {"epoch": world.epoch, "round": 1, "sender": "agent0"}
    with pytest.raises(MessageError, match="another set-up"):
        world.channel.check(world.payloads["agent0"], **at, key=world.key)


def test_a_forgotten_epoch_opens_nothing_more() -> None:
    grid = PublicGrid(dim=2, bound=1.0, num_agents=2)
    channel, epoch = ThresholdCKKSChannel(grid), epoch_of(2)
    stores, _, key = set_up(channel, epoch)
    payloads = protect_all(channel, epoch, 0, random_rows(grid, 2), stores, key)
    total = channel.add(payloads, epoch=epoch, round=0)
    share_all(channel, epoch, 0, total, stores)
    stores["agent0"].put("unrelated", b"kept")
    channel.forget(epoch, "agent0", stores["agent0"])
    kept = set(stores["agent0"].names())  # what the run needs: who is who, and the sums so far
    assert {"unrelated", IDENTITY, channel._group_name(epoch)} < kept
    assert len(kept) == 4
    assert not any(name.startswith(channel.handle(epoch, "agent0")) for name in kept)
    with pytest.raises(ProtocolError, match="no secret of this epoch"):
        channel.share(total, epoch=epoch, round=0, me="agent0", secrets=stores["agent0"])


def test_secrets_may_live_in_files(tmp_path: Any) -> None:
    grid = PublicGrid(dim=2, bound=1.0, num_agents=2)
    rows = random_rows(grid, 2)
    stores: Any = {name: FileStore(tmp_path / name) for name in epoch_of(2).roster}
    assert torch.equal(opened(ThresholdCKKSChannel(grid), rows, stores), rows.sum(dim=0))


# ------------------------------------------------------------------ shares


def test_one_sum_for_each_round(world: World) -> None:
    channel, epoch = world.channel, world.epoch
    store = world.stores["agent0"]
    answer = {"epoch": epoch, "round": 1, "me": "agent0", "secrets": store}
    assert channel.share(channel.request(world.total), **answer) == world.shares["agent0"]
    assert channel.share(world.total, **answer) == world.shares["agent0"]
    payload = world.payloads["agent1"]
    single = resealed(world.total, 0, payload[HEADER.size :])  # one agent's, as "the sum"
    with pytest.raises(ProtocolError, match="Another sum of round 1"):
        channel.share(channel.request(single), **answer)
    with pytest.raises(MessageError, match="another sum"):
        channel.fuse(single, world.shares, epoch=epoch, round=1)
    share = world.shares["agent0"]
    with pytest.raises(MessageError, match="another sum"):
        channel.check_share(share, epoch=epoch, round=1, sender="agent0", total=single)


def test_shares_of_another_epoch_round_or_sender_are_refused(world: World) -> None:
    channel, epoch, shares = world.channel, world.epoch, world.shares
    for foreign in (epoch_of(3, number=1), Epoch("other", 0, epoch.roster), epoch_of(4)):
        with pytest.raises(MessageError, match="another epoch"):
            channel.check_share(shares["agent0"], epoch=foreign, round=1, sender="agent0")
        with pytest.raises(MessageError, match="another epoch"):
            channel.check(world.payloads["agent0"], epoch=foreign, round=1, sender="agent0")
    with pytest.raises(MessageError, match="another round"):
        channel.check_share(shares["agent0"], epoch=epoch, round=2, sender="agent0")
    with pytest.raises(MessageError, match="another sender"):
        channel.check_share(shares["agent0"], epoch=epoch, round=1, sender="agent1")
    doubled = {**shares, "agent1": shares["agent0"]}
    with pytest.raises(MessageError, match="another sender"):
        channel.fuse(world.total, doubled, epoch=epoch, round=1)
    twice = {**world.payloads, "agent1": world.payloads["agent0"]}
    with pytest.raises(MessageError, match="another sender"):
        channel.add(twice, epoch=epoch, round=1)
    with pytest.raises(MessageError, match="Expected a share"):
        channel.check_share(world.payloads["agent0"], epoch=epoch, round=1, sender="agent0")


def test_a_share_that_is_wrong_spoils_the_sum_and_is_noticed(world: World) -> None:
    words = generator(1).uniform(20).numpy() * 2.0**31
    noise = words.astype("<u4").tobytes()
    for position in (32, 600):
        shares = {**world.shares, "agent2": resealed(world.shares["agent2"], position, noise)}
        at: Mapping[str, Any] = {"epoch": world.epoch, "round": 1}
        with pytest.raises(MessageError, match="no sum on the grid"):
            world.channel.open(world.total, shares, **at, secrets=world.stores["agent0"])


def test_nothing_is_added_to_a_round_that_was_opened(world: World) -> None:
    channel, store = world.channel, world.stores["agent0"]
    at: Any = {"epoch": world.epoch, "me": "agent0", "secrets": store}
    with pytest.raises(ProtocolError, match="takes nothing more"):
        channel.protect(world.rows[0], round=1, key=world.key, **at)
    request = bytes(channel._body(channel.request(world.total), 2, world.epoch, 1, ""))
    later = channel._frame(2, request, world.epoch, 2, "")
    with pytest.raises(ProtocolError, match="nothing in the sum of round 2"):
        channel.share(later, round=2, **at)


def test_a_contribution_that_was_made_again_opens_in_its_last_form() -> None:
    """As after a crash: under the same masks of pairs, and another of its own."""
    grid = PublicGrid(20, 100.0, 2)
    channel, epoch, rows = ThresholdCKKSChannel(grid), epoch_of(2), random_rows(grid, 2)
    stores, _, key = set_up(channel, epoch)
    first = protect_all(channel, epoch, 0, rows, stores, key)
    at: Any = {"epoch": epoch, "round": 0}
    own: Any = {"me": "agent0", "secrets": stores["agent0"]}
    again = {**first, "agent0": channel.protect(rows[1], key=key, **at, **own)}
    total = channel.add(again, **at)
    fused = channel.fuse(total, share_all(channel, epoch, 0, total, stores), **at)
    assert torch.equal(channel.open(fused, {}, **at, secrets=stores["agent1"]), 2 * rows[1])
    # Of the first form nothing opens: the mask of its own is gone.
    stores, _, key = set_up(channel, epoch)
    first = protect_all(channel, epoch, 0, rows, stores, key)
    own["secrets"] = stores["agent0"]
    channel.protect(rows[1], key=key, **at, **own)
    total = channel.add(first, **at)
    fused = channel.fuse(total, share_all(channel, epoch, 0, total, stores), **at)
    with pytest.raises(MessageError, match="no sum on the grid"):
        channel.open(fused, {}, **at, secrets=stores["agent1"])


# ------------------------------------------------------------------ foreign bytes


def test_a_corrupted_ciphertext_is_refused(world: World) -> None:
    payload = bytearray(world.payloads["agent0"])
    payload[5000] ^= 1
    with pytest.raises(MessageError, match="damaged"):
        world.channel.check(bytes(payload), epoch=world.epoch, round=1, sender="agent0")
    world.payloads["agent0"] = bytes(payload)
    with pytest.raises(MessageError, match="damaged"):
        world.channel.add(world.payloads, epoch=world.epoch, round=1)


def test_words_are_below_their_prime(world: World) -> None:
    channel, epoch = world.channel, world.epoch
    ring, rows = channel.ring, channel._row_bytes
    at: Any = {"epoch": epoch, "round": 1, "sender": "agent0"}

    def refused(action: Any, good: bool) -> None:
        if good:
            action()
            return
        with pytest.raises(MessageError, match="below their prime"):
            action()

    for place, prime in enumerate(ring.primes[: ring.num_primes]):
        head = 32 + 4 * 64 * place + 4 * 7
        tail = 32 + rows + 4 * ring.degree * place + 4 * 77
        for word, good in ((prime - 1, True), (prime, False), (2**32 - 1, False)):
            data = word.to_bytes(4, "little")
            for position in (head, tail):
                payload = resealed(world.payloads["agent0"], position, data)
                refused(lambda payload=payload: channel.check(payload, **at), good)
            share = resealed(world.shares["agent0"], head, data)
            refused(lambda share=share: channel.check_share(share, **at), good)
    bad = resealed(world.heard[1][""], 0, b"\xff" * 4)
    refused(lambda: channel.joint_key(epoch, (world.heard[0], {"": bad})), False)


def mutated(payload: bytes, trial: int) -> bytes:
    """Foreign bytes: flipped, cut, extended, doubled; half of them with a checksum that fits."""
    rng = np.random.default_rng(trial)
    data = bytearray(payload)
    kind = trial % 5
    start = HEADER.size if rng.random() < 0.7 else 0
    where = int(rng.integers(start, len(data)))
    if kind == 0:
        data[where] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[where:]
    elif kind == 2:
        data += rng.bytes(int(rng.integers(1, 40)))
    elif kind == 3:
        length = int(rng.integers(1, 64))
        data[where : where + length] = rng.bytes(length)
    else:
        first = min(len(data), HEADER.size + int(rng.integers(0, 60)))
        data[first : first + 8] = b"\xff" * 8
    if rng.random() < 0.6 and len(data) >= HEADER.size:
        return resealed(bytes(data), 0, b"")
    return bytes(data)


def survives(action: Any) -> bool:
    """Whether an action goes through; `MessageError` is the only other way."""
    try:
        action()
    except MessageError:
        return False
    return True


def test_fuzzed_bytes_raise_message_errors_only(world: World) -> None:
    channel, epoch = world.channel, world.epoch
    at: Mapping[str, Any] = {"epoch": epoch, "round": 1}
    share, payload = world.shares["agent0"], world.payloads["agent0"]
    reader: Any = {"secrets": world.stores["agent2"]}
    fused = channel.fuse(world.total, world.shares, **at)
    fresh, first = prepared(channel, epoch)
    passed = 0
    for trial in range(60):
        bad = mutated(payload, trial)
        if survives(lambda bad=bad: channel.check(bad, **at, sender="agent0")):
            passed += 1
            survives(lambda bad=bad: channel.add({**world.payloads, "agent0": bad}, **at))
        bad = mutated(share, trial)
        if survives(lambda bad=bad: channel.check_share(bad, **at, sender="agent0")):
            shares = {**world.shares, "agent0": bad}
            survives(lambda shares=shares: channel.open(world.total, shares, **at, **reader))
        bad = mutated(world.total, trial)
        survives(lambda bad=bad: channel.fuse(bad, world.shares, **at))
        bad = mutated(fused, trial)
        survives(lambda bad=bad: channel.open(bad, {}, **at, **reader))
        bad = mutated(channel.request(world.total), trial)
        store = MemoryStore()  # of an agent who has not answered yet
        for name in world.stores["agent0"].names():
            if not name.endswith("-1"):
                store.put(name, world.stores["agent0"].get(name) or b"")
        survives(lambda bad=bad, s=store: channel.share(bad, **at, me="agent0", secrets=s))
    assert 0 < passed < 60  # other words below their primes are a ciphertext like any other
    for trial in range(300):
        bad = mutated(world.heard[0]["agent1"], trial)
        who: Any = {"epoch": epoch, "sender": "agent1", "gathered": ()}
        assert not survives(lambda bad=bad, who=who: channel.check_prepared(bad, **who))
        told = {**first, "agent1": mutated(first["agent1"], trial)}
        store = MemoryStore()
        for name in fresh["agent0"].names():
            store.put(name, fresh["agent0"].get(name) or b"")
        answer: Any = {"me": "agent0", "secrets": store}
        assert not survives(
            lambda told=told, answer=answer: channel.prepare(1, epoch, gathered=(told,), **answer)
        )
        heard = ({**world.heard[0], "agent1": bad}, world.heard[1])
        assert not survives(lambda heard=heard: channel.joint_key(epoch, heard))
    for trial in range(40):
        heard = (world.heard[0], {"": mutated(world.heard[1][""], trial)})
        survives(lambda heard=heard: channel.joint_key(epoch, heard))
        mine: Any = {"me": "agent1", "secrets": world.stores["agent1"]}
        survives(lambda heard=heard, mine=mine: channel.joint_key(epoch, heard, **mine))
        bad = mutated(channel._frame(8, world.heard[1][""][HEADER.size :], epoch, 0, "x"), trial)
        who = {"epoch": epoch, "sender": "agent1", "gathered": world.heard[:1]}
        survives(lambda bad=bad, who=who: channel.check_prepared(bad, **who))


@pytest.mark.parametrize("kind", ["plain", "single key"])
def test_fuzzed_bytes_of_the_other_channels(kind: str) -> None:
    grid = PublicGrid(dim=5, bound=1.0, num_agents=2)
    channel, stores = (PlainChannel(grid), {}) if kind == "plain" else single_key(grid, 2)
    stores = stores or {name: MemoryStore() for name in epoch_of(2).roster}
    epoch = epoch_of(2)
    payloads = protect_all(channel, epoch, 1, random_rows(grid, 2), stores, b"")
    at: Mapping[str, Any] = {"epoch": epoch, "round": 1}
    total = channel.add(payloads, **at)
    for trial in range(120):
        bad = mutated(payloads["agent0"], trial)
        if survives(lambda bad=bad: channel.check(bad, **at, sender="agent0")):
            channel.add({**payloads, "agent0": bad}, **at)
        bad = mutated(total, trial)
        survives(lambda bad=bad: channel.open(bad, {}, **at, secrets=stores["agent0"]))


def forged_vector(channel: CKKSChannel, size: int, first: int, second: int, scale: float) -> bytes:
    """A vector of TenSEAL around a ciphertext of two constant polynomials."""
    context = ckks._context(channel.context)
    ids = tuple(tenseal.ckks_vector(context, [0.0]).ciphertext()[0].parms_id())
    words = np.array([first, second], dtype="<u8").repeat(2 * 8192)
    body = struct.pack("<4QB3QdQ", *ids, True, 2, 8192, 2, scale, 1)
    version, data = ckks._version(), words.tobytes()
    array = ckks._header(version, 24 + len(data)) + struct.pack("<Q", words.size)
    inner = ckks._header(version, 16 + len(body) + len(array) + len(data)) + body + array + data
    count = ckks._varint(size)
    front = b"\x0a" + ckks._varint(len(count)) + count + b"\x12" + ckks._varint(len(inner))
    return front + inner + b"\x19" + struct.pack("<d", 2.0**40)


def test_ciphertexts_that_seal_can_not_add_are_refused() -> None:
    channel, _ = single_key(PublicGrid(dim=5, bound=1.0, num_agents=2), 2)
    epoch = epoch_of(2)
    at: Mapping[str, Any] = {"epoch": epoch, "round": 1}

    def framed(name: str, second: int, scale: float = 2.0**40) -> bytes:
        vector = forged_vector(channel, 5, 1, second, scale)
        return channel._frame(0, channels_module._pack([vector]), epoch, 1, name)

    channel.check(framed("agent0", second=2), **at, sender="agent0")  # well formed
    with pytest.raises(MessageError, match="another size, form or level"):
        channel.check(framed("agent0", second=1, scale=2.0**39), **at, sender="agent0")
    with pytest.raises(MessageError, match="another size, form or level"):
        channel.check(framed("agent0", second=0), **at, sender="agent0")


def test_ciphertexts_that_cancel_are_refused() -> None:
    channel, _ = single_key(PublicGrid(dim=5, bound=1.0, num_agents=2), 2)
    vectors = [tenseal.ckks_vector(ckks._context(channel.context), [1.0] * 5) for _ in range(2)]
    vectors[1] = vectors[0].neg()  # the negative of what somebody else has sent
    payloads = {
        name: channel._frame(0, channels_module._pack([v.serialize()]), epoch_of(2), 1, name)
        for name, v in zip(epoch_of(2).roster, vectors, strict=True)
    }
    with pytest.raises(MessageError, match="does not add"):
        channel.add(payloads, epoch=epoch_of(2), round=1)


def test_limbs_do_not_wrap_around() -> None:
    grid = PublicGrid(dim=3, bound=1.0, num_agents=2, precision=2.0**-50)
    channel, stores = single_key(grid, 2)
    assert channel._limb_bits
    epoch, shift = epoch_of(2), 64 - channel._limb_bits
    limbs = [[1.0, 2.0, 3.0, 2.0**shift, 0.0, 0.0]]
    frame = channels_module._pack(ckks.encrypt(channel.context, limbs))
    payload = channel._frame(0, frame, epoch, 0, "agent0")
    total = channel.add({"agent0": payload}, epoch=epoch, round=0)
    with pytest.raises(MessageError, match="no sum on the grid"):
        channel.open(total, {}, epoch=epoch, round=0, secrets=stores["agent0"])


def test_contributions_beyond_the_grid_are_refused(world: World) -> None:
    grid = world.channel.grid
    single, _ = single_key(grid, 2)
    for channel in (PlainChannel(grid), single, world.channel):
        for bad in (torch.full((20,), grid.largest + 1), torch.zeros(19, dtype=torch.int64)):
            with pytest.raises(InputDataError, match="grid"):
                channel.protect(
                    bad, epoch=world.epoch, round=0, me="agent0", key=b"", secrets=MemoryStore()
                )
    with pytest.raises(ProtocolError, match="round counts"):
        PlainChannel(grid).protect(
            world.rows[0], epoch=world.epoch, round=-1, me="agent0", key=b"", secrets=MemoryStore()
        )


# ------------------------------------------------------------------ secrets


def test_no_object_shows_or_keeps_a_secret(world: World, capfd: Any) -> None:
    single, stores = single_key(world.channel.grid, 2)
    opened(single, world.rows[:2], stores)
    secret_parts = [
        data[start : start + 16]
        for store in (*world.stores.values(), *stores.values())
        for data in (store.get(name) or b"" for name in store.names())
        for start in range(len(data) - 20_000, len(data) - 16, 5000)
        if start > 0
    ]
    assert len(secret_parts) > 10
    for store in world.stores.values():
        short = {name: store.get(name) or b"" for name in store.names()}
        ends = ("-pairs", "-group", "-own1", "-1", IDENTITY)
        found = [data[-16:] for name, data in short.items() if name.endswith(ends)]
        assert len(found) == 5
        secret_parts += found
    public = [world.key, world.total, *world.payloads.values(), *world.shares.values()]
    public += [message for messages in world.heard for message in messages.values()]
    # an object's own state is public settings: pickled here to see all of it
    for thing in (world.channel, single, world.epoch, world.channel.ring):
        public += [repr(thing).encode(), str(thing).encode(), pickle.dumps(thing)]
    assert not any(part in data for part in secret_parts for data in public)
    assert "context" not in repr(single)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""
