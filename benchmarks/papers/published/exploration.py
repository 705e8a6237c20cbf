r"""Weights by powers, the other schedules of [Dai2021]_.

    weights a : 1, a from 1000            PowerLawSchedule(1, 1000, plateau=…, decay=…)
    weights a^2 : 1, a from 40            PowerLawSchedule(2, 40, plateau=…, decay=…)

.. [Dai2021] Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
   optimization with distributed exploration. NeurIPS 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from botorch.exceptions.errors import InputDataError

from botorch_fed.acquisition import SoftmaxSchedule


@dataclass(frozen=True)
class PowerLawSchedule:
    r"""Weights :math:`a_t^k : 1` with :math:`a_t` from `start` down to 1.

    Attributes:
        power: The exponent `k`, positive.
        start: The first :math:`a_t`, 1 or more.
        plateau: :math:`T_c`, as in `SoftmaxSchedule`.
        decay: :math:`T_d`, as in `SoftmaxSchedule`.
    """

    power: float
    start: float
    plateau: int = 10
    decay: int = 30

    def __post_init__(self) -> None:
        if not (0 < self.power < math.inf and 1 <= self.start < math.inf):
            raise InputDataError(
                "Weights a^k : 1 need a finite power k > 0 and a finite start a >= 1, got "
                f"{self.power} and {self.start}."
            )
        SoftmaxSchedule(1.0, self.plateau, self.decay)  # checks both
        object.__setattr__(self, "power", float(self.power))
        object.__setattr__(self, "start", float(self.start))

    def __call__(self, t: int) -> float:
        r"""The contrast :math:`k \ln a_t` of round `t >= 1`."""
        remaining = SoftmaxSchedule(1.0, self.plateau, self.decay)(t)
        return self.power * math.log1p((self.start - 1) * remaining)
