"""Claims about rows that may not have been run yet."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import results_claims as claims
from benchmarks.papers import dp_fts_de, fed_gp, fts, ledger
from benchmarks.papers.ledger import CHECKPOINTS, Results
from benchmarks.papers.published import printed


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "RESULTS", tmp_path)
    return tmp_path


def fill(name: str, lines: Iterable[dict[str, Any]]) -> None:
    """Lines as they are stored, more of them."""
    path = ledger.RESULTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({**line, "versions": "none"}) + "\n" for line in lines)


EPSILON = {"q.35": 10.0, "q.25": 7.0, "q.2-": 5.0, "q.15": 3.5, "q.1-": 2.0}


def plane(losses: Mapping[str, float], seeds: int = 10) -> None:
    """Rows of a plane; the seeds differ a little."""
    fill(
        "dp_fts_de/har-paper",
        (
            {
                **{"row": row, "starts": 10, "seed": seed, "epsilon": EPSILON.get(row[6:10])},
                "regret": [loss + 1e-4 * np.sin(seed + len(row))] * len(CHECKPOINTS),
            }
            for row, loss in losses.items()
            for seed in range(seeds)
        ),
    )


NAMES = [dp_fts_de.named(q, z) for q, z in dp_fts_de.PLANE]
PAPER = {f"paper-{name}-own-region": 0.2 for name in NAMES}


def of_har(made: Iterator[claims.Claim]) -> list[claims.Claim]:
    return [claim for claim in made if "HAR" in claim.where]


def test_a_plane_is_not_run_until_all_its_points_are() -> None:
    plane({**PAPER, "ts-raw": 0.3, "ei-warped": 0.1})
    beats, slope = of_har(claims._dp_planes())
    assert (beats.verdict, slope.verdict) == ("reproduced", "not reproduced")
    assert "ahead at 9 of 9" in beats.here
    assert beats.ours == claims.NONE
    plane({f"ours-as-{name}": 0.15 for name in NAMES})
    beats, _ = of_har(claims._dp_planes())
    assert "ahead at 9 of 9" in beats.ours


@pytest.mark.parametrize("left", [{"seeds": 9}, {"without": NAMES[-1]}])
def test_a_plane_with_a_gap_has_no_verdict(left: dict[str, Any]) -> None:
    rows = {row: loss for row, loss in PAPER.items() if left.get("without", "none") not in row}
    plane({**rows, "ts-raw": 0.3}, seeds=left.get("seeds", 10))
    assert {claim.verdict for claim in of_har(claims._dp_planes())} == {"not run"}


def test_a_larger_epsilon_that_helps_is_seen() -> None:
    plane({row: 0.3 - 0.01 * math.log2(EPSILON[row[6:10]]) for row in PAPER} | {"ts-raw": 0.3})
    slope = of_har(claims._dp_planes())[1]
    assert slope.verdict == "reproduced"
    assert slope.here.startswith("−.0100 [")


def test_a_choice_loses_nothing_if_the_interval_says_so() -> None:
    rows = dict.fromkeys((row for _, _, rows in claims.CHOICES for row in rows), 0.2)
    plane({**rows, "paper-q.35-z1-own-region": 0.201, "regions-6": 0.15})
    told = {claim.where: claim.verdict for claim in claims._dp_choices()}
    assert told.pop("Fig. 10, HAR") == "not reproduced"
    assert set(told.values()) == {"reproduced"}


def timed(row: str, seconds: float, milliseconds: float) -> None:
    """Six targets of a row, every query of which costs so many seconds."""
    times = [t for t in CHECKPOINTS if t <= 50]
    fill(
        "fts/har-time",
        (
            {
                **{"row": row, "target": target, "repeat": 0, "cpu_ms": milliseconds},
                "best": [0.5 + 0.001 * t + 0.0001 * target for t in times],
                "cpu_by_query": [seconds * t for t in times],
            }
            for target in range(6)
        ),
    )


def test_what_is_found_in_the_same_time() -> None:
    for row, seconds in (("fts-paper", 0.01), ("rgpe", 0.1), ("taf", 0.001)):
        timed(row, seconds, 1e3 * seconds)
    results = Results("fts/har-time", fts.keys_of("har-time"))
    mine, theirs = claims._at_equal_time(results, "fts-paper", "rgpe")
    assert mine[0, 0] == pytest.approx(0.55)
    assert theirs[0, 0] == pytest.approx(0.505)  # five queries of a tenth of a second
    told = [claim.verdict for claim in of_har(claims._times())]
    assert told == ["reproduced", "not reproduced", "not run"]
    for row, milliseconds in (("fts-paper@10", 10.0), ("rgpe@10", 50.0), ("taf@10", 0.5)):
        timed(row, 1.0, milliseconds)
    agents = of_har(claims._times())[-1]
    assert agents.verdict == "reproduced"
    assert (
        agents.here == "times FTS 1.00 [1.00, 1.00], RGPE 2.00 [2.00, 2.00], TAF 2.00 [2.00, 2.00]"
    )


def test_growing_others_have_a_row_of_each_kind() -> None:
    what = ("har-growing", "fts-paper", "the paper's ranges")
    assert claims._growing(*what).verdict == "not run"
    fill(
        "fts/har-growing",
        (
            {
                **{"row": "fts-paper", "others": others, "target": target, "repeat": 0},
                "best": [value + 0.001 * target * value] * 14,
            }
            for others, value in (("fixed", 0.9), ("growing", 0.95))
            for target in range(6)
        ),
    )
    made = claims._growing(*what)
    assert (made.verdict, made.runs) == ("reproduced", "6 subjects, 6 pairs")


def test_encrypted_times_beside_the_printed_ones() -> None:
    assert {claim.verdict for claim in claims._fedgp_times()} == {"not run"}
    for unit, agents in (("diabetes-10", 10), ("diabetes", 30)):
        rows = (
            {"method": row, "seed": 0, "cpu_seconds": 0.8 * agents} for row in fed_gp.timed_rows()
        )
        fill(f"fed_gp/times-{unit}", rows)
    tables, schedules = claims._fedgp_times()
    assert (tables.verdict, tables.here.split(" s ")[0]) == ("reproduced", "8 / 8 / 24 / 24")
    assert schedules.verdict == "not reproduced"


def test_all_twenty_functions_need_ten_seeds() -> None:
    columns = printed.fedgp_table1()
    for unit, target in columns["FBO-FedGP"].items():
        for method, offset in (("ours", -1.0), ("sequential", 1.0)):
            curves = {"best": [target + offset], "mean": [target + offset], "cpu_seconds": 1.0}
            lines = ({"method": method, "seed": seed, **curves} for seed in range(10))
            fill(f"fed_gp/cec2005-{unit}", lines)
    made = claims._fedgp_all(columns)
    assert (made.verdict, made.here) == ("not reproduced", "to the letter on 0")
    assert "better on 20 of 20" in made.ours
    assert "FBO-FedGP 20 (p " in made.ours
    left = next(claims._fedgp_missing())
    assert "pooled 0" in left.here
    (ledger.RESULTS / "fed_gp" / "cec2005-F07.jsonl").unlink()
    assert claims._fedgp_all(columns).verdict == "not run"
