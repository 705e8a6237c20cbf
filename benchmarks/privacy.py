"""Speed of the privacy core, its audit, and how much signal private releases carry.

    python -m benchmarks.privacy [--json] [--quick | --smoke] [--only release,accounting,…]

One thread; times are best or median of turns that alternate with the peer's in the same process.
Parts for ``--only``, and their keys of ``--json``:

    release     release_ratio_vs_numpy_sum  CorrelatedGaussianSum.release / numpy's sum(axis=0) over
                                            the same bytes, best of alternating turns: 10^6 vectors,
                                            M = 100, P = 4, q = 0.35, one block in memory per
                                            region; noise, coins and clipping included
                release_peak_mb_1e6         peak memory of that mechanism and its release beyond the
                                            data, in a process of its own
    accounting  pld_1e4_rounds_s            CPU time of epsilon for 10^4 rounds at q = 0.1, z = 1,
                                            all caches cold, median of three processes; without the
                                            import of dp_accounting (the table has it)
    noise       lattice_1e6_s               10^6 lattice Gaussians of the operating system's entropy
    query       regional_query_ms           CPU time of maximising a release, region by region:
                                            P = 4, M = 100, d = 2, 1,000 points, 20 restarts, the
                                            paper's basis; median over draws
    audit       audit_pass                  share of audits that pass: all mechanisms of
                                            `privacy_mutants.CASES`, 20 seeds each
    mutants     mutants_caught, mutants     defects of `privacy_mutants` whose audit fails, and all:
                                            each is counted once per mechanism in which it is one
    signal      snr_gain_vs_paper           mean over releases of |signal| / |noise|: all four of
                                            `DPFTSDE(epsilon=2.0)` / all 60 of `paper_settings`
                                            (q = 0.35, z = 1), whole runs with 10 starts per agent

The signal of a release is the release minus what the same protocol releases without data, with the
same coins and noise: agents that have observed nothing send what their own random stream alone
makes of the prior, or nothing. The problem is Landmine (29 agents) if ``BOTORCH_FED_DATA`` is set,
else a synthetic one of as many agents.

``--quick`` has N up to 10^5, two seeds, three mechanisms and two releases of either design;
``--smoke`` runs everything once, so small that the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from botorch.optim.optimize import optimize_acqf
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.models import resident_peak
from benchmarks.papers.published.features import PaperCosine
from benchmarks.papers.published.settings import paper_settings
from benchmarks.privacy_mutants import CASES, MUTANTS, VARIANTS, audited, installed
from benchmarks.problems.landmine import Landmine
from benchmarks.processes import in_own_process, in_this_process
from botorch_fed.acquisition import Partition, ThompsonSampling, weight_path
from botorch_fed.acquisition.optimize import maximize
from botorch_fed.aggregation.noisy import NoisySum, Plan
from botorch_fed.federation.agent import AgentState, FederatedAgent
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.terms import Contribution, Terms
from botorch_fed.models import FeatureMap, RandomFourierFeatures, StationaryKernel
from botorch_fed.privacy import (
    CorrelatedGaussianSum,
    InsecureSeededNoise,
    Ledger,
    OSNoise,
    PoissonSampling,
)
from botorch_fed.privacy.hazmat.noise import lattice_gaussian
from botorch_fed.rng import generator
from botorch_fed.search.released import ReleaseSearch
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE
from botorch_fed.test_functions.base import FederatedTestProblem
from botorch_fed.test_functions.synthetic import SyntheticGPAgents
from botorch_fed.wire.codec import encode

NUM_FEATURES, NUM_REGIONS, RATE = 100, 4, 0.35
NUM_RAW, NUM_RESTARTS = 1000, 20
ROUNDS, DELTA = 10_000, 1e-5
QUICK_CASES = ("plain, sampled", "weighted, sampled", "correlated, sampled")
RERUNS = 2  # of those
SEED = 20260404
SIZES = (10**3, 10**4, 10**5, 10**6)  # vectors in a release
TURNS = 10**7  # vectors in all releases of a size
DRAWS = 10**6
LIMITS = (60, 1000, ROUNDS)  # rounds that are accounted for
OTHERS = ("rdp", "dp-accounting-rdp", "prv")
REGIONS = (1, 4, 16, 64)
TIMES = 3  # that the package's accountant is timed
SMOKE: dict[str, Any] = {
    "ROUNDS": 20,
    "NUM_FEATURES": 8,
    "NUM_RAW": 64,
    "NUM_RESTARTS": 4,
    "SIZES": (10**3,),
    "TURNS": 10**4,
    "DRAWS": 10**3,
    "LIMITS": (20,),
    "OTHERS": ("rdp",),
    "REGIONS": (1, 4),
    "problem": lambda: SyntheticGPAgents(6, seed=0, lengthscale=0.1),
    "QUICK_CASES": ("plain, sampled",),
    "RERUNS": 1,
    "MUTANTS": MUTANTS[:1],
    "VARIANTS": (),
    "TIMES": 1,
    "in_own_process": in_this_process,
}

Figures = dict[str, float]
Part = tuple[Figures, list[Table]]
Blocks = list[tuple[int, Tensor]]
Sent = dict[int, Tensor | None]  # messages by the agent's number


def in_turns(
    works: dict[str, Callable[[], object]], turns: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each, turn by turn, so that a busy machine treats all alike; one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(turns + 1):
        for name, work in works.items():
            start = clock()
            work()
            if turn:
                times[name].append(clock() - start)
    return times


# ------------------------------------------------------------------ releases


def contributions(num_agents: int) -> tuple[Tensor, Blocks]:
    """All vectors, `N x M`, and the same bytes as one block per region."""
    rows = np.random.default_rng(SEED).standard_normal((num_agents, NUM_FEATURES))
    X = torch.from_numpy(rows)
    size = num_agents // NUM_REGIONS
    return X, [(first, X[first : first + size]) for first in range(0, num_agents, size)]


def correlated_sum(num_agents: int) -> CorrelatedGaussianSum:
    regions = np.repeat(np.arange(NUM_REGIONS), num_agents // NUM_REGIONS)
    return CorrelatedGaussianSum(
        num_agents=num_agents,
        dim=NUM_FEATURES,
        clip_norm=11.0,
        noise_multiplier=1.0,
        sampling=PoissonSampling(RATE),
        regions=tuple(regions.tolist()),
        num_regions=NUM_REGIONS,
        contrast=15.0,
    )


def release(mechanism: CorrelatedGaussianSum, given: Tensor | Blocks) -> None:
    made, _ = mechanism.release(given, ledger=Ledger(), noise=OSNoise(), path=())
    assert made.values.shape == (NUM_REGIONS, NUM_FEATURES)


def extra_memory(num_agents: int) -> float:
    """Megabytes at the peak of building a mechanism and releasing, beyond what was there before."""
    release(correlated_sum(1000), contributions(1000)[1])
    _, blocks = contributions(num_agents)
    with suppress(OSError):  # Linux: the high-water mark starts again from what is resident now
        Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    release(correlated_sum(num_agents), blocks)
    return resident_peak() - before


def release_times(num_agents: int, turns: int) -> dict[str, float]:
    """Milliseconds, best of all turns, of NumPy's sum and of two forms of release."""
    X, blocks = contributions(num_agents)
    mechanism = correlated_sum(num_agents)
    works: dict[str, Callable[[], object]] = {
        "sum": partial(X.numpy().sum, axis=0),
        "blocks": partial(release, mechanism, blocks),
        "tensor": partial(release, mechanism, X),
    }
    times = in_turns(works, turns, time.perf_counter)
    return {name: 1e3 * min(values) for name, values in times.items()}


def releases(quick: bool) -> Part:
    table = Table(
        *("N", "numpy sum, ms", "blocks, ms", "ratio", "one tensor, ms", "ratio", "peak, MB"),
        title=f"Release of N vectors, M = {NUM_FEATURES}, P = {NUM_REGIONS}, q = {RATE}",
    )
    figures: Figures = {}
    for num_agents in (N for N in SIZES if not quick or N < 10**6):
        best = release_times(num_agents, max(5 if quick else 60, min(300, TURNS // num_agents)))
        (peak,) = in_own_process(
            "import torch, warnings; torch.set_num_threads(1); warnings.simplefilter('ignore')\n"
            "from benchmarks.privacy import extra_memory\n"
            f"print(extra_memory({num_agents}))"
        )
        ratio = best["blocks"] / best["sum"]
        figures = {  # of the largest
            "release_ratio_vs_numpy_sum": round(ratio, 2),
            "release_peak_mb_1e6": round(float(peak), 1),
        }
        table.add_row(
            f"{num_agents:,}",
            f"{best['sum']:.3f}",
            f"{best['blocks']:.3f}",
            f"{ratio:.2f}",
            f"{best['tensor']:.3f}",
            f"{best['tensor'] / best['sum']:.2f}",
            f"{float(peak):.1f}",
        )
    return figures, [table]


# ------------------------------------------------------------------ accounting


def accounting(quick: bool) -> Part:
    def program(num_rounds: int, accountant: str) -> str:
        # The first call, of another event, pays for the import.
        return (
            "import time\n"
            "from botorch_fed.privacy import epsilon\n"
            "def cost(q, z, T):\n"
            "    start = time.process_time()\n"
            "    spent = epsilon(sampling_rate=q, noise_multiplier=z, num_releases=T,\n"
            f"        delta={DELTA}, accountant={accountant!r})\n"
            "    return time.process_time() - start, spent.epsilon\n"
            f"first, _ = cost(.2, 3, 1); print(first, *cost(.1, 1, {num_rounds}))"
        )

    peer = (
        "import time\n"
        "import dp_accounting as dp\n"
        "from dp_accounting.pld import PLDAccountant\n"
        "def cost(q, z, T):\n"
        "    start = time.process_time()\n"
        "    event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z))\n"
        f"    spent = PLDAccountant().compose(event, T).get_epsilon({DELTA})\n"
        "    return time.process_time() - start, spent\n"
        f"first, _ = cost(.2, 3., 1); print(first, *cost(.1, 1., {ROUNDS}))"
    )
    programs = {f"pld, {T:,} rounds": program(T, "pld") for T in LIMITS}
    ours = list(programs)[-1]
    programs[f"dp_accounting's PLDAccountant, its defaults, {ROUNDS:,} rounds"] = peer
    for accountant in (name for name in OTHERS if not quick or name != "prv"):
        programs[f"{accountant}, {ROUNDS:,} rounds"] = program(ROUNDS, accountant)
    table = Table(
        *("accountant", "CPU s", "epsilon", "first call, CPU s"),
        title=f"q = 0.1, z = 1, delta = {DELTA:g}; caches cold, each in its own process",
    )
    figures: Figures = {}
    for name, code in programs.items():
        runs = [
            [float(x) for x in in_own_process(code)] for _ in range(TIMES if name == ours else 1)
        ]
        first, seconds, spent = (statistics.median(column) for column in zip(*runs, strict=True))
        if name == ours:
            figures["pld_1e4_rounds_s"] = round(seconds, 3)
        table.add_row(name, f"{seconds:.3f}", f"{spent:.3f}", f"{first:.2f}")
    return figures, [table]


# ------------------------------------------------------------------ noise


def noise(quick: bool) -> Part:
    count = DRAWS
    zeros, normals = torch.zeros(count, dtype=torch.float64), np.random.default_rng(SEED)
    ours = "lattice_gaussian, OSNoise"
    works: dict[str, Callable[[], object]] = {
        ours: lambda: lattice_gaussian(zeros, 1.0, noise=OSNoise(), path=()),
        "lattice_gaussian, InsecureSeededNoise": lambda: lattice_gaussian(
            zeros, 1.0, noise=InsecureSeededNoise(0), path=()
        ),
        "numpy's standard_normal, no lattice, no secret": lambda: normals.standard_normal(count),
        "torch.randn, float64, the same": lambda: torch.randn(count, dtype=torch.float64),
    }
    best = {k: min(v) for k, v in in_turns(works, 3 if quick else 10, time.perf_counter).items()}
    table = Table("normals", "s", title=f"{count:,} draws")
    for name, seconds in best.items():
        table.add_row(name, f"{seconds:.4f}")
    return {"lattice_1e6_s": round(best[ours], 4)}, [table]


# ------------------------------------------------------------------ regional queries


def bases() -> dict[str, FeatureMap]:
    stream = generator(SEED, "bases")
    short, long = (StationaryKernel(math.inf, [ell] * 2) for ell in (0.01, 0.3))
    return {
        "the paper's, 0.01": PaperCosine.draw(short, NUM_FEATURES, generator=stream),
        "RFF, 0.3": RandomFourierFeatures.draw(long, NUM_FEATURES, generator=stream),
    }


def one_query(phi: FeatureMap, partition: Partition, seed: int) -> float:
    """Maximise a release of noise: the value that was found."""
    acquisition = ThompsonSampling(weight_path(phi, released(partition, seed)), partition)
    stream = generator(SEED, "raw points", seed)
    options: Any = {"num_raw": NUM_RAW, "num_restarts": NUM_RESTARTS, "partition": partition}
    return maximize(acquisition, partition.dim, generator=stream, **options)[1]


def peer_query(phi: FeatureMap, partition: Partition, seed: int) -> float:
    """The same budget by one `optimize_acqf` per region, as BoTorch offers it."""
    P, values = partition.num_regions, []
    for region, weights in enumerate(released(partition, seed)):
        _, value = optimize_acqf(
            ThompsonSampling(weight_path(phi, weights)),
            partition.bounds(region),
            q=1,
            num_restarts=NUM_RESTARTS // P,
            raw_samples=NUM_RAW // P,
            options={"nonnegative": False, "topn": True},
        )
        assert value is not None
        values.append(float(value))
    return max(values)


def released(partition: Partition, seed: int) -> Tensor:
    return generator(SEED, "released", seed).normal(partition.num_regions, NUM_FEATURES)


def queries(quick: bool) -> Part:
    table = Table(
        *("basis", "P", "ms", "optimize_acqf per region, ms", "our value / its"),
        title=f"CPU time of maximising a release: d = 2, M = {NUM_FEATURES}, {NUM_RAW:,} points, "
        f"{NUM_RESTARTS} restarts",
    )
    figures: Figures = {}
    turns = 5 if quick else 20
    for basis, phi in bases().items():
        for P in REGIONS:
            partition = Partition.regular(P, 2)
            works = {"ours": one_query} | ({"peer": peer_query} if P <= 4 else {})
            times: dict[str, list[float]] = {name: [] for name in works}
            found: dict[str, list[float]] = {name: [] for name in works}
            for seed in range(turns + 1):  # in turns, as everywhere
                for name, work in works.items():
                    start = time.process_time()
                    value = work(phi, partition, seed)
                    times[name].append(1e3 * (time.process_time() - start))
                    found[name].append(value)
            ms = {name: statistics.median(values[1:]) for name, values in times.items()}
            if P == NUM_REGIONS:
                figures.setdefault("regional_query_ms", round(ms["ours"], 1))  # the paper's basis
            peer = ["", ""]
            if "peer" in ms:
                pairs = zip(found["ours"], found["peer"], strict=True)
                better = statistics.mean(a / b for a, b in pairs)
                peer = [f"{ms['peer']:.1f}", f"{better:.3f}"]
            table.add_row(basis, str(P), f"{ms['ours']:.1f}", *peer)
    return figures, [table]


# ------------------------------------------------------------------ audits


def audits(quick: bool) -> Part:
    table = Table("mechanism", "passed", "audits", "s each", title="Audits of what is shipped")
    passed = total = 0
    for case in QUICK_CASES if quick else CASES:
        start = time.process_time()
        reports = [audited(case, seed=seed) for seed in range(RERUNS if quick else 20)]
        seconds = (time.process_time() - start) / len(reports)
        good = sum(report.passed for report in reports)
        passed, total = passed + good, total + len(reports)
        table.add_row(case, str(good), str(len(reports)), f"{seconds:.2f}")
    return {"audit_pass": round(passed / total, 4)}, [table]


def mutants(quick: bool) -> Part:
    table = Table("defect", "caught", "mechanisms", "missed in", title="Audits of defects")
    caught = total = 0
    for mutant in MUTANTS + VARIANTS:
        cases = [case for case in mutant.cases if not quick or case in QUICK_CASES]
        missed = []
        for case in cases:
            with installed(mutant):
                if audited(case).passed:
                    missed.append(case)
        caught, total = caught + len(cases) - len(missed), total + len(cases)
        row = (mutant.name, str(len(cases) - len(missed)), str(len(cases)), "; ".join(missed))
        table.add_row(*row)
    return {"mutants_caught": caught, "mutants": total}, [table]


# ------------------------------------------------------------------ signal and noise


@dataclass(frozen=True)
class Strength:
    """Of one release: `P` ratios to the noise for each meaning of signal, and the noise.

    Attributes:
        signal: What it is beyond agents that have observed nothing.
        outcomes: Beyond agents with the same points whose outcomes are all equal.
        whole: All but the noise.
        noise: Its norms.
    """

    signal: Tensor
    outcomes: Tensor
    whole: Tensor
    noise: Tensor


def problem() -> FederatedTestProblem:
    if os.environ.get("BOTORCH_FED_DATA"):
        return Landmine()
    return SyntheticGPAgents(29, seed=0, perturbed="all", lengthscale=0.1)


def strengths(
    study: DPFTSDE, agents_of: FederatedTestProblem, seed: int, count: int
) -> Iterator[Strength]:
    """Run a study up to its `count`-th release with the shipped server and agents."""
    study = replace(study, noise=InsecureSeededNoise(seed))
    space, blobs = agents_of.space, MemoryBlobs()
    names = tuple(f"agent{n}" for n in range(len(agents_of)))
    agents = [study.agent(name, space, 1000 * seed + n, blobs) for n, name in enumerate(names)]
    server = study.server(space, names)
    plan, states = plan_of(server), [a.start() for a in agents]
    state, made = server.start(), 0
    while made < count and (outbox := server.outbox(state)) is not None:
        addresses = tuple(blobs.put(encode(broadcast)) for broadcast in outbox.broadcasts)
        given: Sent = {}
        blank: Sent = {}
        flat: Sent = {}
        for n, (name, agent) in enumerate(zip(names, agents, strict=True)):
            request = outbox.messages[name]
            agent.check(states[n], request, addresses)
            told = agent.receive(states[n], request, addresses)
            X = agent.ask(told)
            if X is not None:
                assert isinstance(X, Tensor)
                told = agent.tell(told, X, observed(agents_of, n, X, seed, len(told.X)))
            states[n], upload = agent.reply(told)
            given[n] = upload.values
            flat[n] = agent.reply(replace(told, Y=torch.zeros_like(told.Y)))[1].values
            blank[n] = without_data(agent, told, server.terms)
        if state.t in plan.releases:
            yield strength(server, state.t, given, blank, flat)
            made += 1
        inbox = {name: Contribution(given[n]) for n, name in enumerate(names)}
        state = server.step(state, inbox)


def plan_of(server: FederatedServer) -> Plan:
    """What a server releases."""
    aggregation = server.terms.aggregation
    assert isinstance(aggregation, NoisySum)
    return aggregation.plan(server.hub.terms)


def strength(server: FederatedServer, t: int, given: Sent, blank: Sent, flat: Sent) -> Strength:
    """Compare four releases with the same coins and noise."""
    mechanism, path = plan_of(server).mechanism(t), ("release", t)
    noise = server.resources.noise

    def values(sent: Sent) -> Tensor:
        contributions = {n: weights for n, weights in sent.items() if weights is not None}
        made, _ = mechanism.release(contributions, ledger=Ledger(), noise=noise, path=path)
        return made.values

    release, nothing = values(given), values({})
    silence = nothing.norm(dim=-1)
    signal, outcomes, whole = (
        (release - other).norm(dim=-1) / silence for other in (values(blank), values(flat), nothing)
    )
    return Strength(signal, outcomes, whole, silence)


def observed(agents_of: FederatedTestProblem, n: int, X: Tensor, seed: int, known: int) -> Tensor:
    Y = agents_of.evaluate(n, X).unsqueeze(-1)
    if not agents_of.noise_std:
        return Y
    return Y + agents_of.noise_std * generator(seed, "noise", n, known).normal(*Y.shape)


def without_data(agent: FederatedAgent, state: AgentState, terms: Terms) -> Tensor | None:
    """What the agent's stream makes of the prior alone; None if it then has nothing to send."""
    search = terms.search
    if not isinstance(search, ReleaseSearch) or search.messages.kind == "gain":
        return None
    stream = generator(agent.seed, "message", state.used - state.first)  # as `reply` does
    return search.messages.make(terms.feature_map, state.X[:0], state.Y[:0], generator=stream)


def signals(quick: bool) -> Part:
    agents_of = problem()
    paper = paper_settings(agents_of.space.dim)
    rounds = paper.rounds_for(())
    own = DPFTSDE(budget=rounds + 3, epsilon=2.0)
    ours, published = "default", "as published"
    few = 2 if quick else 4
    correlated = replace(paper, noise_kind="correlated")
    rows: dict[str, tuple[DPFTSDE, int]] = {
        ours: (own, few),
        published: (paper, few if quick else rounds),
        "first releases": (paper, few),
        "correlated noise": (correlated, few),
        "also q = 1": (replace(correlated, sampling=PoissonSampling(1.0)), few),
    }
    names = tuple(f"agent{n}" for n in range(len(agents_of)))
    table = Table(
        *("design", "M", "P", "releases", "epsilon"),
        *("signal / noise", "outcomes alone", "all but noise", "|noise|"),
        title=f"{type(agents_of).__name__}, {len(agents_of)} agents, 10 starts each; the last rows "
        "change the published design step by step",
    )
    means: dict[str, float] = {}
    for row, (study, count) in rows.items():
        server = study.server(agents_of.space, names)
        found = [
            one
            for seed in range(1 if quick else 2)
            for one in strengths(study, agents_of, seed, count)
        ]
        numbers = [
            float(torch.stack([getattr(one, what) for one in found]).mean())
            for what in ("signal", "outcomes", "whole", "noise")
        ]
        means[row] = numbers[0]
        assert server.promise is not None
        table.add_row(
            row,
            str(server.feature_map.num_features),
            str(study.num_regions),
            f"{count} of {len(plan_of(server).releases)}",
            f"{server.promise.epsilon:.2f}",
            *(f"{number:.3g}" for number in numbers),
        )
    return {"snr_gain_vs_paper": round(means[ours] / means[published], 1)}, [table]


# ------------------------------------------------------------------ all of it

PARTS: dict[str, Callable[[bool], Part]] = {
    "release": releases,
    "accounting": accounting,
    "noise": noise,
    "query": queries,
    "audit": audits,
    "mutants": mutants,
    "signal": signals,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed, audit and signal of the privacy core.")
    parser.add_argument("--json", action="store_true", help="print one line of figures")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer runs of everything")
    parser.add_argument("--smoke", action="store_true", help="does everything run?")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if os.environ.get("OMP_NUM_THREADS") != "1":  # NumPy's BLAS reads it when it is loaded
        again = [sys.executable, "-m", "benchmarks.privacy", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")

    load, quick = os.getloadavg()[0], args.quick or args.smoke
    with patch.dict(globals(), SMOKE if args.smoke else {}):
        results = [PARTS[part](quick) for part in PARTS if part in chosen]
    figures = {key: value for part, _ in results for key, value in part.items()}
    if args.json:
        print(json.dumps(figures))
        return
    console = Console()
    packages = ("numpy", "torch", "botorch", "opacus", "dp_accounting")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    console.print(f"{versions}; Python {platform.python_version()}; one thread; load {load:.1f}")
    for _, tables in results:
        for table in tables:
            console.print(table)
    table = Table("figure", "value", title="Figures")
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    console.print(table)


if __name__ == "__main__":
    main()
