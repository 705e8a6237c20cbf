"""Improve points within the linear constraints of a set, by SLSQP."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from botorch_fed.feasible_set import Array, FeasibleSet, Flags

Graded = Callable[[Array], tuple[Array, Array]]  # `m x d` points to `m` values, `m x d` gradients


def ascend_within(
    function: Graded,
    starts: Array,
    feasible: FeasibleSet,
    *,
    free: Flags | None = None,
    max_iterations: int = 40,
) -> Array:
    """Better points within the linear constraints, `m x d`, one from each start.

    Discrete values and checks are not looked at: `FeasibleSet.nearest` of the points meets them.

    Args:
        function: Values and gradients at points of the unit cube.
        starts: Points that meet the constraints, `m x d`.
        feasible: The set.
        free: Which columns may change, `d`; default all.
        max_iterations: Of each start.
    """
    from scipy.optimize import minimize  # costs 70 ms to import, and only searches need it

    free = np.ones(feasible.dim, dtype=bool) if free is None else free
    scale = max(float(np.abs(function(starts)[0]).max()), 1.0)
    ends = starts.copy()
    for end in ends:
        point = end.copy()

        def loss(x: Array, point: Array = point) -> tuple[float, Array]:
            point[free] = x
            value, gradient = function(point[None])
            return -float(value[0]) / scale, -gradient[0, free] / scale

        rules = []
        for kind, rows, bounds in (
            ("ineq", -feasible.A, -feasible.inner),
            ("eq", feasible.C, feasible.d),
        ):
            used = rows[:, free].any(axis=1)
            left, rest = rows[used][:, free], rows[used][:, ~free] @ end[~free] - bounds[used]
            if len(left):
                rules.append({
                    "type": kind,
                    "fun": lambda x, left=left, rest=rest: left @ x + rest,
                    "jac": lambda x, left=left: left,
                })  # fmt: skip
        fit = minimize(
            loss,
            end[free],
            jac=True,
            method="SLSQP",
            bounds=[(0.0, 1.0)] * int(free.sum()),
            constraints=rules,
            options={"maxiter": max_iterations},
        )
        if np.isfinite(fit.x).all() and np.isfinite(fit.fun) and fit.fun <= loss(end[free])[0]:
            end[free] = fit.x.clip(0.0, 1.0)
    return ends
