r"""Models: tensors in, tensors out. No protocol, no privacy, no engine.

numerics    float64 by construction, Cholesky with an error that says why
kernels     stationary kernels as plain tensors
features    feature maps, the shared bases
summary     additive statistics, their total's weight posterior, the evidence
basis_gp    `BasisGP`, the BoTorch model over a basis
paths       functions drawn from a posterior
own         an agent's own GP, and its fast fit
message_prior  `MessagePriorGP`: received functions as a prior
ensemble    `RankingEnsemble` (RGPE)
"""

from botorch_fed.models.basis_gp import BasisGP
from botorch_fed.models.ensemble import RankingEnsemble
from botorch_fed.models.features import (
    AdditiveFeatures,
    FeatureMap,
    InducingFeatures,
    KLFeatures,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    WarpedFeatures,
    feature_map_from_tensors,
)
from botorch_fed.models.kernels import StationaryKernel
from botorch_fed.models.message_prior import MessagePriorGP
from botorch_fed.models.own import (
    LogWarp,
    OwnHyperparameters,
    WarpedKernel,
    default_hyperparameters,
    fit_own_gp,
    needs_fit,
    own_gp,
)
from botorch_fed.models.paths import draw_path
from botorch_fed.models.summary import (
    LocalBlock,
    Summary,
    WeightPosterior,
    log_evidence,
    reweight,
    sample_weights_dual,
    summarize,
)

__all__ = [
    "AdditiveFeatures",
    "BasisGP",
    "FeatureMap",
    "InducingFeatures",
    "KLFeatures",
    "LocalBlock",
    "LogWarp",
    "MessagePriorGP",
    "OwnHyperparameters",
    "QuadratureFourierFeatures",
    "RandomFourierFeatures",
    "RankingEnsemble",
    "StationaryKernel",
    "Summary",
    "WarpedFeatures",
    "WarpedKernel",
    "WeightPosterior",
    "default_hyperparameters",
    "draw_path",
    "feature_map_from_tensors",
    "fit_own_gp",
    "log_evidence",
    "needs_fit",
    "own_gp",
    "reweight",
    "sample_weights_dual",
    "summarize",
]
