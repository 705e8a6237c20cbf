r"""Acquisition functions of a `LocalSharedMixture`, exact and in closed form.

An expectation under a mixture is the mixture of the expectations, so that improvement needs no
approximation,

.. math:: \alpha(x) = w\, \alpha_1(x) + (1 - w)\, \alpha_2(x),

with :math:`\alpha_1` of the local and :math:`\alpha_2` of the shared model. `MixtureEI` and
`MixturePI` are the *logarithms* of that, by BoTorch's stable forms: expected improvement underflows
where its logarithm still has a slope. `MixtureUCB` is the same weighted sum of two upper bounds; it
is no quantile of the mixture, and rewards disagreement of the models less than the bound of the
moment-matched normal does.

All are for `q = 1` and take no pending points. For `q > 1` or pending points use Monte-Carlo
acquisition functions, e.g. `qLogNoisyExpectedImprovement`, which sample the mixture itself.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from botorch.acquisition.analytic import AnalyticAcquisitionFunction, _log_ei_helper
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.models.model import Model
from botorch.utils.probability.utils import log_ndtr
from botorch.utils.transforms import t_batch_mode_transform
from torch import Tensor

from botorch_fed.models.mixture import LocalSharedMixture
from botorch_fed.models.numerics import check_finite

MIN_VARIANCE = 1e-12  # as in BoTorch


class _MixtureAcquisition(AnalyticAcquisitionFunction):
    """What the three have in common: both components' moments at single points."""

    def __init__(
        self,
        model: Model,
        posterior_transform: PosteriorTransform | None = None,
        maximize: bool = True,
    ) -> None:
        if not isinstance(model, LocalSharedMixture):
            raise UnsupportedError(
                f"{type(self).__name__} needs a LocalSharedMixture, got {type(model).__name__}: "
                "for a single model use BoTorch's analytic acquisition functions."
            )
        super().__init__(model=model, posterior_transform=posterior_transform)
        self.maximize = maximize

    def _setting(self, value: float | Tensor, name: str) -> Tensor:
        """A finite number, or a tensor of them that broadcasts to the batch shape."""
        tensor = torch.as_tensor(value, dtype=torch.float64).detach()  # a float stays exact
        check_finite(tensor, name)
        return tensor

    def _moments(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means, standard deviations and weights of both components, each `2 x batch_shape`.

        Where smaller is better the means have the other sign.
        """
        X = X.double()
        posterior = self.model.posterior(X, posterior_transform=self.posterior_transform)
        components = posterior.components  # type: ignore[attr-defined]
        means = torch.stack([c.mean[..., 0, 0] for c in components])
        variances = torch.stack([c.variance[..., 0, 0] for c in components])
        w = posterior.local_weight  # type: ignore[attr-defined]
        means = means if self.maximize else -means
        return means, variances.clamp_min(MIN_VARIANCE).sqrt(), torch.stack([w, 1 - w])


class MixtureUCB(_MixtureAcquisition):
    r"""The weighted sum of two upper confidence bounds,

    .. math:: w (\mu_1 + \sqrt\beta \sigma_1) + (1 - w) (\mu_2 + \sqrt\beta \sigma_2).

    Args:
        model: A `LocalSharedMixture` of one output.
        beta: A number, or a tensor that broadcasts to the batch shape; not negative. As in
            BoTorch, its square root multiplies the standard deviations.
        posterior_transform: Makes one output of several.
        maximize: Whether larger outcomes are better; otherwise the means have the other sign.

    Example:
        >>> acquisition = MixtureUCB(LocalSharedMixture(local, shared, 0.8), beta=2.0)
        >>> candidate, _ = optimize_acqf(acquisition, bounds, q=1, …)
    """

    beta: Tensor

    def __init__(
        self,
        model: Model,
        beta: float | Tensor,
        posterior_transform: PosteriorTransform | None = None,
        maximize: bool = True,
    ) -> None:
        super().__init__(model, posterior_transform, maximize)
        beta = self._setting(beta, "beta")
        if bool((beta < 0).any()):
            raise InputDataError("beta must not be negative: its square root is taken.")
        self.register_buffer("beta", beta)

    @t_batch_mode_transform(expected_q=1)  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """The weighted sum of the bounds at `batch_shape x 1 x d` points."""
        means, sigmas, weights = self._moments(X)
        return (weights * (means + self.beta.sqrt() * sigmas)).sum(dim=0)


class _MixtureImprovement(_MixtureAcquisition):
    """The logarithm of a weighted sum of two models' improvements over a best value."""

    _log = True
    best_f: Tensor

    def __init__(
        self,
        model: Model,
        best_f: float | Tensor,
        posterior_transform: PosteriorTransform | None = None,
        maximize: bool = True,
    ) -> None:
        super().__init__(model, posterior_transform, maximize)
        self.register_buffer("best_f", self._setting(best_f, "best_f"))

    @abstractmethod
    def _log_part(self, u: Tensor, sigmas: Tensor) -> Tensor:
        """A model's logarithm, from its standardised improvement and its deviation."""

    @t_batch_mode_transform(expected_q=1)  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """The logarithm of the weighted sum at `batch_shape x 1 x d` points."""
        means, sigmas, weights = self._moments(X)
        best = self.best_f if self.maximize else -self.best_f
        return (weights.log() + self._log_part((means - best) / sigmas, sigmas)).logsumexp(dim=0)


class MixtureEI(_MixtureImprovement):
    r"""The logarithm of the mixture's expected improvement,

    .. math:: \log \bigl(w\, \mathrm{EI}_1(x) + (1 - w)\, \mathrm{EI}_2(x)\bigr).

    Exact, unlike `LogExpectedImprovement` on the same model, which sees the moment-matched normal.

    Args:
        model: A `LocalSharedMixture` of one output.
        best_f: The best value observed, a number or a tensor that broadcasts to the batch shape.
        posterior_transform: Makes one output of several.
        maximize: Whether larger outcomes are better.

    Example:
        >>> acquisition = MixtureEI(LocalSharedMixture(local, shared, 0.8), best_f=train_Y.max())
        >>> candidate, _ = optimize_acqf(acquisition, bounds, q=1, …)
    """

    def _log_part(self, u: Tensor, sigmas: Tensor) -> Tensor:
        return _log_ei_helper(u) + sigmas.log()


class MixturePI(_MixtureImprovement):
    r"""The logarithm of the mixture's probability of improvement,

    .. math:: \log \bigl(w\, \mathrm{PI}_1(x) + (1 - w)\, \mathrm{PI}_2(x)\bigr),

    as BoTorch's `LogProbabilityOfImprovement`; `exp` of it is the probability. Arguments as of
    `MixtureEI`.
    """

    def _log_part(self, u: Tensor, sigmas: Tensor) -> Tensor:
        return log_ndtr(u)
