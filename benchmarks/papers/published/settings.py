r"""Settings as published: how an agent searches in [Dai2020FTS]_ and in FBO-FedGP.

.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from botorch_fed.acquisition import InverseSquare, MixingSchedule
from botorch_fed.protocols.fts import Strategy
from botorch_fed.search.support import SupportSearch


def paper_strategy(schedule: MixingSchedule | None = None) -> Strategy:
    """What an agent does in [Dai2020FTS]_."""
    return Strategy(
        schedule=InverseSquare() if schedule is None else schedule,
        prior_until=0,
        own="thompson",
        warp=False,
        paper_gp=True,
        min_distance=0.0,
        num_features=200,
    )


def paper_search(**changes: Any) -> SupportSearch:
    """The published search: PITC, so that all go to the same point in a shared step."""
    return replace(SupportSearch(support_size=8, prediction="pitc"), **changes)
