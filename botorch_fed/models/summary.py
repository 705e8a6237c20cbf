r"""Additive statistics of private data, and the Gaussian posterior of their total.

One weight-space model serves random features, quadrature features and PITC. With whitened features
:math:`\phi` the weights have prior :math:`w \sim N(0, I)`, and agent `i` with data
:math:`(X_i, y_i)` contributes

.. math:: G_i = \Phi_i^\top R_i^{-1} \Phi_i, \qquad b_i = \Phi_i^\top R_i^{-1} (y_i - \mu),

where the noise block is :math:`R_i = \sigma^2 I` (Fourier features) or
:math:`R_i = K_{ii} - Q_{ii} + \sigma^2 I` (PITC on inducing points). Totals give
:math:`w \mid D \sim N(B^{-1} b, B^{-1})` with :math:`B = I + \sum_i G_i`, :math:`b = \sum_i b_i`.

::

    paper                                     here
    Sigma_t, nu_t of FTS (eqs. 2-3)           noise_var * B, weight posterior mean
    local summary of dPITC (eqs. 6-7)         gram, moment, whitened by the support's Cholesky
    global summary of dPITC (eqs. 8-9)        their sum, B = I + gram

References:
    * [Dai2020FTS]_ Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
      sampling. NeurIPS 2020.
    * [Chen2013]_ J. Chen et al. Parallel Gaussian process regression with low-rank covariance
      matrix approximations. UAI 2013.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Size, Tensor

from botorch_fed.errors import BasisMismatch
from botorch_fed.models.features import FeatureMap
from botorch_fed.models.numerics import as_double, check_finite, cholesky, solve_rows
from botorch_fed.rng import Generator, fresh

CHUNK = 4096  # rows of features held in memory at once
SQRT2 = math.sqrt(2.0)


@dataclass(frozen=True, eq=False)
class Summary:
    r"""The statistic of one agent's data, or the sum of several agents'.

    Attributes:
        gram: `batch_shape x M x M`, :math:`\Phi^\top R^{-1} \Phi`.
        moment: `batch_shape x M x 1`, :math:`\Phi^\top R^{-1} (y - \mu)`.
        basis: The feature map's fingerprint; summaries over different bases cannot be added.
        num_data: Number of observations. Local: never packed, `None` after unpacking.
        square: `batch_shape`, :math:`(y - \mu)^\top R^{-1} (y - \mu)`. Local: never packed.
        log_det: `batch_shape`, :math:`\log |R|`. Local: never packed.

    Example:
        >>> total = summarize(phi, X1, Y1, noise_var=0.01) + summarize(phi, X2, Y2, noise_var=0.01)
        >>> model = BasisGP.from_summary(total, feature_map=phi)
    """

    gram: Tensor
    moment: Tensor
    basis: str
    num_data: int | None = None
    square: Tensor | None = None
    log_det: Tensor | None = None

    def __post_init__(self) -> None:
        M = self.gram.shape[-1]
        if self.gram.dim() < 2 or self.gram.shape[-2] != M or self.moment.shape[-2:] != (M, 1):
            raise BotorchTensorDimensionError(
                "A summary needs gram `batch_shape x M x M` and moment `batch_shape x M x 1`, got "
                f"{tuple(self.gram.shape)} and {tuple(self.moment.shape)}."
            )
        if self.gram.dtype != torch.float64 or self.moment.dtype != torch.float64:
            raise InputDataError(
                f"A summary must be float64, got {self.gram.dtype} and {self.moment.dtype}: "
                "float32 loses up to a third of the posterior mean."
            )

    @classmethod
    def zero(cls, feature_map: FeatureMap) -> Summary:
        """The summary of no data, the neutral element of addition."""
        M = feature_map.num_features
        zeros = torch.zeros(M, M + 1, dtype=torch.float64)
        return cls(zeros[:, :M], zeros[:, M:], feature_map.fingerprint, 0, zeros[0, 0], zeros[0, 0])

    @property
    def num_features(self) -> int:
        return self.gram.shape[-1]

    @property
    def batch_shape(self) -> Size:
        return torch.broadcast_shapes(self.gram.shape[:-2], self.moment.shape[:-2])

    def __add__(self, other: Summary) -> Summary:
        if not isinstance(other, Summary):
            return NotImplemented
        check_basis(other, self.basis)
        return Summary(
            gram=self.gram + other.gram,
            moment=self.moment + other.moment,
            basis=self.basis,
            num_data=_plus(self.num_data, other.num_data),
            square=_plus(self.square, other.square),
            log_det=_plus(self.log_det, other.log_det),
        )

    def __sub__(self, other: Summary) -> Summary:
        """A total without one of its summands, which is not verified to be one."""
        if not isinstance(other, Summary):
            return NotImplemented
        check_basis(other, self.basis)
        return Summary(
            gram=self.gram - other.gram,
            moment=self.moment - other.moment,
            basis=self.basis,
            num_data=_minus(self.num_data, other.num_data),
            square=_minus(self.square, other.square),
            log_det=_minus(self.log_det, other.log_det),
        )

    def __radd__(self, other: object) -> Summary:
        return self if other == 0 else NotImplemented  # for the built-in sum()

    def scaled(self, factor: float | Tensor) -> Summary:
        r"""The summary of the same data with every noise block divided by a factor.

        Tempering: :math:`R / f` multiplies gram, moment and square by `f`. A factor
        :math:`\sigma^2 / \sigma'^2` changes the noise variance of iid noise exactly.
        """
        factor = torch.as_tensor(factor, dtype=torch.float64)
        if not bool((torch.isfinite(factor) & (factor > 0)).all()):
            raise InputDataError(f"The factor must be positive and finite, got {factor}.")
        log_det = self.log_det
        if log_det is not None and self.num_data is not None:
            log_det = log_det - self.num_data * factor.log()
        return replace(
            self,
            gram=self.gram * factor[..., None, None],
            moment=self.moment * factor[..., None, None],
            square=None if self.square is None else self.square * factor,
            log_det=log_det,
        )

    def outputs(self, idcs: list[int]) -> Summary:
        """The summaries of some outputs; outputs are the last batch dimension."""
        return replace(
            self,
            gram=_pick(self.gram, idcs),
            moment=_pick(self.moment, idcs),
            square=None if self.square is None else _pick(self.square, idcs, -1),
            log_det=None if self.log_det is None else _pick(self.log_det, idcs, -1),
        )

    def pack(self) -> Tensor:
        r"""The statistic as a vector without local fields, `batch_shape x M(M + 3)/2`.

        The diagonal, then the upper triangle row by row times :math:`\sqrt2`, then the moment: the
        Euclidean norm of the vector is the Frobenius norm of the statistic, to which clipping and
        noise are calibrated.
        """
        rows, columns = _upper(self.num_features)
        gram = self.gram.expand(*self.batch_shape, *self.gram.shape[-2:])
        moment = self.moment.expand(*self.batch_shape, *self.moment.shape[-2:])
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        return torch.cat([diagonal, SQRT2 * gram[..., rows, columns], moment.squeeze(-1)], dim=-1)

    @classmethod
    def unpack(cls, vector: Tensor, *, basis: str) -> Summary:
        """Inverse of `pack`, symmetric by construction.

        Args:
            vector: A `batch_shape x M(M + 3)/2` tensor of finite numbers.
            basis: Fingerprint of the sender's map.
        """
        vector = as_double(vector, "vector")
        size = vector.shape[-1] if vector.dim() else 0
        M = (math.isqrt(9 + 8 * size) - 3) // 2
        if size == 0 or M * (M + 3) // 2 != size:
            raise BotorchTensorDimensionError(
                f"A packed summary has M(M + 3)/2 numbers for some M >= 1, got {size}."
            )
        check_finite(vector, "vector")
        diagonal, upper, moment = vector.split([M, M * (M - 1) // 2, M], dim=-1)
        rows, columns = _upper(M)
        gram = torch.diag_embed(diagonal)
        gram[..., rows, columns] = upper / SQRT2
        gram[..., columns, rows] = upper / SQRT2
        return cls(gram, moment.unsqueeze(-1).clone(), basis)


def check_basis(summary: Summary, basis: str) -> None:
    """Raise `BasisMismatch` unless a summary was made over the basis with this fingerprint."""
    if summary.basis != basis:
        raise BasisMismatch(
            f"Cannot combine summaries over different bases ({summary.basis[:8]}… and "
            f"{basis[:8]}…): build every feature map from the same tensors "
            "(feature_map_from_tensors), and compare fingerprints before summarising."
        )


def summarize(
    feature_map: FeatureMap,
    X: Tensor,
    Y: Tensor,
    *,
    noise_var: float | Tensor,
    mean: float | Tensor = 0.0,
    noise: Literal["block", "iid"] = "block",
) -> Summary:
    r"""Sufficient statistic of the data for the weights of a feature map.

    With iid noise (maps without residual always have it) memory beyond the data is constant in `n`,
    and large data can be streamed: ``summarize(first) + summarize(rest)`` is the summary of both.
    With block noise this sum is the summary of two agents: `LocalBlock.extend` adds data to one
    agent.

    Args:
        feature_map: The shared basis.
        X: A `batch_shape x n x d` tensor of observed points (`n` may be 0).
        Y: A `batch_shape x n x 1` tensor of observations.
        noise_var: Observation noise *variance*: a positive number, or a tensor that broadcasts to
            `batch_shape x n x 1`.
        mean: The public constant mean :math:`\mu`: a number, or a tensor that broadcasts to
            `batch_shape x n x 1`.
        noise: ``"block"`` adds the map's residual to the noise block: PITC, exact for the data of
            one agent. ``"iid"`` ignores it (DTC): then each record's contribution is bounded,
            which record-level privacy needs. The two are equal for Fourier features.

    Returns:
        The `Summary`, with its local fields.
    """
    if noise not in ("block", "iid"):
        raise InputDataError(f'noise must be "block" or "iid", got {noise!r}.')
    if noise == "block" and feature_map.has_residual:
        return LocalBlock.from_data(feature_map, X, Y, noise_var=noise_var, mean=mean).summary
    X, Y, variance = _checked_data(feature_map, X, Y, noise_var)
    residuals = Y - mean
    n = X.shape[-2]
    if variance.shape[-2] == 1:  # one noise level: scale the sums, not the rows
        gram, moment = feature_sums(feature_map, X, residuals)
        gram, moment = gram / variance, moment / variance
    else:
        gram, moment = feature_sums(feature_map, X, residuals, weights=1 / variance)
    return Summary(
        gram=gram,
        moment=moment,
        basis=feature_map.fingerprint,
        num_data=n,
        square=(residuals.square() / variance).sum(dim=(-2, -1)),
        log_det=variance.log().expand(*variance.shape[:-2], n, 1).sum(dim=(-2, -1)),
    )


def feature_sums(
    feature_map: FeatureMap, X: Tensor, columns: Tensor, *, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""The sums :math:`\Phi^\top W \Phi` and :math:`\Phi^\top W C` in memory constant in `n`.

    Args:
        feature_map: The shared basis.
        X: A `batch_shape x n x d` tensor of points.
        columns: A `batch_shape x n x k` tensor.
        weights: A `batch_shape x n x 1` tensor of positive weights; default one.

    Returns:
        A `batch_shape x M x M` and a `batch_shape x M x k` tensor.
    """
    M, k = feature_map.num_features, columns.shape[-1]
    gram = X.new_zeros(*X.shape[:-2], M, M)
    products = X.new_zeros(*_common_batch(X, columns), M, k)
    for start in range(0, X.shape[-2], CHUNK):
        rows = slice(start, start + CHUNK)
        Phi = feature_map(X[..., rows, :])
        feature_map.check_domain(X[..., rows, :])
        weighted = Phi if weights is None else Phi * weights[..., rows, :]
        gram = gram + weighted.mT @ Phi
        products = products + weighted.mT @ columns[..., rows, :]
    return (gram if weights is None else 0.5 * (gram + gram.mT)), products


@dataclass(frozen=True, eq=False)
class LocalBlock:
    r"""One agent's PITC block in factored form, which a new observation extends.

    Attributes:
        feature_map: The shared basis.
        X: `batch_shape x n x d`, the agent's points.
        features: `batch_shape x n x M`, their features :math:`\Phi`.
        chol: `batch_shape x n x n`, :math:`L` of :math:`C = K - Q + \sigma^2 I = LL^\top`.
        half_features: `batch_shape x n x M`, :math:`W = L^{-1}\Phi`.
        half_residuals: `batch_shape x n x 1`, :math:`r = L^{-1}(y - \mu)`.
        summary: :math:`W^\top W` and :math:`W^\top r`.
    """

    feature_map: FeatureMap
    X: Tensor
    features: Tensor
    chol: Tensor
    half_features: Tensor
    half_residuals: Tensor
    summary: Summary

    @classmethod
    def from_data(
        cls,
        feature_map: FeatureMap,
        X: Tensor,
        Y: Tensor,
        *,
        noise_var: float | Tensor,
        mean: float | Tensor = 0.0,
    ) -> LocalBlock:
        r"""Factorise a block; arguments as in `summarize`. Costs :math:`O(n^3)`."""
        X, Y, variance = _checked_data(feature_map, X, Y, noise_var)
        n, M = X.shape[-2], feature_map.num_features
        empty = cls(
            feature_map,
            X[..., :0, :],
            X.new_zeros(*X.shape[:-2], 0, M),
            X.new_zeros(*X.shape[:-2], 0, 0),
            X.new_zeros(*X.shape[:-2], 0, M),
            Y[..., :0, :],
            Summary.zero(feature_map),
        )
        return empty._extended(X, Y - mean, variance) if n else empty

    def extend(
        self,
        X: Tensor,
        Y: Tensor,
        *,
        noise_var: float | Tensor,
        mean: float | Tensor = 0.0,
    ) -> LocalBlock:
        r"""The block with further observations, in :math:`O(n^2 + nM)` for each.

        Args:
            X: A `batch_shape x n' x d` tensor of new points.
            Y: A `batch_shape x n' x 1` tensor of new observations.
            noise_var: As in `summarize`.
            mean: As in `summarize`.
        """
        X, Y, variance = _checked_data(self.feature_map, X, Y, noise_var)
        return self._extended(X, Y - mean, variance) if X.shape[-2] else self

    def outputs(self, idcs: list[int]) -> LocalBlock:
        """The blocks of some outputs; outputs are the last batch dimension."""
        return LocalBlock(
            feature_map=self.feature_map,
            X=_pick(self.X, idcs),
            features=_pick(self.features, idcs),
            chol=_pick(self.chol, idcs),
            half_features=_pick(self.half_features, idcs),
            half_residuals=_pick(self.half_residuals, idcs),
            summary=self.summary.outputs(idcs),
        )

    def _extended(self, X: Tensor, residuals: Tensor, variance: Tensor) -> LocalBlock:
        k, n = X.shape[-2], self.X.shape[-2]
        Phi = self.feature_map(X)
        self.feature_map.check_domain(X)
        noise = torch.diag_embed(variance.squeeze(-1).expand(*variance.shape[:-2], k))
        corner = self.feature_map.residual(X, Phi1=Phi) + noise
        half_features, half_residuals = Phi, residuals
        cross = None
        if n:
            # [C, c; c', s] = [L, 0; l', g] [L, 0; l', g]': a bordered Cholesky factor.
            border = self.feature_map.residual(self.X, X, Phi1=self.features, Phi2=Phi)
            cross = solve_rows(self.chol, border.mT)  # l', ... x k x n
            corner = corner - cross @ cross.mT
            half_features = Phi - cross @ self.half_features
            half_residuals = residuals - cross @ self.half_residuals
        what = f"the noise block of {n + k} observations"
        g = cholesky(corner, what)
        half_features = torch.linalg.solve_triangular(g, half_features, upper=False)
        half_residuals = torch.linalg.solve_triangular(g, half_residuals, upper=False)
        old = self.summary
        summary = Summary(
            gram=old.gram + half_features.mT @ half_features,
            moment=old.moment + half_features.mT @ half_residuals,
            basis=old.basis,
            num_data=n + k,
            square=_plus(old.square, half_residuals.square().sum(dim=(-2, -1))),
            log_det=_plus(old.log_det, 2 * g.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1)),
        )
        return LocalBlock(
            feature_map=self.feature_map,
            X=_append(self.X, X),
            features=_append(self.features, Phi),
            chol=g if cross is None else _bordered(self.chol, cross, g),
            half_features=_append(self.half_features, half_features),
            half_residuals=_append(self.half_residuals, half_residuals),
            summary=summary,
        )


@dataclass(frozen=True, eq=False)
class WeightPosterior:
    r"""The Gaussian of the weights, :math:`w \sim N(B^{-1}b, B^{-1})`, by a factor of `B`.

    A rank-`k` update keeps the factor and adds `k` columns, so that many fantasies share one
    factorisation: with :math:`T = L^{-1} W^\top` and :math:`DD^\top = I + T^\top T`,

    .. math:: (B + W^\top W)^{-1} = L^{-\top} S S^\top L^{-1}, \qquad
              S = I - T D^{-\top} (D + I)^{-1} T^\top.

    Attributes:
        chol: `batch_shape x M x M`, lower :math:`L` of :math:`B = LL^\top`.
        half_mean: `batch_shape x M x 1`, :math:`L^{-1} b`.
        columns: `batch_shape x M x k`, :math:`T` of the update; None without an update.
        residuals: `batch_shape x k x 1`, the whitened observations of the update.
        inner: `batch_shape x k x k`, :math:`D` of the update.
    """

    chol: Tensor
    half_mean: Tensor
    columns: Tensor | None = None
    residuals: Tensor | None = None
    inner: Tensor | None = None

    @classmethod
    def from_total(cls, total: Summary) -> WeightPosterior:
        """Posterior of the weights given the total of all summaries."""
        eye = torch.eye(total.num_features, dtype=total.gram.dtype, device=total.gram.device)
        what = "the posterior precision of the weights, I + gram"
        L = cholesky(eye + total.gram, what)
        half = solve_rows(L, total.moment.mT).mT
        return cls(L, half)

    def updated(self, half_features: Tensor, half_residuals: Tensor) -> WeightPosterior:
        r"""The posterior given `k` further whitened observations.

        Args:
            half_features: `batch_shape x k x M`, :math:`W = R^{-1/2} \Phi`.
            half_residuals: `batch_shape x k x 1`, :math:`R^{-1/2} (y - \mu)`; it may have
                further leading dimensions, which share the factorisation.
        """
        columns = solve_rows(self.chol, half_features).mT
        if self.columns is not None and self.residuals is not None:
            columns = _append(self.columns.mT, columns.mT).mT
            half_residuals = _append(self.residuals, half_residuals)
        M, k = columns.shape[-2:]
        if 2 * k <= M:
            eye = torch.eye(k, dtype=columns.dtype, device=columns.device)
            what = "the innovation covariance of a rank-k update"
            D = cholesky(eye + columns.mT @ columns, what)
            return WeightPosterior(self.chol, self.half_mean, columns, half_residuals, D)
        # Many columns: factorise again, B + W'W = L (I + T T') L'.
        eye = torch.eye(M, dtype=columns.dtype, device=columns.device)
        refactor = cholesky(eye + columns @ columns.mT, "a rank-k update of the weight precision")
        half = solve_rows(refactor, (self.half_mean + columns @ half_residuals).mT).mT
        return WeightPosterior(self.chol @ refactor, half)

    def outputs(self, idcs: list[int]) -> WeightPosterior:
        """The posteriors of some outputs; outputs are the last batch dimension."""
        return WeightPosterior(
            chol=_pick(self.chol, idcs),
            half_mean=_pick(self.half_mean, idcs),
            columns=None if self.columns is None else _pick(self.columns, idcs),
            residuals=None if self.residuals is None else _pick(self.residuals, idcs),
            inner=None if self.inner is None else _pick(self.inner, idcs),
        )

    @property
    def _whitened_mean(self) -> Tensor:
        r""":math:`L^\top` times the mean, `batch_shape x M x 1`."""
        if self.columns is None or self.residuals is None or self.inner is None:
            return self.half_mean
        surprise = self.residuals - self.columns.mT @ self.half_mean
        once = solve_rows(self.inner, surprise.mT)
        return self.half_mean + self.columns @ solve_rows(self.inner.mT, once, upper=True).mT

    def _times_root(self, rows: Tensor, *, transposed: bool = False) -> Tensor:
        """Rows times `S`, or times its transpose."""
        if self.columns is None or self.inner is None:
            return rows
        D = self.inner
        D_plus = D + torch.eye(D.shape[-1], dtype=D.dtype, device=D.device)
        inner = rows @ self.columns
        if transposed:  # rows T (D + I)^-T D^-1 T'
            inner = solve_rows(D.mT, solve_rows(D_plus, inner), upper=True)
        else:  # rows T D^-T (D + I)^-1 T'
            inner = solve_rows(D_plus.mT, solve_rows(D, inner), upper=True)
        return rows - inner @ self.columns.mT

    def predict(self, Phi: Tensor) -> tuple[Tensor, Tensor]:
        r"""Mean and a root of the covariance of :math:`\Phi w`.

        Args:
            Phi: A `batch_shape x q x M` tensor of features.

        Returns:
            `… x q x 1` means and `… x q x M` roots `U`; the covariance is :math:`UU^\top`.
        """
        half = solve_rows(self.chol, Phi)
        return half @ self._whitened_mean, self._times_root(half)

    @property
    def mean(self) -> Tensor:
        """Posterior mean of the weights, `batch_shape x M`."""
        return solve_rows(self.chol.mT, self._whitened_mean.mT, upper=True).squeeze(-2)

    def sample(
        self,
        sample_shape: Size = torch.Size(),  # noqa: B008 - immutable
        *,
        scale: float = 1.0,
        generator: Generator | None = None,
    ) -> Tensor:
        r"""Draws :math:`B^{-1}b + \beta L^{-\top} z`, the primal form.

        Args:
            sample_shape: Shape of the draws.
            scale: :math:`\beta_t`: scales the deviation from the mean, not the mean.
            generator: The stream of random numbers; by default PyTorch's global generator seeds
                one.

        Returns:
            A `sample_shape x batch_shape x M` tensor.
        """
        generator = fresh() if generator is None else generator
        batch_shape = self._whitened_mean.shape[:-2]
        z = generator.normal(*sample_shape, *batch_shape, 1, self.chol.shape[-1])
        z = z.to(self.chol.device)
        z = self._times_root(z, transposed=True)
        return self.mean + scale * solve_rows(self.chol.mT, z, upper=True).squeeze(-2)


def sample_weights_dual(
    feature_map: FeatureMap,
    X: Tensor,
    Y: Tensor,
    *,
    noise_var: float | Tensor,
    mean: float | Tensor = 0.0,
    sample_shape: Size = torch.Size(),  # noqa: B008 - immutable
    scale: float = 1.0,
    generator: Generator | None = None,
) -> Tensor:
    r"""Draws of the weight posterior in :math:`O(n^3)`: cheaper than the primal form for n < M.

    .. math:: w = w_0 + \Phi^\top (\Phi\Phi^\top + R)^{-1} (y - \mu - \Phi w_0 - R^{1/2} e),

    which has exactly the law of `WeightPosterior.sample`.

    Args:
        feature_map: The shared basis.
        X: An `n x d` tensor of observed points.
        Y: An `n x 1` tensor of observations.
        noise_var: As in `summarize`.
        mean: As in `summarize`.
        sample_shape: Shape of the draws.
        scale: :math:`\beta_t`: scales the deviation from the mean, not the mean.
        generator: The stream of random numbers; by default PyTorch's global generator seeds one.

    Returns:
        A `sample_shape x M` tensor.
    """
    generator = fresh() if generator is None else generator
    X, Y, variance = _checked_data(feature_map, X, Y, noise_var)
    if X.dim() != 2:
        raise BotorchTensorDimensionError(f"X must be `n x d`, got shape {tuple(X.shape)}.")
    n, M = X.shape[0], feature_map.num_features
    prior = generator.normal(*sample_shape, M)
    e = generator.normal(*sample_shape, n)
    Phi = feature_map(X)
    feature_map.check_domain(X)
    block = torch.diag_embed(variance.squeeze(-1).expand(n)) + feature_map.residual(X)
    noise = e @ cholesky(block, f"the noise block of {n} observations").mT
    L = cholesky(Phi @ Phi.mT + block, f"the covariance of {n} observations")
    y = (Y - mean).squeeze(-1)

    # Mean and deviation are separate: `scale` applies to the deviation only.
    def pulled(targets: Tensor) -> Tensor:
        """Phi' (Phi Phi' + R)^-1 targets, for targets in rows."""
        return solve_rows(L.mT, solve_rows(L, targets.unsqueeze(-2)), upper=True).squeeze(-2) @ Phi

    deviation = prior - pulled(prior @ Phi.mT + noise)
    return pulled(y) + scale * deviation


def log_evidence(total: Summary, *, given: Summary | None = None) -> Tensor:
    r"""Log marginal likelihood of the data behind a total, from summaries alone.

    .. math:: -\tfrac12 \bigl[ \sum_i (\log|R_i| + r_i^\top r_i + n_i \log 2\pi)
              + \log|B| - b^\top B^{-1} b \bigr].

    Args:
        total: A sum of summaries with their local fields. The caller protects these fields: a
            hyperparameter chosen by the evidence of several agents is a release.
        given: Summaries that condition the prior and are not scored: the result is the evidence of
            ``total - given`` given them. They need no local fields.

    Returns:
        A `batch_shape` tensor.
    """
    n, square, log_det = _local_fields(total)
    fit, volume = _evidence_terms(total)
    if given is not None:
        check_basis(given, total.basis)
        given_fit, given_volume = _evidence_terms(given)
        fit, volume = fit - given_fit, volume - given_volume
    return -0.5 * (n * math.log(2 * math.pi) + log_det + square + volume - fit)


def profiled_evidence(total: Summary) -> tuple[Tensor, Tensor]:
    r"""Log marginal likelihood maximised over one common variance factor, in closed form.

    Weights :math:`w \sim N(0, s^2 I)` and noise blocks :math:`s^2 R_i`: the map and the blocks
    determine the shape of the model, the data its scale. With `n` observations in total

    .. math:: \hat s^2 = \frac1n \Bigl( \sum_i r_i^\top r_i - b^\top B^{-1} b \Bigr),
              \qquad \log p = -\tfrac12 \bigl[ n \log(2 \pi \hat s^2) + n
              + \sum_i \log|R_i| + \log|B| \bigr],

    which every agent computes from the total alone. Multiplying all observations by a factor
    multiplies :math:`\hat s` by it and does not change the order of models.

    Args:
        total: A sum of summaries with their local fields, as in `log_evidence`.

    Returns:
        The log evidence and :math:`\hat s^2`, two `batch_shape` tensors. If the unexplained part is
        zero in float64, or negative because of noise in the statistics, the evidence is minus
        infinity, so that such a model is never chosen, and the factor is a tiny positive number.
    """
    n, square, log_det = _local_fields(total)
    if n < 1:
        raise InputDataError(f"Expected a total with observations, got num_data = {n}.")
    fit, volume = _evidence_terms(total)
    unexplained = square - fit
    limits = torch.finfo(torch.float64)
    floor = (total.num_features * limits.eps * square.abs()).clamp_min(limits.tiny)
    scale = torch.maximum(unexplained, floor) / n
    log_p = -0.5 * (n * (2 * math.pi * scale).log() + n + log_det + volume)
    return torch.where(unexplained > floor, log_p, -math.inf), scale


def _local_fields(total: Summary) -> tuple[int, Tensor, Tensor]:
    if total.num_data is None or total.square is None or total.log_det is None:
        raise InputDataError(
            "The evidence needs the local fields num_data, square and log_det, which a packed "
            "summary does not have: evaluate it at the agent, or release the fields through a "
            "mechanism."
        )
    return total.num_data, total.square, total.log_det


def _evidence_terms(total: Summary) -> tuple[Tensor, Tensor]:
    posterior = WeightPosterior.from_total(total)
    fit = posterior.half_mean.square().sum(dim=(-2, -1))
    return fit, 2 * posterior.chol.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1)


def _checked_data(
    feature_map: FeatureMap, X: Tensor, Y: Tensor, noise_var: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    X, Y = as_double(X, "X"), as_double(Y, "Y")
    if X.dim() < 2 or X.shape[-1] != feature_map.input_dim:
        raise BotorchTensorDimensionError(
            f"X must be `batch_shape x n x {feature_map.input_dim}` for this feature map, got "
            f"shape {tuple(X.shape)}."
        )
    if Y.dim() < 2 or Y.shape[-1] != 1 or Y.shape[-2] != X.shape[-2]:
        raise BotorchTensorDimensionError(
            f"Y must be `batch_shape x {X.shape[-2]} x 1` to go with X of shape {tuple(X.shape)}, "
            f"got shape {tuple(Y.shape)}."
        )
    check_finite(X, "X")
    check_finite(Y, "Y")
    return X, Y, checked_noise(noise_var, X.shape[-2])


def checked_noise(noise_var: float | Tensor, n: int) -> Tensor:
    """A positive noise variance as a `… x n x 1` or `… x 1 x 1` tensor."""
    if isinstance(noise_var, float) and 0 < noise_var < math.inf:
        return torch.full((1, 1), noise_var, dtype=torch.float64)
    variance = torch.as_tensor(noise_var, dtype=torch.float64)
    if variance.dim() == 0:
        variance = variance.reshape(1, 1)
    if variance.dim() < 2 or variance.shape[-1] != 1 or variance.shape[-2] not in (1, n):
        raise BotorchTensorDimensionError(
            f"noise_var must be a number or a tensor `… x {n} x 1`, got shape "
            f"{tuple(variance.shape)}."
        )
    bad = ~(torch.isfinite(variance) & (variance > 0))
    if bool(bad.any()):
        raise InputDataError(
            f"noise_var must be positive and finite (a variance, not a standard deviation); "
            f"{int(bad.sum())} of {variance.numel()} values are not, the smallest is "
            f"{float(variance.min())}. For noise-free data give a small value such as 1e-6."
        )
    return variance


def _plus(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


def _minus(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a - b


def _upper(M: int) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(M, M, offset=1)
    return rows, columns


def _pick(values: Tensor, idcs: list[int], dim: int = -3) -> Tensor:
    """Values of some outputs, or the value that all outputs share."""
    if values.dim() < -dim or values.shape[dim] == 1:
        return values
    return values.index_select(dim, torch.tensor(idcs, device=values.device))


def _common_batch(*tensors: Tensor) -> Size:
    first = tensors[0].shape[:-2]
    if all(tensor.shape[:-2] == first for tensor in tensors):
        return first  # torch.broadcast_shapes costs as much as a small solve
    return torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))


def _append(old: Tensor, new: Tensor) -> Tensor:
    batch = _common_batch(old, new)
    parts = [part.expand(*batch, *part.shape[-2:]) for part in (old, new)]
    return torch.cat(parts, dim=-2)


def _bordered(L: Tensor, cross: Tensor, corner: Tensor) -> Tensor:
    n, k = L.shape[-1], corner.shape[-1]
    result = L.new_empty(*_common_batch(L, cross, corner), n + k, n + k)
    result[..., :n, :n] = L
    result[..., :n, n:] = 0
    result[..., n:, :n] = cross
    result[..., n:, n:] = corner
    return result
