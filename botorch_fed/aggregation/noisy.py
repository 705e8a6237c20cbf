r"""Noisy weighted sums of clipped messages by a trusted server [Dai2021]_.

::

    message        from -> to       content                                        readable by
    Setup          server -> agent  the terms, the shared basis and the promise    all
    Order          server -> agent  start, query or rest; whether to contribute    that agent
    Contribution   agent -> server  one vector, M numbers                          server
    Noisy          server -> agent  one noisy vector per region, P x M             all agents

In round 0 every agent evaluates its first points; rounds 1 to `T` are one query of every active
agent each. After a round of `releases` the server samples agents, clips their vectors, weighs them
per region, adds noise and releases `P` vectors. Round `t` uses what was released after round
`t - 1`, so that nothing is released after round `T`.

Guarantee: for public rosters, regions, weights, features, clip norm, sampling rate, noise
multiplier and rounds, everything that any coalition of *other* agents sees in the whole run is
:math:`(\epsilon, \delta)`-indistinguishable from a run in which all of an agent's messages are zero
(`privacy.mechanisms` has the proof, `FederatedServer.promise` the numbers). Agents that contribute
but never listen are covered as well.

Trust: the server is trusted with every message. Not covered: who sees an agent's own queries and
results; settings that were tuned on the agents' data without paying for it (a `SharedLedger` pays
for the pilot runs too); agents that learn who was sampled in a round.

Differs from the paper. By default one region, few and early releases, everyone takes part in each;
noise is correlated between regions, :math:`\sqrt P` less of it at the same privacy. A round without
any sampled agent releases noise like every other one: the paper's code releases uniform numbers,
which says that nobody was sampled. Where the search's `Outlook` expects releases that are mostly
noise, nothing is released or spent. Without privacy the weighted means may be trimmed, against
messages that are not honest.

References:
    * [Dai2021]_ Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
      optimization with distributed exploration. NeurIPS 2021. https://arxiv.org/abs/2110.14153
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition import ExplorationSchedule, SoftmaxSchedule, exploration_weights
from botorch_fed.errors import BudgetExceeded, MessageError
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.disclosure import ADDRESSEE, EVERYBODY, Price, Row, Sees
from botorch_fed.federation.terms import (
    MAX_WEIGHT,
    OWN,
    Aggregation,
    Contribution,
    Limits,
    Order,
    Party,
    Setup,
    Terms,
    check_ahead,
)
from botorch_fed.privacy import (
    Adjacency,
    Budget,
    CorrelatedGaussianSum,
    Entry,
    Event,
    FixedSizeSampling,
    GaussianMechanism,
    Guarantee,
    Ledger,
    PoissonSampling,
    Release,
    SignalWarning,
    WeightedGaussianSum,
    check_promised_delta,
    clip,
    compose,
    noise_multiplier_for,
)
from botorch_fed.search.messages import RowSearch
from botorch_fed.search.noisy import Forecast, NoisyTransfer, Outlook, VectorSearch
from botorch_fed.search.released import ReleaseSearch, regions_of
from botorch_fed.search.releases import Noisy

logger = logging.getLogger(__name__)

_USUAL_DELTA = 0.01
MAX_NOISE = 1e100  # deviation of a release's noise: its square and their sums are finite
NoiseKind = Literal["correlated", "tight", "paper", "none"]
Sampling = PoissonSampling | FixedSizeSampling


@dataclass(frozen=True, eq=False)
class NoisyState:
    """What the server keeps.

    Attributes:
        t: Finished rounds, the start included.
        released: The newest release.
        ledger: What this run has paid.
        signal: The signal-to-noise ratio of every release and region, as the release itself shows
            it; one row per release.
        exhausted: Whether a budget has run out: nothing more is released.
        rounds: How many rounds followed the first points when this one was asked.
    """

    t: int
    released: Noisy | None
    ledger: Ledger
    signal: Tensor
    exhausted: bool
    rounds: int


@dataclass(frozen=True, eq=False)
class Progress:
    """What a site's side remembers: the round of the last order, -1 before the first."""

    t: int


@dataclass(frozen=True, kw_only=True)
class NoisySum(Aggregation):
    """Release noisy weighted sums of clipped messages.

    Attributes:
        releases: After which rounds something is released; ``"all"`` for every round but the last.
            What comes after the last round but one is left out.
        epsilon: What the whole run may reveal about one agent; the noise follows from it.
        noise_multiplier: Instead of `epsilon`, noise over the norm of one agent's contribution.
        delta: Of the promise, below one over the number of agents; default the smaller one of 0.01
            and ``N ** -1.1``.
        noise_kind: ``"correlated"``, ``"tight"`` for independent noise of the right size,
            ``"paper"`` for the published size, or ``"none"``: no privacy.
        sampling: Who takes part in a release.
        clip_norm: The bound on a message's norm; default the search's `norm`.
        exploration: How much an agent counts in its own region, round by round.
        switch_to_local_after: The last round in which agents listen; default they always do.
        trim: How many of the largest and how many of the smallest messages are left out, coordinate
            by coordinate, see `trimmed_means`. Without privacy only: the guarantee is that of the
            clipped sum, in which every agent counts by public weights, and how much one message
            moves a trimmed mean depends on all others.
        adjacency: What a neighbouring world is.
        rounds: The number `T` of rounds after the first points; default what the budget has left
            after `num_initial` points. The server's own business: it may grow.
    """

    releases: tuple[int, ...] | Literal["all"] = (0,)
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    noise_kind: NoiseKind = "correlated"
    sampling: Sampling = PoissonSampling()  # noqa: RUF009 - frozen
    clip_norm: float | None = None
    exploration: ExplorationSchedule = SoftmaxSchedule()  # noqa: RUF009 - frozen
    switch_to_local_after: int | None = None
    trim: int = 0
    adjacency: Adjacency = "zero-out"
    rounds: int | None = field(default=None, metadata=OWN)

    state_type = NoisyState
    memory_type = Progress
    broadcast_types = (Noisy,)
    why_closed = "its noise and its regions are planned for the agents that it began with"

    def __post_init__(self) -> None:
        given = () if self.releases == "all" else self.releases
        if list(given) != sorted(set(given)) or min(given, default=0) < 0:
            raise InputDataError(f"Expected ascending rounds >= 0 as releases, got {given}.")
        if self.rounds is not None and self.rounds < 0:
            raise InputDataError(f"Expected rounds >= 0, got {self.rounds}.")
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise InputDataError("Give epsilon or noise_multiplier: each follows from the other.")
        if self.noise_kind not in get_args(NoiseKind):
            raise InputDataError(
                f"noise_kind is one of {get_args(NoiseKind)}, got {self.noise_kind!r}."
            )
        quiet = self.noise_kind == "none"
        if (self._noisy and quiet) or (self.releases and not self._noisy and not quiet):
            raise InputDataError(
                "A private run needs epsilon or noise_multiplier. One without privacy (FTS-DE) is "
                'noise_kind="none" and neither.'
            )
        if self.trim and self._noisy:
            raise InputDataError(
                "A trimmed mean has no privacy guarantee, the proof is about the clipped sum: "
                'leave out trim, or the noise by noise_kind="none".'
            )
        if self.delta is not None and self._noisy:
            check_promised_delta(self.delta)
        if self.epsilon is not None and not isinstance(self.sampling, PoissonSampling):
            raise InputDataError(
                "Samples of a fixed size have no calibration: give a noise_multiplier."
            )

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless the search has messages to add up, of bounded norm."""
        name = type(terms.search).__name__
        if isinstance(terms.search, RowSearch):
            raise InputDataError(
                f"{name} reads the messages of each agent, and NoisySum releases sums: use "
                "NoisyTransfer or ReleaseSearch, or Relay."
            )
        known = self.clip_norm is not None or isinstance(terms.search, ReleaseSearch)
        if not known and terms.search.norm(terms) is None:
            raise InputDataError(
                f"{name} says no norm that its messages are clipped to: give a clip_norm."
            )
        agents = terms.agents
        if agents and self._noisy:
            delta = default_delta(len(agents)) if self.delta is None else self.delta
            check_promised_delta(delta, len(agents), "agent")
        if agents and not 0 <= 2 * self.trim < len(agents):
            raise InputDataError(
                f"trim counts from 0, and less than half of the {len(agents)} agents can be left "
                f"out at each end, got {self.trim}."
            )

    @property
    def _noisy(self) -> bool:
        return self.epsilon is not None or self.noise_multiplier is not None

    # -------------------------------------------------------------- what it costs

    def plan(self, terms: Terms) -> Plan:
        """What follows from terms with a roster: what is released, with how much noise."""
        return _plan(terms)

    def promise(self, hub: Party) -> Guarantee | None:
        """What all releases of a run reveal about one agent at most; None without noise.

        The whole plan is paid on paper: a budget that does not cover it is refused here.
        """
        plan, ledger, shared = self.plan(hub.terms), self._ledger(hub), hub.resources.shared_ledger
        if plan.promise is None:
            if shared is not None or ledger.budget is not None:
                raise InputDataError("Without noise nothing can be paid: give a noise_multiplier.")
            return None
        ledger.spend(plan.event, count=len(plan.planned) or 1)
        if shared is not None:
            if (shared.adjacency, shared.unit) != (ledger.adjacency, ledger.unit):
                raise InputDataError("The shared ledger is for another adjacency or unit.")
            # Other runs may use it up at any time, and a resumed run has paid from it already.
            with contextlib.suppress(BudgetExceeded):
                shared.ledger.spend(plan.event)  # a value: nothing is written
        plan.warn()
        return replace(plan.promise, private=hub.resources.noise.private)

    def guaranteed(self, terms: Terms) -> Guarantee | None:
        """What so many releases come to as the hub plans: it knows who has data, and how many
        rounds follow; or nothing at all, if none of them is worth its price."""
        plan, said = self.plan(terms), terms.promise
        if plan.promise is None or said is None or not said.releases:
            return plan.promise if said is None or plan.promise is None else self._of(terms, 0)
        most = terms.queries if self.releases == "all" else len(self.releases)
        if said.releases > most:
            raise MessageError(
                f"The terms differ in promise.releases: this site's study has {most} at most, the "
                f"hub says {said.releases}."
            )
        return self._of(terms, said.releases)

    def _of(self, terms: Terms, count: int) -> Guarantee:
        """The guarantee of so many releases, with noise that is made for them."""
        plan = self.plan(terms)
        multiplier = plan.multiplier_for(count) if count else 1.0
        event = self.sampling.event(multiplier, len(terms.agents))
        return compose([event] * count, delta=plan.delta, adjacency=self.adjacency, unit="agent")

    def limits(self, terms: Terms) -> Limits:
        """First points, a query in each round after, and a message for each release."""
        queries = terms.queries
        messages = queries + 1 if self.releases == "all" else len(self.releases)
        return Limits(queries, 1, queries, messages)

    def _ledger(self, hub: Party) -> Ledger:
        given = hub.resources.ledger
        if given is None:
            delta = self.plan(hub.terms).delta
            budget = None if self.epsilon is None else Budget(self.epsilon, delta)
            return Ledger(adjacency=self.adjacency, budget=budget)
        if given.adjacency != self.adjacency:
            raise InputDataError(
                f"Expected a ledger of adjacency {self.adjacency!r}, got {given.adjacency!r}."
            )
        return given

    def account(self, hub: Party, state: NoisyState) -> dict[str, Any]:
        """What a report needs: the promise, what was paid, the noise and the signal beside it."""
        plan, account = self.plan(hub.terms), super().account(hub, state)
        if account is None:
            return {"mechanism": "none", "private": False, "releases": len(plan.releases)}
        return {
            **account,
            "exhausted": state.exhausted,
            "signal_to_noise": state.signal.tolist(),
            **({"signal": plan.signal_words} if plan.outlook is not None else {}),
        }

    def paid(self, hub: Party, state: NoisyState) -> tuple[Entry, ...]:
        """All payments of this run, which are those of every agent."""
        return state.ledger.entries

    def signal_words(self, hub: Party) -> str:
        """What is expected of the releases, and why they are withheld."""
        return self.plan(hub.terms).signal_words

    def price(self, terms: Terms) -> Price | None:
        """What a run costs in privacy; None without noise."""
        plan = self.plan(terms)
        if plan.promise is None:
            return None
        mechanism = plan.mechanism(plan.releases[0]) if plan.releases else None
        return Price(
            guarantee=plan.promise if terms.promise is None else terms.promise,
            event=plan.event,
            payments=len(plan.releases),
            releases=len(plan.releases),
            mechanism="none" if mechanism is None else type(mechanism).__name__,
            settings="none" if mechanism is None else repr(mechanism),
            noise_std=0.0 if mechanism is None else float(mechanism.noise_std.max()),
            trust=self.sees(terms).trust,
            paid_at="hub",
        )

    def sees(self, terms: Terms) -> Sees:
        """Who sees what."""
        plan, search = self.plan(terms), terms.search
        settings = "the terms, the shared basis and the promise"
        order = "whether to start, to query or to rest, and whether to contribute"
        asked = (
            Row.of(Setup, "server", settings, EVERYBODY),
            Row.of(Order, "server", order, ADDRESSEE),
        )
        if not plan.releases:
            reply = Row.of(Contribution, "agent", "an acknowledgement without data", ("server",))
            return Sees((*asked, reply), "Nothing is released: no party has to be trusted.")
        said = getattr(search, "adds", VectorSearch.adds)
        M, P = search.size(terms), plan.num_regions
        content = f"each agent's message: {said}, {M} numbers without noise"
        sums = "sum" if P == 1 else f"sums, one for each of {P} regions,"
        released = f"the {'noisy ' if self._noisy else ''}weighted {sums} of clipped messages"
        if self._noisy:
            released += ", and the size of the noise"
        rows = (
            *asked,
            Row.of(Contribution, "agent", content, ("server",), "data"),
            Row.of(Noisy, "server", released, EVERYBODY, "noisy data" if self._noisy else "data"),
        )
        if not self._noisy:
            return Sees(
                rows, "The server is trusted with every message and all agents with sums of them."
            )
        return Sees(
            rows,
            "The server is trusted with every message and adds the noise; the guarantee is "
            "against all other agents together, not against the server.",
        )

    # -------------------------------------------------------------- the rounds

    def start(self, hub: Party) -> NoisyState:
        """The state before the start."""
        signal = torch.zeros(0, self.plan(hub.terms).num_regions).double()
        rounds = self.plan(hub.terms).rounds
        return NoisyState(0, None, self._ledger(hub), signal, False, rounds)

    def resumed(self, hub: Party, state: NoisyState) -> NoisyState:
        """The state with the rounds of now, once those of before are over."""
        rounds = self.plan(hub.terms).rounds
        over = state.t > state.rounds
        return replace(state, rounds=rounds) if over and rounds > state.rounds else state

    def orders(self, hub: Party, state: NoisyState) -> Mapping[AgentId, Order] | None:
        """The start, then one query per active agent and round; contributions of all."""
        terms, t = hub.terms, state.t
        if t > state.rounds:
            return None
        contribute = self._contributing(hub, state)
        order = Order(t, "first" if t == 0 else "next", contribute)
        orders = dict.fromkeys(terms.evaluating, order)
        if contribute:
            rest = Order(t, "nothing", True)
            orders |= {agent: rest for agent in terms.agents if agent not in orders}
        return orders

    def _contributing(self, hub: Party, state: NoisyState) -> bool:
        planned = self.plan(hub.terms).planned_for(state.rounds)
        return state.t in planned and not state.exhausted

    def broadcasts(self, hub: Party, state: NoisyState) -> tuple[Any, ...]:
        """The newest release, while agents listen."""
        last = self.switch_to_local_after
        if state.released is None or (last is not None and state.t > last):
            return ()
        return (state.released,)

    def combine(
        self, hub: Party, state: NoisyState, inbox: Mapping[AgentId, Contribution]
    ) -> NoisyState:
        """Release, if the round says so; an absent agent counts as a zero contribution."""
        after = replace(state, t=state.t + 1, rounds=self.plan(hub.terms).rounds)
        if not self._contributing(hub, state):
            return after
        given = {
            index: reply.values
            for index, agent in enumerate(hub.terms.agents)
            if (reply := inbox.get(agent)) is not None and reply.values is not None
        }
        plan = self.plan(hub.terms)
        if plan.multiplier is None:
            if self.trim and len(given) <= 2 * self.trim:
                logger.warning(
                    "round %d releases nothing: %d messages are too few to leave out %d at each "
                    "end",
                    state.t,
                    len(given),
                    self.trim,
                )
                return after
            clean = self._plain(hub, state.t, given)
            silence = torch.zeros(len(clean)).double()
            return replace(after, released=plan.noisy(state.t, clean, silence))
        try:
            release, ledger = self._release(hub, state, given)
        except BudgetExceeded as error:
            logger.warning("round %d releases nothing: %s", state.t, error)
            return replace(after, exhausted=True)
        mostly_noise = plan.outlook is None and bool((release.signal_to_noise < 1).any())
        if mostly_noise and not len(state.signal):  # said once
            logger.warning(
                "the release after round %d is mostly noise: fewer features or releases, or more "
                "agents would help",
                state.t,
            )
        return replace(
            after,
            released=plan.noisy(state.t, release.values, release.noise_std),
            ledger=ledger,
            signal=torch.cat([state.signal, release.signal_to_noise.unsqueeze(0)]),
        )

    def _plain(self, hub: Party, t: int, given: Mapping[int, Tensor]) -> Tensor:
        return self.plan(hub.terms).plain(t, given)

    def _release(
        self, hub: Party, state: NoisyState, given: Mapping[int, Tensor]
    ) -> tuple[Release, Ledger]:
        mechanism, noise = self.plan(hub.terms).mechanism(state.t), hub.resources.noise
        if hub.resources.shared_ledger is not None:  # first what survives a crash
            note = f"a noisy sum, round {state.t}"
            hub.resources.shared_ledger.spend(mechanism.event, note=note, private=noise.private)
        return mechanism.release(given, ledger=state.ledger, noise=noise, path=("release", state.t))

    # -------------------------------------------------------------- a site

    def begin(self, site: Party) -> Progress:
        """Before the first order."""
        return Progress(-1)

    def check_published(self, terms: Terms, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless a release can be one of these terms."""
        if len(published) > 1:
            raise MessageError(f"Expected one release, got {len(published)}.")
        for release in published:
            _check_release(self, terms, release)

    def check_order(self, site: Party, order: Order, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless an order is one of these terms, and later than the last."""
        if order.t <= site.memory.t:
            raise MessageError(
                f"Expected an order of a round after {site.memory.t}, got round {order.t}."
            )
        check_ahead(order.t, site.memory.t)
        if (order.evaluate == "first") > (order.t == 0):
            raise MessageError(f"First points are asked for in round 0, not in round {order.t}.")
        for release in published:
            planned = self.releases == "all" or release.made in self.releases
            if not 0 <= release.made < order.t or not planned:
                raise MessageError(
                    f"Round {order.t} acts on the releases of earlier rounds among "
                    f"{self.releases}, got one of round {release.made}."
                )
        if not order.contribute:
            return
        promise = site.terms.promise
        if promise is not None and not promise.releases:
            raise MessageError("The server promised to release nothing, and asks for a message.")
        if self.releases != "all" and order.t not in self.releases:
            raise MessageError(
                f"Expected to be asked for messages in the rounds {self.releases}, got an order "
                f"for round {order.t}."
            )

    def received(self, site: Party, order: Order, published: tuple[Any, ...]) -> Progress:
        """The round of the order."""
        return Progress(order.t)

    # -------------------------------------------------------------- what both sides know

    def num_agents(self, terms: Terms) -> float:
        """How many agents are expected to be in a release."""
        if isinstance(self.sampling, PoissonSampling):
            return self.sampling.rate * len(terms.agents)
        return min(1.0, self.sampling.size / len(terms.agents)) * len(terms.agents)


def _check_release(aggregation: NoisySum, terms: Terms, release: Noisy) -> None:
    P, M = _num_regions(terms), terms.search.size(terms)
    values, noise = release.values, release.noise_std
    if values.shape != (P, M) or values.dtype != torch.float64:
        raise MessageError(
            f"A release must be a float64 `{P} x {M}` tensor, got {values.dtype} of shape "
            f"{tuple(values.shape)}."
        )
    if not bool((values.abs() <= MAX_WEIGHT).all()):
        raise MessageError(
            f"A release has a number beyond {MAX_WEIGHT:g}, or one that is not finite."
        )
    if noise.dtype != torch.float64 or not bool(((noise >= 0) & (noise <= MAX_NOISE)).all()):
        raise MessageError(
            f"The noise of a release must be {P} float64 numbers in [0, {MAX_NOISE:g}]."
        )
    expected = aggregation.num_agents(terms)
    if release.num_agents != expected:
        raise MessageError(
            f"Expected a release of {expected:g} agents, got one of {release.num_agents:g}."
        )


def _num_regions(terms: Terms) -> int:
    number: int = getattr(terms.search, "num_regions", 1)
    return number


# ------------------------------------------------------------------ the server's plan


@dataclass(frozen=True, eq=False)
class Plan:
    """What follows from terms with a roster and a `NoisySum`, for the server alone."""

    terms: Terms

    @property
    def aggregation(self) -> NoisySum:
        """The settings."""
        found = self.terms.aggregation
        assert isinstance(found, NoisySum)
        return found

    @cached_property
    def rounds(self) -> int:
        """The number `T` of rounds after the first points."""
        given = self.aggregation.rounds
        left = max(self.terms.budget - self.terms.num_initial, 0)
        return math.ceil(left / self.terms.q) if given is None else given

    @cached_property
    def planned(self) -> tuple[int, ...]:
        """After which rounds something is released, if it is worth it."""
        return tuple(self._after(self.rounds))

    @cached_property
    def releases(self) -> tuple[int, ...]:
        """After which rounds something is released."""
        return () if self._withheld else self.planned

    def planned_for(self, rounds: int) -> Collection[int]:
        """The same in a run of so many rounds."""
        return () if self._withheld else self._after(rounds)

    def _after(self, rounds: int) -> Collection[int]:
        releases = self.aggregation.releases
        if releases == "all":
            return range(rounds)
        return tuple(t for t in releases if t < rounds)

    @property
    def _withheld(self) -> bool:
        return self.forecast is not None and self.forecast.withheld

    @cached_property
    def num_regions(self) -> int:
        """The number `P` of regions."""
        return _num_regions(self.terms)

    @cached_property
    def clip_norm(self) -> float:
        """The norm that messages are clipped to."""
        norm = self.aggregation.clip_norm
        norm = self.terms.search.norm(self.terms) if norm is None else norm
        assert norm is not None  # `check_terms` has seen to it
        return norm

    @cached_property
    def delta(self) -> float:
        """Of the promise."""
        given = self.aggregation.delta
        return default_delta(len(self.terms.agents)) if given is None else given

    @cached_property
    def multiplier(self) -> float | None:
        """Noise over the norm of one agent's contribution; None for none."""
        if not self.aggregation._noisy:
            return None
        return self.multiplier_for(max(len(self.planned), 1))

    def multiplier_for(self, count: int) -> float:
        """The same for so many releases."""
        noisy = self.aggregation
        if noisy.epsilon is None:
            assert noisy.noise_multiplier is not None
            return float(noisy.noise_multiplier)
        assert isinstance(noisy.sampling, PoissonSampling)
        return noise_multiplier_for(
            epsilon=noisy.epsilon,
            delta=self.delta,
            sampling_rate=noisy.sampling.rate,
            num_releases=count,
            adjacency=noisy.adjacency,
        )

    @cached_property
    def event(self) -> Event:
        """What one release costs."""
        assert self.multiplier is not None
        return self.aggregation.sampling.event(self.multiplier, len(self.terms.agents))

    @cached_property
    def promise(self) -> Guarantee | None:
        """What all releases of a run reveal about one agent at most, with secret noise."""
        if self.multiplier is None:
            return None
        events = [self.event] * len(self.releases)
        return compose(events, delta=self.delta, adjacency=self.aggregation.adjacency, unit="agent")

    @cached_property
    def forecast(self) -> Forecast | None:
        """What to expect of what is planned; None if the search cannot say."""
        search = self.terms.search
        if self.multiplier is None or not self.planned or not isinstance(search, NoisyTransfer):
            return None
        return search.forecast(
            self.terms,
            self.planned,
            num_agents=self.aggregation.num_agents(self.terms),
            noise_std=float(self.mechanism(self.planned[0]).noise_std[0]),
        )

    @property
    def outlook(self) -> Outlook | None:
        """How much signal to expect in what is planned; None if the search cannot say."""
        return None if self.forecast is None else self.forecast.outlook

    @property
    def signal_words(self) -> str:
        """What a plan says of signal and noise; empty if there is nothing to say."""
        return "" if self.forecast is None else self.forecast.words

    def warn(self) -> None:
        """Warn of releases that are withheld, or all noise."""
        if self._withheld:
            warnings.warn(self.signal_words, SignalWarning, stacklevel=3)
        elif self.releases and self.outlook is None:
            self._mechanism(self.releases[0])

    def mechanism(self, t: int) -> GaussianMechanism:
        """The noisy sum that is released after round `t`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SignalWarning)  # `warn` has warned
            return self._mechanism(t)

    def _mechanism(self, t: int) -> GaussianMechanism:
        assert self.multiplier is not None
        noisy, P = self.aggregation, self.num_regions
        contrast = noisy.exploration(t + 1)  # the release of round t is the (t + 1)-th of the paper
        common: dict[str, Any] = {
            "num_agents": len(self.terms.agents),
            "dim": self.terms.search.size(self.terms),
            "clip_norm": self.clip_norm,
            "noise_multiplier": self.multiplier,
            "sampling": noisy.sampling,
            "adjacency": noisy.adjacency,
            "unit": "agent",
        }
        if noisy.noise_kind == "correlated":
            return CorrelatedGaussianSum(
                regions=self._regions, num_regions=P, contrast=contrast, **common
            )
        return WeightedGaussianSum(
            weights=exploration_weights(self._regions, P, contrast),
            paper_noise=noisy.noise_kind == "paper",
            **common,
        )

    @cached_property
    def _regions(self) -> tuple[int, ...]:
        return regions_of(self.num_regions, self.terms.space.dim).assign(len(self.terms.agents))

    def plain(self, t: int, given: Mapping[int, Tensor]) -> Tensor:
        """The weighted sums without noise or sampling, for the comparison that is not private."""
        agents, M = len(self.terms.agents), self.terms.search.size(self.terms)
        contrast, trim = self.aggregation.exploration(t + 1), self.aggregation.trim
        weights = exploration_weights(self._regions, self.num_regions, contrast)
        rows = torch.zeros(agents, M, dtype=torch.float64)
        for index, vector in given.items():
            rows[index] = clip(vector, self.clip_norm)
        if not trim:
            return weights @ rows
        present = sorted(given)
        return trimmed_means(rows[present], weights[:, present], trim=trim)

    def noisy(self, t: int, values: Tensor, noise_std: Tensor) -> Noisy:
        """A release that agents accept."""
        num_agents = self.aggregation.num_agents(self.terms)
        return Noisy(t, values.clamp(-MAX_WEIGHT, MAX_WEIGHT), noise_std, num_agents)


@lru_cache(maxsize=16)
def _plan(terms: Terms) -> Plan:
    """The plan of these terms: what accountants and mechanisms say is worked out once."""
    if not terms.agents:
        raise InputDataError("A plan needs the roster, got no agents.")
    plan = Plan(terms)
    last = plan.aggregation.switch_to_local_after
    if last is not None and plan.planned and max(plan.planned) >= last:
        raise InputDataError(
            f"Agents stop listening after round {last}: release nothing from then on."
        )
    return plan


def default_delta(num_agents: int) -> float:
    r"""The papers' :math:`\delta = N^{-1.1}`, and 0.01 where that is larger, as of few agents.

    Both are large: look at :math:`10^{-5}` beside it.
    """
    return min(float(max(num_agents, 2) ** -1.1), _USUAL_DELTA)


def trimmed_means(vectors: Tensor, weights: Tensor, *, trim: int) -> Tensor:
    """Weighted means without the extremes of each coordinate.

    In every coordinate the `trim` largest and the `trim` smallest numbers are left out, and the
    others keep their weights, which are made to add up to one. If no more than `trim` vectors are
    dishonest, every number of the result lies between the smallest and the largest of the honest
    ones: nobody moves it further than that.

    It does not prevent a bias within that range, which may be wide where honest agents differ, and
    they do: what is left out is also what is special about one agent. Nor does it prevent more than
    `trim` agents acting together, nor vectors that are wrong as a whole and unremarkable in every
    coordinate. With weights that differ, one vector may still carry most of what is left. Who is
    absent is left out, and does not count as zero.

    Args:
        vectors: `N x M`, more than twice `trim`.
        weights: `P x N`, positive: one row per mean.
        trim: How many are left out at each end.

    Returns:
        `P x M` means.
    """
    order = vectors.argsort(dim=0, stable=True)[trim : len(vectors) - trim]  # K x M
    kept = vectors.gather(0, order)
    shares = weights[:, order]  # P x K x M
    means = (shares * kept).sum(dim=1) / shares.sum(dim=1).clamp_min(1e-300)
    return means.clamp(kept.amin(dim=0), kept.amax(dim=0))  # against rounding
