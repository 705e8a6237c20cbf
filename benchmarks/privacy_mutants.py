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
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from botorch_fed.privacy.audit import AuditReport, audit
from botorch_fed.privacy.hazmat.noise import NoiseSource
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
