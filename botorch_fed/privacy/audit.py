r"""Empirical audit of a mechanism: does the program keep the guarantee on paper?

An audit runs the shipped program, not a model of it, in worlds that differ by one unit's
contributions, the canary, and asks whether anybody could tell the worlds apart better than the
guarantee allows. `audit` takes every mechanism of `botorch_fed.privacy`; `botorch_fed.audits` does
the same with whole protocols. Statistic, thresholds and confidence are fixed before the first run:

- *Worlds.* Zero-out: the canary against nothing; replace-one: against its opposite. For sums by a
  trusted party the canary of the likelihood ratio is an agent with the largest weights and a vector
  far outside the clip bound, whose sign alternates from round to round, so that noise used twice
  cancels, and everybody else contributes zero; for other mechanisms its place, sign and size
  rotate. With the same noise in both worlds (`world_checks`) every position, both signs, sizes from
  the smallest float to the largest are tried, among neighbours who do nothing, fill their bound,
  are random, agree with the canary or contradict it.
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
  runs than the black box. `world_checks` adds everybody's coins, tails, the lattice, what is paid
  for what, and before what, and what a budget refuses. It compares with the documentation: a
  defect may show here before it costs privacy.

**What an audit can not show.** A failed audit is evidence of a defect; a passed one is *no proof
of privacy*. It gives a lower bound on :math:`\varepsilon` for the worlds and the statistics that it
tried: another attack may do better, and a defect that only other contributions wake stays unseen.
With :math:`n` runs and five thresholds no :math:`\varepsilon` beyond :math:`\ln(n/7)` can be proven
and no event rarer than about :math:`7/n` be noticed, so a catastrophe of probability :math:`\delta
= 10^{-5}` passes unless the white box meets it. It reads a release as real numbers: what the
low-order bits of a number or the sign of a zero tell is not audited (see `hazmat.noise`). Noise
that returns after more rounds than `rounds` is not seen. It does not see what is not in the
release: timing, memory, logs, who was sampled, or a constant that was tuned on private data; nor
the trusted party, who sees everything. With seeded noise (the default, so that an audit can be
replayed) the source of entropy is not audited; ``noise=OSNoise()`` runs it, and even then no finite
test tells good entropy from a good imitation. The documented law is computed from the constructor's
arguments: an audit can not know whether these are the ones used in production.

References:
    * [Jagielski2020]_ M. Jagielski, J. Ullman, A. Oprea. Auditing differentially private machine
      learning. NeurIPS 2020.
    * [Nasr2023]_ M. Nasr et al. Tight auditing of differentially private machine learning. USENIX
      Security 2023.
    * [Massart1990]_ P. Massart. The tight constant in the Dvoretzky-Kiefer-Wolfowitz inequality.
      Annals of Probability 18, 1990.
    * [Davidson2001]_ K. Davidson, S. Szarek. Local operator theory, random matrices and Banach
      spaces. Handbook of the Geometry of Banach Spaces, 2001 (Theorem II.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from botorch.exceptions.errors import InputDataError
from scipy.special import ndtr
from torch import Tensor

from botorch_fed.privacy.accounting import Event, Ledger
from botorch_fed.privacy.evidence import (
    CURVE,
    NOISE_LEVEL,
    AuditReport,
    Check,
    Claim,
    OperatingPoint,
    Sampler,
    audit_transcripts,
    black_box,
    clopper_pearson,
    noise_checks,
    thresholds_of,
)
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource
from botorch_fed.privacy.selected import selected_check
from botorch_fed.privacy.world_checks import (
    copies_of,
    whitened,
    world_checks,
)
from botorch_fed.privacy.worlds import (
    UNIFORM,
    Mechanism,
    Neighbours,
    Subject,
    SumMechanism,
    Sums,
    subject_of,
    sum_event,
    sum_law,
    sum_rate,
)
from botorch_fed.rng import generator

__all__ = [
    "CURVE",
    "NOISE_LEVEL",
    "AuditReport",
    "Check",
    "Claim",
    "OperatingPoint",
    "Sampler",
    "audit",
    "audit_subject",
    "audit_transcripts",
    "noise_checks",
]

_CANARY_NORM = 100.0  # in clip norms
_CLAIM_DRAWS = 100_000
_COIN_DRAWS = 40  # how often everybody's coins are read
_THRESHOLDS = (-1.5, -0.75, 0.0, 0.75, 1.5)  # about the middle of two Gaussians


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
    every: int = 1,
) -> AuditReport:
    r"""Audit a mechanism against what its ledger is charged for.

    Runs walk through all forms in which contributions can be given: by agent, as a tensor, in
    blocks (rosters of more than 10^5 numbers: by agent only). A healthy mechanism fails with
    probability at most ``1 - confidence`` by each of the black boxes (fixed thresholds; the best
    of several statistics, chosen on half of the runs), in fact below 1e-4 where the claim is tight
    (both rates have to err together), and at most 4e-5 by the white box.

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
        every: Of the worlds in which the noise is the same one in so many is tried. Chance is not
            in them: reruns with other seeds need not try all again.

    Example:
        >>> mechanism = GaussianSum(num_agents=5, dim=4, clip_norm=1.0, noise_multiplier=1.0)
        >>> audit(mechanism, runs=500).passed
        True
    """
    if rounds < 1:
        raise InputDataError(f"A transcript has at least one round, got rounds={rounds}.")
    noise = InsecureSeededNoise(seed) if noise is None else noise
    subject = subject_of(mechanism, rounds)
    if not isinstance(subject, Sums):
        if canary is not None:
            raise InputDataError("A canary can be chosen for sums by a trusted party only.")
        return audit_subject(
            subject,
            runs=runs,
            delta=delta,
            seed=seed,
            noise=noise,
            confidence=confidence,
            every=every,
        )
    law = _documented(subject.mechanism)
    vector = _canary(subject.mechanism, canary)
    stage = _Stage(subject.mechanism, law, vector, noise, rounds)
    charged = stage.charged()
    claim = _claim(charged, delta)
    checks, points, scores = black_box(
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
    checks += world_checks(
        subject,
        seed=seed,
        draws=min(runs, _COIN_DRAWS),
        every=every,
        tails=stage.residuals(range(runs)),
    )
    return AuditReport(
        repr(mechanism), claim, checks, points, scores, rounds, confidence, noise.private
    )


def audit_subject(
    subject: Subject,
    *,
    runs: int = 600,
    delta: float = 1e-3,
    seed: int = 0,
    noise: NoiseSource | None = None,
    confidence: float = 0.99,
    draws: int = _COIN_DRAWS,
    every: int = 1,
) -> AuditReport:
    """Audit anything that has a documented law: a mechanism, or a whole protocol.

    Args:
        subject: What is audited.
        runs: Transcripts per world, of which the white box has a third world.
        delta: As in `audit`.
        seed: As in `audit`.
        noise: As in `audit`.
        confidence: As in `audit`.
        draws: As in `world_checks`.
        every: As in `world_checks`.
    """
    noise = InsecureSeededNoise(seed) if noise is None else noise
    scene = _Scene(subject, noise)
    _, charged = subject.run({}, ledger=subject.ledger(), noise=noise, path=("audit", "charge", 0))
    claim = _claim(charged, delta)
    checks, points, scores = black_box(
        scene.scores,
        claim,
        runs=runs,
        confidence=confidence,
        thresholds=_THRESHOLDS,
    )
    nobody = scene.nobody(runs)
    checks += noise_checks(nobody[:, :, None], subject.cell)
    (whole, *_) = noise_checks(nobody.flatten(1)[:, None, None])
    checks += (replace(whole, name="noise in all releases together"),)
    checks += (selected_check(scene.features, claim, runs=runs, confidence=confidence),)
    checks += world_checks(subject, seed=seed, draws=min(runs, draws), every=every, tails=nobody)
    return AuditReport(
        repr(subject.mechanism),
        claim,
        checks,
        points,
        scores,
        subject.payments,
        confidence,
        noise.private,
    )


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
        return thresholds_of(draws[0], draws[1], runs)

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
        bound = 1 - clopper_pearson(different, count, NOISE_LEVEL)
        detail = "lower bound on the share of pairs, and the share if samples are independent"
        name = "canary seen in both rounds or in neither"
        return Check(name, bound, "<=", chance**2 + (1 - chance) ** 2, detail)


def _log_mixture(x: Tensor, mean: float, rate: float) -> Tensor:
    """Log-density of `(1 - q) N(0, 1) + q N(mean, 1)`, relative to `N(0, 1)`."""
    shifted = mean * x - mean**2 / 2
    if rate == 1:
        return shifted
    return torch.logaddexp(torch.full_like(x, math.log1p(-rate)), math.log(rate) + shifted)


def _documented(mechanism: SumMechanism) -> _Law:
    """The law by the formulas of the classes' documentation and the constructor's arguments."""
    phi, whitening = sum_law(mechanism)
    rate = sum_rate(mechanism)
    pulls = whitening @ phi * (mechanism.clip_norm / rate)  # r x N
    agent = int(pulls.norm(dim=0).argmax())
    replaced = mechanism.adjacency == "replace-one"
    return _Law(whitening, pulls[:, agent], agent, rate, replaced, sum_event(mechanism))


# --- running ------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Stage:
    """The two worlds, and the third with nothing in it."""

    mechanism: SumMechanism
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
        return Check(name, self._outside, "<=", 1e-9 + 10 * UNIFORM, detail)

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


def _canary(mechanism: SumMechanism, canary: Tensor | None) -> Tensor:
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


# --- any subject ---------------------------------------------------------------------------------


@dataclass(eq=False)
class _Scene:
    """Transcripts of a subject in which the canary's place, its neighbours and its sign rotate.

    Everybody takes part in every release: the log-likelihood ratio of a world and its neighbour is
    then a projection, by the law of the documentation, on their difference.
    """

    subject: Subject
    noise: NoiseSource
    _cache: dict[tuple[bool, range], Tensor] = field(default_factory=dict)

    def scores(self, present: bool, runs: range) -> Tensor:
        """Projections on the documented difference, of which half is taken away or added."""
        return self._seen(present, runs)[:, 0]

    def features(self, present: bool, runs: range) -> Tensor:
        """Statistics of transcripts without what the neighbours add, `n x k`."""
        return self._seen(present, runs)

    def nobody(self, runs: int) -> Tensor:
        """Whitened transcripts of nobody, `n x r x D`."""
        return torch.stack([self._run({}, ("audit", "nobody", i)) for i in range(runs)])

    def _run(self, given: Mapping[tuple[int, int], Tensor], path: tuple[int | str, ...]) -> Tensor:
        return whitened(self.subject, given, self.noise, path)

    def _seen(self, present: bool, runs: range) -> Tensor:
        if (present, runs) not in self._cache:
            self._cache[present, runs] = torch.stack([self._one(present, i) for i in runs])
        return self._cache[present, runs]

    def _one(self, present: bool, i: int) -> Tensor:
        subject = self.subject
        place, sign = i % subject.places, 1.0 - 2.0 * (i // subject.places % 2)
        size = (100.0, 3.0, 1.0, 1e308)[i % 4]
        x = subject.input(0 if i % 3 else i, sign, size)
        kind: Neighbours = "bound" if i % 4 == 2 else "none"
        beside = subject.beside(kind, x, place, ("scene", i))
        other = subject.opposite(x, i) if subject.replace else None
        mine = x if present else other
        rows = (
            {}
            if mine is None
            else {(place, t): copies_of(mine, subject.copies) for t in self._times}
        )
        path = ("audit", "scene", "with" if present else "without", i)
        residual = self._run({**beside, **rows}, path) - subject.mean(beside)
        pull = self._pull(place, x, other)
        size_ = float(pull.norm())
        projection = float((residual * pull).sum()) / max(size_, 1e-300)
        middle = self._middle(place, x, other, pull, size_)
        flat = residual.abs().flatten()
        return torch.tensor(
            [
                projection - middle,
                float(flat.max()),
                float(flat.min()),
                float(flat.square().mean()),
                float((flat > 2.5).sum()),
                float(residual[0].sum()),
                float(residual[-1].sum()),
                float(residual.sum()),
                float(residual[:, 0].abs().max()),
                float(len(flat) - len(flat.unique())),
            ],
            dtype=torch.float64,
        ).nan_to_num(nan=1e300, posinf=1e300, neginf=-1e300)

    @property
    def _times(self) -> range:
        return range(self.subject.times)

    def _pull(self, place: int, x: Tensor, other: Tensor | None) -> Tensor:
        subject = self.subject
        added = subject.added(x) if other is None else subject.added(x) - subject.added(other)
        pull = torch.zeros(len(subject.whitening), subject.dim, dtype=torch.float64)
        for t in self._times:
            pull += subject.pull(place, t, added * subject.copies)
        return pull

    def _middle(
        self, place: int, x: Tensor, other: Tensor | None, pull: Tensor, size: float
    ) -> float:
        """Half way between the two worlds' means on the projection."""
        if other is None:
            return size / 2
        subject, away = self.subject, torch.zeros_like(pull)
        for t in self._times:
            away += subject.pull(place, t, (subject.added(x) + subject.added(other)) / 2)
        return float((away * subject.copies * pull).sum()) / max(size, 1e-300)
