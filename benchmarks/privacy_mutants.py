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
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from botorch_fed.privacy.accounting import Ledger
from botorch_fed.privacy.audit import (
    CURVE,
    AuditReport,
    Check,
    Claim,
    audit,
    audit_transcripts,
)
from botorch_fed.privacy.distributed import (
    DistributedGaussianSum,
    DistributedMechanism,
    DistributedRecordSum,
)
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource
from botorch_fed.privacy.mechanisms import (
    CorrelatedGaussianSum,
    FixedSizeSampling,
    GaussianSum,
    PoissonSampling,
    SignalWarning,
    WeightedGaussianSum,
)

# The same for every case, healthy or mutated; the canary and the thresholds are the audit's own.
RUNS = 600
DISTRIBUTED_RUNS = 300
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
    """

    name: str
    target: str
    old: str
    new: str
    cases: tuple[str, ...]


def build(mutant: Mutant) -> tuple[Any, str, Any]:
    """The object that holds the mutant's target, the attribute's name, and the mutated value."""
    module_name, qualified = mutant.target.split(":")
    module = import_module(module_name)
    *parents, name = qualified.split(".")
    owner: Any = functools.reduce(getattr, parents, module)
    source = textwrap.dedent(inspect.getsource(_function(inspect.getattr_static(owner, name))))
    lines = source.splitlines()
    found = [i for i, line in enumerate(lines) if line.strip() == mutant.old]
    if len(found) != 1:
        raise ValueError(
            f"Mutant {mutant.name!r} needs its line exactly once in {mutant.target}, found it "
            f"{len(found)} times: {mutant.old}"
        )
    (i,) = found
    indentation = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
    lines[i] = indentation + mutant.new
    code = compile("\n".join(lines), f"<mutant: {mutant.name}>", "exec")
    built: dict[str, Any] = {}
    exec(code, vars(module), built)
    value = built[name]
    if hasattr(value, "__set_name__"):
        value.__set_name__(owner, name)
    return owner, name, value


@contextmanager
def installed(mutant: Mutant) -> Iterator[None]:
    """The mutant in place of the shipped code."""
    owner, name, value = build(mutant)
    shipped = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, shipped)


def _function(attribute: Any) -> Any:
    """What `inspect.getsource` understands, decorators included."""
    for inner in ("fget", "func", "__func__"):
        attribute = getattr(attribute, inner, attribute)
    return attribute


def audited(case: str, *, seed: int = 0, noise: NoiseSource | None = None) -> AuditReport:
    """The audit of a case, built here and now, with the settings that all cases share."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)  # a roster of six has little signal
        mechanism = CASES[case]()
    return audit(mechanism, rounds=ROUNDS, runs=RUNS, delta=DELTA, seed=seed, noise=noise)


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
        f"{_DISTRIBUTED}:DistributedRecordSum._statistics",
        "a = clip(records[:, :-1], 1.0)",
        "a = records[:, :-1]",
        _BOTH_RECORDS,
    ),
    Mutant(
        "outcomes not clipped",
        f"{_DISTRIBUTED}:DistributedRecordSum._statistics",
        "y = (records[:, -1:] - self.centre).clamp(-self.outcome_bound, self.outcome_bound)",
        "y = records[:, -1:] - self.centre",
        _BOTH_RECORDS,
    ),
    Mutant(
        "the moment rides for free",
        f"{_DISTRIBUTED}:DistributedRecordSum._norm",
        "distance = math.sqrt(1 + r)",
        "distance = 1.0",
        ("records",),
    ),
    Mutant(
        "replaced records are as near as two gram matrices",
        f"{_DISTRIBUTED}:DistributedRecordSum._norm",
        "distance = (_SQRT2 * (1 + r / 2) if r <= 2 else 2 * math.sqrt(r)) / 2",
        "distance = _SQRT2 / 2",
        ("records, replace-one",),
    ),
)
