r"""Mixing schedules :math:`p_t`: the probability that round `t` uses the agent's *local* model.

A schedule is a callable from the round `t >= 1` to a weight in `[0, 1]`; with probability (or
weight) `1 - p_t` the round uses the messages of others. Transfer helps early and local data are
better later, so that schedules increase to one. They are frozen dataclasses of numbers, so that
`wire` can encode them.

::

    experiment                            schedule
    FTS, synthetic [Dai2020FTS]           Polynomial(0.5): 1 - 1/sqrt(t)
    FTS, real tasks                       InverseSquare(): 1 - 1/t^2
    DP-FTS-DE [Dai2021]                   Polynomial(0.5), Polynomial(1.0)
    FBO-FedGP                             Polynomial(c), c = 0.25, 0.5, 0.75, 1

`1 - t^-c` starts at zero, but regret bounds contain `1/p_1`. As in [Dai2020FTS]_, `p_1 := p_2`.

References:
    * [Dai2020FTS]_ Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
      sampling. NeurIPS 2020.
    * [Dai2021]_ Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
      optimization with distributed exploration. NeurIPS 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from botorch.exceptions.errors import InputDataError


class MixingSchedule(Protocol):
    """From the round `t >= 1` to the weight of the agent's local model, in `[0, 1]`."""

    def __call__(self, t: int, /) -> float: ...


@dataclass(frozen=True)
class Polynomial:
    r"""The schedule :math:`p_t = 1 - t^{-c}` with :math:`p_1 := p_2`.

    Attributes:
        c: The rate, positive; a larger rate gives the local model more weight earlier.

    Example:
        >>> Polynomial(0.5)(4)
        0.5
    """

    c: float

    def __post_init__(self) -> None:
        if not 0 < self.c < math.inf:
            raise InputDataError(
                f"The rate c of 1 - t^-c must be positive and finite, got {self.c}: for a constant "
                "weight use Constant(p)."
            )
        object.__setattr__(self, "c", float(self.c))

    def __call__(self, t: int) -> float:
        """The weight of the local model in round `t >= 1`."""
        return 1 - max(_checked_round(t), 2) ** -self.c


@dataclass(frozen=True)
class InverseSquare:
    r"""The schedule :math:`p_t = 1 - 1/t^2` with :math:`p_1 := p_2`, of FTS' real tasks."""

    def __call__(self, t: int) -> float:
        """The weight of the local model in round `t >= 1`."""
        return 1 - 1 / max(_checked_round(t), 2) ** 2


@dataclass(frozen=True)
class Constant:
    r"""The schedule :math:`p_t = p`; 1 uses the local model only, 0 the messages of others only.

    Attributes:
        p: The weight of the agent's local model, in `[0, 1]`.
    """

    p: float

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise InputDataError(f"A mixing weight must lie in [0, 1], got {self.p}.")
        object.__setattr__(self, "p", float(self.p))

    def __call__(self, t: int) -> float:
        """The weight of the local model in round `t >= 1`."""
        _checked_round(t)
        return self.p


def check_schedule(schedule: MixingSchedule, num_rounds: int) -> None:
    """Raise `InputDataError` unless a schedule lies in (0, 1] and never decreases.

    Args:
        schedule: From the round `t >= 1` to the weight of the agent's local model.
        num_rounds: The number of rounds.
    """
    last = 0.0
    for t in range(1, _checked_round(num_rounds) + 1):
        p = schedule(t)
        if not 0 < p <= 1:
            raise InputDataError(
                f"The weight of the local model must lie in (0, 1], got {p} in round {t}: start "
                "the schedule at p_1 := p_2, as Polynomial does."
            )
        if p < last:
            raise InputDataError(
                f"A mixing schedule must not decrease, but falls from {last} to {p} in round {t}: "
                "it is the weight of the agent's local model, not of the messages."
            )
        last = p


def _checked_round(t: int) -> int:
    if isinstance(t, bool) or not isinstance(t, int) or t < 1:
        raise InputDataError(f"Expected a round, an integer >= 1, got {t!r}.")
    return t
