r"""Running sums over a stream of records, released after every step under one guarantee.

Step `t` brings the records of that step, none or several, and a noisy sum of everything so far
leaves. With `x` the `T' x D` matrix of the steps' statistics (see `privacy.records`) and `A` the
lower triangle of ones, `A = BC` with lower triangular factors, and what leaves is

.. math:: A x + s B Z = B (C x + s Z), \qquad Z \text{ independent } N(0, 1), \quad
          s = z\, n\, \|C\|,

where :math:`\|C\|` is the largest norm of a column and `n` is one unit's norm. The whole stream is
*one* Gaussian mechanism of multiplier `z`, which is what `event` says and what `start` pays. The
noise of prefix `t` has the standard deviation :math:`s\|B_t\|`. Relative to `z n`::

    factorization   ‖C‖²            worst prefix at T' = 64 / 1024   numbers kept
    "sqrt"          Σ_{k<T'} f_k²    2.39 / 3.27                     5 D, for any T'
    "tree"          ⌊log₂T'⌋ + 1     6.48 / 10.5                     (⌊log₂T'⌋ + 1) D

The square root :math:`B = C = A^{1/2}` is a Toeplitz matrix with :math:`f_0 = 1` and
:math:`f_k = f_{k-1}(1 - 1/2k)` [Fichtenberger2023]_. "sqrt", the default, is this matrix for up to
eight steps, and from nine on its buffered form [McMahan2024]_:
:math:`c_0 = 1, c_k = \sum_{j \le 4} \omega_j \theta_j^{k-1}`, with

.. math:: w = z - \sum_j \omega_j S_j, \qquad S_j \leftarrow \theta_j S_j + w, \qquad
          H \leftarrow H + w

for a fresh normal `z` in each step: :math:`w = C^{-1}Z` and :math:`H = BZ`. The numbers are fitted
to the horizon, once, and the worst prefix has 0.012 % more noise than the exact form's at
T' = 1024, 0.13 % at 10^4, 1.5 % at 10^6. "tree" has independent noise in each dyadic node, and
prefix `t` adds up the nodes of its binary digits.

**Trust.** Central: who calls `step` is a privatizer, sees the records, and keeps a `PrefixState`,
which holds the sum and its noise separately: it is as secret as the records. What leaves is the
`PrefixRelease`. For streams without such a party see `privacy.increments`.

**Guarantee.** For public settings, numbers of records in each step, and number of steps: everything
that is released over the whole stream is :math:`(\varepsilon, \delta)`-indistinguishable between
two worlds that differ in one unit. Zero-out: its records count for nothing. Replace-one: they are
any other admissible ones. A unit has at most `participations` records in the stream, one by
default: "a round is a user". Records may depend on all earlier releases.

**Proof** (sketch). All that is not finite is refused; then each record is clipped, and its
statistic rounded to the public lattice of step :math:`\gamma`, by itself; integers are added, so
floating point has no say in the sum. One record moves `x` in the row of its own step, by at most
:math:`\Delta + \gamma\sqrt D/2` (zero-out) or :math:`\Delta + \gamma\sqrt D` (replace-one), and
`Cx` by that times the norm of a column of `C`; `k` records by at most `k` times as much. So
`Cx + sZ` is a Gaussian mechanism of multiplier `z` (accountants double the distance for
replace-one), `B` is public, and :math:`\gamma(k + \mathrm{round}(h/\gamma))`, of the integer sum
`k` and the real noise `h`, is post-processing of it: see `hazmat.noise`. `B` and `C` are lower
triangular and the noise is Gaussian, so the guarantee holds for a stream that is chosen adaptively
[Denisov2022]_: what leaves after step `t` is determined by the first rows of `Cx + sZ`, each of
which is a Gaussian release of records that may depend on the rows before it, and the squared
distances of the rows add up to that of a column. Rounding in norms and recurrences is covered by
:math:`2^{-30}` of the norm.

**Not covered.** A unit with more records than `participations`, which nothing here can notice:
distances grow in proportion. The action that a release leads to is private towards everybody
but the user whose own decision set it was chosen from. How many records a step has, and that a step
took place; the time it takes; settings tuned on the records; a call that raises, for a record that
is not finite can end the stream. A stream that is rewound to an earlier state and continued with
other records draws other noise for the same sums: that is a second stream, and is not paid for.

**As published.** Where this differs from section 5.1 of [Dubey2021]_: its sensitivity is not
squared in the variance, which gives too little noise for rewards beyond 7 to 18, and 5 to 50 times
that of a tight tree for rewards up to one; the statement has a standard deviation where the proof
has a variance; rewards have to be clipped, not bounded with high probability; a datum enters ten
nodes of a tree for 1024 rounds, not eleven, and nodes compose by their squared multipliers;
replacing a record costs :math:`\sqrt2` more than in the lemma; each node has noise of its own, and
a sum adds the nodes of its binary digits, not the path to a leaf; and the square of the reward is
not needed, so it is not released.

References:
    * [Denisov2022]_ S. Denisov, B. McMahan, J. Rush, A. Smith, A. Thakurta. Improved differential
      privacy for SGD via optimal private linear operators on adaptive streams. NeurIPS 2022.
    * [Dubey2021]_ A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
      AISTATS 2021.
    * [Fichtenberger2023]_ H. Fichtenberger, M. Henzinger, J. Upadhyay. Constant matters:
      fine-grained error bound on differentially private continual observation. ICML 2023.
    * [McMahan2024]_ H. B. McMahan, K. Pillutla. An inversion theorem for buffered linear Toeplitz
      (BLT) matrices and applications to streaming differential privacy. 2024.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from numpy.typing import NDArray
from torch import Tensor

from botorch_fed.privacy.accounting import Adjacency, Event, Unit
from botorch_fed.privacy.checks import (
    check_between,
    check_choice,
    check_count,
    described,
    set_number,
)
from botorch_fed.privacy.hazmat.noise import (
    LARGEST,
    NoiseSource,
    Path,
    lattice_step,
    normal,
)
from botorch_fed.privacy.paying import AnyLedger, check_kind, pay
from botorch_fed.privacy.records import OverRecords

_Array = NDArray[np.float64]
_Draw = Callable[[int], Tensor]  # so many rows of fresh standard normals

Factorization = Literal["sqrt", "tree"]

_SLACK = 2.0**-30  # of the norm: its rounding, and that of factors and recurrences
_EXACT = 8  # up to this horizon four buffers save nothing
_LONGEST = 2**30  # steps of one stream


# ------------------------------------------------------------------ what is kept and what leaves


@dataclass(frozen=True, eq=False, repr=False)
class PrefixState:
    """What a privatizer keeps between two steps. It is a secret: sum and noise stand apart in it.

    `wire.codec` writes and reads it; with a seeded source the stream then goes on bit for bit.

    Attributes:
        mechanism: The fingerprint of the mechanism whose state it is.
        t: How many steps were taken.
        records: How many records the sum holds.
        step: The step of the lattice.
        total: The exact sum in its units: a `D` tensor of int64.
        noise: The noise of the sum over its scale: a `D` tensor.
        buffers: What later noise is made of: a `k x D` tensor.
        factor: The fitted numbers of "sqrt", a `2 x 4` tensor; else `2 x 0`.
        private: False if the noise came from a seed.
    """

    mechanism: str
    t: int
    records: int
    step: float
    total: Tensor
    noise: Tensor
    buffers: Tensor
    factor: Tensor
    private: bool

    def __post_init__(self) -> None:
        dim = self.total.shape
        if (
            len(dim) != 1
            or self.total.dtype != torch.int64
            or self.noise.shape != dim
            or self.noise.dtype != torch.float64
            or self.buffers.shape[1:] != dim
            or self.buffers.dtype != torch.float64
            or self.factor.dim() != 2
            or self.factor.shape[0] != 2
            or self.factor.dtype != torch.float64
        ):
            raise BotorchTensorDimensionError(
                "A state needs a `D` tensor of int64 (total), one of float64 (noise), `k x D` "
                "buffers and a `2 x j` factor of float64: take one that a mechanism returned."
            )
        if min(self.t, self.records) < 0:
            raise InputDataError("The counts of a state are not negative: it was tampered with.")

    def __repr__(self) -> str:
        return f"PrefixState(t={self.t}, secret)"


@dataclass(frozen=True, eq=False, repr=False)
class PrefixRelease:
    """A noisy sum that may leave, and public facts about it.

    Attributes:
        t: The sum of how many steps it is.
        values: A `D` tensor; `PrefixSum.gram_and_moment` says what it means.
        noise_std: The standard deviation of the noise in each of its numbers.
        private: False if the noise came from a seed.
        mechanism: What made it, in words.
    """

    t: int
    values: Tensor
    noise_std: float
    private: bool
    mechanism: str

    def __repr__(self) -> str:
        note = "" if self.private else ", not private: seeded noise"
        return f"PrefixRelease(t={self.t}, {len(self.values)} of {self.mechanism}{note})"


# ------------------------------------------------------------------ the mechanism


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PrefixSum(OverRecords):
    r"""All prefix sums of a stream's statistics :math:`(aa^\top, \kappa y a)`, as one mechanism.

    Adjacency: replace-one, or zero-out. Unit: record; "agent" if a unit's records are bounded by
    `participations`. Trust, guarantee and proof: see the module.

    Attributes:
        num_features: The dimension `m` of the features.
        outcome_bound: :math:`Y`, half the public range of outcomes.
        horizon: `T'`, how many sums are released at most. Where round `t` acts on the sum of rounds
            before it, `T - 1` for `T` rounds.
        noise_multiplier: :math:`z` of the whole stream, noise over one unit's norm.
        centre: The public middle of the range of outcomes.
        moment_scale: :math:`\kappa`; by default :math:`\sqrt2/Y`, for which the gram matrix costs
            the moment nothing under replace-one.
        factorization: See the module.
        adjacency: "replace-one" or "zero-out", as in `privacy.accounting`.
        unit: Whose data are protected.
        participations: How many records of one unit are in the stream, at most.

    Example:
        >>> mechanism = PrefixSum(
        ...     num_features=8, outcome_bound=0.5, horizon=1023, noise_multiplier=7.5
        ... )
        >>> state, ledger = mechanism.start(
        ...     ledger=Ledger(adjacency="replace-one", unit="record"), noise=OSNoise()
        ... )
        >>> state, release = mechanism.step(
        ...     state, mechanism.records(features, outcomes), noise=OSNoise(), path=("stream",)
        ... )
        >>> gram, moment = mechanism.gram_and_moment(release.values, noise_var=0.01)
    """

    num_features: int
    outcome_bound: float
    horizon: int
    noise_multiplier: float
    centre: float = 0.0
    moment_scale: float = None  # type: ignore[assignment]  # never None once constructed
    factorization: Factorization = "sqrt"
    adjacency: Adjacency = "replace-one"
    unit: Unit = "record"
    participations: int = 1

    def __post_init__(self) -> None:
        set_number(self, "noise_multiplier")
        for name in ("outcome_bound", "centre", "moment_scale"):
            object.__setattr__(self, name, getattr(self.statistic, name))
        check_count("The horizon", self.horizon, most=_LONGEST)
        check_count("The number of participations", self.participations, most=_LONGEST)
        check_kind(self)
        check_between("A noise multiplier", self.noise_multiplier, 1e-6, 1e9)
        check_choice("The factorization", self.factorization, Factorization)
        if self.norm > 1.5 * self._norm(0.0):
            raise InputDataError(
                f"A noise multiplier of {self.noise_multiplier} in {self.dim} dimensions leaves no "
                "room for the lattice: its rounding would exceed a record. Use a smaller one."
            )
        most = LARGEST / 2 / self._units_per_record(self.lattice)
        if self.horizon > most:
            raise InputDataError(
                f"One record in each of {self.horizon} steps exceeds the lattice: use a noise "
                f"multiplier of at least {self.noise_multiplier * self.horizon / most:.2g}."
            )

    # Its parts.

    @cached_property
    def _factor(self) -> _Factor:
        return _named(self.factorization, self.horizon)

    @property
    def event(self) -> Event:
        """What the whole stream costs; `start` spends it."""
        return Event(float(self.noise_multiplier))

    @cached_property
    def lattice(self) -> float:
        """The step of the lattice to which statistics are rounded, a power of two."""
        return lattice_step(self.noise_multiplier * self._norm(0.0) * self._factor.column_norm)

    @cached_property
    def norm(self) -> float:
        """One unit's norm `n` on the lattice: half the distance of worlds for replace-one."""
        return self._norm(self.lattice)

    def _norm(self, step: float) -> float:
        distance = self.statistic.norm(self.adjacency)
        rounding = step * math.sqrt(self.dim) / 2
        return self.participations * (distance + rounding) * (1 + _SLACK)

    @cached_property
    def noise_scale(self) -> float:
        r""":math:`s = z\, n\, \|C\|`."""
        return self._scale(self._factor, self.lattice)

    def _scale(self, factor: _Factor, step: float) -> float:
        return self.noise_multiplier * self._norm(step) * factor.column_norm

    def noise_std(self, t: int) -> float:
        """The standard deviation of the noise in a number of the sum of the first `t` steps.

        Args:
            t: From 0, where there is no noise, to the horizon.
        """
        check_count("A number of steps", t, least=0)
        self._check_horizon(t)
        return math.sqrt(self.noise_scale**2 * self._factor.row_square(t))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """The factors `B` and `C`, for audits and tests.

        Returns:
            A `T' x N` and an `N x T'` tensor, `N` numbers of noise; their product is `A`.
        """
        return self._factor.decoder(), self._factor.encoder()

    # The stream.

    def start(self, *, ledger: AnyLedger, noise: NoiseSource) -> tuple[PrefixState, AnyLedger]:
        """Pay for the whole stream, however many of its steps are taken.

        Args:
            ledger: Pays `event`.
            noise: `OSNoise()`, or a seeded source in tests: nothing is drawn yet.

        Returns:
            The state before the first step, and the ledger after it.

        Raises:
            BudgetExceeded: The ledger does not cover the stream.
        """
        ledger = pay(self, ledger, private=noise.private)
        zero = torch.zeros(self.dim, dtype=torch.int64)
        state = PrefixState(
            mechanism=self._fingerprint,
            t=0,
            records=0,
            step=self.lattice,
            total=zero,
            noise=zero.double(),
            buffers=self._factor.empty(self.dim),
            factor=self._factor.numbers,
            private=noise.private,
        )
        return state, ledger

    def step(
        self, state: PrefixState, records: Tensor, *, noise: NoiseSource, path: Path
    ) -> tuple[PrefixState, PrefixRelease]:
        """Add the records of one step, and release the sum of all steps.

        Args:
            state: The one that `start` or the last step returned. Use it once, and keep the new one
                safe before the release leaves: after a crash, `release` gives the same again.
            records: An `n x (m + 1)` tensor of `records`, finite; `n` may be 0, and is public.
            noise: `OSNoise()`, or a seeded source in tests; as `start` was told.
            path: What the stream is for, the same in every step; the step is added to it.

        Returns:
            The state after the step, and the sum.

        Raises:
            InputDataError: The horizon is reached, the state is not this mechanism's, or a record
                is not finite.
            BotorchTensorDimensionError: Records of another shape.
        """
        self._check_state(state)
        if noise.private != state.private:
            raise InputDataError(
                f"The stream was started with {_kind(state.private)} noise and is continued with "
                f"{_kind(noise.private)}: use the same in every step."
            )
        self._check_horizon(state.t + 1)
        self.statistic.check(records)
        count = state.records + records.shape[0]
        if count * self._units_per_record(state.step) > LARGEST / 2:
            raise InputDataError(
                f"A sum of {count} records exceeds the lattice: use a larger noise multiplier or "
                "fewer records."
            )
        t = state.t + 1
        buffers, current = self._factor_in(state).advance(
            state.buffers,
            state.noise,
            t,
            lambda rows: normal(noise, rows, self.dim, path=(*path, "step", t)),
        )
        total = state.total + self.statistic.rounded_sum(records, state.step)
        state = replace(state, t=t, records=count, total=total, noise=current, buffers=buffers)
        return state, self.release(state)

    def release(self, state: PrefixState) -> PrefixRelease:
        """The sum that the last step released, again: the same numbers.

        Args:
            state: One of this mechanism's. Before the first step it is a sum of nothing, zero.
        """
        self._check_state(state)
        factor = self._factor_in(state)
        scale = self._scale(factor, state.step)
        rounded = (state.noise * (scale / state.step)).round_().to(torch.int64)
        values = (state.total + rounded).double() * state.step
        std = math.sqrt(scale**2 * factor.row_square(state.t))
        return PrefixRelease(state.t, values, std, state.private, repr(self))

    def _factor_in(self, state: PrefixState) -> _Factor:
        """The factor of a state's stream, with the numbers with which the stream began."""
        if not state.factor.shape[1]:
            return self._factor
        omega, theta = state.factor.tolist()
        return _buffered(self.horizon, tuple(omega), tuple(theta))

    # Checks and words.

    def _units_per_record(self, step: float) -> float:
        return self.statistic.largest / step + 1

    def _check_horizon(self, t: int) -> None:
        if t > self.horizon:
            raise InputDataError(
                f"The stream has a horizon of {self.horizon} steps and its noise is made for them: "
                "choose a longer one in advance."
            )

    def _check_state(self, state: PrefixState) -> None:
        if state.mechanism != self._fingerprint:
            raise InputDataError(
                "The state belongs to a mechanism with other settings: go on with the one that "
                "started the stream, or start a new one."
            )

    @cached_property
    def _fingerprint(self) -> str:
        settings = (
            self.num_features,
            float(self.outcome_bound).hex(),
            float(self.centre).hex(),
            float(self.moment_scale).hex(),
            self.horizon,
            float(self.noise_multiplier).hex(),
            self.factorization,
            self.adjacency,
            self.unit,
            self.participations,
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    @cached_property
    def _words(self) -> str:
        names = ("num_features", "outcome_bound", "horizon", "noise_multiplier", "factorization")
        return described(self, *names, "adjacency", "unit", "participations")

    def __repr__(self) -> str:
        return self._words


# ------------------------------------------------------------------ factorizations


class _Factor(ABC):
    """A pair `B`, `C` with `BC = A`, and how its noise is made step by step."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon

    @property
    @abstractmethod
    def column_norm(self) -> float:
        """The largest norm of a column of `C`."""

    @abstractmethod
    def row_square(self, t: int) -> float:
        """The squared norm of row `t` of `B`, from 1 on; 0 has none."""

    @abstractmethod
    def encoder(self) -> Tensor:
        """`C`, whose rows are in the order in which noise is drawn."""

    @abstractmethod
    def advance(self, buffers: Tensor, noise: Tensor, t: int, draw: _Draw) -> tuple[Tensor, Tensor]:
        """The buffers and the noise :math:`B_t Z` after step `t`; nothing is written to."""

    def empty(self, dim: int) -> Tensor:
        """The buffers before the first step."""
        return torch.zeros(0, dim, dtype=torch.float64)

    @property
    def numbers(self) -> Tensor:
        """What was fitted."""
        return torch.zeros(2, 0, dtype=torch.float64)

    def decoder(self) -> Tensor:
        """`B`, as it comes out of the steps: each number of noise in a coordinate of its own."""
        size = self.encoder().shape[0]
        units = torch.eye(size, dtype=torch.float64)
        used, rows = 0, []

        def draw(count: int) -> Tensor:
            nonlocal used
            used += count
            return units[used - count : used]

        buffers, noise = self.empty(size), torch.zeros(size, dtype=torch.float64)
        for t in range(1, self.horizon + 1):
            buffers, noise = self.advance(buffers, noise, t, draw)
            rows.append(noise)
        return torch.stack(rows)


class _Buffered(_Factor):
    r"""A buffered linear Toeplitz matrix.

    The buffers obey :math:`S_{t+1} = \Theta S_t + 1 w_t` with :math:`w_t = z_t - \omega^\top S_t`.
    With :math:`v = \sqrt\omega`, :math:`C^{-1}` has the impulse response 1, then
    :math:`-v^\top N^{k-1} v` for the symmetric :math:`N = \Theta - vv^\top = Q\Lambda Q^\top`, so
    that :math:`B = AC^{-1}` has

    .. math:: b_k = b_\infty + \sum_j \frac{a_j^2}{1 - \lambda_j} \lambda_j^k, \qquad a = Q^\top v,
              \quad 1/b_\infty = 1 + \sum_j \frac{\omega_j}{1 - \theta_j}:

    sums of powers in both factors, whose norms are geometric series. No term is negative, and no
    digits are lost.
    """

    def __init__(self, horizon: int, omega: _Array, theta: _Array) -> None:
        super().__init__(horizon)
        self.omega, self.theta = torch.from_numpy(omega), torch.from_numpy(theta)
        self._column = _series(omega, theta, horizon - 1)
        self._weights, self._powers = _response(omega, theta)

    @property
    def column_norm(self) -> float:
        return math.sqrt(1 + self._column)

    def row_square(self, t: int) -> float:
        return _series(self._weights, self._powers, t)

    def encoder(self) -> Tensor:
        k = torch.arange(self.horizon - 1, dtype=torch.float64)
        tail = (self.omega * self.theta ** k[:, None]).sum(dim=1)
        return _toeplitz(torch.cat([torch.ones(1, dtype=torch.float64), tail]))

    def empty(self, dim: int) -> Tensor:
        return torch.zeros(len(self.omega), dim, dtype=torch.float64)

    @property
    def numbers(self) -> Tensor:
        return torch.stack([self.omega, self.theta])

    def advance(self, buffers: Tensor, noise: Tensor, t: int, draw: _Draw) -> tuple[Tensor, Tensor]:
        w = draw(1)[0] - self.omega @ buffers
        return (buffers * self.theta[:, None]).add_(w), noise + w


class _Root(_Factor):
    """The square root of `A`: all the noise is kept."""

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        f = np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, horizon)]))
        self._response = torch.from_numpy(f)
        self._squares = np.concatenate([[0.0], np.cumsum(f**2)])

    @property
    def column_norm(self) -> float:
        return math.sqrt(float(self._squares[-1]))

    def row_square(self, t: int) -> float:
        return float(self._squares[t])

    def encoder(self) -> Tensor:
        return _toeplitz(self._response)

    def advance(self, buffers: Tensor, noise: Tensor, t: int, draw: _Draw) -> tuple[Tensor, Tensor]:
        buffers = torch.cat([buffers, draw(1)])
        return buffers, self._response[:t].flip(0) @ buffers


class _Tree(_Factor):
    """A dyadic tree: row `t` of `C` is the node that ends at `t`, of which prefixes are made.

    Buffer `l` holds the noise of the node of length `2^l` in the present prefix.
    """

    @property
    def levels(self) -> int:
        """The most nodes that a datum is in, and that a prefix is made of."""
        return self.horizon.bit_length()

    @property
    def column_norm(self) -> float:
        return math.sqrt(self.levels)

    def row_square(self, t: int) -> float:
        return float(t.bit_count())

    def encoder(self) -> Tensor:
        rows = [_node(t, _level(t), self.horizon) for t in range(1, self.horizon + 1)]
        return torch.stack(rows)

    def empty(self, dim: int) -> Tensor:
        return torch.zeros(self.levels, dim, dtype=torch.float64)

    def advance(self, buffers: Tensor, noise: Tensor, t: int, draw: _Draw) -> tuple[Tensor, Tensor]:
        buffers = buffers.clone()
        buffers[: _level(t)] = 0.0
        buffers[_level(t)] = draw(1)[0]
        return buffers, buffers.sum(dim=0)


def _level(t: int) -> int:
    """The number of trailing zeros of `t`: the largest node that ends there has length 2 to it."""
    return (t & -t).bit_length() - 1


def _node(end: int, level: int, horizon: int) -> Tensor:
    row = torch.zeros(horizon, dtype=torch.float64)
    row[end - 2**level : end] = 1.0
    return row


def _toeplitz(response: Tensor) -> Tensor:
    """The lower triangular matrix with this first column."""
    lag = torch.arange(len(response))[:, None] - torch.arange(len(response))
    return response[lag.clamp(min=0)].tril()


def _series(weights: _Array, powers: _Array, terms: int) -> float:
    r""":math:`\sum_{k < n} (\sum_j g_j q_j^k)^2` as geometric series."""
    q = np.multiply.outer(powers, powers)
    one = q == 1
    sums = np.where(one, float(terms), (1 - q**terms) / np.where(one, 1.0, 1 - q))
    return float(weights @ sums @ weights)


def _response(omega: _Array, theta: _Array) -> tuple[_Array, _Array]:
    r"""Weights and powers of :math:`b_k = \sum_j g_j q_j^k`."""
    v = np.sqrt(omega)
    values, Q = np.linalg.eigh(np.diag(theta) - np.multiply.outer(v, v))
    weights = (Q.T @ v) ** 2 / (1 - values)
    last = 1 / (1 + float(np.sum(omega / (1 - theta))))
    return np.append(weights, last), np.append(values, 1.0)


# Where fits begin: horizon, omega, theta.
_KNOWN = (
    (1023, (0.23049, 0.16009, 0.06900, 0.03717), (0.56266, 0.921786, 0.988893, 0.999229)),
    (9999, (0.30536, 0.12355, 0.03671, 0.01390), (0.727296, 0.974916, 0.997979, 0.999899)),
)


@lru_cache(maxsize=64)
def _fitted(horizon: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    r"""Four buffers with the least :math:`\|C\| \|B_{T'}\|`; the last prefix is the worst.

    The privacy of a stream does not depend on how well they fit.
    """
    from scipy.optimize import minimize  # costs 70 ms to import, and only fits need it

    def packed(omega: tuple[float, ...], theta: tuple[float, ...]) -> _Array:
        return np.concatenate([np.log(omega), np.log(theta) - np.log1p(-np.array(theta))])

    def unpacked(x: _Array) -> tuple[_Array, _Array]:
        omega, odds = np.exp(np.split(x, 2))
        return omega, odds / (1 + odds)

    def excess(x: _Array) -> float:
        omega, theta = unpacked(x)
        column = 1 + _series(omega, theta, horizon - 1)
        return 0.5 * math.log(column * _series(*_response(omega, theta), horizon))

    (short, *first), (long, *second) = _KNOWN
    share = math.log(horizon / short) / math.log(long / short)
    start = (1 - share) * packed(*first) + share * packed(*second)
    options = {"gtol": 1e-5, "maxiter": 100}
    omega, theta = unpacked(minimize(excess, start, method="BFGS", options=options).x)
    order = np.argsort(theta)
    return tuple(omega[order].tolist()), tuple(theta[order].tolist())


@lru_cache(maxsize=64)
def _buffered(horizon: int, omega: tuple[float, ...], theta: tuple[float, ...]) -> _Buffered:
    if not (len(omega) == len(theta) and min(omega) > 0 and 0 < min(theta) <= max(theta) < 1):
        raise InputDataError(
            "The numbers of a buffered factor must be positive, and powers below one: take a state "
            "that a mechanism returned."
        )
    return _Buffered(horizon, np.array(omega), np.array(theta))


@lru_cache(maxsize=64)
def _named(name: str, horizon: int) -> _Factor:
    if name == "tree":
        return _Tree(horizon)
    return _buffered(horizon, *_fitted(horizon)) if horizon > _EXACT else _Root(horizon)


def _kind(private: bool) -> str:
    return "secret" if private else "seeded"
