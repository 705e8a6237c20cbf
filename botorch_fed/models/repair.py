r"""Totals that noise has made inconsistent, made those of a posterior again.

A noisy gram matrix :math:`G` is symmetric up to rounding but may have negative eigenvalues, and
:math:`I + G` none of a precision. `repair` symmetrises :math:`B = I + G` and raises its eigenvalues
to at least **1**, not 0: then :math:`I \succeq B^{-1} \succeq 0`, so every posterior variance lies
between zero and the prior's. It is post-processing of a private release, hence free.

The noise of the moment makes means wrong by :math:`\|B^{-1}\phi\|` times its standard deviation
:math:`t`, of which :math:`B^{-1}` knows nothing. With `moment_noise_std` the covariance of weights
becomes :math:`B^{-1} + t^2 B^{-2}`, up to the prior's, while their mean stays what it is.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.models.summary import Summary


def repair(total: Summary, *, moment_noise_std: float = 0.0) -> Summary:
    r"""The nearest total with a posterior between certainty and the prior.

    Args:
        total: A noisy total; its local fields are dropped, because they no longer fit.
        moment_noise_std: The standard deviation of the noise in each number of the moment, to be
            added to the uncertainty; 0 adds nothing.

    Returns:
        A total whose gram matrix has no negative eigenvalue.

    Raises:
        InputDataError: The total is not finite.

    Example:
        >>> model = BasisGP.from_summary(repair(noisy), feature_map=phi)
    """
    if not 0 <= moment_noise_std < math.inf:
        raise InputDataError(f"A standard deviation is at least 0, got {moment_noise_std}.")
    if not bool(total.gram.isfinite().all() and total.moment.isfinite().all()):
        raise InputDataError("A total to be repaired must be finite, got NaN or infinity.")
    eigenvalues, Q = torch.linalg.eigh(0.5 * (total.gram + total.gram.mT))
    precision = 1 + eigenvalues.clamp(min=0)
    moment = total.moment
    if moment_noise_std > 0:
        known, precision = precision, _inflated(precision, moment_noise_std)
        moment = Q @ ((precision / known).unsqueeze(-1) * (Q.mT @ moment))
    half = Q * (precision - 1).sqrt().unsqueeze(-2)
    return replace(
        total, gram=half @ half.mT, moment=moment, num_data=None, square=None, log_det=None
    )


def _inflated(precision: torch.Tensor, std: float) -> torch.Tensor:
    """Eigenvalues of the precision whose inverse is larger by the moment's noise."""
    return (precision.square() / (precision + std**2)).clamp(min=1)
