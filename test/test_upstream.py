"""BoTorch's own model tests, run on `BasisGP`, as far as they apply.

The tests are not in BoTorch's wheel. Give a checkout of the matching release by

    BOTORCH_CHECKOUT=path/to/botorch python -m pytest test/test_upstream.py

Of `TestGPRegressionBase`, conditioning, subsetting and construct_inputs apply; the others hard-code
kernels and float32 equality, and their intent is restated in `test/contracts/test_model.py`.
"""

from __future__ import annotations

import importlib.util
import os
import unittest
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


def _kernel() -> RBFKernel:
    kernel = RBFKernel(ard_num_dims=1).double()
    kernel.lengthscale = torch.tensor([[0.3]], dtype=torch.float64)
    return kernel


def _random_features() -> FeatureMap:
    return RandomFourierFeatures.draw(_kernel(), 40, generator=generator(0, "upstream"))


def _inducing_points() -> FeatureMap:
    return InducingFeatures(_kernel(), generator(0, "support").uniform(6, 1))


class FixedMapGP(BasisGP):
    """`BasisGP` with the signature that upstream's tests construct: no options."""

    make_map = staticmethod(_random_features)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, feature_map=self.make_map(), **kwargs)


class FixedSupportGP(FixedMapGP):
    make_map = staticmethod(_inducing_points)


def _upstream() -> ModuleType:
    path = Path(str(CHECKOUT)) / "test" / "models" / "test_gp_regression.py"
    spec = importlib.util.spec_from_file_location("botorch_test_gp_regression", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")  # upstream feeds float32 and unscaled data
@pytest.mark.parametrize("model_class", [FixedMapGP, FixedSupportGP])
@pytest.mark.parametrize(
    "name", ["test_condition_on_observations", "test_subset_model", "test_construct_inputs"]
)
@pytest.mark.parametrize("known_noise", [False, True])
def test_upstream(model_class: type[BasisGP], name: str, known_noise: bool) -> None:
    assert Path(botorch.__file__).parent.parent != Path(str(CHECKOUT)), "botorch must be installed"
    upstream = _upstream()

    class Conformance(upstream.TestGPRegressionBase):  # type: ignore[name-defined, misc]
        def _get_model_and_data(
            self,
            batch_shape: torch.Size,
            m: int,
            outcome_transform: Any = None,
            input_transform: Any = None,
            extra_model_kwargs: Any = None,
            **tkwargs: Any,
        ) -> tuple[BasisGP, dict[str, Any]]:
            X, Y = upstream.get_random_data(batch_shape=batch_shape, m=m, **tkwargs)
            kwargs = {
                "train_X": X,
                "train_Y": Y,
                "outcome_transform": outcome_transform,
                "input_transform": input_transform,
            }
            if known_noise and name != "test_construct_inputs":
                kwargs["train_Yvar"] = torch.full_like(Y, 0.01)
            return model_class(**kwargs), kwargs

    result = unittest.TestResult()
    Conformance(name).run(result)
    assert result.testsRun == 1
    assert not result.errors, result.errors[0][1]
    assert not result.failures, result.failures[0][1]
