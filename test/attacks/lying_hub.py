"""A hub that lies: every field of every message of an honest run, and whole runs that go too far.

An honest run of a federation is recorded together with what each site knew before each request.
`field_lies` changes one field of a request, of its order or of a broadcast; `campaigns` are
sequences of requests, each well-formed. A lie is refused, or it is accepted and `judge` says by
what was agreed alone (it asks none of the package's checks) whether it is harmless, and why.
"""

from __future__ import annotations

import logging
import math
import resource
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

from torch import Tensor

from botorch_fed.aggregation.noisy import NoisySum
from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.aggregation.stream import NoisyStream, Play, Stream
from botorch_fed.aggregation.sum_messages import Keys, Opened, Sealed, SumOrder, SumSetup
from botorch_fed.errors import MessageError
from botorch_fed.federation.base import Exchanged, Outgoing, Pending, Refusal, Reply, Request
from botorch_fed.federation.drive import drive
from botorch_fed.federation.terms import Order, Setup
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.privacy import Guarantee
from botorch_fed.search.releases import Noisy, Parameters, Rows
from botorch_fed.storage.log import Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.wire.codec import content_hash, decode
from test.faults.cases import NAMES, SQUARE, Case, hill
from test.faults.fuzz import MAX_BYTES, REQUEST_BODY, Busy, read, written

VICTIM = "bob"
MEMBERS: dict[str, tuple[str, ...]] = {
    kind.__name__: tuple(item.name for item in fields_of(kind))
    for kind in (
        Request,
        Setup,
        Order,
        Play,
        SumOrder,
        Rows,
        Noisy,
        Parameters,
        SumSetup,
        Keys,
        Sealed,
        Opened,
        Guarantee,
    )
}
RELEASES = ("Rows", "Noisy", "Parameters", "Sealed", "Opened", "Keys")
FRESH = "0" * 64  # a seal that a hub can make up


# ------------------------------------------------------------------ an honest run


@dataclass
class Honest:
    """A request to the victim, and the victim as it was.

    Attributes:
        name: The federation.
        site: The victim.
        known: Its memory, and what its stores held.
        frame: The request, as a tree.
        blobs: Its broadcasts by hash, as trees.
        reply: The bytes that answered it.
        facts: What was agreed, as the site has it.
    """

    name: str
    case: Case
    site: Busy
    known: Any
    stores: tuple[tuple[dict[Any, Any], dict[Any, Any]], ...]
    frame: Any
    blobs: Mapping[str, Any]
    reply: bytes = b""
    facts: Mapping[str, Any] = field(default_factory=dict)
    last: Any = None  # the order before

    @property
    def order(self) -> Any:
        """The order, as a tree."""
        return read(self.frame[2][REQUEST_BODY])

    def restore(self) -> None:
        """The victim as it was."""
        self.site.remember(self.known)
        for store, held in self.stores:
            store.clear()
            store.update(held)
        self.site.agent.resources.cache.clear()


def contracted(agent: Any) -> Any:
    """The agent as a site makes it that has the study file."""
    from botorch_fed.federation import agent as module

    bound = getattr(module, "bound_to", None)  # not in releases before contracts
    return agent if bound is None else bound(agent, NAMES)


def recorded(name: str, case: Case) -> list[Honest]:
    """The requests to the victim in an honest run."""
    server = case.study.server(SQUARE, NAMES)
    sites: dict[str, Busy] = {}
    stores: list[dict[Any, Any]] = []
    for index, who in enumerate(NAMES):
        made = case.study.agent(who, SQUARE, index, MemoryBlobs(max_bytes=MAX_BYTES))
        agent, log = contracted(made), Log(SITE_EVENTS)
        if who == VICTIM:
            held = log._snapshots.store, agent.blobs._store, agent.resources.secrets
            stores = [store._data for store in held]  # type: ignore[attr-defined]
        sites[who] = Busy(who, agent, hill, log=log, max_bytes=MAX_BYTES)
    found: list[Honest] = []

    def exchange(outgoing: Outgoing) -> Exchanged:
        replies = {}
        for who, request in outgoing.requests.items():
            site = sites[who]
            for data in outgoing.blobs.values():
                site.agent.blobs.put(data)
            if who == VICTIM:
                kept = tuple((store, dict(store)) for store in stores)
                blobs = {digest: read(data) for digest, data in outgoing.blobs.items()}
                last = None if not found else found[-1].order
                found.append(
                    Honest(
                        name,
                        case,
                        site,
                        site.memory(),
                        kept,
                        read(request),
                        blobs,
                        last=last,
                    )
                )
            replies[who] = site.respond(request)
            if who == VICTIM:
                found[-1].reply, found[-1].facts = replies[who], facts(site)
        return Exchanged(replies)

    drive(server, exchange, max_bytes=MAX_BYTES)
    return found


def facts(site: Busy) -> dict[str, Any]:
    """What a site has agreed to, and what leaves it by that."""
    agent = site.agent
    terms = agent._terms(site.state.broadcasts)
    aggregation, promise = terms.aggregation, terms.promise
    said: dict[str, Any] = {"roster": terms.agents, "words": tuple(sorted(terms.words.items()))}
    said["features"] = 0 if terms.basis is None else terms.basis.num_features
    if promise is not None:
        said["promise"] = tuple(
            round(value, 9) if isinstance(value, float) else value
            for value in (promise.epsilon, promise.delta, promise.unit, promise.adjacency)
        )
        said["releases"], said["private"] = promise.releases, promise.private
    if isinstance(aggregation, NoisyStream):
        mechanism = aggregation.mechanism(terms)
        said["mechanism"], said["payments"] = repr(mechanism), aggregation.payments(terms)
    elif isinstance(aggregation, SecureSum):
        said["mechanism"] = repr(aggregation.mechanism_for(terms))
    elif isinstance(aggregation, NoisySum):
        said["mechanism"] = aggregation.num_agents(terms), aggregation.plan(terms).delta
    if terms.basis is not None:
        probes = SQUARE.bounds
        said["basis"] = tuple(round(x, 6) for x in terms.basis(probes).flatten().tolist())
    return said


# ------------------------------------------------------------------ lies


@dataclass(frozen=True)
class Lie:
    """One field of one message.

    Attributes:
        where: Message and field.
        said: What the hub says instead.
        data: The request.
        blobs: Its broadcasts.
    """

    where: str
    said: str
    data: bytes
    blobs: tuple[bytes, ...]


def _tensors(value: Any) -> Iterator[tuple[str, Any]]:
    code, shape, data = value
    count = math.prod(shape)
    if code == "f8" and not count:
        yield "numbers in an empty one", [code, [4], struct.pack("<4d", 1.0, -1.0, 1e7, 1.0)]
        yield "a shape of 2^40", [code, [2**40, *shape[1:]], data]
        return
    if code == "f8":
        numbers = list(struct.unpack(f"<{count}d", data))
        for what, changed in (
            ("NaN", [math.nan, *numbers[1:]]),
            ("inf", [math.inf, *numbers[1:]]),
            ("1e300", [1e300, *numbers[1:]]),
            ("1e7", [1e7, *numbers[1:]]),
            ("times 1000", [1000 * x for x in numbers]),
            ("zeros", [0.0] * count),
            ("one number by 0.01", [*numbers[:-1], numbers[-1] + 0.01]),
            ("negated", [-x for x in numbers]),
            ("reversed", numbers[::-1]),
        ):
            if changed != numbers:
                yield what, [code, shape, struct.pack(f"<{count}d", *changed)]
    yield "a shape of 2^40", [code, [2**40, *shape[1:]], data]
    yield "no rows", [code, [0, *shape[1:]], b""]
    yield "5000 rows", [code, [5000, *shape[1:]], data[: len(data) // max(shape[:1] or [1])] * 5000]


def _others(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Other values of a field."""
    if isinstance(value, bool):
        yield str(not value), not value
        yield "1", 1
    elif isinstance(value, int):
        for other in (value + 1, value - 1, 0, 1, -1, 60, 10**6, 10**9, 2**62, 2**63 - 1):
            if other != value:
                yield str(other), other
        yield "a text", str(value)
    elif isinstance(value, float):
        for other in (0.0, -value, value * 1e-6, value / 100, value * 100, 0.9, 1e300, math.inf):
            if other != value:
                yield f"{other:g}", other
        yield "NaN", math.nan
    elif isinstance(value, str):
        choices = {
            "evaluate": ("nothing", "first", "next"),
            "step": ("key", "sum", "share"),
            "unit": ("agent", "record"),
            "adjacency": ("zero-out", "replace-one"),
        }.get(name, ("", "x" * 101, value + " ", "[/b]", "\x1b[2J"))
        for text in (*choices, "other"):
            if text != value:
                yield repr(text), text
    elif isinstance(value, bytes):
        yield "cut", value[:-1]
        yield "flipped", bytes([value[0] ^ 1]) + value[1:] if value else b"\1"
        yield "empty", b""
        yield "twice", value + value
        yield "None", None
    elif value is None:
        yield "0", 0
        yield "a text", ""
    elif isinstance(value, list) and len(value) == 3 and value[0] in ("f8", "i8"):
        yield from _tensors(value)
    elif isinstance(value, list) and (
        name in ("agents", "roster", "members") or (value and isinstance(value[0], str))
    ):
        yield "nobody", []
        yield "the victim alone", [VICTIM]
        yield "without the victim", [who for who in value if who != VICTIM]
        yield "another order", value[::-1]
        yield "the victim twice", [*value, VICTIM]
        yield "one more", [*value, "dee"]
        yield "1,000 more", [*value, *(f"made-up-{i}" for i in range(1000))]
        yield "two", value[:2]
        yield "other names", ["x" * 101, *value[1:]]
        yield "markup", ["[/b]", *value[1:]]
    elif isinstance(value, list):
        yield "empty", []
        yield "twice", value + value
        yield "reversed", value[::-1]
        for index, item in enumerate(value[:3]):
            for said, other in _others(name, item):
                yield f"[{index}] {said}", [*value[:index], other, *value[index + 1 :]]
    elif isinstance(value, dict):
        yield "empty", {}
        yield "one more", {**value, "more": next(iter(value.values()), "")}
        for key in list(value)[:4]:
            yield f"without {key}", {k: v for k, v in value.items() if k != key}
            for said, other in _others(key, value[key]):
                yield f"{key} {said}", {**value, key: other}


def _words(words: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Every word, made smaller, larger and something else."""
    yield "empty", {}
    yield "one more", {**words, "aggregation.extra": "1"}
    for key, text in words.items():
        others = ["other", ""]
        try:
            number = float(text)
        except ValueError:
            pass
        else:
            others = [f"{number * 1e-6:.12g}", f"{number * 2 + 1:.12g}", "nan", "-1", "1000000"]
        for other in others:
            if other != text:
                yield f"{key} = {other}", {**words, key: other}
        yield f"without {key}", {k: v for k, v in words.items() if k != key}


def field_lies(honest: Honest) -> Iterator[Lie]:
    """Every field of the frame, of the order, and of every broadcast."""
    frame = honest.frame
    for index, name in enumerate(MEMBERS["Request"]):
        if name in ("body", "broadcasts"):
            continue
        for said, value in _others(name, frame[2][index]):
            changed = deepcopy(frame)
            changed[2][index] = value
            yield from _framed(honest, f"Request.{name}", said, changed, {})
    for said, hashes in (
        ("none", []),
        ("twice", frame[2][6] * 2),
        ("an unknown one", [*frame[2][6], "a" * 64]),
        ("no hashes", ["x"]),
        ("the setup last", frame[2][6][::-1]),
        ("the setup twice", [*frame[2][6], *frame[2][6][:1]]),
        ("65 of them", [f"{i:064x}" for i in range(65)]),
    ):
        if hashes != frame[2][6]:
            changed = deepcopy(frame)
            changed[2][6] = hashes
            yield from _framed(honest, "Request.broadcasts", said, changed, {})
    order = honest.order
    for index, name in enumerate(MEMBERS[order[1]]):
        for said, value in _others(name, order[2][index]):
            body = deepcopy(order)
            body[2][index] = value
            yield from _with_body(honest, f"{order[1]}.{name}", said, body)
    for said, body in (
        ("another class", [order[0], "Contribution", [None]]),
        ("another version", [2, *order[1:]]),
        ("a field less", [order[0], order[1], order[2][:-1]]),
        ("a field more", [order[0], order[1], [*order[2], 0]]),
        ("8 MB", [order[0], order[1], [b"\0" * 2**23]]),
    ):
        yield from _with_body(honest, order[1], said, body)
    for digest in frame[2][6]:
        if digest in honest.blobs:
            yield from _of_broadcast(honest, digest, honest.blobs[digest])


def _of_broadcast(honest: Honest, digest: str, blob: Any) -> Iterator[Lie]:
    kind = blob[1]
    for index, name in enumerate(MEMBERS[kind]):
        value = blob[2][index]
        if name == "words":
            changes = _words(value)
        elif name == "promise" and value is not None:
            changes = _promises(value)
        elif name == "promise":
            changes = iter([("made up", _promise(0.01, 1e-9))])
        else:
            changes = _others(name, value)
        for said, other in changes:
            changed = deepcopy(blob)
            changed[2][index] = other
            yield from _with_blob(honest, f"{kind}.{name}", said, digest, changed)
    yield from _with_blob(honest, kind, "another class", digest, [blob[0], "Order", [0, "x", True]])


def _promise(epsilon: float, delta: float) -> list[Any]:
    return [epsilon, delta, "agent", "zero-out", 1, "pld", True]


def _promises(promise: list[Any]) -> Iterator[tuple[str, Any]]:
    yield "None", None
    for index, name in enumerate(MEMBERS["Guarantee"]):
        for said, other in _others(name, promise[index]):
            yield f"{name} {said}", [*promise[:index], other, *promise[index + 1 :]]


def _with_body(honest: Honest, where: str, said: str, body: Any) -> Iterator[Lie]:
    changed = deepcopy(honest.frame)
    try:
        changed[2][REQUEST_BODY] = written(body)
    except (OverflowError, ValueError, TypeError):
        return
    yield from _framed(honest, where, said, changed, {})


def _with_blob(honest: Honest, where: str, said: str, digest: str, blob: Any) -> Iterator[Lie]:
    try:
        data = written(blob)
    except (OverflowError, ValueError, TypeError):
        return
    changed, new = deepcopy(honest.frame), content_hash(data)
    changed[2][6] = [new if known == digest else known for known in changed[2][6]]
    yield from _framed(honest, where, said, changed, {new: data})


def _framed(
    honest: Honest, where: str, said: str, frame: Any, blobs: Mapping[str, bytes]
) -> Iterator[Lie]:
    try:
        data = written(frame)
    except (OverflowError, ValueError, TypeError):
        return
    if data != written(honest.frame):
        yield Lie(where, said, data, tuple(blobs.values()))


# ------------------------------------------------------------------ what came of one


@dataclass(frozen=True)
class Outcome:
    """What came of a lie.

    Attributes:
        verdict: ``"refused"``, ``"harmless"`` or ``"BAD"``.
        why: The words of the refusal, or why it is harmless, or what is bad.
    """

    verdict: str
    why: str


class Gathered(logging.Handler):
    """What a site writes into its operator's log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.words: list[str] = []
        self.errors = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())
        self.errors += record.levelno >= logging.ERROR


class listening:  # noqa: N801 - a context
    """The site's log while the body runs."""

    def __enter__(self) -> Gathered:
        self.heard, self.logger = Gathered(), logging.getLogger("botorch_fed")
        self.before = self.logger.level, self.logger.propagate
        self.logger.addHandler(self.heard)
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        return self.heard

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.heard)
        self.logger.setLevel(self.before[0])
        self.logger.propagate = self.before[1]


def tell(honest: Honest, lie: Lie) -> Outcome:
    """Tell the victim a lie in the place of the honest request."""
    honest.restore()
    site = honest.site
    before = site._request
    with listening() as heard:
        try:
            for data in lie.blobs:
                site.agent.blobs.put(data)
            answer = site.respond(lie.data)
        except MessageError as error:  # of a broadcast that is no message
            return Outcome("refused", str(error))
        except Exception as error:
            return Outcome("BAD", f"crash: {type(error).__name__}: {error}"[:200])
    if read(answer)[1] == "Refusal":
        code = decode(answer, Refusal).code
        if heard.errors:
            return Outcome("BAD", f"an error that nobody foresaw: {heard.words[-1]}"[:200])
        if site._request is not before:
            return _late(honest, lie, code)
        return Outcome("refused", heard.words[-1] if heard.words else code)
    if answer == honest.reply:
        return Outcome("harmless", "the reply is the one without the lie, byte for byte")
    return judge(honest, lie, answer)


def _late(honest: Honest, lie: Lie, code: str) -> Outcome:
    if code == "busy":
        return Outcome("harmless", "nothing leaves the site")
    return Outcome("refused", code)


# ------------------------------------------------------------------ what is harmless


def _asked(frame: Any) -> list[Any]:
    fields: list[Any] = read(frame[2][REQUEST_BODY])[2]
    return fields


def most_rounds(case: Case) -> int:
    """The last round that the terms have; a hub counts on where agents may join."""
    return 10**8 if case.study.opens else int(case.study.budget)  # type: ignore[attr-defined]


def judge(honest: Honest, lie: Lie, answer: bytes) -> Outcome:
    """Why an accepted lie is harmless, or what is bad about it."""
    site, name = honest.site, honest.name
    now = facts(site)
    if now != honest.facts:
        changed = sorted(
            key for key in {*now, *honest.facts} if now.get(key) != honest.facts.get(key)
        )
        if (
            changed == ["roster"]
            and name.startswith("fts")
            and _begins(now["roster"], honest.facts["roster"])
        ):
            return Outcome("harmless", "agents may join this study")
        return Outcome("BAD", f"{lie.where} {lie.said}: agreed to other {', '.join(changed)}")
    if site.state.used > site.agent.terms.budget:
        return Outcome("BAD", f"{lie.where} {lie.said}: {site.state.used} evaluations")
    kind, _, field_name = lie.where.partition(".")
    if kind == "Request":
        if field_name in ("run", "agent"):
            return Outcome("BAD", f"{lie.where} {lie.said}: a request for somebody else")
        return Outcome("harmless", "the hub's own count of its exchanges")
    if kind == "Setup":
        return Outcome("harmless", "what was agreed is what the site's own study says")
    order = _asked(read(lie.data))
    blobs = [read(data) for data in lie.blobs]
    return _judged_order(honest, lie, order, blobs)


def _begins(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether one roster goes on where the other one ends."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _judged_order(honest: Honest, lie: Lie, order: list[Any], blobs: list[Any]) -> Outcome:
    name = honest.name
    t, evaluate, contribute = order[:3]
    bad = f"{lie.where} {lie.said}: "
    if not 0 <= t <= most_rounds(honest.case):
        return Outcome("BAD", bad + f"round {t} of {most_rounds(honest.case)}")
    last = -1 if honest.last is None else honest.last[2][0]
    sums = honest.order[1] == "SumOrder"  # a round of sums has several steps
    if t < last or (t == last and not sums):
        return Outcome("BAD", bad + f"round {t} after round {last}")
    if evaluate == "first" and (t or name.startswith(("fts", "ucb"))):
        return Outcome("BAD", bad + "first points that were not agreed")
    if name.startswith("ucb") and (evaluate, contribute) != ("next", True):
        return Outcome("BAD", bad + "no order of this protocol")
    if sums and kind_of(lie) == "SumOrder":
        epoch, roster = order[4:6]
        works = contribute or order[3] != "sum"
        if epoch > 3 * len(NAMES) + (not works):  # the last one has neither keys nor sums
            return Outcome("BAD", bad + f"epoch {epoch}, more than agents can be lost and be back")
        if contribute and len(roster) < 2 and VICTIM in roster:
            return Outcome("BAD", bad + "a sum of one agent")
    for blob in blobs:
        kind, content = blob[1], blob[2]
        if kind in ("Noisy", "Parameters", "Opened") and content[0] >= max(t, 1):
            return Outcome("BAD", bad + f"a release of round {content[0]} in round {t}")
        if kind == "Rows":
            if not set(content[0]) <= set(NAMES):
                return Outcome("BAD", bad + "messages of agents that are none")
            if any(made >= max(t, 1) for made in content[1]):
                return Outcome("BAD", bad + "messages of rounds to come")
    if blobs:
        return Outcome("harmless", "a release that the hub makes up moves points, not what is paid")
    return Outcome("harmless", "a round, or a part of one, that the terms have")


def kind_of(lie: Lie) -> str:
    """The message that a lie is in."""
    return lie.where.partition(".")[0]


# ------------------------------------------------------------------ whole runs that go too far


@dataclass
class Campaign:
    """Many requests in a row.

    Attributes:
        name: The federation.
        what: What the hub tries.
        told: How many requests it sent.
        accepted: How many were taken.
        evaluations: How many points the site was made to choose.
        contributions: How many messages with data have left it.
        bad: What went too far; empty for nothing.
    """

    name: str
    what: str
    told: int = 0
    accepted: int = 0
    evaluations: int = 0
    contributions: int = 0
    bad: str = ""
    words: list[str] = field(default_factory=list)


def never(X: Tensor) -> Pending:
    """An objective that has not finished."""
    return Pending()


def most_contributions(case: Case) -> int:
    """How many messages the terms have: one in every round, and in the first."""
    sums = getattr(case.study, "sums", None)
    if sums is not None:
        return int(sums)
    aggregation = case.study.make_aggregation()  # type: ignore[attr-defined]
    if isinstance(aggregation, Stream):
        return aggregation.horizon
    again = 3 * len(NAMES) if isinstance(aggregation, SecureSum) else 0  # after losses
    return int(case.study.budget) + 1 + again


def campaigns(runs: list[Honest]) -> Iterator[Campaign]:
    """Sequences from the beginning, and from the end of an honest run."""
    first, last = runs[0], runs[-1]
    kind = first.order[1]
    rounds = range(1, 61)
    begin = _asked(first.frame)[0]

    def orders(make: Callable[[int, list[Any]], list[Any]]) -> Callable[[int], Any]:
        base = next((one for one in runs if _asked(one.frame)[2]), first).order

        def made(i: int) -> Any:
            body = deepcopy(base)
            body[2] = make(i, body[2])
            return body

        return made

    def changed(t: int, evaluate: str, contribute: bool) -> Callable[[list[Any]], list[Any]]:
        def apply(fields: list[Any]) -> list[Any]:
            new = [t, evaluate, contribute, *fields[3:]]
            if kind == "SumOrder":
                new[3] = "sum"
            return new

        return apply

    plans: dict[str, Callable[[int, list[Any]], list[Any]]] = {
        "60 rounds": lambda i, f: changed(
            begin + i - 1, "first" if not begin + i - 1 and kind == "SumOrder" else "next", True
        )(f),
        "first points again and again": lambda i, f: changed(begin + i - 1, "first", True)(f),
        "first points of one round": lambda i, f: changed(begin, "first", True)(f),
        "60 messages without a query": lambda i, f: changed(begin + i - 1, "nothing", True)(f),
        "60 messages of one round": lambda i, f: changed(begin, "nothing", True)(f),
        "queries without messages": lambda i, f: changed(begin + i - 1, "next", False)(f),
    }
    if kind == "SumOrder":
        plans["60 epochs of one round"] = lambda i, f: [1, "nothing", True, "sum", i, *f[5:]]
        plans["60 epochs of keys"] = lambda i, f: [1, "nothing", False, "key", i, *f[5:]]
        plans["60 shares of one round"] = lambda i, f: [1, "nothing", False, "share", 0, *f[5:]]
    for what, make in plans.items():
        for start in (first, last):
            where = "from the start" if start is first else "after the run"
            yield _campaign(start, f"{what}, {where}", orders(make), rounds)
    yield _campaign(first, "endless deferrals", orders(plans["60 rounds"]), rounds, defer=True)
    yield _replays(runs, "all requests again", runs)
    yield _replays(runs, "all requests backwards", runs[::-1])


def _campaign(
    start: Honest,
    what: str,
    order: Callable[[int], Any],
    rounds: range,
    *,
    defer: bool = False,
) -> Campaign:
    done = Campaign(start.name, what)
    start.restore()
    site = start.site
    objective = site.objective
    site.objective = never if defer else objective
    serial = max(site.serial, start.frame[2][3])
    queries = site._trials.count
    with listening() as heard:
        try:
            for i in rounds:
                frame = deepcopy(start.frame)
                frame[2][3:6] = [serial + i, site.serial, min(site.serial, frame[2][5])]
                frame[2][REQUEST_BODY] = written(order(i))
                done.told += 1
                answer = site.respond(written(frame), defer=defer)
                _count_reply(done, answer)
        except Exception as error:
            done.bad = f"crash: {type(error).__name__}: {error}"[:200]
        finally:
            site.objective = objective
    done.words = heard.words[-1:]
    done.evaluations = site._trials.count
    _weigh(start, done, heard, before=queries)
    return done


def _count_reply(done: Campaign, answer: bytes) -> None:
    if read(answer)[1] != "Reply":
        return
    done.accepted += 1
    body = read(decode(answer, Reply, max_bytes=2 * MAX_BYTES).body)
    if body[1] in ("Contribution", "Upload") and body[2][0] is not None:
        done.contributions += 1


def _weigh(start: Honest, done: Campaign, heard: Gathered, *, before: int) -> None:
    case, site = start.case, start.site
    finished = "after the run" in done.what
    budget = site.agent.terms.budget
    allowed = most_contributions(case)
    if done.bad:
        return
    if heard.errors:
        done.bad = f"an error that nobody foresaw: {heard.words[-1]}"[:200]
    elif done.evaluations > budget:
        done.bad = f"{done.evaluations} evaluations of {budget}"
    elif finished and done.evaluations > before + 1:
        done.bad = f"{done.evaluations - before} evaluations after the run"
    elif done.contributions > allowed:
        done.bad = f"{done.contributions} messages of {allowed}"
    elif finished and done.contributions > 1 + 2 * len(NAMES):
        done.bad = f"{done.contributions} messages after the run"
    elif "first points again" in done.what and done.accepted > 1:
        done.bad = f"{done.accepted} times first points"
    elif "of one round" in done.what and "epochs" not in done.what and done.contributions > 1:
        done.bad = f"{done.contributions} messages of one round"


def _replays(runs: list[Honest], what: str, requests: list[Honest]) -> Campaign:
    """What was said is said again to a site that has answered all of it."""
    done = Campaign(runs[0].name, what)
    last = runs[-1]
    last.restore()
    site = last.site
    with listening() as heard:
        try:
            site.respond(written(last.frame))
            for one in requests:
                done.told += 1
                answer = site.respond(written(one.frame))
                if read(answer)[1] == "Reply":
                    done.accepted += 1
                    again = one is last
                    if not again:
                        done.bad = "an old request was answered"
        except Exception as error:
            done.bad = f"crash: {type(error).__name__}: {error}"[:200]
    if heard.errors and not done.bad:
        done.bad = f"an error that nobody foresaw: {heard.words[-1]}"[:200]
    return done


# ------------------------------------------------------------------ all of it


@dataclass
class Found:
    """What came of all lies to a federation."""

    lies: int = 0
    fields: int = 0  # of these, changes of one field
    verdicts: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    peak_mb: float = 0.0


def moments(runs: list[Honest]) -> list[Honest]:
    """The first request, and the last of each kind of step and evaluation."""
    chosen = {"begin": runs[0]}
    for one in runs[1:]:
        order = one.order[2]
        step = tuple(order[1:4]) + tuple(order[6:7]) if one.order[1] == "SumOrder" else order[1]
        kinds = sorted(blob[1] for blob in one.blobs.values())
        chosen[repr((step, kinds))] = one
    return list({id(one): one for one in chosen.values()}.values())


def attack(name: str, case: Case, *, every: int = 1) -> Found:
    """All lies to the victim of a federation, or one in so many."""
    runs, found = recorded(name, case), Found()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = 0
    for honest in moments(runs):
        for lie in field_lies(honest):
            count += 1
            if count % every:
                continue
            outcome = tell(honest, lie)
            found.lies += 1
            found.fields += 1
            found.verdicts[outcome.verdict] += 1
            if outcome.verdict == "BAD":
                found.bad.append(f"{name}: {outcome.why}")
            elif outcome.verdict == "harmless":
                found.harmless[outcome.why] += 1
            elif lie.where.startswith("Setup.") and "." in lie.where and len(outcome.why) < 12:
                found.unnamed.append(f"{lie.where} {lie.said}: {outcome.why}")
    for campaign in campaigns(runs):
        found.lies += campaign.told
        found.verdicts["BAD campaign" if campaign.bad else "campaign held"] += 1
        if campaign.bad:
            found.bad.append(f"{name}: {campaign.what}: {campaign.bad}")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found.peak_mb = (after - memory) / 1024
    return found


def main(names: list[str]) -> None:
    """Print what gets through."""
    from test.faults.cases import cases

    for name, case in cases().items():
        if name == "fts-late" or (names and name not in names):
            continue
        found = attack(name, case)
        said = ", ".join(f"{n} {verdict}" for verdict, n in sorted(found.verdicts.items()))
        print(f"== {name}: {found.lies} lies, {said}; peak {found.peak_mb:.0f} MB", flush=True)
        for line in found.bad[:400]:
            print("  BAD", line, flush=True)
        for line in found.unnamed[:5]:
            print("  unnamed", line)
        for why, n in found.harmless.items():
            print(f"  harmless {n}: {why}")


if __name__ == "__main__":
    import sys
    import warnings

    warnings.simplefilter("ignore")
    main(sys.argv[1:])
