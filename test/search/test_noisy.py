"""Messages for a noisy sum, and what a site makes of the releases."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from scipy.stats import chi2
from torch import Tensor

from botorch_fed.federation.agent import AgentState
from botorch_fed.federation.points import dealt_design
from botorch_fed.federation.terms import Order
from botorch_fed.models import FeatureMap, KLFeatures, WarpedFeatures
from botorch_fed.models.earned_prior import project, reference_features
from botorch_fed.search.noisy import (
    MIN_RELIABILITY,
    Average,
    NoisyTransfer,
    Outlook,
    average_prior,
    averaged,
    noisy_message,
    share_of,
    voice,
)
from botorch_fed.search.releases import Noisy
from botorch_fed.search.transfer import TransferSearch, default_private_features
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE
from botorch_fed.wire.codec import decode, encode
from test.cases import normal, quadrature, random_fourier, uniform
from test.federation.dp import FAILED, PHI, SQUARE, hill, history, put

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
        message = noisy_message(
            phi, 10.0 ** (3 * seed - 6) * normal(phi.num_features, seed=seed), norm
        )
        assert float(message.norm()) == pytest.approx(norm, rel=1e-15)


@maps
def test_a_message_is_a_direction(phi: FeatureMap) -> None:
    weights = normal(phi.num_features, seed=1)
    message = noisy_message(phi, weights, 1.0)
    assert torch.equal(noisy_message(phi, 2.0**20 * weights, 1.0), message)
    torch.testing.assert_close(noisy_message(phi, 1e-3 * weights, 1.0), message)
    torch.testing.assert_close(noisy_message(phi, -weights, 1.0), -message)


@maps
def test_zero_says_nothing(phi: FeatureMap) -> None:
    assert not bool(noisy_message(phi, torch.zeros(phi.num_features).double(), 1.0).any())


def test_a_constant_is_left_out() -> None:
    """What is special about a function is not drowned by its mean."""
    constant = project(lambda X: torch.ones(len(X)).double().numpy(), KL)
    weights = normal(M, seed=2)
    loud = noisy_message(KL, weights + 100 * constant, 1.0)
    quiet = noisy_message(KL, weights, 1.0)
    assert float(loud @ quiet) > 0.9
    far = (weights + 100 * constant) / (weights + 100 * constant).norm()
    assert abs(float(far @ (weights / weights.norm()))) < 0.8


def test_what_is_left_of_a_message_is_its_function() -> None:
    for phi in MAPS.values():
        weights = normal(phi.num_features, seed=3)
        heard = averaged(None, 0, noisy_message(phi, weights, 1.0), 0.0, share=1.0)
        prior = average_prior(phi, heard, alone=0.0, min_reliability=MIN_RELIABILITY)
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


def test_the_noise_of_an_average_is_known() -> None:
    heard = []
    for seed in range(400):
        one = averaged(None, 0, 0.3 * normal(M, seed=2 * seed), 0.3, share=share_of(0, 3))
        heard.append(
            averaged(one, 4, 0.2 * normal(M, seed=2 * seed + 1), 0.2, share=share_of(4, 3))
        )
    totals = torch.stack([h.total for h in heard])
    expected = 3 * 0.3**2 + 7 * 0.2**2
    assert heard[0].variance == pytest.approx(expected)
    error = 5 * math.sqrt(2 / totals.numel())
    assert float(totals.square().mean()) == pytest.approx(expected, rel=error)


def test_a_release_counts_once_and_an_old_one_not() -> None:
    release = normal(M)
    heard = averaged(None, 2, release, 0.1, share=1.0)
    assert averaged(heard, 2, release, 0.1, share=1.0) is heard
    assert averaged(heard, 0, release, 0.1, share=1.0) is heard
    twice = averaged(heard, 3, release, 0.1, share=2.0)
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
            averaged(None, 0, signal + noise * normal(M, seed=n), noise, share=2.0)
            for n in range(400)
        ]
        found = torch.tensor([h.reliability(0.0) for h in heard])
        # Of noise alone the estimate is cut off at zero, and so a little too large.
        assert abs(float(found.median()) - expected) < (0.12 if expected == 0 else 0.05)
    half = averaged(None, 0, signal, 0.0, share=2.0)
    assert half.reliability(0.5) == pytest.approx(0.5)  # of which sites alone would say as much


def followed(releases: list[Tensor], noise: float, alone: float) -> float:
    """In what share of cases agents would follow a release."""
    heard = [averaged(None, 0, release, noise, share=1.7) for release in releases]
    priors = [average_prior(KL, h, alone=alone, min_reliability=MIN_RELIABILITY) for h in heard]
    return sum(prior is not None for prior in priors) / len(heard)


def test_nobody_follows_noise() -> None:
    noise = [normal(M, seed=n) for n in range(400)]
    chance = float(chi2.sf(M / (1 - MIN_RELIABILITY), M))  # that a norm is as large
    assert chance < 0.21
    assert abs(followed(noise, 1.0, 0.0) - chance) < 5 * math.sqrt(chance / 400)
    assert average_prior(KL, None, alone=0.0, min_reliability=0.0) is None
    silent = averaged(None, 0, torch.zeros(M).double(), 0.0, share=1.0)
    assert average_prior(KL, silent, alone=0.0, min_reliability=0.0) is None


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
    heard, alone = Average(0, 3 * normal(M), 1.0, noise * 9), 0.1
    prior = average_prior(KL, heard, alone=alone, min_reliability=0.0)
    assert prior is not None
    told = reference_features(KL) @ prior.weights - prior.centre
    assert float(told.std()) == pytest.approx(math.sqrt(heard.reliability(alone)))
    assert abs(float(told.mean())) < 1e-12
    more = heard.reliability(alone) + 1e-9
    assert average_prior(KL, heard, alone=alone, min_reliability=more) is None


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
            heard = averaged(heard, made, release, 0.05, share=share)
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
        heard = averaged(None, 0, release, 0.0, share=1.0)
        followed += heard.reliability(1 / (rate * count)) >= MIN_RELIABILITY
    assert followed <= 5  # without noise half of all are above their expected norm
    assert Outlook(rate * count, 20, 1e-3, (1.0,)).reliability(0.0) == 0.0


# ------------------------------------------------------------------ a site

MANY = tuple(f"agent{n:02d}" for n in range(40))
QUERY = Order(4, "next", True)


@dataclass
class Reader:
    """An agent with `NoisyTransfer` that has got a release, before its next query."""

    released: Noisy | None = None
    least: float = 0.3
    clip_norm: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        common: dict[str, Any] = {"data": {MANY[0]: history(4)}, **self.options}
        study = DPFTSDE(
            budget=30,
            noise_kind="none",
            releases=(0, 1, 4, 5),
            feature_map=PHI,
            min_reliability=self.least,
            clip_norm=self.clip_norm,
            **common,
        )
        self.agent = study.agent(MANY[0], SQUARE, 3, MemoryBlobs())
        self.setup = put(self.agent, study.server(SQUARE, MANY).hub.terms.setup)
        self.state = self.told(self.agent.start(), self.released)

    def told(self, state: AgentState, released: Noisy | None, order: Order = QUERY) -> AgentState:
        blobs = self.setup if released is None else (*self.setup, *put(self.agent, released))
        order = replace(order, t=max(order.t, state.aggregation.t + 1), contribute=order.t == 4)
        if state.order is None:
            self.agent.check(state, order, blobs)
        return self.agent.receive(state, order, blobs)

    @property
    def point(self) -> Tensor:
        """Where it looks next."""
        return self.asked(self.state)

    def asked(self, state: AgentState) -> Tensor:
        found = self.agent.ask(state)
        assert isinstance(found, Tensor)
        return found


def message_of(X: Tensor, Y: Tensor) -> Tensor | None:
    """What an agent with these observations says."""
    reader = Reader(options={"data": {MANY[0]: (X, Y)}})
    found: Tensor | None = reader.agent.reply(reader.state)[1].values
    return found


def loud(strength: float, made: int = 0) -> Noisy:
    """A release whose function is largest in a corner, under noise of known size."""
    signal = normal(1, PHI.num_features, seed=5)
    noise = torch.full((1,), 0.1).double()
    return Noisy(made, strength * signal / signal.norm(), noise, 40.0)


def test_an_own_mean_knows_neither_unit_nor_origin() -> None:
    X, Y = history(7)
    said = message_of(X, Y)
    assert said is not None
    for factor in (2.0**40, 2.0**-40):
        assert torch.equal(message_of(X, factor * Y), said)  # type: ignore[arg-type]
    torch.testing.assert_close(message_of(X, 3e3 * Y - 7e4), said, rtol=1e-5, atol=1e-6)


def test_a_site_with_nothing_to_say_contributes_zero() -> None:
    X, Y = history(7)
    assert message_of(X[:2], Y[:2]) is None  # too little
    constant = message_of(X, torch.full_like(Y, 3.0))
    assert constant is None or not bool(constant.any())


def test_agents_follow_a_signal_and_no_noise() -> None:
    points = {strength: Reader(loud(strength)).point for strength in (0.0, 0.1, 0.3, 100.0)}
    silent = Reader()
    alone = silent.point
    assert silent.state.search is None
    assert torch.equal(points[0.0], alone)
    assert torch.equal(points[0.1], alone)
    assert not torch.equal(points[100.0], alone)
    assert not torch.equal(Reader(loud(0.35), least=0.0).point, alone)
    deaf = {"strategy": TransferSearch(listen=False)}
    assert torch.equal(Reader(loud(0.35), least=0.0, options=deaf).point, alone)


def test_a_release_stays_and_counts_once() -> None:
    reader = Reader(loud(1.0, made=1))
    state = reader.state
    assert isinstance(state.search, Average)
    assert reader.told(state, loud(1.0, made=1)).search is state.search
    assert reader.told(state, loud(7.0, made=0)).search is state.search
    more = reader.told(state, loud(1.0, made=5))
    assert (more.search.made, more.search.share) == (5, 2.0 + 8.0**0.5)  # roots of 3 + 1 and 3 + 5
    restored = decode(encode(more), reader.agent.state_type)
    assert encode(restored) == encode(more)
    # An agent that is sent no release any more goes on alone.
    silent = reader.told(state, None)
    assert silent.search is state.search
    assert torch.equal(reader.asked(silent), Reader().point)


def test_a_newcomer_without_a_reliable_release_is_dealt_points() -> None:
    options = {"data": {}, "num_initial": 0, "active": MANY[:1]}
    reader = Reader(loud(0.0), options=options)
    state = reader.state
    for index in range(3):
        point = reader.asked(state)
        assert torch.equal(point, dealt_design(SQUARE, 0, 40, 3)[index : index + 1])
        # A dealt point that fails is not dealt again.
        state = reader.agent.tell(state, point, FAILED if index == 1 else hill(point))
        state = reader.told(state, loud(0.0))
    told_something = Reader(loud(100.0), options=options)
    assert not torch.equal(told_something.point, dealt_design(SQUARE, 0, 40, 1))


def test_settings_have_bounds() -> None:
    for settings in ({"min_reliability": 1.0}, {"min_reliability": -0.1}, {"clip_norm": 0.0},
                     {"clip_norm": math.nan}):  # fmt: skip
        with pytest.raises(InputDataError, match=next(iter(settings))):
            NoisyTransfer(**settings)
