r"""Empirical audit of a mechanism: does the program keep the guarantee on paper?

An audit runs the shipped program, not a model of it, in two worlds that differ by one agent's
contributions, the canary, and asks whether anybody could tell the worlds apart better than the
guarantee allows. Statistic, thresholds and confidence are fixed before the first run:

- *Worlds.* Zero-out: the canary against nothing; replace-one: the canary `v` against `-v`. The
  canary is an agent with the largest weights and a vector far outside the clip bound; its sign
  alternates from round to round, so that noise used twice cancels. Everybody else contributes
  zero, which costs nothing: the adversary knows their contributions and would subtract them.
- *Statistic.* The log-likelihood ratio of the whole transcript under the documented law: the most
  powerful one if the program is right. The transcript is whitened by what the documentation says
  the noise is, computed here from the constructor's arguments, not asked from the mechanism.
- *Bounds.* With :math:`n` runs per world and a threshold, Clopper and Pearson give upper bounds
  :math:`\bar F_P, \bar F_N` on the rates of false alarms and misses, hence lower bounds on what the
  program delivers, to be compared with what its ledger was charged:

  .. math:: \varepsilon &\ge \max\bigl(\ln\tfrac{1 - \delta - \bar F_N}{\bar F_P},
            \ln\tfrac{1 - \delta - \bar F_P}{\bar F_N}\bigr) \\
            \mu &\ge \Phi^{-1}(1 - \bar F_P) - \Phi^{-1}(\bar F_N)
                 \qquad\text{(Gaussian differential privacy, everybody sampled)}

  The two bounds hold at once for every :math:`\delta`, so a claimed trade-off curve is checked at
  several; only thresholds are charged to the confidence (Bonferroni).
- *White box.* Where all contributions are zero, the whitened transcript must be independent
  standard normals: mean squares in each region and round, of contrasts between rounds and between
  regions, the smallest eigenvalue of the covariance of everything, the distribution, and releases
  that occur twice; and with the canary, the same in the directions orthogonal to it, its mean pull
  on the release, and how often two rounds agree on whether it was sampled. That needs far fewer
  runs than the black box. It compares with the documentation: a defect may show here before it
  costs privacy.

**What an audit can not show.** A failed audit is evidence of a defect; a passed one is *no proof
of privacy*. It gives a lower bound on :math:`\varepsilon` for one canary, one direction, one
statistic and the contributions it tried: another attack may do better, and a defect that only other
contributions wake (a branch, an overflow) stays unseen. With :math:`n` runs and five thresholds no
:math:`\varepsilon` beyond :math:`\ln(n/7)` can be proven and no event rarer than about
:math:`7/n` be noticed, so a catastrophe of probability :math:`\delta = 10^{-5}` passes unless the
white box meets it. It reads a release as real numbers: what the low-order bits of a number or the
sign of a zero tell is not audited (see `hazmat.noise`). Noise that returns after more rounds than
`rounds` is not seen. It does not see what is not in the release: timing, memory, logs, who was
sampled, or a constant that was tuned on private data; nor the trusted party, who sees everything.
With seeded noise (the default, so that an audit can be replayed) the source of entropy is not
audited; ``noise=OSNoise()`` runs it, and even then no finite test tells good entropy from a good
imitation. The documented law is computed from the constructor's arguments: an audit can not know
whether these are the ones used in production.

.. [Jagielski2020] M. Jagielski, J. Ullman, A. Oprea. Auditing differentially private machine
   learning. NeurIPS 2020.
.. [Nasr2023] M. Nasr et al. Tight auditing of differentially private machine learning. USENIX
   Security 2023.
.. [Massart1990] P. Massart. The tight constant in the Dvoretzky-Kiefer-Wolfowitz inequality.
   Annals of Probability 18, 1990.
.. [Davidson2001] K. Davidson, S. Szarek. Local operator theory, random matrices and Banach spaces.
   Handbook of the Geometry of Banach Spaces, 2001 (Theorem II.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from scipy.linalg import helmert
from scipy.special import betaincinv, gammaincinv, ndtr, ndtri
from torch import Tensor

from botorch_fed.privacy.accounting import Event, Guarantee, Ledger
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource
from botorch_fed.privacy.mechanisms import (
    CorrelatedGaussianSum,
    FixedSizeSampling,
    GaussianSum,
    WeightedGaussianSum,
)
from botorch_fed.rng import generator

Mechanism = GaussianSum | WeightedGaussianSum | CorrelatedGaussianSum
# From a world (canary present?) and the runs' numbers to one score per run, high where present.
Sampler = Callable[[bool, range], Tensor]

CURVE = (1e-2, 3e-2, 0.1, 0.2, 0.3)  # where a claimed curve is checked, beside the caller's delta
NOISE_LEVEL = 1e-6  # probability that healthy noise fails one of the white-box checks
_CANARY_NORM = 100.0  # in clip norms
_CLAIM_DRAWS = 100_000
_LATTICE_CELL = 2.0**-21  # largest probability of one value of a lattice Gaussian, see `_repeats`
_LARGEST_COVARIANCE = 2000
_UNIFORM = 1e-7  # relative noise between regions below which float64 shows one vector only


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


def audit(
    mechanism: Mechanism,
    *,
    rounds: int = 2,
    runs: int = 2000,
    delta: float = 1e-3,
    seed: int = 0,
    noise: NoiseSource | None = None,
    canary: Tensor | None = None,
    confidence: float = 0.99,
) -> AuditReport:
    r"""Audit a mechanism against what its ledger is charged for.

    Runs walk through all forms in which contributions can be given: by agent, as a tensor, in
    blocks (rosters of more than 10^5 numbers: by agent only). A healthy mechanism fails with
    probability at most ``1 - confidence`` by the black box, in fact below 1e-4 where the claim is
    tight (both rates have to err together), and at most 2e-5 by the white box.

    Args:
        mechanism: The mechanism, with a small `num_agents` and `dim` if time matters; empty
            samples are audited if they occur, so let `(1 - q)^N` be far from zero.
        rounds: Releases per transcript, with one canary in all.
        runs: Transcripts per world. Half the noise at a claimed epsilon of 1 takes about 1000 for
            the black box; for the white box, 100 released numbers.
        delta: Where the guarantee is stated; the claimed curve is checked at more.
        seed: Of the default noise, `InsecureSeededNoise`.
        noise: Another source of noise, e.g. `OSNoise()`.
        canary: A `dim` vector that the canary contributes, with alternating sign; default: 100
            times the clip norm in a direction without zero coordinates.
        confidence: Of the lower bounds.

    Example:
        >>> mechanism = GaussianSum(num_agents=5, dim=4, clip_norm=1.0, noise_multiplier=1.0)
        >>> audit(mechanism, runs=500).passed
        True
    """
    if rounds < 1:
        raise InputDataError(f"A transcript has at least one round, got rounds={rounds}.")
    law = _documented(mechanism)
    vector = _canary(mechanism, canary)
    noise = InsecureSeededNoise(seed) if noise is None else noise
    stage = _Stage(mechanism, law, vector, noise, rounds)
    charged = stage.charged()
    claim = _claim(charged, delta)
    checks, points, scores = _black_box(
        stage.scores,
        claim,
        runs=runs,
        confidence=confidence,
        thresholds=law.thresholds(rounds, runs),
    )
    checks += (_charge(charged, law, rounds),)
    checks += law.canary_checks(stage.projections(True, range(runs)))
    checks += noise_checks(stage.residuals(range(runs)))
    checks += stage.beside_checks(range(runs))
    checks += (stage.outside_check(),)
    return AuditReport(
        repr(mechanism), claim, checks, points, scores, rounds, confidence, noise.private
    )


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
        thresholds = _thresholds(sampler(False, pilot), sampler(True, pilot), runs)
    checks, points, scores = _black_box(
        sampler, claim, runs=runs, confidence=confidence, thresholds=thresholds
    )
    checks += () if residuals is None else noise_checks(residuals)
    return AuditReport(subject, claim, checks, points, scores, rounds, confidence, private)


def noise_checks(residuals: Tensor) -> tuple[Check, ...]:
    r"""White-box checks that whitened releases of zero contributions are standard normals.

    Each check fails healthy noise with probability `NOISE_LEVEL` at most.

    Args:
        residuals: `n x rounds x regions x M` releases divided by their documented noise, such
            that all numbers should be independent and standard normal.
    """
    if residuals.ndim != 4 or residuals.numel() == 0:
        raise InputDataError(
            "Residuals must be a non-empty `n x rounds x regions x M` tensor, got shape "
            f"{tuple(residuals.shape)}."
        )
    _, rounds, regions, _ = residuals.shape
    checks = [_mean_squares("noise in each round and region", residuals)]
    if rounds > 1:
        contrasts = torch.einsum("kt,ntrm->nkrm", _helmert(rounds), residuals)
        checks.append(_mean_squares("noise in differences between rounds", contrasts))
    if regions > 1:
        contrasts = torch.einsum("kr,ntrm->ntkm", _helmert(regions), residuals)
        checks.append(_mean_squares("noise in differences between regions", contrasts))
    checks += _spectrum(residuals)
    checks.append(_distribution(residuals))
    checks.append(_repeats(residuals))
    return tuple(checks)


# --- the documented law -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Law:
    r"""What the documentation says a release is, as seen by its adversary.

    Whitened by `whitening`, `r x P`, a release is `pull uᵀ` with probability `rate` (zero
    otherwise), `u` the direction of the canary, plus independent standard normals, `r x M`.
    """

    whitening: Tensor
    pull: Tensor
    agent: int
    rate: float
    replace: bool
    event: Event

    @property
    def size(self) -> float:
        """The norm of the pull: the signal of one sampled canary in noise of variance one."""
        return float(self.pull.norm())

    def log_likelihood_ratio(self, x: Tensor) -> Tensor:
        r"""Of transcripts with and without the canary, by the law.

        Args:
            x: `… x rounds` projections on the pull.

        Returns: A tensor `…`.
        """
        ratio = _log_mixture(x, self.size, self.rate)
        if self.replace:
            ratio = ratio - _log_mixture(x, -self.size, self.rate)
        return ratio.sum(dim=-1)

    def thresholds(self, rounds: int, runs: int) -> tuple[float, ...]:
        """Thresholds from draws of the law: they depend on the claim and on nothing else."""
        stream = generator(0, "audit", "thresholds")
        draws = []
        for mean in (-self.size if self.replace else 0.0, self.size):
            sampled = stream.uniform(_CLAIM_DRAWS, rounds) < self.rate
            x = mean * sampled + stream.normal(_CLAIM_DRAWS, rounds)
            draws.append(self.log_likelihood_ratio(x))
        return _thresholds(draws[0], draws[1], runs)

    def canary_checks(self, x: Tensor) -> tuple[Check, ...]:
        """White-box checks of `n x rounds` projections of transcripts with the canary."""
        if self.rate == 1 or x.shape[-1] == 1:
            return (self.mean_pull(x),)
        return self.mean_pull(x), self.sampled_alike(x)

    def mean_pull(self, x: Tensor) -> Check:
        """Whether the canary, when present, pulls no harder than documented, on average.

        Its `n x rounds` projections `x` are independent and sub-Gaussian with variance factor
        `1 + size² / 4` (a normal plus a number in an interval of length `size`).
        """
        factor = (1 + self.size**2 / 4) / x.numel()
        slack = math.sqrt(2 * math.log(1 / NOISE_LEVEL) * factor)
        expected = self.rate * self.size
        measured, limit = float(x.mean()) / expected, 1 + slack / expected
        return Check("mean pull of the canary", measured, "<=", limit, "1 = documented")

    def sampled_alike(self, x: Tensor) -> Check:
        """Whether samples of different rounds are independent: how often two rounds look alike."""
        seen = x > self.size / 2
        pairs = x.shape[-1] // 2  # disjoint ones
        alike = seen[:, 0 : 2 * pairs : 2] == seen[:, 1 : 2 * pairs : 2]
        chance = float(self.rate * ndtr(self.size / 2) + (1 - self.rate) * ndtr(-self.size / 2))
        different, count = int((~alike).sum()), alike.numel()
        bound = 1 - _clopper_pearson(different, count, NOISE_LEVEL)
        detail = "lower bound on the share of pairs, and the share if samples are independent"
        name = "canary seen in both rounds or in neither"
        return Check(name, bound, "<=", chance**2 + (1 - chance) ** 2, detail)


def _log_mixture(x: Tensor, mean: float, rate: float) -> Tensor:
    """Log-density of `(1 - q) N(0, 1) + q N(mean, 1)`, relative to `N(0, 1)`."""
    shifted = mean * x - mean**2 / 2
    if rate == 1:
        return shifted
    return torch.logaddexp(torch.full_like(x, math.log1p(-rate)), math.log(rate) + shifted)


def _documented(mechanism: Mechanism) -> _Law:
    """The law by the formulas of the classes' documentation and the constructor's arguments.

    Deliberately written out again: a figure asked from the mechanism would share its defects.
    """
    if isinstance(mechanism, GaussianSum):
        phi, whitening = _plain(mechanism)
    elif isinstance(mechanism, WeightedGaussianSum):
        phi, whitening = _weighted(mechanism)
    elif isinstance(mechanism, CorrelatedGaussianSum):
        phi, whitening = _correlated(mechanism)
    else:
        raise InputDataError(
            "audit knows GaussianSum, WeightedGaussianSum and CorrelatedGaussianSum, got "
            f"{type(mechanism).__name__}: describe its law to audit_transcripts instead."
        )
    rate = _rate(mechanism)
    pulls = whitening @ phi * (mechanism.clip_norm / rate)  # r x N
    agent = int(pulls.norm(dim=0).argmax())
    replace = mechanism.adjacency == "replace-one"
    return _Law(whitening, pulls[:, agent], agent, rate, replace, _event(mechanism))


def _plain(mechanism: GaussianSum) -> tuple[Tensor, Tensor]:
    phi = torch.full((1, mechanism.num_agents), float(mechanism.weight), dtype=torch.float64)
    std = mechanism.noise_multiplier * _scale(mechanism) * abs(float(mechanism.weight))
    return phi, torch.eye(1, dtype=torch.float64) / std


def _weighted(mechanism: WeightedGaussianSum) -> tuple[Tensor, Tensor]:
    phi = mechanism.weights.to(torch.float64)
    num_regions = phi.shape[0]
    largest = float(phi.norm(dim=0).max())  # max_n ‖φ_n‖
    if mechanism.paper_noise:
        largest = float(phi.abs().max()) * math.sqrt(num_regions)  # s = z φ_max S / q, S = c √P
    std = mechanism.noise_multiplier * _scale(mechanism) * largest
    return phi, torch.eye(num_regions, dtype=torch.float64) / std


def _correlated(mechanism: CorrelatedGaussianSum) -> tuple[Tensor, Tensor]:
    num_regions = mechanism.num_regions
    inside = torch.nn.functional.one_hot(torch.tensor(mechanism.regions), num_regions).T
    phi = torch.softmax(mechanism.contrast * inside.to(torch.float64), dim=-1)  # P x N
    outside = math.exp(-mechanism.contrast)
    # K = e^-contrast 11ᵀ + (1 - e^-contrast) I has one eigenvalue along 1 and one across.
    along = torch.full((num_regions, num_regions), 1 / num_regions, dtype=torch.float64)
    across = torch.eye(num_regions, dtype=torch.float64) - along
    low = math.sqrt(-math.expm1(-mechanism.contrast))
    root = math.sqrt(1 + outside * (num_regions - 1)) * along + low * across  # R, ‖column‖ = 1
    counts = inside.sum(dim=-1).to(torch.float64)
    totals = counts + (len(mechanism.regions) - counts) * outside  # Z_i
    std = mechanism.noise_multiplier * _scale(mechanism)  # of the noise on R G / q; r = √K_ii = 1
    # The release is Z⁻¹ R (G̃): G̃ by the inverse, in the uniform stage its one coordinate.
    if low < _UNIFORM:
        ones = torch.ones(1, num_regions, dtype=torch.float64) / math.sqrt(num_regions)
        inverse = ones * totals / math.sqrt(1 + outside * (num_regions - 1))
    else:
        inverse = torch.linalg.solve(root, torch.diag(totals))
    return phi, inverse / std


def _scale(mechanism: Mechanism) -> float:
    """The clip bound as the release scales it, c / q, and what the lattice adds to the noise."""
    outputs = 1
    if isinstance(mechanism, WeightedGaussianSum):
        outputs = mechanism.weights.shape[0]
    elif isinstance(mechanism, CorrelatedGaussianSum):
        outputs = mechanism.num_regions
    # s = z (Δ + γ √PM) with γ = s / 2^20
    lattice = mechanism.noise_multiplier * math.sqrt(outputs * mechanism.dim) * 2.0**-20
    return mechanism.clip_norm / _rate(mechanism) / (1 - lattice)


def _rate(mechanism: Mechanism) -> float:
    sampling = mechanism.sampling
    if isinstance(sampling, FixedSizeSampling):
        return sampling.size / mechanism.num_agents
    return float(sampling.rate)


def _event(mechanism: Mechanism) -> Event:
    sampling, z = mechanism.sampling, mechanism.noise_multiplier
    if isinstance(sampling, FixedSizeSampling):
        return Event(z, sample_size=sampling.size, population=mechanism.num_agents)
    return Event(z, sampling_rate=sampling.rate)


# --- running ------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Stage:
    """The two worlds, and the third with nothing in it."""

    mechanism: Mechanism
    law: _Law
    canary: Tensor
    noise: NoiseSource
    rounds: int
    _cache: dict[tuple[str, range], Tensor] = field(default_factory=dict)
    _outside: float = 0.0

    def charged(self) -> Ledger:
        """The ledger of one transcript."""
        ledger = self._fresh_ledger()
        for t in range(self.rounds):
            path = ("audit", "charge", 0, t)
            _, ledger = self.mechanism.release({}, ledger=ledger, noise=self.noise, path=path)
        return ledger

    def scores(self, present: bool, runs: range) -> Tensor:
        """Log-likelihood ratios, one per run."""
        return self.law.log_likelihood_ratio(self.projections(present, runs))

    def projections(self, present: bool, runs: range) -> Tensor:
        """`n x rounds` projections on the direction in which the canary pulls."""
        world = "with" if present else "without"
        if not (present or self.law.replace):
            world = "zero"
        x = self._whitened(world, runs)
        pattern = torch.outer(self.law.pull / self.law.size, self.canary / self.canary.norm())
        return torch.einsum("ntrm,rm,t->nt", x, pattern, self._signs())

    def residuals(self, runs: range) -> Tensor:
        """`n x rounds x r x M` whitened releases of zero contributions."""
        return self._whitened("zero", runs)

    def beside_checks(self, runs: range) -> tuple[Check, ...]:
        """Noise checks with the canary present, in the directions orthogonal to it."""
        if self.mechanism.dim == 1:
            return ()
        beside = torch.linalg.qr(self.canary[:, None], mode="complete").Q[:, 1:]
        checks = noise_checks(self._whitened("with", runs) @ beside)
        return tuple(replace(c, name=f"{c.name}, beside the canary") for c in checks)

    def _whitened(self, world: str, runs: range) -> Tensor:
        if (world, runs) not in self._cache:
            releases = torch.stack([self._transcript(world, run) for run in runs])
            whitened = self.law.whitening @ releases
            lost = releases - torch.linalg.pinv(self.law.whitening) @ whitened
            share = float(lost.abs().max() / releases.abs().max().clamp(min=1e-300))
            self._outside = max(self._outside, share)
            self._cache[world, runs] = whitened
        return self._cache[world, runs]

    def outside_check(self) -> Check:
        """Whether releases hold nothing that whitening loses, such as rows that should be equal."""
        detail = "relative; there is no noise to hide it"
        name = "part of the releases outside the documented range"
        return Check(name, self._outside, "<=", 1e-9 + 10 * _UNIFORM, detail)

    def _transcript(self, world: str, run: int) -> Tensor:
        releases = []
        factor = {"with": 1.0, "without": -1.0, "zero": 0.0}[world]
        for t, sign in enumerate(self._signs().tolist()):
            contributions = self._contributions(factor * sign * self.canary, run)
            path = ("audit", world, run, t)
            release, _ = self.mechanism.release(
                contributions, ledger=self._fresh_ledger(), noise=self.noise, path=path
            )
            releases.append(release.values)
        return torch.stack(releases)

    def _contributions(
        self, vector: Tensor, run: int
    ) -> Mapping[int, Tensor] | Tensor | Iterable[tuple[int, Tensor]]:
        num_agents, dim = self.mechanism.num_agents, self.mechanism.dim
        if run % 3 == 0 or num_agents * dim > 100_000:
            return {self.law.agent: vector}
        everyone = torch.zeros(num_agents, dim, dtype=torch.float64)
        everyone[self.law.agent] = vector
        half = num_agents // 2
        if run % 3 == 1 or half == 0:
            return everyone
        return iter([(0, everyone[:half]), (half, everyone[half:])])

    def _fresh_ledger(self) -> Ledger:
        return Ledger(adjacency=self.mechanism.adjacency, unit=self.mechanism.unit)

    def _signs(self) -> Tensor:
        return 1.0 - 2.0 * (torch.arange(self.rounds, dtype=torch.float64) % 2)


def _canary(mechanism: Mechanism, canary: Tensor | None) -> Tensor:
    if canary is None:
        ones = torch.ones(mechanism.dim, dtype=torch.float64)
        return ones * (_CANARY_NORM * mechanism.clip_norm / math.sqrt(mechanism.dim))
    if canary.shape != (mechanism.dim,) or not bool(canary.isfinite().all()):
        raise InputDataError(
            f"The canary must be a finite vector of {mechanism.dim} numbers, got shape "
            f"{tuple(canary.shape)}."
        )
    if float(canary.norm()) < mechanism.clip_norm:
        raise InputDataError(
            f"The canary's norm must reach the clip norm {mechanism.clip_norm}: a smaller one "
            "audits a weaker claim."
        )
    return canary.to(torch.float64)


def _claim(charged: Ledger, delta: float) -> Claim:
    deltas = [delta, *(d for d in CURVE if d != delta)]
    guarantees = tuple(charged.guarantee(delta=d) for d in deltas)
    events = [(entry.event, entry.count) for entry in charged.entries]
    if any(e.sampling_rate < 1 or e.sample_size is not None for e, _ in events):
        return Claim(guarantees)
    mu = math.sqrt(sum(count / event.noise_multiplier**2 for event, count in events))
    return Claim(guarantees, 2 * mu if charged.adjacency == "replace-one" else mu)


def _charge(charged: Ledger, law: _Law, rounds: int) -> Check:
    """Whether a ledger is charged what is documented, once per release."""
    right = sum(entry.count for entry in charged.entries if entry.event == law.event)
    return Check("releases charged to the ledger as documented", right, ">=", rounds)


# --- statistics ---------------------------------------------------------------------------------


def _thresholds(without: Tensor, present: Tensor, runs: int) -> tuple[float, ...]:
    """Five thresholds: no false alarm to be expected, few, in between, few misses, no miss."""
    rare = 1 / (4 * runs)
    middle = float(without.median() + present.median()) / 2
    alarms, misses = (
        np.quantile(scores.numpy(), levels).tolist()
        for scores, levels in ((without, [1 - rare, 0.95]), (present, [0.05, rare]))
    )
    return (*alarms, middle, *misses)


def _black_box(
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
        _clopper_pearson(alarms, runs, level),
        _clopper_pearson(misses, runs, level),
    )


def _clopper_pearson(count: int, runs: int, level: float) -> float:
    """The upper bound on a rate that is too low with probability `level` at most."""
    return 1.0 if count == runs else float(betaincinv(count + 1, runs - count, 1 - level))


def _helmert(size: int) -> Tensor:
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


def _distribution(residuals: Tensor) -> Check:
    r"""The largest distance between the distribution of all numbers and the normal one.

    For `n` normals it exceeds `t` with probability :math:`2 e^{-2 n t^2}` at most [Massart1990]_.
    """
    values = residuals.flatten().sort().values
    count = values.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    normal = torch.special.ndtr(values)
    distance = torch.maximum((steps[1:] - normal).max(), (normal - steps[:-1]).max())
    limit = math.sqrt(math.log(2 / NOISE_LEVEL) / (2 * count))
    return Check("distance of the noise from normal", float(distance), "<=", limit)


def _repeats(residuals: Tensor) -> Check:
    r"""How often the most frequent release occurs: un-noised ones and replays do it often.

    A coordinate has spacing :math:`\gamma \le 2^{-20}` standard deviations, so one value has
    probability at most :math:`\gamma/\sqrt{2\pi} < 2^{-21}`, and `k` of `m` releases with `D`
    coordinates agree with probability :math:`\binom{m}{k} 2^{-21 D (k-1)}` at most.
    """
    releases = residuals.flatten(end_dim=1).flatten(start_dim=1)
    count, size = releases.shape
    allowed = 1
    while math.comb(count, allowed + 1) * _LATTICE_CELL ** (size * allowed) > NOISE_LEVEL:
        allowed += 1
    most = int(releases.unique(dim=0, return_counts=True)[1].max())
    return Check("occurrences of one and the same release", most, "<=", allowed)
