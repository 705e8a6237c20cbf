"""Where the elements of the papers are in the code: element, file and line, status.

    python -m benchmarks.equations

Elements, names and statuses are those of ``docs/equations.rst``; lines are looked up.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "equations.rst"
STATUSES = ("exact", "corrected", "differs", "missing", "beyond")  # what a status begins with
CODE = r"``([^`]+)``"
NAME = r"(?<![`:])`([\w.]+)`(?!`)"  # of the package, as Sphinx links it


@dataclass(frozen=True)
class Element:
    """An element of a paper.

    Attributes:
        paper: Whose.
        what: The element.
        here: What stands for it, as the page has it.
        remark: What is to be said of it.
        status: How it is related to the paper's.
    """

    paper: str
    what: str
    here: str
    remark: str
    status: str

    @cached_property
    def places(self) -> list[str]:
        """Files and lines."""
        found = [_line_of_name(name) for name in re.findall(NAME, self.here)]
        rest = re.sub(NAME, "", self.here)
        for name, file in re.findall(rf"{CODE} of {CODE}", rest):
            found.append(_line_in(ROOT / file, name.split("(")[0]))
        for code in re.findall(CODE, re.sub(rf"{CODE} of {CODE}", "", rest)):
            found.append(_line_of_code(code))
        return found


def elements() -> list[Element]:
    """All rows of the page."""
    text = PAGE.read_text()
    parts = re.split(r"^(.+)\n-{3,}\n", text, flags=re.MULTILINE)
    return [
        Element(paper, *(" ".join(cell.split()) for cell in cells))
        for paper, part in zip(parts[1::2], parts[2::2], strict=True)
        for cells in _rows(part)
    ]


def _rows(part: str) -> Iterator[list[str]]:
    """Cells of the rows of a list table, its heads left out."""
    table = "".join(f"{line}\n" for line in part.splitlines() if line.startswith("   "))
    for row in re.split(r"^   \* - ", table, flags=re.MULTILINE)[2:]:
        cells = re.split(r"^     - ?", textwrap.indent(row, "").rstrip(), flags=re.MULTILINE)
        yield [cell.strip().rstrip("\\") for cell in cells]


def _line_of_name(name: str) -> str:
    """Of a name below `botorch_fed`."""
    parts = f"botorch_fed.{name}".split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        owner: Any = thing
        for part in parts[length:]:
            owner, thing = thing, getattr(thing, part, None)
        if length == 1 or thing is None:
            break
        return _where(owner, thing, parts[-1])
    raise LookupError(f"{name} of {PAGE.name} is nowhere in the package.")


def _where(owner: Any, thing: Any, name: str) -> str:
    if isinstance(thing, property):
        thing = thing.fget
    try:
        file, line = inspect.getsourcefile(thing), inspect.getsourcelines(thing)[1]
    except TypeError:  # a field or a constant: where its owner says it
        file = inspect.getsourcefile(owner)
        assert file is not None
        return _line_in(Path(file), name)
    assert file is not None
    return f"{Path(file).relative_to(ROOT)}:{max(line, 1)}"


def _line_of_code(code: str) -> str:
    """Of a module, of a name in one, or of what a command runs; dots, or a path."""
    if code.endswith(".py"):
        return _line_in(ROOT / code, "")
    words = code.removeprefix("python -m ").split()
    for path in (words[0], f"benchmarks.papers.{words[0]}"):
        parts = path.split(".")
        for length in (len(parts), len(parts) - 1):
            file = ROOT.joinpath(*parts[:length]).with_suffix(".py")
            if file.is_file():
                return _line_in(file, parts[length] if length < len(parts) else words[-1])
    raise LookupError(f"{code} of {PAGE.name} is nowhere.")


def _line_in(file: Path, name: str) -> str:
    """Where a file defines a name or mentions an entry; its first line for itself."""
    place, lines = file.relative_to(ROOT), file.read_text().splitlines()
    if not name or name.split(".")[-1] == file.stem:
        return f"{place}:1"
    word = re.escape(name)
    defined = rf'^\s*(?:(?:def|class) {word}\b|{word}\b\s*[:=]|"{word}"|.*"{word}":)'
    for number, line in enumerate(lines, start=1):
        if re.match(defined, line):
            return f"{place}:{number}"
    raise LookupError(f"{place} has no {name}, which {PAGE.name} names.")


def main() -> None:
    """A table for each paper."""
    found = elements()
    console = Console(width=180)
    for paper in dict.fromkeys(element.paper for element in found):
        table = Table("element", "file:line", "status", "remark", title=paper, show_lines=True)
        for one in found:
            if one.paper == paper:
                table.add_row(one.what, "\n".join(one.places), one.status, one.remark)
        console.print(table, markup=False)


if __name__ == "__main__":
    main()
