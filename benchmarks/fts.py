"""Speed of federated Thompson sampling, each figure against its peer in the same run.

    python -m benchmarks.fts [--json] [--quick | --smoke]

All times are CPU time of this process on one thread, not wall time. Agents hold 50 observations,
made by their own Thompson sampling, and messages of M = 100 numbers from agents with related
functions; every query goes through `FederatedAgent.ask`. Keys of ``--json``, in two dimensions:

    query_ms                   one query with 50 messages, mean of an own and a received step, at
                               1,000 points and 20 restarts; without the fit of hyperparameters
    fit_ms                     fit of the own hyperparameters at 50 observations
    query_value_gap_vs_direct  (our maximum - DIRECT's) / range of the function, mean over seeds
                               and steps; DIRECT: 20,000 evaluations, the better of its two forms;
                               both may come close to earlier points (`min_distance=0`)
    worst_value_gap_vs_direct  the least of these
    prior_query_ms             the default strategy's query, messages as a prior, with its own fit
    fts_ms_per_extra_agent     slope of a query's cost from 28 to 1,000 messages; mean of own and
                               received step
    rgpe_ms_per_extra_agent    the same of RGPE, building the ensemble included
    taf_ms_per_extra_agent     the same of TAF
    engine_overhead_ms         per agent and round beyond what the agent's methods take: FTS agents
                               with 50 observations and 50 messages, in one process
    peak_mb_1000_agents        peak memory of `run` with 1,000 agents and 20 rounds, beyond imports,
                               in a process of its own

``--quick`` has two seeds, d = 2, slopes to 300 messages and 2 rounds of the 1,000 agents;
``--smoke`` runs everything once, so small that the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.models.deterministic import GenericDeterministicModel
from botorch.optim.optimize import optimize_acqf
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.sampling.pathwise.prior_samplers import draw_kernel_feature_paths
from botorch.utils.sampling import optimize_posterior_samples
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import direct
from torch import Tensor

from benchmarks.processes import in_own_process, in_this_process
from botorch_fed.acquisition import Constant
from botorch_fed.acquisition.optimize import maximize
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.federation.agent import AgentState, FederatedAgent
from botorch_fed.federation.base import Outbox, Pending
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.terms import Order, Terms
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.models import RandomFourierFeatures, StationaryKernel, fit_own_gp, own_gp
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, run
from botorch_fed.search import local, thompson
from botorch_fed.search.messages import Message, MessageKind
from botorch_fed.search.releases import Rows as Received
from botorch_fed.search.thompson import Strategy, ThompsonSearch
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import FTS, default_feature_map
from botorch_fed.wire.codec import encode

NUM_DATA, NUM_MESSAGES = 50, 50
SIZES = (28, 100, 300, 1000)  # numbers of other agents
EVALUATIONS = 20_000
NOISE_STD = 0.1
LARGE = 2**28  # bytes: summaries of 1,000 agents exceed the codec's default
SEED = 20260103

OWN = Strategy(own="thompson", warp=False, prior_until=0)
RECEIVED = replace(OWN, schedule=Constant(1e-12))
PRIOR = Strategy()
HISTORY = replace(OWN, num_raw=128, num_restarts=4)  # how an agent came by its data, cheaply
RANDOM = replace(OWN, own="random")  # random points and messages
QUERY = Order(1, "next", False)

Array = NDArray[np.float64]


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU milliseconds of this process, all its threads."""
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


def interleaved(
    works: dict[Any, Callable[[], object]], repeats: int, *, warm: bool = True
) -> dict[Any, float]:
    """Median CPU milliseconds of each, taken in turns, so that a busy machine treats all alike."""
    times: dict[Any, list[float]] = {name: [] for name in works}
    for turn in range(repeats + warm):
        for name, work in works.items():
            ms = cpu_ms(work)
            if turn or not warm:
                times[name].append(ms)
    return {name: statistics.median(values) for name, values in times.items()}


# ------------------------------------------------------------------ agents and their messages


def unit_space(d: int) -> SearchSpace:
    return SearchSpace(tuple(Parameter.real(f"x{j}", 0.0, 1.0) for j in range(d)))


class Federation:
    """Related functions: a common one and a deviation, draws of a Matérn process.

    Args:
        d: Dimension.
        seed: Of the functions and of all data.
        num_others: Number of agents besides the one that queries.
    """

    def __init__(self, d: int, seed: int, num_others: int = NUM_MESSAGES) -> None:
        self.space, self.seed, self.num_others = unit_space(d), seed, num_others
        kernel = StationaryKernel(2.5, [0.3 * (d / 2) ** 0.5] * d)
        self._features = RandomFourierFeatures.draw(kernel, 512, generator=self._stream("truth"))
        common = self._stream("common").normal(512)
        own = self._stream("deviations").normal(num_others + 1, 512)
        self._weights = 0.8 * common + 0.6 * own
        self.phi = default_feature_map(self.space)

    def _stream(self, *path: int | str) -> Any:
        return generator(SEED, "federation", self.space.dim, self.seed, *path)

    def observe(self, n: int, X: Tensor) -> Tensor:
        """Noisy values of agent `n` at `k x d` points, `k x 1`; agent 0 queries."""
        noise = self._stream("noise", n, len(X)).normal(len(X), 1)
        return self._features(X) @ self._weights[n, :, None] + NOISE_STD * noise

    def study(self, strategy: Strategy, kind: MessageKind = "mean", **options: Any) -> FTS:
        """The study of all agents."""
        given = {"feature_map": self.phi, "message": kind, "every": 1, **options}
        return FTS(budget=1000, strategy=strategy, **given)

    def received(self, kind: MessageKind, count: int) -> Received:
        """Messages of the first `count` others."""
        made_by, messages = Message(kind), []
        for n in range(1, count + 1):
            X = self._stream("points", n).uniform(NUM_DATA, self.space.dim)
            stream = self._stream("message", n)
            messages.append(made_by.make(self.phi, X, self.observe(n, X), generator=stream))
        names = tuple(f"other{n}" for n in range(1, count + 1))
        return Received(names, (0,) * count, torch.stack(messages))

    def starts(self, count: int) -> tuple[Tensor, Tensor]:
        X = self._stream("starts").uniform(count, self.space.dim)
        return X, self.observe(0, X)

    def history(self) -> AgentState:
        """The state of agent 0 after fifty observations, 47 of its own Thompson sampling."""
        blobs = MemoryBlobs()
        study = self.study(HISTORY, data={"me": self.starts(3)})
        address = (blobs.put(encode(study.terms(self.space, ("me",)).setup)),)
        agent = study.agent("me", self.space, self.seed, blobs)
        state = agent.start()
        for _ in range(NUM_DATA - 3):
            state = agent.receive(state, QUERY, address)
            X = agent.ask(state)
            assert isinstance(X, Tensor)
            state = agent.tell(state, X, self.observe(0, X))
        return replace(state, broadcasts=(), agreed="", roster=())


@dataclass(frozen=True)
class ReadyQuery:
    """An agent that holds 50 observations and messages, about to query."""

    agent: FederatedAgent
    state: AgentState

    def __call__(self) -> Tensor:
        point = self.agent.ask(self.state)
        assert isinstance(point, Tensor)
        return point


def ready(
    federation: Federation,
    strategy: Strategy,
    state: AgentState,
    kind: MessageKind,
    received: Received,
) -> ReadyQuery:
    """An agent that a request for a query has reached."""
    blobs = MemoryBlobs(max_bytes=LARGE)
    study = federation.study(strategy, kind)
    setup = study.terms(federation.space, ("me", *received.agents)).setup
    addresses = blobs.put(encode(setup)), blobs.put(encode(received, max_bytes=LARGE))
    agent = study.agent("me", federation.space, federation.seed, blobs)
    query = replace(QUERY, t=state.order.t + 1)
    agent.check(state, query, addresses)
    return ReadyQuery(agent, agent.receive(state, query, addresses))


# ------------------------------------------------------------------ one query


@dataclass
class Rows:
    """Milliseconds by row and dimension, one number per seed; and gaps of values."""

    ms: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    gaps: dict[int, list[float]] = field(default_factory=dict)

    def add(self, row: str, d: int, ms: float) -> None:
        self.ms.setdefault((row, d), []).append(ms)

    def mean(self, row: str, d: int) -> float:
        return statistics.mean(self.ms[row, d])


STEPS = {
    "own step": OWN,
    "received step": RECEIVED,
    "prior step (default)": PRIOR,
}
FIT, FIT_IN_PRIOR = "fit of the own GP", "of the prior step: fit"
DIRECT_PLAIN, DIRECT_TORCH = "DIRECT, path in NumPy", "DIRECT, path as it is"


def one_query(d: int, seeds: int, repeats: int) -> Iterator[tuple[str, float, float | None]]:
    """For every seed the cost of all steps and of their peers: row, milliseconds, gap of value."""
    for seed in range(seeds):
        federation = Federation(d, seed)
        state = federation.history()
        messages = federation.received("mean", NUM_MESSAGES)
        queries = {row: ready(federation, s, state, "mean", messages) for row, s in STEPS.items()}
        works: dict[Any, Callable[[], object]] = dict(queries)
        works[FIT] = partial(fit_own_gp, state.X, state.Y, start=state.search.own)
        works.update(botorch_rows(state))
        for row, ms in interleaved(works, repeats).items():
            yield row, ms, None
        yield FIT_IN_PRIOR, fit_share(queries["prior step (default)"]), None
        for row in ("own step", "received step"):
            yield from against_direct(queries[row], as_it_is=seed == 0)


def fit_share(query: ReadyQuery) -> float:
    """Milliseconds that a query spends in fits."""
    spent = []

    def timed(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        try:
            return fit_own_gp(*args, **options)
        finally:
            spent.append(1e3 * (time.process_time() - start))

    with patch.object(thompson, "fit_own_gp", timed):
        query()
    return sum(spent)


def botorch_rows(state: AgentState) -> dict[str, Callable[[], object]]:
    """The own step as BoTorch offers it: the same model, raw points and restarts."""
    assert state.search.own is not None
    model = own_gp(state.X, state.Y, state.search.own)
    d = state.X.shape[-1]
    bounds = torch.stack([torch.zeros(d), torch.ones(d)]).double()

    def acquisition(options: dict[str, Any]) -> None:
        optimize_acqf(
            PathwiseThompsonSampling(model),
            bounds,
            q=1,
            num_restarts=OWN.num_restarts,
            raw_samples=OWN.num_raw,
            options=options,
        )

    def samples(num_features: int) -> None:
        def prior(model: Any, sample_shape: torch.Size) -> Any:
            return draw_kernel_feature_paths(
                model, sample_shape=sample_shape, num_features=num_features
            )

        paths = draw_matheron_paths(model, torch.Size([1]), prior_sampler=prior)
        optimize_posterior_samples(
            GenericDeterministicModel(lambda X: paths(X).unsqueeze(-1)),
            bounds,
            raw_samples=OWN.num_raw,
            num_restarts=OWN.num_restarts,
        )

    return {
        "PathwiseThompsonSampling, optimize_acqf": lambda: acquisition({}),
        "the same, the best raw points as starts": lambda: acquisition(
            {"nonnegative": False, "topn": True}
        ),
        "optimize_posterior_samples, 1,024 features": lambda: samples(1024),
        "the same, 512 features": lambda: samples(512),
    }


def against_direct(
    query: ReadyQuery, *, as_it_is: bool
) -> Iterator[tuple[str, float, float | None]]:
    """DIRECT on the function that a query has maximised, and the gap between the maxima.

    DIRECT may come close to earlier points, so here the query may too.
    """
    search = query.agent.terms.search
    assert isinstance(search, ThompsonSearch)
    free = replace(search, strategy=replace(search.strategy, min_distance=0.0))
    terms: Terms = replace(query.agent.terms, search=free)
    query = replace(query, agent=replace(query.agent, terms=terms))
    found: list[Any] = []

    def recorded(acquisition: Any, *args: Any, **options: Any) -> Any:
        found.append(acquisition)
        return maximize(acquisition, *args, **options)

    with patch.object(local, "maximize", recorded):
        point = query()
    path = found[0].path
    d = point.shape[-1]
    fast = in_numpy(path)
    raw = generator(SEED, "range").uniform(4096, d)
    with torch.no_grad():
        values = path(raw)
        ours = float(path(point))
    assert np.allclose([fast(x) for x in raw[:20].numpy()], values[:20].numpy(), atol=1e-9)

    def search(function: Callable[[Array], float], *, biased: bool) -> tuple[float, float]:
        start = time.process_time()
        result = direct(
            lambda x: -function(x),
            [(0.0, 1.0)] * d,
            maxfun=EVALUATIONS,
            maxiter=10**6,
            locally_biased=biased,
            vol_tol=0,
            len_tol=0,
        )
        ms = 1e3 * (time.process_time() - start)
        assert result.nfev >= EVALUATIONS, result.message
        with torch.no_grad():
            return ms, float(path(torch.from_numpy(result.x)[None]))

    forms = [search(fast, biased=biased) for biased in (True, False)]
    theirs = max(value for _, value in forms)
    spread = max(ours, theirs) - float(values.min())
    yield DIRECT_PLAIN, min(ms for ms, _ in forms), (ours - theirs) / spread
    if as_it_is:

        def slow(x: Array) -> float:
            with torch.inference_mode():
                return float(path(torch.from_numpy(x)[None]))

        yield DIRECT_TORCH, search(slow, biased=False)[0], None


def in_numpy(path: Any) -> Callable[[Array], float]:
    """A path at one point, as fast as it goes: DIRECT asks point by point."""
    parts = list(path.paths.values()) if hasattr(path, "paths") else [path]
    functions = [_linear_in_numpy(part) for part in parts]
    return lambda x: float(sum(function(x) for function in functions))


def _linear_in_numpy(path: Any) -> Callable[[Array], float]:
    features, weights = path.feature_map, path.weight.numpy()
    bias = 0.0 if path.bias_module is None else float(path.bias_module.constant)
    if isinstance(features, RandomFourierFeatures):
        frequencies = features.frequencies.numpy()
        cosines, sines = np.split(weights * features.wave_scales.numpy(), 2)

        def waves(x: Array) -> float:
            angles = frequencies @ x
            return float(np.cos(angles) @ cosines + np.sin(angles) @ sines + bias)

        return waves
    kernel = features.covariance
    lengthscale = kernel.lengthscale.numpy()
    centres = features.centres.numpy() / lengthscale
    scaled = weights * float(kernel.outputscale)

    def sections(x: Array) -> float:
        distances = ((centres - x / lengthscale) ** 2).sum(axis=1)
        return float(np.exp(-0.5 * distances) @ scaled + bias)

    return sections


def queries(dims: dict[int, tuple[int, int]]) -> Rows:
    """All rows for every dimension, given how many seeds and repeats."""
    rows = Rows()
    for d, (seeds, repeats) in dims.items():
        for row, ms, gap in one_query(d, seeds, repeats):
            rows.add(row, d, ms)
            if gap is not None:
                rows.gaps.setdefault(d, []).append(gap)
    return rows


# ------------------------------------------------------------------ growth with the agents

GROWING: tuple[dict[str, tuple[Strategy, MessageKind]], ...] = (  # one group at a time in memory
    {row: (STEPS[row], "mean") for row in ("own step", "received step", "prior step (default)")},
    {"rgpe": (Strategy(transfer="rgpe"), "summary")},
    {"taf": (Strategy(transfer="taf"), "summary_and_incumbent")},
)


ONCE = "taking in a broadcast, once: {}"
QUERIES = {2: (8, 5), 3: (4, 3), 6: (4, 3)}  # seeds and repeats by dimension
MEMORY = ((500, 20), (1000, 10), (1000, 20))  # agents and rounds
CHEAP = {"num_raw": 64, "num_restarts": 2}
SMOKE = {
    "NUM_DATA": 6,
    "NUM_MESSAGES": 4,
    "EVALUATIONS": 200,
    "HISTORY": replace(HISTORY, **CHEAP),
    "STEPS": {row: replace(strategy, **CHEAP) for row, strategy in STEPS.items()},
    "GROWING": tuple(
        {row: (replace(strategy, **CHEAP), kind) for row, (strategy, kind) in rows.items()}
        for rows in GROWING
    ),
    "OWN": replace(OWN, **CHEAP),
    "in_own_process": in_this_process,
}


def growth(sizes: tuple[int, ...], repeats: int) -> dict[str, dict[int, float]]:
    """By row and number of messages: milliseconds of a query, and of taking in a broadcast."""
    federation = Federation(2, 0, num_others=sizes[-1])
    state = federation.history()
    curves: dict[str, dict[int, float]] = {}
    for rows in GROWING:
        works: dict[Any, Callable[[], object]] = {}
        once: dict[Any, Callable[[], object]] = {}
        for row, (strategy, kind) in rows.items():
            everyone = federation.received(kind, sizes[-1])
            for N in sizes:
                names, made = everyone.agents[:N], everyone.made[:N]
                received = Received(names, made, everyone.weights[:N])
                query = ready(federation, strategy, state, kind, received)
                works[row, N] = query
                if row in ("own step", "rgpe", "taf"):
                    once[ONCE.format(kind), N] = partial(take_in, query)
        # The latter in turns of their own: they push out what the process remembers.
        for turns in (works, once):
            for (row, N), ms in interleaved(turns, repeats, warm=turns is works).items():
                curves.setdefault(row, {})[N] = ms
    return curves


def take_in(query: ReadyQuery) -> None:
    """What a site does once with a broadcast: decode and check it."""
    addresses = query.state.broadcasts
    fresh = MemoryBlobs(max_bytes=LARGE)
    for address in addresses:
        fresh.put(query.agent.blobs.get(address))
    agent = replace(query.agent, blobs=fresh)
    agent.check(agent.start(), QUERY, addresses)


def slope(curve: dict[int, float]) -> float:
    """Milliseconds per extra agent, by least squares."""
    return float(np.polyfit(list(curve), list(curve.values()), 1)[0])


# ------------------------------------------------------------------ what the engine adds


class Timed:
    """An agent whose methods are timed."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.seconds = 0.0
        self.state_type, self.accepts, self.blobs = agent.state_type, agent.accepts, agent.blobs
        self.space, self.defers = agent.space, agent.defers

    @property
    def fingerprint(self) -> str:
        return str(self._agent.fingerprint)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        method = getattr(self._agent, verb)

        def timed(*args: Any) -> Any:
            start = time.process_time()
            try:
                return method(*args)
            finally:
                self.seconds += time.process_time() - start

        return timed


@dataclass(frozen=True)
class Nod:
    """The only message of a protocol that does next to nothing."""

    t: int


@dataclass(frozen=True)
class Nodding:
    """Its agent: evaluates one point a round."""

    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    state_type = Nod
    accepts = (Nod,)
    fingerprint = "nodding"
    defers = True

    @property
    def space(self) -> SearchSpace:
        return unit_space(2)

    def start(self) -> Nod:
        return Nod(0)

    def check(self, state: Nod, request: Nod, broadcasts: tuple[str, ...]) -> None: ...

    def receive(self, state: Nod, request: Nod, broadcasts: tuple[str, ...]) -> Nod:
        return Nod(1)

    def wants(self, state: Nod) -> bool:
        return state.t > 0

    def left(self, state: Nod, pending: int) -> int:
        return state.t - pending

    def ask(self, state: Nod, pending: Tensor | None = None) -> Tensor | Pending | None:
        return torch.full((1, 2), 0.5).double() if state.t else None

    def tell(self, state: Nod, X: Tensor, Y: Tensor) -> Nod:
        return Nod(0)

    def reply(self, state: Nod) -> tuple[Nod, Nod]:
        return state, Nod(0)


@dataclass(frozen=True)
class NoddingServer:
    """Its server."""

    agents: tuple[str, ...]
    rounds: int
    state_type = Nod
    accepts = (Nod,)
    fingerprint = "nodding"

    def start(self) -> Nod:
        return Nod(0)

    def outbox(self, state: Nod) -> Outbox | None:
        if state.t == self.rounds:
            return None
        return Outbox(dict.fromkeys(self.agents, state))

    def check(self, state: Nod, sender: str, message: Nod) -> None: ...

    def step(self, state: Nod, inbox: Any) -> Nod:
        return Nod(state.t + 1)


def nothing(X: Tensor) -> Tensor:
    return torch.zeros(len(X), 1, dtype=torch.float64)


def engine_overhead(agents: int, rounds: int, *, nodding: bool, files: bool) -> float:
    """Milliseconds per agent and round that no method of an agent has taken."""
    names = tuple(f"agent{n}" for n in range(agents))
    blobs = MemoryBlobs()
    server: Any
    if nodding:
        server = NoddingServer(names, rounds)
        made: list[Any] = [Nodding(blobs) for _ in names]
    else:
        space = unit_space(2)
        data = {}
        for n, name in enumerate(names):
            X = generator(SEED, "engine", n).uniform(NUM_DATA, 2)
            data[name] = X, X.sin().sum(dim=-1, keepdim=True)
        study = FTS(budget=rounds, strategy=RANDOM, data=data)
        server = study.server(space, names)
        made = [study.agent(name, space, n, blobs) for n, name in enumerate(names)]
    timed = [Timed(agent) for agent in made]
    with store(files) as folder:
        sites = []
        for name, agent in zip(names, timed, strict=True):
            kept: dict[str, Any] = {}
            if folder is not None:
                kept["log"] = FileLog(folder / name, SITE_EVENTS)
            sites.append(Site(name, agent, nothing, **kept))
        with InProcess(sites) as engine:
            total = cpu_ms(lambda: drive(server, engine))
    own = 1e3 * sum(agent.seconds for agent in timed)
    return (total - own) / (agents * (rounds + (not nodding)))  # FTS collects in a round of its own


@contextmanager
def store(files: bool) -> Iterator[Path | None]:
    """A folder for the length of a run, or none."""
    if not files:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def engine_rows(rounds: int, sizes: tuple[int, ...]) -> dict[str, float]:
    """Overhead in milliseconds by what was driven."""
    engine_overhead(5, 2, nodding=False, files=True)  # what every process pays once
    rows = {}
    for name, nodding in (("FTS", False), ("a protocol that does nothing", True)):
        for agents in sizes:
            few = max(3, rounds * sizes[0] // agents)
            row = f"{name}, {agents:,} agents"
            rows[row] = engine_overhead(agents, few, nodding=nodding, files=False)
    row = f"FTS, {sizes[0]} agents, logs in files"
    rows[row] = engine_overhead(sizes[0], rounds, nodding=False, files=True)
    return rows


# ------------------------------------------------------------------ memory


def many_agents(agents: int, rounds: int) -> RunResult:
    """A whole run in memory; queries are random points and messages over 64 candidates."""
    space = unit_space(2)
    objectives, data = {}, {}
    for n in range(agents):
        X = generator(SEED, "many", n).uniform(5, 2)
        data[f"agent{n}"] = X, X.sin().sum(dim=-1, keepdim=True)
        objectives[f"agent{n}"] = nothing
    study = FTS(
        budget=rounds,
        strategy=RANDOM,
        data=data,
        candidates=generator(SEED, "candidates").uniform(64, 2),
    )
    return run(study, objectives, space=space, seed=0, progress=False)


def peak_megabytes(agents: int, rounds: int) -> tuple[float, float]:
    """Peak memory beyond imports in a process of its own, and its CPU seconds."""
    code = (
        "import time, torch\n"
        "from benchmarks.fts import many_agents\n"
        "from benchmarks.models import resident_peak\n"
        "torch.set_num_threads(1)\n"
        "many_agents(3, 3)\n"
        "before, start = resident_peak(), time.process_time()\n"
        f"many_agents({agents}, {rounds})\n"
        "print(resident_peak() - before, time.process_time() - start)\n"
    )
    megabytes, seconds = in_own_process(code)
    return float(megabytes), float(seconds)


# ------------------------------------------------------------------ figures


def figures_of(
    rows: Rows,
    curves: dict[str, dict[int, float]],
    overhead: dict[str, float],
    memory: dict[tuple[int, int], tuple[float, float]],
) -> dict[str, float]:
    gaps = rows.gaps[2]
    own, received = curves["own step"], curves["received step"]
    both = {N: (own[N] + received[N]) / 2 for N in own}
    query = (rows.mean("own step", 2) + rows.mean("received step", 2)) / 2
    return {
        "query_ms": round(query, 2),
        "fit_ms": round(rows.mean(FIT, 2), 2),
        "query_value_gap_vs_direct": float(f"{statistics.mean(gaps):.3g}"),
        "worst_value_gap_vs_direct": float(f"{min(gaps):.3g}"),
        "prior_query_ms": round(rows.mean("prior step (default)", 2), 2),
        "fts_ms_per_extra_agent": round(slope(both), 5),
        "rgpe_ms_per_extra_agent": round(slope(curves["rgpe"]), 4),
        "taf_ms_per_extra_agent": round(slope(curves["taf"]), 4),
        "engine_overhead_ms": round(next(iter(overhead.values())), 3),
        "peak_mb_1000_agents": round(list(memory.values())[-1][0], 1),
    }


def tables(
    rows: Rows,
    curves: dict[str, dict[int, float]],
    overhead: dict[str, float],
    memory: dict[tuple[int, int], tuple[float, float]],
) -> Iterator[Table]:
    dims = sorted({d for _, d in rows.ms})
    table = Table(
        "CPU milliseconds of a query",
        *(f"d = {d}" for d in dims),
        title=f"{NUM_DATA} observations, {NUM_MESSAGES} messages; "
        f"{OWN.num_raw:,} points, {OWN.num_restarts} restarts",
    )
    for row in dict.fromkeys(row for row, _ in rows.ms):
        cells = [f"{rows.mean(row, d):,.1f}" if (row, d) in rows.ms else "" for d in dims]
        table.add_row(row, *cells)
    yield table
    title = f"(Our maximum - DIRECT's at {EVALUATIONS:,} evaluations) / range"
    table = Table("d", "functions", "mean", "worst", "best", "below -1e-6", title=title)
    for d in dims:
        gaps = rows.gaps[d]
        numbers = (f"{value:+.1e}" for value in (statistics.mean(gaps), min(gaps), max(gaps)))
        table.add_row(str(d), str(len(gaps)), *numbers, str(sum(gap < -1e-6 for gap in gaps)))
    yield table
    title = "CPU milliseconds of a query against the number of other agents, d = 2"
    sizes = list(curves["own step"])
    table = Table("row", *(f"N = {N:,}" for N in sizes), "per extra agent", title=title)
    for row, curve in curves.items():
        table.add_row(row, *(f"{curve[N]:,.1f}" for N in sizes), f"{slope(curve):.4f}")
    yield table
    table = Table("driven in one process", "ms", title="Overhead per agent and round, CPU")
    for row, ms in overhead.items():
        table.add_row(row, f"{ms:.3f}")
    yield table
    table = Table(
        "agents", "rounds", "peak, MB", "CPU s", title="Memory of a whole run beyond imports"
    )
    for (agents, rounds), (megabytes, seconds) in memory.items():
        table.add_row(f"{agents:,}", str(rounds), f"{megabytes:.1f}", f"{seconds:.1f}")
    yield table


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of federated Thompson sampling.")
    parser.add_argument("--json", action="store_true", help="print one line of figures")
    parser.add_argument(
        "--quick", action="store_true", help="fewer seeds, repeats, agents and rounds"
    )
    parser.add_argument("--smoke", action="store_true", help="does everything run?")
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # SciPy's BLAS reads it when it is loaded
        again = [sys.executable, "-m", "benchmarks.fts", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)  # as agents compute
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if args.smoke:
        with patch.dict(globals(), SMOKE):
            measured = (
                queries({2: (1, 1)}),
                growth((2, 4), 1),
                engine_rows(2, (3,)),
                {(5, 2): peak_megabytes(5, 2)},
            )
            show(*measured, as_json=args.json)
        return
    quick = args.quick
    show(
        queries({2: (2, 3)} if quick else QUERIES),
        growth((28, 300) if quick else SIZES, 2 if quick else 3),
        engine_rows(5 if quick else 20, (50,) if quick else (50, 200, 1000)),
        {sizes: peak_megabytes(*sizes) for sizes in ([(1000, 2)] if quick else MEMORY)},
        as_json=args.json,
    )


def show(
    rows: Rows,
    curves: dict[str, dict[int, float]],
    overhead: dict[str, float],
    memory: dict[tuple[int, int], tuple[float, float]],
    *,
    as_json: bool,
) -> None:
    """Figures and tables, or figures alone."""
    figures = figures_of(rows, curves, overhead, memory)
    if as_json:
        print(json.dumps(figures))
        return
    console = Console()
    versions = ", ".join(f"{p} {version(p)}" for p in ("torch", "gpytorch", "botorch", "scipy"))
    console.print(f"{versions}; Python {platform.python_version()}; one thread")
    for table in tables(rows, curves, overhead, memory):
        console.print(table)
    table = Table("figure", "value", title="Figures")
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    console.print(table)


if __name__ == "__main__":
    main()
