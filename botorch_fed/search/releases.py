"""What an aggregation hands to searches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.federation.base import AgentId
from botorch_fed.privacy.records import RecordStatistic


@dataclass(frozen=True, eq=False)
class Rows:
    """The newest messages: `made[n]` is the round in which `agents[n]` made row `n`."""

    agents: tuple[AgentId, ...]
    made: tuple[int, ...]
    weights: Tensor

    def __post_init__(self) -> None:
        if not len(self.agents) == len(self.made) == len(self.weights) or self.weights.dim() != 2:
            raise InputDataError(
                f"Expected one row per agent, got {len(self.agents)} agents, {len(self.made)} "
                f"rounds and messages of shape {tuple(self.weights.shape)}."
            )
        if len(set(self.agents)) < len(self.agents):
            raise InputDataError(f"An agent has two rows: {self.agents}.")

    @property
    def by_agent(self) -> dict[AgentId, tuple[int, Tensor]]:
        """Round and message of each agent."""
        return dict(zip(self.agents, zip(self.made, self.weights, strict=True), strict=True))


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum of one message of each contributing agent.

    Attributes:
        t: The round of the messages.
        previous: The round of the sum before; -1 for the first sum.
        count: The number of messages.
        total: The sum, `D` numbers; None if it cannot be decrypted.
        mine: What this site has added to it, exactly; None if the site did not contribute.
        noise_std: The standard deviation of the noise in a number; 0 without noise.
    """

    t: int
    previous: int
    count: int
    total: Tensor | None = field(repr=False)
    mine: Tensor | None = field(repr=False)
    noise_std: float = 0.0

    @property
    def others(self) -> Tensor | None:
        """The sum without this site's own part."""
        if self.total is None or self.mine is None:
            return self.total
        return self.total - self.mine


@dataclass(frozen=True, eq=False)
class Sums:
    """All sums that came with a request, in order of their rounds: some came before."""

    sums: tuple[Sum, ...]


@dataclass(frozen=True, eq=False)
class Parameters:
    r"""The newest sum of records' statistics: all that anybody needs for the posterior.

    Attributes:
        t: After which round it was made.
        values: The sum of statistics, `D` numbers. With public actions every block is one record of
            weight :math:`\rho^2/v`, `v` the variance of its mean, noise included.
        noise_std: The standard deviation of the noise in each of them; 0 where weights know it.
        count: How many outcomes it is made of.
        scales: The prior deviations with which everybody reads it, one for each family of the
            basis (`search.bandit.fit_scales`); none for those of the basis itself.
    """

    t: int
    values: Tensor
    noise_std: float
    count: int
    scales: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class RecordSum:
    """What `Parameters` mean.

    Attributes:
        parameters: The newest.
        statistic: What one record adds to them.
        horizon: How many of them there are at most.
    """

    parameters: Parameters
    statistic: RecordStatistic
    horizon: int


@dataclass(frozen=True, eq=False)
class Noisy:
    """A noisy weighted sum of clipped messages, or one for each region.

    Attributes:
        made: The round whose messages are in it.
        values: One row for each region, `P x M`.
        noise_std: The deviation of the noise in each row, `P` public numbers.
        num_agents: How many agents are expected to be in it.
    """

    made: int
    values: Tensor
    noise_std: Tensor
    num_agents: float

    def __post_init__(self) -> None:
        if self.made < 0 or not 0 < self.num_agents < math.inf:
            raise InputDataError(
                f"Expected made >= 0 and num_agents > 0, got {self.made} and {self.num_agents}."
            )
        if self.values.dim() != 2 or self.noise_std.shape != self.values.shape[:1]:
            raise InputDataError(
                "Expected a row of a release and a deviation of its noise for each region, got "
                f"shapes {tuple(self.values.shape)} and {tuple(self.noise_std.shape)}."
            )
