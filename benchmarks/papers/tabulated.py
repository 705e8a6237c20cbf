"""A federated problem evaluated once on a public discrete domain, so that runs only look it up.

The domain is the first 1,024 unscrambled Sobol points, the all-zero one included (it is a corner),
and for d <= 3 the remaining corners of the unit cube. A warped domain has the same Sobol points
once more, on the logarithmic scale of parameters that act by their ratio. The papers' theory
assumes a discrete domain too, and on one simple regret is exact: the best value of every agent is
known.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor

from botorch_fed.models import LogWarp
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.test_functions.base import FederatedTestProblem, check_points

VARIABLE = "BOTORCH_FED_CACHE"
NUM_SOBOL = 1024
MAX_CORNER_DIM = 3


class Tabulated(FederatedTestProblem):
    """A federated problem known by a table; points off its domain are refused.

    Args:
        space: The public search space.
        points: The domain, `K x d` different points of the unit cube.
        values: The agents' values on it, `N x K`.

    Attributes:
        points: As given, float64.
        values: As given, float64.

    Example:
        >>> problem = tabulate(Landmine(data="data"), "landmine")
        >>> problem.values.shape
        torch.Size([29, 1027])
    """

    def __init__(self, space: SearchSpace, points: Tensor, values: Tensor) -> None:
        points = points.double() + 0.0  # -0.0 becomes 0.0: rows are compared as bytes
        check_points(points, space.dim)
        if values.dim() != 2 or values.shape[-1] != len(points):
            raise InputDataError(
                f"values must be `N x {len(points)}` to go with the points, got shape "
                f"{tuple(values.shape)}."
            )
        self._rows = {row.tobytes(): k for k, row in enumerate(points.numpy())}
        if len(self._rows) < len(points):
            raise InputDataError(
                f"{len(points) - len(self._rows)} of {len(points)} points are there twice."
            )
        self.space = space
        self.points = points
        self.values = values.double()

    def __len__(self) -> int:
        return len(self.values)

    @property
    def optimal_values(self) -> Tensor:
        return self.values.max(dim=-1).values

    def index(self, X: Tensor) -> Tensor:
        """The rows of the domain that `n x d` points are, an `n` tensor of integers."""
        check_points(X, self.dim)
        found = [self._rows.get(row.tobytes(), -1) for row in (X.double() + 0.0).numpy()]
        if -1 in found:
            raise InputDataError(
                f"{found.count(-1)} of {len(X)} points are not in the domain, the first is "
                f"{X[found.index(-1)].tolist()}: choose among `points`."
            )
        return torch.tensor(found, dtype=torch.long)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        return self.values[agent, self.index(X)]


def made_up(num_agents: int = 3) -> Tabulated:
    """Agents that prefer neighbouring places: what is tried without any data."""
    space = SearchSpace(
        (Parameter.real("rate", 1e-3, 1.0), Parameter.real("share", 0.0, 1.0)), Outcome(0.5, 0.3)
    )
    points = domain(space)
    places = torch.linspace(0.4, 0.6, num_agents, dtype=torch.float64)
    values = [1 - (points - place).square().sum(dim=-1) for place in places]
    return Tabulated(space, points, torch.stack(values))


def domain(space: SearchSpace, *, warped: bool = False) -> Tensor:
    """The public discrete domain of a space, `K x d`: Sobol points, then corners, none twice.

    Args:
        space: The search space.
        warped: Whether the Sobol points follow once more on the scale of `space.log_offsets`.
    """
    d = space.dim
    X = torch.quasirandom.SobolEngine(d, scramble=False).draw(NUM_SOBOL, dtype=torch.float64)
    if d <= MAX_CORNER_DIM:
        corners = torch.tensor(list(itertools.product((0.0, 1.0), repeat=d)), dtype=torch.float64)
        X = torch.cat([X, corners])
    if warped:
        X = torch.cat([X, LogWarp(space.log_offsets).untransform(X[:NUM_SOBOL])])
    if any(parameter.kind != "real" for parameter in space.parameters):
        X = space.snap(X)
    first = {row.tobytes(): k for k, row in reversed(list(enumerate((X + 0.0).numpy())))}
    return X[sorted(first.values())]


def tabulate(
    problem: FederatedTestProblem,
    name: str,
    folder: str | Path | None = None,
    *,
    warped: bool = False,
    progress: bool = True,
) -> Tabulated:
    """Evaluate every agent on the domain, or read what an earlier call has written.

    Every agent has one file, written when it is complete, so an interrupted call resumes there.
    Observation noise is not tabulated; a random objective gives one draw per point.

    Args:
        problem: The problem; its noise-free values are tabulated.
        name: The folder's name within the cache, one per problem and setting.
        folder: The cache; default the one named by ``BOTORCH_FED_CACHE``, else
            ``benchmarks/.cache``.
        warped: See `domain`.
        progress: Whether to show a progress bar.
    """
    place = (Path(folder) if folder is not None else default_cache()) / name
    place.mkdir(parents=True, exist_ok=True)
    points = domain(problem.space, warped=warped)
    file = place / "points.npy"
    if not file.is_file():
        _write(file, points.numpy())
    elif not np.array_equal(np.load(file, allow_pickle=False), points.numpy()):
        raise InputDataError(f"{file} holds another domain: remove the folder or choose a name.")
    rows = []
    for agent in track(range(len(problem)), description=name, disable=not progress):
        file = place / f"agent{agent:03d}.npy"
        if not file.is_file():
            _write(file, problem.evaluate(agent, points).numpy())
        rows.append(np.load(file, allow_pickle=False))
    return Tabulated(problem.space, points, torch.from_numpy(np.stack(rows)))


def default_cache() -> Path:
    """The folder named by ``BOTORCH_FED_CACHE``, else ``.cache`` beside the benchmarks."""
    place = os.environ.get(VARIABLE)
    return Path(place) if place else Path(__file__).resolve().parents[1] / ".cache"


def _write(file: Path, array: NDArray[np.float64]) -> None:
    """Write an array so that the file is either complete or absent."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    with part.open("wb") as stream:
        np.save(stream, array)
    part.replace(file)
