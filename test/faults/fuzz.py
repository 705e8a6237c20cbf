"""Damaged, forged and stale messages, by the million, where real ones arrive.

Valid traffic of every protocol is recorded together with the state that its receiver is in. A
mutant of a message is delivered to that receiver in that state: a site's `respond`, or the check of
replies in the server's loop and, if it passes, the server's step. What is accepted is judged by
`judge`, which knows the papers' messages and the frames, and none of the package's checks.
"""

from __future__ import annotations

import hashlib
import logging
import math
import resource
import signal
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

import msgpack
import numpy as np

from botorch_fed.aggregation.sum_messages import EPOCHS_PER_AGENT, MAX_ROUNDS
from botorch_fed.errors import MessageError
from botorch_fed.federation.base import Exchanged, Outgoing, Reply, Request
from botorch_fed.federation.drive import _exchange, drive
from botorch_fed.federation.hub import HUB_EVENTS, HubRecord
from botorch_fed.federation.site import Site, _Refused
from botorch_fed.federation.terms import MAX_AHEAD
from botorch_fed.federation.trial import SITE_EVENTS, Requested, Trials
from botorch_fed.models import FeatureMap
from botorch_fed.rng import generator
from botorch_fed.search.transfer import report_size
from botorch_fed.storage.log import Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.wire.codec import content_hash, decode
from test.faults.cases import ARMS, NAMES, ROUNDS, SQUARE, Case, cases, hill

MAX_BYTES = 2**20  # of a message here: peak memory follows from it
PATIENCE = 10.0  # seconds after which a receiver hangs
CARRIED_OUT = 1 / 4  # of the requests that a site accepts
BATCH = 64  # mutants of one message at a time
HEADER = struct.Struct("<8sB32sQ16sQ32s")  # of what travels in a channel
MAGIC = b"bofedch\x01"
SIZES = {"f8": 8, "i8": 8, "u1": 1, "b1": 1}
REQUEST_BODY = [field.name for field in fields_of(Request)].index("body")
REPLY_BODY = [field.name for field in fields_of(Reply)].index("body")
Tree = Any  # what msgpack reads: lists, numbers, strings, bytes, None


class Hung(BaseException):
    """Not an `Exception`: nothing in between may catch it."""


class Dice:
    """Random choices by the published recipe, a block at a time."""

    def __init__(self, *path: int | str) -> None:
        self.path, self.block, self.rest = path, 0, []  # type: ignore[var-annotated]

    def __call__(self) -> float:
        if not self.rest:
            seed, *path = self.path
            self.rest = generator(int(seed), *path, self.block).uniform(8192).tolist()
            self.block += 1
        number: float = self.rest.pop()
        return number

    def below(self, count: int) -> int:
        return int(self() * count)

    def of(self, things: Any) -> Any:
        return things[int(self() * len(things))]


# ------------------------------------------------------------------ valid traffic


class Busy(Site):
    """A site that accepts a request and may leave it at that: a search takes its time."""

    willing = True

    def _go_on(self, last: Requested, defer: bool) -> bytes:
        if not self.willing:
            raise _Refused("busy")
        return super()._go_on(last, defer)

    def memory(self) -> dict[str, Any]:
        """What it knows, to be put back; its log included."""
        kept = {**self.__dict__, "log": None, "_trials": _same(self._trials)}
        return {
            **{key: list(v) if isinstance(v, list) else v for key, v in kept.items()},
            "events": (list(self.log._events), list(self.log._heads)),
        }

    def remember(self, memory: dict[str, Any]) -> None:
        """Know again what `memory` gave."""
        log = self.log
        self.__dict__.update({key: v for key, v in memory.items() if key not in ("log", "events")})
        for key, value in memory.items():
            if isinstance(value, list):
                self.__dict__[key] = list(value)
        self._handed = set(memory["_handed"])
        self._trials = _same(memory["_trials"])
        events, heads = memory["events"]
        log._events, log._heads = list(events), list(heads)


def _same(trials: Trials) -> Trials:
    """Trials with lists of their own."""
    other = copy(trials)
    other.batches, other.answers = list(trials.batches), list(trials.answers)
    return other


@dataclass
class Visit:
    """A request to a site, and the site as it was.

    Attributes:
        site: The receiver.
        stores: What its stores held.
        memory: What it knew.
        good: The valid request.
        blobs: The broadcasts that came with it.
    """

    case: str
    site: Busy
    stores: tuple[tuple[dict[Any, Any], dict[Any, Any]], ...]
    memory: dict[str, Any]
    good: bytes
    blobs: Mapping[str, bytes]
    last: Tree = None  # the body of the request before

    @property
    def agent(self) -> str:
        return self.site.name

    def restore(self) -> None:
        """The site as it was."""
        self.site.remember(self.memory)
        for store, held in self.stores:
            store.clear()
            store.update(held)


@dataclass
class Return:
    """A reply to the server, and the server as it was."""

    case: str
    server: Any
    state: Any
    known: HubRecord
    outgoing: Outgoing
    replies: Mapping[str, bytes]
    messages: Mapping[str, Any]
    agent: str
    secrets: tuple[dict[str, bytes], dict[str, bytes]] | None

    @property
    def good(self) -> bytes:
        return self.replies[self.agent]

    @property
    def blobs(self) -> Mapping[str, bytes]:
        return {}

    def restore(self) -> None:
        """The server as it was."""
        if self.secrets is not None:
            store, held = self.secrets
            store.clear()
            store.update(held)
            self.server.resources.cache.clear()


@dataclass
class Traffic:
    """What was said in one run of every protocol."""

    visits: list[Visit] = field(default_factory=list)
    returns: list[Return] = field(default_factory=list)
    # By kind: values that stood in valid messages, to be put into others.
    pool: dict[str, list[Any]] = field(default_factory=dict)
    bodies: list[tuple[str, bytes]] = field(default_factory=list)

    def record(self, name: str, case: Case) -> None:
        """One run."""
        server = case.study.server(SQUARE, NAMES)
        secrets = server.resources.secrets if name.startswith("ucb") else None
        sites, stores, last, records = {}, {}, dict.fromkeys(NAMES), Log(HUB_EVENTS)  # type: ignore[var-annotated]
        for index, who in enumerate(NAMES):
            agent = case.study.agent(who, SQUARE, index, MemoryBlobs(max_bytes=MAX_BYTES))
            log = Log(SITE_EVENTS)
            dicts: list[dict[Any, Any]] = [log._snapshots.store._data, agent.blobs._store._data]  # type: ignore[attr-defined]
            if hasattr(agent, "secrets"):
                dicts.append(agent.secrets._data)
            stores[who] = dicts
            sites[who] = Busy(who, agent, hill, log=log, max_bytes=MAX_BYTES)

        def exchange(outgoing: Outgoing) -> Exchanged:
            replies = {}
            before = None
            if secrets is not None:
                before = secrets._data, dict(secrets._data)
            for who, request in outgoing.requests.items():
                site = sites[who]
                for data in outgoing.blobs.values():
                    site.agent.blobs.put(data)
                held = tuple((store, dict(store)) for store in stores[who])
                visit = Visit(name, site, held, site.memory(), request, outgoing.blobs, last[who])
                self.visits.append(visit)
                last[who] = body_of(request)
                replies[who] = site.respond(request)
            known = HubRecord.of(records)
            assert known is not None
            state = decode(records.load(known.state), server.state_type, max_bytes=2**30)
            messages = {
                who: decode(decode(data, Reply).body, *server.accepts)
                for who, data in replies.items()
            }
            for who in replies:
                self.returns.append(
                    Return(name, server, state, known, outgoing, replies, messages, who, before)
                )
            return Exchanged(replies)

        drive(server, exchange, log=records, max_bytes=MAX_BYTES)

    def collect(self) -> None:
        """The pool of values."""
        for visit in self.visits:
            self.bodies.append((visit.case, read(visit.good)[2][REQUEST_BODY]))
            self._add(body_of(visit.good))
            for blob in visit.blobs.values():
                self._add(read(blob))
        for one in self.returns:
            body = read(one.good)[2][1]
            self.bodies.append((one.case, body))
            self._add(read(body))
        for kind, found in self.pool.items():
            self.pool[kind] = found[:: max(1, len(found) // 300)]

    def _add(self, tree: Tree) -> None:
        for kind, value in values(tree):
            self.pool.setdefault(kind, []).append(value)


def recorded(names: tuple[str, ...] | None = None) -> Traffic:
    """The traffic of all federations, or of some.

    Those that differ in what happens at sites only have the messages of others: an announcement of
    one is a valid one of the other, which has the same run, sites and channel.
    """
    traffic = Traffic()
    for name, case in cases().items():
        usual = case.objective is hill and not case.by_hand and not case.grows
        if name in names if names is not None else usual:
            traffic.record(name, case)
    traffic.collect()
    return traffic


# ------------------------------------------------------------------ mutants


def read(data: bytes) -> Tree:
    """What msgpack reads."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def body_of(framed: bytes) -> Tree:
    """The body in the frame of a request or a reply."""
    _, name, content = read(framed)
    return read(content[REQUEST_BODY if name == "Request" else REPLY_BODY])


def written(tree: Tree) -> bytes:
    """And writes."""
    data: bytes = msgpack.packb(tree, use_bin_type=True)
    return data


def kind_of(value: Tree) -> str:
    """Which mutators fit a value."""
    if isinstance(value, list) and len(value) == 3:
        code, _, data = value
        if isinstance(code, str) and code in SIZES and isinstance(data, bytes):
            return "tensor"
    if isinstance(value, bytes) and value.startswith(MAGIC):
        return "payload"
    return type(value).__name__


def slots(tree: Tree) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree where a value stands: a container and an index. A tensor is one."""
    places = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for place in places:
        yield tree, place
        value = tree[place]
        if isinstance(value, list | dict) and kind_of(value) != "tensor":
            yield from slots(value)


def values(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Every value with its kind."""
    for container, place in slots([tree]):
        yield kind_of(container[place]), container[place]


def _element(value: Any, dice: Dice) -> Any:
    code, shape, data = value
    if not data:
        return [code, shape, b"\0" * SIZES[code]]
    array = np.frombuffer(data, dtype={"f8": "<f8", "i8": "<i8"}.get(code, "u1")).copy()
    place = dice.below(len(array))
    if code == "f8":
        old = float(array[place])
        array[place] = dice.of((math.nan, math.inf, -math.inf, 1e300, -1e7, 1e7, 2.0, -old, 5e-324))
    else:
        array[place] = dice.of((0, 1, 2, 255)) if code != "i8" else dice.of((-1, 2**62, 7))
    return [code, shape, array.tobytes()]


def _shape(value: Any, dice: Dice) -> Any:
    code, shape, data = value
    odd = [*shape, 1], shape[1:], shape[::-1], [0, *shape], [2**40, 0], [-1], [1] * 40, None
    return [code, dice.of(odd), data]


def _rows(value: Any, dice: Dice) -> Any:
    code, shape, data = value
    first = shape[0] if shape else 1
    if not first:  # an empty tensor says that it has a row
        return [code, [1, *shape[1:]], data]
    if dice() < 0.5:
        return [code, [2 * first, *shape[1:]], data + data]
    return [code, [max(first - 1, 0), *shape[1:]], data[: len(data) * max(first - 1, 0) // first]]


def _dtype(value: Any, dice: Dice) -> Any:
    code, shape, data = value
    other = dice.of([name for name in (*SIZES, "f4", "O") if name != code])
    if dice() < 0.5:
        return [other, shape, data]
    return [other, shape, b"\0" * (SIZES.get(other, 4) * math.prod(shape))]


def _header(value: bytes, dice: Dice) -> bytes:
    fields = list(HEADER.unpack_from(value))
    which = dice.below(7)
    old = fields[which]
    if isinstance(old, bytes):
        fields[which] = bytes(b ^ 1 for b in old)
    else:
        changed = dice.of((old + 1, max(old - 1, 0), 0, 2**32))
        fields[which] = changed % 256 if which == 1 else changed
    return HEADER.pack(*fields) + value[HEADER.size :]


def _sealed(value: bytes, body: bytes) -> bytes:
    """A payload with another body, its size and hash right."""
    fields = list(HEADER.unpack_from(value))
    fields[5], fields[6] = len(body), hashlib.sha256(body).digest()
    return HEADER.pack(*fields) + body


def _words(value: bytes, dice: Dice) -> bytes:
    body = bytearray(value[HEADER.size :])
    if not body:
        return _sealed(value, b"\0" * 8)
    for _ in range(1 + dice.below(3)):
        place = 4 * dice.below(max(len(body) // 4, 1))
        word = dice.of((b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", bytes([dice.below(256)] * 4)))
        body[place : place + 4] = word[: len(body) - place]
    return _sealed(value, bytes(body))


def _size(value: bytes, dice: Dice) -> bytes:
    body = value[HEADER.size :]
    odd = body[:-4], body + b"\0" * 4, body + body, b"", body[: len(body) // 2]
    return _sealed(value, dice.of(odd))


def _cut(value: bytes, dice: Dice) -> bytes:
    return value[: dice.below(len(value) + 1)]


def _flip(value: bytes, dice: Dice) -> bytes:
    changed = bytearray(value or b"\0")
    for _ in range(1 + dice.below(4)):
        changed[dice.below(len(changed))] ^= 1 << dice.below(8)
    return bytes(changed)


def _name(value: str, dice: Dice) -> str:
    odd = (*NAMES, "", "x" * 200, "0" * 64, value.upper(), value + " ", "\N{SNOWMAN}", "dee")
    return str(dice.of(odd))


def _key(value: dict[str, Any], dice: Dice) -> Any:
    if not value:
        return {"dee": b""}
    changed = dict(value)
    name = dice.of(sorted(changed))
    item = changed.pop(name)
    if dice() < 0.6:
        changed[dice.of(("dee", "", 7, *NAMES))] = item
    return changed


_MUTATORS: dict[str, tuple[Callable[[Any, Dice], Any], ...]] = {
    "int": (
        lambda v, dice: v + 1,
        lambda v, dice: v - 1,
        lambda v, dice: dice.of((0, 1, 2, -1, 3, 10**9, 2**31, 2**62, 2**63 - 1, 2**63, -(2**63))),
    ),
    "float": (
        lambda v, dice: dice.of((math.nan, math.inf, -math.inf, 0.0, -v, 1e300, 5e-324, 2.0 * v)),
    ),
    "str": (_name,),
    "bool": (lambda v, dice: not v, lambda v, dice: dice.of((0, 1, None, "yes"))),
    "NoneType": (lambda v, dice: dice.of((0, b"", [], False, "")),),
    "bytes": (_cut, _flip, lambda v, dice: v + v, lambda v, dice: None),
    "payload": (_header, _header, _words, _size, _cut, _flip, lambda v, dice: None),
    "tensor": (_element, _element, _shape, _rows, _dtype),
    "list": (
        lambda v, dice: v[1:],
        lambda v, dice: v + v[:1],
        lambda v, dice: v[::-1],
        lambda v, dice: [],
        lambda v, dice: v * 3,
    ),
    "dict": (_key,),
}


@dataclass(frozen=True)
class Mutant:
    """What is delivered.

    Attributes:
        data: The framed message.
        blobs: Broadcasts that are put into the receiver's store before.
        how: What was done.
        reframed: Whether one field was changed and everything around it is right.
        cipher: Whether it carries a ciphertext.
    """

    data: bytes
    blobs: Mapping[str, bytes]
    how: str
    reframed: bool
    cipher: bool


BY_AGENTS = ("dp-fts-de-distributed", "dp-fts-de-distributed-plain")  # sums, as those of fed-gp
ENCRYPTED = (
    "dp-fts-de-distributed",
    "fed-gp-ckks",
    "fed-gp-threshold",
    "fed-gp-region-threshold",
    "fed-gp-threshold-noise",
)


def _changed(tree: Tree, dice: Dice, pool: Mapping[str, list[Any]]) -> str:
    """Change one value of a tree in its place."""
    places = list(slots(tree))
    tensors = [(one, place) for one, place in places if kind_of(one[place]) == "tensor"]
    container, place = dice.of(tensors if tensors and dice() < 0.5 else places)
    value = container[place]
    kind = kind_of(value)
    if dice() < 0.2 and kind in pool:
        container[place] = dice.of(pool[kind])
        return f"another {kind}"
    container[place] = dice.of(_MUTATORS[kind])(value, dice)
    return kind


def mutant(one: Visit | Return, dice: Dice, traffic: Traffic) -> Mutant:
    """One of a valid message."""
    good = one.good
    body_at = REQUEST_BODY if isinstance(one, Visit) else REPLY_BODY
    cipher = one.case in ENCRYPTED and len(good) > 4096
    coin = dice()
    if coin < 0.25:  # bytes
        how = dice.of(("cut", "flip", "flip", "splice", "insert", "noise"))
        if how == "cut":
            data = _cut(good, dice)
        elif how == "flip":
            data = _flip(good, dice)
        elif how == "splice":
            other = dice.of(traffic.bodies)[1]
            data = good[: dice.below(len(good))] + other[dice.below(len(other)) :]
        elif how == "insert":
            at = dice.below(len(good))
            data = good[:at] + bytes([dice.below(256)]) * (1 + dice.below(9)) + good[at:]
        else:
            data = bytes(dice.below(256) for _ in range(1 + dice.below(64)))
        return Mutant(data, {}, f"bytes: {how}", False, cipher)
    if coin < 0.28:  # what was right for another agent, round or protocol
        alike = traffic.visits if isinstance(one, Visit) else traffic.returns
        other = dice.of(alike)
        return Mutant(other.good, other.blobs, "replay", False, cipher)
    frame = read(good)
    if coin < 0.3 and isinstance(one, Visit):  # an earlier round, consistent in itself
        serial = 1 + dice.below(frame[2][3])
        frame[2][3:6] = serial, serial - 1, dice.below(serial)
        return Mutant(written(frame), {}, "frame: round", True, cipher)
    if coin < 0.45:  # a field of the frame
        how = "frame: " + _changed(frame[2], dice, traffic.pool)
    elif coin < 0.5:  # a body of another message, of this protocol or of any
        frame[2][body_at] = dice.of(traffic.bodies)[1]
        how = "body of another message"
    elif coin < 0.55 and one.blobs:
        digest = dice.of(sorted(one.blobs))
        blob = read(one.blobs[digest])
        how = f"broadcast: {blob[1]}, " + _changed(blob[2], dice, traffic.pool)
        try:
            data = written(blob)
        except (OverflowError, ValueError):
            data = one.blobs[digest] + b"\0"
        new = content_hash(data)
        frame[2][6] = [new if known == digest else known for known in frame[2][6]]
        return Mutant(written(frame), {new: data}, how, True, False)
    else:
        body = read(frame[2][body_at])
        how = "body: " + _changed(body[2], dice, traffic.pool)
        try:
            frame[2][body_at] = written(body)
        except (OverflowError, ValueError):  # beyond 64 bits: no such bytes
            frame[2][body_at] = b"\xcf" + b"\xff" * 8
    try:
        data = written(frame)
    except (OverflowError, ValueError):
        return Mutant(b"\xcf" + b"\xff" * 8, {}, how, False, cipher)
    return Mutant(data, {}, how, True, cipher)


def bomb(dice: Dice) -> Mutant:
    """Bytes that are long, or become much more when they are read."""
    room = MAX_BYTES + 2**15
    data = dice.of(
        (
            b"\x90" * room,  # nested or empty lists
            b"\xdd" + room.to_bytes(4, "big") + b"\x90" * (room - 5),
            b"\xdd\xff\xff\xff\xff" + b"\x01" * 100,  # announces more than there is
            b"\xc6\xff\xff\xff\xff" + b"\x01" * 100,
            b"\x91" * room,
            b"\0" * (MAX_BYTES * 3),
        )
    )
    return Mutant(data, {}, "bomb", False, False)


# ------------------------------------------------------------------ what must not be accepted


def not_finite(tree: Tree) -> bool:
    """Whether any number in a tree is NaN or infinite."""
    for kind, value in values(tree):
        if kind == "float" and not math.isfinite(value):
            return True
        if kind == "tensor" and value[0] == "f8":
            numbers = np.frombuffer(value[2], dtype="<f8")
            if not np.isfinite(numbers).all():
                return True
    return False


def mis_sized(tree: Tree) -> bool:
    """Whether a tensor has other bytes than its shape says."""
    return any(
        kind == "tensor" and math.prod(value[1]) * SIZES[value[0]] != len(value[2])
        for kind, value in values(tree)
    )


def numbers_of(value: Tree, shape: list[int], low: float, high: float) -> str | None:
    """Why a value is not a float64 tensor of a shape with numbers in a range."""
    if kind_of(value) != "tensor" or value[0] != "f8" or value[1] != shape:
        return "mis-sized tensor"
    array = np.frombuffer(value[2], dtype="<f8")
    if not bool(((array >= low) & (array <= high)).all()):
        return "number out of range"
    return None


def judge(one: Visit | Return, made: Mutant, answer: Any = None) -> str | None:
    """Why an accepted message should have been refused; None if it is only another one."""
    frame = read(made.data)
    if frame[0] != 1 or len(made.data) > MAX_BYTES + 2**16:
        return "another format, or too long"
    body_at = REQUEST_BODY if isinstance(one, Visit) else REPLY_BODY
    body = read(frame[2][body_at])
    if not_finite(frame[2]) or not_finite(body):
        return "not finite"
    if mis_sized(body):
        return "mis-sized"
    try:
        if isinstance(one, Return):
            return _judge_reply(one, frame, body)
        return _judge_request(one, made, frame[2], body) or _judge_order(one, made, body, answer)
    except (ValueError, TypeError, LookupError) as error:  # not what it must be made of
        return f"malformed: {type(error).__name__}"


def _judge_request(one: Visit, made: Mutant, frame: Tree, body: Tree) -> str | None:
    run, instance, agent, serial, asked, replied, broadcasts, _, tag, *_ = frame
    record, good = one.memory["_request"], read(one.good)[2]
    if (run, agent) != (good[0], one.agent):
        return "mis-addressed"
    last = 0 if record is None else record.serial
    if record is not None and instance != good[1]:
        return "of another start of the run"
    if serial <= last or not 0 <= replied <= asked < serial or asked < last or replied > last:
        return "stale"
    held = {**one.blobs, **made.blobs}
    for digest in broadcasts:
        data = held.get(digest)
        if data is None:
            known = next((h.get(digest) for _, h in one.stores if digest in h), None)
            if not isinstance(known, bytes):
                return "without its broadcasts"
            data = known
        if content_hash(data) != digest:
            return "with another broadcast"
        if not_finite(read(data)) or mis_sized(read(data)):
            return "broadcast not finite or mis-sized"
    if len(tag) != 64:
        return "mis-sized seal"
    if record is not None and broadcasts[:1] != good[6][:1]:
        theirs, mine = read(held[broadcasts[0]]), read(held[good[6][0]])
        if not (one.case.startswith("fts") and _grown(theirs[2], mine[2])):
            return "another setup"
    return None


def _grown(theirs: Tree, mine: Tree) -> bool:
    """Whether a setup is another one with agents who have joined, each once."""
    agents, before = theirs[1], mine[1]
    same = [theirs[0], *theirs[2:]] == [mine[0], *mine[2:]]
    return bool(same and agents[: len(before)] == before and len(set(agents)) == len(agents))


def _judge_order(one: Visit, made: Mutant, body: Tree, answer: Any) -> str | None:
    """By protocol: ranges, rounds and epochs of a body and of its broadcasts."""
    name, fields = body[1], body[2]
    good = body_of(one.good)
    if name != good[1]:
        return "another kind of message"
    frame = read(made.data)[2]
    held = {**one.blobs, **made.blobs}
    blobs = [read(held[digest]) for digest in frame[6] if digest in held]
    for kind, content in ((blob[1], blob[2]) for blob in blobs):
        if kind == "Rows":
            agents, rounds, weights = content
            if len(agents) != len(rounds) or len(set(agents)) < len(agents):
                return "mis-sized broadcast"
            if any(t < 0 for t in rounds):
                return "broadcast of a round that there is not"
            if why := numbers_of(weights, [len(agents), *weights[1][1:]], -1e6, 1e6):
                return why
        if kind == "Noisy":
            made_at, sums, noise, num_agents = content
            if made_at < 0:
                return "broadcast of a round that there is not"
            if num_agents != len(NAMES):
                return "broadcast of another roster"
            if why := numbers_of(sums, sums[1], -1e6, 1e6):
                return why
            if why := numbers_of(noise, sums[1][:1], 0.0, math.inf):
                return why
        if kind == "Parameters" and not (0 <= content[0] < fields[0] and content[3] >= 0):
            return "broadcast of a round that there is not"
        if kind == "Opened" and not (0 <= content[0] < fields[0] and _some(content[2])):
            return "broadcast of a round that there is not, or of nobody"
    summed = one.case.startswith("fed-gp") or one.case in BY_AGENTS
    if one.case.startswith("dp-fts-de") and not summed:
        t, evaluate, _ = fields
        before = -1 if one.last is None else one.last[2][0]
        if not before < t <= before + MAX_AHEAD:
            return "stale round"
        if evaluate == "first" and t > 0:
            return "a start that is too late"
    if one.case.startswith("ucb"):
        t, evaluate, contribute, *X = fields
        before = 0 if one.last is None else one.last[2][0]
        if not before < t <= ROUNDS:
            return "stale round"
        if evaluate != "next" or contribute is not True:
            return "no action to play"
        if bool(X) != (one.case == "ucb-public"):
            return "action that nobody may choose"
        if X:
            if why := numbers_of(X[0], [1, 2], 0.0, 1.0):
                return why
            if X[0][2] not in [row.numpy().tobytes() for row in ARMS]:
                return "action out of range"
    if summed:
        t, evaluate, _, step, epoch, roster, *_ = fields
        if step not in ("key", "sum", "share"):
            return "no such step"
        if evaluate != "nothing" and (step != "sum" or (evaluate == "first") != (t == 0)):
            return "no such evaluation"
        if not 0 <= t <= MAX_ROUNDS or epoch < 0:
            return "round or epoch out of range"
        if len(set(roster)) < len(roster) or not set(roster) <= set(NAMES):
            return "no such roster"
        if one.last is not None:
            if t < one.last[2][0]:
                return "stale round"
            if epoch < one.last[2][4]:
                return "stale epoch"
        before = -1 if one.last is None else one.last[2][0]
        if t > before + MAX_AHEAD or epoch > EPOCHS_PER_AGENT * len(NAMES):
            return "round or epoch that cannot be"
        if answer is not None:  # what it was given has been used
            for blob in blobs:
                if blob[1] == "Keys" and blob[2][0] != epoch:
                    return "keys of another epoch"
                if blob[1] == "Sealed" and step == "share" and blob[2][0] != t:
                    return "a sum of another round"
    return None


def _some(members: list[str]) -> bool:
    """Whether these are agents, one at least, each once."""
    return len(set(members)) == len(members) > 0 and set(members) <= set(NAMES)


def _judge_reply(one: Return, frame: Tree, body: Tree) -> str | None:
    if frame[1] != "Reply":
        return "no reply"
    good = read(one.good)[2]
    if frame[2][0] != good[0]:
        return "mis-addressed or stale"
    valid = read(good[1])
    name, fields = body[1], body[2]
    if name != valid[1]:
        return "another kind of message"
    if fields[0] is None:
        return None
    if one.case in ("ucb-joint", "ucb-none"):
        if why := numbers_of(fields[0], [3], -math.inf, math.inf):
            return why
        point = np.frombuffer(fields[0][2], dtype="<f8")[:2]
        return None if bool(((point >= 0) & (point <= 1)).all()) else "number out of range"
    if one.case == "ucb-public":  # any number: what is added is clipped
        return numbers_of(fields[0], [1], -math.inf, math.inf)
    if one.case == "ucb-local":
        return numbers_of(fields[0], valid[2][0][1], -1e15, 1e15)
    order = body_of(one.outgoing.requests[one.agent])[2]
    if one.case.startswith("fts"):
        if not order[2]:
            return "a vector that nobody asked for"
        if one.case == "fts-search":
            return _judge_report(fields[0], one.server.feature_map)
        return numbers_of(fields[0], [one.server.feature_map.num_features], -1e6, 1e6)
    if one.case.startswith("dp-fts-de") and one.case not in BY_AGENTS:
        if not order[2]:
            return "a vector that nobody asked for"
        most = sys.float_info.max
        return numbers_of(fields[0], [one.server.feature_map.num_features], -most, most)
    if valid[2][0] is None:
        return "a contribution that nobody asked for"
    return _judge_payload(one, fields[0], valid[2][0])


def _judge_report(tensor: Tree, feature_map: FeatureMap) -> str | None:
    """A weight vector, and weights of trusts that sum to one at most."""
    if why := numbers_of(tensor, [report_size(feature_map)], -1e6, 1e6):
        return why
    trust = np.frombuffer(tensor[2], dtype="<f8")[feature_map.num_features :]
    proper = (trust >= 0).all() and trust.sum() <= 1 + 1e-6
    return None if proper else "trusts that are no probabilities"


def _judge_payload(one: Return, data: bytes, valid: bytes) -> str | None:
    """A channel's frame must be that of the valid one, and its body of the same kind and size."""
    if len(data) < HEADER.size:
        return "mis-sized payload"
    header, expected = HEADER.unpack_from(data), HEADER.unpack_from(valid)
    if header[:5] != expected[:5]:
        return "payload of another kind, epoch, round or sender"
    body, theirs = data[HEADER.size :], valid[HEADER.size :]
    if header[5] != len(body) or header[6] != hashlib.sha256(body).digest():
        return "mis-sized or damaged payload"
    channel = one.server.terms.aggregation.private_sum(one.server.hub).channel
    if type(channel).__name__ == "PlainChannel":
        if len(body) != len(theirs):
            return "mis-sized payload"
        numbers = np.frombuffer(body, dtype="<i8")
        most = channel.grid.largest
        return None if bool(((numbers <= most) & (numbers >= -most)).all()) else "out of range"
    if type(channel).__name__ == "CKKSChannel":
        return None if sizes_of(body) == len(list(channel._sizes)) else "mis-sized payload"
    if len(body) != len(theirs):
        return "mis-sized payload"
    if header[1] == 7 and body != theirs:
        return "an announcement that nobody has signed"
    ring, start = channel.ring, 0
    if header[1] in (0, 3):  # a contribution or a share, behind a hash
        start = 32 + 4 * ring.num_primes * channel._count
        words = np.frombuffer(body[32:start], dtype="<u4").reshape(ring.num_primes, -1)
        if bool((words.max(axis=1) >= np.array(ring.primes[: ring.num_primes])).any()):
            return "word out of range"
    if header[1] in (0, 8):  # second parts, or a key share, before the keys that are sealed
        primes = ring.primes if header[1] == 8 else ring.primes[: ring.num_primes]
        end = start + 4 * len(primes) * ring.degree * (1 if header[1] == 8 else channel._chunks)
        words = np.frombuffer(body[start:end], dtype="<u4")
        rows = words.reshape(-1, len(primes), ring.degree)
        if bool((rows.max(axis=(0, 2)) >= np.array(primes)).any()):
            return "word out of range"
    return None


def sizes_of(body: bytes) -> int:
    """How many parts there are, each behind its length; -1 if they do not fit."""
    count = start = 0
    while start + 4 <= len(body):
        start += 4 + int.from_bytes(body[start : start + 4], "little")
        count += 1
    return count if start == len(body) else -1


# ------------------------------------------------------------------ delivery


@dataclass
class Findings:
    """What came of it.

    Attributes:
        messages: How many were delivered.
        reframed: With one field changed and everything around it right.
        ciphers: With a ciphertext.
        accepted: That were accepted, good or bad.
        bad: That should not have been, by receiver, case and reason.
        crashes: Errors that a receiver must not raise, likewise.
        hung: Receivers that did not come back.
        slowest: Seconds of the slowest.
        peak_mb: The most memory above that of the beginning.
        examples: The first of each kind.
    """

    messages: int = 0
    reframed: int = 0
    ciphers: int = 0
    accepted: int = 0
    hung: int = 0
    slowest: float = 0.0
    peak_mb: float = 0.0
    bad: Counter[str] = field(default_factory=Counter)
    crashes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


@contextmanager
def _watched() -> Iterator[None]:
    """An alarm for receivers that hang; nothing is logged, nobody is warned."""

    def ring(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        logging.disable(disabled)


def deliver(one: Visit | Return, made: Mutant) -> tuple[bool, Any]:
    """Whether a message was accepted, and what it was answered with, if anything."""
    return _to_site(one, made) if isinstance(one, Visit) else _to_server(one, made)


def _to_site(one: Visit, made: Mutant) -> tuple[bool, Any]:
    for data in made.blobs.values():
        one.site.agent.blobs.put(data)
    answer = one.site.respond(made.data)
    digest = content_hash(made.data)
    last = one.site._request
    accepted = last is not None and last is not one.memory["_request"] and last.request == digest
    if not accepted:
        return False, None
    try:
        reply = decode(answer, Reply, max_bytes=2 * MAX_BYTES)
    except MessageError:
        return True, None
    return True, read(reply.body)[2][0]


def _to_server(one: Return, made: Mutant) -> tuple[bool, Any]:
    asked, replies = {one.agent: one.outgoing.requests[one.agent]}, {one.agent: made.data}
    if not one.known.replied:  # if all refuse to begin, the server stops: somebody does not
        other = next(name for name in one.replies if name != one.agent)
        asked[other], replies[other] = one.outgoing.requests[other], one.replies[other]
    outgoing = Outgoing(one.outgoing.serial, asked)
    inbox, _ = _exchange(
        one.server,
        one.state,
        one.known,
        outgoing,
        exchange=lambda _: Exchanged(replies),
        max_bytes=MAX_BYTES,
    )
    if one.agent not in inbox:
        return False, None
    one.server.step(one.state, {**one.messages, one.agent: inbox[one.agent]})
    return True, None


def fuzz(traffic: Traffic, messages: int, *, seed: int = 0) -> Findings:
    """So many mutants of all messages."""
    dice, found = Dice(seed, "fuzz"), Findings()
    light = [one for one in (*traffic.visits, *traffic.returns) if len(one.good) <= 4096]
    heavy = [one for one in (*traffic.visits, *traffic.returns) if len(one.good) > 4096]
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with _watched():
        while found.messages < messages:
            turn = found.messages // BATCH % 40 == 0
            one = dice.of(heavy if heavy and (turn or not light) else light)
            one.restore()
            size = min(BATCH, messages - found.messages)
            for _ in range(size):
                made = bomb(dice) if dice() < 2e-4 else mutant(one, dice, traffic)
                if isinstance(one, Visit):
                    one.site.willing = dice() < CARRIED_OUT
                _try(one, made, found)
            one.restore()
    for visit in traffic.visits:
        visit.site.willing = True
    end = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found.peak_mb = (end - begin) / 1024
    return found


def _try(one: Visit | Return, made: Mutant, found: Findings) -> None:
    where = f"{one.case} {'site' if isinstance(one, Visit) else 'server'}"
    found.messages += 1
    found.reframed += made.reframed
    found.ciphers += made.cipher
    if made.data == one.good:
        return
    why = None
    start = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        accepted, answer = deliver(one, made)
    except Hung:
        found.hung += 1
        accepted, why = True, f"{where}: hangs"
    except Exception as error:
        accepted, why = True, f"{where}: {type(error).__name__}: {error}"
        found.crashes[why] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    found.slowest = max(found.slowest, time.perf_counter() - start)
    if accepted or made.blobs:
        one.restore()
    if not accepted:
        return
    found.accepted += 1
    if why is None and (bad := judge(one, made, answer)) is not None:
        why = f"{where}: {bad}"
        found.bad[why] += 1
    if why is not None:
        found.examples.setdefault(why, made.how)
