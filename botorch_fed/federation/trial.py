r"""Trials of a site, and the events of its log.

A trial has a number and a point. It is *open* until it is answered, with a value or with the reason
of its failure. `Trial` is the user's view, with named parameters in the user's units; the other
classes are the events of a site's log.

::

    Joined       the run and the agent of the log
    Requested    a request of the hub was received
    Asked        a batch of points was chosen, one trial each
    Handed       open trials were given to an evaluator
    Observed     trials have values
    Reached      a trial has values at its fidelity and lower ones, or was stopped early
    Failed       trials have failed
    Attached     results that were not asked for
    Replied      the reply to the last request was made, and may have been sent

The agent is told a batch when all of its trials are answered. `Trials` folds the events into
batches and observations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import ProtocolError
from botorch_fed.space import SearchSpace, Value

MAX_VALUE = 1e30  # largest outcome: sums of squares of larger ones may overflow
MAX_REASON = 500  # stored characters of a reason
TrialStatus = Literal["open", "completed", "failed", "attached"]


@dataclass(frozen=True)
class Trial:
    """One point of a site, and its result.

    Attributes:
        id: Its number at this site, from 0.
        parameters: Named values in the user's units.
        status: ``"open"`` until it is answered; ``"completed"``; ``"failed"``; or ``"attached"``
            for a result that was not asked for.
        value: The objective as measured; None where there are several, see `values`.
        sem: The standard error of the value, if given.
        reason: The reason of a failure.
        round: The last round of the hub before the point was chosen; 0 before the first.
        label: The user's name of an attached result.
        values: All outcomes as measured, by name; empty without any.
        sems: Their standard errors, if given.
        curve: Values on the way to the fidelity of `parameters`, ascending: pairs of a lower
            fidelity and an outcome.
    """

    id: int
    parameters: Mapping[str, Value]
    status: TrialStatus = "open"
    value: float | None = None
    sem: float | None = None
    reason: str = ""
    round: int = 0
    label: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    sems: Mapping[str, float] = field(default_factory=dict)
    curve: tuple[tuple[float, float], ...] = ()


# ------------------------------------------------------------------ events of a site's log


@dataclass(frozen=True)
class Joined:
    """The first event: the run, the agent, a hash of its settings, and a random name of the log."""

    run: str
    agent: str
    fingerprint: str
    token: str


@dataclass(frozen=True)
class Requested:
    """A request was received.

    Attributes:
        instance: The start of the run that the request belongs to.
        serial: The round.
        request: Hash of the request's bytes.
        content: Hash of the request's content.
        tag: The server's seal on the content.
        broadcasts: Hashes of the public blobs in force.
        state: Hash of the snapshot of the agent's state after the request.
    """

    instance: str
    serial: int
    request: str
    content: str
    tag: str
    broadcasts: tuple[str, ...]
    state: str


@dataclass(frozen=True, eq=False)
class Asked:
    """Points `q x d` were chosen in a round: the trials from number `first` on."""

    first: int
    serial: int
    X: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if self.X.dim() != 2 or self.X.dtype != torch.float64 or len(self.X) == 0:
            raise InputDataError(
                f"Expected `q x d` float64 points, got {self.X.dtype} of shape "
                f"{tuple(self.X.shape)}."
            )


@dataclass(frozen=True)
class Handed:
    """Open trials were given to an evaluator."""

    trials: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Observed:
    """Trials have values `n x m`; `sem` are their standard errors, `n x m`, without NaN."""

    trials: tuple[int, ...]
    Y: Tensor = field(repr=False)
    sem: Tensor | None = field(repr=False, default=None)

    def __post_init__(self) -> None:
        _check_rows(len(self.trials), self.Y)


@dataclass(frozen=True, eq=False)
class Reached:
    """A trial has values `n x 1` at ascending fidelities: the last one is where it ended.

    Attributes:
        trial: Its number.
        columns: The fidelities, as columns of the unit cube, `n x 1`.
        Y: The outcomes as measured.
        sem: The standard error of the last one, `1 x 1`, if given.
    """

    trial: int
    columns: Tensor = field(repr=False)
    Y: Tensor = field(repr=False)
    sem: Tensor | None = field(repr=False, default=None)

    def __post_init__(self) -> None:
        for column in (self.columns, self.Y):
            if column.dim() != 2 or len(column) == 0:
                raise InputDataError(f"Expected values `n x 1`, got {tuple(column.shape)}.")
            _check_rows(len(self.Y), column)


@dataclass(frozen=True)
class Failed:
    """Trials have failed, for a reason that stays at the site."""

    trials: tuple[int, ...]
    reason: str = field(repr=False)


@dataclass(frozen=True, eq=False)
class Attached:
    """Results `n x d`, `n x m` that were not asked for: the trials from number `first` on."""

    first: int
    X: Tensor = field(repr=False)
    Y: Tensor = field(repr=False)
    sem: Tensor | None = field(repr=False, default=None)
    label: str = ""

    def __post_init__(self) -> None:
        _check_rows(len(self.X), self.Y)


@dataclass(frozen=True)
class Replied:
    """A reply was made: hashes of the snapshots of its bytes and of the state after it."""

    serial: int
    request: str
    reply: str
    state: str


SITE_EVENTS = (Joined, Requested, Asked, Handed, Observed, Failed, Attached, Replied, Reached)


@dataclass(frozen=True, eq=False)
class Observation:
    """An answered trial in results.

    Attributes:
        trial: Its number.
        query: The number of its batch, from 1; 0 if it was attached.
        serial: The round in which its point was chosen.
        X: The point in the unit cube, `1 x d`.
        Y: The outcomes as measured, `1 x m`; empty, `0 x m`, if it failed.
        sem: Their standard errors, `1 x m`, if given.
        status: The status of the trial.
        reason: The reason of a failure.
        label: The user's name of an attached result.
        curve: Columns of lower fidelities and the outcomes there, ascending.
    """

    trial: int
    query: int
    serial: int
    X: Tensor = field(repr=False)
    Y: Tensor = field(repr=False)
    sem: Tensor | None = field(repr=False, default=None)
    status: TrialStatus = "completed"
    reason: str = ""
    label: str = ""
    curve: tuple[tuple[float, float], ...] = ()


def trial_of(answer: Observation, space: SearchSpace) -> Trial:
    """An answered trial as users see it.

    Args:
        answer: The trial in results.
        space: The map of inputs and outcomes.
    """
    values, sems = (
        {} if rows is None or not len(rows) else space.by_name(rows[0].tolist())
        for rows in (answer.Y, answer.sem)
    )
    one = space.outcome.name if len(space.objectives) == 1 else ""
    (parameters,) = space.from_unit(answer.X)
    return Trial(
        answer.trial,
        parameters,
        answer.status,
        values.get(one),
        sems.get(one),
        answer.reason,
        answer.serial,
        answer.label,
        values,
        sems,
        tuple((space.fidelity_value(at), y) for at, y in answer.curve),
    )


class Batch:
    """Points that were chosen together, and their answers so far.

    Args:
        asked: The event.
        number: The number of the batch, from 1.
        num_outcomes: How many values an evaluation has.

    Attributes:
        together: Whether an objective that takes batches gets all points in one call; after a
            failure it gets one point at a time.
        ended: The points where evaluations ended, `q x d`: those that were asked, but for
            fidelities.
        curves: Points and outcomes at lower fidelities, of each trial that has them.
    """

    def __init__(self, asked: Asked, number: int, num_outcomes: int = 1) -> None:
        self.number = number
        self.first, self.serial, self.X = asked.first, asked.serial, asked.X
        self.Y = torch.full((len(asked.X), num_outcomes), math.nan, dtype=torch.float64)
        self._sem = self.Y.clone()
        self.together = True
        self.ended = asked.X.clone()
        self.curves: list[tuple[Tensor, Tensor]] = []
        self._open = set(range(asked.first, asked.first + len(asked.X)))

    @property
    def open(self) -> list[int]:
        """The numbers of the open trials."""
        return sorted(self._open)

    @property
    def answered(self) -> bool:
        """Whether all trials are answered."""
        return not self._open

    def points(self, trials: list[int]) -> Tensor:
        """The points of some of its trials."""
        return self.X[[trial - self.first for trial in trials]]

    @property
    def sem(self) -> Tensor | None:
        """Standard errors of the answers, `q x m`, NaN where there is none; None without any."""
        return None if bool(self._sem.isnan().all()) else self._sem

    def answer(self, trial: int, values: Tensor | None, sem: Tensor | None = None) -> None:
        """Record values `m` and their standard errors, None if the trial has failed."""
        self._open.remove(trial)
        self.Y[trial - self.first] = math.nan if values is None else values
        if sem is not None:
            self._sem[trial - self.first] = sem


class Trials:
    """The trials of a site: the fold of the events of its log.

    Args:
        space: The map of inputs and outcomes.

    Attributes:
        batches: Those that are not answered yet.
        answers: The answered trials, in the order in which the answers came.
        count: The number of trials.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.batches: list[Batch] = []
        self.answers: list[Observation] = []
        self.count = 0
        self._space = space
        self._queries = 0  # number of batches
        self._serial = 0  # last request

    def note(self, event: Any) -> list[Batch]:
        """Take an event of the log; the batches that it has completed."""
        match event:
            case Requested():
                self._serial = event.serial
            case Asked():
                self._queries += 1
                self.batches.append(Batch(event, self._queries, len(self._space.metrics)))
                self.count = event.first + len(event.X)
            case Attached():
                self._attach(event)
            case Observed() | Failed() | Reached():
                return self._answer(event)
        return []

    def batch_of(self, trial: int) -> Batch:
        """The batch of an open trial."""
        for batch in self.batches:
            if trial in batch.open:
                return batch
        raise ProtocolError(
            f"The log answers trial {trial}, which is not open: it is no log of a site, or two "
            "sites have written to it."
        )

    def _answer(self, event: Observed | Failed | Reached) -> list[Batch]:
        trials = (event.trial,) if isinstance(event, Reached) else event.trials
        complete = []
        for row, number in enumerate(trials):
            batch = self.batch_of(number)
            X, none = batch.points([number]), batch.Y[:0]
            if isinstance(event, Observed):
                sem = None if event.sem is None else event.sem[row : row + 1]
                batch.answer(number, event.Y[row], sem)
                Y = event.Y[row : row + 1]
                found = Observation(number, batch.number, batch.serial, X, Y, sem)
            elif isinstance(event, Reached):
                found = self._ended(batch, event)
            else:
                batch.answer(number, None)
                found = Observation(
                    number, batch.number, batch.serial, X, none, None, "failed", event.reason
                )
            self.answers.append(found)
            if batch.answered:
                self.batches.remove(batch)
                complete.append(batch)
        return complete

    def _ended(self, batch: Batch, event: Reached) -> Observation:
        """Note the values of a curve."""
        point = self._space.configurations(batch.points([event.trial]))
        columns = event.columns.flatten()
        X = self._space.at_fidelity(point.expand(len(columns), -1), columns)
        batch.answer(event.trial, event.Y[-1], event.sem)
        batch.ended[event.trial - batch.first] = X[-1]
        if len(X) > 1:
            batch.curves.append((X[:-1], event.Y[:-1]))
        return Observation(
            event.trial,
            batch.number,
            batch.serial,
            X[-1:],
            event.Y[-1:],
            event.sem,
            curve=tuple(zip(columns[:-1].tolist(), event.Y[:-1, 0].tolist(), strict=True)),
        )

    def _attach(self, event: Attached) -> None:
        for row in range(len(event.X)):
            sem = None if event.sem is None else event.sem[row : row + 1]
            found = Observation(
                event.first + row,
                0,
                self._serial,
                event.X[row : row + 1],
                event.Y[row : row + 1],
                sem,
                "attached",
                "",
                event.label,
            )
            self.answers.append(found)
        self.count = event.first + len(event.X)


def _check_rows(count: int, Y: Tensor) -> None:
    if Y.dim() != 2 or len(Y) != count or not Y.shape[1] or Y.dtype != torch.float64:
        raise InputDataError(
            f"Expected a `{count} x m` float64 tensor of outcomes, got {Y.dtype} of shape "
            f"{tuple(Y.shape)}."
        )
