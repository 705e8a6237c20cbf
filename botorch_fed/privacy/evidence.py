r"""What runs of two worlds prove: claims, checks, bounds on epsilon, and tests of noise.

Clopper and Pearson bound the rates of false alarms and misses of a test; what a pair of rates
implies for epsilon is compared with the claimed curve. Noise is compared with the law that the
documentation states. `privacy.audit` runs mechanisms, and says what such evidence is worth.

References:
    * [Massart1990]_ P. Massart. The tight constant in the Dvoretzky-Kiefer-Wolfowitz inequality.
      Annals of Probability 18, 1990.
    * [Davidson2001]_ K. Davidson, S. Szarek. Local operator theory, random matrices and Banach
      spaces. Handbook of the Geometry of Banach Spaces, 2001 (Theorem II.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from scipy.linalg import helmert
from scipy.special import betaincinv, gammaincinv, ndtri
from torch import Tensor

from botorch_fed.privacy.accounting import Guarantee

# From a world (canary present?) and the runs' numbers to one score per run, high where present.
Sampler = Callable[[bool, range], Tensor]

CURVE = (1e-2, 3e-2, 0.1, 0.2, 0.3)  # where a claimed curve is checked, beside the caller's delta
NOISE_LEVEL = 1e-6  # probability that healthy noise fails one of the white-box checks
_LATTICE_CELL = 2.0**-21  # largest probability of one value of a lattice Gaussian, see `repeats`
_LARGEST_COVARIANCE = 2000
_LOG_LEVEL = math.log(NOISE_LEVEL)


@dataclass(frozen=True)
class Claim:
    r"""What a whole transcript is claimed to satisfy.

    Attributes:
        guarantees: Points :math:`(\varepsilon, \delta)` of the claimed curve; the first is the
            one that a report states.
        mu: The claimed parameter of Gaussian differential privacy, or None where there is none.
    """

    guarantees: tuple[Guarantee, ...]
    mu: float | None = None

    def __post_init__(self) -> None:
        if not self.guarantees:
            raise InputDataError("A claim needs at least one (epsilon, delta) point, got none.")

    def least_misses(self, false_alarms: Tensor) -> Tensor:
        r"""The claimed trade-off curve: the least rate of misses at given rates of false alarms.

        Args:
            false_alarms: Rates in [0, 1], any shape.

        Returns: A tensor of the same shape.
        """
        least = torch.zeros_like(false_alarms)
        for g in self.guarantees:
            room = 1 - g.delta - false_alarms
            least = torch.maximum(least, 1 - g.delta - math.exp(g.epsilon) * false_alarms)
            least = torch.maximum(least, math.exp(-g.epsilon) * room)
        if self.mu is not None:
            gaussian = torch.special.ndtr(torch.special.ndtri(1 - false_alarms) - self.mu)
            least = torch.maximum(least, gaussian)
        return least


@dataclass(frozen=True)
class Check:
    """One comparison: what was measured and what it was allowed to be.

    Attributes:
        name: What is compared.
        measured: The figure of the runs.
        relation: On which side of the limit a healthy mechanism is.
        limit: The claimed figure, or the critical value of a test of it.
        detail: What else there is to say.
        box: "black" if only what an adversary sees was used: a failure refutes the guarantee.
            "white" if the comparison is with the documentation.
    """

    name: str
    measured: float
    relation: Literal["<=", ">="]
    limit: float
    detail: str = ""
    box: Literal["black", "white"] = "white"

    @property
    def passed(self) -> bool:
        """Whether the measured figure is on the right side of the limit (NaN is not)."""
        if self.relation == "<=":
            return self.measured <= self.limit
        return self.measured >= self.limit

    def __str__(self) -> str:
        mark = "ok  " if self.passed else "FAIL"
        text = f"{mark}  {self.name}: {self.measured:.4g} {self.relation} {self.limit:.4g}"
        return f"{text}  ({self.detail})" if self.detail else text


@dataclass(frozen=True)
class OperatingPoint:
    r"""One threshold and how often it erred.

    Attributes:
        threshold: Scores above it say "present".
        false_alarms: Share of runs without the canary that were called present.
        misses: Share of runs with the canary that were not.
        false_alarms_bound: Clopper-Pearson upper bound :math:`\bar F_P`.
        misses_bound: Clopper-Pearson upper bound :math:`\bar F_N`.
    """

    threshold: float
    false_alarms: float
    misses: float
    false_alarms_bound: float
    misses_bound: float

    def epsilon(self, delta: float) -> float:
        """The lower bound on epsilon at a delta; at least zero."""
        alarms, misses = self.false_alarms_bound, self.misses_bound
        gains = [(1 - delta - misses, alarms), (1 - delta - alarms, misses)]
        return max([0.0, *(math.log(gain / loss) for gain, loss in gains if gain > 0)])

    @property
    def mu(self) -> float:
        """The lower bound on the parameter of Gaussian differential privacy; at least zero."""
        difference = ndtri(1 - self.false_alarms_bound) - ndtri(self.misses_bound)
        return max(0.0, float(difference))


@dataclass(frozen=True, eq=False)
class AuditReport:
    r"""What an audit found; see the module for what it can not find.

    Attributes:
        subject: What was audited, e.g. the mechanism's `repr`.
        claim: What the ledger was charged, for the whole transcript.
        checks: All comparisons, black box first.
        points: The thresholds and their errors.
        scores: `2 x runs` scores, without and with the canary.
        rounds: Releases per transcript.
        confidence: Of the lower bounds, all thresholds together.
        private: False if the noise was seeded.
    """

    subject: str
    claim: Claim
    checks: tuple[Check, ...]
    points: tuple[OperatingPoint, ...]
    scores: Tensor = field(repr=False)
    rounds: int
    confidence: float
    private: bool

    @property
    def passed(self) -> bool:
        """Whether no check contradicts the claim."""
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that contradict the claim."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def runs(self) -> int:
        """Runs per world."""
        return self.scores.shape[-1]

    @property
    def guarantee(self) -> Guarantee:
        """The claimed guarantee at the caller's delta."""
        return self.claim.guarantees[0]

    @property
    def epsilon_lower_bound(self) -> float:
        """What the runs prove epsilon to be at least, at the guarantee's delta."""
        return max(point.epsilon(self.guarantee.delta) for point in self.points)

    @property
    def mu_lower_bound(self) -> float | None:
        """What the runs prove mu to be at least; None where no mu is claimed."""
        return None if self.claim.mu is None else max(point.mu for point in self.points)

    @property
    def verdict(self) -> str:
        """One plain sentence."""
        claimed = self.guarantee
        stated = (
            f"epsilon = {claimed.epsilon:.3g} at delta = {claimed.delta:g} "
            f"({claimed.unit}, {claimed.adjacency}, {self.rounds} releases)"
        )
        seeded = "" if self.private else "; the noise was seeded (private=False)"
        if self.passed:
            return (
                f"Passed: {self.runs} runs per world show no violation of {stated}; they prove "
                f"epsilon >= {self.epsilon_lower_bound:.3g} at {self.confidence:.4g} confidence"
                f"{seeded}."
            )
        found = ", ".join(check.name for check in self.failures)
        if any(check.box == "black" for check in self.failures):
            return f"FAILED: {self.runs} runs per world contradict {stated}: {found}{seeded}."
        return f"FAILED: not as documented, so nothing supports {stated}: {found}{seeded}."

    def __str__(self) -> str:
        lines = [self.verdict, f"  {self.subject}", *(f"  {check}" for check in self.checks)]
        return "\n".join(lines)


def audit_transcripts(
    sampler: Sampler,
    claim: Claim,
    *,
    subject: str,
    rounds: int,
    private: bool,
    runs: int = 2000,
    confidence: float = 0.99,
    thresholds: Sequence[float] | None = None,
    residuals: Tensor | None = None,
) -> AuditReport:
    r"""Audit anything that can be run in two worlds; `audit` is this for the Gaussian sums.

    Args:
        sampler: From a world (is the canary present?) and the numbers of the runs to one score
            per run, larger where the canary seems present: a projection of the whole transcript
            on the whitened difference of means, or a log-likelihood ratio. Other numbers must
            give independent runs.
        claim: What a transcript is claimed to satisfy.
        subject: What is audited, for the report.
        rounds: Releases per transcript, for the report.
        private: Whether the noise was secret, for the report.
        runs: Runs per world.
        confidence: Of the lower bounds.
        thresholds: Scores above a threshold say "present"; fixed in advance. Default: five,
            chosen on `runs` separate runs per world, the numbers from `runs` on.
        residuals: `n x rounds x regions x M` whitened releases of zero contributions, for
            `noise_checks`.
    """
    if thresholds is None:
        pilot = range(runs, 2 * runs)
        thresholds = thresholds_of(sampler(False, pilot), sampler(True, pilot), runs)
    checks, points, scores = black_box(
        sampler, claim, runs=runs, confidence=confidence, thresholds=thresholds
    )
    checks += () if residuals is None else noise_checks(residuals)
    return AuditReport(subject, claim, checks, points, scores, rounds, confidence, private)


def noise_checks(residuals: Tensor, cell: float = 0.0) -> tuple[Check, ...]:
    r"""White-box checks that whitened releases of zero contributions are standard normals.

    Each check fails healthy noise with probability `NOISE_LEVEL` at most.

    Args:
        residuals: `n x rounds x regions x M` releases divided by their documented noise, such
            that all numbers should be independent and standard normal.
        cell: The step of their lattice, where it is coarse.
    """
    if residuals.ndim != 4 or residuals.numel() == 0:
        raise InputDataError(
            "Residuals must be a non-empty `n x rounds x regions x M` tensor, got shape "
            f"{tuple(residuals.shape)}."
        )
    _, rounds, regions, _ = residuals.shape
    checks = [_mean_squares("noise in each round and region", residuals)]
    if rounds > 1:
        contrasts = torch.einsum("kt,ntrm->nkrm", _contrasts(rounds), residuals)
        checks.append(_mean_squares("noise in differences between rounds", contrasts))
    if regions > 1:
        contrasts = torch.einsum("kr,ntrm->ntkm", _contrasts(regions), residuals)
        checks.append(_mean_squares("noise in differences between regions", contrasts))
    checks += _spectrum(residuals)
    checks.append(_distribution(residuals, cell))
    checks.append(repeats(residuals, cell))
    return tuple(checks)


# --- statistics ---------------------------------------------------------------------------------


def thresholds_of(without: Tensor, present: Tensor, runs: int) -> tuple[float, ...]:
    """Five thresholds: no false alarm to be expected, few, in between, few misses, no miss."""
    rare = 1 / (4 * runs)
    middle = float(without.median() + present.median()) / 2
    alarms, misses = (
        np.quantile(scores.numpy(), levels).tolist()
        for scores, levels in ((without, [1 - rare, 0.95]), (present, [0.05, rare]))
    )
    return (*alarms, middle, *misses)


def black_box(
    sampler: Sampler,
    claim: Claim,
    *,
    runs: int,
    confidence: float,
    thresholds: Sequence[float],
) -> tuple[tuple[Check, ...], tuple[OperatingPoint, ...], Tensor]:
    if runs < 10 or not 0 < confidence < 1 or not thresholds:
        raise InputDataError(
            "An audit needs at least 10 runs, a confidence in (0, 1) and a threshold, got "
            f"{runs} runs, {confidence} and {len(thresholds)} thresholds."
        )
    scores = torch.stack([sampler(False, range(runs)), sampler(True, range(runs))])
    level = (1 - confidence) / (2 * len(thresholds))
    points = tuple(_operating_point(scores, threshold, level) for threshold in thresholds)
    checks = [
        Check(
            f"lower bound on epsilon at delta = {g.delta:g}",
            max(point.epsilon(g.delta) for point in points),
            "<=",
            g.epsilon,
            box="black",
        )
        for g in claim.guarantees
    ]
    if claim.mu is not None:
        mu = max(point.mu for point in points)
        checks.append(Check("lower bound on mu", mu, "<=", claim.mu, box="black"))
    return tuple(checks), points, scores


def _operating_point(scores: Tensor, threshold: float, level: float) -> OperatingPoint:
    runs = scores.shape[-1]
    alarms = int((scores[0] > threshold).sum())
    misses = runs - int((scores[1] > threshold).sum())  # a NaN is never called present
    return OperatingPoint(
        threshold,
        alarms / runs,
        misses / runs,
        clopper_pearson(alarms, runs, level),
        clopper_pearson(misses, runs, level),
    )


def clopper_pearson(count: int, runs: int, level: float) -> float:
    """The upper bound on a rate that is too low with probability `level` at most."""
    return 1.0 if count == runs else float(betaincinv(count + 1, runs - count, 1 - level))


def _log_binomial(n: int, k: int) -> float:
    if k > n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _contrasts(size: int) -> Tensor:
    return torch.from_numpy(helmert(size))


def _mean_squares(name: str, residuals: Tensor) -> Check:
    """The smallest mean square of the cells (second and third axis) of `n x … x … x M`."""
    squares = residuals.square().mean(dim=(0, 3))
    degrees = residuals.shape[0] * residuals.shape[3]
    chi_squared = 2 * float(gammaincinv(degrees / 2, NOISE_LEVEL / squares.numel()))
    limit = chi_squared / degrees
    return Check(name, float(squares.min()), ">=", limit, "smallest mean square, 1 = documented")


def _spectrum(residuals: Tensor) -> list[Check]:
    r"""The smallest eigenvalue of the second moments of all coordinates together.

    It vanishes as soon as any coordinate is a function of the others. For `n x D` standard normals
    the smallest singular value is below :math:`\sqrt n - \sqrt D - t` with probability
    :math:`e^{-t^2/2}` at most [Davidson2001]_; where that is no positive number, nothing is said.
    """
    flat = residuals.flatten(start_dim=1)
    runs, size = flat.shape
    slack = math.sqrt(2 * math.log(1 / NOISE_LEVEL))
    singular = math.sqrt(runs) - math.sqrt(size) - slack
    if singular <= 0 or size > _LARGEST_COVARIANCE:
        return []
    smallest = float(torch.linalg.eigvalsh(flat.T @ flat / runs)[0])
    name = "smallest eigenvalue of the noise covariance"
    return [Check(name, smallest, ">=", singular**2 / runs, f"{size} coordinates, 1 = documented")]


def _distribution(residuals: Tensor, cell: float) -> Check:
    r"""The largest distance between the distribution of all numbers and the normal one.

    For `n` normals it exceeds `t` with probability :math:`2 e^{-2 n t^2}` at most [Massart1990]_.
    """
    values = residuals.flatten().sort().values
    count = values.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    normal = torch.special.ndtr(values)
    distance = torch.maximum((steps[1:] - normal).max(), (normal - steps[:-1]).max())
    limit = math.sqrt(math.log(2 / NOISE_LEVEL) / (2 * count)) + cell / math.sqrt(2 * math.pi)
    return Check("distance of the noise from normal", float(distance), "<=", limit)


def repeats(
    residuals: Tensor,
    cell: float = 0.0,
    name: str = "occurrences of one and the same release",
) -> Check:
    r"""How often the most frequent release occurs: un-noised ones and replays do it often.

    A coordinate has spacing :math:`\gamma \le 2^{-20}` standard deviations, so one value has
    probability at most :math:`\gamma/\sqrt{2\pi} < 2^{-21}`, and `k` of `m` releases with `D`
    coordinates agree with probability :math:`\binom{m}{k} 2^{-21 D (k-1)}` at most.
    """
    releases = residuals.flatten(end_dim=1).flatten(start_dim=1)
    count, size = releases.shape
    allowed = 1
    chance = max(_LATTICE_CELL, cell / math.sqrt(2 * math.pi))
    while _log_binomial(count, allowed + 1) + size * allowed * math.log(chance) > _LOG_LEVEL:
        allowed += 1
    most = int(releases.unique(dim=0, return_counts=True)[1].max())
    return Check(name, most, "<=", allowed)
