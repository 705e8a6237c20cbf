r"""What regret bounds are made of: the condition and width of FTS, information, feature counts.

The bound of FTS [Dai2020FTS]_ stands on a condition on its schedule and on a width; both and the
bound of private bandits [Dubey2021]_ on the maximum information gain :math:`\gamma_T`.

.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020.
.. [Dubey2021] A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
   AISTATS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition.schedules import MixingSchedule


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


def information_gain(num_features: int, num_points: int, *, noise_var: float) -> float:
    r"""A bound on what so many outcomes say about a function of so many features, in nats.

    :math:`\gamma_T \le \frac M2 \ln(1 + T / (M \sigma^2))`, for features of norm one: the
    determinant is largest where information is spread evenly over the features.

    Args:
        num_features: `M`.
        num_points: `T`.
        noise_var: :math:`\sigma^2`, over the function's prior variance.
    """
    if not (num_features >= 1 and num_points >= 0 and noise_var > 0):
        raise InputDataError(
            "information_gain needs num_features >= 1, num_points >= 0 and noise_var > 0, got "
            f"{num_features}, {num_points} and {noise_var}."
        )
    return num_features / 2 * math.log1p(num_points / (num_features * noise_var))


def published_feature_counts(num_rounds: int, dim: int) -> dict[str, float]:
    r"""The feature counts of [Dubey2021]_, whatever the length scale, before nodes are folded.

    Args:
        num_rounds: `T`.
        dim: `d`.

    Returns:
        :math:`2 (6 \ln T)^d` of the theorem, :math:`2 (3 \ln T)^d` of its third remark and
        :math:`(6 \ln T)^d` of local privacy.
    """
    if num_rounds < 2 or dim < 1:
        raise InputDataError(f"Expected two rounds and one input, got {num_rounds} and {dim}.")
    log = math.log(num_rounds)
    return {
        "theorem": 2 * (6 * log) ** dim,
        "remark 3": 2 * (3 * log) ** dim,
        "local": (6 * log) ** dim,
    }
