"""FBO-FedGP as published: its summaries, its order of clients, and its steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from benchmarks.papers.published.fbo_fedgp import (
    JITTER,
    PaperFedGP,
    Posterior,
    Trace,
    approximation_error,
    next_point,
    optimise,
)
from botorch_fed.models import BasisGP, InducingFeatures, StationaryKernel, summarize
from botorch_fed.models.support import sobol_support
from botorch_fed.space import Outcome, Parameter, SearchSpace
from test.cases import uniform

DIM, NOISE = 3, 1e-3
SPACE = SearchSpace(
    tuple(Parameter.real(f"x{j}", 0.0, 1.0) for j in range(DIM)), Outcome(0.5, 0.2, minimize=True)
)
KERNEL = StationaryKernel(math.inf, torch.full((DIM,), 0.4).double(), 1.0)
SMALL = PaperFedGP(support_size=6, lengthscale=0.4, noise_var=NOISE, num_raw=32)


def bowl(X: Tensor) -> Tensor:
    return (X - 0.3).square().sum(dim=-1, keepdim=True)


def firsts(clients: int, n: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(X, bowl(X)) for X in (uniform(n, DIM, seed=i) for i in range(clients))]


def played(settings: PaperFedGP, clients: int, *, rounds: int = 4, seed: int = 0) -> Trace:
    return optimise(
        settings, [bowl] * clients, firsts(clients), space=SPACE, rounds=rounds, seed=seed
    )


# ------------------------------------------------------------------ the posterior


def test_summed_summaries_are_the_sparse_process_of_pooled_data() -> None:
    """The dense PITC of all data, client by client in blocks."""
    basis = InducingFeatures(KERNEL, uniform(6, DIM, seed=9), jitter=JITTER)
    data = [(uniform(n, DIM, seed=n), uniform(n, 1, seed=n + 50)) for n in (3, 5, 4)]
    summaries = [summarize(basis, X, Y, noise_var=NOISE) for X, Y in data]
    posterior = Posterior.sparse(basis, sum(summaries[1:], summaries[0]))

    X, Y = torch.cat([X for X, _ in data]), torch.cat([Y for _, Y in data])
    points = uniform(7, DIM, seed=77)
    low_rank = basis(X) @ basis(X).T
    blocks = torch.block_diag(*(torch.ones(len(X), len(X)) for X, _ in data)).bool()
    noise = NOISE * torch.eye(len(X), dtype=torch.float64)
    covariance = torch.where(blocks, KERNEL(X), low_rank) + noise
    cross = basis(points) @ basis(X).T
    mean = (cross @ torch.linalg.solve(covariance, Y))[:, 0]
    variance = 1 - (cross * torch.linalg.solve(covariance, cross.T).T).sum(dim=-1)

    low, _ = posterior.bound(points.numpy(), 0.0)
    high, _ = posterior.bound(points.numpy(), 2.0)
    np.testing.assert_allclose(low, mean.numpy(), atol=1e-9)
    np.testing.assert_allclose(((high - low) / 2) ** 2, variance.numpy(), atol=1e-9)


def test_with_the_data_as_support_it_is_the_exact_process() -> None:
    X = uniform(8, DIM, seed=3)
    Y = bowl(X)
    basis = InducingFeatures(KERNEL, X, jitter=JITTER)
    points = uniform(5, DIM, seed=4)
    dense = KERNEL(X) + NOISE * torch.eye(8)
    cross = KERNEL(points, X)
    mean = (cross @ torch.linalg.solve(dense, Y))[:, 0]
    variance = 1 - (cross * torch.linalg.solve(dense, cross.T).T).sum(dim=-1)
    bound = (mean + 1.5 * variance.sqrt()).numpy()
    sparse = Posterior.sparse(basis, summarize(basis, X, Y, noise_var=NOISE))
    np.testing.assert_allclose(sparse.bound(points.numpy(), 1.5)[0], bound, atol=1e-5)
    exact = Posterior.exact(KERNEL, X, Y, NOISE)
    np.testing.assert_allclose(exact.bound(points.numpy(), 1.5)[0], bound, atol=1e-9)


def test_the_bound_and_its_gradient_are_those_of_the_package() -> None:
    basis = InducingFeatures(KERNEL, uniform(6, DIM, seed=9), jitter=JITTER)
    total = summarize(basis, uniform(9, DIM), uniform(9, 1), noise_var=NOISE)
    points = uniform(5, DIM, seed=8).requires_grad_()
    known = BasisGP.from_summary(total, feature_map=basis, noise_var=NOISE)
    posterior: Any = known.posterior(points[:, None, :])
    bound = (posterior.mean + 1.5 * posterior.variance.sqrt()).flatten()
    (gradient,) = torch.autograd.grad(bound.sum(), points)
    values, slopes = Posterior.sparse(basis, total).bound(points.detach().numpy(), 1.5)
    np.testing.assert_allclose(values, bound.detach().numpy(), atol=1e-9)
    np.testing.assert_allclose(slopes, gradient.numpy(), atol=1e-7)


# ------------------------------------------------------------------ the order of clients


def test_one_client_is_the_same_in_both_orders() -> None:
    first, second = (played(replace(SMALL, sequential=order), 1) for order in (True, False))
    assert torch.equal(first.X, second.X)
    assert first.sums == second.sums == int(first.shared.sum())


def test_one_clients_steps_do_not_depend_on_the_coin() -> None:
    """The sum of one summary is that summary: local and global processes are the same."""
    coins = [played(replace(SMALL, decays=(c,)), 1, rounds=8) for c in (0.1, 1.0)]
    assert not torch.equal(coins[0].shared, coins[1].shared)
    assert torch.equal(coins[0].X, coins[1].X)


def test_a_client_sees_those_before_it_in_the_round() -> None:
    """In the first round, which is global, one order has one model and the other three."""
    sequential = played(SMALL, 3, rounds=1)
    at_once = played(replace(SMALL, sequential=False), 3, rounds=1)
    assert bool(sequential.shared.all())
    assert bool(at_once.shared.all())
    assert (sequential.sums, at_once.sums) == (3, 1)
    assert torch.equal(sequential.X[0], at_once.X[0])
    assert torch.cdist(sequential.X[1], at_once.X[1]) > 1e-3
    # All at once look for the largest value of the same bound, one after the other do not.
    apart = [torch.pdist(trace.X[:, 0]).max() for trace in (sequential, at_once)]
    assert apart[0] > apart[1]


def test_a_sequential_round_is_by_hand() -> None:
    """The second client's model is that of all data so far, the first one's new point included."""
    trace = played(SMALL, 2, rounds=1)
    basis = InducingFeatures(KERNEL, trace.support, jitter=JITTER)
    data = firsts(2)
    X = torch.cat([data[0][0], trace.X[0]])
    Y = torch.cat([data[0][1], trace.Y[0][:, None]])
    summary = summarize(basis, X, SPACE.to_public(Y), noise_var=NOISE)
    summary = summary + summarize(basis, data[1][0], SPACE.to_public(data[1][1]), noise_var=NOISE)
    posterior = Posterior.sparse(basis, summary)
    best = posterior.bound(trace.X[1].numpy(), 1.0)[0][0]
    grid = uniform(2000, DIM, seed=5).numpy()
    assert best >= posterior.bound(grid, 1.0)[0].max() - 0.02


def test_coins_are_of_each_client() -> None:
    """One with a fast schedule and one with a slow one: the latter goes global more often."""
    settings = replace(SMALL, decays=(1.0, 0.05), num_raw=4, num_restarts=1)
    shared = played(settings, 2, rounds=40).shared.sum(dim=-1)
    assert shared[0] < 12 < 28 < shared[1]
    assert settings.own(1, 0) == settings.own(1, 1) == 0
    assert settings.own(4, 0) == 0.75


@pytest.mark.parametrize("local", ["sparse", "exact"])
def test_a_local_step_is_by_hand(local: Literal["sparse", "exact"]) -> None:
    """The first local step of a client maximises the bound of its own data alone."""
    settings = replace(SMALL, local=local, decays=(1.0,))
    trace = played(settings, 2, rounds=6)
    client, t = (int(at) for at in (~trace.shared).nonzero()[0])
    X = torch.cat([firsts(2)[client][0], trace.X[client, :t]])
    Y = SPACE.to_public(bowl(X))
    basis = InducingFeatures(KERNEL, trace.support, jitter=JITTER)
    posterior = (
        Posterior.exact(KERNEL, X, Y, NOISE)
        if local == "exact"
        else Posterior.sparse(basis, summarize(basis, X, Y, noise_var=NOISE))
    )
    best = posterior.bound(trace.X[client, t : t + 1].numpy(), 1.0)[0][0]
    assert best >= posterior.bound(uniform(2000, DIM, seed=5).numpy(), 1.0)[0].max() - 0.02


def test_a_public_support_set_is_the_same_for_all_data() -> None:
    settings = replace(SMALL, support="sobol")
    assert torch.equal(played(settings, 2, rounds=1).support, sobol_support(DIM, 6))


# ------------------------------------------------------------------ a run


def test_a_run_finds_the_bowl_and_repeats_itself() -> None:
    trace = played(SMALL, 3, rounds=10)
    assert trace.X.shape == (3, 10, DIM)
    assert trace.Y.shape == (3, 10)
    assert torch.equal(bowl(trace.X)[..., 0], trace.Y)
    assert float(trace.Y.min()) < 0.01
    assert bool(((trace.X >= 0) & (trace.X <= 1)).all())
    assert torch.equal(trace.X, played(SMALL, 3, rounds=10).X)
    assert not torch.equal(trace.X, played(SMALL, 3, rounds=10, seed=1).X)


def test_on_a_list_the_best_of_it_is_chosen() -> None:
    points = uniform(20, DIM, seed=6)
    trace = optimise(SMALL, [bowl] * 2, firsts(2), space=SPACE, rounds=5, seed=0, candidates=points)
    listed = set(map(tuple, points.tolist()))
    for X in trace.X.tolist():
        chosen = list(map(tuple, X))
        assert set(chosen) <= listed
        assert len(set(chosen)) == 5  # none twice by one client


def test_a_step_is_no_worse_than_its_random_points_and_not_one_of_the_clients_own() -> None:
    basis = InducingFeatures(KERNEL, uniform(6, DIM, seed=9), jitter=JITTER)
    posterior = Posterior.sparse(
        basis, summarize(basis, uniform(9, DIM), uniform(9, 1), noise_var=1)
    )
    raw = uniform(32, DIM, seed=2)
    first = next_point(SMALL, posterior, raw[:1], width=1.0, raw=raw)
    values = posterior.bound(raw.numpy(), 1.0)[0]
    assert posterior.bound(first.numpy(), 1.0)[0][0] >= values.max()
    second = next_point(SMALL, posterior, first, width=1.0, raw=raw)
    assert float(torch.cdist(first, second)) >= 1e-3


def test_the_width_of_theory() -> None:
    settings = replace(SMALL, beta=None, delta=0.1)
    expected = 2 * math.log(32 * math.pi**2 * 7**2 / (6 * 0.1))
    assert settings.width(7) == pytest.approx(math.sqrt(expected))
    assert replace(SMALL, beta=4.0).width(7) == 2.0


def test_the_error_of_a_support_set_vanishes_where_it_has_all_data() -> None:
    """One client's inputs all are centres: the sparse process is the exact one."""
    settings = replace(SMALL, support_size=4, clusters=4)
    data, points = firsts(1), uniform(30, DIM, seed=11)
    still = played(settings, 1, rounds=1)
    nothing = replace(still, X=still.X[:, :0], Y=still.Y[:, :0])
    exact = approximation_error(settings, nothing, data, space=SPACE, points=points)
    assert max(exact) < 1e-5
    two = replace(nothing, support=nothing.support[:2])
    coarse = approximation_error(settings, two, data, space=SPACE, points=points)
    assert min(coarse) > 0.01


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"noise_var": 0.0}, "noise_var must be positive"),
        ({"beta": -1.0}, "beta is not negative"),
        ({"decays": (0.5, 2.0)}, "decays must lie in"),
        ({"local": "fitted"}, "local is one of"),
        ({"support": "random"}, "support is one of"),
        ({"clusters": 7}, "clusters <= support_size"),
        ({"num_restarts": 33}, "num_restarts <= num_raw"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(InputDataError, match=says):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_clients_and_their_data_must_match() -> None:
    with pytest.raises(InputDataError, match="2 objectives have 1 sets"):
        optimise(SMALL, [bowl] * 2, firsts(1), space=SPACE, rounds=1, seed=0)
    with pytest.raises(InputDataError, match="one for all or 3, got 2"):
        played(replace(SMALL, decays=(0.5, 0.5)), 3)
