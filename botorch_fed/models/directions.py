r"""Principal directions that are the same on every machine.

A factorisation leaves the sign of every singular vector open, and where singular values are equal
any rotation of their vectors. Which of them LAPACK returns depends on its build, on the processor
and on the number of threads, so that a basis made of them would belong to one machine. Here it is
a function of the subspaces alone, in two steps:

1. `canonical`: singular values that differ by no more than `TIE` of the largest share a subspace.
   With its projector `P` and `G` public generic numbers, one column for each direction, its basis
   is `Q` of :math:`PG = QR` with a positive diagonal of `R`. For a single vector this is the sign
   of its inner product with a generic vector, which no symmetry makes zero. The basis for a
   smaller number of directions is the beginning of that for a larger one; a cut through a subspace
   keeps the first of its basis, and any other choice would have explained as much.
2. `reproducible`: entries are rounded to multiples of `GRID` and made orthonormal again by
   operations that IEEE 754 fixes bit by bit in an order that is written down.

What is left to the machine is the last bits of the singular vectors. Where one of their entries is
that close to the middle between two multiples of `GRID` the results differ by `GRID`: for the
default private features of one to six dimensions together, by what the settings of MKL and of
OpenBLAS change, about one time in ten thousand. The step from `GRID` away from the singular vectors
costs about `GRID` squared for each of their entries, in units of the explained variance.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from botorch_fed.rng import generator

TIE = 1e-8
GRID = 2.0**-20


def right_singular_vectors(Phi: Tensor) -> tuple[Tensor, Tensor]:
    r"""All `M` singular values of an `n x M` matrix, the largest first, and `M x M` vectors.

    The singular values of the matrix and not the eigenvalues of its gram matrix: of those that are
    small, squaring would lose half of the digits, and of their vectors as many.
    """
    if Phi.shape[0] > Phi.shape[1]:
        Phi = torch.linalg.qr(Phi, mode="r").R
    _, found, rows = torch.linalg.svd(Phi, full_matrices=True)
    values = found.new_zeros(Phi.shape[1])
    values[: len(found)] = found
    return values, rows.mT


def subspaces(values: Tensor) -> list[int]:
    """Where subspaces of equal values begin, and the number of values at the end."""
    gaps = values[:-1] - values[1:]
    cuts = (gaps > TIE * values[0]).nonzero().flatten() + 1
    return [0, *cuts.tolist(), len(values)]


def canonical(values: Tensor, vectors: Tensor, count: int) -> Tensor:
    r"""The first `count` directions, whatever signs and rotations a factorisation has chosen.

    Args:
        values: The `M` singular values or eigenvalues, the largest first.
        vectors: Theirs, orthonormal columns of an `m x M` tensor.
        count: How many are wanted.

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
    """Orthonormal columns to multiples of `GRID`, and orthonormal again to the last bit but one."""
    rounded = np.round(vectors.detach().cpu().numpy() / GRID) * GRID
    # Products are multiples of 2^-40 and no partial sum exceeds one by much: no order of additions
    # rounds anything. Gauss on [gram; V] leaves V L^-T below gram = L L'.
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
