"""Deliberate defects of the shipped mechanisms, one line each, that an audit must find.

    mutant = next(m for m in MUTANTS if m.name == "half noise")
    with installed(mutant):
        report = audited("weighted, sampled")
    assert not report.passed

A mutant is a line of the shipped source and what stands there instead. `build` takes the source of
the function or class that holds the line, replaces exactly that line and compiles the result in the
same module; `installed` puts it in place. A line that is not found exactly once is an error: after
a change of the source, the list must follow. Mechanisms remember derived numbers, so build them
while the mutant is installed, as `audited` does.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from benchmarks.papers.published.noise import paper_local_noise, paper_prefix_noise
from botorch_fed.aggregation import noisy, secure_sum, stream
from botorch_fed.privacy import accounting
from botorch_fed.privacy.accounting import Event, Ledger, gaussian_mu
from botorch_fed.privacy.audit import (
    CURVE,
    NOISE_LEVEL,
    AuditReport,
    Check,
    Claim,
    audit,
    audit_transcripts,
    noise_checks,
)
from botorch_fed.privacy.distributed import (
    DistributedGaussianSum,
    DistributedMechanism,
    DistributedRecordSum,
)
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource, Path, normal
from botorch_fed.privacy.increments import BlockSum, LocalGaussian
from botorch_fed.privacy.mechanisms import (
    CorrelatedGaussianSum,
    FixedSizeSampling,
    GaussianSum,
    PoissonSampling,
    SignalWarning,
    WeightedGaussianSum,
)
from botorch_fed.privacy.tree import PrefixSum
from botorch_fed.privacy.worlds import prefix_covariance

# The same for every case, healthy or mutated; the canary and the thresholds are the audit's own.
RUNS = 600
DISTRIBUTED_RUNS = 300
STREAM_RUNS = 300
ROUNDS = 2
DELTA = 1e-3

_SIZE: dict[str, Any] = {"num_agents": 6, "dim": 4, "clip_norm": 1.0}
# Samples of six agents at this rate are empty in every sixth round.
_SAMPLED: dict[str, Any] = {**_SIZE, "sampling": PoissonSampling(0.25), "noise_multiplier": 0.5}
_EVERYONE: dict[str, Any] = {**_SIZE, "noise_multiplier": 1.0}
_REPLACED: dict[str, Any] = {**_SIZE, "noise_multiplier": 2.0, "adjacency": "replace-one"}
_REGIONS = (0, 1, 2, 0, 1, 2)


def _weights() -> torch.Tensor:
    inside = torch.arange(3)[:, None] == torch.tensor(_REGIONS)
    return torch.softmax(0.5 * inside.double(), dim=-1)


def _correlated(contrast: float, settings: dict[str, Any]) -> CorrelatedGaussianSum:
    return CorrelatedGaussianSum(regions=_REGIONS, num_regions=3, contrast=contrast, **settings)


CASES: dict[str, Callable[[], GaussianSum | WeightedGaussianSum | CorrelatedGaussianSum]] = {
    "plain": lambda: GaussianSum(**_EVERYONE),
    "plain, sampled": lambda: GaussianSum(**_SAMPLED),
    "plain, fixed size": lambda: GaussianSum(**_REPLACED, sampling=FixedSizeSampling(2)),
    "weighted": lambda: WeightedGaussianSum(weights=_weights(), **_EVERYONE),
    "weighted, sampled": lambda: WeightedGaussianSum(weights=_weights(), **_SAMPLED),
    "weighted, published noise": lambda: WeightedGaussianSum(
        weights=_weights(), paper_noise=True, **_SAMPLED
    ),
    "correlated": lambda: _correlated(2.0, _EVERYONE),
    "correlated, sampled": lambda: _correlated(2.0, _SAMPLED),
    "correlated, uniform stage": lambda: _correlated(0.0, _SAMPLED),
    "correlated, replace-one": lambda: _correlated(2.0, _REPLACED),
}


@dataclass(frozen=True)
class Mutant:
    """One line of the source, and the defect in its place.

    Attributes:
        name: The defect.
        target: ``module:qualified name`` of the function, method or property with the line.
        old: The line, without indentation.
        new: The line in its place.
        cases: Names of the `CASES` in which it must be found: where it makes a difference.
        more: Further lines of the same target, and what stands in their places.
    """

    name: str
    target: str
    old: str
    new: str
    cases: tuple[str, ...]
    more: tuple[tuple[str, str], ...] = ()


def build(mutant: Mutant) -> tuple[Any, str, Any]:
    """The object that holds the mutant's target, the attribute's name, and the mutated value."""
    module_name, qualified = mutant.target.split(":")
    module = import_module(module_name)
    *parents, name = qualified.split(".")
    owner: Any = functools.reduce(getattr, parents, module)
    function = _function(inspect.getattr_static(owner, name))
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    for old, new in ((mutant.old, mutant.new), *mutant.more):
        found = [i for i, line in enumerate(lines) if line.strip() == old]
        if len(found) != 1:
            raise ValueError(
                f"Mutant {mutant.name!r} needs its line exactly once in {mutant.target}, found it "
                f"{len(found)} times: {old}"
            )
        (i,) = found
        indentation = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
        lines[i] = indentation + new
    code = compile("\n".join(lines), f"<mutant: {mutant.name}>", "exec")
    built: dict[str, Any] = {}
    exec(code, {**vars(inspect.getmodule(function) or module), "torch": torch, **_EXTRA}, built)
    value = built[name]
    if hasattr(value, "__set_name__"):
        value.__set_name__(owner, name)
    return owner, name, value


@contextmanager
def installed(mutant: Mutant) -> Iterator[None]:
    """The mutant in place of the shipped code, wherever it was imported."""
    owner, name, value = build(mutant)
    shipped = inspect.getattr_static(owner, name)
    places = [owner]
    if inspect.ismodule(owner):
        rooms = ("botorch_fed", "benchmarks", "test.")
        ours = [m for word, m in list(sys.modules.items()) if word.startswith(rooms)]
        places = [m for m in ours if inspect.getattr_static(m, name, None) is shipped]
    for place in places:
        setattr(place, name, value)
    _forget(mutant)
    try:
        yield
    finally:
        for place in places:
            setattr(place, name, shipped)
        _forget(mutant)


_EXTRA: dict[str, Any] = {"np": np, "math": math, "InsecureSeededNoise": InsecureSeededNoise}


def _forget(mutant: Mutant) -> None:
    """Drop what accountants and plans remember of the code that was in place before."""
    made = [noisy._plan, stream._multiplier, secure_sum._mechanism_and_grid]
    made += [secure_sum._private_sum, secure_sum._composed]
    if "accounting" in mutant.target:
        made += [accounting._epsilon, accounting._optimistic_epsilon]
        accounting._beginnings.clear()
    for remembered in made:
        remembered.cache_clear()


def _function(attribute: Any) -> Any:
    """What `inspect.getsource` understands, decorators included."""
    for inner in ("fget", "func", "__func__", "__wrapped__"):
        attribute = getattr(attribute, inner, attribute)
    return attribute


def audited(
    case: str, *, seed: int = 0, runs: int = RUNS, noise: NoiseSource | None = None
) -> AuditReport:
    """The audit of a case, built here and now, with the settings that all cases share."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)  # a roster of six has little signal
        mechanism = CASES[case]()
    return audit(mechanism, rounds=ROUNDS, runs=runs, delta=DELTA, seed=seed, noise=noise)


# --- the list ------------------------------------------------------------------------------------

_MODULE = "botorch_fed.privacy.mechanisms"
_RELEASE = f"{_MODULE}:GaussianMechanism.release"
_SUM = f"{_MODULE}:GaussianMechanism._clipped_sum"
_NOISED = 'noised = lattice_gaussian(total, self.noise_scale, noise=noise, path=(*path, "noise"))'
_SAMPLE = 'sampled = self.sampling.draw(self.num_agents, noise=noise, path=(*path, "sampling"))'
_CLIPPED = "rows, factors = _clip_factors(rows, self.clip_norm, agents)"

_ALL = tuple(CASES)
_POISSON = (
    "plain, sampled",
    "weighted, sampled",
    "weighted, published noise",
    "correlated, sampled",
    "correlated, uniform stage",
)
_EVERY_REGION = tuple(case for case in CASES if "plain" not in case)
# In the uniform stage one vector is released: the same noise in all regions only means more of it.
_DISTINCT_REGIONS = tuple(case for case in _EVERY_REGION if "uniform" not in case)

MUTANTS = (
    Mutant(
        "half noise",
        f"{_MODULE}:GaussianMechanism.noise_scale",
        "return self.noise_multiplier * bound / (1 - self._rounded_share)",
        "return self.noise_multiplier * bound / (1 - self._rounded_share) / 2",
        _ALL,
    ),
    Mutant("no clip", _SUM, _CLIPPED, "factors = np.ones(len(rows))", _ALL),
    Mutant(
        "clip after weighting",
        _SUM,
        _CLIPPED,
        "factors = _clip_factors(rows * float(self.weights.max()), self.clip_norm, agents)[1]",
        _ALL,
    ),
    Mutant(
        "un-noised empty sample",
        _RELEASE,
        _NOISED,
        f"{_NOISED} if sampled.any() else total",
        _POISSON,
    ),
    Mutant(
        "wrong q",
        f"{_MODULE}:PoissonSampling.draw",
        "return coins(num_agents, self.rate, noise=noise, path=path)",
        "return coins(num_agents, 2 * self.rate, noise=noise, path=path)",
        _POISSON,
    ),
    Mutant(
        "noise reused between rounds",
        _RELEASE,
        _NOISED,
        _NOISED.replace("*path,", "*path[:-1],"),
        _ALL,
    ),
    Mutant(
        "noise reused between regions",
        _RELEASE,
        _NOISED,
        _NOISED.replace("(total,", "(0 * total[:1],") + " + total",
        _DISTINCT_REGIONS,
    ),
    Mutant(
        "noise on one region only",
        _RELEASE,
        _NOISED,
        _NOISED.replace("= lattice", "= torch.cat([lattice").replace("(total,", "(total[:1],")
        + ", total[1:]])",
        _EVERY_REGION,
    ),
)

# The same defects by other ways, and further ones.
VARIANTS = (
    Mutant(
        "half noise, not reported",
        _RELEASE,
        _NOISED,
        _NOISED.replace("self.noise_scale", "self.noise_scale / 2"),
        _ALL,
    ),
    Mutant(
        "uniform numbers for an empty sample",  # as the code published with the paper has it
        _RELEASE,
        _NOISED,
        f"{_NOISED} if sampled.any() else torch.rand_like(total)",
        _POISSON,
    ),
    Mutant(
        "wrong q, everyone takes part",
        f"{_MODULE}:PoissonSampling.draw",
        "return coins(num_agents, self.rate, noise=noise, path=path)",
        "return torch.ones(num_agents, dtype=torch.bool)",
        _POISSON,
    ),
    Mutant(
        "wrong q, accounted",
        f"{_MODULE}:PoissonSampling.event",
        "return Event(noise_multiplier, sampling_rate=self.rate)",
        "return Event(noise_multiplier, sampling_rate=self.rate / 2)",
        tuple(case for case in CASES if "fixed" not in case),
    ),
    Mutant(
        "wrong sample size, drawn",
        f"{_MODULE}:FixedSizeSampling.draw",
        "return subset(num_agents, self.size, noise=noise, path=path)",
        "return subset(num_agents, 2 * self.size, noise=noise, path=path)",
        ("plain, fixed size",),
    ),
    Mutant(
        "wrong sample size, accounted",
        f"{_MODULE}:FixedSizeSampling.event",
        "return Event(noise_multiplier, sample_size=self.size, population=num_agents)",
        "return Event(noise_multiplier, sample_size=self.size, population=2 * num_agents)",
        ("plain, fixed size",),
    ),
    Mutant(
        "the same sample in all rounds",
        _RELEASE,
        _SAMPLE,
        _SAMPLE.replace("*path,", "*path[:-1],"),
        # The published noise, √3 times as much here, hides it from so few runs.
        tuple(case for case in _POISSON if "published" not in case),
    ),
    Mutant(
        "sensitivity of a single sum",
        f"{_MODULE}:WeightedGaussianSum._largest_column",
        "return float(self.weights.norm(dim=0).max())",
        "return float(self.weights.abs().max())",
        ("weighted", "weighted, sampled"),
    ),
)


# --- noise that agents add themselves ------------------------------------------------------------

# 1024 numbers a little beyond half a step: rounding doubles the norm.
_HALF_STEPS: dict[str, Any] = {
    "dim": 1024,
    "clip_norm": 16.02,
    "grid": PublicGrid(1024, 600.0, 2, precision=1 / 600),
}
_ROSTER: dict[str, Any] = {"num_agents": 5, "colluding": 2, "dropping": 1}
_RECORDS: dict[str, Any] = {"num_features": 2, "outcome_bound": 0.5, "max_records": 3, **_ROSTER}

DISTRIBUTED_CASES: dict[str, Callable[[], DistributedMechanism]] = {
    "agents": lambda: DistributedGaussianSum(dim=4, clip_norm=1.0, noise_multiplier=1.0, **_ROSTER),
    "agents, replace-one": lambda: DistributedGaussianSum(
        dim=4, clip_norm=1.0, noise_multiplier=2.0, adjacency="replace-one", **_ROSTER
    ),
    "agents, coarse grid": lambda: DistributedGaussianSum(
        num_agents=2, noise_multiplier=1.0, **_HALF_STEPS
    ),
    "records": lambda: DistributedRecordSum(noise_multiplier=1.0, **_RECORDS),
    "records, replace-one": lambda: DistributedRecordSum(
        noise_multiplier=2.0, adjacency="replace-one", **_RECORDS
    ),
}
_FINE = tuple(case for case in DISTRIBUTED_CASES if "coarse" not in case)


def audited_distributed(case: str, *, seed: int = 0) -> AuditReport:
    """The audit of sums that agents have noised, as a coalition of the allowed size sees them.

    What it sees: the sum of the contributions of the agents that neither collude nor drop out, one
    of whom is the canary, three times beyond its bounds; all others contribute zero. The law is
    that of the documentation, written out again here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)
        mechanism = DISTRIBUTED_CASES[case]()
    ledger = Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)
    charged = ledger.spend(mechanism.event, count=ROUNDS, private=False)
    claim = Claim(tuple(charged.guarantee(delta=delta) for delta in (DELTA, *CURVE)))
    replaced, noise = mechanism.adjacency == "replace-one", InsecureSeededNoise(seed)
    canary, opposite, nobody, pull, norm = _distributed_world(mechanism)
    step = mechanism.grid.step
    std = mechanism.noise_multiplier * (norm + step * math.sqrt(len(pull)) / 2)
    honest = mechanism.num_agents - mechanism.colluding - mechanism.dropping

    def releases(world: str, runs: range) -> torch.Tensor:
        first = {"with": canary, "without": opposite if replaced else nobody, "zero": nobody}[world]
        return torch.stack([torch.stack([one(world, first, r, t) for t in times]) for r in runs])

    def one(world: str, first: torch.Tensor, run: int, t: int) -> torch.Tensor:
        total = torch.zeros(len(pull), dtype=torch.int64)
        for agent in range(honest):
            path = ("audit", world, run, agent, t)
            values = nobody if agent else first
            total += mechanism.contribution(values, noise=noise, path=path)
        return total.double() * (step / std)

    def scores(present: bool, runs: range) -> torch.Tensor:
        seen = releases("with" if present else "without", runs)
        return (seen @ (pull / pull.norm())).sum(dim=1) / math.sqrt(ROUNDS)

    times = range(ROUNDS)
    reach = math.sqrt(ROUNDS) * norm / std
    middle = 0.0 if replaced else reach / 2
    report = audit_transcripts(
        scores,
        claim,
        subject=repr(mechanism),
        rounds=ROUNDS,
        private=False,
        runs=DISTRIBUTED_RUNS,
        thresholds=[middle + offset for offset in (-1.5, -0.75, 0.0, 0.75, 1.5)],
        # On a coarse grid, noise is too far from continuous for the checks of its distribution.
        residuals=releases("zero", range(DISTRIBUTED_RUNS))[:, :, None] if case in _FINE else None,
    )
    multiplier = charged.entries[0].event.noise_multiplier
    charge = Check("noise multiplier charged", multiplier, "<=", mechanism.noise_multiplier)
    return replace(report, checks=(*report.checks, charge))


def _distributed_world(
    mechanism: DistributedMechanism,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """The canary, its opposite, nobody's contribution, the direction of the pull, and the norm."""
    if isinstance(mechanism, DistributedGaussianSum):
        ones = torch.ones(mechanism.dim, dtype=torch.float64) / math.sqrt(mechanism.dim)
        canary = 3 * mechanism.clip_norm * ones
        return canary, -canary, 0 * canary, ones, mechanism.clip_norm
    assert isinstance(mechanism, DistributedRecordSum)
    # Features e_1 and the largest outcome: (1, κY) in the two numbers that move.
    m, reward = mechanism.num_features, 3 * mechanism.outcome_bound
    canary = torch.zeros(1, m + 1, dtype=torch.float64)
    canary[0, 0], canary[0, m] = 3.0, reward
    opposite = canary.clone()
    opposite[0, m] = -reward
    pull = torch.zeros(m * (m + 3) // 2, dtype=torch.float64)
    replaced = mechanism.adjacency == "replace-one"
    pull[0], pull[-m] = float(not replaced), math.sqrt(2)  # κ = √2 / Y, r = 2
    return canary, opposite, canary[:0], pull, math.sqrt(2) if replaced else math.sqrt(3)


_DISTRIBUTED = "botorch_fed.privacy.distributed"
_RECORD = "botorch_fed.privacy.records:RecordStatistic"
_SHARE = 'return discrete_gaussian(std, self._numbers, noise=noise, path=(*path, "noise"))'
_AGENTS = tuple(case for case in DISTRIBUTED_CASES if "agents" in case)
_BOTH_RECORDS = ("records", "records, replace-one")

DISTRIBUTED_MUTANTS = (
    Mutant(
        "half noise",
        f"{_DISTRIBUTED}:DistributedMechanism.noise_scale",
        "return self.noise_multiplier * self.norm",
        "return self.noise_multiplier * self.norm / 2",
        _FINE,  # on the coarse grid it is refused: fewer than 8 steps
    ),
    Mutant(
        "shares of s / M instead of s / √M",
        f"{_DISTRIBUTED}:DistributedMechanism.agent_std",
        "return self.noise_scale / math.sqrt(self.honest)",
        "return self.noise_scale / self.honest",
        _FINE,
    ),
    Mutant(
        "relies on those who collude or drop out",
        f"{_DISTRIBUTED}:DistributedMechanism.honest",
        "return self.num_agents - self.colluding - self.dropping",
        "return self.num_agents",
        _FINE,
    ),
    Mutant(
        "no clip",
        f"{_DISTRIBUTED}:DistributedGaussianSum.bounded",
        "values = clip(values.detach(), self.clip_norm)",
        "values = values.detach().double()",
        _AGENTS,
    ),
    Mutant(
        "rounding forgotten",
        f"{_DISTRIBUTED}:DistributedGaussianSum._norm",
        "rounding = step * math.sqrt(self.dim) / 2",
        "rounding = 0.0",
        ("agents, coarse grid",),
    ),
    Mutant(
        "noise reused between rounds",
        f"{_DISTRIBUTED}:DistributedMechanism.share_of_noise",
        _SHARE,
        _SHARE.replace("*path,", "*path[:-1],"),
        _FINE,
    ),
    Mutant(
        "one number without noise",
        f"{_DISTRIBUTED}:DistributedMechanism.share_of_noise",
        _SHARE,
        f"{_SHARE} * (torch.arange(self._numbers) > 0)",
        _FINE,
    ),
    Mutant(
        "wrong multiplier, accounted",
        f"{_DISTRIBUTED}:DistributedMechanism.event",
        "return Event(float(self.noise_multiplier), discrete=True)",
        "return Event(2 * float(self.noise_multiplier), discrete=True)",
        tuple(DISTRIBUTED_CASES),
    ),
    Mutant(
        "features not clipped",
        f"{_RECORD}.statistics",
        "a = clip(records[:, :-1], 1.0)",
        "a = records[:, :-1]",
        _BOTH_RECORDS,
    ),
    Mutant(
        "outcomes not clipped",
        f"{_RECORD}.statistics",
        "y = (records[:, -1:] - self.centre).clamp(-self.outcome_bound, self.outcome_bound)",
        "y = records[:, -1:] - self.centre",
        _BOTH_RECORDS,
    ),
    Mutant(
        "the moment rides for free",
        f"{_RECORD}.sensitivity",
        "return math.sqrt(1 + r)",
        "return 1.0",
        ("records",),
    ),
    Mutant(
        "replaced records are as near as two gram matrices",
        f"{_RECORD}.sensitivity",
        "return _SQRT2 * (1 + r / 2) if r <= 2 else 2 * math.sqrt(r)",
        "return _SQRT2",
        ("records, replace-one",),
    ),
)


# --- streams, increments and blocks ---------------------------------------------------------------

Stream = PrefixSum | LocalGaussian | BlockSum
World = Literal["sign", "turn", "swap"]


@dataclass(frozen=True)
class StreamCase:
    """A mechanism, and the two worlds that are hard for it.

    Attributes:
        make: The mechanism.
        world: What becomes of the canary under replacement: its outcome changes the sign ("sign"),
            and its features turn as well, by 60 degrees ("turn") or by 90 ("swap").
        runs: Transcripts per world.
        increments: How many a client sends.
        within: Centre and half range of blocks, where they are narrower than the public range.
    """

    make: Callable[[], Stream]
    world: World = "sign"
    runs: int = STREAM_RUNS
    increments: int = 2
    within: tuple[float, float] | None = None


# Half a unit about a centre of 0.2; the default scale of the moment makes "sign" the worst world.
_OUTCOMES: dict[str, Any] = {"outcome_bound": 0.5, "centre": 0.2, "noise_multiplier": 2.0}
_FEATURES: dict[str, Any] = {"num_features": 2, **_OUTCOMES}
_ZEROED: dict[str, Any] = {"adjacency": "zero-out"}
# Rewards up to one and no other scale: a replaced record has turned by 60 degrees at the worst.
_PUBLISHED: dict[str, Any] = {
    "num_features": 2,
    "outcome_bound": 1.0,
    "moment_scale": 1.0,
    "noise_multiplier": 2 / gaussian_mu(10.0, 0.1),
}

STREAM_CASES: dict[str, StreamCase] = {
    "root": StreamCase(lambda: PrefixSum(horizon=9, **_FEATURES)),
    "root, swapped": StreamCase(lambda: PrefixSum(horizon=9, **_FEATURES), "swap"),
    "root, exact": StreamCase(lambda: PrefixSum(horizon=6, **_FEATURES, **_ZEROED)),
    "root, rewards up to 20": StreamCase(
        lambda: PrefixSum(horizon=9, **{**_FEATURES, "outcome_bound": 20.0}, moment_scale=1.0)
    ),
    "root, two records": StreamCase(
        lambda: PrefixSum(horizon=9, participations=2, unit="agent", **_FEATURES)
    ),
    "tree": StreamCase(lambda: PrefixSum(horizon=8, factorization="tree", **_FEATURES)),
    "tree, zero-out": StreamCase(
        lambda: PrefixSum(horizon=7, factorization="tree", **_FEATURES, **_ZEROED)
    ),
    "local": StreamCase(lambda: LocalGaussian(**_FEATURES)),
    "local, swapped": StreamCase(lambda: LocalGaussian(**_FEATURES), "swap"),
    "local, zero-out": StreamCase(lambda: LocalGaussian(**_FEATURES, **_ZEROED)),
    "local, alpha = 10": StreamCase(
        lambda: LocalGaussian(**_PUBLISHED), "turn", runs=12_000, increments=1
    ),
    "blocks": StreamCase(lambda: BlockSum(**_OUTCOMES)),
    "blocks, zero-out": StreamCase(lambda: BlockSum(**_OUTCOMES, **_ZEROED)),
    "blocks, narrowed": StreamCase(lambda: BlockSum(**_OUTCOMES), within=(0.5, 0.25)),
}
_BLOCKS = (3, 2)  # outcomes of each block; the canary is the first one


def audited_stream(case: str, *, seed: int = 0, runs: int | None = None) -> AuditReport:
    """The audit of everything that a stream releases, by its documented law.

    The canary is one record, three times beyond its bounds, in a stream without any other: in the
    step where it moves most, in the first block, or in two increments, both of which are paid for.
    Transcripts are whitened by the covariance of the documentation, written out again here, and
    projected on the difference of the worlds.

    Args:
        case: Its name.
        seed: Of all noise.
        runs: Transcripts per world; default those of the case.
    """
    chosen = STREAM_CASES[case]
    law, runs = StreamLaw(chosen), chosen.runs if runs is None else runs
    noise = InsecureSeededNoise(seed)

    @functools.cache
    def seen(present: bool, runs: range) -> Tensor:
        world = "with" if present else "without"
        record = law.canary if present else law.other
        transcripts = [law.transcript(record, noise, ("audit", world, run)) for run in runs]
        return law.whitened(torch.stack(transcripts)) - law.whitened(law.mean(record)[None])

    def scores(present: bool, runs: range) -> Tensor:
        along = (seen(present, runs) * law.pull).sum(dim=(1, 2)) / law.size
        return along + (law.size / 2 if present else -law.size / 2)

    ledger = law.ledger
    claim = _gaussian_claim(ledger)
    residuals = seen(False, range(runs))[:STREAM_RUNS]
    report = audit_transcripts(
        scores,
        claim,
        subject=repr(law.mechanism),
        rounds=law.releases,
        private=False,
        runs=runs,
        thresholds=[-1.5, -0.75, 0.0, 0.75, 1.5],
        residuals=residuals[:, :, None],
    )
    (whole, *_) = noise_checks(residuals.flatten(1)[:, None, None])
    entry = ledger.entries[0]
    checks = (
        replace(whole, name="noise in all releases together"),
        law.canary_check(seen(True, range(runs))),
        Check("releases of a transcript", law.releases, "<=", law.documented),
        Check("noise multiplier charged", entry.event.noise_multiplier, "<=", law.multiplier),
        Check("releases charged", sum(e.count for e in ledger.entries), ">=", law.charges),
    )
    return replace(report, checks=(*report.checks, *checks))


def _gaussian_claim(ledger: Ledger) -> Claim:
    points = tuple(ledger.guarantee(delta=delta) for delta in (DELTA, *CURVE))
    mu = math.sqrt(sum(e.count / e.event.noise_multiplier**2 for e in ledger.entries))
    return Claim(points, 2 * mu if ledger.adjacency == "replace-one" else mu)


class StreamLaw:
    """What the documentation says of a transcript, and transcripts of the shipped program."""

    def __init__(self, case: StreamCase) -> None:
        self.case, self.mechanism = case, case.make()
        mechanism = self.mechanism
        self.multiplier = mechanism.noise_multiplier
        self.canary, self.other = self._records()
        # In the order of their release: which block, step or increment it is.
        labels, _, self.ledger = self._run(self.other, InsecureSeededNoise(0), ("audit", "labels"))
        self.releases = len(labels)
        if isinstance(mechanism, PrefixSum):
            self.documented, self.charges = self.releases, 1
            column, BB = prefix_covariance(mechanism.factorization, mechanism.horizon)
            cov = column * BB
            weights = torch.ones(len(labels)) * mechanism.participations
        elif isinstance(mechanism, LocalGaussian):
            self.documented, self.charges = case.increments, case.increments
            cov, weights = torch.eye(case.increments), torch.ones(case.increments)
        else:
            self.documented, self.charges = len(_BLOCKS), 1
            cov, weights = torch.eye(len(labels)), (torch.tensor(labels) == 0)
        self.covariance = cov.double() * self._unit_std() ** 2
        self._root = torch.linalg.cholesky(self.covariance)
        self._weights = weights.double()
        self.pull = self.whitened((self.mean(self.canary) - self.mean(self.other))[None])[0]
        self.size = float(self.pull.norm())

    def _records(self) -> tuple[Tensor, Tensor | None]:
        """The canary and what stands in its place: features, and the outcome in the last column."""
        mechanism = self.mechanism
        reward = 3 * mechanism.outcome_bound
        canary = torch.tensor([3.0, 0.0, mechanism.centre + reward]).double()
        if mechanism.adjacency == "zero-out":
            return canary, None
        angle = {"sign": 0.0, "turn": math.pi / 3, "swap": math.pi / 2}[self.case.world]
        features = [3 * math.cos(angle), 3 * math.sin(angle)]
        return canary, torch.tensor([*features, mechanism.centre - reward]).double()

    def _statistic(self, record: Tensor | None) -> Tensor:
        """What a record adds to a sum, by the documentation."""
        mechanism = self.mechanism
        if record is None:
            return torch.zeros(1 if isinstance(mechanism, BlockSum) else 5).double()
        centre, bound = self.case.within or (mechanism.centre, mechanism.outcome_bound)
        y = max(-bound, min(bound, float(record[2]) - centre))
        if isinstance(mechanism, BlockSum):
            return torch.tensor([y]).double()
        first, second = (record[:2] / record[:2].norm().clamp(min=1.0)).tolist()
        scale = mechanism.moment_scale
        upper = math.sqrt(2) * first * second
        return torch.tensor(
            [first**2, second**2, upper, scale * y * first, scale * y * second]
        ).double()

    def _unit_std(self) -> float:
        """The noise per unit of the covariance. What the lattice adds to it is a millionth."""
        mechanism = self.mechanism
        if isinstance(mechanism, BlockSum):
            return self.multiplier * (self.case.within or (0, mechanism.outcome_bound))[1]
        r = (mechanism.moment_scale * mechanism.outcome_bound) ** 2
        norm = math.sqrt(1 + r)
        if mechanism.adjacency == "replace-one":
            norm = math.sqrt(r) if r > 2 else (1 + r / 2) / math.sqrt(2)
        if isinstance(mechanism, PrefixSum):
            norm *= mechanism.participations
        return self.multiplier * norm

    def mean(self, record: Tensor | None) -> Tensor:
        """The transcript without noise."""
        return self._weights[:, None] * self._statistic(record)

    def whitened(self, transcripts: Tensor) -> Tensor:
        """Transcripts with independent noise of variance one: `n x releases x D`."""
        return torch.linalg.solve_triangular(self._root, transcripts, upper=False)

    def canary_check(self, seen: Tensor) -> Check:
        """Whether the canary moves every release as documented, on average.

        Args:
            seen: `n x releases x D` whitened transcripts with it, less their documented mean.
        """
        rows = self.pull[self.pull.norm(dim=1) > 0]
        along = seen[:, self.pull.norm(dim=1) > 0] * rows / rows.norm(dim=1, keepdim=True)
        means = along.sum(dim=2).mean(dim=0) * math.sqrt(len(seen))
        limit = -float(ndtri(NOISE_LEVEL / (2 * len(means))))
        detail = "largest difference from the documentation, in standard errors"
        return Check("mean pull of the canary", float(means.abs().max()), "<=", limit, detail)

    def transcript(self, record: Tensor | None, noise: NoiseSource, path: Path) -> Tensor:
        """All that is released when a record is in the stream: `releases x D`."""
        return torch.stack(self._run(record, noise, path)[1])

    def _run(
        self, record: Tensor | None, noise: NoiseSource, path: Path
    ) -> tuple[list[int], list[Tensor], Ledger]:
        # A mechanism of its own for every transcript: what one remembers is its own affair.
        mechanism = self.case.make()
        ledger = Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)
        labels: list[int] = []
        values: list[Tensor] = []
        if isinstance(mechanism, LocalGaussian):
            rows = torch.zeros(0, 3) if record is None else record[None]
            for t in range(self.case.increments):
                increment, ledger = mechanism.release(
                    rows, ledger=ledger, noise=noise, path=(*path, t)
                )
                labels.append(t)
                values.append(increment.values[0])
        elif isinstance(mechanism, PrefixSum):
            state, ledger = mechanism.start(ledger=ledger, noise=noise)
            for t in range(1, 1 + mechanism.horizon):
                many = mechanism.participations if t == 1 and record is not None else 0
                rows = torch.zeros(0, 3) if record is None else record.expand(many, 3)
                state, prefix = mechanism.step(state, rows, noise=noise, path=path)
                labels.append(prefix.t)
                values.append(prefix.values)
        else:
            block, ledger = mechanism.start(ledger=ledger, noise=noise)
            centre, bound = self.case.within or (mechanism.centre, mechanism.outcome_bound)
            nothing = torch.tensor([centre]).double()
            for number, length in enumerate(_BLOCKS):
                block = mechanism.open(block, length, centre=centre, outcome_bound=bound)
                for i in range(length):
                    outcome = nothing if number or i or record is None else record[2:]
                    block, done = mechanism.add(block, outcome, noise=noise, path=path)
                    if done is not None:
                        labels.append(done.index)
                        values.append(torch.tensor([done.total]).double())
        return labels, values, ledger


def audited_published_tree(
    *, alpha: float, beta: float, reward: float, seed: int = 0
) -> AuditReport:
    """The audit of section 5.1's tree as published, on :math:`(a, y)(a, y)^T`, one feature.

    A datum of 1024 rounds enters ten nodes, each with noise of its own: the published deviation off
    the diagonal, and more by a root of two on it. The worlds: it is (1, y), or nothing.
    """
    nodes, std = 10, paper_prefix_noise(alpha, beta, 1024, reward)
    pull = torch.tensor([1.0, math.sqrt(2) * reward, reward**2]).double().expand(nodes, 3)
    pull = pull / (math.sqrt(2) * std)
    noise, size = InsecureSeededNoise(seed), float(pull.norm())

    def scores(present: bool, runs: range) -> Tensor:
        path = ("published", "with" if present else "without")
        draws = normal(noise, runs.stop, nodes, 3, path=path)[runs.start :]
        return ((draws + present * pull) * pull).sum(dim=(1, 2)) / size

    ledger = Ledger().spend(Event(1 / gaussian_mu(alpha, beta)), private=False)
    claim = Claim((ledger.guarantee(delta=beta),), gaussian_mu(alpha, beta))
    return audit_transcripts(
        scores,
        claim,
        subject=f"published tree, rewards up to {reward:g}",
        rounds=nodes,
        private=False,
        runs=STREAM_RUNS,
        thresholds=[size / 2 + offset for offset in (-1.5, -0.75, 0.0, 0.75, 1.5)],
    )


_PREFIX = "botorch_fed.privacy.tree:PrefixSum"
_LOCAL = "botorch_fed.privacy.increments:LocalGaussian"
_BLOCK = "botorch_fed.privacy.increments:BlockSum"
_SCALE = "return self.noise_multiplier * self._norm(step) * factor.column_norm"
_FRESH = 'lambda rows: normal(noise, rows, self.dim, path=(*path, "step", t)),'
_INCREMENT = (
    'values = lattice_gaussian(total, self.noise_scale, noise=noise, path=(*path, "noise"))'
)
_SUMMED = "total = self.statistic.rounded_sum(records, step).double() * step"
_PARTIAL = "return replace(state, count=count, total=total), None"
_BLOCK_PATH = 'where = (*path, "block", block)'
_LEMMA = repr(paper_local_noise(10.0, 0.1, _PUBLISHED["outcome_bound"]))
_PAYS = "return Event(float(self.noise_multiplier))"

_PREFIXES = tuple(case for case in STREAM_CASES if not case.startswith(("local", "block")))
_TREES = tuple(case for case in _PREFIXES if case.startswith("tree"))
_BUFFERED = ("root", "root, swapped", "root, rewards up to 20", "root, two records")
_LOCALS = ("local", "local, swapped", "local, zero-out")
_BOTH_BLOCKS = ("blocks", "blocks, zero-out")
_NARROWED = ("blocks, narrowed",)
_REPLACED_RECORDS = tuple(
    case
    for case, chosen in STREAM_CASES.items()
    if not case.startswith("blocks") and chosen.make().adjacency == "replace-one"
)

STREAM_MUTANTS = (
    Mutant("half noise", f"{_PREFIX}._scale", _SCALE, f"{_SCALE} / 2", _PREFIXES),
    Mutant(
        "half noise in an increment",
        f"{_LOCAL}.noise_scale",
        "return self.noise_multiplier * self.norm",
        "return self.noise_multiplier * self.norm / 2",
        _LOCALS,
    ),
    Mutant(
        "a narrow range, and outcomes of the whole one",
        f"{_BLOCK}.add",
        "clipped = (values - state.centre).clamp(-state.outcome_bound, state.outcome_bound)",
        "clipped = (values - state.centre).clamp(-self.outcome_bound, self.outcome_bound)",
        _NARROWED,
    ),
    Mutant(
        "half noise in a block",
        f"{_BLOCK}.noise_std_within",
        "return self.noise_multiplier * self.norm_within(outcome_bound)",
        "return self.noise_multiplier * self.norm_within(outcome_bound) / 2",
        (*_BOTH_BLOCKS, *_NARROWED),
    ),
    Mutant(
        "constants of Lemma 5 at alpha = 10",
        f"{_LOCAL}.release",
        _INCREMENT,
        f"std = torch.tensor([{_LEMMA}[0]] * 2 + [math.sqrt(2) * {_LEMMA}[0]] + "
        f"[self.moment_scale * {_LEMMA}[1]] * 2).double(); values = std * lattice_gaussian("
        'total / std, 1.0, noise=noise, path=(*path, "noise"))',
        ("local, alpha = 10",),
    ),
    Mutant(
        "sensitivity not squared",
        f"{_RECORD}.sensitivity",
        "return _SQRT2 * (1 + r / 2) if r <= 2 else 2 * math.sqrt(r)",
        "return 2 * math.sqrt(math.sqrt(1 + r))",
        ("root, rewards up to 20",),
    ),
    Mutant(
        "replaced records are as near as two gram matrices",
        f"{_RECORD}.sensitivity",
        "return _SQRT2 * (1 + r / 2) if r <= 2 else 2 * math.sqrt(r)",
        "return _SQRT2",
        _REPLACED_RECORDS,
    ),
    Mutant(
        "the moment rides for free",
        f"{_RECORD}.sensitivity",
        "return math.sqrt(1 + r)",
        "return 1.0",
        ("root, exact", "tree, zero-out", "local, zero-out"),
    ),
    Mutant(
        "features not clipped",
        f"{_RECORD}.statistics",
        "a = clip(records[:, :-1], 1.0)",
        "a = records[:, :-1]",
        (*_PREFIXES, *_LOCALS),
    ),
    Mutant(
        "outcomes not clipped",
        f"{_RECORD}.statistics",
        "y = (records[:, -1:] - self.centre).clamp(-self.outcome_bound, self.outcome_bound)",
        "y = records[:, -1:] - self.centre",
        (*_PREFIXES, *_LOCALS),
    ),
    Mutant(
        "outcomes of a block not clipped",
        f"{_BLOCK}.add",
        "clipped = (values - state.centre).clamp(-state.outcome_bound, state.outcome_bound)",
        "clipped = values - self.centre",
        _BOTH_BLOCKS,
    ),
    Mutant(
        "node noise reused",
        f"{_PREFIX}.step",
        _FRESH,
        _FRESH.replace('"step", t', '"level", t & -t'),
        _TREES,
    ),
    Mutant(
        "buffer noise reused",
        f"{_PREFIX}.step",
        _FRESH,
        _FRESH.replace('"step", t', '"step"'),
        _PREFIXES,
    ),
    Mutant(
        "each sum with noise of its own",
        "botorch_fed.privacy.tree:_Buffered.advance",
        "return (buffers * self.theta[:, None]).add_(w), noise + w",
        "return (buffers * self.theta[:, None]).add_(w), w * math.sqrt(self.row_square(t))",
        _BUFFERED,
    ),
    Mutant(
        "horizon off",
        f"{_PREFIX}._scale",
        _SCALE,
        _SCALE.replace("factor.", "_named(self.factorization, factor.horizon // 2)."),
        _PREFIXES,
    ),
    Mutant(
        "one participation paid for two",
        f"{_PREFIX}._norm",
        "return self.participations * (distance + rounding) * (1 + _SLACK)",
        "return (distance + rounding) * (1 + _SLACK)",
        ("root, two records",),
    ),
    Mutant(
        "wrong multiplier, accounted",
        f"{_PREFIX}.event",
        _PAYS,
        "return Event(2 * float(self.noise_multiplier))",
        _PREFIXES,
    ),
    Mutant(
        "wrong multiplier, accounted by a client",
        f"{_LOCAL}.event",
        _PAYS,
        "return Event(2 * float(self.noise_multiplier))",
        _LOCALS,
    ),
    Mutant(
        "wrong multiplier, accounted for blocks",
        f"{_BLOCK}.event",
        _PAYS,
        "return Event(2 * float(self.noise_multiplier))",
        _BOTH_BLOCKS,
    ),
    Mutant(
        "running sum sent by a client",
        f"{_LOCAL}.release",
        _SUMMED,
        f'{_SUMMED} + self.__dict__.get("sum", 0); self.__dict__["sum"] = total',
        _LOCALS,
    ),
    Mutant(
        "running sum sent without noise",
        f"{_LOCAL}.release",
        _INCREMENT,
        "values = total",
        _LOCALS,
    ),
    Mutant(
        "increment noise reused",
        f"{_LOCAL}.release",
        _INCREMENT,
        _INCREMENT.replace("*path,", "*path[:-1],"),
        _LOCALS,
    ),
    Mutant(
        "an unfinished block released",
        f"{_BLOCK}.add",
        _PARTIAL,
        "return replace(state, count=count, total=total), BlockRelease(state.blocks - 1, count, "
        "float(lattice_gaussian(torch.tensor([total]).double() * step, self.noise_std, "
        'noise=noise, path=(*path, "part", state.blocks, count))), self.centre, self.noise_std, '
        "noise.private, repr(self))",
        _BOTH_BLOCKS,
    ),
    Mutant(
        "block noise reused",
        f"{_BLOCK}.add",
        _BLOCK_PATH,
        'where = (*path, "block")',
        _BOTH_BLOCKS,
    ),
)
