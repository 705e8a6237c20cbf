r"""The default search of sums in many dimensions: each site's own, or one for all, as data say.

In ten dimensions a site's own model knows little after fifty observations, and a sum of such models
little more. Where all sites have one function, the data of all of them in one shrinking region say
much more (`search.region`); where they have not, such a search stands still. A site therefore
decides before every query, by chance: with probability :math:`\pi_i` it takes the step of
`RegionSearch`, otherwise its own (`search.transfer`), whatever others do. All observations enter
both models, whichever step has made them.

:math:`\pi_i` is the probability of one function against functions that have nothing in common,

.. math:: \log\frac{\pi_i}{1 - \pi_i} = \log\frac{p_i}{1 - p_i}
          + \log p(D_i \mid D_{-i}) - \log p(D_i),

by the evidence of the own data :math:`D_i` in the model of the region, given the others' or by
themselves (`search.region.relatedness`): both are functions of the sum and of the own part in it.
The model is the same on both sides, so that what a quadratic function cannot describe counts for
neither. The prior probability :math:`p_i` is the mean of what the others have found, with the
public `PRIOR` as `POOLING` sites more: among unlike sites nobody has to find that out alone.

A message is that of `TransferSum`, the summaries of `RegionSearch`, and five numbers: two votes on
the scale of outcomes, :math:`\log s_i` and :math:`\mathrm{arsinh}(m_i / s_i)` of the own mean and
deviation, and whether the site votes; :math:`\pi_i`, and whether the site has compared. The
first sum has no summaries: the means of the votes are the scale on which the next ones are made, so
that no user has to know it, and a stretched site moves it by little. Own steps need no scale.

The region shrinks with the number of observations in the sum, whatever budgets sites have. Before
it begins to, the sum has too few of them for a quadratic function, and all sites take their own
steps. What a sum says depends on those before: a site that has missed more of them than the hub
keeps goes on alone.

What a sum reveals is what the sums of both searches do, and the mean scale of outcomes. A site that
adds other numbers than those of its data spoils the region, not own steps: the evidence of the
others falls.

A site reads the sum of all others' summaries, by taking its own away. A gram matrix of fewer
records than it has features has all of them in its range: those of twenty sites are found as those
of one are (`test/privacy/test_attacks.py`). With `held` sites therefore add summaries if they are
`FEWEST_SITES` or more, and after the first sum that leaves each of them as many observations of
others as there are features. Until then they say how many they have, each up to a limit, so that a
single one with many does not make it enough. That is for sites that say the truth. It does not
hide what the next sums add: the difference of two can show the new records of all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.federation.terms import Terms, View, check_vector
from botorch_fed.search.region import (
    RegionMemory,
    RegionPlan,
    RegionSearch,
    contribution,
    first_plan,
    relatedness,
    remembered_view,
)
from botorch_fed.search.releases import Sum, Sums
from botorch_fed.search.sums import SummedSearch, TransferSum
from botorch_fed.search.transfer import Heard, report_size

MANY_INPUTS = 8  # with fewer, what single sites say is as good
MOST_INPUTS = 15  # messages grow with the fourth power, and 350 observations are few in twenty
PRIOR = 0.2  # probability that all sites have one function
POOLING = 2.0  # sites that it counts for beside what the others have found
FEWEST_SITES = 4  # a site then reads sums of three others and more
LEAST = 0.005  # probability of either, whatever others have found
MOST_SUMMED = 1000  # observations of one site
FINE = 2.0**12  # by which votes are stretched on the grid of sums
FARTHEST = 1e6  # outcomes, in units of the region's scale
_NUM_SAID = 5  # two votes and their number, a probability and its number
_LARGEST_LOG = 600.0  # of a scale
_LARGEST_RATIO = 40.0  # of a vote on the centre: a mean of 10^17 deviations


def suits(dim: int) -> bool:
    """Whether there are so many inputs that the search is worth its summaries, and not too many."""
    return MANY_INPUTS <= dim <= MOST_INPUTS


@dataclass(frozen=True, eq=False)
class RelatedMemory:
    """What a site knows of the sums.

    Attributes:
        t: The round of the last sum that came, whether it could be read or not; -1 before.
        said: The newest sum of reports that could be read, as `TransferSum` reads it.
        region: What it knows of the region; None before there is a scale of outcomes.
        trust: The probability of one function.
        compared: Whether own data were among what it was found by.
    """

    t: int
    said: Sum | None
    region: RegionMemory | None
    trust: float
    compared: bool


@dataclass(frozen=True, kw_only=True)
class RelatedSum(TransferSum):
    """Every site's own search, or one for all sites, as evidence says.

    Attributes:
        region: The search for all sites; without a horizon its region shrinks with the number of
            observations. A site adds as many observations as are `given`, the nearest to it.
        held: Whether summaries wait until there are so many sites and observations that no site
            can read single records of the others in a sum.
    """

    region: RegionSearch = field(default=RegionSearch(given=MOST_SUMMED))
    held: bool = False

    takes_fidelity = False

    memory_type = RelatedMemory
    many_outcomes = False
    every_sum: ClassVar[bool] = True
    adds = (
        "the mean function of its own model, its trust in what it has received, the scale of its "
        "outcomes, and summaries of its data in a region"
    )

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` for noise, or for a region of no observations."""
        super().check_terms(terms)
        if self.region.given < 1:
            raise InputDataError(
                f"Expected region.given >= 1 observations of a site, got {self.region.given}: "
                f"write region=RegionSearch(given={MOST_SUMMED})."
            )

    # -------------------------------------------------------------- what a site says

    def adds_summaries(self, num_agents: int) -> bool:
        """Whether sites add summaries at all; without, messages are those of `TransferSum`."""
        return not self.held or num_agents >= FEWEST_SITES

    def least_agents(self, num_agents: int) -> int:
        """The fewest agents of a sum under a joint key, among so many."""
        return FEWEST_SITES if self.held and self.adds_summaries(num_agents) else 1

    def content(self, terms: Terms) -> str:
        """What a site adds to a sum, in words."""
        return self.adds if self.adds_summaries(len(terms.agents)) else TransferSum.adds

    def size(self, terms: Terms) -> int:
        """How many numbers a message has."""
        report = super().size(terms)
        if not self.adds_summaries(len(terms.agents)):
            return report
        return report + self.region.size(terms) + _NUM_SAID

    def bound(self, terms: Terms) -> float:
        """The largest number that a site contributes."""
        if not self.adds_summaries(len(terms.agents)):
            return super().bound(terms)
        return self.region.bound(terms)

    def precision(self, num_agents: int) -> float:
        """The finest relative step at which sums are exact; without summaries a short one."""
        if not self.adds_summaries(num_agents):
            return super().precision(num_agents)
        return SummedSearch.precision(self, num_agents)

    def check(self, terms: Terms, message: Tensor) -> None:
        """Raise `MessageError` unless a message fits the grid."""
        check_vector(message, self.size(terms), "A message", self.bound(terms))

    def message(self, view: View) -> Tensor:
        """The report, summaries by the plan of the round, and what the site has found."""
        memory: RelatedMemory = view.memory
        report, terms = super().message(view), view.terms
        assert report is not None
        if not self.adds_summaries(len(terms.agents)):
            return report
        if memory.region is None:
            none = report.new_zeros(self.region.size(terms))
            counted = min(len(view.Y), counted_most(self.region, terms)) if self.held else 0
            counts = report.new_tensor([counted, 0.0])
            return torch.cat([report, none, _votes(view.Y), counts])
        plan = replace(memory.region.plan, t=view.t)
        data = _nearest(plan, view.X, view.Y, self.region.given)
        summaries = contribution(self.region, plan, *data)
        found = report.new_tensor([memory.trust, 1.0] if memory.compared else [0.0, 0.0])
        return torch.cat([report, summaries, report.new_zeros(3), found])

    def trust(self, terms: Terms, message: Tensor) -> float | None:
        """As of `TransferSum`: the trust in the function, not the probability of one function."""
        if self.adds_summaries(len(terms.agents)):
            message = self._parts(terms, message)[0]
        return super().trust(terms, message)

    def _parts(self, terms: Terms, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A report, summaries, and the five numbers, of a message or of a sum."""
        sizes = [report_size(terms.feature_map) + 1, self.region.size(terms), _NUM_SAID]
        report, summaries, said = numbers.split(sizes)
        return report, summaries, said

    # -------------------------------------------------------------- what it knows

    def start(self, view: View) -> RelatedMemory:
        """Nothing but the prior probability."""
        return RelatedMemory(-1, None, None, PRIOR, False)

    def received(self, view: View) -> RelatedMemory:
        """What it knows after the sums that came, each read once and after all those before."""
        memory: RelatedMemory = view.memory
        release: Sums | None = view.release
        for found in () if release is None else release.sums:
            if found.t > memory.t and found.previous == memory.t:
                memory = self._after(view, memory, found)
        return memory

    def _after(self, view: View, memory: RelatedMemory, found: Sum) -> RelatedMemory:
        """What it knows after the next sum."""
        memory = replace(memory, t=found.t)
        if found.total is None:  # an agent has spoilt it, for all alike
            if memory.region is None:
                return memory
            return replace(memory, region=self.region.after(view, memory.region, found))
        if not self.adds_summaries(len(view.terms.agents)):
            return replace(memory, said=found)
        report, summaries, said = self._parts(view.terms, found.total)
        mine = None if found.mine is None else self._parts(view.terms, found.mine)
        own = None if mine is None else mine[0].clone()
        memory = replace(memory, said=replace(found, total=report.clone(), mine=own))
        if memory.region is None:
            if self.held and not enough(self.region, view.terms, float(said[3]), found.count):
                return memory
            plan = _scaled_plan(self.region, view.terms.space.dim, found.t, said)
            if plan is None:
                return memory
            none = torch.zeros(0, dtype=torch.float64)
            return replace(memory, region=RegionMemory(plan, None, none, 0, found.t))
        part = replace(found, total=summaries.clone(), mine=None)
        region = self.region.after(view, memory.region, part)
        memory = replace(memory, region=region)
        if region.seen is None or region.seen.t != found.t:  # it could not be read
            return memory
        others = said[3:] if mine is None else said[3:] - mine[2][3:]
        gain = 0.0 if mine is None else self._gain(view, region, mine[1])
        trust = probability(gain, float(others[0]), float(others[1]), found.count)
        return replace(memory, trust=trust, compared=mine is not None and bool(mine[1][-1] > 0))

    def _gain(self, view: View, region: RegionMemory, mine: Tensor) -> float:
        """The evidence of one function in the newest sum."""
        assert region.seen is not None
        read = remembered_view(self.region, view.terms, region.seen, region.total, region.count)
        return relatedness(self.region, read, region.total, mine)

    # -------------------------------------------------------------- where it looks

    def point(self, view: View) -> Tensor:
        """The next point: that of the region with the probability of one function, or its own."""
        memory: RelatedMemory = view.memory
        region = memory.region
        if region is not None and region.plan.half_width < 0.5 and self.strategy.listen:
            chance = float(view.stream("related", view.n - view.first).uniform(1))
            if chance < memory.trust:
                return self.region.point(replace(view, memory=region))
        return super().point(view)

    def listens(self, view: View) -> bool:
        """Always: who has missed a sum cannot add to the next."""
        return True

    def _advice(self, view: View) -> Heard:
        """What the others' mean functions say in the newest sum."""
        return super()._advice(replace(view, release=view.memory.said))


def counted_most(region: RegionSearch, terms: Terms) -> int:
    """How many observations a site counts at most where summaries are held back."""
    return math.ceil(2 * region.num_features(terms.space.dim) / max(len(terms.agents), 1))


def enough(region: RegionSearch, terms: Terms, counted: float, num_agents: int) -> bool:
    """Whether a sum leaves each site as many observations of others as there are features.

    Args:
        region: The search.
        terms: The terms.
        counted: The sum of the sites' observations, none with more than `counted_most`.
        num_agents: How many have contributed; a sum that they cannot have is not enough.
    """
    most = counted_most(region, terms)
    least = region.num_features(terms.space.dim) + most
    return num_agents >= FEWEST_SITES and least - 0.5 < counted < num_agents * most + 0.5


def probability(gain: float, found: float, count: float, num_agents: int) -> float:
    """The probability of one function.

    Args:
        gain: Log evidence of own data for it, over that against it.
        found: The sum of the probabilities that others have found.
        count: Of how many others.
        num_agents: How many have contributed; a sum that they cannot have found counts for nothing.
    """
    if not (-1e-2 <= found <= count + 1e-2 and count <= num_agents):
        found, count = 0.0, 0.0
    prior = (max(found, 0.0) + POOLING * PRIOR) / (count + POOLING)
    prior = min(max(prior, LEAST), 1 - LEAST)
    odds = math.log(prior / (1 - prior)) + gain
    return 1 / (1 + math.exp(-min(max(odds, -50.0), 50.0)))


def _votes(Y: Tensor) -> Tensor:
    """The logarithm of the deviation of own outcomes, their mean in units of it, and one."""
    unit = float(Y.abs().max()) if len(Y) > 1 else 0.0
    if unit == 0:
        return torch.zeros(3, dtype=torch.float64)
    scaled = Y / unit  # sums of squares of outcomes near 1e200 would overflow
    deviation = float(scaled.std())
    if deviation <= 1e-14:  # differences below the rounding of the outcomes are none
        return torch.zeros(3, dtype=torch.float64)
    votes = math.log(deviation) + math.log(unit), math.asinh(float(scaled.mean()) / deviation)
    return torch.tensor([FINE * votes[0], FINE * votes[1], 1.0], dtype=torch.float64)


def _scaled_plan(search: RegionSearch, dim: int, t: int, said: Tensor) -> RegionPlan | None:
    """The plan of the first summaries, on the mean scale of the votes; None without any."""
    count = float(said[2])
    if count < 0.5:
        return None
    log_scale, ratio = (said[:2] / (FINE * count)).tolist()
    scale = math.exp(min(max(log_scale, -_LARGEST_LOG), _LARGEST_LOG))
    mean = scale * math.sinh(min(max(ratio, -_LARGEST_RATIO), _LARGEST_RATIO))
    return first_plan(search, dim, t=t + 1, mean=mean, scale=scale)


def _nearest(plan: RegionPlan, X: Tensor, Y: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The observations nearest to the region, and outcomes that its summaries can hold."""
    if len(X) > most:
        distance = (X - plan.centre).abs().amax(dim=-1)
        rows = distance.argsort(stable=True)[:most]
        X, Y = X[rows], Y[rows]
    reach = FARTHEST * plan.scale
    return X, Y.clamp(plan.mean - reach, plan.mean + reach)
