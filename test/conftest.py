"""Settings of the whole suite."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition.multi_objective import logei
from hypothesis import settings

from botorch_fed.engines import parallel
from test.processes import CONTEXT

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("ci")
# Cholesky bits differ between one thread and two, and parallel test processes fight for cores.
torch.set_num_threads(1)
# BoTorch would compile a kernel for hypervolumes, half a minute of one process for which the other
# waits; its implementation in PyTorch gives the same values. The nightly tests compile it.
logei._load_attempted = True
# Worker processes are forks of one that has imported the package; some tests spawn theirs.
parallel.START = CONTEXT.get_start_method()


@pytest.fixture(autouse=True)
def _seed_of_global_generator() -> None:
    """BoTorch draws from PyTorch's global generator; its tests start from one state."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: the collector of garbage need not read them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbours in one process: they share fixtures. Who is done first takes from the others."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which of the nightly tests run."""
    words = "run the nightly tests whose number, 0 to 9, is this one as well"
    parser.addoption("--tenth", type=int, choices=range(10), help=words)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Nightly tests only if asked for, and slow tests first.

    A worker that is left with a slow test at the end would work alone.
    """
    _mark_listed(config, items)
    tenth = config.getoption("tenth")
    named = any("::" in argument for argument in config.args)
    if not (config.getoption("markexpr") or named):
        out = [item for item in items if _nightly(item) and tenth != _number(item)]
        config.hook.pytest_deselected(items=out)
        without = set(out)
        items[:] = [item for item in items if item not in without]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None and not _nightly(item))


def _mark_listed(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `nightly.txt` lists; where all tests are collected, every line must name one."""
    lines = (Path(__file__).parent / "nightly.txt").read_text().splitlines()
    listed = {line for line in lines if not line.startswith("#")}
    named = set()
    for item in items:
        both = {item.nodeid, item.nodeid.partition("[")[0]} & listed
        if both:
            item.add_marker(pytest.mark.nightly)
            named |= both
    stale = sorted(listed - named)
    everything = config.args == config.getini("testpaths")
    if stale and everything and not config.getoption("ignore", None):
        raise pytest.UsageError(
            f"test/nightly.txt names {len(stale)} tests that do not exist: {stale[:3]}"
        )


def _nightly(item: pytest.Item) -> bool:
    return item.get_closest_marker("nightly") is not None


def _number(item: pytest.Item) -> int:
    """In which tenth of the nightly tests a test is."""
    return zlib.crc32(item.nodeid.encode()) % 10
