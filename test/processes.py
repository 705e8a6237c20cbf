"""Processes that start soon: forks of one that has imported the package."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["botorch_fed.run", "botorch_fed.studies", "pytest"])


def exit_code(target: Callable[..., Any], *args: Any, seconds: float = 300.0) -> int:
    """How a process ends that calls a function of a module; what it writes is in the output."""
    process = CONTEXT.Process(target=target, args=args)
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{target.__name__} has not ended within {seconds:g} seconds")
    assert process.exitcode is not None
    return process.exitcode
