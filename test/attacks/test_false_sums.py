"""Sums that no honest agents have made: each costs the round that it is of, and nothing else.

What is not finite never arrives: no message may hold it. 1e308 once ended the sums of searches with
noise, and of `RegionSearch`.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.papers.published.settings import paper_search
from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.aggregation.sum_messages import SumState
from botorch_fed.federation.base import Outbox
from botorch_fed.privacy.distributed import DistributedGaussianSum, DistributedRecordSum
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise
from botorch_fed.rng import generator
from botorch_fed.search.noisy import NoisyTransfer
from botorch_fed.search.released import Following, ReleaseSearch
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.transfer import TransferSearch, default_private_features
from botorch_fed.studies import FedGP
from test.aggregation.harness import NAMES, REGION, SQUARE, Federation, study, sums

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

SUPPORT = SupportSearch(support_size=4, num_raw=32, num_restarts=2, noise_var=1e-2)
PAPER = paper_search(support_size=4, num_raw=32, num_restarts=2, noise_var=1e-2)
QUICK: dict[str, Any] = {"num_raw": 64, "num_restarts": 4, "num_features": 64}


def gaussian(dim: int, num_agents: int) -> DistributedGaussianSum:
    return DistributedGaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=20.0, noise_multiplier=0.5
    )


def records(dim: int, num_agents: int) -> DistributedRecordSum:
    return DistributedRecordSum(
        num_features=4,
        outcome_bound=2.0,
        max_records=10,
        num_agents=num_agents,
        noise_multiplier=5.0,
    )


def released(search: Any) -> FedGP:
    return FedGP(
        budget=7,
        num_initial=3,
        search=search,
        feature_map=default_private_features(SQUARE),
        aggregation=SecureSum(
            channel="plain", mechanism=gaussian, noise_at="agent", releases=(0, 1, 2, 3)
        ),
        noise=InsecureSeededNoise(3),
    )


STUDIES: dict[str, Callable[[], FedGP]] = {
    "transfer": lambda: study(TransferSearch(), rounds=4),
    "region": lambda: study(REGION, rounds=4),
    "support": lambda: study(SUPPORT, rounds=4),
    "published": lambda: study(PAPER, rounds=4),
    "published, global": lambda: study(replace(PAPER, models="global"), rounds=4),
    "support, agents' noise": lambda: study(
        SUPPORT, rounds=4, mechanism=gaussian, noise_at="agent"
    ),
    "support, records' noise": lambda: study(
        replace(PAPER, models="global", prediction="pic"),
        rounds=4,
        mechanism=records,
        noise_at="agent",
    ),
    "global, server's noise": lambda: study(
        replace(PAPER, models="global"), rounds=4, mechanism=gaussian, noise_at="server"
    ),
    "own mean, noise": lambda: released(NoisyTransfer(min_reliability=0.0)),
    "gain, noise": lambda: released(ReleaseSearch(strategy=Following(follow=2, **QUICK))),
}

FALSE: dict[str, Callable[[Tensor], Tensor]] = {
    "1e308": lambda total: torch.full_like(total, 1e308),
    "-1e308": lambda total: torch.full_like(total, -1e308),
    "1e200, mixed": lambda total: 1e200 * generator(1, "lie").normal(len(total)),
    "1e5, mixed": lambda total: 1e5 * generator(1, "lie").normal(len(total)),
    "one": lambda total: torch.cat([total[:-1], torch.tensor([1e308], dtype=torch.float64)]),
    "negative": lambda total: -total,
    "zeros": torch.zeros_like,
    "1e-300": lambda total: torch.full_like(total, 1e-300),
}


def cases() -> list[Any]:
    """Every sum at every study; by day each sum three times or more, each study twice."""
    found = []
    for (row, how), (column, which) in itertools.product(enumerate(FALSE), enumerate(STUDIES)):
        marks = [pytest.mark.nightly] if (row + column) % 3 else []
        found.append(pytest.param(how, which, id=f"{how}-{which}", marks=marks))
    return found


def test_every_sum_and_every_study_has_cases_by_day() -> None:
    fast = [case.values for case in cases() if not case.marks]
    assert min(Counter(how for how, _ in fast).values()) >= 3
    assert min(Counter(which for _, which in fast).values()) >= 2
    assert {how for how, _ in fast} == FALSE.keys()
    assert {which for _, which in fast} == STUDIES.keys()


@pytest.mark.parametrize(("how", "which"), cases())
def test_a_false_sum_costs_one_round(how: str, which: str, caplog: Any) -> None:
    federation = Federation(STUDIES[which]())

    def lie(state: SumState, box: Outbox) -> Outbox:
        return sums(
            box, lambda one: replace(one, total=FALSE[how](one.total)) if one.t == 1 else one
        )

    federation.server.lie = lie
    with caplog.at_level(logging.CRITICAL):
        federation.drive()
    assert federation.end.t == 5
    assert all(federation.codes(name) == set() for name in NAMES)  # no site has failed or refused
    assert set(federation.counts().values()) == {7}
    assert federation.end.sums == 4  # and all of them go on adding
    for name in NAMES:
        assert federation.memory(name).draws == 4
        newest = federation.memory(name).newest
        if newest is not None:  # of a search that reads the newest sum only: that of round 3
            assert newest.t == 3
            assert newest.total is not None
