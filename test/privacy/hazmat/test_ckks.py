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
from botorch_fed.privacy.hazmat import ckks, keys
from botorch_fed.privacy.hazmat.ckks import Ring, Words
from test.privacy.hazmat.encoding import real_flooding

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

    def sum(self, rows: np.ndarray, count: int = RING.degree) -> tuple[Words, Words]:
        """Coefficients of the first part, and the second part."""
        sent = [ckks.encrypt_integers(RING, row, self.key, count) for row in rows]
        first = ckks.sum_words(RING, [c0 for c0, _ in sent])
        return first, ckks.sum_words(RING, [c1 for _, c1 in sent])

    def fuse(self, total: tuple[Words, Words], flood: Flood, std: float) -> Words:
        first, second = total
        c1, count = second.astype(np.uint32), first.shape[-1]
        shares = [
            ckks.partial_decryption(RING, c1, secret, flood(RING, std, count, os.urandom(32)))
            for secret in self.secrets
        ]
        return ckks.sum_words(RING, [first, *shares])

    def decrypt(self, total: tuple[Words, Words]) -> Words:
        """What the secret keys alone would give."""
        return self.fuse(total, no_flood, 0.0)


@pytest.fixture(scope="module")
def party() -> Party:
    return Party()


def no_flood(ring: Ring, std: float, count: int, seed: bytes) -> Words:
    return np.zeros((ring.num_primes, count), dtype=np.uint64)


def slots(residues: Words) -> np.ndarray:
    """The values of small polynomials at the odd roots of one: SEAL's slots, at scale one."""
    _, noise = ckks.decode(RING, residues)
    values = noise * float(RING.delta)
    N = len(values)
    return np.fft.fft(values * np.exp(1j * np.pi * np.arange(N) / N))


# ------------------------------------------------------------------ flooding


def flooding_bits(party: Party, flood: Flood, bits: int = 40) -> tuple[float, float]:
    """How many bits larger the noise of an opened zero is than the ciphertexts' own, by part."""
    total = party.sum(np.zeros((AGENTS, 10), dtype=np.int64))
    std = ckks.flooding_std(RING.degree, AGENTS, bits)
    opened = slots(party.fuse(total, flood, std))
    own = slots(party.decrypt(total))
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
    real, imaginary = flooding_bits(party, real_flooding)
    assert real > 40 - math.log2(1.1)
    assert imaginary < 1
    assert not hides((real, imaginary))


@pytest.mark.parametrize("std", [2.0**45, 2.0**60, 2.0**90])
def test_flooding_is_gaussian_in_every_coefficient_down_to_the_last_bit(std: float) -> None:
    ring = Ring(8192, 3, 1)
    n = 2 * 8192
    words = ckks.flooding_words(ring, std, n, os.urandom(32))
    assert words.shape == (4, n)
    values = np.array([_lift(ring, column) for column in words.T])
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
    N = RING.degree
    sent = [ckks.encrypt_integers(RING, row, party.key, N) for row in rows]
    ciphers = [np.stack([ckks.transform(RING, c0[None])[0], c1[0]]) for c0, c1 in sent]
    seal = ckks._seal(RING)
    loaded = []
    for words in ciphers:
        data = ckks._cipher_bytes(seal, words, seal.ids[RING.num_primes], ntt=True)
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
    integers, noise = ckks.decode(RING, party.decrypt(party.sum(rows, 9100)))
    assert len(integers) == 9100
    assert np.array_equal(integers[:9000], rows.sum(axis=0))
    assert not integers[9000:].any()
    assert np.abs(noise).max() < 1e-12  # the ciphertexts' own noise, in steps


@pytest.mark.parametrize("shift", [0, 1, 20])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (3, 2)])
def test_integers_and_noise_are_told_apart(shape: tuple[int, int], shift: int) -> None:
    """Of either sign, up to the largest that the high primes hold beside the shift."""
    low, high = shape
    ring = Ring(8192, low, high, shift)
    largest = 2 ** (31 * high - shift - 1)
    rng = np.random.default_rng(shift)
    integers = [largest, -largest, 0, 1, -1, *rng.integers(-largest, largest, 95).tolist()]
    shares = [0.49, -0.49, 0.0, 0.2, -0.2, 1e-9, *rng.uniform(-0.5, 0.5, 94).tolist()]
    values = [k * ring.step + round(e * ring.step) for k, e in zip(integers, shares, strict=True)]
    words = np.array([[v % p for v in values] for p in ring.primes[: low + high]], dtype=np.uint64)
    found, noise = ckks.decode(ring, words)
    assert found.tolist() == integers
    assert noise == pytest.approx(shares, abs=1e-9)


@pytest.mark.parametrize("agents", [2, 50, 1000])
@pytest.mark.parametrize("bits", [20, 37, 43])
def test_a_ring_holds_the_sum_and_its_noise(agents: int, bits: int) -> None:
    for flooding in (40, 48, 60):
        ring = Ring.choose(agents * 2**bits, agents, flooding)
        room = math.prod(ring.primes[: ring.high]) >> ring.shift
        assert room > 2 * (agents * 2**bits + 1)
        deviation = math.sqrt(agents) * ckks.flooding_std(ring.degree, agents, flooding)
        assert 12 * deviation < ring.step / 4
        fewer = math.prod(ring.primes[: ring.num_primes - 1])
        assert fewer < 2 * agents * 2**bits * 12 * deviation * 4 * 2  # up to a bit: none to spare


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
    slow = ckks._read_slowly(array, 0, array.size())
    assert np.array_equal(ckks._read(array, array.size()), slow)
    assert np.array_equal(ckks._read(array, array.size(), 5, 99), slow[5:99])
    assert np.array_equal(ckks._read_slowly(array, 5, 99), slow[5:99])
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


# ------------------------------------------------------------------ masks


def stream(key: bytes) -> Callable[[int], bytearray]:
    return lambda size: keys.stream(key, size)


@pytest.mark.parametrize("count", [1, 64, 9000])
def test_masks_are_uniform_functions_of_their_keys(count: int) -> None:
    mask = ckks.mask_words(RING, stream(b"k" * 32), count)
    assert mask.shape == (4, count)
    assert np.array_equal(mask, ckks.mask_words(RING, stream(b"k" * 32), count))
    assert not np.array_equal(mask, ckks.mask_words(RING, stream(b"l" * 32), count))
    assert bool((mask < moduli()).all())
    if count > 1000:
        for row, prime in zip(mask, RING.primes, strict=False):
            assert kstest(row / prime, "uniform").pvalue > 1e-6
        assert len(np.unique(mask)) > 0.999 * mask.size


def test_words_beyond_their_prime_are_drawn_again() -> None:
    """A stream that begins with words that no prime allows, and one that has too few others."""

    def begins(size: int) -> bytearray:
        return bytearray(b"\xff" * 4 * 11 + keys.stream(b"k" * 32, size))[:size]

    assert keys.stream(b"k" * 32, 99) == keys.stream(b"k" * 32, 199)[:99]

    mask = ckks.mask_words(RING, begins, 64)
    assert bool((mask < moduli()).all())
    expected = np.frombuffer(begins(4 * 256), dtype="<u4").reshape(4, 64)
    good = expected < moduli()
    assert 0 < np.count_nonzero(~good) < 20
    assert np.array_equal(mask[good], expected[good])
    assert len(set(mask[~good].tolist())) == np.count_nonzero(~good)  # each its own


def test_masks_cancel() -> None:
    rows = ckks.uniform_words(RING, b"r")[:4, :100]
    secrets = [bytes([i]) * 32 for i in range(5)]
    masks = [ckks.mask_words(RING, stream(key), 100).astype(object) for key in secrets]
    masked = ckks.add_masks(RING, rows, secrets[:3], secrets[3:])
    expected = rows.astype(object) + sum(masks[:3]) - sum(masks[3:])
    assert np.array_equal(masked, expected % moduli().astype(object))
    assert not np.array_equal(masked, rows)
    assert bool((masked < moduli()).all())
    assert np.array_equal(ckks.add_masks(RING, masked, secrets[3:], secrets[:3]), rows)
    assert np.array_equal(ckks.add_masks(RING, rows, [], []), rows)
