"""The theorem's width: it covers, grows with what it should, and reduces to the known one."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.acquisition import private_ucb_width
from botorch_fed.models import noise_norm_bound, noise_shift
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
        {"kernel_error": 0.01},
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


@pytest.mark.parametrize(
    "wrong", [{"t": 0}, {"noise_std": 0.0}, {"failure": 1.0}, {"kernel_error": -1.0}]
)
def test_refusals(wrong: dict[str, float]) -> None:
    settings = {"t": 1, "norm_bound": 1.0, "noise_std": RHO, "noise_var": RHO**2}
    with pytest.raises(InputDataError):
        private_ucb_width(torch.eye(3).double(), **{**settings, **wrong})
    with pytest.raises(InputDataError, match="m x m"):
        private_ucb_width(torch.ones(3, 2).double(), **settings)
