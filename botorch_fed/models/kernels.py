r"""Stationary kernels as plain tensors, frozen copies of GPyTorch's.

A shared feature map must not change when its kernel is refitted, must be sendable as tensors, and
must give gradients with respect to a *new* length scale. GPyTorch kernels have none of these
properties, so that a map keeps this frozen copy. Its values equal GPyTorch's (tested to 1e-12); its
spectrum gives random and quadrature features.

References:
    * [Rahimi2007]_ A. Rahimi, B. Recht. Random features for large-scale kernel machines. NIPS 2007.
    * [Yu2016]_ F. X. Yu et al. Orthogonal random features. NIPS 2016.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.kernels import Kernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel
from torch import Tensor

from botorch_fed.models.numerics import Float64Module, as_double
from botorch_fed.rng import Generator

MATERN = (0.5, 1.5, 2.5)


class StationaryKernel(Float64Module):
    r"""A squared-exponential or Matérn kernel with one length scale per input.

    .. math:: k(x, x') = s_0^2\, \kappa_\nu(\|(x - x') / \ell\|),

    and with ``product=True`` the product over inputs of one-dimensional kernels,
    :math:`s_0^2 \prod_j \kappa_\nu(|x_j - x'_j| / \ell_j)`. For the squared exponential both are
    equal.

    Args:
        nu: Smoothness: 1/2, 3/2, 5/2, or infinity for the squared exponential.
        lengthscale: Positive length scales, one per input: numbers or a `d` tensor.
        outputscale: The prior *variance* :math:`s_0^2`, a scalar.
        product: Whether a Matérn kernel is a product over inputs.

    Example:
        >>> kernel = StationaryKernel(math.inf, [0.2, 0.4], 1.0)
        >>> kernel(torch.rand(5, 2).double()).shape
        torch.Size([5, 5])
    """

    lengthscale: Tensor
    outputscale: Tensor

    def __init__(
        self,
        nu: float,
        lengthscale: Tensor | Sequence[float] | float,
        outputscale: Tensor | float = 1.0,
        *,
        product: bool = False,
    ) -> None:
        super().__init__()
        if nu != math.inf and nu not in MATERN:
            raise UnsupportedError(
                f"Smoothness must be one of {MATERN} (Matérn) or inf (squared exponential), "
                f"got {nu}."
            )
        self.nu = float(nu)
        self.product = bool(product)
        if not isinstance(lengthscale, Tensor):
            lengthscale = torch.tensor(lengthscale, dtype=torch.float64)
        if not isinstance(outputscale, Tensor):
            outputscale = torch.tensor(outputscale, dtype=torch.float64)
        lengthscale = as_double(lengthscale, "lengthscale").reshape(-1)
        outputscale = as_double(outputscale, "outputscale")
        if outputscale.numel() != 1:
            raise InputDataError(
                f"outputscale must be a scalar, got shape {tuple(outputscale.shape)}."
            )
        for name, value in (("lengthscale", lengthscale), ("outputscale", outputscale)):
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise InputDataError(
                    f"{name} must be positive and finite, got {value.detach().tolist()}."
                )
        self.register_buffer("lengthscale", lengthscale, persistent=False)
        self.register_buffer("outputscale", outputscale.reshape(()), persistent=False)

    @classmethod
    def from_gpytorch(
        cls, kernel: Kernel | StationaryKernel, input_dim: int | None = None
    ) -> StationaryKernel:
        """A frozen copy of a GPyTorch kernel.

        Args:
            kernel: `RBFKernel` or `MaternKernel`, bare, inside a `ScaleKernel`, or a
                `ProductKernel` of one-dimensional ones with `active_dims` 0, 1, ….
            input_dim: Number of inputs; needed only for one length scale for all inputs.
        """
        spec = cls._parse(kernel, input_dim)
        if input_dim is not None and spec.input_dim != input_dim:
            raise InputDataError(
                f"The kernel has {spec.input_dim} length scales but the inputs have {input_dim} "
                "dimensions."
            )
        return spec

    @classmethod
    def _parse(cls, kernel: Kernel | StationaryKernel, input_dim: int | None) -> StationaryKernel:
        if isinstance(kernel, StationaryKernel):
            return kernel
        outputscale = torch.ones((), dtype=torch.float64)
        while isinstance(kernel, ScaleKernel):
            if kernel.active_dims is not None:
                raise UnsupportedError("Kernels with active_dims: use AdditiveFeatures instead.")
            outputscale = outputscale * kernel.outputscale.detach().double()
            kernel = kernel.base_kernel
        if isinstance(kernel, ProductKernel):
            parts = list(kernel.kernels)
            nu = _smoothness(parts[0])
            lengthscales = []
            for j, part in enumerate(parts):
                dims = part.active_dims
                if _smoothness(part) != nu or dims is None or dims.tolist() != [j]:
                    raise UnsupportedError(
                        "A ProductKernel must multiply one-dimensional kernels of one smoothness, "
                        f"factor j with active_dims=[j]; factor {j} is {part}."
                    )
                lengthscales.append(part.lengthscale.detach().double().reshape(-1))
            lengthscale = torch.cat(lengthscales)
            return cls(nu, lengthscale, outputscale, product=len(parts) > 1)
        nu = _smoothness(kernel)
        if len(kernel.batch_shape) > 0:
            raise UnsupportedError(
                f"A feature map needs one kernel, got batch_shape {tuple(kernel.batch_shape)}: "
                "build one map per batch element."
            )
        if kernel.active_dims is not None:
            raise UnsupportedError("Kernels with active_dims: use AdditiveFeatures instead.")
        lengthscale = kernel.lengthscale.detach().double().reshape(-1)
        if input_dim is not None and lengthscale.numel() == 1:
            lengthscale = lengthscale.expand(input_dim).clone()
        return cls(nu, lengthscale, outputscale)

    @property
    def input_dim(self) -> int:
        return self.lengthscale.shape[-1]

    def with_hyperparameters(self, lengthscale: Tensor, outputscale: Tensor) -> StationaryKernel:
        """The same kernel with other length scales and prior variance; keeps gradients."""
        return StationaryKernel(self.nu, lengthscale, outputscale, product=self.product)

    def forward(self, X1: Tensor, X2: Tensor | None = None) -> Tensor:
        r"""Covariance of `batch_shape x n x d` and `batch_shape x n' x d`: `… x n x n'`."""
        A = X1 / self.lengthscale
        B = A if X2 is None else X2 / self.lengthscale
        if not self.product or self.nu == math.inf:
            return self.outputscale * _correlation(self.nu, _distance(A, B))
        values = self.outputscale
        for j in range(self.input_dim):
            distance = (A[..., :, None, j] - B[..., None, :, j]).abs()
            values = values * _correlation(self.nu, distance)
        return values

    def spectral_density(self, omega: Tensor, dim: int) -> Tensor:
        r"""Density at `omega` of the frequencies of input `dim` (up to a constant factor)."""
        scaled = omega * self.lengthscale[dim]
        if self.nu == math.inf:
            return torch.exp(-0.5 * scaled.square())
        # Matérn in one dimension: Student's t with 2 nu degrees of freedom.
        return (2 * self.nu + scaled.square()).pow(-(self.nu + 0.5))

    def sample_frequencies(
        self, count: int, *, generator: Generator, orthogonal: bool = False
    ) -> Tensor:
        r"""Independent draws of the spectral density, `count x d` [Rahimi2007]_.

        With `orthogonal`, blocks of `d` directions are orthogonal [Yu2016]_; each single
        frequency keeps its distribution.
        """
        d = self.input_dim
        if orthogonal:
            if self.product and self.nu != math.inf:
                raise UnsupportedError(
                    "Orthogonal features need an isotropic spectrum; a product of Matérn kernels "
                    "has none. Use orthogonal=False."
                )
            blocks = -(-count // d)
            Q, R = torch.linalg.qr(generator.normal(blocks, d, d))
            # Signs of R's diagonal make Q uniform on the orthogonal group.
            Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
            directions = Q.mT.reshape(blocks * d, d)[:count]
            normals = directions * generator.normal(count, d).norm(dim=-1, keepdim=True)
        else:
            normals = generator.normal(count, d)
        if self.nu != math.inf:
            # A multivariate t: 2 nu is 1, 3 or 5, so its chi-square is a sum of squares.
            degrees = round(2 * self.nu)
            columns = d if self.product else 1
            chi2 = generator.normal(degrees, count, columns).square().sum(dim=0)
            normals = normals * (degrees / chi2).sqrt()
        return normals / self.lengthscale

    def extra_repr(self) -> str:
        name = "SE" if self.nu == math.inf else f"Matérn {self.nu:g}"
        shape = " product" if self.product and self.nu != math.inf else ""
        scales = ", ".join(f"{value:.4g}" for value in self.lengthscale.tolist())
        return f"{name}{shape}, lengthscale=[{scales}], outputscale={self.outputscale.item():.4g}"


def _smoothness(kernel: Kernel) -> float:
    # Exact types: subclasses such as RBFKernelGrad are other kernels.
    if type(kernel) is MaternKernel:
        return float(kernel.nu)
    if type(kernel) is RBFKernel:
        return math.inf
    raise UnsupportedError(
        "Feature maps exist for RBFKernel and MaternKernel, bare, scaled, or as a product of "
        f"one-dimensional ones; got {type(kernel).__name__}."
    )


def _distance(A: Tensor, B: Tensor) -> Tensor:
    # Exact differences: the matrix-multiply form loses digits for nearby points.
    return torch.cdist(A, B, compute_mode="donot_use_mm_for_euclid_dist")


def _correlation(nu: float, r: Tensor) -> Tensor:
    if nu == math.inf:
        return torch.exp(-0.5 * r.square())
    scaled = math.sqrt(2 * nu) * r
    decay = torch.exp(-scaled)
    if nu == 0.5:
        return decay
    if nu == 1.5:
        return (1 + scaled) * decay
    return (1 + scaled + scaled.square() / 3) * decay
