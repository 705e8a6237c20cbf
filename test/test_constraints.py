"""Linear constraints as text."""

from __future__ import annotations

import pytest
from botorch.exceptions.errors import InputDataError

from botorch_fed.constraints import LinearConstraint

NAMES = ("x", "y", "depth")


@pytest.mark.parametrize(
    ("text", "coefficients", "bound", "equality"),
    [
        ("x + y <= 1", {"x": 1, "y": 1}, 1, False),
        ("1 >= y + x", {"x": 1, "y": 1}, 1, False),
        ("x >= y", {"x": -1, "y": 1}, 0, False),
        ("2*(x - depth/4) + 3 == y - -0.5", {"x": 2, "y": -1, "depth": -0.5}, -2.5, True),
        ("x*2 + x <= 3e-1", {"x": 3}, 0.3, False),
        ("x + y - y <= 2", {"x": 1}, 2, False),
    ],
)
def test_text_has_one_form(
    text: str, coefficients: dict[str, float], bound: float, equality: bool
) -> None:
    found = LinearConstraint.parse(text, NAMES)
    assert dict(found.coefficients) == coefficients
    assert [name for name in NAMES if name in coefficients] == list(found.names)
    assert found.bound == pytest.approx(bound)
    assert found.equality is equality
    assert LinearConstraint.parse(str(found), NAMES) == found


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("x + z <= 1", r"no parameter 'z'.*\['x', 'y', 'depth'\]"),
        ("x + dpeth <= 1", "Did you mean 'depth'"),
        ("x * y <= 1", r"'x \* y' is no sum"),
        ("1 / x <= 1", "is no sum"),
        ("x / 0 <= 1", "is no sum"),
        ("x + y < 1", "relation must be"),
        ("0 <= x <= 1", "one relation"),
        ("x + y", "one relation"),
        ("x + <= 1", "cannot be read"),
        ("__import__('os') <= 1", "is no sum"),
        ("x - x <= 1", "no parameter is left"),
        ("x <= 1e999", "finite"),
        ("True * x <= 1", "is no sum"),
    ],
)
def test_what_is_no_constraint_is_refused(text: str, match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        LinearConstraint.parse(text, NAMES)


def test_excess_is_in_the_users_units() -> None:
    below = LinearConstraint.parse("x + 10*y <= 1", NAMES)
    assert below.excess({"x": 1.0, "y": 0.5}) == 5.0
    assert below.excess({"x": 0.0, "y": 0.05}) == -0.5
    on = LinearConstraint.parse("x == y", NAMES)
    assert on.excess({"x": 1.0, "y": 3.0}) == on.excess({"x": 3.0, "y": 1.0}) == 2.0


def test_a_parameter_is_named_once() -> None:
    with pytest.raises(InputDataError, match="each named once"):
        LinearConstraint((("x", 1.0), ("x", 2.0)), 1.0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("x >= 2", "x >= 2"), ("0 <= y - x", "x - y <= 0"), ("-x + y == 1", "x - y == -1")],
)
def test_a_constraint_is_shown_with_a_positive_first_factor(text: str, shown: str) -> None:
    constraint = LinearConstraint.parse(text, ["x", "y"])
    assert str(constraint) == shown
    again = LinearConstraint.parse(shown, ["x", "y"])
    for values in ({"x": 0.5, "y": 2.5}, {"x": 3.0, "y": 1.0}):
        assert constraint.excess(values) == pytest.approx(again.excess(values))


@pytest.mark.parametrize(
    "text", ["x <= 1" + "0" * 400, "(" * 300 + "x" + ")" * 300 + " <= 1", "x" + " + x" * 20_000]
)
def test_text_without_measure_is_refused(text: str) -> None:
    with pytest.raises(InputDataError, match="for any other"):
        LinearConstraint.parse(text, ["x", "y"])


def test_a_constraint_of_no_parameter_is_refused() -> None:
    with pytest.raises(InputDataError, match="one parameter or more"):
        LinearConstraint((), 1.0)
