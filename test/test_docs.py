"""The documentation builds, names what exists, and quotes what is printed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from botorch_fed.cli import main
from botorch_fed.study import OBJECTIVES
from botorch_fed.version import __version__

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.rst"))


def _blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page, without their indentation."""
    text = (DOCS / page).read_text()
    pattern = rf"^\.\. code-block:: {language}\n\n((?:   .*\n|\n)+)"
    return [re.sub(r"^   ", "", block, flags=re.M) for block in re.findall(pattern, text, re.M)]


def _rows(table: int) -> list[tuple[list[str], str]]:
    """Of a table of the page of errors: the literals of what was run, and the message."""
    parts = (DOCS / "errors.rst").read_text().split("   :class: errors\n")
    body = re.split(r"\n\n(?=\S)", parts[table + 1])[0]
    rows = []
    for row in re.split(r"^   \* - ", body, flags=re.M)[2:]:  # without the head
        run, said, _ = (
            re.sub(r"\s+", " ", cell) for cell in re.split(r"^     - ", row, flags=re.M)
        )
        rows.append((re.findall(r"``(.+?)``", run), said.strip().removeprefix("``")[:-2]))
    return rows


def _comparable(message: str) -> str:
    """One line, and fingerprints, which may differ in the last bit of a tensor, left out."""
    return re.sub(r"\b[0-9a-f]{8}…", "…", re.sub(r"\s+", " ", message))


COMMANDS, CALLS = _rows(0), _rows(1)


def test_there_are_ten_mistakes_of_each_kind() -> None:
    assert len(COMMANDS) >= 10
    assert len(CALLS) >= 10


@pytest.mark.parametrize(("run", "said"), COMMANDS, ids=range(len(COMMANDS)))
def test_the_command_line_says_what_the_page_says(
    run: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (study,), (objective,) = _blocks("errors.rst", "toml"), _blocks("errors.rst", "python")[:1]
    command, *change = run
    if change:
        new, old = change
        assert study.count(old) == 1
        study = study.replace(old, new)
    (tmp_path / "study.toml").write_text(study)
    (tmp_path / "tuning.py").write_text(objective)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tuning", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    program, *arguments = command.split()
    assert program == "botorch-fed"
    code = main(arguments)
    sys.modules.pop("tuning", None)
    assert code == (1 if "failing" in " ".join(run) else 2)
    assert _comparable(capsys.readouterr().err.splitlines()[-1]) == _comparable(said)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the mistakes in Python start from."""
    names: dict[str, Any] = {}
    exec(_blocks("errors.rst", "python")[1], names)
    return names


@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
@pytest.mark.parametrize(("run", "said"), CALLS, ids=range(len(CALLS)))
def test_an_error_says_what_the_page_says(run: list[str], said: str, names: dict[str, Any]) -> None:
    kind, message = said.split(": ", 1)
    with pytest.raises(Exception) as error:  # noqa: PT011 - its name and words are compared
        eval(run[0], names)
    assert error.type.__name__ == kind
    assert _comparable(str(error.value)) == _comparable(message)


def _exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(thing, part) and part not in getattr(thing, "__annotations__", {}):
                return False
            thing = getattr(thing, part, None)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_name_exists(page: Path) -> None:
    text = page.read_text()
    found = set(re.findall(r"\bbotorch_fed(?:\.[A-Za-z]\w*)+", text))
    if "currentmodule:: botorch_fed\n" in text:
        found |= {f"botorch_fed.{name}" for name in re.findall(r"(?<![`:])`([\w.]+)`(?!`)", text)}
    found -= {OBJECTIVES}  # a group of entry points, no module
    adapter = {name for name in found if name.startswith("botorch_fed.ax_adapter")}
    missing = sorted(name for name in found - adapter if not _exists(name))
    assert not missing
    if adapter:
        pytest.importorskip("ax", reason="needs botorch_fed[ax]")
        assert not sorted(name for name in adapter if not _exists(name))


def test_the_equations_name_something() -> None:
    text = (DOCS / "equations.rst").read_text()
    assert len(set(re.findall(r"(?<![`:])`([\w.]+)`(?!`)", text))) >= 60


def test_a_name_that_does_not_exist_is_seen() -> None:
    assert _exists("botorch_fed.models.BasisGP.from_summary")
    assert not _exists("botorch_fed.models.BasisGP.from_nothing")
    assert not _exists("botorch_fed.modules.BasisGP")


def test_the_loops_of_the_migration_page_run() -> None:
    *plain, _ = _blocks("migration.rst", "python")  # the last is Ax's, with clients of its own
    names: dict[str, Any] = {}
    for block in plain:
        exec(block, names)
    assert names["candidate"].shape == (1, 2)
    assert len(names["result"].best("north")) == 4


def test_the_two_commands_are_the_readme_s() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = _blocks("index.rst", "bash")
    assert len(commands) == 2
    for command in commands:
        assert command.strip() in readme


def test_who_sees_what_is_what_the_studies_say() -> None:
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    written = (DOCS / "who_sees_what.rst").read_text()
    assert tables.page() == written, "write it again: python docs/tables.py"


def test_pages_name_no_machine() -> None:
    for page in [*PAGES, DOCS / "conf.py", ROOT / "CITATION.cff"]:
        for trace in ("/home/", "/root/", "/work/", "/tmp/", "localhost"):
            assert trace not in page.read_text()


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {__version__}\n" in text
    assert text.count("\n  - type: ") == 4


@pytest.mark.slow
def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs Sphinx")
    code = "import gc, runpy; gc.disable(); runpy.run_module('sphinx', run_name='__main__')"
    command = [sys.executable, "-c", code, "-W", "-b", "html", "docs", str(tmp_path / "html")]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    for page in PAGES:
        assert (tmp_path / "html" / f"{page.stem}.html").is_file()
