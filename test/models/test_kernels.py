"""Stationary kernels against GPyTorch's, and their spectra."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)

from botorch_fed.models import StationaryKernel
from botorch_fed.rng import generator
from test.cases import uniform


def _gpytorch(nu: float) -> ScaleKernel:
    base: Kernel = RBFKernel(ard_num_dims=2) if nu == math.inf else MaternKernel(nu, ard_num_dims=2)
    kernel = ScaleKernel(base).double()
    kernel.outputscale = 1.7
    base.lengthscale = torch.tensor([0.3, 0.8], dtype=torch.float64)
    return kernel


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, math.inf])
def test_values_and_gradients_are_gpytorchs(nu: float) -> None:
    theirs, X1, X2 = _gpytorch(nu), uniform(3, 6, 2), uniform(4, 2, seed=1)
    ours = StationaryKernel.from_gpytorch(theirs)
    expected = theirs(X1, X2).to_dense()
    torch.testing.assert_close(ours(X1, X2), expected, rtol=1e-12, atol=1e-12)
    X1 = X1.requires_grad_()
    (expected_gradient,) = torch.autograd.grad(theirs(X1, X2).to_dense().sum(), X1)
    (gradient,) = torch.autograd.grad(ours(X1, X2).sum(), X1)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("nu", [1.5, 2.5])
def test_product_kernel(nu: float) -> None:
    factors = [MaternKernel(nu, active_dims=[j]).double() for j in range(2)]
    factors[0].lengthscale, factors[1].lengthscale = 0.3, 0.8
    theirs, X = ProductKernel(*factors), uniform(6, 2)
    ours = StationaryKernel.from_gpytorch(theirs)
    assert ours.product
    torch.testing.assert_close(ours(X), theirs(X).to_dense(), rtol=1e-12, atol=1e-12)


def test_is_a_frozen_copy() -> None:
    theirs, X = _gpytorch(math.inf), uniform(5, 2)
    ours = StationaryKernel.from_gpytorch(theirs)
    before = ours(X)
    theirs.base_kernel.lengthscale = 2.0
    assert torch.equal(ours(X), before)


def test_one_lengthscale_is_expanded() -> None:
    kernel = RBFKernel().double()
    kernel.lengthscale = torch.tensor(0.4, dtype=torch.float64)
    assert StationaryKernel.from_gpytorch(kernel, 3).lengthscale.tolist() == pytest.approx(
        [0.4] * 3
    )
    with pytest.raises(InputDataError, match="2 length scales but the inputs have 3"):
        StationaryKernel.from_gpytorch(_gpytorch(math.inf), 3)


@pytest.mark.parametrize(
    "kernel",
    [
        LinearKernel(),
        RBFKernel(batch_shape=torch.Size([2])),
        RBFKernel(active_dims=[0]),
        ProductKernel(MaternKernel(0.5, active_dims=[0]), MaternKernel(1.5, active_dims=[1])),
    ],
)
def test_refuses_what_it_cannot_represent(kernel: Kernel) -> None:
    with pytest.raises(UnsupportedError):
        StationaryKernel.from_gpytorch(kernel)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_refuses_bad_hyperparameters(value: float) -> None:
    with pytest.raises(InputDataError, match="lengthscale must be positive and finite"):
        StationaryKernel(math.inf, [value])
    with pytest.raises(InputDataError, match="outputscale must be positive and finite"):
        StationaryKernel(math.inf, [1.0], value)
    with pytest.raises(UnsupportedError, match="Smoothness must be one of"):
        StationaryKernel(3.5, [1.0])


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, math.inf])
@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize("orthogonal", [False, True])
def test_frequencies_have_the_kernel_as_characteristic_function(
    nu: float, product: bool, orthogonal: bool
) -> None:
    if orthogonal and product and nu != math.inf:
        pytest.skip("a product of Matérn kernels has no isotropic spectrum")
    kernel = StationaryKernel(nu, [0.3, 0.8], product=product)
    count = 40_000
    omega = kernel.sample_frequencies(count, generator=generator(1, "omega"), orthogonal=orthogonal)
    lags = uniform(20, 2)
    estimate = (omega @ lags.mT).cos().mean(dim=0)
    expected = kernel(lags, torch.zeros(1, 2, dtype=torch.float64)).squeeze(-1)
    # sd of one cosine is at most 1: five standard errors, 20 lags, false alarm about 1e-5.
    assert float((estimate - expected).abs().max()) < 5 / math.sqrt(count)


def test_orthogonal_blocks_are_orthogonal() -> None:
    kernel = StationaryKernel(math.inf, [1.0, 1.0, 1.0])
    omega = kernel.sample_frequencies(6, generator=generator(0, "o"), orthogonal=True)
    for block in omega.split(3):
        gram = block @ block.mT
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedError, match="isotropic spectrum"):
        StationaryKernel(1.5, [1.0, 1.0], product=True).sample_frequencies(
            2, generator=generator(0), orthogonal=True
        )
