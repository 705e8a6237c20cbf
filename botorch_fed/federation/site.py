r"""A site: requests of the hub in, replies out, and a trial service for whoever evaluates.

::

    request -> checked -> received -> LOG -> chosen -> LOG -> evaluated -> LOG -> told
            -> … -> reply drawn -> LOG -> reply

What stands in capitals is on disk before the next arrow. Hence, for a process that is killed
anywhere: no observation is lost or paid for twice, and no reply is drawn twice. The state is
computed from the log: the last snapshot, and the answers after it.

*Who evaluates.* An objective, which the site calls whenever a request waits for an evaluation; or
anybody else, by `ask` and `tell`, whenever there is time. Both work on one log and may be mixed.
A request that waits for an evaluation is refused as long as that is not finished (``"busy"``),
unless it is to be answered with what the site has already (`Reply.open`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import operator
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from threadpoolctl import ThreadpoolController
from torch import Tensor

from botorch_fed.errors import BudgetExceeded, MessageError, ObjectiveError, ProtocolError
from botorch_fed.federation.anchors import SealedLedger
from botorch_fed.federation.base import (
    FRAME_BYTES,
    Agent,
    AgentId,
    Curve,
    Objective,
    Pending,
    Refusal,
    RefusalCode,
    Reply,
    Request,
)
from botorch_fed.federation.contribution import carries
from botorch_fed.federation.trial import (
    MAX_REASON,
    MAX_VALUE,
    SITE_EVENTS,
    Asked,
    Attached,
    Batch,
    Failed,
    Handed,
    Joined,
    Observation,
    Observed,
    Reached,
    Replied,
    Requested,
    Trial,
    Trials,
    trial_of,
)
from botorch_fed.space import SearchSpace, Value
from botorch_fed.storage.log import Log
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode, encode

logger = logging.getLogger(__name__)

STATE_BYTES = 2**30  # of a party's own state, which no other writes
HUB = ""  # whose word it is, among those of sites
# Failures from the first evaluation on after which an objective is taken for broken: by errors of
# programs and machines, and by others, which may be the points' fault.
HOPELESS, UNLUCKY = 3, 10
BROKEN = (
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    ObjectiveError,
    OSError,
    ProtocolError,
    SyntaxError,
    TypeError,
)


class _Refused(Exception):
    def __init__(self, code: RefusalCode) -> None:
        self.code: RefusalCode = code


class Site:
    """One agent with its objective, if it has one, and what it must not lose.

    Args:
        name: The agent's name, by which the server addresses it.
        agent: The site's side of the protocol.
        objective: `q x d` points to `q x m` values, a column for each outcome of the space or a
            mapping from their names to `q` values, or `Pending()` while it is running: then it is
            called again with the same points until it has them, also after a restart. It gets one
            point at a time, and each value is in the log before the next begins; one with
            `in_batches = True` gets those that were chosen together, and a process that ends
            meanwhile loses all of their values. An error
            that it raises, or a value that is not finite, is a failed evaluation: it is recorded,
            its point is not asked again, and the search goes on. None if trials are answered by
            `tell` and `fail` only.
        run: The run's name, agreed with the server.
        log: What the site must not lose; default in memory. Its own.
        max_bytes: Refuse longer messages.
        raise_errors: Whether an error of the objective is raised instead of recorded; the request
            may then be repeated.
        ledger: Its ledger, from which the agent pays, as others have seen it.

    Attributes:
        sent: Whether the last reply that it has made carried a message.

    Example:
        >>> site = Site("clinic", agent, None, log=FileLog(folder, SITE_EVENTS))
        >>> for trial in site.ask(2):
        ...     site.tell(trial.id, measure(**trial.parameters))
    """

    def __init__(
        self,
        name: AgentId,
        agent: Agent[Any],
        objective: Objective | None,
        *,
        run: str = "run",
        log: Log | None = None,
        max_bytes: int = MAX_BYTES,
        raise_errors: bool = False,
        ledger: SealedLedger | None = None,
    ) -> None:
        self.name = name
        self.agent = agent
        self.run = run
        self.log = Log(SITE_EVENTS) if log is None else log
        self.objective = objective
        self.ledger = ledger
        self.sent = False
        self._raises = raise_errors
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._request: Requested | None = None
        self._replied: Replied | None = None  # to the last request
        self._last_reply = 0  # the round of the last reply
        self._state: Any = None
        self._trials = Trials(agent.space)
        self._handed: set[int] = set()
        self._running: tuple[int, ...] = ()  # trials whose objective has answered `Pending()`
        with one_thread():
            self._open()

    def close(self) -> None:
        """Give its log and its ledger back."""
        self.log.close()
        if self.ledger is not None:
            self.ledger.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Site({self.name!r}, run={self.run!r}, round={self.serial})"

    @property
    def serial(self) -> int:
        """The last round it has seen, 0 at the beginning."""
        return 0 if self._request is None else self._request.serial

    @property
    def broadcasts(self) -> tuple[str, ...]:
        """Hashes of the blobs its state may refer to."""
        return () if self._request is None else self._request.broadcasts

    @property
    def state(self) -> Any:
        """The agent's state, with all that was told."""
        return self._state

    @property
    def space(self) -> SearchSpace:
        """The map of inputs and outcomes."""
        return self.agent.space

    @property
    def token(self) -> str:
        """A random name of this site's log, the same after a restart."""
        if not len(self.log):
            fingerprint = self.agent.fingerprint
            self.log.append(Joined(self.run, self.name, fingerprint, secrets.token_hex(8)))
        joined: Joined = self.log[0]
        return joined.token

    # -------------------------------------------------------------- requests

    def respond(self, request: bytes, *, defer: bool = False) -> bytes:
        """Answer one request, by a `Reply` or a `Refusal`.

        The request's broadcasts must be in the agent's `blobs` before.

        Args:
            request: The bytes of a `Request`.
            defer: Whether to reply, if the protocol can, without an evaluation that is not
                finished.

        Raises:
            ProtocolError: The site itself cannot go on; nothing was lost.
            ObjectiveError: The objective has failed from its first evaluation on.

        The agent computes on one thread, the objective on as many as the process has.
        """
        with self._lock, one_thread() as self._threads:
            digest = content_hash(request)
            frame = None
            renew = getattr(self.objective, "renew", None)
            if renew is not None:
                renew()
            try:
                frame = self._frame(request)
                return self._answer(frame, digest, defer)
            except _Refused as refused:
                return self._refusal(frame, digest, refused.code)

    def settle(self) -> None:
        """Take the value of an evaluation that was running, if it is there now.

        Without it the value is taken with the next request. An objective that works in the
        background calls this the moment it has a value.
        """
        with self._lock, one_thread() as self._threads:
            self._collect()

    def _frame(self, request: bytes) -> Request:
        try:
            frame: Request = decode(request, Request, max_bytes=self._max_bytes + FRAME_BYTES)
        except MessageError:
            raise _Refused("invalid") from None
        return frame

    def _answer(self, frame: Request, digest: str, defer: bool) -> bytes:
        last = self._request
        if (frame.run, frame.agent) != (self.run, self.name):
            raise _Refused("foreign")
        if last is not None:
            if frame.instance != last.instance:
                raise _Refused("foreign")
            if frame.serial < last.serial:
                raise _Refused("stale")
            if frame.serial == last.serial and digest != last.request:
                raise _Refused("changed")
            if frame.asked < last.serial < frame.serial:
                raise _Refused("stale")  # the server does not remember the last round
            if frame.serial == last.serial and self._replied is not None:
                return self._go_on(last, defer)
        if frame.replied > self._last_reply:
            raise _Refused("behind")  # a reply that the hub has got is not in the log
        if not all(self.agent.blobs.has(blob) for blob in frame.broadcasts):
            raise _Refused("missing")
        if self.ledger is not None:
            self._check_ledger(self.ledger, frame)
        if last is None or frame.serial > last.serial:
            last = self._received(frame, digest)
        return self._go_on(last, defer)

    def _check_ledger(self, ledger: SealedLedger, frame: Request) -> None:
        try:
            ledger.check(frame.ledgers)
        except ProtocolError as error:
            logger.warning("site %r refuses round %d: %s", self.name, frame.serial, error)
            raise _Refused("ledger") from None
        ledger.hear(HUB, frame.ledgers)

    def _received(self, frame: Request, digest: str) -> Requested:
        self._collect()
        try:
            message = decode(frame.body, *self.agent.accepts, max_bytes=self._max_bytes)
            self.agent.check(self._state, message, frame.broadcasts)
            state = self.agent.receive(self._state, message, frame.broadcasts)
        except MessageError as error:
            logger.warning("site %r refuses round %d: %s", self.name, frame.serial, error)
            raise _Refused("invalid") from None
        except BudgetExceeded as error:
            logger.warning("site %r refuses round %d: %s", self.name, frame.serial, error)
            raise _Refused("budget") from None
        except Exception as error:  # a hostile request may raise anything; nothing is saved yet
            logger.exception("site %r cannot take round %d", self.name, frame.serial)
            raise _Refused("invalid") from error
        snapshot = self._snapshot(state)
        event = Requested(
            instance=frame.instance,
            serial=frame.serial,
            request=digest,
            content=request_content(frame),
            tag=frame.tag,
            broadcasts=frame.broadcasts,
            state=snapshot,
        )
        self._append(event)
        self._trials.note(event)
        self._request, self._replied, self._state = event, None, self._loaded(snapshot)
        self.log.keep([snapshot])
        return event

    def _go_on(self, last: Requested, defer: bool) -> bytes:
        """The reply to the last request, after its evaluation if there is an objective."""
        if self.objective is not None:
            while self.agent.wants(self._state):
                batch = self._trials.batches[0] if self._trials.batches else self._chosen()
                if batch is None or not self._evaluated(batch):
                    break
        if self._replied is None:
            waits = self.agent.wants(self._state)
            if waits and not (defer and self.agent.defers):
                raise _Refused("busy")
            self._reply(last, waits)
        assert self._replied is not None
        return self.log.load(self._replied.reply)

    def _reply(self, last: Requested, waits: bool) -> None:
        """Make the reply, once."""
        try:
            state, message = self.agent.reply(self._state)
        except BudgetExceeded:
            raise _Refused("budget") from None
        try:
            body = encode(message, max_bytes=self._max_bytes)
        except MessageError as error:
            raise ProtocolError(f"Site {self.name!r} cannot send its reply: {error}") from error
        data = encode(
            Reply(
                bytes.fromhex(last.request),
                body,
                waits,
                () if self.ledger is None else self.ledger.anchors(),
            ),
            max_bytes=self._max_bytes + FRAME_BYTES,
        )
        snapshot, reply = self._snapshot(state), self.log.snapshot(data)
        event = Replied(last.serial, last.request, reply, snapshot)
        self._append(event)
        self._replied, self._last_reply, self.sent = event, last.serial, carries(message)
        self._state = self._loaded(snapshot)
        self.log.keep([snapshot, reply])

    def _refusal(self, frame: Request | None, digest: str, code: RefusalCode) -> bytes:
        run, instance = (self.run, "") if frame is None else (frame.run, frame.instance)
        serial = 0 if frame is None else frame.serial
        last = self._request
        content, tag = ("", "") if last is None else (last.content, last.tag)
        return encode(
            Refusal(run, instance, self.name, serial, digest, code, self.serial, content, tag)
        )

    # -------------------------------------------------------------- the trial service

    def ask(self, n: int = 1) -> list[Trial]:
        """New trials to evaluate, `n` of them, or fewer where the budget ends.

        A trial that is open already is not given out again: `pending` lists those. Points differ
        from all that are open.
        """
        n = _whole(n, "n")
        if n < 1:
            raise InputDataError(f"Expected n >= 1 trials, got {n}.")
        with self._lock, one_thread() as self._threads:
            self._check_asked()
            with contextlib.suppress(_Refused):  # an agent that is not ready to choose
                while len(self._free()) < n and self._chosen() is not None:
                    pass
            trials = tuple(self._free()[:n])
            if trials:
                self._hand(trials)
            return [trial for trial in self.pending() if trial.id in trials]

    def tell(
        self,
        id: int,
        value: float | Mapping[str, float] | None = None,
        sem: float | Mapping[str, float] | None = None,
        *,
        fidelity: float | None = None,
        curve: Mapping[float, float] | None = None,
    ) -> Trial:
        """Answer an open trial.

        Args:
            id: The trial's number.
            value: The outcome as measured, or a mapping from the names of all outcomes to them;
                None for the last of `curve`.
            sem: The standard error of the value, in the same form. Where every result of the site
                has one, the default searches take these for the noise; otherwise, and by other
                searches, the noise is learnt from the outcomes.
            fidelity: Where the evaluation ended, in a space with a fidelity; default where it was
                asked for, or with `curve` alone its last fidelity. A trial that was stopped early
                costs what it has reached, and its values are observations like others.
            curve: Outcomes on the way, from fidelity to outcome.

        Example:
            >>> site.tell(7, curve={1: 0.9, 3: 0.5, 9: 0.4})  # stopped after nine epochs
        """
        id, error = _whole(id, "id"), self._errors(sem, self.agent.tell)
        row = None if value is None else self._outcomes(value, "value")
        if fidelity is not None or curve is not None:
            number = None if row is None else float(row)
            return self._tell_curve(id, number, error, fidelity, curve or {})
        if row is None:
            raise InputDataError("Expected a value, or a curve of values.")
        with self._lock, one_thread() as self._threads:
            self._check_open(id)
            self._observe((id,), row, error)
            return self._trial(self._trials.answers[-1])

    def _tell_curve(
        self,
        id: int,
        value: float | None,
        sem: Tensor | None,
        fidelity: float | None,
        curve: Mapping[float, float],
    ) -> Trial:
        values = self._curve(curve)
        with self._lock, one_thread() as self._threads:
            self._check_open(id)
            if value is not None:
                end = self._trials.batch_of(id).points([id])
                at = float(self.space.fidelities(end)) if fidelity is None else None
                values[self._fidelity(fidelity) if at is None else at] = value
            elif fidelity is not None and values and max(values) != self._fidelity(fidelity):
                raise InputDataError(
                    f"The curve does not end at fidelity {fidelity:g}: leave fidelity out, or give "
                    "the value there."
                )
            if not values:
                raise InputDataError("Expected a value, or a curve of values, got none.")
            self._reach(id, values, sem)
            return self._trial(self._trials.answers[-1])

    def _curve(self, curve: Mapping[float, float]) -> dict[float, float]:
        """Outcomes by the column of the fidelity."""
        if self.space.fidelity is None:
            raise InputDataError(
                "The search space names no fidelity, so that a trial has one value: write "
                "SearchSpace(…, fidelity=Fidelity(…)), or leave fidelity and curve out."
            )
        if not isinstance(curve, Mapping):
            raise InputDataError(
                f"Expected curve as a mapping from fidelity to outcome, got {type(curve).__name__}."
            )
        return {self._fidelity(at): float(self._outcomes(y, "value")) for at, y in curve.items()}

    def _fidelity(self, value: Any) -> float:
        """The column of a fidelity."""
        with contextlib.suppress(ValueError, RuntimeError, AttributeError):  # refused below
            value = value.item()
        try:
            return self.space.fidelity_column(value)
        except TypeError:
            raise InputDataError(
                f"Expected a fidelity as a number, got {type(value).__name__}."
            ) from None

    def fail(self, id: int, reason: str = "") -> Trial:
        """Say that an open trial has no value; its point is not asked again.

        Args:
            id: The trial's number.
            reason: Why, for the site's own report.
        """
        id = _whole(id, "id")
        with self._lock, one_thread() as self._threads:
            self._check_open(id)
            self._fail((id,), reason)
            return self._trial(self._trials.answers[-1])

    def attach(
        self,
        parameters: Mapping[str, Value] | Tensor,
        value: float | Mapping[str, float],
        sem: float | Mapping[str, float] | None = None,
        *,
        label: str = "",
    ) -> Trial:
        """Add a result that exists already. It counts as data, not as an evaluation.

        One that violates a constraint of the search space is data too, with a warning; `best` does
        not count it.

        Args:
            parameters: Named values in the user's units, or a point of the unit cube, `1 x d`.
            value: As in `tell`.
            sem: As in `tell`.
            label: A name for it. A result of a name that is there already is not added again.
        """
        if not isinstance(label, str) or len(label) > MAX_REASON or not _printable(label) == label:
            raise InputDataError(
                f"Expected a label of at most {MAX_REASON} printable characters, got "
                f"{_printable(repr(label))[:60]}."
            )
        X, row = self._one_point(parameters), self._outcomes(value, "value")
        error = self._errors(sem, self.agent.attach)
        with self._lock, one_thread() as self._threads:
            known = next((a for a in self._trials.answers if label and a.label == label), None)
            if known is not None:
                return self._trial(known)
            event = Attached(self._trials.count, X, row, error, label)
            state = self._with_attached(event)
            self._append(event)
            self._trials.note(event)
            self._state = state
            return self._trial(self._trials.answers[-1])

    def pending(self) -> list[Trial]:
        """The trials that are open."""
        with self._lock:
            return [
                Trial(number, self._parameters(batch.points([number])), round=batch.serial)
                for batch in self._trials.batches
                for number in batch.open
            ]

    def trials(self) -> list[Trial]:
        """All trials, by their numbers."""
        with self._lock:
            answered = [self._trial(answer) for answer in self._trials.answers]
            return sorted([*answered, *self.pending()], key=lambda trial: trial.id)

    def best(self) -> Trial | None:
        """The trial with the best value, attached results included; None without a value.

        A trial whose outcomes violate an outcome constraint is none, nor is an attached result
        that violates a constraint of the search space, nor a value below the target of a fidelity.

        Raises:
            InputDataError: There are several objectives, and so no best trial.
        """
        if len(self.space.objectives) > 1:
            names = [self.space.metrics[k].name for k in self.space.objectives]
            raise InputDataError(f"The space has the objectives {names}: use pareto() for best().")
        name, sign = self.space.outcome.name, -1.0 if self.space.outcome.minimize else 1.0
        return max(self._allowed(), key=lambda trial: sign * trial.values[name], default=None)

    def pareto(self) -> list[Trial]:
        """The trials that no other one beats in all objectives, attached results included.

        With one objective the best ones. Constraints count as in `best`.
        """
        trials = self._allowed()
        Y = torch.tensor([list(trial.values.values()) for trial in trials], dtype=torch.float64)
        front = self.space.front(Y.reshape(len(trials), len(self.space.metrics)))
        return [trial for trial, kept in zip(trials, front.tolist(), strict=True) if kept]

    def _allowed(self) -> list[Trial]:
        """The trials with values that meet all constraints."""
        trials = [trial for trial in self.trials() if trial.values]
        trials = [t for t in trials if self.space.broken_outcome([*t.values.values()]) is None]
        if self.space.feasible_set.constrained:
            trials = [t for t in trials if self.space.violated(t.parameters) is None]
        fidelity = self.space.fidelity
        if fidelity is not None:
            target = self.space.fidelity_value(1.0)
            trials = [t for t in trials if t.parameters[fidelity.name] == target]
        return trials

    def point(self, id: int) -> Tensor:
        """The point of an open trial in the unit cube, `1 x d`."""
        with self._lock:
            self._check_open(id)
            return self._trials.batch_of(id).points([id])

    @property
    def left(self) -> int:
        """How many trials can be chosen now beside those that are open, at least."""
        if self._request is None:
            return 0
        return self.agent.left(self._state, sum(len(batch.X) for batch in self._trials.batches))

    def take(self, id: int) -> None:
        """Note that an open trial was given to somebody, who will answer it."""
        id = _whole(id, "id")
        with self._lock:
            self._check_open(id)
            if id not in self._handed:
                self._hand((id,))

    def observations(self, start: int = 0) -> Sequence[Observation]:
        """The answered trials in the order of their answers, from one on."""
        return tuple(self._trials.answers[start:])

    @property
    def waiting(self) -> bool:
        """Whether the last request waits for an evaluation."""
        return self._request is not None and bool(self.agent.wants(self._state))

    def _check_asked(self) -> None:
        if self._request is None:
            raise ProtocolError(
                f"Site {self.name!r} has had no request from the hub yet, and so does not know "
                "what the others know: ask again when the hub has begun."
            )

    def _check_open(self, id: int) -> None:
        if any(id in batch.open for batch in self._trials.batches):
            return
        numbers = [trial.id for trial in self.pending()]
        known = next((trial for trial in self.trials() if trial.id == id), None)
        what = f"trial {id} is {known.status} already" if known else f"there is no trial {id}"
        raise InputDataError(f"Site {self.name!r}: {what}; open trials are {numbers}.")

    def _outcomes(self, value: object, what: str) -> Tensor:
        """A number for each outcome, `1 x m`."""
        names = [one.name for one in self.space.metrics]
        if isinstance(value, Mapping):
            if set(value) != set(names):
                of = f"the one outcome {names[0]!r}" if len(names) == 1 else f"each of {names}"
                raise InputDataError(f"Expected {what} of {of}, got {sorted(map(str, value))}.")
            numbers = [self._number(value[name], what, name) for name in names]
            return torch.tensor([numbers], dtype=torch.float64)
        if len(names) > 1:
            raise InputDataError(
                f"Expected {what} as a mapping with each of {names}, got {type(value).__name__}."
            )
        return torch.tensor([[self._number(value, what, names[0])]], dtype=torch.float64)

    def _number(self, value: object, what: str, name: str) -> float:
        if isinstance(value, Tensor | np.ndarray | np.generic):
            with contextlib.suppress(ValueError, RuntimeError):  # several numbers: refused below
                value = value.item()
        try:
            if isinstance(value, str | bytes | bool):
                raise TypeError
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        except (TypeError, ValueError, RuntimeError):
            raise InputDataError(
                f"Expected {what} as a number or as {{{name!r}: number}}, got "
                f"{type(value).__name__}."
            ) from None
        if not abs(number) <= MAX_VALUE:
            raise InputDataError(
                f"Expected a finite {what} up to {MAX_VALUE:g}, got {number}: a trial without a "
                "value is answered by `fail`."
            )
        return number

    def _errors(self, sem: object, told: Callable[..., Any]) -> Tensor | None:
        """Standard errors, `1 x m`, for a method of the agent; None if there are none."""
        if sem is None:
            return None
        errors = self._outcomes(sem, "sem")
        if float(errors.min()) < 0:
            raise InputDataError(f"Expected sem >= 0, got {float(errors.min())}.")
        try:
            inspect.signature(told).bind(None, None, None, None)
        except TypeError:
            raise InputDataError(
                f"Expected no sem, got {sem!r}: {type(self.agent).__name__}.{told.__name__} takes "
                "no standard errors. Give it a parameter `sem`, or leave them out."
            ) from None
        return errors

    def _one_point(self, parameters: object) -> Tensor:
        """The point `1 x d` of a result that exists."""
        d = self.space.dim
        if isinstance(parameters, Mapping):
            try:
                return self.space.to_unit([parameters])
            except (TypeError, ValueError, RuntimeError) as error:  # a value that is no number
                raise InputDataError(
                    f"Expected a value for each of the parameters {list(self.space.names)}, got "
                    f"{_printable(repr(dict(parameters)))[:200]}: {error}."
                ) from None
        if not isinstance(parameters, Tensor):
            raise InputDataError(
                f"Expected named parameters, or a tensor `1 x {d}` in the unit cube, got "
                f"{type(parameters).__name__}."
            )
        X = parameters.detach()
        if X.shape != (1, d) or X.is_complex() or not bool(((X >= 0) & (X <= 1)).all()):
            raise InputDataError(
                f"Expected one point of the unit cube, `1 x {d}`, got {X.dtype} of shape "
                f"{tuple(X.shape)}, or numbers beyond 0 and 1."
            )
        return X.double().cpu()

    def _trial(self, answer: Observation) -> Trial:
        return trial_of(answer, self.space)

    def _parameters(self, X: Tensor) -> dict[str, Value]:
        (parameters,) = self.space.from_unit(X)
        return parameters

    # -------------------------------------------------------------- choosing and answering

    def _free(self) -> list[int]:
        """Open trials that were not given to anybody, and are not being evaluated here."""
        taken = {*self._handed, *self._running}
        opened = [number for batch in self._trials.batches for number in batch.open]
        return [number for number in opened if number not in taken]

    def _chosen(self) -> Batch | None:
        """A new batch, None if there is nothing to evaluate."""
        X = self.agent.ask(self._state, self._waiting())
        if isinstance(X, Pending):
            raise _Refused("busy")
        if X is None:
            return None
        if X.dim() != 2 or X.dtype != torch.float64 or len(X) == 0:
            raise ProtocolError(
                f"The agent of site {self.name!r} must ask for `q x d` float64 points, got shape "
                f"{tuple(X.shape)} and {X.dtype}."
            )
        if not bool(torch.isfinite(X).all()):
            raise ProtocolError(f"The agent of site {self.name!r} asks for a point with NaN.")
        event = Asked(self._trials.count, self.serial, X.detach())
        self._append(event)
        self._trials.note(event)
        return self._trials.batches[-1]

    def _waiting(self) -> Tensor:
        """The points of all batches that are not answered yet."""
        empty = torch.zeros(0, self.space.dim, dtype=torch.float64)
        return torch.cat([empty, *(batch.X for batch in self._trials.batches)])

    def _hand(self, trials: tuple[int, ...]) -> None:
        event = Handed(trials)
        self._append(event)
        self._handed.update(trials)

    def _collect(self) -> None:
        """Evaluate, or go on to evaluate, what is open and not in anybody's hands."""
        while self.objective is not None and self._trials.batches:
            if not self._evaluated(self._trials.batches[0]):
                return

    def _evaluated(self, batch: Batch) -> bool:
        """Have the objective answer the free trials of a batch; whether none is open then.

        A batch in which somebody has trials in hand waits for that answer.
        """
        while trials := self._due(batch):
            if not self._evaluate(batch, trials):
                return False
        return batch.answered

    def _due(self, batch: Batch) -> list[int]:
        """The trials that the objective evaluates next: those that it has begun, if any is open."""
        still_open = set(batch.open)
        if still_open.intersection(self._running):
            return list(self._running)
        free = [trial for trial in batch.open if trial not in self._handed]
        at_once = batch.together and getattr(self.objective, "in_batches", False)
        return free if at_once else free[:1]  # each is in the log when it ends

    def _evaluate(self, batch: Batch, trials: list[int]) -> bool:
        """Call the objective and note what it says; False while it is running."""
        assert self.objective is not None
        X = batch.points(trials)
        self._running = ()
        try:
            with threads(self._threads):
                answer = self.objective(X.clone())
            if isinstance(answer, Curve):
                curve = self._checked_curve(X, answer)
            elif self._has_worked and not isinstance(answer, Pending):
                self._checked(X, answer)  # of another shape than before: a failure of this point
        except Exception as error:
            if self._raises:
                raise
            if len(trials) > 1:  # one of them at a time: the others may have values
                batch.together = False
                return True
            self._check_hope(error)
            reason = f"{type(error).__name__}: {error}"
            logger.warning("site %r: an evaluation has failed: %s", self.name, reason)
            logger.debug("the error of site %r", self.name, exc_info=True)
            self._fail(tuple(trials), reason)
            return True
        if isinstance(answer, Pending):
            self._running = tuple(trials)
            return False
        if isinstance(answer, Curve):
            if trials[0] in batch.open:  # somebody may have answered it meanwhile
                self._reach(trials[0], curve, None)
            return True
        Y = self._checked(X, answer)
        still_open = set(batch.open)  # somebody may have answered a trial meanwhile
        rows = [row for row, trial in enumerate(trials) if trial in still_open]
        good = (Y.abs() <= MAX_VALUE).all(dim=-1).tolist()  # false for NaN
        fine = [row for row in rows if good[row]]
        bad = [trials[row] for row in rows if not good[row]]
        if fine:
            self._observe(tuple(trials[row] for row in fine), Y[fine], None)
        if bad:
            strange = ValueError(f"the value is NaN, infinite or beyond {MAX_VALUE:g}")
            self._check_hope(strange)
            self._fail(tuple(bad), str(strange))
        return True

    def _checked(self, X: Tensor, answer: object) -> Tensor:
        return checked_values(X, answer, tuple(one.name for one in self.space.metrics))

    def _checked_curve(self, X: Tensor, answer: Curve) -> dict[float, float]:
        """An objective's curve of one point."""
        if len(X) != 1:
            raise ProtocolError(
                f"An objective returns a Curve for one point, got one for {len(X)}: leave "
                "in_batches out."
            )
        values = self._curve(answer.values)
        if not values:
            raise ProtocolError("The objective has returned a Curve without a value.")
        return values

    @property
    def _has_worked(self) -> bool:
        """Whether an evaluation has a value."""
        return any(answer.status == "completed" for answer in self._trials.answers)

    def _check_hope(self, error: Exception) -> None:
        """Raise if an objective has failed from the first evaluation on: it is broken."""
        failed = [answer for answer in self._trials.answers if answer.status == "failed"]
        broken = isinstance(error, BROKEN)
        count = len(failed) + 1
        if count < (HOPELESS if broken else UNLUCKY) or self._has_worked:
            return
        last = f"{type(error).__name__}: {error}".rstrip(".")
        cure = "" if broken else ", or return a poor value where it cannot succeed,"
        raise ObjectiveError(
            f"The objective of site {self.name!r} has failed at its first {count} points, the last "
            f"time with {last}. Mend it{cure} and go on: the failures before this one are "
            "recorded, and this point is asked again."
        ) from error

    def _observe(self, trials: tuple[int, ...], Y: Tensor, sem: Tensor | None) -> None:
        event = Observed(trials, Y, sem)
        self._append(event)
        self._answered(event)

    def _reach(self, trial: int, values: Mapping[float, float], sem: Tensor | None) -> None:
        """Answer a trial with outcomes by the column of the fidelity."""
        columns = sorted(values)
        outcomes = [values[column] for column in columns]
        at, Y = torch.tensor([columns, outcomes], dtype=torch.float64).unsqueeze(-1)
        event = Reached(trial, at, Y, sem)
        self._append(event)
        self._answered(event)

    def _fail(self, trials: tuple[int, ...], reason: str) -> None:
        event = Failed(trials, _printable(str(reason))[:MAX_REASON])
        self._append(event)
        self._answered(event)

    # -------------------------------------------------------------- the log

    def _append(self, event: Any) -> None:
        _ = self.token
        self.log.append(event)

    def _open(self) -> None:
        """The state that the log leads to."""
        self._state = self.agent.start()
        if not len(self.log):
            return
        joined = self.log[0]
        mine = self.run, self.name, self.agent.fingerprint
        if not isinstance(joined, Joined):
            raise ProtocolError(f"{self.log!r} does not begin as a site's log does.")
        if (joined.run, joined.agent, joined.fingerprint) != mine:
            raise ProtocolError(
                f"The log is of agent {joined.agent!r} in run {joined.run!r} with settings "
                f"{joined.fingerprint[:12]}…, not of {self.name!r} in {self.run!r} with "
                f"{mine[2][:12]}…: use the settings that it was made with."
            )
        events = list(self.log)
        saved = [i for i, event in enumerate(events) if isinstance(event, Requested | Replied)]
        last = saved[-1] if saved else 0
        for place, event in enumerate(events):
            self._happened(event, tells=place > last)
            if place == last and saved:
                self._state = self._loaded(event.state)
        kept = [] if not saved else [events[last].state]
        if self._replied is not None:
            kept.append(self._replied.reply)
        for digest in kept:
            self.log.load(digest)
        self.log.keep(kept)

    def _happened(self, event: Any, *, tells: bool) -> None:
        match event:
            case Requested():
                self._request, self._replied = event, None
                self._trials.note(event)
            case Replied():
                self._replied, self._last_reply = event, event.serial
            case Asked():
                self._trials.note(event)
            case Handed():
                self._handed.update(event.trials)
            case Observed() | Failed() | Reached():
                self._answered(event, tells=tells)
            case Attached():
                self._trials.note(event)
                if tells:
                    self._state = self._with_attached(event)

    def _answered(self, event: Observed | Failed | Reached, *, tells: bool = True) -> None:
        """Note answers, and tell the agent of a batch that is complete."""
        for batch in self._trials.note(event):
            if tells:
                self._state = self._with_told(batch)

    def _with_told(self, batch: Batch) -> Any:
        """The agent's state with the answers of a batch."""
        given = (batch.ended.clone(), batch.Y.clone())
        if batch.sem is None:
            state = self.agent.tell(self._state, *given)
        else:
            state = self.agent.tell(self._state, *given, batch.sem.clone())
        for X, Y in batch.curves:
            state = self.agent.tell_curve(state, X.clone(), Y.clone())
        return state

    def _with_attached(self, event: Attached) -> Any:
        """The agent's state with results that were not asked for."""
        given = (event.X.clone(), event.Y.clone())
        if event.sem is None:
            return self.agent.attach(self._state, *given)
        return self.agent.attach(self._state, *given, event.sem.clone())

    def _snapshot(self, state: Any) -> str:
        try:
            return self.log.snapshot(encode(state, max_bytes=STATE_BYTES))
        except MessageError as error:
            raise ProtocolError(f"Site {self.name!r} cannot save its state: {error}") from error

    def _loaded(self, digest: str) -> Any:
        try:
            data = self.log.load(digest)
            return decode(data, self.agent.state_type, max_bytes=STATE_BYTES, own=True)
        except MessageError as error:
            raise ProtocolError(
                f"The state of site {self.name!r} cannot be read: {error} Another version "
                "or program has written it: go on with that one, or begin a new run in a new "
                "folder and attach the results."
            ) from error


def _whole(value: object, what: str) -> int:
    """A whole number, also numpy's."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputDataError(
            f"Expected {what} as a whole number, got {_printable(repr(value))[:40]}."
        ) from None


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text))


def request_content(frame: Request) -> str:
    """Hash of what a request asks for, over which the server's seal is made."""
    return content_hash(encode_names(*frame.broadcasts) + frame.body)


def encode_names(*names: str) -> bytes:
    """Names in one string of bytes, from which they can be told apart."""
    return b"".join(len(name.encode()).to_bytes(8, "little") + name.encode() for name in names)


@cache
def _controller() -> ThreadpoolController:
    """That of the libraries behind numpy and scipy, which must be loaded before it looks."""
    import scipy.linalg  # noqa: F401 - costs 50 ms to import

    return ThreadpoolController()


@contextlib.contextmanager
def threads(count: int) -> Iterator[int]:
    """PyTorch, and the libraries behind numpy, on so many threads; yields how many PyTorch had."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with _controller().limit(limits=count):
            yield before
    finally:
        torch.set_num_threads(before)


def one_thread() -> contextlib.AbstractContextManager[int]:
    """Protocols compute on one thread: the bits of a factorisation depend on how many there are."""
    return threads(1)


def checked_values(X: Tensor, Y: object, names: tuple[str, ...] = ("objective",)) -> Tensor:
    """An objective's answer as a `q x m` float64 tensor, or `ProtocolError`.

    Args:
        X: The points, `q x d`.
        Y: The answer: a tensor or an array, a number where `q = m = 1`, or a mapping from names to
            `q` values each.
        names: Of the outcomes, `m`.
    """
    q, m = len(X), len(names)
    if isinstance(Y, Mapping):
        if set(Y) != set(names):
            raise ProtocolError(
                f"The objective must return values of {list(names)}, got {sorted(map(str, Y))}."
            )
        return torch.cat([checked_values(X, Y[name]) for name in names], dim=-1)
    shapes = ((q, m), *([(q,)] if m == 1 else []), *([(m,)] if q == 1 else []))
    if q == m == 1:
        shapes = ((), *shapes)
    if isinstance(Y, np.ndarray | np.number) and np.iscomplexobj(Y):
        Y = torch.as_tensor(Y)  # numpy would drop a part
    if isinstance(Y, float | np.ndarray | np.number) or type(Y) is int:
        with contextlib.suppress(OverflowError, ValueError, TypeError):  # then it is refused below
            Y = torch.as_tensor(np.asarray(Y, dtype=np.float64))
    if not isinstance(Y, Tensor) or Y.shape not in shapes:
        got = tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__
        columns = f", a column for each of {list(names)}," if m > 1 else ""
        raise ProtocolError(
            f"The objective must return a tensor of shape ({q}, {m}){columns} for {q} points, or "
            f"Pending() while it is running; got {got}. Standard errors are given by "
            "Site.tell(id, value, sem)."
        )
    if Y.is_complex():
        raise ProtocolError("The objective must return real numbers, got complex ones.")
    Y = Y.detach().double().cpu().reshape(q, m)
    return Y.clone()
