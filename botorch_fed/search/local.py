r"""An agent's step on its own data, the same in every protocol: fit, draw or expect, maximise.

Everything here is a function of public settings, the agent's private data and a stream of random
numbers that is addressed by what it is for, so that a crash changes nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.exceptions.errors import InputDataError
from botorch.models import SingleTaskGP
from torch import Tensor

from botorch_fed.acquisition import (
    Constant,
    MixingSchedule,
    ThompsonSampling,
    check_schedule,
)
from botorch_fed.acquisition.feasible import FeasibleAcquisition
from botorch_fed.acquisition.optimize import maximize
from botorch_fed.errors import NumericalError
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.points import untried
from botorch_fed.models import (
    LogWarp,
    OwnHyperparameters,
    RandomFourierFeatures,
    StationaryKernel,
    default_hyperparameters,
    draw_path,
    fit_own_gp,
    needs_fit,
    own_gp,
)
from botorch_fed.models.feasibility import Feasibility, fit_feasibility
from botorch_fed.rng import Generator
from botorch_fed.space import SearchSpace

logger = logging.getLogger(__name__)

REDRAWS = 1000  # of a random point where an evaluation has failed


@dataclass(frozen=True, kw_only=True)
class OwnStrategy:
    r"""How an agent uses its own data; its own business, nobody else needs to know.

    Attributes:
        schedule: :math:`p_t`, the probability of an own step, queries counted from 1.
        own: What an own step is: a Thompson sample, expected improvement, or a random point.
        warp: Let the own model see parameters that act by their ratio on a logarithmic scale
            (`SearchSpace.log_offsets`), even if the search is on a linear one.
        min_distance: How far a query stays from earlier ones, in the unit cube; 0 where noise makes
            a second look worth its price. Not for lists of candidates.
        num_raw: Random points that the optimiser looks at.
        num_restarts: How many of the best of them it improves.
        num_features: Features of the prior part of an own sample.
    """

    schedule: MixingSchedule = Constant(1.0)  # noqa: RUF009 - frozen
    own: Literal["thompson", "ei", "random"] = "thompson"
    warp: bool = True
    min_distance: float = 0.01
    num_raw: int = 1000
    num_restarts: int = 20
    num_features: int = 512

    def __post_init__(self) -> None:
        check_schedule(self.schedule, 1000)
        if self.own not in ("thompson", "ei", "random"):
            raise InputDataError(f'own must be "thompson", "ei" or "random", got {self.own!r}.')
        if not 1 <= self.num_restarts <= self.num_raw:
            raise InputDataError(
                f"num_restarts must lie between 1 and num_raw = {self.num_raw}, got "
                f"{self.num_restarts}."
            )
        if self.num_features < 2 or self.num_features % 2:
            raise InputDataError(f"num_features must be even, got {self.num_features}.")
        if not 0 <= self.min_distance < 1:
            raise InputDataError(f"min_distance must lie in [0, 1), got {self.min_distance}.")

    def log_warp(self, space: SearchSpace) -> LogWarp:
        """The scale on which the own model sees inputs."""
        return LogWarp(space.log_offsets if self.warp else torch.zeros(space.dim).double())

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
        """Hyperparameters for the data: new ones where they have grown enough, else those known.

        Args:
            space: The map of inputs and outcomes.
            X: Own points, `n x d`.
            Y: Own outcomes on the public scale, `n x 1`.
            known: The last fit.
            seed: The agent's.
            name: The agent's, for the log.
        """
        n = len(X)
        if n == 0 or self.own == "random":
            return known
        X = self.log_warp(space).transform(X)
        if not needs_fit(n, known):
            return known
        try:
            return fit_own_gp(X, Y, start=known)
        except NumericalError:  # an outcome beyond all scales: the agent must not be stuck
            logger.warning("agent %r keeps its old hyperparameters", name)
            return known or default_hyperparameters(space.dim)

    def model(
        self, space: SearchSpace, X: Tensor, Y: Tensor, known: OwnHyperparameters
    ) -> SingleTaskGP:
        """The own Gaussian process."""
        warp = self.log_warp(space)
        return own_gp(X, Y, known, input_transform=None if warp.identity else warp)

    def acquisition(
        self, model: SingleTaskGP, X: Tensor, chosen: Tensor, stream: Generator
    ) -> AcquisitionFunction:
        """What an own step maximises.

        Args:
            model: The own Gaussian process.
            X: Own points, `n x d`.
            chosen: Points that the same query has already, `k x d`.
            stream: Of the sample.
        """
        if self.own == "ei":
            return expected_improvement(model, X, chosen)
        kernel = StationaryKernel.from_gpytorch(model.covar_module, X.shape[-1])
        phi = RandomFourierFeatures.draw(kernel, self.num_features, generator=stream)
        return ThompsonSampling(draw_path(model, feature_map=phi, generator=stream))

    def maximizer(
        self,
        acquisition: AcquisitionFunction,
        space: SearchSpace,
        tried: Tensor,
        *,
        candidates: Tensor | None,
        stream: Generator,
        succeeded: Tensor | None = None,
        failed: Tensor | None = None,
    ) -> Tensor:
        """The best point, `1 x d`, as far from those tried as the strategy says.

        Args:
            acquisition: What is maximised.
            space: The map of inputs.
            tried: Points that were evaluated or are chosen already, `n x d`.
            candidates: The only points that can be evaluated, `K x d`.
            stream: Of the random points.
            succeeded: Points whose evaluation succeeded, `n x d`; default all that were tried.
            failed: Points whose evaluation failed, `m x d`: none is asked again while another is
                left, and from two on the acquisition is weighted by the probability of success.
        """
        if failed is not None and len(failed):
            known = tried if succeeded is None else succeeded
            feasibility = feasibility_of(known, failed, self.log_warp(space))
            if feasibility is not None:
                acquisition = FeasibleAcquisition(acquisition, feasibility, known)
            candidates = None if candidates is None else untried(candidates, failed)
        point, _ = maximize(
            acquisition,
            space.dim,
            generator=stream,
            candidates=candidates,
            log_warp=self.log_warp(space),
            tried=tried,
            min_distance=self.min_distance,
            failed=failed,
            snap=space.snap,
            feasible=space.feasible_set,
            num_raw=self.num_raw,
            num_restarts=self.num_restarts,
        )
        return point


def expected_improvement(model: Any, X: Tensor, chosen: Tensor) -> AcquisitionFunction:
    """Expected improvement over the best posterior mean of a tried point.

    With points that the same query has chosen already, their outcomes are taken to be the mean.
    """
    with torch.no_grad():
        best = model.posterior(X).mean.max()
        if len(chosen):
            means = model.posterior(chosen).mean
            model = model.condition_on_observations(chosen, means)
            best = torch.maximum(best, means.max())
    return LogExpectedImprovement(model, best_f=best)


def feasibility_of(X: Tensor, failed: Tensor, log_warp: LogWarp) -> Feasibility | None:
    """What succeeds; None while failures do not repeat, or without a model of them.

    Args:
        X: Points whose evaluation succeeded, `n x d`.
        failed: Points whose evaluation failed, `m x d`.
        log_warp: The scale on which the model sees inputs.
    """
    try:
        return fit_feasibility(X, failed, log_warp=log_warp)
    except NumericalError as error:  # a site must not be stuck
        logger.warning("no model of %d failed evaluations: %s", len(failed), error)
        return None


def random_point(
    space: SearchSpace,
    candidates: Tensor | None,
    stream: Generator,
    failed: Tensor | None = None,
) -> Tensor:
    """A uniform point of the space or of the candidates, `1 x d`; not a failed one if possible.

    Args:
        space: The map of inputs.
        candidates: The only points that can be evaluated, `K x d`.
        stream: Of the point.
        failed: Points whose evaluation failed, `m x d`.
    """
    failed = failed if failed is not None and len(failed) else None
    if candidates is None:
        point = space.feasible_set.uniform(1, stream)
        if failed is not None:
            for _ in range(REDRAWS):
                if not bool((failed == space.snap(point)).all(dim=-1).any()):
                    break
                point = space.feasible_set.uniform(1, stream)
        return point
    if failed is not None:
        candidates = untried(candidates, failed)
    row = int(stream.uniform(1) * len(candidates))
    return candidates[row : row + 1].double()
