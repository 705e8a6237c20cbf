"""The theorem's width: it covers, grows with what it should, and reduces to the known one."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.acquisition import missed, private_ucb_width
from botorch_fed.models import (
    KLFeatures,
    QuadratureFourierFeatures,
    StationaryKernel,
    noise_norm_bound,
    noise_shift,
)
from botorch_fed.rng import generator

RHO = 0.3


def test_without_noise_it_is_that_of_linear_bandits() -> None:
    Phi = generator(0, "phi").normal(40, 5)
    V = Phi.mT @ Phi + RHO**2 * torch.eye(5).double()
    information = float(torch.logdet(V / RHO**2))
    expected = 1.5 + math.sqrt(information + 2 * math.log(2 / 0.05))
    width = private_ucb_width(
        V, t=41, norm_bound=1.5, noise_std=RHO, noise_var=RHO**2, failure=0.05
    )
    assert width == pytest.approx(expected, rel=1e-12)


def test_every_term_widens_it() -> None:
    V = 50.0 * torch.eye(4).double()
    settings = {"t": 10, "norm_bound": 1.0, "noise_std": RHO, "noise_var": RHO**2}
    plain = private_ucb_width(V, **settings)
    for more in (
        {"moment_noise_bound": 1.0},
        {"truncation": 0.01},
        {"norm_bound": 2.0},
        {"failure": 0.01},
    ):
        assert private_ucb_width(V, **{**settings, **more}) > plain


def test_a_shifted_private_posterior_is_covered() -> None:
    """In the norm of V, over 300 streams: far more often than promised."""
    m, n, s, failure = 6, 200, 0.8, 0.1
    bound = noise_norm_bound(s, m, horizon=n, failure=failure)
    misses = 0
    for seed in range(300):
        stream = generator(seed, "stream")
        a = stream.normal(n, m)
        a = a / a.norm(dim=1, keepdim=True)
        theta = stream.normal(m)
        theta = theta / theta.norm()
        y = a @ theta + RHO * stream.normal(n)
        half = s / 2 * stream.normal(m, m)
        noise = half + half.mT  # off-diagonal s / √2, on it s √2: a little more than svec's
        h = s * stream.normal(m)
        shifted = noise + noise_shift(s, m, horizon=n, failure=failure) * torch.eye(m).double()
        V = a.mT @ a + shifted + RHO**2 * torch.eye(m).double()
        error = torch.linalg.solve(V, a.mT @ y + h) - theta
        kappa = float(torch.sqrt(h @ torch.linalg.solve(shifted, h)))
        width = private_ucb_width(
            V,
            t=n + 1,
            norm_bound=1.0,
            noise_std=RHO,
            noise_var=RHO**2,
            gram_noise_bound=bound,
            moment_noise_bound=kappa,
            failure=failure,
        )
        misses += float(torch.sqrt(error @ V @ error)) > RHO * width
    assert misses <= failure * 300


def test_what_a_cut_map_misses_is_the_distance_to_the_whole_one() -> None:
    kernel, box = StationaryKernel(math.inf, [0.2], 0.7), torch.tensor([[0.0], [1.0]]).double()
    whole = QuadratureFourierFeatures.from_kernel(kernel, box, tol=1e-6)
    X = torch.linspace(0, 1, 50).double()[:, None]
    cut = KLFeatures.from_map(whole, X, num_features=4)
    known = whole(X) - cut(X) @ cut.projection.mT
    assert torch.allclose(missed(cut, X), known.square().sum(dim=-1), atol=1e-12)
    assert float(missed(cut, X).max()) > 0.05
    assert float(missed(whole, X).max()) < 1e-12


def test_outcomes_of_what_a_map_misses_are_covered() -> None:
    """A function of norm one outside the features: only the term of the truncation covers it."""
    n, m = 400, 3
    Phi = torch.zeros(n, m).double()
    Phi[:, 0] = math.sqrt(0.8)  # all miss a fifth of the variance
    V = Phi.mT @ Phi + RHO**2 * torch.eye(m).double()
    missing = math.sqrt(0.2)  # the function at all of them, and at the next point
    error = Phi[:1] @ torch.linalg.solve(V, Phi.mT @ torch.full((n, 1), missing).double())
    root = math.sqrt(float(Phi[:1] @ torch.linalg.solve(V, Phi[:1].mT)))
    settings = {"t": n, "norm_bound": 1.0, "noise_std": RHO, "noise_var": RHO**2, "failure": 0.05}
    reach = RHO * root * private_ucb_width(V, truncation=0.2 * n, **settings)
    short = RHO * root * private_ucb_width(V, **settings)
    assert short < float(error) < reach


@pytest.mark.parametrize(
    "wrong", [{"t": 0}, {"noise_std": 0.0}, {"failure": 1.0}, {"truncation": -1.0}]
)
def test_refusals(wrong: dict[str, float]) -> None:
    settings = {"t": 1, "norm_bound": 1.0, "noise_std": RHO, "noise_var": RHO**2}
    with pytest.raises(InputDataError):
        private_ucb_width(torch.eye(3).double(), **{**settings, **wrong})
    with pytest.raises(InputDataError, match="m x m"):
        private_ucb_width(torch.ones(3, 2).double(), **settings)
