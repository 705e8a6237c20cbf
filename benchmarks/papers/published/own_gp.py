"""The own model of [Dai2020FTS]_'s code: zero mean, one length scale, maximum likelihood.

.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import InputDataError
from botorch.models import SingleTaskGP
from botorch.sampling.pathwise.paths import SamplePath
from torch import Tensor

from botorch_fed.acquisition import ThompsonSampling
from botorch_fed.federation.base import AgentId
from botorch_fed.models import OwnHyperparameters, default_hyperparameters
from botorch_fed.models.own import OUTPUTSCALE_PRIOR, Array, LogPosterior, checked_data
from botorch_fed.rng import Generator, generator
from botorch_fed.search.local import OwnStrategy
from botorch_fed.search.released import Following
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import SearchSpace


class LogLikelihood(LogPosterior):
    """Minus the log likelihood of output scale, noise and one length scale."""

    def __init__(self, X: Array, y: Array) -> None:
        super().__init__(X, y, None, OUTPUTSCALE_PRIOR)
        self.squares = self.squares.sum(axis=-1, keepdims=True)
        self.low, self.high = self.low[-3:], self.high[-3:]

    def best_mean(self, L: Array) -> float:
        return 0.0

    def prior(self, theta: Array) -> tuple[float, Array]:
        return 0.0, np.zeros_like(theta)

    def stretch(self, uniform: Array) -> Array:
        """A point of a box where reasonable hyperparameters lie."""
        low, high = np.log([0.02, 0.05, 1e-4]), np.log([2.0, 5.0, 1e-1])
        return low + uniform[-3:] * (high - low)


def fit_paper_gp(X: Tensor, Y: Tensor, *, restarts: Tensor | None = None) -> OwnHyperparameters:
    """Hyperparameters of an agent's own GP, as the papers' code fits them.

    Args:
        X: An `n x d` tensor of points in the unit cube.
        Y: An `n x 1` tensor of outcomes on the public scale, larger is better.
        restarts: A `r x (d + 2)` tensor of uniform numbers: more starting points.
    """
    X, Y = checked_data(X, Y)
    d = X.shape[-1]
    if restarts is not None and restarts.shape[1:] != (d + 2,):
        raise InputDataError(f"restarts must be `r x {d + 2}`, got {tuple(restarts.shape)}.")
    objective = LogLikelihood(X.numpy(), Y.numpy()[:, 0])
    starts = [objective.pack(default_hyperparameters(d))]
    if restarts is not None:
        starts += [objective.stretch(row.numpy()) for row in restarts]
    return objective.maximum(starts)


@dataclass(frozen=True, kw_only=True)
class PaperGP(OwnStrategy):
    """A strategy with the papers' own model.

    Attributes:
        refit_every: How many queries pass between fits.
    """

    refit_every: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refit_every < 1:
            raise InputDataError(f"refit_every counts from 1, got {self.refit_every}.")

    def refit(
        self,
        space: SearchSpace,
        X: Tensor,
        Y: Tensor,
        known: OwnHyperparameters | None,
        *,
        seed: int,
        name: AgentId,
    ) -> OwnHyperparameters | None:
        n = len(X)
        if n == 0 or self.own == "random":
            return known
        if known is not None and n < known.num_data + self.refit_every:
            return known
        restarts = generator(seed, "fit", n).uniform(10, space.dim + 2)
        return fit_paper_gp(self.log_warp(space).transform(X), Y, restarts=restarts)


class WiderPath(SamplePath):
    r"""A draw :math:`g` of a posterior with mean :math:`\mu`, as :math:`\mu + \beta (g - \mu)`."""

    def __init__(self, path: SamplePath, model: SingleTaskGP, beta: float) -> None:
        super().__init__()
        self.path, self.model, self.beta = path, model, beta

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        self.path.set_ensemble_as_batch(ensemble_as_batch)

    def forward(self, X: Tensor) -> Tensor:
        """Values at `batch_shape x n x d` points."""
        mean: Tensor = self.model.posterior(X).mean.squeeze(-1)
        return mean + self.beta * (self.path(X) - mean)


@dataclass(frozen=True, kw_only=True)
class PaperStrategy(PaperGP, Strategy):
    r"""How an agent of FTS uses messages, with the papers' own model.

    Attributes:
        beta: :math:`\beta_t`: own steps are draws with :math:`\beta_t` times the posterior's
            standard deviation. The experiments have 1.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.beta < math.inf):
            raise InputDataError(f"beta must be finite and not negative, got {self.beta}.")

    def acquisition(
        self, model: SingleTaskGP, X: Tensor, chosen: Tensor, stream: Generator
    ) -> AcquisitionFunction:
        made = super().acquisition(model, X, chosen, stream)
        if self.beta == 1 or not isinstance(made, ThompsonSampling):
            return made
        return ThompsonSampling(WiderPath(made.path, model, self.beta))


@dataclass(frozen=True, kw_only=True)
class PaperFollowing(PaperGP, Following):
    """How a site uses releases, with the papers' own model."""
