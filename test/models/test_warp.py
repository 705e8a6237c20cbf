"""The logarithmic scale: its inverse, where it is none, and a kernel on it."""

from __future__ import annotations

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from gpytorch.kernels import RBFKernel

from botorch_fed.models import LogWarp, WarpedFeatures, WarpedKernel
from test.cases import quadrature, uniform

OFFSETS = torch.tensor([1e-3, 0.0]).double()


def test_a_warp_maps_the_cube_on_itself_and_back() -> None:
    warp, X = LogWarp(OFFSETS), uniform(50, 2)
    Z = warp.transform(X)
    assert torch.equal(Z, warp(X))
    assert torch.equal(Z[:, 1], X[:, 1])
    expected = torch.log1p(X[:, 0] / 1e-3) / torch.log1p(torch.tensor(1e3).double())
    torch.testing.assert_close(Z[:, 0], expected)
    torch.testing.assert_close(warp.untransform(Z), X)
    corners = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    torch.testing.assert_close(warp.transform(corners), corners)


def test_without_offsets_nothing_is_warped() -> None:
    warp, X = LogWarp(torch.zeros(2).double()), uniform(5, 2)
    assert warp.identity
    assert torch.equal(warp.transform(X), X)
    assert torch.equal(warp.untransform(X), X)
    assert not LogWarp(OFFSETS).identity
    phi = quadrature()
    assert WarpedFeatures.around(phi, warp.offsets) is phi
    around = WarpedFeatures.around(phi, OFFSETS)
    assert around.fingerprint == WarpedFeatures(phi, OFFSETS).fingerprint


def test_a_warped_kernel_is_the_kernel_of_warped_points() -> None:
    base, warp, X = RBFKernel().double(), LogWarp(OFFSETS), uniform(6, 2)
    found = WarpedKernel(base, warp)(X, X[:3]).to_dense()
    assert torch.equal(found, base(warp(X), warp(X[:3])).to_dense())


def test_refuses_offsets_that_make_no_scale() -> None:
    with pytest.raises(BotorchTensorDimensionError, match="`d` tensor"):
        LogWarp(torch.ones(2, 2).double())
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputDataError, match="offsets"):
            LogWarp(torch.tensor([value, 0.0]).double())
