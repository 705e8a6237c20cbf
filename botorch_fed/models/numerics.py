r"""float64 modules, and factorisations with clear errors.

At :math:`\sigma^2 = 10^{-6}` the posterior precision of a hundred features has condition number
:math:`10^7`: float32 loses 15-36 % of the mean. All of `models` is float64, modules stay in float64
when cast, no matrix is inverted, and no matrix is replaced when its factorisation fails.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Self

import torch
from botorch.exceptions.errors import InputDataError
from botorch.exceptions.warnings import InputDataWarning
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from torch.nn import Module

from botorch_fed.errors import NumericalError

# Relative to the largest diagonal entry; multiplied by ten on failure.
JITTER = 1e-10
MAX_JITTER = 1e-6


def as_double(value: Tensor, name: str) -> Tensor:
    """A float64 tensor; lower precision is promoted with a warning, other types are refused."""
    if not isinstance(value, Tensor):
        raise InputDataError(f"{name} must be a torch.Tensor, got {type(value).__name__}.")
    if value.dtype == torch.float64:
        return value
    if not value.is_floating_point():
        raise InputDataError(
            f"{name} must be a float64 tensor, got {value.dtype}: call `.double()` on it."
        )
    warnings.warn(
        f"{name} is {value.dtype} and was promoted to float64: posterior precisions are too "
        "ill-conditioned for less. Pass float64 data to silence this warning.",
        InputDataWarning,
        stacklevel=3,
    )
    return value.double()


def check_finite(value: Tensor, name: str) -> None:
    """Raise `InputDataError` if a tensor has NaN or infinite entries."""
    finite = torch.isfinite(value)
    if not bool(finite.all()):
        bad = int((~finite).sum())
        nans = int(torch.isnan(value).sum())
        raise InputDataError(
            f"{name} (shape {tuple(value.shape)}) has {nans} NaN and {bad - nans} infinite "
            "entries: drop or impute those rows first."
        )


def cholesky(A: Tensor, what: str) -> Tensor:
    """Lower Cholesky factor of `batch_shape x n x n`, or `NumericalError` naming the condition."""
    L, info = torch.linalg.cholesky_ex(A)
    if not bool(info.any()):
        return L
    finite = torch.isfinite(A)
    if not bool(finite.all()):
        raise NumericalError(
            f"Cannot factorise {what}: {int((~finite).sum())} of its {A.numel()} entries are NaN "
            "or infinite. Check the data, the noise variance and the summaries behind it."
        )
    eigenvalues, _ = eigh(A.detach(), what)
    low, high = float(eigenvalues.min()), float(eigenvalues.max())
    condition = f"{high / low:.1e}" if low > 0 else "infinite"
    raise NumericalError(
        f"Cannot factorise {what} ({A.shape[-2]} x {A.shape[-1]}): it is not positive definite in "
        f"float64. Eigenvalues reach from {low:.3e} to {high:.3e}, condition {condition}. "
        "Raise the noise variance, or remove duplicate points or features."
    )


def eigh(A: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of symmetric `batch_shape x n x n`, or `NumericalError`."""
    try:
        values, vectors = torch.linalg.eigh(A)
    except RuntimeError as error:  # LinAlgError, whose name torch does not export
        raise NumericalError(
            f"Cannot compute the eigenvalues of {what} ({A.shape[-2]} x {A.shape[-1]}): its "
            "entries differ too much in size, or are not finite. Check the summaries behind it."
        ) from error
    return values, vectors


def jittered_cholesky(A: Tensor, what: str) -> tuple[Tensor, float]:
    """Cholesky factor of `A` plus the smallest sufficient jitter, and that relative jitter."""
    scale = float(A.detach().diagonal(dim1=-2, dim2=-1).max())
    jitter = JITTER
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    while True:
        try:
            L = cholesky(A + jitter * scale * eye, what)
        except NumericalError:
            if 10 * jitter > MAX_JITTER * (1 + 1e-9):
                raise
            jitter *= 10
            continue
        if jitter > JITTER:
            warnings.warn(
                f"{what} needed a relative jitter of {jitter:.0e} instead of {JITTER:.0e}: some "
                "points are too close for its length scale. Use fewer points, or a shorter length "
                "scale.",
                NumericalWarning,
                stacklevel=3,
            )
        return L, jitter


def solve_rows(L: Tensor, rows: Tensor, *, upper: bool = False) -> Tensor:
    r"""`L^-1 v` for every row `v`, for a batch of factors and several batches of rows.

    Batch dimensions that the factor lacks become right-hand sides of one solve, without copies of
    the factor.

    Args:
        L: A `factor_batch x M x M` triangular factor.
        rows: A `batch_shape x q x M` tensor.
        upper: Whether the factor is upper triangular.

    Returns:
        A `broadcast(batch_shape, factor_batch) x q x M` tensor.
    """
    if L.dim() == 2:
        flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
        return torch.linalg.solve_triangular(L, flat.mT, upper=upper).mT.reshape(rows.shape)
    dims = max(L.dim(), rows.dim()) - 2
    factor_batch = (1,) * (dims + 2 - L.dim()) + L.shape[:-2]
    row_batch = (1,) * (dims + 2 - rows.dim()) + rows.shape[:-2]
    separate = [i for i in range(dims) if factor_batch[i] != 1]
    shared = [i for i in range(dims) if factor_batch[i] == 1]
    sizes = [factor_batch[i] if i in separate else row_batch[i] for i in range(dims)]
    q, M = rows.shape[-2:]
    order = [*separate, *shared, dims, dims + 1]
    stacked = rows.reshape(*row_batch, q, M).expand(*sizes, q, M).permute(order)
    stacked_shape = stacked.shape
    batch = [sizes[i] for i in separate]
    count = q * math.prod(sizes[i] for i in shared)
    columns = stacked.reshape(*batch, count, M).mT
    solved = torch.linalg.solve_triangular(L.reshape(*batch, M, M), columns, upper=upper).mT
    inverse = sorted(range(dims + 2), key=order.__getitem__)
    return solved.reshape(stacked_shape).permute(inverse)


def keep_double(fn: Callable[[Tensor], Tensor], name: str) -> Callable[[Tensor], Tensor]:
    """The function that `Module.to` applies to tensors, without a change to lower precision."""

    def apply(value: Tensor) -> Tensor:
        moved = fn(value)
        if moved.dtype == torch.float64 or not value.is_floating_point():
            return moved
        warnings.warn(
            f"{name} stays in float64; only the device was changed.",
            InputDataWarning,
            stacklevel=4,
        )
        return value.to(moved.device)

    return apply


class Float64Module(Module):
    """A module that stays in float64 on every device."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(keep_double(fn, type(self).__name__), recurse)
