r"""The condition and the width on which the regret bound of FTS stands [Dai2020FTS]_.

.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition import MixingSchedule


@dataclass(frozen=True, eq=False)
class ConditionReport:
    r"""Whether a schedule satisfies the condition of a regret bound.

    Attributes:
        ratios: `num_rounds`, :math:`(1 - p_t) c_t / ((1 - p_1) c_1)` for t = 1, 2, …; the
            condition asks for at most one.
        first_violation: The first round that violates it, or None.
    """

    ratios: Tensor
    first_violation: int | None


def theory_condition(
    schedule: MixingSchedule,
    *,
    beta: float | Callable[[int], float],
    num_points: int,
    num_rounds: int,
) -> ConditionReport:
    r"""Evaluate the condition on which the regret bound of FTS stands.

    .. math:: (1 - p_t)\, c_t \le (1 - p_1)\, c_1, \qquad
              c_t = \beta_t \bigl(1 + \sqrt{2 \ln(|X| t^2)}\bigr),

    see [Dai2020FTS]_. With `p_1 := p_2 < 1` the left side grows from round one to round two, unless
    :math:`\beta_t` falls: the papers' own choices violate the condition there.

    Args:
        schedule: From the round `t >= 1` to the weight of the agent's own model.
        beta: :math:`\beta_t`, a number or a function of `t`, e.g. of `theory_beta`.
        num_points: The size :math:`|X|` of the (discretised) domain.
        num_rounds: How many rounds to look at.
    """
    if num_points < 1:
        raise InputDataError(f"The domain must have at least one point, got {num_points}.")
    sides = []
    for t in range(1, num_rounds + 1):
        beta_t = beta(t) if callable(beta) else beta
        c_t = beta_t * (1 + math.sqrt(2 * math.log(num_points * t**2)))
        sides.append((1 - schedule(t)) * c_t)
    left = torch.tensor(sides, dtype=torch.float64)
    # Where p_1 = 1, nothing else than 0 <= 0 is allowed.
    ratios = torch.where(left == 0, torch.zeros_like(left), left / left[0])
    violations = (ratios > 1 + 1e-12).nonzero().flatten().tolist()  # 1e-12: rounding
    return ConditionReport(ratios, violations[0] + 1 if violations else None)


def theory_beta(
    t: int,
    *,
    bound: float,
    noise_std: float,
    information_gain: float | Callable[[int], float],
    delta: float,
) -> float:
    r"""The width :math:`\beta_t = B + \sigma \sqrt{2(\gamma_{t-1} + 1 + \ln(4/\delta))}`.

    Args:
        t: The round, from 1.
        bound: :math:`B`, a bound on the objective's norm in the kernel's Hilbert space.
        noise_std: :math:`\sigma`, the standard deviation of the noise.
        information_gain: The maximum information gain :math:`\gamma` as a function of the number
            of observations (evaluated at `t - 1`), or a number that bounds it for all rounds.
        delta: The probability that the bound fails, in (0, 1).
    """
    if not (bound >= 0 and noise_std >= 0 and 0 < delta < 1):
        raise InputDataError(
            "theory_beta needs bound >= 0, noise_std >= 0 and 0 < delta < 1, got "
            f"{bound}, {noise_std} and {delta}."
        )
    past = t - 1
    gamma = information_gain(past) if callable(information_gain) else information_gain
    return bound + noise_std * math.sqrt(2 * (gamma + 1 + math.log(4 / delta)))
