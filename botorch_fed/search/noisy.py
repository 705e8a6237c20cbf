r"""The default search on noisy releases: messages for a noisy sum, and releases as a prior.

A message is a function over the shared basis without its mean over the cube, which says nothing
about where to look, scaled to the clip norm: one voice each, and nothing lost by clipping. Its
entries are weights times the root of their feature's deviation. With orthonormal functions
:math:`e_j` and features :math:`\sqrt{\lambda_j} e_j`, an entry is a coefficient of
:math:`\lambda_j^{1/4} e_j`: noise of equal size in every entry then does the least harm to the
function, :math:`(\sum_j \lambda_j^{1/2})^2` in place of :math:`M \sum_j \lambda_j`.

Everything after a release is post-processing and costs no privacy. A release is a mean of `N`
messages of norm `c` plus noise whose deviation `s` is public. Releases are averaged, later ones
counting more. Noise has the expected squared norm :math:`M s^2` in the average `w`, and messages of
sites that have nothing in common :math:`c^2 / N`. What is above both is agreement; its share

.. math:: r^2 = \max(0, |w|^2 - M s^2 - c^2 / N) / |w|^2

is the *reliability* of the average. The standardised function enters the own model multiplied by
`r`, and below a threshold not at all: no site follows noise, or a crowd that does not agree. What
passes by chance is quiet, and has to earn its trust like everything else.

Of several outcomes a message has one such vector each, of norm :math:`c / \sqrt m`: the norm of all
together, which one site can change, is still `c`, and the noise is that of one release of as many
numbers. Each outcome has a reliability of its own.

`Outlook` says before anything is spent what that number will be like.

Whoever adds the noise, a trusted server or the sites together, `NoisyTransfer` reads a
`releases.Noisy`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.federation.points import untried
from botorch_fed.federation.terms import MAX_WEIGHT, OWN, Search, Terms, View, check_vector
from botorch_fed.models import FeatureMap, PriorFunction
from botorch_fed.models.earned_prior import projection, reference_features
from botorch_fed.search.releases import Noisy, Rows, Sum
from botorch_fed.search.transfer import MIN_OWN, Advice, Heard, TransferSearch, heard

MIN_RELIABILITY = 0.2  # reached by one of five averages that are nothing but noise (20 numbers)
EARLY = 0.15  # correlation of two messages, early in a search, of sites with much in common
CLOSE = 0.5  # and late
MIN_VOICE = 1e-3  # of a feature, over the largest

# ------------------------------------------------------------------ messages


def voice(feature_map: FeatureMap) -> Tensor:
    """What weights are multiplied by in a message, `M` public numbers of at most one."""
    deviation = reference_features(feature_map).square().mean(dim=0).sqrt()
    return (deviation / deviation.max().clamp_min(1e-300)).sqrt().clamp_min(MIN_VOICE)


def noisy_message(feature_map: FeatureMap, weights: Tensor, norm: float) -> Tensor:
    """A message for a noisy sum, `M` numbers; zeros if the function is the same everywhere.

    Args:
        feature_map: The shared basis.
        weights: Of a site's function, `M`.
        norm: Of the message.
    """
    values = reference_features(feature_map) @ weights
    constant = projection(feature_map)[1].sum(dim=-1)
    message = voice(feature_map) * (weights - values.mean() * constant)
    size = message.abs().max()
    # What rounding leaves of a constant is nothing to say.
    if not bool(size > 1e-12 * weights.abs().max()):
        return torch.zeros_like(weights)
    message = message / size
    return message * (norm / message.norm())


# ------------------------------------------------------------------ releases


@dataclass(frozen=True, eq=False)
class Average:
    """All releases that a site has got, as a weighted sum, and the noise in it.

    Attributes:
        made: After which round the newest of them was made.
        total: The weighted sum, `M`.
        share: The sum of the weights.
        variance: Of the noise in an entry of `total`.
    """

    made: int
    total: Tensor = field(repr=False)
    share: float
    variance: float

    def of_each(self, count: int) -> tuple[Average, ...]:
        """The average of each of several outcomes, whose functions lie one after the other."""
        return tuple(replace(self, total=part) for part in self.total.chunk(count))

    def reliability(self, alone: float) -> float:
        """The share of agreement in the squared norm, as the releases themselves show it.

        Args:
            alone: The expected squared norm of a mean of messages that have nothing in common.
        """
        square = float(self.total.square().sum())
        noise = len(self.total) * self.variance + self.share**2 * alone
        return max(0.0, 1 - noise / square) if square > 0 else 0.0


def share_of(made: int, num_initial: int) -> float:
    """The weight of a release: the root of how much its messages are made of.

    Args:
        made: After which round it was made.
        num_initial: Own first points of every agent.
    """
    return math.sqrt(max(num_initial + made, 1))


def averaged(
    average: Average | None, made: int, weights: Tensor, noise_std: float, *, share: float
) -> Average:
    """An average with one more release; a release counts once.

    Args:
        average: The releases before.
        made: After which round the release was made.
        weights: The release, `M`.
        noise_std: The deviation of its noise.
        share: Its weight.
    """
    if average is None:
        average = Average(-1, torch.zeros_like(weights), 0.0, 0.0)
    if made <= average.made:
        return average
    return Average(
        made,
        average.total + share * weights,
        average.share + share,
        average.variance + (share * noise_std) ** 2,
    )


def average_prior(
    feature_map: FeatureMap, average: Average | None, *, alone: float, min_reliability: float
) -> PriorFunction | None:
    """What the releases say, as loud as they are reliable; None where that is mostly noise.

    Args:
        feature_map: The shared basis.
        average: The releases.
        alone: As in `Average.reliability`.
        min_reliability: The least share of agreement.
    """
    reliability = 0.0 if average is None else average.reliability(alone)
    if average is None or reliability < max(min_reliability, 1e-12):
        return None
    prior = PriorFunction.of_weights(feature_map, average.total / voice(feature_map))
    if prior is None:
        return None
    loudness = math.sqrt(reliability)
    return replace(prior, weights=loudness * prior.weights, centre=loudness * prior.centre)


# ------------------------------------------------------------------ before anything is spent


@dataclass(frozen=True)
class Outlook:
    r"""How much signal to expect, from public numbers alone.

    If two messages of norm one correlate by `a`, the mean of `N` has the expected squared norm
    :math:`a + (1 - a) / N`, of which :math:`1 / N` comes without any agreement. Noise in an average
    of releases has that of one release times :math:`\sum_k u_k^2` for weights :math:`u_k` that add
    up to one. If a share `r` of the agents has something to say, agreement counts :math:`r^2`, the
    rest `r`.

    Attributes:
        num_agents: `N`, of those that are expected to take part.
        dim: Numbers of a message.
        noise_std: Of the noise in an entry of one release, over the norm of a message.
        shares: The weights of the releases.
        speaking: The share of agents that have something to say.
    """

    num_agents: float
    dim: int
    noise_std: float
    shares: tuple[float, ...]
    speaking: float = 1.0

    def ratio(self, agreement: float) -> float:
        """Norm of the signal over norm of the noise, of one release.

        Args:
            agreement: The correlation of two messages.
        """
        return math.sqrt(self._signal(agreement) / (self.dim * self.noise_std**2))

    def reliability(self, agreement: float) -> float:
        """The reliability of the average of all releases."""
        total = sum(self.shares)
        shrink = sum((share / total) ** 2 for share in self.shares)
        signal = self._signal(agreement)
        agreed = max(0.0, signal - self.speaking / self.num_agents)
        return agreed / (signal + shrink * self.dim * self.noise_std**2)

    def enough_agents(self, agreement: float, reliability: float) -> int:
        """How many agents would make the releases that reliable, at this noise multiplier."""
        n = max(1, math.ceil(self.num_agents))
        while self._with_agents(n).reliability(agreement) < reliability:
            n += max(1, n // 100)
        return n

    def _with_agents(self, n: int) -> Outlook:
        return replace(self, num_agents=n, noise_std=self.noise_std * self.num_agents / n)

    def _signal(self, agreement: float) -> float:
        alone = self.speaking / self.num_agents  # messages that have nothing in common
        return agreement * self.speaking**2 + (1 - agreement) * alone

    @property
    def words(self) -> str:
        """A sentence for a plan."""
        count = len(self.shares)
        return (
            f"With {self.num_agents:g} agents and {self.dim} numbers a release has "
            f"{self.ratio(EARLY):.2g} times as much signal as noise where messages agree by "
            f"{EARLY:g}, as early ones of related sites do, and {self.ratio(CLOSE):.2g} times "
            f"where they agree by {CLOSE:g}; agreement is {self.reliability(EARLY):.0%} and "
            f"{self.reliability(CLOSE):.0%} of {'it' if count == 1 else f'all {count} together'}."
        )

    def advice(self, least: float, agreement: float) -> str:
        """Why nothing is released, and what would help.

        Args:
            least: The share of signal below which no site listens.
            agreement: The correlation of messages that is to be expected.
        """
        return (
            f"That is below {least:.0%} where messages agree by {agreement:g}, so nothing is "
            "released and nothing spent: every agent goes on alone. "
            f"{self.enough_agents(agreement, least)} agents at this noise would do, a larger "
            "epsilon, or a basis of fewer numbers (feature_map); fewer releases leave the noise of "
            "all together as it is. With min_reliability=0 releases are made all the same."
        )


@dataclass(frozen=True)
class Forecast:
    """An outlook, and what follows from it before anything is spent.

    Attributes:
        outlook: How much signal to expect.
        least: The share of agreement below which no site listens.
        agreement: The correlation of messages to expect.
    """

    outlook: Outlook
    least: float
    agreement: float

    @property
    def withheld(self) -> bool:
        """Whether no site is expected to listen, so that nothing is released."""
        return self.outlook.reliability(self.agreement) < self.least

    @property
    def words(self) -> str:
        """What a plan says of signal and noise, and why releases are withheld."""
        if not self.withheld:
            return self.outlook.words
        return f"{self.outlook.words} {self.outlook.advice(self.least, self.agreement)}"


# ------------------------------------------------------------------ the search


class VectorSearch(Search):
    """A search whose messages are vectors over the shared basis, to be clipped and added up."""

    num_regions: int = 1  # a release has a row for each
    adds: str = "a message"  # in words

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` for an aggregation that adds nothing up."""
        if Rows in terms.aggregation.broadcast_types:
            raise InputDataError(
                f"{type(self).__name__} reads noisy sums, and {type(terms.aggregation).__name__} "
                "passes the messages of each agent on: use NoisySum, or TransferRows."
            )

    def size(self, terms: Terms) -> int:
        """As many numbers as the basis has functions."""
        return terms.feature_map.num_features

    def of_sum(self, terms: Terms, found: Sum) -> Noisy | None:
        """A sum of messages that nobody has weighted, as a release: their mean."""
        if found.total is None:
            return None
        std = torch.tensor([found.noise_std / found.count], dtype=torch.float64)
        return Noisy(found.t, (found.total / found.count).unsqueeze(0), std, found.count)

    def check(self, terms: Terms, message: Tensor) -> None:
        """Raise `MessageError` unless a message can be clipped."""
        check_vector(message, self.size(terms), "A message", sys.float_info.max)


@dataclass(frozen=True, kw_only=True)
class NoisyTransfer(VectorSearch):
    """The default search (`TransferSearch`), where noisy sums arrive.

    Attributes:
        clip_norm: The norm of every message.
        min_reliability: The least share of agreement in the releases that a site listens to.
        strategy: How a site uses releases and data.
    """

    clip_norm: float = 1.0
    min_reliability: float = MIN_RELIABILITY
    strategy: TransferSearch = field(default=TransferSearch(), metadata=OWN)

    memory_type = Average
    many_outcomes = True
    takes_fidelity = True
    adds = "the mean function of its own model"

    def __post_init__(self) -> None:
        check_norm(self.clip_norm)
        if not 0 <= self.min_reliability < 1:
            raise InputDataError(f"Expected 0 <= min_reliability < 1, got {self.min_reliability}.")

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` for an aggregation or a space that does not suit the search."""
        super().check_terms(terms)
        self.strategy.check_space(terms.space)

    def size(self, terms: Terms) -> int:
        """As many numbers as the basis has functions, for each modelled outcome."""
        return len(terms.space.modelled) * super().size(terms)

    def norm(self, terms: Terms) -> float:
        """Of a message of all outcomes together, which fills it unless a part is zero."""
        return self.clip_norm

    def message(self, view: View) -> Tensor | None:
        """The means of the own models, centred and scaled; None with too few observations."""
        terms, phi = view.terms, view.terms.feature_map
        own = self.strategy.message(terms.space, phi, view.X, view.Y, Yvar=view.Yvar)
        if own is None:
            return None
        count = len(terms.space.modelled)
        share = self.clip_norm / math.sqrt(count)  # squares of norms add up
        return torch.cat([noisy_message(phi, part, share) for part in own.chunk(count)])

    def has_messages(self, view: View) -> bool:
        """Whether there is a release that is reliable."""
        return self._advice(view) is not None

    def received(self, view: View) -> Average | None:
        """The releases with the newest."""
        average: Average | None = view.memory
        if view.release is None:
            return average
        return averaged(
            average,
            view.release.made,
            view.release.values[0],
            float(view.release.noise_std[0]),
            share=share_of(view.terms.q * view.release.made, view.terms.num_initial),
        )

    def point(self, view: View) -> Tensor:
        """The next point, `1 x d`."""
        advice, known = self._advice(view), torch.cat([view.X, view.avoid])
        if advice is None and view.terms.num_initial < MIN_OWN and len(known) < MIN_OWN:
            # A site that begins without points of its own, and has nothing to listen to.
            listed = None if view.candidates is None else untried(view.candidates, known)
            dealt = view.dealt(MIN_OWN, listed)
            return dealt[min(len(known), len(dealt) - 1) :][:1]
        return self.strategy.point(
            view.terms.space,
            view.X,
            view.Y,
            advice,
            chosen=view.chosen,
            candidates=view.candidates,
            failed=view.failed,
            stream=view.stream("point", view.n - view.first + 1),
            Yvar=view.Yvar,
            room=view.room,
        )

    def _advice(self, view: View) -> Heard:
        """What the releases say of each modelled outcome, while there are any."""
        release: Noisy | None = view.release
        average: Average | None = view.memory
        if release is None or average is None:
            return None
        count = len(view.terms.space.modelled)
        priors = [
            average_prior(
                view.terms.feature_map,
                one,
                alone=self.clip_norm**2 / (count * release.num_agents),
                min_reliability=self.min_reliability,
            )
            for one in average.of_each(count)
        ]
        return heard([None if prior is None else Advice(prior) for prior in priors])

    # -------------------------------------------------------------- before anything is spent

    def forecast(
        self, terms: Terms, made: Sequence[int], *, num_agents: float, noise_std: float
    ) -> Forecast:
        """How much signal to expect in what is planned, and whether a site would listen.

        Args:
            terms: The terms, with a roster.
            made: The rounds after which something is released, one at least.
            num_agents: How many agents are expected to be in a release.
            noise_std: The deviation of the noise in an entry of a release.
        """
        silent = 0  # sites that begin without points have nothing to say
        if terms.active is not None and terms.num_initial < MIN_OWN:
            silent = len(terms.active)
        outlook = Outlook(
            num_agents,
            self.size(terms),
            noise_std / self.clip_norm,
            tuple(share_of(terms.q * t, terms.num_initial) for t in made),
            1 - silent / len(terms.agents),
        )
        return Forecast(outlook, self.min_reliability, self.agreement(terms))

    def agreement(self, terms: Terms) -> float:
        """The correlation of messages to expect of related sites in the first release."""
        return EARLY if terms.active is None else CLOSE


def check_norm(clip_norm: float) -> None:
    """Raise `InputDataError` unless a clip norm is one that sums of messages can have."""
    if not 1e-6 <= clip_norm <= MAX_WEIGHT:
        raise InputDataError(f"Expected 1e-6 <= clip_norm <= {MAX_WEIGHT:g}, got {clip_norm}.")
