r"""Privacy: tensors in, private tensors and a ledger out. Knows no models, agents or protocols.

accounting  what releases cost together: events, guarantees, budgets, ledgers
mechanisms  noisy sums: bound, noise and event in one object; clipping and sampling
audit       does a mechanism do what its event says? `audit` is imported from there
hazmat      raw parts: where noise and secret coins come from
"""

from botorch_fed.privacy.accounting import (
    Accountant,
    Adjacency,
    Budget,
    Entry,
    Event,
    Guarantee,
    Ledger,
    LedgerFile,
    Unit,
    compose,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    noise_multiplier_for,
)
from botorch_fed.privacy.audit import (
    AuditReport,
    Check,
    Claim,
    OperatingPoint,
    audit_transcripts,
    noise_checks,
)
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource, OSNoise
from botorch_fed.privacy.mechanisms import (
    CorrelatedGaussianSum,
    FixedSizeSampling,
    GaussianMechanism,
    GaussianSum,
    PoissonSampling,
    Release,
    SignalWarning,
    WeightedGaussianSum,
    chi_clip_norm,
    clip,
    simulated_clip_share,
)

__all__ = [
    "Accountant",
    "Adjacency",
    "AuditReport",
    "Budget",
    "Check",
    "Claim",
    "CorrelatedGaussianSum",
    "Entry",
    "Event",
    "FixedSizeSampling",
    "GaussianMechanism",
    "GaussianSum",
    "Guarantee",
    "InsecureSeededNoise",
    "Ledger",
    "LedgerFile",
    "NoiseSource",
    "OSNoise",
    "OperatingPoint",
    "PoissonSampling",
    "Release",
    "SignalWarning",
    "Unit",
    "WeightedGaussianSum",
    "audit_transcripts",
    "chi_clip_norm",
    "clip",
    "compose",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "noise_checks",
    "noise_multiplier_for",
    "simulated_clip_share",
]
