"""What encrypted sums cost, beside TenSEAL's one key and OpenFHE's threshold keys.

    python -m benchmarks.encryption [--json] [--quick | --smoke] [--only sums,search]
    python -m benchmarks.encryption --against FOLDER

One thread. Every side is a process of its own; all run in turns, twice, and every figure is the
best of all repeats, in CPU time. An agent contributes the S(S + 3)/2 numbers of a summary over S
support points, up to 10^4 in size, on the grid's default of 2^-36 of that. Keys of ``--json``:

    agent_cpu_ms_{n}_S{S}         a fresh key share (with all announcements verified and the keys of
                                  pairs), one encryption (with the first look at the joint key), one
                                  partial decryption and one opening, masks included, of n agents
    joint_key_cpu_ms_{n}_S{S}     besides, once for each joint key: reading the sum of all shares
    server_cpu_ms_{n}_S{S}        checks and adds all contributions and all shares
    ratio_vs_tenseal_single_key   agent_cpu_ms_10_S32 / encrypt + serialise + load + decrypt of
                                  TenSEAL's vectors, as `CKKSChannel` sets them: exact on that grid
    ratio_vs_tenseal_usual        the same at the settings of its tutorials: degree 8192, primes of
                                  60, 40, 40 and 60 bits, scale 2^40
    ratio_vs_openfhe              the same against OpenFHE's threshold CKKS at its defaults, where
                                  ``OPENFHE_PYTHON`` names an interpreter that has it; else null
    ratio_vs_openfhe_best         its fastest of the settings below whose error is not beyond its
                                  defaults'
    kbytes_per_agent_S32          what one agent sends in a round: contribution and share
    kbytes_setup                  what one agent sends for each joint key
    kbytes_setup_received         what one agent is sent for each joint key
    setup_cpu_s_1000              of a joint key, the first agent's, which makes the key to sums
    setup_mbytes_1000             what it sends and is sent for that
    max_rel_error_50_agents       error of the sum before it is snapped to the grid, over the
                                  largest number of the sum, 50 agents, S = 32; after it there is
                                  none, or the benchmark fails
    flooding_bits                 how much larger the noise in what is opened is than the noise it
                                  hides, per agent: of real and imaginary slots the smaller
    fed_gp_cpu_s_10_S8_50         FBO-FedGP as published, encrypted: 10 agents, S = 8, 50 rounds
    fed_gp_cpu_s_30_S32_50        30 agents, S = 32; objectives of ten dimensions, excluded
    fed_gp_cpu_s_10_region_50     the search in a shrinking region: 10 agents, 24,010 numbers

``--against FOLDER`` compares with package and benchmark of another checkout, in turns, and writes
``benchmarks/results/encryption.json``. The committed file is against commit 66d1df1, the last one
without masks: ``git archive 66d1df1 | tar -x -C FOLDER``.

TenSEAL's figures have neither checks of what arrives nor names, rounds and checksums, ours have.
OpenFHE's have no bytes at all: it adds 20 bits of noise to a share; ours have what 50 sums need to
be hidden to a total variation of 2^-40, 47 bits for S = 32.

``--quick`` has fewer sizes and repeats, and two rounds of a search; ``--smoke`` runs everything
once, in one process and so small that the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from botorch_fed.privacy.channels import (
    _GATHERED,
    _HEADER,
    _SETUP,
    CKKSChannel,
    Epoch,
    Gathered,
    ThresholdCKKSChannel,
)
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat import ckks
from botorch_fed.privacy.hazmat import keys as agreement
from botorch_fed.rng import generator
from botorch_fed.storage.store import MemoryStore

HERE = Path(__file__).resolve().parent.parent
BOUND = 1e4
AGENTS, SIZE = 10, 32
SUMS = 50  # for which shares are flooded
MANY = 1000
# (agents, S): six to compare, and more for the growth with either
CASES = [(n, S) for n in (10, 50) for S in (8, 32, 100)] + [(2, 32), (5, 32), (20, 32), (10, 64)]
QUICK_CASES = [(10, 8), (10, 32)]
SEARCHES = [(10, 8), (30, 32)]
USUAL = {"degree": 8192, "bits": [60, 40, 40, 60], "scale": 2.0**40}
# Settings of OpenFHE beyond its defaults (one multiplication, all else its own).
OPENFHE_SETTINGS: dict[str, dict[str, int]] = {
    "defaults": {"depth": 1},
    "no multiplication": {"depth": 0},
    "no multiplication, 59 bits": {"depth": 0, "scaling": 59, "first": 60},
    "one, 59 bits": {"depth": 1, "scaling": 59, "first": 60},
}
SEED = 20260404

Costs = dict[str, float]  # of one side, by part
Figures = dict[str, float | None]
_T = TypeVar("_T")


def numbers(size: int) -> int:
    """How many numbers a summary over `size` support points has."""
    return size * (size + 3) // 2


@dataclass
class Best:
    """The least milliseconds of every part of a work."""

    ms: dict[str, float] = field(default_factory=dict)

    def __call__(self, part: str, work: Callable[[], _T]) -> _T:
        start = time.process_time()
        result = work()
        spent = 1e3 * (time.process_time() - start)
        self.ms[part] = min(spent, self.ms.get(part, math.inf))
        return result


def contributions(grid: PublicGrid, num_agents: int) -> Tensor:
    """Integers of all agents, `n x dim`."""
    uniforms = generator(SEED, "contributions", num_agents).uniform(num_agents, grid.dim)
    return torch.stack([grid.to_integers((2 * row - 1) * grid.bound) for row in uniforms])


# ------------------------------------------------------------------ our side


def our_costs(num_agents: int, size: int, repeats: int) -> Costs:
    """Costs of the first agent, which is the first to do everything, and of the server."""
    channel = ThresholdCKKSChannel(PublicGrid(numbers(size), BOUND, num_agents), sums=SUMS)
    rows = contributions(channel.grid, num_agents)
    best, error = Best(), 0.0
    sent: dict[str, int] = {}
    for turn in range(repeats):
        epoch = Epoch("benchmark", turn, tuple(f"agent{i}" for i in range(num_agents)))
        found, sent = one_epoch(channel, epoch, rows, best)
        error = max(error, found)
    ms = best.ms
    return {
        "key_share": sum(ms[f"key share {phase}"] for phase in range(channel.setup_phases)),
        "joint_key": ms["joint key"],
        "encrypt": ms["encrypt"],
        "share": ms["share"],
        "open": ms["open"],
        "server": ms["add"] + ms["request"] + ms["fuse"],
        "server_setup": sum(ms[f"gather {phase}"] for phase in range(channel.setup_phases)),
        "setup_kb": sent["set-up"] / 1e3,
        "setup_received_kb": sent["set-up received"] / 1e3,
        "round_kb": sent["round"] / 1e3,
        "error": error,
    }


def one_epoch(
    channel: ThresholdCKKSChannel, epoch: Epoch, rows: Tensor, best: Best
) -> tuple[float, dict[str, int]]:
    """A joint key and one sum: its error before it is snapped, and the bytes of the first agent."""
    at: Any = {"epoch": epoch, "round": 0}
    names = epoch.roster
    me, stores = names[0], {name: MemoryStore() for name in names}
    integers = dict(zip(names, rows, strict=True))
    sent = {"set-up": 0, "set-up received": 0, "round": 0}

    def everybody(part: str, kind: str, work: Callable[[str], bytes]) -> dict[str, bytes]:
        mine = best(part, partial(work, me))
        sent[kind] += len(mine)
        return {me: mine} | {name: work(name) for name in names[1:]}

    def prepared(phase: int, before: Gathered, name: str) -> bytes:
        return channel.prepare(phase, epoch, name, before, stores[name])

    def gathered(before: Gathered, messages: dict[str, bytes]) -> Mapping[str, bytes]:
        for name in names:
            channel.check_prepared(messages[name], epoch=epoch, sender=name, gathered=before)
        return channel.gather(messages, epoch=epoch, gathered=before)

    def joint(name: str) -> bytes:
        return channel.joint_key(epoch, heard, me=name, secrets=stores[name])

    def protected(name: str) -> bytes:
        mine: Any = {"me": name, "key": keys[name], "secrets": stores[name]}
        return channel.protect(integers[name], **at, **mine)

    def added() -> bytes:
        for name in names:
            channel.check(payloads[name], **at, sender=name)
        return channel.add(payloads, **at)

    def shared(name: str) -> bytes:
        return channel.share(request, **at, me=name, secrets=stores[name])

    def fused() -> bytes:
        for name in names:
            channel.check_share(shares[name], **at, sender=name, total=total)
        return channel.fuse(total, shares, **at)

    heard: Gathered = ()
    for phase in range(channel.setup_phases):
        work = partial(prepared, phase, heard)
        messages = everybody(f"key share {phase}", "set-up", work)
        heard = (*heard, best(f"gather {phase}", partial(gathered, heard, messages)))
        sent["set-up received"] += sum(map(len, heard[-1].values()))
    keys = {me: best("joint key", partial(joint, me))} | {name: joint(name) for name in names[1:]}
    payloads = everybody("encrypt", "round", protected)
    total = best("add", added)
    request = best("request", lambda: channel.request(total))
    shares = everybody("share", "round", shared)
    closed = best("fuse", fused)
    opened = best("open", lambda: channel.open(closed, {}, **at, secrets=stores[me]))
    if not torch.equal(opened, rows.sum(dim=0)):
        raise RuntimeError("An encrypted sum differs from the plain one.")
    _, noise = channel._decoded(closed, epoch, 0, stores[me])
    return float(np.abs(noise).max()) / int(rows.sum(dim=0).abs().max()), sent


def setup_of_many(num_agents: int, size: int) -> Costs:
    """What the set-up of a joint key costs one of many agents; the others' parts are simulated.

    It is the first by name, which makes the key to sums and seals it for all others.
    """
    channel = ThresholdCKKSChannel(PublicGrid(numbers(size), BOUND, num_agents), sums=SUMS)
    names = tuple(f"agent{i:04d}" for i in range(num_agents))
    epoch, store, me = Epoch("benchmark", 0, names), MemoryStore(), names[0]
    announced = {}
    for name in names[1:]:
        private = agreement.new_identity()
        said = agreement.public_identity(private)
        said += agreement.public_exchange(agreement.new_exchange()) + bytes(16)
        said += agreement.sign(private, channel._signed_text(epoch, name, said))
        announced[name] = channel._frame(_SETUP, said, epoch, 0, name)
    start = time.process_time()
    announced[me] = channel.prepare(0, epoch, me, (), store)
    mine = channel.prepare(1, epoch, me, (announced,), store)
    spent = time.process_time() - start
    # The sum of so many key shares is words like any others.
    received = channel._frame(_GATHERED, mine[_HEADER.size :], epoch, 0, "")
    start = time.process_time()
    channel.joint_key(epoch, (announced, {"": received}), me=me, secrets=store)
    spent += time.process_time() - start
    sent = len(announced[me]) + len(mine)
    return {"cpu_s": spent, "mb": (sum(map(len, announced.values())) + len(received) + sent) / 1e6}


def flooding_bits(num_agents: int = 4, bits: int = 40) -> float:
    """How many bits larger the noise of an opened zero is than what one agent's noise hides.

    The smaller of real and imaginary slots: flooding of real slots only would leave the others.
    """
    ring = ThresholdCKKSChannel(PublicGrid(dim=10, bound=1.0, num_agents=num_agents), sums=1).ring
    seed = os.urandom(32)
    common = ckks.uniform_words(ring, seed)
    secrets, keys = [], []
    for _ in range(num_agents):
        pair = [part.astype(np.uint32) for part in ckks.generate_secret(ring)]
        secrets.append(pair[0])
        keys.append(ckks.key_share(ring, common, *pair))
    joint = ckks.encryptor(ring, seed, ckks.words_to_bytes(ckks.sum_words(ring, keys)))
    zeros, N = np.zeros(10, dtype=np.int64), ring.degree
    sent = [ckks.encrypt_integers(ring, zeros, joint, N) for _ in range(num_agents)]
    first = ckks.sum_words(ring, [c0 for c0, _ in sent])
    std = ckks.flooding_std(N, num_agents, bits)
    c1 = ckks.sum_words(ring, [c1 for _, c1 in sent]).astype(np.uint32)

    def deviations(flooded: bool) -> tuple[float, float]:
        terms = [first]
        for secret in secrets:
            flood = ckks.flooding_words(ring, std, N, os.urandom(32))
            none = np.zeros_like(flood)
            terms.append(ckks.partial_decryption(ring, c1, secret, flood if flooded else none))
        _, noise = ckks.decode(ring, ckks.sum_words(ring, terms))
        return slot_deviations(noise * float(ring.step))

    wide, own = deviations(flooded=True), deviations(flooded=False)
    # All agents flood; each alone must hide the noise from the others: hence the root.
    return min(math.log2(w / o / math.sqrt(num_agents)) for w, o in zip(wide, own, strict=True))


def slot_deviations(coefficients: Any) -> tuple[float, float]:
    """Of real and imaginary parts of a polynomial's values at the odd roots of one: its slots."""
    N = len(coefficients)
    values = np.fft.fft(coefficients * np.exp(1j * np.pi * np.arange(N) / N))
    return float(values.real.std()), float(values.imag.std())


# ------------------------------------------------------------------ TenSEAL's side


def tenseal_costs(size: int, repeats: int, *, usual: bool) -> Costs:
    """Costs of an agent, and of a server for each contribution; one thread."""
    import tenseal

    grid = PublicGrid(dim=numbers(size), bound=BOUND, num_agents=50)
    rows = contributions(grid, AGENTS)
    if usual:
        context = tenseal.context(
            tenseal.SCHEME_TYPE.CKKS,
            USUAL["degree"],
            coeff_mod_bit_sizes=USUAL["bits"],
            n_threads=1,
        )
        context.global_scale = USUAL["scale"]
        parts = [grid.to_values(row).split(ckks.SLOTS) for row in rows]
        lists = [[part.tolist() for part in vectors] for vectors in parts]
        public = tenseal.context_from(context.serialize(save_secret_key=False), n_threads=1)
    else:
        channel, secret = CKKSChannel.generate(grid)
        context = tenseal.context_from(secret, n_threads=1)
        public = tenseal.context_from(channel.context, n_threads=1)
        lists = [channel._limbs(row) for row in rows]
    best = Best()

    def encrypted(vectors: list[list[float]]) -> list[bytes]:
        return [tenseal.ckks_vector(public, part).serialize() for part in vectors]

    def summed() -> list[Any]:
        total = [tenseal.ckks_vector_from(public, part) for part in sent[0]]
        for vectors in sent[1:]:
            for one, part in zip(total, vectors, strict=True):
                one.add_(tenseal.ckks_vector_from(public, part))
        return [one.serialize() for one in total]

    def loaded(total: list[bytes]) -> list[Any]:
        return [tenseal.ckks_vector_from(context, part) for part in total]

    def decrypted(vectors: list[Any]) -> list[list[float]]:
        return [one.decrypt() for one in vectors]

    found: list[float] = []
    sent: list[list[bytes]] = []
    for _ in range(repeats):
        sent = [best("encrypt", partial(encrypted, vectors)) for vectors in lists]
        total = best("server", summed)
        read = best("load", partial(loaded, total))
        slots = best("decrypt", partial(decrypted, read))
        found = [value for part in slots for value in part]
    truth = np.sum([[value for part in vectors for value in part] for vectors in lists], axis=0)
    return {
        "agent": best.ms["encrypt"] + best.ms["load"] + best.ms["decrypt"],
        "server": best.ms["server"],
        "round_kb": sum(len(part) for part in sent[0]) / 1e3,
        "error": float(np.abs(np.array(found) - truth).max() / np.abs(truth).max()),
    }


# ------------------------------------------------------------------ OpenFHE's side

# Run by another interpreter: arguments are the agents, the numbers, the repeats and the settings.
OPENFHE = """
import json, random, sys, time
import openfhe

num_agents, count, repeats = map(int, sys.argv[1:4])
random.seed(1)
rows = [[random.uniform(-1e4, 1e4) for _ in range(count)] for _ in range(num_agents)]
truth = [sum(column) for column in zip(*rows)]
results = {}
for name, wanted in json.loads(sys.argv[4]).items():
    best = {}

    def timed(part, work):
        start = time.process_time()
        result = work()
        spent = 1e3 * (time.process_time() - start)
        best[part] = min(spent, best.get(part, spent))
        return result

    try:
        parameters = openfhe.CCParamsCKKSRNS()
        parameters.SetMultiplicativeDepth(wanted["depth"])
        if "scaling" in wanted:
            parameters.SetScalingModSize(wanted["scaling"])
        if "first" in wanted:
            parameters.SetFirstModSize(wanted["first"])
        cc = openfhe.GenCryptoContext(parameters)
        for feature in ("PKE", "KEYSWITCH", "LEVELEDSHE", "ADVANCEDSHE", "MULTIPARTY"):
            cc.Enable(getattr(openfhe.PKESchemeFeature, feature))
        slots = cc.GetRingDimension() // 2
        chunks = [(i, min(i + slots, count)) for i in range(0, count, slots)]

        def encrypted(row):
            plain = [cc.MakeCKKSPackedPlaintext(row[i:j]) for i, j in chunks]
            return [cc.Encrypt(joint, one) for one in plain]

        def summed():
            total = sent[0]
            for one in sent[1:]:
                total = [cc.EvalAdd(a, b) for a, b in zip(total, one)]
            return total

        def fused():
            values = []
            for (i, j), parts in zip(chunks, zip(*shares)):
                plain = cc.MultipartyDecryptFusion(list(parts))
                plain.SetLength(j - i)
                values += list(plain.GetRealPackedValue())[: j - i]
            return values

        for _ in range(repeats):
            pairs = [cc.KeyGen()]
            for _ in range(num_agents - 1):
                before = pairs[-1].publicKey
                pairs.append(timed("key share", lambda: cc.MultipartyKeyGen(before)))
            joint = pairs[-1].publicKey
            sent = [timed("encrypt", lambda row=row: encrypted(row)) for row in rows]
            total = timed("add", summed)
            shares = [cc.MultipartyDecryptLead(total, pairs[0].secretKey)]
            for pair in pairs[1:]:
                key = pair.secretKey
                shares.append(timed("share", lambda: cc.MultipartyDecryptMain(total, key)))
            found = timed("open", fused)
        error = max(abs(a - b) for a, b in zip(found, truth)) / max(map(abs, truth))
        results[name] = {
            "agent": best["key share"] + best["encrypt"] + best["share"],
            "server": best["add"] + best["open"],
            "ring": cc.GetRingDimension(),
            "error": error,
        }
    except Exception as refused:
        print(f"{name}: {refused}", file=sys.stderr)
print(json.dumps(results))
"""


def openfhe_costs(repeats: int) -> dict[str, Costs]:
    """Costs by settings; none where there is no OpenFHE."""
    interpreter = os.environ.get("OPENFHE_PYTHON")
    if not interpreter:
        return {}
    arguments = [str(AGENTS), str(numbers(SIZE)), str(repeats), json.dumps(OPENFHE_SETTINGS)]
    run = subprocess.run(
        [interpreter, "-c", OPENFHE, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
    )
    results: dict[str, Costs] = json.loads(run.stdout.splitlines()[-1])
    return results


# ------------------------------------------------------------------ a search


def search_seconds(
    num_agents: int, size: int | None, rounds: int, channel: str = "threshold"
) -> float:
    """CPU seconds of a search without its objectives': the published one, or that in a region."""
    from benchmarks.papers.published.settings import paper_search
    from botorch_fed.run import run
    from botorch_fed.search.region import RegionSearch
    from botorch_fed.space import Parameter, SearchSpace
    from botorch_fed.studies import FedGP

    spent = 0.0

    def objective(X: Tensor) -> Tensor:
        nonlocal spent
        start = time.process_time()
        Y = -(X - 0.3).square().sum(dim=-1, keepdim=True)
        spent += time.process_time() - start
        return Y

    study = FedGP(
        budget=rounds + 4,  # and the initial points
        search=RegionSearch() if size is None else paper_search(support_size=size),
        channel=channel,  # type: ignore[arg-type]
    )
    space = SearchSpace(tuple(Parameter.real(f"x{j}", 0.0, 1.0) for j in range(10)))
    objectives = {f"agent{i}": objective for i in range(num_agents)}
    start = time.process_time()
    run(study, objectives, space=space, seed=0, progress=False)
    return time.process_time() - start - spent


# ------------------------------------------------------------------ all sides


def case(num_agents: int, size: int) -> str:
    return f"{num_agents}_S{size}"


def side(name: str, quick: bool) -> dict[str, Any]:
    """Everything that one process measures."""
    cases = QUICK_CASES if quick else CASES
    sizes = sorted({size for _, size in cases})
    if name == "ours":
        result: dict[str, Any] = {
            case(n, S): our_costs(n, S, 2 if quick else max(4, 100 // n)) for n, S in cases
        }
        return result | {"flooding_bits": flooding_bits(), "many": setup_of_many(MANY, SIZE)}
    if name in ("tenseal", "usual"):
        repeats = 2 if quick else 8
        return {str(S): tenseal_costs(S, repeats, usual=name == "usual") for S in sizes}
    if name == "openfhe":
        return openfhe_costs(2 if quick else 10)
    rounds = 2 if quick else 50
    published = {
        case(n, S): search_seconds(n, S, rounds) for n, S in (SEARCHES[:1] if quick else SEARCHES)
    }
    n = SEARCHES[0][0]
    return {**published, f"{n}_region": search_seconds(n, None, rounds)}


def measured(name: str, quick: bool, folder: Path = HERE) -> dict[str, Any]:
    """A side in a process of its own, of the package in a folder."""
    command = [sys.executable, "-m", "benchmarks.encryption", "--side", name]
    command += ["--quick"] if quick else []
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    run = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=folder, env=environment
    )
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def least(first: Any, second: Any) -> Any:
    """Of two results the smaller numbers; of errors and flooding that is the first's."""
    if isinstance(first, dict):
        kept = ("error", "flooding_bits")
        return {k: v if k in kept else least(v, second[k]) for k, v in first.items()}
    return min(first, second)


def all_sums(quick: bool) -> dict[str, Any]:
    """All sides, in turns."""
    names = ("ours", "tenseal", "usual", "openfhe")
    results = {name: measured(name, quick) for name in names}
    if not quick:
        results = {name: least(results[name], measured(name, quick)) for name in names}
    return results


def compare(folder: Path) -> dict[str, Any]:
    """Costs without masks, of another checkout, and with them, in turns; and their ratios."""
    turns = [(measured("ours", False, folder), measured("ours", False)) for _ in range(2)]
    without, masked = (least(first, second) for first, second in zip(*turns, strict=True))
    cases = {}
    for n, S in CASES[:6]:
        both = {"without": dict(without[case(n, S)]), "with": dict(masked[case(n, S)])}
        for costs in both.values():
            costs.pop("error")
            later = costs["encrypt"] + costs["share"] + costs.get("open", 0.0)
            costs["agent_later_round"] = later
            costs["agent_first_round"] = costs["key_share"] + costs["joint_key"] + later
        kept = ("agent_first_round", "agent_later_round", "server", "round_kb")
        ratios = {key: both["with"][key] / both["without"][key] for key in kept}
        cases[case(n, S)] = {
            name: {key: round(value, 2) for key, value in costs.items()}
            for name, costs in {**both, "ratios": ratios}.items()
        }
    many = {"cpu_s": round(masked["many"]["cpu_s"], 2), "mbytes": round(masked["many"]["mb"], 3)}
    what = (
        "python -m benchmarks.encryption --against FOLDER: without masks and with them, in turns; "
        "CPU ms of one agent and of the server, kB of one agent; best of two turns"
    )
    return {"what": what, "cases": cases, "setup_of_1000_agents": many}


def agent_ms(costs: Costs) -> float:
    """Of an agent's first round; a later one has no key share."""
    return sum(costs[part] for part in ("key_share", "encrypt", "share", "open"))


def sums(quick: bool) -> tuple[Figures, list[Table]]:
    sides = all_sums(quick)
    ours = sides["ours"]
    peer, usual, openfhe = sides["tenseal"], sides["usual"], sides["openfhe"]
    figures: Figures = {}
    for n, S in QUICK_CASES if quick else CASES:
        costs = ours[case(n, S)]
        figures[f"agent_cpu_ms_{case(n, S)}"] = round(agent_ms(costs), 3)
        figures[f"joint_key_cpu_ms_{case(n, S)}"] = round(costs["joint_key"], 3)
        figures[f"server_cpu_ms_{case(n, S)}"] = round(costs["server"], 3)
    chosen = ours[case(AGENTS, SIZE)]
    mine = agent_ms(chosen)
    figures["ratio_vs_tenseal_single_key"] = round(mine / peer[str(SIZE)]["agent"], 2)
    figures["ratio_vs_tenseal_usual"] = round(mine / usual[str(SIZE)]["agent"], 2)
    defaults = openfhe.get("defaults")
    good = [o for o in openfhe.values() if defaults is None or o["error"] <= defaults["error"]]
    figures["ratio_vs_openfhe"] = None if defaults is None else round(mine / defaults["agent"], 2)
    figures["ratio_vs_openfhe_best"] = (
        round(mine / min(o["agent"] for o in good), 2) if good else None
    )
    figures["kbytes_per_agent_S32"] = round(chosen["round_kb"], 1)
    figures["kbytes_setup"] = round(chosen["setup_kb"], 1)
    figures["kbytes_setup_received"] = round(chosen["setup_received_kb"], 1)
    figures["setup_cpu_s_1000"] = round(ours["many"]["cpu_s"], 3)
    figures["setup_mbytes_1000"] = round(ours["many"]["mb"], 3)
    if not quick:
        figures["max_rel_error_50_agents"] = ours[case(50, SIZE)]["error"]
    figures["flooding_bits"] = round(ours["flooding_bits"], 2)
    tables = [our_table(ours), peer_table(peer, usual, openfhe)]
    return figures, tables


def our_table(ours: dict[str, Any]) -> Table:
    table = Table(
        *("agents, S", "key share", "encrypt", "share", "open", "agent", "joint key", "server"),
        *("kB a round", "kB set-up", "relative error"),
        title="ThresholdCKKSChannel, CPU ms",
    )
    for name, costs in ours.items():
        if name in ("flooding_bits", "many"):
            continue
        columns = ("key_share", "encrypt", "share", "open", "agent", "joint_key", "server")
        shown = {**costs, "agent": agent_ms(costs)}
        table.add_row(
            name.replace("_S", ", "),
            *(f"{shown[column]:.2f}" for column in columns),
            f"{costs['round_kb']:.0f}",
            f"{costs['setup_kb']:.0f}",
            f"{costs['error']:.1e}",
        )
    return table


def peer_table(peer: dict[str, Any], usual: dict[str, Any], openfhe: dict[str, Any]) -> Table:
    table = Table(
        *("peer", "agent", "server, 10 agents", "kB a round", "relative error"),
        title="Peers, CPU ms",
    )
    rows = {f"TenSEAL, one key, exact on the grid, S = {S}": costs for S, costs in peer.items()}
    bits = ", ".join(map(str, USUAL["bits"]))  # type: ignore[call-overload]
    rows |= {f"TenSEAL, one key, primes {bits}, S = {S}": costs for S, costs in usual.items()}
    rows |= {f"OpenFHE, {name}: ring {c['ring']}, S = {SIZE}": c for name, c in openfhe.items()}
    for name, costs in rows.items():
        sent = f"{costs['round_kb']:.0f}" if "round_kb" in costs else "-"
        table.add_row(
            name, f"{costs['agent']:.2f}", f"{costs['server']:.2f}", sent, f"{costs['error']:.1e}"
        )
    return table


def search(quick: bool) -> tuple[Figures, list[Table]]:
    rounds = 2 if quick else 50
    seconds = measured("search", quick)
    figures: Figures = {f"fed_gp_cpu_s_{k}_{rounds}": round(v, 2) for k, v in seconds.items()}
    return figures, []


PARTS = {"sums": sums, "search": search}
SMOKE: dict[str, Any] = {
    "AGENTS": 2,
    "MANY": 20,
    "SIZE": 8,
    "QUICK_CASES": [(2, 8)],
    "SEARCHES": [(2, 8)],
    "measured": side,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of encrypted sums.")
    parser.add_argument("--json", action="store_true", help="print one line of figures")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--smoke", action="store_true", help="does everything run?")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--against", type=Path, help="a checkout to compare with")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if os.environ.get("OMP_NUM_THREADS") != "1":  # NumPy's BLAS reads it when it is loaded
        again = [sys.executable, "-m", "benchmarks.encryption", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.side:
        print(json.dumps(side(args.side, args.quick)))
        return
    if args.against:
        text = json.dumps(compare(args.against.resolve()), indent=1)
        (HERE / "benchmarks" / "results" / "encryption.json").write_text(text + "\n")
        print(text)
        return

    load, quick = os.getloadavg()[0], args.quick or args.smoke
    with patch.dict(globals(), SMOKE if args.smoke else {}):
        results = [PARTS[part](quick) for part in PARTS if part in chosen]
    figures = {key: value for part, _ in results for key, value in part.items()}
    if args.json:
        print(json.dumps(figures))
        return
    console = Console()
    versions = ", ".join(f"{package} {version(package)}" for package in ("numpy", "tenseal"))
    console.print(f"{versions}; Python {platform.python_version()}; one thread; load {load:.1f}")
    if not os.environ.get("OPENFHE_PYTHON"):
        console.print("No OpenFHE: OPENFHE_PYTHON names no interpreter that has it.")
    for _, tables in results:
        for table in tables:
            console.print(table)
    table = Table("figure", "value", title="Figures")
    for name, value in figures.items():
        table.add_row(name, "null" if value is None else f"{value:g}")
    console.print(table)


if __name__ == "__main__":
    main()
