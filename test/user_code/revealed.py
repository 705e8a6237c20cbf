"""What a user gets back; none of it is Any."""

from __future__ import annotations

from typing import reveal_type

import torch

from botorch_fed.acquisition import ThompsonSampling, maximize, weight_path
from botorch_fed.models import (
    BasisGP,
    FeatureMap,
    WeightPosterior,
    draw_path,
    feature_map_from_tensors,
    summarize,
)
from botorch_fed.privacy import (
    Budget,
    GaussianSum,
    InsecureSeededNoise,
    Ledger,
    PrefixSum,
    epsilon,
    noise_multiplier_for,
)
from botorch_fed.privacy.audit import audit
from botorch_fed.protocols.fts import FTS
from botorch_fed.rng import generator
from botorch_fed.run import run
from botorch_fed.space import SearchSpace
from botorch_fed.test_functions import SyntheticGPAgents


def revealed(phi: FeatureMap, space: SearchSpace) -> None:
    X = generator(0, "points").uniform(5, 2)
    reveal_type(X)
    reveal_type(phi.fingerprint)
    reveal_type(phi.to_tensors())
    reveal_type(feature_map_from_tensors(phi.to_tensors()))
    total = summarize(phi, X, X[:, :1], noise_var=0.1)
    reveal_type(total)
    reveal_type(sum([total, total], start=total))
    reveal_type(total.pack())
    weights = WeightPosterior.from_total(total)
    reveal_type(weights.mean)
    reveal_type(weights.sample(generator=generator(0)))
    model = BasisGP(X, X[:, :1], feature_map=phi)
    reveal_type(model)
    reveal_type(model.feature_map)
    reveal_type(model.weight_posterior)
    reveal_type(
        maximize(ThompsonSampling(weight_path(phi, weights.mean)), 2, generator=generator(0))
    )
    reveal_type(ThompsonSampling(draw_path(model)))
    reveal_type(space.to_unit([{"x": 1.0}]))
    reveal_type(space.from_unit(X))
    result = run(FTS(budget=2), SyntheticGPAgents(2, seed=0), seed=0)
    reveal_type(result)
    reveal_type(result.history("agent0"))
    reveal_type(result.regret("agent0"))
    reveal_type(result.bytes_per_round())
    reveal_type(noise_multiplier_for(epsilon=1, delta=1e-5, sampling_rate=1, num_releases=1))
    reveal_type(epsilon(sampling_rate=1, noise_multiplier=1, num_releases=1, delta=1e-5).epsilon)
    ledger = Ledger(budget=Budget(1.0, 1e-5))
    reveal_type(ledger.guarantee())
    mechanism = GaussianSum(num_agents=2, dim=2, clip_norm=1.0, noise_multiplier=1.0)
    release, after = mechanism.release(
        {0: torch.ones(2)}, ledger=ledger, noise=InsecureSeededNoise(0), path=(0,)
    )
    reveal_type(release.values)
    reveal_type(after)
    reveal_type(audit(mechanism).passed)
    stream = PrefixSum(num_features=2, outcome_bound=1.0, horizon=4, noise_multiplier=1.0)
    reveal_type(stream.moment_scale)
    reveal_type(stream.start(ledger=ledger, noise=InsecureSeededNoise(0)))
