r"""A site's side of every protocol: what it has observed, and what its two parts remember.

The agent does what all protocols share: it compares terms, counts evaluations against its budget,
asks for the points that a site begins with, snaps points to the grid of integers and choices, and
keeps points apart that have no outcome yet. Its search says where to look, its aggregation what
leaves the site.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from botorch.exceptions.errors import BotorchError, InputDataError
from torch import Tensor

from botorch_fed.errors import FederatedError, MessageError, NumericalError
from botorch_fed.federation.base import AgentId, Pending
from botorch_fed.federation.points import (
    allowed_candidates,
    answered,
    check_data,
    check_public_points,
    public_data,
    tensor_hash,
    warn_infeasible,
)
from botorch_fed.federation.terms import (
    MAX_WEIGHT,
    Order,
    Party,
    Resources,
    Setup,
    Terms,
    View,
    in_words,
    remembered,
)
from botorch_fed.models import FeatureMap, feature_map_from_tensors
from botorch_fed.privacy import Adjacency, Budget, Guarantee, SharedLedger, Unit
from botorch_fed.rng import generator
from botorch_fed.space import SearchSpace
from botorch_fed.storage.store import Blobs, MemoryBlobs
from botorch_fed.wire.codec import content_hash, encode

logger = logging.getLogger(__name__)

SAME_STUDY = "Use the same study and the same version of botorch_fed on both sides."
ROUNDING = 1e-9  # of a number of a shared basis that another machine has computed
TINY = 1e-6  # of an evaluation's cost: sums of costs are rounded
ACCOUNTING = 1e-3  # likewise of an epsilon: a calibrated noise is found to so much
T = TypeVar("T")

UNKNOWN = -1.0  # for a variance
REDRAWS = 100  # of a point that is pending or has failed
MAX_FEATURES = 4096  # of a shared basis, and of what it is made of: work grows with the cube


@dataclass(frozen=True)
class Asked:
    """How often a hub has asked for first points, for queries, and for messages."""

    first: int = 0
    queries: int = 0
    contributions: int = 0

    def after(self, order: Order) -> Asked:
        """With an order."""
        return Asked(
            self.first + (order.evaluate == "first"),
            self.queries + (order.evaluate == "next"),
            self.contributions + order.contribute,
        )


@dataclass(frozen=True, eq=False)
class AgentState:
    """An agent's private state; `state_type` adds the last order and the memories.

    Attributes:
        asking: How many evaluations the last request still waits for.
        late: Evaluations that an earlier request asked for and that were not made before the next.
        ahead: Evaluations that were made before a request asked for them.
        used: Evaluations that were told or have failed.
        first: How many of them were asked for together at the start.
        asked: What was asked in the whole run, as `Limits` count it: first points, queries, and
            messages.
        broadcasts: Hashes of the setup and of what was published with the last request.
        agreed: Hash of the setup without its roster; empty before the first request.
        roster: The agents that the last setup named.
        X: Own points in the unit cube, `n x d`.
        Y: Own outcomes on the public scale, `n x m`.
        Yvar: Their variances where the site knows them, -1 elsewhere, `n x m`.
        failed: Points that gave no value, `k x d`.
        order: The last order; None before the first.
        search: What the search remembers.
        aggregation: What the site's side of the aggregation remembers.
    """

    asking: int
    late: int
    ahead: int
    used: int
    first: int
    asked: Asked
    broadcasts: tuple[str, ...]
    agreed: str
    roster: tuple[AgentId, ...]
    X: Tensor = field(repr=False)
    Y: Tensor = field(repr=False)
    Yvar: Tensor = field(repr=False)
    failed: Tensor = field(repr=False)
    order: Any
    search: Any = field(repr=False)
    aggregation: Any = field(repr=False)


@cache
def state_type(
    orders: tuple[type, ...],
    search: type | None,
    aggregation: type | None,
    fidelity: bool = False,
) -> type[AgentState]:
    """The state of an agent whose parts have these orders and memories.

    Where there is a fidelity, evaluations are counted by their costs, and `spent` is the sum of
    them; `passed` is how many observations were made on the way to others.
    """

    def optional(*kinds: type | None) -> Any:
        union: Any = None
        for kind in (*kinds, None):
            union = kind if union is None else union | kind
        return Order | None if union is None else union  # without a memory: always None

    annotated: list[Any] = [
        ("order", optional(*orders)),
        ("search", optional(search), field(repr=False)),
        ("aggregation", optional(aggregation), field(repr=False)),
    ]
    if fidelity:
        annotated = [("asking", float), ("late", float), ("ahead", float), *annotated]
        annotated += [("spent", float, 0.0), ("passed", int, 0)]
    names = {"__module__": __name__, "__doc__": AgentState.__doc__}
    return make_dataclass(
        "AgentState", annotated, bases=(AgentState,), frozen=True, eq=False, namespace=names
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedAgent:
    """One site of a federation.

    Args:
        name: Its name; the hub's roster has it.
        terms: Its own terms; without a roster it takes the hub's.
        seed: Its own seed, private.
        data: Observations that it has already: points in the unit cube `n x d` and outcomes as
            the site measures them `n x m`, a column for each outcome of the space.
        candidates: The only points that it can evaluate, `K x d`; default the whole unit cube.
        initial_design: Points `k x d` that it evaluates first, whatever was sent.
        require: The most that a run may reveal about it: a hub that promises less privacy, or
            none, is refused.
        unit: What `require` is about: one of its records, or all of them.
        adjacency: What else they might be, as `require` means it.
        roster: The agents that its own study names: a hub with others is refused, but that agents
            may come after them where the study is open. Empty if it does not know them.
        resources: What it has and no other party knows.
        blobs: Where broadcasts lie.
        earned: The trusts of its messages so far that tell one, for reports.
    """

    name: AgentId
    terms: Terms
    seed: int = field(repr=False)
    data: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    candidates: Tensor | None = None
    initial_design: Tensor | None = None
    require: Budget | None = None
    unit: Unit = "agent"
    adjacency: Adjacency = "zero-out"
    roster: tuple[AgentId, ...] = ()
    resources: Resources = field(default_factory=Resources)
    blobs: Blobs = field(default_factory=MemoryBlobs)
    earned: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        d, q = self.space.dim, self.terms.q
        check_public_points(self.candidates, self.initial_design, d)
        self.space.check_feasible()
        if self.terms.default is not None:
            self.space.refuse_infeasible(self.terms.default, "default")
        if self.initial_design is not None:
            self.space.refuse_infeasible(self.initial_design, "initial_design")
        if self.candidates is not None:
            object.__setattr__(self, "candidates", allowed_candidates(self.space, self.candidates))
        if self.data is not None:
            warn_infeasible(self.space, self.data[0], f"data of agent {self.name!r}")
        if self.initial_design is not None and len(self.initial_design) % q:
            raise InputDataError(
                f"The initial design has {len(self.initial_design)} points, no multiple of q = {q}."
            )
        if self.candidates is not None and len(torch.unique(self.candidates, dim=0)) < q:
            raise InputDataError(f"There are fewer different candidates than q = {q}.")
        if self.data is not None:
            check_data(self.data, self.space)

    @property
    def space(self) -> SearchSpace:
        """The map of inputs and outcomes."""
        return self.terms.space

    @property
    def accepts(self) -> tuple[type, ...]:
        """The orders of the aggregation."""
        return self.terms.aggregation.order_types

    @property
    def state_type(self) -> type[AgentState]:
        """An `AgentState` with the memories of the two parts."""
        aggregation = self.terms.aggregation
        return state_type(
            aggregation.order_types,
            self.terms.search.memory_type,
            aggregation.memory_type,
            self.space.fidelity is not None,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the settings that determine what it asks for; of the budget nothing."""
        words = {
            **self.terms.words,
            **in_words(self.terms.search, "search", with_own=True),
            **in_words(self.terms.aggregation, "aggregation", with_own=True),
        }
        settings = (
            self.name,
            self.seed,
            sorted(words.items()),
            tensor_hash(self.candidates),
            tensor_hash(self.initial_design),
            self.require,
            self.unit,
            self.adjacency,
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    # -------------------------------------------------------------- requests

    def start(self) -> AgentState:
        """The state before the first request: with the data that the site has already."""
        X, Y = public_data(self.space, self.data)
        party = Party(self.terms, self.name, self.resources)
        memory = self.terms.aggregation.begin(party)
        none: Any = 0 if self.space.fidelity is None else 0.0
        unknown = torch.full_like(Y, UNKNOWN)
        state = self.state_type(
            none, none, none, 0, 0, Asked(), (), "", (), X, Y, unknown, X[:0], None, None, memory
        )
        state = replace(state, search=self.terms.search.start(self._local_view(state)))
        return self._grown(state)

    def check(self, state: AgentState, request: Any, broadcasts: tuple[str, ...]) -> None:
        """Raise `MessageError` unless the request and what it broadcasts fit."""
        if not broadcasts:
            raise MessageError("Expected the terms of the federation, got no broadcast.")
        if state.agreed and state.agreed != self._hash_agreed(broadcasts[0]):
            raise MessageError("The terms have changed during the run.")
        terms = self._terms(broadcasts)
        self._check_grown(state, terms)
        if self.name not in terms.agents:
            raise MessageError(f"This site, {self.name!r}, is not among the hub's agents.")
        check_roster(self.roster, terms)
        self._check_promised(terms)
        check_promise(terms.promise, self.require, self.unit, self.adjacency)
        self._check_limits(state, terms, request)
        published = self._published(terms, broadcasts)
        terms.aggregation.check_order(self._party(state, terms), request, published)
        self._pay(state, terms, request, at_all=False)

    def receive(self, state: AgentState, request: Any, broadcasts: tuple[str, ...]) -> AgentState:
        """The state after a request: what to do, and where the broadcasts lie."""
        terms = self._terms(broadcasts)
        self._pay(state, terms, request, at_all=True)
        party, published = self._party(state, terms), self._published(terms, broadcasts)
        memory = terms.aggregation.received(party, request, published)
        state = self._forgetting(state)  # a value that came too late is in no message
        state = replace(state, order=request, broadcasts=broadcasts, aggregation=memory)
        state = replace(state, agreed=self._hash_agreed(broadcasts[0]), roster=terms.agents)
        state = replace(state, asked=state.asked.after(request))
        state = replace(state, late=state.late + state.asking)
        if request.evaluate == "first":
            had = 0 if terms.search.begins_anyway else self._had(state)
            begins = max(terms.num_initial - had, 0)
            if self.initial_design is not None:
                begins = len(self.initial_design)
            done = min(state.ahead, begins)
            state = replace(state, asking=begins - done, ahead=state.ahead - done, first=begins)
        else:
            wanted = terms.q if request.evaluate == "next" else 0
            done = min(state.ahead, wanted)
            state = replace(state, asking=wanted - done, ahead=state.ahead - done)
        view = self._view(state, terms)
        if self.space.fidelity is not None:
            asking: Any = max(self._due(state, view) - _spent(state), 0.0)
            nothing: Any = 0.0
            state = replace(state, asking=asking, late=nothing, ahead=nothing)
        return replace(state, search=terms.search.received(view))

    def _due(self, state: AgentState, view: View) -> float:
        """What a site with a fidelity is to have spent when the last request is answered.

        The first request that asks for evaluations waits for the first points alone, which are
        cheap, so that messages begin early. The rest of the budget is spread evenly over the
        others; the last one waits for all of it.
        """
        budget, asked = self.terms.budget, state.asked
        starts = torch.zeros(0, self.space.dim, dtype=torch.float64)
        if self.initial_design is not None:
            starts = self.initial_design.double()
        elif not self._had(state) and (asked.first or not view.terms.search.has_messages(view)):
            starts = view.dealt(view.terms.num_initial, self.candidates)
        cost = min(math.fsum(self.space.costs(starts)), float(budget))
        queries, done = view.terms.queries, asked.queries
        if asked.first:
            queries -= math.ceil(view.terms.num_initial / view.terms.q)
        elif len(starts):
            queries, done = queries - 1, done - 1
        if done < 0:  # nothing but messages was asked for
            return 0.0
        return budget if done >= queries else cost + (budget - cost) * done / queries

    def _had(self, state: AgentState) -> int:
        """How many of its observations are of no evaluation: given, or attached."""
        passed = getattr(state, "passed", 0)
        return max(len(state.X) - passed - (state.used - len(state.failed)), 0)

    @property
    def defers(self) -> bool:
        """Whether a reply can be made without the evaluation that its request waits for."""
        return not self.terms.search.needs_outcome

    def wants(self, state: AgentState) -> bool:
        """Whether the last request waits for an evaluation that the budget allows."""
        room = self._room(state, state.X[:0])
        return state.asking > TINY and room >= self.space.cheapest - TINY

    def left(self, state: AgentState, pending: int) -> int:
        """How many points `ask` can give, while so many are pending; with a fidelity at least."""
        if not self.defers:
            return int(self.wants(state) and not pending)
        room = self._room(state, state.X[:0]) if state.broadcasts else 0
        if room >= self.space.cheapest - TINY and not pending:
            return max(int(room + TINY), 1)
        return max(int(room + TINY) - pending, 0)

    def _room(self, state: AgentState, pending: Tensor) -> float:
        """What is left of the budget, in evaluations, or in their costs where there is a fidelity.

        Args:
            state: The state.
            pending: Points that were asked for and not answered, `k x d`.
        """
        return self.terms.budget - _spent(state) - math.fsum(self.space.costs(pending))

    def ask(self, state: AgentState, pending: Tensor | None = None) -> Tensor | Pending | None:
        """The next points `k x d`; None if there are none left.

        These are the points that the last request waits for, or more of them, in batches of `q`, as
        long as the budget lasts.

        Args:
            state: The state.
            pending: Points `k x d` that were asked for and not answered: the next ones differ.
        """
        waiting = state.X[:0] if pending is None else pending.double()
        count = self.terms.q if len(waiting) or not state.asking else state.asking
        if self.space.fidelity is None:
            count = min(count, self.left(state, len(waiting)))
        else:  # how many a request waits for depends on their fidelities
            room = self._room(state, waiting) if state.broadcasts else 0
            count = int(room >= self.space.cheapest - TINY)
        if count < 1:
            return None
        terms = self._terms(state.broadcasts)
        action = terms.aggregation.action(state.order)
        if action is not None:
            return action
        design = self._given_points(self._view(state, terms, waiting), state, count)
        few = len(state.X) + len(waiting) < terms.num_initial
        if self.space.fidelity is not None:  # not the values on the way of a curve
            few = state.used - len(state.failed) + len(waiting) + self._had(state) < (
                terms.num_initial
            )
        chosen = waiting[:0]
        for index in range(count):
            view = self._view(state, terms, torch.cat([waiting, chosen]))
            if design is not None and index < len(design):
                point = design[index : index + 1]
                if self.initial_design is None:
                    point = self._fresh(view, point)
            elif self._deals(view, few):
                # By evaluations, not by outcomes: one that failed is not asked again.
                point = self._fresh(view, view.dealt(view.n + 1, self.candidates)[view.n :])
            else:
                point = self._apart(view, terms.search.point(view))
            chosen = torch.cat([chosen, point])
        return chosen

    def tell(
        self, state: AgentState, X: Tensor, Y: Tensor, sem: Tensor | None = None
    ) -> AgentState:
        """The state after `q x d` points gave values; needs no broadcast, so it may come late.

        A point whose value is NaN has failed: it is used, and never asked again.

        Args:
            state: The state.
            X: The points.
            Y: Their outcomes as the site measures them, `q x m`.
            sem: Their standard errors, `q x m`, NaN where the site knows none.
        """
        good, outcomes, bad = answered(X.double(), Y)
        known = None if sem is None else sem[~Y.isnan().any(dim=-1)]
        state = replace(state, failed=torch.cat([state.failed, bad]))
        state = self._answered(self._with_data(state, good, outcomes, known), X)
        return self._grown(state) if len(good) else state

    def tell_curve(self, state: AgentState, X: Tensor, Y: Tensor) -> AgentState:
        """The state with values that an evaluation had on the way to its fidelity: data alone.

        Args:
            state: The state.
            X: Points in the unit cube, `n x d`.
            Y: Outcomes as the site measures them, `n x 1`.
        """
        state = self._with_data(state, X, Y, None)
        passed: dict[str, Any] = {"passed": getattr(state, "passed", 0) + len(X)}
        return self._grown(replace(state, **passed))

    def attach(
        self, state: AgentState, X: Tensor, Y: Tensor, sem: Tensor | None = None
    ) -> AgentState:
        """The state with results that exist already: data, and no evaluations.

        Args:
            state: The state.
            X: Points in the unit cube, `n x d`.
            Y: Outcomes as the site measures them, `n x m`.
            sem: As in `tell`.
        """
        why = self.terms.aggregation.fixed_data
        if why:
            raise InputDataError(why)
        check_data((X, Y), self.space)
        if self.terms.search.needs_outcome:
            raise InputDataError(
                f"{type(self.terms.search).__name__} learns from what is evaluated in its rounds: "
                "results that exist already cannot be attached."
            )
        warn_infeasible(self.space, X, f"a result attached at {self.name!r}")
        return self._grown(self._with_data(state, X, Y, sem))

    def reply(self, state: AgentState) -> tuple[AgentState, Any]:
        """What leaves the site: a function of all its data, as the aggregation makes it."""
        terms = self._terms(state.broadcasts)
        if self.wants(state):  # the reply does not wait: what the open query uses is used
            state = self._answered(state, state.X[:0])
        view = self._view(state, terms)
        party = replace(
            self._party(state, terms),
            listens=terms.search.listens(view),
            published=self._published(terms, state.broadcasts),
        )
        memory, reply = terms.aggregation.contribute(
            party, state.order, lambda: self._message(view)
        )
        return self._forgetting(replace(state, aggregation=memory)), reply

    def _message(self, view: View) -> Tensor | None:
        """What the search says; None without data, or if it cannot be worked out."""
        if not len(view.X) and not view.terms.search.needs_outcome:
            return None
        try:
            message = view.terms.search.message(view)
        except NumericalError as error:  # a site must not be stuck, nor others wait for it
            logger.warning("agent %r has no message: %s", self.name, error)
            return None
        if message is not None and not bool(message.isfinite().all()):
            logger.warning("agent %r has no message: a number is not finite", self.name)
            return None
        trust = None if message is None else view.terms.search.trust(view.terms, message)
        if trust is not None:
            self.earned.append(trust)
        return message

    # -------------------------------------------------------------- points

    def _given_points(self, view: View, state: AgentState, count: int) -> Tensor | None:
        """Points of the initial design, or those that an order asks for together at the start."""
        if self.initial_design is not None and view.n < len(self.initial_design):
            design = self.initial_design.double()[view.n : view.n + count]
            return design if self.candidates is not None else self.space.snap(design)
        if state.order.evaluate == "first" and state.asking and count == state.asking:
            return view.terms.search.first(view, count)
        return None

    def _deals(self, view: View, few: bool) -> bool:
        """Whether the next point is one that a site without data is dealt, the default first."""
        if view.n == 0 and view.terms.default is not None and not view.began_with:
            return True
        return few and not view.terms.search.has_messages(view)

    def _apart(self, view: View, point: Tensor) -> Tensor:
        """A point that can be evaluated, and is none of those without an outcome if possible."""
        if self.candidates is not None or not view.terms.search.snaps:
            return point
        return self._fresh(view, self.space.snap(point))

    def _fresh(self, view: View, point: Tensor) -> Tensor:
        """A point that is none of those without an outcome if possible."""
        if self.candidates is not None:
            return point
        # Two points on one integer or choice: a random one instead.
        stream = generator(self.seed, "again", view.query, view.slot)
        for _ in range(REDRAWS):
            if not len(view.avoid) or not bool((view.avoid == point).all(dim=-1).any()):
                break
            point = self.space.snap(self.space.feasible_set.uniform(1, stream))
        return point

    def _left(self, avoid: Tensor) -> Tensor | None:
        """The candidates that are not to be avoided; all of them if none is left."""
        if self.candidates is None or not len(avoid):
            return self.candidates
        taken = (self.candidates.unsqueeze(1) == avoid.unsqueeze(0)).all(dim=-1).any(dim=-1)
        return self.candidates if bool(taken.all()) else self.candidates[~taken]

    # -------------------------------------------------------------- states

    def _with_data(self, state: AgentState, X: Tensor, Y: Tensor, sem: Tensor | None) -> AgentState:
        outcomes = self.space.to_public(Y)
        known = torch.full_like(outcomes, UNKNOWN)
        if sem is not None:
            known = self.space.to_public_variance(sem).nan_to_num(nan=UNKNOWN)
        return replace(
            state,
            X=torch.cat([state.X, X.double()]),
            Y=torch.cat([state.Y, outcomes]),
            Yvar=torch.cat([state.Yvar, known]),
        )

    def _answered(self, state: AgentState, X: Tensor) -> AgentState:
        """The state after evaluations at `q x d` points were told or have failed."""
        count: Any = len(X)
        spent = {}
        if self.space.fidelity is not None:
            count = math.fsum(self.space.costs(X))
            spent = {"spent": _spent(state) + count}
        more = max(count - state.asking, 0)
        state = replace(
            state,
            used=state.used + len(X),
            asking=max(state.asking - count, 0),
            late=max(state.late - more, 0),
            ahead=state.ahead + max(more - state.late, 0),
            **spent,
        )
        memory = self.terms.search.answered(self._local_view(state))
        return replace(state, search=memory)

    def _forgetting(self, state: AgentState) -> AgentState:
        """Without data, for a search whose message is about the evaluation just made."""
        if not self.terms.search.needs_outcome:
            return state
        return replace(
            state, X=state.X[:0], Y=state.Y[:0], Yvar=state.Yvar[:0], failed=state.failed[:0]
        )

    def _grown(self, state: AgentState) -> AgentState:
        return replace(state, search=self.terms.search.told(self._local_view(state)))

    def _local_view(self, state: AgentState) -> View:
        """What the search sees without any broadcast."""
        return self._view_of(state, self.terms, state.X[:0], None)

    def _view(self, state: AgentState, terms: Terms, pending: Tensor | None = None) -> View:
        release = terms.aggregation.release(
            self._party(state, terms), self._published(terms, state.broadcasts)
        )
        return self._view_of(state, terms, state.X[:0] if pending is None else pending, release)

    def _view_of(self, state: AgentState, terms: Terms, pending: Tensor, release: Any) -> View:
        design = 0 if self.initial_design is None else len(self.initial_design)
        return View(
            terms=terms,
            name=self.name,
            seed=self.seed,
            X=state.X,
            Y=state.Y,
            chosen=pending,
            failed=state.failed,
            n=state.used + len(pending),
            first=max(state.first, design),
            t=-1 if state.order is None else state.order.t,
            release=release,
            memory=state.search,
            candidates=self._left(torch.cat([state.failed, pending])),
            began_with=0 if self.data is None else len(self.data[0]),
            Yvar=None if bool((state.Yvar < 0).any()) else state.Yvar,
            room=self._room(state, pending),
        )

    # -------------------------------------------------------------- what the hub says

    def _party(self, state: AgentState, terms: Terms) -> Party:
        return Party(terms, self.name, self.resources, state.aggregation, last=state.order)

    def _terms(self, broadcasts: tuple[str, ...]) -> Terms:
        """The agreed terms; once for all agents of a process that have the same study."""
        key = (self.terms, self.blobs, broadcasts[0])
        return remembered(key, lambda: self._agreed(broadcasts[0]))

    def _agreed(self, digest: str) -> Terms:
        setup: Setup = self.blobs.load(digest, Setup)
        mine = self.terms.basis
        if mine is None:
            if setup.basis:
                raise MessageError("The search has no shared basis, the hub sends one.")
            return self.terms.agreed(setup, None)
        key = (self.blobs, digest, self.space)
        basis = remembered(key, lambda: received_basis(setup.basis, self.space.shared))
        check_basis(mine, basis)
        return self.terms.agreed(setup, basis)

    def _check_promised(self, terms: Terms) -> None:
        """Raise `MessageError` unless the hub's promise is what the terms come to."""

        def check() -> bool:
            check_promised(terms.promise, terms.aggregation.guaranteed(terms))
            promise = terms.promise
            if promise is not None and not promise.private and self.resources.noise.private:
                raise MessageError(
                    "The terms differ in promise.private: this site's study has secret noise, the "
                    "hub says that its noise comes from a seed."
                )
            return True

        remembered((terms, self.resources.noise.private, "promised"), check)

    def _pay(self, state: AgentState, terms: Terms, order: Order, *, at_all: bool) -> None:
        """Pay for a whole run when its first message is asked for, or see whether that can be done.

        Raises:
            BudgetExceeded: The site's ledger does not cover the run.
            MessageError: It counts something else.
        """
        shared_ledger, first = self.resources.shared_ledger, not state.asked.contributions
        if shared_ledger is None or not (order.contribute and first):
            return
        price = terms.aggregation.price(terms)
        if price is None or not price.payments:
            return
        if (shared_ledger.adjacency, shared_ledger.unit) != (price.adjacency, price.guarantee.unit):
            raise MessageError(
                f"This site's ledger counts per {shared_ledger.unit}, {shared_ledger.adjacency}, "
                f"the terms promise per {price.guarantee.unit}, {price.adjacency}: name another "
                "ledger for them."
            )
        private = terms.promise is not None and terms.promise.private
        count, note = price.payments, self.resources.payer
        if at_all:
            shared_ledger.spend_once(price.event, count=count, note=note, private=private)
        elif not shared_ledger.paid(note):  # a value: nothing is written
            shared_ledger.ledger.spend(price.event, count=count, note=note, private=private)

    def _check_limits(self, state: AgentState, terms: Terms, order: Order) -> None:
        """Raise `MessageError` if an order goes back, or asks for more than the terms have."""
        limits, asked = terms.aggregation.limits(terms), state.asked.after(order)
        last = -1 if state.order is None else state.order.t
        if not 0 <= order.t <= limits.rounds:
            raise MessageError(f"The rounds of the terms are 0..{limits.rounds}, got {order.t}.")
        if order.t < last:
            raise MessageError(f"Round {order.t} comes after round {last}.")
        for name, words in (
            ("first", "times first points"),
            ("queries", "queries"),
            ("contributions", "messages"),
        ):
            most, count = getattr(limits, name), getattr(asked, name)
            if count > most and count > getattr(state.asked, name):
                raise MessageError(
                    f"This site's study has {most} {words} in a run, the hub asks for number "
                    f"{count}. A run with more needs a larger budget in the site's study too."
                )

    def _hash_agreed(self, digest: str) -> str:
        """Hash of a setup without its roster."""

        def made() -> str:
            setup: Setup = self.blobs.load(digest, Setup)
            return content_hash(encode(replace(setup, agents=())))

        return remembered((self.blobs, digest, "agreed"), made)

    def _check_grown(self, state: AgentState, terms: Terms) -> None:
        """Raise `MessageError` if the roster is another than that of the last request.

        Where agents may join while a study runs, it grows at its end.
        """
        if not state.agreed:
            return
        before, now = state.roster, terms.agents
        if before == now:
            return
        changed = f"The hub's agents were {list(before)[:8]} and are now {list(now)[:8]}"
        if now[: len(before)] != before:
            raise MessageError(
                f"{changed}: expected those of before in the same order, and new ones after them."
            )
        if not terms.aggregation.opens:
            raise MessageError(
                f"{changed}: nobody can join a running study of "
                f"{type(terms.aggregation).__name__}, because {terms.aggregation.why_closed}. "
                "Start another run."
            )

    def _published(self, terms: Terms, broadcasts: tuple[str, ...]) -> tuple[Any, ...]:
        """What was published beside the setup, checked; once for all agents of a process."""

        def load() -> tuple[Any, ...]:
            kinds = terms.aggregation.broadcast_types
            loaded = tuple(self.blobs.load(digest, *kinds) for digest in broadcasts[1:])
            terms.aggregation.check_published(terms, loaded)
            return loaded

        return remembered((self.blobs, broadcasts), load) if len(broadcasts) > 1 else ()


def _spent(state: AgentState) -> float:
    """What was used of the budget."""
    spent: float = getattr(state, "spent", state.used)
    return spent


def received_basis(features: Mapping[str, Tensor], space: SearchSpace) -> FeatureMap:
    """The feature map that a hub sent, or `MessageError` if it is none over this space."""
    largest = max((size for tensor in features.values() for size in tensor.shape), default=0)
    if largest > MAX_FEATURES:
        raise MessageError(
            f"A shared basis has tensors of up to {MAX_FEATURES} rows and columns, got {largest}."
        )
    try:
        phi = feature_map_from_tensors(features)
        if phi.num_features > MAX_FEATURES:
            raise MessageError(f"it has {phi.num_features} features, {MAX_FEATURES} at most")
        if phi.input_dim != space.dim:
            raise MessageError(f"it is over {phi.input_dim} inputs, the space has {space.dim}")
        probes = torch.cat([space.bounds, generator(0, "probe").uniform(64, space.dim)])
        phi.check_domain(probes)
        if not bool((phi(probes).square().sum(dim=-1) <= MAX_WEIGHT).all()):
            raise MessageError("its features are not finite, or too large")
    except (BotorchError, FederatedError) as error:
        raise MessageError(f"The shared basis is no feature map: {error}") from error
    return phi


def check_roster(roster: tuple[AgentId, ...], terms: Terms) -> None:
    """Raise `MessageError` unless the hub's agents are those of a site's own study.

    Where agents may join, one of the two lists goes on where the other one ends.

    Args:
        roster: The site's; empty if it does not know them.
        terms: With the hub's.
    """
    if not roster or roster == terms.agents:
        return
    shorter = min(len(roster), len(terms.agents))
    if terms.aggregation.opens and roster[:shorter] == terms.agents[:shorter]:
        return
    names = sorted({*roster} ^ {*terms.agents})
    differ = f"they differ in {names[:4]}" if names else "their order differs"
    raise MessageError(
        f"The terms differ in agents: this site's study has {len(roster)}, {list(roster)[:4]}, "
        f"the hub says {len(terms.agents)}, {list(terms.agents)[:4]}; {differ}. "
        "Use the same study on both sides."
    )


def check_basis(mine: FeatureMap, theirs: FeatureMap) -> None:
    """Raise `MessageError` unless a hub's basis is the site's own but for rounding."""
    own, said = mine.to_tensors(), theirs.to_tensors()
    differ = sorted({*own} ^ {*said})
    if differ:
        raise MessageError(
            f"The terms differ in the shared basis: one side alone has {differ[:4]}. {SAME_STUDY}"
        )
    for name, here in own.items():
        there = said[name]
        if here.shape != there.shape or here.dtype != there.dtype:
            raise MessageError(
                f"The terms differ in the shared basis, {name}: this site has shape "
                f"{tuple(here.shape)}, the hub says {tuple(there.shape)}. {SAME_STUDY}"
            )
        largest = float(here.double().abs().max()) if here.numel() else 0.0
        off = (here.double() - there.double()).abs()
        if not bool((off <= ROUNDING * max(largest, 1e-300)).all()):
            where = int(off.flatten().nan_to_num(nan=torch.inf).argmax())
            raise MessageError(
                f"The terms differ in the shared basis, {name}: this site has "
                f"{float(here.flatten()[where]):.12g} at place {where}, the hub says "
                f"{float(there.flatten()[where]):.12g}. {SAME_STUDY}"
            )


def check_promised(promise: Guarantee | None, own: Guarantee | None) -> None:
    """Raise `MessageError` unless a hub promises what a site's own terms come to.

    Args:
        promise: The hub's.
        own: The site's.
    """
    if promise is own:
        return
    if promise is None or own is None:
        here, there = own or "no promise", promise or "no promise"
        raise MessageError(f"The terms differ in promise: this site has {here}, the hub {there}.")
    for name in ("unit", "adjacency", "releases", "delta", "accountant"):
        here, there = getattr(own, name), getattr(promise, name)
        if here != there:
            raise MessageError(
                f"The terms differ in promise.{name}: this site has {here!r}, the hub says "
                f"{there!r}. Use the same study on both sides."
            )
    if not abs(promise.epsilon - own.epsilon) <= ACCOUNTING * own.epsilon:
        raise MessageError(
            f"The terms differ in promise.epsilon: this site's terms come to {own.epsilon:.6g}, "
            f"the hub says {promise.epsilon:.6g}. Use the same study on both sides."
        )


def bound_to(agent: T, roster: tuple[AgentId, ...]) -> T:
    """An agent of a study whose agents are known: it takes part with these alone."""
    return replace(agent, roster=roster) if isinstance(agent, FederatedAgent) else agent


def paying(agent: T, ledger: SharedLedger, payer: str) -> T:
    """An agent that pays for a run in advance, once, from a durable ledger.

    Args:
        agent: The agent.
        ledger: The site's own.
        payer: What the payment is called: nobody else pays under this name.
    """
    if not isinstance(agent, FederatedAgent):
        return agent
    own = replace(agent.resources, shared_ledger=ledger, payer=payer)
    return replace(agent, resources=own)


def check_promise(
    promise: Guarantee | None, require: Budget | None, unit: Unit, adjacency: Adjacency
) -> None:
    """Raise `MessageError` unless a hub promises what a site requires for a record or for all.

    A promise for all of an agent's records holds for each of them, and one for any other record
    holds for one that counts for nothing; not the other way round.

    Args:
        promise: What the hub says.
        require: What the site requires; None for nothing.
        unit: What the site requires it for.
        adjacency: What else that might be.
    """
    if require is None or (promise is not None and not promise.releases):  # nothing is revealed
        return
    wanted = f"({require.epsilon:g}, {require.delta:g})-DP per {unit}"
    if promise is None:
        raise MessageError(f"This site requires {wanted}, the hub promises none.")
    if not promise.private:
        raise MessageError(f"This site requires {wanted}, the hub's noise comes from a seed.")
    if promise.unit != unit and unit == "agent":
        raise MessageError(f"This site requires {wanted}, the hub promises it per record.")
    if promise.adjacency != adjacency and adjacency == "replace-one":
        raise MessageError(f"This site requires {wanted}, replace-one, the hub promises zero-out.")
    if promise.epsilon > require.epsilon or promise.delta > require.delta:
        raise MessageError(
            f"This site requires {wanted}, the hub promises "
            f"({promise.epsilon:.4g}, {promise.delta:.4g})."
        )
