r"""Terms of a federation, and its two parts: a search and an aggregation.

A protocol is a search times an aggregation:

    Search        what a site says (a message), and where it looks next
    Aggregation   who is asked for what, how messages become releases, what that costs

Both are frozen dataclasses of public settings. A setting that is a site's own business is declared
by ``metadata=OWN``: it does not travel and need not agree. A site derives its own `Terms` from its
own study. The hub sends a `Setup`: every public setting in words, the roster, the shared basis and
its promise. A site refuses words that differ from its own.

What a part remembers is a frozen dataclass that `wire.codec` can encode: of a search and of the
site's side of an aggregation their `memory_type`, of the hub's side its `state_type`.
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

MAX_WEIGHT = 1e6  # of a number in a message: larger ones are no functions of scaled outcomes
MAX_INITIAL = 10_000  # evaluations of a site before its own search begins
MAX_EVALUATIONS = 10**8
ROOM_BYTES = 4096  # of a message beside its numbers
MAX_AHEAD = 10_000  # rounds in a row that a site may miss
_DIGITS = 12  # of a number in words: other machines may compute other last digits
_REMEMBERED = 16
_PACKAGE = __name__.partition(".")[0]

T = TypeVar("T")


OWN = {"own": True}  # of a field that is a site's own business: `field(…, metadata=OWN)`


# ------------------------------------------------------------------ messages


@dataclass(frozen=True, eq=False)
class Setup:
    """The terms of a federation as they travel.

    Attributes:
        words: Every public setting in words, by its dotted name.
        agents: The roster.
        basis: The shared basis, as `FeatureMap.to_tensors` gives it; empty without one.
        promise: What the whole run reveals at most; None if it is not private.
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
        evaluate: Nothing, the points that a site begins with, or the next query.
        contribute: Whether a message is wanted.
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
    """Who takes part in a study that agents may join while it runs.

    Attributes:
        agents: In the order in which they joined.
        joined: The round of the first order of each; 0 of those that it began with.
        queried: How often each was asked to query.
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
        """Those with whom a study begins."""
        return cls((), (), ()).grown(agents, 0)

    def grown(self, agents: tuple[AgentId, ...], t: int) -> Roster:
        """With those who join in round `t`, after all others."""
        new = agents[len(self.agents) :]
        zeros = (0,) * len(new)
        return Roster(self.agents + new, self.joined + (t,) * len(new), self.queried + zeros)

    def after(self, orders: Mapping[AgentId, Order]) -> Roster:
        """After a round of these orders."""
        asked = {agent for agent, order in orders.items() if order.evaluate == "next"}
        counts = zip(self.agents, self.queried, strict=True)
        return replace(self, queried=tuple(n + (agent in asked) for agent, n in counts))

    def joining(self, t: int) -> tuple[AgentId, ...]:
        """Whose first order is that of round `t`."""
        return tuple(a for a, first in zip(self.agents, self.joined, strict=True) if first == t)

    def querying(self, terms: Terms) -> tuple[AgentId, ...]:
        """Who has queries left, of those who evaluate."""
        return tuple(
            agent
            for agent, count in zip(self.agents, self.queried, strict=True)
            if agent in terms.evaluating and count < terms.queries
        )


# ------------------------------------------------------------------ the parts


@dataclass(frozen=True, eq=False)
class Resources:
    """What one party has and no other party knows.

    Attributes:
        noise: Where its noise and secret coins come from.
        secrets: Where its keys and its sums without noise lie.
        ledger: What it has paid before, and its budget; None for an empty one without a budget.
        shared_ledger: A durable ledger that pays as well; at a site for a whole run in advance.
        payer: At a site, what it calls that payment: of this name there is one.
        cache: What was worked out in this process; losing it costs time only.
    """

    noise: NoiseSource = field(default_factory=OSNoise)
    secrets: Store = field(default_factory=MemoryStore)
    ledger: Ledger | None = None
    shared_ledger: SharedLedger | None = None
    payer: str = ""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class View:
    """What a site's search is given.

    Attributes:
        terms: The terms, with the hub's roster, basis and promise.
        name: The site.
        seed: The site's own seed.
        X: Own points in the unit cube, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`, larger is better.
        chosen: Points that are pending or already in this query, `k x d`.
        failed: Points whose evaluation failed, `m x d`.
        n: The number of the next evaluation, from 0: of those told, failed and pending.
        first: How many evaluations came before the search's own, e.g. an initial design.
        t: The round of the last order, -1 before the first.
        release: The newest release; None if there is none.
        memory: What the search remembers.
        candidates: The only points that can be evaluated and were not avoided, `K x d`, or None.
        began_with: How many observations the site had before its first request.
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

    @property
    def avoid(self) -> Tensor:
        """Points without a known outcome: those that failed, and those that were chosen."""
        return torch.cat([self.failed, self.chosen])

    @property
    def query(self) -> int:
        """The number of the next query, from 0."""
        return self.n // self.terms.q

    @property
    def slot(self) -> int:
        """The place of the next evaluation in its query, from 0."""
        return self.n % self.terms.q

    def stream(self, *path: int | str) -> Generator:
        """The site's random numbers for a purpose, e.g. ``("point", view.query, view.slot)``."""
        return generator(self.seed, *path)

    def dealt(self, count: int, candidates: Tensor | None = None) -> Tensor:
        """The first `count` points of this site's share of one sequence, the default first.

        Args:
            count: How many.
            candidates: The only points that can be evaluated, `K x d`.
        """
        agents = self.terms.agents
        return first_points(
            self.terms.space,
            agents.index(self.name),
            len(agents),
            count,
            default=None if self.began_with else self.terms.default,
            candidates=candidates,
        )


@dataclass(frozen=True)
class Search:
    """What a site says and where it looks: a pure function of a `View`.

    A subclass has `point`, and if sites are to say something `size` and `message`. Random numbers
    come from `View.stream`, addressed by what they are for, so that a crash changes nothing.
    """

    memory_type: ClassVar[type | None] = None
    needs_outcome: ClassVar[bool] = False  # a message is about the evaluation just made, alone
    has_basis: ClassVar[bool] = True
    snaps: ClassVar[bool] = True  # the agent moves its points to those that can be evaluated
    begins_anyway: ClassVar[bool] = False  # first points are made whatever the site has observed

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless the search goes with the terms."""

    def point(self, view: View) -> Tensor:
        """The next point, `1 x d`; one of `view.candidates` if there are any."""
        raise NotImplementedError

    def first(self, view: View, count: int) -> Tensor:
        """The `count` points that a site begins with, if an order asks for them together."""
        return view.dealt(view.n + count, view.candidates)[view.n :]

    def size(self, terms: Terms) -> int:
        """How many numbers a message has; 0 for a search that says nothing."""
        return 0

    def norm(self, terms: Terms) -> float | None:
        """The Euclidean norm that a message is to be clipped to; None if none is known."""
        return None

    def message(self, view: View) -> Tensor | None:
        """What the site says, `size` numbers; None for nothing."""
        return None

    def check(self, terms: Terms, message: Tensor) -> None:
        """Raise `MessageError` unless a message has the right shape and finite, bounded numbers."""
        check_vector(message, self.size(terms), "A message")

    @property
    def least(self) -> int | None:
        """How many observations a first message needs; None of a search without messages."""
        return None if type(self).message is Search.message else 1

    @property
    def alone(self) -> bool:
        """Whether sites search without messages on purpose."""
        return self.least is None

    def content(self, terms: Terms) -> str:
        """What a message holds: a noun phrase."""
        return f"{self.size(terms)} numbers" if self.least else "nothing"

    def limits(self, terms: Terms) -> tuple[str, ...]:
        """What a message does not hide: sentences."""
        return ("A message is a function of the agent's data.",) if self.least else ()

    def listens(self, view: View) -> bool:
        """Whether the site wants a release for its next query."""
        return True

    def heard(self, view: View) -> bool:
        """Whether others have said something: a site without data then looks where they point."""
        return view.release is not None

    def start(self, view: View) -> Any:
        """The memory before the first request."""
        return None

    def received(self, view: View) -> Any:
        """The memory after a request: `view.release` may be new."""
        return view.memory

    def answered(self, view: View) -> Any:
        """The memory after a query was answered, has failed or is answered later."""
        return view.memory

    def told(self, view: View) -> Any:
        """The memory after the site's data have grown; there is no release in the view."""
        return view.memory


@dataclass(frozen=True)
class Limits:
    """What a hub may ask of one site in a whole run; a site counts it in its log.

    Attributes:
        rounds: The last round.
        first: How often points that a site begins with are asked for.
        queries: How many queries.
        contributions: How many messages.
    """

    rounds: int
    first: int
    queries: int
    contributions: int


@dataclass(frozen=True, eq=False)
class Party:
    """What an aggregation is given beside messages.

    Attributes:
        terms: The terms; at a site with the hub's roster, basis and promise.
        name: The site, or None at the hub.
        resources: The party's own.
        memory: At a site, what its side of the aggregation remembers.
        listens: At a site, whether its search wants a release.
        last: At a site that has a new order, the one before; None before the first.
        published: At a site that replies, the broadcasts of its last request beside the setup.
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
    """Who is asked for what, how messages become releases, and what that costs.

    A subclass has the hub's four functions: `start`, `orders`, `broadcasts` and `combine`. The
    hub's state is of `state_type` and has the round `t`; where agents may join while the study
    runs (`opens`), also the `roster`, a `Roster`, and the hub's terms have the agents of it.
    """

    state_type: ClassVar[type]
    memory_type: ClassVar[type | None] = None
    order_types: ClassVar[tuple[type, ...]] = (Order,)
    reply_types: ClassVar[tuple[type, ...]] = (Contribution,)
    broadcast_types: ClassVar[tuple[type, ...]] = ()  # beside the setup
    opens: ClassVar[bool] = False
    keeps_secrets: ClassVar[bool] = False  # whether parties have keys that a crash must not lose
    why_closed: ClassVar[str] = "its promise and its keys are for the agents that it began with"

    def check_terms(self, terms: Terms) -> None:
        """Raise `InputDataError` unless the aggregation goes with the terms."""

    # -------------------------------------------------------------- the hub

    def start(self, hub: Party) -> Any:
        """The state before the first round."""
        raise NotImplementedError

    def orders(self, hub: Party, state: Any) -> Mapping[AgentId, Any] | None:
        """Who is asked for what now, a function of the state; None at the end."""
        raise NotImplementedError

    def broadcasts(self, hub: Party, state: Any) -> tuple[Any, ...]:
        """What all agents are told beside the setup."""
        raise NotImplementedError

    def resumed(self, hub: Party, state: Any) -> Any:
        """The state with which a run goes on that was stopped in this one.

        The budget may have grown. Where what is asked depends on it beside who is asked, the state
        says with which budget its round was asked, and only one whose rounds are over takes over
        the new one.
        """
        return state

    def check(self, hub: Party, state: Any, sender: AgentId, reply: Any, order: Any) -> None:
        """Raise `MessageError` unless a reply to an order can be combined."""
        if reply.values is None:
            return
        if not order.contribute:
            raise MessageError("A message that nobody asked for.")
        hub.terms.search.check(hub.terms, reply.values)

    def reply_bytes(self, hub: Party) -> int:
        """The bytes of the longest reply that a site may send, without its frame."""
        if self.reply_types != (Contribution,):
            return MAX_BYTES  # of messages of one's own
        return 8 * hub.terms.search.size(hub.terms) + ROOM_BYTES

    def combine(self, hub: Party, state: Any, inbox: Mapping[AgentId, Any]) -> Any:
        """The state after a round."""
        raise NotImplementedError

    def promise(self, hub: Party) -> Guarantee | None:
        """What the whole run reveals at most; None without noise."""
        return None

    def signal_words(self, hub: Party) -> str:
        """What a plan says of signal and noise; empty if there is nothing to say."""
        return ""

    def account(self, hub: Party, state: Any) -> dict[str, Any] | None:
        """What was promised and paid, for a report; None where nothing is promised."""
        price = self.price(hub.terms)
        return None if price is None else price.account(self.paid(hub, state))

    def paid(self, hub: Party, state: Any) -> tuple[Entry, ...]:
        """All payments so far of the unit that has paid most."""
        return ()

    @property
    def fixed_data(self) -> str:
        """Why a site may not attach results during a run; empty where it may."""
        return ""

    def price(self, terms: Terms) -> Price | None:
        """What a run costs in privacy; None without noise."""
        return None

    def guaranteed(self, terms: Terms) -> Guarantee | None:
        """What the terms of a site promise by themselves: a hub that says another is refused.

        Default the guarantee of `price`; of an aggregation with a `promise` and no `price` whatever
        the hub says.
        """
        if type(self).price is Aggregation.price:
            return None if type(self).promise is Aggregation.promise else terms.promise
        price = self.price(replace(terms, promise=None))
        return None if price is None else price.guarantee

    def limits(self, terms: Terms) -> Limits:
        """What a hub may ask of one site; default a message in every query and one before."""
        return Limits(MAX_EVALUATIONS, 1, terms.queries, terms.queries + 1)

    def sees(self, terms: Terms) -> Sees:
        """Who sees what; derived from the types of messages, as if nothing were hidden."""
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
        """Why no message would ever be sent, and what to write; empty if one would be.

        Args:
            queries: How many queries each site makes.
            begun: Whether a site has the data for a message before its first query.
        """
        return ""

    # -------------------------------------------------------------- a site

    def begin(self, site: Party) -> Any:
        """The site's memory before the first request."""
        return None

    def check_published(self, terms: Terms, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless broadcasts are acceptable: the same for all sites."""

    def check_order(self, site: Party, order: Any, published: tuple[Any, ...]) -> None:
        """Raise `MessageError` unless an order fits, `BudgetExceeded` if it cannot be paid."""

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
            order: The last one.
            message: Works out what the search says; None if the site has no data, or nothing to
                say.
        """
        return site.memory, Contribution(message() if order.contribute else None)


# ------------------------------------------------------------------ the terms


@dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    """What all parties of a federation agree upon, in public.

    Attributes:
        space: The map of inputs and outcomes.
        budget: How many evaluations each site makes, its first ones included; each site's own
            business, and no word of the terms, so that a run can be resumed with more.
        search: What sites say, and where they look.
        aggregation: Who is asked for what, and how messages become releases.
        basis: The shared basis; None for a search without one. It travels as tensors: the last
            bits of a basis may differ between machines.
        agents: The roster; empty at a site that takes it from the hub.
        q: Evaluations per query.
        num_initial: How many points a site without data is dealt, where nobody has said anything.
        default: The first of them, `1 x d`, the same for all; None for no such point.
        active: Who evaluates; None for all.
        promise: What the whole run reveals at most: the hub's.
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
    active: tuple[AgentId, ...] | None = None
    promise: Guarantee | None = None

    def __post_init__(self) -> None:
        check_default(self.default, self.space.dim, self.num_initial)
        for name, least, most in (
            ("budget", 0, MAX_EVALUATIONS),
            ("q", 1, MAX_INITIAL),
            ("num_initial", 0, MAX_INITIAL),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InputDataError(f"Expected {least} <= {name} <= {most:,}, got {value}.")
        if len(set(self.agents)) < len(self.agents) or max(map(len, self.agents), default=0) > (
            MAX_NAME
        ):
            raise InputDataError(
                f"Names of agents must differ and have at most {MAX_NAME} characters, got "
                f"{list(self.agents)[:8]}."
            )
        for name in self.agents:
            if not name.isprintable() or not name:
                raise InputDataError(
                    f"Names of agents are printable and not empty, got {name!a}: name it otherwise."
                )
        if self.agents:
            check_active(self.active, self.agents)
        if self.basis is not None and self.basis.input_dim != self.space.dim:
            raise InputDataError(
                f"The feature map has {self.basis.input_dim} inputs, the search space "
                f"{self.space.dim} columns."
            )
        if self.basis is None and self.search.has_basis:
            raise InputDataError(
                f"{type(self.search).__name__} needs a shared basis: give a feature_map."
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
        """How many queries the budget is good for; the last one may have fewer points."""
        return math.ceil(self.budget / self.q)

    @property
    def evaluating(self) -> tuple[AgentId, ...]:
        """Who evaluates."""
        return self.agents if self.active is None else self.active

    @cached_property
    def words(self) -> dict[str, str]:
        """Every public setting in words, but those that the hub decides and the budget."""
        names = ("space", "search", "aggregation", "q", "num_initial", "default", "active")
        said: dict[str, str] = {}
        for name in names:
            said |= in_words(getattr(self, name), name)
        return said

    @cached_property
    def setup(self) -> Setup:
        """The terms as they travel."""
        basis = {} if self.basis is None else self.basis.to_tensors()
        return Setup(self.words, self.agents, basis, self.promise)

    def agreed(self, setup: Setup, basis: FeatureMap | None) -> Terms:
        """A site's terms with the hub's roster, basis and promise.

        Raises:
            MessageError: The hub's words differ, or its roster or basis do not fit.
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
                f"The terms differ in {name}: this site has {here[:80]}, the hub says "
                f"{there[:80]}. {fix}"
            )


def in_words(value: Any, name: str, *, with_own: bool = False) -> dict[str, str]:
    """A setting as text, and what it consists of by dotted names.

    Args:
        value: The setting: a number, a text, a tensor, a function, a dataclass of such, or a tuple
            or mapping of such.
        name: Its name.
        with_own: Whether fields that are a site's own business are said too.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        said = {name: type(value).__name__}
        for item in fields(value):
            if with_own or not item.metadata.get("own"):
                said |= in_words(
                    getattr(value, item.name), f"{name}.{item.name}", with_own=with_own
                )
        return said
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
    """A function with all that is bound to it: arguments, defaults, and what it refers to."""
    if isinstance(value, functools.partial):
        said = in_words(value.func, name, with_own=with_own)
        bound = {**{str(i): item for i, item in enumerate(value.args)}, **value.keywords}
    elif inspect.ismethod(value):
        said = in_words(value.__func__, name, with_own=with_own)
        bound = {"self": value.__self__}
    elif inspect.isfunction(value):
        said = {name: _word(value)}
        if not str(value.__module__).startswith(f"{_PACKAGE}."):
            said[f"{name}.code"] = _code_word(value)
        seen = inspect.getclosurevars(value)
        signature = inspect.signature(value).parameters.values()
        bound = {p.name: p.default for p in signature if p.default is not p.empty}
        bound |= {**seen.nonlocals, **{k: v for k, v in seen.globals.items() if _is_number(v)}}
    else:
        said = {name: _word(value)}
        bound = getattr(value, "__dict__", {})
    for key, item in bound.items():
        if item is not value and f".{key}." not in f"{name}.":  # it may refer to itself
            said |= in_words(item, f"{name}.{key}", with_own=with_own)
    return said


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | str | tuple | Tensor)


def _code_word(function: Callable[..., Any]) -> str:
    """Hash of a function's text, or of its constants where there is no text."""
    try:
        text = " ".join(inspect.getsource(function).split())
    except (OSError, TypeError):
        code = function.__code__
        text = repr([one for one in code.co_consts if isinstance(one, int | float | str)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _all_words(items: Mapping[str, Any], name: str, with_own: bool) -> dict[str, str]:
    said = {name: f"{len(items)} items"}
    for key, item in items.items():
        said |= in_words(item, f"{name}.{key}", with_own=with_own)
    return said


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
    if callable(value):  # a partial or an instance has no name of its own
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    if (
        getattr(type(value), "__repr__", None) is object.__repr__
    ):  # it would say where the object lies
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return repr(value)


# ------------------------------------------------------------------ helpers of parts


def check_ahead(t: int, last: int) -> None:
    """Raise `MessageError` if a round is so late that no site can have missed all before.

    Args:
        t: The round of an order.
        last: The round of the one before, -1 for none.
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


_MADE: list[dict[Hashable, Any]] = [{}]  # replaced, never changed: threads share it


def remembered(key: Hashable, make: Callable[[], T]) -> T:
    """What is public and the same for all sites of a process, worked out once."""
    known = _MADE[0]
    if key in known:
        found: T = known[key]
        return found
    made = make()
    _MADE[0] = dict([*known.items(), (key, made)][-_REMEMBERED:])
    return made
