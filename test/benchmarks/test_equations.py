"""Every element of the papers is somewhere, or the page says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import equations
from benchmarks.equations import STATUSES, Element, elements

ROOT = Path(__file__).parents[2]
ELEMENTS = elements()
PAPERS = {"Federated Thompson sampling (FTS)", "DP-FTS-DE", "Private GP bandits (PGP)", "FBO-FedGP"}


def test_all_papers_have_their_elements() -> None:
    assert {element.paper for element in ELEMENTS} == PAPERS
    assert len(ELEMENTS) >= 80


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.what[:40])
def test_an_element_is_at_its_place(element: Element) -> None:
    assert element.status.startswith(STATUSES)
    if element.status == "missing":
        assert len(element.remark) > 20, "no reason"
    else:
        assert element.places
    for place in element.places:
        file, line = place.split(":")
        lines = (ROOT / file).read_text().splitlines()
        assert 1 <= int(line) <= len(lines)


def test_a_line_is_that_of_the_name() -> None:
    known = {element.what: element for element in ELEMENTS}
    (place,) = known["Assumption 1: :math:`\\hat\\Delta(|S|)`"].places
    file, line = place.split(":")
    assert "def approximation_error" in (ROOT / file).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ("`models.nothing_of_that`", "nowhere in the package"),
        ("``nothing`` of ``benchmarks/statistics.py``", "has no nothing"),
        ("``python -m benchmarks.nowhere entry``", "is nowhere"),
        ("``python -m benchmarks.papers.fts har-nothing``", "has no har-nothing"),
    ],
)
def test_what_is_nowhere_is_found(here: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        _ = Element("", "", here, "", "exact").places


def test_the_command_prints_all(capsys: pytest.CaptureFixture[str]) -> None:
    equations.main()
    said = capsys.readouterr().out
    assert all(paper in said for paper in PAPERS)
    assert "botorch_fed/models/summary.py:" in said
