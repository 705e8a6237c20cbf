"""Who may import whom, who owns which third-party package, and what an import costs."""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "botorch_fed"

# A room may import itself and the rooms named here.
ROOMS: dict[str, set[str]] = {
    "__init__": {"version"},
    "version": set(),
    "errors": set(),
    "rng": set(),
    "lazy": set(),
    "constraints": set(),
    "feasible_set": {"rng"},
    "space": {"errors", "constraints", "feasible_set"},
    "models": {"errors", "lazy", "rng"},
    "acquisition": {"errors", "rng", "feasible_set", "models"},
    "wire": {"errors"},
    "storage": {"errors", "wire"},
    "privacy": {"errors", "lazy", "rng", "storage"},
    "federation": {"errors", "rng", "space", "models", "privacy", "wire", "storage"},
    "search": {
        "errors",
        "rng",
        "space",
        "models",
        "acquisition",
        "privacy",
        "federation",
    },
    "aggregation": {
        "errors",
        "rng",
        "models",
        "acquisition",
        "privacy",
        "wire",
        "storage",
        "federation",
        "search",
    },
    "studies": {
        "errors",
        "rng",
        "space",
        "models",
        "acquisition",
        "privacy",
        "storage",
        "federation",
        "search",
        "aggregation",
    },
    "engines": {"errors", "federation", "wire"},
    "audits": {
        "errors",
        "rng",
        "space",
        "privacy",
        "federation",
        "search",
        "aggregation",
        "studies",
        "engines",
        "storage",
    },
    "advice": {
        "space",
        "models",
        "acquisition",
        "privacy",
        "search",
        "aggregation",
        "studies",
    },
    "test_functions": {"errors", "lazy", "rng", "space"},
    "report": {"errors", "federation", "models", "privacy", "run", "space"},
    "run": {"errors", "rng", "space", "wire", "storage", "federation", "engines", "test_functions"},
    "ax_adapter": {
        "constraints",
        "errors",
        "rng",
        "space",
        "models",
        "acquisition",
        "wire",
        "storage",
        "federation",
        "engines",
        "run",
    },
    "interchange": {"federation", "space", "ax_adapter", "run"},
    "study": {
        "errors",
        "rng",
        "space",
        "models",
        "acquisition",
        "privacy",
        "run",
        "test_functions",
        "federation",
        "search",
        "storage",
        "studies",
    },
    "watch": {"deploy", "errors", "report", "run"},
    "deploy": {"errors", "engines", "storage", "federation", "privacy", "run", "study"},
    "flower_app": set(),
    "demo": {"federation", "privacy", "run", "space", "studies", "test_functions"},
    "cli": {
        "advice",
        "demo",
        "errors",
        "federation",
        "deploy",
        "study",
        "run",
        "interchange",
        "report",
        "watch",
        "privacy",
        "version",
    },
}
# Third-party packages that have one owner: nobody else imports them.
OWNERS: dict[str, set[str]] = {
    "tenseal": {"botorch_fed/privacy/hazmat/ckks.py"},
    "opacus": {"botorch_fed/privacy/accounting.py"},
    "dp_accounting": {"botorch_fed/privacy/accounting.py"},
    "flwr": {
        "botorch_fed/engines/flower.py",
        "botorch_fed/engines/flower_control.py",
        "botorch_fed/flower_app/hub.py",
        "botorch_fed/flower_app/node.py",
    },
    "cryptography": {
        "botorch_fed/deploy.py",
        "botorch_fed/flower_app/hub.py",
        "botorch_fed/flower_app/node.py",
        "botorch_fed/privacy/hazmat/keys.py",
    },
    "ax": {"botorch_fed/ax_adapter.py", "botorch_fed/interchange.py"},
    "optuna": {"botorch_fed/interchange.py"},
    "matplotlib": {"botorch_fed/report/audit.py"},
    "plotly": {"botorch_fed/report/page.py"},
    "msgpack": {"botorch_fed/wire/codec.py"},
    "pickle": set(),
}
HEAVY = [
    "tenseal",
    "opacus",
    "flwr",
    "cryptography",
    "ax",
    "matplotlib",
    "plotly",
    "dp_accounting",
    "pandas",
    "optuna",
]
IMPORT_BUDGET = 0.3  # seconds beyond `import botorch`


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    """Absolute names of all imported modules; relative imports are not used in this project."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively, line {node.lineno}"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _room(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "botorch_fed" and len(parts) > 1 else None


def _violations(path: Path, relative: Path) -> list[str]:
    own = relative.with_suffix("").parts[0]
    found = []
    for name in _imports(path):
        room = _room(name)
        if room is not None and room in ROOMS and room != own and room not in ROOMS[own]:
            found.append(f"{relative} imports {name}: {own} may see {sorted(ROOMS[own])}")
        owners = OWNERS.get(name.split(".")[0])
        if owners is not None and f"botorch_fed/{relative.as_posix()}" not in owners:
            found.append(f"{relative} imports {name}, which belongs to {sorted(owners)}")
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    room = relative.with_suffix("").parts[0]
    assert room in ROOMS, f"{relative} lies in no known room: add it to ROOMS and to CONTRIBUTING"
    assert not _violations(path, relative)


def test_a_forbidden_import_is_seen(tmp_path: Path) -> None:
    stray = tmp_path / "rng.py"
    stray.write_text("import pickle\nfrom botorch_fed.models import BasisGP\n")
    found = _violations(stray, Path("rng.py"))
    assert any("may see []" in line for line in found)
    assert any("imports pickle" in line for line in found)


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_global_seeds_clocks_or_prints(path: Path) -> None:
    words = r"torch\.manual_seed\(|time\.time\(|^\s*print\(|np\.random\.|logging\.basicConfig"
    code = re.sub(r'r?"""[\s\S]*?"""', "", path.read_text())
    assert not re.findall(words, code, flags=re.MULTILINE)


def test_wheel_holds_the_package_only() -> None:
    from setuptools import find_packages

    packages = find_packages(str(ROOT), include=["botorch_fed*"])
    assert set(packages) == {
        ".".join(p.parent.relative_to(ROOT).parts) for p in PACKAGE.rglob("__init__.py")
    }


def test_every_reexport_is_public_and_exists() -> None:
    import botorch_fed.models as models

    assert models.__all__ == sorted(models.__all__)
    for name in models.__all__:
        thing = getattr(models, name)
        assert thing.__doc__, f"{name} has no docstring"


_LOADED = """
import json, sys
import botorch
before = set(sys.modules)
import {module}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# What a front end does not need before it is used, beside HEAVY.
LATER = {
    "botorch_fed.acquisition",
    "botorch_fed.aggregation",
    "botorch_fed.search",
    "botorch_fed.studies",
    "botorch_fed.models.basis_gp",
    "botorch_fed.models.local_gp",
    "botorch_fed.privacy.audit",
    "botorch_fed.privacy.channels",
    "botorch_fed.privacy.mechanisms",
    "botorch_fed.test_functions.sklearn_tuning",
    "botorch.acquisition.analytic",
    "botorch.optim",
    "numpy.f2py",
    "rich.progress",
    "scipy.linalg",
    "scipy.optimize",
    "scipy.special",
    "sklearn",
}


@pytest.mark.parametrize(
    "module", ["botorch_fed.run", "botorch_fed.federation.site", "botorch_fed.privacy.accounting"]
)
def test_what_is_not_used_is_not_imported(module: str) -> None:
    code = _LOADED.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert not loaded & ({*HEAVY} | LATER)


@pytest.mark.parametrize("package", ["models", "privacy", "test_functions"])
def test_names_that_are_imported_late_are_those_of_the_package(package: str) -> None:
    module = importlib.import_module(f"botorch_fed.{package}")
    names = [name for part in module._WHERE.values() for name in part]
    assert sorted(names) == sorted(module.__all__)
    assert {*names} <= {*dir(module)}
    for name in names:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


_PATHS = """
from botorch.models.model import ModelList
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths as draw
from botorch_fed.models{part} import {name}
assert any(draw.dispatch(kind) for kind in {name}.__mro__), "no paths of the model"
assert draw.dispatch(ModelList), "no paths of a list of models"
"""


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("", "BasisGP"),
        (".basis_gp", "BasisGP"),
        ("", "MessagePriorGP"),
        ("", "LocalSharedMixture"),
        ("", "RankingEnsemble"),
        ("", "PartiallyIndependentGP"),
    ],
)
def test_a_model_that_is_imported_alone_has_its_paths(part: str, name: str) -> None:
    code = _PATHS.format(part=part, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


_MEASURE = """
import json, sys, time
import botorch
start = time.process_time()  # of this process alone: other tests may keep the machine busy
import botorch_fed.models
extra = time.process_time() - start
import botorch_fed.report
print(json.dumps({"extra": extra, "loaded": sorted({m.split(".")[0] for m in sys.modules})}))
"""


def test_import_budget() -> None:
    best = math.inf
    for _ in range(5):  # the best of five is the package's own cost
        out = subprocess.run(
            [sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True, cwd=ROOT
        )
        run = json.loads(out.stdout)
        assert not set(HEAVY) & set(run["loaded"])
        best = min(best, run["extra"])
        if best <= IMPORT_BUDGET:
            break
    assert best <= IMPORT_BUDGET, f"import botorch_fed.models adds {best:.2f} s to import botorch"
