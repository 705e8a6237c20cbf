"""Bandit problems: the kernel bandit's law, and the exact ranges of the rescaled functions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.test_functions import synthetic
from botorch.test_functions.base import BaseTestProblem
from torch import Tensor

from benchmarks.problems import Michalewicz, StyblinskiTang
from botorch_fed.rng import generator
from botorch_fed.test_functions import (
    Camelback,
    FederatedTestProblem,
    KernelBandit,
)
from botorch_fed.test_functions.bandits import _draw_expansion
from test.cases import uniform

SEEDS = range(20)


def _slow(problem: KernelBandit, X: Tensor) -> Tensor:
    """The expansion by its formula, unclipped."""
    distances = torch.cdist(4 * X - 2, problem.centres)
    return torch.exp(-distances.square() / 2) @ problem.weights


def _in_disc(X: Tensor) -> Tensor:
    return (4 * X - 2).norm(dim=-1) <= 2


def _disc(count: int, seed: int = 0) -> Tensor:
    X = uniform(count, 2, seed=seed)
    return X[_in_disc(X)]


# ------------------------------------------------------------------ the kernel bandit


def test_values_are_the_clipped_expansion() -> None:
    problem = KernelBandit(3, seed=4)
    X = uniform(500, 2)
    expected = _slow(problem, X).clamp(0, 1)
    torch.testing.assert_close(problem.values(X), expected, rtol=0, atol=1e-14)
    assert torch.equal(problem.evaluate(2, X), problem.values(X))
    assert torch.equal(problem.values(X.reshape(5, 100, 2)), problem.values(X).reshape(5, 100))
    names = problem.space.from_unit(X[:1])[0]
    torch.testing.assert_close(torch.tensor(list(names.values())).double(), 4 * X[0] - 2)
    negative = KernelBandit(seed=2)  # it has two negative weights
    assert float(_slow(negative, X).min()) < 0
    assert float(negative.values(X).min()) == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_expansion_is_in_its_class_and_high_on_enough_of_the_disc(seed: int) -> None:
    problem = KernelBandit(seed=seed)
    assert problem.centres.shape == (4, 2)
    assert bool((problem.centres.norm(dim=-1) <= 2).all())
    assert float(problem.weights.abs().sum()) <= 1
    X = _disc(40_000)  # about 31,400 points: a share of 0.005 has a deviation of 0.0004
    share = float((problem.values(X) >= 0.8).double().mean())
    assert share > 0.003


def test_draws_have_the_stated_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the demand for high values the first draw is kept: thousands of them are examined."""
    from botorch_fed.test_functions import bandits

    monkeypatch.setattr(bandits, "HIGH", -2.0)
    draws = [_draw_expansion(generator(seed, "function")) for seed in range(1000)]
    centres = torch.cat([centres for centres, _ in draws])
    weights = torch.stack([weights for _, weights in draws])
    n = len(draws)
    # Squared radius of the disc's uniform law: U(0, 4). Sum of sizes: Beta(4, 1). Each within 4.5
    # standard errors.
    squares = centres.square().sum(dim=-1)
    assert float(squares.mean()) == pytest.approx(2, abs=4.5 * 4 / math.sqrt(12 * 4 * n))
    assert float(centres.mean(dim=0).abs().max()) < 4.5 / math.sqrt(4 * n)
    radii = weights.abs().sum(dim=-1)
    assert float(radii.mean()) == pytest.approx(0.8, abs=4.5 * math.sqrt(4 / 150 / n))
    assert float((radii**4).mean()) == pytest.approx(0.5, abs=4.5 / math.sqrt(12 * n))
    # Exchangeable, of both signs: E|w| = 1/5 with variance 2/75.
    sizes, signs = weights.abs().mean(dim=0), (weights > 0).double().mean(dim=0)
    assert float((sizes - 0.2).abs().max()) < 4.5 * math.sqrt(2 / 75 / n)
    assert float((signs - 0.5).abs().max()) < 4.5 / math.sqrt(4 * n)


@pytest.mark.parametrize("arms", [2, 25, 400])
def test_one_good_arm_and_the_others_are_not(arms: int) -> None:
    problem = KernelBandit(2, seed=1)
    sets = problem.decision_sets(64, arms, agent=1)
    assert sets.shape == (64, arms, 2)
    assert bool(_in_disc(sets).all())
    values = problem.values(sets)
    assert bool(((values >= 0.8).sum(dim=-1) == 1).all())
    assert bool(((values <= 0.6).sum(dim=-1) == arms - 1).all())


def test_decision_sets_are_those_of_the_single_rounds() -> None:
    problem = KernelBandit(3, seed=7)
    sets = problem.decision_sets(1100, agent=2)  # more than are filled at once
    for t in (0, 1, 500, 1023, 1024, 1099):
        assert torch.equal(sets[t], problem.decision_set(2, t))
    assert torch.equal(problem.decision_sets(40, agent=2), sets[:40])
    assert not torch.equal(problem.decision_sets(1), problem.decision_sets(1, agent=1))
    assert not torch.equal(sets[0], sets[1])
    assert problem.decision_sets(0).shape == (0, 25, 2)
    assert torch.equal(KernelBandit(seed=7).decision_sets(3), problem.decision_sets(3))
    # An arm more changes no other arm, only the order.
    few, many = problem.decision_set(0, 5, arms=10), problem.decision_set(0, 5, arms=11)
    assert {tuple(x) for x in few.tolist()} < {tuple(x) for x in many.tolist()}


def test_arms_are_found_however_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches of eight candidates nearly every set takes many, each its own number."""
    from botorch_fed.test_functions import bandits

    monkeypatch.setattr(bandits, "_CANDIDATES", 8)
    problem = KernelBandit(seed=2)
    share = float((problem.values(_disc(100_000)) >= 0.8).double().mean())
    assert share < 0.01
    sets = problem.decision_sets(100)
    values = problem.values(sets)
    assert bool(((values >= 0.8).sum(dim=-1) == 1).all())
    assert bool(((values <= 0.6).sum(dim=-1) == 24).all())
    assert torch.equal(torch.stack([problem.decision_set(0, t) for t in range(20)]), sets[:20])


def test_arms_are_shuffled_and_uniform_in_their_regions() -> None:
    problem = KernelBandit(seed=1)
    sets = problem.decision_sets(2000, 5)
    values = problem.values(sets)
    good = values >= 0.8
    places = good.double().sum(dim=0)
    chi_square = float((places - 400).square().sum() / 400)
    assert chi_square < 23.5  # 1e-4 of four degrees of freedom
    inside = _disc(200_000)
    at = problem.values(inside)
    for mine, region in ((sets[good], inside[at >= 0.8]), (sets[~good], inside[at <= 0.6])):
        spread = region.std(dim=0)
        error = (mine.mean(dim=0) - region.mean(dim=0)) / spread
        bound = 4.5 * math.sqrt(1 / len(mine) + 1 / len(region))
        assert float(error.abs().max()) < bound
        torch.testing.assert_close(mine.std(dim=0), spread, rtol=0.08, atol=0)


def test_random_play() -> None:
    """Regret over 1,024 rounds of 25 arms; 606 over 200 seeds, with a deviation of 59 per seed."""
    regrets = []
    for seed in SEEDS:
        problem = KernelBandit(seed=seed)
        values = problem.values(problem.decision_sets(128))
        choice = (generator(seed, "random play").uniform(128, 1) * 25).long()
        regret = (values.amax(dim=-1) - values.gather(1, choice).squeeze(-1)).sum()
        regrets.append(8 * float(regret))
    # Of a seed's function 59, of its 128 rounds and choices about 8 * 0.26 * sqrt(128) = 24.
    assert sum(regrets) / 20 == pytest.approx(606, abs=4 * math.hypot(59, 24) / math.sqrt(20))


@pytest.mark.parametrize("seed", SEEDS)
def test_optimum_of_the_disc(seed: int) -> None:
    problem = KernelBandit(3, seed=seed)
    best = float(problem.values(problem.x_opt))
    assert bool(_in_disc(problem.x_opt))
    assert problem.optimal_values.tolist() == [best] * 3
    assert problem[1].optimal_value == best
    near = problem.x_opt + 1e-3 * (uniform(5000, 2, seed=seed) - 0.5)
    near = near[_in_disc(near)]
    far = _disc(40_000, seed=seed)
    assert float(problem.values(far).max()) <= best
    assert float(problem.values(near).max()) <= best + 1e-15
    x = problem.x_opt.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(_slow(problem, x.unsqueeze(0)).sum(), x)
    assert float(slope.norm()) < 1e-7  # inside the disc, as for all these seeds


def test_optimum_on_the_edge_of_the_disc() -> None:
    """A weight that pushes the peak out of the disc: then the best point is on its edge."""
    problem = KernelBandit(seed=0)
    problem.centres = torch.tensor([[1.9, 0.0], [1.2, 0.0], [0.0, 1.9], [0.0, -1.9]]).double()
    problem.weights = torch.tensor([0.6, -0.4, 0.0, 0.0]).double()
    best = 4 * problem.x_opt - 2
    torch.testing.assert_close(best, torch.tensor([2.0, 0.0]).double(), rtol=0, atol=1e-12)
    angles = torch.linspace(0, 2 * math.pi, 5001).double()[:, None]
    edge = (2 * torch.cat([angles.cos(), angles.sin()], dim=-1) + 2) / 4
    rim, inner = _slow(problem, edge), _slow(problem, _disc(50_000))
    top = float(_slow(problem, problem.x_opt.unsqueeze(0)))
    assert float(rim.max()) <= top + 1e-15
    assert float(inner.max()) < top


def test_rewards_are_coins() -> None:
    problem = KernelBandit(2, seed=3)
    X = problem.x_opt.expand(4000, 2)
    p = float(problem.values(problem.x_opt))
    rewards = problem.observe(0, X, generator(0, "rewards"))
    assert set(rewards.tolist()) == {0.0, 1.0}
    assert float(rewards.mean()) == pytest.approx(p, abs=4.5 * math.sqrt(p * (1 - p) / 4000))
    assert torch.equal(rewards, problem.observe(1, X, generator(0, "rewards")))
    dark = uniform(3000, 2)
    dark = dark[problem.values(dark) == 0]  # clipped: no reward there, ever
    assert not problem.observe(0, dark, generator(1, "rewards")).any()
    agent, again = problem[1], KernelBandit(2, seed=3)[1]
    first, second = agent(X), agent(X)
    assert torch.equal(first, again(X))
    assert not torch.equal(first, second)
    assert not torch.equal(first, problem[0](X))
    assert set(second.tolist()) == {0.0, 1.0}
    assert torch.equal(agent(X, noise=False), problem.values(X))
    public = problem.space.outcome.to_public(rewards)
    assert set(public.tolist()) == {-2.0, 2.0}


def test_repr_names_the_function() -> None:
    assert repr(KernelBandit(2, seed=5)) == "KernelBandit(agents=2, seed=5)"


def test_seeds_and_threads() -> None:
    problem, same, other = KernelBandit(seed=0), KernelBandit(seed=0), KernelBandit(seed=1)
    assert torch.equal(problem.centres, same.centres)
    assert torch.equal(problem.weights, same.weights)
    assert not torch.equal(problem.centres, other.centres)
    sets = problem.decision_sets(32)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(same.decision_sets(32), sets)
    finally:
        torch.set_num_threads(threads)


def test_speed() -> None:
    seconds = []
    for seed in range(3):
        start = time.process_time()
        KernelBandit(seed=seed).decision_sets(1024)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.0 * torch.get_num_threads()  # about 0.2 s on one core


# ------------------------------------------------------------------ functions of known range

RESCALED: dict[str, tuple[Callable[[], Any], BaseTestProblem, float, float, float]] = {
    # Ours, BoTorch's, smallest and largest value of BoTorch's, noise. Smallest values as published.
    "camelback": (
        lambda: Camelback(2),
        synthetic.SixHumpCamel(bounds=[(-2.0, 2.0), (-1.0, 1.0)]),
        -1.0316284535,
        86 / 15,
        0.1,
    ),
    "styblinski-tang": (
        lambda: StyblinskiTang(num_agents=2),
        synthetic.StyblinskiTang(dim=20, bounds=[(-4.0, 4.0)] * 20),
        -39.16616570377 * 20,
        200.0,
        0.02,
    ),
    "michalewicz": (
        lambda: Michalewicz(num_agents=2),
        synthetic.Michalewicz(dim=10),
        -9.6601517156,
        0.0,
        0.02,
    ),
}


@pytest.mark.parametrize("name", RESCALED)
def test_affine_in_the_function_that_botorch_has(name: str) -> None:
    build, reference, low, high, noise_std = RESCALED[name]
    problem: FederatedTestProblem = build()
    assert len(problem) == 2
    assert problem.dim == reference.dim
    assert problem.noise_std == problem[1].noise_std == noise_std
    X = uniform(300, problem.dim)
    lower, upper = reference.bounds
    expected = (high - reference.evaluate_true(lower + (upper - lower) * X)) / (high - low)
    values = problem.evaluate(1, X)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-9)
    rows = torch.tensor([list(point.values()) for point in problem.space.from_unit(X)])
    torch.testing.assert_close(rows.double(), lower + (upper - lower) * X, rtol=0, atol=1e-6)
    assert torch.equal(values, problem[0](X, noise=False))  # one function for all


@pytest.mark.parametrize("name", RESCALED)
def test_range_and_optimum(name: str) -> None:
    problem = RESCALED[name][0]()
    assert float(problem.values(problem.x_opt)) == 1.0
    assert float(problem.values(problem.x_worst)) == 0.0
    assert problem.optimal_values.tolist() == [1.0, 1.0]
    assert problem[0].optimal_value == 1.0
    for X in (uniform(20_000, problem.dim), (20 * uniform(5000, problem.dim, seed=1)).floor() / 19):
        values = problem.values(X.clamp(max=1))
        assert 0 <= float(values.min()) <= float(values.max()) <= 1
    # The unclipped function falls in every direction from the best point.
    scale = problem._upper - problem._lower
    best = problem._own_units(problem.x_opt)
    for size in (1e-2, 1e-4):
        around = best + size * scale * (uniform(500, problem.dim) - 0.5)
        assert float(problem._original(around).min()) >= float(problem._smallest) - 1e-13
    public = problem.space.outcome.to_public(torch.tensor([0.0, 0.5, 1.0]))
    assert public.tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("problem", [StyblinskiTang(7), Michalewicz(10), Michalewicz(30)])
def test_separable_ranges_per_variable(problem: Any) -> None:
    """On a fine grid each variable's term stays within its range and comes close to its ends."""
    lower, upper = float(problem._lower[0]), float(problem._upper[0])
    best, worst = (problem._own_units(x) for x in (problem.x_opt, problem.x_worst))
    grid = torch.linspace(lower, upper, 2**16 + 1, dtype=torch.float64)
    terms = problem._terms(grid.unsqueeze(-1).expand(-1, problem.dim))
    gap = terms.amin(dim=0) - problem._terms(best)
    # The minimum is half a step from the grid at most, where the term is flat: curvature h^2 / 8.
    assert float(gap.min()) > -1e-13
    assert bool((gap <= terms.diff(n=2, dim=0).abs().amax(dim=0) / 8 + 1e-13).all())
    assert float((terms.amax(dim=0) - problem._terms(worst)).abs().max()) < 1e-13


def test_stationary_to_the_last_digits() -> None:
    cubic = StyblinskiTang(3)._own_units(StyblinskiTang(3).x_opt)
    # 2 x^3 - 16 x + 5/2 = 0; its slope there is 35, so a residual of 1e-12 is 3e-14 in position.
    assert float((2 * cubic**3 - 16 * cubic + 2.5).abs().max()) < 1e-12
    assert cubic.tolist() == pytest.approx([-2.903534027771178] * 3, abs=1e-13)
    x = Michalewicz(10)._own_units(Michalewicz(10).x_opt)
    i = torch.arange(1, 11).double()
    a = i * x.square() / math.pi
    slope = x.cos() * a.sin() + x.sin() * 20 * a.cos() * 2 * i * x / math.pi
    assert float(slope.abs().max()) < 1e-10
    assert x[:2].tolist() == pytest.approx([2.20290552, math.pi / 2], abs=1e-8)


def test_camelback_arms() -> None:
    problem = Camelback()
    assert problem.arms.shape == (33 * 33, 2)
    assert len(problem.arms.unique(dim=0)) == 33 * 33
    for corner in ([0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]):
        assert bool((problem.arms == torch.tensor(corner)).all(dim=-1).any())
    rows = problem.space.from_unit(problem.arms)
    assert {row["x0"] for row in rows} == {-2 + k / 8 for k in range(33)}
    assert {row["x1"] for row in rows} == {-1 + k / 16 for k in range(33)}
    values = problem.values(problem.arms)
    # Random play over 10^4 rounds costs 3,308 against the best arm.
    assert 1e4 * float(values.max() - values.mean()) == pytest.approx(3308.4, abs=0.1)
    assert float(problem.values(1 - problem.x_opt)) == pytest.approx(1.0, abs=1e-14)
    assert Camelback(side=5).arms.shape == (25, 2)


def test_noise_is_normal() -> None:
    problem = Camelback(2)
    X = uniform(4000, 2)
    residual = problem.observe(1, X, generator(0, "noise")) - problem.values(X)
    assert float(residual.std()) == pytest.approx(0.1, rel=4.5 / math.sqrt(2 * 4000))
    quiet = Camelback(noise_std=0.0)
    assert torch.equal(quiet.observe(0, X, generator(0, "noise")), quiet.values(X))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KernelBandit(0, seed=0), "at least 1 agent, got 0"),
        (lambda: Camelback(0), "at least 1 agent, got 0"),
        (lambda: Camelback(side=1), "at least 2 arms per side, got 1"),
        (lambda: Camelback(noise_std=-0.1), "noise_std must be finite and not negative"),
        (lambda: StyblinskiTang(0), "1 to 100 variables, got 0"),
        (lambda: Michalewicz(101), "1 to 100 variables, got 101"),
        (lambda: Michalewicz(noise_std=math.nan), "noise_std must be finite and not negative"),
        (lambda: KernelBandit(seed=0).decision_set(0, 0, arms=1), "at least 2 arms, got 1"),
        (lambda: KernelBandit(seed=0).decision_set(0, -1), "t >= 0, got -1"),
        (lambda: KernelBandit(seed=0).decision_sets(-1), "horizon must not be negative, got -1"),
    ],
)
def test_bad_arguments(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        build()


@pytest.mark.parametrize("problem", [KernelBandit(2, seed=0), Camelback(2), Michalewicz(2, 2)])
def test_bad_agents_and_points(problem: Any) -> None:
    X = uniform(3, 2)
    for call in (
        lambda: problem[2],
        lambda: problem.evaluate(2, X),
        lambda: problem.observe(-1, X, generator(0)),
    ):
        with pytest.raises(IndexError, match=r"Agents are 0\.\.1, got"):
            call()
    with pytest.raises(InputDataError, match="1 of 3 points lie outside the unit cube"):
        problem.values(torch.cat([X[:2], X[:1] + 2]))
    with pytest.raises(InputDataError, match="Expected `n x 2` points"):
        problem.evaluate(0, X.unsqueeze(0))
    with pytest.raises(BotorchTensorDimensionError, match="`batch_shape x 2` points"):
        problem.values(uniform(3, 4))
    assert problem.values(X[0]).shape == ()


def test_no_decision_set_for_a_strange_agent() -> None:
    with pytest.raises(IndexError, match=r"Agents are 0\.\.1, got 2"):
        KernelBandit(2, seed=0).decision_set(2, 0)
