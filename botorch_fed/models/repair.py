r"""Totals that noise has made inconsistent, made those of a posterior again.

A noisy gram matrix :math:`G` is symmetric up to rounding but may have negative eigenvalues, and
:math:`I + G` none of a precision. `repair_total` symmetrises it and raises eigenvalues to `floor`,
0 or more: then :math:`I \succeq (I + G)^{-1} \succeq 0`, so every posterior variance lies between
zero and the prior's. It is post-processing of a private release, hence free.

A `floor` at the height of the noise, `noise_floor`, lets no direction count as known less well than
noise alone would say: where noise drowns the data the mean is shrunk, and the posterior too narrow.
A `shift`, `noise_shift`, adds a multiple of the identity with which the noisy gram is positive with
high probability, as the regret proof of [Dubey2021]_ has it: it needs one Cholesky factor in the
place of eigenvectors and biases well known directions as well.

The noise of the moment, of standard deviation :math:`t` in each number, is one more noise of the
observation: given weights the moment is :math:`N(Gw, G)` without it and :math:`N(Gw, G + t^2 I)`
with it, so that the posterior is that of the total

.. math:: G' = G (G + t^2 I)^{-1} G, \qquad b' = G (G + t^2 I)^{-1} b.

Without `moment_noise_std` directions in which noise drowns the data make large and certain errors,
unless a floor shrinks them.

.. [Dubey2021] A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
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
    r"""The nearest total with a posterior between certainty and the prior.

    Args:
        total: A noisy total; its local fields are dropped, because they no longer fit.
        moment_noise_std: The standard deviation of the noise in each number of the moment.
        floor: The least eigenvalue of the gram matrix, e.g. ``noise_floor(…) / noise_var``.
        shift: In the place of a floor, what is added to all eigenvalues, e.g.
            ``noise_shift(…) / noise_var``. That they are positive then is left to whoever
            factorises.

    Returns:
        A total whose gram matrix has no eigenvalue below the floor.

    Raises:
        InputDataError: The total is not finite.

    Example:
        >>> model = BasisGP.from_summary(repair_total(noisy), feature_map=phi)
    """
    for name, value in (("moment_noise_std", moment_noise_std), ("floor", floor), ("shift", shift)):
        if not 0 <= value < math.inf:
            raise InputDataError(f"{name} is at least 0 and finite, got {value}.")
    if shift > 0 and (floor > 0 or moment_noise_std > 0):
        raise InputDataError(
            "A shift takes the place of a floor and of moment_noise_std, which need eigenvectors: "
            "give one or the other."
        )
    if not bool(total.gram.isfinite().all() and total.moment.isfinite().all()):
        raise InputDataError("A total to be repaired must be finite, got NaN or infinity.")
    gram = 0.5 * (total.gram + total.gram.mT)
    if shift > 0:
        gram = gram + shift * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return _repaired(total, gram, total.moment)
    eigenvalues, Q = eigh(gram, "a noisy total")
    spectrum = eigenvalues.clamp(min=floor)
    moment = total.moment
    if moment_noise_std > 0:
        share = spectrum / (spectrum + moment_noise_std**2)  # of the moment that is not noise
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
    :math:`h = 2` predicts best, 4 loses least regret.

    Args:
        noise_std: :math:`s`, of the noise in each number of the svec of the matrix.
        num_features: Its size :math:`m`.
        height: :math:`h`.
    """
    _check_noise(noise_std, num_features)
    if not 0 <= height < math.inf:
        raise InputDataError(f"The height of a floor is at least 0 and finite, got {height}.")
    return height * noise_std * math.sqrt(num_features / 2)


def noise_norm_bound(
    noise_std: float, num_features: int, *, horizon: int, failure: float = 0.1
) -> float:
    r"""What the norm of the noise in a :math:`\sum \phi\phi^\top` exceeds in none of `T` rounds.

    :math:`\Upsilon = \sigma(2\sqrt m + 2\sqrt{\ln(2T/\zeta)})`, :math:`\sigma = s/\sqrt2`,
    with probability :math:`1 - \zeta/T` in each round. A third of what Lemma 3 of [Dubey2021]_ has
    at `m = 50`.

    Args:
        noise_std: :math:`s`, of the noise in each number of the svec of the matrix.
        num_features: Its size :math:`m`.
        horizon: :math:`T`.
        failure: :math:`\zeta`.
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
        noise_std: As there.
        num_features: As there.
        horizon: As there.
        failure: As there.
    """
    return 2 * noise_norm_bound(noise_std, num_features, horizon=horizon, failure=failure)


def _check_noise(noise_std: float, num_features: int) -> None:
    if not (0 <= noise_std < math.inf and num_features >= 1):
        raise InputDataError(
            "noise_std must be at least 0 and finite and num_features at least 1, got "
            f"{noise_std} and {num_features}."
        )
