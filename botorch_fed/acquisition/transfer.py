r"""`TransferAcquisition`: the transfer acquisition function (TAF), a baseline of federated BO.

The own model contributes expected improvement, every other agent the improvement that its mean
predicts over its own incumbent [Wistuba2018]_:

.. math:: a(x) = \frac{w_0\, \mathrm{EI}(x) + \sum_i w_i \max(0, \mu_i(x) - \mu_i^+)}
                      {w_0 + \sum_i w_i}.

An agent's weight falls with the fraction :math:`\tau_i` of pairs of the target's observations that
its mean orders wrongly, :math:`w_i = \tfrac34 (1 - (\tau_i/\rho)^2)_+`; the target has
:math:`\tau = 0`.

Privacy: none. Beside its `Summary` every agent sends its incumbent, the best value it has observed.

References:
    * [Wistuba2018]_ M. Wistuba, N. Schilling, L. Schmidt-Thieme. Scalable Gaussian process-based
      transfer surrogates for hyperparameter optimization. Machine Learning 107, 2018.
"""

from __future__ import annotations

import torch
from botorch.acquisition.analytic import AnalyticAcquisitionFunction, LogExpectedImprovement
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models.model import Model
from botorch.utils.transforms import t_batch_mode_transform
from torch import Tensor

from botorch_fed.models import FeatureMap, Summary
from botorch_fed.models.ensemble import agent_posteriors, target_data
from botorch_fed.models.numerics import as_double, check_finite

BANDWIDTH = 0.5  # of the Epanechnikov kernel: a random order gets weight zero


class TransferAcquisition(AnalyticAcquisitionFunction):
    r"""Expected improvement of the own model, averaged with improvements that agents predict.

    For maximisation and `q = 1`. Agents of weight zero cost nothing; the others are evaluated
    together. Weights belong to the model's data at construction; without a pair of observations
    every agent has the weight of the target.

    Args:
        model: The agent's own fitted model: one output, no batch dimensions; a `SingleTaskGP` or
            another `ExactGP`, or a `BasisGP`.
        best_f: The best value the agent observed, on the original scale.
        summaries: All other agents' summaries as one batch: `gram` `N x M x M`, `moment`
            `N x M x 1`.
        feature_map: Their basis, over untransformed points.
        incumbents: An `N` tensor of the best values the agents observed.
        mean: The public constant mean on which the summaries were centred. All outcomes must be on
            one public scale.
        bandwidth: :math:`\rho`: agents with a larger fraction of wrong pairs are left out.

    Example:
        >>> taf = TransferAcquisition(
        ...     model, best_f, summaries=summaries, feature_map=phi, incumbents=incumbents
        ... )
        >>> X_next, _ = optimize_acqf(taf, bounds, q=1, …)
    """

    agent_weights: Tensor
    _weight_means: Tensor
    _thresholds: Tensor

    def __init__(
        self,
        model: Model,
        best_f: float | Tensor,
        *,
        summaries: Summary,
        feature_map: FeatureMap,
        incumbents: Tensor,
        mean: float = 0.0,
        bandwidth: float = BANDWIDTH,
    ) -> None:
        X, y = target_data(model)
        agents = agent_posteriors(summaries, feature_map)
        super().__init__(model=model)
        if not 0 < bandwidth <= 1:
            raise InputDataError(
                f"bandwidth must lie in (0, 1], got {bandwidth}: it bounds the fraction of pairs "
                "that an agent may order wrongly."
            )
        N = agents.chol.shape[0]
        incumbents = as_double(incumbents, "incumbents")
        check_finite(incumbents, "incumbents")
        if incumbents.shape != (N,):
            raise BotorchTensorDimensionError(
                f"incumbents must have shape ({N},), one best value per agent, got "
                f"{tuple(incumbents.shape)}."
            )
        with torch.no_grad():
            weight_means = agents.mean  # N x M
            disorder = _discordant_fraction(weight_means @ feature_map(X).mT, y)
            weights = _epanechnikov(disorder, bandwidth)
        active = weights > 0
        # A float would be rounded to float32.
        self.own = LogExpectedImprovement(model, torch.as_tensor(best_f, dtype=torch.float64))
        self.feature_map = feature_map
        self.target_weight = 0.75  # of distance zero
        self.register_buffer("agent_weights", weights, persistent=False)
        self.register_buffer("_weight_means", weight_means[active], persistent=False)
        self.register_buffer("_thresholds", incumbents[active] - mean, persistent=False)

    @t_batch_mode_transform(expected_q=1)  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        r"""The weighted average of improvements.

        Args:
            X: A `batch_shape x 1 x d` tensor of points.

        Returns:
            A `batch_shape` tensor.
        """
        X = X.double()
        improvement = self.own(X).exp()  # stable where expected improvement underflows
        means = (self.feature_map(X) @ self._weight_means.mT).squeeze(-2)  # batch_shape x N
        predicted = (means - self._thresholds).clamp_min(0)
        weights = self.agent_weights[self.agent_weights > 0]
        total = self.target_weight * improvement + predicted @ weights
        return total / (self.target_weight + weights.sum())


def _discordant_fraction(values: Tensor, y: Tensor) -> Tensor:
    """The fraction of pairs that values `N x n` and observations `n` order differently: `N`."""
    n = y.shape[-1]
    rows, columns = torch.triu_indices(n, n, offset=1)
    wrong = (values[:, rows] < values[:, columns]) ^ (y[rows] < y[columns])
    return wrong.double().sum(dim=-1) / max(len(rows), 1)  # int / int would be float32


def _epanechnikov(distance: Tensor, bandwidth: float) -> Tensor:
    return (0.75 * (1 - (distance / bandwidth).square())).clamp_min(0)
