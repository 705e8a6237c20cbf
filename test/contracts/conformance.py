"""Every model of the package in every way in which BoTorch uses one; writes `docs/conformance.rst`.

    python -m test.contracts.conformance            run the matrix and write the page
    python -m test.contracts.conformance --only MODEL PATH …   some cells, with their tracebacks

A cell runs one of BoTorch's acquisition functions, optimisers, samplers, or ways to fit and keep a
model. It *works* if its values are finite, have finite gradients to the points, are the same one by
one as in a batch, and, where BoTorch has a model of the same law (`Case.twin`), are those that
BoTorch computes with it. It is *refused* if the package, or BoTorch itself, raises one of its own
errors. Anything else is a failure, which the page cannot hold.
"""

from __future__ import annotations

import argparse
import copy
import io
import math
import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import botorch
import torch
from botorch.acquisition import analytic, logei, monte_carlo
from botorch.acquisition.active_learning import (
    PairwiseMCPosteriorVariance,
    qNegIntegratedPosteriorVariance,
)
from botorch.acquisition.bayesian_active_learning import qBayesianActiveLearningByDisagreement
from botorch.acquisition.cost_aware import InverseCostWeightedUtility
from botorch.acquisition.fixed_feature import FixedFeatureAcquisitionFunction
from botorch.acquisition.joint_entropy_search import qJointEntropySearch
from botorch.acquisition.knowledge_gradient import (
    ProjectedAcquisitionFunction,
    qKnowledgeGradient,
    qMultiFidelityKnowledgeGradient,
)
from botorch.acquisition.max_value_entropy_search import (
    qLowerBoundMaxValueEntropy,
    qMaxValueEntropy,
    qMultiFidelityLowerBoundMaxValueEntropy,
    qMultiFidelityMaxValueEntropy,
)
from botorch.acquisition.multi_objective import analytic as mo_analytic
from botorch.acquisition.multi_objective import logei as mo_logei
from botorch.acquisition.multi_objective import monte_carlo as mo_monte_carlo
from botorch.acquisition.multi_objective.hypervolume_knowledge_gradient import (
    qHypervolumeKnowledgeGradient,
    qMultiFidelityHypervolumeKnowledgeGradient,
)
from botorch.acquisition.multi_objective.joint_entropy_search import (
    qLowerBoundMultiObjectiveJointEntropySearch,
)
from botorch.acquisition.multi_objective.max_value_entropy_search import (
    qLowerBoundMultiObjectiveMaxValueEntropySearch,
)
from botorch.acquisition.multi_objective.multi_fidelity import MOMF
from botorch.acquisition.multi_objective.parego import qLogNParEGO
from botorch.acquisition.multi_objective.predictive_entropy_search import (
    qMultiObjectivePredictiveEntropySearch,
)
from botorch.acquisition.multi_step_lookahead import qMultiStepLookahead
from botorch.acquisition.multioutput_acquisition import (
    MultiOutputAcquisitionFunctionWrapper,
    MultiOutputPosteriorMean,
)
from botorch.acquisition.objective import LinearMCObjective, ScalarizedPosteriorTransform
from botorch.acquisition.penalized import L2Penalty, PenalizedAcquisitionFunction
from botorch.acquisition.predictive_entropy_search import qPredictiveEntropySearch
from botorch.acquisition.preference import (
    AnalyticExpectedUtilityOfBestOption,
    PairwiseBayesianActiveLearningByDisagreement,
    qExpectedUtilityOfBestOption,
)
from botorch.acquisition.prior_guided import PriorGuidedAcquisitionFunction
from botorch.acquisition.proximal import ProximalAcquisitionFunction
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.cross_validation import batch_cross_validation, gen_loo_cv_folds, loo_cv
from botorch.exceptions.errors import BotorchError
from botorch.fit import fit_gpytorch_mll
from botorch.generation import BoltzmannSampling, MaxPosteriorSampling
from botorch.generation.gen import gen_candidates_torch
from botorch.generation.sampling import ConstrainedMaxPosteriorSampling
from botorch.models import ModelList, ModelListGP, SingleTaskGP
from botorch.models.cost import AffineFidelityCostModel
from botorch.models.deterministic import GenericDeterministicModel, MatheronPathModel
from botorch.models.model import Model
from botorch.optim.homotopy import FixedHomotopySchedule, Homotopy, HomotopyParameter
from botorch.optim.initializers import gen_batch_initial_conditions
from botorch.optim.optimize import (
    optimize_acqf,
    optimize_acqf_cyclic,
    optimize_acqf_discrete,
    optimize_acqf_discrete_local_search,
    optimize_acqf_list,
    optimize_acqf_mixed,
)
from botorch.optim.optimize_homotopy import optimize_acqf_homotopy
from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
from botorch.posteriors.posterior import Posterior
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.get_sampler import get_sampler
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.utils.multi_objective.box_decompositions import (
    DominatedPartitioning,
    FastNondominatedPartitioning,
)
from botorch.utils.sampling import optimize_posterior_samples
from gpytorch.kernels import Kernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Size, Tensor

from botorch_fed.models import (
    BasisGP,
    FeatureMap,
    InducingFeatures,
    LocalSharedMixture,
    MessagePriorGP,
    PartiallyIndependentGP,
    PriorFunction,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    RankingEnsemble,
    Summary,
    fit_earned,
    summarize,
)
from botorch_fed.rng import generator
from test.cases import UNIT, normal, se, uniform

PAGE = Path(__file__).parents[2] / "docs" / "conformance.rst"
N, NOISE, MEAN = 6, 0.02, 0.3
TEST_X = uniform(2, 1, 2, seed=11)  # where acquisition functions are compared
PAIR_X = uniform(2, 2, 2, seed=12)
PENDING = uniform(2, 2, seed=13)
CANDIDATES = uniform(12, 2, seed=14)
REFERENCE_POINT = torch.tensor([-3.0, -3.0], dtype=torch.float64)
QUICK = {"num_restarts": 1, "raw_samples": 4, "options": {"maxiter": 2}}


# ------------------------------------------------------------------ models


def _truth(X: Tensor, shift: float = 0.0) -> Tensor:
    return (5 * X + shift).sin().sum(dim=-1, keepdim=True)


def _data(output: int) -> tuple[Tensor, Tensor]:
    X = uniform(N, 2)
    return X, _truth(X, output) + 0.1 * normal(N, 1, seed=output)


def _others(phi: FeatureMap, output: int, seed: int = 1) -> tuple[Tensor, Tensor, Summary]:
    X = uniform(8, 2, seed=seed)
    Y = _truth(X, output)
    return X, Y, summarize(phi, X, Y, noise_var=NOISE, mean=MEAN)


def _fourier() -> FeatureMap:
    kernel = se(0.4, 0.6, outputscale=1.5)
    return RandomFourierFeatures.draw(kernel, 40, generator=generator(0, "conformance"))


def _quadrature() -> FeatureMap:
    return QuadratureFourierFeatures.from_kernel(se(0.7, 0.9), UNIT, tol=1e-3)


def _inducing() -> FeatureMap:
    return InducingFeatures(se(0.4, 0.6, outputscale=1.5), uniform(8, 2, seed=5))


class _MapKernel(Kernel):  # type: ignore[misc]
    """The covariance of a map, for BoTorch's own model of the same law."""

    def __init__(self, covariance: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.covariance = covariance

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        K = self.covariance(x1, x2)
        return K.diagonal(dim1=-2, dim2=-1) if diag else K


def _twin(model: BasisGP, X: Tensor, Y: Tensor, kernel: Any, mean: Any = None) -> SingleTaskGP:
    """BoTorch's exact GP with this kernel, and the mean and noise of a model."""
    twin = SingleTaskGP(
        X,
        Y,
        covar_module=kernel,
        mean_module=copy.deepcopy(model.mean_module) if mean is None else mean,
        likelihood=copy.deepcopy(model.likelihood),
        outcome_transform=None,
    )
    return twin.eval()


def _inner(phi: FeatureMap) -> Kernel:
    return _MapKernel(lambda a, b: phi(a) @ phi(b).mT)


@dataclass(frozen=True)
class Case:
    """A model of the package, fitted to nothing: its hyperparameters are given.

    Attributes:
        name: As on the page.
        make: The model of output 0 or 1.
        twin: BoTorch's own model of the same law, if there is one.
        approximate: Whether closed forms see a normal of the same mean and covariance.
        excluded: Ways that BoTorch does not offer to such a model, and why.
    """

    name: str
    make: Callable[[int], Any]
    twin: Callable[[int], Model] | None = None
    approximate: bool = False
    excluded: Mapping[str, str] = field(default_factory=dict)

    def two(self, make: Callable[[int], Any] | None = None) -> Model:
        """Two outputs, as BoTorch's users join them."""
        models = [(self.make if make is None else make)(output) for output in range(2)]
        return ModelList(*models) if self.approximate else ModelListGP(*models)


def _basis(make_map: Callable[[], FeatureMap], output: int) -> BasisGP:
    return BasisGP(*_data(output), feature_map=make_map(), noise_var=NOISE, mean=MEAN).eval()


def _basis_twin(make_map: Callable[[], FeatureMap], output: int) -> Model:
    model = _basis(make_map, output)
    return _twin(model, *_data(output), _inner(model.feature_map))


def _received(output: int) -> BasisGP:
    phi = _fourier()
    _, _, summary = _others(phi, output)
    data = _data(output)
    return BasisGP(*data, feature_map=phi, noise_var=NOISE, mean=MEAN, summaries=[summary]).eval()


def _from_summary(output: int) -> BasisGP:
    phi = _fourier()
    _, _, summary = _others(phi, output)
    return BasisGP.from_summary(summary, feature_map=phi, noise_var=NOISE, mean=MEAN).eval()


def _partly(output: int) -> PartiallyIndependentGP:
    data = _data(output)
    return PartiallyIndependentGP(*data, feature_map=_inducing(), noise_var=NOISE, mean=MEAN).eval()


def _partly_twin(output: int) -> Model:
    model = _partly(output)
    return _twin(model, *_data(output), _MapKernel(model.feature_map.covariance))


def _messages(output: int) -> MessagePriorGP:
    phi = _fourier()
    weights = generator(output, "messages").normal(5, phi.num_features)
    model = MessagePriorGP(*_data(output), feature_map=phi, weights=weights, mean=MEAN)
    model.likelihood.noise = NOISE
    return model.eval()


def _messages_twin(output: int) -> Model:
    model: Any = _messages(output)
    kernel, mean = copy.deepcopy(model.covar_module), copy.deepcopy(model.mean_module)
    return _twin(model, *_data(output), kernel, mean)


def _mixture(output: int) -> LocalSharedMixture:
    return LocalSharedMixture(_basis(_inducing, output), _from_summary(output), 0.4).eval()


def _agents(phi: FeatureMap, output: int) -> Summary:
    """Three agents: one alike, one the reverse, one in between."""
    X = uniform(3, 12, 2, seed=1)
    Y = torch.tensor([1.0, -1.0, 0.5]).double()[:, None, None] * _truth(X, output)
    summary = summarize(phi, X, Y, noise_var=NOISE, mean=MEAN)
    return Summary(summary.gram, summary.moment, summary.basis)


def _ensemble(output: int) -> RankingEnsemble:
    phi = _fourier()
    return RankingEnsemble(
        _basis(_fourier, output),
        _agents(phi, output),
        feature_map=phi,
        mean=MEAN,
        generator=generator(0, "rgpe"),
    ).eval()


def _earned(output: int) -> Model:
    phi = _fourier()
    prior = PriorFunction.of_weights(phi, generator(output, "w").normal(phi.num_features))
    return fit_earned(*_data(output), prior).model(2)


OF_MODELS = {
    "batch_cross_validation": "it makes models from data alone, and this one is made of models"
}
WITHOUT_DATA = {
    "qMultiObjectivePredictiveEntropySearch": "it starts from own observations, here there are none"
}
CASES = (
    Case("BasisGP, random features", partial(_basis, _fourier), partial(_basis_twin, _fourier)),
    Case("BasisGP, quadrature", partial(_basis, _quadrature), partial(_basis_twin, _quadrature)),
    Case("BasisGP, inducing points", partial(_basis, _inducing)),
    Case("BasisGP with summaries", _received),
    Case("BasisGP.from_summary", _from_summary, excluded=WITHOUT_DATA),
    Case("PartiallyIndependentGP", _partly, _partly_twin),
    Case("MessagePriorGP", _messages, _messages_twin),
    Case("LocalSharedMixture", _mixture, approximate=True, excluded=OF_MODELS),
    Case("RankingEnsemble", _ensemble, excluded=OF_MODELS),
    Case("EarnedPosterior.model", _earned),
)


# ------------------------------------------------------------------ ways of use

Way = Callable[["Case", Callable[[int], Any]], Tensor | None]
GROUPS: dict[str, dict[str, Way]] = {}


def _values(
    acquisition: Any, X: Tensor = TEST_X, *, alone: bool = True, gradients: bool = True
) -> Tensor:
    """Values at two batches of points, after a look at gradients and at one batch alone."""
    torch.manual_seed(0)
    X = X.clone().requires_grad_()
    values: Tensor = acquisition(X)
    assert values.shape == X.shape[:1], f"values have shape {tuple(values.shape)}"
    assert bool(values.isfinite().all()), "a value is not finite"
    if gradients and values.requires_grad:
        (gradient,) = torch.autograd.grad(values.sum(), X)
        assert bool(gradient.isfinite().all()), "a gradient is not finite"
    values = values.detach()
    if alone:
        with torch.no_grad():
            one = acquisition(X[1:].detach())
        torch.testing.assert_close(one, values[1:], rtol=1e-5, atol=1e-7)
    return values


def _sampler(count: int = 8, seed: int = 7) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(Size([count]), seed=seed)


def _of_posterior(model: Model, count: int = 8) -> Any:
    """The sampler that the model's posterior asks for, with a seed."""
    return get_sampler(model.posterior(PENDING), Size([count]), seed=7)


def _acquisition(
    make: Callable[[Any], Any], X: Tensor = TEST_X, *, compared: bool = True, **options: Any
) -> Way:
    """A way: the values of an acquisition function of one output."""

    def way(case: Case, build: Callable[[int], Any]) -> Tensor | None:
        values = _values(make(build(0)), X, **options)
        return values if compared else None

    return way


def _of_two(make: Callable[[Any], Any], X: Tensor = TEST_X, **options: Any) -> Way:
    """A way: the values of an acquisition function of two outputs."""

    def way(case: Case, build: Callable[[int], Any]) -> Tensor:
        return _values(make(case.two(build)), X, **options)

    return way


def _of_normals(make: Callable[[Any], Any], X: Tensor = TEST_X, **options: Any) -> Way:
    """A way: a closed form of two outputs that needs BoTorch's list of GPs."""

    def way(case: Case, build: Callable[[int], Any]) -> Tensor:
        return _values(make(ModelListGP(build(0), build(1))), X, **options)

    return way


CONSTRAINTS = {1: (None, 0.5)}
SAMPLE_CONSTRAINT = [lambda Z: Z[..., -1] - 0.5]
FIRST = LinearMCObjective(torch.tensor([1.0, 0.0], dtype=torch.float64))

GROUPS["analytic"] = {
    "LogExpectedImprovement": _acquisition(lambda m: analytic.LogExpectedImprovement(m, 1.0)),
    "ExpectedImprovement": _acquisition(lambda m: analytic.ExpectedImprovement(m, 1.0)),
    "LogProbabilityOfImprovement": _acquisition(
        lambda m: analytic.LogProbabilityOfImprovement(m, 1.0)
    ),
    "ProbabilityOfImprovement": _acquisition(lambda m: analytic.ProbabilityOfImprovement(m, 1.0)),
    "qAnalyticProbabilityOfImprovement": _acquisition(
        lambda m: analytic.qAnalyticProbabilityOfImprovement(m, 1.0), PAIR_X
    ),
    "UpperConfidenceBound": _acquisition(lambda m: analytic.UpperConfidenceBound(m, 2.0)),
    "PosteriorMean": _acquisition(analytic.PosteriorMean),
    "PosteriorStandardDeviation": _acquisition(analytic.PosteriorStandardDeviation),
    "ScalarizedPosteriorMean": _acquisition(
        lambda m: analytic.ScalarizedPosteriorMean(m, torch.tensor([0.5, 0.5]).double()), PAIR_X
    ),
    "NoisyExpectedImprovement": _acquisition(
        lambda m: analytic.NoisyExpectedImprovement(m, uniform(N, 2), num_fantasies=4)
    ),
    "LogNoisyExpectedImprovement": _acquisition(
        lambda m: analytic.LogNoisyExpectedImprovement(m, uniform(N, 2), num_fantasies=4)
    ),
    "ConstrainedExpectedImprovement": _of_two(
        lambda m: analytic.ConstrainedExpectedImprovement(m, 1.0, 0, CONSTRAINTS)
    ),
    "LogConstrainedExpectedImprovement": _of_two(
        lambda m: analytic.LogConstrainedExpectedImprovement(m, 1.0, 0, CONSTRAINTS)
    ),
    "LogProbabilityOfFeasibility": _of_two(
        lambda m: analytic.LogProbabilityOfFeasibility(m, CONSTRAINTS)
    ),
}


def _monte_carlo(kind: type, *args: Any, **options: Any) -> Way:
    """With two candidates, pending points and a constraint on samples."""
    return _acquisition(
        lambda m: kind(m, *args, sampler=_of_posterior(m), X_pending=PENDING, **options), PAIR_X
    )


GROUPS["Monte Carlo"] = {
    "qLogExpectedImprovement": _monte_carlo(logei.qLogExpectedImprovement, 1.0),
    "qExpectedImprovement": _monte_carlo(monte_carlo.qExpectedImprovement, 1.0),
    "qLogNoisyExpectedImprovement": _monte_carlo(
        logei.qLogNoisyExpectedImprovement, uniform(N, 2), prune_baseline=False, cache_root=False
    ),
    "qNoisyExpectedImprovement": _monte_carlo(
        monte_carlo.qNoisyExpectedImprovement, uniform(N, 2), prune_baseline=True, cache_root=False
    ),
    "qLogProbabilityOfFeasibility": _monte_carlo(
        logei.qLogProbabilityOfFeasibility, SAMPLE_CONSTRAINT
    ),
    "qProbabilityOfImprovement": _monte_carlo(monte_carlo.qProbabilityOfImprovement, 1.0),
    "qSimpleRegret": _monte_carlo(monte_carlo.qSimpleRegret),
    "qUpperConfidenceBound": _monte_carlo(monte_carlo.qUpperConfidenceBound, 2.0),
    "qLowerConfidenceBound": _monte_carlo(monte_carlo.qLowerConfidenceBound, 2.0),
    "qPosteriorStandardDeviation": _monte_carlo(monte_carlo.qPosteriorStandardDeviation),
    "constrained qLogNoisyExpectedImprovement": _of_two(
        lambda m: logei.qLogNoisyExpectedImprovement(
            m,
            uniform(N, 2),
            sampler=_of_posterior(m),
            objective=FIRST,
            constraints=SAMPLE_CONSTRAINT,
            cache_root=False,
        ),
        PAIR_X,
    ),
}


def _cost() -> InverseCostWeightedUtility:
    return InverseCostWeightedUtility(AffineFidelityCostModel({1: 1.0}, fixed_cost=1.0))


def _to_target(X: Tensor) -> Tensor:
    """The last input is a fidelity, and 1 the target."""
    return torch.cat([X[..., :1], torch.ones_like(X[..., 1:])], dim=-1)


FANTASIES = uniform(2, 4, 2, seed=15)  # one candidate and three fantasies' solutions
LOOKAHEAD = uniform(2, 1 + 2 + 2, 2, seed=16)

GROUPS["look-ahead"] = {
    "qKnowledgeGradient": _acquisition(
        lambda m: qKnowledgeGradient(m, num_fantasies=None, sampler=_of_posterior(m, 3)), FANTASIES
    ),
    "qMultiFidelityKnowledgeGradient": _acquisition(
        lambda m: qMultiFidelityKnowledgeGradient(
            m,
            num_fantasies=None,
            sampler=_of_posterior(m, 3),
            current_value=torch.tensor(0.0).double(),
            cost_aware_utility=_cost(),
            project=_to_target,
        ),
        FANTASIES,
        alone=False,
    ),
    "qMultiStepLookahead": _acquisition(
        lambda m: qMultiStepLookahead(
            m, [1, 1], samplers=[_of_posterior(m, 2), _of_posterior(m, 1)]
        ),
        LOOKAHEAD,
    ),
    "qHypervolumeKnowledgeGradient": _of_two(
        lambda m: qHypervolumeKnowledgeGradient(m, REFERENCE_POINT, num_fantasies=2, num_pareto=2),
        uniform(2, 5, 2, seed=17),
        alone=False,
    ),
    "qMultiFidelityHypervolumeKnowledgeGradient": _of_two(
        lambda m: qMultiFidelityHypervolumeKnowledgeGradient(
            m,
            REFERENCE_POINT,
            {1: 1.0},
            num_fantasies=2,
            num_pareto=2,
            current_value=torch.tensor(0.0).double(),
            cost_aware_utility=_cost(),
            project=_to_target,
        ),
        uniform(2, 5, 2, seed=17),
        alone=False,
    ),
}


AT_TARGET = torch.cat([TEST_X[:1], _to_target(TEST_X[1:])])  # one of them at the target fidelity


def _entropy(kind: type, X: Tensor = TEST_X, **options: Any) -> Way:
    return _acquisition(lambda m: _seeded(kind, m, CANDIDATES, **options), X, alone=False)


def _seeded(kind: type, *args: Any, **options: Any) -> Any:
    """What draws from PyTorch's global generator at construction."""
    torch.manual_seed(0)
    return kind(*args, **options)


OPTIMA = CANDIDATES[:3], torch.full((3, 1), 2.5, dtype=torch.float64)


def _cells() -> Tensor:
    fronts = torch.tensor([[[2.0, 1.0], [1.0, 2.0]]], dtype=torch.float64)
    boxes = DominatedPartitioning(ref_point=REFERENCE_POINT, Y=fronts[0]).hypercell_bounds
    return boxes.unsqueeze(0)


PARETO = CANDIDATES[:2].unsqueeze(0), torch.tensor([[[2.0, 1.0], [1.0, 2.0]]], dtype=torch.float64)

GROUPS["entropy and active learning"] = {
    "qMaxValueEntropy": _entropy(qMaxValueEntropy),
    "qMaxValueEntropy, pending": _entropy(qMaxValueEntropy, X_pending=PENDING, num_fantasies=4),
    "qLowerBoundMaxValueEntropy (GIBBON)": _entropy(qLowerBoundMaxValueEntropy),
    "qLowerBoundMaxValueEntropy, pending": _entropy(qLowerBoundMaxValueEntropy, X_pending=PENDING),
    "qMultiFidelityMaxValueEntropy": _entropy(
        qMultiFidelityMaxValueEntropy, AT_TARGET, cost_aware_utility=_cost(), project=_to_target
    ),
    "qMultiFidelityLowerBoundMaxValueEntropy": _entropy(
        qMultiFidelityLowerBoundMaxValueEntropy,
        AT_TARGET,
        cost_aware_utility=_cost(),
        project=_to_target,
    ),
    "qJointEntropySearch": _acquisition(
        lambda m: qJointEntropySearch(m, *OPTIMA, condition_noiseless=False), PAIR_X
    ),
    # GPyTorch conditions a batch's mean as if the noise were not given: nothing to compare with.
    "qJointEntropySearch, noiseless, pending, Monte Carlo": _acquisition(
        lambda m: _seeded(qJointEntropySearch, m, *OPTIMA, estimation_type="MC", X_pending=PENDING),
        alone=False,
        compared=False,
    ),
    "qPredictiveEntropySearch": _acquisition(
        lambda m: qPredictiveEntropySearch(m, CANDIDATES[:3], max_ep_iterations=20), alone=False
    ),
    "qBayesianActiveLearningByDisagreement": _acquisition(qBayesianActiveLearningByDisagreement),
    "qNegIntegratedPosteriorVariance": _acquisition(
        lambda m: qNegIntegratedPosteriorVariance(m, CANDIDATES, X_pending=PENDING), PAIR_X
    ),
    "PairwiseMCPosteriorVariance": _acquisition(
        lambda m: PairwiseMCPosteriorVariance(
            m, LinearMCObjective(torch.ones(1).double()), sampler=_of_posterior(m)
        ),
        PAIR_X,
    ),
    "AnalyticExpectedUtilityOfBestOption": _acquisition(
        lambda m: AnalyticExpectedUtilityOfBestOption(m, _identity()), PAIR_X
    ),
    "qExpectedUtilityOfBestOption": _acquisition(
        lambda m: qExpectedUtilityOfBestOption(m, _identity(), sampler=_of_posterior(m)), PAIR_X
    ),
    "PairwiseBayesianActiveLearningByDisagreement": _acquisition(
        lambda m: PairwiseBayesianActiveLearningByDisagreement(m, _identity(), num_samples=16),
        PAIR_X,
        alone=False,
    ),
}


def _identity() -> GenericDeterministicModel:
    return GenericDeterministicModel(lambda X: X, num_outputs=2)


def _partition() -> FastNondominatedPartitioning:
    return FastNondominatedPartitioning(ref_point=REFERENCE_POINT, Y=torch.zeros(1, 2).double())


GROUPS["several objectives"] = {
    "ExpectedHypervolumeImprovement": _of_two(
        lambda m: mo_analytic.ExpectedHypervolumeImprovement(
            m, REFERENCE_POINT.tolist(), _partition()
        )
    ),
    "qExpectedHypervolumeImprovement": _of_two(
        lambda m: mo_monte_carlo.qExpectedHypervolumeImprovement(
            m, REFERENCE_POINT, _partition(), sampler=_of_posterior(m), X_pending=PENDING
        ),
        PAIR_X,
    ),
    "qLogExpectedHypervolumeImprovement": _of_two(
        lambda m: mo_logei.qLogExpectedHypervolumeImprovement(
            m, REFERENCE_POINT, _partition(), sampler=_of_posterior(m), X_pending=PENDING
        ),
        PAIR_X,
    ),
    "qNoisyExpectedHypervolumeImprovement": _of_two(
        lambda m: mo_monte_carlo.qNoisyExpectedHypervolumeImprovement(
            m, REFERENCE_POINT, uniform(N, 2), sampler=_of_posterior(m), prune_baseline=True
        ),
        PAIR_X,
    ),
    "qLogNoisyExpectedHypervolumeImprovement": _of_two(
        lambda m: mo_logei.qLogNoisyExpectedHypervolumeImprovement(
            m, REFERENCE_POINT, uniform(N, 2), sampler=_of_posterior(m), X_pending=PENDING
        ),
        PAIR_X,
    ),
    "qLogNParEGO": _of_two(
        lambda m: qLogNParEGO(
            m,
            uniform(N, 2),
            scalarization_weights=torch.tensor([0.4, 0.6]).double(),
            sampler=_of_posterior(m),
            cache_root=False,
        ),
        PAIR_X,
    ),
    "MOMF": _of_two(
        lambda m: MOMF(m, REFERENCE_POINT, _partition(), sampler=_of_posterior(m)), PAIR_X
    ),
    "qLowerBoundMultiObjectiveMaxValueEntropySearch": _of_normals(
        lambda m: qLowerBoundMultiObjectiveMaxValueEntropySearch(m, _cells()), PAIR_X
    ),
    "qLowerBoundMultiObjectiveJointEntropySearch": _of_normals(
        lambda m: qLowerBoundMultiObjectiveJointEntropySearch(m, *PARETO, _cells()), PAIR_X
    ),
    # Its gradients may be NaN with a SingleTaskGP as well.
    "qMultiObjectivePredictiveEntropySearch": _of_normals(
        lambda m: qMultiObjectivePredictiveEntropySearch(m, PARETO[0], max_ep_iterations=20),
        alone=False,
        gradients=False,
    ),
    "MultiOutputPosteriorMean": lambda case, build: _per_output(
        MultiOutputPosteriorMean(case.two(build))
    ),
    "MultiOutputAcquisitionFunctionWrapper": lambda case, build: _per_output(
        MultiOutputAcquisitionFunctionWrapper(
            [analytic.PosteriorMean(build(0)), analytic.UpperConfidenceBound(build(1), 2.0)]
        )
    ),
}


def _per_output(acquisition: Any) -> Tensor:
    values: Tensor = acquisition(TEST_X)
    assert values.shape == (2, 2)
    assert bool(values.isfinite().all())
    return values.detach()


class _Flat(torch.nn.Module):
    def forward(self, X: Tensor) -> Tensor:
        return X.square().sum(dim=-1)


GROUPS["wrappers"] = {
    "FixedFeatureAcquisitionFunction": _acquisition(
        lambda m: FixedFeatureAcquisitionFunction(
            analytic.UpperConfidenceBound(m, 2.0), 2, [1], [0.4]
        ),
        TEST_X[..., :1],
    ),
    "ProjectedAcquisitionFunction": _acquisition(
        lambda m: ProjectedAcquisitionFunction(analytic.UpperConfidenceBound(m, 2.0), _to_target)
    ),
    "PenalizedAcquisitionFunction": _acquisition(
        lambda m: PenalizedAcquisitionFunction(
            analytic.UpperConfidenceBound(m, 2.0), L2Penalty(torch.zeros(2).double()), 0.1
        )
    ),
    "PriorGuidedAcquisitionFunction": _acquisition(
        lambda m: PriorGuidedAcquisitionFunction(analytic.ExpectedImprovement(m, 1.0), _Flat())
    ),
    "ProximalAcquisitionFunction": _acquisition(
        lambda m: ProximalAcquisitionFunction(
            analytic.ExpectedImprovement(m, 1.0), torch.ones(2).double()
        )
    ),
}


# ------------------------------------------------------------------ draws


def _path_values(path: Any) -> Tensor:
    X = TEST_X.squeeze(-2)
    values: Tensor = path(X)
    assert values.shape == (400, 2)
    assert bool(values.isfinite().all())
    return values.detach()


def _law_of_paths(case: Case, build: Callable[[int], Any]) -> None:
    """Mean and covariance of drawn functions are the posterior's: five standard errors of 400."""
    torch.manual_seed(0)
    model = build(0)
    values = _path_values(draw_matheron_paths(model, Size([400])))
    posterior = model.posterior(TEST_X.squeeze(-2))
    error = (values.mean(dim=0) - posterior.mean.squeeze(-1)) / (
        posterior.variance.squeeze(-1) / 400
    ).sqrt()
    assert float(error.abs().max()) < 5
    spread = values.var(dim=0) / posterior.variance.squeeze(-1)
    # The kurtosis of a mixture is at most that of its widest component: a wide margin.
    assert float((spread - 1).abs().max()) < 5 * math.sqrt(2 / 400) * (2 if case.approximate else 1)


def _thompson(case: Case, build: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    _values(PathwiseThompsonSampling(build(0)))


def _thompson_of_two(case: Case, build: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    _values(PathwiseThompsonSampling(case.two(build), objective=LinearMCObjective(weights)))


def _best_of_paths(case: Case, build: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    paths = draw_matheron_paths(build(0), Size([2]))
    X, f = optimize_posterior_samples(paths, UNIT, raw_samples=16, num_restarts=2)
    assert X.shape[0] == 2
    assert bool((f.isfinite()).all())


def _chosen(strategy: Any, count: int = 2) -> None:
    torch.manual_seed(0)
    found = strategy(CANDIDATES, num_samples=count)
    assert found.shape == (count, 2)
    assert all(bool((row == CANDIDATES).all(dim=-1).any()) for row in found)


GROUPS["draws"] = {
    "draw_matheron_paths": _law_of_paths,
    "PathwiseThompsonSampling": _thompson,
    "PathwiseThompsonSampling of two outputs": _thompson_of_two,
    "optimize_posterior_samples": _best_of_paths,
    "MatheronPathModel": lambda case, build: _path_model(build(0)),
    "MaxPosteriorSampling": lambda case, build: _chosen(MaxPosteriorSampling(build(0))),
    "ConstrainedMaxPosteriorSampling": lambda case, build: _chosen(
        ConstrainedMaxPosteriorSampling(build(0), build(1))
    ),
    "BoltzmannSampling": lambda case, build: _chosen(
        BoltzmannSampling(analytic.PosteriorMean(build(0)))
    ),
    "posterior.rsample": lambda case, build: _law_of_samples(build(0).posterior(PENDING)),
}


def _path_model(model: Model) -> None:
    torch.manual_seed(0)
    assert MatheronPathModel(model).posterior(TEST_X).mean.shape == (2, 1, 1)


def _law_of_samples(posterior: Posterior) -> None:
    torch.manual_seed(0)
    samples = posterior.rsample(Size([400])).detach()
    error = (samples.mean(dim=0) - posterior.mean) / (posterior.variance / 400).sqrt()
    assert float(error.abs().max()) < 5


# ------------------------------------------------------------------ optimisers


def _optimised(function: Callable[..., Any], q: int = 1, **options: Any) -> Way:
    """The candidates of an optimiser of `LogExpectedImprovement`, or of its batch form."""

    def way(case: Case, build: Callable[[int], Any]) -> None:
        torch.manual_seed(0)
        model = build(0)
        acquisition: Any = analytic.LogExpectedImprovement(model, 1.0)
        if q > 1:
            acquisition = logei.qLogExpectedImprovement(model, 1.0, sampler=_of_posterior(model))
        found, value = function(acquisition, UNIT, q=q, **options)
        assert found.shape == (q, 2)
        assert bool(((found >= 0) & (found <= 1)).all())
        assert bool(torch.as_tensor(value).isfinite().all())

    return way


def _discrete(function: Callable[..., Any], **options: Any) -> Way:
    def way(case: Case, build: Callable[[int], Any]) -> None:
        torch.manual_seed(0)
        acquisition = analytic.LogExpectedImprovement(build(0), 1.0)
        found, value = function(acquisition, q=1, **options)
        assert found.shape == (1, 2)
        assert bool(value.isfinite().all())

    return way


def _homotopy(case: Case, build: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    penalty = L2Penalty(torch.zeros(2).double())
    acquisition = PenalizedAcquisitionFunction(
        analytic.UpperConfidenceBound(build(0), 2.0), penalty, torch.tensor(1.0).double()
    )
    schedule = FixedHomotopySchedule([0.1, 0.01])
    homotopy = Homotopy([HomotopyParameter(acquisition.regularization_parameter, schedule)])
    found, _ = optimize_acqf_homotopy(acquisition, UNIT, q=1, homotopy=homotopy, **QUICK)
    assert found.shape == (1, 2)


def _listed(case: Case, build: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    model = build(0)
    functions = [
        logei.qLogNoisyExpectedImprovement(model, uniform(N, 2), sampler=_of_posterior(model))
        for _ in range(2)
    ]
    found, _ = optimize_acqf_list(functions, UNIT, **QUICK)
    assert found.shape == (2, 2)


def _one_shot(case: Case, build: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    acquisition = qKnowledgeGradient(build(0), num_fantasies=2)
    found, value = optimize_acqf(acquisition, UNIT, q=1, **QUICK)
    assert found.shape == (1, 2)
    assert bool(value.isfinite().all())


def _around_best(case: Case, build: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    acquisition = analytic.UpperConfidenceBound(build(0), 2.0)
    options = {"sample_around_best": True}
    start = gen_batch_initial_conditions(acquisition, UNIT, 1, 2, 4, options=options)
    assert start.shape == (2, 1, 2)


SUM_ABOVE = [(torch.tensor([0, 1]), torch.ones(2).double(), 0.5)]

GROUPS["optimisers"] = {
    "optimize_acqf": _optimised(optimize_acqf, **QUICK),
    "optimize_acqf, q = 2": _optimised(optimize_acqf, 2, **QUICK),
    "optimize_acqf, q = 2, one by one": _optimised(optimize_acqf, 2, sequential=True, **QUICK),
    "optimize_acqf, constrained": _optimised(
        optimize_acqf,
        inequality_constraints=SUM_ABOVE,
        num_restarts=1,
        raw_samples=4,
        options={"maxiter": 2, "n_burnin": 10, "n_thinning": 1},
    ),
    "optimize_acqf, a fixed feature": _optimised(optimize_acqf, fixed_features={0: 0.5}, **QUICK),
    "optimize_acqf with gen_candidates_torch": _optimised(
        optimize_acqf, gen_candidates=gen_candidates_torch, **QUICK
    ),
    "optimize_acqf of a knowledge gradient": _one_shot,
    "optimize_acqf_cyclic": _optimised(
        optimize_acqf_cyclic, 2, cyclic_options={"maxiter": 2}, **QUICK
    ),
    "optimize_acqf_list": _listed,
    "optimize_acqf_mixed": _optimised(
        optimize_acqf_mixed, fixed_features_list=[{0: 0.0}, {0: 1.0}], **QUICK
    ),
    "optimize_acqf_mixed_alternating": _optimised(
        optimize_acqf_mixed_alternating,
        discrete_dims={0: [0.0, 0.5, 1.0]},
        num_restarts=1,
        raw_samples=4,
        options={"maxiter_alternating": 1, "maxiter_continuous": 2, "maxiter_discrete": 1},
    ),
    "optimize_acqf_discrete": _discrete(optimize_acqf_discrete, choices=CANDIDATES),
    "optimize_acqf_discrete_local_search": _discrete(
        optimize_acqf_discrete_local_search,
        discrete_choices=[torch.linspace(0, 1, 4).double()] * 2,
        num_restarts=1,
        raw_samples=4,
    ),
    "optimize_acqf_homotopy": _homotopy,
    "initial conditions around the best": _around_best,
}


# ------------------------------------------------------------------ fitting, updating, keeping


def _fitted(case: Case, build: Callable[[int], Any]) -> None:
    model = build(0)
    model.requires_grad_(True)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    options = {"options": {"maxiter": 3}}
    assert fit_gpytorch_mll(mll, optimizer_kwargs=options) is mll
    assert bool(model.posterior(TEST_X).mean.isfinite().all())


def _left_out(case: Case, build: Callable[[int], Any]) -> Tensor:
    """The efficient form scores the model that BoTorch's posterior without the point is of."""
    model = build(0)
    posterior = loo_cv(model.eval()).posterior
    X, _ = _data(0)
    model.set_train_data(X[1:], model.train_targets[1:], strict=False)
    expected = model.posterior(X[:1], observation_noise=True)
    torch.testing.assert_close(posterior.mean[0], expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(posterior.variance[0], expected.variance, rtol=1e-4, atol=1e-5)
    return torch.stack([posterior.mean, posterior.variance]).detach()


def _cross_validated(case: Case, build: Callable[[int], Any]) -> None:
    model = build(0)
    folds = gen_loo_cv_folds(*_data(0))
    options: dict[str, Any] = {}
    if isinstance(model, (BasisGP, MessagePriorGP)):
        options = {"feature_map": _fourier()}
    if isinstance(model, MessagePriorGP):
        options["weights"] = generator(0, "messages").normal(5, 40)
    batch_cross_validation(
        type(model),
        ExactMarginalLogLikelihood,
        folds,
        fit_args={"optimizer_kwargs": {"options": {"maxiter": 1}}},
        model_init_kwargs=options,
    )


def _same(model: Model, other: Model) -> None:
    before, after = model.posterior(PENDING), other.posterior(PENDING)
    torch.testing.assert_close(after.mean, before.mean)
    torch.testing.assert_close(after.variance, before.variance)


def _conditioned(case: Case, build: Callable[[int], Any]) -> Tensor:
    model = build(0)
    model.posterior(PENDING)
    after = model.condition_on_observations(PENDING, _truth(PENDING))
    posterior = after.posterior(TEST_X)
    return torch.stack([posterior.mean, posterior.variance]).detach()


def _fantasised(case: Case, build: Callable[[int], Any]) -> Tensor:
    model = build(0)
    fantasy = model.fantasize(PENDING, _of_posterior(model, 3))
    posterior = fantasy.posterior(TEST_X.unsqueeze(-3))
    return torch.stack([posterior.mean, posterior.variance]).detach()


def _copied(case: Case, build: Callable[[int], Any]) -> None:
    model = build(0)
    model.posterior(TEST_X)
    _same(model, copy.deepcopy(model))


def _pickled(case: Case, build: Callable[[int], Any]) -> None:
    model = build(0)
    model.posterior(TEST_X)
    _same(model, pickle.loads(pickle.dumps(model)))


def _copied_acquisition(case: Case, build: Callable[[int], Any]) -> None:
    """An evaluated function holds samples: `optimize_acqf` copies it where it is changed."""
    model = build(0)
    acquisition = logei.qLogNoisyExpectedImprovement(
        model, uniform(N, 2), sampler=_of_posterior(model), prune_baseline=True
    )
    before = acquisition(PAIR_X).detach()
    again = copy.deepcopy(acquisition)
    torch.testing.assert_close(again(PAIR_X).detach(), before)


def _state(case: Case, build: Callable[[int], Any]) -> None:
    """By way of a file, into a model that was built with other hyperparameters."""
    model, other = build(0), build(0)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    for name, value in model.named_buffers():
        if name in ("local_weight", "_target_weight", "agent_weights"):
            value.mul_(0.9)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    _same(model.eval(), other.eval())


def _subset(case: Case, build: Callable[[int], Any]) -> None:
    model = build(0)
    _same(model, model.subset_output([0]))
    both = case.two(build)
    _same(build(1), both.subset_output([1]))


def _scalarised(case: Case, build: Callable[[int], Any]) -> Tensor:
    model = build(0)
    transform = ScalarizedPosteriorTransform(torch.tensor([-2.0], dtype=torch.float64), 1.0)
    before = model.posterior(PENDING)
    after = model.posterior(PENDING, posterior_transform=transform)
    torch.testing.assert_close(after.mean, 1 - 2 * before.mean)
    torch.testing.assert_close(after.variance, 4 * before.variance)
    return after.mean.detach()


def _trust_region(case: Case, build: Callable[[int], Any]) -> None:
    """TuRBO's loop scales its box by the length scales."""
    model = build(0)
    kernel = model.covar_module
    kernel = getattr(kernel, "base_kernel", kernel)
    scales: Tensor = kernel.lengthscale.squeeze().detach()
    assert scales.shape == (2,)
    assert bool((scales > 0).all())


GROUPS["fitting, updating, keeping"] = {
    "fit_gpytorch_mll": _fitted,
    "loo_cv": _left_out,
    "batch_cross_validation": _cross_validated,
    "condition_on_observations": _conditioned,
    "fantasize": _fantasised,
    "deepcopy": _copied,
    "deepcopy of an evaluated qLogNoisyExpectedImprovement": _copied_acquisition,
    "pickle": _pickled,
    "state_dict": _state,
    "subset_output": _subset,
    "posterior_transform": _scalarised,
    "covar_module.lengthscale": _trust_region,
}


# ------------------------------------------------------------------ the matrix

REFERENCE = Case("SingleTaskGP", lambda output: SingleTaskGP(*_data(output)).eval())


@dataclass(frozen=True)
class Cell:
    """What became of a model in one way of use.

    Attributes:
        kind: ``works``, ``refused``, ``excluded`` (BoTorch does not offer it) or ``fails``.
        words: Why not; empty if it works.
    """

    kind: str
    words: str = ""


def cell(case: Case, way: Way) -> Cell:
    """Run one way with one model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            found = way(case, case.make)
            if case.twin is not None and found is not None:
                torch.manual_seed(0)
                expected = way(case, case.twin)
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        except BotorchError as error:
            return Cell("refused", " ".join(str(error).replace("`", "").split()))
        except Exception as error:
            return Cell("fails", f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Cell("works")


def ways() -> dict[str, Way]:
    """Every way of use by its name."""
    return {name: way for group in GROUPS.values() for name, way in group.items()}


@cache
def _alien() -> frozenset[str]:
    """What BoTorch does not do with its own model either."""
    return frozenset(name for name, way in ways().items() if cell(REFERENCE, way).kind != "works")


def matrix(cases: Iterable[Case] = CASES) -> dict[tuple[str, str], Cell]:
    """Every cell, by the names of model and way."""
    found = {}
    for case in cases:
        for name, way in ways().items():
            if name in case.excluded:
                found[case.name, name] = Cell("excluded", case.excluded[name])
            elif name in _alien():
                words = "BoTorch has it for models of another kind, not for SingleTaskGP either"
                found[case.name, name] = Cell("excluded", words)
            else:
                found[case.name, name] = cell(case, way)
    return found


def page(cells: Mapping[tuple[str, str], Cell]) -> str:
    """The page of the documentation; `ValueError` if a cell fails."""
    failed = [f"{m}, {w}: {c.words}" for (m, w), c in cells.items() if c.kind == "fails"]
    if failed:
        raise ValueError("Cells fail:\n" + "\n".join(failed))
    notes: list[str] = []
    parts = [HEAD.format(models=len(CASES), ways=len(ways()), **_counts(cells))]
    for group, members in GROUPS.items():
        parts.append(f"{group[0].upper()}{group[1:]}\n{'-' * len(group)}\n\n" + TABLE)
        parts += [f"   * - {'way of use' if group else ''}\n", *map(_head, CASES)]
        for name in members:
            parts.append(f"   * - ``{name}``\n")
            for case in CASES:
                parts.append(f"     - {_mark(case, name, cells[case.name, name], notes)}\n")
        parts.append("\n")
    parts.append("Why not\n-------\n\n")
    parts += [f"{number}. {words}\n" for number, words in enumerate(notes, 1)]
    return "".join(parts)


HEAD = """Conformance with BoTorch
========================

Every model of the package in every way in which BoTorch {version} uses one: {models} models,
{ways} ways. ``python -m test.contracts.conformance`` writes this page, and a test compares it with
what it finds.

**yes**: values are finite, have finite gradients to the points, are the same one by one as in a
batch, and, where BoTorch has a model of the same law, are those that BoTorch computes with it:
{works} cells. **normal**: the same, and a closed form sees the normal of the mixture's mean and
covariance, not the mixture. A number is an error that says why, below: {refused} cells. A dash is
what BoTorch offers to models of another kind only: {excluded} cells.

"""
TABLE = ".. list-table::\n   :header-rows: 1\n   :class: conformance\n\n"
NORMAL = ("analytic", "entropy and active learning", "wrappers")  # closed forms, or most of them
SAMPLED = ("qNegIntegratedPosteriorVariance", "PairwiseMCPosteriorVariance")


def _counts(cells: Mapping[tuple[str, str], Cell]) -> dict[str, Any]:
    kinds = [c.kind for c in cells.values()]
    return {
        "version": ".".join(botorch.__version__.split(".")[:2]),
        **{kind: kinds.count(kind) for kind in ("works", "refused", "excluded")},
    }


def _head(case: Case) -> str:
    return f"     - {case.name}\n"


def _mark(case: Case, name: str, found: Cell, notes: list[str]) -> str:
    if found.kind == "excluded":
        return "–"
    if found.kind == "refused":
        if found.words not in notes:
            notes.append(found.words)
        return str(notes.index(found.words) + 1)
    closed = any(name in GROUPS[group] for group in NORMAL) and name not in SAMPLED
    return "normal" if case.approximate and closed else "yes"


def main() -> None:
    """Write the page, or show some cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs=2, metavar=("MODEL", "WAY"), help="parts of their names")
    parser.add_argument("--times", action="store_true", help="seconds of CPU per way")
    options = parser.parse_args()
    if options.only is None:
        PAGE.write_text(page(matrix()))
        return
    model, use = options.only
    for case in CASES:
        for name, way in ways().items():
            if model in case.name and use in name:
                start = time.process_time()
                found = cell(case, way)
                spent = time.process_time() - start
                print(f"{case.name} | {name} | {found.kind} | {spent:.2f} s | {found.words}")


if __name__ == "__main__":
    main()
