r"""What a round over Flower costs, against Flower itself, and how many bytes it takes.

    python -m benchmarks.flower [--json] [--budget N | --smoke] [--only time,bytes]

Parts for ``--only``, and their keys of ``--json``:

    time      seconds_per_round   FTS with a message of 100 numbers from each of three sites in
                                  every round, over a hub and three sites on loopback with TLS and
                                  node keys, as `botorch-fed hub` and `botorch-fed site` set them
                                  up; the objective costs nothing. The median of the rounds
              seconds_empty       the same three nodes answer a message that they refuse, so that
                                  their sites have no part in it; awaited by the same loop. One
                                  after every round of the first kind, in the same run
              ratio_vs_flower     the first / the second
    bytes     fts_bytes_ratio_up  bytes that a site sends in a round / 800, those of 100 numbers
              fts_bytes_ratio     bytes to and from all sites / those of the numbers in them (each
                                  site sends 100, and gets the 100 of each of the three)
              fed_gp_kbytes_up    of a site and round of encrypted FBO-FedGP with three sites, 560
              fed_gp_kbytes_down  numbers: the contribution and the share of its opening
              fed_gp_kbytes_key   of a site, up, and everybody's parts down, once per epoch

Bytes are those that the protocol hands to Flower, broadcasts included; Flower's own frames come on
top. They are the same in process, where they are counted here. ``--smoke`` has one site, and a
round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from botorch_fed import deploy
from botorch_fed.deploy import DeployError, Hub, SiteFolder
from botorch_fed.engines.flower import POLL, FlowerExchange
from botorch_fed.federation.base import Exchanged, Outgoing
from botorch_fed.run import host, run
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.studies import FTS, FedGP
from botorch_fed.study import StudyFile, read_study
from botorch_fed.test_functions import SyntheticGPAgents

ROOT = Path(__file__).resolve().parent.parent
SITES = ("north", "south", "west")
ROUNDS = 25
NUMBERS = 100
STUDY = """
objective = "nothing:score"
agents = {agents}
budget = {budget}
seed = 0
[space]
x = {{ type = "real", lower = 0, upper = 1 }}
y = {{ type = "real", lower = 0, upper = 1 }}
[protocol]
name = "fts"
every = 1
"""
OBJECTIVE = "def score(agent, x, y):\n    return 1 - (x - 0.3) ** 2 - (y - 0.6) ** 2\n"


# ------------------------------------------------------------------ the run


def serve(hub: Hub, grid: Any, study: StudyFile) -> dict[str, list[float]]:
    """Rounds of a study and empty rounds, one after the other: seconds of each."""
    nodes = hub.nodes(study.agents)
    engine = FlowerExchange(grid, nodes, allow=hub.allow)
    times: dict[str, list[float]] = {"ours": [], "empty": []}

    def exchange(outgoing: Outgoing) -> Exchanged:
        start = time.monotonic()
        exchanged = engine(outgoing)
        times["ours"].append(time.monotonic() - start)
        hub.allow(dict.fromkeys(nodes, 0))  # an answer without content
        start = time.monotonic()
        _empty(grid, list(nodes.values()))
        times["empty"].append(time.monotonic() - start)
        assert len(exchanged.replies) == len(nodes), exchanged.failures
        return exchanged

    host(study.study(), study.space, study.agents, exchange, run=study.fingerprint, seed=0)
    return times


def _empty(grid: Any, nodes: list[int]) -> None:
    from flwr.app import ConfigRecord, Message, RecordDict

    messages = [
        Message(RecordDict({"request": ConfigRecord({})}), node, "query.empty", ttl=600.0)
        for node in nodes
    ]
    waiting = set(grid.push_messages(messages))
    while waiting:
        for message in grid.pull_messages(list(waiting)):
            waiting.discard(message.metadata.reply_to_message_id)
            assert message.error.reason.startswith("A site answers")
        time.sleep(POLL)


# ------------------------------------------------------------------ around it


def measure_time(budget: int) -> dict[str, float]:
    """Set up a federation, run the study, take it down."""
    home = Path(tempfile.mkdtemp())
    home.chmod(0o700)
    running: list[subprocess.Popen[bytes]] = []
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    program = str(Path(sys.executable).parent / "botorch-fed")

    def start(*words: str) -> None:
        command = [program, *words]
        with (home / f"{len(running)}.log").open("w") as log:
            running.append(
                subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log)
            )

    try:
        (home / "study.toml").write_text(STUDY.format(budget=budget, agents=json.dumps(SITES)))
        (home / "nothing.py").write_text(OBJECTIVE)
        hub = Hub.create(home / "hub", "localhost", port := deploy.free_port())
        start("hub", "start", "hub", "--host", "127.0.0.1")
        _until(lambda: hub.sites() == {})
        for name in SITES:
            hub.admit(name, SiteFolder.create(home / name).folder / "node.pub")
            start(
                *("site", "start", name, "study.toml", "--name", name),
                *("--hub", f"localhost:{port}", "--ca", "hub/ca.crt"),
            )
        _until(lambda: set(hub.sites().values()) == {"online"})
        study = read_study(home / "study.toml")
        with hub.control.driven(hub.control.begin()) as grid:
            times = serve(hub, grid, study)
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait()
        shutil.rmtree(home)
    ours, empty = (statistics.median(times[kind][1:]) for kind in ("ours", "empty"))
    return {
        "seconds_per_round": ours,
        "seconds_empty": empty,
        "ratio_vs_flower": ours / empty,
        "rounds": len(times["ours"]) - 1,
    }


def _until(ready: Any, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if ready():
                return
        except DeployError:
            pass
        if time.monotonic() > end:
            raise TimeoutError("the federation does not get ready")
        time.sleep(0.5)


def measure_bytes() -> dict[str, float]:
    """Of rounds in process, from the third on: messages have been made and are received."""
    problem = SyntheticGPAgents(3, seed=0)
    fts = run(FTS(budget=6, strategy=Strategy(), every=1), problem, seed=0, progress=False)
    rows = [row for row in fts.rounds if 3 <= row["round"] <= 6]
    up = statistics.mean(row["bytes_up"] for row in rows)
    down = statistics.mean(row["bytes_down"] for row in rows)
    search = SupportSearch(support_size=32)
    fed_gp = run(FedGP(budget=6, search=search, num_initial=2), problem, seed=0, progress=False)
    by_round = {row["round"]: row for row in fed_gp.rounds if row["agent"] == "agent0"}
    key = [by_round[t]["bytes_up"] for t in (1, 2, 3)] + [by_round[4]["bytes_down"]]
    last = max(by_round)
    pair = [by_round[t] for t in (last - 3, last - 2)]
    return {
        "fts_bytes_ratio_up": up / (8 * NUMBERS),
        "fts_bytes_ratio": (up + down) / (8 * NUMBERS * (1 + len(SITES))),
        "fed_gp_kbytes_up": sum(row["bytes_up"] for row in pair) / 1e3,
        "fed_gp_kbytes_down": sum(row["bytes_down"] for row in pair) / 1e3,
        "fed_gp_kbytes_key": sum(key) / 1e3,
    }


def main() -> None:
    """Measure, and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--budget", type=int, default=ROUNDS)
    parser.add_argument("--only", default="time,bytes")
    parser.add_argument("--smoke", action="store_true", help="does everything run?")
    options = parser.parse_args()
    with patch.dict(globals(), {"SITES": SITES[:1]} if options.smoke else {}):
        show(measured(options.only, 1 if options.smoke else options.budget), options.json)


def measured(parts: str, budget: int) -> dict[str, float]:
    """The figures of some parts."""
    found: dict[str, float] = {}
    if "bytes" in parts:
        found |= measure_bytes()
    if "time" in parts:
        found |= measure_time(budget)
    return {key: round(value, 3) for key, value in found.items()}


def show(found: dict[str, float], as_json: bool) -> None:
    """Figures on the terminal."""
    if as_json:
        print(json.dumps(found))
        return
    table = Table("figure", "value", title="Flower")
    for key, value in found.items():
        table.add_row(key, f"{value:g}")
    Console().print(table)


if __name__ == "__main__":
    main()
