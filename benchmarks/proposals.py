"""CPU of a proposal with our models and with BoTorch's, for the same acquisition function.

    python -m benchmarks.proposals [--repeats 3]     run, and write the results (ten minutes)
    python -m benchmarks.proposals --summary [--json]  from stored results
    python -m benchmarks.proposals --page            write `docs/proposals.rst` from them
    python -m benchmarks.proposals --smoke           one cell, once

A proposal is a fit to 20 observations in four dimensions and a search for the maximum, with the
same restarts, raw samples and steps at most for all models:

    SingleTaskGP       `fit_gpytorch_mll`
    BasisGP            `fit_gpytorch_mll`, 100 random features
    EarnedPosterior    `fit_earned` to a message of another site, as the default searches do

Kinds of problems: one objective; with a bound on a second outcome; two objectives; two reals, an
integer and a choice by `optimize_acqf_mixed_alternating`; four points at once. Medians of CPU
milliseconds, all in one process and one thread; models take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.acquisition.analytic import (
    LogConstrainedExpectedImprovement,
    LogExpectedImprovement,
    UpperConfidenceBound,
)
from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.max_value_entropy_search import qLowerBoundMaxValueEntropy
from botorch.acquisition.multi_objective.logei import (
    qLogExpectedHypervolumeImprovement,
    qLogNoisyExpectedHypervolumeImprovement,
)
from botorch.acquisition.objective import GenericMCObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.model import Model
from botorch.optim.optimize import optimize_acqf
from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.multi_objective.box_decompositions import FastNondominatedPartitioning
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.constraints import show
from botorch_fed.models import BasisGP, PriorFunction, RandomFourierFeatures, fit_earned
from botorch_fed.rng import generator
from botorch_fed.studies import default_kernel

RESULTS = Path(__file__).parent / "results" / "proposals.json"
PAGE = Path(__file__).parents[1] / "docs" / "proposals.rst"
DIM, COUNT, FEATURES = 4, 20, 100
BOUNDS = torch.tensor([[0.0] * DIM, [1.0] * DIM]).double()
REFERENCE = torch.tensor([-2.0, -2.0]).double()
OPTIONS = {"num_restarts": 4, "raw_samples": 128, "options": {"maxiter": 100}}
DISCRETE = {2: [0.0, 0.25, 0.5, 0.75, 1.0], 3: [0.0, 0.5, 1.0]}


def data(output: int) -> tuple[Tensor, Tensor]:
    """Standardised observations of a smooth function, `n x d` and `n x 1`."""
    X = generator(0, "proposals").uniform(COUNT, DIM)
    Y = (4 * X + output).sin().sum(dim=-1, keepdim=True) - (X - 0.6).square().sum(-1, keepdim=True)
    return X, (Y - Y.mean()) / Y.std()


# ------------------------------------------------------------------ models


def _map() -> RandomFourierFeatures:
    return RandomFourierFeatures.draw(
        default_kernel(DIM), FEATURES, generator=generator(0, "features")
    )


def _fitted(model: Any) -> Any:
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def _earned(output: int) -> Model:
    phi = _map()
    weights = generator(output, "message").normal(phi.num_features)
    return fit_earned(*data(output), PriorFunction.of_weights(phi, weights)).model(DIM)


MODELS: dict[str, Callable[[int], Model]] = {
    "SingleTaskGP": lambda output: _fitted(SingleTaskGP(*data(output), outcome_transform=None)),
    "BasisGP": lambda output: _fitted(BasisGP(*data(output), feature_map=_map())),
    "EarnedPosterior": _earned,
}

# ------------------------------------------------------------------ proposals


def _sampler() -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([128]), seed=0)


def _one(function: Callable[[Any, Tensor, Tensor], Any], q: int, make: Callable[[int], Any]) -> Any:
    X, Y = data(0)
    return optimize_acqf(function(make(0), X, Y), BOUNDS, q=q, sequential=q > 1, **OPTIONS)


def _two(function: Callable[[Any, Tensor, Tensor], Any], make: Callable[[int], Any]) -> Any:
    Y = torch.cat([data(output)[1] for output in (0, 1)], dim=-1)
    both = ModelListGP(make(0), make(1))
    return optimize_acqf(function(both, data(0)[0], Y), BOUNDS, q=1, **OPTIONS)


def _mixed(function: Callable[[Any, Tensor, Tensor], Any], make: Callable[[int], Any]) -> Any:
    X, Y = data(0)
    options = {**OPTIONS, "options": {"maxiter_continuous": 100}}
    return optimize_acqf_mixed_alternating(
        function(make(0), X, Y), BOUNDS, discrete_dims=DISCRETE, q=1, **options
    )


def _log_ei(model: Any, X: Tensor, Y: Tensor) -> Any:
    return LogExpectedImprovement(model, best_f=Y.max())


def _q_log_ei(model: Any, X: Tensor, Y: Tensor) -> Any:
    return qLogExpectedImprovement(model, best_f=Y.max(), sampler=_sampler())


def _noisy(model: Any, X: Tensor, Y: Tensor) -> Any:
    return qLogNoisyExpectedImprovement(model, X, sampler=_sampler(), prune_baseline=True)


def _noisy_within(model: Any, X: Tensor, Y: Tensor) -> Any:
    return qLogNoisyExpectedImprovement(
        model,
        X,
        sampler=_sampler(),
        objective=GenericMCObjective(lambda Z, X=None: Z[..., 0]),
        constraints=[lambda Z: Z[..., 1] - 0.5],
        prune_baseline=True,
    )


def _within(model: Any, X: Tensor, Y: Tensor) -> Any:
    return LogConstrainedExpectedImprovement(
        model, best_f=Y[Y[:, 1] <= 0.5, 0].max(), objective_index=0, constraints={1: (None, 0.5)}
    )


def _hypervolume(model: Any, X: Tensor, Y: Tensor) -> Any:
    cells = FastNondominatedPartitioning(REFERENCE, Y)
    return qLogExpectedHypervolumeImprovement(model, REFERENCE, cells, sampler=_sampler())


def _noisy_hypervolume(model: Any, X: Tensor, Y: Tensor) -> Any:
    return qLogNoisyExpectedHypervolumeImprovement(
        model, REFERENCE, X, sampler=_sampler(), prune_baseline=True
    )


PROPOSALS: dict[tuple[str, str], Callable[[Callable[[int], Any]], Any]] = {
    ("plain", "LogExpectedImprovement"): partial(_one, _log_ei, 1),
    ("plain", "UpperConfidenceBound"): partial(
        _one, lambda model, X, Y: UpperConfidenceBound(model, 2.0), 1
    ),
    ("plain", "qLogNoisyExpectedImprovement"): partial(_one, _noisy, 1),
    ("plain", "qLowerBoundMaxValueEntropy"): partial(
        _one,
        lambda model, X, Y: qLowerBoundMaxValueEntropy(
            model, generator(0, "candidates").uniform(200, DIM)
        ),
        1,
    ),
    ("plain", "qKnowledgeGradient"): partial(
        _one, lambda model, X, Y: qKnowledgeGradient(model, num_fantasies=8), 1
    ),
    ("constrained", "LogConstrainedExpectedImprovement"): partial(_two, _within),
    ("constrained", "qLogNoisyExpectedImprovement"): partial(_two, _noisy_within),
    ("two objectives", "qLogExpectedHypervolumeImprovement"): partial(_two, _hypervolume),
    ("two objectives", "qLogNoisyExpectedHypervolumeImprovement"): partial(
        _two, _noisy_hypervolume
    ),
    ("mixed", "LogExpectedImprovement"): partial(_mixed, _log_ei),
    ("mixed", "qLogNoisyExpectedImprovement"): partial(_mixed, _noisy),
    ("q = 4", "qLogExpectedImprovement"): partial(_one, _q_log_ei, 4),
    ("q = 4", "qLogNoisyExpectedImprovement"): partial(_one, _noisy, 4),
}


def measured(kind: str, name: str, repeats: int) -> dict[str, float]:
    """Median CPU milliseconds by model; one run before is not counted."""
    spent: dict[str, list[float]] = {model: [] for model in MODELS}
    for repeat in range(repeats + 1):
        for model, make in MODELS.items():
            torch.manual_seed(repeat)
            begin = time.process_time()
            PROPOSALS[kind, name](make)
            spent[model].append(1e3 * (time.process_time() - begin))
    return {model: round(statistics.median(times[1:]), 1) for model, times in spent.items()}


Rows = dict[str, dict[str, dict[str, float]]]  # by kind, function and model


def lines_of(rows: Rows) -> list[dict[str, object]]:
    """One line for each kind and function: milliseconds, and ratios to `SingleTaskGP`."""
    lines: list[dict[str, object]] = []
    for kind, functions in rows.items():
        for name, found in functions.items():
            line: dict[str, object] = {"problem": kind, "function": name, **found}
            for model in [*MODELS][1:]:
                line[f"{model} / GP"] = round(found[model] / found["SingleTaskGP"], 2)
            lines.append(line)
    return lines


def page(rows: Rows) -> str:
    """The page of the table."""
    cells = []
    for line in lines_of(rows):
        kind, function, *figures = line.values()
        row = [f"{kind}, ``{function}``", *map(str, figures)]
        cells.append("   * - " + "\n     - ".join(row))
    table = "\n".join(cells)
    most = {
        model: max(
            found[model] / found["SingleTaskGP"]
            for kinds in rows.values()
            for found in kinds.values()
        )
        for model in [*MODELS][1:]
    }
    return f"""CPU of a proposal
=================

A fit to {COUNT} observations in {DIM} dimensions and a search for the maximum, with the same
restarts, raw samples and steps at most: medians of CPU milliseconds on one thread, and ratios to
``SingleTaskGP``. ``python -m benchmarks.proposals`` measures and writes
``benchmarks/results/proposals.json``, with ``--page`` this page.

``EarnedPosterior`` is the model of the default searches, with a message of another site;
``BasisGP`` has {FEATURES} random features. At most ``EarnedPosterior``
takes {most["EarnedPosterior"]:.2f} times the CPU of BoTorch's model, and ``BasisGP``
{most["BasisGP"]:.2f} times. The default searches maximise closed forms instead (:doc:`outcomes`).

.. list-table::
   :header-rows: 1
   :widths: 44 12 12 12 10 10

   * - problem and function
     - ``SingleTaskGP``
     - ``BasisGP``
     - ``EarnedPosterior``
     - ``BasisGP`` / GP
     - ``EarnedPosterior`` / GP
{table}
"""


def main() -> None:
    """Run all cells, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: Rows = {}
    if options.smoke:
        kind, name = next(iter(PROPOSALS))
        rows = {kind: {name: measured(kind, name, 1)}}
    elif options.summary or options.page:
        rows = json.loads(options.results.read_text())
    else:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for kind, name in PROPOSALS:
            rows.setdefault(kind, {})[name] = measured(kind, name, options.repeats)
            options.results.write_text(json.dumps(rows, indent=1) + "\n")
        torch.set_num_threads(threads)
    if options.page:
        PAGE.write_text(page(rows))
    lines = lines_of(rows)
    print(json.dumps(lines)) if options.json else show(lines)


if __name__ == "__main__":
    main()
