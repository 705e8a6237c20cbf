"""Agents with a joint key, an attacker's tools, and the scheme without masks for comparison."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.stats import kstest
from torch import Tensor

from botorch_fed.privacy.channels import Epoch, Gathered, ThresholdCKKSChannel
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat import ckks, keys
from botorch_fed.rng import generator
from botorch_fed.storage.store import MemoryStore

NAMES = ("ann", "bob", "cem", "dee")
LARGE = 2**80  # far above the flooding, far below a step
REQUEST, TOTAL = 2, 1  # kinds of frames


@dataclass(frozen=True)
class World:
    """Four agents after the set-up of an epoch, each of whom contributes numbers.

    Attributes:
        dim: How many numbers; 8192 are all coefficients of a ciphertext.
    """

    dim: int = 8192
    opened_by: Any = "agents"

    @cached_property
    def channel(self) -> ThresholdCKKSChannel:
        grid = PublicGrid(dim=self.dim, bound=1000.0, num_agents=len(NAMES))
        return ThresholdCKKSChannel(grid, opened_by=self.opened_by)

    @property
    def ring(self) -> ckks.Ring:
        return self.channel.ring

    @cached_property
    def epoch(self) -> Epoch:
        return Epoch("attacked", 0, NAMES)

    @cached_property
    def stores(self) -> dict[str, MemoryStore]:
        return {name: MemoryStore() for name in NAMES}

    @cached_property
    def heard(self) -> Gathered:
        heard: Gathered = ()
        for phase in range(self.channel.setup_phases):
            messages = {
                name: self.channel.prepare(phase, self.epoch, name, heard, self.stores[name])
                for name in NAMES
            }
            heard = (*heard, self.channel.gather(messages, epoch=self.epoch, gathered=heard))
        return heard

    @cached_property
    def key(self) -> bytes:
        made = {
            self.channel.joint_key(self.epoch, self.heard, me=name, secrets=self.stores[name])
            for name in NAMES
        }
        assert len(made) == 1
        return made.pop()

    @cached_property
    def integers(self) -> dict[str, Tensor]:
        """What agents contribute."""
        grid = self.channel.grid
        rows = generator(3, "attacked").uniform(len(NAMES), self.dim)
        return {
            name: grid.to_integers((2 * row - 1) * grid.bound)
            for name, row in zip(NAMES, rows, strict=True)
        }

    @cached_property
    def payloads(self) -> dict[str, bytes]:
        return {name: self.contribution(name) for name in NAMES}

    def contribution(self, name: str) -> bytes:
        """An agent's contribution to the round."""
        at: Any = {"epoch": self.epoch, "round": 0, "me": name, "key": self.key}
        return self.channel.protect(self.integers[name], **at, secrets=self.stores[name])

    # -------------------------------------------------------------- what travels

    def parts(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Both parts of an agent's ciphertext, as the server has them."""
        body = self.channel._body(self.payloads[name], 0, self.epoch, 0, name)
        return self.channel._parts(body)

    def request(self, c1: np.ndarray) -> bytes:
        """A request for the opening of any polynomial."""
        words = ckks.words_to_bytes(c1.astype(np.uint64))
        return self.channel._frame(REQUEST, words, self.epoch, 0, "")

    def total(self, c0: np.ndarray, c1: np.ndarray) -> bytes:
        """Any ciphertext as the sum."""
        transcript = self.key[-self.channel._key_bytes - 32 :][:32]
        data = ckks.words_to_bytes(c0.astype(np.uint64)) + ckks.words_to_bytes(c1.astype(np.uint64))
        return self.channel._frame(TOTAL, transcript + data, self.epoch, 0, "")

    def share(self, name: str, request: bytes) -> bytes:
        """An honest agent's answer."""
        return self.channel.share(
            request, epoch=self.epoch, round=0, me=name, secrets=self.stores[name]
        )

    def rows(self, share: bytes, name: str) -> np.ndarray:
        """The coefficients in a share."""
        kind = 3
        return self.channel._share(self.channel._body(share, kind, self.epoch, 0, name), None)

    def constant(self, value: int) -> np.ndarray:
        """A constant polynomial, transformed."""
        shape = (self.channel._chunks, self.ring.num_primes, self.ring.degree)
        words = np.zeros(shape, dtype=np.uint64)
        words += np.array([value % p for p in self.primes], dtype=np.uint64)[:, None]
        return words

    @property
    def primes(self) -> list[int]:
        return list(self.ring.primes[: self.ring.num_primes])

    # -------------------------------------------------------------- what is secret

    def secret(self, name: str) -> np.ndarray:
        """An agent's ternary secret, coefficients."""
        words = self.channel._secret(self.epoch, name, self.stores[name])[0]
        head = words[None, : self.ring.num_primes].astype(np.uint64)
        residues = ckks.coefficients(self.ring, head, self.ring.degree)[0].astype(np.int64)
        return np.where(residues > self.primes[0] // 2, residues - self.primes[0], residues)

    def joint_words(self, names: tuple[str, ...] = NAMES) -> np.ndarray:
        """The sum of secrets, transformed."""
        terms = [self.channel._secret(self.epoch, n, self.stores[n])[0] for n in names]
        return ckks.sum_words(self.ring, terms)[: self.ring.num_primes]

    def group_mask(self, name: str) -> bytes:
        """What an agent knows of the mask on the sum: its key."""
        start = len(self.key) - self.channel._key_bytes - 32
        transcript = self.key[start : start + 32]
        return self.channel._sum_key(self.epoch, transcript, 0, self.stores[name])

    def pair_masks(self, name: str, other: str, request: bytes) -> bytes:
        """What an agent knows of the mask on another's share of a request: its key."""
        record = self.stores[name].get(f"{self.channel.handle(self.epoch, name)}-pairs") or b""
        place = [n for n in NAMES if n != name].index(other)
        key = record[32 * place : 32 * (place + 1)]
        digest = hashlib.sha256(self.channel._body(request, REQUEST, self.epoch, 0, "")).digest()
        return keys.derived(key, b"share" + digest, (0).to_bytes(8, "little"))

    # -------------------------------------------------------------- without masks

    def bare_share(self, name: str, c1: np.ndarray) -> np.ndarray:
        """A share of the scheme without masks."""
        channel, secret = self.channel, self.channel._secret(self.epoch, name, self.stores[name])[0]
        std = ckks.flooding_std(self.ring.degree, len(NAMES), channel.flooding)
        flooding = ckks.flooding_words(self.ring, std, channel._count, os.urandom(32))
        return ckks.partial_decryption(self.ring, c1.astype(np.uint32), secret, flooding)

    def bare(self, name: str) -> np.ndarray:
        """The first part of an agent's ciphertext without masks: what only the agent can make."""
        own = self.stores[name].get(self.channel._own_key_name(self.epoch, name, 0)) or b""
        added = [own]
        if self.channel._gives(self.epoch, name, self.stores[name]):
            added.append(self.group_mask(name))
        return ckks.add_masks(self.ring, self.parts(name)[0].astype(np.uint64), [], added)


# ------------------------------------------------------------------ an attacker's tools


def smallest(world: World, rows: np.ndarray, unit: int) -> np.ndarray:
    """Residues as multiples of a unit, rounded: keys, where a share is a key times the unit."""
    q = 1
    for prime in world.primes:
        q *= prime
    weights = [q // p * pow(q // p, -1, p) for p in world.primes]
    found = np.empty(rows.shape[-1])
    for place, column in enumerate(rows.T.tolist()):
        value = sum(word * weight for word, weight in zip(column, weights, strict=True)) % q
        value -= q if value > q // 2 else 0
        found[place] = round(value / unit)
    return found


def decrypted(world: World, c0: np.ndarray, c1: np.ndarray, secret: np.ndarray) -> tuple[Any, Any]:
    """A ciphertext under the sum of all secrets, by who has that."""
    product = c1.astype(np.uint64) * secret % np.array(world.primes, dtype=np.uint64)[:, None]
    rows = ckks.coefficients(world.ring, product, c0.shape[-1])
    return ckks.decode(world.ring, ckks.sum_words(world.ring, [c0.astype(np.uint64), rows]))


def is_uniform(world: World, rows: np.ndarray) -> bool:
    """Whether residues are those of uniform polynomials, as far as their distribution shows."""
    return all(
        kstest(row / prime, "uniform").pvalue > 1e-7
        and abs(np.corrcoef(row[:-1].astype(float), row[1:].astype(float))[0, 1])
        < 6 / np.sqrt(len(row))
        for row, prime in zip(rows, world.primes, strict=True)
    )


def is_unrelated(found: np.ndarray, truth: np.ndarray) -> bool:
    """Whether what was found says nothing of the truth: no correlation beyond chance."""
    return bool(abs(np.corrcoef(found, truth)[0, 1]) < 6 / np.sqrt(len(truth)))


def as_tensor(found: np.ndarray) -> Tensor:
    return torch.from_numpy(found)
