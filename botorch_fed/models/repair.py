r"""Totals that noise has made inconsistent, made those of a posterior again.

A noisy gram matrix :math:`G` is symmetric up to rounding but may have negative eigenvalues, and
:math:`I + G` none of a precision. `repair_total` symmetrises :math:`B = I + G`, raises eigenvalues
to **1** at least, not 0: then :math:`I \succeq B^{-1} \succeq 0`, so every posterior variance lies
between zero and the prior's. It is post-processing of a private release, hence free.

The noise of the moment, of standard deviation :math:`t` in each number, is one more noise of the
observation: given weights the moment is :math:`N(Gw, G)` without it and :math:`N(Gw, G + t^2 I)`
with it, so that the posterior is that of the total

.. math:: G' = G (G + t^2 I)^{-1} G, \qquad b' = G (G + t^2 I)^{-1} b.

Without `moment_noise_std` directions in which noise drowns the data make large and certain errors.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.models.summary import Summary


def repair_total(total: Summary, *, moment_noise_std: float = 0.0) -> Summary:
    r"""The nearest total with a posterior between certainty and the prior.

    Args:
        total: A noisy total; its local fields are dropped, because they no longer fit.
        moment_noise_std: The standard deviation of the noise in each number of the moment.

    Returns:
        A total whose gram matrix has no negative eigenvalue.

    Raises:
        InputDataError: The total is not finite.

    Example:
        >>> model = BasisGP.from_summary(repair_total(noisy), feature_map=phi)
    """
    if not 0 <= moment_noise_std < math.inf:
        raise InputDataError(f"A standard deviation is at least 0, got {moment_noise_std}.")
    if not bool(total.gram.isfinite().all() and total.moment.isfinite().all()):
        raise InputDataError("A total to be repaired must be finite, got NaN or infinity.")
    eigenvalues, Q = torch.linalg.eigh(0.5 * (total.gram + total.gram.mT))
    known = eigenvalues.clamp(min=0)
    moment = total.moment
    if moment_noise_std > 0:
        share = known / (known + moment_noise_std**2)  # of the moment that is not noise
        known = known * share
        moment = Q @ (share.unsqueeze(-1) * (Q.mT @ moment))
    half = Q * known.sqrt().unsqueeze(-2)
    return replace(
        total, gram=half @ half.mT, moment=moment, num_data=None, square=None, log_det=None
    )
