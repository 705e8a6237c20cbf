"""Learned relatedness: a site's posterior from sums is that of one dense model of all data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from benchmarks.transfer_relatedness import OFFSET, Related, correlation, noise_of
from botorch_fed.models import InducingFeatures, StationaryKernel
from botorch_fed.models.local_gp import fit_local_gp, standardize
from botorch_fed.models.summary import Summary, log_evidence
from botorch_fed.rng import generator

SCALES = np.array([0.4, 0.5])


def sites() -> list[Any]:
    """Own models and data of three sites."""
    stream = generator(0, "relatedness")
    made = []
    for n in (4, 6, 5):
        X = stream.uniform(n, 2).numpy()
        z = standardize(np.sin(5 * X[:, 0]) + X[:, 1] + 0.1 * stream.normal(n).numpy()).values
        made.append((fit_local_gp(X, z), X, z))
    return made


def model_of(share: float, data: list[Any]) -> Related:
    """With support points at all data, so that nothing is approximated between sites."""
    kernel = StationaryKernel(math.inf, SCALES.tolist())
    points = torch.from_numpy(np.concatenate([X for _, X, _ in data]))
    return Related(share, InducingFeatures(kernel, points), SCALES)


def dense(share: float, data: list[Any], first: Any, points: Any) -> tuple[Any, Any, Any, Any]:
    """Covariance and outcomes of all data, and covariances with the first site's points."""
    X = np.concatenate([X for _, X, _ in data])
    K = share * correlation(X, X, SCALES)
    cross = share * correlation(points, X, SCALES)
    start = 0
    for own, mine, _ in data:
        rows = slice(start, start + len(mine))
        K[rows, rows] += (1 - share) * correlation(mine, mine, own.lengthscale) + OFFSET
        K[rows, rows] += noise_of(own) * np.eye(len(mine))
        if own is first:
            cross[:, rows] += (1 - share) * correlation(points, mine, own.lengthscale) + OFFSET
        start += len(mine)
    return X, K, np.concatenate([z for *_, z in data]), cross


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_posterior_is_that_of_a_dense_model_of_all_data(share: float) -> None:
    data = sites()
    model = model_of(share, data)
    first, X, z = data[0]
    points = X + 0.0
    others = sum(
        (model.summary(own, X, z) for own, X, z in data[1:]), Summary.zero(model.feature_map)
    )
    mean, variance = model.moments(first, X, z, others, points)
    _, K, outcomes, cross = dense(share, data, first, points)
    np.testing.assert_allclose(mean, cross @ np.linalg.solve(K, outcomes), atol=1e-6)
    explained = (cross * np.linalg.solve(K, cross.T).T).sum(axis=1)
    np.testing.assert_allclose(variance, 1 + OFFSET - explained, atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_evidence_of_all_data_follows_from_the_sum(share: float) -> None:
    data = sites()
    model = model_of(share, data)
    total = sum((model.summary(own, X, z) for own, X, z in data), Summary.zero(model.feature_map))
    _, K, outcomes, _ = dense(share, data, None, data[0][1])
    expected = multivariate_normal.logpdf(outcomes, np.zeros(len(K)), K)
    assert float(log_evidence(total)) == pytest.approx(expected, abs=1e-6)


def test_with_no_common_share_a_site_is_alone() -> None:
    data = sites()
    model = model_of(0.0, data)
    first, X, z = data[0]
    points = generator(1, "points").uniform(7, 2).numpy()
    others = model.summary(*data[1])
    nobody = Summary.zero(model.feature_map)
    alone = model.moments(first, X, z, nobody, points)
    for found, expected in zip(model.moments(first, X, z, others, points), alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
