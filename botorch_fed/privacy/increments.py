r"""Noisy increments without a trusted server, and noisy blocks of rewards of public actions.

::

    mechanism      releases                   of                 half a replacement n       noise
    LocalGaussian  one client's statistics    (a aᵀ, κ y a)      Δ_replace/2 + γ √D / 2     s = z n
    BlockSum       the sum of one block       y                  Y + γ / 2                  s = z n

with :math:`a` features of norm at most one, :math:`y` an outcome less the public centre, clipped to
:math:`\pm Y`, :math:`\Delta_{replace}` the sensitivity of `records` under replacement, `D` numbers
per statistic, and :math:`\gamma \le 2^{-20} s` the step of the lattice that each record is rounded
to by itself. Integers are added, so floating point has no say in a sum. Zero-out has
:math:`\sqrt{1 + \kappa^2 Y^2}` and :math:`Y` in the place of the half distances; `event` says `z`,
and replace-one costs twice the norm, which is the accountant's business.

**A client sends only its increment.** A running sum that goes from client to client with noise on
the last increment alone shows all increments before it: two consecutive ones differ by nothing
else. What is released here is one client's own statistics with all of its noise; the server adds.
The noise of a sum of `t` increments has standard deviation :math:`s\sqrt t`.

**Public actions.** Where the decision set is fixed and public, an action is a function of earlier
releases, its features are known to all, and only outcomes need noise. An action is then played
several times and the sum of its outcomes released once, when the block is complete. Every outcome
is in one block, so the whole run costs as much as one release, however long it is. A block may be
opened with a narrower range than the public one, about what earlier releases predict for its
action: its outcomes are clipped to that range, and its noise shrinks with it.

**Trust.** `LocalGaussian`: nobody but the client itself. `BlockSum`: the holder of the state sees
the outcomes and the running sum of an unfinished block; all others see releases only.

**Guarantee.** For public settings, of two worlds that differ in one record, what is released is
:math:`(\varepsilon, \delta)`-indistinguishable, as the ledger composes it. Zero-out: the record
contributes zero. Replace-one: it is any other admissible one. For `BlockSum` the record is one
outcome and the action is public.

**Proof** (sketch). All that is not finite is refused before it is clipped. *Increment.* A clipped
record's statistic has norm :math:`\sqrt{1 + r}` at most and two of them differ by
:math:`\Delta_{replace}` at most (see `records`); rounding adds :math:`\gamma\sqrt D/2` to each.
An integer plus a rounded Gaussian is post-processing of the Gaussian mechanism (see
`hazmat.noise`), whose multiplier is :math:`s/n = z`. *Block.* Let the worlds differ in an outcome
of block `k`. What is released before block `k` has the same distribution in both, and so have the
action, its block's length and range, and the other outcomes, given it. Block `k` is the Gaussian
mechanism of multiplier `z`, whatever its range: its noise is `z n` for a number that moves by `n`,
or by `2n` if the outcome is replaced, `n` being that of its own range. All that comes later is
chosen by public releases from outcomes that are the same in both worlds: post-processing.
So the whole run is one Gaussian mechanism, which `start` pays for.

**Not covered.** The number of records, of blocks and of outcomes in them, and when they come; the
action; a unit with `k` records in one release or one run, for which the distance is `k` times as
long; a client that adds less noise than it should; settings tuned on the outcomes; a state shown to
anybody, for it holds sums without noise.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from botorch_fed.privacy.accounting import Adjacency, Event, Unit
from botorch_fed.privacy.checks import check_between, check_count, check_path, described, set_number
from botorch_fed.privacy.hazmat.noise import (
    LARGEST,
    NoiseSource,
    Path,
    lattice_gaussian,
    lattice_step,
)
from botorch_fed.privacy.mechanisms import Release
from botorch_fed.privacy.paying import AnyLedger, check_kind, pay
from botorch_fed.privacy.records import OverRecords

_SLACK = 2.0**-30  # of the norm, for its rounding
_HALF_STEP = 2.0**-21  # half a step of the lattice is at most this share of the noise


# ------------------------------------------------------------------ one client's increment


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalGaussian(OverRecords):
    r"""One client's own statistics :math:`\sum (aa^\top, \kappa y a)` with all of their noise.

    Adjacency: replace-one, or zero-out. Unit: record; or agent, which then has at most one record
    in a release. A client pays for each release. Trust, guarantee and proof: see the module.

    Attributes:
        num_features: The dimension `m` of the features.
        outcome_bound: :math:`Y`, half the public range of outcomes.
        noise_multiplier: :math:`z`, noise over one record's norm.
        centre: The public middle of the range of outcomes.
        moment_scale: :math:`\kappa`; by default :math:`\sqrt2/Y`, for which the gram matrix costs
            the moment nothing under replace-one.
        adjacency: "zero-out" or "replace-one", as in `privacy.accounting`.
        unit: Whose data are protected, "agent" or "record".

    Example:
        >>> mechanism = LocalGaussian(num_features=8, outcome_bound=0.5, noise_multiplier=2.0)
        >>> release, ledger = mechanism.release(
        ...     mechanism.records(features, outcomes),
        ...     ledger=Ledger(adjacency="replace-one", unit="record"), noise=OSNoise(), path=(1,),
        ... )
        >>> release.values.shape
        torch.Size([1, 44])
    """

    num_features: int
    outcome_bound: float
    noise_multiplier: float
    centre: float = 0.0
    moment_scale: float = None  # type: ignore[assignment]  # never None once constructed
    adjacency: Adjacency = "replace-one"
    unit: Unit = "record"

    def __post_init__(self) -> None:
        set_number(self, "noise_multiplier")
        for name in ("outcome_bound", "centre", "moment_scale"):
            object.__setattr__(self, name, getattr(self.statistic, name))
        check_kind(self)
        _check_noise_multiplier(self.noise_multiplier, self.dim)

    @property
    def event(self) -> Event:
        """What one increment costs; `Ledger.spend` takes it."""
        return Event(float(self.noise_multiplier))

    @cached_property
    def norm(self) -> float:
        """One record's norm `n` on the lattice, half the distance of worlds for replace-one."""
        distance = self.statistic.norm(self.adjacency) * (1 + _SLACK)
        return distance / (1 - self.noise_multiplier * math.sqrt(self.dim) * _HALF_STEP)

    @property
    def noise_scale(self) -> float:
        """The standard deviation :math:`s` of the noise in each number of an increment."""
        return self.noise_multiplier * self.norm

    def noise_std(self, count: int = 1) -> float:
        r"""The standard deviation :math:`s\sqrt t` of the noise in a sum of `t` increments.

        Args:
            count: How many increments are added.
        """
        check_count("The number of increments", count)
        return self.noise_scale * math.sqrt(count)

    def release(
        self, records: Tensor, *, ledger: AnyLedger, noise: NoiseSource, path: Path
    ) -> tuple[Release, AnyLedger]:
        """Pay, then clip, round, add up and add noise.

        Args:
            records: An `n x (m + 1)` tensor of the client's own `records`, finite; `n` may be 0.
            ledger: The client's; it pays `event` before anything is computed.
            noise: The client's own `OSNoise()`, or a seeded source in tests.
            path: What the increment is for, e.g. ``(t, "increment")``: one path for one release.

        Returns:
            The release, whose `values` are `1 x D`, and the ledger after it.

        Raises:
            BotorchTensorDimensionError: Another shape; nothing was paid.
            InputDataError: Not a number, infinity, or too many records; nothing was paid.
            BudgetExceeded: The ledger does not cover the release; nothing was computed.
        """
        self._check_records(records)
        check_path(path)
        ledger = pay(self, ledger, private=noise.private)
        step = lattice_step(self.noise_scale)
        total = self.statistic.rounded_sum(records, step).double() * step
        values = lattice_gaussian(total, self.noise_scale, noise=noise, path=(*path, "noise"))
        std = torch.tensor([self.noise_scale], dtype=torch.float64)
        return Release(values[None], std, noise.private, repr(self)), ledger

    def _check_records(self, records: Tensor) -> None:
        self.statistic.check(records)
        if self.unit == "agent" and records.shape[0] > 1:
            raise InputDataError(
                f"With unit 'agent' a client has at most one record in a release, got "
                f'{records.shape[0]}: release them one by one, or use unit="record".'
            )
        _check_room("A release", records.shape[0], self.statistic.largest, self.noise_scale)

    def __repr__(self) -> str:
        names = ("num_features", "outcome_bound", "moment_scale", "noise_multiplier")
        return described(self, *names, "adjacency", "unit")


# ------------------------------------------------------------------ blocks of public actions


@dataclass(frozen=True, repr=False)
class BlockState:
    """Where a run of `BlockSum` stands. A secret of its holder: it has a sum without noise.

    Attributes:
        mechanism: Which mechanism it belongs to, by a hash of the settings.
        private: Whether the run has secret noise.
        blocks: How many blocks have been opened.
        length: How many outcomes the open block takes; 0 if none is open.
        count: How many it has.
        total: Their sum in steps of the lattice.
        centre: The middle of the range of the open block.
        outcome_bound: Half of that range; 0 if no block is open.
    """

    mechanism: str
    private: bool
    blocks: int = 0
    length: int = 0
    count: int = 0
    total: int = 0
    centre: float = 0.0
    outcome_bound: float = 0.0

    def __post_init__(self) -> None:
        fits = 0 <= self.count < self.length if self.length else self.count == self.total == 0
        fits &= (self.outcome_bound > 0) == (self.length > 0)
        if not fits or self.blocks < (self.length > 0):
            raise InputDataError(
                "This is no state of a block sum: an open block has a range and fewer outcomes "
                "than its length, and no block has none. Take what `start`, `open` or `add` "
                "returned."
            )

    def __repr__(self) -> str:
        return "BlockState(secret)"


@dataclass(frozen=True)
class BlockRelease:
    r"""The noisy sum of one complete block.

    Attributes:
        index: The number of the block, from 0 on.
        length: How many outcomes it has.
        total: The sum of the clipped, centred outcomes, with noise.
        centre: What was subtracted from each outcome.
        noise_std: The standard deviation :math:`s` of the noise in `total`.
        private: False if the noise came from a seed.
        mechanism: What made it, in words.
    """

    index: int
    length: int
    total: float
    centre: float
    noise_std: float
    private: bool
    mechanism: str

    @property
    def mean(self) -> float:
        """The mean outcome of the action, with noise: the centre plus `total / length`."""
        return self.centre + self.total / self.length

    def mean_var(self, noise_var: float) -> float:
        r"""The variance of `mean` about the action's value, :math:`(b\rho^2 + s^2)/b^2`.

        Args:
            noise_var: The variance :math:`\rho^2` of one outcome.
        """
        if not 0 <= noise_var < math.inf:
            raise InputDataError(f"noise_var must be finite and not negative, got {noise_var}.")
        return (self.length * noise_var + self.noise_std**2) / self.length**2

    def __repr__(self) -> str:
        note = "" if self.private else ", not private: seeded noise"
        return f"BlockRelease({self.index}, {self.length} outcomes of {self.mechanism}{note})"


@dataclass(frozen=True, kw_only=True, repr=False)
class BlockSum:
    r"""Sums of blocks of outcomes, one block for each time a public action is played.

    `start` pays for the whole run, `open` begins a block for an action, `add` takes its outcomes
    and releases their sum when, and only when, it is complete.

    Adjacency: one reward replaced (replace-one) or zeroed (zero-out); actions public. Unit: record;
    agent means the same for agents that give one outcome in the whole run. Trust, guarantee for all
    blocks of the run together, and proof: see the module.

    Attributes:
        outcome_bound: :math:`Y`, half the public range of outcomes.
        noise_multiplier: :math:`z`, noise over :math:`Y`.
        centre: The public middle of the range of outcomes.
        adjacency: "zero-out" or "replace-one", as in `privacy.accounting`.
        unit: Whose data are protected, "agent" or "record".

    Example:
        >>> mechanism = BlockSum(outcome_bound=0.7, centre=0.5, noise_multiplier=2.0)
        >>> ledger = Ledger(adjacency="replace-one", unit="record")
        >>> state, ledger = mechanism.start(ledger=ledger, noise=OSNoise())
        >>> state = mechanism.open(state, 20)
        >>> state, release = mechanism.add(state, outcomes[:12], noise=OSNoise(), path=("run",))
        >>> release is None
        True
        >>> state, release = mechanism.add(state, outcomes[12:], noise=OSNoise(), path=("run",))
        >>> release.length
        20
    """

    outcome_bound: float
    noise_multiplier: float
    centre: float = 0.0
    adjacency: Adjacency = "replace-one"
    unit: Unit = "record"

    def __post_init__(self) -> None:
        for name in ("outcome_bound", "centre", "noise_multiplier"):
            set_number(self, name)
        check_between("A bound on outcomes", self.outcome_bound, 1e-50, 1e50)
        check_kind(self)
        _check_noise_multiplier(self.noise_multiplier, 1)

    @property
    def event(self) -> Event:
        """What the whole run costs; `start` pays it."""
        return Event(float(self.noise_multiplier))

    @cached_property
    def norm(self) -> float:
        """One outcome's norm `n` on the lattice, half the distance of worlds for replace-one."""
        return self.norm_within(self.outcome_bound)

    def norm_within(self, outcome_bound: float) -> float:
        """:math:`n` of a block of half that range."""
        return outcome_bound * (1 + _SLACK) / (1 - self.noise_multiplier * _HALF_STEP)

    @property
    def noise_std(self) -> float:
        """The standard deviation :math:`s` of the noise in the sum of a block."""
        return self.noise_std_within(self.outcome_bound)

    def noise_std_within(self, outcome_bound: float) -> float:
        """:math:`s` of a block of half that range."""
        return self.noise_multiplier * self.norm_within(outcome_bound)

    def length(
        self,
        posterior_std: float,
        observation_noise_std: float,
        *,
        most: int,
        c: float = 1.0,
        outcome_bound: float | None = None,
    ) -> int:
        r"""How often to play an action: :math:`\lceil\max(s/(c\,sd), (\rho/(c\,sd))^2)\rceil`.

        So often that neither the noise of the release nor that of the outcomes hides more than the
        posterior still does not know. It is public if the posterior is.

        Args:
            posterior_std: :math:`sd`, of the action's value given earlier releases.
            observation_noise_std: :math:`\rho`, of one outcome.
            most: The longest block, e.g. a twentieth of the rounds.
            c: Above one: shorter blocks.
            outcome_bound: Half the range of the block; default the public one.

        Returns:
            An int from 1 to `most`.
        """
        check_count("The longest block", most)
        positive = 0 < c < math.inf and 0 <= observation_noise_std < math.inf
        if not positive or not 0 <= posterior_std < math.inf:
            raise InputDataError(
                "Standard deviations must be finite and not negative and c positive, got "
                f"{posterior_std}, {observation_noise_std} and {c}."
            )
        sd = c * posterior_std
        noise_std = self.noise_std_within(self._checked_bound(outcome_bound))
        if sd * most <= noise_std or sd * math.sqrt(most) <= observation_noise_std:
            return most
        plays = max(noise_std / sd, (observation_noise_std / sd) ** 2)
        return max(1, min(most, math.ceil(plays)))

    def start(self, *, ledger: AnyLedger, noise: NoiseSource) -> tuple[BlockState, AnyLedger]:
        """Pay for the whole run.

        Args:
            ledger: Pays `event` before there is a state.
            noise: The source that all blocks will use; only whether it is secret matters here.

        Returns:
            The state without any block, and the ledger after it.

        Raises:
            BudgetExceeded: The ledger does not cover the run.
        """
        ledger = pay(self, ledger, private=noise.private)
        return BlockState(self._fingerprint, noise.private), ledger

    def open(
        self,
        state: BlockState,
        length: int,
        *,
        centre: float | None = None,
        outcome_bound: float | None = None,
    ) -> BlockState:
        """Begin a block for an action.

        Args:
            state: Of the run, without an unfinished block.
            length: How many outcomes the block will have: public, fixed before the first of them.
            centre: The middle of its range, chosen by earlier releases alone; default the public.
            outcome_bound: Half of that range, likewise, at most the public one.
        """
        self._check_state(state)
        check_count("The length of a block", length)
        bound = self._checked_bound(outcome_bound)
        middle = self.centre if centre is None else float(centre)
        if not abs(middle) <= 1e50:
            raise InputDataError(f"The centre of a block must be finite, got {middle}.")
        if state.length:
            raise InputDataError(
                "A block is unfinished, and an unfinished one is never released: add the "
                f"{state.length - state.count} outcomes that it lacks first."
            )
        _check_room("A block", length, bound, self.noise_std_within(bound))
        blocks = state.blocks + 1
        return replace(state, blocks=blocks, length=length, centre=middle, outcome_bound=bound)

    def add(
        self, state: BlockState, outcomes: Tensor, *, noise: NoiseSource, path: Path
    ) -> tuple[BlockState, BlockRelease | None]:
        """Take outcomes of the open block, and release its sum if it is complete.

        Args:
            state: Of the run, with an open block.
            outcomes: An `n` or `n x 1` tensor, neither centred nor clipped, finite.
            noise: `OSNoise()`, or the seeded source of a run in tests.
            path: What the run is for: one path for one run, the block's number is added.

        Returns:
            The state after it, and the release, or None if the block is not complete. Keep the
            state before the release is shown to anybody: added to the old state, the outcomes
            would be released twice.

        Raises:
            BotorchTensorDimensionError: Another shape.
            InputDataError: Not a number, infinity, no open block, or more outcomes than it takes.
        """
        self._check_state(state)
        check_path(path)
        values = self._checked(outcomes, state)
        if noise.private != state.private:
            raise InputDataError(
                "A run has secret noise or seeded noise throughout: it was started with "
                f"private={state.private}, the given source has private={noise.private}."
            )
        noise_std = self.noise_std_within(state.outcome_bound)
        step = lattice_step(noise_std)
        clipped = (values - state.centre).clamp(-state.outcome_bound, state.outcome_bound)
        total = state.total + int((clipped / step).round().to(torch.int64).sum())
        count = state.count + len(values)
        if count < state.length:
            return replace(state, count=count, total=total), None
        block = state.blocks - 1
        exact = torch.tensor([total], dtype=torch.float64) * step
        where = (*path, "block", block)
        noised = lattice_gaussian(exact, noise_std, noise=noise, path=where)
        release = BlockRelease(
            block,
            state.length,
            float(noised),
            state.centre,
            noise_std,
            noise.private,
            repr(self),
        )
        return BlockState(state.mechanism, state.private, state.blocks), release

    def _checked(self, outcomes: Tensor, state: BlockState) -> Tensor:
        if outcomes.dim() != 1 and (outcomes.dim() != 2 or outcomes.shape[1] != 1):
            raise BotorchTensorDimensionError(
                f"Outcomes must be `n` or `n x 1`, got shape {tuple(outcomes.shape)}."
            )
        if not state.length:
            raise InputDataError("No block is open: `open` one for the action that was played.")
        if len(outcomes) > state.length - state.count:
            raise InputDataError(
                f"{len(outcomes)} outcomes are more than the {state.length - state.count} that the "
                "block still takes: its length is fixed before the first of them."
            )
        if not bool(outcomes.isfinite().all()):
            raise InputDataError(
                "Outcomes must be finite, got NaN or infinity: no clipping bounds them."
            )
        return outcomes.detach().cpu().double().flatten()

    def _checked_bound(self, outcome_bound: float | None) -> float:
        bound = self.outcome_bound if outcome_bound is None else float(outcome_bound)
        least = 2.0**-20 * self.outcome_bound
        if not least <= bound <= self.outcome_bound:
            raise InputDataError(
                f"Half the range of a block lies between {least:g} and {self.outcome_bound:g}, of "
                f"the public range, got {bound}."
            )
        return bound

    def _check_state(self, state: BlockState) -> None:
        if state.mechanism != self._fingerprint:
            raise InputDataError(
                "The state belongs to a block sum with other settings: use the mechanism that it "
                "was started with."
            )

    @cached_property
    def _fingerprint(self) -> str:
        numbers = (self.outcome_bound, self.noise_multiplier, self.centre)
        words = ("BlockSum", *(float(x).hex() for x in numbers), self.adjacency, self.unit)
        return hashlib.sha256(" ".join(words).encode()).hexdigest()

    def __repr__(self) -> str:
        change = "replaced" if self.adjacency == "replace-one" else "zeroed"
        return (
            f"BlockSum(outcome_bound={self.outcome_bound:g}, centre={self.centre:g}, "
            f"noise_multiplier={self.noise_multiplier:g}, unit={self.unit!r}; adjacency: one "
            f"reward {change}; actions public)"
        )


# ------------------------------------------------------------------ parts


def _check_room(what: str, count: int, largest: float, std: float) -> None:
    """Raise if so many records could leave the integers that float64 adds exactly."""
    step = lattice_step(std)
    most = int(LARGEST / 2 * step / (largest + step))
    if count > most:
        raise InputDataError(
            f"{what} of {count} records exceeds the lattice, which has room for {most}: release "
            "fewer at once, or use a larger noise multiplier."
        )


def _check_noise_multiplier(value: float, dim: int) -> None:
    check_between("A noise multiplier", value, 1e-6, 1e9)
    if value * math.sqrt(dim) * _HALF_STEP >= 0.25:
        raise InputDataError(
            f"A noise multiplier of {value} in {dim} dimensions leaves no room for the lattice: "
            "z √D must stay below 2^19."
        )
