r"""A bandit on the posterior that everybody has: GP-UCB, Thompson sampling, expected improvement.

A site plays the action of its own decision set that the newest sum of records promises most, and
says what it has played and what came of it; it keeps nothing of either. The sum may have noise: it
is made positive first (`models.repair`). Without a sum an action is uniform.

Regret: the theorem of [Dubey2021]_ is about UCB with its own width :math:`\beta_t` (`norm_bound`),
``psd="shift"`` and a basis that misses nothing. What a basis misses is added to the bound, which
then covers the function without a promise of regret (`acquisition.confidence`). A constant
`exploration`, the floor, expected improvement and Thompson sampling carry none, and do better: the
width of the theorem costs half of random play.

Bases: `search.bandit_basis`. Where only outcomes have noise, the prior variances of the parts of a
basis follow from the evidence of what was released (`fit_scales`).

Differs from the paper: scores are :math:`\mu + \beta\sigma`, of a posterior with its eigenvalues
floored at the height of the noise, and ties are broken at random.

References:
    * [Dubey2021]_ A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
      AISTATS 2021.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition import AdditiveGrid, missed, private_ucb_width
from botorch_fed.acquisition.optimize import ascend
from botorch_fed.errors import MessageError, NumericalError
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.points import allowed_candidates, check_points
from botorch_fed.federation.terms import OWN, Search, Terms, View, check_vector, remembered
from botorch_fed.models import (
    AdditiveFeatures,
    BasisGP,
    FeatureMap,
    LogWarp,
    Summary,
    WeightPosterior,
    noise_floor,
    noise_norm_bound,
    noise_shift,
    repair_total,
)
from botorch_fed.models.earned_prior import reference_points
from botorch_fed.rng import Generator
from botorch_fed.search.local import random_point
from botorch_fed.search.releases import RecordSum
from botorch_fed.space import SearchSpace

logger = logging.getLogger(__name__)

AcquisitionName = Literal["ucb", "thompson", "ei"]
PSD = Literal["floor", "shift"]
DecisionSets = Callable[[AgentId, int], Tensor]  # agent and round to `K x d` points of the cube

MAX_OUTCOME = 1e6  # on the public scale: no public range is wider
NUM_RAW = 1000  # points of the cube that are looked at
NUM_STARTS = 20  # of the best of them, which are improved
NUM_GRID_STARTS = 3  # for additive functions, coordinate by coordinate first
GRID_POINTS = 81
SCALE_STEP, SCALES = 0.6, (3e-3, 3.0)  # of the prior deviation of a family of features
FAILURE = 0.1  # probability with which the theorem's width may fail


# ------------------------------------------------------------------ the search


@dataclass(frozen=True, kw_only=True)
class BanditSearch(Search):
    r"""One action in a round, chosen from the newest `RecordSum`.

    Attributes:
        noise_var: :math:`\rho^2`, the variance of one outcome on the public scale.
        exploration: Of a score: deviations added to the mean (``"ucb"``), or of a drawn function
            from it (``"thompson"``).
        acquisition: What is maximised; ``"ei"`` is the improvement over the best posterior mean.
        psd: How a noisy matrix is made positive: eigenvalues raised to a ``"floor"``, or by a
            ``"shift"``.
        height: Of the floor, see `models.repair.noise_floor`.
        inflate: Whether the posterior knows of the noise in the moment. Not with a shift.
        norm_bound: `B` of the theorem, whose width then takes the place of `exploration`; 0 for
            the constant. For ``"ucb"`` with a ``"shift"``.
        decision_sets: What an agent may play, private: its name and the round (from 1 on) to arms,
            `K x d` points of the unit cube; the same round, the same arms.
    """

    noise_var: float = 0.05
    exploration: float = 0.5
    acquisition: AcquisitionName = "ucb"
    psd: PSD = "floor"
    height: float = 4.0
    inflate: bool = False
    norm_bound: float = 0.0
    decision_sets: DecisionSets | None = field(default=None, repr=False, metadata=OWN)

    needs_outcome = True
    snaps = False

    def __post_init__(self) -> None:
        for name, kind in (("acquisition", AcquisitionName), ("psd", PSD)):
            if getattr(self, name) not in get_args(kind):
                raise InputDataError(
                    f"{name} is one of {get_args(kind)}, got {getattr(self, name)!r}."
                )
        for name, least in (
            ("noise_var", 1e-12),
            ("exploration", 0),
            ("height", 0),
            ("norm_bound", 0),
        ):
            value = getattr(self, name)
            if not least <= value <= 1e6:
                raise InputDataError(f"{name} must lie between {least:g} and 1e6, got {value}.")
        if self.inflate and self.psd == "shift":
            raise InputDataError('inflate needs eigenvectors, psd="shift" has none: use "floor".')
        if self.norm_bound and (self.acquisition, self.psd) != ("ucb", "shift"):
            raise InputDataError(
                'The theorem is about acquisition="ucb" with psd="shift", got '
                f"{self.acquisition!r} with {self.psd!r}: leave norm_bound out."
            )

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless a query is one action, from the first round on."""
        if terms.q != 1 or terms.num_initial or terms.default is not None:
            raise InputDataError(
                f"A bandit plays one action in a round and has no initial points, got q = {terms.q}"
                f" and num_initial = {terms.num_initial}: leave q, num_initial and default out."
            )
        if not 0 < scale_of(terms.feature_map) < math.inf:
            raise InputDataError("The shared basis has no prior variance.")

    # -------------------------------------------------------------- what it says

    def size(self, terms: Terms) -> int:
        """A record: the action, and its outcome on the public scale."""
        return terms.space.dim + 1

    def message(self, view: View) -> Tensor | None:
        """The record of this round; an action that failed has the worst outcome there is."""
        if len(view.X):
            return torch.cat([view.X[-1], view.Y[-1]])
        if len(view.failed):
            return torch.cat([view.failed[-1], torch.tensor([-MAX_OUTCOME]).double()])
        return None

    def check(self, terms: Terms, message: Tensor) -> None:
        """Raise `MessageError` unless the action lies in the cube and the outcome is finite."""
        check_vector(message, self.size(terms), "A record", sys.float_info.max)
        check_action(message[None, :-1], terms.space.dim)

    # -------------------------------------------------------------- where it looks

    def point(self, view: View) -> Tensor:
        """The action of the round, `1 x d`: the best of the arms or of the cube, ties at random."""
        arms = self.arms(view)
        known = self.posterior(view)
        if known is None:
            point = random_point(view.terms.space, arms, view.stream("arm", view.t))
            return point if arms is not None else view.terms.space.snap(point)
        return known.action(view.terms.space, arms, view)

    def arms(self, view: View) -> Tensor | None:
        """What may be played in this round, `K x d`; None for the whole cube."""
        if self.decision_sets is None:
            if view.candidates is None:
                return None
            return allowed_candidates(view.terms.space, view.candidates.double())
        arms = self.decision_sets(view.name, view.t)
        check_arms(arms, view.terms.space.dim, f"The decision set of round {view.t}")
        view.terms.space.refuse_infeasible(arms, f"The decision set of round {view.t}")
        return arms.double()

    def prediction(self, view: View, X: Tensor) -> tuple[float, float]:
        """Mean and standard deviation of the latent function at a point `1 x d`."""
        known = self.posterior(view)
        if known is None:
            return 0.0, math.sqrt(scale_of(view.terms.feature_map))
        with torch.no_grad():
            mean, std = known.predict(X)
        return float(mean), float(std)

    def posterior(self, view: View) -> SumPosterior | None:
        """What the newest sum says; None without one, or if it cannot be read."""
        phi, released = view.terms.feature_map, view.release
        if released is None:
            return None
        rule = replace(self, decision_sets=None)  # what is worked out is shared by all agents
        key = (rule, released.parameters, released.statistic, released.horizon, phi.fingerprint)
        try:
            return remembered(key, lambda: sum_posterior(rule, phi, released))
        except NumericalError:
            logger.warning("agent %r cannot read the release for round %d", view.name, view.t)
            return None


# ------------------------------------------------------------------ the posterior of a sum


def scale_of(feature_map: FeatureMap) -> float:
    r"""The prior variance :math:`s_0^2` by which squared features are divided in a statistic."""
    return float(feature_map.outputscale.sum())


def unit_features(feature_map: FeatureMap, X: Tensor) -> Tensor:
    """Features of `n x d` points, `n x m`, of norm at most one up to rounding."""
    return feature_map(X).detach() / math.sqrt(scale_of(feature_map))


def read_sum(
    search: BanditSearch, feature_map: FeatureMap, released: RecordSum
) -> tuple[Summary, WeightPosterior]:
    """What a sum says about the weights, made positive by `models.repair`, and their posterior.

    Args:
        search: Says how.
        feature_map: The shared basis; weights are those of `basis_of` it.
        released: The sum.

    Raises:
        NumericalError: It is no posterior, even so.
    """
    m, scale = feature_map.num_features, scale_of(feature_map)
    statistic, noise_var = released.statistic, search.noise_var
    gram, moment = statistic.gram_and_moment(
        released.parameters.values, noise_var=noise_var, outputscale=scale
    )
    scales = released.parameters.scales
    if len(scales):
        gram, moment = _scaled(gram, moment, _factors(feature_map, scales))
    total = Summary(gram, moment, basis_of(feature_map, released).fingerprint)
    std, unit = released.parameters.noise_std, scale / noise_var
    if std == 0:
        return total, WeightPosterior.from_total(total)
    if search.psd == "shift":
        shift = noise_shift(std, m, horizon=released.horizon, failure=FAILURE / 2) * unit
        total = repair_total(total, shift=shift)
        try:
            return total, WeightPosterior.from_total(total)
        except NumericalError:  # noise that is rarer than the shift allows for
            total = repair_total(total)
            return total, WeightPosterior.from_total(total)
    moment_std = 0.0
    if search.inflate:
        moment_std = statistic.moment_noise_std(std, noise_var=noise_var, outputscale=scale)
    floor = noise_floor(std, m, height=search.height) * unit
    total = repair_total(total, moment_noise_std=moment_std, floor=floor)
    return total, WeightPosterior.from_total(total)


def sum_model(search: BanditSearch, feature_map: FeatureMap, released: RecordSum | None) -> BasisGP:
    """The posterior of a sum as a BoTorch model on the unit cube, of public outcomes.

    Args:
        search: Says how noise is met.
        feature_map: The shared basis.
        released: The sum; None for the prior.
    """
    total = Summary.zero(feature_map)
    if released is not None:
        total = read_sum(search, feature_map, released)[0]
        feature_map = basis_of(feature_map, released)
    return BasisGP.from_summary(total, feature_map=feature_map, noise_var=search.noise_var)


# ------------------------------------------------------------------ prior variances


def families(feature_map: FeatureMap) -> tuple[int, ...]:
    """Which parts of a sum of maps have one prior variance: those of one length scale and size.

    Returns:
        A number for each part, from 0 on; one family for a map that is no sum.
    """
    if not isinstance(feature_map, AdditiveFeatures):
        return (0,)
    known: dict[tuple[Any, ...], int] = {}
    kinds = [
        (tuple(round(ell, 9) for ell in part.lengthscale.tolist()), part.num_features)
        for part in _parts(feature_map)
    ]
    return tuple(known.setdefault(kind, len(known)) for kind in kinds)


def basis_of(feature_map: FeatureMap, released: RecordSum) -> FeatureMap:
    """The shared basis with the prior variances with which a sum is read."""
    scales = released.parameters.scales
    return _rescaled(feature_map, tuple(scales.tolist())) if len(scales) else feature_map


def fit_scales(search: BanditSearch, feature_map: FeatureMap, released: RecordSum) -> Tensor:
    r"""Prior deviations of the families under which a sum without noise is more likely.

    The evidence of the sum, with a lognormal prior around the basis' own deviations, improved once
    in each coordinate from those with which the sum was read last: deviations that are fitted anew
    with every sum converge. It is post-processing of the release.

    Args:
        search: Says what the variance of an outcome is.
        feature_map: The shared basis.
        released: The sum.

    Returns:
        A tensor of as many deviations as there are families.
    """
    own = _own_scales(feature_map)
    gram, moment = released.statistic.gram_and_moment(
        released.parameters.values,
        noise_var=search.noise_var,
        outputscale=scale_of(feature_map),
    )

    def evidence(scales: Tensor) -> float:
        G, b = _scaled(gram, moment, _factors(feature_map, scales))
        posterior = WeightPosterior.from_total(Summary(G, b, ""))
        log_det = 2 * posterior.chol.diagonal().log().sum()
        apart = (scales / own).log().square().sum()
        return float(0.5 * (posterior.half_mean.square().sum() - log_det - apart))

    best = released.parameters.scales if len(released.parameters.scales) else own
    value = evidence(best)
    for j in range(len(own)):
        for factor in (SCALE_STEP, 1 / SCALE_STEP):
            trial = best.clone()
            trial[j] *= factor
            if SCALES[0] <= float(trial[j]) <= SCALES[1] and (found := evidence(trial)) > value:
                best, value = trial, found
    return best


@lru_cache(maxsize=4)
def _rescaled(feature_map: FeatureMap, scales: tuple[float, ...]) -> FeatureMap:
    parts = _parts(feature_map)
    variances = [
        torch.full_like(part.outputscale, scales[family] ** 2).reshape(-1)
        for part, family in zip(parts, families(feature_map), strict=True)
    ]
    variance = torch.cat(variances).reshape(feature_map.outputscale.shape)
    return feature_map.with_hyperparameters(feature_map.lengthscale, variance)


@lru_cache(maxsize=4)
def _own_scales(feature_map: FeatureMap) -> Tensor:
    """The prior deviations of the families of a map; not to be written to."""
    parts = _parts(feature_map)
    first: dict[int, float] = {}
    for part, family in zip(parts, families(feature_map), strict=True):
        first.setdefault(family, math.sqrt(float(part.outputscale.sum())))
    return torch.tensor(list(first.values()), dtype=torch.float64)


@lru_cache(maxsize=4)
def _family_of_features(feature_map: FeatureMap) -> Tensor:
    sizes = torch.tensor([part.num_features for part in _parts(feature_map)])
    return torch.tensor(families(feature_map)).repeat_interleave(sizes)


def _factors(feature_map: FeatureMap, scales: Tensor) -> Tensor:
    """What each feature is multiplied by, `m`."""
    return (scales / _own_scales(feature_map))[_family_of_features(feature_map)]


def _scaled(gram: Tensor, moment: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    return factors[:, None] * gram * factors, factors[:, None] * moment


def _parts(feature_map: FeatureMap) -> list[FeatureMap]:
    if not isinstance(feature_map, AdditiveFeatures):
        return [feature_map]
    return [part for part in feature_map.maps if isinstance(part, FeatureMap)]


def sum_posterior(
    search: BanditSearch, feature_map: FeatureMap, released: RecordSum
) -> SumPosterior:
    """A sum as everybody reads it; `NumericalError` if it cannot be read."""
    total, posterior = read_sum(search, feature_map, released)
    return SumPosterior(search, basis_of(feature_map, released), released, total, posterior)


@dataclass(frozen=True, eq=False)
class SumPosterior:
    """A sum as everybody reads it, over the basis with its prior variances."""

    search: BanditSearch
    feature_map: FeatureMap
    released: RecordSum
    total: Summary
    posterior: WeightPosterior

    def predict(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latent function at `n x d` points, `n` each."""
        phi = self.feature_map
        Phi = phi(X)
        mean, root = self.posterior.predict(Phi)
        variance = root.square().sum(dim=-1)
        if phi.has_residual:
            points, features = X.unsqueeze(-2), Phi.unsqueeze(-2)
            variance = variance + phi.residual(points, Phi1=features).flatten()
        return mean.squeeze(-1), variance.clamp_min(1e-30).sqrt()

    def score(
        self, arms: Tensor | None, stream: Generator, space: SearchSpace
    ) -> Callable[[Tensor], Tensor]:
        """What is maximised: `n x d` points to `n` values."""
        phi, acquisition = self.feature_map, self.search.acquisition
        if acquisition == "thompson":
            weights = self.posterior.sample(scale=self.search.exploration, generator=stream)
            return lambda X: phi(X) @ weights
        if acquisition == "ei":
            points = arms
            if points is None:
                points = space.feasible_set.met(reference_points(phi.input_dim))
            with torch.no_grad():
                best = self.predict(points)[0].max()
            model = BasisGP.from_summary(self.total, feature_map=phi)
            improvement = LogExpectedImprovement(model, best_f=best)
            return lambda X: improvement(X.unsqueeze(-2))

        width, norm_bound = self.width, self.search.norm_bound

        def bound(X: Tensor) -> Tensor:
            mean, std = self.predict(X)
            if not norm_bound:
                return mean + width * std
            return mean + width * std + norm_bound * missed(phi, X).sqrt()

        return bound

    @cached_property
    def width(self) -> float:
        """How many standard deviations the upper confidence bound reaches."""
        search, released, phi = self.search, self.released, self.feature_map
        if not search.norm_bound:
            return search.exploration
        m, scale, std = phi.num_features, scale_of(phi), released.parameters.noise_std
        gram_bound = moment_bound = 0.0
        # For features of norm one the prior's precision is λ over the prior variance.
        ridge = search.noise_var / scale
        kept = ridge * float(self.total.gram.diagonal().sum())
        if std > 0:
            # The matrix may fail with half of the probability, moment and outcomes with a quarter.
            gram_bound = noise_norm_bound(std, m, horizon=released.horizon, failure=FAILURE / 2)
            tail = math.sqrt(2 * math.log(4 * released.horizon / FAILURE))
            largest = std / released.statistic.moment_scale * (math.sqrt(m) + tail)
            moment_bound = largest / math.sqrt(gram_bound)  # in the norm of the shifted noise
            kept -= 3 * m * gram_bound  # at least so much without the noise and its shift
        count = released.parameters.count
        eye = torch.eye(m, dtype=torch.float64)
        return private_ucb_width(
            ridge * (eye + self.total.gram),
            t=max(1, count),
            norm_bound=search.norm_bound * math.sqrt(scale),
            noise_std=math.sqrt(search.noise_var),
            noise_var=ridge,
            gram_noise_bound=gram_bound,
            moment_noise_bound=moment_bound,
            truncation=min(max(count - kept, 0.0), count),
            failure=FAILURE / 2,
        )

    def action(self, space: SearchSpace, arms: Tensor | None, view: View) -> Tensor:
        """The action that promises most, `1 x d`: of the arms, or of the cube."""
        t = view.t
        score = self.score(arms, view.stream("score", t), space)
        if arms is not None:
            order = view.stream("ties", t).uniform(len(arms)).argsort(stable=True)
            with torch.no_grad():
                values = torch.nan_to_num(score(arms[order]), nan=-torch.inf)
                best = int(order[int(values.argmax())])
            return arms[best : best + 1].clone()
        warp = LogWarp(space.log_offsets)

        def spread(cube: Tensor) -> Tensor:
            cube[1::2] = warp.untransform(cube[1::2])
            return cube

        raw = space.feasible_set.uniform(NUM_RAW, view.stream("point", t), spread)
        with torch.no_grad():
            values = score(raw)
        starts = raw[values.topk(NUM_STARTS).indices]
        grid = _grid(self.feature_map) if self.search.acquisition == "ucb" else None
        if grid is not None and not space.feasible_set.constrained:
            found = self._by_coordinates(grid, starts[:NUM_GRID_STARTS], view)
            with torch.no_grad():
                found_values = score(found)
        else:
            found, found_values = ascend(score, starts, *space.bounds, feasible=space.feasible_set)
        best = int(torch.nan_to_num(torch.cat([found_values, values]), nan=-torch.inf).argmax())
        return space.snap(torch.cat([found, raw])[best : best + 1])

    def _by_coordinates(self, grid: AdditiveGrid, starts: Tensor, view: View) -> Tensor:
        """Maxima of an additive function, on a grid and then between its lines, `n x d`."""

        def found(grid: AdditiveGrid, start: Tensor, *path: str | int) -> tuple[Tensor, float]:
            stream = view.stream("grid", view.t, *path)
            return grid.maximize_ucb(
                self.posterior, exploration=self.width, generator=stream, start=start
            )

        coarse = [found(grid, start[None], i) for i, start in enumerate(starts)]
        best = max(coarse, key=lambda one: one[1])[0]
        steps = torch.linspace(-1, 1, GRID_POINTS, dtype=torch.float64) / (GRID_POINTS - 1)
        near = [(x + steps).clamp(0, 1) for x in best[0]]
        fine, _ = found(AdditiveGrid(self.feature_map, near), best, "fine")
        return torch.cat([fine, *(point for point, _ in coarse)])


@lru_cache(maxsize=4)
def _grid(phi: FeatureMap) -> AdditiveGrid | None:
    """For sums of functions of one input each; None for other maps."""
    if not isinstance(phi, AdditiveFeatures) or any(len(group) != 1 for group in phi.groups):
        return None
    return AdditiveGrid(phi, torch.linspace(0, 1, GRID_POINTS, dtype=torch.float64))


# ------------------------------------------------------------------ checks


def check_arms(arms: Tensor, dim: int, what: str) -> None:
    """Raise `InputDataError` unless these are points that can be played, at least one."""
    check_points(arms, dim, what)
    if not len(arms):
        raise InputDataError(f"{what} must not be empty.")


def check_action(X: Any, dim: int) -> None:
    """Raise `MessageError` unless this is one point of the unit cube, `1 x d`."""
    if X.shape != (1, dim) or X.dtype != torch.float64:
        raise MessageError(
            f"An action must be a float64 `1 x {dim}` tensor, got {X.dtype} of shape "
            f"{tuple(X.shape)}."
        )
    if not bool(((X >= 0) & (X <= 1)).all()):  # false for NaN
        raise MessageError("An action must lie in the unit cube.")
