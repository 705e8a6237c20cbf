"""E: a joint key of many agents. Once each agent was sent everybody's key share, 164 kB each."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from botorch_fed.aggregation.sum_messages import MAX_KEY_BYTES, Keys
from botorch_fed.privacy.channels import Epoch, ThresholdCKKSChannel
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat import keys
from botorch_fed.storage.store import MemoryStore
from botorch_fed.wire.codec import MAX_BYTES, encode

AGENTS = 1000


def announced(channel: ThresholdCKKSChannel, epoch: Epoch, name: str) -> bytes:
    """An announcement of one of many, without the secret of its key share."""
    private = keys.new_identity()
    said = keys.public_identity(private) + keys.public_exchange(keys.new_exchange()) + bytes(16)
    signed = said + keys.sign(private, channel._signed_text(epoch, name, said))
    return channel._frame(7, signed, epoch, 0, name)


@pytest.mark.parametrize("me", ["agent0000", "agent0500"])
def test_a_joint_key_of_a_thousand(me: str) -> None:
    """The first makes the key to sums for all others; another one reads it."""
    channel = ThresholdCKKSChannel(
        PublicGrid(dim=106, bound=256.0, num_agents=AGENTS, precision=2.0**-18), sums=100
    )
    names = tuple(f"agent{i:04d}" for i in range(AGENTS))
    epoch, store = Epoch("scale", 0, names), MemoryStore()
    first = {name: announced(channel, epoch, name) for name in names if name != me}
    spent, sent = 0.0, 0

    def timed(work: object) -> object:
        nonlocal spent
        start = time.process_time()
        result = work()  # type: ignore[operator]
        spent += time.process_time() - start
        return result

    first[me] = timed(lambda: channel.prepare(0, epoch, me, (), store))  # type: ignore[assignment]
    assert max(map(len, first.values())) < 250
    second = timed(lambda: channel.prepare(1, epoch, me, (first,), store))
    assert isinstance(second, bytes)
    sent = len(first[me]) + len(second)
    # The others' key shares: words like any others. The first's sealed keys are of one length.
    size = channel._key_bytes
    words = np.random.default_rng(0).integers(0, 2**31, size // 4, dtype="<u4").tobytes()
    sealed = second[-48 * (AGENTS - 1) :] if me == names[0] else bytes(48 * (AGENTS - 1))
    gathered = channel._frame(5, words + sealed, epoch, 0, "")
    heard = (first, {"": gathered})
    key = timed(lambda: channel.joint_key(epoch, heard, me=me, secrets=store))
    assert isinstance(key, bytes)
    received = len(encode(Keys(0, heard), max_bytes=MAX_BYTES))
    integers = channel.grid.to_integers(torch.zeros(106, dtype=torch.float64))
    payload = timed(
        lambda: channel.protect(integers, epoch=epoch, round=0, me=me, key=key, secrets=store)
    )
    assert isinstance(payload, bytes)
    channel.check(payload, epoch=epoch, round=0, sender=me, key=key)
    print(f"{AGENTS} agents: {received / 1e6:.2f} MB in, {sent / 1e6:.2f} MB out, {spent:.2f} s")
    assert received + sent < 10e6
    assert received < MAX_BYTES
    assert len(second) < MAX_KEY_BYTES
    assert spent < 10.0
