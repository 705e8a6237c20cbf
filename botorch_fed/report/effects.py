"""What the parameters do: their importance, and the outcome along one of them.

Importances are scikit-learn's permutation importances of a forest (`ExtraTreesRegressor`) on
observations that it was not fitted to, by cross-validation. Outcomes of each site are standardised,
so that sites on different scales are one data set. Slices are means and intervals of a Gaussian
process on a site's own outcomes, through its best configuration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from botorch_fed.models.local_gp import fit_local_gp, standardize
from botorch_fed.space import SearchSpace, Value

FEWEST = 20  # observations for importances
FEWEST_SLICED = 5  # of a site for its slices
MOST = 1000  # observations of a forest
MOST_SLICED = 300  # of a site's model
FOLDS, TREES, REPEATS = 5, 60, 5
STEPS = 41  # of a slice


@dataclass(frozen=True)
class Importances:
    """Of each parameter, by how much a model predicts worse without it.

    Attributes:
        means: The loss of explained variance when the parameter's values are shuffled, by name.
        spreads: Its standard deviation over folds and repeats.
        explained: The share of the variance of held-out outcomes that the model explains.
        count: The number of observations.
    """

    means: dict[str, float]
    spreads: dict[str, float]
    explained: float
    count: int

    @property
    def order(self) -> list[str]:
        """The parameters, the most important one first."""
        return sorted(self.means, key=lambda name: -self.means[name])


def importances(
    space: SearchSpace, places: Sequence[Sequence[float]], values: Sequence[float]
) -> Importances | None:
    """The importances of the parameters; None with too few observations or equal outcomes.

    Args:
        space: The map of inputs.
        places: Of each observation the parameters as numbers on their axes.
        values: The outcomes, standardised.
    """
    names = [p.name for p in space.parameters if p.kind != "fixed"]
    columns = [k for k, p in enumerate(space.parameters) if p.kind != "fixed"]
    y = np.array(values)
    if len(y) < FEWEST or len(columns) < 2 or not float(y.std()) > 0:
        return None
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.metrics import r2_score
    from sklearn.model_selection import KFold

    X = np.array(places)[:, columns]
    if len(y) > MOST:
        kept = np.linspace(0, len(y) - 1, MOST).round().astype(int)
        X, y = X[kept], y[kept]
    drops, held_out = [], np.empty_like(y)
    for fitted, held in KFold(FOLDS, shuffle=True, random_state=0).split(X):
        forest = ExtraTreesRegressor(TREES, random_state=0, min_samples_leaf=2)
        forest.fit(X[fitted], y[fitted])
        held_out[held] = forest.predict(X[held])
        # In units of the variance of all outcomes: that of a small fold may be tiny.
        found = permutation_importance(
            forest,
            X[held],
            y[held],
            scoring="neg_mean_squared_error",
            n_repeats=REPEATS,
            random_state=0,
        )
        drops.append(found.importances / y.var())
    loss = np.concatenate(drops, axis=1)
    means = dict(zip(names, loss.mean(axis=1).tolist(), strict=True))
    spreads = dict(zip(names, loss.std(axis=1).tolist(), strict=True))
    return Importances(means, spreads, float(r2_score(y, held_out)), len(y))


@dataclass(frozen=True)
class Slice:
    """A site's model along one parameter, the others as in its best configuration.

    Attributes:
        values: Of the parameter.
        mean: The predicted outcome.
        low: The lower end of its 95 % interval, noise left out.
        high: The upper end.
    """

    values: list[Value]
    mean: list[float]
    low: list[float]
    high: list[float]


def slices(
    space: SearchSpace,
    X: torch.Tensor,
    y: torch.Tensor,
    best: dict[str, Value],
    names: Sequence[str],
) -> dict[str, Slice]:
    """Slices of a site's model; none with too few or equal observations.

    Args:
        space: The map of inputs.
        X: The site's points in the unit cube, `n x d`.
        y: Its outcomes as measured, `n`.
        best: The configuration through which the slices go.
        names: The parameters.
    """
    if len(X) < FEWEST_SLICED or float(y.max() - y.min()) <= 0:
        return {}
    X, y = X[-MOST_SLICED:], y[-MOST_SLICED:]
    outcome = standardize(y.numpy())
    model = fit_local_gp(X.numpy(), outcome.values)
    found = {}
    for parameter in space.parameters:
        if parameter.name not in names or parameter.kind == "fixed":
            continue
        values: list[Value] = list(parameter.values)
        if not values:
            low, high = parameter.lower, parameter.upper
            if parameter.scale == "log":
                grid = np.geomspace(low, high, STEPS).tolist()
            else:
                grid = np.linspace(low, high, STEPS).tolist()
            if parameter.kind == "integer":
                grid = sorted({round(one) for one in grid})
            values = [min(max(one, low), high) for one in grid]
            if parameter.kind == "integer":
                values = [int(one) for one in values]
        points = [{**best, parameter.name: value} for value in values]
        mean, variance = model.predict(space.to_unit(points).numpy(), 0.0)
        middle = outcome.centre + outcome.scale * mean
        half = 1.96 * outcome.scale * np.sqrt(np.maximum(variance, 0.0))
        found[parameter.name] = Slice(
            values, middle.tolist(), (middle - half).tolist(), (middle + half).tolist()
        )
    return {name: one for name, one in found.items() if all(map(math.isfinite, one.mean))}
