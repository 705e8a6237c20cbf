"""The tests; before they import anything, how many threads they have and where their files are."""

import os
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = 2**31  # bytes that are enough for the files of two processes

# Two test processes have one core each. Two threads each would wait for one another.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# Every durable step of a test would wait for a disk otherwise.
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
