"""Statistics of the benchmarks: clusters, families, ranks."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_1samp, wilcoxon

from benchmarks.statistics import (
    average_ranks,
    effect,
    family,
    interval,
    largest_family,
    named_family,
    paired,
    signed_rank,
    worse_p,
)


def test_pairs_of_a_cluster_count_once() -> None:
    """However many pairs six targets have, the interval is that of six numbers."""
    means = np.array([0.1, -0.2, 0.05, -0.3, -0.1, 0.02])
    few, many = effect(means), effect([np.full(20, mean) for mean in means])
    theirs = ttest_1samp(means, 0.0)
    low, high = theirs.confidence_interval()
    for found in (few, many):
        assert (found.mean, found.low, found.high) == pytest.approx((means.mean(), low, high))
        assert found.p == pytest.approx(theirs.pvalue)
        assert found.deviations == pytest.approx(means.mean() / means.std(ddof=1))
        assert (found.clusters, found.below) == (6, 0.5)
    assert (few.pairs, many.pairs) == (6, 120)


def test_an_interval_covers_as_often_as_it_says() -> None:
    """Pairs of one cluster share an offset: as 60 independent pairs they would cover rarely."""
    rng = np.random.default_rng(0)
    covered = as_pairs = 0
    for _ in range(400):
        groups = rng.normal(size=(6, 1)) + 0.3 * rng.normal(size=(6, 10))
        found, wrong = effect(list(groups)), effect(groups.flatten())
        assert found.low is not None and found.high is not None  # noqa: PT018
        assert wrong.low is not None and wrong.high is not None  # noqa: PT018
        covered += found.low < 0 < found.high
        as_pairs += wrong.low < 0 < wrong.high
    assert 360 <= covered <= 398
    assert as_pairs < 240


def test_one_cluster_has_no_interval() -> None:
    found = effect([[0.1, 0.2, 0.3]])
    assert (found.low, found.high, found.p, found.deviations) == (None, None, None, None)
    assert found.shown() == "+0.200"


def test_equal_methods_differ_by_nothing() -> None:
    found = effect([0.0, 0.0, 0.0])
    assert (found.mean, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)
    assert effect([0.1, 0.1, 0.1]).p == 0.0


@pytest.mark.parametrize("clusters", [[], [[0.1], []]])
def test_clusters_without_differences_are_refused(clusters: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one difference"):
        effect(clusters)


def test_only_common_keys_are_paired() -> None:
    mine = {("a", 0): 1.0, ("a", 1): 3.0, ("b", 0): 5.0, ("b", 7): 99.0}
    theirs = {("a", 0): 0.0, ("a", 1): 0.0, ("b", 0): 1.0, ("c", 0): 9.0}
    found = paired(mine, theirs, cluster=lambda key: key[0])
    assert found is not None
    assert (found.mean, found.clusters, found.pairs) == (3.0, 2, 3)
    assert paired({1: 0.0}, {2: 0.0}) is None


def test_one_sided_p_values_are_those_of_a_t_test() -> None:
    values = np.array([0.1, -0.05, 0.2, 0.15])
    for sign in (1, -1):
        theirs = ttest_1samp(sign * values, 0.0, alternative="greater").pvalue
        assert worse_p(sign * values) == pytest.approx(theirs)
    assert worse_p(values[:1]) == 1.0


def test_a_family_is_adjusted_by_holm() -> None:
    rng = np.random.default_rng(1)
    effects = {name: effect(rng.normal(size=12) + shift) for name, shift in (("a", 0), ("b", 1))}
    raw = {name: found.p for name, found in effects.items()}
    found = named_family(effects)
    assert raw["b"] is not None and raw["a"] is not None  # noqa: PT018
    assert raw["b"] < raw["a"]
    assert found["b"].p == pytest.approx(2 * raw["b"])
    assert found["a"].p == pytest.approx(max(raw["a"], 2 * raw["b"]))
    assert family([]) == []


def test_a_family_that_cannot_find_anything_has_no_p_values() -> None:
    """176 tests with ten seeds: twice two to the minus ten, times 176, is .34."""
    assert [largest_family(n) for n in (5, 6, 10, 20)] == [0, 1, 25, 26214]
    found = effect(np.linspace(0.9, 1.1, 10))
    assert [one.p for one in family([found] * 176)] == [None] * 176
    assert all(one.p is not None for one in family([found] * 25))
    assert family([found] * 176)[0].shown(2) == "+1.00 [+0.95, +1.05]"


def test_a_bootstrap_interval_is_that_of_a_mean() -> None:
    values = np.random.default_rng(3).normal(size=400)
    low, high = interval(values)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.01)
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1)


def test_average_ranks_share_ties_and_use_common_functions() -> None:
    means = {
        "a": {"F01": 1.0, "F02": 1.0, "F03": 0.0},
        "b": {"F01": 2.0, "F02": 1.0},
        "c": {"F01": 3.0, "F02": 0.0, "F03": 1.0},
    }
    assert average_ranks(means) == {"a": 1.75, "b": 2.25, "c": 2.0}
    assert average_ranks({"a": {"F01": 1.0}, "b": {"F02": 1.0}}) == {}


def test_signed_rank_has_both_effect_sizes() -> None:
    a = {f"F{k}": 0.0 for k in range(6)}
    b = {"F0": 1.0, "F1": 2.0, "F2": 3.0, "F3": 4.0, "F4": -5.0, "F5": 0.0}
    test = signed_rank(a, b)
    assert test["functions"] == 5
    assert test["rank_biserial"] == pytest.approx((5 - 10) / 15)
    assert test["sign_ratio"] == pytest.approx(-3 / 5)
    assert test["p"] == pytest.approx(wilcoxon([-1, -2, -3, -4, 5]).pvalue)
    assert signed_rank(a, a)["p"] == 1.0
