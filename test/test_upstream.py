"""BoTorch's own tests with `SingleTaskGP` replaced by `BasisGP`; writes `docs/upstream.rst`.

The tests are not in BoTorch's wheel, nor in its source distribution. Give a checkout of a matching
release by

    BOTORCH_CHECKOUT=path/to/botorch python -m test.test_upstream  run missing files, write the page
    BOTORCH_CHECKOUT=path/to/botorch python -m pytest test/test_upstream.py

All files count that name `SingleTaskGP`, and of them the tests that build one and pass with it. A
test has to pass with `BasisGP`, float32 read as float64, or to stand in `EXPLAINED`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import logging
import os
import re
import sys
import unittest
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import botorch
import pytest
import torch
from botorch.models import SingleTaskGP
from gpytorch.kernels import RBFKernel

from botorch_fed.models import BasisGP, FeatureMap, InducingFeatures, RandomFourierFeatures
from botorch_fed.rng import generator

CHECKOUT = os.environ.get("BOTORCH_CHECKOUT")
checkout = pytest.mark.skipif(
    not CHECKOUT, reason="BOTORCH_CHECKOUT names no checkout of BoTorch (its wheel has no tests)"
)
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "upstream.json"
PAGE = Path(__file__).parents[1] / "docs" / "upstream.rst"
SKIPPED = ("models/test_fully_bayesian.py",)  # needs JAX, and builds no SingleTaskGP
PASSED, BROKEN, ELSEWHERE = "passed", "fails with SingleTaskGP", "not reached"
KERNEL = (
    "gives the model a kernel, mean or likelihood of its own, or looks for those of "
    "``SingleTaskGP``: here the feature map stands for the kernel"
)
STANDARDIZE = (
    "expects outcomes to be standardised by default, or compares with predictions that are: shared "
    "statistics need one public scale"
)
CACHE = (
    "looks inside of a cached root, or of a default sampler, which BoTorch makes for subclasses of "
    "``GPyTorchModel`` only; without them values are the same"
)
INSIDE = "replaces, sets or deletes attributes of GPyTorch's classes that are properties here"
BATCHED = (
    "gives each element of a batch, or each output, length scales of its own, or fits them one by "
    "one: here they share the feature map"
)
LAYOUT = (
    "passes or expects a layout that is refused: no output dimension, or a batch dimension of one"
)
NOISY = "is about fantasy-based noisy expected improvement, which BoTorch has for its GP only"
DOUBLE = "mixes float32 weights with the model, which is always in float64"
DIMENSION = "changes the number of inputs by a transform, and the map was made for the first number"
OWN_OPTIMUM = "expects a point or an error of the search that the posterior of ``SingleTaskGP`` has"
PROXIMAL = (
    "weighs by the last point of a model of several outputs, which BoTorch looks up in its own "
    "class only: a ``ModelListGP`` of models of one output works"
)
RANDOM = "draws a bound at random where no point is feasible: uncached, BoTorch's GP fails as well"
EXPLAINED = {
    KERNEL: (
        "test_custom_init",
        "test_gp",
        "test_ModelListGP",
        "test_ModelListGP_fixed_noise",
        "test_orthogonal_additive_kernel",
        "test_input_transform_in_train",
        "test_robust_relevance_pursuit",
        "test_robust_relevance_pursuit_single_task_gp",
        "test_with_input_transforms",
        "test_sample_all_priors",
        "test_univariate_prior",
        "test_with_multivariate_prior",
        "test_draw_matheron_paths",
        "test_get_matheron_path_model",
        "test_draw_kernel_feature_paths",
        "test_optimize_posterior_samples",
        "test_optimize_posterior_samples_multi_objective",
        "test_main",
        "test_pick_best_of_all_attempts",
    ),
    STANDARDIZE: (
        "test_default_transforms",
        "test_fantasize_with_outcome_transform",
        "test_get_output_transform",
        "test_get_train_targets",
    ),
    CACHE: (
        "test_cache_root",
        "test_cache_root_w_standardize",
        "test_supports_cache_root_opt_out",
        "test_construct_inputs_qEHVI",
        "test_construct_inputs_qLogNEHVI",
        "test_construct_inputs_qNEHVI",
    ),
    INSIDE: ("test_get_train_inputs", "test_error_handling", "test_fit_gpytorch_mll"),
    BATCHED: (
        "test_call_shapes",
        "test_call_with_batch_indices",
        "test_gradients_are_correct",
        "test_runtime_error_handling",
        "test_runtime_error_with_batch_indices",
        "test_state_roundtrip",
        "test_dispatches_to_independent_for_multi_output",
        "test_failure_status",
        "test_stopped_status",
        "test_timeout_sec_warning",
        "test_unrecognized_options_warning",
    ),
    LAYOUT: (
        "test_ModelListGP_multi_task_outcome_transform",
        "test_fantasize",
        "test_get_X_baseline",
        "test_init",
    ),
    NOISY: (
        "test_is_log",
        "test_check_noisy_ei_model",
        "test_noisy_expected_improvement",
        "test_construct_inputs_noisy_ei",
    ),
    DOUBLE: ("test_construct_inputs_jes", "test_construct_inputs_EHVI"),
    DIMENSION: ("test_chained_input_transform",),
    OWN_OPTIMUM: ("test_gen_candidates_scipy_with_fixed_features_inequality_constraints",),
    PROXIMAL: ("test_proximal",),
    RANDOM: ("test_parego_with_constraints_objective_weights",),
}
REASONS = {name: reason for reason, names in EXPLAINED.items() for name in names}


def files() -> list[str]:
    """The files of BoTorch's tests that name `SingleTaskGP`."""
    if not CHECKOUT:
        return []
    root = Path(CHECKOUT) / "test"
    found = [
        path.relative_to(root).as_posix()
        for path in root.rglob("test_*.py")
        if re.search(r"\bSingleTaskGP\b", path.read_text())
    ]
    return sorted(set(found) - set(SKIPPED))


def reason_of(name: str) -> str:
    """Why a test that fails is expected to, or nothing."""
    return REASONS.get(name.rsplit(".", 1)[-1], "")


def _kernel(dim: int) -> RBFKernel:
    kernel = RBFKernel(ard_num_dims=dim).double()
    kernel.lengthscale = 0.3 * dim**0.5
    return kernel


def _random_features(dim: int) -> FeatureMap:
    return RandomFourierFeatures.draw(_kernel(dim), 40, generator=generator(0, "upstream"))


def _inducing_points(dim: int) -> FeatureMap:
    return InducingFeatures(_kernel(dim), generator(0, "support").uniform(6, dim))


class DropIn(BasisGP):
    """`BasisGP` with the signature of `SingleTaskGP`; own kernels are not among its options."""

    make_map = staticmethod(_random_features)

    def __init__(
        self,
        train_X: Any,
        train_Y: Any,
        train_Yvar: Any = None,
        outcome_transform: Any = None,
        input_transform: Any = None,
    ) -> None:
        if not isinstance(outcome_transform, torch.nn.Module):
            outcome_transform = None  # BoTorch's word for its default
        feature_map = self.make_map(train_X.shape[-1])
        super().__init__(
            train_X,
            train_Y,
            train_Yvar,
            input_transform,
            outcome_transform,
            feature_map=feature_map,
        )


class DropInSupport(DropIn):
    make_map = staticmethod(_inducing_points)


class _Double:
    """PyTorch with float64 under both names."""

    def __getattr__(self, name: str) -> Any:
        return torch.double if name in ("float", "float32") else getattr(torch, name)


def _upstream(file: str, model: type | None) -> ModuleType:
    """A file of BoTorch's tests, its `SingleTaskGP` replaced by a model."""
    path = Path(str(CHECKOUT)) / "test" / file
    spec = importlib.util.spec_from_file_location(f"botorch_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_test(name)}
    sys.path.insert(0, str(CHECKOUT))  # its own `test` package, for as long as this takes
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(CHECKOUT))
        for name in [name for name in sys.modules if _is_test(name)]:
            del sys.modules[name]
        sys.modules.update(ours)
    if model is not None:
        module.SingleTaskGP = model
    module.torch = _Double()
    return module  # type: ignore[no-any-return]


def _is_test(name: str) -> bool:
    return name == "test" or name.startswith("test.")


def _tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for part in suite:
        if isinstance(part, unittest.TestSuite):
            yield from _tests(part)
        else:
            yield part


@contextlib.contextmanager
def _counted(model: type) -> Iterator[list[int]]:
    """How often a class, and no subclass of it, is built."""
    count, build = [0], model.__init__  # type: ignore[misc]

    @functools.wraps(build)
    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        count[0] += type(self) is model
        build(self, *args, **kwargs)

    with patch.object(model, "__init__", counting):
        yield count


def _results(file: str, model: type | None) -> dict[str, tuple[int, str]]:
    """Each test of a file: models built, and the last line of what went wrong."""
    found = {}
    suite = unittest.defaultTestLoader.loadTestsFromModule(_upstream(file, model))
    for case in _tests(suite):
        torch.manual_seed(0)
        result = unittest.TestResult()
        with _counted(model or SingleTaskGP) as count:
            case.run(result)
        wrong = [*result.errors, *result.failures]
        found[case.id()] = count[0], wrong[0][1].strip().splitlines()[-1] if wrong else ""
    return found


def compared(file: str, model: type) -> dict[str, str]:
    """What came of each test that builds a `SingleTaskGP`: a word, or what went wrong."""
    base, ours = _results(file, None), _results(file, model)
    found = {}
    for name, (built, words) in base.items():
        if built:
            count, wrong = ours[name]
            short = name.split(".", 1)[1]
            found[short] = BROKEN if words else wrong[:160] or (PASSED if count else ELSEWHERE)
    return found


def failed(found: Mapping[str, str]) -> dict[str, str]:
    """The tests that pass with `SingleTaskGP` only."""
    words = (PASSED, BROKEN, ELSEWHERE)
    return {name: wrong for name, wrong in found.items() if wrong not in words}


@checkout
@pytest.mark.filterwarnings("ignore")  # upstream feeds unscaled data
@pytest.mark.parametrize("file", files())
def test_upstream(file: str) -> None:
    found = failed(compared(file, DropIn))
    assert not {name: words for name, words in found.items() if not reason_of(name)}


@checkout
@pytest.mark.filterwarnings("ignore")
def test_upstream_of_inducing_points() -> None:
    found = compared("models/test_gp_regression.py", DropInSupport)
    assert list(found.values()).count(PASSED) >= 12
    assert all(reason_of(name) for name in failed(found))


def test_the_page_is_what_the_results_say() -> None:
    again = "write it again: python -m test.test_upstream --page"
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text())), again


# ------------------------------------------------------------------ the page


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Counts by folder, and what fails for which reason."""
    rows: dict[str, list[int]] = {}
    reasons: dict[str, list[str]] = {}
    for file, found in results["files"].items():
        words = list(found.values())
        folder = file.split("/")[0] if "/" in file else "others"
        wrong = failed(found)
        counts = [1, words.count(PASSED), len(wrong), words.count(BROKEN), words.count(ELSEWHERE)]
        rows[folder] = [a + b for a, b in zip(rows.get(folder, [0] * 5), counts, strict=True)]
        for name in wrong:
            if not reason_of(name):
                raise ValueError(f"{file}, {name}: {wrong[name]}")
            reasons.setdefault(reason_of(name), []).append(name.rsplit(".", 1)[-1])
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    table = "\n".join(
        f"   * - {name}\n" + "\n".join(f"     - {count}" for count in counts)
        for name, counts in rows.items()
    )
    listed = "\n".join(
        f"   * - {reason}\n     - {len(names)}\n     - {', '.join(sorted(set(names)))}"
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1]))
    )
    _, passed, wrong_count, *_ = rows["all"]
    return f"""BoTorch's own tests
===================

The tests of BoTorch {results["botorch"]} with ``SingleTaskGP`` replaced by
`~botorch_fed.models.BasisGP` on forty random features. All files count that name ``SingleTaskGP``,
and of them the tests that build one and pass with it: {passed + wrong_count}. Of these {passed}
pass, and {wrong_count} fail, each for a reason below. ``BOTORCH_CHECKOUT=path python -m
test.test_upstream`` runs them in a checkout of BoTorch and writes this page from
``benchmarks/results/upstream.json``.

Not counted are tests that fail here with ``SingleTaskGP`` itself (float32 is read as float64), and
tests that build one where the replacement does not reach, in BoTorch's own code.

.. list-table::
   :header-rows: 1

   * - folder
     - files
     - passed
     - failed, explained
     - fail with ``SingleTaskGP``
     - not reached
{table}

Tests that fail
---------------

.. list-table::
   :header-rows: 1
   :widths: 56 8 36

   * - such a test
     - tests
     - names
{listed}
"""


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="from stored results")
    parser.add_argument("--only", nargs="+", help="files to run again")
    options = parser.parse_args()
    results: dict[str, Any] = {"botorch": botorch.__version__, "files": {}}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text())
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    missing = [file for file in files() if file not in results["files"]]
    for file in options.only or ([] if options.page else missing):
        found = compared(file, DropIn)
        print(file, len(found), len(failed(found)), flush=True)
        results["files"][file] = found
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
