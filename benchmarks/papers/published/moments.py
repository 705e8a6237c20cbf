r"""The moments accountant of [Abadi2016]_, by which [Dai2021]_ prints its losses.

.. [Abadi2016] M. Abadi et al. Deep learning with differential privacy. CCS 2016.
.. [Dai2021] Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
   optimization with distributed exploration. NeurIPS 2021.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

MAX_ORDER = 255  # of a moment


def moments_epsilon(
    *, sampling_rate: float, noise_multiplier: float, num_releases: int, delta: float
) -> float:
    r"""What equal releases cost together under zero-out, by moments of integer orders.

    .. math:: \epsilon = \min_\lambda \frac1\lambda \Bigl(\ln\frac1\delta + T \ln
        \sum_k \binom{\lambda+1}{k} (1-q)^{\lambda+1-k} q^k e^{(k^2-k)/(2z^2)}\Bigr)

    Args:
        sampling_rate: `q` of Poisson sampling; 1 is everyone.
        noise_multiplier: `z`, noise over the norm of one contribution.
        num_releases: `T`.
        delta: The probability beside epsilon.
    """
    losses = (
        (num_releases * _log_moment(sampling_rate, noise_multiplier, order + 1) - math.log(delta))
        / order
        for order in range(1, MAX_ORDER + 1)
    )
    return max(min(losses), 0.0) if num_releases else 0.0


def _log_moment(rate: float, noise: float, power: int) -> float:
    if rate == 1:
        return (power**2 - power) / (2 * noise**2)
    k = np.arange(power + 1)
    terms = gammaln(power + 1) - gammaln(k + 1) - gammaln(power - k + 1)
    terms += (power - k) * math.log1p(-rate) + k * math.log(rate)
    terms += (k**2 - k) / (2 * noise**2)
    return float(logsumexp(terms))
