"""The matrix of `conformance` is the page's, and knows all of BoTorch's acquisition functions."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import botorch.acquisition
import pytest
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.multi_objective import logei
from botorch.models import ModelListGP
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.multi_objective.box_decompositions import FastNondominatedPartitioning

from test.cases import uniform
from test.contracts.conformance import CASES, PAGE, Case, Cell, cell, matrix, page, ways

# Of models that share the code of others, and whose columns the nightly run compares.
ALSO = ("BasisGP, quadrature", "BasisGP with summaries", "EarnedPosterior.model")
AGAIN = "write the page again: python -m test.contracts.conformance"


def _column(text: str, case: Case) -> list[str]:
    """The marks of a model on a page, from top to bottom."""
    rows = [row.split("\n     - ") for row in text.split("   * - ``")[1:]]
    return [row[1 + CASES.index(case)].split("\n")[0] for row in rows]


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in ALSO], ids=lambda c: c.name)
def test_a_model_does_what_the_page_says(case: Case) -> None:
    written = PAGE.read_text()
    found = matrix([case])
    marks = _column(written, case)
    assert len(marks) == len(ways())
    for name, mark in zip(ways(), marks, strict=True):
        made = found[case.name, name]
        assert made.kind != "fails", f"{name}: {made.words}"
        assert (made.kind == "works") == (mark in ("yes", "normal")), f"{name}: {AGAIN}"
        assert (made.kind == "excluded") == (mark == "–"), f"{name}: {AGAIN}"
        if made.kind == "refused":
            assert f"\n{mark}. {made.words}\n" in written, f"{name}: {AGAIN}"


@pytest.mark.nightly
def test_the_page_is_what_the_matrix_finds() -> None:
    assert page(matrix()) == PAGE.read_text(), AGAIN


@pytest.mark.nightly
def test_the_compiled_hypervolume_is_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    case = next(case for case in CASES if case.name == "BasisGP, random features")
    way = ways()["qLogNoisyExpectedHypervolumeImprovement"]
    plain = cell(case, way)
    monkeypatch.setattr(logei, "_load_attempted", False)
    monkeypatch.setattr(logei, "_C", None)
    assert cell(case, way) == plain == Cell("works")
    X, reference = uniform(5, 2, 2), torch.tensor([-3.0, -3.0]).double()
    pair = ModelListGP(case.make(1), case.make(2))
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)
    partitioning = FastNondominatedPartitioning(reference, pair.posterior(uniform(4, 2)).mean)
    compiled = logei.qLogExpectedHypervolumeImprovement(pair, reference, partitioning, sampler)
    if logei._C is None:
        pytest.skip("no compiler of C++ was found")
    values = compiled(X)
    monkeypatch.setattr(logei, "_C", None)
    torch.testing.assert_close(values, compiled(X))


def test_every_acquisition_function_of_botorch_is_asked() -> None:
    for module in pkgutil.walk_packages(botorch.acquisition.__path__, "botorch.acquisition."):
        importlib.import_module(module.name)
    found, kinds = set(), [AcquisitionFunction]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("botorch.") and not inspect.isabstract(kind):
            found.add(kind.__name__)
    asked = " ".join(ways())
    assert not sorted(name for name in found if name not in asked)
    assert len(found) > 40


def _shifted(case: Case, build: object) -> torch.Tensor:
    """Another value for a model than for its twin."""
    return torch.tensor(float(build is case.make))


def test_a_wrong_number_is_seen() -> None:
    case = next(case for case in CASES if case.twin is not None)
    assert cell(case, _shifted).kind == "fails"
    assert cell(case, lambda *_: None) == Cell("works")
    assert cell(case, lambda *_: 1 / 0).kind == "fails"  # type: ignore[return-value]
    with pytest.raises(ValueError, match="division"):
        page({(case.name, "x"): cell(case, lambda *_: 1 / 0)})  # type: ignore[return-value]


def test_the_twin_is_of_the_same_law() -> None:
    X = uniform(3, 1, 2)
    for case in CASES:
        if case.twin is not None:
            model, twin = case.make(1), case.twin(1)
            one, other = model.posterior(X), twin.posterior(X)
            torch.testing.assert_close(one.mean, other.mean)
            torch.testing.assert_close(one.variance, other.variance)
