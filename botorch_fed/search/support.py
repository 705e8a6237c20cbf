r"""The published search: a fixed kernel and support set, and a coin between own and shared model.

An agent with data :math:`D_i` contributes the whitened dPITC summary
:math:`(W_i^\top W_i, W_i^\top r_i)` of `models.summary`; the sum is the shared model. In round `t`
an agent uses its own model with probability :math:`p_t`, and the shared one otherwise.

Beyond the paper, each an option: `prediction="pic"` (own data enter the shared model exactly) and
`local="fitted"` (the own model's hyperparameters are fitted to own data, which nobody sees).

The support set is public: Sobol points, or those that the setup names. A support set made of the
agents' inputs is a release of its own; the paper's Algorithm 1 sends inputs in the clear.

The kernel is public. A length scale that was fitted to private data and shared would be a release.

A site without enough data evaluates uniform points at the start. A message that protects records
has one row per observation (`SupportSearch.gives_records`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.analytic import (
    LogExpectedImprovement,
    LogProbabilityOfImprovement,
    UpperConfidenceBound,
    _log_ei_helper,
)
from botorch.exceptions.errors import InputDataError
from botorch.models.model import Model
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from botorch.utils.probability.utils import log_ndtr
from torch import Size, Tensor

from botorch_fed.acquisition import (
    Polynomial,
    ThompsonSampling,
    check_schedule,
)
from botorch_fed.acquisition.feasible import FeasibleAcquisition
from botorch_fed.acquisition.optimize import ascend, maximize
from botorch_fed.errors import NumericalError
from botorch_fed.federation.points import tensor_hash, untried
from botorch_fed.federation.terms import MAX_EVALUATIONS, Terms, View, remembered
from botorch_fed.models import (
    BasisGP,
    InducingFeatures,
    LogWarp,
    OwnHyperparameters,
    RandomFourierFeatures,
    StationaryKernel,
    Summary,
    draw_path,
    fit_own_gp,
    own_gp,
    summarize,
)
from botorch_fed.models.numerics import cholesky, solve_rows
from botorch_fed.models.pic import PartiallyIndependentGP
from botorch_fed.models.repair import repair_total
from botorch_fed.models.summary import WeightPosterior
from botorch_fed.models.support import sobol_support
from botorch_fed.privacy.distributed import DistributedRecordSum
from botorch_fed.rng import Generator, generator
from botorch_fed.search.local import feasibility_of, random_point
from botorch_fed.search.releases import Sum
from botorch_fed.search.sums import SummedSearch, mechanism_of
from botorch_fed.space import SearchSpace

logger = logging.getLogger(__name__)

Acquisition = Literal["ucb", "ei", "pi", "ts"]
_JITTER = 1e-8
MAX_RAW = 2**14  # random points that an optimiser looks at,
MAX_RESTARTS = 64  # and how many of them it improves
USUAL_HORIZON = 1024
MIN_DISTANCE = 1e-3  # of a point from the site's earlier ones, in the unit cube


@dataclass(frozen=True, kw_only=True)
class SupportSearch(SummedSearch):
    r"""The published search.

    Attributes:
        lengthscale: Of the squared-exponential kernel on the unit cube, in every dimension.
        outputscale: Its prior variance, on the public scale of outcomes.
        noise_var: Noise variance on that scale.
        support_size: Size of the support set: public Sobol points,
        support: unless it is given, as a tuple of points.
        decay: The `c` of :math:`p_t = 1 - t^{-c}`, the probability of an own step in round `t`.
        models: ``"mixture"``, or only one of them.
        acquisition: What is maximised, on either model.
        beta: Of the upper confidence bound, :math:`\mu + \sqrt{\beta} \sigma`.
        local: The own model's hyperparameters: the public ones, or fitted.
        prediction: Whether the site's own data enter the shared model exactly.
        num_raw: Random points that the optimiser looks at.
        num_restarts: How many of the best of them it improves.
        horizon: The number of observations of a site up to which contributions are exact; those of
            more are scaled down as a whole. A study fills in its budget.
    """

    lengthscale: float = 0.5
    outputscale: float = 1.0
    noise_var: float = 1e-4
    support_size: int = 32
    support: tuple[tuple[float, ...], ...] = ()
    decay: float = 0.5
    models: Literal["mixture", "local", "global"] = "mixture"
    acquisition: Acquisition = "ucb"
    beta: float = 1.0
    local: Literal["public", "fitted"] = "public"
    prediction: Literal["pitc", "pic"] = "pic"
    num_raw: int = 256
    num_restarts: int = 3
    horizon: int | None = None

    has_basis: ClassVar[bool] = False
    gives_records: ClassVar[bool] = True
    adds: ClassVar[str] = "a summary of its data on support points"

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:  # what the proof needs
            raise InputDataError(f"decay must lie in (0, 1], got {self.decay}.")
        check_schedule(self.schedule, 1000)
        for name in ("lengthscale", "outputscale", "noise_var"):
            if not 1e-9 <= getattr(self, name) <= 1e9:
                raise InputDataError(f"{name} must be positive, got {getattr(self, name)}.")
        if not 1 <= self.support_size <= 1024:
            raise InputDataError(f"support_size must lie in 1..1024, got {self.support_size}.")
        if len(self.support) and len(self.support) != self.support_size:
            raise InputDataError(
                f"support has {len(self.support)} points, support_size is {self.support_size}."
            )
        if self.acquisition not in get_args(Acquisition) or not 0 <= self.beta <= 1e6:
            raise InputDataError(f"acquisition is one of {get_args(Acquisition)}, beta 0 or more.")
        check_effort(self.num_raw, self.num_restarts)
        support = tuple(tuple(float(value) for value in point) for point in self.support)
        if not all(0 <= value <= 1 for point in support for value in point):  # false for NaN
            raise InputDataError("Support points lie in the unit cube.")
        object.__setattr__(self, "support", support)
        check_horizon(self.horizon)

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` for support points of another dimension."""
        super().check_terms(terms)
        if any(len(point) != terms.space.dim for point in self.support):
            raise InputDataError(f"Support points need {terms.space.dim} coordinates each.")

    @property
    def schedule(self) -> Polynomial:
        """:math:`p_t`."""
        return Polynomial(self.decay)

    @property
    def ever_together(self) -> bool:
        """Whether any round uses the shared model."""
        return self.models != "local"

    def together(self, t: int, coin: Generator) -> bool:
        """Whether round `t`, counted from 1, uses the shared model."""
        if self.models != "mixture":
            return self.models == "global"
        return float(coin.uniform(1)) > self.schedule(t)

    def numbers(self, dim: int) -> int:
        """How many numbers a summary has."""
        return self.support_size * (self.support_size + 3) // 2

    def largest(self, num_data: int) -> float:
        """The largest number an agent with so many observations contributes, with room."""
        largest = 4.0 * max(num_data, 1) * max(self.outputscale, 1.0) / self.noise_var
        return float(2.0 ** math.ceil(math.log2(largest)))

    # -------------------------------------------------------------- what a site says

    def size(self, terms: Terms) -> int:
        """How many numbers a message has; 0 where no round uses the shared model."""
        return self.numbers(terms.space.dim) if self.ever_together else 0

    def bound(self, terms: Terms) -> float:
        """The largest number that a site contributes."""
        return self.largest(USUAL_HORIZON if self.horizon is None else self.horizon)

    def message(self, view: View) -> Tensor | None:
        """The summary of all data, or for a mechanism that protects records a row for each."""
        mechanism = mechanism_of(view.terms)
        if isinstance(mechanism, DistributedRecordSum):
            phi = feature_map(self, view.terms.space.dim)
            return records(phi, view.X, view.Y, mechanism)
        return contribution(self, view.X, view.Y)

    # -------------------------------------------------------------- where it looks

    def first(self, view: View, count: int) -> Tensor:
        """Uniform points, `count x d`."""
        return uniform_points(view, count)

    def has_messages(self, view: View) -> bool:
        """Always: a site without data is dealt nothing."""
        return True

    def listens(self, view: View) -> bool:
        """Whether the site's next query uses the shared model."""
        return self._coin(view, view.t + 1)

    def point(self, view: View) -> Tensor:
        """The next point, `1 x d`, by the own or by the shared model."""
        found: Sum | None = view.release
        left = None if view.candidates is None else untried(view.candidates, view.X)
        return next_point(
            self,
            view.terms.space,
            self._shared(view),
            view.X,
            view.Y,
            t=view.t,
            together=self._coin(view, view.t),
            candidates=left,
            stream=view.stream("query", view.n - view.first),
            own=found.mine if found is not None and found.t == view.t - 1 else None,
            chosen=view.chosen,
            failed=view.failed,
        )

    def _coin(self, view: View, t: int) -> bool:
        return self.together(t, view.stream("coin", t))

    def _shared(self, view: View) -> SupportView | None:
        """What the newest sum says, worked out once for all agents of a process."""
        found: Sum | None = view.release
        if found is None or found.total is None:
            return None
        total, dim, mechanism = found.total, view.terms.space.dim, mechanism_of(view.terms)
        try:
            return remembered(
                (self, dim, tensor_hash(total), mechanism),
                lambda: read_sum(self, dim, total, mechanism),
            )
        except NumericalError:
            logger.warning("agent %r can not read the sum of round %d", view.name, found.t)
            return None


def uniform_points(view: View, count: int) -> Tensor:
    """Points that a site begins with, at random, `count x d`."""
    space, stream = view.terms.space, view.stream("initial")
    if view.candidates is None:
        return space.snap(space.feasible_set.uniform(view.n + count, stream))[view.n :]
    uniform = stream.uniform(view.n + count, space.dim)[view.n :]
    rows = (uniform[:, 0] * len(view.candidates)).long()
    return view.candidates[rows].double()


def check_horizon(horizon: int | None) -> None:
    """Raise `InputDataError` unless a horizon is a number of evaluations, or None."""
    if horizon is not None and not 1 <= horizon <= MAX_EVALUATIONS:
        raise InputDataError(f"Expected 1 <= horizon <= {MAX_EVALUATIONS:,}, got {horizon}.")


def check_effort(num_raw: int, num_restarts: int) -> None:
    """Raise `InputDataError` unless an optimiser comes to an end: a server says what it does."""
    if not 1 <= num_restarts <= min(num_raw, MAX_RESTARTS) or num_raw > MAX_RAW:
        raise InputDataError(
            f"num_raw must lie in 1..{MAX_RAW} and num_restarts in 1..{MAX_RESTARTS} and up to "
            f"num_raw, got {num_raw} and {num_restarts}."
        )


# ------------------------------------------------------------------ the support set


def public_support(search: SupportSearch, dim: int) -> Tensor:
    """The support points that depend on no data, `k x d`."""
    if not search.support:
        return sobol_support(dim, search.support_size)
    Z = torch.tensor(search.support, dtype=torch.float64)
    if Z.shape[-1] != dim:
        raise InputDataError(f"Support points need {dim} coordinates, got {Z.shape[-1]}.")
    return Z


# ------------------------------------------------------------------ contributions and sums


@lru_cache(maxsize=8)
def feature_map(search: SupportSearch, dim: int) -> InducingFeatures:
    """The shared basis: public, and the same for all agents of a process."""
    lengthscale = torch.full((dim,), search.lengthscale, dtype=torch.float64)
    kernel = StationaryKernel(math.inf, lengthscale, search.outputscale)
    return InducingFeatures(kernel, public_support(search, dim), jitter=_JITTER)


def contribution(search: SupportSearch, X: Tensor, Y: Tensor) -> Tensor:
    """What an agent adds to the sum: the packed summary of `n x d` points and `n x 1` outcomes."""
    phi = feature_map(search, X.shape[-1])
    return summarize(phi, X, Y, noise_var=search.noise_var).pack()


def records(phi: InducingFeatures, X: Tensor, Y: Tensor, mechanism: DistributedRecordSum) -> Tensor:
    """What an agent adds to a sum that protects records: one row per observation."""
    features = phi(X) / phi.outputscale.sqrt()
    return mechanism.records(features, Y)


@dataclass(frozen=True, eq=False)
class SupportView:
    """What a sum says.

    Attributes:
        search: The public settings.
        summary: The shared summary, repaired if it is noisy.
        received: As it came.
        posterior: Of the weights.
        model: The shared model.
        mechanism: What has made it noisy; None if it is not.
    """

    search: SupportSearch
    summary: Summary
    received: Summary
    posterior: WeightPosterior
    model: BasisGP
    mechanism: Any


def read_sum(search: SupportSearch, dim: int, total: Tensor, mechanism: Any) -> SupportView:
    """What a sum of contributions, padded or not, says; a noisy one is repaired."""
    phi = feature_map(search, dim)
    received = _summary(search, phi, total, mechanism)
    summary = received if mechanism is None else _repaired(search, received, mechanism)
    model = BasisGP.from_summary(summary, feature_map=phi, noise_var=search.noise_var)
    posterior = WeightPosterior.from_total(summary)
    return SupportView(search, summary, received, posterior, model, mechanism)


def _repaired(search: SupportSearch, noisy: Summary, mechanism: Any) -> Summary:
    if isinstance(mechanism, DistributedRecordSum):
        std = mechanism.moment_noise_std(noise_var=search.noise_var, outputscale=search.outputscale)
    else:
        std = float(torch.as_tensor(mechanism.noise_std).max())
    return repair_total(noisy, moment_noise_std=std)


def _summary(
    search: SupportSearch, phi: InducingFeatures, total: Tensor, mechanism: Any
) -> Summary:
    if not isinstance(mechanism, DistributedRecordSum):
        return Summary.unpack(total[: search.numbers(phi.input_dim)], basis=phi.fingerprint)
    gram, moment = mechanism.gram_and_moment(
        total, noise_var=search.noise_var, outputscale=search.outputscale
    )
    return Summary(gram, moment, phi.fingerprint)


# ------------------------------------------------------------------ an agent's point


def next_point(
    search: SupportSearch,
    space: SearchSpace,
    shared: SupportView | None,
    X: Tensor,
    Y: Tensor,
    *,
    t: int,
    together: bool,
    candidates: Tensor | None,
    stream: Generator,
    own: Tensor | None,
    chosen: Tensor | None = None,
    failed: Tensor | None = None,
) -> Tensor:
    """The next point of an agent, `1 x d`.

    Args:
        search: The public settings.
        space: The map of inputs.
        shared: What the last sum says, if there was one.
        X: Own points, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`.
        t: The round, from 1.
        together: Whether the coin says to use the shared model.
        candidates: The only points that can be evaluated.
        stream: The agent's own random numbers.
        own: What the agent has contributed to that sum from just these data; None if it has not:
            then the shared model knows nothing of its own data in particular.
        chosen: Points that wait for their outcomes, `k x d`: with such, the next one is the best of
            a draw from the posterior.
        failed: Points whose evaluation failed, `m x d`: none is asked again while another is left,
            and from two on the probability of success is modelled.
    """
    chosen, failed = (X[:0] if given is None else given for given in (chosen, failed))
    tried, feasibility = torch.cat([X, chosen]), None
    if len(failed):
        feasibility = feasibility_of(X, failed, LogWarp(torch.zeros(space.dim).double()))
        candidates = None if candidates is None else untried(candidates, failed)
    use_shared = together and shared is not None
    if not use_shared and len(X) == 0:
        random = random_point(space, candidates, stream, failed)
        return random if candidates is not None else space.snap(random)
    pic = use_shared and search.prediction == "pic" and own is not None and len(X) > 0
    draws = search.acquisition == "ts" or len(chosen) > 0
    closed = not draws and not pic and feasibility is None
    if use_shared and closed:
        stream = generator(0, "shared point", t)  # all agents find the same maximum
    if closed:
        moments = _shared_moments(shared) if use_shared else _own_moments(search, X, Y)
        score = _score(search, moments, X)
        near = torch.cat([tried, failed])
        return _best(search, space, score, near, candidates, stream)
    if use_shared:
        assert shared is not None
        model = _shared_model(search, shared, X, Y, own if pic else None)
    else:
        model = _local_model(search, X, Y)
    acquisition = _acquisition(search, model, X, draws, stream)
    if feasibility is not None:
        acquisition = FeasibleAcquisition(acquisition, feasibility, X)
    best, _ = maximize(
        acquisition,
        space.dim,
        generator=stream,
        candidates=candidates,
        tried=tried if len(tried) else None,
        min_distance=0.0 if candidates is not None else MIN_DISTANCE,
        failed=failed,
        snap=space.snap,
        feasible=space.feasible_set,
        num_raw=search.num_raw,
        num_restarts=search.num_restarts,
    )
    return best if candidates is not None else space.snap(best)


# ---- closed forms, whose overhead a published step could not afford

Moments = Callable[[Tensor], tuple[Tensor, Tensor]]  # `n x d` to means and deviations, `n`


def _own_moments(search: SupportSearch, X: Tensor, Y: Tensor) -> Moments:
    """Of the exact own model."""
    known = _own_hyperparameters(search, X, Y)
    kernel = StationaryKernel(math.inf, known.lengthscale, known.outputscale)
    eye = torch.eye(len(X), dtype=torch.float64)
    L = cholesky(kernel(X) + known.noise_var * eye, "the kernel matrix of the site's own points")
    alpha = torch.cholesky_solve(Y - known.mean, L)

    def moments(points: Tensor) -> tuple[Tensor, Tensor]:
        cross = kernel(points, X)
        explained = solve_rows(L, cross).square().sum(dim=-1)
        mean = known.mean + (cross @ alpha).squeeze(-1)
        return mean, _deviation(known.outputscale, explained)

    return moments


def _shared_moments(shared: SupportView | None) -> Moments:
    """Of dPITC's model."""
    assert shared is not None
    phi, posterior, search = shared.model.feature_map, shared.posterior, shared.search

    def moments(points: Tensor) -> tuple[Tensor, Tensor]:
        Phi = phi(points)
        mean, root = posterior.predict(Phi)
        explained = Phi.square().sum(dim=-1) - root.square().sum(dim=-1)
        return mean.squeeze(-1), _deviation(search.outputscale, explained)

    return moments


def _deviation(outputscale: float, explained: Tensor) -> Tensor:
    return (outputscale - explained).clamp_min(1e-12).sqrt()


def _score(search: SupportSearch, moments: Moments, X: Tensor) -> Callable[[Tensor], Tensor]:
    """The acquisition function on moments; improvements in logarithms."""
    if search.acquisition == "ucb":
        width = math.sqrt(search.beta)

        def bound(points: Tensor) -> Tensor:
            mean, deviation = moments(points)
            return mean + width * deviation

        return bound
    with torch.no_grad():
        best = moments(X)[0].max() if len(X) else torch.zeros(()).double()

    def improvement(points: Tensor) -> Tensor:
        mean, deviation = moments(points)
        u = (mean - best) / deviation
        return _log_ei_helper(u) + deviation.log() if search.acquisition == "ei" else log_ndtr(u)

    return improvement


def _best(
    search: SupportSearch,
    space: SearchSpace,
    score: Callable[[Tensor], Tensor],
    X: Tensor,
    candidates: Tensor | None,
    stream: Generator,
) -> Tensor:
    """Where a closed form is largest, `1 x d`."""
    with torch.no_grad():
        if candidates is not None:
            return candidates[int(score(candidates.double()).argmax())].double().unsqueeze(0)
        raw = space.feasible_set.uniform(search.num_raw, stream)
        values = score(raw)
    starts = raw[values.topk(search.num_restarts).indices]
    zero = torch.zeros(space.dim, dtype=torch.float64)
    ends, end_values = ascend(score, starts, zero, zero + 1, feasible=space.feasible_set)
    points = space.snap(torch.cat([ends, raw]))
    values = torch.cat([end_values, values])
    if len(X):
        near = torch.cdist(points, X).amin(dim=-1) < MIN_DISTANCE
        if not bool(near.all()):
            values = values.masked_fill(near, -torch.inf)
    return points[int(values.argmax())].unsqueeze(0)


def _shared_model(
    search: SupportSearch, shared: SupportView, X: Tensor, Y: Tensor, own: Tensor | None
) -> Model:
    if own is None:
        return shared.model
    phi, noise_var = feature_map(search, X.shape[-1]), search.noise_var
    if shared.mechanism is not None:  # clipped, rounded and noisy: take away what went in
        others = shared.received - _summary(search, phi, own, shared.mechanism)
        return PartiallyIndependentGP(
            X,
            Y,
            feature_map=phi,
            noise_var=noise_var,
            summaries=[_repaired(search, others, shared.mechanism)],
        )
    try:
        return PartiallyIndependentGP.from_total(
            X, Y, total=shared.summary, feature_map=phi, noise_var=noise_var
        )
    except NumericalError:  # what went in was tempered, or did not reach the sum
        logger.warning("the site's own data are not in the sum as they are: the sum is used alone")
        return shared.model


def _fitted_at(n: int) -> int:
    """How many of `n` observations the hyperparameters were fitted to: a public schedule."""
    fitted = 1
    while math.ceil(1.25 * fitted) <= n:
        fitted = max(fitted + 1, math.ceil(1.25 * fitted))
    return min(fitted, n)


class _Bytes:
    """A tensor that a cache can compare."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._key = (tuple(tensor.shape), tensor.contiguous().numpy().tobytes())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes) and self._key == other._key


@lru_cache(maxsize=64)
def _fitted(X: _Bytes, Y: _Bytes) -> OwnHyperparameters:
    return fit_own_gp(X.tensor, Y.tensor)


def _own_hyperparameters(search: SupportSearch, X: Tensor, Y: Tensor) -> OwnHyperparameters:
    if search.local == "fitted":
        n = _fitted_at(len(X))
        return _fitted(_Bytes(X[:n]), _Bytes(Y[:n]))
    return OwnHyperparameters(
        lengthscale=torch.full((X.shape[-1],), search.lengthscale, dtype=torch.float64),
        outputscale=search.outputscale,
        noise_var=search.noise_var,
        mean=0.0,
        num_data=len(X),
    )


def _local_model(search: SupportSearch, X: Tensor, Y: Tensor) -> Model:
    return own_gp(X, Y, _own_hyperparameters(search, X, Y))


def _acquisition(
    search: SupportSearch, model: Model, X: Tensor, draws: bool, stream: Generator
) -> AcquisitionFunction:
    if draws:
        return _draw(search, model, X.shape[-1], stream)
    if search.acquisition == "ucb":
        return UpperConfidenceBound(model, beta=search.beta)
    with torch.no_grad():
        posterior: Any = model.posterior(X)
        best = posterior.mean.max()
    kind = LogExpectedImprovement if search.acquisition == "ei" else LogProbabilityOfImprovement
    return kind(model, best_f=best)


def _draw(search: SupportSearch, model: Model, dim: int, stream: Generator) -> AcquisitionFunction:
    if isinstance(model, BasisGP):
        path = DrawMatheronPaths(model, sample_shape=Size(), generator=stream)
        return ThompsonSampling(path)
    kernel = feature_map(search, dim).kernel
    if search.local == "fitted":
        kernel = StationaryKernel.from_gpytorch(model.covar_module, dim)
    phi = RandomFourierFeatures.draw(kernel, 256, generator=stream)
    return ThompsonSampling(draw_path(model, feature_map=phi, generator=stream))
