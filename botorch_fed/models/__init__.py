r"""Models: tensors in, tensors out. No protocol, no privacy, no engine.

::

    numerics    float64 by construction, Cholesky with an error that names the cause
    kernels     stationary kernels as plain tensors
    features    feature maps, the shared bases
    summary     additive statistics, their total's weight posterior, the evidence
    basis_gp    BasisGP, the BoTorch model over a basis
    paths       functions drawn from a posterior
    own         an agent's own GP, and its fast fit
    message_prior  MessagePriorGP: received functions as a prior
    ensemble    RankingEnsemble (RGPE)
    mixture     LocalSharedMixture of an agent's own model and a shared one
    pic         PartiallyIndependentGP: own data exactly, everybody else's through a summary
    feasibility the probability that an evaluation succeeds
    repair      totals that noise has made inconsistent, made those of a posterior again
    support     where inducing points lie
    warp        the logarithmic scale of log-scaled parameters
"""

from typing import TYPE_CHECKING

from botorch_fed.lazy import lazily

if TYPE_CHECKING:
    from botorch_fed.models.basis_gp import BasisGP
    from botorch_fed.models.earned_prior import EarnedPosterior, PriorFunction, fit_earned
    from botorch_fed.models.ensemble import RankingEnsemble
    from botorch_fed.models.feasibility import Feasibility, fit_feasibility
    from botorch_fed.models.features import (
        AdditiveFeatures,
        FeatureMap,
        InducingFeatures,
        KLFeatures,
        PolynomialFeatures,
        QuadratureFourierFeatures,
        RandomFourierFeatures,
        WarpedFeatures,
        feature_map_from_tensors,
        register_feature_map,
    )
    from botorch_fed.models.kernels import StationaryKernel
    from botorch_fed.models.local_gp import LengthscalePrior, LocalGP, fit_local_gp, standardize
    from botorch_fed.models.message_prior import MessagePriorGP
    from botorch_fed.models.mixture import LocalSharedMixture, MixturePosterior, draw_mixture_path
    from botorch_fed.models.own import (
        OwnHyperparameters,
        default_hyperparameters,
        fit_own_gp,
        needs_fit,
        own_gp,
    )
    from botorch_fed.models.paths import draw_path
    from botorch_fed.models.pic import PartiallyIndependentGP
    from botorch_fed.models.repair import (
        noise_floor,
        noise_norm_bound,
        noise_shift,
        repair_total,
    )
    from botorch_fed.models.summary import (
        LocalBlock,
        Summary,
        WeightPosterior,
        log_evidence,
        profiled_evidence,
        sample_weights_dual,
        summarize,
    )
    from botorch_fed.models.support import (
        sobol_support,
    )
    from botorch_fed.models.warp import LogWarp, WarpedKernel

_WHERE = {
    "basis_gp": ("BasisGP",),
    "earned_prior": ("EarnedPosterior", "PriorFunction", "fit_earned"),
    "ensemble": ("RankingEnsemble",),
    "feasibility": ("Feasibility", "fit_feasibility"),
    "features": (
        "AdditiveFeatures",
        "FeatureMap",
        "InducingFeatures",
        "KLFeatures",
        "PolynomialFeatures",
        "QuadratureFourierFeatures",
        "RandomFourierFeatures",
        "WarpedFeatures",
        "feature_map_from_tensors",
        "register_feature_map",
    ),
    "kernels": ("StationaryKernel",),
    "local_gp": ("LengthscalePrior", "LocalGP", "fit_local_gp", "standardize"),
    "message_prior": ("MessagePriorGP",),
    "mixture": ("LocalSharedMixture", "MixturePosterior", "draw_mixture_path"),
    "own": ("OwnHyperparameters", "default_hyperparameters", "fit_own_gp", "needs_fit", "own_gp"),
    "paths": ("draw_path",),
    "pic": ("PartiallyIndependentGP",),
    "repair": ("noise_floor", "noise_norm_bound", "noise_shift", "repair_total"),
    "summary": (
        "LocalBlock",
        "Summary",
        "WeightPosterior",
        "log_evidence",
        "profiled_evidence",
        "sample_weights_dual",
        "summarize",
    ),
    "support": ("sobol_support",),
    "warp": ("LogWarp", "WarpedKernel"),
}

__all__ = [
    "AdditiveFeatures",
    "BasisGP",
    "EarnedPosterior",
    "Feasibility",
    "FeatureMap",
    "InducingFeatures",
    "KLFeatures",
    "LengthscalePrior",
    "LocalBlock",
    "LocalGP",
    "LocalSharedMixture",
    "LogWarp",
    "MessagePriorGP",
    "MixturePosterior",
    "OwnHyperparameters",
    "PartiallyIndependentGP",
    "PolynomialFeatures",
    "PriorFunction",
    "QuadratureFourierFeatures",
    "RandomFourierFeatures",
    "RankingEnsemble",
    "StationaryKernel",
    "Summary",
    "WarpedFeatures",
    "WarpedKernel",
    "WeightPosterior",
    "default_hyperparameters",
    "draw_mixture_path",
    "draw_path",
    "feature_map_from_tensors",
    "fit_earned",
    "fit_feasibility",
    "fit_local_gp",
    "fit_own_gp",
    "log_evidence",
    "needs_fit",
    "noise_floor",
    "noise_norm_bound",
    "noise_shift",
    "own_gp",
    "profiled_evidence",
    "register_feature_map",
    "repair_total",
    "sample_weights_dual",
    "sobol_support",
    "standardize",
    "summarize",
]

__getattr__, __dir__ = lazily(__name__, _WHERE)
