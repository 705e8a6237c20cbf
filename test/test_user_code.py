"""A user's own code against the hints of the package, under `mypy --strict` in another project."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

USER_CODE = Path(__file__).parent / "user_code"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project elsewhere, with an environment in which mypy finds the package as an installed one.

    An editable installation is found by a hook of the interpreter that mypy does not follow: then
    everything would be Any.
    """
    folder = tmp_path_factory.mktemp("project")
    for path in USER_CODE.glob("*.py"):
        shutil.copy(path, folder)
    venv.create(folder / "env", symlinks=True)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    homes = (sysconfig.get_path("purelib"), str(package_folder().parent))
    (packages / "installed.pth").write_text("\n".join(homes) + "\n")
    return folder


def package_folder() -> Path:
    spec = importlib.util.find_spec("botorch_fed")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def checked(project: Path, name: str) -> tuple[int, str]:
    """What `mypy --strict` says of a file; third parties need no stubs."""
    pytest.importorskip("mypy", reason="needs botorch_fed[test]")
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports"]
    command += ["--python-executable", str(project / "env" / "bin" / "python")]
    command += ["--config-file", os.devnull, "--cache-dir", str(project / "cache"), name]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 2: it did not check anything
    return done.returncode, done.stdout


def test_the_package_says_that_it_is_typed() -> None:
    assert (package_folder() / "py.typed").exists()


def test_a_sample_of_user_code_is_typed(project: Path) -> None:
    code, said = checked(project, "sample.py")
    assert code == 0, said


def test_a_misuse_is_reported_and_nothing_else(project: Path) -> None:
    code, said = checked(project, "misuse.py")
    assert code == 1
    reported = {int(line) for line in re.findall(r"^misuse\.py:(\d+): error", said, re.M)}
    lines = (project / "misuse.py").read_text().splitlines()
    wrong = {n for n, line in enumerate(lines, start=1) if "# wrong" in line}
    assert len(wrong) >= 12
    assert reported == wrong, said


def test_what_a_user_gets_back_has_a_type(project: Path) -> None:
    code, said = checked(project, "revealed.py")
    assert code == 0, said
    types = re.findall(r'Revealed type is "(.*)"', said)
    lines = (project / "revealed.py").read_text().splitlines()
    assert len(types) == sum("reveal_type(" in line for line in lines) >= 12
    assert not [name for name in types if re.search(r"\bAny\b", name)]


@pytest.mark.filterwarnings("ignore")  # of Ax and BoTorch, as a user sees them
def test_the_sample_runs(project: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "sample.py"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RunResult(") == 4
    assert "6 observations of a protocol of one's own" in done.stdout
