r"""Hazardous: the lattice arithmetic under the encrypted channels. Prefer `botorch_fed.privacy`.

Two parts, and the only file that imports TenSEAL::

    Ring                                    the n-of-n threshold layer on SEAL's objects
    generate_keys, encrypt, add, decrypt    TenSEAL's tensors with one key

**Ring.** :math:`R_q = \mathbb{Z}_q[X]/(X^N + 1)`, with `q` a product of 32-bit primes, so that a
product of two words fits in 64 bits and a word travels as four bytes. SEAL checks the parameters
for 128 bits of security, draws keys and errors, transforms (NTT), and encrypts zero; sums and
pointwise products of words are numpy's [Mouchet2020]_:

.. math::

   b_i = -(a s_i + e_i), \quad b = \sum_i b_i, \qquad
   (c_0, c_1) = \sum_i \mathrm{Enc}_{(b, a)}(\Delta k_i), \qquad
   d_i = c_1 s_i + f_i, \qquad c_0 + \sum_i d_i = \Delta \sum_i k_i + E.

**Encoding.** Numbers are the *coefficients* of the plaintext, not SEAL's slots: `N` integers fit
one ciphertext, and :math:`\Delta`, the product of the low primes times a power of two, makes
encoding exact and linear.
In slots the encoder rounds :math:`\Delta` times an embedding in float64; for integers of 37 bits
that error lies less than ten bits below the flooding of 50 agents, depends on each agent's own
numbers and would be part of what is opened. Here the view of whoever opens depends on the numbers
through their sum alone, up to the flooding. The mixed-radix digits of a sum give :math:`E` (low
primes) and :math:`\sum k_i` (the others) without a rounding error.

Ciphertexts travel transformed in their second part alone. Of the first part, and of shares, only
the coefficients that carry numbers are used: the others never leave an agent, so that a share is
flooded in what travels of it. Masks are added to these coefficients (`mask_words`).

**Noise.** SEAL encrypts with one prime more and divides by it: a coefficient of a fresh ciphertext
under a key :math:`s = \sum_{i \le n} s_i` of ternary parts has the rounding error of
:math:`r_0 + r_1 s`, of variance :math:`(1 + 2nN/3)/12`, and `n` of them

.. math:: \sigma_n^2 = n\,(1/12 + nN/18 + \text{what the division leaves}).

**Flooding.** :math:`f_i` has independent Gaussian coefficients of deviation
:math:`1.25 \cdot 2^\lambda \sigma_n`. Published shares without it give the keys away [Li2021]_.
What `T` sums of `D` coefficients tell beside the integers is within
:math:`2^{-\lambda}\sqrt{TD}/2` of nothing in total variation, if all encrypt as written and a
single one of them floods (`distance_bits`); `flooding_for` takes the :math:`\lambda` that makes it
:math:`2^{-40}`.
Beyond :math:`2^{53}` the low bits of a float64 are zero, and those of the ciphertext noise would
show: further terms, each :math:`2^{40}` times narrower, fill them.

**Layout.** The bindings have no bulk access. Words are read behind the object by `ctypes`, after a
look through `/proc/self/mem` at first use, where a wrong address is an error and not a crash: where
that does not find what single reads find, single reads it is. They are written through SEAL's
documented serialization and `load`; a version that lays them out differently is refused. What is
loaded, plaintexts before encryption among it, lies in memory, or in a private temporary file where
the system has no files in memory; secret keys never do.

References:
    * [Li2021]_ B. Li, D. Micciancio. On the security of homomorphic encryption on approximate
      numbers. EUROCRYPT 2021.
    * [Mouchet2020]_ C. Mouchet, J. Troncoso-Pastoriza, J.-P. Bossuat, J.-P. Hubaux. Multiparty
      homomorphic encryption from ring-learning-with-errors. Cryptology ePrint 2020/304.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from numpy.typing import NDArray
from torch import Tensor

from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.privacy.hazmat import keys
from botorch_fed.privacy.hazmat.noise import Path, normal

# Residues; the last two axes are the primes and the coefficients. As received, they have 32 bits.
Words = NDArray[np.uint64]
Received = NDArray[np.uint32]
_Buffer = bytes | memoryview

PRIME_BITS = 32
_ERROR_STD = 3.24  # SEAL's: a centred binomial of 42 coins
_MAX_PRIMES = {8192: 6, 16384: 13}  # 32-bit primes within SEAL's 218 and 438 bits at 128 bits
_TAIL = 12.0  # deviations: one coefficient beyond has probability 1e-32
_HEADROOM = 1.25  # of the flooding: some keys are longer than the expected one
_ROOM = 0.25  # the noise of an opened sum stays below this share of a step
_NARROWER = 2.0**-40
_WORD = np.dtype("<u4")


# ------------------------------------------------------------------ parameters


@dataclass(frozen=True)
class Ring:
    """Parameters of the threshold scheme; SEAL's objects for them live in a cache of the module.

    Attributes:
        degree: `N`, the coefficients of one polynomial.
        low: How many primes make up the factor between an integer and its encoding.
        high: How many more hold the sum; one further prime is used in keys only.
        shift: By how many bits integers are shifted up, beside that factor: what the high primes
            hold more than the sum is room for noise.
    """

    degree: int
    low: int
    high: int
    shift: int = 0

    @classmethod
    def choose(cls, largest_sum: int, num_agents: int, flooding_bits: int) -> Ring:
        """The smallest ring that holds a sum and its flooding.

        Raises:
            InputDataError: None does.
        """
        bits = PRIME_BITS - 0.01  # SEAL's primes lie just below a power of two
        held = math.log2(2 * largest_sum + 2)
        least = math.ceil(held / bits)
        spare = {high: math.floor(high * bits - held) for high in range(least, max(least, 2) + 1)}
        most = -math.inf
        for degree, allowed in _MAX_PRIMES.items():
            deviation = math.sqrt(num_agents) * flooding_std(degree, num_agents, 0)
            needed = math.log2(_TAIL * deviation / _ROOM)  # bits beside the flooding's
            lows = {
                high: max(math.ceil((needed + flooding_bits - shift) / bits), 1)
                for high, shift in spare.items()
            }
            high = min(lows, key=lambda high: (lows[high] + high, high))
            if lows[high] + high + 1 <= allowed:
                return cls(degree, lows[high], high, spare[high])
            most = max((allowed - h - 1) * bits + shift - needed for h, shift in spare.items())
        raise InputDataError(
            f"No ring with 128 bits of security holds sums of {num_agents} contributions up to "
            f"{largest_sum:.3g} under flooding of {flooding_bits} bits: at most "
            f"{math.floor(most)} bits of flooding fit."
        )

    @property
    def num_primes(self) -> int:
        """The primes of a ciphertext."""
        return self.low + self.high

    @property
    def primes(self) -> tuple[int, ...]:
        """All primes: high, low, and the one of keys."""
        return _seal(self).primes

    @property
    def delta(self) -> int:
        """What a shifted integer is multiplied with, the product of the low primes."""
        return math.prod(self.primes[self.high : self.num_primes])

    @property
    def step(self) -> int:
        """The encoding of one."""
        return self.delta << self.shift

    def polynomials(self, numbers: int) -> int:
        """How many plaintexts carry so many numbers."""
        return -(-numbers // self.degree)


def noise_std(degree: int, num_agents: int) -> float:
    """The deviation of a coefficient's noise in the sum of so many agents' ciphertexts."""
    rounding = (1 + 2 * num_agents * degree / 3) / 12
    # e u + e_0 + e_1 s of the key level, before it is divided by a prime of 32 bits
    divided = _ERROR_STD**2 * (1 + 4 * num_agents * degree / 3) / 4.0 ** (PRIME_BITS - 1)
    return math.sqrt(num_agents * (rounding + divided))


def distance_bits(flooding_bits: int, sums: int, count: int) -> float:
    """By how many bits the flooding hides so many sums: their total variation is 2 to minus that.

    Args:
        flooding_bits: The flooding.
        sums: How many sums are opened.
        count: How many coefficients each of them has.
    """
    return flooding_bits + 1 - math.log2(max(sums, 1) * count) / 2


def flooding_for(bits: int, sums: int, count: int) -> int:
    """The flooding whose `distance_bits` are at least so many."""
    return math.ceil(bits - distance_bits(0, sums, count))


def flooding_std(degree: int, num_agents: int, bits: int) -> float:
    """The deviation of a coefficient's flooding in one share."""
    return _HEADROOM * 2.0**bits * noise_std(degree, num_agents)


# ------------------------------------------------------------------ words


def words_to_bytes(words: Words) -> bytes:
    """Four bytes for each word."""
    return words.astype(_WORD, order="C").tobytes()


def rows_from_bytes(ring: Ring, data: bytes | memoryview, count: int) -> Received:
    """An `L x count` array of coefficients, every word below its prime.

    Raises:
        MessageError: Another length, or a word that is not.
    """
    return _checked_words(ring, data, (1, ring.num_primes, count))[0]


def words_from_bytes(
    ring: Ring, data: bytes | memoryview, polynomials: int, primes: int
) -> Received:
    """A `polynomials x primes x N` array, every word below its prime.

    Raises:
        MessageError: Another length, or a word that is not.
    """
    return _checked_words(ring, data, (polynomials, primes, ring.degree))


def _checked_words(ring: Ring, data: _Buffer, shape: tuple[int, int, int]) -> Received:
    size = math.prod(shape) * _WORD.itemsize
    if len(data) != size:
        raise MessageError(f"Expected {size:,} bytes of words, got {len(data):,}.")
    words = np.frombuffer(data, dtype=_WORD).reshape(shape)
    primes = shape[1]
    limits = np.array(ring.primes[:primes], dtype=_WORD)
    beyond = int(np.count_nonzero(words.max(axis=(0, 2)) >= limits)) if words.size else 0
    if beyond:
        raise MessageError(f"Words are not below their prime, for {beyond} of {primes} primes.")
    return words


@lru_cache(maxsize=4)
def uniform_words(ring: Ring, seed: bytes) -> Words:
    """A uniform polynomial at the level of keys, `K x N`, from a public seed.

    SHAKE-256 of the seed and the place of a prime; words that are not below it are left out.
    """
    rows = [_below(prime, ring.degree, seed, k) for k, prime in enumerate(ring.primes)]
    words = np.stack(rows).astype(np.uint64)
    words.flags.writeable = False  # one array for all who ask
    return words


def _below(prime: int, count: int, seed: bytes, place: int) -> NDArray[np.uint32]:
    mask = (1 << prime.bit_length()) - 1
    spare = count + count // 8
    while True:
        stream = hashlib.shake_256(seed + place.to_bytes(4, "little")).digest(4 * spare)
        words = np.frombuffer(stream, dtype=_WORD) & np.uint32(mask)
        words = words[words < prime]
        if len(words) >= count:
            return words[:count]
        spare *= 2  # a longer output begins with the shorter one


def sum_words(ring: Ring, terms: Sequence[Words] | Sequence[Received]) -> Words:
    """The sum of arrays of words with the same primes."""
    total = terms[0].astype(np.uint64)
    for term in terms[1:]:
        total += term  # words have 32 bits: 2^32 terms fit
    return _reduced(ring, total)


def _reduced(ring: Ring, words: Words) -> Words:
    """Words modulo their primes, in place: a division by one number at a time is vectorised."""
    for place, prime in enumerate(ring.primes[: words.shape[-2]]):
        row, p = words[..., place, :], np.uint64(prime)
        row -= row // p * p
    return words


def _moduli(ring: Ring, primes: int) -> Words:
    return np.array(ring.primes[:primes], dtype=np.uint64)[:, None]


# ------------------------------------------------------------------ keys


def generate_secret(ring: Ring) -> tuple[Words, Words]:
    """A ternary secret and the negative of a small error, both transformed, `K x N`.

    SEAL draws them: from its public key :math:`b' = -(a's + e')` the error is
    :math:`b' + a's = -e'`.
    """
    seal = _seal(ring)
    generator = seal.api.KeyGenerator(seal.context)
    secret_key = generator.secret_key()  # these owners keep the words alive
    plain = secret_key.data()
    K, N = len(seal.primes), ring.degree
    secret = _read(plain.dyn_array(), K * N).reshape(K, N)
    public_key = seal.api.PublicKey()
    generator.create_public_key(public_key)
    cipher = public_key.data()
    own_b, own_a = _read(cipher.dyn_array(), 2 * K * N).reshape(2, K, N)
    minus_error = own_a * secret
    minus_error += own_b  # below 2^64, as everywhere
    return secret, _reduced(ring, minus_error)


def key_share(ring: Ring, common: Words, secret: Received, minus_error: Received) -> Words:
    """One's part :math:`b_i = -(a s_i + e_i)` of the joint key, `K x N`."""
    moduli = _moduli(ring, len(ring.primes))
    # minus_error - a s, without a negative number
    words = common * (moduli - secret)
    words += minus_error
    return _reduced(ring, words)


@lru_cache(maxsize=4)
def encryptor(ring: Ring, seed: bytes, joint: bytes) -> Any:
    """SEAL's encryptor for a joint key: the seed of `a` and the bytes of `b`, both public."""
    seal = _seal(ring)
    K = len(seal.primes)
    pair = [words_from_bytes(ring, joint, 1, K)[0], uniform_words(ring, seed)]
    key = _load(seal, seal.api.PublicKey(), _cipher_bytes(seal, pair, seal.ids[K], ntt=True))
    return seal.api.Encryptor(seal.context, key)


# ------------------------------------------------------------------ sums


def encrypt_integers(
    ring: Ring, integers: NDArray[np.int64], key: Any, count: int
) -> tuple[Words, Words]:
    """Fresh ciphertexts of integers: the first `count` coefficients of c0, and all of c1.

    Args:
        ring: The ring.
        integers: A vector of at most `count` numbers.
        key: What `encryptor` returned.
        count: How many coefficients are used.

    Returns:
        `L x count` coefficients, and `C x L x N` words, transformed, for the `C` polynomials.
    """
    seal = _seal(ring)
    C, L, N = ring.polynomials(count), ring.num_primes, ring.degree
    first, second = np.empty((2, C, L, N), dtype=np.uint64)
    for c in range(C):
        zero = seal.api.Ciphertext()
        key.encrypt_zero(seal.ids[L], zero)
        second[c] = _read(zero.dyn_array(), 2 * L * N, L * N).reshape(L, N)
        seal.evaluator.transform_from_ntt_inplace(zero)
        first[c] = _read(zero.dyn_array(), 2 * L * N, 0, L * N).reshape(L, N)
    c0 = _rows(first, count)
    # Δ k is zero modulo the low primes.
    moduli = _moduli(ring, ring.high)
    factor = np.array([[ring.delta % int(p)] for (p,) in moduli], dtype=np.uint64)
    shifted = integers << ring.shift
    residues = (shifted % moduli.astype(np.int64)).astype(np.uint64) * factor
    residues += c0[: ring.high, : len(integers)]
    c0[: ring.high, : len(integers)] = _reduced(ring, residues)
    return c0, second


def coefficients(ring: Ring, words: Words, count: int) -> Words:
    """The first `count` coefficients, `L x count`, of transformed polynomials, `C x L x N`."""
    return _rows(transform(ring, words, back=True), count)


def _rows(polynomials: Words, count: int) -> Words:
    """The first `count` coefficients, `L x count`, of polynomials `C x L x N`."""
    rows: Words = polynomials.swapaxes(0, 1).reshape(polynomials.shape[1], -1)[:, :count].copy()
    return rows


def partial_decryption(ring: Ring, c1: Received, secret: Received, flooding: Words) -> Words:
    """One's share :math:`c_1 s_i + f_i`: as many coefficients as the flooding has, `L x count`."""
    product = c1.astype(np.uint64) * secret[: ring.num_primes]
    rows = coefficients(ring, _reduced(ring, product), flooding.shape[-1])
    rows += flooding
    return _reduced(ring, rows)


def flooding_words(ring: Ring, std: float, count: int, seed: bytes) -> Words:
    """Independent Gaussian coefficients of a deviation, `L x count`.

    Args:
        ring: The ring.
        std: The deviation; see the module for the terms that a large one is made of.
        count: How many.
        seed: Secret, of the operating system, and used once.
    """
    stds = [std]
    while 16 * stds[-1] > 2.0**53:
        stds.append(stds[-1] * _NARROWER)
    draws = normal(_Expanded(seed), len(stds), count, path=()).numpy()
    draws *= np.array(stds)[:, None]
    terms = [_residues(ring, np.rint(row)) for row in draws]
    return sum_words(ring, terms)


def _residues(ring: Ring, integers: NDArray[np.float64]) -> Words:
    """Integers of any size that float64 holds, modulo each prime, `L x count`."""
    moduli = _moduli(ring, ring.num_primes)
    if np.abs(integers).max(initial=0.0) < 2.0**62:
        above = (np.uint64(2**62) // moduli + np.uint64(1)) * moduli
        return _reduced(ring, integers.astype(np.int64).view(np.uint64) + above)
    mantissas, exponents = np.frexp(integers)
    shifts = exponents.astype(np.int64) - 53
    # An integer below 2^53 has as many trailing zeros as its mantissa is shifted too far.
    whole = np.ldexp(mantissas, 53).astype(np.int64) >> np.maximum(-shifts, 0)
    largest = max(int(shifts.max(initial=0)), 0)
    powers = np.array(
        [[pow(2, e, int(p)) for e in range(largest + 1)] for (p,) in moduli], dtype=np.uint64
    )
    residues = (whole % moduli.astype(np.int64)).astype(np.uint64)
    residues *= powers[:, np.maximum(shifts, 0)]
    return _reduced(ring, residues)


# ------------------------------------------------------------------ masks


def mask_words(ring: Ring, stream: Callable[[int], bytearray], count: int) -> Received:
    """Uniform coefficients from a stream, `L x count`.

    A word that is not below its prime is replaced by the next of the spare words behind that is.

    Args:
        ring: The ring.
        stream: So many bytes of a stream; a longer output begins with the shorter one. The mask
            lies in them.
        count: How many coefficients.
    """
    primes = ring.primes[: ring.num_primes]
    size, spare = ring.num_primes * count, 8 + ring.num_primes * count // 256
    while True:
        words = np.frombuffer(stream(4 * (size + spare)), dtype=_WORD)
        drawn = words[:size]
        high = drawn >= np.uint32(min(primes))
        if not high.any():
            return drawn.reshape(-1, count)
        rest, places = iter(words[size:].tolist()), np.flatnonzero(high)
        for place, word in zip(places.tolist(), drawn[places].tolist(), strict=True):
            prime = primes[place // count]
            while word is not None and word >= prime:
                word = next(rest, None)
            if word is None:
                break
            drawn[place] = word
        else:
            return drawn.reshape(-1, count)
        spare *= 2


def add_masks(ring: Ring, rows: Words, plus: Iterable[bytes], minus: Iterable[bytes]) -> Words:
    """Coefficients `L x count` with the masks of some keys added and those of others taken away."""
    total, taken, stream = rows.copy(), 0, keys.Streams()
    count = total.shape[-1]
    for key in plus:  # words have 32 bits: 2^31 terms of either kind fit
        total += mask_words(ring, partial(stream, key), count)
    for key in minus:
        total -= mask_words(ring, partial(stream, key), count)  # may wrap around 2^64, and
        taken += 1
    total += np.uint64(taken) * _moduli(ring, ring.num_primes)  # this brings it back
    return _reduced(ring, total)


# ------------------------------------------------------------------ secret numbers


class _Expanded:
    """Secret uniforms from a secret seed: a `NoiseSource` that is the same for the same seed."""

    private = True

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def uniform(self, *shape: int, path: Path) -> Tensor:
        count = math.prod(shape)
        stream = keys.stream(keys.derived(self._seed, repr(path).encode()), 8 * count)
        words = np.frombuffer(stream, dtype="<u8") >> np.uint64(11)
        values = (words.astype(np.float64) + 0.5) * 2.0**-53
        np.minimum(values, np.nextafter(1.0, 0.0), out=values)
        return torch.from_numpy(values).reshape(shape)

    def __repr__(self) -> str:
        return "_Expanded()"


def decode(ring: Ring, words: Words) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    r"""The integers of an opened sum, and its noise in steps, one of each for every coefficient.

    Args:
        ring: The ring.
        words: The coefficients of :math:`\Delta k + E`, `L x count`.
    """
    order = [*range(ring.high, ring.num_primes), *range(ring.high)]  # low primes first
    moduli = [ring.primes[place] for place in order]
    rows = [np.ascontiguousarray(words[place], dtype=np.uint64) for place in order]
    digits: list[Words] = []
    for prime, row in zip(moduli, rows, strict=True):
        p = np.uint64(prime)
        for digit, smaller in zip(digits, moduli, strict=False):  # Garner's mixed radix
            row = (row + p - digit % p) % p * np.uint64(pow(smaller, -1, prime)) % p
        digits.append(row)
    # E modulo Δ as a share of it, and what is missing to Δ: either is precise where it is small.
    part, rest = np.zeros(rows[0].shape), np.zeros(rows[0].shape)
    for place, (digit, prime) in enumerate(zip(digits[: ring.low], moduli, strict=False)):
        part = (digit + part) / prime
        rest = (np.uint64(prime - (place > 0)) - digit + rest) / prime
    up = part >= 0.5
    value, radix = up.astype(np.uint64), 1
    for digit, prime in zip(digits[ring.low :], moduli[ring.low :], strict=True):
        value += digit * np.uint64(radix)  # below 2^64: two primes of 32 bits at most
        radix *= prime
    negative = value > np.uint64(radix // 2)
    magnitude = np.where(negative, np.uint64(radix) - value, value).astype(np.int64)
    shifted, noise = np.where(negative, -magnitude, magnitude), np.where(up, -rest, part)
    half = 1 << ring.shift >> 1
    integers = (shifted + half) >> ring.shift
    noise = shifted - (integers << ring.shift) + noise
    below = (noise < -half) & (half > 0)
    return integers - below, noise / 2.0**ring.shift + below


def transform(ring: Ring, polynomials: Words, *, back: bool = False) -> Words:
    """SEAL's number-theoretic transform of words of the first `L` primes, or its inverse."""
    seal = _seal(ring)
    L, N = polynomials.shape[1:]
    results: Words = np.empty_like(polynomials)
    for c in range(0, len(polynomials), 2):  # a ciphertext carries two polynomials
        pair = [*polynomials[c : c + 2]]
        if not pair[-1].any():  # SEAL refuses a ciphertext without a second polynomial
            results[c + len(pair) - 1] = 0
            pair.pop()
        if not pair:
            continue
        carried = pair if len(pair) == 2 else [*pair, _ones(L, N)]
        data = _cipher_bytes(seal, carried, seal.ids[L], ntt=back)
        cipher = _load(seal, seal.api.Ciphertext(), data)
        if back:
            seal.evaluator.transform_from_ntt_inplace(cipher)
        else:
            seal.evaluator.transform_to_ntt_inplace(cipher)
        done = _read(cipher.dyn_array(), 2 * L * N, 0, len(pair) * L * N)
        results[c : c + len(pair)] = done.reshape(-1, L, N)
    return results


@lru_cache(maxsize=4)
def _ones(primes: int, degree: int) -> Words:
    return np.ones((primes, degree), dtype=np.uint64)


# ------------------------------------------------------------------ SEAL's objects


@dataclass(frozen=True, repr=False, eq=False)
class _Seal:
    api: Any
    context: Any
    evaluator: Any
    primes: tuple[int, ...]
    ids: dict[int, tuple[int, ...]]  # of parameters, by their number of primes
    version: tuple[int, int]


@lru_cache(maxsize=8)
def _seal(ring: Ring) -> _Seal:
    """The objects of SEAL for a ring, after a check of the layouts this module relies on."""
    from tenseal import sealapi as api

    sizes = [PRIME_BITS] * (ring.num_primes + 1)
    parameters = api.EncryptionParameters(api.SCHEME_TYPE.CKKS)
    parameters.set_poly_modulus_degree(ring.degree)
    parameters.set_coeff_modulus(api.CoeffModulus.Create(ring.degree, sizes))
    context = api.SEALContext(parameters, True, api.SEC_LEVEL_TYPE.TC128)
    if not context.parameters_set():
        raise InputDataError(f"SEAL refuses the ring: {context.parameters_error_message()}.")
    ids, level = {}, context.key_context_data()
    while level is not None:
        ids[len(level.parms().coeff_modulus())] = tuple(level.parms_id())
        level = level.next_context_data()
    seal = _Seal(
        api=api,
        context=context,
        evaluator=api.Evaluator(context),
        primes=tuple(m.value() for m in parameters.coeff_modulus()),
        ids=ids,
        version=_version(),
    )
    _check_layout(seal, ring)
    return seal


def _check_layout(seal: _Seal, ring: Ring) -> None:
    """Raise unless what is loaded is what was written, and a transform multiplies polynomials."""
    L, N = ring.num_primes, ring.degree
    moduli = np.array(seal.primes[:L], dtype=np.uint64)[:, None]
    pair = np.zeros((2, L, N), dtype=np.uint64)
    pair[0, :, 1] = pair[1, :, N - 1] = 1  # X and X^(N-1): their product is -1
    try:
        cipher = _load(
            seal, seal.api.Ciphertext(), _cipher_bytes(seal, [*pair], seal.ids[L], ntt=False)
        )
        same = np.array_equal(_read(cipher.dyn_array(), pair.size), pair.ravel())
        seal.evaluator.transform_to_ntt_inplace(cipher)
        left, right = _read(cipher.dyn_array(), pair.size).reshape(pair.shape)
        same &= bool((left * right % moduli == moduli - np.uint64(1)).all())
        same &= cipher.is_ntt_form() and tuple(cipher.parms_id()) == seal.ids[L]
    except (RuntimeError, ValueError, IndexError) as error:
        raise _unknown_layout() from error
    if not same:
        raise _unknown_layout()


def _unknown_layout() -> ProtocolError:
    return ProtocolError(
        "The installed TenSEAL lays out SEAL's objects in a way this release does not know: use "
        "the version named in its requirements."
    )


# ---- writing


def _header(version: tuple[int, int], size: int) -> bytes:
    return struct.pack("<HBBBBHQ", 0xA15E, 16, *version, 0, 0, size)


def _cipher_bytes(
    seal: _Seal, polynomials: Sequence[Words], parms: tuple[int, ...], *, ntt: bool
) -> tuple[_Buffer, ...]:
    """SEAL's serialization of a ciphertext or public key of polynomials `primes x N`, in parts."""
    primes, N = polynomials[0].shape
    parts = [np.ascontiguousarray(words, dtype="<u8").data.cast("B") for words in polynomials]
    size = sum(map(len, parts))
    body = struct.pack("<4QB3QdQ", *parms, ntt, len(parts), N, primes, 1.0, 1)
    array = _header(seal.version, 24 + size) + struct.pack("<Q", size // 8)
    return _header(seal.version, 16 + len(body) + len(array) + size) + body + array, *parts


def _load(seal: _Seal, target: Any, parts: tuple[_Buffer, ...]) -> Any:
    with _file(*parts) as name:
        target.load(seal.context, name)  # SEAL checks words and parameters again
    return target


def _saved_version(thing: Any) -> tuple[int, int]:
    with _file(b"") as name:
        thing.save(name)
        with open(name, "rb") as file:
            start = file.read(16)
    if len(start) != 16 or struct.unpack_from("<HB", start) != (0xA15E, 16):
        raise _unknown_layout()
    return start[3], start[4]


@contextmanager
def _file(*parts: _Buffer) -> Iterator[str]:
    """A name under which SEAL finds bytes: in memory, or a private file that is deleted."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        file = os.memfd_create("botorch_fed", os.MFD_CLOEXEC)
        name = f"/proc/self/fd/{file}"
    else:
        file, name = tempfile.mkstemp(prefix="botorch_fed-")
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(file, view) :]
        yield name
    finally:
        os.close(file)
        if not name.startswith("/proc/"):
            os.unlink(name)


# ---- reading


def _read(array: Any, count: int, start: int = 0, stop: int | None = None) -> Words:
    """Words of a DynArray of so many, whose owner the caller keeps alive."""
    if array.size() != count:
        raise _unknown_layout()
    return _bulk_reader()(array, start, count if stop is None else stop)


def _read_slowly(array: Any, start: int, stop: int) -> Words:
    words = (array.at(i) for i in range(start, stop))
    return np.fromiter(words, dtype=np.uint64, count=stop - start)


def _read_behind(array: Any, start: int, stop: int) -> Words:
    address = _address(_in_process(id(array) + 16), _in_process) + 8 * start
    return np.ctypeslib.as_array((ctypes.c_uint64 * (stop - start)).from_address(address)).copy()


def _in_process(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _address(instance: int, look: Callable[[int], int]) -> int:
    """Where the words are: behind pool (two words), capacity and size."""
    return look(instance + 32)


@lru_cache(maxsize=1)
def _bulk_reader() -> Callable[[Any, int, int], Words]:
    """The fast way to read where it is the same as the slow one, found without risk of a crash."""
    from tenseal import sealapi as api

    count = 67
    plain = api.Plaintext(" + ".join(f"{i + 1:X}x^{i}" for i in range(count - 1, 0, -1)) + " + 1")
    words = plain.dyn_array()
    expected = _read_slowly(words, 0, count)
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return _read_slowly
    try:

        def look(address: int) -> int:
            return int.from_bytes(os.pread(memory, 8, address), "little")

        instance = look(id(words) + 16)
        if (look(instance + 16), look(instance + 24)) != (words.capacity(), count):
            return _read_slowly
        start = _address(instance, look)
        found = np.frombuffer(os.pread(memory, 8 * count, start), dtype=np.uint64)
    except (OSError, OverflowError, ValueError):
        return _read_slowly
    finally:
        os.close(memory)
    return _read_behind if np.array_equal(found, expected) else _read_slowly


# ------------------------------------------------------------------ TenSEAL's tensors with one key

SLOTS = 4096  # numbers in one vector
SLOT_BITS = 44  # sums of so many bits are exact in a slot, with room for float64 in the encoder
_SINGLE_DEGREE = 2 * SLOTS
_SINGLE_BITS = [50, 50, 50]
_SINGLE_SCALE = 2.0**40
VECTOR_BYTES = 2 * 8 * 2 * _SINGLE_DEGREE + 4096  # of a vector, at most


def generate_keys() -> tuple[bytes, bytes]:
    """TenSEAL's context with a public key only, and the same with the secret one."""
    import tenseal

    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, _SINGLE_DEGREE, coeff_mod_bit_sizes=_SINGLE_BITS, n_threads=1
    )
    context.global_scale = _SINGLE_SCALE
    kept = {"save_public_key": True, "save_galois_keys": False, "save_relin_keys": False}
    public = context.serialize(save_secret_key=False, **kept)
    return public, context.serialize(save_secret_key=True, **kept)


def check_public(public: bytes) -> None:
    """Raise `MessageError` unless this is a context with a public key and no other."""
    context = _context(public)
    more = context.has_secret_key() or context.has_relin_keys() or context.has_galois_keys()
    if more or not context.has_public_key() or context.global_scale != _SINGLE_SCALE:
        raise MessageError("A server's context has a public key, no other key, and this scale.")


@lru_cache(maxsize=8)
def _context(data: bytes) -> Any:
    return _read_context(data)


@lru_cache(maxsize=1)
def _secret_context(data: bytes) -> Any:
    return _read_context(data)


def _read_context(data: bytes) -> Any:
    import tenseal

    try:
        return tenseal.context_from(data, n_threads=1)
    except Exception as error:
        raise MessageError(f"TenSEAL reads no context from {len(data):,} bytes.") from error


def encrypt(public: bytes, parts: Sequence[Sequence[float]]) -> list[bytes]:
    """One serialized vector for each list of at most `SLOTS` numbers."""
    import tenseal

    context = _context(public)
    vectors: list[bytes] = [tenseal.ckks_vector(context, part).serialize() for part in parts]
    return vectors


def check_vectors(public: bytes, vectors: Sequence[bytes], sizes: Sequence[int]) -> None:
    """Raise `MessageError` unless these are vectors of these sizes."""
    _read_vectors(_context(public), vectors, sizes)


def add(public: bytes, terms: Sequence[Sequence[bytes]], sizes: Sequence[int]) -> list[bytes]:
    """The sums of vectors, part by part."""
    context = _context(public)
    total = _read_vectors(context, terms[0], sizes)
    for term in terms[1:]:
        for vector, summand in zip(total, _read_vectors(context, term, sizes), strict=True):
            try:
                vector.add_(summand)
            except (RuntimeError, ValueError) as error:  # e.g. what is left hides nothing
                raise MessageError("SEAL does not add these ciphertexts.") from error
    return [vector.serialize() for vector in total]


def decrypt(secret: bytes, vectors: Sequence[bytes], sizes: Sequence[int]) -> NDArray[np.float64]:
    """The numbers of vectors, one behind the other.

    Reading a key takes longer than decrypting: the last one stays in this process's memory.
    """
    read = _read_vectors(_secret_context(secret), vectors, sizes)
    return np.concatenate([np.array(vector.decrypt()) for vector in read])


def _read_vectors(context: Any, vectors: Sequence[bytes], sizes: Sequence[int]) -> list[Any]:
    if len(vectors) != len(sizes):
        raise MessageError(f"Expected {len(sizes)} vectors, got {len(vectors)}.")
    return [_read_vector(context, *pair) for pair in zip(vectors, sizes, strict=True)]


def _read_vector(context: Any, data: bytes, size: int) -> Any:
    import tenseal

    # TenSEAL's message: field 1 the size, field 2 SEAL's ciphertext, field 3 the scale.
    count = _varint(size)
    start = b"\x0a" + _varint(len(count)) + count + b"\x12"
    end = b"\x19" + struct.pack("<d", _SINGLE_SCALE)
    for digits in (2, 3, 4):
        inner = len(data) - len(start) - digits - len(end)
        front = start + _varint(max(inner, 0))
        if len(front) == len(start) + digits and data.startswith(front) and data.endswith(end):
            break
    else:
        raise MessageError(f"No vector of {size} numbers at this scale.")
    frame = struct.unpack_from("<HBBBBHQ", data, len(front)) if inner >= 16 else ()
    version = _version()
    if frame[:4] != (0xA15E, 16, *version) or frame[-1] != inner or len(data) > VECTOR_BYTES:
        raise MessageError("No ciphertext of this version of SEAL inside a vector.")
    try:
        vector = tenseal.ckks_vector_from(context, data)  # SEAL checks words and parameters
        cipher = vector.ciphertext()[0]
        good = vector.size() == size and len(vector.ciphertext()) == 1 and cipher.size() == 2
        good &= cipher.is_ntt_form() and cipher.coeff_modulus_size() == len(_SINGLE_BITS) - 1
        good &= cipher.poly_modulus_degree() == _SINGLE_DEGREE
        good &= cipher.scale == _SINGLE_SCALE and not cipher.is_transparent()
    except Exception as error:
        raise MessageError("SEAL does not accept a ciphertext.") from error
    if not good:
        raise MessageError("A ciphertext of another size, form or level.")
    return vector


@lru_cache(maxsize=1)
def _version() -> tuple[int, int]:
    from tenseal import sealapi as api

    return _saved_version(api.Plaintext("1"))


def _varint(number: int) -> bytes:
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])
