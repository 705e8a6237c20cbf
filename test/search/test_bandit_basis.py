"""Bases of private bandits: their sizes follow from dimension, records and noise."""

from __future__ import annotations

import math

import pytest

from botorch_fed.acquisition import missed
from botorch_fed.privacy import PrefixSum, noise_multiplier_for
from botorch_fed.search.bandit import families
from botorch_fed.search.bandit_basis import feature_count, few_features, scaled_features
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.studies import PrivateUCB
from test.cases import uniform


def cube(dim: int) -> SearchSpace:
    return SearchSpace(
        tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(dim)), Outcome(0.5, 0.25)
    )


@pytest.mark.parametrize("dim", [1, 2, 3, 10])
def test_more_noise_leaves_room_for_fewer_features(dim: int) -> None:
    counts = [feature_count(dim, records=1024, noise_std=s) for s in (0.0, 1.0, 10.0, 1e3, 1e6)]
    assert counts == sorted(counts, reverse=True)
    sizes = {math.comb(dim + degree, dim) for degree in range(1, 40)}
    assert {*counts} <= sizes
    least = 2 if dim <= 3 else 1
    assert counts[-1] == math.comb(dim + least, dim)
    assert counts[0] <= max(36, counts[-1])
    assert feature_count(dim, records=10**6, noise_std=100.0) >= feature_count(
        dim, records=10**3, noise_std=100.0
    )


@pytest.mark.parametrize("epsilon", [0.5, 10.0])
def test_the_default_basis_is_that_of_the_planned_noise(epsilon: float) -> None:
    study = PrivateUCB(budget=512, epsilon=epsilon)
    z = noise_multiplier_for(
        epsilon=epsilon, delta=1e-5, sampling_rate=1.0, num_releases=1, adjacency="replace-one"
    )
    noise = PrefixSum(num_features=1, outcome_bound=2.0, horizon=512, noise_multiplier=z)
    count = feature_count(2, records=512, noise_std=noise.noise_std(512))
    space = cube(2)
    phi = study.terms(space).feature_map
    assert phi.num_features == count
    assert phi.fingerprint == study.terms(space, ("a", "b", "c")).feature_map.fingerprint
    assert (
        phi.fingerprint
        == few_features(space, records=512, noise_std=noise.noise_std(512)).fingerprint
    )
    local = PrivateUCB(budget=512, epsilon=epsilon, trust="local").terms(space).feature_map
    assert local.num_features <= count
    free = PrivateUCB(budget=512, trust="none").terms(space).feature_map
    assert free.num_features == 36


@pytest.mark.parametrize("dim", [1, 2, 3, 6, 20])
def test_public_actions_have_several_length_scales(dim: int) -> None:
    phi = scaled_features(dim)
    assert phi.input_dim == dim
    assert phi.num_features < 450
    scales = sorted({round(float(part.lengthscale[0]), 6) for part in phi.maps[:-1]})
    assert len(scales) >= 2
    assert max(families(phi)) + 1 == len(scales) + 1  # and a constant
    assert float(phi.outputscale.sum()) == pytest.approx(0.5)
    X = uniform(200, dim)
    assert float(missed(phi, X).max()) < 0.11 * 0.5
    groups = {tuple(group) for group in phi.groups}
    if dim > 3:  # a function of each input
        assert groups == {(j,) for j in range(dim)}
    else:
        assert tuple(range(dim)) in groups


def test_what_is_known_is_said_and_what_is_said_counts() -> None:
    usual = PrivateUCB(budget=8, epsilon=1.0).make_search()
    public = PrivateUCB(budget=8, epsilon=1.0, trust="public")
    assert (usual.noise_var, usual.exploration, usual.height) == (1.0, 1.0, 8.0)
    assert public.make_search().exploration == 2.0
    blocks = public.make_aggregation()
    assert (blocks.fit_scales, blocks.narrow) == (True, False)
    said = PrivateUCB(budget=8, epsilon=1.0, trust="public", noise_var=0.04)
    assert said.make_search().noise_var == 0.04
    assert said.make_aggregation().narrow
    own = PrivateUCB(
        budget=8, epsilon=1.0, trust="public", feature_map=scaled_features(2), exploration=0.3
    )
    assert not own.make_aggregation().fit_scales
    assert own.make_search().exploration == 0.3
    local = PrivateUCB(budget=8, epsilon=1.0, trust="local").make_search()
    assert (local.inflate, local.height) == (True, 6.0)
    shifted = PrivateUCB(budget=8, epsilon=1.0, trust="local", psd="shift").make_search()
    assert not shifted.inflate
    assert usual.inflate is False
