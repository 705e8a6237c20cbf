"""A command of the package in a process that dies at its k-th durable step, with signal 9.

    python -m test.faults.fuse K WORDS...

A durable step is a file that is on the disk, before it takes its place or is built upon.
"""

from __future__ import annotations

import os
import signal
import sys

from botorch_fed.cli import main

ON_DISK = os.fsync


class Fuse:
    """In the place of `os.fsync`: the last of so many calls does not come back."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self, file: int) -> None:
        ON_DISK(file)
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    os.fsync = Fuse(int(sys.argv[1]))  # type: ignore[assignment]
    sys.exit(main(sys.argv[2:]))
