r"""The first 20 functions of the CEC-2005 benchmark in ten dimensions, one for all agents.

Definitions are those of [Suganthan2005]_, with its rules for points on the bounds applied to the
data. Values are the benchmark's own and **smaller is better**: ``space.outcome.minimize`` is true
and `optimal_values` is the function's bias. Two things that are easily got wrong:

- *F7 has no bounds.* [0, 600] is where it is initialised, and its optimum lies outside. `space`
  and `bounds` are the initialisation box, so no point of the unit cube has the optimal value.
- *F5 has two readings.* The report says that the matrix starts at the second line of its file; the
  official code starts at the eleventh, and only so are the official verification values reproduced.
  Default is the code's reading. Optimum and bias are the same.

F4 and F17 are noisy: with :math:`\nu = 0.4` and :math:`0.2`, a value is :math:`bias + (f - bias)
(1 + \nu |N(0, 1)|)`. Noise never improves a value and vanishes at the optimum. `evaluate` and
`values` are free of it.

.. [Suganthan2005] P. N. Suganthan, N. Hansen, J. J. Liang, K. Deb, Y.-P. Chen, A. Auger, S. Tiwari.
   Problem definitions and evaluation criteria for the CEC 2005 special session on real-parameter
   optimization. Nanyang Technological University and KanGAL report 2005005, 2005.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from torch import Tensor

from benchmarks.problems.data import load_arrays
from botorch_fed.rng import Generator, generator
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.test_functions.base import AgentProblem, FederatedTestProblem, check_points

DIM = 10
FILE = "cec2005_d10.npz"
ORIGIN = "the text files of the CEC 2005 special session on real-parameter optimization, D = 10"
NAMES = (
    "Shifted Sphere",
    "Shifted Schwefel 1.2",
    "Shifted Rotated High Conditioned Elliptic",
    "Shifted Schwefel 1.2 with Noise",
    "Schwefel 2.6 with Optimum on Bounds",
    "Shifted Rosenbrock",
    "Shifted Rotated Griewank without Bounds",
    "Shifted Rotated Ackley with Optimum on Bounds",
    "Shifted Rastrigin",
    "Shifted Rotated Rastrigin",
    "Shifted Rotated Weierstrass",
    "Schwefel 2.13",
    "Expanded Griewank plus Rosenbrock",
    "Shifted Rotated Expanded Scaffer",
    "Hybrid Composition 1",
    "Rotated Hybrid Composition 1",
    "Rotated Hybrid Composition 1 with Noise",
    "Rotated Hybrid Composition 2",
    "Rotated Hybrid Composition 2 with Narrow Basin",
    "Rotated Hybrid Composition 2 with Optimum on Bounds",
)
NOISE = {4: 0.4, 17: 0.2}

# Mean and standard deviation over the box, rounded to the first digit of the latter.
_OUTCOMES = {
    1: (60000.0, 20000.0),
    2: (3e5, 3e5),
    3: (6e9, 5e9),
    4: (3e5, 3e5),
    5: (32000.0, 7000.0),
    6: (9e10, 5e10),
    7: (5000.0, 1000.0),
    8: (-118.3, 0.2),
    9: (-90.0, 50.0),
    10: (100.0, 100.0),
    11: (110.0, 3.0),
    12: (7e5, 3e5),
    13: (4000.0, 5000.0),
    14: (-295.0, 0.1),
    15: (1800.0, 300.0),
    16: (1800.0, 400.0),
    17: (1800.0, 400.0),
    18: (2600.0, 700.0),
    19: (2600.0, 700.0),
    20: (2600.0, 700.0),
}

_Function = Callable[[Tensor], Tensor]


class CEC2005(FederatedTestProblem):
    """One of the functions F1 to F20 in ten dimensions, the same for every agent; to be minimised.

    Args:
        function: Which one, 1 to 20.
        num_agents: Number of agents.
        f5_matrix: How F5's file is read: ``"code"``, as the official code does, or ``"report"``.
        noise: Whether F4 and F17 are observed with their noise.
        seed: Seed of that noise, as `problem[n]` draws it.
        outcome: The public scale of outcomes; default the mean and standard deviation of the
            function over its box, rounded to the latter's first digit.
        data: The folder of `cec2005_d10.npz`; default the one named by ``BOTORCH_FED_DATA``.

    Attributes:
        name: The function's name.
        bias: Its smallest value.
        lower: Lower end of the range of every coordinate (of initialisation, for F7).
        upper: Upper end of it.
        x_opt: Where the smallest value is, `d`, in the function's own units. It lies in the range
            except for F7.
        noise_level: The factor of the noise, 0 for all but F4 and F17.

    Example:
        >>> problem = CEC2005(1, data="data")
        >>> problem[0](torch.full((1, 10), 0.5, dtype=torch.float64))
        tensor([...], dtype=torch.float64)
        >>> problem.values(problem.x_opt)
        tensor(-450., dtype=torch.float64)
    """

    def __init__(
        self,
        function: int,
        num_agents: int = 10,
        *,
        f5_matrix: Literal["code", "report"] = "code",
        noise: bool = True,
        seed: int = 0,
        outcome: Outcome | None = None,
        data: str | Path | None = None,
    ) -> None:
        if isinstance(function, bool) or function not in range(1, 21):
            raise UnsupportedError(f"function must be 1 to 20, got {function!r}.")
        if f5_matrix not in ("code", "report"):
            raise UnsupportedError(f'f5_matrix must be "code" or "report", got {f5_matrix!r}.')
        if num_agents < 1:
            raise InputDataError(f"Expected at least 1 agent, got {num_agents}.")
        if outcome is not None and not outcome.minimize:
            raise UnsupportedError(
                "The functions are to be minimised: pass Outcome(…, minimize=True)."
            )
        arrays = _load(function, f5_matrix, data)
        at = function - 1
        self.function = function
        self.name = NAMES[at]
        self.bias = float(arrays["bias"][at])
        self.lower, self.upper = float(arrays["lower"][at]), float(arrays["upper"][at])
        self.x_opt = arrays["x_opt"][at].clone()
        self.f5_matrix = f5_matrix
        self.noise_level = NOISE.get(function, 0.0) if noise else 0.0
        self.seed = seed
        self.space = SearchSpace(
            tuple(Parameter.real(f"x{i}", self.lower, self.upper) for i in range(DIM)),
            Outcome(*_OUTCOMES[function], minimize=True) if outcome is None else outcome,
        )
        self._num_agents = num_agents
        self._function = _FUNCTIONS[function](arrays)

    def __len__(self) -> int:
        return self._num_agents

    def __repr__(self) -> str:
        settings = f", noise={self.noise_level:g}" if self.noise_level else ""
        settings += f", f5_matrix={self.f5_matrix}" if self.function == 5 else ""
        return f"CEC2005(F{self.function}{settings}, agents={len(self)}, dim={self.dim})"

    def __getitem__(self, agent: int) -> AgentProblem:
        if not 0 <= agent < len(self):
            raise IndexError(f"Agents are 0..{len(self) - 1}, got {agent}.")
        return _NoisyAgent(self, agent)

    @property
    def optimal_values(self) -> Tensor:
        """The smallest value, the bias, once per agent; see the module's note on F7."""
        return torch.full((len(self),), self.bias, dtype=torch.float64)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        """Noise-free values at `n x d` points of the unit cube, an `n` tensor."""
        if not 0 <= agent < len(self):
            raise IndexError(f"Agents are 0..{len(self) - 1}, got {agent}.")
        check_points(X, self.dim)
        return self.values(self.lower + (self.upper - self.lower) * X.double())

    def values(self, points: Tensor) -> Tensor:
        """Noise-free values at `batch_shape x d` points in the function's own units.

        Points may lie outside the range, as F7's optimum does.

        Returns:
            A `batch_shape` tensor.
        """
        if points.dim() < 1 or points.shape[-1] != DIM:
            raise BotorchTensorDimensionError(
                f"Expected `batch_shape x {DIM}` points, got shape {tuple(points.shape)}."
            )
        flat = points.double().reshape(-1, DIM)
        return (self._function(flat) + self.bias).reshape(points.shape[:-1])

    def observe(self, agent: int, X: Tensor, stream: Generator) -> Tensor:
        """Values at `n x d` points of the unit cube as an agent observes them, an `n` tensor.

        Args:
            agent: The agent's index.
            X: The points.
            stream: Where the noise comes from; not read by functions without noise.
        """
        return self._disturbed(self.evaluate(agent, X), stream)

    def _disturbed(self, values: Tensor, stream: Generator) -> Tensor:
        if not self.noise_level:
            return values
        factor = 1 + self.noise_level * stream.normal(*values.shape).abs()
        return self.bias + (values - self.bias) * factor


class _NoisyAgent(AgentProblem):
    """An agent whose noise is the function's own, drawn call after call from one stream."""

    def __init__(self, problem: CEC2005, agent: int) -> None:
        super().__init__(problem, agent)
        self._problem = problem
        self._stream = generator(problem.seed, "noise", agent)

    def forward(self, X: Tensor, noise: bool = True) -> Tensor:
        values = self.evaluate_true(X)
        return self._problem._disturbed(values, self._stream) if noise else values


# ------------------------------------------------------------------ basic functions, `... x d`


def _sphere(Z: Tensor) -> Tensor:
    return Z.square().sum(dim=-1)


def _schwefel(Z: Tensor) -> Tensor:
    return Z.cumsum(dim=-1).square().sum(dim=-1)


def _elliptic(Z: Tensor) -> Tensor:
    factors = 1e6 ** (torch.arange(DIM, dtype=torch.float64) / (DIM - 1))
    return (factors * Z.square()).sum(dim=-1)


def _rosenbrock(Z: Tensor) -> Tensor:
    return _rosenbrock_pair(Z[..., :-1], Z[..., 1:]).sum(dim=-1)


def _griewank(Z: Tensor) -> Tensor:
    roots = torch.arange(1, DIM + 1, dtype=torch.float64).sqrt()
    return Z.square().sum(dim=-1) / 4000 - (Z / roots).cos().prod(dim=-1) + 1


def _ackley(Z: Tensor) -> Tensor:
    distance, waves = Z.square().mean(dim=-1).sqrt(), (2 * math.pi * Z).cos().mean(dim=-1)
    return 20 - 20 * torch.exp(-0.2 * distance) + math.e - torch.exp(waves)


def _rastrigin(Z: Tensor) -> Tensor:
    return (Z.square() - 10 * (2 * math.pi * Z).cos() + 10).sum(dim=-1)


def _weierstrass(Z: Tensor) -> Tensor:
    shifted, zero = Z + 0.5, torch.full((DIM,), 0.5, dtype=torch.float64)
    total = torch.zeros_like(Z)
    for k in range(21):
        omega = 2 * math.pi * 3.0**k
        total += 0.5**k * ((omega * shifted).cos() - (omega * zero).cos())
    return total.sum(dim=-1)


def _griewank_rosenbrock(Z: Tensor) -> Tensor:
    inner = _rosenbrock_pair(Z, Z.roll(-1, dims=-1))
    return (inner.square() / 4000 - inner.cos() + 1).sum(dim=-1)


def _scaffer(Z: Tensor) -> Tensor:
    squares = Z.square() + Z.roll(-1, dims=-1).square()
    ripple = squares.sqrt().sin().square() - 0.5
    return (0.5 + ripple / (1 + 0.001 * squares).square()).sum(dim=-1)


def _rosenbrock_pair(a: Tensor, b: Tensor) -> Tensor:
    return 100 * (a.square() - b).square() + (a - 1).square()


def _rotate(Z: Tensor, M: Tensor) -> Tensor:
    """`Z @ M`, term by term: a matrix product's bits depend on the number of points."""
    total = Z[..., 0, None] * M[..., 0, :]
    for k in range(1, DIM):
        total = total + Z[..., k, None] * M[..., k, :]
    return total


# ------------------------------------------------------------------ the functions, without bias

_Arrays = dict[str, Tensor]


def _shifted(basic: _Function, number: int, offset: float = 0.0) -> Callable[[_Arrays], _Function]:
    """`basic` of the shifted, and where there is a matrix rotated, point plus an offset."""

    def build(arrays: _Arrays) -> _Function:
        o, M = arrays[f"f{number}_o"], arrays.get(f"f{number}_M")
        if M is None:
            return lambda X: basic(X - o + offset)
        return lambda X: basic(_rotate(X - o, M) + offset)

    return build


def _linear(arrays: _Arrays) -> _Function:
    """F5: the largest of ten absolute linear forms."""
    o, A = arrays["f5_o"], arrays["f5_A"] if "f5_A" in arrays else arrays["f5_A_lines11"]
    return lambda X: _rotate(X - o, A.mT).abs().amax(dim=-1)


def _trigonometric(arrays: _Arrays) -> _Function:
    """F12: the distance from ten values of a trigonometric map."""
    A, B, alpha = arrays["f12_A"].mT, arrays["f12_B"].mT, arrays["f12_alpha"]

    def image(X: Tensor) -> Tensor:
        return _rotate(X.sin(), A) + _rotate(X.cos(), B)

    target = image(alpha)
    return lambda X: (target - image(X)).square().sum(dim=-1)


def _composition(
    basics: tuple[_Function, ...],
    spreads: tuple[float, ...],
    stretches: tuple[float, ...],
    centres: str,
    maps: str | None,
) -> Callable[[_Arrays], _Function]:
    """F15 to F20: ten components, two of each of five basic functions, weighted by closeness."""

    def components(Z: Tensor) -> Tensor:
        pairs = [basic(Z[..., 2 * i : 2 * i + 2, :]) for i, basic in enumerate(basics)]
        return torch.cat(pairs, dim=-1)

    def build(arrays: _Arrays) -> _Function:
        o = arrays[centres]
        M = torch.eye(DIM).double().expand(10, -1, -1) if maps is None else arrays[maps]
        sigma = torch.tensor(spreads, dtype=torch.float64)
        stretch = torch.tensor(stretches, dtype=torch.float64).unsqueeze(-1)
        largest = components(_rotate(torch.full((10, DIM), 5.0).double() / stretch, M)).abs()
        levels = 100 * torch.arange(10, dtype=torch.float64)

        def function(X: Tensor) -> Tensor:
            gaps = X.unsqueeze(-2) - o
            logs = -gaps.square().sum(dim=-1) / (2 * DIM * sigma.square())
            top = logs.amax(dim=-1, keepdim=True)
            # Relative to the largest, so that far outside they do not all vanish. All but the
            # largest are damped by 1 - max^10.
            weights = torch.exp(logs - top) * torch.where(logs == top, 1, -torch.expm1(10 * top))
            weights = weights / weights.sum(dim=-1, keepdim=True)
            heights = 2000 * components(_rotate(gaps / stretch, M)) / largest
            return (weights * (heights + levels)).sum(dim=-1)

        return function

    return build


_FIRST = (_rastrigin, _weierstrass, _griewank, _ackley, _sphere)
_FIRST_STRETCHES = (1.0, 1.0, 10.0, 10.0, 5 / 60, 5 / 60, 5 / 32, 5 / 32, 5 / 100, 5 / 100)
_ONES = (1.0,) * 10
_SECOND = (_ackley, _rastrigin, _sphere, _weierstrass, _griewank)
_SECOND_SPREADS = (1.0, 2.0, 1.5, 1.5, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0)
_SECOND_STRETCHES = (10 / 32, 5 / 32, 2.0, 1.0, 10 / 100, 5 / 100, 20.0, 10.0, 10 / 60, 5 / 60)
_NARROW_SPREADS = (0.1, *_SECOND_SPREADS[1:])
_NARROW_STRETCHES = (0.5 / 32, *_SECOND_STRETCHES[1:])

_FUNCTIONS: dict[int, Callable[[_Arrays], _Function]] = {
    1: _shifted(_sphere, 1),
    2: _shifted(_schwefel, 2),
    3: _shifted(_elliptic, 3),
    4: _shifted(_schwefel, 4),
    5: _linear,
    6: _shifted(_rosenbrock, 6, 1.0),
    7: _shifted(_griewank, 7),
    8: _shifted(_ackley, 8),
    9: _shifted(_rastrigin, 9),
    10: _shifted(_rastrigin, 10),
    11: _shifted(_weierstrass, 11),
    12: _trigonometric,
    13: _shifted(_griewank_rosenbrock, 13, 1.0),
    14: _shifted(_scaffer, 14),
    15: _composition(_FIRST, _ONES, _FIRST_STRETCHES, "f15_o", None),
    16: _composition(_FIRST, _ONES, _FIRST_STRETCHES, "f16_o", "f16_M"),
    17: _composition(_FIRST, _ONES, _FIRST_STRETCHES, "f16_o", "f16_M"),
    18: _composition(_SECOND, _SECOND_SPREADS, _SECOND_STRETCHES, "f18_o", "f18_M"),
    19: _composition(_SECOND, _NARROW_SPREADS, _NARROW_STRETCHES, "f18_o", "f18_M"),
    20: _composition(_SECOND, _SECOND_SPREADS, _SECOND_STRETCHES, "f20_o", "f18_M"),
}

_ROTATED = (3, 7, 8, 10, 11, 14)
_OTHERS = {
    12: ("f12_A", "f12_B", "f12_alpha"),
    15: ("f15_o",),
    16: ("f16_o", "f16_M"),
    17: ("f16_o", "f16_M"),
    18: ("f18_o", "f18_M"),
    19: ("f18_o", "f18_M"),
    20: ("f20_o", "f18_M"),
}


def _load(function: int, f5_matrix: str, folder: str | Path | None) -> _Arrays:
    """The arrays of one function as float64 tensors."""
    own: tuple[str, ...] = (f"f{function}_o",)
    if function == 5:
        own = ("f5_o", "f5_A_lines11" if f5_matrix == "code" else "f5_A")
    elif function in _ROTATED:
        own = (f"f{function}_o", f"f{function}_M")
    names = ("bias", "lower", "upper", "x_opt", *_OTHERS.get(function, own))
    arrays = load_arrays(FILE, names, folder=folder, origin=ORIGIN)
    return {name: torch.as_tensor(array, dtype=torch.float64) for name, array in arrays.items()}
