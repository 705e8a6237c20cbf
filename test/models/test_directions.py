"""Bases that are the same whatever LAPACK, processor and number of threads they were made with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from botorch_fed.models import KLFeatures, QuadratureFourierFeatures, RandomFourierFeatures
from botorch_fed.models.directions import (
    GRID,
    TIE,
    canonical,
    reproducible,
    right_singular_vectors,
    subspaces,
)
from botorch_fed.rng import generator
from test.cases import UNIT, normal, quadrature, se, uniform


def square_grid(count: int) -> Tensor:
    """Points with the symmetries of the square."""
    axis = torch.linspace(0, 1, count, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis)


def symmetric(**options: Any) -> KLFeatures:
    """Of its eigenvalues many are equal in pairs."""
    base = QuadratureFourierFeatures.from_kernel(se(0.4, 0.4), UNIT, degree=12)
    return KLFeatures.from_map(base, square_grid(9), **options)


def few_points(**options: Any) -> KLFeatures:
    """More features than points: all directions from the thirteenth on are alike."""
    base = RandomFourierFeatures.draw(se(0.3, 0.3), 60, generator=generator(0, "few"))
    return KLFeatures.from_map(base, uniform(12, 2), **options)


def ordinary(**options: Any) -> KLFeatures:
    return KLFeatures.from_map(quadrature(), uniform(500, 2), **options)


MAPS = pytest.mark.parametrize("made", [symmetric, few_points, ordinary])


def rotated(values: Tensor, vectors: Tensor, seed: int) -> Tensor:
    """Columns under random signs, and random rotations among those of equal values."""
    values = torch.cat([values, values.new_zeros(vectors.shape[-1] - len(values))])
    ties = ((values[:-1] - values[1:]) > 1e-12 * values[0]).nonzero().flatten() + 1
    blocks = []
    for start, end in pairwise([0, *ties.tolist(), len(values)]):
        mix = torch.linalg.qr(normal(end - start, end - start, seed=seed + start)).Q
        sign = torch.where(uniform(end - start, seed=seed + start) < 0.5, -1.0, 1.0)
        blocks.append(vectors[:, start:end] @ mix * sign)
    return torch.cat(blocks, dim=-1)


@pytest.fixture(params=[1, 2, 3])
def other_machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Call it, and the singular vectors are those of a LAPACK with other habits."""
    svd = torch.linalg.svd

    def switched(A: Tensor, full_matrices: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        U, S, Vh = svd(A, full_matrices=full_matrices)
        return U, S, rotated(S, Vh.mT, seed=request.param).mT

    return lambda: monkeypatch.setattr(torch.linalg, "svd", switched)


# ------------------------------------------------------------------ the same whatever LAPACK does


def test_there_are_equal_eigenvalues_to_rotate() -> None:
    base = symmetric(num_features=1).base
    ends = subspaces(right_singular_vectors(base(square_grid(9)))[0])
    assert [end - start for start, end in pairwise(ends)][:6] == [1, 2, 1, 2, 2, 2]


@MAPS
@pytest.mark.parametrize("count", [1, 2, 3, 8, 14])
def test_signs_and_rotations_change_nothing(
    made: Callable[..., KLFeatures], count: int, other_machine: Callable[[], None]
) -> None:
    before = made(num_features=count)
    other_machine()
    after = made(num_features=count)
    assert torch.equal(after.projection, before.projection)
    assert after.fingerprint == before.fingerprint


@MAPS
@pytest.mark.parametrize("tol", [0.2, 0.03, 1e-3])
def test_signs_and_rotations_change_no_tolerance(
    made: Callable[..., KLFeatures], tol: float, other_machine: Callable[[], None]
) -> None:
    before = made(tol=tol)
    other_machine()
    assert made(tol=tol).fingerprint == before.fingerprint


def test_the_fixture_is_another_machine(other_machine: Callable[[], None]) -> None:
    Phi = quadrature()(uniform(100, 2))
    values, vectors = right_singular_vectors(Phi)
    other_machine()
    again, others = right_singular_vectors(Phi)
    torch.testing.assert_close(again, values)
    assert float((others - vectors).abs().max()) > 0.1


@MAPS
def test_a_smaller_basis_is_the_beginning_of_a_larger_one(made: Callable[..., KLFeatures]) -> None:
    whole = made(num_features=20).projection
    for count in (1, 2, 3, 7, 12, 13, 19):  # also through the middle of a subspace
        assert torch.equal(made(num_features=count).projection, whole[:, :count])


def test_a_tolerance_keeps_subspaces_whole() -> None:
    base, reference = symmetric(num_features=1).base, square_grid(9)
    ends = subspaces(right_singular_vectors(base(reference))[0])
    for tol in (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3):
        phi = symmetric(tol=tol)
        assert phi.num_features in ends
        lost = phi.outputscale - phi(reference).square().sum(dim=-1)
        assert float(lost.max()) <= tol + 1e-4  # the base's own error
        if phi.num_features > 1:
            shorter = symmetric(num_features=ends[ends.index(phi.num_features) - 1])
            lost = base(reference).square().sum(-1) - shorter(reference).square().sum(-1)
            assert float(lost.max()) > tol


# ------------------------------------------------------------------ the directions they should be


@MAPS
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_explains_what_the_leading_eigenvectors_explain(
    made: Callable[..., KLFeatures], count: int
) -> None:
    phi = made(num_features=count)
    reference = {symmetric: square_grid(9), few_points: uniform(12, 2)}.get(made, uniform(500, 2))
    Phi = phi.base(reference)
    most = torch.linalg.svdvals(Phi).square()[:count].sum() / len(Phi)
    explained = (Phi @ phi.projection).square().sum() / len(Phi)
    # To second order in the step to the grid; a cut through a pair loses nothing either.
    assert 0 <= float(most - explained) + 1e-12 < 4 * float(most) * GRID**2 * phi.base.num_features


@MAPS
def test_columns_are_orthonormal_to_the_last_bits(made: Callable[..., KLFeatures]) -> None:
    V = made(num_features=20).projection
    assert float((V.mT @ V - torch.eye(20)).abs().max()) < 1e-14


def test_the_direction_of_a_single_vector_is_its_own() -> None:
    values, vectors = right_singular_vectors(normal(30, 6))
    basis = canonical(values, vectors, 6)
    torch.testing.assert_close(basis.abs(), vectors.abs())
    generic = generator(0, "directions").uniform(6, 6).mT - 0.5
    assert bool(((basis * generic).sum(dim=0) > 0).all())


def test_values_within_the_tolerance_share_a_subspace() -> None:
    values = torch.tensor([2.0, 2.0 - TIE, 1.0, 1.0, 1e-9, 0.0], dtype=torch.float64)
    assert subspaces(values) == [0, 2, 4, 6]
    assert subspaces(torch.zeros(3).double()) == [0, 3]
    vectors = torch.linalg.qr(normal(9, 6)).Q
    basis = canonical(values, vectors, 6)
    for start, end in pairwise(subspaces(values)):
        mine, theirs = basis[:, start:end], vectors[:, start:end]
        torch.testing.assert_close(mine @ mine.mT, theirs @ theirs.mT)


def test_last_bits_are_rounded_away_and_the_rest_is_not() -> None:
    V = torch.linalg.qr(normal(200, 15)).Q
    fixed = reproducible(V)
    assert float((fixed - V).abs().max()) < 2 * GRID
    for seed in range(5):
        assert torch.equal(reproducible(V + 1e-14 * normal(200, 15, seed=seed)), fixed)
    assert not torch.equal(reproducible(V + GRID), fixed)
    rounded = (V / GRID).round() * GRID
    # The same as Gram and Schmidt do, column by column, in exact numbers.
    torch.testing.assert_close(
        fixed[:, 0], rounded[:, 0] / rounded[:, 0].norm(), rtol=0, atol=1e-15
    )
    assert not fixed.requires_grad


def test_more_points_than_features_and_fewer() -> None:
    for n in (4, 6, 50):
        Phi = normal(n, 6)
        values, vectors = right_singular_vectors(Phi)
        assert values.shape == (6,)
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(6).double())
        torch.testing.assert_close((Phi @ vectors).norm(dim=0), values, rtol=0, atol=1e-12)
