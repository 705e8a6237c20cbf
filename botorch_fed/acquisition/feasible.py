r"""Acquisition functions of BoTorch for evaluations that can fail.

With :math:`p(x)` the probability of success (`models.feasibility`), an acquisition function
:math:`a` for one point becomes

::

    a logarithm, such as LogExpectedImprovement       a(x) + log p(x)
    never negative, such as ExpectedImprovement       a(x) p(x)
    any other, such as UpperConfidenceBound           b + (a(x) - b) p(x) above b, a(x) below

with :math:`b` the least value of :math:`a` at a successful point, which is the value of a failure.
The attribute `_log` of BoTorch's and other functions marks logarithms.
"""

from __future__ import annotations

from typing import Literal

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.analytic import (
    ConstrainedExpectedImprovement,
    ExpectedImprovement,
    NoisyExpectedImprovement,
    PosteriorStandardDeviation,
    ProbabilityOfImprovement,
)
from botorch.acquisition.monte_carlo import (
    qExpectedImprovement,
    qNoisyExpectedImprovement,
    qProbabilityOfImprovement,
)
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition.mixture import MixtureEI, MixturePI
from botorch_fed.acquisition.transfer import TransferAcquisition
from botorch_fed.models.feasibility import Feasibility

NEVER_NEGATIVE = (
    ConstrainedExpectedImprovement,
    ExpectedImprovement,
    NoisyExpectedImprovement,
    PosteriorStandardDeviation,
    ProbabilityOfImprovement,
    qExpectedImprovement,
    qNoisyExpectedImprovement,
    qProbabilityOfImprovement,
    MixtureEI,
    MixturePI,
    TransferAcquisition,
)


class FeasibleAcquisition(AcquisitionFunction):
    """An acquisition function weighted by the probability of success, for `q = 1`.

    Args:
        acquisition: An acquisition function with one value for each `1 x d` point.
        feasibility: The model of the probability of success.
        X: Successful points, `n x d`, over which the least value :math:`b` is taken.
    """

    def __init__(
        self, acquisition: AcquisitionFunction, feasibility: Feasibility, X: Tensor
    ) -> None:
        super().__init__(model=acquisition.model)
        self.acquisition = acquisition
        self.feasibility = feasibility
        self.kind: Literal["log", "positive", "any"] = "any"
        if acquisition._log:
            self.kind = "log"
        elif isinstance(acquisition, NEVER_NEGATIVE):
            self.kind = "positive"
        self.least = 0.0
        if self.kind == "any" and len(X):
            with torch.no_grad():
                self.least = float(self._value(X.unsqueeze(-2)).min())

    def forward(self, X: Tensor) -> Tensor:
        """Values at `batch_shape x 1 x d` points, `batch_shape`."""
        value, log_probability = self._value(X), self.feasibility(X.squeeze(-2))
        if self.kind == "log":
            return value + log_probability
        above = value - self.least
        weighted = above * log_probability.exp()
        if self.kind == "positive":
            return weighted
        return self.least + torch.where(above > 0, weighted, above)

    def _value(self, X: Tensor) -> Tensor:
        value = self.acquisition(X)
        if value.shape != X.shape[:-2]:
            raise InputDataError(
                f"Expected one value of {type(self.acquisition).__name__} for each of "
                f"{tuple(X.shape[:-2])} points, got shape {tuple(value.shape)}. After failed "
                "evaluations the acquisition function is weighted by the probability of success, "
                "which needs one value for one point (q = 1)."
            )
        return value
