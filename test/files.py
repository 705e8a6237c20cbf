"""Disks that fill up and processes that die, for tests of what lies on disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

# Python 3.12 warns of fork beside threads; the children here only touch files and exit.
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(job: Callable[[], object]) -> int:
    """Run a job in a forked process; 0 if it returned, 9 if it raised, else its own `os._exit`."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            job()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class FullDisk:
    """`os.write` that takes a number of bytes, in small pieces, and then fails or ends."""

    def __init__(self, room: int, *, then: Callable[[], object]) -> None:
        self.room = room
        self.then = then
        self.write = os.write

    def __call__(self, file: int, data: bytes) -> int:
        if self.room == 0:
            self.then()
        taken = self.write(file, bytes(data[: min(self.room, 50)]))
        self.room -= taken
        return taken


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
