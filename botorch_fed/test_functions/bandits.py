r"""Problems of private bandits: one function with values in [0, 1], shared by all agents (users).

- `KernelBandit`: the synthetic bandit of [Dubey2021]_. Its function is a kernel expansion on a
  ball, a reward is a Bernoulli draw with the function's value as probability, and a decision set
  has exactly one good arm.
- `Camelback`: a function of its Table 1, for which the paper gives neither domain nor scale nor
  noise. Here it is maximised over [-2, 2] x [-1, 1], mapped to [0, 1] by its exact range (from
  -1.0316285 to 86/15), and observed with noise of standard deviation 0.1.

Choices that the paper does not state:

- *Probabilities*: an expansion may be negative and is clipped to [0, 1]. (With weights in the unit
  L1 ball it never exceeds 1.)
- *Good arms*: about one expansion in a hundred reaches 0.8 anywhere. Expansions are redrawn until
  0.5 % of the ball, measured on a grid, reaches it.
- *Order*: arms are shuffled, so that a rule that picks a fixed place gains nothing.

Random play over 1,024 rounds of 25 arms has a regret of 606 (200 seeds, standard deviation 59).

References:
    * [Dubey2021]_ A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
      AISTATS 2021.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from botorch_fed.rng import Generator, generator
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.test_functions.base import AgentProblem, FederatedTestProblem, check_points

RADIUS = 2.0
NUM_CENTRES = 4
HIGH, LOW = 0.8, 0.6  # least value of the good arm, largest value of the others
SHARE = 0.005  # share of the ball that must reach HIGH

_SIDE = 128  # points per side of the grid on which a kernel bandit is measured
_DRAWS = 8192  # centres drawn at once
_CANDIDATES = 1024  # arms drawn at once
_ROUNDS = 1024  # decision sets filled at once


class _SharedFunction(FederatedTestProblem):
    """One function for all agents, on a box."""

    def __init__(
        self, ranges: Sequence[tuple[float, float]], num_agents: int, outcome: Outcome
    ) -> None:
        if num_agents < 1:
            raise InputDataError(f"Expected at least 1 agent, got {num_agents}.")
        self.space = SearchSpace(
            tuple(Parameter.real(f"x{i}", low, high) for i, (low, high) in enumerate(ranges)),
            outcome,
        )
        self._lower, self._upper = torch.tensor(ranges, dtype=torch.float64).unbind(dim=-1)
        self._num_agents = num_agents

    def __len__(self) -> int:
        return self._num_agents

    @abstractmethod
    def _function(self, points: Tensor) -> Tensor:
        """Values at `batch_shape x d` points in the function's units."""

    def values(self, X: Tensor) -> Tensor:
        """Noise-free values at points of the unit cube.

        Args:
            X: The points, `batch_shape x d`.

        Returns:
            A `batch_shape` tensor of numbers in [0, 1].
        """
        if X.dim() < 1 or X.shape[-1] != self.dim:
            raise BotorchTensorDimensionError(
                f"Expected `batch_shape x {self.dim}` points, got shape {tuple(X.shape)}."
            )
        check_points(X.reshape(-1, self.dim), self.dim)
        return self._function(self._own_units(X))

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        self._check_agent(agent)
        check_points(X, self.dim)
        return self._function(self._own_units(X))

    def _own_units(self, X: Tensor) -> Tensor:
        return self._lower + (self._upper - self._lower) * X.double()

    def _check_agent(self, agent: int) -> None:
        if not 0 <= agent < len(self):
            raise IndexError(f"Agents are 0..{len(self) - 1}, got {agent}.")


# ------------------------------------------------------------------ the kernel bandit


class KernelBandit(_SharedFunction):
    r"""A kernel expansion on the disc of radius 2, with rewards 0 and 1.

    :math:`f(x) = \sum_i \alpha_i \exp(-\|x - c_i\|^2 / 2)` with four centres uniform in the disc
    and weights uniform in the unit L1 ball, clipped to [0, 1]. Its domain is the disc, within a
    square that is the search space: decision sets and the optimum lie in the disc.

    Args:
        num_agents: Number of agents.
        seed: Seed of the function, of the decision sets and of the rewards of `problem[n]`.

    Attributes:
        centres: The centres in the function's units, `4 x 2`.
        weights: The weights, `4`.

    Example:
        >>> problem = KernelBandit(seed=0)
        >>> sets = problem.decision_sets(100)
        >>> sets.shape
        torch.Size([100, 25, 2])
        >>> best = problem.values(sets).amax(dim=-1)
        >>> regret = best - problem.values(sets[:, 0])
    """

    def __init__(self, num_agents: int = 1, *, seed: int) -> None:
        ranges = [(-RADIUS, RADIUS)] * 2
        super().__init__(ranges, num_agents, Outcome(centre=0.5, scale=0.25))
        self.seed = seed
        self.centres, self.weights = _draw_expansion(generator(seed, "function"))

    def __repr__(self) -> str:
        return f"KernelBandit(agents={len(self)}, seed={self.seed})"

    def __getitem__(self, agent: int) -> AgentProblem:
        self._check_agent(agent)
        return _Rewarded(self, agent)

    @cached_property
    def x_opt(self) -> Tensor:
        r"""The best point of the disc, `2`, in the unit cube.

        The expansion's Hessian has norm at most :math:`\sum_i |\alpha_i| \le 1` and its gradient
        norm at most 0.61. So projected gradient ascent with step 1 never descends, and among all
        grid points within 0.05 of the best one, one lies in the basin of the maximum.
        """
        points = _grid_of_disc()
        values = _expansion(points, self.centres, self.weights)
        points = points[values >= values.max() - 0.05]
        for _ in range(200):
            gaps = self.centres - points.unsqueeze(-2)
            pulls = self.weights * torch.exp(-gaps.square().sum(dim=-1) / 2)
            points = points + (pulls.unsqueeze(-1) * gaps).sum(dim=-2)
            points = points * (RADIUS / points.norm(dim=-1, keepdim=True)).clamp(max=1)
        best = _expansion(points, self.centres, self.weights).argmax()
        return (points[best] - self._lower) / (self._upper - self._lower)

    @property
    def optimal_values(self) -> Tensor:
        """The largest value in the disc, once per agent; a decision set may not contain it."""
        return self.values(self.x_opt).expand(len(self)).clone()

    def observe(self, agent: int, X: Tensor, stream: Generator) -> Tensor:
        """Rewards 0 or 1 at `n x 2` points of the unit cube, an `n` tensor.

        Args:
            agent: The agent's index.
            X: The points.
            stream: The source of the rewards.
        """
        return _coins(self.evaluate(agent, X), stream)

    def decision_set(self, agent: int, t: int, *, arms: int = 25) -> Tensor:
        """The arms of an agent in a round, one of them good.

        The good arm is uniform where the function is at least 0.8, the others are uniform where it
        is at most 0.6, and their order is random. They depend on the seed, the agent and the round
        only.

        Args:
            agent: The agent's index.
            t: The round, 0 or later.
            arms: Number of arms.

        Returns:
            Points of the unit cube, `arms x 2`.
        """
        if t < 0:
            raise InputDataError(f"Expected a round t >= 0, got {t}.")
        return self._decision_sets(agent, range(t, t + 1), arms)[0]

    def decision_sets(self, horizon: int, arms: int = 25, *, agent: int = 0) -> Tensor:
        """The decision sets of rounds 0 to `horizon - 1`, equal to those of `decision_set`.

        Args:
            horizon: Number of rounds.
            arms: Number of arms in a round.
            agent: The agent's index.

        Returns:
            Points of the unit cube, `horizon x arms x 2`.
        """
        if horizon < 0:
            raise InputDataError(f"horizon must not be negative, got {horizon}.")
        starts = range(0, horizon, _ROUNDS)
        blocks = [range(start, min(start + _ROUNDS, horizon)) for start in starts]
        sets = [self._decision_sets(agent, block, arms) for block in blocks]
        return torch.cat([torch.empty(0, arms, self.dim).double(), *sets])

    def _decision_sets(self, agent: int, rounds: range, arms: int) -> Tensor:
        self._check_agent(agent)
        if arms < 2:
            raise InputDataError(f"Expected at least 2 arms, got {arms}.")
        streams = [generator(self.seed, "decision set", agent, t) for t in rounds]
        order = torch.stack([stream.uniform(arms) for stream in streams]).argsort(dim=-1)
        sets = torch.empty(len(streams), arms, self.dim, dtype=torch.float64)
        open_sets = torch.arange(len(streams))
        candidates = torch.empty(len(streams), 0, self.dim, dtype=torch.float64)
        while len(open_sets):
            fresh = [streams[i].uniform(_CANDIDATES, self.dim) for i in open_sets.tolist()]
            candidates = torch.cat([candidates, torch.stack(fresh)], dim=1)
            points = self._own_units(candidates)
            values = self._function(points)
            inside = points.square().sum(dim=-1) <= RADIUS**2
            good, low = inside & (values >= HIGH), inside & (values <= LOW)
            good &= good.cumsum(dim=-1) == 1
            low &= low.cumsum(dim=-1) < arms
            full = good.any(dim=-1) & (low.sum(dim=-1) == arms - 1)
            ready = candidates[full]
            best, others = ready[good[full]].unsqueeze(1), ready[low[full]]
            others = others.reshape(len(ready), arms - 1, self.dim)
            sets[open_sets[full]] = torch.cat([best, others], dim=1)
            open_sets, candidates = open_sets[~full], candidates[~full]
        return sets.gather(1, order.unsqueeze(-1).expand_as(sets))

    def _function(self, points: Tensor) -> Tensor:
        return _expansion(points, self.centres, self.weights).clamp(0, 1)


class _Rewarded(AgentProblem):
    """An agent whose rewards come from one stream over all calls."""

    def __init__(self, problem: KernelBandit, agent: int) -> None:
        super().__init__(problem, agent)
        self._stream = generator(problem.seed, "noise", agent)

    def forward(self, X: Tensor, noise: bool = True) -> Tensor:
        values = self.evaluate_true(X)
        return _coins(values, self._stream) if noise else values


def _coins(values: Tensor, stream: Generator) -> Tensor:
    return (stream.uniform(*values.shape) < values).double()


def _expansion(points: Tensor, centres: Tensor, weights: Tensor) -> Tensor:
    """The unclipped kernel expansion at `batch_shape x 2` points in the function's units."""
    total = torch.zeros(points.shape[:-1], dtype=torch.float64)
    for centre, weight in zip(centres, weights, strict=True):
        total += weight * torch.exp(-(points - centre).square().sum(dim=-1) / 2)
    return total


def _grid_of_disc() -> Tensor:
    """Midpoints of the cells of a square grid that lie in the disc, in the function's units."""
    axis = RADIUS * ((2 * torch.arange(_SIDE).double() + 1) / _SIDE - 1)
    points = torch.cartesian_prod(axis, axis)
    return points[points.square().sum(dim=-1) <= RADIUS**2]


def _draw_expansion(stream: Generator) -> tuple[Tensor, Tensor]:
    """Centres `4 x 2` and weights `4` of the first expansion that is high on enough of the disc."""
    grid = _grid_of_disc()
    while True:
        points = RADIUS * (2 * stream.uniform(_DRAWS, 2) - 1)
        points = points[points.square().sum(dim=-1) <= RADIUS**2]
        draws = len(points) // NUM_CENTRES
        centres = points[: draws * NUM_CENTRES].reshape(draws, NUM_CENTRES, 2)
        # Spacings of ordered uniforms are uniform in the simplex of sums up to 1.
        ordered = stream.uniform(draws, NUM_CENTRES).sort(dim=-1).values
        sizes = ordered.diff(dim=-1, prepend=torch.zeros(draws, 1).double())
        weights = sizes * (stream.uniform(draws, NUM_CENTRES) - 0.5).sign()
        # No expansion exceeds the sum of its positive weights.
        for i in (weights.clamp(min=0).sum(dim=-1) >= HIGH).nonzero().flatten().tolist():
            high = _expansion(grid, centres[i], weights[i]) >= HIGH
            if float(high.double().mean()) >= SHARE:
                return centres[i].clone(), weights[i].clone()


# ------------------------------------------------------------------ functions of known range


class Rescaled(_SharedFunction):
    """A minimisation problem, negated and mapped to [0, 1] by its exact range.

    Attributes:
        x_opt: A point of value 1, `d`, in the unit cube.
        x_worst: A point of value 0, `d`, in the unit cube.
    """

    def __init__(
        self,
        ranges: Sequence[tuple[float, float]],
        num_agents: int,
        noise_std: float,
        *,
        best: Tensor,
        worst: Tensor,
    ) -> None:
        if not (math.isfinite(noise_std) and noise_std >= 0):
            raise InputDataError(f"noise_std must be finite and not negative, got {noise_std}.")
        super().__init__(ranges, num_agents, Outcome(centre=0.5, scale=0.5))
        self.noise_std = noise_std
        self.x_opt = (best - self._lower) / (self._upper - self._lower)
        self.x_worst = (worst - self._lower) / (self._upper - self._lower)
        self._smallest = self._original(self._own_units(self.x_opt))
        self._largest = self._original(self._own_units(self.x_worst))

    @property
    def optimal_values(self) -> Tensor:
        """The largest value, 1, once per agent."""
        return torch.ones(len(self), dtype=torch.float64)

    @abstractmethod
    def _original(self, points: Tensor) -> Tensor:
        """The function as the literature defines it, at `batch_shape x d` points."""

    def _function(self, points: Tensor) -> Tensor:
        values = (self._largest - self._original(points)) / (self._largest - self._smallest)
        return values.clamp(0, 1)  # rounding near the ends


class Camelback(Rescaled):
    """The six-hump camelback function on [-2, 2] x [-1, 1], negated and mapped to [0, 1].

    Its two best points are `x_opt` and ``1 - x_opt``.

    Args:
        num_agents: Number of agents.
        noise_std: Standard deviation of the observation noise.
        side: Arms per side of the grid.

    Attributes:
        arms: The grid of arms, `side^2 x 2`, in the unit cube, ends included. The best of 33 x 33
            has value 0.9984.
    """

    def __init__(self, num_agents: int = 1, *, noise_std: float = 0.1, side: int = 33) -> None:
        if side < 2:
            raise InputDataError(f"Expected at least 2 arms per side, got {side}.")
        axis = torch.arange(side).double() / (side - 1)
        self.arms = torch.cartesian_prod(axis, axis)
        from botorch.test_functions.synthetic import SixHumpCamel  # costs 90 ms to import

        self._camel = SixHumpCamel()
        super().__init__(
            [(-2.0, 2.0), (-1.0, 1.0)],
            num_agents,
            noise_std,
            best=torch.tensor([0.08984201310031806, -0.7126564030207396], dtype=torch.float64),
            worst=torch.tensor([2.0, 1.0], dtype=torch.float64),
        )

    def _original(self, points: Tensor) -> Tensor:
        return self._camel.evaluate_true(points)
