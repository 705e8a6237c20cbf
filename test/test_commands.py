"""Every command that README, CONTRIBUTING and docs name runs, or parses and is run elsewhere."""

from __future__ import annotations

import argparse
import configparser
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from botorch_fed.cli import _parser, main
from test.benchmarks.test_smoke import commands, settings_restored, watched  # noqa: F401
from test.test_docs import _blocks

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.rst"))]
OURS = "botorch-fed"
PROGRAMS = (OURS, "python", "python3", "pip", "bash", "sphinx-build", "ruff", "mypy")
SMOKE = {parameter.values[0] for parameter in commands()}
DEPLOYED = ROOT / "test" / "test_deploy.py"
# Verbs that parse here, and who runs them: a script of several processes, or a test.
THREE_SITES, THREE_LABS = "tutorials/three_sites.sh", "tutorials/three_labs.sh"
ELSEWHERE = {
    "demo": "test/test_demo.py",  # minutes; small there
    "watch": "test/test_watch.py",  # runs until it is stopped
    "hub start": THREE_SITES,
    "hub admit": THREE_SITES,
    "hub sites": THREE_SITES,
    "hub run": THREE_SITES,
    "site start": THREE_SITES,
    "site show": THREE_SITES,
    "site ask": THREE_LABS,
    "site tell": THREE_LABS,
    "site fail": THREE_LABS,
    "site status": THREE_LABS,
    "site attach": "test/test_deploy.py",
    "site import": "test/test_deploy.py",
}


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        text: As it stands there, in one line.
        pages: The files.
        whole: Whether it stands in a block of code, complete.
    """

    text: str
    pages: tuple[str, ...]
    whole: bool

    @property
    def words(self) -> list[str]:
        """Its words, the program without its folder."""
        words = shlex.split(self.text)
        if words[0] in ("hub", "site"):  # of prose
            words = [OURS, *words]
        return [words[0].removeprefix(".venv/bin/"), *words[1:]]


def _lines(path: Path) -> Iterator[tuple[str, bool]]:
    """What may be a command: the lines of blocks of code, and words of prose that are code."""
    text, markdown = path.read_text(), path.suffix == ".md"
    fence = r"^```\w*\n(.*?)^```$" if markdown else r"^((?: +\S.*\n|\n)+)"
    for block in re.findall(fence, text, re.M | re.S if markdown else re.M):
        for line in block.splitlines():
            code = re.sub(r"(^|\s)#.*$", "", line).strip().removeprefix("$ ")
            if "   " not in code:  # else columns of text
                yield from ((part.strip(), True) for part in code.split("&&"))
    prose = re.sub(fence, "", text, flags=re.M | re.S) if markdown else text
    for words in re.findall(r"`([^`]+)`" if markdown else r"``(.+?)``", prose, re.S):
        yield " ".join(words.split()), False


def _found() -> list[Command]:
    found: dict[tuple[str, ...], Command] = {}
    for path in FILES:
        if path.name == "errors.rst":  # mistakes, which test_docs.py makes one by one
            continue
        for text, whole in _lines(path):
            first, _, rest = text.partition(" ")
            first = first.removeprefix(".venv/bin/")
            named = first in PROGRAMS or (first in ("hub", "site") and not whole)
            if named and (rest or whole) and "`" not in text:
                one = Command(text, (path.name,), whole)
                known = found.setdefault(tuple(one.words), one)
                pages = tuple(dict.fromkeys((*known.pages, path.name)))
                found[tuple(one.words)] = replace(known, pages=pages, whole=known.whole or whole)
    return list(found.values())


COMMANDS = _found()


def of(*programs: str) -> Any:
    chosen = [command for command in COMMANDS if command.words[0] in programs]
    return pytest.mark.parametrize("command", chosen, ids=lambda command: command.text)


def test_the_commands_of_every_page_are_found() -> None:
    texts = {command.text for command in COMMANDS}
    assert {
        "botorch-fed hub",
        "python -m benchmarks.transfer SUITE --summary",
        "botorch-fed hub run hub study.toml --out run --deadline 3600 --resume",
        'botorch-fed site fail SITE 1 --reason "the sample was lost"',
        "botorch-fed run study.toml --dry-run",
        "hub run --resume",
        "bash tutorials/late_site.sh",
        ".venv/bin/ruff check",
    } <= texts
    assert {page for command in COMMANDS for page in command.pages} >= {
        "README.md",
        "CONTRIBUTING.md",
        "faq.rst",
        "getting_started.rst",
        "machines.rst",
        "migration.rst",
        "threat_model.rst",
        "transfer.rst",
        "trials.rst",
    }


# ------------------------------------------------------------------ the command line


def _verb(words: list[str]) -> tuple[str, argparse.ArgumentParser]:
    """The leading words that name a command, and its parser."""
    parser, verb = _parser(), []
    for word in words[1:]:
        groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not groups or word not in groups[0].choices:
            break
        parser = groups[0].choices[word]
        verb.append(word)
    return " ".join(verb), parser


def _parsed(command: Command) -> argparse.Namespace | None:
    try:
        return _parser().parse_args(command.words[1:])
    except SystemExit:
        return None


@of(OURS)
def test_a_command_parses(command: Command) -> None:
    """Those of blocks as a whole, by the real parser; of prose, and with …, verb and options."""
    verb, parser = _verb(command.words)
    assert verb, f"{command.pages}: {command.text} names no command"
    if command.whole and "…" not in command.text:
        arguments = _parsed(command)
        assert arguments is not None, f"{command.pages}: {command.text} does not parse"
        assert callable(arguments.command)
        return
    options = {word.partition("=")[0] for word in command.words if word.startswith("-")}
    unknown = options - parser._option_string_actions.keys()
    assert not unknown, f"{command.pages}: {command.text} has no option {unknown}"


def _runs(command: Command) -> bool:
    """Whether it is complete, and no other test runs it."""
    named = _verb(command.words)[0] in ELSEWHERE or "…" in command.text
    return not named and _parsed(command) is not None


RUN = [command for command in COMMANDS if command.words[0] == OURS and _runs(command)]


def test_some_commands_run_here() -> None:
    verbs = {_verb(command.words)[0] for command in RUN}
    assert verbs == {
        *("account", "advise", "audit", "export", "protocols", "report", "run"),
        *("hub init", "site identity", "site init", "site keys"),
    }


@pytest.mark.parametrize("command", RUN, ids=lambda command: command.text)
def test_a_command_runs(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a folder with the study of the page of errors."""
    (study,), (objective,) = _blocks("errors.rst", "toml"), _blocks("errors.rst", "python")[:1]
    verb, _ = _verb(command.words)
    if verb.partition(" ")[0] in ("hub", "site"):
        pytest.importorskip("flwr", reason="needs botorch_fed[flower]")
    if verb == "site keys":
        study = study.replace("seed = 0", 'seed = 0\nchannel = "ckks"').replace('"fts"', '"fed-gp"')
    (tmp_path / "study.toml").write_text(study)
    (tmp_path / "tuning.py").write_text(objective)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "tuning", raising=False)
    if verb == "report":
        pytest.importorskip("plotly")
        compared = [word.partition("=")[2] for word in command.words if "=" in word]
        for folder in (command.words[2], *compared):
            assert main(["run", "study.toml", "--out", folder]) == 0
    if verb == "export":
        to = command.words[command.words.index("--to") + 1]
        pytest.importorskip({"csv": "pandas"}.get(to, to))
        assert main(["run", "study.toml", "--out", command.words[2]]) == 0
    if verb == "site identity":
        assert main(["site", "init", command.words[-1]]) == 0
    if verb == "audit":
        command = replace(command, text=f"{command.text} --runs 100")
    assert main(command.words[1:]) == 0
    sys.modules.pop("tuning", None)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("verb", "where"), ELSEWHERE.items())
def test_what_does_not_run_here_runs_there(verb: str, where: str) -> None:
    text = (ROOT / where).read_text()
    if where.endswith(".sh"):
        assert f"botorch-fed {verb} " in text
        assert f'"{Path(where).name}"' in DEPLOYED.read_text()  # a nightly test runs it
    else:
        first, *rest = verb.split()
        assert re.search(r",\s*".join(f'"{word}"' for word in (first, *rest)), text)


# ------------------------------------------------------------------ scripts and benchmarks


@of("bash")
def test_a_script_is_one(command: Command) -> None:
    _, script = command.words
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert f'"{Path(script).name}"' in DEPLOYED.read_text()


@of("python")
def test_a_module_runs(
    command: Command,
    settings_restored: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Summaries of stored results as they stand; what computes runs in test_smoke.py."""
    words = command.words[1:]
    if words[0] == "docs/tables.py":  # test_docs.py compares what it writes
        assert (ROOT / words[0]).is_file()
        return
    assert words[0] == "-m"
    if words[1] == "pytest":
        _check_pytest(words[2:])
        return
    if words[1].startswith("test.contracts."):  # their tests compare whole pages
        return
    assert words[1] in SMOKE
    if "--summary" not in words:
        return
    arguments = ["tuning" if word == "SUITE" else word for word in words[2:]]
    module = importlib.import_module(words[1])
    monkeypatch.setattr(sys, "argv", [words[1], *arguments])
    with watched() as files:
        module.main()
    assert not files
    assert capsys.readouterr().out.count("\n") > 5


# ------------------------------------------------------------------ tools


def _setup() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


def _check_pytest(words: list[str]) -> None:
    """Its options are those of pytest and its plugins, its marks those of the project."""
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options.keys() <= {"-n", "-m"}
    assert options["-n"].isdecimal()
    assert "pytest-xdist" in _setup()["options.extras_require"]["test"]  # which has -n
    if "-m" in options:
        assert f"{options['-m']}:" in _setup()["tool:pytest"]["markers"]


@of("pip")
def test_what_is_installed_exists(command: Command) -> None:
    """The file of constraints and the extras; installing takes a minute, and a network."""
    words = command.words
    assert words[1] == "install"
    extras = re.fullmatch(r"(?:\.|botorch_fed)\[(\w+)\]", words[-1])
    assert extras is not None
    assert extras[1] in _setup()["options.extras_require"]
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file()


@of("ruff", "mypy", "sphinx-build", "python3")
def test_a_tool_is_known(command: Command) -> None:
    """CI runs ruff and mypy on all of it, and test_docs.py Sphinx; an environment is Python's."""
    assert command.words[:3] in (
        ["ruff", "format"],
        ["ruff", "check"],
        ["mypy"],
        ["sphinx-build", "-W", "docs"],
        ["sphinx-build", "-b", "linkcheck"],  # needs a network
        ["python3", "-m", "venv"],
    )
