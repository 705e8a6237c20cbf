r"""A whole run in one call, and its result.

    result = run(FTS(budget=20), SklearnTuning(4), seed=0)
    result.best("agent3")                 # best value so far, query by query
    result.best_parameters("agent3")      # where the best value was observed
    result.contributions()                # what each site has sent and received
    result.save("results/tuning-0")       # JSON lines and arrays, no pickle

With ``out=`` a run is on disk from its first message on: kill it anywhere, go on by
``resume=True``. On one kind of processor, with the same versions, a run is fixed by its seed, bit
for bit, whatever the number of workers. On another kind the last bits of a factorisation differ,
and the points of later queries with them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from botorch_fed.engines.inprocess import InProcess
from botorch_fed.engines.parallel import Parallel
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.agent import bound_to
from botorch_fed.federation.anchors import Anchors
from botorch_fed.federation.base import (
    Agent,
    AgentId,
    Exchange,
    KeepsSecrets,
    Objective,
    Server,
    secrets_in,
    site_folder,
    with_stores,
)
from botorch_fed.federation.budget import Budgeted
from botorch_fed.federation.disclosure import Price, Sees, disclosed
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.hub import finished_rounds, hub_log
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS, Observation, Observed
from botorch_fed.rng import generator
from botorch_fed.space import SearchSpace, Value
from botorch_fed.storage.log import FileLog, Log
from botorch_fed.storage.store import Blobs, MemoryBlobs, own_folder
from botorch_fed.test_functions.base import FederatedTestProblem
from botorch_fed.wire.codec import MAX_BYTES

if TYPE_CHECKING:
    import pandas

Record = dict[str, Any]
Part = Literal["whole", "hub", "site"]
Measure = Literal["simple", "cumulative"]
MIN_FAILED = 2  # evaluations from which on a region of failures is named
PACKAGES = ("botorch_fed", "botorch", "gpytorch", "torch", "numpy", "scipy", "scikit-learn")
FORMAT = 2  # of the files of a result; 1 has "heard" for "replied"
HEAD = "run.json"  # of a folder: what its run was started with
FILES = {"server", "sites", "run.json.draft", "lock"}  # that a folder may hold before its run


class Study(Protocol):
    """The settings of a protocol: what makes its server and its agents.

    Attributes:
        budget: How many evaluations each site makes at most, initial points included.
    """

    @property
    def budget(self) -> int: ...

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Server[Any]: ...

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees: ...

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None: ...

    def agent(self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs) -> Agent[Any]: ...


@dataclass(eq=False)
class RunResult:
    """What happened in a run.

    Attributes:
        names: The agents.
        space: The search space.
        seed: The seed of the run.
        protocol: The protocol's name.
        records: One row per observation: agent, round, query, point, value, the noise-free value
            and regret where they are known. See `to_dataframe` for parameters by name.
        rounds: One row per agent and exchange: whether it replied, why not, whether it sent a
            message, short hashes of what it received, bytes down and up, CPU seconds, and how many
            evaluations a site had been asked for by then. See `contributions` for sums.
        optimal_values: The largest noise-free value of each agent, where it is known.
        versions: Versions of Python and of the packages that matter.
        privacy: What the run reveals and how noisy its releases were, as the protocol's server says
            it; None for protocols without privacy.
        sees: Who sees what; None if the study or its saved result does not say it.
        price: What the run was to cost in privacy, planned before it; None without noise.
        measure: By which regret the protocol is judged: "simple", of the best point so far, or
            "cumulative", where every evaluation counts.
        part: Of a run across machines, the hub's part has no observations, and a site's has its own
            alone and does not know what was promised.
        given: One row per observation that an agent had before the run: agent, point, value, the
            noise-free value and regret where they are known.
        budget: How many evaluations each site had at most; None if that is not known.
    """

    names: tuple[AgentId, ...]
    space: SearchSpace
    seed: int
    protocol: str
    records: list[Record] = field(default_factory=list)
    rounds: list[Record] = field(default_factory=list)
    optimal_values: dict[AgentId, float] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    privacy: dict[str, Any] | None = None
    part: Part = "whole"
    sees: Sees | None = None
    price: Price | None = None
    measure: Measure = "simple"
    given: list[Record] = field(default_factory=list)
    budget: int | None = None

    def __repr__(self) -> str:
        return (
            f"RunResult({self.protocol}, agents={len(self.names)}, "
            f"observations={len(self.records)}, seed={self.seed}{self._promise()})"
        )

    def _promise(self) -> str:
        """The guarantee, if there is one: an epsilon is nothing without the rest."""
        account = self.privacy or {}
        if "epsilon" not in account:
            return ""
        warning = "" if account["private"] else ", not private: seeded noise"
        return (
            f", epsilon <= {account['epsilon']:.4g} at delta = {account['delta']:.3g} per "
            f"{account['unit']}, {account['adjacency']}{warning}"
        )

    def history(self, agent: AgentId, given: bool = False) -> tuple[Tensor, Tensor]:
        """An agent's points in the unit cube `n x d` and its observations `n x 1`.

        Args:
            agent: Its name.
            given: Whether what it had before the run comes first.
        """
        rows = self._rows(agent)
        return self._history([*self._given(agent), *rows] if given else rows)

    def _history(self, rows: list[Record]) -> tuple[Tensor, Tensor]:
        X = torch.tensor([row["x"] for row in rows], dtype=torch.float64)
        Y = torch.tensor([[row["y"]] for row in rows], dtype=torch.float64)
        return X.reshape(len(rows), self.space.dim), Y.reshape(len(rows), 1)

    def best(self, agent: AgentId) -> Tensor:
        """The best value up to each query: noise-free where it is known, else as observed.

        What an agent had before the run counts from its first query on.
        """
        given, rows = self._given(agent), self._rows(agent)
        values = [
            -self._sign * math.inf
            if "violates" in row
            else row["y"]
            if row["true"] is None
            else row["true"]
            for row in (*given, *rows)
        ]
        if not values:
            return torch.zeros(0, dtype=torch.float64)
        signed = self._sign * torch.tensor(values, dtype=torch.float64)
        return self._sign * signed.cummax(dim=0).values[len(given) :]

    def best_parameters(self, site: AgentId) -> dict[str, Value]:
        """The parameters of a site's best observed value, by name and in the user's units.

        What the site had before the run counts where it meets the constraints of the space; of
        equal values the first.
        """
        rows = [*self._given(site), *self._rows(site)]
        X, Y = self._history([row for row in rows if "violates" not in row])
        if not len(Y):
            raise InputDataError(f"Site {site!r} has no observation: there is no best one.")
        row = int((self._sign * Y).argmax())
        return dict(self.space.from_unit(X[row : row + 1])[0])

    @property
    def _sign(self) -> float:
        return -1.0 if self.space.outcome.minimize else 1.0

    def regret(self, agent: AgentId) -> Tensor:
        """Simple regret after each query."""
        if self.optimal_values is None:
            raise InputDataError("Regret needs the optima, and this problem's are not known.")
        return (self.optimal_values[agent] - self.best(agent)).abs()

    def cumulative_regret(self, agent: AgentId) -> Tensor:
        """Sum of the instantaneous regrets up to each query."""
        if self.optimal_values is None:
            raise InputDataError("Regret needs the optima, and this problem's are not known.")
        values = [row["true"] for row in self._rows(agent)]
        gaps = self.optimal_values[agent] - torch.tensor(values, dtype=torch.float64)
        return gaps.abs().cumsum(dim=0)

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per trial of each site, numbered from 1; what it had before the run comes first.

        Columns: site, trial, status (``"given"``, ``"completed"``, ``"failed"`` or ``"attached"``),
        every parameter by its name and in the user's units, value, true, regret, the reason of a
        failure, query and round (0 of what was given). A parameter that is called like another
        column is ``parameter_<name>``.
        """
        import pandas

        rows = []
        for site in self.names:
            given = self._given(site)
            trials = [*given, *(row for row in self.records if row["agent"] == site)]
            X = torch.tensor([row["x"] for row in trials], dtype=torch.float64)
            points = self.space.from_unit(X) if trials else []
            for i, (trial, point) in enumerate(zip(trials, points, strict=True)):
                columns = {
                    "site": site,
                    "trial": i + 1,
                    "status": "given" if i < len(given) else trial.get("status", "completed"),
                    "value": trial["y"],
                    "true": trial["true"],
                    "regret": trial["regret"],
                    "reason": trial.get("reason", ""),
                    "query": trial.get("query", 0),
                    "round": trial.get("round", 0),
                }
                named = {f"parameter_{k}" if k in columns else k: v for k, v in point.items()}
                first = {key: columns.pop(key) for key in ("site", "trial", "status")}
                rows.append({**first, **named, **columns})
        return pandas.DataFrame(rows)

    def contributions(self) -> list[Record]:
        """One row per site: when it joined, what it has sent and received, its last reply.

        A message is a reply or a request with numbers or sealed bytes, or a broadcast that is not
        of the first exchange, which is the set-up. Counts are None in results of format 1.
        """
        first = min((row["round"] for row in self.rounds), default=0)
        public = {
            d for row in self.rounds if row["round"] == first for d in row.get("received", ())
        }
        table = []
        for site in self.names:
            rows = [row for row in self.rounds if row["agent"] == site]
            counted = all("received" in row for row in rows)
            received = {d for row in rows for d in row.get("received", ())} - public
            table.append(
                {
                    "site": site,
                    "joined": min((row["round"] for row in rows), default=None),
                    "messages_sent": sum(row["sent"] for row in rows) if counted else None,
                    "messages_received": len(received) if counted else None,
                    "bytes_up": sum(row["bytes_up"] for row in rows),
                    "bytes_down": sum(row["bytes_down"] for row in rows),
                    "last_replied": max((r["round"] for r in rows if r["replied"]), default=None),
                }
            )
        return table

    def failures(self) -> list[Record]:
        """One row per site with failed evaluations: how many, of how many, why, and where.

        `where` is the range or value of one parameter that tells failures from successes best, with
        the counts inside and elsewhere; empty while too few are known.
        """
        table = []
        for site in self.names:
            rows = [row for row in self.records if row["agent"] == site]
            failed = [row for row in rows if row["y"] is None]
            if not failed:
                continue
            reasons = Counter(row["reason"] for row in failed)
            table.append(
                {
                    "site": site,
                    "failed": len(failed),
                    "evaluations": len(rows),
                    "reasons": dict(reasons.most_common()),
                    "where": self._where(rows),
                }
            )
        return table

    def _where(self, rows: list[Record]) -> str:
        """Where evaluations fail, in words."""
        X = torch.tensor([row["x"] for row in rows], dtype=torch.float64)
        points, failed = self.space.from_unit(X), [row["y"] is None for row in rows]
        if sum(failed) < MIN_FAILED or all(failed):
            return ""
        options: list[tuple[str, list[bool]]] = []
        for parameter in self.space.parameters:
            name, values = parameter.name, [point[parameter.name] for point in points]
            if not parameter.is_number or parameter.kind == "choice":
                options += [(f"{name} = {v}", [u == v for u in values]) for v in parameter.values]
                continue
            numbers = sorted({float(value) for value in values})
            for low, high in itertools.pairwise(numbers):
                above = [float(value) > low for value in values]
                options.append((f"{name} >= {high:.4g}", above))
                options.append((f"{name} <= {low:.4g}", [not inside for inside in above]))

        def right(inside: list[bool]) -> int:
            return sum(a == b for a, b in zip(inside, failed, strict=True))

        words, inside = max(options, key=lambda option: right(option[1]), default=("", []))
        if not any(inside):
            return ""
        bad = sum(a and b for a, b in zip(inside, failed, strict=True))
        return (
            f"{words}: {bad} of {sum(inside)} failed, elsewhere {sum(failed) - bad} of "
            f"{len(failed) - sum(inside)}"
        )

    def bytes_per_round(self) -> dict[int, int]:
        """All bytes that travelled in each round, up and down."""
        total: dict[int, int] = {}
        for row in self.rounds:
            total[row["round"]] = total.get(row["round"], 0) + row["bytes_down"] + row["bytes_up"]
        return total

    def _rows(self, agent: AgentId) -> list[Record]:
        if agent not in self.names:
            raise InputDataError(f"There is no agent {agent!r}; agents are {list(self.names)[:8]}.")
        return [row for row in self.records if row["agent"] == agent and row["y"] is not None]

    def _given(self, agent: AgentId) -> list[Record]:
        return [row for row in self.given if row["agent"] == agent]

    def _by_agent(self) -> dict[AgentId, list[Record]]:
        rows: dict[AgentId, list[Record]] = {agent: [] for agent in self.names}
        for row in self.records:
            if row["y"] is not None:
                rows[row["agent"]].append(row)
        return rows

    # -------------------------------------------------------------- files

    def save(self, folder: str | Path) -> None:
        """Write `result.json`, `records.jsonl`, `rounds.jsonl`, `given.jsonl` and `arrays.npz`."""
        folder = own_folder(folder)
        head = {
            "format": FORMAT,
            "names": self.names,
            "space": self.space.to_dict(),
            "seed": self.seed,
            "protocol": self.protocol,
            "optimal_values": self.optimal_values,
            "versions": self.versions,
            "privacy": self.privacy,
            "part": self.part,
            "sees": None if self.sees is None else self.sees.to_dict(),
            "price": None if self.price is None else self.price.to_dict(),
            "measure": self.measure,
            "budget": self.budget,
        }
        _write(folder / "result.json", json.dumps(head, indent=1))
        for name in ("records", "rounds", "given"):
            _write(folder / f"{name}.jsonl", _as_lines(getattr(self, name)))
        arrays = {}
        rows = self._by_agent()
        for i, agent in enumerate(self.names):
            X, Y = self._history(rows[agent])
            arrays[f"X{i}"], arrays[f"Y{i}"] = X.numpy(), Y.numpy()
        with _replaced(folder / "arrays.npz") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, folder: str | Path) -> RunResult:
        """Read what `save` wrote."""
        folder = Path(folder)
        head = json.loads((folder / "result.json").read_text())
        if head["format"] not in range(1, FORMAT + 1):
            raise InputDataError(
                f"{folder} has format {head['format']}, this release reads 1 to {FORMAT}."
            )
        return cls(
            names=tuple(head["names"]),
            space=SearchSpace.from_dict(head["space"]),
            seed=head["seed"],
            protocol=head["protocol"],
            records=_lines(folder / "records.jsonl"),
            rounds=_rounds(folder / "rounds.jsonl"),
            given=_lines(folder / "given.jsonl"),
            budget=head.get("budget"),
            optimal_values=head["optimal_values"],
            versions=head["versions"],
            privacy=head.get("privacy"),
            part=head.get("part", "whole"),
            sees=Sees.from_dict(head["sees"]) if head.get("sees") else None,
            price=Price.from_dict(head["price"]) if head.get("price") else None,
            measure=head.get("measure", "simple"),
        )


def run(
    protocol: Study,
    problem: FederatedTestProblem | Mapping[AgentId, Objective],
    *,
    seed: int,
    space: SearchSpace | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int = 0,
    absent: Callable[[AgentId, int], bool] | None = None,
    quorum: int = 0,
    retries: int = 0,
    patience: float = math.inf,
    deadline: float = math.inf,
    raise_errors: bool = False,
    max_bytes: int = MAX_BYTES,
    progress: bool = True,
) -> RunResult:
    """Run a protocol to its end, all agents on this machine.

    Args:
        protocol: Its settings, e.g. `FTS(budget=20)`.
        problem: A federated test problem, whose agents are called ``agent0``, ``agent1``, …; or
            objectives by name, each from `q x d` points of the unit cube to `q x 1` outcomes. They
            get one point at a time, see `Site`.
        seed: Fixes the run, see the module.
        space: The search space, with objectives by name.
        out: A folder that keeps the run from its first message on.
        resume: Go on with the run in `out`; if there is none yet, start it.
        workers: Number of processes; 0 for this one. Results are the same.
        absent: Says of an agent and a round whether it does not answer.
        quorum: The least number of replies with which a round may go on, or of all whom it asks if
            these are fewer. With `out` a run that stops for it can be resumed.
        retries: How often a round without a quorum is asked again before the run stops.
        patience: For how many seconds a round waits for objectives that answer `Pending()`.
        deadline: For how many seconds it waits for a worker process that may hang, before the run
            stops; not without workers.
        raise_errors: Whether an error of an objective stops the run. By default it is a failed
            evaluation, which is recorded and learned from; only an objective that fails at its
            first points alike stops the run.
        max_bytes: The longest message.
        progress: Whether to show progress, on a terminal.
    """
    objectives, space, optima = _objectives(problem, space, seed)
    names = tuple(objectives)
    if quorum > len(names):
        raise InputDataError(f"A quorum of {quorum} needs as many agents, there are {len(names)}.")
    if deadline < math.inf and not workers:
        raise InputDataError("A deadline is for worker processes: pass workers=… too.")
    result = RunResult(
        names=names,
        space=space,
        seed=seed,
        protocol=_title(protocol),
        optimal_values=optima,
        versions=_versions(),
        given=_given_rows(protocol, objectives, optima, space),
        budget=protocol.budget,
    )
    folder = _folder(out, resume=resume)
    if folder is not None:
        protocol = with_stores(protocol, names, partial(secrets_in, folder))
        if isinstance(protocol, KeepsSecrets) and not (folder / HEAD).exists():
            protocol.provision(space)
    server = protocol.server(space, names)
    blobs = MemoryBlobs(max_bytes=max_bytes)  # the server sends them again when a run is resumed
    if folder is not None:
        agents = [make_agent(protocol, name, space, seed, blobs) for name in names]
        _same_settings(folder, _settings(server, names, agents, problem, seed), server)
    make_site = partial(
        _make_site, protocol, objectives, space, seed, folder, blobs, max_bytes, raise_errors
    )
    if folder is not None:
        _allow_files(len(names))
    engine: InProcess | Parallel
    if workers:
        engine = Parallel(
            names,
            make_site,
            workers=workers,
            absent=absent,
            patience=patience,
            deadline=deadline,
        )
    else:
        sites: list[Site] = []
        try:
            for name in names:
                sites.append(make_site(name))
        except BaseException:
            for site in sites:
                site.log.close()
            raise
        engine = InProcess(sites, absent=absent, patience=patience)
    observations: dict[AgentId, list[Observation]] = {name: [] for name in names}
    gather = partial(_gathered, engine, observations)
    with engine, _progress(progress) as shown:
        watch = None
        if shown is not None:
            watch = _Watch(shown, protocol, server, space, names, gather)
        _drive(
            server,
            engine,
            result,
            folder,
            protocol=protocol,
            on_round=watch,
            quorum=quorum,
            retries=retries,
            max_bytes=max_bytes,
        )
        gather()
    for name in names:
        result.records += _observation_rows(name, observations[name], objectives[name], optima)
    if folder is not None:
        result.save(folder)
    return result


def host(
    protocol: Study,
    space: SearchSpace,
    names: tuple[AgentId, ...],
    exchange: Exchange,
    *,
    seed: int,
    run: str = "run",
    out: str | Path | None = None,
    resume: bool = False,
    quorum: int = 0,
    retries: int = 0,
    idle: float = 0.0,
    pause: float = 1.0,
    max_bytes: int = MAX_BYTES,
    on_round: Callable[[Round], None] | None = None,
    anchors: Anchors | None = None,
) -> RunResult:
    """The server's side of a run whose sites are elsewhere, see `make_agent` for theirs.

    Args:
        protocol: Its settings.
        space: The search space.
        names: The agents.
        exchange: Carries a round to the sites and back.
        seed: Noted in the result.
        run: The run's name, which the sites know as well.
        out: A folder that keeps the server's side from the first message on.
        resume: Go on with the run in `out`; if there is none yet, start it.
        quorum: The least number of replies with which a round may go on.
        retries: How often such a round is asked again before the run stops.
        idle: For how many seconds a round waits in which no evaluation is finished at any site.
        pause: Seconds between two questions meanwhile.
        max_bytes: The longest message.
        on_round: Called after every round.
        anchors: What this hub has seen of the sites' ledgers, in all of its runs.

    Returns:
        A result without observations: those are at the sites.
    """
    result = RunResult(
        names=names,
        space=space,
        seed=seed,
        protocol=_title(protocol),
        versions=_versions(),
        part="hub",
        budget=protocol.budget,
    )
    folder = _folder(out, resume=resume)
    if folder is not None:
        protocol = with_stores(protocol, names, partial(secrets_in, folder))
    server = protocol.server(space, names)
    if folder is not None:
        settings = {"settings": server.fingerprint, "problem": "at the sites", "seed": seed}
        _same_settings(folder, {**settings, "agents": dict.fromkeys(names, "")}, server)
    _drive(
        server,
        exchange,
        result,
        folder,
        protocol=protocol,
        run=run,
        on_round=on_round,
        quorum=quorum,
        retries=retries,
        idle=idle,
        pause=pause,
        max_bytes=max_bytes,
        anchors=anchors,
    )
    if folder is not None:
        result.save(folder)
    return result


def site_result(
    protocol: str,
    space: SearchSpace,
    seed: int,
    name: AgentId,
    observations: list[Observation],
    budget: int | None = None,
) -> RunResult:
    """What one site has observed in a run whose server is elsewhere."""
    result = RunResult(
        names=(name,),
        space=space,
        seed=seed,
        protocol=protocol,
        versions=_versions(),
        part="site",
        budget=budget,
    )
    result.records = _flagged(_observation_rows(name, observations, None, None), space)
    return result


def _drive(
    server: Server[Any],
    exchange: Exchange,
    result: RunResult,
    folder: Path | None,
    *,
    protocol: Study,
    on_round: Callable[[Round], None] | None,
    **options: Any,
) -> None:
    """Drive a server to its end; rounds and privacy go into the result, and into the folder."""
    result.sees, result.price = disclosed(protocol, server, result.space, result.names)
    result.measure = getattr(protocol, "measure", "simple")

    def on_exchange(round_: Round) -> None:
        rows = _round_rows(round_)
        if isinstance(protocol, Budgeted):
            done = protocol.evaluated(result.names, round_.state)
            rows = [{**row, "evaluations": done} for row in rows]
        result.rounds += rows
        if folder is not None:
            _append(folder / "rounds.jsonl", rows)

    with contextlib.nullcontext() if folder is None else hub_log(folder) as log:
        if folder is not None and log is not None:
            result.rounds = _finished_rounds(folder / "rounds.jsonl", log)
        last = drive(
            server, exchange, log=log, on_exchange=on_exchange, on_round=on_round, **options
        )
    account = getattr(server, "privacy", None)  # of protocols that promise something
    result.privacy = None if account is None else account(last)


# ------------------------------------------------------------------ objectives


class _AgentObjective:
    """An agent of a test problem; noise is a function of the seed and of what was asked before."""

    def __init__(self, problem: FederatedTestProblem, agent: int, seed: int) -> None:
        self.problem = problem
        self.agent = agent
        self.seed = seed
        self.calls = 0
        self.in_batches = bool(problem.noise_std or _own_noise(problem))  # drawn for each call

    def __call__(self, X: Tensor) -> Tensor:
        stream = generator(self.seed, "noise", self.agent, self.calls)
        Y = self.problem.observe(self.agent, X, stream).reshape(-1, 1)
        self.calls += 1
        return Y

    def true(self, X: Tensor) -> Tensor:
        """Noise-free values."""
        return self.problem.evaluate(self.agent, X).reshape(-1, 1)


def _objectives(
    problem: FederatedTestProblem | Mapping[AgentId, Objective],
    space: SearchSpace | None,
    seed: int,
) -> tuple[dict[AgentId, Objective], SearchSpace, dict[AgentId, float] | None]:
    if not isinstance(problem, FederatedTestProblem):
        if space is None:
            raise InputDataError("Objectives by name need their search space: pass space=….")
        if not problem:
            raise InputDataError("There are no objectives.")
        return dict(problem), space, None
    if space is not None:
        raise InputDataError("A federated test problem has its own search space.")
    objectives: dict[AgentId, Objective] = {
        f"agent{n}": _AgentObjective(problem, n, seed) for n in range(len(problem))
    }
    try:
        optima = dict(zip(objectives, problem.optimal_values.tolist(), strict=True))
    except NotImplementedError:
        optima = None
    return objectives, problem.space, optima


def _make_site(
    protocol: Study,
    objectives: Mapping[AgentId, Objective],
    space: SearchSpace,
    seed: int,
    folder: Path | None,
    blobs: Blobs,
    max_bytes: int,
    raise_errors: bool,
    name: AgentId,
) -> Site:
    agent = make_agent(protocol, name, space, seed, blobs, tuple(objectives))
    objective = objectives[name]
    common: dict[str, Any] = {"max_bytes": max_bytes, "raise_errors": raise_errors}
    if folder is None:
        return Site(name, agent, objective, **common)
    log = FileLog(site_folder(folder, name), SITE_EVENTS)
    if isinstance(objective, _AgentObjective):
        objective.calls = sum(isinstance(event, Observed) for event in log)
    try:
        return Site(name, agent, objective, log=log, **common)
    except BaseException:
        log.close()
        raise


def make_agent(
    protocol: Study,
    name: AgentId,
    space: SearchSpace,
    seed: int,
    blobs: Blobs,
    roster: tuple[AgentId, ...] = (),
) -> Agent[Any]:
    """The agent of a name in a run of this seed; a site elsewhere makes it in the same way.

    Args:
        protocol: The study.
        name: The agent.
        space: The search space.
        seed: Of the run.
        blobs: Where broadcasts lie.
        roster: The study's agents, with whom alone the site takes part; empty if not known.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    agent = protocol.agent(name, space, int.from_bytes(digest[:6], "big"), blobs)
    return bound_to(agent, roster)


# ------------------------------------------------------------------ rows and files


def _round_rows(round_: Round) -> list[Record]:
    exchanged = round_.exchanged
    agents = sorted({*round_.replied, *exchanged.failures})
    replied, sent, told = set(round_.replied), set(round_.sent), set(round_.told)
    hashes = [digest[:8] for digest in round_.broadcasts]
    return [
        {
            "round": round_.serial,
            "agent": agent,
            "replied": agent in replied,
            "failure": exchanged.failures[agent].code if agent in exchanged.failures else None,
            "sent": agent in sent,
            "received": [*hashes, *([f"request {round_.serial}"] if agent in told else [])]
            if agent in replied
            else [],
            "bytes_down": exchanged.bytes_down.get(agent, 0),
            "bytes_up": exchanged.bytes_up.get(agent, 0),
            "cpu_seconds": exchanged.cpu_seconds.get(agent, 0.0),
        }
        for agent in agents
    ]


def _observation_rows(
    agent: AgentId,
    observations: list[Observation],
    objective: Objective | None,
    optima: dict[AgentId, float] | None,
) -> list[Record]:
    rows: list[Record] = []
    for seen in observations:
        y = float(seen.Y) if len(seen.Y) else None
        true = None
        if isinstance(objective, _AgentObjective) and y is not None:
            noisy = objective.in_batches
            true = float(objective.true(seen.X)) if noisy else y
        regret = None if true is None or optima is None else abs(optima[agent] - true)
        rows.append(
            {
                "agent": agent,
                "round": seen.serial,
                "query": seen.query,
                "trial": seen.trial,
                "status": seen.status,
                "x": seen.X[0].tolist(),
                "y": y,
                "sem": seen.sem,
                "reason": seen.reason,
                "true": true,
                "regret": regret,
            }
        )
    return rows


def _given_rows(
    protocol: Study,
    objectives: Mapping[AgentId, Objective],
    optima: dict[AgentId, float] | None,
    space: SearchSpace,
) -> list[Record]:
    """What agents have observed before, of studies that have `data`."""
    rows: list[Record] = []
    data: Mapping[AgentId, tuple[Tensor, Tensor]] = getattr(protocol, "data", None) or {}
    for agent, objective in objectives.items():
        if agent not in data:
            continue
        X, Y = (part.double() for part in data[agent])
        true: list[float | None] = [None] * len(X)
        if isinstance(objective, _AgentObjective):
            true = objective.true(X).flatten().tolist()
        for x, y, value in zip(X.tolist(), Y.flatten().tolist(), true, strict=True):
            regret = None if value is None or optima is None else abs(optima[agent] - value)
            rows.append({"agent": agent, "x": x, "y": y, "true": value, "regret": regret})
    return _flagged(rows, space)


def _flagged(rows: list[Record], space: SearchSpace) -> list[Record]:
    """Rows, those of points outside of the constraints with the constraint that they violate."""
    if not space.feasible_set.constrained:
        return rows
    for row in rows:
        (point,) = space.from_unit(torch.tensor([row["x"]], dtype=torch.float64))
        broken = space.violated(point)
        if broken is not None:
            row["violates"] = broken
    return rows


def _title(protocol: Study) -> str:
    """The name of a protocol in a result."""
    return str(getattr(protocol, "title", type(protocol).__name__))


def _settings(
    server: Server[Any],
    names: tuple[AgentId, ...],
    agents: list[Agent[Any]],
    problem: object,
    seed: int,
) -> dict[str, Any]:
    """What must be the same when a run is resumed."""
    described, noise_std, own_noise = "objectives by name", None, None
    if isinstance(problem, FederatedTestProblem):
        described, noise_std = _described(problem), problem.noise_std
        own_noise = True if _own_noise(problem) else None  # None as in folders without the entry
    return {
        "settings": server.fingerprint,
        "agents": {name: agent.fingerprint for name, agent in zip(names, agents, strict=True)},
        "problem": described,
        "noise_std": noise_std,
        "own_noise": own_noise,
        "seed": seed,
    }


def _own_noise(problem: FederatedTestProblem) -> bool:
    """Whether observations may differ from `evaluate` by more than noise of `noise_std`."""
    return type(problem).observe is not FederatedTestProblem.observe


def _described(problem: FederatedTestProblem) -> str:
    try:
        optima = problem.optimal_values.tolist()
    except NotImplementedError:
        optima = []
    return f"{problem!r} {hashlib.sha256(repr(optima).encode()).hexdigest()[:16]}"


def _folder(out: str | Path | None, *, resume: bool) -> Path | None:
    """The folder of a run, which holds one already if and only if it is resumed."""
    if out is None:
        if resume:
            raise InputDataError("resume=True needs the folder of the run: pass out=….")
        return None
    folder = own_folder(out)
    if not (folder / HEAD).exists():
        strange = {path.name for path in folder.iterdir()} - FILES
        if strange:
            raise ProtocolError(f"{folder} is not empty and holds no run: choose another folder.")
    elif not resume:
        raise ProtocolError(
            f"There is a run in {folder} already: pass resume=True to go on with it, or choose "
            "another folder."
        )
    return folder


def _same_settings(folder: Path, mine: dict[str, Any], server: Server[Any]) -> None:
    """Note what a run was started with, or compare it; agents may join where the server allows."""
    head = folder / HEAD
    if not head.exists():
        _write(head, json.dumps(mine))
        return
    theirs = json.loads(head.read_text())
    before: dict[str, str] = theirs.get("agents", mine["agents"])
    if _joined(folder, list(before), list(mine["agents"]), server):
        kept = {name: mine["agents"][name] for name in before}
        _same_settings(folder, {**mine, "agents": kept}, server)
        _write(head, json.dumps(mine))
        return
    wrong = sorted(key for key in mine if key != "agents" and theirs.get(key) != mine[key])
    agents = [name for name, print_ in mine["agents"].items() if before[name] != print_]
    if agents and "settings" not in wrong:
        wrong = [*wrong, f"settings of agents {agents[:8]}"]
    if wrong:
        raise ProtocolError(
            f"The run in {folder} was started with another {' and another '.join(wrong)}: go on "
            "with what it was started with, or choose another folder."
        )


def _joined(folder: Path, before: list[str], now: list[str], server: Server[Any]) -> list[str]:
    """Who joins a run that was started with other agents; `ProtocolError` if nobody can."""
    if before == now:
        return []
    new = now[len(before) :]
    if not new or now[: len(before)] != before:
        raise ProtocolError(
            f"The run in {folder} has the agents {before[:8]}, this study has {now[:8]}: name "
            "those of the run first, in their order, and new ones after them."
        )
    if not getattr(server, "opens", False):
        why = getattr(server, "why_closed", "its server does not say that they may")
        raise ProtocolError(
            f"Nobody can join the run in {folder}, because {why}: got {new[:8]}. Start another run "
            "with all agents, and give what was observed as data."
        )
    return new


def _allow_files(count: int) -> None:
    """Every site keeps its log open: raise the soft limit of open files as far as needed."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ProtocolError(
            f"{count} sites on disk need {wanted} open files, the limit is {hard}: raise it "
            "(ulimit -n), or run without out=…."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _finished_rounds(path: Path, log: Log) -> list[Record]:
    """The rows of the rounds that are in the server's log; the file is cut back to them."""
    last = finished_rounds(log)
    rows = [row for row in _rounds(path) if row["round"] <= last]
    if path.exists():
        _write(path, _as_lines(rows))
    return rows


def _append(path: Path, rows: list[Record]) -> None:
    with open(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "w") as file:
        file.write(_as_lines(rows))
        file.flush()
        os.fsync(file.fileno())


def _as_lines(rows: list[Record]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _write(path: Path, text: str) -> None:
    write_private(path, text.encode())


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """A new file of this user alone, which takes the place of the old one when it is complete."""
    draft = path.with_name(path.name + ".draft")
    draft.unlink(missing_ok=True)
    with open(open_private(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_private(path: Path, data: bytes) -> None:
    """Write a file of this user alone, in one step; a symbolic link is replaced, not followed."""
    with _replaced(path) as file:
        file.write(data)


def open_private(path: Path, flags: int) -> int:
    """Open a file of this user alone; a symbolic link is refused."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ProtocolError(
            f"Expected a file of its own at {path}, found a symbolic link: remove the link."
        ) from error


def _lines(path: Path) -> list[Record]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # cut short by a crash
        rows.append(json.loads(line))
    return rows


def _rounds(path: Path) -> list[Record]:
    """The rows of a file of rounds, of this format or of format 1."""
    rows = []
    for row in _lines(path):
        if "heard" in row:
            row["replied"] = row.pop("heard")
        rows.append(row)
    return rows


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def _gathered(
    engine: InProcess | Parallel, observations: dict[AgentId, list[Observation]]
) -> list[Observation]:
    """The observations since the last call, put down by agent."""
    new = engine.observations()
    for name, observation in new:
        observations[name].append(observation)
    return [observation for _, observation in new]


def evaluations_of(protocol: Study, names: tuple[AgentId, ...]) -> int:
    """How many evaluations all sites of a study make together, at most."""
    if isinstance(protocol, Budgeted):
        return protocol.evaluations_for(names)
    return protocol.budget * len(names)


class _Watch:
    """Shows how far a run is: evaluations, who replied, the best outcome, epsilon spent."""

    def __init__(
        self,
        progress: Progress,
        protocol: Study,
        server: Server[Any],
        space: SearchSpace,
        names: tuple[AgentId, ...],
        gather: Callable[[], list[Observation]],
    ) -> None:
        self._progress = progress
        self._account = getattr(server, "privacy", None)
        self._minimize = space.outcome.minimize
        self._gather = gather
        self._best: float | None = None
        total = evaluations_of(protocol, names)
        self._task = progress.add_task("evaluations", total=total, words="")

    def __call__(self, round_: Round) -> None:
        new = self._gather()
        count = sum(len(observation.Y) for observation in new)
        self._progress.update(self._task, advance=count, words=self._words(round_, new))

    def _words(self, round_: Round, new: list[Observation]) -> str:
        asked = len(round_.replied) + len(round_.exchanged.failures)
        words = [f"{len(round_.replied)} of {asked} replied"]
        values = [y for seen in new for y in seen.Y.flatten().tolist()]
        values += [] if self._best is None else [self._best]
        if values:
            self._best = min(values) if self._minimize else max(values)
            words.append(f"best {self._best:.4g}")
        account = (None if self._account is None else self._account(round_.state)) or {}
        if "epsilon" in account:
            warning = "" if account["private"] else " (seeded noise, not private)"
            words.append(f"epsilon {account['epsilon']:.3g}{warning}")
        return ", ".join(words)


@contextlib.contextmanager
def _progress(wanted: bool) -> Iterator[Progress | None]:
    """Progress on a terminal, silence elsewhere."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


__all__ = ["RunResult", "Study", "host", "make_agent", "run", "site_result"]
