r"""Maximise the upper confidence bound of an additive model, one coordinate after the other.

For :math:`f(x) = \sum_j f_j(x_j)` the mean is a sum over coordinates, but the variance is not. A
move of one coordinate changes the features of its groups only, by :math:`\delta`, and

.. math:: \sigma^2(x + \text{move}) = \sigma^2(x) + 2\delta^\top C\phi + \delta^\top C_{jj} \delta,

so that all moves along one coordinate's grid cost one small matrix product, in any dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from numpy.typing import NDArray
from torch import Tensor

from botorch_fed.models import AdditiveFeatures, FeatureMap, WeightPosterior
from botorch_fed.rng import Generator

_Array = NDArray[np.float64]
_TINY = 1e-15  # least variance: rounding may make it negative


class AdditiveGrid:
    """The features of an additive map along a grid for each input, computed once.

    Args:
        feature_map: A map whose groups read one input each; several groups may read the same one.
        grid: The values of each input: a `K` tensor for all inputs, or one tensor per input.

    Example:
        >>> grid = AdditiveGrid(feature_map, torch.linspace(0, 1, 41).double())
        >>> point, value = grid.maximize_ucb(posterior, exploration=2.0, generator=generator(0))
    """

    def __init__(self, feature_map: FeatureMap, grid: Tensor | Sequence[Tensor]) -> None:
        if not isinstance(feature_map, AdditiveFeatures):
            raise UnsupportedError(
                f"Expected AdditiveFeatures, got {type(feature_map).__name__}: use `maximize` for "
                "other maps."
            )
        if any(len(group) != 1 for group in feature_map.groups):
            raise UnsupportedError(
                f"Expected groups of one input each, got {feature_map.groups}: use `maximize`."
            )
        d = feature_map.input_dim
        values = [grid] * d if isinstance(grid, Tensor) else list(grid)
        if len(values) != d or any(v.dim() != 1 or len(v) == 0 for v in values):
            raise BotorchTensorDimensionError(
                f"Expected one `K` tensor or {d} of them as grid, none of them empty."
            )
        self.values = [v.double() for v in values]
        self.num_features = feature_map.num_features
        self._columns: list[NDArray[np.int64]] = []
        self._features: list[_Array] = []
        with torch.no_grad():
            for j, axis in enumerate(self.values):
                columns, parts, start = [], [], 0
                for part, group in zip(feature_map.maps, feature_map.groups, strict=True):
                    assert isinstance(part, FeatureMap)
                    if group == [j]:
                        columns.append(np.arange(start, start + part.num_features))
                        parts.append(part(axis[:, None]).numpy())
                    start += part.num_features
                nothing = np.zeros((len(axis), 0))
                self._columns.append(np.concatenate([np.zeros(0, dtype=np.int64), *columns]))
                self._features.append(np.concatenate([nothing, *parts], axis=1))

    @property
    def dim(self) -> int:
        """The number of inputs."""
        return len(self.values)

    def maximize_ucb(
        self,
        posterior: WeightPosterior,
        *,
        exploration: float,
        generator: Generator,
        start: Tensor | None = None,
        sweeps: int = 2,
    ) -> tuple[Tensor, float]:
        r"""A coordinatewise maximum of the upper confidence bound, if the sweeps suffice.

        Args:
            posterior: The posterior of the map's weights, without batch dimensions.
            exploration: The factor of the standard deviation.
            generator: The stream of the order of coordinates, and of the start if not given.
            start: A `1 x d` point, e.g. the last one; the search starts at the nearest grid point.
            sweeps: The largest number of passes over all coordinates.

        Returns:
            A `1 x d` point and its upper confidence bound.
        """
        if posterior.chol.shape != (self.num_features, self.num_features):
            raise BotorchTensorDimensionError(
                f"Expected a posterior of {self.num_features} weights, got a factor of shape "
                f"{tuple(posterior.chol.shape)}."
            )
        if sweeps < 1:
            raise InputDataError(f"sweeps must be at least 1, got {sweeps}.")
        w, C = _moments(posterior)
        at = self._nearest(start, generator)
        phi = np.zeros(self.num_features)
        for j, i in enumerate(at):
            phi[self._columns[j]] = self._features[j][i]
        moved = C @ phi
        variance = float(phi @ moved)
        for _ in range(sweeps):
            changed = False
            for j in np.argsort(generator.uniform(self.dim).numpy(), kind="stable").tolist():
                columns, features = self._columns[j], self._features[j]
                delta = features - features[at[j]]
                inner = np.einsum("gi,gi->g", delta @ C[np.ix_(columns, columns)], delta)
                variances = variance + 2 * delta @ moved[columns] + inner
                scores = features @ w[columns] + exploration * np.sqrt(variances.clip(_TINY))
                best = int(scores.argmax())
                if best != at[j]:
                    moved = moved + C[:, columns] @ delta[best]
                    variance, at[j], changed = float(variances[best]), best, True
            if not changed:
                break
        total = sum(float(self._features[j][i] @ w[self._columns[j]]) for j, i in enumerate(at))
        point = torch.stack([v[i] for v, i in zip(self.values, at, strict=True)])
        return point[None], total + exploration * math.sqrt(max(variance, _TINY))

    def _nearest(self, start: Tensor | None, generator: Generator) -> list[int]:
        if start is None:
            uniform = generator.uniform(self.dim).tolist()
            return [int(u * len(v)) for u, v in zip(uniform, self.values, strict=True)]
        if start.shape != (1, self.dim):
            raise BotorchTensorDimensionError(
                f"start must be `1 x {self.dim}`, got shape {tuple(start.shape)}."
            )
        return [int((v - x).abs().argmin()) for v, x in zip(self.values, start[0], strict=True)]

    def __repr__(self) -> str:
        return f"AdditiveGrid(dim={self.dim}, num_features={self.num_features})"


@lru_cache(maxsize=1)
def _moments(posterior: WeightPosterior) -> tuple[_Array, _Array]:
    """Mean and covariance of the weights; several searches of one posterior share them."""
    count = posterior.chol.shape[-1]
    with torch.no_grad():
        mean, root = posterior.predict(torch.eye(count, dtype=torch.float64))
        return mean.squeeze(-1).numpy(), (root @ root.mT).numpy()
