"""Messages for a noisy sum, and what a site makes of the releases."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from botorch_fed.models import FeatureMap, KLFeatures, WarpedFeatures
from botorch_fed.models.earned_prior import project, reference_features
from botorch_fed.protocols.dp_fts_de import default_private_features
from botorch_fed.protocols.noisy_prior import (
    MIN_RELIABILITY,
    Heard,
    Outlook,
    hear,
    heard_prior,
    share_of,
    spoken,
    voice,
)
from botorch_fed.space import Parameter, SearchSpace
from test.cases import normal, quadrature, random_fourier, uniform

FOUR = SearchSpace(tuple(Parameter.real(name, 0.0, 1.0) for name in "abcd"))
KL = default_private_features(FOUR)
M = KL.num_features
MAPS: dict[str, FeatureMap] = {
    "kl": KL,
    "rff": random_fourier(),
    "qff": quadrature(),
    "warped": WarpedFeatures(
        KLFeatures.from_map(quadrature(), uniform(300, 2), num_features=9),
        torch.tensor([0.01, 0.0]).double(),
    ),
}
maps = pytest.mark.parametrize("phi", MAPS.values(), ids=list(MAPS))


def values(phi: FeatureMap, weights: Tensor) -> Tensor:
    """Of the function of weights on the reference points, centred."""
    found = reference_features(phi) @ weights
    return found - found.mean()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


# ------------------------------------------------------------------ messages


@maps
@pytest.mark.parametrize("norm", [1.0, 0.7, 1e3])
def test_a_message_has_the_clip_norm_exactly(phi: FeatureMap, norm: float) -> None:
    for seed in range(5):
        message = spoken(phi, 10.0 ** (3 * seed - 6) * normal(phi.num_features, seed=seed), norm)
        assert float(message.norm()) == pytest.approx(norm, rel=1e-15)


@maps
def test_a_message_is_a_direction(phi: FeatureMap) -> None:
    weights = normal(phi.num_features, seed=1)
    message = spoken(phi, weights, 1.0)
    assert torch.equal(spoken(phi, 2.0**20 * weights, 1.0), message)
    torch.testing.assert_close(spoken(phi, 1e-3 * weights, 1.0), message)
    torch.testing.assert_close(spoken(phi, -weights, 1.0), -message)


@maps
def test_zero_says_nothing(phi: FeatureMap) -> None:
    assert not bool(spoken(phi, torch.zeros(phi.num_features).double(), 1.0).any())


def test_a_constant_is_left_out() -> None:
    """What is special about a function is not drowned by its mean."""
    constant = project(lambda X: torch.ones(len(X)).double().numpy(), KL)
    weights = normal(M, seed=2)
    loud = spoken(KL, weights + 100 * constant, 1.0)
    quiet = spoken(KL, weights, 1.0)
    assert float(loud @ quiet) > 0.9
    far = (weights + 100 * constant) / (weights + 100 * constant).norm()
    assert abs(float(far @ (weights / weights.norm()))) < 0.8


def test_what_is_heard_of_a_message_is_its_function() -> None:
    for phi in MAPS.values():
        weights = normal(phi.num_features, seed=3)
        heard = hear(None, 0, spoken(phi, weights, 1.0), 0.0, share=1.0)
        prior = heard_prior(phi, heard, alone=0.0, min_reliability=MIN_RELIABILITY)
        assert prior is not None
        assert correlation(values(phi, prior.weights), values(phi, weights)) > 0.999


def test_the_voice_halves_the_spectrum_of_noise() -> None:
    """An entry is a coefficient of an orthonormal function times the root of its deviation."""
    deviation = reference_features(KL).square().mean(dim=0).sqrt()
    torch.testing.assert_close(voice(KL).square(), deviation / deviation.max())
    assert float(voice(KL).min()) > 0.1
    # The error of a function that was said as loud as possible is less than in either other way.
    weights = normal(M, seed=4)
    errors = []
    for power in (0.0, 0.5, 1.0):  # whitened, in between, orthonormal
        scale = deviation**power
        noise = normal(M, 2000, seed=5) * (scale * weights).norm() / scale.unsqueeze(-1)
        errors.append(float(values(KL, noise).square().mean()))
    assert errors[1] == min(errors)


# ------------------------------------------------------------------ releases


def test_noise_of_what_was_heard_is_known() -> None:
    heard = []
    for seed in range(400):
        one = hear(None, 0, 0.3 * normal(M, seed=2 * seed), 0.3, share=share_of(0, 3))
        heard.append(hear(one, 4, 0.2 * normal(M, seed=2 * seed + 1), 0.2, share=share_of(4, 3)))
    totals = torch.stack([h.total for h in heard])
    expected = 3 * 0.3**2 + 7 * 0.2**2
    assert heard[0].variance == pytest.approx(expected)
    error = 5 * math.sqrt(2 / totals.numel())
    assert float(totals.square().mean()) == pytest.approx(expected, rel=error)


def test_a_release_counts_once_and_an_old_one_not() -> None:
    release = normal(M)
    heard = hear(None, 2, release, 0.1, share=1.0)
    assert hear(heard, 2, release, 0.1, share=1.0) is heard
    assert hear(heard, 0, release, 0.1, share=1.0) is heard
    twice = hear(heard, 3, release, 0.1, share=2.0)
    torch.testing.assert_close(twice.total, 3 * release)
    assert (twice.made, twice.share) == (3, 3.0)


def test_later_releases_count_more() -> None:
    shares = [share_of(made, 3) for made in range(6)]
    assert shares == sorted(shares)
    assert share_of(0, 0) == 1.0


def test_reliability_is_the_share_of_signal() -> None:
    signal = normal(M, seed=9)
    signal = signal / signal.norm()
    for noise, expected in ((1e-3, 1.0), (math.sqrt(1 / M), 0.5), (1e3, 0.0)):
        heard = [
            hear(None, 0, signal + noise * normal(M, seed=n), noise, share=2.0) for n in range(400)
        ]
        found = torch.tensor([h.reliability(0.0) for h in heard])
        # Of noise alone the estimate is cut off at zero, and so a little too large.
        assert abs(float(found.median()) - expected) < (0.12 if expected == 0 else 0.05)
    half = hear(None, 0, signal, 0.0, share=2.0)
    assert half.reliability(0.5) == pytest.approx(0.5)  # of which sites alone would say as much


def followed(releases: list[Tensor], noise: float, alone: float) -> float:
    """In what share of cases agents would follow a release."""
    heard = [hear(None, 0, release, noise, share=1.7) for release in releases]
    priors = [heard_prior(KL, h, alone=alone, min_reliability=MIN_RELIABILITY) for h in heard]
    return sum(prior is not None for prior in priors) / len(heard)


def test_nobody_follows_noise() -> None:
    noise = [normal(M, seed=n) for n in range(400)]
    chance = float(chi2.sf(M / (1 - MIN_RELIABILITY), M))  # that a norm is as large
    assert chance < 0.21
    assert abs(followed(noise, 1.0, 0.0) - chance) < 5 * math.sqrt(chance / 400)
    assert heard_prior(KL, None, alone=0.0, min_reliability=0.0) is None
    silent = hear(None, 0, torch.zeros(M).double(), 0.0, share=1.0)
    assert heard_prior(KL, silent, alone=0.0, min_reliability=0.0) is None


def test_nobody_follows_a_crowd_that_does_not_agree() -> None:
    crowd, choir = [], []
    for n in range(400):
        messages = normal(40, M, seed=n)
        noise = 3.5 / 40 * normal(M, seed=1000 + n)
        crowd.append((messages / messages.norm(dim=-1, keepdim=True)).mean(dim=0) + noise)
        messages = messages + 0.8 * normal(M, seed=2000 + n)
        choir.append((messages / messages.norm(dim=-1, keepdim=True)).mean(dim=0) + noise)
    assert followed(crowd, 3.5 / 40, 1 / 40) < 0.21 + 5 * math.sqrt(0.21 / 400)
    assert followed(choir, 3.5 / 40, 1 / 40) > 0.9


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_a_prior_is_as_loud_as_it_is_reliable(noise: float) -> None:
    heard, alone = Heard(0, 3 * normal(M), 1.0, noise * 9), 0.1
    prior = heard_prior(KL, heard, alone=alone, min_reliability=0.0)
    assert prior is not None
    told = reference_features(KL) @ prior.weights - prior.centre
    assert float(told.std()) == pytest.approx(math.sqrt(heard.reliability(alone)))
    assert abs(float(told.mean())) < 1e-12
    more = heard.reliability(alone) + 1e-9
    assert heard_prior(KL, heard, alone=alone, min_reliability=more) is None


# ------------------------------------------------------------------ before anything is spent


def mean_message(num_agents: int, agreement: float, seed: int) -> Tensor:
    """The mean of random messages of norm one, any two of which correlate as said."""
    own = normal(num_agents, 200, seed=seed)
    own = own / own.norm(dim=-1, keepdim=True)
    common = normal(200, seed=10_000 + seed)
    messages = agreement**0.5 * common / common.norm() + (1 - agreement) ** 0.5 * own
    return messages.mean(dim=0)


@pytest.mark.parametrize("agreement", [0.0, 0.3, 1.0])
def test_an_outlook_is_what_comes(agreement: float) -> None:
    outlook = Outlook(12, 200, 0.05, (1.0, 2.0))
    noise = 0.05 * math.sqrt(200)
    signals, totals = [], []
    for seed in range(200):
        signal = mean_message(12, agreement, seed)
        signals.append(float(signal.square().sum()) / noise**2)
        heard = None
        for made, share in enumerate(outlook.shares):
            release = signal + 0.05 * normal(200, seed=777 + 2 * seed + made)
            heard = hear(heard, made, release, 0.05, share=share)
        assert heard is not None
        totals.append((float((heard.share * signal).square().sum()), 200 * heard.variance))
    assert outlook.ratio(agreement) ** 2 == pytest.approx(sum(signals) / 200, rel=0.05)
    signal_part, noise_part = (sum(part) for part in zip(*totals, strict=True))
    alone = 200 * sum(outlook.shares) ** 2 / 12
    found = (signal_part - alone) / (signal_part + noise_part)
    assert outlook.reliability(agreement) == pytest.approx(found, rel=0.05, abs=0.02)


def test_enough_agents_are_enough_and_fewer_are_not() -> None:
    outlook = Outlook(8, 20, 3.45 / 8, (1.0, 1.2, 1.4))
    enough = outlook.enough_agents(0.15, 0.3)
    assert 8 < enough < 25
    for count, reached in ((enough, True), (enough - 1, False)):
        other = Outlook(count, 20, 3.45 / count, outlook.shares)
        assert (other.reliability(0.15) >= 0.3) == reached
    assert outlook.enough_agents(0.15, 0.0) == 8


def test_words_name_the_numbers() -> None:
    outlook = Outlook(8, 20, 3.45 / 8, (1.0, 1.2, 1.4))
    assert "8 agents and 20 numbers" in outlook.words
    assert f"{outlook.reliability(0.15):.0%}" in outlook.words
    assert f"{outlook.enough_agents(0.15, 0.3)} agents" in outlook.advice(0.3, 0.15)
    assert "of it." in Outlook(8, 20, 0.1, (1.0,)).words


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_a_sampled_crowd_that_shares_nothing_is_not_followed(rate: float) -> None:
    count, followed = 400, 0
    for seed in range(10):
        messages = normal(count, 20, seed=seed)
        messages = messages / messages.norm(dim=-1, keepdim=True)
        taking_part = uniform(count, seed=seed) < rate
        release = messages[taking_part].sum(dim=0) / (rate * count)
        heard = hear(None, 0, release, 0.0, share=1.0)
        followed += heard.reliability(1 / (rate * count)) >= MIN_RELIABILITY
    assert followed <= 5  # without noise half of all are above their expected norm
    assert Outlook(rate * count, 20, 1e-3, (1.0,)).reliability(0.0) == 0.0
