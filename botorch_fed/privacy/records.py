r"""What a sum over single records adds up: the statistic of one record, and how far it can move.

A record is a feature vector `a` of norm at most one and an outcome `y`, of which the public
`centre` is subtracted before it is clipped to :math:`\pm Y`. Its statistic is

.. math:: (\mathrm{svec}\,aa^\top,\; \kappa y a) \in \mathbb R^D, \qquad D = m(m + 3)/2,

with :math:`\mathrm{svec}\,A = (A_{11}, \ldots, A_{mm}, \sqrt2 A_{12}, \sqrt2 A_{13}, \ldots)`, an
isometry for the Frobenius norm. Sums of it are what a Gaussian process on `m` features needs to
know.

With :math:`r = \kappa^2 Y^2` the statistic's norm is at most :math:`\sqrt{1 + r}`, which is the
zero-out sensitivity, and two of them are at most

.. math:: \sqrt2 (1 + r/2) \text{ for } r \le 2, \qquad 2\sqrt r \text{ for } r > 2

apart, which is the replace-one sensitivity. Both are attained. At :math:`\kappa = \sqrt2/Y`, the
default, they meet: the replace-one sensitivity is that of the moment alone, and the gram matrix
costs it nothing. Several mechanisms share this class; noise is theirs.

**Proof of the second bound.** With :math:`p = \|a\|^2`, :math:`p' = \|a'\|^2` and
:math:`c = a^\top a'`, the squared distance is :math:`p^2 + p'^2 - 2c^2 + \kappa^2(y^2 p + y'^2 p'
- 2 y y' c)`. The records :math:`(a', y')` and :math:`(-a', -y')` have the same statistic, so let
:math:`c \ge 0`. Then :math:`y = -y' = Y` is worst and gives :math:`p^2 + p'^2 - 2c^2 + r(p + p' +
2c) \le 2 - 2c^2 + 2r + 2rc`. This is concave in `c`: at most :math:`2(1 + r/2)^2`, at
:math:`c = r/2`, if that is in reach, and :math:`4r` at :math:`c = 1` else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from botorch_fed.privacy.accounting import Adjacency
from botorch_fed.privacy.checks import check_between, check_count, set_number
from botorch_fed.privacy.mechanisms import clip

_CHUNK_NUMBERS = 2**18
_SQRT2 = math.sqrt(2.0)


@dataclass(frozen=True, kw_only=True)
class RecordStatistic:
    r"""The statistic of a record, its bounds, and what a sum of it means; see the module.

    Attributes:
        num_features: The dimension `m` of the features.
        outcome_bound: :math:`Y`, half the public range of outcomes.
        centre: The public middle of that range.
        moment_scale: :math:`\kappa`; by default :math:`\sqrt2/Y`.

    Example:
        >>> statistic = RecordStatistic(num_features=8, outcome_bound=0.5, centre=0.5)
        >>> round(statistic.sensitivity("replace-one"), 3)
        2.828
    """

    num_features: int
    outcome_bound: float
    centre: float = 0.0
    moment_scale: float = None  # type: ignore[assignment]  # never None once constructed

    def __post_init__(self) -> None:
        check_count("The number of features", self.num_features)
        set_number(self, "outcome_bound")
        set_number(self, "centre")
        check_between("A bound on outcomes", self.outcome_bound, 1e-50, 1e50)
        if self.moment_scale is None:
            object.__setattr__(self, "moment_scale", _SQRT2 / self.outcome_bound)
        set_number(self, "moment_scale")
        product = self.moment_scale * self.outcome_bound
        check_between("moment_scale times outcome_bound", product, 1e-6, 1e6)

    @property
    def dim(self) -> int:
        """The numbers `D = m(m + 3)/2` of a statistic."""
        return self.num_features * (self.num_features + 3) // 2

    @property
    def ratio(self) -> float:
        r""":math:`r = \kappa^2 Y^2`."""
        return (self.moment_scale * self.outcome_bound) ** 2

    @property
    def largest(self) -> float:
        """The largest absolute number that a statistic can hold."""
        return max(1.0, math.sqrt(self.ratio))

    def sensitivity(self, adjacency: Adjacency) -> float:
        """How far a sum moves, at most, when one record becomes another or counts for nothing.

        Args:
            adjacency: "zero-out" or "replace-one".
        """
        r = self.ratio
        if adjacency == "zero-out":
            return math.sqrt(1 + r)
        return _SQRT2 * (1 + r / 2) if r <= 2 else 2 * math.sqrt(r)

    def norm(self, adjacency: Adjacency) -> float:
        """What noise multipliers refer to: accountants double it for replace-one themselves.

        Args:
            adjacency: "zero-out" or "replace-one".
        """
        return self.sensitivity(adjacency) / (2 if adjacency == "replace-one" else 1)

    def records(self, features: Tensor, outcomes: Tensor) -> Tensor:
        """Records as mechanisms take them.

        Args:
            features: An `n x m` tensor, scaled by a public number such that norms are about one:
                `feature_map(X)` over the root of the output scale.
            outcomes: An `n x 1` tensor, neither centred nor scaled.

        Returns:
            An `n x (m + 1)` tensor.
        """
        n = features.shape[0] if features.dim() == 2 else -1
        if features.shape != (n, self.num_features) or outcomes.shape != (n, 1):
            raise BotorchTensorDimensionError(
                f"Expected features `n x {self.num_features}` and outcomes `n x 1`, got "
                f"{tuple(features.shape)} and {tuple(outcomes.shape)}."
            )
        return torch.cat([features.double(), outcomes.double()], dim=1)

    def check(self, records: Tensor) -> None:
        """Raise unless these are records, `n x (m + 1)` and finite.

        Args:
            records: A tensor of `records`.

        Raises:
            BotorchTensorDimensionError: Another shape.
            InputDataError: Not a number, or infinity.
        """
        if records.dim() != 2 or records.shape[1] != self.num_features + 1:
            raise BotorchTensorDimensionError(
                f"Records must be `n x {self.num_features + 1}`, got shape {tuple(records.shape)}."
            )
        if not bool(records.isfinite().all()):
            raise InputDataError(
                "Records must be finite, got NaN or infinity: no clipping bounds them."
            )

    def statistics(self, records: Tensor) -> Tensor:
        """The statistic of each record, clipped.

        Args:
            records: An `n x (m + 1)` tensor of `records`, finite; `n` may be 0.

        Returns:
            An `n x D` tensor.

        Raises:
            BotorchTensorDimensionError: Another shape.
            InputDataError: Not a number, or infinity.
        """
        self.check(records)
        records = records.detach().double()
        a = clip(records[:, :-1], 1.0)
        y = (records[:, -1:] - self.centre).clamp(-self.outcome_bound, self.outcome_bound)
        return self.products(a, y)

    def products(self, a: Tensor, y: Tensor) -> Tensor:
        """The statistics of features and outcomes that are bounded already. It bounds nothing.

        Args:
            a: An `n x m` tensor.
            y: An `n x 1` tensor, centred.

        Returns:
            An `n x D` tensor.
        """
        rows, columns = _upper(self.num_features)
        upper = a.index_select(1, rows).mul_(a.index_select(1, columns)).mul_(_SQRT2)
        return torch.cat([a.square(), upper, self.moment_scale * y * a], dim=1)

    def rounded_sum(self, records: Tensor, step: float) -> Tensor:
        """The sum of the statistics, each rounded to a lattice by itself: exact in any order.

        Args:
            records: An `n x (m + 1)` tensor of `records`, finite; `n` may be 0.
            step: The step of the lattice, a power of two.

        Returns:
            A `D` tensor of int64, in units of the step.
        """
        total = torch.zeros(self.dim, dtype=torch.int64)
        for chunk in records.split(max(1, _CHUNK_NUMBERS // self.dim)):
            total += (self.statistics(chunk) / step).round_().to(torch.int64).sum(dim=0)
        return total

    def gram_and_moment(
        self, values: Tensor, *, noise_var: float, outputscale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        r"""What a `Summary` over the feature map is made of, from a sum.

        With features :math:`\phi = s_0 a`: :math:`(s_0^2/\sigma^2) \sum aa^\top` and
        :math:`(s_0/\sigma^2) \sum ya`. After noise, the gram matrix is symmetric but need not be
        positive: see `models.repair`.

        Args:
            values: A `D` tensor, the sum.
            noise_var: The variance :math:`\sigma^2` of the observations' noise.
            outputscale: :math:`s_0^2`, what features were divided by the root of.

        Returns:
            An `m x m` and an `m x 1` tensor.
        """
        if values.shape != (self.dim,):
            raise BotorchTensorDimensionError(
                f"A sum has shape ({self.dim},), got {tuple(values.shape)}."
            )
        if not (noise_var > 0 and outputscale > 0):
            raise InputDataError(
                f"noise_var and outputscale must be positive, got {noise_var} and {outputscale}."
            )
        m = self.num_features
        diagonal, upper, moment = values.split([m, m * (m - 1) // 2, m])
        entries = torch.cat([diagonal, upper / _SQRT2])
        gram = entries.index_select(0, _places(m)).reshape(m, m)
        return gram.mul_(outputscale / noise_var), moment[:, None] * self._per_moment(
            noise_var, outputscale
        )

    def moment_noise_std(
        self, noise_std: float, *, noise_var: float, outputscale: float = 1.0
    ) -> float:
        """The standard deviation of the noise in what `gram_and_moment` returns as the moment.

        Args:
            noise_std: That of the noise in a number of the sum.
            noise_var: As there.
            outputscale: As there.
        """
        return noise_std * self._per_moment(noise_var, outputscale)

    def _per_moment(self, noise_var: float, outputscale: float) -> float:
        return math.sqrt(outputscale) / noise_var / self.moment_scale


class OverRecords:
    """What mechanisms over single records share: their statistic, and what a sum of it means."""

    num_features: int
    outcome_bound: float
    centre: float
    moment_scale: float

    @cached_property
    def statistic(self) -> RecordStatistic:
        """What one record adds to a sum."""
        return RecordStatistic(
            num_features=self.num_features,
            outcome_bound=self.outcome_bound,
            centre=self.centre,
            moment_scale=self.moment_scale,
        )

    @property
    def dim(self) -> int:
        """The numbers `D = m(m + 3)/2` of a sum."""
        return self.statistic.dim

    def records(self, features: Tensor, outcomes: Tensor) -> Tensor:
        """Records as the mechanism takes them, `n x (m + 1)`; see `RecordStatistic.records`."""
        return self.statistic.records(features, outcomes)

    def gram_and_moment(
        self, values: Tensor, *, noise_var: float, outputscale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """What a sum means for a Gaussian process; see `RecordStatistic.gram_and_moment`."""
        return self.statistic.gram_and_moment(values, noise_var=noise_var, outputscale=outputscale)


@lru_cache(maxsize=16)
def _places(m: int) -> Tensor:
    """Where the entries of a symmetric matrix, row by row, stand in its diagonal and upper part."""
    rows, columns = _upper(m)
    places = torch.arange(m).diag()
    places[rows, columns] = places[columns, rows] = m + torch.arange(len(rows))
    return places.flatten()


@lru_cache(maxsize=16)
def _upper(m: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of what lies above the diagonal; not to be written to."""
    rows, columns = torch.triu_indices(m, m, offset=1)
    return rows.contiguous(), columns.contiguous()
