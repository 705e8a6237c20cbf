r"""An agent's step on its own data, the same in every protocol: fit, draw or expect, maximise.

Everything here is a function of public settings, the agent's private data and a stream of random
numbers that is addressed by what it is for, so that a crash changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
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
from botorch_fed.models.support import sobol_support
from botorch_fed.protocols.base import AgentId
from botorch_fed.rng import Generator, generator
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
        paper_gp: The papers' own model: zero mean, one length scale, maximum likelihood.
        refit_every: With `paper_gp`, how many queries pass between fits.
        min_distance: How far a query stays from earlier ones, in the unit cube; 0 where noise makes
            a second look worth its price. Not for lists of candidates.
        num_raw: Random points that the optimiser looks at.
        num_restarts: How many of the best of them it improves.
        num_features: Features of the prior part of an own sample.
    """

    schedule: MixingSchedule = Constant(1.0)  # noqa: RUF009 - frozen
    own: Literal["thompson", "ei", "random"] = "thompson"
    warp: bool = True
    paper_gp: bool = False
    refit_every: int = 5
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
        if self.refit_every < 1:
            raise InputDataError(f"refit_every counts from 1, got {self.refit_every}.")

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
        if not self.paper_gp:
            if not needs_fit(n, known):
                return known
            try:
                return fit_own_gp(X, Y, start=known)
            except NumericalError:  # an outcome beyond all scales: the agent must not be stuck
                logger.warning("agent %r keeps its old hyperparameters", name)
                return known or default_hyperparameters(space.dim)
        if known is not None and n < known.num_data + self.refit_every:
            return known
        restarts = generator(seed, "fit", n).uniform(10, space.dim + 2)
        return fit_own_gp(X, Y, paper=True, restarts=restarts)

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
    """A uniform point of the cube or of the candidates, `1 x d`; not a failed one if possible.

    Args:
        space: The map of inputs.
        candidates: The only points that can be evaluated, `K x d`.
        stream: Of the point.
        failed: Points whose evaluation failed, `m x d`.
    """
    failed = failed if failed is not None and len(failed) else None
    if candidates is None:
        point = stream.uniform(1, space.dim)
        if failed is not None:
            for _ in range(REDRAWS):
                if not bool((failed == space.snap(point)).all(dim=-1).any()):
                    break
                point = stream.uniform(1, space.dim)
        return point
    if failed is not None:
        candidates = untried(candidates, failed)
    row = int(stream.uniform(1) * len(candidates))
    return candidates[row : row + 1].double()


def spread_design(
    space: SearchSpace,
    names: Sequence[AgentId],
    num_points: int,
    *,
    width: float = 0.5,
    seed: int = 0,
    candidates: Tensor | None = None,
) -> dict[AgentId, Tensor]:
    """Public initial designs: every agent begins in the centre, then they go different ways.

    Agent `n` of `N` gets the points n, n + N, … of one low-discrepancy sequence, so that together
    they cover more than each alone, and their first messages say more.

    Args:
        space: The map of inputs and outcomes.
        names: All agents, in an order that all know.
        num_points: How many points each evaluates, the centre included.
        width: Of the cube around the centre that the sequence covers; 1 is all of the space.
            Bounds are mostly chosen around a guess, and corners are seldom good.
        seed: Of the sequence, public.
        candidates: The only points that can be evaluated, `K x d`: the nearest are taken.

    Returns:
        `num_points x d` points by name.
    """
    if num_points < 1 or not 0 < width <= 1:
        raise InputDataError(
            "A design has at least one point, the centre, and a width in (0, 1], got "
            f"{num_points} points and width {width}."
        )
    centre = torch.full((1, space.dim), 0.5, dtype=torch.float64)
    points = centre.clone()
    if num_points > 1:
        sequence = sobol_support(space.dim, len(names) * (num_points - 1), seed=seed)
        points = 0.5 + width * (sequence - 0.5)
    made = {}
    for n, name in enumerate(names):
        design = torch.cat([centre, points[n :: len(names)][: num_points - 1]])
        if candidates is None:
            made[name] = space.snap(design)
        else:
            made[name] = candidates[torch.cdist(design, candidates.double()).argmin(dim=-1)]
    return made


def check_designs(design: Tensor | Mapping[AgentId, Tensor] | None, names: Sequence[str]) -> None:
    """Raise `InputDataError` unless designs by name are as long as each other, one per agent."""
    if not isinstance(design, Mapping):
        return
    if set(design) != set(names):
        wrong = sorted(set(design) ^ set(names))
        raise InputDataError(
            f"initial_design by name has one design for each agent; it differs in {wrong[:8]}."
        )
    if len({len(points) for points in design.values()}) > 1:
        raise InputDataError("All agents need initial designs of the same length.")


def design_of(design: Tensor | Mapping[AgentId, Tensor] | None, name: AgentId) -> Tensor | None:
    """An agent's own initial design."""
    return design[name] if isinstance(design, Mapping) else design


def untried(candidates: Tensor, tried: Tensor) -> Tensor:
    """The candidates `K x d` that are not among `n x d` points; all of them if none is left."""
    known = {row.tobytes() for row in (tried.double() + 0.0).numpy()}
    rows = (candidates.double() + 0.0).numpy()
    fresh = torch.tensor([row.tobytes() not in known for row in rows])
    return candidates[fresh] if bool(fresh.any()) else candidates


def check_points(X: Tensor, dim: int, what: str) -> None:
    """Raise `InputDataError` unless `X` holds `n x dim` points of the unit cube."""
    if X.dim() != 2 or X.shape[-1] != dim:
        raise InputDataError(f"{what} must be `n x {dim}` points, got shape {tuple(X.shape)}.")
    if not bool(((X >= 0) & (X <= 1)).all()):
        raise InputDataError(f"{what} must lie in the unit cube: map points by `space.to_unit`.")


def check_public_points(candidates: Tensor | None, design: Tensor | None, dim: int) -> None:
    """Raise `InputDataError` unless both are points of the cube, the design among candidates."""
    for points, what in ((candidates, "candidates"), (design, "initial_design")):
        if points is not None:
            check_points(points, dim, what)
            if not len(points):
                raise InputDataError(f"{what} must not be empty: leave it out.")
    if candidates is None or design is None:
        return
    known = {row.tobytes() for row in (candidates.double() + 0.0).numpy()}
    if not all(row.tobytes() in known for row in (design.double() + 0.0).numpy()):
        raise InputDataError(
            "initial_design has points that are no candidates: only those can be evaluated."
        )


def check_data(data: tuple[Tensor, Tensor], dim: int) -> None:
    """Raise `InputDataError` unless data are `n x dim` points of the cube and `n x 1` outcomes."""
    X, Y = data
    check_points(X, dim, "data")
    if Y.shape != (len(X), 1) or not bool(torch.isfinite(Y).all()):
        raise InputDataError(
            f"Outcomes must be a finite `{len(X)} x 1` tensor, got shape {tuple(Y.shape)}."
        )


def public_data(space: SearchSpace, data: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Points `n x d` and outcomes `n x 1` on the public scale; empty without data."""
    if data is None:
        return torch.zeros(0, space.dim).double(), torch.zeros(0, 1).double()
    return data[0].double(), space.outcome.to_public(data[1])


def answered(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Points and outcomes of the evaluations that succeeded, and points of those that failed.

    Args:
        X: Points, `q x d`.
        Y: Outcomes, `q x 1`, NaN where an evaluation failed.
    """
    good = ~Y.isnan().flatten()
    return X[good], Y[good], X[~good]


def tensor_hash(tensor: Tensor | None) -> str:
    """SHA-256 of a tensor's values; empty for None."""
    if tensor is None:
        return ""
    return hashlib.sha256(tensor.double().contiguous().numpy().tobytes()).hexdigest()
