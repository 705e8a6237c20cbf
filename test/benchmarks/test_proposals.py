"""The page of what proposals cost is what the stored results say."""

from __future__ import annotations

import json

from benchmarks.proposals import PAGE, PROPOSALS, RESULTS, page


def test_the_page_is_what_the_results_say() -> None:
    rows = json.loads(RESULTS.read_text())
    assert {(kind, name) for kind, found in rows.items() for name in found} == set(PROPOSALS)
    assert PAGE.read_text() == page(rows), "write it again: python -m benchmarks.proposals --page"
