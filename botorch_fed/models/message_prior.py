r"""`MessagePriorGP`: received functions as the prior of the agent's own Gaussian process.

What federated Thompson sampling sends is one weight vector :math:`w_n` per agent, the function
:math:`\phi(x)^\top w_n` over a shared basis. Taken as draws of one unknown law of objectives, as
in [Wang2018]_, they give the own model a prior mean and a prior covariance,

.. math:: m(x) = \mu + \phi(x)^\top \bar w, \qquad
          k(x, x') = s^2 \phi(x)^\top C \phi(x') + r(x, x'), \qquad
          C = \frac{1}{N - 1} \sum_n (w_n - \bar w)(w_n - \bar w)^\top,

with a residual kernel `r` for what no agent has seen. Own data then correct both: unlike single
messages or a prior mean alone, the messages cannot hold the agent back for long, and they cost no
communication beyond FTS' own. The covariance is a linear kernel on `N` features (at most `M`).

References:
    * [Wang2018]_ Z. Wang, B. Kim, L. P. Kaelbling. Regret bounds for meta Bayesian optimization
      with an unknown Gaussian process prior. NeurIPS 2018.
    * [Hvarfner2024]_ C. Hvarfner, E. O. Hellsten, L. Nardi. Vanilla Bayesian optimization performs
      great in high dimensions. ICML 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.transformed import TransformedPosterior
from botorch.sampling.pathwise.features import FeatureMap as PathFeatureMap
from botorch.sampling.pathwise.features import gen_kernel_features
from botorch.sampling.pathwise.features.generators import GenKernelFeatures
from botorch.utils.datasets import SupervisedDataset
from gpytorch import settings
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.means import Mean
from gpytorch.priors import LogNormalPrior
from linear_operator import to_linear_operator
from torch import Size, Tensor
from torch.nn import Parameter

from botorch_fed.models.basis_gp import check_public_transforms
from botorch_fed.models.features import FeatureMap
from botorch_fed.models.numerics import (
    Float64Module,
    as_double,
    check_finite,
    keep_double,
    solve_rows,
)

MIN_SCALE = 1e-3  # lower bound of a fitted message scale


class MessageMean(Float64Module, Mean):
    r"""The mean of received functions, :math:`\mu + \phi(x)^\top \bar w`.

    Args:
        feature_map: The shared basis.
        weights: An `N x M` tensor of received weight vectors.
        constant: The public constant mean :math:`\mu`.
    """

    weight_mean: Tensor

    def __init__(self, feature_map: FeatureMap, weights: Tensor, *, constant: float = 0.0) -> None:
        super().__init__()
        weights = _checked_messages(feature_map, weights)
        self.feature_map = feature_map
        self.constant = float(constant)
        self.register_buffer("weight_mean", weights.mean(dim=0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Values at `batch_shape x n x d` points: `batch_shape x n`."""
        return self.constant + self.feature_map(x) @ self.weight_mean


class MessageKernel(Float64Module, Kernel):
    r"""The covariance of received functions plus a residual, :math:`s^2 \phi^\top C \phi' + r`.

    Args:
        feature_map: The shared basis.
        weights: An `N x M` tensor of received weight vectors.
        residual: The kernel `r` of what the messages leave open.
        scale: The standard deviation :math:`s` by which the messages' spread is multiplied.
        fit_scale: Whether fitting a model moves `scale`.
    """

    root: Tensor
    raw_scale: Parameter
    register_constraint: Callable[..., None]  # GPyTorch is untyped
    register_prior: Callable[..., None]

    def __init__(
        self,
        feature_map: FeatureMap,
        weights: Tensor,
        *,
        residual: Kernel,
        scale: float = 1.0,
        fit_scale: bool = False,
    ) -> None:
        super().__init__()
        weights = _checked_messages(feature_map, weights)
        if not scale >= 0 or (fit_scale and scale < MIN_SCALE):
            raise UnsupportedError(
                f"The scale of the messages must not be negative, nor below {MIN_SCALE} where it "
                f"is fitted; got {scale}."
            )
        self.feature_map = feature_map
        self.residual = residual
        self.register_buffer("root", _covariance_root(weights), persistent=False)
        value = torch.tensor(float(scale), dtype=torch.float64)
        self.register_parameter("raw_scale", Parameter(value, requires_grad=fit_scale))
        if fit_scale:
            self.register_constraint("raw_scale", GreaterThan(MIN_SCALE, transform=None))
            self.register_prior("scale_prior", LogNormalPrior(0.0, 1.0), _scale)

    @property
    def lengthscale(self) -> Tensor | None:
        """The residual kernel's: what own data fit."""
        kernel = self.residual
        while isinstance(kernel, ScaleKernel):
            kernel = kernel.base_kernel
        scales: Tensor | None = kernel.lengthscale
        return scales

    def message_features(self, x: Tensor) -> Tensor:
        r"""Features whose inner product is :math:`s^2 \phi^\top C \phi'`.

        Args:
            x: A `batch_shape x n x d` tensor of points.

        Returns:
            A `batch_shape x n x min(N, M)` tensor.
        """
        return self.raw_scale * (self.feature_map(x) @ self.root)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Covariances, `batch_shape x n x n'`, or `batch_shape x n` with `diag`."""
        F1 = self.message_features(x1)
        F2 = F1 if x2 is x1 else self.message_features(x2)
        if diag:
            return (F1 * F2).sum(dim=-1) + self.residual(x1, x2, diag=True)
        return F1 @ F2.mT + self.residual(x1, x2).to_dense()


class MessagePriorGP(SingleTaskGP):
    r"""A `SingleTaskGP` whose prior is made of received weight vectors.

    Fitting moves the noise, the residual kernel and, if asked, the scale of the messages; the
    messages themselves are frozen. With messages that agree exactly it is a `SingleTaskGP` with
    their common function as the mean.

    Args:
        train_X: A `batch_shape x n x d` tensor of points.
        train_Y: A `batch_shape x n x 1` tensor of observations.
        train_Yvar: A `batch_shape x n x 1` tensor of known noise variances, if they are known.
        feature_map: The shared basis.
        weights: An `N x M` tensor of received weight vectors: posterior means, or FTS' samples.
        mean: The public constant mean :math:`\mu` to which the messages are relative.
        residual_kernel: The kernel of what the messages leave open; default a scaled RBF kernel
            with BoTorch's priors [Hvarfner2024]_.
        message_scale: Initial scale :math:`s`, a standard deviation.
        fit_message_scale: Whether fitting moves it; otherwise it is fixed.
        input_transform: Applied to all points before the map; it must be public.
        outcome_transform: None by default, unlike in `SingleTaskGP`: messages are on the public
            scale of the outcomes, which `Standardize` would leave.

    Example:
        >>> model = MessagePriorGP(train_X, train_Y, feature_map=phi, weights=messages)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> candidate, _ = optimize_acqf(LogExpectedImprovement(model, best_f), bounds, …)
    """

    mean_module: MessageMean
    covar_module: MessageKernel
    prediction_strategy: Any

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        *,
        feature_map: FeatureMap,
        weights: Tensor,
        mean: float = 0.0,
        residual_kernel: Kernel | None = None,
        message_scale: float = 1.0,
        fit_message_scale: bool = False,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> None:
        train_X, train_Y = as_double(train_X, "train_X"), as_double(train_Y, "train_Y")
        if train_Yvar is not None:
            train_Yvar = as_double(train_Yvar, "train_Yvar")
        if train_Y.shape[-1:] != (1,):
            raise BotorchTensorDimensionError(
                f"train_Y must be `batch_shape x n x 1`, got shape {tuple(train_Y.shape)}: the "
                "messages are about one outcome, use one model per outcome in a ModelListGP."
            )
        check_public_transforms(input_transform, outcome_transform, "messages")
        if residual_kernel is None:
            residual_kernel = _residual_kernel(feature_map.input_dim, train_X.shape[:-2])
        super().__init__(
            train_X,
            train_Y,
            train_Yvar,
            mean_module=MessageMean(feature_map, weights, constant=mean),
            covar_module=MessageKernel(
                feature_map,
                weights,
                residual=residual_kernel,
                scale=message_scale,
                fit_scale=fit_message_scale,
            ),
            outcome_transform=outcome_transform,
            input_transform=input_transform,
        )
        self._subset_batch_dict: dict[str, int] = {}  # one output: subsetting copies

    @classmethod
    def construct_inputs(
        cls,
        training_data: SupervisedDataset,
        *,
        feature_map: FeatureMap | None = None,
        weights: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Constructor arguments from a dataset and this model's options."""
        if feature_map is None or weights is None:
            raise UnsupportedError(
                "MessagePriorGP needs the messages: pass feature_map=… and weights=… as model "
                "options."
            )
        inputs: dict[str, Any] = super(SingleTaskGP, cls).construct_inputs(training_data)
        return {**inputs, "feature_map": feature_map, "weights": weights, **options}

    def posterior(  # type: ignore[override]  # BoTorch's bases disagree
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> GPyTorchPosterior | TransformedPosterior:
        """The posterior of `SingleTaskGP`, in float64 whatever the points are."""
        return super().posterior(X.double(), output_indices, observation_noise, posterior_transform)

    def __call__(self, X: Tensor, **kwargs: Any) -> MultivariateNormal:
        r"""The prior in train mode, the posterior in eval mode, both in the transformed space.

        GPyTorch's prediction from GPyTorch's caches, but without a copy of the training points,
        and of their features, for every batch of points.

        Args:
            X: A `batch_shape x q x d` tensor of transformed points.
        """
        if self.training or settings.prior_mode.on() or self.train_inputs[0].dim() > 2:
            return super().__call__(X, **kwargs)
        *batch_shape, q, d = X.shape
        flat = X.reshape(-1, d)
        if self.prediction_strategy is None:
            super().__call__(flat[:1])
        (train_X,) = self.train_inputs
        L = self.prediction_strategy.lik_train_train_covar.cholesky().to_dense()
        if settings.detach_test_caches.on():
            L = L.detach()
        cross = self.covar_module(flat, train_X).to_dense()  # one matrix for all points
        cross = cross.reshape(*batch_shape, q, -1)
        if q == 1:
            prior = self.covar_module(flat, diag=True).reshape(*batch_shape, 1, 1)
        else:
            prior = self.covar_module(X).to_dense()
        half = solve_rows(L, cross)
        location = self.mean_module(X) + cross @ self.prediction_strategy.mean_cache
        # As an operator: a dense covariance would be factorised at once.
        return MultivariateNormal(location, to_linear_operator(prior - half @ half.mT))

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Self:  # type: ignore[override]  # ExactGP's
        return super()._apply(keep_double(fn, type(self).__name__))


class _MessageFeatures(PathFeatureMap):
    """Features of a `MessageKernel`: exact ones of the messages, random ones of the residual."""

    def __init__(self, kernel: MessageKernel, residual_features: PathFeatureMap) -> None:
        super().__init__()
        self.kernel = kernel
        self.residual_features = residual_features
        self.input_transform = None
        self.output_transform = None
        self.num_outputs = kernel.root.shape[-1] + residual_features.num_outputs
        self.batch_shape = residual_features.batch_shape

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.kernel.message_features(x), self.residual_features(x)]
        return torch.cat(parts, dim=-1)


@GenKernelFeatures.register(MessageKernel)  # type: ignore[untyped-decorator]
def _gen_kernel_features_message(
    kernel: MessageKernel, *, num_inputs: int, num_outputs: int
) -> _MessageFeatures:
    """How BoTorch draws paths of the prior: the residual gets `num_outputs` features."""
    residual = gen_kernel_features(kernel.residual, num_inputs=num_inputs, num_outputs=num_outputs)
    return _MessageFeatures(kernel, residual)


def _checked_messages(feature_map: FeatureMap, weights: Tensor) -> Tensor:
    if not isinstance(feature_map, FeatureMap):
        raise UnsupportedError(
            f"feature_map must be a FeatureMap, got {type(feature_map).__name__}."
        )
    weights = as_double(weights, "weights").detach()
    M = feature_map.num_features
    if weights.dim() != 2 or weights.shape[-1] != M or weights.shape[0] == 0:
        raise BotorchTensorDimensionError(
            f"weights must be `N x {M}` with N >= 1 messages over this feature map, got shape "
            f"{tuple(weights.shape)}: without messages use a SingleTaskGP."
        )
    check_finite(weights, "weights")
    return weights


def _covariance_root(weights: Tensor) -> Tensor:
    """A root `M x min(N, M)` of the sample covariance of `N x M` weights; zero for one message."""
    N, M = weights.shape
    deviations = (weights - weights.mean(dim=0)) / max(N - 1, 1) ** 0.5
    if N <= M:
        return deviations.mT.contiguous()
    upper = torch.linalg.qr(deviations, mode="r").R  # C = R'R, without squaring
    # Seeded paths are drawn over this root: a positive diagonal leaves LAPACK no choice of signs.
    signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper)
    return (upper.mT * signs).contiguous()


def _residual_kernel(input_dim: int, batch_shape: Size) -> ScaleKernel:
    base = get_covar_module_with_dim_scaled_prior(ard_num_dims=input_dim, batch_shape=batch_shape)
    return ScaleKernel(
        base,
        batch_shape=batch_shape,
        outputscale_prior=LogNormalPrior(0.0, 1.0),
        outputscale_constraint=GreaterThan(1e-4, transform=None, initial_value=1.0),
    )


def _scale(kernel: MessageKernel) -> Parameter:
    return kernel.raw_scale
