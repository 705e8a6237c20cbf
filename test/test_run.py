"""A whole run: its result, its files, and a process that is killed in the middle of it."""

from __future__ import annotations

import io
import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks.problems import CEC2005
from botorch_fed import run as module
from botorch_fed.acquisition import Constant
from botorch_fed.engines import parallel
from botorch_fed.errors import ObjectiveError, ProtocolError
from botorch_fed.federation.base import Pending
from botorch_fed.federation.hub import hub_log
from botorch_fed.privacy import InsecureSeededNoise, compose
from botorch_fed.rng import Generator, generator
from botorch_fed.run import RunResult, run
from botorch_fed.search.released import Following
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.store import FileStore
from botorch_fed.studies import DPFTSDE, FTS, FedGP
from botorch_fed.test_functions import FederatedTestProblem, SyntheticGPAgents
from test.processes import exit_code

SPACE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
FOLDER = os.environ.get("BOTORCH_FED_DATA")
HERE = FOLDER is not None and (Path(FOLDER) / "cec2005_d10.npz").is_file()
needs_cec2005 = pytest.mark.skipif(not HERE, reason="BOTORCH_FED_DATA has no cec2005_d10.npz")
CHEAP = Strategy(num_raw=32, num_restarts=2, num_features=32, schedule=Constant(0.5), prior_until=2)


class Bowls(FederatedTestProblem):
    """Three bowls with known optima, observed with noise."""

    def __init__(self, noise_std: float | None = None) -> None:
        self.space = SPACE
        self.noise_std = noise_std

    def __len__(self) -> int:
        return 3

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        return -(X - 0.2 - 0.1 * agent).square().sum(dim=-1)

    @property
    def optimal_values(self) -> Tensor:
        return torch.zeros(3).double()


class Gusts(Bowls):
    """Bowls to be minimised, whose noise is of their own kind: it never improves a value."""

    def __init__(self) -> None:
        super().__init__()
        self.space = SearchSpace(SPACE.parameters, Outcome(minimize=True))

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        return -super().evaluate(agent, X)

    def observe(self, agent: int, X: Tensor, stream: Generator) -> Tensor:
        return self.evaluate(agent, X) * (1 + stream.normal(len(X)).abs())


def study(**options: Any) -> FTS:
    data = {}
    for n in (1, 2):
        X = generator(n, "data").uniform(5, 2)
        data[f"agent{n}"] = (X, Bowls().evaluate(n, X).reshape(-1, 1))
    return FTS(**{"budget": 4, "strategy": CHEAP, "data": data, "every": 2, **options})


def essence(result: RunResult) -> list[Any]:
    return [{k: v for k, v in row.items() if k != "cpu_seconds"} for row in result.records]


def rounds(result: RunResult) -> list[Any]:
    return [{k: v for k, v in row.items() if k != "cpu_seconds"} for row in result.rounds]


# ------------------------------------------------------------------ the result


def test_rows_are_tidy_and_curves_follow_from_them() -> None:
    result = run(study(), Bowls(noise_std=0.1), seed=3)
    assert len(result.records) == 12
    assert {row["agent"] for row in result.records} == {"agent0", "agent1", "agent2"}
    X, Y = result.history("agent1")
    assert X.shape == (4, 2)
    assert Y.shape == (4, 1)
    true = Bowls().evaluate(1, X)
    had = Bowls().evaluate(1, study().data["agent1"][0]).max()  # before the run
    best = true.cummax(dim=0).values.clamp_min(had)
    assert torch.allclose(result.best("agent1"), best)
    assert not torch.equal(Y[:, 0], true)  # noise was added, and curves are of true values
    assert torch.allclose(result.regret("agent1"), -best)
    assert torch.allclose(result.cumulative_regret("agent1"), -true.cumsum(dim=0))
    assert sum(row["cpu_seconds"] for row in result.rounds if row["agent"] == "agent1") > 0
    assert set(result.bytes_per_round()) == {1, 2, 3, 4, 5}
    assert all(total > 0 for total in result.bytes_per_round().values())
    assert all(row["replied"] for row in result.rounds)
    assert "agents=3" in repr(result)
    with pytest.raises(InputDataError, match="got 'nobody'"):
        result.history("nobody")


def test_a_seed_fixes_a_run_and_another_seed_is_another_run() -> None:
    first = run(study(), Bowls(noise_std=0.1), seed=3)
    assert essence(run(study(), Bowls(noise_std=0.1), seed=3)) == essence(first)
    assert rounds(run(study(), Bowls(noise_std=0.1), seed=3)) == rounds(first)
    assert essence(run(study(), Bowls(noise_std=0.1), seed=4)) != essence(first)


def test_noise_is_independent_from_query_to_query() -> None:
    problem = SyntheticGPAgents(2, seed=0, noise_var=1.0)
    strategy = Strategy(own="random", schedule=Constant(1.0), prior_until=0)
    points = problem.points[:1]
    result = run(FTS(budget=200, strategy=strategy, candidates=points, every=1), problem, seed=0)
    _, Y = result.history("agent0")
    noise = Y - float(problem.values[0, 0])
    assert abs(float(noise.mean())) < 5 / 200**0.5
    assert abs(float(noise.std()) - 1) < 0.3
    assert abs(float((noise[1:] * noise[:-1]).mean())) < 5 / 200**0.5


def test_every_trial_is_passed_on_once_while_the_run_goes_on(tmp_path: Path) -> None:
    passed: list[tuple[str, Any]] = []
    rounds = []

    def objective(X: Tensor) -> Tensor:
        rounds.append(len(passed))
        if float(X[0, 0]) > 0.7:
            raise ValueError("too far")
        return -X.square().sum(-1, keepdim=True)

    def note(site: str, trial: Any) -> None:
        passed.append((site, trial))

    options: dict[str, Any] = {"space": SPACE, "seed": 0, "progress": False, "on_trial": note}
    sites = {"ann": objective, "bob": objective}
    result = run(FTS(budget=4), sites, out=tmp_path / "run", **options)
    assert any("too far" in trial.reason for _, trial in passed)
    for name in result.names:
        assert [trial for site, trial in passed if site == name] == result.trials(name)
    assert rounds[0] == 0 < rounds[-1] < len(passed)  # not only at the end

    passed.clear()
    longer = run(FTS(budget=5), sites, out=tmp_path / "run", resume=True, **options)
    for name in result.names:  # those of before come again
        assert [trial for site, trial in passed if site == name] == longer.trials(name)
        assert longer.trials(name)[:4] == result.trials(name)

    def stop(site: str, trial: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(FTS(budget=4), sites, **{**options, "on_trial": stop})


def test_workers_change_nothing() -> None:
    alone = run(study(), Bowls(noise_std=0.1), seed=3)
    shared = run(study(), Bowls(noise_std=0.1), seed=3, workers=2)
    assert essence(shared) == essence(alone)
    assert rounds(shared) == rounds(alone)


def test_noise_of_noise_std_is_drawn_call_by_call() -> None:
    result = run(study(), Bowls(noise_std=0.1), seed=3)
    for n, agent in enumerate(result.names):
        X, Y = result.history(agent)
        for call, (x, y) in enumerate(zip(X, Y[:, 0], strict=True)):
            noise = 0.1 * generator(3, "noise", n, call).normal(1)
            assert torch.equal(y, (Bowls().evaluate(n, x[None]) + noise)[0])


def test_problems_without_noise_do_not_read_the_stream() -> None:
    stream, X = generator(0), generator(1).uniform(4, 2)
    assert torch.equal(Bowls().observe(1, X, stream), Bowls().evaluate(1, X))
    assert torch.equal(stream.normal(2), generator(0).normal(2))
    assert not torch.equal(Bowls(noise_std=0.1).observe(1, X, stream), Bowls().evaluate(1, X))


def test_a_problem_may_have_noise_of_its_own(tmp_path: Path) -> None:
    protocol = FTS(budget=4, strategy=CHEAP, every=1)
    result = run(protocol, Gusts(), seed=3)
    for n, agent in enumerate(result.names):
        X, Y = result.history(agent)
        true = Gusts().evaluate(n, X)
        assert bool((Y[:, 0] > true).all())
        assert torch.allclose(result.best(agent), true.cummin(dim=0).values)
        assert torch.allclose(result.regret(agent), true.cummin(dim=0).values)
    assert essence(run(protocol, Gusts(), seed=3)) == essence(result)
    assert essence(run(protocol, Gusts(), seed=3, workers=2)) == essence(result)
    assert essence(run(protocol, Gusts(), seed=4)) != essence(result)
    run(FTS(budget=2, strategy=CHEAP, every=1), Gusts(), seed=3, out=tmp_path / "run")
    longer = run(protocol, Gusts(), seed=3, out=tmp_path / "run", resume=True)
    assert essence(longer) == essence(result)
    head = tmp_path / "run" / "run.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), "own_noise": None}))
    with pytest.raises(ProtocolError, match="another own_noise"):
        run(protocol, Gusts(), seed=3, out=tmp_path / "run", resume=True)


@needs_cec2005
@pytest.mark.parametrize("function", [4, 17])
def test_noisy_benchmark_functions_are_noisy_in_a_run(function: int) -> None:
    protocol = FTS(budget=2, strategy=Strategy(own="random", schedule=Constant(1.0)), every=1)
    result = run(protocol, CEC2005(function, 2, data=FOLDER), seed=0)
    silent = CEC2005(function, 2, data=FOLDER, noise=False)
    for row in result.records:
        (true,) = silent.evaluate(0, torch.tensor([row["x"]], dtype=torch.float64)).tolist()
        assert row["true"] == true < row["y"]
        assert row["regret"] == true - silent.bias
    for row in run(protocol, silent, seed=0).records:
        assert row["true"] == row["y"]


def test_folders_from_before_noise_of_its_own_can_be_resumed(tmp_path: Path) -> None:
    run(study(budget=3), Bowls(noise_std=0.1), seed=3, out=tmp_path / "run")
    head = tmp_path / "run" / "run.json"
    settings = json.loads(head.read_text())
    del settings["own_noise"]
    head.write_text(json.dumps(settings))
    longer = run(study(), Bowls(noise_std=0.1), seed=3, out=tmp_path / "run", resume=True)
    assert essence(longer) == essence(run(study(), Bowls(noise_std=0.1), seed=3))


def test_objectives_by_name_and_minimisation() -> None:
    space = SearchSpace(SPACE.parameters, Outcome(minimize=True))
    objectives = {"oven": lambda X: (X - 0.5).square().sum(dim=-1, keepdim=True)}
    result = run(FTS(budget=6, strategy=CHEAP, every=1), objectives, seed=0, space=space)
    best = result.best("oven")
    assert bool((best[1:] <= best[:-1]).all())
    assert result.optimal_values is None
    with pytest.raises(InputDataError, match="does not define them"):
        result.regret("oven")
    with pytest.raises(InputDataError, match="space="):
        run(FTS(budget=1), objectives, seed=0)
    with pytest.raises(InputDataError, match="defines its search space"):
        run(FTS(budget=1), Bowls(), seed=0, space=space)


def test_an_absent_agent_shows_in_the_rows() -> None:
    absent = lambda name, serial: (name, serial) == ("agent2", 3)  # noqa: E731
    result = run(study(), Bowls(), seed=0, absent=absent)
    (row,) = [row for row in result.rounds if not row["replied"]]
    assert (row["agent"], row["round"], row["failure"]) == ("agent2", 3, "absent")
    assert len(result.history("agent2")[0]) == 3


def test_a_missed_quorum_says_who_is_missing_and_can_be_resumed(tmp_path: Path) -> None:
    asked: list[int] = []

    def absent(name: str, serial: int) -> bool:
        asked.append(serial)
        return name != "agent0" and serial == 3

    options: dict[str, Any] = {"seed": 3, "out": tmp_path / "run", "quorum": 2}
    with pytest.raises(ProtocolError, match=r"Round 3 .* 1 of 3 agents, 2 are needed: 2 absent"):
        run(study(), Bowls(), absent=absent, retries=2, **options)
    assert asked.count(3) == 9  # three attempts
    result = run(study(), Bowls(), resume=True, **options)
    assert essence(result) == essence(run(study(), Bowls(), seed=3))


def test_settings_of_a_run_that_make_no_sense() -> None:
    for wrong, words in (
        ({"quorum": 4}, "Expected quorum <= 3, the agents, got 4"),
        ({"quorum": -1}, "quorum >= 0 and retries >= 0"),
        ({"retries": -1}, "quorum >= 0 and retries >= 0"),
        ({"deadline": 60.0}, "workers"),
    ):
        with pytest.raises(InputDataError, match=words):
            run(study(), Bowls(), seed=3, **wrong)  # type: ignore[arg-type]


def deadly(X: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return fast(X)


def hanging(X: Tensor) -> Tensor:
    time.sleep(60)
    return fast(X)


def test_a_worker_that_dies_or_hangs_ends_the_run_which_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "GRACE", 0.5)
    options: dict[str, Any] = {"seed": 0, "space": SPACE, "out": tmp_path / "run"}
    protocol = FTS(budget=2, strategy=CHEAP, every=1)
    with pytest.raises(ProtocolError, match=r"'b' has died \(exit code -9\)"):
        run(protocol, {"a": fast, "b": deadly}, workers=2, **options)
    options["resume"] = True
    with pytest.raises(ProtocolError, match=r"'[ab]' has not answered for 0.1 seconds"):
        run(protocol, {"a": fast, "b": hanging}, workers=2, deadline=0.1, **options)
    result = run(protocol, {"a": fast, "b": fast}, **options)
    assert [len(result.history(name)[0]) for name in ("a", "b")] == [2, 2]


def test_slow_objectives_are_waited_for() -> None:
    expected = run(FTS(budget=3, strategy=CHEAP, every=1), {"a": fast}, seed=0, space=SPACE)
    result = run(FTS(budget=3, strategy=CHEAP, every=1), {"a": Slow()}, seed=0, space=SPACE)
    assert essence(result) == essence(expected)


def fast(X: Tensor) -> Tensor:
    return X.sum(dim=-1, keepdim=True)


class Slow:
    def __init__(self) -> None:
        self.since: dict[bytes, float] = {}

    def __call__(self, X: Tensor) -> Tensor | Pending:
        start = self.since.setdefault(X.numpy().tobytes(), time.monotonic())
        return fast(X) if time.monotonic() > start + 0.03 else Pending()


def test_a_failing_objective_stops_the_run_or_its_evaluations_fail() -> None:
    def broken(X: Tensor) -> Tensor:
        raise OSError("no power")

    objectives, study = {"a": fast, "b": broken}, FTS(budget=2, strategy=CHEAP, every=1)
    with pytest.raises(OSError, match="no power"):
        run(study, objectives, seed=0, space=SPACE, raise_errors=True)
    result = run(study, objectives, seed=0, space=SPACE)
    assert len(result.history("a")[0]) == 2
    assert len(result.history("b")[0]) == 0
    table = result.to_dataframe()
    assert table[table.site == "b"].status.tolist() == ["failed", "failed"]
    assert set(table[table.site == "b"].reason) == {"OSError: no power"}
    with pytest.raises(
        ObjectiveError, match=r"site 'b' has failed at its first 3 points.*no power"
    ):
        run(replace(study, budget=3), objectives, seed=0, space=SPACE)


def test_what_was_there_before_counts() -> None:
    result = run(study(), Bowls(noise_std=0.1), seed=3)
    X, Y = study().data["agent1"]
    assert result.budget == 4
    assert [row["agent"] for row in result.given] == ["agent1"] * 5 + ["agent2"] * 5
    assert len(result.history("agent1")[0]) == 4
    both_X, both_Y = result.history("agent1", given=True)
    assert torch.equal(both_X[:5], X)
    assert torch.equal(both_Y[:5], Y)
    assert torch.equal(both_X[5:], result.history("agent1")[0])
    best = result.best_parameters("agent1")
    assert list(best) == list(SPACE.names)
    assert best == SPACE.from_unit(both_X[both_Y.argmax()].unsqueeze(0))[0]
    nothing = replace(result, records=[], given=[])
    assert nothing.best("agent1").shape == (0,)
    with pytest.raises(InputDataError, match="'agent1' has no observation"):
        nothing.best_parameters("agent1")


def test_the_best_is_the_smallest_where_smaller_is_better() -> None:
    result = run(FTS(budget=3, strategy=CHEAP, every=1), Gusts(), seed=3, progress=False)
    X, Y = result.history("agent0")
    found = result.best_parameters("agent0")
    assert found == result.space.from_unit(X[Y.argmin()].unsqueeze(0))[0]


def test_a_table_of_trials() -> None:
    pandas = pytest.importorskip("pandas")
    result = run(study(), Bowls(noise_std=0.1), seed=3)
    table = result.to_dataframe()
    assert isinstance(table, pandas.DataFrame)
    assert list(table.columns) == [
        *("site", "trial", "status", *SPACE.names),
        *("value", "true", "regret", "reason", "query", "round"),
    ]
    assert len(table) == 12 + 10
    mine = table[table.site == "agent1"]
    assert list(mine.trial) == list(range(1, 10))
    assert list(mine.status) == ["given"] * 5 + ["completed"] * 4
    assert list(mine["round"][:5]) == list(mine["query"][:5]) == [0] * 5
    X, Y = result.history("agent1", given=True)
    assert mine.value.tolist() == Y.flatten().tolist()
    points = result.space.from_unit(X)
    for name in SPACE.names:
        assert mine[name].tolist() == [point[name] for point in points]
    assert result.space.to_unit(mine[list(SPACE.names)].to_dict("records")).allclose(X)


def test_a_parameter_may_be_called_like_a_column() -> None:
    pytest.importorskip("pandas")
    space = SearchSpace((Parameter.real("value", 0.0, 1.0), Parameter.choice("kind", ["a", "b"])))
    objectives = {"a": lambda X: -X[:, :1]}
    result = run(
        FTS(budget=3, strategy=CHEAP, every=1), objectives, seed=0, space=space, progress=False
    )
    table = result.to_dataframe()
    assert set(table.kind) <= {"a", "b"}
    assert torch.allclose(torch.tensor(table.parameter_value), -torch.tensor(table.value))


def test_contributions_of_each_site() -> None:
    result = run(study(), Bowls(), seed=3, absent=lambda name, t: name == "agent2" and t > 3)
    silent, told, away = result.contributions()
    # Messages are due at the start, of whoever has data, and after queries 2 and 4.
    assert [row["messages_sent"] for row in (silent, told, away)] == [2, 3, 2]
    # All read what was collected at the start, and what was new after query 2.
    assert [row["messages_received"] for row in (silent, told, away)] == [2, 2, 1]
    assert [row["last_replied"] for row in (silent, told, away)] == [5, 5, 3]
    for row in (silent, told, away):
        mine = [r for r in result.rounds if r["agent"] == row["site"]]
        assert row["bytes_up"] == sum(r["bytes_up"] for r in mine) > 0
        assert row["bytes_down"] == sum(r["bytes_down"] for r in mine) > 0
    deaf = run(FTS(budget=3, every=0, strategy=CHEAP, data=study().data), Bowls(), seed=3)
    assert [row["messages_sent"] for row in deaf.contributions()] == [0, 1, 1]


# ------------------------------------------------------------------ files


def test_results_of_format_1_can_be_read(tmp_path: Path) -> None:
    result = run(study(), Bowls(noise_std=0.1), seed=3)
    folder = tmp_path / "result"
    result.save(folder)
    head = json.loads((folder / "result.json").read_text())
    del head["budget"]
    (folder / "result.json").write_text(json.dumps({**head, "format": 1}))
    (folder / "given.jsonl").unlink()
    former = []
    for row in result.rounds:
        kept = {k: v for k, v in row.items() if k not in ("sent", "received", "evaluations")}
        former.append({"heard" if k == "replied" else k: v for k, v in kept.items()})
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in former))
    again = RunResult.load(folder)
    assert again.budget is None
    assert again.records == result.records
    assert [row["replied"] for row in again.rounds] == [row["replied"] for row in result.rounds]
    row = again.contributions()[0]
    assert (row["messages_sent"], row["messages_received"], row["last_replied"]) == (None, None, 5)
    assert row["bytes_up"] == result.contributions()[0]["bytes_up"]


def test_save_and_load(tmp_path: Path) -> None:
    result = run(study(), Bowls(noise_std=0.1), seed=3)
    result.save(tmp_path / "result")
    again = RunResult.load(tmp_path / "result")
    assert again.records == result.records
    assert again.rounds == result.rounds
    assert again.given == result.given
    assert again.budget == 4
    assert again.contributions() == result.contributions()
    assert again.space == result.space
    assert again.versions == result.versions
    assert torch.equal(again.regret("agent0"), result.regret("agent0"))
    lines = (tmp_path / "result" / "records.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["agent"] == "agent0"
    head = json.loads((tmp_path / "result" / "result.json").read_text())
    head["format"] = 99
    (tmp_path / "result" / "result.json").write_text(json.dumps(head))
    with pytest.raises(InputDataError, match="format 99"):
        RunResult.load(tmp_path / "result")


def test_a_folder_is_not_overwritten_and_settings_are_compared(tmp_path: Path) -> None:
    run(study(), Bowls(), seed=3, out=tmp_path / "run")
    with pytest.raises(ProtocolError, match="resume=True"):
        run(study(), Bowls(), seed=3, out=tmp_path / "run")
    for other, name in (
        ({"protocol": study(noise_var=0.5)}, "settings"),
        ({"protocol": study(strategy=Strategy(own="ei"))}, "settings"),
        ({"seed": 4}, "seed"),
        ({"problem": Bowls(noise_std=5.0)}, "noise_std"),
    ):
        arguments: dict[str, Any] = {"protocol": study(), "problem": Bowls(), "seed": 3, **other}
        with pytest.raises(ProtocolError, match=name):
            run(**arguments, out=tmp_path / "run", resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(ProtocolError, match="not empty"):
        run(study(), Bowls(), seed=3, out=tmp_path / "full")
    with pytest.raises(InputDataError, match="out="):
        run(study(), Bowls(), seed=3, resume=True)


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    expected = run(study(budget=6), Bowls(noise_std=0.1), seed=3)
    run(study(budget=3), Bowls(noise_std=0.1), seed=3, out=tmp_path / "run")
    longer = run(study(budget=6), Bowls(noise_std=0.1), seed=3, out=tmp_path / "run", resume=True)
    assert essence(longer) == essence(expected)


def dies(out: Path, fatal: int) -> None:
    """A run whose process ends at its `fatal`-th step: before or after it writes something."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = 0

    def dying(action: Callable[..., Any]) -> Callable[..., Any]:
        def count() -> None:
            nonlocal steps
            steps += 1
            if steps == fatal:
                os._exit(9)

        def step(*args: Any) -> Any:
            count()
            result = action(*args)
            count()
            return result

        return step

    for owner, name in ((FileStore, "put"), (FileLog, "append"), (module, "_append")):
        setattr(owner, name, dying(getattr(owner, name)))
    run(study(), Bowls(noise_std=0.1), seed=3, out=out, resume=True)


@pytest.mark.parametrize("fatal", [14, 39, 117])
def test_killed_and_resumed_is_as_if_never_killed(tmp_path: Path, fatal: int) -> None:
    expected = run(study(), Bowls(noise_std=0.1), seed=3)
    out = tmp_path / "run"
    assert exit_code(dies, out, fatal) == 9
    if (out / "rounds.jsonl").exists():
        with (out / "rounds.jsonl").open("a") as file:
            file.write('{"round": 99, "age')  # as if a line had been cut short
    result = run(study(), Bowls(noise_std=0.1), seed=3, out=out, resume=True)
    assert essence(result) == essence(expected)
    assert {(row["round"], row["agent"], row["replied"]) for row in result.rounds} == {
        (row["round"], row["agent"], row["replied"]) for row in expected.rounds
    }
    assert len(result.rounds) == len(expected.rounds)
    again = run(study(), Bowls(noise_std=0.1), seed=3, out=out, resume=True)
    assert essence(again) == essence(expected)


def shown(protocol: Any, problem: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A run in front of a terminal: its result, and the last words of every round."""
    words: list[str] = []
    terminal = partial(Console, force_terminal=True, file=io.StringIO())
    monkeypatch.setattr("rich.console.Console", lambda **_: terminal())

    class Listening(module._Watch):
        def _words(self, round_: Any, new: Any) -> str:
            words.append(super()._words(round_, new))
            return words[-1]

    monkeypatch.setattr(module, "_Watch", Listening)
    return run(protocol, problem, seed=3, **options), words


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("problem", [Bowls(noise_std=0.1), Gusts()])
def test_progress_shows_the_best_value_and_takes_nothing_away(
    workers: int, problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = FTS(budget=4, strategy=CHEAP, every=1)
    result, words = shown(protocol, problem, monkeypatch, workers=workers)
    monkeypatch.undo()
    assert essence(result) == essence(run(protocol, problem, seed=3))
    assert words[0] == "3 of 3 replied"
    for serial in (2, 3, 4, 5):
        seen = [row["y"] for row in result.records if row["round"] <= serial]
        best = min(seen) if problem.space.outcome.minimize else max(seen)
        assert words[serial - 1] == f"3 of 3 replied, best {best:.4g}"


def test_progress_counts_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[float] = []

    class Counting(Progress):
        def update(self, task: Any, **options: Any) -> None:
            super().update(task, **options)
            done.append(self.tasks[0].completed)
            assert self.tasks[0].total == 3 * 5

    monkeypatch.setattr("rich.progress.Progress", Counting)
    result, _ = shown(FedGP(budget=5), Bowls(), monkeypatch)
    assert len(done) == max(row["round"] for row in result.rounds) > 5  # exchanges of a joint key
    assert done[:2] == [0, 0]  # the two phases of a joint key
    assert done[-1] == 15
    assert sorted(done) == done


@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
def test_progress_shows_epsilon_where_it_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = DPFTSDE(
        budget=5,
        noise_multiplier=2.0,
        releases=(0, 2),
        num_initial=2,
        strategy=Following(num_raw=32, num_restarts=2, num_features=32),
        noise=InsecureSeededNoise(1),
    )
    result, words = shown(protocol, Bowls(), monkeypatch)
    assert result.privacy is not None
    assert result.price is not None
    event = result.price.event
    costs = [compose([event] * n, delta=result.privacy["delta"]).epsilon for n in (1, 1, 2, 2)]
    assert [f"epsilon {cost:.3g} (seeded noise, not private)" for cost in costs] == [
        line.split(", ", 2)[2] for line in words
    ]


def test_progress_goes_on_where_a_run_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(study(budget=3), Bowls(noise_std=0.1), seed=3, out=tmp_path / "run")
    best = max(row["y"] for row in first.records)
    result, words = shown(
        study(), Bowls(noise_std=0.1), monkeypatch, out=tmp_path / "run", resume=True
    )
    assert len(words) == 1
    assert words[0] == f"3 of 3 replied, best {max(row['y'] for row in result.records):.4g}"
    assert max(row["y"] for row in result.records) >= best


def test_progress_is_silent_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    run(study(), Bowls(), seed=3)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_books_of_a_round_that_was_not_saved_are_cut_back(tmp_path: Path) -> None:
    """Killed between the books and the save: the round comes again, and is counted once."""
    out = tmp_path / "run"
    expected = run(study(budget=3), Bowls(), seed=3, out=out)
    extra = [{**row, "round": 5} for row in expected.rounds[-3:]]
    with (out / "rounds.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in extra)
        file.write('{"round": 5, "age')
    again = run(study(budget=3), Bowls(), seed=3, out=out, resume=True)
    assert again.rounds == expected.rounds
    assert (out / "rounds.jsonl").read_text().count("\n") == len(expected.rounds)


def test_a_hub_of_an_earlier_release_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(study(budget=3), Bowls(), seed=3, out=out)
    (out / "server" / "log").rename(out / "server" / "record")
    with pytest.raises(
        ProtocolError, match=r"of an earlier release, .*: continue it with that release"
    ):
        run(study(budget=3), Bowls(), seed=3, out=out, resume=True)


def test_two_hubs_do_not_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(study(budget=3), Bowls(), seed=3, out=out)
    with hub_log(out), pytest.raises(ProtocolError, match="open already"):
        run(study(budget=3), Bowls(), seed=3, out=out, resume=True)
    run(study(budget=3), Bowls(), seed=3, out=out, resume=True)


def test_resume_with_another_problem_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    strategy = Strategy(own="random", prior_until=0)
    first = SyntheticGPAgents(2, seed=0)
    run(FTS(budget=1, strategy=strategy, every=1), first, seed=0, out=tmp_path / "run")
    with pytest.raises(ProtocolError, match="another problem"):
        run(
            FTS(budget=2, strategy=strategy, every=1),
            SyntheticGPAgents(2, seed=1),
            seed=0,
            out=tmp_path / "run",
            resume=True,
        )


def _bowl(shift: float, X: Tensor) -> Tensor:
    return -(X - 0.3 - shift).square().sum(dim=-1, keepdim=True)


def test_sites_tell_the_trust_that_their_outcomes_have_earned(tmp_path: Path) -> None:
    space = SearchSpace((Parameter.real("u", 0.0, 1.0), Parameter.real("v", 0.0, 1.0)))
    objectives = {name: partial(_bowl, shift) for name, shift in (("a", 0.0), ("b", 0.1))}
    options: dict[str, Any] = {"space": space, "seed": 0, "progress": False}
    result = run(FTS(budget=5), objectives, out=tmp_path / "run", **options)
    assert list(result.trust) == ["a", "b"]
    assert all(0 < trust < 1 for trusts in result.trust.values() for trust in trusts)
    assert len(result.trust["a"]) == 2  # of three messages the first was made before any came
    assert RunResult.load(tmp_path / "run").trust == result.trust
    assert run(FTS(budget=5), objectives, workers=2, **options).trust == result.trust
    assert run(FTS(budget=5).alone(), objectives, **options).trust == {}


def test_trusts_are_known_before_the_end_and_after_a_crash(tmp_path: Path) -> None:
    calls: list[float] = []

    def objective(X: Tensor) -> Tensor:
        calls.append(float(X.sum()))
        if len(calls) == 9:
            raise KeyboardInterrupt
        return X.square().sum(dim=-1, keepdim=True)

    space = SearchSpace((Parameter.real("x", 0.0, 1.0),))
    sites = dict.fromkeys(("a", "b"), objective)
    options: dict[str, Any] = {"space": space, "seed": 0, "progress": False, "out": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        run(FTS(budget=5), sites, **options)
    before = RunResult.so_far(tmp_path).trust
    assert before["a"]
    result = run(FTS(budget=5), sites, resume=True, **options)
    whole = run(FTS(budget=5), sites, **{**options, "out": None})
    assert {name: trusts[: len(before[name])] for name, trusts in result.trust.items()} == before
    assert result.trust["b"] == whole.trust["b"]


def test_a_seed_changes_first_points_unless_the_study_says_which() -> None:
    def starts(study: FTS, seed: int) -> Tensor:
        result = run(study, {"a": fast, "b": fast}, seed=seed, space=SPACE, progress=False)
        return torch.cat([result.history(name)[0] for name in ("a", "b")])

    first, fixed = FTS(budget=2), FTS(budget=2, design_seed=5)
    assert torch.equal(starts(first, 3), starts(first, 3))
    assert not torch.equal(starts(first, 3), starts(first, 4))
    assert torch.equal(starts(first, 5), starts(fixed, 4))
    with pytest.raises(InputDataError, match="design_seed <= 2,147,483,647, got -1"):
        starts(FTS(budget=2, design_seed=-1), 0)
