r"""The width of the upper confidence bound of a private posterior, by the theorem.

Let the function have norm `B` in the space of the kernel :math:`k`, let the features have
:math:`\|\phi\| \le 1` and miss :math:`r(x) = k(x, x) - \|\phi(x)\|^2 \ge 0` of it (zero for maps
that are exact), let the observation noise be :math:`\rho`-subgaussian, and let
:math:`V = \tilde\Sigma + \lambda I` with a noisy
:math:`\tilde\Sigma = \sum\phi\phi^\top + H`, where the eigenvalues of the shifted noise lie in
:math:`[\lambda_{min}, \lambda_{max}] = [\Upsilon, 3\Upsilon]` (`models.noise_norm_bound`). Then
with probability :math:`1 - \zeta`, for all rounds at once, if the noise stays within its bounds,

.. math:: |f(x) - \hat f(x)| &\le \beta_t^{1/2} \rho \|\phi(x)\|_{V^{-1}} + B \sqrt{r(x)}, \\
          \beta_t^{1/2} &= \frac B\rho\sqrt{\lambda + \lambda_{max}} + \frac B\rho
          \sqrt{\frac{t\,\sum_{s<t} r(x_s)}{t + \lambda + \lambda_{min}}}
          + \frac{\kappa_h}{\rho} + \sqrt{\ln\frac{\det V}
          {\det((\lambda + \lambda_{min}) I)} + 2\ln\frac2\zeta},

with :math:`\kappa_h` a bound on the noise in the moment in the norm of :math:`H^{-1}`
[Dubey2021]_, at :math:`\lambda = \rho^2`. The theorem holds for `psd="shift"` only, not for a
floor. With this width the regret is half of that of random play even without privacy, and more with
a truncated map; the width is for replication. In practice a constant between 0.3 and 2 works.

**What the features miss.** The paper has :math:`tB\epsilon/(\rho\sqrt{\lambda_{min}})` with
:math:`\epsilon` the largest error of the features' *function*, which it takes for that of their
kernel. A function of norm `B` is a sum of one of the features and one of the space of the missing
kernel, each of norm `B` at most [Aronszajn1950]_, and the latter has values up to
:math:`B\sqrt{r(x)}`, not :math:`Br(x)`. It disturbs the outcomes, which is the second term of the
width (:math:`\|\Phi V^{-1} \Phi^\top\| \le t / (t + \lambda + \lambda_{min})`), and it is
missing from the prediction, which is the last term of the bound (`missed`). The second term grows
with :math:`\sqrt t` where the features miss something at all points: no regret bound follows.

**Acquisition functions with a regret bound.** The upper confidence bound with this width, on a
shifted posterior. Thompson sampling, expected improvement and a floor have no regret bound here.
Privacy does not depend on the acquisition function, which is post-processing of the release.

.. [Aronszajn1950] N. Aronszajn. Theory of reproducing kernels. Transactions of the AMS 68, 1950.
.. [Dubey2021] A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
   AISTATS 2021.
"""

from __future__ import annotations

import math

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.models import FeatureMap
from botorch_fed.models.numerics import cholesky


def private_ucb_width(
    V: Tensor,
    *,
    t: int,
    norm_bound: float,
    noise_std: float,
    noise_var: float,
    gram_noise_bound: float = 0.0,
    moment_noise_bound: float = 0.0,
    truncation: float = 0.0,
    failure: float = 0.1,
) -> float:
    r""":math:`\beta_t^{1/2}`, the width of the bound in units of :math:`\rho \|\phi\|_{V^{-1}}`.

    Args:
        V: The shifted :math:`\tilde\Sigma + \lambda I`, `m x m`.
        t: How many outcomes there are, at least 1.
        norm_bound: The norm `B` of the function.
        noise_std: The subgaussian constant :math:`\rho` of the observation noise.
        noise_var: The regularisation :math:`\lambda`.
        gram_noise_bound: :math:`\Upsilon`, of `models.noise_norm_bound`; 0 without noise.
        moment_noise_bound: The bound :math:`\kappa_h` on the noise in the moment.
        truncation: A bound on :math:`\sum_s r(x_s)`, what the features miss of the prior variances
            of the points that were played, as a share of the largest variance; see `missed`.
        failure: The probability :math:`\zeta` of failure of this bound, beside the probability
            that the noise exceeds its bounds.

    Example:
        >>> private_ucb_width(torch.eye(5).double(), t=1, norm_bound=1.0, noise_std=0.5,
        ...     noise_var=0.25)
        3.4477...
    """
    if V.dim() != 2 or V.shape[0] != V.shape[1]:
        raise InputDataError(f"V must be `m x m`, got shape {tuple(V.shape)}.")
    if not (t >= 1 and norm_bound >= 0 and noise_std > 0 and noise_var > 0 and 0 < failure < 1):
        raise InputDataError(
            "Expected t >= 1, norm_bound >= 0, noise_std > 0, noise_var > 0 and 0 < failure < 1, "
            f"got {t}, {norm_bound}, {noise_std}, {noise_var} and {failure}."
        )
    for name, value in (
        ("gram_noise_bound", gram_noise_bound),
        ("moment_noise_bound", moment_noise_bound),
        ("truncation", truncation),
    ):
        if not 0 <= value < math.inf:
            raise InputDataError(f"{name} must be at least 0 and finite, got {value}.")
    # The shifted noise in the gram matrix has its spectrum in [λ_min, λ_max], without λI.
    least, most = gram_noise_bound, 3 * gram_noise_bound
    regularizer = noise_var + least
    factor = cholesky(V.double(), "the shifted private gram matrix")
    log_det = 2 * float(torch.log(torch.diagonal(factor)).sum())
    information = log_det - V.shape[0] * math.log(regularizer)
    bias = norm_bound * math.sqrt((noise_var + most) / noise_std**2)
    error = norm_bound * math.sqrt(truncation * t / (t + regularizer)) / noise_std
    return (
        bias
        + error
        + moment_noise_bound / noise_std
        + math.sqrt(max(information, 0.0) + 2 * math.log(2 / failure))
    )


def missed(feature_map: FeatureMap, X: Tensor) -> Tensor:
    r""":math:`r(x) = s_0^2 - \|\phi(x)\|^2`, what a map misses of the prior variance at points.

    Zero but for rounding for Fourier features; for `KLFeatures` what was cut off. Of a map that
    cuts another one, the missing part of that one; the error of quadrature itself is not counted.

    Args:
        feature_map: The map.
        X: An `n x d` tensor.

    Returns:
        An `n` tensor, not negative.
    """
    with torch.no_grad():
        kept = feature_map(X).square().sum(dim=-1)
    return (float(feature_map.outputscale.sum()) - kept).clamp_min(0.0)
