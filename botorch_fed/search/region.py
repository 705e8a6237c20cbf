r"""Search in one shrinking region, with a model that the whole federation fits by sums.

What agents learn in a round is one sum (`aggregation.secure_sum`); everything here is a function of
public settings and of that sum, so every agent computes the same, and nobody reveals more.

In round `t` a box of half width :math:`h_t` around a centre :math:`c_t` is searched. With
:math:`u = (x - c_t)/h_t` the objective is a quadratic function of `u` plus a squared-exponential
process on a support set inside the box, PITC between agents:

.. math:: f(x) = \psi(u)^\top w + g(u), \qquad w \sim N(0, s^2 I), \quad g \sim GP(0, s^2 a k_\ell).

Observations outside the box count with noise that grows with their distance. The common scale
`s` is profiled out. Which length scale, amplitude, noise and outcome scale (linear, or logarithmic
towards the best) describe the federation's data is chosen by their evidence: agents contribute the
summaries of `num_candidates` kernels, and each agent's part of the evidence is a number in the sum.

The centre moves to the maximum of the shared posterior mean in the box, and the box shrinks by a
public schedule. Every agent draws its own function from the shared posterior and tries its maximum
in the box: the draws differ between agents, and no agent's point is known to another.

What the sum reveals beside the summaries: the number of observations in the box, mean and variance
of the outcomes there, mean and variance of the agents' best outcomes.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition.optimize import ascend
from botorch_fed.errors import NumericalError
from botorch_fed.federation.points import tensor_hash, untried
from botorch_fed.federation.terms import Terms, View, remembered
from botorch_fed.models import (
    AdditiveFeatures,
    InducingFeatures,
    LogWarp,
    StationaryKernel,
    Summary,
)
from botorch_fed.models.feasibility import Feasibility
from botorch_fed.models.features import FeatureMap, PolynomialFeatures
from botorch_fed.models.summary import WeightPosterior, profiled_evidence, summarize
from botorch_fed.models.support import sobol_support
from botorch_fed.rng import Generator, generator
from botorch_fed.search.local import feasibility_of, random_point
from botorch_fed.search.releases import Sum, Sums
from botorch_fed.search.sums import SummedSearch
from botorch_fed.search.support import check_effort, check_horizon, uniform_points

logger = logging.getLogger(__name__)

NUM_MOMENTS = 7
MAX_VALUES = 16  # of a hyperparameter
# Sums are on one grid; what must be finer than a summary is stretched by this.
_FINE = 2.0**12
_WARPS = 2
_JITTER = 1e-8
_FARTHEST = 100.0  # outcomes, in units of the region's scale, where moments are concerned
_LARGEST = 1e3  # an outcome over its noise
_BEYOND = 10.0  # on the logarithmic scale: how far beyond the top an outcome counts
_REACH = 0.2  # of the distance from the mean to the top
# Observations for each coefficient of the quadratic part: the region begins to shrink at the first
# number, and has its final width at the second.
_FEW, _MANY = 1.5, 8.0


@dataclass(frozen=True, eq=False)
class RegionPlan:
    """Where a round searches and how its sum is to be made; public.

    Attributes:
        t: The round whose data are summed.
        centre: The region's centre, a `d` tensor.
        half_width: Half its width.
        mean: What is subtracted from outcomes on the public scale.
        scale: Of outcomes in the region.
        top: Of the logarithmic scale: where it is steepest, in units of `scale` above the mean.
        reach: Of the logarithmic scale: the distance from the top that counts as one.
        kernels: Numbers of the kernels that are compared.
    """

    t: int
    centre: Tensor
    half_width: float
    mean: float
    scale: float
    top: float
    reach: float
    kernels: tuple[int, ...]

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """Lower and upper corner within the unit cube."""
        return (self.centre - self.half_width).clamp(0, 1), (self.centre + self.half_width).clamp(
            0, 1
        )


@dataclass(frozen=True, eq=False)
class RegionMemory:
    """What a site knows of the region.

    Attributes:
        plan: The plan of the next sum.
        seen: The plan of the last sum that it could read; None before the first.
        total: That sum; empty before the first.
        count: Of how many contributions.
        t: The round of the last sum that came, whether it could be read or not.
    """

    plan: RegionPlan
    seen: RegionPlan | None
    total: Tensor = field(repr=False)
    count: int
    t: int


@dataclass(frozen=True, kw_only=True)
class RegionSearch(SummedSearch):
    """The search in a shrinking region.

    Attributes:
        num_inducing: Size of the support set inside the region.
        num_candidates: How many kernels a round compares: the current one, and others at random.
        final_half_width: Half the region's width in the last round, in the unit cube.
        wait: For how many rounds the region stays the whole cube.
        keep: Up to which multiple of the half width an observation counts in full.
        warps: Which outcome scales are compared.
        lengthscales: In half widths of the region.
        amplitudes: Prior variance of the process relative to a coefficient of the quadratic part.
        noises: Noise variance, relative to the same.
        spread: Scales the deviation of an agent's draw from the mean.
        num_raw: Random points that the optimiser looks at.
        num_restarts: How many of the best of them it improves.
        horizon: The number of evaluations of a site, the first ones included, over which the
            region shrinks. A study fills in its budget. As a part of `search.related`, None: the
            region shrinks with the number of observations in the sum.
        given: How many observations a site has before them at most. A study fills it in.
    """

    num_inducing: int = 58
    num_candidates: int = 3
    final_half_width: float = 0.02
    wait: int = 5
    keep: float = 1.5
    warps: tuple[str, ...] = ("linear", "log")
    lengthscales: tuple[float, ...] = (1.0, 2.0, 4.0)
    amplitudes: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0)
    noises: tuple[float, ...] = (1e-5, 1e-3, 1e-1)
    spread: float = 1.0
    num_raw: int = 512
    num_restarts: int = 2
    horizon: int | None = None
    given: int = 0

    memory_type = RegionMemory
    has_basis: ClassVar[bool] = False
    every_sum: ClassVar[bool] = True
    adds: ClassVar[str] = "summaries of its data in a region"
    no_noise: ClassVar[str] = (
        "RegionSearch compares several summaries in each of many sums: noise would drown them. Use "
        "SupportSearch with a mechanism."
    )

    def __post_init__(self) -> None:
        for name in ("warps", "lengthscales", "amplitudes", "noises"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not 1 <= self.num_inducing <= 1024:
            raise InputDataError(f"num_inducing must lie in 1..1024, got {self.num_inducing}.")
        if not 0 < self.final_half_width <= 0.5:
            raise InputDataError(
                f"final_half_width must lie in (0, 0.5], got {self.final_half_width}."
            )
        if not (0 <= self.wait <= 10**6 and 1 <= self.keep <= 1e3):
            raise InputDataError("wait lies in 0..10^6, and keep in [1, 1000].")
        if self.warps not in (("linear",), ("linear", "log"), ("log", "linear")):
            raise InputDataError(f'warps are "linear" and maybe "log", got {self.warps[:3]}.')
        for name in ("lengthscales", "amplitudes", "noises"):
            values = getattr(self, name)
            if not 1 <= len(values) <= MAX_VALUES or not all(1e-12 <= v <= 1e3 for v in values):
                raise InputDataError(
                    f"{name} must be 1 to {MAX_VALUES} numbers from 1e-12 to 1,000."
                )
        if not 1 <= self.num_candidates <= len(self.kernels):
            raise InputDataError(
                f"num_candidates must lie in 1..{len(self.kernels)}, got {self.num_candidates}."
            )
        if not 0 <= self.spread <= 10:
            raise InputDataError(f"spread lies in [0, 10], got {self.spread}.")
        check_effort(self.num_raw, self.num_restarts)
        check_horizon(self.horizon)

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` without a horizon."""
        super().check_terms(terms)
        if self.horizon is None:
            raise InputDataError(
                "RegionSearch shrinks its region over a number of evaluations that is known in "
                "advance: give horizon, e.g. the budget."
            )

    @property
    def kernels(self) -> tuple[tuple[float, float, float], ...]:
        """All kernels that can be chosen: length scale, amplitude and noise."""
        return tuple(
            (lengthscale, amplitude, noise)
            for lengthscale in self.lengthscales
            for amplitude in self.amplitudes
            for noise in self.noises
        )

    def half_width(self, t: int, rounds: int) -> float:
        """The half width of round `t`, from 1/2 in the beginning to the final one."""
        share = max(0, t - self.wait) / max(1, rounds - self.wait)
        return 0.5 * (self.final_half_width / 0.5) ** min(share, 1.0)

    def half_width_of(self, num_data: float, dim: int) -> float:
        """The half width where so many observations are in the sum, without a horizon."""
        each = num_data / _coefficients(dim)
        share = (each - _FEW) / (_MANY - _FEW)
        return 0.5 * (self.final_half_width / 0.5) ** min(max(share, 0.0), 1.0)

    def num_features(self, dim: int) -> int:
        """Features of the quadratic part and of the process."""
        return _coefficients(dim) + self.num_inducing

    def numbers(self, dim: int) -> int:
        """How many numbers an agent contributes to a sum."""
        M = self.num_features(dim)
        per_kernel = M * (M + 1) // 2 + 1 + _WARPS * (M + 1)
        return self.num_candidates * per_kernel + NUM_MOMENTS

    def largest(self, num_data: int) -> float:
        """The largest number an agent with so many observations contributes, with room."""
        return float(2.0 ** math.ceil(math.log2(400.0 * max(num_data, 1) / min(self.noises))))

    # -------------------------------------------------------------- what a site says

    def rounds(self, terms: Terms) -> int | None:
        """The number of queries over which the region shrinks; None without a horizon."""
        if self.horizon is None:
            return None
        return math.ceil(max(self.horizon - terms.num_initial, 0) / terms.q)

    def size(self, terms: Terms) -> int:
        """How many numbers a message has."""
        return self.numbers(terms.space.dim)

    def bound(self, terms: Terms) -> float:
        """The largest number that a site contributes."""
        return self.largest((self.horizon or 0) + self.given)

    def start(self, view: View) -> RegionMemory:
        """The whole cube."""
        none = torch.zeros(0, dtype=torch.float64)
        return RegionMemory(first_plan(self, view.terms.space.dim), None, none, 0, -1)

    def received(self, view: View) -> RegionMemory:
        """The region after the sums that came, each read once and after all those before."""
        memory: RegionMemory = view.memory
        release: Sums | None = view.release
        for found in () if release is None else release.sums:
            if found.t > memory.t and found.previous == memory.t:
                memory = self.after(view, memory, found)
        return memory

    def after(self, view: View, memory: RegionMemory, found: Sum) -> RegionMemory:
        """The memory after the next sum."""
        plan = replace(memory.plan, t=found.t)  # it has waited through rounds without a sum
        try:
            if found.total is None:
                raise NumericalError("it cannot be decrypted")
            read = remembered_view(self, view.terms, plan, found.total, found.count)
        except NumericalError as error:  # an agent has spoilt it, for all alike
            logger.warning(
                "agent %r can not read the sum of round %d: %s", view.name, found.t, error
            )
            return replace(memory, plan=replace(plan, t=found.t + 1), t=found.t)
        return RegionMemory(read.following, plan, found.total, found.count, found.t)

    def message(self, view: View) -> Tensor | None:
        """The summaries of all data by the plan of the round."""
        memory: RegionMemory = view.memory
        return contribution(self, replace(memory.plan, t=view.t), view.X, view.Y)

    # -------------------------------------------------------------- where it looks

    def first(self, view: View, count: int) -> Tensor:
        """Uniform points, `count x d`."""
        return uniform_points(view, count)

    def has_messages(self, view: View) -> bool:
        """Always: a site without data is dealt nothing."""
        return True

    def point(self, view: View) -> Tensor:
        """The next point, `1 x d`: of the region, or at random before the first sum."""
        memory: RegionMemory = view.memory
        agents, space = view.terms.agents, view.terms.space
        stream = view.stream("query", view.n - view.first)
        if memory.seen is None:
            point = random_point(space, None, stream, view.failed)
        else:
            read = remembered_view(self, view.terms, memory.seen, memory.total, memory.count)
            turn = agents[read.plan.t % len(agents)] == view.name
            point = next_point(
                self,
                read,
                torch.cat([view.X, view.avoid]),
                stream=stream,
                turn=turn,
                feasible=_feasible(view),
            )
        if view.candidates is None:
            return space.snap(point)
        fresh = untried(view.candidates, view.X).double()
        return fresh[torch.cdist(point, fresh).argmin()].unsqueeze(0)


def _feasible(view: View) -> Feasible | None:
    """What succeeds at this site; None while failures do not repeat."""
    if not len(view.failed):
        return None
    warp = LogWarp(torch.zeros(view.terms.space.dim).double())
    feasibility = feasibility_of(view.X, view.failed, warp)
    return None if feasibility is None else Feasible(feasibility, view.X)


def remembered_view(
    search: RegionSearch, terms: Terms, plan: RegionPlan, total: Tensor, count: int
) -> RegionView:
    """What a sum says, worked out once for all agents of a process."""
    numbers = (plan.t, plan.half_width, plan.mean, plan.scale, plan.top, plan.reach, plan.kernels)
    rounds = search.rounds(terms)
    key = (search, rounds, numbers, count, tensor_hash(plan.centre), tensor_hash(total))
    return remembered(key, lambda: read_sum(search, plan, total, num_agents=count, rounds=rounds))


def first_plan(
    search: RegionSearch, dim: int, *, t: int = 0, mean: float = 0.0, scale: float = 1.0
) -> RegionPlan:
    """The plan of the first sum: the whole cube.

    Args:
        search: The public settings.
        dim: How many inputs there are.
        t: The round.
        mean: Of outcomes; default as on the public scale.
        scale: Of outcomes, alike.
    """
    centre = torch.full((dim,), 0.5, dtype=torch.float64)
    kernels = _compared(search, search.kernels.index(_middle(search)), t)
    return RegionPlan(t, centre, 0.5, mean, scale, 3.0, 1.0, kernels)


def _coefficients(dim: int) -> int:
    """Of a quadratic function."""
    return 1 + 2 * dim + dim * (dim - 1) // 2


def _middle(search: RegionSearch) -> tuple[float, float, float]:
    parts = (search.lengthscales, search.amplitudes, search.noises)
    a, b, c = (part[len(part) // 2] for part in parts)
    return a, b, c


def _compared(search: RegionSearch, chosen: int, t: int) -> tuple[int, ...]:
    """The chosen kernel, and others at random, in public."""
    order = generator(0, "kernels", t).uniform(len(search.kernels)).argsort().tolist()
    return (chosen, *[k for k in order if k != chosen][: search.num_candidates - 1])


# ------------------------------------------------------------------ the basis of a round


@lru_cache(maxsize=8)
def _support(dim: int, size: int, seed: int) -> Tensor:
    return sobol_support(dim, size, seed=seed)


def _feature_map(search: RegionSearch, plan: RegionPlan, kernel: int) -> FeatureMap:
    """The basis of a kernel in a region; public, and made once for all agents of a process."""
    return _made(search, plan.t, tuple(plan.centre.tolist()), plan.half_width, kernel)


@lru_cache(maxsize=16)
def _made(
    search: RegionSearch, t: int, at: tuple[float, ...], half_width: float, kernel: int
) -> FeatureMap:
    centre = torch.tensor(at, dtype=torch.float64)
    plan = RegionPlan(t, centre, half_width, 0.0, 1.0, 0.0, 1.0, ())
    lengthscale, amplitude, _ = search.kernels[kernel]
    lower, upper = plan.box
    dim = len(plan.centre)
    width = torch.full((dim,), half_width, dtype=torch.float64)
    Z = lower + (upper - lower) * _support(dim, search.num_inducing, t)
    process = StationaryKernel(math.inf, lengthscale * width, amplitude)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # points that others determine: harmless here
        parts = [
            PolynomialFeatures(centre, half_width),
            InducingFeatures(process, Z, jitter=_JITTER),
        ]
    return AdditiveFeatures(parts, groups=[range(dim), range(dim)])


def _noise(
    search: RegionSearch, plan: RegionPlan, kernel: int, X: Tensor, linear: Tensor
) -> Tensor:
    """Noise variance of every observation, `n x 1`: larger far from the region.

    The second part bounds what an outcome far off the region's scale contributes, so that sums
    stay exact on the public grid.
    """
    distance = ((X - plan.centre) / plan.half_width).abs().amax(dim=-1, keepdim=True)
    relative = (distance / search.keep).clamp(max=30.0)
    factor = torch.where(relative > 1, 100.0 * relative**6, torch.ones_like(relative))
    return search.kernels[kernel][2] * factor + (linear / _LARGEST).square()


def _in_reach(search: RegionSearch, plan: RegionPlan, X: Tensor) -> Tensor:
    distance = ((X - plan.centre) / plan.half_width).abs().amax(dim=-1)
    return distance <= search.keep


def _outcomes(search: RegionSearch, plan: RegionPlan, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Outcomes on both scales, `2 x n x 1`, and the summed log slope of the second to the first."""
    linear = (Y - plan.mean) / plan.scale
    gap = (plan.top - linear) / plan.reach
    # Logarithmic below the top, linear above: a new best may lie beyond what was expected.
    log = -torch.where(gap > 0, torch.log1p(gap.clamp_min(0.0)), gap.clamp_min(-_BEYOND))
    slope = -torch.log1p(gap.clamp_min(0.0)).sum() - len(Y) * math.log(plan.reach)
    return torch.stack([linear, log]), slope


# ------------------------------------------------------------------ contributions and sums


@dataclass(frozen=True, eq=False)
class RegionView:
    """What the sum of a plan says: the shared posterior, and the next plan.

    Attributes:
        plan: The plan of the sum.
        features: The chosen basis.
        posterior: Of its weights, up to the scale.
        scale: The common scale `s`.
        kernel: The chosen kernel.
        warp: The chosen outcome scale.
        evidence: Log evidence of every kernel and outcome scale.
        raw: Points of the region that optimisers look at, and
        raw_features: their features.
        following: The next plan.
    """

    plan: RegionPlan
    features: FeatureMap
    posterior: WeightPosterior
    scale: float
    kernel: int
    warp: int
    evidence: Tensor
    raw: Tensor = field(repr=False)
    raw_features: Tensor = field(repr=False)
    following: RegionPlan


def contribution(search: RegionSearch, plan: RegionPlan, X: Tensor, Y: Tensor) -> Tensor:
    """What an agent adds to the sum of a plan.

    Args:
        search: The public settings.
        plan: The plan.
        X: Own points in the unit cube, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`, larger is better.

    Returns:
        A `search.numbers(d)` tensor.
    """
    d = X.shape[-1]
    if len(X) == 0:
        return torch.zeros(search.numbers(d), dtype=torch.float64)
    scaled, slope = _outcomes(search, plan, Y)
    parts = []
    for kernel in plan.kernels:
        phi = _feature_map(search, plan, kernel)
        noise = _noise(search, plan, kernel, X, scaled[0])
        summary = summarize(phi, X.expand(_WARPS, -1, -1), scaled, noise_var=noise)
        assert summary.square is not None
        assert summary.log_det is not None
        packed = summary.pack()  # the gram of both outcome scales is the same
        M = phi.num_features
        log_det = summary.log_det.reshape(-1)[:1]
        parts += [packed[0, :-M], packed[:, -M:].reshape(-1), summary.square, log_det]
    linear = scaled[0, :, 0].clamp(-_FARTHEST, _FARTHEST)
    near = linear[_in_reach(search, plan, X)]
    best = linear.max()
    fine = torch.stack([near.sum(), near.square().sum(), best, best.square(), slope])
    counts = torch.tensor([float(len(near)), float(len(X))], dtype=torch.float64)
    return torch.cat([*parts, _FINE * fine, counts])


def read_sum(
    search: RegionSearch, plan: RegionPlan, total: Tensor, *, num_agents: int, rounds: int | None
) -> RegionView:
    """What a sum says: the shared posterior, and the next plan.

    Args:
        search: The public settings.
        plan: The plan of the sum.
        total: The sum of all contributions.
        num_agents: How many agents contributed.
        rounds: How many rounds there are; None if the region shrinks with the observations.

    Raises:
        NumericalError: The sum is no sum of summaries.
    """
    fine, counts = total[-NUM_MOMENTS:-2] / _FINE, total[-2:]
    summaries, scales, evidence = _compare(search, plan, total)
    best = int(evidence.argmax())
    index, warp = best // _WARPS, best % _WARPS
    chosen = summaries[index]
    posterior = WeightPosterior.from_total(
        replace(chosen, moment=chosen.moment[warp], gram=chosen.gram[0], square=None, log_det=None)
    )
    phi = _feature_map(search, plan, plan.kernels[index])
    lower, upper = plan.box
    raw = lower + (upper - lower) * _support(len(plan.centre), search.num_raw, plan.t)
    found = RegionView(
        plan=plan,
        features=phi,
        posterior=posterior,
        scale=math.sqrt(float(scales[index, warp])),
        kernel=plan.kernels[index],
        warp=warp,
        evidence=evidence,
        raw=raw,
        raw_features=phi(raw).detach(),
        following=plan,
    )
    if rounds is None:
        half_width = search.half_width_of(float(counts[1]), len(plan.centre))
    else:
        half_width = search.half_width(plan.t + 1, rounds)
    following = _following(search, found, fine, float(counts[0]), num_agents, half_width)
    return replace(found, following=following)


def _compare(
    search: RegionSearch, plan: RegionPlan, total: Tensor
) -> tuple[list[Summary], Tensor, Tensor]:
    """Summaries of all kernels, and scales and log evidence, kernels x outcome scales."""
    rows = total[:-NUM_MOMENTS].reshape(search.num_candidates, -1)
    num_data = max(round(float(total[-1])), 1)
    summaries = [
        _summary(_feature_map(search, plan, kernel), row, num_data)
        for kernel, row in zip(plan.kernels, rows, strict=True)
    ]
    fits = [profiled_evidence(summary) for summary in summaries]
    evidence = torch.stack([fit[0] for fit in fits])
    evidence[:, 1] += total[-NUM_MOMENTS + 4] / _FINE  # a density of what was observed
    if "log" not in search.warps:
        evidence[:, 1] = -math.inf
    return summaries, torch.stack([fit[1] for fit in fits]), evidence


def relatedness(search: RegionSearch, found: RegionView, total: Tensor, mine: Tensor) -> float:
    r"""How much more likely own data are if all sites have one function.

    .. math:: \log p(D) - \log p(D_{-i}) - \max_k \log p_k(D_i),

    the evidence of own data given all others', under the kernel that the sum has chosen, over that
    of own data by themselves, under the best kernel for them. Of data outside the region both know
    little.

    Args:
        search: The public settings.
        found: What the sum says.
        total: The sum.
        mine: What oneself has put into it.

    Returns:
        The difference of logarithms; 0 where they say nothing: somebody has no data, or outcomes
        that are all the same, or the rest is no sum of summaries.
    """
    others = total - mine
    if min(float(others[-1]), float(mine[-1])) < 0.5:
        return 0.0
    row = found.plan.kernels.index(found.kernel)
    try:
        rest, alone = (_compare(search, found.plan, part)[2] for part in (others, mine))
    except NumericalError:
        return 0.0
    gain = float(found.evidence[row, found.warp] - rest[row, found.warp] - alone.max())
    return gain if math.isfinite(gain) else 0.0


def _summary(phi: FeatureMap, row: Tensor, num_data: int) -> Summary:
    M = phi.num_features
    gram, moments, square, log_det = row.split([M * (M + 1) // 2, _WARPS * M, _WARPS, 1])
    packed = torch.cat([gram.expand(_WARPS, -1), moments.reshape(_WARPS, M)], dim=-1)
    received = Summary.unpack(packed, basis=phi.fingerprint)
    return replace(received, num_data=num_data, square=square, log_det=log_det)


def _following(
    search: RegionSearch,
    found: RegionView,
    fine: Tensor,
    inside: float,
    num_agents: int,
    half_width: float,
) -> RegionPlan:
    plan = found.plan
    total, squares, best, best_squares = fine[:4].tolist()
    mean, spread = 0.0, 1.0
    if inside > 1:
        mean = total / inside
        spread = math.sqrt(max(squares / inside - mean**2, 1e-6 * max(1.0, mean**2)))
    best_mean = best / num_agents
    best_spread = math.sqrt(max(best_squares / num_agents - best_mean**2, 0.0))
    # No sum says what the best is; this is near it.
    top = max((best_mean + best_spread - mean) / spread, 0.1)
    start = plan.centre.clamp(*plan.box).unsqueeze(0)
    centre = _maximum(search, found, found.posterior.mean, start)
    return RegionPlan(
        t=plan.t + 1,
        centre=centre.squeeze(0),
        half_width=half_width,
        mean=plan.mean + plan.scale * mean,
        scale=plan.scale * spread,
        top=top,
        reach=_REACH * top,
        kernels=_compared(search, found.kernel, plan.t + 1),
    )


# ------------------------------------------------------------------ an agent's point


@dataclass(frozen=True, eq=False)
class Feasible:
    """What succeeds at a site, and where an evaluation has."""

    model: Feasibility
    X: Tensor

    def weigh(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A function above its least value at `X`, times the probability of success."""
        least = float(function(self.X).min()) if len(self.X) else 0.0

        def weighed(X: Tensor) -> Tensor:
            above = function(X) - least
            return torch.where(above > 0, above * self.model(X).exp(), above)

        return weighed


def next_point(
    search: RegionSearch,
    found: RegionView,
    tried: Tensor,
    *,
    stream: Generator,
    turn: bool,
    feasible: Feasible | None = None,
) -> Tensor:
    """The maximum in the region of a function drawn from the shared posterior, `1 x d`.

    Args:
        search: The public settings.
        found: What the last sum says.
        tried: Own points, `n x d`; the new one keeps away from them.
        stream: The agent's own random numbers.
        turn: Whether it is this agent's turn to try the maximum of the mean. Where the model is
            certain all draws have the same maximum: the others then try the neighbourhood.
        feasible: What succeeds, where evaluations of this agent have failed.
    """
    posterior = found.posterior
    deviation = posterior.sample(generator=stream) - posterior.mean
    weights = posterior.mean + search.spread * found.scale * deviation
    start = found.following.centre.clamp(*found.plan.box).unsqueeze(0)
    best = _maximum(search, found, weights, start, feasible)
    known = tried if turn else torch.cat([tried, found.following.centre.unsqueeze(0)])
    if len(known) and float(torch.cdist(best, known).min()) < 0.01 * found.plan.half_width:
        nudge = 0.05 * found.plan.half_width * stream.normal(1, best.shape[-1])
        best = (best + nudge).clamp(0.0, 1.0)
    return best


def _maximum(
    search: RegionSearch,
    found: RegionView,
    weights: Tensor,
    start: Tensor,
    feasible: Feasible | None = None,
) -> Tensor:
    """Where in the region a function of the basis is largest, `1 x d`."""
    lower, upper = found.plan.box

    def draw(X: Tensor) -> Tensor:
        return found.features(X) @ weights

    function: Callable[[Tensor], Tensor] = draw
    values = found.raw_features @ weights
    if feasible is not None:
        function = feasible.weigh(draw)
        with torch.no_grad():
            values = function(found.raw)
    first = found.raw[values.topk(search.num_restarts).indices]
    points, ends = ascend(function, torch.cat([first, start]), lower, upper)
    return points[ends.argmax()].unsqueeze(0)
