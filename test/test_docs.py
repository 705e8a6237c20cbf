"""The documentation builds, names what exists, and quotes what is printed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from botorch_fed.cli import main
from botorch_fed.federation.site import Site
from botorch_fed.run import make_agent
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.study import OBJECTIVES, read_study
from botorch_fed.version import __version__

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    page for page in DOCS.rglob("*.rst") if not {"_templates", "generated"} & {*page.parts}
)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_every_name_exists(page: Path) -> None:
    text = page.read_text()
    found = set(re.findall(r"\bbotorch_fed(?:\.[A-Za-z]\w*)+", text))
    if "currentmodule:: botorch_fed\n" in text:
        short = re.findall(r"(?<![`:])`(?!botorch_fed\.)([\w.]+)`(?!`)", text)
        found |= {f"botorch_fed.{name}" for name in short}
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


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, Any]:
    """What the page about other programs starts from: two Optuna studies, objectives, a site."""
    optuna = pytest.importorskip("optuna", reason="needs botorch_fed[optuna]")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    for name in ("north", "south"):
        study = optuna.create_study(study_name=name, storage=url)
        for rate, depth in ((1e-3, 2), (1e-2, 5), (0.1, 7)):
            study.enqueue_trial({"rate": rate, "depth": depth})
        study.optimize(
            lambda trial: (
                trial.suggest_float("rate", 1e-4, 1.0, log=True) + trial.suggest_int("depth", 1, 8)
            ),
            n_trials=3,
        )

    def objective(X: Any) -> Any:
        return X.sum(dim=-1, keepdim=True)

    return {"URL": url, "objectives": dict.fromkeys(("north", "south", "west"), objective)}


def test_history_comes_from_optuna_and_goes_there_as_its_page_says(
    elsewhere: dict[str, Any],
) -> None:
    import optuna

    history, attached, *_ = _blocks("interchange.rst", "python")
    exec(history, elsewhere)
    given = elsewhere["result"].given
    assert sorted((row["agent"], row["y"]) for row in given)[:3] == [
        ("north", 2.001),
        ("north", 5.01),
        ("north", 7.1),
    ]
    west = optuna.load_study(study_name="west", storage=elsewhere["URL"])
    assert west.best_params == elsewhere["result"].best_parameters("west")
    agent = make_agent(elsewhere["study"], "west", elsewhere["space"], 0, MemoryBlobs())
    elsewhere["site"] = Site("west", agent, None)
    for _ in range(2):
        exec(attached, elsewhere)
    assert len(elsewhere["site"].trials()) == 3


@pytest.mark.filterwarnings("ignore")  # of MLflow and what it imports
def test_mlflow_has_every_trial_as_its_page_says(
    elsewhere: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs botorch_fed[mlflow]")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    history, _, log, _ = _blocks("interchange.rst", "python")
    exec(history, elsewhere)
    exec(log, elsewhere)
    result = elsewhere["result"]
    trials = {f"{name} {t.id}": t for name in result.names for t in result.trials(name)}
    runs = mlflow.search_runs(output_format="list")
    assert {run.data.tags["mlflow.runName"] for run in runs} == set(trials)
    for run in runs:
        trial = trials[run.data.tags["mlflow.runName"]]
        assert run.data.metrics == trial.values
        assert run.data.params == {name: str(value) for name, value in trial.parameters.items()}
        assert run.data.tags["status"] == trial.status == "completed"


def test_the_commands_of_the_first_page_are_the_readme_s() -> None:
    readme = (ROOT / "README.md").read_text()
    demo, _, tests = _blocks("getting_started.rst", "bash")
    for command in (demo, tests):
        assert command.strip() in readme


def test_the_first_study_runs_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    objective, python = _blocks("getting_started.rst", "python")
    (study,) = _blocks("getting_started.rst", "toml")
    _, commands, _ = _blocks("getting_started.rst", "bash")
    assert study.count("budget = 15 ") == 1
    (tmp_path / "study.toml").write_text(study.replace("budget = 15 ", "budget = 4 "))
    (tmp_path / "tuning.py").write_text(objective)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tuning", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for command in commands.strip().splitlines():
        program, *arguments = command.split()
        assert program == "botorch-fed"
        assert main(arguments) == 0
    assert "no guarantee" in capsys.readouterr().out
    names: dict[str, Any] = {}
    exec(python, names)
    sys.modules.pop("tuning", None)
    result = names["result"]
    assert {len(result.best(site)) for site in ("north", "south", "west")} == {4}
    best = result.best_parameters("north")
    kinds = {"temperature": float, "acid": float, "minutes": int, "catalyst": str, "stirrer": int}
    assert {name: type(value) for name, value in best.items()} == kinds
    assert (tmp_path / "first" / "report.html").is_file()
    (constraint,) = re.findall(
        "``(constraints = .*?)``", (DOCS / "getting_started.rst").read_text()
    )
    (tmp_path / "bounded.toml").write_text(study.replace("[space]", f"[space]\n{constraint}"))
    assert read_study(tmp_path / "bounded.toml").space.constraints


def _listed() -> set[str]:
    """The names that have a page in the reference."""
    names = set()
    for page in (DOCS / "reference").glob("*.rst"):
        module, listing = "", False
        for line in page.read_text().splitlines():
            if line.startswith(".. currentmodule:: "):
                module = line.split()[-1] + "."
            elif line.startswith(".. autosummary::"):
                listing = True
            elif line and not line.startswith(" "):
                module, listing = "", False
            elif re.fullmatch(r"   [\w.]+", line) and listing:
                names.add(module + line.strip())
    return names


@pytest.mark.parametrize("module", ["models", "acquisition", "privacy", "test_functions"])
def test_every_public_name_has_a_page(module: str) -> None:
    public = importlib.import_module(f"botorch_fed.{module}").__all__
    missing = {f"botorch_fed.{module}.{name}" for name in public} - _listed()
    assert not sorted(missing), "add them to a page of docs/reference"


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


def _built(folder: Path, *options: str) -> Path:
    """The folder of the pages, built without a warning, from a copy: sources are generated."""
    pytest.importorskip("pydata_sphinx_theme", reason="needs botorch_fed[docs]")
    generated = shutil.ignore_patterns("_build", "generated", "*.ipynb")
    shutil.copytree(DOCS, folder / "docs", ignore=generated)
    for name in ("botorch_fed", "tutorials", "RESULTS.md"):
        (folder / name).symlink_to(ROOT / name)
    code = "import gc, runpy; gc.disable(); runpy.run_module('sphinx', run_name='__main__')"
    command = [sys.executable, "-c", code, "-W", *options, "docs", "pages"]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return folder / "pages"


class _Page(HTMLParser):
    """Where a page's links go, what they can arrive at, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {"", "top"}
        self.loaded: list[str] = []
        self.tags: Counter[str] = Counter()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags[tag] += 1
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a":
            self.links.append(values.get("href") or "")
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(values.get("src") or values.get("href") or "")


def _check_pages(folder: Path) -> dict[str, _Page]:
    """Links within the pages arrive, and nothing is loaded from elsewhere."""
    pages = {path.resolve(): _Page(path) for path in folder.rglob("*.html")}
    lost = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            anchors = pages[target].anchors if target in pages else {""}
            if not target.is_file() or unquote(address.fragment) not in anchors:
                lost.append(f"{path.name}: {link}")
        assert not [source for source in page.loaded if urlsplit(source).netloc], path
    assert not lost
    return {str(path.relative_to(folder.resolve())): page for path, page in pages.items()}


def test_the_prose_builds_without_warnings(tmp_path: Path) -> None:
    pages = _check_pages(_built(tmp_path, "-t", "no_reference", "-t", "no_tutorials"))
    for page in DOCS.glob("*.rst"):
        assert f"{page.stem}.html" in pages
    assert pages["equations.html"].tags["math"] > 30


def _docstrings(name: str) -> Iterator[tuple[str, str]]:
    """Of an object that has a page: its own, and those of what is defined in it."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    yield name, inspect.getdoc(thing) or ""
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        if not member.startswith("_") and callable(getattr(thing, member, None)):
            yield f"{name}.{member}", inspect.getdoc(value) or ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ax, as it is imported
def test_docstrings_of_the_reference_are_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the nightly build says of markup, without Sphinx's cross references."""
    napoleon = pytest.importorskip("sphinx.ext.napoleon", reason="needs botorch_fed[docs]")
    from docutils import nodes
    from docutils.core import publish_doctree
    from docutils.parsers.rst import roles

    def literal(role: str, raw: str, text: str, *_: Any, **__: Any) -> Any:
        return [nodes.literal(raw, text)], []

    known = dict.fromkeys(("class", "func", "meth", "mod", "py:obj", "doc", "ref"), literal)
    monkeypatch.setattr(roles, "_roles", {**roles._roles, **known})
    papers = "".join(
        f"\n.. [{label}] cited\n"
        for page in PAGES
        for label in re.findall(r"^\.\. \[(\w+)\]", page.read_text(), re.M)
    )
    config = napoleon.Config(napoleon_use_ivar=True)
    said, read = [], 0
    for owner in sorted(_listed()):
        for name, text in _docstrings(owner):
            stream = io.StringIO()
            style = {"what": "class" if name == owner else "method", "name": name}
            lines = str(napoleon.GoogleDocstring(text, config, **style))
            settings = {"warning_stream": stream, "report_level": 2, "default_role": "py:obj"}
            publish_doctree(lines + "\n" + papers, settings_overrides=settings)
            said += [f"{name} {line}" for line in stream.getvalue().splitlines()]
            read += 1
    assert not said
    assert read > 500


@pytest.mark.slow
@pytest.mark.nightly
def test_the_reference_builds_without_warnings(tmp_path: Path) -> None:
    _built(tmp_path, "-b", "dummy", "-t", "no_tutorials")


@pytest.mark.slow
@pytest.mark.nightly
def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    folder = _built(tmp_path)
    pages = _check_pages(folder)
    for name in _listed():
        assert f"reference/generated/{name}.html" in pages
    for notebook in (ROOT / "tutorials").glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        plots = sum("image/png" in str(cell.get("outputs")) for cell in cells)
        assert pages[f"tutorials/{notebook.stem}.html"].tags["img"] >= plots
    assert max(path.stat().st_size for path in folder.rglob("*.html")) < 500_000
