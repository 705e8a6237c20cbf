"""Support sets: public points."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import qmc
from torch import Tensor

from botorch_fed.models.support import sobol_support
from botorch_fed.rng import generator

BOX = torch.tensor([[-1.0, 2.0], [3.0, 10.0]]).double()


def _lattice(X: Tensor) -> Tensor:
    return (X * 2.0**30).floor().long()


# ------------------------------------------------------------------ public points


@given(
    dim=st.integers(1, 30),
    size=st.integers(1, 70),
    seed=st.integers(-5, 2**40),
)
def test_sobol_points_are_distinct_reproducible_and_grow(dim: int, size: int, seed: int) -> None:
    points = sobol_support(dim, size, seed=seed)
    assert points.shape == (size, dim)
    assert points.dtype == torch.float64
    assert bool(((points > 0) & (points < 1)).all())
    for column in points.T:
        assert len(column.unique()) == size  # in every dimension
    assert torch.equal(points, sobol_support(dim, size, seed=seed))
    assert torch.equal(points[: size // 2 + 1], sobol_support(dim, size // 2 + 1, seed=seed))
    assert not torch.equal(points, sobol_support(dim, size, seed=seed + 1))


def test_sobol_points_follow_the_recipe() -> None:
    # Repeated with whole numbers, from another library's unscrambled sequence.
    plain = qmc.Sobol(2, scramble=False, bits=30).random(4)
    stream = generator(7, "support", "sobol")
    matrix, shift = stream.uniform(2, 30, 30) < 0.5, stream.uniform(2, 30) < 0.5
    expected = []
    for x in plain:
        cells = []
        for j in range(2):
            bits = [int(c) for c in f"{int(x[j] * 2**30):030b}"]
            cell = 0
            for i in range(30):
                bit = bits[i] + int(shift[j, i])
                bit += sum(int(matrix[j, i, h]) * bits[h] for h in range(i))
                cell = 2 * cell + bit % 2
            cells.append(cell)
        expected.append(cells)
    points = sobol_support(2, 4, seed=7)
    assert _lattice(points).tolist() == expected
    assert expected[0] == [492321181, 827674333]  # with any version of any library
    assert torch.equal(points, (torch.tensor(expected).double() + 0.5) / 2**30)


def test_scrambling_keeps_the_net() -> None:
    # One point in every elementary interval, and the differences (modulo two) of scrambled points
    # have the leading bits where those of the plain sequence have them.
    points = sobol_support(2, 64, seed=3)
    for k in range(7):
        cells = (points * torch.tensor([2**k, 2 ** (6 - k)])).floor()
        assert len(cells.unique(dim=0)) == 64
    plain = torch.from_numpy(qmc.Sobol(2, scramble=False, bits=30).random(64))
    first, second = _lattice(points), _lattice(plain)
    for j in range(2):
        for i in range(1, 64):
            a, b = int(first[i, j] ^ first[0, j]), int(second[i, j] ^ second[0, j])
            assert a.bit_length() == b.bit_length()


def test_sobol_points_are_uniform_over_seeds() -> None:
    points = torch.cat([sobol_support(3, 4, seed=seed) for seed in range(500)])
    n = len(points)
    assert float((points.mean(dim=0) - 0.5).abs().max()) < 5 / math.sqrt(12 * n)
    assert float((points.var(dim=0) - 1 / 12).abs().max()) < 5 * math.sqrt(1 / 180 / n)


def test_sobol_points_in_bounds() -> None:
    points = sobol_support(2, 16, bounds=BOX)
    torch.testing.assert_close(points, BOX[0] + sobol_support(2, 16) * (BOX[1] - BOX[0]))
    assert bool(((points > BOX[0]) & (points < BOX[1])).all())


def test_bad_settings() -> None:
    with pytest.raises(InputDataError, match="dim must lie in"):
        sobol_support(0, 3)
    with pytest.raises(InputDataError, match=r"needs 1\.\.2"):
        sobol_support(2, 0)
    for bounds in (BOX.flip(0), BOX[:, :1], BOX * torch.nan):
        with pytest.raises(InputDataError, match="bounds"):
            sobol_support(2, 3, bounds=bounds)
