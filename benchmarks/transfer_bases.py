r"""What messages can say over a basis: where a newcomer would begin.

    python -m benchmarks.transfer_bases [--seeds N] [--json]      a minute for 20 seeds
    python -m benchmarks.transfer_bases --smoke                   a made-up task, nothing is written

The tasks and histories of *late* (`benchmarks.transfer`): all sites but one have finished. Each of
the others projects the mean of its own model on a basis; the newcomer's first point is where the
mean of these functions is largest. What is shown is its normalised regret there, and the least of
the three largest values, as means over seeds, with what a basis loses to the models themselves,
paired and clustered by task. No noise is added, also to the bases for noisy sums. The rows are in
``results/transfer_bases.json``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.statistics import effect
from benchmarks.transfer import NEWCOMER_STARTS, histories
from benchmarks.transfer_controls import Histories
from benchmarks.transfer_tasks import TASKS, Task, make
from botorch_fed.models import (
    FeatureMap,
    KLFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    WarpedFeatures,
)
from botorch_fed.models.earned_prior import EarnedPosterior, fit_earned, project
from botorch_fed.rng import generator
from botorch_fed.search.transfer import (
    TransferSearch,
    default_feature_map,
    default_private_features,
    reference_points,
)
from botorch_fed.space import SearchSpace

Array = NDArray[np.float64]

RESULTS = Path(__file__).parent / "results" / "transfer_bases.json"
SEEDS = 20
FIRST = 3  # points that a newcomer would try first


def random_features(space: SearchSpace, count: int, lengthscale: float = 0.35) -> FeatureMap:
    """Random Fourier features, on the scale of the own models; 100 of them were the default."""
    dim = space.dim
    kernel = StationaryKernel(math.inf, [lengthscale * math.sqrt(dim)] * dim)
    phi = RandomFourierFeatures.draw(kernel, count, generator=generator(0, "transfer"))
    return WarpedFeatures.around(phi, space.log_offsets)


def product(space: SearchSpace, count: int, lengthscale: float = 0.25) -> FeatureMap:
    """The leading functions of a kernel of all inputs together."""
    dim = space.dim
    kernel = StationaryKernel(math.inf, [lengthscale * math.sqrt(dim)] * dim)
    base = RandomFourierFeatures.draw(kernel, 1024, generator=generator(0, "bases"))
    phi = KLFeatures.from_map(base, reference_points(dim), num_features=count)
    return WarpedFeatures.around(phi, space.log_offsets)


def product_for_noise(space: SearchSpace) -> FeatureMap:
    """The default for noisy sums with a product kernel for all dimensions, as it was once."""
    scale = 0.5 * math.sqrt(space.dim / 2)
    return default_private_features(space, num_features=20, lengthscale=scale)


BASES: dict[str, Callable[[SearchSpace], FeatureMap]] = {
    "100 random features": lambda space: random_features(space, 100),
    "300 random features": lambda space: random_features(space, 300),
    "300 random features, shorter": lambda space: random_features(space, 300, 0.2),
    "100 of a product": lambda space: product(space, 100),
    "50 of the sum": lambda space: default_feature_map(space, 50),
    "100 of the sum (default)": default_feature_map,
    "200 of the sum": lambda space: default_feature_map(space, 200),
    "20 of a product": product_for_noise,
    "20 of the sum (default for noisy sums)": default_private_features,
}
EXACT = "the models themselves"


def models_of(task: Task, others: Histories) -> list[EarnedPosterior]:
    """The own models of the others, when they have finished."""
    warp, outcome = TransferSearch().log_warp(task.space), task.space.outcome
    return [
        fit_earned(X.double(), outcome.to_public(Y).double().reshape(-1, 1), log_warp=warp)
        for X, Y in others.values()
    ]


def first_points(task: Task, newcomer: str, values: Array) -> tuple[float, float]:
    """The newcomer's regret at the candidate with the largest value, and the least of a few.

    Args:
        task: With a list of candidates.
        newcomer: The site.
        values: Of the candidates.
    """
    assert task.candidates is not None
    first = task.candidates[torch.from_numpy(np.argsort(-values, kind="stable")[:FIRST].copy())]
    sign = -1.0 if task.space.outcome.minimize else 1.0
    optimum, median = task.scale(newcomer)
    found = sign * task.evaluate(newcomer, first).reshape(-1).numpy()
    regrets = (optimum - found) / (optimum - median)
    return float(regrets[0]), float(regrets.min())


def rows_of(
    task: Task, newcomer: str, others: Histories, bases: Mapping[str, FeatureMap]
) -> dict[str, list[float]]:
    """For each basis the regret at the first point, and the least of a few."""
    assert task.candidates is not None
    models = models_of(task, others)
    candidates = task.candidates.double()

    def mean(points: torch.Tensor) -> Array:
        each = [model.components[0].predict(model.warp(points))[0] for model in models]
        total: Array = np.mean(each, axis=0)
        return total

    found = {EXACT: first_points(task, newcomer, mean(candidates))}
    for name, phi in bases.items():
        values = (phi(candidates) @ project(mean, phi)).numpy()
        found[name] = first_points(task, newcomer, values)
    return {name: [round(value, 5) for value in pair] for name, pair in found.items()}


def measure(seeds: int) -> dict[str, Any]:
    """All tasks of *late*: a list of pairs for each basis and task, and the sizes of the bases."""
    regrets: dict[str, dict[str, list[list[float]]]] = {}
    sizes: dict[str, list[int]] = {}
    for name in TASKS["late"]:
        bases = {basis: made(make(name, 0, suite="late").space) for basis, made in BASES.items()}
        for seed in range(seeds):
            task = make(name, seed, suite="late")
            newcomer = str(task.newcomer)
            late = replace(task, honest=(newcomer,), starts=NEWCOMER_STARTS)
            others = histories(late, seed, newcomer)
            for basis, pair in rows_of(task, newcomer, others, bases).items():
                regrets.setdefault(basis, {}).setdefault(name, []).append(pair)
        for basis, phi in bases.items():
            sizes[basis] = sorted({*sizes.get(basis, []), phi.num_features})
    return {"seeds": seeds, "numbers": sizes, "regret": regrets}


def summary(found: Mapping[str, Any]) -> str:
    """A table: means over tasks, and the difference to the models themselves."""
    lines = [f"{'basis':40s} first  best of {FIRST}  first - that of the models themselves"]
    exact = found["regret"][EXACT]
    for basis, tasks in found["regret"].items():
        first, few = np.mean([np.mean(pairs, axis=0) for pairs in tasks.values()], axis=0)
        line = f"{basis:40s} {first:.3f}  {few:.3f}"
        if basis != EXACT:
            gaps = [np.subtract(tasks[name], exact[name])[:, 0] for name in tasks]
            line += f"      {effect(gaps).shown()}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", action="store_true", help="what is stored, and nothing is run")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.smoke:
        task = make("kernel-ridge-diabetes", 0, suite="tuning")
        assert task.candidates is not None
        few = {name: made(task.space) for name, made in list(BASES.items())[:2]}
        X = task.candidates[:6].double()
        others = {site: (X, task.evaluate(site, X)) for site in task.sites[1:]}
        print(rows_of(task, task.sites[0], others, few))
        return
    if options.json:
        print(RESULTS.read_text())
        return
    found = measure(options.seeds)
    RESULTS.write_text(json.dumps(found) + "\n")
    print(summary(found))


if __name__ == "__main__":
    main()
