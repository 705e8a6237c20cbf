r"""The logarithmic scale of log-scaled parameters in models.

:math:`x_j \mapsto \log(1 + x_j / \epsilon_j) / \log(1 + 1 / \epsilon_j)` maps the unit interval on
itself. With :math:`\epsilon_j` the lower bound of a parameter divided by the width of its range it
is the logarithmic scale of that parameter, for any scale of the search:
``LogWarp(space.log_offsets)``. It is public. `LogWarp` is a BoTorch input transform,
`models.WarpedFeatures` a basis and `WarpedKernel` a kernel on warped inputs.
"""

from __future__ import annotations

from typing import Any

from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models.transforms.input import InputTransform
from gpytorch.kernels import Kernel
from torch import Tensor, expm1, log1p, ones_like, where

from botorch_fed.models.numerics import as_double, check_finite


class LogWarp(InputTransform):
    r"""Inputs on a logarithmic scale, see the module.

    Args:
        offsets: A tensor of `d` offsets :math:`\epsilon`, e.g. `SearchSpace.log_offsets`; 0 leaves
            an input as it is.
    """

    offsets: Tensor

    def __init__(self, offsets: Tensor) -> None:
        super().__init__()
        offsets = as_double(offsets, "offsets")
        if offsets.dim() != 1:
            raise BotorchTensorDimensionError(
                f"offsets must be a `d` tensor, got shape {tuple(offsets.shape)}."
            )
        check_finite(offsets, "offsets")
        if bool((offsets < 0).any()):
            raise InputDataError("offsets must not be negative: use 0 for inputs without a warp.")
        self.transform_on_train = True
        self.transform_on_eval = True
        self.transform_on_fantasize = True
        self.is_one_to_many = False
        self.identity = not bool((offsets > 0).any())
        self.register_buffer("offsets", offsets, persistent=False)

    def transform(self, X: Tensor) -> Tensor:
        """Warped points, `batch_shape x n x d`."""
        if self.identity:
            return X.double()
        X, scale = X.double(), self._scale
        return where(self.offsets > 0, log1p(X / scale) / log1p(1 / scale), X)

    def untransform(self, X: Tensor) -> Tensor:
        """The inverse on the unit cube."""
        if self.identity:
            return X
        scale = self._scale
        unwarped = scale * expm1(X.double() * log1p(1 / scale))
        return where(self.offsets > 0, unwarped, X).clamp(0.0, 1.0)

    @property
    def _scale(self) -> Tensor:
        return where(self.offsets > 0, self.offsets, ones_like(self.offsets))


class WarpedKernel(Kernel):
    """A kernel on warped inputs.

    Args:
        base: The kernel on warped inputs.
        warp: The warp.
    """

    def __init__(self, base: Kernel, warp: LogWarp) -> None:
        super().__init__()
        self.base = base
        self.warp = warp

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """The base kernel's covariances at warped points."""
        warped = self.warp.transform(x1), self.warp.transform(x2)
        return self.base.forward(*warped, diag=diag, **params)
