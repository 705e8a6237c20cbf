"""An agent's step on its own data: fitted when it pays, the same from the same stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from benchmarks.papers.published.own_gp import PaperStrategy
from botorch_fed.acquisition import Constant, ThompsonSampling, weight_path
from botorch_fed.errors import NumericalError
from botorch_fed.federation.points import (
    check_points,
    dealt_design,
    first_points,
    spread_design,
    tensor_hash,
)
from botorch_fed.models import OwnHyperparameters, default_hyperparameters, own_gp
from botorch_fed.models.warp import LogWarp
from botorch_fed.rng import generator
from botorch_fed.search import local
from botorch_fed.search.local import OwnStrategy, expected_improvement, random_point
from botorch_fed.space import Parameter, SearchSpace
from test.cases import normal, random_fourier, uniform

SQUARE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
RATIO = SearchSpace((Parameter.real("C", 1e-3, 1.0), Parameter.real("b", 0.0, 1.0)))
LOG = SearchSpace((Parameter.real("C", 1e-3, 1.0, scale="log"), Parameter.real("b", 0.0, 1.0)))
SMALL = OwnStrategy(num_raw=64, num_restarts=4, num_features=64)
NONE = torch.zeros(0, 2).double()


def hill(X: Tensor) -> Tensor:
    return 1 - 6 * (X - 0.3).square().sum(dim=-1, keepdim=True)


def history(n: int) -> tuple[Tensor, Tensor]:
    X = uniform(n, 2, seed=n)
    return X, hill(X) + 0.02 * normal(n, 1, seed=n)


def refit(
    strategy: OwnStrategy, n: int, known: OwnHyperparameters | None = None, **options: Any
) -> OwnHyperparameters | None:
    arguments = {"seed": 0, "name": "ann", **options}
    X, Y = history(12)
    return strategy.refit(arguments.pop("space", SQUARE), X[:n], Y[:n], known, **arguments)


# ------------------------------------------------------------------ hyperparameters


def test_nothing_is_fitted_for_nothing() -> None:
    assert refit(SMALL, 0) is None
    assert refit(replace(SMALL, own="random"), 5) is None
    known = refit(SMALL, 5)
    assert known is not None
    assert refit(SMALL, 0, known) is known
    assert refit(SMALL, 5, known) is known


def test_an_agent_is_not_stuck_when_a_fit_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = refit(SMALL, 4)

    def broken(*_: Any, **__: Any) -> OwnHyperparameters:
        raise NumericalError("beyond all scales")

    monkeypatch.setattr(local, "fit_own_gp", broken)
    assert refit(SMALL, 12, known) is known
    fallback = refit(SMALL, 4)
    assert fallback is not None
    assert torch.equal(fallback.lengthscale, default_hyperparameters(2).lengthscale)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == 2 * ["agent 'ann' keeps its old hyperparameters"]  # and no data


def test_an_outcome_beyond_all_scales_leaves_a_model() -> None:
    X, Y = history(6)
    Y[2] = 1e30
    own = SMALL.refit(SQUARE, X, Y, None, seed=0, name="ann")
    assert own is not None
    model = SMALL.model(SQUARE, X, Y, own)
    with torch.no_grad():
        assert bool(torch.isfinite(model.posterior(X).mean).all())


# ------------------------------------------------------------------ the warp


def test_the_warp_is_for_ratios_on_a_linear_scale() -> None:
    assert SMALL.log_warp(SQUARE).identity
    assert SMALL.log_warp(LOG).identity
    assert torch.equal(SMALL.log_warp(RATIO).offsets, RATIO.log_offsets)
    assert RATIO.log_offsets.any()
    assert replace(SMALL, warp=False).log_warp(RATIO).identity


def test_a_warped_model_is_the_model_of_warped_points() -> None:
    X, Y = history(8)
    own = SMALL.refit(RATIO, X, Y, None, seed=0, name="ann")
    assert own is not None
    warp = LogWarp(RATIO.log_offsets)
    warped = warp(X)
    flat = SMALL.refit(SQUARE, warped, Y, None, seed=0, name="ann")
    assert flat is not None
    assert torch.equal(own.lengthscale, flat.lengthscale)
    x = uniform(20, 2, seed=3)
    with torch.no_grad():
        found = SMALL.model(RATIO, X, Y, own).posterior(x).mean
        expected = own_gp(warped, Y, own).posterior(warp(x)).mean
    torch.testing.assert_close(found, expected)


# ------------------------------------------------------------------ a step


@pytest.mark.parametrize("own", ["thompson", "ei"])
def test_a_step_is_a_function_of_its_stream(own: Any) -> None:
    strategy = replace(SMALL, own=own)
    X, Y = history(8)
    known = refit(strategy, 8)
    assert known is not None

    def step(seed: int) -> Tensor:
        model = strategy.model(SQUARE, X, Y, known)
        stream = generator(seed, "point", 1)
        acquisition = strategy.acquisition(model, X, NONE, stream)
        return strategy.maximizer(acquisition, SQUARE, X, candidates=None, stream=stream)

    first = step(0)
    torch.manual_seed(99)
    assert torch.equal(step(0), first)
    assert not torch.equal(step(1), first)
    assert first.shape == (1, 2)
    assert bool(((first >= 0) & (first <= 1)).all())
    assert float(torch.cdist(first, X).min()) >= strategy.min_distance


def test_distance_is_kept_where_it_is_asked_for() -> None:
    phi = random_fourier()
    acquisition = ThompsonSampling(weight_path(phi, normal(phi.num_features)))
    near = replace(SMALL, min_distance=0.0)
    best = near.maximizer(acquisition, SQUARE, NONE, candidates=None, stream=generator(0))
    again = near.maximizer(acquisition, SQUARE, best, candidates=None, stream=generator(0))
    assert torch.equal(again, best)
    far = replace(SMALL, min_distance=0.2)
    other = far.maximizer(acquisition, SQUARE, best, candidates=None, stream=generator(0))
    assert float((other - best).norm()) >= 0.2
    # A list has no distances: its best point stays the best.
    points = torch.cat([uniform(5, 2), best])
    chosen = far.maximizer(acquisition, SQUARE, best, candidates=points, stream=generator(0))
    assert torch.equal(chosen, best)


def test_expected_improvement_counts_what_the_query_has_chosen() -> None:
    X, Y = history(8)
    known = refit(SMALL, 8)
    assert known is not None
    model = SMALL.model(SQUARE, X, Y, known)
    alone = expected_improvement(model, X, NONE)
    with torch.no_grad():
        best = model.posterior(X).mean.max()
        assert torch.equal(torch.as_tensor(alone.best_f), best)
        x = uniform(64, 1, 2, seed=4)
        top = x[int(alone(x).argmax())]
        after = expected_improvement(model, X, top)
        assert float(after(top.unsqueeze(0))) < float(alone(top.unsqueeze(0)))


@pytest.mark.parametrize("candidates", [None, uniform(7, 2, seed=1)], ids=["cube", "list"])
def test_random_points_are_uniform(candidates: Tensor | None) -> None:
    points = torch.cat([random_point(SQUARE, candidates, generator(s)) for s in range(700)])
    assert points.shape == (700, 2)
    assert points.dtype == torch.float64
    if candidates is None:
        assert bool(((points >= 0) & (points <= 1)).all())
        assert float((points.mean(dim=0) - 0.5).abs().max()) < 5 * (1 / 12 / 700) ** 0.5
        return
    counts = (points.unsqueeze(1) == candidates).all(dim=-1).double().sum(dim=0)
    assert float(counts.sum()) == 700
    assert float((counts - 100).abs().max()) < 5 * (700 / 7 * 6 / 7) ** 0.5


# ------------------------------------------------------------------ where evaluations fail


def published(failed: Tensor | None, own: str, **options: Any) -> Tensor:
    X, Y = history(8)
    strategy = replace(SMALL, own=own)
    known = strategy.refit(SQUARE, X, Y, None, seed=0, name="ann")
    assert known is not None
    model, stream = strategy.model(SQUARE, X, Y, known), generator(0, "point")
    acquisition = strategy.acquisition(model, X, NONE, stream)
    return strategy.maximizer(
        acquisition, SQUARE, X, candidates=None, stream=stream, failed=failed, **options
    )


@pytest.mark.parametrize("own", ["thompson", "ei"])
def test_repeated_failures_move_the_best_point(own: str) -> None:
    best = published(None, own)
    assert torch.equal(published(NONE, own), best)
    assert torch.equal(published(torch.ones(1, 2).double(), own), best)  # an accident elsewhere
    steps = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).double()
    failed = torch.cat([best, best + 0.04 * steps])
    for succeeded in (None, history(8)[0]):
        moved = published(failed, own, succeeded=succeeded)
        assert float((moved - best).norm()) > 0.04


def test_a_failed_point_is_not_asked_again() -> None:
    space = SearchSpace((Parameter.integer("n", 1, 3), Parameter.choice("kind", ["a", "b"])))
    every = space.snap(uniform(100, space.dim)).unique(dim=0)
    strategy = replace(SMALL, min_distance=0.0)
    phi = random_fourier()
    acquisition = ThompsonSampling(weight_path(phi, normal(phi.num_features)))
    for left in range(len(every)):
        failed = torch.cat([every[:left], every[left + 1 :]])
        rest = every[left : left + 1]
        for candidates in (None, every):
            random = random_point(space, candidates, generator(left), failed)
            assert torch.equal(space.snap(random), rest)
    points = uniform(6, 2)
    for count in (1, 5):
        found = strategy.maximizer(
            acquisition, SQUARE, NONE, candidates=points, stream=generator(0), failed=points[:count]
        )
        assert bool((points[count:] == found).all(dim=-1).any())
    # With nothing else left, one of them.
    random = random_point(space, None, generator(0), every)
    assert bool((every == space.snap(random)).all(dim=-1).any())


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"own": "greedy"}, "own must be"),
        ({"num_raw": 10, "num_restarts": 11}, "num_restarts"),
        ({"num_restarts": 0}, "num_restarts"),
        ({"num_features": 33}, "even"),
        ({"num_features": 0}, "even"),
        ({"min_distance": -0.1}, "min_distance"),
        ({"min_distance": 1.0}, "min_distance"),
        ({"schedule": Constant(0.0)}, r"\(0, 1\]"),
        ({"schedule": lambda t: 1 / t}, "decrease"),
    ],
)
def test_bad_settings(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputDataError, match=why):
        OwnStrategy(**options)


def test_points_are_checked() -> None:
    check_points(uniform(3, 2), 2, "data")
    check_points(NONE, 2, "data")
    for X, why in (
        (uniform(3, 1), "n x 2"),
        (uniform(2), "n x 2"),
        (uniform(3, 2) + 1, "unit cube"),
        (torch.full((1, 2), torch.nan), "unit cube"),
    ):
        with pytest.raises(InputDataError, match=why):
            check_points(X, 2, "data")


def test_hashes_of_tensors() -> None:
    X = uniform(4, 2)
    assert tensor_hash(None) == ""
    assert tensor_hash(X) == tensor_hash(X.clone()) == tensor_hash(X.mT.contiguous().mT)
    assert tensor_hash(X) != tensor_hash(X + 1e-15)


def test_designs_begin_in_the_centre_and_go_different_ways() -> None:
    """Together the agents have the points of one sequence, which covers the middle evenly."""
    names = ("ann", "bob", "cem", "dee")
    designs = spread_design(SQUARE, names, 5)
    centre = torch.full((1, 2), 0.5).double()
    assert tuple(designs) == names
    assert all(torch.equal(design[:1], centre) for design in designs.values())
    others = torch.cat([design[1:] for design in designs.values()])
    assert len(torch.unique(others, dim=0)) == 16
    cells = ((others - 0.25) * 8).floor().long()  # 16 Sobol points in a 4 x 4 grid: one in each
    assert len({tuple(cell) for cell in cells.tolist()}) == 16
    assert bool(((cells >= 0) & (cells < 4)).all())
    first = spread_design(SQUARE, names, 2)  # a shorter design is the beginning of a longer one
    assert all(torch.equal(first[name], designs[name][:2]) for name in names)
    wide = spread_design(SQUARE, names, 5, width=1.0)
    assert torch.allclose(wide["bob"], centre + 2 * (designs["bob"] - centre))
    assert not torch.equal(spread_design(SQUARE, names, 5, seed=1)["bob"], designs["bob"])
    assert torch.equal(spread_design(SQUARE, names, 1)["dee"], centre)


def test_a_design_can_be_evaluated() -> None:
    space = SearchSpace((Parameter.integer("k", 1, 4), Parameter.choice("c", ("x", "y", "z"))))
    for design in spread_design(space, ("ann", "bob"), 6).values():
        assert torch.equal(space.snap(design), design)


def test_a_design_of_discrete_points_has_none_twice() -> None:
    space = SearchSpace((Parameter.integer("k", 1, 3), Parameter.choice("c", ("x", "y"))))
    default = space.to_unit([{"k": 2, "c": "y"}])
    begin = first_points(space, 1, 2, 6, default=default)
    dealt, wide = dealt_design(space, 0, 2, 6), spread_design(space, ("ann", "bob"), 6, width=1.0)
    for design in (begin, dealt, *wide.values()):
        assert len({row.tobytes() for row in design.numpy()}) == 6
    assert torch.equal(begin[:1], default)
    for count in range(1, 6):  # a shorter design is the beginning of a longer one
        assert torch.equal(dealt_design(space, 0, 2, count), dealt[:count])
    assert dealt_design(space, 0, 2, 9).shape == (9, space.dim)  # there are six


@pytest.mark.parametrize("settings", [{"num_points": 0}, {"width": 0.0}, {"width": 1.5}])
def test_designs_that_there_are_not(settings: dict[str, Any]) -> None:
    with pytest.raises(InputDataError, match="at least one point"):
        spread_design(SQUARE, ("ann",), **{"num_points": 3, **settings})


def test_the_papers_model_is_refitted_every_few_queries() -> None:
    paper = PaperStrategy(warp=False, refit_every=3)
    known = refit(paper, 4)
    assert known is not None
    assert (known.mean, known.num_data) == (0, 4)
    assert len(set(known.lengthscale.tolist())) == 1
    assert refit(paper, 6, known) is known
    later = refit(paper, 7, known)
    assert later is not None
    assert later.num_data == 7
    again = refit(paper, 7, known)
    assert again is not None
    assert torch.equal(again.lengthscale, later.lengthscale)  # restarts are seeded
    assert refit(paper, 7, known, seed=1) is not None
    with pytest.raises(InputDataError, match="refit_every"):
        PaperStrategy(refit_every=0)
