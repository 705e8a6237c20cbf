"""Advice before a run: its numbers are those by which the methods decide."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.acquisition import Polynomial
from botorch_fed.acquisition.theory import information_gain, theory_beta, theory_condition
from botorch_fed.advice import Advice, Facts, Section, advise, facts_of
from botorch_fed.cli import main
from botorch_fed.models import StationaryKernel
from botorch_fed.models.earned_prior import reference_points
from botorch_fed.privacy import PrefixSum, epsilon, noise_multiplier_for
from botorch_fed.search.noisy import CLOSE, EARLY
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB

SQUARE = SearchSpace(
    (Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)), Outcome(0.5, 0.5)
)
SETTINGS: dict[str, Any] = {"agents": 40, "budget": 20, "num_features": 12, "epsilon": 2.0}


def column(section: Section, name: str) -> list[Any]:
    place = section.columns.index(name)
    return [row[place] for row in section.rows]


def row(section: Section, name: str) -> dict[str, Any]:
    (found,) = (one for one in section.rows if one[0] == name)
    return dict(zip(section.columns, found, strict=True))


@pytest.fixture(scope="module")
def advice() -> Advice:
    return advise(**SETTINGS)


def test_all_published_schedules_violate_the_condition_at_round_two(advice: Advice) -> None:
    section = advice.section("schedules")
    assert column(section, "violated at t") == [2, 2, 2]
    assert len(section.rows) == 3
    facts = advice.facts
    report = theory_condition(
        Polynomial(0.5),
        beta=lambda t: theory_beta(
            t,
            bound=1.0,
            noise_std=math.sqrt(facts.noise_var),
            information_gain=lambda n: information_gain(12, n, noise_var=facts.noise_var),
            delta=0.1,
        ),
        num_points=1000,
        num_rounds=20,
    )
    assert column(section, "ratio there")[0] == pytest.approx(float(report.ratios[1]))
    used = sum(1 - Polynomial(0.5)(t) for t in range(1, 21))
    assert column(section, "by messages")[0] == pytest.approx(used)


def test_releases_cost_what_the_accountant_says(advice: Advice) -> None:
    section = advice.section("releases")
    for name, rate, count in (("as it is", 1.0, 2), ("q = 0.25", 0.25, 2), ("8 releases", 1.0, 8)):
        found = row(section, name)
        z = noise_multiplier_for(epsilon=2.0, delta=1e-5, sampling_rate=rate, num_releases=count)
        assert found["z"] == z
        spent = epsilon(noise_multiplier=z, sampling_rate=rate, num_releases=count, delta=1e-5)
        assert found["epsilon"] == spent.epsilon <= 2.0
    assert all(one <= 2.0 for one in column(section, "epsilon"))


def test_the_signal_is_that_of_messages_that_are_simulated(advice: Advice) -> None:
    """Means of 40 unit vectors with a common part, noise of z over 40 in each of 12 numbers."""
    found = row(advice.section("releases"), "as it is")
    draws = torch.randn(20_000, 41, 12, generator=torch.Generator().manual_seed(0)).double()
    draws = draws / draws.norm(dim=-1, keepdim=True)
    for agreement, name in ((EARLY, "early"), (CLOSE, "late")):
        common, own = math.sqrt(agreement), math.sqrt(1 - agreement)
        mean = common * draws[:, 0] + own * draws[:, 1:].mean(dim=1)
        signal = float(mean.square().sum(dim=-1).mean())
        noise = 12 * (found["z"] / 40) ** 2
        assert found[name] == pytest.approx(math.sqrt(signal / noise), rel=0.02)


def test_a_study_says_its_facts_and_its_sections() -> None:
    study = DPFTSDE(budget=20, epsilon=2.0)
    known = facts_of(study, SQUARE, 30)
    terms = study.server(SQUARE, tuple(f"s{i}" for i in range(30))).hub.terms
    plan: Any = terms.aggregation.plan(terms)  # type: ignore[attr-defined]
    assert known["num_features"] == terms.feature_map.num_features
    assert (known["dim"], known["budget"], known["epsilon"]) == (2, 20, 2.0)
    assert (known["releases"], known["delta"]) == (len(plan.planned), plan.delta)
    found = advise(study, space=SQUARE, agents=30)
    assert [one.name for one in found.sections] == ["schedules", "features", "releases"]
    now = row(found.section("releases"), "as it is")
    assert now["z"] == pytest.approx(plan.multiplier, rel=1e-6)
    assert now["early"] == pytest.approx(plan.outlook.ratio(EARLY), rel=1e-3)
    kinds: list[tuple[Any, list[str]]] = [
        (FTS(budget=9), ["schedules", "features"]),
        (FedGP(budget=9), ["schedules", "features", "support"]),
        (PrivateUCB(budget=9, epsilon=1.0), ["features", "bandit"]),
    ]
    for other, expected in kinds:
        found = advise(other, space=SQUARE, agents=4)
        assert [one.name for one in found.sections] == expected


def test_support_sets_miss_the_residual_of_the_kernel() -> None:
    section = advise(lengthscale=0.4, sections=["support"]).section("support")
    kernel, points = StationaryKernel(math.inf, [0.4, 0.4]), reference_points(2)
    for size, worst, mean, numbers in section.rows:
        assert isinstance(size, int)
        Z = points[:size]
        K = kernel(Z, Z) + 1e-10 * torch.eye(size).double()
        q = (kernel(points, Z) * torch.linalg.solve(K, kernel(Z, points)).mT).sum(dim=-1)
        assert worst == pytest.approx(float((1 - q).max()), abs=1e-4)
        assert mean == pytest.approx(float((1 - q).mean()), abs=1e-4)
        assert numbers == size * (size + 3) // 2
    misses = column(section, "on average")
    assert misses == sorted(misses, reverse=True)


def test_a_bandits_noise_and_horizons_are_those_of_its_mechanism() -> None:
    section = advise(agents=8, budget=128, epsilon=1.0, sections=["bandit"]).section("bandit")
    values = dict(section.rows)
    z = noise_multiplier_for(
        epsilon=1.0, delta=1e-5, sampling_rate=1.0, num_releases=1, adjacency="replace-one"
    )

    def std(horizon: int) -> float:
        made = PrefixSum(num_features=1, outcome_bound=2.0, horizon=horizon, noise_multiplier=z)
        return made.noise_std(1024)

    assert values["noise in a number of the sum of 1,024 records"] == std(1024)
    later = values["noise if 100 times the rounds are declared, over that"]
    assert later == pytest.approx(std(102_400) / std(1024), rel=0.02)
    assert values["actions that can be known so well"] == 1024 // int(
        str(values["plays until an action is known to 0.1"])
    )


def test_words_have_every_number_and_sentence(advice: Advice) -> None:
    text = str(advice)
    for section in advice.sections:
        assert section.title in text
        assert all(sentence in text for sentence in section.says)
    assert "violated by 1 - 1/sqrt(t) from t = 2 on" in text


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"agents": 0}, "agents must be"),
        ({"budget": 1}, "two evaluations"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "epsilon or noise_multiplier"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"noise_var": 0.0}, "noise_var"),
        ({"sections": ["regret"]}, "no sections"),
        ({"sections": ["releases"]}, "needs epsilon"),
        ({"rounds": 3}, "knows no facts"),
    ],
)
def test_refusals(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        advise(**wrong)


def test_without_noise_nothing_is_said_of_it() -> None:
    found = advise()
    assert [one.name for one in found.sections] == ["schedules", "features", "support"]
    assert found.facts == Facts()
    with pytest.raises(InputDataError, match="no section 'bandit'"):
        found.section("bandit")


STUDY = """
objective = "here:f"
agents = ["a", "b", "c", "d", "e", "f", "g", "h"]
budget = 12
seed = 0

[protocol]
name = "dp-fts-de"

[space]
x = { type = "real", lower = 0.0, upper = 1.0 }
y = { type = "real", lower = 0.0, upper = 1.0 }

[privacy]
epsilon = 4.0
delta = 1e-5
"""


def test_the_command_line_says_the_same(tmp_path: Path, capsys: Any) -> None:
    assert main(["advise", "--agents", "40", "--budget", "20", "--section", "support"]) == 0
    assert "Support sets" in capsys.readouterr().out
    arguments = ["advise", "--budget", "20", "--agents", "40", "--features", "12"]
    assert main([*arguments, "--epsilon", "2", "--section", "features", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = advise(**SETTINGS, sections=["features"]).section("features")
    assert document["sections"][0]["rows"] == [list(one) for one in expected.rows]
    assert main(["advise", "--agents", "0"]) == 2
    assert "agents must be" in capsys.readouterr().err


def test_a_study_file_says_its_facts(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    assert main(["advise", str(path), "--section", "features", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert (facts["agents"], facts["dim"], facts["budget"], facts["epsilon"]) == (8, 2, 12, 4.0)
    assert main(["advise", str(path), "--epsilon", "1", "--section", "features", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["epsilon"] == 1.0
