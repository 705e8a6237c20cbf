r"""Privacy: tensors in, private tensors and a ledger out, independent of models and protocols.

::

    accounting  what releases cost together: events, guarantees, budgets, ledgers
    shared_ledger  a ledger on disk, from which several runs pay
    checks      checks of settings that all of these share
    paying      the price of a mechanism, and the ledger that pays it
    mechanisms  noisy sums: bound, noise and event in one object; clipping and sampling
    distributed noisy sums without a trusted server: every agent adds its share of the noise
    records     the statistic of a record and its bounds, shared by the sums over records
    tree        the running sum of a stream, released after every step under one guarantee
    increments  noise before anything is added: one client's step, or a block of an action's rewards
    grid        the public grid on which contributions are added, exactly
    channels    how they are added: in the open, or encrypted under one key or under a joint one
    aggregation PrivateSum: a mechanism, a channel, and who adds the noise
    audit       does a mechanism do what its event says? audit is imported from there
    worlds      what mechanisms release in chosen worlds, by program and by documentation
    world_checks their comparison, with the same noise in both worlds; coins, tails, payments
    selected    a bound by the statistic that tells worlds apart best
    evidence    claims, checks, bounds on epsilon, tests of noise
    hazmat      raw parts: noise, secret coins, lattice encryption
"""

from typing import TYPE_CHECKING

from botorch_fed.lazy import lazily

if TYPE_CHECKING:
    from botorch_fed.privacy.accounting import (
        Accountant,
        Adjacency,
        Budget,
        Entry,
        Event,
        Guarantee,
        Ledger,
        Unit,
        check_promised_delta,
        compose,
        epsilon,
        gaussian_delta,
        gaussian_epsilon,
        gaussian_mu,
        noise_multiplier_for,
        optimistic_epsilon,
    )
    from botorch_fed.privacy.aggregation import PrivateSum, SumRelease
    from botorch_fed.privacy.audit import (
        AuditReport,
        Check,
        Claim,
        OperatingPoint,
        audit_subject,
        audit_transcripts,
        noise_checks,
    )
    from botorch_fed.privacy.channels import (
        Channel,
        CKKSChannel,
        Epoch,
        PlainChannel,
        Secrets,
        ThresholdCKKSChannel,
    )
    from botorch_fed.privacy.distributed import (
        DistributedGaussianSum,
        DistributedRecordSum,
        noise_multiplier_within,
    )
    from botorch_fed.privacy.grid import PublicGrid
    from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource, OSNoise
    from botorch_fed.privacy.increments import (
        BlockRelease,
        BlockState,
        BlockSum,
        LocalGaussian,
    )
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
    )
    from botorch_fed.privacy.records import RecordStatistic
    from botorch_fed.privacy.shared_ledger import SharedLedger
    from botorch_fed.privacy.tree import PrefixRelease, PrefixState, PrefixSum

_WHERE = {
    "accounting": (
        "Accountant",
        "Adjacency",
        "Budget",
        "Entry",
        "Event",
        "Guarantee",
        "Ledger",
        "Unit",
        "check_promised_delta",
        "compose",
        "epsilon",
        "gaussian_delta",
        "gaussian_epsilon",
        "gaussian_mu",
        "noise_multiplier_for",
        "optimistic_epsilon",
    ),
    "aggregation": ("PrivateSum", "SumRelease"),
    "audit": (
        "AuditReport",
        "Check",
        "Claim",
        "OperatingPoint",
        "audit_subject",
        "audit_transcripts",
        "noise_checks",
    ),
    "channels": (
        "Channel",
        "CKKSChannel",
        "Epoch",
        "PlainChannel",
        "Secrets",
        "ThresholdCKKSChannel",
    ),
    "distributed": ("DistributedGaussianSum", "DistributedRecordSum", "noise_multiplier_within"),
    "grid": ("PublicGrid",),
    "hazmat.noise": ("InsecureSeededNoise", "NoiseSource", "OSNoise"),
    "increments": ("BlockRelease", "BlockState", "BlockSum", "LocalGaussian"),
    "mechanisms": (
        "CorrelatedGaussianSum",
        "FixedSizeSampling",
        "GaussianMechanism",
        "GaussianSum",
        "PoissonSampling",
        "Release",
        "SignalWarning",
        "WeightedGaussianSum",
        "chi_clip_norm",
        "clip",
    ),
    "records": ("RecordStatistic",),
    "shared_ledger": ("SharedLedger",),
    "tree": ("PrefixRelease", "PrefixState", "PrefixSum"),
}

__all__ = [
    "Accountant",
    "Adjacency",
    "AuditReport",
    "BlockRelease",
    "BlockState",
    "BlockSum",
    "Budget",
    "CKKSChannel",
    "Channel",
    "Check",
    "Claim",
    "CorrelatedGaussianSum",
    "DistributedGaussianSum",
    "DistributedRecordSum",
    "Entry",
    "Epoch",
    "Event",
    "FixedSizeSampling",
    "GaussianMechanism",
    "GaussianSum",
    "Guarantee",
    "InsecureSeededNoise",
    "Ledger",
    "LocalGaussian",
    "NoiseSource",
    "OSNoise",
    "OperatingPoint",
    "PlainChannel",
    "PoissonSampling",
    "PrefixRelease",
    "PrefixState",
    "PrefixSum",
    "PrivateSum",
    "PublicGrid",
    "RecordStatistic",
    "Release",
    "Secrets",
    "SharedLedger",
    "SignalWarning",
    "SumRelease",
    "ThresholdCKKSChannel",
    "Unit",
    "WeightedGaussianSum",
    "audit_subject",
    "audit_transcripts",
    "check_promised_delta",
    "chi_clip_norm",
    "clip",
    "compose",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "noise_checks",
    "noise_multiplier_for",
    "noise_multiplier_within",
    "optimistic_epsilon",
]

__getattr__, __dir__ = lazily(__name__, _WHERE)
