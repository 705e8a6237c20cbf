r"""Noisy sums over a public roster of agents: the bound, the noise and the accounted event in one.

Each of `num_agents` agents contributes one vector, clipped to `clip_norm` (:math:`c`). All three
mechanisms are one factorisation :math:`\varphi = BA` of the public weights :math:`\varphi`
(`P x N`, for `P` outputs)::

    Y      = 1/q · Σ_{n in S} a_n ω̂_nᵀ + s Ξ      P x M, Ξ independent N(0, 1), S the sample
    values = B Y                                  post-processing

    mechanism              A                B          noise of output i
    GaussianSum            w 1ᵀ             1          s
    WeightedGaussianSum    φ                I          s
    CorrelatedGaussianSum  K^1/2 by region  Z⁻¹K^1/2   √P less than published, in every round

Agent `n` moves `Y` by :math:`a_n \otimes \hat\omega_n / q`, whose norm is at most
:math:`\|a_n\| c / q`. The largest of these is `sensitivity` :math:`\Delta`, and
:math:`s = z \Delta` makes the release one (subsampled) Gaussian mechanism of multiplier `z`, which
is what `event` says. In floating point :math:`s = z(\Delta' + \gamma\sqrt{PM})`, where
:math:`\gamma \le 2^{-20} s` is the step of the lattice and :math:`\Delta'` is :math:`\Delta` with
what rounding can add to a sum [Casacuberta2022]_: together below one part in a thousand as long as
:math:`z\sqrt{PM}` stays below a thousand and `N` below :math:`10^8`.

**Trust.** Central: the caller of `release` sees the contributions and is trusted, and so is the
secrecy of who was sampled; if uploads are visible, account with `PoissonSampling(1.0)`.

**Guarantee** (zero-out, unit agent). For public roster, weights, clip norm, sampling, noise
multiplier and number of rounds: for each agent, everything that any coalition of *other* agents
sees over the whole run (all releases, their own queries and results) is
:math:`(\varepsilon, \delta)`-indistinguishable from a run in which this agent's contributions are
all zero. Replace-one: from a run in which they are any other admissible ones. Not covered: who
observes the agent's own queries or results; the one who runs `release`; settings tuned on the
agents' data without accounting; strict removal, which changes `N` and the others' weights; the
time a release takes, which depends on who is sampled; and a call that raises, for an agent that
contributes nonsense can end the run.

**Proof** (sketch). Fix everything but one agent's contributions. Clipping bounds its vector by `c`
whatever it sends, and not-a-number is refused before (`min` would let it pass). Given the sample,
`Y` is a fixed matrix plus :math:`a_n \otimes \hat\omega_n / q` if `n` is in it, plus Gaussian
noise on the lattice; the latter is post-processing of a Gaussian mechanism (see
`hazmat.noise`) of sensitivity :math:`\Delta' + \gamma\sqrt{PM} = s/z`. Whether `n` is sampled is a
secret coin of probability `q`, independent of all else, and an empty sample is noised like any
other: this is the Poisson-subsampled Gaussian mechanism that accountants know. `B` is public, so
`values` are post-processing. Later contributions may depend on earlier releases: the composition
is adaptive, and its events are fixed by public settings.

References:
    * [Casacuberta2022]_ S. Casacuberta, M. Shoemate, S. Vadhan, C. Wagaman. Widespread
      underestimation of sensitivity in differentially private libraries and how to fix it. CCS
      2022.
    * [Dai2021]_ Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
      optimization with distributed exploration. NeurIPS 2021.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from numpy.typing import NDArray
from scipy.special import gammaincinv
from torch import Tensor

from botorch_fed.privacy.accounting import Adjacency, Event, Unit
from botorch_fed.privacy.checks import check_between, check_count, check_path, described
from botorch_fed.privacy.hazmat.noise import (
    LARGEST,
    NoiseSource,
    Path,
    coins,
    lattice_gaussian,
    lattice_step,
    subset,
)
from botorch_fed.privacy.paying import AnyLedger, check_kind, pay

Contributions = Tensor | Mapping[int, Tensor] | Iterable[tuple[int, Tensor]]

_Array = NDArray[np.float64]
_Agents = slice | NDArray[np.int64]
_Chunk = tuple[_Agents, _Array]

_CHUNK_NUMBERS = 2**18  # 2 MiB: what is read twice stays in the cache
_MAX_ROWS = 4096
# A clipped vector ends this much inside the bound, so that rounding leaves it there.
_INSIDE = 1 - 2.0**-44
_SLACK = 2.0**-30  # of the sensitivity: rounding of norms and weights
_UNIT = 2.0**-20  # the step of the lattice is at most this share of the noise


class SignalWarning(UserWarning):
    """A release is mostly noise, even if all contributions agree and fill the clip bound."""


# ------------------------------------------------------------------ sampling


@dataclass(frozen=True)
class PoissonSampling:
    """Every agent takes part with the same probability, independently: draws and accounts.

    Attributes:
        rate: The probability `q` in (0, 1]; at 1 everyone takes part and no coin is drawn.

    Example:
        >>> PoissonSampling(0.35).draw(29, noise=OSNoise(), path=(1, "sampling")).shape
        torch.Size([29])
    """

    rate: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise InputDataError(f"A sampling rate must lie in (0, 1], got {self.rate}.")
        object.__setattr__(self, "rate", float(self.rate))

    def fraction(self, num_agents: int) -> float:
        """The expected share of agents in a sample."""
        return self.rate

    def draw(self, num_agents: int, *, noise: NoiseSource, path: Path) -> Tensor:
        """Who takes part: a `num_agents` tensor of bool. It is a secret.

        Args:
            num_agents: How many agents there are.
            noise: The source of the coins.
            path: What they are for.
        """
        if self.rate == 1:
            return torch.ones(num_agents, dtype=torch.bool)
        return coins(num_agents, self.rate, noise=noise, path=path)

    def event(self, noise_multiplier: float, num_agents: int) -> Event:
        """What one release costs.

        Args:
            noise_multiplier: Noise over the largest norm of one agent's contribution.
            num_agents: How many agents there are.
        """
        return Event(noise_multiplier, sampling_rate=self.rate)


@dataclass(frozen=True)
class FixedSizeSampling:
    """A uniformly drawn subset of exactly `size` agents takes part: draws and accounts.

    For replace-one adjacency only: under zero-out its size is not the accountants' Poisson sample.

    Attributes:
        size: How many take part, at least 1.
    """

    size: int

    def __post_init__(self) -> None:
        check_count("The size of a sample", self.size)

    def fraction(self, num_agents: int) -> float:
        """The share of agents in a sample."""
        return self.size / num_agents

    def draw(self, num_agents: int, *, noise: NoiseSource, path: Path) -> Tensor:
        """Who takes part: a `num_agents` tensor of bool. It is a secret.

        Args:
            num_agents: How many agents there are.
            noise: The source of the choice.
            path: What it is for.
        """
        return subset(num_agents, self.size, noise=noise, path=path)

    def event(self, noise_multiplier: float, num_agents: int) -> Event:
        """What one release costs.

        Args:
            noise_multiplier: Noise over the largest norm of one agent's contribution.
            num_agents: How many agents there are.
        """
        return Event(noise_multiplier, sample_size=self.size, population=num_agents)


Sampling = PoissonSampling | FixedSizeSampling


# ------------------------------------------------------------------ clipping


def clip(vectors: Tensor, norm: float) -> Tensor:
    r"""Scale vectors into a ball: :math:`x \min(1, C/\|x\|)`.

    Args:
        vectors: A `… x M` tensor, finite.
        norm: The radius :math:`C`.

    Returns:
        A float64 tensor of the same shape; clipping it again changes nothing.
    """
    _check_clip_norm(norm)
    if not vectors.isfinite().all():
        raise InputDataError(
            "Vectors to be clipped must be finite, got NaN or infinity: no scaling bounds them."
        )
    X = vectors.double()
    largest = X.abs().amax(dim=-1, keepdim=True) if X.shape[-1] else X.sum(dim=-1, keepdim=True)
    unit = X / torch.where(largest == 0, torch.ones_like(largest), largest)  # squares are in range
    length = unit.norm(dim=-1, keepdim=True)
    return torch.where(largest * length <= norm, X, unit * (norm * _INSIDE / length))


def chi_clip_norm(dim: int, quantile: float = 0.99) -> float:
    """A clip norm that most standard normal vectors keep: a function of public numbers only.

    Args:
        dim: The dimension `M` of messages that are about `N(0, I)`, as samples of weights are.
        quantile: The share of such vectors that are not clipped, in (0, 1).

    Returns:
        The quantile of the chi distribution with `dim` degrees of freedom.
    """
    check_count("The dimension", dim)
    if not 0 < quantile < 1:
        raise InputDataError(f"A quantile must lie in (0, 1), got {quantile}.")
    return math.sqrt(2 * float(gammaincinv(dim / 2, quantile)))


# ------------------------------------------------------------------ what is released


@dataclass(frozen=True, eq=False)
class Release:
    r"""What may leave: private values and public facts about them.

    Attributes:
        values: A `P x M` tensor.
        noise_std: A `P` tensor: the standard deviation of the noise in each row of `values`.
        private: False if the noise came from a seed.
        mechanism: What made it, in words.
    """

    values: Tensor
    noise_std: Tensor
    private: bool
    mechanism: str

    @property
    def signal_to_noise(self) -> Tensor:
        r"""An estimate of :math:`\|signal\| / \|noise\|` per row: a `P` tensor.

        :math:`\sqrt{\max(\|v_i\|^2 - s_i^2 M, 0)} / (s_i \sqrt M)`; it is post-processing of the
        release, hence free. Without any signal it is zero half of the time and
        :math:`O(M^{-1/4})` else.
        """
        noise = self.noise_std.square() * self.values.shape[-1]
        signal = (self.values.square().sum(dim=-1) - noise).clamp(min=0)
        return (signal / noise).sqrt()

    def __repr__(self) -> str:
        note = "" if self.private else ", not private: seeded noise"
        return f"Release({self.values.shape[0]} x {self.values.shape[1]} of {self.mechanism}{note})"


# ------------------------------------------------------------------ mechanisms


@dataclass(frozen=True, kw_only=True, repr=False)
class GaussianMechanism(ABC):
    r"""What the mechanisms of this module share; see there for guarantee, trust and proof.

    Attributes:
        num_agents: The number `N` of agents on the public roster.
        dim: The dimension `M` of a contribution.
        clip_norm: The bound :math:`c` on the norm of a contribution.
        noise_multiplier: :math:`z`, noise over the largest norm of one agent's contribution.
        sampling: Who takes part; it divides the sum by the expected share `q` as well.
        adjacency: "zero-out" or "replace-one", as in `privacy.accounting`.
        unit: Whose data are protected, "agent" or "record".
    """

    num_agents: int
    dim: int
    clip_norm: float
    noise_multiplier: float
    sampling: Sampling = PoissonSampling()
    adjacency: Adjacency = "zero-out"
    unit: Unit = "agent"
    _described: ClassVar[tuple[str, ...]] = ()  # what the `repr` names beside these

    def __post_init__(self) -> None:
        check_count("The number of agents", self.num_agents)
        check_count("The dimension of a contribution", self.dim)
        _check_clip_norm(self.clip_norm)
        self._check_sampling()
        self._check_weights()
        self._check_noise()
        best = self.best_signal_to_noise
        if bool((best < 1).any()):
            warnings.warn(
                f"At most {float(best.min()):.2g} times as much signal as noise can be expected in "
                "a release, even if all contributions agree and fill the clip bound: use fewer "
                "features, fewer releases, or more agents.",
                SignalWarning,
                stacklevel=3,
            )

    def _check_sampling(self) -> None:
        check_kind(self)
        if not isinstance(self.sampling, FixedSizeSampling):
            return
        if self.adjacency != "replace-one":
            raise InputDataError(
                'FixedSizeSampling needs adjacency="replace-one": with zero-out use '
                "PoissonSampling, whose accountants know it."
            )
        if self.sampling.size > self.num_agents:
            raise InputDataError(
                f"A sample of {self.sampling.size} agents cannot be drawn from {self.num_agents}."
            )

    def _check_noise(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise InputDataError(
                f"The noise multiplier must be positive and finite, got {self.noise_multiplier}."
            )
        if self._rounded_share >= 0.5:
            raise InputDataError(
                f"A noise multiplier of {self.noise_multiplier} in {self._outputs * self.dim} "
                "dimensions leaves no room for the lattice: z √(P M) must stay below 2^19."
            )
        reach = self.num_agents * self.sensitivity / lattice_step(self.noise_scale)
        if reach > LARGEST / 2:
            raise InputDataError(
                f"A sum over {self.num_agents} agents with a noise multiplier of "
                f"{self.noise_multiplier} exceeds the lattice: use a multiplier of at least "
                f"{self.num_agents * 2.0**-30:.2g}."
            )

    # What a concrete mechanism is: the factorisation of its weights.

    @property
    @abstractmethod
    def _outputs(self) -> int:
        """The number `P` of rows."""

    @abstractmethod
    def _check_weights(self) -> None:
        """Raise unless the weights make sense."""

    @property
    @abstractmethod
    def _largest_column(self) -> float:
        """The largest norm of a column `a_n` of `A`."""

    @property
    @abstractmethod
    def _row_sums(self) -> Tensor:
        """The sums of absolute weights of each output, a `P` tensor."""

    @abstractmethod
    def _weighted(self, agents: _Agents, factors: _Array, rows: _Array) -> _Array:
        """Some agents' part of the sum, before `_mix`: `P x M`."""

    def _mix(self, total: Tensor) -> Tensor:
        """What remains to be done to the sum before noise is added; linear."""
        return total

    def _decode(self, noised: Tensor) -> Tensor:
        """`B` times the noised sum."""
        return noised

    # What follows from it.

    @cached_property
    def event(self) -> Event:
        """What one release costs; `Ledger.spend` takes it."""
        return self.sampling.event(self.noise_multiplier, self.num_agents)

    @property
    def sampling_rate(self) -> float:
        """The expected share `q` of agents in a release, by which sums are divided."""
        return self.sampling.fraction(self.num_agents)

    @property
    def decoder(self) -> Tensor:
        """The `P x P` matrix `B`: `values` are `B` times a sum with independent noise."""
        return self._decode(torch.eye(self._outputs, dtype=torch.float64))

    @cached_property
    def sensitivity(self) -> float:
        r"""The joint zero-out sensitivity :math:`\Delta = \max_n \|a_n\| c / q` of that sum."""
        return self._largest_column * self.clip_norm / self.sampling_rate

    @property
    def _noise_norm(self) -> float:
        """The norm that the noise is a multiple of."""
        return self.sensitivity

    @property
    def _rounded_share(self) -> float:
        return self.noise_multiplier * math.sqrt(self._outputs * self.dim) * _UNIT

    @cached_property
    def noise_scale(self) -> float:
        r"""The standard deviation :math:`s` of the independent noise before decoding.

        It solves :math:`s = z(\Delta' + \gamma\sqrt{PM})` for a step of :math:`\gamma = 2^{-20} s`.
        """
        operations = _MAX_ROWS + self.dim + 2 * self._outputs + 32  # one after the other
        slack = _SLACK + operations * self.num_agents * 2.0**-52
        bound = self._noise_norm * (1 + slack)
        return self.noise_multiplier * bound / (1 - self._rounded_share)

    @cached_property
    def _noise_gain(self) -> Tensor:
        return self.decoder.norm(dim=1)

    @property
    def noise_std(self) -> Tensor:
        """The standard deviation of the noise in each released row: a `P` tensor."""
        return self.noise_scale * self._noise_gain

    @property
    def best_signal_to_noise(self) -> Tensor:
        r"""A public upper bound on :math:`\|signal\| / \|noise\|` of each row: a `P` tensor.

        The signal is the sum that is expected; a single sample can have up to :math:`1/q` as much.

        :math:`c \sum_n |\varphi_n^{(i)}| / (s_i \sqrt M)`: all agents send the same vector at the
        clip bound.
        """
        return self.clip_norm * self._row_sums / (self.noise_std * math.sqrt(self.dim))

    def release(
        self, contributions: Contributions, *, ledger: AnyLedger, noise: NoiseSource, path: Path
    ) -> tuple[Release, AnyLedger]:
        r"""Pay, then sample, clip, sum and add noise.

        Args:
            contributions: An `N x M` tensor; or a mapping from agents `0, …, N-1` to `M`-vectors,
                where a missing agent contributes zero; or an iterable of blocks, each the first
                agent's index and a `K x M` tensor, read once in constant memory. Nothing is
                renormalised for agents that are missing.
            ledger: Pays `event` before anything is computed.
            noise: `OSNoise()`, or a seeded source in tests.
            path: What the release is for, e.g. ``(t, "weights")``: one path for one release.

        Returns:
            The release, and the ledger after it.

        Raises:
            BudgetExceeded: The ledger does not cover the release; nothing was computed.
            InputDataError: A contribution is not finite or does not fit. Tensors and mappings are
                looked at before anything is paid, blocks afterwards.
        """
        chunks = self._chunks(contributions)
        check_path(path)
        ledger = pay(self, ledger, private=noise.private)
        sampled = self.sampling.draw(self.num_agents, noise=noise, path=(*path, "sampling"))
        total = self._clipped_sum(chunks, sampled) / self.sampling_rate
        noised = lattice_gaussian(total, self.noise_scale, noise=noise, path=(*path, "noise"))
        values = self._decode(noised)
        return Release(values, self.noise_std, noise.private, repr(self)), ledger

    def _clipped_sum(self, chunks: Iterator[_Chunk], sampled: Tensor) -> Tensor:
        kept = sampled.numpy()
        total = _CompensatedSum(self._outputs, self.dim)
        for agents, rows in chunks:
            rows, factors = _clip_factors(rows, self.clip_norm, agents)
            total.add(self._weighted(agents, factors * kept[agents], rows))
        return self._mix(total.value)

    # The three forms of contributions, cut into chunks that fit the cache.

    def _chunks(self, contributions: Contributions) -> Iterator[_Chunk]:
        if isinstance(contributions, Tensor):
            if contributions.shape != (self.num_agents, self.dim):
                raise BotorchTensorDimensionError(
                    f"Contributions must be `{self.num_agents} x {self.dim}`, got shape "
                    f"{tuple(contributions.shape)}."
                )
            _check_finite(contributions, slice(0, self.num_agents))
            return self._cut(0, contributions)
        if isinstance(contributions, Mapping):
            return self._mapping_chunks(contributions)
        return self._block_chunks(contributions)

    def _cut(self, first: int, block: Tensor) -> Iterator[_Chunk]:
        step = max(1, min(_MAX_ROWS, _CHUNK_NUMBERS // self.dim))
        for start in range(0, block.shape[0], step):
            rows = _as_array(block[start : start + step])
            yield slice(first + start, first + start + rows.shape[0]), rows

    def _mapping_chunks(self, contributions: Mapping[int, Tensor]) -> Iterator[_Chunk]:
        strangers = [a for a in contributions if type(a) is not int or not self._has(a)]
        if strangers:
            raise InputDataError(
                f"Agents are numbered 0 to {self.num_agents - 1}, got {strangers[0]!r}."
            )
        agents = sorted(contributions)
        for agent in agents:
            if contributions[agent].shape != (self.dim,):
                raise BotorchTensorDimensionError(
                    f"A contribution must have shape ({self.dim},), agent {agent} sent shape "
                    f"{tuple(contributions[agent].shape)}."
                )
        if not agents:
            return iter(())
        rows = torch.stack([contributions[agent].detach().double() for agent in agents])
        indices = np.array(agents)
        _check_finite(rows, indices)
        return ((indices[chunk], part) for chunk, part in self._cut(0, rows))

    def _block_chunks(self, blocks: Iterable[tuple[int, Tensor]]) -> Iterator[_Chunk]:
        seen = np.zeros(self.num_agents, dtype=bool)
        for first, block in blocks:
            if block.dim() != 2 or block.shape[1] != self.dim:
                raise BotorchTensorDimensionError(
                    f"A block must be `K x {self.dim}`, got shape {tuple(block.shape)}."
                )
            last = first + block.shape[0] - 1
            if block.shape[0] and not (self._has(first) and self._has(last)):
                raise InputDataError(
                    f"Agents are numbered 0 to {self.num_agents - 1}, got a block of {first} to "
                    f"{last}."
                )
            if seen[first : last + 1].any():
                raise InputDataError(
                    f"An agent contributes once to a release, but one of {first} to {last} came "
                    "before: that would exceed its clip bound."
                )
            seen[first : last + 1] = True
            yield from self._cut(first, block)

    def _has(self, agent: int) -> bool:
        return 0 <= agent < self.num_agents

    # Words.

    @cached_property
    def _words(self) -> str:
        names = ("dim", "clip_norm", "noise_multiplier", "sampling", "adjacency", "unit")
        return described(self, "num_agents", *self._described, *names)

    def __repr__(self) -> str:
        return self._words


@dataclass(frozen=True, kw_only=True, repr=False)
class GaussianSum(GaussianMechanism):
    r"""One noisy, equally weighted sum :math:`q^{-1} \sum_{n \in S} w \hat\omega_n + N(0, s^2 I)`.

    Adjacency: zero-out, or replace-one at the price the accountants name. Trust: central, the
    caller of `release` sees the contributions. Guarantee: that of the module's docstring.

    Proof (sketch). Agent `n` moves the sum by :math:`w \hat\omega_n / q` if it is sampled, and
    :math:`\|\hat\omega_n\| \le c` after clipping, so :math:`\Delta = |w| c / q`. The noise has
    :math:`s \ge z (\Delta' + \gamma\sqrt M)`, where :math:`\Delta' \ge \Delta` covers rounding in
    the sum and :math:`\gamma\sqrt M` that to the lattice. Integer plus rounded Gaussian is
    post-processing of a Gaussian, and the sample, a secret, is drawn by the object that names the
    rate: the release is the subsampled Gaussian mechanism of multiplier `z`.

    Attributes:
        weight: :math:`w`, by default :math:`1/N`: an estimate of the mean.

    Example:
        >>> mechanism = GaussianSum(num_agents=50, dim=10, clip_norm=4.0, noise_multiplier=1.0)
        >>> release, ledger = mechanism.release(
        ...     messages, ledger=Ledger(), noise=OSNoise(), path=(1, "mean")
        ... )
        >>> release.values.shape
        torch.Size([1, 10])
    """

    weight: float = None  # type: ignore[assignment]  # never None once constructed
    _described = ("weight",)

    @property
    def weights(self) -> Tensor:
        """A `1 x N` tensor."""
        return torch.full((1, self.num_agents), self.weight, dtype=torch.float64)

    def _check_weights(self) -> None:
        weight = 1 / self.num_agents if self.weight is None else float(self.weight)
        object.__setattr__(self, "weight", weight)
        if not 1e-50 <= abs(weight) <= 1e50:
            raise InputDataError(f"A weight must be finite and not zero, got {weight}.")

    @property
    def _outputs(self) -> int:
        return 1

    @property
    def _largest_column(self) -> float:
        return abs(self.weight)

    @property
    def _row_sums(self) -> Tensor:
        return self.weights.abs().sum(dim=1)

    def _weighted(self, agents: _Agents, factors: _Array, rows: _Array) -> _Array:
        return (self.weight * (factors @ rows))[None]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WeightedGaussianSum(GaussianMechanism):
    r"""Several weighted sums of the same vectors, independently noised.

    .. math:: \omega^{(i)} = q^{-1} \sum_{n \in S} \varphi_n^{(i)} \hat\omega_n + N(0, s^2 I),
              \qquad i = 1, \ldots, P.

    Adjacency: zero-out, or replace-one at the price the accountants name. Trust: central, the
    caller of `release` sees the contributions. Guarantee: that of the module's docstring, for all
    `P` sums together.

    Proof (sketch). The `P` sums are one joint release. Agent `n` moves it by
    :math:`\varphi_n \otimes \hat\omega_n / q`, of norm exactly
    :math:`\|\varphi_n\| \|\hat\omega_n\| / q \le \|\varphi_n\| c / q`. With :math:`\Delta` the
    largest of these and independent noise :math:`s \ge z (\Delta' + \gamma\sqrt{PM})` (rounding of
    the sum and to the lattice), the release is the subsampled Gaussian mechanism of multiplier
    `z`. As published, :math:`s = z \max\varphi\, c \sqrt P / q`; since
    :math:`\|\varphi_n\| \le \sqrt P \max\varphi`, the event `z` is an upper bound of its cost.

    Attributes:
        weights: :math:`\varphi`, a `P x N` tensor. It must be public.
        paper_noise: The noise of [Dai2021]_, for replication only: as published, up to √P too
            much for the guarantee that is accounted. Their `S` is :math:`c \sqrt P`.
    """

    weights: Tensor
    paper_noise: bool = False
    _described = ("num_regions", "paper_noise")

    def _check_weights(self) -> None:
        weights = self.weights
        if weights.dim() != 2 or weights.shape[1] != self.num_agents or not weights.shape[0]:
            raise BotorchTensorDimensionError(
                f"weights must be `P x {self.num_agents}`, got shape {tuple(weights.shape)}."
            )
        object.__setattr__(self, "weights", weights.detach().cpu().double().clone())
        if not 1e-50 <= self._largest_column <= 1e50:  # refuses NaN as well
            raise InputDataError("weights must be finite, and not all of them zero.")
        _ = self._weight_array  # its noise is fixed from here on, and so are its weights

    @property
    def _outputs(self) -> int:
        return self.weights.shape[0]

    @cached_property
    def _largest_column(self) -> float:
        return float(self.weights.norm(dim=0).max())

    @property
    def _noise_norm(self) -> float:
        if not self.paper_noise:
            return self.sensitivity
        largest = float(self.weights.abs().max())
        # Eq. (5) of [Dai2021]_ with their S = c √P.
        return largest * self.clip_norm * math.sqrt(self._outputs) / self.sampling_rate

    @property
    def _row_sums(self) -> Tensor:
        return self.weights.abs().sum(dim=1)

    @cached_property
    def _weight_array(self) -> _Array:
        return self.weights.numpy().copy()

    def _weighted(self, agents: _Agents, factors: _Array, rows: _Array) -> _Array:
        columns = self._weight_array[:, agents] * factors
        kept = np.flatnonzero(factors)
        if 2 * len(kept) > len(factors):
            return columns @ rows
        return columns[:, kept] @ rows[kept]

    @property
    def num_regions(self) -> int:
        """The number `P` of sums."""
        return self._outputs


@dataclass(frozen=True, kw_only=True, repr=False)
class CorrelatedGaussianSum(GaussianMechanism):
    r"""Sums by region, softly mixed, with noise that is correlated between them.

    The sums of `WeightedGaussianSum` for :math:`\varphi_n^{(i)} = K_{i\,g(n)} / Z_i`, where
    :math:`g(n)` is the agent's region, :math:`K = I + e^{-\kappa} (11^\top - I)` and
    :math:`Z_i = \sum_n K_{i\,g(n)}`: each agent counts :math:`e^\kappa` times as much in its own
    region as elsewhere. Published noise is :math:`\sqrt P` times this one's, in every round
    [Dai2021]_. At :math:`\kappa = 0` all rows are equal.

    Adjacency: zero-out, or replace-one at the price the accountants name. Trust: central, the
    caller of `release` sees the contributions. Guarantee: that of the module's docstring, for all
    `P` sums together; regions and contrast are public.

    Proof (sketch). Let :math:`R = K^{1/2}` and :math:`G = \sum_{n \in S} e_{g(n)} \hat\omega_n'`,
    `P x M`. Released is :math:`\tilde G = R G / q + s \Xi`; then
    :math:`\omega^{(i)} = Z_i^{-1} (R \tilde G)_i` is post-processing, and its clean part is
    :math:`(K G)_i / (q Z_i)`, the weighted
    sum. Agent `n` moves :math:`\tilde G` by :math:`R e_{g(n)} \otimes \hat\omega_n / q`, and a
    column of :math:`R` has norm :math:`\sqrt{K_{ii}} = 1`, so :math:`\Delta = c / q`. With
    :math:`s \ge z (\Delta' + \gamma\sqrt{PM})` (rounding of the sum and to the lattice) this is the
    subsampled Gaussian mechanism of multiplier `z`. Row `i` of :math:`R` has norm 1 too: output
    `i` has noise :math:`s / Z_i`.

    Attributes:
        regions: The region :math:`g(n)` of each agent, of `0, …, P-1`; none may be empty.
        num_regions: The number `P` of regions.
        contrast: :math:`\kappa = a_t - 1 \ge 0` of the exploration schedule.
    """

    regions: tuple[int, ...]
    num_regions: int
    contrast: float
    _described = ("num_regions", "contrast")

    def _check_weights(self) -> None:
        check_count("The number of regions", self.num_regions)
        object.__setattr__(self, "regions", tuple(map(int, self.regions)))
        if len(self.regions) != self.num_agents:
            raise InputDataError(
                f"Every one of {self.num_agents} agents needs a region, got {len(self.regions)}."
            )
        missing = set(range(self.num_regions)) ^ set(self.regions)
        if missing:
            raise InputDataError(
                f"Each of {self.num_regions} regions, and no other, needs an agent: look at region "
                f"{min(missing)}. Use at most as many regions as agents."
            )
        if not 0 <= self.contrast < math.inf:
            raise InputDataError(f"A contrast is finite and not negative, got {self.contrast}.")

    @cached_property
    def _region_array(self) -> NDArray[np.int64]:
        return np.array(self.regions, dtype=np.int64)

    @cached_property
    def _regions_are_sorted(self) -> bool:
        return bool((np.diff(self._region_array) >= 0).all())

    @cached_property
    def _normalizers(self) -> Tensor:
        own = torch.from_numpy(np.bincount(self._region_array, minlength=self.num_regions)).double()
        return own + (self.num_agents - own) * math.exp(-self.contrast)  # Z_i

    @property
    def weights(self) -> Tensor:
        """A `P x N` tensor; rows sum to one."""
        inside = torch.arange(self.num_regions)[:, None] == torch.from_numpy(self._region_array)
        outside = math.exp(-self.contrast)
        K = outside + inside.double() * (1 - outside)
        return K / self._normalizers[:, None]

    @property
    def _outputs(self) -> int:
        return self.num_regions

    @property
    def _largest_column(self) -> float:
        return 1.0

    @property
    def _row_sums(self) -> Tensor:
        return torch.ones(self.num_regions, dtype=torch.float64)

    def _weighted(self, agents: _Agents, factors: _Array, rows: _Array) -> _Array:
        regions = self._region_array[agents]
        total = np.zeros((self.num_regions, self.dim))
        if self._regions_are_sorted and regions[0] == regions[-1]:  # one region, no copy
            total[regions[0]] = factors @ rows
            return total
        kept = np.flatnonzero(factors)
        for region in np.unique(regions[kept]):
            members = kept[regions[kept] == region]
            total[region] = factors[members] @ rows[members]
        return total

    def _root(self, total: Tensor) -> Tensor:
        # K = b I + e^-κ 11ᵀ has eigenvalues b, and b + P e^-κ for 1/√P.
        b = -math.expm1(-self.contrast)
        along = math.sqrt(b + self.num_regions * math.exp(-self.contrast))
        mean = total.mean(dim=0, keepdim=True)
        return math.sqrt(b) * total + (along - math.sqrt(b)) * mean

    def _mix(self, total: Tensor) -> Tensor:
        return self._root(total)

    def _decode(self, noised: Tensor) -> Tensor:
        return self._root(noised) / self._normalizers[:, None]


# ------------------------------------------------------------------ parts


class _CompensatedSum:
    """A running sum whose rounding does not grow with the number of terms."""

    def __init__(self, *shape: int) -> None:
        self._sum = np.zeros(shape)
        self._lost = np.zeros(shape)

    def add(self, term: _Array) -> None:
        # Knuth's two-sum: total + lost is exact.
        total = self._sum + term
        back = total - self._sum
        self._lost += (self._sum - (total - back)) + (term - back)
        self._sum = total

    @property
    def value(self) -> Tensor:
        return torch.from_numpy(self._sum + self._lost)


def _clip_factors(rows: _Array, norm: float, agents: _Agents) -> tuple[_Array, _Array]:
    """Rows and what to multiply each of them by, so that no norm exceeds the bound."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.vecdot(rows, rows)
        usable = np.isfinite(squares.sum())
    if not usable:  # NaN, infinity, or numbers whose squares overflow
        _check_finite(torch.from_numpy(rows), agents)
        rows = clip(torch.from_numpy(rows), norm).numpy()
        squares = np.vecdot(rows, rows)
    inside = norm * _INSIDE
    return rows, inside / np.maximum(np.sqrt(squares), inside)


def _check_finite(rows: Tensor, agents: _Agents) -> None:
    """Raise for the first of `K x M` rows that holds NaN or infinity."""
    if math.isfinite(float(rows.detach().sum())):
        return
    bad = (~rows.isfinite()).any(dim=1).nonzero().flatten()
    if len(bad):  # else only the sum has overflowed
        row = int(bad[0])
        agent = agents.start + row if isinstance(agents, slice) else agents[row]
        raise InputDataError(
            f"The contribution of agent {agent} is not finite: no clipping bounds it. Leave the "
            "agent out, or repair it."
        )


def _as_array(rows: Tensor) -> _Array:
    return rows.detach().cpu().double().numpy()


def _check_clip_norm(norm: float) -> None:
    check_between("A clip norm", norm, 1e-100, 1e100)
