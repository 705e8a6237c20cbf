"""What is shipped: all that an installed package, or the tests of a source archive, need."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = ("benchmarks", "botorch_fed", "docs", "test", "tutorials")
FILES = (
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md"),
    "RESULTS.md",
)
SETTINGS = ("constraints.txt", "pyproject.toml", "ruff.toml", "setup.cfg")
MADE = shutil.ignore_patterns(
    "__pycache__", ".cache", "_build", "generated", "*.egg-info", ".*_cache"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, in which an archive and a wheel are made."""
    tree = tmp_path_factory.mktemp("sources")
    for name in SHIPPED:
        shutil.copytree(ROOT / name, tree / name, ignore=MADE)
    for notebook in (tree / "docs" / "tutorials").glob("*.ipynb"):
        notebook.unlink()
    for name in FILES + SETTINGS:
        shutil.copy2(ROOT / name, tree)
    return tree


def _made(tree: Path, kind: str) -> Path:
    code = f"from setuptools import build_meta; build_meta.build_{kind}('made')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (made,) = (tree / "made").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.mark.nightly
def test_the_source_archive_has_all_sources_and_nothing_else(tree: Path) -> None:
    there = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    with tarfile.open(_made(tree, "sdist")) as archive:
        files = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    assert {name for name in files if "egg-info" not in name} - {"PKG-INFO"} == there


@pytest.mark.nightly
def test_the_wheel_has_the_package_and_nothing_else(tree: Path) -> None:
    package = {str(path.relative_to(tree)) for path in (tree / "botorch_fed").rglob("*.*")}
    with zipfile.ZipFile(_made(tree, "wheel")) as wheel:
        files = set(wheel.namelist())
    assert {name for name in files if ".dist-info/" not in name} == package


# What extras bring along, under the names that they are imported by.
NAMES = {"sklearn": "scikit-learn", "dp_accounting": "dp_accounting"}
OF_EXTRAS = {
    "ax": "ax-platform",
    "flwr": "flwr",
    "matplotlib": "matplotlib",
    "optuna": "optuna",
    "plotly": "plotly",
    "httpx": "flwr",
    "uvicorn": "flwr",
}


def test_every_package_that_is_imported_is_declared() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = re.findall(r"^[\w-]+", setup["options"]["install_requires"], re.M)
    extras = "\n".join(setup["options.extras_require"].values())
    imported = set()
    for path in (ROOT / "botorch_fed").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    others = imported - sys.stdlib_module_names - {"botorch_fed"}
    assert {name for name in others if name not in OF_EXTRAS} <= {
        *required,
        *(name for name in NAMES if NAMES[name] in required),
    }
    for name in others & set(OF_EXTRAS):
        assert re.search(rf"^{OF_EXTRAS[name]}\b", extras, re.M), name


def test_every_pinned_package_is_pinned_once() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    names = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins]
    assert len(names) == len(set(names))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    wanted = [
        setup["options"]["install_requires"],
        *(extras.get(name, raw=True) for name in extras),
    ]
    for name in re.findall(r"^([\w-]+)[>=<]", "\n".join(wanted), re.M):
        assert re.sub(r"[-_.]+", "-", name).lower() in names, f"{name} is in no pin"
