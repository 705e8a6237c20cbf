r"""Study files: a run of any objective, written in TOML.

::

    objective = "tuning:score"      # score(agent: str, **parameters) -> float
    agents = ["north", "south", "west"]
    budget = 12                     # evaluations of each agent, the initial ones included
    seed = 0

    [space]
    C = { type = "real", lower = 1e-3, upper = 1e3, log = true }
    depth = { type = "integer", lower = 1, upper = 8 }
    kernel = { type = "choice", values = ["rbf", "linear"] }
    size = { type = "choice", values = [16, 32, 64], log = true }    # numbers and booleans are
                                    # ordered, texts with ordered = true
    folds = { type = "fixed", value = 5 }
    constraints = ["depth + size / 8 <= 12"]        # linear, with <=, >= or ==
    feasible = "tuning:fits"        # fits(point: dict) -> bool: known, cheap, the same at all sites
    fidelity = { parameter = "epochs", fixed = 2 }   # epochs is a parameter: evaluations with fewer
                                    # are cheaper, budget counts those with the most. fixed: what a
                                    # run costs beside them, in epochs; default 0

    [outcome]                       # public guesses, never statistics of data
    centre = 0.9
    scale = 0.1
    minimize = false

    [outcomes]                      # instead: several, by the names that the objective returns
    error = { minimize = true }     # an objective; of several each may have a reference = 0.5,
                                    # the worst value that counts in a hypervolume
    latency = { upper = 20.0 }      # with lower, upper or both: an outcome constraint
    energy = { role = "tracking" }  # recorded only

    [protocol]
    name = "dp-fts-de"              # fts, dp-fts-de, fed-gp, private-ucb or federation; or
    num_initial = 4                 # module:Name of a study class. Any of its simple settings:
                                    # botorch-fed protocols dp-fts-de lists them

    [protocol.strategy]             # of fts and dp-fts-de: the published way to use messages, or
    schedule = { kind = "polynomial", c = 0.5 }

    [privacy]                       # for dp-fts-de, private-ucb and fed-gp with a mechanism
    epsilon = 2.0
    delta = 1e-5

The other keys are `workers`, `out` (relative to the file), `channel` (of fed-gp, or dp-fts-de with
trust = "distributed": "threshold", "ckks" or "plain"), `[identities]` (of both with "threshold",
across machines: for every agent the key that `botorch-fed site identity` prints),
`[protocol.search]` (of fed-gp; its `kind` is "transfer", "support" or "region"), and `[ledger]`
with `path`, `epsilon` and `delta`: a durable ledger from which several runs pay. A `schedule` is
``"inverse-square"`` or a table of kind ``"polynomial"`` with `c` or ``"constant"`` with `p`. What
else is no plain number::

    [protocol]
    candidates = 500                # the only points: so many public Sobol points, or the name
                                    # of a CSV file beside this one, a column per parameter
    initial_design = 3              # but of private-ucb: every agent begins with so many public
                                    # points, the centre and then others than its peers
    default = { C = 1.0, depth = 3, kernel = "rbf" }   # instead: what one has used so far, which
                                    # every agent evaluates first; not with a published search

    [protocol.feature_map]          # the shared basis, if the protocol has one
    kind = "rff"                    # or "inducing" (Sobol points), both with num_features,
    num_features = 100              # or "qff", with tol = 1e-3
    kernel = "se"                   # or matern12, matern32, matern52
    lengthscale = 0.2               # of the unit cube; or a list, one per column
    outputscale = 1.0               # the prior variance, on the public scale of outcomes

    [protocol.mechanism]            # fed-gp with search.kind = "support": noise from [privacy]
    kind = "distributed-gaussian"   # agents are protected, every agent adds its share;
    clip_norm = 20.0                # "gaussian": the server adds it (channel = "plain")

Without `[privacy]` a mechanism needs its `noise_multiplier`.

A search and an aggregation, of the package or of a module, are put together by name. Their simple
settings stand beside `kind`; a setting that is a dataclass is a table in turn::

    [protocol]
    name = "federation"
    aggregation = "mine:Median"     # a class in mine.py beside the file; default "relay"

    [protocol.search]               # or search = "mine:RandomSearch"; default "transfer"
    kind = "mine:MedianTransfer"

    [protocol.search.strategy]
    warp = false

*The contract of an objective*: it is called as ``objective(agent, **parameters)`` with the name of
the agent and one keyword per parameter of the space, a float, an int, a str or a bool, and returns
one finite number on the scale on which the agent measures, or with `[outcomes]` a dict with one for
each of their names. In a space with a fidelity it may return a mapping from fidelity to value
instead: what it measured on the way, and where it ended, early or not. The module is looked for
beside the study file first.

Whatever does not fit is refused before anything is evaluated, with the line and what to write
instead. Lines are found by scanning the text, because TOML readers do not tell them.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import importlib
import inspect
import json
import math
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from botorch.exceptions.errors import BotorchError, InputDataError
from torch import Tensor

from botorch_fed.acquisition import Constant, InverseSquare, MixingSchedule, Polynomial
from botorch_fed.errors import BudgetExceeded, FederatedError, ObjectiveError
from botorch_fed.federation.base import (
    MAX_NAME,
    AgentId,
    Curve,
    DealsPoints,
    Objective,
    secrets_in,
    with_stores,
)
from botorch_fed.federation.budget import Budgeted, renamed
from botorch_fed.federation.disclosure import Price, Sees, disclosed
from botorch_fed.federation.points import (
    allowed_candidates,
    spread_design,
    spread_points,
    tensor_hash,
)
from botorch_fed.federation.registry import (
    AGGREGATIONS,
    PROTOCOLS,
    SEARCHES,
    part_class,
    study_class,
)
from botorch_fed.federation.terms import Aggregation, Search
from botorch_fed.federation.trial import Trial
from botorch_fed.models import (
    FeatureMap,
    InducingFeatures,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    WarpedFeatures,
    sobol_support,
)
from botorch_fed.privacy import (
    Adjacency,
    Budget,
    DistributedGaussianSum,
    GaussianSum,
    PoissonSampling,
    SharedLedger,
    SignalWarning,
    noise_multiplier_for,
    noise_multiplier_within,
)
from botorch_fed.privacy.channels import check_identities
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, evaluations_of, run
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.transfer import LENGTHSCALE, TransferSearch
from botorch_fed.space import Fidelity, NamedCheck, Outcome, Parameter, SearchSpace, Value
from botorch_fed.storage.store import own_folder
from botorch_fed.studies import default_kernel

KEYS = (
    "objective",
    "agents",
    "budget",
    "seed",
    "workers",
    "out",
    "channel",
    "identities",
    "space",
    "outcome",
    "outcomes",
    "protocol",
    "privacy",
    "ledger",
)
# Entry points of packages that a file may name.
OBJECTIVES = "botorch_fed.objectives"
CLASSES = "botorch_fed.parts"  # study classes, searches and aggregations
BY_HAND = "ask"  # instead of an objective: a user answers the trials
OWN_KEYS = {"objective", "workers", "out", "ledger"}  # each machine's own
PARAMETER_KEYS = {
    "real": ("type", "lower", "upper", "log"),
    "integer": ("type", "lower", "upper", "log"),
    "choice": ("type", "values", "ordered", "log"),
    "fixed": ("type", "value"),
}
ONE_VALUE = str | bool | int | float  # of a parameter
CHOICES = tuple[str, ...] | tuple[bool, ...] | tuple[int, ...] | tuple[float, ...]
# Settings that are one of several dataclasses: tables with a kind.
PARTS = ("strategy", "search", "aggregation")
OPEN: dict[type[Any], Mapping[str, str]] = {Search: SEARCHES, Aggregation: AGGREGATIONS}
NESTED = (*PARTS, "candidates", "initial_design", "default", "feature_map", "mechanism")
# Settings of a study that have their own place in a file, or none.
ELSEWHERE = {"budget", "epsilon", "channel", "identities", "run", "noise_at", *PARTS}
IN_PYTHON = "cannot be written in a file: call botorch_fed.run.run from Python to set it."
SCHEDULES: dict[str, tuple[Callable[..., MixingSchedule], tuple[str, ...]]] = {
    "polynomial": (Polynomial, ("c",)),
    "constant": (Constant, ("p",)),
    "inverse-square": (InverseSquare, ()),
}
SMOOTHNESS = {"se": math.inf, "matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
MAP_KEYS = {"rff": "num_features", "qff": "tol", "inducing": "num_features"}
MECHANISM_KEYS = {
    "gaussian": ("clip_norm",),
    "distributed-gaussian": ("clip_norm", "colluding", "dropping", "adjacency"),
}
MEASURED_ROUNDS = 3
MOST_MEASURED = 20  # agents; with more the measurement takes too long for a plan


class StudyError(FederatedError):
    """A study file cannot be used; the message has file, line, key and fix."""


# ------------------------------------------------------------------ a file and its lines


class _Text:
    """Where keys are in a TOML text."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._lines: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), start=1):
            code = line.split(" #")[0].strip()
            if header := re.fullmatch(r"\[+([^\[\]]+)\]+", code):
                table = _dotted(header[1])
                self._add(table, number)
            elif pair := re.match(r"([\w\-.\"' ]+?)\s*=\s*(.*)", code):
                key = (*table, *_dotted(pair[1]))
                self._add(key, number)
                for inner in re.findall(r"[{,]\s*([\w\-]+)\s*=", pair[2]):
                    self._add((*key, inner), number)

    def _add(self, key: tuple[str, ...], number: int) -> None:
        for length in range(1, len(key) + 1):
            self._lines.setdefault(key[:length], number)

    def line(self, *key: str) -> int:
        """The line of a key, else that of the table it belongs in, else the first."""
        while key:
            if key in self._lines:
                return self._lines[key]
            key = key[:-1]
        return 1

    def error(self, key: tuple[str, ...], message: str) -> StudyError:
        """What is wrong with a key, and where."""
        name = f"{'.'.join(key)}: " if key else ""
        return StudyError(f"{self.path}:{self.line(*key)}: {name}{message}")


def _dotted(key: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in key.split("."))


class _Table:
    """A table of a file, whose values are taken by key and checked."""

    def __init__(self, text: _Text, key: tuple[str, ...], values: Any) -> None:
        self.text, self.key = text, key
        if not isinstance(values, dict):
            raise text.error(
                key, f"expected a table, got {_shown(values)}. Write [{'.'.join(key)}]."
            )
        self.values: dict[str, Any] = values

    def error(self, key: str, message: str) -> StudyError:
        """What is wrong with one of its keys."""
        return self.text.error((*self.key, key), message)

    def only(self, expected: Iterable[str], fix: Mapping[str, str] | None = None) -> None:
        """Refuse other keys, with what was meant perhaps."""
        expected = list(expected)
        for key in self.values:
            if key in expected:
                continue
            if fix and key in fix:
                raise self.error(key, fix[key])
            close = difflib.get_close_matches(key, expected, n=1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise self.error(
                key, f"unknown key.{meant} Expected one of: {', '.join(sorted(expected))}."
            )

    def get(self, key: str, hint: Any, example: str, default: Any = ...) -> Any:
        """A value of a type, or the default; without one the key is needed."""
        if key not in self.values:
            if default is ...:
                raise self.error(key, f"missing; expected {_words(hint)}. Write e.g. {example}.")
            return default
        try:
            return _checked(self.values[key], hint)
        except TypeError:
            got = _shown(self.values[key])
            close = _meant(self.values[key], hint)
            raise self.error(
                key, f"expected {_words(hint)}, got {got}.{close} Write e.g. {example}."
            ) from None

    def table(self, key: str) -> _Table:
        """A table in it; empty if it is not there."""
        return _Table(self.text, (*self.key, key), self.values.get(key, {}))

    @contextmanager
    def blamed(self, key: str | None = None) -> Iterator[None]:
        """What the package refuses in the body is the fault of a key, or of the whole table."""
        where = self.key if key is None else (*self.key, key)
        try:
            yield
        except (BotorchError, BudgetExceeded, ValueError) as error:
            raise self.text.error(where, str(error)) from error


# ------------------------------------------------------------------ simple types


def _simple(hint: Any) -> bool:
    """Whether a setting of this type can be written in a file."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_simple(part) for part in get_args(hint) if part is not NoneType)
    if origin is tuple:
        return all(_simple(part) for part in get_args(hint) if part is not ...)
    return origin is Literal or hint in (int, float, bool, str)


def _checked(value: Any, hint: Any) -> Any:
    """The value as the type wants it; `TypeError` if it is another."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for part in filter(_simple, parts):
            try:
                return _checked(value, part)
            except TypeError:
                continue
        raise TypeError
    if origin is Literal:
        if value in parts and isinstance(value, str):
            return value
        raise TypeError
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError
        return tuple(_checked(item, parts[0]) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise TypeError
    return value


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(part) for part in parts if _simple(part))
    if origin is Literal:
        return "one of " + ", ".join(f'"{part}"' for part in parts)
    if origin is tuple:
        return f"a list, each item {_words(parts[0])}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def _shown(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _meant(value: Any, hint: Any) -> str:
    if get_origin(hint) is not Literal or not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value, get_args(hint), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _example(key: str, hint: Any) -> str:
    parts = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) in (Union, UnionType):
        return _example(key, next(part for part in parts if _simple(part)))
    if get_origin(hint) is Literal:
        return f'{key} = "{parts[0]}"'
    if get_origin(hint) is tuple:
        return f"{key} = [{'0, 1' if parts[0] is int else ''}]"
    return f"{key} = " + {int: "4", float: "0.5", bool: "true", str: '"text"'}[hint]


@dataclass(frozen=True)
class Setting:
    """A setting of a study that a file can hold.

    Attributes:
        name: Its key in the table [protocol].
        expected: What may be written, in words.
        default: Its default, as a file has it; empty if there is none.
        doc: What it means, from the docstring of the class.
    """

    name: str
    expected: str
    default: str
    doc: str


def settings(kind: type[Any]) -> list[Setting]:
    """The settings of a study class that a file can hold in [protocol], tables not counted."""
    hints = {name: hint for name, hint in simple_settings(kind).items() if name not in ELSEWHERE}
    docs = _documented(kind)
    return [
        Setting(name, _words(hint), _written(_default_of(kind, name)), docs.get(name, ""))
        for name, hint in hints.items()
    ]


def _written(value: Any) -> str:
    if value is None or isinstance(value, tuple):
        return "" if value is None else str(list(value))
    return f'"{value}"' if isinstance(value, str) else _shown(value)


def _documented(kind: type[Any]) -> dict[str, str]:
    """The entries of a docstring's list of arguments, in one line each."""
    text = inspect.getdoc(kind) or ""
    section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    entries = re.split(r"^    (\w+): ", section[1] if section else "", flags=re.MULTILINE)
    pairs = zip(entries[1::2], entries[2::2], strict=True)
    return {name: " ".join(words.split()) for name, words in pairs}


def simple_settings(kind: type[Any]) -> dict[str, Any]:
    """The settings of a dataclass that a file can hold, with their types."""
    hints = get_type_hints(kind)
    refused: frozenset[str] = getattr(kind, "refused", frozenset())
    names = [item.name for item in fields(kind) if item.init and not item.name.startswith("_")]
    return {name: hints[name] for name in names if name not in refused and _simple(hints[name])}


# ------------------------------------------------------------------ functions that a file names


@dataclass(frozen=True, eq=False)
class _Code:
    """A function by its name in a file.

    Attributes:
        text: Of the file.
        key: Where the name stands.
        name: ``"package.module:function"``.
        signature: What it should be.
    """

    text: _Text
    key: tuple[str, ...]
    name: str
    signature: str

    def load(self) -> Callable[..., Any]:
        """The function; `StudyError` if it cannot be found."""
        module, _, name = self.name.partition(":")
        self.find()
        _look_beside(self.text.path)
        try:
            function = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise self._missing(f"there is no module {error.name!r}") from error
        except AttributeError as error:
            raise self._missing(f"the module {module!r} has no {name!r}") from error
        except Exception as error:
            raise self._missing(f"importing {module!r} failed ({error!r})") from error
        if not callable(function):
            raise self._missing(f"{self.name!r} is no function")
        source = getattr(sys.modules[module], "__file__", None)
        if not self._is_entry_point and not _below(source, self.text.path):
            raise self._missing(f"the module {module!r} that is loaded is {source}")
        found: Callable[..., Any] = function
        return found

    def find(self) -> None:
        """Raise `StudyError` unless there is such a function; nothing is imported."""
        if self._is_entry_point:
            return
        module, _, name = self.name.partition(":")
        source = _source_beside(module, self.text.path)
        if source is None:
            raise self._missing(f"there is no module {module!r} below the file's folder")
        try:
            known = set(re.findall(r"\w+", source.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise self._missing(f"{source} cannot be read ({error})") from error
        if name not in known:
            raise self._missing(f"the module {module!r} has no {name!r}")

    @property
    def _is_entry_point(self) -> bool:
        return _is_entry_point(OBJECTIVES, self.name)

    def _missing(self, what: str) -> StudyError:
        module = self.name.partition(":")[0]
        return self.text.error(
            self.key,
            f"{what}. Put {module.split('.')[0]}.py beside {self.text.path.name}, with a function "
            f"{self.signature}, or install a package that names it as an entry point in the group "
            f"{OBJECTIVES!r}.",
        )


@lru_cache(maxsize=8)
def _loaded(code: _Code) -> Callable[..., Any]:
    """The function of a check, which is called often, looked for once."""
    return code.load()


def _check_code(text: _Text, name: str) -> _Code:
    return _Code(text, ("space", "feasible"), name, "feasible(point: dict) -> bool")


# ------------------------------------------------------------------ the content of a file


@dataclass(frozen=True)
class LedgerSettings:
    """A durable ledger from which several runs pay."""

    path: Path
    budget: Budget


@dataclass(frozen=True, eq=False)
class StudyFile:
    """A study as a file describes it; made by `read_study`.

    Attributes:
        path: The file.
        objective: ``"package.module:function"``, or ``"ask"`` at a site whose trials are answered
            by hand.
        agents: Their names.
        space: The search space.
        protocol: Its name.
        settings: Of the study of that name.
        budget: Evaluations of each agent, the initial ones included.
        seed: Of the run.
        workers: Processes; 0 for this one.
        out: The folder of the run, or None.
        privacy: What the run may reveal, or None.
        ledger: The ledger that pays as well, or None.
        fingerprint: Of all that the sites of a run must agree upon; `objective`, `workers`, `out`
            and the ledger are each machine's own, and so is the list of agents where agents may
            join, and the budget where no privacy depends on it.
    """

    path: Path
    objective: str
    agents: tuple[AgentId, ...]
    space: SearchSpace
    protocol: str
    settings: Mapping[str, Any]
    budget: int
    seed: int
    workers: int
    out: Path | None
    privacy: Budget | None
    ledger: LedgerSettings | None
    fingerprint: str
    text: _Text = field(repr=False)

    def study(
        self,
        *,
        budget: int | None = None,
        out: Path | None = None,
        shared_ledger: SharedLedger | None = None,
    ) -> Any:
        """The study of the protocol.

        Args:
            budget: Another than the file's, for a measurement.
            out: Where secrets lie that must survive a crash; default in memory.
            shared_ledger: The open ledger.
        """
        settings: dict[str, Any] = {"budget": self.budget if budget is None else budget}
        settings |= self.settings
        if shared_ledger is not None:
            settings["shared_ledger"] = shared_ledger
        made = study_class(self.protocol)(**settings)
        if isinstance(made, DealsPoints):
            made = made.dealt_by(self.seed)
        return made if out is None else with_stores(made, self.agents, partial(secrets_in, out))

    def load(self) -> Callable[..., float]:
        """The objective; `StudyError` if it cannot be found."""
        if self.objective == BY_HAND:
            raise self.text.error(
                ("objective",),
                f'objective = "{BY_HAND}" is for sites of a hub, whose trials are answered by '
                "`botorch-fed site tell`. Name a function to run the study here.",
            )
        return self._code.load()

    def find(self) -> None:
        """Raise `StudyError` unless the functions are such as a study file may name.

        That is a function of a module below the file's folder, or an entry point of an installed
        package in the group ``botorch_fed.objectives``. Nothing is imported.
        """
        if self.objective != BY_HAND:
            self._code.find()
        if isinstance(self.space.feasible, NamedCheck):
            _check_code(self.text, self.space.feasible.name).find()

    @property
    def _code(self) -> _Code:
        signature = "score(agent: str, **parameters) -> float"
        return _Code(self.text, ("objective",), self.objective, signature)

    def objectives(self) -> dict[AgentId, Objective]:
        """The objective of every agent, from points of the unit cube to outcomes."""
        self.load()
        return {agent: NamedObjective(self, agent) for agent in self.agents}


@dataclass(frozen=True, eq=False)
class NamedObjective:
    """An agent's objective, from `q x d` points of the unit cube to `q x m` outcomes."""

    study: StudyFile
    agent: AgentId

    def __call__(self, X: Tensor) -> Tensor | Curve:
        """Evaluate point by point."""
        function = self.study.load()
        answers = [function(self.agent, **point) for point in self.study.space.from_unit(X)]
        if self.study.space.fidelity is not None and isinstance(answers[0], Mapping):
            curve = answers[0].items()
            return Curve({at: self._number(value, "a number") for at, value in curve})
        rows = [self._row(answer) for answer in answers]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(X), -1)

    def _row(self, answer: Any) -> list[float]:
        """A number for each outcome."""
        space = self.study.space
        if not space.outcomes:
            return [self._number(answer, "a number")]
        names = [one.name for one in space.outcomes]
        if not isinstance(answer, Mapping) or set(answer) != set(names):
            got = sorted(map(str, answer)) if isinstance(answer, Mapping) else _kind(answer)
            raise ObjectiveError(f"{self._subject} must return a dict with {names}, got {got}.")
        return [self._number(answer[name], f"a number for {name!r}") for name in names]

    def _number(self, value: Any, what: str) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ObjectiveError(
                f"{self._subject} must return {what}, got {_kind(value)}."
            ) from None
        if not math.isfinite(number):
            finite = what.replace("a number", "a finite number")
            raise ValueError(f"{self._subject} must return {finite}, got {number}.")
        return number

    @property
    def _subject(self) -> str:
        return f"The objective {self.study.objective} of agent {self.agent!r}"


def _kind(value: object) -> str:
    return type(value).__name__


@dataclass(frozen=True)
class NamedMechanism:
    """A mechanism of fed-gp by its name in a file, for any size and number of agents."""

    kind: str
    settings: Mapping[str, Any]

    def __call__(self, dim: int, num_agents: int) -> Any:
        """The mechanism for contributions of `dim` numbers."""
        given = dict(self.settings)
        if self.kind == "gaussian":
            return GaussianSum(dim=dim, num_agents=num_agents, weight=1.0, **given)
        return DistributedGaussianSum(dim=dim, num_agents=num_agents, **given)


# ------------------------------------------------------------------ reading


def read_study(path: str | Path) -> StudyFile:
    """Read a study file and check all of it, its budget included; nothing is evaluated.

    Raises:
        StudyError: Something does not fit; the message has file, line, key and fix.
    """
    path = Path(path)
    top = _parsed(path)
    _refuse_former_words(top)
    top.only(KEYS)
    protocol = top.table("protocol")
    name = _name(protocol)
    privacy = _privacy(top, protocol, name)
    space, budget = _space(top), _count(top, "budget", 1, "budget = 12")
    agents = _agents(top)
    settings = _settings(top, protocol, name, privacy, space, agents, budget)
    out = top.get("out", str, 'out = "runs/first"', None)
    study = StudyFile(
        path=path,
        objective=_objective(top),
        agents=agents,
        space=space,
        protocol=name,
        settings=settings,
        budget=budget,
        seed=_count(top, "seed", 0, "seed = 0"),
        workers=_count(top, "workers", 0, "workers = 2", 0),
        out=None if out is None else path.parent / out,
        privacy=privacy,
        ledger=_ledger(top, name, path),
        fingerprint="",
        text=top.text,
    )
    price = _check_together(top, protocol, study)
    return replace(study, fingerprint=_fingerprint(top.values, study, price))


def _name(protocol: _Table) -> str:
    """The name of a protocol, or ``module:Name`` of a study class beside the file."""
    name = protocol.values.get("name")
    if not isinstance(name, str) or ":" not in name:
        name = protocol.get("name", Literal[tuple(PROTOCOLS)], f'name = "{next(iter(PROTOCOLS))}"')
    _imported(protocol, "name", str(name), lambda: study_class(str(name)))
    return str(name)


def _imported(table: _Table, key: str, name: str, find: Callable[[], type[Any]]) -> type[Any]:
    """The class of a name, or of ``module:Name``: a plan needs it, for its settings and its price.

    A study file names classes of this package, of a module below the file's folder, or of an
    entry point in the group `CLASSES` of an installed package. Nothing else is imported.
    """
    path, module = table.text.path, name.partition(":")[0]
    own = module.split(".")[0] == "botorch_fed"
    beside = ":" in name and not own and not _is_entry_point(CLASSES, name)
    if beside and re.fullmatch(r"[A-Za-z_][\w.]*", module):
        if _source_beside(module, path) is None:
            raise table.error(
                key,
                f"there is no module {module!r} below the file's folder. Put "
                f"{module.split('.')[0]}.py beside {path.name}, or install a package that names "
                f"{name} as an entry point in the group {CLASSES!r}.",
            )
        _look_beside(path)
    try:
        found = find()
    except FederatedError as error:
        raise table.error(key, str(error)) from error
    source = getattr(sys.modules.get(module), "__file__", None)
    if beside and not _below(source, path):
        raise table.error(key, f"the module {module!r} that is loaded is {source}: rename yours.")
    return found


def _is_entry_point(group: str, name: str) -> bool:
    return any(one.value == name for one in metadata.entry_points(group=group))


def _source_beside(module: str, path: Path) -> Path | None:
    """The file of a module below the folder of a study file; None if there is none."""
    place = path.resolve().parent.joinpath(*module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((one for one in files if one.is_file() and _below(one, path)), None)


def _below(source: str | Path | None, path: Path) -> bool:
    """Whether a module's file lies below the folder of a study file."""
    return source is not None and Path(source).resolve().is_relative_to(path.resolve().parent)


def _look_beside(path: Path) -> None:
    """Modules are found beside the study file first."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _refuse_former_words(top: _Table) -> None:
    """Say what a file of an earlier release has to change: `rounds`, and the table `[budget]`."""
    table = isinstance(top.values.get("budget"), dict)
    moved = "[budget] is now [privacy]: write [privacy]."
    if "rounds" in top.values:
        fix = renamed(_budget_of(top))
        raise top.error("rounds", f"{fix} {moved}" if table else fix)
    if table:
        raise top.error("budget", f"{moved} budget = 12 is the number of evaluations per site.")


def _budget_of(top: _Table) -> int | str:
    """The budget of a file that has `rounds` instead."""
    rounds = _count(top, "rounds", 1, "budget = 12")
    values = dict(top.table("protocol").values)
    values.pop("mechanism", None)  # noise has no say in the number of evaluations
    protocol = _Table(top.text, ("protocol",), values)
    name = _name(protocol)
    others = {k: v for k, v in top.values.items() if k not in ("rounds", "budget")}
    space, agents = _space(top), _agents(top)
    settings = _settings(_Table(top.text, (), others), protocol, name, None, space, agents, rounds)
    kind = study_class(name)
    return kind.budget_of(rounds, agents, settings) if issubclass(kind, Budgeted) else rounds


def _fingerprint(values: Mapping[str, Any], study: StudyFile, price: Price | None) -> str:
    """The name of a run.

    The roster is not in it where agents may join, nor the budget where no privacy depends on it.
    """
    opens, candidates = getattr(study.study(), "opens", None), study.settings.get("candidates")
    grows = {"agents": bool(opens), "budget": opens is not None and price is None}
    own = OWN_KEYS | {key for key, may in grows.items() if may}
    public = {key: value for key, value in values.items() if key not in own}
    if candidates is not None:
        public["candidates"] = tensor_hash(candidates)  # the file names a file, perhaps
    text = json.dumps(public, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _parsed(path: Path) -> _Table:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StudyError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise StudyError(f"{path}: expected text in UTF-8.") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = int(place[1]) if place else max(len(text.splitlines()), 1)
        raise StudyError(
            f"{path}:{line}: not valid TOML: {error}. Text stands in quotes, a table in [brackets]"
            ", and nothing occurs twice."
        ) from error
    return _Table(_Text(path, text), (), values)


def _count(table: _Table, key: str, least: int, example: str, default: Any = ...) -> int:
    value = int(table.get(key, int, example, default))
    if value < least:
        raise table.error(
            key, f"expected an integer from {least} on, got {value}. Write e.g. {example}."
        )
    return value


def _objective(top: _Table) -> str:
    if top.values.get("objective") == BY_HAND:
        return BY_HAND
    return _function_name(top, "objective", 'objective = "tuning:score"')


def _function_name(table: _Table, key: str, example: str) -> str:
    value: str = table.get(key, str, example)
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise table.error(
            key, f'expected "package.module:function", got {value!r}. Write e.g. {example}.'
        )
    return value


def _agents(top: _Table) -> tuple[AgentId, ...]:
    example = 'agents = ["north", "south"]'
    names: tuple[str, ...] = top.get("agents", tuple[str, ...], example)
    if not names or not all(names) or len(set(names)) < len(names):
        raise top.error(
            "agents",
            f"expected different names, at least one, got {list(names)}. Write e.g. {example}.",
        )
    strange = [name for name in names if not name.isprintable()]
    if strange:
        raise top.error("agents", f"names are printable characters, got {strange[0]!a}.")
    if any(len(name) > MAX_NAME for name in names):
        raise top.error("agents", f"names have at most {MAX_NAME} characters: shorten them.")
    return names


def _space(top: _Table) -> SearchSpace:
    table = top.table("space")
    if not table.values:
        raise top.error(
            "space",
            "missing; expected one line per parameter. Write e.g. [space] and under it "
            'C = { type = "real", lower = 1e-3, upper = 1e3, log = true }.',
        )
    names = [name for name in table.values if not _is_condition(table, name)]
    parameters = tuple(_parameter(table, name) for name in names)
    several = _several_outcomes(top)
    outcome = top.table("outcome")
    outcome.only(("centre", "scale", "minimize", "name"), {"center": "unknown key. Write centre."})
    with outcome.blamed():
        scales = Outcome(
            centre=outcome.get("centre", float, "centre = 0.9", 0.0),
            scale=outcome.get("scale", float, "scale = 0.1", 1.0),
            minimize=outcome.get("minimize", bool, "minimize = true", False),
            name=outcome.get("name", str, 'name = "yield"', "objective"),
        )
    if not any(p.num_columns for p in parameters):
        raise top.error("space", "no parameter is searched: write one that is not fixed.")
    space = SearchSpace(parameters, scales)
    if several:
        with top.table("outcomes").blamed():
            space = SearchSpace(parameters, outcomes=several)
    if _is_condition(table, "constraints"):
        constraints = table.get("constraints", tuple[str, ...], 'constraints = ["x + y <= 1"]')
        with table.blamed("constraints"):
            space = replace(space, constraints=constraints)
    if _is_condition(table, "feasible"):
        name = _function_name(table, "feasible", 'feasible = "mixing:stable"')
        load = partial(_loaded, _check_code(top.text, name))
        space = replace(space, feasible=NamedCheck(name, load))
    if _is_condition(table, "fidelity"):
        settings = table.table("fidelity")
        settings.only(("parameter", "fixed"))
        name = settings.get("parameter", str, 'parameter = "epochs"')
        with table.blamed("fidelity"):
            fixed = settings.get("fixed", float, "fixed = 2", 0.0)
            space = replace(space, fidelity=Fidelity(name, fixed))
    return space


def _several_outcomes(top: _Table) -> tuple[Outcome, ...]:
    """The outcomes of a file that names several; empty where it does not."""
    if "outcomes" not in top.values:
        return ()
    if "outcome" in top.values:
        raise top.error("outcome", "write [outcome] for one outcome, or [outcomes] for several.")
    table = top.table("outcomes")
    if not table.values:
        raise top.error("outcomes", "empty; write e.g. error = { minimize = true }.")
    return tuple(_outcome(table, name) for name in table.values)


def _outcome(outcomes: _Table, name: str) -> Outcome:
    table = outcomes.table(name)
    table.only(("role", "minimize", "lower", "upper", "reference"))
    bounds: dict[str, float | None] = {
        key: table.get(key, float, f"{key} = 20.0", None) for key in ("lower", "upper")
    }
    role: Any = "objective" if bounds == dict.fromkeys(bounds) else "constraint"
    role = table.get(
        "role", Literal["objective", "constraint", "tracking"], 'role = "tracking"', role
    )
    with table.blamed():
        return Outcome(
            minimize=table.get("minimize", bool, "minimize = true", False),
            name=name,
            role=role,
            lower=bounds["lower"],
            upper=bounds["upper"],
            reference=table.get("reference", float, "reference = 0.5", None),
        )


def _is_condition(space: _Table, key: str) -> bool:
    """Whether a key of a space is no parameter: these are tables with a type."""
    if key == "fidelity":
        value = space.values.get(key)
        return isinstance(value, dict) and "parameter" in value and "type" not in value
    known = key in ("constraints", "feasible")
    return known and key in space.values and not isinstance(space.values[key], dict)


def _linear_part(space: SearchSpace) -> SearchSpace:
    """A space without the check that a file names: it is not imported before a run."""
    return replace(space, feasible=None)


def _parameter(space: _Table, name: str) -> Parameter:
    if not name.isidentifier() or name == "agent":
        raise space.error(
            name,
            "a parameter is a keyword of the objective beside agent: expected a name like "
            "learning_rate.",
        )
    table = space.table(name)
    kind = table.get("type", Literal["real", "integer", "choice", "fixed"], 'type = "real"')
    table.only(PARAMETER_KEYS[kind], {"scale": "unknown key. Write log = true, or leave it out."})
    with table.blamed():
        if kind == "choice":
            values = table.get("values", CHOICES, 'values = ["rbf", "linear"]')
            ordered = table.get("ordered", bool, "ordered = true", None)
            log = table.get("log", bool, "log = true", False)
            return Parameter.choice(name, values, ordered=ordered, scale="log" if log else "linear")
        if kind == "fixed":
            return Parameter.fixed(name, table.get("value", ONE_VALUE, "value = 3"))
        number: Any = float if kind == "real" else int
        lower = table.get("lower", number, "lower = 1")
        upper = table.get("upper", number, "upper = 8")
        scale: Any = "log" if table.get("log", bool, "log = true", False) else "linear"
        make = Parameter.real if kind == "real" else Parameter.integer
        return make(name, lower, upper, scale=scale)


def _privacy(top: _Table, table: _Table, protocol: str) -> Budget | None:
    if "privacy" not in top.values:
        return None
    kind = study_class(protocol)
    if not _has(kind, "epsilon") and not _has(kind, "mechanism"):
        raise top.error(
            "privacy",
            f"{protocol} adds no noise from a study file, so that it can keep no privacy budget. "
            f"Write name = {_named_with('epsilon')} in [protocol], or leave [privacy] out.",
        )
    if not _has(kind, "epsilon") and "mechanism" not in table.values:
        raise top.error(
            "privacy",
            f"{protocol} adds no noise without a mechanism. Write [protocol.mechanism] with e.g. "
            'kind = "distributed-gaussian" and clip_norm = 20.0, or leave [privacy] out.',
        )
    return _epsilon_and_delta(top.table("privacy"), ("epsilon", "delta"))


def _epsilon_and_delta(table: _Table, keys: tuple[str, ...]) -> Budget:
    table.only(keys)
    epsilon = table.get("epsilon", float, "epsilon = 2.0")
    delta = table.get("delta", float, "delta = 1e-5")
    if not epsilon > 0:
        raise table.error(
            "epsilon", f"expected a positive number, got {epsilon}. Write e.g. epsilon = 2.0."
        )
    if not 0 < delta < 1:
        raise table.error(
            "delta",
            f"expected a number in (0, 1), far below one over the number "
            f"of agents, got {delta}. Write e.g. delta = 1e-5.",
        )
    try:
        return Budget(epsilon, delta)
    except InputDataError as error:
        raise table.error("delta", str(error)) from error


def _ledger(top: _Table, protocol: str, path: Path) -> LedgerSettings | None:
    if "ledger" not in top.values:
        return None
    kind = study_class(protocol)
    if not any(_has(kind, name) for name in ("shared_ledger", "epsilon", "mechanism")):
        raise top.error("ledger", f"{protocol} pays from no ledger on disk: leave it out.")
    table = top.table("ledger")
    budget = _epsilon_and_delta(table, ("path", "epsilon", "delta"))
    return LedgerSettings(path.parent / table.get("path", str, 'path = "privacy.ledger"'), budget)


# ------------------------------------------------------------------ the protocol's settings


def _settings(
    top: _Table,
    table: _Table,
    name: str,
    privacy: Budget | None,
    space: SearchSpace,
    agents: tuple[AgentId, ...],
    budget: int,
) -> dict[str, Any]:
    kind = study_class(name)
    hints = {k: hint for k, hint in simple_settings(kind).items() if k not in ELSEWHERE}
    parts = {key: _part_of(table, kind, key) for key in PARTS if key in table.values}
    search = parts.get("search", _default_of(kind, "search"))
    transfers = isinstance(search, TransferSearch)
    nested = [key for key in NESTED if _has(kind, key)]
    if search is not None and not getattr(search, "has_basis", transfers):
        nested.remove("feature_map")
    extra = ("sampling_rate",) if _has(kind, "sampling") else ()
    moved = {
        "rounds": "is now budget, at the top of the file: evaluations per site with the initial "
        "ones. Write budget = 12 before the first [table].",
        "budget": "belongs at the top of the file: write budget = 12 before the first [table].",
        "channel": 'belongs at the top of the file: write channel = "threshold".',
        "identities": "is a table of its own: write [identities].",
        "epsilon": "belongs in [privacy].",
        "feature_map": 'this search makes its own basis. Write kind = "transfer" in '
        "[protocol.search], or leave it out.",
        "mechanism": f"{name} makes its own: write [privacy] for its noise.",
    }
    moved = {key: fix for key, fix in moved.items() if key not in nested}
    others = {item.name for item in fields(kind)} - set(hints) - set(nested)
    code = dict.fromkeys(others, IN_PYTHON)
    table.only(("name", *hints, *nested, *extra), {**code, **moved})
    given: dict[str, Any] = {
        key: table.get(key, hint, _example(key, hint))
        for key, hint in hints.items()
        if key in table.values
    }
    given |= parts
    if "sampling_rate" in table.values:
        with table.blamed("sampling_rate"):
            rate = table.get("sampling_rate", float, "sampling_rate = 0.5")
            given["sampling"] = PoissonSampling(rate)
    if "candidates" in table.values:
        given["candidates"] = _candidates(table, space)
    if "initial_design" in table.values:
        count = _count(table, "initial_design", 1, "initial_design = 3")
        if space.feasible is not None:
            raise table.error(
                "initial_design",
                "does not go with feasible, which is not called before the run: leave it out, and "
                "the sites are dealt points that meet it.",
            )
        given["initial_design"] = spread_design(
            space, agents, count, candidates=given.get("candidates")
        )
    if "default" in table.values:
        any_search = Search in get_args(get_type_hints(kind).get("search"))
        given["default"] = _default(table, space, given, any_search)
    if "feature_map" in table.values:
        given["feature_map"] = _feature_map(table.table("feature_map"), space.shared, transfers)
    given |= _channel(top, kind, name) | _identities(top, kind, name, agents)
    if "mechanism" in table.values:

        def payments(part: Mapping[str, Any]) -> int:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SignalWarning)  # this noise is not yet the run's
                price: Price | None = kind(budget=budget, **given, **part).price(space, agents)
            return 1 if price is None else price.payments

        channel = given.get("channel", _default_of(kind, "channel"))
        given |= _mechanism(table.table("mechanism"), search, channel, privacy, payments)
    return given | _spending(table, kind, given, privacy)


def _has(kind: type[Any], name: str) -> bool:
    """Whether a study has a setting of this name."""
    return any(item.name == name for item in fields(kind))


def _default_of(kind: type[Any], name: str) -> Any:
    """The default of a setting; None if there is none."""
    return next(
        (f.default for f in fields(kind) if f.name == name and f.default is not MISSING), None
    )


def _named_with(setting: str) -> str:
    """The names of the protocols that have a setting, as a file has them."""
    return " or ".join(f'"{name}"' for name in PROTOCOLS if _has(study_class(name), setting))


def _part_of(table: _Table, kind: type[Any], key: str) -> Any:
    """One of the dataclasses that a setting can be, from a table of its settings.

    Its `kind` is the name of the class without "Search". Without it, the class is that of the
    default, or of two classes the other one. Where any search or aggregation goes, `kind` is a name
    of the registry or ``module:Name``, and the table may be that text alone.
    """
    if not _has(kind, key):
        return None
    hint, usual = get_type_hints(kind)[key], type(_default_of(kind, key))
    parts = [part for part in get_args(hint) or (hint,) if isinstance(part, type)]
    classes: dict[str, type[Any]] = {
        part.__name__.removesuffix("Search").lower(): part
        for part in parts
        if is_dataclass(part) and part not in OPEN
    }
    value = table.values[key]
    alone = isinstance(value, str)
    part = _Table(table.text, (*table.key, key), {"kind": value} if alone else value)
    base = next((part for part in parts if part in OPEN), None)
    if base is not None:
        return _part(part, _open_class(part, base, classes), ("kind",))
    others = [name for name, part in classes.items() if part is not usual]
    least = others[0] if len(others) == 1 else next(n for n, p in classes.items() if p is usual)
    chosen = part.get("kind", Literal[tuple(classes)], f'kind = "{least}"', least)
    return _part(part, classes[chosen], ("kind",))


def _open_class(table: _Table, base: type[Any], classes: Mapping[str, type[Any]]) -> type[Any]:
    """The class of a search or an aggregation: the package's by name, or any by module and name."""
    names = OPEN[base]
    first = next(iter(classes or names))
    name = table.get("kind", str, f'kind = "{first}", or "module:Name"', first)
    if name in classes:
        return classes[name]
    known = {**dict.fromkeys(classes, ""), **names}
    return _imported(table, "kind", name, lambda: part_class(name, base, known))


def _part(table: _Table, kind: type[Any], skip: tuple[str, ...] = (), usual: Any = None) -> Any:
    """A dataclass of a table of its settings; those that are dataclasses are tables in turn.

    Args:
        table: The table.
        kind: The class.
        skip: Keys that are no settings.
        usual: What has the settings that are not in the table; default the class's own defaults.
    """
    hints = simple_settings(kind)
    defaults = {item.name: item.default for item in fields(kind)} | (
        {} if usual is None else {item.name: getattr(usual, item.name) for item in fields(kind)}
    )
    inner = {
        name: value
        for name, value in defaults.items()
        if name not in hints and is_dataclass(value) and not isinstance(value, type)
    }
    inner.pop("schedule", None)
    others = set(defaults) - set(hints) - set(inner)
    if "schedule" in others:
        skip += ("schedule",)
    table.only((*hints, *inner, *skip), dict.fromkeys(others - set(skip), IN_PYTHON))
    given = {k: table.get(k, hints[k], _example(k, hints[k])) for k in table.values if k in hints}
    for name in [name for name in inner if name in table.values]:
        given[name] = _part(table.table(name), type(inner[name]), usual=inner[name])
    if "schedule" in table.values:
        given["schedule"] = _schedule(table)
    with table.blamed():
        return kind(**given) if usual is None else replace(usual, **given)


def _schedule(table: _Table) -> MixingSchedule:
    value = table.values["schedule"]
    if not isinstance(value, str | dict):
        raise table.error(
            "schedule",
            f'expected "inverse-square" or a table with a kind, got {_shown(value)}. Write e.g. '
            'schedule = { kind = "polynomial", c = 0.5 }.',
        )
    part = _Table(
        table.text,
        (*table.key, "schedule"),
        {"kind": value} if isinstance(value, str) else value,
    )
    kind = part.get("kind", Literal[tuple(SCHEDULES)], 'kind = "polynomial"')
    make, numbers = SCHEDULES[kind]
    part.only(("kind", *numbers))
    with part.blamed():
        return make(*(part.get(key, float, f"{key} = 0.5") for key in numbers))


def _candidates(table: _Table, space: SearchSpace) -> Tensor:
    """Points of the unit cube, `K x d`, each once."""
    value = table.get("candidates", int | str, "candidates = 500")
    with table.blamed("candidates"):
        if isinstance(value, str):
            points = space.to_unit(_listed(table, table.text.path.parent / value, space))
            points = allowed_candidates(_linear_part(space), points)
        else:
            points = _spread(space.shared, value)
            if space.fidelity is not None:
                points = torch.cat([space.at_fidelity(points, at) for at in space.levels])
    return torch.tensor(list(dict.fromkeys(map(tuple, points.tolist()))), dtype=torch.float64)


def _spread(space: SearchSpace, count: int) -> Tensor:
    """Public points that can be evaluated."""
    if space.feasible_set.constrained:
        return space.feasible_set.legal(spread_points(_linear_part(space), count))
    return space.snap(sobol_support(space.dim, count))


def _default(
    table: _Table, space: SearchSpace, given: Mapping[str, Any], any_search: bool
) -> dict[str, Value]:
    """The default configuration, a value for each parameter."""
    if "initial_design" in given:
        raise table.error("default", "does not go with initial_design: leave one of them out.")
    fits = any_search or isinstance(given.get("search"), TransferSearch | None)
    if "strategy" in given or not fits:
        raise table.error("default", "does not go with a published search: leave it out.")
    values = table.table("default")
    values.only(space.names)
    point: dict[str, Value] = {}
    for p in space.parameters:
        fixed = p.kind == "fixed" or (space.fidelity is not None and p.name == space.fidelity.name)
        if fixed and p.name not in values.values:
            continue
        example = json.dumps(p.values[0]) if p.values else f"{p.upper:g}"
        point[p.name] = values.get(p.name, _hint_of(p), f"{p.name} = {example}")
        with values.blamed(p.name):
            p.to_columns(point[p.name])
    with table.blamed("default"):
        shared = _linear_part(space.shared)
        shared.refuse_infeasible(shared.to_unit([point]), "This default")
    return point


def _hint_of(parameter: Parameter) -> Any:
    """The type of a parameter's values in a file."""
    if parameter.kind == "integer":
        return int
    if parameter.is_number:
        return float
    return type(parameter.values[0])


def _listed(table: _Table, path: Path, space: SearchSpace) -> list[dict[str, Value]]:
    """The points of a CSV file, by name."""
    names = [p.name for p in space.parameters if p.kind != "fixed"]
    header = ",".join(names)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise table.error(
            "candidates",
            f"{path.name} cannot be read ({type(error).__name__}). Write a number of points, or "
            f"the name of a CSV file beside this one that begins with {header}.",
        ) from error
    if sorted(reader.fieldnames or ()) != sorted(names) or not rows:
        raise table.error(
            "candidates",
            f"{path.name} must have the parameters as columns and one point at least: begin it "
            f"with {header}.",
        )
    points = []
    for line, row in enumerate(rows, start=2):
        try:
            if None in row or None in row.values():
                raise ValueError("it has another number of columns than the first line")
            point = {p.name: p.from_text(row[p.name]) for p in space.parameters if p.name in names}
            space.to_unit([point])
        except (BotorchError, ValueError) as error:
            raise table.error(
                "candidates", f"{path.name}, point {line - 1} does not fit the space: {error}"
            ) from error
        points.append(point)
    return points


def _feature_map(table: _Table, space: SearchSpace, transfers: bool) -> FeatureMap:
    """A public basis over the unit cube; log-scaled parameters are warped."""
    kind = table.get("kind", Literal[tuple(MAP_KEYS)], 'kind = "rff"')
    table.only(("kind", "kernel", "lengthscale", "outputscale", MAP_KEYS[kind]))
    smoothness = table.get("kernel", Literal[tuple(SMOOTHNESS)], 'kernel = "se"', "se")
    usual = tuple(default_kernel(space.dim).lengthscale.tolist())
    if transfers:
        usual = (LENGTHSCALE * math.sqrt(space.dim),) * space.dim
    scales = table.get("lengthscale", float | tuple[float, ...], "lengthscale = 0.2", usual)
    scales = (scales,) * space.dim if isinstance(scales, float) else scales
    if len(scales) != space.dim:
        raise table.error(
            "lengthscale",
            f"expected a number or a list of {space.dim}, one per column of the unit cube (a "
            f"choice has one per value), got {len(scales)}. Write e.g. lengthscale = 0.2.",
        )
    outputscale = table.get("outputscale", float, "outputscale = 1.0", 1.0)
    made: FeatureMap
    with table.blamed():
        kernel = StationaryKernel(SMOOTHNESS[smoothness], list(scales), outputscale)
        if kind == "qff":
            tol = table.get("tol", float, "tol = 1e-3", 1e-3)
            made = QuadratureFourierFeatures.from_kernel(kernel, space.bounds, tol=tol)
        else:
            count = table.get("num_features", int, "num_features = 100", 100)
            if kind == "rff":
                made = RandomFourierFeatures.draw(kernel, count, generator=generator(0, "features"))
            else:
                made = InducingFeatures(kernel, sobol_support(space.dim, count))
        return WarpedFeatures.around(made, space.log_offsets)


def _mechanism(
    table: _Table,
    search: Any,
    channel: Any,
    privacy: Budget | None,
    payments: Callable[[Mapping[str, Any]], int],
) -> dict[str, Any]:
    """What bounds the contributions, and who adds the noise, as much as the payments need."""
    kind = table.get("kind", Literal[tuple(MECHANISM_KEYS)], 'kind = "distributed-gaussian"')
    table.only(("kind", "noise_multiplier", *MECHANISM_KEYS[kind]))
    if search is not None and not isinstance(search, SupportSearch):
        raise table.error(
            "kind",
            "noise in every round would exceed the messages of this search. Write "
            '[protocol.search] with kind = "support".',
        )
    if kind == "gaussian" and channel != "plain":
        raise table.error(
            "kind",
            "the server adds the noise and has to read the sums for it. Write channel = "
            '"plain" at the top of the file, or kind = "distributed-gaussian".',
        )
    hints: dict[str, Any] = {
        "clip_norm": float,
        "colluding": int,
        "dropping": int,
        "adjacency": Adjacency,
    }
    settings = {
        key: table.get(key, hints[key], _example(key, hints[key]))
        for key in MECHANISM_KEYS[kind]
        if key in table.values or key == "clip_norm"
    }
    if privacy is not None and "noise_multiplier" in table.values:
        raise table.error("noise_multiplier", "follows from [privacy]: leave it out.")
    noise_at = "server" if kind == "gaussian" else "agent"

    def made(noise: float) -> dict[str, Any]:
        named = NamedMechanism(kind, {**settings, "noise_multiplier": noise})
        return {"mechanism": named, "noise_at": noise_at}

    if privacy is None:
        return made(table.get("noise_multiplier", float, "noise_multiplier = 1.0"))
    adjacency = settings.get("adjacency", "zero-out")
    with table.blamed():
        sums = payments(made(1.0))
        if kind == "gaussian":
            noise = noise_multiplier_for(
                epsilon=privacy.epsilon,
                delta=privacy.delta,
                sampling_rate=1.0,
                num_releases=sums,
            )
        else:
            noise = noise_multiplier_within(privacy, num_releases=sums, adjacency=adjacency)
    return made(noise)


def _channel(top: _Table, kind: type[Any], name: str) -> dict[str, Any]:
    if "channel" not in top.values:
        return {}
    if not _has(kind, "channel"):
        raise top.error(
            "channel",
            f"{name} sends its messages in the clear and has no channel: "
            f"leave it out, or write name = {_named_with('channel')} in [protocol].",
        )
    hint = get_type_hints(kind)["channel"]
    return {"channel": top.get("channel", hint, 'channel = "threshold"')}


def _identities(top: _Table, kind: type[Any], name: str, agents: tuple[str, ...]) -> dict[str, Any]:
    """The sites' public identity keys."""
    if "identities" not in top.values:
        return {}
    if not _has(kind, "identities"):
        raise top.error(
            "identities",
            f"{name} has no joint key: leave it out, or write name = "
            f"{_named_with('identities')} in [protocol].",
        )
    table = top.table("identities")
    table.only(agents)
    example = f'{agents[0]} = "…", what botorch-fed site identity prints there'
    found = {agent: table.get(agent, str, example) for agent in agents}
    with top.blamed("identities"):
        check_identities(tuple(found.items()))
    return {"identities": found}


def _without_noise(kind: type[Any]) -> list[str]:
    """The settings of a study that switch its noise off, by the value "none"."""
    hints = simple_settings(kind)
    return [name for name in hints if "none" in get_args(hints[name]) and name not in ELSEWHERE]


def _spending(
    table: _Table, kind: type[Any], given: Mapping[str, Any], privacy: Budget | None
) -> dict[str, Any]:
    """Of a private protocol: epsilon, delta, and what agents insist on."""
    if privacy is None:
        return {}
    if "delta" in given:
        raise table.error("delta", "belongs in [privacy], which has one: leave it out here.")
    for key in _without_noise(kind):
        if given.get(key) != "none":
            continue
        raise table.error(
            key,
            "a run without noise has no guarantee: leave [privacy] out, or write another value.",
        )
    spending: dict[str, Any] = {"delta": privacy.delta, "require": privacy}
    if _has(kind, "epsilon") and "noise_multiplier" not in given:
        spending["epsilon"] = privacy.epsilon
    return spending


# ------------------------------------------------------------------ what must fit together


def _check_together(top: _Table, protocol: _Table, study: StudyFile) -> Price | None:
    kind = study_class(study.protocol)
    switches = _without_noise(kind)
    without = any(study.settings.get(key) == "none" for key in switches)
    noise = "noise_multiplier" in study.settings
    if _has(kind, "epsilon") and not without and study.privacy is None and not noise:
        off = " or ".join(f'{key} = "none"' for key in switches)
        raise top.error(
            "privacy",
            f"missing; {study.protocol} needs a privacy budget. "
            "Write [privacy] with epsilon = 2.0 and delta = 1e-5; a run without privacy "
            f"has {off} in [protocol].",
        )
    blame = top.table("privacy") if study.privacy is not None else protocol
    if "mechanism" in protocol.values:
        blame = protocol.table("mechanism")
    with blame.blamed():
        _, _, price = _disclosed(study)
    if study.privacy is not None and price is not None:
        _check_budget(top, study, study.privacy, price)
    if study.ledger is not None and price is not None and price.paid_at == "site":
        raise top.error(
            "ledger",
            "a ledger on disk is the hub's, and in this study each site adds the noise and pays "
            "from its own log: leave it out, or write a trust with which the server adds it.",
        )
    return price


def _disclosed(study: StudyFile) -> tuple[Any, Sees, Price | None]:
    """The server of a study, who sees what, and what a run costs."""
    made = study.study()
    server = made.server(study.space, study.agents)
    sees, price = disclosed(made, server, study.space, study.agents)
    assert sees is not None  # `study_class` has seen to it
    return server, sees, price


def _check_budget(top: _Table, study: StudyFile, privacy: Budget, price: Price) -> None:
    """Whether the noise that a file asks for keeps the budget that it sets."""
    if price.epsilon <= privacy.epsilon:
        return
    wanted = ""
    if price.payments:
        least = noise_multiplier_for(
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            sampling_rate=price.event.sampling_rate,
            num_releases=price.payments,
            accountant="dp-accounting-rdp" if price.event.discrete else None,
            adjacency=price.adjacency,
        )
        wanted = f"noise_multiplier = {math.ceil(least * 1000) / 1000:g} or "
    raise top.text.error(
        ("privacy", "epsilon"),
        f"epsilon = {privacy.epsilon:g} cannot be kept: {price.payments} releases with "
        f"noise_multiplier = {price.noise_multiplier:g} reveal {price.guarantee}. Write "
        f"{wanted}epsilon = {math.ceil(price.epsilon * 100) / 100:g}, or leave noise_multiplier "
        "out: it follows from [privacy].",
    )


# ------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Plan:
    """What a study would do.

    Attributes:
        protocol: Its name.
        agents: How many there are.
        columns: Dimension of the unit cube.
        constraints: Of the space, in words.
        outcomes: What is wanted of each of several outcomes, in words; empty where there is one.
        budget: Evaluations of each agent, the initial ones included, at most.
        total: Evaluations of all agents, at most.
        rounds: Rounds of queries, as they follow from the budget.
        price: What the run costs in privacy at most; None without noise.
        signal: What noise leaves of the releases, and what follows; empty if that is not known.
        sees: Who sees what.
        roster: Whether agents may join while the study runs; empty if that is not known.
        bytes_per_round: Up and down, of all agents, in the measured rounds; None without any.
        bytes_note: Where that number comes from, or what it depends on.
    """

    protocol: str
    agents: int
    columns: int
    constraints: tuple[str, ...]
    outcomes: tuple[str, ...]
    budget: int
    total: int
    rounds: int
    price: Price | None
    signal: str
    sees: Sees
    roster: str
    bytes_per_round: tuple[int, ...] | None
    bytes_note: str


def plan(study: StudyFile) -> Plan:
    """What a study would do; its objective is not called."""
    made = study.study()
    server, sees, price = _disclosed(study)
    bytes_per_round, note = _bytes(study)
    return Plan(
        protocol=study.protocol,
        agents=len(study.agents),
        columns=study.space.dim,
        constraints=study.space.constraint_words,
        outcomes=tuple(one.words for one in study.space.outcomes),
        budget=study.budget,
        total=evaluations_of(made, study.agents),
        rounds=_rounds(made, study.agents),
        price=price,
        signal=getattr(server, "signal_words", ""),
        sees=sees,
        roster=_roster_words(server),
        bytes_per_round=bytes_per_round,
        bytes_note=note,
    )


def _roster_words(server: Any) -> str:
    opens: bool | None = getattr(server, "opens", None)
    if opens is None:
        return ""
    if opens:
        return "open: agents may join while the study runs"
    return f"closed: nobody can join while the study runs, because {server.why_closed}"


def _rounds(made: Any, agents: tuple[AgentId, ...]) -> int:
    rounds: int = made.rounds_for(agents) if isinstance(made, Budgeted) else made.budget
    return rounds


@dataclass(frozen=True)
class _MadeUp:
    """An objective of the plan's measurement: a quadratic function, the same for all."""

    space: SearchSpace

    def __call__(self, X: Tensor) -> Tensor:
        bowl = -(X - 0.3).square().sum(dim=-1)
        columns = [one.from_public(bowl) for one in self.space.metrics]
        return torch.stack(columns, dim=-1)


def _bytes(study: StudyFile) -> tuple[tuple[int, ...] | None, str]:
    depends = "they grow with the number of agents, of features and of rounds"
    if len(study.agents) > MOST_MEASURED:
        return None, (
            f"not measured with more than {MOST_MEASURED} agents; {depends}: run with few agents "
            "and look at result.bytes_per_round()"
        )
    made = study.study()
    rounds = budget = min(_rounds(made, study.agents), MEASURED_ROUNDS)
    if isinstance(made, Budgeted):
        budget = int(type(made).budget_of(rounds, study.agents, dict(study.settings)))
        rounds = _rounds(replace(made, budget=budget), study.agents)  # type: ignore[type-var]
    space = _linear_part(study.space)
    made_up: dict[AgentId, Objective] = dict.fromkeys(study.agents, _MadeUp(space))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)  # the plan says it of all rounds
        result = run(
            study.study(budget=budget), made_up, seed=study.seed, space=space, progress=False
        )
    counts = result.bytes_per_round()
    note = f"measured in {rounds} rounds on synthetic values, exchanges in order"
    return tuple(counts[serial] for serial in sorted(counts)), f"{note}; {depends}"


# ------------------------------------------------------------------ running


def run_study(
    study: StudyFile,
    *,
    out: Path | None,
    resume: bool = False,
    progress: bool = True,
    raise_errors: bool = False,
    on_trial: Callable[[AgentId, Trial], None] | None = None,
) -> RunResult:
    """Run a study file.

    Args:
        study: What `read_study` made.
        out: The folder that keeps the run, or None.
        resume: Go on with the run in `out`.
        progress: Whether to show progress, on a terminal.
        raise_errors: As in `run`.
        on_trial: As in `run`.

    Raises:
        StudyError: The objective cannot be found, or the run cannot be resumed.
        ObjectiveError: The objective failed from its first evaluation on.
        BudgetExceeded: The ledger does not cover the run.
    """
    if resume and study.settings.get("channel") == "ckks":
        raise study.text.error(
            ("channel",),
            "the single key of ckks is not kept, so that the run cannot be resumed. "
            'Write channel = "threshold" or "plain" for runs that may be interrupted.',
        )
    objectives = study.objectives()
    shared_ledger = open_ledger(study)
    if shared_ledger is None and study.ledger is not None and not resume:
        _pay_alone(study)
    try:
        if out is not None:
            own_folder(out)
        return run(
            study.study(out=out, shared_ledger=shared_ledger),
            objectives,
            seed=study.seed,
            space=study.space,
            out=out,
            resume=resume,
            workers=study.workers,
            progress=progress,
            raise_errors=raise_errors,
            on_trial=on_trial,
        )
    finally:
        if shared_ledger is not None:
            shared_ledger.close()


def _pay_alone(study: StudyFile) -> None:
    """A run of all sites in one place is paid from the file's ledger, where each site would pay."""
    _, _, price = _disclosed(study)
    shared_ledger = site_ledger(study)
    assert price is not None
    assert shared_ledger is not None
    with shared_ledger:
        shared_ledger.spend(price.event, count=price.payments, note=f"run {study.fingerprint}")


def open_ledger(study: StudyFile) -> SharedLedger | None:
    """The ledger of a study file, from which its hub pays; close it after the run.

    None too where each site pays, from its own: see `site_ledger`.
    """
    _, _, price = _disclosed(study)
    if study.ledger is None:
        return None
    return None if price is not None and price.paid_at == "site" else site_ledger(study)


def site_ledger(study: StudyFile) -> SharedLedger | None:
    """The ledger of a study file, whoever pays from it; close it after the run."""
    settings = study.ledger
    if settings is None:
        return None
    _, _, price = _disclosed(study)
    if price is None:
        raise study.text.error(("ledger",), "a run without noise spends nothing: leave it out.")
    return SharedLedger(
        settings.path, adjacency=price.adjacency, unit=price.unit, budget=settings.budget
    )


def check_site_budget(study: StudyFile) -> None:
    """Raise `StudyError` where a study promises an epsilon that no budget of the site bounds."""
    _, _, price = _disclosed(study)
    if price is None or study.privacy is not None or study.ledger is not None:
        return
    raise study.text.error(
        ("privacy",),
        f"missing; a run reveals up to epsilon = {price.epsilon:.4g} at delta = "
        f"{price.guarantee.delta:.3g}, and a site has to bound what it allows. Write [privacy] "
        f"with epsilon = {math.ceil(price.epsilon * 100) / 100:g} and delta = "
        f"{price.guarantee.delta:.3g}, or [ledger] with path, epsilon and delta.",
    )
