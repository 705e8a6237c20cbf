r"""Thompson sampling on a drawn function: the function's value is the acquisition value.

In federated Thompson sampling [Dai2020FTS]_ an agent maximises either a draw of its local posterior
(`models.draw_path`) or a weight vector that another agent sent (`weight_path`). Both are paths with
the same interface. BoTorch's `PathwiseThompsonSampling` draws lazily from the global generator;
here the caller makes the draw.

References:
    * [Dai2020FTS]_ Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
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

from botorch_fed.acquisition.regions import Partition
from botorch_fed.models import FeatureMap
from botorch_fed.models.numerics import as_double, check_finite


class ThompsonSampling(AcquisitionFunction):
    r"""The value of drawn functions, :math:`\sum_{j \le q} f_j(x_j)`.

    The sum is separable: maximising it jointly maximises every draw, so `q` points are `q`
    Thompson samples. For `q = 1` the path has no sample shape (or `(1,)`), for `q > 1` its sample
    shape is `(q,)`. Pending points have no effect: draws do not depend on them.

    Args:
        path: The drawn functions, any BoTorch path of one output and without batch dimensions:
            of `draw_path`, `draw_matheron_paths` or `weight_path`.
        partition: Regions of the unit cube, one for each of `P` functions: the sample shape of
            the path is `(P,)`, and the value at a point is that of the function of its region.
            For `q = 1`. The value is discontinuous between regions: maximise it by
            `maximize(…, partition=partition)`.

    Example:
        >>> path = draw_path(SingleTaskGP(train_X, train_Y), generator=generator(0, t, "own"))
        >>> X_next, _ = optimize_acqf(ThompsonSampling(path), bounds, q=1, …)
    """

    def __init__(self, path: SamplePath, partition: Partition | None = None) -> None:
        if not isinstance(path, SamplePath):
            raise InputDataError(
                f"path must be a BoTorch SamplePath, got {type(path).__name__}: draw one by "
                "draw_path(model), or make one of received weights by weight_path."
            )
        if partition is not None:
            path = _RegionalPath(path, partition)
        super().__init__(model=PathModel(path))
        self.partition = partition
        self.set_X_pending(None)
        self._sample_shape: Size | None = None

    @property
    def path(self) -> SamplePath:
        """The drawn functions; with a partition one function, piecewise over regions."""
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
        if self.partition is not None and q > 1:
            raise BotorchTensorDimensionError(
                f"Thompson sampling by regions needs q = 1, got q = {q}: choose the points one "
                "after the other."
            )
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
        """The sample shape of the path, read from its values."""
        if self._sample_shape is None:
            with torch.no_grad():
                self._sample_shape = self.path(X.reshape(-1, X.shape[-1])[:1]).shape[:-1]
        return self._sample_shape


class _RegionalPath(SamplePath):
    """A piecewise function: at every point, the function of its region."""

    def __init__(self, path: SamplePath, partition: Partition) -> None:
        super().__init__()
        self.path = path
        self.partition = partition

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        self.path.set_ensemble_as_batch(ensemble_as_batch)

    def forward(self, X: Tensor) -> Tensor:
        """Values at `batch_shape x d` points, a `batch_shape` tensor."""
        points = X.reshape(-1, X.shape[-1])
        regions = self.partition.region_of(points)
        values = self.path(points)  # P x n
        if values.shape[:-1] != (self.partition.num_regions,):
            raise BotorchTensorDimensionError(
                f"A partition of {self.partition.num_regions} regions needs as many functions, the "
                f"path has sample shape {tuple(values.shape[:-1])}."
            )
        return values.gather(0, regions.unsqueeze(0)).reshape(X.shape[:-1])


class PathModel(DeterministicModel):
    """A path as a BoTorch model; draws are leading batch dimensions."""

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
        mean: The public constant mean :math:`\mu`.

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
    features: Any = feature_map  # BoTorch has another type of feature maps
    return GeneralizedLinearPath(features, weights.detach(), bias_module=constant)
