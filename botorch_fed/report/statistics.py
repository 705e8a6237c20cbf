"""Means and intervals of a report, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from scipy.special import stdtrit

EVERYTHING = (-math.inf, math.inf)


@dataclass(frozen=True)
class Estimate:
    """The mean of some values and its 95 % interval, Student's t.

    Attributes:
        mean: The mean.
        half: Half of the interval; None for a single value.
        count: The number of values.
        span: The ends of the metric's range, at which the interval is cut.
    """

    mean: float
    half: float | None
    count: int
    span: tuple[float, float] = EVERYTHING

    @classmethod
    def of(cls, values: Sequence[float], span: tuple[float, float] = EVERYTHING) -> Estimate | None:
        """The estimate of some values; None without any."""
        if not values:
            return None
        return cls(mean(values), half_width(values), len(values), span)

    @property
    def low(self) -> float:
        """The lower end."""
        return max(self.mean - (self.half or 0.0), min(self.span[0], self.mean))

    @property
    def high(self) -> float:
        """The upper end."""
        return min(self.mean + (self.half or 0.0), max(self.span[1], self.mean))


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    centre = mean(values)
    variance = math.fsum((value - centre) ** 2 for value in values) / (n - 1)
    return float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)


def known(values: Iterable[float]) -> list[float]:
    """Without NaN."""
    return [value for value in values if not math.isnan(value)]


def some_counts(total: int, most: int = 12) -> list[int]:
    """At most `most` of 1, …, total, evenly spaced, both ends included."""
    if total <= most:
        return list(range(1, total + 1))
    return sorted({round(1 + i * (total - 1) / (most - 1)) for i in range(most)})


# ------------------------------------------------------------------ numbers as text


def number(value: float) -> str:
    """Five digits."""
    return f"{value:.5g}"


def brief(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"


def shown(value: object) -> str:
    """A parameter's value."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def upper(value: float) -> str:
    """Four digits, rounded up, so that an upper bound stays one."""
    up = Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(value))
    return f"{float(up):g}"


def counted(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(number: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def spans(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as 1–3, 7."""
    found: list[list[int]] = []
    for one in sorted(set(numbers)):
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in found)


def short(name: str, most: int = 22) -> str:
    """A name for a chart: one line of at most `most` characters."""
    line = " ".join(name.split())
    return line if len(line) <= most else line[: most - 1] + "…"
