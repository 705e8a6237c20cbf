"""Programs in processes of their own, and the same in this one where nothing is measured."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stdout


def in_own_process(code: str) -> list[str]:
    """What a program prints, in words."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()


def in_this_process(code: str) -> list[str]:
    """The same without a process's time to start: its figures mean nothing."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue().split()
