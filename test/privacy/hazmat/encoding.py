"""SEAL's encoding of complex numbers, which flooding must not be confined to the real half of."""

from __future__ import annotations

import numpy as np
from tenseal import sealapi as api

from botorch_fed.privacy.hazmat import ckks
from botorch_fed.privacy.hazmat.ckks import Ring, Words


def encoded(ring: Ring, real: np.ndarray, imaginary: np.ndarray) -> Words:
    """The coefficients of complex slots at scale one, `L x N`."""
    seal, plain = ckks._seal(ring), api.Plaintext()
    values = (real + 1j * imaginary).tolist()
    api.CKKSEncoder(seal.context).encode(values, seal.ids[ring.num_primes], 1.0, plain)
    count = ring.num_primes * ring.degree
    words = ckks._read(plain.dyn_array(), count).reshape(1, ring.num_primes, ring.degree)
    return ckks.coefficients(ring, words, ring.degree)


def real_flooding(ring: Ring, std: float, count: int, seed: bytes) -> Words:
    """The flaw: noise on the real slots only, as SEAL encodes a vector of real numbers."""
    rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    real = rng.standard_normal(ring.degree // 2) * std * np.sqrt(ring.degree)
    return encoded(ring, real, np.zeros(ring.degree // 2))[:, :count]
