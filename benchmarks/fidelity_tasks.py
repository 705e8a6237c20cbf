"""Learning curves of real models at sites that are unlike, as tables.

    python -m benchmarks.fidelity_tasks build [TASK ...]      # some minutes, from bundled data
    python -m benchmarks.fidelity_tasks describe [TASK ...]

Every table has 400 configurations (scrambled Sobol points) times six sites times the fidelities at
which the curve is known. Outcomes are Brier scores on held-out examples of the site, smaller is
better.

    mlp-digits       a perceptron by Adam on scikit-learn's digits; the fidelity is the epochs. A
                     site has 150 images, classes drawn with shares from Dirichlet(1)
    boosting-cancer  gradient boosting on scikit-learn's breast cancer data; the fidelity is the
                     trees. A site has 80 patients around one quantile of the first principal
                     component
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from botorch_fed.rng import generator
from botorch_fed.space import Outcome, Parameter, SearchSpace

Array = NDArray[np.float64]
Curve = Callable[..., list[float]]  # a configuration by name to an outcome at each fidelity

TABLES = Path(__file__).parent / "fidelity_tables"
NUM_CONFIGURATIONS = 400
NUM_SITES = 6
UNIT = 2**-15  # of a stored outcome


@dataclass(frozen=True)
class Recipe:
    """A task before its table.

    Attributes:
        configurations: The parameters without the fidelity.
        fidelity: Its name.
        levels: The fidelities at which curves are known; the last is the target.
        curves: Makes a curve of every site in turn.
    """

    configurations: SearchSpace
    fidelity: str
    levels: tuple[int, ...]
    curves: Callable[[], Iterator[Curve]]


# ------------------------------------------------------------------ models and data


def _digits_sites() -> Iterator[tuple[Array, Any, Array, Any]]:
    """Training and held-out examples of each site, classes in shares that differ."""
    from sklearn.datasets import load_digits

    data = load_digits()
    X, y = data.data / 16.0, data.target
    free = np.ones(len(X), dtype=bool)
    order = generator(0, "digits", "order").uniform(len(X)).numpy().argsort()
    for site in range(NUM_SITES):
        stream = generator(0, "digits", site)
        shares = -np.log(stream.uniform(10).numpy())
        keys = -np.log(stream.uniform(len(X)).numpy()) / shares[y]
        keys[~free] = np.inf
        rows = keys.argsort()[:290]
        free[rows] = False
        rows = rows[np.argsort(order[rows])]
        yield X[rows[:150]], y[rows[:150]], X[rows[150:]], y[rows[150:]]


def _mlp_curves() -> Iterator[Curve]:
    from sklearn.neural_network import MLPClassifier

    epochs = RECIPES["mlp-digits"].levels
    for X, y, held_out, labels in _digits_sites():
        wanted = np.eye(10)[labels]

        def curve(
            rate: float,
            alpha: float,
            width: int,
            batch: int,
            momentum: float,
            X: Array = X,
            y: Any = y,
            held_out: Array = held_out,
            wanted: Array = wanted,
        ) -> list[float]:
            model = MLPClassifier(
                (width,),
                learning_rate_init=rate,
                alpha=alpha,
                batch_size=batch,
                beta_1=momentum,
                random_state=0,
            )
            values = []
            for epoch in range(1, epochs[-1] + 1):
                model.partial_fit(X, y, classes=np.arange(10))
                if epoch in epochs:
                    found = np.nan_to_num(model.predict_proba(held_out), nan=0.1)
                    values.append(float(((found - wanted) ** 2).sum(axis=1).mean()))
            return values

        yield curve


def _cancer_sites() -> Iterator[tuple[Array, Any, Array, Any]]:
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    X, y = data.data, data.target
    scaled = (X - X.mean(axis=0)) / X.std(axis=0)
    first = np.linalg.svd(scaled, full_matrices=False)[2][0]
    place = (scaled @ first).argsort().argsort() / len(X)
    for site in range(NUM_SITES):
        stream = generator(0, "cancer", site)
        middle = 0.3 + 0.4 * site / (NUM_SITES - 1)  # both classes are at every site
        keys = np.abs(place - middle) - 0.3 * np.log(stream.uniform(len(X)).numpy())
        rows = keys.argsort()[:240]
        rows = rows[stream.uniform(240).numpy().argsort()]
        yield X[rows[:80]], y[rows[:80]], X[rows[80:]], y[rows[80:]]


def _boosting_curves() -> Iterator[Curve]:
    from sklearn.ensemble import GradientBoostingClassifier

    trees = RECIPES["boosting-cancer"].levels
    for X, y, held_out, labels in _cancer_sites():

        def curve(
            rate: float,
            depth: int,
            leaf: int,
            share: float,
            features: float,
            X: Array = X,
            y: Any = y,
            held_out: Array = held_out,
            labels: Any = labels,
        ) -> list[float]:
            model = GradientBoostingClassifier(
                n_estimators=trees[-1],
                learning_rate=rate,
                max_depth=depth,
                min_samples_leaf=leaf,
                subsample=share,
                max_features=features,
                random_state=0,
            ).fit(X, y)
            stages = [p[:, 1] for p in model.staged_predict_proba(held_out)]
            return [float(2 * ((stages[k - 1] - labels) ** 2).mean()) for k in trees]

        yield curve


BRIER = Outcome(minimize=True, name="Brier score")
RECIPES = {
    "mlp-digits": Recipe(
        SearchSpace(
            (
                Parameter.real("rate", 1e-4, 1e-1, scale="log"),
                Parameter.real("alpha", 1e-5, 10.0, scale="log"),
                Parameter.integer("width", 4, 64, scale="log"),
                Parameter.integer("batch", 8, 128, scale="log"),
                Parameter.real("momentum", 0.5, 0.99),
            ),
            BRIER,
        ),
        "epochs",
        (1, 2, 3, 4, 6, 9, 13, 19, 27),
        _mlp_curves,
    ),
    "boosting-cancer": Recipe(
        SearchSpace(
            (
                Parameter.real("rate", 1e-2, 1.0, scale="log"),
                Parameter.integer("depth", 1, 6),
                Parameter.integer("leaf", 1, 30, scale="log"),
                Parameter.real("share", 0.2, 1.0),
                Parameter.real("features", 0.05, 1.0),
            ),
            BRIER,
        ),
        "trees",
        (1, 2, 3, 5, 9, 16, 27, 47, 81),
        _boosting_curves,
    ),
}


# ------------------------------------------------------------------ tables


def configurations(recipe: Recipe) -> Tensor:
    """Scrambled Sobol points that a site can evaluate, `K x d`."""
    space = recipe.configurations
    engine = torch.quasirandom.SobolEngine(space.dim, scramble=True, seed=2026)
    points = space.snap(space.snap(engine.draw(NUM_CONFIGURATIONS).double()))
    return torch.unique(points, dim=0)


def build(name: str) -> None:
    """Fill a task's table."""
    target = TABLES / f"{name}.npz"
    if target.exists():
        print(f"{name}: there already")
        return
    recipe = RECIPES[name]
    points = configurations(recipe)
    settings = recipe.configurations.from_unit(points)
    rows = []
    for site, curve in enumerate(recipe.curves()):
        began = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # batches larger than the data
            rows.append([curve(**point) for point in settings])
        print(f"{name}: site {site}, {time.process_time() - began:.0f} s", flush=True)
    table = np.array(rows)
    if not ((table >= 0) & (table <= 2)).all():
        raise ValueError(f"{name}: expected Brier scores.")
    TABLES.mkdir(exist_ok=True)
    np.savez_compressed(
        target,
        values=np.round(table / UNIT).astype(np.uint16),
        fingerprint=np.array(recipe.configurations.fingerprint),
    )


@lru_cache
def load(name: str) -> tuple[Tensor, Array]:
    """A table's configurations `K x d`, and outcomes by site, configuration and fidelity."""
    path = TABLES / f"{name}.npz"
    recipe = RECIPES[name]
    if not path.exists():
        raise FileNotFoundError(
            f"There is no table of {name}: python -m benchmarks.fidelity_tasks build {name}"
        )
    with np.load(path, allow_pickle=False) as archive:
        if str(archive["fingerprint"]) != recipe.configurations.fingerprint:
            raise ValueError(f"{path} was built for another search space: delete it, build again.")
        return configurations(recipe), archive["values"].astype(np.float64) * UNIT


def correlations(name: str) -> dict[str, float]:
    """Mean rank correlations with the target, by fidelity, and of two ``sites`` at the target."""
    from scipy.stats import spearmanr

    _, table = load(name)
    found = {
        str(level): float(np.mean([spearmanr(site[:, k], site[:, -1])[0] for site in table]))
        for k, level in enumerate(RECIPES[name].levels)
    }
    pairs = spearmanr(table[:, :, -1].T)[0][np.triu_indices(len(table), 1)]
    return {**found, "sites": float(pairs.mean())}


def describe(name: str) -> str:
    """How well low fidelities and other sites rank configurations."""
    levels, ranks = RECIPES[name].levels, correlations(name)
    _, table = load(name)
    lines = [f"{name}: {len(table)} sites, {table.shape[1]} configurations"]
    for k, level in enumerate(levels):
        picked = [site[site[:, k].argmin(), -1] for site in table]
        regret = [
            (value - site[:, -1].min()) / (np.median(site[:, -1]) - site[:, -1].min())
            for value, site in zip(picked, table, strict=True)
        ]
        lines.append(
            f"  {level:3d}: median {np.median(table[:, :, k]):.3f}, "
            f"rank correlation with the target {ranks[str(level)]:.2f}, "
            f"regret of its best at the target {np.mean(regret):.2f}"
        )
    lines.append(f"  rank correlation of two sites at the target: {ranks['sites']:.2f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables of learning curves.")
    parser.add_argument("what", choices=("build", "describe"))
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="default: all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.tasks or RECIPES:
        if options.what == "build":
            build(name)
        else:
            print(describe(name))


if __name__ == "__main__":
    main()
