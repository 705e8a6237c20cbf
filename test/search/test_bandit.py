"""The bandit's rule: which arm a sum of records leads to, and what it says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, UpperConfidenceBound
from botorch.exceptions.errors import InputDataError
from botorch.generation import MaxPosteriorSampling
from botorch.optim import optimize_acqf
from torch import Tensor

from botorch_fed.acquisition import missed, private_ucb_width
from botorch_fed.aggregation.stream import MAX_NUMBER, parameters_model, signal_to_noise
from botorch_fed.errors import MessageError
from botorch_fed.federation.agent import AgentState
from botorch_fed.federation.points import spread_design
from botorch_fed.federation.terms import Terms, View
from botorch_fed.models import (
    AdditiveFeatures,
    BasisGP,
    FeatureMap,
    KLFeatures,
    QuadratureFourierFeatures,
    StationaryKernel,
    Summary,
    WeightPosterior,
    noise_norm_bound,
    summarize,
)
from botorch_fed.privacy import RecordStatistic
from botorch_fed.rng import generator
from botorch_fed.run import run
from botorch_fed.search.bandit import (
    MAX_OUTCOME,
    BanditSearch,
    SumPosterior,
    read_sum,
)
from botorch_fed.search.releases import Parameters
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import PrivateUCB
from botorch_fed.test_functions import Camelback, KernelBandit
from test.aggregation.bandits import (
    ARMS,
    NOISE_VAR,
    PHI,
    SCALE,
    SEEDED,
    SQUARE,
    TRUSTS,
    D,
    Desk,
    Federation,
    M,
    hill,
    many,
    parameters,
    played,
    sets,
    stream_of,
    study,
    terms_of,
)
from test.cases import uniform


def search_of(terms: Terms) -> BanditSearch:
    assert isinstance(terms.search, BanditSearch)
    return terms.search


def total_of(terms: Terms, found: Parameters | None, phi: FeatureMap = PHI) -> Summary:
    """What a release says about the weights."""
    stream: Any = terms.aggregation
    assert found is not None
    return read_sum(search_of(terms), phi, stream.meaning(terms, found))[0]


def floored(gram: Tensor, floor: float) -> Tensor:
    values, Q = torch.linalg.eigh(gram)
    return (Q * values.clamp(min=floor)) @ Q.mT


# ------------------------------------------------------------------ how a release is read


def test_a_release_is_read_with_a_floor_a_shift_or_the_noise_of_its_moment() -> None:
    std = 0.7
    found = parameters(noise_std=std)
    statistic = RecordStatistic(num_features=M, outcome_bound=2.0)
    gram, moment = statistic.gram_and_moment(found.values, noise_var=NOISE_VAR, outputscale=SCALE)
    unit = SCALE / NOISE_VAR
    height = 8 * std * math.sqrt(M / 2) * unit
    total = total_of(terms_of(), found)
    assert torch.allclose(total.gram, floored(gram, height), atol=1e-9)
    assert torch.equal(total.moment, moment)
    total = total_of(terms_of(psd="shift"), found)
    upsilon = std / math.sqrt(2) * (2 * math.sqrt(M) + 2 * math.sqrt(math.log(2 * 4 / 0.05)))
    shifted = gram + 2 * upsilon * unit * torch.eye(M).double()
    assert torch.allclose(total.gram, shifted, atol=1e-9)
    # Noise t in the moment: G' = G (G + t^2 I)^-1 G.
    t = std * math.sqrt(SCALE) / NOISE_VAR / (math.sqrt(2) / 2)
    total = total_of(terms_of(inflate=True), found)
    G = floored(gram, height)
    smaller = G @ torch.linalg.solve(G + t**2 * torch.eye(M).double(), G)
    assert torch.allclose(total.gram, smaller, rtol=1e-8, atol=1e-8)
    exact = total_of(terms_of(), parameters())
    assert torch.equal(
        exact.gram,
        statistic.gram_and_moment(parameters().values, noise_var=NOISE_VAR, outputscale=SCALE)[0],
    )


def test_a_shift_that_is_too_small_once_is_followed_by_a_floor() -> None:
    values = torch.zeros(D).double()
    values[:M] = -1e4  # noise that comes once in a lifetime
    found = Parameters(1, values, 0.5, 3)
    model = parameters_model(terms_of(psd="shift"), found)
    with torch.no_grad():
        variance = model.posterior(ARMS).variance
    assert bool((variance <= PHI(ARMS).square().sum(dim=-1, keepdim=True) * (1 + 1e-9)).all())


@pytest.mark.parametrize("trust", TRUSTS)
def test_anybody_may_have_the_model(trust: str) -> None:
    federation = Federation(study(trust, budget=5))
    federation.drive()
    terms, end = federation.server.terms, federation.end
    before = parameters_model(terms, federation.server.start().parameters)
    with torch.no_grad():
        prior = before.posterior(ARMS)
        assert torch.allclose(prior.mean, torch.zeros(9, 1).double())
        expected = PHI(ARMS).square().sum(dim=-1, keepdim=True)
        assert torch.allclose(prior.variance, expected, atol=1e-10)
    model = parameters_model(terms, end.parameters)
    public = parameters_model(terms_of(trust, budget=5), end.parameters)
    with torch.no_grad():
        assert torch.equal(model.posterior(ARMS).mean, public.posterior(ARMS).mean)
        assert bool((model.posterior(ARMS).variance <= expected * (1 + 1e-9)).all())
    for acquisition in (
        UpperConfidenceBound(model, beta=0.25),
        LogExpectedImprovement(model, best_f=0.5),
    ):
        point, _ = optimize_acqf(acquisition, SQUARE.bounds, q=1, num_restarts=2, raw_samples=16)
        assert point.shape == (1, 2)
    chosen = MaxPosteriorSampling(model, replacement=False)(ARMS, num_samples=2)
    assert chosen.shape == (2, 2)


def test_any_feature_map_will_do() -> None:
    from test.cases import MAPS

    for make in MAPS.values() if isinstance(MAPS, dict) else MAPS:
        phi: FeatureMap = make()
        if phi.input_dim != 2:
            continue
        federation = Federation(study("joint", budget=3, feature_map=phi, noise_multiplier=0.5))
        federation.drive()
        noiseless = Federation(study("none", budget=3, feature_map=phi))
        noiseless.drive()
        rounds = noiseless.played()
        X = torch.cat([pair[0] for found in rounds for _, pair in sorted(found.items())])
        Y = torch.cat([pair[1] for found in rounds for _, pair in sorted(found.items())])
        total: Summary = summarize(phi, X, Y, noise_var=NOISE_VAR, noise="iid")
        found = total_of(noiseless.server.terms, noiseless.end.parameters, phi)
        assert torch.allclose(found.gram, total.gram, atol=1e-8 * float(total.gram.abs().max()))
        assert torch.allclose(
            found.moment, total.moment, atol=1e-8 * float(total.moment.abs().max())
        )


def test_the_signal_beside_the_noise() -> None:
    assert signal_to_noise(None) is None
    assert signal_to_noise(parameters()) is None
    loud = Parameters(1, torch.full((D,), 10.0).double(), 1.0, 5)
    assert signal_to_noise(loud) == pytest.approx(math.sqrt(99))
    assert signal_to_noise(Parameters(1, torch.zeros(D).double(), 1.0, 5)) == 0.0


# ------------------------------------------------------------------ which arm


@pytest.mark.parametrize("noise_std", [0.0, 0.5])
def test_expected_improvement_is_that_over_the_best_mean(noise_std: float) -> None:
    made, found = study(acquisition="ei", decision_sets=many), parameters(noise_std=noise_std)
    model = parameters_model(terms_of(acquisition="ei"), found)
    arms = many("ann", 2)
    with torch.no_grad():
        best = model.posterior(arms).mean.max()
        value = LogExpectedImprovement(model, best_f=best)(arms.unsqueeze(-2))
    assert torch.equal(played(made, found)[0], arms[value.argmax()])


@pytest.mark.parametrize("noise_std", [0.0, 0.3])
def test_the_theorems_width_is_that_of_the_shifted_matrix(noise_std: float) -> None:
    options: dict[str, Any] = {"psd": "shift", "norm_bound": 1.5}
    terms, found = terms_of(**options), parameters(noise_std=noise_std)
    horizon = stream_of(study(**options).server(SQUARE, ("ann",))).horizon
    statistic = RecordStatistic(num_features=M, outcome_bound=2.0)
    ridge = NOISE_VAR / SCALE
    gram, _ = statistic.gram_and_moment(found.values, noise_var=1.0)
    V, bounds = gram + ridge * torch.eye(M).double(), {}
    truncation = found.count - float(gram.trace())
    if noise_std:
        upsilon = noise_norm_bound(noise_std, M, horizon=horizon, failure=0.05)
        V = V + 2 * upsilon * torch.eye(M).double()
        reach = math.sqrt(M) + math.sqrt(2 * math.log(40 * horizon))
        largest = noise_std / statistic.moment_scale * reach
        bounds = {
            "gram_noise_bound": upsilon,
            "moment_noise_bound": largest / math.sqrt(upsilon),
        }
        truncation += M * upsilon  # of 3 Υ a direction, 2 Υ are the shift
    width = private_ucb_width(
        V,
        t=found.count,
        truncation=min(max(truncation, 0.0), found.count),
        norm_bound=1.5 * math.sqrt(SCALE),
        noise_std=math.sqrt(NOISE_VAR),
        noise_var=ridge,
        failure=0.05,
        **bounds,
    )
    model, arms = parameters_model(terms, found), many("ann", 2)
    with torch.no_grad():
        values = UpperConfidenceBound(model, beta=width**2)(arms.unsqueeze(-2))
        values = values + 1.5 * missed(PHI, arms).sqrt()
    point = played(study(decision_sets=many, **options), found)
    assert torch.equal(point[0], arms[values.argmax()])


@pytest.mark.parametrize("multiplier", [None, 0.02])
def test_the_theorems_bound_covers_what_the_features_miss(multiplier: float | None) -> None:
    """Through the protocol, of a function of norm one that the features know in part."""
    phi = KLFeatures(PHI.base, PHI.projection[:, :2])
    whole, m = phi.base, phi.num_features
    known = phi.projection @ generator(0, "known").normal(m, 1)
    beyond = generator(1, "beyond").normal(whole.num_features, 1)
    beyond = beyond - phi.projection @ (phi.projection.mT @ beyond)
    weights = 0.3 * known / known.norm() + 0.95 * beyond / beyond.norm()

    def outcomes(X: Tensor) -> Tensor:
        return SQUARE.outcome.from_public(whole(X).detach() @ weights)

    trust = "none" if multiplier is None else "joint"
    options: dict[str, Any] = {"psd": "shift", "norm_bound": 1.0, "budget": 60, "feature_map": phi}
    federation = Federation(
        study(trust, noise_multiplier=multiplier, decision_sets=many, **options),
        objective=lambda name: outcomes,
    )
    end = federation.drive()
    X = uniform(400, 2, seed=5)
    terms = federation.server.hub.terms
    said = stream_of(federation.server).meaning(terms, end.parameters)
    search = search_of(terms)
    posterior = SumPosterior(search, phi, said, *read_sum(search, phi, said))
    with torch.no_grad():
        mean, std = posterior.predict(X)
        error = (mean - (whole(X) @ weights).squeeze(-1)).abs()
        bound = posterior.score(None, generator(0, "none"), SQUARE)(X)
    assert float(missed(phi, X).max()) > 0.2
    assert bool((error <= bound - mean).all())
    if multiplier is None:  # without the two terms of the truncation it does not
        ridge = NOISE_VAR / SCALE
        width = private_ucb_width(
            ridge * (torch.eye(m).double() + posterior.total.gram),
            t=said.parameters.count,
            norm_bound=math.sqrt(SCALE),
            noise_std=math.sqrt(NOISE_VAR),
            noise_var=ridge,
            failure=0.05,
        )
        assert not bool((error <= width * std).all())


def test_many_dimensions_of_an_additive_function_are_searched_one_by_one() -> None:
    """In eight dimensions 20 starts of a gradient search do not find what coordinates do."""
    dim = 8
    bounds = torch.tensor([[0.0], [1.0]]).double()
    base = QuadratureFourierFeatures.from_kernel(
        StationaryKernel(math.inf, [0.15]), bounds, tol=1e-3
    )
    line = torch.linspace(0, 1, 100).double()[:, None]
    phi = AdditiveFeatures([KLFeatures.from_map(base, line, num_features=8)] * dim)
    space = SearchSpace(tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(dim)))
    X = uniform(400, dim, seed=3)
    Y = torch.sin(9 * X).sum(dim=-1, keepdim=True)
    total = summarize(phi, X, Y, noise_var=0.01)
    made = study(exploration=0.0, feature_map=phi, decision_sets=None)
    terms = made.terms(space, ("ann",))
    stream: Any = terms.aggregation
    known = SumPosterior(
        search_of(terms),
        phi,
        stream.meaning(terms, parameters()),
        total,
        WeightPosterior.from_total(total),
    )
    none = torch.zeros(0, dim).double()
    view = View(terms, "ann", 0, none, none[:, :1], none, none, n=0, t=3)
    point = known.action(space, None, view)
    grid = torch.linspace(0, 1, 2001).double()[:, None]
    weights = known.posterior.mean.split(8)
    best = sum(float((phi.maps[i](grid) @ weights[i]).max()) for i in range(dim))
    assert float(known.predict(point)[0]) == pytest.approx(best, abs=1e-3)


def test_a_thompson_sample_is_a_draw_of_the_posterior_scaled_by_exploration() -> None:
    options: dict[str, Any] = {"acquisition": "thompson", "exploration": 0.7}
    found = parameters(noise_std=0.5)
    total = total_of(terms_of(**options), found)
    L = torch.linalg.cholesky(torch.eye(M).double() + total.gram)
    arms, chosen = many("ann", 2), set()
    for seed in range(20):
        z = generator(seed, "score", 2).normal(1, M).mT
        mean = torch.cholesky_solve(total.moment, L)
        w = mean + 0.7 * torch.linalg.solve_triangular(L.mT, z, upper=True)
        point = played(study(decision_sets=many, **options), found, seed=seed)
        assert torch.equal(point[0], arms[int((PHI(arms) @ w).argmax())])
        chosen.add(point.numpy().tobytes())
    assert len(chosen) > 1


@pytest.mark.parametrize("acquisition", ["ucb", "thompson", "ei"])
def test_on_the_cube_the_maximum_is_found(acquisition: str) -> None:
    options: dict[str, Any] = {"acquisition": acquisition, "exploration": 1.0}
    found = parameters(noise_std=0.1)
    point = played(study(decision_sets=None, **options), found)
    model = parameters_model(terms_of(**options), found)
    grid = torch.cartesian_prod(
        torch.linspace(0, 1, 60).double(), torch.linspace(0, 1, 60).double()
    )
    if acquisition == "thompson":
        total = total_of(terms_of(**options), found)
        L = torch.linalg.cholesky(torch.eye(M).double() + total.gram)
        z = generator(0, "score", 2).normal(1, M).mT
        w = torch.cholesky_solve(total.moment, L) + torch.linalg.solve_triangular(
            L.mT, z, upper=True
        )
        values, value = PHI(grid) @ w, PHI(point) @ w
    elif acquisition == "ucb":
        score = UpperConfidenceBound(model, beta=1.0)
        with torch.no_grad():
            values, value = score(grid.unsqueeze(-2)), score(point)
    else:
        reference = torch.quasirandom.SobolEngine(2, scramble=False).draw(512, dtype=torch.float64)
        with torch.no_grad():
            best = model.posterior(reference).mean.max()
            improvement = LogExpectedImprovement(model, best_f=best)
            values, value = improvement(grid.unsqueeze(-2)), improvement(point)
    assert float(value) >= float(values.max()) - 1e-6


def test_without_a_release_and_between_ties_arms_are_uniform() -> None:
    # Exploration 0 and moments 0: all arms are worth the same.
    arms = ARMS[:5]
    made = study(exploration=0.0, candidates=arms)
    nothing = Parameters(1, torch.zeros(D).double(), 1.0, 0)
    said = made.server(SQUARE, ("ann", "bob")).hub.terms
    for found in (None, nothing):
        counts = torch.zeros(5)
        for seed in range(500):
            counts += (arms == played(made, found, seed=seed, said=said)).all(dim=-1)
        # 100 each, standard deviation 9: five of them.
        assert bool((counts - 100).abs().max() <= 45), counts


def test_an_unreadable_release_leaves_an_agent_with_a_uniform_arm() -> None:
    values = torch.zeros(D).double()
    values[:M] = -1e6  # of a server without noise: no sum of squares
    made = study("none", candidates=ARMS)
    assert torch.equal(played(made, Parameters(1, values, 0.0, 3)), played(made, None))


@pytest.mark.parametrize("trust", ["joint", "public", "none"])
def test_on_the_whole_cube_points_are_those_that_can_be_played(trust: str) -> None:
    space = SearchSpace((Parameter.integer("n", 1, 4), Parameter.real("C", 1e-2, 1e2)))
    options: dict[str, Any] = {} if trust == "none" else {"epsilon": 10.0}
    made = PrivateUCB(budget=3, trust=trust, **options)  # type: ignore[arg-type]
    result = run(made, {"a": hill, "b": hill}, seed=0, space=space)
    for row in result.records:
        X = torch.tensor([row["x"]]).double()
        assert torch.allclose(space.snap(X), X, atol=1e-12)


def test_arms_of_a_decision_set_are_played_as_they_are() -> None:
    """An arm need not lie on the grid of integers: its owner can play it."""
    space = SearchSpace((Parameter.integer("n", 1, 4), Parameter.real("C", 0.0, 3.0)))
    point = played(study(), None, space=space)
    assert bool((sets("ann", 2) == point).all(dim=-1).any())
    assert not torch.equal(space.snap(point), point)


# ------------------------------------------------------------------ what it says


def test_a_record_is_what_was_played_and_what_came_of_it() -> None:
    desk = Desk(study())
    X = desk.plays()
    said = desk.says(X, hill(X))
    assert said is not None
    assert torch.equal(said, torch.cat([X[0], SQUARE.outcome.to_public(hill(X))[0]]))
    assert (len(desk.state.X), len(desk.state.Y)) == (0, 0)


def test_a_failed_action_has_the_worst_outcome_there_is() -> None:
    desk = Desk(study())
    X = desk.plays()
    state: AgentState = desk.agent.tell(desk.state, X, hill(X) * math.nan)
    state, reply = desk.agent.reply(state)
    assert torch.equal(reply.values, torch.cat([X[0], torch.tensor([-MAX_OUTCOME]).double()]))
    search_of(terms_of()).check(terms_of(), reply.values)
    assert (state.used, len(state.failed)) == (1, 0)


@pytest.mark.parametrize("late", [False, True])
def test_nothing_but_the_action_of_the_round_is_said(late: bool) -> None:
    desk = Desk(study())
    X = desk.plays()
    if late:  # told after the round, and before the next
        desk.state = desk.agent.tell(desk.state, X, hill(X))
    desk.receives(t=2)
    assert not desk.agent.defers
    assert (desk.agent.wants(desk.state), desk.agent.left(desk.state, 0)) == (True, 1)
    assert desk.agent.ask(desk.state, pending=X) is None  # one action at a time
    assert desk.agent.reply(desk.state)[1].values is None
    Z = desk.agent.ask(desk.state)
    assert isinstance(Z, Tensor)
    said = desk.says(Z, hill(Z))
    assert said is not None
    assert torch.equal(said[:-1], Z[0])


def test_results_that_exist_already_cannot_be_attached() -> None:
    desk = Desk(study())
    with pytest.raises(InputDataError, match="evaluated in its rounds"):
        desk.agent.attach(desk.state, ARMS, hill(ARMS))


def test_a_used_budget_is_an_empty_reply() -> None:
    desk = Desk(study("local"))
    desk.state = replace(desk.state, used=4)
    desk.receives()
    assert desk.agent.ask(desk.state) is None
    state, reply = desk.agent.reply(desk.state)
    assert reply.values is None
    assert (state.aggregation.sent, state.aggregation.ledger.releases) == (0, 0)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    "options",
    [
        {"acquisition": "pi"},
        {"psd": "hope"},
        {"psd": "shift", "inflate": True},
        {"norm_bound": 1.0},
        {"norm_bound": 1.0, "psd": "shift", "acquisition": "ei"},
        {"norm_bound": -1.0},
        {"noise_var": 0.0},
        {"exploration": -1.0},
        {"height": -1.0},
        {"height": math.nan},
    ],
)
def test_rules_that_there_are_not_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        BanditSearch(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"q": 2},
        {"num_initial": 2},
        {"num_initial": 1, "default": {"a": 0.5, "b": 0.5}},
        {"data": {"ann": (ARMS, hill(ARMS))}},
        {"initial_design": spread_design(SQUARE, ("ann",), 2)},
        {"active": ("ann",)},
    ],
)
def test_a_bandit_plays_one_action_in_each_of_its_rounds(options: dict[str, Any]) -> None:
    with pytest.raises(InputDataError, match="leave"):
        study(**options).server(SQUARE, ("ann", "bob"))


def test_an_agent_says_what_is_wrong_with_its_arms() -> None:
    for arms in (ARMS[:0], ARMS + 1):
        with pytest.raises(InputDataError, match="candidates"):
            Desk(study(candidates=arms))
    with pytest.raises(InputDataError, match="decision_sets"):
        study(candidates=ARMS, decision_sets=sets)
    with pytest.raises(InputDataError, match="decision set of round 1"):
        played(study(decision_sets=lambda name, t: ARMS * 2), None, t=1)


def test_numbers_that_no_statistic_has_do_not_leave() -> None:
    assert MAX_NUMBER == 1e15
    huge = Parameters(1, torch.full((D,), MAX_NUMBER).double(), 1.0, 1)
    played(study(candidates=ARMS), huge)


GOOD = torch.tensor([0.5, 0.5, 0.0]).double()


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v[1:],
        lambda v: v.float(),
        lambda v: v + 0.6,
        lambda v: v * math.nan,
        lambda v: v[None],
        lambda v: torch.cat([v[:2], v[2:] + math.inf]),
        lambda v: torch.cat([v[:2], v[2:] * math.nan]),
    ],
)
def test_what_is_no_record_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    terms = terms_of()
    terms.search.check(terms, GOOD)
    terms.search.check(terms, torch.cat([GOOD[:2], GOOD[2:] - 1e9]))  # it will be clipped
    with pytest.raises(MessageError):
        terms.search.check(terms, change(GOOD))


# ------------------------------------------------------------------ is it any good


def test_a_bandit_with_privacy_beats_random_play() -> None:
    # 300 actions: random play has a mean regret of 0.59 an action against the best arm.
    problem = KernelBandit(num_agents=1, seed=0)
    arms = problem.decision_sets(301)
    result = run(
        PrivateUCB(budget=300, epsilon=10.0, noise=SEEDED, decision_sets=lambda name, t: arms[t]),
        problem,
        seed=0,
    )
    best = problem.values(arms[1:]).amax(dim=-1)
    found = torch.tensor([row["true"] for row in result.records]).double()
    random = (best - problem.values(arms[1:]).mean(dim=-1)).sum()
    assert float((best - found).sum()) < 0.5 * float(random)


def test_camelback_with_public_actions() -> None:
    problem = Camelback(num_agents=1)
    made = PrivateUCB(
        budget=200,
        trust="public",
        epsilon=10.0,
        noise_var=0.04,
        candidates=problem.arms,
        noise=SEEDED,
    )
    result = run(made, problem, seed=0)
    regrets = [row["regret"] for row in result.records]
    random = 1 - float(problem.values(problem.arms).mean())
    assert sum(regrets) < 0.6 * 200 * random
    assert len(regrets) == 200


def test_the_model_of_a_release_needs_a_bandit() -> None:
    from botorch_fed.studies import FTS

    terms = FTS(budget=3).terms(SQUARE, ("ann",))
    with pytest.raises(InputDataError, match="one posterior for all"):
        parameters_model(terms, None)
    assert isinstance(parameters_model(terms_of(), None), BasisGP)
