r"""`PartiallyIndependentGP`: own data exactly, everybody else's through their summaries.

PITC predicts every point as if it lay in a block of its own, so that an agent's prediction between
two of its own observations knows of them only what the shared basis can carry. PIC [Snelson2007]_
puts the point into the block of the agent that asks: with the weights as others leave them,

.. math:: w \sim N(B_o^{-1} b_o, B_o^{-1}), \quad B_o = I + \sum_{j \ne i} G_j, \qquad
          f(x) = \mu + \phi(x)^\top w + g(x), \quad g \sim GP(0, r),

where `r` is what the map misses; own data :math:`(X, y)` then condition both `w` and `g`. With
:math:`C = r(X, X) + \sigma^2 I = LL^\top`, :math:`W = L^{-1} \Phi` and
:math:`v = L^{-1}(y - \mu)`, the agent's `LocalBlock`, and with :math:`s(x) = L^{-1} r(X, x)`,

.. math:: f(x) \mid w, y \sim N\bigl(\mu + (\phi(x) - W^\top s(x))^\top w + s(x)^\top v,\;
          r(x, x') - s(x)^\top s(x')\bigr),

and the weights given everything are those of PITC: the total of all summaries, own block included.
So one prediction costs :math:`O(n(n + M) + M^2)`, nothing else is received than for PITC, and the
own step needs no other message. For maps without residual PIC *is* PITC; without received summaries
it is the exact Gaussian process of the agent's data.

References:
    * [Snelson2007]_ E. Snelson, Z. Ghahramani. Local and global sparse Gaussian process
      approximations. AISTATS 2007.
    * [Chen2013]_ J. Chen et al. Parallel Gaussian process regression with low-rank covariance
      matrix approximations. UAI 2013.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.sampling.pathwise.paths import PathDict
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Size, Tensor

from botorch_fed.errors import NumericalError
from botorch_fed.models.basis_gp import BasisGP
from botorch_fed.models.features import FeatureMap
from botorch_fed.models.numerics import as_double, solve_rows
from botorch_fed.models.paths import (
    _draw_matheron_paths_basis_gp,
    _joined,
    _KernelSections,
    linear_path,
)
from botorch_fed.models.summary import LocalBlock, Summary, summarize
from botorch_fed.rng import Generator, fresh


class PartiallyIndependentGP(BasisGP):
    r"""A Gaussian process that has own data exactly and the others' by their summaries.

    A `BasisGP` in everything but the prediction between own observations: construction, received
    summaries, new observations, fantasies and fitting are inherited. `summaries` are those of
    *others*; own data must not be among them, or they count twice. Where only the total of all
    agents is known, `from_total` takes the own part out of it.

    Example:
        >>> model = PartiallyIndependentGP.from_total(
        ...     train_X, train_Y, total=total, feature_map=phi, noise_var=0.01
        ... )
        >>> candidate, _ = optimize_acqf(LogExpectedImprovement(model, best_f), bounds, …)
    """

    @classmethod
    def from_total(
        cls,
        train_X: Tensor,
        train_Y: Tensor,
        *,
        total: Summary,
        feature_map: FeatureMap,
        noise_var: float | Tensor,
        own: Summary | None = None,
        mean: float = 0.0,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> Self:
        r"""The model of an agent that received the sum of all summaries, its own among them.

        Args:
            train_X: An `n x d` tensor of own points, all of them.
            train_Y: An `n x 1` tensor of own observations.
            total: The sum of all agents' summaries.
            feature_map: The basis of the summaries.
            noise_var: The noise variance of own data: a number, or an `n x 1` tensor.
            own: What this agent contributed to the total; default the summary of `train_X` and
                `train_Y` with block noise. Needed where it contributed anything else: fewer
                observations, other noise, nothing (`Summary.zero`).
            mean: The constant mean on which all summaries were centred.
            input_transform: As in the constructor; it must be public.
            outcome_transform: As in the constructor; it must be public.

        Raises:
            NumericalError: The total less the own part is no sum of squares, beyond what rounding
                to a public grid explains: the total does not contain that part, or noise was
                added to it.
        """
        noise = noise_var if isinstance(noise_var, Tensor) and noise_var.dim() >= 2 else None
        if own is None:
            X, Y, variance = train_X, train_Y, noise_var
            if input_transform is not None:
                X = input_transform.preprocess_transform(as_double(X, "train_X"))
            if outcome_transform is not None:
                Y, transformed = outcome_transform(as_double(Y, "train_Y"), noise, X=X)
                variance = noise_var if transformed is None else transformed
            own = summarize(feature_map, X, Y, noise_var=variance, mean=mean)
        return cls(
            train_X,
            train_Y,
            None if noise is None else noise.expand(train_Y.shape),
            feature_map=feature_map,
            noise_var=noise_var if noise is None else None,
            summaries=[_others(total, own)],
            mean=mean,
            input_transform=input_transform,
            outcome_transform=outcome_transform,
        )

    def forward(self, X: Tensor) -> MultivariateNormal:
        """`prior`: own observations are one block, so that `loo_cv` scores this very model."""
        return self.prior(X)

    def __call__(self, X: Tensor) -> MultivariateNormal:
        """The prior in train mode, the posterior in eval mode, both in the transformed space."""
        if self.training:
            return self.forward(X)
        cache, X = self._predictive(), self._common_points(X)
        if cache.block is None or cache.block.X.shape[-2] == 0:
            return self._joint(X, cache.feature_map, cache.weights)
        Phi = cache.feature_map(X)
        cache.feature_map.check_domain(X)
        S = _half_residual(cache.block, X, Phi)  # s(x)' in rows, batch_shape x m x q x n
        effective = Phi.unsqueeze(-3) - S @ cache.block.half_features
        location, U = cache.weights.predict(effective)
        location = (location + S @ cache.block.half_residuals + self._mean.detach()).squeeze(-1)
        missed = cache.feature_map.residual(X, Phi1=Phi).unsqueeze(-3) - S @ S.mT
        covariance = U @ U.mT + missed
        batch_shape = torch.broadcast_shapes(location.shape[:-1], covariance.shape[:-2])
        q = X.shape[-2]
        location, covariance = (
            location.expand(*batch_shape, q),
            covariance.expand(*batch_shape, q, q),
        )
        if self.num_outputs == 1:
            location, covariance = location.squeeze(-2), covariance.squeeze(-3)
        return MultivariateNormal(location, to_linear_operator(covariance))


def _others(total: Summary, own: Summary) -> Summary:
    """A total without the own part, or `NumericalError`.

    Rounding of the summands may leave eigenvalues of the gram matrix slightly below zero. They
    stay: own data put that part of the total back.
    """
    others = total - own
    eye = torch.eye(others.num_features, dtype=torch.float64, device=others.gram.device)
    # The prior of the weights has precision 1, which rounding moves by far less than a half.
    _, info = torch.linalg.cholesky_ex(others.gram + 0.5 * eye)
    if not bool(info.any()):
        return others
    finite = bool(others.gram.isfinite().all())
    smallest = float(torch.linalg.eigvalsh(others.gram).min()) if finite else math.nan
    raise NumericalError(
        f"The total without the own summary is no sum of squares: the smallest eigenvalue of its "
        f"{total.num_features} x {total.num_features} gram matrix is {smallest:.3e}. Pass as `own` "
        "exactly what was contributed to this total. Where noise was added to the total, build "
        "the model with summaries=[repair_total(total - own)]."
    )


def _half_residual(block: LocalBlock, X: Tensor, Phi: Tensor) -> Tensor:
    r"""Rows :math:`s(x)^\top = r(x, X) L^{-\top}`, `batch_shape x m x q x n`."""
    feature_map, n = block.feature_map, block.X.shape[-2]
    if math.prod(block.X.shape[:-2]) == 1:  # one matrix for all points of all batches
        flat, flat_Phi = X.reshape(-1, X.shape[-1]), Phi.reshape(-1, Phi.shape[-1])
        own, own_Phi = block.X.reshape(n, -1), block.features.reshape(n, -1)
        cross = feature_map.residual(flat, own, Phi1=flat_Phi, Phi2=own_Phi)
        cross = cross.reshape(*X.shape[:-2], 1, X.shape[-2], n)
    else:
        cross = feature_map.residual(
            X.unsqueeze(-3), block.X, Phi1=Phi.unsqueeze(-3), Phi2=block.features
        )
    return solve_rows(block.chol, cross)


@DrawMatheronPaths.register(PartiallyIndependentGP)  # type: ignore[untyped-decorator]
def _draw_matheron_paths_pic(
    model: PartiallyIndependentGP,
    *,
    sample_shape: Size,
    generator: Generator | None = None,
    **_: Any,
) -> PathDict:
    r"""A path of the model without own block, corrected by what it misses of own observations.

    With weights from their posterior and `g` from its prior, both as for `BasisGP`,

    .. math:: f(x) = \mu + \phi(x)^\top w + g(x)
              + r(x, X) C^{-1} (y - \mu - \Phi w - g(X) - \sigma e).
    """
    generator = fresh() if generator is None else generator
    path: PathDict = _draw_matheron_paths_basis_gp(
        model, sample_shape=sample_shape, generator=generator
    )
    cache = model._predictive()
    block = cache.block
    if block is None or block.X.shape[-2] == 0:
        return path
    parts: dict[str, Any] = dict(path.paths.items())
    single = model.num_outputs == 1
    with torch.no_grad():
        X = block.X.squeeze(-3) if single else block.X
        drawn = torch.stack([part(X) for part in parts.values()]).sum(dim=0)  # … [x m] x n
        noise = generator.normal(*drawn.shape).to(drawn.device)
        variance = model._noise.squeeze(-1).squeeze(-2) if single else model._noise.squeeze(-1)
        chol = block.chol.squeeze(-3) if single else block.chol
        targets = model.train_targets - drawn - variance.sqrt() * noise
        half = solve_rows(chol, targets.unsqueeze(-2))
        update = solve_rows(chol.mT, half, upper=True).squeeze(-2)
        sections = _KernelSections(cache.feature_map.residual, X)
    parts["update_paths"] = linear_path(sections, update)
    return _joined(model, parts)
