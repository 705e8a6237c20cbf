r"""Distributed exploration: regions of the domain, and the agents' weights in each region.

In DP-FTS-DE [Dai2021]_ the domain is divided into `P` regions of equal volume, every agent
starts in one of them, and the server releases one weighted mean of the agents' messages per region.
The weights of region `i` favour the agents that started in it,

.. math:: \phi_n^{(i)} = \frac{e^{c_t 1[g(n) = i]}}{Z_i}, \qquad
          Z_i = N_i e^{c_t} + N - N_i,

with :math:`g(n)` the region of agent `n`, :math:`N_i` the number of agents in region `i`, and a
*contrast* :math:`c_t \ge 0`, the log ratio of the weights inside and outside, which an exploration
schedule decreases to zero. Rounds count from one: round `t` uses the `t`-th release.

::

    experiment                            schedule
    synthetic                             SoftmaxSchedule(15, plateau=5, decay=5)
    real tasks                            SoftmaxSchedule(15, plateau=10, decay=30)
    fixed weights                         SoftmaxSchedule(c, plateau=the number of rounds)
    one mean for all                      SoftmaxSchedule(0)

Partitions, weights and schedules are public and independent of data. Partitions and schedules are
frozen dataclasses of numbers, so that `wire` can encode them.

References:
    * [Dai2021]_ Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
      optimization with distributed exploration. NeurIPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

MAX_REGIONS = 64

_Box = tuple[tuple[float, ...], tuple[float, ...]]
_ExactBox = tuple[list[Fraction], list[Fraction]]


@dataclass(frozen=True)
class Partition:
    r"""Boxes that tile the unit cube.

    Boxes are half-open, :math:`[l, u)`, and closed at one: every point lies in exactly one.

    Attributes:
        lower: The lower corners: `P` tuples of `d` numbers.
        upper: The upper corners.

    Example:
        >>> partition = Partition.regular(4, dim=2)
        >>> partition.region_of(torch.tensor([[0.2, 0.7], [0.5, 0.5]]).double())
        tensor([1, 3])
    """

    lower: tuple[tuple[float, ...], ...]
    upper: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name in ("lower", "upper"):
            corners = tuple(tuple(float(x) for x in corner) for corner in getattr(self, name))
            object.__setattr__(self, name, corners)
        if not 1 <= len(self.lower) <= MAX_REGIONS or len(self.lower) != len(self.upper):
            raise InputDataError(
                f"Expected 1 to {MAX_REGIONS} regions with a lower and an upper corner each, got "
                f"{len(self.lower)} lower and {len(self.upper)} upper corners."
            )
        sizes = {len(corner) for corner in (*self.lower, *self.upper)}
        if len(sizes) > 1 or sizes == {0}:
            raise InputDataError(
                f"Expected corners of one dimension d > 0, got dimensions {sorted(sizes)}."
            )
        self._check_tiling()

    def _check_tiling(self) -> None:
        lower, upper = self._corners
        if not bool(((lower >= 0) & (lower < upper) & (upper <= 1)).all()):
            raise InputDataError("Expected 0 <= lower < upper <= 1 in every coordinate.")
        # Two boxes are disjoint if in some coordinate one ends before the other begins.
        apart = (upper.unsqueeze(1) <= lower).any(dim=-1)
        disjoint = apart | apart.mT | torch.eye(len(lower), dtype=torch.bool)
        volume = float((upper - lower).prod(dim=-1).sum())
        if not bool(disjoint.all()) or abs(volume - 1) > 1e-9:  # rounding: 64 d 2^-53
            raise InputDataError(
                "The regions must tile the unit cube, without overlap and with total volume 1, got "
                f"volume {volume:.6g}: Partition.regular makes such regions."
            )

    @classmethod
    def regular(cls, num_regions: int, dim: int) -> Partition:
        r"""Regions of equal volume, for any number of regions and any dimension.

        The longest side (of several, the first) is cut so that half of the regions, rounded down,
        fit below and the others above, and so on in both parts: two regions halve the first
        coordinate, four halve the first two if there are two, three on a line are thirds.

        Args:
            num_regions: `P`, from 1 to 64.
            dim: The dimension `d` of the cube.
        """
        if not 1 <= num_regions <= MAX_REGIONS or dim < 1:
            raise InputDataError(
                f"Expected 1 to {MAX_REGIONS} regions and a positive dimension, got {num_regions} "
                f"regions and dimension {dim}."
            )
        cube = [Fraction(0)] * dim, [Fraction(1)] * dim
        boxes = [_rounded(box) for box in _cut(cube, num_regions)]
        return cls(tuple(lower for lower, _ in boxes), tuple(upper for _, upper in boxes))

    @property
    def num_regions(self) -> int:
        """The number of regions `P`."""
        return len(self.lower)

    @property
    def dim(self) -> int:
        """The dimension `d` of the cube."""
        return len(self.lower[0])

    def bounds(self, region: int) -> Tensor:
        """The corners of a region, a `2 x d` tensor; upper faces belong to the neighbours."""
        lower, upper = self._corners
        index = self._checked(region)
        return torch.stack([lower[index], upper[index]])

    def region_of(self, X: Tensor) -> Tensor:
        """The regions of points.

        Args:
            X: A `batch_shape x d` tensor of points in the unit cube.

        Returns:
            A `batch_shape` tensor of integers.
        """
        self._check_dim(X, "X")
        points = X.detach().double().unsqueeze(-2)
        inside = ((points >= self._corners[0]) & (points <= self._last)).all(dim=-1)
        if not bool(inside.any(dim=-1).all()):
            outside = ~inside.any(dim=-1)
            raise InputDataError(
                f"{int(outside.sum())} of {outside.numel()} points lie in no region: map points to "
                "the unit cube [0, 1]^d."
            )
        return inside.long().argmax(dim=-1)

    def to_region(self, region: int | Tensor, U: Tensor) -> Tensor:
        """Points of a region, from points of the unit cube; differentiable.

        Uniform points become uniform points of the region. A coordinate on an upper face that
        belongs to a neighbour becomes the last number below it.

        Args:
            region: The region, or one region for each point: a `batch_shape` tensor of integers.
            U: A `batch_shape x d` tensor of points in the unit cube.
        """
        self._check_dim(U, "U")
        if not bool(((U >= 0) & (U <= 1)).all()):
            raise InputDataError("Expected points of the unit cube, got points outside it.")
        index = self._checked(region)
        lower, upper, last = self._corners[0][index], self._corners[1][index], self._last[index]
        X = lower + U.double() * (upper - lower)
        return X + (X.clamp(lower, last) - X).detach()  # the gradient passes through the clamp

    def from_region(self, region: int | Tensor, X: Tensor) -> Tensor:
        """The inverse of `to_region`, up to rounding.

        Args:
            region: The region, or one region for each point: a `batch_shape` tensor of integers.
            X: A `batch_shape x d` tensor of points of these regions.
        """
        self._check_dim(X, "X")
        index = self._checked(region)
        lower, upper = self._corners[0][index], self._corners[1][index]
        return ((X.double() - lower) / (upper - lower)).clamp(0, 1)

    def assign(self, num_agents: int) -> tuple[int, ...]:
        """A region for every agent, in turn: the regions' numbers of agents differ by at most 1."""
        if num_agents < 1:
            raise InputDataError(f"Expected at least one agent, got {num_agents}.")
        return tuple(agent % self.num_regions for agent in range(num_agents))

    @cached_property
    def _corners(self) -> tuple[Tensor, Tensor]:
        return (
            torch.tensor(self.lower, dtype=torch.float64),
            torch.tensor(self.upper, dtype=torch.float64),
        )

    @cached_property
    def _last(self) -> Tensor:
        """The largest coordinates inside: the last number below an upper face, or one."""
        upper = self._corners[1]
        return torch.where(upper == 1, upper, upper.nextafter(torch.zeros_like(upper)))

    def _checked(self, region: int | Tensor) -> Tensor:
        index = torch.as_tensor(region)
        if index.dtype != torch.int64 or bool(((index < 0) | (index >= self.num_regions)).any()):
            raise InputDataError(f"Expected regions, integers from 0 to {self.num_regions - 1}.")
        return index

    def _check_dim(self, X: Tensor, name: str) -> None:
        if X.dim() == 0 or X.shape[-1] != self.dim:
            raise BotorchTensorDimensionError(
                f"{name} must be `batch_shape x {self.dim}` for this partition, got shape "
                f"{tuple(X.shape)}."
            )


def _cut(box: _ExactBox, count: int) -> list[_ExactBox]:
    """A box divided into boxes of equal volume, in exact fractions."""
    if count == 1:
        return [box]
    lower, upper = box
    sides = [above - below for below, above in zip(lower, upper, strict=True)]
    axis = sides.index(max(sides))
    cut = lower[axis] + sides[axis] * Fraction(count // 2, count)
    first = [*upper[:axis], cut, *upper[axis + 1 :]]
    second = [*lower[:axis], cut, *lower[axis + 1 :]]
    return _cut((lower, first), count // 2) + _cut((second, upper), count - count // 2)


def _rounded(box: _ExactBox) -> _Box:
    lower, upper = (tuple(float(x) for x in corner) for corner in box)
    return lower, upper


# ------------------------------------------------------------------ weights


def exploration_weights(regions: Sequence[int], num_regions: int, contrast: float) -> Tensor:
    r"""The weights :math:`\phi_n^{(i)}` of the agents in every region.

    Args:
        regions: The region :math:`g(n)` of every agent.
        num_regions: The number `P` of regions.
        contrast: The log ratio of the weights inside and outside, 0 or more.

    Returns:
        A `P x N` tensor with rows of sum one. In a region without agents all weights are equal.
    """
    _check_contrast(contrast)
    if not len(regions) or not all(0 <= region < num_regions for region in regions):
        raise InputDataError(
            f"Expected at least one agent, each with a region from 0 to {num_regions - 1}, got "
            f"{len(regions)} agents: Partition.assign assigns agents evenly."
        )
    inside = torch.tensor(list(regions)) == torch.arange(num_regions).unsqueeze(-1)
    return torch.log_softmax(contrast * inside.double(), dim=-1).exp()


class ExplorationSchedule(Protocol):
    """From the round `t >= 1` to the contrast of the weights, 0 or more."""

    def __call__(self, t: int, /) -> float: ...


@dataclass(frozen=True)
class SoftmaxSchedule:
    r"""Weights :math:`e^{a_t - 1} : 1` with :math:`a_t` from :math:`a + 1` down to 1, as published.

    :math:`a_t = a + 1` for :math:`t \le T_c`, then :math:`T_d` equidistant numbers from
    :math:`a + 1` to 1, then 1. The numbers repeat :math:`a + 1`: the plateau lasts
    :math:`T_c + 1` rounds, and from round :math:`T_c + T_d` on all weights are equal.

    Attributes:
        a: The contrast at the start.
        plateau: The number of rounds :math:`T_c`.
        decay: The number of steps :math:`T_d`.

    Example:
        >>> SoftmaxSchedule(15, plateau=5, decay=6)(7)  # the second of six numbers
        12.0
    """

    a: float = 15.0
    plateau: int = 10
    decay: int = 30

    def __post_init__(self) -> None:
        _check_contrast(self.a)
        _check_durations(self.plateau, self.decay)
        object.__setattr__(self, "a", float(self.a))

    def __call__(self, t: int) -> float:
        """The contrast :math:`a_t - 1` of round `t >= 1`."""
        return self.a * _remaining(t, self.plateau, self.decay)


def _remaining(t: int, plateau: int, decay: int) -> float:
    """The share of the initial contrast in round `t`: 1 up to `T_c + 1`, 0 from `T_c + T_d` on."""
    _check_round(t)
    step = t - plateau - 1  # the index in linspace(1, 0, decay)
    if step < 0:
        return 1.0
    if step >= decay:
        return 0.0
    return 1 - step / max(decay - 1, 1)


def _check_contrast(contrast: float) -> None:
    if not 0 <= contrast < math.inf:
        raise InputDataError(
            f"Expected a finite contrast >= 0, got {contrast}: it is the log ratio of an agent's "
            "weights inside and outside its region."
        )


def _check_durations(plateau: int, decay: int) -> None:
    for name, value in (("plateau", plateau), ("decay", decay)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputDataError(f"Expected {name}, a number of rounds >= 0, got {value!r}.")


def _check_round(t: int) -> None:
    if isinstance(t, bool) or not isinstance(t, int) or t < 1:
        raise InputDataError(
            f"Expected a round, an integer >= 1, got {t!r}: round t uses the t-th release."
        )
