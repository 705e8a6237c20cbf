r"""One BoTorch test problem per agent, over one public search space."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from botorch.exceptions.errors import InputDataError
from botorch.test_functions.base import BaseTestProblem
from torch import Tensor

from botorch_fed.rng import Generator
from botorch_fed.space import SearchSpace


class AgentProblem(BaseTestProblem):
    """One agent's objective: a BoTorch test problem on the unit cube.

    Larger is better, unless ``federation.space.outcome.minimize`` is true: then smaller is.
    `negate` reverses this.

    Args:
        federation: The federated problem.
        agent: The agent's index.
        noise_std: Standard deviation of the observation noise; None for no noise.
        negate: Whether to negate the function.
    """

    def __init__(
        self,
        federation: FederatedTestProblem,
        agent: int,
        *,
        noise_std: float | None = None,
        negate: bool = False,
    ) -> None:
        federation.space.refuse_several("AgentProblem", "call evaluate of the federated problem.")
        self.dim = federation.dim
        self._bounds = [(0.0, 1.0)] * self.dim
        self.continuous_inds = list(range(self.dim))
        super().__init__(noise_std=noise_std, negate=negate, dtype=torch.double)
        self.federation = federation
        self.agent = agent

    def _evaluate_true(self, X: Tensor) -> Tensor:
        flat = self.federation.evaluate(self.agent, X.reshape(-1, self.dim))
        return flat.reshape(X.shape[:-1])

    @property
    def optimal_value(self) -> float:
        """The best noise-free value, negated if `negate`."""
        value = float(self.federation.optimal_values[self.agent])
        return -value if self.negate else value


class FederatedTestProblem(ABC):
    """Several agents' objectives over one public search space.

    Larger is better, unless ``space.outcome.minimize`` is true: then smaller is.

    ``problem[n]`` is agent `n`'s `AgentProblem`; ``len(problem)`` counts the agents.

    Attributes:
        space: The public search space, its outcome scale included.
        noise_std: Standard deviation of the observation noise; None for no noise.
    """

    space: SearchSpace
    noise_std: float | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        """Noise-free values of an agent at `n x d` points of the unit cube, an `n` tensor.

        With several outcomes `n x m`.
        """

    def observe(self, agent: int, X: Tensor, stream: Generator) -> Tensor:
        """Observed values of an agent at `n x d` points of the unit cube, `n` or `n x m`.

        The default adds normal noise of `noise_std`; a problem with another noise overrides this.
        All randomness comes from the stream, so that a seed fixes a run.

        Args:
            agent: The agent's index.
            X: The points.
            stream: The source of the noise; not read without noise.
        """
        values = self.evaluate(agent, X)
        if not self.noise_std:
            return values
        return values + self.noise_std * stream.normal(*values.shape)

    @property
    def optimal_values(self) -> Tensor:
        """The best noise-free value of every agent, if the problem defines it.

        The largest, or the smallest where ``space.outcome.minimize`` is true.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define its optima.")

    @property
    def dim(self) -> int:
        """Number of columns of the unit cube."""
        return self.space.dim

    @property
    def bounds(self) -> Tensor:
        """Bounds of the unit cube, `2 x d`."""
        return self.space.bounds

    def __getitem__(self, agent: int) -> AgentProblem:
        if not 0 <= agent < len(self):
            raise IndexError(f"Agents are 0..{len(self) - 1}, got {agent}.")
        return AgentProblem(self, agent, noise_std=self.noise_std)

    def __iter__(self) -> Iterator[AgentProblem]:
        return (self[agent] for agent in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(agents={len(self)}, dim={self.dim})"


def check_points(X: Tensor, dim: int) -> None:
    """Raise `InputDataError` unless `X` holds `n x d` points of the unit cube."""
    if X.dim() != 2 or X.shape[-1] != dim:
        raise InputDataError(f"Expected `n x {dim}` points, got shape {tuple(X.shape)}.")
    outside = int((~((X >= 0) & (X <= 1)).all(dim=-1)).sum())
    if outside:
        raise InputDataError(
            f"{outside} of {len(X)} points lie outside the unit cube or are not finite: map points "
            "by `space.to_unit`."
        )
