r"""The one map between what a site calls its parameters and the unit cube that all sites share.

Messages of different agents mean the same thing only if every door (a Python loop, the command
line, Ax, Flower) scales inputs and outcomes alike. A `SearchSpace` is that map: public, frozen,
made of numbers and strings, hashed, and agreed upon before the first message. Nothing in it is
learnt from data.

    range, linear    (x - lower) / (upper - lower)
    range, log       (log x - log lower) / (log upper - log lower)
    integer          as a range, and rounded on the way back
    choice           one column per value, one-hot; the largest column on the way back
    outcome          sign * (y - centre) / scale, to be maximised
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

Value = float | int | str
DECADES = 100.0  # the ratio of bounds from which on a parameter is taken to act by its ratio
Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a search space; made by `real`, `integer` or `choice`.

    Attributes:
        name: How the site's objective calls it.
        kind: What kind of values it has.
        lower: Lower bound (0 for a choice).
        upper: Upper bound (0 for a choice).
        scale: Whether equal steps are equal differences or equal ratios.
        values: The values of a choice.
    """

    name: str
    kind: Literal["real", "integer", "choice"]
    lower: float
    upper: float
    scale: Scale
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise InputDataError("A parameter needs a name.")
        if self.kind == "choice":
            if len(self.values) < 2 or len(set(self.values)) < len(self.values):
                raise InputDataError(
                    f"Choice {self.name!r} needs at least two different values, got {self.values}."
                )
            return
        if self.kind not in ("real", "integer") or self.scale not in ("linear", "log"):
            raise InputDataError(
                f"Parameter {self.name!r}: kind must be real, integer or choice and scale linear "
                f"or log, got {self.kind!r} and {self.scale!r}."
            )
        if not (math.isfinite(self.lower) and math.isfinite(self.upper)):
            raise InputDataError(f"The bounds of {self.name!r} must be finite.")
        if not self.lower < self.upper:
            raise InputDataError(
                f"The lower bound of {self.name!r} must lie below the upper, got {self.lower} and "
                f"{self.upper}: leave a fixed parameter out of the space."
            )
        if self.scale == "log" and self.lower <= 0:
            raise InputDataError(
                f"A log scale needs positive bounds, {self.name!r} starts at {self.lower}."
            )
        if self.kind == "integer" and (self.lower % 1 or self.upper % 1):
            raise InputDataError(
                f"The bounds of integer {self.name!r} must be integers, got {self.lower} and "
                f"{self.upper}."
            )

    @classmethod
    def real(cls, name: str, lower: float, upper: float, *, scale: Scale = "linear") -> Parameter:
        """A real number between two bounds; `scale="log"` for learning rates and the like."""
        return cls(name, "real", float(lower), float(upper), scale, ())

    @classmethod
    def integer(cls, name: str, lower: int, upper: int, *, scale: Scale = "linear") -> Parameter:
        """An integer between two bounds, both included."""
        return cls(name, "integer", float(lower), float(upper), scale, ())

    @classmethod
    def choice(cls, name: str, values: Sequence[str]) -> Parameter:
        """One of several values without an order."""
        return cls(name, "choice", 0.0, 0.0, "linear", tuple(values))

    @property
    def num_columns(self) -> int:
        """How many columns of the unit cube it takes."""
        return len(self.values) if self.kind == "choice" else 1

    def to_columns(self, value: Value) -> list[float]:
        """The columns of one value."""
        if self.kind == "choice":
            if value not in self.values:
                raise InputDataError(
                    f"Parameter {self.name!r} must be one of {self.values}, got {value!r}."
                )
            return [1.0 if value == v else 0.0 for v in self.values]
        if isinstance(value, (str, bool)) or not math.isfinite(value):
            raise InputDataError(f"Parameter {self.name!r} must be a number, got {value!r}.")
        if not self.lower <= value <= self.upper:
            raise InputDataError(
                f"Parameter {self.name!r} must lie in [{self.lower:g}, {self.upper:g}], got "
                f"{value:g}."
            )
        if self.kind == "integer" and value % 1:
            raise InputDataError(f"Parameter {self.name!r} must be an integer, got {value:g}.")
        low, high = self._warped
        return [min(max((self._warp(float(value)) - low) / (high - low), 0.0), 1.0)]

    def from_columns(self, columns: Sequence[float]) -> Value:
        """The value nearest to a point of the unit cube; the bounds are never left."""
        if self.kind == "choice":
            return self.values[max(range(len(columns)), key=columns.__getitem__)]
        low, high = self._warped
        column = columns[0]
        if column <= 0 or column >= 1:  # exactly: exp(log(upper)) may exceed the upper bound
            value = self.lower if column <= 0 else self.upper
        else:
            warped = low + column * (high - low)
            value = math.exp(warped) if self.scale == "log" else warped
            value = min(max(value, self.lower), self.upper)
        return round(value) if self.kind == "integer" else value

    def _warp(self, value: float) -> float:
        return math.log(value) if self.scale == "log" else value

    @property
    def _warped(self) -> tuple[float, float]:
        return self._warp(self.lower), self._warp(self.upper)


@dataclass(frozen=True)
class Outcome:
    r"""The public affine map of outcomes, :math:`\pm(y - centre) / scale`, to be maximised.

    Attributes:
        centre: What counts as zero: a guess of the middle of the range, never a mean of data.
        scale: What counts as one: a guess of the spread, never a deviation of data.
        minimize: Whether smaller values are better.
        name: What is measured.
    """

    centre: float = 0.0
    scale: float = 1.0
    minimize: bool = False
    name: str = "objective"

    def __post_init__(self) -> None:
        if not math.isfinite(self.centre) or not (math.isfinite(self.scale) and self.scale > 0):
            raise InputDataError(
                f"An outcome needs a finite centre and a positive scale, got {self.centre} and "
                f"{self.scale}."
            )
        object.__setattr__(self, "centre", float(self.centre))  # 0 and 0.0 are one map
        object.__setattr__(self, "scale", float(self.scale))

    def to_public(self, Y: Tensor) -> Tensor:
        """Outcomes as the site measures them to the shared scale, larger is better."""
        return self._sign * (Y.double() - self.centre) / self.scale

    def from_public(self, Y: Tensor) -> Tensor:
        """The inverse of `to_public`."""
        return self.centre + self._sign * self.scale * Y.double()

    @property
    def _sign(self) -> float:
        return -1.0 if self.minimize else 1.0


@dataclass(frozen=True)
class SearchSpace:
    """Parameters in a fixed order, and the outcome's scale.

    Attributes:
        parameters: The parameters; their order is the order of the columns.
        outcome: The map of outcomes.

    Example:
        >>> space = SearchSpace(
        ...     (Parameter.real("lr", 1e-4, 1.0, scale="log"), Parameter.integer("depth", 1, 8)),
        ...     Outcome(centre=0.5, scale=0.1, minimize=True),
        ... )
        >>> space.to_unit([{"lr": 1e-2, "depth": 8}])
        tensor([[0.5000, 1.0000]], dtype=torch.float64)
    """

    parameters: tuple[Parameter, ...]
    outcome: Outcome = Outcome()

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, tuple) or not all(
            isinstance(one, Parameter) for one in self.parameters
        ):
            raise InputDataError(
                f"Expected parameters as a tuple of Parameter, got {type(self.parameters).__name__}"
                ": write SearchSpace((Parameter.real(…), …)), with a comma after a single one."
            )
        if not self.parameters:
            raise InputDataError("A search space needs at least one parameter.")
        if len(set(self.names)) < len(self.names):
            raise InputDataError(f"Parameters must have different names, got {self.names}.")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def dim(self) -> int:
        """Number of columns of the unit cube."""
        return sum(parameter.num_columns for parameter in self.parameters)

    @property
    def bounds(self) -> Tensor:
        """Bounds of the unit cube, `2 x d`, for `optimize_acqf`."""
        return torch.stack([torch.zeros(self.dim), torch.ones(self.dim)]).double()

    @property
    def log_offsets(self) -> Tensor:
        """For each column the offset of a logarithmic warp, a `d` tensor; 0 where there is none.

        A public guess: models see the logarithm of a parameter on a linear scale whose positive
        bounds span two decades or more. See `WarpedFeatures`.
        """
        offsets: list[float] = []
        for p in self.parameters:
            wide = p.scale == "linear" and p.lower > 0 and p.upper >= DECADES * p.lower
            offset = p.lower / (p.upper - p.lower) if wide else 0.0
            offsets += [offset] * p.num_columns
        return torch.tensor(offsets, dtype=torch.float64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the map: equal if and only if both sides mean the same by a point."""

        def exact(value: object) -> object:
            return value.hex() if isinstance(value, float) else value

        parts: list[Parameter | Outcome] = [*self.parameters, self.outcome]
        fields = [{key: exact(value) for key, value in asdict(part).items()} for part in parts]
        if self.outcome.name == Outcome.name:  # the fingerprints of spaces without a named outcome
            del fields[-1]["name"]
        text = json.dumps(fields, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_unit(self, points: Sequence[Mapping[str, Value]]) -> Tensor:
        """Points by name to an `n x d` tensor in the unit cube."""
        rows = []
        for point in points:
            if point.keys() != set(self.names):
                missing = sorted(set(self.names) - point.keys())
                unknown = sorted(point.keys() - set(self.names))
                raise InputDataError(
                    f"A point must name exactly the parameters {list(self.names)}: missing "
                    f"{missing}, unknown {unknown}."
                )
            rows.append([c for p in self.parameters for c in p.to_columns(point[p.name])])
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), self.dim)

    def from_unit(self, X: Tensor) -> list[dict[str, Value]]:
        """An `n x d` tensor in the unit cube to points by name, the nearest legal ones."""
        if X.dim() != 2 or X.shape[-1] != self.dim:
            raise BotorchTensorDimensionError(
                f"X must be `n x {self.dim}` for this search space, got shape {tuple(X.shape)}."
            )
        if not bool(torch.isfinite(X).all()):
            raise InputDataError("X has NaN or infinite entries: it is no point of the space.")
        sizes = [parameter.num_columns for parameter in self.parameters]
        points = []
        for row in X.double().tolist():
            point: dict[str, Value] = {}
            start = 0
            for parameter, size in zip(self.parameters, sizes, strict=True):
                point[parameter.name] = parameter.from_columns(row[start : start + size])
                start += size
            points.append(point)
        return points

    def snap(self, X: Tensor) -> Tensor:
        """The nearest points that a site can really evaluate, `n x d`."""
        return self.to_unit(self.from_unit(X))
