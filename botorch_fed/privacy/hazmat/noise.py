r"""Hazardous: privacy noise and secret coins, without any accounting. Prefer the mechanisms.

Floating-point noise leaks: the low-order bits of `x + noise` can reveal `x` [Mironov2012]_.
`lattice_gaussian` therefore releases multiples of a power of two. With the step :math:`\gamma`,

.. math:: \gamma\,(\mathrm{round}(x/\gamma) + \mathrm{round}(z)), \qquad
          z \sim N(0, (s/\gamma)^2).

For an integer `k`, `k + round(z) = round(k + z)` but for ties, which have probability zero: the
release is post-processing of a Gaussian one of the point `γ round(x/γ)`, so the Gaussian
mechanism's guarantee holds as it stands, for a sensitivity that is larger by at most
:math:`\gamma\sqrt{\dim}`. Sums of integers below :math:`2^{53}` and products with a power of two
are exact in float64.

A zero is released without a sign, which would tell on which side of it `x` was. A uniform number
has steps of :math:`2^{-53}`; in the tails these are wider than the lattice's, and the points that
are left out would tell `x`. There another number continues it.

Not covered: the time that drawing and rounding take, and the finite resolution elsewhere, which
changes the probability of a lattice point by less than one part in a thousand.

References:
    * [Mironov2012]_ I. Mironov. On significance of the least significant bits for differential
      privacy. CCS 2012.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from numpy.typing import NDArray
from torch import Tensor

from botorch_fed.rng import generator

Path = tuple[int | str, ...]
LARGEST = 2.0**52  # in steps of the lattice: sums of two such integers are exact
_STEP_EXPONENT = 20  # the step is between 2^-20 and 2^-21 of the standard deviation
_TAIL = 2.0**-20  # here a uniform number no longer reaches every point of the lattice
_COIN_LEVELS = 2**8  # a coin reads eight bits, and more only where they do not decide
_COINS_PER_NUMBER = 6


class NoiseSource(Protocol):
    """Where random numbers of a release come from.

    Attributes:
        private: Whether nobody else can know the numbers. False says so in every result.
    """

    @property
    def private(self) -> bool: ...

    def uniform(self, *shape: int, path: Path) -> Tensor:
        r"""Independent uniforms :math:`(k + 1/2)\,2^{-53}` in the open unit interval, float64.

        Args:
            shape: The shape.
            path: What the numbers are for, e.g. ``(t, "noise")``. One path for one use.
        """


class OSNoise:
    """Random numbers of the operating system: secret, and never the same again.

    Example:
        >>> normal(OSNoise(), 2, 3, path=()).shape
        torch.Size([2, 3])
    """

    @property
    def private(self) -> bool:
        """True."""
        return True

    def uniform(self, *shape: int, path: Path) -> Tensor:
        """See `NoiseSource`; the path is not used."""
        words = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype="<u8")
        values = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        # (2^53 - 1) + 1/2 rounds up to 2^53; the last cell keeps its place below one.
        np.minimum(values, np.nextafter(1.0, 0.0), out=values)
        return torch.from_numpy(values).reshape(shape)

    def __repr__(self) -> str:
        return "OSNoise()"


class InsecureSeededNoise:
    """Replayable numbers for tests and simulations: whoever knows the seed can subtract them.

    What is released with them says `private=False`.

    Args:
        seed: The seed; the same seed and path give the same numbers.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @property
    def private(self) -> bool:
        """False."""
        return False

    def uniform(self, *shape: int, path: Path) -> Tensor:
        """See `NoiseSource`."""
        return generator(self.seed, "privacy noise", *path).uniform(*shape)

    def __repr__(self) -> str:
        return f"InsecureSeededNoise(seed={self.seed})"


def normal(noise: NoiseSource, *shape: int, path: Path) -> Tensor:
    """Independent standard normals, float64; both tails are finite.

    Args:
        noise: The source.
        shape: The shape.
        path: What the numbers are for.
    """
    from scipy.special import ndtri  # costs 150 ms to import

    uniforms = noise.uniform(*shape, path=path).numpy()
    values = np.asarray(ndtri(uniforms))
    rare = np.abs(uniforms - 0.5) > 0.5 - _TAIL
    if rare.any():
        values[rare] = _tail(uniforms[rare], noise, (*path, "tail"))
    return torch.from_numpy(values)


def _tail(uniforms: NDArray[np.float64], noise: NoiseSource, path: Path) -> NDArray[np.float64]:
    """Normals of uniform numbers near 0 or 1, with 53 further bits each."""
    from scipy.special import ndtri

    lower = uniforms < 0.5
    # What a number stands for: above one half (k + 1/2) was rounded, and two k share a number.
    start = np.where(lower, uniforms - 2.0**-54, 1 - uniforms - 2.0**-53).clip(min=0)
    width = np.where(lower | (start == 0), 2.0**-53, 2.0**-52)
    within = noise.uniform(len(uniforms), path=path).numpy()
    values: NDArray[np.float64] = np.where(lower, 1.0, -1.0) * ndtri(start + width * within)
    return values


def lattice_step(std: float) -> float:
    r"""The step :math:`\gamma = 2^{\lfloor\log_2 s\rfloor - 20}` of a lattice Gaussian.

    Args:
        std: The standard deviation :math:`s` of the noise.
    """
    if not 1e-200 <= std <= 1e200:
        raise InputDataError(
            f"The standard deviation of noise must lie between 1e-200 and 1e200, got {std}: "
            "choose other units."
        )
    _, exponent = math.frexp(std)  # std = m 2^exponent, m in [1/2, 1)
    return math.ldexp(1.0, exponent - 1 - _STEP_EXPONENT)


def lattice_gaussian(x: Tensor, std: float, *, noise: NoiseSource, path: Path) -> Tensor:
    r"""Add Gaussian noise on a lattice; see the module.

    Args:
        x: A tensor of any shape, finite.
        std: The standard deviation :math:`s` of the noise. The caller has made it large enough for
            a sensitivity that grows by :math:`\gamma\sqrt{\dim}` through rounding.
        noise: The source.
        path: What the numbers are for.

    Returns:
        A float64 tensor of the shape of `x`, of multiples of `lattice_step(std)`.
    """
    step = lattice_step(std)
    cells = x.detach().double() / step
    if not bool((cells.abs() <= LARGEST).all()):  # not a number compares as False
        raise InputDataError(
            "A value to be released must be finite and at most 2^52 steps of the lattice, got one "
            f"that is not (the step for a standard deviation of {std:.3g} is {step:.3g}): clip the "
            "contributions, or use more noise."
        )
    draws = normal(noise, *x.shape, path=path).mul_(std / step).round_()
    return cells.round_().add_(draws).add_(0.0).mul_(step)  # -0.0 + 0.0 = 0.0


def coins(count: int, rate: float, *, noise: NoiseSource, path: Path) -> Tensor:
    r"""Independent coins that show True with a given probability, exact to :math:`2^{-53}`.

    A uniform number serves six coins: each compares eight bits with the rate's, and only where they
    are equal another number decides.

    Args:
        count: How many.
        rate: The probability, in `[0, 1]`.
        noise: The source.
        path: What the coins are for.

    Returns:
        A `count` tensor of bool.
    """
    if not 0 <= rate <= 1:
        raise InputDataError(f"The probability of a coin must lie in [0, 1], got {rate}.")
    level, rest = divmod(rate * _COIN_LEVELS, 1.0)  # exact: a power of two
    words = noise.uniform(-(-count // _COINS_PER_NUMBER), path=(*path, "digits"))
    digits = _eight_bits(words)[:count]
    heads = digits < int(level)
    undecided = np.flatnonzero(digits == int(level))
    more = noise.uniform(len(undecided), path=(*path, "undecided")).numpy()
    heads[undecided] = more < rest
    return torch.from_numpy(heads)


def _eight_bits(uniforms: Tensor) -> NDArray[np.uint8]:
    """Six independent integers below 256 from the leading 48 bits of every uniform number."""
    words = (uniforms.numpy() * 2.0**48).astype("<u8")
    return words.view("u1").reshape(-1, 8)[:, :_COINS_PER_NUMBER].reshape(-1)


def subset(count: int, size: int, *, noise: NoiseSource, path: Path) -> Tensor:
    """A uniformly drawn subset of exactly a given size.

    Args:
        count: How many there are to choose from.
        size: How many are chosen.
        noise: The source.
        path: What the subset is for.

    Returns:
        A `count` tensor of bool with `size` True values.
    """
    if not 0 <= size <= count:
        raise InputDataError(f"A subset of {count} has between 0 and {count} members, got {size}.")
    keys = noise.uniform(count, path=path)
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[keys.topk(size, largest=False).indices] = True
    return chosen


# ------------------------------------------------------------------ discrete Gaussian

_WORD = 2.0**52  # integers that one uniform number stands for, exactly equally likely
_REACH = 13.5  # standard deviations beyond which nothing is drawn: less than 2^-129 lies there
_MARGIN = 2.0**-45  # a probability in float64 is known to this
_PARTS = 8  # a stair is at most an eighth of a standard deviation wide, or one integer
_DIGITS = 60  # of the arithmetic that decides what float64 can not
_TRIALS = 200  # each succeeds with probability above 0.4


def discrete_gaussian(std: float, count: int, *, noise: NoiseSource, path: Path) -> Tensor:
    r"""Independent integers with :math:`P(k) \propto e^{-k^2/2\sigma^2}` [Canonne2020]_.

    Rejection from a staircase above the density: a stair of public width :math:`2^h \approx
    \sigma/8` by its probability, known to 104 bits; a place on the stair and a sign by fair bits;
    and a coin :math:`e^{-(k^2 - e^2)/2\sigma^2}`, `e` the stair's inner edge. A coin that float64
    does not decide is thrown with 60 digits. What remains is the cut at 13.5 standard deviations
    and the 104 bits: a draw's law is within :math:`2^{-90}` of the exact one in total variation.

    Args:
        std: The parameter :math:`\sigma`, from 1/8 to :math:`2^{45}`. From 1 on it is the standard
            deviation to seven digits, from 2 on to all.
        count: How many.
        noise: The source.
        path: What the numbers are for.

    Returns:
        A `count` tensor of int64, none beyond `discrete_gaussian_reach(std)`.

    References:
        * [Canonne2020]_ C. Canonne, G. Kamath, T. Steinke. The discrete Gaussian for differential
          privacy. NeurIPS 2020.
    """
    stairs = _staircase(float(std))
    values = np.zeros(count, dtype=np.int64)
    waiting = np.arange(count)
    for trial in range(_TRIALS):
        if not len(waiting):
            return torch.from_numpy(values)
        drawn, accepted = stairs.propose(len(waiting), noise, (*path, "trial", trial))
        values[waiting[accepted]] = drawn[accepted]
        waiting = waiting[~accepted]
    raise InputDataError(
        f"{noise!r} gave {_TRIALS} times in a row what is refused: its numbers are not random."
    )


def discrete_gaussian_reach(std: float) -> int:
    """The largest magnitude that `discrete_gaussian` can return.

    Args:
        std: Its parameter.
    """
    stairs = _staircase(float(std))
    return len(stairs.high) << stairs.bits


@dataclass(frozen=True, eq=False)
class _Staircase:
    """Stairs of width `2^bits` over the positive half of a discrete Gaussian.

    `high` and `low` are the upper and lower 52 bits of the cumulative probabilities of stairs.
    """

    std: float
    bits: int
    high: NDArray[np.int64]
    low: NDArray[np.int64]

    def propose(
        self, count: int, noise: NoiseSource, path: Path
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Points under the staircase, and which of them are under the density."""
        stair, place, height = _words(noise.uniform(3, count, path=path))
        edge = self._stairs(stair, noise, path) << self.bits
        negative = place & 1 == 1
        magnitude = edge + ((place >> 1) & ((1 << self.bits) - 1))
        # An exponent of at most 2 from integers below 2^50: accurate to a few units of 2^-50.
        inside = (magnitude - edge).astype(np.float64) * (magnitude + edge).astype(np.float64)
        limit = np.exp(-inside / (2 * self.std**2))
        accepted: NDArray[np.bool_] = height < limit * _WORD
        unsure = np.abs(height / _WORD - limit) < _MARGIN
        for i in np.flatnonzero(unsure & (magnitude != edge)).tolist():
            accepted[i] = self._decide(int(magnitude[i]), int(edge[i]), int(height[i]), noise, path)
        accepted &= ~(negative & (magnitude == 0))  # there is one zero
        return np.where(negative, -magnitude, magnitude), accepted

    def _stairs(
        self, words: NDArray[np.int64], noise: NoiseSource, path: Path
    ) -> NDArray[np.int64]:
        stairs = np.searchsorted(self.high, words)  # the first that ends at the word or beyond
        for i in np.flatnonzero(self.high[stairs] == words).tolist():  # the lower bits decide
            (more,) = _words(noise.uniform(1, path=(*path, "stair", i))).tolist()
            while self.high[stairs[i]] == words[i] and self.low[stairs[i]] <= more:
                stairs[i] += 1
        return stairs

    def _decide(
        self, magnitude: int, edge: int, height: int, noise: NoiseSource, path: Path
    ) -> bool:
        """The coin of one point with 60 digits."""
        first, second = _words(noise.uniform(2, path=(*path, "coin", magnitude, height))).tolist()
        with localcontext() as context:
            context.prec = _DIGITS
            variance = Decimal(self.std) ** 2
            limit = (-(Decimal(magnitude**2 - edge**2) / (2 * variance))).exp()
            return Decimal((height << 104) + (first << 52) + second) < limit * 2**156


@lru_cache(maxsize=64)
def _staircase(std: float) -> _Staircase:
    if not 0.125 <= std <= 2.0**45:
        raise InputDataError(
            f"A discrete Gaussian needs a standard deviation from 1/8 to 2^45 steps, got {std}: "
            "choose another grid."
        )
    bits = max(0, math.floor(math.log2(std / _PARTS)))
    count = math.ceil(_REACH * std / 2.0**bits) + 1
    with localcontext() as context:
        context.prec = _DIGITS
        variance = Decimal(std) ** 2
        edges = [(-(Decimal((j << bits) ** 2) / (2 * variance))).exp() for j in range(count)]
        total = sum(edges)
        sums = list(accumulate(edges))
        levels = [int(part / total * 2**104) for part in sums[:-1]] + [1 << 104]
    high = np.array([level >> 52 for level in levels], dtype=np.int64)
    low = np.array([level & ((1 << 52) - 1) for level in levels], dtype=np.int64)
    return _Staircase(std, bits, high, low)


def _words(uniforms: Tensor) -> NDArray[np.int64]:
    """Integers below 2^52, exactly equally likely, from uniform numbers of a `NoiseSource`.

    Above one half two odd-even neighbours share a number, the first and the last stand alone: put
    together, and halved, all are equally likely again.
    """
    cells = (uniforms.numpy() * 2.0**53).astype(np.int64)
    cells[cells == 2**53 - 1] = 2**52
    return cells >> 1
