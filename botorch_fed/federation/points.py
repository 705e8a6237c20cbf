"""Initial designs, candidates and data: points of the unit cube that all sites may know.

default_point, first_points   the users' default configuration, and what a site without data asks
dealt_design, spread_design   shares of one low-discrepancy sequence over all sites
check_*                       what a study refuses
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.federation.base import AgentId
from botorch_fed.models import LogWarp
from botorch_fed.models.support import sobol_support
from botorch_fed.rng import generator
from botorch_fed.space import SearchSpace, Value

logger = logging.getLogger(__name__)

MAX_SEQUENCE = 2**12  # points of a sequence that are looked at for those that meet constraints
LOOKS = 32  # at so many times as many points of a sequence, where discrete ones are the same
NUM_POOL = 512  # random points, where these are too few
BLOCK = 4  # neighbours in the sequence that one site is dealt
START_COST = 1 / 9  # about, of first points below the target, over that of one at the target


def default_point(space: SearchSpace, default: Mapping[str, Value] | None) -> Tensor | None:
    """A default configuration as a point of the unit cube, `1 x d`; None without one.

    Args:
        space: The map of inputs.
        default: A value for each parameter, as users know it.
    """
    if default is None:
        return None
    try:
        if space.fidelity is not None:
            return space.at_fidelity(space.shared.to_unit([default]))
        return space.to_unit([default])
    except InputDataError as error:
        raise InputDataError(f"default: {error}") from error


def check_default(default: Tensor | None, dim: int, num_initial: int) -> None:
    """Raise `InputDataError` unless a setup's default is one point of the cube, or None.

    Args:
        default: What a setup has.
        dim: Dimension of the unit cube.
        num_initial: How many points a site without data begins with, the default among them.
    """
    if default is None:
        return
    if default.shape != (1, dim) or default.dtype != torch.float64:
        raise InputDataError(
            f"A default is a float64 tensor of shape (1, {dim}), got {default.dtype} of shape "
            f"{tuple(default.shape)}."
        )
    if not bool(((default >= 0) & (default <= 1)).all()):
        raise InputDataError("A default must lie in the unit cube.")
    if num_initial < 1:
        raise InputDataError(
            "A default is the first of num_initial points: num_initial must be 1 or more."
        )


def check_start(default: Mapping[str, Value] | None, *, transfers: bool, has_design: bool) -> None:
    """Raise `InputDataError` unless the settings of a study leave room for a default.

    Args:
        default: The default configuration of the study.
        transfers: Whether its search is `TransferSearch`.
        has_design: Whether it has an initial design.
    """
    if default is None:
        return
    if has_design:
        raise InputDataError(
            "Give default or initial_design: a design may begin with the default itself."
        )
    if not transfers:
        raise InputDataError(
            "default goes with TransferSearch. For another search give an initial_design: "
            "space.to_unit([default])."
        )


def check_active(active: tuple[str, ...] | None, agents: tuple[str, ...]) -> None:
    """Raise `InputDataError` unless those who query are agents, and there is one.

    Args:
        active: Who queries; None for all.
        agents: The names of all.
    """
    if active is None:
        return
    strangers = sorted(set(active) - set(agents))
    if strangers:
        raise InputDataError(f"Active agents that are no agents: {strangers}.")
    if not active or len(set(active)) < len(active):
        raise InputDataError(f"active names each agent that queries once, got {active}.")


def first_points(
    space: SearchSpace,
    index: int,
    num_sites: int,
    num_points: int,
    *,
    default: Tensor | None,
    seed: int = 0,
    candidates: Tensor | None = None,
) -> Tensor:
    """Where a site without data begins, `num_points x d`: the default, and then what it is dealt.

    Args:
        space: The map of inputs.
        index: The site's number, from 0.
        num_sites: How many sites there are.
        num_points: How many points, the default among them.
        default: The default configuration, `1 x d`, or None.
        seed: Of the sequence, public.
        candidates: The only points that can be evaluated, `K x d`: the nearest are taken.
    """
    if space.fidelity is not None:
        return _first_over_fidelities(
            space, index, num_sites, num_points, default=default, seed=seed, candidates=candidates
        )
    deal = partial(dealt_design, space, index, num_sites, seed=seed)
    if default is None or num_points < 1:
        return deal(num_points, candidates=candidates)
    if candidates is None:
        first, left = space.snap(default), None
    else:
        nearest = torch.cdist(default, candidates.double()).argmin(dim=-1)
        first = candidates[nearest].double()
        left = untried(candidates, first)
    rest = deal(num_points - 1, candidates=left, tried=first)
    return torch.cat([first, rest])


def _first_over_fidelities(
    space: SearchSpace,
    index: int,
    num_sites: int,
    num_points: int,
    *,
    default: Tensor | None,
    seed: int,
    candidates: Tensor | None,
) -> Tensor:
    """As `first_points`: the default at the target, the others at a low fidelity."""
    listed = None
    if candidates is not None:
        listed = torch.unique(space.configurations(candidates.double()), dim=0)
    first = first_points(
        space.shared,
        index,
        num_sites,
        num_points,
        default=None if default is None else space.configurations(default),
        seed=seed,
        candidates=listed,
    )
    low = min(space.levels, key=lambda level: abs(math.log(START_COST / space.cost_at(level))))
    columns = torch.full((len(first),), low, dtype=torch.float64)
    if default is not None:
        columns[:1] = 1.0
    points = space.at_fidelity(first, columns)
    if candidates is None:
        return points
    away = 1e3 * torch.cdist(first, space.configurations(candidates.double()))
    away += (columns.unsqueeze(-1) - space.fidelities(candidates.double())).abs()
    return candidates[away.argmin(dim=-1)].double()


def dealt_design(
    space: SearchSpace,
    index: int,
    num_sites: int,
    num_points: int,
    *,
    seed: int = 0,
    candidates: Tensor | None = None,
    tried: Tensor | None = None,
) -> Tensor:
    """A site's share of one low-discrepancy sequence over the federation, `num_points x d`.

    Each site gets blocks of `BLOCK` neighbours in the sequence: its own points differ in every
    parameter, and together the sites cover more than each alone. Every Nth point would not do: in a
    Sobol sequence such points share the leading binary digits of the first parameters, so that each
    of eight sites would try an eighth of the range of the first one. Points that discrete
    parameters make the same are dealt once, as long as the sequence has others.

    Args:
        space: The map of inputs.
        index: The site's number, from 0.
        num_sites: How many sites there are.
        num_points: How many points each gets.
        seed: Of the sequence, public.
        candidates: The only points that can be evaluated, `K x d`: the nearest are taken.
        tried: Points that the site begins with, `n x d`, which are not dealt again.
    """
    if num_points < 1:
        return torch.zeros(0, space.dim).double()
    if candidates is None:
        return _different_points(space, index, num_sites, num_points, seed=seed, tried=tried)
    sequence = _share(space, index, num_sites, num_points, seed=seed)
    left = candidates.double()
    rows: list[Tensor] = []
    for point in sequence:
        nearest = int(torch.cdist(point.unsqueeze(0), left).argmin())
        rows.append(left[nearest])
        if len(left) > 1:
            left = torch.cat([left[:nearest], left[nearest + 1 :]])
    return torch.stack(rows)


def _share(
    space: SearchSpace,
    index: int,
    num_sites: int,
    num_points: int,
    *,
    seed: int,
    width: float | None = None,
) -> Tensor:
    """A site's points of the sequence, in blocks, `num_points x d`."""
    if num_points < 1:
        return torch.zeros(0, space.dim).double()
    turns = torch.arange(num_points)
    # Sites begin their blocks at different places, so that their first points alone are spread too.
    rows = BLOCK * (num_sites * (turns // BLOCK) + index) + (turns + index) % BLOCK
    count = BLOCK * num_sites * math.ceil(num_points / BLOCK)
    return spread_points(space, count, seed=seed, width=width)[rows]


def _different_points(
    space: SearchSpace,
    index: int,
    num_sites: int,
    num_points: int,
    *,
    seed: int,
    width: float | None = None,
    tried: Tensor | None = None,
) -> Tensor:
    """A site's first points of a sequence that differ, `num_points x d`; the space may have fewer.

    A shorter design is the beginning of a longer one.
    """
    known = () if tried is None else [row.tobytes() for row in (tried + 0.0).numpy()]
    for factor in (1, LOOKS):
        count = factor * num_points
        points = space.snap(_share(space, index, num_sites, count, seed=seed, width=width))
        rows = {row.tobytes(): k for k, row in reversed([*enumerate((points + 0.0).numpy())])}
        fresh = points[sorted(k for row, k in rows.items() if row not in known)]
        if len(fresh) >= num_points:
            return fresh[:num_points]
    return torch.cat([fresh, points])[:num_points]


def spread_points(
    space: SearchSpace, count: int, *, seed: int = 0, width: float | None = None
) -> Tensor:
    """The first points of a low-discrepancy sequence that meet all constraints, `count x d`.

    Where constraints leave too little of the space, random points follow, each as far as possible
    from those before.

    Args:
        space: The map of inputs.
        count: How many points.
        seed: Of the sequence, public.
        width: Of the cube around the centre that the sequence covers; None for all of the space,
            evenly on the scale of models.
    """
    found = space.feasible_set

    def spread(sequence: Tensor) -> Tensor:
        if width is not None:
            return 0.5 + width * (sequence - 0.5)
        return LogWarp(space.log_offsets).untransform(sequence)

    sequence = spread(sobol_support(space.dim, count, seed=seed))
    if not found.constrained:
        return sequence
    drawn, points = count, sequence[:0]
    if not len(found.C):  # no point of a sequence meets an equality
        points = found.filtered(sequence)
    while len(points) < count and drawn < MAX_SEQUENCE and not len(found.C):
        drawn = min(4 * drawn, MAX_SEQUENCE)
        points = found.filtered(spread(sobol_support(space.dim, drawn, seed=seed)))
    if len(points) < count:
        pool = _pool(space, seed, max(NUM_POOL, 2 ** math.ceil(math.log2(count))))
        points = _far_apart(points, pool, count)
    return points[:count]


@lru_cache(maxsize=8)
def _pool(space: SearchSpace, seed: int, count: int) -> Tensor:
    """Random points that meet all constraints, the same at every site."""
    return space.feasible_set.uniform(count, generator(seed, "spread points"))


def _far_apart(points: Tensor, pool: Tensor, count: int) -> Tensor:
    """Points, and others of a pool: each in turn the farthest from all before, `count x d`."""
    if not len(points):
        points, pool = pool[:1], pool[1:]
    distance = torch.cdist(pool, points).amin(dim=-1)
    rows = [points]
    for _ in range(count - len(points)):
        farthest = pool[int(distance.argmax())].unsqueeze(0)
        rows.append(farthest)
        distance = torch.minimum(distance, torch.cdist(pool, farthest).squeeze(-1))
    return torch.cat(rows)


def spread_design(
    space: SearchSpace,
    names: Sequence[AgentId],
    num_points: int,
    *,
    width: float = 0.5,
    seed: int = 0,
    candidates: Tensor | None = None,
) -> dict[AgentId, Tensor]:
    """Public initial designs: every agent begins in the centre, then they go different ways.

    They share one low-discrepancy sequence, in blocks as in `dealt_design`, so that together they
    cover more than each alone, and their first messages say more.

    Args:
        space: The map of inputs and outcomes.
        names: All agents, in an order that all know.
        num_points: How many points each evaluates, the centre included.
        width: Of the cube around the centre that the sequence covers; 1 is all of the space.
            Bounds are mostly chosen around a guess, and corners are seldom good.
        seed: Of the sequence, public.
        candidates: The only points that can be evaluated, `K x d`: the nearest are taken.

    Returns:
        `num_points x d` points by name.
    """
    if num_points < 1 or not 0 < width <= 1:
        raise InputDataError(
            "A design has at least one point, the centre, and a width in (0, 1], got "
            f"{num_points} points and width {width}."
        )
    if space.fidelity is not None:  # at the target
        listed = None if candidates is None else space.configurations(candidates)
        designs = spread_design(
            space.shared, names, num_points, width=width, seed=seed, candidates=listed
        )
        return {name: space.at_fidelity(points) for name, points in designs.items()}
    centre = torch.full((1, space.dim), 0.5, dtype=torch.float64)
    if candidates is None:
        centre = space.snap(centre)
    count, few = len(names), num_points - 1
    made = {}
    for n, name in enumerate(names):
        if candidates is None:
            rest = _different_points(space, n, count, few, seed=seed, width=width, tried=centre)
            made[name] = torch.cat([centre, rest])
        else:
            design = torch.cat([centre, _share(space, n, count, few, seed=seed, width=width)])
            made[name] = candidates[torch.cdist(design, candidates.double()).argmin(dim=-1)]
    return made


def check_designs(design: Tensor | Mapping[AgentId, Tensor] | None, names: Sequence[str]) -> None:
    """Raise `InputDataError` unless designs by name are as long as each other, one per agent."""
    if not isinstance(design, Mapping):
        return
    if set(design) != set(names):
        wrong = sorted(set(design) ^ set(names))
        raise InputDataError(
            f"initial_design by name has one design for each agent; it differs in {wrong[:8]}."
        )
    if len({len(points) for points in design.values()}) > 1:
        raise InputDataError("All agents need initial designs of the same length.")


def design_of(design: Tensor | Mapping[AgentId, Tensor] | None, name: AgentId) -> Tensor | None:
    """An agent's own initial design."""
    return design[name] if isinstance(design, Mapping) else design


def untried(candidates: Tensor, tried: Tensor) -> Tensor:
    """The candidates `K x d` that are not among `n x d` points; all of them if none is left."""
    known = {row.tobytes() for row in (tried.double() + 0.0).numpy()}
    rows = (candidates.double() + 0.0).numpy()
    fresh = torch.tensor([row.tobytes() not in known for row in rows])
    return candidates[fresh] if bool(fresh.any()) else candidates


def check_points(X: Tensor, dim: int, what: str) -> None:
    """Raise `InputDataError` unless `X` holds `n x dim` points of the unit cube."""
    if X.dim() != 2 or X.shape[-1] != dim:
        raise InputDataError(f"{what} must be `n x {dim}` points, got shape {tuple(X.shape)}.")
    if not bool(((X >= 0) & (X <= 1)).all()):
        raise InputDataError(f"{what} must lie in the unit cube: map points by `space.to_unit`.")


def check_public_points(candidates: Tensor | None, design: Tensor | None, dim: int) -> None:
    """Raise `InputDataError` unless both are points of the cube, the design among candidates."""
    for points, what in ((candidates, "candidates"), (design, "initial_design")):
        if points is not None:
            check_points(points, dim, what)
            if not len(points):
                raise InputDataError(f"{what} must not be empty: leave it out.")
    if candidates is None or design is None:
        return
    known = {row.tobytes() for row in (candidates.double() + 0.0).numpy()}
    if not all(row.tobytes() in known for row in (design.double() + 0.0).numpy()):
        raise InputDataError(
            "initial_design has points that are no candidates: only those can be evaluated."
        )


def allowed_candidates(space: SearchSpace, candidates: Tensor) -> Tensor:
    """The candidates `K x d` that meet all constraints; `InputDataError` if none does."""
    if not space.feasible_set.constrained:
        return candidates
    allowed = candidates[space.feasible_set.contains(candidates.double())]
    if not len(allowed):
        raise InputDataError(
            f"None of {len(candidates)} candidates meets the constraints of the search space: give "
            "others, or relax the constraints."
        )
    return allowed


def warn_infeasible(space: SearchSpace, X: Tensor, what: str) -> None:
    """Note that results of points outside of the constraints are used as data.

    They say something about the function; no search proposes such points, and none is a best one.

    Args:
        space: The map of inputs.
        X: The points, `n x d`.
        what: Whose they are.
    """
    if not space.feasible_set.constrained:
        return
    points = space.from_unit(X)
    broken = [words for words in map(space.violated, points) if words is not None]
    if broken:
        logger.warning(
            "%d of %d points in %s violate constraints of the search space (%s): they are used as "
            "data, and no best point",
            len(broken),
            len(points),
            what,
            ", ".join(sorted(set(broken))),
        )


def check_data(data: tuple[Tensor, Tensor], space: SearchSpace) -> None:
    """Raise `InputDataError` unless data are `n x d` points of the cube and `n x m` outcomes."""
    (X, Y), m = data, len(space.metrics)
    check_points(X, space.dim, "data")
    if Y.shape != (len(X), m) or not bool(torch.isfinite(Y).all()):
        names = f", a column for each of {list(space.by_name(range(m)))}" if m > 1 else ""
        raise InputDataError(
            f"Outcomes must be a finite `{len(X)} x {m}` tensor{names}, got shape {tuple(Y.shape)}."
        )


def public_data(space: SearchSpace, data: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Points `n x d` and outcomes `n x m` on the public scale; empty without data."""
    if data is None:
        return torch.zeros(0, space.dim).double(), torch.zeros(0, len(space.metrics)).double()
    return data[0].double(), space.to_public(data[1])


def answered(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Points and outcomes of the evaluations that succeeded, and points of those that failed.

    Args:
        X: Points, `q x d`.
        Y: Outcomes, `q x m`, NaN where an evaluation failed.
    """
    good = ~Y.isnan().any(dim=-1)
    return X[good], Y[good], X[~good]


def tensor_hash(tensor: Tensor | None) -> str:
    """SHA-256 of a tensor's values; empty for None."""
    if tensor is None:
        return ""
    return hashlib.sha256(tensor.double().contiguous().numpy().tobytes()).hexdigest()
