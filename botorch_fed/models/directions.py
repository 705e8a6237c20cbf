r"""Principal directions that are the same on every machine.

A factorisation determines singular vectors up to their signs, and up to rotations where singular
values are equal. LAPACK's choice depends on its build, the processor and the number of threads.
Here the basis is a function of the subspaces alone, in two steps:

1. `canonical`: singular values that differ by no more than `TIE` of the largest share a subspace.
   With its projector `P` and `G` public generic numbers, one column for each direction, its basis
   is `Q` of :math:`PG = QR` with a positive diagonal of `R`. For a single vector this fixes the
   sign of its inner product with a generic vector, which no symmetry makes zero. The basis for
   fewer directions is the beginning of the basis for more; a cut through a subspace keeps the first
   of its basis, and every other choice explains as much.
2. `reproducible`: entries are rounded to multiples of `GRID` and made orthonormal again by
   operations that IEEE 754 fixes bit by bit, in a fixed order.

Only the last bits of the singular vectors depend on the machine. If an entry is within them of the
middle between two multiples of `GRID`, the results differ by `GRID`: under the settings of MKL and
of OpenBLAS, about once in a hundred thousand bases. Rounding to `GRID` costs about `GRID` squared
per entry, in units of the explained variance.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from botorch_fed.rng import generator

TIE = 1e-8
GRID = 2.0**-14


def right_singular_vectors(Phi: Tensor) -> tuple[Tensor, Tensor]:
    r"""All `M` singular values of an `n x M` matrix, the largest first, and `M x M` vectors.

    They are not computed from the gram matrix: squaring would lose half of the digits of small
    values and of their vectors.
    """
    if Phi.shape[0] > Phi.shape[1]:
        Phi = torch.linalg.qr(Phi, mode="r").R
    _, nonzero, rows = torch.linalg.svd(Phi, full_matrices=True)
    values = nonzero.new_zeros(Phi.shape[1])
    values[: len(nonzero)] = nonzero
    return values, rows.mT


def subspaces(values: Tensor) -> list[int]:
    """First index of every subspace of equal values, then the number of values."""
    gaps = values[:-1] - values[1:]
    cuts = (gaps > TIE * values[0]).nonzero().flatten() + 1
    return [0, *cuts.tolist(), len(values)]


def canonical(values: Tensor, vectors: Tensor, count: int) -> Tensor:
    r"""The first `count` directions, independent of the factorisation's signs and rotations.

    Args:
        values: The `M` singular values or eigenvalues, the largest first.
        vectors: Their vectors, orthonormal columns of an `m x M` tensor.
        count: The number of directions.

    Returns:
        An `m x count` tensor with orthonormal columns.
    """
    generic = generator(0, "directions").uniform(count, len(vectors)).mT.to(vectors) - 0.5
    blocks = []
    for start, end in pairwise(subspaces(values)):
        if start < count:
            Q = vectors[:, start:end]
            blocks.append(_orthonormal(Q @ (Q.mT @ generic[:, start:end])))
    return torch.cat(blocks, dim=-1)


def reproducible(vectors: Tensor) -> Tensor:
    """Columns rounded to multiples of `GRID`, then made orthonormal to the last bit but one."""
    rounded = np.round(vectors.detach().cpu().numpy() / GRID) * GRID
    # Products are multiples of 2^-28 and partial sums are hardly above one: sums are exact in any
    # order. Gaussian elimination on [gram; V] leaves V L^-T below gram = L L'.
    work = np.concatenate([rounded.T @ rounded, rounded])
    count = rounded.shape[1]
    for j in range(count):
        column = work[:, j] / np.sqrt(work[j, j])
        work[:, j] = column
        work[:, j + 1 :] -= np.multiply.outer(column, column[j + 1 : count])
    return torch.from_numpy(np.ascontiguousarray(work[count:])).to(vectors)


def _orthonormal(A: Tensor) -> Tensor:
    """`Q` of the factorisation of `A` in which the diagonal of `R` is positive."""
    Q, R = torch.linalg.qr(A)
    return torch.where(R.diagonal() < 0, -Q, Q)
