r"""The default search of every protocol: a site alone as BoTorch does it, and what others say.

A site fits its own Gaussian process to outcomes that it standardises itself, anew for each query,
and maximises log expected improvement. What others say, in whatever way it arrives, is one
function over the shared basis and enters as the prior mean of that model, with a trust that own
outcomes earn (`models.earned_prior`). Without messages, or where they do not help, this is
`SingleTaskGP` with `LogExpectedImprovement`.

What a site says is the mean of its own posterior, on its own standardised scale, projected on the
shared basis: `M` numbers. Sites need only the *sum* of these vectors, minus their own part.

::

    what arrives                                   what it becomes
    rows of weights, one per site (FTS)            their mean, each bounded in spread
    a sum, opened or decrypted (FedGP)             the sum minus the own contribution
    a noisy release (DP-FTS-DE)                    releases averaged and shrunk by their noise

A site without observations of its own begins with the users' default configuration, if there is
one (`default_point`), and goes on with the points that it is dealt or, where others have spoken
already, where the prior is largest. What nobody has tested yet, such as the word of sites that are
done, is met with caution: half of the probability is on no trust, and one trust is drawn for each
query, so that the site goes on to search by itself as well. If that is no trust, a site with less
than `MIN_OWN` observations looks anywhere: a model of one or two says nothing. An acquisition that
is passed in, several outcomes, further points of a batch, fidelities and failures have their own
rules.

Of several outcomes each has models, a message and a trust of its own; what is maximised is in
`acquisition.outcomes`. Outcomes that are only recorded are neither modelled nor sent. A newcomer
that has observed nothing knows no bounds on the scale of what others say: it begins where the
functions of the objectives are large and those of bounded outcomes far inside.

A point whose evaluation failed is asked again only if no other is left. From the second failure on
the acquisition is weighted by the probability of success (`models.feasibility`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import InputDataError
from botorch.models.model_list_gp_regression import ModelListGP
from torch import Tensor

from botorch_fed.acquisition.earned import (
    Domain,
    EarnedImprovement,
    Improvement,
    maximize_feasibility,
    maximize_improvement,
    maximize_prior,
)
from botorch_fed.acquisition.feasible import FeasibleAcquisition
from botorch_fed.acquisition.optimize import maximize
from botorch_fed.acquisition.outcomes import JointImprovement, Limit
from botorch_fed.errors import NumericalError
from botorch_fed.federation.points import untried
from botorch_fed.models import (
    AdditiveFeatures,
    FeatureMap,
    KLFeatures,
    LogWarp,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    WarpedFeatures,
)
from botorch_fed.models.earned_prior import (
    TRUST_PRIOR,
    TRUSTS,
    EarnedPosterior,
    PriorFunction,
    fit_earned,
    pooled_trust_prior,
    project,
    reference_features,
)
from botorch_fed.models.feasibility import Feasibility
from botorch_fed.rng import Generator, generator
from botorch_fed.search.fidelity import (
    first_advised,
    fit_over_fidelities,
    gainful,
    likely,
    num_configurations,
)
from botorch_fed.search.local import feasibility_of, random_point
from botorch_fed.space import Outcome, SearchSpace

logger = logging.getLogger(__name__)

# From the own model, in evaluation mode and on the scale of the outcomes, and the points tried.
AcquisitionFactory = Callable[[Any, Tensor], AcquisitionFunction]
PAREGO = "parego"
AUGMENTED = 0.05  # of the plain sum in the Chebyshev sum

NUM_FEATURES = 100  # of the shared basis
ALONE_LENGTHSCALE = 0.3  # of the kernel of each input alone, in the unit cube
LENGTHSCALE = 0.25  # of the kernel of all inputs, times the root of the dimension
NUM_RANDOM = 256  # random features that stand for it
TOLERANCE = 1e-7  # of the kernel, where fewer features do
MOST_INPUTS = 200  # up to which there is a kernel of each input alone
FEW_FEATURES = 20  # of a basis for noisy sums
FEW_LENGTHSCALE = 0.5  # of its kernel, in two dimensions of the unit cube
SEVERAL_INPUTS = 4  # from which on its kernel has a part for each input alone
TOGETHER = 0.3  # the variance of the kernel of all inputs, over that of each alone
NUM_REFERENCE = 512  # public points that represent the cube
MIN_OWN = 3  # observations from which on a site says something
APART = 0.25  # how far from each other first points of one query lie, in the unit cube
MAX_SPREAD = 3.0  # of one site's function over the cube, on its own standardised scale


@dataclass(frozen=True, kw_only=True)
class TransferSearch:
    r"""How a site uses what others say and its own data; its own business, nobody else need know.

    Attributes:
        acquisition: What the own step maximises, as a function of the own model (a
            `SingleTaskGP`, drawn by its weight where several trusts have some; of several outcomes
            a `ModelListGP` on the public scale, without those that are only recorded) and of the
            points that were tried, `n x d`; default the closed form of log expected improvement,
            averaged over trusts. ``"parego"``, for several objectives: expected improvement of
            their augmented Chebyshev sum with weights that are drawn for each query.
        warp: Let the model see parameters that act by their ratio on a logarithmic scale
            (`SearchSpace.log_offsets`), even if the search is on a linear one.
        trusts: The values of :math:`\beta` that are compared, the first of them 0.
        trust_prior: Their prior probabilities.
        listen: Whether messages are used at all.
    """

    acquisition: AcquisitionFactory | Literal["parego"] | None = None
    warp: bool = True
    trusts: tuple[float, ...] = TRUSTS
    trust_prior: tuple[float, ...] = TRUST_PRIOR
    listen: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.acquisition, str) and self.acquisition != PAREGO:
            raise InputDataError(
                f'acquisition must be a function or "{PAREGO}", got {self.acquisition!r}.'
            )
        if not all(0 <= trust <= 10 for trust in self.trusts) or self.trusts[:1] != (0.0,):
            raise InputDataError(
                f"trusts must be numbers in [0, 10], the first of them 0, got {self.trusts}."
            )
        right = len(self.trust_prior) == len(self.trusts) and all(p > 0 for p in self.trust_prior)
        if not right or not math.isclose(sum(self.trust_prior), 1.0, abs_tol=1e-6):
            raise InputDataError(
                f"trust_prior must be {len(self.trusts)} positive numbers that sum to one, got "
                f"{self.trust_prior}."
            )

    @property
    def settings(self) -> str:
        """What determines its points, in words that are the same in every process."""
        factory = self.acquisition
        name = None if factory is None else str(factory)
        if factory is not None and not isinstance(
            factory, str
        ):  # a partial or an instance has no name of its own
            named = factory if hasattr(factory, "__qualname__") else type(factory)
            name = f"{named.__module__}.{named.__qualname__}"
        return repr((name, self.warp, self.trusts, self.trust_prior, self.listen))

    def check_space(self, space: SearchSpace) -> None:
        """Raise `InputDataError` for a space that the acquisition means nothing for."""
        if space.fidelity is not None and self.acquisition is not None:
            raise InputDataError(
                "An acquisition that is passed in does not choose the fidelity "
                f"({space.fidelity.name!r}): leave acquisition out, or use a space without one."
            )
        if self.acquisition == PAREGO and len(space.objectives) < 2:
            raise InputDataError(
                f'acquisition="{PAREGO}" is for several objectives, this space has one: leave it '
                "out."
            )

    def log_warp(self, space: SearchSpace) -> LogWarp:
        """The scale on which the own model sees inputs."""
        shared = space.shared
        return LogWarp(shared.log_offsets if self.warp else torch.zeros(shared.dim).double())

    # -------------------------------------------------------------- what it says

    def message(
        self,
        space: SearchSpace,
        feature_map: FeatureMap,
        X: Tensor,
        Y: Tensor,
        *,
        Yvar: Tensor | None = None,
    ) -> Tensor | None:
        """The own posterior means on the own standardised scales; None without any.

        Args:
            space: The map of inputs.
            feature_map: The shared basis.
            X: Own points, `n x d`.
            Y: Own outcomes, `n x m`, larger is better.
            Yvar: Their known variances; None if the models are to find one for each outcome.

        Returns:
            `M` weights for each modelled outcome, one after the other.
        """
        alone = self._models(space, X, Y, None, Yvar) if _enough(space, X) else None
        return None if alone is None else torch.cat([_own_mean(one, feature_map) for one in alone])

    def report(
        self,
        space: SearchSpace,
        feature_map: FeatureMap,
        X: Tensor,
        Y: Tensor,
        advice: Heard,
        *,
        Yvar: Tensor | None = None,
    ) -> Tensor | None:
        """The message, and the weights of the trusts after own outcomes: `M + K` numbers.

        The last `K` are zero if the site has not compared trusts: without advice, or with a grid
        of its own. Of several outcomes as many for each of `space.modelled`, one after the other.

        Args:
            space: The map of inputs.
            feature_map: The shared basis.
            X: Own points, `n x d`.
            Y: Own outcomes, `n x m`, larger is better.
            advice: What others have said before.
            Yvar: As in `message`.
        """
        if not _enough(space, X):
            return None
        compares = self.listen and self.trusts == TRUSTS
        posteriors = self._models(space, X, Y, advice if compares else None, Yvar)
        if posteriors is None:
            return None
        parts = []
        for posterior in posteriors:
            found = torch.zeros(len(TRUSTS), dtype=torch.float64)
            if posterior.prior is not None:
                found = torch.from_numpy(posterior.weights)
            parts += [_own_mean(posterior, feature_map), found]
        return torch.cat(parts)

    def _models(
        self, space: SearchSpace, X: Tensor, Y: Tensor, advice: Heard, Yvar: Tensor | None
    ) -> tuple[EarnedPosterior, ...] | None:
        """The own models of each modelled outcome; None if one is beyond all scales."""
        modelled = space.modelled
        posteriors = []
        for column, one in zip(modelled, of_each(advice, len(modelled)), strict=True):
            y = Y[:, column : column + 1]
            noise = None if Yvar is None else Yvar[:, column : column + 1]
            heard = one if one is not None else (None, None)
            posterior = self._fitted(space, X, y, *heard, Yvar=noise)
            if posterior is None:
                return None
            posteriors.append(posterior)
        return tuple(posteriors)

    def _fitted(
        self,
        space: SearchSpace,
        X: Tensor,
        Y: Tensor,
        prior: PriorFunction | None,
        others: Tensor | None,
        *,
        Yvar: Tensor | None = None,
    ) -> EarnedPosterior | None:
        """The own models; None for outcomes beyond all scales."""
        reported = None if others is None or self.trusts != TRUSTS else others.numpy()
        pooled = pooled_trust_prior(self.trust_prior, reported)
        if space.fidelity is not None:
            return fit_over_fidelities(
                space,
                X,
                Y,
                prior,
                trusts=self.trusts,
                trust_prior=pooled,
                log_warp=self.log_warp(space),
            )
        try:
            return fit_earned(
                X,
                Y,
                prior,
                trusts=self.trusts,
                trust_prior=pooled,
                log_warp=self.log_warp(space),
                Yvar=Yvar,
            )
        except NumericalError as error:  # a site must not be stuck, nor others wait for it
            logger.warning("no model of %d observations: %s", len(X), error)
            return None

    # -------------------------------------------------------------- where it looks

    def point(
        self,
        space: SearchSpace,
        X: Tensor,
        Y: Tensor,
        advice: Heard,
        *,
        chosen: Tensor,
        candidates: Tensor | None,
        stream: Generator,
        failed: Tensor | None = None,
        Yvar: Tensor | None = None,
        room: float = math.inf,
    ) -> Tensor:
        """The next point, `1 x d`.

        Args:
            space: The map of inputs.
            X: Own points, `n x d`.
            Y: Own outcomes, `n x m`, larger is better.
            advice: What others say.
            chosen: Points that the same query has already, `k x d`.
            candidates: The only points that can be evaluated, `K x d`.
            stream: The site's own random numbers.
            failed: Points whose evaluation failed, `m x d`: none is asked again while another is
                left, and from two on the probability of success is modelled.
            Yvar: As in `message`.
            room: What is left of the budget; counts where there is a fidelity.
        """
        said = of_each(advice if self.listen else None, len(space.modelled))
        tried = torch.cat([X, chosen])
        failed = X[:0] if failed is None else failed.double()
        if space.fidelity is not None:  # a space with one outcome
            prior, others = (None, None) if said[0] is None else said[0]
            return self._over_fidelities(
                space, X, Y, prior, others, chosen, candidates, failed, room, stream
            )
        domain = self._domain(space, tried, candidates, failed)
        feasibility = self._feasibility(space, X, failed)
        prior = None if len(X) else first_prior(space, said, stream)
        if prior is not None:
            return maximize_prior(prior, domain, stream, apart=APART, feasibility=feasibility)
        if feasibility is not None and not len(X) and len(failed) % 2 == 0:
            # In turns with random points: what succeeds may be the middle, which is far from none.
            return maximize_feasibility(feasibility, domain, stream)
        posteriors = self._models(space, X, Y, said, Yvar) if len(X) else None
        if posteriors is None:
            return _anywhere(space, domain, stream)
        outcomes = [space.metrics[place] for place in space.modelled]
        if self.acquisition == PAREGO:
            outcomes, posteriors, said = self._scalarized(space, X, posteriors, said, stream)
        if len(chosen):
            posteriors = tuple(posterior.conditioned(chosen) for posterior in posteriors)
        if self.acquisition is not None and self.acquisition != PAREGO:
            return self._passed_in(space, posteriors, domain, feasibility, X, stream)
        chance = float(stream.uniform(1))  # in any case: no trust is then the site alone, exactly
        untested = [one is not None and one.trust is None for one in said]
        if any(untested) and not len(chosen):
            posteriors = tuple(
                posterior.only(posterior.drawn(chance)) if alone else posterior
                for posterior, alone in zip(posteriors, untested, strict=True)
            )
            plain = len(posteriors) == 1 and feasibility is None
            if plain and len(X) < MIN_OWN and posteriors[0].trust == 0:
                return _anywhere(space, domain, stream)  # about as a site alone begins
        improvement = self._improvement(
            outcomes, posteriors, _incumbents(space, tried), feasibility
        )
        return maximize_improvement(improvement, domain, stream)

    def _improvement(
        self,
        outcomes: Sequence[Outcome],
        posteriors: Sequence[EarnedPosterior],
        X: Tensor,
        feasibility: Feasibility | None,
    ) -> Improvement:
        """What is maximised, over tried points `n x d`."""
        if len(posteriors) == 1:
            return EarnedImprovement.of(posteriors[0], X, feasibility)
        objectives, references, limits = [], [], []
        for one, posterior in zip(outcomes, posteriors, strict=True):
            if one.role == "objective":
                objectives.append(posterior)
                references.append(_public(one, one.reference))
            else:
                bounds = _public(one, one.lower), _public(one, one.upper)
                limits.append(Limit.of(posterior, *bounds))
        return JointImprovement.of(
            objectives, limits, X, references=references, feasibility=feasibility
        )

    def _scalarized(
        self,
        space: SearchSpace,
        X: Tensor,
        posteriors: Sequence[EarnedPosterior],
        said: Sequence[Advice | None],
        stream: Generator,
    ) -> tuple[list[Outcome], tuple[EarnedPosterior, ...], tuple[Advice | None, ...]]:
        """Outcomes, models and advice with one sum in the place of all objectives (ParEGO).

        Args:
            space: The map of inputs.
            X: Own points, `n x d`.
            posteriors: Of each modelled outcome.
            said: What others say of each.
            stream: Of the weights.
        """
        outcomes = [space.metrics[place] for place in space.modelled]
        places = [k for k, one in enumerate(outcomes) if one.role == "objective"]
        shares = -stream.uniform(len(places)).clamp_min(1e-12).log()
        shares = shares / shares.sum()
        own = torch.stack([torch.from_numpy(posteriors[k].outcome.values) for k in places], dim=-1)
        heard_all = [one for one in (said[k] for k in places) if one is not None]
        advice = _summed(heard_all, shares) if len(heard_all) == len(places) else None
        y = chebyshev(own, shares).unsqueeze(-1)
        summed = self._fitted(space, X, y, *(advice if advice is not None else (None, None)))
        if summed is None:
            return outcomes, tuple(posteriors), tuple(said)
        rest = [k for k in range(len(outcomes)) if k not in places]
        return (
            [space.outcome, *(outcomes[k] for k in rest)],
            (summed, *(posteriors[k] for k in rest)),
            (advice, *(said[k] for k in rest)),
        )

    def _over_fidelities(
        self,
        space: SearchSpace,
        X: Tensor,
        Y: Tensor,
        prior: PriorFunction | None,
        others: Tensor | None,
        chosen: Tensor,
        candidates: Tensor | None,
        failed: Tensor,
        room: float,
        stream: Generator,
    ) -> Tensor:
        """The next point where there is a fidelity."""
        if prior is not None and not len(X):
            return first_advised(space, prior, chosen, candidates, failed, room, stream)
        posterior = self._fitted(space, X, Y, prior, others) if len(X) else None
        if posterior is None:
            warp = self.log_warp(space)
            return likely(
                space, failed=failed, candidates=candidates, log_warp=warp, room=room, stream=stream
            )
        if prior is not None and others is None and not len(chosen):
            posterior = posterior.only(posterior.drawn(float(stream.uniform(1))))
        return gainful(
            space,
            posterior,
            X,
            chosen=chosen,
            candidates=candidates,
            failed=failed,
            room=room,
            stream=stream,
        )

    def _feasibility(self, space: SearchSpace, X: Tensor, failed: Tensor) -> Feasibility | None:
        """What succeeds; None while failures do not repeat."""
        return feasibility_of(X, failed, self.log_warp(space)) if len(failed) else None

    def _passed_in(
        self,
        space: SearchSpace,
        posteriors: tuple[EarnedPosterior, ...],
        domain: Domain,
        feasibility: Feasibility | None,
        X: Tensor,
        stream: Generator,
    ) -> Tensor:
        """The best point by an acquisition function of BoTorch."""
        assert self.acquisition is not None
        assert not isinstance(self.acquisition, str)
        models = [one.model(one.drawn(float(stream.uniform(1)))) for one in posteriors]
        model = models[0] if len(models) == 1 else ModelListGP(*models)
        acquisition = self.acquisition(model, domain.tried)
        if feasibility is not None:
            acquisition = FeasibleAcquisition(acquisition, feasibility, X)
        point, _ = maximize(
            acquisition,
            space.dim,
            generator=stream,
            candidates=domain.candidates,
            log_warp=self.log_warp(space),
            tried=domain.tried,
            min_distance=1e-4,
            failed=domain.failed,
            snap=domain.snap,
            feasible=domain.feasible,
            num_raw=512,
            num_restarts=10,
        )
        return point if domain.snap is None else domain.snap(point)

    def _domain(
        self,
        space: SearchSpace,
        tried: Tensor,
        candidates: Tensor | None,
        failed: Tensor,
    ) -> Domain:
        lower, upper = space.bounds.double()
        if candidates is None:
            found = space.feasible_set
            known = found if found.constrained or found.blocks else None
            return Domain(lower, upper, tried, None, space.snap, failed, known)
        candidates = untried(candidates, failed)
        return Domain(lower, upper, tried, untried(candidates, tried), failed=failed)


def _anywhere(space: SearchSpace, domain: Domain, stream: Generator) -> Tensor:
    """A random point of a domain, `1 x d`; neither a failed nor a tried one if possible."""
    known = domain.tried if domain.failed is None else torch.cat([domain.failed, domain.tried])
    point = random_point(space, domain.candidates, stream, known)
    return point if domain.candidates is not None else space.snap(point)


def _enough(space: SearchSpace, X: Tensor) -> bool:
    """Whether a site has what a message needs.

    So many configurations, at whatever fidelity, one of them at the target: what is extrapolated
    from low fidelities alone misleads the others.
    """
    if space.fidelity is None:
        return len(X) >= MIN_OWN
    at_target = bool((space.fidelities(X) == 1).any())
    return at_target and num_configurations(space, X) >= MIN_OWN


def _incumbents(space: SearchSpace, tried: Tensor) -> Tensor:
    """The points over which an improvement counts: given ones may violate constraints."""
    if not space.feasible_set.constrained:
        return tried
    allowed = tried[space.feasible_set.contains(tried)]
    return allowed if len(allowed) else tried


# ------------------------------------------------------------------ what arrives


@lru_cache(maxsize=16)
def default_feature_map(space: SearchSpace, num_features: int = NUM_FEATURES) -> FeatureMap:
    """The shared basis: the leading eigenfunctions of a public kernel on `reference_points`.

    The kernel is a sum of one of each input alone and one of all together, all of the same
    variance: without functions of single inputs, random features and those of a product have
    nothing that says whether the optimum of an input lies inside. Beyond `MOST_INPUTS` inputs they
    are random features of a kernel of all.
    Parameters that act by their ratio are seen on a logarithmic scale, whatever scale the sites
    search on.

    Args:
        space: The map of inputs.
        num_features: How many at most; three for each input and one more, if that is more.
    """
    dim, stream = space.dim, generator(0, "transfer")
    if dim > MOST_INPUTS:
        kernel = StationaryKernel(math.inf, [LENGTHSCALE * math.sqrt(dim)] * dim)
        phi: FeatureMap = RandomFourierFeatures.draw(kernel, num_features, generator=stream)
    else:
        count = max(num_features, 3 * dim + 1)
        scale = LENGTHSCALE * math.sqrt(dim)
        base = _sum_of_kernels(dim, 1.0, scale, num_random=NUM_RANDOM, stream=stream)
        phi = _leading(base, count, tol=TOLERANCE)
    return WarpedFeatures.around(phi, space.log_offsets)


@lru_cache(maxsize=16)
def default_private_features(
    space: SearchSpace, *, num_features: int | None = None, lengthscale: float | None = None
) -> FeatureMap:
    """A small public basis: every feature costs noise.

    The leading eigenfunctions of a smooth public kernel on `reference_points`, on the scale that is
    searched on. From `SEVERAL_INPUTS` inputs on the kernel is a sum: one of each input alone, and
    with less variance one of all. In that of a product functions of two inputs come before squares,
    and without its square no input has an optimum between its bounds.

    Args:
        space: The search space.
        num_features: Its size `M`; default 20, or two for each input and one more.
        lengthscale: Of a product kernel, in the unit cube; its default grows with the dimension.
    """
    dim = space.dim
    if num_features is None:
        num_features = max(FEW_FEATURES, 2 * dim + 1)
    scale = FEW_LENGTHSCALE * (dim / 2) ** 0.5 if lengthscale is None else lengthscale
    kernel = StationaryKernel(math.inf, [scale] * dim)
    stream = generator(0, "private features")
    base: FeatureMap
    if dim < SEVERAL_INPUTS:
        base = QuadratureFourierFeatures.from_kernel(kernel, space.bounds, tol=1e-3)
    elif lengthscale is None:
        base = _sum_of_kernels(dim, TOGETHER, scale, num_random=1024, stream=stream)
    else:
        base = RandomFourierFeatures.draw(kernel, 1024, generator=stream)
    return _leading(base, num_features)


def _sum_of_kernels(
    dim: int, together: float, lengthscale: float, *, num_random: int, stream: Generator
) -> FeatureMap:
    """Features of a kernel of each input alone plus one of all, of variance one in all.

    Args:
        dim: The number of inputs.
        together: The variance of the kernel of all inputs, over that of each alone.
        lengthscale: Of the kernel of all inputs.
        num_random: Random features that stand for it.
        stream: Of these.
    """
    share = 1 / (dim + together)
    alone = StationaryKernel(math.inf, [ALONE_LENGTHSCALE], share)
    unit = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    one = QuadratureFourierFeatures.from_kernel(alone, unit, tol=1e-3)
    kernel = StationaryKernel(math.inf, [lengthscale] * dim, together * share)
    every = RandomFourierFeatures.draw(kernel, num_random, generator=stream)
    groups = [range(j, j + 1) for j in range(dim)]
    return AdditiveFeatures([*[one] * dim, every], [*groups, range(dim)])


def _leading(base: FeatureMap, count: int, tol: float | None = None) -> KLFeatures:
    """The leading eigenfunctions of a map on public points, at most `count`."""
    reference = reference_points(base.input_dim, max(NUM_REFERENCE, 2 * count))
    count = min(count, base.num_features)
    return KLFeatures.from_map(base, reference, num_features=count, tol=tol)


def reference_points(dim: int, count: int = NUM_REFERENCE) -> Tensor:
    """Public points that represent the cube: the first of Sobol's sequence."""
    return torch.quasirandom.SobolEngine(dim, scramble=False).draw(count, dtype=torch.float64)


class Advice(NamedTuple):
    """What others say.

    Attributes:
        prior: Their functions as one.
        trust: The sum of the weights that trusts have at those who have compared, `K`; None if
            nobody does, as after a release or from sites that are done.
    """

    prior: PriorFunction
    trust: Tensor | None = None

    @classmethod
    def of(cls, prior: PriorFunction, trust: Tensor, *, made: int, now: int) -> Advice:
        """What was said after a round; if it is old and compares nothing, its senders are done.

        Args:
            prior: The functions as one.
            trust: The sum of the weights that trusts have, `K` or none.
            made: After which round the newest of it was said.
            now: The last round that is over.
        """
        done = made < now and not bool(trust.any())
        return cls(prior, None if done or not len(trust) else trust)


# What others say: of several outcomes one for each that is modelled, None where nothing is said.
Heard: TypeAlias = Advice | Sequence[Advice | None] | None


def of_each(advice: Heard, count: int) -> tuple[Advice | None, ...]:
    """What others say of each modelled outcome.

    Args:
        advice: What they say.
        count: How many outcomes are modelled.
    """
    if advice is None:
        return (None,) * count
    return (advice,) if isinstance(advice, Advice) else tuple(advice)


def heard(said: Sequence[Advice | None]) -> Heard:
    """What others say of each modelled outcome; None where they say nothing of any.

    Args:
        said: Of each outcome.
    """
    if all(one is None for one in said):
        return None
    return said[0] if len(said) == 1 else tuple(said)


def first_prior(
    space: SearchSpace, said: tuple[Advice | None, ...], stream: Generator
) -> PriorFunction | None:
    """Where a site without observations begins: what is said of all outcomes, as one function.

    Objectives have random weights, so that several sites look at different ends of their fronts. A
    bounded outcome counts with the direction of its bound.

    Args:
        space: The outcomes.
        said: What others say of each modelled one.
        stream: Of the weights, which one objective alone does not need.
    """
    if len(said) == 1:
        return None if said[0] is None else said[0].prior
    shares = -stream.uniform(len(said)).clamp_min(1e-12).log()
    total: Tensor | None = None
    for place, one, share in zip(space.modelled, said, shares, strict=True):
        metric = space.metrics[place]
        weight = float(share)
        if metric.role == "constraint":
            weight = float(metric.lower is not None) - float(metric.upper is not None)
        if one is not None and weight:
            part = weight * one.prior.weights
            total = part if total is None else total + part
    if total is None:
        return None
    phi = next(one.prior.feature_map for one in said if one is not None)
    return PriorFunction.of_weights(phi, total)


def chebyshev(Z: Tensor, shares: Tensor) -> Tensor:
    """The augmented Chebyshev sum of `n x J` values to be maximised, `n`.

    Each objective is measured from its best value, in units of its range.

    Args:
        Z: Values of the objectives.
        shares: Their weights, `J`.
    """
    best, least = Z.amax(dim=0), Z.amin(dim=0)
    gaps = shares * (Z - best) / (best - least).clamp_min(1e-12)
    return gaps.amin(dim=-1) + AUGMENTED * gaps.sum(dim=-1)


def _summed(said: Sequence[Advice], shares: Tensor) -> Advice | None:
    """What others say of the Chebyshev sum of all objectives."""
    phi = said[0].prior.feature_map

    def together(reference: Tensor) -> Any:
        values = torch.stack([one.prior(reference) for one in said], dim=-1)
        return chebyshev(values, shares).numpy()

    prior = PriorFunction.of_weights(phi, project(together, phi))
    trusts = [one.trust for one in said if one.trust is not None]
    if prior is None:
        return None
    return Advice(prior, torch.stack(trusts).mean(dim=0) if len(trusts) == len(said) else None)


def _public(outcome: Outcome, value: float | None) -> float | None:
    """A measured value on the public scale."""
    return None if value is None else float(outcome.to_public(torch.tensor(value)))


def report_size(feature_map: FeatureMap) -> int:
    """How many numbers the report of an outcome has: a message, and a weight for each trust."""
    return feature_map.num_features + len(TRUSTS)


def _own_mean(posterior: EarnedPosterior, feature_map: FeatureMap) -> Tensor:
    """The mean of the model that trusts nothing, projected on the shared basis."""
    alone = posterior.components[0]
    return project(lambda reference: alone.predict(posterior.warp(reference))[0], feature_map)


def pack_report(feature_map: FeatureMap, report: Tensor | None, num_modelled: int = 1) -> Tensor:
    """What a site adds to a sum: its report, bounded, and the number 1.

    Args:
        feature_map: The shared basis.
        report: As `TransferSearch.report` makes it; None for a site that has nothing to say:
            zeros, which do not count.
        num_modelled: How many outcomes are modelled.
    """
    size, M = report_size(feature_map), feature_map.num_features
    if report is None or not bool(torch.isfinite(report).all()):
        return torch.zeros(num_modelled * size + 1, dtype=torch.float64)
    blocks = report.reshape(num_modelled, size)
    weights = bounded(feature_map, blocks[:, :M])
    return torch.cat([torch.cat([weights, blocks[:, M:]], dim=-1).flatten(), report.new_ones(1)])


class Others(NamedTuple):
    """What is left of a sum of packed reports of one outcome without the own one.

    Attributes:
        weights: The sum of the others' weights, `M`.
        trust: The sum of the weights of their trusts, `K`.
        num_sites: How many of them have spoken; 0 if the sum says nothing that can be read.
    """

    weights: Tensor
    trust: Tensor
    num_sites: int


def mean_trust(reports: Iterable[Tensor]) -> float | None:
    """The mean trust of reports of one outcome each, as far as they have compared trusts.

    Args:
        reports: Vectors that end with the weights of the trusts, `K`.
    """
    weights = [report[-len(TRUSTS) :] for report in reports]
    found = [float(w @ w.new_tensor(TRUSTS)) for w in weights if float(w.sum()) > 0]
    return sum(found) / len(found) if found else None


def split(packed: Tensor, num_modelled: int) -> tuple[Tensor, ...]:
    """A packed report of several outcomes, or a sum of such, as one of each.

    Args:
        packed: The report.
        num_modelled: How many outcomes are modelled.
    """
    return tuple(torch.cat([block, packed[-1:]]) for block in packed[:-1].chunk(num_modelled))


def unpack_sum(total: Tensor, own: Tensor | None) -> Others:
    """What others have said of an outcome, from the sum of packed reports.

    Args:
        total: The sum.
        own: What oneself has put into it, exactly; None if nothing.
    """
    others = total if own is None else total - own
    count, M = float(others[-1]), len(others) - len(TRUSTS) - 1
    whole = math.isfinite(count) and count >= 0 and count == round(count)
    return Others(others[:M], others[M:-1], round(count) if whole else 0)


def prior_of_sum(feature_map: FeatureMap, total: Tensor, count: int) -> PriorFunction | None:
    """What the sum of some sites' messages says; None if it says nothing.

    Args:
        feature_map: The shared basis.
        total: The sum of messages, without the own one.
        count: Of how many.
    """
    if count < 1 or not bool(torch.isfinite(total).all()):
        return None
    return PriorFunction.of_weights(feature_map, total / count)


def bounded(feature_map: FeatureMap, weights: Tensor) -> Tensor:
    """Weight vectors `N x M`, none of which varies more over the cube than a site's own can.

    A site's own posterior mean on its standardised scale has a deviation of about one at most: a
    site that sends larger values gets no larger weight.
    """
    deviation = (reference_features(feature_map) @ weights.mT).std(dim=0)
    return weights / (deviation / MAX_SPREAD).clamp_min(1.0).unsqueeze(-1)
