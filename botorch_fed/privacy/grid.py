r"""The public grid: where contributions are rounded to before anything is added.

Every channel, an encrypted one or not, adds the same integers :math:`k = \mathrm{round}(x/\gamma)`,
with a step :math:`\gamma` that is a power of two, and opens their sum exactly. A run on one machine
is therefore the same, bit for bit, whatever the channel; noise that lives on integers stays exact.

Rounding moves a number by at most :math:`\gamma/2`, and a contribution of `dim` numbers by at
most :math:`\gamma\sqrt{\mathrm{dim}}/2` in norm: a bound on a sensitivity adds that. The sum
of `num_agents` contributions stays within :math:`2^{53}` steps, where float64 holds every integer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from botorch_fed.privacy.checks import check_between, check_count

_EXACT = 2**53  # float64 holds every integer up to here


@dataclass(frozen=True)
class PublicGrid:
    r"""Where contributions are rounded to before anything is added, whatever the channel.

    Attributes:
        dim: The numbers of one contribution.
        bound: The largest absolute value of one contribution's number. Larger ones are refused and
            never clipped; noise that is added before the sum counts.
        num_agents: The most contributions in one sum.
        precision: The wanted step relative to the bound.

    Raises:
        InputDataError: A setting is out of range, or sums would not be exact in float64.

    Example:
        >>> grid = PublicGrid(dim=3, bound=1e4, num_agents=50)
        >>> grid.to_values(grid.to_integers(torch.tensor([1.5, -2.0, 1e4], dtype=torch.float64)))
        tensor([ 1.5000e+00, -2.0000e+00,  1.0000e+04], dtype=torch.float64)
    """

    dim: int
    bound: float
    num_agents: int
    precision: float = 2.0**-36

    def __post_init__(self) -> None:
        check_count("dim", self.dim, most=2**24)
        check_count("num_agents", self.num_agents, most=2**24)
        check_between("A bound", self.bound, 1e-100, 1e100)
        if not 0 < self.precision <= 1:
            raise InputDataError(f"A precision must lie in (0, 1], got {self.precision}.")
        if self.bound / self.precision > 1e200 or self.num_agents * self.largest > _EXACT:
            wanted = 2 * self.num_agents / _EXACT
            raise InputDataError(
                f"A sum of {self.num_agents} contributions with precision {self.precision:.3g} is "
                f"not exact in float64: use a precision of at least {wanted:.3g}."
            )

    @property
    def step(self) -> float:
        r"""The step :math:`\gamma`: the largest power of two up to `bound * precision`."""
        _, exponent = math.frexp(self.bound * self.precision)  # m 2^exponent, m in [1/2, 1)
        return math.ldexp(1.0, exponent - 1)

    @property
    def largest(self) -> int:
        """The largest absolute integer of one contribution."""
        return round(self.bound / self.step)

    def to_integers(self, values: Tensor) -> Tensor:
        """Round one contribution to the grid, ties to even.

        Args:
            values: A `dim` tensor, float64, finite and within the bound.

        Returns:
            A `dim` tensor, int64.

        Raises:
            BotorchTensorDimensionError: Another shape.
            InputDataError: Another dtype, not finite, or beyond the bound.
        """
        if values.shape != (self.dim,):
            raise BotorchTensorDimensionError(
                f"A contribution must have shape ({self.dim},), got {tuple(values.shape)}."
            )
        if values.dtype != torch.float64:
            raise InputDataError(
                f"A contribution must be float64, got {values.dtype}: call `.double()`."
            )
        values = values.detach()
        beyond = int((~(values.abs() <= self.bound)).sum())  # not a number compares as False
        if beyond:
            raise InputDataError(
                f"{beyond} of {self.dim} numbers of a contribution are not finite or beyond the "
                f"bound {self.bound:g} of the grid: clip them, or choose a wider grid."
            )
        return (values / self.step).round_().to(torch.int64)

    def to_values(self, integers: Tensor) -> Tensor:
        """The numbers that integers stand for, exact.

        Args:
            integers: A tensor of any shape, int64, up to 2^53 in absolute value.

        Returns:
            A float64 tensor of the same shape.
        """
        if integers.dtype != torch.int64:
            raise InputDataError(f"Points of a grid are int64, got {integers.dtype}.")
        if bool(((integers > _EXACT) | (integers < -_EXACT)).any()):
            raise InputDataError("A point of a grid must lie within 2^53 steps of zero.")
        return integers.double() * self.step

    def check_integers(self, integers: Tensor, contributions: int = 1) -> None:
        """Raise `InputDataError` unless these are a sum of so many contributions.

        Args:
            integers: A `dim` tensor, int64.
            contributions: How many were added.
        """
        if integers.shape != (self.dim,) or integers.dtype != torch.int64:
            raise InputDataError(
                f"Points of this grid have shape ({self.dim},) and dtype int64, got "
                f"{tuple(integers.shape)} and {integers.dtype}."
            )
        limit = contributions * self.largest
        beyond = int(((integers > limit) | (integers < -limit)).sum())
        if beyond:
            raise InputDataError(
                f"{beyond} of {self.dim} integers are beyond the grid's {limit} for "
                f"{contributions} contribution(s): choose a wider bound."
            )
