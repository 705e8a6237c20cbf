"""Which code a stored result depends on: a line keeps its hash, and lines of older code are found.

A family is a folder of results with the sources that decide what its lines say: its benchmark, the
problems, and the numerics and searches of the package that it runs. Code that moves messages or
stores runs is not among them: the same points are queried whatever carries them. Comments,
docstrings and blank lines are none of the code. All else of a module counts, its summaries too: a
line that is listed as older may still be the same.

Lines from before hashes were kept have none. Of their files git tells how many commits have touched
the family's sources since the last commit of the file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOME = Path(__file__).parent
ROOT = HOME.parent
_OWN = (
    "botorch_fed/models/*.py",
    "botorch_fed/acquisition/*.py",
    "botorch_fed/search/*.py",
    "botorch_fed/rng.py",
    "botorch_fed/space.py",
    "botorch_fed/studies.py",
)
_PROBLEMS = ("benchmarks/problems/*.py", "botorch_fed/test_functions/*.py")
_PAPERS = (
    "benchmarks/papers/published/features.py",
    "benchmarks/papers/published/settings.py",
    "benchmarks/papers/tabulated.py",
    *_PROBLEMS,
)
_NOISE = ("botorch_fed/privacy/[ams]*.py", "botorch_fed/aggregation/noisy.py")
FAMILIES: dict[str, tuple[str, ...]] = {
    "papers/results/fts": (
        "benchmarks/papers/fts.py",
        "benchmarks/papers/published/own_gp.py",
        *_PAPERS,
        *_OWN,
    ),
    "papers/results/dp_fts_de": (
        "benchmarks/papers/dp_fts_de.py",
        "benchmarks/papers/fleet.py",
        "benchmarks/papers/published/[eo]*.py",
        *_PAPERS,
        *_OWN,
        *_NOISE,
    ),
    "papers/results/fed_gp": (
        "benchmarks/papers/fed_gp.py",
        "benchmarks/papers/published/fbo_fedgp.py",
        "benchmarks/papers/published/support.py",
        "benchmarks/transfer_controls.py",
        *_PAPERS,
        *_OWN,
        "botorch_fed/aggregation/s*.py",
    ),
    "papers/results/private_ucb": (
        "benchmarks/papers/private_ucb*.py",
        "benchmarks/papers/published/noise.py",
        *_PROBLEMS,
        "botorch_fed/models/*.py",
        "botorch_fed/acquisition/*.py",
        "botorch_fed/privacy/[aimrst]*.py",
        "botorch_fed/search/bandit.py",
        "botorch_fed/aggregation/stream.py",
    ),
    "papers/results/ax_sites": ("benchmarks/ax_sites.py", "botorch_fed/ax_adapter.py", *_OWN),
    "papers/results/faults": ("benchmarks/faults.py",),
    "results/transfer": (
        "benchmarks/transfer.py",
        "benchmarks/transfer_[cbt]*.py",
        *_PROBLEMS,
        *_OWN,
        *_NOISE,
    ),
}


def family_of(path: Path) -> str | None:
    """The family of a file of results, if it is among those that are committed."""
    try:
        name = path.resolve().relative_to(HOME.resolve()).as_posix()
    except ValueError:
        return None
    return next((family for family in FAMILIES if name.startswith(f"{family}/")), None)


def sources(family: str) -> list[Path]:
    """The sources that a family depends on."""
    return sorted({path for pattern in FAMILIES[family] for path in ROOT.glob(pattern)})


@cache
def code_of(family: str) -> str:
    """A hash of the sources of a family as they are now."""
    digest = hashlib.sha256()
    for path in sources(family):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(code_in(path.read_text()).encode() + b"\0")
    return digest.hexdigest()[:8]


def code_in(source: str) -> str:
    """The lines of a source that are code."""
    words = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return "".join(
        f"{line.rstrip()}\n"
        for number, line in enumerate(source.splitlines(), start=1)
        if number not in words and line.strip() and not line.lstrip().startswith("#")
    )


def code_for(path: Path) -> dict[str, str]:
    """What a new line of a file says of the code that makes it."""
    family = family_of(path)
    return {} if family is None else {"code": code_of(family)}


@dataclass(frozen=True)
class Age:
    """How old the lines of a file are.

    Attributes:
        file: The file, from the folder of benchmarks.
        now: Lines made by the sources as they are.
        earlier: Lines made by other sources.
        unknown: Lines from before hashes were kept.
        commits: Commits on the family's sources since the file's last one; None without history.
    """

    file: str
    now: int
    earlier: int
    unknown: int
    commits: int | None

    @property
    def stale(self) -> bool:
        """Whether something may have changed since, as far as is known."""
        return self.earlier > 0 or (self.unknown > 0 and self.commits != 0)


def ages() -> Iterator[Age]:
    """Of all files of lines of all families."""
    for family in FAMILIES:
        for path in sorted((HOME / family).rglob("*.jsonl")):
            known = [json.loads(line).get("code") for line in path.read_text().splitlines()]
            now = known.count(code_of(family))
            unknown = known.count(None)
            commits = _commits_since(path, family) if unknown else None
            name = path.relative_to(HOME).as_posix()
            yield Age(name, now, len(known) - now - unknown, unknown, commits)


def _commits_since(path: Path, family: str) -> int | None:
    last = _git("log", "-1", "--format=%H", "--", str(path.relative_to(ROOT)))
    if not last:
        return None
    found = _git("rev-list", "--count", f"{last}..HEAD", "--", *FAMILIES[family])
    return int(found) if found else None


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
