r"""Noise that the agents add themselves, so that even the one who opens a sum sees a private one.

Each of `num_agents` agents (:math:`M`) bounds and rounds its contribution to integers
:math:`k_i` on a public grid of step :math:`\gamma`, and adds a draw from the discrete Gaussian
:math:`N_{\mathbb Z}(0, (s/\gamma)^2 / (M - c - d))` to each number. What is opened is

.. math:: \gamma \sum_i (k_i + \eta_i), \qquad \text{noise of standard deviation at least } s

even if `c` agents subtract their own shares of noise and `d` never send theirs. Everybody else pays
for it with noise that is :math:`\sqrt{M/(M - c - d)}` times what a trusted server would add.

::

    mechanism               unit     one unit's norm n                     s
    DistributedGaussianSum  agent    C + γ √D / 2                          z n
    DistributedRecordSum    record   √(1 + r) + γ √D / 2     zero-out      z n
                                     (Δ_replace + γ √D) / 2  replace-one   z n

with `D` numbers per contribution, :math:`r = \kappa^2 Y^2` and :math:`\Delta_{replace} = \sqrt2 (1
+ r/2)` for :math:`r \le 2`, :math:`2\sqrt r` beyond. `event` says `z` and that the noise is
discrete; replace-one costs twice the distance, which is the accountant's business.

**Trust.** Agents bound their contributions and add their noise as written, up to the `c + d` who
do not; they are otherwise honest but curious, and so is the server. The server is trusted with what
the channel shows it: with a threshold key the sums alone, with one key of all agents the sums as
long as no agent helps it, without encryption every contribution *with its own share of noise only*.
A server that has a single contribution opened in place of the sum is not honest, and nothing here
notices: agents that can not see what was added rely on it.

**Guarantee.** For public settings, rosters and number of releases: everything that the server and
any coalition of at most `c` other agents see of the sums is
:math:`(\varepsilon, \delta)`-indistinguishable between two worlds that differ in one unit.
Zero-out: it contributes zero. Replace-one: it is any other admissible one. How many records an
agent has is public. An agent that learns a sum can subtract its own noise: `c` is at least 1 where
agents learn sums, which is the default, and 0 protects from the server and from outsiders only.

**Proof** (sketch). *Agent.* All that is not finite is refused; then one common factor brings the
vector into the ball of radius `C`, whatever was handed in. Rounding moves each number by at most
:math:`\gamma/2`, so :math:`\gamma\|k_i\| \le C + \gamma\sqrt D/2 = n`: the sum moves by `n` if
:math:`k_i` becomes zero and by :math:`2n` if it is replaced. *Record.* Each record is clipped, and
its statistic :math:`(\mathrm{svec}\,aa^\top, \kappa y a)` rounded, by itself; integers are added,
so floating point has no say in the sum. The statistic's norm is :math:`\sqrt{\|a\|^4 + \kappa^2 y^2
\|a\|^2} \le \sqrt{1 + r}`; two of them differ by :math:`\Delta_{replace}` at most, and rounding
adds :math:`\gamma\sqrt D/2` to each. *Noise.* Of the honest agents' draws at least
:math:`M - c - d` reach the sum; more are post-processing. On integers, a discrete Gaussian has
the Rényi divergences of the continuous one as upper bounds [Canonne2020]_, and the sum of :math:`m`
independent ones has those for a distance in standard deviations that is larger by
:math:`\tau\sqrt D`, :math:`\tau = 10\sum_{k<m} e^{-2\pi^2\sigma^2 k/(k+1)}` [Kairouz2021]_. With
:math:`\sigma \ge 8` steps for each agent, which is required, :math:`\tau < 10^{-272} m`; that and
the rounding of norms are covered by :math:`2^{-30}` of the norm. Noise never exceeds
`discrete_gaussian_reach`, for which the grid leaves room, so nothing is refused because of it; the
sampler adds at most :math:`2^{-90}(1 + e^\varepsilon)` to :math:`\delta` for each number drawn.
Later contributions may depend on earlier sums: the composition is adaptive.

**Not covered.** The sum itself is released: whoever learns it learns what a private sum tells,
and *without* noise sums over changing rosters can be differenced: two consecutive ones isolate
whoever came, left or observed. A round that is done again needs fresh noise and is paid again,
because both sums may be known. Also not covered: that an agent takes part; how many records it has;
the time that drawing takes; settings tuned on the agents' data; agents that add less noise than
they should, beyond `c + d`.

**Tempering.** For a summary of PITC, `v = Summary.pack()`, the common factor `f` of gram and moment
is the summary of the same data with every noise block divided by `f`: the posterior stays that of a
likelihood. Clipping gram and moment apart would bias its mean.

References:
    * [Canonne2020]_ C. Canonne, G. Kamath, T. Steinke. The discrete Gaussian for differential
      privacy. NeurIPS 2020 (Proposition 5).
    * [Kairouz2021]_ P. Kairouz, Z. Liu, T. Steinke. The distributed discrete Gaussian mechanism for
      federated learning with secure aggregation. ICML 2021 (Proposition 14).
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from botorch_fed.privacy.accounting import (
    Adjacency,
    Budget,
    Event,
    Unit,
    noise_multiplier_for,
)
from botorch_fed.privacy.checks import check_between, check_count, described
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat.noise import (
    NoiseSource,
    Path,
    discrete_gaussian,
    discrete_gaussian_reach,
)
from botorch_fed.privacy.mechanisms import SignalWarning, clip
from botorch_fed.privacy.paying import check_kind
from botorch_fed.privacy.records import OverRecords

LEAST_STD = 8.0  # grid units of one agent's noise: from here on sums are as good as one Gaussian
_REACH = 14.0  # standard deviations that no draw exceeds from 8 grid units on
_PRECISION = 2.0**-36  # of a grid of its own
_SLACK = 2.0**-30  # of the norm, for its rounding and for sums of discrete Gaussians


def noise_multiplier_within(
    budget: Budget, *, num_releases: int, adjacency: Adjacency = "zero-out"
) -> float:
    """The smallest noise multiplier with which so many sums with discrete noise stay in a budget.

    Fix the number of releases in advance. A ledger with this budget refuses the next one, up to a
    thousandth of slack in the noise.

    Args:
        budget: What may be spent.
        num_releases: How many sums are opened.
        adjacency: What a neighbouring world is.
    """
    return noise_multiplier_for(
        epsilon=budget.epsilon,
        delta=budget.delta,
        sampling_rate=1.0,
        num_releases=num_releases,
        accountant="dp-accounting-rdp",
        adjacency=adjacency,
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class DistributedMechanism(ABC):
    r"""What the mechanisms of this module share; see there for trust, guarantee and proof.

    Attributes:
        num_agents: The number `M` of agents on the public roster.
        noise_multiplier: :math:`z`, noise in the sum over one unit's norm.
        colluding: How many agents may put their shares of noise together, with the server's help; a
            single curious one counts.
        dropping: How many agents may be missing from a sum.
        adjacency: "zero-out" or "replace-one", as in `privacy.accounting`.
        grid: Where contributions are rounded to; by default one that leaves room for the noise.
        unit: Whose data are protected.
    """

    num_agents: int
    noise_multiplier: float
    colluding: int = 1
    dropping: int = 0
    adjacency: Adjacency = "zero-out"
    grid: PublicGrid = None  # type: ignore[assignment]  # never None once constructed
    unit: ClassVar[Unit]

    def __post_init__(self) -> None:
        check_count("The number of agents", self.num_agents)
        check_count("The number of colluding agents", self.colluding, least=0)
        check_count("The number of agents that drop out", self.dropping, least=0)
        if self.honest < 1:
            raise InputDataError(
                f"Of {self.num_agents} agents {self.colluding} may collude and {self.dropping} "
                "drop out: nobody is left to add noise. Have more agents, or allow for fewer."
            )
        check_kind(self)
        check_between("A noise multiplier", self.noise_multiplier, 1e-6, 1e9)
        self._check_bounds()
        if self.grid is None:
            object.__setattr__(self, "grid", self._own_grid())
        self._check_grid()

    def _own_grid(self) -> PublicGrid:
        std = self.noise_multiplier * self._norm(0.0) / math.sqrt(self.honest)
        bound = 1.01 * (self._largest + _REACH * std)
        precision = max(_PRECISION, self.num_agents * 2.0**-51)
        step = PublicGrid(self._numbers, bound, self.num_agents, precision).step
        # Rounding adds to norm, noise and bound: a thousandth, unless the grid is hopeless.
        std = self.noise_multiplier * self._norm(step) / math.sqrt(self.honest)
        bound = 1.01 * (self._largest + self._rounding(step) + _REACH * std)
        return PublicGrid(self._numbers, bound, self.num_agents, precision)

    def _check_grid(self) -> None:
        grid = self.grid
        if grid.dim != self._numbers or grid.num_agents < self.num_agents:
            raise InputDataError(
                f"The grid is for {grid.num_agents} contributions of {grid.dim} numbers, the "
                f"mechanism for {self.num_agents} of {self._numbers}: give both the same."
            )
        units = self.agent_std / grid.step
        if units < LEAST_STD:
            needed = self.noise_multiplier * self._norm(0.0) / math.sqrt(self.honest) / LEAST_STD
            precision = 2.0 ** math.floor(math.log2(needed / grid.bound))
            raise InputDataError(
                f"One agent's noise has a standard deviation of {units:.3g} steps of the grid, "
                f"fewer than {LEAST_STD:g}: sums would not be as good as one Gaussian. Take a grid "
                f"with bound={grid.bound:g} and precision={precision:.3g} or finer."
            )
        room = self._largest + self._rounding(grid.step)
        needed = room / grid.step + discrete_gaussian_reach(units)
        if needed > grid.largest:
            raise InputDataError(
                f"The grid ends at {grid.bound:g}, a contribution with its noise at "
                f"{needed * grid.step:g}: take a grid with bound={1.01 * needed * grid.step:g}."
            )

    # What a concrete mechanism is.

    @abstractmethod
    def _check_bounds(self) -> None:
        """Raise unless its own settings make sense."""

    @property
    @abstractmethod
    def _numbers(self) -> int:
        """The numbers of one contribution."""

    @property
    @abstractmethod
    def _largest(self) -> float:
        """The largest absolute number of a contribution before it is rounded."""

    @abstractmethod
    def _rounding(self, step: float) -> float:
        """What rounding can add to it."""

    @abstractmethod
    def _norm(self, step: float) -> float:
        """One unit's norm on a grid of this step."""

    @abstractmethod
    def bounded(self, values: Tensor) -> Tensor:
        """A contribution, clipped and rounded, without noise: a `D` tensor of int64 grid units."""

    _described: ClassVar[tuple[str, ...]]  # what the `repr` names first

    # What follows from it.

    @property
    def honest(self) -> int:
        """How many agents' noise can be relied on: :math:`M - c - d`."""
        return self.num_agents - self.colluding - self.dropping

    @property
    def event(self) -> Event:
        """What one sum costs; `Ledger.spend` takes it."""
        return Event(float(self.noise_multiplier), discrete=True)

    @cached_property
    def norm(self) -> float:
        """One unit's norm `n` on the grid: the distance of worlds, half of it for replace-one."""
        return self._norm(self.grid.step)

    @property
    def noise_scale(self) -> float:
        """The standard deviation :math:`s` of the noise that the guarantee relies on."""
        return self.noise_multiplier * self.norm

    @property
    def agent_std(self) -> float:
        r"""The standard deviation of one agent's noise, :math:`s/\sqrt{M - c - d}`."""
        return self.noise_scale / math.sqrt(self.honest)

    @property
    def noise_std(self) -> float:
        r"""The standard deviation of the noise in a sum of all agents."""
        return self.agent_std * math.sqrt(self.num_agents)

    def contribution(self, values: Tensor, *, noise: NoiseSource, path: Path) -> Tensor:
        """One agent's bounded contribution with its share of the noise. It pays for nothing.

        Args:
            values: See `bounded`.
            noise: The agent's own source.
            path: What the contribution is for; it names the agent.

        Returns:
            A `D` tensor of int64, in grid units.
        """
        return self.bounded(values) + self.share_of_noise(noise=noise, path=path)

    def share_of_noise(self, *, noise: NoiseSource, path: Path) -> Tensor:
        """One agent's share of the noise: a `D` tensor of int64, in grid units."""
        std = self.agent_std / self.grid.step
        return discrete_gaussian(std, self._numbers, noise=noise, path=(*path, "noise"))

    def whole_noise(self, *, noise: NoiseSource, path: Path) -> Tensor:
        """All the noise at once, for a trusted server: a `D` tensor of int64, in grid units."""
        std = self.noise_scale / self.grid.step
        return discrete_gaussian(std, self._numbers, noise=noise, path=(*path, "noise"))

    def __repr__(self) -> str:
        names = ("num_agents", "noise_multiplier", "colluding", "dropping", "adjacency", "unit")
        return described(self, *self._described, *names)


@dataclass(frozen=True, kw_only=True, repr=False)
class DistributedGaussianSum(DistributedMechanism):
    r"""The sum of whole agents' vectors, each clipped by one common factor.

    Adjacency: zero-out, or replace-one. Unit: agent. Trust, guarantee and proof: see the module.

    Attributes:
        dim: The numbers `D` of a contribution.
        clip_norm: The bound `C` on its norm.

    Example:
        >>> mechanism = DistributedGaussianSum(
        ...     dim=44, num_agents=10, clip_norm=5.0, noise_multiplier=1.0, colluding=3, dropping=2
        ... )
        >>> round(mechanism.noise_std / mechanism.noise_scale, 2)  # what distribution costs
        1.41
    """

    dim: int
    clip_norm: float
    unit: ClassVar[Unit] = "agent"
    _described = ("dim", "clip_norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        best = self.best_signal_to_noise
        if best < 1:
            warnings.warn(
                f"At most {best:.2g} times as much signal as noise can be expected in a sum, even "
                "if all contributions agree and fill the clip bound: use fewer features, fewer "
                "releases, or more agents.",
                SignalWarning,
                stacklevel=3,
            )

    def _check_bounds(self) -> None:
        check_count("The dimension of a contribution", self.dim)
        check_between("A clip norm", self.clip_norm, 1e-50, 1e50)

    @property
    def _numbers(self) -> int:
        return self.dim

    @property
    def _largest(self) -> float:
        return self.clip_norm

    def _rounding(self, step: float) -> float:
        return step

    def _norm(self, step: float) -> float:
        rounding = step * math.sqrt(self.dim) / 2
        return (self.clip_norm + rounding) * (1 + _SLACK)

    @property
    def best_signal_to_noise(self) -> float:
        """A public upper bound on signal over noise: all agents agree and fill the clip bound."""
        return self.num_agents * self.clip_norm / (self.noise_std * math.sqrt(self.dim))

    def bounded(self, values: Tensor) -> Tensor:
        """Clip and round one agent's vector.

        Args:
            values: A `D` tensor, finite.

        Returns:
            A `D` tensor of int64, in grid units.

        Raises:
            BotorchTensorDimensionError: Another shape.
            InputDataError: Not a number, or infinity.
        """
        if values.shape != (self.dim,):
            raise BotorchTensorDimensionError(
                f"A contribution must have shape ({self.dim},), got {tuple(values.shape)}."
            )
        values = clip(values.detach(), self.clip_norm)
        return self.grid.to_integers(values)


@dataclass(frozen=True, kw_only=True, repr=False)
class DistributedRecordSum(OverRecords, DistributedMechanism):
    r"""The sum of the statistics :math:`(aa^\top, \kappa y a)` of all agents' records.

    `a` are features of norm at most one, longer ones are shortened; `y` is the outcome less the
    public `centre`, clipped to :math:`\pm Y`. These are the statistics of DTC (`summarize` with
    ``noise="iid"``), for which one record's influence is bounded; PITC's is not. `gram_and_moment`
    gives what a `Summary` is made of.

    Adjacency: zero-out, or replace-one. Unit: record. Trust, guarantee and proof: see the module.

    Attributes:
        num_features: The dimension `m` of the features.
        outcome_bound: :math:`Y`, half the public range of outcomes.
        max_records: The most records of one agent in a sum; more are refused.
        centre: The public middle of the range of outcomes.
        moment_scale: :math:`\kappa`; by default :math:`\sqrt2/Y`, for which the gram matrix costs
            the moment nothing under replace-one.

    Example:
        >>> mechanism = DistributedRecordSum(
        ...     num_features=8, outcome_bound=0.5, max_records=50, num_agents=10,
        ...     noise_multiplier=5.0,
        ... )
        >>> mechanism.bounded(mechanism.records(features, outcomes)).shape
        torch.Size([44])
    """

    num_features: int
    outcome_bound: float
    max_records: int
    centre: float = 0.0
    moment_scale: float = None  # type: ignore[assignment]  # never None once constructed
    unit: ClassVar[Unit] = "record"
    _described = ("num_features", "outcome_bound", "max_records")

    def _check_bounds(self) -> None:
        check_count("The largest number of records", self.max_records)
        object.__setattr__(self, "moment_scale", self.statistic.moment_scale)

    @property
    def _numbers(self) -> int:
        return self.statistic.dim

    @property
    def _largest(self) -> float:
        return self.max_records * self.statistic.largest

    def _rounding(self, step: float) -> float:
        return self.max_records * step

    def _norm(self, step: float) -> float:
        rounding = step * math.sqrt(self._numbers) / 2
        return (self.statistic.norm(self.adjacency) + rounding) * (1 + _SLACK)

    def bounded(self, values: Tensor) -> Tensor:
        """Clip each record, round its statistic, add.

        Args:
            values: An `n x (m + 1)` tensor of `records`, finite; `n` may be 0.

        Returns:
            A `D` tensor of int64, in grid units.

        Raises:
            BotorchTensorDimensionError: Another shape.
            InputDataError: Not a number, infinity, or too many records.
        """
        self.statistic.check(values)
        if values.shape[0] > self.max_records:
            raise InputDataError(
                f"{values.shape[0]} records are more than the {self.max_records} that the grid has "
                "room for: agree on more in advance."
            )
        return self.statistic.rounded_sum(values, self.grid.step)

    def moment_noise_std(self, *, noise_var: float, outputscale: float = 1.0) -> float:
        """The standard deviation of the noise in what `gram_and_moment` returns as the moment."""
        return self.statistic.moment_noise_std(
            self.noise_std, noise_var=noise_var, outputscale=outputscale
        )
