"""A search and an aggregation of a user: from Python, from a study file and from the CLI."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.aggregation.relay import Relay
from botorch_fed.cli import main
from botorch_fed.federation.base import Objective
from botorch_fed.federation.disclosure import EVERYBODY, NO_GUARANTEE
from botorch_fed.run import RunResult, run
from botorch_fed.search.messages import Message, TransferRows
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import FTS, Federation
from botorch_fed.study import StudyError, plan, read_study, run_study
from test.federation import own_parts
from test.federation.own_parts import Median, MedianTransfer, RandomSearch

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.integer("b", 0, 9)))


def hill(X: Tensor) -> Tensor:
    return 1 - 6 * (X - 0.3).square().sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("candidates", [None, torch.rand(9, 2).double()])
def test_a_random_search_of_ones_own(candidates: Tensor | None) -> None:
    study = Federation(budget=7, search=RandomSearch(), aggregation=Relay(), candidates=candidates)
    objectives: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    result = run(study, objectives, seed=0, space=SQUARE)
    again = run(study, objectives, seed=0, space=SQUARE)
    for name in NAMES:
        X, _ = result.history(name)
        assert X.shape == (7, 2)
        assert torch.equal(X, again.history(name)[0])
    assert not torch.equal(result.history("ann")[0], result.history("bob")[0])


def test_a_median_of_ones_own() -> None:
    study = Federation(budget=9, search=MedianTransfer(), aggregation=Median())
    objectives: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    result = run(study, objectives, seed=0, space=SQUARE)
    assert {row["failure"] for row in result.rounds} == {None}
    for name in NAMES:
        assert len(result.history(name)[0]) == 9
        assert float(result.best(name)[-1]) > 0.9


# ------------------------------------------------------------------ what a study of parts says


def test_who_sees_what_follows_from_the_types_of_messages() -> None:
    sees = Federation(budget=7, search=MedianTransfer(), aggregation=Median()).sees(SQUARE, NAMES)
    assert [row.message for row in sees.rows] == ["Setup", "Order", "Contribution", "Middle"]
    middle = sees.row("Middle")
    assert middle.content == "the coordinate-wise median of all messages of a round"
    assert (middle.readers, middle.reveals) == (EVERYBODY, "data")
    assert (sees.row("Order").reveals, sees.row("Contribution").reveals) == ("nothing", "data")
    assert NO_GUARANTEE in sees.sentences
    assert all(text[0].isupper() and text.endswith(".") for text in sees.sentences)


@pytest.mark.parametrize("aggregation", [Relay(), Median()])
def test_sites_that_say_nothing_reveal_nothing(aggregation: Any) -> None:
    study = Federation(budget=7, search=RandomSearch(), aggregation=aggregation)
    sees = study.sees(SQUARE, NAMES)
    assert {row.reveals for row in sees.rows} == {"nothing"}
    assert NO_GUARANTEE not in sees.sentences
    assert study.price(SQUARE, NAMES) is None


def test_progress_and_the_former_keyword() -> None:
    study = Federation(budget=7, q=2, search=MedianTransfer(), aggregation=Median())
    result = run(study, dict.fromkeys(NAMES, hill), seed=0, space=SQUARE, progress=False)
    assert [row["evaluations"] for row in result.rounds[:: len(NAMES)]] == [2, 4, 6, 7]
    assert (result.protocol, study.rounds) == ("MedianTransfer x Median", 4)
    with pytest.raises(InputDataError, match=r"rounds is now budget.* write budget = 8"):
        Federation(rounds=4, q=2)  # type: ignore[call-arg]


def test_a_silent_study_of_parts_is_refused() -> None:
    rows = TransferRows(messages=Message("mean"))
    with pytest.raises(InputDataError, match="No message would ever be sent: every = 0"):
        Federation(budget=7, search=rows, aggregation=Relay(0))
    Federation(budget=7, search=RandomSearch(), aggregation=Relay(0))


def test_the_default_parts_are_those_of_fts() -> None:
    objectives: dict[str, Objective] = dict.fromkeys(NAMES, hill)
    mine, theirs = (
        run(made, objectives, seed=0, space=SQUARE, progress=False)
        for made in (Federation(budget=5), FTS(budget=5))
    )
    for name in NAMES:
        assert torch.equal(mine.history(name)[0], theirs.history(name)[0])


# ------------------------------------------------------------------ study files

STUDY = """objective = "MODULE:score"
agents = ["ann", "bob", "cem"]
budget = 5
seed = 1
[space]
a = { type = "real", lower = 0.0, upper = 1.0 }
b = { type = "integer", lower = 0, upper = 9 }
[protocol]
name = "federation"
"""
OBJECTIVE = "\n\ndef score(agent, *, a, b):\n    return 1 - (a - 0.3) ** 2 - (b / 9 - 0.3) ** 2\n"
RANDOM = 'search = "MODULE:RandomSearch"\n'
MEDIAN = """aggregation = "MODULE:Median"
[protocol.search]
kind = "MODULE:MedianTransfer"
[protocol.search.messages]
noise_var = 0.1
[protocol.search.strategy]
warp = false
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setattr(sys, "path", sys.path[:])
    module = f"mine_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(Path(own_parts.__file__).read_text() + OBJECTIVE)

    def write(text: str) -> Path:
        path = tmp_path / "study.toml"
        path.write_text(text.replace("MODULE", module))
        return path

    return write


@pytest.mark.parametrize(
    ("text", "title", "messages"),
    [(RANDOM, "RandomSearch x Relay", 0), (MEDIAN, "MedianTransfer x Median", 15)],
    ids=["random", "median"],
)
def test_own_parts_run_from_a_study_file_and_by_the_command_line(
    text: str,
    title: str,
    messages: int,
    written: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = written(STUDY + text)
    study = read_study(path)
    result = run_study(study, out=None, progress=False)
    assert (result.protocol, len(result.records)) == (title, 15)
    assert sum(row["messages_sent"] for row in result.contributions()) == messages
    found = plan(study)
    assert (found.budget, found.total, found.rounds, found.price) == (5, 15, 5, None)
    assert found.sees == result.sees
    assert found.bytes_per_round

    assert main(["run", str(path), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["protocol"] == "federation"
    path = written(f"workers = 2\n{STUDY}{text}")
    assert main(["run", str(path), "--out", str(tmp_path / "run")]) == 0
    saved = RunResult.load(tmp_path / "run")
    assert [row["y"] for row in saved.records] == [row["y"] for row in result.records]
    assert saved.sees == found.sees
    pytest.importorskip("plotly")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert title in next((tmp_path / "run").glob("*.html")).read_text()


def test_settings_of_parts_are_those_of_the_file(written: Callable[[str], Path]) -> None:
    made = read_study(written(STUDY + MEDIAN)).study()
    assert type(made) is Federation
    search = made.search
    assert (type(search).__name__, search.messages) == ("MedianTransfer", Message("mean", 0.1))
    assert (search.strategy.warp, search.strategy.listen) == (False, True)
    text = 'aggregation = { kind = "relay", every = 2 }\nsearch = "transfer"\n'
    made = read_study(written(STUDY + text)).study()
    assert (made.aggregation, type(made.search)) == (Relay(2), TransferRows)
    made = read_study(written(STUDY + "[protocol.aggregation]\nevery = 3\n")).study()
    assert (made.aggregation, made.search) == (Relay(3), None)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('search = "randm"\n', 10, r"search.*: Expected one of transfer, or module:Name"),
        ('search = "MODULE:Randm"\n', 10, r"search.*: Expected a subclass of Search.*Attrib"),
        ('search = "MODULE:Median"\n', 10, "Expected a subclass of Search at .*Median"),
        ('aggregation = "MODULE:RandomSearch"\n', 10, "Expected a subclass of Aggregation"),
        ('search = "no_such_module:Search"\n', 10, "there is no module 'no_such_module' below"),
        ("search = 3\n", 10, "expected a table, got 3"),
        (f"{MEDIAN}warm = true\n", 17, r"search\.strategy\.warm: unknown key.*'warp'"),
        (f"{MEDIAN}warp = 1\n".replace("warp = false\n", ""), 16, "expected true or false, got 1"),
        ("[protocol.aggregation]\nevery = -1\n", 10, "every counts rounds from 0"),
        ("[protocol.aggregation]\nevery = 0\n", 8, "No message would ever be sent"),
        ('aggregation = "relay"\nfeature_map = 3\n', 11, "expected a table"),
        (
            RANDOM + '[protocol.feature_map]\nkind = "rff"\n',
            11,
            "this search makes its own basis",
        ),
    ],
)
def test_mistakes_in_own_parts(
    text: str, line: int, said: str, written: Callable[[str], Path]
) -> None:
    with pytest.raises(StudyError, match=rf"study\.toml:{line}: .*{said}"):
        read_study(written(STUDY + text))
