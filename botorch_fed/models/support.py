r"""Support sets: the inducing points of the sparse global model.

A support set :math:`S` is known to all parties, so that choosing it from data is a release of these
data. `sobol_support` is public: it depends on a seed only.

Scrambled Sobol points by a published recipe. The unscrambled sequence is the one of Joe and Kuo's
direction numbers [Joe2008]_, 30 bits. In every dimension the bits (highest first) are multiplied by
a random lower triangular binary matrix with unit diagonal and a random vector is added, modulo two
[Matousek1998]_; matrices and then shifts are ``uniform < 1/2`` of `generator(seed, "support",
"sobol")`. A point is the middle of its cell of width 2^-30.

References:
    * [Joe2008]_ S. Joe, F. Y. Kuo. Constructing Sobol sequences with better two-dimensional
      projections. SIAM Journal on Scientific Computing 30, 2008.
    * [Matousek1998]_ J. Matoušek. On the L2-discrepancy for anchored boxes. Journal of Complexity
      14, 1998.
"""

from __future__ import annotations

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor
from torch.quasirandom import SobolEngine

from botorch_fed.models.numerics import as_double, check_finite
from botorch_fed.rng import generator

_BITS = 30  # of the direction numbers


def sobol_support(dim: int, size: int, *, seed: int = 0, bounds: Tensor | None = None) -> Tensor:
    r"""Scrambled Sobol points: a support set that depends on no data.

    The points do not depend on the versions of libraries. A larger set of the same seed begins with
    the smaller one.

    Args:
        dim: The number of dimensions `d`.
        size: The number of points.
        seed: A public seed.
        bounds: A `2 x d` tensor of bounds; default the unit cube.

    Returns:
        A `size x d` tensor of distinct points, float64.
    """
    if not 1 <= dim <= SobolEngine.MAXDIM:
        raise InputDataError(f"dim must lie in 1..{SobolEngine.MAXDIM}, got {dim}.")
    if not 1 <= size <= 2**_BITS:
        raise InputDataError(f"A support set needs 1..2^{_BITS} points, got {size}.")
    lower, upper = _box(dim, bounds)
    plain = SobolEngine(dim, scramble=False).draw(size, dtype=torch.float64)
    integers = (plain * 2.0**_BITS).round().long()
    places = torch.arange(_BITS - 1, -1, -1)  # highest bit first
    bits = ((integers.unsqueeze(-1) >> places) & 1).double()  # size x d x 30
    stream = generator(seed, "support", "sobol")
    matrix = (stream.uniform(dim, _BITS, _BITS) < 0.5).double().tril(diagonal=-1)
    matrix = matrix + torch.eye(_BITS, dtype=torch.float64)
    shift = (stream.uniform(dim, _BITS) < 0.5).double()
    scrambled = (torch.einsum("dij,ndj->ndi", matrix, bits) + shift) % 2
    cells = scrambled @ 2.0 ** places.double()
    return lower + (cells + 0.5) * 2.0**-_BITS * (upper - lower)


def _box(dim: int, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds, `d` each."""
    if bounds is None:
        return torch.zeros(dim, dtype=torch.float64), torch.ones(dim, dtype=torch.float64)
    bounds = as_double(bounds, "bounds")
    check_finite(bounds, "bounds")
    if bounds.shape != (2, dim) or not bool((bounds[0] < bounds[1]).all()):
        raise InputDataError(
            f"bounds must be a 2 x {dim} tensor of lower and larger upper bounds, got shape "
            f"{tuple(bounds.shape)}."
        )
    return bounds[0], bounds[1]
