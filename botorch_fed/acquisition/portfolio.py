r"""The first queries against all messages at once.

A message is somebody's guess of their function. With :math:`f_1, \dots, f_N` received and points
`T` tried, the next point is the one that most reduces the others' mean predicted regret,

.. math:: \alpha(x) = \frac1N \sum_n w_n
          \bigl(f_n(x) - \max_{x' \in T} f_n(x')\bigr)_+ :

a greedy portfolio, within 1 - 1/e of the best set of as many points (the objective is monotone and
submodular). It costs no more communication than one Thompson sample per agent.
"""

from __future__ import annotations

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.utils.transforms import t_batch_mode_transform
from torch import Tensor

from botorch_fed.acquisition.thompson import PathModel, weight_path
from botorch_fed.models import FeatureMap
from botorch_fed.models.numerics import as_double, check_finite


class PortfolioImprovement(AcquisitionFunction):
    r"""Mean improvement of the received functions over the points tried so far.

    Args:
        feature_map: The shared basis.
        weights: An `N x M` tensor of received weight vectors.
        tried: An `n x d` tensor of points tried so far; with none, the mean function is maximised.
        agent_weights: An `N` tensor of weights of the agents, 0 or more; default equal.

    Example:
        >>> acquisition = PortfolioImprovement(phi, messages, tried=train_X)
        >>> candidate, _ = optimize_acqf(acquisition, bounds, q=1, …)
    """

    def __init__(
        self,
        feature_map: FeatureMap,
        weights: Tensor,
        *,
        tried: Tensor,
        agent_weights: Tensor | None = None,
    ) -> None:
        weights = as_double(weights, "weights").detach()
        check_finite(weights, "weights")
        if weights.dim() != 2 or weights.shape[-1] != feature_map.num_features or not len(weights):
            raise BotorchTensorDimensionError(
                f"weights must be `N x {feature_map.num_features}` with N > 0 for this feature "
                f"map, got shape {tuple(weights.shape)}."
            )
        super().__init__(model=PathModel(weight_path(feature_map, weights)))
        N = len(weights)
        if agent_weights is None:
            agent_weights = torch.ones(N, dtype=torch.float64)
        if agent_weights.shape != (N,) or not bool((agent_weights >= 0).all()):
            raise InputDataError(
                f"agent_weights must be {N} numbers from 0 on, got shape "
                f"{tuple(agent_weights.shape)}."
            )
        if not float(agent_weights.sum()) > 0:
            raise InputDataError("At least one agent must have a positive weight.")
        self.feature_map = feature_map
        self.register_buffer("weights", weights)
        self.register_buffer("agent_weights", agent_weights.double() / agent_weights.sum())
        best = None
        if len(tried):
            best = (feature_map(as_double(tried, "tried")) @ weights.mT).amax(dim=0)
        self.register_buffer("best", best)

    @t_batch_mode_transform(expected_q=1)  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """Values at `batch_shape x 1 x d` points, a `batch_shape` tensor."""
        values = self.feature_map(X.squeeze(-2).double()) @ self.weights.mT
        gains = values if self.best is None else (values - self.best).clamp_min(0)
        return gains @ self.agent_weights
