r"""`RankingEnsemble`: the ranking-weighted GP ensemble (RGPE), a baseline of federated BO.

A target model and `N` agents' models vote: a model's weight is the share of sampled functions in
which it orders the target's observations best [Feurer2018]_. All agents share one feature map, so
that their part of the ensemble collapses: with weight posteriors :math:`N(\bar w_i, C_i)`,

.. math:: \sum_i w_i \mu_i(x) = \mu + \phi(x)^\top \sum_i w_i \bar w_i, \qquad
          \sum_i w_i^2 \Sigma_i(x, x') = \phi(x)^\top \bigl(\sum_i w_i^2 C_i\bigr) \phi(x'),

one mean vector and one `M x M` covariance: a prediction costs the same for 28 agents and for 1,000.

Privacy: none. Each message is a whole `Summary`, :math:`M(M + 3)/2` numbers.

References:
    * [Feurer2018]_ M. Feurer, B. Letham, E. Bakshy. Scalable meta-learning for Bayesian
      optimization using ranking-weighted Gaussian process ensembles. ICML AutoML workshop 2018.
    * [Sundararajan2001]_ S. Sundararajan, S. S. Keerthi. Predictive approaches for choosing
      hyperparameters in Gaussian processes. Neural Computation 13, 2001.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn, Self

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    UnsupportedError,
)
from botorch.models.model import FantasizeMixin, Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths, draw_matheron_paths
from botorch.utils.datasets import SupervisedDataset
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import GP, ExactGP
from linear_operator import to_linear_operator
from linear_operator.operators import RootLinearOperator
from torch import Size, Tensor

from botorch_fed.models.basis_gp import BasisGP, constant_mean
from botorch_fed.models.features import FeatureMap
from botorch_fed.models.numerics import Float64Module, check_finite, cholesky, solve_rows
from botorch_fed.models.paths import WeightedPaths, linear_path, missed_paths, own_points
from botorch_fed.models.summary import Summary, WeightPosterior, check_basis
from botorch_fed.rng import Generator, fresh

NUM_SAMPLES = 100  # sampled ranking losses, as in the papers' comparisons
DROP_QUANTILE = 0.95  # of the target's losses; an agent whose median loss is above is dropped


class RankingEnsemble(Float64Module, Model, GP, FantasizeMixin):
    r"""A target model and agents' models over one basis, weighted by how they rank the target.

    The posterior is normal with mean :math:`\sum_i w_i \mu_i` and covariance
    :math:`\sum_i w_i^2 \Sigma_i`, the target included, on the outcomes' original scale. Models of
    weight zero cost nothing. The weights belong to the target's data and hyperparameters at
    construction: fit the target first. Conditioning updates the target and keeps the weights.

    Ranking losses [Feurer2018]_: pairs of the target's observations that a sampled function puts
    in the wrong order. Agents' functions are drawn from their posteriors; the target's from its
    leave-one-out posteriors, since it has seen the observations. An agent whose median loss exceeds
    the target's 95th percentile is dropped; ties go to the target, and are shared between agents.

    Args:
        target: The agent's own fitted model: one output, no batch dimensions, normal posterior on
            the original scale; a `SingleTaskGP` or another `ExactGP`, or a `BasisGP`.
        summaries: All other agents' summaries as one batch: `gram` `N x M x M`, `moment`
            `N x M x 1`.
        feature_map: Their basis, over untransformed points.
        mean: The public constant mean on which the summaries were centred. Outcomes of agents and
            target must be on one public scale.
        num_samples: The number `S` of sampled ranking losses.
        generator: The stream of random numbers; by default PyTorch's global generator seeds one.

    Example:
        >>> summaries = Summary(torch.stack(grams), torch.stack(moments), phi.fingerprint)
        >>> model = RankingEnsemble(
        ...     target, summaries, feature_map=phi, generator=generator(seed, t, "rgpe")
        ... )
        >>> X_next, _ = optimize_acqf(LogExpectedImprovement(model, best_f), bounds, …)
    """

    agent_weights: Tensor
    _target_weight: Tensor
    _agents_mean: Tensor
    _agents_chol: Tensor

    def __init__(
        self,
        target: Model,
        summaries: Summary,
        *,
        feature_map: FeatureMap,
        mean: float = 0.0,
        num_samples: int = NUM_SAMPLES,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        X, y = target_data(target)
        agents = agent_posteriors(summaries, feature_map)
        generator = fresh() if generator is None else generator
        with torch.no_grad():
            weights = agents.sample(Size([num_samples]), generator=generator)  # S x N x M
            values = weights.transpose(0, 1) @ feature_map(X).mT  # N x S x n
            losses = _ranking_losses(values, y)
            target_losses = _leave_one_out_losses(target, num_samples, generator)
            shares, target_share = _shares_of_wins(losses, target_losses)
            location, chol = _collapse(agents, shares)
        self.target = target
        self.feature_map = feature_map
        self.mean = float(mean)
        self.register_buffer("_target_weight", target_share)
        self.register_buffer("agent_weights", shares)
        self.register_buffer("_agents_mean", location)
        self.register_buffer("_agents_chol", chol)

    @classmethod
    def construct_inputs(cls, training_data: SupervisedDataset, **options: Any) -> NoReturn:
        """Refused: data alone do not make an ensemble."""
        raise UnsupportedError(
            "RankingEnsemble is built around a fitted target model, not from data: fit one, then "
            "RankingEnsemble(target, summaries, feature_map=…)."
        )

    @property
    def num_outputs(self) -> int:
        """The number of outputs, one."""
        return 1

    @property
    def batch_shape(self) -> Size:
        """The batch shape: that of the target, empty until it is conditioned on a batch."""
        return self.target.batch_shape

    @property
    def likelihood(self) -> Any:
        """The target's likelihood, for which BoTorch asks when it draws fantasies."""
        return self.target.likelihood

    @property
    def target_weight(self) -> float:
        """The weight of the target; the others' are `agent_weights`."""
        return float(self._target_weight)

    @target_weight.setter
    def target_weight(self, value: float) -> None:
        self._target_weight.fill_(value)

    @property
    def train_inputs(self) -> tuple[Tensor, ...]:
        """The target's points, untransformed, as the ensemble takes them."""
        return (own_points(self.target, transformed=False),)

    @property
    def train_targets(self) -> Tensor:
        """The target's observations, in its transformed space."""
        target: Any = self.target
        targets: Tensor = target.train_targets
        return targets

    def forward(self, X: Tensor) -> NoReturn:
        """Refused: the prior that BoTorch's `loo_cv` asks for."""
        raise UnsupportedError(
            "loo_cv would score weights that have seen the point that is left out: score the "
            "target by itself, loo_cv(model.target)."
        )

    @property
    def covar_module(self) -> Any:
        """The target's kernel, by whose length scales trust regions are shaped."""
        return self.target.covar_module

    def __call__(self, X: Tensor) -> MultivariateNormal:
        """The posterior of the latent function, for closed forms that ask the model itself."""
        posterior: Any = self.posterior(X)
        distribution: MultivariateNormal = posterior.distribution
        return distribution

    def custom_fit(self, **_: Any) -> NoReturn:
        """What `fit_gpytorch_mll` calls, refused: weights belong to hyperparameters."""
        raise UnsupportedError(
            "The weights of a RankingEnsemble belong to its target's hyperparameters: fit the "
            "target first, then build the ensemble around it."
        )

    def posterior(  # type: ignore[override]  # the mixin's signature is narrower than Model's
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
        **kwargs: Any,
    ) -> Posterior:
        """Joint posterior at points, as `BasisGP.posterior`; the noise is the target's."""
        if output_indices is not None:
            self._check_outputs(output_indices)
        self.eval()
        X = X.double()
        location, covariance = self._moments(X)
        if observation_noise is not False:
            covariance = covariance.add_diagonal(self._noise(X, observation_noise))
        posterior: Posterior = GPyTorchPosterior(MultivariateNormal(location, covariance))
        return posterior if posterior_transform is None else posterior_transform(posterior, X=X)

    def _moments(self, X: Tensor) -> tuple[Tensor, Any]:
        """Mean `… x q` and covariance `… x q x q` (an operator) of the latent function."""
        w = self.target_weight
        batch_shape = torch.broadcast_shapes(X.shape[:-2], self.batch_shape)
        q, M = X.shape[-2], self._agents_mean.shape[-2]
        location = X.new_zeros(*batch_shape, q)
        if w == 1:  # no agent is left: the target as it is
            own = self._own(X)
            return own.mean, own.lazy_covariance_matrix
        Phi = self.feature_map(X)
        location = location + (Phi @ self._agents_mean).squeeze(-1) + (1 - w) * self.mean
        root = Phi @ self._agents_chol
        if w == 0 and q > M and not self.feature_map.has_residual:
            root = root.expand(*batch_shape, q, M)
            return location, RootLinearOperator(root)  # samples without a q x q factorisation
        covariance = root @ root.mT
        if self.feature_map.has_residual:
            missed = self.agent_weights.square().sum()
            covariance = covariance + missed * self.feature_map.residual(X, Phi1=Phi)
        if w > 0:
            own = self._own(X)
            location = location + w * own.mean
            covariance = covariance + w**2 * own.covariance_matrix
        return location, to_linear_operator(covariance.expand(*batch_shape, q, q))

    def _own(self, X: Tensor) -> MultivariateNormal:
        posterior: Any = self.target.posterior(X)
        return posterior.distribution

    def _noise(self, X: Tensor, observation_noise: bool | Tensor) -> Tensor:
        """The target's noise variance on the original scale, `… x q`."""
        noisy: Any = self.target.posterior(X, observation_noise=observation_noise)
        return (noisy.variance - self.target.posterior(X).variance).squeeze(-1)  # type: ignore[attr-defined]

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> Self:
        r"""The ensemble with the target given further observations; the weights stay.

        Args:
            X: A `batch_shape x n' x d` tensor of points.
            Y: A `batch_shape' x n' x 1` tensor of observations.
            noise: Known noise variances, where the target knows those of its data.
        """
        if noise is not None:
            kwargs["noise"] = noise
        self.target.posterior(X)  # fills the caches that GPyTorch conditions by
        model = copy.copy(self)
        model._modules = dict(self._modules)
        model.target = self.target.condition_on_observations(X, Y, **kwargs)
        return model

    def get_fantasy_model(
        self, inputs: Tensor, targets: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> Self:
        """GPyTorch's form of `condition_on_observations`, with targets `… x n'`."""
        variances = None if noise is None else noise.unsqueeze(-1)
        return self.condition_on_observations(inputs, targets.unsqueeze(-1), variances, **kwargs)

    def subset_output(self, idcs: list[int]) -> Self:
        """A copy of the model: it has one output only."""
        self._check_outputs(idcs)
        return copy.deepcopy(self)

    def _check_outputs(self, idcs: list[int]) -> None:
        if [i % 1 if -1 <= i < 1 else i for i in idcs] != [0]:
            raise IndexError(f"RankingEnsemble has one output: indices must be [0], got {idcs}.")

    def extra_repr(self) -> str:
        active = int((self.agent_weights > 0).sum())
        return (
            f"target_weight={self.target_weight:.2f}, agents={self.agent_weights.numel()}, "
            f"active={active}"
        )


@DrawMatheronPaths.register(RankingEnsemble)  # type: ignore[untyped-decorator]
def _draw_matheron_paths_ensemble(
    model: RankingEnsemble,
    *,
    sample_shape: Size,
    generator: Generator | None = None,
    **kwargs: Any,
) -> SamplePath:
    """The law of the ensemble's own posterior: a path of the target and one of all agents."""
    if len(model.batch_shape) > 0:
        raise UnsupportedError(
            "Paths of an ensemble need a target without batch dimensions, got batch shape "
            f"{tuple(model.batch_shape)}: draw from its posterior at a set of points."
        )
    model.eval()
    generator = fresh() if generator is None else generator
    w, phi = model.target_weight, model.feature_map
    paths: list[SamplePath] = []
    shares: list[float] = []
    if w > 0:
        target: Any = model.target
        paths.append(draw_matheron_paths(target, sample_shape, **kwargs))
        shares.append(w)
    if w < 1:
        weights = generator.normal(*sample_shape, phi.num_features) @ model._agents_chol.mT
        weights = weights + model._agents_mean.squeeze(-1)
        scale = float(model.agent_weights.square().sum().sqrt())
        inputs = list(range(phi.input_dim))
        pulled, missed = missed_paths(phi, sample_shape, inputs, generator)
        constant = torch.tensor((1 - w) * model.mean, dtype=torch.float64)
        mean = constant_mean(Size(), constant).requires_grad_(False)
        paths += [linear_path(phi, weights - scale * pulled, mean), *missed]
        shares += [1.0, *[scale] * len(missed)]
    return WeightedPaths(paths, shares)


def target_data(target: Model) -> tuple[Tensor, Tensor]:
    r"""The data of an agent's own model: untransformed points, targets in the transformed space.

    Args:
        target: A single-output `ExactGP` or `BasisGP` without batch dimensions.

    Returns:
        An `n x d` tensor of points and an `n` tensor of targets. Outcome transforms increase, so
        the order of the targets is that of the observations.
    """
    if not isinstance(target, (ExactGP, BasisGP)):
        raise UnsupportedError(
            "The target must be a model with training data and a Gaussian likelihood, an ExactGP "
            f"such as SingleTaskGP, or a BasisGP; got {type(target).__name__}."
        )
    if target.num_outputs != 1 or len(target.batch_shape) > 0:
        raise UnsupportedError(
            f"The target needs one output and no batch dimensions, got {target.num_outputs} "
            f"outputs and batch shape {tuple(target.batch_shape)}: one ensemble per output."
        )
    target.eval()
    X = own_points(target, transformed=False)
    if not isinstance(target.posterior(X[:1]), GPyTorchPosterior):
        raise UnsupportedError(
            "The target's posterior must be normal on the original scale: use an affine outcome "
            f"transform, not {type(target.outcome_transform).__name__}."
        )
    return X.detach().double(), target.train_targets.detach().double()


def agent_posteriors(summaries: Summary, feature_map: FeatureMap) -> WeightPosterior:
    r"""The weight posterior of every agent by itself, one batched factorisation.

    Args:
        summaries: One batch, `gram` `N x M x M` and `moment` `N x M x 1`.
        feature_map: Their basis.
    """
    if not isinstance(summaries, Summary):
        raise UnsupportedError(
            f"summaries must be one batched Summary, got {type(summaries).__name__}: "
            "Summary(torch.stack(grams), torch.stack(moments), feature_map.fingerprint)."
        )
    check_basis(summaries, feature_map.fingerprint)
    M = feature_map.num_features
    if summaries.gram.dim() != 3 or summaries.moment.dim() != 3 or summaries.num_features != M:
        raise BotorchTensorDimensionError(
            f"summaries must hold gram `N x {M} x {M}` and moment `N x {M} x 1`, got "
            f"{tuple(summaries.gram.shape)} and {tuple(summaries.moment.shape)}: stack the agents' "
            "summaries along a first dimension."
        )
    if summaries.gram.shape[0] == 0 or summaries.gram.shape[0] != summaries.moment.shape[0]:
        raise BotorchTensorDimensionError(
            f"summaries must hold one gram and one moment for each of N >= 1 agents, got "
            f"{summaries.gram.shape[0]} and {summaries.moment.shape[0]}: without other agents use "
            "the agent's own model."
        )
    check_finite(summaries.gram, "the gram of the agents' summaries")
    check_finite(summaries.moment, "the moment of the agents' summaries")
    return WeightPosterior.from_total(summaries)


def _ranking_losses(values: Tensor, y: Tensor) -> Tensor:
    r"""Ordered pairs that functions put in the wrong order.

    Args:
        values: A `batch_shape x n` tensor of functions at the observed points.
        y: The `n` observations.

    Returns:
        A `batch_shape` tensor of counts, float64.
    """
    n = y.shape[-1]
    losses = values.new_zeros(values.shape[:-1])
    for shift in range(1, n):  # pairs j < k at distance `shift`
        wrong = (values[..., :-shift] < values[..., shift:]) ^ (y[:-shift] < y[shift:])
        # The pair (k, j) is wrong with it; of equal observations exactly one order is.
        untied = y[:-shift] != y[shift:]
        losses += 2 * (wrong & untied).sum(dim=-1) + (~untied).sum()
    return losses


def _leave_one_out_losses(target: Any, num_samples: int, generator: Generator) -> Tensor:
    r"""Sampled ranking losses of the target, an `S` tensor.

    For each `j` the function is drawn from the posterior without observation `j`, which is compared
    with all others in that draw.
    """
    y = target.train_targets.detach().double()
    draws = _leave_one_out_draws(target, num_samples, generator)  # S x n x n
    own = draws.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    wrong = (own < draws) ^ (y[:, None] < y)
    return wrong.sum(dim=(-2, -1)).double()


def _leave_one_out_draws(target: Any, num_samples: int, generator: Generator) -> Tensor:
    r"""Draws of the latent function at all points from each leave-one-out posterior.

    In closed form [Sundararajan2001]_: with :math:`P = (K + R)^{-1}`, :math:`\alpha = P(y - m)`,
    leaving out `j` moves the mean :math:`m + K\alpha` by :math:`-K P_{:j} \alpha_j / P_{jj}` and
    adds :math:`K P_{:j} P_{j:} K / P_{jj}` to the covariance :math:`K - KPK`. With the noise block
    :math:`R = LL^\top`, one eigendecomposition :math:`L^{-1} K L^{-\top} = V \Lambda V^\top` gives
    every factor without cancellation.

    Returns:
        `S x n x n`: draw `s` of the posterior without observation `j`, at point `k`.
    """
    residuals, m, K, missed = _prior_at_data(target)
    n = m.shape[-1]
    noise = target.likelihood.noise.double().expand(n)
    L = cholesky(missed + torch.diag(noise), f"the noise block of {n} observations")
    whitened = solve_rows(L, solve_rows(L, K).mT)  # L^-1 K L^-T
    eigenvalues, V = torch.linalg.eigh(whitened)
    eigenvalues = eigenvalues.clamp_min(0)
    fitted = eigenvalues / (1 + eigenvalues)
    scaled = solve_rows(L.mT, V.mT, upper=True).mT  # L^-T V
    P = (scaled / (1 + eigenvalues)) @ scaled.mT
    KP = (L @ V * fitted) @ scaled.mT
    # K - KPK = root root'. With V' at its end: the signs of eigenvectors belong to one machine.
    root = L @ (V * fitted.sqrt()) @ V.mT
    removed = KP.mT / P.diagonal()[:, None]  # row j: K P_:j / P_jj
    means = m + KP @ residuals - removed * (P @ residuals)[:, None]
    widening = removed * P.diagonal().sqrt()[:, None]
    z = generator.normal(num_samples, n, n).to(K.device)
    e = generator.normal(num_samples, n, 1).to(K.device)
    draws = means + z @ root.mT + e * widening
    if bool(missed.any()):  # what the basis misses at a new point, independent of the data
        variances, U = torch.linalg.eigh(missed)
        z = generator.normal(num_samples, n, n).to(K.device)
        draws = draws + z @ (U * variances.clamp_min(0).sqrt()) @ U.mT  # the symmetric root
    return draws


def _prior_at_data(target: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""The model before own data, at own data, in the transformed space.

    Returns:
        The residuals :math:`y - m` (`n`), the mean `m` (`n`), the covariance `K` through which data
        predict (`n x n`), and the part that a `BasisGP`'s basis misses, for the data a part of the
        noise block (`n x n`; zero for other models).
    """
    X = own_points(target, transformed=True)
    # In eval mode: without own data.
    prior = target.prior(X) if isinstance(target, BasisGP) else target.forward(X)
    K, m = prior.covariance_matrix.double(), prior.mean.double()
    missed = torch.zeros_like(K)
    if isinstance(target, BasisGP):
        missed = target.feature_map.residual(X)
    return target.train_targets.double() - m, m, K - missed, missed


def _shares_of_wins(losses: Tensor, target_losses: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the agents, `N`, and of the target, from losses `N x S` and `S`."""
    limit = torch.quantile(target_losses, DROP_QUANTILE)
    dropped = torch.quantile(losses, 0.5, dim=-1) > limit
    losses = losses.masked_fill(dropped[:, None], torch.inf)
    best = losses.amin(dim=0)
    target_wins = target_losses <= best
    winners = (losses == best) & ~target_wins
    shares = winners.double() / winners.sum(dim=0).clamp_min(1)
    return shares.mean(dim=-1), target_wins.double().mean()


def _collapse(agents: WeightPosterior, shares: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean `M x 1` and Cholesky factor `M x M` of :math:`\sum_i w_i w^{(i)}` over the agents."""
    active = shares.nonzero().flatten()
    chol, half = agents.chol[active], agents.half_mean[active]
    M = chol.shape[-1]
    w = shares[active, None, None]
    means = WeightPosterior(chol, half).mean.unsqueeze(-1)
    if len(active) == 0:
        return means.new_zeros(M, 1), chol.new_zeros(M, M)
    eye = torch.eye(M, dtype=chol.dtype, device=chol.device)
    roots = w * solve_rows(chol, eye.expand(len(active), M, M))  # C_i = root root'
    covariance = torch.einsum("nij,nkj->ik", roots, roots)
    what = "the agents' weighted covariance of the weights"
    return (w * means).sum(dim=0), cholesky(covariance, what)
