r"""The separable functions of Table 1 of [Dubey2021]_, in [0, 1] by their exact ranges.

    function        box        smallest value      largest value     noise
    StyblinskiTang  [-4, 4]^d  -39.166166 d        10 d              0.02
    Michalewicz     [0, pi]^d  -9.6601517 (d=10)   0                 0.02

.. [Dubey2021] A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
   AISTATS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.test_functions.bandits import Rescaled


class StyblinskiTang(Rescaled):
    """The Styblinski-Tang function on [-4, 4]^d, turned over, in [0, 1]. One variable a summand.

    Args:
        dim: Number of variables.
        num_agents: Number of agents.
        noise_std: Standard deviation of the observation noise.
    """

    def __init__(self, dim: int = 20, num_agents: int = 1, *, noise_std: float = 0.02) -> None:
        _check_dim(dim)
        best = _smallest_point(self._terms, -4.0, 4.0, dim)
        worst = torch.full((dim,), 4.0, dtype=torch.float64)
        super().__init__([(-4.0, 4.0)] * dim, num_agents, noise_std, best=best, worst=worst)

    def _original(self, points: Tensor) -> Tensor:
        return _sum(self._terms(points))

    @staticmethod
    def _terms(points: Tensor) -> Tensor:
        return (points.pow(4) - 16 * points.square() + 5 * points) / 2


class Michalewicz(Rescaled):
    """The Michalewicz function of steepness 10 on [0, pi]^d, turned over, in [0, 1].

    One variable a summand, each with one narrow peak that counts: in ten dimensions the value of a
    random point is 0.11 on average.

    Args:
        dim: Number of variables.
        num_agents: Number of agents.
        noise_std: Standard deviation of the observation noise.
    """

    def __init__(self, dim: int = 10, num_agents: int = 1, *, noise_std: float = 0.02) -> None:
        _check_dim(dim)
        best = _smallest_point(self._terms, 0.0, math.pi, dim)
        worst = torch.zeros(dim, dtype=torch.float64)
        super().__init__([(0.0, math.pi)] * dim, num_agents, noise_std, best=best, worst=worst)

    def _original(self, points: Tensor) -> Tensor:
        return _sum(self._terms(points))

    @staticmethod
    def _terms(points: Tensor) -> Tensor:
        i = torch.arange(1, points.shape[-1] + 1, dtype=torch.float64)
        return -points.sin() * (i * points.square() / math.pi).sin().pow(20)


def _sum(terms: Tensor) -> Tensor:
    """Over the last dimension, term by term: a reduction's bits depend on the number of points."""
    total = torch.zeros(terms.shape[:-1], dtype=torch.float64)
    for term in terms.unbind(dim=-1):
        total += term
    return total


def _check_dim(dim: int) -> None:
    if not 1 <= dim <= 100:
        raise InputDataError(f"Expected 1 to 100 variables, got {dim}.")


def _smallest_point(
    terms: Callable[[Tensor], Tensor], lower: float, upper: float, dim: int
) -> Tensor:
    """Where every coordinate's term is smallest, `d`: a grid, then Newton's method.

    `terms` maps `n x d` points to the `n x d` summands of a separable function. Eight valleys of
    the grid are followed to their ends, because the deepest on the grid need not be the deepest.
    """
    steps = torch.arange(2**14 + 1, dtype=torch.float64) / 2**14
    grid = (lower + (upper - lower) * steps).unsqueeze(-1).expand(-1, dim)
    values = terms(grid)
    inner = values[1:-1]
    valley = (inner < values[:-2]) & (inner <= values[2:])
    depths = torch.where(valley, inner, torch.inf)
    start = grid[1:-1].gather(0, depths.topk(8, dim=0, largest=False).indices)
    x = start.clone()
    with torch.enable_grad():
        for _ in range(8):
            x.requires_grad_(True)
            (slope,) = torch.autograd.grad(terms(x).sum(), x, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.sum(), x)
            x = (x - slope / curvature).detach()
    x = torch.where((x >= lower) & (x <= upper), x, start)
    return x.gather(0, terms(x).argmin(dim=0, keepdim=True)).squeeze(0)
