r"""Terms of a federation, and its two parts: a search and an aggregation.

A protocol is a search times an aggregation::

    Search        a site's message, and its next point
    Aggregation   the orders of a round, the releases from the messages, and their price

Both are frozen dataclasses of public settings. A setting that is private to a site is declared by
``metadata=OWN``: it is not sent and may differ between sites. A site derives its `Terms` from its
study. The hub sends a `Setup`: every public setting as text, the roster, the shared basis and its
promise. A site refuses texts that differ from those of its study.

The memory of a part is a frozen dataclass that `wire.codec` can encode: `memory_type` of a search
and of the site's side of an aggregation, `state_type` of the hub's side.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import MessageError
from botorch_fed.federation.base import MAX_NAME, AgentId
from botorch_fed.federation.disclosure import Price, Sees, derived_rows
from botorch_fed.federation.points import check_active, check_default, first_points
from botorch_fed.models import FeatureMap
from botorch_fed.privacy import Entry, Guarantee, Ledger, NoiseSource, OSNoise, SharedLedger
from botorch_fed.rng import Generator, generator
from botorch_fed.space import SearchSpace
from botorch_fed.storage.store import MemoryStore, Store
from botorch_fed.wire.codec import MAX_BYTES

MAX_WEIGHT = 1e6  # largest number in a message: no function of scaled outcomes exceeds it
MAX_INITIAL = 10_000  # evaluations of a site before its search begins
MAX_EVALUATIONS = 10**8
MAX_SEED = 2**31 - 1
ROOM_BYTES = 4096  # of a message beside its numbers
MAX_AHEAD = 10_000  # consecutive rounds that a site may miss
_DIGITS = 12  # of a number as text: the last digits may differ between machines
_REMEMBERED = 16  # entries of the cache of a process
_PACKAGE = __name__.partition(".")[0]

T = TypeVar("T")


OWN = {"own": True}  # marks a setting that is private to a site: `field(…, metadata=OWN)`


# ------------------------------------------------------------------ messages


@dataclass(frozen=True, eq=False)
class Setup:
    """The terms of a federation as they are sent.

    Attributes:
        words: Every public setting as text, by its dotted name.
        agents: The roster.
        basis: The shared basis, as `FeatureMap.to_tensors` gives it; empty without a basis.
        promise: The guarantee of the whole run; None if it is not private.
    """

    words: Mapping[str, str]
    agents: tuple[AgentId, ...]
    basis: Mapping[str, Tensor] = field(repr=False)
    promise: Guarantee | None


@dataclass(frozen=True)
class Order:
    """What an agent is to do; an aggregation with other steps has a subclass.

    Attributes:
        t: The round.
        evaluate: The requested evaluation: none, the first points of a site, or the next query.
        contribute: Whether a message is requested.
    """

    t: int
    evaluate: Literal["nothing", "first", "next"]
    contribute: bool


@dataclass(frozen=True, eq=False)
class Contribution:
    """A message, if one was asked for and the site has something to say."""

    values: Tensor | None = field(repr=False)


@dataclass(frozen=True)
class Roster:
    """The agents of a study that agents may join while it runs.

    Attributes:
        agents: The agents in the order in which they joined.
        joined: The round of each agent's first order; 0 for agents present at the start.
        queried: The number of queries requested from each agent.
    """

    agents: tuple[AgentId, ...]
    joined: tuple[int, ...]
    queried: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.agents) == len(self.joined) == len(self.queried):
            raise InputDataError(
                f"Expected two numbers for each of {len(self.agents)} agents, got "
                f"{len(self.joined)} and {len(self.queried)}."
            )

    @classmethod
    def of(cls, agents: tuple[AgentId, ...]) -> Roster:
        """The roster at the start of a study."""
        return cls((), (), ()).grown(agents, 0)

    def grown(self, agents: tuple[AgentId, ...], t: int) -> Roster:
        """The roster with the new ones of `agents`, who join in round `t`."""
        new = agents[len(self.agents) :]
        zeros = (0,) * len(new)
        return Roster(self.agents + new, self.joined + (t,) * len(new), self.queried + zeros)

    def after(self, orders: Mapping[AgentId, Order]) -> Roster:
        """The roster after a round with these orders."""
        asked = {agent for agent, order in orders.items() if order.evaluate == "next"}
        counts = zip(self.agents, self.queried, strict=True)
        return replace(self, queried=tuple(n + (agent in asked) for agent, n in counts))

    def joining(self, t: int) -> tuple[AgentId, ...]:
        """The agents whose first order is that of round `t`."""
        return tuple(a for a, first in zip(self.agents, self.joined, strict=True) if first == t)

    def querying(self, terms: Terms) -> tuple[AgentId, ...]:
        """The evaluating agents that have queries left."""
        return tuple(
            agent
            for agent, count in zip(self.agents, self.queried, strict=True)
            if agent in terms.evaluating and count < terms.queries
        )


# ------------------------------------------------------------------ the parts


@dataclass(frozen=True, eq=False)
class Resources:
    """The private resources of one party.

    Attributes:
        noise: The source of its noise and secret random bits.
        secrets: The store of its keys and of its sums without noise.
        ledger: Its earlier payments and its budget; None for an empty ledger without a budget.
        shared_ledger: A durable ledger that records payments too; a site pays for a whole run in
            advance.
        payer: At a site, the unique name of its payment in `shared_ledger`.
        cache: Results computed in this process; they can be computed again.
    """

    noise: NoiseSource = field(default_factory=OSNoise)
    secrets: Store = field(default_factory=MemoryStore)
    ledger: Ledger | None = None
    shared_ledger: SharedLedger | None = None
    payer: str = ""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class View:
    """The input of a site's search.

    Attributes:
        terms: The terms, with the hub's roster, basis and promise.
        name: The site.
        seed: The site's seed.
        X: The site's points in the unit cube, `n x d`.
        Y: The site's outcomes on the public scale, `n x m`, larger is better.
        chosen: Points that are pending or already in this query, `k x d`.
        failed: Points whose evaluation failed, `m x d`.
        n: The number of the next evaluation, from 0; told, failed and pending evaluations count.
        first: The number of evaluations before those of the search, e.g. an initial design.
        t: The round of the last order, -1 before the first.
        release: The newest release; None if there is none.
        memory: The search's memory.
        candidates: All points that can be evaluated and are not in `avoid`, `K x d`; None for the
            whole space.
        began_with: The number of observations of the site before its first request.
        Yvar: The variances of `Y`, if the site knows all of them.
        room: What is left of the budget, in evaluations at the target where there is a fidelity.
    """

    terms: Terms
    name: AgentId
    seed: int = field(repr=False)
    X: Tensor = field(repr=False)
    Y: Tensor = field(repr=False)
    chosen: Tensor = field(repr=False)
    failed: Tensor = field(repr=False)
    n: int
    first: int = 0
    t: int = -1
    release: Any = field(default=None, repr=False)
    memory: Any = field(default=None, repr=False)
    candidates: Tensor | None = field(default=None, repr=False)
    began_with: int = 0
    Yvar: Tensor | None = field(default=None, repr=False)
    room: float = math.inf

    @property
    def avoid(self) -> Tensor:
        """Points without an outcome: failed and chosen ones."""
        return torch.cat([self.failed, self.chosen])

    @property
    def query(self) -> int:
        """The number of the next query, from 0."""
        return self.n // self.terms.q

    @property
    def slot(self) -> int:
        """The position of the next evaluation in its query, from 0."""
        return self.n % self.terms.q

    def stream(self, *path: int | str) -> Generator:
        """The site's random numbers for a path, e.g. ``("point", view.query, view.slot)``."""
        return generator(self.seed, *path)

    def dealt(self, count: int, candidates: Tensor | None = None) -> Tensor:
        """The first `count` points of this site's share of one sequence, the default first.

        Args:
            count: The number of points.
            candidates: All points that can be evaluated, `K x d`; None for the whole space.
        """
        agents = self.terms.agents
        return first_points(
            self.terms.space,
            agents.index(self.name),
            len(agents),
            count,
            default=None if self.began_with else self.terms.default,
            seed=self.terms.design_seed,
            candidates=candidates,
        )


@dataclass(frozen=True)
class Search:
    """A site's messages and points: pure functions of a `View`.

    A subclass has `point`, and for messages `size` and `message`. Random numbers come from
    `View.stream` by path, so that a run continues identically after a crash.
    """

    memory_type: ClassVar[type | None] = None
    needs_outcome: ClassVar[bool] = False  # a message depends on the evaluation of its round alone
    has_basis: ClassVar[bool] = True
    snaps: ClassVar[bool] = True  # the agent moves points to the nearest that can be evaluated
    begins_anyway: ClassVar[bool] = False  # first points are made for sites with data too
    many_outcomes: ClassVar[bool] = False  # whether it takes spaces with several outcomes
    takes_fidelity: ClassVar[bool] = False  # it chooses the fidelity of an evaluation

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless the terms fit the search."""

    def point(self, view: View) -> Tensor:
        """The next point, `1 x d`; one of `view.candidates` if there are any."""
        raise NotImplementedError

    def first(self, view: View, count: int) -> Tensor:
        """The first `count` points of a site, if an order requests them together."""
        return view.dealt(view.n + count, view.candidates)[view.n :]

    def size(self, terms: Terms) -> int:
        """The number of numbers in a message; 0 for a search without messages."""
        return 0

    def norm(self, terms: Terms) -> float | None:
        """The clip norm of a message; None without one."""
        return None

    def message(self, view: View) -> Tensor | None:
        """The site's message, `size` numbers; None for no message."""
        return None

    def trust(self, terms: Terms, message: Tensor) -> float | None:
        """The trust of the site in what it has received, from 0 to 1, as its own message tells it.

        None for a message that tells none.
        """
        return None

    def check(self, terms: Terms, message: Tensor) -> None:
        """Raise `MessageError` unless a message has the right shape and finite, bounded numbers."""
        check_vector(message, self.size(terms), "A message")

    @property
    def least(self) -> int | None:
        """The number of observations that a first message needs; None without messages."""
        return None if type(self).message is Search.message else 1

    @property
    def alone(self) -> bool:
        """Whether sites search without messages."""
        return self.least is None

    def content(self, terms: Terms) -> str:
        """The content of a message: a noun phrase."""
        return f"{self.size(terms)} numbers" if self.least else "nothing"

    def limits(self, terms: Terms) -> tuple[str, ...]:
        """The facts that a message does not hide: sentences."""
        return ("A message is a function of the agent's data.",) if self.least else ()

    def listens(self, view: View) -> bool:
        """Whether the site uses a release for its next query."""
        return True

    def has_messages(self, view: View) -> bool:
        """Whether there is a release with messages of other sites.

        A site without data then skips its initial points.
        """
        return view.release is not None

    def start(self, view: View) -> Any:
        """The memory before the first request."""
        return None

    def received(self, view: View) -> Any:
        """The memory after a request: `view.release` may be new."""
        return view.memory

    def answered(self, view: View) -> Any:
        """The memory after a query was answered, has failed or was deferred."""
        return view.memory

    def told(self, view: View) -> Any:
        """The memory after new data of the site; the view has no release."""
        return view.memory


@dataclass(frozen=True)
class Limits:
    """Upper bounds on the requests of a hub to one site in a whole run; the site counts them.

    Attributes:
        rounds: The last round.
        first: Requests for a site's first points.
        queries: Requests for a query.
        contributions: Requests for a message.
    """

    rounds: int
    first: int
    queries: int
    contributions: int


@dataclass(frozen=True, eq=False)
class Party:
    """The input of an aggregation beside messages.

    Attributes:
        terms: The terms; at a site with the hub's roster, basis and promise.
        name: The site, or None at the hub.
        resources: The party's private resources.
        memory: At a site, the memory of its side of the aggregation.
        listens: At a site, whether its search uses a release.
        last: At a site with a new order, the order before it; None before the first.
        published: At a site that replies, the broadcasts of its last request without the setup.
    """

    terms: Terms
    name: AgentId | None
    resources: Resources
    memory: Any = None
    listens: bool = True
    last: Any = None
    published: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Aggregation:
    """The orders of a round, the releases from messages, and their price.

    A subclass has the hub's four functions: `start`, `orders`, `broadcasts` and `combine`. The
    hub's state is of `state_type` and has the round `t`. Where agents may join while the study
    runs (`opens`), it also has the `roster`, a `Roster`, whose agents are those of the hub's terms.
    """

    state_type: ClassVar[type]
    memory_type: ClassVar[type | None] = None
    order_types: ClassVar[tuple[type, ...]] = (Order,)
    reply_types: ClassVar[tuple[type, ...]] = (Contribution,)
    broadcast_types: ClassVar[tuple[type, ...]] = ()  # without the setup
    opens: ClassVar[bool] = False
    keeps_secrets: ClassVar[bool] = False  # whether parties have keys that a crash must not lose
    why_closed: ClassVar[str] = "its promise and its keys are for the agents that it began with"

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless the terms fit the aggregation."""

    # -------------------------------------------------------------- the hub

    def start(self, hub: Party) -> Any:
        """The state before the first round."""
        raise NotImplementedError

    def orders(self, hub: Party, state: Any) -> Mapping[AgentId, Any] | None:
        """The order of each agent, a function of the state; None at the end."""
        raise NotImplementedError

    def broadcasts(self, hub: Party, state: Any) -> tuple[Any, ...]:
        """The broadcasts to all agents, without the setup."""
        raise NotImplementedError

    def resumed(self, hub: Party, state: Any) -> Any:
        """The state with which a run continues that stopped in `state`.

        The budget may have grown. If the content of the orders depends on the budget, the state
        holds the budget of its round, and takes over the new one only after its last round.
        """
        return state

    def check(self, hub: Party, state: Any, sender: AgentId, reply: Any, order: Any) -> None:
        """Raise `MessageError` unless a reply to an order can be combined."""
        if reply.values is None:
            return
        if not order.contribute:
            raise MessageError("Expected a reply without a message, got one with a message.")
        hub.terms.search.check(hub.terms, reply.values)

    def reply_bytes(self, hub: Party) -> int:
        """The bytes of the longest reply that a site may send, without its frame."""
        if self.reply_types != (Contribution,):
            return MAX_BYTES  # of types that this class does not know
        return 8 * hub.terms.search.size(hub.terms) + ROOM_BYTES

    def combine(self, hub: Party, state: Any, inbox: Mapping[AgentId, Any]) -> Any:
        """The state after a round."""
        raise NotImplementedError

    def promise(self, hub: Party) -> Guarantee | None:
        """The guarantee of the whole run; None without noise."""
        return None

    def signal_words(self, hub: Party) -> str:
        """A plan's sentence on signal and noise, or empty."""
        return ""

    def account(self, hub: Party, state: Any) -> dict[str, Any] | None:
        """The promise and the payments, for a report; None without a promise."""
        price = self.price(hub.terms)
        return None if price is None else price.account(self.paid(hub, state))

    def paid(self, hub: Party, state: Any) -> tuple[Entry, ...]:
        """All payments so far, of the unit with the most payments."""
        return ()

    @property
    def fixed_data(self) -> str:
        """Why a site may not attach results during a run; empty where it may."""
        return ""

    def price(self, terms: Terms) -> Price | None:
        """The privacy cost of a run; None without noise."""
        return None

    def guaranteed(self, terms: Terms) -> Guarantee | None:
        """The guarantee that follows from a site's terms; a hub with another promise is refused.

        Default the guarantee of `price`; without a `price` and with a `promise`, the hub's promise.
        """
        if type(self).price is Aggregation.price:
            return None if type(self).promise is Aggregation.promise else terms.promise
        price = self.price(replace(terms, promise=None))
        return None if price is None else price.guarantee

    def limits(self, terms: Terms) -> Limits:
        """The limits of one site; default a message in every query and one before."""
        return Limits(MAX_EVALUATIONS, 1, terms.queries, terms.queries + 1)

    def sees(self, terms: Terms) -> Sees:
        """The readers of all messages; the default hides no message."""
        return Sees(
            rows=derived_rows(
                Setup,
                self.order_types,
                self.reply_types,
                self.broadcast_types,
                silent=terms.search.least is None,
            ),
            trust="The server and all agents are trusted with every message.",
            limits=terms.search.limits(terms),
        )

    def silent(self, queries: int, begun: bool) -> str:
        """Why no message would ever be sent, and what to write; empty if there would be one.

        Args:
            queries: The number of queries of each site.
            begun: Whether a site has the data for a message before its first query.
        """
        return ""

    # -------------------------------------------------------------- a site

    def begin(self, site: Party) -> Any:
        """The site's memory before the first request."""
        return None

    def check_published(self, terms: Terms, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless broadcasts are valid; the check is the same at all sites."""

    def check_order(self, site: Party, order: Any, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless an order is valid, `BudgetExceeded` if it cannot be paid."""

    def received(self, site: Party, order: Any, published: tuple[Any, ...]) -> Any:
        """The site's memory after an order."""
        return site.memory

    def release(self, site: Party, published: tuple[Any, ...]) -> Any:
        """The newest release as searches read it; None if there is none."""
        return published[-1] if published else None

    def action(self, order: Any) -> Tensor | None:
        """The points `q x d` that an order prescribes; None where the search decides."""
        return None

    def contribute(
        self, site: Party, order: Any, message: Callable[[], Tensor | None]
    ) -> tuple[Any, Any]:
        """The site's memory after the reply, and the reply.

        Args:
            site: The party.
            order: The last order.
            message: Computes the search's message; None if there is none.
        """
        return site.memory, Contribution(message() if order.contribute else None)


# ------------------------------------------------------------------ the terms


@dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    """The public settings that all parties of a federation agree upon.

    Attributes:
        space: The map of inputs and outcomes.
        budget: The number of evaluations of each site, its first ones included. It is not sent and
            may differ between sites, so that a run can be resumed with a larger one.
        search: The messages and points of sites.
        aggregation: The orders of a round, and the releases from messages.
        basis: The shared basis; None for a search without one. It is sent as tensors: the last
            bits of a basis may differ between machines.
        agents: The roster; empty at a site that takes it from the hub.
        q: Evaluations per query.
        num_initial: The number of initial points of a site without data and without a release.
        default: The first initial point, `1 x d`, the same for all sites; None for no such point.
        design_seed: The seed of the sequence from which sites are dealt initial points.
        active: The agents that evaluate; None for all.
        promise: The hub's guarantee of the whole run.
    """

    space: SearchSpace
    budget: int
    search: Search
    aggregation: Aggregation
    basis: FeatureMap | None = field(default=None, repr=False)
    agents: tuple[AgentId, ...] = ()
    q: int = 1
    num_initial: int = 0
    default: Tensor | None = None
    design_seed: int = 0
    active: tuple[AgentId, ...] | None = None
    promise: Guarantee | None = None

    def __post_init__(self) -> None:
        check_default(self.default, self.space.dim, self.num_initial)
        for name, least, most in (
            ("budget", 0, MAX_EVALUATIONS),
            ("q", 1, MAX_INITIAL),
            ("num_initial", 0, MAX_INITIAL),
            ("design_seed", 0, MAX_SEED),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InputDataError(f"Expected {least} <= {name} <= {most:,}, got {value}.")
        if len(set(self.agents)) < len(self.agents) or max(map(len, self.agents), default=0) > (
            MAX_NAME
        ):
            raise InputDataError(
                f"Expected different names of agents of at most {MAX_NAME} characters, got "
                f"{list(self.agents)[:8]}."
            )
        for name in self.agents:
            if not name.isprintable() or not name:
                raise InputDataError(
                    f"Expected a printable, non-empty name of an agent, got {name!a}: rename it."
                )
        if self.agents:
            check_active(self.active, self.agents)
        if self.basis is not None and self.basis.input_dim != self.space.shared.dim:
            raise InputDataError(
                f"The feature map has {self.basis.input_dim} inputs, the search space "
                f"{self.space.shared.dim} columns"
                f"{'' if self.space.fidelity is None else ' beside its fidelity'}."
            )
        if self.space.fidelity is not None and not self.search.takes_fidelity:
            raise InputDataError(
                f"{type(self.search).__name__} takes no fidelity ({self.space.fidelity.name!r}): "
                "use the default search (TransferSearch), or a space without one."
            )
        if self.basis is None and self.search.has_basis:
            raise InputDataError(
                f"{type(self.search).__name__} needs a shared basis: give a feature_map."
            )
        if not self.search.many_outcomes:
            self.space.refuse_several(
                f"{type(self.search).__name__}",
                "use the default search (TransferSearch) of FTS, FedGP or DPFTSDE.",
            )
        self.search.check_terms(self)
        self.aggregation.check_terms(self)

    @property
    def feature_map(self) -> FeatureMap:
        """The shared basis of a search that has one."""
        if self.basis is None:
            raise InputDataError(f"{type(self.search).__name__} has no shared basis.")
        return self.basis

    @property
    def queries(self) -> int:
        """The number of queries in the budget; the last one may have fewer points."""
        return math.ceil(self.budget / self.q)

    @property
    def evaluating(self) -> tuple[AgentId, ...]:
        """The agents that evaluate."""
        return self.agents if self.active is None else self.active

    @cached_property
    def words(self) -> dict[str, str]:
        """Every public setting as text, except the budget and the settings of the hub."""
        names = ("space", "search", "aggregation", "q", "num_initial", "default", "active")
        words: dict[str, str] = {}
        for name in names:
            words |= in_words(getattr(self, name), name)
        if self.design_seed:
            words["design_seed"] = str(self.design_seed)
        return words

    @cached_property
    def setup(self) -> Setup:
        """The terms as they are sent."""
        basis = {} if self.basis is None else self.basis.to_tensors()
        return Setup(self.words, self.agents, basis, self.promise)

    def agreed(self, setup: Setup, basis: FeatureMap | None) -> Terms:
        """A site's terms with the hub's roster, basis and promise.

        Raises:
            MessageError: The hub's settings differ, or its roster or basis do not fit.
        """
        check_words(self.words, setup.words)
        if self.agents and self.agents != setup.agents:
            raise MessageError(
                f"The hub's agents are {list(setup.agents)[:8]}, this site's study has "
                f"{list(self.agents)[:8]}."
            )
        try:
            return replace(self, agents=setup.agents, basis=basis, promise=setup.promise)
        except InputDataError as error:
            raise MessageError(f"The hub's terms do not fit: {error}") from error


def check_words(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise `MessageError` naming the first setting in which two terms differ."""
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            here, there = mine.get(name, "nothing"), theirs.get(name, "nothing")
            first = theirs.get("num_initial", "0")
            fix = "Use the same study on both sides."
            if mine.get("num_initial") != first:
                fix = (
                    f"Write num_initial = {first[:20]} in the study of this site: it differs too, "
                    "and its default may depend on the data that a study has."
                )
            raise MessageError(
                f"The terms differ in {name}: this site has {here[:80]}, the hub has "
                f"{there[:80]}. {fix}"
            )


def in_words(value: Any, name: str, *, with_own: bool = False) -> dict[str, str]:
    """A setting and its parts as text, by dotted names.

    Args:
        value: The setting: a number, a text, a tensor, a function, a dataclass of such, or a tuple
            or mapping of such.
        name: Its name.
        with_own: Whether to include fields that are private to a site.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        words = {name: type(value).__name__}
        for item in fields(value):
            part = getattr(value, item.name)
            if item.metadata.get("unless_default") and part == item.default:
                continue
            if with_own or not item.metadata.get("own"):
                words |= in_words(part, f"{name}.{item.name}", with_own=with_own)
        return words
    if isinstance(value, Mapping):
        return _all_words({str(key): value[key] for key in sorted(value)}, name, with_own)
    if isinstance(value, tuple | list) and any(map(_has_parts, value)):
        return _all_words({str(i): item for i, item in enumerate(value)}, name, with_own)
    if callable(value) and not isinstance(value, type):
        return _call_words(value, name, with_own)
    return {name: _word(value)}


def _has_parts(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or callable(value)


def _call_words(value: Any, name: str, with_own: bool) -> dict[str, str]:
    """A function with its bound arguments, defaults, and the variables that it refers to."""
    if isinstance(value, functools.partial):
        words = in_words(value.func, name, with_own=with_own)
        bound = {**{str(i): item for i, item in enumerate(value.args)}, **value.keywords}
    elif inspect.ismethod(value):
        words = in_words(value.__func__, name, with_own=with_own)
        bound = {"self": value.__self__}
    elif inspect.isfunction(value):
        words = {name: _word(value)}
        if not str(value.__module__).startswith(f"{_PACKAGE}."):
            words[f"{name}.code"] = _code_word(value)
        closure = inspect.getclosurevars(value)
        signature = inspect.signature(value).parameters.values()
        bound = {p.name: p.default for p in signature if p.default is not p.empty}
        constants = {k: v for k, v in closure.globals.items() if _is_number(v)}
        bound |= {**closure.nonlocals, **constants}
    else:
        words = {name: _word(value)}
        bound = getattr(value, "__dict__", {})
    for key, item in bound.items():
        if item is not value and f".{key}." not in f"{name}.":  # it may refer to itself
            words |= in_words(item, f"{name}.{key}", with_own=with_own)
    return words


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | str | tuple | Tensor)


def _code_word(function: Callable[..., Any]) -> str:
    """Hash of a function's source, or of its constants without a source."""
    try:
        text = " ".join(inspect.getsource(function).split())
    except (OSError, TypeError):
        code = function.__code__
        text = repr([one for one in code.co_consts if isinstance(one, int | float | str)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _all_words(items: Mapping[str, Any], name: str, with_own: bool) -> dict[str, str]:
    words = {name: f"{len(items)} items"}
    for key, item in items.items():
        words |= in_words(item, f"{name}.{key}", with_own=with_own)
    return words


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, Tensor):
        if value.numel() <= 16:
            return f"[{', '.join(_word(float(number)) for number in value.flatten())}]"
        digest = hashlib.sha256(value.double().contiguous().numpy().tobytes()).hexdigest()
        return f"{tuple(value.shape)} {digest[:16]}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_word, value))}]"
    if callable(value):  # a partial or an instance has the name of its type
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    if (
        getattr(type(value), "__repr__", None) is object.__repr__
    ):  # the default repr holds the object's address
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return repr(value)


# ------------------------------------------------------------------ helpers of parts


def check_ahead(t: int, last: int) -> None:
    """Raise `MessageError` if a round is more than `MAX_AHEAD` after the last one.

    Args:
        t: The round of an order.
        last: The round of the order before, -1 for none.
    """
    if t > last + MAX_AHEAD:
        raise MessageError(
            f"Expected a round of at most {MAX_AHEAD:,} after the last one, {last}, got round {t}."
        )


def check_vector(values: Tensor, size: int, what: str, most: float = MAX_WEIGHT) -> None:
    """Raise `MessageError` unless a tensor is `size` float64 numbers of bounded size."""
    if values.shape != (size,) or values.dtype != torch.float64:
        raise MessageError(
            f"{what} has {size} float64 numbers, got {values.dtype} of shape {tuple(values.shape)}."
        )
    if not bool((values.abs() <= most).all()):  # false for NaN
        raise MessageError(f"{what} has a number that exceeds {most:g}, or is not finite.")


_CACHE: list[dict[Hashable, Any]] = [{}]  # its item is replaced, never changed: threads share it


def remembered(key: Hashable, make: Callable[[], T]) -> T:
    """A public value that is the same for all sites of a process, computed once."""
    cache = _CACHE[0]
    if key in cache:
        cached: T = cache[key]
        return cached
    value = make()
    _CACHE[0] = dict([*cache.items(), (key, value)][-_REMEMBERED:])
    return value
