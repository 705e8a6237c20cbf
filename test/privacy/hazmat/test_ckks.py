"""The lattice arithmetic: against SEAL's own objects, and what the flooding hides."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2, kstest
from tenseal import sealapi as api

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.privacy.hazmat import ckks
from botorch_fed.privacy.hazmat.ckks import Ring, Words

RING = Ring(8192, 2, 2)
AGENTS = 4
Flood = Callable[[Ring, float, int, bytes], Words]


def moduli(primes: int = RING.num_primes) -> Words:
    return np.array(RING.primes[:primes], dtype=np.uint64)[:, None]


class Party:
    """Keys of a few agents and what they encrypt, without messages."""

    def __init__(self, num_agents: int = AGENTS, seed: bytes = b"a") -> None:
        self.common = ckks.uniform_words(RING, seed)
        pairs = [ckks.generate_secret(RING) for _ in range(num_agents)]
        self.secrets = [secret.astype(np.uint32) for secret, _ in pairs]
        self.errors = [error for _, error in pairs]
        shares = [
            ckks.key_share(RING, self.common, secret.astype(np.uint32), error.astype(np.uint32))
            for secret, error in pairs
        ]
        self.joint = ckks.sum_words(RING, shares)
        self.key = ckks.encryptor(RING, seed, ckks.words_to_bytes(self.joint))

    def sum(self, rows: np.ndarray) -> Words:
        return ckks.sum_words(RING, [ckks.encrypt_integers(RING, row, self.key) for row in rows])

    def fuse(self, total: Words, flood: Flood, std: float) -> Words:
        c1 = total[:, 1].astype(np.uint32)
        shares = [
            ckks.partial_decryption(RING, c1, secret, flood(RING, std, len(total), os.urandom(32)))
            for secret in self.secrets
        ]
        return ckks.sum_words(RING, [total[:, 0], *shares])

    def decrypt(self, total: Words) -> Words:
        """What the secret keys alone would give."""
        product = ckks.sum_words(RING, self.secrets)[: RING.num_primes] * total[:, 1] % moduli()
        return ckks.sum_words(RING, [total[:, 0], product])


@pytest.fixture(scope="module")
def party() -> Party:
    return Party()


def no_flood(ring: Ring, std: float, polynomials: int, seed: bytes) -> Words:
    return np.zeros((polynomials, ring.num_primes, ring.degree), dtype=np.uint64)


def real_flood(ring: Ring, std: float, polynomials: int, seed: bytes) -> Words:
    """The flaw: SEAL encodes a vector of real numbers."""
    rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    real = rng.standard_normal(ring.degree // 2) * std * math.sqrt(ring.degree)
    return ckks._encoded(ring, real, np.zeros(ring.degree // 2))[None]


def slots(words: Words) -> np.ndarray:
    """SEAL's slots of one plaintext at scale one."""
    seal = ckks._seal(RING)
    plain = api.Plaintext()
    body = words.astype("<u8").tobytes()
    head = np.array(seal.ids[RING.num_primes], dtype="<u8").tobytes()
    head += np.array([words.size], dtype="<u8").tobytes() + np.array([1.0]).tobytes()
    array = ckks._header(seal.version, 24 + len(body))
    array += np.array([words.size], dtype="<u8").tobytes()
    size = 16 + len(head) + len(array) + len(body)
    with ckks._file(ckks._header(seal.version, size) + head + array + body) as name:
        plain.load(seal.context, name)
    return np.array(seal.encoder.decode_complex(plain))


# ------------------------------------------------------------------ flooding


def flooding_bits(party: Party, flood: Flood, bits: int = 40) -> tuple[float, float]:
    """How many bits larger the noise of an opened zero is than the ciphertexts' own, by part."""
    total = party.sum(np.zeros((AGENTS, 10), dtype=np.int64))
    std = ckks.flooding_std(RING.degree, AGENTS, bits)
    opened = slots(party.fuse(total, flood, std)[0])
    own = slots(party.decrypt(total)[0])
    # all agents flood; one alone must hide the noise from the others: hence √n
    return (
        float(np.log2(opened.real.std() / own.real.std() / math.sqrt(AGENTS))),
        float(np.log2(opened.imag.std() / own.imag.std() / math.sqrt(AGENTS))),
    )


def hides(bits: tuple[float, float]) -> bool:
    return min(bits) >= 40


def test_shares_flood_real_and_imaginary_parts(party: Party) -> None:
    bits = flooding_bits(party, ckks.flooding_words)
    assert hides(bits), bits
    assert max(bits) <= 40 + math.log2(1.25 * 1.1)


def test_the_measurement_sees_that_flooding_is_missing_or_real_only(party: Party) -> None:
    without = flooding_bits(party, no_flood)
    assert max(without) < 1
    assert not hides(without)
    real, imaginary = flooding_bits(party, real_flood)
    assert real > 40 - math.log2(1.1)
    assert imaginary < 1
    assert not hides((real, imaginary))


@pytest.mark.parametrize("std", [2.0**45, 2.0**60, 2.0**90])
def test_flooding_is_gaussian_in_every_coefficient_down_to_the_last_bit(std: float) -> None:
    ring = Ring(8192, 3, 1)
    words = ckks.flooding_words(ring, std, 2, os.urandom(32))
    residues = ckks.transform(ring, words, back=True)
    values = np.array([_lift(ring, column) for column in residues.swapaxes(1, 2).reshape(-1, 4)])
    n = len(values)
    assert n == 2 * 8192
    scaled = values.astype(np.float64) / std
    assert kstest(scaled, "norm").pvalue > 1e-6
    halves = scaled.reshape(2, 2, 4096)
    assert abs(float((halves[0] * halves[1]).mean())) < 6 / math.sqrt(n / 2)  # used once
    low = np.bincount([int(v) % 16 for v in values], minlength=16)
    assert chi2.sf(((low - n / 16) ** 2 / (n / 16)).sum(), 15) > 1e-6


def _lift(ring: Ring, residues: np.ndarray) -> int:
    primes = ring.primes[: ring.num_primes]
    q = math.prod(primes)
    value = sum(
        int(r) * (q // p) * pow(q // p, -1, p) for r, p in zip(residues, primes, strict=True)
    )
    value %= q
    return value - q if value > q // 2 else value


def test_flooding_is_a_function_of_its_secret_seed() -> None:
    first, again = (ckks.flooding_words(RING, 2.0**50, 1, b"s" * 32) for _ in range(2))
    other = ckks.flooding_words(RING, 2.0**50, 1, b"t" * 32)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_noise_of_ciphertexts_is_the_stated_one(party: Party) -> None:
    total = party.sum(np.zeros((AGENTS, 10), dtype=np.int64))
    _, noise = ckks.decode(RING, party.decrypt(total))
    # 8192 numbers and the keys' norms: a tenth is more than five standard errors
    assert noise.std() * RING.delta == pytest.approx(ckks.noise_std(8192, AGENTS), rel=0.1)


# ------------------------------------------------------------------ against SEAL


def test_sums_are_seal_s(party: Party) -> None:
    rows = np.arange(3 * 50).reshape(3, 50)
    ciphers = [ckks.encrypt_integers(RING, row, party.key) for row in rows]
    seal = ckks._seal(RING)
    loaded = []
    for words in ciphers:
        data = ckks._cipher_bytes(seal, words[0], seal.ids[RING.num_primes], ntt=True)
        loaded.append(ckks._load(seal, api.Ciphertext(), data))
    total = api.Ciphertext()
    seal.evaluator.add_many(loaded, total)
    words = ckks._read(total.dyn_array(), 2 * RING.num_primes * RING.degree)
    assert np.array_equal(words, ckks.sum_words(RING, ciphers).ravel())


def test_encoding_is_exact_and_linear(party: Party) -> None:
    rng = np.random.default_rng(0)
    largest = 2**52
    rows = rng.integers(-largest // AGENTS, largest // AGENTS, (AGENTS, 9000))
    rows[:, :2] = [largest // AGENTS, -largest // AGENTS]
    integers, noise = ckks.decode(RING, party.decrypt(party.sum(rows)))
    assert np.array_equal(integers[:9000], rows.sum(axis=0))
    assert not integers[9000:].any()
    assert np.abs(noise).max() < 1e-12  # the ciphertexts' own noise, in steps


def test_secrets_are_ternary_and_errors_small(party: Party) -> None:
    for words, largest in ((party.secrets[0], 1), (party.errors[0], 21)):
        head = words[None, : RING.num_primes].astype(np.uint64)
        residues = ckks.transform(RING, head, back=True)[0].astype(np.int64)
        centred = np.where(residues > moduli() // 2, residues - moduli().astype(np.int64), residues)
        assert bool((centred == centred[0]).all())
        assert np.abs(centred).max() <= largest
        assert len(np.unique(centred)) > 2


def test_the_joint_key_is_seal_s_for_the_sum_of_secrets(party: Party) -> None:
    limits = moduli(len(RING.primes))
    secret = ckks.sum_words(RING, party.secrets)
    rest = ckks.sum_words(RING, [party.joint, party.common * secret % limits])
    assert np.array_equal(rest, ckks.sum_words(RING, party.errors))


def test_the_fast_reader_reads_what_single_reads_do(party: Party) -> None:
    key = api.Ciphertext()
    party.key.encrypt_zero(ckks._seal(RING).ids[RING.num_primes], key)
    array = key.dyn_array()
    slow = ckks._read_slowly(array, array.size())
    assert np.array_equal(ckks._read(array, array.size()), slow)
    assert ckks._bulk_reader() is ckks._read_behind  # on Linux, where the tests run
    with pytest.raises(ProtocolError, match="installed TenSEAL"):
        ckks._read(array, array.size() - 1)


def test_an_unknown_layout_is_found_and_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    ckks._bulk_reader.cache_clear()
    for wrong in (
        lambda instance, look: instance,
        lambda instance, look: 2**47,
        lambda i, look: -1,
    ):
        monkeypatch.setattr(ckks, "_address", wrong)
        assert ckks._bulk_reader() is ckks._read_slowly
        ckks._bulk_reader.cache_clear()


def test_an_unknown_serialization_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = ckks._seal(RING)
    real = ckks._header
    for version in ((9, 9), (seal.version[1], seal.version[0])):
        monkeypatch.setattr(ckks, "_header", lambda _, size, v=version: real(v, size))
        with pytest.raises(ProtocolError, match="installed TenSEAL"):
            ckks._check_layout(seal, RING)


def test_without_files_in_memory(monkeypatch: pytest.MonkeyPatch, party: Party) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    seen = []
    real = ckks.tempfile.mkstemp

    def mkstemp(**settings: Any) -> tuple[int, str]:
        seen.append(real(**settings))
        return seen[-1]

    monkeypatch.setattr(ckks.tempfile, "mkstemp", mkstemp)
    polynomial = ckks.uniform_words(RING, b"b")[None, : RING.num_primes]
    there = ckks.transform(RING, polynomial)
    assert np.array_equal(ckks.transform(RING, there, back=True), polynomial)
    assert seen
    assert not any(os.path.exists(name) for _, name in seen)


# ------------------------------------------------------------------ words


def test_uniform_words_are_uniform_and_addressed_by_their_seed() -> None:
    words = ckks.uniform_words(RING, b"seed")
    assert words.shape == (5, 8192)
    assert np.array_equal(words, ckks.uniform_words.__wrapped__(RING, b"seed"))
    assert not np.array_equal(words, ckks.uniform_words(RING, b"seee"))
    for row, prime in zip(words, RING.primes, strict=True):
        assert row.max() < prime
        assert kstest(row / prime, "uniform").pvalue > 1e-6
    with pytest.raises(ValueError, match="read-only"):
        words[0, 0] = 1


@pytest.mark.parametrize("prime", [3, 2**31 + 11, 2**32 - 5])
def test_rejection_takes_nothing_that_is_too_large(prime: int) -> None:
    words = ckks._below(prime, 1000, b"x", 0)
    assert len(words) == 1000
    assert int(words.max()) < prime
    assert abs(float(words.mean()) / (prime - 1) - 0.5) < 6 * 0.41 / math.sqrt(1000)


def test_words_travel_as_four_bytes() -> None:
    words = ckks.uniform_words(RING, b"c")[None, :4]
    data = ckks.words_to_bytes(words)
    assert len(data) == 4 * 4 * 8192
    assert np.array_equal(ckks.words_from_bytes(RING, data, 1, 4), words)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(MessageError, match="bytes of words"):
            ckks.words_from_bytes(RING, wrong, 1, 4)
    with pytest.raises(MessageError, match="1 of 4 primes"):
        ckks.words_from_bytes(RING, data[:-4] + b"\xff" * 4, 1, 4)
