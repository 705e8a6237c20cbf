r"""Thompson sampling on a drawn function: the function's value is the acquisition value.

In federated Thompson sampling [Dai2020FTS]_ an agent maximises either a draw of its own posterior
(`models.draw_path`) or a weight vector that another agent sent (`weight_path`). Both are paths, and
to the optimiser they are the same thing. Unlike BoTorch's `PathwiseThompsonSampling`, which draws
lazily from the global generator, the draw is made by the caller and stands fixed from the start.

.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models.deterministic import DeterministicModel
from botorch.sampling.pathwise.paths import GeneralizedLinearPath, SamplePath
from botorch.utils.transforms import t_batch_mode_transform
from gpytorch.means import ConstantMean
from torch import Size, Tensor

from botorch_fed.models import FeatureMap
from botorch_fed.models.numerics import as_double, check_finite


class ThompsonSampling(AcquisitionFunction):
    r"""The value of drawn functions, :math:`\sum_{j \le q} f_j(x_j)`.

    The sum is separable: maximising it jointly maximises every draw, so `q` points are `q`
    Thompson samples. For `q = 1` the path has no sample shape (or `(1,)`), for `q > 1` its sample
    shape is `(q,)`. Pending points change nothing: draws do not depend on them.

    Args:
        path: The drawn functions, any BoTorch path of one output and without batch dimensions:
            of `draw_path`, `draw_matheron_paths` or `weight_path`.

    Example:
        >>> path = draw_path(SingleTaskGP(train_X, train_Y), generator=generator(0, t, "own"))
        >>> X_next, _ = optimize_acqf(ThompsonSampling(path), bounds, q=1, …)
    """

    def __init__(self, path: SamplePath) -> None:
        if not isinstance(path, SamplePath):
            raise InputDataError(
                f"path must be a BoTorch SamplePath, got {type(path).__name__}: draw one by "
                "draw_path(model), or make one of received weights by weight_path."
            )
        super().__init__(model=PathModel(path))
        self.set_X_pending(None)
        self._sample_shape: Size | None = None

    @property
    def path(self) -> SamplePath:
        """The drawn functions."""
        path: Any = self.model.path
        return path

    @t_batch_mode_transform()  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        r"""Values of the draws, summed over points.

        Args:
            X: A `batch_shape x q x d` tensor of points.

        Returns:
            A `batch_shape` tensor.
        """
        X = X.double()
        *batch_shape, q, d = X.shape
        if self._draws(X) == ():
            if q == 1:
                return self.path(X.reshape(-1, d)).reshape(batch_shape)  # one kernel matrix
        elif self._draws(X) == (q,):
            # Draw j sees the j-th points only: q x n x d to q x n.
            values = self.path(X.reshape(-1, q, d).transpose(0, 1))
            return values.sum(dim=0).reshape(batch_shape)
        raise BotorchTensorDimensionError(
            f"Thompson sampling at q = {q} points needs {q} draws, the path has sample shape "
            f"{tuple(self._draws(X))}: draw it with sample_shape=torch.Size([{q}]), and optimise "
            "the points jointly (sequential=False)."
        )

    def _draws(self, X: Tensor) -> Size:
        """The sample shape of the path, which only its values tell."""
        if self._sample_shape is None:
            with torch.no_grad():
                self._sample_shape = self.path(X.reshape(-1, X.shape[-1])[:1]).shape[:-1]
        return self._sample_shape


class PathModel(DeterministicModel):
    """A path as a BoTorch model; draws come first, like batch dimensions."""

    def __init__(self, path: SamplePath) -> None:
        super().__init__()
        self.path = path
        self._num_outputs = 1

    def forward(self, X: Tensor) -> Tensor:
        return self.path(X).unsqueeze(-1)


def weight_path(feature_map: FeatureMap, weights: Tensor, *, mean: float = 0.0) -> SamplePath:
    r"""The function :math:`x \mapsto \mu + \phi(x)^\top w` of received weights, as a path.

    Args:
        feature_map: The shared basis.
        weights: A `sample_shape x M` tensor of weight vectors, the messages of FTS.
        mean: The public constant mean :math:`\mu`, if the agents agreed on one.

    Returns:
        A path: `batch_shape x n x d` points to `… x n` values.
    """
    weights = as_double(weights, "weights")
    check_finite(weights, "weights")
    if weights.dim() == 0 or weights.shape[-1] != feature_map.num_features:
        raise BotorchTensorDimensionError(
            f"weights must be `sample_shape x {feature_map.num_features}` for this feature map, "
            f"got shape {tuple(weights.shape)}: was the message made over another basis?"
        )
    constant = ConstantMean().double()
    constant.raw_constant.data.fill_(mean)
    constant.requires_grad_(False)
    features: Any = feature_map  # to BoTorch, a map of its own kind
    return GeneralizedLinearPath(features, weights.detach(), bias_module=constant)
