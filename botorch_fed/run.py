r"""A whole run in one call, and its result.

::

    result = run(FTS(budget=20), SklearnTuning(4), seed=0)
    result.best("agent3")                 # best value up to each query
    result.best_parameters("agent3")      # parameters of the best observed value
    result.contributions()                # messages sent and received by each site
    result.save("results/tuning-0")       # JSON lines and arrays, no pickle

With ``out=`` a run is on disk from its first message on, and continues with ``resume=True`` after
a crash at any time. On one kind of processor, with the same versions, the seed determines a run bit
for bit, for any number of workers. On another kind of processor the last bits of a factorisation
differ, and so do the points of later queries.
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
from botorch.utils.multi_objective.pareto import is_non_dominated
from torch import Tensor

from botorch_fed.engines.inprocess import InProcess
from botorch_fed.engines.parallel import Parallel
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.agent import bound_to
from botorch_fed.federation.anchors import Anchors
from botorch_fed.federation.base import (
    Agent,
    AgentId,
    DealsPoints,
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
from botorch_fed.federation.points import check_data
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import (
    SITE_EVENTS,
    Observation,
    Observed,
    Trial,
    Trials,
    trial_of,
)
from botorch_fed.rng import generator
from botorch_fed.space import SearchSpace, Value
from botorch_fed.storage.log import FileLog, Log, read_events
from botorch_fed.storage.store import Blobs, MemoryBlobs, own_folder
from botorch_fed.test_functions.base import FederatedTestProblem
from botorch_fed.wire.codec import MAX_BYTES

if TYPE_CHECKING:
    import pandas
    from rich.progress import Progress

Record = dict[str, Any]
Part = Literal["whole", "hub", "site"]
Measure = Literal["simple", "cumulative"]
VALUE_COLUMNS = {"value": "y", "true": "true", "regret": "regret"}  # of one outcome
MIN_FAILED = 2  # least number of failures for which a region is named
PACKAGES = ("botorch_fed", "botorch", "gpytorch", "torch", "numpy", "scipy", "scikit-learn")
FORMAT = 2  # of the files of a result; 1 has "heard" for "replied"
HEAD = "run.json"  # the settings with which the run in a folder was started
START = "start.json"  # the head of the result, in the folder of a run that has not ended
TRUST = "trust.json"  # the trusts so far, in the folder of a run
FILES = {"server", "sites", "run.json.draft", "lock"}  # allowed in a folder before its run


class Study(Protocol):
    """The settings of a protocol, which make its server and its agents.

    Attributes:
        budget: The largest number of evaluations of each site, initial points included.
    """

    @property
    def budget(self) -> int: ...

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Server[Any]: ...

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees: ...

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None: ...

    def agent(self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs) -> Agent[Any]: ...


@dataclass(eq=False)
class RunResult:
    """The result of a run.

    Attributes:
        names: The agents.
        space: The search space.
        seed: The seed of the run.
        protocol: The protocol's name.
        records: One row per observation: agent, round, query, point, value, and the noise-free
            value and regret if the problem defines them. Of several outcomes the value is a list,
            and ``violates`` the first constraint that is not met. See `to_dataframe` for named
            parameters.
        rounds: One row per agent and exchange: whether it replied, the reason of a failure, whether
            it sent a message, short hashes of received broadcasts, bytes down and up, CPU seconds,
            and the number of evaluations requested from a site so far. See `contributions` for
            sums.
        optimal_values: The best noise-free value of each agent, if the problem defines it.
        versions: Versions of Python and of the main packages.
        privacy: The server's account of payments and noise; None for protocols without privacy.
        sees: The readers of all messages; None if the study or its saved result has no such list.
        price: The planned privacy cost of the run; None without noise.
        measure: The regret of the protocol: "simple", of the best point so far, or "cumulative",
            the sum over all evaluations.
        part: The part of a run across machines: the hub's part has no observations; a site's part
            has its observations only and no promise.
        given: One row per observation that an agent had before the run: agent, point, value, and
            the noise-free value and regret if the problem defines them.
        budget: The largest number of evaluations of each site; None if not recorded.
        trust: The trust of each site in what it has received, from 0 to 1, at each of its
            messages; of sites that compare trusts by own outcomes only. After a crash that of one
            message may be missing.
        ended: Whether the run has ended, as far as its folder says; not saved.
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
    trust: dict[AgentId, list[float]] = field(default_factory=dict)
    ended: bool = True

    def __repr__(self) -> str:
        return (
            f"RunResult({self.protocol}, agents={len(self.names)}, "
            f"observations={len(self.records)}, seed={self.seed}{self._promise()})"
        )

    def _promise(self) -> str:
        """The complete guarantee, if there is one."""
        account = self.privacy or {}
        if "epsilon" not in account:
            return ""
        warning = "" if account["private"] else ", not private: seeded noise"
        return (
            f", epsilon <= {account['epsilon']:.4g} at delta = {account['delta']:.3g} per "
            f"{account['unit']}, {account['adjacency']}{warning}"
        )

    def history(self, agent: AgentId, given: bool = False) -> tuple[Tensor, Tensor]:
        """An agent's points in the unit cube `n x d` and its observations `n x m`.

        Args:
            agent: Its name.
            given: Whether its observations before the run come first.
        """
        rows = self._rows(agent)
        return self._history([*self._given(agent), *rows] if given else rows)

    def _history(self, rows: list[Record]) -> tuple[Tensor, Tensor]:
        X = torch.tensor([row["x"] for row in rows], dtype=torch.float64)
        Y = torch.tensor([row["y"] for row in rows], dtype=torch.float64)
        size = len(self.space.metrics)
        return X.reshape(len(rows), self.space.dim), Y.reshape(len(rows), size)

    def trials(self, site: AgentId) -> list[Trial]:
        """A site's answered trials, as `Site.trials` has them.

        Observations before the run come first, as attached ones with negative numbers.
        """
        self._check_name(site)
        given = self._given(site)
        before = [
            {**row, "trial": number - len(given), "status": "attached"}
            for number, row in enumerate(given)
        ]
        own = [row for row in self.records if row["agent"] == site]
        numbered = [
            {"trial": number, "status": "completed", **row} for number, row in enumerate(own)
        ]
        answers = [_observation_of(row, self.space) for row in (*before, *numbered)]
        trials = [trial_of(answer, self.space) for answer in answers]
        return sorted(trials, key=lambda trial: trial.id)

    def best(self, agent: AgentId) -> Tensor:
        """The best value up to each query: noise-free if the problem defines it, else observed.

        An agent's observations before the run count from its first query on. Until one meets all
        constraints, also those of outcomes, the best value is infinitely bad; so it is in a space
        with a fidelity before the first value at the target.
        """
        self._check_one_objective("best")
        given, rows = self._given(agent), self._rows(agent)
        values = [
            self._objective_of(row) if self.counts(row) else -self._sign * math.inf
            for row in (*given, *rows)
        ]
        if not values:
            return torch.zeros(0, dtype=torch.float64)
        signed = self._sign * torch.tensor(values, dtype=torch.float64)
        return self._sign * signed.cummax(dim=0).values[len(given) :]

    def best_parameters(self, site: AgentId) -> dict[str, Value]:
        """The parameters of a site's best observed value, by name and in the user's units.

        Observations before the run count if they meet the constraints of the space, and of a space
        with a fidelity those at the target; the first of equal values wins.
        """
        return self.best_observed(site)[1]

    def best_observed(self, site: AgentId) -> tuple[float, dict[str, Value]]:
        """A site's best observed value and its parameters, as in `best_parameters`."""
        self._check_one_objective("best_parameters")
        rows = [*self._given(site), *self._rows(site)]
        X, Y = self._history([row for row in rows if self.counts(row)])
        if not len(Y):
            which = "observation that meets all constraints" if rows else "observation"
            if self.space.fidelity is not None:
                which += " at the target fidelity"
            raise InputDataError(f"Site {site!r} has no {which}, and so no best one.")
        values = Y[:, self.space.objectives[0]]
        row = int((self._sign * values).argmax())
        return float(values[row]), dict(self.space.from_unit(X[row : row + 1])[0])

    def costs(self, agent: AgentId) -> Tensor:
        """What an agent's evaluations have cost up to each query, in evaluations at the target.

        Failed evaluations are counted with the next one that has a value.
        """
        total, costs = 0.0, []
        for row in self.records:
            if row["agent"] != agent:
                continue
            if row["status"] != "attached":
                total += self.space.costs(torch.tensor([row["x"]], dtype=torch.float64))[0]
            if row["y"] is not None:
                costs.append(total)
        return torch.tensor(costs, dtype=torch.float64)

    def spent(self, site: AgentId) -> float:
        """What a site's evaluations have cost so far, in evaluations at the target."""
        rows = [row for row in self.records if row["agent"] == site]
        points = [row["x"] for row in rows if row.get("status") != "attached"]
        X = torch.tensor(points, dtype=torch.float64).reshape(len(points), self.space.dim)
        return math.fsum(self.space.costs(X))

    def counts(self, row: Record) -> bool:
        """Whether an observation may be a best one: it meets constraints, and is at the target."""
        return "violates" not in row and _at_target(self.space, row["x"])

    def pareto(self, site: AgentId) -> list[Record]:
        """The observations of a site that no other of its own beats in all objectives.

        One row each: ``parameters`` by name and in the user's units, and ``values`` by the names of
        the outcomes. Observations before the run count; those that violate a constraint do not.
        With one objective these are the best ones.
        """
        rows = [*self._given(site), *self._rows(site)]
        X, Y = self._history([row for row in rows if "violates" not in row])
        front = self.space.front(Y)
        points = self.space.from_unit(X[front])
        return [
            {"parameters": point, "values": self.space.by_name(values)}
            for point, values in zip(points, Y[front].tolist(), strict=True)
        ]

    def reference_point(self, *sites: AgentId) -> dict[str, float]:
        """The worst values of several objectives that count in a hypervolume, as measured.

        Those of the space where it has any, and else the worst ones observed, of all sites or of
        those that are named.
        """
        rows = [
            row for site in sites or self.names for row in (*self._given(site), *self._rows(site))
        ]
        _, Y = self._history(rows)
        found = {}
        for place in self.space.objectives:
            one = self.space.metrics[place]
            worst = one.reference
            if worst is None and len(Y):
                column = Y[:, place]
                worst = float(column.max() if one.minimize else column.min())
            found[one.name] = 0.0 if worst is None else worst
        return found

    def hypervolume(self, site: AgentId, reference: Mapping[str, float] | None = None) -> Tensor:
        """The hypervolume that a site's observations dominate up to each query, in measured units.

        Observations before the run count from the first query on; those that violate a constraint
        do not.

        Args:
            site: Its name.
            reference: The worst value of each objective that counts; default that of
                `reference_point` for this site.
        """
        from botorch.utils.multi_objective.hypervolume import Hypervolume  # imports samplers too

        if len(self.space.objectives) < 2:
            raise InputDataError("A hypervolume is of several objectives, this space has one.")
        places = self.space.objectives
        worst = self.reference_point(site) if reference is None else dict(reference)
        names = [self.space.metrics[place].name for place in places]
        if set(worst) != set(names):
            raise InputDataError(f"Expected a reference for each of {names}, got {sorted(worst)}.")
        signs = torch.tensor([-1.0 if self.space.metrics[k].minimize else 1.0 for k in places])
        least = signs.double() * torch.tensor([worst[name] for name in names]).double()
        volume = Hypervolume(least)
        given, rows = self._given(site), self._rows(site)
        kept: list[Tensor] = []
        volumes = []
        for row in (*given, *rows):
            if "violates" not in row:
                y = torch.tensor([row["y"][k] for k in places], dtype=torch.float64)
                kept.append(signs * y)
            front = torch.stack(kept) if kept else least.unsqueeze(0)
            volumes.append(volume.compute(front[is_non_dominated(front)]))
        return torch.tensor(volumes[len(given) :], dtype=torch.float64)

    def _check_one_objective(self, what: str) -> None:
        """Raise `InputDataError` where there is no best value."""
        names = [self.space.metrics[place].name for place in self.space.objectives]
        if len(names) > 1:
            raise InputDataError(
                f"{what} is for one objective, this space has {names}: use pareto or hypervolume."
            )

    def _objective_of(self, row: Record) -> float:
        """The value of the one objective: noise-free if it is known, else observed."""
        if row["true"] is not None:
            return float(row["true"])
        y = row["y"][self.space.objectives[0]] if self.space.outcomes else row["y"]
        return float(y)

    @property
    def _sign(self) -> float:
        return -1.0 if self.space.outcome.minimize else 1.0

    def regret(self, agent: AgentId) -> Tensor:
        """Simple regret after each query."""
        if self.optimal_values is None:
            raise InputDataError("Regret needs the optima, and this problem does not define them.")
        return (self.optimal_values[agent] - self.best(agent)).abs()

    def cumulative_regret(self, agent: AgentId) -> Tensor:
        """Sum of the instantaneous regrets up to each query."""
        if self.optimal_values is None:
            raise InputDataError("Regret needs the optima, and this problem does not define them.")
        self.space.refuse_several("cumulative_regret", "use history.")
        values = [row["true"] for row in self._rows(agent)]
        gaps = self.optimal_values[agent] - torch.tensor(values, dtype=torch.float64)
        return gaps.abs().cumsum(dim=0)

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per trial of each site, from 1; observations before the run come first.

        Columns: site, trial, status (``"given"``, ``"completed"``, ``"failed"`` or ``"attached"``),
        every parameter by its name and in the user's units, value, true, regret, the reason of a
        failure, query and round (0 for given trials). Of several outcomes each has a column, in the
        place of value, true and regret, and ``violates`` is the first constraint that is not met. A
        parameter with the name of another column becomes ``parameter_<name>``.
        """
        import pandas

        rows = []
        for site in self.names:
            given = self._given(site)
            trials = [*given, *(row for row in self.records if row["agent"] == site)]
            X = torch.tensor([row["x"] for row in trials], dtype=torch.float64)
            points = self.space.from_unit(X) if trials else []
            for i, (trial, point) in enumerate(zip(trials, points, strict=True)):
                measured = {key: trial[old] for key, old in VALUE_COLUMNS.items()}
                if self.space.outcomes:
                    missing = [None] * len(self.space.metrics)
                    measured = {
                        **self.space.by_name(trial["y"] or missing),
                        "violates": trial.get("violates", ""),
                    }
                columns = {
                    "site": site,
                    "trial": i + 1,
                    "status": "given" if i < len(given) else trial.get("status", "completed"),
                    **measured,
                    "reason": trial.get("reason", ""),
                    "query": trial.get("query", 0),
                    "round": trial.get("round", 0),
                }
                named = {f"parameter_{k}" if k in columns else k: v for k, v in point.items()}
                first = {key: columns.pop(key) for key in ("site", "trial", "status")}
                rows.append({**first, **named, **columns})
        return pandas.DataFrame(rows)

    def contributions(self) -> list[Record]:
        """One row per site: first exchange, messages sent and received, bytes, last reply.

        A message is a reply or a request with numbers or encrypted bytes, or a broadcast after the
        first exchange, which is the set-up. Counts are None in results of format 1.
        """
        public = self.set_up()
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

    def set_up(self) -> set[str]:
        """Short hashes of the broadcasts of the first exchange, which are no messages of sites.

        A site that has joined later has not seen the first one.
        """
        first = 1 if self.part == "site" else min((row["round"] for row in self.rounds), default=1)
        return {d for row in self.rounds if row["round"] == first for d in row.get("received", ())}

    def failures(self) -> list[Record]:
        """One row per site with failed evaluations: counts, reasons and region.

        `where` is the range or value of one parameter that separates failures from successes best,
        with the counts inside and elsewhere; empty with too few failures.
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
        """The region of failures as text."""
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
        """All bytes of each round, up and down."""
        total: dict[int, int] = {}
        for row in self.rounds:
            total[row["round"]] = total.get(row["round"], 0) + row["bytes_down"] + row["bytes_up"]
        return total

    def _check_name(self, agent: AgentId) -> None:
        if agent not in self.names:
            raise InputDataError(f"Expected an agent of {list(self.names)[:8]}, got {agent!r}.")

    def _rows(self, agent: AgentId) -> list[Record]:
        self._check_name(agent)
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
        self._save_head(folder / "result.json")
        for name in ("records", "rounds", "given"):
            _write(folder / f"{name}.jsonl", _as_lines(getattr(self, name)))
        arrays = {}
        rows = self._by_agent()
        for i, agent in enumerate(self.names):
            X, Y = self._history(rows[agent])
            arrays[f"X{i}"], arrays[f"Y{i}"] = X.numpy(), Y.numpy()
        with _replaced(folder / "arrays.npz") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    def _save_head(self, path: Path) -> None:
        """Write all that is no row of a table."""
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
            "trust": self.trust,
        }
        _write(path, json.dumps(head, indent=1))

    @classmethod
    def load(cls, folder: str | Path) -> RunResult:
        """Read a result that `save` wrote."""
        return cls._load(Path(folder), "result.json", _lines(Path(folder) / "records.jsonl"))

    @classmethod
    def so_far(cls, folder: str | Path) -> RunResult:
        """The rows that the folder of a run holds while the run goes on, or after it was stopped.

        Nothing is locked or written. Values and regrets without noise, and the privacy account, are
        known at the end only.
        """
        folder = Path(folder)
        found = cls._load(folder, START, [])
        found.optimal_values, found.ended = None, False
        if found.part == "whole":
            found.trust = _trusts(folder)
            for name in found.names:
                found.records += site_rows(site_folder(folder, name), name, found.space)
        return found

    @classmethod
    def _load(cls, folder: Path, file: str, records: list[Record]) -> RunResult:
        head = json.loads((folder / file).read_text())
        if head["format"] not in range(1, FORMAT + 1):
            raise InputDataError(
                f"{folder} has format {head['format']}, this release reads 1 to {FORMAT}."
            )
        return cls(
            names=tuple(head["names"]),
            space=SearchSpace.from_dict(head["space"]),
            seed=head["seed"],
            protocol=head["protocol"],
            records=records,
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
            trust=head.get("trust", {}),
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
    on_trial: Callable[[AgentId, Trial], None] | None = None,
) -> RunResult:
    """Run a protocol to its end, all agents on this machine.

    Args:
        protocol: The study, e.g. `FTS(budget=20)`.
        problem: A federated test problem, whose agents are called ``agent0``, ``agent1``, …; or
            objectives by name, each from `q x d` points of the unit cube to `q x 1` outcomes. They
            get one point at a time, see `Site`.
        seed: The seed, which determines the run, see the module; also of the first points that
            sites are dealt, unless the study has a `design_seed`.
        space: The search space of objectives by name.
        out: The folder of the run, written from its first message on.
        resume: Continue the run in `out`, or start it if there is none.
        workers: Number of processes; 0 for this process. Results are the same.
        absent: Whether an agent does not answer in a round, to simulate stragglers.
        quorum: The least number of replies of a complete round, or the number of its agents if
            that is smaller. With `out` a run that stops without a quorum can be resumed.
        retries: Number of repetitions of a round without a quorum, before the run stops.
        patience: Seconds that a round waits for objectives that return `Pending()`.
        deadline: Seconds that a round waits for a worker process, before the run stops; needs
            `workers`.
        raise_errors: Whether any error of an objective stops the run. By default an error is a
            failed evaluation, which is recorded and modelled; an objective that fails at all of
            its first points stops the run.
        max_bytes: The longest message.
        progress: Whether to show progress on a terminal.
        on_trial: Called after every round with each trial that was answered in it and the name of
            its site, e.g. to log them elsewhere. A resumed run begins with those of before. An
            error that it raises stops the run.
    """
    objectives, space, optima = _objectives(problem, space, seed)
    names = tuple(objectives)
    if isinstance(protocol, DealsPoints):
        protocol = protocol.dealt_by(seed)
    if quorum > len(names):
        raise InputDataError(f"Expected quorum <= {len(names)}, the agents, got {quorum}.")
    if deadline < math.inf and not workers:
        raise InputDataError("A deadline applies to worker processes: pass workers=… too.")
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
    blobs = MemoryBlobs(max_bytes=max_bytes)  # a resumed server sends them again
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
    before = {} if folder is None else _trusts(folder)

    def gather() -> list[Observation]:
        new = _gathered(engine, observations, space, on_trial)
        found = {name: [*before.get(name, []), *engine.trust.get(name, [])] for name in names}
        found = {name: trusts for name, trusts in found.items() if trusts}
        if folder is not None and found != result.trust:
            _write(folder / TRUST, json.dumps(found))
        result.trust = found
        return new

    with engine, _progress(progress) as shown:
        watch: Callable[[Round], None] | None = None
        if shown is not None:
            watch = _Watch(shown, protocol, server, space, names, gather)
        elif on_trial is not None or folder is not None:
            watch = partial(_passed_on, gather)
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
        rows = _observation_rows(name, observations[name], objectives[name], optima, space)
        result.records += _flagged(rows, space) if space.outcomes else rows
    return _ended(result, folder)


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
    """The server's side of a run across machines, see `make_agent` for the sites.

    Args:
        protocol: The study.
        space: The search space.
        names: The agents.
        exchange: Carries the requests of a round to the sites and returns the replies.
        seed: The seed, recorded in the result.
        run: The run's name, as the sites have it.
        out: The folder of the server's side, written from the first message on.
        resume: Continue the run in `out`, or start it if there is none.
        quorum: The least number of replies of a complete round.
        retries: Number of repetitions of a round without a quorum, before the run stops.
        idle: Seconds that a round waits for the first finished evaluation at any site.
        pause: Seconds between two requests to a busy site.
        max_bytes: The longest message.
        on_round: Called after every round.
        anchors: This hub's anchors of the sites' ledgers, of all its runs.

    Returns:
        A result without observations, which stay at the sites.
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
    return _ended(result, folder)


def site_result(
    protocol: str,
    space: SearchSpace,
    seed: int,
    name: AgentId,
    observations: list[Observation],
    budget: int | None = None,
    sees: Sees | None = None,
    price: Price | None = None,
) -> RunResult:
    """The observations of one site of a run across machines."""
    result = RunResult(
        names=(name,),
        space=space,
        seed=seed,
        protocol=protocol,
        versions=_versions(),
        part="site",
        budget=budget,
        sees=sees,
        price=price,
    )
    result.records = _flagged(_observation_rows(name, observations, None, None, space), space)
    return result


def site_rows(folder: Path, name: AgentId, space: SearchSpace) -> list[Record]:
    """The rows of the observations in a site's log, also while its process writes to it.

    Args:
        folder: The folder of the log.
        name: The site.
        space: The search space.
    """
    trials = Trials(space)
    with contextlib.suppress(FileNotFoundError):
        for event in read_events(folder, SITE_EVENTS):
            trials.note(event)
    return _flagged(_observation_rows(name, trials.answers, None, None, space), space)


def note_exchange(folder: Path, row: Record) -> None:
    """Write the row of an exchange beside a site's log."""
    _append(folder / "rounds.jsonl", [row])


def noted_exchanges(folder: Path) -> list[Record]:
    """The rows of `note_exchange`."""
    return _rounds(folder / "rounds.jsonl")


def _trusts(folder: Path) -> dict[AgentId, list[float]]:
    """The trusts so far in the folder of a run."""
    path = folder / TRUST
    return json.loads(path.read_text()) if path.exists() else {}


def _ended(result: RunResult, folder: Path | None) -> RunResult:
    """A result, saved in the folder of its run."""
    if folder is not None:
        result.save(folder)
        (folder / START).unlink()
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
    """Drive a server to its end; write rounds and privacy into the result and the folder."""
    result.sees, result.price = disclosed(protocol, server, result.space, result.names)
    result.measure = getattr(protocol, "measure", "simple")
    if folder is not None:
        _write(folder / "given.jsonl", _as_lines(result.given))
        result._save_head(folder / START)

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
    account = getattr(server, "privacy", None)  # only of protocols with a promise
    result.privacy = None if account is None else account(last)


# ------------------------------------------------------------------ objectives


class _AgentObjective:
    """An agent of a test problem; the noise depends on the seed and the number of the call."""

    def __init__(self, problem: FederatedTestProblem, agent: int, seed: int) -> None:
        self.problem = problem
        self.agent = agent
        self.seed = seed
        self.calls = 0
        self.in_batches = bool(problem.noise_std or _custom_noise(problem))  # drawn for each call

    def __call__(self, X: Tensor) -> Tensor:
        stream = generator(self.seed, "noise", self.agent, self.calls)
        Y = self.problem.observe(self.agent, X, stream).reshape(len(X), -1)
        self.calls += 1
        return Y

    def true(self, X: Tensor) -> Tensor:
        """Noise-free values."""
        return self.problem.evaluate(self.agent, X).reshape(len(X), -1)


def _objectives(
    problem: FederatedTestProblem | Mapping[AgentId, Objective],
    space: SearchSpace | None,
    seed: int,
) -> tuple[dict[AgentId, Objective], SearchSpace, dict[AgentId, float] | None]:
    if not isinstance(problem, FederatedTestProblem):
        if space is None:
            raise InputDataError("Objectives by name need their search space: pass space=….")
        if not problem:
            raise InputDataError("Expected at least one objective, got none.")
        return dict(problem), space, None
    if space is not None:
        raise InputDataError("A federated test problem defines its search space: leave out space.")
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
    """The agent of a name in a run, on this machine or at a site.

    Args:
        protocol: The study.
        name: The agent.
        space: The search space.
        seed: The seed of the run.
        blobs: The store of broadcasts.
        roster: The study's agents; the site refuses any other roster. Empty if not given.
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


def _at_target(space: SearchSpace, x: list[float]) -> bool:
    """Whether a point is at the target of the fidelity, if there is one."""
    if space.fidelity is None:
        return True
    return float(space.fidelities(torch.tensor([x], dtype=torch.float64))) == 1.0


def _observation_rows(
    agent: AgentId,
    observations: list[Observation],
    objective: Objective | None,
    optima: dict[AgentId, float] | None,
    space: SearchSpace,
) -> list[Record]:
    rows: list[Record] = []
    for observation in observations:
        y = _numbers(observation.Y)
        true = None
        if isinstance(objective, _AgentObjective) and isinstance(y, float):
            noisy = objective.in_batches
            true = float(objective.true(observation.X)) if noisy else y
        regret = None if true is None or optima is None else abs(optima[agent] - true)
        if not _at_target(space, observation.X[0].tolist()):
            regret = None
        more: Record = {"curve": observation.curve} if observation.curve else {}
        if observation.label:
            more["label"] = observation.label
        rows.append(
            {
                "agent": agent,
                "round": observation.serial,
                "query": observation.query,
                "trial": observation.trial,
                "status": observation.status,
                "x": observation.X[0].tolist(),
                "y": y,
                "sem": _numbers(observation.sem),
                "reason": observation.reason,
                "true": true,
                "regret": regret,
                **more,
            }
        )
    return rows


def _observation_of(row: Record, space: SearchSpace) -> Observation:
    """The answered trial of a row, or of one before the run."""

    def outcomes(values: float | list[float] | None) -> Tensor | None:
        if values is None:
            return None
        return torch.tensor(values, dtype=torch.float64).reshape(1, len(space.metrics))

    Y = outcomes(row["y"])
    return Observation(
        row["trial"],
        row.get("query", 0),
        row.get("round", 0),
        torch.tensor([row["x"]], dtype=torch.float64),
        torch.zeros(0, len(space.metrics), dtype=torch.float64) if Y is None else Y,
        outcomes(row.get("sem")),
        row["status"],
        row.get("reason", ""),
        row.get("label", ""),
        tuple((at, y) for at, y in row.get("curve", ())),
    )


def _numbers(rows: Tensor | None) -> float | list[float] | None:
    """The one number of one row, or of several outcomes all; None without a row."""
    if rows is None or not len(rows):
        return None
    numbers = rows[0].tolist()
    return numbers[0] if len(numbers) == 1 else numbers


def _given_rows(
    protocol: Study,
    objectives: Mapping[AgentId, Objective],
    optima: dict[AgentId, float] | None,
    space: SearchSpace,
) -> list[Record]:
    """The agents' observations before the run, of studies with `data`."""
    rows: list[Record] = []
    data: Mapping[AgentId, tuple[Tensor, Tensor]] = getattr(protocol, "data", None) or {}
    for agent, objective in objectives.items():
        if agent not in data:
            continue
        check_data(data[agent], space)
        X, Y = (part.double() for part in data[agent])
        true: list[float | None] = [None] * len(X)
        if isinstance(objective, _AgentObjective) and not space.outcomes:
            true = objective.true(X).flatten().tolist()
        values = Y.tolist() if space.outcomes else Y.flatten().tolist()
        for x, y, value in zip(X.tolist(), values, true, strict=True):
            regret = None if value is None or optima is None else abs(optima[agent] - value)
            rows.append({"agent": agent, "x": x, "y": y, "true": value, "regret": regret})
    return _flagged(rows, space)


def _flagged(rows: list[Record], space: SearchSpace) -> list[Record]:
    """Rows, those that violate a constraint of points or outcomes with this constraint."""
    for row in rows:
        broken = space.broken_outcome(row["y"]) if space.outcomes and row["y"] else None
        if broken is not None:
            row["violates"] = broken
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
    """The settings that a resumed run must share with its start."""
    description, noise_std, custom_noise = "objectives by name", None, None
    if isinstance(problem, FederatedTestProblem):
        description, noise_std = _described(problem), problem.noise_std
        custom_noise = True if _custom_noise(problem) else None  # None: folders without the entry
    return {
        "settings": server.fingerprint,
        "agents": {name: agent.fingerprint for name, agent in zip(names, agents, strict=True)},
        "problem": description,
        "noise_std": noise_std,
        "own_noise": custom_noise,
        "seed": seed,
    }


def _custom_noise(problem: FederatedTestProblem) -> bool:
    """Whether observations may differ from `evaluate` by more than noise of `noise_std`."""
    return type(problem).observe is not FederatedTestProblem.observe


def _described(problem: FederatedTestProblem) -> str:
    try:
        optima = problem.optimal_values.tolist()
    except NotImplementedError:
        optima = []
    return f"{problem!r} {hashlib.sha256(repr(optima).encode()).hexdigest()[:16]}"


def _folder(out: str | Path | None, *, resume: bool) -> Path | None:
    """The folder of a run; it may hold a run only with `resume`."""
    if out is None:
        if resume:
            raise InputDataError("resume=True needs the folder of the run: pass out=….")
        return None
    folder = own_folder(out)
    if not (folder / HEAD).exists():
        other_files = {path.name for path in folder.iterdir()} - FILES
        if other_files:
            raise ProtocolError(f"{folder} is not empty and holds no run: choose another folder.")
    elif not resume:
        raise ProtocolError(
            f"There is a run in {folder} already: pass resume=True to continue it, or choose "
            "another folder."
        )
    return folder


def _same_settings(folder: Path, mine: dict[str, Any], server: Server[Any]) -> None:
    """Write the settings of a new run, or compare them; agents may join if the server allows it."""
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
            f"The run in {folder} was started with another {' and another '.join(wrong)}: use the "
            "settings of its start and the version of botorch_fed that began it, or choose another "
            "folder."
        )


def _joined(folder: Path, before: list[str], now: list[str], server: Server[Any]) -> list[str]:
    """The agents that join a run; `ProtocolError` if the run or the server does not allow it."""
    if before == now:
        return []
    new = now[len(before) :]
    if not new or now[: len(before)] != before:
        raise ProtocolError(
            f"The run in {folder} has the agents {before[:8]}, this study has {now[:8]}: name "
            "those of the run first, in their order, and new ones after them."
        )
    if not getattr(server, "opens", False):
        why = getattr(server, "why_closed", "its server does not support it")
        raise ProtocolError(
            f"No agent can join the run in {folder}, because {why}: got {new[:8]}. Start another "
            "run with all agents, and pass the observations so far as data."
        )
    return new


def _allow_files(count: int) -> None:
    """Raise the soft limit of open files: every site keeps its log open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ProtocolError(
            f"{count} sites on disk need {wanted} open files, the limit is {hard}: raise the limit "
            "(ulimit -n), or run without out=…."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _finished_rounds(path: Path, log: Log) -> list[Record]:
    """The rows of the rounds in the server's log; other rows are removed from the file."""
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
    """A new private file, which replaces the old one when it is complete."""
    draft = path.with_name(path.name + ".draft")
    draft.unlink(missing_ok=True)
    with open(open_private(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_private(path: Path, data: bytes) -> None:
    """Write a private file in one step; a symbolic link is replaced, not followed."""
    with _replaced(path) as file:
        file.write(data)


def open_private(path: Path, flags: int) -> int:
    """Open a private file; a symbolic link is refused."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ProtocolError(
            f"Expected a regular file at {path}, got a symbolic link: remove the link."
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
    engine: InProcess | Parallel,
    observations: dict[AgentId, list[Observation]],
    space: SearchSpace,
    on_trial: Callable[[AgentId, Trial], None] | None,
) -> list[Observation]:
    """The observations since the last call, added to `observations` by agent, and passed on."""
    new = engine.observations()
    for name, observation in new:
        observations[name].append(observation)
        if on_trial is not None:
            on_trial(name, trial_of(observation, space))
    return [observation for _, observation in new]


def _passed_on(gather: Callable[[], list[Observation]], _: Round) -> None:
    """Without progress on a terminal, trials are passed on after every round all the same."""
    gather()


def evaluations_of(protocol: Study, names: tuple[AgentId, ...]) -> int:
    """Upper bound on the evaluations of all sites of a study together."""
    if isinstance(protocol, Budgeted):
        return protocol.evaluations_for(names)
    return protocol.budget * len(names)


class _Watch:
    """Progress of a run: evaluations, replies, the best outcome, epsilon spent."""

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
        self._space = space
        self._gather = gather
        self._best: float | None = None
        total = evaluations_of(protocol, names)
        self._task = progress.add_task("evaluations", total=total, words="")

    def __call__(self, round_: Round) -> None:
        new = self._gather()
        spent = math.fsum(sum(self._space.costs(one.X)) for one in new if len(one.Y))
        self._progress.update(self._task, advance=spent, words=self._words(round_, new))

    def _words(self, round_: Round, new: list[Observation]) -> str:
        asked = len(round_.replied) + len(round_.exchanged.failures)
        words = [f"{len(round_.replied)} of {asked} replied"]
        space = self._space
        counted = [one for one in new if _at_target(space, one.X[0].tolist())]
        rows = [y for one in counted for y in one.Y.tolist()]
        if len(space.objectives) == 1:
            place = space.objectives[0]
            values = [row[place] for row in rows if space.broken_outcome(row) is None]
            values += [] if self._best is None else [self._best]
            if values:
                self._best = min(values) if space.outcome.minimize else max(values)
                words.append(f"best {self._best:.4g}")
        account = (None if self._account is None else self._account(round_.state)) or {}
        if "epsilon" in account:
            warning = "" if account["private"] else " (seeded noise, not private)"
            words.append(f"epsilon {account['epsilon']:.3g}{warning}")
        return ", ".join(words)


@contextlib.contextmanager
def _progress(wanted: bool) -> Iterator[Progress | None]:
    """Progress on a terminal; None elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

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
