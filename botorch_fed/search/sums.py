r"""Searches whose messages are added up, and the default one: a sum of the sites' mean functions.

What a site adds in a round is the mean of its own posterior on its own standardised scale, over a
shared basis, the weights that trusts in others have earned there, and the number one
(`search.transfer.pack_report`). From the sum a site takes away
exactly what it has put in; what remains, the sum of the others' functions, is the prior of its own
model, with a trust that its own outcomes earn (`search.transfer.TransferSearch`). How a site uses
the sum is its own business; public is the basis alone.

What the sum reveals: the sum of all mean functions, how many sites have three observations or
more, and the sum of the weights of their trusts. With two sites that is the other
one's function. A site alone cannot be read from the sum of many, but from the difference of two
sums over different rosters; and if all others have finished, so that their functions stay as they
are, from the difference of any two: such a run opens one sum (`SummedSearch.one_sum_if_done`).

No message is louder than a site's function can be. A site that contributes more than that makes
itself the prior of all others, who test it on their own outcomes: a sum that no honest sites can
have made is left out, any other earns its trust or loses it. It can also pretend to as much
experience with trusts as all honest sites together have: that moves the others' prior
probabilities, which their own outcomes correct.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.federation.points import untried
from botorch_fed.federation.terms import MAX_WEIGHT, OWN, Search, Terms, View, check_vector
from botorch_fed.models import FeatureMap
from botorch_fed.models.earned_prior import reference_features
from botorch_fed.search.releases import Sum
from botorch_fed.search.transfer import (
    MAX_SPREAD,
    MIN_OWN,
    Advice,
    Heard,
    TransferSearch,
    heard,
    mean_trust,
    pack_report,
    prior_of_sum,
    report_size,
    split,
    unpack_sum,
)
from botorch_fed.space import SearchSpace

logger = logging.getLogger(__name__)

BOUND = 256.0  # of a weight: ten times the largest of a function that varies by its own scale
_SUM_BITS = 30  # of a sum of weights: what two words of a ciphertext hold, see `precision`
_COARSEST = 2.0**-18
_ROUNDING = 1e-2  # of the spread of a sum of honest functions
_EXACT_BITS = 51  # of a sum of other numbers: nothing is lost in float64


@dataclass(frozen=True, kw_only=True)
class SummedSearch(Search):
    """A search that knows more of its sums than that they are numbers.

    A search without these properties can be added up as well: its numbers are bounded by
    `MAX_WEIGHT`, and a sum is exact. Its `View.release` is the newest `Sum`, or what its method
    ``of_sum(terms, found)`` makes of that, if it has one.
    """

    every_sum: ClassVar[bool] = False  # a sum can be read only by who has read those before
    one_sum_if_done: ClassVar[bool] = False  # the default where some sites do not evaluate
    gives_records: ClassVar[bool] = False  # `n x (m + 1)` to a mechanism that protects records
    adds: ClassVar[str] = "a message"  # in words
    no_noise: ClassVar[str] = ""  # why noise does not go with the search

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` for noise where it would drown the sum."""
        if self.no_noise and getattr(terms.aggregation, "noise_at", "none") != "none":
            raise InputDataError(self.no_noise)

    def bound(self, terms: Terms) -> float:
        """The largest number that a site contributes."""
        return MAX_WEIGHT

    def precision(self, num_agents: int) -> float:
        """The step of the public grid, relative to the bound."""
        return exact_precision(num_agents)

    def content(self, terms: Terms) -> str:
        """What a site adds to a sum, in words."""
        return self.adds

    def least_agents(self, num_agents: int) -> int:
        """The fewest agents of a sum under a joint key, among so many."""
        return 1


def exact_precision(num_agents: int) -> float:
    """The finest relative step at which a sum of so many numbers is exact in float64."""
    return 2.0 ** (math.ceil(math.log2(num_agents)) - _EXACT_BITS)


def mechanism_of(terms: Terms) -> Any:
    """The mechanism that makes sums noisy; None without one."""
    make = getattr(terms.aggregation, "mechanism_for", None)
    return None if make is None else make(terms)


@dataclass(frozen=True, kw_only=True)
class TransferSum(SummedSearch):
    """The default search (`TransferSearch`), where a sum of all messages arrives.

    Attributes:
        strategy: How a site uses sums and data.
    """

    strategy: TransferSearch = field(default=TransferSearch(), metadata=OWN)

    takes_fidelity = True
    one_sum_if_done = True
    many_outcomes = True
    adds = "the mean function of its own model and its trust in what it has received"
    no_noise = (
        "TransferSearch makes a sum of new functions each round: with noise for all of them "
        "nothing would be left. Use DPFTSDE, which makes few, or SupportSearch with a mechanism."
    )

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` for noise, or a space that does not suit the strategy."""
        super().check_terms(terms)
        self.strategy.check_space(terms.space)

    def size(self, terms: Terms) -> int:
        """How many numbers a message has."""
        return len(terms.space.modelled) * report_size(terms.feature_map) + 1

    def bound(self, terms: Terms) -> float:
        """The largest number that a site contributes."""
        return BOUND

    def precision(self, num_agents: int) -> float:
        """The finest relative step at which ciphertexts stay small, never a coarse one."""
        return min(2.0 ** (math.ceil(math.log2(num_agents)) - _SUM_BITS), _COARSEST)

    def check(self, terms: Terms, message: Tensor) -> None:
        """Raise `MessageError` unless a message fits the grid."""
        check_vector(message, self.size(terms), "A message", BOUND)

    def message(self, view: View) -> Tensor | None:
        """The site's report and the number 1; zeros with too few observations to say anything."""
        return contribution(
            view.terms.feature_map,
            self.strategy,
            view.terms.space,
            view.X,
            view.Y,
            self._advice(view),
            view.Yvar,
        )

    def trust(self, terms: Terms, message: Tensor) -> float | None:
        """The mean of the trusts by the weights in an own message, over the modelled outcomes."""
        return mean_trust(message[:-1].chunk(len(terms.space.modelled)))

    def point(self, view: View) -> Tensor:
        """The next point by the own model, with the newest sum as its prior."""
        terms, advice, have = view.terms, self._advice(view), len(view.X)
        if advice is None and max(terms.num_initial, have) < MIN_OWN:
            # A newcomer that nobody tells anything.
            left = None if view.candidates is None else untried(view.candidates, view.X)
            dealt = view.dealt(MIN_OWN, left)
            return dealt[min(have, len(dealt) - 1) :][:1]
        return self.strategy.point(
            terms.space,
            view.X,
            view.Y,
            advice,
            chosen=view.chosen,
            failed=view.failed,
            candidates=view.candidates,
            stream=view.stream("query", view.n - view.first),
            Yvar=view.Yvar,
            room=view.room,
        )

    def listens(self, view: View) -> bool:
        """Whether the strategy uses sums at all."""
        return self.strategy.listen

    def has_messages(self, view: View) -> bool:
        """Whether the newest sum says anything of others."""
        return self._advice(view) is not None

    def _advice(self, view: View) -> Heard:
        """What the others say in the newest sum of each modelled outcome; None if of none."""
        found: Sum | None = view.release
        if found is None or found.total is None:
            return None
        terms, count = view.terms, len(view.terms.space.modelled)
        mine = (None,) * count if found.mine is None else split(found.mine, count)
        said_of_each = []
        for total, own in zip(split(found.total, count), mine, strict=True):
            said = advice(terms.feature_map, total, own, len(terms.agents))
            if said is not None and said.trust is not None:
                said = Advice.of(said.prior, said.trust, made=found.t, now=view.t - 1)
            said_of_each.append(said)
        return heard(said_of_each)


def contribution(
    feature_map: FeatureMap,
    strategy: TransferSearch,
    space: SearchSpace,
    X: Tensor,
    Y: Tensor,
    advice: Heard,
    Yvar: Tensor | None = None,
) -> Tensor:
    """What an agent adds to a sum.

    Args:
        feature_map: The shared basis.
        strategy: The agent's own.
        space: The map of inputs.
        X: Own points, `n x d`.
        Y: Own outcomes, `n x m`, larger is better.
        advice: What the last sum says.
        Yvar: The known variances of the outcomes, `n x m`, if all are known.

    Returns:
        `report_size(feature_map)` numbers for each modelled outcome, and one; zeros if the agent
        has too few observations to say anything.
    """
    count = len(space.modelled)
    report = strategy.report(space, feature_map, X, Y, advice, Yvar=Yvar)
    packed = pack_report(feature_map, report, count)
    for block in packed[:-1].view(count, -1)[:, : feature_map.num_features]:
        loudest = float(block.abs().max())
        if loudest > BOUND:
            block *= BOUND / loudest
    return packed


def advice(
    feature_map: FeatureMap, total: Tensor, own: Tensor | None, num_agents: int
) -> Advice | None:
    """What others say of an outcome; None if nobody does, or nobody honest can have said it.

    Args:
        feature_map: The shared basis.
        total: The sum.
        own: What the site has put into it; None if nothing.
        num_agents: How many agents there are.
    """
    others = unpack_sum(total, own)
    if not 1 <= others.num_sites <= num_agents:
        return None
    spread = float((reference_features(feature_map) @ others.weights).std()) / others.num_sites
    if not spread <= MAX_SPREAD * (1 + _ROUNDING):
        logger.warning("a sum of functions that honest sites cannot have is left out")
        return None
    prior = prior_of_sum(feature_map, others.weights, others.num_sites)
    if prior is None:
        return None
    # Less than none is no experience, nor is more than there are sites.
    weights, room = others.trust, others.num_sites * (1 + _ROUNDING)
    believable = float(weights.min()) >= -_ROUNDING and float(weights.sum()) <= room
    return Advice(prior, others.trust if believable else None)
