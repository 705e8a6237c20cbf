r"""Study files: a run of one's own objective, written down in TOML.

    objective = "tuning:score"      # score(agent: str, **parameters) -> float
    agents = ["north", "south", "west"]
    rounds = 12
    seed = 0

    [space]
    C = { type = "real", lower = 1e-3, upper = 1e3, log = true }
    depth = { type = "integer", lower = 1, upper = 8 }
    kernel = { type = "choice", values = ["rbf", "linear"] }

    [outcome]                       # public guesses, never statistics of data
    centre = 0.9
    scale = 0.1
    minimize = false

    [protocol]
    name = "dp-fts-de"              # fts, dp-fts-de, fed-gp or private-ucb
    num_initial = 4                 # any simple setting of the study of that name

    [protocol.strategy]             # of fts and dp-fts-de: the published way to use what is heard
    schedule = { kind = "polynomial", c = 0.5 }

    [budget]                        # for dp-fts-de, private-ucb and fed-gp with a mechanism
    epsilon = 2.0
    delta = 1e-5

The other keys are `workers`, `out` (relative to the file), `channel` (of fed-gp: "threshold",
"ckks" or "plain"), `[protocol.search]` (of fed-gp; its `kind` is "transfer", "support" or
"region"), and `[ledger]` with `path`, `epsilon` and `delta`: a durable ledger from which several
runs pay. A `schedule` is ``"inverse-square"`` or a table of kind ``"polynomial"`` with `c` or
``"constant"`` with `p`. What else is no plain number:

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

    [protocol.mechanism]            # fed-gp with search.kind = "support": noise from the budget
    kind = "distributed-gaussian"   # agents are protected, every agent adds its share;
    clip_norm = 20.0                # "gaussian": the server adds it (channel = "plain")

Without `[budget]` a mechanism needs its `noise_multiplier`.

*The contract of an objective*: it is called as ``objective(agent, **parameters)`` with the name of
the agent and one keyword per parameter of the space, a float, an int or a str, and returns one
finite number on the scale on which the agent measures. The module is looked for beside the study
file first.

Whatever does not fit is refused before anything is evaluated, with the line and what to write
instead. Lines are found by scanning the text, because TOML readers do not tell them.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import importlib
import json
import math
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from botorch.exceptions.errors import BotorchError
from torch import Tensor

from botorch_fed.acquisition import Constant, InverseSquare, MixingSchedule, Polynomial
from botorch_fed.errors import BudgetExceeded, FederatedError
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
    Guarantee,
    LedgerFile,
    PoissonSampling,
    SignalWarning,
    noise_multiplier_for,
    noise_multiplier_within,
)
from botorch_fed.protocols.base import MAX_NAME, AgentId, Objective, secrets_in, with_stores
from botorch_fed.protocols.dp_fts_de import DPFTSDE, Following
from botorch_fed.protocols.fed_gp import FedGP
from botorch_fed.protocols.fts import FTS, Strategy, default_kernel
from botorch_fed.protocols.own_step import spread_design, tensor_hash
from botorch_fed.protocols.private_ucb import PrivateUCB
from botorch_fed.protocols.region_search import RegionSearch
from botorch_fed.protocols.support_search import SupportSearch
from botorch_fed.protocols.transfer_search import LENGTHSCALE, TransferSearch
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, Study, run
from botorch_fed.space import Outcome, Parameter, SearchSpace, Value

STUDIES: dict[str, type[Any]] = {
    "fts": FTS,
    "dp-fts-de": DPFTSDE,
    "fed-gp": FedGP,
    "private-ucb": PrivateUCB,
}
SEARCHES: dict[str, type[Any]] = {
    "transfer": TransferSearch,
    "region": RegionSearch,
    "support": SupportSearch,
}
KEYS = (
    "objective",
    "agents",
    "rounds",
    "seed",
    "workers",
    "out",
    "channel",
    "space",
    "outcome",
    "protocol",
    "budget",
    "ledger",
)
OWN_KEYS = {"objective", "workers", "out", "ledger"}  # each machine's own
PARAMETER_KEYS = {
    "real": ("type", "lower", "upper", "log"),
    "integer": ("type", "lower", "upper", "log"),
    "choice": ("type", "values"),
}
# Settings of a study that have their own place in a file, or none.
ELSEWHERE = {"rounds", "epsilon", "channel", "run", "strategy", "search", "noise_at"}
IN_PYTHON = "cannot be written in a file: call botorch_fed.run.run from Python to set it."
PRIVATE = ("dp-fts-de", "private-ucb")
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
REHEARSED_ROUNDS = 3
MOST_REHEARSED = 20  # agents; with more a rehearsal takes too long for a plan


class StudyError(FederatedError):
    """A study file cannot be used; the message has file, line, key and fix."""


class ObjectiveError(FederatedError):
    """An objective raised an error, or returned what is no finite number."""


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

    def only(self, known: Iterable[str], fix: Mapping[str, str] | None = None) -> None:
        """Refuse other keys, with what was meant perhaps."""
        known = list(known)
        for key in self.values:
            if key in known:
                continue
            if fix and key in fix:
                raise self.error(key, fix[key])
            close = difflib.get_close_matches(key, known, n=1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise self.error(key, f"unknown key.{meant} Known here: {', '.join(sorted(known))}.")

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


def simple_settings(kind: type[Any]) -> dict[str, Any]:
    """The settings of a dataclass that a file can hold, with their types."""
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind) if item.init and not item.name.startswith("_")]
    return {name: hints[name] for name in names if _simple(hints[name])}


# ------------------------------------------------------------------ what a file says


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
        objective: ``"package.module:function"``.
        agents: Their names.
        space: The search space.
        protocol: Its name.
        settings: Of the study of that name.
        rounds: How many.
        seed: Of the run.
        workers: Processes; 0 for this one.
        out: The folder of the run, or None.
        budget: What the run may reveal, or None.
        ledger: The ledger that pays as well, or None.
        fingerprint: Of all that the sites of a run must agree upon; `objective`, `workers`, `out`
            and the ledger are each machine's own.
    """

    path: Path
    objective: str
    agents: tuple[AgentId, ...]
    space: SearchSpace
    protocol: str
    settings: Mapping[str, Any]
    rounds: int
    seed: int
    workers: int
    out: Path | None
    budget: Budget | None
    ledger: LedgerSettings | None
    fingerprint: str
    text: _Text = field(repr=False)

    def study(
        self,
        *,
        rounds: int | None = None,
        out: Path | None = None,
        books: LedgerFile | None = None,
    ) -> Any:
        """The study of the protocol.

        Args:
            rounds: Others than the file's, for a rehearsal.
            out: Where secrets lie that must survive a crash; default in memory.
            books: The open ledger.
        """
        settings: dict[str, Any] = {"rounds": self.rounds if rounds is None else rounds}
        settings |= self.settings
        if self.protocol in PRIVATE and books is not None:
            settings["books"] = books
        made = STUDIES[self.protocol](**settings)
        return made if out is None else with_stores(made, self.agents, partial(secrets_in, out))

    def load(self) -> Callable[..., float]:
        """The objective; `StudyError` if it cannot be found."""
        module, _, name = self.objective.partition(":")
        folder = str(self.path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            found = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise self._missing(f"there is no module {error.name!r}", module) from error
        except AttributeError as error:
            raise self._missing(f"the module {module!r} has no {name!r}", module) from error
        except Exception as error:
            raise self._missing(f"importing {module!r} failed ({error!r})", module) from error
        if not callable(found):
            raise self._missing(f"{self.objective!r} is no function", module)
        return found

    def _missing(self, what: str, module: str) -> StudyError:
        return self.text.error(
            ("objective",),
            f"{what}. Put {module.split('.')[0]}.py beside {self.path.name}, with a function "
            "score(agent: str, **parameters) -> float, or install the package.",
        )

    def objectives(self) -> dict[AgentId, Objective]:
        """The objective of every agent, from points of the unit cube to outcomes."""
        self.load()
        return {agent: NamedObjective(self, agent) for agent in self.agents}


@dataclass(frozen=True, eq=False)
class NamedObjective:
    """An agent's objective, from `q x d` points of the unit cube to `q x 1` outcomes."""

    study: StudyFile
    agent: AgentId

    def __call__(self, X: Tensor) -> Tensor:
        """Evaluate point by point."""
        function = self.study.load()
        values = [self._value(function, point) for point in self.study.space.from_unit(X)]
        return torch.tensor(values, dtype=torch.float64).reshape(-1, 1)

    def _value(self, function: Callable[..., float], point: Mapping[str, Value]) -> float:
        said = f"The objective {self.study.objective} of agent {self.agent!r}"
        try:
            value = function(self.agent, **point)
        except Exception as error:
            raise ObjectiveError(
                f"{said} raised {type(error).__name__}: {error} (--debug shows where)."
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ObjectiveError(
                f"{said} must return a number, got {type(value).__name__}."
            ) from None
        if not math.isfinite(number):
            raise ObjectiveError(
                f"{said} must return a finite number, got {number}: return the worst value that "
                "counts in the place of a failure."
            )
        return number


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
    top.only(KEYS)
    protocol = top.table("protocol")
    name = protocol.get("name", Literal[tuple(STUDIES)], 'name = "fts"')
    budget = _budget(top, protocol, name)
    space, rounds = _space(top), _count(top, "rounds", 1, "rounds = 12")
    agents = _agents(top)
    settings = _settings(top, protocol, name, budget, space, agents, rounds)
    out = top.get("out", str, 'out = "runs/first"', None)
    study = StudyFile(
        path=path,
        objective=_objective(top),
        agents=agents,
        space=space,
        protocol=name,
        settings=settings,
        rounds=rounds,
        seed=_count(top, "seed", 0, "seed = 0"),
        workers=_count(top, "workers", 0, "workers = 2", 0),
        out=None if out is None else path.parent / out,
        budget=budget,
        ledger=_ledger(top, name, path),
        fingerprint=_fingerprint(top.values, settings.get("candidates")),
        text=top.text,
    )
    _check_together(top, protocol, study)
    return study


def _fingerprint(values: Mapping[str, Any], candidates: Tensor | None) -> str:
    public = {key: value for key, value in values.items() if key not in OWN_KEYS}
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
        raise StudyError(f"{path}: is no text in UTF-8.") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else max(len(text.splitlines()), 1)
        raise StudyError(
            f"{path}:{line}: this is no TOML: {error}. Text stands in quotes, a table in [brackets]"
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
    example = 'objective = "tuning:score"'
    value: str = top.get("objective", str, example)
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise top.error(
            "objective", f'expected "package.module:function", got {value!r}. Write e.g. {example}.'
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
    parameters = tuple(_parameter(table, name) for name in table.values)
    outcome = top.table("outcome")
    outcome.only(("centre", "scale", "minimize"), {"center": "unknown key. Write centre."})
    with outcome.blamed():
        scales = Outcome(
            centre=outcome.get("centre", float, "centre = 0.9", 0.0),
            scale=outcome.get("scale", float, "scale = 0.1", 1.0),
            minimize=outcome.get("minimize", bool, "minimize = true", False),
        )
    return SearchSpace(parameters, scales)


def _parameter(space: _Table, name: str) -> Parameter:
    if not name.isidentifier() or name == "agent":
        raise space.error(
            name,
            "a parameter is a keyword of the objective beside agent: expected a name like "
            "learning_rate.",
        )
    table = space.table(name)
    kind = table.get("type", Literal["real", "integer", "choice"], 'type = "real"')
    table.only(PARAMETER_KEYS[kind], {"scale": "unknown key. Write log = true, or leave it out."})
    with table.blamed():
        if kind == "choice":
            values = table.get("values", tuple[str, ...], 'values = ["rbf", "linear"]')
            return Parameter.choice(name, values)
        number: Any = float if kind == "real" else int
        lower = table.get("lower", number, "lower = 1")
        upper = table.get("upper", number, "upper = 8")
        scale: Any = "log" if table.get("log", bool, "log = true", False) else "linear"
        make = Parameter.real if kind == "real" else Parameter.integer
        return make(name, lower, upper, scale=scale)


def _budget(top: _Table, table: _Table, protocol: str) -> Budget | None:
    if "budget" not in top.values:
        return None
    if protocol == "fed-gp" and "mechanism" not in table.values:
        raise top.error(
            "budget",
            "fed-gp adds no noise without a mechanism. Write [protocol.mechanism] with e.g. "
            'kind = "distributed-gaussian" and clip_norm = 20.0, or leave the budget out.',
        )
    if protocol not in (*PRIVATE, "fed-gp"):
        raise top.error(
            "budget",
            f"{protocol} adds no noise from a study file, so that it can keep no budget. "
            'Write name = "dp-fts-de" or "private-ucb" in [protocol], or leave the budget out.',
        )
    return _epsilon_and_delta(top.table("budget"), ("epsilon", "delta"))


def _epsilon_and_delta(table: _Table, known: tuple[str, ...]) -> Budget:
    table.only(known)
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
    return Budget(epsilon, delta)


def _ledger(top: _Table, protocol: str, path: Path) -> LedgerSettings | None:
    if "ledger" not in top.values:
        return None
    if protocol not in PRIVATE:
        raise top.error("ledger", f"{protocol} pays from no ledger on disk: leave it out.")
    table = top.table("ledger")
    budget = _epsilon_and_delta(table, ("path", "epsilon", "delta"))
    return LedgerSettings(path.parent / table.get("path", str, 'path = "privacy.ledger"'), budget)


# ------------------------------------------------------------------ the protocol's settings


def _settings(
    top: _Table,
    table: _Table,
    name: str,
    budget: Budget | None,
    space: SearchSpace,
    agents: tuple[AgentId, ...],
    rounds: int,
) -> dict[str, Any]:
    kind = STUDIES[name]
    known = {k: hint for k, hint in simple_settings(kind).items() if k not in ELSEWHERE}
    own = {
        "fts": ("strategy", "initial_design", "default"),
        "dp-fts-de": ("strategy", "initial_design", "default"),
        "fed-gp": ("search", "mechanism", "initial_design", "default"),
    }
    nested = (*own.get(name, ()), "candidates")
    transfers = name == "fed-gp" and _transfers(table)
    if name != "fed-gp" or transfers:
        nested += ("feature_map",)
    extra = ("sampling_rate",) if name == "dp-fts-de" else ()
    moved = {
        "rounds": "belongs at the top of the file: write rounds = 12 before the first [table].",
        "channel": 'belongs at the top of the file: write channel = "threshold".',
        "epsilon": "belongs in [budget].",
        "feature_map": 'this search makes its own basis. Write kind = "transfer" in '
        "[protocol.search], or leave it out.",
        "mechanism": f"{name} makes its own: write [budget] for its noise.",
    }
    moved = {key: fix for key, fix in moved.items() if key not in nested}
    others = {item.name for item in fields(kind)} - set(known) - set(nested)
    code = dict.fromkeys(others, IN_PYTHON)
    table.only(("name", *known, *nested, *extra), {**code, **moved})
    given: dict[str, Any] = {
        key: table.get(key, hint, _example(key, hint))
        for key, hint in known.items()
        if key in table.values
    }
    if "strategy" in table.values:
        given["strategy"] = _part(table.table("strategy"), Strategy if name == "fts" else Following)
    if "search" in table.values:
        given["search"] = _search(table.table("search"))
    if "sampling_rate" in table.values:
        with table.blamed("sampling_rate"):
            rate = table.get("sampling_rate", float, "sampling_rate = 0.5")
            given["sampling"] = PoissonSampling(rate)
    if "candidates" in table.values:
        given["candidates"] = _candidates(table, space)
    if "initial_design" in table.values:
        count = _count(table, "initial_design", 1, "initial_design = 3")
        given["initial_design"] = spread_design(
            space, agents, count, candidates=given.get("candidates")
        )
    if "default" in table.values:
        given["default"] = _default(table, space, given)
    if "feature_map" in table.values:
        given["feature_map"] = _feature_map(table.table("feature_map"), space, transfers)
    if "mechanism" in table.values:
        channel = top.values.get("channel", FedGP.channel)
        given |= _mechanism(table.table("mechanism"), given, budget, rounds, channel)
    return given | _channel(top, name) | _spending(table, name, given, budget)


def _part(table: _Table, kind: type[Any], skip: tuple[str, ...] = ()) -> Any:
    known = simple_settings(kind)
    others = {item.name for item in fields(kind)} - set(known)
    if "schedule" in others:
        skip += ("schedule",)
    table.only((*known, *skip), dict.fromkeys(others - set(skip), IN_PYTHON))
    given = {k: table.get(k, known[k], _example(k, known[k])) for k in table.values if k in known}
    if "schedule" in table.values:
        given["schedule"] = _schedule(table)
    with table.blamed():
        return kind(**given)


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
        else:
            points = space.snap(sobol_support(space.dim, value))
    return torch.tensor(list(dict.fromkeys(map(tuple, points.tolist()))), dtype=torch.float64)


def _default(table: _Table, space: SearchSpace, given: Mapping[str, Any]) -> dict[str, Value]:
    """The default configuration, a value for each parameter."""
    if "initial_design" in given:
        raise table.error("default", "does not go with initial_design: leave one of them out.")
    if "strategy" in given or not isinstance(given.get("search"), TransferSearch | None):
        raise table.error("default", "does not go with a published search: leave it out.")
    values = table.table("default")
    values.only(space.names)
    hints: dict[str, Any] = {"real": float, "integer": int, "choice": str}
    point: dict[str, Value] = {}
    for p in space.parameters:
        example = f'"{p.values[0]}"' if p.kind == "choice" else f"{p.upper:g}"
        point[p.name] = values.get(p.name, hints[p.kind], f"{p.name} = {example}")
        with values.blamed(p.name):
            p.to_columns(point[p.name])
    return point


def _listed(table: _Table, path: Path, space: SearchSpace) -> list[dict[str, Value]]:
    """The points of a CSV file, by name."""
    header = ",".join(space.names)
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
    if sorted(reader.fieldnames or ()) != sorted(space.names) or not rows:
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
            point = {
                p.name: row[p.name] if p.kind == "choice" else float(row[p.name])
                for p in space.parameters
            }
            space.to_unit([point])
        except (BotorchError, ValueError) as error:
            raise table.error(
                "candidates", f"{path.name}, point {line - 1} fits the space not: {error}"
            ) from error
        points.append(point)
    return points


def _feature_map(table: _Table, space: SearchSpace, transfers: bool) -> FeatureMap:
    """A public basis over the unit cube; what acts by its ratio is seen on a logarithmic scale."""
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
        offsets = space.log_offsets
        return WarpedFeatures(made, offsets) if bool((offsets > 0).any()) else made


def _mechanism(
    table: _Table, given: Mapping[str, Any], budget: Budget | None, rounds: int, channel: Any
) -> dict[str, Any]:
    """Of fed-gp: what bounds the contributions, and who adds the noise."""
    kind = table.get("kind", Literal[tuple(MECHANISM_KEYS)], 'kind = "distributed-gaussian"')
    table.only(("kind", "noise_multiplier", *MECHANISM_KEYS[kind]))
    search = given.get("search")
    if not isinstance(search, SupportSearch):
        raise table.error(
            "kind",
            "noise would drown what this search adds in every round. Write [protocol.search] with "
            'kind = "support".',
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
    if budget is not None and "noise_multiplier" in table.values:
        raise table.error("noise_multiplier", "follows from [budget]: leave it out.")
    sums = given.get("sums") or rounds
    adjacency = settings.get("adjacency", "zero-out")
    with table.blamed():
        if budget is None:
            noise = table.get("noise_multiplier", float, "noise_multiplier = 1.0")
        elif kind == "gaussian":
            noise = noise_multiplier_for(
                epsilon=budget.epsilon,
                delta=budget.delta,
                sampling_rate=1.0,
                num_releases=sums,
            )
        else:
            noise = noise_multiplier_within(budget, num_releases=sums, adjacency=adjacency)
    settings["noise_multiplier"] = noise
    noise_at = "server" if kind == "gaussian" else "agent"
    return {"mechanism": NamedMechanism(kind, settings), "noise_at": noise_at}


def _transfers(table: _Table) -> bool:
    """Whether the search of fed-gp is the default."""
    search = table.values.get("search")
    return not isinstance(search, dict) or search.get("kind", "transfer") == "transfer"


def _search(table: _Table) -> Any:
    kinds = Literal["transfer", "support", "region"]
    kind = table.get("kind", kinds, 'kind = "transfer"', "transfer")
    return _part(table, SEARCHES[kind], ("kind",))


def _channel(top: _Table, name: str) -> dict[str, Any]:
    if "channel" not in top.values:
        return {}
    if name != "fed-gp":
        raise top.error(
            "channel",
            f"{name} sends its messages in the clear and has no channel: "
            'leave it out, or write name = "fed-gp" in [protocol].',
        )
    kinds = Literal["threshold", "ckks", "plain"]
    return {"channel": top.get("channel", kinds, 'channel = "threshold"')}


def _spending(
    table: _Table, name: str, given: Mapping[str, Any], budget: Budget | None
) -> dict[str, Any]:
    """Of a private protocol: epsilon, delta, and what agents insist on."""
    if budget is None:
        return {}
    if "delta" in given:
        raise table.error("delta", "belongs in [budget], which has one: leave it out here.")
    if given.get("trust") == "none" or given.get("noise_kind") == "none":
        key = "trust" if "trust" in given else "noise_kind"
        raise table.error(
            key, "a run without noise keeps no budget: leave [budget] out, or write another value."
        )
    spending: dict[str, Any] = {"delta": budget.delta, "require": budget}
    if name in PRIVATE and "noise_multiplier" not in given:
        spending["epsilon"] = budget.epsilon
    return spending


# ------------------------------------------------------------------ what must fit together


def _check_together(top: _Table, protocol: _Table, study: StudyFile) -> None:
    private = study.protocol in PRIVATE
    without = study.settings.get("trust") == "none" or study.settings.get("noise_kind") == "none"
    noise = "noise_multiplier" in study.settings
    if private and not without and study.budget is None and not noise:
        off = 'trust = "none"' if study.protocol == "private-ucb" else 'noise_kind = "none"'
        raise top.error(
            "budget",
            f"missing; {study.protocol} needs to know what it may reveal. "
            "Write [budget] with epsilon = 2.0 and delta = 1e-5; a run without privacy "
            f"has {off} in [protocol].",
        )
    blame = top.table("budget") if study.budget is not None else protocol
    if "mechanism" in protocol.values:
        blame = protocol.table("mechanism")
    with blame.blamed():
        server = study.study().server(study.space, study.agents)
        promise: Guarantee | None = getattr(server, "promise", None)
    if study.budget is not None and promise is not None:
        _check_budget(top, study, promise)


def _check_budget(top: _Table, study: StudyFile, promise: Guarantee) -> None:
    """Whether the noise that a file asks for keeps the budget that it sets."""
    budget = study.budget
    assert budget is not None
    if promise.epsilon <= budget.epsilon:
        return
    wanted = ""
    sampling = study.settings.get("sampling", PoissonSampling())
    if promise.releases:
        least = noise_multiplier_for(
            epsilon=budget.epsilon,
            delta=budget.delta,
            sampling_rate=sampling.rate,
            num_releases=promise.releases,
            adjacency=promise.adjacency,
        )
        wanted = f"noise_multiplier = {math.ceil(least * 1000) / 1000:g} or "
    raise top.text.error(
        ("budget", "epsilon"),
        f"epsilon = {budget.epsilon:g} cannot be kept: {promise.releases} releases with "
        f"noise_multiplier = {study.settings['noise_multiplier']:g} reveal {promise}. Write "
        f"{wanted}epsilon = {math.ceil(promise.epsilon * 100) / 100:g}, or leave noise_multiplier "
        "out: it follows from the budget.",
    )


# ------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Plan:
    """What a study would do.

    Attributes:
        protocol: Its name.
        agents: How many there are.
        columns: Dimension of the unit cube.
        rounds: Rounds of queries.
        evaluations: Of each agent's objective, at most.
        total: Of all agents' objectives.
        promise: What the run reveals at most; None without noise.
        signal: What noise leaves of the releases, and what follows; empty if that is not known.
        sees: Who sees what, one sentence each.
        bytes_per_round: Up and down, of all agents, of the rounds of a rehearsal; None if there was
            none.
        bytes_note: Where that number comes from, or what it depends on.
    """

    protocol: str
    agents: int
    columns: int
    rounds: int
    evaluations: int
    total: int
    promise: Guarantee | None
    signal: str
    sees: tuple[str, ...]
    bytes_per_round: tuple[int, ...] | None
    bytes_note: str


def plan(study: StudyFile) -> Plan:
    """What a study would do; its objective is not called."""
    made = study.study()
    server = made.server(study.space, study.agents)
    promise: Guarantee | None = getattr(server, "promise", None)
    evaluations, total = _evaluations(made, server, len(study.agents))
    bytes_per_round, note = _bytes(study)
    return Plan(
        protocol=study.protocol,
        agents=len(study.agents),
        columns=study.space.dim,
        rounds=study.rounds,
        evaluations=evaluations,
        total=total,
        promise=promise,
        signal=getattr(server, "signal_words", ""),
        sees=_sees(made, server),
        bytes_per_round=bytes_per_round,
        bytes_note=note,
    )


def _evaluations(study: Any, server: Any, num_agents: int) -> tuple[int, int]:
    """Of one agent at most, and of all."""
    if isinstance(study, PrivateUCB):
        return server.participations, study.rounds * server.batch
    if isinstance(study, FTS):
        each = study.rounds * study.q
        return each, each * (num_agents if study.active is None else len(study.active))
    each, active = study.starts + study.rounds, getattr(study, "active", None)
    return each, each * (num_agents if active is None else len(active))


@dataclass(frozen=True)
class _MadeUp:
    """An objective of a rehearsal: a bowl, the same for all."""

    space: SearchSpace

    def __call__(self, X: Tensor) -> Tensor:
        bowl = -(X - 0.3).square().sum(dim=-1, keepdim=True)
        return self.space.outcome.from_public(bowl)


def _bytes(study: StudyFile) -> tuple[tuple[int, ...] | None, str]:
    depends = "they grow with the number of agents, of features and of rounds"
    if len(study.agents) > MOST_REHEARSED:
        return None, (
            f"not rehearsed with more than {MOST_REHEARSED} agents; {depends}: run with few agents "
            "and look at result.bytes_per_round()"
        )
    rounds = min(study.rounds, REHEARSED_ROUNDS)
    made_up: dict[AgentId, Objective] = dict.fromkeys(study.agents, _MadeUp(study.space))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)  # the plan says it of all rounds
        result = run(
            study.study(rounds=rounds), made_up, seed=study.seed, space=study.space, progress=False
        )
    counts = result.bytes_per_round()
    note = f"measured in a rehearsal of {rounds} rounds on made-up values, exchanges in order"
    return tuple(counts[serial] for serial in sorted(counts)), f"{note}; {depends}"


def _sees(study: Study, server: Any) -> tuple[str, ...]:
    """Who sees what; the guarantees are in the protocols' modules."""
    own = "An agent's own data and the parameters that it evaluates stay with the agent."
    if isinstance(study, FTS):
        what = "summary" if (study.message or "").startswith("summary") else "weight vector"
        return (
            own,
            f"The server and all agents read every agent's {what}, a function of its data: no "
            "privacy guarantee.",
        )
    if isinstance(study, DPFTSDE):
        noisy = "sums of them without noise" if server.promise is None else "noisy sums of them"
        return (
            own,
            "The server is trusted: it reads every agent's message, clipped.",
            f"All agents see {noisy}, and nothing else of each other.",
        )
    if isinstance(study, FedGP):
        report = server.privacy(server.start())
        said: str = report["learned_by"]
        sums = "No privacy guarantee: a sum, and what changed since the last one, is in the open."
        if server.promise is not None:
            sums = "Sums have noise, and what they reveal together is promised."
        adds = f"Every agent adds {report['adds']} to a sum."
        return (own, adds, f"{said[0].upper()}{said[1:]}.", sums)
    assert isinstance(study, PrivateUCB)
    return _bandit_sees(study.trust)


def _bandit_sees(trust: str) -> tuple[str, ...]:
    first = {
        "joint": "The server is trusted: it reads every action and its outcome.",
        "local": "Nobody reads a record: every agent adds the noise before it sends anything.",
        "public": "The server is trusted: it reads every outcome; actions are public.",
        "none": "The server reads every action and its outcome: no privacy guarantee.",
    }[trust]
    noise = "sums" if trust == "none" else "noisy sums"
    return first, f"All agents see {noise} of statistics, and the posterior made of them."


# ------------------------------------------------------------------ running


def run_study(
    study: StudyFile, *, out: Path | None, resume: bool = False, progress: bool = True
) -> RunResult:
    """Run a study file.

    Args:
        study: What `read_study` made.
        out: The folder that keeps the run, or None.
        resume: Go on with the run in `out`.
        progress: Whether to show progress, on a terminal.

    Raises:
        StudyError: The objective cannot be found, or the run cannot be resumed.
        ObjectiveError: The objective failed.
        BudgetExceeded: The ledger does not cover the run.
    """
    if resume and study.settings.get("channel") == "ckks":
        raise study.text.error(
            ("channel",),
            "the single key of ckks is not kept, so that the run cannot be resumed. "
            'Write channel = "threshold" or "plain" for runs that may be interrupted.',
        )
    objectives = study.objectives()
    books = open_books(study)
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        return run(
            study.study(out=out, books=books),
            objectives,
            seed=study.seed,
            space=study.space,
            out=out,
            resume=resume,
            workers=study.workers,
            progress=progress,
        )
    finally:
        if books is not None:
            books.close()


def open_books(study: StudyFile) -> LedgerFile | None:
    """The ledger of a study file, from which its server pays; close it after the run."""
    settings = study.ledger
    if settings is None:
        return None
    promise: Guarantee | None = study.study().server(study.space, study.agents).promise
    if promise is None:
        raise study.text.error(("ledger",), "a run without noise cannot pay: leave it out.")
    settings.path.parent.mkdir(parents=True, exist_ok=True)
    return LedgerFile(
        settings.path, adjacency=promise.adjacency, unit=promise.unit, budget=settings.budget
    )
