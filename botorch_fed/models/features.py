r"""Feature maps :math:`\phi`: the bases over which agents add their statistics.

Every map is whitened: weights have prior :math:`w \sim N(0, I)`, so :math:`f = \phi(x)^\top w` has
prior covariance :math:`\phi(x)^\top \phi(x')`, plus the part that the map misses (`residual`).

::

    map                          basis                                     residual
    RandomFourierFeatures        cos/sin of random frequencies             zero
    QuadratureFourierFeatures    cos/sin of quadrature nodes               zero
    KLFeatures                   leading eigenvectors of another map       zero
    AdditiveFeatures             maps of groups of inputs, concatenated    sum over the groups
    InducingFeatures             L^-1 k(Z, x), the support set of PITC     k(x, x') - phi' phi
    PolynomialFeatures           monomials up to degree two                zero

A map is defined by arrays, never by a seed: generators change between versions, arrays do not.
`to_tensors` and `feature_map_from_tensors` are its serial form, `fingerprint` its identity. A
user's map is a subclass of `FeatureMap` with a name from `register_feature_map`.

References:
    * [Rahimi2007]_ A. Rahimi, B. Recht. Random features for large-scale kernel machines. NIPS 2007.
    * [Mutny2018]_ M. Mutný, A. Krause. Efficient high dimensional Bayesian optimization with
      additivity and quadrature Fourier features. NeurIPS 2018.
    * [Dubey2021]_ A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
      AISTATS 2021.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Self, TypeVar

import numpy as np
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from gpytorch.kernels import Kernel
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from torch.nn import ModuleList

from botorch_fed.errors import NumericalError
from botorch_fed.models.directions import (
    canonical,
    reproducible,
    right_singular_vectors,
    subspaces,
)
from botorch_fed.models.kernels import StationaryKernel
from botorch_fed.models.numerics import (
    JITTER,
    MAX_JITTER,
    Float64Module,
    as_double,
    check_finite,
    cholesky,
    jittered_cholesky,
)
from botorch_fed.models.warp import LogWarp
from botorch_fed.rng import Generator

MAX_GRID = 2_000_000


class FeatureMap(Float64Module, ABC):
    r"""A whitened basis: `batch_shape x q x d` points to `batch_shape x q x M` features.

    Attributes:
        num_features: The number `M` of features.
        input_dim: The number `d` of inputs.
    """

    num_features: int
    input_dim: int

    @abstractmethod
    def _features(self, X: Tensor) -> Tensor:
        """`batch_shape x q x d` to `batch_shape x q x M`, inputs already checked."""

    def forward(self, X: Tensor) -> Tensor:
        r"""Features of points.

        Args:
            X: A `batch_shape x q x d` tensor of points.

        Returns:
            A `batch_shape x q x M` float64 tensor.
        """
        if X.dim() < 2 or X.shape[-1] != self.input_dim:
            raise BotorchTensorDimensionError(
                f"X must be `batch_shape x q x {self.input_dim}` for this feature map, got shape "
                f"{tuple(X.shape)}."
            )
        return self._features(X.double())

    def as_waves(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        r"""The function :math:`\phi(x)^\top w` as :math:`\sum_k a_k \cos\omega_k^\top x + b_k
        \sin\omega_k^\top x`, for closed forms; None where it is no such sum.

        Args:
            weights: The weights, `M`.

        Returns:
            Frequencies `K x d`, and the factors of cosines and sines, `K` each.
        """
        return None

    @abstractmethod
    def covariance(self, X1: Tensor, X2: Tensor | None = None) -> Tensor:
        """The exact kernel that the map approximates: `batch_shape x n x n'`."""

    @property
    def has_residual(self) -> bool:
        """Whether the map misses a part of its kernel that predictions must add."""
        return False

    def residual(
        self,
        X1: Tensor,
        X2: Tensor | None = None,
        *,
        Phi1: Tensor | None = None,
        Phi2: Tensor | None = None,
    ) -> Tensor:
        r"""The prior covariance that the basis misses, :math:`k(x, x') - \phi^\top\phi'`.

        Zero for Fourier features: the model's kernel is their inner product.

        Args:
            X1: A `batch_shape x n x d` tensor of points.
            X2: A `batch_shape x n' x d` tensor of points; default `X1`.
            Phi1: The features of `X1`, computed if not given.
            Phi2: The features of `X2`, computed if not given.

        Returns:
            A `batch_shape x n x n'` tensor.
        """
        if not self.has_residual:
            other = X1 if X2 is None else X2
            batch_shape = torch.broadcast_shapes(X1.shape[:-2], other.shape[:-2])
            shape = (*batch_shape, X1.shape[-2], other.shape[-2])
            return X1.new_zeros(shape, dtype=torch.float64)
        Phi1 = self(X1) if Phi1 is None else Phi1
        if X2 is None:
            return self._residual(X1.double(), X1.double(), Phi1, Phi1)
        Phi2 = self(X2) if Phi2 is None else Phi2
        return self._residual(X1.double(), X2.double(), Phi1, Phi2)

    def _residual(self, X1: Tensor, X2: Tensor, Phi1: Tensor, Phi2: Tensor) -> Tensor:
        """The result of `residual` if it is not zero; by default kernel minus inner product."""
        return self.covariance(X1, X2) - Phi1 @ Phi2.mT

    @property
    @abstractmethod
    def lengthscale(self) -> Tensor:
        """The length scales, one flat tensor."""

    @property
    @abstractmethod
    def outputscale(self) -> Tensor:
        r"""The prior variance :math:`s_0^2`: a scalar, or one per additive component."""

    @property
    def lengthscale_range(self) -> tuple[Tensor, Tensor]:
        """Shortest and longest length scales that `with_hyperparameters` accepts."""
        zero = torch.zeros_like(self.lengthscale)
        return zero, torch.full_like(zero, math.inf)

    @abstractmethod
    def with_hyperparameters(self, lengthscale: Tensor, outputscale: Tensor) -> Self:
        """The map with other length scales and prior variance: a new basis, a new fingerprint.

        Keeps gradients, so that the evidence can be maximised through it.
        """

    @abstractmethod
    def to_tensors(self) -> dict[str, Tensor]:
        """The map as plain named tensors; `feature_map_from_tensors` is the inverse."""

    @classmethod
    @abstractmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor]) -> FeatureMap: ...

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the map's tensors: equal if and only if the basis is, bit for bit.

        A received map has the bits of the sent one. Maps that two machines build from one seed are
        equal if their arithmetic is: on x86-64 the default maps, squared exponential quadrature and
        `KLFeatures` over them. The last bits of Matérn and of orthogonal frequencies depend on the
        width of PyTorch's vector instructions.
        """
        digest = hashlib.sha256()
        for name, value in sorted(self.to_tensors().items()):
            array = np.ascontiguousarray(value.detach().cpu().numpy())
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
            header = f"{name}|{array.dtype.str}|{array.shape}|"
            digest.update(header.encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    @property
    def bounded(self) -> bool:
        """Whether there are points that `check_domain` refuses."""
        return False

    def check_domain(self, X: Tensor) -> None:
        """Raise `InputDataError` if points lie where the map does not approximate its kernel."""

    def extra_repr(self) -> str:
        return f"num_features={self.num_features}, fingerprint={self.fingerprint[:8]}…"


class _FourierFeatures(FeatureMap):
    r"""Weighted cos/sin pairs, :math:`s_0 [\sqrt{a_i}\cos\omega_i^\top x,
    \sqrt{a_i}\sin\omega_i^\top x]` with :math:`\sum a_i = 1`, hence
    :math:`\|\phi(x)\|^2 = s_0^2` exactly. A zero frequency comes first and has no sine.
    """

    frequencies: Tensor
    amplitudes: Tensor

    def __init__(self, kernel: StationaryKernel, frequencies: Tensor, amplitudes: Tensor) -> None:
        super().__init__()
        frequencies = as_double(frequencies, "frequencies")
        amplitudes = as_double(amplitudes, "amplitudes")
        if frequencies.dim() != 2 or frequencies.shape[-1] != kernel.input_dim:
            raise BotorchTensorDimensionError(
                f"frequencies must be `count x {kernel.input_dim}`, got shape "
                f"{tuple(frequencies.shape)}."
            )
        if amplitudes.shape != frequencies.shape[:1]:
            raise BotorchTensorDimensionError(
                f"amplitudes must have shape ({frequencies.shape[0]},), got "
                f"{tuple(amplitudes.shape)}."
            )
        check_finite(frequencies, "frequencies")
        check_finite(amplitudes, "amplitudes")
        total = float(amplitudes.detach().sum())
        if bool((amplitudes < 0).any()) or abs(total - 1) > 1e-9:
            raise InputDataError(f"Expected positive amplitudes that sum to 1, got sum {total}.")
        self.kernel = kernel
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("amplitudes", amplitudes, persistent=False)
        zero = (frequencies.detach() == 0).all(dim=-1)
        self._first_sine = int(zero.shape[0] > 0 and bool(zero[0]))
        self.input_dim = kernel.input_dim
        self.num_features = 2 * frequencies.shape[0] - self._first_sine

    def _features(self, X: Tensor) -> Tensor:
        angles = X @ self.frequencies.mT
        waves = torch.cat([angles.cos(), angles[..., self._first_sine :].sin()], dim=-1)
        return waves * self.wave_scales

    def as_waves(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled, count = weights * self.wave_scales, len(self.frequencies)
        sines = torch.cat([scaled.new_zeros(self._first_sine), scaled[count:]])
        return self.frequencies, scaled[:count], sines

    @property
    def wave_scales(self) -> Tensor:
        r"""The factors of the cosines and sines, :math:`s_0 \sqrt{a_i}`: an `M` tensor."""
        scales = (self.kernel.outputscale * self.amplitudes).sqrt()
        return torch.cat([scales, scales[self._first_sine :]])

    def covariance(self, X1: Tensor, X2: Tensor | None = None) -> Tensor:
        return self.kernel(X1, X2)

    @property
    def lengthscale(self) -> Tensor:
        return self.kernel.lengthscale

    @property
    def outputscale(self) -> Tensor:
        return self.kernel.outputscale


class RandomFourierFeatures(_FourierFeatures):
    r"""Random Fourier features as cos/sin pairs [Rahimi2007]_.

    :math:`\phi(x) = s_0 \sqrt{2/M} [\cos\omega_i^\top x, \sin\omega_i^\top x]_{i \le M/2}`, with
    :math:`\omega_i` from the spectral density of an SE or Matérn kernel. Build it by `draw` and
    share it by `to_tensors`.

    Args:
        kernel: The kernel that the features approximate.
        frequencies: An `M/2 x d` tensor of frequencies.

    Example:
        >>> kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
        >>> phi = RandomFourierFeatures.draw(kernel, 100, generator=generator(0, "features"))
        >>> phi(torch.rand(4, 3, 2).double()).shape
        torch.Size([4, 3, 100])
    """

    def __init__(self, kernel: StationaryKernel, frequencies: Tensor) -> None:
        count = frequencies.shape[0] if frequencies.dim() else 0
        if count == 0:
            raise InputDataError("A feature map needs at least one frequency, got none.")
        frequencies = as_double(frequencies, "frequencies")
        super().__init__(kernel, frequencies, frequencies.new_full((count,), 1.0 / count))
        if self._first_sine:
            raise InputDataError("Expected frequencies other than zero, got a zero first one.")

    @classmethod
    def draw(
        cls,
        kernel: Kernel | StationaryKernel,
        num_features: int,
        *,
        generator: Generator,
        orthogonal: bool = False,
        input_dim: int | None = None,
    ) -> RandomFourierFeatures:
        r"""Draw frequencies from the spectral density of a kernel.

        Args:
            kernel: A GPyTorch `RBFKernel` or `MaternKernel` (1/2, 3/2, 5/2), possibly in a
                `ScaleKernel`; its values are copied.
            num_features: The number `M` of features, even.
            generator: The stream of random numbers, e.g. ``generator(seed, "features")``.
            orthogonal: Draw orthogonal blocks of directions, which lowers the error.
            input_dim: Needed only for kernels without ARD.
        """
        if num_features < 2 or num_features % 2:
            raise UnsupportedError(
                f"num_features must be even and positive (cos/sin pairs), got {num_features}."
            )
        spec = StationaryKernel.from_gpytorch(kernel, input_dim)
        frequencies = spec.sample_frequencies(
            num_features // 2, generator=generator, orthogonal=orthogonal
        )
        return cls(spec, frequencies)

    def with_hyperparameters(
        self, lengthscale: Tensor, outputscale: Tensor
    ) -> RandomFourierFeatures:
        kernel = self.kernel.with_hyperparameters(lengthscale, outputscale)
        frequencies = self.frequencies * (self.kernel.lengthscale / kernel.lengthscale)
        return RandomFourierFeatures(kernel, frequencies)

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = {**_kernel_tensors(self.kernel), "frequencies": self.frequencies}
        return _tagged("random_fourier", tensors)

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor]) -> RandomFourierFeatures:
        return cls(_kernel_from_tensors(tensors), tensors["frequencies"])


class QuadratureFourierFeatures(_FourierFeatures):
    r"""Quadrature Fourier features [Mutny2018]_, [Dubey2021]_ (Def. 4, corrected).

    Squared exponential: Gauss-Hermite nodes, :math:`\omega_i = \sqrt2 t_i / \ell`,
    :math:`a_i = w_i / \sqrt\pi`, a tensor grid in `d` dimensions. Equal nodes of opposite sign are
    folded, negligible weights pruned. Matérn: a uniform grid, in one dimension or as a product.

    The error falls super-exponentially, but only beyond a phase transition at degree
    :math:`(1 + c\ell)^2 / (4\ell^2)` per dimension of unit width: ask for a tolerance (`tol=`)
    and the degree follows. Noise added for privacy grows with the number of features.

    Args:
        kernel: The kernel that the features approximate.
        frequencies: A `count x d` tensor of folded nodes, the zero node (if any) first.
        amplitudes: A `count` tensor of folded weights that sum to one.
        bounds: A `2 x d` tensor: the box in which the features approximate the kernel.
        min_lengthscale: The shortest length scales for which the nodes are accurate; default the
            kernel's. The grid of a Matérn kernel is accurate for these length scales only.

    Example:
        >>> bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
        >>> phi = QuadratureFourierFeatures.from_kernel(kernel, bounds, tol=1e-4)
    """

    bounds: Tensor
    min_lengthscale: Tensor

    def __init__(
        self,
        kernel: StationaryKernel,
        frequencies: Tensor,
        amplitudes: Tensor,
        *,
        bounds: Tensor,
        min_lengthscale: Tensor | None = None,
    ) -> None:
        super().__init__(kernel, frequencies, amplitudes)
        if min_lengthscale is None:
            min_lengthscale = kernel.lengthscale
        min_lengthscale = as_double(min_lengthscale, "min_lengthscale")
        bounds = _checked_bounds(bounds)
        if bounds.shape[-1] != kernel.input_dim:
            raise BotorchTensorDimensionError(
                f"bounds must be `2 x {kernel.input_dim}` for this kernel, got "
                f"{tuple(bounds.shape)}."
            )
        self.register_buffer("bounds", bounds, persistent=False)
        self.register_buffer("min_lengthscale", min_lengthscale.detach(), persistent=False)
        lower, upper = self.lengthscale_range
        if lower.shape != kernel.lengthscale.shape or not bool((lower > 0).all()):
            raise InputDataError(
                f"min_lengthscale must be {kernel.input_dim} positive numbers, got "
                f"{lower.tolist()}."
            )
        ell = kernel.lengthscale.detach()
        if bool(((ell < lower * (1 - 1e-9)) | (ell > upper * (1 + 1e-9))).any()):
            raise InputDataError(
                f"Expected length scales from {lower.tolist()} to {upper.tolist()}, for which "
                f"these quadrature nodes are accurate, got {ell.tolist()}: build a new map."
            )

    @classmethod
    def from_kernel(
        cls,
        kernel: Kernel | StationaryKernel,
        bounds: Tensor,
        *,
        degree: int | None = None,
        tol: float | None = None,
    ) -> QuadratureFourierFeatures:
        r"""Quadrature nodes for a kernel on a box.

        The nodes of a squared exponential kernel are accurate for longer length scales too.

        Args:
            kernel: `RBFKernel`, or a Matérn kernel in one dimension or as a product of
                one-dimensional ones, possibly in a `ScaleKernel`.
            bounds: A `2 x d` tensor of lower and upper bounds of the domain.
            degree: Number of nodes per dimension before folding; for Matérn kernels the number of
                positive frequencies per dimension. Nothing is pruned.
            tol: Wanted sup error relative to the prior variance, instead of `degree`. The
                measured error is at most 1.2 times this.
        """
        bounds = _checked_bounds(bounds)
        spec = StationaryKernel.from_gpytorch(kernel, bounds.shape[-1])
        if (degree is None) == (tol is None):
            raise UnsupportedError("Give exactly one of `degree=` and `tol=`.")
        if degree is not None and degree < 1:
            raise InputDataError(f"degree must be at least 1, got {degree}.")
        if tol is not None:
            _check_tolerance(tol)
        if spec.nu != math.inf:
            return cls._on_grid(spec, bounds, tol=tol, count=degree)
        widths = bounds[1] - bounds[0]
        relative = (spec.lengthscale / widths).tolist()  # length scales on the unit cube
        needed = [_transition(ell, tol if tol is not None else 0.1) for ell in relative]
        if degree is not None and degree < max(needed):
            warnings.warn(
                f"degree={degree} lies below the phase transition of this kernel, which needs "
                f"{max(needed)} per dimension for an error of 0.1: the features do not approximate "
                "the kernel. Raise the degree, or give `tol=`.",
                InputDataWarning,
                stacklevel=2,
            )
        from scipy.special import roots_hermite  # costs 150 ms to import

        degrees = needed if degree is None else [degree] * len(needed)
        axes = []
        for m, ell in zip(degrees, spec.lengthscale.tolist(), strict=True):
            nodes, weights = roots_hermite(m)  # zeros of H_m and weights for exp(-t^2)
            axes.append((math.sqrt(2.0) * nodes / ell, weights / weights.sum()))
        frequencies, amplitudes = _tensor_grid(axes, prune=0.0 if tol is None else tol / 2)
        return cls(spec, frequencies, amplitudes, bounds=bounds)

    @classmethod
    def _on_grid(
        cls, spec: StationaryKernel, bounds: Tensor, *, tol: float | None, count: int | None
    ) -> QuadratureFourierFeatures:
        """The trapezoidal rule, whose error is aliasing beyond the period plus the lost tail."""
        if spec.input_dim > 1 and not spec.product:
            raise UnsupportedError(
                "Matérn kernels have quadrature features in one dimension or as a product of "
                "one-dimensional kernels: StationaryKernel(..., product=True), or a GPyTorch "
                "ProductKernel with one factor per input."
            )
        reach, cut = _grid_extent(spec.nu, (1e-3 if tol is None else tol) / spec.input_dim)
        axes = []
        for j in range(spec.input_dim):
            period = float(bounds[1, j] - bounds[0, j] + reach * spec.lengthscale[j])
            step = 2 * math.pi / period
            m = math.ceil(cut / float(spec.lengthscale[j]) / step) if count is None else count
            positive = step * np.arange(1, m + 1)
            nodes = np.concatenate([-positive[::-1], [0.0], positive])
            axes.append((nodes, np.full(len(nodes), 1 / len(nodes))))
        frequencies, _ = _tensor_grid(axes)
        return cls(spec, frequencies, _grid_amplitudes(spec, frequencies), bounds=bounds)

    @property
    def lengthscale_range(self) -> tuple[Tensor, Tensor]:
        if self.kernel.nu != math.inf:
            return self.min_lengthscale, self.min_lengthscale
        return self.min_lengthscale, torch.full_like(self.min_lengthscale, math.inf)

    def with_hyperparameters(
        self, lengthscale: Tensor, outputscale: Tensor
    ) -> QuadratureFourierFeatures:
        kernel = self.kernel.with_hyperparameters(lengthscale, outputscale)
        return QuadratureFourierFeatures(
            kernel,
            self.frequencies * (self.kernel.lengthscale / kernel.lengthscale),
            self.amplitudes,
            bounds=self.bounds,
            min_lengthscale=self.min_lengthscale,
        )

    @property
    def bounded(self) -> bool:
        return True

    def check_domain(self, X: Tensor) -> None:
        slack = 1e-6 * (self.bounds[1] - self.bounds[0])
        outside = (X < self.bounds[0] - slack) | (X > self.bounds[1] + slack)
        if bool(outside.any()):
            raise InputDataError(
                f"{int(outside.any(dim=-1).sum())} points lie outside the bounds "
                f"{self.bounds.tolist()} for which these quadrature features were built: "
                "normalise the inputs, or build the map on a larger box."
            )

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = {
            **_kernel_tensors(self.kernel),
            "frequencies": self.frequencies,
            "amplitudes": self.amplitudes,
            "bounds": self.bounds,
            "min_lengthscale": self.min_lengthscale,
        }
        return _tagged("quadrature_fourier", tensors)

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor]) -> QuadratureFourierFeatures:
        return cls(
            _kernel_from_tensors(tensors),
            tensors["frequencies"],
            tensors["amplitudes"],
            bounds=tensors["bounds"],
            min_lengthscale=tensors["min_lengthscale"],
        )


class _OverMap(FeatureMap):
    """A map over another map, with its hyperparameters."""

    def __init__(self, base: FeatureMap) -> None:
        super().__init__()
        self.base = base
        self.input_dim = base.input_dim
        self.num_features = base.num_features

    @property
    def lengthscale(self) -> Tensor:
        return self.base.lengthscale

    @property
    def outputscale(self) -> Tensor:
        return self.base.outputscale


class KLFeatures(_OverMap):
    r"""The leading eigenvectors of another map's second moment, a discrete Karhunen-Loève basis.

    :math:`\phi_{KL}(x) = V^\top \phi(x)` with `V` the top eigenvectors of
    :math:`E[\phi(x)\phi(x)^\top]` under a *public* reference measure. The projection never
    increases the norm, and reaches a given error with about half as many features as pruned
    quadrature, so that a private release needs less noise. The projection is made for one length
    scale, which is fixed. `from_map` makes the same projection on every machine, see `directions`.

    Args:
        base: An accurate map of the same kernel.
        projection: An `M_base x M` tensor with orthonormal columns.
    """

    projection: Tensor

    def __init__(self, base: FeatureMap, projection: Tensor) -> None:
        super().__init__(base)
        projection = as_double(projection, "projection")
        if base.has_residual:
            raise UnsupportedError("Expected a map without residual, e.g. Fourier features.")
        if projection.dim() != 2 or projection.shape[0] != base.num_features:
            raise BotorchTensorDimensionError(
                f"projection must be `{base.num_features} x M`, got {tuple(projection.shape)}."
            )
        check_finite(projection, "projection")
        gram = projection.mT @ projection
        if float((gram - torch.eye(len(gram)).to(gram)).abs().max()) > 1e-8:
            raise InputDataError("The columns of projection must be orthonormal.")
        self.register_buffer("projection", projection, persistent=False)
        self.num_features = projection.shape[-1]

    @classmethod
    def from_map(
        cls,
        base: FeatureMap,
        reference: Tensor,
        *,
        num_features: int | None = None,
        tol: float | None = None,
    ) -> KLFeatures:
        r"""Project a map on its leading eigenvectors under a reference measure.

        Signs, and bases of equal eigenvalues, are canonical: two machines with the same base and
        reference make the same map, bit for bit with rare exceptions (see `directions`). The
        features of a smaller map are the first of a larger one.

        Args:
            base: An accurate map, e.g. quadrature features with a small tolerance.
            reference: An `n x d` tensor of *public* points that represent the domain.
            num_features: Number of eigenvectors. A cut among equal eigenvalues keeps the first of
                their canonical basis.
            tol: Largest error of :math:`k(x, x')` over `reference`, relative to the prior variance:
                the smallest sufficient number of eigenvectors is kept. Equal eigenvalues are kept
                or dropped together; rounding of the eigenvectors adds up to 1e-7. With
                `num_features` too, so many at most.
        """
        if num_features is None and tol is None:
            raise UnsupportedError("Give `num_features=`, `tol=`, or both.")
        if tol is not None:
            _check_tolerance(tol)
        reference = as_double(reference, "reference")
        check_finite(reference, "reference")
        if reference.shape[0] == 0:
            raise InputDataError("reference needs at least one point, got none.")
        with torch.no_grad():
            Phi = base(reference)
            values, vectors = right_singular_vectors(Phi)
        if tol is not None:
            # By Cauchy-Schwarz the largest error of the kernel is on its diagonal.
            lost = (Phi @ vectors).square().flip(-1).cumsum(dim=-1).flip(-1).amax(dim=0)
            enough = lost <= tol * float(base.outputscale.sum())
            # Whole subspaces only: the error of a part depends on its basis.
            ends = subspaces(values)[1:]
            sufficient = next((end for end in ends[:-1] if enough[end]), ends[-1])
            num_features = sufficient if num_features is None else min(num_features, sufficient)
        assert num_features is not None
        if not 1 <= num_features <= base.num_features:
            raise InputDataError(
                f"num_features must lie between 1 and {base.num_features}, got {num_features}."
            )
        return cls(base, reproducible(canonical(values, vectors, num_features)))

    def _features(self, X: Tensor) -> Tensor:
        return self.base(X) @ self.projection

    def as_waves(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        return self.base.as_waves(self.projection @ weights)

    def covariance(self, X1: Tensor, X2: Tensor | None = None) -> Tensor:
        return self.base.covariance(X1, X2)

    @property
    def lengthscale_range(self) -> tuple[Tensor, Tensor]:
        return self.base.lengthscale, self.base.lengthscale

    def with_hyperparameters(self, lengthscale: Tensor, outputscale: Tensor) -> KLFeatures:
        if not torch.allclose(lengthscale, self.base.lengthscale, rtol=1e-9):
            raise InputDataError(
                f"The projection was made for length scales {self.base.lengthscale.tolist()}, got "
                f"{lengthscale.tolist()}: project a map with these by KLFeatures.from_map."
            )
        return KLFeatures(self.base.with_hyperparameters(lengthscale, outputscale), self.projection)

    @property
    def bounded(self) -> bool:
        return self.base.bounded

    def check_domain(self, X: Tensor) -> None:
        self.base.check_domain(X)

    def to_tensors(self) -> dict[str, Tensor]:
        return _tagged("kl", {"projection": self.projection, **_nested("base", self.base)})

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor]) -> KLFeatures:
        return cls(feature_map_from_tensors(_below("base", tensors)), tensors["projection"])


class WarpedFeatures(_OverMap):
    r"""Another map on warped inputs, for log-scaled parameters: see `warp`.

    Args:
        base: A map over the warped inputs.
        offsets: A tensor of `d` offsets of a `LogWarp`, e.g. `SearchSpace.log_offsets`.
    """

    def __init__(self, base: FeatureMap, offsets: Tensor) -> None:
        super().__init__(base)
        self.warp = LogWarp(offsets)
        if self.offsets.shape != (base.input_dim,):
            raise BotorchTensorDimensionError(
                f"offsets must have shape ({base.input_dim},), got {tuple(self.offsets.shape)}."
            )

    @staticmethod
    def around(base: FeatureMap, offsets: Tensor) -> FeatureMap:
        """The map on warped inputs; the map itself if no input is warped."""
        return WarpedFeatures(base, offsets) if bool((offsets > 0).any()) else base

    @property
    def offsets(self) -> Tensor:
        """The offsets of the warp."""
        return self.warp.offsets

    def _features(self, X: Tensor) -> Tensor:
        return self.base(self.warp.transform(X))

    def covariance(self, X1: Tensor, X2: Tensor | None = None) -> Tensor:
        warp = self.warp.transform
        return self.base.covariance(warp(X1), None if X2 is None else warp(X2))

    @property
    def has_residual(self) -> bool:
        return self.base.has_residual

    def _residual(self, X1: Tensor, X2: Tensor, Phi1: Tensor, Phi2: Tensor) -> Tensor:
        warp = self.warp.transform
        return self.base._residual(warp(X1), warp(X2), Phi1, Phi2)

    @property
    def lengthscale_range(self) -> tuple[Tensor, Tensor]:
        return self.base.lengthscale_range

    def with_hyperparameters(self, lengthscale: Tensor, outputscale: Tensor) -> WarpedFeatures:
        return WarpedFeatures(
            self.base.with_hyperparameters(lengthscale, outputscale), self.offsets
        )

    @property
    def bounded(self) -> bool:
        return self.base.bounded or bool((self.offsets > 0).any())

    def check_domain(self, X: Tensor) -> None:
        if bool((X.double() <= -self.offsets)[..., self.offsets > 0].any()):
            raise InputDataError(
                "Points lie where the logarithmic warp is not defined: map points to the unit cube."
            )
        self.base.check_domain(self.warp.transform(X))

    def to_tensors(self) -> dict[str, Tensor]:
        return _tagged("warped", {"offsets": self.offsets, **_nested("base", self.base)})

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor]) -> WarpedFeatures:
        return cls(feature_map_from_tensors(_below("base", tensors)), tensors["offsets"])


class AdditiveFeatures(FeatureMap):
    r"""A sum of functions of groups of inputs: :math:`k(x, x') = \sum_g k_g(x_g, x'_g)`.

    Its parts are not to be changed in place.

    Args:
        maps: One feature map per group.
        groups: The inputs of each map; default consecutive inputs.

    Example:
        >>> parts = [QuadratureFourierFeatures.from_kernel(k, unit, tol=1e-3) for k in kernels]
        >>> phi = AdditiveFeatures(parts)  # one variable per group
    """

    def __init__(
        self, maps: Sequence[FeatureMap], groups: Sequence[Sequence[int]] | None = None
    ) -> None:
        super().__init__()
        if not maps:
            raise InputDataError("AdditiveFeatures needs at least one feature map.")
        if groups is None:
            ends = np.cumsum([part.input_dim for part in maps])
            groups = [
                range(int(end) - part.input_dim, int(end))
                for part, end in zip(maps, ends, strict=True)
            ]
        self.groups = [[int(j) for j in group] for group in groups]
        if len(self.groups) != len(maps):
            raise InputDataError(
                f"Expected one group per map, got {len(self.groups)} groups, {len(maps)} maps."
            )
        for g, (part, group) in enumerate(zip(maps, self.groups, strict=True)):
            if len(group) != part.input_dim or min(group) < 0 or len(set(group)) < len(group):
                raise InputDataError(
                    f"Group {g} must name {part.input_dim} different inputs of its map, got "
                    f"{group}."
                )
        self.maps = ModuleList(maps)
        self.input_dim = 1 + max(j for group in self.groups for j in group)
        self.num_features = sum(part.num_features for part in maps)
        self._joined: tuple[Tensor, Tensor, Tensor] | None = None

    def _parts(self) -> list[tuple[FeatureMap, list[int]]]:
        return [
            (part, group)
            for part, group in zip(self.maps, self.groups, strict=True)
            if isinstance(part, FeatureMap)
        ]

    def _features(self, X: Tensor) -> Tensor:
        waves = self._waves()
        if waves is None:
            return torch.cat([part(X[..., group]) for part, group in self._parts()], dim=-1)
        frequencies, order, scales = waves
        angles = X @ frequencies.mT
        return torch.cat([angles.cos(), angles.sin()], dim=-1)[..., order] * scales

    def as_waves(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        waves = self._waves()
        if waves is None:
            return None
        frequencies, order, scales = waves
        count = len(frequencies)
        factors = weights.new_zeros(2 * count)
        factors[order] = weights * scales
        return frequencies, factors[:count], factors[count:]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._joined = None  # on the device before
        return super()._apply(fn, recurse)

    def _waves(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """All waves of Fourier features over all inputs, for one product in the place of many.

        Returns:
            Frequencies, which of their cosines and sines are features, and the factors of these;
            None for other maps, where hyperparameters have gradients, and in inference mode, whose
            tensors no gradient can pass later.
        """
        if self._joined is None:
            parts = self._parts()
            waves = [part for part, _ in parts if isinstance(part, _FourierFeatures)]
            sources = [
                one
                for part in waves
                for one in (part.frequencies, part.amplitudes, part.kernel.outputscale)
            ]
            moved = any(one.requires_grad for one in sources)
            if len(waves) < len(parts) or moved or torch.is_inference_mode_enabled():
                return None
            total = sum(len(part.frequencies) for part in waves)
            frequencies = waves[0].frequencies.new_zeros(total, self.input_dim)
            order, start = [], 0
            for part, group in zip(waves, self.groups, strict=True):
                end = start + len(part.frequencies)
                frequencies[start:end, group] = part.frequencies
                sines = torch.arange(start + part._first_sine, end) + total
                order += [torch.arange(start, end), sines]
                start = end
            scales = torch.cat([part.wave_scales for part in waves])
            self._joined = frequencies, torch.cat(order), scales
        return self._joined

    def covariance(self, X1: Tensor, X2: Tensor | None = None) -> Tensor:
        terms = [
            part.covariance(X1[..., group], None if X2 is None else X2[..., group])
            for part, group in self._parts()
        ]
        return torch.stack(terms).sum(dim=0)

    @property
    def has_residual(self) -> bool:
        return any(part.has_residual for part, _ in self._parts())

    def _residual(self, X1: Tensor, X2: Tensor, Phi1: Tensor, Phi2: Tensor) -> Tensor:
        # Part by part: the residual of Fourier parts is exactly zero.
        terms, start = [], 0
        for part, group in self._parts():
            columns = slice(start, start + part.num_features)
            start = columns.stop
            features = {"Phi1": Phi1[..., columns], "Phi2": Phi2[..., columns]}
            terms.append(part.residual(X1[..., group], X2[..., group], **features))
        return torch.stack(terms).sum(dim=0)

    @property
    def lengthscale(self) -> Tensor:
        return torch.cat([part.lengthscale.reshape(-1) for part, _ in self._parts()])

    @property
    def outputscale(self) -> Tensor:
        return torch.cat([part.outputscale.reshape(-1) for part, _ in self._parts()])

    @property
    def lengthscale_range(self) -> tuple[Tensor, Tensor]:
        ranges = [part.lengthscale_range for part, _ in self._parts()]
        lower, upper = zip(*ranges, strict=True)
        return torch.cat(lower), torch.cat(upper)

    def with_hyperparameters(self, lengthscale: Tensor, outputscale: Tensor) -> AdditiveFeatures:
        lengths = [part.lengthscale.numel() for part, _ in self._parts()]
        scales = [part.outputscale.numel() for part, _ in self._parts()]
        parts = [
            part.with_hyperparameters(ell, scale.reshape(part.outputscale.shape))
            for (part, _), ell, scale in zip(
                self._parts(),
                lengthscale.reshape(-1).split(lengths),
                outputscale.reshape(-1).split(scales),
                strict=True,
            )
        ]
        return AdditiveFeatures(parts, self.groups)

    @property
    def bounded(self) -> bool:
        return any(part.bounded for part, _ in self._parts())

    def check_domain(self, X: Tensor) -> None:
        for part, group in self._parts():
            part.check_domain(X[..., group])

    def to_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for g, (part, group) in enumerate(self._parts()):
            tensors[f"group{g}"] = torch.tensor(group)
            tensors.update(_nested(f"map{g}", part))
        return _tagged("additive", tensors)

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor]) -> AdditiveFeatures:
        count = sum(name.startswith("group") for name in tensors)
        maps = [feature_map_from_tensors(_below(f"map{g}", tensors)) for g in range(count)]
        return cls(maps, [tensors[f"group{g}"].tolist() for g in range(count)])


class InducingFeatures(FeatureMap):
    r"""A support set as a basis: :math:`\phi(x) = L^{-1} k(Z, x)` with :math:`LL^\top = K_{ZZ}`.

    :math:`\phi^\top\phi' = q(x, x')`, the Nyström kernel; `residual` is :math:`k - q`. With it
    `summarize` and `BasisGP` are the PITC approximation, and exact where the support covers the
    data.

    Args:
        kernel: A GPyTorch `RBFKernel` or `MaternKernel`, possibly in a `ScaleKernel`.
        inducing_points: An `S x d` tensor of different points, the support set `Z`.
        jitter: Relative jitter of the factorisation, part of the map's identity. By default the
            smallest that succeeds, at least 1e-10.
    """

    inducing_points: Tensor
    chol: Tensor

    def __init__(
        self,
        kernel: Kernel | StationaryKernel,
        inducing_points: Tensor,
        *,
        jitter: float | None = None,
    ) -> None:
        super().__init__()
        Z = as_double(inducing_points, "inducing_points")
        if Z.dim() != 2 or Z.shape[0] < 1:
            raise BotorchTensorDimensionError(
                f"inducing_points must be `S x d` with S >= 1, got shape {tuple(Z.shape)}."
            )
        check_finite(Z, "inducing_points")
        size = Z.shape[0]
        distinct = torch.unique(Z.detach(), dim=0).shape[0]
        if distinct < size:
            raise InputDataError(
                f"{size - distinct} of the {size} inducing points are exact copies of others: "
                "pass each point once."
            )
        self.kernel = StationaryKernel.from_gpytorch(kernel, Z.shape[-1])
        K = self.kernel(Z)
        what = f"the kernel matrix of the {size} inducing points"
        if jitter is None:
            chol, self.jitter = jittered_cholesky(K, what)
        elif 0 < jitter <= MAX_JITTER:
            eye = torch.eye(size, dtype=K.dtype, device=K.device)
            scale = float(self.kernel.outputscale.detach())
            chol = cholesky(K + jitter * scale * eye, what)
            self.jitter = float(jitter)
        else:
            raise InputDataError(f"jitter must lie in (0, {MAX_JITTER:g}], got {jitter}.")
        # A pivot no larger than the jitter of all points: the other points determine this one.
        floor = size * JITTER * float(self.kernel.outputscale.detach())
        redundant = int((chol.detach().diagonal().square() < floor).sum())
        if redundant:
            warnings.warn(
                f"{redundant} of the {size} inducing points are determined by the others to "
                f"float64 precision: they add cost but no resolution. Use about "
                f"{size - redundant} points, or a shorter length scale.",
                NumericalWarning,
                stacklevel=2,
            )
        self.register_buffer("inducing_points", Z, persistent=False)
        self.register_buffer("chol", chol, persistent=False)
        self.input_dim = Z.shape[-1]
        self.num_features = size

    def _features(self, X: Tensor) -> Tensor:
        cross = self.kernel(X, self.inducing_points)  # batch_shape x q x S
        flat = cross.reshape(-1, self.num_features)
        # phi = L^-1 k(Z, x), as rows: one solve for all points of all batches.
        flat = torch.linalg.solve_triangular(self.chol, flat.mT, upper=False).mT
        return flat.reshape(cross.shape)

    def covariance(self, X1: Tensor, X2: Tensor | None = None) -> Tensor:
        return self.kernel(X1, X2)

    @property
    def has_residual(self) -> bool:
        return True

    @property
    def lengthscale(self) -> Tensor:
        return self.kernel.lengthscale

    @property
    def outputscale(self) -> Tensor:
        return self.kernel.outputscale

    def with_hyperparameters(self, lengthscale: Tensor, outputscale: Tensor) -> InducingFeatures:
        kernel = self.kernel.with_hyperparameters(lengthscale, outputscale)
        try:
            return InducingFeatures(kernel, self.inducing_points, jitter=self.jitter)
        except NumericalError:
            return InducingFeatures(kernel, self.inducing_points)  # larger jitter, with a warning

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = {
            **_kernel_tensors(self.kernel),
            "inducing_points": self.inducing_points,
            "jitter": torch.tensor(self.jitter, dtype=torch.float64),
        }
        return _tagged("inducing", tensors)

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor]) -> InducingFeatures:
        return cls(
            _kernel_from_tensors(tensors),
            tensors["inducing_points"],
            jitter=float(tensors["jitter"]),
        )


class PolynomialFeatures(FeatureMap):
    r"""Quadratic functions, a trend beside a stationary kernel.

    With :math:`u = (x - c) / h`, inputs relative to a public box of centre `c` and half width `h`,

    .. math:: \phi(x) = s [a,\; u_j,\; u_j^2 / \sqrt2,\; u_j u_k]_{j < k}, \qquad
              \phi^\top \phi' = s^2 \bigl[ a^2 + u^\top u' + \tfrac12 (u^\top u')^2 \bigr],

    hence :math:`M = (d + 1)(d + 2) / 2`, and no direction of `u` is preferred. Pairs come row by
    row. The kernel is not stationary: its variance grows away from the centre, and `outputscale` is
    the largest in the box, :math:`s^2 (a^2 + d + d^2/2)`. The box is fixed: `lengthscale` is its
    half width, and fitting a model moves the scale only. Beyond the box the map is the same
    polynomial.

    Args:
        centre: The centre `c`: a tensor of `d` numbers, or one number for all inputs.
        half_width: The half width `h`, positive: a tensor of `d` numbers, or one number.
        constant_scale: The prior standard deviation `a` of the constant, relative to `s`.
        scale: The prior standard deviation `s` of the other weights.
        input_dim: The number `d` of inputs, if `centre` and `half_width` are single numbers.

    Example:
        >>> trend = PolynomialFeatures(0.5, 0.5, scale=0.3, input_dim=2)
        >>> phi = AdditiveFeatures([trend, InducingFeatures(kernel, Z)], [range(2), range(2)])
    """

    centre: Tensor
    half_width: Tensor
    constant_scale: Tensor
    scale: Tensor
    rows: Tensor
    columns: Tensor

    def __init__(
        self,
        centre: float | Tensor,
        half_width: float | Tensor,
        *,
        constant_scale: float | Tensor = 10.0,
        scale: float | Tensor = 1.0,
        input_dim: int | None = None,
    ) -> None:
        super().__init__()
        settings = {
            name: as_double(value, name)
            if isinstance(value, Tensor)
            else torch.tensor(float(value), dtype=torch.float64)
            for name, value in [
                ("centre", centre),
                ("half_width", half_width),
                ("constant_scale", constant_scale),
                ("scale", scale),
            ]
        }
        for name, value in settings.items():
            check_finite(value, name)
        lengths = {value.numel() for value in (settings["centre"], settings["half_width"])}
        d = max(lengths) if input_dim is None else input_dim
        if d < 1 or not lengths <= {1, d} or any(settings[k].dim() > 1 for k in settings):
            raise BotorchTensorDimensionError(
                "centre and half_width must be numbers or tensors of d >= 1 numbers, got shapes "
                f"{tuple(settings['centre'].shape)} and {tuple(settings['half_width'].shape)}, "
                f"input_dim={input_dim}."
            )
        for name in ["constant_scale", "scale"]:
            if settings[name].dim():
                raise BotorchTensorDimensionError(
                    f"{name} must be one number, got shape {tuple(settings[name].shape)}."
                )
        for name in ["half_width", "constant_scale", "scale"]:
            if not bool((settings[name] > 0).all()):
                raise InputDataError(f"{name} must be positive, got {settings[name].tolist()}.")
        for name in ["centre", "half_width"]:
            settings[name] = settings[name].expand(d).clone()
        for name, value in settings.items():
            self.register_buffer(name, value, persistent=False)
        rows, columns = torch.triu_indices(d, d, offset=1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.input_dim = d
        self.num_features = (d + 1) * (d + 2) // 2

    def _relative(self, X: Tensor) -> Tensor:
        return (X.double() - self.centre) / self.half_width

    def _features(self, X: Tensor) -> Tensor:
        U = self._relative(X)
        constant = self.constant_scale.expand(*U.shape[:-1], 1)
        squares = U.square() / math.sqrt(2)
        pairs = U[..., self.rows] * U[..., self.columns]
        return self.scale * torch.cat([constant, U, squares, pairs], dim=-1)

    def covariance(self, X1: Tensor, X2: Tensor | None = None) -> Tensor:
        U1 = self._relative(X1)
        products = U1 @ (U1 if X2 is None else self._relative(X2)).mT
        variance = self.constant_scale.square() + products + products.square() / 2
        return self.scale.square() * variance

    @property
    def lengthscale(self) -> Tensor:
        """The half width of the box."""
        return self.half_width

    @property
    def _corner(self) -> Tensor:
        """The prior variance in a corner of the box, where it is largest, for scale one."""
        d = self.input_dim
        return self.constant_scale.square() + d + d**2 / 2

    @property
    def outputscale(self) -> Tensor:
        """The largest prior variance in the box."""
        return self.scale.square() * self._corner

    @property
    def lengthscale_range(self) -> tuple[Tensor, Tensor]:
        return self.half_width, self.half_width

    def with_hyperparameters(self, lengthscale: Tensor, outputscale: Tensor) -> PolynomialFeatures:
        if not torch.allclose(lengthscale, self.half_width, rtol=1e-9):
            raise InputDataError(
                f"Expected the fixed half width of the box, {self.half_width.tolist()}, got "
                f"{lengthscale.tolist()}: build a new PolynomialFeatures."
            )
        return PolynomialFeatures(
            self.centre,
            lengthscale,
            constant_scale=self.constant_scale,
            scale=(outputscale / self._corner).sqrt(),
        )

    def to_tensors(self) -> dict[str, Tensor]:
        names = ["centre", "half_width", "constant_scale", "scale"]
        return _tagged("polynomial", {name: self.get_buffer(name) for name in names})

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor]) -> PolynomialFeatures:
        return cls(
            tensors["centre"],
            tensors["half_width"],
            constant_scale=tensors["constant_scale"],
            scale=tensors["scale"],
        )


_KINDS: dict[str, type[FeatureMap]] = {
    "random_fourier": RandomFourierFeatures,
    "quadrature_fourier": QuadratureFourierFeatures,
    "kl": KLFeatures,
    "additive": AdditiveFeatures,
    "inducing": InducingFeatures,
    "warped": WarpedFeatures,
    "polynomial": PolynomialFeatures,
}
_Map = TypeVar("_Map", bound=FeatureMap)


def register_feature_map(kind: str) -> Callable[[type[_Map]], type[_Map]]:
    """Register a class of maps for `feature_map_from_tensors` in this process.

    Tensors name a kind, never a class: an unregistered kind is refused, and a registered kind
    builds the decorated class. Every site and every worker process must register it; a decorator
    in the module of the class does so.

    Args:
        kind: The tag of the names in `to_tensors`, ``"kind/name"``: lower-case letters, digits and
            underscores, not used by another class.

    Example:
        >>> @register_feature_map("periodic")
        ... class PeriodicFeatures(FeatureMap): ...
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", kind):
        raise InputDataError(
            "Expected a kind of lower-case letters, digits and underscores, e.g. 'periodic', got "
            f"{kind!r}."
        )

    def register(cls: type[_Map]) -> type[_Map]:
        other = _KINDS.get(kind)
        if not issubclass(cls, FeatureMap):
            raise InputDataError(f"{cls.__name__} is no FeatureMap: derive it from that class.")
        # The same name in the same module is the same class, redefined in a notebook.
        if other is not None and (other.__module__, other.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise InputDataError(
                f"The kind {kind!r} is registered for {other.__qualname__}: choose another name."
            )
        _KINDS[kind] = cls
        return cls

    return register


def feature_map_kinds() -> tuple[type[FeatureMap], ...]:
    """The classes that `feature_map_from_tensors` knows."""
    return tuple(_KINDS.values())


def feature_map_from_tensors(tensors: Mapping[str, Tensor]) -> FeatureMap:
    """Rebuild a map from `FeatureMap.to_tensors`; every tensor is validated as at construction."""
    kinds = {name.split("/", 1)[0] for name in tensors}
    if len(kinds) != 1 or not kinds <= _KINDS.keys():
        raise InputDataError(
            f"Tensors of one feature map must be tagged with one of {sorted(_KINDS)}, got "
            f"{sorted(kinds)}: a map of another class needs register_feature_map on this side too."
        )
    kind = kinds.pop()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InputDataWarning)  # wrong types are refused below
            feature_map = _KINDS[kind]._from_tensors(_below(kind, tensors))
    except KeyError as error:
        raise InputDataError(f"A {kind} feature map lacks the tensor {error}.") from error
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise InputDataError(f"The tensors are no {kind} feature map: {error}") from error
    expected = {name: (t.dtype, t.shape) for name, t in feature_map.to_tensors().items()}
    received = {name: (t.dtype, t.shape) for name, t in tensors.items()}
    if received != expected:
        wrong = sorted(set(expected.items()) ^ set(received.items()), key=str)
        raise InputDataError(
            f"The tensors of a {kind} feature map do not fit together: names, types or shapes "
            f"differ in {[name for name, _ in wrong]}."
        )
    return feature_map


def _tagged(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind}/{name}": value.detach() for name, value in tensors.items()}


def _nested(name: str, part: FeatureMap) -> dict[str, Tensor]:
    return {f"{name}/{key}": value for key, value in part.to_tensors().items()}


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = len(prefix) + 1
    return {name[start:]: t for name, t in tensors.items() if name.startswith(prefix + "/")}


def _kernel_tensors(kernel: StationaryKernel) -> dict[str, Tensor]:
    return {
        # Twice the smoothness as an integer, 0 for the squared exponential.
        "smoothness": torch.tensor(0 if kernel.nu == math.inf else round(2 * kernel.nu)),
        "lengthscale": kernel.lengthscale,
        "outputscale": kernel.outputscale,
        "product": torch.tensor(kernel.product),
    }


def _kernel_from_tensors(tensors: Mapping[str, Tensor]) -> StationaryKernel:
    smoothness = int(tensors["smoothness"])
    return StationaryKernel(
        smoothness / 2 if smoothness else math.inf,
        tensors["lengthscale"],
        tensors["outputscale"],
        product=bool(tensors["product"]),
    )


def _checked_bounds(bounds: Tensor) -> Tensor:
    bounds = as_double(bounds, "bounds")
    if bounds.dim() != 2 or bounds.shape[0] != 2:
        raise BotorchTensorDimensionError(f"bounds must be `2 x d`, got {tuple(bounds.shape)}.")
    check_finite(bounds, "bounds")
    if not bool((bounds[0] < bounds[1]).all()):
        raise InputDataError(f"Lower bounds must lie below upper bounds, got {bounds.tolist()}.")
    return bounds


def _transition(lengthscale: float, tol: float) -> int:
    r"""Degree of Gauss-Hermite quadrature with error `tol` on a unit interval."""
    c = math.sqrt(2 * math.log(1 / tol))
    return math.ceil((1 + c * lengthscale) ** 2 / (4 * lengthscale**2))


def _tensor_grid(
    axes: Sequence[tuple[np.ndarray, np.ndarray]], *, prune: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Folded and pruned tensor product of symmetric one-dimensional rules.

    Of each pair of opposite nodes one is kept with twice the weight; the smallest weights are
    dropped while their total is at most `prune`, and the rest rescaled to sum to one.
    """
    total = math.prod(len(nodes) for nodes, _ in axes)
    if total > MAX_GRID:
        raise UnsupportedError(
            f"A tensor grid of {total} nodes in {len(axes)} dimensions is too large: use "
            "AdditiveFeatures over groups of inputs, RandomFourierFeatures, or a looser tol."
        )
    nodes = np.stack(
        [axis.reshape(-1) for axis in np.meshgrid(*[n for n, _ in axes], indexing="ij")], axis=-1
    )
    weights = axes[0][1]
    for _, axis_weights in axes[1:]:
        weights = np.multiply.outer(weights, axis_weights)
    weights = weights.reshape(-1)
    # Row-major order of symmetric axes puts the opposite of node i at total - 1 - i.
    half = total // 2
    upper = slice(total - half, total)
    nodes, weights, middle = (
        nodes[upper],
        2 * weights[upper],
        (nodes[half : total - half], weights[half : total - half]),
    )
    order = np.argsort(weights, kind="stable")
    dropped = int(np.searchsorted(np.cumsum(weights[order]), prune, side="right"))
    kept = np.sort(order[dropped:])
    nodes = np.concatenate([np.zeros_like(middle[0]), nodes[kept]])
    weights = np.concatenate([middle[1], weights[kept]])
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())


def _grid_extent(nu: float, tol: float) -> tuple[float, float]:
    """The extent of the period beyond the domain, and the cut of the spectrum.

    Both are in units of the length scale; the error of each is at most half of `tol`.
    """
    # Aliases: the kernel at distance r is below (1 + s + s^2/3) exp(-s), s = sqrt(2 nu) r.
    scaled = math.log(2 / tol)
    for _ in range(50):
        scaled = math.log(2 / tol) + math.log(1 + scaled + scaled**2 / 3)
    # Tail: the two-sided mass of a t distribution with 2 nu degrees of freedom beyond w is below
    # constant * w^(-2 nu).
    constant = math.gamma(nu + 0.5) * (2 * nu) ** nu / (math.sqrt(math.pi) * math.gamma(nu) * nu)
    return scaled / math.sqrt(2 * nu), (2 * constant / tol) ** (1 / (2 * nu))


def _grid_amplitudes(kernel: StationaryKernel, frequencies: Tensor) -> Tensor:
    """Normalised spectral weights of a folded uniform grid: a pair counts twice, zero once."""
    weights = torch.where((frequencies == 0).all(dim=-1), 1.0, 2.0).to(frequencies)
    for j in range(kernel.input_dim):
        weights = weights * kernel.spectral_density(frequencies[:, j], j)
    return weights / weights.sum()


def _check_tolerance(tol: float) -> None:
    if not 0 < tol < 1:
        raise InputDataError(f"tol must lie between 0 and 1, got {tol}.")
