r"""Synthetic agents: similar samples of a Gaussian process.

Two constructions of similar agents:

- *Distance*, as in the synthetic experiments of [Dai2020FTS]_ and [Dai2021]_: one sample
  :math:`f`, scaled to [0, 1], and :math:`f_n(x) = f(x) \pm d` for the others. The papers do not
  state how the sign is drawn. Here it is drawn for every agent and grid point. One sign per agent
  is an option; it shifts the function and leaves its maximiser unchanged.
- *Heterogeneity*, as in Figure 7 of [Dai2021]_:
  :math:`f_n \leftarrow \alpha f_n + (1 - \alpha) f_\text{base}`, with independent samples
  :math:`f_n` and :math:`f_\text{base}`, each scaled to [0, 1]; no distance is added.

Samples are Fourier series, not Cholesky factors. On a period of :math:`1 + 9 \ell` the squared
exponential of a wrapped distance differs from that of the true one by less than 1e-17, and its
eigenvalues have a closed form. So no nearly singular matrix is factorised, the bits do not depend
on threads or on LAPACK, and finer grids show the same function (up to the scaling to [0, 1], which
uses the grid values only).

References:
    * [Dai2020FTS]_ Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
      sampling. NeurIPS 2020.
    * [Dai2021]_ Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
      optimization with distributed exploration. NeurIPS 2021.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

from botorch_fed.rng import Generator, generator
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.test_functions.base import FederatedTestProblem, check_points

DEFAULT_DISTANCE = 0.02


class SyntheticGPAgents(FederatedTestProblem):
    r"""Agents whose objectives are perturbed samples of a one-dimensional Gaussian process.

    Values are exact at the grid points and linear between them, so an agent's largest value on the
    unit interval is the largest on the grid.

    FTS: ``SyntheticGPAgents(51, seed=0, distance=1.2)`` is a target and 50 other agents. DP-FTS-DE:
    ``SyntheticGPAgents(200, seed=0, perturbed="all")`` and, for its Figure 7,
    ``SyntheticGPAgents(50, seed=0, heterogeneity=0.7)``.

    Args:
        num_agents: Number of agents, the target included.
        seed: Seed of the functions, not of the observation noise.
        distance: The `d_n` of FTS: the distance of every perturbed value from agent 0's function.
            Default 0.02 unless `heterogeneity` is given. Values may leave [0, 1] by this much.
        heterogeneity: The weight :math:`\alpha` of an agent's sample against the common sample: 0
            makes all agents equal, 1 independent. It excludes `distance`.
        perturbed: Whether agent 0 keeps the common sample (``"others"``, FTS) or is perturbed like
            the other agents (``"all"``, DP-FTS-DE).
        sign: Whether the sign of the perturbation is drawn per point or per agent.
        lengthscale: Length scale of the squared-exponential kernel.
        grid: Number of equidistant grid points in [0, 1].
        noise_var: Variance of the observation noise, not its standard deviation.

    Attributes:
        points: The grid, `grid x 1`.
        values: Noise-free values, `num_agents x grid`.

    Example:
        >>> problem = SyntheticGPAgents(51, seed=0)
        >>> problem.values.shape
        torch.Size([51, 1000])
        >>> X, Y = problem.observations(1, 40, seed=0)
    """

    def __init__(
        self,
        num_agents: int,
        *,
        seed: int,
        distance: float | None = None,
        heterogeneity: float | None = None,
        perturbed: Literal["others", "all"] = "others",
        sign: Literal["point", "agent"] = "point",
        lengthscale: float = 0.03,
        grid: int = 1000,
        noise_var: float = 0.01,
    ) -> None:
        if perturbed not in ("others", "all"):
            raise UnsupportedError(f'perturbed must be "others" or "all", got {perturbed!r}.')
        if sign not in ("point", "agent"):
            raise UnsupportedError(f'sign must be "point" or "agent", got {sign!r}.')
        if distance is not None and heterogeneity is not None:
            raise UnsupportedError(
                "Expected distance or heterogeneity, got both: leave one of them out."
            )
        if num_agents < 1 or grid < 2:
            raise InputDataError(
                f"Expected at least 1 agent and 2 grid points, got {num_agents} and {grid}."
            )
        if not 1e-3 <= lengthscale <= 10:
            raise InputDataError(
                f"lengthscale must lie in [0.001, 10], got {lengthscale}: the domain is [0, 1]."
            )
        for name, value in (("distance", distance), ("noise_var", noise_var)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputDataError(f"{name} must be finite and not negative, got {value}.")
        if heterogeneity is not None and not 0 <= heterogeneity <= 1:
            raise InputDataError(f"heterogeneity must lie in [0, 1], got {heterogeneity}.")
        self.space = SearchSpace((Parameter.real("x", 0.0, 1.0),), Outcome(centre=0.5, scale=0.2))
        self.noise_var = noise_var
        self.noise_std = math.sqrt(noise_var)
        self.points = torch.linspace(0, 1, grid, dtype=torch.float64).unsqueeze(-1)
        base = _sample(self.points, 1, lengthscale, generator(seed, "base"))
        if heterogeneity is not None:
            own = _sample(self.points, num_agents, lengthscale, generator(seed, "own"))
            self.values = heterogeneity * own + (1 - heterogeneity) * base
            return
        columns = grid if sign == "point" else 1
        signs = (generator(seed, "sign").uniform(num_agents, columns) - 0.5).sign()
        if perturbed == "others":
            signs[0] = 0
        self.values = base + (DEFAULT_DISTANCE if distance is None else distance) * signs

    def __len__(self) -> int:
        return len(self.values)

    @property
    def optimal_values(self) -> Tensor:
        return self.values.amax(dim=-1)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        check_points(X, self.dim)
        grid, values = self.points.squeeze(-1), self.values[agent]
        x = X.squeeze(-1).double().contiguous()
        left = (torch.searchsorted(grid, x, right=True) - 1).clamp(max=len(grid) - 2)
        fraction = (x - grid[left]) / (grid[left + 1] - grid[left])
        return torch.lerp(values[left], values[left + 1], fraction)

    def observations(self, agent: int, count: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """Observations of an agent before the target starts: the `t_n` observations of FTS.

        Args:
            agent: The agent's index.
            count: Number of grid points, drawn uniformly with replacement.
            seed: Seed of the points and of the noise.

        Returns:
            Points `count x 1` and noisy values `count x 1`.
        """
        objective = self[agent]
        stream = generator(seed, "observations", agent)
        X = self.points[(stream.uniform(count) * len(self.points)).long()]
        Y = objective(X, noise=False).unsqueeze(-1)
        return X, Y + math.sqrt(self.noise_var) * stream.normal(count, 1)


def _sample(points: Tensor, count: int, lengthscale: float, stream: Generator) -> Tensor:
    """Samples of a squared-exponential process at `n x 1` points, scaled to [0, 1], `count x n`."""
    frequencies, stds = _spectrum(lengthscale)
    coefficients = stream.normal(len(stds), 2, count, 1)
    x = points.squeeze(-1)
    total = torch.zeros(count, len(x), dtype=torch.float64)
    # A loop: the bits of a matrix product would depend on threads.
    for (a, b), omega, std in zip(coefficients, frequencies, stds, strict=True):
        total += std * (a * torch.cos(omega * x) + b * torch.sin(omega * x))
    low, high = total.amin(dim=-1, keepdim=True), total.amax(dim=-1, keepdim=True)
    return (total - low) / (high - low)


def _spectrum(lengthscale: float) -> tuple[Tensor, Tensor]:
    r"""Frequencies and standard deviations of the process wrapped around a period :math:`p`.

    Its Karhunen-Loève expansion has independent normal coefficients of :math:`\cos(\omega_j x)` and
    :math:`\sin(\omega_j x)`, with :math:`\omega_j = 2 \pi j / p` and variance proportional to
    :math:`e^{-(\omega_j \ell)^2 / 2}`, half of it at :math:`j = 0`.
    """
    step = 2 * math.pi / (1 + 9 * lengthscale)
    # Beyond omega * lengthscale = 9 variances are below 3e-18 of the largest.
    frequencies = step * torch.arange(math.ceil(9 / (lengthscale * step)) + 1).double()
    variances = torch.exp(-(frequencies * lengthscale).square() / 2)
    variances[0] /= 2
    return frequencies, (variances / variances.sum()).sqrt()
