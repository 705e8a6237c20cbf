r"""The published noise of private GP bandits [Dubey2021]_: for replication, no guarantee.

`paper_local_noise` are the constants of Lemma 5. They take the sensitivity of each *element* for
that of the vector (under replacement the matrix moves by :math:`\sqrt2` and the vector by
:math:`2Y`) and a formula that is proved for :math:`\alpha < 1` only. At
:math:`\alpha = 10, \beta = 0.1` their matrix has 0.76 and their vector 0.59 of the noise that the
claimed :math:`(\alpha/2, \beta/2)` of each takes.

.. [Dubey2021] A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
   AISTATS 2021.
"""

from __future__ import annotations

import math

from botorch.exceptions.errors import InputDataError


def paper_prefix_noise(alpha: float, beta: float, horizon: int, outcome_bound: float) -> float:
    r"""The published standard deviation of a node's noise, for replication only: no guarantee.

    :math:`\sigma^2 = 16\, n L^2 \ln(10/\beta)^2/\alpha^2` of the proof of Lemma 2 of
    [Dubey2021]_, with :math:`L^2 = 1 + y^2` and :math:`n = 1 + \lceil\log_2 T\rceil`. The
    sensitivity is :math:`L^2` and enters unsquared: too little noise for large outcomes.

    Args:
        alpha: Their :math:`\varepsilon`.
        beta: Their :math:`\delta`.
        horizon: The number `T` of rounds.
        outcome_bound: A bound on absolute outcomes.
    """
    if not (alpha > 0 and 0 < beta < 1 and horizon >= 1 and 0 < outcome_bound < math.inf):
        raise InputDataError(
            "alpha, horizon and outcome_bound must be positive and beta in (0, 1), got "
            f"{alpha}, {horizon}, {outcome_bound} and {beta}."
        )
    nodes = 1 + math.ceil(math.log2(horizon))
    return 4 * math.sqrt(nodes * (1 + outcome_bound**2)) * math.log(10 / beta) / alpha


def paper_local_noise(alpha: float, beta: float, outcome_bound: float) -> tuple[float, float]:
    r"""The noise of Lemma 5 of [Dubey2021]_, as published: for replication, no guarantee.

    .. math:: \sigma_X = \tfrac2\alpha \sqrt{2\ln\tfrac{2.5}\beta}, \qquad
              \sigma_u = \tfrac{2Y}\alpha \sqrt{2\ln\tfrac5\beta}.

    The lemma's claim is false where this is below the noise of the Gaussian mechanism, and at
    :math:`\alpha = 10, \beta = 0.1` the joint release delivers :math:`\alpha \ge 11` only. The
    statement of the lemma has :math:`\sigma_u^2` where its proof has :math:`\sigma_u`; this is the
    proof's, with the bound `Y` on outcomes in the place of its bound in high probability.

    Args:
        alpha: The claimed epsilon of the joint release.
        beta: The claimed delta.
        outcome_bound: :math:`Y`.

    Returns:
        The standard deviations of the entries of the upper triangle of the matrix, and of the
        vector :math:`y a`.
    """
    if not (0 < alpha < math.inf and 0 < beta < 1 and 0 < outcome_bound < math.inf):
        raise InputDataError(
            "alpha and outcome_bound must be positive and finite and beta in (0, 1), got "
            f"{alpha}, {outcome_bound} and {beta}."
        )
    matrix = 2 / alpha * math.sqrt(2 * math.log(2.5 / beta))
    return matrix, 2 * outcome_bound / alpha * math.sqrt(2 * math.log(5 / beta))


def doubling_noise(horizon: int) -> float:
    """How many times the noise a running sum has if horizons are doubled and sums are kept.

    A record is in one horizon of 1, 2, 4, … only, so that all have the whole privacy budget; what
    the earlier ones have released stays in the sum, with its noise. Both sums have the square root
    as their factor.

    Args:
        horizon: How many records the sum has in the end, one less than a power of two.
    """
    if horizon < 1 or horizon & (horizon + 1):
        raise InputDataError(f"Expected a horizon of 1, 3, 7, 15, …, got {horizon}.")
    sizes = [2**k for k in range(horizon.bit_length())]
    return math.hypot(*map(_last_noise, sizes)) / _last_noise(horizon)


def _last_noise(count: int) -> float:
    """Noise of the last sum of so many records, over that of one release: the factor's norm²."""
    factor, total = 1.0, 1.0
    for k in range(1, count):
        factor *= 1 - 1 / (2 * k)
        total += factor**2
    return total
