r"""The points of the unit cube that can be evaluated: values that exist, and constraints.

::

    blocks          columns of an integer or a choice, of which only some values exist
    inequalities    A x <= b
    equalities      C x == d
    check           any other known condition, tested point by point

`FeasibleSet.nearest` moves points into the set: by the Euclidean projection on the polytope
[Lawson1974]_, with integers and choices chosen by a mixed-integer programme where rounding leaves
it; and along the line to a point of the set where the check fails. `FeasibleSet.uniform` draws from
the set: by rejection, and from thin polytopes by hit and run.

References:
    * [Lawson1974]_ C. L. Lawson, R. J. Hanson. Solving Least Squares Problems. Prentice-Hall 1974,
      chapter 23 (least distance programming).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from numpy.typing import NDArray
from torch import Tensor

from botorch_fed.rng import Generator, generator

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Spread = Callable[[Tensor], Tensor]

TOLERANCE = 1e-9  # of a constraint, in units of how far it varies over the cube
NUM_ANCHORS = 64
MAX_DRAWN = 2**14  # points that are looked at before a set is taken for empty
MAX_COMBINED = 64  # combinations of discrete values that are compared at once
MAX_LISTED = 16  # values of one ordered parameter that are
_BISECTIONS = 20
_NUM_CHAINS = 64
_THINNING = 8
_WALKED = 128  # points of a walk that are looked at together


@dataclass(frozen=True, eq=False)
class Block:
    """The columns of one integer or choice.

    Attributes:
        start: The first column.
        rows: The columns of each value, `K x width`.
        ordered: Whether neighbouring rows are neighbouring values.
    """

    start: int
    rows: Array
    ordered: bool

    @property
    def columns(self) -> slice:
        """Its columns."""
        return slice(self.start, self.start + self.rows.shape[1])

    def index(self, x: Array) -> int:
        """The number of the value at a point."""
        return int(np.abs(self.rows - x[self.columns]).sum(axis=1).argmin())

    def moves(self, index: int) -> list[int]:
        """Other values to try from one on."""
        count = len(self.rows)
        if not self.ordered or count <= MAX_LISTED:
            return [k for k in range(count) if k != index]
        steps = [2**k for k in range(count.bit_length())]
        return [k for s in steps for k in (index - s, index + s) if 0 <= k < count]


@dataclass(frozen=True, eq=False)
class FeasibleSet:
    """The points of the unit cube that can be evaluated.

    Attributes:
        dim: The dimension `d` of the cube.
        legal: From `n x d` points to the nearest whose values exist.
        blocks: Parameters with few values.
        A: Of the inequalities, `m x d`.
        b: Of the inequalities, `m`.
        C: Of the equalities, `k x d`.
        d: Of the equalities, `k`.
        check: Whether `n x d` points whose values exist meet all other conditions; None without
            any.
    """

    dim: int
    legal: Callable[[Tensor], Tensor]
    blocks: tuple[Block, ...]
    A: Array
    b: Array
    C: Array
    d: Array
    check: Callable[[Tensor], list[bool]] | None = None

    @property
    def constrained(self) -> bool:
        """Whether there are constraints."""
        return bool(len(self.A) or len(self.C) or self.check is not None)

    @cached_property
    def continuous(self) -> Flags:
        """Which columns are of no block, `d`."""
        flags = np.ones(self.dim, dtype=bool)
        for block in self.blocks:
            flags[block.columns] = False
        return flags

    @cached_property
    def for_botorch(self) -> dict[str, list[tuple[Tensor, Tensor, float]]]:
        """The linear constraints as arguments of `optimize_acqf`."""

        def listed(rows: Array, bounds: Array, sign: float) -> list[tuple[Tensor, Tensor, float]]:
            return [
                (
                    torch.from_numpy(np.flatnonzero(row)),
                    torch.from_numpy(sign * row[row != 0]),
                    sign * float(bound),
                )
                for row, bound in zip(rows, bounds, strict=True)
            ]

        found = {
            "inequality_constraints": listed(self.A, self.inner, -1.0),
            "equality_constraints": listed(self.C, self.d, 1.0),
        }
        return {name: rows for name, rows in found.items() if rows}

    # -------------------------------------------------------------- membership

    def contains(self, X: Tensor) -> Tensor:
        """Which of `n x d` points meet all constraints, linear ones up to rounding."""
        inside = self._linear(X.double().numpy())
        if self.check is not None and inside.any():
            rows = np.flatnonzero(inside)
            inside[rows] = self.check(X[torch.from_numpy(rows)])
        return torch.from_numpy(inside)

    def _linear(self, X: Array) -> Flags:
        over = X @ self.A.T <= self.b + self._tolerance(self.A)
        on = np.abs(X @ self.C.T - self.d) <= self._tolerance(self.C)
        inside: Flags = np.logical_and(over.all(axis=1), on.all(axis=1))
        return inside

    @staticmethod
    def _tolerance(rows: Array) -> Array:
        tolerance: Array = TOLERANCE * np.abs(rows).sum(axis=1)
        return tolerance

    @cached_property
    def inner(self) -> Array:
        """Bounds that are met with room for rounding."""
        inner: Array = self.b - self._tolerance(self.A)
        return inner

    # -------------------------------------------------------------- the nearest points

    def nearest(self, X: Tensor) -> Tensor:
        """Points of the set near `n x d` points; those of the set stay where they are."""
        points = self.legal(X)
        if not self.constrained:
            return points
        outside = np.flatnonzero(~self._linear(points.numpy()))
        if len(outside):
            moved = [self._repaired(points[row].numpy()) for row in outside]
            points = points.clone()
            points[torch.from_numpy(outside)] = self.legal(torch.from_numpy(np.stack(moved)))
        left = ~self.contains(points)
        if bool(left.any()):
            points[left] = self._towards_anchors(points[left])
        return points

    def _repaired(self, x: Array) -> Array:
        """The nearest point of the polytope; the point itself if none was found."""
        found = self._projected(x)
        if found is None and self._involved:
            chosen = self._chosen(x)
            found = None if chosen is None else self._projected(chosen)
        return x if found is None else found

    def _projected(self, x: Array) -> Array | None:
        """The nearest point of the polytope with the same discrete values; None if there is none.

        With room for rounding if there is room.
        """
        for bounds in (self.inner, self.b):
            found = self._distance_programme(x, bounds, self.continuous)
            if found is not None and self._linear(found[None])[0]:
                return found
        return None

    def _distance_programme(self, x: Array, bounds: Array, free: Flags) -> Array | None:
        """The nearest point within bounds in some columns, by non-negative least squares."""
        from scipy.optimize import nnls  # costs 70 ms to import, and only constraints need it

        z, C = x[free], self.C[:, free]
        if len(C):
            rest = self.d - self.C[:, ~free] @ x[~free]
            z = z + np.linalg.lstsq(C, rest - C @ z, rcond=None)[0]
        basis, eye = self._directions(free), np.eye(len(z))
        G = np.concatenate([-self.A[:, free], eye, -eye])
        h = np.concatenate([
            self.A[:, ~free] @ x[~free] - bounds,
            np.zeros(len(z)),
            -np.ones(len(z)),
        ])  # fmt: skip
        matters = np.abs(G).sum(axis=1) > 0
        G, h = G[matters], h[matters]
        moved = x.copy()
        if not len(G):  # no column is free: SciPy 1.17 ends the process at an empty programme
            return moved
        E = np.vstack([(G @ basis).T, h - G @ z])
        target = np.zeros(len(E))
        target[-1] = 1.0
        try:
            solution, _ = nnls(E, target)
        except RuntimeError:  # too many iterations
            return None
        residual = E @ solution - target
        if abs(residual[-1]) < 1e-12:
            return None
        moved[free] = (z - basis @ residual[:-1] / residual[-1]).clip(0.0, 1.0)
        return moved

    def _directions(self, free: Flags) -> Array:
        """An orthonormal basis of the moves in some columns that keep the equalities."""
        from scipy.linalg import null_space

        key = free.tobytes()
        if key not in self._bases:
            C = self.C[:, free]
            self._bases[key] = null_space(C) if C.any() else np.eye(C.shape[1])
        return self._bases[key]

    @cached_property
    def _bases(self) -> dict[bytes, Array]:
        """What `_directions` has found."""
        return {}

    @cached_property
    def _involved(self) -> tuple[Block, ...]:
        """Blocks that occur in a linear constraint: these have one column."""
        rows = np.concatenate([self.A, self.C])
        return tuple(block for block in self.blocks if rows[:, block.columns].any())

    def _chosen(self, x: Array) -> Array | None:
        """The point with the nearest discrete values for which the polytope is not empty."""
        at = tuple(block.index(x) for block in self._involved)
        if at not in self._nearest_values:
            self._nearest_values[at] = self._values_near(at)
        values = self._nearest_values[at]
        if values is None:
            return None
        chosen = x.copy()
        for block, value in zip(self._involved, values, strict=True):
            chosen[block.start] = value
        return chosen

    @cached_property
    def _nearest_values(self) -> dict[tuple[int, ...], list[float] | None]:
        """What `_values_near` has found."""
        return {}

    def _values_near(self, at: tuple[int, ...]) -> list[float] | None:
        """The values of involved blocks nearest to those of these numbers, by absolute differences.

        A mixed-integer programme over the columns that occur in a constraint.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        used = np.flatnonzero(np.concatenate([self.A, self.C]).any(axis=0))
        place = {int(column): i for i, column in enumerate(used)}
        columns = [place[block.start] for block in self._involved]
        grids = [block.rows[:, 0] for block in self._involved]
        n, k = len(used), len(grids)
        size = n + k + sum(1 if _even(grid) else len(grid) for grid in grids)
        # Columns, then distances, then what numbers the values: an integer, or flags.
        lower, upper, rules = np.zeros(size), np.ones(size), []
        for matrix, low, high in ((self.A, -np.inf, self.b), (self.C, self.d, self.d)):
            if len(matrix):
                rows = np.hstack([matrix[:, used], np.zeros((len(matrix), size - n))])
                rules.append(LinearConstraint(rows, low, high))
        start = n + k
        for i, (column, grid, number) in enumerate(zip(columns, grids, at, strict=True)):
            rows = np.zeros((4, size))
            rows[:2, column], rows[:2, n + i] = (1.0, -1.0), -1.0
            highs, lows = [grid[number], -grid[number], 0.0, 1.0], [-np.inf, -np.inf, 0.0, 1.0]
            rows[2, column] = -1.0
            if _even(grid):
                rows[2, start], upper[start] = grid[1] - grid[0], len(grid) - 1
                rows, lows, highs = rows[:3], lows[:3], highs[:3]
                start += 1
            else:  # of the flags one is set
                rows[2, start : start + len(grid)], rows[3, start : start + len(grid)] = grid, 1.0
                start += len(grid)
            rules.append(LinearConstraint(rows, lows, highs))
        cost, whole = np.zeros(size), np.zeros(size)
        cost[n : n + k], whole[n + k :] = 1.0, 1.0
        found = milp(cost, constraints=rules, bounds=Bounds(lower, upper), integrality=whole)
        if found.x is None:
            return None
        return [
            float(grid[np.abs(grid - found.x[column]).argmin()])
            for column, grid in zip(columns, grids, strict=True)
        ]

    def _towards_anchors(self, X: Tensor) -> Tensor:
        """The last points of the set on the way from one of its points to each of `n x d`."""
        anchors = self.anchors
        start = anchors[torch.cdist(X, anchors).argmin(dim=-1)]
        best = start.clone()
        low, high = torch.zeros(len(X), 1).double(), torch.ones(len(X), 1).double()
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            points = self.legal(start + middle * (X - start))
            good = self.contains(points)
            best[good] = points[good]
            low[good], high[~good] = middle[good], middle[~good]
        return best

    # -------------------------------------------------------------- points of the set

    @cached_property
    def anchors(self) -> Tensor:
        """Some points of the set, the same everywhere.

        Raises:
            InputDataError: None was found.
        """
        stream = generator(0, "feasible set")
        found = self._accepted(NUM_ANCHORS, stream, None, MAX_DRAWN)
        if not len(found) and (len(self.A) or len(self.C)):
            for _ in range(MAX_DRAWN // (8 * _WALKED)):
                walk = [self._repaired(x) for x in self._walk(_WALKED, stream)]
                inside = self.legal(torch.from_numpy(np.stack(walk)))
                found = inside[self.contains(inside)][:NUM_ANCHORS]
                if len(found):
                    break
        if not len(found):
            raise InputDataError(
                f"None of {MAX_DRAWN:,} points of the search space meets all constraints"
                f"{'' if self.check is None else ' and feasible'}: relax them, or narrow the "
                "bounds of the parameters to where they are met."
            )
        return found

    @property
    def polytope_is_empty(self) -> bool:
        """Whether no point meets the linear constraints."""
        middle = self.legal(torch.full((1, self.dim), 0.5, dtype=torch.float64))
        return not self._linear(self._repaired(middle[0].numpy())[None])[0]

    def uniform(self, count: int, stream: Generator, spread: Spread | None = None) -> Tensor:
        """Random points, `count x d`, spread evenly; without constraints of the whole cube.

        Args:
            count: How many.
            stream: Of the points.
            spread: From evenly spread points of the cube to those that are drawn.
        """
        if not self.constrained:
            cube = stream.uniform(count, self.dim)
            return cube if spread is None else spread(cube)
        points = self._accepted(count, stream, spread, 16 * count)
        if len(points) == count:
            return points
        missing = count - len(points)
        if len(self.A) or len(self.C):
            more = torch.from_numpy(self._walk(missing, stream))
        else:
            more = stream.uniform(missing, self.dim)
        return torch.cat([points, self.nearest(more)])

    def met(self, X: Tensor) -> Tensor:
        """Those of `n x d` points that meet the constraints; its anchors if none does."""
        if not self.constrained:
            return X
        inside = X[self.contains(X)]
        return inside if len(inside) else self.anchors

    def filtered(self, X: Tensor) -> Tensor:
        """Those of `n x d` points that lie in the set, with values that exist; in their order."""
        if not self._involved:  # values that exist change nothing about linear constraints
            X = X[torch.from_numpy(self._linear(X.double().numpy()))]
        points = self.legal(X)
        return points[self.contains(points)]

    def _accepted(self, count: int, stream: Generator, spread: Spread | None, most: int) -> Tensor:
        """Up to `count` points by rejection of up to `most` points of the cube."""
        found, drawn = [torch.zeros(0, self.dim).double()], 0
        have, size = 0, max(4 * count, 64)
        while have < count and drawn < most and not len(self.C):
            cube = stream.uniform(size, self.dim)
            found.append(self.filtered(cube if spread is None else spread(cube)))
            have, drawn = have + len(found[-1]), drawn + size
        return torch.cat(found)[:count]

    def _walk(self, count: int, stream: Generator) -> Array:
        """Points of the polytope by hit and run, `count x d`, whatever values exist."""
        basis = self._directions(np.ones(self.dim, dtype=bool))
        chains = min(count, _NUM_CHAINS)
        state = np.repeat(self._centre[None], chains, axis=0)
        rows = np.concatenate([self.A, np.eye(self.dim), -np.eye(self.dim)])
        bounds = np.concatenate([self.inner, np.ones(self.dim), np.zeros(self.dim)])
        kept: list[Array] = []
        rounds = math.ceil(count / chains)
        warm_up = 4 * self.dim + 2 * _THINNING
        for step in range(warm_up + rounds * _THINNING):
            away = stream.normal(chains, basis.shape[1]).numpy() @ basis.T
            speed, room = away @ rows.T, (bounds - state @ rows.T).clip(min=0.0)
            with np.errstate(divide="ignore", invalid="ignore"):
                times = room / speed
            forth = np.where(speed > 1e-14, times, np.inf).min(axis=1)
            back = np.where(speed < -1e-14, times, -np.inf).max(axis=1)
            share = stream.uniform(chains).numpy()
            length = np.where(np.isfinite(forth - back), back + share * (forth - back), 0.0)
            state = state + length[:, None] * away
            if step >= warm_up and (step - warm_up + 1) % _THINNING == 0:
                kept.append(state)
        walk: Array = np.concatenate(kept)[:count].clip(0.0, 1.0)
        return walk

    @cached_property
    def _centre(self) -> Array:
        """A point far inside the polytope, whatever values exist."""
        from scipy.optimize import linprog

        eye = np.eye(self.dim)
        rows = np.concatenate([self.A, eye, -eye])
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        found = linprog(
            np.append(np.zeros(self.dim), -1.0),
            A_ub=np.hstack([rows, norms]),
            b_ub=np.concatenate([self.b, np.ones(self.dim), np.zeros(self.dim)]),
            A_eq=np.hstack([self.C, np.zeros((len(self.C), 1))]) if len(self.C) else None,
            b_eq=self.d if len(self.C) else None,
            bounds=[(None, None)] * self.dim + [(0, None)],
        )
        start = np.full(self.dim, 0.5) if found.x is None else found.x[:-1].clip(0.0, 1.0)
        every = np.ones(self.dim, dtype=bool)
        inside = self._distance_programme(start, self.inner, every)
        return start if inside is None else inside

    # -------------------------------------------------------------- discrete values

    def neighbours(self, x: Tensor) -> Tensor:
        """Points of the set with other discrete values than `d` numbers have, `m x d`.

        All combinations of values if these are few; otherwise one value changes at a time or,
        under constraints, two ordered ones in opposite directions.
        """
        point = x.double().numpy()
        at = [block.index(point) for block in self.blocks]
        moves = self._all_combinations(at)
        if moves is None:
            moves = [
                (*at[:i], k, *at[i + 1 :])
                for i, block in enumerate(self.blocks)
                for k in block.moves(at[i])
            ]
            if self.constrained:
                moves += self._swaps(at)
        rows = np.repeat(point[None], len(moves), axis=0)
        for i, block in enumerate(self.blocks):
            rows[:, block.columns] = block.rows[[move[i] for move in moves]]
        points = torch.from_numpy(rows)
        return self.nearest(points) if self.constrained else points

    def _all_combinations(self, at: list[int]) -> list[tuple[int, ...]] | None:
        if math.prod(len(block.rows) for block in self.blocks) > MAX_COMBINED:
            return None
        every = itertools.product(*(range(len(block.rows)) for block in self.blocks))
        return [move for move in every if move != tuple(at)]

    def _swaps(self, at: list[int]) -> list[tuple[int, ...]]:
        """One ordered value up and another one down."""
        ordered = [i for i, block in enumerate(self.blocks) if block.ordered]
        swaps = []
        for i, j in itertools.permutations(ordered, 2):
            move = list(at)
            move[i], move[j] = at[i] + 1, at[j] - 1
            if move[i] < len(self.blocks[i].rows) and move[j] >= 0:
                swaps.append(tuple(move))
        return swaps[:MAX_COMBINED]


def _even(values: Array) -> bool:
    """Whether values from 0 to 1 are evenly spaced."""
    return bool(np.allclose(values, np.linspace(0.0, 1.0, len(values)), rtol=0, atol=1e-12))
