"""Study files: what they mean, and what is said of the ones that mean nothing."""

from __future__ import annotations

import itertools
import pickle
import sys
from pathlib import Path

import pytest
import torch

from botorch_fed.protocols.dp_fts_de import DPFTSDE
from botorch_fed.protocols.fed_gp import FedGP
from botorch_fed.protocols.fts import FTS
from botorch_fed.protocols.private_ucb import PrivateUCB
from botorch_fed.run import RunResult
from botorch_fed.space import Outcome, Parameter
from botorch_fed.study import (
    ObjectiveError,
    StudyError,
    StudyFile,
    plan,
    read_study,
    run_study,
    simple_settings,
)

NUMBERS = itertools.count()  # a module is imported once a process: every test has its own
OBJECTIVE = """
import math
def score(agent, *, lr, depth, kind):
    shift = {"north": 0.0, "south": 0.5}[agent]
    return 0.9 - 0.05 * (math.log10(lr) - shift) ** 2 - 0.01 * depth + 0.02 * (kind == "rbf")
def broken(agent, **point):
    raise ValueError("no licence")
def wordy(agent, **point):
    return "much"
def lost(agent, **point):
    return float("nan")
number = 3
"""
STUDY = """objective = "MODULE:score"
agents = ["north", "south"]
rounds = 2
seed = 1

[space]
lr = { type = "real", lower = 1e-3, upper = 1e3, log = true }
depth = { type = "integer", lower = 1, upper = 8 }
kind = { type = "choice", values = ["rbf", "linear"] }

[outcome]
centre = 0.9
scale = 0.1

[protocol]
name = "fts"
every = 1

[protocol.strategy]
num_raw = 32
num_restarts = 2
num_features = 32
"""
PRIVATE = STUDY.replace('"fts"\nevery = 1', '"dp-fts-de"\nnum_initial = 2\nreleases = [0]')
BUDGET = "\n[budget]\nepsilon = 200.0\ndelta = 1e-3\n"  # two agents: less would be all noise
BANDIT = STUDY.split("[protocol]")[0] + '[protocol]\nname = "private-ucb"\n' + BUDGET


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))  # a study adds its folder
    return tmp_path


def write(folder: Path, text: str = STUDY) -> Path:
    module = f"objective_of_a_test_{next(NUMBERS)}"
    (folder / f"{module}.py").write_text(OBJECTIVE)
    path = folder / "study.toml"
    path.write_text(text.replace("MODULE", module))
    return path


def read(folder: Path, text: str = STUDY) -> StudyFile:
    return read_study(write(folder, text))


# ------------------------------------------------------------------ what a file means


def test_a_file_means_what_it_says(folder: Path) -> None:
    study = read(folder, 'out = "runs/a"\nworkers = 2\n' + STUDY)
    assert study.space.parameters == (
        Parameter.real("lr", 1e-3, 1e3, scale="log"),
        Parameter.integer("depth", 1, 8),
        Parameter.choice("kind", ["rbf", "linear"]),
    )
    assert study.space.outcome == Outcome(0.9, 0.1)
    assert (study.agents, study.rounds, study.seed) == (("north", "south"), 2, 1)
    assert (study.out, study.workers, study.budget) == (folder / "runs/a", 2, None)
    made = study.study()
    assert isinstance(made, FTS)
    assert (made.rounds, made.every, made.strategy.num_raw) == (2, 1, 32)


def test_a_budget_becomes_noise_and_what_agents_insist_on(folder: Path) -> None:
    made = read(folder, PRIVATE + BUDGET + "\n").study()
    assert isinstance(made, DPFTSDE)
    assert (made.epsilon, made.delta, made.releases) == (200.0, 1e-3, (0,))
    assert made.require is not None
    assert made.require.epsilon == 200.0
    bandit = read(folder, BANDIT).study()
    assert isinstance(bandit, PrivateUCB)
    assert bandit.epsilon == 200.0


def test_nested_settings(folder: Path) -> None:
    text = STUDY.replace('"fts"\nevery = 1', '"fed-gp"\nnum_initial = 1').replace(
        ".strategy]", '.search]\nkind = "support"\nsupport_size = 8'
    )
    text = 'channel = "plain"\n' + text.replace("num_features = 32\n", "")
    made = read(folder, text).study()
    assert isinstance(made, FedGP)
    assert made.channel == "plain"
    assert made.search.support_size == 8  # type: ignore[union-attr]
    text = PRIVATE.replace("releases = [0]", "sampling_rate = 0.5") + BUDGET
    assert read(folder, text).settings["sampling"].rate == 0.5


def test_every_simple_setting_of_every_study_is_known() -> None:
    assert {"every", "message", "q", "noise_var", "active"} <= set(simple_settings(FTS))
    assert {"trust", "batch", "psd", "inflate"} <= set(simple_settings(PrivateUCB))
    assert not {"feature_map", "noise", "candidates", "_made"} & set(simple_settings(FedGP))


def test_an_objective_is_called_by_agent_and_keywords(folder: Path) -> None:
    study = read(folder)
    objective = study.objectives()["south"]
    X = study.space.to_unit([{"lr": 10**0.5, "depth": 1, "kind": "rbf"}])
    torch.testing.assert_close(objective(X), torch.tensor([[0.91]]).double())
    again = pickle.loads(pickle.dumps(objective))  # for worker processes
    torch.testing.assert_close(again(X), objective(X))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "raised ValueError: no licence"),
        ("wordy", "must return a finite number|must return a number, got str"),
        ("lost", "must return a finite number, got nan"),
    ],
)
def test_an_objective_that_fails(folder: Path, name: str, said: str) -> None:
    study = read(folder, STUDY.replace(":score", f":{name}"))
    with pytest.raises(ObjectiveError, match=f"of agent 'north' .*({said})"):
        run_study(study, out=None, progress=False)


# ------------------------------------------------------------------ what is refused

# What is replaced, by what, the line of the complaint, and what it says.
MISTAKES = [
    ("rounds = 2", "ronds = 2", 3, "unknown key. Did you mean 'rounds'"),
    ("rounds = 2", 'rounds = "2"', 3, "rounds: expected an integer, got '2'. Write e.g. rounds ="),
    ("rounds = 2", "rounds = 0", 3, "expected an integer from 1 on, got 0"),
    ("rounds = 2", "rounds = true", 3, "expected an integer, got true"),
    ("rounds = 2", "", 1, "rounds: missing; expected an integer. Write e.g. rounds = 12"),
    ("rounds = 2", "rounds = 2 2", 3, "this is no TOML"),
    ("MODULE:score", "MODULE.score", 1, 'expected "package.module:function"'),
    ('["north", "south"]', '["north", "north"]', 2, "agents: expected different names"),
    ('["north", "south"]', "[1, 2]", 2, "expected a list, each item a string"),
    ("upper = 1e3, log", "upper = 1e-9, log", 7, "lower bound of 'lr' must lie below the upper"),
    ("lower = 1e-3,", "lower = 0,", 7, "log scale needs positive bounds"),
    ("log = true", "logg = true", 7, "space.lr.logg: unknown key. Did you mean 'log'"),
    ("lower = 1, upper = 8", "lower = 1.5, upper = 8", 8, "space.depth.lower: expected an integer"),
    ('"integer"', '"int"', 8, "expected one of .*got 'int'. Did you mean 'integer'"),
    ('["rbf", "linear"]', '["rbf"]', 9, "needs at least two different values"),
    ("kind =", "agent =", 9, "a parameter is a keyword of the objective"),
    ("scale = 0.1", "scale = 0.0", 11, "positive scale"),
    ("centre = 0.9", "center = 0.9", 12, "unknown key. Write centre"),
    ('"fts"', '"ftz"', 16, "protocol.name: expected one of .*Did you mean 'fts'"),
    ("every = 1", "evry = 1", 17, "protocol.evry: unknown key. Did you mean 'every'"),
    ("every = 1", 'every = "1"', 17, "expected an integer, got '1'. Write e.g. every = 4"),
    ("every = 1", "every = -1", 15, "rounds and every count from 0"),
    ("every = 1", "epsilon = 2.0", 17, r"protocol.epsilon: belongs in \[budget\]"),
    ("every = 1", "rounds = 2", 17, "belongs at the top of the file"),
    ("every = 1", "feature_map = 1", 17, "cannot be written in a file"),
    ("num_raw = 32", "num_raw = 1", 19, "num_restarts must lie between 1 and num_raw"),
    ("num_raw = 32", "num_row = 32", 20, "Did you mean 'num_raw'"),
    ("num_raw = 32", "schedule = 0.5", 20, "protocol.strategy.schedule: cannot be written"),
    ("seed = 1", 'seed = 1\nchannel = "plain"', 5, "fts sends its messages in the clear"),
    ("[outcome]", "[budget]\nepsilon = 1.0\ndelta = 1e-5\n[outcome]", 11, "can keep no budget"),
]


@pytest.mark.parametrize(("old", "new", "line", "said"), MISTAKES)
def test_a_mistake_is_told_with_line_key_and_fix(
    folder: Path, old: str, new: str, line: int, said: str
) -> None:
    assert old in STUDY
    with pytest.raises(StudyError, match=rf"study\.toml:{line}: .*{said}"):
        read(folder, STUDY.replace(old, new, 1))


PRIVATE_MISTAKES = [
    ("", 1, "budget: missing; dp-fts-de needs to know what it may reveal"),
    (BUDGET.replace("200.0", "-1.0"), 26, "budget.epsilon: expected a positive number, got -1.0"),
    (BUDGET.replace("1e-3", "1.5"), 27, r"budget.delta: expected a number in \(0, 1\)"),
    (BUDGET.replace("delta", "dleta"), 27, "Did you mean 'delta'"),
    (BUDGET.replace("delta = 1e-3", ""), 25, "budget.delta: missing; expected a number"),
    (BUDGET + "[ledger]\nepsilon = 1.0\ndelta = 1e-3\n", 28, "ledger.path: missing"),
]


@pytest.mark.parametrize(("budget", "line", "said"), PRIVATE_MISTAKES)
def test_a_budget_that_makes_no_sense(folder: Path, budget: str, line: int, said: str) -> None:
    with pytest.raises(StudyError, match=rf"study\.toml:{line}: .*{said}"):
        read(folder, PRIVATE + budget)


def test_a_budget_that_the_noise_cannot_keep(folder: Path) -> None:
    noisy = PRIVATE.replace("num_initial = 2", "noise_multiplier = 0.4\nnum_initial = 2")
    budget = BUDGET.replace("200.0", "2.0")
    said = r"27: budget.epsilon: epsilon = 2 cannot be kept: .* Write noise_multiplier = ([\d.]+)"
    with pytest.raises(StudyError, match=said) as caught:
        read(folder, noisy + budget)
    needed = str(caught.value).split("noise_multiplier = ")[2].split()[0]
    fixed = noisy.replace("noise_multiplier = 0.4", f"noise_multiplier = {needed}")
    with pytest.warns(match="times as much signal as noise"):
        assert read(folder, fixed + budget).study().noise_multiplier == float(needed)


def test_what_does_not_go_with_a_budget(folder: Path) -> None:
    with pytest.raises(StudyError, match=r"protocol\.delta: belongs in \[budget\]"):
        read(folder, PRIVATE.replace("num_initial", "delta = 0.1\nnum_initial") + BUDGET)
    with pytest.raises(StudyError, match="without noise keeps no budget"):
        read(folder, BANDIT.replace('-ucb"', '-ucb"\ntrust = "none"'))


def test_objectives_that_are_not_there(folder: Path) -> None:
    for wrong, said in (
        ("nowhere_at_all:score", "there is no module 'nowhere_at_all'"),
        ("MODULE:skore", "has no 'skore'"),
        ("MODULE:number", "is no function"),
    ):
        study = read(folder, STUDY.replace("MODULE:score", wrong))
        with pytest.raises(StudyError, match=rf"study\.toml:1: objective: .*{said}.*score\(agent"):
            study.load()


def test_files_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(StudyError, match=r"missing\.toml: cannot be read"):
        read_study(folder / "missing.toml")
    path = folder / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StudyError, match="no text in UTF-8"):
        read_study(path)


def test_lines_of_sub_tables_and_dotted_keys(folder: Path) -> None:
    table = "[space.lr]\ntype = 'real'\nlower = 3.0\nupper = 'x'\n[outcome]"
    text = STUDY.replace('lr = { type = "real", lower = 1e-3, upper = 1e3, log = true }\n', "")
    with pytest.raises(StudyError, match=r"study\.toml:13: space.lr.upper: expected a number"):
        read(folder, text.replace("[outcome]", table))
    text = STUDY.split("\n[protocol.strategy]")[0].replace("every = 1", "strategy.num_raw = 0.5")
    with pytest.raises(StudyError, match=r"study\.toml:17: protocol.strategy.num_raw: expected"):
        read(folder, text)


# ------------------------------------------------------------------ plans and runs


def test_a_plan_evaluates_nothing_and_says_what_will_happen(folder: Path) -> None:
    study = read(folder, STUDY.replace(":score", ":broken"))
    found = plan(study)
    assert (found.evaluations, found.agents, found.columns, found.promise) == (2, 2, 4, None)
    assert "no privacy guarantee" in " ".join(found.sees)
    assert found.bytes_per_round is not None
    result = run_study(read(folder), out=None, progress=False)
    counts = result.bytes_per_round()
    # A rehearsal has other values, but messages of the same size.
    assert list(found.bytes_per_round) == pytest.approx(
        [counts[t] for t in sorted(counts)], rel=0.1
    )


def test_plans_of_private_runs(folder: Path) -> None:
    found = plan(read(folder, PRIVATE + BUDGET))
    assert found.promise is not None
    assert 0 < found.promise.epsilon <= 200
    assert found.evaluations == 4
    bandit = plan(read(folder, BANDIT.replace('-ucb"', '-ucb"\ntrust = "local"\nbatch = 1')))
    assert (bandit.evaluations, bandit.total) == (1, 2)
    assert "Nobody reads a record" in bandit.sees[0]
    many = ", ".join(f'"a{n}"' for n in range(21))
    found = plan(read(folder, STUDY.replace('"north", "south"', many)))
    assert found.bytes_per_round is None
    assert "grow with the number of agents" in found.bytes_note


@pytest.mark.parametrize("channel", ["plain", "ckks", "threshold"])
def test_channels(folder: Path, channel: str) -> None:
    text = f'channel = "{channel}"\n' + STUDY.replace('"fts"\nevery = 1', '"fed-gp"')
    text = text.replace(".strategy]", ".search]\nnum_inducing = 4").replace("num_features = 32", "")
    study = read(folder, text)
    result = run_study(study, out=folder / "run", progress=False)
    assert len(result.records) == 2 * (4 + 2)
    if channel == "ckks":
        with pytest.raises(StudyError, match="single key of ckks is not kept"):
            run_study(study, out=folder / "run", resume=True, progress=False)
    else:
        again = run_study(study, out=folder / "run", resume=True, progress=False)
        assert again.records == result.records


def test_a_private_bandit_goes_on_where_it_was(folder: Path) -> None:
    path = write(folder, BANDIT.replace("rounds = 2", "rounds = 3"))
    module = next(folder.glob("objective_*.py"))
    module.write_text(
        OBJECTIVE.replace(
            "    shift =",
            "    from pathlib import Path\n"
            "    calls = Path(__file__).parent / 'calls'\n"
            "    calls.write_text(calls.read_text() + agent[0] if calls.exists() else agent[0])\n"
            "    if calls.read_text() == 'nsn':\n        raise OSError('power cut')\n    shift =",
        )
    )
    study = read_study(path)
    with pytest.raises(ObjectiveError, match="power cut"):
        run_study(study, out=folder / "run", progress=False)
    result = run_study(study, out=folder / "run", resume=True, progress=False)
    assert len(result.records) == 6
    assert (folder / "calls").read_text() == "nsn" + "nsns"  # the failed one again, no other
    assert RunResult.load(folder / "run").records == result.records
