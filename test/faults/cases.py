"""Federations to break: every protocol, trust model and channel, small and fast.

Noise is the operating system's: drawn a second time it is other noise, and shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from benchmarks.papers.published.settings import paper_search
from botorch_fed.acquisition import Constant
from botorch_fed.aggregation import sum_messages
from botorch_fed.models import RandomFourierFeatures
from botorch_fed.privacy import Budget, GaussianSum, OSNoise
from botorch_fed.privacy.distributed import DistributedGaussianSum
from botorch_fed.rng import generator
from botorch_fed.run import Study
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.released import Following
from botorch_fed.search.releases import Noisy, Parameters
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB
from test.cases import se, uniform

NAMES = ("ann", "bob", "cem")
SQUARE = SearchSpace(
    (Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)), Outcome(0.5, 0.5)
)
ROUNDS = 5
PHI = RandomFourierFeatures.draw(se(0.4, 0.6), 6, generator=generator(0, "faults"))
ARMS = uniform(40, 2, seed=1)
CHEAP: dict[str, Any] = {"own": "random", "num_raw": 8, "num_restarts": 1}
REGION = RegionSearch(num_inducing=4, num_candidates=1, wait=1, num_raw=16)
SUPPORT = paper_search(support_size=4, num_raw=16, num_restarts=1, noise_var=1e-2)


def hill(X: Tensor) -> Tensor:
    return 1 - 2 * (X - 0.3).square().sum(dim=-1, keepdim=True)


def broken_hill(X: Tensor) -> Tensor:
    """It has no value in a third of the square."""
    if bool((X[:, 0] > 2 / 3).any()):
        raise ValueError("a is too large")
    return hill(X)


@dataclass(frozen=True)
class Case:
    """A federation, and what its ledgers must cover.

    Attributes:
        study: Its settings; what every process is started with.
        exact: Whether a run without losses is always the same, bit for bit.
        shared_ledger: Whether the server pays from a `SharedLedger` too.
        noisy: The broadcasts that are releases of the server.
        noisy_replies: Whether a reply with data is a release of its site.
        once: Whether the whole run is one release.
        keeps_data: Whether an agent's state has all of its observations.
        late: Who joins when the server is started for the second time, or the run has ended.
        grows: How many evaluations the budget has more from then on.
        objective: What a point is worth; it may raise.
        by_hand: Whether somebody answers the trials of the sites, each after two more rounds.
    """

    study: Study
    exact: bool = False
    shared_ledger: bool = False
    noisy: tuple[type, ...] = ()
    noisy_replies: bool = False
    once: bool = False
    keeps_data: bool = True
    late: tuple[str, ...] = ()
    grows: int = 0
    objective: Callable[[Tensor], Tensor] = hill
    by_hand: bool = False


def gaussian(dim: int, num_agents: int) -> DistributedGaussianSum:
    return DistributedGaussianSum(
        clip_norm=20.0, noise_multiplier=1.0, dim=dim, num_agents=num_agents, dropping=1
    )


def trusted(dim: int, num_agents: int) -> GaussianSum:
    return GaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=20.0, noise_multiplier=1.0, weight=1.0
    )


def _fed_gp(search: Any = None, **options: Any) -> FedGP:
    default = TransferSearch()
    return FedGP(search=search or default, budget=ROUNDS + 2, num_initial=2, **options)


def _ucb(trust: Any, **options: Any) -> PrivateUCB:
    common: dict[str, Any] = {
        "feature_map": PHI,
        "noise_var": 0.1,
        "noise_multiplier": 2.0,
        "candidates": ARMS,
    }
    return PrivateUCB(budget=ROUNDS, trust=trust, **{**common, **options})


def cases() -> dict[str, Case]:
    """All of them; made anew, because a study may remember the keys that it has made."""
    follow = Following(follow=1, spread=0.0, schedule=Constant(0.5), **CHEAP)
    noise_of_agents: dict[str, Any] = {"mechanism": gaussian, "noise_at": "agent", "sums": 40}
    own_mean: dict[str, Any] = {
        "budget": ROUNDS + 2,
        "noise_multiplier": 2.0,
        "releases": "all",
        "num_initial": 2,
        "min_reliability": 0.0,
        "candidates": ARMS,
        "noise": OSNoise(),
    }
    by_agents = DPFTSDE(trust="distributed", **own_mean)
    published = FTS(
        budget=ROUNDS,
        every=1,
        feature_map=PHI,
        candidates=ARMS,
        strategy=Strategy(schedule=Constant(0.5), prior_until=0, **CHEAP),
    )
    return {
        "fts-search": Case(FTS(budget=ROUNDS, feature_map=PHI, candidates=ARMS), exact=True),
        "fts": Case(published, exact=True),
        "fts-late": Case(published, late=NAMES[2:]),  # when it joins depends on who is killed
        "fts-grows": Case(published, grows=2),
        "fts-fails": Case(published, exact=True, objective=broken_hill),
        "fts-by-hand": Case(FTS(budget=ROUNDS, feature_map=PHI, candidates=ARMS), by_hand=True),
        "fed-gp-by-hand": Case(_fed_gp(channel="threshold"), by_hand=True),
        "fed-gp-grows-and-fails": Case(
            _fed_gp(channel="threshold"), grows=2, objective=broken_hill
        ),
        "dp-fts-de": Case(
            DPFTSDE(
                budget=ROUNDS + 2,
                noise_multiplier=2.0,
                releases="all",
                num_regions=2,
                message="mean",
                feature_map=PHI,
                num_initial=2,
                strategy=follow,
                candidates=ARMS,
                noise=OSNoise(),
            ),
            shared_ledger=True,
            noisy=(Noisy,),
        ),
        "dp-fts-de-own-mean": Case(DPFTSDE(**own_mean), shared_ledger=True, noisy=(Noisy,)),
        "dp-fts-de-distributed": Case(by_agents, noisy_replies=True),
        "dp-fts-de-distributed-plain": Case(
            replace(by_agents, channel="plain"), noisy_replies=True
        ),
        "ucb-none": Case(_ucb("none", noise_multiplier=None), exact=True, keeps_data=False),
        "ucb-joint": Case(
            _ucb("joint"), shared_ledger=True, noisy=(Parameters,), once=True, keeps_data=False
        ),
        "ucb-local": Case(
            _ucb("local", unit="agent", require=Budget(200.0, 1e-5)),
            noisy_replies=True,
            keeps_data=False,
        ),
        "ucb-public": Case(
            _ucb("public", most_per_block=4),
            shared_ledger=True,
            noisy=(Parameters,),
            once=True,
            keeps_data=False,
        ),
        "fed-gp-plain": Case(_fed_gp(channel="plain"), exact=True),
        "fed-gp-ckks": Case(_fed_gp(SUPPORT, channel="ckks"), exact=True),
        "fed-gp-threshold": Case(_fed_gp(channel="threshold"), exact=True),
        "fed-gp-region": Case(_fed_gp(REGION, channel="plain"), exact=True),
        "fed-gp-region-threshold": Case(_fed_gp(REGION, channel="threshold"), exact=True),
        "fed-gp-agents-noise": Case(
            _fed_gp(SUPPORT, channel="plain", **noise_of_agents), noisy_replies=True
        ),
        "fed-gp-threshold-noise": Case(
            _fed_gp(SUPPORT, channel="threshold", **noise_of_agents), noisy_replies=True
        ),
        "fed-gp-server-noise": Case(
            _fed_gp(SUPPORT, channel="plain", mechanism=trusted, noise_at="server", sums=40),
            noisy=(sum_messages.Opened,),
        ),
    }
