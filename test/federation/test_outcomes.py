"""Several outcomes through every part of a federation: sites, messages, sums, noise, results."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.exceptions.errors import InputDataError
from botorch.models.model_list_gp_regression import ModelListGP
from torch import Tensor

from botorch_fed import cli
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.engines.verbs import perform
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.models.earned_prior import PriorFunction, reference_features
from botorch_fed.privacy import mechanisms
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, make_agent, run
from botorch_fed.search.messages import Message, TransferRows
from botorch_fed.search.noisy import Average, NoisyTransfer, voice
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.released import Following
from botorch_fed.search.releases import Noisy
from botorch_fed.search.sums import BOUND, contribution
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import (
    Advice,
    TransferSearch,
    chebyshev,
    default_feature_map,
    first_prior,
    report_size,
)
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.log import FileLog, Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE, FTS, Federation, FedGP, PrivateUCB
from test.cases import uniform

SQUARE = (Parameter.real("x", 0.0, 1.0), Parameter.real("y", 0.0, 1.0))
ERROR = Outcome.objective("error", minimize=True)
SIZE = Outcome.constraint("size", upper=0.8)
BOUNDED = SearchSpace(SQUARE, outcomes=(ERROR, SIZE, Outcome.tracking("seconds")))
GAIN = Outcome.objective("gain", reference=-1.0)
FRONT = SearchSpace(SQUARE, outcomes=(replace(ERROR, reference=1.0), GAIN, SIZE))
NAMES = ("north", "south")
LEVELS = torch.linspace(0.0, 1.0, 21, dtype=torch.float64)
GRID = torch.cartesian_prod(LEVELS, LEVELS)  # a list of points is searched fast


def bounded(X: Tensor, shift: float = 0.0) -> Tensor:
    """Best outside of the bound on `size`, the sum of both inputs."""
    error = (X - 0.6 - shift).square().sum(dim=-1)
    return torch.stack([error, X.sum(dim=-1), 100 * X[:, 0] + shift], dim=-1)


def two(X: Tensor) -> dict[str, Tensor]:
    gain = -(X - 0.2).square().sum(dim=-1)
    return {"size": X.sum(dim=-1), "gain": gain, "error": (X - 0.6).square().sum(dim=-1)}


def ran(study: Federation, space: SearchSpace = BOUNDED, **options: Any) -> RunResult:
    problem = options.pop("problem", dict.fromkeys(NAMES, bounded if space is BOUNDED else two))
    study = replace(study, design_seed=0)
    return run(study, problem, space=space, seed=1, progress=False, **options)


def points(result: RunResult, site: str = "north") -> Tensor:
    return result.history(site)[0]


# ------------------------------------------------------------------ a site


def a_site(space: SearchSpace = BOUNDED, log: Any = None, objective: Any = None) -> Site:
    agent = make_agent(FTS(budget=8), "north", space, 0, MemoryBlobs())
    return Site("north", agent, objective, log=Log(SITE_EVENTS) if log is None else log)


def given(x: float, y: float = 0.1) -> dict[str, float]:
    return {"x": x, "y": y}


def values(*numbers: float) -> dict[str, float]:
    return dict(zip(("error", "size", "seconds"), numbers, strict=True))


def test_results_have_a_value_for_each_outcome(tmp_path: Path) -> None:
    log = FileLog(tmp_path, SITE_EVENTS)
    site = a_site(log=log)
    first = site.attach(given(0.1), values(0.5, 0.2, 9.0), values(0.1, 0.0, 1.0), label="first")
    assert (first.value, first.sem) == (0.5, 0.1)
    assert first.values == values(0.5, 0.2, 9.0)
    assert first.sems == values(0.1, 0.0, 1.0)
    best = site.attach(given(0.2), values(0.3, 0.8, 9.0))
    site.attach(given(0.9, 0.9), values(0.1, 1.8, 9.0))  # better, and too large
    assert site.best() == best
    assert [trial.id for trial in site.pareto()] == [best.id]
    assert torch.equal(site.state.Y[1], torch.tensor([-0.3, 0.8, 9.0], dtype=torch.float64))
    before = site.trials()
    log.close()
    assert a_site(log=FileLog(tmp_path, SITE_EVENTS)).trials() == before


def test_while_no_trial_meets_the_constraints_none_is_best() -> None:
    site = a_site()
    site.attach(given(0.9, 0.9), values(0.1, 1.8, 9.0))
    assert site.best() is None
    assert site.pareto() == []


def test_several_objectives_have_a_front_and_no_best() -> None:
    site = a_site(FRONT)
    for error, gain, size in ((0.5, -0.1, 0.1), (0.1, -0.5, 0.1), (0.6, -0.2, 0.1), (0, 0, 0.9)):
        site.attach(given(error), {"error": error, "gain": gain, "size": size})
    assert [trial.id for trial in site.pareto()] == [0, 1]
    assert all(trial.value is None for trial in site.trials())
    with pytest.raises(InputDataError, match=r"objectives \['error', 'gain'\]: use pareto"):
        site.best()
    status = perform(site, "status", {})
    assert status["best"] is None
    assert [trial["values"]["error"] for trial in status["pareto"]] == [0.5, 0.1]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (0.5, "Expected value as a mapping with each of .*'error', 'size', 'seconds'.*got float"),
        ({"error": 1.0, "size": 1.0}, r"each of .*'seconds'.*got \['error', 'size'\]"),
        ({**values(1, 1, 1), "mass": 1.0}, r"each of .*got \['error', 'mass', 'seconds', 'size'\]"),
        (values(1, 1, np.nan), "a trial without a value is answered by `fail`"),
        ({**values(1, 1, 1), "size": "big"}, "Expected value as a number"),
    ],
)
def test_values_that_do_not_fit_are_refused(value: Any, match: str) -> None:
    site = a_site()
    with pytest.raises(InputDataError, match=match):
        site.attach(given(0.5), value)
    with pytest.raises(InputDataError, match="Expected sem as a mapping"):
        site.attach(given(0.5), values(1, 1, 1), 0.1)
    assert site.trials() == []


def test_data_have_a_column_for_each_outcome() -> None:
    X = uniform(4, 2)
    result = ran(FTS(budget=5, candidates=GRID, data={"north": (X, bounded(X))}))
    assert len(result.history("north", given=True)[1]) == 9
    with pytest.raises(InputDataError, match=r"`4 x 3` tensor, a column for each of \['error'"):
        ran(FTS(budget=5, candidates=GRID, data={"north": (X, bounded(X)[:, :2])}))


def test_an_objective_that_forgets_an_outcome_is_broken() -> None:
    with pytest.raises(ProtocolError, match=r"values of .*'gain'"):
        ran(
            FTS(budget=5, candidates=GRID),
            FRONT,
            problem=dict.fromkeys(NAMES, lambda X: {"error": X.sum(-1)}),
        )
    with pytest.raises(ProtocolError, match=r"shape \(1, 3\), a column for each of"):
        ran(
            FTS(budget=5, candidates=GRID),
            problem=dict.fromkeys(NAMES, lambda X: bounded(X)[:, :2]),
        )


def test_a_failure_is_one_of_all_outcomes() -> None:
    def fails(X: Tensor) -> Tensor:
        Y = bounded(X)
        Y[X[:, 0] > 0.5, 2] = torch.nan  # of the tracked outcome alone
        return Y

    result = ran(STUDIES["fts"], problem={**dict.fromkeys(NAMES, bounded), "north": fails})
    rows = [row for row in result.records if row["agent"] == "north"]
    failed = [row for row in rows if row["x"][0] > 0.5]
    assert failed
    assert all((row["y"], row["status"]) == (None, "failed") for row in failed)
    assert len(result.history("north")[1]) == len(rows) - len(failed)
    frame = result.to_dataframe()
    assert int(frame["size"].isna().sum()) == len(failed)


# ------------------------------------------------------------------ every protocol

STUDIES: dict[str, Federation] = {
    "fts": FTS(budget=8, candidates=GRID),
    "fts-batch": FTS(budget=8, q=2, candidates=GRID),
    "fts-cube": FTS(budget=7),
    "fed-gp": FedGP(budget=8, channel="plain", candidates=GRID),
    "dp": DPFTSDE(budget=8, noise_multiplier=1e-3, min_reliability=0.0, candidates=GRID),
    "distributed": DPFTSDE(
        budget=8,
        trust="distributed",
        channel="plain",
        noise_multiplier=0.1,
        min_reliability=0.0,
        candidates=GRID,
    ),
    "parego": FTS(budget=8, strategy=TransferSearch(acquisition="parego"), candidates=GRID),
}


@cache
def once(name: str) -> RunResult:
    return ran(STUDIES[name])


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "parego"])
def test_the_best_point_within_a_bound_is_found(name: str) -> None:
    result = once(name)
    assert float(result.best("north")[-1]) < 0.15  # .08 at x = y = .4; of the starts .26
    best = result.best_parameters("north")
    assert float(best["x"]) + float(best["y"]) <= 0.8


@pytest.mark.parametrize("name", list(STUDIES))
def test_a_front_is_found(name: str) -> None:
    result = ran(STUDIES[name], FRONT)
    volumes = result.hypervolume("north", {"error": 1.0, "gain": -1.0})
    assert bool((volumes.diff() >= 0).all())
    assert float(volumes[-1]) > float(volumes[2]) + 0.05
    front = result.pareto("north")
    assert len(front) >= 2
    assert all(row["values"]["size"] <= 0.8 for row in front)


def test_sums_and_rows_say_the_same() -> None:
    torch.testing.assert_close(points(once("fts")), points(once("fed-gp")), atol=1e-2, rtol=0)


def test_a_run_goes_on_after_its_end(tmp_path: Path) -> None:
    ran(FTS(budget=5, candidates=GRID), out=tmp_path / "run")
    resumed = ran(STUDIES["fts"], out=tmp_path / "run", resume=True)
    assert torch.equal(points(resumed), points(once("fts")))
    saved = RunResult.load(tmp_path / "run")
    assert saved.space == BOUNDED
    assert torch.equal(saved.history("south")[1], resumed.history("south")[1])
    assert torch.equal(saved.best("south"), resumed.best("south"))


def test_what_is_only_recorded_decides_nothing() -> None:
    def other(X: Tensor) -> Tensor:
        Y = bounded(X)
        Y[:, 2] = torch.sin(50 * X[:, 1])
        return Y

    mixed = ran(STUDIES["fts"], problem={**dict.fromkeys(NAMES, bounded), "south": other})
    for name in NAMES:
        assert torch.equal(points(mixed, name), points(once("fts"), name))


def test_a_unit_of_one_site_changes_nothing_for_anybody() -> None:
    """The bound is in the federation's unit: the objective alone may be stretched."""

    def stretched(X: Tensor) -> Tensor:
        return bounded(X) * torch.tensor([1e3, 1.0, 1.0]) - torch.tensor([7e4, 0.0, 0.0])

    mixed = ran(STUDIES["fts"], problem={**dict.fromkeys(NAMES, bounded), "south": stretched})
    for name in NAMES:
        torch.testing.assert_close(
            points(mixed, name), points(once("fts"), name), atol=1e-3, rtol=0
        )


def test_constraints_of_points_and_outcomes_are_kept_together() -> None:
    space = replace(BOUNDED, constraints=("x <= 0.3",))
    result = ran(STUDIES["fts-cube"], space, problem=dict.fromkeys(NAMES, bounded))
    assert float(points(result)[:, 0].max()) <= 0.3 + 1e-9
    assert float(result.best("north")[-1]) < 0.14  # .1 at x = .3, y = .5


def test_botorchs_acquisition_functions_get_a_model_of_each_outcome() -> None:
    seen = []

    def nehvi(model: Any, tried: Tensor) -> Any:
        assert isinstance(model, ModelListGP)
        seen.append(model.num_outputs)
        return qLogNoisyExpectedHypervolumeImprovement(
            model, ref_point=[-1.0, -1.0, 0.0], X_baseline=tried, prune_baseline=True
        )

    study = FTS(budget=4, strategy=TransferSearch(acquisition=nehvi), candidates=GRID[::4])
    assert len(ran(study, FRONT).pareto("north")) > 0
    assert set(seen) == {3}


@pytest.mark.parametrize(
    ("study", "what"),
    [
        (FTS(budget=8, strategy=Strategy(), every=1), "ThompsonSearch"),
        (
            FTS(budget=8, strategy=Strategy(transfer="rgpe"), message="summary", every=1),
            "EnsembleSearch",
        ),
        (FTS(budget=8, message="mean"), "A message of kind 'mean'"),
        (FedGP(budget=8, channel="plain", search=SupportSearch()), "SupportSearch"),
        (FedGP(budget=8, channel="plain", search=RegionSearch()), "RegionSearch"),
        (DPFTSDE(budget=18, epsilon=2.0, strategy=Following()), "ReleaseSearch"),
        (PrivateUCB(budget=8, epsilon=1.0), "BanditSearch"),
    ],
)
def test_searches_for_one_outcome_refuse_several(study: Any, what: str) -> None:
    with pytest.raises(InputDataError, match=rf"{what} takes one outcome, .*'error'.*: use "):
        study.terms(BOUNDED, NAMES)


@pytest.mark.parametrize("kind", [FTS, FedGP, DPFTSDE])
def test_one_objective_has_no_weights_to_draw(kind: Any) -> None:
    parego = TransferSearch(acquisition="parego")
    options = {"search": parego} if kind is FedGP else {"strategy": parego}
    options |= {"epsilon": 2.0} if kind is DPFTSDE else {}
    with pytest.raises(InputDataError, match='"parego" is for several objectives'):
        kind(budget=8, **options).terms(BOUNDED, NAMES)
    with pytest.raises(InputDataError, match=r"must be a function or .parego., got 'ehvi'"):
        TransferSearch(acquisition="ehvi")


def test_many_inputs_have_no_summaries_unless_asked_for() -> None:
    space = SearchSpace(
        tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(8)), outcomes=BOUNDED.outcomes
    )
    study = FedGP(budget=8, channel="plain")
    terms = study.terms(space, NAMES)
    assert terms.search.size(terms) == 2 * report_size(terms.feature_map) + 1
    with pytest.raises(InputDataError, match="RelatedSum takes one outcome"):
        replace(study, common=True).terms(space, NAMES)


# ------------------------------------------------------------------ messages

SEARCH = TransferSearch()
PHI = default_feature_map(BOUNDED)


def test_a_report_has_a_part_for_each_modelled_outcome() -> None:
    X = uniform(9, 2)
    Y = BOUNDED.to_public(bounded(X))
    size = report_size(PHI)
    report = SEARCH.report(BOUNDED, PHI, X, Y, None)
    assert report is not None
    assert len(report) == 2 * size  # none of what is only recorded
    for k, part in enumerate(report.chunk(2)):
        alone = SEARCH.report(SearchSpace(SQUARE), PHI, X, Y[:, k : k + 1], None)
        assert torch.equal(part, alone)
    packed = contribution(PHI, SEARCH, BOUNDED, X, Y, None)
    assert len(packed) == 2 * size + 1
    silent = contribution(PHI, SEARCH, BOUNDED, X[:2], Y[:2], None)
    assert torch.equal(silent, torch.zeros(2 * size + 1).double())


def test_each_outcome_is_bounded_by_itself() -> None:
    terms = FTS(budget=5, candidates=GRID).terms(BOUNDED, NAMES)
    X = uniform(9, 2)
    good = SEARCH.report(BOUNDED, PHI, X, BOUNDED.to_public(bounded(X)), None)
    assert good is not None
    terms.search.check(terms, good)
    bad = good.clone()
    bad[-1] = 2.0  # the trust of the second outcome
    for message in (bad, good[:-1], torch.cat([good, good])):
        with pytest.raises(MessageError):
            terms.search.check(terms, message)
    loud = SEARCH.report(BOUNDED, PHI, X, BOUNDED.to_public(bounded(X)), None)
    assert loud is not None
    M = PHI.num_features
    assert float(loud[:M].abs().max()) <= BOUND


def prior(weights: Tensor) -> PriorFunction:
    made = PriorFunction.of_weights(PHI, weights)
    assert made is not None
    return made


def test_a_newcomer_begins_where_all_outcomes_are_said_to_be_good() -> None:
    one, other = (prior(generator(k, "prior").normal(PHI.num_features)) for k in (1, 2))
    X = uniform(50, 2, seed=3)
    joint = first_prior(BOUNDED, (Advice(one), Advice(other)), generator(0, "first"))
    assert joint is not None
    # An upper bound is met where the function is small.
    correlations = [np.corrcoef(joint(X), f(X))[0, 1] for f in (one, other)]
    assert correlations[0] > 0.3
    assert correlations[1] < -0.3
    free = SearchSpace(SQUARE, outcomes=(ERROR, Outcome.constraint("ph", lower=6, upper=8)))
    alone = first_prior(free, (Advice(one), Advice(other)), generator(0, "first"))
    assert alone is not None
    np.testing.assert_allclose(alone(X), one(X), atol=1e-9)
    assert first_prior(BOUNDED, (None, None), generator(0, "first")) is None


def test_the_chebyshev_sum_prefers_the_middle_to_one_end() -> None:
    Z = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.6, 0.6], [0.1, 0.1]]).double()
    sums = chebyshev(Z, torch.tensor([0.5, 0.5]).double())
    assert int(sums.argmax()) == 2
    assert int(chebyshev(Z, torch.tensor([0.95, 0.05]).double()).argmax()) == 1


def test_together_is_better_than_alone_while_evaluations_are_few() -> None:
    sites = {f"site{i}": (lambda X, i=i: bounded(X, 0.02 * i)) for i in range(6)}
    study = FTS(budget=6, candidates=GRID)
    both = [ran(one, problem=sites) for one in (study, study.alone())]
    # After the three first points, which are the same.
    curves = [torch.stack([r.best(n)[2:].clamp_max(1.0) for n in sites]).mean(dim=0) for r in both]
    assert curves[0][0] == curves[1][0]
    assert curves[0][1:].mean() < curves[1][1:].mean() - 0.03


# ------------------------------------------------------------------ noise


def noisy_search() -> Any:
    study = DPFTSDE(budget=8, noise_multiplier=1.0, min_reliability=0.0)
    return study, study.terms(BOUNDED, NAMES)


def test_a_message_of_all_outcomes_has_one_norm() -> None:
    study, terms = noisy_search()
    agent = study.agent("north", BOUNDED, 0, MemoryBlobs())
    state = agent.attach(agent.start(), X := uniform(6, 2), bounded(X))
    message = terms.search.message(agent._local_view(state))
    M = terms.feature_map.num_features
    assert message.shape == (2 * M,) == (terms.search.size(terms),)
    assert float(message.norm()) == pytest.approx(terms.search.norm(terms))
    first, second = (float(part.norm()) for part in message.chunk(2))
    assert first == pytest.approx(second)  # one voice for each outcome


def test_each_outcome_has_a_reliability_of_its_own() -> None:
    study, terms = noisy_search()
    agent = study.agent("north", BOUNDED, 0, MemoryBlobs())
    M = terms.feature_map.num_features
    weights = voice(terms.feature_map) * generator(0, "w").normal(M)
    weights = weights / weights.norm()
    total = torch.cat([weights, 0.05 * weights])  # agreement of the first outcome alone
    memory = Average(0, total, 1.0, 0.2 / M)
    release = Noisy(0, total.unsqueeze(0), torch.tensor([0.1]).double(), 30.0)
    view = replace(agent._local_view(agent.start()), memory=memory, release=release)
    first, second = terms.search._advice(view)
    assert second is None
    # Of a squared norm of 1 noise is .2, and what 30 messages of norm root 1/2 have by chance 1/60.
    values = reference_features(terms.feature_map) @ first.prior.weights
    assert float(values.std()) == pytest.approx((1 - 0.2 - 1 / 60) ** 0.5, rel=1e-6)
    assert TransferRows(messages=Message("own_mean")).many_outcomes


# A site's message is one vector x of all m outcomes, |x| <= c. Leaving the site out changes a sum
# by x, so its sensitivity is c, and noise of deviation z c in each of the m M numbers is one
# Gaussian mechanism of multiplier z: nothing is composed over outcomes. Clipping each outcome to c
# would make it c root m. Below that is measured: two runs whose noise is the same, with and without
# one site, differ by what this site has added.


@dataclass(frozen=True, kw_only=True)
class Voice(NoisyTransfer):
    """The default search, of which one site is loud or says nothing."""

    factor: float = 1.0

    def message(self, view: Any) -> Tensor | None:
        if view.name != "north":
            return super().message(view)
        return self.factor * super().message(view) if self.factor else None


def added(study: DPFTSDE, factor: float, clip_norm: float = 2.0) -> float:
    """The norm of what one site adds to a release, in clip norms."""
    names, X = (*NAMES, "west"), uniform(6, 2)
    sums = []
    for loudness in (factor, 0.0):
        search = Voice(factor=loudness, clip_norm=clip_norm, min_reliability=0.0)
        made = replace(
            study,
            data={name: (X, bounded(X)) for name in names},
            search=search,
            noise=InsecureSeededNoise(7),
        )
        blobs = MemoryBlobs()
        sites = [Site(n, made.agent(n, BOUNDED, 0, blobs), bounded) for n in names]
        state = drive(made.server(BOUNDED, names), InProcess(sites))
        sums.append(len(names) * state.released.values)
    return float((sums[0] - sums[1]).norm()) / clip_norm


ONE_RELEASE = DPFTSDE(
    budget=4, noise_multiplier=1.0, releases=(0,), min_reliability=0.0, candidates=GRID
)


@pytest.mark.parametrize("factor", [1.0, 50.0])
def test_a_site_changes_a_release_by_one_norm_for_all_outcomes(factor: float) -> None:
    assert added(ONE_RELEASE, factor) == pytest.approx(1.0, rel=1e-4)


def test_clipping_outcome_by_outcome_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_outcome(rows: Any, norm: float, agents: Any) -> Any:
        blocks = rows.reshape(len(rows), 2, -1)
        sizes = np.linalg.norm(blocks, axis=-1, keepdims=True)
        clipped = blocks * np.minimum(1.0, norm / np.maximum(sizes, 1e-300))
        return clipped.reshape(rows.shape), np.ones(len(rows))

    monkeypatch.setattr(mechanisms, "_clip_factors", by_outcome)
    assert added(ONE_RELEASE, 50.0) == pytest.approx(2**0.5, rel=1e-4)


def test_the_noise_is_that_of_one_outcome() -> None:
    """The same epsilon buys the same noise, however many outcomes a site has."""
    alone = SearchSpace(SQUARE, ERROR)
    promises = []
    for space in (alone, BOUNDED, FRONT):
        server = DPFTSDE(budget=8, epsilon=2.0, min_reliability=0.0).server(space, NAMES)
        account = server.privacy(server.start())
        promises.append((account["noise_multiplier"], account["promised_epsilon"]))
        dims = len(space.modelled) * server.terms.feature_map.num_features
        assert server.terms.search.size(server.terms) == dims
    assert len(set(promises)) == 1


# ------------------------------------------------------------------ the command line


class Door:
    """The site's own process, without the socket before it."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def perform(self, verb: str, arguments: Any) -> dict[str, Any]:
        return perform(self.site, verb, json.loads(json.dumps(arguments)))


def test_the_command_line_takes_values_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = a_site(FRONT)
    monkeypatch.setattr(cli, "_site", lambda arguments: Door(site))
    numbers = ("--value", "error=0.5", "--value", "gain=-1e-1", "--value", "size=0.25")
    assert cli.main(["site", "attach", "here", "x=0.5", "y=0.5", *numbers]) == 0
    assert site.trials()[0].values == {"error": 0.5, "gain": -0.1, "size": 0.25}
    assert "error = 0.5, gain = -0.1, size = 0.25" in capsys.readouterr().out
    assert cli.main(["site", "status", "here"]) == 0
    assert "No other trial beats these in all objectives: 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        (("error=low",), "expected VALUE or NAME=VALUE, got 'error=low'"),
        (("=3",), "expected VALUE or NAME=VALUE"),
        (("error=1", "error=2"), "An outcome has two values"),
        (("error=1", "2"), "Expected one VALUE, or NAME=VALUE for each"),
        (("1", "2"), "Expected one VALUE, or NAME=VALUE for each"),
    ],
)
def test_values_that_say_nothing_are_refused(
    numbers: tuple[str, ...], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["site", "tell", "nowhere", "3", *numbers]) == 2
    assert match in capsys.readouterr().err
