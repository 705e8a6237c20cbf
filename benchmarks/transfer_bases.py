r"""What messages can say over a basis: where a newcomer would begin.

    python -m benchmarks.transfer_bases                    a minute, beside histories made before
    python -m benchmarks.transfer_bases --summary          from the stored figures
    python -m benchmarks.transfer_bases --smoke            one task, nothing is written

The tasks and histories of *late* (`benchmarks.transfer`): all sites but one have finished. Each of
the others projects the mean of its own model on a basis; the newcomer's first point is where the
mean of these functions is largest. What is shown is its normalised regret there, and the least of
the three largest values, as means over seeds, with what a basis loses to the models themselves,
clustered by task. Messages of the bases for noisy sums are neither scaled nor noisy here. Stored
in ``results/transfer_bases.json``.
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
    "random-100": lambda space: random_features(space, 100),
    "random-300": lambda space: random_features(space, 300),
    "random-300-short": lambda space: random_features(space, 300, 0.2),
    "product-100": lambda space: product(space, 100),
    "sum-50": lambda space: default_feature_map(space, 50),
    "sum-100": default_feature_map,
    "sum-200": lambda space: default_feature_map(space, 200),
    "product-20": product_for_noise,
    "private-20": default_private_features,
}
EXACT = "exact"


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


def means(found: Mapping[str, Any]) -> dict[str, Any]:
    """For each basis the means over tasks, and the difference to the models themselves."""
    exact = found["regret"][EXACT]
    shown: dict[str, dict[str, Any]] = {}
    for basis, tasks in found["regret"].items():
        first, few = np.mean([np.mean(pairs, axis=0) for pairs in tasks.values()], axis=0)
        shown[basis] = {"first": float(first), "few": float(few)}
        if basis != EXACT:
            lost = effect([np.subtract(tasks[name], exact[name])[:, 0] for name in tasks])
            shown[basis] |= {"lost": lost.mean, "p": lost.p}
    return shown


def summary(found: Mapping[str, Any]) -> str:
    """A table of `means`."""
    lines = [f"basis             numbers  first  best of {FIRST}  first - {EXACT}"]
    for basis, row in means(found).items():
        sizes = ", ".join(map(str, found["numbers"].get(basis, [])))
        line = f"{basis:17s} {sizes:8s} {row['first']:.3f}  {row['few']:.3f}"
        lost = f"      {row['lost']:+.3f} (p {row['p']:.2g})" if "lost" in row else ""
        lines.append(line + lost)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--summary", action="store_true", help="nothing is run")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.smoke:
        task = make("kernel-ridge-diabetes", 0, suite="tuning")
        assert task.candidates is not None
        few = {name: made(task.space) for name, made in BASES.items() if "product" not in name}
        X = task.candidates[:6].double()
        others = {site: (X, task.evaluate(site, X)) for site in task.sites[1:]}
        print(rows_of(task, task.sites[0], others, few))
        return
    if not options.summary:
        RESULTS.write_text(json.dumps(measure(SEEDS)) + "\n")
    print(summary(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
