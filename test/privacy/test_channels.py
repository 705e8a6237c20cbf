"""Channels: the same exact sums, who may open them, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
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
    Channel,
    CKKSChannel,
    Epoch,
    PlainChannel,
    ThresholdCKKSChannel,
)
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat import ckks
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
        heard = (*heard, messages)
    me = epoch.roster[0]
    return stores, heard, channel.joint_key(epoch, heard, me=me, secrets=stores[me])


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
        channel.check(payload, epoch=epoch, round=round, sender=name)
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
    assert torch.equal(channel.open(total, shares, epoch=epoch, round=0), expected)
    _, noise = channel._fuse(total, shares, epoch, 0)
    assert np.abs(noise).max() / int(expected.abs().max()) <= 1e-14


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
    def ring(agents: int, bits: int = 40, precision: float = 2.0**-36) -> Any:
        grid = PublicGrid(dim=1, bound=1.0, num_agents=agents, precision=precision)
        return ThresholdCKKSChannel(grid, flooding_bits=bits).ring

    assert (ring(50).degree, ring(50).num_primes) == (8192, 4)
    assert ring(50, precision=2.0**-20).num_primes == 3  # a coarse grid needs less
    assert ring(5000, precision=2.0**-30).low > ring(50).low
    assert ring(50, 100).degree == 16384
    with pytest.raises(InputDataError, match="at least 40 bits"):
        ring(2, 39)
    for wrong in (True, 40.0):
        with pytest.raises(InputDataError, match="at least 40 bits"):
            ring(2, wrong)  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match="at most") as caught:
        ring(50, 5000)
    fitting = int(str(caught.value).split("at most ")[1].split(" ")[0])
    assert ring(50, fitting).degree == 16384
    with pytest.raises(InputDataError, match=f"at most {fitting} bits"):
        ring(50, fitting + 1)


def test_the_larger_ring_works() -> None:
    grid = PublicGrid(dim=10, bound=1.0, num_agents=2)
    channel = ThresholdCKKSChannel(grid, flooding_bits=100)
    rows = random_rows(grid, 2)
    assert torch.equal(opened(channel, rows), rows.sum(dim=0))


# ------------------------------------------------------------------ who takes part


def test_a_share_is_missing(world: World) -> None:
    del world.shares["agent1"]
    with pytest.raises(ProtocolError, match="1 missing"):
        world.channel.open(world.total, world.shares, epoch=world.epoch, round=1)
    integers, noise = world.channel._fuse(world.total, world.shares, world.epoch, 1)
    expected = world.rows.sum(dim=0).numpy()
    # garbage: spread over the whole ring, many orders beyond any sum
    assert np.median(np.abs(integers[:20] - expected)) > 1e13
    assert np.abs(noise).max() > 0.4


def test_all_of_the_roster_contribute(world: World) -> None:
    del world.payloads["agent2"]
    with pytest.raises(ProtocolError, match="1 missing"):
        world.channel.add(world.payloads, epoch=world.epoch, round=1)
    heard = ({k: v for k, v in world.heard[0].items() if k != "agent0"}, *world.heard[1:])
    with pytest.raises(ProtocolError, match="phase 0 of a roster of 3"):
        world.channel.joint_key(world.epoch, heard)
    with pytest.raises(ProtocolError, match="3 set-up phases"):
        world.channel.joint_key(world.epoch, world.heard[:2])


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
    flooded = ThresholdCKKSChannel(world.channel.grid, flooding_bits=41)
    with pytest.raises(ProtocolError, match="another roster or channel"):
        flooded.prepare(0, world.epoch, "agent0", (), store)


def test_messages_of_set_up_are_the_same_if_asked_again(world: World) -> None:
    for phase in range(3):
        again = world.channel.prepare(
            phase, world.epoch, "agent0", world.heard[:phase], world.stores["agent0"]
        )
        assert again == world.heard[phase]["agent0"]
    fresh = world.channel.prepare(0, world.epoch, "agent0", (), MemoryStore())
    assert fresh != world.heard[0]["agent0"]
    for phase, heard in [(1, ()), (0, world.heard[:1]), (3, world.heard)]:
        with pytest.raises(ProtocolError, match="phases 0, 1 and 2"):
            world.channel.prepare(phase, world.epoch, "agent0", heard, world.stores["agent0"])


def test_a_key_share_that_was_not_committed_to_is_refused(world: World) -> None:
    revealed = dict(world.heard[2])
    # the attack: after seeing the others, a share that makes the sum a key of one's own
    revealed["agent2"] = resealed(revealed["agent2"], 0, b"\1\0\0\0")
    with pytest.raises(MessageError, match="has committed itself"):
        world.channel.joint_key(world.epoch, (*world.heard[:2], revealed))


def test_one_s_own_messages_come_back_unchanged(world: World) -> None:
    channel, epoch, store = world.channel, world.epoch, world.stores["agent0"]
    for phase in range(3):
        changed = dict(world.heard[phase])
        changed["agent0"] = resealed(changed["agent0"], 0, b"\1\0\0\0")
        heard = (*world.heard[:phase], changed, *world.heard[phase + 1 :])
        with pytest.raises(MessageError, match=r"was changed|has committed"):
            channel.joint_key(epoch, heard, me="agent0", secrets=store)
        if phase < 2:
            with pytest.raises(MessageError, match=f"phase {phase} was changed"):
                channel.prepare(phase + 1, epoch, "agent0", heard[: phase + 1], store)


def test_a_server_that_tells_agents_different_commitments_is_noticed(world: World) -> None:
    coins = dict(world.heard[0])
    coins["agent2"] = resealed(coins["agent2"], 0, b"other")
    heard = (coins, *world.heard[1:])
    with pytest.raises(MessageError, match=r"has committed|was changed"):
        world.channel.joint_key(world.epoch, heard)


def test_a_secret_makes_one_key_share(world: World) -> None:
    channel, epoch, names = world.channel, epoch_of(3, number=5), world.epoch.roster
    stores = {name: MemoryStore() for name in names}
    first = {name: channel.prepare(0, epoch, name, (), stores[name]) for name in names}
    channel.prepare(1, epoch, "agent0", (first,), stores["agent0"])
    # agent2 lost its store, or somebody says so: another common polynomial, the same secret
    again = {**first, "agent2": channel.prepare(0, epoch, "agent2", (), MemoryStore())}
    with pytest.raises(ProtocolError, match="phase 0 were answered before"):
        channel.prepare(1, epoch, "agent0", (again,), stores["agent0"])


def test_nobody_commits_again_after_seeing_key_shares(world: World) -> None:
    channel, epoch, names = world.channel, epoch_of(3, number=6), world.epoch.roster
    stores, heard, _ = set_up(channel, epoch)
    # agent2, with the server, takes another share in the light of the others'
    ring, header = channel.ring, HEADER.size
    words = np.frombuffer(heard[2]["agent2"][header:], "<u4").reshape(-1, ring.degree)
    primes = np.array(ring.primes, dtype="<u4")[:, None]
    other = ((words.astype(np.uint64) + 1) % primes).astype("<u4").tobytes()
    seed = heard[1]["agent2"][header : header + 32]
    digest = hashlib.sha256(other).digest()
    commitment = channel._commitment(epoch, "agent2", seed, digest)
    heard = (
        heard[0],
        {**heard[1], "agent2": resealed(heard[1]["agent2"], 0, commitment)},
        {**heard[2], "agent2": resealed(heard[2]["agent2"], 0, other)},
    )
    channel.joint_key(epoch, heard)  # consistent by itself
    for name in names[:2]:
        with pytest.raises(ProtocolError, match="phase 1 were answered before"):
            channel.joint_key(epoch, heard, me=name, secrets=stores[name])
        with pytest.raises(ProtocolError, match="phase 1 were answered before"):
            channel.prepare(2, epoch, name, heard[:2], stores[name])


def test_contributions_under_different_keys_are_not_added(world: World) -> None:
    world.payloads["agent0"] = resealed(world.payloads["agent0"], 0, bytes(32))
    with pytest.raises(MessageError, match="different joint keys"):
        world.channel.add(world.payloads, epoch=world.epoch, round=1)


def test_a_forgotten_epoch_opens_nothing_more() -> None:
    grid = PublicGrid(dim=2, bound=1.0, num_agents=2)
    channel, epoch = ThresholdCKKSChannel(grid), epoch_of(2)
    stores, _, key = set_up(channel, epoch)
    payloads = protect_all(channel, epoch, 0, random_rows(grid, 2), stores, key)
    total = channel.add(payloads, epoch=epoch, round=0)
    share_all(channel, epoch, 0, total, stores)
    stores["agent0"].put("unrelated", b"kept")
    channel.forget(epoch, "agent0", stores["agent0"])
    assert stores["agent0"].names() == ["unrelated"]
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
    single = resealed(world.total, 0, payload[HEADER.size + 32 :])  # one agent's, as "the sum"
    with pytest.raises(ProtocolError, match="Another sum of round 1"):
        channel.share(channel.request(single), **answer)
    with pytest.raises(MessageError, match="another sum"):
        channel.open(single, world.shares, epoch=epoch, round=1)
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
        channel.open(world.total, doubled, epoch=epoch, round=1)
    twice = {**world.payloads, "agent1": world.payloads["agent0"]}
    with pytest.raises(MessageError, match="another sender"):
        channel.add(twice, epoch=epoch, round=1)
    with pytest.raises(MessageError, match="Expected a share"):
        channel.check_share(world.payloads["agent0"], epoch=epoch, round=1, sender="agent0")


def test_a_share_that_is_wrong_spoils_the_sum_and_is_noticed(world: World) -> None:
    words = generator(1).uniform(100).numpy() * 2.0**31
    noise = words.astype("<u4").tobytes()
    for position in (32, 5000):
        shares = {**world.shares, "agent2": resealed(world.shares["agent2"], position, noise)}
        with pytest.raises(MessageError, match="no sum on the grid"):
            world.channel.open(world.total, shares, epoch=world.epoch, round=1)


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
    ring = channel.ring
    for place, prime in enumerate(ring.primes[: ring.num_primes]):
        position = 32 + 4 * ring.degree * place + 4 * 77
        for word, good in ((prime - 1, True), (prime, False), (2**32 - 1, False)):
            data = word.to_bytes(4, "little")
            payload = resealed(world.payloads["agent0"], position, data)
            share = resealed(world.shares["agent0"], position, data)
            if good:
                channel.check(payload, epoch=epoch, round=1, sender="agent0")
                channel.check_share(share, epoch=epoch, round=1, sender="agent0")
                continue
            with pytest.raises(MessageError, match="below their prime"):
                channel.check(payload, epoch=epoch, round=1, sender="agent0")
            with pytest.raises(MessageError, match="below their prime"):
                channel.check_share(share, epoch=epoch, round=1, sender="agent0")
    key = dict(world.heard[2])
    key["agent0"] = resealed(key["agent0"], 0, b"\xff" * 4)
    with pytest.raises(MessageError):
        channel.joint_key(epoch, (*world.heard[:2], key))


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
    answer = {**at, "me": "agent0"}
    passed = 0
    for trial in range(60):
        bad = mutated(payload, trial)
        if survives(lambda bad=bad: channel.check(bad, **at, sender="agent0")):
            passed += 1
            survives(lambda bad=bad: channel.add({**world.payloads, "agent0": bad}, **at))
        bad = mutated(share, trial)
        if survives(lambda bad=bad: channel.check_share(bad, **at, sender="agent0")):
            shares = {**world.shares, "agent0": bad}
            survives(lambda shares=shares: channel.open(world.total, shares, **at))
        bad = mutated(world.total, trial)
        survives(lambda bad=bad: channel.open(bad, world.shares, **at))
        bad = mutated(world.heard[trial % 3]["agent1"], trial)
        heard = list(world.heard)
        heard[trial % 3] = {**heard[trial % 3], "agent1": bad}
        survives(lambda heard=heard: channel.joint_key(epoch, tuple(heard)))
        if HEADER.unpack_from(bad.ljust(HEADER.size))[0] != HEADER.unpack_from(payload)[0]:
            continue
        bad = mutated(channel.request(world.total), trial)
        store = MemoryStore()  # of an agent who has not answered yet
        handle = channel.handle(epoch, "agent0")
        store.put(handle, world.stores["agent0"].get(handle) or b"")
        survives(lambda bad=bad, store=store: channel.share(bad, **answer, secrets=store))
    assert 0 < passed < 60  # other words below their primes are a ciphertext like any other


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
