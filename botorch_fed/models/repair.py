r"""Repair of noisy totals, so that they give a posterior.

A noisy gram matrix :math:`G` is symmetric up to rounding but may have negative eigenvalues, so that
:math:`I + G` may be no precision. `repair_total` symmetrises it and raises eigenvalues to `floor`,
0 or more: then :math:`I \succeq (I + G)^{-1} \succeq 0`, and every posterior variance lies between
zero and the prior's. The repair is post-processing of a private release, without a privacy cost.

A `floor` at the level of the noise, `noise_floor`, bounds the information about every direction
from below by that of the noise. In directions dominated by noise it shrinks the mean, and the
posterior is too narrow. A `shift`, `noise_shift`, adds a multiple of the identity with which the
noisy gram is positive with high probability, as in the regret proof of [Dubey2021]_. It needs one
Cholesky factor instead of eigenvectors, and also biases directions with much data.

The noise of the moment, of standard deviation :math:`t` in each number, is an additional
observation noise: given the weights the moment is :math:`N(Gw, G)` without it and
:math:`N(Gw, G + t^2 I)` with it, so that the posterior is that of the total

.. math:: G' = G (G + t^2 I)^{-1} G, \qquad b' = G (G + t^2 I)^{-1} b.

Without `moment_noise_std` and without a floor, directions dominated by noise have large errors and
small variances.

References:
    * [Dubey2021]_ A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
      AISTATS 2021.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.models.numerics import eigh
from botorch_fed.models.summary import Summary


def repair_total(
    total: Summary, *, moment_noise_std: float = 0.0, floor: float = 0.0, shift: float = 0.0
) -> Summary:
    r"""A total whose posterior variances lie between zero and the prior's.

    Args:
        total: A noisy total; its local fields are dropped, because they no longer fit.
        moment_noise_std: The standard deviation of the noise in each number of the moment.
        floor: The least eigenvalue of the gram matrix, e.g. ``noise_floor(…) / noise_var``.
        shift: A number added to all eigenvalues instead of a floor, e.g.
            ``noise_shift(…) / noise_var``. The sums are not checked to be positive; a later
            factorisation checks them.

    Returns:
        A total whose gram matrix has no eigenvalue below the floor.

    Raises:
        InputDataError: The total is not finite.

    Example:
        >>> model = BasisGP.from_summary(repair_total(noisy), feature_map=phi)
    """
    for name, value in (("moment_noise_std", moment_noise_std), ("floor", floor), ("shift", shift)):
        if not 0 <= value < math.inf:
            raise InputDataError(f"{name} must be at least 0 and finite, got {value}.")
    if shift > 0 and (floor > 0 or moment_noise_std > 0):
        raise InputDataError(
            "Expected a shift, or a floor and moment_noise_std, which need eigenvectors, got both: "
            "leave one of them out."
        )
    if not bool(total.gram.isfinite().all() and total.moment.isfinite().all()):
        raise InputDataError("Expected a finite total, got NaN or infinity.")
    gram = 0.5 * (total.gram + total.gram.mT)
    if shift > 0:
        gram = gram + shift * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return _repaired(total, gram, total.moment)
    eigenvalues, Q = eigh(gram, "a noisy total")
    spectrum = eigenvalues.clamp(min=floor)
    moment = total.moment
    if moment_noise_std > 0:
        share = spectrum / (spectrum + moment_noise_std**2)  # share of the signal in the moment
        spectrum = spectrum * share
        moment = Q @ (share.unsqueeze(-1) * (Q.mT @ moment))
    half = Q * spectrum.sqrt().unsqueeze(-2)
    return _repaired(total, half @ half.mT, moment)


def _repaired(total: Summary, gram: Tensor, moment: Tensor) -> Summary:
    return replace(total, gram=gram, moment=moment, num_data=None, square=None, log_det=None)


def noise_floor(noise_std: float, num_features: int, *, height: float = 4.0) -> float:
    r"""A floor for the eigenvalues of a noisy :math:`\sum \phi\phi^\top`.

    :math:`h\,\sigma\sqrt m` with :math:`\sigma = s/\sqrt2`, the standard deviation of an
    off-diagonal number: the noise alone has a norm of about :math:`2\sigma\sqrt m`. The height
    :math:`h = 2` has the best predictions, 4 the least regret.

    Args:
        noise_std: Standard deviation :math:`s` of the noise in each number of the matrix's svec.
        num_features: Size :math:`m` of the matrix.
        height: Factor :math:`h`.
    """
    _check_noise(noise_std, num_features)
    if not 0 <= height < math.inf:
        raise InputDataError(f"height must be at least 0 and finite, got {height}.")
    return height * noise_std * math.sqrt(num_features / 2)


def noise_norm_bound(
    noise_std: float, num_features: int, *, horizon: int, failure: float = 0.1
) -> float:
    r"""An upper bound on the norm of the noise in :math:`\sum \phi\phi^\top` in all `T` rounds.

    :math:`\Upsilon = \sigma(2\sqrt m + 2\sqrt{\ln(2T/\zeta)})`, :math:`\sigma = s/\sqrt2`,
    with probability :math:`1 - \zeta/T` in each round. At `m = 50` it is a third of the bound in
    Lemma 3 of [Dubey2021]_.

    Args:
        noise_std: Standard deviation :math:`s` of the noise in each number of the matrix's svec.
        num_features: Size :math:`m` of the matrix.
        horizon: Number :math:`T` of rounds.
        failure: Probability :math:`\zeta` of failure.
    """
    _check_noise(noise_std, num_features)
    if not (horizon >= 1 and 0 < failure < 1):
        raise InputDataError(
            f"horizon must be at least 1 and failure in (0, 1), got {horizon} and {failure}."
        )
    sigma = noise_std / math.sqrt(2)
    return sigma * (2 * math.sqrt(num_features) + 2 * math.sqrt(math.log(2 * horizon / failure)))


def noise_shift(
    noise_std: float, num_features: int, *, horizon: int, failure: float = 0.1
) -> float:
    r""":math:`2\Upsilon` of `noise_norm_bound`: with it, :math:`\Upsilon \preceq H + 2\Upsilon I
    \preceq 3\Upsilon` for the noise `H`.

    Args:
        noise_std: As in `noise_norm_bound`.
        num_features: As in `noise_norm_bound`.
        horizon: As in `noise_norm_bound`.
        failure: As in `noise_norm_bound`.
    """
    return 2 * noise_norm_bound(noise_std, num_features, horizon=horizon, failure=failure)


def _check_noise(noise_std: float, num_features: int) -> None:
    if not (0 <= noise_std < math.inf and num_features >= 1):
        raise InputDataError(
            "noise_std must be at least 0 and finite and num_features at least 1, got "
            f"{noise_std} and {num_features}."
        )
