r"""The one map between what a site calls its parameters and the unit cube that all sites share.

Messages of different agents mean the same thing only if every door (a Python loop, the command
line, Ax, Flower) scales inputs and outcomes alike. A `SearchSpace` is that map: public, frozen,
made of numbers and strings, hashed, and agreed upon before the first message. Nothing in it is
learnt from data.

::

    range, linear    (x - lower) / (upper - lower)
    range, log       (log x - log lower) / (log upper - log lower)
    integer          as a range, and rounded on the way back
    choice           one column per value, one-hot; the largest column on the way back
    ordered choice   one column: a number as in a range, other values evenly in their order; the
                     nearest value on the way back
    fixed            no column; it is in every point
    outcome          sign * (y - centre) / scale, to be maximised

Several outcomes have names and roles: objectives, outcome constraints, which bound what is
measured, and outcomes that are only recorded.

A space may have constraints: linear ones over numbers in the user's units, which are text or
`LinearConstraint`, and `feasible`, a known and cheap function of a point by name. They are hard:
`SearchSpace.snap` moves every point to one that meets them, and no search evaluates another.

A space may name one parameter as its `Fidelity`, such as the epochs of a training run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.utils.multi_objective.pareto import is_non_dominated
from torch import Tensor

from botorch_fed.constraints import LinearConstraint
from botorch_fed.feasible_set import TOLERANCE, Array, Block, FeasibleSet

Value = float | int | str | bool
Kind = Literal["real", "integer", "choice", "ordinal", "fixed"]
MAX_LISTED = 10_000  # values of an integer up to which they are searched one by one
DECADES = 100.0  # the ratio of bounds from which on a parameter is taken to act by its ratio
LADDER = 3.0  # how much dearer the next fidelity is that a search looks at
MAX_LEVELS = 7  # of them
Scale = Literal["linear", "log"]
T = TypeVar("T")
Role = Literal["objective", "constraint", "tracking"]
LATER: Any = {"unless_default": True}  # a field that texts and hashes leave out at its default


@dataclass(frozen=True)
class Parameter:
    """One parameter of a search space; made by `real`, `integer`, `choice` or `fixed`.

    Attributes:
        name: How the site's objective calls it.
        kind: What kind of values it has; an ordered choice is ``"ordinal"``.
        lower: Lower bound (0 for a choice without numbers).
        upper: Upper bound (0 for a choice without numbers or order).
        scale: Whether equal steps are equal differences or equal ratios.
        values: The values of a choice, or the one of a fixed parameter.
    """

    name: str
    kind: Kind
    lower: float
    upper: float
    scale: Scale
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise InputDataError("A parameter needs a name.")
        if self.kind == "fixed":
            if len(self.values) != 1 or not _is_value(self.values[0]):
                raise InputDataError(
                    f"Fixed parameter {self.name!r} needs one value, a finite number, a text or a "
                    f"boolean, got {self.values}."
                )
            return
        if self.kind in ("choice", "ordinal"):
            self._check_values()
            if self.kind == "choice":
                return
        elif self.kind not in ("real", "integer"):
            raise InputDataError(
                f"Parameter {self.name!r}: kind must be real, integer, choice, ordinal or fixed, "
                f"got {self.kind!r}."
            )
        if self.scale not in ("linear", "log"):
            raise InputDataError(
                f"Parameter {self.name!r}: scale must be linear or log, got {self.scale!r}."
            )
        if not (math.isfinite(self.lower) and math.isfinite(self.upper)):
            raise InputDataError(f"The bounds of {self.name!r} must be finite.")
        if not self.lower < self.upper:
            raise InputDataError(
                f"The lower bound of {self.name!r} must lie below the upper, got {self.lower} and "
                f"{self.upper}: write Parameter.fixed for a parameter with one value."
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

    def _check_values(self) -> None:
        """Refuse values of a choice that are not different, or of several kinds."""
        if len(self.values) < 2 or len(set(self.values)) < len(self.values):
            raise InputDataError(
                f"Choice {self.name!r} needs at least two different values, got {self.values}."
            )
        kinds = {_kind_of(value) for value in self.values}
        if len(kinds) > 1 or not all(map(_is_value, self.values)):
            raise InputDataError(
                f"Choice {self.name!r} needs texts, finite numbers or booleans, all of one kind, "
                f"got {self.values}."
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
    def choice(
        cls,
        name: str,
        values: Sequence[Value],
        *,
        ordered: bool | None = None,
        scale: Scale = "linear",
    ) -> Parameter:
        """One of several values: texts, numbers or booleans.

        Args:
            name: How the site's objective calls it.
            values: The values.
            ordered: Whether values between which others lie are alike; default for numbers and
                booleans only. Texts are ordered as they stand.
            scale: Of ordered numbers.
        """
        values = tuple(values)
        kinds = {_kind_of(value) for value in values}
        if ordered is None:
            ordered = kinds in ({"number"}, {"boolean"})
        if kinds != {"number"} and scale != "linear":
            raise InputDataError(f"Choice {name!r}: a log scale is for numbers, got {values}.")
        if not ordered or not all(map(_is_value, values)):
            return cls(name, "choice", 0.0, 0.0, "linear", values)
        if kinds == {"number"}:
            values = tuple(sorted(values, key=float))
            return cls(name, "ordinal", float(values[0]), float(values[-1]), scale, values)
        if kinds == {"boolean"}:
            values = tuple(sorted(values))
        return cls(name, "ordinal", 0.0, max(len(values) - 1.0, 0.0), "linear", values)

    @classmethod
    def fixed(cls, name: str, value: Value) -> Parameter:
        """A parameter with one value, which every point has."""
        return cls(name, "fixed", 0.0, 0.0, "linear", (value,))

    @property
    def num_columns(self) -> int:
        """How many columns of the unit cube it takes."""
        return {"choice": len(self.values), "fixed": 0}.get(self.kind, 1)

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers."""
        return not self.values or {_kind_of(value) for value in self.values} == {"number"}

    def to_columns(self, value: Value) -> list[float]:
        """The columns of one value."""
        if self.values:
            index = self._index(value)
            if self.kind == "fixed":
                return []
            if self.kind == "choice":
                return [float(k == index) for k in range(len(self.values))]
            return [self._places[index]]
        if isinstance(value, (str, bool)) or not math.isfinite(value):
            raise InputDataError(f"Parameter {self.name!r} must be a number, got {value!r}.")
        if not self.lower <= value <= self.upper:
            raise InputDataError(
                f"Parameter {self.name!r} must lie in [{self.lower:g}, {self.upper:g}], got "
                f"{value:g}."
            )
        if self.kind == "integer" and value % 1:
            raise InputDataError(f"Parameter {self.name!r} must be an integer, got {value:g}.")
        return [self._column(float(value))]

    def from_columns(self, columns: Sequence[float]) -> Value:
        """The value nearest to a point of the unit cube; the bounds are never left."""
        if self.kind == "fixed":
            return self.values[0]
        if self.kind == "choice":
            return self.values[max(range(len(columns)), key=columns.__getitem__)]
        column = columns[0]
        if self.kind == "ordinal":
            places = self._places
            return self.values[min(range(len(places)), key=lambda k: abs(places[k] - column))]
        low, high = self._warped
        if column <= 0 or column >= 1:  # exactly: exp(log(upper)) may exceed the upper bound
            value = self.lower if column <= 0 else self.upper
        else:
            warped = low + column * (high - low)
            value = math.exp(warped) if self.scale == "log" else warped
            value = min(max(value, self.lower), self.upper)
        return round(value) if self.kind == "integer" else value

    def from_text(self, text: str) -> Value:
        """A value as it stands in a table; `ValueError` if it is none."""
        if self.values:
            named = {str(value).lower(): value for value in self.values}
            if text.lower() in named and (text in map(str, self.values) or not self.is_text):
                return named[text.lower()]
            return float(text) if self.is_number else text
        return float(text)

    @property
    def is_text(self) -> bool:
        """Whether its values are texts."""
        return bool(self.values) and isinstance(self.values[0], str)

    def block(self, start: int) -> Block | None:
        """Its values in columns from one on; None of what has no or too many."""
        if self.kind in ("real", "fixed"):
            return None
        values: Sequence[Value] = self.values
        if self.kind == "integer":
            if self.upper - self.lower >= MAX_LISTED:
                return None
            values = range(int(self.lower), int(self.upper) + 1)
        rows = np.array([self.to_columns(value) for value in values])
        return Block(start, rows, self.kind != "choice")

    def _index(self, value: Value) -> int:
        """The number of a value."""
        for k, known in enumerate(self.values):
            if value == known and _kind_of(value) == _kind_of(known):
                return k
        what = "be one of" if len(self.values) > 1 else "have the fixed value"
        shown = self.values if len(self.values) > 1 else repr(self.values[0])
        raise InputDataError(f"Parameter {self.name!r} must {what} {shown}, got {value!r}.")

    @cached_property
    def _places(self) -> list[float]:
        """The columns of ordered values."""
        numbers = self.values if self.is_number else range(len(self.values))
        return [self._column(float(number)) for number in numbers]

    def _column(self, value: float) -> float:
        low, high = self._warped
        return min(max((self._warp(value) - low) / (high - low), 0.0), 1.0)

    def _warp(self, value: float) -> float:
        return math.log(value) if self.scale == "log" else value

    @property
    def _warped(self) -> tuple[float, float]:
        return self._warp(self.lower), self._warp(self.upper)


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "text"


def _is_value(value: object) -> bool:
    return isinstance(value, str | bool) or (
        isinstance(value, int | float) and math.isfinite(value)
    )


@dataclass(frozen=True)
class Outcome:
    r"""The public affine map of an outcome, :math:`\pm(y - centre) / scale`, to be maximised.

    Of several outcomes each has a name and a role; `objective`, `constraint` and `tracking` make
    them.

    Attributes:
        centre: What counts as zero: a guess of the middle of the range, never a mean of data.
        scale: What counts as one: a guess of the spread, never a deviation of data.
        minimize: Whether smaller values are better.
        name: What is measured.
        role: ``"objective"``; ``"constraint"``, bounded by `lower` and `upper`; or ``"tracking"``,
            recorded only.
        lower: The least value that a constraint allows, as measured.
        upper: The largest value that it allows.
        reference: Of one of several objectives, the worst value that counts in a hypervolume, as
            measured; None for a value that each site takes from its own outcomes.
    """

    centre: float = 0.0
    scale: float = 1.0
    minimize: bool = False
    name: str = "objective"
    role: Role = field(default="objective", metadata=LATER)
    lower: float | None = field(default=None, metadata=LATER)
    upper: float | None = field(default=None, metadata=LATER)
    reference: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if not math.isfinite(self.centre) or not (math.isfinite(self.scale) and self.scale > 0):
            raise InputDataError(
                f"An outcome needs a finite centre and a positive scale, got {self.centre} and "
                f"{self.scale}."
            )
        self._check_role()
        object.__setattr__(self, "centre", float(self.centre))  # 0 and 0.0 are one map
        object.__setattr__(self, "scale", float(self.scale))
        for key in ("lower", "upper", "reference"):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, float(getattr(self, key)))

    def _check_role(self) -> None:
        """Refuse bounds and a reference where they mean nothing."""
        what, bounds = f"Outcome {self.name!r}", (self.lower, self.upper)
        if self.role not in get_args(Role):
            raise InputDataError(
                f"{what}: expected role objective, constraint or tracking, got {self.role!r}."
            )
        for number in (*bounds, self.reference):
            if number is not None and not math.isfinite(number):
                raise InputDataError(f"{what}: bounds and reference must be finite, got {number}.")
        if self.role == "constraint":
            if bounds == (None, None):
                raise InputDataError(f"{what} is a constraint: give lower, upper, or both.")
            if None not in bounds and not self.lower < self.upper:  # type: ignore[operator]
                raise InputDataError(
                    f"{what}: lower must lie below upper, got {self.lower} and {self.upper}."
                )
        elif bounds != (None, None):
            raise InputDataError(
                f"{what} has bounds, and role {self.role!r}: bounds are for constraints. Report a "
                "metric that is minimised and bounded under two names."
            )
        if self.role != "objective" and self.minimize:
            raise InputDataError(f"{what} has role {self.role!r}: minimize is for objectives.")
        if self.role != "objective" and self.reference is not None:
            raise InputDataError(f"{what} has role {self.role!r}: reference is for objectives.")

    @classmethod
    def objective(
        cls, name: str, *, minimize: bool = False, reference: float | None = None
    ) -> Outcome:
        """An outcome to be made as large or as small as possible.

        Args:
            name: What is measured.
            minimize: Whether smaller values are better.
            reference: Beside other objectives, the worst value that counts in a hypervolume.
        """
        return cls(minimize=minimize, name=name, reference=reference)

    @classmethod
    def constraint(
        cls, name: str, *, lower: float | None = None, upper: float | None = None
    ) -> Outcome:
        """An outcome that must lie within bounds; what a point gives is known after measuring.

        Args:
            name: What is measured.
            lower: The least value that is allowed.
            upper: The largest.
        """
        return cls(name=name, role="constraint", lower=lower, upper=upper)

    @classmethod
    def tracking(cls, name: str) -> Outcome:
        """An outcome that is recorded and reported, and decides nothing."""
        return cls(name=name, role="tracking")

    def to_public(self, Y: Tensor) -> Tensor:
        """Outcomes as the site measures them to the shared scale, larger is better."""
        return self._sign * (Y.double() - self.centre) / self.scale

    def from_public(self, Y: Tensor) -> Tensor:
        """The inverse of `to_public`."""
        return self.centre + self._sign * self.scale * Y.double()

    def allows(self, value: float) -> bool:
        """Whether a measured value lies within the bounds."""
        above = self.lower is None or value >= self.lower
        return above and (self.upper is None or value <= self.upper)

    @property
    def words(self) -> str:
        """What is wanted of it, such as ``"latency <= 20"``."""
        if self.role == "constraint":
            low = "" if self.lower is None else f"{self.lower:g} <= "
            high = "" if self.upper is None else f" <= {self.upper:g}"
            return f"{low}{self.name}{high}"
        if self.role == "tracking":
            return f"{self.name} is recorded"
        return f"{'minimise' if self.minimize else 'maximise'} {self.name}"

    @property
    def _sign(self) -> float:
        return -1.0 if self.minimize else 1.0


@dataclass(frozen=True)
class NamedCheck:
    """A `feasible` that is known by its name, and imported when it is first called.

    Attributes:
        name: ``"module:function"``.
        load: Imports it; None where it is known by name only, as in a result that was saved.
    """

    name: str
    load: Callable[[], Callable[[dict[str, Any]], bool]] | None = field(
        default=None, compare=False, repr=False, metadata={"own": True}
    )

    def __call__(self, point: dict[str, Any]) -> bool:
        """Whether a point may be evaluated."""
        if self.load is None:
            raise InputDataError(f"feasible = {self.name!r} is known by its name only.")
        return self.load()(point)


@dataclass(frozen=True)
class Fidelity:
    """A parameter that makes an evaluation cheaper the smaller it is, and less like the target.

    The target is the upper bound of the parameter: what is optimised is the outcome there. An
    evaluation at `s` costs ``(fixed + s) / (fixed + target)`` evaluations at the target.

    Attributes:
        name: The parameter, a number; its bounds are not negative.
        fixed: What an evaluation costs beside that, in units of the parameter: the cost of starting
            a run in epochs, say.
    """

    name: str
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fixed) and self.fixed >= 0):
            raise InputDataError(f"Expected a finite fixed cost >= 0, got {self.fixed}.")
        object.__setattr__(self, "fixed", float(self.fixed))  # 0 and 0.0 are one cost


@dataclass(frozen=True)
class SearchSpace:
    """Parameters in a fixed order, outcomes, and which points may be evaluated.

    Attributes:
        parameters: The parameters; their order is the order of the columns.
        outcome: The map of outcomes where there is one; of several, the first objective.
        constraints: Linear constraints over numeric parameters, in the user's units; text is read
            by `LinearConstraint.parse`. On a log scale inequalities only.
        feasible: Whether a point by name may be evaluated; known, cheap and the same at all sites.
            Of a space with a fidelity it is asked at the target.
        outcomes: Several outcomes by name, one objective at least, in the place of `outcome`;
            empty where there is one. `metrics` has them in both cases.
        fidelity: The parameter that makes evaluations cheaper; None for none.

    Example:
        >>> space = SearchSpace(
        ...     (Parameter.real("lr", 1e-4, 1.0, scale="log"), Parameter.integer("depth", 1, 8)),
        ...     Outcome(centre=0.5, scale=0.1, minimize=True),
        ... )
        >>> space.to_unit([{"lr": 1e-2, "depth": 8}])
        tensor([[0.5000, 1.0000]], dtype=torch.float64)
        >>> mixture = SearchSpace(
        ...     (Parameter.real("x", 0.0, 1.0), Parameter.real("y", 0.0, 1.0)),
        ...     constraints=("x + y <= 1",),
        ... )
        >>> mixture.violated({"x": 0.75, "y": 0.5})
        'x + y <= 1'
        >>> small = SearchSpace(
        ...     (Parameter.integer("depth", 1, 8),),
        ...     outcomes=(
        ...         Outcome.objective("error", minimize=True),
        ...         Outcome.constraint("latency", upper=20),
        ...     ),
        ... )
        >>> [one.words for one in small.metrics]
        ['minimise error', 'latency <= 20']
    """

    parameters: tuple[Parameter, ...]
    outcome: Outcome = Outcome()
    constraints: tuple[LinearConstraint | str, ...] = ()
    feasible: Callable[[dict[str, Any]], bool] | None = None
    outcomes: tuple[Outcome, ...] = field(default=(), metadata=LATER)
    fidelity: Fidelity | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, tuple) or not all(
            isinstance(one, Parameter) for one in self.parameters
        ):
            raise InputDataError(
                f"Expected parameters as a tuple of Parameter, got {type(self.parameters).__name__}"
                ": write SearchSpace((Parameter.real(…), …)), with a comma after a single one."
            )
        if not self.dim:
            raise InputDataError("A search space needs at least one parameter that is not fixed.")
        if len(set(self.names)) < len(self.names):
            raise InputDataError(f"Parameters must have different names, got {self.names}.")
        self._check_outcomes()
        if self.fidelity is not None:
            self._check_fidelity(self.fidelity)
        self._check_constraints()

    def _check_outcomes(self) -> None:
        """Bring outcomes into one form, and refuse those that say nothing to look for."""
        if not isinstance(self.outcomes, tuple) or not all(
            isinstance(one, Outcome) for one in self.outcomes
        ):
            raise InputDataError(
                f"Expected outcomes as a tuple of Outcome, got {type(self.outcomes).__name__}: "
                "write outcomes=(Outcome.objective(…), Outcome.constraint(…))."
            )
        names = [one.name for one in self.metrics]
        if len(set(names)) < len(names) or not all(names):
            raise InputDataError(f"Outcomes must have different names, got {names}.")
        objectives = [one for one in self.metrics if one.role == "objective"]
        if not objectives:
            words = [one.words for one in self.metrics]
            raise InputDataError(
                f"Expected an objective among the outcomes, got {words}: add Outcome.objective(…)."
            )
        if len(objectives) == 1 and objectives[0].reference is not None:
            raise InputDataError(
                f"Outcome {objectives[0].name!r} is the only objective: a reference is for the "
                "hypervolume of several. Leave it out."
            )
        if not self.outcomes:
            return
        if self.outcome not in (Outcome(), objectives[0]):
            raise InputDataError("Give outcome or outcomes, not both.")
        object.__setattr__(self, "outcome", objectives[0])
        if len(self.outcomes) == 1:  # the same space as with the short form
            object.__setattr__(self, "outcomes", ())

    # -------------------------------------------------------------- outcomes

    @property
    def metrics(self) -> tuple[Outcome, ...]:
        """All outcomes; their order is that of the columns of `Y`."""
        return self.outcomes or (self.outcome,)

    @property
    def objectives(self) -> tuple[int, ...]:
        """Which of `metrics` are objectives."""
        return self._of_role("objective")

    @property
    def outcome_constraints(self) -> tuple[int, ...]:
        """Which of `metrics` are constraints."""
        return self._of_role("constraint")

    @property
    def modelled(self) -> tuple[int, ...]:
        """Which of `metrics` decide where to look: all but those that are only recorded."""
        return self._of_role("objective", "constraint")

    def _of_role(self, *roles: Role) -> tuple[int, ...]:
        return tuple(i for i, one in enumerate(self.metrics) if one.role in roles)

    def to_public(self, Y: Tensor) -> Tensor:
        """Outcomes `n x m` as a site measures them to the shared scale, larger is better."""
        pairs = zip(self.metrics, Y.unbind(dim=-1), strict=True)
        return torch.stack([one.to_public(column) for one, column in pairs], dim=-1)

    def to_public_variance(self, sem: Tensor) -> Tensor:
        """Variances on the shared scale of outcomes with these standard errors, `n x m`."""
        scales = torch.tensor([one.scale for one in self.metrics], dtype=torch.float64)
        return (sem.double() / scales).square()

    def by_name(self, values: Sequence[T]) -> dict[str, T]:
        """The values of one point by the names of their outcomes."""
        return {one.name: value for one, value in zip(self.metrics, values, strict=True)}

    def broken_outcome(self, values: Sequence[float]) -> str | None:
        """The first outcome constraint that measured values `m` do not meet; None if all are met.

        Args:
            values: Of one point, in the order of `metrics`.
        """
        for one, value in zip(self.metrics, values, strict=True):
            if not one.allows(value):
                return one.words
        return None

    def front(self, Y: Tensor) -> Tensor:
        """Which of `n x m` measured rows no other one beats in all objectives: `n` booleans."""
        better = self.to_public(Y)[:, list(self.objectives)]
        front: Tensor = is_non_dominated(better, deduplicate=False)
        return front if len(Y) else torch.zeros(0, dtype=torch.bool)

    def refuse_several(self, what: str, instead: str) -> None:
        """Raise `InputDataError` if there are several outcomes, for a part that takes one.

        Args:
            what: The part.
            instead: What to use.
        """
        if self.outcomes:
            names = [one.name for one in self.outcomes]
            raise InputDataError(f"{what} takes one outcome, this space has {names}: {instead}")

    # -------------------------------------------------------------- parameters

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
        """SHA-256 of the map: equal if and only if both sides mean the same by a point.

        A function `feasible` is in it by its name.
        """

        def exact(value: object) -> object:
            return value.hex() if isinstance(value, float) else value

        parts: list[dict[str, Any]] = [*map(asdict, self.parameters), *map(_entries, self.metrics)]
        listed: list[Any] = [{key: exact(value) for key, value in part.items()} for part in parts]
        if not self.outcomes and self.outcome.name == Outcome.name:
            del listed[-1]["name"]  # the fingerprints of spaces without a named outcome
        listed += [
            [[(n, exact(factor)) for n, factor in one.coefficients], exact(one.bound), one.equality]
            for one in self._linear
        ]
        if self.feasible is not None:
            listed.append({"feasible": name_of(self.feasible)})
        if self.fidelity is not None:
            listed.append({"fidelity": self.fidelity.name, "fixed": exact(self.fidelity.fixed)})
        text = json.dumps(listed, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The space as JSON has it, `feasible` by its name."""
        document: dict[str, Any] = {
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "outcome": _entries(self.outcome),
        }
        if self.outcomes:
            document["outcomes"] = [_entries(one) for one in self.outcomes]
        if self.constraints:
            document["constraints"] = [asdict(one) for one in self._linear]
        if self.feasible is not None:
            document["feasible"] = name_of(self.feasible)
        if self.fidelity is not None:
            document["fidelity"] = asdict(self.fidelity)
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> SearchSpace:
        """The inverse of `to_dict`, but that `feasible` is known by its name only."""
        parameters = tuple(
            Parameter(**{**one, "values": tuple(one["values"])}) for one in document["parameters"]
        )
        constraints = tuple(
            LinearConstraint(**{**one, "coefficients": tuple(map(tuple, one["coefficients"]))})
            for one in document.get("constraints", ())
        )
        check, fidelity = document.get("feasible"), document.get("fidelity")
        return cls(
            parameters,
            Outcome(**document["outcome"]),
            constraints,
            None if check is None else NamedCheck(check),
            tuple(Outcome(**one) for one in document.get("outcomes", ())),
            None if fidelity is None else Fidelity(**fidelity),
        )

    # -------------------------------------------------------------- the unit cube

    def to_unit(self, points: Sequence[Mapping[str, Value]]) -> Tensor:
        """Points by name to an `n x d` tensor in the unit cube; fixed parameters may be left out.

        Constraints are not looked at: results of any point may be known.
        """
        fixed = {p.name for p in self.parameters if p.kind == "fixed"}
        rows = []
        for point in points:
            if point.keys() | fixed != set(self.names):
                missing = sorted(set(self.names) - point.keys() - fixed)
                unknown = sorted(point.keys() - set(self.names))
                raise InputDataError(
                    f"A point must name exactly the parameters {list(self.names)}: missing "
                    f"{missing}, unknown {unknown}."
                )
            rows.append(
                [c for p in self.parameters if p.name in point for c in p.to_columns(point[p.name])]
            )
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), self.dim)

    def from_unit(self, X: Tensor) -> list[dict[str, Value]]:
        """An `n x d` tensor in the unit cube to points by name, with the nearest values."""
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
        """The nearest points that a site can really evaluate, `n x d`: constraints are met."""
        return self.feasible_set.nearest(X)

    def _legal(self, X: Tensor) -> Tensor:
        return self.to_unit(self.from_unit(X))

    # -------------------------------------------------------------- the fidelity

    @cached_property
    def shared(self) -> SearchSpace:
        """The space of what sites tell each other: with a fidelity, that at the target."""
        if self.fidelity is None:
            return self
        known = self._fidelity_parameter
        target = known.from_columns([1.0])
        fixed = Parameter.fixed(known.name, target)
        parameters = tuple(fixed if p is known else p for p in self.parameters)
        return replace(self, parameters=parameters, fidelity=None)

    def fidelities(self, X: Tensor) -> Tensor:
        """The fidelity's column of `n x d` points, `n`: 0 is the lowest, 1 the target."""
        return X[:, self._fidelity_column]

    def configurations(self, X: Tensor) -> Tensor:
        """The other columns of `n x d` points, `n x (d - 1)`: points of `shared`."""
        place = self._fidelity_column
        return torch.cat([X[:, :place], X[:, place + 1 :]], dim=-1)

    def at_fidelity(self, X: Tensor, column: float | Tensor = 1.0) -> Tensor:
        """Points of the space from points of `shared`, `n x (d - 1)`; default at the target.

        Args:
            X: Points of `shared`.
            column: The fidelity's column, one for all or `n`.
        """
        place = self._fidelity_column
        columns = torch.as_tensor(column, dtype=torch.float64).expand(len(X)).unsqueeze(-1)
        return torch.cat([X[:, :place], columns, X[:, place:]], dim=-1)

    def fidelity_column(self, value: Value) -> float:
        """The column of a value of the fidelity."""
        return self._fidelity_parameter.to_columns(value)[0]

    def fidelity_value(self, column: float) -> float:
        """The value of the fidelity nearest to a column."""
        return float(self._fidelity_parameter.from_columns([column]))

    def costs(self, X: Tensor) -> list[float]:
        """What evaluations at `n x d` points cost, in evaluations at the target."""
        if self.fidelity is None:
            return [1.0] * len(X)
        fixed, target = self.fidelity.fixed, self.fidelity_value(1.0)
        values = map(self.fidelity_value, self.fidelities(X).tolist())
        return [(fixed + value) / (fixed + target) for value in values]

    @property
    def cheapest(self) -> float:
        """The least cost of an evaluation."""
        return self.cost_at(0.0)

    def cost_at(self, column: float) -> float:
        """The cost of an evaluation at a column of the fidelity, 1 without one."""
        if self.fidelity is None:
            return 1.0
        fixed, target = self.fidelity.fixed, self.fidelity_value(1.0)
        return (fixed + self.fidelity_value(column)) / (fixed + target)

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """Columns of fidelities among which searches choose, each about `LADDER` times as dear.

        The first is the lowest fidelity, the last is 1, the target.
        """
        known = self._fidelity_parameter
        fixed, target = self._fidelity_named.fixed, self.fidelity_value(1.0)
        columns, cost = [1.0], fixed + target
        while cost / LADDER > fixed + known.lower and len(columns) < MAX_LEVELS - 1:
            cost /= LADDER
            value = min(max(cost - fixed, known.lower), known.upper)
            columns.append(known.to_columns(known.from_columns([known._column(value)]))[0])
        return tuple(sorted({0.0, *columns}))

    def fidelity_place(self, column: float) -> float:
        """How far a column is on the way to the target, 0 to 1, as models see it.

        By its logarithm, where the fidelity is positive.
        """
        low, high = (self.fidelity_value(end) for end in (0.0, 1.0))
        value = self.fidelity_value(column)
        if low <= 0:
            return (value - low) / (high - low)
        return math.log(value / low) / math.log(high / low)

    @property
    def _fidelity_named(self) -> Fidelity:
        if self.fidelity is None:
            raise InputDataError("The search space has no fidelity.")
        return self.fidelity

    @property
    def _fidelity_parameter(self) -> Parameter:
        name = self._fidelity_named.name
        return next(p for p in self.parameters if p.name == name)

    @cached_property
    def _fidelity_column(self) -> int:
        place = 0
        for parameter in self.parameters:
            if parameter is self._fidelity_parameter:
                break
            place += parameter.num_columns
        return place

    def _check_fidelity(self, fidelity: Fidelity) -> None:
        known = next((p for p in self.parameters if p.name == fidelity.name), None)
        if known is None:
            raise InputDataError(
                f"The fidelity {fidelity.name!r} is no parameter. Expected one of "
                f"{list(self.names)}."
            )
        if not known.is_number or known.kind in ("choice", "fixed"):
            raise InputDataError(
                f"The fidelity {known.name!r} must be a number in an order, real, integer or a "
                f"choice of numbers, got kind {known.kind!r}."
            )
        if known.lower < 0 or known.lower + fidelity.fixed <= 0:
            raise InputDataError(
                f"The lower bound of fidelity {known.name!r} must be positive, or 0 with a fixed "
                f"cost above 0, got {known.lower:g}: an evaluation there would cost nothing."
            )
        if self.dim < 2:
            raise InputDataError(f"Beside the fidelity {known.name!r} no parameter is searched.")
        self.refuse_several("A fidelity", "leave fidelity out, or give one outcome.")

    # -------------------------------------------------------------- constraints

    @cached_property
    def feasible_set(self) -> FeasibleSet:
        """The points of the unit cube that can be evaluated."""
        blocks, start = [], 0
        for parameter in self.parameters:
            blocks.append(parameter.block(start))
            start += parameter.num_columns
        below, on = (
            [self._row(one) for one in self._linear if one.equality is equal and self._flat(one)]
            for equal in (False, True)
        )
        curved = any(not self._flat(one) for one in self._linear)
        A, b = self._matrix(below)
        C, d = self._matrix(on)
        return FeasibleSet(
            self.dim,
            self._legal,
            tuple(block for block in blocks if block is not None),
            A,
            b,
            C,
            d,
            check=self._meets if curved or self.feasible is not None else None,
        )

    def violated(self, point: Mapping[str, Value]) -> str | None:
        """The first constraint that a point by name does not meet, in words; None if it meets all.

        Args:
            point: A value for each parameter.
        """
        values = {**self._fixed, **point}
        for one in self._linear:
            if one.excess(values) > TOLERANCE * self._extent(one):  # type: ignore[arg-type]
                return str(one)
        if self.feasible is None:
            return None
        if self.fidelity is not None:
            values[self.fidelity.name] = self._fidelity_parameter.from_columns([1.0])
        answer = self.feasible({name: values[name] for name in self.names})
        if not isinstance(answer, bool | np.bool_):
            raise InputDataError(
                f"feasible must return True or False, got {type(answer).__name__}."
            )
        return None if answer else f"feasible ({name_of(self.feasible)})"

    @property
    def constraint_words(self) -> tuple[str, ...]:
        """Every constraint in words."""
        check = () if self.feasible is None else (f"feasible ({name_of(self.feasible)})",)
        return (*map(str, self._linear), *check)

    def refuse_infeasible(self, X: Tensor, what: str) -> None:
        """Raise `InputDataError` if one of `n x d` points violates a constraint.

        Args:
            X: The points.
            what: Whose they are, for the message.
        """
        if not self.feasible_set.constrained:
            return
        for point in self.from_unit(X):
            broken = self.violated(point)
            if broken is not None:
                raise InputDataError(
                    f"{what} has the point {point}, which violates {broken}: give a point that "
                    "meets all constraints."
                )

    @property
    def _linear(self) -> tuple[LinearConstraint, ...]:
        return tuple(one for one in self.constraints if isinstance(one, LinearConstraint))

    @property
    def _fixed(self) -> dict[str, Value]:
        return {p.name: p.values[0] for p in self.parameters if p.kind == "fixed"}

    def _named(self, one: LinearConstraint) -> list[tuple[Parameter, float]]:
        """The parameters of a constraint with their factors."""
        known = {parameter.name: parameter for parameter in self.parameters}
        return [(known[name], factor) for name, factor in one.coefficients]

    def _flat(self, one: LinearConstraint) -> bool:
        """Whether a constraint is linear in the columns."""
        return all(p.scale == "linear" and p.kind != "choice" for p, _ in self._named(one))

    def _extent(self, one: LinearConstraint) -> float:
        """How far the left side of a constraint varies over the space."""
        return sum(abs(factor) * _width(p) for p, factor in self._named(one))

    def _row(self, one: LinearConstraint) -> tuple[Array, float]:
        """A constraint that is linear in the columns: factors by column, and the bound."""
        factors, row = dict(one.coefficients), []
        bound = one.bound
        for p in self.parameters:
            factor = factors.get(p.name, 0.0)
            if p.kind == "fixed":
                bound -= factor * float(p.values[0]) if factor else 0.0
                continue
            row += [factor * _width(p)] * p.num_columns if factor else [0.0] * p.num_columns
            bound -= factor * p.lower
        return np.array(row), bound

    def _matrix(self, rows: Sequence[tuple[Array, float]]) -> tuple[Array, Array]:
        if not rows:
            return np.zeros((0, self.dim)), np.zeros(0)
        return np.stack([row for row, _ in rows]), np.array([bound for _, bound in rows])

    def _meets(self, X: Tensor) -> list[bool]:
        """Which of `n x d` points meet constraints that are not linear in the columns."""
        return [self.violated(point) is None for point in self.from_unit(X)]

    def _check_constraints(self) -> None:
        """Bring constraints into one form, and refuse those that nothing can meet."""
        if isinstance(self.constraints, str) or not isinstance(self.constraints, Sequence):
            raise InputDataError(
                f"Expected constraints as a tuple, got {type(self.constraints).__name__}: write "
                'constraints=("x + y <= 1",), with a comma after a single one.'
            )
        if self.feasible is not None and not callable(self.feasible):
            raise InputDataError(
                "Expected feasible as a function of a point by name, got "
                f"{type(self.feasible).__name__}."
            )
        ready = tuple(self._ready(one) for one in self.constraints)
        object.__setattr__(self, "constraints", ready)
        for one in ready:
            self._check_alone(one)
        if ready and self.feasible_set.polytope_is_empty:
            raise InputDataError(
                "No point of the search space meets all constraints together: "
                f"{', '.join(map(str, ready))}. Relax one of them, or widen the bounds."
            )
        if self.feasible_set.check is not None and not isinstance(self.feasible, NamedCheck):
            self.check_feasible()

    def check_feasible(self) -> None:
        """Raise `InputDataError` unless points that meet all constraints can be found."""
        if self.feasible_set.check is not None:  # linear ones alone are known to be met somewhere
            _ = self.feasible_set.anchors

    def _ready(self, one: LinearConstraint | str) -> LinearConstraint:
        if isinstance(one, LinearConstraint):
            factors = dict(one.coefficients)
            unknown = sorted(factors.keys() - set(self.names))
            if unknown:
                raise InputDataError(
                    f"Constraint '{one}': there is no parameter {unknown[0]!r}. Expected some of "
                    f"{list(self.names)}."
                )
            ordered = [(name, factors[name]) for name in self.names if factors.get(name)]
            return LinearConstraint(tuple(ordered), one.bound, one.equality)
        if not isinstance(one, str):
            raise InputDataError(
                f"A constraint is text such as 'x + y <= 1', got {type(one).__name__}."
            )
        return LinearConstraint.parse(one, self.names)

    def _check_alone(self, one: LinearConstraint) -> None:
        named = self._named(one)
        for p, _ in named:
            if self.fidelity is not None and p.name == self.fidelity.name:
                raise InputDataError(
                    f"Constraint '{one}': {p.name!r} is the fidelity, which is no part of what is "
                    "optimised. Leave it out of constraints."
                )
            if not p.is_number or p.kind == "choice":
                raise InputDataError(
                    f"Constraint '{one}': {p.name!r} has no numbers in an order, so that sums of "
                    "it mean nothing. Write feasible, a function of the parameters."
                )
            many = p.kind == "integer" and p.upper - p.lower >= MAX_LISTED
            if one.equality and (p.scale == "log" or many):
                why = "is on a log scale" if p.scale == "log" else "has more than 10,000 values"
                raise InputDataError(
                    f"Constraint '{one}': {p.name!r} {why}, where no equality can be kept. Leave "
                    "the parameter out, and compute it from the others in the objective."
                )
        if all(p.kind == "fixed" for p, _ in named):
            raise InputDataError(f"Constraint '{one}': all of its parameters are fixed.")
        low, high = (
            math.fsum(factor * end(p, factor) for p, factor in named) for end in (_least, _most)
        )
        room = TOLERANCE * self._extent(one)
        if one.bound < low - room or (one.equality and one.bound > high + room):
            raise InputDataError(
                f"Constraint '{one}' is met nowhere: within the bounds of its parameters the left "
                f"side lies between {low:.6g} and {high:.6g}."
            )


def _entries(outcome: Outcome) -> dict[str, Any]:
    """The fields of an outcome; later ones only where they differ from their defaults."""
    later = {item.name: item.default for item in fields(outcome) if item.metadata}
    return {
        key: value
        for key, value in asdict(outcome).items()
        if key not in later or value != later[key]
    }


def _width(p: Parameter) -> float:
    return 0.0 if p.kind == "fixed" else p.upper - p.lower


def _least(p: Parameter, factor: float) -> float:
    """Where a parameter times a factor is smallest."""
    if p.kind == "fixed":
        return float(p.values[0])
    return p.lower if factor > 0 else p.upper


def _most(p: Parameter, factor: float) -> float:
    return _least(p, -factor)


def name_of(check: Callable[..., Any]) -> str:
    """The name of a function."""
    if isinstance(check, NamedCheck):
        return check.name
    named = check if hasattr(check, "__qualname__") else type(check)
    return f"{named.__module__}:{named.__qualname__}"
