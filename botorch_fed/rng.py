r"""Reproducible random numbers by a published recipe.

A seeded result does not depend on the version of a numerical library or on the process that
computes it. All algorithmic randomness comes from this recipe, which any language can implement
(``||`` joins bytes, ``u64`` is eight bytes, little endian):

1. ``key = SHAKE-256("botorch_fed/rng/1" || item(seed) || item(path[0]) || …)``, 32 bytes, where
   ``item(int) = "i" || u64(len(ascii)) || ascii decimal`` and
   ``item(str) = "s" || u64(len(utf8)) || utf8``.
2. The ``c``-th request (``c = 0, 1, …``) for ``n`` numbers reads ``n`` words of eight bytes from
   ``SHAKE-256(key || u64(c))``, in row-major order.
3. A word ``v`` gives ``k = v >> 11``; uniforms are ``(k + 1/2) / 2^53``.
4. Normals are ``ndtri((k + 1/2) / 2^53)``, in the upper half ``-ndtri((k' + 1/2) / 2^53)`` with
   ``k' = 2^53 - 1 - k``, so that both tails are exact mirrors and never infinite.

A stream is addressed by its purpose (``generator(seed, t, "thompson")``), not by the order of the
requests. Privacy noise never comes from this recipe: a reader of the seed could subtract it.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DOMAIN = b"botorch_fed/rng/1"
_HALF = 1 << 52


def _item(value: int | str) -> bytes:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(
            f"Expected an int or a str as a seed or a path item, got {type(value).__name__}."
        )
    tag, text = (b"i", str(value).encode()) if isinstance(value, int) else (b"s", value.encode())
    return tag + len(text).to_bytes(8, "little") + text


class Generator:
    r"""A stream of random numbers of the module's recipe, made by `generator`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._requests = 0

    def _integers(self, shape: tuple[int, ...]) -> NDArray[np.uint64]:
        count = math.prod(shape)
        counter = self._requests.to_bytes(8, "little")
        self._requests += 1
        data = hashlib.shake_256(self._key + counter).digest(8 * count)
        return np.frombuffer(data, dtype="<u8").astype(np.uint64) >> np.uint64(11)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers in the open unit interval, float64."""
        values = (self._integers(shape).astype(np.float64) + 0.5) * 2.0**-53
        # (2^53 - 1) + 1/2 rounds up to 2^53; the largest value is capped below one.
        values = np.minimum(values, np.nextafter(1.0, 0.0))
        return torch.from_numpy(values).reshape(shape)

    def normal(self, *shape: int) -> Tensor:
        """Independent standard normals, float64."""
        from scipy.special import ndtri  # costs 150 ms to import

        k = self._integers(shape)
        upper = k >= _HALF
        mirrored = np.where(upper, np.uint64(2 * _HALF - 1) - k, k)
        lower_tail = ndtri((mirrored.astype(np.float64) + 0.5) * 2.0**-53)
        return torch.from_numpy(np.where(upper, -lower_tail, lower_tail)).reshape(shape)

    def __repr__(self) -> str:
        return f"Generator({self._key[:4].hex()}…, requests={self._requests})"


def generator(seed: int, *path: int | str) -> Generator:
    r"""The stream of random numbers of a seed and a path.

    Args:
        seed: The seed of the run or of the agent.
        path: The purpose of the numbers, e.g. ``(t, "thompson")``. Different paths have independent
            streams.

    Example:
        >>> generator(0, "features").normal(2, 3).shape
        torch.Size([2, 3])
    """
    items = b"".join(_item(item) for item in (seed, *path))
    return Generator(hashlib.shake_256(_DOMAIN + items).digest(32))


def fresh() -> Generator:
    """A stream seeded by PyTorch's global generator, so that `torch.manual_seed` controls it."""
    return generator(int(torch.randint(2**62, (1,))), "fresh")
