"""The matrix of `problems` is the page's: no door drops anything silently."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("ax", reason="needs botorch_fed[ax]")

from test.contracts.problems import (
    DOORS,
    PAGE,
    PROBLEMS,
    Cell,
    Problem,
    cell,
    hill,
    matrix,
    page,
)

AGAIN = "write the page again: python -m test.contracts.problems"
OWN = list(DOORS)[:3]  # the doors of Ax take longer: by night, but for one problem


def marks(problem: Problem) -> dict[str, str]:
    """What the page says of a problem, by door."""
    text = PAGE.read_text()
    row = text.split(f"   * - {problem.name}\n")[1].split("   * - ")[0]
    return dict(zip(DOORS, re.findall(r"^     - (.*)$", row, flags=re.M), strict=False))


def compared(problem: Problem, door: str) -> None:
    found, mark = cell(problem, door), marks(problem)[door]
    assert found.kind != "fails", found.words
    assert mark.split(" ")[0] == found.kind, f"{mark}, not {found}: {AGAIN}"


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
@pytest.mark.parametrize("door", OWN)
def test_a_problem_is_what_the_page_says(problem: Problem, door: str) -> None:
    compared(problem, door)


@pytest.mark.parametrize("door", list(DOORS)[3:])
def test_a_problem_by_ax_is_what_the_page_says(door: str) -> None:
    compared(next(p for p in PROBLEMS if p.name == "outcome constraint"), door)


@pytest.mark.nightly
def test_the_page_is_what_the_matrix_finds() -> None:
    assert page(matrix()) == PAGE.read_text(), AGAIN


def test_a_problem_that_is_ignored_is_seen() -> None:
    def never(problem: Problem, seen: object) -> None:
        raise AssertionError("a constraint is ignored")

    problem = Problem("parameter constraint", PROBLEMS[0].space, hill, never)
    found = cell(problem, OWN[0])
    assert found == Cell("fails", "AssertionError: a constraint is ignored")
    with pytest.raises(ValueError, match="parameter constraint by"):
        page({(problem.name, OWN[0]): found})
