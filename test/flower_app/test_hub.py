"""What a site may leave at a hub, counted over restarts of the hub's process."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from botorch_fed.federation.base import FRAME_BYTES
from botorch_fed.flower_app.hub import Allowance
from test.attacks.lying_hub import recorded
from test.faults.cases import NAMES, SQUARE, cases

CASES = [name for name in cases() if name != "fts-late"]


def test_a_site_is_refused_by_name_and_others_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "allowed.json").write_text(json.dumps({"north": 100, "south": 100}))
    allowance = Allowance(tmp_path)
    assert allowance.take("north", 60) == ""
    with caplog.at_level(logging.WARNING):
        said = [allowance.take("north", 41) for _ in range(3)]
    assert set(said) == {"Site 'north' would have 101 bytes at this hub, its requests allow 100."}
    assert len(caplog.records) == 1  # nor does it fill the log
    assert allowance.take("south", 100) == ""
    assert "allow 0" in allowance.take("east", 1)
    assert allowance.take("north", 40) == ""
    again = Allowance(tmp_path)  # the hub was started anew
    assert again.take("north", 1) != ""
    (tmp_path / "allowed.json").write_text(json.dumps({"north": 130, "south": 100}))
    assert again.take("north", 30) == ""
    assert again.take("north", 1) != ""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_longest_reply_is_known_from_the_terms(name: str) -> None:
    """So that a site may not leave a multiple of it, and none of an honest site is refused."""
    case = cases()[name]
    longest = case.study.server(SQUARE, NAMES).reply_bytes
    replies = [len(one.reply) for one in recorded(name, case)]
    assert max(replies) <= longest + FRAME_BYTES
    assert longest <= 2 * max(replies) + 8192
