r"""Linear constraints over named parameters, in the user's units.

::

    "x + y <= 1"     "a - 2*b == 0.5"     "2 * (x + y) >= z / 3"

Both sides are sums of parameters with numbers as factors; the relation is ``<=``, ``>=`` or ``==``.
`LinearConstraint` is the form in which all sites have it: parameters on the left side in the order
of the search space, a number on the right.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from botorch.exceptions.errors import InputDataError

_RELATIONS: dict[type[ast.cmpop], tuple[float, bool]] = {  # the sign of "<=", and equality
    ast.LtE: (1.0, False),
    ast.GtE: (-1.0, False),
    ast.Eq: (1.0, True),
}
_Sum = dict[str, float]  # factors by parameter; of the empty name a number


@dataclass(frozen=True)
class LinearConstraint:
    """A weighted sum of parameters that is at most a number, or equal to it.

    Attributes:
        coefficients: The factor of each parameter, by name.
        bound: The number.
        equality: Whether the sum must be equal to it.
    """

    coefficients: tuple[tuple[str, float], ...]
    bound: float
    equality: bool = False

    def __post_init__(self) -> None:
        pairs = tuple((str(name), float(factor)) for name, factor in self.coefficients)
        object.__setattr__(self, "coefficients", pairs)
        object.__setattr__(self, "bound", float(self.bound))
        if not pairs or len({name for name, _ in pairs}) < len(pairs):
            raise InputDataError(
                f"Expected a constraint of one parameter or more, each named once, got {pairs}."
            )
        if not all(map(math.isfinite, (self.bound, *(factor for _, factor in pairs)))):
            raise InputDataError(f"The numbers of a constraint must be finite, got {self}.")

    @classmethod
    def parse(cls, text: str, names: Sequence[str]) -> LinearConstraint:
        """A constraint from text.

        Args:
            text: E.g. ``"x + 2*y <= 1"``.
            names: The parameters that there are.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
            raise _error(text, "it cannot be read") from None
        if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
            raise _error(text, "it must have one relation")
        relation = _RELATIONS.get(type(tree.ops[0]))
        if relation is None:
            raise _error(text, "its relation must be <=, >= or ==")
        sign, equality = relation
        try:
            left, right = _sum(tree.left, text, names), _sum(tree.comparators[0], text, names)
        except (OverflowError, RecursionError):
            raise _error(text, "its numbers or brackets are too many or too large") from None
        total = _plus(left, right, -1.0)
        bound = -total.pop("", 0.0)
        ordered = {name: sign * total[name] for name in names if total.get(name)}
        if not ordered:
            raise _error(text, "no parameter is left in it")
        return cls(tuple(ordered.items()), sign * bound + 0.0, equality)

    def __str__(self) -> str:
        sign = -1.0 if self.coefficients[0][1] < 0 else 1.0  # the first factor is shown positive
        terms = [
            f"{'-' if sign * factor < 0 else '+'} "
            f"{'' if abs(factor) == 1 else f'{abs(factor):.12g} * '}{name}"
            for name, factor in self.coefficients
        ]
        relation = "==" if self.equality else "<=" if sign > 0 else ">="
        bound = f"{sign * self.bound + 0.0:.12g}"
        return f"{' '.join(terms).removeprefix('+ ')} {relation} {bound}"

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters in it."""
        return tuple(name for name, _ in self.coefficients)

    def excess(self, values: Mapping[str, float]) -> float:
        """By how much the sum of values by name exceeds the bound; without sign for an equality."""
        total = math.fsum(factor * float(values[name]) for name, factor in self.coefficients)
        return abs(total - self.bound) if self.equality else total - self.bound


def _sum(node: ast.expr, text: str, names: Sequence[str]) -> _Sum:
    """One side, as factors by parameter."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return {"": float(value)}
        case ast.Name(id=name):
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                meant = f" Did you mean {close[0]!r}?" if close else ""
                raise InputDataError(
                    f"Constraint {text!r}: there is no parameter {name!r}.{meant} Expected some of "
                    f"{list(names)}."
                )
            return {name: 1.0}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _plus({}, _sum(operand, text, names), -1.0)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _sum(operand, text, names)
        case ast.BinOp(op=ast.Add() | ast.Sub() as op, left=left, right=right):
            sign = 1.0 if isinstance(op, ast.Add) else -1.0
            return _plus(_sum(left, text, names), _sum(right, text, names), sign)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            one, two = _sum(left, text, names), _sum(right, text, names)
            if set(one) <= {""}:
                return _plus({}, two, one.get("", 0.0))
            if set(two) <= {""}:
                return _plus({}, one, two.get("", 0.0))
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            one, two = _sum(left, text, names), _sum(right, text, names)
            if set(two) == {""} and two[""]:
                return _plus({}, one, 1 / two[""])
    raise _error(text, f"{ast.unparse(node)!r} is no sum of parameters with numbers as factors")


def _plus(one: _Sum, two: _Sum, factor: float) -> _Sum:
    return {
        name: one.get(name, 0.0) + factor * two.get(name, 0.0)
        for name in dict.fromkeys([*one, *two])
    }


def _error(text: object, what: str) -> InputDataError:
    return InputDataError(
        f"Constraint {text!r}: {what}. Write e.g. 'x + 2*y <= 1' or 'a - b == 0.5'; for any other "
        "condition give feasible, a function of the parameters."
    )
