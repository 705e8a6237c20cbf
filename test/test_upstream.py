"""BoTorch's own tests with `SingleTaskGP` replaced by `BasisGP`, as far as they apply.

The tests are not in BoTorch's wheel, nor in its source distribution. Give a checkout of a matching
release by

    BOTORCH_CHECKOUT=path/to/botorch python -m pytest test/test_upstream.py

A test applies if it passes with the `SingleTaskGP` of the installed BoTorch. It then has to pass
with `BasisGP`, float32 read as float64, or to stand in `EXPLAINED`. `python -m test.test_upstream`
counts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import botorch
import pytest
import torch
from gpytorch.kernels import RBFKernel

from botorch_fed.models import BasisGP, FeatureMap, InducingFeatures, RandomFourierFeatures
from botorch_fed.rng import generator

CHECKOUT = os.environ.get("BOTORCH_CHECKOUT")
pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="BOTORCH_CHECKOUT names no checkout of BoTorch (its wheel has no tests)"
)
FILES = (
    "acquisition/multi_objective/test_hypervolume_knowledge_gradient.py",
    "acquisition/multi_objective/test_joint_entropy_search.py",
    "acquisition/multi_objective/test_monte_carlo.py",
    "acquisition/multi_objective/test_parego.py",
    "acquisition/multi_objective/test_predictive_entropy_search.py",
    "acquisition/multi_objective/test_utils.py",
    "acquisition/test_analytic.py",
    "acquisition/test_cached_cholesky.py",
    "acquisition/test_decoupled.py",
    "acquisition/test_fixed_feature.py",
    "acquisition/test_integration.py",
    "acquisition/test_knowledge_gradient.py",
    "acquisition/test_logei.py",
    "acquisition/test_max_value_entropy_search.py",
    "acquisition/test_monte_carlo.py",
    "acquisition/test_multi_step_lookahead.py",
    "acquisition/test_predictive_entropy_search.py",
    "acquisition/test_preference.py",
    "acquisition/test_prior_guided.py",
    "acquisition/test_proximal.py",
    "acquisition/test_thompson_sampling.py",
    "acquisition/test_utils.py",
    "generation/test_gen.py",
    "generation/test_sampling.py",
    "models/test_deterministic.py",
    "models/test_gp_regression.py",
    "models/test_model_list_gp_regression.py",
    "optim/test_initializers.py",
    "optim/test_optimize.py",
    "optim/test_optimize_mixed.py",
    "optim/utils/test_acquisition_utils.py",
    "test_cross_validation.py",
    "test_end_to_end.py",
    "utils/test_sampling.py",
)
KERNEL = "looks for the kernel, mean or likelihood of SingleTaskGP, or passes one of its own"
STANDARDIZE = "expects outcomes to be standardised by default, which shared statistics forbid"
CACHE = "looks inside of a cached root, which BoTorch makes for GPyTorchModel only"
RANDOM = "uncached, BoTorch draws a bound at random where no point is feasible, for its GP as well"
NOISY = "fantasy-based noisy EI is for SingleTaskGP only, and BoTorch says so"
EXPLAINED = {
    "test_custom_init": KERNEL,
    "test_default_transforms": STANDARDIZE,
    "test_gp": KERNEL,
    "test_ModelListGP": KERNEL,
    "test_ModelListGP_fixed_noise": KERNEL,
    "test_ModelListGP_multi_task_outcome_transform": "expects a batch dimension of size one",
    "test_fantasize": "compares known noise without its batch dimension",
    "test_fantasize_with_outcome_transform": STANDARDIZE,
    "test_abstract_raises": "expects points once for every output of a batch",
    "test_get_X_baseline": "data without an explicit output dimension, which are refused",
    "test_is_log": NOISY,
    "test_check_noisy_ei_model": NOISY,
    "test_noisy_expected_improvement": NOISY,
    "test_cache_root": CACHE,
    "test_cache_root_w_standardize": CACHE,
    "test_cache_root_decomposition": CACHE,
    "test_parego_with_constraints_objective_weights": RANDOM,
    "test_optimize_posterior_samples": KERNEL,
    "test_optimize_posterior_samples_multi_objective": KERNEL,
    "test_gen_candidates_scipy_warns_opt_failure": "expects one search to fail",
    "test_init": "standardises one observation, whose infinite outcome is refused",
}


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


def _results(file: str, model: type | None) -> dict[str, str]:
    """Each test of a file, and the last line of what went wrong."""
    found = {}
    suite = unittest.defaultTestLoader.loadTestsFromModule(_upstream(file, model))
    for case in _tests(suite):
        torch.manual_seed(0)
        result = unittest.TestResult()
        case.run(result)
        wrong = [*result.errors, *result.failures]
        found[case.id()] = wrong[0][1].strip().splitlines()[-1] if wrong else ""
    return found


def _compared(file: str, model: type) -> dict[str, str]:
    """The tests that apply."""
    base = _results(file, None)
    return {name: words for name, words in _results(file, model).items() if base.get(name) == ""}


@pytest.mark.filterwarnings("ignore")  # upstream feeds unscaled data
@pytest.mark.parametrize("file", FILES)
def test_upstream(file: str) -> None:
    assert Path(botorch.__file__).parent.parent != Path(str(CHECKOUT)), "botorch must be installed"
    found = _compared(file, DropIn)
    unexplained = {
        name: words
        for name, words in found.items()
        if words and name.rsplit(".", 1)[-1] not in EXPLAINED
    }
    assert not unexplained


@pytest.mark.filterwarnings("ignore")
def test_upstream_of_inducing_points() -> None:
    found = _compared("models/test_gp_regression.py", DropInSupport)
    assert len([words for words in found.values() if not words]) >= 12
    assert all(name.rsplit(".", 1)[-1] in EXPLAINED for name, words in found.items() if words)


def main() -> None:
    """How many tests apply, pass, and fail for which reason."""
    counts: dict[str, int] = {}
    for file in FILES:
        for name, words in _compared(file, DropIn).items():
            kind = EXPLAINED.get(name.rsplit(".", 1)[-1], words) if words else "passed"
            counts[kind] = counts.get(kind, 0) + 1
    print(f"{sum(counts.values())} tests of {len(FILES)} files apply")
    for kind, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:5d}  {kind}")


if __name__ == "__main__":
    main()
